//! `bdev_nvme_set_options`, `bdev_nvme_set_hotplug`. Control context.
//!
//! The options hold for controllers that are attached later, as SPDK's do. Both calls are stored as settings of the daemon, and
//! come before all controllers after a restart.

use super::{Control, Error, Phase, Table};
use crate::config::Subsystem;
use aryk_bdev_nvme::Config;
use aryk_nvme::queue::Timeouts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const SET_OPTIONS: &str = "bdev_nvme_set_options";
const SET_HOTPLUG: &str = "bdev_nvme_set_hotplug";

/// Whether `save_config` writes a call that sets something of the daemon: SPDK's does so for these.
pub(crate) fn is_saved(method: &str) -> bool {
    [SET_OPTIONS, SET_HOTPLUG].contains(&method)
}

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        SET_OPTIONS,
        Phase::Any,
        "Sets time limits and retries of NVMe controllers that are attached later.",
        set_options,
    );
    table.add(
        SET_HOTPLUG,
        Phase::Any,
        "Sets whether NVMe drives that are bound to vfio-pci are attached by themselves.",
        set_hotplug,
    );
}

/// Parameters of `bdev_nvme_set_options`. 0 stands for the default.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Options {
    /// Microseconds after which an I/O command is late: the driver aborts it, and resets the controller if that does not help.
    /// Default: 30 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_us: Option<u64>,
    /// As `timeout_us`, for admin commands. Default: 120 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_admin_us: Option<u64>,
    /// Period of the keep-alive timer, for controllers that have one. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_alive_timeout_ms: Option<u32>,
    /// Attempts after a status that allows another. Default: 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_retry_count: Option<u32>,
    /// Commands in flight on each reactor. Default: 255.
    #[serde(skip_serializing_if = "Option::is_none")]
    io_queue_requests: Option<u32>,
    /// Seconds for which requests wait for a drive that has vanished; -1: for ever. Default: 15.
    #[serde(skip_serializing_if = "Option::is_none")]
    ctrlr_loss_timeout_sec: Option<i32>,
    /// Saved, without effect: a late command is always aborted first.
    #[serde(skip_serializing_if = "Option::is_none")]
    action_on_timeout: Option<Action>,
    /// Saved, without effect: all queues have the same priority.
    #[serde(skip_serializing_if = "Option::is_none")]
    arbitration_burst: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    low_priority_weight: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    medium_priority_weight: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    high_priority_weight: Option<u32>,
    /// Saved, without effect: the driver chooses when to poll.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme_adminq_poll_period_us: Option<u64>,
    /// Saved, without effect: the driver chooses when to poll.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme_ioq_poll_period_us: Option<u64>,
    /// Saved, without effect: commands are always submitted in batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_cmd_submit: Option<bool>,
    /// Saved, without effect: `transport_retry_count` counts all attempts.
    #[serde(skip_serializing_if = "Option::is_none")]
    bdev_retry_count: Option<i32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_ack_timeout: Option<u8>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    reconnect_delay_sec: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    fast_io_fail_timeout_sec: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    disable_auto_failback: Option<bool>,
    /// Saved, without effect: namespaces without a UUID always get one.
    #[serde(skip_serializing_if = "Option::is_none")]
    generate_uuids: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_tos: Option<u8>,
    /// Saved, without effect: errors are always counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme_error_stat: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_srq_size: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    io_path_stat: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    allow_accel_sequence: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_max_cq_size: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_cm_event_timeout_ms: Option<u16>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_digests: Option<Vec<String>>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_dhgroups: Option<Vec<String>>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_umr_per_io: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_connect_timeout_ms: Option<u32>,
    /// Saved, without effect: flushes always reach a drive with a volatile write cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_flush: Option<bool>,
    /// Saved, without effect: a controller has one path.
    #[serde(skip_serializing_if = "Option::is_none")]
    multipath_opts: Option<MultipathOptions>,
}

/// How a path to a namespace is selected.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MultipathOptions {
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<PathPolicy>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    selector: Option<PathSelector>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    min_io: Option<u32>,
}

/// How many paths carry I/O.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "NvmePathPolicy")]
enum PathPolicy {
    ActivePassive,
    ActiveActive,
}

/// Which path the next request takes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "NvmePathSelector")]
enum PathSelector {
    RoundRobin,
    QueueDepth,
}

/// What happens to a late command.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "NvmeTimeoutAction")]
enum Action {
    None,
    Reset,
    Abort,
}

/// The shortest time limit of a command: shorter ones would reset drives that only are busy.
const TIMEOUT_MIN_US: u64 = 10_000;

impl Options {
    fn check(&self) -> Result<(), Error> {
        let is_short = |us: Option<u64>| us.is_some_and(|us| us > 0 && us < TIMEOUT_MIN_US);
        if is_short(self.timeout_us) || is_short(self.timeout_admin_us) {
            return Err(Error::invalid(format!(
                "a time limit must be at least {TIMEOUT_MIN_US} µs, or 0 for the default"
            )));
        }
        if self.ctrlr_loss_timeout_sec.is_some_and(|seconds| seconds < -1) {
            return Err(Error::invalid("`ctrlr_loss_timeout_sec` must be -1, 0 or more"));
        }
        Ok(())
    }

    /// Sets what the options say about a controller that is to be attached.
    pub(super) fn apply(&self, config: &mut Config) {
        let nanoseconds = |us: u64| us.saturating_mul(1000);
        if let Some(us) = self.timeout_us.filter(|us| *us > 0) {
            config.options.io = Timeouts { command: nanoseconds(us), ..config.options.io };
        }
        if let Some(us) = self.timeout_admin_us.filter(|us| *us > 0) {
            config.options.admin = nanoseconds(us);
        }
        if let Some(ms) = self.keep_alive_timeout_ms {
            config.options.keep_alive = u64::from(ms) * 1_000_000;
        }
        if let Some(count) = self.transport_retry_count {
            config.retries = u8::try_from(count).unwrap_or(u8::MAX);
        }
        if let Some(depth) = self.io_queue_requests.filter(|depth| *depth > 0) {
            config.depth = u16::try_from(depth).unwrap_or(u16::MAX);
        }
        match self.ctrlr_loss_timeout_sec.map(u64::try_from) {
            None | Some(Ok(0)) => {}
            Some(Ok(seconds)) => config.grace = Duration::from_secs(seconds),
            Some(Err(_)) => config.grace = super::attach::FOR_EVER,
        }
    }
}

async fn set_options(control: &Control, p: Options) -> Result<bool, Error> {
    p.check()?;
    control.config.made(Subsystem::Daemon, SET_OPTIONS, SET_OPTIONS, &p);
    control.nvme.options.replace(p);
    Ok(true)
}

/// Parameters of `bdev_nvme_set_hotplug`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetHotplug {
    /// Whether drives are attached by themselves, as `HotInNvme0` and so on.
    enable: bool,
    /// Microseconds between two looks at the host's drives, 0 to 10,000,000. Default, and for 0: 100,000.
    #[serde(default)]
    period_us: u64,
}

async fn set_hotplug(control: &Control, p: SetHotplug) -> Result<bool, Error> {
    const PERIOD_US: u64 = 100_000;
    if p.period_us > 10_000_000 {
        return Err(Error::invalid("`period_us` may be at most 10000000"));
    }
    // Each look reads sysfs.
    let period =
        Duration::from_micros(if p.period_us == 0 { PERIOD_US } else { p.period_us.max(PERIOD_US / 10) });
    control.nvme.hotplug.send_replace(p.enable.then_some(period));
    control.config.made(Subsystem::Daemon, SET_HOTPLUG, SET_HOTPLUG, &p);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_bdev_nvme::Location;
    use aryk_nvme::controller::SECOND;
    use serde_json::{Value, json};

    fn config(options: Value) -> Config {
        let options: Options = serde_json::from_value(options).unwrap();
        options.check().unwrap();
        let mut config = Config::new("a", Location::Socket("/a".into()));
        options.apply(&mut config);
        config
    }

    #[test]
    fn options_with_a_meaning_reach_the_driver() {
        let set = config(
            json!({"timeout_us": 5_000_000, "timeout_admin_us": 7_000_000, "transport_retry_count": 300,
            "io_queue_requests": 64, "ctrlr_loss_timeout_sec": 3, "keep_alive_timeout_ms": 10}),
        );
        assert_eq!((set.options.io.command, set.options.admin), (5 * SECOND, 7 * SECOND));
        assert_eq!((set.retries, set.depth, set.grace), (255, 64, Duration::from_secs(3)));
        assert_eq!(set.options.keep_alive, SECOND / 100);
    }

    #[test]
    fn spdks_defaults_are_ours() {
        let spdk = config(json!({"timeout_us": 0, "timeout_admin_us": 0, "transport_retry_count": 4,
            "io_queue_requests": 0, "ctrlr_loss_timeout_sec": 0}));
        let ours = config(json!({}));
        assert_eq!(format!("{spdk:?}"), format!("{ours:?}"));
        assert_eq!(config(json!({"ctrlr_loss_timeout_sec": -1})).grace, super::super::attach::FOR_EVER);
    }
}
