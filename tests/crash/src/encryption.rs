//! An encrypted disk whose key is rotated without end: two keys take turns, through all daemons of a life. Test tool; the
//! rotations have a thread of their own.
//!
//! The disk's content at rest is encrypted and decrypted here, past the daemon, to fill the disk and to check it at the end.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use aryk_aes_xts::{Key, SectorSize, Tweaks};
use aryk_rpc_client::Client;
use serde_json::{Value, json};

use crate::daemon::call;

/// The name of the disk that has the encrypted data.
pub const STORE: &str = "store";
/// The encrypted disk.
const DISK: &str = "disk";
/// The names of the two keys. The first one encrypts the disk when a life begins.
const KEYS: [&str; 2] = ["k1", "k2"];
/// Between two looks at a rotation.
const INTERVAL: Duration = Duration::from_millis(2);
/// How long the last rotation of a life may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// The hexadecimal digits of both keys of AES-XTS.
fn digits(key: &str) -> [String; 2] {
    let digit = if key == KEYS[0] { "1" } else { "2" };
    [digit.repeat(32), "f".repeat(32)]
}

fn key(name: &str) -> Key {
    let bytes: Vec<u8> = digits(name)
        .concat()
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("digits"))
        .collect();
    Key::new(&bytes).expect("a valid key")
}

/// The tweaks of a disk that the daemon encrypts with SPDK's default mode, from its first block on.
const TWEAKS: Tweaks = Tweaks { start: 0, step: 1 << 64 };

/// Encrypts the content of a new disk.
pub fn encrypt(bytes: &mut [u8], block_size: u32) {
    let sector = SectorSize::new(block_size as usize).expect("a block is a sector");
    key(KEYS[0]).encrypt_in_place(sector, TWEAKS, bytes).expect("whole sectors");
}

/// Decrypts the content of a disk that has the key of this name only.
pub fn decrypt(bytes: &mut [u8], block_size: u32, name: &str) {
    let sector = SectorSize::new(block_size as usize).expect("a block is a sector");
    key(name).decrypt_in_place(sector, TWEAKS, bytes).expect("whole sectors");
}

/// Creates the keys, and the encrypted disk on [`STORE`].
///
/// # Errors
/// The daemon refuses.
pub fn create(socket: &Path) -> Result<()> {
    for name in KEYS {
        let [key, key2] = digits(name);
        let key = json!({"cipher": "AES_XTS", "name": name, "key": key, "key2": key2});
        call(socket, "accel_crypto_key_create", &key)?;
    }
    let disk = json!({"name": DISK, "base_bdev_name": STORE, "key_name": KEYS[0]});
    call(socket, "bdev_crypto_create", &disk)?;
    Ok(())
}

/// The rotations of a life. They end when this is dropped.
#[derive(Debug)]
pub struct Rotations {
    /// Says that no more rotation is to begin.
    last: Sender<()>,
    thread: JoinHandle<Result<&'static str>>,
}

impl Rotations {
    /// Starts to rotate the key of the disk of the daemons that listen at `socket`, one after the other.
    #[must_use]
    pub fn start(socket: PathBuf) -> Self {
        let (last, is_last) = channel();
        let thread = std::thread::spawn(move || {
            let mut ending: Option<Instant> = None;
            let mut begun = 0;
            loop {
                let outcome = look(&socket, ending.is_none(), &mut begun);
                match (outcome, ending) {
                    (Ok(Some(key)), Some(_)) => {
                        ensure!(begun > 0, "no rotation of the key has begun");
                        return Ok(key);
                    }
                    (Err(Look::Failed(why)), _) => bail!("the rotation of the key has failed: {why}"),
                    // The daemon was killed, or is starting.
                    (Err(Look::NoReply(error)), Some(since)) if since.elapsed() > PATIENCE => {
                        return Err(error.context("looking at the last rotation"));
                    }
                    (Ok(None), Some(since)) if since.elapsed() > PATIENCE => {
                        bail!("the last rotation does not end")
                    }
                    _ => {}
                }
                match is_last.recv_timeout(INTERVAL) {
                    Ok(()) => ending = Some(Instant::now()),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => bail!("the life has ended"),
                }
            }
        });
        Self { last, thread }
    }

    /// Waits until the rotation under way is complete. Returns the name of the disk's only key.
    ///
    /// # Errors
    /// A rotation has failed, or does not end; none has begun.
    pub fn finish(self) -> Result<&'static str> {
        let Self { last, thread } = self;
        // The thread has ended before if a rotation has failed.
        let _ = last.send(());
        thread.join().map_err(|_| anyhow!("the thread of the rotations has panicked"))?
    }
}

/// Why a look at the disk shows no rotation that goes on.
enum Look {
    /// The rotation has failed, though no disk fails.
    Failed(String),
    /// No daemon replies, or it has no disk yet.
    NoReply(anyhow::Error),
}

impl From<anyhow::Error> for Look {
    fn from(error: anyhow::Error) -> Self {
        Self::NoReply(error)
    }
}

/// Reads the keys of the disk. If it has one key, returns that key, and begins the next rotation if `begins`.
fn look(socket: &Path, begins: bool, begun: &mut u64) -> Result<Option<&'static str>, Look> {
    let mut client = Client::connect(socket).context("the RPC socket")?;
    let mut ask = |method: &str, params: &Value| client.result(method, params).map_err(anyhow::Error::from);
    let disks = ask("bdev_get_bdevs", &json!({"name": DISK}))?;
    let crypto = &disks[0]["driver_specific"]["crypto"];
    if crypto["rekey"].is_object() {
        return match crypto["rekey"]["state"].as_str() {
            Some("failed") => Err(Look::Failed(crypto["rekey"]["error"].to_string())),
            _ => Ok(None),
        };
    }
    let name = crypto["key_name"].as_str();
    let Some(at) = KEYS.iter().position(|key| Some(*key) == name) else {
        return Err(Look::NoReply(anyhow!("a disk with the key {name:?}")));
    };
    if begins {
        ask("bdev_crypto_rekey", &json!({"name": DISK, "key_name": KEYS[1 - at]}))?;
        *begun += 1;
        return Ok(None);
    }
    Ok(Some(KEYS[at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_key_decrypts() {
        let plain: Vec<u8> = (0..8192_u32).map(|i| i as u8).collect();
        let mut bytes = plain.clone();
        encrypt(&mut bytes, 4096);
        let mut other = bytes.clone();
        decrypt(&mut bytes, 4096, KEYS[0]);
        decrypt(&mut other, 4096, KEYS[1]);
        assert!(bytes == plain && other != plain);
    }
}
