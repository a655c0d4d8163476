//! A channel of a namespace's disk: one opener's use of the reactor's queue pair, or of both its pairs. Reactor context.

use crate::driver::PairDriver;
use crate::namespace::Namespace;
use aryk_bdev::{Channel, Completion, CreditPool, Io, Tag};
use aryk_reactor::{Cx, DriverRef, RootId};
use aryk_slots::Key;
use std::sync::Arc;

pub(crate) struct NamespaceChannel {
    driver: DriverRef<PairDriver>,
    /// The channel's key in the driver.
    key: Key,
}

impl NamespaceChannel {
    pub(crate) fn new(driver: DriverRef<PairDriver>, namespace: &Arc<Namespace>, root: RootId) -> Self {
        let key = driver.borrow_mut().open(namespace, namespace.commands(), root);
        Self { driver, key }
    }
}

impl Channel for NamespaceChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.driver.activate(cx).submit(self.key, io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.driver.activate(cx).abort(self.key, tag, cx);
    }

    #[inline]
    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.driver.borrow_mut().take(self.key, out);
    }

    fn credits(&self) -> Option<CreditPool> {
        Some(self.driver.borrow().credits())
    }
}

impl Drop for NamespaceChannel {
    fn drop(&mut self) {
        self.driver.borrow_mut().close(self.key);
    }
}

/// A channel on a reactor that has a second queue pair, for requests in flight while the reactor sleeps. Each request belongs to
/// one of the two; the driver of the second may hand it to the first.
pub(crate) struct PairedChannel {
    first: NamespaceChannel,
    waking: NamespaceChannel,
}

impl PairedChannel {
    pub(crate) fn new(
        first: NamespaceChannel,
        waking: DriverRef<PairDriver>,
        namespace: &Arc<Namespace>,
        root: RootId,
    ) -> Self {
        let waking = NamespaceChannel::new(waking, namespace, root);
        waking.driver.borrow_mut().set_twin(waking.key, first.key);
        Self { first, waking }
    }

    fn yields(&self) -> bool {
        self.first.driver.borrow_mut().yields_to(&mut self.waking.driver.borrow_mut())
    }
}

impl Channel for PairedChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let channel = if self.yields() { &mut self.waking } else { &mut self.first };
        channel.submit(io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.first.abort(tag, cx);
        self.waking.abort(tag, cx);
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.first.poll(cx, out);
        self.waking.poll(cx, out);
    }

    fn credits(&self) -> Option<CreditPool> {
        // Those of the first pair: the second has the same depth.
        self.first.credits()
    }
}
