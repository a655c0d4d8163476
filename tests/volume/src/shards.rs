//! Simulations of a pool of several shards: engines and stores on one disk that crashes, and channels that divide requests among
//! them, hold back writes while all shards take a snapshot, and learn late of each change.
//!
//! Writes go to *slots*, each of which has one write under way at a time. Most slots lie across the border of two stripes, and so
//! in two shards. The volume changes its size, and is reverted to its snapshots; what is cut off reads zeroes when it comes back.
//! A snapshot is right if
//!
//! - each slot shows one write, in all of its units: a write is wholly in the snapshot, or not at all;
//! - with a write, it has all writes that had ended before that one began;
//! - it has all writes that had ended before it was begun, and none that began when all shards had cut it;
//! - it shows the same for ever, also after crashes, and so do its clones, also when it is deleted; one that a crash has
//!   interrupted is there in all shards or in none.
//!
//! A change of the size, and a revert, is there in all shards or in none, too. Reads of the volume go on meanwhile; each shows in
//! each unit what a write or a change has left there that was not replaced before the read began.
//!
//! The steps of snapshots and changes, and what is finished after a crash, are those of the module (`pool/changes.rs`); the
//! division of requests and the gate are the same code (`aryk_volume::{pieces, WriteGate}`).
//!
//! | file | what it owns |
//! | --- | --- |
//! | `life.rs` | the steps, except changes; crashes, and comparisons |
//! | `changes.rs` | sizes and reverts; what is finished after a crash |
//! | `slot.rs` | the history of a slot, and what it may show |
//! | `counts.rs` | what a simulation did |

use std::collections::{BTreeMap, VecDeque};

use aryk_dma::Buffer;
use aryk_volume::{
    Action, Answer, BLOCK_UNITS, Command, Label, Origin, Piece, Pool, RANGE_BLOCKS, Request, STRIPE_RANGES,
    Settings, Shard, State, Status, Tag, TimelineId, VolumeId, WhenFull, WriteGate, pieces,
};
use aryk_volume_store::{Base, Expected, Formatting, Opening, Options, Store};
use fastrand::Rng;
use uuid::Uuid;

use crate::disk::{Disk, Ended, Faults, shard_place};
use crate::pattern::{self, UNIT};
use slot::{Slot, Time};

pub use counts::Counts;

const SEGMENT: u32 = 8 << 20;
const AREA: u64 = 256 << 10;
/// Segments of a shard.
const SEGMENTS: u64 = 24;
const POOL: Uuid = Uuid::from_u128(0x5eed);
/// The volume that is written.
const VOLUME: [u8; 16] = [1; 16];
/// Units of a stripe.
const STRIPE: u64 = STRIPE_RANGES as u64 * RANGE_BLOCKS as u64 * BLOCK_UNITS as u64;
/// Stripes of the volume, at most and at first.
const STRIPES: u64 = 9;
/// Reactors with channels of the volume.
const CHANNELS: usize = 3;
/// Events without an end of what is waited for.
const EVENTS_MAX: u32 = 200_000;
/// Snapshots and clones that are kept.
const SNAPSHOTS_MAX: usize = 6;
const CLONES_MAX: usize = 3;

/// Why a step ends early.
enum Stop {
    /// The pool crashes now.
    Crash,
    Failed(String),
}

impl From<String> for Stop {
    fn from(what: String) -> Self {
        Self::Failed(what)
    }
}

enum Kind {
    Write {
        slot: usize,
    },
    /// A read whose data is taken.
    Read,
    /// A read of the volume, which is compared at its end.
    Look {
        slot: usize,
    },
    Flush,
}

/// A request of a channel, of which parts are in shards.
struct InFlight {
    channel: usize,
    kind: Kind,
    units: (u64, u64),
    began: Time,
    left: u32,
    /// A shard has refused its part, which is beyond the end of the volume.
    is_refused: bool,
    buffer: Buffer,
}

/// A channel of the volume on a reactor.
#[derive(Default)]
struct Channel {
    gate: WriteGate,
    /// The size of the volume, as far as it knows.
    size: u64,
    /// Slots whose writes wait until the gate opens.
    held: VecDeque<usize>,
}

struct Open {
    pool: Pool,
    store: Box<Store>,
}

/// A change that is being made.
enum Change {
    Make {
        uuid: Uuid,
        size: u64,
        began: Time,
        cut: Time,
    },
    Clone(Cloned),
    Delete(Uuid),
    Resize {
        uuid: Uuid,
        from: u64,
        to: u64,
        began: Time,
        /// No crash prevents it any more.
        is_certain: bool,
    },
    Revert {
        uuid: Uuid,
        /// The size of the snapshot, and what it shows.
        size: u64,
        seen: Vec<Vec<u64>>,
        /// The history that each shard had before.
        before: Vec<TimelineId>,
        began: Time,
        is_certain: bool,
    },
}

/// A clone of a snapshot, and what each unit of each slot shows: zeroes beyond its end.
struct Cloned {
    uuid: Uuid,
    size: u64,
    seen: Vec<Vec<u64>>,
}

struct Snapshot {
    uuid: Uuid,
    size: u64,
    began: Time,
    /// When all shards had cut it.
    cut: Time,
    /// What each unit of each slot shows, once that is known.
    seen: Option<Vec<Vec<u64>>>,
}

struct World {
    rng: Rng,
    disk: Disk,
    settings: Settings,
    shards: Vec<Open>,
    count: u32,
    channels: Vec<Channel>,
    slots: Vec<Slot>,
    /// The size of the volume, and since when all shards have it.
    size: u64,
    size_since: Time,
    /// What became smaller when the last crash came, and its size before.
    cut_off: Option<(Uuid, u64)>,
    requests: BTreeMap<u64, InFlight>,
    /// Answers to commands, by tag.
    answers: BTreeMap<u64, Result<Answer, String>>,
    snapshots: Vec<Snapshot>,
    clones: Vec<Cloned>,
    changing: Option<Change>,
    next: u64,
    now: Time,
    /// Events until the next crash.
    crash_in: u32,
    counts: Counts,
}

/// Runs a seed with so many steps.
///
/// # Errors
/// What was violated.
pub fn run(seed: u64, steps: u32) -> Result<Counts, String> {
    let mut world = World::new(seed)?;
    for number in 0..steps {
        let result = world.step();
        world.told(result).map_err(|what| format!("step {number}: {what}"))?;
    }
    world.crash_in = u32::MAX;
    let result = world.finish();
    world.told(result).map_err(|what| format!("at the end: {what}"))?;
    (world.counts.operations, world.counts.crashes) =
        (world.disk.counts.operations, world.disk.counts.crashes);
    world.counts.digest = world.disk.digest();
    Ok(world.counts)
}

impl World {
    fn new(seed: u64) -> Result<Self, String> {
        let mut rng = Rng::with_seed(seed);
        let count = 1 << rng.u32(1..3);
        let bytes = shard_place(count);
        let disk = Disk::new(Base { bytes, block: 512 }, rng.u64(..));
        let settings = Settings {
            flush_bytes: rng.u64(64..2048) << 10,
            flush_entries: rng.usize(50..2000),
            unflushed_bytes_max: rng.u64(2..8) << 20,
            frame_bytes_max: 1 << rng.u32(16..20),
            cache_bytes: rng.usize(16..512) << 10,
            ..Settings::default()
        };
        let crash_in = rng.u32(1..4000);
        let mut world = Self {
            rng,
            disk,
            settings,
            shards: Vec::new(),
            count,
            channels: channels(STRIPES * STRIPE),
            slots: slots(),
            size: STRIPES * STRIPE,
            size_since: 0,
            cut_off: None,
            requests: BTreeMap::new(),
            answers: BTreeMap::new(),
            snapshots: Vec::new(),
            clones: Vec::new(),
            changing: None,
            next: 0,
            now: 0,
            crash_in: u32::MAX,
            counts: Counts::default(),
        };
        for index in 0..count {
            let open = world.create(index)?;
            world.shards.push(open);
        }
        world.disk.faults = Faults { slow_ppm: world.rng.u32(..50_000), ..Faults::default() };
        world.begin_life().map_err(World::text)?;
        world.crash_in = crash_in;
        Ok(world)
    }

    /// The volume, and what its slots show first.
    fn begin_life(&mut self) -> Result<(), Stop> {
        self.wait_until(|world| world.shards.iter().all(|shard| shard.pool.state() == State::Ready))?;
        self.command_all(|_| create(Uuid::from_bytes(VOLUME), Origin::Empty, STRIPES * STRIPE))?;
        self.write_all()
    }

    fn part(&self) -> Base {
        Base { bytes: (2 << 20) + 4 * AREA + SEGMENTS * u64::from(SEGMENT), block: 512 }
    }

    fn shard(&self, index: u32) -> Shard {
        Shard::new(index, self.count).expect("a power of two")
    }

    fn create(&mut self, index: u32) -> Result<Open, String> {
        let options = Options {
            segment_bytes: SEGMENT,
            area_bytes: Some(AREA),
            shard: self.shard(index),
            ..Options::new(POOL, Uuid::from_u128(1), "simulated", 512)
        };
        let formatting = Formatting::new(self.part(), &options, false);
        let mut formatting = formatting.map_err(|error| error.to_string())?;
        let store = loop {
            while let Some(op) = formatting.next_op() {
                self.disk.submit_for(index, op);
            }
            let done = self.disk.end_next().ok_or("the creation stalls")?;
            if let Some(result) = formatting.completed(done) {
                break result.map_err(|error| error.to_string())?;
            }
        };
        let settings = self.settings.of_shard(self.shard(index));
        Ok(Open { pool: Pool::create(settings, store.facts(), POOL.into_bytes()), store })
    }

    fn open(&mut self, index: u32) -> Result<Open, String> {
        let expected = Expected { pool: Some(POOL), shard: Some(self.shard(index)), ..Expected::default() };
        let mut opening = Opening::new(self.part(), expected);
        let opened = loop {
            while let Some(op) = opening.next_op() {
                self.disk.submit_for(index, op);
            }
            let done = self.disk.end_next().ok_or("the opening stalls")?;
            if let Some(result) = opening.completed(done) {
                break result.map_err(|error| error.to_string())?;
            }
        };
        let recovered = opened.recovered.ok_or("the checkpoint is lost")?;
        let settings = self.settings.of_shard(self.shard(index));
        let pool = Pool::open(|_| settings, opened.store.facts(), POOL.into_bytes(), &recovered);
        Ok(Open { pool: pool.map_err(|error| error.to_string())?, store: Box::new(opened.store) })
    }

    fn tick(&mut self) -> Time {
        self.now += 1;
        self.now
    }

    /// An event of the disk, perhaps a write of a channel, and turns of some shards: each has a pace of its own.
    fn pump(&mut self) -> Result<bool, Stop> {
        self.tick();
        self.crash_in -= u32::from(self.crash_in < u32::MAX);
        if self.crash_in == 0 {
            return Err(Stop::Crash);
        }
        let mut has_work = match self.disk.end_any() {
            Some(Ended::Shard(index, done)) => {
                self.shards[index as usize].store.completed(done);
                true
            }
            Some(_) => return Err(Stop::Failed("an operation of no shard has ended".into())),
            None => false,
        };
        let is_quiet = !has_work;
        for index in 0..self.shards.len() {
            if is_quiet || self.rng.bool() {
                let Open { pool, store } = &mut self.shards[index];
                if store.is_checkpoint_due() {
                    pool.request_checkpoint();
                }
                has_work |= pool.turn() || pool.rest();
                has_work |= self.exchange(index)?;
            }
        }
        Ok(has_work)
    }

    /// Passes on what a shard's engine and store have for each other, and what has ended.
    fn exchange(&mut self, index: usize) -> Result<bool, Stop> {
        let mut has_any = false;
        loop {
            let Open { pool, store } = &mut self.shards[index];
            let mut is_busy = false;
            while let Some((id, op)) = pool.next_op() {
                is_busy = true;
                store.submit(id, op);
            }
            while let Some(op) = store.next_op() {
                is_busy = true;
                self.disk.submit_for(index as u32, op);
            }
            while let Some(answer) = store.next_answer() {
                is_busy = true;
                pool.completed(answer);
            }
            while let Some(reply) = pool.next_command_reply() {
                is_busy = true;
                self.answers.insert(reply.tag.0, reply.result.map_err(|error| error.to_string()));
            }
            let mut replies = Vec::new();
            while let Some(reply) = pool.next_reply() {
                replies.push((reply.tag.0, reply.status));
                pool.recycle(reply.foreign);
            }
            for (tag, status) in replies {
                is_busy = true;
                self.part_ended(tag, status)?;
            }
            if !is_busy {
                return Ok(has_any);
            }
            has_any = true;
        }
    }

    fn part_ended(&mut self, tag: u64, status: Status) -> Result<(), Stop> {
        let size_min = self.size_min();
        let request = self.requests.get_mut(&tag).ok_or_else(|| "a reply to nothing".to_owned())?;
        match status {
            Status::Ok => {}
            Status::OutOfRange if request.units.1 > size_min => request.is_refused = true,
            _ => return Err(Stop::Failed(format!("a request has ended with {status:?}"))),
        }
        request.left -= 1;
        if request.left > 0 {
            return Ok(());
        }
        self.counts.requests += 1;
        self.counts.refused += u64::from(request.is_refused);
        if matches!(request.kind, Kind::Read) {
            return Ok(());
        }
        let mut request = self.requests.remove(&tag).expect("just found");
        request.buffer.reclaim();
        if !request.is_refused && request.units.1 > self.size && request.began > self.size_since {
            return Err(Stop::Failed(format!(
                "a request of {:?} beyond the end has succeeded",
                request.units
            )));
        }
        let now = self.tick();
        match request.kind {
            Kind::Write { slot } => {
                self.slots[slot].end(tag, now, request.is_refused);
                self.channels[request.channel].gate.leave();
            }
            Kind::Look { slot } if !request.is_refused => self.look_ended(slot, &request)?,
            Kind::Flush => self.slots.iter_mut().for_each(|slot| slot.flushed(request.began)),
            Kind::Read | Kind::Look { .. } => {}
        }
        Ok(())
    }

    /// Submits the parts of a request.
    fn submit(
        &mut self,
        channel: usize,
        kind: Kind,
        ids: &[VolumeId],
        units: (u64, u64),
        mut buffer: Buffer,
    ) -> u64 {
        self.next += 1;
        let tag = self.next;
        let data = buffer.lend();
        let is_read = matches!(kind, Kind::Read | Kind::Look { .. });
        let is_flush = matches!(kind, Kind::Flush);
        let mut left = 0;
        if is_flush {
            for (shard, id) in self.shards.iter_mut().zip(ids) {
                let action = Action::Flush;
                shard.pool.submit(Request { tag: Tag(tag), volume: *id, unit: 0, units: 0, action });
                left += 1;
            }
        } else {
            let mut at = 0;
            for Piece { shard, unit, units } in pieces(self.count, units.0, units.1 - units.0) {
                let bytes = units as u32 * UNIT as u32;
                let data = data.slice(at, bytes);
                let action = if is_read { Action::Read { data } } else { Action::Write { data, fua: false } };
                let volume = ids[shard as usize];
                self.shards[shard as usize].pool.submit(Request {
                    tag: Tag(tag),
                    volume,
                    unit,
                    units,
                    action,
                });
                (at, left) = (at + bytes, left + 1);
            }
            self.counts.wide_writes += u64::from(!is_read && left > 1);
        }
        let (began, is_refused) = (self.tick(), false);
        self.requests.insert(tag, InFlight { channel, kind, units, began, left, is_refused, buffer });
        tag
    }

    /// A channel writes to a slot, unless it holds back writes.
    fn write(&mut self, channel: usize, slot: usize) -> Result<(), Stop> {
        if !self.channels[channel].held.is_empty() || !self.channels[channel].gate.enter() {
            self.channels[channel].held.push_back(slot);
            self.counts.held += 1;
            return Ok(());
        }
        self.start_write(channel, slot)
    }

    fn start_write(&mut self, channel: usize, slot: usize) -> Result<(), Stop> {
        let began = self.tick();
        let number = self.next + 1;
        let units = self.slots[slot].units;
        self.slots[slot].begin(number, began);
        let mut buffer = Buffer::new(((units.1 - units.0) as usize) * UNIT, 4096);
        for (unit, bytes) in
            (units.0..).zip(buffer.bytes_mut().chunks_mut(UNIT).take((units.1 - units.0) as usize))
        {
            pattern::fill(bytes, number, unit);
        }
        let ids = self.ids(VOLUME)?;
        let tag = self.submit(channel, Kind::Write { slot }, &ids, units, buffer);
        assert_eq!(tag, number, "the value of a write is its tag");
        Ok(())
    }

    /// How the shards identify a volume or a snapshot.
    fn ids(&self, uuid: [u8; 16]) -> Result<Vec<VolumeId>, Stop> {
        let id = |shard: &Open| {
            shard.pool.volumes().find(|(_, volume)| volume.label.uuid == uuid).map(|(id, _)| id)
        };
        let ids: Option<Vec<_>> = self.shards.iter().map(id).collect();
        ids.ok_or_else(|| Stop::Failed("a shard lacks a volume".into()))
    }

    /// Some channels write to slots that are free, read, or flush, as far as they know the volume.
    fn act(&mut self) -> Result<(), Stop> {
        for _ in 0..self.rng.u32(..4) {
            let (channel, slot) = (self.rng.usize(..CHANNELS), self.rng.usize(..self.slots.len()));
            let size = self.channels[channel].size;
            match self.rng.u32(..14) {
                0 => self.flush(channel)?,
                1 | 2 => self.look(channel, slot, size)?,
                _ if self.slots[slot].is_busy || self.slots[slot].units.1 > size => {}
                _ => {
                    self.slots[slot].is_busy = true;
                    self.write(channel, slot)?;
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self, channel: usize) -> Result<(), Stop> {
        let ids = self.ids(VOLUME)?;
        self.submit(channel, Kind::Flush, &ids, (0, 0), Buffer::new(4096, 4096));
        Ok(())
    }

    /// A channel reads what a volume of this size has of a slot.
    fn look(&mut self, channel: usize, slot: usize, size: u64) -> Result<(), Stop> {
        let Some(units) = self.slots[slot].within(size) else { return Ok(()) };
        let buffer = Buffer::new((units.1 - units.0) as usize * UNIT, 4096);
        let ids = self.ids(VOLUME)?;
        self.submit(channel, Kind::Look { slot }, &ids, units, buffer);
        Ok(())
    }

    /// Some events, while the channels go on.
    fn pass_time(&mut self) -> Result<(), Stop> {
        for _ in 0..self.rng.u32(..12) {
            self.act()?;
            self.pump()?;
        }
        Ok(())
    }

    fn wait_until(&mut self, is_over: impl Fn(&Self) -> bool) -> Result<(), Stop> {
        for _ in 0..EVENTS_MAX {
            if is_over(self) {
                return Ok(());
            }
            if !self.pump()? && !is_over(self) {
                break;
            }
        }
        Err(Stop::Failed("what is waited for does not end".into()))
    }

    /// As [`Self::wait_until`], while the channels go on.
    fn work_until(&mut self, is_over: impl Fn(&Self) -> bool) -> Result<(), Stop> {
        for _ in 0..EVENTS_MAX {
            if is_over(self) {
                return Ok(());
            }
            self.act()?;
            self.pump()?;
        }
        Err(Stop::Failed("what is waited for does not end under load".into()))
    }

    fn begin(&mut self, shard: usize, command: Command) -> u64 {
        self.next += 1;
        self.shards[shard].pool.command(Tag(self.next), command);
        self.next
    }

    fn finish_command(&mut self, tag: u64) -> Result<Answer, Stop> {
        self.work_until(|world| world.answers.contains_key(&tag))?;
        let answer = self.answers.remove(&tag).expect("it is there");
        answer.map_err(|error| Stop::Failed(format!("a command has failed: {error}")))
    }

    /// Runs a command in all shards, before there are writes.
    fn command_all(&mut self, command: impl Fn(usize) -> Command) -> Result<(), Stop> {
        let tags: Vec<u64> = (0..self.shards.len()).map(|shard| self.begin(shard, command(shard))).collect();
        self.wait_until(|world| tags.iter().all(|tag| world.answers.contains_key(tag)))?;
        for tag in tags {
            self.answers.remove(&tag).expect("it is there").map_err(Stop::Failed)?;
        }
        Ok(())
    }

    /// Notes in the first shard what is meant.
    fn note(&mut self, text: String) -> Result<(), Stop> {
        let tag = self.begin(0, Command::SetNote(text.into_bytes()));
        self.finish_command(tag).map(drop)
    }

    /// Writes all slots that the volume has, and makes that durable.
    fn write_all(&mut self) -> Result<(), Stop> {
        for slot in 0..self.slots.len() {
            if self.slots[slot].units.1 <= self.size {
                self.slots[slot].is_busy = true;
                self.write(0, slot)?;
            }
        }
        self.wait_until(|world| world.requests.is_empty())?;
        self.flush(0)?;
        self.wait_until(|world| world.requests.is_empty())
    }
}

/// The command that creates a volume.
fn create(uuid: Uuid, origin: Origin, units: u64) -> Command {
    Command::Create {
        label: Label { name: uuid.to_string(), uuid: uuid.into_bytes() },
        units,
        block_size: 512,
        origin,
        when_full: WhenFull::Wait,
        is_thick: false,
    }
}

/// Channels that know a volume of this size.
fn channels(size: u64) -> Vec<Channel> {
    (0..CHANNELS).map(|_| Channel { size, ..Channel::default() }).collect()
}

/// One across each border of two stripes, and some within a stripe.
fn slots() -> Vec<Slot> {
    let around = |unit: u64, half: u64| Slot::new((unit - half, unit + half));
    let wide = (1..STRIPES).map(|border| around(border * STRIPE, 8 * border));
    let narrow = (0..STRIPES).map(|stripe| around(stripe * STRIPE + STRIPE / 2, 4 + stripe));
    wide.chain(narrow).collect()
}

mod changes;
mod counts;
mod life;
mod slot;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_and_changes_of_several_shards_are_whole() {
        let mut all = Counts::default();
        for seed in 0..20 {
            let counts = run(seed, 30).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
            all.add(&counts);
        }
        // Each case was reached.
        assert!(all.snapshots > 60 && all.wide_writes > 1000 && all.held > 50 && all.crashes > 10, "{all:?}");
        assert!(all.clones > 10 && all.deletions > 10, "{all:?}");
        assert!(all.kept > 0 && all.undone > 0, "{all:?}");
        assert!(all.grown > 10 && all.shrunk > 10 && all.reverts > 10 && all.mixed > 0, "{all:?}");
        assert!(all.refused > 0 && all.torn > 0 && all.looks > 1000, "{all:?}");
    }

    #[test]
    fn a_seed_reproduces_exactly() {
        assert_eq!(run(5, 20), run(5, 20));
    }
}
