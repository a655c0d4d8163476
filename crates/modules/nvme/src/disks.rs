//! The disks of a controller's namespaces: their names and identities, and what a change of a namespace means for its disk. The
//! same for drives and for controllers of other hosts. The context of the controller's owner, which runs a local set of tasks.

use crate::{Exposed, NamespaceInfo};
use aryk_bdev::{Bdev, Blocks, Device, Identity, Registry};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::claims::{self, ControllerInfo, Unserved};
use aryk_nvme::controller::ListedNamespace;
use aryk_nvme::spec::identify::Descriptors;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_local;
use uuid::Uuid;

/// The namespace of the UUIDs of disks whose namespaces have none.
const UNNAMED: Uuid = uuid::uuid!("1c4b0d4a-0f7e-5d0e-9b8d-7d2a6c1f3e90");
/// Time between two looks whether another removal of a disk has ended.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(10);

/// A namespace that is a disk.
pub(crate) trait Namespace {
    /// The disk's name.
    fn disk(&self) -> &str;

    /// What the controller says of it.
    fn claims(&self) -> claims::Namespace;

    /// Takes over what the controller says now.
    fn update(&self, claims: &claims::Namespace, controller: &ControllerInfo);
}

/// Makes a namespace and its device, of the disk's name, its depth and what the controller says of the namespace.
pub(crate) type Make<'a, N> = dyn Fn(String, u16, &claims::Namespace) -> (Arc<N>, Arc<dyn Device>) + 'a;

/// A controller that is ready, for its disks.
pub(crate) struct Maker<'a, N> {
    pub(crate) controller: &'a ControllerInfo,
    /// Where the controller is: it tells disks apart that claim the same identity.
    pub(crate) place: String,
    pub(crate) make: &'a Make<'a, N>,
}

/// The disks, by NSID.
pub(crate) struct Disks<N> {
    registry: Arc<Registry>,
    controller: String,
    exposed: Exposed,
    depth: u16,
    disks: BTreeMap<u32, (Arc<N>, Arc<Bdev>)>,
    /// Namespaces whose disks are being removed because they have changed or gone.
    leaving: BTreeSet<u32>,
    /// Namespaces whose disks the operator has removed: they become disks again when the controller is attached again.
    hidden: BTreeSet<u32>,
    /// Called when the disk of a namespace that has changed is gone: the namespace gets another.
    rescan: Arc<dyn Fn() + Send + Sync>,
}

impl<N: Namespace> Disks<N> {
    /// No disks yet, of a controller with this name.
    pub(crate) fn new(
        registry: &Arc<Registry>,
        controller: &str,
        exposed: &Exposed,
        depth: u16,
        rescan: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self {
            registry: Arc::clone(registry),
            controller: controller.to_owned(),
            exposed: exposed.clone(),
            depth: depth.max(1),
            disks: BTreeMap::new(),
            leaving: BTreeSet::new(),
            hidden: BTreeSet::new(),
            rescan: Arc::new(rescan),
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
    pub(crate) fn limit_depth(&mut self, depth: u16) {
        self.depth = self.depth.min(depth);
    }

    /// The namespaces that are disks.
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &N> {
        self.disks.values().map(|(namespace, _)| &**namespace)
    }

    /// The disks.
    pub(crate) fn bdevs(&self) -> impl Iterator<Item = &Arc<Bdev>> {
        self.disks.values().map(|(_, bdev)| bdev)
    }

    /// Forgets a disk that was removed. Returns whether an operator has removed it.
    pub(crate) fn closed(&mut self, nsid: u32) -> bool {
        self.disks.remove(&nsid);
        let by_operator = !self.leaving.remove(&nsid);
        if by_operator {
            self.hidden.insert(nsid);
        }
        by_operator
    }

    /// Whether the controller was attached for this namespace alone.
    pub(crate) fn ends_with(&self, nsid: u32) -> bool {
        matches!(self.exposed, Exposed::One { nsid: one, .. } if one == nsid)
    }

    /// The namespace for which alone the controller is attached, and why it cannot be a disk; `absent` if the controller does not
    /// list it. `None`: it can, or all namespaces become disks.
    pub(crate) fn unserved(&self, listed: &[ListedNamespace], absent: &str) -> Option<(u32, String)> {
        let Exposed::One { nsid, .. } = self.exposed else { return None };
        match listed.iter().find(|listed| listed.nsid == nsid).map(|listed| &listed.namespace) {
            None => Some((nsid, absent.to_owned())),
            Some(Err(unserved)) => Some((nsid, unserved.to_string())),
            Some(Ok(_)) => None,
        }
    }

    /// Creates the disk of a namespace, if it is to be one.
    ///
    /// # Errors
    /// Those of [`Registry::register`].
    pub(crate) fn create(
        &mut self,
        namespace: &claims::Namespace,
        maker: &Maker<'_, N>,
    ) -> Result<(), aryk_bdev::Error> {
        let Some(disk) = self.name_of(namespace.nsid) else { return Ok(()) };
        let mut uuid = uuid_of(namespace, maker.controller);
        if self.registry.find(&uuid.to_string()).is_ok() {
            // Drives of one maker with the same identifiers, one namespace by two controllers, or a disk of this host that it
            // uses over the network.
            let of = format!("{}/{}", maker.place, namespace.nsid);
            uuid = Uuid::new_v5(&UNNAMED, of.as_bytes());
            tracing::warn!(disk, %uuid, "another disk has the namespace's identifier");
        }
        let (of_disk, device) = (maker.make)(disk.clone(), self.depth, namespace);
        let identity = Identity { name: disk, aliases: Vec::new(), uuid };
        let bdev = self.registry.register(identity, device)?;
        self.disks.insert(namespace.nsid, (of_disk, bdev));
        Ok(())
    }

    /// Compares the disks with what the controller lists now: after a change of namespaces, and when the controller is back.
    pub(crate) fn update(&mut self, listed: &[ListedNamespace], maker: &Maker<'_, N>, lines: &LogLimit) {
        for ListedNamespace { nsid, namespace } in listed {
            let controller = &self.controller;
            match (namespace, self.disks.get(nsid).cloned()) {
                (Ok(namespace), Some((of_disk, bdev))) => self.update_one(&of_disk, &bdev, namespace, maker),
                (Ok(namespace), None) => {
                    if let Err(error) = self.create(namespace, maker) {
                        let controller = &self.controller;
                        limited!(lines, warn, controller, nsid, %error, "a new namespace is no disk");
                    }
                }
                (Err(Unserved::NotIdentified(status)), Some(_)) => {
                    // It may be a matter of time: the next look decides.
                    limited!(lines, warn, controller, nsid, %status, "a namespace is not identified");
                }
                (Err(unserved), Some(_)) => self.remove(*nsid, &unserved.to_string()),
                (Err(Unserved::Inactive), None) => {}
                (Err(unserved), None) => {
                    limited!(lines, info, controller, nsid, reason = %unserved, "a namespace is not served");
                }
            }
        }
        let gone = self.disks.keys().filter(|nsid| !listed.iter().any(|listed| listed.nsid == **nsid));
        let gone: Vec<u32> = gone.copied().collect();
        gone.into_iter().for_each(|nsid| self.remove(nsid, "the controller no longer has it"));
    }

    fn update_one(&mut self, of_disk: &N, bdev: &Bdev, namespace: &claims::Namespace, maker: &Maker<'_, N>) {
        let before = of_disk.claims();
        if before.block_shift != namespace.block_shift || are_different(before.ids, namespace.ids) {
            return self.remove(namespace.nsid, "it has another format or identity");
        }
        let device = bdev.device();
        let old = (device.limits(), device.ops(), device.is_read_only());
        of_disk.update(namespace, maker.controller);
        let has_changed = old != (device.limits(), device.ops(), device.is_read_only());
        let (registry, name) = (Arc::clone(&self.registry), bdev.name().to_owned());
        if before.blocks != namespace.blocks
            && let Err(error) = registry.resized(&name, Blocks(namespace.blocks))
        {
            tracing::warn!(disk = name, %error, "the new size of a namespace cannot be applied");
        }
        if has_changed {
            spawn_local(async move {
                // The disk may be gone.
                let _ = registry.changed(&name).await;
            });
        }
    }

    fn remove(&mut self, nsid: u32, reason: &str) {
        let Some((of_disk, _)) = self.disks.get(&nsid) else { return };
        if !self.leaving.insert(nsid) {
            return;
        }
        let (registry, name) = (Arc::clone(&self.registry), of_disk.disk().to_owned());
        tracing::warn!(disk = name, nsid, reason, "the disk of a namespace is removed");
        let rescan = Arc::clone(&self.rescan);
        spawn_local(async move {
            // Another removal of the disk may be under way, which ends with this too.
            if registry.remove(&name).await.is_ok() {
                rescan();
            }
        });
    }

    /// Removes all disks, and calls `removed` when they are gone.
    pub(crate) fn remove_all(&self, removed: impl FnOnce() + 'static) {
        let names: Vec<String> = self.namespaces().map(|namespace| namespace.disk().to_owned()).collect();
        let registry = Arc::clone(&self.registry);
        spawn_local(async move {
            for name in names {
                // The disk may have been removed already, or is being removed: then the next look finds it gone.
                while matches!(registry.remove(&name).await, Err(aryk_bdev::Error::Busy(_))) {
                    tokio::time::sleep(REMOVAL_INTERVAL).await;
                }
            }
            removed();
        });
    }

    /// Reports whether the requests of the disks wait for the controller.
    pub(crate) fn set_stalled(&self, is_stalled: bool) {
        for namespace in self.namespaces() {
            // The disk may be gone.
            let _ = self.registry.stalled(namespace.disk(), is_stalled);
        }
    }

    /// What an operator sees of the namespaces.
    pub(crate) fn describe(&self, listed: &[ListedNamespace]) -> Vec<NamespaceInfo> {
        let describe = |listed: &ListedNamespace| NamespaceInfo {
            nsid: listed.nsid,
            namespace: listed.namespace.clone(),
            disk: self.disks.get(&listed.nsid).map(|(of_disk, _)| of_disk.disk().to_owned()),
        };
        listed.iter().map(describe).collect()
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
pub(crate) fn are_different(one: Descriptors, other: Descriptors) -> bool {
    fn differ<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
        one.zip(other).is_some_and(|(one, other)| one != other)
    }
    differ(one.uuid, other.uuid) || differ(one.nguid, other.nguid) || differ(one.eui64, other.eui64)
}
