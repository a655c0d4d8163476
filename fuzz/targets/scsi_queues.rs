//! A hostile guest of a SCSI host's three queues: arbitrary bytes in its memory, changed between turns, with two memory
//! disks behind the queues.
//!
//! Commands whose data is shorter or longer than declared, responses without a buffer, task management for missing
//! targets, event buffers that are too small, arbitrary addresses, while disks are unplugged and plugged. For any input,
//! no code panics, and the queues can be stopped.
#![no_main]

use aryk_bdev::{Blocks, Env, Identity};
use aryk_bdev_malloc::Config;
use aryk_vhost_scsi::guest::{FREE, Guest, MEMORY, QUEUES, SIZE, TARGETS};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

/// Blocks of each disk.
const BLOCKS: u64 = 64;
/// Address of the busy part of the memory: rings, requests, the first data.
const BUSY: u64 = FREE + 0x4000;
/// The indices of the control queue, the event queue and the first request queue.
const CONTROL: u16 = 0;
const EVENT: u16 = 1;
const REQUEST: u16 = 2;
/// Descriptor flags.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Operation codes that a disk implements; others are drawn less often.
const KNOWN: [u8; 30] = [
    0x00, 0x03, 0x08, 0x0a, 0x12, 0x15, 0x1a, 0x1b, 0x25, 0x28, 0x2a, 0x2f, 0x35, 0x41, 0x42, 0x55, 0x5a,
    0x5e, 0x5f, 0x88, 0x89, 0x8a, 0x8f, 0x91, 0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa,
];

/// The guest's driver.
struct Driver {
    guest: Guest,
}

impl Driver {
    /// Makes a chain of `pieces` available, from a random descriptor on; the pieces lie one after the other from `at` on.
    fn chain(&mut self, queue: u16, at: u64, pieces: &[(u32, bool)], u: &mut Unstructured<'_>) -> Result<()> {
        let head = u.int_in_range(0..=SIZE - 1)?;
        let mut at = at;
        for (i, (len, write)) in (0..).zip(pieces) {
            let more = if usize::from(i) + 1 < pieces.len() { NEXT } else { 0 };
            let (index, next) = ((head + i) % SIZE, (head + i + 1) % SIZE);
            self.guest.describe(queue, index, at, *len, more | if *write { WRITE } else { 0 }, next);
            at += u64::from(*len);
        }
        self.guest.offer(queue, head);
        Ok(())
    }

    /// A command that a disk may implement, with data that may be too long or too short.
    fn command(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let at = u.int_in_range(FREE..=BUSY)?;
        let mut request = [0; 51];
        request[..8].copy_from_slice(&address(u)?);
        request[8] = u.int_in_range(0..=7)?;
        for byte in &mut request[20..52 - 1] {
            *byte = if u.ratio(1, 2)? { 0 } else { u.arbitrary()? };
        }
        request[19] = if u.ratio(7, 8)? { *u.choose(&KNOWN)? } else { u.arbitrary()? };
        for (i, byte) in request.iter().enumerate() {
            self.guest.memory.write(at as usize + i, byte);
        }
        let header = if u.ratio(15, 16)? { 51 } else { u.int_in_range(0..=60)? };
        let answer = if u.ratio(7, 8)? { 108 } else { u.int_in_range(0..=120)? };
        let (out, room) = (length(u)?, length(u)?);
        let pieces = [(header, false), (out, false), (answer, true), (room, true)];
        let pieces: Vec<_> = pieces.into_iter().filter(|piece| piece.0 > 0).collect();
        self.chain(REQUEST, at, &pieces, u)
    }

    /// A task management function, for a command that may exist.
    fn manage(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let at = u.int_in_range(FREE..=BUSY)? as usize;
        self.guest.memory.write(at, &u.int_in_range(0_u32..=3)?);
        self.guest.memory.write(at + 4, &u.int_in_range(0_u32..=9)?);
        self.guest.memory.write(at + 8, &address(u)?);
        self.guest.memory.write(at + 16, &u.int_in_range(0_u64..=8)?);
        let pieces = [(u.int_in_range(0..=32)?, false), (u.int_in_range(0..=8)?, true)];
        let pieces: Vec<_> = pieces.into_iter().filter(|piece| piece.0 > 0).collect();
        self.chain(CONTROL, at as u64, &pieces, u)
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.int_in_range(0..=13)? {
            0 => {
                let (queue, head) = (u.int_in_range(0..=QUEUES - 1)?, u.int_in_range(0..=SIZE)?);
                self.guest.offer(queue, head);
            }
            1 | 2 => self.guest.turn(),
            3 => {
                let (queue, index) = (u.int_in_range(0..=QUEUES - 1)?, u.int_in_range(0..=SIZE - 1)?);
                let (flags, next) = (u.arbitrary()?, u.arbitrary()?);
                self.guest.describe(queue, index, u.arbitrary()?, u.arbitrary()?, flags, next);
            }
            4 => self.guest.memory.write(u.int_in_range(0..=BUSY)? as usize, &u.arbitrary::<u64>()?),
            5..=8 => self.command(u)?,
            9 => self.manage(u)?,
            10 => {
                let (at, len) = (u.int_in_range(FREE..=MEMORY - 1)?, u.int_in_range(1..=32)?);
                self.chain(EVENT, at, &[(len, u.ratio(15, 16)?)], u)?;
            }
            11 => self.guest.post(u.arbitrary::<u8>()?.into(), u.int_in_range(0..=7)?),
            12 => self.guest.plug(u.int_in_range(0..=TARGETS.len() - 1)?, u.arbitrary()?),
            _ => self.guest.memory.write((MEMORY - 8) as usize, &u.arbitrary::<u64>()?),
        }
        Ok(())
    }
}

/// The address of a unit, mostly of an existing one.
fn address(u: &mut Unstructured<'_>) -> Result<[u8; 8]> {
    Ok(match u.int_in_range(0..=7)? {
        0 => u.arbitrary()?,
        1 => [1, u.arbitrary()?, 0x40, u.arbitrary()?, 0, 0, 0, 0],
        2 => [1, 0, 0, 0, 0, 0, 0, 0],
        n => [1, TARGETS[usize::from(n > 5)], 0x40, 0, 0, 0, 0, 0],
    })
}

/// Bytes of a list: none, whole blocks, or any number.
fn length(u: &mut Unstructured<'_>) -> Result<u32> {
    Ok(match u.int_in_range(0..=3)? {
        0 => 0,
        1 | 2 => 512 * u.int_in_range(1..=8)?,
        _ => u.int_in_range(0..=0x1_0000)?,
    })
}

fuzz_target!(|data: &[u8]| {
    let env = Env::default();
    let disks = ["first", "second"];
    for name in disks {
        let config = Config {
            identity: Identity::named(name),
            block_size: 512,
            physical_block_size: 512,
            blocks: Blocks(BLOCKS),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, config).expect("a small disk");
    }
    let mut driver = Driver { guest: Guest::new(env.registry(), disks) };
    let mut u = Unstructured::new(data);
    while !u.is_empty() && driver.step(&mut u).is_ok() {}
    driver.guest.turn();
    driver.guest.stop();
});
