//! One life of a front-end: its load, the crashes of its back-ends, and the check of the disk at the end. Test tool, one
//! thread.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use aryk_crash_point::Step;
use aryk_pci::Address;
use serde::Serialize;

use crate::ceph::Image;
use crate::daemon::{Daemon, Medium, Place};
use crate::encryption::Rotations;
use crate::front_end::{Counts, FrontEnd, Kind, Violation, violation};
use crate::random::stream;
use crate::shape::Shape;
use crate::volume;
use fastrand::Rng;

/// Time until a daemon that does not reach its step is killed anyway.
const STEP_TIMEOUT: Duration = Duration::from_secs(2);
/// Upper bound of the delay between a restart, or the first completion after it, and the next kill.
const DELAY_MAX: Duration = Duration::from_millis(80);

/// A supervisor delays the restart of a daemon that ran for less than this time.
const LIVED: Duration = Duration::from_secs(1);
/// Lines of the daemons' log that are kept of a life with a violation.
const LOG_LINES: usize = 25;

/// When a daemon is killed.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Plan {
    /// By the test, some time after its first completion.
    Later {
        /// The delay.
        us: u64,
    },
    /// By the test, some time after its start: during its recovery, or before.
    Early {
        /// The delay.
        us: u64,
    },
    /// By itself, at a step.
    Step {
        /// The step's name.
        step: &'static str,
        /// At which occurrence of the step.
        time: u64,
        /// By a panic of the thread at the step, instead of a signal.
        panics: bool,
    },
}

impl Plan {
    /// Draws the plan of crash number `crash` of a run: every other crash is at a step, and the steps take turns: those
    /// of key rotations if the disk is encrypted, otherwise those of queues.
    fn draw(random: &mut Rng, crash: u64, shape: &Shape) -> Self {
        if shape.supervised {
            return Self::Later { us: (LIVED.as_micros() as u64) + random.u64(..100_000) };
        }
        if crash % 2 == 1 && shape.encrypted {
            let step = Step::OF_REKEY[(crash / 2) as usize % Step::OF_REKEY.len()];
            return Self::Step { step: step.name(), time: 1 + random.u64(..4), panics: false };
        }
        if crash % 2 == 1 {
            let step = Step::OF_QUEUES[(crash / 2) as usize % Step::OF_QUEUES.len()];
            let most = match step {
                Step::Recovered | Step::Started => shape.queues.into(),
                Step::Moving => 50,
                Step::Found | Step::Marked | Step::Submitted | Step::Completed | Step::Answered => 1000,
                _ => 150,
            };
            return Self::Step {
                step: step.name(),
                time: 1 + random.u64(..most),
                panics: random.u64(..100) < 25,
            };
        }
        let us = random.u64(..DELAY_MAX.as_micros() as u64);
        if random.u64(..100) < 25 { Self::Early { us } } else { Self::Later { us } }
    }

    fn step(&self) -> Option<String> {
        match self {
            Self::Step { step, time, panics } => {
                Some(format!("{step}:{time}{}", if *panics { ":panic" } else { "" }))
            }
            _ => None,
        }
    }
}

/// A crash of a daemon.
#[derive(Clone, Debug, Serialize)]
pub struct Crash {
    /// The plan.
    pub plan: Plan,
    /// Whether the step was reached, or the time came.
    pub reached: bool,
    /// Requests that were outstanding.
    pub outstanding: usize,
    /// From the daemon's death until the next daemon's first completion, in microseconds; `None` if the next was killed
    /// before that.
    pub gap_us: Option<u64>,
}

/// The results of one life.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The life's number in the run; with the seed it repeats the life.
    pub life: u64,
    /// Its front-end and disk.
    pub shape: Shape,
    /// The life's counters.
    pub counts: Counts,
    /// The longest time between two completions without a crash, in microseconds.
    pub control_us: u64,
    /// The crashes of its daemons.
    pub crashes: Vec<Crash>,
    /// The violation that ended it.
    pub violation: Option<Violation>,
    /// The daemons' log, if there was a violation.
    pub log: Option<String>,
}

/// The settings of a run.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// The daemon's program.
    pub arykd: &'a Path,
    /// Directory of disks in files.
    pub disks: &'a Path,
    /// The drive that is the disk, instead of a file.
    pub drive: Option<Address>,
    /// The configuration file of the Ceph cluster whose images are the disks, instead of files.
    pub ceph: Option<&'a Path>,
    /// The features of these images, if not the cluster's default.
    pub ceph_features: Option<&'a str>,
    /// The seed of all random decisions.
    pub seed: u64,
    /// How long the load runs without crashes.
    pub control: Duration,
}

/// Runs life number `life`, with crashes of these numbers.
///
/// # Errors
/// The test itself cannot continue; violations are in the record.
pub fn run_life(
    settings: Settings<'_>,
    life: u64,
    shape: &Shape,
    crashes: std::ops::Range<u64>,
) -> Result<Record> {
    let sockets = tempfile::tempdir()?;
    let disks = tempfile::tempdir_in(settings.disks)?;
    let medium = match (settings.drive, settings.ceph) {
        (Some(drive), _) => Medium::Drive(drive),
        (None, Some(conf)) => {
            // Runs with other features have other images.
            let name = format!("crash{life}-{}", settings.ceph_features.unwrap_or("default"));
            Medium::Ceph(Image::new(conf, &name, settings.ceph_features))
        }
        (None, None) if shape.volume => {
            Medium::Volume(volume::Image::new(disks.path().join("pool.img"), shape.block_size))
        }
        (None, None) => Medium::File(disks.path().join("crash.img")),
    };
    let place = Place::new(sockets.path(), medium, settings.arykd, shape)?;
    let random = |number| stream(settings.seed, life << 8 | number);
    let front_end = FrontEnd::new(shape, random(1), &place.vhost_socket(shape.mode))?;
    let mut plans: Vec<_> = crashes.map(|crash| Plan::draw(&mut random(2 + crash), crash, shape)).collect();
    plans.reverse();
    let daemon = Daemon::first(&place, shape)?;
    let mut running = Life {
        place: &place,
        front_end,
        daemon,
        rotations: shape.encrypted.then(|| Rotations::start(place.rpc())),
        started: Instant::now(),
        last: None,
        crashes: Vec::new(),
    };
    let mut control = Duration::ZERO;
    let outcome = running.run_crashes(settings.control, &mut control, plans);
    let mut record = Record {
        life,
        shape: shape.clone(),
        counts: running.front_end.counts,
        control_us: control.as_micros() as u64,
        crashes: std::mem::take(&mut running.crashes),
        violation: None,
        log: None,
    };
    let outcome = outcome.and_then(|()| running.end());
    if let Err(violation) = outcome {
        record.violation = Some(violation);
        record.log = Some(log_tail(sockets.path()));
    }
    Ok(record)
}

/// The last lines of the daemons' log.
fn log_tail(directory: &Path) -> String {
    let log = std::fs::read_to_string(directory.join("arykd.log")).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

struct Life<'a> {
    place: &'a Place,
    front_end: FrontEnd,
    daemon: Daemon,
    /// Those of an encrypted disk.
    rotations: Option<Rotations>,
    /// When the daemon was started.
    started: Instant,
    /// When the previous daemon died, and the number of sessions before.
    last: Option<(Instant, u64)>,
    crashes: Vec<Crash>,
}

impl Life<'_> {
    /// Runs the load and all crashes, and ends with the final check. Takes `plans` from the end.
    fn run_crashes(
        &mut self,
        control: Duration,
        longest_gap: &mut Duration,
        mut plans: Vec<Plan>,
    ) -> Result<(), Violation> {
        self.run_until(|life| life.front_end.first_of_session.is_some())?;
        self.front_end.longest_gap = Duration::ZERO;
        let started = Instant::now();
        self.run_until(|_| started.elapsed() > control)?;
        *longest_gap = self.front_end.longest_gap;
        while let Some(plan) = plans.pop() {
            let next = plans.last().and_then(Plan::step);
            self.crash(plan, next.as_deref())?;
        }
        self.run_until(Self::is_served)?;
        self.note_gap();
        self.front_end.drain()?;
        self.front_end.read_back()
    }

    /// Runs the load until `condition` is true, or the daemon has ended; returns whether the condition became true.
    fn run_until(&mut self, mut condition: impl FnMut(&Self) -> bool) -> Result<bool, Violation> {
        loop {
            if condition(self) {
                return Ok(true);
            }
            self.front_end.turn(true)?;
            if self.daemon.has_ended().map_err(broken)? {
                return Ok(false);
            }
        }
    }

    /// Whether the current daemon has completed a request.
    fn is_served(&self) -> bool {
        let sessions = self.last.map_or(0, |(_, sessions)| sessions);
        self.front_end.counts.sessions > sessions && self.front_end.first_of_session.is_some()
    }

    /// The time since the current daemon's first completion.
    fn served(&self) -> Duration {
        let first = self.front_end.first_of_session.filter(|_| self.is_served());
        first.map_or(Duration::ZERO, |first| first.elapsed())
    }

    /// Waits for the daemon's death as planned; starts the next daemon, which dies at `step`.
    fn crash(&mut self, plan: Plan, step: Option<&str>) -> Result<(), Violation> {
        let alive = match plan {
            Plan::Early { us } => {
                self.run_until(|life| life.started.elapsed() >= Duration::from_micros(us))?
            }
            Plan::Later { us } => {
                self.run_until(|life| life.is_served() && life.served() >= Duration::from_micros(us))?
            }
            Plan::Step { .. } => self.run_until(|life| life.served() >= STEP_TIMEOUT)?,
        };
        let by_itself = matches!(plan, Plan::Step { .. });
        if !alive && !by_itself {
            return Err(violation(Kind::Session, "arykd ended without being killed".to_owned()));
        }
        if alive {
            self.daemon.kill().map_err(broken)?;
        }
        let died = Instant::now();
        self.note_gap();
        self.last = Some((died, self.front_end.counts.sessions));
        let outstanding = self.front_end.running();
        self.crashes.push(Crash { plan, reached: alive != by_itself, outstanding, gap_us: None });
        if !self.daemon.is_supervised() {
            self.daemon.wait_until_ended();
            self.daemon = Daemon::spawn(self.place, step, false).map_err(broken)?;
        }
        self.started = Instant::now();
        Ok(())
    }

    /// Records the time from the last crash until the first completion after it, once that has come.
    fn note_gap(&mut self) {
        let Some(first) = self.front_end.first_of_session.filter(|_| self.is_served()) else { return };
        if let (Some((died, _)), Some(crash)) = (self.last, self.crashes.last_mut()) {
            crash.gap_us = Some((first - died).as_micros() as u64);
        }
    }

    /// Ends the load and the daemon, and checks the disk's content.
    fn end(mut self) -> Result<(), Violation> {
        let key = self.rotations.take().map(Rotations::finish).transpose();
        let key = key.map_err(|error| violation(Kind::Rotation, format!("{error:#}")))?;
        self.daemon.stop().map_err(broken)?;
        let bytes = self.place.content(key).map_err(|error| violation(Kind::File, format!("{error:#}")))?;
        self.front_end.check_file(&bytes)
    }
}

fn broken(error: anyhow::Error) -> Violation {
    violation(Kind::Session, format!("{error:#}"))
}
