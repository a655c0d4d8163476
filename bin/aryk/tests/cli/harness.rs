//! A daemon in a temporary directory, and `aryk` commands for it.

use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;
use tempfile::TempDir;

const ARYK: &str = env!("CARGO_BIN_EXE_aryk");
const PATIENCE: Duration = Duration::from_secs(30);

/// A running daemon; killed when dropped.
pub struct Daemon {
    dir: TempDir,
    process: Child,
}

/// The outcome of a command.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Daemon {
    /// Starts a daemon on one core, and waits until it replies.
    pub fn start() -> Self {
        Self::start_with(|_| Stdio::null())
    }

    /// Starts a daemon with its log in a file.
    pub fn start_logging() -> Self {
        Self::start_with(log_in)
    }

    /// Starts a daemon with a state directory and its log in a file.
    pub fn start_keeping() -> Self {
        let dir = TempDir::new().unwrap();
        let process = spawn(dir.path(), log_in(dir.path()), true);
        let daemon = Self { dir, process };
        daemon.wait();
        daemon
    }

    /// Stops a daemon with a state directory, calls `action` with its directory, and starts it again. Returns when the
    /// daemon has tried to restore each object.
    pub fn restart(&mut self, action: impl FnOnce(&Path)) {
        self.kill();
        action(self.dir());
        self.process = spawn(self.dir(), log_in(self.dir()), true);
        self.wait();
        self.ok(&["rpc", "framework_wait_init"]);
    }

    fn start_with(stderr: impl FnOnce(&Path) -> Stdio) -> Self {
        let dir = TempDir::new().unwrap();
        let process = spawn(dir.path(), stderr(dir.path()), false);
        let daemon = Self { dir, process };
        daemon.wait();
        daemon
    }

    /// Waits until the daemon replies.
    fn wait(&self) {
        for _ in 0..PATIENCE.as_millis() / 10 {
            if self.run(&["status"]).code == 0 {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
        panic!("arykd does not come up");
    }

    /// The daemon's directory, in which commands run.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// `PATH` with the tested programs first.
    pub fn path(&self) -> OsString {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let ours = Path::new(ARYK).parent().unwrap().to_owned();
        std::env::join_paths(std::iter::once(ours).chain(std::env::split_paths(&path))).unwrap()
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// `aryk` with these arguments, to be run.
    pub fn aryk(&self, args: &[&str]) -> Command {
        let mut command = Command::new(ARYK);
        command.args(args).env("ARYK_SOCKET", self.dir().join("rpc.sock")).current_dir(self.dir());
        command.stdin(Stdio::null());
        command
    }

    /// Runs `aryk`.
    pub fn run(&self, args: &[&str]) -> Outcome {
        outcome(&mut self.aryk(args))
    }

    /// Runs `aryk`, which must succeed. Returns its output.
    #[track_caller]
    pub fn ok(&self, args: &[&str]) -> String {
        let outcome = self.run(args);
        assert_eq!(outcome.code, 0, "{args:?}: {outcome:?}");
        outcome.stdout
    }

    /// Runs `aryk --json`, which must succeed.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Value {
        let text = self.ok(&[&["--json"], args].concat());
        serde_json::from_str(&text).unwrap()
    }

    /// Runs `aryk`, which must fail. Returns its exit code and error text.
    #[track_caller]
    pub fn fails(&self, args: &[&str]) -> (i32, String) {
        let outcome = self.run(args);
        assert_ne!(outcome.code, 0, "{args:?}: {outcome:?}");
        (outcome.code, outcome.stderr)
    }
}

/// Creates an empty file `log`.
fn log_in(dir: &Path) -> Stdio {
    std::fs::File::create(dir.join("log")).unwrap().into()
}

fn spawn(dir: &Path, stderr: Stdio, keeps: bool) -> Child {
    let mut command = Command::new(arykd());
    command.arg("-r").arg(dir.join("rpc.sock")).arg("-S").arg(dir.join("vhost"));
    if keeps {
        command.arg("--state-dir").arg(dir.join("state"));
    }
    command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
}

/// Runs a command to its end.
pub fn outcome(command: &mut Command) -> Outcome {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The daemon's program, built next to `aryk`.
fn arykd() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // A test run of the whole workspace has built it already: built alone, its libraries would have other features.
        if let Some(built) = std::env::var_os("ARYKD") {
            return built.into();
        }
        let dir = Path::new(ARYK).parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "arykd", "--target-dir"]).arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        dir.join("arykd")
    })
}
