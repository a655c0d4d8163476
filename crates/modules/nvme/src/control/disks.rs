//! The disks of a controller's namespaces.

use super::{Command, Thread};
use crate::namespace::{Namespace, NamespaceDevice};
use crate::{Config, Error, Exposed, NamespaceInfo};
use aryk_bdev::{Bdev, Blocks, Identity};
use aryk_log_limit::limited;
use aryk_nvme::claims::{self, ControllerInfo, Unserved};
use aryk_nvme::controller::ListedNamespace;
use aryk_nvme::spec::identify::Descriptors;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use uuid::Uuid;

/// The namespace of the UUIDs of disks whose namespaces have none.
const UNNAMED: Uuid = uuid::uuid!("1c4b0d4a-0f7e-5d0e-9b8d-7d2a6c1f3e90");

/// The disks, by NSID.
pub(super) struct Disks {
    controller: String,
    exposed: Exposed,
    depth: u16,
    disks: BTreeMap<u32, (Arc<Namespace>, Arc<Bdev>)>,
    /// Namespaces whose disks are being removed because they have changed or gone.
    leaving: BTreeSet<u32>,
    /// Namespaces whose disks the operator has removed: they become disks again when the controller is attached again.
    hidden: BTreeSet<u32>,
    are_removed: bool,
}

impl Disks {
    pub(super) fn new(config: &Config) -> Self {
        let (controller, exposed) = (config.name.clone(), config.exposed.clone());
        Self {
            controller,
            exposed,
            depth: config.depth.max(1),
            disks: BTreeMap::new(),
            leaving: BTreeSet::new(),
            hidden: BTreeSet::new(),
            are_removed: false,
        }
    }

    /// The name of the disk that a namespace is to be; `None` if it is to be none.
    fn name_of(&self, nsid: u32) -> Option<String> {
        match &self.exposed {
            _ if self.hidden.contains(&nsid) => None,
            Exposed::All => Some(format!("{}n{nsid}", self.controller)),
            Exposed::One { nsid: one, disk } => (*one == nsid).then(|| disk.clone()),
        }
    }

    /// Lowers the depth of the disks to what the controller's queues hold.
    pub(super) fn limit_depth(&mut self, depth: u16) {
        self.depth = self.depth.min(depth);
    }

    /// A disk that is open, and by whom.
    pub(super) fn user(&self) -> Option<String> {
        let user = |bdev: &Arc<Bdev>| {
            let (owner, _) = bdev.openers().into_iter().next()?;
            Some(format!("{} by {owner}", bdev.name()))
        };
        self.disks.values().find_map(|(_, bdev)| user(bdev))
    }

    /// Whether the drive's volatile cache may hold changes that the disks have acknowledged.
    pub(super) fn has_unflushed(&self) -> bool {
        self.disks.values().any(|(namespace, _)| namespace.durability().has_unflushed())
    }

    /// The drive has emptied its volatile cache.
    pub(super) fn all_flushed(&self, now: u64) {
        self.disks.values().for_each(|(namespace, _)| namespace.durability().flushed(now));
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.disks.values().map(|(namespace, _)| namespace.disk().to_owned()).collect()
    }

    pub(super) fn closed(&mut self, nsid: u32) {
        self.disks.remove(&nsid);
        if !self.leaving.remove(&nsid) {
            self.hidden.insert(nsid);
        }
    }

    /// Whether the controller was attached for this namespace alone.
    pub(super) fn ends_with(&self, nsid: u32) -> bool {
        matches!(self.exposed, Exposed::One { nsid: one, .. } if one == nsid)
    }

    pub(super) fn removed(&mut self) {
        self.are_removed = true;
    }

    pub(super) const fn are_removed(&self) -> bool {
        self.are_removed
    }
}

/// A UUID that is the same whenever the namespace is attached.
fn uuid_of(namespace: &claims::Namespace, controller: &ControllerInfo) -> Uuid {
    let ids = &namespace.ids;
    ids.uuid.or(ids.nguid).map_or_else(
        || {
            let of = format!("{}/{}/{}", controller.model, controller.serial, namespace.nsid);
            Uuid::new_v5(&UNNAMED, of.as_bytes())
        },
        Uuid::from_bytes,
    )
}

/// Whether two identities are of different namespaces: an identifier that both have differs.
fn are_different(one: Descriptors, other: Descriptors) -> bool {
    fn differ<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
        one.zip(other).is_some_and(|(one, other)| one != other)
    }
    differ(one.uuid, other.uuid) || differ(one.nguid, other.nguid) || differ(one.eui64, other.eui64)
}

impl Thread {
    /// Creates the disks of a controller that is ready for the first time.
    pub(super) fn create_disks(
        &mut self,
        listed: &[ListedNamespace],
        controller: &ControllerInfo,
    ) -> Result<Vec<Arc<Bdev>>, Error> {
        if let Exposed::One { nsid, .. } = self.disks.exposed {
            let reason =
                match listed.iter().find(|listed| listed.nsid == nsid).map(|listed| &listed.namespace) {
                    None => "there is none".to_owned(),
                    Some(Err(unserved)) => unserved.to_string(),
                    Some(Ok(_)) => String::new(),
                };
            if !reason.is_empty() {
                return Err(Error::Namespace { name: self.shared.name.clone(), nsid, reason });
            }
        }
        for listed in listed {
            if let Ok(namespace) = &listed.namespace {
                self.create_disk(namespace, controller)?;
            }
        }
        Ok(self.disks.disks.values().map(|(_, bdev)| Arc::clone(bdev)).collect())
    }

    fn create_disk(
        &mut self,
        namespace: &claims::Namespace,
        controller: &ControllerInfo,
    ) -> Result<(), aryk_bdev::Error> {
        let Some(disk) = self.disks.name_of(namespace.nsid) else { return Ok(()) };
        let mut uuid = uuid_of(namespace, controller);
        if self.env.registry().find(&uuid.to_string()).is_ok() {
            // Drives of one maker with the same identifiers, or one namespace by two controllers.
            let of = format!("{}/{}", self.shared.info().location, namespace.nsid);
            uuid = Uuid::new_v5(&UNNAMED, of.as_bytes());
            tracing::warn!(disk, %uuid, "another disk has the namespace's identifier");
        }
        let of_disk = Namespace::new(&self.shared, disk.clone(), self.disks.depth, namespace, controller);
        let of_disk = Arc::new(of_disk);
        let identity = Identity { name: disk, aliases: Vec::new(), uuid };
        let device = Arc::new(NamespaceDevice(Arc::clone(&of_disk)));
        let bdev = self.env.registry().register(identity, device)?;
        self.disks.disks.insert(namespace.nsid, (of_disk, bdev));
        Ok(())
    }

    /// Compares the disks with what the controller lists now: after a change of namespaces, and when the controller is back.
    pub(super) fn update_disks(&mut self, listed: &[ListedNamespace], controller: &ControllerInfo) {
        for listed in listed {
            let nsid = listed.nsid;
            match (&listed.namespace, self.disks.disks.get(&nsid).cloned()) {
                (Ok(namespace), Some((of_disk, bdev))) => {
                    self.update_disk(&of_disk, &bdev, namespace, controller)
                }
                (Ok(namespace), None) => {
                    if let Err(error) = self.create_disk(namespace, controller) {
                        let controller = &self.shared.name;
                        limited!(self.lines, warn, controller, nsid, %error, "a new namespace is no disk");
                    }
                }
                (Err(Unserved::NotIdentified(status)), Some(_)) => {
                    // It may be a matter of time: the next look decides.
                    let controller = &self.shared.name;
                    limited!(self.lines, warn, controller, nsid, %status, "a namespace is not identified");
                }
                (Err(unserved), Some(_)) => self.remove_disk(nsid, &unserved.to_string()),
                (Err(Unserved::Inactive), None) => {}
                (Err(unserved), None) => {
                    let controller = &self.shared.name;
                    limited!(self.lines, info, controller, nsid, reason = %unserved, "a namespace is not served");
                }
            }
        }
        let gone = self.disks.disks.keys().filter(|nsid| !listed.iter().any(|listed| listed.nsid == **nsid));
        let gone: Vec<u32> = gone.copied().collect();
        gone.into_iter().for_each(|nsid| self.remove_disk(nsid, "the controller no longer has it"));
        self.publish_namespaces();
    }

    fn update_disk(
        &mut self,
        of_disk: &Arc<Namespace>,
        bdev: &Arc<Bdev>,
        namespace: &claims::Namespace,
        controller: &ControllerInfo,
    ) {
        let before = of_disk.claims();
        if before.block_shift != namespace.block_shift || are_different(before.ids, namespace.ids) {
            return self.remove_disk(namespace.nsid, "it has another format or identity");
        }
        let device = bdev.device();
        let old = (device.limits(), device.ops(), device.is_read_only());
        of_disk.update(namespace, controller);
        let has_changed = old != (device.limits(), device.ops(), device.is_read_only());
        let (registry, name) = (Arc::clone(self.env.registry()), bdev.name().to_owned());
        let blocks = Blocks(namespace.blocks);
        if before.blocks != namespace.blocks
            && let Err(error) = registry.resized(&name, blocks)
        {
            tracing::warn!(disk = name, %error, "the new size of a namespace cannot be applied");
        }
        if has_changed {
            tokio::task::spawn_local(async move {
                // The disk may be gone.
                let _ = registry.changed(&name).await;
            });
        }
    }

    fn remove_disk(&mut self, nsid: u32, reason: &str) {
        let Some((of_disk, _)) = self.disks.disks.get(&nsid) else { return };
        if !self.disks.leaving.insert(nsid) {
            return;
        }
        let (registry, name) = (Arc::clone(self.env.registry()), of_disk.disk().to_owned());
        tracing::warn!(disk = name, nsid, reason, "the disk of a namespace is removed");
        let sender = self.sender.clone();
        tokio::task::spawn_local(async move {
            // Another removal of the disk may be under way, which ends with this too.
            if registry.remove(&name).await.is_ok() {
                let _ = sender.send(Command::Rescan);
            }
        });
    }

    /// Publishes what the namespaces are.
    pub(super) fn publish_namespaces(&mut self) {
        let super::Life::Driven(driven) = &self.life else { return };
        let describe = |listed: &ListedNamespace| NamespaceInfo {
            nsid: listed.nsid,
            namespace: listed.namespace.clone(),
            disk: self.disks.disks.get(&listed.nsid).map(|(of_disk, _)| of_disk.disk().to_owned()),
        };
        let namespaces = driven.controller.namespaces().iter().map(describe).collect();
        self.shared.info().namespaces = namespaces;
        self.update_tools();
    }
}
