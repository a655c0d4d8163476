//! Reservations: what two hosts with several queues may do, and what they learn.

use crate::host::{Connection, Options};
use crate::raw::{Raw, capsule, capsule_with, command};
use crate::stuck;
use crate::target::{BLOCK, Running, SUBSYSTEM, until};
use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::feature;
use aryk_nvme::spec::identify::{IdentifyController, IdentifyNamespace, cns};
use aryk_nvme::spec::log;
use aryk_nvme::spec::opcode::{admin, io};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::reservation::{Kind, Notice, Registrant, State};
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvmf::{NewNamespace, SaveRequest};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use zerocopy::FromBytes;

const CONFLICT: Result<(), Code> = Err(Code::RESERVATION_CONFLICT);
/// CPTPL of Register: the reservation persists.
const PERSISTS: u32 = 3 << 30;
const IGNORE_KEY: u32 = 1 << 3;

/// A host, which has a queue or two. Its key is its number.
struct Host {
    number: u8,
    admin_queue: Connection,
    queues: Vec<Connection>,
}

impl Host {
    fn connect(target: &Running, number: u8, queues: u16) -> Self {
        let (admin_queue, id) = Connection::admin(target.address, Options::default(), SUBSYSTEM, number);
        let queue = |qid| Connection::io(target.address, Options::default(), id, qid, number).unwrap();
        Self { number, admin_queue, queues: (1..=queues).map(queue).collect() }
    }

    /// Runs a command of reservations, with the host's key and another one.
    fn reserve(&mut self, opcode: u8, cdw10: u32, first: u64, second: u64) -> Result<(), Code> {
        let entry = SubmissionEntry::new(opcode, 1).with_cdw10_11(cdw10, 0);
        let data = [first.to_le_bytes(), second.to_le_bytes()].concat();
        self.queues[0].run(entry, &data, 0).map(drop)
    }

    fn key(&self) -> u64 {
        self.number.into()
    }

    fn register(&mut self) -> Result<(), Code> {
        self.reserve(io::RESERVATION_REGISTER, 0, 0, self.key())
    }

    fn unregister(&mut self) -> Result<(), Code> {
        self.reserve(io::RESERVATION_REGISTER, 1, self.key(), 0)
    }

    fn acquire(&mut self, kind: Kind) -> Result<(), Code> {
        self.reserve(io::RESERVATION_ACQUIRE, (kind as u32) << 8, self.key(), 0)
    }

    /// Preempts a key. The action is 1, or 2 to abort commands, too.
    fn preempt(&mut self, action: u32, victim: u64, kind: Kind) -> Result<(), Code> {
        self.reserve(io::RESERVATION_ACQUIRE, action | (kind as u32) << 8, self.key(), victim)
    }

    fn release(&mut self, kind: Kind) -> Result<(), Code> {
        self.reserve(io::RESERVATION_RELEASE, (kind as u32) << 8, self.key(), 0)
    }

    fn clear(&mut self) -> Result<(), Code> {
        self.reserve(io::RESERVATION_RELEASE, 1, self.key(), 0)
    }

    /// The registered hosts, each with whether it holds the reservation; the type, and whether all of it persists.
    fn report(&mut self) -> (Vec<(u8, bool)>, u8, bool) {
        let entry = SubmissionEntry::new(io::RESERVATION_REPORT, 1).with_cdw10_11(4096 / 4 - 1, 1);
        let (_, report) = self.queues[0].run(entry, &[], 4096).unwrap();
        let of = |registrant: &[u8]| {
            assert_eq!(registrant[..2], [0xff; 2], "any controller");
            (registrant[16], registrant[2] & 1 == 1)
        };
        let registrants = report[64..].chunks(64).take(report[5].into()).map(of).collect();
        (registrants, report[4], report[9] & 1 == 1)
    }

    /// Whether each command that only reads succeeds, and each one that writes. All queues agree.
    fn may(&mut self) -> (bool, bool) {
        let block = [0; BLOCK];
        let range = [&[0; 4], &1_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat();
        let discard = SubmissionEntry::new(io::DATASET_MANAGEMENT, 1);
        let copy = SubmissionEntry::new(io::COPY, 1).with_cdw10_11(1, 0);
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for queue in &mut self.queues {
            writes.push(queue.write(0, &block).map(drop));
            writes.push(queue.command(io::WRITE_ZEROES, 0, 1, &[], 0).map(drop));
            writes.push(queue.command(io::FLUSH, 0, 1, &[], 0).map(drop));
            for attributes in [0, 4] {
                writes.push(queue.run(discard.with_cdw10_11(0, attributes), &range, 0).map(drop));
            }
            writes.push(queue.run(copy, &[0; 32], 0).map(drop));
            reads.push(queue.read(0, 1).map(drop));
            reads.push(queue.command(io::VERIFY, 0, 1, &[], 0).map(drop));
            let compared = queue.command(io::COMPARE, 0, 1, &block, 0).map(drop);
            reads.push(if compared == Err(Code::COMPARE_FAILURE) { Ok(()) } else { compared });
        }
        let agreed = |results: &[Result<(), Code>]| {
            assert!(results.iter().all(|of| *of == results[0]), "{results:?}");
            assert!(results[0].is_ok() || results[0] == CONFLICT, "{results:?}");
            results[0].is_ok()
        };
        (agreed(&reads), agreed(&writes))
    }
}

#[test]
fn each_type_admits_the_commands_of_the_specification() {
    let target = Running::start();
    let (mut a, mut b) = (Host::connect(&target, 1, 2), Host::connect(&target, 2, 2));
    assert_eq!(a.acquire(Kind::WriteExclusive), CONFLICT, "not registered");
    a.register().unwrap();
    // What another host may read and write, registered and not.
    for (kind, registered, other) in [
        (Kind::WriteExclusive, (true, false), (true, false)),
        (Kind::ExclusiveAccess, (false, false), (false, false)),
        (Kind::WriteExclusiveRegistrants, (true, true), (true, false)),
        (Kind::ExclusiveAccessRegistrants, (true, true), (false, false)),
        (Kind::WriteExclusiveAll, (true, true), (true, false)),
        (Kind::ExclusiveAccessAll, (true, true), (false, false)),
    ] {
        assert_eq!((a.may(), b.may()), ((true, true), (true, true)), "{kind:?}");
        a.acquire(kind).unwrap();
        assert_eq!((a.may(), b.may()), ((true, true), other), "{kind:?}");
        b.register().unwrap();
        assert_eq!((a.may(), b.may()), ((true, true), registered), "{kind:?}");
        let is_all = kind as u8 >= 5;
        assert_eq!(b.report(), (vec![(1, true), (2, is_all)], kind as u8, false));
        // A queue that begins knows the reservation.
        let mut late = Host::connect(&target, 2, 1);
        assert_eq!(late.may(), registered, "{kind:?}");
        late.unregister().unwrap();
        assert_eq!(late.may(), other, "{kind:?}");
        b = late;
        a.release(kind).unwrap();
    }
    target.stop();
}

#[test]
fn a_fused_compare_and_write_needs_the_right_to_write() {
    let target = Running::start();
    let mut a = Host::connect(&target, 1, 1);
    let (_admin_queue, id) = Raw::admin_as(target.address, 2);
    let mut b = Raw::io_as(target.address, id, 1, 16, 2);
    a.register().unwrap();
    a.acquire(Kind::WriteExclusive).unwrap();
    let block = [0; BLOCK];
    b.send(&capsule_with(command(1, io::COMPARE, 0, 1, 0).with_fuse(Fuse::First), &block));
    b.send(&capsule_with(command(2, io::WRITE, 0, 1, 0).with_fuse(Fuse::Second), &block));
    let mut codes = [0; 2].map(|_| b.completion().map(|of| (of.cid(), of.status().code())).unwrap());
    codes.sort_by_key(|(cid, _)| *cid);
    assert_eq!(codes, [(1, Code::FUSED_FAILED), (2, Code::RESERVATION_CONFLICT)]);
    target.stop();
}

#[test]
fn a_preempted_host_is_out_until_it_registers_again() {
    let target = Running::start();
    let (mut a, mut b) = (Host::connect(&target, 1, 2), Host::connect(&target, 2, 2));
    a.register().unwrap();
    b.register().unwrap();
    let kind = Kind::WriteExclusiveRegistrants;
    a.acquire(kind).unwrap();
    assert_eq!(b.acquire(kind), CONFLICT);
    assert_eq!(b.preempt(1, 99, kind), CONFLICT);
    assert_eq!(b.preempt(1, 0, kind), Err(Code::INVALID_FIELD));
    b.preempt(1, a.key(), kind).unwrap();
    assert_eq!((a.may(), b.may()), ((true, false), (true, true)));
    assert_eq!((a.release(kind), a.clear(), a.unregister()), (CONFLICT, CONFLICT, CONFLICT));
    assert_eq!(a.report(), (vec![(2, true)], kind as u8, false));
    a.register().unwrap();
    assert_eq!(a.may(), (true, true));
    // The holder goes, and the reservation with it.
    b.unregister().unwrap();
    assert_eq!((a.report(), b.may()), ((vec![(1, false)], 0, false), (true, true)));
    a.acquire(Kind::ExclusiveAccess).unwrap();
    assert_eq!(b.may(), (false, false));
    a.clear().unwrap();
    assert_eq!((a.report(), b.may()), ((vec![], 0, false), (true, true)));
    target.stop();
}

#[test]
fn a_host_that_is_fenced_has_no_write_left_when_the_other_one_knows() {
    for (action, kind) in [(1, Kind::WriteExclusive), (2, Kind::WriteExclusive), (2, Kind::ExclusiveAccess)] {
        let (target, stuck) = stuck::start(1);
        let (mut a, mut b) = (Host::connect(&target, 1, 2), Host::connect(&target, 2, 2));
        a.register().unwrap();
        b.register().unwrap();
        a.acquire(kind).unwrap();
        stuck.is_stuck.store(true, Relaxed);
        // One write is in the disk. The data of the other has not been sent when the host is fenced.
        let in_disk = SubmissionEntry::new(io::WRITE, 1).with_cdw12_13(0, 0);
        let first = a.queues[0].submit(in_disk, &[1; BLOCK], 0);
        let second = a.queues[1].start(io::WRITE, 0, 4);
        for _ in 0..20 {
            a.queues[0].read(0, 1).unwrap();
        }
        until(|| stuck.writes.load(Relaxed) == 1);
        let victim = a.key();
        let fencing = std::thread::spawn(move || {
            b.preempt(action, victim, kind).unwrap();
            b
        });
        // The host is out before its write has ended. Each of its queues learns that a moment after the list shows it;
        // a flush that comes earlier does not get stuck in the disk, as a write would.
        until(|| target.list()[0].namespaces[&1].reservations.registrants.len() == 1);
        until(|| a.queues[0].command(io::FLUSH, 0, 1, &[], 0).map(drop) == CONFLICT);
        assert_eq!(a.queues[0].write(1, &[2; BLOCK]), CONFLICT);
        assert!(!fencing.is_finished());
        stuck.is_stuck.store(false, Relaxed);
        let mut b = fencing.join().unwrap();
        let lost = if action == 2 { Code::PREEMPTED } else { Code::RESERVATION_CONFLICT };
        assert!(a.queues[0].wait(first).is_ok(), "the disk has written it");
        assert_eq!(a.queues[1].wait(second).err(), Some(lost), "its data came too late");
        assert_eq!(stuck.writes.load(Relaxed), 1);
        assert_eq!(
            (a.queues[1].write(0, &[3; BLOCK]), b.queues[1].write(0, &[3; BLOCK])),
            (CONFLICT, Ok(()))
        );
        target.stop();
    }
}

#[test]
fn the_controller_and_the_namespace_say_what_they_can() {
    let target = Running::start();
    let mut a = Host::connect(&target, 1, 1);
    let page = IdentifyController::read_from_bytes(&a.admin_queue.identify(cns::CONTROLLER, 0)).unwrap();
    assert_eq!((page.oncs.get() & 1 << 5, page.cmic & 0b11, page.ctratt.get() & 1), (1 << 5, 0b11, 1));
    let page = IdentifyNamespace::read_from_bytes(&a.admin_queue.identify(cns::NAMESPACE, 1)).unwrap();
    assert_eq!((page.rescap, page.nmic), (0xfe, 1), "nothing persists without a place for it");
    let refused = a.reserve(io::RESERVATION_REGISTER, PERSISTS, 0, 1);
    assert_eq!(refused, Err(Code::INVALID_FIELD));
    let set = SubmissionEntry::new(admin::SET_FEATURES, 1)
        .with_cdw10_11(feature::RESERVATION_PERSISTENCE.into(), 1);
    assert_eq!(a.admin_queue.run(set, &[], 0), Err(Code::INVALID_FIELD));
    assert_eq!(a.report(), (vec![], 0, false));
    target.stop();
}

impl Running {
    /// Replaces namespace 1 by one whose reservations are stored: the requests for that.
    fn store(&self, stored: State) -> UnboundedReceiver<SaveRequest> {
        let (saver, saves) = unbounded_channel();
        self.run(async move |target| {
            target.set_saver(Rc::new(move |request| drop(saver.send(request))));
            target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
            let new = NewNamespace { reservations: stored, ..NewNamespace::default() };
            target.add_namespace(SUBSYSTEM, "disk", new).await.unwrap();
        });
        saves
    }
}

#[test]
fn what_persists_is_stored_before_it_is_answered() {
    let target = Running::start();
    let mut saves = target.store(State::default());
    let mut a = Host::connect(&target, 1, 1);
    let page = IdentifyNamespace::read_from_bytes(&a.admin_queue.identify(cns::NAMESPACE, 1)).unwrap();
    assert_eq!(page.rescap, 0xff);
    let (sender, finished) = std::sync::mpsc::channel();
    // The test answers each request when it has looked at it.
    let saving = std::thread::spawn(move || {
        let mut stored = Vec::new();
        while let Some(SaveRequest { subsystem, nsid, state, durable, done, .. }) = saves.blocking_recv() {
            assert_eq!((subsystem.as_str(), nsid), (SUBSYSTEM, 1));
            let is_refused = stored.len() == 3;
            stored.push((state, durable));
            done.send(!is_refused).unwrap();
        }
        sender.send(stored).unwrap();
    });
    a.register().unwrap();
    a.acquire(Kind::WriteExclusive).unwrap();
    a.acquire(Kind::WriteExclusive).unwrap();
    let replace = |key| (io::RESERVATION_REGISTER, 2 | PERSISTS | IGNORE_KEY, 0, key);
    let (opcode, cdw10, first, second) = replace(7);
    a.reserve(opcode, cdw10, first, second).unwrap();
    assert!(a.report().2);
    let get = SubmissionEntry::new(admin::GET_FEATURES, 1)
        .with_cdw10_11(feature::RESERVATION_PERSISTENCE.into(), 0);
    assert_eq!(a.admin_queue.run(get, &[], 0).map(|(value, _)| value), Ok(1));
    let set = SubmissionEntry::new(admin::SET_FEATURES, u32::MAX)
        .with_cdw10_11(feature::RESERVATION_PERSISTENCE.into(), 0);
    assert_eq!(a.admin_queue.run(set, &[], 0), Err(Code::INTERNAL_ERROR), "it cannot be stored");
    assert!(a.report().2, "nothing has changed");
    assert!(a.admin_queue.run(set, &[], 0).is_ok());
    assert!(!a.report().2);
    target.stop();
    saving.join().unwrap();

    let registrants = |key| vec![Registrant { host: [1; 16], key }];
    let holder = Some(([1; 16], Kind::WriteExclusive));
    let held = |key, persists| State { registrants: registrants(key), holder, persists };
    let stored = finished.recv().unwrap();
    let expected = [
        (State { holder: None, ..held(1, false) }, false),
        (held(1, false), false),
        (held(7, true), true),
        (held(7, false), true),
        (held(7, false), true),
    ];
    assert_eq!(stored, expected, "an end of what persists is durable, too");
}

#[test]
fn what_was_stored_holds_from_the_first_command_on() {
    let target = Running::start();
    let registrants = vec![Registrant { host: [2; 16], key: 2 }];
    let kind = Kind::ExclusiveAccessRegistrants;
    let _saves = target.store(State { registrants, holder: Some(([2; 16], kind)), persists: true });
    let (mut a, mut b) = (Host::connect(&target, 1, 1), Host::connect(&target, 2, 1));
    assert_eq!((a.may(), b.may()), ((false, false), (true, true)));
    assert_eq!(a.report(), (vec![(2, true)], kind as u8, true));
    // The requests to store are kept, but not answered.
    drop(_saves);
    assert_eq!(b.unregister(), Err(Code::INTERNAL_ERROR));
    assert_eq!(a.may(), (false, false), "what is not stored does not hold");
    target.stop();
}

/// The first host, which sees each PDU.
struct Watcher {
    admin_queue: Raw,
    queue: Raw,
}

impl Watcher {
    fn connect(target: &Running) -> Self {
        let (admin_queue, id) = Raw::admin(target.address);
        Self { admin_queue, queue: Raw::io(target.address, id, 1, 16) }
    }

    fn register(&mut self) {
        let entry = SubmissionEntry::new(io::RESERVATION_REGISTER, 1).with_cdw10_11(IGNORE_KEY | 2, 0);
        self.queue.send(&capsule_with(entry, &[1_u64.to_le_bytes(); 2].concat()));
        assert_eq!(self.queue.completion().unwrap().status().code(), Code::SUCCESS);
    }

    fn mask(&mut self, nsid: u32, mask: u32) {
        let set = SubmissionEntry::new(admin::SET_FEATURES, nsid)
            .with_cdw10_11(feature::RESERVATION_MASK.into(), mask)
            .with_sgl(Sgl::Transport { len: 0 }.encode());
        assert_eq!(self.admin_queue.run(set).0, Code::SUCCESS);
    }

    fn request_event(&mut self) {
        self.admin_queue.send(&capsule(command(100, admin::ASYNC_EVENT_REQUEST, 0, 1, 0)));
    }

    fn has_event(&mut self) {
        let completion = self.admin_queue.completion().unwrap();
        assert_eq!((completion.cid(), completion.result()), (100, 0x0080_0006));
    }

    /// The number of a notice, what it says, and how many follow.
    fn page(&mut self) -> (u8, u8, u8) {
        let dwords = u64::from(log::RESERVATION) | 15 << 16;
        let (code, page) = self.admin_queue.run(command(2, admin::GET_LOG_PAGE, dwords, 1, 64));
        assert_eq!((code, page[12]), (Code::SUCCESS, u8::from(page[8] != 0)));
        (page[0], page[8], page[9])
    }
}

#[test]
fn a_host_learns_what_has_become_of_its_registration() {
    let target = Running::start();
    let (mut a, mut b) = (Watcher::connect(&target), Host::connect(&target, 2, 1));
    assert_eq!(a.page(), (0, 0, 0), "there is none");
    a.request_event();
    let kind = Kind::WriteExclusiveRegistrants;
    let cycle = |a: &mut Watcher, b: &mut Host| {
        a.register();
        b.acquire(kind).unwrap();
        b.release(kind).unwrap();
        b.preempt(1, 1, kind).unwrap();
        a.register();
        b.clear().unwrap();
        b.register().unwrap();
    };
    b.register().unwrap();
    cycle(&mut a, &mut b);
    // One event for all, and the next one when the first notice has been read.
    a.has_event();
    a.request_event();
    assert_eq!(a.page(), (1, Notice::ReservationReleased as u8, 2));
    a.has_event();
    assert_eq!(a.page(), (2, Notice::RegistrationPreempted as u8, 1));
    assert_eq!(a.page(), (3, Notice::ReservationPreempted as u8, 0));
    assert_eq!(a.page(), (0, 0, 0));

    // What the host masks is not counted either.
    a.mask(1, 1 << 1 | 1 << 3);
    cycle(&mut a, &mut b);
    assert_eq!(a.page(), (4, Notice::ReservationReleased as u8, 0));
    a.mask(u32::MAX, 0b1110);
    cycle(&mut a, &mut b);
    assert_eq!(a.page(), (0, 0, 0));

    // More than the controller keeps leave a gap.
    a.mask(1, 0);
    for _ in 0..50 {
        cycle(&mut a, &mut b);
    }
    assert_eq!(a.page(), (5, Notice::ReservationReleased as u8, 127));
    let last = (0..127).map(|_| a.page()).last();
    assert_eq!(last.map(|(number, _, left)| (number, left)), Some((4 + 128, 0)));
    cycle(&mut a, &mut b);
    assert_eq!(a.page().0, 4 + 150 + 1);
    target.stop();
}

#[test]
fn commands_of_any_content_harm_nobody() {
    let target = Running::start();
    let (mut a, mut b) = (Watcher::connect(&target), Host::connect(&target, 2, 1));
    b.register().unwrap();
    b.acquire(Kind::ExclusiveAccess).unwrap();
    let opcodes =
        [io::RESERVATION_REGISTER, io::RESERVATION_REPORT, io::RESERVATION_ACQUIRE, io::RESERVATION_RELEASE];
    let mut seed = 1_u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 32) as u32
    };
    for round in 0..2000 {
        // No key of the other host.
        let data: Vec<u8> = (0..next() % 40).map(|_| (next() % 3 * 77) as u8).collect();
        let bits = if round % 2 == 0 { next() } else { next() & 0xf0f };
        let entry = SubmissionEntry::new(opcodes[next() as usize % 4], 1)
            .with_cid(round)
            .with_cdw10_11(bits, next() % 2);
        a.queue.send(&capsule_with(entry, &data));
        assert_eq!(a.queue.completion().unwrap().cid(), round);
    }
    assert_eq!((b.may(), b.report().0.contains(&(2, true))), ((true, true), true));
    // Commands whose queue ends before they are answered.
    for cid in 0..10 {
        let entry = SubmissionEntry::new(io::RESERVATION_REGISTER, 1).with_cid(cid);
        a.queue.send(&capsule_with(entry, &[3; 16]));
    }
    drop(a);
    until(|| target.list()[0].controllers.len() == 1);
    assert_eq!(b.may(), (true, true));
    target.stop();
}
