//! A connection of TCP: the socket, TLS, and PDUs. Context: the thread of NVMe over Fabrics.

use super::Commands;
use crate::fabrics::driver::Carrier;
use crate::fabrics::{ConnectError, DATA_MAX, RemoteConfig};
use aryk_nvme_fabrics::tcp::{ENCODE_MIN, HostQueue, HostReceived, IcReq};
use aryk_tls::{Progress, Session};
use rustix::net::sockopt;
use std::io::{self, ErrorKind};
use std::time::Duration;
use tokio::net::{TcpSocket, TcpStream};

/// How long a target may be silent before the kernel asks whether it is still there, and how often the kernel asks.
const SILENCE: Duration = Duration::from_secs(10);
/// Bytes that are read at a time.
const READ_MAX: usize = 16 << 10;
/// What an alert of TLS begins with, by which a target with TLS answers a host without.
const ALERT: [u8; 2] = [21, 3];

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    tls: Option<Session>,
    pub(super) queue: HostQueue,
    /// Bytes for the target; those before `sent` are written.
    output: Vec<u8>,
    sent: usize,
}

impl Link {
    /// Connects, and settles the format of PDUs, for `commands` commands at a time.
    pub(super) async fn open(config: &RemoteConfig, commands: u16) -> Result<Self, ConnectError> {
        let socket = if config.address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        if let Some(source) = config.source {
            socket.set_reuseaddr(true)?;
            socket.bind(source)?;
        }
        let stream = socket.connect(config.address).await?;
        watch_over(&stream, config.acknowledge_patience)?;
        let (header_digest, data_digest) = (config.header_digest, config.data_digest);
        let request = IcReq { alignment: 0, header_digest, data_digest, max_r2t: 0 };
        let mut link = Self {
            stream,
            tls: None,
            queue: HostQueue::new(request, commands, DATA_MAX as u32),
            output: Vec::new(),
            sent: 0,
        };
        if !config.psks.is_empty() {
            link.secure(config).await?;
        }
        let mut none = Vec::new();
        while !link.turn(&mut none).await? {}
        let format = link.queue.format();
        if (format.header_digest, format.data_digest) != (header_digest, data_digest) {
            return Err(ConnectError::Unsupported("the target does not do the digests that are wanted"));
        }
        Ok(link)
    }

    /// Makes the handshake of TLS.
    async fn secure(&mut self, config: &RemoteConfig) -> Result<(), ConnectError> {
        let mut session = Session::connect(config.psks.clone())?;
        let mut bytes = [0; READ_MAX];
        let mut received = &bytes[..0];
        loop {
            let mut output = Vec::new();
            let progress = session.handshake(&mut received, &mut output);
            (self.sent, self.output) = (0, output);
            // If it has failed, this tells the target why.
            let flushed = self.flush_bytes().await;
            if progress? == Progress::Complete {
                flushed?;
                break;
            }
            flushed?;
            let len = self.read(&mut bytes).await?;
            received = &bytes[..len];
        }
        let received = received.to_vec();
        self.tls = Some(session);
        self.receive(&received, &mut Vec::new()).map(drop)
    }

    /// Writes all output, and receives once. Returns whether the connection has just been established.
    pub(super) async fn turn(&mut self, commands: &mut Commands) -> Result<bool, ConnectError> {
        self.flush(commands).await?;
        let mut bytes = [0; READ_MAX];
        let len = self.read(&mut bytes).await?;
        self.receive(&bytes[..len], commands)
    }

    /// Waits for bytes.
    async fn read(&self, bytes: &mut [u8]) -> Result<usize, ConnectError> {
        loop {
            self.stream.readable().await?;
            match self.stream.try_read(bytes) {
                Ok(0) => return Err(ConnectError::Closed),
                Ok(len) => return Ok(len),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn receive(&mut self, mut received: &[u8], commands: &mut Commands) -> Result<bool, ConnectError> {
        let mut is_established = false;
        let mut plain = [0; READ_MAX];
        loop {
            let input = match &mut self.tls {
                Some(session) => match session.read(&mut received, &mut plain)? {
                    0 => return Ok(is_established),
                    len => &plain[..len],
                },
                None if received.is_empty() => return Ok(is_established),
                None => std::mem::take(&mut received),
            };
            if self.tls.is_none() && !self.queue.is_established() && input.starts_with(&ALERT) {
                return Err(ConnectError::Unsupported("the target wants TLS, and no TLS key is given"));
            }
            is_established |= self.take_input(input, commands)?;
        }
    }

    /// Takes plain input. Returns whether the connection has just been established.
    fn take_input(&mut self, mut input: &[u8], commands: &mut Commands) -> Result<bool, ConnectError> {
        let mut is_established = false;
        while let Some(received) = self.queue.receive(&mut input).map_err(ConnectError::Violation)? {
            match received {
                HostReceived::Established => is_established = true,
                HostReceived::Data { cid, offset, bytes } => {
                    let pending = commands[usize::from(cid)].as_mut().expect("the queue has the command");
                    pending.incoming[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                HostReceived::Completed { cid, status, result, is_intact } => {
                    let pending = commands[usize::from(cid)].as_mut().expect("the queue has the command");
                    pending.done = Some((status, result, is_intact));
                }
                HostReceived::Terminated(fatal) => return Err(ConnectError::Terminated(fatal)),
            }
        }
        Ok(is_established)
    }

    async fn flush(&mut self, commands: &Commands) -> Result<(), ConnectError> {
        loop {
            if self.sent == self.output.len() {
                if !self.queue.has_output() {
                    return Ok(());
                }
                self.output.resize(ENCODE_MIN, 0);
                let len = self.queue.encode(&mut self.output, |cid, offset, to| {
                    let pending = commands[usize::from(cid)].as_ref().expect("the queue has the command");
                    to.copy_from_slice(&pending.outgoing[offset as usize..][..to.len()]);
                });
                (self.sent, self.output) = (0, self.output[..len].to_vec());
                if let Some(session) = &mut self.tls {
                    let mut records = Vec::new();
                    session.write(&self.output, &mut records)?;
                    self.output = records;
                }
            }
            self.flush_bytes().await?;
        }
    }

    /// Writes the bytes that there are.
    async fn flush_bytes(&mut self) -> Result<(), ConnectError> {
        while self.sent < self.output.len() {
            self.stream.writable().await?;
            match self.stream.try_write(&self.output[self.sent..]) {
                Ok(len) => self.sent += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(super) fn into_carrier(mut self, in_capsule_max: u32) -> io::Result<Carrier> {
        self.queue.set_in_capsule_max(in_capsule_max);
        Ok(Carrier::Tcp { socket: self.stream.into_std()?, tls: self.tls, queue: self.queue })
    }
}

/// Has the kernel find out that the target has gone.
fn watch_over(stream: &TcpStream, patience: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE)?;
    // The kernel takes no more.
    let patience_ms = patience.as_millis().min(i32::MAX as u128);
    sockopt::set_tcp_user_timeout(stream, patience_ms as u32)?;
    Ok(())
}
