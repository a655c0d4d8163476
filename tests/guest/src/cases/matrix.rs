//! Verified I/O over back-ends, queues, cores, sleep policies and features.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Case, Site, TIMEOUT};
use crate::{Daemon, Disk, Vm, fio, pairwise};

/// The axes; the most common value of each comes first.
const BACK_ENDS: [&str; 3] = ["file", "memory", "passthru"];
const POLICIES: [&str; 3] = ["adaptive", "interrupt", "poll"];
const QUEUES: [u16; 2] = [1, 4];
const CORES: [&str; 2] = ["0x1", "0x3"];
const BLOCK_SIZES: [&str; 2] = ["512", "4096"];
const ENGINES: [&str; 2] = ["auto", "epoll"];
/// Whether the device offers a volatile cache (so that the driver must flush).
const CACHES: [bool; 2] = [true, false];
const EVENT_IDX: [bool; 2] = [true, false];

/// The script: each job writes and verifies.
const SCRIPT: &str = "
    d=$(disk 0)
    queue=/sys/block/${d##*/}/queue
    echo queues $(ls $queue/../mq | wc -l)
    echo block $(cat $queue/logical_block_size)
    echo cache $(cat $queue/write_cache)
    measure mixed --filename=$d --rw=randwrite --bsrange=4k-64k --blockalign=4k --iodepth=32 --thread \\
        --numjobs=@JOBS@ --offset_increment=16M --size=16M --fsync=64 --group_reporting \\
        --verify=crc32c --verify_fatal=1
    measure large --filename=$d --rw=write --bs=1M --iodepth=4 --offset=64M --size=32M \\
        --verify=crc32c --verify_fatal=1
    measure small --filename=$d --rw=randwrite --bs=@BLOCK@ --iodepth=1 --offset=96M --size=512K \\
        --verify=crc32c --verify_fatal=1
";

#[derive(Clone, Copy)]
struct Setup {
    back_end: &'static str,
    policy: &'static str,
    queues: u16,
    cores: &'static str,
    block_size: &'static str,
    engine: &'static str,
    cache: bool,
    event_idx: bool,
}

pub(super) fn cases(long: bool) -> Vec<Case> {
    let sizes = [3, 3, 2, 2, 2, 2, 2, 2];
    let points = if long { pairwise::all(&sizes) } else { pairwise::pairs(&sizes) };
    points
        .iter()
        .map(|point| setup_at(point))
        .map(|s| Case::new(s.name(), move |site| verify(site, s)))
        .collect()
}

fn setup_at(point: &[usize]) -> Setup {
    Setup {
        back_end: BACK_ENDS[point[0]],
        policy: POLICIES[point[1]],
        queues: QUEUES[point[2]],
        cores: CORES[point[3]],
        block_size: BLOCK_SIZES[point[4]],
        engine: ENGINES[point[5]],
        cache: CACHES[point[6]],
        event_idx: EVENT_IDX[point[7]],
    }
}

impl Setup {
    fn name(&self) -> String {
        let Self { back_end, policy, queues, cores, block_size, engine, .. } = self;
        let cache = if self.cache { "" } else { ",write-through" };
        let event_idx = if self.event_idx { "" } else { ",no-event-idx" };
        format!("verify/{back_end},{queues}q,cores={cores},{policy},{engine},{block_size}{cache}{event_idx}")
    }

    fn create(&self, site: &Site<'_>, daemon: &Daemon) -> Result<()> {
        let file = site.path("disk0.img").display().to_string();
        let common = ["--size", "128M", "--block-size", self.block_size];
        let create = |name: &str, kind: &[&str]| {
            daemon.aryk(&[&["disk", "create", name], kind, &common[..]].concat()).map(drop)
        };
        match self.back_end {
            "file" => create("disk0", &["--file", &file]),
            "memory" => create("disk0", &["--memory"]),
            _ => {
                create("base0", &["--file", &file])?;
                let params = json!({"name": "disk0", "base_bdev_name": "base0"});
                daemon.rpc("bdev_passthru_create", &params).map(drop)
            }
        }
    }
}

fn verify(site: &Site<'_>, setup: Setup) -> Result<()> {
    let options = ["-m", setup.cores, "--sleep-policy", setup.policy, "--io-engine", setup.engine];
    let mut daemon = site.daemon(&options)?;
    setup.create(site, &daemon)?;
    let socket = daemon.attach("disk0", &["--queues", &setup.queues.to_string()])?;
    let mut disk = Disk::new(&socket, setup.queues);
    let on = |yes| if yes { "on" } else { "off" };
    disk.properties = format!("config-wce=off,event_idx={}", on(setup.event_idx));
    if setup.cache {
        disk.properties = format!("event_idx={}", on(setup.event_idx));
    }
    let script = SCRIPT.replace("@JOBS@", &setup.queues.to_string()).replace("@BLOCK@", setup.block_size);
    let report = site.boot(&Vm::with_disks(vec![disk]), &script)?.finish(TIMEOUT)?;
    let queues = format!("queues {}", setup.queues);
    let block = format!("block {}", setup.block_size);
    ensure!(report.lines[..2] == [queues, block], "the driver sees {:?}", report.lines);
    for name in ["mixed", "large", "small"] {
        for job in fio::parse(&report.files[name])? {
            ensure!(job.write.is_some() && job.read.is_some(), "{name}: nothing was verified");
        }
    }
    daemon.alive()?;
    daemon.stop()
}
