//! A disk that ignores aborts and completes its requests only when the test resumes it, like the kernel when the store hangs.

use aryk_bdev::{
    Blocks, Channel, Completion, Device, Env, Geometry, Identity, Io, Limits, Op, OpSet, OpenError, Status,
    Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Hung {
    blocks: Blocks,
    resumed: Arc<AtomicBool>,
}

struct HungChannel {
    root: RootId,
    held: Vec<Tag>,
    resumed: Arc<AtomicBool>,
}

/// Registers such a disk. Returns the flag that resumes it.
pub fn create(env: &Env, name: &str, blocks: Blocks) -> Arc<AtomicBool> {
    let resumed = Arc::new(AtomicBool::new(false));
    let device = Hung { blocks, resumed: Arc::clone(&resumed) };
    env.registry().register(Identity::named(name), Arc::new(device)).expect("the disk can be registered");
    resumed
}

impl Device for Hung {
    fn product(&self) -> &'static str {
        "hung"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, self.blocks)
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read])
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(HungChannel { root, held: Vec::new(), resumed: Arc::clone(&self.resumed) }))
    }
}

impl Channel for HungChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.held.push(io.tag);
        cx.wake(self.root);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        if self.resumed.load(Ordering::Relaxed) {
            out.extend(self.held.drain(..).map(|tag| Completion { tag, status: Status::Ok }));
        }
    }
}
