//! A VM's virtio-blk disk with one queue, driven by a test: single requests, and a load that verifies what it reads. Test tool,
//! any one thread, which polls with pauses: the cores are for the daemons.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aryk_front_end::blk::{self, Config};
use aryk_front_end::{
    Announced, Format, Memory, Piece, Ring, Session, Shape, Wanted, feature as ring_feature, protocol,
};
use rustix::event::{EventfdFlags, eventfd};

/// Upper bound of a request's duration while the cluster runs.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two polls without a completion; and the longer one of a load whose requests wait, which leaves the cores to
/// others.
const PAUSE: Duration = Duration::from_micros(100);
const LONG_PAUSE: Duration = Duration::from_millis(5);
/// A load whose last completion is so long ago waits.
const WAITS: Duration = Duration::from_millis(50);
/// Requests in flight, at most.
pub const SLOTS: u16 = 8;
/// Bytes of the longest request.
pub const LEN_MAX: usize = 256 << 10;
/// Bytes of a request of the load.
const BLOCK: usize = 4096;
/// Blocks of the load's area, from the start of the disk.
const BLOCKS: u64 = 64;

const RING: Shape = Shape { format: Format::Split, size: 32, event_idx: false };
/// Bytes for the ring, and for each slot's header, range and status.
const RING_SPACE: u64 = 16 << 10;
const HEAD_SPACE: u64 = 64;
/// Offsets within a slot's head.
const RANGE_AT: u64 = 16;
const STATUS_AT: u64 = 32;
/// A status that no device writes.
const UNANSWERED: u8 = 0xff;

/// A request (virtio 1.2, section 5.2.6). Offsets and lengths are in bytes, multiples of 512.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    /// Reads.
    Read {
        /// Where.
        at: u64,
        /// How much.
        len: usize,
    },
    /// Writes.
    Write {
        /// Where.
        at: u64,
        /// What.
        data: &'a [u8],
    },
    /// Makes completed writes durable.
    Flush,
    /// Discards.
    Discard {
        /// Where.
        at: u64,
        /// How much.
        len: u64,
    },
    /// Writes zeroes.
    WriteZeroes {
        /// Where.
        at: u64,
        /// How much.
        len: u64,
    },
}

/// A status of the specification other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed(pub u8);

/// The observations of a load.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Completed requests.
    pub requests: u64,
    /// The longest time without a completion.
    pub longest: Duration,
}

/// A VM with a disk.
#[derive(Debug)]
pub struct Vm {
    session: Session,
    memory: Memory,
    ring: Ring,
    kick: OwnedFd,
    /// By block of the load's area: the number of the last write.
    generations: Vec<u64>,
}

impl Vm {
    /// Connects to a controller's socket.
    ///
    /// # Errors
    /// The controller refuses.
    pub fn connect(socket: &Path) -> Result<Self> {
        let blk = blk::feature::FLUSH | blk::feature::DISCARD | blk::feature::WRITE_ZEROES;
        let wanted = Wanted {
            features: ring_feature::VERSION_1 | ring_feature::PROTOCOL,
            optional: blk | blk::feature::RO,
            protocol: protocol::CONFIG | protocol::REPLY_ACK,
            optional_protocol: 0,
            queues: 1,
            patience: PATIENCE,
        };
        let session = Session::connect(socket, &wanted)?;
        let slots = u64::from(SLOTS);
        let memory = Memory::new(RING_SPACE + slots * (HEAD_SPACE + LEN_MAX as u64))?;
        session.set_features()?;
        session.share(&memory)?;
        let ring = Ring::new(RING, &memory, 0);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (event()?, event()?);
        let announced =
            Announced { index: 0, size: RING.size, ring: &ring, kick: kick.as_fd(), call: call.as_fd() };
        session.start(&announced)?;
        session.enable(1)?;
        Ok(Self { session, memory, ring, kick, generations: vec![0; BLOCKS as usize] })
    }

    /// Whether the disk is read-only.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.session.features() & blk::feature::RO != 0
    }

    /// The disk's size in bytes, as its configuration space says now.
    ///
    /// # Errors
    /// The daemon does not reply.
    pub fn size(&self) -> Result<u64> {
        let config = self.session.config(blk::CONFIG_LEN)?;
        Ok(Config::parse(&config, self.session.features())?.capacity * blk::SECTOR)
    }

    /// Submits a request.
    pub fn submit(&mut self, slot: u16, request: Request<'_>) {
        let head = head(slot);
        let memory = self.memory.whole();
        let sectors = |bytes: u64| bytes / blk::SECTOR;
        let (kind, sector, body) = match request {
            Request::Read { at, len } => (0_u64, sectors(at), Some((data(slot), len as u32, true))),
            Request::Write { at, data: bytes } => {
                memory.write_bytes(data(slot) as usize, bytes);
                (1, sectors(at), Some((data(slot), bytes.len() as u32, false)))
            }
            Request::Flush => (4, 0, None),
            Request::Discard { at, len } => {
                memory.write((head + RANGE_AT) as usize, &[sectors(at), sectors(len)]);
                (11, 0, Some((head + RANGE_AT, 16, false)))
            }
            Request::WriteZeroes { at, len } => {
                memory.write((head + RANGE_AT) as usize, &[sectors(at), sectors(len)]);
                (13, 0, Some((head + RANGE_AT, 16, false)))
            }
        };
        memory.write(head as usize, &[kind, sector]);
        memory.write((head + STATUS_AT) as usize, &UNANSWERED);
        let mut pieces = vec![Piece { at: head, len: 16, write: false }];
        pieces.extend(body.map(|(at, len, write)| Piece { at, len, write }));
        pieces.push(Piece { at: head + STATUS_AT, len: 1, write: true });
        self.ring.add(slot, &pieces, None);
        if self.ring.publish() {
            // EAGAIN, a full counter, is harmless: the daemon has not read the earlier kicks yet.
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
    }

    /// Takes the next completion: its slot and status.
    ///
    /// # Errors
    /// The daemon completed a request that is not outstanding, or has disconnected.
    pub fn take(&mut self) -> Result<Option<(u16, u8)>> {
        if let Some((slot, _)) = self.ring.take()? {
            return Ok(Some((slot, self.memory.whole().read((head(slot) + STATUS_AT) as usize))));
        }
        ensure!(!self.session.wire().has_ended(), "arykd has disconnected");
        Ok(None)
    }

    /// Waits for the next completion.
    ///
    /// # Errors
    /// None comes in time.
    pub fn wait(&mut self) -> Result<(u16, u8)> {
        let began = Instant::now();
        loop {
            if let Some(done) = self.take()? {
                return Ok(done);
            }
            ensure!(began.elapsed() < PATIENCE, "a request did not complete in {PATIENCE:?}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Executes one request, while no other is in flight. The inner error is the disk's.
    ///
    /// # Errors
    /// It does not complete.
    pub fn execute(&mut self, request: Request<'_>) -> Result<Result<(), Failed>> {
        self.submit(0, request);
        let (_, status) = self.wait()?;
        Ok(if status == 0 { Ok(()) } else { Err(Failed(status)) })
    }

    /// Executes a request that must succeed.
    ///
    /// # Errors
    /// It fails.
    pub fn succeed(&mut self, request: Request<'_>) -> Result<()> {
        self.execute(request)?
            .map_err(|Failed(status)| anyhow::anyhow!("a request ended with status {status}"))
    }

    /// Reads, which must succeed.
    ///
    /// # Errors
    /// It fails.
    pub fn read(&mut self, at: u64, len: usize) -> Result<Vec<u8>> {
        self.succeed(Request::Read { at, len })?;
        Ok(self.data(0, len))
    }

    /// The data of a slot's last request.
    #[must_use]
    pub fn data(&self, slot: u16, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.whole().read_bytes(data(slot) as usize, &mut bytes);
        bytes
    }

    /// Writes blocks at the start of the disk, reads each, and checks it, until `stop`; then waits for the requests in flight.
    /// There is always a request of each slot in flight. A request may take as long as `patience`.
    ///
    /// # Errors
    /// A request fails, does not complete, or a read returns other data than was written last.
    pub fn load(&mut self, patience: Duration, stop: &AtomicBool) -> Result<Seen> {
        let mut seen = Seen::default();
        let mut blocks: Vec<_> = (0..u64::from(SLOTS)).collect();
        let mut reads = vec![false; blocks.len()];
        for slot in 0..SLOTS {
            self.write_block(slot, blocks[usize::from(slot)]);
        }
        let mut running = SLOTS;
        let mut moved = Instant::now();
        while running > 0 {
            let Some((slot, status)) = self.take()? else {
                let waited = moved.elapsed();
                ensure!(waited < patience, "{running} requests did not complete in {patience:?}");
                std::thread::sleep(if waited > WAITS { LONG_PAUSE } else { PAUSE });
                continue;
            };
            seen.requests += 1;
            seen.longest = seen.longest.max(moved.elapsed());
            moved = Instant::now();
            let i = usize::from(slot);
            ensure!(status == 0, "a request for block {} ended with status {status}", blocks[i]);
            if reads[i] {
                self.check_block(blocks[i], &self.data(slot, BLOCK))?;
                blocks[i] = (blocks[i] + u64::from(SLOTS)) % BLOCKS;
            }
            // The blocks that were written last are read when the load has ended.
            if stop.load(Ordering::Relaxed) {
                running -= 1;
                continue;
            }
            reads[i] = !reads[i];
            if reads[i] {
                self.submit(slot, Request::Read { at: blocks[i] * BLOCK as u64, len: BLOCK });
            } else {
                self.write_block(slot, blocks[i]);
            }
        }
        Ok(seen)
    }

    /// Reads one block after the other, without pauses, for the time `window`. Returns the latency that one read in a hundred
    /// exceeds.
    ///
    /// # Errors
    /// A read fails.
    pub fn p99(&mut self, window: Duration) -> Result<Duration> {
        let (began, mut latencies) = (Instant::now(), Vec::new());
        while began.elapsed() < window || latencies.is_empty() {
            let sent = Instant::now();
            self.submit(0, Request::Read { at: 0, len: BLOCK });
            let (_, status) = loop {
                if let Some(done) = self.take()? {
                    break done;
                }
                ensure!(sent.elapsed() < PATIENCE, "a read did not complete in {PATIENCE:?}");
                std::hint::spin_loop();
            };
            ensure!(status == 0, "a read ended with status {status}");
            latencies.push(sent.elapsed());
        }
        latencies.sort_unstable();
        Ok(latencies[latencies.len() * 99 / 100])
    }

    fn write_block(&mut self, slot: u16, block: u64) {
        self.generations[block as usize] += 1;
        let data = content(block, self.generations[block as usize]);
        self.submit(slot, Request::Write { at: block * BLOCK as u64, data: &data });
    }

    fn check_block(&self, block: u64, bytes: &[u8]) -> Result<()> {
        let generation = self.generations[block as usize];
        if bytes != content(block, generation) {
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
            bail!("block {block} has write {} of block {}, not its write {generation}", word(8), word(0));
        }
        Ok(())
    }

    /// Checks that an image has what the load wrote.
    ///
    /// # Errors
    /// A block has other data.
    pub fn check_image(&self, image: &[u8]) -> Result<()> {
        ensure!(image.len() >= BLOCKS as usize * BLOCK, "an image of {} bytes", image.len());
        for (block, bytes) in (0..BLOCKS).zip(image.chunks_exact(BLOCK)) {
            self.check_block(block, bytes).context("in the image")?;
        }
        Ok(())
    }
}

const fn head(slot: u16) -> u64 {
    RING_SPACE + slot as u64 * HEAD_SPACE
}

const fn data(slot: u16) -> u64 {
    RING_SPACE + SLOTS as u64 * HEAD_SPACE + slot as u64 * LEN_MAX as u64
}

/// A block's content after its write number `generation`; number 0 are zeroes.
fn content(block: u64, generation: u64) -> Vec<u8> {
    if generation == 0 {
        return vec![0; BLOCK];
    }
    [block, generation].map(u64::to_le_bytes).concat().repeat(BLOCK / 16)
}
