//! The order in which absent objects are created: each after those that it needs, as many at the same time as the caller wants,
//! but at most [`OF_A_STORE`] of one store. Pure.

use crate::config::{AbsentObject, Subsystem, first_part};
use crate::methods::{nvmf, qos, rbd};
use std::collections::{BTreeMap, BTreeSet};

/// Objects of one store that are created at the same time, at most. A store that does not respond thus leaves places to others.
pub(super) const OF_A_STORE: usize = 64;

/// Absent objects to create, each once.
#[derive(Debug)]
pub(super) struct Plan {
    objects: Vec<Planned>,
    stores: Vec<Store>,
    /// Indices of the objects that were not handed out yet.
    left: BTreeSet<usize>,
}

/// Objects that may wait for the same thing: those of one method, for images of Ceph also of one pool.
#[derive(Debug, Default)]
struct Store {
    /// Indices of the objects that can be created now.
    ready: BTreeSet<usize>,
    /// Number of objects that were handed out and are not done.
    running: usize,
}

#[derive(Debug)]
struct Planned {
    object: AbsentObject,
    /// Index of the object's store.
    store: usize,
    /// Number of objects that must be done before this one.
    needs: usize,
    /// Indices of the objects that need this one.
    needed_by: Vec<usize>,
    /// Keys of the needed objects that could not be created.
    failed_needs: Vec<u64>,
}

impl Plan {
    /// A plan for `objects`, which are in the order of their first creation.
    pub fn new(objects: Vec<AbsentObject>) -> Self {
        let needs = Index::new(&objects).needs(&objects);
        let store_of = |object: &AbsentObject| {
            (object.call.method.to_string(), object.text("pool_name").map(str::to_owned))
        };
        let mut stores = BTreeMap::new();
        let planned = objects.into_iter().zip(&needs).map(|(object, needs)| {
            let next = stores.len();
            let store = *stores.entry(store_of(&object)).or_insert(next);
            Planned { object, store, needs: needs.len(), needed_by: Vec::new(), failed_needs: Vec::new() }
        });
        let mut objects: Vec<Planned> = planned.collect();
        for (place, needs) in needs.iter().enumerate() {
            needs.iter().for_each(|&needed| objects[needed].needed_by.push(place));
        }
        let mut stores: Vec<Store> = stores.iter().map(|_| Store::default()).collect();
        for (place, planned) in objects.iter().enumerate().filter(|(_, planned)| planned.needs == 0) {
            stores[planned.store].ready.insert(place);
        }
        Self { stores, left: (0..objects.len()).collect(), objects }
    }

    /// All objects of the plan.
    pub fn objects(&self) -> impl Iterator<Item = &AbsentObject> {
        self.objects.iter().map(|planned| &planned.object)
    }

    /// The next object that can be created now, and its index: the first of the store that has the fewest in progress. `None`
    /// while all remaining objects need one that is not done, or are of stores that have enough in progress, and when none
    /// remains.
    pub fn next(&mut self) -> Option<(usize, AbsentObject)> {
        let may_begin = self.stores.iter().filter(|store| store.running < OF_A_STORE);
        let ready = may_begin.filter_map(|store| Some((store.running, *store.ready.first()?))).min();
        // If no object is in progress or ready, the remaining ones need each other, and no order satisfies them.
        let is_quiet = self.stores.iter().all(|store| store.running == 0);
        let stuck = || self.left.first().copied().filter(|_| is_quiet);
        let place = ready.map(|(_, place)| place).or_else(stuck)?;
        let store = &mut self.stores[self.objects[place].store];
        store.ready.remove(&place);
        store.running += 1;
        self.left.remove(&place);
        Some((place, self.objects[place].object.clone()))
    }

    /// Keys of the objects that the object at `place` needs and that could not be created when they were tried.
    pub fn failed_needs(&self, place: usize) -> &[u64] {
        &self.objects[place].failed_needs
    }

    /// Records that the object at `place` was tried: the objects that need it no longer wait for it, even if it does not exist.
    pub fn done(&mut self, place: usize, exists: bool) {
        let key = self.objects[place].object.key;
        let store = &mut self.stores[self.objects[place].store];
        store.running = store.running.checked_sub(1).expect("the object was handed out");
        for needed_by in std::mem::take(&mut self.objects[place].needed_by) {
            let planned = &mut self.objects[needed_by];
            planned.needs -= 1;
            planned.failed_needs.extend((!exists).then_some(key));
            if planned.needs == 0 && self.left.contains(&needed_by) {
                self.stores[planned.store].ready.insert(needed_by);
            }
        }
    }
}

/// Finds objects by the names that other objects use for them.
struct Index<'a> {
    by_name: BTreeMap<(Subsystem, &'a str), usize>,
    /// The disks' names, by uuid in lower case.
    disks_by_uuid: BTreeMap<String, &'a str>,
    /// Settings of each disk: its limits, its group, its monitoring. By the disk's name.
    settings: BTreeMap<&'a str, Vec<usize>>,
    /// NVMe controllers that are attached for one disk, by the disk's name.
    nvme_disks: BTreeMap<&'a str, usize>,
    /// Namespaces and hosts of NVMe-oF subsystems, by subsystem.
    parts: BTreeMap<String, Vec<usize>>,
}

impl<'a> Index<'a> {
    fn new(objects: &'a [AbsentObject]) -> Self {
        let mut index = Self {
            by_name: BTreeMap::new(),
            disks_by_uuid: BTreeMap::new(),
            settings: BTreeMap::new(),
            nvme_disks: BTreeMap::new(),
            parts: BTreeMap::new(),
        };
        for (place, object) in objects.iter().enumerate() {
            index.by_name.insert((object.subsystem, &object.name), place);
            if object.subsystem == Subsystem::Nvme
                && let Some(disk) = object.text("disk")
            {
                index.nvme_disks.insert(disk, place);
            }
            if let Some(subsystem) = nvmf::place(&object.call) {
                index.parts.entry(subsystem).or_default().push(place);
            }
            if object.subsystem == Subsystem::Bdev
                && let Some(uuid) = object.text("uuid")
            {
                index.disks_by_uuid.insert(uuid.to_ascii_lowercase(), &object.name);
            }
        }
        for (place, object) in objects.iter().enumerate() {
            if let Some(disk) = set_of(object) {
                let disk = index.disk_name(disk);
                index.settings.entry(disk).or_default().push(place);
            }
        }
        index
    }

    fn find(&self, subsystem: Subsystem, name: &str) -> Option<usize> {
        self.by_name.get(&(subsystem, name)).copied()
    }

    /// The object that creates the disk of that name or uuid.
    fn disk(&self, name: &str) -> Option<usize> {
        let find = |name: &str| self.find(Subsystem::Bdev, name);
        let name = self.disk_name(name);
        find(name).or_else(|| find(&first_part(name)?)).or_else(|| self.nvme(name))
    }

    /// The NVMe controller that has the disk of that name.
    fn nvme(&self, disk: &str) -> Option<usize> {
        // A disk's name begins with that of its controller, or is a parameter of the call.
        if let Some(place) = self.nvme_disks.get(disk) {
            return Some(*place);
        }
        let (controller, _) = disk.rsplit_once('n')?;
        self.find(Subsystem::Nvme, controller)
    }

    /// The name of the disk that has this name or uuid.
    fn disk_name<'b>(&self, name: &'b str) -> &'b str
    where
        'a: 'b,
    {
        let is_name = self.find(Subsystem::Bdev, name).is_some();
        let by_uuid = || self.disks_by_uuid.get(&name.to_ascii_lowercase()).copied();
        if is_name { name } else { by_uuid().unwrap_or(name) }
    }

    fn settings(&self, disk: &str) -> impl Iterator<Item = usize> {
        self.settings.get(self.disk_name(disk)).into_iter().flatten().copied()
    }

    /// The limits of a group, and of the groups that contain it.
    fn group_limits(&self, objects: &[AbsentObject], group: &str) -> BTreeSet<usize> {
        let (mut limits, mut seen, mut next) = (BTreeSet::new(), BTreeSet::new(), Some(group));
        // Damaged notes may name each other as parents.
        while let Some(group) = next.filter(|group| seen.insert(*group)) {
            limits.extend(self.find(Subsystem::Qos, &qos::group_limits_object(group)));
            let created = self.find(Subsystem::Qos, &qos::group_object(group));
            next = created.and_then(|place| objects[place].text("parent"));
        }
        limits
    }

    /// For each object the indices of those that it needs.
    fn needs(&self, objects: &'a [AbsentObject]) -> Vec<Vec<usize>> {
        let is_setting = |object: &AbsentObject| is_of_daemon(object.subsystem);
        // Settings of the daemon come first, one after the other: cores and the scheduler must exist before the objects that run
        // on them.
        let mut last_setting = None;
        let mut all: Vec<Vec<usize>> = Vec::with_capacity(objects.len());
        for (place, object) in objects.iter().enumerate() {
            let mut needs = self.needs_of(objects, object);
            if is_setting(object) {
                needs.extend(last_setting.replace(place));
            }
            all.push(needs);
        }
        for (place, (object, needs)) in objects.iter().zip(&mut all).enumerate() {
            needs.extend(last_setting.filter(|_| !is_setting(object)));
            needs.sort_unstable();
            needs.dedup();
            needs.retain(|&needed| needed != place);
        }
        all
    }

    fn needs_of(&self, objects: &[AbsentObject], object: &AbsentObject) -> Vec<usize> {
        let disk = |param: &str| self.disk(object.text(param)?);
        let group = |param: &str| self.find(Subsystem::Qos, &qos::group_object(object.text(param)?));
        // A disk's limits are set before a guest can reach the disk.
        let with_settings = |name: &str| self.disk(name).into_iter().chain(self.settings(name)).collect();
        let offered = |param: &str| object.text(param).map(with_settings).unwrap_or_default();
        match object.subsystem {
            Subsystem::Daemon
            | Subsystem::Keyring
            | Subsystem::Nvme
            | Subsystem::Discovery
            | Subsystem::Mdns
            | Subsystem::Pools
            | Subsystem::Rbd
            | Subsystem::Reservations
            | Subsystem::Scheduler
            | Subsystem::Unit => Vec::new(),
            Subsystem::Bdev => {
                let base = object.call.base().and_then(|base| self.disk(base));
                let cluster = rbd::cluster_of(&object.call).and_then(|name| self.find(Subsystem::Rbd, name));
                base.into_iter().chain(cluster).collect()
            }
            Subsystem::Watch => disk("name").into_iter().collect(),
            Subsystem::Qos => match &*object.call.method {
                qos::CREATE => group("parent").into_iter().collect(),
                qos::SET_GROUP_LIMIT => group("name").into_iter().collect(),
                qos::ADD => {
                    let limits = object.text("name").map(|group| self.group_limits(objects, group));
                    let limits = limits.into_iter().flatten();
                    limits.chain(group("name")).chain(disk("bdev_name")).collect()
                }
                _ => disk("name").into_iter().collect(),
            },
            Subsystem::VhostBlk => offered("dev_name"),
            Subsystem::VhostScsi => {
                let mut needs: Vec<usize> = offered("bdev_name");
                // A target needs its controller.
                needs.extend(object.text("ctrlr").and_then(|name| self.find(Subsystem::VhostScsi, name)));
                needs
            }
            Subsystem::Nvmf => {
                let needed = |needs| match needs {
                    nvmf::Needs::Object(name) => self.find(Subsystem::Nvmf, &name).into_iter().collect(),
                    nvmf::Needs::Disk(name) => with_settings(name),
                    nvmf::Needs::Parts(subsystem) => self.parts.get(&subsystem).cloned().unwrap_or_default(),
                };
                nvmf::needs(&object.call).into_iter().flat_map(needed).collect()
            }
            Subsystem::Signals | Subsystem::Sleep => {
                let of = |subsystem| self.find(subsystem, &object.name);
                [Subsystem::VhostBlk, Subsystem::VhostScsi].into_iter().filter_map(of).collect()
            }
        }
    }
}

const fn is_of_daemon(subsystem: Subsystem) -> bool {
    matches!(subsystem, Subsystem::Daemon | Subsystem::Keyring | Subsystem::Scheduler)
}

/// The disk of which an object is a setting.
fn set_of(object: &AbsentObject) -> Option<&str> {
    match (object.subsystem, &*object.call.method) {
        (Subsystem::Watch, _) | (Subsystem::Qos, qos::SET_LIMIT) => object.text("name"),
        (Subsystem::Qos, qos::ADD) => object.text("bdev_name"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Call;
    use serde_json::{Value, json};

    fn object(
        key: u64,
        subsystem: Subsystem,
        name: &str,
        method: &'static str,
        params: Value,
    ) -> AbsentObject {
        AbsentObject { key, subsystem, name: name.into(), call: Call { method: method.into(), params } }
    }

    /// The names of the objects in the waves in which they can be created.
    fn waves(objects: Vec<AbsentObject>) -> Vec<Vec<String>> {
        let (mut plan, mut waves) = (Plan::new(objects), Vec::new());
        loop {
            let wave: Vec<_> = std::iter::from_fn(|| plan.next()).collect();
            if wave.is_empty() {
                return waves;
            }
            waves.push(wave.iter().map(|(_, object)| object.name.clone()).collect());
            wave.into_iter().for_each(|(place, _)| plan.done(place, true));
        }
    }

    #[test]
    fn each_object_is_created_after_those_that_it_needs() {
        use Subsystem::{Bdev, Daemon, Qos, Signals, VhostBlk, VhostScsi, Watch};
        let uuid = "6BA7B810-9DAD-11D1-80B4-00C04FD430C8";
        let objects = vec![
            object(1, VhostBlk, "c", "vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "top"})),
            object(
                2,
                Bdev,
                "top",
                "bdev_passthru_create",
                json!({"name": "top", "base_bdev_name": "bottomp3"}),
            ),
            object(3, Bdev, "bottomp0", "bdev_split_create", json!({"base_bdev": uuid.to_lowercase()})),
            object(4, Bdev, "bottom", "bdev_uring_create", json!({"name": "bottom", "uuid": uuid})),
            object(5, Qos, "limits/top", qos::SET_LIMIT, json!({"name": "top"})),
            object(6, Qos, "place/top", qos::ADD, json!({"name": "g", "bdev_name": "top"})),
            object(7, Qos, "group-limits/g", qos::SET_GROUP_LIMIT, json!({"name": "g"})),
            object(8, Qos, "group/g", qos::CREATE, json!({"name": "g", "parent": "all"})),
            object(9, Qos, "group/all", qos::CREATE, json!({"name": "all"})),
            object(10, Watch, "bdev_enable_histogram top", "bdev_enable_histogram", json!({"name": "top"})),
            object(
                11,
                VhostScsi,
                "s/3",
                "vhost_scsi_controller_add_target",
                json!({"ctrlr": "s", "bdev_name": "top"}),
            ),
            object(12, VhostScsi, "s", "vhost_create_scsi_controller", json!({"ctrlr": "s"})),
            object(13, Signals, "c", "vhost_controller_set_coalescing", json!({"ctrlr": "c"})),
            object(14, Daemon, "core 2 added", "aryk_core_add", json!({"core": 2})),
            object(15, Daemon, "core 1 removed", "aryk_core_remove", json!({"core": 1})),
            object(16, Bdev, "other", "bdev_null_create", json!({"name": "other"})),
        ];
        let waves = waves(objects);
        let wanted: [&[&str]; 8] = [
            &["core 2 added"],
            &["core 1 removed"],
            &["bottom", "group/all", "s", "other"],
            &["bottomp0", "group/g"],
            &["top", "group-limits/g"],
            &["limits/top", "place/top", "bdev_enable_histogram top"],
            &["c", "s/3"],
            &["c"],
        ];
        assert_eq!(waves, wanted);
    }

    #[test]
    fn a_controller_that_names_its_disk_by_uuid_comes_after_all_limits() {
        use Subsystem::{Bdev, Qos, VhostBlk};
        let uuid = "6BA7B810-9DAD-11D1-80B4-00C04FD430C8";
        let controller = json!({"ctrlr": "c", "dev_name": uuid.to_lowercase()});
        let objects = vec![
            object(1, VhostBlk, "c", "vhost_create_blk_controller", controller),
            object(2, Qos, "place/a", qos::ADD, json!({"name": "g", "bdev_name": "a"})),
            object(3, Bdev, "a", "bdev_uring_create", json!({"name": "a", "uuid": uuid})),
            object(4, Qos, "group-limits/all", qos::SET_GROUP_LIMIT, json!({"name": "all"})),
            object(5, Qos, "group/g", qos::CREATE, json!({"name": "g", "parent": "all"})),
            object(6, Qos, "group/all", qos::CREATE, json!({"name": "all"})),
        ];
        let waves = waves(objects);
        assert_eq!(waves.last().unwrap(), &["c"]);
        let place = |name: &str| waves.iter().position(|wave| wave.iter().any(|n| n == name));
        assert!(place("group-limits/all") < place("place/a"), "{waves:?}");
    }

    #[test]
    fn a_store_that_does_not_respond_leaves_places_to_others() {
        let image = |key: u64, pool: &str| {
            let name = format!("{pool}{key}");
            let params = json!({"name": name, "pool_name": pool, "rbd_name": name});
            object(key, Subsystem::Bdev, &name, "bdev_rbd_create", params)
        };
        let mut objects: Vec<_> = (0..500).map(|key| image(key, "stuck")).collect();
        objects.extend((500..600).map(|key| image(key, "other")));
        objects.push(object(600, Subsystem::Bdev, "m", "bdev_malloc_create", json!({"name": "m"})));
        let controller = json!({"ctrlr": "c", "dev_name": "m"});
        objects.push(object(601, Subsystem::VhostBlk, "c", "vhost_create_blk_controller", controller));
        let mut plan = Plan::new(objects);
        let running: Vec<_> = std::iter::from_fn(|| plan.next()).map(|(place, _)| place).collect();
        let of_pool =
            |range: std::ops::Range<usize>| running.iter().filter(|place| range.contains(place)).count();
        assert_eq!((of_pool(0..500), of_pool(500..600)), (OF_A_STORE, OF_A_STORE));
        assert!(running[..3].contains(&600), "the disk waits for images: {running:?}");
        plan.done(600, true);
        assert_eq!(plan.next().unwrap().1.name, "c");
        plan.done(running[0], false);
        assert_eq!(plan.next().unwrap().0, 64, "one more of the stuck store");
        assert!(plan.next().is_none());
    }

    #[test]
    fn objects_that_need_each_other_are_tried_too() {
        let disk = |key, name: &str, base: &str| {
            let params = json!({"name": name, "base_bdev_name": base});
            object(key, Subsystem::Bdev, name, "bdev_passthru_create", params)
        };
        assert_eq!(
            waves(vec![disk(1, "a", "b"), disk(2, "b", "a"), disk(3, "self", "self")]),
            [vec!["self"], vec!["a"], vec!["b"],]
        );
    }
}
