//! A controller of a target: admin commands go in, completions and their data come out. NVMe 2.0 §3.1.2. Context: the owner of
//! the admin queue, which passes the time, in nanoseconds since any start.
//!
//! The controller knows neither connections nor disks. It executes the commands of its admin queue except Connect and the
//! authentication commands, which concern a queue before it has a controller. Its owner executes I/O commands, and the part of
//! Abort that concerns them.
//!
//! **Invariants.** Every command of a ready controller gets one completion, at once or, for Asynchronous Event Requests, later. A
//! reset drops all requests for events without a completion, as the specification says.

mod event;
mod feature;
mod identify;
mod log;

use std::sync::Arc;

use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::opcode::admin;
use aryk_nvme::spec::status::{Code, Status};

use crate::command::{self, Command};
use crate::keep_alive::KeepAlive;
use crate::nqn::Nqn;
use crate::property::{Change, Properties};
use crate::reservation;
use crate::subsystem::{Service, View};
use event::{Events, Notice};
use feature::Features;
use log::{Changed, Notices};

/// ACL: Abort commands that may be outstanding, less one.
const ACL: u8 = 3;

/// The host that uses a controller, as the Connect command of the admin queue named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Association {
    /// CNTLID.
    pub controller_id: u16,
    /// HOSTID.
    pub host_id: [u8; 16],
    /// HOSTNQN.
    pub host: Nqn,
}

/// What the owner does after a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Complete the command, after the data if there is some.
    Complete {
        /// The status.
        status: Status,
        /// DW0 and DW1.
        result: u64,
    },
    /// Complete the command with success; the host has changed the controller's state.
    Changed(Change),
    /// The command completes later ([`Controller::next_completion`]).
    Held,
    /// Try to abort this command, and complete the Abort with result 0 if that worked, otherwise with 1.
    Abort {
        /// The queue of the command.
        sqid: u16,
        /// The identifier of the command.
        cid: u16,
    },
    /// Set whether the reservations of these namespaces persist (PTPL), and complete the command.
    Persist {
        /// The namespaces.
        nsids: Vec<u32>,
        /// Whether they persist.
        persists: bool,
    },
}

/// The result of a command with DW0, or its status.
type Result<T = u64> = std::result::Result<T, Code>;

/// A controller.
#[derive(Debug)]
pub struct Controller {
    association: Association,
    view: Arc<View>,
    properties: Properties,
    keep_alive: KeepAlive,
    features: Features,
    events: Events,
    changed: Changed,
    notices: Notices,
}

impl Controller {
    /// A controller for a new association, with I/O queues of at most `queue_entries_max` entries.
    ///
    /// # Errors
    /// The keep-alive timeout is too long.
    pub fn new(
        association: Association,
        view: Arc<View>,
        queue_entries_max: u16,
        keep_alive_ms: u32,
        now: u64,
    ) -> Result<Self> {
        Ok(Self {
            association,
            properties: Properties::new(queue_entries_max),
            keep_alive: KeepAlive::new(keep_alive_ms, now)?,
            features: Features::new(&view),
            events: Events::new(&view),
            changed: Changed::default(),
            notices: Notices::default(),
            view,
        })
    }

    /// The host that uses the controller.
    pub const fn association(&self) -> &Association {
        &self.association
    }

    /// What the controller reports about its subsystem.
    pub const fn view(&self) -> &Arc<View> {
        &self.view
    }

    /// The properties.
    pub const fn properties(&self) -> &Properties {
        &self.properties
    }

    /// The I/O queues that the host may connect: QIDs 1 to this number.
    pub const fn io_queues(&self) -> u16 {
        self.features.io_queues()
    }

    /// Whether the host waits as CRD of a completion says before it tries the command again (ACRE).
    pub const fn has_retry_delays(&self) -> bool {
        self.features.has_retry_delays
    }

    /// The time at which the association ends, unless a Keep Alive comes before.
    pub const fn deadline(&self) -> Option<u64> {
        self.keep_alive.deadline()
    }

    /// Whether the keep-alive timer has expired. If so, the controller has a fatal error (CSTS.CFS) until its connections are
    /// closed.
    pub const fn expire(&mut self, now: u64) -> bool {
        let is_expired = self.keep_alive.is_expired(now);
        if is_expired {
            self.properties.set_fatal();
        }
        is_expired
    }

    /// Reports that no I/O queue has commands any more, after [`Change::ShutDown`].
    pub const fn finish_shutdown(&mut self) {
        self.properties.finish_shutdown();
    }

    /// Replaces the view. The differences are reported by events, as far as the host has enabled them.
    pub fn update(&mut self, view: Arc<View>) {
        match (&self.view.service, &view.service) {
            (Service::Io(before), Service::Io(after)) => {
                if self.changed.compare(&before.namespaces, &after.namespaces) {
                    self.events.notify(Notice::Namespaces);
                }
                let groups = |io: &crate::subsystem::Io| -> Vec<_> {
                    io.namespaces.iter().map(|(nsid, namespace)| (*nsid, namespace.ana_group)).collect()
                };
                if before.ana != after.ana || after.ana.is_some() && groups(before) != groups(after) {
                    self.events.notify(Notice::Ana);
                }
            }
            (Service::Discovery(before), Service::Discovery(after)) if before != after => {
                self.events.notify(Notice::Discovery);
            }
            _ => {}
        }
        self.view = view;
    }

    /// Reports what another host has done to the registration of this one or to the reservation, unless the host masks that.
    pub fn notify(&mut self, nsid: u32, notice: reservation::Notice) {
        if self.features.admits(nsid, notice) {
            self.notices.add(nsid, notice);
            self.events.notify(Notice::Reservation);
        }
    }

    /// The completion of an Asynchronous Event Request: an event, or the end of a request that was aborted.
    pub fn next_completion(&mut self) -> Option<CompletionEntry> {
        self.events.next_completion()
    }

    /// Executes a command of the admin queue. `data` has what the host has sent with the command. It is cleared, and filled with
    /// what the command returns: at most `data_max` bytes, for which the host has room. The owner has checked that this is not
    /// more than the largest transfer.
    pub fn execute(
        &mut self,
        entry: &SubmissionEntry,
        data_max: u32,
        now: u64,
        data: &mut Vec<u8>,
    ) -> Outcome {
        let sent = std::mem::take(data);
        let outcome = if entry.opcode() == command::OPCODE {
            self.fabrics(entry, now)
        } else if !self.properties.is_ready() {
            Err(Code::COMMAND_SEQUENCE_ERROR)
        } else {
            self.admin(entry, &sent, data_max, now, data)
        };
        let outcome = outcome.and_then(|outcome| {
            let fits = data.len() as u64 <= data_max.into();
            if fits { Ok(outcome) } else { Err(Code::SGL_DATA_LENGTH_INVALID) }
        });
        outcome.unwrap_or_else(|code| {
            data.clear();
            Outcome::Complete { status: code.status().as_final(), result: 0 }
        })
    }

    fn fabrics(&mut self, entry: &SubmissionEntry, now: u64) -> Result<Outcome> {
        match Command::decode(entry)? {
            Command::PropertyGet(access) => self.properties.get(access).map(complete),
            Command::PropertySet { access, value } => {
                let change = self.properties.set(access, value)?;
                match change {
                    Change::None => return Ok(complete(0)),
                    Change::Enabled => self.keep_alive.restart(now),
                    Change::Reset => {
                        self.features = Features::new(&self.view);
                        self.events = Events::new(&self.view);
                        self.changed = Changed::default();
                        self.notices = Notices::default();
                    }
                    Change::ShutDown => {}
                }
                Ok(Outcome::Changed(change))
            }
            // A queue is connected once; the admin queue has no Disconnect.
            Command::Connect(_) => Err(Code::COMMAND_SEQUENCE_ERROR),
            Command::Disconnect { .. } => Err(Code::INVALID_QUEUE_ID),
            Command::AuthenticationSend { .. } | Command::AuthenticationReceive { .. } => {
                Err(Code::INVALID_OPCODE)
            }
        }
    }

    fn admin(
        &mut self,
        entry: &SubmissionEntry,
        sent: &[u8],
        data_max: u32,
        now: u64,
        data: &mut Vec<u8>,
    ) -> Result<Outcome> {
        let is_discovery = matches!(self.view.service, Service::Discovery(_));
        match entry.opcode() {
            admin::IDENTIFY => self.identify(entry, data).map(|()| complete(0)),
            admin::GET_LOG_PAGE => self.get_log_page(entry, data_max, data).map(|()| complete(0)),
            admin::SET_FEATURES => self.set_features(entry, sent, now),
            admin::GET_FEATURES => self.get_features(entry, data).map(complete),
            admin::ASYNC_EVENT_REQUEST => self.events.request(entry.cid()).map(|()| Outcome::Held),
            admin::KEEP_ALIVE if self.keep_alive.timeout_ms() == 0 => Err(Code::KEEP_ALIVE_INVALID),
            admin::KEEP_ALIVE => {
                self.keep_alive.restart(now);
                Ok(complete(0))
            }
            admin::ABORT if !is_discovery => Ok(self.abort(entry)),
            _ => Err(Code::INVALID_OPCODE),
        }
    }

    /// Abort (NVMe 2.0 §5.1).
    fn abort(&mut self, entry: &SubmissionEntry) -> Outcome {
        let (sqid, cid) = (entry.cdw(10) as u16, (entry.cdw(10) >> 16) as u16);
        if sqid == 0 && self.events.abort(cid) { complete(0) } else { Outcome::Abort { sqid, cid } }
    }
}

const fn complete(result: u64) -> Outcome {
    Outcome::Complete { status: Code::SUCCESS.status(), result }
}

#[cfg(test)]
mod tests;
