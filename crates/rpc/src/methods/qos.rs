//! `bdev_set_qos_limit`, `bdev_qos_group*`: how much disks and groups of disks may do. Control context.
//!
//! A disk's limits, a group, its limits and a disk's place in a group have a note each, among those of the disks.

use super::{Control, Count, Error, NAME_LEN_MAX, Phase, Table};
use crate::config::Subsystem;
use crate::error::INVALID_PARAMS;
use aryk_bdev::{Bdev, QosGroup, RateLimits};
use aryk_reactor::{Clock, Nanos};
use schemars::JsonSchema;
use serde::ser::Error as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        SET_LIMIT,
        Phase::RunTime,
        "Limits what a disk does in a second. What is not given stays as it is; 0 is no limit.",
        set_limit,
    );
    table.add(
        CREATE,
        Phase::RunTime,
        "Makes a group of disks, which are to be limited together.",
        create_group,
    );
    table.add(
        SET_GROUP_LIMIT,
        Phase::RunTime,
        "Limits what all disks of a group, and of the groups in it, do in a second together. What is not given stays as it is; 0 is no limit.",
        set_group_limit,
    );
    table.add(ADD, Phase::RunTime, "Puts a disk into a group, from whichever it is in.", add_bdev);
    table.add("bdev_qos_group_remove_bdev", Phase::RunTime, "Takes a disk out of a group.", remove_bdev);
    table.add(
        "bdev_qos_group_delete",
        Phase::RunTime,
        "Deletes a group in which there is nothing.",
        delete_group,
    );
    table.add("bdev_qos_groups_get", Phase::RunTime, "The groups, or one of them.", get_groups);
}

pub(crate) const SET_LIMIT: &str = "bdev_set_qos_limit";
pub(crate) const CREATE: &str = "bdev_qos_group_create";
pub(crate) const SET_GROUP_LIMIT: &str = "bdev_qos_group_set_limit";
pub(crate) const ADD: &str = "bdev_qos_group_add_bdev";

/// A part of a note's name. The rest is the disk's or the group's.
const LIMITS: &str = "limits/";
const PLACE: &str = "place/";
const GROUP: &str = "group/";
const GROUP_LIMITS: &str = "group-limits/";

const MBYTE: u64 = 1 << 20;

/// Parameters of `bdev_set_qos_limit` and `bdev_qos_group_set_limit`: what is given changes.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetLimit {
    /// The disk: its name, alias or uuid. Or the group.
    name: String,
    /// Requests a second.
    rw_ios_per_sec: Option<Count>,
    /// Ours: reads a second.
    r_ios_per_sec: Option<Count>,
    /// Ours: writes, and all else that is no read, a second.
    w_ios_per_sec: Option<Count>,
    /// Mebibytes a second.
    rw_mbytes_per_sec: Option<Count>,
    /// Mebibytes read a second.
    r_mbytes_per_sec: Option<Count>,
    /// Mebibytes written a second.
    w_mbytes_per_sec: Option<Count>,
    /// Ours: how many seconds' worth can be saved up while less is done.
    burst_seconds: Option<Count>,
    /// Ours: a limit of requests and one of mebibytes are one, which requests of 4 KiB and of 4 MiB meet exactly, and others between.
    combined: Option<bool>,
}

/// What a disk or a group may do in a second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "RateLimits")]
pub(super) struct Limits {
    rw_ios_per_sec: u64,
    rw_mbytes_per_sec: u64,
    r_mbytes_per_sec: u64,
    w_mbytes_per_sec: u64,
    /// Ours, as all that follow.
    r_ios_per_sec: u64,
    w_ios_per_sec: u64,
    burst_seconds: u64,
    combined: bool,
}

impl From<RateLimits> for Limits {
    fn from(limits: RateLimits) -> Self {
        Self {
            rw_ios_per_sec: limits.ios,
            rw_mbytes_per_sec: limits.bytes / MBYTE,
            r_mbytes_per_sec: limits.read_bytes / MBYTE,
            w_mbytes_per_sec: limits.write_bytes / MBYTE,
            r_ios_per_sec: limits.read_ios,
            w_ios_per_sec: limits.write_ios,
            burst_seconds: limits.burst.as_secs(),
            combined: limits.combined,
        }
    }
}

impl SetLimit {
    /// `limits` with what is to change.
    fn apply(&self, mut limits: RateLimits) -> Result<RateLimits, Error> {
        let counts = [
            (self.rw_ios_per_sec, &mut limits.ios, 1),
            (self.r_ios_per_sec, &mut limits.read_ios, 1),
            (self.w_ios_per_sec, &mut limits.write_ios, 1),
            (self.rw_mbytes_per_sec, &mut limits.bytes, MBYTE),
            (self.r_mbytes_per_sec, &mut limits.read_bytes, MBYTE),
            (self.w_mbytes_per_sec, &mut limits.write_bytes, MBYTE),
        ];
        let mut is_empty = self.burst_seconds.is_none() && self.combined.is_none();
        for (given, limit, unit) in counts {
            if let Some(Count(count)) = given {
                *limit = count
                    .checked_mul(unit)
                    .ok_or_else(|| Error::invalid(format!("{count} mebibytes a second are too many")))?;
                is_empty = false;
            }
        }
        if is_empty {
            return Err(Error::invalid("no limit is given"));
        }
        if let Some(Count(seconds)) = self.burst_seconds {
            limits.burst = Duration::from_secs(seconds);
        }
        limits.combined = self.combined.unwrap_or(limits.combined);
        Ok(limits)
    }
}

/// A note of limits, as the call that sets them all: those that there are.
#[derive(Debug, Serialize)]
struct LimitsNote<'a> {
    name: &'a str,
    #[serde(flatten, serialize_with = "those_that_there_are")]
    limits: Limits,
}

fn those_that_there_are<S: Serializer>(limits: &Limits, to: S) -> Result<S::Ok, S::Error> {
    let all = |limits: Limits| serde_json::to_value(limits).map_err(S::Error::custom);
    let (unlimited, mut limits) = (all(RateLimits::default().into())?, all(limits.clone())?);
    if let Value::Object(limits) = &mut limits {
        limits.retain(|name, value| *value != unlimited[name.as_str()]);
    }
    limits.serialize(to)
}

/// Notes the limits of a disk or group, or that it has none.
fn note(control: &Control, object: &str, method: &'static str, name: &str, limits: RateLimits) {
    if limits.is_unlimited() {
        control.config.removed(Subsystem::Qos, object);
    } else {
        control.config.made(Subsystem::Qos, object, method, &LimitsNote { name, limits: limits.into() });
    }
}

fn now() -> Nanos {
    Clock::Monotonic.now()
}

async fn set_limit(control: &Control, p: SetLimit) -> Result<bool, Error> {
    let bdev = control.disks.find(&p.name)?;
    let limits = p.apply(bdev.qos_limits())?;
    let set = bdev.set_qos_limits(limits, now()).await;
    set.map_err(|e| Error::from(e).coded(INVALID_PARAMS))?;
    // Of several calls at one time, the last has set them.
    note(control, &object(LIMITS, bdev.name()), SET_LIMIT, bdev.name(), bdev.qos_limits());
    Ok(true)
}

async fn set_group_limit(control: &Control, p: SetLimit) -> Result<bool, Error> {
    let group = control.disks.groups.find(&p.name)?;
    let limits = p.apply(group.limits())?;
    control.disks.groups.set_limits(&control.disks.registry, &p.name, limits, now()).await?;
    note(control, &object(GROUP_LIMITS, &p.name), SET_GROUP_LIMIT, &p.name, group.limits());
    Ok(true)
}

/// Parameters of `bdev_qos_group_create`, a method of ours.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateGroup {
    /// Its name.
    name: String,
    /// The group that it is in; by default none.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
}

async fn create_group(control: &Control, p: CreateGroup) -> Result<bool, Error> {
    if p.name.is_empty() || p.name.len() > NAME_LEN_MAX {
        return Err(Error::invalid(format!("a group's name has 1 to {NAME_LEN_MAX} bytes")));
    }
    control.disks.groups.create(&p.name, p.parent.as_deref())?;
    control.config.made(Subsystem::Qos, &object(GROUP, &p.name), CREATE, &p);
    Ok(true)
}

/// Parameters of `bdev_qos_group_add_bdev` and `bdev_qos_group_remove_bdev`, methods of ours.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "QosGroupBdev")]
struct Member {
    /// The group.
    name: String,
    /// The disk: its name, alias or uuid.
    bdev_name: String,
}

async fn add_bdev(control: &Control, p: Member) -> Result<bool, Error> {
    let disks = &control.disks;
    let bdev = disks.groups.add(&disks.registry, &p.name, &p.bdev_name).await?;
    note_place(control, &bdev);
    Ok(true)
}

async fn remove_bdev(control: &Control, p: Member) -> Result<bool, Error> {
    let disks = &control.disks;
    let bdev = disks.groups.remove(&disks.registry, &p.name, &p.bdev_name).await?;
    note_place(control, &bdev);
    Ok(true)
}

/// Notes which group a disk is in.
fn note_place(control: &Control, bdev: &Bdev) {
    let object = object(PLACE, bdev.name());
    match bdev.qos_group() {
        Some(group) => {
            let member = Member { name: group.name().to_owned(), bdev_name: bdev.name().to_owned() };
            control.config.made(Subsystem::Qos, &object, ADD, &member);
        }
        None => control.config.removed(Subsystem::Qos, &object),
    }
}

/// Parameters of `bdev_qos_group_delete`, a method of ours.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteGroup {
    /// The group.
    name: String,
}

async fn delete_group(control: &Control, p: DeleteGroup) -> Result<bool, Error> {
    control.disks.groups.delete(&control.disks.registry, &p.name)?;
    for kind in [GROUP, GROUP_LIMITS] {
        control.config.removed(Subsystem::Qos, &object(kind, &p.name));
    }
    Ok(true)
}

/// Parameters of `bdev_qos_groups_get`, a method of ours.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetGroups {
    /// The only one that is wanted.
    name: Option<String>,
}

/// One of the results of `bdev_qos_groups_get`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "QosGroup")]
struct GroupInfo {
    name: String,
    /// The group that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    /// Of all that is in it, together.
    assigned_rate_limits: Limits,
    /// The disks in it, but for those of groups in it.
    bdevs: Vec<String>,
}

async fn get_groups(control: &Control, p: GetGroups) -> Result<Vec<GroupInfo>, Error> {
    let groups = match &p.name {
        Some(name) => vec![control.disks.groups.find(name)?],
        None => control.disks.groups.list(),
    };
    let info = |group: &Arc<QosGroup>| GroupInfo {
        name: group.name().to_owned(),
        parent: group.parent().map(|parent| parent.name().to_owned()),
        assigned_rate_limits: group.limits().into(),
        bdevs: Vec::new(),
    };
    let mut infos: Vec<GroupInfo> = groups.iter().map(info).collect();
    for bdev in control.disks.registry.list() {
        let Some(group) = bdev.qos_group() else { continue };
        if let Some(info) = infos.iter_mut().find(|info| info.name == group.name()) {
            info.bdevs.push(bdev.name().to_owned());
        }
    }
    Ok(infos)
}

/// The name of a group's note.
pub(crate) fn group_object(name: &str) -> String {
    object(GROUP, name)
}

/// The name of the note of a group's limits.
pub(crate) fn group_limits_object(name: &str) -> String {
    object(GROUP_LIMITS, name)
}

fn object(kind: &str, name: &str) -> String {
    format!("{kind}{name}")
}

/// Forgets the limits and the place of a disk that is gone.
pub(crate) fn forget(control: &Control, disk: &str) {
    for kind in [LIMITS, PLACE] {
        control.config.removed(Subsystem::Qos, &object(kind, disk));
    }
}

/// Forgets the limits and the place of a disk that was absent, and will not come.
pub(crate) fn forget_absent(control: &Control, disk: &str) {
    for kind in [LIMITS, PLACE] {
        control.config.forget_absent(Subsystem::Qos, &object(kind, disk));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn change(params: Value, before: RateLimits) -> Result<RateLimits, Error> {
        let p: SetLimit = serde_json::from_value(params).map_err(|e| Error::InvalidParams(e.to_string()))?;
        p.apply(before)
    }

    #[test]
    fn only_what_is_given_changes() {
        let before = RateLimits { ios: 7, read_bytes: MBYTE, ..RateLimits::default() };
        let after = change(json!({"name": "d", "rw_ios_per_sec": "9", "burst_seconds": 5}), before);
        let burst = Duration::from_secs(5);
        assert_eq!(after, Ok(RateLimits { ios: 9, burst, ..before }));
        let after = change(json!({"name": "d", "r_mbytes_per_sec": 0, "combined": true}), before);
        assert_eq!(after, Ok(RateLimits { ios: 7, combined: true, ..RateLimits::default() }));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let code = |mut params: Value| {
            params["name"] = json!("d");
            change(params, RateLimits::default()).unwrap_err().code()
        };
        assert_eq!(code(json!({})), -22);
        assert_eq!(code(json!({"rw_mbytes_per_sec": u64::MAX})), -22);
        assert_eq!(code(json!({"burst_seconds": -1})), -32602);
        assert_eq!(code(json!({"rw_ios_per_sec": -1})), -32602);
        assert_eq!(code(json!({"rw_ios_per_sec": 1.5})), -32602);
        assert_eq!(code(json!({"ios": 1})), -32602);
    }
}
