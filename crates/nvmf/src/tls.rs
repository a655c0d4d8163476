//! Keys of TLS: what a host and a subsystem share, and which connections a host may use. Control context; nothing here waits.
//!
//! A host with a key uses TLS, with the key of its name and the subsystem's: Connect is refused on a plain connection, and on one
//! with the key of another host. The discovery service takes the keys of all subsystems that allow the host.

use crate::association::Way;
use crate::target::Inner;
use aryk_log_limit::limited;
use aryk_nvme_fabrics::connect::{ConnectData, Refusal};
use aryk_nvme_fabrics::nqn::{self, Nqn};
use aryk_nvme_fabrics::psk::{self, ConfiguredPsk, PskError, TlsPsk, Version};
use aryk_nvme_fabrics::status;
use aryk_tls::{Hash, Psk};

/// The key of a host at a subsystem.
#[derive(Clone, Debug)]
pub struct TlsKey {
    /// Its name, for reports.
    pub name: String,
    /// By each identity that the host may use.
    psks: Vec<Psk>,
}

impl TlsKey {
    /// The key with which `host` connects to `subsystem`, and to the discovery service.
    ///
    /// # Errors
    /// [`PskError::NameWithSpace`].
    pub fn new(name: String, key: &ConfiguredPsk, host: &Nqn, subsystem: &Nqn) -> Result<Self, PskError> {
        let discovery: Nqn = nqn::DISCOVERY.parse().expect("a name of the specification");
        let mut psks = Vec::new();
        for subsystem in [subsystem, &discovery] {
            for version in Version::ALL {
                match key.of_tls(version, host, subsystem) {
                    Ok(derived) => psks.push(usable(&derived)),
                    // Hosts have the other version.
                    Err(PskError::NamesTooLong) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(Self { name, psks })
    }

    pub(crate) fn psks(&self) -> &[Psk] {
        &self.psks
    }
}

/// A key as `aryk_tls` takes it.
fn usable(TlsPsk { identity, hash, secret }: &TlsPsk) -> Psk {
    let hash = match hash {
        psk::Hash::Sha256 => Hash::Sha256,
        psk::Hash::Sha384 => Hash::Sha384,
    };
    Psk::new(identity, secret, hash).expect("an identity is not empty, and a derived key is long enough")
}

impl Inner {
    /// Checks that a host comes through the connection that it must use. `identity` is that of the connection's key, if it uses
    /// TLS.
    pub fn check_channel(&self, data: &ConnectData, identity: Option<&str>, way: Way) -> Result<(), Refusal> {
        let is_allowed = match identity.map(psk::names_of) {
            Some(Some((host, subsystem))) => {
                host == data.host.as_str()
                    && (subsystem == data.subsystem.as_str() || data.subsystem.is_discovery())
            }
            Some(None) => false,
            None => {
                let mut state = self.state.borrow_mut();
                let named = state.subsystem(&data.subsystem).map(|of| of.hosts.named.get(&data.host));
                named.flatten().is_none_or(|host| host.tls.is_none())
            }
        };
        if is_allowed {
            return Ok(());
        }
        let problem = match identity {
            Some(_) => "a host uses the TLS key of another host or of another subsystem",
            None => "a host with a TLS key does not use TLS",
        };
        limited!(self.lines, warn, peer = %way.peer, host = %data.host, subsystem = %data.subsystem, "{problem}: it is refused");
        Err(Refusal::Code(status::INVALID_HOST))
    }
}
