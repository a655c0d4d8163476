//! The wrapping key, which encrypts key material before it enters the state store. Control context; reading and creating the key
//! block.
//!
//! Key material is encrypted by AES-256-GCM with a random nonce. The version of the format and what the caller says about the
//! material, such as its name, are authenticated with it, so that wrapped material cannot be used for something else. The text of
//! wrapped material names the wrapping key by its id, which is a keyed hash and says nothing about the key.
//!
//! A wrapping key that cannot be used, or is missing, does not stop the daemon: what it wrapped cannot be used until it is back.

use crate::Error;
use crate::secret_file::{Rights, SecretFile, SecretFileError};
use aryk_secrets::{SecretBytes, read_kernel_key, with_wiped_stack};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD as BASE64;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::io::Errno;
use std::cell::{OnceCell, RefCell};
use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Bytes of a wrapping key.
const LEN: usize = 32;
/// Bytes of a file that are read: a key in hexadecimal digits, and some white space.
const FILE_MAX: usize = 4 * LEN;
/// How the text of wrapped material begins; the version of the format is part of it.
const MARK: &str = "wrapped:1";
/// What the id of a wrapping key is the hash of.
const ID_OF: &[u8] = b"aryk: id of a wrapping key";
/// Bytes of an id.
const ID_LEN: usize = 8;

/// Where the wrapping key is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// In this process only: for a daemon that keeps no state.
    Process,
    /// In a file beside the state store, which is created when the first key is wrapped.
    Own(PathBuf),
    /// In a file of the operator.
    File(PathBuf),
    /// In a file of the service manager, which alone decides who may read it.
    Credential(PathBuf),
    /// In the kernel's keyring, under this name.
    Keyring(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process => f.write_str("the wrapping key of this process"),
            Self::Own(path) | Self::File(path) | Self::Credential(path) => {
                write!(f, "the wrapping key {}", path.display())
            }
            Self::Keyring(name) => write!(f, "the wrapping key keyring:{name}"),
        }
    }
}

/// Why wrapped material cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnwrapError {
    /// The text is not wrapped material.
    #[error("the state store has {0} without its key material wrapped")]
    NotWrapped(String),
    /// There is no usable wrapping key.
    #[error("{what} is wrapped by the wrapping key with id {id}, but {why}")]
    NoKey {
        /// What the material belongs to.
        what: String,
        /// Id of the needed wrapping key.
        id: String,
        /// Why there is no wrapping key.
        why: String,
    },
    /// Another wrapping key has wrapped it.
    #[error(
        "{source_of_ours} is not the one that {what} was wrapped by: its id is {ours}, and {id} is needed"
    )]
    OtherKey {
        /// What the material belongs to.
        what: String,
        /// Id of the needed wrapping key.
        id: String,
        /// Id of the daemon's wrapping key.
        ours: String,
        /// Where the daemon's wrapping key is.
        source_of_ours: String,
    },
    /// The text was changed, or belongs to something else.
    #[error("the wrapped key material of {0} is damaged, or belongs to something else")]
    Damaged(String),
}

impl From<UnwrapError> for Error {
    fn from(error: UnwrapError) -> Self {
        let errno = match error {
            UnwrapError::NoKey { .. } => Errno::NOKEY,
            UnwrapError::NotWrapped(_) | UnwrapError::OtherKey { .. } | UnwrapError::Damaged(_) => {
                Errno::KEYREJECTED
            }
        };
        Self::errno(errno, error.to_string())
    }
}

/// A wrapping key.
pub struct WrappingKey {
    bytes: SecretBytes,
    id: String,
}

impl fmt::Debug for WrappingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WrappingKey({})", self.id)
    }
}

impl WrappingKey {
    /// # Panics
    /// If there are not [`LEN`] bytes.
    fn new(bytes: SecretBytes) -> Self {
        assert_eq!(bytes.len(), LEN, "a wrapping key has this length");
        let sign = || ring::hmac::sign(&ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &bytes), ID_OF);
        let hash = with_wiped_stack(sign);
        Self { id: hex(&hash.as_ref()[..ID_LEN]), bytes }
    }

    /// A key of 32 bytes, or of 64 hexadecimal digits.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() == LEN {
            return Ok(Self::new(SecretBytes::copy_of(bytes)));
        }
        let mut key = SecretBytes::zeroed(LEN);
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let (pairs, rest) = bytes.trim_ascii().as_chunks::<2>();
        let is_digits = pairs.len() == LEN && rest.is_empty();
        let decoded = is_digits
            && key.iter_mut().zip(pairs).all(|(byte, &[high, low])| {
                let pair = digit(high).zip(digit(low));
                pair.map(|(high, low)| *byte = high << 4 | low).is_some()
            });
        match decoded {
            true => Ok(Self::new(key)),
            false => Err(not_a_key()),
        }
    }

    fn random() -> io::Result<Self> {
        let mut bytes = SecretBytes::zeroed(LEN);
        SystemRandom::new().fill(&mut bytes).map_err(|_| io::Error::other("no random numbers"))?;
        Ok(Self::new(bytes))
    }

    /// The key's id, in hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn cipher(&self) -> LessSafeKey {
        LessSafeKey::new(UnboundKey::new(&AES_256_GCM, &self.bytes).expect("the key has the cipher's length"))
    }

    /// Encrypts key material. `about` is authenticated with it.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn wrap(&self, about: &[&str], material: &[u8]) -> Result<String, Error> {
        let mut nonce = [0; NONCE_LEN];
        let no_numbers = |_| Error::errno(Errno::IO, "the system has no random numbers");
        SystemRandom::new().fill(&mut nonce).map_err(no_numbers)?;
        let mut sealed = SecretBytes::zeroed(NONCE_LEN + material.len() + MAX_TAG_LEN);
        let (start, rest) = sealed.split_at_mut(NONCE_LEN);
        let (text, end) = rest.split_at_mut(material.len());
        start.copy_from_slice(&nonce);
        text.copy_from_slice(material);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let about = Aad::from(authenticated(about));
        let tag = with_wiped_stack(|| self.cipher().seal_in_place_separate_tag(nonce, about, text));
        end.copy_from_slice(tag.expect("key material is short").as_ref());
        Ok(format!("{MARK}:{}:{}", self.id, BASE64.encode(&*sealed)))
    }

    /// Decrypts what [`WrappingKey::wrap`] has returned. `what` is named in errors.
    fn unwrap(
        &self,
        source: &Source,
        what: &str,
        about: &[&str],
        text: &str,
    ) -> Result<SecretBytes, UnwrapError> {
        let (id, sealed) = parts(text).ok_or_else(|| UnwrapError::NotWrapped(what.to_owned()))?;
        if id != self.id {
            let (id, ours) = (id.to_owned(), self.id.clone());
            return Err(UnwrapError::OtherKey {
                what: what.to_owned(),
                id,
                ours,
                source_of_ours: source.to_string(),
            });
        }
        let damaged = || UnwrapError::Damaged(what.to_owned());
        let sealed = BASE64.decode(sealed).map_err(|_| damaged())?;
        let (nonce, sealed) = sealed.split_first_chunk().ok_or_else(damaged)?;
        let mut material = SecretBytes::copy_of(sealed);
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let about = Aad::from(authenticated(about));
        let open = || self.cipher().open_in_place(nonce, about, &mut material).map(|text| text.len());
        let len = with_wiped_stack(open).map_err(|_| damaged())?;
        material.truncate(len);
        Ok(material)
    }
}

/// The bytes that are authenticated with material: the version, and each text after its length.
fn authenticated(about: &[&str]) -> Vec<u8> {
    let mut bytes = MARK.as_bytes().to_vec();
    for text in about {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    bytes
}

/// The id of the wrapping key, and the sealed material, of wrapped material.
fn parts(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix(MARK)?.strip_prefix(':')?.split_once(':')
}

/// The id of the wrapping key that has wrapped this material; `None` if the text is not wrapped material.
pub fn id_of(text: &str) -> Option<&str> {
    parts(text).map(|(id, _)| id)
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes any text");
    }
    text
}

/// The daemon's wrapping key, if it has one (yet).
#[derive(Debug)]
pub struct Wrapping {
    source: Source,
    key: OnceCell<Rc<WrappingKey>>,
    /// Why the key is missing or cannot be used; `None` if it may be created.
    why_not: Option<String>,
    /// Held while the key is being created.
    making: tokio::sync::Mutex<()>,
    /// The last error of creating the key, which the log has.
    failure: RefCell<Option<String>>,
}

impl Default for Wrapping {
    fn default() -> Self {
        Self::read(Source::Process)
    }
}

impl Wrapping {
    /// Reads the wrapping key. If that fails, what it has wrapped cannot be used.
    pub fn read(source: Source) -> Self {
        let read = match &source {
            Source::Process => Ok(None),
            Source::Own(path) | Source::File(path) => read_file(path, Rights::OwnerOnly),
            Source::Credential(path) => read_file(path, Rights::Any),
            Source::Keyring(name) => read_kernel_key(name)
                .map_err(|error| format!("cannot be read: {error}"))
                .and_then(|bytes| WrappingKey::parse(&bytes).map(Some)),
        };
        let is_ours = matches!(source, Source::Process | Source::Own(_));
        let (key, why_not) = match read {
            Ok(Some(key)) => (OnceCell::from(Rc::new(key)), None),
            Ok(None) if is_ours => (OnceCell::new(), None),
            Ok(None) => (OnceCell::new(), Some(format!("{source} does not exist"))),
            Err(why) => (OnceCell::new(), Some(format!("{source} {why}"))),
        };
        Self { source, key, why_not, making: tokio::sync::Mutex::default(), failure: RefCell::default() }
    }

    /// Where the key is.
    pub const fn source(&self) -> &Source {
        &self.source
    }

    /// Why the wrapping key cannot be used, if it cannot.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// The key's id, if there is a key.
    pub fn id(&self) -> Option<&str> {
        self.key.get().map(|key| key.id())
    }

    /// Decrypts wrapped material. `what` is named in errors, and `about` was given when the material was wrapped.
    ///
    /// # Errors
    /// [`UnwrapError`].
    pub fn unwrap(&self, what: &str, about: &[&str], text: &str) -> Result<SecretBytes, UnwrapError> {
        if let Some(key) = self.key.get() {
            return key.unwrap(&self.source, what, about, text);
        }
        let id = id_of(text).ok_or_else(|| UnwrapError::NotWrapped(what.to_owned()))?.to_owned();
        let why = self.why_not.clone().unwrap_or_else(|| format!("{} does not exist", self.source));
        Err(UnwrapError::NoKey { what: what.to_owned(), id, why })
    }

    /// The key with which new material is wrapped. Creates it if it does not exist yet.
    ///
    /// # Errors
    /// `ENOKEY`: the operator's key cannot be used. Or the file cannot be created.
    pub async fn key(&self) -> Result<Rc<WrappingKey>, Error> {
        if let Some(why) = &self.why_not {
            return Err(Error::errno(Errno::NOKEY, format!("no key can be stored: {why}")));
        }
        let _making = self.making.lock().await;
        if let Some(key) = self.key.get() {
            return Ok(Rc::clone(key));
        }
        let made = match self.source.clone() {
            Source::Own(path) => {
                let making = tokio::task::spawn_blocking(move || make(&path)).await;
                making.map_err(|panic| Error::Internal(panic.to_string()))?
            }
            _ => WrappingKey::random(),
        };
        let key = made.map(Rc::new).map_err(|error| self.not_made(&error))?;
        if matches!(self.source, Source::Own(_)) {
            tracing::info!(id = key.id(), "created {}", self.source);
        }
        Ok(Rc::clone(self.key.get_or_init(|| key)))
    }

    fn not_made(&self, error: &io::Error) -> Error {
        let detail = format!("cannot create {}: {error}", self.source);
        if self.failure.replace(Some(detail.clone())).as_ref() != Some(&detail) {
            tracing::error!("{detail}");
        }
        Error::errno(error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error), detail)
    }
}

/// Reads a wrapping key from a file; `None` if there is no such file.
fn read_file(path: &Path, rights: Rights) -> Result<Option<WrappingKey>, String> {
    let read = SecretFile::open(path, rights, FILE_MAX).and_then(|file| file.read());
    match read {
        Ok(bytes) => WrappingKey::parse(&bytes).map(Some),
        Err(SecretFileError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(SecretFileError::TooLarge(_)) => Err(not_a_key()),
        Err(error) => Err(error.to_string()),
    }
}

fn not_a_key() -> String {
    format!("has neither {LEN} bytes nor {} hexadecimal digits", 2 * LEN)
}

/// Creates a file with a new wrapping key, so that it appears complete or not at all, and replaces no file.
fn make(path: &Path) -> io::Result<WrappingKey> {
    let key = WrappingKey::random()?;
    let new = path.with_extension("key.new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(&key.bytes)?;
    file.sync_all()?;
    // Unlike renaming, a link replaces no file.
    let linked = fs::hard_link(&new, path);
    fs::remove_file(&new)?;
    linked?;
    File::open(path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()?;
    Ok(key)
}

#[cfg(test)]
mod tests;
