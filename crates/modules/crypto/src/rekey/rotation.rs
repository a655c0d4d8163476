//! A rotation under way. Its background task runs in reactor context; the other methods in control context.
//!
//! The task encrypts one zone at a time. While it does, no request for blocks of the zone is under way on any channel
//! (`Bdev::exclude`); requests for other blocks go on. The steps of a zone are in a future of their own, which runs to its end
//! also when the task moves to another reactor or ends: otherwise requests would come to a zone that is half written.

use super::worker::Worker;
use super::{Config, Error, Journal, JournalError, Progress, State, journal};
use crate::Crypto;
use crate::epoch::{Epoch, Next};
use crate::part::Part;
use aryk_bdev::{AsyncChannel, Base, Bdev, Blocks, Env, Lba, Op, OpenError, Status};
use aryk_crash_point::{Step, step};
use aryk_dma::{Buffer, PAGE};
use aryk_reactor::{BackgroundTask, Budget, Cx, Local, Nanos, Turns};
use futures_channel::oneshot;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::Poll;
use std::time::Duration;

/// Processor time of a turn: the task itself only sends requests, to the base and to the thread of the rotation.
const BUDGET: Budget = Budget { turn: Duration::from_micros(100) };

/// The interval in which a task that keeps to its limit looks whether it is to stop, and a step whether the disk is removed.
const NAP: Duration = Duration::from_millis(100);

/// The pauses after writes of a zone that fail, each before the next attempt. Requests for the zone wait in the meantime.
const PAUSES: [Duration; 5] = [pause(100), pause(200), pause(400), pause(800), pause(1600)];

/// The time that requests in flight have when the disk is removed, before they are aborted: as that of the disk's channels.
const REMOVAL_GRACE: Duration = pause(10_000);

/// Shorter in tests, which do not wait for a base to recover.
const fn pause(ms: u64) -> Duration {
    Duration::from_millis(if cfg!(test) { ms / 100 } else { ms })
}

/// A rotation: see the file's head.
pub(crate) struct Rotation {
    base: Arc<Base>,
    part: Part,
    epoch: Arc<Epoch>,
    worker: Worker,
    /// The encrypted disk.
    bdev: OnceLock<Weak<Bdev>>,
    current: Mutex<Current>,
    /// The task that runs, or the last one.
    task: Mutex<Option<BackgroundTask>>,
}

struct Current {
    state: State,
    wants_stop: bool,
    /// The disk is being removed: the rotation never runs again.
    is_closed: bool,
    bytes_per_second: u64,
    /// The journal may hold a zone that must be written before the rotation goes on.
    is_pending: bool,
    /// An attempt was made to write the zone that the journal held when the disk was created.
    is_recovered: bool,
    /// Callers that wait for the end.
    waiting: Vec<oneshot::Sender<State>>,
    /// Openers of the disk that wait for `is_recovered`.
    preparing: Vec<oneshot::Sender<()>>,
}

impl std::fmt::Debug for Rotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rotation").field("base", &self.base).finish_non_exhaustive()
    }
}

impl Rotation {
    /// The rotation of `crypto` whose state the journal has. It does not run yet.
    pub fn new(
        crypto: &Crypto,
        epoch: Arc<Epoch>,
        journal: Journal,
        bytes_per_second: u64,
    ) -> Result<Arc<Self>, Error> {
        let is_pending = journal.zone_end().is_some();
        let current = Current {
            state: if journal.is_complete() { State::Complete } else { State::Stopped },
            wants_stop: false,
            is_closed: false,
            bytes_per_second,
            is_pending,
            is_recovered: !is_pending,
            waiting: Vec::new(),
            preparing: Vec::new(),
        };
        Ok(Arc::new(Self {
            base: Arc::clone(&crypto.base),
            part: crypto.part,
            epoch,
            worker: Worker::start(journal)?,
            bdev: OnceLock::new(),
            current: Mutex::new(current),
            task: Mutex::default(),
        }))
    }

    /// Sets the disk of the rotation, once.
    pub fn attach(&self, bdev: &Arc<Bdev>) {
        self.bdev.set(Arc::downgrade(bdev)).expect("a rotation has one disk");
    }

    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().expect("no one panics holding it")
    }

    fn next(&self) -> &Next {
        self.epoch.next.as_ref().expect("a rotation is between two keys")
    }

    /// Makes the rotation go on.
    pub fn run(self: &Arc<Self>, env: &Env, bytes_per_second: u64) -> Result<(), Error> {
        let mut current = self.lock();
        if current.is_closed {
            let bdev = self.bdev.get().and_then(Weak::upgrade);
            return Err(super::removed(bdev.as_ref().map_or("the disk", |bdev| bdev.name())));
        }
        current.bytes_per_second = bytes_per_second;
        current.wants_stop = false;
        self.start(current, env)
    }

    /// Writes the zone again that the journal holds, if it holds one, and stops.
    pub fn recover(self: &Arc<Self>, env: &Env) -> Result<(), Error> {
        let mut current = self.lock();
        if !current.is_pending {
            return Ok(());
        }
        current.wants_stop = true;
        self.start(current, env)
    }

    fn start(self: &Arc<Self>, mut current: MutexGuard<'_, Current>, env: &Env) -> Result<(), Error> {
        if matches!(current.state, State::Running | State::Complete) {
            return Ok(());
        }
        if env.reactors().find_least_loaded(None).is_none() {
            return Err(Error::NoReactor);
        }
        current.state = State::Running;
        // The start waits for room in the reactor's mailbox, and the reactor may wait for this lock.
        drop(current);
        let rotation = Arc::downgrade(self);
        let start = move |turns| {
            let rotation = rotation.upgrade();
            async move {
                if let Some(rotation) = rotation {
                    rotation.work(turns).await;
                }
            }
        };
        let name = format!("rekey {}", self.base.bdev().name());
        // No other task is started before this one has ended, and so before it is stored here.
        let mut task = self.task.lock().expect("no one panics holding it");
        *task = Some(env.background().spawn(&name, BUDGET, start));
        Ok(())
    }

    /// Stops the rotation for ever: the disk is being removed. Requests to the base are aborted after [`REMOVAL_GRACE`].
    pub async fn close(&self) {
        self.lock().is_closed = true;
        self.stop().await;
    }

    /// Stops the rotation after the zone in work, and waits for that.
    pub async fn stop(&self) {
        self.lock().wants_stop = true;
        self.ended().await;
    }

    /// Waits until the rotation does not run.
    pub async fn ended(&self) -> State {
        let wait = {
            let mut current = self.lock();
            if current.state != State::Running {
                return current.state.clone();
            }
            let (sender, wait) = oneshot::channel();
            current.waiting.retain(|waiting| !waiting.is_canceled());
            current.waiting.push(sender);
            wait
        };
        wait.await.unwrap_or_else(|_| self.lock().state.clone())
    }

    /// Waits until an attempt was made to write the zone that the journal held when the disk was created.
    pub async fn recovered(&self) {
        let wait = {
            let mut current = self.lock();
            if current.is_recovered {
                return;
            }
            let (sender, wait) = oneshot::channel();
            current.preparing.retain(|waiting| !waiting.is_canceled());
            current.preparing.push(sender);
            wait
        };
        // The sender is dropped together with the rotation only.
        let _ = wait.await;
    }

    pub fn progress(&self) -> Progress {
        let bdev = self.bdev.get().and_then(Weak::upgrade);
        let blocks = bdev.map_or(Blocks::ZERO, |bdev| bdev.blocks());
        let (done, state) = (Blocks(self.next().position().0).min(blocks), self.lock().state.clone());
        // What the journal holds at first is being written, and no request is served before.
        let unavailable = self.next().broken().filter(|_| self.lock().is_recovered);
        Progress { done, blocks, state, unavailable }
    }

    /// The background task.
    async fn work(self: Arc<Self>, mut turns: Turns) {
        loop {
            let state = self.rotate(&mut turns).await;
            if self.ends_in(&state) {
                break;
            }
        }
        self.attempted();
    }

    /// Ends the run in a state, and returns true, unless the rotation has stopped and was to go on before it said so.
    fn ends_in(&self, state: &State) -> bool {
        let mut current = self.lock();
        if *state == State::Stopped && !current.wants_stop {
            return false;
        }
        current.state = state.clone();
        for waiting in current.waiting.drain(..) {
            // The caller may have stopped waiting.
            let _ = waiting.send(state.clone());
        }
        true
    }

    /// An attempt to write the zone in the journal was made: openers of the disk go on.
    fn attempted(&self) {
        let mut current = self.lock();
        current.is_recovered = true;
        for waiting in current.preparing.drain(..) {
            // The opener may have stopped waiting.
            let _ = waiting.send(());
        }
    }

    async fn rotate(self: &Arc<Self>, turns: &mut Turns) -> State {
        let channel = match self.open(turns).await {
            Ok(channel) => Rc::new(channel),
            Err(error) => return State::Failed(format!("cannot open the base disk: {error}")),
        };
        let state = self.rotate_on(&channel, turns).await;
        // The caller of `stop` may need the base for another disk.
        if let Ok(channel) = Rc::try_unwrap(channel) {
            channel.close().await;
        }
        state
    }

    async fn rotate_on(self: &Arc<Self>, channel: &Rc<AsyncChannel>, turns: &mut Turns) -> State {
        loop {
            turns.next().await;
            let (is_pending, wants_stop) = {
                let current = self.lock();
                (current.is_pending, current.wants_stop)
            };
            if wants_stop && !is_pending {
                return State::Stopped;
            }
            let begun = now(turns.local()).await;
            let (done, wait) = oneshot::channel();
            let (this, channel, local) = (Arc::clone(self), Rc::clone(channel), turns.local().clone());
            let steps = async move {
                let outcome = this.watched_step(&channel, &local).await;
                // Before the report: while the channel is open, no other reactor continues the rotation.
                drop(channel);
                let _ = done.send(outcome);
            };
            turns.local().spawn(steps).detach();
            match wait.await {
                Ok(Ok(Some(bytes))) => {
                    self.attempted();
                    self.pace(bytes, begun, turns.local()).await;
                }
                Ok(Ok(None)) => return State::Complete,
                Ok(Err(why)) => return State::Failed(why),
                Err(_) => return State::Failed("the reactor has ended".to_owned()),
            }
        }
    }

    async fn open(&self, turns: &Turns) -> Result<AsyncChannel, OpenError> {
        let (local, thread, base) = (turns.local(), turns.thread(), Arc::clone(&self.base));
        let reactor = local.with(|cx: &mut Cx| cx.handle().clone()).await;
        base.prepare(&reactor).await?;
        local.with(move |cx: &mut Cx| base.open_async_channel(thread, cx)).await
    }

    /// Waits until so many bytes may have been encrypted again since `begun`.
    async fn pace(&self, bytes: u64, begun: Nanos, local: &Local) {
        loop {
            let (limit, wants_stop) = {
                let current = self.lock();
                (current.bytes_per_second, current.wants_stop)
            };
            if limit == 0 || wants_stop {
                return;
            }
            let due = Duration::from_secs_f64(bytes as f64 / limit as f64);
            let rest = due.saturating_sub(now(local).await.since(begun));
            if rest.is_zero() {
                return;
            }
            local.sleep(rest.min(NAP)).await;
        }
    }

    /// A step, whose requests are aborted if the base holds them when the disk is being removed.
    async fn watched_step(&self, channel: &AsyncChannel, local: &Local) -> Result<Option<u64>, String> {
        let mut step = pin!(self.step(channel, local));
        let mut closed: Option<Nanos> = None;
        loop {
            let mut nap = pin!(local.sleep(NAP));
            let outcome = poll_fn(|cx| match step.as_mut().poll(cx) {
                Poll::Ready(outcome) => Poll::Ready(Some(outcome)),
                Poll::Pending => nap.as_mut().poll(cx).map(|()| None),
            });
            if let Some(outcome) = outcome.await {
                return outcome;
            }
            if self.lock().is_closed {
                let now = now(local).await;
                // Each time: a request after one that was aborted may be held as well.
                if now.since(*closed.get_or_insert(now)) >= REMOVAL_GRACE {
                    channel.abort_all();
                }
            }
        }
    }

    /// Encrypts the next zone again, or writes the zone that the journal holds. Returns its bytes; `None` if all zones are done.
    async fn step(&self, channel: &AsyncChannel, local: &Local) -> Result<Option<u64>, String> {
        let Some(bdev) = self.bdev.get().and_then(Weak::upgrade) else {
            return Err("the disk was removed".to_owned());
        };
        let position = self.next().position();
        if position == Lba::MAX {
            return Ok(None);
        }
        let block_size = self.epoch.cipher.layout.block_size;
        let zone = journal::zone_blocks(block_size);
        if self.lock().is_pending {
            let _exclusion = bdev.exclude(position..position + zone, local).await;
            return self.write_pending(channel, &bdev, local).await.map(Some);
        }
        let end = (position + zone).min(Lba::ZERO + bdev.blocks());
        if end <= position {
            // The disk may grow at any time: until the position is beyond all blocks, requests for new blocks wait.
            let _exclusion = bdev.exclude(position..Lba::MAX, local).await;
            if position < Lba::ZERO + bdev.blocks() {
                return Ok(Some(0));
            }
            let advanced = self.worker.run(|journal| journal.advance(Lba::MAX)).await;
            self.certain(advanced, Lba::MAX)?;
            self.next().advance(Lba::MAX);
            return Ok(None);
        }
        let _exclusion = bdev.exclude(position..end, local).await;
        if end > Lba::ZERO + bdev.blocks() {
            // The disk has become smaller.
            return Ok(Some(0));
        }
        let base = self.base.bdev();
        if base.device().is_read_only() || !base.device().ops().contains(Op::Write) {
            return Err(format!("'{}' is read-only", base.name()));
        }
        let blocks = end - position;
        let bytes = blocks.to_bytes(block_size).0;
        let buffer = Buffer::new(bytes as usize, PAGE as usize);
        let (lba, count) = self.part.on_base(position, blocks);
        let read = channel.read(lba, count, buffer).await;
        let buffer = read.map_err(|status| self.failed("read", lba, count, status))?;
        let buffer = self.record(position, buffer, end).await?;
        step(Step::RekeyRecorded);
        self.write(channel, &bdev, local, (position, blocks, buffer)).await?;
        Ok(Some(bytes))
    }

    /// Encrypts the data of a zone, which ends at `end`, with the new key, and stores it in the journal.
    async fn record(&self, position: Lba, mut buffer: Buffer, end: Lba) -> Result<Buffer, String> {
        let epoch = Arc::clone(&self.epoch);
        let job = move |journal: &mut Journal| {
            let next = epoch.next.as_ref().expect("a rotation is between two keys");
            let recorded = journal.record(position, buffer.bytes_mut(), &epoch.cipher, &next.cipher);
            recorded.map(|()| buffer)
        };
        let recorded = self.worker.run(job).await;
        self.certain(recorded, end)
    }

    /// If a change of the journal failed so that its state is unknown, requests for the blocks from the position to `end` fail.
    fn certain<R>(&self, changed: Result<R, (JournalError, bool)>, end: Lba) -> Result<R, String> {
        changed.map_err(|(error, is_uncertain)| {
            if is_uncertain {
                self.broke(end);
            }
            error.to_string()
        })
    }

    /// Writes the zone that the journal holds, if it holds one. Returns its bytes.
    async fn write_pending(&self, channel: &AsyncChannel, bdev: &Bdev, local: &Local) -> Result<u64, String> {
        let pending = self.worker.run(Journal::pending).await;
        let Some(zone) = pending.map_err(|error: JournalError| error.to_string())? else {
            // No block of the zone was overwritten.
            self.next().advance(self.next().position());
            self.lock().is_pending = false;
            return Ok(0);
        };
        let bytes = zone.2.len() as u64;
        self.write(channel, bdev, local, zone).await?;
        Ok(bytes)
    }

    /// Writes a zone that the journal holds to the base, and moves the position to its end.
    async fn write(
        &self,
        channel: &AsyncChannel,
        bdev: &Bdev,
        local: &Local,
        (lba, blocks, mut buffer): (Lba, Blocks, Buffer),
    ) -> Result<(), String> {
        let end = lba + blocks;
        let mut pauses = PAUSES.iter();
        while let Err(why) = self.write_once(channel, bdev, lba, blocks, buffer).await {
            let is_over = bdev.is_removing() || self.lock().is_closed;
            let Some(&pause) = pauses.next().filter(|_| !is_over) else {
                self.broke(end);
                return Err(why);
            };
            local.sleep(pause).await;
            // The failed write has dropped its buffer.
            let pending = self.worker.run(Journal::pending).await.map_err(|error| (error, true));
            let pending = self.certain(pending, end)?;
            (.., buffer) = pending.expect("the journal holds the zone until it advances");
        }
        let advanced = self.worker.run(move |journal| journal.advance(end)).await;
        self.certain(advanced, end)?;
        step(Step::RekeyAdvanced);
        self.next().advance(end);
        self.lock().is_pending = false;
        Ok(())
    }

    /// Writes the blocks of a zone that the disk still has to the base, and flushes it.
    async fn write_once(
        &self,
        channel: &AsyncChannel,
        bdev: &Bdev,
        lba: Lba,
        blocks: Blocks,
        mut buffer: Buffer,
    ) -> Result<(), String> {
        // The disk may have become smaller since the journal has the zone.
        let left = blocks.min(bdev.blocks().saturating_sub(lba - Lba::ZERO));
        if left == Blocks::ZERO {
            return Ok(());
        }
        if left < blocks {
            let bytes = left.to_bytes(self.epoch.cipher.layout.block_size).0 as usize;
            let mut shorter = Buffer::new(bytes, PAGE as usize);
            shorter.bytes_mut().copy_from_slice(&buffer.bytes()[..bytes]);
            buffer = shorter;
        }
        let (lba, blocks) = self.part.on_base(lba, left);
        let mut written = channel.write(lba, blocks, buffer).await.map(drop);
        step(Step::RekeyWritten);
        if written.is_ok() && self.base.bdev().device().ops().contains(Op::Flush) {
            written = channel.command(Op::Flush, Lba::ZERO, Blocks::ZERO).await;
        }
        written.map_err(|status| self.failed("write", lba, blocks, status))
    }

    /// It is unknown what the blocks from the position to `end` have, or what a crash would make of them.
    fn broke(&self, end: Lba) {
        self.next().break_zone(end);
        self.lock().is_pending = true;
    }

    fn failed(&self, verb: &str, lba: Lba, blocks: Blocks, status: Status) -> String {
        let name = self.base.bdev().name();
        format!("cannot {verb} {} blocks from LBA {} on of '{name}': {status:?}", blocks.0, lba.0)
    }
}

/// The time of the reactor.
async fn now(local: &Local) -> Nanos {
    local.with(|cx: &mut Cx| cx.now()).await
}

impl Crypto {
    /// Adds the rotation whose state the journal has to a disk that is being created.
    pub(crate) fn with_rotation(mut self, config: Config) -> Result<Self, Error> {
        let (epoch, rotation) = super::prepare(&self, self.epochs.last().cipher.clone(), config)?;
        self.epochs = crate::epoch::Epochs::new(epoch);
        self.rotation = Mutex::new(Some(rotation));
        Ok(self)
    }
}
