//! The associations of one subsystem: which hosts have which controllers, and which queues of them are connected. NVMe 2.0 §3.3
//! and §6.3. Context: the owner of the subsystem, in control.
//!
//! The owner passes each Connect, and says when a queue or a controller has ended. Whether a host may connect at all, its owner
//! decides before.
//!
//! **Invariant.** With [`Duplicates::Replace`], a host's new controller is admitted only after those that it replaces have ended,
//! all their commands included: no write of an earlier one takes effect after the first of a later one. It replaces the host's
//! controllers through the same listener, and, if the host tells its incarnation, those of its other lives through all listeners.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use aryk_nvme::spec::status::Code;

use crate::command::Connect;
use crate::connect::{ANY_CONTROLLER, CONTROLLER_ID_MAX, ConnectData, InvalidParameter, Refusal};
use crate::controller::{Association, Controller};
use crate::status;

/// The first bytes of the vendor's part of Identify Controller of a subsystem with [`Duplicates::Replace`]: a host that connects
/// again after it has lost its connections may rely on the invariant, and need not wait until its earlier controller has ended.
pub const ENDS_EARLIER: [u8; 16] = *b"aryk:ends-before";

/// The effect of a further admin queue of a host that has a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// It gets one more controller.
    Allow,
    /// The controllers that it replaces end first. See the head of the file.
    Replace,
}

/// The answer to a host that connects an admin queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The host gets this controller.
    Admitted(Association),
    /// These controllers must end before the host is asked for again: the owner ends them, and passes the Connect once more.
    After(Vec<u16>),
}

/// A controller of a host.
#[derive(Debug)]
struct Live {
    association: Association,
    listener: u32,
    incarnation: Option<[u8; 16]>,
    /// QIDs that are connected, without the admin queue.
    queues: BTreeSet<u16>,
    is_ending: bool,
}

/// The associations. See the head of the file.
#[derive(Debug)]
pub struct Associations {
    ids: RangeInclusive<u16>,
    next: u16,
    duplicates: Duplicates,
    live: BTreeMap<u16, Live>,
    /// Identifiers of hosts that have not proved yet who they are.
    reserved: BTreeSet<u16>,
}

impl Associations {
    /// No associations yet; controllers get identifiers of `ids`.
    ///
    /// # Panics
    /// If `ids` is empty, or has 0 or a reserved identifier.
    pub fn new(ids: RangeInclusive<u16>, duplicates: Duplicates) -> Self {
        let (first, last) = (*ids.start(), *ids.end());
        assert!(first > 0 && first <= last && last <= CONTROLLER_ID_MAX, "identifiers are 1 to FFEFh");
        Self { next: first, ids, duplicates, live: BTreeMap::new(), reserved: BTreeSet::new() }
    }

    /// A host connects an admin queue, of at most `entries_max` entries, through a listener.
    ///
    /// # Errors
    /// The reply to the host.
    pub fn connect_admin(
        &mut self,
        connect: &Connect,
        data: &ConnectData,
        entries_max: u16,
        listener: u32,
    ) -> Result<Admission, Refusal> {
        check_admin(connect, data, entries_max)?;
        self.admit(data, listener, None)
    }

    /// A host that must authenticate connects an admin queue: it has no controller until it has, and ends none. Returns the
    /// identifier that its controller will have. [`Self::connect_authenticated`] or [`Self::release`] follows.
    ///
    /// # Errors
    /// The reply to the host.
    pub fn reserve(
        &mut self,
        connect: &Connect,
        data: &ConnectData,
        entries_max: u16,
    ) -> Result<u16, Refusal> {
        check_admin(connect, data, entries_max)?;
        let id = self.free_id().ok_or(Refusal::Code(status::CONTROLLER_BUSY))?;
        self.reserved.insert(id);
        Ok(id)
    }

    /// The host of a reserved identifier has authenticated. Unless it is admitted, the identifier stays reserved.
    ///
    /// # Errors
    /// As [`Self::connect_admin`].
    pub fn connect_authenticated(
        &mut self,
        id: u16,
        data: &ConnectData,
        listener: u32,
    ) -> Result<Admission, Refusal> {
        self.admit(data, listener, Some(id))
    }

    /// An identifier is reserved no longer.
    pub fn release(&mut self, id: u16) {
        self.reserved.remove(&id);
    }

    fn admit(
        &mut self,
        data: &ConnectData,
        listener: u32,
        reserved: Option<u16>,
    ) -> Result<Admission, Refusal> {
        if self.duplicates == Duplicates::Replace {
            let is_replaced = |live: &&mut Live| {
                let association = &live.association;
                let is_same_host = (association.host_id, &association.host) == (data.host_id, &data.host);
                let is_other_life = data.incarnation.is_some() && data.incarnation != live.incarnation;
                is_same_host && (live.listener == listener || is_other_life)
            };
            let earlier: Vec<u16> = (self.live.values_mut().filter(is_replaced))
                .map(|live| {
                    live.is_ending = true;
                    live.association.controller_id
                })
                .collect();
            if !earlier.is_empty() {
                return Ok(Admission::After(earlier));
            }
        }
        let id = match reserved {
            // Another subsystem of the same name may have taken the place of the one that reserved it.
            Some(id) => self.reserved.contains(&id).then_some(id),
            None => self.free_id(),
        };
        let controller_id = id.ok_or(Refusal::Code(status::CONTROLLER_BUSY))?;
        self.release(controller_id);
        let association = Association { controller_id, host_id: data.host_id, host: data.host.clone() };
        let live = Live {
            association: association.clone(),
            listener,
            incarnation: data.incarnation,
            queues: BTreeSet::new(),
            is_ending: false,
        };
        self.live.insert(controller_id, live);
        Ok(Admission::Admitted(association))
    }

    /// The identifier that has been free for longest, as far as that is known: an old command never names a new controller soon.
    fn free_id(&mut self) -> Option<u16> {
        let (first, last) = (*self.ids.start(), *self.ids.end());
        let start = self.next;
        loop {
            let id = self.next;
            self.next = if id == last { first } else { id + 1 };
            if !self.live.contains_key(&id) && !self.reserved.contains(&id) {
                return Some(id);
            }
            if self.next == start {
                return None;
            }
        }
    }

    /// A host connects an I/O queue of its controller, which `controller` finds by its identifier.
    ///
    /// # Errors
    /// The reply to the host.
    pub fn connect_io<'a>(
        &mut self,
        connect: &Connect,
        data: &ConnectData,
        listener: u32,
        controller: impl FnOnce(u16) -> Option<&'a Controller>,
    ) -> Result<(), Refusal> {
        self.check_io(connect, data, listener, controller)?;
        if let Some(live) = self.live.get_mut(&data.controller_id) {
            live.queues.insert(connect.qid);
        }
        Ok(())
    }

    /// Checks an I/O queue as [`Self::connect_io`] does, which follows when the host has authenticated.
    ///
    /// # Errors
    /// The reply to the host.
    pub fn check_io<'a>(
        &self,
        connect: &Connect,
        data: &ConnectData,
        listener: u32,
        controller: impl FnOnce(u16) -> Option<&'a Controller>,
    ) -> Result<(), Refusal> {
        let wrong = |parameter| Err(Refusal::Parameter(parameter));
        let live = self.live.get(&data.controller_id).filter(|live| live.listener == listener);
        let (Some(live), Some(controller)) = (live, controller(data.controller_id)) else {
            return wrong(InvalidParameter::CNTLID);
        };
        if live.association.host != data.host {
            return wrong(InvalidParameter::HOSTNQN);
        }
        if live.association.host_id != data.host_id {
            return wrong(InvalidParameter::HOST_ID);
        }
        if live.is_ending {
            return Err(Refusal::Code(status::CONTROLLER_BUSY));
        }
        if !controller.properties().is_ready() {
            return Err(Refusal::Code(Code::COMMAND_SEQUENCE_ERROR));
        }
        check_queue(connect, controller.properties().queue_entries_max())?;
        if connect.qid == 0 || connect.qid > controller.io_queues() {
            return wrong(InvalidParameter::QID);
        }
        // A QID is connected once.
        if live.queues.contains(&connect.qid) {
            return Err(Refusal::Code(Code::COMMAND_SEQUENCE_ERROR));
        }
        Ok(())
    }

    /// The connection of an I/O queue is closed, and the queue has no commands any more.
    pub fn disconnected(&mut self, controller_id: u16, qid: u16) {
        if let Some(live) = self.live.get_mut(&controller_id) {
            live.queues.remove(&qid);
        }
    }

    /// The QIDs of a controller's connected I/O queues.
    pub fn queues(&self, controller_id: u16) -> impl Iterator<Item = u16> {
        self.live.get(&controller_id).into_iter().flat_map(|live| live.queues.iter().copied())
    }

    /// All queues of a controller have ended, with all their commands.
    ///
    /// # Panics
    /// If an I/O queue of the controller is connected.
    pub fn ended(&mut self, controller_id: u16) {
        let live = self.live.remove(&controller_id);
        assert!(live.is_none_or(|live| live.queues.is_empty()), "a controller ends after its queues");
    }

    /// All associations.
    pub fn all(&self) -> impl Iterator<Item = &Association> {
        self.live.values().map(|live| &live.association)
    }
}

fn check_admin(connect: &Connect, data: &ConnectData, entries_max: u16) -> Result<(), Refusal> {
    check_queue(connect, entries_max)?;
    match data.controller_id {
        ANY_CONTROLLER => Ok(()),
        _ => Err(Refusal::Parameter(InvalidParameter::CNTLID)),
    }
}

/// Checks what admin and I/O queues have in common.
const fn check_queue(connect: &Connect, entries_max: u16) -> Result<(), Refusal> {
    if connect.record_format != 0 {
        return Err(Refusal::Code(status::INCOMPATIBLE_FORMAT));
    }
    // SQSIZE is the number of entries, less one; a queue has at least two.
    if connect.sqsize == 0 || connect.sqsize >= entries_max {
        return Err(Refusal::Parameter(InvalidParameter::SQSIZE));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
