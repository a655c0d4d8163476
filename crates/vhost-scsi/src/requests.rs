//! The commands of one request queue: from the guest's ring to a target's channel and back. Reactor context.
//!
//! The head of a command's descriptor chain identifies the command on the whole path: it is the slot of the scatter list, the
//! tag of the [`aryk_scsi::Request`], and the id of the used element. Task management identifies a command by the guest's own
//! tag.
//!
//! The channel of a detached disk moves to a second list: its commands end there, while another disk may already be attached to
//! the target.

use crate::wire::{ANSWER, Answer, AnswerHead, Command, Response, TARGETS};
use aryk_bdev::OpenError;
use aryk_crash_point::{Step, step};
use aryk_dma::{List, Sgl};
use aryk_reactor::{Cx, Point};
use aryk_scsi::{Nexus, Outcome, Request, Sense, UnitChannel, answer_absent};
use aryk_vhost_device::GuestQueue;
use aryk_virtqueue::{Chain, Piece};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{Immutable, IntoBytes};

/// How long commands on a detached disk may take to complete before they are aborted.
const DETACH_GRACE: Duration = Duration::from_secs(2);

/// Lengths of a command's data. The scatter list contains the place of the answer and then all data; `data_in` is stored with
/// the list.
#[derive(Clone, Copy, Debug)]
struct Lengths {
    data_in: u32,
    data_out: u32,
}

impl Lengths {
    /// The lengths of the command in flight whose chain has this head.
    fn of(head: u16, guest: &GuestQueue) -> Self {
        Self::of_list(guest.sgs.len_of(head), guest.sgs.note_of(head))
    }

    /// The lengths of a command whose scatter list has `len` bytes, with which `data_in` is stored.
    #[inline]
    const fn of_list(len: u32, data_in: u32) -> Self {
        Self { data_in, data_out: len - ANSWER - data_in }
    }

    const fn all(self) -> u32 {
        self.data_in + self.data_out
    }
}

/// The commands in flight of a request queue, and the channels of its targets.
pub(crate) struct Requests {
    /// The channel of each target.
    targets: Box<[Option<UnitChannel>; TARGETS as usize]>,
    /// Targets that have a channel, as bits.
    present: u8,
    /// Targets whose channel must be polled, as bits. May include targets whose channel is idle.
    busy: u8,
    /// Channels of detached disks that still have commands in flight.
    detached: Vec<UnitChannel>,
    /// An upper bound of chains' heads.
    depth: u16,
    outcomes: Vec<Outcome>,
    /// The queue is stopping, and aborted commands stay in flight in the in-flight region, for the queue's successor.
    giving_up: bool,
}

/// The chain has no room for an answer.
struct Unanswerable;

impl Requests {
    pub fn new(size: u16) -> Self {
        Self {
            targets: Box::default(),
            present: 0,
            busy: 0,
            detached: Vec::new(),
            depth: size,
            outcomes: Vec::with_capacity(size.into()),
            giving_up: false,
        }
    }

    /// Opens a channel on the disk of a target.
    ///
    /// # Errors
    /// As [`UnitChannel::open`]; then the target has no disk on this queue.
    pub fn attach(
        &mut self,
        target: u8,
        nexus: Arc<Nexus>,
        guest: &GuestQueue,
        cx: &mut Cx,
    ) -> Result<(), OpenError> {
        let place = &mut self.targets[usize::from(target)];
        assert!(place.is_none(), "target {target} has a disk");
        *place = Some(UnitChannel::open(nexus, self.depth, guest.id, cx)?);
        self.present |= 1 << target;
        self.busy |= 1 << target;
        Ok(())
    }

    /// Detaches the disk of a target. Later commands find no target; the channel is closed when its last command has ended.
    pub fn detach(&mut self, target: u8, guest: &GuestQueue, cx: &mut Cx) {
        let Some(channel) = self.targets[usize::from(target)].take() else { return };
        self.present &= !(1 << target);
        self.busy &= self.present;
        self.detached.push(channel);
        let id = guest.id;
        cx.wake(id);
        cx.call_at(cx.now().after(DETACH_GRACE), move |cx| {
            if let Some(queue) = cx.root::<crate::queue::Queue>(id) {
                queue.borrow_mut().requests().0.abort_detached(cx);
            }
        });
    }

    fn abort_detached(&mut self, cx: &mut Cx) {
        self.detached.iter_mut().for_each(|channel| channel.abort_all(cx));
    }

    /// Aborts the commands whose heads match.
    pub fn abort_those(&mut self, matches: &dyn Fn(u16) -> bool, cx: &mut Cx) {
        let all = self.targets.iter_mut().flatten().chain(&mut self.detached);
        all.for_each(|channel| channel.abort_those(matches, cx));
    }

    /// As [`UnitChannel::are_revocable`], for the commands whose heads match.
    pub fn are_revocable(&self, matches: &dyn Fn(u16) -> bool) -> bool {
        self.targets.iter().flatten().chain(&self.detached).all(|channel| channel.are_revocable(matches))
    }

    /// Aborts all commands in flight.
    pub fn give_up(&mut self, guest: &GuestQueue, cx: &mut Cx) {
        let commands = guest.sgs.in_use();
        if commands > 0 {
            tracing::warn!(queue = guest.index, commands, "a disk is slow: commands are aborted");
        }
        self.giving_up = guest.keeps_in_flight;
        self.targets.iter_mut().flatten().for_each(|channel| channel.abort_all(cx));
        self.abort_detached(cx);
    }

    /// Starts the command in `chain`.
    #[inline]
    pub fn start(&mut self, head: u16, chain: &mut Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        match chain.take_whole_header::<Command>(guest.sgs.memory()) {
            Some(command) => self.start_command(&command, head, chain, guest, cx),
            None => self.start_scattered(head, chain, guest, cx),
        }
    }

    /// Starts a command whose request shares its buffer with data, or has several buffers.
    #[cold]
    fn start_scattered(&mut self, head: u16, chain: &mut Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        match chain.take_header::<Command>(guest.sgs.memory()) {
            Ok(Some(command)) => self.start_command(&command, head, chain, guest, cx),
            Ok(None) | Err(_) => match place(chain, guest.sgs.begin(head)) {
                Ok(_) => self.refuse(head, Response::Failure, 0, guest),
                Err(Unanswerable) => guest.complete_unanswerable(head),
            },
        }
    }

    // Always inlined: the lists of a command stay in registers, up to where they are kept.
    #[inline(always)]
    fn start_command(
        &mut self,
        command: &Command,
        head: u16,
        chain: &Chain,
        guest: &mut GuestQueue,
        cx: &mut Cx,
    ) {
        let Ok((lengths, all)) = place(chain, guest.sgs.begin(head)) else {
            guest.complete_unanswerable(head);
            return;
        };
        let Some((target, unit)) = command.address.target() else {
            self.refuse(head, Response::BadTarget, 0, guest);
            return;
        };
        let Some(channel) = &mut self.targets[usize::from(target)] else {
            self.refuse(head, Response::BadTarget, 0, guest);
            return;
        };
        // The guest has just written to the place of the answer, so its cache lines are in another core's cache. This core
        // writes them when the command completes.
        all.prefetch_write();
        let request = Request {
            tag: head,
            task: command.tag,
            cdb: &command.cdb,
            data_in: part(all, ANSWER, lengths.data_in),
            data_out: part(all, ANSWER + lengths.data_in, lengths.data_out),
            replayed: guest.is_replay(),
        };
        if unit == Some(channel.nexus().unit()) {
            channel.submit(request, cx);
            self.busy |= 1 << target;
            step(Step::Submitted);
        } else {
            // A copy: otherwise the compiler would keep `request` in memory for present units too.
            let outcome = answer_absent(&Request { ..request }, &[channel.nexus().unit()]);
            self.finish(&outcome, false, guest);
        }
    }

    #[cold]
    fn refuse(&self, head: u16, response: Response, filled: u32, guest: &mut GuestQueue) {
        let lengths = Lengths::of(head, guest);
        complete(head, &AnswerHead::without_status(response, lengths.all()), (0, filled), lengths, guest);
    }

    /// Answers a command that has ended.
    #[cold]
    fn finish(&self, outcome: &Outcome, descriptors: bool, guest: &mut GuestQueue) {
        let head = outcome.tag;
        let lengths = Lengths::of(head, guest);
        let answer = Answer::new(outcome, lengths.all(), descriptors);
        complete(head, &answer, (outcome.moved, outcome.filled), lengths, guest);
    }

    /// Answers the commands that have ended. Returns whether there were any.
    #[inline]
    pub fn take_outcomes(&mut self, guest: &mut GuestQueue, cx: &mut Cx) -> bool {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        // The polls below handle everything that a pending wake-up stands for. Requests that they submit may wake this queue
        // again.
        let has_event = cx.clear_wake(guest.id);
        let (mut worked, mut left) = (false, if has_event { self.present } else { self.busy });
        while left != 0 {
            let target = left.trailing_zeros() as usize;
            left &= left - 1;
            let channel = self.targets[target].as_mut().expect("it is present");
            channel.poll(cx, &mut outcomes, |head, moved, _| {
                worked = true;
                step(Step::Completed);
                let answer = |len, data_in| {
                    let lengths = Lengths::of_list(len, data_in);
                    (AnswerHead::good(lengths.all() - moved), ANSWER + moved.min(data_in))
                };
                guest.answer_first(head, answer);
            });
            if !outcomes.is_empty() {
                worked = true;
                let descriptors = channel.wants_descriptors();
                self.take_rest(&mut outcomes, descriptors, guest, cx);
            }
            if self.targets[target].as_ref().is_some_and(UnitChannel::is_quiet) {
                self.busy &= !(1 << target);
            }
        }
        if !self.detached.is_empty() {
            worked |= self.take_detached(&mut outcomes, guest, cx);
        }
        self.outcomes = outcomes;
        worked
    }

    /// Answers the other commands that have ended: all but plain commands that succeeded.
    #[cold]
    fn take_rest(
        &mut self,
        outcomes: &mut Vec<Outcome>,
        descriptors: bool,
        guest: &mut GuestQueue,
        cx: &mut Cx,
    ) {
        for outcome in outcomes.drain(..) {
            cx.trace(guest.traced(), Point::Complete, outcome.tag.into());
            if self.giving_up && (outcome.aborted || outcome.sense == Sense::ABORTED) {
                guest.sgs.end(outcome.tag);
                continue;
            }
            step(Step::Completed);
            self.finish(&outcome, descriptors, guest);
        }
    }

    /// The same for detached disks: an aborted command ends with "bad target".
    #[cold]
    fn take_detached(&mut self, outcomes: &mut Vec<Outcome>, guest: &mut GuestQueue, cx: &mut Cx) -> bool {
        for channel in &mut self.detached {
            channel.poll_all(cx, outcomes);
        }
        let worked = !outcomes.is_empty();
        for outcome in outcomes.drain(..) {
            if outcome.aborted || outcome.sense == Sense::ABORTED {
                self.refuse(outcome.tag, Response::BadTarget, outcome.filled, guest);
            } else {
                self.finish(&outcome, false, guest);
            }
        }
        worked
    }

    /// Closes the channels of detached disks whose last command has ended.
    #[inline]
    pub fn settle(&mut self) {
        if !self.detached.is_empty() {
            self.detached.retain(|channel| channel.in_flight() > 0);
        }
    }

    /// Closes all channels. No command is in flight.
    pub fn close(&mut self) {
        self.targets.fill_with(|| None);
        (self.present, self.busy) = (0, 0);
        self.detached.clear();
    }
}

/// Completes a command that has transferred `moved` bytes and may have written to `filled` bytes of its data-in buffers.
///
/// An answer without sense data leaves the place of the sense data unwritten (two of the guest's cache lines), but the used
/// length includes that place, because data follows it. Linux's driver reads neither that place nor the length.
#[cold]
fn complete(
    head: u16,
    answer: &(impl IntoBytes + Immutable),
    (moved, filled): (u32, u32),
    lengths: Lengths,
    guest: &mut GuestQueue,
) {
    guest.sgs.put_first(head, answer);
    step(Step::Answered);
    let touched = |_| 0..ANSWER + filled.min(lengths.data_in);
    guest.complete(head, ANSWER + moved.min(lengths.data_in), touched);
}

/// A part of a list. If `len` is 0, the empty list, for any offset.
#[inline]
fn part(all: Sgl, offset: u32, len: u32) -> Sgl {
    if len == 0 { Sgl::EMPTY } else { all.slice(offset, len) }
}

/// Fills a command's scatter list and returns it: the place of the answer, the data-in buffers, the data-out buffers.
#[inline]
fn place(chain: &Chain, mut list: List<'_>) -> Result<(Lengths, Sgl), Unanswerable> {
    let mut push =
        |pieces: &[Piece]| list.extend(pieces.iter().map(|p| (p.addr, p.len))).map_err(|_| Unanswerable);
    let data_in = push(chain.writable())?.checked_sub(ANSWER).ok_or(Unanswerable)?;
    let readable = chain.readable();
    let data_out = if readable.is_empty() { 0 } else { push(readable)? };
    list.note(data_in);
    Ok((Lengths { data_in, data_out }, list.sgl()))
}
