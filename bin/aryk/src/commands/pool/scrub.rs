//! `aryk pool scrub`: starts, follows and stops a pass of the scrub of a pool, or sets when it is scrubbed. The daemon does the
//! work: the pass goes on when this command ends.

use super::{HINTS, damage_line, find};
use crate::client::Client;
use crate::commands::{elements, number, object, text};
use crate::completion::pools;
use crate::error::{BUSY, Error};
use crate::output::Output;
use crate::size::Size;
use crate::watch;
use clap::Args;
use clap_complete::ArgValueCandidates;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Between two looks at a pass.
const INTERVAL: Duration = Duration::from_millis(250);

const START_HINTS: [(i64, &str); 1] =
    [(BUSY, "To wait for the end of the pass: aryk pool scrub POOL --wait")];

/// Arguments of `pool scrub`.
#[derive(Debug, Args)]
pub struct ScrubArgs {
    /// The pool
    #[arg(add = ArgValueCandidates::new(pools))]
    pool: String,
    /// Wait until the pass ends, also if it was under way already, and show what it has found
    #[arg(long)]
    wait: bool,
    /// End the pass that is under way
    #[arg(long, conflicts_with_all = ["wait", "days", "rate"])]
    stop: bool,
    /// From now on, begin a pass every so many days; 0 for never. No pass begins now [default of a new pool: 14]
    #[arg(long, conflicts_with = "wait")]
    days: Option<u32>,
    /// From now on, read so many bytes in a second at most; 0 for as many as a pass needs for half of the time until the next
    /// one, and at least 4M. No pass begins now
    #[arg(long, value_name = "SIZE", conflicts_with = "wait")]
    rate: Option<Size>,
}

pub(super) fn run(args: &ScrubArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let name = &args.pool;
    if args.stop {
        return stop(name, client, out);
    }
    if args.days.is_some() || args.rate.is_some() {
        let params = object([
            ("pool", Some(json!(name))),
            ("days", args.days.map(|days| json!(days))),
            ("bytes_per_second", args.rate.map(|rate| json!(rate.0))),
        ]);
        client.call("aryk_pool_set_scrub", params).map_err(|error| error.hinted(&HINTS))?;
        let pool = find(client, name)?;
        return out.print(&pool["scrub"], || format!("Pool '{name}' is scrubbed {}.", plan(&pool["scrub"])));
    }
    match client.call("aryk_pool_start_scrub", json!({"pool": name})) {
        Err(Error::Refused { code: BUSY, .. }) if args.wait => {}
        started => drop(started.map_err(|error| error.hinted(&START_HINTS).hinted(&HINTS))?),
    }
    if args.wait {
        return wait(name, client, out);
    }
    let scrub = get(name, client)?;
    out.print(&scrub, || {
        format!("The daemon scrubs pool '{name}'. To see how far it is: aryk pool show {name}")
    })
}

fn get(name: &str, client: &mut Client) -> Result<Value, Error> {
    client.call("aryk_pool_get_scrub", json!({"pool": name})).map_err(|error| error.hinted(&HINTS))
}

fn stop(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let params = json!({"pool": name});
    let stopped = client.call("aryk_pool_stop_scrub", params).map_err(|error| error.hinted(&HINTS))?;
    let scrub = get(name, client)?;
    out.print(&scrub, || match stopped == true {
        true => format!("The scrub of pool '{name}' is stopped."),
        false => format!("Pool '{name}' is not being scrubbed."),
    })
}

/// Waits for the end of a pass, with a bar on terminals, and shows what it has found.
fn wait(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let bar = if out.json { ProgressBar::hidden() } else { ProgressBar::new(100) };
    let style = ProgressStyle::with_template("{bar:40} {percent:>3}%").expect("the template is valid");
    bar.set_style(style);
    let scrub = loop {
        let scrub = get(name, client)?;
        if text(&scrub, "state") != "running" {
            break scrub;
        }
        bar.set_position(number(&scrub, "percent"));
        watch::wait(INTERVAL);
    };
    bar.finish_and_clear();
    let damage = elements(&scrub["damage"]);
    out.print(&scrub, || {
        let mut lines: Vec<String> = damage.iter().map(damage_line).collect();
        if damage.is_empty() {
            lines.push("No damage.".to_owned());
        }
        lines.join("\n")
    })?;
    let unfinished = |why| Err(Error::Scrub { pool: name.to_owned(), why });
    match (text(&scrub, "state"), damage) {
        ("complete", []) => Ok(()),
        (_, [_, ..]) => Err(Error::Damaged(name.to_owned())),
        ("failed", _) => unfinished("the disk of the pool has failed"),
        _ => unfinished("it was stopped"),
    }
}

/// How often a pool is scrubbed, and how fast.
fn plan(scrub: &Value) -> String {
    let often = match number(scrub, "days") {
        0 => "only when it is started".to_owned(),
        1 => "every day".to_owned(),
        days => format!("every {days} days"),
    };
    match number(scrub, "bytes_per_second") {
        0 => often,
        bytes => format!("{often}, {} in a second at most", Size(bytes)),
    }
}

/// The scrub of a pool in a line.
pub(super) fn line(scrub: &Value) -> String {
    let found = match number(scrub, "damaged_blocks") {
        0 => String::new(),
        blocks => format!("; {blocks} damaged blocks found"),
    };
    let latest = match (text(scrub, "state"), scrub["complete_since"].as_u64()) {
        ("running", _) => format!("{}% done", number(scrub, "percent")),
        (_, Some(since)) => format!("complete {} days ago", days_since(since)),
        ("none", None) => "not complete yet".to_owned(),
        (state, None) => state.to_owned(),
    };
    format!("{latest}{found}; {}", plan(scrub))
}

#[expect(clippy::disallowed_methods, reason = "a person is told how long ago that was")]
fn days_since(seconds: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    now.saturating_sub(seconds) / 86_400
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scrub_is_one_line() {
        let mut scrub = json!({"state": "none", "days": 14, "bytes_per_second": 0, "damaged_blocks": 0});
        assert_eq!(line(&scrub), "not complete yet; every 14 days");
        scrub["state"] = json!("running");
        scrub["percent"] = json!(37);
        scrub["damaged_blocks"] = json!(2);
        scrub["bytes_per_second"] = json!(1 << 20);
        scrub["days"] = json!(0);
        let expected = "37% done; 2 damaged blocks found; only when it is started, 1M in a second at most";
        assert_eq!(line(&scrub), expected);
        let scrub = json!({"state": "stopped", "complete_since": 0, "days": 1});
        let line = line(&scrub);
        assert!(line.starts_with("complete ") && line.ends_with(" days ago; every day"), "{line}");
    }
}
