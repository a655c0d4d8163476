//! `accel_crypto_key*` and `bdev_crypto_*`: keys, and disks that encrypt another disk by them. Control context.
//!
//! Key material arrives in the call that creates a key. The configuration has it wrapped only ([`crate::wrapping`]), in memory
//! and in the state store, from which a restarted daemon has its keys. No log line, reply or saved configuration contains it.

use super::details::{self, Crypto, Details};
use super::waiting::waits;
use super::{Control, Count, Error, Name, Phase, Table, is_default};
use crate::config::{Call, Subsystem};
use crate::error::INVALID_PARAMS;
use crate::journal;
use crate::secret::SecretText;
use crate::wrapping::{UnwrapError, WrappingKey, id_of};
use aryk_bdev_crypto as module;
use aryk_secrets::SecretBytes;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use uuid::Uuid;

/// Namespace of the disks' uuids.
const NAMESPACE: Uuid = uuid::uuid!("078e3cf7-f4b4-4545-b2c3-d40045a64ae2");
pub(super) const MODULE: &str = "crypto";
pub(super) const CREATE: &str = "bdev_crypto_create";
pub(crate) const CREATE_KEY: &str = "accel_crypto_key_create";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(CREATE_KEY, Phase::RunTime, "Creates a key for encrypted disks.", create_key);
    table.add(
        "accel_crypto_key_destroy",
        Phase::RunTime,
        "Forgets a key that no disk uses, also in the daemon's state. The medium of the state directory may keep it, encrypted by the wrapping key.",
        destroy_key,
    );
    table.add(
        "accel_crypto_keys_get",
        Phase::RunTime,
        "Lists the keys for encrypted disks, without the key material.",
        get_keys,
    );
    table.add(CREATE, Phase::RunTime, "Creates a disk that encrypts another disk.", create);
    table.add("bdev_crypto_delete", Phase::RunTime, "Removes a disk of `bdev_crypto_create`.", delete);
}

/// The keys, by name.
#[derive(Debug, Default)]
pub(crate) struct Keys(RefCell<BTreeMap<String, NamedKey>>);

#[derive(Debug, Clone)]
pub(super) struct NamedKey {
    pub(super) key: Arc<module::Key>,
    pub(super) tweak_mode: TweakMode,
}

impl Keys {
    fn find(&self, name: &str) -> Result<NamedKey, Error> {
        self.0.borrow().get(name).cloned().ok_or_else(|| no_key(name))
    }

    fn has(&self, name: &str) -> bool {
        self.0.borrow().contains_key(name)
    }
}

fn no_key(name: &str) -> Error {
    Error::errno(Errno::NOENT, format!("there is no key '{name}'"))
}

/// The name of a key's note.
pub(crate) fn object(name: &str) -> String {
    format!("crypto key {name}")
}

/// Whether a parameter of a call is key material.
pub(crate) fn is_secret(method: &str, param: &str) -> bool {
    method == CREATE_KEY && matches!(param, "key" | "key2")
}

/// The call without key material.
pub(super) fn without_key(mut call: Call) -> Call {
    let method = &call.method;
    if let Some(params) = call.params.as_object_mut() {
        params.retain(|name, _| !is_secret(method, name));
    }
    call
}

/// A cipher. Only `AES_XTS` is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CryptoCipher")]
enum Cipher {
    #[serde(rename = "AES_CBC")]
    AesCbc,
    #[serde(rename = "AES_XTS")]
    AesXts,
}

/// How the position of data on a disk becomes its tweak. In the modes with 512 in their names, each 512 bytes have a tweak of
/// their own; in the others, each block has one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CryptoTweakMode")]
pub(super) enum TweakMode {
    #[default]
    #[serde(rename = "SIMPLE_LBA")]
    Simple,
    #[serde(rename = "JOIN_NEG_LBA_WITH_LBA")]
    JoinNegLba,
    #[serde(rename = "INCR_512_FULL_LBA")]
    Incr512Full,
    #[serde(rename = "INCR_512_UPPER_LBA")]
    Incr512Upper,
}

impl From<TweakMode> for module::TweakMode {
    fn from(mode: TweakMode) -> Self {
        match mode {
            TweakMode::Simple => Self::SimpleLba,
            TweakMode::JoinNegLba => Self::JoinNegLbaWithLba,
            TweakMode::Incr512Full => Self::Incr512FullLba,
            TweakMode::Incr512Upper => Self::Incr512UpperLba,
        }
    }
}

/// Parameters of `accel_crypto_key_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateKey {
    /// The cipher: `AES_XTS`.
    cipher: Cipher,
    /// Key of the data: 32 or 64 hexadecimal digits, for AES with 128 or 256 bits.
    #[schemars(with = "String")]
    key: SecretText,
    /// Key of the tweaks, of the same length. Required, and not equal to `key`.
    #[schemars(with = "Option<String>")]
    #[serde(skip_serializing_if = "Option::is_none")]
    key2: Option<SecretText>,
    /// Default: `SIMPLE_LBA`.
    #[serde(default)]
    tweak_mode: TweakMode,
    /// Name of the new key.
    name: String,
}

/// Writes the bytes of hexadecimal digits to `bytes`. The error does not contain them.
fn decode(param: &str, digits: &str, bytes: &mut [u8]) -> Result<(), Error> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    for (byte, &[high, low]) in bytes.iter_mut().zip(digits.as_bytes().as_chunks::<2>().0) {
        let pair = digit(high).zip(digit(low)).map(|(high, low)| high << 4 | low);
        *byte = pair.ok_or_else(|| Error::invalid(format!("`{param}` must have hexadecimal digits only")))?;
    }
    Ok(())
}

/// The bytes of both keys.
fn material(key: &SecretText, key2: Option<&SecretText>) -> Result<SecretBytes, Error> {
    let key2 = key2.ok_or_else(|| Error::invalid("AES_XTS needs `key2`"))?;
    let (key, key2) = (key.as_str(), key2.as_str());
    for (param, digits) in [("key", key), ("key2", key2)] {
        if !matches!(digits.len(), 32 | 64) {
            return Err(Error::invalid(format!("`{param}` must have 32 or 64 hexadecimal digits")));
        }
    }
    if key.len() != key2.len() {
        return Err(Error::invalid("`key` and `key2` must have the same length"));
    }
    let mut bytes = SecretBytes::zeroed(key.len());
    let (first, second) = bytes.split_at_mut(key.len() / 2);
    decode("key", key, first)?;
    decode("key2", key2, second)?;
    Ok(bytes)
}

/// What is authenticated with the material of a key, so that it cannot be used by another name or in another way.
fn about(name: &str, tweak_mode: TweakMode) -> [&str; 4] {
    let mode = match tweak_mode {
        TweakMode::Simple => "SIMPLE_LBA",
        TweakMode::JoinNegLba => "JOIN_NEG_LBA_WITH_LBA",
        TweakMode::Incr512Full => "INCR_512_FULL_LBA",
        TweakMode::Incr512Upper => "INCR_512_UPPER_LBA",
    };
    ["crypto key", "AES_XTS", mode, name]
}

/// The material of a key in the configuration.
fn unwrap(control: &Control, name: &str, mode: TweakMode, wrapped: &str) -> Result<SecretBytes, UnwrapError> {
    control.wrapping.unwrap(&format!("key '{name}'"), &about(name, mode), wrapped)
}

/// Whether both calls create a key of the same material: the first as a client makes it, the second from the configuration.
pub(crate) fn has_same_material(
    control: &Control,
    given: &Map<String, Value>,
    noted: &Map<String, Value>,
) -> bool {
    let parse =
        |call: &Map<String, Value>| serde_json::from_value::<CreateKey>(Value::Object(call.clone())).ok();
    let Some((given, noted)) = parse(given).zip(parse(noted)) else { return false };
    let (Ok(given), Ok(noted)) = (
        material(&given.key, given.key2.as_ref()),
        unwrap(control, &noted.name, noted.tweak_mode, noted.key.as_str()),
    ) else {
        return false;
    };
    given.len() == noted.len() && given.iter().zip(&*noted).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// The key that wraps new keys.
///
/// # Errors
/// The state store has a key that another wrapping key has wrapped: the store would need both.
pub(super) async fn wrapping_key(control: &Control) -> Result<Rc<WrappingKey>, Error> {
    let ours = control.wrapping.id();
    let is_foreign = |call: &Call| {
        let (has_key, id) = match &*call.method {
            CREATE_KEY => (true, call.params.get("key").and_then(Value::as_str).and_then(id_of)),
            _ => (super::rbd::wrapped_by(call).is_some(), super::rbd::wrapped_by(call)),
        };
        has_key && (ours.is_none() || id != ours)
    };
    if let Some(other) = control.config.absent_objects_that(is_foreign).first() {
        let detail = format!(
            "the state store has '{}', which {} cannot unwrap: give the daemon the right wrapping key, or remove that object, before you store other keys",
            other.name,
            control.wrapping.source(),
        );
        return Err(Error::errno(Errno::KEYREJECTED, detail));
    }
    control.wrapping.key().await
}

async fn create_key(control: &Control, p: CreateKey) -> Result<bool, Error> {
    if p.name.is_empty() || p.name.len() > super::NAME_LEN_MAX {
        return Err(Error::invalid(format!("a key's name has 1 to {} bytes", super::NAME_LEN_MAX)));
    }
    if p.cipher == Cipher::AesCbc {
        return Err(Error::invalid("AES_CBC is not supported, only AES_XTS"));
    }
    let exists = || Error::errno(Errno::EXIST, format!("a key '{}' exists", p.name));
    if control.keys.has(&p.name) {
        return Err(exists());
    }
    let is_restore = journal::is_restore();
    let bytes = match is_restore {
        true => unwrap(control, &p.name, p.tweak_mode, p.key.as_str())?,
        false => material(&p.key, p.key2.as_ref())?,
    };
    let key = module::Key::new(&bytes).map_err(|error| Error::invalid(error.to_string()))?;
    let wrapped = match is_restore {
        true => p.key.as_str().to_owned(),
        false => wrapping_key(control).await?.wrap(&about(&p.name, p.tweak_mode), &bytes)?,
    };
    // Another call may have created it while this one waited for the wrapping key.
    if control.keys.has(&p.name) {
        return Err(exists());
    }
    let named = NamedKey { key: Arc::new(key), tweak_mode: p.tweak_mode };
    control.keys.0.borrow_mut().insert(p.name.clone(), named);
    let noted = CreateKey { key: SecretText::copy_of(&wrapped), key2: None, ..p };
    let object = object(&noted.name);
    control.config.made(Subsystem::Daemon, &object, CREATE_KEY, &noted);
    // Data that a disk has encrypted would outlive a key that a power failure takes.
    if !is_restore
        && let Some(written) = control.config.changed_durably(Subsystem::Daemon, &object, [])
        && !matches!(written.await, Ok(Ok(())))
    {
        control.keys.0.borrow_mut().remove(&noted.name);
        control.config.forget(Subsystem::Daemon, &object);
        return Err(Error::errno(
            Errno::IO,
            format!("the key '{}' cannot be stored: see the log", noted.name),
        ));
    }
    Ok(true)
}

/// Parameters of `accel_crypto_key_destroy`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DestroyKey {
    /// Name of the key.
    key_name: String,
}

async fn destroy_key(control: &Control, p: DestroyKey) -> Result<bool, Error> {
    let key = control.keys.0.borrow().get(&p.key_name).cloned();
    let journal = match key {
        Some(key) => super::rekey::journal_with(control, &key).await?,
        None => None,
    };
    let uses = |call: &Call| {
        let has_key = |name: &Value| *name == p.key_name;
        call.method == CREATE
            && (call.params.get("key_name").is_some_and(has_key)
                || super::rekey::names_key(call, &p.key_name))
    };
    let config = &control.config;
    if config.place_that(Subsystem::Bdev, uses).is_some() || !config.absent_objects_that(uses).is_empty() {
        return Err(Error::errno(Errno::BUSY, format!("a disk uses the key '{}'", p.key_name)));
    }
    if let Some(journal) = journal {
        let why = format!(
            "a disk was removed during a rotation, and needs the key '{}': create the disk again, with `rekey`; or remove its journal \
             {}, which loses the disk's data",
            p.key_name,
            journal.display()
        );
        return Err(Error::errno(Errno::BUSY, why));
    }
    let was_there = control.keys.0.borrow_mut().remove(&p.key_name).is_some();
    // A key that could not be created again after a restart has a note only.
    match config.forget(Subsystem::Daemon, &object(&p.key_name)) || was_there {
        true => Ok(true),
        // Ubicloud takes this text for a key that was destroyed before.
        false => Err(Error::Coded {
            code: INVALID_PARAMS,
            message: "No key object found".into(),
            detail: format!("there is no key '{}'", p.key_name),
        }),
    }
}

/// Parameters of `accel_crypto_keys_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetKeys {
    /// Name of the key. Default: all keys.
    key_name: Option<String>,
}

/// One of the results of `accel_crypto_keys_get`.
#[derive(Debug, Serialize, JsonSchema)]
struct CryptoKey {
    /// Name of the key.
    name: String,
    /// The cipher: `AES_XTS`.
    cipher: Cipher,
    /// How the position of data on a disk becomes its tweak.
    tweak_mode: TweakMode,
}

async fn get_keys(control: &Control, p: GetKeys) -> Result<Vec<CryptoKey>, Error> {
    let describe = |(name, key): (&String, &NamedKey)| CryptoKey {
        name: name.clone(),
        cipher: Cipher::AesXts,
        tweak_mode: key.tweak_mode,
    };
    if let Some(name) = p.key_name {
        return control.keys.find(&name).map(|key| vec![describe((&name, &key))]);
    }
    Ok(control.keys.0.borrow().iter().map(describe).collect())
}

/// Parameters of `bdev_crypto_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the base disk.
    pub(super) base_bdev_name: String,
    /// Name of the new disk.
    name: String,
    /// Name of a key of `accel_crypto_key_create`. Required.
    pub(super) key_name: Option<String>,
    /// Aryk only: encrypts as dm-crypt's `aes-xts-plain64`, instead of by the key's `tweak_mode`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) plain64: Option<Plain64>,
    /// Aryk only: whether discards go to the base disk, where they show which blocks are in use. Otherwise the disk does not
    /// support them.
    #[serde(default, skip_serializing_if = "is_default")]
    pass_discards: bool,
    /// Aryk only: the new key of a disk whose rotation by `bdev_crypto_rekey` is not complete. The rotation continues; its
    /// journal is in the state directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rekey: Option<super::rekey::Rekey>,
    /// Aryk only: fail if the base disk has a file system, a partition table or another known format, which would read as random
    /// bytes. Applies to this call only.
    #[serde(default, skip_serializing)]
    refuse_content: bool,
}

/// The options of dm-crypt's `aes-xts-plain64`, with dm-crypt's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CryptoPlain64Mode")]
pub(super) struct Plain64 {
    /// Bytes that are encrypted together: 512, 1024, 2048 or 4096. The disk's blocks have at least as many. Default: 512.
    #[serde(default = "sector")]
    sector_size: u32,
    /// Added to the number of a sector, in units of 512 bytes: a multiple of the sector size. Default: 0.
    #[serde(default)]
    iv_offset: Count,
    /// Whether sectors are counted in units of their own size instead of 512 bytes.
    #[serde(default)]
    iv_large_sectors: bool,
}

const fn sector() -> u32 {
    512
}

impl From<Plain64> for module::TweakMode {
    fn from(Plain64 { sector_size, iv_offset, iv_large_sectors }: Plain64) -> Self {
        Self::Plain64 { iv_offset: iv_offset.0, sector_size, iv_large_sectors }
    }
}

impl From<Plain64> for details::Plain64 {
    fn from(Plain64 { sector_size, iv_offset, iv_large_sectors }: Plain64) -> Self {
        Self { sector_size, iv_offset, iv_large_sectors }
    }
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        match error {
            module::Error::Registry(error) => error.into(),
            module::Error::Tweak(_) | module::Error::Area(_) => Self::invalid(error.to_string()),
        }
    }
}

/// The key of a disk. The error says why a key of the configuration does not exist.
pub(super) fn find_key(control: &Control, name: &str) -> Result<NamedKey, Error> {
    let config = &control.config;
    let unusable = || config.why_absent_object(Subsystem::Daemon, &object(name));
    control.keys.find(name).map_err(|error| match unusable() {
        Some(why) => Error::errno(Errno::NOKEY, format!("key '{name}' cannot be used: {why}")),
        None => error,
    })
}

/// Refuses a key that was destroyed while its disk was being created.
pub(super) fn check_is_there(control: &Control, name: &str, key: &Arc<module::Key>) -> Result<(), Error> {
    match Arc::ptr_eq(&find_key(control, name)?.key, key) {
        true => Ok(()),
        false => Err(Error::errno(Errno::BUSY, format!("the key '{name}' was replaced meanwhile"))),
    }
}

/// Refuses a disk that has a known format.
async fn check_content(control: &Control, base: &aryk_bdev::Bdev) -> Result<(), Error> {
    let (name, len) = (base.name(), base.blocks().to_bytes(base.geometry().block_size).0);
    let opener = module::Opener { name: CREATE, access: aryk_bdev::Access::Read };
    let work = move |store: &mut dyn aryk_luks::Store| super::luks::content::known(store, len);
    let found = module::on_header(&control.env, name, opener, work).await?;
    match found.map_err(|error| Error::errno(Errno::IO, format!("disk '{name}' cannot be read: {error}")))? {
        None => Ok(()),
        Some(format) => Err(Error::errno(
            Errno::EXIST,
            format!(
                "disk '{name}' holds {format}, which would be lost: to encrypt the disk, do not set `refuse_content`"
            ),
        )),
    }
}

pub(super) async fn create(control: &Control, p: Create) -> Result<String, Error> {
    let Some(key_name) = &p.key_name else {
        return Err(Error::invalid("`key_name` must name a key of accel_crypto_key_create"));
    };
    let NamedKey { key, tweak_mode } = find_key(control, key_name)?;
    if waits(control, &p.base_bdev_name, &p.name, (CREATE, &p))? {
        return Ok(p.name);
    }
    let base = control.disks.find(&p.base_bdev_name)?;
    let identity = super::identity_over(&p.name, None, &base, NAMESPACE)?;
    if p.refuse_content {
        check_content(control, &base).await?;
    }
    let config = module::Config {
        identity,
        product: MODULE,
        base: p.base_bdev_name.clone(),
        area: module::Area::default(),
        key,
        tweak_mode: p.plain64.map_or_else(|| tweak_mode.into(), Into::into),
        passes_discards: p.pass_discards,
    };
    let bdev =
        super::rekey::create(control, config, key_name, p.plain64.map(Into::into), p.rekey.as_ref()).await?;
    let crypto = Crypto {
        base_bdev_name: p.base_bdev_name.clone(),
        name: p.name.clone(),
        key_name: key_name.clone(),
        plain64: p.plain64.map(Into::into),
        rekey: None,
    };
    let details = Details { crypto: Some(crypto), ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, (CREATE, &p)))
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    super::rekey::tell_removal(control, &p.name);
    control.remove_disk(MODULE, &p.name).await
}
