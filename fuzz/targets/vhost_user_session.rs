//! A vhost-user session with a hostile front-end: any messages in any order, with file descriptors of every kind, some of
//! them truncated while they are mapped. The device checks its parameters and touches all memory of its queues.
//!
//! The input is a list of steps: a byte for the request, one for its shape, then the shape's parameters.
#![no_main]

use aryk_dma::{GuestArea, install_fault_handler};
use aryk_vhost_user::{
    Device, DeviceError, EventFd, F_RING_PACKED, MemoryChange, QueueLog, QueueSetup, SessionHandle, Stats,
    serve_front_end,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

const QUEUES: u16 = 3;
/// Bytes in each memory file.
const FILE: u64 = 0x1_0000;
/// The user address of the front-end's memory.
const USER: u64 = 0x7f00_0000_0000;

#[derive(Default)]
struct Checker {
    running: RefCell<BTreeMap<u16, QueueSetup>>,
    session: RefCell<Option<SessionHandle>>,
}

/// Reads and writes all memory of a queue, from end to end.
fn touch(queue: &QueueSetup) {
    let rings = &queue.rings;
    for area in [&rings.desc, &rings.driver, &rings.device].into_iter().chain(&queue.inflight) {
        let last = (area.len() - 2) as usize;
        area.store_u16(last, area.load_u16(0, Ordering::Acquire), Ordering::Release);
    }
    let packed = queue.features & F_RING_PACKED != 0;
    let driver = if packed { 4 } else { 2 };
    assert!(rings.desc.is_aligned(16) && rings.driver.is_aligned(driver) && rings.device.is_aligned(4));
    assert!(packed || queue.size.is_power_of_two() && queue.base <= 0xffff);
    assert!((1..=32768).contains(&queue.size) && rings.desc.len() == 16 * u64::from(queue.size));
    assert_eq!(queue.features & (1 << 26 | 1 << 30), 0, "these are the session's");
    if let Some(log) = &queue.log {
        log.mark_ring();
        log.log.mark(USER, u64::from(queue.size));
        log.log.mark(queue.base.into(), FILE);
    }
}

fn is_poisoned(queue: &QueueSetup) -> bool {
    queue.memory.is_poisoned()
        || queue.inflight.as_ref().is_some_and(GuestArea::is_poisoned)
        || queue.log.as_ref().is_some_and(|log| log.log.is_poisoned())
}

impl Checker {
    fn touch_all(&self) {
        for queue in self.running.borrow().values() {
            touch(queue);
            if is_poisoned(queue) {
                let session = self.session.borrow();
                session.as_ref().expect("connected").end("guest memory was truncated");
            }
        }
    }
}

impl Device for Checker {
    fn features(&self) -> u64 {
        0xff
    }

    fn packed(&self) -> bool {
        true
    }

    fn tracks_inflight(&self) -> bool {
        true
    }

    fn logs_writes(&self) -> bool {
        true
    }

    fn num_queues(&self) -> u16 {
        QUEUES
    }

    fn queue_size_max(&self) -> u16 {
        32_768
    }

    fn config(&self) -> Vec<u8> {
        vec![1; 60]
    }

    fn connected(&self, session: SessionHandle) {
        assert!(self.session.replace(Some(session)).is_none());
    }

    fn disconnected(&self) {
        assert!(self.running.borrow().is_empty() && self.session.take().is_some());
    }

    async fn start_queue(&self, index: u16, setup: QueueSetup) -> std::result::Result<(), DeviceError> {
        assert!(index < QUEUES);
        assert!(self.running.borrow_mut().insert(index, setup).is_none());
        self.touch_all();
        Ok(())
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        self.touch_all();
        self.running.borrow_mut().remove(&index).expect("it runs").base
    }

    async fn set_memory(&self, change: MemoryChange) {
        let mut running = self.running.borrow_mut();
        assert!(change.rings.iter().map(|(index, _)| index).eq(running.keys()));
        for (index, rings) in change.rings {
            let queue = running.get_mut(&index).expect("it runs");
            (queue.rings, queue.memory) = (rings, change.memory.clone());
        }
        drop(running);
        self.touch_all();
    }

    async fn set_call(&self, index: u16, call: Option<EventFd>) {
        self.running.borrow_mut().get_mut(&index).expect("it runs").call = call;
    }

    async fn set_err(&self, index: u16, err: Option<EventFd>) {
        self.running.borrow_mut().get_mut(&index).expect("it runs").err = err;
    }

    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        self.running.borrow_mut().get_mut(&index).expect("it runs").log = log;
        self.touch_all();
    }
}

/// One file of each kind that a front-end may send.
struct Files(Vec<OwnedFd>);

impl Files {
    fn new() -> Self {
        let memfd = |len| {
            let fd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
            ftruncate(&fd, len).expect("a memfd has any length");
            fd
        };
        let event = || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let null = std::fs::File::open("/dev/null").expect("/dev/null");
        let socket = std::os::unix::net::UnixStream::pair().expect("a socket pair").0;
        Self(vec![memfd(FILE), event(), memfd(FILE), event(), memfd(100), null.into(), socket.into()])
    }

    fn get(&self, index: u8) -> BorrowedFd<'_> {
        self.0[usize::from(index) % self.0.len()].as_fd()
    }
}

fn integers(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn pair(index: u32, num: u32) -> Vec<u8> {
    [index.to_ne_bytes(), num.to_ne_bytes()].concat()
}

/// A memory region, mostly one that can be mapped.
fn region(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let (at, shape): (u8, u8) = (u.arbitrary()?, u.arbitrary()?);
    let at = u64::from(at % 8) * FILE;
    Ok(match shape % 8 {
        0 => integers(&[u.arbitrary()?, u.arbitrary()?, u.arbitrary()?, u.arbitrary()?]),
        1 => integers(&[at, FILE / 2 + u64::from(shape), USER + at, FILE / 2]),
        2 => integers(&[at + 8, FILE / 2, USER + at + 8, 8]),
        _ => integers(&[at, FILE, USER + at, 0]),
    })
}

/// A request, its payload, and the numbers of its file descriptors: mostly valid, sometimes arbitrary.
fn request(u: &mut Unstructured<'_>) -> Result<(u32, Vec<u8>, Vec<u8>)> {
    let (code, shape): (u8, u8) = (u.arbitrary()?, u.arbitrary()?);
    let index = u32::from(shape % 4);
    if shape >= 0xf8 {
        let payload = u.arbitrary::<Vec<u8>>()?;
        return Ok((code.into(), payload, u.arbitrary()?));
    }
    let (memory, event) = (vec![shape & 2], vec![shape & 2 | 1]);
    Ok(match code % 32 {
        0 => {
            let (packed, log) = (u64::from(shape >> 3 & 1), u64::from(shape >> 4 & 1));
            (2, integers(&[1 << 32 | u64::from(shape & 7) << 28 | packed << 34 | log << 26]), vec![])
        }
        1 => (16, integers(&[0x1_b22b]), vec![]),
        2 => {
            let regions = u64::from(shape % 3);
            let mut payload = integers(&[regions]);
            for _ in 0..regions {
                payload.extend(region(u)?);
            }
            (5, payload, memory.repeat(regions as usize))
        }
        3 => (8, pair(index, 1 << (shape % 17)), vec![]),
        4 => (10, pair(index, shape.into()), vec![]),
        5 | 6 => {
            let (page, skew) = (u64::from(u.arbitrary::<u8>()?), u64::from(shape >> 7));
            let at = USER + page * 4096;
            let addresses = [at, at + 2048 + skew, at + 1024, 0];
            (9, [pair(index, 0), integers(&addresses)].concat(), vec![])
        }
        7 | 8 => (12, integers(&[index.into()]), event),
        9 => (12, integers(&[u64::from(index) | 0x100]), vec![]),
        10 => (13, integers(&[index.into()]), event),
        11 => (14, integers(&[index.into()]), event),
        12 => (18, pair(index, u32::from(shape & 16 == 0)), vec![]),
        13 => (11, pair(index, 0), vec![]),
        14 | 15 => (37, [integers(&[0]), region(u)?].concat(), memory),
        16 => (38, [integers(&[0]), region(u)?].concat(), vec![]),
        17 => (24, [pair(index, shape.into()), vec![0; 4]].concat(), vec![]),
        18 => (21, vec![], vec![6]),
        19 => (u32::from(shape % 42), vec![], vec![]),
        other => return later_request(other, shape, u),
    })
}

/// The requests of in-flight tracking, dirty logs, status and reset, and packed rings' own values.
fn later_request(code: u8, shape: u8, u: &mut Unstructured<'_>) -> Result<(u32, Vec<u8>, Vec<u8>)> {
    let index = u32::from(shape % 4);
    let memory = vec![shape & 2];
    Ok(match code {
        20 => (31, inflight(shape, u)?, vec![]),
        21 | 22 => (32, inflight(shape, u)?, memory),
        23 => {
            let (size, offset) = (u64::from(u.arbitrary::<u16>()?), u64::from(shape >> 4) * 4096);
            (6, integers(&[size, offset]), memory)
        }
        24 => {
            // A ring with dirty logging, at any address or at a page.
            let at = USER + u64::from(u.arbitrary::<u8>()?) * 4096;
            let log = if shape >= 0x80 { u.arbitrary()? } else { u64::from(shape) * 4096 };
            let flags = u32::from(shape & 0x60 != 0x60);
            (9, [pair(index, flags), integers(&[at, at + 2048, at + 1024, log])].concat(), vec![])
        }
        25 => (7, vec![], if shape & 1 == 0 { vec![1] } else { vec![] }),
        26 => (34, vec![], vec![]),
        27 => (39, integers(&[u64::from(shape)]), vec![]),
        28 => (40, vec![], vec![]),
        29 => (8, pair(index, u32::from(u.arbitrary::<u16>()?)), vec![]),
        _ => (10, pair(index, u.arbitrary()?), vec![]),
    })
}

/// An in-flight region, mostly one that can be mapped.
fn inflight(shape: u8, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let (queues, size) = (u16::from(shape % 4), 1_u16 << (shape >> 4));
    let (bytes, offset) = match shape >> 2 & 3 {
        0 => (u.arbitrary()?, u.arbitrary()?),
        1 => (FILE / 2, FILE / 2),
        _ => (FILE, 0),
    };
    let mut payload = integers(&[bytes, offset]);
    payload.extend([queues.to_ne_bytes(), size.to_ne_bytes()].concat());
    payload.extend([0; 4].iter().filter(|_| shape & 1 == 0));
    Ok(payload)
}

fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    // The socket may be full, or closed by the peer.
    let _ = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

async fn front_end(u: &mut Unstructured<'_>, stream: UnixStream) -> Result<()> {
    let files = Files::new();
    while !u.is_empty() {
        let shape = u.arbitrary::<u8>()?;
        if shape == 0xff {
            // From here on, every mapped page of the file is a hole.
            ftruncate(files.get(0), 0).expect("a memfd can be truncated");
            continue;
        }
        let (code, payload, fds) = request(u)?;
        let flags = if shape & 1 == 0 { 1 } else { 9 };
        let header = [code, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
        let bytes = [header, payload].concat();
        let fds: Vec<_> = fds.iter().take(32).map(|i| files.get(*i)).collect();
        // Sometimes in two pieces.
        let cut = if shape & 0x30 == 0x30 { usize::from(shape & 15) } else { 0 };
        let (first, second) = bytes.split_at(cut.min(bytes.len()));
        if !first.is_empty() {
            send(&stream, first, &[]);
            tokio::task::yield_now().await;
        }
        send(&stream, second, &fds);
        tokio::task::yield_now().await;
        let _ = stream.try_read(&mut [0; 1024]);
    }
    Ok(())
}

thread_local! {
    static RUNTIME: Runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
}

fuzz_target!(
    init: install_fault_handler(),
    |data: &[u8]| {
        let mut u = Unstructured::new(data);
        RUNTIME.with(|runtime| runtime.block_on(async {
            let (ours, theirs) = UnixStream::pair().expect("a socket pair");
            let (device, stats) = (Checker::default(), Stats::default());
            let session = serve_front_end(theirs, &device, SessionHandle::default(), &stats);
            let (ended, _ended_early) = tokio::join!(session, front_end(&mut u, ours));
            let counted = stats.snapshot();
            assert_eq!(counted.failed, u64::from(ended.is_err()), "{counted:?}");
            assert!(!counted.connected);
        }));
    }
);
