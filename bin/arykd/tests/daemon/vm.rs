//! A VM that writes and checks data, for tests of other work of the daemon at the same time. Its thread polls, and yields when it
//! has no work.

#![expect(clippy::disallowed_methods, reason = "the VM measures its longest wait")]

use aryk_front_end::{
    Builder, Error, Format, Layout, Memory, Operation, Queue, Session, Shape, Wanted, blk, feature, protocol,
    scsi,
};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a request, and blocks of each queue's area.
const LEN: u32 = 4096;
const BLOCKS: u64 = 64;
const DEPTH: u16 = 8;
const PATIENCE: Duration = Duration::from_secs(30);

/// The observations of a VM.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// Requests that completed without error.
    pub requests: u64,
    /// Reads that were checked.
    pub checked: u64,
    /// The longest time without a completion in a queue.
    pub longest: Duration,
}

/// A queue's requests: each slot has blocks of its own, writes a block, reads it, and goes on to the next.
struct QueueLoad<B> {
    queue: Queue<B>,
    /// By block.
    generations: Vec<u64>,
    slots: Vec<u64>,
    moved: Instant,
}

/// The VM.
pub struct Vm<B> {
    lanes: Vec<QueueLoad<B>>,
    /// Queues without load.
    _fixed: Vec<Queue<B>>,
    session: Session,
    memory: Memory,
}

impl Vm<blk::Requests> {
    /// A VM with this number of queues on a disk of at least 1 MiB.
    pub fn blk(socket: &Path, queues: u16) -> Self {
        Self::connect(blk::Requests, socket, 0, queues)
    }
}

impl Vm<scsi::Requests> {
    /// A VM with target 0 of a SCSI controller.
    pub fn scsi(socket: &Path, queues: u16) -> Self {
        let mut vm = Self::connect(scsi::Requests::new(0, 0), socket, scsi::FIXED_QUEUES, queues);
        for lane in &mut vm.lanes {
            lane.queue.probe(PATIENCE).unwrap();
        }
        vm
    }
}

impl<B: Builder + Copy> Vm<B> {
    fn connect(requests: B, socket: &Path, fixed: u16, queues: u16) -> Self {
        let shape = Shape { format: Format::Split, size: 32, event_idx: true };
        let layout = Layout { shape, slots: DEPTH, len: LEN, indirect: false };
        let bare = Layout { slots: 0, ..layout };
        let (space, bare_space) = (layout.space::<B>(), bare.space::<B>());
        let loaded = u64::from(fixed) * bare_space;
        let memory = Memory::new(loaded + u64::from(queues) * space).unwrap();
        let fixed_queue = |i: u16| Queue::new(requests, &memory, i, u64::from(i) * bare_space, bare).unwrap();
        let lane = |i: u16| {
            let at = loaded + u64::from(i) * space;
            let queue = Queue::new(requests, &memory, fixed + i, at, layout).unwrap();
            QueueLoad {
                queue,
                generations: vec![0; BLOCKS as usize],
                slots: Vec::new(),
                moved: Instant::now(),
            }
        };
        let (idle, lanes): (Vec<_>, Vec<_>) =
            ((0..fixed).map(fixed_queue).collect(), (0..queues).map(lane).collect());
        let wanted = Wanted {
            features: feature::VERSION_1 | feature::PROTOCOL | feature::EVENT_IDX,
            optional: 0,
            protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
            optional_protocol: 0,
            queues: fixed + queues,
            patience: PATIENCE,
        };
        let session = Session::connect(socket, &wanted).unwrap();
        session.set_features().unwrap();
        session.share(&memory).unwrap();
        idle.iter().for_each(|queue| session.start(&queue.announced()).unwrap());
        lanes.iter().for_each(|lane| session.start(&lane.queue.announced()).unwrap());
        session.enable(fixed + queues).unwrap();
        Self { lanes, _fixed: idle, session, memory }
    }

    /// Writes and checks until `stop`, then waits for the requests in flight.
    ///
    /// # Errors
    /// A request failed, or did not complete.
    ///
    /// # Panics
    /// A block does not have the contents that were written.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<Seen, Error> {
        let mut seen = Seen::default();
        let mut in_flight = 0_u64;
        for (number, lane) in (0..).zip(&mut self.lanes) {
            lane.moved = Instant::now();
            lane.slots = (0..u64::from(DEPTH)).collect();
            for slot in 0..DEPTH {
                lane.write(slot, number, &self.memory);
                in_flight += 1;
            }
            lane.queue.publish();
        }
        while in_flight > 0 {
            let ends = stop.load(Ordering::Relaxed);
            let mut turn = 0;
            for (number, lane) in (0..).zip(&mut self.lanes) {
                let taken = lane.turn(number, ends, &self.memory, &mut seen)?;
                in_flight -= if ends { taken } else { 0 };
                turn += taken;
                assert!(
                    lane.moved.elapsed() < PATIENCE,
                    "a queue has {DEPTH} requests that do not come back"
                );
            }
            if turn == 0 {
                std::thread::yield_now();
            }
        }
        Ok(seen)
    }

    /// Whether the daemon has disconnected.
    pub fn has_ended(&self) -> bool {
        self.session.wire().has_ended()
    }
}

impl<B: Builder + Copy> QueueLoad<B> {
    /// Takes the completions, and submits new requests unless `ends`. Returns the number of completions.
    fn turn(&mut self, number: u64, ends: bool, memory: &Memory, seen: &mut Seen) -> Result<u64, Error> {
        let mut taken = 0;
        while let Some(done) = self.queue.take()? {
            taken += 1;
            seen.requests += 1;
            let block = self.slots[usize::from(done.slot)];
            if done.operation == Operation::Read {
                let found: [u64; 3] = memory.whole().read(done.place.data as usize);
                assert_eq!(found, self.mark(number, block), "queue {number}, block {block}");
                seen.checked += 1;
                self.slots[usize::from(done.slot)] = (block + u64::from(DEPTH)) % BLOCKS;
            }
            if ends {
                continue;
            }
            match done.operation {
                Operation::Read => self.write(done.slot, number, memory),
                Operation::Write => {
                    memory.whole().write(done.place.data as usize, &[0_u64; 3]);
                    self.queue.submit(done.slot, Operation::Read, offset(number, block));
                }
            }
        }
        if taken > 0 {
            seen.longest = seen.longest.max(self.moved.elapsed());
            self.moved = Instant::now();
            self.queue.publish();
        }
        Ok(taken)
    }

    fn write(&mut self, slot: u16, number: u64, memory: &Memory) {
        let block = self.slots[usize::from(slot)];
        self.generations[block as usize] += 1;
        let mark = self.mark(number, block);
        memory.whole().write(self.queue.place(slot).data as usize, &mark);
        self.queue.submit(slot, Operation::Write, offset(number, block));
    }

    fn mark(&self, number: u64, block: u64) -> [u64; 3] {
        [number, block, self.generations[block as usize]]
    }
}

/// The offset of a block: each queue has an area of its own.
fn offset(number: u64, block: u64) -> u64 {
    (number * BLOCKS + block) * u64::from(LEN)
}
