//! A part of `cargo xtask bench qos`: why the daemon does not keep limits by a poller that visits all disks.
//!
//! The naive way: a request takes from its disk's count for this millisecond, and every millisecond a poller visits each
//! channel of each limited disk, under one lock, to reset the counts; a channel belongs to another thread and has a lock
//! of its own. Here all runs on one thread, where no lock is ever contended: the numbers show the visits alone. The
//! project's own limits, which need no visits, are measured beside it. Ten disks are used, however many exist.

use crate::plot::{Data, Plot};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::Settings;
use anyhow::Result;
use aryk_qos::{Lane, Limiter, Limits, Share, Wheel};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Disks that are used.
const USED: usize = 10;
/// Channels per disk: one per core of a host.
const CHANNELS: usize = 8;
/// Requests between two readings of the clock, as in a reactor's turn.
const TURN: usize = 32;
/// The scanner's window.
const WINDOW: Duration = Duration::from_millis(1);
/// A limit per second that the load does not reach.
const LIMIT: u64 = 1_000_000_000;

/// A wheel without effect: no request waits.
struct NoWakeups;

impl Wheel for NoWakeups {
    type Waiter = ();
    type Timer = ();

    fn wake(&mut self, (): ()) {}

    fn wake_at(&mut self, (): (), _: u64) {}

    fn cancel(&mut self, (): ()) {}
}

/// A channel of a disk, as the scanner sees it.
#[derive(Default)]
struct Channel {
    /// Requests that wait for the next window.
    waiting: Vec<u64>,
    visits: u64,
}

/// A disk, as the scanner sees it.
struct Disk {
    left: u64,
    channels: Vec<Arc<Mutex<Channel>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds the lock")
}

/// Requests per second under a scanner of `count` disks.
fn scanned(count: usize, span: Duration) -> f64 {
    let of_a_window = LIMIT / 1000;
    let disk = || Disk { left: of_a_window, channels: (0..CHANNELS).map(|_| Arc::default()).collect() };
    let disks = Mutex::new((0..count).map(|_| disk()).collect::<Vec<_>>());
    let (start, mut window, mut done) = (Instant::now(), Instant::now(), 0_u64);
    while start.elapsed() < span {
        for request in 0..TURN {
            let mut disks = lock(&disks);
            let disk = &mut disks[request % USED];
            if disk.left > 0 {
                disk.left -= 1;
                done += 1;
            } else {
                lock(&disk.channels[0]).waiting.push(request as u64);
            }
        }
        if window.elapsed() >= WINDOW {
            window = Instant::now();
            for disk in lock(&disks).iter_mut() {
                disk.left = of_a_window;
                for channel in &disk.channels {
                    let mut channel = lock(channel);
                    channel.visits += 1;
                    done += channel.waiting.drain(..).count() as u64;
                }
            }
        }
    }
    done as f64 / start.elapsed().as_secs_f64()
}

/// Requests per second under the project's limits on `count` disks.
fn ours(count: usize, span: Duration) -> Result<f64> {
    let mut lanes = Vec::with_capacity(count);
    for _ in 0..count {
        let mut limiter = Limiter::new();
        limiter.set(Limits { ios: LIMIT, ..Limits::default() }, 0)?;
        let share = |(_, bucket): &(_, _)| Rc::new(RefCell::new(Share::new(Arc::clone(bucket))));
        lanes.push(Lane::new((), limiter.buckets().iter().map(share).collect()));
    }
    let (start, mut done) = (Instant::now(), 0_u64);
    loop {
        let elapsed = start.elapsed();
        if elapsed >= span {
            return Ok(done as f64 / elapsed.as_secs_f64());
        }
        let now = 1_000_000_000 + elapsed.as_nanos() as u64;
        for request in 0..TURN {
            let lane = &mut lanes[request % USED];
            done += u64::from(lane.ask(4096, 0, now, &mut NoWakeups));
            lane.settle(false, now, &mut NoWakeups);
        }
    }
}

/// Measures both in turns.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("scanner") {
        return Ok(());
    }
    let text = "Millions of requests a second that one thread lets through, for ten disks, with the given number of limited disks. *scanner*: a poller visits all channels (eight of \
         each disk) of all limited disks each millisecond, to reset the counts; a copy of that idea, made for this table. *ours*: `arykd`'s implementation.";
    let columns =
        ["limited disks", "scanner", "ours", "scanner, of itself with ten", "ours, of itself with ten"];
    let mut section = Section::new("Cost of a limit scanner", text, columns.map(str::to_owned).to_vec());
    let span = settings.span / 4;
    let mut first = None;
    let (mut scanner, mut own_curve) = (Vec::new(), Vec::new());
    for count in [10, 100, 1000, 3072, 10_000, 30_000] {
        let (mut theirs, mut own) = (Runs::default(), Runs::default());
        for _ in 0..settings.runs {
            theirs.push(scanned(count, span) / 1e6);
            own.push(ours(count, span)? / 1e6);
        }
        report.records.push(Record::new(&format!("qos/scanner/{count}"), "1e6/s", "", &own, &theirs));
        let medians = [theirs.median(), own.median()].map(|median| median.unwrap_or(f64::NAN));
        let [base, own_base] = *first.get_or_insert(medians);
        scanner.push((count as f64, 100.0 * medians[0] / base));
        own_curve.push((count as f64, 100.0 * medians[1] / own_base));
        let share = |now: f64, base: f64| format!("{:.0} %", 100.0 * now / base);
        section.row(vec![
            count.to_string(),
            cell(&theirs, number),
            cell(&own, number),
            share(medians[0], base),
            share(medians[1], own_base),
        ]);
    }
    section.plot(Plot {
        name: "scanner",
        title: "Throughput of ten disks, by number of limited disks".to_owned(),
        axis: "limited disks".to_owned(),
        data: Data::Lines {
            axis: "% of their throughput without other disks",
            curves: vec![("ours", own_curve), ("a scanner", scanner)],
        },
    });
    report.section(section);
    Ok(())
}
