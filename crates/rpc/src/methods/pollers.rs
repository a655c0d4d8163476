//! `thread_get_pollers` and `thread_get_io_channels`: what the threads on reactors poll, and what they have open. Control context.

use super::framework::{AppThread, TICK_RATE, ask, ticks};
use super::{Control, Error, NoParams, Phase, Table};
use aryk_bdev::open_channels;
use aryk_reactor::{Polled, PollerStats};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "thread_get_pollers",
        Phase::RunTime,
        "What the threads on all reactors poll: queues, and what runs at a period.",
        get_pollers,
    );
    table.add(
        "thread_get_io_channels",
        Phase::RunTime,
        "The disks that the threads on all reactors have open, each with the number of its channels.",
        get_io_channels,
    );
}

/// Result of `thread_get_pollers`.
#[derive(Debug, Serialize, JsonSchema)]
struct Pollers {
    /// Ticks in a second.
    tick_rate: u64,
    /// Of all reactors.
    threads: Vec<ThreadPollers>,
}

/// What a thread polls.
#[derive(Debug, Serialize, JsonSchema)]
struct ThreadPollers {
    name: String,
    id: u64,
    /// What is polled in every turn of the reactor now.
    active_pollers: Vec<Poller>,
    /// What runs at a period.
    timed_pollers: Vec<Poller>,
    /// What is polled when something wakes it: queues without work.
    paused_pollers: Vec<Poller>,
}

/// A queue, or something else that is polled.
#[derive(Debug, Serialize, JsonSchema)]
struct Poller {
    name: String,
    /// A number that none other of its reactor has.
    id: u64,
    /// `waiting` or `paused`.
    state: &'static str,
    /// How often it was polled.
    run_count: u64,
    /// How often there was work.
    busy_count: u64,
    /// Of a timed one.
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

async fn get_pollers(control: &Control, _: NoParams) -> Result<Pollers, Error> {
    let mut threads = vec![ThreadPollers {
        name: AppThread::NAME.into(),
        id: AppThread::ID,
        active_pollers: Vec::new(),
        timed_pollers: Vec::new(),
        paused_pollers: Vec::new(),
    }];
    for handle in control.reactors.handles() {
        // One that has just ended has none.
        let Ok((own, mut polled)) = ask(&handle, |cx| (cx.thread_stats(), cx.poller_stats())).await else {
            continue;
        };
        for thread in own {
            let (mine, others): (Vec<_>, _) = polled.into_iter().partition(|p| p.thread == thread.id);
            polled = others;
            let mut pollers = ThreadPollers {
                name: thread.name,
                id: thread.id,
                active_pollers: Vec::new(),
                timed_pollers: Vec::new(),
                paused_pollers: Vec::new(),
            };
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
    /// Of all reactors.
    threads: Vec<ThreadChannels>,
}

/// What a thread has open.
#[derive(Debug, Serialize, JsonSchema)]
struct ThreadChannels {
    name: String,
    io_channels: Vec<IoChannel>,
}

/// A disk that a thread has open.
#[derive(Debug, Serialize, JsonSchema)]
struct IoChannel {
    /// The disk's.
    name: String,
    /// Channels of it: a queue has one.
    #[serde(rename = "ref")]
    count: u32,
}

async fn get_io_channels(control: &Control, _: NoParams) -> Result<IoChannels, Error> {
    let mut threads = vec![ThreadChannels { name: AppThread::NAME.into(), io_channels: Vec::new() }];
    for handle in control.reactors.handles() {
        // One that has just ended has none.
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
