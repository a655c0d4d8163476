//! `bdev_set_qos_limit`, `bdev_qos_group*`: rate limits of disks and groups of disks. Control context.
//!
//! A disk's limits, a group, its limits, and the membership of a disk in a group have one note each, among those of the disks.

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
        "Sets the rate limits of a disk. Omitted limits are unchanged; 0 removes a limit.",
        set_limit,
    );
    table.add(CREATE, Phase::RunTime, "Creates a QoS group: its disks share rate limits.", create_group);
    table.add(
        SET_GROUP_LIMIT,
        Phase::RunTime,
        "Sets the rate limits that all disks of a group, and of the groups within it, share. Omitted limits are unchanged; 0 removes a limit.",
        set_group_limit,
    );
    table.add(ADD, Phase::RunTime, "Moves a disk into a group, out of its present group.", add_bdev);
    table.add("bdev_qos_group_remove_bdev", Phase::RunTime, "Removes a disk from a group.", remove_bdev);
    table.add("bdev_qos_group_delete", Phase::RunTime, "Deletes an empty group.", delete_group);
    table.add(
        "bdev_qos_groups_get",
        Phase::RunTime,
        "Lists the QoS groups, or describes one of them.",
        get_groups,
    );
}

pub(crate) const SET_LIMIT: &str = "bdev_set_qos_limit";
pub(crate) const CREATE: &str = "bdev_qos_group_create";
pub(crate) const SET_GROUP_LIMIT: &str = "bdev_qos_group_set_limit";
pub(crate) const ADD: &str = "bdev_qos_group_add_bdev";

/// Prefixes of the notes' object names; the name of the disk or group follows.
const LIMITS: &str = "limits/";
const PLACE: &str = "place/";
const GROUP: &str = "group/";
const GROUP_LIMITS: &str = "group-limits/";

const MBYTE: u64 = 1 << 20;

/// Declares parameters, with those that change limits behind them. (With `flatten`, a parameter that is missing would be reported
/// before one that is unknown.)
macro_rules! limit_params {
    ($(#[$attribute:meta])* struct $name:ident { $($(#[$of_param:meta])* $param:ident: $kind:ty,)* }) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, serde::Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        struct $name {
            $($(#[$of_param])* $param: $kind,)*
            /// Requests per second.
            rw_ios_per_sec: Option<$crate::methods::Count>,
            /// Aryk only: reads per second.
            r_ios_per_sec: Option<$crate::methods::Count>,
            /// Aryk only: writes, and all other requests that are not reads, per second.
            w_ios_per_sec: Option<$crate::methods::Count>,
            /// Mebibytes per second.
            rw_mbytes_per_sec: Option<$crate::methods::Count>,
            /// Mebibytes read per second.
            r_mbytes_per_sec: Option<$crate::methods::Count>,
            /// Mebibytes written per second.
            w_mbytes_per_sec: Option<$crate::methods::Count>,
            /// Aryk only: the burst, in seconds' worth of unused allowance that can accumulate.
            burst_seconds: Option<$crate::methods::Count>,
            /// Aryk only: combines the limits of requests and of mebibytes into one, which requests of 4 KiB and of 4 MiB meet
            /// exactly, and other sizes in between.
            combined: Option<bool>,
        }

        impl $name {
            fn change(&self) -> $crate::methods::qos::Change {
                $crate::methods::qos::Change {
                    rw_ios_per_sec: self.rw_ios_per_sec,
                    r_ios_per_sec: self.r_ios_per_sec,
                    w_ios_per_sec: self.w_ios_per_sec,
                    rw_mbytes_per_sec: self.rw_mbytes_per_sec,
                    r_mbytes_per_sec: self.r_mbytes_per_sec,
                    w_mbytes_per_sec: self.w_mbytes_per_sec,
                    burst_seconds: self.burst_seconds,
                    combined: self.combined,
                }
            }
        }
    };
}
pub(in crate::methods) use limit_params;

limit_params! {
    /// Parameters of `bdev_set_qos_limit` and `bdev_qos_group_set_limit`: only the given limits change.
    struct SetLimit {
        /// Name, alias or uuid of the disk; or the name of the group.
        name: String,
    }
}

/// The given limits.
#[derive(Debug)]
pub(super) struct Change {
    pub rw_ios_per_sec: Option<Count>,
    pub r_ios_per_sec: Option<Count>,
    pub w_ios_per_sec: Option<Count>,
    pub rw_mbytes_per_sec: Option<Count>,
    pub r_mbytes_per_sec: Option<Count>,
    pub w_mbytes_per_sec: Option<Count>,
    pub burst_seconds: Option<Count>,
    pub combined: Option<bool>,
}

/// Rate limits of a disk or a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "RateLimits")]
pub(super) struct Limits {
    rw_ios_per_sec: u64,
    rw_mbytes_per_sec: u64,
    r_mbytes_per_sec: u64,
    w_mbytes_per_sec: u64,
    /// Aryk only, as all members below.
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

impl Change {
    /// `limits` with the given changes.
    pub fn apply(&self, mut limits: RateLimits) -> Result<RateLimits, Error> {
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
                *limit = count.checked_mul(unit).ok_or_else(|| {
                    Error::invalid(format!("{count} mebibytes per second exceed the maximum"))
                })?;
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

/// A note of limits, as the call that sets all limits which are not 0.
#[derive(Debug, Serialize)]
struct LimitsNote<'a> {
    name: &'a str,
    #[serde(flatten, serialize_with = "nonzero_limits")]
    limits: Limits,
}

/// Serializes the limits that are not 0, so that a call which has them sets all.
pub(super) fn nonzero_limits<S: Serializer>(limits: &Limits, to: S) -> Result<S::Ok, S::Error> {
    let all = |limits: Limits| serde_json::to_value(limits).map_err(S::Error::custom);
    let (unlimited, mut limits) = (all(RateLimits::default().into())?, all(limits.clone())?);
    if let Value::Object(limits) = &mut limits {
        limits.retain(|name, value| *value != unlimited[name.as_str()]);
    }
    limits.serialize(to)
}

/// Notes the limits of a disk or group, or removes the note if it has none.
fn note(control: &Control, object: &str, method: &'static str, name: &str, limits: RateLimits) {
    if limits.is_unlimited() {
        control.config.forget(Subsystem::Qos, object);
    } else {
        control.config.made(Subsystem::Qos, object, method, &LimitsNote { name, limits: limits.into() });
    }
}

/// `limits`, changed by the noted limits of `object` that were not restored yet: the next note replaces theirs.
fn with_absent(control: &Control, object: &str, limits: RateLimits) -> RateLimits {
    let noted = control.config.absent_params(Subsystem::Qos, object);
    let noted = noted.and_then(|params| serde_json::from_value::<SetLimit>(params).ok());
    noted.and_then(|noted| noted.change().apply(limits).ok()).unwrap_or(limits)
}

fn now() -> Nanos {
    Clock::Monotonic.now()
}

async fn set_limit(control: &Control, p: SetLimit) -> Result<bool, Error> {
    let bdev = control.disks.find(&p.name)?;
    let object = object(LIMITS, bdev.name());
    let limits = p.change().apply(with_absent(control, &object, bdev.qos_limits()))?;
    let set = bdev.set_qos_limits(limits, now()).await;
    set.map_err(|e| Error::from(e).coded(INVALID_PARAMS))?;
    // If several calls run at the same time, the last one has set the limits.
    note(control, &object, SET_LIMIT, bdev.name(), bdev.qos_limits());
    Ok(true)
}

async fn set_group_limit(control: &Control, p: SetLimit) -> Result<bool, Error> {
    let group = control.disks.groups.find(&p.name)?;
    let object = object(GROUP_LIMITS, &p.name);
    let limits = p.change().apply(with_absent(control, &object, group.limits()))?;
    control.disks.groups.set_limits(&control.disks.registry, &p.name, limits, now()).await?;
    note(control, &object, SET_GROUP_LIMIT, &p.name, group.limits());
    Ok(true)
}

/// Parameters of `bdev_qos_group_create`, a method of Aryk only.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateGroup {
    /// Name of the new group.
    name: String,
    /// The parent group. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
}

async fn create_group(control: &Control, p: CreateGroup) -> Result<bool, Error> {
    if p.name.is_empty() || p.name.len() > NAME_LEN_MAX {
        return Err(Error::invalid(format!("a group's name must have 1 to {NAME_LEN_MAX} bytes")));
    }
    control.disks.groups.create(&p.name, p.parent.as_deref())?;
    control.config.made(Subsystem::Qos, &object(GROUP, &p.name), CREATE, &p);
    Ok(true)
}

/// Parameters of `bdev_qos_group_add_bdev` and `bdev_qos_group_remove_bdev`, methods of Aryk only.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "QosGroupBdev")]
struct Member {
    /// Name of the group.
    name: String,
    /// Name, alias or uuid of the disk.
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

/// Notes the group of a disk.
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

/// Parameters of `bdev_qos_group_delete`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeleteGroup {
    /// Name of the group.
    name: String,
}

async fn delete_group(control: &Control, p: DeleteGroup) -> Result<bool, Error> {
    control.disks.groups.delete(&control.disks.registry, &p.name)?;
    for kind in [GROUP, GROUP_LIMITS] {
        control.config.removed(Subsystem::Qos, &object(kind, &p.name));
    }
    Ok(true)
}

/// Parameters of `bdev_qos_groups_get`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetGroups {
    /// Name of the group to describe. Default: all groups.
    name: Option<String>,
}

/// One of the results of `bdev_qos_groups_get`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "QosGroup")]
struct GroupInfo {
    name: String,
    /// The parent group.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    /// Limits of all members together.
    assigned_rate_limits: Limits,
    /// The disks of the group, without those of groups within it.
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

/// The object name of a group's note.
pub(crate) fn group_object(name: &str) -> String {
    object(GROUP, name)
}

/// The object name of the note of a group's limits.
pub(crate) fn group_limits_object(name: &str) -> String {
    object(GROUP_LIMITS, name)
}

fn object(kind: &str, name: &str) -> String {
    format!("{kind}{name}")
}

/// Removes the notes of limits and membership of a removed disk.
pub(crate) fn forget(control: &Control, disk: &str) {
    for kind in [LIMITS, PLACE] {
        control.config.removed(Subsystem::Qos, &object(kind, disk));
    }
}

/// Removes the notes of limits and membership of an absent disk that is no longer expected.
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
        p.change().apply(before)
    }

    #[test]
    fn only_given_limits_change() {
        let before = RateLimits { ios: 7, read_bytes: MBYTE, ..RateLimits::default() };
        let after = change(json!({"name": "d", "rw_ios_per_sec": "9", "burst_seconds": 5}), before);
        let burst = Duration::from_secs(5);
        assert_eq!(after, Ok(RateLimits { ios: 9, burst, ..before }));
        let after = change(json!({"name": "d", "r_mbytes_per_sec": 0, "combined": true}), before);
        assert_eq!(after, Ok(RateLimits { ios: 7, combined: true, ..RateLimits::default() }));
    }

    #[test]
    fn invalid_limits_are_refused() {
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
