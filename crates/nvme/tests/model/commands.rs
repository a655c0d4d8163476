//! Admin commands.

use aryk_nvme::admin::{self, Activation, Commit, DATA_MAX, Erase, FirmwareDownload, Sanitize};
use aryk_nvme::controller::{NamespaceChange, PairRequest, SECOND};
use aryk_nvme::data::Piece;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::feature::{self, Select};
use aryk_nvme::spec::log::{self, ErrorEntry, FirmwareSlots, SanitizeState, SanitizeStatus, SmartLog};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_model::{Config, FIRMWARE_MAGIC, Health, Model, NamespaceConfig, Patch, Timing};
use zerocopy::FromBytes;

use super::rig::{Keeper, MS, Nobody, Note, Rig, options};

#[test]
fn features_are_read_and_set() {
    let mut rig = Rig::ready(Config::default(), &[]);
    let get = admin::get_feature(feature::VOLATILE_WRITE_CACHE, 0, Select::Current, 0);
    assert_eq!(rig.admin(&get).result & 1, 1);
    assert!(rig.admin(&admin::set_feature(feature::VOLATILE_WRITE_CACHE, 0, 0, false)).status.is_success());
    assert_eq!(rig.admin(&get).result & 1, 0);
    let unknown = rig.admin(&admin::get_feature(0x7f, 0, Select::Current, 0));
    assert_eq!(unknown.status.code(), Code::INVALID_FIELD);
    rig.assert_clean();
}

#[test]
fn log_pages_are_read() {
    let mut rig = Rig::ready(Config::default(), &[]);
    let smart = rig.admin(&admin::get_log(log::SMART, u32::MAX, 0, 512, true)).data;
    let smart = SmartLog::read_from_bytes(&smart).unwrap();
    assert!(smart.celsius().unwrap() > 0 && smart.available_spare.min(100) > 0);
    let slots = rig.admin(&admin::get_log(log::FIRMWARE_SLOT, u32::MAX, 0, 512, true)).data;
    let slots = FirmwareSlots::decode(&slots).unwrap();
    assert_eq!((slots.active, slots.revisions[0].as_str()), (1, "1.0"));
    let wrong = rig.admin(&admin::get_log(0x5f, u32::MAX, 0, 512, true));
    assert_eq!(wrong.status.code(), Code::INVALID_LOG_PAGE);
    read_damaged(&mut rig, 77);
    let errors = rig.admin(&admin::get_log(log::ERROR_INFORMATION, u32::MAX, 0, 4096, true)).data;
    let newest = ErrorEntry::decode(&errors).next().unwrap();
    assert_eq!((newest.sqid.get(), newest.nsid.get(), newest.lba.get()), (1, 1, 77));
    assert_eq!(newest.status().code(), Code::UNRECOVERED_READ_ERROR);
    let sanitize = rig.admin(&admin::get_log(log::SANITIZE_STATUS, u32::MAX, 0, 512, true)).data;
    assert_eq!(SanitizeStatus::decode(&sanitize).unwrap().state, SanitizeState::Never);
    rig.assert_clean();
}

fn read_damaged(rig: &mut Rig, lba: u64) {
    rig.model.with(|model| model.damage(1, lba, 1));
    rig.controller.create_pair(PairRequest { depth: 4, vector: None }).unwrap();
    rig.run_until(&mut Nobody, SECOND, |rig| rig.pairs.len() == 1);
    let (buffer, mut keeper) = (rig.buffer(4096), Keeper::default());
    let entry = SubmissionEntry::new(io::READ, 1).with_cdw10_11(lba as u32, 0);
    let now = rig.now;
    rig.pairs[0].submit(entry, &[Piece { iova: buffer.iova, len: 4096 }], 1, now).unwrap();
    rig.run_until(&mut keeper, SECOND, |rig| rig.pairs[0].in_flight() == 0);
}

#[test]
fn a_format_changes_the_namespace() {
    let mut rig = Rig::ready(Config::default(), &[]);
    assert!(rig.admin(&admin::format(1, 0, Erase::UserData)).status.is_success());
    let changed = Note::Namespaces(vec![NamespaceChange::Changed(1)]);
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&changed));
    let namespace = rig.controller.namespaces()[0].namespace.clone().unwrap();
    assert_eq!((namespace.block_size(), namespace.blocks), (512, 131_072));
    assert_eq!(rig.admin(&admin::format(1, 63, Erase::None)).status.code(), Code::INVALID_FORMAT);
}

#[test]
fn firmware_is_downloaded_committed_and_activated_by_a_reset() {
    let mut rig = Rig::ready(Config::default(), &[]);
    let mut image = vec![0x5a; 10_240];
    image[..FIRMWARE_MAGIC.len()].copy_from_slice(&FIRMWARE_MAGIC);
    image[FIRMWARE_MAGIC.len()..FIRMWARE_MAGIC.len() + 8].copy_from_slice(b"2.0     ");
    let info = rig.controller.info().unwrap().clone();
    for part in FirmwareDownload::new(&image, &info).unwrap() {
        assert!(rig.admin(&part).status.is_success());
    }
    let committed = rig.admin(&admin::commit_firmware(2, Commit::StoreAndActivate));
    let activation = Activation::decode(committed.status);
    assert!(matches!(activation, Activation::Done | Activation::ControllerReset), "{activation:?}");
    let now = rig.now;
    rig.controller.reset(aryk_nvme::controller::ResetReason::Request, now);
    rig.run_until(&mut Nobody, 10 * SECOND, |rig| rig.has(&Note::Recovered));
    assert_eq!(rig.controller.info().unwrap().firmware, "2.0");
}

#[test]
fn firmware_is_downloaded_in_the_parts_that_the_controller_takes() {
    let model = Model::new("model", Config::default()).unwrap();
    // FWUG of 32 KiB.
    model.with(|model| model.faults().patch_identify(Patch { cns: 1, offset: 319, bytes: vec![8] }));
    let mut rig = Rig::on(model, options()).unwrap().with_pairs(&[]);
    let mut image: Vec<u8> = (0..100_000_u32).map(|i| i as u8).collect();
    image[..FIRMWARE_MAGIC.len()].copy_from_slice(&FIRMWARE_MAGIC);
    image[FIRMWARE_MAGIC.len()..FIRMWARE_MAGIC.len() + 8].copy_from_slice(b"3.0     ");
    let info = rig.controller.info().unwrap().clone();
    let parts: Vec<_> = FirmwareDownload::new(&image, &info).unwrap().collect();
    assert_eq!(parts.len(), 4, "32 KiB each");
    for part in &parts {
        assert!(rig.admin(part).status.is_success());
    }
    assert_eq!(rig.admin(&admin::commit_firmware(3, Commit::Store)).status.code(), Code::SUCCESS);
    let slots = rig.admin(&admin::get_log(log::FIRMWARE_SLOT, u32::MAX, 0, 512, true)).data;
    assert_eq!(FirmwareSlots::decode(&slots).unwrap().revisions[2], "3.0");
    rig.assert_clean();
}

#[test]
fn one_command_at_a_time_has_more_than_a_page_of_data() {
    let mut rig = Rig::ready(Config::default(), &[]);
    let large = admin::get_log(log::SMART, u32::MAX, 0, DATA_MAX, true);
    let answer = rig.admin(&large);
    assert_eq!((answer.data.len(), answer.data[512..].iter().max()), (DATA_MAX, Some(&0)));
    assert!(SmartLog::read_from_prefix(&answer.data).unwrap().0.celsius().is_some());
    let now = rig.now;
    rig.controller.admin(&large, now).unwrap();
    let busy = rig.controller.admin(&large, now).unwrap_err().to_string();
    assert!(busy.starts_with("too many admin commands are in flight"), "{busy}");
    rig.controller.admin(&admin::get_log(log::SMART, u32::MAX, 0, 4096, true), now).unwrap();
    rig.controller.reset(aryk_nvme::controller::ResetReason::Request, now);
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Recovered));
    assert_eq!(rig.admin(&large).data.len(), DATA_MAX, "a reset frees the buffer");
    rig.assert_clean();

    let mut rig = Rig::ready(Config { mdts: 2, ..Config::default() }, &[]);
    let now = rig.now;
    let refused = rig.controller.admin(&large, now).unwrap_err().to_string();
    assert_eq!(refused, "an admin command of this controller has at most 16384 bytes of data");
}

#[test]
fn a_sanitize_operation_is_started_and_followed_to_its_end() {
    let timing = Timing { sanitize: 800 * MS, ..Timing::IMMEDIATE };
    let mut rig = Rig::ready(Config { timing, ..Config::default() }, &[]);
    let info = rig.controller.info().unwrap().clone();
    let start = admin::sanitize(Sanitize::BlockErase, false, &info).unwrap();
    assert!(rig.admin(&start).status.is_success());
    assert_eq!(rig.admin(&start).status.code(), Code::SANITIZE_IN_PROGRESS);
    let status = |rig: &mut Rig| {
        let log = rig.admin(&admin::get_log(log::SANITIZE_STATUS, u32::MAX, 0, 512, true)).data;
        SanitizeStatus::decode(&log).unwrap()
    };
    rig.run_for(&mut Nobody, 400 * MS, MS);
    let half = status(&mut rig);
    let SanitizeState::Running { progress } = half.state else { panic!("{half:?}") };
    assert!((30_000..40_000).contains(&progress) && half.cdw10 == 2, "{half:?}");
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Sanitize(SanitizeState::Done)));
    assert_eq!(status(&mut rig).state, SanitizeState::Done);
    rig.assert_clean();
}

#[test]
fn namespaces_are_created_attached_and_deleted() {
    let mut rig = Rig::ready(Config::default(), &[]);
    let created = rig.admin(&admin::create_namespace(256, 1, false));
    assert!(created.status.is_success(), "{:?}", created.status);
    let nsid = created.result;
    let controller = rig.controller.info().unwrap().controller_id;
    let attached = rig.admin(&admin::attach_namespace(nsid, &[controller], true));
    assert!(attached.status.is_success(), "{:?}", attached.status);
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Namespaces(vec![NamespaceChange::Added(nsid)])));
    assert_eq!(rig.controller.namespaces()[1].namespace.as_ref().unwrap().blocks, 256);
    assert!(rig.admin(&admin::delete_namespace(nsid)).status.is_success());
    rig.run_until(&mut Nobody, SECOND, |rig| {
        rig.has(&Note::Namespaces(vec![NamespaceChange::Removed(nsid)]))
    });
    rig.assert_clean();
}

#[test]
fn health_events_bring_the_smart_log() {
    let mut rig = Rig::ready(Config::default(), &[]);
    rig.model.with(|model| {
        let health =
            Health { temperature: 300, spare: 90, used: 1, is_unreliable: true, is_read_only: false };
        model.set_health(health);
    });
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Smart));
    assert!(rig.has(&Note::Async));
}

#[test]
fn the_owner_reads_the_health_when_it_wants() {
    let mut rig = Rig::ready(Config::default(), &[]);
    rig.controller.read_health();
    rig.controller.read_health();
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Smart));
    assert!(!rig.has(&Note::Async));
    rig.assert_clean();
}

#[test]
fn a_reset_answers_the_owners_commands_and_refuses_new_ones() {
    let config = Config { namespaces: vec![(1, NamespaceConfig::new(128, 0, 1))], ..Config::default() };
    let mut rig = Rig::ready(config, &[]);
    let command = admin::get_log(log::SMART, u32::MAX, 0, 512, true);
    let now = rig.now;
    let id = rig.controller.admin(&command, now).unwrap();
    rig.controller.reset(aryk_nvme::controller::ResetReason::Request, now);
    assert!(rig.controller.admin(&command, now).is_err());
    rig.run_until(&mut Nobody, SECOND, |rig| rig.has(&Note::Recovered));
    assert_eq!(rig.answers, [(id, None)]);
    let full: Vec<_> = (0..20).map(|_| rig.controller.admin(&command, rig.now).is_ok()).collect();
    assert_eq!(full.iter().filter(|ok| **ok).count(), 16);
}
