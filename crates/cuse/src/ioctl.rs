//! Linux's NVMe ioctls: their structures, and the rounds in which the kernel copies a caller's memory. Linux,
//! include/uapi/linux/nvme_ioctl.h. Pure.
//!
//! # Rounds
//! 1. The kernel sends the ioctl's number and argument; the reply asks for the structure at the argument.
//! 2. The kernel sends the structure; the reply asks for it again, with the data that the command needs, and for room for the
//!    result and the data that the command returns.
//! 3. The kernel sends all that, and the command is served.
//!
//! The caller can change its memory between two rounds, so each round checks the structure from the start, and the third round
//! serves the structure that it received. If the lengths of the second round no longer fit, the ioctl fails: there is no fourth
//! round.

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::policy::{self, Access, Direction};
use crate::request::{AdminCommand, DATA_MAX, Data, PAGE, Request};
use crate::session::Node;
use crate::wire::{Ioctl, Iovec};

/// Numbers of the ioctls: direction, length of the structure, `'N'`, number.
pub(crate) mod number {
    pub(crate) const ID: u32 = 0x4e40;
    pub(crate) const ADMIN_CMD: u32 = 0xc048_4e41;
    pub(crate) const SUBMIT_IO: u32 = 0x4030_4e42;
    /// SUBMIT_IO of a 32-bit process.
    pub(crate) const SUBMIT_IO_32: u32 = 0x402c_4e42;
    pub(crate) const IO_CMD: u32 = 0xc048_4e43;
    pub(crate) const RESET: u32 = 0x4e44;
    pub(crate) const SUBSYS_RESET: u32 = 0x4e45;
    pub(crate) const RESCAN: u32 = 0x4e46;
    pub(crate) const ADMIN64_CMD: u32 = 0xc050_4e47;
    pub(crate) const IO64_CMD: u32 = 0xc050_4e48;
    pub(crate) const IO64_CMD_VEC: u32 = 0xc050_4e49;
}

/// What both forms of the structure begin with. The member `timeout_ms` follows: it has no effect, because the owner's own
/// deadlines apply, and a caller must not choose when a shared controller is reset.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Passthru {
    pub opcode: u8,
    pub flags: u8,
    pub rsvd1: u16,
    pub nsid: u32,
    pub cdw2: u32,
    pub cdw3: u32,
    pub metadata: u64,
    pub addr: u64,
    pub metadata_len: u32,
    pub data_len: u32,
    pub cdw10_15: [u32; 6],
}

/// One of the two forms of the structure.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// The length of the structure.
    len: u64,
    /// The offset and length of `result`.
    result: (u64, usize),
}

const FORM_32: Form = Form { len: 72, result: (68, 4) };
const FORM_64: Form = Form { len: 80, result: (72, 8) };

/// The bytes that an ioctl returns to its caller's memory: the result, then the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of the structure's member `result`: 0, 4 or 8.
    pub result: usize,
    /// Bytes of data, at most [`DATA_MAX`].
    pub data: usize,
}

/// The outcome of a round.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// Another round, with these bytes of the caller, and room for those.
    Again { input: Vec<Iovec>, output: Vec<Iovec> },
    /// The ioctl returns.
    Returned(i32),
    /// The ioctl fails.
    Failed(Errno),
    /// The owner serves it.
    Serve(Request, Shape),
}

/// Decides a round.
pub(crate) fn decide(ioctl: &Ioctl<'_>, node: Node) -> Round {
    match ioctl.command {
        number::ID => match node.nsid.map(i32::try_from) {
            Some(Ok(nsid)) => Round::Returned(nsid),
            Some(Err(_)) => Round::Failed(Errno::OVERFLOW),
            None => Round::Failed(Errno::NOTTY),
        },
        number::ADMIN_CMD => admin(ioctl, FORM_32, node.access).unwrap_or_else(Round::Failed),
        number::ADMIN64_CMD => admin(ioctl, FORM_64, node.access).unwrap_or_else(Round::Failed),
        number::SUBMIT_IO
        | number::SUBMIT_IO_32
        | number::IO_CMD
        | number::IO64_CMD
        | number::IO64_CMD_VEC => Round::Failed(Errno::PERM),
        number::RESET if node.access == Access::Change => Round::Serve(Request::Reset, Shape::default()),
        number::RESET => Round::Failed(Errno::PERM),
        number::SUBSYS_RESET => Round::Failed(Errno::OPNOTSUPP),
        number::RESCAN => Round::Serve(Request::Rescan, Shape::default()),
        _ => Round::Failed(Errno::NOTTY),
    }
}

/// A round of an admin command.
fn admin(ioctl: &Ioctl<'_>, form: Form, access: Access) -> Result<Round, Errno> {
    let whole = Iovec { base: ioctl.argument, len: form.len };
    let given = (ioctl.input.len() as u64, u64::from(ioctl.room));
    if given == (0, 0) {
        return Ok(Round::Again { input: vec![whole], output: Vec::new() });
    }
    let (structure, data) = ioctl.input.split_at_checked(form.len as usize).ok_or(Errno::INVAL)?;
    let (fields, _) = Passthru::read_from_prefix(structure).map_err(|_| Errno::INVAL)?;
    let direction = check(&fields, access)?;
    let (result_offset, result_len) = form.result;
    let result_base = ioctl.argument.checked_add(result_offset).ok_or(Errno::FAULT)?;
    let data_len = fields.data_len as usize;
    let memory = Iovec { base: fields.addr, len: fields.data_len.into() };
    let mut input = vec![whole];
    let mut output = vec![Iovec { base: result_base, len: result_len as u64 }];
    let mut shape = Shape { result: result_len, data: 0 };
    if data_len > 0 {
        match direction {
            Direction::None => return Err(Errno::INVAL),
            Direction::ToController => input.push(memory),
            Direction::FromController => {
                output.push(memory);
                shape.data = data_len;
            }
        }
    }
    let total = |list: &[Iovec]| list.iter().map(|iovec| iovec.len).sum::<u64>();
    if given == (total(&input), total(&output)) {
        return Ok(Round::Serve(Request::Admin(command(&fields, direction, data)), shape));
    }
    if given == (form.len, 0) { Ok(Round::Again { input, output }) } else { Err(Errno::INVAL) }
}

/// Checks the fields of a command, and returns the direction of its data.
fn check(fields: &Passthru, access: Access) -> Result<Direction, Errno> {
    if !policy::verdict(fields.opcode, fields.cdw10_15[0]).is_allowed(access) {
        return Err(Errno::PERM);
    }
    let is_plain = fields.flags == 0
        && fields.rsvd1 == 0
        && fields.cdw2 == 0
        && fields.cdw3 == 0
        && fields.metadata == 0
        && fields.metadata_len == 0;
    if !is_plain {
        return Err(Errno::INVAL);
    }
    let direction = policy::direction(fields.opcode).ok_or(Errno::INVAL)?;
    let transfer = policy::transfer(fields.opcode, &fields.cdw10_15);
    if fields.data_len as usize > DATA_MAX || transfer > DATA_MAX as u64 {
        return Err(Errno::MSGSIZE);
    }
    // The controller would read more than the caller gives.
    if direction == Direction::ToController && transfer > fields.data_len.into() {
        return Err(Errno::INVAL);
    }
    Ok(direction)
}

/// The command for the owner.
fn command(fields: &Passthru, direction: Direction, data: &[u8]) -> AdminCommand {
    let data = match direction {
        Direction::None => Data::None,
        Direction::FromController => {
            let transfer = policy::transfer(fields.opcode, &fields.cdw10_15) as usize;
            Data::FromController(PAGE.max(transfer).max(fields.data_len as usize))
        }
        Direction::ToController => {
            let mut bytes = data.to_vec();
            bytes.resize(PAGE.max(data.len()), 0);
            Data::ToController(bytes)
        }
    };
    let mut cdw10_15 = fields.cdw10_15;
    policy::keep_events(fields.opcode, &mut cdw10_15);
    AdminCommand { opcode: fields.opcode, nsid: fields.nsid, cdw10_15, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARGUMENT: u64 = 0x7fff_0000;
    const ADDRESS: u64 = 0x5555_0000;
    const READER: Node = Node { nsid: None, access: Access::Read };
    const CHANGER: Node = Node { nsid: None, access: Access::Change };

    fn passthru(opcode: u8, data_len: u32) -> Passthru {
        Passthru { opcode, nsid: 1, addr: ADDRESS, data_len, ..Passthru::default() }
    }

    fn bytes(fields: &Passthru, len: usize) -> Vec<u8> {
        let mut bytes = fields.as_bytes().to_vec();
        bytes.resize(len, 0);
        bytes
    }

    fn round(command: u32, input: &[u8], room: u32, node: Node) -> Round {
        decide(&Ioctl { command, argument: ARGUMENT, input, room }, node)
    }

    /// The second round of an admin command.
    fn second(fields: &Passthru, node: Node) -> Round {
        round(number::ADMIN_CMD, &bytes(fields, 72), 0, node)
    }

    #[test]
    fn the_structure_has_the_kernels_layout() {
        assert_eq!(size_of::<Passthru>(), 64);
        assert_eq!(number::ADMIN_CMD, 3 << 30 | 72 << 16 | u32::from(b'N') << 8 | 0x41);
        assert_eq!(number::ADMIN64_CMD, 3 << 30 | 80 << 16 | u32::from(b'N') << 8 | 0x47);
    }

    #[test]
    fn a_command_that_reads_takes_three_rounds() {
        for (number, len, result) in [(number::ADMIN_CMD, 72, 4), (number::ADMIN64_CMD, 80, 8)] {
            let whole = Iovec { base: ARGUMENT, len };
            let first = round(number, &[], 0, READER);
            assert_eq!(first, Round::Again { input: vec![whole], output: Vec::new() });
            let structure = bytes(&passthru(0x06, 4096), len as usize);
            let offset = if result == 4 { 68 } else { 72 };
            let output =
                vec![Iovec { base: ARGUMENT + offset, len: result }, Iovec { base: ADDRESS, len: 4096 }];
            assert_eq!(round(number, &structure, 0, READER), Round::Again { input: vec![whole], output });
            let third = round(number, &structure, 4096 + result as u32, READER);
            let command =
                AdminCommand { opcode: 6, nsid: 1, cdw10_15: [0; 6], data: Data::FromController(PAGE) };
            let shape = Shape { result: result as usize, data: 4096 };
            assert_eq!(third, Round::Serve(Request::Admin(command), shape));
        }
    }

    #[test]
    fn a_command_that_writes_receives_the_callers_bytes_and_zeroes() {
        let fields = passthru(0x81, 3);
        let mut fields = Passthru { cdw10_15: [0, 3, 0, 0, 0, 0], ..fields };
        let Round::Again { input, output } = second(&fields, CHANGER) else { panic!("not allowed") };
        assert_eq!((input[1], output.len()), (Iovec { base: ADDRESS, len: 3 }, 1));
        let all = [bytes(&fields, 72), vec![7, 8, 9]].concat();
        let Round::Serve(Request::Admin(command), shape) = round(number::ADMIN_CMD, &all, 4, CHANGER) else {
            panic!("not served")
        };
        let Data::ToController(page) = command.data else { panic!("no data") };
        assert_eq!((page.len(), &page[..4], shape.data), (PAGE, &[7, 8, 9, 0][..], 0));
        // The controller would read a fourth byte.
        fields.cdw10_15[1] = 4;
        assert_eq!(second(&fields, CHANGER), Round::Failed(Errno::INVAL));
    }

    #[test]
    fn a_structure_that_changes_between_rounds_fails() {
        let asked = passthru(0x06, 4096);
        let changed = bytes(&passthru(0x06, 512), 72);
        assert_eq!(round(number::ADMIN_CMD, &changed, 4100, READER), Round::Failed(Errno::INVAL));
        let refused = bytes(&Passthru { opcode: 0x80, ..asked }, 72);
        assert_eq!(round(number::ADMIN_CMD, &refused, 4100, READER), Round::Failed(Errno::PERM));
        assert_eq!(round(number::ADMIN_CMD, &[0; 71], 0, READER), Round::Failed(Errno::INVAL));
        assert_eq!(round(number::ADMIN_CMD, &[], 4, READER), Round::Failed(Errno::INVAL));
    }

    #[test]
    fn hostile_fields_are_refused_by_name() {
        let plain = passthru(0x06, 4096);
        for (fields, errno) in [
            (Passthru { data_len: DATA_MAX as u32 + 1, ..plain }, Errno::MSGSIZE),
            (Passthru { data_len: u32::MAX, ..plain }, Errno::MSGSIZE),
            (Passthru { opcode: 0x02, cdw10_15: [0xffff << 16, 0, 0, 0, 0, 0], ..plain }, Errno::MSGSIZE),
            (Passthru { metadata_len: 1, ..plain }, Errno::INVAL),
            (Passthru { metadata: 1, ..plain }, Errno::INVAL),
            (Passthru { flags: 0x40, ..plain }, Errno::INVAL),
            (Passthru { cdw3: 1, ..plain }, Errno::INVAL),
            (Passthru { opcode: 0x14, ..plain }, Errno::PERM),
            (Passthru { opcode: 0x01, ..plain }, Errno::PERM),
            (Passthru { opcode: 0x80, ..plain }, Errno::PERM),
        ] {
            assert_eq!(second(&fields, READER), Round::Failed(errno), "{fields:?}");
        }
        let test = Passthru { opcode: 0x14, data_len: 1, ..plain };
        assert_eq!(second(&test, CHANGER), Round::Failed(Errno::INVAL), "a command without data");
        // All four bytes of the result lie beyond the address space.
        let far =
            Ioctl { command: number::ADMIN_CMD, argument: u64::MAX - 8, input: &bytes(&plain, 72), room: 0 };
        assert_eq!(decide(&far, READER), Round::Failed(Errno::FAULT));
    }

    #[test]
    fn the_command_decides_how_much_the_controller_may_write() {
        let served = |fields: &Passthru| {
            let third = round(number::ADMIN_CMD, &bytes(fields, 72), 4 + fields.data_len, READER);
            let Round::Serve(Request::Admin(command), shape) = third else { panic!("{third:?}") };
            (command.data, shape.data)
        };
        // A log of 8 KiB, of which the caller wants 16 bytes, or 12 KiB.
        let log = Passthru { cdw10_15: [2047 << 16 | 1, 0, 0, 0, 0, 0], ..passthru(0x02, 16) };
        assert_eq!(served(&log), (Data::FromController(8192), 16));
        let longer = Passthru { data_len: 12_288, ..log };
        assert_eq!(served(&longer), (Data::FromController(12_288), 12_288));
        assert_eq!(served(&passthru(0x06, 16)), (Data::FromController(PAGE), 16));
        assert_eq!(served(&passthru(0x06, 0)), (Data::FromController(PAGE), 0));
    }

    #[test]
    fn a_log_is_read_without_clearing_its_event() {
        let fields = Passthru { cdw10_15: [127 << 16 | 2, 0, 0, 0, 0, 0], ..passthru(0x02, 512) };
        let third = round(number::ADMIN_CMD, &bytes(&fields, 72), 516, READER);
        let Round::Serve(Request::Admin(command), _) = third else { panic!("{third:?}") };
        assert_eq!(command.cdw10_15[0], 127 << 16 | 1 << 15 | 2);
    }

    #[test]
    fn other_ioctls_have_their_answers() {
        let at = |nsid, access| Node { nsid, access };
        assert_eq!(round(number::ID, &[], 0, READER), Round::Failed(Errno::NOTTY));
        assert_eq!(round(number::ID, &[], 0, at(Some(7), Access::Read)), Round::Returned(7));
        assert_eq!(
            round(number::ID, &[], 0, at(Some(u32::MAX), Access::Read)),
            Round::Failed(Errno::OVERFLOW)
        );
        for number in [0x4030_4e42, 0x402c_4e42, 0xc048_4e43, 0xc050_4e48, 0xc050_4e49] {
            assert_eq!(round(number, &[], 0, CHANGER), Round::Failed(Errno::PERM));
        }
        assert_eq!(round(number::RESET, &[], 0, READER), Round::Failed(Errno::PERM));
        assert_eq!(round(number::RESET, &[], 0, CHANGER), Round::Serve(Request::Reset, Shape::default()));
        assert_eq!(round(number::RESCAN, &[], 0, READER), Round::Serve(Request::Rescan, Shape::default()));
        assert_eq!(round(number::SUBSYS_RESET, &[], 0, CHANGER), Round::Failed(Errno::OPNOTSUPP));
        assert_eq!(round(0x5401, &[], 0, CHANGER), Round::Failed(Errno::NOTTY));
    }
}
