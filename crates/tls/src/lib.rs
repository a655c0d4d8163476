//! TLS 1.3 with pre-shared keys, without sockets: received bytes go in, and bytes to send and plain text come out. Any context; a
//! handshake takes a quarter of a millisecond, so no reactor makes one.
//!
//! A [`Session`] is one side of a connection. Both sides have the same [`Psk`], which an identity names: the side that connects
//! offers identities, and the side that accepts knows the keys of all peers. There are no certificates, no earlier versions, no
//! resumption and no early data. The key exchange is (EC)DHE besides, so a key that becomes known later opens no recorded
//! traffic.
//!
//! **Memory.** A session has at most [`SESSION_BYTES`]. Once data has gone both ways, it allocates nothing more. The owner
//! gives the buffers for plain text and for bytes to send. A handshake takes at most [`HANDSHAKE_MAX`] bytes of a peer and
//! looks at [`OFFERED_MAX`] identities at most; its time is the owner's to limit.
//!
//! **Keys** are copied into memory of s2n-tls, which zeroes it when it frees it, and which is not locked.
//!
//! **Unsafe code** (`io`) lends s2n-tls the buffers of the call that is being made, by two callbacks.
#![deny(unsafe_op_in_unsafe_fn)]

mod hello;
mod io;
mod session;
#[cfg(test)]
mod tests;

pub use session::{Progress, Session};

use s2n_tls::enums::PskHmac;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Bytes that a peer may send in a handshake.
pub const HANDSHAKE_MAX: usize = 16 << 10;
/// Identities of a peer that are looked at.
pub const OFFERED_MAX: usize = 8;
/// Bytes that a session has after its handshake, with the buffers for records of both directions.
pub const SESSION_BYTES: usize = 48 << 10;
/// Bytes of plain text in one record, at most.
pub const RECORD_MAX: usize = 16 << 10;

/// Bytes that records add to plain text of `len` bytes, at most.
pub const fn overhead(len: usize) -> usize {
    // A header, the type and the authentication tag; and as much for a message that updates keys.
    (len.div_ceil(RECORD_MAX) + 1) * 64
}

/// The hash of a key, which decides on the cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-256: TLS_AES_128_GCM_SHA256.
    Sha256,
    /// SHA-384: TLS_AES_256_GCM_SHA384.
    Sha384,
}

impl Hash {
    /// Both hashes.
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Sha384];

    /// The cipher suite, by the name that s2n-tls has for it.
    const fn suite(self) -> &'static str {
        match self {
            Self::Sha256 => "TLS_AES_128_GCM_SHA256",
            Self::Sha384 => "TLS_AES_256_GCM_SHA384",
        }
    }
}

/// A pre-shared key. Copies share it.
#[derive(Clone)]
pub struct Psk(Arc<Content>);

struct Content {
    psk: s2n_tls::psk::Psk,
    identity: Box<str>,
    hash: Hash,
}

impl Psk {
    /// A key.
    ///
    /// # Errors
    /// [`TlsError::Key`]: the identity is empty, or the secret has less than 16 bytes, or one of them more than 65,535.
    pub fn new(identity: &str, secret: &[u8], hash: Hash) -> Result<Self, TlsError> {
        let made = || {
            let mut builder = s2n_tls::psk::Psk::builder()?;
            builder.set_identity(identity.as_bytes())?.set_secret(secret)?;
            builder.set_hmac(match hash {
                Hash::Sha256 => PskHmac::SHA256,
                Hash::Sha384 => PskHmac::SHA384,
            })?;
            builder.build()
        };
        let psk = made().map_err(|_: s2n_tls::error::Error| TlsError::Key)?;
        Ok(Self(Arc::new(Content { psk, identity: identity.into(), hash })))
    }

    /// What names the key.
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Its hash.
    pub fn hash(&self) -> Hash {
        self.0.hash
    }
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Psk").field("identity", &self.0.identity).finish_non_exhaustive()
    }
}

/// The keys of peers that may connect, by identity.
pub type Psks = BTreeMap<Box<str>, Psk>;

/// Why a session cannot go on. It is of no use then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A key cannot be used.
    #[error("a TLS key has an identity, and at least 16 bytes")]
    Key,
    /// The first byte is not one of TLS.
    #[error("the peer does not use TLS")]
    NotTls,
    /// The peer offers no key at all.
    #[error("the peer uses TLS without a pre-shared key")]
    NoIdentity,
    /// No key has an identity that the peer offers.
    #[error("the peer has a TLS key with an identity that is not known here")]
    UnknownIdentity,
    /// The peer does not know the key that its identity names.
    #[error("the peer has another TLS key than the one that is known here by its identity")]
    WrongKey,
    /// The peer has ended the session with an alert of this code.
    #[error("the peer has refused TLS: {}", describe(*.0))]
    Refused(u8),
    /// The peer has ended the session.
    #[error("the peer has ended TLS")]
    Closed,
    /// The handshake has more bytes than [`HANDSHAKE_MAX`].
    #[error("the TLS handshake of the peer is too long")]
    TooLong,
    /// The sides agreed on something that is not allowed here.
    #[error("the peer does not use TLS 1.3 with a pre-shared key and the cipher suite of its hash")]
    NotAgreed,
    /// The peer violates the protocol, in the words of s2n-tls.
    #[error("the peer violates TLS ({0})")]
    Protocol(&'static str),
}

/// What an alert of a peer means.
fn describe(alert: u8) -> &'static str {
    match alert {
        40 => "the sides have nothing in common, or it does not know the key (alert 40)",
        47 => "an illegal parameter (alert 47)",
        51 => "it has another key by the same identity (alert 51)",
        70 => "another version (alert 70)",
        80 => "an internal error (alert 80)",
        109 => "a missing extension (alert 109)",
        115 => "it does not know the identity of the key (alert 115)",
        116 => "it wants a certificate (alert 116)",
        _ => "an alert without a common meaning",
    }
}
