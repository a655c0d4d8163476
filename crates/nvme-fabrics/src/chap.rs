//! DH-HMAC-CHAP: a host and a controller prove to each other that they know secrets, before a queue takes other commands.
//! NVMe 2.0 §8.13. Any context that may compute for milliseconds: not a reactor.
//!
//! [`Controller`] and [`Host`] are the two sides. Messages go in and come out; the owners carry them by the commands
//! Authentication Send and Authentication Receive.
//!
//! | message | sender | content |
//! | --- | --- | --- |
//! | Negotiate | host | the hashes and groups that the host has |
//! | Challenge | controller | its choice, a random value, and its Diffie-Hellman value |
//! | Reply | host | proof that it knows its secret; a random value, if the controller is to prove the same |
//! | Success1 | controller | that proof |
//! | Success2 | host | the end, if there was such a proof |
//!
//! **Invariants.** No message has more than [`MESSAGE_MAX`] bytes. Secrets and what is derived from them are zeroed when they are
//! freed, and none is printed.

mod controller;
mod group;
mod host;
mod message;
mod secret;

pub use controller::{Controller, Progress};
pub use group::Group;
pub use host::{Action, Host};
pub use secret::{Secret, SecretError};

use crate::nqn::Nqn;
use aryk_secrets::SecretBytes;
use ring::rand::{SecureRandom, SystemRandom};
use ring::{digest, hmac};
use std::sync::Arc;

/// SECP and SPSP of the commands that carry messages.
pub const PROTOCOL: u32 = 0x00e9_0101;
/// Bytes of the longest message.
pub const MESSAGE_MAX: usize = 4096;

/// The hash of an HMAC, by its identifier on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Hash {
    /// SHA-256.
    Sha256 = 1,
    /// SHA-384.
    Sha384 = 2,
    /// SHA-512.
    Sha512 = 3,
}

impl Hash {
    /// All hashes, the longest first.
    pub const ALL: [Self; 3] = [Self::Sha512, Self::Sha384, Self::Sha256];

    /// Its name, as in SPDK's options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }

    /// The hash with this identifier.
    fn with_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| *hash as u8 == id)
    }

    /// Bytes of a value.
    pub const fn value_len(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    fn hmac(self) -> hmac::Algorithm {
        match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        }
    }

    fn digest(self) -> &'static digest::Algorithm {
        match self {
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        }
    }
}

/// Why an authentication fails, by its explanation code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Failure {
    /// The other side does not know the secret, or does not want to go on.
    #[error("authentication failed")]
    Failed = 1,
    /// No common protocol.
    #[error("no common authentication protocol")]
    Protocol = 2,
    /// A secure channel is wanted, or not.
    #[error("secure channel concatenation is not supported")]
    Concatenation = 3,
    /// No common hash.
    #[error("no common hash")]
    Hash = 4,
    /// No common group.
    #[error("no common Diffie-Hellman group")]
    Group = 5,
    /// A message is malformed.
    #[error("a message has invalid content")]
    Payload = 6,
    /// A message came at the wrong time.
    #[error("a message was not expected")]
    Message = 7,
}

impl Failure {
    /// The failure with this code. Codes that are not known count as [`Failure::Failed`].
    fn with_code(code: u8) -> Self {
        let known =
            [Self::Protocol, Self::Concatenation, Self::Hash, Self::Group, Self::Payload, Self::Message];
        known.into_iter().find(|failure| *failure as u8 == code).unwrap_or(Self::Failed)
    }
}

/// The names of both sides, which the proofs contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parties {
    /// HOSTNQN.
    pub host: Nqn,
    /// SUBNQN.
    pub subsystem: Nqn,
}

/// The secrets of a host and a subsystem.
#[derive(Debug)]
pub struct Secrets {
    /// What the host proves to know.
    pub host: Secret,
    /// What the controller proves to know, if the host asks for it.
    pub controller: Option<Secret>,
}

/// What a side accepts, the best first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Hashes.
    pub hashes: Vec<Hash>,
    /// Groups.
    pub groups: Vec<Group>,
}

impl Default for Allowed {
    /// All of them. Larger groups than FFDHE 3072 come later: they take much longer, and SHA-256 is not stronger.
    fn default() -> Self {
        Self { hashes: Hash::ALL.to_vec(), groups: Group::ALL.to_vec() }
    }
}

/// A side of an authentication.
#[derive(Debug)]
struct Session {
    secrets: Arc<Secrets>,
    parties: Parties,
    transaction: u16,
    hash: Hash,
    /// The hash of the shared value of the group; `None` without a group.
    shared: Option<SecretBytes>,
}

impl Session {
    /// Takes the value on which both sides have agreed.
    fn share(&mut self, value: &[u8]) {
        let hashed = digest::digest(self.hash.digest(), value);
        self.shared = Some(SecretBytes::copy_of(hashed.as_ref()));
    }

    /// What a proof is computed over: a challenge with its sequence number, and the names of both sides, the prover first.
    fn proved(&self, challenge: &[u8], sequence: u32, role: &str, [first, second]: [&Nqn; 2]) -> Vec<u8> {
        let mut bytes = match &self.shared {
            Some(shared) => {
                let key = hmac::Key::new(self.hash.hmac(), shared);
                hmac::sign(&key, challenge).as_ref().to_vec()
            }
            None => challenge.to_vec(),
        };
        bytes.extend_from_slice(&sequence.to_le_bytes());
        bytes.extend_from_slice(&self.transaction.to_le_bytes());
        // SC_C: no secure channel.
        bytes.push(0);
        bytes.extend_from_slice(role.as_bytes());
        bytes.extend_from_slice(first.as_str().as_bytes());
        bytes.push(0);
        bytes.extend_from_slice(second.as_str().as_bytes());
        bytes
    }

    /// The key of the host's proof, and what that is computed over.
    fn of_host(&self, challenge: &[u8], sequence: u32) -> (hmac::Key, Vec<u8>) {
        let Parties { host, subsystem } = &self.parties;
        let key = self.secrets.host.key_of(host);
        let proved = self.proved(challenge, sequence, "HostHost", [host, subsystem]);
        (hmac::Key::new(self.hash.hmac(), &key), proved)
    }

    /// As [`Self::of_host`], of the controller. `None`: it has no secret.
    fn of_controller(&self, challenge: &[u8], sequence: u32) -> Option<(hmac::Key, Vec<u8>)> {
        let Parties { host, subsystem } = &self.parties;
        let key = self.secrets.controller.as_ref()?.key_of(subsystem);
        let proved = self.proved(challenge, sequence, "Controller", [subsystem, host]);
        Some((hmac::Key::new(self.hash.hmac(), &key), proved))
    }
}

/// Random bytes.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).expect("the kernel has random bytes");
    bytes
}

/// A challenge for a hash.
fn challenge(hash: Hash) -> Vec<u8> {
    random::<64>()[..hash.value_len()].to_vec()
}

/// A sequence number, which is never 0.
fn sequence() -> u32 {
    u32::from_le_bytes(random()).max(1)
}

#[cfg(test)]
mod tests;
