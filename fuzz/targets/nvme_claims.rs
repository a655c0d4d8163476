//! What an NVMe controller claims: identify data of any content, and commands within the limits that follow.
//!
//! For any input, no code panics; what is accepted is bounded, and every command stays inside of its namespace.
#![no_main]

use aryk_nvme::claims::{ControllerInfo, Namespace, TRANSFER_MAX};
use aryk_nvme::io::{Commands, Range};
use aryk_nvme::quirks;
use aryk_nvme::spec::identify::{Descriptors, IdentifyController, IdentifyNamespace, IdentifyNvmController};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Sets a few bytes of a structure: most of its fields stay plausible.
fn change<T: FromBytes + IntoBytes>(u: &mut Unstructured<'_>, value: &mut T, start: usize) -> Result<()> {
    let bytes = value.as_mut_bytes();
    for _ in 0..u.int_in_range(0..=24)? {
        let at = start + usize::from(u.arbitrary::<u16>()?) % 600;
        if let Some(byte) = bytes.get_mut(at) {
            *byte = u.arbitrary()?;
        }
    }
    Ok(())
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let mut controller = IdentifyController::new_zeroed();
    (controller.sqes, controller.cqes) = (0x66, 0x44);
    controller.nn.set(1);
    controller.oncs.set(0x1ff);
    controller.ocfs.set(1);
    change(u, &mut controller, 0)?;
    let page = 4096 << u.int_in_range(0..=4)?;
    let ids: [u16; 2] = u.arbitrary()?;
    let quirks = quirks::of(ids[0], ids[1], "");
    let checked = ControllerInfo::check(&controller, u.arbitrary()?, page, page, quirks);
    let Ok(mut info) = checked else { return Ok(()) };
    let mut limits = IdentifyNvmController::new_zeroed();
    change(u, &mut limits, 0)?;
    info.add_limits(&limits, page);
    assert!((4096..=TRANSFER_MAX).contains(&info.transfer_max));

    let mut raw = IdentifyNamespace::new_zeroed();
    raw.nsze.set(u.arbitrary()?);
    raw.ncap = raw.nsze;
    raw.lbaf[0].lbads = u.int_in_range(8..=17)?;
    change(u, &mut raw, 24)?;
    let len = usize::from(u.arbitrary::<u8>()?).min(u.len());
    let list = u.bytes(len)?;
    let descriptors = Descriptors::decode(list).unwrap_or_default();
    let Ok(namespace) = Namespace::check(1, &raw, descriptors, &info, quirks) else { return Ok(()) };
    assert!(namespace.bytes() <= i64::MAX as u64 && namespace.blocks > 0);

    let commands = Commands::new(&namespace, &info);
    let (slba, blocks): (u64, u64) = u.arbitrary()?;
    let is_inside = slba.checked_add(blocks).is_some_and(|end| end <= namespace.blocks);
    for command in [
        commands.read(slba, blocks),
        commands.write(slba, blocks, true),
        commands.compare(slba, blocks),
        commands.verify(slba, blocks),
        commands.write_zeroes(slba, blocks, true, false),
    ]
    .into_iter()
    .flatten()
    {
        assert!(is_inside && command.cdw10_11() == slba && u64::from(command.cdw(12) & 0xffff) + 1 == blocks);
    }
    let range = Range { slba, blocks: blocks as u32 };
    let mut count = 0;
    let _ = commands.deallocate(&[range; 3], |_| count += 1);
    let _ = commands.copy(&[range; 3], u.arbitrary()?, u.arbitrary()?, |_| count += 1);
    assert!(count <= 6);
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});
