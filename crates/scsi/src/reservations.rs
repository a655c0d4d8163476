//! Persistent reservations of one logical unit (SPC-4, section 5.13). Any context, under the unit's lock; pure.

use crate::{Attention, Sense};

/// Reservation types, by the accesses that they allow (SPC-4, table 58).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    WriteExclusive = 1,
    ExclusiveAccess = 3,
    WriteExclusiveRegistrants = 5,
    ExclusiveAccessRegistrants = 6,
    WriteExclusiveAll = 7,
    ExclusiveAccessAll = 8,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrants,
        Self::ExclusiveAccessRegistrants,
        Self::WriteExclusiveAll,
        Self::ExclusiveAccessAll,
    ];

    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Whether all registered initiators hold the reservation.
    const fn is_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Whether registered initiators may write.
    const fn admits_registrants(self) -> bool {
        self as u8 >= Self::WriteExclusiveRegistrants as u8
    }

    /// Whether all initiators may read.
    const fn admits_reads(self) -> bool {
        matches!(self, Self::WriteExclusive | Self::WriteExclusiveRegistrants | Self::WriteExclusiveAll)
    }
}

/// The access of a command to the disk, for the check against reservations (SPC-4, table 60; SBC-3, table 13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// Nothing that a reservation restricts.
    None,
    Read,
    Change,
}

/// The reason why a change is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    Conflict,
    /// The reservation to release has another type.
    Release,
    /// A key of 0 where it has no meaning.
    Key,
    /// The table of registrations is full.
    Full,
    /// The initiator requested saved reservations, and they cannot be saved.
    NotSaved,
    /// Another opener writes to the disk without regard to reservations.
    ForeignWriter,
    /// MODE SELECT's parameter list does not fit the mode.
    List(Sense),
}

/// The change that PERSISTENT RESERVE OUT requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// REGISTER, or REGISTER AND IGNORE EXISTING KEY if `ignore`. `aptpl`: all registrations must outlive a loss of power
    /// (APTPL).
    Register {
        new: u64,
        ignore: bool,
        aptpl: bool,
    },
    Reserve(Kind),
    Release(Kind),
    Clear,
    /// `abort`: PREEMPT AND ABORT, which also aborts the preempted initiators' commands.
    Preempt {
        victim: u64,
        kind: Kind,
        abort: bool,
    },
    /// REGISTER AND MOVE to another nexus.
    Move {
        to: u32,
        new: u64,
        leave: bool,
        aptpl: bool,
    },
}

/// The other initiators that a change affects.
#[derive(Default, PartialEq, Eq, Debug)]
pub(crate) struct Effects {
    /// Unit attentions to raise, by nexus.
    pub attentions: Vec<(u32, Attention)>,
    /// Nexuses whose registrations were removed.
    pub removed: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Registration {
    pub nexus: u32,
    pub key: u64,
}

/// Registrations of one unit, at most.
const REGISTRATIONS_MAX: usize = 256;

/// The registrations and the reservation of a unit.
#[derive(Clone, Default, Debug)]
pub(crate) struct Reservations {
    generation: u32,
    list: Vec<Registration>,
    /// The nexus that made the reservation; of a type that all registered initiators hold, any registered nexus.
    holder: Option<(u32, Kind)>,
    /// The registrations outlive a loss of power.
    aptpl: bool,
}

impl Reservations {
    /// The saved state: registrations, and the holder of the reservation.
    pub fn restored(list: Vec<Registration>, holder: Option<(u32, Kind)>, aptpl: bool) -> Self {
        let mut restored = Self { generation: 0, list, holder, aptpl };
        restored.list.truncate(REGISTRATIONS_MAX);
        restored.update_holder();
        restored
    }

    pub const fn holder(&self) -> Option<(u32, Kind)> {
        self.holder
    }

    /// Whether registrations outlive a loss of power (APTPL), as the last registration requested.
    pub const fn aptpl(&self) -> bool {
        self.aptpl
    }

    /// Makes a change on behalf of a nexus that states this key.
    pub fn make(&mut self, nexus: u32, key: u64, change: Change) -> Result<Effects, Refused> {
        match change {
            Change::Register { new, ignore, aptpl } => {
                let was_registered = self.is_registered(nexus);
                let effects = self.register(nexus, key, new, ignore)?;
                // APTPL of an initiator that is neither registered before nor after has no effect.
                if was_registered || new != 0 {
                    self.aptpl = aptpl;
                }
                Ok(effects)
            }
            Change::Reserve(kind) => self.reserve(nexus, key, kind),
            Change::Release(kind) => self.release(nexus, key, kind),
            Change::Clear => self.clear(nexus, key),
            Change::Preempt { victim, kind, .. } => self.preempt(nexus, key, victim, kind),
            Change::Move { to, new, leave, aptpl } => {
                let effects = self.register_and_move(nexus, key, (to, new), leave)?;
                self.aptpl = aptpl;
                Ok(effects)
            }
        }
    }

    /// REGISTER AND MOVE: registers another nexus, which then holds the reservation.
    fn register_and_move(
        &mut self,
        nexus: u32,
        key: u64,
        (to, new): (u32, u64),
        leave: bool,
    ) -> Result<Effects, Refused> {
        self.own_key(nexus, key)?;
        let Some((_, kind)) = self.holder.filter(|(holder, kind)| *holder == nexus && !kind.is_all()) else {
            return Err(Refused::Conflict);
        };
        if new == 0 {
            return Err(Refused::Key);
        }
        match self.list.iter().position(|r| r.nexus == to) {
            Some(at) => self.list[at].key = new,
            None if self.list.len() == REGISTRATIONS_MAX => return Err(Refused::Full),
            None => self.list.push(Registration { nexus: to, key: new }),
        }
        self.holder = Some((to, kind));
        if leave {
            self.list.retain(|r| r.nexus != nexus);
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(Effects::default())
    }

    pub const fn generation(&self) -> u32 {
        self.generation
    }

    pub fn registrations(&self) -> &[Registration] {
        &self.list
    }

    /// The key and the type of the reservation, if one exists.
    pub fn reservation(&self) -> Option<(u64, Kind)> {
        let (nexus, kind) = self.holder?;
        Some((if kind.is_all() { 0 } else { self.key_of(nexus)? }, kind))
    }

    pub fn holds(&self, nexus: u32) -> bool {
        match self.holder {
            Some((_, kind)) if kind.is_all() => self.key_of(nexus).is_some(),
            Some((holder, _)) => holder == nexus,
            None => false,
        }
    }

    pub fn allows(&self, nexus: u32, access: Access) -> bool {
        let Some((_, kind)) = self.holder else { return true };
        access == Access::None
            || self.holds(nexus)
            || kind.admits_registrants() && self.key_of(nexus).is_some()
            || access == Access::Read && kind.admits_reads()
    }

    /// REGISTER, or REGISTER AND IGNORE EXISTING KEY if `ignore`.
    pub fn register(&mut self, nexus: u32, key: u64, new: u64, ignore: bool) -> Result<Effects, Refused> {
        let own = self.key_of(nexus);
        if !ignore && own.unwrap_or(0) != key {
            return Err(Refused::Conflict);
        }
        let mut effects = Effects::default();
        match (own, new) {
            (None, 0) => return Ok(effects),
            (Some(_), 0) => {
                let others_told = matches!(self.holder, Some((holder, kind))
                    if holder == nexus && kind.admits_registrants() && !kind.is_all());
                self.list.retain(|r| r.nexus != nexus);
                self.update_holder();
                if others_told {
                    self.raise_for_others(nexus, Attention::ReservationsReleased, &mut effects);
                }
            }
            (None, _) if self.list.len() == REGISTRATIONS_MAX => return Err(Refused::Full),
            (None, _) => self.list.push(Registration { nexus, key: new }),
            (Some(_), _) => {
                self.list.iter_mut().filter(|r| r.nexus == nexus).for_each(|r| r.key = new);
            }
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    pub fn reserve(&mut self, nexus: u32, key: u64, kind: Kind) -> Result<Effects, Refused> {
        self.own_key(nexus, key)?;
        match self.holder {
            None => self.holder = Some((nexus, kind)),
            Some((_, held)) if self.holds(nexus) && held == kind => {}
            Some(_) => return Err(Refused::Conflict),
        }
        Ok(Effects::default())
    }

    pub fn release(&mut self, nexus: u32, key: u64, kind: Kind) -> Result<Effects, Refused> {
        self.own_key(nexus, key)?;
        let mut effects = Effects::default();
        let Some((_, held)) = self.holder.filter(|_| self.holds(nexus)) else { return Ok(effects) };
        if held != kind {
            return Err(Refused::Release);
        }
        self.holder = None;
        if kind.admits_registrants() {
            self.raise_for_others(nexus, Attention::ReservationsReleased, &mut effects);
        }
        Ok(effects)
    }

    pub fn clear(&mut self, nexus: u32, key: u64) -> Result<Effects, Refused> {
        self.own_key(nexus, key)?;
        let mut effects = Effects::default();
        self.raise_for_others(nexus, Attention::ReservationsPreempted, &mut effects);
        self.list.clear();
        self.holder = None;
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// PREEMPT, and the part of PREEMPT AND ABORT that does not abort commands.
    pub fn preempt(&mut self, nexus: u32, key: u64, victim: u64, kind: Kind) -> Result<Effects, Refused> {
        self.own_key(nexus, key)?;
        let takes_over = match self.holder {
            Some((_, held)) if held.is_all() => victim == 0,
            Some((holder, _)) => self.key_of(holder) == Some(victim),
            None => false,
        };
        if victim == 0 && !takes_over {
            return Err(Refused::Key);
        }
        let goes = |r: &Registration| {
            let is_victim = victim == 0 || r.key == victim;
            is_victim && !(takes_over && r.nexus == nexus)
        };
        let gone: Vec<_> = self.list.iter().filter(|r| goes(r)).map(|r| r.nexus).collect();
        if gone.is_empty() && !takes_over {
            return Err(Refused::Conflict);
        }
        let mut effects = Effects::default();
        self.list.retain(|r| !goes(r));
        let others = |n: &&u32| **n != nexus;
        effects
            .attentions
            .extend(gone.iter().filter(others).map(|n| (*n, Attention::RegistrationsPreempted)));
        effects.removed = gone;
        if takes_over {
            let before = self.holder.replace((nexus, kind)).map(|(_, kind)| kind);
            if before.is_some_and(|b| b != kind && b.admits_registrants()) {
                self.raise_for_others(nexus, Attention::ReservationsReleased, &mut effects);
            }
        } else {
            self.update_holder();
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    pub fn is_registered(&self, nexus: u32) -> bool {
        self.key_of(nexus).is_some()
    }

    fn key_of(&self, nexus: u32) -> Option<u64> {
        self.list.iter().find(|r| r.nexus == nexus).map(|r| r.key)
    }

    fn own_key(&self, nexus: u32, key: u64) -> Result<(), Refused> {
        if self.key_of(nexus) == Some(key) { Ok(()) } else { Err(Refused::Conflict) }
    }

    /// Called after registrations were removed: the reservation ends with its holder's registration, unless all registered
    /// initiators hold it.
    fn update_holder(&mut self) {
        let Some((holder, kind)) = self.holder else { return };
        if self.key_of(holder).is_none() {
            let heir = self.list.first().filter(|_| kind.is_all());
            self.holder = heir.map(|r| (r.nexus, kind));
        }
    }

    fn raise_for_others(&self, nexus: u32, what: Attention, effects: &mut Effects) {
        let others = self.list.iter().filter(|r| r.nexus != nexus);
        effects.attentions.extend(others.map(|r| (r.nexus, what)));
    }
}

#[cfg(test)]
mod tests;
