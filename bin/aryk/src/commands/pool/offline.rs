//! `aryk pool check --offline`: verifies a pool that no daemon has open, in a file or a block device, and repairs it.
//!
//! The pool's engine runs here as in the daemon. Without `--repair`, the disk is never written: what the engine writes stays in
//! memory, and lies over what the disk has. A pool whose manifest or index is lost is rebuilt with `--repair` only.

use crate::error::Error;
use aryk_volume::{
    Answer, CheckReport, Command, Done, Pool, RebuildReport, Recipe, Settings, Shard, State, StoreError,
    StoreOp, Tag, UNIT, Volume, VolumeId,
};
use aryk_volume_store::{Expected, Finding, Opened, Opening, Store, share_place};
use disk::Disk;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::path::Path;
use uuid::Uuid;

mod claim;
mod disk;
mod progress;
mod rebuild;

/// What an index was rebuilt from: the first knows most.
const FROM: [&str; 3] = ["copy", "headers", "headers_only"];

/// Bytes of a block of the engine's index.
const BLOCK: u64 = aryk_volume::BLOCK as u64;

/// How a pool is checked.
#[derive(Clone, Copy)]
pub struct Options {
    /// Whether data is read and compared with its checksums.
    pub reads_data: bool,
    /// Whether the pool is repaired.
    pub repairs: bool,
    /// Whether progress is printed as JSON.
    pub is_json: bool,
}

/// Checks the pool on the disk at `path`. Returns its name, and a report as that of `aryk_pool_check`.
pub fn check(path: &Path, options: Options) -> Result<(String, Value), Error> {
    let failed = |why: &dyn Display| Error::File(format!("{}: {why}", path.display()));
    let mut disk = Disk::open(path, options)?;
    let count = disk.shards();
    if count == 1 {
        return Ok(check_shard(&mut disk, options, None, &failed)?.end());
    }
    let mut first: Option<Report> = None;
    for index in 0..count {
        disk.use_shard(Shard::new(index, count).expect("a superblock has a valid number of shards"));
        let report = check_shard(&mut disk, options, first.as_ref(), &failed)?;
        match &mut first {
            None => first = Some(report),
            Some(first) => first.add(report),
        }
    }
    Ok(first.expect("there are shards").end())
}

/// Checks the shard of the pool that the disk uses; `first` has what the first shard says, if it is another one.
fn check_shard(
    disk: &mut Disk,
    options: Options,
    first: Option<&Report>,
    failed: &dyn Fn(&dyn Display) -> Error,
) -> Result<Report, Error> {
    let shard = disk.shard();
    let failed = move |why: &dyn Display| match shard {
        Shard::ALL => failed(why),
        shard => failed(&format!("shard {} of {}: {why}", shard.index() + 1, shard.count())),
    };
    let mut report = Report {
        names: first.map(|first| first.names.clone()).unwrap_or_default(),
        is_first: first.is_none(),
        ..Report::default()
    };
    let rebuild = |store: &mut Store, disk: &mut Disk, copy: Option<&[u8]>| {
        rebuild::run(store, disk, copy, options.repairs, options.is_json, &failed)
    };
    // Once more after a rebuild of the manifest, and of the index.
    loop {
        let expected = Expected { may_lack_checkpoint: true, shard: Some(shard), ..Expected::default() };
        let opened = open(disk, expected, &failed)?;
        let Opened { mut store, recovered, copy, findings } = *opened;
        // The other shards keep the name of the creation.
        report.name = first.map_or_else(|| store.superblock().name.clone(), |first| first.name.clone());
        let findings: Vec<_> = findings
            .into_iter()
            .map(|found| Finding { offset: share_place(shard, found.offset), ..found })
            .collect();
        let Some(recovered) = recovered else {
            let rebuilt = rebuild(&mut store, disk, copy.as_deref())?;
            report.rebuilt(rebuilt, &findings, options.repairs);
            if options.repairs {
                continue;
            }
            return Ok(report);
        };
        // The cleaner would move data.
        let usual = Settings::default();
        let settings = Settings { space_amplification_max: u32::MAX, accepts_damaged_log: true, ..usual };
        let settings = settings.of_shard(shard);
        let pool = Pool::open(|_| settings, store.facts(), store.pool().into_bytes(), &recovered)
            .map_err(|error| failed(&error))?;
        let mut running = Running { pool, store, disk };
        let checked = running.check(options, &failed)?;
        let is_index_damaged = checked.is_index_damaged;
        report.checked(shard, &running.pool, checked, &findings);
        if !is_index_damaged || report.is_index_rebuilt {
            return Ok(report);
        }
        // The manifest is right, and its index is not.
        let copy = running.pool.copy_of_manifest();
        let rebuilt = rebuild(&mut running.store, running.disk, Some(&copy))?;
        report.is_index_rebuilt = true;
        report.rebuilt(rebuilt, &[], options.repairs);
        if !options.repairs {
            return Ok(report);
        }
    }
}

/// The results of a check.
#[derive(Default)]
struct Report {
    name: String,
    /// The names of volumes, by the names that shards other than the first one have for them.
    names: HashMap<String, String>,
    is_first: bool,
    /// Of the last check, and what it has found.
    counts: Value,
    found: Vec<Value>,
    /// What the rebuild has told.
    rebuilt: Option<Value>,
    doubts: Vec<Value>,
    is_index_rebuilt: bool,
}

impl Report {
    fn damage(
        &self,
        names: &HashMap<VolumeId, String>,
        damage: Vec<aryk_volume::Damage>,
    ) -> impl Iterator<Item = Value> {
        damage.into_iter().map(|damage| {
            let volume = damage.volume.and_then(|id| names.get(&id));
            let volume = volume.map(|name| self.names.get(name).unwrap_or(name));
            let (offset, bytes) = (damage.block * BLOCK, damage.blocks * BLOCK);
            let mut described = json!({"offset": offset, "bytes": bytes, "what": damage.what});
            if let Some(volume) = volume {
                described["volume"] = json!(format!("{}/{volume}", self.name));
            }
            described
        })
    }

    fn rebuilt(&mut self, report: RebuildReport, findings: &[Finding], is_written: bool) {
        let recipe = match report.recipe {
            Recipe::Copy => FROM[0],
            Recipe::Headers => FROM[1],
            Recipe::HeadersOnly => FROM[2],
        };
        let name = |volume: &String| format!("{}/{}", self.name, self.names.get(volume).unwrap_or(volume));
        let names: Vec<_> = report.volumes.iter().map(|(_, volume)| name(volume)).collect();
        // A structure that a repair has written is not lost any more.
        let lost = findings.iter().filter(|_| !is_written).map(|Finding { what, offset }| {
            json!({"offset": offset, "bytes": 0, "what": format!("{what} at this byte of the disk")})
        });
        self.rebuilt = Some(json!({
            "from": recipe,
            "is_written": is_written,
            "segments": report.segments,
            "frames": report.frames,
            "entries": report.entries,
            "volumes": names,
        }));
        let names: HashMap<_, _> = report.volumes.into_iter().collect();
        let doubts: Vec<_> = self.damage(&names, report.damage).collect();
        self.doubts.extend(lost.chain(doubts));
    }

    fn checked(&mut self, shard: Shard, pool: &Pool, report: CheckReport, findings: &[Finding]) {
        let names = pool.volumes().map(|(id, volume)| (id, volume.label.name.clone())).collect();
        if self.is_first {
            let uuid = |volume: &Volume| Uuid::from_bytes(volume.label.uuid).to_string();
            self.names =
                pool.volumes().map(|(_, volume)| (uuid(volume), volume.label.name.clone())).collect();
        }
        let log = pool.log_damage().into_iter().map(|place| {
            let offset = u64::from(place.unit) * u64::from(UNIT);
            let segment = place.blob.0;
            let what = match shard {
                Shard::ALL => format!("the log, at this byte of segment {segment} or behind: later writes are lost"),
                shard => format!(
                    "the log, at this byte of segment {segment} of shard {}, or behind: later writes are lost",
                    shard.index()
                ),
            };
            json!({"offset": offset, "bytes": 0, "what": what})
        });
        self.counts = json!({
            "references": report.references,
            "blocks_read": report.blocks_read,
            "leaked_bytes": report.leaked_units * u64::from(UNIT),
        });
        let damage: Vec<_> = self.damage(&names, report.damage).collect();
        self.found = findings.iter().map(described).chain(log).chain(damage).collect();
    }

    /// Adds what another shard of the pool says.
    fn add(&mut self, more: Self) {
        for count in ["references", "blocks_read", "leaked_bytes"] {
            let sum = [&self.counts, &more.counts].map(|counts| counts[count].as_u64().unwrap_or(0));
            self.counts[count] = json!(sum[0] + sum[1]);
        }
        self.found.extend(more.found);
        self.doubts.extend(more.doubts);
        match (&mut self.rebuilt, more.rebuilt) {
            (Some(all), Some(more)) => {
                for count in ["segments", "frames", "entries"] {
                    let sum = [&*all, &more].map(|rebuilt| rebuilt[count].as_u64().unwrap_or(0));
                    all[count] = json!(sum[0] + sum[1]);
                }
                // The one that knows least.
                let rank = |rebuilt: &Value| FROM.iter().position(|from| rebuilt["from"] == *from);
                if rank(&more) > rank(all) {
                    all["from"] = more["from"].clone();
                }
            }
            (None, more) => self.rebuilt = more,
            (Some(_), None) => {}
        }
    }

    fn end(self) -> (String, Value) {
        let mut report = match self.counts {
            Value::Object(_) => self.counts,
            _ => json!({"references": 0, "blocks_read": 0, "leaked_bytes": 0}),
        };
        report["damage"] = self.doubts.into_iter().chain(self.found).collect();
        if let Some(rebuilt) = self.rebuilt {
            report["rebuilt"] = rebuilt;
        }
        (self.name, report)
    }
}

fn described(finding: &Finding) -> Value {
    let Finding { what, offset } = finding;
    json!({"offset": offset, "bytes": 0, "what": format!("{what} at this byte of the disk; the pool has its content elsewhere")})
}

/// Finds the pool on the disk.
fn open(
    disk: &mut Disk,
    expected: Expected,
    failed: &dyn Fn(&dyn Display) -> Error,
) -> Result<Box<Opened>, Error> {
    let mut opening = Opening::new(disk.base(), expected);
    let mut ops = VecDeque::new();
    loop {
        ops.extend(std::iter::from_fn(|| opening.next_op()));
        let op = ops.pop_front().expect("an opening has a result or an operation");
        if let Some(opened) = opening.completed(disk.run(op)) {
            return opened.map_err(|error| failed(&error));
        }
        disk.renew_claim()?;
    }
}

/// An open pool.
struct Running<'a> {
    pool: Pool,
    store: Store,
    disk: &'a mut Disk,
}

impl Running<'_> {
    /// Opens the pool, and checks it.
    fn check(
        &mut self,
        options: Options,
        failed: &dyn Fn(&dyn Display) -> Error,
    ) -> Result<CheckReport, Error> {
        self.go_on(|pool| match pool.state() {
            State::Opening => None,
            State::Failed(error) => Some(Err(failed(&error))),
            State::Damaged(_) => unreachable!("a damaged log is accepted"),
            State::Ready | State::ReadOnly(_) => Some(Ok(())),
        })??;
        self.pool.command(Tag(0), Command::Check { data: options.reads_data, repair: options.repairs });
        let checked = self.go_on(Pool::next_command_reply)?;
        // What the check has changed becomes durable.
        while options.repairs && (self.pool.turn() | self.exchange()) {
            self.disk.renew_claim()?;
        }
        match checked.result.map_err(|error| failed(&error))? {
            Answer::Check(report) => Ok(report),
            other => unreachable!("a check answers with a report, not {other:?}"),
        }
    }

    /// Lets the pool work until `look` finds something.
    fn go_on<T>(&mut self, mut look: impl FnMut(&mut Pool) -> Option<T>) -> Result<T, Error> {
        loop {
            self.disk.renew_claim()?;
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
