//! Asynchronous events: what a host learns of changes of namespaces and of the discovery log page.

use crate::raw::{Raw, capsule, command};
use crate::target::{BLOCKS, Running, SUBSYSTEM};
use aryk_bdev::Blocks;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::feature;
use aryk_nvme::spec::identify::{IdentifyNamespace, cns};
use aryk_nvme::spec::log;
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::discovery::{Header, RECORD_LEN};
use aryk_nvme_fabrics::nqn;
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Channel, NewNamespace, NewSubsystem};
use zerocopy::FromBytes;

/// The identifier of all requests for events.
const EVENT: u16 = 100;

impl Raw {
    fn request_event(&mut self) {
        self.send(&capsule(command(EVENT, admin::ASYNC_EVENT_REQUEST, 0, 1, 0)));
    }

    fn enable_events(&mut self, events: u32) {
        let set = u64::from(feature::ASYNC_EVENT_CONFIGURATION) | u64::from(events) << 32;
        assert_eq!(self.run(command(1, admin::SET_FEATURES, set, 1, 0)).0, Code::SUCCESS);
    }

    /// The event that the host gets: the log page that it reads next.
    fn event(&mut self) -> u8 {
        let completion = self.completion().unwrap();
        assert_eq!((completion.cid(), completion.status().code()), (EVENT, Code::SUCCESS));
        assert_eq!(completion.result() & 7, 2, "a notice");
        (completion.result() >> 16) as u8
    }

    fn log(&mut self, page: u8, len: u32) -> Vec<u8> {
        let dwords = u64::from(page) | u64::from(len / 4 - 1) << 16;
        let (code, data) = self.run(command(2, admin::GET_LOG_PAGE, dwords, 1, len));
        assert_eq!(code, Code::SUCCESS);
        data
    }

    fn changed(&mut self) -> Vec<u32> {
        let list = self.log(log::CHANGED_NAMESPACES, 4096);
        let ids = list.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        ids.take_while(|nsid| *nsid != 0).collect()
    }
}

#[test]
fn a_host_learns_which_namespaces_have_changed() {
    let target = Running::start();
    let (mut queue, id) = Raw::admin(target.address);
    let mut io_queue = Raw::io(target.address, id, 1, 16);
    let mut read_at = |lba: u64| io_queue.run(command(1, io::READ, lba, 1, 4096)).0;
    queue.enable_events(feature::EVENT_NAMESPACE);
    queue.request_event();

    let half = BLOCKS as u64 / 2;
    assert_eq!(read_at(half), Code::SUCCESS);
    target.resize_disk(Blocks(half));
    assert_eq!((queue.event(), queue.changed()), (log::CHANGED_NAMESPACES, vec![1]));
    let identify = SubmissionEntry::new(admin::IDENTIFY, 1).with_cdw10_11(cns::NAMESPACE.into(), 0);
    let (_, page) = queue.run(identify.with_sgl(command(0, 0, 0, 1, 4096).data_pointer()));
    assert_eq!(IdentifyNamespace::read_from_bytes(&page).unwrap().nsze.get(), half);
    assert_eq!(read_at(half), Code::LBA_OUT_OF_RANGE);

    // What changes before the host has read the log is one event.
    target.run(async |target| target.remove_namespace(SUBSYSTEM, 1).await.unwrap());
    queue.request_event();
    assert_eq!(queue.event(), log::CHANGED_NAMESPACES);
    queue.request_event();
    let third = NewNamespace { nsid: Some(3), ..NewNamespace::default() };
    target.run(async move |target| target.add_namespace(SUBSYSTEM, "disk", third).await.unwrap());
    assert_eq!(queue.changed(), [1, 3]);
    // The disk goes, and its namespace with it: the host's request has waited for that.
    target.remove_disk();
    assert_eq!((queue.event(), queue.changed()), (log::CHANGED_NAMESPACES, vec![3]));
    target.stop();
}

#[test]
fn a_host_learns_that_the_discovery_log_page_has_changed() {
    let target = Running::start();
    let (mut queue, _) = Raw::admin_of(target.address, nqn::DISCOVERY);
    let entries = |queue: &mut Raw| {
        let page = queue.log(log::DISCOVERY, 3 * RECORD_LEN as u32);
        let header = Header::decode(&page).unwrap();
        (header.generation, header.entries)
    };
    let (first, count) = entries(&mut queue);
    assert_eq!(count, 1);
    queue.enable_events(feature::EVENT_DISCOVERY);
    queue.request_event();
    let address = target.address;
    target.run(async move |target| {
        let name: nqn::Nqn = "nqn.2016-06.io.spdk:cnode2".parse().unwrap();
        let new = NewSubsystem { allow_any_host: true, ..NewSubsystem::named(name.clone()) };
        target.add_subsystem(new).unwrap();
        target
            .listen(name.as_str(), Address::tcp(address), AnaState::Optimized, Channel::Plain)
            .await
            .unwrap();
    });
    assert_eq!(queue.event(), log::DISCOVERY);
    let (second, count) = entries(&mut queue);
    assert!(count == 2 && second > first);
    target.stop();
}
