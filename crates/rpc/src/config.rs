//! The configuration, stored as the RPC calls that create it again. Control context.
//!
//! Every method that creates or changes an object stores a *note* here, which holds the call; the code that removes the object
//! removes its note. Notes are in the order of their creation, so that a disk comes before the disks built on it.
//!
//! With a state store, every change of a note is sent to the store at once, in the order of the changes. Notes that were read
//! from the store and whose objects do not exist (yet) are *absent*: they stay in the store, under the same key, until the object
//! is created again or removed. A disk that a client creates before its base exists is absent too: it *waits* for the base.

use crate::journal;
use crate::methods::nvme::{ATTACH, START_DISCOVERY, is_saved};
use crate::methods::nvmf;
use crate::methods::rbd::for_output;
use aryk_state::{Record, Store, Written};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::time::SystemTime;

/// The part of the daemon to which an object belongs, with SPDK's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subsystem {
    /// Names of secrets: files and options, never secrets.
    Keyring,
    /// Disks.
    Bdev,
    /// NVMe controllers, with their disks. On the wire a part of the disks.
    Nvme,
    /// Discovery services that are followed. On the wire a part of the disks.
    Discovery,
    /// Searches for discovery services by multicast DNS. On the wire a part of the disks.
    Mdns,
    /// Clients of Ceph clusters. On the wire a part of the disks.
    Rbd,
    /// Settings that monitor disks, such as `bdev_set_io_timeout DISK`. On the wire a part of the disks.
    Watch,
    /// Rate limits of disks, and groups of disks. On the wire a part of the disks.
    Qos,
    /// vhost-user-blk controllers of VMs.
    VhostBlk,
    /// vhost-user-scsi controllers, and their targets.
    VhostScsi,
    /// Targets of NVMe over TCP: their subsystems, namespaces, hosts and listeners.
    Nvmf,
    /// Reservations that hosts have made on namespaces. No calls: a namespace gets them when it is added.
    Reservations,
    /// How far the pools of volumes were when they were open last. No calls: a pool that is older is not opened.
    Pools,
    /// Interrupt coalescing of controllers. On the wire the last part of the controllers.
    Signals,
    /// Sleep policies of controllers. On the wire the last part of the controllers.
    Sleep,
    /// Reservations and mode pages that SCSI initiators have set on disks. No calls: a disk gets them when it is attached.
    Unit,
    /// The scheduler, which assigns queues to cores.
    Scheduler,
    /// Settings of the daemon as a whole, each under the name of what it sets. SPDK saves none of them.
    Daemon,
}

impl Subsystem {
    /// All subsystems that SPDK lists, each after those that it depends on.
    pub const ALL: [Self; 6] =
        [Self::Keyring, Self::Bdev, Self::Nvmf, Self::VhostBlk, Self::VhostScsi, Self::Scheduler];

    /// The subsystem's name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keyring => "keyring",
            Self::Bdev
            | Self::Nvme
            | Self::Discovery
            | Self::Mdns
            | Self::Rbd
            | Self::Watch
            | Self::Qos
            | Self::Pools => "bdev",
            Self::Nvmf | Self::Reservations => "nvmf",
            Self::VhostBlk => "vhost_blk",
            Self::VhostScsi | Self::Signals | Self::Sleep => "vhost_scsi",
            Self::Unit => "scsi",
            Self::Scheduler => "scheduler",
            Self::Daemon => "daemon",
        }
    }

    /// Whether its notes are saved states, not calls.
    const fn is_state(self) -> bool {
        matches!(self, Self::Unit | Self::Reservations | Self::Pools)
    }

    /// The subsystems that must come before this one.
    pub const fn depends_on(self) -> &'static [&'static str] {
        match self {
            Self::Keyring
            | Self::Bdev
            | Self::Nvme
            | Self::Discovery
            | Self::Mdns
            | Self::Rbd
            | Self::Watch
            | Self::Qos
            | Self::Pools
            | Self::Scheduler
            | Self::Daemon => &[],
            Self::Nvmf
            | Self::Reservations
            | Self::VhostBlk
            | Self::VhostScsi
            | Self::Signals
            | Self::Sleep
            | Self::Unit => &["bdev"],
        }
    }
}

/// A call that creates an object.
#[derive(Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Call {
    /// The method.
    pub method: Cow<'static, str>,
    /// Parameters of the method.
    #[schemars(with = "Map<String, Value>")]
    pub params: Value,
}

/// Without the parameters, which may be secret.
impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("method", &self.method).finish_non_exhaustive()
    }
}

impl Call {
    /// Whether the call concerns the disk of that name, or creates something on top of it.
    pub(crate) fn names(&self, disk: &str) -> bool {
        const PARAMS: [&str; 6] =
            ["name", "bdev_name", "dev_name", "base_bdev_name", "base_bdev", "base_name"];
        PARAMS.iter().any(|param| self.params.get(param).is_some_and(|value| value == disk))
            || nvmf::disk_of(self) == Some(disk)
    }

    /// The disk on which the call's disk is built.
    pub(crate) fn base(&self) -> Option<&str> {
        ["base_bdev_name", "base_bdev", "base_name"].iter().find_map(|base| self.params.get(base)?.as_str())
    }
}

/// The name under which the note of a split disk's part would stand: all parts have one note, under the name of the first part.
pub(crate) fn first_part(name: &str) -> Option<String> {
    Some(format!("{}p0", name.rsplit_once('p')?.0))
}

/// Sorts disks so that each comes before its base, and otherwise the last created first.
fn dependents_first(notes: &mut [&Note]) {
    const UNKNOWN: usize = 0;
    const IN_PROGRESS: usize = usize::MAX;
    let places: BTreeMap<&str, usize> = notes.iter().enumerate().map(|(i, n)| (&*n.object, i)).collect();
    let place = |name: &str| {
        let part = || places.get(first_part(name)?.as_str());
        places.get(name).or_else(part).copied()
    };
    let below: Vec<Option<usize>> = notes.iter().map(|note| place(note.call.base()?)).collect();
    let mut heights = vec![UNKNOWN; notes.len()];
    for start in 0..notes.len() {
        let (mut path, mut at) = (Vec::new(), Some(start));
        while let Some(place) = at.filter(|&place| heights[place] == UNKNOWN) {
            heights[place] = IN_PROGRESS;
            path.push(place);
            at = below[place];
        }
        // Disks that wait for each other in a cycle have no bottom.
        let mut height = at.map_or(0, |place| heights[place]);
        for place in path.into_iter().rev() {
            height = if height == IN_PROGRESS { 1 } else { height + 1 };
            heights[place] = height;
        }
    }
    let mut sorted: Vec<(usize, usize, &Note)> =
        notes.iter().enumerate().map(|(place, note)| (heights[place], place, *note)).collect();
    sorted.sort_by_key(|&(height, place, _)| std::cmp::Reverse((height, place)));
    for (to, (_, _, note)) in notes.iter_mut().zip(sorted) {
        *to = note;
    }
}

/// A note, as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Note {
    subsystem: Subsystem,
    object: String,
    #[serde(flatten)]
    call: Call,
}

impl Note {
    fn new(subsystem: Subsystem, object: &str, method: &'static str, params: &impl Serialize) -> Self {
        let params = serde_json::to_value(params).expect("parameters are valid JSON");
        Self { subsystem, object: object.to_owned(), call: Call { method: method.into(), params } }
    }
}

/// A record of the state store that is not a valid note.
#[derive(Debug, thiserror::Error)]
#[error("cannot parse record {key} of the state store; the store was not changed: {source}")]
pub struct NotANote {
    key: u64,
    source: serde_json::Error,
}

/// Notes, indexed by key and by object.
#[derive(Debug, Default)]
struct Notes {
    notes: BTreeMap<u64, Note>,
    keys: BTreeMap<(Subsystem, String), u64>,
}

impl Notes {
    fn insert(&mut self, key: u64, note: Note) {
        self.keys.insert((note.subsystem, note.object.clone()), key);
        self.notes.insert(key, note);
    }

    fn key(&self, subsystem: Subsystem, object: &str) -> Option<u64> {
        self.keys.get(&(subsystem, object.to_owned())).copied()
    }

    fn find(&self, subsystem: Subsystem, object: &str) -> Option<&Note> {
        self.notes.get(&self.key(subsystem, object)?)
    }

    fn take(&mut self, subsystem: Subsystem, object: &str) -> Option<(u64, Note)> {
        let key = self.keys.remove(&(subsystem, object.to_owned()))?;
        Some((key, self.notes.remove(&key).expect("each key has its note")))
    }

    /// The notes of `subsystem` whose calls `is_selected` accepts.
    fn selected<'a>(
        &'a self,
        subsystem: Subsystem,
        is_selected: impl Fn(&Call) -> bool + 'a,
    ) -> impl Iterator<Item = &'a Note> {
        self.notes.values().filter(move |note| note.subsystem == subsystem && is_selected(&note.call))
    }

    fn objects(&self, subsystem: Subsystem) -> impl Iterator<Item = &str> {
        let from = self.keys.range((subsystem, String::new())..);
        from.take_while(move |((s, _), _)| *s == subsystem).map(|((_, object), _)| object.as_str())
    }
}

/// An object that is configured and does not exist.
#[derive(Debug, Clone)]
pub(crate) struct AbsentObject {
    /// Key of the object's note.
    pub key: u64,
    /// The part of the daemon to which the object belongs.
    pub subsystem: Subsystem,
    /// Name of the object.
    pub name: String,
    /// The call that creates the object.
    pub call: Call,
}

impl AbsentObject {
    fn new(key: u64, note: &Note) -> Self {
        Self { key, subsystem: note.subsystem, name: note.object.clone(), call: note.call.clone() }
    }

    /// A parameter of the object's call, if it is a string.
    pub fn text(&self, param: &str) -> Option<&str> {
        self.call.params.get(param)?.as_str()
    }
}

/// Why an absent object does not exist.
#[derive(Debug, Default)]
struct Absence {
    /// The base disk for which the object waits.
    base: Option<String>,
    /// The last error; empty if there was no attempt yet.
    why: String,
    /// Time of the first failure.
    failed_since: Option<SystemTime>,
}

/// All notes of the daemon.
#[derive(Debug, Default)]
pub struct Config {
    notes: RefCell<Notes>,
    /// Notes whose objects do not exist.
    absent: RefCell<Notes>,
    /// The state of absent objects, by their keys.
    absences: RefCell<BTreeMap<u64, Absence>>,
    /// Names of base disks, and the keys of the objects that wait for them.
    waiting: RefCell<BTreeSet<(String, u64)>>,
    /// The key of the last note.
    last_key: Cell<u64>,
    store: OnceCell<Store>,
}

impl Config {
    /// Stores all notes in `store` from now on. The objects of the store's `records` are absent.
    ///
    /// # Errors
    /// [`NotANote`].
    ///
    /// # Panics
    /// If a store was set before.
    pub fn keep_in(&self, store: Store, records: Vec<Record>) -> Result<(), NotANote> {
        let mut absent = Notes::default();
        for Record { key, content } in records {
            let note = serde_json::from_slice(&content).map_err(|source| NotANote { key, source })?;
            self.last_key.set(key.max(self.last_key.get()));
            absent.insert(key, note);
        }
        self.absent.replace(absent);
        self.store.set(store).expect("set once");
        Ok(())
    }

    /// The calls that create the absent objects, and their keys.
    pub fn absent(&self) -> Vec<(u64, Call)> {
        self.absent_objects().into_iter().map(|object| (object.key, object.call)).collect()
    }

    /// The absent objects, in the order of their first creation.
    pub(crate) fn absent_objects(&self) -> Vec<AbsentObject> {
        self.absent_objects_that(|_| true)
    }

    /// The absent objects whose calls `is_selected` accepts, without saved states.
    pub(crate) fn absent_objects_that(&self, is_selected: impl Fn(&Call) -> bool) -> Vec<AbsentObject> {
        let absent = self.absent.borrow();
        let objects = absent.notes.iter().filter(|(_, note)| !note.subsystem.is_state());
        let selected = objects.filter(|(_, note)| is_selected(&note.call));
        selected.map(|(key, note)| AbsentObject::new(*key, note)).collect()
    }

    /// Makes the objects of `subsystem` absent whose calls `is_selected` accepts: they ended with a disk that may come back.
    pub(crate) fn went(&self, subsystem: Subsystem, is_selected: impl Fn(&Call) -> bool) {
        let (mut notes, mut absent) = (self.notes.borrow_mut(), self.absent.borrow_mut());
        let gone: Vec<String> =
            notes.selected(subsystem, is_selected).map(|note| note.object.clone()).collect();
        for object in gone {
            let (key, note) = notes.take(subsystem, &object).expect("the note was just found");
            absent.insert(key, note);
        }
    }

    /// The calls of existing objects of `subsystem` that `is_selected` accepts.
    pub(crate) fn calls_that(&self, subsystem: Subsystem, is_selected: impl Fn(&Call) -> bool) -> Vec<Call> {
        self.notes.borrow().selected(subsystem, is_selected).map(|note| note.call.clone()).collect()
    }

    /// Makes an object absent that has ended by itself. Its key, if it had a note.
    pub(crate) fn lost(&self, subsystem: Subsystem, object: &str) -> Option<u64> {
        let (key, note) = self.notes.borrow_mut().take(subsystem, object)?;
        self.absent.borrow_mut().insert(key, note);
        Some(key)
    }

    /// Number of notes whose objects do not exist.
    pub fn absent_count(&self) -> usize {
        self.absent.borrow().notes.len()
    }

    /// The position of an existing object among all, in the order of their first creation.
    pub(crate) fn place(&self, subsystem: Subsystem, object: &str) -> Option<u64> {
        self.notes.borrow().key(subsystem, object)
    }

    /// As [`Config::place`], of the first object whose call `is_selected` accepts.
    pub(crate) fn place_that(
        &self,
        subsystem: Subsystem,
        is_selected: impl Fn(&Call) -> bool,
    ) -> Option<u64> {
        let notes = self.notes.borrow();
        let objects = notes.objects(subsystem).filter_map(|object| notes.key(subsystem, object));
        objects.filter(|key| is_selected(&notes.notes[key].call)).min()
    }

    /// Notes a disk that cannot be created before its base disk `base` exists.
    ///
    /// # Errors
    /// A note of that object exists already; the error is the object's name.
    pub fn wait<'a>(
        &self,
        base: &str,
        object: &'a str,
        (method, params): (&'static str, &impl Serialize),
    ) -> Result<(), &'a str> {
        let subsystem = Subsystem::Bdev;
        let is_noted = |notes: &RefCell<Notes>| notes.borrow().key(subsystem, object).is_some();
        if is_noted(&self.notes) || is_noted(&self.absent) {
            return Err(object);
        }
        let note = Note::new(subsystem, object, method, params);
        let key = self.last_key.get() + 1;
        self.last_key.set(key);
        self.write(key, Some(&note));
        self.absent.borrow_mut().insert(key, note);
        let absence = Absence { base: Some(base.to_owned()), ..Absence::default() };
        self.absences.borrow_mut().insert(key, absence);
        self.waiting.borrow_mut().insert((base.to_owned(), key));
        Ok(())
    }

    /// The calls that create the objects which wait for the disk `base`, and their keys.
    pub fn waiting_for(&self, base: &str) -> Vec<(u64, Call)> {
        let (waiting, absent) = (self.waiting.borrow(), self.absent.borrow());
        let keys = waiting.range((base.to_owned(), 0)..=(base.to_owned(), u64::MAX));
        keys.map(|(_, key)| (*key, absent.notes[key].call.clone())).collect()
    }

    /// Whether the absent object with that key waits for its base disk.
    pub fn is_waiting(&self, key: u64) -> bool {
        self.absences.borrow().get(&key).is_some_and(|absence| absence.base.is_some())
    }

    /// The absent object with that key no longer waits for its base disk: it is retried like others that have failed.
    pub(crate) fn stop_waiting(&self, key: u64) {
        let mut absences = self.absences.borrow_mut();
        if let Some(base) = absences.get_mut(&key).and_then(|absence| absence.base.take()) {
            self.waiting.borrow_mut().remove(&(base, key));
        }
    }

    /// Stores the error of an absent object; returns whether it differs from the last one.
    #[expect(clippy::disallowed_methods, reason = "a date for the operator, on which no decision depends")]
    pub fn failed(&self, key: u64, why: &str) -> bool {
        if !self.is_absent(key) {
            return false;
        }
        let mut absences = self.absences.borrow_mut();
        let absence = absences.entry(key).or_default();
        let is_new = absence.why != why;
        why.clone_into(&mut absence.why);
        absence.failed_since.get_or_insert_with(SystemTime::now);
        is_new
    }

    /// Whether an attempt to create the absent object with that key has failed.
    pub fn has_failed(&self, key: u64) -> bool {
        self.absences.borrow().get(&key).is_some_and(|absence| !absence.why.is_empty())
    }

    /// Why the absent object with that key does not exist, as text for the operator.
    pub fn why_absent(&self, key: u64) -> String {
        match self.absences.borrow().get(&key) {
            Some(Absence { why, .. }) if !why.is_empty() => why.clone(),
            Some(Absence { base: Some(base), .. }) => format!("it waits for disk '{base}'"),
            Some(_) | None => "it has not been tried yet".into(),
        }
    }

    /// As [`Config::why_absent`], of the absent object with that name, if there is one.
    pub(crate) fn why_absent_object(&self, subsystem: Subsystem, object: &str) -> Option<String> {
        let key = self.absent.borrow().key(subsystem, object)?;
        Some(self.why_absent(key))
    }

    /// Time since which the daemon retries to create the absent object with that key; `None` if the object waits for its base
    /// disk.
    pub fn tried_since(&self, key: u64) -> Option<SystemTime> {
        self.absences.borrow().get(&key).filter(|absence| absence.base.is_none())?.failed_since
    }

    /// Removes and returns the note of an absent object, and removes its state.
    fn take_absent(&self, subsystem: Subsystem, object: &str) -> Option<(u64, Note)> {
        let (key, note) = self.absent.borrow_mut().take(subsystem, object)?;
        if let Some(Absence { base: Some(base), .. }) = self.absences.borrow_mut().remove(&key) {
            self.waiting.borrow_mut().remove(&(base, key));
        }
        Some((key, note))
    }

    /// Whether the object with that key is absent.
    pub fn is_absent(&self, key: u64) -> bool {
        self.absent.borrow().notes.contains_key(&key)
    }

    /// Kind and name of the absent object with that key, as text for the operator.
    pub fn describe(&self, key: u64) -> String {
        let Some((kind, name)) = self.kind_and_name(key) else { return String::new() };
        let what = match self.absent.borrow().notes.get(&key).map(|note| note.subsystem) {
            Some(Subsystem::Nvme) => "NVMe controller",
            Some(Subsystem::Discovery) => "discovery service",
            Some(Subsystem::Mdns) => "mDNS discovery",
            Some(Subsystem::Rbd) => "Ceph cluster",
            Some(Subsystem::Watch) => "call",
            Some(Subsystem::Qos) => "QoS of",
            Some(Subsystem::Signals) => "signals of",
            Some(Subsystem::Sleep) => "sleep policy of",
            Some(Subsystem::Keyring) => "keyring's",
            Some(Subsystem::Nvmf) => "NVMe-oF",
            Some(Subsystem::Unit) => "SCSI reservations and modes of",
            Some(Subsystem::Reservations) => "reservations of",
            Some(Subsystem::Pools) => "position of the pool",
            _ => kind,
        };
        format!("{what} '{name}'")
    }

    /// Kind of the absent object with that key, and its name.
    pub fn kind_and_name(&self, key: u64) -> Option<(&'static str, String)> {
        self.absent.borrow().notes.get(&key).map(|note| {
            let kind = match note.subsystem {
                Subsystem::Bdev => "disk",
                Subsystem::Nvme => "nvme controller",
                Subsystem::Discovery => "discovery service",
                Subsystem::Mdns => "mdns discovery",
                Subsystem::Rbd => "ceph cluster",
                Subsystem::VhostScsi if note.object.contains('/') => "target",
                Subsystem::VhostBlk | Subsystem::VhostScsi => "controller",
                Subsystem::Nvmf => "share",
                Subsystem::Daemon
                | Subsystem::Keyring
                | Subsystem::Pools
                | Subsystem::Qos
                | Subsystem::Reservations
                | Subsystem::Scheduler
                | Subsystem::Signals
                | Subsystem::Sleep
                | Subsystem::Unit
                | Subsystem::Watch => "setting",
            };
            (kind, note.object.clone())
        })
    }

    /// Whether an absent object has a name that `is_selected` accepts.
    pub fn has_absent(&self, subsystem: Subsystem, is_selected: impl Fn(&str) -> bool) -> bool {
        self.absent.borrow().objects(subsystem).any(is_selected)
    }

    /// The parameters of the call that created `object`.
    pub fn params(&self, subsystem: Subsystem, object: &str) -> Option<Value> {
        self.notes.borrow().find(subsystem, object).map(|note| note.call.params.clone())
    }

    /// The parameters of the call that creates the absent `object`.
    pub fn absent_params(&self, subsystem: Subsystem, object: &str) -> Option<Value> {
        self.absent.borrow().find(subsystem, object).map(|note| note.call.params.clone())
    }

    /// The call that creates `object`, whether the object exists or is absent.
    pub fn noted(&self, subsystem: Subsystem, object: &str) -> Option<Call> {
        let call = |notes: &RefCell<Notes>| notes.borrow().find(subsystem, object).map(|n| n.call.clone());
        call(&self.notes).or_else(|| call(&self.absent))
    }

    /// Whether a parameter of the call that created `object` has this value.
    pub fn has_param(&self, subsystem: Subsystem, object: &str, param: &str, value: &Value) -> bool {
        let notes = self.notes.borrow();
        notes.find(subsystem, object).is_some_and(|note| note.call.params.get(param) == Some(value))
    }

    /// Removes the note of the absent object with that name; returns whether there was one.
    pub fn forget_absent(&self, subsystem: Subsystem, object: &str) -> bool {
        let taken = self.take_absent(subsystem, object);
        if let Some((key, _)) = &taken {
            self.write(*key, None);
        }
        taken.is_some()
    }

    /// Removes the notes of absent objects of `subsystem` whose names `is_selected` accepts.
    pub fn forget_all_absent(&self, subsystem: Subsystem, is_selected: impl Fn(&str) -> bool) {
        let absent = self.absent.borrow();
        let meant: Vec<String> =
            absent.objects(subsystem).filter(|o| is_selected(o)).map(str::to_owned).collect();
        drop(absent);
        for object in meant {
            self.forget_absent(subsystem, &object);
        }
    }

    /// Stores the call that created `object`. The note replaces that of an earlier object with the same name.
    pub fn made(&self, subsystem: Subsystem, object: &str, method: &'static str, params: &impl Serialize) {
        use Subsystem::{Discovery, Mdns, Nvme, Nvmf, Rbd, VhostBlk, VhostScsi};
        let is_controller = matches!(subsystem, Discovery | Mdns | Nvme | Nvmf | Rbd | VhostBlk | VhostScsi);
        if is_controller {
            journal::made(subsystem, object);
        }
        let note = Note::new(subsystem, object, method, params);
        let mut notes = self.notes.borrow_mut();
        let before = self.take_absent(subsystem, object).or_else(|| notes.take(subsystem, object));
        let key = before.as_ref().map_or_else(|| self.last_key.get() + 1, |(key, _)| *key);
        self.last_key.set(key.max(self.last_key.get()));
        if before.is_none() && journal::is_restore() && (is_controller || subsystem == Subsystem::Bdev) {
            // A client has removed the absent object in between: the new one is removed too, and does not get into the store.
            journal::revived(subsystem, object, key);
        } else if before.is_none_or(|(_, before)| before != note) {
            self.write(key, Some(&note));
        }
        notes.insert(key, note);
    }

    /// Changes a parameter of the call that created `object`.
    pub fn changed(&self, subsystem: Subsystem, object: &str, param: &str, value: impl Into<Value>) {
        let mut notes = self.notes.borrow_mut();
        let Some(key) = notes.key(subsystem, object) else { return };
        let note = notes.notes.get_mut(&key).expect("each key has its note");
        match value.into() {
            Value::Null => drop(note.call.params.as_object_mut().and_then(|all| all.remove(param))),
            value => note.call.params[param] = value,
        }
        self.write(key, Some(note));
    }

    /// As [`Config::changed`], for several parameters. The result resolves when the changes survive a power failure; `None` if
    /// there is no note or no store.
    pub(crate) fn changed_durably<const N: usize>(
        &self,
        subsystem: Subsystem,
        object: &str,
        params: [(&str, Value); N],
    ) -> Option<Written> {
        let mut notes = self.notes.borrow_mut();
        let key = notes.key(subsystem, object)?;
        let note = notes.notes.get_mut(&key).expect("each key has its note");
        for (param, value) in params {
            match value {
                Value::Null => drop(note.call.params.as_object_mut().and_then(|all| all.remove(param))),
                value => note.call.params[param] = value,
            }
        }
        let content = serde_json::to_vec(note).expect("a note is valid JSON");
        Some(self.store.get()?.write_durably(key, Some(content)))
    }

    /// Changes a parameter of the call that creates the absent `object`. The result is ready when the change is stored; `None` if
    /// there is no such object, or no store.
    pub fn change_absent(
        &self,
        subsystem: Subsystem,
        object: &str,
        param: &str,
        value: impl Into<Value>,
    ) -> Option<Written> {
        let (mut absent, store) = (self.absent.borrow_mut(), self.store.get()?);
        let key = absent.key(subsystem, object)?;
        let note = absent.notes.get_mut(&key).expect("each key has its note");
        note.call.params[param] = value.into();
        let content = serde_json::to_vec(note).expect("a note is valid JSON");
        Some(store.write_durably(key, Some(content)))
    }

    /// Removes the note of `object`.
    pub fn removed(&self, subsystem: Subsystem, object: &str) {
        if let Some((key, _)) = self.notes.borrow_mut().take(subsystem, object) {
            self.write(key, None);
        }
    }

    /// Removes the note of `object`, whether the object exists or is absent; returns whether there was one.
    pub fn forget(&self, subsystem: Subsystem, object: &str) -> bool {
        let is_there = self.notes.borrow().key(subsystem, object).is_some();
        self.removed(subsystem, object);
        self.forget_absent(subsystem, object) || is_there
    }

    /// Removes the notes of all objects of `subsystem` for which `exists` returns false. Visits all notes: [`Config::removed`] is
    /// for the case that the removed object is known.
    pub fn retain(&self, subsystem: Subsystem, exists: impl Fn(&str) -> bool) {
        let notes = self.notes.borrow();
        let gone: Vec<String> = notes.objects(subsystem).filter(|o| !exists(o)).map(str::to_owned).collect();
        drop(notes);
        gone.iter().for_each(|object| self.removed(subsystem, object));
    }

    /// Removes the notes of all objects of `subsystem`, existing or absent, whose calls `is_selected` accepts; returns whether
    /// there was one.
    pub(crate) fn forget_that(&self, subsystem: Subsystem, is_selected: impl Fn(&Call) -> bool) -> bool {
        let selected = |notes: &RefCell<Notes>| -> Vec<String> {
            notes.borrow().selected(subsystem, &is_selected).map(|note| note.object.clone()).collect()
        };
        let objects: Vec<String> = [&self.notes, &self.absent].into_iter().flat_map(selected).collect();
        for object in &objects {
            self.forget(subsystem, object);
        }
        !objects.is_empty()
    }

    /// Removes the notes of existing objects of `subsystem` whose calls `exists` does not accept.
    pub(crate) fn retain_that(&self, subsystem: Subsystem, exists: impl Fn(&Call) -> bool) {
        let notes = self.notes.borrow();
        let gone = notes.selected(subsystem, |call| !exists(call));
        let gone: Vec<String> = gone.map(|note| note.object.clone()).collect();
        drop(notes);
        gone.iter().for_each(|object| self.removed(subsystem, object));
    }

    /// The calls that create all objects of `subsystem`, existing or absent; after the disks, their monitoring settings and
    /// limits.
    ///
    /// The serial number of an NVMe drive and the identifier of a host are left out: SPDK does not know these parameters. So are
    /// addresses and keys of Ceph's clients, controllers that a discovery service has named, and discovery services that were
    /// found.
    ///
    /// As in SPDK's output, a disk comes before its base: SPDK's clients delete the objects in this order.
    pub fn calls(&self, subsystem: Subsystem) -> Vec<Call> {
        let (notes, absent) = (self.notes.borrow(), self.absent.borrow());
        let all: BTreeMap<u64, &Note> =
            notes.notes.iter().chain(&absent.notes).map(|(key, note)| (*key, note)).collect();
        let is_of_it = |note: &Note| {
            note.subsystem == subsystem
                || subsystem == Subsystem::Bdev
                    && match note.subsystem {
                        Subsystem::Nvme => note.call.params.get("discovery").is_none(),
                        Subsystem::Discovery => note.call.params.get("mdns").is_none(),
                        Subsystem::Mdns => true,
                        _ => false,
                    }
        };
        let of_it = all.values().copied().filter(|note| is_of_it(note));
        let (mut above, others): (Vec<&Note>, Vec<&Note>) = of_it.partition(|n| n.call.base().is_some());
        dependents_first(&mut above);
        // Options come before the controllers for which they hold.
        let is_option = |note: &&Note| subsystem == Subsystem::Bdev && is_saved(&note.call.method);
        let options = all.values().copied().filter(is_option);
        let is_client = |note: &&Note| (subsystem, note.subsystem) == (Subsystem::Bdev, Subsystem::Rbd);
        let clients = all.values().copied().filter(is_client);
        let mut calls: Vec<Call> =
            options.chain(clients).chain(above).chain(others).map(|note| note.call.clone()).collect();
        let of = |s: Subsystem| all.values().filter(move |n| n.subsystem == s).map(|n| n.call.clone());
        match subsystem {
            Subsystem::Bdev => calls.extend(of(Subsystem::Watch).chain(of(Subsystem::Qos))),
            Subsystem::VhostScsi => calls.extend(of(Subsystem::Signals).chain(of(Subsystem::Sleep))),
            _ => {}
        }
        for call in calls.iter_mut().filter(|call| [ATTACH, START_DISCOVERY].contains(&&*call.method)) {
            for unknown in ["serial", "hostid", "numbers"] {
                call.params.as_object_mut().and_then(|params| params.remove(unknown));
            }
        }
        calls.into_iter().map(for_output).collect()
    }

    /// The directory of the store.
    pub(crate) fn state_dir(&self) -> Option<&Path> {
        self.store.get().map(Store::dir)
    }

    /// Whether there is a store.
    pub fn has_store(&self) -> bool {
        self.store.get().is_some()
    }

    /// The saved state of an object, of a subsystem that has states only.
    pub fn state(&self, subsystem: Subsystem, object: &str) -> Option<Value> {
        let find = |notes: &RefCell<Notes>| {
            notes.borrow().find(subsystem, object).map(|note| note.call.params.clone())
        };
        find(&self.notes).or_else(|| find(&self.absent))
    }

    /// Saves the state of an object, or removes it; `durable`: it must outlive a loss of power. `None` if there is nothing to
    /// write.
    pub fn save_state(
        &self,
        subsystem: Subsystem,
        object: &str,
        params: Option<Value>,
        durable: bool,
    ) -> Option<Written> {
        let store = self.store.get()?;
        let before = self.absent.borrow_mut().take(subsystem, object);
        let before = before.or_else(|| self.notes.borrow_mut().take(subsystem, object)).map(|(key, _)| key);
        let key = match (before, &params) {
            (Some(key), _) => key,
            (None, Some(_)) => self.last_key.get() + 1,
            (None, None) => return None,
        };
        self.last_key.set(key.max(self.last_key.get()));
        let content = params.map(|params| {
            let call = Call { method: "".into(), params };
            let note = Note { subsystem, object: object.to_owned(), call };
            let content = serde_json::to_vec(&note).expect("a note is valid JSON");
            self.notes.borrow_mut().insert(key, note);
            content
        });
        Some(if durable { store.write_durably(key, content) } else { store.write(key, content) })
    }

    /// Removes the saved states of objects for which `exists` returns false.
    pub fn retain_states(&self, subsystem: Subsystem, exists: impl Fn(&str) -> bool) {
        let gone = |notes: &RefCell<Notes>| -> Vec<String> {
            notes.borrow().objects(subsystem).filter(|object| !exists(object)).map(str::to_owned).collect()
        };
        for object in [&self.notes, &self.absent].into_iter().flat_map(gone) {
            self.forget(subsystem, &object);
        }
    }

    /// Sends a note, or its removal, to the store.
    fn write(&self, key: u64, note: Option<&Note>) {
        if let Some(store) = self.store.get() {
            let content = note.map(|note| serde_json::to_vec(note).expect("a note is valid JSON"));
            journal::wrote(store.write(key, content));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The configuration that the store in a directory has.
    fn stored_in(dir: &Path) -> Config {
        let config = Config::default();
        let (store, records) = Store::open(dir).unwrap();
        config.keep_in(store, records).unwrap();
        config
    }

    #[test]
    fn notes_follow_their_objects() {
        let config = Config::default();
        config.made(Subsystem::Bdev, "a", "bdev_null_create", &json!({"name": "a", "num_blocks": 1}));
        config.made(Subsystem::Bdev, "b", "bdev_null_create", &json!({"name": "b"}));
        config.made(Subsystem::VhostBlk, "a", "vhost_create_blk_controller", &json!({"ctrlr": "a"}));
        config.changed(Subsystem::Bdev, "a", "num_blocks", 2);
        config.removed(Subsystem::Bdev, "b");
        let bdevs = config.calls(Subsystem::Bdev);
        assert_eq!(bdevs.len(), 1);
        assert_eq!(bdevs[0].params, json!({"name": "a", "num_blocks": 2}));
        config.removed(Subsystem::Bdev, "a");
        assert_eq!(config.calls(Subsystem::VhostBlk).len(), 1);
    }

    #[test]
    fn absent_objects_keep_their_place() {
        let dir = tempfile::TempDir::new().unwrap();
        let open = || stored_in(dir.path());
        let config = open();
        for name in ["a", "b", "c"] {
            config.made(Subsystem::Bdev, name, "bdev_null_create", &json!({"name": name}));
        }
        config.made(Subsystem::Daemon, "log_level", "log_set_print_level", &json!({"level": "INFO"}));
        config.changed(Subsystem::Bdev, "b", "num_blocks", 7);
        drop(config);
        let config = open();
        assert_eq!(config.absent().len(), 4);
        assert_eq!(config.describe(2), "disk 'b'");
        config.made(Subsystem::Bdev, "c", "bdev_null_create", &json!({"name": "c"}));
        config.made(Subsystem::Bdev, "a", "bdev_null_create", &json!({"name": "a"}));
        config.made(Subsystem::Bdev, "d", "bdev_null_create", &json!({"name": "d"}));
        assert!(config.forget_absent(Subsystem::Daemon, "log_level"));
        assert!(!config.forget_absent(Subsystem::Bdev, "a"));
        drop(config);
        let names: Vec<_> = open().absent().into_iter().map(|(key, call)| (key, call.params)).collect();
        let b = json!({"name": "b", "num_blocks": 7});
        assert_eq!(
            names,
            [(1, json!({"name": "a"})), (2, b), (3, json!({"name": "c"})), (5, json!({"name": "d"}))]
        );
    }

    #[test]
    fn settings_are_one_kind_with_distinct_descriptions() {
        let dir = tempfile::TempDir::new().unwrap();
        let open = || stored_in(dir.path());
        let config = open();
        let expected = [
            (Subsystem::Qos, "QoS of 'x'"),
            (Subsystem::Signals, "signals of 'x'"),
            (Subsystem::Sleep, "sleep policy of 'x'"),
            (Subsystem::Watch, "call 'x'"),
            (Subsystem::Daemon, "setting 'x'"),
        ];
        for (subsystem, _) in expected {
            config.made(subsystem, "x", "bdev_set_qos_limit", &json!({}));
        }
        drop(config);
        let config = open();
        for ((key, _), (_, words)) in config.absent().into_iter().zip(expected) {
            assert_eq!(config.kind_and_name(key), Some(("setting", "x".into())));
            assert_eq!(config.describe(key), words);
        }
        assert_eq!(config.absent().len(), expected.len());
    }
}
