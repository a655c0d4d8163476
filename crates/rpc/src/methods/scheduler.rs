//! `framework_*_scheduler` and `framework_monitor_context_switch`: who runs where, and undisturbed or not. Control context.

use super::framework::ask;
use super::{Control, Count, Error, NoParams, Phase, Table};
use crate::params::CpuMask;
use aryk_reactor::{CoreSet, Cx, Reactors};
use aryk_vhost_blk::MoveError;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;
use tokio::task::AbortHandle;

/// SPDK's name for what there is: threads stay where they were made.
const SCHEDULER: &str = "static";
/// How often reactors' context switches are looked at.
const WATCH_PERIOD: Duration = Duration::from_secs(1);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "framework_get_scheduler",
        Phase::RunTime,
        "The scheduler: there is one, `static`.",
        get_scheduler,
    );
    table.add(
        "framework_set_scheduler",
        Phase::Any,
        "Chooses the scheduler: there is one, `static`.",
        set_scheduler,
    );
    table.add(
        "thread_set_cpumask",
        Phase::RunTime,
        "Says on which cores a thread may run, and moves it there while its machine's I/O goes on.",
        set_cpumask,
    );
    let watch = Rc::new(RefCell::new(None));
    table.add(
        "framework_monitor_context_switch",
        Phase::RunTime,
        "Has the log tell when the kernel takes a core away from its reactor, and tells whether it does.",
        async move |control: &Control, p| monitor_context_switch(control, &watch, p).await,
    );
}

/// Result of `framework_get_scheduler`.
#[derive(Debug, Serialize, JsonSchema)]
struct Scheduler {
    /// `static`.
    scheduler_name: &'static str,
    /// Ticks between two decisions, of which there are none.
    scheduler_period: u64,
    /// Where it would run.
    scheduling_core: u16,
    /// Cores without it.
    isolated_core_mask: &'static str,
}

async fn get_scheduler(control: &Control, _: NoParams) -> Result<Scheduler, Error> {
    Ok(Scheduler {
        scheduler_name: SCHEDULER,
        scheduler_period: 0,
        scheduling_core: control.reactors.handles()[0].core(),
        isolated_core_mask: "0x0",
    })
}

/// Parameters of `framework_set_scheduler`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetScheduler {
    /// `static`.
    name: String,
    /// Microseconds.
    #[serde(rename = "period")]
    _period: Option<Count>,
    /// Not heeded.
    #[serde(rename = "load_limit")]
    _load_limit: Option<u8>,
    /// Not heeded.
    #[serde(rename = "core_limit")]
    _core_limit: Option<u8>,
    /// Not heeded.
    #[serde(rename = "core_busy")]
    _core_busy: Option<u8>,
    /// Not heeded.
    #[serde(rename = "mappings")]
    _mappings: Option<String>,
}

async fn set_scheduler(_: &Control, p: SetScheduler) -> Result<bool, Error> {
    match p.name == SCHEDULER {
        true => Ok(true),
        false => Err(Error::invalid(format!("there is no scheduler '{}', only {SCHEDULER}", p.name))),
    }
}

/// Parameters of `thread_set_cpumask`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetCpumask {
    /// The thread, as `thread_get_stats` gives it.
    id: u64,
    /// Where it may run.
    cpumask: CpuMask,
}

async fn set_cpumask(control: &Control, p: SetCpumask) -> Result<bool, Error> {
    let SetCpumask { id, cpumask: CpuMask(cores) } = p;
    let placed = match control.controllers.place(id, cores.clone()).await {
        None => control.scsi_controllers.place(id, cores.clone()).await,
        placed => placed,
    };
    match placed {
        Some(placed) => placed?,
        None => confine(control, id, cores).await?,
    }
    Ok(true)
}

/// Says where a thread may run that is no queue, and stays where it is.
async fn confine(control: &Control, id: u64, cores: CoreSet) -> Result<(), Error> {
    for handle in control.reactors.handles().iter().filter(|handle| cores.contains(handle.core())) {
        let cores = cores.clone();
        let confine = move |cx: &mut Cx| {
            let thread = cx.find_thread(id);
            thread.map(|thread| cx.set_thread_cores(thread, cores)).is_some()
        };
        if ask(handle, confine).await? {
            return Ok(());
        }
    }
    Err(Error::invalid(format!("there is no thread {id} that can run there")))
}

impl From<MoveError> for Error {
    fn from(error: MoveError) -> Self {
        let errno = match error {
            MoveError::Cores(_) => Errno::INVAL,
            MoveError::TooSlow => Errno::TIMEDOUT,
            MoveError::Open(_) => Errno::IO,
            MoveError::Ending => Errno::NODEV,
        };
        Self::errno(errno, error.to_string())
    }
}

/// Parameters of `framework_monitor_context_switch`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct MonitorContextSwitch {
    /// By default it stays as it is.
    enabled: Option<bool>,
}

/// Result of `framework_monitor_context_switch`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "ContextSwitchMonitor")]
struct Monitored {
    /// Whether it is on now.
    enabled: bool,
}

/// While it is enabled, the log tells when the kernel takes a core away from its reactor.
async fn monitor_context_switch(
    control: &Control,
    watch: &RefCell<Option<AbortHandle>>,
    p: MonitorContextSwitch,
) -> Result<Monitored, Error> {
    match p.enabled {
        Some(true) if watch.borrow().is_none() => {
            let threads = reactor_threads(&control.reactors).await?;
            let task = tokio::task::spawn_local(watch_switches(threads));
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

/// A reactor's core and its thread's number.
type CoreThread = (u16, i32);

async fn reactor_threads(reactors: &Reactors) -> Result<Vec<CoreThread>, Error> {
    let mut threads = Vec::new();
    for handle in reactors.handles() {
        let tid = ask(handle, |_| rustix::thread::gettid()).await?;
        threads.push((handle.core(), tid.as_raw_nonzero().get()));
    }
    Ok(threads)
}

async fn watch_switches(threads: Vec<CoreThread>) {
    let count = |&(_, tid): &CoreThread| switches(tid).unwrap_or_default();
    let mut before: Vec<_> = threads.iter().map(count).collect();
    loop {
        tokio::time::sleep(WATCH_PERIOD).await;
        let now: Vec<_> = threads.iter().map(count).collect();
        for ((core, _), (before, now)) in threads.iter().zip(before.iter().zip(&now)) {
            if now > before {
                tracing::info!(core, times = now - before, "the kernel took the core from its reactor");
            }
        }
        before = now;
    }
}

/// How often the kernel took the processor from a thread of ours that wanted to run on.
fn switches(tid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_of_switches() {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        assert!(switches(tid).is_some());
        assert_eq!(switches(1 << 30), None);
    }
}
