//! Admin commands.

use aryk_nvme::admin::{self, Activation, Commit, Erase, FirmwareDownload};
use aryk_nvme::controller::{NamespaceChange, PairRequest, SECOND};
use aryk_nvme::data::Piece;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::feature::{self, Select};
use aryk_nvme::spec::log::{self, ErrorEntry, FirmwareSlots, SanitizeState, SmartLog};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_model::{Config, FIRMWARE_MAGIC, Health, NamespaceConfig};
use zerocopy::FromBytes;

use super::rig::{Keeper, Nobody, Note, Rig};

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
    assert_eq!(SanitizeState::decode(&sanitize), Some(SanitizeState::Never));
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
