//! JSON-RPC calls to a daemon that may be starting. Test tool, any thread.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for the daemon's socket, calls `method` and returns its result.
///
/// # Errors
/// The daemon does not reply, or replies with an error.
pub fn call(socket: &Path, method: &str, params: &Value) -> Result<Value> {
    let mut stream = connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    serde_json::to_writer(&mut stream, &request).with_context(|| method.to_owned())?;
    let mut answers = serde_json::Deserializer::from_reader(stream).into_iter::<Value>();
    let answer = answers.next().with_context(|| format!("{method}: no answer"))??;
    if let Some(error) = answer.get("error") {
        bail!("{method}: {error}");
    }
    Ok(answer["result"].clone())
}

fn connect(socket: &Path) -> Result<UnixStream> {
    let started = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) if started.elapsed() > TIMEOUT => {
                return Err(error).context("the RPC socket");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
