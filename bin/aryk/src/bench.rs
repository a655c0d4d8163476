//! `aryk bench`: acts as a VM's front-end and driver, to measure and verify the back-end behind a vhost-user socket.
//!
//! Works with any vhost-user back-end, without our daemon; only [`target`] calls it, to resolve a name. [`rig`] is the guest,
//! built from `aryk-front-end`; [`load`] keeps requests in flight, which [`workload`] chooses; [`verify`] stamps and checks their
//! data; [`ceiling`] measures the limit of this front-end.

mod affinity;
mod args;
mod ceiling;
mod load;
mod report;
mod rig;
mod target;
mod verify;
mod workload;

pub use args::{BenchArgs, time};
pub use verify::Mismatch;

use crate::error::Error;
use crate::output::Output;
use crate::size::Size;
use aryk_front_end::{Builder, blk, scsi};
use indicatif::{ProgressBar, ProgressStyle};
use load::{Load, Measured, Pace, Progress};
use report::Report;
use rig::{Disk, Rig};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use verify::Verifier;
use workload::Source;

/// Default duration of a measurement.
const TIME: Duration = Duration::from_secs(10);
/// Default part of a disk that is verified, in bytes.
const VERIFIED: u64 = 1 << 30;
/// Interval of the progress bar's updates.
const DRAWING: Duration = Duration::from_millis(100);

/// Measures, and prints the result.
pub fn run(args: &BenchArgs, daemon: &Path, patience: Duration, out: &Output) -> Result<(), Error> {
    if args.target.is_some() && args.rw.writes() && !args.destroy {
        let text = format!("--rw {} overwrites the disk's data: add --destroy to allow that", args.rw);
        return Err(Error::Usage(text));
    }
    let target =
        args.target.as_deref().map(|target| target::find(target, args, daemon, patience)).transpose()?;
    let cores = args.ceiling.then(|| affinity::two_cores(args.cpu)).transpose()?;
    let measured = target.map(|target| measure(&target, args, patience, out)).transpose()?;
    let ceiling = cores.map(|cores| ceiling::measure(args, patience, cores)).transpose()?;
    let report = Report { args, measured, ceiling };
    out.print(&report.json(), || report.text(out))
}

/// The measurement of a disk, and the number of blocks that were checked.
struct Outcome {
    disk: Disk,
    load: Measured,
    checked: Option<u64>,
}

fn measure(target: &Path, args: &BenchArgs, patience: Duration, out: &Output) -> Result<Outcome, Error> {
    let progress = Progress::default();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Started before this thread is pinned, so that the drawing thread is not pinned.
        scope.spawn(|| draw(args, &progress, &is_done, out.json));
        let outcome = match args.scsi {
            Some(_) => run_load(Rig::<scsi::Requests>::connect, target, args, patience, &progress),
            None => run_load(Rig::<blk::Requests>::connect, target, args, patience, &progress),
        };
        is_done.store(true, Ordering::Release);
        outcome
    })
}

/// Connects to a disk.
type Connect<B> = fn(&Path, &BenchArgs, Duration) -> Result<(Rig<B>, Disk), Error>;

fn run_load<B: Builder + Copy>(
    connect: Connect<B>,
    target: &Path,
    args: &BenchArgs,
    patience: Duration,
    progress: &Progress,
) -> Result<Outcome, Error> {
    if let Some(core) = args.cpu {
        affinity::pin(core as usize)?;
    }
    let (mut rig, disk) = connect(target, args, patience)?;
    let blocks = blocks_of(args, disk.bytes);
    let in_flight = u64::from(args.qd) * u64::from(args.queues);
    let least = if args.verify { in_flight + 1 } else { 1 };
    if blocks < least {
        let text = format!("{blocks} blocks of {} are too few: {least} are needed", args.bs);
        return Err(Error::Usage(text));
    }
    let mut verifier =
        args.verify.then(|| Verifier::new(run_id(), args.bs.0 as u32, blocks, !args.rw.writes()));
    let time = match (args.time, args.requests) {
        (Some(time), _) => time,
        (None, Some(_)) => Duration::MAX,
        (None, None) => TIME,
    };
    let pace = Pace {
        time: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        requests: args.requests.unwrap_or(u64::MAX),
        rate: args.rate.map(|rate| rate as f64),
        patience,
    };
    let source = Source::new(args.rw, blocks, run_id());
    let load = Load::new(&mut rig, source, pace, progress).verified(verifier.as_mut()).run()?;
    if let Some(verifier) = verifier.as_mut().filter(|_| args.rw.writes()) {
        let written = verifier.written();
        let pace = Pace { time: u64::MAX, requests: written.len() as u64, rate: None, patience };
        let source = Source::reading(written);
        Load::new(&mut rig, source, pace, &Progress::default()).verified(Some(verifier)).run()?;
    }
    rig.stop()?;
    Ok(Outcome { disk, load, checked: verifier.map(|verifier| verifier.checked) })
}

/// The number of blocks to use of a disk of `bytes` bytes.
fn blocks_of(args: &BenchArgs, bytes: u64) -> u64 {
    let default = if args.verify { bytes.min(VERIFIED) } else { bytes };
    let Size(area) = args.area.unwrap_or(Size(default));
    area / args.bs.0
}

/// A number that differs in each run.
#[expect(clippy::disallowed_methods, reason = "a command line may read the clock")]
fn run_id() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
}

/// Draws the progress bar until the end; only on a terminal.
fn draw(args: &BenchArgs, progress: &Progress, is_done: &AtomicBool, is_quiet: bool) {
    let (template, all) = match args.requests {
        Some(requests) => ("{bar:40} {percent:>3}%  {human_pos} of {human_len} requests{msg}", requests),
        None => ("{bar:40} {percent:>3}%  {eta} left{msg}", args.time.unwrap_or(TIME).as_nanos() as u64),
    };
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    let bar = if is_quiet { ProgressBar::hidden() } else { ProgressBar::new(all).with_style(style) };
    let mut before = (0, 0);
    while !is_done.load(Ordering::Acquire) {
        std::thread::park_timeout(DRAWING);
        let elapsed = progress.elapsed.load(Ordering::Relaxed);
        let requests = progress.requests.load(Ordering::Relaxed);
        let rate = (requests - before.1) as f64 * 1e9 / (elapsed.saturating_sub(before.0)).max(1) as f64;
        bar.set_message(format!("  {rate:.0} IOPS"));
        bar.set_position(if args.requests.is_some() { requests } else { elapsed.min(all) });
        before = (elapsed, requests);
    }
    bar.finish_and_clear();
}
