//! The disks of a drive's namespaces: what [`crate::disks`] needs of the drive, and who uses them.

use super::{Command, Config, Life, Thread, UnboundedSender};
use crate::Error;
use crate::disks::{self, Maker};
use crate::namespace::{Namespace, NamespaceDevice};
use aryk_bdev::{Bdev, Env};
use aryk_log_limit::LogLimit;
use aryk_nvme::claims::{self, ControllerInfo};
use aryk_nvme::controller::ListedNamespace;
use std::sync::Arc;

/// The disks of a drive.
pub(super) type Disks = disks::Disks<Namespace>;

/// No disks yet.
pub(super) fn new(env: &Env, config: &Config, sender: &UnboundedSender<Command>) -> Disks {
    let sender = sender.clone();
    Disks::new(env.registry(), &config.name, &config.exposed, config.depth, move || {
        // A thread that has ended has no disks.
        let _ = sender.send(Command::Rescan);
    })
}

impl disks::Namespace for Namespace {
    fn disk(&self) -> &str {
        Self::disk(self)
    }

    fn claims(&self) -> claims::Namespace {
        Self::claims(self)
    }

    fn update(&self, claims: &claims::Namespace, controller: &ControllerInfo) {
        Self::update(self, claims, controller);
    }
}

impl disks::Disks<Namespace> {
    /// A disk that is open, and by whom.
    pub(super) fn user(&self) -> Option<String> {
        let user = |bdev: &Arc<Bdev>| {
            let (owner, _) = bdev.openers().into_iter().next()?;
            Some(format!("{} by {owner}", bdev.name()))
        };
        self.bdevs().find_map(user)
    }

    /// Whether the drive's volatile cache may hold changes that the disks have acknowledged.
    pub(super) fn has_unflushed(&self) -> bool {
        self.namespaces().any(|namespace| namespace.durability().has_unflushed())
    }

    /// The drive has emptied its volatile cache.
    pub(super) fn all_flushed(&self, now: u64) {
        self.namespaces().for_each(|namespace| namespace.durability().flushed(now));
    }
}

impl Thread {
    fn with_disks<R>(
        &mut self,
        controller: &ControllerInfo,
        f: impl FnOnce(&mut Disks, &Maker<'_, Namespace>, &LogLimit) -> R,
    ) -> R {
        let Self { shared, disks, lines, .. } = self;
        let make = |disk, depth, namespace: &claims::Namespace| {
            let of_disk = Arc::new(Namespace::new(shared, disk, depth, namespace, controller));
            let device: Arc<dyn aryk_bdev::Device> = Arc::new(NamespaceDevice(Arc::clone(&of_disk)));
            (of_disk, device)
        };
        let place = shared.info().location.clone();
        f(disks, &Maker { controller, place, make: &make }, lines)
    }

    /// Creates the disks of a controller that is ready for the first time.
    pub(super) fn create_disks(
        &mut self,
        listed: &[ListedNamespace],
        controller: &ControllerInfo,
    ) -> Result<Vec<Arc<Bdev>>, Error> {
        if let Some((nsid, reason)) = self.disks.unserved(listed, "there is none") {
            return Err(Error::Namespace { name: self.shared.name.clone(), nsid, reason });
        }
        self.with_disks(controller, |disks, maker, _| {
            let mut served = listed.iter().filter_map(|listed| listed.namespace.as_ref().ok());
            served.try_for_each(|namespace| disks.create(namespace, maker))?;
            Ok(disks.bdevs().cloned().collect())
        })
    }

    /// Compares the disks with what the controller lists now.
    pub(super) fn update_disks(&mut self, listed: &[ListedNamespace], controller: &ControllerInfo) {
        self.with_disks(controller, |disks, maker, lines| disks.update(listed, maker, lines));
        self.publish_namespaces();
    }

    /// Publishes what the namespaces are.
    pub(super) fn publish_namespaces(&mut self) {
        let Life::Driven(driven) = &self.life else { return };
        let namespaces = self.disks.describe(driven.controller.namespaces());
        self.shared.info().namespaces = namespaces;
        self.update_tools();
    }
}
