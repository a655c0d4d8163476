//! A store in memory that answers operations in any order and loses what was not flushed, and a driver of a pool.

use crate::outbox::Owner;
use crate::*;
use aryk_dma::Buffer;
use std::collections::{BTreeMap, HashMap, VecDeque};

pub(super) const UUID: [u8; 16] = [9; 16];

/// What outlives a crash, and what might.
pub(super) struct Disk {
    pub(super) facts: StoreFacts,
    pub(super) blobs: BTreeMap<BlobId, Vec<u8>>,
    /// Writes that are not flushed.
    fresh: Vec<(BlobId, u32, Vec<u8>)>,
    pub(super) manifest: Recovered,
    /// The copy of the manifest.
    pub(super) copy: Vec<u8>,
    /// Discarded blobs read as this.
    pub(super) discards: u64,
    /// Units of this blob from this one on cannot be read.
    pub(super) unreadable: Option<(BlobId, u32)>,
    /// Discarded blobs keep what they have.
    pub(super) keeps_discarded: bool,
}

impl Disk {
    pub(super) fn new(facts: StoreFacts) -> Self {
        let manifest = Recovered { checkpoint: Vec::new(), edits: Vec::new() };
        Self {
            facts,
            blobs: BTreeMap::new(),
            fresh: Vec::new(),
            manifest,
            copy: Vec::new(),
            discards: 0,
            unreadable: None,
            keeps_discarded: false,
        }
    }

    fn put(&mut self, blob: BlobId, unit: u32, bytes: &[u8]) {
        let len = self.facts.blob_bytes() as usize;
        let at = unit as usize * UNIT as usize;
        assert!(at + bytes.len() <= len, "a write beyond the blob");
        self.blobs.entry(blob).or_insert_with(|| vec![0; len])[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn flush(&mut self) {
        for (blob, unit, bytes) in std::mem::take(&mut self.fresh) {
            self.put(blob, unit, &bytes);
        }
    }

    fn read(&mut self, blob: BlobId, unit: u32, out: &mut [u8]) {
        let start = unit as usize * UNIT as usize;
        match self.blobs.get(&blob) {
            Some(bytes) => out.copy_from_slice(&bytes[start..start + out.len()]),
            None => out.fill(0),
        }
        for (_, at, bytes) in self.fresh.iter().filter(|(of, ..)| *of == blob) {
            let at = *at as usize * UNIT as usize;
            let (from, to) = (at.max(start), (at + bytes.len()).min(start + out.len()));
            if from < to {
                out[from - start..to - start].copy_from_slice(&bytes[from - at..to - at]);
            }
        }
    }

    /// Power fails: of what was not flushed, any units survive.
    pub(super) fn crash(&mut self, rng: &mut fastrand::Rng) {
        for (blob, unit, bytes) in std::mem::take(&mut self.fresh) {
            match rng.u8(0..3) {
                0 => {}
                1 => self.put(blob, unit, &bytes),
                _ => {
                    for (at, piece) in bytes.chunks(UNIT as usize).enumerate() {
                        if rng.bool() {
                            self.put(blob, unit + at as u32, piece);
                        }
                    }
                }
            }
        }
    }
}

/// Data of the foreign disk of tests.
pub(super) fn foreign_bytes(unit: u64, out: &mut [u8]) {
    for (at, piece) in out.chunks_mut(UNIT as usize).enumerate() {
        super::model::fill(unit + at as u64, super::model::foreign_value(unit + at as u64), piece);
    }
}

/// A pool on such a disk.
pub(super) struct Rig {
    pub(super) pool: Pool,
    pub(super) disk: Disk,
    pub(super) rng: fastrand::Rng,
    pending: Vec<(OpId, StoreOp)>,
    /// Operations that change the manifest, in their order.
    ordered: VecDeque<(OpId, StoreOp)>,
    pub(super) replies: Vec<Reply>,
    pub(super) command_replies: Vec<CommandReply>,
    memory: HashMap<Tag, Buffer>,
    next_tag: u64,
    /// One of so many writes fails; none for 0.
    pub(super) write_failures: u32,
    pub(super) ops: u64,
}

pub(super) fn facts() -> StoreFacts {
    StoreFacts { alignment: 512, blob_units: 10_240, blobs: 64 }
}

pub(super) fn settings() -> Settings {
    Settings {
        flush_bytes: 2 << 20,
        flush_entries: 600,
        unflushed_bytes_max: 12 << 20,
        frame_bytes_max: 128 << 10,
        cache_bytes: 8 << 20,
        manifest_bytes_per_turn: 300,
        ..Settings::default()
    }
}

impl Rig {
    pub(super) fn new(seed: u64) -> Self {
        Self::with(seed, settings(), facts())
    }

    pub(super) fn with(seed: u64, settings: Settings, facts: StoreFacts) -> Self {
        let pool = Pool::create(settings, facts, UUID);
        let mut rig = Self {
            pool,
            disk: Disk::new(facts),
            rng: fastrand::Rng::with_seed(seed),
            pending: Vec::new(),
            ordered: VecDeque::new(),
            replies: Vec::new(),
            command_replies: Vec::new(),
            memory: HashMap::new(),
            next_tag: 0,
            write_failures: 0,
            ops: 0,
        };
        rig.settle();
        assert_eq!(rig.pool.state(), State::Ready);
        rig
    }

    pub(super) fn tag(&mut self) -> Tag {
        self.next_tag += 1;
        Tag(self.next_tag)
    }

    /// Ends a turn and takes what is to be done. Returns whether there is anything to do.
    pub(super) fn turn(&mut self) -> bool {
        let has_work = self.pool.turn();
        while let Some((id, op)) = self.pool.next_op() {
            match op {
                StoreOp::Commit { .. } | StoreOp::Checkpoint { .. } | StoreOp::Copy { .. } => {
                    self.ordered.push_back((id, op))
                }
                _ => self.pending.push((id, op)),
            }
        }
        while let Some(reply) = self.pool.next_reply() {
            self.replies.push(reply);
        }
        while let Some(reply) = self.pool.next_command_reply() {
            self.command_replies.push(reply);
        }
        has_work || !self.pending.is_empty() || !self.ordered.is_empty()
    }

    /// Executes all operations that change the manifest, and of the others those that `is_wanted` accepts.
    pub(super) fn run_those(&mut self, is_wanted: impl Fn(&Owner) -> bool) {
        let is_wanted = |id| is_wanted(self.pool.out.owner(id).expect("it is in flight"));
        let (wanted, others): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|(id, _)| is_wanted(*id));
        self.pending = others;
        for (id, op) in self.ordered.drain(..).chain(wanted).collect::<Vec<_>>() {
            let (data, result) = self.execute(op);
            self.pool.completed(Done { id, data, result });
        }
    }

    /// Executes one operation, any.
    pub(super) fn step(&mut self) -> bool {
        let count = self.pending.len() + usize::from(!self.ordered.is_empty());
        if count == 0 {
            return false;
        }
        let at = self.rng.usize(0..count);
        let (id, op) = if at < self.pending.len() {
            self.pending.swap_remove(at)
        } else {
            self.ordered.pop_front().expect("not empty")
        };
        self.ops += 1;
        let (data, result) = self.execute(op);
        self.pool.completed(Done { id, data, result });
        true
    }

    fn execute(&mut self, op: StoreOp) -> (Option<Buffer>, Result<(), StoreError>) {
        match op {
            StoreOp::Write { blob, unit, data, len } => {
                assert!(u64::from(unit) * u64::from(UNIT) % u64::from(self.disk.facts.alignment) == 0);
                assert!(len % self.disk.facts.alignment == 0 && len > 0);
                let bytes = data.bytes()[..len as usize].to_vec();
                if self.write_failures > 0 && self.rng.u32(0..self.write_failures) == 0 {
                    return (Some(data), Err(StoreError::Medium));
                }
                self.disk.fresh.push((blob, unit, bytes));
                (Some(data), Ok(()))
            }
            StoreOp::Read { blob, unit, mut data, len } => {
                assert!(u64::from(unit) * u64::from(UNIT) % u64::from(self.disk.facts.alignment) == 0);
                if self.disk.unreadable.is_some_and(|(of, from)| of == blob && unit + len / UNIT > from) {
                    return (Some(data), Err(StoreError::Medium));
                }
                self.disk.read(blob, unit, &mut data.bytes_mut()[..len as usize]);
                (Some(data), Ok(()))
            }
            StoreOp::ReadForeign { unit, mut data, len, .. } => {
                foreign_bytes(unit, &mut data.bytes_mut()[..len as usize]);
                (Some(data), Ok(()))
            }
            StoreOp::Commit { edit } => {
                self.disk.flush();
                self.disk.manifest.edits.push(edit);
                (None, Ok(()))
            }
            StoreOp::Checkpoint { bytes } => {
                self.disk.flush();
                self.disk.manifest = Recovered { checkpoint: bytes, edits: Vec::new() };
                (None, Ok(()))
            }
            StoreOp::Copy { bytes } => {
                self.disk.flush();
                self.disk.copy = bytes;
                (None, Ok(()))
            }
            StoreOp::Flush => {
                self.disk.flush();
                (None, Ok(()))
            }
            StoreOp::Discard { blob } => {
                self.disk.fresh.retain(|(of, ..)| *of != blob);
                let (len, byte) = (self.disk.facts.blob_bytes() as usize, self.rng.u8(..));
                if !self.disk.keeps_discarded {
                    self.disk.blobs.insert(blob, vec![byte; len]);
                }
                self.disk.discards += 1;
                (None, Ok(()))
            }
        }
    }

    /// Goes on until nothing is left to do.
    pub(super) fn settle(&mut self) {
        let mut turns = 0;
        while self.turn() | self.step() || self.pool.rest() {
            turns += 1;
            assert!(turns < 1_000_000, "the pool does not come to rest: {:?}", self.pool.stats());
        }
        self.check_counters();
    }

    /// The counters are what a look at everything finds.
    fn check_counters(&self) {
        let (stats, manifest) = (self.pool.stats(), &self.pool.keeper.manifest);
        let runs = || manifest.partitions.iter().flat_map(|partition| partition.levels.iter().flatten());
        let pages = runs().map(|run| u64::from(run.shape.pages)).sum::<u64>();
        let queued = self.pool.runtimes.values().map(|runtime| runtime.queue.len() as u64).sum::<u64>();
        let found = (runs().map(|run| run.shape.entries).sum::<u64>(), pages * u64::from(BLOCK), queued);
        assert_eq!((stats.index_entries, stats.index_bytes, stats.waiting_requests), found);
        assert!(stats.debt_bytes <= stats.index_bytes);
    }

    /// The pool ends without notice and is opened again.
    pub(super) fn reopen(&mut self, is_power_loss: bool) {
        if is_power_loss {
            self.disk.crash(&mut self.rng);
        } else {
            self.disk.flush();
        }
        assert_eq!(self.try_reopen(self.pool.settings), State::Ready);
    }

    /// Opens the pool that is on the disk now. Returns its state.
    pub(super) fn try_reopen(&mut self, settings: Settings) -> State {
        self.pending.clear();
        self.ordered.clear();
        self.replies.clear();
        self.command_replies.clear();
        self.memory.clear();
        self.pool = Pool::open(|_| settings, self.disk.facts, UUID, &self.disk.manifest)
            .expect("the manifest is right");
        while self.pool.state() == State::Opening {
            self.turn();
            self.step();
        }
        self.pool.state()
    }

    pub(super) fn command(&mut self, command: Command) -> Result<Answer, CommandError> {
        let tag = self.tag();
        self.pool.command(tag, command);
        loop {
            let has_more = self.turn() | self.step();
            if let Some(at) = self.command_replies.iter().position(|reply| reply.tag == tag) {
                return self.command_replies.swap_remove(at).result;
            }
            assert!(has_more, "the command does not end");
        }
    }

    pub(super) fn create(&mut self, name: &str, units: u64, origin: Origin) -> VolumeId {
        let mut uuid = [0; 16];
        self.rng.fill(&mut uuid);
        let label = Label { name: name.to_owned(), uuid };
        let command = Command::Create {
            label,
            units,
            block_size: 512,
            origin,
            when_full: WhenFull::Wait,
            is_thick: false,
        };
        let Ok(Answer::Volume(id)) = self.command(command) else { panic!("no volume") };
        id
    }

    pub(super) fn snapshot(&mut self, of: VolumeId, name: &str) -> VolumeId {
        let mut uuid = [0; 16];
        self.rng.fill(&mut uuid);
        let label = Label { name: name.to_owned(), uuid };
        let Ok(Answer::Volumes(ids)) = self.command(Command::Snapshot(vec![(of, label)])) else {
            panic!("no snapshot")
        };
        ids[0]
    }

    pub(super) fn submit_write(&mut self, volume: VolumeId, unit: u64, bytes: &[u8], fua: bool) -> Tag {
        let tag = self.tag();
        let mut buffer = Buffer::from_slice(bytes);
        let data = buffer.lend();
        self.memory.insert(tag, buffer);
        let units = bytes.len() as u64 / u64::from(UNIT);
        self.pool.submit(Request { tag, volume, unit, units, action: Action::Write { data, fua } });
        tag
    }

    pub(super) fn submit_read(&mut self, volume: VolumeId, unit: u64, units: u64) -> Tag {
        let tag = self.tag();
        let mut buffer = Buffer::new((units * u64::from(UNIT)) as usize, 4096);
        buffer.bytes_mut().fill(0x5a);
        let data = buffer.lend();
        self.memory.insert(tag, buffer);
        self.pool.submit(Request { tag, volume, unit, units, action: Action::Read { data } });
        tag
    }

    pub(super) fn submit(&mut self, volume: VolumeId, unit: u64, units: u64, action: Action) -> Tag {
        let tag = self.tag();
        self.pool.submit(Request { tag, volume, unit, units, action });
        tag
    }

    /// The data of a read that has ended, with pieces of the foreign disk.
    pub(super) fn data(&mut self, reply: &Reply) -> Vec<u8> {
        let mut buffer = self.memory.remove(&reply.tag).expect("a read");
        buffer.reclaim();
        let mut bytes = buffer.bytes().to_vec();
        for piece in &reply.foreign {
            let at = (piece.at * u64::from(UNIT)) as usize;
            foreign_bytes(piece.disk_unit, &mut bytes[at..at + (piece.units * u64::from(UNIT)) as usize]);
        }
        bytes
    }

    /// Ends the loan of a request's memory.
    pub(super) fn forget(&mut self, tag: Tag) {
        if let Some(mut buffer) = self.memory.remove(&tag) {
            buffer.reclaim();
        }
    }

    pub(super) fn wait(&mut self, tag: Tag) -> Reply {
        loop {
            let has_more = self.turn() | self.step();
            if let Some(at) = self.replies.iter().position(|reply| reply.tag == tag) {
                return self.replies.swap_remove(at);
            }
            assert!(has_more, "the request does not end: {:?}", self.pool.stats());
        }
    }

    pub(super) fn write(&mut self, volume: VolumeId, unit: u64, bytes: &[u8]) {
        let tag = self.submit_write(volume, unit, bytes, false);
        assert_eq!(self.wait(tag).status, Status::Ok);
        self.forget(tag);
    }

    pub(super) fn read(&mut self, volume: VolumeId, unit: u64, units: u64) -> Vec<u8> {
        let tag = self.submit_read(volume, unit, units);
        let reply = self.wait(tag);
        assert_eq!(reply.status, Status::Ok);
        self.data(&reply)
    }

    pub(super) fn zero(&mut self, volume: VolumeId, unit: u64, units: u64, whole_blocks: bool) {
        let tag = self.submit(volume, unit, units, Action::Zero { whole_blocks, fua: false });
        assert_eq!(self.wait(tag).status, Status::Ok);
    }

    pub(super) fn flush(&mut self, volume: VolumeId) {
        let tag = self.submit(volume, 0, 0, Action::Flush);
        assert_eq!(self.wait(tag).status, Status::Ok);
    }
}
