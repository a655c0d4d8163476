//! The scrub of a pool: when passes begin, how fast they are, and what they have found. Control context.
//!
//! One task of the control plane calls [`Pool::scrub`] for each pool. Without a pass, it sleeps until the next one is due. During
//! a pass, it grants all shards bytes to read, ten times a second, and takes what they have found. A shard keeps its place when
//! it moves to another reactor. A pool that is opened again begins an interrupted pass again; the note of its first shard says
//! when the latest complete pass began.

use super::{Health, Pool, lock};
use crate::{Error, note};
use aryk_log_limit::{LogLimit, limited};
use aryk_reactor::{Clock, Nanos};
use aryk_volume::{BLOCK, Command, Damage, Scrub, Stats, VolumeId};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Notify;

/// Time between two grants.
const TICK: Duration = Duration::from_millis(100);
/// The longest time for which a grant counts.
const GRANT_MAX: Duration = Duration::from_secs(1);
/// Time from the opening of a pool to the first pass that begins by itself.
const START_DELAY: u64 = 60;
/// Time after a pass that failed until another one begins by itself.
const RETRY_DELAY: u64 = 3600;
/// The longest time without a look at whether a pass is due: the clock may be set.
const LOOK: Duration = Duration::from_secs(3600);
const DAY: u64 = 86_400;
/// The least that is read in a second, unless the operator has chosen another limit.
const RATE_MIN: u64 = 4 << 20;
/// Pieces of damage that are kept.
const DAMAGE_MAX: usize = 1000;

/// When a pool is scrubbed, and how fast.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScrubSettings {
    /// Days from the beginning of a pass to that of the next one. 0: only [`Pool::start_scrub`] begins passes.
    pub days: u32,
    /// Bytes that all shards together read in a second at most. 0: as many as a pass needs for half of the time until the next
    /// one, and at least 4 MiB.
    pub bytes_per_second: u64,
}

impl Default for ScrubSettings {
    fn default() -> Self {
        Self { days: 14, bytes_per_second: 0 }
    }
}

impl ScrubSettings {
    /// The most days.
    pub const DAYS_MAX: u32 = 3650;
    /// The least bytes in a second, if they are limited.
    pub const BYTES_MIN: u64 = 64 << 10;

    /// Whether a pool can have these settings.
    pub const fn is_valid(&self) -> bool {
        self.days <= Self::DAYS_MAX
            && (self.bytes_per_second == 0 || self.bytes_per_second >= Self::BYTES_MIN)
    }

    /// Bytes in a second for a pool with so many bytes.
    fn rate(&self, bytes: u64) -> u64 {
        let days = if self.days == 0 { Self::default().days } else { self.days };
        match self.bytes_per_second {
            0 => (bytes / (u64::from(days) * DAY / 2)).max(RATE_MIN),
            limit => limit,
        }
    }
}

/// How far the scrub of a pool is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScrubState {
    /// No pass has begun since the pool was opened.
    None,
    /// A pass is under way.
    Running {
        /// Entries of the index that were visited.
        visited: u64,
        /// All entries.
        entries: u64,
    },
    /// The latest pass has read all.
    Complete,
    /// The latest pass was stopped.
    Stopped,
    /// The latest pass has ended early, because the disk of the pool has failed.
    Failed,
}

/// The scrub of a pool, for people.
#[derive(Clone, Debug)]
pub struct ScrubReport {
    /// How far it is.
    pub state: ScrubState,
    /// The time at which the latest complete pass began, in seconds since 1970.
    pub complete_since: Option<u64>,
    /// When it runs, and how fast.
    pub settings: ScrubSettings,
    /// What the pass under way, or else the latest one, has found: the first 1,000 pieces.
    pub damage: Vec<Damage>,
}

/// A pass under way.
#[derive(Debug)]
struct Pass {
    began: u64,
    /// Bytes that it reads.
    bytes: u64,
    granted_at: Nanos,
    /// For each shard, entries that were visited, and all.
    parts: Vec<(u64, u64)>,
}

#[derive(Debug, Default)]
enum Phase {
    #[default]
    None,
    /// A pass is to begin.
    Starting,
    Running(Pass),
    /// The pass is to end.
    Stopping,
    Complete,
    Stopped,
    Failed,
}

#[derive(Debug, Default)]
struct State {
    settings: ScrubSettings,
    complete_since: Option<u64>,
    phase: Phase,
    damage: Vec<Damage>,
    /// Before this time, no pass begins by itself.
    not_before: Option<u64>,
}

/// The scrub of a pool.
#[derive(Debug)]
pub(super) struct Scrubbing {
    state: Mutex<State>,
    /// Tells the task that there is something to do.
    changed: Arc<Notify>,
    lines: LogLimit,
}

impl Default for Scrubbing {
    fn default() -> Self {
        let lines = LogLimit::new(10, Duration::from_secs(10));
        Self { state: Mutex::default(), changed: Arc::default(), lines }
    }
}

/// What a shard does.
#[derive(Clone, Copy)]
pub(crate) enum Order {
    Start,
    Grant(u64),
    Stop,
}

impl State {
    /// In how many seconds a pass is due.
    fn due_in(&self, now: u64) -> u64 {
        let period = u64::from(self.settings.days) * DAY;
        if period == 0 {
            return u64::MAX;
        }
        // The clock may have been wrong.
        let due = self.complete_since.map_or(0, |began| began.min(now) + period);
        due.max(self.not_before.unwrap_or(0)).saturating_sub(now)
    }
}

impl Pool {
    /// Reads the settings of the scrub, and when it was complete, from the note of a pool that has just been opened.
    pub(super) fn recover_scrub(&self, note: &[u8]) {
        let mut state = lock(&self.scrubbing.state);
        (state.settings, state.complete_since) = note::scrub(note);
    }

    /// What wakes the caller of [`Pool::scrub`] before its time.
    pub fn scrub_changed(&self) -> Arc<Notify> {
        Arc::clone(&self.scrubbing.changed)
    }

    /// The scrub, for people.
    pub fn scrub_report(&self) -> ScrubReport {
        let state = lock(&self.scrubbing.state);
        let sum = |pass: &Pass| {
            let sum =
                |(visited, entries): (u64, u64), part: &(u64, u64)| (visited + part.0, entries + part.1);
            pass.parts.iter().fold((0, 0), sum)
        };
        ScrubReport {
            state: match &state.phase {
                Phase::None => ScrubState::None,
                Phase::Starting => ScrubState::Running { visited: 0, entries: 0 },
                Phase::Running(pass) => {
                    let (visited, entries) = sum(pass);
                    ScrubState::Running { visited, entries }
                }
                Phase::Stopping | Phase::Stopped => ScrubState::Stopped,
                Phase::Complete => ScrubState::Complete,
                Phase::Failed => ScrubState::Failed,
            },
            complete_since: state.complete_since,
            settings: state.settings,
            damage: state.damage.clone(),
        }
    }

    /// Has a pass begin now.
    ///
    /// # Errors
    /// [`Error::Busy`]: one is under way.
    pub fn start_scrub(&self) -> Result<(), Error> {
        let mut state = lock(&self.scrubbing.state);
        if matches!(state.phase, Phase::Starting | Phase::Running(_) | Phase::Stopping) {
            return Err(Error::Busy("the pool is being scrubbed already"));
        }
        state.phase = Phase::Starting;
        state.damage.clear();
        self.scrubbing.changed.notify_one();
        Ok(())
    }

    /// Has the pass under way end. Returns whether there was one. The next one that begins by itself is due
    /// as if this one had been complete.
    pub fn stop_scrub(&self) -> bool {
        let mut state = lock(&self.scrubbing.state);
        let is_running = matches!(state.phase, Phase::Starting | Phase::Running(_));
        if is_running {
            state.phase = Phase::Stopping;
            self.scrubbing.changed.notify_one();
        }
        is_running
    }

    /// Changes when the pool is scrubbed, and how fast.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn set_scrub(&self, settings: ScrubSettings) -> Result<(), Error> {
        self.store_scrub(Some(settings)).await?;
        self.scrubbing.changed.notify_one();
        Ok(())
    }

    /// Stores when the latest complete pass began, and the settings: other ones, or those that there are.
    async fn store_scrub(&self, settings: Option<ScrubSettings>) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        let note = self.note().await?;
        let (settings, note) = {
            let state = lock(&self.scrubbing.state);
            let settings = settings.unwrap_or(state.settings);
            (settings, note::with_scrub(&note, &settings, state.complete_since))
        };
        self.parts[0].command(Command::SetNote(note)).await?;
        lock(&self.scrubbing.state).settings = settings;
        Ok(())
    }

    /// Does what is due: begins a pass, goes on with it, or ends it. `now` is in seconds since 1970. Returns after which time
    /// there is more to do, if [`Pool::scrub_changed`] does not say so before.
    pub async fn scrub(&self, now: u64) -> Duration {
        let order = {
            let mut state = lock(&self.scrubbing.state);
            state.not_before.get_or_insert(now + START_DELAY);
            match &state.phase {
                Phase::Starting => Order::Start,
                Phase::Running(pass) => Order::Grant(grant(pass, state.settings)),
                Phase::Stopping => Order::Stop,
                Phase::None | Phase::Complete | Phase::Stopped | Phase::Failed => {
                    let wait = state.due_in(now);
                    if wait > 0 || self.health() != Health::Ready {
                        return if wait > 0 { LOOK.min(Duration::from_secs(wait)) } else { LOOK };
                    }
                    state.phase = Phase::Starting;
                    state.damage.clear();
                    Order::Start
                }
            }
        };
        self.scrub_parts(order, now).await;
        TICK
    }

    /// Tells all shards what to do, and takes what they have found.
    async fn scrub_parts(&self, order: Order, now: u64) {
        let granted_at = Clock::Monotonic.now();
        let mut stats = Stats::default();
        let mut told = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            let Ok((scrub, damage, of_part)) = part.root.call(move |owner, cx| owner.scrub(order, cx)).await
            else {
                return;
            };
            stats += of_part;
            told.push(scrub);
            self.note_damage(number, damage);
        }
        let bytes = stats.live_bytes + stats.index_bytes;
        self.note_progress(order, now, granted_at, bytes, &told);
        if self.end_pass(now, &told)
            && let Err(error) = self.store_scrub(None).await
        {
            tracing::warn!(pool = self.name(), %error, "the pool does not store that it was scrubbed");
        }
    }

    fn note_progress(&self, order: Order, now: u64, granted_at: Nanos, bytes: u64, told: &[Scrub]) {
        let mut state = lock(&self.scrubbing.state);
        let visited = |scrub: &Scrub| match *scrub {
            Scrub::Running { visited, entries } => (visited.min(entries), entries),
            Scrub::Idle | Scrub::Done => (0, 0),
        };
        match (order, &mut state.phase) {
            (Order::Start, Phase::Starting) => {
                let parts = told.iter().map(visited).collect();
                state.phase = Phase::Running(Pass { began: now, bytes, granted_at, parts });
                tracing::info!(pool = self.name(), "the pool is being scrubbed");
            }
            (Order::Grant(_), Phase::Running(pass)) => {
                pass.granted_at = granted_at;
                for (part, scrub) in pass.parts.iter_mut().zip(told) {
                    *part = if *scrub == Scrub::Done { (part.1, part.1) } else { visited(scrub) };
                }
            }
            (Order::Stop, Phase::Stopping) => {
                state.phase = Phase::Stopped;
                state.not_before = Some(now + u64::from(state.settings.days) * DAY);
                tracing::info!(pool = self.name(), "the scrub of the pool was stopped");
            }
            // It was stopped meanwhile.
            _ => {}
        }
    }

    /// Ends the pass if no shard has more to do. Returns whether it is complete.
    fn end_pass(&self, now: u64, told: &[Scrub]) -> bool {
        let mut state = lock(&self.scrubbing.state);
        let Phase::Running(Pass { began, .. }) = state.phase else { return false };
        if told.iter().any(|scrub| matches!(scrub, Scrub::Running { .. })) {
            return false;
        }
        if told.contains(&Scrub::Idle) {
            (state.phase, state.not_before) = (Phase::Failed, Some(now + RETRY_DELAY));
            tracing::warn!(pool = self.name(), "the scrub of the pool has ended early: its disk has failed");
            return false;
        }
        (state.phase, state.complete_since) = (Phase::Complete, Some(began));
        tracing::info!(pool = self.name(), damage = state.damage.len(), "the scrub of the pool is complete");
        true
    }

    /// Keeps and logs what a shard has found.
    fn note_damage(&self, part: usize, found: Vec<Damage>) {
        for mut damage in found {
            damage.volume = damage.volume.and_then(|id| self.id_from(id, part));
            self.log_damage_of(&damage);
            let mut state = lock(&self.scrubbing.state);
            if state.damage.len() < DAMAGE_MAX {
                state.damage.push(damage);
            }
        }
    }

    fn log_damage_of(&self, damage: &Damage) {
        let (pool, bytes) = (self.name(), damage.blocks * u64::from(BLOCK));
        let member = damage.volume.and_then(|id: VolumeId| lock(&self.members).get(&id).cloned());
        match member {
            None => {
                limited!(self.scrubbing.lines, error, pool, "the scrub has found damage: {}", damage.what)
            }
            Some(member) => {
                let lba = damage.block * u64::from(BLOCK / member.volume.block_size);
                let volume = member.name();
                limited!(
                    self.scrubbing.lines,
                    error,
                    pool,
                    volume,
                    lba,
                    bytes,
                    "the scrub has found damage: {}",
                    damage.what
                );
            }
        }
    }
}

/// Bytes that each shard may read now.
fn grant(pass: &Pass, settings: ScrubSettings) -> u64 {
    let since = Clock::Monotonic.now().since(pass.granted_at).min(GRANT_MAX);
    let rate = settings.rate(pass.bytes) / pass.parts.len() as u64;
    (u128::from(rate) * since.as_nanos() / 1_000_000_000) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_due_after_its_period_and_not_at_once_after_an_opening() {
        let mut state = State { not_before: Some(1000), ..State::default() };
        assert_eq!((state.due_in(940), state.due_in(1000), state.due_in(2000)), (60, 0, 0));
        state.complete_since = Some(1000);
        assert_eq!(state.due_in(1000 + 10 * DAY), 4 * DAY);
        assert_eq!(state.due_in(1000 + 15 * DAY), 0);
        // The clock was set back.
        assert_eq!(state.due_in(500), 14 * DAY);
        state.settings.days = 0;
        assert_eq!(state.due_in(1000 + 100 * DAY), u64::MAX);
    }

    #[test]
    fn a_pass_takes_half_of_its_period_at_most() {
        let usual = ScrubSettings::default();
        assert_eq!(usual.rate(1 << 30), RATE_MIN);
        let large = 15 << 40;
        assert!(large / usual.rate(large) <= 7 * DAY + 1 && usual.rate(large) < 30 << 20);
        assert_eq!(ScrubSettings { days: 0, ..usual }.rate(large), usual.rate(large));
        assert_eq!(ScrubSettings { bytes_per_second: 1 << 20, ..usual }.rate(large), 1 << 20);
    }
}
