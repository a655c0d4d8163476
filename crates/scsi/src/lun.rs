//! A logical unit, and who uses it: what all its channels, of all controllers and on all reactors, have in common. Any context.
//!
//! There is one of each disk. READ and WRITE look at one atomic of their nexus and take no lock: it says whether the initiator is to be told something,
//! and what it may not do because others have reserved the disk.
//!
//! **Reservations fence.** Who may do what changes for all at once, in their nexuses' atomics. Then each reactor with channels of the unit is asked, by
//! message, to give up what those have in flight who may not any more; what was begun before is among that, as it was begun in a turn before the
//! message. Only when all that is over is the change answered: whoever has preempted another knows that nothing of the other's reaches the disk from
//! then on.

use crate::cell::{Cells, Command, UnitCell};
use crate::kept::{Keep, Keeper, Kept, Port};
use crate::reservations::{Access, Change, Effects, Kind, Refused, Registration, Reservations};
use crate::{Key, Sense};
use aryk_bdev::{Bdev, Descriptor, Op, OpenError};
use aryk_reactor::{Cx, Handle, RootId};
use futures_channel::oneshot;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
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
pub struct Mode {
    /// Writes are done before they are durable.
    pub write_cache: bool,
    /// Nothing may be changed.
    pub protected: bool,
    /// Sense data is in descriptor format.
    pub descriptors: bool,
}

impl Default for Mode {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Mode {
    pub(crate) const DEFAULT: Self = Self { write_cache: true, protected: false, descriptors: false };

    pub(crate) const fn bits(self) -> u8 {
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

/// An initiator's place among a unit's. One that uses the unit no more, and is not registered, leaves it to another.
struct Place {
    port: Port,
    /// It may use the unit through several controllers, if it goes from one to another.
    nexuses: Vec<Weak<Nexus>>,
}

#[derive(Default)]
pub(crate) struct Shared {
    pub reservations: Reservations,
    /// A nexus' number is its place here.
    initiators: Vec<Place>,
    /// Reactors with channels of it, and how many.
    places: Vec<(Handle, usize)>,
    /// What was kept last.
    kept: Kept,
}

impl Shared {
    /// By what a nexus' initiator is known.
    pub fn port(&self, nexus: u32) -> Port {
        self.initiators[nexus as usize].port
    }

    /// The number of a port's nexus, which is new if it has none.
    fn number(&mut self, port: Port) -> u32 {
        let Self { initiators, reservations, .. } = self;
        let known = initiators.iter().position(|place| place.port == port);
        let is_free = |(number, place): (usize, &mut Place)| {
            place.nexuses.retain(|nexus| nexus.strong_count() > 0);
            place.nexuses.is_empty() && !reservations.is_registered(number as u32)
        };
        let at = known.or_else(|| initiators.iter_mut().enumerate().position(is_free));
        let at = at.unwrap_or(initiators.len());
        if known.is_none() {
            let place = Place { port, nexuses: Vec::new() };
            match initiators.get_mut(at) {
                Some(old) => *old = place,
                None => initiators.push(place),
            }
        }
        at as u32
    }

    /// The nexuses that there are, by number.
    fn nexuses(&self) -> impl Iterator<Item = Arc<Nexus>> {
        self.initiators.iter().flat_map(|place| &place.nexuses).filter_map(Weak::upgrade)
    }
}

/// A disk as a logical unit.
pub struct Lun {
    serial: u64,
    disk: String,
    /// As it is, and above [`SAVED`] as a reset brings it back.
    mode: AtomicU8,
    shared: Mutex<Shared>,
    /// Held by whoever changes what is kept, until it is.
    changing: tokio::sync::Mutex<()>,
    keeper: Option<Keeper>,
}

/// By how much the saved mode is shifted.
const SAVED: u32 = 4;

impl fmt::Debug for Lun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lun").field("disk", &self.disk).finish_non_exhaustive()
    }
}

static SERIALS: AtomicU64 = AtomicU64::new(0);

impl Lun {
    /// The unit of a disk of that name, as it was kept.
    pub(crate) fn new(disk: &str, keeper: Option<Keeper>, kept: Kept) -> Arc<Self> {
        let mut shared = Shared::default();
        let mut list = Vec::new();
        for (port, key) in &kept.registrations {
            let nexus = list.len() as u32;
            shared.initiators.push(Place { port: *port, nexuses: Vec::new() });
            list.push(Registration { nexus, key: *key });
        }
        let holder = kept.reservation.and_then(|(port, kind)| {
            let nexus = shared.initiators.iter().position(|place| place.port == port)?;
            Some((nexus as u32, Kind::from_code(kind)?))
        });
        shared.reservations = Reservations::restored(list, holder, kept.aptpl);
        let mode = kept.mode.bits() | kept.saved.bits() << SAVED;
        shared.kept = kept;
        Arc::new(Self {
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            disk: disk.to_owned(),
            mode: AtomicU8::new(mode),
            shared: Mutex::new(shared),
            changing: tokio::sync::Mutex::default(),
            keeper,
        })
    }

    pub(crate) const fn serial(&self) -> u64 {
        self.serial
    }

    /// Whether what initiators set can outlive the process.
    pub(crate) const fn can_keep(&self) -> bool {
        self.keeper.is_some()
    }

    /// Someone who uses the unit by that port.
    pub(crate) fn find(&self, port: Port) -> Option<Arc<Nexus>> {
        let shared = self.shared();
        let place = shared.initiators.iter().find(|place| place.port == port)?;
        place.nexuses.iter().find_map(Weak::upgrade)
    }

    /// Whether someone is registered.
    pub(crate) fn has_registrations(&self) -> bool {
        !self.shared().reservations.registrations().is_empty()
    }

    #[inline]
    pub(crate) fn mode(&self) -> Mode {
        Mode::from_bits(self.mode.load(Ordering::Relaxed))
    }

    /// The mode that a reset brings back.
    pub(crate) fn saved_mode(&self) -> Mode {
        Mode::from_bits(self.mode.load(Ordering::Relaxed) >> SAVED)
    }

    /// Sets the mode to what `change` makes of it, on behalf of a nexus, and for the time after a reset too if it `saves`; the others are told.
    ///
    /// # Errors
    /// The nexus may not change it any more, `asked` is no longer valid, `change` fails, or it cannot be kept; then nothing has changed.
    pub(crate) async fn select(
        &self,
        nexus: &Nexus,
        asked: Asked,
        saves: bool,
        change: impl FnOnce(Mode) -> Result<Mode, Sense>,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        // Whoever had the lock before may have preempted the nexus, or set another mode.
        if !nexus.may(Access::Change) || !asked.is_valid(nexus) {
            return Err(Refused::Conflict);
        }
        let mode = change(self.mode()).map_err(Refused::List)?;
        let saved = if saves { mode } else { self.saved_mode() };
        let reservations = self.shared().reservations.clone();
        self.keep(&reservations, mode, saved).await?;
        self.set_mode(mode, saved, Some(nexus.number));
        Ok(())
    }

    fn set_mode(&self, mode: Mode, saved: Mode, by: Option<u32>) {
        // Whoever finds another mode is told of it before.
        if mode != self.mode() {
            self.tell(Attention::ModeChanged, by);
        }
        self.mode.store(mode.bits() | saved.bits() << SAVED, Ordering::Relaxed);
    }

    /// An initiator's use of the unit, which is that of this number at this port. What it has reserved before is its again.
    pub(crate) fn nexus(self: &Arc<Self>, disk: Descriptor, port: Port, unit: u16) -> Arc<Nexus> {
        let mut shared = self.shared();
        let number = shared.number(port);
        let state = AtomicU16::new(1 << Attention::PowerOn as u8);
        let (changes, preemptions) = Default::default();
        let nexus =
            Arc::new(Nexus { number, unit, disk, lun: Arc::clone(self), state, changes, preemptions });
        nexus.deny(&shared.reservations);
        shared.initiators[number as usize].nexuses.push(Arc::downgrade(&nexus));
        nexus
    }

    /// The disk has another size: initiators are told.
    pub fn resized(&self) {
        self.tell(Attention::CapacityChanged, None);
    }

    /// The disk has other limits or operations, or can or cannot be written now: initiators are told.
    pub fn changed(&self) {
        self.tell(Attention::ModeChanged, None);
    }

    fn tell(&self, what: Attention, except: Option<u32>) {
        let shared = self.shared();
        shared.nexuses().filter(|nexus| except != Some(nexus.number)).for_each(|nexus| nexus.raise(what));
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

    /// The rest of LOGICAL UNIT RESET (SAM-5, section 6.3.3) after all commands were aborted, when no change is under way any more. All initiators are told
    /// at once; dropped before its time, it is not begun.
    pub async fn begin_reset(&self) -> Reset<'_> {
        self.tell(Attention::Reset, None);
        Reset { lun: self, _changing: self.changing.lock().await }
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no one panics holding it")
    }

    /// PERSISTENT RESERVE OUT on behalf of a nexus, which says that its key is `key`. It is over when nothing is in flight any more of those who may not
    /// do any more what they do. From any thread; the nexus is there until then.
    ///
    /// # Errors
    /// [`Refused`]; then nothing has changed.
    pub(crate) async fn reserve(
        &self,
        nexus: &Nexus,
        asked: Asked,
        key: u64,
        change: Change,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        if !asked.is_valid(nexus) {
            return Err(Refused::Conflict);
        }
        let mut next = self.shared().reservations.clone();
        let effects = next.make(nexus.number, key, change)?;
        self.keep(&next, self.mode(), self.saved_mode()).await?;
        let lost = match self.publish(next, &effects, nexus.bdev()) {
            Ok(lost) => lost,
            Err(refused) => {
                let before = self.shared().reservations.clone();
                // It was kept, and must not be.
                let _ = self.keep(&before, self.mode(), self.saved_mode()).await;
                return Err(refused);
            }
        };
        if matches!(change, Change::Preempt { abort: true, .. }) {
            let others = effects.removed.into_iter().filter(|n| *n != nexus.number).collect();
            self.abort(Which::Nexuses(others)).await;
        }
        if !lost.all.is_empty() {
            self.ask(Which::Nexuses(lost.all), |_, done| Command::Refuse(false, done)).await;
        }
        if !lost.changes.is_empty() {
            self.ask(Which::Nexuses(lost.changes), |_, done| Command::Refuse(true, done)).await;
        }
        Ok(())
    }

    /// Has reservations be in force, and whom they concern be told; who may do less than before.
    fn publish(&self, next: Reservations, effects: &Effects, disk: &Bdev) -> Result<Lost, Refused> {
        let mut shared = self.shared();
        // Each nexus is a writer.
        if !next.registrations().is_empty() && disk.writers() > shared.nexuses().count() {
            return Err(Refused::Unheeded);
        }
        shared.reservations = next;
        let mut lost = Lost::default();
        for nexus in shared.nexuses() {
            let denied = nexus.deny(&shared.reservations);
            if denied & DENIES_READS != 0 {
                lost.all.push(nexus.number);
            } else if denied & DENIES_CHANGES != 0 {
                lost.changes.push(nexus.number);
            }
            for (_, what) in effects.attentions.iter().filter(|(number, _)| *number == nexus.number) {
                nexus.raise(*what);
                if matches!(what, Attention::RegistrationsPreempted | Attention::ReservationsPreempted) {
                    nexus.preemptions.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(lost)
    }

    /// Keeps what is to be, if it is not what was kept before. Under the lock of changes.
    async fn keep(&self, reservations: &Reservations, mode: Mode, saved: Mode) -> Result<(), Refused> {
        let Some(keeper) = &self.keeper else { return Ok(()) };
        let (kept, before) = {
            let shared = self.shared();
            let list = reservations.registrations().iter();
            let kept = Kept {
                mode,
                saved,
                registrations: list.map(|r| (shared.port(r.nexus), r.key)).collect(),
                reservation: reservations.holder().map(|(nexus, kind)| (shared.port(nexus), kind as u8)),
                aptpl: reservations.keeps(),
            };
            (kept, shared.kept.clone())
        };
        if kept == before {
            return Ok(());
        }
        let durable = kept.is_durable() || before.is_durable();
        let is_kept = |kept: &Kept| {
            let (done, heard) = oneshot::channel();
            let word = Keep { disk: self.disk.clone(), kept: kept.clone(), durable, done };
            // One that is gone drops `done`.
            let _ = keeper.unbounded_send(word);
            heard
        };
        if is_kept(&kept).await == Ok(true) {
            self.shared().kept = kept;
            return Ok(());
        }
        // It may be kept all the same, with whatever is kept next, but for this.
        let _ = is_kept(&before).await;
        Err(Refused::NotKept)
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

/// Who may do less than before.
#[derive(Default)]
struct Lost {
    /// Nothing.
    all: Vec<u32>,
    /// No changes.
    changes: Vec<u32>,
}

/// A LOGICAL UNIT RESET that has begun: no other change is made meanwhile.
#[derive(Debug)]
pub struct Reset<'a> {
    lun: &'a Lun,
    _changing: tokio::sync::MutexGuard<'a, ()>,
}

impl Reset<'_> {
    /// Brings the saved mode back. Persistent reservations stay.
    pub async fn carry_out(self) {
        let lun = self.lun;
        let saved = lun.saved_mode();
        let reservations = lun.shared().reservations.clone();
        // What cannot be kept is told again when it comes back.
        let _ = lun.keep(&reservations, saved, saved).await;
        lun.set_mode(saved, saved, None);
    }
}

/// An initiator's use of a logical unit.
#[derive(Debug)]
pub struct Nexus {
    number: u32,
    unit: u16,
    disk: Descriptor,
    lun: Arc<Lun>,
    /// Attentions that it has not been told of yet, by bit, and what others' reservations deny it.
    state: AtomicU16,
    /// Changes of the unit that it has begun, and that have not ended.
    changes: AtomicU32,
    /// How often others have taken its registration away.
    preemptions: AtomicU32,
}

/// Changes of the unit that a nexus has begun and that have not ended, at most: each holds memory, and others' changes wait for it.
pub(crate) const CHANGES_MAX: u32 = 16;

/// A change of the unit that a nexus has begun: it counts until this is dropped.
pub(crate) struct Changing(Arc<Nexus>);

impl Drop for Changing {
    fn drop(&mut self) {
        self.0.changes.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A nexus' request for a change of the unit, which waits for its turn. It is void once its command is aborted or its nexus preempted.
pub(crate) struct Asked {
    /// The command, as long as it waits.
    wanted: Weak<()>,
    /// How often the nexus had been preempted when it asked.
    preemptions: u32,
}

impl Asked {
    /// Of a command that waits as long as `wanted` is there.
    pub fn new(nexus: &Nexus, wanted: Weak<()>) -> Self {
        Self { wanted, preemptions: nexus.preemptions.load(Ordering::Relaxed) }
    }

    /// Whether the change may have effect: the command was not aborted, and its nexus was not preempted.
    fn is_valid(&self, nexus: &Nexus) -> bool {
        self.wanted.strong_count() > 0 && self.preemptions == nexus.preemptions.load(Ordering::Relaxed)
    }
}

const DENIES_READS: u16 = 1 << 14;
const DENIES_CHANGES: u16 = 1 << 15;
const DENIES: u16 = DENIES_READS | DENIES_CHANGES;

impl Nexus {
    /// Its number among the unit's.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// The logical unit.
    pub const fn lun(&self) -> &Arc<Lun> {
        &self.lun
    }

    /// The unit's number in its target.
    pub const fn unit(&self) -> u16 {
        self.unit
    }

    /// The disk.
    pub fn bdev(&self) -> &Arc<Bdev> {
        self.disk.bdev()
    }

    /// The disk, as it is open for this nexus.
    pub const fn disk(&self) -> &Descriptor {
        &self.disk
    }

    /// Whether it may be changed, as far as the disk goes.
    pub fn is_writable(&self) -> bool {
        self.disk.is_writable()
    }

    /// Whether blocks can be given back.
    pub(crate) fn unmaps(&self) -> bool {
        self.is_writable() && self.bdev().device().ops().contains(Op::Unmap)
    }

    /// Counts a change of the unit, unless there are as many as there may be.
    pub(crate) fn begin_change(self: &Arc<Self>) -> Option<Changing> {
        let more = |changes| (changes < CHANGES_MAX).then_some(changes + 1);
        let counted = self.changes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok().then(|| Changing(Arc::clone(self)))
    }

    pub(crate) fn open_disk(&self, root: RootId, cx: &mut Cx) -> Result<aryk_bdev::BdevChannel, OpenError> {
        self.disk.open_channel(root, cx)
    }

    /// Its next command is answered by this.
    pub fn raise(&self, what: Attention) {
        self.state.fetch_or(1 << what as u8, Ordering::Relaxed);
    }

    /// Whether there is nothing to tell it, and nothing that it may not do.
    #[inline]
    pub(crate) fn is_clear(&self) -> bool {
        self.state.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn has_pending(&self) -> bool {
        self.state.load(Ordering::Relaxed) & !DENIES != 0
    }

    /// Whether reservations let it do that.
    pub(crate) fn may(&self, access: Access) -> bool {
        let denied = match access {
            Access::None => 0,
            Access::Read => DENIES_READS,
            Access::Change => DENIES_CHANGES,
        };
        self.state.load(Ordering::Relaxed) & denied == 0
    }

    /// Denies it what these reservations do; what of that is new.
    fn deny(&self, reservations: &Reservations) -> u16 {
        let bit = |access, bit| if reservations.allows(self.number, access) { 0 } else { bit };
        let denied = bit(Access::Read, DENIES_READS) | bit(Access::Change, DENIES_CHANGES);
        let change = |state: u16| Some(state & !DENIES | denied);
        let before = self.state.fetch_update(Ordering::Release, Ordering::Relaxed, change);
        denied & !before.unwrap_or_else(|same| same)
    }

    /// The most important attention that is pending; it is so no more.
    pub(crate) fn take_attention(&self) -> Option<Attention> {
        let is_taken = |what: &Attention| {
            let bit = 1 << *what as u8;
            self.state.fetch_and(!bit, Ordering::Relaxed) & bit != 0
        };
        Attention::ALL.into_iter().find(is_taken)
    }
}
