//! The commands of one request queue: from the guest's ring to a target's channel and back. Reactor context.
//!
//! A command is named by the head of its descriptor chain, all the way: it is the slot of its scatter list, the tag of its
//! [`aryk_scsi::Request`], and the id of its used element. The guest's own tag is what task management knows it by.
//!
//! A disk that is taken away has its channel moved aside: what runs on it ends there, while the target's place may be taken
//! by another.

use crate::wire::{ANSWER, Answer, Command, Response, TARGETS, Verdict};
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

/// How long commands have to complete on a disk that is taken away, before they are aborted.
const DETACH_GRACE: Duration = Duration::from_secs(2);

/// Lengths of a command's data. Its list holds them: the list has the answer's place and all data, and `data_in` is stored
/// with it.
#[derive(Clone, Copy, Debug)]
struct Lengths {
    data_in: u32,
    data_out: u32,
}

impl Lengths {
    /// The lengths of the command in flight whose chain has this head.
    #[inline]
    fn of(head: u16, guest: &GuestQueue) -> Self {
        let data_in = guest.sgs.note_of(head);
        Self { data_in, data_out: guest.sgs.len_of(head) - ANSWER - data_in }
    }

    const fn all(self) -> u32 {
        self.data_in + self.data_out
    }
}

/// Commands and their targets.
pub(crate) struct Requests {
    /// One for each target.
    targets: Box<[Option<UnitChannel>]>,
    /// Those that have one, by bit.
    present: u8,
    /// Those of them that are not quiet, and maybe others.
    busy: u8,
    /// Disks that were taken away, and have commands still.
    leaving: Vec<UnitChannel>,
    /// Upper bound of chains' heads.
    depth: u16,
    outcomes: Vec<Outcome>,
    /// Commands are being aborted so that the queue can stop, and stay in flight.
    giving_up: bool,
}

/// A chain that has no place for its answer.
struct Unanswerable;

impl Requests {
    pub fn new(size: u16) -> Self {
        Self {
            targets: (0..TARGETS).map(|_| None).collect(),
            present: 0,
            busy: 0,
            leaving: Vec::new(),
            depth: size,
            outcomes: Vec::with_capacity(size.into()),
            giving_up: false,
        }
    }

    /// A target has a disk now.
    ///
    /// # Errors
    /// As [`UnitChannel::open`]; then it has none on this queue.
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

    /// A target has its disk no more. What comes from now on finds no target; what is received ends when the last command has.
    pub fn detach(&mut self, target: u8, guest: &GuestQueue, cx: &mut Cx) {
        let Some(channel) = self.targets[usize::from(target)].take() else { return };
        self.present &= !(1 << target);
        self.busy &= self.present;
        self.leaving.push(channel);
        let id = guest.id;
        cx.wake(id);
        cx.call_at(cx.now().after(DETACH_GRACE), move |cx| {
            if let Some(queue) = cx.root::<crate::queue::Queue>(id) {
                queue.borrow_mut().requests().0.abort_leaving(cx);
            }
        });
    }

    fn abort_leaving(&mut self, cx: &mut Cx) {
        self.leaving.iter_mut().for_each(|channel| channel.abort_all(cx));
    }

    /// Asks the disks that have the commands of those heads to give them up.
    pub fn abort_those(&mut self, is_meant: &dyn Fn(u16) -> bool, cx: &mut Cx) {
        let all = self.targets.iter_mut().flatten().chain(&mut self.leaving);
        all.for_each(|channel| channel.abort_those(is_meant, cx));
    }

    /// Asks the disks to give up what they have not completed.
    pub fn give_up(&mut self, guest: &GuestQueue, cx: &mut Cx) {
        let commands = guest.sgs.in_use();
        if commands > 0 {
            tracing::warn!(queue = guest.index, commands, "a disk is slow: commands are aborted");
        }
        self.giving_up = guest.keeps_in_flight;
        self.targets.iter_mut().flatten().for_each(|channel| channel.abort_all(cx));
        self.abort_leaving(cx);
    }

    /// Starts the command in `chain`.
    #[inline]
    pub fn start(&mut self, head: u16, chain: &mut Chain, guest: &mut GuestQueue, cx: &mut Cx) {
        let command = chain.take_header::<Command>(guest.sgs.memory());
        let Ok((lengths, all)) = place(chain, guest.sgs.begin(head)) else {
            guest.complete_unanswerable(head);
            return;
        };
        let Ok(Some(command)) = command else {
            self.refuse(head, Response::Failure, 0, guest);
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
        cx.trace(guest.traced(), Point::Submit, head.into());
        // The guest has written there, and when the command is over it is to be here.
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
            // A copy, for otherwise those of units that are there would have to lie in memory too.
            let outcome = answer_absent(&Request { ..request }, &[channel.nexus().unit()]);
            self.finish(&outcome, false, guest);
        }
    }

    #[cold]
    fn refuse(&self, head: u16, response: Response, filled: u32, guest: &mut GuestQueue) {
        let lengths = Lengths::of(head, guest);
        complete(head, &Verdict::without_status(response, lengths.all()), (0, filled), lengths, guest);
    }

    /// A command is over.
    #[cold]
    fn finish(&self, outcome: &Outcome, descriptors: bool, guest: &mut GuestQueue) {
        let head = outcome.tag;
        let lengths = Lengths::of(head, guest);
        let answer = Answer::new(outcome, lengths.all(), descriptors);
        complete(head, &answer, (outcome.moved, outcome.filled), lengths, guest);
    }

    /// Gives back what has ended; whether there was any.
    #[inline]
    pub fn take_outcomes(&mut self, guest: &mut GuestQueue, cx: &mut Cx) -> bool {
        let mut outcomes = std::mem::take(&mut self.outcomes);
        // All that a pending wake-up is about is looked at now; what the polls themselves send on may wake us again.
        let has_event = cx.clear_wake(guest.id);
        let (mut worked, mut left) = (false, if has_event { self.present } else { self.busy });
        while left != 0 {
            let target = left.trailing_zeros() as usize;
            left &= left - 1;
            let channel = self.targets[target].as_mut().expect("it is present");
            channel.poll(cx, &mut outcomes, |head, moved, cx| {
                worked = true;
                cx.trace(guest.traced(), Point::Complete, head.into());
                step(Step::Completed);
                let lengths = Lengths::of(head, guest);
                complete(head, &Verdict::good(lengths.all() - moved), (moved, moved), lengths, guest);
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
        if !self.leaving.is_empty() {
            worked |= self.take_leaving(&mut outcomes, guest, cx);
        }
        self.outcomes = outcomes;
        worked
    }

    /// Gives back what has ended in another way than a plain command that went well.
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

    /// The same of disks that were taken away, where what was given up has no target any more.
    #[cold]
    fn take_leaving(&mut self, outcomes: &mut Vec<Outcome>, guest: &mut GuestQueue, cx: &mut Cx) -> bool {
        for channel in &mut self.leaving {
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

    /// Lets go of disks whose last command has ended.
    #[inline]
    pub fn settle(&mut self) {
        if !self.leaving.is_empty() {
            self.leaving.retain(|channel| channel.in_flight() > 0);
        }
    }

    /// Lets go of all of them: nothing runs.
    pub fn close(&mut self) {
        self.targets.fill_with(|| None);
        (self.present, self.busy) = (0, 0);
        self.leaving.clear();
    }
}

/// Gives back a command that has moved so many bytes, and may have written to so many of where data goes to.
///
/// An answer without sense leaves the place for it as it is, two cache lines of the guest's, and the length counts that
/// place all the same: what comes behind it is data. Linux's driver looks neither there nor at the length.
#[inline]
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

/// Part of a list; nothing at its end is nothing.
#[inline]
fn part(all: Sgl, offset: u32, len: u32) -> Sgl {
    if len == 0 { Sgl::EMPTY } else { all.slice(offset, len) }
}

/// Fills a list, and gives it: the answer's place, where data goes to, where data comes from.
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
