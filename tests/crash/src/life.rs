//! One life of a front-end: its load, its back-end's deaths, and what is left in the end. Test tool, one thread.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::daemon::{Daemon, Place};
use crate::front_end::{Counts, FrontEnd, Kind, Violation, violation};
use crate::random::Random;
use crate::shape::Shape;

/// What one life was like.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Its number in the run; with the seed it repeats the life.
    pub life: u64,
    /// Its front-end and disk.
    pub shape: Shape,
    /// What was done.
    pub counts: Counts,
    /// The longest time between two completions without any event, in microseconds.
    pub control_us: u64,
    /// What was wrong.
    pub violation: Option<Violation>,
    /// The daemon's last words, where something was wrong.
    pub log: Option<String>,
}

/// What all lives of a run have in common.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// The program.
    pub arykd: &'a Path,
    /// Where disks are made.
    pub disks: &'a Path,
    /// How long the load runs undisturbed.
    pub control: Duration,
}

/// Lives life number `life` of `seed`.
///
/// # Errors
/// The test itself cannot go on; violations are in the record.
pub fn live(settings: Settings<'_>, seed: u64, life: u64, shape: &Shape) -> Result<Record> {
    let sockets = tempfile::tempdir()?;
    let disks = tempfile::tempdir_in(settings.disks)?;
    let place = Place::new(sockets.path(), disks.path(), settings.arykd)?;
    let random = Random::new(seed, life << 8);
    let mut front_end = FrontEnd::new(shape, random, &place.meeting_point(shape.mode))?;
    let daemon = Daemon::start(&place, shape)?;
    let mut record = Record {
        life,
        shape: shape.clone(),
        counts: Counts::default(),
        control_us: 0,
        violation: None,
        log: None,
    };
    let outcome = through(&mut front_end, settings, &mut record).and_then(|()| {
        daemon.stop().map_err(|error| violation(Kind::Session, format!("{error:#}")))?;
        let bytes = place.image().map_err(|error| violation(Kind::File, format!("{error:#}")))?;
        front_end.check_file(&bytes)
    });
    record.counts = front_end.counts;
    if let Err(violation) = outcome {
        record.violation = Some(violation);
        record.log = std::fs::read_to_string(sockets.path().join("arykd.log")).ok();
    }
    Ok(record)
}

fn through(front_end: &mut FrontEnd, settings: Settings<'_>, record: &mut Record) -> Result<(), Violation> {
    // The first requests wait for the first session.
    while front_end.first_of_session.is_none() {
        front_end.turn(true)?;
    }
    front_end.longest_gap = Duration::ZERO;
    let started = Instant::now();
    while started.elapsed() < settings.control {
        front_end.turn(true)?;
    }
    record.control_us = front_end.longest_gap.as_micros() as u64;
    front_end.drain()?;
    front_end.read_back()
}
