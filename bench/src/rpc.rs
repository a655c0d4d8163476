//! A client of `arykd`'s JSON-RPC, one call at a time.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout between a daemon's bind and listen.
const START_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection to the daemon.
#[derive(Debug)]
pub struct Rpc {
    stream: UnixStream,
    calls: u64,
}

impl Rpc {
    /// Connects to the daemon's socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let connect = || {
            let start = Instant::now();
            let stream = loop {
                match UnixStream::connect(socket) {
                    // The socket is bound, and does not listen yet.
                    Err(e) if e.kind() == ErrorKind::ConnectionRefused && start.elapsed() < START_TIMEOUT => {
                        std::thread::yield_now();
                    }
                    connected => break connected?,
                }
            };
            stream.set_read_timeout(Some(TIMEOUT))?;
            std::io::Result::Ok(stream)
        };
        let stream = connect().with_context(|| format!("connecting to {}", socket.display()))?;
        Ok(Self { stream, calls: 0 })
    }

    /// Calls `method` and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        self.calls += 1;
        let call = json!({"jsonrpc": "2.0", "id": self.calls, "method": method, "params": params});
        self.stream.write_all(call.to_string().as_bytes())?;
        let mut replies = serde_json::Deserializer::from_reader(&self.stream);
        let mut reply = Value::deserialize(&mut replies).with_context(|| format!("no reply to {method}"))?;
        if let Some(error) = reply.get("error") {
            bail!("{method}: {error}");
        }
        Ok(reply["result"].take())
    }

    /// The busy time of all reactors so far, in ns.
    pub fn busy(&mut self) -> Result<f64> {
        let all = self.call("framework_get_reactors", json!({}))?;
        let rate = all["tick_rate"].as_f64().context("framework_get_reactors returns tick_rate")?;
        let reactors = all["reactors"].as_array().context("framework_get_reactors lists reactors")?;
        let busy: Option<f64> = reactors.iter().map(|reactor| reactor["busy"].as_f64()).sum();
        Ok(busy.context("each reactor has a busy time")? * 1e9 / rate)
    }
}
