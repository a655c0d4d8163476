//! A logical unit and its initiators: the state that all its channels share, of all controllers and on all reactors. Any context.
//!
//! Each disk has one logical unit. READ and WRITE load one atomic of their nexus and take no lock: the atomic holds the pending
//! unit attentions, and the accesses that other initiators' reservations deny.
//!
//! **Reservations fence.** A change of reservations first changes the rights of all initiators at once, in the atomics of their
//! nexuses. Then each reactor with channels of the unit receives a message that aborts the commands in flight which are no
//! longer allowed. A command submitted before the change is in flight by then, because it was submitted in a turn before the
//! message. The change is answered only after all of these commands have ended: once PREEMPT is answered, no command of the
//! preempted initiator reaches the disk.

use crate::cell::{Cells, Command, UnitCell};
use crate::reservations::{Access, Change, Effects, Kind, Refused, Registration, Reservations};
use crate::saved::{Port, SaveRequest, SaveSender, SavedState};
use crate::{Key, Sense};
use aryk_bdev::{Bdev, Descriptor, Op, OpenError};
use aryk_reactor::{Cx, Handle, RootId};
use futures_channel::oneshot;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Unit attentions, which an initiator receives once, before its next command (SAM-5, section 5.14), the most important first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Attention {
    /// The unit is new to the initiator.
    PowerOn,
    /// The unit was reset.
    Reset,
    /// The size of the disk has changed.
    CapacityChanged,
    /// Another initiator has changed mode pages.
    ModeChanged,
    /// Another initiator has cleared all reservations and registrations.
    ReservationsPreempted,
    /// A reservation has ended.
    ReservationsReleased,
    /// Another initiator has removed this initiator's registration.
    RegistrationsPreempted,
    /// The list of the target's logical units has changed.
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

    /// The sense data that reports the attention.
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

/// The mode parameters that MODE SELECT can set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mode {
    /// Write cache: a write may complete before its data is durable.
    pub write_cache: bool,
    /// Software write protection: changes are refused.
    pub protected: bool,
    /// Sense data is sent in descriptor format.
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

/// Selects tasks, to abort or to count them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TaskFilter {
    /// All tasks of the unit.
    All,
    /// All tasks of one nexus, or the one with this tag.
    Nexus(u32, Option<u64>),
    /// All tasks of these nexuses.
    Nexuses(Vec<u32>),
}

impl TaskFilter {
    pub(crate) fn matches_nexus(&self, nexus: u32) -> bool {
        match self {
            Self::All => true,
            Self::Nexus(one, _) => *one == nexus,
            Self::Nexuses(list) => list.contains(&nexus),
        }
    }

    pub(crate) fn matches_tag(&self, tag: u64) -> bool {
        !matches!(self, Self::Nexus(_, Some(one)) if *one != tag)
    }
}

/// An entry in a unit's table of initiators. The entry of an initiator that no longer uses the unit and is not registered is free
/// for another one.
struct InitiatorEntry {
    port: Port,
    /// An initiator can use the unit through several controllers while it moves from one to another.
    nexuses: Vec<Weak<Nexus>>,
}

#[derive(Default)]
pub(crate) struct Shared {
    pub reservations: Reservations,
    /// A nexus' number is its index here.
    initiators: Vec<InitiatorEntry>,
    /// Reactors with channels of the unit, and the number of channels of each.
    reactors: Vec<(Handle, usize)>,
    /// The state that was saved last.
    state: SavedState,
}

impl Shared {
    /// The port by which a nexus' initiator is identified.
    pub fn port(&self, nexus: u32) -> Port {
        self.initiators[nexus as usize].port
    }

    /// The number of a port's nexus; allocates one if the port has none.
    fn number(&mut self, port: Port) -> u32 {
        let Self { initiators, reservations, .. } = self;
        let known = initiators.iter().position(|entry| entry.port == port);
        let is_free = |(number, entry): (usize, &mut InitiatorEntry)| {
            entry.nexuses.retain(|nexus| nexus.strong_count() > 0);
            entry.nexuses.is_empty() && !reservations.is_registered(number as u32)
        };
        let at = known.or_else(|| initiators.iter_mut().enumerate().position(is_free));
        let at = at.unwrap_or(initiators.len());
        if known.is_none() {
            let entry = InitiatorEntry { port, nexuses: Vec::new() };
            match initiators.get_mut(at) {
                Some(old) => *old = entry,
                None => initiators.push(entry),
            }
        }
        at as u32
    }

    /// The live nexuses, by number.
    fn nexuses(&self) -> impl Iterator<Item = Arc<Nexus>> {
        self.initiators.iter().flat_map(|entry| &entry.nexuses).filter_map(Weak::upgrade)
    }
}

/// A disk as a logical unit.
pub struct Lun {
    serial: u64,
    disk: String,
    /// The current mode, and above [`SAVED`] bits the saved mode, which a reset restores.
    mode: AtomicU8,
    shared: Mutex<Shared>,
    /// Held while the saved state is changed and saved.
    changing: tokio::sync::Mutex<()>,
    saver: Option<SaveSender>,
}

/// The number of bits by which the saved mode is shifted.
const SAVED: u32 = 4;

impl fmt::Debug for Lun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lun").field("disk", &self.disk).finish_non_exhaustive()
    }
}

static SERIALS: AtomicU64 = AtomicU64::new(0);

impl Lun {
    /// Creates the unit of the disk with that name, with the saved state.
    pub(crate) fn new(disk: &str, saver: Option<SaveSender>, state: SavedState) -> Arc<Self> {
        let mut shared = Shared::default();
        let mut list = Vec::new();
        for (port, key) in &state.registrations {
            let nexus = list.len() as u32;
            shared.initiators.push(InitiatorEntry { port: *port, nexuses: Vec::new() });
            list.push(Registration { nexus, key: *key });
        }
        let holder = state.reservation.and_then(|(port, kind)| {
            let nexus = shared.initiators.iter().position(|entry| entry.port == port)?;
            Some((nexus as u32, Kind::from_code(kind)?))
        });
        shared.reservations = Reservations::restored(list, holder, state.aptpl);
        let mode = state.mode.bits() | state.saved.bits() << SAVED;
        shared.state = state;
        Arc::new(Self {
            serial: SERIALS.fetch_add(1, Ordering::Relaxed),
            disk: disk.to_owned(),
            mode: AtomicU8::new(mode),
            shared: Mutex::new(shared),
            changing: tokio::sync::Mutex::default(),
            saver,
        })
    }

    pub(crate) const fn serial(&self) -> u64 {
        self.serial
    }

    /// Whether state that initiators set can outlive the process.
    pub(crate) const fn can_save(&self) -> bool {
        self.saver.is_some()
    }

    /// A nexus that uses the unit through that port.
    pub(crate) fn find(&self, port: Port) -> Option<Arc<Nexus>> {
        let shared = self.shared();
        let entry = shared.initiators.iter().find(|entry| entry.port == port)?;
        entry.nexuses.iter().find_map(Weak::upgrade)
    }

    /// Whether an initiator is registered.
    pub(crate) fn has_registrations(&self) -> bool {
        !self.shared().reservations.registrations().is_empty()
    }

    #[inline]
    pub(crate) fn mode(&self) -> Mode {
        Mode::from_bits(self.mode.load(Ordering::Relaxed))
    }

    /// The saved mode, which a reset restores.
    pub(crate) fn saved_mode(&self) -> Mode {
        Mode::from_bits(self.mode.load(Ordering::Relaxed) >> SAVED)
    }

    /// Sets the mode to the result of `change`, on behalf of a nexus, and also saves it for the time after a reset if `saves`.
    /// The other initiators receive a unit attention.
    ///
    /// # Errors
    /// Nothing changes if the nexus has lost the right to change the mode, `requested` is no longer valid, `change` fails, or the
    /// mode cannot be saved.
    pub(crate) async fn select(
        &self,
        nexus: &Nexus,
        requested: ChangeRequest,
        saves: bool,
        change: impl FnOnce(Mode) -> Result<Mode, Sense>,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        // The previous holder of the lock may have preempted the nexus, or set another mode.
        if !nexus.may(Access::Change) || !requested.is_valid(nexus) {
            return Err(Refused::Conflict);
        }
        let mode = change(self.mode()).map_err(Refused::List)?;
        let saved = if saves { mode } else { self.saved_mode() };
        let reservations = self.shared().reservations.clone();
        self.save(&reservations, mode, saved).await?;
        self.set_mode(mode, saved, Some(nexus.number));
        Ok(())
    }

    fn set_mode(&self, mode: Mode, saved: Mode, by: Option<u32>) {
        // An initiator receives the attention before it sees the new mode.
        if mode != self.mode() {
            self.raise_for_all(Attention::ModeChanged, by);
        }
        self.mode.store(mode.bits() | saved.bits() << SAVED, Ordering::Relaxed);
    }

    /// Creates a nexus of the unit `unit` in the target of this port. A nexus keeps the registration and reservation of an
    /// earlier nexus at the same port.
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

    /// Raises a unit attention for all initiators: the size of the disk has changed.
    pub fn resized(&self) {
        self.raise_for_all(Attention::CapacityChanged, None);
    }

    /// Raises a unit attention for all initiators: the disk's limits, operations or write permission have changed.
    pub fn changed(&self) {
        self.raise_for_all(Attention::ModeChanged, None);
    }

    fn raise_for_all(&self, what: Attention, except: Option<u32>) {
        let shared = self.shared();
        shared.nexuses().filter(|nexus| except != Some(nexus.number)).for_each(|nexus| nexus.raise(what));
    }

    /// Aborts commands, and waits until they have ended; returns their number. From any thread.
    pub async fn abort(&self, which: TaskFilter) -> u32 {
        self.command_channels(which, Command::Abort).await
    }

    /// Counts commands (QUERY TASK, QUERY TASK SET; SAM-5, sections 7.9 and 7.10). From any thread.
    pub async fn count(&self, which: TaskFilter) -> u32 {
        self.command_channels(which, Command::Count).await
    }

    /// Sends a command to all channels of the selected nexuses, and adds up their answers.
    async fn command_channels(
        &self,
        which: TaskFilter,
        command: fn(TaskFilter, oneshot::Sender<u32>) -> Command,
    ) -> u32 {
        let reactors: Vec<_> = self.shared().reactors.iter().map(|(handle, _)| handle.clone()).collect();
        let mut answers = Vec::new();
        for reactor in reactors {
            let (serial, which) = (self.serial, which.clone());
            let send = move |cx: &mut Cx| -> Vec<_> {
                let of_nexus = |cell: &Rc<UnitCell>| which.matches_nexus(cell.nexus);
                let cells: Vec<_> =
                    cx.local_state::<Cells>().of(serial).into_iter().filter(of_nexus).collect();
                let send_command = |cell: Rc<UnitCell>| {
                    let (sender, receiver) = oneshot::channel();
                    cell.commands.add(command(which.clone(), sender), cx);
                    receiver
                };
                cells.into_iter().map(send_command).collect()
            };
            // If the reactor has ended, its channels are closed.
            answers.extend(reactor.call(send).await.unwrap_or_default());
        }
        let mut sum = 0;
        for receiver in answers {
            // A channel that was closed in between had nothing in flight.
            sum += receiver.await.unwrap_or(0);
        }
        sum
    }

    /// Starts the second part of LOGICAL UNIT RESET (SAM-5, section 6.3.3), after all commands were aborted: raises the unit
    /// attention for all initiators at once, and waits until no other change of the unit is in progress. If the future is dropped
    /// before that, the mode is not reset.
    pub async fn begin_reset(&self) -> Reset<'_> {
        self.raise_for_all(Attention::Reset, None);
        Reset { lun: self, _changing: self.changing.lock().await }
    }

    pub(crate) fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().expect("no holder of the lock panics")
    }

    /// PERSISTENT RESERVE OUT on behalf of a nexus that states the key `key`. The future completes when no command is in flight
    /// that the new reservations forbid. From any thread; the nexus must live until then.
    ///
    /// # Errors
    /// [`Refused`]; then nothing has changed.
    pub(crate) async fn reserve(
        &self,
        nexus: &Nexus,
        requested: ChangeRequest,
        key: u64,
        change: Change,
    ) -> Result<(), Refused> {
        let _changing = self.changing.lock().await;
        if !requested.is_valid(nexus) {
            return Err(Refused::Conflict);
        }
        let mut next = self.shared().reservations.clone();
        let effects = next.make(nexus.number, key, change)?;
        self.save(&next, self.mode(), self.saved_mode()).await?;
        let lost = match self.publish(next, &effects, nexus.bdev()) {
            Ok(lost) => lost,
            Err(refused) => {
                let before = self.shared().reservations.clone();
                // The state was saved, and must be restored.
                let _ = self.save(&before, self.mode(), self.saved_mode()).await;
                return Err(refused);
            }
        };
        if matches!(change, Change::Preempt { abort: true, .. }) {
            let others = effects.removed.into_iter().filter(|n| *n != nexus.number).collect();
            self.abort(TaskFilter::Nexuses(others)).await;
        }
        if !lost.all.is_empty() {
            self.command_channels(TaskFilter::Nexuses(lost.all), |_, done| Command::Refuse(false, done))
                .await;
        }
        if !lost.changes.is_empty() {
            self.command_channels(TaskFilter::Nexuses(lost.changes), |_, done| Command::Refuse(true, done))
                .await;
        }
        Ok(())
    }

    /// Puts reservations into force, raises the unit attentions, and returns the initiators that have lost rights.
    fn publish(&self, next: Reservations, effects: &Effects, disk: &Bdev) -> Result<LostRights, Refused> {
        let mut shared = self.shared();
        // Each nexus counts as one writer.
        if !next.registrations().is_empty() && disk.writers() > shared.nexuses().count() {
            return Err(Refused::ForeignWriter);
        }
        shared.reservations = next;
        let mut lost = LostRights::default();
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

    /// Saves the state if it differs from the state saved last. Called under the lock of changes.
    async fn save(&self, reservations: &Reservations, mode: Mode, saved: Mode) -> Result<(), Refused> {
        let Some(saver) = &self.saver else { return Ok(()) };
        let (state, before) = {
            let shared = self.shared();
            let list = reservations.registrations().iter();
            let state = SavedState {
                mode,
                saved,
                registrations: list.map(|r| (shared.port(r.nexus), r.key)).collect(),
                reservation: reservations.holder().map(|(nexus, kind)| (shared.port(nexus), kind as u8)),
                aptpl: reservations.aptpl(),
            };
            (state, shared.state.clone())
        };
        if state == before {
            return Ok(());
        }
        let durable = state.is_durable() || before.is_durable();
        let request = |state: &SavedState| {
            let (done, saved) = oneshot::channel();
            let command = SaveRequest { disk: self.disk.clone(), state: state.clone(), durable, done };
            // If the receiver is closed, `done` is dropped with the request.
            let _ = saver.unbounded_send(command);
            saved
        };
        if request(&state).await == Ok(true) {
            self.shared().state = state;
            return Ok(());
        }
        // The state of the failed save may still reach the store with a later save, unless a save of the old state replaces it.
        let _ = request(&before).await;
        Err(Refused::NotSaved)
    }

    pub(crate) fn channel_opened(&self, on: &Handle) {
        let reactors = &mut self.shared().reactors;
        match reactors.iter_mut().find(|(handle, _)| handle == on) {
            Some((_, channels)) => *channels += 1,
            None => reactors.push((on.clone(), 1)),
        }
    }

    pub(crate) fn channel_closed(&self, on: &Handle) {
        let reactors = &mut self.shared().reactors;
        let at = reactors.iter().position(|(handle, _)| handle == on).expect("a channel was opened there");
        reactors[at].1 -= 1;
        if reactors[at].1 == 0 {
            reactors.swap_remove(at);
        }
    }
}

/// Numbers of the initiators that have lost rights.
#[derive(Default)]
struct LostRights {
    /// Initiators that may now do nothing.
    all: Vec<u32>,
    /// Initiators that may no longer change anything.
    changes: Vec<u32>,
}

/// A LOGICAL UNIT RESET in progress: no other change of the unit is made during it.
#[derive(Debug)]
pub struct Reset<'a> {
    lun: &'a Lun,
    _changing: tokio::sync::MutexGuard<'a, ()>,
}

impl Reset<'_> {
    /// Restores the saved mode. Persistent reservations stay.
    pub async fn carry_out(self) {
        let lun = self.lun;
        let saved = lun.saved_mode();
        let reservations = lun.shared().reservations.clone();
        // If saving fails, the next save repeats it.
        let _ = lun.save(&reservations, saved, saved).await;
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
    /// Pending unit attentions, by bit, and the accesses that other initiators' reservations deny.
    state: AtomicU16,
    /// Changes of the unit that the nexus has started and that have not ended.
    changes: AtomicU32,
    /// How often other initiators have removed its registration.
    preemptions: AtomicU32,
}

/// Changes of the unit that one nexus has in progress, at most: each holds memory, and other initiators' changes wait for it.
pub(crate) const CHANGES_MAX: u32 = 16;

/// A change of the unit that a nexus has started: it counts against the limit until this is dropped.
pub(crate) struct ChangeGuard(Arc<Nexus>);

impl Drop for ChangeGuard {
    fn drop(&mut self) {
        self.0.changes.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A nexus' request for a change of the unit, which waits for its turn. The request is void once its command is aborted or its
/// nexus preempted.
pub(crate) struct ChangeRequest {
    /// Alive while the command waits.
    wanted: Weak<()>,
    /// The nexus' count of preemptions at the time of the request.
    preemptions: u32,
}

impl ChangeRequest {
    /// Creates the request of a command that waits as long as `wanted` is alive.
    pub fn new(nexus: &Nexus, wanted: Weak<()>) -> Self {
        Self { wanted, preemptions: nexus.preemptions.load(Ordering::Relaxed) }
    }

    /// Whether the change may take effect: the command was not aborted, and its nexus was not preempted.
    fn is_valid(&self, nexus: &Nexus) -> bool {
        self.wanted.strong_count() > 0 && self.preemptions == nexus.preemptions.load(Ordering::Relaxed)
    }
}

const DENIES_READS: u16 = 1 << 14;
const DENIES_CHANGES: u16 = 1 << 15;
const DENIES: u16 = DENIES_READS | DENIES_CHANGES;

impl Nexus {
    /// The nexus' number within the unit.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// The logical unit.
    pub const fn lun(&self) -> &Arc<Lun> {
        &self.lun
    }

    /// The unit's number in its target (LUN).
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

    /// Whether the disk can be written through this nexus.
    pub fn is_writable(&self) -> bool {
        self.disk.is_writable()
    }

    /// Whether the disk supports UNMAP.
    pub(crate) fn unmaps(&self) -> bool {
        self.is_writable() && self.bdev().device().ops().contains(Op::Unmap)
    }

    /// Counts a new change of the unit; `None` if the nexus has reached the limit.
    pub(crate) fn begin_change(self: &Arc<Self>) -> Option<ChangeGuard> {
        let more = |changes| (changes < CHANGES_MAX).then_some(changes + 1);
        let counted = self.changes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.is_ok().then(|| ChangeGuard(Arc::clone(self)))
    }

    pub(crate) fn open_disk(&self, root: RootId, cx: &mut Cx) -> Result<aryk_bdev::BdevChannel, OpenError> {
        self.disk.open_channel(root, cx)
    }

    /// Makes a unit attention pending: it answers the nexus' next command.
    pub fn raise(&self, what: Attention) {
        self.state.fetch_or(1 << what as u8, Ordering::Relaxed);
    }

    /// Whether no unit attention is pending, and reservations deny nothing.
    #[inline]
    pub(crate) fn is_clear(&self) -> bool {
        self.state.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn has_pending(&self) -> bool {
        self.state.load(Ordering::Relaxed) & !DENIES != 0
    }

    /// Whether reservations allow this access.
    pub(crate) fn may(&self, access: Access) -> bool {
        let denied = match access {
            Access::None => 0,
            Access::Read => DENIES_READS,
            Access::Change => DENIES_CHANGES,
        };
        self.state.load(Ordering::Relaxed) & denied == 0
    }

    /// Denies what these reservations forbid; returns the bits that are newly denied.
    fn deny(&self, reservations: &Reservations) -> u16 {
        let bit = |access, bit| if reservations.allows(self.number, access) { 0 } else { bit };
        let denied = bit(Access::Read, DENIES_READS) | bit(Access::Change, DENIES_CHANGES);
        let change = |state: u16| Some(state & !DENIES | denied);
        let before = self.state.fetch_update(Ordering::Release, Ordering::Relaxed, change);
        denied & !before.unwrap_or_else(|same| same)
    }

    /// Takes the most important pending attention, which is no longer pending afterwards.
    pub(crate) fn take_attention(&self) -> Option<Attention> {
        let is_taken = |what: &Attention| {
            let bit = 1 << *what as u8;
            self.state.fetch_and(!bit, Ordering::Relaxed) & bit != 0
        };
        Attention::ALL.into_iter().find(is_taken)
    }
}
