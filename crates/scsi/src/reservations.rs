//! Persistent reservations of one logical unit (SPC-4, section 5.13). Any context, under the unit's lock; pure.

use crate::{Attention, Sense};

/// Who may do what (SPC-4, table 58).
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

    /// Whether all that are registered hold it.
    const fn is_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Whether those that are registered may write.
    const fn admits_registrants(self) -> bool {
        self as u8 >= Self::WriteExclusiveRegistrants as u8
    }

    /// Whether everyone may read.
    const fn admits_reads(self) -> bool {
        matches!(self, Self::WriteExclusive | Self::WriteExclusiveRegistrants | Self::WriteExclusiveAll)
    }
}

/// What a command does, as reservations see it (SPC-4, table 60; SBC-3, table 13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// Nothing that could be reserved.
    None,
    Read,
    Change,
}

/// Why a change is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    Conflict,
    /// The reservation to release is of another kind.
    Release,
    /// A key of 0 where that means nothing.
    Key,
    /// There is no room for another registration.
    Full,
    /// They cannot be kept, which they are to be.
    NotKept,
    /// Someone writes to the disk who knows nothing of reservations.
    Unheeded,
    /// MODE SELECT's parameter list does not fit the mode.
    List(Sense),
}

/// What PERSISTENT RESERVE OUT asks for, by someone with this key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// Or, if `ignore`, REGISTER AND IGNORE EXISTING KEY. `keep`: all is to outlive a loss of power.
    Register {
        new: u64,
        ignore: bool,
        keep: bool,
    },
    Reserve(Kind),
    Release(Kind),
    Clear,
    /// `abort`: and have what they have begun aborted.
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
        keep: bool,
    },
}

/// Whom a change concerns besides the one that makes it.
#[derive(Default, PartialEq, Eq, Debug)]
pub(crate) struct Effects {
    /// Who is to be told what.
    pub attentions: Vec<(u32, Attention)>,
    /// Whose registrations are gone.
    pub removed: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Registration {
    pub nexus: u32,
    pub key: u64,
}

/// Registrations of one unit.
const REGISTRATIONS_MAX: usize = 256;

/// The state.
#[derive(Clone, Default, Debug)]
pub(crate) struct Reservations {
    generation: u32,
    list: Vec<Registration>,
    /// Who made it; of a kind that all hold, someone who is registered.
    holder: Option<(u32, Kind)>,
    /// They outlive a loss of power.
    keep: bool,
}

impl Reservations {
    /// As they were kept: registrations, and who of them has made a reservation.
    pub fn restored(list: Vec<Registration>, holder: Option<(u32, Kind)>, keep: bool) -> Self {
        let mut restored = Self { generation: 0, list, holder, keep };
        restored.list.truncate(REGISTRATIONS_MAX);
        restored.mend_holder();
        restored
    }

    pub const fn holder(&self) -> Option<(u32, Kind)> {
        self.holder
    }

    /// Whether they outlive a loss of power (APTPL), as the last registration asked.
    pub const fn keeps(&self) -> bool {
        self.keep
    }

    /// Makes a change on behalf of a nexus that says to have this key.
    pub fn make(&mut self, nexus: u32, key: u64, change: Change) -> Result<Effects, Refused> {
        match change {
            Change::Register { new, ignore, keep } => {
                let was_registered = self.is_registered(nexus);
                let effects = self.register(nexus, key, new, ignore)?;
                // Who is not registered, and will not be, has no say in it.
                if was_registered || new != 0 {
                    self.keep = keep;
                }
                Ok(effects)
            }
            Change::Reserve(kind) => self.reserve(nexus, key, kind),
            Change::Release(kind) => self.release(nexus, key, kind),
            Change::Clear => self.clear(nexus, key),
            Change::Preempt { victim, kind, .. } => self.preempt(nexus, key, victim, kind),
            Change::Move { to, new, leave, keep } => {
                let effects = self.pass_on(nexus, key, (to, new), leave)?;
                self.keep = keep;
                Ok(effects)
            }
        }
    }

    /// REGISTER AND MOVE: another is registered, and holds the reservation.
    fn pass_on(
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

    /// The key and the kind of the reservation, if there is one.
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

    /// REGISTER, or, if `ignore`, REGISTER AND IGNORE EXISTING KEY.
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
                self.mend_holder();
                if others_told {
                    self.tell_others(nexus, Attention::ReservationsReleased, &mut effects);
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
            self.tell_others(nexus, Attention::ReservationsReleased, &mut effects);
        }
        Ok(effects)
    }

    pub fn clear(&mut self, nexus: u32, key: u64) -> Result<Effects, Refused> {
        self.own_key(nexus, key)?;
        let mut effects = Effects::default();
        self.tell_others(nexus, Attention::ReservationsPreempted, &mut effects);
        self.list.clear();
        self.holder = None;
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// PREEMPT, and what of PREEMPT AND ABORT is not aborting.
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
        let told = |n: &&u32| **n != nexus;
        effects.attentions.extend(gone.iter().filter(told).map(|n| (*n, Attention::RegistrationsPreempted)));
        effects.removed = gone;
        if takes_over {
            let before = self.holder.replace((nexus, kind)).map(|(_, kind)| kind);
            if before.is_some_and(|b| b != kind && b.admits_registrants()) {
                self.tell_others(nexus, Attention::ReservationsReleased, &mut effects);
            }
        } else {
            self.mend_holder();
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

    /// Registrations have gone: with that of its holder goes the reservation, unless others hold it too.
    fn mend_holder(&mut self) {
        let Some((holder, kind)) = self.holder else { return };
        if self.key_of(holder).is_none() {
            let heir = self.list.first().filter(|_| kind.is_all());
            self.holder = heir.map(|r| (r.nexus, kind));
        }
    }

    fn tell_others(&self, nexus: u32, what: Attention, effects: &mut Effects) {
        let others = self.list.iter().filter(|r| r.nexus != nexus);
        effects.attentions.extend(others.map(|r| (r.nexus, what)));
    }
}

#[cfg(test)]
mod tests;
