//! `keyring_*`: secrets by name, in files and in the kernel's keyring; and [`Keyring`], by which other methods read them. Control
//! context; secrets are read on a thread that may block.
//!
//! The keyring knows where secrets are, not what they are: a secret is read when a method needs it, and the method drops it after
//! its use. So a file may be replaced at any time, and the configuration has paths only.

use super::{Control, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use crate::secret_file::{Rights, SecretFile, SecretFileError};
use aryk_secrets::{SecretBytes, read_kernel_key};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

pub(crate) const ADD_FILE: &str = "keyring_file_add_key";
const SET_LINUX: &str = "keyring_linux_set_options";
/// The name of the note of the kernel keyring's options; a key's note has the key's name after a slash.
const LINUX: &str = "linux";
/// Bytes of a secret, at most.
const LEN_MAX: usize = 1 << 20;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        ADD_FILE,
        Phase::Any,
        "Names a file that contains a secret: the secret is read when it is used.",
        add_file,
    );
    table.add(
        "keyring_file_remove_key",
        Phase::Any,
        "Forgets the name of a file with a secret. The file stays.",
        remove_file,
    );
    table.add("keyring_get_keys", Phase::Any, "Lists the named secrets, without their content.", get_keys);
    table.add(
        SET_LINUX,
        Phase::Any,
        "Chooses whether secrets without a file are looked for in the kernel's keyring, among its keys of the type `user`.",
        set_linux,
    );
}

/// The sources of secrets, by name.
#[derive(Debug, Default)]
pub struct Keyring {
    files: RefCell<BTreeMap<String, PathBuf>>,
    /// Whether other names are those of keys of the kernel.
    has_kernel_keys: Cell<bool>,
}

impl Keyring {
    /// Reads the secret with this name: the bytes of its file, including a line's end, or of the kernel's key. The caller drops
    /// it after its use.
    ///
    /// # Errors
    /// `ENOENT`, `ENOKEY`: there is no such secret. `EPERM`: other users have rights to its file. Or the file cannot be read.
    pub async fn secret(&self, name: &str) -> Result<SecretBytes, Error> {
        let path = self.files.borrow().get(name).cloned();
        let (has_kernel_keys, name) = (self.has_kernel_keys.get(), name.to_owned());
        block(move || match path {
            Some(path) => {
                let secret = open(&path).and_then(|file| file.read());
                secret.map_err(|error| of_file(&error, &name, &path))
            }
            None if has_kernel_keys => read_kernel_key(&name).map_err(|error| {
                Error::errno(errno(&error), format!("the kernel's keyring: key '{name}': {error}"))
            }),
            None => Err(no_key(&name)),
        })
        .await
    }
}

fn no_key(name: &str) -> Error {
    Error::errno(Errno::NOENT, format!("there is no key '{name}' in the keyring"))
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Runs `f` on a thread that may block.
async fn block<R: Send + 'static>(f: impl FnOnce() -> Result<R, Error> + Send + 'static) -> Result<R, Error> {
    tokio::task::spawn_blocking(f).await.map_err(|panic| Error::Internal(panic.to_string()))?
}

/// The error of the secret `name`, which is in the file at `path`.
fn of_file(error: &SecretFileError, name: &str, path: &Path) -> Error {
    let errno = match error {
        SecretFileError::Io(error) => errno(error),
        SecretFileError::Mode(_) | SecretFileError::Owner { .. } => Errno::PERM,
        SecretFileError::NotAFile => Errno::INVAL,
        SecretFileError::TooLarge(_) => Errno::NOBUFS,
    };
    Error::errno(errno, format!("key '{name}': {} {error}", path.display()))
}

fn open(path: &Path) -> Result<SecretFile, SecretFileError> {
    SecretFile::open(path, Rights::OwnerOnly, LEN_MAX)
}

/// Parameters of `keyring_file_add_key`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddFile {
    /// Name of the secret.
    name: String,
    /// Absolute path of the file, to which no other user has rights (mode 600).
    path: PathBuf,
}

/// The name of a file's note.
pub(crate) fn object(name: &str) -> String {
    format!("file/{name}")
}

async fn add_file(control: &Control, p: AddFile) -> Result<bool, Error> {
    if p.name.is_empty() || p.name.len() > super::NAME_LEN_MAX {
        return Err(Error::invalid(format!("a key's name has 1 to {} bytes", super::NAME_LEN_MAX)));
    }
    if !p.path.is_absolute() {
        let detail = format!("the path of key '{}' must be absolute, not {}", p.name, p.path.display());
        return Err(Error::errno(Errno::PERM, detail));
    }
    let (name, path) = (p.name.clone(), p.path.clone());
    block(move || open(&path).map(drop).map_err(|error| of_file(&error, &name, &path))).await?;
    let mut files = control.keyring.files.borrow_mut();
    if files.contains_key(&p.name) {
        return Err(Error::errno(Errno::EXIST, format!("a key '{}' exists in the keyring", p.name)));
    }
    control.config.made(Subsystem::Keyring, &object(&p.name), ADD_FILE, &p);
    files.insert(p.name, p.path);
    Ok(true)
}

/// Parameters of `keyring_file_remove_key`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveFile {
    /// Name of the secret.
    name: String,
}

async fn remove_file(control: &Control, p: RemoveFile) -> Result<bool, Error> {
    let was_there = control.keyring.files.borrow_mut().remove(&p.name).is_some();
    // A file that is missing after a restart has a note only.
    match control.config.forget(Subsystem::Keyring, &object(&p.name)) || was_there {
        true => Ok(true),
        false => Err(no_key(&p.name)),
    }
}

/// One of the results of `keyring_get_keys`.
#[derive(Debug, Serialize, JsonSchema)]
struct NamedSecret {
    /// Name of the secret.
    name: String,
    /// `keyring_file`.
    module: &'static str,
    /// Always false: a removed name is forgotten at once.
    removed: bool,
    /// Always false: only names that a client has added are listed.
    probed: bool,
    /// Always 1: a secret that is in use is a copy.
    refcnt: u32,
    /// The file.
    path: PathBuf,
}

async fn get_keys(control: &Control, _: NoParams) -> Result<Vec<NamedSecret>, Error> {
    let describe = |(name, path): (&String, &PathBuf)| NamedSecret {
        name: name.clone(),
        module: "keyring_file",
        removed: false,
        probed: false,
        refcnt: 1,
        path: path.clone(),
    };
    Ok(control.keyring.files.borrow().iter().map(describe).collect())
}

/// Parameters of `keyring_linux_set_options`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetLinux {
    /// Whether to look in the kernel's keyring. Default: unchanged, which is false at first.
    enable: Option<bool>,
}

async fn set_linux(control: &Control, p: SetLinux) -> Result<bool, Error> {
    let Some(enable) = p.enable else { return Ok(true) };
    control.keyring.has_kernel_keys.set(enable);
    match enable {
        true => control.config.made(Subsystem::Keyring, LINUX, SET_LINUX, &p),
        false => _ = control.config.forget(Subsystem::Keyring, LINUX),
    }
    Ok(true)
}
