//! `aryk_stats_get`, `aryk_latency_get`: the data of `aryk top` and `aryk latency`. Methods of Aryk only; control context.

use super::framework::TICK_RATE;
use super::nvme::Errors as NvmeErrors;
use super::qos::Limits;
use super::{Control, Error, Name, NoParams, Phase, Table};
use aryk_bdev::{Blocks, DeviceError, Failure, Histogram, Lba, Op, OpSummary, Stats, Summary, TimeLayer};
use aryk_metrics::Snapshot;
use aryk_reactor::TaskStats;
use schemars::JsonSchema;
use serde::Serialize;
use std::time::{Duration, UNIX_EPOCH};

/// Maximum age of reported statistics: calls within this time share one result.
const AGE: Duration = Duration::from_millis(50);

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "aryk_stats_get",
        Phase::Any,
        "Reports the counters of all disks, groups, controllers, reactors, background tasks, NVMe drives, pools, volumes and hosts on the network, in brief.",
        get_stats,
    );
    table.add(
        "aryk_latency_get",
        Phase::RunTime,
        "Reports the latencies of a disk's requests, layer by layer.",
        get_latencies,
    );
}

/// Result of `aryk_stats_get`. Times in ticks, summed over all requests.
#[derive(Debug, Serialize, JsonSchema)]
struct Counts {
    /// Ticks in a second.
    tick_rate: u64,
    /// Current time.
    ticks: u64,
    /// In the order of creation.
    disks: Vec<DiskCounts>,
    /// Each group after its parent.
    groups: Vec<GroupCounts>,
    /// In the order of names.
    controllers: Vec<ControllerState>,
    /// In the order of cores.
    reactors: Vec<ReactorCounts>,
    /// In the order of their starts.
    tasks: Vec<TaskCounts>,
    /// The NVMe drives that the daemon drives itself, in the order of their controllers' names.
    drives: Vec<DriveCounts>,
    /// The pools of volumes, in the order in which they were opened.
    pools: Vec<PoolActivity>,
    /// The space of volumes and snapshots, by pool, as it was counted last: `aryk_volume_get_space` counts at once.
    volumes: Vec<VolumeUse>,
    /// The controllers of hosts on the network, by subsystem.
    hosts: Vec<HostActivity>,
}

/// Counters of a disk.
#[derive(Debug, Serialize, JsonSchema)]
struct DiskCounts {
    name: String,
    /// The module's name for the kind of disk.
    kind: &'static str,
    /// Size in bytes.
    size: u64,
    /// QoS group of the disk.
    group: Option<String>,
    #[serde(flatten)]
    work: Work,
    /// The last request that the disk's store has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<LastError>,
    /// Maximum number of requests in flight in the last seconds.
    in_flight_max: u64,
}

/// A request that a disk's store has failed.
#[derive(Debug, Serialize, JsonSchema)]
struct LastError {
    op: &'static str,
    /// First block of the request.
    lba: u64,
    blocks: u64,
    errno: i32,
    /// Text of the errno.
    error: String,
    /// What the device itself reports; absent if it reports no more than the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceStatus>,
    /// Time in seconds since 1970.
    time: u64,
}

/// An error as a device reports it.
#[derive(Debug, Serialize, JsonSchema)]
struct DeviceStatus {
    /// For NVMe: the Status Code Type in bits 8 to 10, the Status Code in bits 0 to 7.
    code: u16,
    /// Whether the device says that the same request fails again (for NVMe, Do Not Retry).
    is_final: bool,
    /// For NVMe: the number (1 to 3) of the controller's delay before another attempt (Command Retry Delay), or 0.
    crd: u8,
    /// The specification's name of the error.
    name: &'static str,
    /// The block that failed; absent if the device does not name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    lba: Option<u64>,
}

impl From<&Failure> for LastError {
    fn from(failure: &Failure) -> Self {
        let Failure { op, lba: Lba(lba), blocks: Blocks(blocks), errno, device, at } = *failure;
        let time = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let device = device.map(|DeviceError { code, is_final, crd, name, lba }| {
            let lba = lba.map(|Lba(lba)| lba);
            DeviceStatus { code, is_final, crd, name, lba }
        });
        Self { op: op.name(), lba, blocks, errno, error: failure.error().to_string(), device, time }
    }
}

/// Counters of the disks of a group, while they were its members.
#[derive(Debug, Serialize, JsonSchema)]
struct GroupCounts {
    name: String,
    /// The parent group.
    parent: Option<String>,
    /// Number of disks in the group, and in groups within it.
    disks: u64,
    limits: Limits,
    #[serde(flatten)]
    work: Work,
}

/// Counters of a disk, or of several.
#[derive(Debug, Serialize, JsonSchema)]
struct Work {
    read_ops: u64,
    read_bytes: u64,
    write_ops: u64,
    write_bytes: u64,
    /// Operations that are neither reads nor writes.
    other_ops: u64,
    /// Failed requests: all, and by kind.
    errors: u64,
    read_errors: u64,
    write_errors: u64,
    other_errors: u64,
    /// Requests that exceeded the disk's deadline.
    overdue: u64,
    /// Time from the submission by the front-end to the completion.
    latency_ticks: u64,
    /// The part of that in which limits of the disk or its groups delayed requests.
    throttled_ticks: u64,
    /// The part of that in the block layer's queue.
    queue_ticks: u64,
    /// The part of that in the module.
    module_ticks: u64,
    /// Time from the completion to the notification of the guest.
    front_end_ticks: u64,
    in_flight: u64,
    /// The part of `in_flight` that waits in the block layer.
    waiting: u64,
}

impl Work {
    fn new(counts: &Summary) -> Self {
        let (read, write) = (counts.op(Op::Read), counts.op(Op::Write));
        let layer = |layer| counts.layer(layer).sum_ns;
        Self {
            read_ops: read.ops,
            read_bytes: read.bytes.0,
            write_ops: write.ops,
            write_bytes: write.bytes.0,
            other_ops: counts.total(|op| op.ops) - read.ops - write.ops,
            errors: counts.total(|op| op.errors),
            read_errors: read.errors,
            write_errors: write.errors,
            other_errors: counts.total(|op| op.errors) - read.errors - write.errors,
            overdue: counts.overdue,
            latency_ticks: counts.total(|op: &OpSummary| op.latency_ns),
            throttled_ticks: layer(TimeLayer::Throttle),
            queue_ticks: layer(TimeLayer::Queue),
            module_ticks: layer(TimeLayer::Module),
            front_end_ticks: layer(TimeLayer::FrontEnd),
            in_flight: counts.in_flight,
            waiting: counts.waiting,
        }
    }
}

/// State of a controller.
#[derive(Debug, Serialize, JsonSchema)]
struct ControllerState {
    name: String,
    /// `blk` or `scsi`.
    kind: &'static str,
    disks: Vec<String>,
    connected: bool,
    /// Number of running queues.
    queues: u64,
}

/// Counters of a reactor.
#[derive(Debug, Serialize, JsonSchema)]
struct ReactorCounts {
    core: u16,
    /// Time with work.
    busy_ticks: u64,
    /// Time awake without work.
    idle_ticks: u64,
    sleeping_ticks: u64,
    turns: u64,
    /// The longest turn of the last seconds.
    longest_turn_ticks: u64,
    /// Number of queues and pollers of the reactor.
    members: u64,
}

/// Counters of a background task: work that a module runs by itself.
#[derive(Debug, Serialize, JsonSchema)]
struct TaskCounts {
    name: String,
    /// ID of the task's thread.
    id: u64,
    /// Core of the task's reactor; `null` while the task moves.
    core: Option<u16>,
    /// Processor time.
    busy_ticks: u64,
    /// Processor time that a turn of the reactor grants.
    budget_ticks: u64,
    /// Number of turns that have granted it.
    granted: u64,
}

impl TaskCounts {
    fn new(task: TaskStats) -> Self {
        let TaskStats { name, id, core, budget, busy, granted } = task;
        Self { name, id, core, busy_ticks: ticks(busy), budget_ticks: ticks(budget.turn), granted }
    }
}

/// Counters of an NVMe drive, since it was attached.
#[derive(Debug, Serialize, JsonSchema)]
struct DriveCounts {
    /// Name of the controller.
    name: String,
    /// Whether it serves requests; if not, they wait.
    ready: bool,
    disks: Vec<String>,
    /// Degrees Celsius; `null` if not known.
    temperature_celsius: Option<u64>,
    /// I/O commands, those tried again included.
    commands: u64,
    /// Writes to doorbell registers of I/O queues.
    doorbells: u64,
    in_flight: u64,
    /// Commands that were tried again, as the controller asked.
    retries: u64,
    /// Commands that were aborted because they were late.
    aborts: u64,
    resets: u64,
    errors: NvmeErrors,
}

impl DriveCounts {
    fn new(drive: &aryk_metrics::Nvme) -> Self {
        Self {
            name: drive.name.clone(),
            ready: drive.is_ready,
            disks: drive.disks.clone(),
            temperature_celsius: drive.celsius,
            commands: drive.commands,
            doorbells: drive.doorbells,
            in_flight: drive.in_flight,
            retries: drive.retries,
            aborts: drive.aborts,
            resets: drive.resets,
            errors: NvmeErrors::of_metrics(&drive.errors),
        }
    }
}

/// Counters of a pool since it was opened, and its state. `aryk_pools_get` has more.
#[derive(Debug, Serialize, JsonSchema)]
struct PoolActivity {
    name: String,
    /// Whether its disk can be written.
    writable: bool,
    /// Space for data.
    total_bytes: u64,
    /// Space that is free, or will be when deleted data has been cleaned.
    free_bytes: u64,
    /// Bytes that users have written.
    user_write_bytes: u64,
    /// Bytes that users have read.
    user_read_bytes: u64,
    /// Bytes that the pool has written to its disk.
    written_bytes: u64,
    /// Bytes that the pool has read from its disk.
    read_bytes: u64,
    /// Index pages that were in memory.
    cache_hits: u64,
    /// Index pages that were not.
    cache_misses: u64,
    /// Log that is not in the index yet.
    backlog_bytes: u64,
    /// Index that is to be merged.
    debt_bytes: u64,
    /// Requests that wait for space or for the backlog.
    waiting_requests: u64,
    /// Blocks whose data did not match its checksum.
    damaged_blocks: u64,
}

impl PoolActivity {
    fn new(pool: &aryk_metrics::Pool) -> Self {
        let sum = |parts: &[(&str, u64)]| parts.iter().map(|(_, bytes)| bytes).sum();
        Self {
            name: pool.name.clone(),
            writable: pool.is_writable,
            total_bytes: pool.total_bytes,
            free_bytes: pool.free_bytes,
            user_write_bytes: pool.user_write_bytes,
            user_read_bytes: pool.user_read_bytes,
            written_bytes: sum(&pool.written),
            read_bytes: sum(&pool.read),
            cache_hits: pool.cache_hits,
            cache_misses: pool.cache_misses,
            backlog_bytes: pool.backlog_bytes,
            debt_bytes: pool.debt_bytes,
            waiting_requests: pool.waiting_requests,
            damaged_blocks: pool.damaged_blocks,
        }
    }
}

/// The space of a volume or a snapshot.
#[derive(Debug, Serialize, JsonSchema)]
struct VolumeUse {
    /// The name of the pool and of the volume, as `POOL/VOLUME`.
    name: String,
    /// `volume` or `snapshot`.
    kind: &'static str,
    /// Size in bytes.
    size: u64,
    /// Bytes of data that become free if it is deleted.
    own_bytes: u64,
    /// Bytes of data that it shows and others keep in use, too.
    shared_bytes: u64,
    /// Seconds since the count.
    counted_seconds_ago: u64,
}

impl VolumeUse {
    fn of_pool(pool: &aryk_metrics::Pool) -> impl Iterator<Item = Self> {
        let counted_seconds_ago = pool.counted_ago.unwrap_or_default().as_secs();
        pool.members.iter().map(move |member| Self {
            name: format!("{}/{}", pool.name, member.name),
            kind: member.kind(),
            size: member.size,
            own_bytes: member.own_bytes,
            shared_bytes: member.shared_bytes,
            counted_seconds_ago,
        })
    }
}

/// Counters of a controller of a host on the network, since the host has connected.
#[derive(Debug, Serialize, JsonSchema)]
struct HostActivity {
    /// NQN of the host.
    name: String,
    /// NQN of the subsystem.
    subsystem: String,
    /// Identifier of the controller: a host may have several.
    controller: u16,
    /// Number of I/O queues.
    queues: u64,
    read_ops: u64,
    read_bytes: u64,
    write_ops: u64,
    write_bytes: u64,
    /// Operations that are neither reads nor writes.
    other_ops: u64,
    /// Failed operations of all kinds.
    errors: u64,
    /// Time from the arrival of commands to the ends of their requests.
    latency_ticks: u64,
    /// The latencies of all operations: the buckets that are not empty.
    latency_buckets: Vec<Bucket>,
}

impl HostActivity {
    fn new(host: &aryk_metrics::Host) -> Self {
        let mut latencies = Histogram::default();
        host.work().iter().for_each(|(_, work)| latencies.merge(&work.latencies));
        Self {
            name: host.name.clone(),
            subsystem: host.subsystem.clone(),
            controller: host.controller,
            queues: host.queues,
            read_ops: host.reads.requests,
            read_bytes: host.reads.bytes,
            write_ops: host.writes.requests,
            write_bytes: host.writes.bytes,
            other_ops: host.others.requests,
            errors: host.failed,
            latency_ticks: host.work().iter().map(|(_, work)| work.latency_ns).sum(),
            latency_buckets: buckets(&latencies),
        }
    }
}

async fn get_stats(control: &Control, _: NoParams) -> Result<Counts, Error> {
    let snapshot = control.collector.snapshot(control, AGE).await;
    Ok(Counts::new(&snapshot, control.env.background().stats()))
}

const fn ticks(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl Counts {
    fn new(snapshot: &Snapshot, tasks: Vec<TaskStats>) -> Self {
        let disk = |disk: &aryk_metrics::Disk| DiskCounts {
            name: disk.name.clone(),
            kind: disk.product,
            size: disk.size.0,
            group: disk.group.clone(),
            work: Work::new(&disk.counts),
            last_error: disk.last_failure.as_ref().map(LastError::from),
            in_flight_max: disk.in_flight_max,
        };
        let group = |group: &aryk_metrics::Group| GroupCounts {
            name: group.name.clone(),
            parent: group.parent.clone(),
            disks: group.disks as u64,
            limits: group.limits.into(),
            work: Work::new(&group.counts),
        };
        let controller =
            |aryk_metrics::ControllerCounts { controller, .. }: &aryk_metrics::ControllerCounts| {
                ControllerState {
                    name: controller.name.clone(),
                    kind: controller.kind,
                    disks: controller.disks.clone(),
                    connected: controller.connected,
                    queues: controller.queues,
                }
            };
        let reactor = |reactor: &aryk_metrics::Reactor| ReactorCounts {
            core: reactor.core,
            busy_ticks: ticks(reactor.stats.busy),
            idle_ticks: ticks(reactor.stats.idle),
            sleeping_ticks: ticks(reactor.stats.sleeping),
            turns: reactor.stats.turns,
            longest_turn_ticks: ticks(reactor.longest_turn),
            members: reactor.members,
        };
        Self {
            tick_rate: TICK_RATE,
            ticks: snapshot.at.0,
            disks: snapshot.disks.iter().map(disk).collect(),
            groups: snapshot.groups.iter().map(group).collect(),
            controllers: snapshot.controllers.iter().map(controller).collect(),
            reactors: snapshot.reactors.iter().map(reactor).collect(),
            tasks: tasks.into_iter().map(TaskCounts::new).collect(),
            drives: snapshot.nvme.iter().map(DriveCounts::new).collect(),
            pools: snapshot.pools.iter().map(PoolActivity::new).collect(),
            volumes: snapshot.pools.iter().flat_map(VolumeUse::of_pool).collect(),
            hosts: snapshot.hosts.iter().map(HostActivity::new).collect(),
        }
    }
}

/// Result of `aryk_latency_get`.
#[derive(Debug, Serialize, JsonSchema)]
struct Latencies {
    /// Name of the disk.
    name: String,
    /// Ticks in a second.
    tick_rate: u64,
    /// In the order in which a request passes the layers; the last is `total`.
    layers: Vec<LayerLatencies>,
}

/// Latencies in a layer: `throttle`, `queue`, `module` or `front-end`; or in all of them, `total`.
#[derive(Debug, Serialize, JsonSchema)]
struct LayerLatencies {
    layer: &'static str,
    /// Number of requests; of `throttle` and `queue`, only those that waited there.
    ops: u64,
    /// Sum of the latencies.
    latency_ticks: u64,
    /// Buckets that are not empty. Those of `total` count the time from the submission by the front-end to the completion.
    buckets: Vec<Bucket>,
}

/// Requests with about the same latency.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LatencyBucket")]
struct Bucket {
    /// Upper end of the bucket in ticks, exclusive; the lower end is the end of the bucket before.
    end_ticks: u64,
    ops: u64,
}

async fn get_latencies(control: &Control, p: Name) -> Result<Latencies, Error> {
    let bdev = control.disks.find(&p.name)?;
    let stats = bdev.stats().await;
    Ok(Latencies { name: bdev.name().to_owned(), tick_rate: TICK_RATE, layers: layers(&stats) })
}

/// The buckets that are not empty.
fn buckets(histogram: &Histogram) -> Vec<Bucket> {
    histogram.buckets().map(|(_, end_ticks, ops)| Bucket { end_ticks, ops }).collect()
}

fn layers(stats: &Stats) -> Vec<LayerLatencies> {
    let layer_latencies = |layer, latency_ticks, histogram: &Histogram| LayerLatencies {
        layer,
        ops: histogram.total(),
        latency_ticks,
        buckets: buckets(histogram),
    };
    let times = TimeLayer::ALL.map(|layer| (layer.name(), stats.times(layer)));
    let sum = times.iter().map(|(_, times)| times.sum_ns).sum();
    let mut all: Vec<_> =
        times.iter().map(|(name, t)| layer_latencies(name, t.sum_ns, &t.histogram)).collect();
    all.push(layer_latencies("total", sum, &stats.latencies(None)));
    all
}
