//! A reactor's end of a client's link, which the channels of all disks of the client share there. Reactor context.
//!
//! A request needs no allocation, no lock and no system call here: it is an entry of a table and of the ring. It ends when its
//! result comes, also when its submitter no longer needs it. Only when the disk is removed, a channel leaves its requests to
//! librbd, whose gate then keeps librbd from their memory: they are aborted, and their results say
//! nothing. Requests for which the budget has no room wait
//! here, those of each channel in their order; the end of a request lets others go, so nothing polls.

mod refused;

use crate::budget::{Budget, Share, Wait, cost_of};
use crate::connection::Connection;
use crate::disk::Disk;
use crate::errors::{Class, errno};
use crate::link::{Command, Link};
use aryk_bdev::{Channel, Completion, Failure, Io, Op, Status, Tag};
use aryk_dma::Sgl;
use aryk_librbd::{Gate, Image, NOTHING, Operation, Request as Call};
use aryk_reactor::{Armed, Cx, Driver, DriverRef, Nanos, RootId};
use aryk_slots::{Key, Slots};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Room for commands in the ring. More of them wait here.
pub(crate) const COMMANDS: u32 = 4096;
/// The result of a change to an image that is read-only, or whose lock another client keeps.
const REFUSED: i64 = -(Errno::ROFS.raw_os_error() as i64);
/// Requests for which a link has room without an allocation.
const REQUESTS: u32 = 256;

#[derive(Debug)]
struct Request {
    io: Io,
    channel: Key,
    /// The write of a durable write has ended, and librbd has the flush.
    is_flushing: bool,
    /// The request was aborted, and its channel may be closed.
    is_left: bool,
    /// The submitter no longer needs it, and its memory may be replaced: it does not get its data from there again.
    is_aborted: bool,
    /// When librbd refused it for the first time.
    refused: Option<Nanos>,
}

struct Opened {
    root: RootId,
    disk: Arc<Disk>,
    block_size: u32,
    /// The number of the channel's last request among the link's commands.
    last: u64,
    completions: Vec<Completion>,
    share: Share,
    /// Requests for which the budget has no room.
    waiting: VecDeque<Key>,
    /// The channel stands in the line for the common part of the budget.
    is_in_line: bool,
    /// Requests that librbd has refused, and when to try them again.
    refused: VecDeque<(Nanos, Key)>,
    gate: Arc<Gate>,
    /// The gate is closed: requests are aborted as soon as it is quiet, and new ones at once.
    leaves: bool,
}

pub(crate) struct LinkDriver {
    link: Link,
    name: String,
    requests: Slots<Request>,
    /// Number of requests that are left to librbd.
    left: u32,
    channels: Slots<Opened>,
    /// Commands for which the ring had no room.
    overflow: VecDeque<Command>,
    /// Number of commands that were sent, with those in `overflow`.
    sent: u64,
    budget: Budget,
    /// Channels whose first waiting request needs the common part of the budget.
    line: VecDeque<Key>,
    /// Results that were taken; those before `next` are processed.
    results: Vec<(u64, i64)>,
    next: usize,
    has_new: bool,
    /// Channels that leave their requests have some to abort.
    has_leavers: bool,
    is_armed: bool,
}

impl LinkDriver {
    fn new(link: Link, name: String) -> Self {
        Self {
            link,
            name,
            requests: Slots::new(REQUESTS),
            left: 0,
            channels: Slots::new(8),
            overflow: VecDeque::new(),
            sent: 0,
            budget: Budget::default(),
            line: VecDeque::new(),
            results: Vec::with_capacity(REQUESTS as usize),
            next: 0,
            has_new: false,
            has_leavers: false,
            is_armed: false,
        }
    }

    fn send(&mut self, command: Command) {
        self.has_new = true;
        self.sent += 1;
        if !self.overflow.is_empty() {
            return self.overflow.push_back(command);
        }
        if let Err(command) = self.link.push(command) {
            self.overflow.push_back(command);
        }
    }

    fn open(&mut self, disk: &Arc<Disk>, image: Arc<Image>, root: RootId) -> Key {
        let gate = Arc::<Gate>::default();
        let key = self.channels.add(Opened {
            root,
            disk: Arc::clone(disk),
            block_size: disk.block_size,
            last: 0,
            completions: Vec::new(),
            share: Share::default(),
            waiting: VecDeque::new(),
            is_in_line: false,
            refused: VecDeque::new(),
            gate: Arc::clone(&gate),
            leaves: false,
        });
        self.send(Command::Attach(key.index(), image, gate));
        key
    }

    fn close(&mut self, channel: Key) {
        let is_idle = self.requests.iter().all(|(_, request)| request.channel != channel || request.is_left);
        assert!(is_idle, "a channel is closed when nothing is in flight");
        self.channels.remove(channel);
        self.line.retain(|of| *of != channel);
        self.send(Command::Detach(channel.index()));
    }

    #[inline]
    fn submit(&mut self, channel: Key, io: &Io) {
        let opened = self.channels.get_mut(channel).expect("an open channel");
        let key = self.requests.add(Request {
            io: *io,
            channel,
            is_flushing: false,
            is_left: false,
            is_aborted: false,
            refused: None,
        });
        if opened.leaves {
            opened.waiting.push_back(key);
            self.has_leavers = true;
            return;
        }
        let may_share = self.line.is_empty();
        if opened.waiting.is_empty()
            && self.budget.try_take(&mut opened.share, cost_of(io.data.len()), may_share).is_ok()
        {
            return self.start(key);
        }
        opened.waiting.push_back(key);
        self.start_waiting_of(channel);
    }

    /// Gives a request to librbd.
    #[inline]
    fn start(&mut self, key: Key) {
        let Request { io, channel, is_flushing, .. } =
            *self.requests.get(key).expect("the caller has just added or found it");
        let opened = self.channels.get_mut(channel).expect("a channel outlives its requests");
        opened.last = self.sent + 1;
        let block_size = opened.block_size;
        let len = || io.blocks.to_bytes(block_size).0;
        let operation = match io.op {
            _ if is_flushing => Operation::Flush,
            Op::Read => Operation::Read,
            Op::Write => Operation::Write,
            Op::Flush => Operation::Flush,
            Op::Unmap => Operation::Discard(len()),
            Op::WriteZeroes => Operation::WriteZeroes { len: len(), allocate: !io.may_unmap },
            Op::CompareAndWrite => Operation::CompareAndWrite,
            Op::Compare | Op::Copy => unreachable!("the block layer builds it from others"),
        };
        let (offset, data) = match is_flushing {
            true => (0, Sgl::EMPTY),
            false => (io.lba.to_bytes(block_size).0, io.data),
        };
        let call = Call { operation, offset, data, token: key.raw() };
        self.send(Command::Submit(channel.index(), call));
    }

    /// Starts the first waiting request of a channel, if the budget has room.
    fn start_first(&mut self, channel: Key, may_share: bool) -> Option<Result<(), Wait>> {
        let opened = self.channels.get_mut(channel).expect("the caller names an open channel");
        let key = *opened.waiting.front()?;
        let cost = cost_of(self.requests.get(key).expect("it waits").io.data.len());
        let taken = self.budget.try_take(&mut opened.share, cost, may_share);
        if taken.is_ok() {
            opened.waiting.pop_front();
            self.start(key);
        }
        Some(taken)
    }

    /// Starts the waiting requests of a channel for which there is room now. If others need the common part, the channel stands
    /// in line.
    fn start_waiting_of(&mut self, channel: Key) {
        loop {
            match self.start_first(channel, self.line.is_empty()) {
                Some(Ok(())) => {}
                None | Some(Err(Wait::Own)) => return,
                Some(Err(Wait::Common)) => break,
            }
        }
        let opened = self.channels.get_mut(channel).expect("just used");
        if !std::mem::replace(&mut opened.is_in_line, true) {
            self.line.push_back(channel);
        }
    }

    /// Starts waiting requests in the order of the line, one of each channel, as long as the common part has room.
    fn start_line(&mut self) {
        while let Some(&channel) = self.line.front() {
            let started = self.start_first(channel, true);
            if started == Some(Err(Wait::Common)) {
                return;
            }
            self.line.pop_front();
            let opened = self.channels.get_mut(channel).expect("a channel leaves the line when it is closed");
            opened.is_in_line = started == Some(Ok(())) && !opened.waiting.is_empty();
            if opened.is_in_line {
                self.line.push_back(channel);
            }
        }
    }

    /// Completes the waiting requests of a channel with this tag.
    fn abort(&mut self, channel: Key, tag: Tag, cx: &mut Cx) {
        self.abort_refused(channel, tag, cx);
        let requests = &mut self.requests;
        let opened = self.channels.get_mut(channel).expect("an open channel");
        let before = opened.waiting.len();
        opened.waiting.retain(|key| {
            let is_kept = requests.get(*key).expect("it waits").io.tag != tag;
            if !is_kept {
                requests.remove(*key);
            }
            is_kept
        });
        let aborted = before - opened.waiting.len();
        if aborted > 0 {
            let completion = Completion { tag, status: Status::Aborted };
            opened.completions.extend(std::iter::repeat_n(completion, aborted));
            cx.wake(opened.root);
            // The request that is the first now may have room.
            self.start_waiting_of(channel);
        }
    }

    /// Whether librbd has all requests of a channel that have this tag. It has copied the data of writes when its call returns,
    /// and writes the data of reads to addresses.
    fn has_passed_on(&self, channel: Key, tag: Tag) -> bool {
        let opened = self.channels.get(channel).expect("an open channel");
        let waits = |key: &Key| self.requests.get(*key).is_some_and(|request| request.io.tag == tag);
        self.link.doorbell.has_done(opened.last) && !opened.waiting.iter().any(waits)
    }

    /// Leaves the requests of a channel to librbd.
    fn leave(&mut self, channel: Key) {
        let opened = self.channels.get_mut(channel).expect("an open channel");
        opened.gate.close();
        opened.leaves = true;
        self.has_leavers = true;
    }

    /// Aborts the requests of channels that leave theirs, where no thread uses their memory any more.
    #[cold]
    fn abort_left(&mut self, cx: &mut Cx) {
        let mut is_waiting = false;
        for (key, opened) in self.channels.iter_mut().filter(|(_, opened)| opened.leaves) {
            if !opened.gate.is_quiet() {
                is_waiting = true;
                continue;
            }
            let (share, budget) = (&mut opened.share, &mut self.budget);
            for waiting in opened.waiting.drain(..) {
                let Request { io, .. } = self.requests.remove(waiting).expect("it waits");
                opened.completions.push(Completion { tag: io.tag, status: Status::Aborted });
            }
            for (_, refused) in opened.refused.drain(..) {
                let Request { io, .. } = self.requests.remove(refused).expect("it waits");
                budget.give_back(share, cost_of(io.data.len()));
                opened.completions.push(Completion { tag: io.tag, status: Status::Aborted });
            }
            for (_, request) in self.requests.iter_mut().filter(|(_, r)| r.channel == key && !r.is_left) {
                request.is_left = true;
                self.left += 1;
                budget.give_back(share, cost_of(request.io.data.len()));
                opened.completions.push(Completion { tag: request.io.tag, status: Status::Aborted });
            }
            cx.wake(opened.root);
        }
        self.has_leavers = is_waiting;
        self.start_line();
    }

    #[inline]
    fn complete(&mut self, token: u64, result: i64, cx: &mut Cx) {
        let key = Key::from_raw(token);
        if token == NOTHING {
            return;
        }
        let request = self.requests.get_mut(key).expect("librbd ends each request once");
        if request.is_left {
            self.requests.remove(key);
            self.left -= 1;
            return;
        }
        if result == REFUSED && self.try_later(key, cx) {
            return;
        }
        let request = self.requests.get_mut(key).expect("just found");
        let is_whole = request.io.op != Op::Read || result == request.io.data.len().into();
        let status = if result >= 0 && is_whole { Status::Ok } else { self.fail(key, result) };
        let request = self.requests.get_mut(key).expect("just found");
        // A front-end whose guest has no flush asks for durability of reads, too.
        if request.io.fua && request.io.op.is_change() && status.is_ok() && !request.is_flushing {
            request.is_flushing = true;
            return self.start(key);
        }
        let Request { io, channel, .. } = self.requests.remove(key).expect("just found");
        let opened = self.channels.get_mut(channel).expect("a channel outlives its requests");
        if opened.completions.is_empty() {
            cx.wake(opened.root);
        }
        opened.completions.push(Completion { tag: io.tag, status });
        self.budget.give_back(&mut opened.share, cost_of(io.data.len()));
        if !opened.waiting.is_empty() {
            self.start_waiting_of(channel);
        }
        if !self.line.is_empty() {
            self.start_line();
        }
    }

    /// Records a failure, and returns what it means for the request.
    #[cold]
    fn fail(&self, key: Key, result: i64) -> Status {
        let Request { io, channel, is_aborted, .. } =
            self.requests.get(key).expect("the caller has found it");
        // It would have been tried again: the disk has not failed.
        if *is_aborted && result == REFUSED {
            return Status::Aborted;
        }
        // A read that librbd has cut off at the end of an image that has shrunk.
        let errno = if result >= 0 { Errno::INVAL } else { errno(result) };
        if errno == Errno::ILSEQ && io.op == Op::CompareAndWrite {
            return Status::Miscompare;
        }
        let class = Class::of(errno);
        let disk = &self.channels.get(*channel).expect("a channel outlives its requests").disk;
        disk.failed(class, Failure::now(io.op, io.lba, io.blocks, errno.raw_os_error()));
        class.status()
    }
}

impl Driver for LinkDriver {
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32 {
        if std::mem::take(&mut self.is_armed) {
            self.link.results.disarm();
        }
        if self.next == self.results.len() {
            self.results.clear();
            self.next = 0;
            self.link.results.try_take(&mut self.results);
        }
        let mut count = 0;
        while count < budget
            && let Some(&(token, result)) = self.results.get(self.next)
        {
            self.next += 1;
            count += 1;
            self.complete(token, result, cx);
        }
        if self.has_leavers {
            self.abort_left(cx);
        }
        count
    }

    fn flush(&mut self, cx: &mut Cx) {
        while let Some(command) = self.overflow.pop_front() {
            self.has_new = true;
            if let Err(command) = self.link.push(command) {
                self.overflow.push_front(command);
                break;
            }
        }
        if std::mem::take(&mut self.has_new) {
            self.link.doorbell.ring(cx);
        }
    }

    fn arm(&mut self, _: &mut Cx) -> Armed {
        if self.next < self.results.len() || !self.overflow.is_empty() || !self.link.results.arm() {
            return Armed::Busy;
        }
        self.is_armed = true;
        Armed::Yes
    }

    fn in_flight(&self) -> u32 {
        self.requests.len() - self.left
    }

    fn name(&self) -> String {
        format!("rbd {}", self.name)
    }
}

/// One opener's use of a link. The reactor keeps the link as long as it has channels.
pub(crate) struct RbdChannel {
    driver: DriverRef<LinkDriver>,
    /// The channel's key in the driver.
    key: Key,
}

impl RbdChannel {
    /// Opens a channel of a disk in `image`.
    ///
    /// # Errors
    /// The reactor has no link, and cannot get one.
    pub fn open(
        connection: &Connection,
        disk: &Arc<Disk>,
        image: Arc<Image>,
        root: RootId,
        cx: &mut Cx,
    ) -> io::Result<Self> {
        let driver = cx.driver(connection.key, |id, cx| {
            let link = connection.take_link(cx.handle())?;
            cx.watch_driver(link.results.descriptor()?, id)?;
            Ok::<_, io::Error>(LinkDriver::new(link, connection.name().to_owned()))
        })?;
        let key = driver.activate(cx).open(disk, image, root);
        Ok(Self { driver, key })
    }
}

impl Channel for RbdChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.driver.activate(cx).submit(self.key, io);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let mut driver = self.driver.activate(cx);
        driver.abort(self.key, tag, cx);
        // A request that librbd has may take effect as long as librbd has it, so the disk's later requests must wait for its end.
        // A disk that is being removed has no later requests.
        let opened = driver.channels.get(self.key).expect("an open channel");
        if !opened.leaves && opened.disk.is_being_removed() {
            driver.leave(self.key);
            driver.abort_left(cx);
        }
    }

    fn is_revocable(&self, tag: Tag) -> bool {
        self.driver.borrow().has_passed_on(self.key, tag)
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut driver = self.driver.borrow_mut();
        let opened = driver.channels.get_mut(self.key).expect("an open channel");
        if out.is_empty() {
            std::mem::swap(out, &mut opened.completions);
        } else {
            out.append(&mut opened.completions);
        }
        if !opened.refused.is_empty() {
            drop(driver);
            let now = cx.now();
            self.driver.activate(cx).retry(self.key, now);
        }
    }
}

impl Drop for RbdChannel {
    fn drop(&mut self) {
        self.driver.borrow_mut().close(self.key);
    }
}
