//! The claim of a pool that several hosts reach, while the pool is checked or repaired without a daemon.
//!
//! A check makes sure that no daemon renews the claim, and ends when one does. A repair watches the claim for as long as a daemon
//! does before a takeover, takes it, renews it until the end, and gives it back: no daemon opens the pool before that. A pool
//! that was only ever open on disks of one host has no claim.

use super::progress::Shown;
use crate::watch::wait;
use aryk_dma::{Buffer, PAGE};
use aryk_volume::Progress;
use aryk_volume_store::{CLAIM_BYTES, CLAIM_PLACE, Claim, ClaimPace, Holder};
use nix::libc;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

/// Bytes that are read and written: a block of any disk.
const BLOCK_BYTES: usize = 4096;

/// Why a claim was not taken, or is lost.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another process renews the claim, or has taken it.
    #[error(
        "process {pid} of host '{host}' has the pool open, or had it a moment ago: \
         check the pool there, without --offline, or wait until that process has ended"
    )]
    Taken {
        /// The process ID.
        pid: u32,
        /// The host's name.
        host: String,
    },
    /// The block has no claim any more.
    #[error("the claim of the pool has gone: something else has written to the disk")]
    Gone,
    /// A write of the claim took so long that another process may have taken it, too.
    #[error("the disk is too slow for the claim of its pool: try again")]
    Slow,
    /// The claim was not renewed for so long that another process may have had the pool.
    #[error(
        "the pool's claim could not be renewed in time, and another host may have had the pool: start again"
    )]
    Late,
    /// The disk fails.
    #[error("the claim of the pool, at byte {CLAIM_PLACE} of the disk: {0}")]
    Disk(#[from] io::Error),
}

/// The block has `found` instead of what it should have.
fn unexpected(found: Option<Claim>) -> ClaimError {
    found.map_or(ClaimError::Gone, |Claim { pid, host, .. }| ClaimError::Taken { pid, host })
}

/// The block of the disk that has the claim.
struct Block {
    file: File,
    buffer: Buffer,
}

impl Block {
    /// Opens it without the page cache, which would hide what other hosts write.
    fn open(path: &Path, is_writable: bool) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(is_writable);
        let file = match options.clone().custom_flags(libc::O_DIRECT).open(path) {
            // A file system without direct I/O: other hosts do not reach it.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => options.open(path)?,
            opened => opened?,
        };
        Ok(Self { file, buffer: Buffer::new(BLOCK_BYTES, PAGE as usize) })
    }

    /// The claim; `None` if there is none.
    fn read(&mut self) -> io::Result<Option<Claim>> {
        match self.file.read_exact_at(self.buffer.bytes_mut(), CLAIM_PLACE) {
            Ok(()) => Ok(Claim::parse(&self.buffer.bytes()[..CLAIM_BYTES])),
            // No pool is that small.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the claim. The rest of the block stays as it was read.
    fn write(&mut self, claim: &Claim) -> io::Result<()> {
        self.buffer.write(0, &claim.encode());
        self.file.write_all_at(self.buffer.bytes(), CLAIM_PLACE)
    }
}

/// The claim of a pool that is checked or repaired.
pub struct Guard {
    block: Block,
    pace: ClaimPace,
    /// What the block is to have, and the time before it was read or written.
    claim: Claim,
    at: Duration,
    /// Whether it is this process's, which gives it back at the end.
    is_ours: bool,
}

impl Guard {
    /// Makes sure that no daemon has the pool on the disk at `path`, and takes its claim for a repair. `None` if the pool has no
    /// claim.
    pub fn new(
        path: &Path,
        pace: ClaimPace,
        repairs: bool,
        is_json: bool,
    ) -> Result<Option<Self>, ClaimError> {
        let mut block = Block::open(path, repairs)?;
        let found = match block.read() {
            Err(error) if !repairs => {
                // That is what a check is for. Pools of one host do without the block.
                if !is_json {
                    eprintln!(
                        "Whether another host has the pool is unknown: byte {CLAIM_PLACE} of the disk: {error}"
                    );
                }
                None
            }
            read => read?,
        };
        let Some(mut seen) = found else { return Ok(None) };
        let holder = Holder::of_this_process();
        if !seen.is_released && !holder.has_outlived(&seen) {
            let time = if repairs { pace.watch } else { pace.lease };
            seen = watch(&mut block, seen, time, pace.look, is_json)?;
        }
        let mut guard = Self { block, pace, claim: seen, at: now(), is_ours: false };
        if repairs {
            guard.take(&holder)?;
        }
        Ok(Some(guard))
    }

    /// Takes the claim, which is another process's.
    fn take(&mut self, holder: &Holder) -> Result<(), ClaimError> {
        self.confirm()?;
        self.claim = holder.claim(self.claim.pool, self.claim.beat.wrapping_add(1));
        self.block.write(&self.claim)?;
        if now() >= self.at + self.pace.hurry {
            return Err(ClaimError::Slow);
        }
        // A daemon whose disk compares and writes at once does not settle. If this write replaced its claim, its lease ends.
        wait(self.pace.lease);
        self.at = now();
        self.confirm()?;
        self.is_ours = true;
        Ok(())
    }

    /// Makes sure that the block still has the claim, and renews it if it is this process's, if it is time to. To be called again
    /// and again.
    pub fn renew(&mut self) -> Result<(), ClaimError> {
        let begin = now();
        if begin < self.at + self.pace.beat {
            return Ok(());
        }
        let last = std::mem::replace(&mut self.at, begin);
        self.confirm()?;
        if !self.is_ours {
            return Ok(());
        }
        // Until it is known to be in time.
        self.is_ours = false;
        let next = self.next();
        self.block.write(&next)?;
        self.claim = next;
        // Another process takes a claim that was not renewed for so long, and this write may have replaced that one's.
        if now() >= last + self.pace.watch {
            return Err(ClaimError::Late);
        }
        self.is_ours = true;
        Ok(())
    }

    fn next(&self) -> Claim {
        Claim { beat: self.claim.beat.wrapping_add(1), ..self.claim.clone() }
    }

    /// Reads the claim, which is to be as it was.
    fn confirm(&mut self) -> Result<(), ClaimError> {
        let found = self.block.read()?;
        if found.as_ref() == Some(&self.claim) { Ok(()) } else { Err(unexpected(found)) }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // After the lease, the claim may be another daemon's soon. Without this, daemons wait until the claim is old.
        if self.is_ours && now() < self.at + self.pace.lease && self.confirm().is_ok() {
            let _ = self.block.write(&Claim { is_released: true, ..self.next() });
        }
    }
}

/// Watches the claim of another process for so long, by a look from time to time. Returns it when it is given back, or if it did
/// not change.
fn watch(
    block: &mut Block,
    seen: Claim,
    time: Duration,
    look: Duration,
    is_json: bool,
) -> Result<Claim, ClaimError> {
    if !is_json {
        let Claim { pid, host, .. } = &seen;
        eprintln!(
            "Process {pid} of host '{host}' has not given the pool back: {} seconds without a sign of it are needed.",
            time.as_secs()
        );
    }
    let begin = now();
    let mut shown = Shown::new(is_json);
    let found = loop {
        let since = now() - begin;
        let what = "seconds without a change of the pool's claim";
        shown.show(Progress { what, done: since.as_secs(), all: time.as_secs() });
        if since >= time {
            break Ok(seen);
        }
        wait(look);
        match block.read()? {
            Some(found) if found == seen => {}
            Some(found) if found.is_released => break Ok(found),
            found => break Err(unexpected(found)),
        }
    };
    shown.end();
    found
}

/// The time. It goes on while the host is suspended.
fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tempfile::NamedTempFile;
    use uuid::Uuid;

    const PACE: ClaimPace = ClaimPace {
        beat: Duration::from_millis(20),
        lease: Duration::from_secs(1),
        watch: Duration::from_secs(3),
        look: Duration::from_millis(10),
        hurry: Duration::from_secs(60),
        settle: Duration::from_millis(30),
    };

    /// A disk with a claim.
    struct Shared(NamedTempFile);

    impl Shared {
        fn new(claim: Option<&Claim>) -> Self {
            let file = NamedTempFile::new().unwrap();
            file.as_file().set_len(CLAIM_PLACE + (1 << 20)).unwrap();
            let shared = Self(file);
            claim.into_iter().for_each(|claim| shared.put(claim));
            shared
        }

        fn put(&self, claim: &Claim) {
            self.0.as_file().write_all_at(&claim.encode(), CLAIM_PLACE).unwrap();
        }

        fn found(&self) -> Option<Claim> {
            let mut bytes = [0; CLAIM_BYTES];
            self.0.as_file().read_exact_at(&mut bytes, CLAIM_PLACE).unwrap();
            Claim::parse(&bytes)
        }

        fn guard(&self, repairs: bool) -> Result<Option<Guard>, ClaimError> {
            Guard::new(self.0.path(), PACE, repairs, true)
        }
    }

    /// A claim of a process of another host.
    fn other(beat: u64) -> Claim {
        let here = Holder::of_this_process();
        let there = Holder { boot: Uuid::from_u128(1), host: "hv2".to_owned(), pid: 7, ..here };
        Claim { daemon: Uuid::from_u128(2), ..there.claim(Uuid::from_u128(3), beat) }
    }

    #[test]
    fn a_repair_takes_the_claim_of_a_dead_host_and_gives_it_back() {
        let shared = Shared::new(Some(&other(5)));
        let begin = now();
        let mut looking = shared.guard(false).unwrap().expect("the pool has a claim");
        assert!(now() - begin >= PACE.lease);
        assert_eq!(shared.found(), Some(other(5)), "a check writes nothing");
        wait(PACE.beat);
        looking.renew().unwrap();
        let begin = now();
        let mut held = shared.guard(true).unwrap().expect("the pool has a claim");
        assert!(now() - begin >= PACE.watch + PACE.lease);
        assert!(matches!(looking.renew(), Err(ClaimError::Taken { .. })), "the check is void");
        drop(looking);
        let taken = shared.found().unwrap();
        assert_eq!((taken.pid, taken.pool, taken.beat), (std::process::id(), Uuid::from_u128(3), 6));
        wait(PACE.beat);
        held.renew().unwrap();
        assert_eq!(shared.found().unwrap(), Claim { beat: 7, ..taken.clone() });
        drop(held);
        assert_eq!(shared.found().unwrap(), Claim { beat: 8, is_released: true, ..taken });
    }

    #[test]
    fn a_repair_that_was_stopped_for_too_long_ends_and_does_not_give_the_claim_back() {
        let shared = Shared::new(Some(&Claim { is_released: true, ..other(0) }));
        let mut held = shared.guard(true).unwrap().unwrap();
        wait(PACE.watch);
        assert!(matches!(held.renew(), Err(ClaimError::Late)));
        drop(held);
        assert!(!shared.found().unwrap().is_released);
        let stopped = shared.guard(true).unwrap().unwrap();
        wait(PACE.lease);
        drop(stopped);
        assert!(!shared.found().unwrap().is_released);
    }

    #[test]
    fn a_pool_of_a_living_process_is_left_alone() {
        let shared = Shared::new(Some(&other(0)));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for beat in 1.. {
                    shared.put(&other(beat));
                    if is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    wait(PACE.beat);
                }
            });
            for repairs in [false, true] {
                let refused = shared.guard(repairs).map(drop).unwrap_err();
                assert!(refused.to_string().contains("process 7 of host 'hv2' has the pool"), "{refused}");
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(shared.found().unwrap().daemon, other(0).daemon);
    }

    #[test]
    fn what_was_given_back_or_made_by_an_ended_process_is_taken_at_once() {
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let ended = Holder { pid: child.id(), ..Holder::of_this_process() }.claim(Uuid::from_u128(3), 1);
        for claim in [Claim { is_released: true, ..other(1) }, ended] {
            let shared = Shared::new(Some(&claim));
            let begin = now();
            assert!(shared.guard(true).unwrap().is_some());
            assert!(now() - begin < PACE.watch);
        }
        let local = Shared::new(None);
        assert!(local.guard(true).unwrap().is_none());
        assert_eq!(local.found(), None);
    }

    #[test]
    fn a_repair_ends_when_another_process_has_taken_the_pool() {
        for thief in [Some(other(1)), None] {
            let shared = Shared::new(Some(&Claim { is_released: true, ..other(0) }));
            let mut held = shared.guard(true).unwrap().unwrap();
            match &thief {
                Some(thief) => shared.put(thief),
                None => shared.0.as_file().write_all_at(&[0; CLAIM_BYTES], CLAIM_PLACE).unwrap(),
            }
            wait(PACE.beat);
            let lost = held.renew().unwrap_err();
            match thief {
                Some(_) => assert!(matches!(lost, ClaimError::Taken { pid: 7, .. }), "{lost}"),
                None => assert!(matches!(lost, ClaimError::Gone), "{lost}"),
            }
            drop(held);
            assert_eq!(shared.found(), thief);
        }
    }
}
