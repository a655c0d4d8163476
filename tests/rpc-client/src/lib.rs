//! A blocking JSON-RPC client for tests and measurements of the daemon. Test tool, any thread.
//!
//! `aryk` has its own client, whose errors are texts for operators. Tests that write several calls at once, or broken ones, use
//! the socket itself.
#![forbid(unsafe_code)]

use serde_json::{Value, json};
use std::io::{self, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Timeout of each reply.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(1);

/// A method's result, or its error object.
pub type Reply = Result<Value, Value>;

/// A connection to the daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    calls: u64,
}

impl Client {
    /// Connects to a daemon that serves `socket`.
    ///
    /// # Errors
    /// No daemon listens there, or it refuses the connection.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self { stream: BufReader::new(stream), calls: 0 })
    }

    /// Connects to a daemon that may still be starting, for up to `patience`.
    ///
    /// # Errors
    /// The last error of [`Client::connect`].
    pub fn connect_within(socket: &Path, patience: Duration) -> io::Result<Self> {
        #[expect(clippy::disallowed_methods, reason = "a test waits for a real daemon")]
        let started = Instant::now();
        loop {
            match Self::connect(socket) {
                Err(_) if started.elapsed() < patience => std::thread::park_timeout(PAUSE),
                connected => return connected,
            }
        }
    }

    /// Calls a method.
    ///
    /// # Errors
    /// The daemon does not reply.
    pub fn call(&mut self, method: &str, params: &Value) -> io::Result<Reply> {
        self.calls += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.calls, "method": method, "params": params});
        // A daemon that refuses the client may close the connection before the client writes: the reply says why.
        let written = self.stream.get_mut().write_all(request.to_string().as_bytes());
        let mut replies = serde_json::Deserializer::from_reader(&mut self.stream).into_iter::<Value>();
        let mut reply = match replies.next() {
            Some(reply) => reply?,
            None => return Err(written.err().unwrap_or_else(|| ErrorKind::UnexpectedEof.into())),
        };
        if let Some(error) = reply.get_mut("error") {
            return Ok(Err(error.take()));
        }
        if reply["id"] != self.calls {
            return Err(io::Error::other(format!("{method}: an unexpected reply: {reply}")));
        }
        Ok(Ok(reply["result"].take()))
    }

    /// Calls a method that must succeed.
    ///
    /// # Errors
    /// The daemon does not reply, or replies with an error.
    pub fn result(&mut self, method: &str, params: &Value) -> io::Result<Value> {
        self.call(method, params)?.map_err(|error| io::Error::other(format!("{method}: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufRead;
    use std::os::unix::net::UnixListener;

    /// A server that replies to each call with the next of `replies`, each on a line, then closes.
    fn serve(replies: &'static [&'static str], test: impl FnOnce(&mut Client)) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("rpc");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let stream = BufReader::new(listener.accept().unwrap().0);
                let mut bytes = stream;
                for reply in replies {
                    // A request has no line end: its last bracket ends it.
                    while bytes.fill_buf().unwrap().last() != Some(&b'}') {}
                    let read = bytes.buffer().len();
                    bytes.consume(read);
                    bytes.get_mut().write_all(reply.as_bytes()).unwrap();
                }
            });
            test(&mut Client::connect_within(&socket, Duration::from_secs(10)).unwrap());
        });
    }

    #[test]
    fn results_and_errors_are_told_apart() {
        let replies = &[
            "{\"id\":1,\"result\":[7]}\n",
            "{\"id\":2,\"error\":{\"code\":-19}}\n",
            "{\"id\":9,\"result\":1}\n",
        ];
        serve(replies, |client| {
            assert_eq!(client.call("a", &json!({})).unwrap(), Ok(json!([7])));
            assert_eq!(client.call("b", &json!({})).unwrap(), Err(json!({"code": -19})));
            let wrong = client.call("c", &json!({})).unwrap_err().to_string();
            assert!(wrong.starts_with("c: an unexpected reply"), "{wrong}");
            assert!(client.call("d", &json!({})).is_err(), "the server has closed the connection");
        });
    }
}
