//! Queues that wait for a disk, and what changes meanwhile.

use crate::raw::{Raw, capsule_with, command};
use crate::target::{BLOCK, Running, SUBSYSTEM, until};
use aryk_bdev::{
    Access, Blocks, BoxFuture, Channel, Completion, Device, Geometry, Identity, Io, Limits, OpSet, OpenError,
    Outbox, Status, Tag,
};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvmf::NewNamespace;
use aryk_reactor::{Cx, Handle, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread::JoinHandle;
use tokio::sync::Notify;

/// What the test and the disk share.
#[derive(Default)]
struct Gate {
    is_open: AtomicBool,
    opened: Notify,
    /// Queues that wait.
    preparing: AtomicU32,
    requests: AtomicU32,
}

impl Gate {
    fn open(&self) {
        self.is_open.store(true, Relaxed);
        self.opened.notify_waiters();
    }
}

/// A queue that waits.
struct Preparing<'a>(&'a Gate);

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        self.0.preparing.fetch_sub(1, Relaxed);
    }
}

/// A disk whose channels can be opened when the gate is open.
struct SlowDisk(Arc<Gate>);

/// Completes requests at once.
struct Done(Outbox, Arc<Gate>);

impl Device for SlowDisk {
    fn product(&self) -> &'static str {
        "slow"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK as u32, Blocks(8))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn prepare(&self, _: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        Box::pin(async move {
            self.0.preparing.fetch_add(1, Relaxed);
            let _preparing = Preparing(&self.0);
            let opened = self.0.opened.notified();
            if !self.0.is_open.load(Relaxed) {
                opened.await;
            }
            Ok(())
        })
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(Done(Outbox::new(root), Arc::clone(&self.0))))
    }
}

impl Channel for Done {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.1.requests.fetch_add(1, Relaxed);
        self.0.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}

/// A target whose namespace 1 is a slow disk, with a host whose I/O queue waits for it.
struct Waiting {
    target: Running,
    gate: Arc<Gate>,
    admin_queue: Raw,
    queue: JoinHandle<Option<Raw>>,
}

fn start() -> Waiting {
    let target = Running::start();
    let gate = Arc::<Gate>::default();
    let disk = Arc::new(SlowDisk(Arc::clone(&gate)));
    target.env().registry().register(Identity::named("slow"), disk).unwrap();
    replace(&target, "slow");
    let (admin_queue, id) = Raw::admin(target.address);
    let address = target.address;
    let queue = std::thread::spawn(move || Raw::try_io(address, id, 1, 16));
    until(|| gate.preparing.load(Relaxed) == 1);
    Waiting { target, gate, admin_queue, queue }
}

/// Has namespace 1 be this disk.
fn replace(target: &Running, disk: &'static str) {
    target.run(async move |target| {
        target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
        target.add_namespace(SUBSYSTEM, disk, NewNamespace::default()).await.unwrap();
    });
}

#[test]
fn a_queue_that_begins_while_its_namespace_is_replaced_has_the_next_one() {
    let Waiting { target, gate, admin_queue, queue } = start();
    replace(&target, "disk");
    let registry = target.env().registry();
    assert!(registry.open("slow", Access::Exclusive, "the next", |_| {}).is_ok(), "no queue has it");
    gate.open();
    let mut queue = queue.join().unwrap().expect("it is admitted");
    queue.send(&capsule_with(command(1, io::WRITE, 0, 1, 0), &[7; BLOCK]));
    assert!(queue.completion().unwrap().status().is_success());
    assert_eq!(gate.requests.load(Relaxed), 0, "the earlier disk is not written");
    let read = queue.run(command(2, io::READ, 0, 1, BLOCK as u32));
    assert_eq!(read, (Code::SUCCESS, vec![7; BLOCK]));
    drop(admin_queue);
    target.stop();
}

#[test]
fn a_queue_that_waits_for_a_disk_ends_with_its_controller() {
    let Waiting { target, gate, admin_queue, queue } = start();
    drop(admin_queue);
    until(|| target.list()[0].controllers.is_empty());
    assert!(queue.join().unwrap().is_none());
    assert_eq!(gate.preparing.load(Relaxed), 0);
    target.stop();
}
