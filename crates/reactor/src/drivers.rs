//! The drivers of a reactor: the channels that share them, and the list of those that are reaped. Reactor context.
//!
//! A turn's cost grows with the number of active drivers, not with that of parked drivers. A parked driver is armed. It has no
//! requests in flight, unless it was parked because the reactor was about to sleep: then its descriptor reports its completions,
//! and it is counted among the drivers with requests in flight.

use crate::account::Running;
use crate::handle::lock;
use crate::kernel::{WatchId, Watcher};
use crate::{Armed, Cx, Driver, Local, Nanos, Runs};
use aryk_slots::{Key, Slots};
use std::any::Any;
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most completions of one driver in a turn.
const DRIVER_COMPLETIONS: u32 = 128;
/// The most completions of all drivers in a turn; a driver without completions counts as one completion. The drivers that were
/// not reaped come first in the next turn.
const TURN_COMPLETIONS: u32 = 512;

/// Identifies a device or a connection. It has one driver on each reactor where it has channels, under the same key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DriverKey(u64);

impl DriverKey {
    /// A key that is unique in the process.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Identifies a driver on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DriverId(Key);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// In the list of drivers that are reaped each turn.
    Active,
    /// Armed, and in no list.
    Parked { has_requests: bool },
}

struct Entry<D: ?Sized> {
    id: DriverId,
    state: Cell<State>,
    /// Number of [`DriverRef`]s of the driver.
    refs: Cell<u32>,
    /// When the driver was last activated or had completions.
    last_work: Cell<Nanos>,
    /// Number of reaps without a completion since then.
    idle_reaps: Cell<u32>,
    /// All reaps, and those with completions.
    runs: Cell<Runs>,
    driver: RefCell<D>,
}

impl<D: ?Sized> Entry<D> {
    fn has_worked(&self, now: Nanos) {
        self.last_work.set(now);
        self.idle_reaps.set(0);
    }
}

struct Place {
    key: DriverKey,
    watches: Vec<WatchId>,
    /// `None` while the driver is being made.
    made: Option<Made>,
}

/// A driver as a trait object, and the same driver as `Any`, to downcast it to its type.
struct Made {
    entry: Rc<Entry<dyn Driver>>,
    any: Rc<dyn Any>,
}

pub(crate) struct Drivers {
    places: Slots<Place>,
    by_key: HashMap<DriverKey, DriverId>,
    active: VecDeque<Rc<Entry<dyn Driver>>>,
    /// Number of parked drivers with requests in flight.
    parked_with_requests: u32,
}

impl Default for Drivers {
    fn default() -> Self {
        Self {
            places: Slots::new(0),
            by_key: HashMap::new(),
            active: VecDeque::new(),
            parked_with_requests: 0,
        }
    }
}

impl Drivers {
    /// Whether the reactor has no driver.
    pub const fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether all drivers are parked.
    pub fn are_parked(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether any driver has requests in flight. The time of this check grows with the number of active drivers without
    /// requests.
    #[inline]
    pub fn has_requests(&self) -> bool {
        let has_requests = |entry: &Rc<Entry<dyn Driver>>| entry.driver.borrow().in_flight() > 0;
        self.parked_with_requests > 0 || !self.active.is_empty() && self.active.iter().any(has_requests)
    }

    /// Removes a watch that has ended before its driver from the driver's list.
    pub fn forget_watch(&mut self, driver: DriverId, watch: WatchId) {
        if let Some(place) = self.places.get_mut(driver.0) {
            place.watches.retain(|&w| w != watch);
        }
    }

    /// Checks what holds between two turns. Called in debug builds.
    pub fn check_invariants(&self) {
        let made = |(_, place): (Key, &Place)| place.made.as_ref().map(|made| made.entry.state.get());
        let states = || self.places.iter().filter_map(made);
        assert_eq!(states().count(), self.places.len() as usize, "a driver is made within one turn");
        let active = states().filter(|&state| state == State::Active).count();
        assert_eq!(active, self.active.len(), "an active driver is reaped once in each turn");
        assert!(
            self.active.iter().all(|entry| entry.state.get() == State::Active),
            "a parked driver is reaped"
        );
        let waited_for = State::Parked { has_requests: true };
        let parked = states().filter(|&state| state == waited_for).count();
        assert_eq!(parked, self.parked_with_requests as usize, "parked drivers with requests in flight");
        let is_found = |(key, place): (Key, &Place)| self.by_key.get(&place.key) == Some(&DriverId(key));
        assert_eq!(self.by_key.len(), states().count(), "each driver has one key");
        assert!(self.places.iter().all(is_found), "a driver is not found by its key");
    }

    fn find<T: Driver>(&self, key: DriverKey) -> Option<Rc<Entry<T>>> {
        let place = self.places.get(self.by_key.get(&key)?.0).expect("keys are taken out with their drivers");
        let made = place.made.as_ref().expect("a driver is not asked for while it is being made");
        Some(Rc::downcast(Rc::clone(&made.any)).expect("a key names drivers of one type"))
    }

    fn activate(&mut self, entry: Rc<Entry<dyn Driver>>, now: Nanos) {
        entry.has_worked(now);
        if let State::Parked { has_requests } = entry.state.replace(State::Active) {
            self.parked_with_requests = self.parked_with_requests.strict_sub(has_requests.into());
            self.active.push_back(entry);
        }
    }
}

/// The statistics of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverStats {
    /// Its number, unique among the reactor's drivers, roots and pollers.
    pub id: u64,
    /// Its name, as in the watchdog's reports.
    pub name: String,
    /// Whether the driver is parked: it is not reaped until it is woken.
    pub is_parked: bool,
    /// All reaps, and those with completions.
    pub runs: Runs,
}

/// A channel's share of a driver. The driver is removed when the last share is dropped, after all its requests have completed.
pub struct DriverRef<T: Driver> {
    entry: Rc<Entry<T>>,
    local: Local,
}

impl<T: Driver> DriverRef<T> {
    fn new(entry: Rc<Entry<T>>, local: Local) -> Self {
        entry.refs.update(|refs| refs + 1);
        Self { entry, local }
    }

    /// The driver's id on its reactor.
    pub fn id(&self) -> DriverId {
        self.entry.id
    }

    /// Borrows the driver to submit requests to it: the reactor flushes it at the end of this turn, and reaps it in each turn
    /// until it is idle.
    ///
    /// # Panics
    /// As [`DriverRef::borrow_mut`].
    #[inline]
    pub fn activate(&self, cx: &mut Cx) -> RefMut<'_, T> {
        if self.entry.state.get() != State::Active {
            cx.drivers.activate(Rc::<Entry<T>>::clone(&self.entry), cx.now);
        }
        self.entry.driver.borrow_mut()
    }

    /// Borrows the driver, to read its state or to take a channel's completions.
    ///
    /// # Panics
    /// If the driver itself is running.
    pub fn borrow_mut(&self) -> RefMut<'_, T> {
        self.entry.driver.borrow_mut()
    }

    /// As [`DriverRef::borrow_mut`], for reading only.
    ///
    /// # Panics
    /// As [`DriverRef::borrow_mut`].
    pub fn borrow(&self) -> Ref<'_, T> {
        self.entry.driver.borrow()
    }
}

impl<T: Driver> Clone for DriverRef<T> {
    fn clone(&self) -> Self {
        Self::new(Rc::clone(&self.entry), self.local.clone())
    }
}

impl<T: Driver> fmt::Debug for DriverRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.entry.id)
    }
}

impl<T: Driver> Drop for DriverRef<T> {
    fn drop(&mut self) {
        self.entry.refs.update(|refs| refs - 1);
        if self.entry.refs.get() == 0 {
            let id = self.entry.id;
            self.local.defer(move |cx| cx.remove_unused_driver(id));
        }
    }
}

impl Cx {
    /// Returns the driver of `key` on this reactor. If there is none, `make` builds it from the id that it will have.
    ///
    /// # Errors
    /// Those of `make`; then there is no driver, and its watches have ended.
    ///
    /// # Panics
    /// If the driver of `key` has another type, or if `make` itself asks for the driver of `key`.
    pub fn driver<T: Driver, E>(
        &mut self,
        key: DriverKey,
        make: impl FnOnce(DriverId, &mut Self) -> Result<T, E>,
    ) -> Result<DriverRef<T>, E> {
        if let Some(found) = self.drivers.find(key) {
            return Ok(DriverRef::new(found, self.local().clone()));
        }
        let place = Place { key, watches: Vec::new(), made: None };
        let id = DriverId(self.drivers.places.add(place));
        self.drivers.by_key.insert(key, id);
        let made = make(id, self);
        let driver = made.inspect_err(|_| self.remove_driver(id))?;
        lock(&self.handle.0.names).insert(Running::driver(id.0.index()), format!("driver {}", driver.name()));
        let entry = Rc::new(Entry {
            id,
            state: Cell::new(State::Parked { has_requests: false }),
            refs: Cell::new(0),
            last_work: Cell::new(self.now),
            idle_reaps: Cell::new(0),
            runs: Cell::default(),
            driver: RefCell::new(driver),
        });
        let place = self.drivers.places.get_mut(id.0).expect("just inserted");
        place.made = Some(Made { entry: entry.clone(), any: entry.clone() });
        // The new driver is not armed yet.
        self.drivers.activate(entry.clone(), self.now);
        Ok(DriverRef::new(entry, self.local().clone()))
    }

    /// Reaps `driver` in the turn in which `fd` (an eventfd, an interrupt, a socket) becomes readable. The watch does not read
    /// the descriptor, and ends with the driver.
    ///
    /// # Errors
    /// The kernel's.
    ///
    /// # Panics
    /// If the driver is not on this reactor.
    pub fn watch_driver(&mut self, fd: OwnedFd, driver: DriverId) -> io::Result<WatchId> {
        let place = self.drivers.places.get_mut(driver.0).expect("a driver of this reactor");
        let watch = self.kernel.borrow_mut().watch(fd, Watcher::Driver(driver))?;
        place.watches.push(watch);
        Ok(watch)
    }

    /// Activates a driver: the reactor reaps it in this turn or the next, and then in each turn until it is idle. A driver that
    /// no longer exists is ignored.
    pub fn wake_driver(&mut self, driver: DriverId) {
        if let Some(made) = self.drivers.places.get(driver.0).and_then(|place| place.made.as_ref()) {
            self.drivers.activate(Rc::clone(&made.entry), self.now);
        }
    }

    /// The statistics of this reactor's drivers: the kernel driver, then those of devices.
    pub fn driver_stats(&self) -> Vec<DriverStats> {
        let kernel = DriverStats {
            id: Running::KERNEL.number(),
            name: self.kernel.borrow().name(),
            is_parked: false,
            runs: Runs { all: self.turn(), busy: self.kernel_busy_reaps },
        };
        let of_device = |(key, place): (Key, &Place)| {
            let Made { entry, .. } = place.made.as_ref()?;
            Some(DriverStats {
                id: Running::driver(key.index()).number(),
                name: entry.driver.borrow().name(),
                is_parked: entry.state.get() != State::Active,
                runs: entry.runs.get(),
            })
        };
        std::iter::once(kernel).chain(self.drivers.places.iter().filter_map(of_device)).collect()
    }

    /// Removes a driver if it has no shares: another channel may have taken one since the last was dropped.
    fn remove_unused_driver(&mut self, id: DriverId) {
        let made = self.drivers.places.get(id.0).and_then(|place| place.made.as_ref());
        if let Some(Made { entry, .. }) = made
            && entry.refs.get() == 0
        {
            let in_flight = entry.driver.borrow().in_flight();
            assert_eq!(in_flight, 0, "a channel drops its driver after its requests have completed");
            self.remove_driver(id);
        }
    }

    fn remove_driver(&mut self, id: DriverId) {
        let place = self.drivers.places.remove(id.0).expect("a driver of this reactor");
        self.drivers.by_key.remove(&place.key);
        for watch in place.watches {
            drop(self.kernel.borrow_mut().unwatch(watch));
        }
        let Some(Made { entry, .. }) = place.made else { return };
        lock(&self.handle.0.names).remove(&Running::driver(id.0.index()));
        match entry.state.get() {
            State::Active => self.drivers.active.retain(|active| active.id != id),
            State::Parked { has_requests } => {
                let parked = &mut self.drivers.parked_with_requests;
                *parked = parked.strict_sub(has_requests.into());
            }
        }
    }

    /// Reaps the active drivers, and parks those that have been idle for long. Returns whether there were completions.
    #[inline]
    pub(crate) fn reap_drivers(&mut self) -> bool {
        !self.drivers.active.is_empty() && self.reap_active_drivers()
    }

    fn reap_active_drivers(&mut self) -> bool {
        let (mut worked, mut budget) = (false, TURN_COMPLETIONS);
        for _ in 0..self.drivers.active.len() {
            if budget == 0 {
                break;
            }
            let Some(entry) = self.drivers.active.pop_front() else { break };
            self.handle.0.account.run(Running::driver(entry.id.0.index()));
            let mut driver = entry.driver.borrow_mut();
            let count = driver.reap(budget.min(DRIVER_COMPLETIONS), self);
            let in_flight = driver.in_flight();
            drop(driver);
            budget = budget.saturating_sub(count.max(1));
            let is_idle = count == 0 && in_flight == 0;
            entry.runs.update(|runs| runs.counted(count > 0));
            if count > 0 {
                worked = true;
                entry.has_worked(self.now);
            } else {
                entry.idle_reaps.update(|n| n.saturating_add(1));
            }
            let is_to_park = is_idle
                && self.policy.is_to_park(self.now.since(entry.last_work.get()), entry.idle_reaps.get());
            if !(is_to_park && self.park_driver(&entry)) {
                self.drivers.active.push_back(entry);
            }
        }
        worked
    }

    /// Arms a driver that is in no list, and parks it. Returns false if the driver has work.
    fn park_driver(&mut self, entry: &Entry<dyn Driver>) -> bool {
        self.handle.0.account.run(Running::driver(entry.id.0.index()));
        let mut driver = entry.driver.borrow_mut();
        driver.flush(self);
        if driver.arm(self) == Armed::Busy {
            return false;
        }
        let has_requests = driver.in_flight() > 0;
        self.drivers.parked_with_requests += u32::from(has_requests);
        entry.state.set(State::Parked { has_requests });
        true
    }

    /// Parks all drivers, before the reactor sleeps. Returns false if one of them has work.
    pub(crate) fn park_drivers(&mut self) -> bool {
        for _ in 0..self.drivers.active.len() {
            let Some(entry) = self.drivers.active.pop_front() else { break };
            if !self.park_driver(&entry) {
                self.drivers.active.push_back(entry);
                return false;
            }
        }
        true
    }

    /// Flushes the active drivers.
    #[inline]
    pub(crate) fn flush_drivers(&mut self) {
        if !self.drivers.active.is_empty() {
            self.flush_active_drivers();
        }
    }

    #[inline(never)]
    fn flush_active_drivers(&mut self) {
        let mut next = 0;
        // A driver may submit to another driver, which is then added to the list.
        while let Some(entry) = self.drivers.active.get(next).cloned() {
            self.handle.0.account.run(Running::driver(entry.id.0.index()));
            entry.driver.borrow_mut().flush(self);
            next += 1;
        }
    }
}
