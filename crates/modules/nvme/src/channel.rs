//! A channel of a namespace's disk: one opener's use of the reactor's queue pair. Reactor context.

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
