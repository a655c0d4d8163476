//! `aryk pool check --offline`: verifies a pool that no daemon has open, in a file or a block device.
//!
//! The pool's engine runs here as in the daemon, over a disk that is never written: what the engine writes stays in memory, and
//! lies over what the disk has.

use crate::error::Error;
use aryk_dma::Buffer;
use aryk_volume::{
    Answer, CheckReport, Command, Done, Loading, Pool, Settings, State, StoreError, StoreOp, Tag, UNIT,
};
use aryk_volume_store::{Base, DiskDone, DiskOp, DiskRequest, Expected, Finding, Opened, Opening, Store};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of what the engine may write, at most. It writes little: its index, and what it finds at the end of the log.
const WRITTEN_MAX: usize = 1 << 30;

/// Bytes of a block of the engine's index.
const BLOCK: u64 = aryk_volume::BLOCK as u64;

/// Checks the pool on the disk at `path`. Returns its name, and a report as that of `aryk_pool_check`.
pub fn check(path: &Path, reads_data: bool) -> Result<(String, Value), Error> {
    let failed = |why: &dyn std::fmt::Display| Error::File(format!("{}: {why}", path.display()));
    let mut disk = ReadOnly::open(path)?;
    let Opened { store, recovered, findings } = *open(&mut disk).map_err(|error| failed(&error))?;
    let name = store.superblock().name.clone();
    let recovered = recovered.ok_or_else(|| failed(&"the pool has no manifest"))?;
    let mut loading = Loading::new(store.facts(), store.pool().into_bytes(), recovered);
    // The cleaner would move data in memory only.
    let settings =
        Settings { space_amplification_max: u32::MAX, accepts_damaged_log: true, ..Settings::default() };
    let pool = loop {
        if let Some(loaded) = loading.step(|_| settings) {
            break loaded.map_err(|error| failed(&error))?;
        }
    };
    let mut running = Running { pool, store, disk };
    running.go_on(|pool| match pool.state() {
        State::Opening => None,
        State::Failed(error) => Some(Err(failed(&error))),
        State::Damaged(_) => unreachable!("a damaged log is accepted"),
        State::Ready | State::ReadOnly(_) => Some(Ok(())),
    })??;
    running.pool.command(Tag(0), Command::Check { data: reads_data, repair: false });
    let checked = running.go_on(|pool| pool.next_command_reply())?;
    match checked.result.map_err(|error| failed(&error))? {
        Answer::Check(report) => Ok((name.clone(), described(&name, &running.pool, report, &findings))),
        other => unreachable!("a check answers with a report, not {other:?}"),
    }
}

fn described(name: &str, pool: &Pool, report: CheckReport, findings: &[Finding]) -> Value {
    let names: HashMap<_, _> = pool.volumes().map(|(id, volume)| (id, &volume.label.name)).collect();
    let damage = report.damage.into_iter().map(|damage| {
        let alias = damage.volume.and_then(|id| names.get(&id)).map(|volume| format!("{name}/{volume}"));
        let (offset, bytes) = (damage.block * BLOCK, damage.blocks * BLOCK);
        let mut described = json!({"offset": offset, "bytes": bytes, "what": damage.what});
        if let Some(alias) = alias {
            described["volume"] = json!(alias);
        }
        described
    });
    let copies = findings.iter().map(|Finding { what, offset }| {
        json!({"offset": offset, "bytes": 0, "what": format!("{what} at this byte of the disk; its copy is intact")})
    });
    let log = pool.log_damage().into_iter().map(|place| {
        let offset = u64::from(place.unit) * u64::from(UNIT);
        let what =
            format!("the log, at this byte of segment {} or behind: later writes are lost", place.blob.0);
        json!({"offset": offset, "bytes": 0, "what": what})
    });
    json!({
        "references": report.references,
        "blocks_read": report.blocks_read,
        "leaked_bytes": report.leaked_units * u64::from(UNIT),
        "damage": copies.chain(log).chain(damage).collect::<Vec<_>>(),
    })
}

/// Finds the pool on the disk.
fn open(disk: &mut ReadOnly) -> Result<Box<Opened>, aryk_volume_store::Error> {
    let mut opening = Opening::new(disk.base, Expected::default());
    let mut ops = VecDeque::new();
    loop {
        ops.extend(std::iter::from_fn(|| opening.next_op()));
        let op = ops.pop_front().expect("an opening has a result or an operation");
        if let Some(opened) = opening.completed(disk.run(op)) {
            return opened;
        }
    }
}

/// An open pool.
struct Running {
    pool: Pool,
    store: Store,
    disk: ReadOnly,
}

impl Running {
    /// Lets the pool work until `look` finds something.
    fn go_on<T>(&mut self, mut look: impl FnMut(&mut Pool) -> Option<T>) -> Result<T, Error> {
        loop {
            let has_more = self.pool.turn();
            let has_done = self.exchange();
            if let Some(found) = look(&mut self.pool) {
                return Ok(found);
            }
            if !has_more && !has_done {
                return Err(Error::File("the pool waits for space, and cannot be checked".to_owned()));
            }
        }
    }

    /// Runs the operations of the engine and the store. Returns whether there were any.
    fn exchange(&mut self) -> bool {
        let Self { pool, store, disk } = self;
        let mut has_any = false;
        loop {
            if store.is_checkpoint_due() {
                pool.request_checkpoint();
            }
            let mut is_busy = false;
            while let Some((id, op)) = pool.next_op() {
                is_busy = true;
                match op {
                    // What images have is not the pool's.
                    StoreOp::ReadForeign { data, .. } => {
                        pool.completed(Done { id, data: Some(data), result: Err(StoreError::Gone) });
                    }
                    op => store.submit(id, op),
                }
            }
            while let Some(op) = store.next_op() {
                is_busy = true;
                store.completed(disk.run(op));
            }
            while let Some(answer) = store.next_answer() {
                is_busy = true;
                pool.completed(answer);
            }
            if !is_busy {
                return has_any;
            }
            has_any = true;
        }
    }
}

/// Whether another process has opened the file to write it, by the locks of QEMU, which `arykd` takes as well.
fn is_written(file: &File) -> io::Result<bool> {
    /// The byte of the permission to write.
    const WRITES: libc::off_t = 101;
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: WRITES,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// A disk of which nothing changes: writes stay in memory.
struct ReadOnly {
    file: File,
    base: Base,
    /// Sectors that were written, by their numbers.
    written: HashMap<u64, Box<[u8]>>,
}

impl ReadOnly {
    fn open(path: &Path) -> Result<Self, Error> {
        let failed = |why: String| Error::File(format!("{}: {why}", path.display()));
        let mut file = File::open(path).map_err(|error| failed(format!("cannot be opened: {error}")))?;
        if is_written(&file)? {
            let why = "a daemon has it open: check the pool there, without --offline";
            return Err(failed(why.to_owned()));
        }
        let bytes = file.seek(SeekFrom::End(0))?;
        // The pool says how its data is aligned; here all can be read.
        Ok(Self { file, base: Base { bytes, block: UNIT }, written: HashMap::new() })
    }

    fn run(&mut self, op: DiskOp) -> DiskDone {
        let DiskOp { tag, request } = op;
        let (buffer, result) = match request {
            DiskRequest::Read { offset, mut buffer, len } => {
                let read = self.read(offset, &mut buffer.bytes_mut()[..len as usize]);
                (Some(buffer), read.map_err(|_| StoreError::Medium))
            }
            DiskRequest::Write { offset, buffer, len } => {
                let written = self.write(offset, &buffer, len as usize);
                (Some(buffer), written)
            }
            DiskRequest::Flush | DiskRequest::Discard { .. } => (None, Ok(())),
        };
        DiskDone { tag, buffer, result }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)?;
        if self.written.is_empty() {
            return Ok(());
        }
        for (sector, number) in into.chunks_mut(UNIT as usize).zip(offset / u64::from(UNIT)..) {
            if let Some(written) = self.written.get(&number) {
                sector.copy_from_slice(&written[..sector.len()]);
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, buffer: &Buffer, len: usize) -> Result<(), StoreError> {
        if (self.written.len() + len / UNIT as usize) * UNIT as usize > WRITTEN_MAX {
            return Err(StoreError::NoSpace);
        }
        let sectors = buffer.bytes()[..len].chunks(UNIT as usize);
        self.written
            .extend(sectors.zip(offset / u64::from(UNIT)..).map(|(data, number)| (number, data.into())));
        Ok(())
    }
}
