//! The device-specific part of a vhost-user-scsi controller: eight targets, to which disks are attached. Control context.
//!
//! Queue 0 is the control queue, queue 1 the event queue; all others are request queues. A disk is attached and detached
//! without the guest's help: every queue receives a message and the guest receives an event. After a detach, commands in flight
//! on the old disk may still end while the target already has its next disk.

use crate::events::{Events, PendingEvents, TargetEvent};
use crate::manage::Manager;
use crate::moving::PortableRole;
use crate::queue::{Queue, Targets};
use crate::wire::{self, Config, feature};
use crate::{Error, Initiator};
use aryk_bdev::{Descriptor, Event, OpenError};
use aryk_reactor::Handle;
use aryk_scsi::{Lun, Nexus};
use aryk_vhost_device::{Controller, Kind};
use aryk_vhost_user::DeviceError;
use aryk_virtqueue::Virtqueue;
use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};
use tokio::sync::MutexGuard;
use zerocopy::IntoBytes;

/// The control queue's index.
const CONTROL: u16 = 0;
/// The event queue's index.
const EVENT: u16 = 1;
/// Queues that are not request queues.
const FIXED: u16 = 2;

/// The device-specific part of a vhost-user-scsi controller.
#[derive(Debug)]
pub struct Scsi {
    initiator: Initiator,
    /// Request queues.
    queues: u16,
    /// The disks of the targets. They change only under `hold_still`, when no queue starts, stops or moves, so that each queue
    /// learns of every change.
    targets: RefCell<Targets>,
    /// Targets to which a disk is being attached, by bit.
    arriving: Cell<u8>,
    /// Events for the guest that wait until its event queue runs again. `None` if the queue has not run in this session: the
    /// guest scans the targets first.
    pending_events: Cell<Option<PendingEvents>>,
}

impl Scsi {
    pub(crate) fn new(initiator: Initiator, queues: u16) -> Self {
        let (targets, arriving, pending_events) = (RefCell::default(), Cell::default(), Cell::default());
        Self { initiator, queues, targets, arriving, pending_events }
    }

    /// The name of the VM as initiator, for reservations.
    pub const fn initiator(&self) -> Initiator {
        self.initiator
    }

    /// The targets that have disks, and the disks' names.
    pub fn targets(&self) -> Vec<(u8, String)> {
        let targets = self.targets.borrow();
        let named = |nexus: &Arc<Nexus>| nexus.bdev().name().to_owned();
        let all = (0..).zip(targets.iter());
        all.filter_map(|(target, nexus)| nexus.as_ref().map(|n| (target, named(n)))).collect()
    }

    /// Whether a target has no disk and none is being attached to it.
    pub fn is_free(&self, target: u8) -> bool {
        !self.has_disk(target) && self.arriving.get() & 1 << target == 0
    }

    /// Whether a target has a disk.
    pub fn has_disk(&self, target: u8) -> bool {
        self.targets.borrow()[usize::from(target)].is_some()
    }

    /// Attaches a disk to a target and sends the guest an event. The result identifies this attachment.
    ///
    /// # Errors
    /// The target has a disk, or the disk cannot be prepared or opened on a queue's reactor.
    pub(crate) async fn attach(
        controller: &Controller<Self>,
        target: u8,
        nexus: Arc<Nexus>,
    ) -> Result<Weak<Nexus>, Error> {
        let this = controller.kind();
        if !this.is_free(target) {
            return Err(Error::Taken(target));
        }
        let _arriving = Arriving::new(&this.arriving, target);
        let _changing = hold_for_disk(controller, nexus.disk()).await?;
        this.targets.borrow_mut()[usize::from(target)] = Some(Arc::clone(&nexus));
        for (index, queue) in controller.queues().all() {
            let nexus = Arc::clone(&nexus);
            let reply = queue.call(move |queue, cx| match index {
                CONTROL => {
                    queue.manager().0.set_target(target, Some(nexus));
                    Ok(())
                }
                EVENT => Ok(()),
                _ => {
                    let (requests, guest) = queue.requests();
                    requests.attach(target, nexus, guest, cx)
                }
            });
            // A queue that has ended needs no target.
            if let Ok(Err(error)) = reply.await {
                Self::remove_disk(controller, target).await;
                return Err(error.into());
            }
        }
        Self::post(controller, TargetEvent::Plugged, target).await;
        Ok(Arc::downgrade(&nexus))
    }

    /// Detaches the disk of a target, without the help of the disk or the guest, and sends the guest an event. Returns whether
    /// the target had a disk; if `this` is given, whether it had that one.
    pub(crate) async fn detach(
        controller: &Controller<Self>,
        target: u8,
        this: Option<&Weak<Nexus>>,
    ) -> bool {
        let _changing = controller.queues().hold_still().await;
        let had = controller.kind().disk_of(target).is_some_and(|nexus| is_same(&nexus, this));
        if had {
            Self::remove_disk(controller, target).await;
            Self::post(controller, TargetEvent::Unplugged, target).await;
        }
        had
    }

    fn disk_of(&self, target: u8) -> Option<Arc<Nexus>> {
        self.targets.borrow()[usize::from(target)].clone()
    }

    async fn remove_disk(controller: &Controller<Self>, target: u8) {
        controller.kind().targets.borrow_mut()[usize::from(target)].take();
        for (index, queue) in controller.queues().all() {
            let reply = queue.call(move |queue, cx| match index {
                CONTROL => queue.manager().0.set_target(target, None),
                EVENT => {}
                _ => {
                    let (requests, guest) = queue.requests();
                    requests.detach(target, guest, cx);
                }
            });
            let _ = reply.await;
        }
    }

    /// Handles an event of the disk `this` of a target.
    pub(crate) async fn disk_event(
        controller: &Controller<Self>,
        event: Event,
        target: u8,
        this: &Weak<Nexus>,
    ) {
        match event {
            Event::Resized { .. } => {
                Self::report_change(controller, TargetEvent::Resized, Lun::resized, target, this).await;
            }
            Event::Changed => {
                Self::report_change(controller, TargetEvent::Changed, Lun::changed, target, this).await
            }
            Event::Removed => _ = Self::detach(controller, target, Some(this)).await,
        }
    }

    async fn report_change(
        controller: &Controller<Self>,
        event: TargetEvent,
        note: fn(&Lun),
        target: u8,
        this: &Weak<Nexus>,
    ) {
        let _changing = controller.queues().hold_still().await;
        let nexus = controller.kind().disk_of(target).filter(|nexus| is_same(nexus, Some(this)));
        if let Some(nexus) = nexus {
            note(nexus.lun());
            Self::post(controller, event, target).await;
        }
    }

    /// Sends the guest an event. The caller holds the guard of `hold_still`, so the event queue neither starts nor stops during
    /// this call.
    async fn post(controller: &Controller<Self>, event: TargetEvent, target: u8) {
        let sent = match controller.queues().get(EVENT) {
            Some(queue) => queue.call(move |queue, cx| queue.post(event, target, cx)).await.unwrap_or(false),
            None => false,
        };
        let kept = &controller.kind().pending_events;
        if let Some(mut pending_events) = kept.get().filter(|_| !sent) {
            pending_events.add(event, target);
            kept.set(Some(pending_events));
        }
    }
}

/// Waits until a disk has prepared the reactors of all request queues. Returns the guard of `hold_still`, under which no queue
/// starts, stops or moves; the guard is not held while the disk prepares.
async fn hold_for_disk<'a>(
    controller: &'a Controller<Scsi>,
    disk: &Descriptor,
) -> Result<MutexGuard<'a, ()>, OpenError> {
    let mut prepared: Vec<Handle> = Vec::new();
    loop {
        let still = controller.queues().hold_still().await;
        let mut reactors = controller.queues().all().into_iter().filter(|(index, _)| *index >= FIXED);
        let next = reactors.find(|(_, queue)| !prepared.contains(queue.handle()));
        let Some((_, queue)) = next else { return Ok(still) };
        drop(still);
        // A reactor that has ended has no queue.
        if let Some(reactor) = controller.reactors().hold(queue.handle()) {
            disk.prepare(&reactor).await?;
        }
        prepared.push(queue.handle().clone());
    }
}

/// Marks a target to which a disk is being attached: no other disk is attached to it until this is dropped.
struct Arriving<'a>(&'a Cell<u8>, u8);

impl<'a> Arriving<'a> {
    fn new(all: &'a Cell<u8>, target: u8) -> Self {
        all.set(all.get() | 1 << target);
        Self(all, target)
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() & !(1 << self.1));
    }
}

/// Whether `nexus` is the attachment `this`, if that is given. Another disk may have taken its place.
fn is_same(nexus: &Arc<Nexus>, this: Option<&Weak<Nexus>>) -> bool {
    this.is_none_or(|this| std::ptr::eq(this.as_ptr(), Arc::as_ptr(nexus)))
}

/// Whether a ring is in the state that a new driver gives it.
fn is_unused(ring: &mut Virtqueue) -> bool {
    /// The bases of new rings: 0 for split rings, both wrap counters set for packed rings.
    const BEGINNINGS: [u32; 2] = [0, 0x8000_8000];
    BEGINNINGS.contains(&ring.base()) && ring.available() == Ok(0)
}

impl Kind for Scsi {
    const NAME: &'static str = "scsi";
    const FIXED_QUEUES: u16 = FIXED;
    type Queue = Queue;

    fn features(&self) -> u64 {
        feature::HOTPLUG | feature::CHANGE
    }

    fn config(&self) -> Vec<u8> {
        Config::new(self.queues).as_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        if wire::may_write(&Config::new(self.queues), offset, data) {
            return Ok(());
        }
        Err("only the CDB size (32) and the sense size (96) can be written".into())
    }

    fn disks(&self) -> Targets {
        self.targets.borrow().clone()
    }

    /// Only request queues open channels.
    fn open_disks(&self, index: u16) -> Vec<Descriptor> {
        match index {
            CONTROL | EVENT => Vec::new(),
            _ => self.targets.borrow().iter().flatten().map(|nexus| nexus.disk().clone()).collect(),
        }
    }

    fn disk_names(&self) -> Vec<String> {
        self.targets().into_iter().map(|(_, disk)| disk).collect()
    }

    fn role(&self, index: u16, features: u64, ring: &mut Virtqueue) -> PortableRole {
        match index {
            CONTROL => PortableRole::Control(Manager::new(self.disks())),
            EVENT => {
                // A driver that has made no buffer available is new, and scans the targets itself.
                let waiting = self.pending_events.take().filter(|_| !is_unused(ring)).unwrap_or_default();
                PortableRole::Event(Events::new(features, waiting))
            }
            _ => PortableRole::Request,
        }
    }

    fn keep(&self, left: Option<PendingEvents>) {
        if left.is_some() {
            self.pending_events.set(left);
        }
    }

    fn disconnected(&self) {
        self.pending_events.take();
    }

    async fn end(controller: &Controller<Self>) {
        for (target, _) in controller.kind().targets() {
            Self::detach(controller, target, None).await;
        }
    }
}
