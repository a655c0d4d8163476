//! JSON-RPC calls to a daemon, without another program in between. Test tool, any thread.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `method`; returns its result, and the duration of the call without the connection.
///
/// # Errors
/// The daemon does not reply, or replies with an error.
pub(crate) fn call(socket: &Path, method: &str, params: &Value) -> Result<(Value, Duration)> {
    let mut stream = UnixStream::connect(socket).context("the RPC socket")?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let started = Instant::now();
    serde_json::to_writer(&mut stream, &request).with_context(|| method.to_owned())?;
    let mut answers = serde_json::Deserializer::from_reader(stream).into_iter::<Value>();
    let mut answer = answers.next().with_context(|| format!("{method}: no answer"))??;
    let elapsed = started.elapsed();
    if let Some(error) = answer.get("error") {
        bail!("{method}: {error}");
    }
    Ok((answer["result"].take(), elapsed))
}
