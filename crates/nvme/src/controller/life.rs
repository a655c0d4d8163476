//! How a controller gets from one state to the next. NVMe 2.0 §3.5 (initialization), §3.6 (shutdown), §3.7 (resets).

use aryk_pci::{PciError, Width};

use super::{Controller, End, Event, Failure, RecoveryStep, ResetReason, SECOND, Stage, map_doorbells};
use crate::queue::DmaEnded;
use crate::spec::register::{ACQ, AQA, ASQ, CRTO, Cc, Csts, Shutdown, TIMEOUT_UNIT_MS};

/// A millisecond, in nanoseconds.
const MS: u64 = SECOND / 1000;
/// A controller that fails again within this time after a reset has made no progress.
const STABLE: u64 = 10 * SECOND;
/// Time between two reads of CSTS while the controller pauses, at most.
const PAUSE_WATCH: u64 = SECOND / 20;
/// The least time for a normal shutdown, also if RTD3E is shorter.
const SHUTDOWN_MIN: u64 = 10 * SECOND;

/// Where a controller is in its life. All times are absolute.
#[derive(Debug)]
pub(super) enum Life {
    /// The owners of the queue pairs stop them, until then at the latest.
    Quiescing { until: u64, then: Then },
    /// CC.EN is 0; CSTS.RDY becomes 0.
    Disabling { until: u64, read_from: u64 },
    /// CC.EN is 1; CSTS.RDY becomes 1.
    Enabling { until: u64 },
    /// The commands of the start run.
    Initializing,
    /// In use.
    Ready,
    /// CC.SHN is set; CSTS.SHST becomes 10b.
    ShuttingDown { until: u64 },
    /// DMA is being forbidden; the next attempt is at this time.
    Fencing { again: u64, end: End },
    /// Over.
    Ended,
}

/// The next step when all queue pairs are quiet.
#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    Reset,
    ShutDown(Shutdown),
}

/// A shutdown that follows the reset under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    how: Shutdown,
    /// If the reset is not over by then, there is no shutdown.
    until: u64,
}

impl Controller {
    pub(super) fn advance(&mut self, now: u64) {
        if let Err(failure) = self.try_advance(now) {
            self.fail(failure, now);
        }
    }

    fn try_advance(&mut self, now: u64) -> Result<(), Failure> {
        self.watch_transport(now);
        if let Some(stop) = self.stop {
            if self.is_ready() {
                self.stop = None;
                self.begin_shutdown(stop.how, now);
            } else if now >= stop.until {
                self.fence(End::Stopped { is_clean: false }, now);
            }
        }
        match self.life {
            Life::Quiescing { until, then } => {
                let is_quiet = self.pairs.iter().all(|pair| pair.is_quiesced || !pair.is_given_out);
                if is_quiet || now >= until {
                    self.report_step(RecoveryStep::Quiesced, now);
                    match then {
                        Then::Reset => self.disable(now),
                        Then::ShutDown(how) => self.write_shutdown(how, now)?,
                    }
                }
                Ok(())
            }
            Life::Disabling { read_from, .. } if now < read_from => Ok(()),
            Life::Disabling { until, .. } => self.poll_disabling(until, now),
            Life::Enabling { until } => self.poll_enabling(until, now),
            Life::Initializing | Life::Ready => self.run(now),
            Life::ShuttingDown { until } => {
                let is_clean = self.read_csts()?.is_shut_down();
                if is_clean || now >= until {
                    self.fence(End::Stopped { is_clean }, now);
                }
                Ok(())
            }
            Life::Fencing { again, .. } => {
                if let Life::Fencing { end, .. } = std::mem::replace(&mut self.life, Life::Ended) {
                    if now >= again { self.fence(end, now) } else { self.life = Life::Fencing { again, end } }
                }
                Ok(())
            }
            Life::Ended => Ok(()),
        }
    }

    /// The work of a controller that takes commands.
    fn run(&mut self, now: u64) -> Result<(), Failure> {
        let is_starting = matches!(self.life, Life::Initializing);
        if now >= self.next_watch {
            self.next_watch = now.saturating_add(self.options.watch);
            let csts = self.read_csts()?;
            let (reason, failure) = if csts.is_fatal() {
                (ResetReason::Fatal, Failure::Fatal)
            } else {
                (ResetReason::NotReady, Failure::NotEnabled(self.caps.ready_timeout_ms))
            };
            if csts.is_fatal() || !csts.is_ready() {
                return self.restart(is_starting, reason, failure, now);
            }
            if self.is_paused_too_long(csts, now) {
                let failure = Failure::Paused(self.pause_limit() / MS);
                return self.restart(is_starting, ResetReason::Paused, failure, now);
            }
        }
        self.reap_admin(now)?;
        if self.paused.is_none() && self.admin.late(now).is_some() {
            let failure = Failure::AdminTimeout(self.step_name());
            return self.restart(is_starting, ResetReason::AdminTimeout, failure, now);
        }
        if is_starting && self.paused.is_none() && now >= self.start_until {
            // A controller that was never ready gets no other attempt: it would take as long.
            self.attempts = if self.was_ready { self.attempts } else { self.options.attempts };
            return Err(self.start_too_long());
        }
        self.start_jobs(now)?;
        self.send_due(now);
        Ok(())
    }

    /// Follows CSTS.PP: reports the begin and the end of a pause. Returns whether the pause is longer than the controller claims.
    fn is_paused_too_long(&mut self, csts: Csts, now: u64) -> bool {
        match (self.paused, csts.is_paused()) {
            (None, true) => {
                self.paused = Some(now);
                self.events.push_back(Event::Paused { limit: self.pause_limit() });
            }
            (Some(since), false) => {
                let took = now.saturating_sub(since);
                self.paused = None;
                self.admin.postpone(took);
                self.start_until = self.start_until.saturating_add(took);
                self.events.push_back(Event::Resumed { took });
            }
            (None, false) | (Some(_), true) => {}
        }
        if self.paused.is_some() {
            self.next_watch = now.saturating_add(self.options.watch.min(PAUSE_WATCH));
        }
        self.paused.is_some_and(|since| now >= since.saturating_add(self.pause_limit()))
    }

    /// The longest pause: MTFA, or the limit of an admin command where the controller does not report it.
    fn pause_limit(&self) -> u64 {
        match self.info.as_ref().map_or(0, |info| info.activation_ms) {
            0 => self.options.admin,
            ms => ms * MS,
        }
    }

    /// A controller that starts has failed; one that was ready is reset.
    fn restart(
        &mut self,
        is_starting: bool,
        reason: ResetReason,
        failure: Failure,
        now: u64,
    ) -> Result<(), Failure> {
        if is_starting {
            return Err(failure);
        }
        self.begin_reset(reason, now);
        Ok(())
    }

    fn watch_transport(&mut self, now: u64) {
        let Some(events) = self.function.events() else { return };
        if events.take_removal() {
            self.events.push_back(Event::RemovalRequested);
        }
        if events.take_error() && self.is_ready() {
            self.begin_reset(ResetReason::BusError, now);
        }
    }

    pub(super) fn begin_reset(&mut self, reason: ResetReason, now: u64) {
        let is_early = now < self.ready_since.saturating_add(STABLE);
        self.attempts = match reason {
            ResetReason::Request => self.attempts,
            _ if is_early => self.attempts + 1,
            _ => 0,
        };
        if self.attempts >= self.options.attempts {
            return self.fence(End::Failed(Failure::Unstable(reason)), now);
        }
        self.reset_since = now;
        self.begin_quiescing(Then::Reset, now);
        self.events.push_back(Event::Quiesce(reason));
    }

    pub(super) fn begin_shutdown(&mut self, how: Shutdown, now: u64) {
        match self.life {
            Life::Ready => {
                self.begin_quiescing(Then::ShutDown(how), now);
                self.events.push_back(Event::ShuttingDown);
            }
            // A reset keeps the data in the controller's volatile cache: only a shutdown after it makes that durable.
            Life::Quiescing { then: Then::Reset, .. }
            | Life::Disabling { .. }
            | Life::Enabling { .. }
            | Life::Initializing
                if self.was_ready =>
            {
                self.stop.get_or_insert(Stop { how, until: now.saturating_add(SHUTDOWN_MIN) });
            }
            // A controller that starts has got no data yet.
            Life::Disabling { .. } | Life::Enabling { .. } | Life::Initializing => {
                self.fence(End::Stopped { is_clean: false }, now);
            }
            Life::Quiescing { .. } | Life::ShuttingDown { .. } | Life::Fencing { .. } | Life::Ended => {}
        }
    }

    fn begin_quiescing(&mut self, then: Then, now: u64) {
        self.step_since = now;
        self.pairs.iter_mut().for_each(|pair| pair.is_quiesced = false);
        self.life = Life::Quiescing { until: now.saturating_add(self.options.quiesce), then };
    }

    /// Clears CC.EN.
    pub(super) fn disable(&mut self, now: u64) {
        self.step_since = now;
        if let Err(error) = self.write_cc(Cc(0)) {
            return self.fail(error.into(), now);
        }
        let until = now + self.caps.ready_timeout_ms * MS;
        self.life = Life::Disabling { until, read_from: now + self.quirks.ready_delay_ms * MS };
    }

    fn poll_disabling(&mut self, until: u64, now: u64) -> Result<(), Failure> {
        if !self.read_csts()?.is_ready() {
            self.report_step(RecoveryStep::Disabled, now);
            self.end_dma();
            return self.enable(now);
        }
        if now < until {
            return Ok(());
        }
        if self.function.reset().is_err() {
            // Not another attempt: the controller answers neither way.
            self.attempts = self.options.attempts;
            return Err(Failure::NotDisabled(self.caps.ready_timeout_ms));
        }
        self.report_step(RecoveryStep::FunctionReset, now);
        self.end_dma();
        self.enable(now)
    }

    /// Writes the admin queue's addresses, and sets CC.EN.
    fn enable(&mut self, now: u64) -> Result<(), Failure> {
        self.step_since = now;
        self.registers = map_doorbells(self.function.as_ref(), self.options.pairs, self.caps.stride)?;
        let doorbells = self.admin_doorbells();
        for id in self.admin.rewind(self.id, &doorbells, now) {
            self.events.push_back(Event::Admin { id, answer: None });
        }
        let (aqa, asq, acq) = self.admin.registers();
        let function = &self.function;
        function.set_bus_master(true)?;
        function.write_register(AQA, Width::Four, aqa.into())?;
        function.write_register(ASQ, Width::Eight, asq)?;
        function.write_register(ACQ, Width::Eight, acq)?;
        self.write_cc(Cc::enabled(self.caps.page, self.caps.all_command_sets))?;
        let limit = self.ready_limit();
        self.life = Life::Enabling { until: now + limit };
        Ok(())
    }

    /// The longest time until CSTS.RDY is 1. CRTO.CRWMT replaces CAP.TO where it exists. NVMe 2.0 §3.1.3.19.
    fn ready_limit(&self) -> u64 {
        let to = self.caps.ready_timeout_ms;
        let crto = if self.caps.has_ready_timeouts {
            self.function.read_register(CRTO, Width::Four).unwrap_or(0) & 0xffff
        } else {
            0
        };
        to.max(crto * TIMEOUT_UNIT_MS) * MS
    }

    fn poll_enabling(&mut self, until: u64, now: u64) -> Result<(), Failure> {
        let csts = self.read_csts()?;
        if csts.is_fatal() {
            return Err(Failure::Fatal);
        }
        if csts.is_ready() {
            self.report_step(RecoveryStep::Enabled, now);
            self.life = Life::Initializing;
            self.next_watch = now.saturating_add(self.options.watch);
            self.begin_start(now);
            return Ok(());
        }
        if now >= until { Err(Failure::NotEnabled(self.caps.ready_timeout_ms)) } else { Ok(()) }
    }

    /// The controller accesses no memory any more.
    fn end_dma(&mut self) {
        self.running = None;
        self.jobs.clear();
        self.aborts.clear();
        self.async_requests = 0;
        self.paused = None;
        self.is_shadowed = false;
        let id = self.id;
        let mut unwanted = Vec::new();
        for pair in &mut self.pairs {
            match pair.stage {
                Stage::Live | Stage::Deleting { again: true } if pair.is_given_out => {
                    pair.stage = Stage::Ended;
                    self.events.push_back(Event::DmaEnded(DmaEnded::new(pair.qid(), id)));
                }
                Stage::Deleting { again: false } | Stage::Creating { is_wanted: false } => {
                    unwanted.push(pair.qid());
                }
                // The owner has rewound the pair, or does not have it yet: the queues are created by the next start.
                Stage::Creating { .. } => pair.stage = Stage::Waiting,
                Stage::Live | Stage::Deleting { .. } | Stage::Waiting | Stage::Ended => {}
            }
        }
        unwanted.into_iter().for_each(|qid| self.forget_pair(qid));
    }

    fn write_shutdown(&mut self, how: Shutdown, now: u64) -> Result<(), Failure> {
        self.step_since = now;
        self.write_cc(Cc::enabled(self.caps.page, self.caps.all_command_sets).with_shutdown(how))?;
        let claimed = self.info.as_ref().map_or(0, |info| info.shutdown_ms * MS);
        self.life = Life::ShuttingDown { until: now + claimed.max(SHUTDOWN_MIN) };
        Ok(())
    }

    /// The start or the controller failed: tries again, or ends it.
    pub(super) fn fail(&mut self, failure: Failure, now: u64) {
        let is_gone = match &failure {
            // Registers that cannot be accessed will not be by another attempt.
            Failure::Vanished(_) | Failure::Pci(_) | Failure::AnotherDevice { .. } => true,
            Failure::NotDisabled(_)
            | Failure::NotEnabled(_)
            | Failure::Fatal
            | Failure::BadClaim(_)
            | Failure::Step { .. }
            | Failure::AdminTimeout(_)
            | Failure::StartTooLong { .. }
            | Failure::Unstable(_)
            | Failure::Paused(_)
            | Failure::AdminQueue(_)
            | Failure::Memory(_) => false,
        };
        match self.life {
            Life::ShuttingDown { .. } => return self.fence(End::Stopped { is_clean: false }, now),
            Life::Fencing { .. } | Life::Ended => return,
            // The pairs' owners must not ring doorbells while the controller is disabled.
            Life::Ready if !is_gone => return self.begin_reset(ResetReason::QueueError, now),
            _ => {}
        }
        self.attempts = self.attempts.saturating_add(1);
        if is_gone || self.attempts >= self.options.attempts {
            return self.fence(End::Failed(failure), now);
        }
        self.events.push_back(Event::AttemptFailed(failure));
        // The last attempt begins with the strongest means.
        if self.attempts + 1 == self.options.attempts && self.function.reset().is_ok() {
            self.report_step(RecoveryStep::FunctionReset, now);
        }
        self.disable(now);
    }

    /// Switches bus mastering off, and ends. As long as that is not possible, no command ends: the device could still write.
    fn fence(&mut self, end: End, now: u64) {
        // No shutdown follows, and no second end.
        self.stop = None;
        let is_over = match self.function.set_bus_master(false) {
            Ok(()) | Err(PciError::Gone { .. }) => true,
            Err(_) => matches!(self.function.reset(), Ok(()) | Err(PciError::Gone { .. })),
        };
        if !is_over {
            self.life = Life::Fencing { again: now + SECOND, end };
            return;
        }
        self.life = Life::Ended;
        self.end_dma();
        let doorbells = self.admin_doorbells();
        for id in self.admin.rewind(self.id, &doorbells, now) {
            self.events.push_back(Event::Admin { id, answer: None });
        }
        self.events.push_back(Event::Ended(end));
    }

    fn report_step(&mut self, step: RecoveryStep, now: u64) {
        let took = now.saturating_sub(self.step_since);
        self.events.push_back(Event::Step { step, took });
        self.step_since = now;
    }
}
