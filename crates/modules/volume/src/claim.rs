//! The claim of a pool on a disk that other hosts reach: one daemon at a time opens the pool. Control context; [`Lease`] is read
//! in reactor context.
//!
//! The daemon writes its claim before it opens the pool, and again and again while the pool is open. It uses the disk only as
//! long as the latest of these *beats* is recent: for the time of a [`ClaimPace::lease`]. Then it submits nothing more, and
//! aborts what the disk has. Another daemon that finds a claim watches it for as much longer as a request may still take effect,
//! and takes it over if it does not change. A daemon that finds another one's claim in place of its own has lost the pool.
//!
//! Two daemons may take the same claim at the same time. A disk that compares and writes at once lets one of them succeed. On
//! another disk, each reads the claim, writes its own one, waits, and reads again: the last one that has written keeps it.
//! There, a daemon whose lease has ended takes its claim like any other.

use crate::part::BaseHold;
use crate::pool::lock;
use crate::visit::visit;
use crate::{Error, part};
use aryk_bdev::{AsyncChannel, Bdev, Blocks, Descriptor, Env, Lba, Status};
use aryk_dma::{Buffer, PAGE};
use aryk_log_limit::LogLimit;
use aryk_reactor::{Cx, Hold, Local};
use aryk_volume_store::{CLAIM_BYTES, CLAIM_PLACE, Claim, ClaimPace, Holder};
use futures_channel::oneshot;
use std::cell::Cell;
use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use uuid::Uuid;

/// Attempts to take a claim that others are taking too.
const ATTEMPTS: u32 = 3;

/// Whether a pool may use its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Right {
    Valid,
    /// Not before the next beat.
    Waits,
    /// Never again: another daemon has the pool, or this one has given it back.
    Lost,
}

/// Until when a pool may use its disk.
#[derive(Debug)]
pub(crate) struct Lease {
    /// A time, or one of the constants, which are earlier than all times.
    until: AtomicU64,
}

/// Another daemon has the pool.
const TAKEN_OVER: u64 = 0;
/// This daemon has given the pool back.
const GIVEN_BACK: u64 = 1;

impl Lease {
    /// Whether the disk may be used now.
    pub fn right(&self) -> Right {
        match self.until.load(Ordering::Acquire) {
            TAKEN_OVER | GIVEN_BACK => Right::Lost,
            until if now() < until => Right::Valid,
            _ => Right::Waits,
        }
    }

    /// Whether another daemon has the pool.
    pub fn is_taken_over(&self) -> bool {
        self.until.load(Ordering::Acquire) == TAKEN_OVER
    }

    /// Sets the end of the lease, and returns the one before.
    fn set(&self, until: u64) -> u64 {
        self.until.swap(until, Ordering::AcqRel)
    }
}

/// The time, in nanoseconds. It goes on while the host is suspended.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// The block of a disk that has the claim.
#[derive(Clone, Copy, Debug)]
struct Block {
    lba: Lba,
    bytes: u32,
    /// Whether the disk compares and writes it at once.
    is_atomic: bool,
}

impl Block {
    fn of(disk: &Bdev) -> Self {
        let (bytes, device) = (disk.geometry().block_size, disk.device());
        let atomic = device.limits().compare_and_write_max(device.ops());
        Self { lba: Lba(CLAIM_PLACE / u64::from(bytes)), bytes, is_atomic: atomic >= Blocks(1) }
    }

    async fn read(self, channel: &AsyncChannel) -> Result<Vec<u8>, Status> {
        let buffer = Buffer::new(self.bytes as usize, PAGE as usize);
        let buffer = channel.read(self.lba, Blocks(1), buffer).await?;
        Ok(buffer.bytes()[..self.bytes as usize].to_vec())
    }

    /// The bytes of the block with a claim.
    fn encode(self, claim: &Claim) -> Vec<u8> {
        let mut bytes = claim.encode().to_vec();
        bytes.resize(self.bytes as usize, 0);
        bytes
    }

    /// Writes `new` if the block has `old`.
    async fn swap(
        self,
        channel: &AsyncChannel,
        local: &Local,
        old: &[u8],
        new: &[u8],
        pace: &ClaimPace,
    ) -> Result<Swap, Status> {
        if self.is_atomic {
            let mut both = Buffer::new(2 * self.bytes as usize, PAGE as usize);
            both.write(0, old);
            both.write(old.len(), new);
            return match channel.compare_and_write(self.lba, Blocks(1), both).await {
                Ok(_) => Ok(Swap::Done),
                Err(Status::Miscompare) => Ok(Swap::Changed),
                Err(status) => Err(status),
            };
        }
        let end = now() + nanos(pace.hurry);
        if self.read(channel).await? != old {
            return Ok(Swap::Changed);
        }
        if now() >= end {
            return Ok(Swap::Late);
        }
        let mut buffer = Buffer::new(self.bytes as usize, PAGE as usize);
        buffer.write(0, new);
        let mut writing = pin!(channel.write(self.lba, Blocks(1), buffer));
        let mut timer = pin!(local.sleep(Duration::from_nanos(end.saturating_sub(now()))));
        let mut is_aborted = false;
        // A disk that has lost its connection must not submit the write again some time later.
        let written = poll_fn(|cx| {
            if !is_aborted && timer.as_mut().poll(cx).is_ready() {
                is_aborted = true;
                channel.abort_all();
            }
            writing.as_mut().poll(cx)
        })
        .await;
        match written {
            Ok(_) if now() < end => Ok(Swap::Done),
            Ok(_) | Err(Status::Aborted) => Ok(Swap::Late),
            Err(status) => Err(status),
        }
    }
}

/// How the replacement of a claim ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Swap {
    Done,
    /// The block has something else.
    Changed,
    /// It took so long that another daemon may have replaced the claim, or that the write may still take effect.
    Late,
}

/// Why a claim was not taken.
enum Refusal {
    Disk(Status),
    Held(Claim),
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self::Disk(status)
    }
}

const fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// Takes, renews and releases a claim, on a reactor.
#[derive(Clone)]
struct Taker {
    disk: String,
    block: Block,
    pool: Uuid,
    holder: Holder,
    pace: ClaimPace,
}

impl Taker {
    /// Waits until a claim that was not given back is, or has not changed for long enough. Returns the bytes that are there then.
    async fn watch(
        &self,
        channel: &AsyncChannel,
        local: &Local,
        seen: Vec<u8>,
        claim: &Claim,
    ) -> Result<Vec<u8>, Refusal> {
        let begin = now();
        let mut is_warned = false;
        while now() < begin + nanos(self.pace.watch) {
            local.sleep(self.pace.look).await;
            let found = self.block.read(channel).await?;
            if found != seen {
                return match Claim::parse(&found[..CLAIM_BYTES]) {
                    Some(claim) if claim.is_released => Ok(found),
                    Some(claim) => Err(Refusal::Held(claim)),
                    None => Err(Refusal::Held(claim.clone())),
                };
            }
            // The claim of a daemon that is alive changes before.
            if !is_warned && now() >= begin + nanos(self.pace.lease) {
                is_warned = true;
                tracing::warn!(
                    disk = self.disk,
                    host = claim.host,
                    pid = claim.pid,
                    seconds = self.pace.watch.as_secs(),
                    "a daemon has not given the pool on this disk back: it is taken over if its claim does not change for so long"
                );
            }
        }
        Ok(seen)
    }

    /// Takes the claim. Returns it, and the time before it was written.
    async fn take(&self, channel: &AsyncChannel, local: &Local) -> Result<(Claim, u64), Refusal> {
        let Self { block, pool, holder, pace, .. } = self;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let mut seen = block.read(channel).await?;
            if let Some(claim) = Claim::parse(&seen[..CLAIM_BYTES]).filter(|claim| !claim.is_released) {
                if claim.daemon != holder.daemon {
                    if !holder.has_outlived(&claim) {
                        seen = self.watch(channel, local, seen, &claim).await?;
                    }
                } else if claim.pool != *pool {
                    // This daemon has another pool open there, by another disk.
                    return Err(Refusal::Held(claim));
                }
            }
            let beat = Claim::parse(&seen[..CLAIM_BYTES]).map_or(0, |claim| claim.beat);
            let mine = holder.claim(*pool, beat.wrapping_add(1));
            let bytes = block.encode(&mine);
            let begin = now();
            match block.swap(channel, local, &seen, &bytes, pace).await? {
                Swap::Done if block.is_atomic => return Ok((mine, begin)),
                Swap::Done => {
                    local.sleep(pace.settle).await;
                    let begin = now();
                    if block.read(channel).await? == bytes {
                        return Ok((mine, begin));
                    }
                }
                // It may take effect as late as the write of a daemon that was stopped.
                Swap::Late => local.sleep(pace.watch).await,
                Swap::Changed => {}
            }
            last = Claim::parse(&block.read(channel).await?[..CLAIM_BYTES]);
        }
        Err(last.map_or(Refusal::Disk(Status::Miscompare), Refusal::Held))
    }

    /// Writes the claim again. `is_over`: the lease has ended.
    async fn beat(
        &self,
        channel: &AsyncChannel,
        local: &Local,
        written: &Written,
        is_over: bool,
    ) -> Result<Beat, Status> {
        let begin = now();
        let seen = self.block.read(channel).await?;
        let found = Claim::parse(&seen[..CLAIM_BYTES]);
        if !found.as_ref().is_some_and(|found| written.is(found)) {
            return Ok(Beat::Lost(found));
        }
        if is_over && !self.block.is_atomic {
            return match self.take(channel, local).await {
                Ok((claim, begin)) => Ok(Beat::Kept(claim, begin)),
                Err(Refusal::Held(other)) => Ok(Beat::Lost(Some(other))),
                Err(Refusal::Disk(status)) => Err(status),
            };
        }
        let next = written.next();
        match self.block.swap(channel, local, &seen, &self.block.encode(&next), &self.pace).await? {
            Swap::Done => Ok(Beat::Kept(next, begin)),
            // The next beat finds out what is there.
            Swap::Changed | Swap::Late => Ok(Beat::Unknown),
        }
    }

    /// Gives the claim back, if it is this daemon's.
    async fn release(&self, channel: &AsyncChannel, local: &Local, written: &Written) {
        let Ok(seen) = self.block.read(channel).await else { return };
        if Claim::parse(&seen[..CLAIM_BYTES]).is_some_and(|found| written.is(&found)) {
            let last = Claim { is_released: true, ..written.next() };
            // Without that, others wait until the claim is old.
            let _ = self.block.swap(channel, local, &seen, &self.block.encode(&last), &self.pace).await;
        }
    }
}

/// The claim on the disk, as far as the daemon knows it.
#[derive(Clone)]
struct Written {
    /// The latest one that is known to be there.
    claim: Claim,
    /// The beat of the latest attempt to write it again.
    attempted: u64,
}

impl Written {
    /// Whether a claim is this one, or a later beat that was attempted.
    fn is(&self, found: &Claim) -> bool {
        (found.daemon, found.pool) == (self.claim.daemon, self.claim.pool)
            && (self.claim.beat..=self.attempted).contains(&found.beat)
    }

    /// The claim with the next beat.
    fn next(&self) -> Claim {
        Claim { beat: self.attempted.wrapping_add(1), ..self.claim.clone() }
    }
}

/// How a beat ended.
enum Beat {
    /// The claim was written again; the time before that.
    Kept(Claim, u64),
    Unknown,
    /// The disk has another one, or none.
    Lost(Option<Claim>),
}

/// The claim of a pool that is open.
pub(crate) struct Held {
    env: Env,
    taker: Taker,
    written: tokio::sync::Mutex<Written>,
    pub lease: Arc<Lease>,
    removal: Arc<Mutex<part::Removal>>,
    lines: LogLimit,
}

const NAME: &str = "claim of a pool";

impl Held {
    /// Takes the claim of a pool on a disk. `None` if no other host reaches the disk.
    ///
    /// # Errors
    /// [`Error::InUse`], [`Error::Claim`], [`Error::Ended`].
    pub async fn take(
        env: &Env,
        base: &BaseHold,
        pool: Uuid,
        holder: &Holder,
        pace: ClaimPace,
    ) -> Result<Option<Arc<Self>>, Error> {
        let disk = base.bdev();
        if !disk.device().limits().is_shared {
            return Ok(None);
        }
        let name = disk.name().to_owned();
        let taker = Taker { disk: name.clone(), block: Block::of(disk), pool, holder: holder.clone(), pace };
        let reactor = env.reactors().find_least_loaded(None).ok_or(Error::Ended)?;
        let of_task = taker.clone();
        let work = async move |channel: &AsyncChannel, local: &Local| of_task.take(channel, local).await;
        let removal = lock(base.removal()).listen();
        let taken = visit(&reactor, base.descriptor(), NAME, removal, work).await?;
        let (claim, begin) = taken.ok_or(Error::Ended)?.map_err(|refusal| match refusal {
            Refusal::Disk(status) => Error::Claim { disk: name.clone(), status },
            Refusal::Held(Claim { host, pid, .. }) => Error::InUse { disk: name.clone(), host, pid },
        })?;
        let until = AtomicU64::new(begin + nanos(pace.lease));
        Ok(Some(Arc::new(Self {
            env: env.clone(),
            taker,
            written: tokio::sync::Mutex::new(Written { attempted: claim.beat, claim }),
            lease: Arc::new(Lease { until }),
            removal: Arc::clone(base.removal()),
            lines: LogLimit::new(1, Duration::from_secs(60)),
        })))
    }

    /// The time between two beats.
    pub const fn pause(&self) -> Duration {
        self.taker.pace.beat
    }

    /// Writes the claim again, on a reactor that is prepared for the disk, or else on any. Returns whether roots that have
    /// waited may go on, or have lost the pool.
    pub async fn renew(&self, base: Descriptor, reactor: Option<Hold>) -> bool {
        let mut written = self.written.lock().await;
        let right = self.lease.right();
        if right == Right::Lost {
            return false;
        }
        let Taker { block, pace, .. } = &self.taker;
        let watched = self.lease.until.load(Ordering::Acquire) + nanos(pace.watch.saturating_sub(pace.lease));
        if !block.is_atomic && now() >= watched {
            // A late write of this daemon may have replaced another one's claim.
            self.lease.set(TAKEN_OVER);
            tracing::error!(
                disk = self.taker.disk,
                "the claim of a pool was not renewed for so long that another daemon may have had the pool: \
                 its volumes' requests fail from now on"
            );
            return true;
        }
        let reactor = reactor.or_else(|| self.env.reactors().find_least_loaded(None));
        let Some(reactor) = reactor else { return false };
        let (before, taker) = (written.clone(), self.taker.clone());
        // Before the beat: its future may be dropped.
        written.attempted = written.attempted.wrapping_add(1);
        let is_over = right == Right::Waits;
        let work = async move |channel: &AsyncChannel, local: &Local| {
            taker.beat(channel, local, &before, is_over).await
        };
        let removal = lock(&self.removal).listen();
        let failure = match visit(&reactor, base, NAME, removal, work).await {
            // The disk is being removed: the pool ends.
            Ok(None) => return false,
            Ok(Some(Ok(Beat::Kept(claim, begin)))) => {
                *written = Written { attempted: claim.beat, claim };
                let until = begin + nanos(self.taker.pace.lease);
                return self.lease.set(until) <= now();
            }
            Ok(Some(Ok(Beat::Lost(other)))) => {
                self.lease.set(TAKEN_OVER);
                let disk = &self.taker.disk;
                match other {
                    Some(Claim { host, pid, .. }) => tracing::error!(
                        disk,
                        host,
                        pid,
                        "another daemon has taken the pool on this disk over: its volumes' requests fail from now on"
                    ),
                    None => tracing::error!(
                        disk,
                        "the claim of the pool has gone from its disk, which something else has written to: \
                         its volumes' requests fail from now on"
                    ),
                }
                return true;
            }
            Ok(Some(Ok(Beat::Unknown))) => "it takes too long".to_owned(),
            Ok(Some(Err(status))) => format!("{status:?}"),
            Err(error) => error.to_string(),
        };
        if let Some(line) = self.lines.admit() {
            tracing::warn!(
                disk = self.taker.disk,
                failure,
                left_out = line.left_out(),
                "the claim of a pool cannot be renewed: without it, the pool stops using its disk"
            );
        }
        false
    }

    /// Runs a long task, and renews the claim until its end. Rings the bells of the roots if [`Held::renew`] returns true.
    pub async fn renew_during<R>(&self, base: &Descriptor, task: impl Future<Output = R>) -> R {
        let is_beating = Cell::new(false);
        let mut renewing = pin!(async {
            loop {
                self.sleep(self.taker.pace.beat).await;
                is_beating.set(true);
                if self.renew(base.clone(), None).await {
                    lock(&self.removal).ring();
                }
                is_beating.set(false);
            }
        });
        let mut task = pin!(task);
        let result = poll_fn(|cx| {
            let _: Poll<()> = renewing.as_mut().poll(cx);
            task.as_mut().poll(cx)
        })
        .await;
        // A beat under way ends.
        poll_fn(|cx| {
            if is_beating.get() {
                let _: Poll<()> = renewing.as_mut().poll(cx);
            }
            if is_beating.get() { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        result
    }

    /// Waits, on a reactor: who waits for an opening may have no timers.
    async fn sleep(&self, duration: Duration) {
        let Some(reactor) = self.env.reactors().find_least_loaded(None) else { return pending().await };
        let (sender, end) = oneshot::channel();
        let start = move |cx: &mut Cx| {
            let local = cx.local().clone();
            let task = async move {
                local.sleep(duration).await;
                // The receiver may have been dropped.
                let _ = sender.send(());
            };
            cx.local().spawn(task).detach();
        };
        // The end of the reactor ends the pause.
        if reactor.call(start).await.is_ok() {
            let _ = end.await;
        }
    }

    /// Gives the pool back: another daemon need not wait. The pool does not use its disk any more.
    pub async fn release(&self, base: Descriptor) {
        let written = self.written.lock().await;
        let right = self.lease.right();
        if right == Right::Lost {
            return;
        }
        self.lease.set(GIVEN_BACK);
        let reactor = self.env.reactors().find_least_loaded(None);
        // After the end of the lease, the claim may be another daemon's.
        let Some(reactor) = reactor.filter(|_| right == Right::Valid) else { return };
        let (written, taker) = (written.clone(), self.taker.clone());
        let work = async move |channel: &AsyncChannel, local: &Local| {
            taker.release(channel, local, &written).await;
        };
        let removal = lock(&self.removal).listen();
        // Others wait, if that fails.
        let _ = visit(&reactor, base, NAME, removal, work).await;
    }
}
