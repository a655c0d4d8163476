//! A connection until a reactor has it, and that of an admin queue. Context: the thread of NVMe over TCP.
//!
//! All of it is cancellation-safe: what was written or received in part stays in the connection.

use super::{ConnectError, RemoteConfig};
use aryk_nvme::admin::{self, Data};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::chap::{self, Action, MESSAGE_MAX, PROTOCOL, Parties, Secrets};
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::ConnectData;
use aryk_nvme_fabrics::status;
use aryk_nvme_fabrics::tcp::{ENCODE_MIN, HostQueue, HostReceived, IcReq, Transfer};
use aryk_tls::{Progress, Session};
use rustix::net::sockopt;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long a target may be silent before the kernel asks whether it is still there, and how often the kernel asks.
const SILENCE: Duration = Duration::from_secs(10);
/// Bytes that are read at a time.
const READ_MAX: usize = 16 << 10;
/// Bits of the result of Connect: the controller wants authentication before other commands.
const WANTS_AUTHENTICATION: u64 = 3 << 17;

/// Numbers of authentications.
static TRANSACTIONS: AtomicU16 = AtomicU16::new(1);

/// What an alert of TLS begins with, by which a target with TLS answers a host without.
const ALERT: [u8; 2] = [21, 3];

/// The socket of a connection, its TLS, and its queue.
pub(super) type Parts = (std::net::TcpStream, Option<Session>, HostQueue);

/// A command in flight.
#[derive(Debug)]
struct Pending {
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    done: Option<(Status, u64, bool)>,
}

/// The answer to a command that succeeded.
#[derive(Debug)]
pub(super) struct Answer {
    /// DW0 and DW1.
    pub(super) result: u64,
    pub(super) data: Vec<u8>,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    tls: Option<Session>,
    queue: HostQueue,
    pending: Vec<Option<Pending>>,
    /// Bytes for the target; those before `sent` are written.
    output: Vec<u8>,
    sent: usize,
    patience: Duration,
}

impl Connection {
    /// Connects, and settles the format of PDUs, for `commands` commands at a time.
    pub(super) async fn open(config: &RemoteConfig, commands: u16) -> Result<Self, ConnectError> {
        let opening = Self::open_now(config, commands);
        timeout(config.connect_patience, opening).await.map_err(|_| ConnectError::Silent)?
    }

    async fn open_now(config: &RemoteConfig, commands: u16) -> Result<Self, ConnectError> {
        let socket = if config.address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        if let Some(source) = config.source {
            socket.set_reuseaddr(true)?;
            socket.bind(source)?;
        }
        let stream = socket.connect(config.address).await?;
        watch_over(&stream, config.acknowledge_patience)?;
        let (header_digest, data_digest) = (config.header_digest, config.data_digest);
        let request = IcReq { alignment: 0, header_digest, data_digest, max_r2t: 0 };
        let mut connection = Self {
            stream,
            tls: None,
            queue: HostQueue::new(request, commands, super::DATA_MAX as u32),
            pending: (0..commands).map(|_| None).collect(),
            output: Vec::new(),
            sent: 0,
            patience: config.admin_patience,
        };
        if !config.psks.is_empty() {
            connection.secure(config).await?;
        }
        while !connection.turn().await? {}
        let format = connection.queue.format();
        if (format.header_digest, format.data_digest) != (header_digest, data_digest) {
            return Err(ConnectError::Unsupported("the target does not do the digests that are wanted"));
        }
        Ok(connection)
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
        self.receive(&received).map(drop)
    }

    /// Sends Connect for a queue of `entries` entries, and returns the controller's identifier.
    pub(super) async fn connect(
        &mut self,
        config: &RemoteConfig,
        qid: u16,
        entries: u16,
        controller_id: u16,
    ) -> Result<u16, ConnectError> {
        let keep_alive = u32::try_from(config.keep_alive.as_millis()).unwrap_or(u32::MAX);
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: entries - 1,
            disables_flow_control: true,
            keep_alive_ms: if qid == 0 { keep_alive } else { 0 },
        };
        let data = ConnectData {
            host_id: config.host_id,
            controller_id,
            subsystem: config.subsystem.clone(),
            host: config.host.clone(),
        };
        let entry = Command::Connect(connect).encode();
        let answer = self.run(entry, data.encode().to_vec(), 0, "Connect").await?;
        let wants_proof = answer.result & WANTS_AUTHENTICATION != 0;
        match config.secrets.get() {
            Some(secrets) if wants_proof => self.authenticate(config, &secrets).await?,
            None if wants_proof => {
                return Err(ConnectError::Unsupported(
                    "the target wants authentication (DH-HMAC-CHAP), and no key is given",
                ));
            }
            Some(secrets) if secrets.controller.is_some() => {
                return Err(ConnectError::Unsupported(
                    "the target does not want authentication, and so proves nothing",
                ));
            }
            _ => {}
        }
        Ok(answer.result as u16)
    }

    /// Proves who this host is, and has the controller do so if there is a secret of it.
    pub(super) async fn authenticate(
        &mut self,
        config: &RemoteConfig,
        secrets: &Arc<Secrets>,
    ) -> Result<(), ConnectError> {
        self.exchange_proofs(config, secrets).await.map_err(|error| match error {
            ConnectError::Closed => ConnectError::ClosedInAuthentication,
            ConnectError::Io(error) if error.kind() == ErrorKind::ConnectionReset => {
                ConnectError::ClosedInAuthentication
            }
            other => other,
        })
    }

    async fn exchange_proofs(
        &mut self,
        config: &RemoteConfig,
        secrets: &Arc<Secrets>,
    ) -> Result<(), ConnectError> {
        let parties = Parties { host: config.host.clone(), subsystem: config.subsystem.clone() };
        let transaction = TRANSACTIONS.fetch_add(1, Ordering::Relaxed);
        let mut side = chap::Host::new(Arc::clone(secrets), parties, transaction, &config.allowed);
        loop {
            match side.action() {
                Action::Send(message) => {
                    let len = message.len() as u32;
                    let entry = Command::AuthenticationSend { protocol: PROTOCOL, len }.encode();
                    self.run(entry, message, 0, "Authentication Send").await?;
                }
                Action::Receive => {
                    let len = MESSAGE_MAX as u32;
                    let entry = Command::AuthenticationReceive { protocol: PROTOCOL, len }.encode();
                    let answer = self.run(entry, Vec::new(), MESSAGE_MAX, "Authentication Receive").await?;
                    // It computes for milliseconds.
                    let taken = spawn_blocking(move || {
                        side.receive(&answer.data);
                        side
                    });
                    side = taken.await.map_err(io::Error::from)?;
                }
                Action::Done => return Ok(()),
                Action::Failed(failure) => return Err(failure.into()),
            }
        }
    }

    /// Runs an admin command.
    pub(super) async fn admin(
        &mut self,
        command: admin::Command,
        name: &'static str,
    ) -> Result<Answer, ConnectError> {
        let (outgoing, incoming) = match command.data {
            Data::None => (Vec::new(), 0),
            Data::FromController(len) => (Vec::new(), len),
            Data::ToController(bytes) => (bytes, 0),
        };
        self.run(command.entry, outgoing, incoming, name).await
    }

    /// Runs a command. The caller does not give up its future before the command ends, unless it drops the connection.
    pub(super) async fn run(
        &mut self,
        entry: SubmissionEntry,
        outgoing: Vec<u8>,
        incoming: usize,
        name: &'static str,
    ) -> Result<Answer, ConnectError> {
        let cid = self.start(entry, outgoing, incoming)?;
        let patience = self.patience;
        let ended = async {
            loop {
                if let Some(answer) = self.take(cid, name) {
                    return answer;
                }
                self.turn().await?;
            }
        };
        timeout(patience, ended).await.map_err(|_| ConnectError::Silent)?
    }

    /// Starts a command.
    pub(super) fn start(
        &mut self,
        entry: SubmissionEntry,
        outgoing: Vec<u8>,
        incoming: usize,
    ) -> Result<u16, ConnectError> {
        let free = self.pending.iter().position(Option::is_none);
        let cid = free.ok_or(ConnectError::Unsupported("too many admin commands at the same time"))?;
        let transfer = match (outgoing.len() as u32, incoming as u32) {
            (0, 0) => Transfer::None,
            (0, len) => Transfer::ToHost(len),
            (len, _) => Transfer::ToController(len),
        };
        self.pending[cid] = Some(Pending { outgoing, incoming: vec![0; incoming], done: None });
        self.queue.submit(cid as u16, entry, transfer);
        Ok(cid as u16)
    }

    /// Takes the answer to a command that has ended.
    pub(super) fn take(&mut self, cid: u16, name: &'static str) -> Option<Result<Answer, ConnectError>> {
        let place = &mut self.pending[usize::from(cid)];
        let (status, result, is_intact) = place.as_ref()?.done?;
        let pending = place.take()?;
        Some(match (status.is_success(), is_intact) {
            (true, true) => Ok(Answer { result, data: pending.incoming }),
            (true, false) => Err(ConnectError::Unsupported("the data of an answer was damaged on its way")),
            (false, _) => Err(ConnectError::Status { command: name, status }),
        })
    }

    /// Waits until a command has ended.
    pub(super) async fn wait(&mut self, cid: u16, name: &'static str) -> Result<Answer, ConnectError> {
        loop {
            if let Some(answer) = self.take(cid, name) {
                return answer;
            }
            self.turn().await?;
        }
    }

    /// Writes all output, and receives once. Returns whether the connection has just been established.
    async fn turn(&mut self) -> Result<bool, ConnectError> {
        self.flush().await?;
        let mut bytes = [0; READ_MAX];
        let len = self.read(&mut bytes).await?;
        self.receive(&bytes[..len])
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

    fn receive(&mut self, mut received: &[u8]) -> Result<bool, ConnectError> {
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
            is_established |= self.take_input(input)?;
        }
    }

    /// Takes plain input. Returns whether the connection has just been established.
    fn take_input(&mut self, mut input: &[u8]) -> Result<bool, ConnectError> {
        let mut is_established = false;
        while let Some(received) = self.queue.receive(&mut input).map_err(ConnectError::Violation)? {
            match received {
                HostReceived::Established => is_established = true,
                HostReceived::Data { cid, offset, bytes } => {
                    let pending = self.pending[usize::from(cid)].as_mut().expect("the queue has the command");
                    pending.incoming[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                HostReceived::Completed { cid, status, result, is_intact } => {
                    let pending = self.pending[usize::from(cid)].as_mut().expect("the queue has the command");
                    pending.done = Some((status, result, is_intact));
                }
                HostReceived::Terminated(fatal) => return Err(ConnectError::Terminated(fatal)),
            }
        }
        Ok(is_established)
    }

    async fn flush(&mut self) -> Result<(), ConnectError> {
        loop {
            if self.sent == self.output.len() {
                if !self.queue.has_output() {
                    return Ok(());
                }
                self.output.resize(ENCODE_MIN, 0);
                let pending = &self.pending;
                let len = self.queue.encode(&mut self.output, |cid, offset, to| {
                    let pending = pending[usize::from(cid)].as_ref().expect("the queue has the command");
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

    /// The parts of an idle connection, for a reactor; the data of a capsule may have `in_capsule_max` bytes.
    pub(super) fn into_parts(mut self, in_capsule_max: u32) -> io::Result<Parts> {
        self.queue.set_in_capsule_max(in_capsule_max);
        Ok((self.stream.into_std()?, self.tls, self.queue))
    }
}

/// Has the kernel find out that the target has gone.
fn watch_over(stream: &TcpStream, patience: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE)?;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(patience.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

/// The name of a status: those of Connect share their numbers with others.
pub(super) fn status_name(command: &str, status: Status) -> String {
    if command == "Connect" { status::name(status.code()).to_owned() } else { status.to_string() }
}
