//! A logical unit, and who uses it: what all its channels, on all reactors, have in common. Any context.
//!
//! READ and WRITE look at two atomics of it and take no lock: whether something is pending for their nexus, and whether something is reserved.

use crate::cell::{Cells, Command, UnitCell};
use crate::reservations::{Access, Effects, Reservations};
use crate::{Key, Sense};
use aryk_bdev::{Bdev, Descriptor, Op, OpenError};
use aryk_reactor::{Cx, Handle, RootId};
use futures_channel::oneshot;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// What an initiator is told once, before its next command (SAM-5, section 5.14), the most important first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Attention {
    /// The unit is new to it.
    PowerOn,
    /// The unit was reset.
    Reset,
    /// The disk has another size.
    CapacityChanged,
    /// Someone has changed mode pages.
    ModeChanged,
    /// Someone has cleared all reservations and registrations.
    ReservationsPreempted,
    /// A reservation has ended.
    ReservationsReleased,
    /// Someone has removed its registration.
    RegistrationsPreempted,
    /// Its target has other logical units now.
    LunsChanged,
}

impl Attention {
    const ALL: [Self; 8] = [
        Self::PowerOn,
        Self::Reset,
        Self::CapacityChanged,
        Self::ModeChanged,
        Self::ReservationsPreempted,
        Self::ReservationsReleased,
        Self::RegistrationsPreempted,
        Self::LunsChanged,
    ];

    /// How it is told.
    pub const fn sense(self) -> Sense {
        let (asc, ascq) = match self {
            Self::PowerOn => (0x29, 0x00),
            Self::Reset => (0x29, 0x03),
            Self::CapacityChanged => (0x2a, 0x09),
            Self::ModeChanged => (0x2a, 0x01),
            Self::ReservationsPreempted => (0x2a, 0x03),
            Self::ReservationsReleased => (0x2a, 0x04),
            Self::RegistrationsPreempted => (0x2a, 0x05),
            Self::LunsChanged => (0x3f, 0x0e),
        };
        Sense::new(Key::UnitAttention, asc, ascq)
    }
}

/// What can be set by MODE SELECT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mode {
    /// Writes are done before they are durable.
    pub write_cache: bool,
    /// Nothing may be changed.
    pub protected: bool,
    /// Sense data is in descriptor format.
    pub descriptors: bool,
}

impl Mode {
    pub const DEFAULT: Self = Self { write_cache: true, protected: false, descriptors: false };

    const fn bits(self) -> u8 {
        self.write_cache as u8 | (self.protected as u8) << 1 | (self.descriptors as u8) << 2
    }

    const fn from_bits(bits: u8) -> Self {
        Self { write_cache: bits & 1 != 0, protected: bits & 2 != 0, descriptors: bits & 4 != 0 }
    }
}

/// Which commands are to be aborted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Which {
    /// All.
    All,
    /// All of one nexus, or that with one tag.
    Nexus(u32, Option<u64>),
    /// All of these.
    Nexuses(Vec<u32>),
}

impl Which {
    pub(crate) fn is_of(&self, nexus: u32) -> bool {
        match self {
            Self::All => true,
            Self::Nexus(one, _) => *one == nexus,
            Self::Nexuses(list) => list.contains(&nexus),
        }
    }

    pub(crate) fn has(&self, tag: u64) -> bool {
        !matches!(self, Self::Nexus(_, Some(one)) if *one != tag)
    }
}

#[derive(Default)]
pub(crate) struct Shared {
    pub reservations: Reservations,
    /// Who uses it, or has; a nexus' number is its place here.
    initiators: Vec<(Box<[u8]>, Weak<Nexus>)>,
    /// Reactors with channels of it, and how many.
    places: Vec<(Handle, usize)>,
}

impl Shared {
    /// By what a nexus' initiator is known.
    pub fn transport_id(&self, nexus: u32) -> &[u8] {
        &self.initiators[nexus as usize].0
    }
}

/// A disk as a logical unit.
pub struct Lun {
    serial: u64,
    number: u16,
    disk: Descriptor,
    mode: AtomicU8,
    /// There is a reservation: look at it.
    reserved: AtomicBool,
    shared: Mutex<Shared>,
}

impl fmt::Debug for Lun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lun").field("number", &self.number).field("disk", &self.disk).finish_non_exhaustive()
    }
}

static SERIALS: AtomicU64 = AtomicU64::new(0);

impl Lun {
    /// The logical unit `number` of its target.
    pub fn new(disk: Descriptor, number: u16) -> Arc<Self> {
        Arc::new(Self {
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            number,
            disk,
            mode: AtomicU8::new(Mode::DEFAULT.bits()),
            reserved: AtomicBool::new(false),
            shared: Mutex::default(),
        })
    }

    pub(crate) const fn serial(&self) -> u64 {
        self.serial
    }

    /// Its number in its target.
    pub const fn number(&self) -> u16 {
        self.number
    }

    /// The disk.
    pub fn bdev(&self) -> &Arc<Bdev> {
        self.disk.bdev()
    }

    /// Whether it may be changed, as far as the disk goes.
    pub fn is_writable(&self) -> bool {
        self.disk.is_writable()
    }

    /// Whether blocks can be given back.
    pub(crate) fn unmaps(&self) -> bool {
        self.is_writable() && self.bdev().device().ops().contains(Op::Unmap)
    }

    pub(crate) fn open_disk(&self, root: RootId, cx: &mut Cx) -> Result<aryk_bdev::BdevChannel, OpenError> {
        self.disk.open_channel(root, cx)
    }

    #[inline]
    pub(crate) fn mode(&self) -> Mode {
        Mode::from_bits(self.mode.load(Ordering::Relaxed))
    }

    /// Sets the mode on behalf of a nexus; the others are told.
    pub(crate) fn set_mode(&self, mode: Mode, by: u32) {
        if self.mode.swap(mode.bits(), Ordering::Relaxed) != mode.bits() {
            self.tell(Attention::ModeChanged, Some(by));
        }
    }

    /// Makes a nexus: an initiator, known by its TransportID (SPC-4, section 7.6.4), that uses this unit. What it has reserved before is its
    /// again.
    pub fn nexus(self: &Arc<Self>, transport_id: &[u8]) -> Arc<Nexus> {
        let mut shared = self.shared();
        let known = shared.initiators.iter().position(|(id, _)| **id == *transport_id);
        let number = known.unwrap_or(shared.initiators.len());
        let nexus = Arc::new(Nexus {
            number: number as u32,
            lun: Arc::clone(self),
            pending: AtomicU16::new(1 << Attention::PowerOn as u8),
        });
        let entry = (transport_id.into(), Arc::downgrade(&nexus));
        match known {
            Some(at) => shared.initiators[at] = entry,
            None => shared.initiators.push(entry),
        }
        nexus
    }

    /// The disk has another size: initiators are told.
    pub fn resized(&self) {
        self.tell(Attention::CapacityChanged, None);
    }

    fn tell(&self, what: Attention, except: Option<u32>) {
        for (number, (_, nexus)) in self.shared().initiators.iter().enumerate() {
            if let Some(nexus) = nexus.upgrade().filter(|_| except != Some(number as u32)) {
                nexus.raise(what);
            }
        }
    }

    /// Aborts commands, and waits until they are over; how many there were. From any thread.
    pub async fn abort(&self, which: Which) -> u32 {
        self.ask(which, Command::Abort).await
    }

    /// How many commands there are (QUERY TASK, QUERY TASK SET; SAM-5, sections 7.9 and 7.10). From any thread.
    pub async fn count(&self, which: Which) -> u32 {
        self.ask(which, Command::Count).await
    }

    /// Asks all channels of those whom it concerns, and adds up what they say.
    async fn ask(&self, which: Which, word: fn(Which, oneshot::Sender<u32>) -> Command) -> u32 {
        let places: Vec<_> = self.shared().places.iter().map(|(handle, _)| handle.clone()).collect();
        let mut answers = Vec::new();
        for place in places {
            let (serial, which) = (self.serial, which.clone());
            let leave_word = move |cx: &mut Cx| -> Vec<_> {
                let of_nexus = |cell: &Rc<UnitCell>| which.is_of(cell.nexus);
                let cells: Vec<_> = Cells::of(serial, cx).into_iter().filter(of_nexus).collect();
                let ask = |cell: Rc<UnitCell>| {
                    let (sender, receiver) = oneshot::channel();
                    cell.command(word(which.clone(), sender), cx);
                    receiver
                };
                cells.into_iter().map(ask).collect()
            };
            // If the reactor is gone, so are its channels.
            answers.extend(place.call(leave_word).await.unwrap_or_default());
        }
        let mut sum = 0;
        for receiver in answers {
            // A channel that was closed meanwhile had nothing in flight.
            sum += receiver.await.unwrap_or(0);
        }
        sum
    }

    /// LOGICAL UNIT RESET (SAM-5, section 6.3.3): aborts all commands, sets the mode as it was at first, and tells everyone. Persistent reservations
    /// stay.
    pub async fn reset(&self) {
        self.abort(Which::All).await;
        self.mode.store(Mode::DEFAULT.bits(), Ordering::Relaxed);
        self.tell(Attention::Reset, None);
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no one panics holding it")
    }

    /// Carries out what a change of reservations brings with it. Under the lock in which it was made.
    pub(crate) fn apply(&self, shared: &Shared, effects: &Effects) {
        self.reserved.store(shared.reservations.is_reserved(), Ordering::Release);
        for (nexus, what) in &effects.attentions {
            if let Some(nexus) = shared.initiators[*nexus as usize].1.upgrade() {
                nexus.raise(*what);
            }
        }
    }

    /// Whether nothing is reserved.
    #[inline]
    pub(crate) fn is_free(&self) -> bool {
        !self.reserved.load(Ordering::Acquire)
    }

    pub(crate) fn admits(&self, nexus: u32, access: Access) -> bool {
        self.is_free() || self.shared().reservations.allows(nexus, access)
    }

    pub(crate) fn channel_opened(&self, on: &Handle) {
        let places = &mut self.shared().places;
        match places.iter_mut().find(|(handle, _)| handle == on) {
            Some((_, channels)) => *channels += 1,
            None => places.push((on.clone(), 1)),
        }
    }

    pub(crate) fn channel_closed(&self, on: &Handle) {
        let places = &mut self.shared().places;
        let at = places.iter().position(|(handle, _)| handle == on).expect("it was opened there");
        places[at].1 -= 1;
        if places[at].1 == 0 {
            places.swap_remove(at);
        }
    }
}

/// An initiator's use of a logical unit.
#[derive(Debug)]
pub struct Nexus {
    number: u32,
    lun: Arc<Lun>,
    /// Attentions that it has not been told of yet, by bit.
    pending: AtomicU16,
}

impl Nexus {
    /// Its number among the unit's.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// The logical unit.
    pub const fn lun(&self) -> &Arc<Lun> {
        &self.lun
    }

    /// Its next command is answered by this.
    pub fn raise(&self, what: Attention) {
        self.pending.fetch_or(1 << what as u8, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn has_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// The most important attention that is pending; it is so no more.
    pub(crate) fn take_attention(&self) -> Option<Attention> {
        let is_taken = |what: &Attention| {
            let bit = 1 << *what as u8;
            self.pending.fetch_and(!bit, Ordering::Relaxed) & bit != 0
        };
        Attention::ALL.into_iter().find(is_taken)
    }
}
