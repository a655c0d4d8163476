//! A blocking JSON-RPC client on a UNIX socket.

use crate::error::Error;
use serde_json::{Value, json};
use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A connection to the daemon.
pub struct Client {
    path: PathBuf,
    timeout: Duration,
    stream: BufReader<UnixStream>,
    last_id: u64,
}

impl Client {
    /// Connects to the daemon at `path`; `timeout` limits the wait for each reply.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, Error> {
        let stream = UnixStream::connect(path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Error::NoDaemon(path.to_owned()),
            _ => Error::Socket { path: path.to_owned(), source: e },
        })?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { path: path.to_owned(), timeout, stream: BufReader::new(stream), last_id: 0 })
    }

    /// Connects again, to the process that serves the same socket now.
    pub fn reconnect(&mut self) -> Result<(), Error> {
        *self = Self::connect(&self.path, self.timeout)?;
        Ok(())
    }

    /// Waits for the reply of the next call without limit: what it does may take hours.
    pub fn wait_without_limit(&self) -> Result<(), Error> {
        Ok(self.stream.get_ref().set_read_timeout(None)?)
    }

    /// The daemon's `/proc` directory, by the process id in our pid namespace: a container has its own ids.
    pub fn process(&self) -> Option<PathBuf> {
        let peer = rustix::net::sockopt::socket_peercred(self.stream.get_ref()).ok()?;
        Some(PathBuf::from(format!("/proc/{}", peer.pid.as_raw_nonzero())))
    }

    /// The directory through which we reach the daemon's files: the daemon's root if we may access it, otherwise our own.
    pub fn root(&self) -> PathBuf {
        let root = self.process().map(|process| process.join("root"));
        root.filter(|root| root.read_dir().is_ok()).unwrap_or_else(|| "/".into())
    }

    /// Calls a method, and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Result<Value, Error> {
        self.last_id += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params});
        self.stream.get_mut().write_all(request.to_string().as_bytes()).map_err(broken)?;
        let mut replies = serde_json::Deserializer::from_reader(&mut self.stream).into_iter::<Value>();
        let mut reply = match replies.next() {
            Some(Ok(reply)) => reply,
            Some(Err(e)) if e.is_io() => return Err(broken(e.into())),
            Some(Err(e)) => return Err(Error::Protocol(format!("sent invalid JSON: {e}"))),
            None => return Err(Error::Protocol("closed the connection".into())),
        };
        if let Some(error) = reply.get("error") {
            return Err(refused(error));
        }
        if reply["id"] != self.last_id {
            return Err(Error::Protocol(format!("sent an unexpected reply: {reply}")));
        }
        Ok(reply["result"].take())
    }
}

fn broken(e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Error::Protocol("did not reply in time; --timeout sets the limit".into())
        }
        _ => Error::Protocol(format!("closed the connection: {e}")),
    }
}

fn refused(error: &Value) -> Error {
    let text = |member: &str| error[member].as_str().map(str::to_owned);
    Error::Refused {
        code: error["code"].as_i64().unwrap_or_default(),
        message: text("message").unwrap_or_default(),
        detail: text("data"),
        hint: None,
    }
}

#[cfg(test)]
mod tests;
