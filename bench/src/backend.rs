//! The back-ends that are compared: `arykd`, and `qemu-storage-daemon` as its peer.

use crate::process::{BACK_END_CORE, Process};
use crate::rpc::Rpc;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The passphrase of encrypted files, as an object of QEMU.
pub const LUKS_SECRET: &str = "id=luks,data=bench";
/// The same as the content of a key file.
const LUKS_PASSPHRASE: &str = "bench";

/// The store of a disk.
#[derive(Clone, Debug)]
pub enum Store {
    /// No store: reads leave their buffers unchanged, writes are discarded.
    Null {
        /// Bytes.
        size: u64,
    },
    /// Memory: `arykd`'s own; for its peer, a file in /dev/shm.
    Memory {
        /// Bytes.
        size: u64,
        /// The peer's file.
        peer: PathBuf,
    },
    /// A LUKS1 file in /dev/shm, which all back-ends use in turn.
    Luks {
        /// The file.
        path: PathBuf,
    },
    /// Memory of `arykd`, encrypted.
    Encrypted {
        /// Bytes.
        size: u64,
    },
    /// A regular file on a disk, used without the page cache. All back-ends use the same file in turn: two files on the
    /// same disk differed by half in write throughput.
    File {
        /// The file.
        path: PathBuf,
    },
}

/// `arykd`'s `--sleep-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Policy {
    /// Never sleeps.
    Poll,
    /// Sleeps after a while without work.
    Adaptive,
    /// Sleeps as soon as there is no work.
    Interrupt,
}

impl Policy {
    /// The policy's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Adaptive => "adaptive",
            Self::Interrupt => "interrupt",
        }
    }
}

/// The file name of `arykd`'s metrics socket, in the directory of its other sockets.
pub const METRICS: &str = "metrics.sock";

/// A back-end with one disk.
#[derive(Debug)]
pub struct BackEnd {
    /// The daemon's process.
    pub process: Process,
    /// The disk's vhost-user socket.
    pub socket: PathBuf,
    /// The daemon's RPC, if it has one.
    pub rpc: Option<Rpc>,
}

impl BackEnd {
    /// The reactors' busy time so far, in ns; `None` for a daemon that does not report it.
    pub fn busy(&mut self) -> Result<Option<f64>> {
        self.rpc.as_mut().map(Rpc::busy).transpose()
    }
}

/// Starts `arykd` on one core, without a disk. Creates `dir` for its sockets. The daemon keeps its configuration in
/// `state`, if that is a directory.
pub fn arykd(program: &Path, policy: Policy, dir: &Path, state: Option<&Path>) -> Result<(Process, Rpc)> {
    arykd_on(program, 1 << BACK_END_CORE, policy, dir, state)
}

/// As [`arykd`], on the cores of a mask.
pub fn arykd_on(
    program: &Path,
    cores: usize,
    policy: Policy,
    dir: &Path,
    state: Option<&Path>,
) -> Result<(Process, Rpc)> {
    arykd_with(program, cores, policy, dir, state, &[])
}

/// As [`arykd_on`], with more options.
pub fn arykd_with(
    program: &Path,
    cores: usize,
    policy: Policy,
    dir: &Path,
    state: Option<&Path>,
    more: &[&str],
) -> Result<(Process, Rpc)> {
    std::fs::create_dir_all(dir)?;
    let (rpc, metrics) = (dir.join("rpc.sock"), dir.join(METRICS));
    let mask = format!("{cores:#x}");
    let mut args = vec![
        "-m".as_ref(),
        mask.as_ref(),
        "-r".as_ref(),
        rpc.as_os_str(),
        "-S".as_ref(),
        dir.as_os_str(),
        "--sleep-policy".as_ref(),
        policy.name().as_ref(),
        "--metrics".as_ref(),
        metrics.as_os_str(),
        "-L".as_ref(),
        "warning".as_ref(),
    ];
    if let Some(state) = state {
        args.extend(["--state-dir".as_ref(), state.as_os_str()]);
    }
    args.extend(more.iter().map(OsStr::new));
    let mut process = Process::start("arykd", program, &args)?;
    process.wait_for(&rpc)?;
    Ok((process, Rpc::connect(&rpc)?))
}

/// Starts `arykd` with one disk over `store`.
pub fn aryk(program: &Path, policy: Policy, store: &Store, dir: &Path) -> Result<BackEnd> {
    let (mut process, mut rpc) = arykd(program, policy, dir, None)?;
    create_disk(&mut rpc, "d0", store, dir)?;
    let controller = json!({"ctrlr": "d0", "dev_name": "d0"});
    rpc.call("vhost_create_blk_controller", controller)?;
    let socket = dir.join("d0");
    process.wait_for(&socket)?;
    Ok(BackEnd { process, socket, rpc: Some(rpc) })
}

/// Creates a disk over `store`; the file of a key is created in `dir`.
pub fn create_disk(rpc: &mut Rpc, name: &str, store: &Store, dir: &Path) -> Result<()> {
    match store {
        Store::Null { size } => {
            rpc.call("bdev_null_create", json!({"name": name, "num_blocks": size / 512, "block_size": 512}))
        }
        Store::Memory { size, .. } => {
            rpc.call("bdev_malloc_create", json!({"name": name, "num_blocks": size / 512, "block_size": 512}))
        }
        Store::Luks { path } => {
            let key_file = dir.join("key");
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&key_file)?;
            file.write_all(LUKS_PASSPHRASE.as_bytes())?;
            rpc.call("bdev_uring_create", json!({"name": "base", "filename": path, "block_size": 512}))?;
            let luks = json!({"name": name, "base_bdev_name": "base", "key_file": key_file});
            rpc.call("bdev_luks_create", luks)
        }
        Store::Encrypted { size } => {
            let base = json!({"name": "base", "num_blocks": size / 512, "block_size": 512});
            rpc.call("bdev_malloc_create", base)?;
            let [data, tweak] = ["01", "02"].map(|byte| byte.repeat(32));
            let key = json!({"name": "k", "cipher": "AES_XTS", "key": data, "key2": tweak});
            rpc.call("accel_crypto_key_create", key)?;
            rpc.call("bdev_crypto_create", json!({"name": name, "base_bdev_name": "base", "key_name": "k"}))
        }
        Store::File { path } => {
            rpc.call("bdev_uring_create", json!({"name": name, "filename": path, "block_size": 512}))
        }
    }
    .map(drop)
}

/// Starts `qemu-storage-daemon` with one disk over `store`, with the file engine `aio` (its default is `threads`) and
/// with an I/O thread, which polls for a while before it sleeps.
pub fn peer(store: &Store, aio: &str, dir: &Path) -> Result<BackEnd> {
    std::fs::create_dir_all(dir)?;
    let socket = dir.join("d0");
    let blockdev = match store {
        Store::Null { size } => format!("driver=null-co,node-name=d0,size={size},read-zeroes=off"),
        Store::Memory { peer, .. } => {
            format!("driver=file,node-name=d0,filename={},aio={aio}", peer.display())
        }
        // `arykd` holds the file's lock.
        Store::Luks { path } => {
            let name = path.display();
            format!(
                "driver=luks,node-name=d0,key-secret=luks,file.driver=file,file.filename={name},file.aio={aio},file.locking=off"
            )
        }
        Store::Encrypted { .. } => bail!("only `arykd` encrypts its memory"),
        // The bench process holds the file's lock.
        Store::File { path } => {
            let name = path.display();
            format!("driver=file,node-name=d0,filename={name},aio={aio},cache.direct=on,locking=off")
        }
    };
    let export = format!(
        "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,iothread=t0",
        socket.display()
    );
    let core = BACK_END_CORE.to_string();
    let secret = format!("secret,{LUKS_SECRET}");
    let args = [
        "-c",
        &core,
        "qemu-storage-daemon",
        "--object",
        "iothread,id=t0",
        "--object",
        &secret,
        "--blockdev",
        &blockdev,
        "--export",
        &export,
    ];
    let mut process = Process::start("qemu-storage-daemon", Path::new("taskset"), &args)?;
    process.wait_for(&socket)?;
    Ok(BackEnd { process, socket, rpc: None })
}

/// Builds the release `arykd` and returns its path, beside this program.
pub fn build_arykd() -> Result<PathBuf> {
    build_program("arykd")
}

/// Builds the release version of a program of the workspace and returns its path. Builds the same packages as
/// `cargo xtask bench`: another choice gives the libraries other features, and rebuilds all of them.
pub fn build_program(name: &str) -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let packages = ["arykd", "aryk", env!("CARGO_PKG_NAME")].map(|package| ["--package", package]);
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--release"])
        .args(packages.as_flattened())
        .status()
        .context("running cargo")?;
    anyhow::ensure!(status.success(), "{name} cannot be built");
    Ok(std::env::current_exe()?.with_file_name(name))
}
