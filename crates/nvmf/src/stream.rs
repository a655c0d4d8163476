//! The bytes of a connection in control: plain, or in TLS. Control context.
//!
//! Every function can be cancelled where it waits: nothing is lost that was received, and nothing is sent twice.

use aryk_tls::{Progress, Psks, Session, TlsError};
use rustix::net::Shutdown;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use tokio::net::TcpStream;

/// Bytes that are read at a time.
const READ_MAX: usize = 8192;
/// Bytes that are encrypted at a time: so the output of a host that does not read is bounded.
const SEAL_MAX: usize = 64 << 10;

/// Why a connection cannot go on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// The host has closed it, or the network has lost it.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// TLS has failed.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The bytes of a connection.
pub(crate) struct Stream {
    socket: TcpStream,
    tls: Option<Session>,
    /// What TLS has to send.
    unsent: Vec<u8>,
}

impl Stream {
    pub fn new(socket: TcpStream) -> Self {
        Self { socket, tls: None, unsent: Vec::new() }
    }

    /// Makes the handshake of TLS, with a host that has one of these keys. `input` takes what comes behind it.
    pub async fn secure(&mut self, psks: Arc<Psks>, input: &mut Vec<u8>) -> Result<(), StreamError> {
        let mut session = Session::accept(psks)?;
        loop {
            let mut bytes = [0; READ_MAX];
            let len = self.read(&mut bytes).await?;
            let mut received = &bytes[..len];
            let progress = session.handshake(&mut received, &mut self.unsent);
            // If it has failed, this tells the host why.
            let flushed = self.flush().await;
            match progress? {
                Progress::Pending => flushed?,
                Progress::Complete => {
                    flushed?;
                    open(&mut session, received, input)?;
                    self.tls = Some(session);
                    return Ok(());
                }
            }
        }
    }

    /// The identity of the key with which the host has proved who it is.
    pub fn identity(&self) -> Option<&str> {
        self.tls.as_ref()?.agreed().map(aryk_tls::Psk::identity)
    }

    /// Adds what arrives next to `input`: nothing, if it is not a whole record.
    pub async fn receive(&mut self, input: &mut Vec<u8>) -> Result<(), StreamError> {
        let mut bytes = [0; READ_MAX];
        let len = self.read(&mut bytes).await?;
        match &mut self.tls {
            Some(session) => open(session, &bytes[..len], input)?,
            None => input.extend_from_slice(&bytes[..len]),
        }
        Ok(())
    }

    /// Waits for bytes.
    async fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            self.socket.readable().await?;
            match self.socket.try_read(bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }

    /// Takes bytes to send, if that is possible without waiting. Returns how many.
    pub fn try_send(&mut self, pieces: &[IoSlice<'_>]) -> Result<Option<usize>, StreamError> {
        let Some(session) = &mut self.tls else {
            return match self.socket.try_write_vectored(pieces) {
                Ok(len) => Ok(Some(len)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(error.into()),
            };
        };
        if !self.unsent.is_empty() {
            return Ok(None);
        }
        let mut plain = Vec::new();
        for piece in pieces {
            plain.extend_from_slice(&piece[..piece.len().min(SEAL_MAX - plain.len())]);
        }
        session.write(&plain, &mut self.unsent)?;
        Ok(Some(plain.len()))
    }

    /// Waits until [`Self::try_send`] may take more.
    pub async fn sendable(&mut self) -> io::Result<()> {
        match self.unsent.is_empty() {
            true => self.socket.writable().await,
            false => self.flush().await,
        }
    }

    pub fn is_flushed(&self) -> bool {
        self.unsent.is_empty()
    }

    /// Sends what TLS has.
    pub async fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.socket.try_write(&self.unsent) {
                Ok(len) => drop(self.unsent.drain(..len)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.socket.writable().await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the output, and drops what arrives until the other side ends the connection, too. A socket that is closed while more
    /// arrives would have the network drop what was sent last.
    pub async fn linger(&mut self) {
        if rustix::net::shutdown(&self.socket, Shutdown::Write).is_err() {
            return;
        }
        let mut bytes = [0; READ_MAX];
        while self.read(&mut bytes).await.is_ok() {}
    }

    /// The parts, for an owner on a reactor. Nothing is unsent.
    pub fn into_parts(self) -> io::Result<(std::net::TcpStream, Option<Session>)> {
        debug_assert!(self.is_flushed());
        Ok((self.socket.into_std()?, self.tls))
    }
}

/// Decrypts what was received.
fn open(session: &mut Session, mut received: &[u8], input: &mut Vec<u8>) -> Result<(), TlsError> {
    let mut plain = [0; READ_MAX];
    loop {
        match session.read(&mut received, &mut plain)? {
            0 => return Ok(()),
            len => input.extend_from_slice(&plain[..len]),
        }
    }
}
