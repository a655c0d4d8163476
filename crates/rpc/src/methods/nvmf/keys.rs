//! The secrets with which hosts and subsystems prove who they are, and the keys of TLS, by their names in the keyring. Control
//! context.

use super::object::host_name;
use super::parse_nqn;
use super::subsystem::OfSubsystem;
use crate::config::Subsystem;
use crate::methods::{Control, Error};
use aryk_nvme_fabrics::chap::{Secret, Secrets};
use aryk_nvme_fabrics::nqn::Nqn;
use aryk_nvme_fabrics::psk::ConfiguredPsk;
use aryk_nvmf::{Address, Channel, HostKeys, ListenerInfo, Target, TlsKey};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;

/// Names of secrets in the keyring.
#[derive(Clone, Copy, Debug)]
pub(in crate::methods) struct KeyNames<'a> {
    pub key: Option<&'a str>,
    pub controller_key: Option<&'a str>,
}

impl KeyNames<'_> {
    /// Reads the secrets. `None`: the host need not authenticate.
    pub async fn read(&self, control: &Control) -> Result<Option<HostKeys>, Error> {
        let Some(key) = self.key else {
            return match self.controller_key {
                Some(_) => Err(Error::invalid("dhchap_ctrlr_key needs a dhchap_key")),
                None => Ok(None),
            };
        };
        let read = async |name: &str| {
            let secret = Secret::parse(&control.keyring.secret(name).await?);
            secret.map_err(|error| Error::invalid(format!("key '{name}': {error}")))
        };
        let host = read(key).await?;
        let controller = match self.controller_key {
            Some(name) => Some(read(name).await?),
            None => None,
        };
        let secrets = Arc::new(Secrets { host, controller });
        let controller_key = self.controller_key.map(str::to_owned);
        Ok(Some(HostKeys { secrets, key: key.to_owned(), controller_key }))
    }
}

/// Reads the key of TLS with this name in the keyring.
pub(in crate::methods) async fn read_psk(control: &Control, name: &str) -> Result<ConfiguredPsk, Error> {
    let psk = ConfiguredPsk::parse(&control.keyring.secret(name).await?);
    psk.map_err(|error| Error::invalid(format!("key '{name}': {error}")))
}

/// As [`read_psk`], for a host at a subsystem.
pub(super) async fn read_tls_key(
    control: &Control,
    name: &str,
    host: &Nqn,
    nqn: &str,
) -> Result<TlsKey, Error> {
    let psk = read_psk(control, name).await?;
    let key = TlsKey::new(name.to_owned(), &psk, host, &parse_nqn(nqn)?);
    key.map_err(|error| Error::invalid(error.to_string()))
}

/// Whether hosts reach a subsystem over a network without having proved who they are.
pub(super) fn is_open(target: &Target, nqn: &str) -> bool {
    target.find(nqn).is_ok_and(|info| {
        let is_plain = |(address, listener): (&Address, &ListenerInfo)| {
            listener.channel == Channel::Plain && !address.socket.ip().is_loopback()
        };
        let is_remote = info.listeners.iter().any(is_plain);
        is_remote && !info.hosts.are_authenticated()
    })
}

/// Says so if hosts reach a subsystem in that way, unless they did before.
pub(super) fn warn_if_open(target: &Target, nqn: &str, was_open: bool) {
    if !was_open && is_open(target, nqn) {
        tracing::warn!(
            subsystem = nqn,
            "disks are served to a network without authentication and encryption: names of hosts can be forged, and data can \
             be read and changed on its way"
        );
    }
}

/// Parameters of `nvmf_subsystem_set_keys`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SetKeys {
    /// Name of the subsystem.
    nqn: String,
    /// Name of a host that may connect.
    host: String,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
    /// Name of the secret in the keyring by which the host proves who it is. Default: it need not.
    dhchap_key: Option<String>,
    /// Name of the secret by which the subsystem proves who it is, if the host asks for that; needs `dhchap_key`.
    dhchap_ctrlr_key: Option<String>,
}

pub(super) async fn set_keys(control: &Control, p: SetKeys) -> Result<bool, Error> {
    let SetKeys { nqn, host, tgt_name, dhchap_key, dhchap_ctrlr_key } = p;
    let parsed = parse_nqn(&host)?;
    let names = KeyNames { key: dhchap_key.as_deref(), controller_key: dhchap_ctrlr_key.as_deref() };
    let keys = names.read(control).await?;
    let note = host_name(tgt_name.as_deref(), &nqn, &host);
    let of = OfSubsystem { nqn, tgt_name };
    if !super::show::find(control, &of)?.hosts.named.contains_key(&parsed) {
        return Err(Error::errno(Errno::NOENT, format!("the subsystem does not list the host {parsed}")));
    }
    let named = control.nvmf.find(of.tgt_name.as_deref())?;
    let was_open = is_open(&named.target, &of.nqn);
    named.target.add_host(&of.nqn, parsed, keys)?;
    warn_if_open(&named.target, &of.nqn, was_open);
    control.config.changed(Subsystem::Nvmf, &note, "dhchap_key", dhchap_key);
    control.config.changed(Subsystem::Nvmf, &note, "dhchap_ctrlr_key", dhchap_ctrlr_key);
    Ok(true)
}
