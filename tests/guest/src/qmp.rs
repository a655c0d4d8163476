//! A running QEMU's monitor, as far as tests need it: one command at a time, each with its reply.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::process::wait_until;

/// Timeout, longer than any command that does not wait for a back-end.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A connection to a QEMU's monitor.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to the monitor at `socket`, once it exists.
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let stream = wait_until("QEMU's monitor", TIMEOUT, || Ok(UnixStream::connect(socket).ok()))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut qmp = Self { stream: BufReader::new(stream) };
        qmp.read()?;
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its result.
    pub(crate) fn call(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        writeln!(self.stream.get_mut(), "{request}")?;
        loop {
            let mut answer = self.read().with_context(|| format!("{command}'s answer"))?;
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {command}: {}", error["desc"]);
            }
            // Events may come before the reply.
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            bail!("QEMU has closed its monitor");
        }
        Ok(serde_json::from_str(&line)?)
    }
}
