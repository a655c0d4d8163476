//! A VM whose latency is measured: one read in flight, and sleep until it completes.

use aryk_front_end::{Announced, Format, Memory, Piece, Ring, Session, Shape, Wanted, feature, protocol};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const LEN: u64 = 64 << 10;
const HEAD: u64 = 32 << 10;
const DATA: u64 = 36 << 10;
const BLOCK: u32 = 4096;

/// Restricts the calling thread, and what it starts, to these cores.
pub fn restrict_to(cores: &[usize]) {
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    sched_setaffinity(None, &set).unwrap();
}

/// The kernel's threads that observe memory (DAMON), off the reactor's core while this exists. A caller without the right to move
/// them has noisier measurements.
///
/// Such a thread looks at the pages of all processes for milliseconds at a time, in the middle of a reactor's turn.
pub struct ObserversMoved(Vec<(Pid, CpuSet)>);

impl ObserversMoved {
    /// Moves the threads to `core`.
    pub fn to(core: usize) -> Self {
        let mut set = CpuSet::new();
        set.set(core);
        let is_observer = |pid: &Pid| {
            let name = std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
            name.is_ok_and(|name| name.starts_with("kdamond"))
        };
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let pids =
            entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
        let move_one = |pid| {
            let before = sched_getaffinity(Some(pid)).ok()?;
            sched_setaffinity(Some(pid), &set).ok().map(|()| (pid, before))
        };
        Self(pids.filter(is_observer).filter_map(move_one).collect())
    }
}

impl Drop for ObserversMoved {
    fn drop(&mut self) {
        for (pid, before) in &self.0 {
            // A thread that has ended needs no core.
            sched_setaffinity(Some(*pid), before).ok();
        }
    }
}

/// Gives the calling thread real-time priority, so that the load of its core does not affect the measurement. Without the right
/// to do so, the measurements are noisier.
pub fn raise_priority() {
    let tid = gettid().as_raw_nonzero().to_string();
    let done = Command::new("chrt").args(["--fifo", "--pid", "10", &tid]).output();
    if !done.is_ok_and(|done| done.status.success()) {
        eprintln!("no real-time priority for the victim's thread");
    }
}

/// The victim; see the module.
pub struct Victim {
    _session: Session,
    memory: Memory,
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Victim {
    pub fn connect(socket: &Path) -> Self {
        let wanted = Wanted {
            features: feature::VERSION_1,
            optional: 0,
            protocol: protocol::CONFIGURE_MEM_SLOTS | protocol::REPLY_ACK,
            optional_protocol: 0,
            queues: 1,
            patience: Duration::from_secs(20),
        };
        let session = Session::connect(socket, &wanted).unwrap();
        let memory = Memory::new(LEN).unwrap();
        session.set_features().unwrap();
        session.share(&memory).unwrap();
        let ring = Ring::new(Shape { format: Format::Split, size: 16, event_idx: false }, &memory, 0);
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (kick, call) = (event(), event());
        session
            .start(&Announced { index: 0, size: 16, ring: &ring, kick: kick.as_fd(), call: call.as_fd() })
            .unwrap();
        session.enable(1).unwrap();
        Self { _session: session, memory, ring, kick, call }
    }

    /// Reads for this time. Returns the p99 of the latencies.
    pub fn measure(&mut self, time: Duration) -> Duration {
        let (began, mut latencies) = (Instant::now(), Vec::new());
        while began.elapsed() < time {
            let began = Instant::now();
            self.read(latencies.len() as u64 % 64);
            latencies.push(began.elapsed());
        }
        latencies.sort_unstable();
        latencies[latencies.len() * 99 / 100]
    }

    fn read(&mut self, block: u64) {
        self.memory.whole().write(HEAD as usize, &[0_u64, block * u64::from(BLOCK) / 512]);
        self.memory.whole().write(HEAD as usize + 16, &0xff_u8);
        let pieces = [
            Piece { at: HEAD, len: 16, write: false },
            Piece { at: DATA, len: BLOCK, write: true },
            Piece { at: HEAD + 16, len: 1, write: true },
        ];
        self.ring.add(0, &pieces, None);
        self.ring.arm();
        if self.ring.publish() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
        }
        while !self.ring.is_ready() {
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            poll(&mut fds, None).unwrap();
            // The value is only the number of calls.
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        assert!(self.ring.take().unwrap().is_some());
        assert_eq!(self.memory.whole().read::<u8>(HEAD as usize + 16), 0, "the victim's request fails");
    }
}
