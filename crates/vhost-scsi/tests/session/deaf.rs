//! A disk that does not complete what it has until it is let, whoever aborts it: as the kernel, when the store behind it hangs.

use aryk_bdev::{
    Channel, Completion, Device, Env, Geometry, Identity, Io, Limits, Op, OpSet, OpenError, Status, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Deaf {
    blocks: u64,
    hears: Arc<AtomicBool>,
}

struct DeafChannel {
    root: RootId,
    held: Vec<Tag>,
    hears: Arc<AtomicBool>,
}

/// Makes one of this name, and gives what lets it go on.
pub fn create(env: &Env, name: &str, blocks: u64) -> Arc<AtomicBool> {
    let hears = Arc::new(AtomicBool::new(false));
    let device = Deaf { blocks, hears: Arc::clone(&hears) };
    env.registry().register(Identity::named(name), Arc::new(device)).expect("a disk of ours");
    hears
}

impl Device for Deaf {
    fn product(&self) -> &'static str {
        "deaf"
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
        Ok(Box::new(DeafChannel { root, held: Vec::new(), hears: Arc::clone(&self.hears) }))
    }
}

impl Channel for DeafChannel {
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        self.held.push(io.tag);
        cx.wake(self.root);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        if self.hears.load(Ordering::Relaxed) {
            out.extend(self.held.drain(..).map(|tag| Completion { tag, status: Status::Ok }));
        }
    }
}
