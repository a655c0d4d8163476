//! A disk that prepares a reactor only when the test allows it, like a disk behind a slow connection.

use aryk_bdev::{
    Blocks, BoxFuture, Channel, Completion, Device, Env, Geometry, Identity, Io, Limits, OpSet, OpenError,
    Outbox, Status, Tag,
};
use aryk_reactor::{Cx, Handle, RootId};
use std::sync::Arc;
use tokio::sync::watch;

struct Remote {
    blocks: Blocks,
    ready: Arc<watch::Sender<bool>>,
}

/// Registers such a disk. Returns the switch that makes it ready.
pub fn create(env: &Env, name: &str, blocks: Blocks) -> Arc<watch::Sender<bool>> {
    let ready = Arc::<watch::Sender<bool>>::default();
    let device = Remote { blocks, ready: Arc::clone(&ready) };
    env.registry().register(Identity::named(name), Arc::new(device)).expect("the disk can be registered");
    ready
}

impl Device for Remote {
    fn product(&self) -> &'static str {
        "remote"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, self.blocks)
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn prepare(&self, _: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        Box::pin(async {
            self.ready.subscribe().wait_for(|ready| *ready).await.expect("`self` has the sender");
            Ok(())
        })
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        assert!(*self.ready.borrow(), "open_channel before prepare has ended");
        Ok(Box::new(RemoteChannel(Outbox::new(root))))
    }
}

/// Completes requests at once.
struct RemoteChannel(Outbox);

impl Channel for RemoteChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.0.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}
