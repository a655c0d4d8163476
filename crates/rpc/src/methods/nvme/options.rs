//! `bdev_nvme_set_options`, `bdev_nvme_set_hotplug`. Control context.
//!
//! The options hold for controllers that are attached later, as SPDK's do. Both calls are stored as settings of the daemon, and
//! come before all controllers after a restart. `remote` has what they mean for controllers of other hosts.

mod remote;

use super::{Control, Error, Phase, Table};
use crate::config::Subsystem;
use aryk_bdev_nvme::{Config, Location, OnTimeout, WITHOUT_LIMIT};
use aryk_nvme::queue::Timeouts;
use aryk_nvme::spec::feature::Arbitration;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
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
    /// Microseconds after which an I/O command is late: the driver aborts it, and resets the controller if that does not help;
    /// the connections to a target count as lost, unless `action_on_timeout` is `none`. Default: 30 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_us: Option<u64>,
    /// As `timeout_us`, for admin commands. Default: 120 s; for targets 30 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_admin_us: Option<u64>,
    /// Period of the keep-alive timer, for controllers that have one; of targets, 500 to 3600000. Default: none; for
    /// targets 10 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_alive_timeout_ms: Option<u32>,
    /// Attempts after a status that allows another. If `bdev_retry_count` is more, as many as that. Default: 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_retry_count: Option<u32>,
    /// Commands in flight on each reactor. Default: 255; for targets 127.
    #[serde(skip_serializing_if = "Option::is_none")]
    io_queue_requests: Option<u32>,
    /// Seconds for which requests wait for a drive that has vanished, or a target that is lost; -1: for ever. Default: 15; for
    /// targets 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    ctrlr_loss_timeout_sec: Option<i32>,
    /// The reaction to a late I/O command. `none` needs a `timeout_us` that is not 0: SPDK's default options have neither; for
    /// targets, the default of `timeout_us` holds then. Default: `abort`.
    #[serde(skip_serializing_if = "Option::is_none")]
    action_on_timeout: Option<Action>,
    /// Commands that the controller fetches from a queue in its turn, as a power of two, 1 to 6; 7: any number. It is set at each
    /// start of a controller. Default, and for 0: what the controller has by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    arbitration_burst: Option<u32>,
    /// Commands, less one, of each turn of the queues of low priority, 0 to 255: set with `arbitration_burst`, if the controller
    /// has weighted round robin. All queues of the driver have the same priority. Default: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    low_priority_weight: Option<u32>,
    /// As `low_priority_weight`, of medium priority.
    #[serde(skip_serializing_if = "Option::is_none")]
    medium_priority_weight: Option<u32>,
    /// As `low_priority_weight`, of high priority.
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
    /// Attempts after a status that allows another, if they are more than `transport_retry_count`; -1: without limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    bdev_retry_count: Option<i32>,
    /// For targets: the connection counts as lost if what was sent has no acknowledgement for 2 to the power of this in
    /// milliseconds, 1 to 31. Default, and for 0: 30 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_ack_timeout: Option<u8>,
    /// Seconds between two attempts to open a drive that has vanished, or to connect to a target that is lost. Default: a quarter
    /// of a second; for targets 2 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    reconnect_delay_sec: Option<u32>,
    /// Seconds for which requests wait for a drive that has vanished, or a target that is lost, before they fail, until it is
    /// back; at most `ctrlr_loss_timeout_sec`. Default: they wait as long as that says.
    #[serde(skip_serializing_if = "Option::is_none")]
    fast_io_fail_timeout_sec: Option<u32>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    disable_auto_failback: Option<bool>,
    /// Saved, without effect: namespaces without a UUID always get one.
    #[serde(skip_serializing_if = "Option::is_none")]
    generate_uuids: Option<bool>,
    /// Saved, without effect: it is for RDMA.
    #[serde(skip_serializing_if = "Option::is_none")]
    transport_tos: Option<u8>,
    /// Saved, without effect: errors are always counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    nvme_error_stat: Option<bool>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_srq_size: Option<u32>,
    /// Saved, without effect: what paths carry is always counted.
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
    /// The hashes by which this host and a target may prove who they are: `sha256`, `sha384`, `sha512`. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_digests: Option<Vec<String>>,
    /// The groups by which they may: `null`, `ffdhe2048`, `ffdhe3072`, `ffdhe4096`, `ffdhe6144`, `ffdhe8192`. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_dhgroups: Option<Vec<String>>,
    /// Saved, without effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    rdma_umr_per_io: Option<bool>,
    /// The time that an attempt to connect to a target may take, in milliseconds. Default, and for 0: 30 s.
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_connect_timeout_ms: Option<u32>,
    /// Saved, without effect: flushes always reach a drive with a volatile write cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_flush: Option<bool>,
    /// How the paths of disks of other hosts are used, unless `bdev_nvme_attach_controller` says that. Drives have one path.
    #[serde(skip_serializing_if = "Option::is_none")]
    multipath_opts: Option<MultipathOptions>,
}

/// How the paths of a disk are used.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MultipathOptions {
    /// Default: `active_passive`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) policy: Option<PathPolicy>,
    /// Only with `active_active`. Default: `round_robin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) selector: Option<PathSelector>,
    /// Requests that a path takes before the next one; only with `round_robin`. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) min_io: Option<u32>,
}

/// How many paths carry I/O.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "NvmePathPolicy")]
pub(super) enum PathPolicy {
    ActivePassive,
    ActiveActive,
}

/// Which path the next request takes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "NvmePathSelector")]
pub(super) enum PathSelector {
    RoundRobin,
    QueueDepth,
}

/// The reaction to a late command. `none`: the log gets a line, and the request waits on. `reset`: the controller is reset.
/// `abort`: the command is aborted; if that does not help, the controller is reset.
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

/// The default of attempts.
const RETRIES: u16 = 4;

/// Attempts, but for [`WITHOUT_LIMIT`].
fn retries(count: u32) -> u16 {
    u16::try_from(count).unwrap_or(WITHOUT_LIMIT).min(WITHOUT_LIMIT - 1)
}

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
        if self.bdev_retry_count.is_some_and(|count| count < -1) {
            return Err(Error::invalid("`bdev_retry_count` must be -1, 0 or more"));
        }
        if self.arbitration_burst.is_some_and(|burst| burst > 7) {
            return Err(Error::invalid("`arbitration_burst` must be 0 to 7"));
        }
        let weights = [self.low_priority_weight, self.medium_priority_weight, self.high_priority_weight];
        if weights.into_iter().flatten().any(|weight| weight > 255) {
            return Err(Error::invalid("the weight of a priority must be 0 to 255"));
        }
        if self.transport_ack_timeout.is_some_and(|exponent| exponent > 31) {
            return Err(Error::invalid("`transport_ack_timeout` must be 0 to 31"));
        }
        self.allowed()?;
        let mut config = Config::new("", Location::Socket(PathBuf::new()));
        self.apply(&mut config);
        check_times(&config)
    }

    /// Attempts after a status that allows another, if the options say that: the larger count.
    fn retries(&self) -> Option<u16> {
        let of_bdev = self.bdev_retry_count.map(|count| u32::try_from(count).map_or(WITHOUT_LIMIT, retries));
        let of_transport = self.transport_retry_count.map(retries).or(of_bdev.map(|_| RETRIES));
        of_transport.max(of_bdev)
    }

    /// Sets what the options say about a drive that is to be attached.
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
        if let Some(retries) = self.retries() {
            config.retries = retries;
        }
        match self.action_on_timeout {
            Some(Action::None) if self.timeout_us.is_some_and(|us| us > 0) => {
                config.on_timeout = OnTimeout::Log
            }
            Some(Action::Reset) => config.on_timeout = OnTimeout::Reset,
            Some(Action::Abort | Action::None) | None => {}
        }
        let byte = |value: Option<u32>| value.unwrap_or_default().to_le_bytes()[0];
        config.options.arbitration = Some(Arbitration {
            burst: byte(self.arbitration_burst),
            low: byte(self.low_priority_weight),
            medium: byte(self.medium_priority_weight),
            high: byte(self.high_priority_weight),
        })
        .filter(|arbitration| arbitration.burst > 0);
        if let Some(depth) = self.io_queue_requests.filter(|depth| *depth > 0) {
            config.depth = u16::try_from(depth).unwrap_or(u16::MAX);
        }
        match self.ctrlr_loss_timeout_sec.map(u64::try_from) {
            None | Some(Ok(0)) => {}
            Some(Ok(seconds)) => config.grace = Duration::from_secs(seconds),
            Some(Err(_)) => config.grace = super::attach::FOR_EVER,
        }
        apply_times(self.fast_io_fail_timeout_sec, self.reconnect_delay_sec, config);
    }
}

/// Sets the times of a drive that has vanished, in seconds, as far as they are given. 0 stands for the default.
pub(super) fn apply_times(fast_fail: Option<u32>, reconnect: Option<u32>, config: &mut Config) {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    if let Some(after) = fast_fail {
        config.fast_fail = (after > 0).then(|| seconds(after));
    }
    match reconnect {
        None => {}
        Some(0) => config.return_interval = Config::RETURN_INTERVAL,
        Some(interval) => config.return_interval = seconds(interval),
    }
}

/// Checks the times of a drive that has vanished, by SPDK's rules.
pub(super) fn check_times(config: &Config) -> Result<(), Error> {
    let (is_given, interval) = (config.return_interval != Config::RETURN_INTERVAL, config.return_interval);
    let refusal = if config.fast_fail.is_some_and(|after| after > config.grace) {
        "`fast_io_fail_timeout_sec` must not be more than `ctrlr_loss_timeout_sec`"
    } else if is_given && interval > config.grace {
        "`reconnect_delay_sec` must not be more than `ctrlr_loss_timeout_sec`"
    } else if is_given && config.fast_fail.is_some_and(|after| interval > after) {
        "`reconnect_delay_sec` must not be more than `fast_io_fail_timeout_sec`"
    } else {
        return Ok(());
    };
    Err(Error::invalid(refusal))
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
    /// Microseconds between two looks at the host's drives, 0 to 10,000,000. Default, and for 0: 100,000. Where the daemon
    /// receives the kernel's events, it looks after each event, and every 5 s, or once in this period if that is longer.
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
        assert_eq!((set.retries, set.depth, set.grace), (300, 64, Duration::from_secs(3)));
        assert_eq!(set.options.keep_alive, SECOND / 100);
    }

    #[test]
    fn late_commands_attempts_and_arbitration_follow_the_options() {
        let of = |options| config(options).on_timeout;
        assert_eq!(of(json!({"action_on_timeout": "reset"})), OnTimeout::Reset);
        assert_eq!(of(json!({"action_on_timeout": "abort"})), OnTimeout::Abort);
        assert_eq!(of(json!({"action_on_timeout": "none"})), OnTimeout::Abort, "without a time limit");
        assert_eq!(of(json!({"action_on_timeout": "none", "timeout_us": 1_000_000})), OnTimeout::Log);
        let of = |options| config(options).retries;
        assert_eq!(of(json!({"bdev_retry_count": 9})), 9);
        assert_eq!(of(json!({"bdev_retry_count": 2, "transport_retry_count": 0})), 2);
        assert_eq!(of(json!({"bdev_retry_count": -1})), WITHOUT_LIMIT);
        assert_eq!(of(json!({"bdev_retry_count": i32::MAX})), WITHOUT_LIMIT - 1);
        let of = |options| config(options).options.arbitration;
        let weights = json!({"arbitration_burst": 3, "low_priority_weight": 1, "high_priority_weight": 255});
        assert_eq!(of(weights), Some(Arbitration { burst: 3, low: 1, medium: 0, high: 255 }));
        assert_eq!(of(json!({"low_priority_weight": 1})), None);
        for wrong in [
            json!({"arbitration_burst": 8}),
            json!({"medium_priority_weight": 256}),
            json!({"bdev_retry_count": -2}),
        ] {
            let options: Options = serde_json::from_value(wrong).unwrap();
            assert_eq!(options.check().unwrap_err().code(), -22);
        }
    }

    #[test]
    fn spdks_defaults_are_ours() {
        let spdk = config(json!({"timeout_us": 0, "timeout_admin_us": 0, "transport_retry_count": 4,
            "io_queue_requests": 0, "ctrlr_loss_timeout_sec": 0, "action_on_timeout": "none", "bdev_retry_count": 3,
            "arbitration_burst": 0, "low_priority_weight": 0, "medium_priority_weight": 0, "high_priority_weight": 0}));
        let ours = config(json!({}));
        assert_eq!(format!("{spdk:?}"), format!("{ours:?}"));
        assert_eq!(config(json!({"ctrlr_loss_timeout_sec": -1})).grace, super::super::attach::FOR_EVER);
    }

    #[test]
    fn the_times_of_a_drive_that_has_vanished_follow_spdks_rules() {
        let set = config(
            json!({"ctrlr_loss_timeout_sec": 30, "fast_io_fail_timeout_sec": 5, "reconnect_delay_sec": 2}),
        );
        let seconds = Duration::from_secs;
        assert_eq!((set.fast_fail, set.return_interval), (Some(seconds(5)), seconds(2)));
        let unset = config(json!({"fast_io_fail_timeout_sec": 0, "reconnect_delay_sec": 0}));
        assert_eq!((unset.fast_fail, unset.return_interval), (None, Config::RETURN_INTERVAL));
        assert_eq!(
            config(json!({"fast_io_fail_timeout_sec": 15})).fast_fail,
            Some(seconds(15)),
            "the default"
        );
        assert!(
            config(json!({"ctrlr_loss_timeout_sec": -1, "fast_io_fail_timeout_sec": 99999}))
                .fast_fail
                .is_some()
        );
        for refused in [
            json!({"fast_io_fail_timeout_sec": 16}),
            json!({"ctrlr_loss_timeout_sec": 3, "fast_io_fail_timeout_sec": 4}),
            json!({"ctrlr_loss_timeout_sec": 3, "reconnect_delay_sec": 4}),
            json!({"fast_io_fail_timeout_sec": 3, "reconnect_delay_sec": 4}),
        ] {
            let options: Options = serde_json::from_value(refused.clone()).unwrap();
            assert_eq!(options.check().unwrap_err().code(), -22, "{refused}");
        }
    }
}
