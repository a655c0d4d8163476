//! What a module finds around it. Control context: any thread, but no reactor's.

use crate::Registry;
use aryk_reactor::{Background, Reactors};
use std::sync::Arc;

/// The environment in which modules create disks: `create(&Env, Config)`. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Env {
    registry: Arc<Registry>,
    background: Background,
}

impl Env {
    /// Disks of `registry`, whose background tasks run on `reactors`.
    pub fn new(registry: Arc<Registry>, reactors: &Reactors) -> Self {
        Self { registry, background: reactors.background().clone() }
    }

    /// All disks of the process.
    pub const fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Where a module starts what its disks do by themselves.
    pub const fn background(&self) -> &Background {
        &self.background
    }
}
