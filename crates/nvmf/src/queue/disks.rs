//! The namespaces of an I/O queue, and those that it loses. Reactor context.
//!
//! A channel that closes stays until its last request has ended, beside the next namespace with the same identifier: a host's
//! commands never reach another namespace than the one against which they were checked.

use super::Opened;
use aryk_bdev::{BdevChannel, Completion, OpenError, OpenerQos};
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::io::Rules;
use aryk_reactor::{Cx, RootId};
use futures_channel::oneshot;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A namespace.
pub(super) struct Disk {
    /// Its number among all namespaces of the target.
    pub number: u64,
    pub rules: Rules,
    pub channel: BdevChannel,
}

/// The channel of a namespace that was removed.
struct Leaving {
    channel: BdevChannel,
    /// Gets a message when the channel is closed.
    closed: oneshot::Sender<()>,
}

/// The namespaces.
pub(super) struct Disks {
    // A node of the map has room for eleven.
    open: BTreeMap<u32, Box<Disk>>,
    leaving: Vec<Leaving>,
    /// The numbers of namespaces that come as soon as their disks are ready, by identifier.
    expected: BTreeMap<u32, u64>,
    /// The limits of the host.
    qos: Arc<OpenerQos>,
}

impl Disks {
    pub const fn new(qos: Arc<OpenerQos>) -> Self {
        Self { open: BTreeMap::new(), leaving: Vec::new(), expected: BTreeMap::new(), qos }
    }

    /// Opens a namespace, unless it is open.
    pub fn add(&mut self, opened: Opened, root: RootId, cx: &mut Cx) -> Result<(), OpenError> {
        let Opened { nsid, number, rules, descriptor } = opened;
        if self.open.get(&nsid).is_some_and(|disk| disk.number == number) {
            return Ok(());
        }
        let mut channel = descriptor.open_channel(root, cx)?;
        channel.limit_opener(&self.qos, cx);
        // The tags of all namespaces' requests are the queue's slots.
        channel.trace_front_end();
        self.expected.remove(&nsid);
        let disk = Box::new(Disk { number, rules, channel });
        if let Some(earlier) = self.open.insert(nsid, disk) {
            // The call that has removed it takes it from this queue later, and finds it gone.
            self.leave(*earlier, oneshot::channel().0, cx);
        }
        Ok(())
    }

    /// A namespace comes as soon as its disk is ready, unless it is open.
    pub fn expect(&mut self, nsid: u32, number: u64) {
        if self.get_mut(nsid, number).is_none() {
            self.expected.insert(nsid, number);
        }
    }

    /// The namespace with this identifier, or why there is none.
    pub fn find(&self, nsid: u32) -> Result<&Disk, Code> {
        match self.open.get(&nsid) {
            Some(disk) => Ok(disk),
            None if self.expected.contains_key(&nsid) => Err(Code::NAMESPACE_NOT_READY),
            None => Err(Code::INVALID_NAMESPACE_OR_FORMAT),
        }
    }

    /// The namespace with this identifier and number.
    pub fn get_mut(&mut self, nsid: u32, number: u64) -> Option<&mut Disk> {
        self.open.get_mut(&nsid).map(|disk| &mut **disk).filter(|disk| disk.number == number)
    }

    /// Aborts the requests of a namespace, and closes its channel after the last of them. Then `closed` gets a message; if there
    /// is no such namespace, it is dropped.
    pub fn remove(&mut self, nsid: u32, number: u64, closed: oneshot::Sender<()>, cx: &mut Cx) {
        self.expected.retain(|_, expected| *expected != number);
        if self.get_mut(nsid, number).is_some()
            && let Some(disk) = self.open.remove(&nsid)
        {
            self.leave(*disk, closed, cx);
        }
    }

    fn leave(&mut self, disk: Disk, closed: oneshot::Sender<()>, cx: &mut Cx) {
        let Disk { mut channel, .. } = disk;
        channel.abort_all(cx);
        self.leaving.push(Leaving { channel, closed });
    }

    fn channels(&mut self) -> impl Iterator<Item = &mut BdevChannel> {
        let open = self.open.values_mut().map(|disk| &mut disk.channel);
        open.chain(self.leaving.iter_mut().map(|leaving| &mut leaving.channel))
    }

    /// Applies the limits that the host has now.
    pub fn apply_limits(&mut self, cx: &mut Cx) {
        let channels = self.open.values_mut().map(|disk| &mut disk.channel);
        channels.for_each(|channel| channel.limit_opener(&self.qos, cx));
    }

    /// Takes what has completed. Without an event, nothing is new on a disk that has no requests.
    pub fn poll(&mut self, has_event: bool, cx: &mut Cx, completions: &mut Vec<Completion>) {
        let busy = self.channels().filter(|channel| has_event || !channel.is_quiet());
        busy.for_each(|channel| channel.poll(cx, completions));
    }

    /// Closes the channels that are to close and have no request.
    pub fn close_idle(&mut self) {
        for Leaving { channel, closed } in self.leaving.extract_if(.., |of| of.channel.in_flight() == 0) {
            drop(channel);
            // The disk may have another opener at once.
            let _ = closed.send(());
        }
    }

    pub fn abort_all(&mut self, cx: &mut Cx) {
        self.channels().for_each(|channel| channel.abort_all(cx));
    }

    pub fn has_requests(&mut self) -> bool {
        self.channels().any(|channel| channel.in_flight() > 0)
    }

    /// Closes all channels, which have no request. Returns the limits of the host.
    pub fn close(&mut self) -> Arc<OpenerQos> {
        self.open.clear();
        self.close_idle();
        Arc::clone(&self.qos)
    }
}
