//! Limits of hosts: how many requests and bytes per second one host may transfer, by all its queues and all disks of a subsystem.
//! Control context.

use aryk_bdev::{OpenerQos, RateLimits, RateLimitsError};
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_reactor::{Clock, Nanos};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Hosts that have gone and are remembered, because they still pay for what they have transferred.
const DEBTORS_MAX: usize = 1024;

/// The limits of a subsystem's hosts.
#[derive(Clone, Debug, Default)]
pub struct HostLimits {
    /// Those of each host that has none of its own.
    pub each: RateLimits,
    /// Those of hosts by name.
    pub named: BTreeMap<Nqn, RateLimits>,
}

impl HostLimits {
    /// The limits of a host.
    pub fn of(&self, host: &Nqn) -> RateLimits {
        self.named.get(host).copied().unwrap_or(self.each)
    }

    /// Sets the limits of a host, or of each host that has none of its own. A host whose limits are removed has none of its own.
    fn set(&mut self, host: Option<&Nqn>, limits: RateLimits) {
        match host {
            None => self.each = limits,
            Some(host) if limits.is_unlimited() => drop(self.named.remove(host)),
            Some(host) => drop(self.named.insert(host.clone(), limits)),
        }
    }
}

/// The limits, and the buckets of the hosts that are connected, or still pay for what they have transferred: a host that connects
/// again has the debt that it left with.
#[derive(Debug, Default)]
pub(crate) struct Limited {
    limits: HostLimits,
    /// By host, which may have several controllers.
    known: BTreeMap<Nqn, Arc<OpenerQos>>,
}

fn now() -> Nanos {
    Clock::Monotonic.now()
}

impl Limited {
    pub const fn limits(&self) -> &HostLimits {
        &self.limits
    }

    /// The buckets of a host that connects.
    pub fn connect(&mut self, host: &Nqn) -> Arc<OpenerQos> {
        if let Some(qos) = self.known.get(host) {
            return Arc::clone(qos);
        }
        self.forget(now());
        let qos = Arc::<OpenerQos>::default();
        qos.set(self.limits.of(host), now()).expect("limits are checked before they are stored");
        self.known.insert(host.clone(), Arc::clone(&qos));
        qos
    }

    /// Forgets the hosts that have gone and owe nothing; beyond [`DEBTORS_MAX`], also the one that owes least.
    fn forget(&mut self, now: Nanos) {
        let has_gone = |qos: &Arc<OpenerQos>| Arc::strong_count(qos) == 1;
        self.known.retain(|_, qos| !has_gone(qos) || !qos.debt(now).is_zero());
        let debtors = || self.known.iter().filter(|(_, qos)| has_gone(qos));
        if debtors().count() >= DEBTORS_MAX
            && let Some((host, _)) = debtors().min_by_key(|(_, qos)| qos.debt(now))
        {
            let host = host.clone();
            self.known.remove(&host);
        }
    }

    /// Sets the limits of a host, or of each host that has none of its own. The queues must learn of that.
    pub fn set(&mut self, host: Option<&Nqn>, limits: RateLimits) -> Result<(), RateLimitsError> {
        OpenerQos::default().set(limits, now())?;
        self.limits.set(host, limits);
        for (host, qos) in &self.known {
            let limits = self.limits.of(host);
            if qos.limits() != limits {
                qos.set(limits, now())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ios(ios: u64) -> RateLimits {
        RateLimits { ios, ..RateLimits::default() }
    }

    #[test]
    fn a_host_has_its_own_limits_or_those_of_each() {
        let [a, b, c]: [Nqn; 3] =
            ["a", "b", "c"].map(|name| format!("nqn.2016-06.io.spdk:{name}").parse().expect("a name"));
        let mut limited = Limited::default();
        let (of_a, of_b) = (limited.connect(&a), limited.connect(&b));
        assert!(Arc::ptr_eq(&of_a, &limited.connect(&a)), "its controllers share the limits");
        let seen = || (of_a.limits().ios, of_b.limits().ios);
        for (host, limit, expected) in [
            (None, 100, (100, 100)),
            (Some(&a), 7, (7, 100)),
            (None, 200, (7, 200)),
            (Some(&a), 0, (200, 200)),
            (Some(&b), 9, (200, 9)),
            (None, 0, (0, 9)),
        ] {
            assert!(limited.set(host, ios(limit)).is_ok());
            assert_eq!(seen(), expected);
        }
        assert!(limited.set(Some(&a), ios(u64::MAX)).is_err());
        assert_eq!((seen(), limited.limits().of(&a)), ((0, 9), ios(0)), "nothing has changed");
        drop((of_a, of_b));
        assert_eq!(limited.connect(&b).limits(), ios(9));
        let _of_c = limited.connect(&c);
        assert_eq!(limited.known.len(), 1, "hosts that have gone are forgotten");
    }
}
