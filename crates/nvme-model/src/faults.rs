//! Faults that a test injects into commands, registers and data. Context: the holder of
//! the controller.
//!
//! Two sources: [`Rule`]s for chosen commands, which are tried first, and [`Random`] faults by probability, from the
//! seed. Without either, a command pays one branch.

use crate::config::Nanos;
use crate::wire::{Status, SubmissionEntry};

/// Commands to which a [`Rule`] applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queue {
    /// All queues.
    #[default]
    Any,
    /// The admin queue.
    Admin,
    /// All I/O queues.
    Io,
    /// The queue with this identifier.
    Id(u16),
}

/// The fault of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The controller does not execute the command, and completes it with this status. The test chooses DNR, CRD and More.
    /// The host sees the CRD only after it enabled retry delays (Host Behavior Support).
    Fail(Status),
    /// The controller executes the command this much later than otherwise.
    Delay(Nanos),
    /// The controller executes the command after this time, unless a reset is over before, and never completes it.
    Lose {
        /// Beyond the ordinary time of the command.
        after: Nanos,
    },
    /// The controller holds the command until a reset, and neither executes nor completes it.
    Stick {
        /// Whether an Abort command can end it.
        is_abortable: bool,
    },
    /// The controller executes the command and posts a wrong completion queue entry.
    Distort(Distortion),
    /// The controller does not execute the command, and sets CSTS.CFS.
    FailController,
    /// The controller does not execute the command, and the device is removed.
    PullOut,
}

/// How a completion queue entry is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distortion {
    /// The command identifier is a random other one.
    Cid,
    /// The entry is posted twice.
    Doubled,
    /// The Phase Tag is inverted: the host does not see the entry, nor those that follow.
    Phase,
    /// The SQ Head Pointer is outside of the queue.
    SqHead,
    /// The SQ Identifier is a random other one.
    Sqid,
    /// All bytes but the Phase Tag are random.
    Random,
}

/// Injects a fault into chosen commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Queues.
    pub queue: Queue,
    /// Opcode; `None` is any.
    pub opcode: Option<u8>,
    /// Namespace; `None` is any.
    pub nsid: Option<u32>,
    /// Matching commands before the first with a fault.
    pub skip: u64,
    /// Commands with a fault.
    pub times: u64,
    /// The fault.
    pub action: Action,
}

impl Rule {
    /// Injects `action` into the next command of a queue with an opcode.
    pub const fn once(queue: Queue, opcode: u8, action: Action) -> Self {
        Self { queue, opcode: Some(opcode), nsid: None, skip: 0, times: 1, action }
    }

    fn matches(&self, sqid: u16, entry: &SubmissionEntry) -> bool {
        let is_queue = match self.queue {
            Queue::Any => true,
            Queue::Admin => sqid == 0,
            Queue::Io => sqid != 0,
            Queue::Id(qid) => sqid == qid,
        };
        is_queue
            && self.opcode.is_none_or(|opcode| opcode == entry.opcode)
            && self.nsid.is_none_or(|nsid| nsid == entry.nsid.get())
    }
}

/// Probabilities of faults, in 1/65,536 of the I/O commands; each command has at most one fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Random {
    /// An error status that may be retried, with a random CRD and More.
    pub retryable: u16,
    /// A media error: Write Fault or Unrecovered Read Error.
    pub media: u16,
    /// A status with random SCT, SC, CRD, More and DNR.
    pub any_status: u16,
    /// [`Action::Delay`] by up to `delay_max`.
    pub delay: u16,
    /// Largest random delay.
    pub delay_max: Nanos,
    /// [`Action::Lose`].
    pub lose: u16,
    /// [`Action::Stick`], half of them abortable.
    pub stick: u16,
    /// [`Action::Distort`], of a random kind.
    pub distort: u16,
    /// [`Action::FailController`].
    pub fail_controller: u16,
}

/// A change of data that the controller returns.
#[derive(Clone, Debug)]
pub struct Patch {
    /// The CNS of an Identify command.
    pub cns: u8,
    /// First byte.
    pub offset: usize,
    /// New bytes.
    pub bytes: Vec<u8>,
}

/// Which data is hostile: every field random or extreme.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hostile {
    /// Identify data.
    pub identify: bool,
    /// Log pages.
    pub logs: bool,
    /// Results of Set Features and Get Features.
    pub features: bool,
    /// Registers.
    pub registers: bool,
    /// Asynchronous events: each request is answered at once.
    pub events: bool,
}

/// The fault that a fetched command carries until it is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Normal,
    Fail(Status),
    Lose,
    Stick { is_abortable: bool },
    Distort(Distortion),
}

/// The faults of a controller.
#[derive(Debug)]
pub struct Faults {
    rules: Vec<Rule>,
    random: Random,
    rng: fastrand::Rng,
    registers: Vec<(u64, u32)>,
    patches: Vec<Patch>,
    /// Which data is hostile.
    pub hostile: Hostile,
    /// CSTS.RDY is never set after CC.EN.
    pub never_ready: bool,
    /// CSTS.RDY is never cleared after CC.EN = 0.
    pub never_disabled: bool,
    /// CSTS.CFS is set again by each reset.
    pub is_fatal_forever: bool,
    is_active: bool,
}

impl Faults {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            rules: Vec::new(),
            random: Random::default(),
            // Other numbers than those of the controller's delays.
            rng: fastrand::Rng::with_seed(seed ^ 0x5eed_fa17),
            registers: Vec::new(),
            patches: Vec::new(),
            hostile: Hostile::default(),
            never_ready: false,
            never_disabled: false,
            is_fatal_forever: false,
            is_active: false,
        }
    }

    /// Adds a rule. The first rule that matches a command and is not used up decides.
    pub fn add(&mut self, rule: Rule) {
        self.rules.push(rule);
        self.is_active = true;
    }

    /// Sets the probabilities of random faults.
    pub fn set_random(&mut self, random: Random) {
        self.random = random;
        self.is_active = true;
    }

    /// Overrides 32 bits of the properties: reads return `value`.
    pub fn set_register(&mut self, offset: u64, value: u32) {
        self.registers.retain(|(at, _)| *at != offset);
        self.registers.push((offset, value));
    }

    /// Changes identify data.
    pub fn patch_identify(&mut self, patch: Patch) {
        self.patches.push(patch);
    }

    /// Ends all faults but those that commands in flight already have.
    pub fn clear(&mut self) {
        let rng = self.rng.clone();
        *self = Self { rng, ..Self::new(0) };
    }

    /// The value of an overridden or hostile register.
    pub(crate) fn register(&mut self, offset: u64) -> Option<u32> {
        if let Some((_, value)) = self.registers.iter().find(|(at, _)| *at == offset) {
            return Some(*value);
        }
        self.hostile.registers.then(|| extreme(&mut self.rng) as u32)
    }

    /// Applies patches and hostile fields to identify data.
    pub(crate) fn change_identify(&mut self, cns: u8, data: &mut [u8]) {
        if self.hostile.identify {
            scramble(&mut self.rng, data);
        }
        for patch in self.patches.iter().filter(|patch| patch.cns == cns) {
            for (byte, new) in data.iter_mut().skip(patch.offset).zip(&patch.bytes) {
                *byte = *new;
            }
        }
    }

    /// Applies hostile fields to a log page.
    pub(crate) fn change_log(&mut self, data: &mut [u8]) {
        if self.hostile.logs {
            scramble(&mut self.rng, data);
        }
    }

    /// A hostile result of a feature command.
    pub(crate) fn change_feature(&mut self, result: u32) -> u32 {
        if self.hostile.features { extreme(&mut self.rng) as u32 } else { result }
    }

    /// A hostile answer to an Asynchronous Event Request.
    pub(crate) fn event(&mut self) -> Option<u32> {
        self.hostile.events.then(|| extreme(&mut self.rng) as u32)
    }

    /// Whether a command may get a fault.
    pub(crate) const fn is_active(&self) -> bool {
        self.is_active
    }

    /// Chooses the fault of a command.
    pub(crate) fn choose(&mut self, sqid: u16, entry: &SubmissionEntry) -> Option<Action> {
        if !self.is_active {
            return None;
        }
        for rule in &mut self.rules {
            if rule.times == 0 || !rule.matches(sqid, entry) {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            rule.times -= 1;
            return Some(rule.action);
        }
        if sqid == 0 { None } else { self.choose_random(entry) }
    }

    fn choose_random(&mut self, entry: &SubmissionEntry) -> Option<Action> {
        let random = self.random;
        let mut dice = u32::from(self.rng.u16(..));
        let mut hits = |probability: u16| {
            let hit = dice < u32::from(probability);
            dice = dice.saturating_sub(u32::from(probability));
            hit
        };
        if hits(random.retryable) {
            // Internal Error, Command Interrupted, Namespace Not Ready: statuses that a retry may mend.
            let sc = [0x06, 0x21, 0x82][self.rng.usize(..3)];
            let status = Status::new(0, sc).retryable(self.rng.u8(..4));
            return Some(Action::Fail(if self.rng.bool() { status.with_more() } else { status }));
        }
        if hits(random.media) {
            let is_write = entry.opcode & 3 == 1;
            return Some(Action::Fail(Status::new(2, if is_write { 0x80 } else { 0x81 })));
        }
        if hits(random.any_status) {
            return Some(Action::Fail(Status(self.rng.u16(1..0x8000))));
        }
        if hits(random.delay) {
            return Some(Action::Delay(self.rng.u64(..=random.delay_max)));
        }
        if hits(random.lose) {
            return Some(Action::Lose { after: self.rng.u64(..=random.delay_max) });
        }
        if hits(random.stick) {
            return Some(Action::Stick { is_abortable: self.rng.bool() });
        }
        if hits(random.distort) {
            use Distortion::{Cid, Doubled, Phase, SqHead, Sqid};
            let kinds = [Cid, Doubled, Phase, SqHead, Sqid, Distortion::Random];
            return Some(Action::Distort(kinds[self.rng.usize(..kinds.len())]));
        }
        hits(random.fail_controller).then_some(Action::FailController)
    }
}

/// A random or extreme value.
fn extreme(rng: &mut fastrand::Rng) -> u64 {
    match rng.u8(..8) {
        0 => 0,
        1 => u64::MAX,
        2 => 1,
        3 => 1 << rng.u8(..64),
        4 => (1 << rng.u8(..64)) - 1,
        5 => u64::MAX - rng.u64(..16),
        _ => rng.u64(..),
    }
}

/// Overwrites data with random and extreme fields of 1 to 8 bytes; a few fields keep their value.
fn scramble(rng: &mut fastrand::Rng, data: &mut [u8]) {
    let mut at = 0;
    while at < data.len() {
        let len = (1 << rng.usize(..4)).min(data.len() - at);
        if rng.u8(..8) != 0 {
            data[at..at + len].copy_from_slice(&extreme(rng).to_le_bytes()[..len]);
        }
        at += len;
    }
}
