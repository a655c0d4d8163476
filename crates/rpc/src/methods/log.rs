//! `log_*`: level and flags of the daemon's log. Control context.
//!
//! One level applies to the whole daemon. Each part of the daemon has a flag: while the flag is set, all messages of that part
//! are logged.

use super::{Control, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The flags, each with the target of its part's events: the name of the crate.
const FLAGS: [(&str, &str); 20] = [
    ("arykd", "arykd"),
    ("bdev", "aryk_bdev"),
    ("bdev_crypto", "aryk_bdev_crypto"),
    ("bdev_nvme", "aryk_bdev_nvme"),
    ("bdev_rbd", "aryk_bdev_rbd"),
    ("bdev_uring", "aryk_bdev_uring"),
    ("bdev_volume", "aryk_bdev_volume"),
    ("cuse", "aryk_cuse"),
    ("mdns", "aryk_mdns"),
    ("metrics", "aryk_metrics"),
    ("nvmf", "aryk_nvmf"),
    ("reactor", "aryk_reactor"),
    ("rpc", "aryk_rpc"),
    ("secrets", "aryk_secrets"),
    ("state", "aryk_state"),
    ("unix_listener", "aryk_unix_listener"),
    ("vhost_blk", "aryk_vhost_blk"),
    ("vhost_device", "aryk_vhost_device"),
    ("vhost_scsi", "aryk_vhost_scsi"),
    ("vhost_user", "aryk_vhost_user"),
];

/// Stands for all flags.
const ALL: &str = "all";

/// SPDK's log levels. `NOTICE` is the default of a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the names are self-explanatory")]
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

/// Settings of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// More detailed messages are not logged.
    pub level: PrintLevel,
    /// Whether lines of the text format have a timestamp.
    pub timestamps: bool,
    flags: BTreeSet<&'static str>,
}

impl LogSettings {
    /// The settings of a daemon at its start.
    pub const fn new(level: PrintLevel) -> Self {
        Self { level, timestamps: true, flags: BTreeSet::new() }
    }

    /// The targets of which all messages are logged, regardless of the level.
    pub fn verbose_targets(&self) -> impl Iterator<Item = &'static str> {
        FLAGS.into_iter().filter(|(flag, _)| self.flags.contains(flag)).map(|(_, target)| target)
    }
}

pub(super) fn register(table: &mut Table<Control>) {
    table.add("log_get_print_level", Phase::Any, "Reports the log level.", get_print_level);
    table.add("log_set_print_level", Phase::Any, "Sets the log level.", set_print_level);
    // SPDK has one level for printed messages and one for syslog; Aryk has one log, and so one level.
    table.add(
        "log_get_level",
        Phase::Any,
        "Reports the log level, as `log_get_print_level` does: Aryk has one log.",
        get_print_level,
    );
    table.add(
        "log_set_level",
        Phase::Any,
        "Sets the log level, as `log_set_print_level` does: Aryk has one log.",
        set_print_level,
    );
    table.add(
        "log_get_flags",
        Phase::Any,
        "Lists the log flags of the daemon's parts, and which of them are set.",
        get_flags,
    );
    table.add(
        SET_FLAG,
        Phase::Any,
        "Sets a log flag: all messages of that part of the daemon are logged, regardless of the level.",
        async |control: &Control, p| change_flag(control, &p, true),
    );
    table.add("log_clear_flag", Phase::Any, "Clears a log flag.", async |control: &Control, p| {
        change_flag(control, &p, false)
    });
    table.add(
        "log_enable_timestamps",
        Phase::Any,
        "Sets whether log lines in text format have a timestamp; lines for the journal never have one.",
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
    /// The new level; more detailed messages are not logged.
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
    /// A flag of `log_get_flags`, or `all`, or a common prefix of several flags: `vhost`.
    flag: String,
}

fn change_flag(control: &Control, p: &Flag, set: bool) -> Result<bool, Error> {
    let is_known = FLAGS.iter().any(|(flag, _)| p.flag == *flag);
    // SPDK's flag `vhost` corresponds to several flags of Aryk, which begin with it.
    let is_part = |flag: &str| flag.strip_prefix(&*p.flag).is_some_and(|rest| rest.starts_with('_'));
    let meant = |flag: &&str| p.flag == *flag || p.flag == ALL || (!is_known && is_part(flag));
    let meant: Vec<_> = FLAGS.into_iter().map(|(flag, _)| flag).filter(meant).collect();
    if meant.is_empty() {
        let known = FLAGS.map(|(flag, _)| flag).join(", ");
        return Err(Error::errno(
            Errno::INVAL,
            format!("there is no flag '{}'; the flags are {known}", p.flag),
        ));
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
    /// Whether to log timestamps.
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
        // The limiter's lines are those of the crates that use it.
        logging.remove("aryk_log_limit");
        let flagged: BTreeSet<_> = FLAGS.into_iter().map(|(_, target)| target.to_owned()).collect();
        assert_eq!(flagged, logging);
    }
}
