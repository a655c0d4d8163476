//! Tests of the controller, by the commands of a host.

use std::collections::BTreeMap;

use aryk_nvme::spec::feature;
use aryk_nvme::spec::identify::{
    CommandSet, Descriptors, IdentifyController, IdentifyNamespace, LEN, cns, text,
};
use aryk_nvme::spec::log as log_page;
use aryk_nvme::spec::log::{ChangedNamespaces, FirmwareSlots, SmartLog};
use aryk_nvme::spec::register::{CC, Cc};
use zerocopy::FromBytes;

use super::*;
use crate::discovery::{Entry, Family, Header, Page, Security, Subtype, Transport};
use crate::property::Access;
use crate::subsystem::{Ana, AnaGroup, AnaState, Commands, Io, Namespace};

const SECOND: u64 = 1_000_000_000;

fn namespace(blocks: u64) -> Namespace {
    Namespace {
        blocks,
        block_shift: 12,
        ids: Descriptors { nguid: Some([1; 16]), uuid: Some([2; 16]), ..Descriptors::default() },
        ana_group: 1,
        is_read_only: false,
        copy_blocks: blocks,
        optimal_write_blocks: 8,
        can_persist: true,
        persists: false,
    }
}

fn io() -> Io {
    Io {
        nsid_max: 32,
        namespaces: BTreeMap::from([(1, namespace(100)), (7, namespace(200))]),
        ana: None,
        transfer_max: 1 << 20,
        in_capsule_max: 4096,
        queues: 4,
        commands: Commands {
            write_zeroes: true,
            deallocate: true,
            compare: true,
            compare_and_write: true,
            verify: true,
            copy: true,
            reservations: true,
        },
        retry_delays: [1, 2, 3],
    }
}

fn ana(state: AnaState, changes: u64) -> Ana {
    let group = |state| AnaGroup { state, changes };
    Ana {
        group_max: 2,
        groups: BTreeMap::from([(1, group(state)), (2, group(AnaState::Optimized))]),
        changes,
    }
}

fn view(service: Service) -> Arc<View> {
    Arc::new(View {
        nqn: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(),
        serial: "SN é".to_owned(),
        model: "Model".to_owned(),
        firmware: "0.1.0".to_owned(),
        sgls: crate::sgl::DataBlocks::Transport,
        service,
    })
}

fn discovery(generation: u64) -> Arc<View> {
    let entry = Entry {
        transport: Transport::Tcp,
        family: Family::Ipv4,
        subtype: Subtype::Subsystem,
        security: Security::Plain,
        port_id: 0,
        address: "192.0.2.1".to_owned(),
        service: "4420".to_owned(),
        subsystem: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(),
    };
    view(Service::Discovery(Page { generation, entries: vec![entry; 3] }))
}

/// A host's admin queue.
struct Host {
    controller: Controller,
    now: u64,
    data: Vec<u8>,
    data_max: u32,
}

impl Host {
    fn connect(view: Arc<View>, keep_alive_ms: u32) -> Self {
        let association = Association {
            controller_id: 5,
            host_id: [9; 16],
            host: "nqn.2014-08.org.nvmexpress:uuid:0e4d9f5a-11aa-4c3b-8ad4-0a1b2c3d4e5f".parse().unwrap(),
        };
        let controller = Controller::new(association, view, 128, keep_alive_ms, 0).unwrap();
        Self { controller, now: 0, data: Vec::new(), data_max: 4096 }
    }

    /// A host that has enabled the controller.
    fn enabled(view: Arc<View>) -> Self {
        let mut host = Self::connect(view, 10_000);
        assert_eq!(host.set_cc(Cc::enabled(4096, false)), Outcome::Changed(Change::Enabled));
        host
    }

    fn run(&mut self, entry: SubmissionEntry) -> Outcome {
        self.controller.execute(&entry, self.data_max, self.now, &mut self.data)
    }

    fn set_cc(&mut self, cc: Cc) -> Outcome {
        self.run(Command::PropertySet { access: Access::four(CC), value: cc.0.into() }.encode())
    }

    /// DW0 of a successful command, or the status of another one.
    fn result(&mut self, entry: SubmissionEntry) -> Result<u32> {
        match self.run(entry) {
            Outcome::Complete { status, result } if status.is_success() => Ok(result as u32),
            Outcome::Complete { status, .. } => {
                assert!(status.is_final() && self.data.is_empty());
                Err(status.code())
            }
            other => panic!("{other:?}"),
        }
    }

    fn identify(&mut self, structure: u8, nsid: u32) -> Result<Vec<u8>> {
        self.result(SubmissionEntry::new(admin::IDENTIFY, nsid).with_cdw10_11(structure.into(), 0))?;
        assert_eq!(self.data.len(), LEN);
        Ok(self.data.clone())
    }

    fn log(&mut self, id: u8, flags: u32, offset: u64, len: u32) -> Result<Vec<u8>> {
        let dwords = len / 4 - 1;
        let entry = SubmissionEntry::new(admin::GET_LOG_PAGE, 0)
            .with_cdw10_11(u32::from(id) | flags | dwords << 16, dwords >> 16)
            .with_cdw12_13(offset as u32, (offset >> 32) as u32);
        self.result(entry)?;
        assert_eq!(self.data.len(), len as usize);
        Ok(self.data.clone())
    }

    fn get(&mut self, id: u8, select: u32, cdw11: u32) -> Result<u32> {
        let cdw10 = u32::from(id) | select << 8;
        self.result(SubmissionEntry::new(admin::GET_FEATURES, 0).with_cdw10_11(cdw10, cdw11))
    }

    fn set(&mut self, id: u8, cdw11: u32) -> Result<u32> {
        self.result(SubmissionEntry::new(admin::SET_FEATURES, 0).with_cdw10_11(id.into(), cdw11))
    }

    fn await_event(&mut self, cid: u16) -> Outcome {
        self.run(SubmissionEntry::new(admin::ASYNC_EVENT_REQUEST, 0).with_cid(cid))
    }

    /// CID, status and DW0 of a request for an event that completes.
    fn event(&mut self) -> Option<(u16, Code, u32)> {
        let entry = self.controller.next_completion()?;
        Some((entry.cid(), entry.status().code(), entry.result()))
    }
}

const FAILED: Outcome =
    Outcome::Complete { status: Code::COMMAND_SEQUENCE_ERROR.status().as_final(), result: 0 };

#[test]
fn commands_need_a_controller_that_is_enabled() {
    let mut host = Host::connect(view(Service::Io(io())), 0);
    assert_eq!(host.identify(cns::CONTROLLER, 0), Err(Code::COMMAND_SEQUENCE_ERROR));
    host.set_cc(Cc::enabled(4096, false));
    assert!(host.identify(cns::CONTROLLER, 0).is_ok());
    assert_eq!(host.set_cc(Cc(0)), Outcome::Changed(Change::Reset));
    assert_eq!(host.await_event(1), FAILED);
    host.set_cc(Cc::enabled(4096, false));
    let connect = command::Connect {
        record_format: 0,
        qid: 0,
        sqsize: 31,
        disables_flow_control: false,
        keep_alive_ms: 0,
    };
    assert_eq!(host.result(Command::Connect(connect).encode()), Err(Code::COMMAND_SEQUENCE_ERROR));
    let disconnect = Command::Disconnect { record_format: 0 }.encode();
    assert_eq!(host.result(disconnect), Err(Code::INVALID_QUEUE_ID));
    for opcode in [admin::CREATE_SQ, admin::FORMAT_NVM, 0xff] {
        assert_eq!(host.result(SubmissionEntry::new(opcode, 1)), Err(Code::INVALID_OPCODE));
    }
}

#[test]
fn the_controller_and_its_namespaces_are_identified() {
    let service = Service::Io(Io { ana: Some(ana(AnaState::Optimized, 1)), ..io() });
    let mut host = Host::enabled(view(service));
    let page = IdentifyController::read_from_bytes(&host.identify(cns::CONTROLLER, 0).unwrap()).unwrap();
    assert_eq!(
        (text(&page.sn), text(&page.mn), text(&page.fr)),
        ("SN ?".into(), "Model".into(), "0.1.0".into())
    );
    assert_eq!((page.cntlid.get(), page.cntrltype, page.mdts, page.nn.get()), (5, 1, 8, 32));
    assert_eq!((page.ioccsz.get(), page.iorcsz.get(), page.icdoff.get()), (260, 1, 0));
    assert_eq!((page.oncs.get(), page.fuses.get(), page.vwc, page.kas.get()), (0b1_1010_1101, 1, 0b101, 10));
    assert_eq!(page.ocfs.get(), 1);
    assert_eq!((page.cmic, page.anagrpmax.get(), page.crdt[2].get()), (0b1011, 2, 3));
    assert_eq!(&page.subnqn[..26], b"nqn.2016-06.io.spdk:cnode1");

    let page = IdentifyNamespace::read_from_bytes(&host.identify(cns::NAMESPACE, 7).unwrap()).unwrap();
    assert_eq!((page.nsze.get(), page.lbaf[0].lbads, page.npwg.get(), page.anagrpid.get()), (200, 12, 7, 1));
    assert_eq!((page.nguid, page.nsattr, page.rescap), ([1; 16], 0, 0xff));
    assert_eq!((page.mssrl.get(), page.mcl.get(), page.msrc), (200, 1024, 127), "4 MiB of 128 sources");
    assert_eq!(host.identify(cns::NAMESPACE, 2), Ok(vec![0; LEN]), "an NSID without a namespace");
    for nsid in [0, 33, u32::MAX] {
        assert_eq!(host.identify(cns::NAMESPACE, nsid), Err(Code::INVALID_NAMESPACE_OR_FORMAT));
    }
    let list = host.identify(cns::DESCRIPTORS, 1).unwrap();
    let expected = Descriptors { command_set: Some(CommandSet::Nvm), ..namespace(1).ids };
    assert_eq!(Descriptors::decode(&list), Ok(expected));
    assert_eq!(host.identify(cns::DESCRIPTORS, 2), Err(Code::INVALID_NAMESPACE_OR_FORMAT));

    let list = |host: &mut Host, nsid| {
        host.identify(cns::ACTIVE_NAMESPACES, nsid).map(|list| [list[0], list[4], list[8]])
    };
    assert_eq!(
        (list(&mut host, 0), list(&mut host, 1), list(&mut host, 7)),
        (Ok([1, 7, 0]), Ok([7, 0, 0]), Ok([0; 3]))
    );
    assert_eq!(list(&mut host, u32::MAX - 1), Err(Code::INVALID_NAMESPACE_OR_FORMAT));
    let mut of_commands = vec![0; LEN];
    of_commands[0] = 8;
    assert_eq!(host.identify(cns::COMMAND_SET_CONTROLLER, 0), Ok(of_commands), "VSL, as MDTS");
    assert_eq!(host.identify(cns::ALLOCATED_NAMESPACES, 0), Err(Code::INVALID_FIELD));
    host.data_max = 4092;
    assert_eq!(host.identify(cns::CONTROLLER, 0), Err(Code::SGL_DATA_LENGTH_INVALID));
}

#[test]
fn features_are_set_and_read() {
    let mut host = Host::enabled(view(Service::Io(io())));
    assert_eq!((host.controller.io_queues(), host.get(feature::NUMBER_OF_QUEUES, 0, 0)), (4, Ok(0x3_0003)));
    assert_eq!(host.set(feature::NUMBER_OF_QUEUES, 0x1_0002), Ok(0x1_0001));
    assert_eq!((host.controller.io_queues(), host.get(feature::NUMBER_OF_QUEUES, 0, 0)), (2, Ok(0x1_0001)));
    assert_eq!(host.set(feature::NUMBER_OF_QUEUES, 0x3f_003f), Ok(0x3_0003), "no more than there are");
    assert_eq!(host.set(feature::NUMBER_OF_QUEUES, 0xffff), Err(Code::INVALID_FIELD));

    assert_eq!(host.get(feature::KEEP_ALIVE_TIMER, 0, 0), Ok(10_000));
    assert_eq!(
        (host.set(feature::KEEP_ALIVE_TIMER, 2500), host.get(feature::KEEP_ALIVE_TIMER, 0, 0)),
        (Ok(0), Ok(3000))
    );
    assert_eq!(host.set(feature::KEEP_ALIVE_TIMER, u32::MAX), Err(Code::KEEP_ALIVE_INVALID));

    assert_eq!((host.get(feature::HOST_IDENTIFIER, 0, 1), host.data.clone()), (Ok(0), vec![9; 16]));
    assert_eq!(host.get(feature::HOST_IDENTIFIER, 0, 0), Err(Code::INVALID_FIELD));
    assert_eq!(host.set(feature::HOST_IDENTIFIER, 1), Err(Code::COMMAND_SEQUENCE_ERROR));

    assert_eq!(host.get(feature::VOLATILE_WRITE_CACHE, 0, 0), Ok(1));
    assert_eq!(
        (host.set(feature::VOLATILE_WRITE_CACHE, 1), host.set(feature::VOLATILE_WRITE_CACHE, 0)),
        (Ok(0), Err(Code::FEATURE_NOT_CHANGEABLE))
    );
    for (id, value) in [
        (feature::ARBITRATION, 3),
        (feature::TEMPERATURE_THRESHOLD, 300),
        (feature::ERROR_RECOVERY, 7),
        (feature::WRITE_ATOMICITY, 1),
    ] {
        let default = host.get(id, 1, 0).unwrap();
        assert_eq!((host.set(id, value), host.get(id, 0, 0)), (Ok(0), Ok(value)), "{id}");
        assert_eq!(
            (host.get(id, 1, 0), host.get(id, 2, 0), host.get(id, 3, 0)),
            (Ok(default), Ok(default), Ok(4))
        );
        assert_ne!(default, value);
    }
    assert_eq!(host.set(feature::ERROR_RECOVERY, 1 << 16), Err(Code::INVALID_FIELD));
    assert_eq!(
        (host.get(0x7e, 0, 0), host.set(0x7e, 0)),
        (Err(Code::INVALID_FIELD), Err(Code::INVALID_FIELD))
    );
    assert_eq!(host.get(feature::ARBITRATION, 4, 0), Err(Code::INVALID_FIELD));
    let save = SubmissionEntry::new(admin::SET_FEATURES, 0).with_cdw10_11(1 << 31 | 1, 0);
    assert_eq!(host.result(save), Err(Code::FEATURE_NOT_SAVEABLE));

    host.set(feature::NUMBER_OF_QUEUES, 0).unwrap();
    host.set_cc(Cc(0));
    host.set_cc(Cc::enabled(4096, false));
    assert_eq!(
        (host.get(feature::ARBITRATION, 0, 0), host.controller.io_queues()),
        (Ok(7), 4),
        "a reset restores"
    );
}

#[test]
fn changes_of_namespaces_are_reported_once_until_the_log_is_read() {
    let mut host = Host::enabled(view(Service::Io(io())));
    assert_eq!(host.await_event(1), Outcome::Held);
    let with = |changes: &[(u32, Option<u64>)]| {
        let mut io = io();
        for &(nsid, blocks) in changes {
            match blocks {
                Some(blocks) => io.namespaces.insert(nsid, namespace(blocks)),
                None => io.namespaces.remove(&nsid),
            };
        }
        view(Service::Io(io))
    };
    host.controller.update(with(&[(1, Some(101))]));
    assert_eq!(host.event(), None, "not enabled");
    assert_eq!(host.set(feature::ASYNC_EVENT_CONFIGURATION, feature::EVENT_ANA), Err(Code::INVALID_FIELD));
    let enable = feature::EVENT_NAMESPACE | feature::EVENT_HEALTH;
    assert_eq!(host.set(feature::ASYNC_EVENT_CONFIGURATION, enable), Ok(0));
    assert_eq!(host.get(feature::ASYNC_EVENT_CONFIGURATION, 0, 0), Ok(enable));

    host.controller.update(with(&[(1, Some(101))]));
    assert_eq!(host.event(), None, "nothing changed");
    host.controller.update(with(&[(1, Some(101)), (3, Some(9)), (7, None)]));
    assert_eq!(host.event(), Some((1, Code::SUCCESS, 0x0004_0002)));
    host.await_event(2);
    host.controller.update(with(&[]));
    assert_eq!(host.event(), None, "the log has not been read");
    let read = |host: &mut Host, flags| {
        ChangedNamespaces::decode(&host.log(log_page::CHANGED_NAMESPACES, flags, 0, 4096).unwrap())
    };
    assert_eq!(read(&mut host, 1 << 15), ChangedNamespaces::Some(vec![1, 3, 7]));
    assert_eq!(host.event(), None, "the host retains the event");
    assert_eq!(read(&mut host, 0), ChangedNamespaces::Some(vec![1, 3, 7]));
    assert_eq!(read(&mut host, 0), ChangedNamespaces::Some(vec![]));
    assert_eq!(host.event(), None, "the log had everything");
    host.controller.update(with(&[(1, None)]));
    assert_eq!(host.event(), Some((2, Code::SUCCESS, 0x0004_0002)));

    let many = |blocks| {
        let namespaces = (1..=1025).map(|nsid| (nsid, namespace(blocks))).collect();
        view(Service::Io(Io { nsid_max: 2000, namespaces, ..io() }))
    };
    host.controller.update(many(1));
    assert_eq!(read(&mut host, 0), ChangedNamespaces::All);
}

#[test]
fn requests_for_events_are_limited_aborted_and_dropped_by_a_reset() {
    let mut host = Host::enabled(view(Service::Io(io())));
    for cid in 0..4 {
        assert_eq!(host.await_event(cid), Outcome::Held);
    }
    let entry = SubmissionEntry::new(admin::ASYNC_EVENT_REQUEST, 0).with_cid(4);
    assert_eq!(host.result(entry), Err(Code::ASYNC_EVENT_LIMIT_EXCEEDED));
    let abort =
        |sqid: u32, cid: u32| SubmissionEntry::new(admin::ABORT, 0).with_cdw10_11(sqid | cid << 16, 0);
    assert_eq!(host.result(abort(0, 2)), Ok(0));
    assert_eq!(host.event(), Some((2, Code::ABORT_REQUESTED, 0)));
    assert_eq!(host.run(abort(0, 2)), Outcome::Abort { sqid: 0, cid: 2 });
    assert_eq!(host.run(abort(3, 1)), Outcome::Abort { sqid: 3, cid: 1 });
    assert_eq!(host.await_event(9), Outcome::Held, "there is room again");

    host.set_cc(Cc(0));
    host.set_cc(Cc::enabled(4096, false));
    host.set(feature::ASYNC_EVENT_CONFIGURATION, feature::EVENT_NAMESPACE).unwrap();
    host.controller.update(view(Service::Io(Io { namespaces: BTreeMap::new(), ..io() })));
    assert_eq!(host.event(), None, "the requests are gone");
    host.await_event(0);
    assert_eq!(host.event(), Some((0, Code::SUCCESS, 0x0004_0002)), "the event waited for a request");
}

#[test]
fn groups_and_their_namespaces_are_in_the_ana_log() {
    let with = |state, changes| view(Service::Io(Io { ana: Some(ana(state, changes)), ..io() }));
    let mut host = Host::enabled(with(AnaState::Optimized, 1));
    host.set(feature::ASYNC_EVENT_CONFIGURATION, feature::EVENT_ANA).unwrap();
    host.await_event(1);
    host.controller.update(with(AnaState::Inaccessible, 2));
    assert_eq!(host.event(), Some((1, Code::SUCCESS, 0x000c_0302)));
    let page = host.log(log_page::ANA, 0, 0, 128).unwrap();
    assert_eq!((page[0], page[8]), (2, 2), "two changes, two groups");
    assert_eq!((page[16], page[20], page[24], page[32], page[48], page[52]), (1, 2, 2, 3, 1, 7));
    assert_eq!((page[56], page[60], page[72], page[88..128].iter().max()), (2, 0, 1, Some(&0)));
    let groups = host.log(log_page::ANA, 1 << 8, 0, 80).unwrap();
    assert_eq!((groups[16], groups[20], groups[48]), (1, 0, 2));

    let mut moved = io();
    moved.ana = Some(ana(AnaState::Inaccessible, 2));
    moved.namespaces.get_mut(&7).unwrap().ana_group = 2;
    host.await_event(2);
    host.controller.update(view(Service::Io(moved)));
    assert_eq!(host.event(), Some((2, Code::SUCCESS, 0x000c_0302)), "a namespace changed its group");
}

#[test]
fn other_log_pages_are_read_in_parts() {
    let mut host = Host::enabled(view(Service::Io(io())));
    assert_eq!(host.log(log_page::ERROR_INFORMATION, 0, 0, 64), Ok(vec![0; 64]));
    let smart = SmartLog::decode(&host.log(log_page::SMART, 0, 0, 512).unwrap()).unwrap();
    assert_eq!((smart.available_spare, smart.warnings().count()), (100, 0));
    let slots = host.log(log_page::FIRMWARE_SLOT, 0, 0, 64).unwrap();
    assert_eq!(FirmwareSlots::decode(&slots).unwrap().revisions[0], "0.1.0");
    assert_eq!(host.log(log_page::FIRMWARE_SLOT, 0, 8, 4), Ok(b"0.1.".to_vec()));
    assert_eq!(host.log(log_page::FIRMWARE_SLOT, 0, 508, 4096), Ok(vec![0; 4096]), "zeroes beyond the end");
    assert_eq!(host.log(log_page::FIRMWARE_SLOT, 0, 2, 4), Err(Code::INVALID_FIELD));
    assert_eq!(host.log(log_page::FIRMWARE_SLOT, 0, 1 << 40, 4), Err(Code::INVALID_FIELD));
    assert_eq!(host.log(log_page::SMART, 0, 0, 4100), Err(Code::SGL_DATA_LENGTH_INVALID));
    for id in [log_page::ANA, log_page::DISCOVERY, 0x7f] {
        assert_eq!(host.log(id, 0, 0, 64), Err(Code::INVALID_LOG_PAGE));
    }
}

#[test]
fn reservations_have_features_of_their_namespaces_and_a_log_of_notices() {
    let mut host = Host::enabled(view(Service::Io(io())));
    let entry = |opcode, id: u8, select: u32, nsid, value| {
        SubmissionEntry::new(opcode, nsid).with_cdw10_11(u32::from(id) | select << 8, value)
    };
    let get = |id, select, nsid| entry(admin::GET_FEATURES, id, select, nsid, 0);
    let set = |id, nsid, value| entry(admin::SET_FEATURES, id, 0, nsid, value);
    let (mask, persistence) = (feature::RESERVATION_MASK, feature::RESERVATION_PERSISTENCE);
    let invalid = Err(Code::INVALID_NAMESPACE_OR_FORMAT);
    for id in [mask, persistence] {
        assert_eq!((host.result(get(id, 0, 1)), host.result(get(id, 3, 1))), (Ok(0), Ok(0b110)));
        for nsid in [0, 2, 33, u32::MAX] {
            assert_eq!(host.result(get(id, 0, nsid)), invalid);
        }
        for nsid in [0, 2, 33] {
            assert_eq!(host.result(set(id, nsid, 1)), invalid);
        }
    }
    assert_eq!(host.result(set(mask, 7, 0xff)), Ok(0));
    assert_eq!([1, 7].map(|nsid| host.result(get(mask, 0, nsid))), [Ok(0), Ok(0b1110)]);
    let persist = |nsids, persists| Outcome::Persist { nsids, persists };
    assert_eq!(host.run(set(persistence, 7, 1)), persist(vec![7], true));
    assert_eq!(host.run(set(persistence, u32::MAX, 2)), persist(vec![1, 7], false));
    let mut fixed = io();
    fixed.namespaces.get_mut(&7).unwrap().can_persist = false;
    fixed.namespaces.get_mut(&1).unwrap().persists = true;
    host.controller.update(view(Service::Io(fixed)));
    assert_eq!(host.event(), None, "no attribute of a namespace has changed");
    assert_eq!([0, 1].map(|select| host.result(get(persistence, select, 1))), [Ok(1), Ok(0)]);
    assert_eq!(host.result(set(persistence, u32::MAX, 1)), Err(Code::INVALID_FIELD));
    assert_eq!(host.result(get(persistence, 3, 7)), Ok(0b010));

    let page = |host: &mut Host, flags| {
        let page = host.log(log_page::RESERVATION, flags, 0, 64).unwrap();
        (page[0], page[8], page[9], page[12])
    };
    host.await_event(1);
    for nsid in [1, 7, 1] {
        host.controller.notify(nsid, reservation::Notice::ReservationReleased);
    }
    assert_eq!(host.event(), Some((1, Code::SUCCESS, 0x0080_0006)));
    host.await_event(2);
    assert_eq!((page(&mut host, 1 << 15), host.event()), ((1, 2, 1, 1), None), "the host retains it");
    assert_eq!(page(&mut host, 0), (1, 2, 1, 1));
    assert_eq!(host.event(), Some((2, Code::SUCCESS, 0x0080_0006)));
    host.set_cc(Cc(0));
    host.set_cc(Cc::enabled(4096, false));
    assert_eq!((page(&mut host, 0), host.result(get(mask, 0, 7))), ((0, 0, 0, 0), Ok(0)), "a reset");

    let without = Commands { reservations: false, ..io().commands };
    let mut host = Host::enabled(view(Service::Io(Io { commands: without, ..io() })));
    assert_eq!(host.log(log_page::RESERVATION, 0, 0, 64), Err(Code::INVALID_LOG_PAGE));
    assert_eq!(host.result(get(mask, 0, 1)), Err(Code::INVALID_FIELD));
    assert_eq!(host.result(set(persistence, 1, 0)), Err(Code::INVALID_FIELD));
}

#[test]
fn a_discovery_controller_has_its_log_and_little_else() {
    let mut host = Host::enabled(discovery(4));
    let page = IdentifyController::read_from_bytes(&host.identify(cns::CONTROLLER, 0).unwrap()).unwrap();
    assert_eq!((page.cntrltype, page.nn.get(), page.ioccsz.get()), (2, 0, 4));
    assert_eq!(host.controller.io_queues(), 0);
    let header = Header::decode(&host.log(log_page::DISCOVERY, 0, 0, 1024).unwrap());
    assert_eq!(header, Some(Header { generation: 4, entries: 3 }));
    let entry = host.log(log_page::DISCOVERY, 0, 2048, 1024).unwrap();
    assert_eq!(Entry::decode(entry[..].try_into().unwrap()).unwrap().service, "4420");

    host.set(feature::ASYNC_EVENT_CONFIGURATION, feature::EVENT_DISCOVERY).unwrap();
    host.await_event(3);
    host.controller.update(discovery(4));
    assert_eq!(host.event(), None);
    host.controller.update(discovery(5));
    assert_eq!(host.event(), Some((3, Code::SUCCESS, 0x0070_f002)));

    assert_eq!(host.identify(cns::NAMESPACE, 1), Err(Code::INVALID_FIELD));
    assert_eq!(host.log(log_page::SMART, 0, 0, 512), Err(Code::INVALID_LOG_PAGE));
    assert_eq!(host.get(feature::NUMBER_OF_QUEUES, 0, 0), Err(Code::INVALID_FIELD));
    assert_eq!(host.set(feature::NUMBER_OF_QUEUES, 0), Err(Code::INVALID_FIELD));
    assert_eq!(host.result(SubmissionEntry::new(admin::ABORT, 0)), Err(Code::INVALID_OPCODE));
}

#[test]
fn an_association_lasts_as_long_as_its_keep_alives_come() {
    let mut host = Host::connect(view(Service::Io(io())), 5000);
    host.now = SECOND;
    host.set_cc(Cc::enabled(4096, false));
    assert_eq!(host.controller.deadline(), Some(6 * SECOND), "enabling the controller starts the timer");
    host.now = 6 * SECOND - 1;
    assert!(!host.controller.expire(host.now));
    let keep_alive = SubmissionEntry::new(admin::KEEP_ALIVE, 0);
    assert_eq!((host.result(keep_alive), host.controller.deadline()), (Ok(0), Some(11 * SECOND - 1)));
    assert!(host.controller.expire(11 * SECOND - 1));
    assert!(!host.controller.properties().is_ready());
    assert_eq!(host.result(keep_alive), Err(Code::COMMAND_SEQUENCE_ERROR));

    let mut endless = Host::connect(view(Service::Io(io())), 0);
    endless.set_cc(Cc::enabled(4096, false));
    assert_eq!(endless.result(keep_alive), Err(Code::KEEP_ALIVE_INVALID));
    assert_eq!((endless.controller.deadline(), endless.controller.expire(u64::MAX)), (None, false));
}
