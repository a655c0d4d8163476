//! A host's admin queue: commands of any content, in any order, with namespaces that change in between.
//!
//! For any input, no code panics, replies fit the host's room, requests for events complete at most once, and only a ready
//! controller executes more than Fabrics commands.
#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme::spec::opcode::admin;
use aryk_nvme::spec::register::CC;
use aryk_nvme_fabrics::command::Command;
use aryk_nvme_fabrics::controller::{Association, Controller, Outcome};
use aryk_nvme_fabrics::discovery::Page;
use aryk_nvme_fabrics::property::{Access, Change};
use aryk_nvme_fabrics::reservation::Notice;
use aryk_nvme_fabrics::sgl::DataBlocks;
use aryk_nvme_fabrics::subsystem::{Ana, AnaGroup, AnaState, Commands, Io, Namespace, Service, View};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

fn view(u: &mut Unstructured<'_>, is_discovery: bool) -> Result<Arc<View>> {
    let service = if is_discovery {
        Service::Discovery(Page { generation: u.arbitrary()?, entries: Vec::new() })
    } else {
        let mut namespaces = BTreeMap::new();
        for _ in 0..u.int_in_range(0..=4)? {
            let namespace = Namespace {
                blocks: u.arbitrary()?,
                block_shift: 9,
                ids: Descriptors::default(),
                ana_group: u.int_in_range(0..=2)?,
                is_read_only: u.arbitrary()?,
                copy_blocks: u.arbitrary()?,
                optimal_write_blocks: u.arbitrary()?,
                can_persist: u.arbitrary()?,
                persists: u.arbitrary()?,
            };
            namespaces.insert(u.int_in_range(1..=8)?, namespace);
        }
        let group = AnaGroup { state: AnaState::Optimized, changes: 0 };
        let ana =
            Ana { group_max: 2, groups: BTreeMap::from([(1, group), (2, group)]), changes: u.arbitrary()? };
        Service::Io(Io {
            nsid_max: 8,
            namespaces,
            ana: u.arbitrary::<bool>()?.then_some(ana),
            transfer_max: 1 << 17,
            in_capsule_max: 4096,
            queues: 4,
            commands: Commands {
                verify: u.arbitrary()?,
                copy: u.arbitrary()?,
                reservations: u.arbitrary()?,
                ..Commands::default()
            },
            retry_delays: [0; 3],
        })
    };
    Ok(Arc::new(View {
        nqn: "nqn.2016-06.io.spdk:cnode1".parse().expect("a name"),
        serial: "1".to_owned(),
        model: "2".to_owned(),
        firmware: "3".to_owned(),
        sgls: if u.arbitrary()? { DataBlocks::Keyed } else { DataBlocks::Transport },
        service,
    }))
}

fn command(u: &mut Unstructured<'_>) -> Result<SubmissionEntry> {
    let opcode = match u.int_in_range(0..=8)? {
        0 => admin::IDENTIFY,
        1 => admin::GET_LOG_PAGE,
        2 => admin::SET_FEATURES,
        3 => admin::GET_FEATURES,
        4 => admin::ASYNC_EVENT_REQUEST,
        5 => admin::ABORT,
        6 => admin::KEEP_ALIVE,
        7 => {
            let value =
                u64::from(u.arbitrary::<u8>()? & 1) | u64::from(u.arbitrary::<u8>()?) << 8 | 0x0046_0000;
            return Ok(Command::PropertySet { access: Access::four(CC), value }.encode());
        }
        _ => u.arbitrary()?,
    };
    let (nsid, low): (u8, u16) = u.arbitrary()?;
    let entry = SubmissionEntry::new(opcode, nsid.into()).with_cid(u.arbitrary()?);
    let (high, cdw11): (u8, u32) = u.arbitrary()?;
    let entry = entry.with_cdw10_11(u32::from(low) | u32::from(high) << 16, cdw11);
    Ok(entry.with_cdw12_13(u.arbitrary::<u16>()?.into(), 0))
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let is_discovery = u.arbitrary()?;
    let association = Association {
        controller_id: 1,
        host_id: [1; 16],
        host: "nqn.2016-06.io.spdk:host1".parse().expect("a name"),
    };
    let keep_alive_ms = u.arbitrary::<u16>()?.into();
    let first = view(u, is_discovery)?;
    let mut controller = Controller::new(association, first, 128, keep_alive_ms, 0).expect("a short timeout");
    let (mut now, mut data, mut held) = (0, Vec::new(), 0);
    while !u.is_empty() {
        match u.int_in_range(0..=10)? {
            0 => {
                let view = view(u, is_discovery)?;
                controller.update(view);
            }
            1 => {
                now += u64::from(u.arbitrary::<u32>()?);
                controller.expire(now);
            }
            2 => controller.finish_shutdown(),
            3 => controller.notify(u.int_in_range(0..=9)?, Notice::ReservationReleased),
            _ => {
                let (entry, data_max) = (command(u)?, u.int_in_range(0..=1 << 17)?);
                let was_ready = controller.properties().is_ready();
                let outcome = controller.execute(&entry, data_max, now, &mut data);
                assert!(data.len() as u64 <= data_max.into() && (was_ready || data.is_empty()));
                match outcome {
                    Outcome::Held => held += 1,
                    Outcome::Changed(Change::Reset) => held = 0,
                    Outcome::Abort { .. } => assert!(was_ready && !is_discovery),
                    Outcome::Persist { nsids, .. } => assert!(was_ready && !is_discovery && nsids.len() <= 4),
                    _ => {}
                }
                assert!(held <= 4);
            }
        }
        while controller.next_completion().is_some() {
            assert!(held > 0);
            held -= 1;
        }
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});
