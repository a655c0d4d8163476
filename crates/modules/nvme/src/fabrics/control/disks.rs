//! The disks of a controller's namespaces: what [`crate::disks`] needs of the controller.

use super::{Command, Control};
use crate::disks::{self, Maker};
use crate::fabrics::disk::{Namespace, RemoteDevice};
use crate::fabrics::shared::Shared;
use crate::fabrics::{RemoteConfig, RemoteError};
use aryk_bdev::{Bdev, Device, Env};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::claims::{self, ControllerInfo};
use aryk_nvme::controller::ListedNamespace;
use std::sync::Arc;

/// The disks of a controller.
pub(super) type Disks = disks::Disks<Namespace>;

/// No disks yet.
pub(super) fn new(env: &Env, config: &RemoteConfig, shared: &Arc<Shared>) -> Disks {
    let shared = Arc::clone(shared);
    Disks::new(env.registry(), &config.name, &config.exposed, config.depth, move || {
        shared.send(Command::Rescan);
    })
}

impl Control {
    fn with_disks<R>(
        &mut self,
        controller: &ControllerInfo,
        f: impl FnOnce(&mut Disks, &Maker<'_, Namespace>, &LogLimit) -> R,
    ) -> R {
        let Self { shared, disks, lines, .. } = self;
        let make = |disk, depth, namespace: &claims::Namespace| {
            let of_disk = Arc::new(Namespace::new(shared, disk, depth, namespace, controller));
            let device: Arc<dyn Device> = Arc::new(RemoteDevice(Arc::clone(&of_disk)));
            (of_disk, device)
        };
        let place = format!("{}/{}", shared.config.address, shared.config.name);
        f(disks, &Maker { controller, place, make: &make }, lines)
    }

    /// Creates the disks of a controller that is ready for the first time.
    pub(super) fn create_disks(&mut self) -> Result<Vec<Arc<Bdev>>, RemoteError> {
        let (listed, controller) = self.listed().expect("the first path is there");
        let absent = "there is none, or the target does not show it to this host";
        if let Some((nsid, reason)) = self.disks.unserved(&listed, absent) {
            return Err(RemoteError::Namespace { name: self.config().name.clone(), nsid, reason });
        }
        for ListedNamespace { nsid, namespace } in &listed {
            match namespace {
                Ok(namespace) => {
                    self.with_disks(&controller, |disks, maker, _| disks.create(namespace, maker))?;
                }
                Err(reason) => {
                    let controller = &self.config().name;
                    limited!(self.lines, info, controller, nsid, %reason, "a namespace is not served");
                }
            }
        }
        self.shared.info().namespaces = self.disks.describe(&listed);
        self.update_access();
        Ok(self.disks.bdevs().cloned().collect())
    }

    /// Compares the disks with what the paths list now.
    pub(super) fn update_disks(&mut self) {
        if self.is_stopping {
            return;
        }
        let Some((listed, controller)) = self.listed() else { return };
        self.with_disks(&controller, |disks, maker, lines| disks.update(&listed, maker, lines));
        self.shared.info().namespaces = self.disks.describe(&listed);
        self.update_access();
    }

    /// Removes all disks; [`Command::DisksRemoved`] follows.
    pub(super) fn remove_disks(&mut self) {
        if std::mem::replace(&mut self.is_stopping, true) {
            return;
        }
        let shared = Arc::clone(&self.shared);
        self.disks.remove_all(move || shared.send(Command::DisksRemoved));
    }
}
