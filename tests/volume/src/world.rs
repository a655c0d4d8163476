//! One simulation: the engine, its store and the disk, and a model of what they may answer.
//!
//! Time passes with the events of the disk. Between two of them, the engine takes turns, as often as chance wants. `act` begins
//! requests and commands, `reply` checks their ends, `crash` opens the pool again and reads everything.

use std::collections::{BTreeMap, VecDeque};

use aryk_dma::{Buffer, Sgl};
use aryk_volume::{
    Command, Done, ForeignId, ForeignUse, Form, OpId, Pieces, Pool, Recovered, Settings, State, Stats,
    StoreOp, TimelineId, VolumeId,
};
use aryk_volume_store::{Base, Formatting, Options, Store};
use fastrand::Rng;
use uuid::Uuid;

use crate::disk::{Crash, Disk, Ended, SECTOR};
use crate::model::{Model, Time};
use crate::pattern::{self, UNIT};
use crate::script::{Kind, Paced, Shape};

mod act;
mod beside;
mod crash;
mod decay;
mod reply;
mod scrub;

use beside::Beside;
use decay::Copied;

/// Bytes of a segment: the smallest that the engine allows.
const SEGMENT: u32 = 8 << 20;
const AREA: u64 = 256 << 10;
pub(crate) const POOL: Uuid = Uuid::from_u128(0x5eed);
/// Events without an end of what is waited for.
const EVENTS_MAX: u32 = 400_000;
/// Units of the foreign disks.
const FOREIGN_UNITS: u64 = 50_000;

/// A request in flight.
#[derive(Debug)]
struct InFlight {
    volume: VolumeId,
    units: (u64, u64),
    kind: Kind,
    began: Time,
    buffer: Option<Buffer>,
    /// The buffer's memory, until the end.
    memory: Sgl,
    /// Whether the values are kept for a comparison of everything.
    is_verification: bool,
    /// Whether the engine only tells where the data is.
    is_located: bool,
}

/// A command in flight, with what its end will change.
#[derive(Debug)]
enum Pending {
    Create(Box<Model>),
    Delete(VolumeId),
    Snapshot {
        of: Vec<VolumeId>,
        names: Vec<String>,
        began: Time,
    },
    Resize(VolumeId, u64),
    Rename(VolumeId, String),
    SetThick(VolumeId),
    /// With the history that the volume shows before.
    Revert {
        volume: VolumeId,
        snapshot: VolumeId,
        timeline: TimelineId,
    },
    /// With the moment before which all requests of the other volume had ended.
    Adopt {
        volume: VolumeId,
        from: VolumeId,
        began: Time,
    },
    Inflate(VolumeId),
    Changed {
        since: VolumeId,
        until: VolumeId,
    },
    Check,
}

/// What a simulation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were answered.
    pub requests: u64,
    /// Commands that were answered.
    pub commands: u64,
    /// Operations of the disk.
    pub operations: u64,
    /// Crashes.
    pub crashes: u64,
    /// Values that were compared.
    pub values: u64,
    /// Ranges that were compacted into dense frames.
    pub compacted: u64,
    /// Ranges that were gathered in a row.
    pub gathered: u64,
    /// Volumes that got the content of another one.
    pub adopted: u64,
    /// Damaged logs that were found.
    pub damaged: u64,
    /// Lost checkpoints that were made again.
    pub remade: u64,
    /// Sectors that were damaged, each on a copy of the disk.
    pub decayed: u64,
    /// Passes of the scrub that have ended.
    pub scrubbed: u64,
    /// Pools that were rebuilt without a checkpoint.
    pub rebuilt: u64,
    /// Operations of the disk that failed.
    pub failures: u64,
    /// Pools that had become read-only when they were opened again.
    pub read_only: u64,
    /// Differs between two runs if they did different things.
    pub digest: u64,
}

impl Counts {
    /// Adds those of another simulation.
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.commands += other.commands;
        self.operations += other.operations;
        self.crashes += other.crashes;
        self.values += other.values;
        self.compacted += other.compacted;
        self.gathered += other.gathered;
        self.adopted += other.adopted;
        self.damaged += other.damaged;
        self.remade += other.remade;
        self.decayed += other.decayed;
        self.scrubbed += other.scrubbed;
        self.rebuilt += other.rebuilt;
        self.failures += other.failures;
        self.read_only += other.read_only;
        self.digest = self.digest.rotate_left(7) ^ other.digest;
    }
}

pub(crate) struct World {
    rng: Rng,
    shape: Shape,
    settings: Settings,
    disk: Disk,
    /// `None` only while the pool is opened again.
    open: Option<Open>,
    volumes: Vec<Model>,
    requests: BTreeMap<u64, InFlight>,
    commands: BTreeMap<u64, Pending>,
    /// Commands that failed with the disk: the next opening shows which of them took effect.
    unsure: Vec<Pending>,
    /// Operations of the disk that had failed when the pool was opened.
    failures_before: u64,
    now: Time,
    names: u64,
    /// The foreign disks that the pool has named. A disk may go while replies that name it are on their way.
    images: BTreeMap<ForeignId, u64>,
    copied: Copied,
    /// Reads of comparisons that were refused.
    refused: u64,
    /// Pieces of damage that the last check has told.
    reported: usize,
    /// Values that a comparison of everything has read.
    observed: Vec<(VolumeId, u64, u64)>,
    counts: Counts,
}

struct Open {
    pool: Pool,
    store: Box<Store>,
    /// Reads of foreign disks that have not been answered.
    foreign: VecDeque<(OpId, StoreOp)>,
    beside: Beside,
}

impl Open {
    fn new(pool: Pool, store: Box<Store>) -> Self {
        Self { pool, store, foreign: VecDeque::new(), beside: Beside::default() }
    }
}

/// Settings with which little work reaches every part of the engine.
fn settings(rng: &mut Rng) -> Settings {
    Settings {
        flush_bytes: rng.u64(64..2048) << 10,
        flush_entries: rng.usize(50..2000),
        unflushed_bytes_max: rng.u64(2..8) << 20,
        frame_bytes_max: 1 << rng.u32(16..20),
        frames_in_flight_max: rng.u32(1..9),
        cache_bytes: rng.usize(16..512) << 10,
        background_bytes_max: rng.u64(1..8) << 20,
        manifest_bytes_per_turn: 1 << rng.u32(9..14),
        pieces: Pieces {
            blocks_min: rng.u32(20..1025),
            pieces_min: rng.u32(2..40),
            worn_min: rng.u32(5..300),
        },
        form: if rng.bool() { Form::Row } else { Form::Dense },
        write_amplification_max: if rng.bool() { rng.u32(200..2_000) } else { 1_000_000 },
        ..Settings::default()
    }
}

/// Runs these steps.
pub(crate) fn run(seed: u64, shape: Shape, steps: &[Paced]) -> Result<Counts, String> {
    let mut world = World::new(seed, shape)?;
    for (number, (step, pace)) in steps.iter().enumerate() {
        world.step(*step, *pace).map_err(|what| format!("step {number} {step:?}: {what}"))?;
    }
    world.finish().map_err(|what| format!("at the end: {what}"))?;
    let World { mut counts, disk, .. } = world;
    (counts.operations, counts.failures) = (disk.counts.operations, disk.counts.failures);
    (counts.crashes, counts.digest) = (disk.counts.crashes, disk.digest());
    Ok(counts)
}

impl World {
    fn new(seed: u64, shape: Shape) -> Result<Self, String> {
        let mut rng = Rng::with_seed(seed ^ 0x77);
        let bytes = (2 << 20) + 4 * AREA + u64::from(shape.segments) * u64::from(SEGMENT);
        let mut disk = Disk::new(Base { bytes, block: shape.block }, rng.u64(..));
        let options = Options {
            segment_bytes: SEGMENT,
            area_bytes: Some(AREA),
            ..Options::new(POOL, Uuid::from_u128(1), "simulated", shape.block)
        };
        let mut formatting =
            Formatting::new(disk.base(), &options, false).map_err(|error| error.to_string())?;
        let store = loop {
            while let Some(op) = formatting.next_op() {
                disk.submit(op);
            }
            let done = disk.end_next().ok_or("the creation stalls")?;
            if let Some(result) = formatting.completed(done) {
                break result.map_err(|error| error.to_string())?;
            }
        };
        let settings = settings(&mut rng);
        let pool = Pool::create(settings, store.facts(), POOL.into_bytes());
        let mut world = Self {
            rng,
            shape,
            settings,
            disk,
            open: Some(Open::new(pool, store)),
            volumes: Vec::new(),
            requests: BTreeMap::new(),
            commands: BTreeMap::new(),
            unsure: Vec::new(),
            failures_before: 0,
            now: 1,
            names: 0,
            images: BTreeMap::new(),
            copied: Copied::No,
            refused: 0,
            reported: 0,
            observed: Vec::new(),
            counts: Counts::default(),
        };
        world.await_ready()?;
        Ok(world)
    }

    fn opened(&mut self) -> &mut Open {
        self.open.as_mut().expect("the pool is open")
    }

    fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    /// When the oldest reader began that is in flight.
    fn oldest(&self) -> Time {
        let requests = self.requests.values().map(|request| request.began);
        let snapshots = self.unresolved().filter_map(|pending| match pending {
            Pending::Snapshot { began, .. } => Some(*began),
            _ => None,
        });
        requests.chain(snapshots).min().unwrap_or(Time::MAX)
    }

    /// Commands that may take effect, or may have.
    fn unresolved(&self) -> impl Iterator<Item = &Pending> {
        self.unsure.iter().chain(self.commands.values())
    }

    /// Whether the disk has failed since the pool was opened, or is damaged: then requests may fail.
    fn has_failed(&self) -> bool {
        self.disk.counts.failures > self.failures_before || matches!(self.copied, Copied::Damaged)
    }

    fn model(&mut self, id: VolumeId) -> Option<&mut Model> {
        self.volumes.iter_mut().find(|model| model.id == id)
    }

    /// One event of the disk, and perhaps a turn of the engine. Returns whether anything happened, or may happen.
    fn pump(&mut self) -> Result<bool, String> {
        self.tick();
        let done = self.disk.end_any();
        let mut has_work = done.is_some();
        let skips_turn = has_work && self.rng.u32(..10) < 3;
        let aborts = self.rng.u32(..100) == 0;
        self.scrub_at_random();
        let Open { pool, store, foreign, beside } = self.open.as_mut().expect("the pool is open");
        match done {
            Some(Ended::Store(done)) => store.completed(done),
            Some(Ended::Reader(id, data, result)) => beside.reader.completed(id, data, result),
            Some(Ended::Shard(..)) => return Err("the pool has no shards".into()),
            None => {}
        }
        if aborts && let Some(request) = self.requests.values().next() {
            let odd = self.rng.u64(..2);
            let requests = &self.requests;
            let may_end = |id: u64| requests.get(&id).is_some_and(|request| !request.is_verification);
            let is_meant = |id: u64| id % 2 == odd && may_end(id);
            pool.abort(request.volume, |tag| is_meant(tag.0));
            beside.abort(is_meant);
        }
        if let Some((id, op)) = foreign.pop_front() {
            has_work = true;
            let done = read_foreign(&self.images, id, op);
            pool.completed(done);
        }
        has_work |= self.pass_messages()?;
        has_work |= self.exchange()?;
        if !skips_turn {
            has_work |= self.opened().pool.turn();
            has_work |= self.exchange()?;
        }
        self.check_scrub()?;
        // A pool may come to rest at any moment.
        if !has_work || self.rng.u8(..) < 8 {
            has_work |= self.opened().pool.rest();
        }
        Ok(has_work)
    }

    /// Passes on what the parts have for each other, until there is nothing. Returns whether there was anything.
    fn exchange(&mut self) -> Result<bool, String> {
        let mut has_any = false;
        loop {
            let Open { pool, store, foreign, beside } = self.open.as_mut().expect("the pool is open");
            let mut is_busy = false;
            self.images.extend(pool.foreign_disks().iter().map(|disk| (disk.id, image(disk))));
            if store.is_checkpoint_due() {
                pool.request_checkpoint();
            }
            while let Some((id, op)) = pool.next_op() {
                is_busy = true;
                match op {
                    StoreOp::ReadForeign { .. } => foreign.push_back((id, op)),
                    op => store.submit(id, op),
                }
            }
            while let Some(op) = store.next_op() {
                is_busy = true;
                self.disk.submit(op);
            }
            while let Some(read) = beside.reader.next_read() {
                is_busy = true;
                self.disk.read(read);
            }
            while let Some(answer) = store.next_answer() {
                is_busy = true;
                pool.completed(answer);
            }
            is_busy |= self.take_replies()?;
            if !is_busy {
                return Ok(has_any);
            }
            has_any = true;
        }
    }

    /// Goes on until all requests and commands have ended.
    fn settle(&mut self) -> Result<(), String> {
        // What was aborted may have an effect until it has ended.
        self.wait_until(|world| {
            world.requests.is_empty() && world.commands.is_empty() && !world.opened().pool.has_requests()
        })
    }

    fn wait_until(&mut self, mut is_over: impl FnMut(&mut Self) -> bool) -> Result<(), String> {
        let mut events = 0;
        while !is_over(self) {
            let has_work = self.pump()?;
            events += 1;
            if !has_work || events > EVENTS_MAX {
                self.relieve()?;
                events = 0;
            }
        }
        Ok(())
    }

    /// Nothing goes on: the disk may fail all writes. Or the pool is full, and writes wait for space: deleting something must
    /// help.
    fn relieve(&mut self) -> Result<(), String> {
        if self.disk.is_faulty() {
            self.disk.heal();
            return Ok(());
        }
        let is_deleting = self.commands.values().any(|pending| matches!(pending, Pending::Delete(_)));
        let stats = self.opened().pool.stats();
        let state = self.opened().pool.state();
        let victim = self
            .volumes
            .iter()
            .position(|model| model.of.is_some())
            .or_else(|| self.volumes.len().checked_sub(1));
        match victim {
            Some(n)
                if !is_deleting
                    && !self.shape.is_full
                    && state == State::Ready
                    && (stats.free_blobs <= u64::from(self.settings.reserve_blobs) + 2
                        || self.lacks_room(&stats)) =>
            {
                let id = self.volumes[n].id;
                self.command(Command::Delete(id), Pending::Delete(id));
                Ok(())
            }
            _ => Err(format!(
                "stalled in {state:?}, with {} requests {:?} and commands {:?}; {stats:?}",
                self.requests.len(),
                self.requests.values().next(),
                self.commands
            )),
        }
    }

    /// Whether thick volumes have reserved what the requests in flight, or a copy of an inflation, may wait for.
    fn lacks_room(&self, stats: &Stats) -> bool {
        const COPY: u64 = 1 << 20;
        let waiting: u64 = self.requests.values().map(|request| bytes(request.units) as u64).sum();
        let taken = stats.live_bytes + stats.reserved_bytes + stats.unflushed_bytes;
        taken + waiting + COPY > stats.usable_bytes
    }

    fn await_ready(&mut self) -> Result<(), String> {
        for _ in 0..EVENTS_MAX {
            match self.opened().pool.state() {
                State::Opening => {}
                State::Ready => return Ok(()),
                State::Failed(_) if self.disk.is_faulty() => {
                    self.disk.heal();
                    self.disk.crash(Crash::Process);
                    self.reopen()?;
                }
                state => return Err(format!("the pool is {state:?}")),
            }
            if !self.pump()? && self.opened().pool.state() == State::Opening {
                return Err("the opening stalls".into());
            }
        }
        Err("the opening does not end".into())
    }

    /// Waits for everything, background work too, and checks all.
    fn finish(&mut self) -> Result<(), String> {
        self.disk.heal();
        if self.has_failed() {
            self.crash(Crash::Process)?;
        }
        self.verify(false)?;
        self.rest()?;
        self.count_ranges();
        self.verify(false)?;
        let damage = self.scrub_all()?;
        if !damage.is_empty() && !self.has_failed() {
            return Err(format!("the last pass found {damage:?}"));
        }
        self.check_pool()
    }

    /// Counts what compaction has done since the pool was opened.
    fn count_ranges(&mut self) {
        let ranges = self.opened().pool.stats().gathered_ranges;
        match self.settings.form {
            Form::Row => self.counts.gathered += ranges,
            Form::Dense => self.counts.compacted += ranges,
        }
    }

    /// Waits until no background work is left. A pool whose disk fails may always have some.
    fn rest(&mut self) -> Result<(), String> {
        for _ in 0..EVENTS_MAX {
            if self.has_failed() || (self.opened().pool.is_idle() && !self.opened().pool.rest()) {
                return Ok(());
            }
            if !self.pump()? && !self.opened().pool.is_idle() {
                return Err(format!("stalled before it is idle; {:?}", self.opened().pool.stats()));
            }
        }
        Err(format!("background work does not end; {:?}", self.opened().pool.stats()))
    }
}

/// The number in the name of a foreign disk.
fn image(disk: &ForeignUse) -> u64 {
    let number = disk.foreign.name.strip_prefix("image-").and_then(|number| number.parse().ok());
    number.map_or(u64::MAX, pattern::foreign)
}

fn read_foreign(images: &BTreeMap<ForeignId, u64>, id: OpId, op: StoreOp) -> Done {
    let StoreOp::ReadForeign { disk, unit, mut data, len } = op else {
        panic!("not a read of a foreign disk")
    };
    let value = images.get(&disk).copied().unwrap_or(u64::MAX);
    for (n, bytes) in data.bytes_mut()[..len as usize].chunks_mut(UNIT).enumerate() {
        pattern::fill(bytes, value, unit + n as u64);
    }
    Done { id, data: Some(data), result: Ok(()) }
}

/// Bytes of these units.
const fn bytes(units: (u64, u64)) -> usize {
    ((units.1 - units.0) * SECTOR) as usize
}

/// What the engine opens a pool from.
fn recovered(from: Option<Recovered>) -> Result<Recovered, String> {
    from.ok_or_else(|| "the checkpoint is lost".to_owned())
}
