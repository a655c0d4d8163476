//! The command line of the simulations; `cargo xtask simulate volume` builds and runs it. One thread for each seed that runs.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use aryk_volume_simulation::damage::Target;
use aryk_volume_simulation::{Counts, journal, run, shards};
use clap::Parser;

/// Simulates volumes on a disk that crashes, and checks everything that is read
#[derive(Debug, Parser)]
#[command(name = "simulate", bin_name = "cargo xtask simulate volume", max_term_width = 80)]
struct Cli {
    /// Number of seeds
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Steps of each simulation
    #[arg(long, default_value_t = 400)]
    steps: u32,
    /// Stop after this time, in seconds, even before all seeds have run
    #[arg(long, value_name = "SECONDS")]
    time: Option<u64>,
    /// Simulate the store without the engine
    #[arg(long)]
    store: bool,
    /// Simulate pools of several shards: a snapshot has one moment, and a change is in all or in none
    #[arg(long, conflicts_with = "store")]
    shards: bool,
    /// Damage one small pool instead, for each seed another sector
    #[arg(long, conflicts_with_all = ["store", "shards"])]
    damage: bool,
    /// Simulations at the same time
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// Runs that make a failing simulation shorter
    #[arg(long, default_value_t = 300)]
    shrink: u32,
    /// Print the steps of a failing simulation
    #[arg(long)]
    verbose: bool,
    /// Go on after a failure
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match simulate(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the report contains the duration")]
fn simulate(cli: &Cli) -> Result<()> {
    run::catch_panics();
    let start = Instant::now();
    let end = cli.time.map(|seconds| start + Duration::from_secs(seconds));
    let next = AtomicU64::new(cli.seed);
    let has_failed = AtomicBool::new(false);
    let total = Mutex::new((0_u64, 0_u64, Total::default()));
    std::thread::scope(|scope| {
        for _ in 0..cli.threads.max(1) {
            scope.spawn(|| {
                let target = cli.damage.then(Target::new);
                while !has_failed.load(Ordering::Relaxed) || cli.keep_going {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= cli.seed + cli.seeds || end.is_some_and(|end| Instant::now() > end) {
                        break;
                    }
                    let result = one(cli, target.as_ref(), seed);
                    let Ok(mut total) = total.lock() else { break };
                    total.0 += 1;
                    match result {
                        Ok(counts) => total.2.add(&counts),
                        Err(text) => {
                            total.1 += 1;
                            has_failed.store(true, Ordering::Relaxed);
                            println!("{text}\n");
                        }
                    }
                }
            });
        }
    });
    let Ok((seeds, failed, counts)) = total.into_inner() else { bail!("a thread ended early") };
    let counts = if cli.shards { counts.of_shards.told() } else { told(&counts.of_volumes) };
    println!("{seeds} simulations in {} s: {counts}", start.elapsed().as_secs());
    if failed > 0 {
        bail!("{failed} of {seeds} simulations failed");
    }
    Ok(())
}

/// What simulations did.
#[derive(Default)]
struct Total {
    of_volumes: Counts,
    of_shards: shards::Counts,
}

impl Total {
    fn of(of_volumes: Counts) -> Self {
        Self { of_volumes, ..Self::default() }
    }

    fn add(&mut self, other: &Self) {
        self.of_volumes.add(other.of_volumes);
        self.of_shards.add(&other.of_shards);
    }
}

fn told(counts: &Counts) -> String {
    [
        (counts.requests, "requests"),
        (counts.commands, "commands"),
        (counts.operations, "operations of the disk"),
        (counts.failures, "of them failed"),
        (counts.crashes, "crashes"),
        (counts.read_only, "of them of pools that were read-only"),
        (counts.compacted, "ranges compacted into dense frames"),
        (counts.gathered, "ranges gathered in a row"),
        (counts.adopted, "volumes adopted"),
        (counts.damaged, "damaged logs found"),
        (counts.remade, "lost checkpoints made again"),
        (counts.decayed, "sectors damaged"),
        (counts.rebuilt, "pools rebuilt"),
        (counts.scrubbed, "passes of the scrub"),
        (counts.values, "values compared"),
    ]
    .map(|(count, what)| format!("{count} {what}"))
    .join(", ")
}

/// Runs a seed; a failure is told with the shortest list of steps that was found.
fn one(cli: &Cli, target: Option<&Result<Target, String>>, seed: u64) -> Result<Total, String> {
    if let Some(target) = target {
        let run = target.as_ref().map_err(Clone::clone).and_then(|target| target.run(seed));
        run.map_err(|what| format!("seed {seed}: {what}"))?;
        return Ok(Total::of(Counts { decayed: 1, ..Counts::default() }));
    }
    if cli.shards {
        let of_shards = run::caught(|| shards::run(seed, cli.steps));
        let of_shards = of_shards.map_err(|what| format!("seed {seed}: {what}"))?;
        return Ok(Total { of_shards, ..Total::default() });
    }
    if cli.store {
        let counts = journal::run(seed, cli.steps)?;
        let (operations, crashes) = (counts.operations, counts.crashes);
        return Ok(Total::of(Counts { operations, crashes, ..Counts::default() }));
    }
    run::seed(seed, cli.steps).map(Total::of).map_err(|failure| {
        let shorter = run::shrink(&failure, cli.shrink);
        let steps: Vec<_> = shorter.steps.iter().map(|step| format!("  {step:?}")).collect();
        let shown = if cli.verbose { steps.join("\n") } else { String::new() };
        format!(
            "seed {seed}, {} steps: {}\n{:?}\nwith {} of these steps: {}\n{}",
            cli.steps,
            failure.what,
            failure.shape,
            steps.len(),
            shorter.what,
            shown
        )
    })
}
