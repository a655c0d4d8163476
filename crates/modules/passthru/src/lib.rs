//! The passthru disk: forwards all requests to a base disk. It is the smallest module on top of another disk. Control context;
//! its channels run in reactor context.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Base, Bdev, BdevChannel, Channel, Completion, Decorator, Env, Error, Identity, Io, OpenError, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;

/// Configuration of a passthru disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names and UUID of the disk.
    pub identity: Identity,
    /// The name of the base disk.
    pub base: String,
}

/// Creates a passthru disk.
///
/// # Errors
/// As [`aryk_bdev::Registry::open`] and [`aryk_bdev::Registry::register`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let base = Base::open(env.registry(), &config.base, &config.identity.name)?;
    env.registry().register(config.identity, Arc::new(Passthru(base)))
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
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.0.submit(*io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.0.abort(tag, cx);
    }

    fn is_revocable(&self, tag: Tag) -> bool {
        self.0.are_revocable(|t| t == tag)
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.0.poll(cx, out);
    }
}
