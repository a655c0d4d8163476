//! `log_*`: what the daemon's log tells. Control context.
//!
//! There is a level for all, and a flag for each part of the daemon, of which all is told while its flag is set.

use super::{Control, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The flags, each with the target of its part's events: the name of its crate.
const FLAGS: [(&str, &str); 12] = [
    ("arykd", "arykd"),
    ("bdev", "aryk_bdev"),
    ("bdev_uring", "aryk_bdev_uring"),
    ("metrics", "aryk_metrics"),
    ("reactor", "aryk_reactor"),
    ("rpc", "aryk_rpc"),
    ("state", "aryk_state"),
    ("unix_listener", "aryk_unix_listener"),
    ("vhost_blk", "aryk_vhost_blk"),
    ("vhost_device", "aryk_vhost_device"),
    ("vhost_scsi", "aryk_vhost_scsi"),
    ("vhost_user", "aryk_vhost_user"),
];

/// Means all flags.
const ALL: &str = "all";

/// SPDK's levels. `NOTICE` is what a daemon tells by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the names say it all")]
pub enum PrintLevel {
    Error,
    Warning,
    Notice,
    Info,
    Debug,
}

impl From<PrintLevel> for tracing::Level {
    fn from(level: PrintLevel) -> Self {
        match level {
            PrintLevel::Error => Self::ERROR,
            PrintLevel::Warning => Self::WARN,
            PrintLevel::Notice => Self::INFO,
            PrintLevel::Info => Self::DEBUG,
            PrintLevel::Debug => Self::TRACE,
        }
    }
}

/// What the log tells, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// What is more detailed is not told.
    pub level: PrintLevel,
    /// Whether lines for people have their time.
    pub timestamps: bool,
    flags: BTreeSet<&'static str>,
}

impl LogSettings {
    /// Of a daemon that starts.
    pub const fn new(level: PrintLevel) -> Self {
        Self { level, timestamps: true, flags: BTreeSet::new() }
    }

    /// The targets of which all is told, whatever the level.
    pub fn told(&self) -> impl Iterator<Item = &'static str> {
        FLAGS.into_iter().filter(|(flag, _)| self.flags.contains(flag)).map(|(_, target)| target)
    }
}

pub(super) fn register(table: &mut Table<Control>) {
    table.add("log_get_print_level", Phase::Any, "What the log tells.", get_print_level);
    table.add("log_set_print_level", Phase::Any, "Changes what the log tells.", set_print_level);
    // SPDK has a level for what is printed and one for what goes to syslog; we have one log, and so one level.
    table.add(
        "log_get_level",
        Phase::Any,
        "The same as `log_get_print_level`: there is one log.",
        get_print_level,
    );
    table.add(
        "log_set_level",
        Phase::Any,
        "The same as `log_set_print_level`: there is one log.",
        set_print_level,
    );
    table.add("log_get_flags", Phase::Any, "The parts of the daemon, and of which all is told.", get_flags);
    table.add(
        SET_FLAG,
        Phase::Any,
        "Has the log tell all of a part of the daemon, whatever the level.",
        async |control: &Control, p| change_flag(control, &p, true),
    );
    table.add(
        "log_clear_flag",
        Phase::Any,
        "Ends what `log_set_flag` began.",
        async |control: &Control, p| change_flag(control, &p, false),
    );
    table.add(
        "log_enable_timestamps",
        Phase::Any,
        "Whether the log's lines for people have their time; what a journal takes never has.",
        enable_timestamps,
    );
}

async fn get_print_level(control: &Control, _: NoParams) -> Result<PrintLevel, Error> {
    Ok(control.log_settings().level)
}

/// Parameters of `log_set_print_level`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPrintLevel {
    /// From now on; what is more detailed is not told.
    level: PrintLevel,
}

async fn set_print_level(control: &Control, p: SetPrintLevel) -> Result<bool, Error> {
    control.change_log(|settings| settings.level = p.level);
    control.config.made(Subsystem::Daemon, "log_level", "log_set_print_level", &p);
    Ok(true)
}

async fn get_flags(control: &Control, _: NoParams) -> Result<BTreeMap<&'static str, bool>, Error> {
    let settings = control.log_settings();
    Ok(FLAGS.map(|(flag, _)| (flag, settings.flags.contains(flag))).into())
}

const SET_FLAG: &str = "log_set_flag";

/// Parameters of `log_set_flag` and `log_clear_flag`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Flag {
    /// One of those that `log_get_flags` gives, or `all`, or what several of them begin with: `vhost`.
    flag: String,
}

fn change_flag(control: &Control, p: &Flag, set: bool) -> Result<bool, Error> {
    let is_known = FLAGS.iter().any(|(flag, _)| p.flag == *flag);
    // SPDK's `vhost` is several parts of ours, each of whose flags begins with that.
    let is_part = |flag: &str| flag.strip_prefix(&*p.flag).is_some_and(|rest| rest.starts_with('_'));
    let meant = |flag: &&str| p.flag == *flag || p.flag == ALL || (!is_known && is_part(flag));
    let meant: Vec<_> = FLAGS.into_iter().map(|(flag, _)| flag).filter(meant).collect();
    if meant.is_empty() {
        let known = FLAGS.map(|(flag, _)| flag).join(", ");
        return Err(Error::errno(Errno::INVAL, format!("there is no flag '{}', only {known}", p.flag)));
    }
    control.change_log(|settings| match set {
        true => settings.flags.extend(&meant),
        false => settings.flags.retain(|flag| !meant.contains(flag)),
    });
    for flag in meant {
        let object = format!("log_flag {flag}");
        match set {
            true => control.config.made(Subsystem::Daemon, &object, SET_FLAG, &Flag { flag: flag.into() }),
            false => control.config.removed(Subsystem::Daemon, &object),
        }
    }
    Ok(true)
}

/// Parameters of `log_enable_timestamps`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EnableTimestamps {
    /// From now on.
    enabled: bool,
}

async fn enable_timestamps(control: &Control, p: EnableTimestamps) -> Result<bool, Error> {
    control.change_log(|settings| settings.timestamps = p.enabled);
    control.config.made(Subsystem::Daemon, "log_timestamps", "log_enable_timestamps", &p);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_crate_that_logs_has_a_flag() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let mut logging = BTreeSet::new();
        for dir in ["crates", "crates/modules", "bin"] {
            for entry in std::fs::read_dir(format!("{root}/{dir}")).unwrap() {
                let manifest = entry.unwrap().path().join("Cargo.toml");
                let Ok(text) = std::fs::read_to_string(&manifest) else { continue };
                if text.lines().any(|line| line.starts_with("tracing.workspace")) {
                    let name = text.lines().find_map(|line| line.strip_prefix("name = "));
                    logging.insert(name.unwrap().trim_matches('"').replace('-', "_"));
                }
            }
        }
        // Its lines are those of the crates that use it.
        logging.remove("aryk_log_limit");
        let told: BTreeSet<_> = FLAGS.into_iter().map(|(_, target)| target.to_owned()).collect();
        assert_eq!(told, logging);
    }
}
