//! Reservations of a namespace: which hosts are registered, and which of them may do what. NVMe 2.0 §7.2 to §7.5 and §8.19. Any
//! context; pure.
//!
//! A host is known by its 128-bit identifier, through whichever controller it comes. Registrants are bounded, and a host can add
//! no other than itself.

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;

/// HOSTID of Connect.
pub type HostId = [u8; 16];

/// Registrants of a namespace, at most.
pub const REGISTRANTS_MAX: usize = 256;
/// Bytes of the data of the commands that change something.
pub const DATA_LEN: usize = 16;
/// Bytes of the data of Release, of which some hosts send [`DATA_LEN`].
pub const RELEASE_LEN: usize = 8;

/// CDW10 of all commands that change something: the action, and IEKEY.
const ACTION: u32 = 7;
const IGNORE_KEY: u32 = 1 << 3;
/// CDW11 of Report: the extended data structure (EDS).
const EXTENDED: u32 = 1;
/// The controller of a registrant in the dynamic controller model.
const ANY_CONTROLLER: u16 = 0xffff;
/// Bytes of Report's extended data structure before the registrants, and of each registrant.
const REPORT_HEADER_LEN: usize = 64;
const REGISTRANT_LEN: usize = 64;

/// RTYPE, by the accesses that it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The holder writes, all hosts read.
    WriteExclusive = 1,
    /// The holder reads and writes.
    ExclusiveAccess = 2,
    /// Registrants write, all hosts read.
    WriteExclusiveRegistrants = 3,
    /// Registrants read and write.
    ExclusiveAccessRegistrants = 4,
    /// As [`Kind::WriteExclusiveRegistrants`]; each registrant is a holder.
    WriteExclusiveAll = 5,
    /// As [`Kind::ExclusiveAccessRegistrants`]; each registrant is a holder.
    ExclusiveAccessAll = 6,
}

impl Kind {
    /// All types.
    pub const ALL: [Self; 6] = [
        Self::WriteExclusive,
        Self::ExclusiveAccess,
        Self::WriteExclusiveRegistrants,
        Self::ExclusiveAccessRegistrants,
        Self::WriteExclusiveAll,
        Self::ExclusiveAccessAll,
    ];

    /// The type with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Whether each registrant is a holder.
    const fn is_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Whether registrants may write.
    const fn admits_registrants(self) -> bool {
        self as u8 >= Self::WriteExclusiveRegistrants as u8
    }

    /// Whether all hosts may read.
    const fn admits_reads(self) -> bool {
        matches!(self, Self::WriteExclusive | Self::WriteExclusiveRegistrants | Self::WriteExclusiveAll)
    }
}

/// What a host may do with a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rights {
    /// Everything.
    #[default]
    All,
    /// Read and Compare.
    Read,
    /// Neither read nor write.
    None,
}

/// How Register changes the registration of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Register with this key.
    Register(u64),
    /// Unregister.
    Unregister,
    /// Replace the key by this one.
    Replace(u64),
}

/// A command that changes registrations or the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reservation Register.
    Register {
        /// The action.
        action: Action,
        /// CRKEY; `None`: it is not checked (IEKEY).
        key: Option<u64>,
        /// CPTPL: whether registrations and the reservation persist through a loss of power from now on. `None`: as before.
        persists: Option<bool>,
    },
    /// Reservation Acquire: acquire.
    Acquire {
        /// CRKEY.
        key: u64,
        /// The type.
        kind: Kind,
    },
    /// Reservation Acquire: preempt, or preempt and abort.
    Preempt {
        /// CRKEY.
        key: u64,
        /// PRKEY.
        victim: u64,
        /// The type.
        kind: Kind,
        /// The commands of the preempted hosts are aborted.
        aborts: bool,
    },
    /// Reservation Release: release.
    Release {
        /// CRKEY.
        key: u64,
        /// The type.
        kind: Kind,
    },
    /// Reservation Release: clear.
    Clear {
        /// CRKEY.
        key: u64,
    },
}

impl Command {
    /// Decodes a command with its data, of which Release has the first half only.
    ///
    /// # Errors
    /// Invalid Field; Invalid Opcode for other commands.
    pub fn decode(entry: &SubmissionEntry, data: &[u8; DATA_LEN]) -> Result<Self, Code> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| data[at + byte]));
        let (first, second) = (word(0), word(8));
        let (action, ignores_key) = (entry.cdw(10) & ACTION, entry.cdw(10) & IGNORE_KEY != 0);
        let kind = || Kind::from_code((entry.cdw(10) >> 8) as u8).ok_or(Code::INVALID_FIELD);
        match (entry.opcode(), action) {
            (io::RESERVATION_REGISTER, _) => Ok(Self::Register {
                action: match action {
                    0 => Action::Register(second),
                    1 => Action::Unregister,
                    2 => Action::Replace(second),
                    _ => return Err(Code::INVALID_FIELD),
                },
                key: (!ignores_key).then_some(first),
                persists: match entry.cdw(10) >> 30 {
                    0 => None,
                    2 => Some(false),
                    3 => Some(true),
                    _ => return Err(Code::INVALID_FIELD),
                },
            }),
            // Only Register may ignore the key.
            (io::RESERVATION_ACQUIRE | io::RESERVATION_RELEASE, _) if ignores_key => Err(Code::INVALID_FIELD),
            (io::RESERVATION_ACQUIRE, 0) => Ok(Self::Acquire { key: first, kind: kind()? }),
            (io::RESERVATION_ACQUIRE, 1 | 2) => {
                Ok(Self::Preempt { key: first, victim: second, kind: kind()?, aborts: action == 2 })
            }
            (io::RESERVATION_RELEASE, 0) => Ok(Self::Release { key: first, kind: kind()? }),
            (io::RESERVATION_RELEASE, 1) => Ok(Self::Clear { key: first }),
            (io::RESERVATION_ACQUIRE | io::RESERVATION_RELEASE, _) => Err(Code::INVALID_FIELD),
            _ => Err(Code::INVALID_OPCODE),
        }
    }

    /// Whether the command aborts those of the hosts that it preempts.
    pub const fn aborts(&self) -> bool {
        matches!(self, Self::Preempt { aborts: true, .. })
    }
}

/// The bytes that Report returns to a host that has room for `len`.
///
/// # Errors
/// The host has too little room, or does not ask for identifiers of 128 bits.
pub fn report_len(entry: &SubmissionEntry, len: u32) -> Result<u32, Code> {
    let wanted = (u64::from(entry.cdw(10)) + 1) * 4;
    if entry.cdw(11) & EXTENDED == 0 {
        return Err(Code::HOST_ID_INCONSISTENT);
    }
    if wanted <= len.into() { Ok(wanted as u32) } else { Err(Code::SGL_DATA_LENGTH_INVALID) }
}

/// What a host learns by a Reservation Notification. NVMe 2.0 §5.16.1.24.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Notice {
    /// Another host has preempted its registration.
    RegistrationPreempted = 1,
    /// Another host has released the reservation, of whose rights the host had a part.
    ReservationReleased = 2,
    /// Another host has cleared the reservation and the registrations.
    ReservationPreempted = 3,
}

/// What a change means for other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// The hosts to notify.
    pub notices: Vec<(HostId, Notice)>,
    /// The hosts whose registrations were preempted.
    pub preempted: Vec<HostId>,
}

/// A host that is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// The host.
    pub host: HostId,
    /// The key of its registration.
    pub key: u64,
}

/// The part that outlives the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The registrants, at most [`REGISTRANTS_MAX`].
    pub registrants: Vec<Registrant>,
    /// The host that has made the reservation, and its type. Of a type whose holders are all registrants, any of them.
    pub holder: Option<(HostId, Kind)>,
    /// PTPL: both persist through a loss of power.
    pub persists: bool,
}

impl State {
    fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrants.iter().find(|of| of.host == *host).map(|of| of.key)
    }

    /// Whether a host holds the reservation.
    pub fn is_holder(&self, host: &HostId) -> bool {
        match &self.holder {
            Some((_, kind)) if kind.is_all() => self.key_of(host).is_some(),
            Some((holder, _)) => holder == host,
            None => false,
        }
    }
}

/// The registrations and the reservation of a namespace.
#[derive(Clone, Debug, Default)]
pub struct Reservations {
    state: State,
    generation: u32,
}

impl Reservations {
    /// Those that were stored, as far as they are consistent: at most as many registrants as there may be, each once and with a
    /// key that Register cannot refuse, and a holder that is one of them.
    pub fn restored(stored: State) -> Self {
        let mut this = Self { state: State { registrants: Vec::new(), ..stored }, generation: 0 };
        for registrant in stored.registrants {
            if registrant.key != 0 && this.key_of(&registrant.host).is_none() && !this.is_full() {
                this.state.registrants.push(registrant);
            }
        }
        this.update_holder();
        this
    }

    /// The state to store.
    pub const fn state(&self) -> &State {
        &self.state
    }

    /// What a host may do.
    pub fn rights(&self, host: &HostId) -> Rights {
        let Some((holder, kind)) = &self.state.holder else { return Rights::All };
        let is_registrant = self.key_of(host).is_some();
        if is_registrant && (holder == host || kind.admits_registrants()) {
            Rights::All
        } else if kind.admits_reads() {
            Rights::Read
        } else {
            Rights::None
        }
    }

    /// Sets whether registrations persist.
    pub const fn set_persists(&mut self, persists: bool) {
        self.state.persists = persists;
    }

    /// Executes a command of a host. Nothing has changed after an error.
    ///
    /// # Errors
    /// The status with which the command fails.
    pub fn execute(&mut self, host: HostId, command: Command) -> Result<Effects, Code> {
        match command {
            Command::Register { action, key, persists } => {
                let effects = self.register(host, action, key)?;
                self.state.persists = persists.unwrap_or(self.state.persists);
                Ok(effects)
            }
            Command::Acquire { key, kind } => self.acquire(host, key, kind),
            Command::Preempt { key, victim, kind, .. } => self.preempt(host, key, victim, kind),
            Command::Release { key, kind } => self.release(host, key, kind),
            Command::Clear { key } => self.clear(host, key),
        }
    }

    fn register(&mut self, host: HostId, action: Action, key: Option<u64>) -> Result<Effects, Code> {
        let own = self.key_of(&host);
        let is_key = key.is_none() || key == own;
        let mut effects = Effects::default();
        match (action, own) {
            (Action::Register(0) | Action::Replace(0), _) => return Err(Code::INVALID_FIELD),
            (Action::Register(new), Some(own)) if new != own => return Err(Code::RESERVATION_CONFLICT),
            (Action::Register(_), Some(_)) => {}
            (Action::Register(new), None) => self.add(host, new)?,
            // A host that ignores its key may have none.
            (Action::Replace(new), None) if key.is_none() => self.add(host, new)?,
            (Action::Replace(new), Some(_)) if is_key => {
                let all = self.state.registrants.iter_mut();
                all.filter(|of| of.host == host).for_each(|of| of.key = new);
            }
            (Action::Unregister, Some(_)) if is_key => {
                let releases = matches!(self.state.holder, Some((holder, kind))
                    if holder == host && kind.admits_registrants() && !kind.is_all());
                self.state.registrants.retain(|of| of.host != host);
                self.update_holder();
                if releases {
                    self.notify_others(&host, Notice::ReservationReleased, &mut effects);
                }
            }
            (Action::Replace(_) | Action::Unregister, _) => return Err(Code::RESERVATION_CONFLICT),
        }
        self.count();
        Ok(effects)
    }

    fn add(&mut self, host: HostId, key: u64) -> Result<(), Code> {
        if self.is_full() {
            return Err(Code::INTERNAL_ERROR);
        }
        self.state.registrants.push(Registrant { host, key });
        Ok(())
    }

    fn acquire(&mut self, host: HostId, key: u64, kind: Kind) -> Result<Effects, Code> {
        self.check_key(&host, key)?;
        match self.state.holder {
            None => self.state.holder = Some((host, kind)),
            Some((_, held)) if held == kind && self.state.is_holder(&host) => {}
            Some(_) => return Err(Code::RESERVATION_CONFLICT),
        }
        Ok(Effects::default())
    }

    fn preempt(&mut self, host: HostId, key: u64, victim: u64, kind: Kind) -> Result<Effects, Code> {
        self.check_key(&host, key)?;
        let takes_over = match &self.state.holder {
            Some((_, held)) if held.is_all() => victim == 0,
            Some((holder, _)) => self.key_of(holder) == Some(victim),
            None => false,
        };
        if victim == 0 && !takes_over {
            return Err(Code::INVALID_FIELD);
        }
        // A host that takes over stays registered, also if it is its own victim.
        let goes = |of: &Registrant| (victim == 0 || of.key == victim) && !(takes_over && of.host == host);
        let gone: Vec<HostId> =
            self.state.registrants.iter().filter(|of| goes(of)).map(|of| of.host).collect();
        if gone.is_empty() && !takes_over {
            return Err(Code::RESERVATION_CONFLICT);
        }
        self.state.registrants.retain(|of| !goes(of));
        let others = gone.iter().filter(|gone| **gone != host);
        let notices = others.map(|gone| (*gone, Notice::RegistrationPreempted)).collect();
        let mut effects = Effects { notices, preempted: gone };
        if takes_over {
            let before = self.state.holder.replace((host, kind));
            if before.is_some_and(|(_, before)| before != kind && before.admits_registrants()) {
                self.notify_others(&host, Notice::ReservationReleased, &mut effects);
            }
        } else {
            self.update_holder();
        }
        self.count();
        Ok(effects)
    }

    fn release(&mut self, host: HostId, key: u64, kind: Kind) -> Result<Effects, Code> {
        self.check_key(&host, key)?;
        let mut effects = Effects::default();
        let held = self.state.holder.filter(|_| self.state.is_holder(&host));
        // A registrant that holds nothing has nothing to release, which is no error.
        let Some((_, held)) = held else { return Ok(effects) };
        if held != kind {
            return Err(Code::INVALID_FIELD);
        }
        self.state.holder = None;
        if kind.admits_registrants() {
            self.notify_others(&host, Notice::ReservationReleased, &mut effects);
        }
        Ok(effects)
    }

    fn clear(&mut self, host: HostId, key: u64) -> Result<Effects, Code> {
        self.check_key(&host, key)?;
        let mut effects = Effects::default();
        self.notify_others(&host, Notice::ReservationPreempted, &mut effects);
        self.state.registrants.clear();
        self.state.holder = None;
        self.count();
        Ok(effects)
    }

    /// Encodes Report's extended data structure, `len` bytes of it; beyond its end there are zeroes.
    pub fn report(&self, len: u32) -> Vec<u8> {
        let State { registrants, holder, persists } = &self.state;
        let mut page = vec![0; REPORT_HEADER_LEN];
        page[..4].copy_from_slice(&self.generation.to_le_bytes());
        page[4] = holder.map_or(0, |(_, kind)| kind as u8);
        page[5..7].copy_from_slice(&(registrants.len() as u16).to_le_bytes());
        page[9] = (*persists).into();
        for Registrant { host, key } in registrants {
            let start = page.len();
            page.extend(ANY_CONTROLLER.to_le_bytes());
            page.push(self.state.is_holder(host).into());
            page.resize(start + 8, 0);
            page.extend(key.to_le_bytes());
            page.extend(host);
            page.resize(start + REGISTRANT_LEN, 0);
        }
        page.resize(len as usize, 0);
        page
    }

    fn is_full(&self) -> bool {
        self.state.registrants.len() >= REGISTRANTS_MAX
    }

    fn key_of(&self, host: &HostId) -> Option<u64> {
        self.state.key_of(host)
    }

    fn check_key(&self, host: &HostId, key: u64) -> Result<(), Code> {
        if self.key_of(host) == Some(key) { Ok(()) } else { Err(Code::RESERVATION_CONFLICT) }
    }

    /// After registrations have ended: the reservation ends with the registration of its holder, unless another holds it, too.
    fn update_holder(&mut self) {
        let Some((holder, kind)) = self.state.holder else { return };
        if self.key_of(&holder).is_none() {
            let heir = self.state.registrants.first().filter(|_| kind.is_all());
            self.state.holder = heir.map(|of| (of.host, kind));
        }
    }

    fn notify_others(&self, host: &HostId, notice: Notice, effects: &mut Effects) {
        let others = self.state.registrants.iter().filter(|of| of.host != *host);
        effects.notices.extend(others.map(|of| (of.host, notice)));
    }

    const fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests;
