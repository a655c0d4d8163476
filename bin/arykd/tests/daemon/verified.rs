//! A VM that keeps requests in flight, and checks each read against its last write of the block. A block has one request at a
//! time, so that the expected contents are known. Runs on the test's thread.

#![expect(clippy::disallowed_methods, reason = "the VM measures its longest wait")]

use super::harness::Daemon;
use aryk_front_end::{
    Format, Layout, Memory, Operation, Queue, Session, Shape, Wanted, blk, feature, protocol,
};
use fastrand::Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const LEN: u32 = 4096;
const WORDS: usize = LEN as usize / 8;
const BLOCKS: u64 = 128;
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests in flight.
pub const DEPTH: u16 = 16;

/// See the [module](self).
pub struct VerifiedDisk {
    queue: Queue<blk::Requests>,
    _session: Session,
    memory: Memory,
    random: Rng,
    /// By block: the number of its writes.
    generations: Vec<u64>,
    /// By slot: the block of its request.
    blocks: Vec<u64>,
    requests: u64,
    moved: Instant,
    longest: Duration,
}

impl VerifiedDisk {
    /// Connects to the controller of a disk of at least half a MiB, and begins.
    pub fn start(socket: &Path, seed: u64) -> Self {
        let shape = Shape { format: Format::Split, size: 64, event_idx: true };
        let layout = Layout { shape, slots: DEPTH, len: LEN, indirect: false };
        let memory = Memory::new(layout.space::<blk::Requests>()).unwrap();
        let queue = Queue::new(blk::Requests, &memory, 0, 0, layout).unwrap();
        let wanted = Wanted {
            features: feature::VERSION_1 | feature::PROTOCOL | feature::EVENT_IDX,
            optional: 0,
            protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
            optional_protocol: 0,
            queues: 1,
            patience: PATIENCE,
        };
        let session = Session::connect(socket, &wanted).unwrap();
        session.set_features().unwrap();
        session.share(&memory).unwrap();
        session.start(&queue.announced()).unwrap();
        session.enable(1).unwrap();
        let mut disk = Self {
            queue,
            _session: session,
            memory,
            random: Rng::with_seed(seed),
            generations: vec![0; BLOCKS as usize],
            blocks: vec![BLOCKS; DEPTH.into()],
            requests: 0,
            moved: Instant::now(),
            longest: Duration::ZERO,
        };
        (0..DEPTH).for_each(|slot| disk.submit(slot));
        disk
    }

    /// Waits for this number of completions, and submits another request after each.
    pub fn run(&mut self, requests: u64) {
        for _ in 0..requests {
            let slot = self.complete();
            self.submit(slot);
        }
    }

    /// Waits for all requests, and then reads all blocks. Returns the number of requests.
    pub fn finish(mut self) -> u64 {
        self.drain();
        self.read_all()
    }

    fn drain(&mut self) {
        for _ in 0..DEPTH {
            self.complete();
        }
    }

    fn read_all(mut self) -> u64 {
        for block in 0..BLOCKS {
            self.blocks[0] = block;
            self.read(0);
            self.complete();
        }
        self.requests
    }

    /// The longest time without a completion since the last call.
    pub fn take_longest(&mut self) -> Duration {
        std::mem::take(&mut self.longest)
    }

    fn complete(&mut self) -> u16 {
        let done = self.queue.wait(PATIENCE).unwrap();
        self.longest = self.longest.max(self.moved.elapsed());
        self.moved = Instant::now();
        self.requests += 1;
        let slot = usize::from(done.slot);
        let block = std::mem::replace(&mut self.blocks[slot], BLOCKS);
        let generation = self.generations[block as usize];
        if done.operation == Operation::Read && generation > 0 {
            let found: [u64; WORDS] = self.memory.whole().read(done.place.data as usize);
            assert!(
                found == contents(block, generation),
                "block {block} does not have its write {generation}: {:x?}",
                &found[..2]
            );
        }
        done.slot
    }

    fn submit(&mut self, slot: u16) {
        let block = loop {
            let block = self.random.u64(0..BLOCKS);
            if !self.blocks.contains(&block) {
                break block;
            }
        };
        self.blocks[usize::from(slot)] = block;
        let generation = &mut self.generations[block as usize];
        if *generation > 0 && self.random.bool() {
            return self.read(slot);
        }
        *generation += 1;
        let contents = contents(block, *generation);
        self.memory.whole().write(self.queue.place(slot).data as usize, &contents);
        self.queue.submit(slot, Operation::Write, block * u64::from(LEN));
        self.queue.publish();
    }

    fn read(&mut self, slot: u16) {
        self.memory.whole().write(self.queue.place(slot).data as usize, &[0_u64; WORDS]);
        self.queue.submit(slot, Operation::Read, self.blocks[usize::from(slot)] * u64::from(LEN));
        self.queue.publish();
    }
}

fn contents(block: u64, generation: u64) -> [u64; WORDS] {
    std::array::from_fn(|at| generation << 32 | block << 16 | at as u64)
}

#[test]
#[should_panic(expected = "does not have its write")]
fn a_lost_write_is_noticed() {
    let daemon = Daemon::start(&[]);
    daemon.aryk(&["disk", "create", "d", "--file", "d.img", "--size", "1M", "--block-size", "4096"]).unwrap();
    daemon.aryk(&["attach", "d"]).unwrap();
    let mut disk = VerifiedDisk::start(&daemon.dir().join("vhost/d"), 1);
    disk.run(1000);
    // A direct write that overlaps a buffered one fails, so no request is in flight here.
    disk.drain();
    let image = File::options().write(true).open(daemon.dir().join("d.img")).unwrap();
    image.write_all_at(&[0; LEN as usize * BLOCKS as usize], 0).unwrap();
    image.sync_all().unwrap();
    disk.read_all();
}
