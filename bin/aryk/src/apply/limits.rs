//! Calls that set limits of disks and groups, and sleep policies of controllers: settings with a subject, at most one of each
//! kind per subject.

use super::call::{Call, KEY, Kind};
use crate::cli::SleepPolicy;
use crate::limits::Limits;
use serde_json::{Value, json};

/// The kind of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// A group exists.
    Group,
    /// A group's limits.
    GroupLimits,
    /// A disk's limits.
    Limits,
    /// A disk's membership in a group.
    Membership,
    /// A controller's sleep policy.
    SleepPolicy,
}

const CREATE: &str = "bdev_qos_group_create";
const LIMIT_GROUP: &str = "bdev_qos_group_set_limit";
const LIMIT: &str = "bdev_set_qos_limit";
const ADD: &str = "bdev_qos_group_add_bdev";
const SET_SLEEP_POLICY: &str = "aryk_controller_set_sleep_policy";

pub fn create(name: &str, parent: Option<&str>) -> Call {
    let mut params = json!({"name": name});
    if let Some(parent) = parent {
        params["parent"] = json!(parent);
    }
    Call::new(CREATE, params)
}

pub fn limit_group(name: &str, limits: &Limits) -> Call {
    Call::new(LIMIT_GROUP, limits.complete().params(name))
}

pub fn limit(disk: &str, limits: &Limits) -> Call {
    Call::new(LIMIT, limits.complete().params(disk))
}

pub fn add(group: &str, disk: &str) -> Call {
    Call::new(ADD, json!({"name": group, "bdev_name": disk}))
}

pub fn set_sleep_policy(controller: &str, policy: SleepPolicy) -> Call {
    Call::new(SET_SLEEP_POLICY, json!({"ctrlr": controller, "policy": policy}))
}

impl Call {
    /// The kind of the setting, and its disk, group or controller.
    pub fn setting(&self) -> Option<(Setting, &str)> {
        let (setting, name) = match self.method.as_str() {
            CREATE => (Setting::Group, "name"),
            LIMIT_GROUP => (Setting::GroupLimits, "name"),
            LIMIT => (Setting::Limits, "name"),
            ADD => (Setting::Membership, "bdev_name"),
            SET_SLEEP_POLICY => (Setting::SleepPolicy, "ctrlr"),
            _ => return None,
        };
        Some((setting, self.text(name)?))
    }

    /// The disk or controller whose setting the call changes.
    pub fn set_object(&self) -> Option<(Kind, &str)> {
        let (setting, name) = self.setting()?;
        match setting {
            Setting::Group | Setting::GroupLimits => None,
            Setting::Limits | Setting::Membership => Some((Kind::Disk, name)),
            Setting::SleepPolicy => Some((Kind::Controller, name)),
        }
    }

    /// The disk whose setting the call changes.
    pub fn set_disk(&self) -> Option<&str> {
        self.set_object().filter(|(kind, _)| *kind == Kind::Disk).map(|(_, disk)| disk)
    }

    /// The policy that the call sets.
    pub fn sleep_policy(&self) -> Option<SleepPolicy> {
        serde_json::from_value(self.params.get("policy")?.clone()).ok()
    }

    /// Whether the setting is in effect, given all saved settings.
    pub fn is_set(&self, settings: &[Self]) -> bool {
        settings.iter().any(|saved| self.sets_same(saved))
            || (self.sets_default() && !settings.iter().any(|saved| self.has_same_subject(saved)))
    }

    /// Whether the call has the same effect as a saved call.
    fn sets_same(&self, saved: &Self) -> bool {
        let limits = |call: &Self| Limits::of(&Value::Object(call.params.clone()));
        match (self.setting(), saved.setting()) {
            (Some(a), Some(b)) if a == b && matches!(a.0, Setting::Limits | Setting::GroupLimits) => {
                limits(self) == limits(saved)
            }
            (Some(_), _) => self == saved,
            // The daemon does not tell the key itself.
            (None, _) if self.method == KEY => {
                let mut wanted = self.without_key();
                wanted.params.entry("tweak_mode").or_insert_with(|| json!("SIMPLE_LBA"));
                wanted.is_within(saved)
            }
            (None, _) => self.is_within(saved),
        }
    }

    /// Whether the call sets the default, which is not saved.
    fn sets_default(&self) -> bool {
        match self.method.as_str() {
            "framework_set_scheduler" => self.text("name") == Some("static"),
            "vhost_controller_set_coalescing" => self.params.get("delay_base_us") == Some(&json!(0)),
            LIMIT => Limits::of(&Value::Object(self.params.clone())).is_empty(),
            SET_SLEEP_POLICY => self.sleep_policy() == Some(SleepPolicy::Default),
            _ => false,
        }
    }

    fn has_same_subject(&self, saved: &Self) -> bool {
        let subject = |call: &Self| match call.setting() {
            Some((_, name)) => Some(name.to_owned()),
            None => call.text("ctrlr").map(str::to_owned),
        };
        self.method == saved.method && subject(self) == subject(saved)
    }

    /// The call that undoes the setting.
    pub fn unset(&self) -> Option<Self> {
        let (setting, name) = self.setting()?;
        Some(match setting {
            Setting::Group => Self::new("bdev_qos_group_delete", json!({"name": name})),
            Setting::GroupLimits => limit_group(name, &Limits::default()),
            Setting::Limits => limit(name, &Limits::default()),
            Setting::Membership => {
                let params = Value::Object(self.params.clone());
                Self::new("bdev_qos_group_remove_bdev", params)
            }
            Setting::SleepPolicy => set_sleep_policy(name, SleepPolicy::Default),
        })
    }

    /// A summary of the setting.
    pub fn setting_summary(&self) -> Option<String> {
        let (setting, name) = self.setting()?;
        let limits = Limits::of(&Value::Object(self.params.clone()));
        Some(match setting {
            Setting::Group => format!("group {name}"),
            Setting::GroupLimits => format!("limits of group {name}: {limits}"),
            Setting::Limits => format!("limits of disk {name}: {limits}"),
            Setting::Membership => format!("disk {name} in group {}", self.text("name").unwrap_or_default()),
            Setting::SleepPolicy => {
                format!("sleep policy of controller {name}: {}", self.text("policy").unwrap_or_default())
            }
        })
    }
}
