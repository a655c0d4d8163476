//! Tests of an I/O queue on a reactor that the test runs, with a disk that completes when the test allows it.

mod copy;
mod ending;
mod reserve;
mod sockets;
mod tls;

use super::*;
use crate::association::Place;
use crate::pool::TRANSFER_MAX;
use crate::reservation::{Asked, OfHost};
use aryk_bdev::{
    Access, Blocks, Channel, Device, Geometry, Identity, Io, Limits as DeviceLimits, Op, OpSet, Registry,
    Status, Tag,
};
use aryk_bdev_conformance::Bench;
use aryk_nvme::spec::entry::{Fuse, SubmissionEntry};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::subsystem::{Commands, Io as Namespaces, Namespace};
use aryk_nvme_fabrics::tcp::{
    Event, Fatal, FatalStatus, Format, H2cData, HEADER_MAX, Header, IcReq, IcResp, Limits, Parser, Piece,
    Queue, R2t, Received, Side,
};
use aryk_reactor::{Clock, CoreSet, Engine};
use aryk_tls::Session;
use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

const BLOCK: u32 = 4096;
const BLOCKS: u64 = 1 << 20;
const ENTRIES: u16 = 128;

/// What the test and the disk share.
#[derive(Debug, Default)]
struct Control {
    is_held: AtomicBool,
    /// It does not abort requests.
    is_stuck: AtomicBool,
    /// It completes so many requests although it is held.
    let_go: AtomicU32,
    /// Copies: source, destination, blocks, FUA.
    copies: Mutex<Vec<(u64, u64, u64, bool)>>,
    /// Requests by operation.
    requests: [AtomicU32; Op::ALL.len()],
}

impl Control {
    fn count(&self, op: Op) -> u32 {
        self.requests[op as usize].load(Relaxed)
    }

    /// Has the disk complete the oldest request that it holds.
    fn complete_one(&self) {
        self.let_go.store(1, Relaxed);
    }

    /// The copies since the last call.
    fn take_copies(&self) -> Vec<(u64, u64, u64, bool)> {
        std::mem::take(&mut *self.copies.lock().unwrap())
    }
}

/// A disk that moves no data.
struct HeldDisk(Arc<Control>);

struct HeldChannel {
    root: RootId,
    control: Arc<Control>,
    held: Vec<Tag>,
    aborted: Vec<Tag>,
}

impl Device for HeldDisk {
    fn product(&self) -> &'static str {
        "held"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK, Blocks(BLOCKS))
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { depth: 4096, ..DeviceLimits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::ALL
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let control = Arc::clone(&self.0);
        Ok(Box::new(HeldChannel { root, control, held: Vec::new(), aborted: Vec::new() }))
    }
}

impl Channel for HeldChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.control.requests[io.op as usize].fetch_add(1, Relaxed);
        if io.op == Op::Copy {
            self.control.copies.lock().unwrap().push((io.source.0, io.lba.0, io.blocks.0, io.fua));
        }
        self.held.push(io.tag);
        cx.wake(self.root);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        if self.control.is_stuck.load(Relaxed) {
            return;
        }
        self.aborted.extend(self.held.extract_if(.., |held| *held == tag));
        cx.wake(self.root);
    }

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        out.extend(self.aborted.drain(..).map(|tag| Completion { tag, status: Status::Aborted }));
        if !self.control.is_held.load(Relaxed) {
            out.extend(self.held.drain(..).map(|tag| Completion { tag, status: Status::Ok }));
        } else if !self.held.is_empty() && self.control.let_go.swap(0, Relaxed) > 0 {
            out.push(Completion { tag: self.held.remove(0), status: Status::Ok });
        }
    }
}

/// What a host received.
#[derive(Debug)]
enum Got {
    Completion(u16, Code),
    R2t(R2t),
    Data(u32),
    Terminated(Fatal),
}

fn tcp_of(queue: &IoQueue) -> &tcp::Tcp {
    match &queue.link {
        Link::Tcp(tcp) => tcp,
        Link::Rdma(_) => panic!("the queues of these tests are of TCP"),
    }
}

/// How the tests' queues reach their sockets: by this kernel interface, and whether sends make no copy. [`all_forms`] sets it.
fn form() -> (Engine, bool) {
    match std::env::var(FORM).as_deref() {
        Err(_) => (Engine::Auto, false),
        Ok("zero-copy") => (Engine::IoUring, true),
        Ok("epoll") => (Engine::Epoll, false),
        Ok(form) => panic!("{form}"),
    }
}

const FORM: &str = "ARYK_TEST_SOCKETS";

/// Runs the tests of queues again, with each other form of their sockets.
#[test]
fn all_forms() {
    if std::env::var(FORM).is_ok() {
        return;
    }
    for form in ["zero-copy", "epoll"] {
        let program = std::env::current_exe().unwrap();
        let ended = std::process::Command::new(program).arg("queue::").env(FORM, form).output().unwrap();
        assert!(ended.status.success(), "{form}: {}", String::from_utf8_lossy(&ended.stdout));
    }
}

struct Rig {
    bench: Bench,
    clock: Arc<AtomicU64>,
    registry: Registry,
    host: TcpStream,
    /// The host's side of TLS, if the connection uses it.
    tls: Option<Session>,
    parser: Parser,
    got: Vec<Got>,
    /// The result of the last command that has completed.
    result: u32,
    queue: Rc<RefCell<IoQueue>>,
    ended: oneshot::Receiver<Ended>,
    asked: UnboundedReceiver<Asked>,
}

fn pdu(header: &Header, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_MAX];
    let len = header.encode(&Format::default(), &mut bytes);
    bytes.truncate(len);
    bytes.extend(data);
    bytes
}

fn entry(cid: u16, opcode: u8, lba: u64, blocks: u32) -> SubmissionEntry {
    SubmissionEntry::new(opcode, 1)
        .with_cid(cid)
        .with_cdw10_11(lba as u32, 0)
        .with_cdw12_13(blocks - 1, 0)
        .with_sgl(Sgl::Transport { len: blocks * BLOCK }.encode())
}

fn command(entry: SubmissionEntry) -> Vec<u8> {
    pdu(&Header::Command { entry, data_len: 0 }, &[])
}

fn command_with(entry: SubmissionEntry, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    let entry = entry.with_sgl(Sgl::InCapsule { offset: 0, len }.encode());
    pdu(&Header::Command { entry, data_len: len }, data)
}

impl Rig {
    fn new() -> (Self, Arc<Control>) {
        Self::with(false, false)
    }

    /// A queue with digests of data, or with TLS.
    fn with(data_digest: bool, uses_tls: bool) -> (Self, Arc<Control>) {
        let clock = Arc::new(AtomicU64::new(1));
        let (engine, zero_copy) = form();
        let mut bench = Bench::on(engine, Clock::Virtual(Arc::clone(&clock)));
        let registry = Registry::new();
        let control = add_disk(&registry, "disk");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        host.set_nodelay(true).unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.set_nodelay(true).unwrap();

        let supported =
            IcResp { alignment: 0, header_digest: false, data_digest: true, h2c_data_max: 128 << 10 };
        let mut queue = Queue::new(supported, 8192);
        let request = IcReq { alignment: 0, header_digest: false, data_digest, max_r2t: 0 };
        assert_eq!(queue.receive(&mut &pdu(&Header::IcReq(request), &[])[..]), Ok(None));
        let mut parser = Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max: 1 << 20 });
        let mut len = 0;
        for piece in queue.output() {
            let Piece::Bytes(bytes) = piece else { panic!("{piece:?}") };
            parser.next(&mut &bytes[..]).unwrap();
            len += bytes.len();
        }
        queue.sent(len, |_| {});
        parser.establish(Format { data_digest, ..Format::default() });
        let connect = command(SubmissionEntry::new(0x7f, 1));
        let mut input = &connect[..];
        let connect = loop {
            if let Received::Ready { slot, .. } = queue.receive(&mut input).unwrap().unwrap() {
                break slot;
            }
        };

        let opened = opened(&registry, "disk", 0);
        let reactor = bench.cx().handle().clone();
        bench.wait("the reactor to be prepared", opened.descriptor.prepare(&reactor)).unwrap();
        let lines = Arc::new(LogLimit::new(1, Duration::from_secs(1)));
        let patience = Nanos(30_000_000_000);
        let (sender, asked) = tokio::sync::mpsc::unbounded_channel();
        let place = Place { subsystem: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(), controller: 1 };
        let asker = Asker { host: OfHost { place, id: [1; 16] }, qid: 1, asked: sender };
        let (tls, tls_of_queue) = uses_tls.then(tls::sessions).unzip();
        let connected = Connected {
            counts: Arc::default(),
            qos: Arc::default(),
            retry_delays: Arc::default(),
            carrier: Carrier::Tcp(TcpCarrier {
                socket,
                tls: tls_of_queue,
                queue,
                rest: Vec::new(),
                zero_copy,
            }),
            entries: ENTRIES,
            patience,
            lines,
            asker,
            carried: Carried::default(),
        };
        let (sender, ended) = oneshot::channel();
        let cx = bench.cx();
        let arrival = Arrival::New("queue".to_owned(), CoreSet::allowed(), Box::new(connected));
        let Ok(Started { root, .. }) = IoQueue::arrive(arrival, vec![opened], sender, cx) else { panic!() };
        let queue: Rc<RefCell<IoQueue>> = cx.root(root.id()).unwrap();
        queue.borrow_mut().begin(Some(connect), false, 1, cx);
        host.set_nonblocking(true).unwrap();
        let got = Vec::new();
        let mut rig = Self { bench, clock, registry, host, tls, parser, got, result: 0, queue, ended, asked };
        assert!(matches!(rig.receive(1)[..], [Got::Completion(0, Code::SUCCESS)]));
        (rig, control)
    }

    /// Sends bytes, and receives meanwhile if the queue takes none.
    fn send(&mut self, bytes: &[u8]) {
        let mut records = Vec::new();
        if let Some(tls) = &mut self.tls {
            tls.write(bytes, &mut records).unwrap();
        }
        let mut bytes = if self.tls.is_some() { &records[..] } else { bytes };
        while !bytes.is_empty() {
            match self.host.write(bytes) {
                Ok(len) => bytes = &bytes[len..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.bench.turn();
                    self.receive_once();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn turns(&mut self, count: u32) {
        for _ in 0..count {
            self.bench.turn();
        }
    }

    /// What the host has received, without the pieces of data.
    fn received(&mut self) -> Vec<Got> {
        self.receive_once();
        std::mem::take(&mut self.got)
    }

    fn receive_once(&mut self) {
        let mut bytes = vec![0; 1 << 16];
        let len = match self.host.read(&mut bytes) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) => panic!("{error}"),
        };
        assert!(len > 0, "the queue has closed the connection");
        let mut plain = Vec::new();
        let mut input = &bytes[..len];
        if let Some(tls) = &mut self.tls {
            tls::open(tls, input, &mut plain);
            input = &plain;
        }
        while let Some(event) = self.parser.next(&mut input).unwrap() {
            match event {
                Event::Header(Header::Response(entry)) => {
                    self.result = entry.result();
                    self.got.push(Got::Completion(entry.cid(), entry.status().code()));
                }
                Event::Header(Header::R2t(r2t)) => self.got.push(Got::R2t(r2t)),
                Event::Header(Header::C2hData(data)) => self.got.push(Got::Data(data.len)),
                Event::Header(Header::TermReq { fatal, .. }) => self.got.push(Got::Terminated(fatal)),
                Event::Header(header) => panic!("{header:?}"),
                Event::Data { .. } | Event::End { .. } => {}
            }
        }
    }

    /// Runs turns until the host has received so much, without the pieces of data.
    fn receive(&mut self, count: usize) -> Vec<Got> {
        let mut got = Vec::new();
        for _ in 0..1_000_000 {
            if got.len() >= count {
                break;
            }
            self.bench.turn();
            got.extend(self.received());
        }
        assert_eq!(got.len(), count, "{got:?}");
        got
    }

    /// The completions of so many commands, by identifier.
    fn completions(&mut self, count: usize) -> Vec<(u16, Code)> {
        let got = self.receive(count);
        let mut done: Vec<_> = got
            .into_iter()
            .map(|got| match got {
                Got::Completion(cid, code) => (cid, code),
                got => panic!("{got:?}"),
            })
            .collect();
        done.sort_by_key(|(cid, _)| *cid);
        done
    }

    fn requested<const N: usize>(&mut self) -> [R2t; N] {
        let mut got = self.receive(N).into_iter();
        std::array::from_fn(|_| match got.next() {
            Some(Got::R2t(r2t)) => r2t,
            got => panic!("{got:?}"),
        })
    }

    fn answer(&mut self, r2t: R2t, data: &[u8]) {
        let R2t { cid, tag, offset, len } = r2t;
        self.send(&pdu(&Header::H2cData(H2cData { cid, tag, offset, len, is_last: true }), data));
    }

    fn queue(&mut self) -> (RefMut<'_, IoQueue>, &mut Cx) {
        (self.queue.borrow_mut(), self.bench.cx())
    }

    fn abort(&mut self, cid: u16) -> bool {
        let (mut queue, cx) = self.queue();
        queue.abort(cid, cx)
    }

    /// Closes the queue, which tells its end.
    fn end(mut self) {
        {
            let (mut queue, cx) = self.queue();
            queue.close(cx);
        }
        self.turns(100);
        assert!(matches!(self.ended.try_recv(), Ok(Some(Ended::Closed))));
        let Self { bench, queue, registry, .. } = self;
        drop((queue, bench, registry));
    }
}

fn add_disk(registry: &Registry, name: &str) -> Arc<Control> {
    let control = Arc::<Control>::default();
    registry.register(Identity::named(name), Arc::new(HeldDisk(Arc::clone(&control)))).unwrap();
    control
}

fn opened(registry: &Registry, name: &str, number: u64) -> Opened {
    let namespace = Namespace {
        blocks: BLOCKS,
        block_shift: 12,
        ids: aryk_nvme::spec::identify::Descriptors::default(),
        ana_group: 0,
        is_read_only: false,
        copy_blocks: u64::MAX,
        optimal_write_blocks: 1,
        can_persist: false,
        persists: false,
    };
    let namespaces = Namespaces {
        nsid_max: 1,
        namespaces: BTreeMap::from([(1, namespace)]),
        ana: None,
        transfer_max: TRANSFER_MAX as u32,
        in_capsule_max: 8192,
        queues: 1,
        commands: Commands {
            compare: true,
            compare_and_write: true,
            deallocate: true,
            write_zeroes: true,
            verify: true,
            copy: true,
            reservations: true,
        },
        retry_delays: [0; 3],
    };
    let rules = Rules::new(&namespaces, 1).unwrap();
    let descriptor = registry.open(name, Access::Exclusive, "the test", |_| ()).unwrap();
    Opened { nsid: 1, number, rules, descriptor }
}

#[test]
fn a_host_that_does_not_send_the_data_of_a_write_in_time_is_disconnected() {
    let (mut rig, control) = Rig::new();
    rig.send(&command(entry(1, io::WRITE, 0, 4)));
    let [first] = rig.requested();
    let seconds = |rig: &mut Rig, seconds: u64| {
        rig.clock.fetch_add(seconds * 1_000_000_000, Relaxed);
        rig.turns(20);
    };
    seconds(&mut rig, 20);
    rig.send(&command(entry(2, io::WRITE, 8, 4)));
    let [second] = rig.requested();
    seconds(&mut rig, 9);
    rig.answer(first, &[1; 4 * BLOCK as usize]);
    assert_eq!(rig.completions(1), [(1, Code::SUCCESS)]);
    // The first request is answered, the second has 10 seconds left.
    seconds(&mut rig, 19);
    assert!(matches!(rig.ended.try_recv(), Ok(None)));
    rig.answer(second, &[1; 4 * BLOCK as usize]);
    assert_eq!(rig.completions(1), [(2, Code::SUCCESS)]);
    // Without requests there is no limit.
    seconds(&mut rig, 1000);
    rig.send(&command(entry(3, io::WRITE, 0, 4)));
    let [_] = rig.requested();
    seconds(&mut rig, 29);
    assert!(matches!(rig.ended.try_recv(), Ok(None)));
    seconds(&mut rig, 2);
    assert!(matches!(rig.ended.try_recv(), Ok(Some(Ended::Closed))));
    assert_eq!(rig.host.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(control.count(Op::Write), 2);
}

#[test]
fn a_disk_gets_the_ranges_of_a_discard_a_few_at_a_time() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    let range = |lba: u64, blocks: u32| [&[0; 4], &blocks.to_le_bytes()[..], &lba.to_le_bytes()].concat();
    let ranges: Vec<u8> = (0..256).flat_map(|i| range(i * 8, (i % 2) as u32)).collect();
    let discard = |cid| SubmissionEntry::new(io::DATASET_MANAGEMENT, 1).with_cid(cid).with_cdw10_11(255, 4);
    rig.send(&command_with(discard(1), &ranges));
    rig.turns(20);
    assert_eq!(control.count(Op::Unmap), 16);
    control.is_held.store(false, Relaxed);
    assert_eq!(rig.completions(1), [(1, Code::SUCCESS)]);
    assert_eq!(control.count(Op::Unmap), 128, "every other range has blocks");
    // The ranges behind a wrong one are not discarded.
    let mut wrong = ranges;
    wrong[101 * 16..102 * 16].copy_from_slice(&range(BLOCKS, 1));
    rig.send(&command_with(discard(2), &wrong));
    assert_eq!(rig.completions(1), [(2, Code::LBA_OUT_OF_RANGE)]);
    assert_eq!(control.count(Op::Unmap), 128 + 50);
    rig.end();
}

#[test]
fn a_namespace_is_replaced_while_it_has_requests() {
    let (mut rig, first) = Rig::new();
    first.is_held.store(true, Relaxed);
    let second = add_disk(&rig.registry, "other");
    rig.send(&[command(entry(1, io::READ, 0, 1)), command(entry(2, io::WRITE, 0, 4))].concat());
    let [requested] = rig.requested();
    assert_eq!(first.count(Op::Read), 1);
    let (sender, mut closed) = oneshot::channel();
    let again = opened(&rig.registry, "other", 1);
    {
        let (mut queue, cx) = rig.queue();
        queue.add(again.clone(), cx).unwrap();
        queue.add(again, cx).unwrap();
        queue.remove(1, 0, sender, cx);
    }
    rig.answer(requested, &[1; 4 * BLOCK as usize]);
    let gone = Code::INVALID_NAMESPACE_OR_FORMAT;
    assert_eq!(rig.completions(2), [(1, Code::ABORT_REQUESTED), (2, gone)]);
    assert!(closed.try_recv().is_err(), "it was gone when it was removed");
    rig.send(&command(entry(3, io::READ, 0, 1)));
    assert!(matches!(rig.receive(2)[..], [Got::Data(BLOCK), Got::Completion(3, Code::SUCCESS)]));
    assert_eq!((second.count(Op::Read), second.count(Op::Write)), (1, 0));
    rig.end();
}

#[test]
fn a_namespace_that_is_not_ready_yet_is_not_gone() {
    let (mut rig, _) = Rig::new();
    let second = add_disk(&rig.registry, "second");
    let read = SubmissionEntry::new(io::READ, 2).with_sgl(Sgl::Transport { len: BLOCK }.encode());
    let try_again = |rig: &mut Rig| {
        rig.send(&command(read.with_cid(7)));
        rig.completions(1)[0].1
    };
    assert_eq!(try_again(&mut rig), Code::INVALID_NAMESPACE_OR_FORMAT);
    rig.queue().0.expect(2, 5);
    assert_eq!(try_again(&mut rig), Code::NAMESPACE_NOT_READY);
    {
        let (mut queue, cx) = rig.queue();
        // The namespace is removed before it is ready.
        queue.remove(2, 5, oneshot::channel().0, cx);
    }
    assert_eq!(try_again(&mut rig), Code::INVALID_NAMESPACE_OR_FORMAT);
    rig.queue().0.expect(2, 6);
    assert_eq!(try_again(&mut rig), Code::NAMESPACE_NOT_READY);
    let reactor = rig.bench.cx().handle().clone();
    let ready = Opened { nsid: 2, ..opened(&rig.registry, "second", 6) };
    rig.bench.wait("the reactor to be prepared", ready.descriptor.prepare(&reactor)).unwrap();
    {
        let (mut queue, cx) = rig.queue();
        queue.add(ready, cx).unwrap();
        queue.expect(2, 6);
    }
    rig.send(&command(read.with_cid(8)));
    assert!(matches!(rig.receive(2)[..], [Got::Data(BLOCK), Got::Completion(8, Code::SUCCESS)]));
    assert_eq!(second.count(Op::Read), 1);
    rig.end();
}

#[test]
fn commands_are_aborted_wherever_they_are() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    rig.send(&[command(entry(1, io::READ, 0, 1)), command(entry(2, io::WRITE, 0, 4))].concat());
    let [requested] = rig.requested();
    assert!(rig.abort(1) && rig.abort(2) && !rig.abort(3));
    assert_eq!(rig.completions(1), [(1, Code::ABORT_REQUESTED)]);
    assert!(!rig.abort(1), "it has completed");
    rig.answer(requested, &[1; 4 * BLOCK as usize]);
    assert_eq!(rig.completions(1), [(2, Code::ABORT_REQUESTED)]);
    assert_eq!(control.count(Op::Write), 0);

    // The last of these waits for a buffer: the others have as many as a queue may have.
    let blocks = TRANSFER_MAX as u32 / BLOCK;
    let reads: Vec<u8> = (0..66).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect();
    rig.send(&reads);
    rig.turns(50);
    assert_eq!(control.count(Op::Read), 1 + 64);
    assert!(rig.abort(65));
    assert_eq!(rig.completions(1), [(65, Code::ABORT_REQUESTED)]);
    rig.end();
}

#[test]
fn halves_of_fused_operations_wait_for_each_other() {
    let (mut rig, control) = Rig::new();
    let half = |cid, fuse| {
        let opcode = if fuse == Fuse::First { io::COMPARE } else { io::WRITE };
        entry(cid, opcode, 7, 1).with_fuse(fuse)
    };
    let (first, second) = (|cid| half(cid, Fuse::First), |cid| half(cid, Fuse::Second));
    let data = [1; BLOCK as usize];
    // In capsules, and by R2Ts.
    rig.send(&[command_with(first(1), &data), command_with(second(2), &data)].concat());
    assert_eq!(rig.completions(2), [(1, Code::SUCCESS), (2, Code::SUCCESS)]);
    rig.send(&[command(first(1)), command(second(2))].concat());
    let [of_first, of_second] = rig.requested();
    for r2t in [of_second, of_first] {
        rig.answer(r2t, &data);
    }
    assert_eq!(rig.completions(2), [(1, Code::SUCCESS), (2, Code::SUCCESS)]);
    assert_eq!(control.count(Op::CompareAndWrite), 2);

    let (failed, missing) = (Code::FUSED_FAILED, Code::FUSED_MISSING);
    let other_block = entry(2, io::WRITE, 8, 1).with_fuse(Fuse::Second);
    let two_blocks = entry(1, io::COMPARE, 7, 2).with_fuse(Fuse::First);
    let flush = SubmissionEntry::new(io::FLUSH, 1).with_cid(3).with_sgl(Sgl::Transport { len: 0 }.encode());
    for (commands, completions) in [
        (vec![command_with(second(2), &data)], vec![(2, missing)]),
        (vec![command_with(first(1), &data), command(flush)], vec![(1, missing), (3, Code::SUCCESS)]),
        (
            vec![
                command_with(first(1), &data),
                command_with(first(2), &data),
                command_with(second(3), &data),
            ],
            vec![(1, missing), (2, Code::SUCCESS), (3, Code::SUCCESS)],
        ),
        (
            vec![command_with(first(1), &data), command_with(other_block, &data)],
            vec![(1, failed), (2, Code::INVALID_FIELD)],
        ),
        (
            vec![command_with(two_blocks, &[1; 2 * BLOCK as usize]), command_with(second(2), &data)],
            vec![(1, Code::ATOMIC_WRITE_UNIT_EXCEEDED), (2, failed)],
        ),
    ] {
        rig.send(&commands.concat());
        assert_eq!(rig.completions(completions.len()), completions);
    }
    assert_eq!((control.count(Op::CompareAndWrite), control.count(Op::Compare)), (3, 0));

    // An abort ends both halves, unless the disk has them.
    rig.send(&[command_with(first(1), &data), command(second(2))].concat());
    let [requested] = rig.requested();
    assert!(rig.abort(1));
    assert_eq!(rig.completions(1), [(1, Code::ABORT_REQUESTED)]);
    rig.answer(requested, &data);
    assert_eq!(rig.completions(1), [(2, failed)]);
    control.is_held.store(true, Relaxed);
    rig.send(&[command_with(first(1), &data), command_with(second(2), &data)].concat());
    rig.turns(20);
    assert!(!rig.abort(2) && rig.abort(1));
    assert_eq!(rig.completions(2), [(1, Code::ABORT_REQUESTED), (2, failed)]);
    rig.end();
}

#[test]
fn a_verify_reads_and_sends_no_data() {
    let (mut rig, control) = Rig::new();
    let verify =
        |cid, lba, blocks| entry(cid, io::VERIFY, lba, blocks).with_sgl(Sgl::Transport { len: 0 }.encode());
    rig.send(&[command(verify(1, 0, 1)), command(verify(2, 7, 32))].concat());
    assert_eq!(rig.completions(2), [(1, Code::SUCCESS), (2, Code::SUCCESS)]);
    assert_eq!(control.count(Op::Read), 2);
    for (wrong, code) in [
        (command(verify(3, 0, 33)), Code::INVALID_FIELD),
        (command(verify(3, BLOCKS - 1, 2)), Code::LBA_OUT_OF_RANGE),
        (command(entry(3, io::VERIFY, 0, 1)), Code::SGL_DATA_LENGTH_INVALID),
        (command_with(entry(3, io::VERIFY, 0, 32), &[1; 4096]), Code::SGL_DATA_LENGTH_INVALID),
    ] {
        rig.send(&wrong);
        assert_eq!(rig.completions(1), [(3, code)]);
    }

    // They have as many buffers as reads may have: the last two wait, and one of these is aborted.
    control.is_held.store(true, Relaxed);
    rig.send(&(0..66).flat_map(|cid| command(verify(cid, 0, 32))).collect::<Vec<_>>());
    rig.turns(50);
    assert_eq!(control.count(Op::Read), 2 + 64);
    assert!(rig.abort(65) && rig.abort(0));
    assert_eq!(rig.completions(2), [(0, Code::ABORT_REQUESTED), (65, Code::ABORT_REQUESTED)]);
    control.is_held.store(false, Relaxed);
    assert!(rig.completions(64).iter().all(|(_, code)| *code == Code::SUCCESS));
    assert_eq!(control.count(Op::Read), 2 + 65);
    rig.end();
}

#[test]
fn a_queue_ends_although_its_host_does_not_read() {
    let (mut rig, _) = Rig::new();
    let blocks = TRANSFER_MAX as u32 / BLOCK;
    // More than the sockets hold.
    let reads: Vec<u8> = (0..100).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect();
    rig.send(&reads);
    rig.turns(1000);
    {
        let (queue, _) = rig.queue();
        assert!(tcp_of(&queue).waiting_since().is_some());
    }
    rig.end();
}

#[test]
fn a_poll_writes_a_limited_amount() {
    let (mut rig, control) = Rig::new();
    control.is_held.store(true, Relaxed);
    let blocks = TRANSFER_MAX as u32 / BLOCK;
    let reads: Vec<u8> = (0..32).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect();
    rig.send(&reads);
    rig.turns(20);
    assert_eq!(control.count(Op::Read), 32);
    control.is_held.store(false, Relaxed);
    let (written, total) = {
        let (mut queue, cx) = rig.queue();
        queue.poll(cx);
        let tcp = tcp_of(&queue);
        let left = tcp.queue.output().map(|piece| match piece {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Data { len, .. } => len as usize,
        });
        let sending = match &tcp.means {
            tcp::Means::Ring(ring) => ring.sending_len(),
            tcp::Means::Polled(_) => 0,
        };
        let total = 32 * (TRANSFER_MAX + 24 + 24);
        (total - left.sum::<usize>() + sending, total)
    };
    assert!(written > 0 && written <= tcp::WRITE_MAX && total > 2 * tcp::WRITE_MAX, "{written} of {total}");
    let got = rig.receive(64);
    assert_eq!(
        got.iter().filter(|got| matches!(got, Got::Data(len) if *len as usize == TRANSFER_MAX)).count(),
        32
    );
    rig.end();
}

#[test]
fn a_poll_computes_digests_of_a_limited_amount() {
    let (mut rig, control) = Rig::with(true, false);
    control.is_held.store(true, Relaxed);
    let blocks = TRANSFER_MAX as u32 / BLOCK;
    let reads: Vec<u8> = (0..32).flat_map(|cid| command(entry(cid, io::READ, 0, blocks))).collect();
    rig.send(&reads);
    rig.turns(20);
    assert_eq!(control.count(Op::Read), 32);
    control.is_held.store(false, Relaxed);
    {
        let (mut queue, cx) = rig.queue();
        queue.poll(cx);
        assert_eq!(queue.completions.len(), 32 - DIGESTED_MAX / TRANSFER_MAX);
    }
    assert_eq!(rig.receive(64).len(), 64);
    rig.end();
}

#[test]
fn a_queue_that_has_warmed_up_allocates_nothing() {
    for uses_tls in [false, true] {
        check_allocations(Rig::with(false, uses_tls).0);
    }
}

fn check_allocations(mut rig: Rig) {
    let block = [1; BLOCK as usize];
    let large = vec![1; 8 * BLOCK as usize];
    let round = |rig: &mut Rig| {
        let mut commands: Vec<u8> = (0..8).flat_map(|cid| command(entry(cid, io::READ, 0, 8))).collect();
        commands.extend((8..16).flat_map(|cid| command_with(entry(cid, io::WRITE, 0, 1), &block)));
        commands.extend((16..20).flat_map(|cid| command(entry(cid, io::WRITE, 0, 8))));
        rig.send(&commands);
        let (mut requested, mut done, mut allocated) = (Vec::new(), 0, 0);
        while done < 20 {
            allocated += allocation_counter::measure(|| rig.turns(1)).count_total;
            for got in rig.received() {
                match got {
                    Got::R2t(r2t) => requested.push(r2t),
                    Got::Completion(_, code) => {
                        assert_eq!(code, Code::SUCCESS);
                        done += 1;
                    }
                    Got::Data(_) => {}
                    Got::Terminated(fatal) => panic!("{fatal:?}"),
                }
            }
            requested.drain(..).for_each(|r2t| rig.answer(r2t, &large));
        }
        allocated
    };
    (0..10).map(|_| round(&mut rig)).for_each(|_| ());
    assert_eq!((0..100).map(|_| round(&mut rig)).sum::<u64>(), 0);
    rig.end();
}

/// Numbers that a seed determines.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32) % end
    }

    fn choose<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }

    /// A command, often a right one, with what it has in its capsule.
    fn command(&mut self, cid: u16) -> Vec<u8> {
        let opcodes = [
            io::READ,
            io::WRITE,
            io::WRITE,
            io::COMPARE,
            io::FLUSH,
            io::WRITE_ZEROES,
            io::DATASET_MANAGEMENT,
            io::VERIFY,
            io::COPY,
            io::COPY,
            0x7e,
            0x7f,
        ];
        let nsid = self.choose(&[1, 1, 1, 1, 1, 1, 1, 2, 0, u32::MAX]);
        let blocks = self.choose(&[1, 1, 1, 2, 5, 32, 33, 65_536]);
        let lba = self.choose(&[0, 1, 7, BLOCKS as u32 - 1, BLOCKS as u32]);
        let attributes = self.choose(&[0, 4]);
        let entry = SubmissionEntry::new(self.choose(&opcodes), nsid).with_cid(cid);
        let entry = match entry.opcode() {
            io::DATASET_MANAGEMENT => entry.with_cdw10_11(self.choose(&[0, 1, 255]), attributes),
            _ => entry.with_cdw10_11(lba, 0).with_cdw12_13(blocks - 1, 0),
        };
        let entry = match self.below(4) {
            0 => entry.with_fuse(Fuse::First),
            1 => entry.with_fuse(Fuse::Second),
            _ => entry,
        };
        let len = self.choose(&[blocks * BLOCK, blocks * BLOCK, 4096, 16, 0, !3]);
        match self.below(3) {
            0 if (4..=8192).contains(&len) => command_with(entry, &vec![self.below(2) as u8; len as usize]),
            1 => command(entry.with_sgl([0, self.choose(&[0, 0x40, 0x5a]) << 56 | u64::from(len)])),
            _ => command(entry.with_sgl(Sgl::Transport { len }.encode())),
        }
    }
}

/// What a host knows of its commands.
#[derive(Default)]
struct Outstanding {
    commands: BTreeMap<u16, ()>,
    requested: Vec<R2t>,
}

impl Outstanding {
    fn take(&mut self, got: Vec<Got>) {
        for got in got {
            match got {
                Got::Completion(cid, _) => assert!(self.commands.remove(&cid).is_some(), "{cid}"),
                Got::R2t(r2t) => {
                    assert!(self.commands.contains_key(&r2t.cid) && r2t.offset == 0);
                    self.requested.push(r2t);
                }
                Got::Data(_) => {}
                Got::Terminated(fatal) => panic!("{fatal:?}"),
            }
        }
    }
}

fn run_any(seed: u64) {
    let (mut rig, control) = Rig::new();
    let of_other = add_disk(&rig.registry, "other");
    let other = opened(&rig.registry, "other", 1);
    let (mut random, mut host) = (Random(seed), Outstanding::default());
    let mut number = 0;
    for cid in 0..400 {
        match random.below(16) {
            0 => control.is_held.store(random.below(2) == 0, Relaxed),
            1 => of_other.is_held.store(random.below(2) == 0, Relaxed),
            2 if cid > 0 => {
                let of = random.below(cid.into()) as u16;
                rig.abort(of);
            }
            3 => {
                let (mut queue, cx) = rig.queue();
                queue.remove(1, number, oneshot::channel().0, cx);
                number += 1;
                queue.add(Opened { number, ..other.clone() }, cx).unwrap();
            }
            4..=6 if !host.requested.is_empty() => {
                let r2t = host.requested.swap_remove(random.below(host.requested.len() as u32) as usize);
                rig.answer(r2t, &vec![random.below(2) as u8; r2t.len as usize]);
            }
            7 | 8 => rig.turns(1 + random.below(3)),
            _ if host.commands.len() < usize::from(ENTRIES) - 1 => {
                host.commands.insert(cid, ());
                rig.send(&random.command(cid));
            }
            _ => {}
        }
        host.take(rig.received());
    }
    control.is_held.store(false, Relaxed);
    of_other.is_held.store(false, Relaxed);
    // A first half that waits for its second does so no longer.
    let flush = SubmissionEntry::new(io::FLUSH, 1).with_sgl(Sgl::Transport { len: 0 }.encode());
    host.commands.insert(400, ());
    rig.send(&command(flush.with_cid(400)));
    for _ in 0..1_000_000 {
        if host.commands.is_empty() {
            break;
        }
        for r2t in std::mem::take(&mut host.requested) {
            rig.answer(r2t, &vec![1; r2t.len as usize]);
        }
        rig.turns(1);
        host.take(rig.received());
    }
    assert!(host.commands.is_empty(), "seed {seed}: {:?} have not completed", host.commands.keys());
    // The host has the replies before the queue learns that they are sent.
    rig.turns(10);
    {
        let (queue, _) = rig.queue();
        assert_eq!(tcp_of(&queue).queue.in_use(), 0);
        assert!(queue.waiting.is_empty() && queue.slots.iter().all(|slot| slot.data.is_none()));
    }
    drop(other);
    rig.end();
}

#[test]
fn any_commands_complete_once() {
    (0..60).for_each(run_any);
}
