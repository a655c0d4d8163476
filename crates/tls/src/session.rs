//! One side of a connection. See the crate's head for contexts and limits.

use crate::io::Lending;
use crate::{HANDSHAKE_MAX, Psk, Psks, TlsError, hello};
use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture};
use s2n_tls::config::{Builder, Config};
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, Mode, Version};
use s2n_tls::error::Error;
use s2n_tls::security::Policy;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Waker};

/// TLS 1.3 only; AES-GCM, which is chosen by the hash of the key; curves without post-quantum key exchange.
const POLICY: &str = "AWS-CRT-SDK-TLSv1.3-2023";
/// What records of TLS begin with at the start of a handshake: a handshake message, or an alert.
const FIRST_BYTES: [u8; 2] = [22, 21];
/// The alert for bytes that are not a record of TLS.
const UNEXPECTED_MESSAGE: u8 = 10;
/// The alert for an identity that is not known.
const UNKNOWN_PSK_IDENTITY: u8 = 115;
/// The alert for a key that does not match its identity.
const DECRYPT_ERROR: u8 = 51;
/// The alert for a handshake that fails otherwise.
const HANDSHAKE_FAILURE: u8 = 40;

/// How far a handshake is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More bytes of the peer are needed.
    Pending,
    /// Both sides have proved to know the key.
    Complete,
}

/// One side of a connection.
pub struct Session {
    connection: Lending,
    /// The key that both sides have, once the handshake is complete.
    agreed: Option<Psk>,
    keys: Keys,
    /// Bytes of the handshake that were received.
    received: usize,
    /// A record was sent: alerts would have to be encrypted from now on.
    has_answered: bool,
}

/// Where keys come from.
enum Keys {
    /// Of all peers, for one that connects. The same set is in the connection, for its callback.
    OfPeers,
    /// Those that are offered.
    Offered(Vec<Psk>),
}

/// What the callback of a ClientHello has of its connection.
struct Accepting {
    keys: Arc<Psks>,
    seen: Seen,
}

/// What a ClientHello was found to offer.
#[derive(Clone)]
enum Seen {
    /// There was none yet, or it offers no key.
    Nothing,
    /// Identities that are not known.
    Unknown,
    /// The identity of this key.
    Known(Psk),
}

/// Gives a connection the key that its peer has named.
struct Choose;

impl ClientHelloCallback for Choose {
    fn on_client_hello(
        &self,
        connection: &mut Connection,
    ) -> Result<Option<Pin<Box<dyn ConnectionFuture>>>, Error> {
        let hello = connection.client_hello()?.raw_message()?;
        let Some(accepting) = connection.application_context_mut::<Accepting>() else { return Ok(None) };
        for identity in hello::identities(&hello) {
            let known = std::str::from_utf8(identity).ok().and_then(|identity| accepting.keys.get(identity));
            accepting.seen = known.map_or(Seen::Unknown, |psk| Seen::Known(psk.clone()));
            if let Seen::Known(psk) = accepting.seen.clone() {
                connection.append_psk(&psk.0.psk)?;
                break;
            }
        }
        // Without a key, s2n-tls looks for a certificate, finds none, and fails.
        Ok(None)
    }
}

fn config(mode: Mode) -> Config {
    let made = || {
        let mut builder = Builder::new();
        builder.with_system_certs(false)?;
        builder.set_security_policy(&Policy::from_version(POLICY)?)?;
        // Errors are not delayed: the ciphers here have no padding whose check takes longer or shorter.
        builder.set_max_blinding_delay(0)?;
        if let Mode::Server = mode {
            builder.set_client_hello_callback(Choose)?;
        }
        builder.build()
    };
    made().unwrap_or_else(|error: Error| panic!("s2n-tls has this policy: {error}"))
}

static ACCEPTING: LazyLock<Config> = LazyLock::new(|| config(Mode::Server));
static CONNECTING: LazyLock<Config> = LazyLock::new(|| config(Mode::Client));

impl Session {
    /// The side that accepts a peer with one of `keys`.
    ///
    /// # Errors
    /// [`TlsError::Protocol`]: s2n-tls has no memory.
    pub fn accept(keys: Arc<Psks>) -> Result<Self, TlsError> {
        let mut made = Self::new(Mode::Server, &ACCEPTING, Keys::OfPeers).map_err(protocol)?;
        let accepting = Accepting { keys, seen: Seen::Nothing };
        made.connection.with(&mut &[][..], None, |connection| connection.set_application_context(accepting));
        Ok(made)
    }

    /// The side that connects, and offers these keys, the best first.
    ///
    /// # Errors
    /// [`TlsError::Key`]: there are no keys. [`TlsError::Protocol`]: s2n-tls has no memory.
    pub fn connect(keys: Vec<Psk>) -> Result<Self, TlsError> {
        if keys.is_empty() {
            return Err(TlsError::Key);
        }
        let mut made = Self::new(Mode::Client, &CONNECTING, Keys::OfPeers).map_err(protocol)?;
        made.connection.with(&mut &[][..], None, |connection| {
            keys.iter().try_for_each(|key| connection.append_psk(&key.0.psk)).map_err(protocol)
        })?;
        made.keys = Keys::Offered(keys);
        Ok(made)
    }

    fn new(mode: Mode, config: &Config, keys: Keys) -> Result<Self, Error> {
        let mut connection = Connection::new(mode);
        connection.set_config(config.clone())?.set_blinding(Blinding::SelfService)?.prefer_throughput()?;
        // The callback of a ClientHello counts as a task, although it ends at once.
        connection.set_waker(Some(Waker::noop()))?;
        let connection = Lending::new(connection)?;
        Ok(Self { connection, agreed: None, keys, received: 0, has_answered: false })
    }

    /// Continues the handshake with `input`, which is what is left then, and appends to `output` what is to be sent, also if the
    /// handshake fails. The side that connects begins with an empty input.
    ///
    /// # Errors
    /// Any [`TlsError`].
    pub fn handshake(&mut self, input: &mut &[u8], output: &mut Vec<u8>) -> Result<Progress, TlsError> {
        if let Some(first) = input.first().filter(|_| self.received == 0)
            && !FIRST_BYTES.contains(first)
        {
            if matches!(self.keys, Keys::OfPeers) {
                output.extend_from_slice(&alert_record(UNEXPECTED_MESSAGE));
            }
            return Err(TlsError::NotTls);
        }
        let (given, sent) = (input.len(), output.len());
        let polled =
            self.connection.with(input, Some(output), |connection| match connection.poll_negotiate() {
                Poll::Ready(done) => Poll::Ready(done.map(|_| ())),
                Poll::Pending => Poll::Pending,
            });
        self.received += given - input.len();
        match polled {
            Poll::Ready(Ok(())) => {
                self.agree()?;
                return Ok(Progress::Complete);
            }
            Poll::Ready(Err(error)) => {
                let (reason, alert) = self.explain(&error);
                if let (false, Some(alert)) = (self.has_answered, alert) {
                    output.truncate(sent);
                    output.extend_from_slice(&alert_record(alert));
                }
                return Err(reason);
            }
            Poll::Pending => self.has_answered |= output.len() > sent,
        }
        if self.received > HANDSHAKE_MAX {
            return Err(TlsError::TooLong);
        }
        Ok(Progress::Pending)
    }

    /// Checks what the sides have agreed on, and forgets the other keys.
    fn agree(&mut self) -> Result<(), TlsError> {
        let connection = self.connection.connection();
        let mut identity = vec![0; connection.negotiated_psk_identity_length().unwrap_or(0)];
        if !identity.is_empty() {
            connection.negotiated_psk_identity(&mut identity).map_err(protocol)?;
        }
        let is_agreed = |psk: &Psk| {
            psk.identity().as_bytes() == identity
                && connection.cipher_suite().is_ok_and(|suite| suite == psk.hash().suite())
                && connection.actual_protocol_version().is_ok_and(|version| version == Version::TLS13)
        };
        let key = match (&self.keys, self.seen()) {
            (Keys::Offered(keys), _) => keys.iter().find(|psk| is_agreed(psk)).cloned(),
            (Keys::OfPeers, Seen::Known(psk)) => Some(psk).filter(is_agreed),
            (Keys::OfPeers, Seen::Nothing | Seen::Unknown) => None,
        };
        self.agreed = Some(key.ok_or(TlsError::NotAgreed)?);
        self.keys = Keys::OfPeers;
        self.connection.with(&mut &[][..], None, |connection| {
            drop(connection.remove_application_context::<Accepting>());
        });
        Ok(())
    }

    fn seen(&self) -> Seen {
        let accepting = self.connection.connection().application_context::<Accepting>();
        accepting.map_or(Seen::Nothing, |accepting| accepting.seen.clone())
    }

    /// Why a handshake has failed, and the alert that tells the peer.
    fn explain(&self, error: &Error) -> (TlsError, Option<u8>) {
        let connection = self.connection.connection();
        if let Some(alert) = connection.alert() {
            return (TlsError::Refused(alert), None);
        }
        let is_accepting = connection.application_context::<Accepting>().is_some();
        match self.seen() {
            _ if error.name() == "S2N_ERR_BAD_PSK_BINDER" => (TlsError::WrongKey, Some(DECRYPT_ERROR)),
            Seen::Unknown => (TlsError::UnknownIdentity, Some(UNKNOWN_PSK_IDENTITY)),
            Seen::Nothing if is_accepting && is_without_key(error) => {
                (TlsError::NoIdentity, Some(HANDSHAKE_FAILURE))
            }
            _ => (protocol_of(error), Some(HANDSHAKE_FAILURE)),
        }
    }

    /// The key that both sides have proved to know.
    pub fn agreed(&self) -> Option<&Psk> {
        self.agreed.as_ref()
    }

    /// Decrypts `input`, which is what is left then, up to the next `plain.len()` bytes or the end of a record. Returns the
    /// number of bytes; 0, if all of `input` is taken. Other bytes may follow as long as the result is not 0. `plain` is not
    /// empty.
    ///
    /// # Errors
    /// [`TlsError::Closed`], [`TlsError::Refused`], [`TlsError::Protocol`].
    pub fn read(&mut self, input: &mut &[u8], plain: &mut [u8]) -> Result<usize, TlsError> {
        debug_assert!(self.agreed.is_some() && !plain.is_empty());
        match self.connection.with(input, None, |connection| connection.poll_recv(plain)) {
            Poll::Ready(Ok(0)) => Err(TlsError::Closed),
            Poll::Ready(Ok(len)) => Ok(len),
            Poll::Pending => Ok(0),
            Poll::Ready(Err(error)) => Err(self.ended(&error)),
        }
    }

    /// Encrypts `plain`, and appends it to `output`, which grows by [`overhead`](crate::overhead) bytes more at most.
    ///
    /// # Errors
    /// [`TlsError::Protocol`]: the session has ended.
    pub fn write(&mut self, mut plain: &[u8], output: &mut Vec<u8>) -> Result<(), TlsError> {
        debug_assert!(self.agreed.is_some());
        while !plain.is_empty() {
            let sent =
                self.connection.with(&mut &[][..], Some(output), |connection| connection.poll_send(plain));
            match sent {
                Poll::Ready(Ok(len)) => plain = &plain[len..],
                Poll::Ready(Err(error)) => return Err(self.ended(&error)),
                // The output takes everything.
                Poll::Pending => return Err(TlsError::Protocol("cannot send")),
            }
        }
        Ok(())
    }

    fn ended(&self, error: &Error) -> TlsError {
        match self.connection.connection().alert() {
            Some(0) => TlsError::Closed,
            Some(alert) => TlsError::Refused(alert),
            None => protocol_of(error),
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("agreed", &self.agreed).finish_non_exhaustive()
    }
}

/// A record with a fatal alert, which is not encrypted.
const fn alert_record(alert: u8) -> [u8; 7] {
    [21, 3, 3, 0, 2, 2, alert]
}

/// Whether s2n-tls has failed because there is neither a key nor a certificate.
fn is_without_key(error: &Error) -> bool {
    matches!(error.name(), "S2N_ERR_CIPHER_NOT_SUPPORTED" | "S2N_ERR_NO_VALID_SIGNATURE_SCHEME")
}

fn protocol(error: Error) -> TlsError {
    protocol_of(&error)
}

fn protocol_of(error: &Error) -> TlsError {
    TlsError::Protocol(error.name())
}
