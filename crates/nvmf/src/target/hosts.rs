//! The hosts that may connect to the subsystems of a target. Control context.

use super::{Error, Target};
use crate::subsystem::HostKeys;
use crate::tls::TlsKey;
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
}
