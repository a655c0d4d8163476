//! `framework_*`, `thread_*`, `spdk_*` and `save_config`: the daemon as a whole. Control context.

use super::{Control, Error, NoParams, Phase, Table, host};
use crate::config::{Call, Subsystem};
use aryk_reactor::{CoreSet, Gone, Handle, ThreadStats};
use rustix::process::Signal;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Ticks are nanoseconds.
pub const TICK_RATE: u64 = 1_000_000_000;

pub(super) fn register(table: &mut Table<Control>) {
    table.add("spdk_get_version", Phase::Any, "Reports the version of the daemon.", get_version);
    table.add(
        "spdk_kill_instance",
        Phase::Any,
        "Sends a signal to the daemon: SIGTERM ends the daemon in an orderly way.",
        kill_instance,
    );
    table.add(
        "framework_start_init",
        Phase::StartUp,
        "Completes start-up, if the daemon waits for this call (`--wait-for-rpc`).",
        start_init,
    );
    table.add("framework_wait_init", Phase::Any, "Waits until start-up is complete.", wait_init);
    table.add(
        "framework_get_reactors",
        Phase::RunTime,
        "Lists the reactors: the core and the load of each.",
        get_reactors,
    );
    table.add(
        "thread_get_stats",
        Phase::RunTime,
        "Reports the load of the threads on all reactors.",
        get_thread_stats,
    );
    table.add(
        "framework_get_subsystems",
        Phase::RunTime,
        "Lists the subsystems that have a configuration, each after those that it depends on.",
        get_subsystems,
    );
    table.add(
        "framework_get_config",
        Phase::RunTime,
        "Reports the calls that create the current configuration of one subsystem.",
        get_config,
    );
    table.add(
        "save_config",
        Phase::RunTime,
        "Reports the calls that create the current configuration of the daemon, for `load_config` or a file.",
        save_config,
    );
}

/// Result of `spdk_get_version`.
#[derive(Debug, Serialize, JsonSchema)]
struct Version {
    /// The version as text.
    version: String,
    /// Parts of the version.
    fields: VersionFields,
}

/// The parts of a version.
#[derive(Debug, Serialize, JsonSchema)]
struct VersionFields {
    major: u32,
    minor: u32,
    patch: u32,
    suffix: &'static str,
}

async fn get_version(_: &Control, _: NoParams) -> Result<Version, Error> {
    let number = |text: &str| text.parse().expect("cargo's versions are numbers");
    Ok(Version {
        version: concat!("Aryk v", env!("CARGO_PKG_VERSION")).into(),
        fields: VersionFields {
            major: number(env!("CARGO_PKG_VERSION_MAJOR")),
            minor: number(env!("CARGO_PKG_VERSION_MINOR")),
            patch: number(env!("CARGO_PKG_VERSION_PATCH")),
            suffix: env!("CARGO_PKG_VERSION_PRE"),
        },
    })
}

/// Parameters of `spdk_kill_instance`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct KillInstance {
    /// The signal to send.
    sig_name: KillSignal,
}

/// A signal.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "Signal")]
enum KillSignal {
    #[serde(rename = "SIGINT")]
    Int,
    #[serde(rename = "SIGTERM")]
    Term,
    #[serde(rename = "SIGQUIT")]
    Quit,
    #[serde(rename = "SIGHUP")]
    Hup,
    #[serde(rename = "SIGKILL")]
    Kill,
    #[serde(rename = "SIGUSR1")]
    Usr1,
}

async fn kill_instance(_: &Control, p: KillInstance) -> Result<bool, Error> {
    let signal = match p.sig_name {
        KillSignal::Int => Signal::INT,
        KillSignal::Term => Signal::TERM,
        KillSignal::Quit => Signal::QUIT,
        KillSignal::Hup => Signal::HUP,
        KillSignal::Kill => Signal::KILL,
        KillSignal::Usr1 => Signal::USR1,
    };
    let sent = rustix::process::kill_process(rustix::process::getpid(), signal);
    sent.map(|()| true).map_err(|errno| Error::errno(errno, "cannot signal the daemon's process"))
}

async fn start_init(control: &Control, _: NoParams) -> Result<bool, Error> {
    control.start();
    control.until_started().await;
    Ok(true)
}

async fn wait_init(control: &Control, _: NoParams) -> Result<bool, Error> {
    control.until_started().await;
    Ok(true)
}

/// Result of `framework_get_reactors`. Times in ticks.
#[derive(Debug, Serialize, JsonSchema)]
struct Reactors {
    /// Ticks in a second.
    tick_rate: u64,
    /// Process ID of the daemon.
    pid: u32,
    /// One entry for each core.
    reactors: Vec<Reactor>,
}

/// A reactor: a thread that polls on one core.
#[derive(Debug, Serialize, JsonSchema)]
struct Reactor {
    /// Core of the reactor.
    lcore: u16,
    /// Thread ID in the kernel.
    tid: i32,
    /// Time with work.
    busy: u64,
    /// Time without work, awake or asleep.
    idle: u64,
    /// Whether it has slept.
    in_interrupt: bool,
    /// Time of the core in interrupts, as the kernel counts it for all processes, in the kernel's ticks.
    irq: u64,
    /// Time of the core in the kernel, counted in the same way.
    sys: u64,
    /// Time of the core in user processes, counted in the same way.
    usr: u64,
    /// NUMA node of the core.
    numa_id: i32,
    /// Threads of the reactor.
    lw_threads: Vec<LwThread>,
}

/// A thread of a reactor: the work of one queue or service.
#[derive(Debug, Serialize, JsonSchema)]
struct LwThread {
    name: String,
    id: u64,
    cpumask: String,
    /// Busy time.
    elapsed: u64,
}

async fn get_reactors(control: &Control, _: NoParams) -> Result<Reactors, Error> {
    let mut reactors = Vec::new();
    let mut app = Some(AppThread::of(control));
    let times = host::core_times();
    for handle in control.reactors.handles() {
        let core_times = times.get(&handle.core()).copied().unwrap_or_default();
        let stats = handle.stats();
        let asked = ask(&handle, |cx| (rustix::thread::gettid(), cx.thread_stats())).await;
        // A reactor that has just ended has no statistics.
        let Ok((tid, threads)) = asked else { continue };
        let app = app.take().map(LwThread::from);
        reactors.push(Reactor {
            lcore: handle.core(),
            tid: tid.as_raw_nonzero().get(),
            busy: ticks(stats.busy),
            idle: ticks(stats.idle + stats.sleeping),
            in_interrupt: !stats.sleeping.is_zero(),
            irq: core_times.irq,
            sys: core_times.sys,
            usr: core_times.usr,
            numa_id: host::numa_node_of(handle.core()),
            lw_threads: app.into_iter().chain(threads.into_iter().map(LwThread::from)).collect(),
        });
    }
    Ok(Reactors { tick_rate: TICK_RATE, pid: std::process::id(), reactors })
}

impl From<ThreadStats> for LwThread {
    fn from(stats: ThreadStats) -> Self {
        Self { name: stats.name, id: stats.id, cpumask: stats.cores.to_string(), elapsed: ticks(stats.busy) }
    }
}

/// The thread that answers calls. Clients look for a thread with this name, which SPDK's applications always have. It is listed
/// with the first reactor, although it runs beside the reactors.
pub(super) struct AppThread {
    /// Cores on which the thread may run.
    cores: CoreSet,
    /// Processor time that the thread has used.
    busy: Duration,
    /// The rest of the thread's lifetime.
    idle: Duration,
}

impl AppThread {
    pub(super) const NAME: &str = "app_thread";
    /// No thread of a reactor has this ID.
    pub(super) const ID: u64 = 0;

    fn of(control: &Control) -> Self {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let busy = Duration::try_from(used).unwrap_or_default();
        Self { cores: CoreSet::allowed(), busy, idle: control.age().saturating_sub(busy) }
    }
}

impl From<AppThread> for LwThread {
    fn from(app: AppThread) -> Self {
        let cpumask = app.cores.to_string();
        Self { name: AppThread::NAME.into(), id: AppThread::ID, cpumask, elapsed: ticks(app.busy) }
    }
}

impl From<AppThread> for Thread {
    fn from(app: AppThread) -> Self {
        Self {
            name: AppThread::NAME.into(),
            id: AppThread::ID,
            cpumask: app.cores.to_string(),
            busy: ticks(app.busy),
            idle: ticks(app.idle),
            active_pollers_count: 0,
            timed_pollers_count: 0,
            paused_pollers_count: 0,
        }
    }
}

/// Result of `thread_get_stats`. Times in ticks.
#[derive(Debug, Serialize, JsonSchema)]
struct Threads {
    /// Ticks in a second.
    tick_rate: u64,
    /// `app_thread`, which answers calls, and the threads of all reactors.
    threads: Vec<Thread>,
}

/// A thread with its counters.
#[derive(Debug, Serialize, JsonSchema)]
struct Thread {
    name: String,
    id: u64,
    cpumask: String,
    /// Time with work.
    busy: u64,
    /// Idle time of the thread's reactor: idle time does not belong to a single thread.
    idle: u64,
    /// Number of pollers of the thread.
    active_pollers_count: u32,
    timed_pollers_count: u32,
    paused_pollers_count: u32,
}

async fn get_thread_stats(control: &Control, _: NoParams) -> Result<Threads, Error> {
    let mut threads = vec![Thread::from(AppThread::of(control))];
    for handle in control.reactors.handles() {
        let reactor = handle.stats();
        // A reactor that has just ended has no threads.
        for stats in ask(&handle, |cx| cx.thread_stats()).await.unwrap_or_default() {
            threads.push(Thread {
                name: stats.name,
                id: stats.id,
                cpumask: stats.cores.to_string(),
                busy: ticks(stats.busy),
                idle: ticks(reactor.idle + reactor.sleeping),
                active_pollers_count: stats.members,
                timed_pollers_count: 0,
                paused_pollers_count: 0,
            });
        }
    }
    Ok(Threads { tick_rate: TICK_RATE, threads })
}

/// Runs `f` on a reactor and returns its answer.
pub(super) async fn ask<R: Send + 'static>(
    handle: &Handle,
    question: impl FnOnce(&mut aryk_reactor::Cx) -> R + Send + 'static,
) -> Result<R, Error> {
    let gone = |Gone| Error::State(format!("the reactor on core {} has stopped", handle.core()));
    handle.call(question).await.map_err(gone)
}

pub(super) fn ticks(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// One of the results of `framework_get_subsystems`.
#[derive(Debug, Serialize, JsonSchema)]
struct SubsystemInfo {
    /// Name of the subsystem.
    subsystem: &'static str,
    /// Subsystems that come before this one.
    depends_on: &'static [&'static str],
}

async fn get_subsystems(_: &Control, _: NoParams) -> Result<Vec<SubsystemInfo>, Error> {
    let info = |s: Subsystem| SubsystemInfo { subsystem: s.name(), depends_on: s.depends_on() };
    Ok(Subsystem::ALL.map(info).into())
}

/// Parameters of `framework_get_config`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetConfig {
    /// The subsystem: `bdev` or `vhost_blk`.
    name: String,
    /// Ignored.
    #[serde(default, rename = "with_batches")]
    _with_batches: bool,
}

async fn get_config(control: &Control, p: GetConfig) -> Result<Vec<Call>, Error> {
    let subsystem = Subsystem::ALL.into_iter().find(|s| s.name() == p.name);
    let unknown = || Error::InvalidParams(format!("there is no subsystem '{}'", p.name));
    Ok(control.config.calls(subsystem.ok_or_else(unknown)?))
}

/// Result of `save_config`.
#[derive(Debug, Serialize, JsonSchema)]
struct SavedConfig {
    /// In the order in which the subsystems are created again.
    subsystems: Vec<SavedSubsystem>,
}

/// The calls that configure a subsystem.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SavedSubsystem {
    /// Name of the subsystem.
    subsystem: &'static str,
    /// The calls, in order.
    config: Vec<Call>,
}

async fn save_config(control: &Control, _: NoParams) -> Result<SavedConfig, Error> {
    let save = |s: Subsystem| SavedSubsystem { subsystem: s.name(), config: control.config.calls(s) };
    let mut subsystems: Vec<SavedSubsystem> = Subsystem::ALL.map(save).into();
    // Older versions do not know this subsystem.
    subsystems.retain(|saved| saved.subsystem != Subsystem::Keyring.name() || !saved.config.is_empty());
    Ok(SavedConfig { subsystems })
}
