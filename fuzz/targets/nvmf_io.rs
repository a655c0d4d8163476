//! I/O commands of a host: entries and ranges of any content, against a namespace, with the rights of any reservation.
//!
//! For any input, no code panics; what is accepted stays inside of the namespace, and its data has exactly the bytes of its
//! blocks; no command is accepted that the host has no right to.
#![no_main]

use std::collections::BTreeMap;

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme::spec::opcode::io;
use aryk_nvme_fabrics::io::{Range, Request, Rules};
use aryk_nvme_fabrics::reservation::{self, Rights};
use aryk_nvme_fabrics::subsystem::{Commands, Io, Namespace};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const OPCODES: [u8; 12] = [
    io::READ,
    io::WRITE,
    io::COMPARE,
    io::WRITE_ZEROES,
    io::VERIFY,
    io::COPY,
    io::DATASET_MANAGEMENT,
    io::FLUSH,
    io::RESERVATION_REGISTER,
    io::RESERVATION_REPORT,
    io::RESERVATION_ACQUIRE,
    io::RESERVATION_RELEASE,
];

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let namespace = Namespace {
        blocks: u.arbitrary()?,
        block_shift: u.int_in_range(9..=16)?,
        ids: Descriptors::default(),
        ana_group: 0,
        is_read_only: u.arbitrary()?,
        copy_blocks: u.arbitrary()?,
        optimal_write_blocks: 1,
        can_persist: false,
        persists: false,
    };
    let (blocks, shift, is_read_only) = (namespace.blocks, namespace.block_shift, namespace.is_read_only);
    let copy_blocks = namespace.copy_blocks;
    let all = u.arbitrary()?;
    let io = Io {
        nsid_max: 1,
        namespaces: BTreeMap::from([(1, namespace)]),
        ana: None,
        transfer_max: 1 << 20,
        in_capsule_max: 4096,
        queues: 1,
        commands: Commands {
            compare: all,
            compare_and_write: all,
            deallocate: all,
            write_zeroes: all,
            verify: all,
            copy: all,
            reservations: all,
        },
        retry_delays: [0; 3],
    };
    let rights = *u.choose(&[Rights::All, Rights::Read, Rights::None])?;
    let rules = Rules::new(&io, 1).expect("the namespace").with_rights(rights);
    let is_inside = |range: Range| {
        range.blocks > 0 && range.lba.checked_add(range.blocks.into()).is_some_and(|end| end <= blocks)
    };
    while !u.is_empty() {
        let opcode = if u.arbitrary()? { *u.choose(&OPCODES)? } else { u.arbitrary()? };
        let (lba, high, low): (u64, u16, u16) = u.arbitrary()?;
        let lba = if u.arbitrary()? { lba } else { blocks.wrapping_sub(lba & 0xff) };
        let entry = SubmissionEntry::new(opcode, 1)
            .with_cdw10_11(lba as u32, (lba >> 32) as u32)
            .with_cdw12_13(u32::from(low) | u32::from(high) << 16, u.arbitrary()?);
        let data_len =
            if u.arbitrary()? { (u32::from(low) + 1) << shift } else { u.arbitrary::<u16>()?.into() };
        let Ok(checked) = rules.check(&entry, data_len) else { continue };
        let is_change = match checked.request {
            Request::Read(range) | Request::Compare(range) | Request::Write { range, .. } => {
                assert!(is_inside(range) && u64::from(range.blocks) << shift == u64::from(data_len));
                assert!(data_len <= 1 << 20);
                matches!(checked.request, Request::Write { .. })
            }
            Request::Verify { range, len } => {
                assert!(is_inside(range) && u64::from(range.blocks) << shift == u64::from(len));
                assert!(len <= 1 << 20 && data_len == 0);
                false
            }
            Request::WriteZeroes { range, .. } => {
                assert!(is_inside(range));
                true
            }
            Request::Deallocate { ranges } => {
                let data = u.bytes(u.len().min(usize::from(ranges) * 16))?;
                assert!(rules.ranges(data).filter_map(std::result::Result::ok).all(is_inside));
                true
            }
            Request::Copy(fields) => {
                let len = usize::from(fields.sources) * 32;
                assert!(data_len as usize >= len && data_len <= 4096 && copy_blocks > 0);
                let data = u.bytes(len.min(u.len()))?;
                if rules.check_copy(fields, data).is_ok() {
                    let mut next = fields.lba;
                    for source in Rules::sources(fields, data) {
                        let bytes = u64::from(source.blocks) << shift;
                        assert!(u64::from(source.blocks) <= copy_blocks && bytes <= 1 << 20);
                        assert!(is_inside(source) && is_inside(Range { lba: next, ..source }));
                        next += u64::from(source.blocks);
                    }
                    assert!((next - fields.lba) << shift <= 4 << 20);
                }
                true
            }
            Request::Report { len } => {
                assert!(len <= data_len && len > 0);
                false
            }
            Request::Reserve => {
                assert!(data_len as usize >= reservation::RELEASE_LEN);
                false
            }
            Request::Flush | Request::Hint => false,
            Request::AuthenticationSend | Request::AuthenticationReceive => {
                panic!("Fabrics commands are not those of a namespace")
            }
        };
        assert!(!is_change || !is_read_only && rights == Rights::All);
        let is_read =
            matches!(checked.request, Request::Read(_) | Request::Compare(_) | Request::Verify { .. });
        assert!(!is_read || rights != Rights::None);
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});
