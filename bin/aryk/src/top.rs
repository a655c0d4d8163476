//! `aryk top`: activity of disks, groups, controllers, reactors, background tasks, NVMe drives, pools, hosts
//! and volumes, live.
//!
//! `reading` has the daemon's counts and the rates between two reads; `state` has what the screen shows, and handles keys; `view`
//! draws it. `reading` and `state` use no terminal.

mod reading;
mod state;
mod view;

use crate::client::Client;
use crate::error::Error;
use crate::latency::Latencies;
use crate::output::Output;
use crate::watch;
use clap::{Args, ValueEnum};
use ratatui::crossterm::event::{self, Event};
use reading::{Rates, Reading};
use serde_json::{Map, Value, json};
use state::{Link, State, View};
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// Arguments of `top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = watch::seconds)]
    pub every: Duration,
    /// Print the rates of one interval, and exit
    #[arg(long)]
    pub once: bool,
    /// What to show [default: disks on a terminal, all without a terminal]
    #[arg(value_enum)]
    pub view: Option<View>,
    /// Sort order
    #[arg(long, value_enum, default_value = "ops")]
    pub sort: Sort,
    /// Show only objects with this text in their names
    #[arg(long, value_name = "PART")]
    pub filter: Option<String>,
}

/// The sort order of rows; the largest value is first, except for names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    Name,
    Ops,
    Bytes,
    Latency,
    Waiting,
    Depth,
}

impl Sort {
    const ALL: [Self; 6] = [Self::Name, Self::Ops, Self::Bytes, Self::Latency, Self::Waiting, Self::Depth];

    const fn name(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Ops => "ops",
            Self::Bytes => "bytes",
            Self::Latency => "latency",
            Self::Waiting => "waiting",
            Self::Depth => "depth",
        }
    }
}

fn read(client: &mut Client) -> Result<Reading, Error> {
    let value = client.call("aryk_stats_get", json!({}))?;
    serde_json::from_value(value).map_err(|e| Error::Protocol(format!("sent an unknown reply: {e}")))
}

/// Shows the rates until the user quits; prints them once if there is no terminal.
pub fn top(args: &TopArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let of = |view| State::new(view, args.sort, args.filter.clone().unwrap_or_default());
    let first = read(client)?;
    let is_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if args.once || out.json || !is_terminal {
        watch::wait(args.every);
        let rates = Rates::between(&first, &read(client)?);
        let views: Vec<_> = args.view.map_or_else(|| View::ALL.to_vec(), |view| vec![view]);
        let states: Vec<_> = views.into_iter().map(of).collect();
        return out.print(&whole_json(&states, &rates), || whole_text(&states, &rates, out));
    }
    let state = of(args.view.unwrap_or(View::Disks));
    let mut terminal = ratatui::try_init()?;
    let ended = live(args.every, state, first, client, &mut terminal);
    ratatui::try_restore()?;
    ended
}

/// The JSON of all requested views, by name.
fn whole_json(views: &[State], rates: &Rates) -> Value {
    let per_second =
        views.iter().map(|state| (state.view.title().to_owned(), state.json(rates, &state.rows(rates))));
    json!({"seconds": rates.seconds, "per_second": per_second.collect::<Map<_, _>>()})
}

/// A table per view; empty views of groups, tasks, drives, pools, hosts and volumes are omitted.
fn whole_text(views: &[State], rates: &Rates, out: &Output) -> String {
    let is_shown = |state: &&State| {
        views.len() == 1
            || match state.view {
                View::Groups => !rates.groups.is_empty(),
                View::Tasks => !rates.tasks.is_empty(),
                View::Drives => !rates.drives.is_empty(),
                View::Pools => !rates.pools.is_empty(),
                View::Hosts => !rates.hosts.is_empty(),
                View::Volumes => !rates.volumes.is_empty(),
                View::Disks | View::Controllers | View::Reactors => true,
            }
    };
    let tables = views.iter().filter(is_shown).map(|state| state.table(rates, &state.rows(rates), out));
    tables.collect::<Vec<_>>().join("\n\n")
}

#[expect(clippy::disallowed_methods, reason = "a command line may read the clock")]
fn live(
    every: Duration,
    mut state: State,
    mut before: Reading,
    client: &mut Client,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), Error> {
    let mut rates = Rates::between(&before, &before);
    let mut due = Instant::now() + every;
    let mut latencies: Option<(Latencies, Latencies)> = None;
    loop {
        let shown = latencies.as_ref().map(|(before, now)| now.since(before));
        terminal.draw(|frame| view::draw(frame, &mut state, &rates, shown.as_ref()))?;
        if event::poll(due.saturating_duration_since(Instant::now()))? {
            if let Event::Key(key) = event::read()?
                && key.is_press()
                && state.press(key, &rates)
            {
                return Ok(());
            }
            if state.detail().is_none_or(|name| latencies.as_ref().is_none_or(|(l, _)| l.name != name)) {
                latencies = first_latencies(&state, client);
            }
            continue;
        }
        due = Instant::now() + every;
        if state.is_paused() {
            continue;
        }
        let now = match read(client) {
            Ok(now) => now,
            Err(_) => {
                state.link = Link::Lost;
                // The next update tries again.
                let _ = client.reconnect();
                continue;
            }
        };
        if state.link == Link::Lost {
            // The daemon is new: its counts start from zero, so the latencies are read again.
            (before, latencies) = (now.clone(), None);
        }
        state.link = state.link.answered();
        rates = Rates::between(&before, &now);
        before = now;
        latencies = match (latencies, state.detail()) {
            (Some((_, last)), Some(name)) => Latencies::read(name, client).ok().map(|now| (last, now)),
            (None, Some(_)) => first_latencies(&state, client),
            (_, None) => None,
        };
    }
}

/// The first latencies of a disk that was just chosen. `None` if the disk is gone.
fn first_latencies(state: &State, client: &mut Client) -> Option<(Latencies, Latencies)> {
    let now = Latencies::read(state.detail()?, client).ok()?;
    Some((now.clone(), now))
}
