//! What a module finds around it. Control context: any thread, but no reactor's.

use crate::{Memory, Registry};
use aryk_reactor::{Background, ReactorList, Reactors};
use std::sync::Arc;

/// The environment in which modules create disks: `create(&Env, Config)`. Cheap to clone.
///
/// The default has a registry of its own and no reactors, for a program that runs a reactor itself: background tasks of its disks
/// do not run.
#[derive(Clone, Debug, Default)]
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

    /// The reactors on which the disks' channels are.
    pub fn reactors(&self) -> &ReactorList {
        self.background.reactors()
    }

    /// The memory of all guests, for devices that access it by themselves.
    pub fn memory(&self) -> &Memory {
        self.registry.memory()
    }

    /// Where a module starts what its disks do by themselves.
    pub const fn background(&self) -> &Background {
        &self.background
    }
}
