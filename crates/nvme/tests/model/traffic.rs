//! Random I/O against a plain model of the blocks. Each block has the set of stamps that it may contain: one after a write that
//! succeeded, several after one whose outcome is not known. A read must return one of them, and thereby decides.
//!
//! Commands in flight never overlap, unless both only read. So each read's result is determined, whatever the order.

use aryk_nvme::controller::Controller;
use aryk_nvme::data::{Piece, SglSupport};
use aryk_nvme::io::{Commands, Range};
use aryk_nvme::queue::{Completed, Fate, QueuePair, SubmitError, Unfinished};
use aryk_nvme::replay::{self, Replay};
use aryk_nvme::spec::status::Code;

use super::rig::{Buffer, Owner, Rig};

/// Bytes of a slot's buffer.
const SLOT: u64 = 32 << 10;
/// Most blocks of a command here.
const BLOCKS_MAX: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Zeroes,
    Deallocate,
    Compare { equal: bool },
    Copy,
    Verify,
    Flush,
}

#[derive(Clone, Debug)]
struct Request {
    kind: Kind,
    slba: u64,
    blocks: u64,
    /// First source block of a copy.
    source: u64,
    stamp: u64,
    pieces: Vec<Piece>,
}

/// What became of the requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub succeeded: u64,
    pub failed: u64,
    /// Found in flight at a reset, and given up.
    pub given_up: u64,
    /// Found in flight at a reset, and submitted again.
    pub again: u64,
    pub reads: u64,
}

pub struct Traffic {
    random: fastrand::Rng,
    commands: Commands,
    block: u64,
    /// Blocks that requests use.
    span: u64,
    /// The stamps that each block may contain.
    truth: Vec<Vec<u64>>,
    /// Readers of each block, or -1 for a writer.
    locks: Vec<i16>,
    slots: Vec<Option<Request>>,
    buffer: Buffer,
    /// Bytes that pieces are multiples of; 0 where only PRPs are understood.
    granularity: u64,
    next_stamp: u64,
    pub tally: Tally,
    /// Kinds to choose from.
    pub kinds: Vec<Kind>,
    /// Whether every status other than success is an error of the test.
    pub is_strict: bool,
    pub is_removed: bool,
}

impl Traffic {
    pub fn new(rig: &Rig, seed: u64, slots: usize) -> Self {
        let namespace = rig.controller.namespaces()[0].namespace.clone().unwrap();
        let info = rig.controller.info().unwrap();
        let span = namespace.blocks.min(16 * BLOCKS_MAX * slots as u64);
        Self {
            random: fastrand::Rng::with_seed(seed),
            commands: Commands::new(&namespace, info),
            block: namespace.block_size().into(),
            span,
            truth: vec![vec![0]; span as usize],
            locks: vec![0; span as usize],
            slots: vec![None; slots],
            buffer: rig.buffer(slots as u64 * SLOT * 2),
            granularity: match info.sgl {
                SglSupport::None => 0,
                SglSupport::Bytes => 1,
                SglSupport::Dwords => 4,
            },
            next_stamp: 1,
            tally: Tally::default(),
            kinds: vec![
                Kind::Read,
                Kind::Read,
                Kind::Write,
                Kind::Write,
                Kind::Zeroes,
                Kind::Deallocate,
                Kind::Compare { equal: true },
                Kind::Compare { equal: false },
                Kind::Copy,
                Kind::Verify,
                Kind::Flush,
            ],
            is_strict: true,
            is_removed: false,
        }
    }

    pub fn in_flight(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Submits requests to the pairs, until `depth` are in flight or no blocks are found free.
    pub fn fill(&mut self, pairs: &mut [QueuePair], depth: usize, now: u64) {
        for _ in 0..depth.saturating_sub(self.in_flight()) {
            let index = self.random.usize(..pairs.len());
            let Some(slot) = self.slots.iter().position(Option::is_none) else { return };
            let Some(request) = self.choose(slot) else { continue };
            match self.submit(&request, slot, &mut pairs[index], now) {
                Ok(()) => {
                    self.lock(&request, true);
                    self.slots[slot] = Some(request);
                }
                Err(SubmitError::Full | SubmitError::Stopped) => return,
                Err(SubmitError::Unfit(unfit)) => panic!("{unfit}: {request:?}"),
            }
        }
    }

    fn choose(&mut self, slot: usize) -> Option<Request> {
        let kind = self.kinds[self.random.usize(..self.kinds.len())];
        let blocks = self.random.u64(1..=BLOCKS_MAX.min(SLOT / self.block));
        let mut random_lba = || self.random.u64(..=self.span - blocks);
        let (slba, source) = (random_lba(), random_lba());
        let blocks = if kind == Kind::Flush { 0 } else { blocks };
        let is_free = |slba: u64, limit| {
            let range = slba as usize..(slba + blocks) as usize;
            self.locks[range].iter().all(|&lock| (limit..=0).contains(&-lock))
        };
        let reads_only = matches!(kind, Kind::Read | Kind::Compare { .. } | Kind::Verify);
        // Readers may share blocks with readers; a writer needs them alone.
        let is_possible = is_free(slba, if reads_only { -100 } else { 0 })
            && (kind != Kind::Copy
                || (is_free(source, -100)
                    && source.abs_diff(slba) >= blocks
                    && self.is_known(source, blocks)))
            && (!matches!(kind, Kind::Compare { .. }) || self.is_known(slba, blocks));
        is_possible.then(|| {
            let stamp = self.next_stamp;
            self.next_stamp += 1;
            let pieces = self.pieces(slot, blocks * self.block);
            Request { kind, slba, blocks, source, stamp, pieces }
        })
    }

    fn is_known(&self, slba: u64, blocks: u64) -> bool {
        self.truth[slba as usize..(slba + blocks) as usize].iter().all(|stamps| stamps.len() == 1)
    }

    /// The slot's buffer, in pieces that PRPs or, where there are SGLs, only these can describe.
    fn pieces(&mut self, slot: usize, len: u64) -> Vec<Piece> {
        let base = self.buffer.iova + slot as u64 * 2 * SLOT;
        if self.granularity == 0 || self.random.bool() {
            let skip = 4 * self.random.u64(..1024);
            return if len == 0 { vec![] } else { vec![Piece { iova: base + skip, len: len as u32 }] };
        }
        let unit = self.granularity;
        let (mut pieces, mut at, mut left) = (Vec::new(), base, len);
        while left > 0 {
            let len = if pieces.len() == 20 { left } else { unit * self.random.u64(1..=left / unit) };
            pieces.push(Piece { iova: at, len: len as u32 });
            at += len + unit * self.random.u64(..16);
            left -= len;
        }
        pieces
    }

    fn submit(
        &mut self,
        request: &Request,
        slot: usize,
        pair: &mut QueuePair,
        now: u64,
    ) -> Result<(), SubmitError> {
        let &Request { kind, slba, blocks, source, stamp, .. } = request;
        let (commands, token) = (self.commands, slot as u64);
        let ranges = [Range { slba, blocks: blocks as u32 }];
        let sources = [Range { slba: source, blocks: blocks as u32 }];
        let list = [Piece { iova: self.buffer.iova + slot as u64 * 2 * SLOT, len: 32 }];
        let at = slot * 2 * SLOT as usize;
        let area = &self.buffer.area;
        let none: &[Piece] = &[];
        let (entry, data) = match kind {
            Kind::Read => {
                self.fill_pieces(request, |_| 0xdead);
                (commands.read(slba, blocks).unwrap(), request.pieces.as_slice())
            }
            Kind::Write => {
                self.fill_pieces(request, |_| stamp);
                let fua = self.random.bool();
                (commands.write(slba, blocks, fua).unwrap(), request.pieces.as_slice())
            }
            Kind::Compare { equal } => {
                self.fill_pieces(request, |block| self.truth[(slba + block) as usize][0] ^ u64::from(!equal));
                (commands.compare(slba, blocks).unwrap(), request.pieces.as_slice())
            }
            Kind::Zeroes => (commands.write_zeroes(slba, blocks, stamp % 2 == 0, false).unwrap(), none),
            Kind::Deallocate => {
                let put = |range| area.write(at, &range);
                let entry = commands.deallocate(&ranges, put).unwrap();
                return pair.submit(entry, &[Piece { len: 16, ..list[0] }], token, now).map(drop);
            }
            Kind::Copy => {
                let entry = commands.copy(&sources, slba, false, |range| area.write(at, &range)).unwrap();
                return pair.submit(entry, &list, token, now).map(drop);
            }
            Kind::Verify => (commands.verify(slba, blocks).unwrap(), none),
            Kind::Flush => (commands.flush(), none),
        };
        pair.submit(entry, data, token, now).map(drop)
    }

    /// Writes the stamp of each block, for 8 bytes at a time, through the pieces.
    fn fill_pieces(&self, request: &Request, stamp: impl Fn(u64) -> u64) {
        let bytes: Vec<u8> = (0..request.blocks)
            .flat_map(|block| stamp(block).to_le_bytes().repeat(self.block as usize / 8))
            .collect();
        let mut from = 0;
        for piece in &request.pieces {
            let at = (piece.iova - self.buffer.iova) as usize;
            self.buffer.area.write_bytes(at, &bytes[from..from + piece.len as usize]);
            from += piece.len as usize;
        }
    }

    fn read_pieces(&self, request: &Request) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in &request.pieces {
            let mut part = vec![0; piece.len as usize];
            self.buffer.area.read_bytes((piece.iova - self.buffer.iova) as usize, &mut part);
            bytes.extend(part);
        }
        bytes
    }

    fn lock(&mut self, request: &Request, take: bool) {
        let sign = if take { 1 } else { -1 };
        let &Request { kind, slba, blocks, source, .. } = request;
        let weight = if matches!(kind, Kind::Read | Kind::Compare { .. } | Kind::Verify) { 1 } else { 101 };
        let mut add = |slba: u64, weight: i16| {
            for lock in &mut self.locks[slba as usize..(slba + blocks) as usize] {
                *lock += sign * weight;
                assert!((0..=101).contains(lock), "locks of the test itself");
            }
        };
        add(slba, weight);
        if kind == Kind::Copy {
            add(source, 1);
        }
    }

    fn take(&mut self, token: u64) -> Request {
        let request = self.slots[token as usize].take().expect("a command ends once");
        self.lock(&request, false);
        request
    }

    fn finish(&mut self, token: u64, code: Code) {
        let request = self.take(token);
        let is_success = code == Code::SUCCESS;
        if let Kind::Compare { equal } = request.kind {
            if is_success || code == Code::COMPARE_FAILURE {
                assert_eq!(is_success, equal, "{request:?}");
            } else {
                assert!(!self.is_strict, "{code:?} for {request:?}");
            }
        } else {
            assert!(is_success || !self.is_strict, "{code:?} for {request:?}");
        }
        if is_success {
            self.tally.succeeded += 1;
            self.apply(&request);
        } else {
            self.tally.failed += 1;
            self.maybe_apply(&request);
        }
    }

    /// The stamp that block `i` of a request gets; `None` if the request changes nothing.
    fn new_stamp(&self, request: &Request, i: u64) -> Option<u64> {
        match request.kind {
            Kind::Write => Some(request.stamp),
            Kind::Zeroes | Kind::Deallocate => Some(0),
            Kind::Copy => Some(self.truth[(request.source + i) as usize][0]),
            Kind::Read | Kind::Compare { .. } | Kind::Verify | Kind::Flush => None,
        }
    }

    fn apply(&mut self, request: &Request) {
        for i in 0..request.blocks {
            if let Some(stamp) = self.new_stamp(request, i) {
                self.truth[(request.slba + i) as usize] = vec![stamp];
            }
        }
        if request.kind == Kind::Read {
            self.tally.reads += 1;
            let bytes = self.read_pieces(request);
            for (i, block) in bytes.chunks(self.block as usize).enumerate() {
                let lba = request.slba as usize + i;
                let stamp = u64::from_le_bytes(*block.first_chunk().unwrap());
                assert!(block.chunks(8).all(|word| word == stamp.to_le_bytes()), "a torn block {lba}");
                assert!(
                    self.truth[lba].contains(&stamp),
                    "block {lba}: {stamp}, not of {:?}",
                    self.truth[lba]
                );
                self.truth[lba] = vec![stamp];
            }
        }
    }

    /// The outcome is not known.
    fn maybe_apply(&mut self, request: &Request) {
        for i in 0..request.blocks {
            if let Some(stamp) = self.new_stamp(request, i) {
                let stamps = &mut self.truth[(request.slba + i) as usize];
                if !stamps.contains(&stamp) {
                    stamps.push(stamp);
                }
            }
        }
    }
}

impl Owner for Traffic {
    fn completed(&mut self, _: u16, completed: Completed, _: u64) {
        self.finish(completed.token, completed.status.code());
    }

    fn unfinished(&mut self, _: u16, unfinished: &Unfinished, is_removed: bool) -> Fate {
        // No commands overlap here, so a write may always be submitted again.
        if !is_removed && !self.is_removed && replay::of(&unfinished.entry) != Replay::Never {
            self.tally.again += 1;
            return Fate::Resubmit;
        }
        self.tally.given_up += 1;
        let request = self.take(unfinished.token);
        self.maybe_apply(&request);
        // A late access would be seen as a change of this pattern, or by the model's own checks.
        self.fill_pieces(&request, |_| 0xbad);
        Fate::Fail
    }
}

/// Keeps `depth` requests in flight until `count` have ended, then drains.
pub fn run(rig: &mut Rig, traffic: &mut Traffic, depth: usize, count: u64) {
    let ended = |traffic: &Traffic| traffic.tally.succeeded + traffic.tally.failed + traffic.tally.given_up;
    let target = ended(traffic) + count;
    let mut turns = 0_u64;
    while ended(traffic) < target && !rig.is_ended {
        if !rig.pairs.is_empty() {
            traffic.fill(&mut rig.pairs, depth, rig.now);
        }
        rig.turn(traffic, 10_000);
        turns += 1;
        assert!(turns < 40_000_000, "{:?} {:?}", traffic.tally, rig.notes);
        skip_idle_time(rig, traffic);
    }
    while traffic.in_flight() > 0 {
        rig.turn(traffic, 10_000);
        turns += 1;
        assert!(turns < 40_000_000, "not drained: {:?} {:?}", traffic.tally, rig.notes);
        skip_idle_time(rig, traffic);
    }
}

/// While nothing but a timeout can happen, a turn may be longer.
fn skip_idle_time(rig: &mut Rig, _: &Traffic) {
    let is_ready = Controller::is_ready(&rig.controller);
    let held = rig.model.with(|model| model.held_commands());
    let in_flight: usize = rig.pairs.iter().map(|pair| usize::from(pair.in_flight())).sum();
    if !is_ready || (held < in_flight && !rig.pairs.iter().any(QueuePair::has_completion)) {
        rig.now += 1_000_000;
    }
}
