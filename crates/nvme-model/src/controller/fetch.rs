//! The data path: doorbells, arbitration, fetching, execution and completions. Context: the holder of the controller.
//!
//! The controller fetches a command when its queue's turn comes, chooses a delay and perhaps a fault, and executes the
//! command when the delay is over: it moves the data and posts the completion at that one moment. Different delays
//! reorder commands.

use super::{Controller, EventKind, Life, Status};
use crate::bus::Violation;
use crate::faults::{Action, Distortion, Fate};
use crate::in_flight::Held;
use crate::registers::DOORBELLS;
use crate::wire::{CQE_LEN, CompletionEntry, SQE_LEN, SubmissionEntry, admin, nvm};
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Entries that one read of a submission queue fetches at most.
pub(super) const BATCH: usize = 32;
/// Blocks of work that count as one command in the bound of a step.
const BLOCKS_PER_COMMAND: u64 = 64;

/// The result of a command; `None` while the command stays open, as asynchronous event requests do.
pub(super) type Outcome = Option<Result<u32, Status>>;

impl Controller {
    /// Offset in BAR 0 of a queue's doorbell (PCIe Transport 1.0 §3.1.2).
    pub(super) fn doorbell_offset(&self, qid: u16, is_cq: bool) -> u64 {
        DOORBELLS + self.shadow_offset(qid, is_cq)
    }

    /// Offset of a queue's entry in the buffers of shadow doorbells (NVMe 2.0 §5.11).
    fn shadow_offset(&self, qid: u16, is_cq: bool) -> u64 {
        (2 * u64::from(qid) + u64::from(is_cq)) << (2 + (self.config.dstrd & 0xf))
    }

    /// Zeroes the doorbells of a queue pair's identifier.
    pub(super) fn clear_doorbells(&self, qid: u16) {
        self.bar.write(self.doorbell_offset(qid, false), 0);
        self.bar.write(self.doorbell_offset(qid, true), 0);
    }

    pub(super) fn poll_doorbells(&mut self) {
        self.poll_queue(0);
        for index in 0..self.io_sqs.len() {
            self.poll_queue(self.io_sqs[index]);
        }
    }

    /// Reads the doorbell of a submission queue, and that of its completion queue.
    fn poll_queue(&mut self, qid: u16) {
        let value = self.bar.read(self.doorbell_offset(qid, false));
        let Some(sq) = &mut self.sqs[usize::from(qid)] else { return };
        let cqid = sq.cqid;
        let changed = value != sq.doorbell;
        sq.doorbell = value;
        if changed {
            self.counts.doorbells += 1;
            self.move_tail(qid, value);
        }
        let value = self.bar.read(self.doorbell_offset(cqid, true));
        let Some(cq) = &mut self.cqs[usize::from(cqid)] else { return };
        let changed = value != cq.doorbell;
        cq.doorbell = value;
        if changed {
            self.counts.doorbells += 1;
            self.move_head(cqid, value);
        }
        if self.shadow.is_some() {
            self.poll_shadow(qid, cqid);
        }
    }

    fn move_tail(&mut self, qid: u16, value: u32) {
        let Some(sq) = &mut self.sqs[usize::from(qid)] else { return };
        if self.shadow.is_some() && qid != 0 {
            // The mapped doorbell only wakes the controller: the shadow doorbell has the tail.
            sq.is_awake = true;
        } else if value < sq.entries {
            sq.tail = value;
        } else {
            self.bad_doorbell(qid, false, value);
        }
    }

    fn move_head(&mut self, cqid: u16, value: u32) {
        let Some(cq) = &mut self.cqs[usize::from(cqid)] else { return };
        if self.shadow.is_some() && cqid != 0 {
            return;
        }
        if cq.accepts_head(value) {
            cq.head = value;
            self.post_waiting(cqid);
        } else {
            self.bad_doorbell(cqid, true, value);
        }
    }

    fn bad_doorbell(&mut self, qid: u16, is_cq: bool, value: u32) {
        self.bus.violations.add(Violation::Doorbell { qid, is_cq, value });
        self.raise_event(EventKind::InvalidDoorbellValue);
    }

    /// Reads the shadow doorbells of a queue that the host woke, and keeps it awake until it is empty. An idle queue is not
    /// polled: a host that forgets the mapped doorbell, which the event index demands, is not served.
    fn poll_shadow(&mut self, qid: u16, cqid: u16) {
        let Some((shadow, event_index)) = self.shadow.filter(|_| qid != 0) else { return };
        if self.wake(qid, shadow) {
            let at = self.shadow_offset(qid, false);
            if !self.read_shadow_tail(qid, shadow + at) {
                self.fall_asleep(qid, shadow + at, event_index + at);
            }
        }
        if cqid != 0 && self.cqs[usize::from(cqid)].as_ref().is_some_and(|cq| cq.used() > 0) {
            let at = self.shadow_offset(cqid, true);
            let mut value = [0; 4];
            if self.bus.read(shadow + at, &mut value).is_ok() {
                self.move_shadow_head(cqid, u32::from_le_bytes(value));
            }
            let head = self.cqs[usize::from(cqid)].as_ref().map_or(0, |cq| cq.head);
            // The controller reads the head while completions are outstanding, and needs no doorbell.
            let _ = self.bus.write(event_index + at, &head.wrapping_sub(1).to_le_bytes());
        }
    }

    /// Whether the queue is awake. A mapped doorbell that the host wrote once more with its old value wakes a queue too, but is
    /// not seen in memory: so a queue also wakes if its shadow tail has moved to that value.
    fn wake(&mut self, qid: u16, shadow: u64) -> bool {
        let at = shadow + self.shadow_offset(qid, false);
        let Some(sq) = &mut self.sqs[usize::from(qid)] else { return false };
        let mut tail = [0; 4];
        if !sq.is_awake && sq.doorbell != sq.tail && self.bus.read(at, &mut tail).is_ok() {
            sq.is_awake = u32::from_le_bytes(tail) == sq.doorbell;
        }
        sq.is_awake
    }

    /// Stops polling a queue without work: asks for a doorbell at the next tail, then looks once more.
    fn fall_asleep(&mut self, qid: u16, shadow: u64, event_index: u64) {
        let Some(sq) = &self.sqs[usize::from(qid)] else { return };
        let is_idle = sq.available() == 0;
        let tail = sq.tail;
        if !is_idle || self.bus.write(event_index, &tail.to_le_bytes()).is_err() {
            return;
        }
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let is_awake = self.read_shadow_tail(qid, shadow);
        if let Some(sq) = &mut self.sqs[usize::from(qid)] {
            sq.is_awake = is_awake;
        }
    }

    /// Reads a shadow tail; returns whether it moved.
    fn read_shadow_tail(&mut self, qid: u16, iova: u64) -> bool {
        let mut value = [0; 4];
        if self.bus.read(iova, &mut value).is_err() {
            return false;
        }
        let value = u32::from_le_bytes(value);
        let Some(sq) = &mut self.sqs[usize::from(qid)] else { return false };
        if value == sq.tail {
            return false;
        }
        if value < sq.entries {
            sq.tail = value;
            self.counts.shadow_doorbells += 1;
            return true;
        }
        if sq.bad_shadow != Some(value) {
            sq.bad_shadow = Some(value);
            self.bad_doorbell(qid, false, value);
        }
        false
    }

    fn move_shadow_head(&mut self, cqid: u16, value: u32) {
        let Some(cq) = &mut self.cqs[usize::from(cqid)] else { return };
        if value == cq.head {
            return;
        }
        if cq.accepts_head(value) {
            cq.head = value;
            self.counts.shadow_doorbells += 1;
            self.post_waiting(cqid);
        } else if cq.bad_shadow != Some(value) {
            cq.bad_shadow = Some(value);
            self.bad_doorbell(cqid, true, value);
        }
    }

    /// Reports doorbells of queues that do not exist, whose value is 0 until the host writes one.
    pub(super) fn check_unused_doorbells(&mut self) {
        if self.life != Life::Ready {
            return;
        }
        for qid in 0..=self.config.io_queues {
            for is_cq in [false, true] {
                let exists = if is_cq {
                    self.cqs[usize::from(qid)].is_some()
                } else {
                    self.sqs[usize::from(qid)].is_some()
                };
                let offset = self.doorbell_offset(qid, is_cq);
                let value = if exists { 0 } else { self.bar.read(offset) };
                if value != 0 {
                    self.bar.write(offset, 0);
                    self.bus.violations.add(Violation::Doorbell { qid, is_cq, value });
                    self.raise_event(EventKind::UnknownDoorbell);
                }
            }
        }
    }

    /// Counts blocks that a command touches against the bound of the step.
    pub(super) const fn charge(&mut self, blocks: u64) {
        self.budget = self.budget.saturating_sub(blocks / BLOCKS_PER_COMMAND);
    }

    /// Fetches from the admin queue, then from the I/O queues in turn (NVMe 2.0 §3.4.4.1), until all are empty or the
    /// step's bound is reached.
    pub(super) fn fetch_all(&mut self) {
        let burst = self.features.arbitration_burst();
        self.fetch(0, u32::MAX);
        // A queue may be created or deleted by an admin command, never by an I/O command.
        let mut idle = 0;
        while idle < self.io_sqs.len() && self.budget > 0 && self.is_serving() {
            if self.next_sq >= self.io_sqs.len() {
                self.next_sq = 0;
            }
            let qid = self.io_sqs[self.next_sq];
            self.next_sq += 1;
            idle = if self.fetch(qid, burst) { 0 } else { idle + 1 };
        }
    }

    /// Fetches up to `burst` commands of a queue; returns whether there were any.
    fn fetch(&mut self, qid: u16, burst: u32) -> bool {
        let mut left = burst;
        while left > 0 && self.budget > 0 {
            let Some(sq) = &mut self.sqs[usize::from(qid)] else { break };
            let is_waiting = self.cqs[usize::from(sq.cqid)].as_ref().is_none_or(|cq| !cq.waiting.is_empty());
            let until_wrap = sq.entries - sq.head;
            let count = sq.available().min(until_wrap).min(left).min(BATCH as u32) as usize;
            let count = count.min(self.in_flight.room()).min(self.budget as usize);
            if count == 0 || is_waiting {
                break;
            }
            let iova = sq.iova + u64::from(sq.head) * SQE_LEN;
            if self.bus.read(iova, self.batch[..count].as_mut_bytes()).is_err() {
                // The controller cannot go on without its queues (NVMe 2.0 §9.5).
                self.set_fatal();
                break;
            }
            left -= count as u32;
            for index in 0..count {
                let entry = self.batch[index];
                if !self.accept_next(qid, &entry) {
                    return true;
                }
            }
        }
        if let Some(sq) = &mut self.sqs[usize::from(qid)]
            && sq.available() == 0
            && let Some(alone) = sq.fused_first.take()
        {
            self.refuse(qid, alone.cid.get(), Status::FUSED_MISSING);
        }
        left < burst
    }

    /// Takes an entry off its queue and accepts it; `false` if the controller must fetch no more.
    fn accept_next(&mut self, qid: u16, entry: &SubmissionEntry) -> bool {
        let Some(sq) = &mut self.sqs[usize::from(qid)] else { return false };
        sq.head = if sq.head + 1 == sq.entries { 0 } else { sq.head + 1 };
        let first = sq.fused_first.take();
        self.budget = self.budget.saturating_sub(1);
        if qid == 0 {
            self.counts.admin_commands += 1;
        } else {
            self.counts.io_commands += 1;
        }
        match (first, entry.fuse()) {
            (Some(first), 2) => self.accept(qid, first, Some(*entry)),
            (None, 0) => self.accept(qid, *entry, None),
            (first, fuse) => {
                if let Some(first) = first {
                    self.refuse(qid, first.cid.get(), Status::FUSED_MISSING);
                }
                match fuse {
                    0 => self.accept(qid, *entry, None),
                    1 => {
                        if let Some(sq) = &mut self.sqs[usize::from(qid)] {
                            sq.fused_first = Some(*entry);
                        }
                    }
                    2 => self.refuse(qid, entry.cid.get(), Status::FUSED_MISSING),
                    _ => self.refuse(qid, entry.cid.get(), Status::INVALID_FIELD),
                }
            }
        }
        self.is_serving()
    }

    /// Gives a command its delay and its fault. A command without either is executed at once.
    fn accept(&mut self, sqid: u16, entry: SubmissionEntry, second: Option<SubmissionEntry>) {
        if let Some(sq) = &self.sqs[usize::from(sqid)]
            && sq.is_held(entry.cid.get())
        {
            self.refuse(sqid, entry.cid.get(), Status::CID_CONFLICT);
            return;
        }
        let range = if sqid == 0 { &self.config.timing.admin } else { &self.config.timing.io };
        let mut delay = if *range.end() == 0 { 0 } else { self.rng.u64(range.clone()) };
        if sqid == 0 && entry.opcode == admin::FORMAT_NVM {
            delay += self.start_format(&entry);
        }
        if sqid != 0 && self.config.timing.empty_mib > 0 {
            delay += self.start_emptying(&entry);
        }
        if delay == 0 && second.is_none() && !self.faults.is_active() {
            // The ordinary case, without copies of the entry.
            let result = if sqid == 0 { self.run_admin(&entry) } else { Some(self.run_io(&entry)) };
            if let Some(result) = result {
                self.complete(sqid, &entry, result, None);
            }
            return;
        }
        let mut held = Held { sqid, entry, second, fate: Fate::Normal };
        if let Some(action) = self.faults.choose(sqid, &entry) {
            self.counts.faults += 1;
            match action {
                Action::Fail(status) => held.fate = Fate::Fail(status),
                Action::Delay(more) => delay = delay.saturating_add(more),
                Action::Lose { after } => {
                    delay = delay.saturating_add(after);
                    held.fate = Fate::Lose;
                }
                Action::Stick { is_abortable } => held.fate = Fate::Stick { is_abortable },
                Action::Distort(distortion) => held.fate = Fate::Distort(distortion),
                Action::FailController => return self.set_fatal(),
                Action::PullOut => return self.pull_out(),
            }
        }
        let never_ends = matches!(held.fate, Fate::Stick { .. });
        if delay == 0 && !never_ends {
            self.execute(&held);
            return;
        }
        if let Some(sq) = &mut self.sqs[usize::from(sqid)] {
            sq.hold(entry.cid.get());
            if let Some(second) = second {
                sq.hold(second.cid.get());
            }
        }
        let due = self.now.saturating_add(delay);
        self.in_flight.add(held, (!never_ends).then_some(due));
    }

    /// Executes the commands in flight that are due, within the step's bound.
    pub(super) fn execute_due(&mut self) {
        while self.budget > 0
            && let Some(held) = self.in_flight.take_due(self.now)
        {
            self.budget -= 1;
            self.release(&held);
            self.execute(&held);
        }
    }

    /// Power fails: executes a random half of what is in flight, without completions.
    pub(super) fn execute_some(&mut self) {
        while let Some(held) = self.in_flight.take_any() {
            if self.rng.bool() && held.sqid != 0 && held.fate == Fate::Normal {
                let _ = self.run(&held);
            }
        }
    }

    pub(super) fn release(&mut self, held: &Held) {
        if let Some(sq) = &mut self.sqs[usize::from(held.sqid)] {
            sq.release(held.entry.cid.get());
            if let Some(second) = &held.second {
                sq.release(second.cid.get());
            }
        }
    }

    fn execute(&mut self, held: &Held) {
        let (first, second) = match held.fate {
            Fate::Fail(status) => (Some(Err(status)), Some(Err(status))),
            _ => self.run(held),
        };
        if held.fate == Fate::Lose {
            return;
        }
        let distortion = match held.fate {
            Fate::Distort(distortion) => Some(distortion),
            _ => None,
        };
        if let Some(result) = first {
            self.complete(held.sqid, &held.entry, result, distortion);
        }
        if let (Some(entry), Some(result)) = (&held.second, second) {
            self.complete(held.sqid, entry, result, distortion);
        }
    }

    /// Executes a command, or a fused pair.
    fn run(&mut self, held: &Held) -> (Outcome, Outcome) {
        match (&held.second, held.sqid) {
            (Some(second), 0) => {
                let _ = second;
                (Some(Err(Status::INVALID_FIELD)), Some(Err(Status::INVALID_FIELD)))
            }
            (Some(second), _) => {
                let (first, second) = self.run_fused(&held.entry, second);
                (Some(first), Some(second))
            }
            (None, 0) => (self.run_admin(&held.entry), None),
            (None, _) => (Some(self.run_io(&held.entry)), None),
        }
    }

    /// Completes a command that was not executed.
    pub(super) fn refuse(&mut self, sqid: u16, cid: u16, status: Status) {
        let entry = SubmissionEntry { cid: cid.into(), opcode: nvm::FLUSH, ..SubmissionEntry::new_zeroed() };
        self.complete(sqid, &entry, Err(status), None);
    }

    /// Posts the completion of a command, unless the controller is being reset or has failed.
    pub(super) fn complete(
        &mut self,
        sqid: u16,
        command: &SubmissionEntry,
        result: Result<u32, Status>,
        distortion: Option<Distortion>,
    ) {
        if !self.is_serving() {
            return;
        }
        let Some(sq) = &self.sqs[usize::from(sqid)] else { return };
        let (cqid, head, entries) = (sq.cqid, sq.head, sq.entries);
        let (value, mut status) = match result {
            Ok(value) => (value, Status::SUCCESS),
            Err(status) => (0, status),
        };
        if status != Status::SUCCESS {
            self.counts.failures += 1;
            if self.log_error(sqid, command, status) {
                status = status.with_more();
            }
            if !self.features.has_retry_delays() {
                status = status.without_delay();
            }
        }
        let mut entry = CompletionEntry {
            result: value.into(),
            reserved: 0.into(),
            sq_head: (head as u16).into(),
            sqid: sqid.into(),
            cid: command.cid,
            status: (status.0 << 1).into(),
        };
        let mut flips_phase = false;
        let mut copies = 1;
        match distortion {
            None => {}
            Some(Distortion::Cid) => entry.cid = (command.cid.get() ^ self.rng.u16(1..)).into(),
            Some(Distortion::Doubled) => copies = 2,
            Some(Distortion::Phase) => flips_phase = true,
            Some(Distortion::SqHead) => {
                entry.sq_head = (entries as u16).wrapping_add(self.rng.u16(..1 << 15)).into();
            }
            Some(Distortion::Sqid) => entry.sqid = (sqid ^ self.rng.u16(1..)).into(),
            Some(Distortion::Random) => {
                self.rng.fill(entry.as_mut_bytes());
                entry.status = (entry.status.get() & !1).into();
            }
        }
        for _ in 0..copies {
            self.post(cqid, entry, flips_phase);
        }
    }

    fn post(&mut self, cqid: u16, mut entry: CompletionEntry, flips_phase: bool) {
        let Some(cq) = &mut self.cqs[usize::from(cqid)] else { return };
        if cq.is_full() {
            cq.waiting.push_back(entry);
            return;
        }
        entry.status = (entry.status.get() & !1 | u16::from(cq.phase != flips_phase)).into();
        let iova = cq.iova + u64::from(cq.advance()) * CQE_LEN;
        self.counts.completions += 1;
        if self.bus.post_completion(iova, &entry).is_err() {
            self.set_fatal();
            return;
        }
        if let Some(vector) = cq.vector {
            self.bus.raise(vector);
        }
    }

    /// Posts completions that waited for room in their queue.
    fn post_waiting(&mut self, cqid: u16) {
        while let Some(cq) = &mut self.cqs[usize::from(cqid)]
            && !cq.is_full()
            && let Some(entry) = cq.waiting.pop_front()
        {
            self.post(cqid, entry, false);
        }
    }
}
