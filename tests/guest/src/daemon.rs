//! `arykd` under test, controlled by `aryk` as an operator does.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aryk_rpc_client::Client;
use serde_json::Value;

use crate::process::{Process, Signal, Stdin, wait_until};

/// Timeout of an orderly shutdown, which drains I/O; the disk of a laptop may need a while.
const DRAIN: Duration = Duration::from_secs(20);

/// A running `arykd` with its sockets, log and disks in one directory; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
    aryk: PathBuf,
    directory: PathBuf,
}

impl Daemon {
    /// Starts `arykd` from the directory of programs `bin`, with further `options`; returns once it answers calls.
    ///
    /// # Errors
    /// The daemon cannot be started, or ends before it answers.
    pub fn start(bin: &Path, directory: &Path, options: &[&str]) -> Result<Self> {
        let sockets = directory.join("vhost");
        std::fs::create_dir_all(&sockets)?;
        let rpc = directory.join("rpc.sock");
        let mut arguments = vec!["-r".to_owned(), rpc.display().to_string()];
        arguments.extend(["-S".to_owned(), sockets.display().to_string()]);
        arguments.extend(options.iter().map(|&option| option.to_owned()));
        let log = directory.join("arykd.log");
        let process = Process::spawn(&bin.join("arykd"), &arguments, Stdin::Null, &log)?;
        let mut daemon = Self { process, aryk: bin.join("aryk"), directory: directory.to_owned() };
        wait_until("arykd to answer", Duration::from_secs(10), || {
            daemon.alive()?;
            Ok(daemon.aryk(&["status"]).ok())
        })?;
        // It answers before it has restored what was configured.
        daemon.rpc("framework_wait_init", &serde_json::json!({}))?;
        Ok(daemon)
    }

    /// Runs `aryk` with `arguments` and returns its standard output.
    ///
    /// # Errors
    /// `aryk` exits with another status than 0; its output is in the error.
    pub fn aryk(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new(&self.aryk)
            .arg("-s")
            .arg(self.directory.join("rpc.sock"))
            .args(arguments)
            .output()
            .with_context(|| format!("running {}", self.aryk.display()))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("aryk {}: {}: {}", arguments.join(" "), output.status, said.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Calls a JSON-RPC method.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn rpc(&self, method: &str, params: &Value) -> Result<Value> {
        let answer = self.aryk(&["--json", "rpc", method, &params.to_string()])?;
        serde_json::from_str(&answer).with_context(|| format!("{method} answered {answer:?}"))
    }

    /// Calls a JSON-RPC method directly, without `aryk`; also returns the duration of the call.
    ///
    /// # Errors
    /// The daemon refuses, or does not reply.
    pub fn call(&self, method: &str, params: &Value) -> Result<(Value, Duration)> {
        let mut client = Client::connect(&self.directory.join("rpc.sock")).context("the RPC socket")?;
        let started = Instant::now();
        let result = client.result(method, params)?;
        Ok((result, started.elapsed()))
    }

    /// Attaches a disk, with further `options`, and returns its controller's socket.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn attach(&self, disk: &str, options: &[&str]) -> Result<PathBuf> {
        let arguments = [&["--json", "attach", disk], options].concat();
        let controller: Value = serde_json::from_str(&self.aryk(&arguments)?)?;
        let socket = controller["socket"].as_str().context("a controller without a socket")?;
        Ok(PathBuf::from(socket))
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Kills the daemon like a crash, and waits until it has ended.
    pub fn kill(mut self) {
        self.process.kill();
    }

    /// Fails if the daemon has ended.
    ///
    /// # Errors
    /// The daemon's status, with the end of its log.
    pub fn alive(&mut self) -> Result<()> {
        if let Some(status) = self.process.exited()? {
            bail!("arykd ended: {status}\n{}", self.process.log_tail());
        }
        Ok(())
    }

    /// Ends the daemon by SIGTERM, as an operator does.
    ///
    /// # Errors
    /// The daemon has ended before, does not end in time, or exits with another status than 0.
    pub fn stop(mut self) -> Result<()> {
        self.alive()?;
        self.process.signal(Signal::TERM)?;
        let status = self.process.wait(DRAIN)?;
        ensure!(status.success(), "arykd ended with {status}\n{}", self.process.log_tail());
        Ok(())
    }

    /// The end of the daemon's log, to explain another failure.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }
}
