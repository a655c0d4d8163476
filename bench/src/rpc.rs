//! A client of `arykd`'s JSON-RPC, one call at a time.

use anyhow::{Context, Result};
use aryk_rpc_client::Client;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Timeout between a daemon's bind and listen.
const START_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection to the daemon.
#[derive(Debug)]
pub struct Rpc(Client);

impl Rpc {
    /// Connects to the daemon's socket.
    pub fn connect(socket: &Path) -> Result<Self> {
        let connected = Client::connect_within(socket, START_TIMEOUT);
        Ok(Self(connected.with_context(|| format!("connecting to {}", socket.display()))?))
    }

    /// Calls `method` and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value> {
        Ok(self.0.result(method, &params)?)
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
