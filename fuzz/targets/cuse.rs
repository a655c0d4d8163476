//! Messages of the kernel to a CUSE device, with ioctls of a hostile caller: any bytes, and structures whose lengths fit.
//!
//! For any input, no code panics. Every reply has the length that its header names and is no answer to another request. A round
//! asks for the structure and for one range of bounded length. Only commands that the policy allows reach the owner, with data of
//! at least a page, and at least the length that the command transfers; its answer fills the room that the kernel has for it.
#![no_main]

use aryk_cuse::{Access, DATA_MAX, Data, Node, PAGE, Received, Request, policy, receive};
use libfuzzer_sys::fuzz_target;

const HEADER: usize = 40;
const IOCTL: usize = 32;
/// The ioctls with a structure.
const NUMBERS: [(u32, usize); 2] = [(0xc048_4e41, 72), (0xc050_4e47, 80)];

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn check(message: &[u8], node: Node) -> Received {
    let received = receive(message, node);
    match &received {
        Received::Reply(reply) => {
            assert_eq!(word(reply, 0) as usize, reply.len());
            assert_eq!(reply[8..16], message[8..16]);
            assert!((-511..=0).contains(&(word(reply, 4) as i32)));
            assert!(reply.len() <= 16 + 16 + 4 * 16);
        }
        Received::Serve { request: Request::Admin(command), shape, .. } => {
            assert!(policy::verdict(command.opcode, command.cdw10_15[0]).is_allowed(node.access));
            assert!(shape.data <= DATA_MAX && matches!(shape.result, 4 | 8));
            let direction = match &command.data {
                Data::None => 0,
                Data::ToController(bytes) => {
                    assert!((PAGE..=DATA_MAX).contains(&bytes.len()));
                    1
                }
                Data::FromController(len) => {
                    assert!((PAGE..=DATA_MAX).contains(len) && shape.data <= *len);
                    let log_dwords = (command.cdw10_15[0] >> 16 | command.cdw10_15[1] << 16) as usize;
                    assert!(command.opcode != 2 || (log_dwords + 1) * 4 <= *len);
                    2
                }
            };
            assert_eq!(command.opcode & 3, direction);
        }
        Received::Serve { request: Request::Reset, .. } => assert_eq!(node.access, Access::Change),
        Received::Serve { .. } | Received::Nothing | Received::Interrupt(_) => {}
    }
    received
}

/// An ioctl's message with the right lengths.
fn ioctl(number: u32, argument: u64, input: &[u8], room: u32) -> Vec<u8> {
    let mut message = vec![0; HEADER + IOCTL];
    message[..4].copy_from_slice(&((HEADER + IOCTL + input.len()) as u32).to_le_bytes());
    message[4..8].copy_from_slice(&39_u32.to_le_bytes());
    message[8..16].copy_from_slice(&7_u64.to_le_bytes());
    message[52..56].copy_from_slice(&number.to_le_bytes());
    message[56..64].copy_from_slice(&argument.to_le_bytes());
    message[64..68].copy_from_slice(&(input.len() as u32).to_le_bytes());
    message[68..72].copy_from_slice(&room.to_le_bytes());
    message.extend_from_slice(input);
    message
}

/// Plays the rounds of an ioctl as the kernel does, with a caller whose structure may change after each round.
fn rounds(node: Node, number: u32, argument: u64, structures: &[u8], len: usize) {
    let (mut input, mut room) = (Vec::new(), 0);
    let mut versions = structures.chunks(len);
    let mut structure = vec![0; len];
    for count in 1.. {
        assert!(count <= 3, "a fourth round");
        let reply = match check(&ioctl(number, argument, &input, room), node) {
            Received::Reply(reply) => reply,
            Received::Serve { shape, .. } => return assert_eq!(shape.result + shape.data, room as usize),
            other => panic!("{other:?}"),
        };
        // FUSE_IOCTL_RETRY.
        if word(&reply, 4) != 0 || word(&reply, 20) & 4 == 0 {
            return;
        }
        let (ins, outs) = (word(&reply, 24) as usize, word(&reply, 28) as usize);
        let ranges: Vec<u64> = (0..ins + outs).map(|index| long(&reply, 40 + 16 * index)).collect();
        assert_eq!((long(&reply, 32), ranges[0]), (argument, len as u64));
        assert!(ins <= 2 && outs <= 2 && ranges.iter().all(|len| *len <= DATA_MAX as u64));
        if let Some(version) = versions.next() {
            structure[..version.len()].copy_from_slice(version);
        }
        input = structure.clone();
        input.resize(ranges[..ins].iter().sum::<u64>() as usize, 0xa5);
        room = ranges[ins..].iter().sum::<u64>() as u32;
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&[selector, high], rest)) = data.split_first_chunk() else { return };
    let access = if selector & 1 == 0 { Access::Read } else { Access::Change };
    let node = Node { nsid: (selector & 2 != 0).then_some(u32::from(high) << 24 | 1), access };
    if selector & 4 == 0 {
        let _ = check(rest, node);
        // The same bytes with a right length.
        if rest.len() >= HEADER {
            let mut message = rest.to_vec();
            message[..4].copy_from_slice(&(rest.len() as u32).to_le_bytes());
            let _ = check(&message, node);
        }
        return;
    }
    let (number, len) = NUMBERS[usize::from(selector >> 3 & 1)];
    let argument = if selector & 16 == 0 { 0x7fff_0000 } else { u64::MAX - u64::from(high) };
    rounds(node, number, argument, rest, len);
});
