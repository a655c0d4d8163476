//! A connection until a reactor has it, and that of an admin queue. Context: the thread of NVMe over Fabrics.
//!
//! All of it is cancellation-safe: what was written or received in part stays in the connection.

mod rdma;
mod tcp;

use super::driver::Carrier;
use super::{ConnectError, RemoteConfig, Transport};
use aryk_nvme::admin::{self, Data};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::Transfer;
use aryk_nvme_fabrics::chap::{self, Action, MESSAGE_MAX, PROTOCOL, Parties, Secrets};
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::ConnectData;
use aryk_nvme_fabrics::status;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Bits of the result of Connect: the controller wants authentication before other commands.
const WANTS_AUTHENTICATION: u64 = 3 << 17;

/// Numbers of authentications.
static TRANSACTIONS: AtomicU16 = AtomicU16::new(1);

/// A queue to connect to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// QID; 0: the admin queue.
    pub(super) qid: u16,
    /// Entries of the queue, one more than commands at a time.
    pub(super) entries: u16,
    /// The controller of an I/O queue.
    pub(super) controller_id: u16,
    /// The most bytes of data that a command has.
    pub(super) transfer_max: u32,
}

/// A command in flight.
#[derive(Debug)]
struct Pending {
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// The status, the result, and whether the data is intact.
    done: Option<(Status, u64, bool)>,
}

impl Pending {
    const fn transfer(&self) -> Transfer {
        match (self.outgoing.len() as u32, self.incoming.len() as u32) {
            (0, 0) => Transfer::None,
            (0, len) => Transfer::ToHost(len),
            (len, _) => Transfer::ToController(len),
        }
    }
}

/// The commands in flight, by their identifiers.
type Commands = Vec<Option<Pending>>;

/// What carries capsules and data.
#[derive(Debug)]
enum Link {
    Tcp(Box<tcp::Link>),
    Rdma(Box<rdma::Link>),
}

impl Link {
    async fn open(config: &RemoteConfig, place: Place) -> Result<Self, ConnectError> {
        Ok(match config.transport {
            Transport::Tcp => Self::Tcp(Box::new(tcp::Link::open(config, place.entries - 1).await?)),
            Transport::Rdma => Self::Rdma(Box::new(rdma::Link::open(config, place).await?)),
        })
    }

    /// Adds a command.
    fn submit(&mut self, cid: u16, entry: SubmissionEntry, pending: &Pending) -> Result<(), ConnectError> {
        match self {
            Self::Tcp(link) => {
                link.queue.submit(cid, entry, pending.transfer());
                Ok(())
            }
            Self::Rdma(link) => link.submit(cid, entry, pending),
        }
    }

    /// Sends what there is to send, and waits for input, which may end commands.
    async fn turn(&mut self, commands: &mut Commands) -> Result<(), ConnectError> {
        match self {
            Self::Tcp(link) => link.turn(commands).await.map(drop),
            Self::Rdma(link) => link.turn(commands).await,
        }
    }
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
    link: Link,
    pending: Commands,
    patience: Duration,
}

impl Connection {
    /// Connects a queue, and returns the controller's identifier.
    pub(super) async fn open(config: &RemoteConfig, place: Place) -> Result<(Self, u16), ConnectError> {
        let opening = timeout(config.connect_patience, Link::open(config, place));
        let link = opening.await.map_err(|_| ConnectError::Silent)??;
        let pending = (1..place.entries).map(|_| None).collect();
        let mut connection = Self { link, pending, patience: config.admin_patience };
        let controller_id = connection.connect(config, place).await?;
        Ok((connection, controller_id))
    }

    /// Sends Connect, and returns the controller's identifier.
    async fn connect(&mut self, config: &RemoteConfig, place: Place) -> Result<u16, ConnectError> {
        let Place { qid, entries, controller_id, .. } = place;
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
            incarnation: Some(config.incarnation),
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
        let (outgoing, incoming) = split(command.data);
        self.run(command.entry, outgoing, incoming, name).await
    }

    /// Starts an admin command, and returns its identifier.
    pub(super) fn start_admin(&mut self, command: admin::Command) -> Result<u16, ConnectError> {
        let (outgoing, incoming) = split(command.data);
        self.start(command.entry, outgoing, incoming)
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
                self.link.turn(&mut self.pending).await?;
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
        let pending = Pending { outgoing, incoming: vec![0; incoming], done: None };
        self.link.submit(cid as u16, entry, &pending)?;
        self.pending[cid] = Some(pending);
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

    /// Waits until one of these commands has ended, and returns its identifier; for ever without commands. An error means that
    /// the connection is lost. May be dropped before it is ready.
    pub(super) async fn ended(&mut self, cids: &[u16]) -> Result<u16, ConnectError> {
        loop {
            let has_ended = |cid: &&u16| {
                self.pending[usize::from(**cid)].as_ref().is_some_and(|pending| pending.done.is_some())
            };
            if let Some(cid) = cids.iter().find(has_ended) {
                return Ok(*cid);
            }
            self.link.turn(&mut self.pending).await?;
        }
    }

    /// The parts of an idle connection, for a reactor; the data of a capsule may have `in_capsule_max` bytes.
    pub(super) fn into_carrier(self, in_capsule_max: u32) -> io::Result<Carrier> {
        match self.link {
            Link::Tcp(link) => link.into_carrier(in_capsule_max),
            Link::Rdma(link) => Ok(link.into_carrier(in_capsule_max)),
        }
    }
}

/// The data for the controller, and the length of the data from it.
fn split(data: Data) -> (Vec<u8>, usize) {
    match data {
        Data::None => (Vec::new(), 0),
        Data::FromController(len) => (Vec::new(), len),
        Data::ToController(bytes) => (bytes, 0),
    }
}

/// The name of a status: those of Connect share their numbers with others.
pub(super) fn status_name(command: &str, status: Status) -> String {
    if command == "Connect" { status::name(status.code()).to_owned() } else { status.to_string() }
}
