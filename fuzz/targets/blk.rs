//! A hostile guest of a virtio-blk queue: arbitrary bytes in its memory, changed between turns, with a memory disk behind
//! the queue.
//!
//! For any input, no code panics, every chain is completed at most once, and the queue can be stopped.
#![no_main]

use aryk_bdev::{Blocks, Env, Identity};
use aryk_bdev_malloc::Config;
use aryk_vhost_blk::guest::{Guest, MEMORY, SIZE};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

/// Blocks of the disk.
const BLOCKS: u64 = 64;
/// Offset of the busy part of the memory: rings, headers, the first data.
const BUSY: u64 = 0x5000;

fn step(guest: &mut Guest, u: &mut Unstructured<'_>) -> Result<()> {
    match u.int_in_range(0..=7)? {
        0 | 1 => guest.offer(u.int_in_range(0..=SIZE)?),
        2 => guest.turn(),
        3 => guest.describe(
            u.int_in_range(0..=SIZE - 1)?,
            u.arbitrary()?,
            u.arbitrary()?,
            u.arbitrary()?,
            u.arbitrary()?,
        ),
        4 => {
            let (addr, len) = (u.int_in_range(0..=BUSY)?, u.int_in_range(0..=2048)?);
            guest.describe(
                u.int_in_range(0..=SIZE - 1)?,
                addr,
                len,
                u.int_in_range(0..=7)?,
                u.int_in_range(0..=SIZE)?,
            );
        }
        5 => guest.memory.write(u.int_in_range(0..=BUSY)? as usize, &u.arbitrary::<u64>()?),
        // A header with valid fields.
        6 => {
            let at = u.int_in_range(0x3000..=BUSY)? as usize;
            guest.memory.write(at, &u.int_in_range(0u32..=14)?);
            guest.memory.write(at + 8, &u.int_in_range(0u64..=BLOCKS + 1)?);
        }
        _ => guest.memory.write((MEMORY - 8) as usize, &u.arbitrary::<u64>()?),
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let env = Env::default();
    let config = Config {
        identity: Identity::named("memory"),
        block_size: 512,
        physical_block_size: 512,
        blocks: Blocks(BLOCKS),
        optimal_io_blocks: Blocks::ZERO,
    };
    let disk = aryk_bdev_malloc::create(&env, config).expect("a small disk");
    let mut u = Unstructured::new(data);
    let mut guest = Guest::new(disk.device().clone(), u.arbitrary().unwrap_or(true));
    while !u.is_empty() && step(&mut guest, &mut u).is_ok() {}
    guest.turn();
    guest.stop();
});
