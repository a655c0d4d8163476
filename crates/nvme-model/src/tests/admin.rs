//! Admin commands: identify, queues, features, log pages, events, namespaces, firmware, format, abort.

use super::host::{Host, PAGE, command, io, is_ok, status, with_prps};
use crate::{
    Action, Config, FIRMWARE_MAGIC, Hostile, NamespaceConfig, Patch, Queue, Rule, Status, Timing, Violation,
    admin, nvm,
};
use std::io::Read as _;

fn u16_at(data: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([data[at], data[at + 1]])
}

fn u32_at(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(data[at..at + 4].try_into().unwrap())
}

fn u64_at(data: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(data[at..at + 8].try_into().unwrap())
}

fn log(id: u32, bytes: u32, retains: bool) -> crate::SubmissionEntry {
    command(
        admin::GET_LOG_PAGE,
        u32::MAX,
        [id | u32::from(retains) << 15 | (bytes / 4 - 1) << 16, 0, 0, 0, 0, 0],
    )
}

#[test]
fn identify_reports_the_configuration() {
    let mut host = Host::enabled(Config::default());
    let data = host.identify(1, 0);
    assert_eq!(&data[4..24], b"ARYKMODEL0001       ");
    assert_eq!(&data[24..39], b"Aryk NVMe model");
    assert_eq!(data[77], 5, "MDTS");
    assert_eq!(u32_at(&data, 80), 0x0002_0000, "VER");
    assert_eq!((data[512], data[513]), (0x66, 0x44), "SQES and CQES");
    assert_eq!(u32_at(&data, 516), 16, "NN");
    assert_eq!(data[525] & 1, 1, "VWC");
    let namespace = host.identify(0, 1);
    assert_eq!((u64_at(&namespace, 0), u64_at(&namespace, 8)), (16384, 16384));
    assert_eq!((namespace[25], namespace[26]), (5, 1), "NLBAF and FLBAS");
    assert_eq!(u32_at(&namespace, 128 + 4), 12 << 16, "4,096 bytes without metadata");
    assert_eq!(u32_at(&namespace, 128 + 8), 9 << 16 | 8, "512 bytes with 8 of metadata");
    assert_eq!(host.identify(0, 5), [0; 4096], "an inactive namespace");
    let list = host.identify(2, 0);
    assert_eq!((u32_at(&list, 0), u32_at(&list, 4)), (1, 0));
    assert_eq!(u32_at(&host.identify(2, 1), 0), 0, "no namespace above 1");
    let descriptors = host.identify(3, 1);
    assert_eq!(descriptors[..4], [1, 8, 0, 0], "EUI64");
    assert_eq!(descriptors[12..16], [2, 16, 0, 0], "NGUID");
    assert_eq!(descriptors[32..37], [4, 1, 0, 0, 0], "CSI: the NVM command set");
    for (cns, nsid) in [(0, 0), (0, 17), (2, u32::MAX), (3, 5), (0x77, 1)] {
        let page = host.pages(1);
        let done =
            host.admin(with_prps(command(admin::IDENTIFY, nsid, [cns, 0, 0, 0, 0, 0]), host.iova + page, 0));
        assert!(!is_ok(&done), "CNS {cns:#x} of {nsid}");
    }
    host.assert_clean();
}

#[test]
fn queues_are_created_by_the_rules() {
    let mut host =
        Host::enabled(Config { io_queues: 4, vectors: 5, queue_entries: 128, ..Config::default() });
    let page = host.iova + host.pages(1);
    let sq = |qid: u32, size: u32, cqid: u32, flags: u32| {
        command(admin::CREATE_SQ, 0, [qid | size << 16, cqid << 16 | flags, 0, 0, 0, 0])
    };
    let cq = |qid: u32, size: u32, vector: u32, flags: u32| {
        command(admin::CREATE_CQ, 0, [qid | size << 16, vector << 16 | flags, 0, 0, 0, 0])
    };
    for (entry, offset, expected, what) in [
        (cq(0, 7, 0, 3), 0, (1, 1), "the admin queue's identifier"),
        (cq(5, 7, 0, 3), 0, (1, 1), "more than the controller has"),
        (cq(1, 0, 0, 3), 0, (1, 2), "a queue of one entry"),
        (cq(1, 128, 0, 3), 0, (1, 2), "above MQES"),
        (cq(1, 7, 0, 2), 0, (0, 2), "not contiguous, with CAP.CQR"),
        (cq(1, 7, 5, 3), 0, (1, 8), "a vector that does not exist"),
        (cq(1, 7, 0, 3), 8, (0, 0x13), "an offset in the PRP"),
        (sq(1, 7, 1, 1), 0, (1, 0), "a completion queue that does not exist"),
        (sq(1, 7, 0, 1), 0, (1, 1), "the admin completion queue"),
        (sq(1, 7, 9, 1), 0, (1, 1), "a completion queue beyond the limit"),
        (cq(1, 7, 0, 3), 0, (0, 0), "a good one"),
        (cq(1, 7, 0, 3), 0, (1, 1), "one that exists"),
        (sq(1, 7, 1, 1), 0, (0, 0), "a good one"),
        (sq(2, 7, 1, 1), 0, (0, 0), "a second one for the same completion queue"),
        (command(admin::DELETE_CQ, 0, [1, 0, 0, 0, 0, 0]), 0, (1, 0xc), "a queue in use"),
        (command(admin::DELETE_SQ, 0, [3, 0, 0, 0, 0, 0]), 0, (1, 1), "no such queue"),
        (command(admin::DELETE_SQ, 0, [1, 0, 0, 0, 0, 0]), 0, (0, 0), "a good one"),
        (command(admin::DELETE_SQ, 0, [2, 0, 0, 0, 0, 0]), 0, (0, 0), "a good one"),
        (command(admin::DELETE_CQ, 0, [1, 0, 0, 0, 0, 0]), 0, (0, 0), "a good one"),
        (command(admin::DELETE_CQ, 0, [0, 0, 0, 0, 0, 0]), 0, (1, 1), "the admin queue"),
    ] {
        assert_eq!(status(&host.admin(with_prps(entry, page + offset, 0))), expected, "{what}");
    }
    host.assert_clean();
}

#[test]
fn deleting_a_queue_aborts_its_commands_first() {
    let timing = Timing { io: 1_000_000..=1_000_000, ..Timing::IMMEDIATE };
    let mut host = Host::ready(Config { timing, ..Config::default() });
    host.submit(1, command(nvm::FLUSH, 1, [0; 6]));
    host.step();
    assert!(is_ok(&host.admin(command(admin::DELETE_SQ, 0, [1, 0, 0, 0, 0, 0]))));
    assert_eq!(status(&host.reap(1).unwrap()), (0, 8));
}

#[test]
fn features_have_current_default_and_saved_values() {
    let mut host = Host::ready(Config::default());
    let get = |fid: u32, select: u32| command(admin::GET_FEATURES, 0, [fid | select << 8, 0, 0, 0, 0, 0]);
    let set = |fid: u32, value: u32| command(admin::SET_FEATURES, 0, [fid, value, 0, 0, 0, 0]);
    assert_eq!(host.admin(get(7, 0)).result.get(), 15 << 16 | 15);
    assert_eq!(status(&host.admin(set(7, 1 << 16 | 1))), (0, 0xc), "after queues were created");
    assert_eq!(host.admin(get(6, 0)).result.get(), 1);
    assert!(is_ok(&host.admin(set(6, 0))));
    assert_eq!(host.admin(get(6, 0)).result.get(), 0);
    assert_eq!(host.admin(get(6, 1)).result.get(), 1, "the default");
    assert!(is_ok(&host.admin(set(6 | 1 << 31, 0))));
    host.disable();
    host.enable();
    assert_eq!(host.admin(get(6, 0)).result.get(), 0, "saved over a reset");
    assert_eq!(host.admin(get(6, 3)).result.get(), 0b101, "saveable and changeable");
    let done = host.admin(set(7, 3 << 16 | 3));
    assert_eq!(done.result.get(), 3 << 16 | 3);
    assert_eq!(host.admin(get(7, 0)).result.get(), 3 << 16 | 3);
    assert_eq!(status(&host.admin(set(7, 0xffff))), (0, 2));
    assert_eq!(status(&host.admin(set(8, 5))), (1, 0xe), "no coalescing");
    assert_eq!(status(&host.admin(set(7 | 1 << 31, 0))), (1, 0xd), "not saveable");
    assert_eq!(status(&host.admin(get(0x55, 0))), (0, 2));
    let namespaced = command(admin::SET_FEATURES, 1, [6, 1, 0, 0, 0, 0]);
    assert_eq!(status(&host.admin(namespaced)), (1, 0xf));
    let vector = command(admin::GET_FEATURES, 0, [9, 3, 0, 0, 0, 0]);
    assert_eq!(host.admin(vector).result.get() & 0xffff, 3);
}

#[test]
fn a_changed_namespace_raises_one_event_until_its_log_is_read() {
    let mut host = Host::enabled(Config::default());
    assert!(is_ok(&host.admin(command(admin::SET_FEATURES, 0, [0xb, 1 << 8, 0, 0, 0, 0]))));
    let first = host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]));
    let second = host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]));
    host.step();
    assert!(host.reap(0).is_none());
    host.model.with(|c| {
        c.resize_namespace(1, 20000);
        c.add_namespace(7, NamespaceConfig::new(100, 0, 7));
    });
    let event = host.wait(0);
    assert_eq!((event.cid.get(), event.result.get()), (first, 2 | 4 << 16));
    host.model.with(|c| c.remove_namespace(7));
    host.step();
    assert!(host.reap(0).is_none(), "masked until the log is read");
    let page = host.pages(1);
    host.submit(0, with_prps(log(4, 4096, true), host.iova + page, 0));
    assert!(is_ok(&host.wait(0)));
    assert!(host.reap(0).is_none(), "retained");
    let cid = host.submit(0, with_prps(log(4, 4096, false), host.iova + page, 0));
    let mut done = [host.wait(0), host.wait(0)];
    done.sort_by_key(|entry| entry.cid.get());
    assert_eq!((done[0].cid.get(), done[1].cid.get()), (second, cid));
    let list = host.read(page, 12);
    assert_eq!((u32_at(&list, 0), u32_at(&list, 4), u32_at(&list, 8)), (1, 7, 0));
    assert_eq!(u64_at(&host.identify(0, 1), 0), 20000);
    host.assert_clean();
}

#[test]
fn too_many_event_requests_are_refused() {
    let mut host = Host::enabled(Config { aerl: 1, ..Config::default() });
    let cids: Vec<u16> = (0..3).map(|_| host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]))).collect();
    let done = host.wait(0);
    assert_eq!((done.cid.get(), status(&done)), (cids[2], (1, 5)));
    let abort = command(admin::ABORT, 0, [u32::from(cids[0]) << 16, 0, 0, 0, 0, 0]);
    host.submit(0, abort);
    let aborted = host.wait(0);
    assert_eq!((aborted.cid.get(), status(&aborted)), (cids[0], (0, 7)));
    assert_eq!(host.wait(0).result.get(), 0);
}

#[test]
fn wrong_doorbells_raise_an_error_event() {
    let mut host = Host::ready(Config::default());
    host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]));
    host.step();
    host.doorbells.write(8, 64);
    let event = host.wait(0);
    assert_eq!(event.result.get(), 1 << 8 | 1 << 16, "an invalid value");
    host.model.with(|c| {
        assert_eq!(c.violations().first, [Violation::Doorbell { qid: 1, is_cq: false, value: 64 }]);
    });
    let page = host.pages(1);
    host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]));
    host.submit(0, with_prps(log(1, 64, false), host.iova + page, 0));
    assert!(is_ok(&host.wait(0)));
    host.doorbells.write(5 * 8, 1);
    assert_eq!(host.wait(0).result.get(), 1 << 16, "a queue that does not exist");
    host.doorbells.write(8, 0);
    assert!(is_ok(&host.run(command(nvm::FLUSH, 1, [0; 6]))), "the queue still works");
}

#[test]
fn abort_ends_a_command_in_flight() {
    let mut host = Host::ready(Config::default());
    let stick = |is_abortable| Rule::once(Queue::Io, nvm::FLUSH, Action::Stick { is_abortable });
    for is_abortable in [true, false] {
        host.model.with(|c| c.faults().add(stick(is_abortable)));
        let cid = host.submit(1, command(nvm::FLUSH, 1, [0; 6]));
        assert_eq!(host.step(), u64::MAX);
        let done = host.admin(command(admin::ABORT, 0, [1 | u32::from(cid) << 16, 0, 0, 0, 0, 0]));
        assert_eq!(done.result.get(), u32::from(!is_abortable));
        assert_eq!(host.reap(1).map(|done| status(&done)), is_abortable.then_some((0, 7)));
    }
}

#[test]
fn smart_and_error_logs_count() {
    let mut host = Host::ready(Config::default());
    host.write_block(0, 1, 0);
    host.read_block(0);
    host.model.with(|c| c.damage(1, 9, 1));
    let page = host.iova + host.pages(1);
    let done = host.run(with_prps(io(nvm::READ, 1, 9, 1), page, 0));
    assert_eq!(status(&done), (2, 0x81));
    assert_eq!(done.status.get() >> 14 & 1, 1, "More: the error log has details");
    let smart = host.admin_page(log(2, 512, false));
    assert_eq!(u16_at(&smart, 1), 308);
    assert_eq!((u64_at(&smart, 64), u64_at(&smart, 80), u64_at(&smart, 160)), (2, 1, 1));
    let errors = host.admin_page(log(1, 128, false));
    assert_eq!((u64_at(&errors, 0), u16_at(&errors, 8), u64_at(&errors, 16)), (1, 1, 9));
    assert_eq!(u64_at(&errors, 64), 0);
    let page = host.iova + host.pages(1);
    assert_eq!(status(&host.admin(with_prps(log(0x66, 64, false), page, 0))), (1, 9));
}

#[test]
fn namespaces_are_created_attached_and_deleted() {
    let mut host = Host::ready(Config::default());
    let page = host.pages(1);
    host.write(page, &100_u64.to_le_bytes());
    host.write(page + 8, &100_u64.to_le_bytes());
    let at = host.iova + page;
    let create = with_prps(command(admin::NAMESPACE_MANAGEMENT, 0, [0; 6]), at, 0);
    let done = host.admin(create);
    assert!(is_ok(&done));
    let nsid = done.result.get();
    assert_eq!(nsid, 2);
    assert_eq!(host.identify(0, nsid), [0; 4096], "not attached");
    assert_eq!(u64_at(&host.identify(0x11, nsid), 0), 100, "allocated");
    host.write(page, &[1, 0, 1, 0]);
    let attach =
        |detach: u32| with_prps(command(admin::NAMESPACE_ATTACHMENT, nsid, [detach, 0, 0, 0, 0, 0]), at, 0);
    assert!(is_ok(&host.admin(attach(0))));
    assert_eq!(status(&host.admin(attach(0))), (1, 0x18));
    assert_eq!(u64_at(&host.identify(0, nsid), 0), 100);
    let data = host.iova + host.pages(1);
    assert!(is_ok(&host.run(with_prps(io(nvm::READ, nsid, 99, 1), data, 0))));
    assert!(is_ok(&host.admin(attach(1))));
    assert_eq!(status(&host.admin(attach(1))), (1, 0x1a));
    assert!(is_ok(&host.admin(command(admin::NAMESPACE_MANAGEMENT, nsid, [1, 0, 0, 0, 0, 0]))));
    assert_eq!(u64_at(&host.identify(0x11, nsid), 0), 0);
    host.write(page, &(1_u64 << 40).to_le_bytes());
    host.write(page + 8, &(1_u64 << 40).to_le_bytes());
    assert_eq!(status(&host.admin(create)), (1, 0x15), "insufficient capacity");
    host.assert_clean();
}

#[test]
fn a_format_clears_and_changes_the_block_size() {
    let timing = Timing { format: 1_000_000, ..Timing::IMMEDIATE };
    let mut host = Host::ready(Config { timing, ..Config::default() });
    host.write_block(0, 9, 0);
    host.submit(0, command(admin::FORMAT_NVM, 1, [0; 6]));
    host.step();
    let page = host.iova + host.pages(1);
    assert_eq!(status(&host.run(with_prps(io(nvm::READ, 1, 0, 1), page, 0))), (0, 0x84));
    assert!(is_ok(&host.wait(0)));
    assert_eq!(host.now, 1_000_000);
    let namespace = host.identify(0, 1);
    assert_eq!((u64_at(&namespace, 0), namespace[26]), (16384 * 8, 0));
    assert!(host.model.with(|c| c.data(1, 0, 8).unwrap().iter().all(|&byte| byte == 0)));
    assert_eq!(status(&host.admin(command(admin::FORMAT_NVM, 1, [0xf, 0, 0, 0, 0, 0]))), (1, 0xa));
    assert_eq!(status(&host.admin(command(admin::FORMAT_NVM, 3, [0; 6]))), (0, 0xb));
}

#[test]
fn firmware_is_downloaded_committed_and_activated() {
    let mut host = Host::enabled(Config::default());
    let page = host.pages(1);
    let at = host.iova + page;
    let download = |offset: u32, dwords: u32| {
        with_prps(command(admin::FIRMWARE_DOWNLOAD, 0, [dwords - 1, offset, 0, 0, 0, 0]), at, 0)
    };
    let commit =
        |slot: u32, action: u32| command(admin::FIRMWARE_COMMIT, 0, [slot | action << 3, 0, 0, 0, 0, 0]);
    assert!(is_ok(&host.admin(download(0, 4))));
    assert_eq!(status(&host.admin(commit(2, 1))), (1, 7), "no image");
    host.write(page, &FIRMWARE_MAGIC);
    assert!(is_ok(&host.admin(download(0, 2))));
    assert_eq!(status(&host.admin(download(1, 2))), (1, 0x14), "overlap");
    host.write(page, b"2.0     ");
    assert!(is_ok(&host.admin(download(2, 2))));
    assert_eq!(status(&host.admin(commit(1, 1))), (1, 6), "slot 1 is read-only");
    assert!(is_ok(&host.admin(commit(2, 1))));
    let slots = host.admin_page(log(3, 512, false));
    assert_eq!((slots[0], &slots[16..24]), (1 | 2 << 4, &b"2.0     "[..]));
    assert_eq!(&host.identify(1, 0)[64..72], b"1.0     ");
    host.disable();
    host.enable();
    assert_eq!(&host.identify(1, 0)[64..72], b"2.0     ");
}

#[test]
fn sanitize_runs_on_and_reports_its_end() {
    let timing = Timing { sanitize: 1_000_000, ..Timing::IMMEDIATE };
    let mut host = Host::ready(Config { timing, ..Config::default() });
    host.write_block(0, 9, 1 << 30);
    assert!(is_ok(&host.admin(command(admin::SANITIZE, 0, [2, 0, 0, 0, 0, 0]))));
    let page = host.iova + host.pages(1);
    assert_eq!(status(&host.run(with_prps(io(nvm::READ, 1, 0, 1), page, 0))), (0, 0x1d));
    assert_eq!(u16_at(&host.admin_page(log(0x81, 512, true)), 2) & 7, 2);
    host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]));
    assert_eq!(host.wait(0).result.get(), 6 | 1 << 8 | 0x81 << 16);
    assert_eq!(host.now, 1_000_000);
    assert_eq!(u16_at(&host.admin_page(log(0x81, 512, false)), 2) & 7, 1);
    assert_eq!(host.read_block(0), 0);
}

#[test]
fn an_expired_keep_alive_timer_is_fatal() {
    let mut host = Host::enabled(Config::default());
    assert!(is_ok(&host.admin(command(admin::SET_FEATURES, 0, [0xf, 1500, 0, 0, 0, 0]))));
    let value = host.admin(command(admin::GET_FEATURES, 0, [0xf, 0, 0, 0, 0, 0])).result.get();
    assert_eq!(value, 2000, "in units of a second");
    host.now += 1_900_000_000;
    assert!(is_ok(&host.admin(command(admin::KEEP_ALIVE, 0, [0; 6]))));
    host.now += 1_900_000_000;
    assert!(is_ok(&host.admin(command(admin::GET_FEATURES, 0, [0xf, 0, 0, 0, 0, 0]))), "restarts nothing");
    assert_eq!(host.reg32(0x1c) & 2, 0);
    host.now += 100_000_000;
    host.step();
    assert_eq!(host.reg32(0x1c) & 2, 2);
}

#[test]
fn retry_delays_need_the_hosts_consent() {
    let mut host = Host::ready(Config::default());
    let fail = Action::Fail(Status::new(0, 0x21).retryable(2));
    let rule = Rule { times: 2, ..Rule::once(Queue::Io, nvm::FLUSH, fail) };
    host.model.with(|c| c.faults().add(rule));
    let crd = |done: crate::CompletionEntry| done.status.get() >> 12 & 3;
    assert_eq!(crd(host.run(command(nvm::FLUSH, 1, [0; 6]))), 0);
    let page = host.pages(1);
    host.write(page, &[1]);
    let behavior = command(admin::SET_FEATURES, 0, [0x16, 0, 0, 0, 0, 0]);
    assert!(is_ok(&host.admin(with_prps(behavior, host.iova + page, 0))));
    let done = host.run(command(nvm::FLUSH, 1, [0; 6]));
    assert_eq!((crd(done), done.status.get() >> 15), (2, 0), "CRD without DNR");
}

#[test]
fn identify_data_can_be_hostile() {
    let mut host = Host::enabled(Config::default());
    let good = host.identify(1, 0);
    host.model.with(|c| c.faults().patch_identify(Patch { cns: 1, offset: 77, bytes: vec![0xff] }));
    assert_eq!(host.identify(1, 0)[77], 0xff);
    host.model.with(|c| c.faults().hostile = Hostile { identify: true, ..Hostile::default() });
    let bad = host.identify(1, 0);
    assert!(good.iter().zip(&bad).filter(|(a, b)| a != b).count() > 1000);
    assert_ne!(bad, host.identify(1, 0));
    host.model.with(|c| c.faults().set_register(0, 0));
    assert_eq!(host.reg32(0), 0);
}

#[test]
fn interrupts_signal_their_vector_once_for_a_batch_unless_masked() {
    use aryk_pci::Function as _;
    use std::os::fd::AsFd as _;
    let mut host = Host::ready(Config::default());
    // Pipes in place of eventfds: the model writes 8 bytes for each signal.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let (_other, unused) = std::io::pipe().unwrap();
    host.model.set_interrupts(&[unused.as_fd(), writer.as_fd()]).unwrap();
    for _ in 0..5 {
        host.prepare(1, command(nvm::FLUSH, 1, [0; 6]));
    }
    host.ring(1);
    host.step();
    assert_eq!(host.model.with(|c| c.interrupts(1)), 1);
    reader.read_exact(&mut [0; 8]).unwrap();
    while host.reap(1).is_some() {}
    let mask = host.model.vector_mask(1).unwrap();
    mask.mask();
    host.run(command(nvm::FLUSH, 1, [0; 6]));
    assert_eq!(host.model.with(|c| c.interrupts(1)), 1, "masked");
    // One write to the table, without a call of the model.
    mask.unmask();
    assert_eq!(host.model.with(|c| c.interrupts(1)), 1, "the model has not run");
    host.step();
    assert_eq!(host.model.with(|c| c.interrupts(1)), 2, "pending until unmasked");
    host.run(command(nvm::FLUSH, 1, [0; 6]));
    assert_eq!(host.model.with(|c| c.interrupts(1)), 3, "unmasked");
    mask.mask();
    host.model.set_interrupts(&[]).unwrap();
    host.run(command(nvm::FLUSH, 1, [0; 6]));
    assert_eq!(host.model.with(|c| c.interrupts(1)), 3);
    host.model.set_interrupts(&[unused.as_fd(), writer.as_fd()]).unwrap();
    host.run(command(nvm::FLUSH, 1, [0; 6]));
    assert_eq!(host.model.with(|c| c.interrupts(1)), 4, "new eventfds unmask");
    assert!(host.model.vector_mask(16).is_some() && host.model.vector_mask(17).is_none(), "17 vectors");
}

#[test]
fn shadow_doorbells_replace_the_mapped_ones_while_the_controller_is_awake() {
    let mut host = Host::ready(Config::default());
    let (shadow, index) = (host.pages(1), host.pages(1));
    let buffers =
        with_prps(command(admin::DOORBELL_BUFFER, 0, [0; 6]), host.iova + shadow, host.iova + index);
    assert!(is_ok(&host.admin(buffers)));
    // The controller falls asleep, and sets the event index to the tail.
    host.step();
    host.step();
    host.prepare(1, command(nvm::FLUSH, 1, [0; 6]));
    host.write(shadow + 8, &1_u32.to_le_bytes());
    host.step();
    assert!(host.reap(1).is_none(), "asleep: only the mapped doorbell wakes it");
    assert_eq!(u32_at(&host.read(index + 8, 4), 0), 0);
    host.ring(1);
    host.step();
    assert!(host.reap(1).is_some());
    host.write(shadow + 12, &1_u32.to_le_bytes());
    host.prepare(1, command(nvm::FLUSH, 1, [0; 6]));
    host.write(shadow + 8, &2_u32.to_le_bytes());
    host.step();
    assert!(host.reap(1).is_some(), "awake: it polls the shadow");
    assert_eq!(u32_at(&host.read(index + 8, 4), 0), 0, "and needs no doorbell");
    host.step();
    assert_eq!(u32_at(&host.read(index + 8, 4), 0), 2, "asleep again");
    // Once around the queue of 64 entries: the mapped doorbell is written with the value that it had.
    host.write(shadow + 12, &2_u32.to_le_bytes());
    host.step();
    for _ in 0..63 {
        host.prepare(1, command(nvm::FLUSH, 1, [0; 6]));
    }
    host.write(shadow + 8, &1_u32.to_le_bytes());
    host.ring(1);
    host.step();
    assert!(
        (0..63).all(|_| host.reap(1).is_some()),
        "a doorbell that keeps its value wakes the controller too"
    );
    let done = host.admin(with_prps(command(admin::DOORBELL_BUFFER, 0, [0; 6]), PAGE + 8, PAGE));
    assert_eq!(status(&done), (0, 2));
    host.assert_clean();
}

#[test]
fn a_temperature_above_its_threshold_raises_an_event() {
    let mut host = Host::enabled(Config::default());
    let set = |fid: u32, value: u32| command(admin::SET_FEATURES, 0, [fid, value, 0, 0, 0, 0]);
    assert!(is_ok(&host.admin(set(0xb, 1 << 1))));
    host.submit(0, command(admin::ASYNC_EVENT, 0, [0; 6]));
    host.step();
    assert!(host.reap(0).is_none());
    assert_eq!(status(&host.admin(set(4, 3 << 16 | 300))), (0, 2), "no third sensor");
    assert!(is_ok(&host.admin(set(4, 1 << 20 | 400))), "too low: nothing happens");
    host.submit(0, set(4, 300));
    let (first, second) = (host.wait(0), host.wait(0));
    let event = if first.cid.get() == 1 { first } else { second };
    assert_eq!(event.result.get(), 1 | 1 << 8 | 2 << 16);
    assert_eq!(host.admin_page(log(2, 512, false))[0] & 2, 2, "the critical warning");
}
