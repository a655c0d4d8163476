//! `aryk pool …`: pools, which have volumes.

use super::{elements, number, object, text};
use crate::cli::examples;
use crate::client::Client;
use crate::completion::{disks, pools};
use crate::error::{BUSY, DAMAGED, EXISTS, Error, NO_DEVICE, NO_SPACE, TIMED_OUT};
use crate::output::{Output, Tone};
use crate::size::Size;
use crate::users::Users;
use crate::watch::Watch;
use clap::{Args, Subcommand};
use clap_complete::ArgValueCandidates;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

mod offline;
mod scrub;

/// Hints for a pool that cannot be created, found or changed.
const HINTS: [(i64, &str); 4] = [
    (EXISTS, "To destroy what is on the disk, and create the pool: --overwrite"),
    (NO_DEVICE, "'aryk pool list' shows the pools, 'aryk disk list' the disks."),
    (BUSY, "'aryk disk list' shows the disk's users."),
    (NO_SPACE, "A pool needs a disk of at least 200M."),
];

/// Hints for a pool that cannot be opened.
const OPEN_HINTS: [(i64, &str); 3] = [
    (
        DAMAGED,
        "To open a pool with a damaged log, without the writes behind the damage: --discard-damaged-log",
    ),
    (NO_DEVICE, "'aryk disk list' shows the disks."),
    (BUSY, "'aryk disk list' shows the disk's users."),
];

/// Hints for a pool that cannot be moved.
const MOVE_HINTS: [(i64, &str); 2] = [
    (NO_DEVICE, "'aryk reactor list' shows the reactors and their cores."),
    (TIMED_OUT, "The disk of the pool is slow at the moment: try again later."),
];

/// The text for an empty list.
const NONE: &str = "There are no pools. Create one: aryk pool create NAME --disk DISK";

/// The share of free space at which a pool is reported as nearly full.
const NEARLY_FULL: f64 = 0.1;

/// Commands for pools.
#[derive(Debug, Subcommand)]
pub enum PoolCommand {
    /// Create a pool on a disk, which the pool then has for itself
    #[command(after_help = examples::POOL)]
    Create(CreateArgs),
    /// Open a pool that was not opened when its disk appeared: one with a damaged log, or one that came back older
    Open {
        /// The disk
        #[arg(long, add = ArgValueCandidates::new(disks))]
        disk: String,
        /// Open the pool although its log is damaged: all writes behind the damaged place are lost
        #[arg(long)]
        discard_damaged_log: bool,
        /// Open the pool although its disk is older than when the pool was open last: what was written since is lost
        #[arg(long)]
        accept_older: bool,
    },
    /// List the pools, with their space
    List(Watch),
    /// Show the counters of a pool: what it has written and read, and its index
    Show {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools))]
        pool: String,
    },
    /// Let a pool use the space that its disk has gained
    Grow {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools))]
        pool: String,
    },
    /// Verify every reference and checksum of a pool, while it is in use
    Check {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools), required_unless_present = "offline")]
        pool: Option<String>,
        /// Check a pool that no daemon has open, on a file or a block device; it is changed only with --repair
        #[arg(long, value_name = "FILE", conflicts_with = "pool")]
        offline: Option<PathBuf>,
        /// Verify references only: data is not read
        #[arg(long)]
        quick: bool,
        /// Free space that nothing refers to; with --offline, rebuild a lost manifest or index, too
        #[arg(long)]
        repair: bool,
    },
    /// Read all of a pool slowly now, in the daemon, and find damage; or set when the daemon does that by itself
    Scrub(scrub::ScrubArgs),
    /// Move a pool, or a shard of it, to another reactor, while its volumes are in use
    Move {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools))]
        pool: String,
        /// The shard, from 0 on; not needed for a pool with one shard
        #[arg(long, value_name = "NUMBER")]
        shard: Option<u32>,
        /// The core of the reactor
        #[arg(long, value_name = "CORE")]
        core: u16,
    },
    /// Give a pool another name
    Rename {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools))]
        pool: String,
        /// The new name
        name: String,
    },
    /// Delete a pool: all data of its volumes is lost
    Delete {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools))]
        pool: String,
        /// Delete the pool although it has volumes, and although VMs use them
        #[arg(long)]
        force: bool,
    },
}

/// Arguments of `pool create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Name of the new pool
    pub name: String,
    /// The disk, which must not be in use
    #[arg(long, add = ArgValueCandidates::new(disks))]
    pub disk: String,
    /// Memory for the index and for checksums [default: 64M]
    #[arg(long, value_name = "SIZE")]
    pub cache: Option<Size>,
    /// Parts of the pool that run on reactors of their own: 1, 2, 4, 8 or 16. More are faster where many reactors have VMs of the
    /// pool, and need as much space again for themselves. The number stays as it is [default: 1]
    #[arg(long, value_name = "COUNT")]
    pub shards: Option<u32>,
    /// Create the pool even if the disk holds data, which is lost
    #[arg(long)]
    pub overwrite: bool,
}

/// Checks a pool without a daemon.
pub fn check_offline(file: &Path, quick: bool, repairs: bool, out: &Output) -> Result<(), Error> {
    let options = offline::Options { reads_data: !quick, repairs, is_json: out.json };
    let (name, report) = offline::check(file, options)?;
    let is_lost = report.get("rebuilt").is_some_and(|rebuilt| rebuilt["is_written"] == false);
    if is_lost && !out.json {
        eprintln!("To rebuild the pool: aryk pool check --offline {} --repair", file.display());
    }
    show_report(&name, repairs, &report, out)
}

/// What a rebuild was made of, in lines.
fn rebuilt_lines(rebuilt: &Value) -> Vec<String> {
    let (is, was) = match rebuilt["is_written"] == true {
        true => ("The pool was rebuilt", "has"),
        false => ("The manifest or the index of the pool is lost. Rebuilt, it", "would have"),
    };
    let from = match text(rebuilt, "from") {
        "copy" => "It is as it was: from the copy of its manifest.",
        "headers" => {
            "Names and snapshots are those of the copy of its manifest, its data that of frames' headers."
        }
        _ => "There is no copy of its manifest: names and snapshots are lost.",
    };
    let counts = format!(
        "{} volumes and snapshots, from {} frames in {} segments",
        elements(&rebuilt["volumes"]).len(),
        number(rebuilt, "frames"),
        number(rebuilt, "segments")
    );
    let first =
        if was == "has" { format!("{is}: it {was} {counts}.") } else { format!("{is} {was} {counts}.") };
    vec![first, from.to_owned()]
}

pub fn run(command: &PoolCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        PoolCommand::Create(args) => create(args, client, out),
        PoolCommand::Open { disk, discard_damaged_log, accept_older } => {
            open(disk, *discard_damaged_log, *accept_older, client, out)
        }
        PoolCommand::List(_) => list(client, out),
        PoolCommand::Show { pool } => show(pool, client, out),
        PoolCommand::Grow { pool } => grow(pool, client, out),
        PoolCommand::Check { pool, quick, repair, .. } => {
            let pool = pool.as_deref().expect("it is required without --offline");
            check(pool, *quick, *repair, client, out)
        }
        PoolCommand::Scrub(args) => scrub::run(args, client, out),
        PoolCommand::Move { pool, shard, core } => move_shard(pool, *shard, *core, client, out),
        PoolCommand::Rename { pool, name } => {
            let params = json!({"old_name": pool, "new_name": name});
            client.call("bdev_lvol_rename_lvstore", params).map_err(|error| error.hinted(&HINTS))?;
            let renamed = find(client, name)?;
            out.print(&renamed, || format!("The pool '{pool}' is '{name}' now."))
        }
        PoolCommand::Delete { pool, force } => delete(pool, *force, client, out),
    }
}

/// The cores on which a pool runs, as text.
fn cores_of(pool: &Value) -> String {
    let cores: Vec<String> = elements(&pool["cores"]).iter().map(Value::to_string).collect();
    match &cores[..] {
        [core] => format!("core {core}"),
        _ => format!("cores {}", cores.join(", ")),
    }
}

fn create(args: &CreateArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let params = object([
        ("name", Some(json!(args.name))),
        ("base_bdev_name", Some(json!(args.disk))),
        ("force", args.overwrite.then_some(json!(true))),
        ("cache_bytes", args.cache.map(|size| json!(size.0))),
        ("shards", args.shards.map(|shards| json!(shards))),
    ]);
    client.call("aryk_pool_create", params).map_err(|error| error.hinted(&HINTS))?;
    let pool = find(client, &args.name)?;
    let name = &args.name;
    out.print(&pool, || {
        let size = Size(number(&pool, "total_bytes"));
        format!(
            "Pool '{name}' of {size} is ready. Create a volume: aryk volume create {name}/VOLUME --size 20G"
        )
    })
}

fn open(
    disk: &str,
    discard_damaged_log: bool,
    accept_older: bool,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    client.wait_without_limit()?;
    let params = json!({
        "base_bdev_name": disk,
        "discard_damaged_log": discard_damaged_log,
        "accept_older": accept_older,
    });
    let opened = client.call("aryk_pool_open", params).map_err(|error| error.hinted(&OPEN_HINTS))?;
    out.print(&opened, || {
        let mut line = format!("Pool '{}' is open.", text(&opened, "name"));
        for damaged in elements(&opened["damaged_log"]) {
            let [shard, segment, offset] = ["shard", "segment", "offset"].map(|name| number(damaged, name));
            line += &format!(
                " The log of its shard {shard} was damaged at byte {offset} of segment {segment}, or behind: later writes are lost."
            );
        }
        line
    })
}

/// The pool with this name or UUID.
fn find(client: &mut Client, name: &str) -> Result<Value, Error> {
    let pools = client.call("aryk_pools_get", json!({}))?;
    let is_it = |pool: &&Value| text(pool, "name") == name || text(pool, "uuid") == name;
    elements(&pools).iter().find(is_it).cloned().ok_or_else(|| {
        let detail = Some(format!("there is no pool '{name}'"));
        Error::Refused { code: NO_DEVICE, message: "No such device".into(), detail, hint: None }
            .hinted(&HINTS)
    })
}

fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let pools = client.call("aryk_pools_get", json!({}))?;
    let columns = [
        ("POOL", false),
        ("DISK", false),
        ("STATE", false),
        ("SIZE", true),
        ("FREE", true),
        ("PROMISED", true),
        ("VOLUMES", true),
        ("SNAPSHOTS", true),
    ];
    let row = |pool: &Value| {
        let size = |member: &str| Size(number(pool, member)).to_string();
        let share = number(pool, "free_bytes") as f64 / number(pool, "total_bytes").max(1) as f64;
        let tone = match text(pool, "state") {
            "ready" if share >= NEARLY_FULL => Tone::Good,
            "ready" => Tone::Warning,
            _ => Tone::Bad,
        };
        let row = vec![
            text(pool, "name").to_owned(),
            text(pool, "base_bdev_name").to_owned(),
            text(pool, "state").to_owned(),
            size("total_bytes"),
            size("free_bytes"),
            size("provisioned_bytes"),
            number(pool, "volumes").to_string(),
            number(pool, "snapshots").to_string(),
        ];
        (tone, row)
    };
    out.print(&pools, || match elements(&pools) {
        [] => NONE.to_owned(),
        pools => out.toned_table(&columns, pools.iter().map(row)),
    })
}

/// A share of two counters, as a factor.
fn factor(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.2}", part as f64 / whole as f64) }
}

fn show(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let pool = find(client, name)?;
    out.print(&pool, || {
        let counters = &pool["counters"];
        let count = |member: &str| number(counters, member);
        let size = |member: &str| Size(count(member)).to_string();
        let written = ["log_write_bytes", "moved_write_bytes", "index_write_bytes", "manifest_write_bytes"];
        let written = written.iter().map(|member| count(member)).sum();
        let read = ["data_read_bytes", "index_read_bytes"].iter().map(|member| count(member)).sum();
        let lookups = count("cache_hits") + count("cache_misses");
        out.list([
            ("name", text(&pool, "name").to_owned()),
            ("uuid", text(&pool, "uuid").to_owned()),
            ("disk", text(&pool, "base_bdev_name").to_owned()),
            ("state", format!("{}, on {}", text(&pool, "state"), cores_of(&pool))),
            ("size", Size(number(&pool, "total_bytes")).to_string()),
            ("free", Size(number(&pool, "free_bytes")).to_string()),
            ("reserved", Size(number(&pool, "reserved_bytes")).to_string()),
            ("segments", format!("{}, {} of them free", count("segments"), count("free_segments"))),
            ("data", format!("{} in {} of space", size("live_bytes"), size("used_bytes"))),
            ("space amplification", factor(count("used_bytes"), count("live_bytes"))),
            ("written by users", size("user_write_bytes")),
            ("write amplification", factor(written, count("user_write_bytes"))),
            ("gathered", format!("{} ranges, {}", count("gathered_ranges"), size("gathered_write_bytes"))),
            ("read by users", size("user_read_bytes")),
            ("read amplification", factor(read, count("user_read_bytes"))),
            ("backlog", size("unflushed_bytes")),
            ("debt", size("debt_bytes")),
            ("index", format!("{} entries, {}", count("index_entries"), size("index_bytes"))),
            ("cache hits", factor(count("cache_hits") * 100, lookups) + "%"),
            ("waiting requests", count("waiting_requests").to_string()),
            ("price of writes", format!("{}%", count("price_percent"))),
            ("unfinished changes", number(&pool, "unfinished_changes").to_string()),
            ("damaged blocks", count("damaged_blocks").to_string()),
            ("scrub", scrub::line(&pool["scrub"])),
        ])
    })
}

fn grow(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let before = number(&find(client, name)?, "total_bytes");
    client.call("bdev_lvol_grow_lvstore", json!({"lvs_name": name})).map_err(|error| error.hinted(&HINTS))?;
    let pool = find(client, name)?;
    let after = number(&pool, "total_bytes");
    out.print(&pool, || match after > before {
        true => format!("Pool '{name}' has {} now, {} more than before.", Size(after), Size(after - before)),
        false => format!("Pool '{name}' has the size of its disk already: {}.", Size(after)),
    })
}

fn move_shard(
    name: &str,
    shard: Option<u32>,
    core: u16,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let params = object([
        ("pool", Some(json!(name))),
        ("shard", shard.map(|shard| json!(shard))),
        ("core", Some(json!(core))),
    ]);
    client.call("aryk_pool_move", params).map_err(|error| error.hinted(&MOVE_HINTS))?;
    let pool = find(client, name)?;
    out.print(&pool, || format!("Pool '{name}' runs on {} now.", cores_of(&pool)))
}

fn check(name: &str, quick: bool, repair: bool, client: &mut Client, out: &Output) -> Result<(), Error> {
    client.wait_without_limit()?;
    let params = json!({"pool": name, "data": !quick, "repair": repair});
    let report = client.call("aryk_pool_check", params).map_err(|error| error.hinted(&HINTS))?;
    show_report(name, repair, &report, out)
}

fn show_report(name: &str, is_repaired: bool, report: &Value, out: &Output) -> Result<(), Error> {
    out.print(report, || {
        let mut lines = vec![format!(
            "Pool '{name}': {} references verified, {} of data read.",
            number(report, "references"),
            Size(number(report, "blocks_read") * 4096)
        )];
        if let Some(rebuilt) = report.get("rebuilt") {
            lines.extend(rebuilt_lines(rebuilt));
        }
        let leaked = Size(number(report, "leaked_bytes"));
        match (leaked.0, is_repaired) {
            (0, _) => {}
            (_, true) => lines.push(format!("{leaked} that nothing referred to are free now.")),
            (_, false) => lines.push(format!("Nothing refers to {leaked}; to free them: --repair")),
        }
        lines.extend(elements(&report["damage"]).iter().map(damage_line));
        if elements(&report["damage"]).is_empty() {
            lines.push("No damage.".to_owned());
        }
        lines.join("\n")
    })?;
    if elements(&report["damage"]).is_empty() { Ok(()) } else { Err(Error::Damaged(name.to_owned())) }
}

/// A piece of damage, in a line.
fn damage_line(damage: &Value) -> String {
    let what = text(damage, "what");
    match text(damage, "volume") {
        "" => format!("damaged: {what}"),
        volume => {
            let [bytes, offset] = ["bytes", "offset"].map(|name| number(damage, name));
            format!("damaged: '{volume}', {bytes} bytes at {offset}: {what}")
        }
    }
}

fn delete(name: &str, force: bool, client: &mut Client, out: &Output) -> Result<(), Error> {
    let pool = find(client, name)?;
    if !force {
        let volumes = client.call("aryk_volumes_get", json!({}))?;
        let prefix = format!("{}/", text(&pool, "name"));
        let of_pool = |volume: &&Value| text(volume, "alias").starts_with(&prefix);
        let users: Vec<String> = elements(&volumes).iter().filter(of_pool).map(described).collect();
        if !users.is_empty() {
            let hint = "To delete it with all data of its volumes: --force";
            return Err(Error::InUse { what: format!("pool '{name}' has volumes"), users, hint });
        }
    } else {
        // VMs lose their disks in order: their controllers are removed first.
        let users = Users::read(client)?;
        let volumes = client.call("aryk_volumes_get", json!({}))?;
        let prefix = format!("{}/", text(&pool, "name"));
        for volume in elements(&volumes).iter().filter(|v| text(v, "alias").starts_with(&prefix)) {
            super::disk::remove_controllers(text(volume, "uuid"), &users, client)?;
        }
    }
    client.call("bdev_lvol_delete_lvstore", json!({"uuid": pool["uuid"]})).map_err(|e| e.hinted(&HINTS))?;
    out.print(&pool, || {
        format!("Pool '{name}' is deleted. Its disk '{}' stays.", text(&pool, "base_bdev_name"))
    })
}

/// A volume or a snapshot, in a line.
fn described(volume: &Value) -> String {
    let what = if volume["is_snapshot"] == true { "snapshot" } else { "volume" };
    format!("{what} '{}' of {}", text(volume, "alias"), Size(number(volume, "size")))
}
