//! A VM with a SCSI controller, driven by a test: a load on each target, which verifies what it reads, and goes on with the
//! daemon's successor as QEMU does. Test tool, any one thread, which polls with pauses: the cores are for the daemons.
//!
//! The requests in flight are in the rings and in the in-flight region, which outlive a daemon.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aryk_front_end::scsi::{FIXED_QUEUES, Requests};
use aryk_front_end::{
    Announced, Builder, Format, Memory, Operation, Place, Request, RequestError, Ring, Session, Shape,
    Wanted, feature, payload, protocol,
};
use rustix::event::{EventfdFlags, eventfd};

/// Upper bound of a request's duration while a daemon is connected, and of the time without one.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Requests in flight of each target.
pub const SLOTS: usize = 4;
/// Bytes that are in each 32 bytes which a load writes.
const MARKER: [u8; 16] = *b"a VM's plaintext";

/// Pause between two polls without a completion.
const PAUSE: Duration = Duration::from_micros(200);
/// Pause before a request to a missing target is repeated.
const REPEAT: Duration = Duration::from_millis(20);
/// Timeout of the daemon's replies.
const REPLY: Duration = Duration::from_secs(10);
/// Bytes of a request's data, and number of such blocks in a target's area, at its start.
const BLOCK: usize = 4096;
const BLOCKS: usize = 64;
/// Descriptors of each ring: three for each request of eight targets.
const RING: Shape = Shape { format: Format::Split, size: 128, event_idx: false };
const QUEUES: u16 = FIXED_QUEUES + 1;
/// The unit attention "capacity data has changed" (SPC-4, table 49), and the key of all unit attentions.
const RESIZED: (u8, u8) = (0x2a, 0x09);
const UNIT_ATTENTION: u8 = 6;

/// A load as other threads see and control it.
#[derive(Debug)]
pub struct Progress {
    targets: Vec<Counters>,
    stop: AtomicBool,
    abandon: AtomicBool,
    failed: AtomicBool,
}

/// The load of one target.
#[derive(Debug, Default)]
pub struct Counters {
    /// Successful requests.
    pub done: AtomicU64,
    /// Whether failed requests are repeated, because the target is being unplugged.
    pub may_be_missing: AtomicBool,
    /// Requests that failed for that reason.
    pub missing: AtomicU64,
    /// Reports that the disk's size has changed.
    pub resized: AtomicU64,
}

impl Progress {
    /// For a VM with so many targets.
    #[must_use]
    pub fn new(targets: usize) -> Self {
        let targets = (0..targets).map(|_| Counters::default()).collect();
        let [stop, abandon, failed] = std::array::from_fn(|_| AtomicBool::new(false));
        Self { targets, stop, abandon, failed }
    }

    /// The targets' counters.
    #[must_use]
    pub fn targets(&self) -> &[Counters] {
        &self.targets
    }

    /// By target: the number of successful requests.
    #[must_use]
    pub fn done(&self) -> Vec<u64> {
        self.targets.iter().map(|target| target.done.load(Ordering::Relaxed)).collect()
    }

    /// Ends the load when its requests in flight have completed.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Whether the load has ended with an error.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Ends the load now.
    pub fn abandon(&self) {
        self.abandon.store(true, Ordering::Relaxed);
    }
}

/// A request of the load: each slot reads a block, writes it, and goes on to its next block.
#[derive(Clone, Copy, Debug)]
struct Slot {
    target: usize,
    operation: Operation,
    block: usize,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Idle,
    InFlight { since: Instant },
    Repeated { at: Instant },
}

/// The region in which a daemon records requests in flight for its successor.
#[derive(Debug)]
struct Inflight {
    fd: OwnedFd,
    description: Vec<u8>,
}

/// A ring with its notifications.
#[derive(Debug)]
struct Queue {
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
}

/// A VM with disks at a SCSI controller.
#[derive(Debug)]
pub struct Vm {
    number: u64,
    socket: PathBuf,
    memory: Memory,
    /// The control queue, the event queue and the request queue.
    queues: Vec<Queue>,
    targets: Vec<Requests>,
    slots: Vec<Slot>,
    /// By target and block: the number of the last write.
    generations: Vec<[u64; BLOCKS]>,
    session: Option<Session>,
    inflight: Option<Inflight>,
    /// Since when a daemon is connected, or none is.
    since: Instant,
}

impl Vm {
    /// VM number `number`, with the targets 0 to `targets` - 1 of the controller that listens at `socket`.
    ///
    /// # Errors
    /// The controller refuses.
    ///
    /// # Panics
    /// If a controller cannot have so many targets.
    pub fn connect(number: usize, targets: usize, socket: &Path) -> Result<Self> {
        assert!((1..=8).contains(&targets), "{targets} targets");
        let memory = Memory::new(slot_at(targets * SLOTS))?;
        let mut queues = Vec::new();
        for index in 0..QUEUES {
            let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let ring = Ring::new(RING, &memory, u64::from(index) * ring_space());
            queues.push(Queue { ring, kick: event()?, call: event()? });
        }
        let slot = |at: usize| Slot {
            target: at / SLOTS,
            operation: Operation::Read,
            block: at % SLOTS,
            state: State::Idle,
        };
        let mut vm = Self {
            number: number as u64,
            socket: socket.to_owned(),
            memory,
            queues,
            targets: (0..targets as u8).map(|target| Requests::new(target, 0)).collect(),
            slots: (0..targets * SLOTS).map(slot).collect(),
            generations: vec![[0; BLOCKS]; targets],
            session: None,
            inflight: None,
            since: Instant::now(),
        };
        vm.establish()?;
        Ok(vm)
    }

    /// Starts a session with the daemon that listens.
    fn establish(&mut self) -> Result<()> {
        let wanted = Wanted {
            features: feature::VERSION_1 | feature::PROTOCOL,
            optional: 0,
            protocol: protocol::MQ | protocol::REPLY_ACK | protocol::INFLIGHT_SHMFD,
            optional_protocol: 0,
            queues: QUEUES,
            patience: REPLY,
        };
        let session = Session::open(UnixStream::connect(&self.socket)?, &wanted)?;
        session.set_features()?;
        if self.inflight.is_none() {
            let request = payload![0_u64, 0_u64, QUEUES, RING.size, 0_u32];
            let (description, fd) = session.wire().ask(Request::GET_INFLIGHT_FD, &request)?;
            self.inflight = Some(Inflight { fd: fd.context("no in-flight region")?, description });
        }
        let inflight = self.inflight.as_ref().expect("there is one");
        session.wire().send(Request::SET_INFLIGHT_FD, &inflight.description, &[inflight.fd.as_fd()])?;
        session.share(&self.memory)?;
        for (index, queue) in (0..).zip(&self.queues) {
            let Queue { ring, kick, call } = queue;
            session.start(&Announced {
                index,
                size: RING.size,
                ring,
                kick: kick.as_fd(),
                call: call.as_fd(),
            })?;
        }
        session.enable(QUEUES)?;
        self.session = Some(session);
        self.since = Instant::now();
        Ok(())
    }

    /// Reconnects if the daemon has ended.
    fn check_session(&mut self) -> Result<()> {
        if self.session.as_ref().is_some_and(|session| session.wire().has_ended()) {
            self.session = None;
            self.since = Instant::now();
        }
        if self.session.is_none()
            && let Err(error) = self.establish()
        {
            // The successor has not started yet.
            ensure!(self.since.elapsed() < PATIENCE, "no daemon to connect to: {error:#}");
        }
        Ok(())
    }

    /// Reads and writes blocks at the start of each target, and checks what it reads, until `progress` says stop; then waits for
    /// the requests in flight.
    ///
    /// # Errors
    /// A request fails or does not complete, a read returns other data than was written last, or no daemon can be connected.
    pub fn load(&mut self, progress: &Progress) -> Result<()> {
        let ended = self.run(progress);
        progress.failed.store(ended.is_err(), Ordering::Relaxed);
        ended
    }

    fn run(&mut self, progress: &Progress) -> Result<()> {
        while !progress.abandon.load(Ordering::Relaxed) {
            self.check_session()?;
            let mut taken = 0;
            while let Some((slot, written)) = self.take()? {
                self.complete(slot, written, &progress.targets)?;
                taken += 1;
            }
            let stop = progress.stop.load(Ordering::Relaxed);
            self.fill(stop)?;
            if stop && self.slots.iter().all(|slot| matches!(slot.state, State::Idle)) {
                return Ok(());
            }
            if taken == 0 {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Submits the requests whose time has come, and checks that none is in flight for too long.
    fn fill(&mut self, stop: bool) -> Result<()> {
        let now = Instant::now();
        for at in 0..self.slots.len() {
            match self.slots[at].state {
                State::Idle if !stop => self.submit(at),
                State::Repeated { at: time } if time <= now => self.submit(at),
                State::InFlight { since } if since.max(self.since).elapsed() > PATIENCE => {
                    bail!("VM {}: {:?} did not complete in {PATIENCE:?}", self.number, self.slots[at]);
                }
                _ => {}
            }
        }
        let queue = &mut self.queues[usize::from(FIXED_QUEUES)];
        if queue.ring.publish() {
            // EAGAIN, a full counter, is harmless: the daemon has not read the earlier kicks yet.
            let _ = rustix::io::write(&queue.kick, &1_u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Puts the slot's request into the ring. A repeated write has the content that it had.
    fn submit(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        let is_new = matches!(slot.state, State::Idle);
        slot.state = State::InFlight { since: Instant::now() };
        let Slot { target, operation, block, .. } = *slot;
        if operation == Operation::Write {
            let generation = &mut self.generations[target][block];
            *generation += u64::from(is_new);
            let data = content(self.number, target, block, *generation);
            self.memory.whole().write_bytes(place(at).data as usize, &data);
        }
        self.offer(at, (block * BLOCK) as u64);
    }

    fn offer(&mut self, at: usize, offset: u64) {
        let Slot { target, operation, .. } = self.slots[at];
        let requests = self.targets[target];
        requests.set_up(self.memory.whole(), operation, place(at), offset);
        let pieces = requests.pieces(operation, place(at));
        self.queues[usize::from(FIXED_QUEUES)].ring.add(at as u16, &pieces, None);
    }

    fn take(&mut self) -> Result<Option<(usize, u32)>> {
        let taken = self.queues[usize::from(FIXED_QUEUES)].ring.take()?;
        Ok(taken.map(|(slot, written)| (usize::from(slot), written)))
    }

    fn complete(&mut self, at: usize, written: u32, counters: &[Counters]) -> Result<()> {
        let Slot { target, operation, block, .. } = self.slots[at];
        let counters = &counters[target];
        let checked = self.targets[target].check(self.memory.whole(), operation, place(at), written);
        let repeat = State::Repeated { at: Instant::now() + REPEAT };
        match checked {
            Ok(()) => {}
            Err(RequestError::Sense { key: UNIT_ATTENTION, code, qualifier }) => {
                let is_resized = (code, qualifier) == RESIZED;
                counters.resized.fetch_add(is_resized.into(), Ordering::Relaxed);
                self.slots[at].state = repeat;
                return Ok(());
            }
            Err(_) if counters.may_be_missing.load(Ordering::Relaxed) => {
                counters.missing.fetch_add(1, Ordering::Relaxed);
                self.slots[at].state = repeat;
                return Ok(());
            }
            Err(error) => {
                return Err(error).with_context(|| format!("VM {}, {:?}", self.number, self.slots[at]));
            }
        }
        if operation == Operation::Read {
            self.check_block(at)?;
        }
        let slot = &mut self.slots[at];
        slot.state = State::Idle;
        (slot.operation, slot.block) = match operation {
            Operation::Read => (Operation::Write, block),
            Operation::Write => (Operation::Read, (block + SLOTS) % BLOCKS),
        };
        counters.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Checks the data that a slot has read. What a block has before its first write, is not known.
    fn check_block(&self, at: usize) -> Result<()> {
        let Slot { target, block, .. } = self.slots[at];
        let generation = self.generations[target][block];
        let data = self.data(at);
        if generation == 0 || data == content(self.number, target, block, generation) {
            return Ok(());
        }
        let vm = self.number;
        bail!("VM {vm}, target {target}: block {block} has {:?}, not write {generation}", &data[..32])
    }

    fn data(&self, at: usize) -> Vec<u8> {
        let mut data = vec![0; BLOCK];
        self.memory.whole().read_bytes(place(at).data as usize, &mut data);
        data
    }

    /// Reads all blocks that a load wrote, and checks them, while no load runs.
    ///
    /// # Errors
    /// A read fails, or returns other data than was written last.
    pub fn verify(&mut self) -> Result<()> {
        for target in 0..self.targets.len() {
            for block in 0..BLOCKS {
                self.slots[target * SLOTS].block = block;
                let data = self.read(target, (block * BLOCK) as u64)?;
                self.check_block(target * SLOTS)?;
                let is_written = self.generations[target][block] > 0;
                ensure!(!is_written || has_plaintext(&data), "a written block is no plaintext");
            }
            self.slots[target * SLOTS].block = 0;
        }
        Ok(())
    }

    /// Reads [`BLOCK`] bytes of a target from `offset` on, while no load runs.
    ///
    /// # Errors
    /// The read fails.
    pub fn read(&mut self, target: usize, offset: u64) -> Result<Vec<u8>> {
        let at = target * SLOTS;
        self.slots[at].operation = Operation::Read;
        let began = Instant::now();
        loop {
            self.offer(at, offset);
            self.fill(true)?;
            let written = loop {
                if let Some((_, written)) = self.take()? {
                    break written;
                }
                ensure!(began.elapsed() < PATIENCE, "a read did not complete in {PATIENCE:?}");
                std::thread::sleep(PAUSE);
            };
            match self.targets[target].check(self.memory.whole(), Operation::Read, place(at), written) {
                Ok(()) => return Ok(self.data(at)),
                Err(RequestError::Sense { key: UNIT_ATTENTION, .. }) => {}
                Err(error) => return Err(error).with_context(|| format!("target {target} at {offset}")),
            }
        }
    }

    /// Number of blocks that were written at least once.
    #[must_use]
    pub fn written(&self) -> usize {
        self.generations.iter().flatten().filter(|&&generation| generation > 0).count()
    }
}

/// Whether bytes, such as those of an image, have a part of what a load writes as it is.
#[must_use]
pub fn has_plaintext(bytes: &[u8]) -> bool {
    bytes.chunks_exact(MARKER.len()).any(|part| part == MARKER)
}

/// A block's content after its write number `generation`.
fn content(vm: u64, target: usize, block: usize, generation: u64) -> Vec<u8> {
    let place = vm << 32 | (target as u64) << 16 | block as u64;
    let mut part = [0; 32];
    part[..8].copy_from_slice(&place.to_le_bytes());
    part[8..16].copy_from_slice(&generation.to_le_bytes());
    part[16..].copy_from_slice(&MARKER);
    part.repeat(BLOCK / part.len())
}

fn ring_space() -> u64 {
    RING.space().next_multiple_of(BLOCK as u64)
}

/// Offset of a slot: its data, and the other parts of its request in the page behind it.
fn slot_at(slot: usize) -> u64 {
    u64::from(QUEUES) * ring_space() + slot as u64 * 2 * BLOCK as u64
}

fn place(slot: usize) -> Place {
    let at = slot_at(slot);
    Place { head: at + BLOCK as u64, data: at, len: BLOCK as u32 }
}
