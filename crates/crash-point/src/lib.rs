//! Named places where a test can kill the process: the steps of a request between which a crash leaves different state behind.
//!
//! Any context. An empty function unless the feature `armed` is on, as in all builds for tests and in no release. Then the
//! environment variable `ARYK_CRASH_STEP`, such as `submitted:7`, names a step and a count: the process kills itself when it
//! reaches the step for the 7th time. With `submitted:7:panic` the thread at that step panics instead.
#![forbid(unsafe_code)]

/// A step of a request or of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// A descriptor chain was found in the ring; no record of it exists yet.
    Found,
    /// The in-flight region has the request; it is not submitted yet.
    Marked,
    /// The request has been submitted to the disk.
    Submitted,
    /// The disk has completed the request; the guest's status byte is not written.
    Completed,
    /// The status byte is written; the used element is not.
    Answered,
    /// The used element is written, and the in-flight region records it as part of this batch.
    Used,
    /// The guest sees the batch; the in-flight region still has its requests in flight.
    Published,
    /// The in-flight region has cleared a part of the batch.
    Clearing,
    /// The in-flight region has cleared the whole batch; its used index is not updated yet.
    Cleared,
    /// Recovery has settled a batch; no request is replayed yet.
    Recovered,
    /// A queue has been started; its guest is not signalled yet.
    Started,
    /// A queue has left its reactor and has not arrived at another.
    Moving,
    /// The journal of a key rotation has a zone; nothing of the zone is overwritten on the disk.
    RekeyRecorded,
    /// The zone is overwritten, and not flushed.
    RekeyWritten,
    /// The journal of a key rotation has the position behind the zone; requests for the zone still wait.
    RekeyAdvanced,
}

impl Step {
    /// The steps of queues, in order.
    pub const OF_QUEUES: [Self; 12] = [
        Self::Found,
        Self::Marked,
        Self::Submitted,
        Self::Completed,
        Self::Answered,
        Self::Used,
        Self::Published,
        Self::Clearing,
        Self::Cleared,
        Self::Recovered,
        Self::Started,
        Self::Moving,
    ];
    /// The steps of a key rotation, in order.
    pub const OF_REKEY: [Self; 3] = [Self::RekeyRecorded, Self::RekeyWritten, Self::RekeyAdvanced];

    /// The step's name in `ARYK_CRASH_STEP`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Marked => "marked",
            Self::Submitted => "submitted",
            Self::Completed => "completed",
            Self::Answered => "answered",
            Self::Used => "used",
            Self::Published => "published",
            Self::Clearing => "clearing",
            Self::Cleared => "cleared",
            Self::Recovered => "recovered",
            Self::Started => "started",
            Self::Moving => "moving",
            Self::RekeyRecorded => "rekey-recorded",
            Self::RekeyWritten => "rekey-written",
            Self::RekeyAdvanced => "rekey-advanced",
        }
    }
}

/// Marks `step`. Does nothing in this build.
#[cfg(not(feature = "armed"))]
#[inline(always)]
pub const fn step(_step: Step) {}

#[cfg(feature = "armed")]
pub use armed::step;

#[cfg(feature = "armed")]
mod armed {
    use super::Step;
    use rustix::process::{Signal, getpid, kill_process};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicI64, Ordering};

    /// The step at which to die, and how many passes are left before that.
    struct Plan {
        step: Step,
        left: AtomicI64,
        panics: bool,
    }

    static PLAN: OnceLock<Option<Plan>> = OnceLock::new();

    fn plan() -> Option<Plan> {
        let text = std::env::var("ARYK_CRASH_STEP").ok()?;
        let parsed = text.split_once(':').and_then(|(name, times)| {
            let step = Step::OF_QUEUES.into_iter().chain(Step::OF_REKEY).find(|step| step.name() == name)?;
            let (times, panics) = times.strip_suffix(":panic").map_or((times, false), |times| (times, true));
            Some(Plan { step, left: AtomicI64::new(times.parse().ok()?), panics })
        });
        Some(parsed.unwrap_or_else(|| panic!("ARYK_CRASH_STEP={text} is not STEP:COUNT or STEP:COUNT:panic")))
    }

    /// Marks `step`: kills the process or panics if the plan says so.
    pub fn step(step: Step) {
        let Some(plan) = PLAN.get_or_init(plan) else { return };
        if plan.step == step && plan.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            assert!(!plan.panics, "on purpose, at the step {}", step.name());
            // SIGKILL, as from outside: no destructor or handler runs after it.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }
}
