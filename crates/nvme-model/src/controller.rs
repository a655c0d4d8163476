//! Registers, enable, disable, shutdown, reset and power of the controller, and the order of work in a step. Context:
//! the holder of the controller.
//!
//! [`Controller`] is a pure state machine: it takes register accesses, the values of doorbells and the time, and accesses
//! the host through [`Bus`]. The same configuration, seed and calls give the same behaviour.
//!
//! **Bounds.** A step fetches at most [`Config::commands_per_step`] commands and executes at most as many that it holds;
//! fewer if they are large. A reset executes at most the [`Config::in_flight`] commands that are due before its end.
//!
//! The rest of the controller is in the modules below: `fetch` (doorbells, arbitration, execution, completions), `admin`
//! and the modules that it dispatches to, and `io`.

mod admin;
mod events;
mod features;
mod fetch;
mod firmware;
mod identify;
mod io;
mod logs;
mod management;
mod queues;

use crate::bus::{Bus, Violation, Violations};
use crate::config::{Config, NamespaceConfig, Nanos, Timing};
use crate::faults::Faults;
use crate::in_flight::InFlight;
use crate::namespace::Namespace;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::registers::{
    ACQ, AQA, ASQ, CAP, CC, CFS, CRTO, CSTS, Cc, INTMC, INTMS, NSSR, RDY, SHST, SHST_COMPLETE,
    SHST_OCCURRING, VS, cap,
};
use crate::transfer::Transfer;
use crate::wire::{Status, SubmissionEntry};
use aryk_pci::Registers;
use std::collections::BTreeMap;

pub(crate) use events::EventKind;
pub use firmware::FIRMWARE_MAGIC;
pub use logs::Health;

/// A time that never comes.
pub(crate) const NEVER: Nanos = Nanos::MAX;

/// What the controller does about CC.EN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// CC.EN = 0 and CSTS.RDY = 0.
    Disabled,
    /// CC.EN = 1; CSTS.RDY is set at this time.
    Enabling(Nanos),
    /// CSTS.RDY = 1.
    Ready,
    /// CC.EN = 0; CSTS.RDY is cleared at this time.
    Disabling(Nanos),
    /// The device was removed, or has no power: reads return all ones.
    Gone,
}

/// What the controller has done since it was built.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Commands fetched from the admin queue.
    pub admin_commands: u64,
    /// Commands fetched from I/O queues.
    pub io_commands: u64,
    /// Completion queue entries posted.
    pub completions: u64,
    /// Completions with a status other than success.
    pub failures: u64,
    /// Changed values of mapped doorbells that the controller saw.
    pub doorbells: u64,
    /// Changed values of shadow doorbells that the controller saw.
    pub shadow_doorbells: u64,
    /// Faults injected.
    pub faults: u64,
    /// Controller resets by CC.EN.
    pub resets: u64,
    /// Bytes read and written by I/O commands.
    pub bytes: u64,
}

/// A model NVMe controller.
#[derive(Debug)]
pub struct Controller {
    config: Config,
    rng: fastrand::Rng,
    now: Nanos,
    pub(crate) bus: Bus,
    /// BAR 0, of which only the doorbells are used.
    bar: Registers,
    life: Life,
    cc: Cc,
    csts: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    /// When a shutdown that was requested by CC.SHN completes.
    shutdown_at: Nanos,
    /// By queue identifier; the admin queue is 0.
    sqs: Vec<Option<SubmissionQueue>>,
    cqs: Vec<Option<CompletionQueue>>,
    /// Identifiers of the I/O submission queues, in the order of their creation.
    io_sqs: Vec<u16>,
    /// Index in `io_sqs` of the queue that is fetched from first in the next turn.
    next_sq: usize,
    /// IOVAs of the shadow doorbells and of the event indices, once the host set them.
    shadow: Option<(u64, u64)>,
    in_flight: InFlight,
    transfer: Transfer,
    /// Entries that were fetched together.
    batch: Box<[SubmissionEntry; fetch::BATCH]>,
    /// Memory for a command's data where it is not moved to or from a namespace directly.
    scratch: Vec<u8>,
    namespaces: BTreeMap<u32, Namespace>,
    features: features::Features,
    events: events::Events,
    logs: logs::Logs,
    firmware: firmware::Firmware,
    faults: Faults,
    counts: Counts,
    /// When the keep-alive timer expires.
    keep_alive_at: Nanos,
    /// When the blocks of all commands so far are deallocated and zeroed.
    emptied_at: Nanos,
    /// What the turn may still do, in commands of up to 64 blocks; 0 means that work may be left over.
    budget: u64,
}

impl Controller {
    /// A disabled controller. `bar` is memory for BAR 0, at least up to [`Controller::doorbells_end`]; `table` is its
    /// MSI-X table.
    pub(crate) fn new(config: Config, bar: Registers, table: Registers) -> Self {
        let data = config.data;
        let namespaces = config
            .namespaces
            .iter()
            .map(|(nsid, namespace)| (*nsid, Namespace::new(namespace.clone(), data)))
            .collect();
        let queues = usize::from(config.io_queues) + 1;
        let mut controller = Self {
            rng: fastrand::Rng::with_seed(config.seed),
            now: 0,
            bus: Bus::new(config.vectors, table),
            bar,
            life: Life::Disabled,
            cc: Cc(0),
            csts: 0,
            aqa: 0,
            asq: 0,
            acq: 0,
            shutdown_at: NEVER,
            sqs: (0..queues).map(|_| None).collect(),
            cqs: (0..queues).map(|_| None).collect(),
            io_sqs: Vec::new(),
            next_sq: 0,
            shadow: None,
            in_flight: InFlight::new(config.in_flight.max(1)),
            transfer: Transfer::default(),
            batch: Box::new([SubmissionEntry::default(); fetch::BATCH]),
            scratch: Vec::new(),
            namespaces,
            features: features::Features::new(&config),
            events: events::Events::default(),
            logs: logs::Logs::default(),
            firmware: firmware::Firmware::new(&config),
            faults: Faults::new(config.seed),
            counts: Counts::default(),
            keep_alive_at: NEVER,
            emptied_at: 0,
            budget: 1,
            config,
        };
        controller.scratch = vec![0; controller.transfer_max() as usize];
        controller
    }

    /// Offset in BAR 0 of the first page after the doorbells of all queues.
    pub(crate) fn doorbells_end(config: &Config) -> u64 {
        let doorbells = (2 * (u64::from(config.io_queues) + 1)) << (2 + (config.dstrd & 0xf));
        (crate::registers::DOORBELLS + doorbells).next_multiple_of(aryk_dma::PAGE)
    }

    /// Does everything that is due at `now`, and returns the time of the next event: `now` if work is left over, `u64::MAX`
    /// if only the host can cause more. Time never goes back: an earlier `now` counts as the latest one.
    pub fn step(&mut self, now: Nanos) -> Nanos {
        self.check_unused_doorbells();
        self.turn(now);
        self.bus.unpin();
        self.next_event()
    }

    /// As [`Controller::step`], for a loop that polls: without the checks that are rarely needed. Memory that was accessed
    /// stays mapped until the next step.
    pub(crate) fn turn(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        if self.is_gone() {
            return;
        }
        self.budget = u64::from(self.config.commands_per_step.max(1));
        self.change_life();
        if self.is_serving() {
            self.expire_keep_alive();
            self.poll_doorbells();
            self.fetch_all();
        }
        self.execute_due();
        self.run_sanitize();
        if self.life == Life::Ready {
            self.deliver_events();
        }
        self.bus.signal_pending();
    }

    /// Whether the device was removed.
    pub fn is_gone(&self) -> bool {
        self.life == Life::Gone
    }

    /// Whether the controller fetches and completes commands.
    fn is_serving(&self) -> bool {
        self.life == Life::Ready && self.csts & CFS == 0
    }

    /// A number that changes whenever the controller does something for its host.
    pub(crate) const fn activity(&self) -> u64 {
        self.counts.admin_commands + self.counts.io_commands + self.counts.completions + self.counts.doorbells
    }

    fn next_event(&self) -> Nanos {
        if self.is_gone() {
            return NEVER;
        }
        if self.budget == 0 {
            return self.now;
        }
        let life = match self.life {
            Life::Enabling(at) | Life::Disabling(at) => at,
            Life::Disabled | Life::Ready | Life::Gone => NEVER,
        };
        let keep_alive = if self.is_serving() { self.keep_alive_at } else { NEVER };
        life.min(self.in_flight.next_due())
            .min(self.shutdown_at)
            .min(keep_alive)
            .min(self.logs.sanitize_ends())
    }

    fn change_life(&mut self) {
        match self.life {
            Life::Enabling(at) if at <= self.now => self.become_ready(),
            Life::Disabling(at) if at <= self.now => {
                // Commands that were due before the end of the reset still move their data, without the bound of a step.
                self.budget = u64::MAX;
                self.execute_due();
                self.finish_reset();
                if self.cc.is_enabled() {
                    self.start_enabling();
                }
            }
            _ => {}
        }
        if self.shutdown_at <= self.now {
            self.shutdown_at = NEVER;
            self.namespaces.values_mut().for_each(Namespace::flush);
            self.csts = self.csts & !SHST | SHST_COMPLETE;
        }
    }

    fn start_enabling(&mut self) {
        if self.faults.never_ready {
            self.life = Life::Enabling(NEVER);
            return;
        }
        self.life = Life::Enabling(self.now.saturating_add(self.config.timing.enable));
    }

    /// Creates the admin queues and sets CSTS.RDY; a configuration that the controller does not support is fatal.
    fn become_ready(&mut self) {
        let page = self.cc.page();
        let (sq_entries, cq_entries) = ((self.aqa & 0xfff) + 1, (self.aqa >> 16 & 0xfff) + 1);
        let mps = u32::from(self.config.mpsmin)..=u32::from(self.config.mpsmax);
        let is_supported = mps.contains(&self.cc.mps())
            && self.cc.ams() == 0
            && (self.config.css >> self.cc.css() & 1 == 1)
            && sq_entries >= 2
            && cq_entries >= 2
            && self.asq.is_multiple_of(page)
            && self.acq.is_multiple_of(page);
        if !is_supported {
            self.life = Life::Enabling(NEVER);
            self.set_fatal();
            return;
        }
        self.sqs[0] = Some(SubmissionQueue::new(self.asq, sq_entries, 0));
        let mut cq = CompletionQueue::new(self.acq, cq_entries, Some(0));
        cq.users = 1;
        self.cqs[0] = Some(cq);
        self.clear_doorbells(0);
        self.life = Life::Ready;
        self.csts |= RDY;
        self.restart_keep_alive();
    }

    /// Ends a reset: everything is as after power-on, but for the contents of namespaces and saved features
    /// (NVMe 2.0 §3.7.2).
    fn finish_reset(&mut self) {
        self.life = Life::Disabled;
        self.csts = 0;
        self.shutdown_at = NEVER;
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.io_sqs.clear();
        self.next_sq = 0;
        self.shadow = None;
        self.in_flight.clear();
        self.features.reset();
        self.events.reset();
        self.firmware.activate_at_reset();
        self.keep_alive_at = NEVER;
        self.bus.clear_pending();
        for qid in 0..=self.config.io_queues {
            self.clear_doorbells(qid);
        }
        if self.faults.is_fatal_forever {
            self.set_fatal();
        }
    }

    pub(crate) fn set_fatal(&mut self) {
        self.csts |= CFS;
    }

    /// Function-level reset: as a controller reset, at once, and of CC and the admin queue's registers too.
    pub(crate) fn function_reset(&mut self) {
        if self.is_gone() {
            return;
        }
        self.finish_reset();
        self.bus.unmask_vectors();
        self.cc = Cc(0);
        (self.aqa, self.asq, self.acq) = (0, 0, 0);
    }

    /// Reads 32 bits of the properties.
    pub(crate) fn read32(&mut self, offset: u64) -> u32 {
        if self.is_gone() {
            return u32::MAX;
        }
        if let Some(value) = self.faults.register(offset) {
            return value;
        }
        // A change whose time has come is visible without a step between.
        self.change_life();
        let high = offset & 4 != 0;
        let half = |value: u64| if high { (value >> 32) as u32 } else { value as u32 };
        match offset {
            _ if offset & !4 == CAP => half(cap(&self.config)),
            VS => self.config.vs,
            INTMS | INTMC => {
                self.register_violation(offset, "INTMS and INTMC are not accessed with MSI-X");
                0
            }
            CC => self.cc.0,
            CSTS => self.csts,
            NSSR => 0,
            AQA => self.aqa,
            _ if offset & !4 == ASQ => half(self.asq),
            _ if offset & !4 == ACQ => half(self.acq),
            CRTO => u32::from(self.config.to),
            _ => 0,
        }
    }

    /// Writes 32 bits of the properties.
    pub(crate) fn write32(&mut self, offset: u64, value: u32) {
        if self.is_gone() {
            return;
        }
        self.change_life();
        let high = offset & 4 != 0;
        let join = |old: u64| {
            if high {
                old & 0xffff_ffff | u64::from(value) << 32
            } else {
                old & !0xffff_ffff | u64::from(value)
            }
        };
        let is_queue = offset == AQA || offset & !4 == ASQ || offset & !4 == ACQ;
        if is_queue && self.cc.is_enabled() {
            self.register_violation(offset, "the admin queue's registers change only while CC.EN is 0");
            return;
        }
        match offset {
            CC => self.write_cc(Cc(value)),
            AQA => self.aqa = value & 0x0fff_0fff,
            _ if offset & !4 == ASQ => self.asq = join(self.asq) & !0xfff,
            _ if offset & !4 == ACQ => self.acq = join(self.acq) & !0xfff,
            INTMS | INTMC => {
                self.register_violation(offset, "INTMS and INTMC are not accessed with MSI-X");
            }
            CSTS | NSSR => {}
            _ => self.register_violation(offset, "the register is read-only or reserved"),
        }
    }

    fn register_violation(&mut self, offset: u64, reason: &'static str) {
        self.bus.violations.add(Violation::Register { offset, reason });
    }

    fn write_cc(&mut self, new: Cc) {
        let old = std::mem::replace(&mut self.cc, new);
        match (old.is_enabled(), new.is_enabled()) {
            (false, true) if self.life == Life::Disabled => self.start_enabling(),
            (false, true) => {
                self.register_violation(CC, "CC.EN was set before CSTS.RDY was 0");
            }
            // CSTS.RDY is 0 already: the host need not wait.
            (true, false) if self.csts & RDY == 0 && !self.faults.never_disabled => {
                self.counts.resets += 1;
                self.finish_reset();
            }
            (true, false) => {
                self.counts.resets += 1;
                self.life = Life::Disabling(self.now.saturating_add(self.config.timing.disable));
                if self.faults.never_disabled {
                    self.life = Life::Disabling(NEVER);
                }
            }
            // The host may set the entry sizes until it creates I/O queues, and request a shutdown.
            (true, true) if (old.0 ^ new.0) & !(0xff << 16 | 3 << 14) != 0 => {
                self.register_violation(CC, "CC changed while CC.EN is 1");
            }
            _ => {}
        }
        if new.is_enabled() && new.shn() != 0 && old.shn() == 0 {
            self.csts = self.csts & !SHST | SHST_OCCURRING;
            self.shutdown_at = self.now.saturating_add(self.config.timing.shutdown);
        }
    }
}

/// For tests: events of the device, and what the device has seen.
impl Controller {
    /// What the controller has done.
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Errors of the host. A test of a driver asserts that there are none.
    pub const fn violations(&self) -> &Violations {
        &self.bus.violations
    }

    /// DMA mappings of the host.
    pub const fn mappings(&self) -> usize {
        self.bus.mapping_count()
    }

    /// Interrupts signalled on a vector.
    pub fn interrupts(&self, vector: u16) -> u64 {
        self.bus.signals(vector)
    }

    /// I/O submission queues that exist.
    pub const fn io_queues(&self) -> usize {
        self.io_sqs.len()
    }

    /// Commands that were fetched and not completed, without asynchronous event requests.
    pub const fn held_commands(&self) -> usize {
        self.in_flight.len()
    }

    /// Faults to inject.
    pub const fn faults(&mut self) -> &mut Faults {
        &mut self.faults
    }

    /// Delays, for commands that are fetched from now on.
    pub const fn timing(&mut self) -> &mut Timing {
        &mut self.config.timing
    }

    /// The time of the last step.
    pub const fn now(&self) -> Nanos {
        self.now
    }

    /// Sets CSTS.CFS, if CC.EN is set: the controller fetches no more commands. It still executes those that it holds,
    /// without completions, until it is reset.
    pub fn fail_fatally(&mut self) {
        if self.cc.is_enabled() {
            self.set_fatal();
        }
    }

    /// Removes the device, also while it executes commands: register reads return all ones, and DMA is over. The device
    /// keeps its data for [`Controller::plug_in`], except what its volatile write cache loses.
    pub fn pull_out(&mut self) {
        self.lose_power();
        self.life = Life::Gone;
    }

    /// Brings a removed device back, as after power-on.
    pub fn plug_in(&mut self) {
        if self.is_gone() {
            self.life = Life::Disabled;
            self.finish_reset();
        }
    }

    /// Power fails and comes back: a random part of what was written and not flushed is lost; of the commands in flight, a
    /// random part has happened.
    pub fn fail_power(&mut self) {
        self.lose_power();
    }

    fn lose_power(&mut self) {
        self.execute_some();
        self.bus.unpin();
        for namespace in self.namespaces.values_mut() {
            namespace.lose_cache(&mut self.rng);
        }
        self.finish_reset();
        self.cc = Cc(0);
        (self.aqa, self.asq, self.acq) = (0, 0, 0);
    }

    /// The data of blocks of a namespace, as a read would return it; `None` if there are no such blocks or no data is kept.
    pub fn data(&self, nsid: u32, lba: u64, blocks: u64) -> Option<&[u8]> {
        let namespace = self.namespaces.get(&nsid)?;
        (namespace.contains(lba, blocks) && namespace.keeps_data()).then(|| namespace.read(lba, blocks))
    }

    /// Makes blocks unreadable: reads fail with Unrecovered Read Error until they are written.
    pub fn damage(&mut self, nsid: u32, lba: u64, blocks: u64) {
        if let Some(namespace) = self.namespaces.get_mut(&nsid).filter(|n| n.contains(lba, blocks)) {
            namespace.mark_unreadable(lba, blocks);
        }
    }

    /// Adds a namespace, or replaces one, and reports the change.
    pub fn add_namespace(&mut self, nsid: u32, config: NamespaceConfig) {
        self.namespaces.insert(nsid, Namespace::new(config, self.config.data));
        self.namespace_changed(nsid);
    }

    /// Removes a namespace with its data, and reports the change.
    pub fn remove_namespace(&mut self, nsid: u32) {
        if self.namespaces.remove(&nsid).is_some() {
            self.namespace_changed(nsid);
        }
    }

    /// Attaches or detaches a namespace, which keeps its data, and reports the change.
    pub fn attach_namespace(&mut self, nsid: u32, is_attached: bool) {
        if let Some(namespace) = self.namespaces.get_mut(&nsid) {
            namespace.config.attached = is_attached;
            self.namespace_changed(nsid);
        }
    }

    /// Locks or unlocks all blocks of a drive that encrypts itself.
    pub fn set_locked(&mut self, is_locked: bool) {
        self.config.locking = self.config.locking.map(|_| is_locked);
    }

    /// Lets a namespace grow or shrink, and reports the change.
    pub fn resize_namespace(&mut self, nsid: u32, blocks: u64) {
        if let Some(namespace) = self.namespaces.get_mut(&nsid) {
            namespace.resize(blocks);
            self.namespace_changed(nsid);
        }
    }
}
