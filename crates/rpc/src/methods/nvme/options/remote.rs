//! What `bdev_nvme_set_options` means for controllers of other hosts. Control context.

use super::{Action, Options};
use crate::Error;
use crate::methods::nvme::paths;
use aryk_bdev_nvme::fabrics::RemoteConfig;
use aryk_nvme_fabrics::chap::{Allowed, Group, Hash};
use std::time::Duration;

/// The shortest keep-alive timeout of targets, and the longest: changes of a lost connection wait for twice that, and controllers
/// of `arykd` refuse more.
const KEEP_ALIVE_MIN: Duration = Duration::from_millis(500);
const KEEP_ALIVE_MAX: Duration = Duration::from_secs(3600);

/// Those of `all` that a parameter names, in the order of `all`; all without the parameter.
fn chosen<T: Copy>(param: &str, all: &[(&str, T)], names: Option<&[String]>) -> Result<Vec<T>, Error> {
    let Some(names) = names else { return Ok(all.iter().map(|(_, one)| *one).collect()) };
    let unknown = names.iter().find(|name| all.iter().all(|(known, _)| known != name));
    if let Some(unknown) = unknown {
        return Err(Error::invalid(format!("`{param}` has no '{unknown}'")));
    }
    if names.is_empty() {
        return Err(Error::invalid(format!("`{param}` must not be empty")));
    }
    let is_named = |(known, _): &&(&str, T)| names.iter().any(|name| name == known);
    Ok(all.iter().filter(is_named).map(|(_, one)| *one).collect())
}

impl Options {
    /// The hashes and groups by which this host and a target may prove who they are.
    pub(super) fn allowed(&self) -> Result<Allowed, Error> {
        let hashes = Hash::ALL.map(|hash| (hash.name(), hash));
        let groups = Group::ALL.map(|group| (group.name(), group));
        Ok(Allowed {
            hashes: chosen("dhchap_digests", &hashes, self.dhchap_digests.as_deref())?,
            groups: chosen("dhchap_dhgroups", &groups, self.dhchap_dhgroups.as_deref())?,
        })
    }

    /// Sets what the options, which are valid, say about a controller of another host that is to be attached.
    pub(in crate::methods::nvme) fn apply_to_remote(&self, config: &mut RemoteConfig) {
        let seconds = |seconds: u32| Duration::from_secs(seconds.into());
        let more = |value: Option<u32>| value.filter(|value| *value > 0);
        if let Some(us) =
            self.timeout_us.filter(|us| *us > 0 && !matches!(self.action_on_timeout, Some(Action::None)))
        {
            config.patience = Duration::from_micros(us);
        }
        if let Some(us) = self.timeout_admin_us.filter(|us| *us > 0) {
            config.admin_patience = Duration::from_micros(us);
        }
        if let Some(ms) = more(self.tcp_connect_timeout_ms) {
            config.connect_patience = Duration::from_millis(ms.into());
        }
        if let Some(exponent) = self.transport_ack_timeout.filter(|exponent| *exponent > 0) {
            config.acknowledge_patience = Duration::from_millis(1 << exponent.min(31));
        }
        if let Some(ms) = more(self.keep_alive_timeout_ms) {
            config.keep_alive = Duration::from_millis(ms.into()).clamp(KEEP_ALIVE_MIN, KEEP_ALIVE_MAX);
        }
        if let Some(retries) = self.retries() {
            config.retries = retries;
        }
        if let Some(depth) = more(self.io_queue_requests) {
            config.depth = u16::try_from(depth).unwrap_or(u16::MAX);
        }
        match self.ctrlr_loss_timeout_sec.map(u64::try_from) {
            None | Some(Ok(0)) => {}
            Some(Ok(seconds)) => config.loss_timeout = Some(Duration::from_secs(seconds)),
            Some(Err(_)) => config.loss_timeout = None,
        }
        config.fast_fail = more(self.fast_io_fail_timeout_sec).map(seconds);
        if let Some(delay) = more(self.reconnect_delay_sec) {
            config.reconnect_delay = seconds(delay);
        }
        if let Some(options) = &self.multipath_opts {
            config.policy = paths::policy(options);
        }
        config.allowed = self.allowed().expect("options are checked when they are set");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_bdev_nvme::WITHOUT_LIMIT;
    use aryk_bdev_nvme::fabrics::Policy;
    use serde_json::{Value, json};

    fn options(value: Value) -> Options {
        serde_json::from_value(value).unwrap()
    }

    fn remote() -> RemoteConfig {
        let (subsystem, host) =
            ("nqn.2016-06.io.spdk:a".parse().unwrap(), "nqn.2016-06.io.spdk:h".parse().unwrap());
        let config = RemoteConfig::new("a", "192.0.2.1:4420".parse().unwrap(), subsystem, host, [1; 16]);
        RemoteConfig { incarnation: [2; 16], ..config }
    }

    #[test]
    fn spdks_defaults_leave_those_of_targets() {
        let of_spdk = options(json!({
            "action_on_timeout": "none", "timeout_us": 0, "timeout_admin_us": 0, "keep_alive_timeout_ms": 10000,
            "io_queue_requests": 0, "transport_retry_count": 4, "bdev_retry_count": 3, "transport_ack_timeout": 0,
            "ctrlr_loss_timeout_sec": 0, "reconnect_delay_sec": 0, "fast_io_fail_timeout_sec": 0,
            "dhchap_digests": ["sha256", "sha384", "sha512"],
            "dhchap_dhgroups": ["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"],
            "tcp_connect_timeout_ms": 0, "multipath_opts": {"policy": "active_passive"},
        }));
        of_spdk.check().unwrap();
        for options in [of_spdk, Options::default()] {
            let mut config = remote();
            options.apply_to_remote(&mut config);
            assert_eq!(format!("{config:?}"), format!("{:?}", remote()));
        }
    }

    #[test]
    fn the_options_of_targets_have_an_effect() {
        let all = options(json!({
            "action_on_timeout": "reset", "timeout_us": 20_000_000, "timeout_admin_us": 5_000_000,
            "keep_alive_timeout_ms": 1, "io_queue_requests": 64, "transport_retry_count": 1, "bdev_retry_count": -1,
            "transport_ack_timeout": 12, "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 3,
            "fast_io_fail_timeout_sec": 9, "dhchap_digests": ["sha256", "sha512"], "dhchap_dhgroups": ["ffdhe8192"],
            "tcp_connect_timeout_ms": 1500, "multipath_opts": {"policy": "active_active", "selector": "queue_depth"},
        }));
        all.check().unwrap();
        let mut config = remote();
        all.apply_to_remote(&mut config);
        let times = [
            config.patience,
            config.admin_patience,
            config.connect_patience,
            config.acknowledge_patience,
            config.keep_alive,
            config.reconnect_delay,
        ];
        assert_eq!(times.map(|time| time.as_millis()), [20_000, 5_000, 1_500, 4_096, 500, 3_000]);
        assert_eq!((config.depth, config.retries), (64, WITHOUT_LIMIT));
        assert_eq!((config.loss_timeout, config.fast_fail), (None, Some(Duration::from_secs(9))));
        assert_eq!(config.allowed.hashes, [Hash::Sha512, Hash::Sha256]);
        assert_eq!(config.allowed.groups, [Group::Ffdhe8192]);
        assert_eq!(config.policy, Policy::QueueDepth);
        let mut config = remote();
        options(json!({"keep_alive_timeout_ms": u32::MAX})).apply_to_remote(&mut config);
        assert_eq!(config.keep_alive, Duration::from_secs(3600));
        // A target cannot be waited for without end.
        let patient = options(json!({"action_on_timeout": "none", "timeout_us": 20_000_000}));
        let mut config = remote();
        patient.apply_to_remote(&mut config);
        assert_eq!(config.patience, remote().patience);
    }

    #[test]
    fn wrong_options_of_targets_are_refused() {
        for wrong in [
            json!({"transport_ack_timeout": 32}),
            json!({"dhchap_digests": ["md5"]}),
            json!({"dhchap_digests": []}),
            json!({"dhchap_dhgroups": ["ffdhe1024"]}),
        ] {
            assert!(options(wrong.clone()).check().is_err(), "{wrong}");
        }
    }
}
