//! The difference between the present and the wanted state, as steps in an order that works.
//!
//! The next run recognizes the state after each step: after an interruption, run the same command again.

use super::call::{Call, Kind, START, number_targets};
use super::limits::Setting;
use crate::size::Size;
use serde::Serialize;
use std::collections::BTreeSet;

/// A present disk, controller or target.
#[derive(Debug, Clone)]
pub struct Existing {
    pub kind: Kind,
    pub name: String,
    /// The call that created it.
    pub call: Call,
    /// The disk's size in bytes.
    pub bytes: Option<u64>,
    /// A controller whose disk is gone, or a disk that waits for its base: recreated without `--replace`.
    pub is_orphan: bool,
}

/// The action of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Create,
    Remove,
    /// An absent object is removed from the configuration.
    Forget,
    Grow,
    /// A setting is made. Settings have no name.
    Set,
}

/// A step of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    pub action: Action,
    pub kind: Kind,
    pub name: String,
    /// The reason, or the details.
    pub why: String,
    /// The call to make.
    #[serde(skip)]
    pub call: Call,
}

/// All steps to do.
#[derive(Debug, Default)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Reasons why the plan needs `--replace`.
    pub replaces: Vec<String>,
    /// Reasons why the plan cannot be done at all.
    pub conflicts: Vec<String>,
}

/// Identifies an object.
type Key = (Kind, String);

fn key(call: &Call) -> Option<Key> {
    Some((call.kind(), call.name()?))
}

/// The step that removes the object of `made`.
fn removal(made: &Call, why: &str) -> Option<Step> {
    let (kind, name) = key(made)?;
    let (method, params) = made.undo()?;
    let call = Call::new(method, params);
    Some(Step { action: Action::Remove, kind, name, why: why.to_owned(), call })
}

/// The steps that turn `existing`, all present objects, and `settings`, all present settings, into `wanted`.
pub fn plan(wanted: &[Call], existing: &[Existing], settings: &[Call], prune: bool) -> Plan {
    let mut plan = Plan::default();
    let mut wanted = wanted.to_vec();
    number_targets(&mut wanted, existing.iter().map(|e| &e.call));
    let wanted = plan.in_order(&wanted);
    let removed = plan.removed(&wanted, existing, prune);
    let is_removed = |e: &&Existing| removed.contains(&(e.kind, e.name.clone()));
    // Targets and controllers first, then disks on top before their bases: the newest object first.
    let mut removals: Vec<&Existing> = existing.iter().filter(is_removed).rev().collect();
    removals.sort_by_key(|e| std::cmp::Reverse(e.kind));
    for old in removals {
        let is_wanted = wanted.iter().any(|call| key(call) == Some((old.kind, old.name.clone())));
        let why = match is_wanted {
            true => "to be recreated",
            false if old.call.keeps_data() => "not in the file",
            false => "not in the file; its data is lost",
        };
        plan.remove(old, why);
    }
    for call in wanted.clone() {
        let old = key(&call).and_then(|k| existing.iter().find(|e| e.kind == k.0 && e.name == k.1));
        match (old, key(&call)) {
            (None, None) if call.method == START => plan.start(call, &wanted, existing, &removed),
            (None, None) => plan.set(call, settings, &removed),
            (Some(old), Some(k)) if !removed.contains(&k) => plan.keep(&call, old),
            (old, Some((kind, name))) => {
                let why = call.summary();
                let call = old.map_or_else(|| call.clone(), |old| call.in_place_of(&old.call));
                plan.steps.push(Step { action: Action::Create, kind, name, why, call });
            }
            (Some(_), None) => unreachable!("found by its key"),
        }
    }
    plan.unset(&wanted, settings, &removed, prune);
    plan
}

impl Plan {
    /// Sorts each call after the calls that it needs, otherwise in the file's order.
    fn in_order(&mut self, wanted: &[Call]) -> Vec<Call> {
        let mut waiting: Vec<Call> = Vec::new();
        let mut names = BTreeSet::new();
        for call in wanted {
            if call.kind() != Kind::Setting && call.name().is_none() {
                self.conflicts.push(format!("a {} of the file has no name", call.kind().name()));
            } else if key(call).is_some_and(|k| !names.insert(k)) {
                let name = call.name().unwrap_or_default();
                self.conflicts.push(format!("{} '{name}' is in the file twice", call.kind().name()));
            } else {
                waiting.push(call.clone());
            }
        }
        let mut ordered: Vec<Call> = Vec::new();
        while !waiting.is_empty() {
            let is_waited_for = |call: &Call| waiting.iter().any(|other| call.needs(other));
            let Some(next) = waiting.iter().position(|call| !is_waited_for(call)) else {
                let names: Vec<_> = waiting.iter().filter_map(Call::name).collect();
                self.conflicts.push(format!("these disks are built on each other: {}", names.join(", ")));
                return ordered;
            };
            ordered.push(waiting.remove(next));
        }
        ordered
    }

    /// The objects to remove: pruned ones, recreated ones, and all objects on top of those.
    fn removed(&mut self, wanted: &[Call], existing: &[Existing], prune: bool) -> BTreeSet<Key> {
        let mut removed = BTreeSet::new();
        for old in existing {
            let old_key = (old.kind, old.name.clone());
            let call = wanted.iter().find(|call| key(call).as_ref() == Some(&old_key));
            let base = existing.iter().find(|e| e.kind == Kind::Disk && e.call.is_called(old.call.base()));
            let owner =
                existing.iter().find(|e| e.kind == Kind::Controller && old.call.owner() == Some(&e.name));
            let goes = |below: &&Existing| removed.contains(&(below.kind, below.name.clone()));
            let base_goes = base.filter(goes).or(owner.filter(goes));
            let what = format!("{} '{}'", old.kind.name(), old.name);
            match call {
                None if prune => _ = removed.insert(old_key),
                None => {
                    if let Some(base) = base_goes {
                        let (kind, base) = (base.kind.name(), &base.name);
                        self.conflicts.push(format!("{what} is on {kind} '{base}', which is to be recreated, but is not in the file: add it to the file too"));
                    }
                }
                Some(call) => {
                    let mut differences = call.differences(&old.call);
                    if let Some(base) = base_goes {
                        differences.push(format!(
                            "{} '{}' below it is recreated",
                            base.kind.name(),
                            base.name
                        ));
                    }
                    if differences.is_empty() && !old.is_orphan {
                        continue;
                    }
                    if !old.is_orphan {
                        let loss = if old.call.keeps_data() { "" } else { "; its data is lost" };
                        self.replaces.push(format!("{what}: {}{loss}", differences.join(", ")));
                    }
                    removed.insert(old_key);
                }
            }
        }
        removed
    }

    fn remove(&mut self, old: &Existing, why: &str) {
        self.steps.extend(removal(&old.call, why));
    }

    /// Makes the daemon forget, before all other steps, absent objects that are not in the file.
    pub fn prune_absent(&mut self, absent: &[Call], wanted: &[Call]) {
        let is_wanted = |call: &Call| wanted.iter().any(|w| key(w) == key(call));
        let mut forgotten: Vec<&Call> = absent.iter().filter(|call| !is_wanted(call)).collect();
        forgotten.sort_by_key(|call| std::cmp::Reverse(call.kind()));
        let steps = forgotten.into_iter().filter_map(|call| removal(call, "absent, and not in the file"));
        self.steps.splice(..0, steps.map(|step| Step { action: Action::Forget, ..step }));
    }

    /// Changes a present object in place where it differs.
    fn keep(&mut self, call: &Call, old: &Existing) {
        if old.call.is_delayed() && !call.is_delayed() {
            self.push_setting(Call::new(START, serde_json::json!({"ctrlr": old.name})));
        }
        self.grow(call, old);
    }

    /// Grows a disk if the file's size is larger.
    fn grow(&mut self, call: &Call, old: &Existing) {
        let (Some(is), Some(to)) = (old.bytes, call.size()) else { return };
        if !call.can_grow() || is == to {
            return;
        }
        let name = old.name.clone();
        if to < is {
            let (is, to) = (Size(is), Size(to));
            self.conflicts.push(format!("disk '{name}' has {is}, and would lose data at {to}"));
            return;
        }
        let why = format!("from {} to {}", Size(is), Size(to));
        let resize = Call::new("bdev_uring_resize", serde_json::json!({"name": name, "size": to}));
        self.steps.push(Step { action: Action::Grow, kind: Kind::Disk, name, why, call: resize });
    }

    fn set(&mut self, call: Call, settings: &[Call], removed: &BTreeSet<Key>) {
        // A recreated object has none of the old one's settings.
        let is_lost =
            call.set_object().is_some_and(|(kind, name)| removed.contains(&(kind, name.to_owned())));
        if !is_lost && call.is_set(settings) {
            return;
        }
        if let Some((Setting::Group, name)) = call.setting()
            && settings.iter().any(|setting| setting.setting() == call.setting())
        {
            self.conflicts.push(format!("group '{name}' has another parent than in the file"));
            return;
        }
        self.push_setting(call);
    }

    /// Starts a controller whose start is delayed. A controller that was started before stays started.
    fn start(&mut self, call: Call, wanted: &[Call], existing: &[Existing], removed: &BTreeSet<Key>) {
        let Some(owner) = call.owner() else { return self.push_setting(call) };
        let is_it = |call: &Call| call.kind() == Kind::Controller && call.name().as_deref() == Some(owner);
        let is_kept = |e: &&Existing| is_it(&e.call) && !removed.contains(&(e.kind, e.name.clone()));
        let there = existing.iter().find(is_kept).map(|e| &e.call);
        let controller = there.or_else(|| wanted.iter().find(|call| is_it(call)));
        if controller.is_none_or(Call::is_delayed) {
            self.push_setting(call);
        }
    }

    fn push_setting(&mut self, call: Call) {
        let name = call.method.clone();
        let why = call.summary();
        self.steps.push(Step { action: Action::Set, kind: Kind::Setting, name, why, call });
    }

    /// Removes settings that the file lacks, of disks, controllers and groups that it has; with `prune` also groups.
    fn unset(&mut self, wanted: &[Call], settings: &[Call], removed: &BTreeSet<Key>, prune: bool) {
        let has = |setting: Setting, name: &str| wanted.iter().any(|w| w.setting() == Some((setting, name)));
        let is_wanted =
            |kind: Kind, name: &str| wanted.iter().any(|w| w.kind() == kind && w.is_called(Some(name)));
        // A disk leaves a group before the group is deleted, and inner groups are deleted before outer ones.
        let mut latest_first: Vec<&Call> = settings.iter().rev().collect();
        latest_first.sort_by_key(|call| matches!(call.setting(), Some((Setting::Group, _))));
        for call in latest_first {
            let Some((setting, name)) = call.setting() else { continue };
            let is_kept = match setting {
                Setting::Group => !prune || has(setting, name),
                Setting::GroupLimits => has(setting, name) || !has(Setting::Group, name),
                Setting::Limits | Setting::Membership | Setting::SleepPolicy => {
                    let is_of_kept = |(kind, name): (Kind, &str)| {
                        is_wanted(kind, name) && !removed.contains(&(kind, name.to_owned()))
                    };
                    has(setting, name) || !call.set_object().is_some_and(is_of_kept)
                }
            };
            if let (false, Some(call)) = (is_kept, call.unset()) {
                self.push_setting(call);
            }
        }
    }
}
