//! `thread_get_pollers` and `thread_get_io_channels`: pollers and open disks of the reactors' threads. Control context.

use super::framework::{AppThread, TICK_RATE, ask, ticks};
use super::{Control, Error, NoParams, Phase, Table};
use aryk_bdev::open_channels;
use aryk_reactor::{Cx, DriverStats, Polled, PollerStats};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "thread_get_pollers",
        Phase::RunTime,
        "Lists the pollers of the threads on all reactors: queues, and periodic pollers; and the drivers of each reactor.",
        get_pollers,
    );
    table.add(
        "thread_get_io_channels",
        Phase::RunTime,
        "Lists the disks that the threads on all reactors have open, with the number of channels of each.",
        get_io_channels,
    );
}

/// Result of `thread_get_pollers`.
#[derive(Debug, Serialize, JsonSchema)]
struct Pollers {
    /// Ticks in a second.
    tick_rate: u64,
    /// The threads of all reactors. The thread `reactor_N` is the reactor on core N, with its drivers: io_uring, and one per
    /// device whose channels share a connection. The reactor's other threads use them.
    threads: Vec<ThreadPollers>,
}

/// The pollers of a thread.
#[derive(Debug, Serialize, JsonSchema)]
struct ThreadPollers {
    name: String,
    id: u64,
    /// Pollers that currently run in every turn of the reactor.
    active_pollers: Vec<Poller>,
    /// Periodic pollers.
    timed_pollers: Vec<Poller>,
    /// Pollers that run when they are woken: queues without work.
    paused_pollers: Vec<Poller>,
}

/// A queue, or another poller.
#[derive(Debug, Serialize, JsonSchema)]
struct Poller {
    name: String,
    /// ID of the poller, unique on its reactor.
    id: u64,
    /// `waiting` or `paused`.
    state: &'static str,
    /// Number of polls.
    run_count: u64,
    /// Number of polls that found work.
    busy_count: u64,
    /// Period of a timed poller.
    #[serde(skip_serializing_if = "Option::is_none")]
    period_ticks: Option<u64>,
}

impl Poller {
    fn new(stats: PollerStats) -> Self {
        Self {
            name: stats.name,
            id: stats.id,
            state: if stats.polled == Polled::WhenWoken { "paused" } else { "waiting" },
            run_count: stats.runs.all,
            busy_count: stats.runs.busy,
            period_ticks: match stats.polled {
                Polled::Every(period) => Some(ticks(period)),
                Polled::Always | Polled::WhenWoken => None,
            },
        }
    }
}

impl ThreadPollers {
    fn new(name: String, id: u64) -> Self {
        let [active_pollers, timed_pollers, paused_pollers] = [(); 3].map(|()| Vec::new());
        Self { name, id, active_pollers, timed_pollers, paused_pollers }
    }

    fn of_drivers(core: u16, id: u64, drivers: Vec<DriverStats>) -> Self {
        let mut pollers = Self::new(format!("reactor_{core}"), id);
        for DriverStats { id, name, is_parked, runs } in drivers {
            let (list, state) = match is_parked {
                true => (&mut pollers.paused_pollers, "paused"),
                false => (&mut pollers.active_pollers, "waiting"),
            };
            let (run_count, busy_count) = (runs.all, runs.busy);
            list.push(Poller { name, id, state, run_count, busy_count, period_ticks: None });
        }
        pollers
    }
}

async fn get_pollers(control: &Control, _: NoParams) -> Result<Pollers, Error> {
    let mut threads = vec![ThreadPollers::new(AppThread::NAME.into(), AppThread::ID)];
    for handle in control.reactors.handles() {
        // A reactor that has just ended has no pollers.
        let stats = |cx: &mut Cx| (cx.thread_stats(), cx.poller_stats(), cx.number(), cx.driver_stats());
        let Ok((own, mut polled, number, drivers)) = ask(&handle, stats).await else { continue };
        threads.push(ThreadPollers::of_drivers(handle.core(), number, drivers));
        for thread in own {
            let (mine, others): (Vec<_>, _) = polled.into_iter().partition(|p| p.thread == thread.id);
            polled = others;
            let mut pollers = ThreadPollers::new(thread.name, thread.id);
            for stats in mine {
                let list = match stats.polled {
                    Polled::Always => &mut pollers.active_pollers,
                    Polled::Every(_) => &mut pollers.timed_pollers,
                    Polled::WhenWoken => &mut pollers.paused_pollers,
                };
                list.push(Poller::new(stats));
            }
            threads.push(pollers);
        }
    }
    Ok(Pollers { tick_rate: TICK_RATE, threads })
}

/// Result of `thread_get_io_channels`.
#[derive(Debug, Serialize, JsonSchema)]
struct IoChannels {
    /// Ticks in a second.
    tick_rate: u64,
    /// The threads of all reactors.
    threads: Vec<ThreadChannels>,
}

/// The open disks of a thread.
#[derive(Debug, Serialize, JsonSchema)]
struct ThreadChannels {
    name: String,
    io_channels: Vec<IoChannel>,
}

/// A disk that a thread has open.
#[derive(Debug, Serialize, JsonSchema)]
struct IoChannel {
    /// Name of the disk.
    name: String,
    /// Number of channels: a queue has one.
    #[serde(rename = "ref")]
    count: u32,
}

async fn get_io_channels(control: &Control, _: NoParams) -> Result<IoChannels, Error> {
    let mut threads = vec![ThreadChannels { name: AppThread::NAME.into(), io_channels: Vec::new() }];
    for handle in control.reactors.handles() {
        // A reactor that has just ended has no channels.
        let Ok((own, open)) = ask(&handle, |cx| (cx.thread_stats(), open_channels(cx))).await else {
            continue;
        };
        let mut counts: BTreeMap<u64, BTreeMap<String, u32>> = BTreeMap::new();
        for (thread, disk) in open {
            *counts.entry(thread).or_default().entry(disk).or_default() += 1;
        }
        threads.extend(own.into_iter().map(|thread| {
            let disks = counts.remove(&thread.id).unwrap_or_default().into_iter();
            ThreadChannels {
                name: thread.name,
                io_channels: disks.map(|(name, count)| IoChannel { name, count }).collect(),
            }
        }));
    }
    Ok(IoChannels { tick_rate: TICK_RATE, threads })
}
