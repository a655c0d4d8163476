//! The hosts that may connect to the subsystems of a target, and how much each may transfer. Control context.

use super::{Error, Target};
use crate::association::Live;
use crate::queue::IoQueue;
use crate::subsystem::HostKeys;
use crate::tls::TlsKey;
use aryk_bdev::RateLimits;
use aryk_nvme_fabrics::nqn::Nqn;
use std::sync::Arc;

impl Target {
    /// Allows a host to connect. With keys, it must authenticate with them from now on; what is connected stays so.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn add_host(&self, name: &str, host: Nqn, keys: Option<HostKeys>) -> Result<(), Error> {
        self.with(name, |subsystem| subsystem.hosts.named.entry(host).or_default().keys = keys)?;
        self.0.state.borrow_mut().show_discovery();
        Ok(())
    }

    /// Allows a host to connect, through listeners with TLS only. What is connected stays so.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn set_tls_key(&self, name: &str, host: Nqn, key: TlsKey) -> Result<(), Error> {
        let psks = key.psks().to_vec();
        let replaced =
            self.with(name, |subsystem| subsystem.hosts.named.entry(host).or_default().tls.replace(key))?;
        let mut state = self.0.state.borrow_mut();
        match replaced {
            Some(_) => state.gather_psks(),
            None => Arc::make_mut(&mut state.psks)
                .extend(psks.into_iter().map(|psk| (psk.identity().into(), psk))),
        }
        state.show_discovery();
        Ok(())
    }

    /// Takes a host from those that may connect. Unless any may, it is disconnected; returns when its last request has ended.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn remove_host(&self, name: &str, host: &Nqn) -> Result<(), Error> {
        self.with(name, |subsystem| {
            subsystem.hosts.named.remove(host);
            subsystem.end_disallowed();
        })?;
        self.0.state.borrow_mut().gather_psks();
        self.until_ended(name).await;
        self.0.state.borrow_mut().show_discovery();
        Ok(())
    }

    /// Sets whether any host may connect. If not, the others than the named ones are disconnected.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn allow_any_host(&self, name: &str, any: bool) -> Result<(), Error> {
        self.with(name, |subsystem| {
            subsystem.hosts.any = any;
            subsystem.end_disallowed();
        })?;
        self.until_ended(name).await;
        self.0.state.borrow_mut().show_discovery();
        Ok(())
    }

    /// Sets how much a host may transfer, by all its queues and all disks of a subsystem; without a host, how much each host may
    /// that has no limits of its own. Requests that wait follow when the call returns.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Limits`].
    pub async fn limit_hosts(&self, name: &str, host: Option<&Nqn>, limits: RateLimits) -> Result<(), Error> {
        let nqn = self.with(name, |subsystem| {
            subsystem.limited.set(host, limits)?;
            Ok::<_, Error>(subsystem.made_of.nqn.clone())
        })??;
        let is_meant = |live: &Live| host.is_none_or(|host| live.controller.association().host == *host);
        for (_, queue) in self.queues(&nqn, is_meant) {
            // A queue that has ended needs no limits.
            let _ = queue.call(IoQueue::apply_limits).await;
        }
        Ok(())
    }
}
