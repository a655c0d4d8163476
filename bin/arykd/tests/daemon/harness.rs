//! A daemon in a temporary directory, and its clients.

use aryk_rpc_client::{Client, Reply};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

/// The daemon's program.
pub const ARYKD: &str = env!("CARGO_BIN_EXE_arykd");
const PATIENCE: Duration = Duration::from_secs(30);
/// `aryk` may search a file, or wait until a pool can be taken over.
const ARYK_PATIENCE: Duration = Duration::from_secs(300);

/// A running daemon; killed when dropped.
pub struct Daemon {
    dir: TempDir,
    flags: Vec<String>,
    process: Child,
}

impl Daemon {
    /// Starts a daemon on one core, and waits until it replies.
    pub fn start(flags: &[&str]) -> Self {
        Self::start_in(TempDir::new().unwrap(), flags)
    }

    /// Starts a daemon in a directory; `DIR` in a flag stands for that directory.
    pub fn start_in(dir: TempDir, flags: &[&str]) -> Self {
        let flags = in_dir(flags, dir.path());
        let process = spawn(dir.path(), &flags);
        let daemon = Self { dir, flags, process };
        daemon.wait_until_ready();
        daemon
    }

    /// Starts a daemon that writes its log to the file `log` in its directory.
    pub fn start_logging(flags: &[&str]) -> Self {
        Self::start_logging_in(TempDir::new().unwrap(), flags)
    }

    /// As [`Daemon::start_logging`], in a directory; `DIR` in a flag stands for that directory.
    pub fn start_logging_in(dir: TempDir, flags: &[&str]) -> Self {
        let flags = in_dir(flags, dir.path());
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let process = command(dir.path(), &flags).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let daemon = Self { dir, flags, process };
        daemon.wait_until_ready();
        daemon
    }

    /// Starts a daemon in a network namespace of its own, which ends with it. Needs root.
    pub fn start_in_network(flags: &[&str]) -> Self {
        let tried = Command::new("unshare").args(["--net", "true"]).output().unwrap();
        let said = String::from_utf8_lossy(&tried.stderr);
        assert!(
            tried.status.success(),
            "the test needs a network namespace, which only root can make: {said}"
        );
        let dir = TempDir::new().unwrap();
        let flags = in_dir(flags, dir.path());
        let daemon = command(dir.path(), &flags);
        let mut command = Command::new("unshare");
        command.arg("--net").arg(daemon.get_program()).args(daemon.get_args());
        let process = command.stdout(Stdio::piped()).spawn().unwrap();
        let daemon = Self { dir, flags, process };
        daemon.wait_until_ready();
        daemon
    }

    /// Waits until the daemon replies and has restored its configuration; one that waits for an RPC needs only reply.
    pub fn wait_until_ready(&self) {
        wait_for("arykd is up", || self.try_connect().is_some());
        if !self.flags.iter().any(|flag| flag == "--wait-for-rpc") {
            self.wait_for_init();
        }
    }

    /// Waits until the configuration is restored. Errors are ignored: the test detects a daemon that ends or refuses the call.
    fn wait_for_init(&self) {
        let mut stream = self.connect();
        let request = json!({"jsonrpc": "2.0", "id": 1, "method": "framework_wait_init"});
        let sent = stream.write_all(request.to_string().as_bytes());
        let _ = sent.and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let _ = stream.read_to_end(&mut Vec::new());
    }

    /// Waits until the disk `name` has requests in flight.
    pub fn wait_until_busy(&self, name: &str) {
        let is_busy = |disk: &Value| disk["name"] == name && disk["in_flight"] != 0;
        let reported = || self.call("aryk_stats_get", json!({})).unwrap();
        wait_for("the disk has work", || reported()["disks"].as_array().unwrap().iter().any(is_busy));
    }

    /// The daemon's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("rpc.sock")
    }

    /// Runs another daemon on the same socket, to its end.
    pub fn run_another(&self) -> Output {
        command(self.dir.path(), &self.flags).output().unwrap()
    }

    /// Kills the daemon, and starts its successor.
    pub fn kill_and_restart(&mut self) {
        self.kill();
        self.restart();
    }

    /// Ends the daemon with SIGTERM, and starts its successor.
    pub fn end_and_restart(&mut self) {
        assert_eq!(self.signal_and_wait("TERM", PATIENCE), Some(0));
        self.restart();
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Starts the successor of a killed daemon, with other flags.
    pub fn restart_with(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(|&flag| flag.to_owned()).collect();
        self.restart();
    }

    /// Starts the successor of a killed daemon.
    pub fn restart(&mut self) {
        self.process = spawn(self.dir.path(), &self.flags);
        self.wait_until_ready();
    }

    /// Starts a daemon with the state of the one that was killed. It kills itself at a step, such as `rekey-written:2`.
    pub fn restart_to_die_at(&mut self, step: &str) {
        let mut command = command(self.dir.path(), &self.flags);
        self.process = command.env("ARYK_CRASH_STEP", step).stdout(Stdio::null()).spawn().unwrap();
    }

    /// Starts a successor of a killed daemon. It replies, and may still restore its configuration.
    pub fn begin_restart(&mut self) {
        self.process = spawn(self.dir.path(), &self.flags);
        wait_for("arykd is up", || self.try_connect().is_some());
    }

    /// Ends the daemon with SIGTERM. Returns its output.
    pub fn end(mut self) -> String {
        self.call("spdk_kill_instance", json!({"sig_name": "SIGTERM"})).unwrap();
        assert!(self.process.wait().unwrap().success());
        let left: Vec<_> = std::fs::read_dir(self.dir()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["vhost"], "only the directory of sockets stays");
        let mut printed = String::new();
        self.process.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
        printed
    }

    /// Sends a signal. Returns the exit code if the daemon ends within `patience`.
    pub fn signal_and_wait(&mut self, name: &str, patience: Duration) -> Option<i32> {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
        self.wait(patience)
    }

    /// The exit code if the daemon ends within `patience`.
    pub fn wait(&mut self, patience: Duration) -> Option<i32> {
        for _ in 0..patience.as_millis() / 10 {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
        None
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The TCP port of 127.0.0.1 on which the daemon listens: the kernel chose it, so no other process can have it.
    pub fn port(&self) -> u16 {
        let of = |path: &str| std::fs::read_to_string(format!("/proc/{}/{path}", self.pid())).unwrap();
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        // A descriptor may be closed meanwhile.
        let sockets: Vec<_> =
            files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok()).collect();
        let listening = of("net/tcp").lines().find_map(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            // State 0A is LISTEN; the tenth field is the inode: proc_net_tcp.rst of the kernel.
            let &[_, local, _, "0A", _, _, _, _, _, inode, ..] = &fields[..] else { return None };
            let (_, port) = local.split_once(':')?;
            let is_ours = sockets.contains(&PathBuf::from(format!("socket:[{inode}]")));
            is_ours.then(|| u16::from_str_radix(port, 16).unwrap())
        });
        listening.expect("the daemon listens")
    }

    /// A connection, if a daemon listens.
    pub fn try_connect(&self) -> Option<UnixStream> {
        UnixStream::connect(self.socket()).ok()
    }

    /// A connection to the daemon.
    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Calls a method. Returns its result or its error.
    pub fn call(&self, method: &str, params: Value) -> Reply {
        self.try_call(method, params).expect("the daemon answers")
    }

    /// Calls a method; `None` if no daemon replies.
    pub fn try_call(&self, method: &str, params: Value) -> Option<Reply> {
        Client::connect(&self.socket()).ok()?.call(method, &params).ok()
    }

    /// Runs `aryk`. Returns its output, or its exit code and error text.
    pub fn aryk(&self, args: &[&str]) -> Result<String, (i32, String)> {
        let output = self.run_aryk(args);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        match output.status.code().unwrap() {
            0 => Ok(text(output.stdout)),
            code => Err((code, text(output.stderr))),
        }
    }

    /// Runs `aryk`. Returns all that it prints.
    pub fn run_aryk(&self, args: &[&str]) -> Output {
        let aryk = self.aryk_command(args);
        // A test that hangs for ever would not be named.
        let mut limited = Command::new("timeout");
        limited.arg(ARYK_PATIENCE.as_secs().to_string()).arg(aryk.get_program()).args(aryk.get_args());
        limited.envs(aryk.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = limited.current_dir(self.dir()).output().unwrap();
        assert_ne!(output.status.code(), Some(124), "aryk {args:?} has not ended in {ARYK_PATIENCE:?}");
        output
    }

    /// Starts `aryk`.
    pub fn start_aryk(&self, args: &[&str]) -> Child {
        self.aryk_command(args).spawn().unwrap()
    }

    fn aryk_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(aryk());
        command.args(args).env("ARYK_SOCKET", self.socket()).current_dir(self.dir());
        command
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn in_dir(flags: &[&str], dir: &Path) -> Vec<String> {
    let dir = dir.to_str().unwrap();
    flags.iter().map(|flag| flag.replace("DIR", dir)).collect()
}

/// Waits until `is_so` returns true.
#[track_caller]
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let is_so = (0..PATIENCE.as_millis() / 10).any(|_| {
        is_so() || {
            std::thread::park_timeout(Duration::from_millis(10));
            false
        }
    });
    assert!(is_so, "not in {PATIENCE:?}: {what}");
}

/// The code of an error.
#[track_caller]
pub fn code(reply: Reply) -> i64 {
    reply.unwrap_err()["code"].as_i64().unwrap()
}

fn command(dir: &Path, flags: &[String]) -> Command {
    // The gate measures under attack the daemon of the release build.
    let mut command = Command::new(std::env::var_os("ARYKD").unwrap_or_else(|| ARYKD.into()));
    command.arg("-r").arg(dir.join("rpc.sock")).arg("-S").arg(dir.join("vhost")).args(flags);
    // The substitute for librbd, if the daemon loads it, looks there for its gates.
    command.env("LIBRBD_STUB_DIR", dir);
    command
}

/// Runs a daemon to its end.
pub fn run_in(dir: &Path, flags: &[&str]) -> Output {
    let flags: Vec<_> = flags.iter().map(|&flag| flag.to_owned()).collect();
    command(dir, &flags).output().unwrap()
}

fn spawn(dir: &Path, flags: &[String]) -> Child {
    command(dir, flags).stdout(Stdio::piped()).spawn().unwrap()
}

/// The program `aryk`, built next to the daemon.
fn aryk() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // A test run of the whole workspace has built it already: built alone, its libraries would have other features.
        if let Some(built) = std::env::var_os("ARYK") {
            return built.into();
        }
        let dir = Path::new(ARYKD).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "aryk", "--target-dir"]).arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        dir.join("aryk")
    })
}

/// The substitute for librbd, a library beside the test.
pub fn librbd_stub() -> String {
    let path = Path::new(ARYKD).parent().unwrap().join("deps/libaryk_librbd_stub.so");
    path.to_str().unwrap().to_owned()
}
