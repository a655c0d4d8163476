//! A target whose disk keeps writes.

use crate::target::{BLOCK, Running, SUBSYSTEM};
use aryk_bdev::{
    Blocks, Channel, Completion, Device, Geometry, Identity, Io, Lba, Limits, OpSet, OpenError, Outbox,
    Status, Tag,
};
use aryk_nvmf::NewNamespace;
use aryk_reactor::{Cx, RootId};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// A target on this many reactors, whose namespace 1 is such a disk.
pub fn start(reactors: usize) -> (Running, Arc<Stuck>) {
    let target = Running::start_on(reactors);
    let stuck = Arc::<Stuck>::default();
    let disk = Arc::new(StuckDisk(Arc::clone(&stuck)));
    target.env().registry().register(Identity::named("stuck"), disk).unwrap();
    target.run(async |target| {
        target.remove_namespace(SUBSYSTEM, 1).await.unwrap();
        target.add_namespace(SUBSYSTEM, "stuck", NewNamespace::default()).await.unwrap();
    });
    (target, stuck)
}

/// A disk that keeps writes, and does not abort them, until the test lets them go.
#[derive(Default)]
pub struct Stuck {
    pub is_stuck: AtomicBool,
    pub writes: AtomicU32,
    /// The first blocks of the writes that have reached the disk, in their order.
    pub landed: Mutex<Vec<u64>>,
}

/// See [`Stuck`].
pub struct StuckDisk(pub Arc<Stuck>);

struct StuckChannel {
    stuck: Arc<Stuck>,
    held: Vec<(Tag, Lba)>,
    done: Outbox,
    root: RootId,
}

impl Device for StuckDisk {
    fn product(&self) -> &'static str {
        "stuck"
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

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (stuck, done) = (Arc::clone(&self.0), Outbox::new(root));
        Ok(Box::new(StuckChannel { stuck, held: Vec::new(), done, root }))
    }
}

impl Channel for StuckChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        if io.op.is_change() {
            self.stuck.writes.fetch_add(1, Relaxed);
            self.held.push((io.tag, io.lba));
            cx.wake(self.root);
        } else {
            self.done.push(io.tag, Status::Ok, cx);
        }
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        if self.stuck.is_stuck.load(Relaxed) && !self.held.is_empty() {
            cx.wake(self.root);
        } else {
            for (tag, lba) in self.held.drain(..) {
                self.stuck.landed.lock().unwrap().push(lba.0);
                self.done.push(tag, Status::Ok, cx);
            }
        }
        self.done.take(out);
    }
}
