//! `framework_*_scheduler` and `framework_monitor_context_switch`: assignment of queues to cores, and preemption of reactors.
//! Control context.

use super::framework::ask;
use super::{Control, Count, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use crate::params::CpuMask;
use crate::scheduler::Kind;
use crate::scheduler::balance::Limits;
use aryk_reactor::{CoreSet, Cx, MoveError, Order, Reactors};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::task::AbortHandle;

/// The note's object for the call that chose the scheduler.
const OBJECT: &str = "scheduler";
const SET: &str = "framework_set_scheduler";
/// Interval at which reactors' context switches are read.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "framework_get_scheduler",
        Phase::RunTime,
        "Reports the scheduler, which assigns queues to reactors.",
        get_scheduler,
    );
    table.add(
        SET,
        Phase::Any,
        "Sets the scheduler: with `static`, queues stay on their reactors; with `dynamic`, they move to reactors with free time, and idle queues gather on few reactors.",
        set_scheduler,
    );
    table.add(
        "thread_set_cpumask",
        Phase::RunTime,
        "Sets the cores on which a thread may run, and moves the thread there without interrupting its VM's I/O.",
        set_cpumask,
    );
    let watch = Rc::new(RefCell::new(None));
    table.add(
        "framework_monitor_context_switch",
        Phase::RunTime,
        "Starts or stops logging of reactors that the kernel has preempted, and reports whether logging is on.",
        async move |control: &Control, p| monitor_context_switch(control, &watch, p).await,
    );
}

/// Result of `framework_get_scheduler`.
#[derive(Debug, Serialize, JsonSchema)]
struct Scheduler {
    /// `static` or `dynamic`.
    scheduler_name: &'static str,
    /// Microseconds between two decisions; 0 with `static`.
    scheduler_period: u64,
    /// The core on which nearly idle queues gather first.
    scheduling_core: u16,
    /// Cores that the scheduler does not use.
    isolated_core_mask: &'static str,
    /// Of `dynamic`: a queue whose load is below this percentage of a core is nearly idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    load_limit: Option<u8>,
    /// Of `dynamic`: queues are not moved to a core whose load would exceed this percentage.
    #[serde(skip_serializing_if = "Option::is_none")]
    core_limit: Option<u8>,
    /// Of `dynamic`: queues are moved away from a core whose load reaches this percentage.
    #[serde(skip_serializing_if = "Option::is_none")]
    core_busy: Option<u8>,
    /// Aryk only: queues that the scheduler has moved since the start of the daemon.
    moves: u64,
    /// Aryk only: moves that failed, since requests took too long.
    failed_moves: u64,
}

const fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Static => "static",
        Kind::Dynamic => "dynamic",
    }
}

async fn get_scheduler(control: &Control, _: NoParams) -> Result<Scheduler, Error> {
    let scheduler = &control.scheduler;
    let (limits, done) = (scheduler.limits(), scheduler.done());
    let of_dynamic = |percent: u8| (scheduler.kind() == Kind::Dynamic).then_some(percent);
    Ok(Scheduler {
        scheduler_name: name(scheduler.kind()),
        scheduler_period: match scheduler.kind() {
            Kind::Static => 0,
            Kind::Dynamic => scheduler.period().as_micros() as u64,
        },
        scheduling_core: control.reactors.handles()[0].core(),
        isolated_core_mask: "0x0",
        load_limit: of_dynamic(limits.load_limit),
        core_limit: of_dynamic(limits.core_limit),
        core_busy: of_dynamic(limits.core_busy),
        moves: done.moves,
        failed_moves: done.failures,
    })
}

/// Parameters of `framework_set_scheduler`. Omitted ones are unchanged.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetScheduler {
    /// `static` or `dynamic`.
    name: String,
    /// Microseconds between two decisions. Default: 1000000; at least 10000; 0 leaves the period unchanged.
    period: Option<Count>,
    /// A queue whose load is below this percentage of a core is nearly idle. Default: 20. Of `dynamic`.
    load_limit: Option<u8>,
    /// Queues are not moved to a core whose load would exceed this percentage. Default: 80. Of `dynamic`.
    core_limit: Option<u8>,
    /// Queues are moved away from a core whose load reaches this percentage. Default: 95. Of `dynamic`.
    core_busy: Option<u8>,
    /// Ignored.
    #[serde(rename = "mappings")]
    _mappings: Option<String>,
}

/// The call that sets the scheduler again.
#[derive(Serialize)]
struct SchedulerNote {
    name: &'static str,
    period: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    load_limit: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    core_limit: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    core_busy: Option<u8>,
}

async fn set_scheduler(control: &Control, p: SetScheduler) -> Result<bool, Error> {
    let kind = [Kind::Static, Kind::Dynamic].into_iter().find(|kind| name(*kind) == p.name);
    let unknown = || Error::invalid(format!("there is no scheduler '{}', only static and dynamic", p.name));
    let kind = kind.ok_or_else(unknown)?;
    let percents = [("load_limit", p.load_limit), ("core_limit", p.core_limit), ("core_busy", p.core_busy)];
    if let Some((name, value)) = percents.into_iter().find(|(_, value)| value.is_some_and(|v| v > 100)) {
        let value = value.unwrap_or_default();
        return Err(Error::invalid(format!("{name} must be a percentage of a core, 0 to 100, not {value}")));
    }
    let scheduler = &control.scheduler;
    let now = scheduler.limits();
    let limits = Limits {
        load_limit: p.load_limit.unwrap_or(now.load_limit),
        core_limit: p.core_limit.unwrap_or(now.core_limit),
        core_busy: p.core_busy.unwrap_or(now.core_busy),
    };
    let period = p.period.filter(|period| period.0 > 0);
    let period = period.map_or(scheduler.period(), |Count(us)| Duration::from_micros(us));
    scheduler.set(kind, period, limits);
    let of_dynamic = |percent: u8| (kind == Kind::Dynamic).then_some(percent);
    let note = SchedulerNote {
        name: name(kind),
        period: scheduler.period().as_micros().try_into().unwrap_or(u64::MAX),
        load_limit: of_dynamic(limits.load_limit),
        core_limit: of_dynamic(limits.core_limit),
        core_busy: of_dynamic(limits.core_busy),
    };
    control.config.made(Subsystem::Scheduler, OBJECT, SET, &note);
    Ok(true)
}

/// Parameters of `thread_set_cpumask`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetCpumask {
    /// ID of the thread, as in `thread_get_stats`.
    id: u64,
    /// Cores on which the thread may run.
    cpumask: CpuMask,
}

async fn set_cpumask(control: &Control, p: SetCpumask) -> Result<bool, Error> {
    let SetCpumask { id, cpumask: CpuMask(cores) } = p;
    match control.scheduler.order(id, Order::Stay(cores.clone())).await {
        Some(placed) => placed?,
        None => confine(control, id, cores).await?,
    }
    Ok(true)
}

/// Sets the cores of a thread that is not a queue, and therefore cannot move.
async fn confine(control: &Control, id: u64, cores: CoreSet) -> Result<(), Error> {
    for handle in control.reactors.handles() {
        let (cores, may_stay) = (cores.clone(), cores.contains(handle.core()));
        let confine = move |cx: &mut Cx| {
            let thread = cx.find_thread(id)?;
            if may_stay {
                cx.set_thread_cores(thread, cores);
            }
            Some(may_stay)
        };
        match ask(&handle, confine).await? {
            Some(true) => return Ok(()),
            Some(false) => {
                let core = handle.core();
                return Err(Error::invalid(format!(
                    "thread {id} is not a queue and cannot leave core {core}"
                )));
            }
            None => {}
        }
    }
    Err(Error::InvalidParams(format!("there is no thread {id} with a core mask")))
}

impl From<MoveError> for Error {
    fn from(error: MoveError) -> Self {
        let errno = match error {
            MoveError::Cores(_) => Errno::INVAL,
            MoveError::TooSlow | MoveError::NotReady => Errno::TIMEDOUT,
            MoveError::Open(_) => Errno::IO,
            MoveError::Moving => Errno::BUSY,
            MoveError::Ending => Errno::NODEV,
        };
        Self::errno(errno, error.to_string())
    }
}

/// Parameters of `framework_monitor_context_switch`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct MonitorContextSwitch {
    /// Default: unchanged.
    enabled: Option<bool>,
}

/// Result of `framework_monitor_context_switch`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ContextSwitchMonitor")]
struct Monitored {
    /// Whether logging is on.
    enabled: bool,
}

/// While enabled, logs when the kernel preempts a reactor.
async fn monitor_context_switch(
    control: &Control,
    watch: &RefCell<Option<AbortHandle>>,
    p: MonitorContextSwitch,
) -> Result<Monitored, Error> {
    match p.enabled {
        Some(true) if watch.borrow().is_none() => {
            let task = tokio::task::spawn_local(watch_switches(Rc::clone(&control.reactors)));
            if let Some(other) = watch.replace(Some(task.abort_handle())) {
                other.abort();
            }
        }
        Some(false) => {
            if let Some(task) = watch.take() {
                task.abort();
            }
        }
        Some(true) | None => {}
    }
    Ok(Monitored { enabled: watch.borrow().is_some() })
}

/// By reactor thread: its core, and how often the kernel has preempted it.
type Switches = BTreeMap<i32, (u16, u64)>;

async fn all_switches(reactors: &Reactors) -> Switches {
    let mut all = Switches::new();
    for handle in reactors.handles() {
        // A reactor that has just ended runs on no core.
        let Ok(tid) = ask(&handle, |_| rustix::thread::gettid().as_raw_nonzero().get()).await else {
            continue;
        };
        all.insert(tid, (handle.core(), switches(tid).unwrap_or_default()));
    }
    all
}

async fn watch_switches(reactors: Rc<Reactors>) {
    let mut before = all_switches(&reactors).await;
    loop {
        tokio::time::sleep(WATCH_PERIOD).await;
        let now = all_switches(&reactors).await;
        for (tid, (core, now)) in &now {
            if let Some((_, before)) = before.get(tid)
                && now > before
            {
                tracing::info!(core, times = now - before, "the kernel has preempted the core's reactor");
            }
        }
        before = now;
    }
}

/// How often the kernel has preempted one of the daemon's threads.
fn switches(tid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts_switches() {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        assert!(switches(tid).is_some());
        assert_eq!(switches(1 << 30), None);
    }
}
