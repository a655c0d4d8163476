//! Attacks by a hostile front-end within the protocol. An attack has one or more sessions and lasts a quarter of a second, or
//! until it is stopped. A refusal or disconnect by the daemon is an accepted result; the test measures the effect on the victim.

use super::raw::{INDIRECT, NEXT, Plan, RINGS, Raw, WRITE, wanted};
use aryk_front_end::{Error, Memory, Request, Session, payload};
use fastrand::Rng;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Duration of an attack before the next one is drawn.
const SLICE: Duration = Duration::from_millis(250);

/// Offsets of requests in the memory: headers and statuses, indirect tables, data.
const HEADS: u64 = RINGS;
const HEAD: u64 = 64;
const TABLES: u64 = 4 << 20;
const DATA: u64 = 8 << 20;
const SMALL: u64 = 16 << 20;
/// Memory for the longest buffer of one descriptor; the attacker touches none of it.
const LARGE: u64 = 5 << 30;

/// Request types (virtio 1.2, section 5.2.6), and an invalid one.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const NO_TYPE: u32 = 77;

/// An attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// Small requests that fill the ring.
    FullRing,
    /// Indirect tables with more descriptors than allowed, each of a few bytes.
    LongChains,
    /// Requests of hundreds of megabytes, all with the same pages.
    LongTransfers,
    /// Buffers of gigabytes in requests that complete at once, while the dirty log is on.
    DirtyLog,
    /// A ring full of requests that the disk does not complete; then their memory is removed.
    Revoke,
    /// Sparse guest memory of terabytes.
    HugeMemory,
    /// Hundreds of megabytes of populated memory, removed.
    LargeMemoryGoes,
    /// Refused messages, and garbage.
    Messages,
    /// Sessions that end as soon as they start.
    Reconnects,
    /// Kicks without requests.
    Kicks,
    /// Zeroes and discards of the largest allowed ranges.
    Ranges,
    /// SCSI commands with long lists and ranges, overlapping.
    ScsiCommands,
    /// Aborts and resets during SCSI commands.
    TaskManagement,
    /// Stops and starts of the queue with requests in flight.
    Flips,
}

/// A running attacker.
struct Attacker<'a> {
    vhost: &'a Path,
    number: usize,
    random: &'a mut Rng,
    stop: &'a AtomicBool,
    began: Instant,
    rounds: &'a AtomicU64,
}

impl Attack {
    /// Attacks through the controllers of attacker `number`, and adds to `rounds`.
    pub fn run(self, vhost: &Path, number: usize, random: &mut Rng, stop: &AtomicBool, rounds: &AtomicU64) {
        let mut attacker = Attacker { vhost, number, random, stop, began: Instant::now(), rounds };
        let ended = match self {
            Self::FullRing => attacker.full_ring(),
            Self::LongChains => attacker.long_chains(),
            Self::LongTransfers => attacker.long_transfers(),
            Self::DirtyLog => attacker.dirty_log(),
            Self::Revoke => attacker.revoke(),
            Self::HugeMemory => attacker.huge_memory(),
            Self::LargeMemoryGoes => attacker.large_memory_goes(),
            Self::Messages => attacker.messages(),
            Self::Reconnects => attacker.reconnects(),
            Self::Kicks => attacker.kicks(),
            Self::Ranges => attacker.ranges(),
            Self::ScsiCommands => attacker.scsi(false),
            Self::TaskManagement => attacker.scsi(true),
            Self::Flips => attacker.flips(),
        };
        match ended {
            Ok(()) => {}
            // The daemon may refuse a message or end the session.
            Err(Error::Refused(_) | Error::HungUp | Error::Lacks(_) | Error::Reply { .. }) => {}
            Err(error) => panic!("{self:?}: {error}"),
        }
    }
}

impl Attacker<'_> {
    fn goes_on(&self) -> bool {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        !self.stop.load(Ordering::Relaxed) && self.began.elapsed() < SLICE
    }

    fn socket(&self, kind: &str) -> PathBuf {
        self.vhost.join(format!("{kind}{}", self.number))
    }

    fn blk(&self, disk: &str, memory: u64) -> Result<Raw, Error> {
        Raw::connect(&self.socket(disk), Plan { index: 0, memory })
    }

    /// Waits until a ring has room again, for a while.
    fn wait(&self, raw: &Raw) {
        while raw.outstanding() > 0 && !self.stop.load(Ordering::Relaxed) && self.began.elapsed() < SLICE {
            std::thread::park_timeout(Duration::from_micros(50));
        }
    }

    /// Fills the ring with chains of three descriptors.
    fn fill(&mut self, raw: &mut Raw, kind: u32, len: u32) {
        for request in 0..raw.size / 3 {
            let head = HEADS + u64::from(request) % 4096 * HEAD;
            header(raw, head, kind, self.random.u64(..1000) * 8);
            let first = 3 * request;
            raw.desc(None, first, (head, 16), NEXT, first + 1);
            raw.desc(None, first + 1, (DATA, len), NEXT | if kind == IN { WRITE } else { 0 }, first + 2);
            raw.desc(None, first + 2, (head + 16, 1), WRITE, 0);
            raw.offer(first);
        }
        raw.publish();
    }

    fn full_ring(&mut self) -> Result<(), Error> {
        let mut raw = self.blk("fast", SMALL)?;
        while self.goes_on() {
            let (kind, len) = (
                self.random.choice([IN, OUT, NO_TYPE]).unwrap(),
                self.random.choice([512, 4096, 65_536]).unwrap(),
            );
            self.fill(&mut raw, kind, len);
            self.wait(&raw);
        }
        Ok(())
    }

    /// Submits one table of `count` data descriptors of `len` bytes at `DATA`, from as many heads as the ring has or `heads`
    /// allows.
    fn tables(&mut self, raw: &mut Raw, kind: u32, (count, len): (u16, u32), heads: u16) {
        header(raw, HEADS, kind, 0);
        let table = Some(TABLES);
        let direction = if kind == OUT { 0 } else { WRITE };
        raw.desc(table, 0, (HEADS, 16), NEXT, 1);
        for index in 1..=count {
            raw.desc(table, index, (DATA, len), NEXT | direction, index + 1);
        }
        raw.desc(table, count + 1, (HEADS + 16, 1), WRITE, 0);
        for head in 0..heads.min(raw.size) {
            raw.desc(None, head, (TABLES, 16 * (u32::from(count) + 2)), INDIRECT, 0);
            raw.offer(head);
        }
        raw.publish();
    }

    fn long_chains(&mut self) -> Result<(), Error> {
        let mut raw = self.blk("fast", SMALL)?;
        while self.goes_on() {
            let most = self.random.choice([126, raw.size - 2, raw.size - 2, 32_765]).unwrap();
            let (kind, len) = (
                self.random.choice([IN, OUT, NO_TYPE]).unwrap(),
                self.random.choice([1, 512, 512, 4096]).unwrap(),
            );
            self.tables(&mut raw, kind, (most, len), u16::MAX);
            self.wait(&raw);
        }
        Ok(())
    }

    fn long_transfers(&mut self) -> Result<(), Error> {
        let mut raw = self.blk("fast", SMALL)?;
        while self.goes_on() {
            let (count, len) = self
                .random
                .choice([(126_u16, 1_u32 << 20), (31, 8 << 20), (126, 65_536), (1, 8 << 20)])
                .unwrap();
            let kind = self.random.choice([IN, OUT]).unwrap();
            self.tables(&mut raw, kind, (count, len), 64);
            self.wait(&raw);
        }
        Ok(())
    }

    fn dirty_log(&mut self) -> Result<(), Error> {
        let mut raw = self.blk("fast", LARGE)?;
        raw.log()?;
        while self.goes_on() {
            let heads = self.random.choice([1, 8, 64]).unwrap();
            let count = self.random.choice([1, 126, raw.size - 2]).unwrap();
            self.tables(&mut raw, NO_TYPE, (count, 0xffff_f000), heads);
            self.wait(&raw);
        }
        Ok(())
    }

    fn revoke(&mut self) -> Result<(), Error> {
        while self.goes_on() {
            let mut raw = self.blk("slow", SMALL)?;
            self.fill(&mut raw, IN, 512);
            std::thread::park_timeout(Duration::from_millis(5));
            if self.random.u64(..2) == 0 {
                // The memory is removed while the requests use it.
                let region = payload![
                    0_u64,
                    Memory::guest_addr(0),
                    raw.memory.whole().len(),
                    Memory::user_addr(0),
                    0_u64
                ];
                raw.session.wire().send(Request::REM_MEM_REG, &region, &[])?;
            }
        }
        Ok(())
    }

    fn huge_memory(&mut self) -> Result<(), Error> {
        while self.goes_on() {
            let session = Session::connect(&self.socket("fast"), &wanted(1))?;
            session.set_features()?;
            let len = 1_u64 << self.random.choice([40, 43, 44, 45]).unwrap();
            for region in 0..16 {
                let file = memfd_create("huge", MemfdFlags::CLOEXEC).unwrap();
                ftruncate(&file, len).unwrap();
                let at = region * len;
                let message = payload![0_u64, at, len, at, 0_u64];
                match session.wire().send(Request::ADD_MEM_REG, &message, &[file.as_fd()]) {
                    Ok(()) => {}
                    Err(Error::Refused(_)) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn large_memory_goes(&mut self) -> Result<(), Error> {
        while self.goes_on() {
            let mut raw = self.blk("fast", 256 << 20)?;
            // One write per page: all pages are populated.
            let whole = raw.memory.whole().clone();
            (DATA..whole.len()).step_by(4096).for_each(|at| whole.write(at as usize, &1_u8));
            drop(whole);
            self.tables(&mut raw, OUT, (126, 4096), 64);
        }
        Ok(())
    }

    fn messages(&mut self) -> Result<(), Error> {
        let session = Session::connect(&self.socket("fast"), &wanted(1))?;
        while self.goes_on() {
            let wire = session.wire();
            let (request, payload) = match self.random.u64(..5) {
                0 => (Request::SET_VRING_NUM, payload![0_u32, self.random.u64(..1 << 17) as u32]),
                1 => (Request::SET_VRING_ADDR, payload![0_u32, 0_u32, 1_u64, 2_u64, 3_u64, 4_u64]),
                2 => (Request::SET_VRING_ENABLE, payload![9999_u32, 1_u32]),
                3 => (Request::REM_MEM_REG, payload![0_u64, 1_u64, 2_u64, 3_u64, 4_u64]),
                _ => (Request::SET_FEATURES, payload![u64::MAX]),
            };
            match wire.send(request, &payload, &[]) {
                Ok(()) | Err(Error::Refused(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn reconnects(&mut self) -> Result<(), Error> {
        while self.goes_on() {
            match self.random.u64(..3) {
                0 => drop(self.blk("fast", SMALL)?),
                1 => drop(UnixStream::connect(self.socket("fast"))),
                _ => {
                    let stream = UnixStream::connect(self.socket("fast"));
                    let garbage: Vec<u8> = (0..64).map(|_| self.random.u64(..256) as u8).collect();
                    // The daemon may have disconnected already.
                    let _ = stream.map(|mut stream| stream.write_all(&garbage));
                }
            }
        }
        Ok(())
    }

    fn kicks(&mut self) -> Result<(), Error> {
        let raw = self.blk("fast", SMALL)?;
        while self.goes_on() {
            (0..1000).for_each(|_| raw.kick());
        }
        Ok(())
    }

    fn ranges(&mut self) -> Result<(), Error> {
        let mut raw = self.blk("fast", SMALL)?;
        while self.goes_on() {
            for request in 0..(raw.size / 3).min(256) {
                let head = HEADS + u64::from(request) * HEAD;
                let kind = self.random.choice([DISCARD, WRITE_ZEROES, WRITE_ZEROES, FLUSH]).unwrap();
                header(&raw, head, kind, 0);
                let sectors = self.random.choice([8_u32, 1 << 11, 256 << 11]).unwrap();
                let start = self.random.u64(..u64::from((256 << 11) - sectors) + 1);
                let flags = if kind == WRITE_ZEROES { self.random.u64(..2) as u32 } else { 0 };
                raw.memory
                    .whole()
                    .write(head as usize + 32, &[start, u64::from(sectors) | u64::from(flags) << 32]);
                let first = 3 * request;
                let data = if kind == FLUSH { first + 2 } else { first + 1 };
                raw.desc(None, first, (head, 16), NEXT, data);
                raw.desc(None, first + 1, (head + 32, 16), NEXT, first + 2);
                raw.desc(None, first + 2, (head + 16, 1), WRITE, 0);
                raw.offer(first);
            }
            raw.publish();
            self.wait(&raw);
        }
        Ok(())
    }

    fn flips(&mut self) -> Result<(), Error> {
        let mut raw = self.blk("fast", SMALL)?;
        while self.goes_on() {
            self.fill(&mut raw, IN, 65_536);
            match self.random.u64(..2) {
                0 => (0..10).try_for_each(|n| raw.enable(n % 2 == 1))?,
                _ => {
                    raw.stop()?;
                    raw.start()?;
                }
            }
            self.wait(&raw);
        }
        Ok(())
    }

    /// Commands, with task management in parallel if `tasks`.
    fn scsi(&mut self, tasks: bool) -> Result<(), Error> {
        let plan = |index| Plan { index, memory: SMALL };
        let socket = self.socket("scsi");
        let mut commands = Raw::connect(&socket, plan(if tasks { 0 } else { 2 }))?;
        while self.goes_on() {
            for request in 0..(commands.size / 3).min(1024) {
                if tasks { self.task(&mut commands, request) } else { self.command(&mut commands, request) }
            }
            commands.publish();
            self.wait(&commands);
        }
        Ok(())
    }

    /// Submits a task management function (virtio 1.2, section 5.6.6.2).
    fn task(&mut self, raw: &mut Raw, request: u16) {
        let head = HEADS + u64::from(request) * HEAD;
        let function = self.random.choice([0_u32, 1, 3, 4, 5, 6, 7]).unwrap();
        let tag = self.random.u64(..1000);
        raw.memory.whole().write(head as usize, &[u64::from(function) << 32, 1_u64 | 0x40 << 16, tag]);
        let first = 3 * request;
        raw.desc(None, first, (head, 24), NEXT, first + 1);
        raw.desc(None, first + 1, (head + 32, 1), WRITE, 0);
        raw.offer(first);
    }

    fn command(&mut self, raw: &mut Raw, request: u16) {
        // Request and response of a command, in 256 bytes.
        let head = HEADS + u64::from(request) * 256;
        let lba = self.random.u64(..64);
        let blocks = self.random.choice([1_u32, 8, 255, 2048, 256 << 11]).unwrap();
        let (high, low) = (u128::from(lba) << 48, u128::from(blocks) << 16);
        // READ, WRITE, COMPARE AND WRITE, WRITE SAME with and without UNMAP, UNMAP, VERIFY with data (SBC-3); REPORT LUNS, whose
        // response is long.
        let (cdb, len, write) = match self.random.u64(..8) {
            0 => (0x88_u128 << 120 | high | low, blocks * 512, true),
            1 => (0x8a_u128 << 120 | high | low, blocks * 512, false),
            2 => (0x89_u128 << 120 | high | 8 << 16, 2 * 8 * 512, false),
            3 => (0x93_u128 << 120 | high | low, 512, false),
            4 => (0x93_u128 << 120 | 0x08 << 112 | high | low, 512, false),
            5 => (0x42_u128 << 120 | 0xfff8 << 56, 0xfff8, false),
            6 => (0x8f_u128 << 120 | 0x02 << 112 | high | low, blocks * 512, false),
            _ => (0xa0_u128 << 120 | 0xffff_ffff << 48, 1 << 20, true),
        };
        let len = len.min(8 << 20);
        let words = [1_u64 | 0x40 << 16, u64::from(request)].map(u64::to_le);
        raw.memory.whole().write(head as usize, &words);
        raw.memory.whole().write(head as usize + 19, &cdb.to_be_bytes());
        let (first, request, answer) = (3 * request, (head, 51), (head + 64, 108));
        raw.desc(None, first, request, NEXT, first + 1);
        if write {
            raw.desc(None, first + 1, answer, NEXT | WRITE, first + 2);
            raw.desc(None, first + 2, (DATA, len), WRITE, 0);
        } else {
            raw.desc(None, first + 1, (DATA, len), NEXT, first + 2);
            raw.desc(None, first + 2, answer, WRITE, 0);
        }
        raw.offer(first);
    }
}

/// Writes a block request's header.
fn header(raw: &Raw, at: u64, kind: u32, sector: u64) {
    raw.memory.whole().write(at as usize, &[u64::from(kind), sector]);
    raw.memory.whole().write(at as usize + 16, &0xff_u8);
}
