//! A disk that is another disk: what a module that is made of another disk needs at least. Control context; its channels in
//! reactor context.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Base, Bdev, BdevChannel, Channel, Completion, Decorator, Error, Identity, Io, OpenError, Registry, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;

/// What it is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// By what it is found.
    pub identity: Identity,
    /// The disk that it is made of.
    pub base: String,
}

/// Makes one.
///
/// # Errors
/// As [`Registry::open`] and [`Registry::register`].
pub fn create(registry: &Registry, config: Config) -> Result<Arc<Bdev>, Error> {
    let base = Base::open(registry, &config.base, &config.identity.name)?;
    registry.register(config.identity, Arc::new(Passthru(base)))
}

struct Passthru(Base);

impl Decorator for Passthru {
    fn product(&self) -> &'static str {
        "passthru"
    }

    fn base(&self) -> &Base {
        &self.0
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(PassthruChannel(self.0.open_channel(root, cx)?)))
    }
}

struct PassthruChannel(BdevChannel);

impl Channel for PassthruChannel {
    #[inline]
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        self.0.submit(io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.0.abort(tag, cx);
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.0.poll(cx, out);
    }
}
