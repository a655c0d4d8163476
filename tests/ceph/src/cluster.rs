//! A Ceph cluster in one directory: a monitor and OSDs on one address of this host. Test tool, the thread that starts the
//! cluster.
//!
//! The daemons are children that the kernel kills when that thread ends, for any reason. A stopped daemon (SIGSTOP) keeps
//! its connections and answers nothing, as behind a broken network; a killed one closes its connections.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aryk_guest_tests::process::{Process, Signal, Stdin, wait_until};
use rustix::process::{Pid, kill_process};

use crate::settings;

/// Seconds until a command of `ceph` or `rbd` is ended: some wait without end for a cluster that does not answer.
const COMMAND_SECONDS: u32 = 60;
/// How long a daemon may take to stop at SIGSTOP, and the monitor to notice another one's end.
const PATIENCE: Duration = Duration::from_secs(20);
/// The pool that every cluster has.
pub const POOL: &str = "rbd";

/// Where an OSD keeps its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// In memory: a killed OSD loses them.
    Memory,
    /// In a sparse file, as BlueStore keeps them on a block device.
    File,
}

/// The shape of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Number of OSDs.
    pub osds: u32,
    /// Copies of each object.
    pub copies: u32,
    /// Where they keep their objects.
    pub store: Store,
    /// Whether clients authenticate by keys (cephx).
    pub authenticated: bool,
}

impl Kind {
    /// The cluster that starts fastest.
    pub const SMALL: Self = Self { osds: 1, copies: 1, store: Store::Memory, authenticated: false };
}

/// A running cluster; killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    kind: Kind,
    address: String,
    monitor: Process,
    osds: Vec<Process>,
    /// Deleted after the daemons have ended.
    directory: tempfile::TempDir,
}

/// Daemons that do not run until this is dropped.
#[derive(Debug)]
pub struct Stopped {
    pids: Vec<Pid>,
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for &pid in &self.pids {
            // Fails if the daemon has been killed meanwhile.
            let _ = kill_process(pid, Signal::CONT);
        }
    }
}

impl Cluster {
    /// Starts a cluster in a new directory, and returns when its pool [`POOL`] takes images.
    ///
    /// # Errors
    /// A program of Ceph is missing or fails; the end of the logs is in the error.
    pub fn start(kind: &Kind) -> Result<Self> {
        Self::start_at(kind, "127.0.0.1")
    }

    /// As [`Cluster::start`], with daemons that listen at this IPv4 address.
    ///
    /// # Errors
    /// As there.
    pub fn start_at(kind: &Kind, address: &str) -> Result<Self> {
        // Short, because paths of sockets have at most 107 bytes.
        let directory = tempfile::Builder::new().prefix("ceph-").tempdir()?;
        let site = Site { directory: directory.path(), kind, address };
        site.configure()?;
        let mut monitor = site.monitor()?;
        let osds = site.osds(&mut monitor).with_context(|| site.logs())?;
        let mut cluster = Self { kind: kind.clone(), address: address.to_owned(), monitor, osds, directory };
        let ready = cluster.rbd(&["pool", "init", POOL]);
        ready.with_context(|| cluster.site().logs())?;
        if kind.osds > 1 {
            // Until an OSD is up, its objects are with the others.
            cluster.await_up(kind.osds)?;
        }
        cluster.check_alive()?;
        Ok(cluster)
    }

    /// The cluster's configuration file. It names the keyring of `client.admin`.
    #[must_use]
    pub fn conf(&self) -> PathBuf {
        self.site().conf()
    }

    /// The directory of the cluster's files.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Runs `ceph` with `arguments`; returns its standard output.
    ///
    /// # Errors
    /// It fails, or does not end in time.
    pub fn ceph(&self, arguments: &[&str]) -> Result<String> {
        self.site().run("ceph", arguments, "")
    }

    /// Runs `rbd` with `arguments`; returns its standard output.
    ///
    /// # Errors
    /// It fails, or does not end in time.
    pub fn rbd(&self, arguments: &[&str]) -> Result<String> {
        self.site().run("rbd", arguments, "")
    }

    /// Runs `rados` with `arguments`; returns its standard output.
    ///
    /// # Errors
    /// It fails, or does not end in time.
    pub fn rados(&self, arguments: &[&str]) -> Result<String> {
        self.site().run("rados", arguments, "")
    }

    /// Creates a pool, and returns when it takes images.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn create_pool(&self, pool: &str) -> Result<()> {
        self.ceph(&["osd", "pool", "create", pool])?;
        self.rbd(&["pool", "init", pool]).map(drop)
    }

    /// Creates an image of `size`, such as `64M`, in [`POOL`].
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn create_image(&self, image: &str, size: &str) -> Result<()> {
        self.rbd(&["create", "--size", size, &format!("{POOL}/{image}")]).map(drop)
    }

    /// The content of an image of [`POOL`], read by `rbd`.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn content(&self, image: &str) -> Result<Vec<u8>> {
        let file = tempfile::NamedTempFile::new_in(self.directory())?;
        std::fs::remove_file(file.path())?;
        let path = file.path().display().to_string();
        self.rbd(&["export", "--no-progress", &format!("{POOL}/{image}"), &path])?;
        Ok(std::fs::read(path)?)
    }

    /// Creates the user `client.NAME` that may use the images of `pool`; returns the file of its key.
    ///
    /// # Errors
    /// The cluster refuses.
    pub fn create_user(&self, name: &str, pool: &str) -> Result<PathBuf> {
        ensure!(self.kind.authenticated, "this cluster has no users");
        let keyring = self.directory().join(format!("client.{name}.keyring"));
        let (entity, osd) = (format!("client.{name}"), format!("profile rbd pool={pool}"));
        let capabilities = ["mon", "profile rbd", "osd", &osd, "-o", &keyring.display().to_string()];
        self.ceph(&[&["auth", "get-or-create", &entity][..], &capabilities].concat())?;
        Ok(keyring)
    }

    /// Stops the monitor: clients without a connection to it get none, others keep the maps that they have.
    ///
    /// # Errors
    /// It has ended.
    pub fn stop_monitor(&self) -> Result<Stopped> {
        stop(&[&self.monitor])
    }

    /// Stops one OSD: requests to its objects do not complete, others do.
    ///
    /// # Errors
    /// There is no such OSD, or it has ended.
    pub fn stop_osd(&self, number: usize) -> Result<Stopped> {
        stop(&[self.osds.get(number).context("no such OSD")?])
    }

    /// Stops all OSDs: no request to an image completes. The monitor runs on.
    ///
    /// # Errors
    /// One has ended.
    pub fn stop_osds(&self) -> Result<Stopped> {
        stop(&self.osds.iter().collect::<Vec<_>>())
    }

    /// Kills an OSD, which closes its connections.
    ///
    /// # Errors
    /// There is no such OSD, or it would lose its objects.
    pub fn kill_osd(&mut self, number: usize) -> Result<()> {
        ensure!(self.kind.store == Store::File, "an OSD in memory would lose its objects");
        self.osds.get_mut(number).context("no such OSD")?.kill();
        Ok(())
    }

    /// Starts a killed OSD again.
    ///
    /// # Errors
    /// There is no such OSD, or it cannot be started.
    pub fn start_osd(&mut self, number: usize) -> Result<()> {
        let osd = self.site().osd(number)?;
        *self.osds.get_mut(number).context("no such OSD")? = osd;
        Ok(())
    }

    /// Waits until the monitor counts `up` OSDs that are up. The monitor knows of a killed OSD from the others only.
    ///
    /// # Errors
    /// It counts others for too long.
    pub fn await_up(&self, up: u32) -> Result<()> {
        let told = format!(" {up} up ");
        wait_until(&format!("{up} OSDs to be up"), PATIENCE, || {
            Ok(self.ceph(&["osd", "stat"])?.contains(&told).then_some(()))
        })
    }

    /// The process ids of the daemons.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.osds.iter().chain([&self.monitor]).map(Process::pid).collect()
    }

    /// Fails if a daemon has ended by itself.
    ///
    /// # Errors
    /// The daemon's status, with the end of the logs.
    pub fn check_alive(&mut self) -> Result<()> {
        let mut ended = self.monitor.exited()?;
        for osd in &mut self.osds {
            ended = ended.or(osd.exited()?);
        }
        match ended {
            None => Ok(()),
            Some(status) => bail!("a daemon of Ceph ended: {status}\n{}", self.site().logs()),
        }
    }

    fn site(&self) -> Site<'_> {
        Site { directory: self.directory.path(), kind: &self.kind, address: &self.address }
    }
}

/// Stops processes, and returns when none of their threads runs.
fn stop(processes: &[&Process]) -> Result<Stopped> {
    let mut stopped = Stopped { pids: Vec::new() };
    for process in processes {
        let pid = Pid::from_raw(process.pid().cast_signed()).context("a process without an id")?;
        kill_process(pid, Signal::STOP)?;
        stopped.pids.push(pid);
    }
    for process in processes {
        wait_until("a daemon of Ceph to stop", PATIENCE, || Ok(is_stopped(process.pid())?.then_some(())))?;
    }
    Ok(stopped)
}

/// Whether every thread of a process is stopped (proc_pid_stat(5)).
fn is_stopped(pid: u32) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may have ended meanwhile.
        let Ok(stat) = std::fs::read_to_string(thread?.path().join("stat")) else { continue };
        let (_, fields) = stat.rsplit_once(')').context("no name in a process's stat")?;
        if !fields.trim_start().starts_with('T') {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The directory of a cluster, and the programs that work in it.
struct Site<'a> {
    directory: &'a Path,
    kind: &'a Kind,
    address: &'a str,
}

impl Site<'_> {
    fn conf(&self) -> PathBuf {
        self.directory.join("ceph.conf")
    }

    /// Writes the configuration, and the keys of the daemons and of `client.admin`.
    fn configure(&self) -> Result<()> {
        let fsid = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        // The port is free now; another process may take it before the monitor does, which then fails.
        let port = TcpListener::bind((self.address, 0))?.local_addr()?.port();
        let monitor = format!("{}:{port}", self.address);
        std::fs::write(self.conf(), settings::text(self.directory, fsid.trim(), &monitor, self.kind))?;
        if self.kind.authenticated {
            self.key("mon.", &["mon", "allow *"])?;
            self.key("client.admin", &["mon", "allow *", "osd", "allow *"])?;
            for osd in 0..self.kind.osds {
                self.key(&format!("osd.{osd}"), &["mon", "allow profile osd", "osd", "allow *"])?;
            }
        }
        Ok(())
    }

    /// Adds a new key with capabilities to the keyring.
    fn key(&self, name: &str, capabilities: &[&str]) -> Result<()> {
        let keyring = self.directory.join("keyring");
        let mut arguments = vec![keyring.to_str().context("a path")?, "--gen-key", "--name", name];
        if !keyring.exists() {
            arguments.push("--create-keyring");
        }
        for pair in capabilities.chunks_exact(2) {
            arguments.extend(["--cap", pair[0], pair[1]]);
        }
        self.run("ceph-authtool", &arguments, "").map(drop)
    }

    fn monitor(&self) -> Result<Process> {
        let keyring = self.directory.join("keyring").display().to_string();
        let mut arguments = vec!["--mkfs", "--id", "a"];
        if self.kind.authenticated {
            arguments.extend(["--keyring", &keyring]);
        }
        self.run("ceph-mon", &arguments, "")?;
        self.daemon("ceph-mon", "a")
    }

    /// Creates and starts the OSDs, and creates the pool.
    fn osds(&self, monitor: &mut Process) -> Result<Vec<Process>> {
        let mut commands = String::new();
        let mut ids = Vec::new();
        for _ in 0..self.kind.osds {
            let id = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned();
            writeln!(commands, "osd new {id}")?;
            ids.push(id);
        }
        writeln!(commands, "osd pool create {POOL}")?;
        std::thread::scope(|scope| {
            // One run of `ceph` for all commands: each start takes half a second.
            let registered = scope.spawn(|| self.run("ceph", &[], &commands));
            for (number, id) in ids.iter().enumerate() {
                let name = number.to_string();
                std::fs::create_dir(self.directory.join(format!("osd.{name}")))?;
                self.run("ceph-osd", &["--mkfs", "--id", &name, "--osd-uuid", id, "--no-mon-config"], "")?;
            }
            registered.join().expect("the thread does not panic").map(drop)
        })?;
        if let Some(status) = monitor.exited()? {
            bail!("the monitor ended: {status}");
        }
        (0..self.kind.osds as usize).map(|number| self.osd(number)).collect()
    }

    fn osd(&self, number: usize) -> Result<Process> {
        self.daemon("ceph-osd", &number.to_string())
    }

    fn daemon(&self, program: &str, id: &str) -> Result<Process> {
        let conf = self.conf().display().to_string();
        let arguments = ["--conf", &conf, "--id", id, "--foreground"].map(str::to_owned);
        let log = self.directory.join(format!("{program}.{id}.out"));
        Process::spawn(Path::new(program), &arguments, Stdin::Null, &log)
    }

    /// Runs a program of Ceph to its end with `input`; returns its standard output.
    fn run(&self, program: &str, arguments: &[&str], input: &str) -> Result<String> {
        let mut command = Command::new("setpriv");
        // `timeout` passes the signal on that it gets when this thread ends.
        command.args(["--pdeathsig", "TERM", "--", "timeout", "--kill-after=5"]);
        command.arg(COMMAND_SECONDS.to_string()).arg(program).arg("--conf").arg(self.conf());
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let what = format!("{program} {}", arguments.join(" "));
        let mut child = command.spawn().with_context(|| format!("running {what}"))?;
        let mut stdin = child.stdin.take().context("stdin is a pipe")?;
        // A program that does not read its input ends first: its status says what it found.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("{what}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The end of all logs, to explain a failure.
    fn logs(&self) -> String {
        const LINES: usize = 15;
        let mut text = String::new();
        let entries = std::fs::read_dir(self.directory).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            if path.extension().is_some_and(|kind| kind == "log" || kind == "out") {
                let log = std::fs::read_to_string(&path).unwrap_or_default();
                let lines: Vec<_> = log.lines().collect();
                let end = lines[lines.len().saturating_sub(LINES)..].join("\n");
                text += &format!("── {}\n{end}\n", path.display());
            }
        }
        text
    }
}
