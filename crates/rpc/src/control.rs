//! What the methods work on: the daemon, seen from its control thread. Control context.

use crate::config::{Config, Subsystem};
use crate::methods::log::PrintLevel;
use crate::{Disks, Error};
use aryk_bdev::Bdev;
use aryk_reactor::Reactors;
use aryk_vhost_blk::Controllers;
use serde::Serialize;
use serde_json::Value;
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::watch;

/// The daemon.
pub struct Control {
    /// Where I/O runs.
    pub reactors: Rc<Reactors>,
    /// The disks.
    pub disks: Disks,
    /// Through which machines reach them.
    pub controllers: Controllers,
    /// What was configured.
    pub config: Config,
    /// Whether start-up is complete.
    started: watch::Sender<bool>,
    level: Cell<PrintLevel>,
    apply_level: Box<dyn Fn(PrintLevel)>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("reactors", &self.reactors).finish_non_exhaustive()
    }
}

impl Control {
    /// A daemon that runs on `reactors`, has its controllers' sockets in `vhost_dir`, and waits for start-up. `apply_level`
    /// sets what its log tells.
    pub fn new(
        reactors: Rc<Reactors>,
        vhost_dir: &Path,
        level: PrintLevel,
        apply_level: impl Fn(PrintLevel) + 'static,
    ) -> Self {
        let disks = Disks::default();
        let registry = Arc::clone(&disks.registry);
        Self {
            controllers: Controllers::new(vhost_dir, registry, Rc::clone(&reactors)),
            reactors,
            disks,
            config: Config::default(),
            started: watch::Sender::new(false),
            level: Cell::new(level),
            apply_level: Box::new(apply_level),
        }
    }

    /// Completes start-up.
    pub fn start(&self) {
        self.started.send_replace(true);
    }

    /// Whether start-up is complete.
    pub fn has_started(&self) -> bool {
        *self.started.borrow()
    }

    /// Waits until start-up is complete.
    pub async fn until_started(&self) {
        // The sender lives as long as we are borrowed.
        let _ = self.started.subscribe().wait_for(|started| *started).await;
    }

    /// Notes a disk that `module` has just made, and the call that makes it again. Returns its name, the methods' result.
    pub(crate) fn made_disk(
        &self,
        bdev: &Bdev,
        module: &'static str,
        details: Value,
        (method, params): (&'static str, &impl Serialize),
    ) -> String {
        self.disks.made(bdev, module, details);
        self.config.made(Subsystem::Bdev, bdev.name(), method, params);
        bdev.name().to_owned()
    }

    /// Removes a disk that `module` has made, and those that are made of it.
    pub(crate) async fn remove_disk(&self, module: &'static str, name: &str) -> Result<bool, Error> {
        let removed = self.disks.remove(module, name).await;
        self.config.retain(Subsystem::Bdev, |name| self.disks.find(name).is_ok());
        removed.map(|()| true)
    }

    /// Gives back all that was made: no request runs afterwards.
    pub async fn close(&self) {
        self.controllers.delete_all().await;
        self.disks.close().await;
    }

    /// What the log tells.
    pub fn print_level(&self) -> PrintLevel {
        self.level.get()
    }

    /// Changes what the log tells.
    pub fn set_print_level(&self, level: PrintLevel) {
        self.level.set(level);
        (self.apply_level)(level);
    }
}
