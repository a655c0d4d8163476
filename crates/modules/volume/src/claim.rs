//! The claim of a pool on a disk that other hosts reach: one daemon at a time opens the pool. Control context; [`Lease`] is read
//! in reactor context.
//!
//! The daemon writes its claim before it opens the pool, and again and again while the pool is open. It uses the disk only as
//! long as the latest of these *beats* is recent: for the time of a [`Pace::lease`]. Another daemon that finds a claim watches
//! it for longer than that. If it stays as it is, the first daemon does not use the disk any more, also if its host has only
//! been stopped for a while, and the other one takes the claim over. A daemon that finds another one's claim in place of its
//! own has lost the pool.
//!
//! Two daemons may take the same claim at the same time. A disk that compares and writes at once lets one of them succeed. On
//! another disk, each reads the claim, writes its own one, waits, and reads again: the last one that has written keeps it.

use crate::part::BaseHold;
use crate::pool::lock;
use crate::visit::visit;
use crate::{Error, part};
use aryk_bdev::{AsyncChannel, Bdev, Blocks, Descriptor, Env, Lba, Status};
use aryk_dma::{Buffer, PAGE};
use aryk_log_limit::LogLimit;
use aryk_reactor::{Local, Nanos};
use aryk_volume_store::{CLAIM_BYTES, CLAIM_PLACE, Claim};
use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::os::unix::fs::MetadataExt as _;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

/// Attempts to take a claim that others are taking too.
const ATTEMPTS: u32 = 3;

/// The time between events of a claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Between two beats.
    pub beat: Duration,
    /// After the beginning of a beat, the daemon may use the disk for so long.
    pub lease: Duration,
    /// A claim that was not given back, and does not change for so long, is taken over.
    pub watch: Duration,
    /// Between two looks at a claim that is watched.
    pub look: Duration,
    /// From the read of a claim to the end of the write that replaces it, at most, where the disk does not do both at once.
    pub hurry: Duration,
    /// After that write, before the claim counts: longer than the write of another daemon may take.
    pub settle: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            beat: Duration::from_secs(2),
            lease: Duration::from_secs(10),
            watch: Duration::from_secs(15),
            look: Duration::from_secs(1),
            hurry: Duration::from_secs(1),
            settle: Duration::from_secs(3),
        }
    }
}

/// A daemon, as its claims name it.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub daemon: Uuid,
    pub boot: Uuid,
    pub pid_namespace: u64,
    pub pid: u32,
    pub host: String,
}

impl Holder {
    /// This process.
    pub fn new() -> Self {
        let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default().trim().to_owned();
        Self {
            daemon: Uuid::new_v4(),
            boot: read("/proc/sys/kernel/random/boot_id").parse().unwrap_or_default(),
            pid_namespace: std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino()),
            pid: std::process::id(),
            host: read("/proc/sys/kernel/hostname"),
        }
    }

    /// Whether the process that has made the claim has ended, as far as this one can tell.
    fn has_outlived(&self, claim: &Claim) -> bool {
        let is_here = !self.boot.is_nil()
            && self.pid_namespace != 0
            && (claim.boot, claim.pid_namespace) == (self.boot, self.pid_namespace);
        let pid = i32::try_from(claim.pid).ok().and_then(rustix::process::Pid::from_raw);
        let Some(pid) = pid.filter(|_| is_here) else { return false };
        // Another daemon of this process ID has ended before this one began.
        claim.pid == self.pid || rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
    }

    fn claim(&self, pool: Uuid, beat: u64) -> Claim {
        let Self { daemon, boot, pid_namespace, pid, ref host } = *self;
        Claim { pool, daemon, boot, pid_namespace, pid, is_released: false, beat, host: host.clone() }
    }
}

/// Whether a pool may use its disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Right {
    Valid,
    /// Not before the next beat.
    Waits,
    /// Never again: another daemon has the pool.
    Lost,
}

/// Until when a pool may use its disk.
#[derive(Debug)]
pub(crate) struct Lease {
    until: AtomicU64,
    is_lost: AtomicBool,
}

impl Lease {
    /// Whether the disk may be used now.
    pub fn right(&self, now: Nanos) -> Right {
        if self.is_lost() {
            Right::Lost
        } else if now.0 < self.until.load(Ordering::Acquire) {
            Right::Valid
        } else {
            Right::Waits
        }
    }

    /// Whether another daemon has the pool.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }
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

    /// Writes `new` if the block has `old`. Returns whether it had.
    async fn swap(self, channel: &AsyncChannel, old: &[u8], new: &[u8]) -> Result<bool, Status> {
        if self.is_atomic {
            let mut both = Buffer::new(2 * self.bytes as usize, PAGE as usize);
            both.write(0, old);
            both.write(old.len(), new);
            return match channel.compare_and_write(self.lba, Blocks(1), both).await {
                Ok(_) => Ok(true),
                Err(Status::Miscompare) => Ok(false),
                Err(status) => Err(status),
            };
        }
        if self.read(channel).await? != old {
            return Ok(false);
        }
        let mut buffer = Buffer::new(self.bytes as usize, PAGE as usize);
        buffer.write(0, new);
        channel.write(self.lba, Blocks(1), buffer).await?;
        Ok(true)
    }
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

async fn now(local: &Local) -> Nanos {
    local.with(|cx| cx.refresh_now()).await
}

const fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

/// Waits until a claim that was not given back is, or has not changed for long enough. Returns the bytes that are there then.
async fn watch(
    channel: &AsyncChannel,
    local: &Local,
    block: Block,
    seen: Vec<u8>,
    claim: &Claim,
    pace: &Pace,
) -> Result<Vec<u8>, Refusal> {
    tracing::warn!(
        host = claim.host,
        pid = claim.pid,
        seconds = pace.watch.as_secs(),
        "another daemon has not given this disk's pool back: it is opened if its claim does not change for a while"
    );
    let mut waited = Duration::ZERO;
    while waited < pace.watch {
        local.sleep(pace.look).await;
        waited += pace.look;
        let found = block.read(channel).await?;
        match Claim::parse(&found[..CLAIM_BYTES]) {
            _ if found == seen => {}
            Some(claim) if claim.is_released => return Ok(found),
            Some(claim) => return Err(Refusal::Held(claim)),
            None => return Err(Refusal::Held(claim.clone())),
        }
    }
    Ok(seen)
}

/// Takes the claim. Returns it, and the time before it was written.
async fn take(
    channel: &AsyncChannel,
    local: &Local,
    block: Block,
    pool: Uuid,
    holder: &Holder,
    pace: &Pace,
) -> Result<(Claim, Nanos), Refusal> {
    let mut last = None;
    for _ in 0..ATTEMPTS {
        let mut seen = block.read(channel).await?;
        let found = Claim::parse(&seen[..CLAIM_BYTES]);
        if let Some(claim) = &found
            && !claim.is_released
            && claim.daemon != holder.daemon
            && !holder.has_outlived(claim)
        {
            seen = watch(channel, local, block, seen, claim, pace).await?;
        }
        let beat = found.as_ref().map_or(0, |claim| claim.beat);
        let mine = holder.claim(pool, beat + 1);
        let bytes = block.encode(&mine);
        let begin = now(local).await;
        let is_written = block.swap(channel, &seen, &bytes).await?;
        if is_written && block.is_atomic {
            return Ok((mine, begin));
        }
        let took = now(local).await.0 - begin.0;
        if is_written && took <= nanos(pace.hurry) {
            local.sleep(pace.settle).await;
            let begin = now(local).await;
            if block.read(channel).await? == bytes {
                return Ok((mine, begin));
            }
        }
        last = Claim::parse(&block.read(channel).await?[..CLAIM_BYTES]);
    }
    Err(last.map_or(Refusal::Disk(Status::Miscompare), Refusal::Held))
}

/// How a beat ended.
enum Beat {
    /// The claim was written again; the time before that.
    Kept(Claim, Nanos),
    /// The disk has another one, or none.
    Lost(Option<Claim>),
}

/// Whether two claims are of the same daemon and pool.
fn is_of_same(one: &Claim, other: &Claim) -> bool {
    (one.daemon, one.pool) == (other.daemon, other.pool)
}

/// Writes the claim again.
async fn beat(channel: &AsyncChannel, local: &Local, block: Block, mine: &Claim) -> Result<Beat, Status> {
    loop {
        let begin = now(local).await;
        let seen = block.read(channel).await?;
        let found = Claim::parse(&seen[..CLAIM_BYTES]);
        match found {
            Some(found) if is_of_same(&found, mine) => {
                let next = Claim { beat: found.beat + 1, ..mine.clone() };
                if block.swap(channel, &seen, &block.encode(&next)).await? {
                    return Ok(Beat::Kept(next, begin));
                }
            }
            other => return Ok(Beat::Lost(other)),
        }
    }
}

/// The claim of a pool that is open.
pub(crate) struct Held {
    env: Env,
    disk: String,
    /// The latest one that was written.
    claim: tokio::sync::Mutex<Claim>,
    block: Block,
    pace: Pace,
    pub lease: Arc<Lease>,
    removal: Arc<Mutex<part::Removal>>,
    lines: LogLimit,
}

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
        pace: Pace,
    ) -> Result<Option<Arc<Self>>, Error> {
        let disk = base.bdev();
        if !disk.device().limits().is_shared {
            return Ok(None);
        }
        let (block, holder, name) = (Block::of(disk), holder.clone(), disk.name().to_owned());
        let reactor = env.reactors().find_least_loaded(None).ok_or(Error::Ended)?;
        let work = async move |channel: &AsyncChannel, local: &Local| {
            take(channel, local, block, pool, &holder, &pace).await
        };
        let removal = lock(base.removal()).listen();
        let taken = visit(&reactor, base.descriptor(), "claim of a pool", removal, work).await?;
        let (claim, begin) = taken.ok_or(Error::Ended)?.map_err(|refusal| match refusal {
            Refusal::Disk(status) => Error::Claim { disk: name.clone(), status },
            Refusal::Held(Claim { host, pid, .. }) => Error::InUse { disk: name.clone(), host, pid },
        })?;
        let lease = Lease { until: AtomicU64::new(begin.0 + nanos(pace.lease)), is_lost: false.into() };
        Ok(Some(Arc::new(Self {
            env: env.clone(),
            disk: name,
            claim: tokio::sync::Mutex::new(claim),
            block,
            pace,
            lease: Arc::new(lease),
            removal: Arc::clone(base.removal()),
            lines: LogLimit::new(1, Duration::from_secs(60)),
        })))
    }

    /// The time between two beats.
    pub const fn pause(&self) -> Duration {
        self.pace.beat
    }

    /// Writes the claim again, after a pause. Returns whether roots that have waited may go on, or have lost the pool.
    ///
    /// # Errors
    /// If there is no reactor to do it, or the disk cannot be opened there.
    pub async fn renew(&self, base: Descriptor, pause: Duration) -> Result<bool, Error> {
        // Beats come one at a time.
        let Ok(mut claim) = self.claim.try_lock() else { return Ok(false) };
        if self.lease.is_lost() {
            return Ok(false);
        }
        let reactor = self.env.reactors().find_least_loaded(None).ok_or(Error::Ended)?;
        let (mine, block) = (claim.clone(), self.block);
        let work = async move |channel: &AsyncChannel, local: &Local| {
            local.sleep(pause).await;
            (beat(channel, local, block, &mine).await, now(local).await)
        };
        let removal = lock(&self.removal).listen();
        let Some((beat, end)) = visit(&reactor, base, "claim of a pool", removal, work).await? else {
            // The disk is being removed: the pool ends.
            return Ok(false);
        };
        match beat {
            Ok(Beat::Kept(next, begin)) => {
                *claim = next;
                let until = begin.0 + nanos(self.pace.lease);
                Ok(self.lease.until.swap(until, Ordering::AcqRel) <= end.0)
            }
            Ok(Beat::Lost(other)) => {
                self.lease.is_lost.store(true, Ordering::Release);
                let (host, pid) = other.map(|other| (other.host, other.pid)).unzip();
                tracing::error!(
                    disk = self.disk,
                    host,
                    pid,
                    "another daemon has taken the pool over: requests of its volumes fail from now on"
                );
                Ok(true)
            }
            Err(status) => {
                if let Some(line) = self.lines.admit() {
                    tracing::warn!(
                        disk = self.disk,
                        ?status,
                        left_out = line.left_out(),
                        "the claim of a pool cannot be renewed: without it, the pool stops using its disk"
                    );
                }
                Ok(false)
            }
        }
    }

    /// Runs a long task, and writes the claim again meanwhile.
    pub async fn renew_during<R>(&self, base: &Descriptor, task: impl Future<Output = R>) -> R {
        let (mut task, is_over) = (pin!(task), Cell::new(false));
        let mut renewing = pin!(async {
            while !is_over.get() && !self.lease.is_lost() {
                if self.renew(base.clone(), self.pace.beat).await.is_err() {
                    break;
                }
            }
        });
        let mut is_renewing = true;
        let result = poll_fn(|cx| {
            is_renewing = is_renewing && renewing.as_mut().poll(cx).is_pending();
            task.as_mut().poll(cx)
        })
        .await;
        is_over.set(true);
        // A beat under way ends, and a pause before it.
        lock(&self.removal).stop_listening();
        if is_renewing {
            renewing.await;
        }
        result
    }

    /// Gives the pool back: another daemon need not wait. The pool does not use its disk any more.
    pub async fn release(&self, base: Descriptor) {
        let claim = self.claim.lock().await;
        if self.lease.is_lost.swap(true, Ordering::AcqRel) {
            return;
        }
        let Some(reactor) = self.env.reactors().find_least_loaded(None) else { return };
        let (mine, block) = (claim.clone(), self.block);
        let work = async move |channel: &AsyncChannel, _: &Local| {
            let Ok(seen) = block.read(channel).await else { return };
            let found = Claim::parse(&seen[..CLAIM_BYTES]);
            if let Some(found) = found.filter(|found| is_of_same(found, &mine)) {
                let last = Claim { is_released: true, beat: found.beat + 1, ..mine };
                // Without that, others wait until the claim is old.
                let _ = block.swap(channel, &seen, &block.encode(&last)).await;
            }
        };
        let removal = lock(&self.removal).listen();
        // As above.
        let _ = visit(&reactor, base, "claim of a pool", removal, work).await;
    }
}
