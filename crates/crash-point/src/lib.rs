//! Places where a test may kill the process: each step of a request between whose neighbours a crash leaves something else behind.
//!
//! Any context. Nothing but an empty function unless the feature `armed` is on, which `cargo xtask crash` builds `arykd` with; then the
//! environment variable `ARYK_CRASH_STEP`, as `submitted:7`, names a step, and the time at which the process kills itself there; as `submitted:7:panic`, at which the
//! thread that is there panics.
#![forbid(unsafe_code)]

/// A step of a request, or of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// A chain was found in the ring, and nothing is noted of it.
    Found,
    /// It is noted as in flight, and not yet submitted.
    Marked,
    /// Its request has been submitted to the disk.
    Submitted,
    /// The disk has completed it; the guest's status byte is not written.
    Completed,
    /// The status byte is written, and no used element.
    Answered,
    /// The used element is written, and the in-flight region knows that it belongs to this batch.
    Used,
    /// The guest sees the batch; the in-flight region still has it in flight.
    Published,
    /// The in-flight region has some of the batch cleared.
    Clearing,
    /// All of it is cleared, and the used index not yet noted there.
    Cleared,
    /// Recovery has settled a batch, and nothing is replayed.
    Recovered,
    /// A queue has been started, and its guest not signalled.
    Started,
    /// A queue has left its reactor, and not come to another.
    Moving,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 12] = [
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

    /// Its name in `ARYK_CRASH_STEP`.
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
        }
    }
}

/// The process is at `step`.
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

    /// Where to die, and how often to pass there before.
    struct Plan {
        step: Step,
        left: AtomicI64,
        panics: bool,
    }

    static PLAN: OnceLock<Option<Plan>> = OnceLock::new();

    fn plan() -> Option<Plan> {
        let text = std::env::var("ARYK_CRASH_STEP").ok()?;
        let parsed = text.split_once(':').and_then(|(name, times)| {
            let step = Step::ALL.into_iter().find(|step| step.name() == name)?;
            let (times, panics) = times.strip_suffix(":panic").map_or((times, false), |times| (times, true));
            Some(Plan { step, left: AtomicI64::new(times.parse().ok()?), panics })
        });
        Some(
            parsed
                .unwrap_or_else(|| panic!("ARYK_CRASH_STEP={text} is no step, number, and perhaps `panic`")),
        )
    }

    /// The process is at `step`.
    pub fn step(step: Step) {
        let Some(plan) = PLAN.get_or_init(plan) else { return };
        if plan.step == step && plan.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            assert!(!plan.panics, "on purpose, at the step {}", step.name());
            // As an outsider would: nothing runs after it, neither destructors nor handlers.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }
}
