//! A volume under load from one reactor, and from two: what the second reactor adds.

use crate::load::{self, Load, block_on};
use crate::process::{BACK_END_CORE, FRONT_END_CORE, unpinned};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds::run_comparable;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result, bail};
use aryk_bdev::{Bdev, Blocks, Bytes, Env, Identity, Registry};
use aryk_bdev_volume::{NewPool, NewVolume, Origin, Pools, WhenFull};
use aryk_reactor::{CoreSet, Handle, Options, Reactors, SleepPolicy};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a block of the volume.
const BLOCK: u32 = 4096;
/// Bytes of the base and of the volume.
const BASE: u64 = 2 << 30;
const VOLUME: u64 = 512 << 20;
/// Bytes of a write that fills the volume.
const FILL: u64 = 1 << 20;
/// The least throughput of two reactors, as a multiple of that of one.
const AIM: f64 = 1.7;

const INTRO: &str = "4 KiB requests at random, 64 in flight on each reactor, of a filled volume of 512 MiB in a pool of 2 GiB over memory: \
    thousand requests per second. The requests are made in the reactors themselves: one, or that and a second one. A pool with one \
    shard runs on the first reactor; of two shards, the second one runs on the second reactor if there is one.";

/// Measures the selected cases.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = ["workload", "shards", "one reactor", "two reactors", "ratio", "of these on the second"];
    let title = "A volume on two reactors";
    let mut section = Section::new(title, INTRO, columns.map(str::to_owned).to_vec());
    let workloads = [0, 30, 100].map(|writes| Workload::random(writes, BLOCK, 64));
    for (workload, shards) in workloads.iter().flat_map(|workload| [(workload, 1), (workload, 2)]) {
        let name = format!("volume/reactors/{shards}/{}", workload.name());
        if !settings.wants(&name) {
            continue;
        }
        let rounds = run_comparable(settings.runs, || round(settings.span, workload, shards))?;
        let runs = |of: fn(&Round) -> f64| rounds.each.iter().map(of).collect::<Runs>();
        let (one, two) = (runs(|round| round.one), runs(|round| round.two));
        let record = Record::new(&name, "throughput of two reactors, peer one", "IOPS", &two, &one);
        let ratio = record.ratio.map_or("—".to_owned(), |ratio| format!("{} (aim {AIM})", number(ratio)));
        report.records.push(record);
        let rate = |runs: &Runs| cell(runs, |rate| number(rate / 1e3));
        let share = runs(|round| round.second * 100.0);
        section.row(vec![
            workload.name(),
            shards.to_string(),
            rate(&one),
            rate(&two),
            ratio,
            cell(&share, |share| format!("{share:.0}%")),
        ]);
    }
    report.section(section);
    Ok(())
}

struct Round {
    /// Requests per second.
    one: f64,
    two: f64,
    /// The share of the second reactor.
    second: f64,
}

fn round(span: Duration, workload: &Workload, shards: u32) -> Result<Round> {
    let cores = [BACK_END_CORE, FRONT_END_CORE].map(|core| core as u16);
    let one = unpinned(|| Stack::start(&cores[..1], shards))??.load(workload, span)?[0];
    let [first, second] = unpinned(|| Stack::start(&cores, shards))??.load(workload, span)?[..] else {
        bail!("two reactors need two cores")
    };
    Ok(Round { one, two: first + second, second: second / (first + second) })
}

/// A volume, and the reactors of its pool and of the load.
struct Stack {
    env: Env,
    disk: Arc<Bdev>,
    /// The reactor of the pool's first shard first.
    handles: Vec<Handle>,
    pools: Pools,
    // Dropped last.
    _reactors: Reactors,
}

impl Drop for Stack {
    fn drop(&mut self) {
        // A pool ends in order, or its reactor is dropped with requests.
        block_on(async {
            let removed = self.env.registry().remove(self.disk.name()).await;
            for pool in self.pools.list().iter().filter(|_| removed.is_ok()) {
                self.pools.close(pool).await;
            }
        });
    }
}

impl Stack {
    fn start(cores: &[u16], shards: u32) -> Result<Self> {
        let cores = CoreSet::from_iter(cores.iter().copied());
        let reactors = Reactors::start(&Options { cores, policy: SleepPolicy::Poll, ..Options::default() })?;
        let env = Env::new(Arc::new(Registry::new()), &reactors);
        let base = aryk_bdev_malloc::Config {
            identity: Identity::named("base"),
            block_size: BLOCK,
            physical_block_size: BLOCK,
            blocks: Blocks(BASE / u64::from(BLOCK)),
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, base)?;
        let pools = Pools::default();
        block_on(pools.create(&env, NewPool { shards, ..NewPool::named("p", "base") }))?;
        let pool = pools.find("p").context("the pool is open")?;
        let new = NewVolume {
            name: "v".to_owned(),
            uuid: uuid::Uuid::new_v4(),
            bytes: Bytes(VOLUME),
            block_size: BLOCK,
            origin: Origin::Empty,
            when_full: WhenFull::Wait,
            is_thick: false,
        };
        let disk = block_on(pool.create_volume(new))?.disk.context("the volume has a disk")?;
        let mut handles = env.reactors().handles();
        handles.sort_by_key(|handle| handle.core() != pool.cores()[0]);
        let stack = Self { env, disk, handles, pools, _reactors: reactors };
        let fill = Workload::sequential(100, FILL as u32, 4);
        let filling = stack.begin(&stack.handles[0], &fill)?;
        while filling.done() < VOLUME / FILL {
            std::thread::sleep(Duration::from_millis(1));
        }
        load::end(vec![filling])?;
        Ok(stack)
    }

    /// Requests per second of each reactor, while all have load.
    fn load(&self, workload: &Workload, span: Duration) -> Result<Vec<f64>> {
        let begin = |handle| self.begin(handle, workload);
        let loads = self.handles.iter().map(begin).collect::<Result<Vec<_>>>()?;
        let rates = load::rates(&loads, span / 4, span);
        load::end(loads)?;
        Ok(rates)
    }

    fn begin(&self, handle: &Handle, workload: &Workload) -> Result<Load> {
        Load::begin(&self.env, self.disk.name(), handle, *workload, VOLUME)
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, round};
    use crate::workload::Workload;
    use std::time::Duration;

    #[test]
    fn both_reactors_have_load() {
        if aryk_reactor::CoreSet::allowed().iter().count() < 2 {
            return;
        }
        for writes in [0, 30, 100] {
            let round = round(Duration::from_millis(50), &Workload::random(writes, BLOCK, 64), 2).unwrap();
            assert!(round.one > 0.0 && round.two > 0.0 && (0.01..0.99).contains(&round.second));
        }
    }
}
