//! Hostile initiators of a SCSI disk in memory: arbitrary CDBs, of any length, with data lists of any length.
//!
//! For any input, no code panics, every command ends, and no command reports more data than its buffer holds.
#![no_main]

use aryk_bdev::{Access, Blocks, Env, Identity};
use aryk_bdev_malloc::Config;
use aryk_scsi::initiator::Initiators;
use aryk_scsi::{Status, decode, lun_number};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

/// Blocks of the disk.
const BLOCKS: u64 = 256;
/// Upper bound of a data list, in bytes.
const LIST_MAX: usize = 8192;

/// Executes one command: an initiator, a CDB, data, and a buffer of the same length.
fn step(all: &mut Initiators, u: &mut Unstructured<'_>) -> Result<()> {
    let who = usize::from(u.arbitrary::<bool>()?);
    let len = usize::from(u.arbitrary::<u8>()? % 34);
    let cdb = u.bytes(len.min(u.len()))?;
    let given = usize::from(u.arbitrary::<u8>()?).min(u.len());
    let mut out = u.bytes(given)?.to_vec();
    // The rest repeats the first byte: so a list of many blocks needs few bytes of input.
    out.resize(usize::from(u.arbitrary::<u16>()?) % LIST_MAX, out.first().copied().unwrap_or(0));
    let room = usize::from(u.arbitrary::<u16>()?) % LIST_MAX;
    let (outcome, data) = all.run(who, cdb, &out, room);
    assert!(outcome.moved as usize <= out.len().max(room));
    assert!(outcome.status != Status::Good || outcome.overrun.is_none());
    if decode(cdb).is_err() {
        assert!(data.iter().all(|byte| *byte == 0xee), "an invalid command has written data");
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
    aryk_bdev_malloc::create(&env, config).expect("a small disk");
    let mut all = Initiators::new(env.registry(), "memory", Access::Shared, 2);
    let mut u = Unstructured::new(data);
    if let Ok(field) = u.arbitrary() {
        let _ = lun_number(field);
    }
    while !u.is_empty() && step(&mut all, &mut u).is_ok() {}
});
