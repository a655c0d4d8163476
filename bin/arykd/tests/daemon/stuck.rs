//! A disk that does not complete its requests, while its VM removes memory or stops its queue: the test checks what waits, and
//! for how long.

#![expect(clippy::disallowed_methods, reason = "the test measures time")]

use super::harness::Daemon;
use aryk_front_end::{
    Announced, Format, Memory, Piece, Request, Ring, Session, Shape, Wanted, feature, payload, protocol,
};
use aryk_slow_store::{Hold, SlowStore};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::json;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A call that does not wait takes less than this on a busy test machine; a call that waits takes more.
const SOON: Duration = Duration::from_millis(700);
/// A removal asks the disk after one second to abort its requests, a stop after two.
pub const REVOKED: Duration = Duration::from_secs(4);
const PATIENCE: Duration = Duration::from_secs(20);

const LEN: u64 = 64 << 10;
/// Guest addresses of more memory, and of memory that no request uses.
pub const MORE: u64 = 0x2000_0000;
const UNUSED: u64 = 0x3000_0000;
const SECTOR: u32 = 4096;
/// Offsets of a request's header, and 8 bytes later of its status, by slot.
const HEADS: u64 = 32 << 10;
const HEAD: u64 = 64;

/// A VM with one queue and three regions of memory.
pub struct Vm {
    pub session: Session,
    pub memory: Memory,
    pub more: Memory,
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Vm {
    pub fn connect(socket: &Path) -> Self {
        let wanted = Wanted {
            features: feature::VERSION_1,
            optional: 0,
            protocol: protocol::CONFIGURE_MEM_SLOTS | protocol::REPLY_ACK,
            optional_protocol: 0,
            queues: 1,
            patience: PATIENCE,
        };
        let session = Session::connect(socket, &wanted).unwrap();
        let memory = || Memory::new(LEN).unwrap();
        let (memory, more, unused) = (memory(), memory(), memory());
        session.set_features().unwrap();
        session.share(&memory).unwrap();
        for (other, at) in [(&more, MORE), (&unused, UNUSED)] {
            session.wire().send(Request::ADD_MEM_REG, &region(at), &[other.fd()]).unwrap();
        }
        let ring = Ring::new(Shape { format: Format::Split, size: 16, event_idx: false }, &memory, 0);
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let vm = Self { session, memory, more, ring, kick: event(), call: event() };
        vm.start();
        vm
    }

    fn start(&self) {
        let (kick, call) = (self.kick.as_fd(), self.call.as_fd());
        self.session.start(&Announced { index: 0, size: 16, ring: &self.ring, kick, call }).unwrap();
        self.session.enable(1).unwrap();
    }

    /// Reads a block of the disk to a guest address.
    pub fn read(&mut self, slot: u16, block: u64, to: u64) {
        self.request(slot, 0, block, to);
    }

    /// Writes a block of the disk from a guest address.
    pub fn write(&mut self, slot: u16, block: u64, from: u64) {
        self.request(slot, 1, block, from);
    }

    /// Starts a request of a type of virtio-blk: 0 reads, 1 writes.
    fn request(&mut self, slot: u16, kind: u64, block: u64, at: u64) {
        let head = HEADS + u64::from(slot) * HEAD;
        self.memory.whole().write(head as usize, &[kind, block * u64::from(SECTOR / 512)]);
        self.memory.whole().write(head as usize + 16, &0xff_u8);
        let pieces = [
            Piece { at: head, len: 16, write: false },
            Piece { at: at - Memory::guest_addr(0), len: SECTOR, write: kind == 0 },
            Piece { at: head + 16, len: 1, write: true },
        ];
        self.ring.add(slot, &pieces, None);
        if self.ring.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// The slot of a request that has ended, whose slot may be used again.
    pub fn take(&mut self) -> Option<u16> {
        self.ring.take().unwrap().map(|(slot, _)| slot)
    }

    /// The status of a request.
    pub fn status(&self, slot: u16) -> u8 {
        self.memory.whole().read((HEADS + u64::from(slot) * HEAD + 16) as usize)
    }

    /// Removes memory. Returns how long that took.
    pub fn remove(&self, at: u64) -> Duration {
        let began = Instant::now();
        self.session.wire().send(Request::REM_MEM_REG, &region(at), &[]).unwrap();
        began.elapsed()
    }

    /// Stops the queue. Returns how long that took.
    fn stop(&self) -> Duration {
        let began = Instant::now();
        self.session.stop(0).unwrap();
        began.elapsed()
    }
}

/// A region's description in the form of the messages.
fn region(at: u64) -> Vec<u8> {
    payload![0_u64, at, LEN, 0x7000_0000_0000 + at, 0_u64]
}

/// Releases the requests that the store holds after `wait`, while `work` runs. Returns whether `work` went on until then.
fn release_after(store: &SlowStore, wait: Duration, work: impl FnOnce() -> Duration) -> bool {
    let is_released = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(wait);
            is_released.store(true, Ordering::Relaxed);
            store.pass();
            store.let_go();
        });
        work();
        is_released.load(Ordering::Relaxed)
    })
}

#[test]
fn requests_in_the_kernel_block_only_their_own_memory() {
    let daemon = Daemon::start(&[]);
    let store = match SlowStore::new(daemon.dir(), 1 << 20) {
        Ok(store) => store,
        Err(error) => return eprintln!("skipped: FUSE needs root and kernel support: {error}"),
    };
    daemon.aryk(&["disk", "create", "d", "--file", store.path().to_str().unwrap()]).unwrap();
    daemon.aryk(&["attach", "d"]).unwrap();
    store.fill(7);
    let mut vm = Vm::connect(&daemon.dir().join("vhost/d"));
    store.hold(Hold::All);
    vm.read(0, 0, Memory::guest_addr(48 << 10));
    vm.read(1, 1, MORE);
    assert!(store.await_held(2, PATIENCE));
    let took = vm.remove(UNUSED);
    assert!(took < SOON, "the removal of unused memory waited: {took:?}");
    assert_eq!((store.held(), vm.status(0), vm.status(1)), (2, 0xff, 0xff));
    // The daemon asks the disk after a second to abort the read. The disk cannot abort it, and will still write to the memory.
    let wait = Duration::from_millis(1500);
    let has_waited = release_after(&store, wait, || vm.remove(MORE));
    assert!(has_waited, "memory was removed while the kernel writes to it");
    assert_eq!((vm.more.whole().read::<u8>(0), vm.status(1)), (7, 0));
    store.hold(Hold::All);
    vm.read(2, 2, Memory::guest_addr(48 << 10));
    assert!(store.await_held(1, PATIENCE));
    let wait = Duration::from_millis(2500);
    let has_waited = release_after(&store, wait, || vm.stop());
    assert!(has_waited, "a queue was stopped while the kernel writes for its requests");
    assert_eq!(vm.status(2), 0);
}

#[test]
fn requests_in_a_module_are_aborted_after_a_while() {
    let daemon = Daemon::start(&[]);
    daemon.aryk(&["disk", "create", "d", "--memory", "--size", "1M"]).unwrap();
    daemon.call("bdev_error_create", json!({"base_name": "d"})).unwrap();
    daemon.aryk(&["attach", "EE_d"]).unwrap();
    let hold = json!({"name": "EE_d", "io_type": "read", "error_type": "pending", "num": 3});
    daemon.call("bdev_error_inject_error", hold).unwrap();
    let mut vm = Vm::connect(&daemon.dir().join("vhost/EE_d"));
    vm.read(0, 0, Memory::guest_addr(48 << 10));
    vm.read(1, 1, MORE);
    let took = vm.remove(UNUSED);
    assert!(took < SOON, "the removal of unused memory waited: {took:?}");
    let took = vm.remove(MORE);
    assert!(took < REVOKED, "the module did not abort the requests that use the memory: {took:?}");
    assert_eq!((vm.status(0), vm.status(1)), (0xff, 1), "only requests that used the memory fail");
    let took = vm.stop();
    assert!(took < REVOKED, "the module did not abort its requests: {took:?}");
}
