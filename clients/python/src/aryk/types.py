"""What the methods take and give. Made by `cargo xtask generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing import NotRequired

#: What becomes of writes when the store is full.
Enospc = Literal["error", "hold"]

#: How requests fail.
ErrorType = Literal["failure", "pending", "corrupt_data", "nomem"]

#: What happened.
EventType = Literal["bdev_register", "bdev_unregister", "bdev_resize"]

#: For how long a file is kept from others: as long as the disk is there, or from its first channel to its last.
FileLock = Literal["always", "in_use"]

#: Which requests are to fail.
IoType = Literal["clear", "read", "write", "unmap", "flush", "all"]

#: One of the latencies.
LatencyType = Literal["avg_read", "p99_read", "avg_write", "p99_write"]

#: SPDK's levels. `NOTICE` is what a daemon tells by default.
PrintLevel = Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]

#: Which counts are set to zero.
ResetMode = Literal["all", "maxmin", "error", "none"]

#: A signal.
Signal = Literal["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP", "SIGKILL", "SIGUSR1"]

#: What becomes of a request that takes longer.
TimeoutAction = Literal["report", "abort", "reset"]


class Absent(TypedDict):
    """One of the results of `aryk_absent_get`."""

    #: What it is, and its name, for people.
    object: str
    #: What it is: `disk`, `controller`, `target` or `setting`.
    kind: str
    #: Its name; a target's is its controller's and its number, as `ctrlr/3`.
    name: str
    #: Why it is not there.
    why: str
    #: The method.
    method: str
    #: Its parameters.
    params: dict[str, Any]
    #: Since when it is tried again and again, in seconds since 1970; not if it waits for a disk.
    tried_since: NotRequired[int]


class AccelStats(TypedDict):
    """Result of `accel_get_stats`."""

    #: 0.
    sequence_executed: int
    #: 0.
    sequence_failed: int
    #: Those that were ever carried out: none.
    operations: list[dict[str, Any]]


class AdminPassthru(TypedDict):
    """Which commands go to NVMe controllers as they come: none."""

    fw_update: NotRequired[bool]
    get_log_page: NotRequired[bool]
    get_set_features: NotRequired[bool]
    identify_ctrlr: NotRequired[bool]
    identify_uuid_list: NotRequired[bool]
    nvme_mi: NotRequired[bool]
    sanitize: NotRequired[bool]
    security_send_recv: NotRequired[bool]
    vendor_specific: NotRequired[bool]


class AioDetails(TypedDict):
    """Of a disk that `bdev_aio_create` made."""

    #: Whether its block size was given.
    block_size_override: bool
    #: Whether holes are punched.
    fallocate: bool
    #: The file, or block device.
    filename: str
    #: Whether writes are refused.
    readonly: bool


class Bdev(TypedDict):
    """One of the results of `bdev_get_bdevs`."""

    #: It identifies the disk, as do the others.
    name: str
    #: Other names.
    aliases: list[str]
    #: What kind of disk it is.
    product_name: str
    #: Bytes.
    block_size: int
    #: How many of these.
    num_blocks: int
    uuid: str
    preferred_write_alignment: int
    preferred_write_granularity: int
    optimal_write_size: int
    preferred_unmap_alignment: int
    preferred_unmap_granularity: int
    #: Ours: bytes of a block of the store below.
    physical_block_size: int
    #: Ours.
    readonly: bool
    #: 0 for none.
    assigned_rate_limits: RateLimits
    #: Whether somebody has it for himself.
    claimed: bool
    #: Never.
    zoned: bool
    #: What it can be asked for.
    supported_io_types: IoTypes
    #: None.
    memory_domains: list[Any]
    #: What only disks of its kind have.
    driver_specific: DriverSpecific
    #: How: nobody else may write.
    claim_type: NotRequired[str]
    #: Ours: by whom.
    claimed_by: NotRequired[str]
    #: Ours: what becomes of requests that take longer.
    io_timeout_action: NotRequired[TimeoutAction]
    #: Ours: milliseconds that a request may take.
    io_timeout_ms: NotRequired[int]
    #: Blocks.
    optimal_io_boundary: NotRequired[int]
    #: Ours: the group that it is limited with.
    qos_group: NotRequired[str]


class BdevStat(TypedDict):
    """The statistics of a disk. Times in ticks; those that only a disk has whose queue depth is sampled, in microseconds."""

    name: str
    bytes_read: int
    num_read_ops: int
    bytes_written: int
    num_write_ops: int
    bytes_unmapped: int
    num_unmap_ops: int
    bytes_copied: int
    num_copy_ops: int
    read_latency_ticks: int
    max_read_latency_ticks: int
    min_read_latency_ticks: int
    write_latency_ticks: int
    max_write_latency_ticks: int
    min_write_latency_ticks: int
    unmap_latency_ticks: int
    max_unmap_latency_ticks: int
    min_unmap_latency_ticks: int
    copy_latency_ticks: int
    max_copy_latency_ticks: int
    min_copy_latency_ticks: int
    queue_depth: int
    #: Requests that failed.
    io_error: IoError
    #: Ours, as all that follow: requests that wait in the block layer, part of `queue_depth`.
    queue_waiting: int
    num_flush_ops: int
    flush_latency_ticks: int
    num_write_zeroes_ops: int
    bytes_zeroed: int
    num_read_errors: int
    num_write_errors: int
    num_flush_errors: int
    num_unmap_errors: int
    num_write_zeroes_errors: int
    num_copy_errors: int
    num_compare_ops: int
    bytes_compared: int
    num_compare_errors: int
    num_compare_and_write_ops: int
    num_compare_and_write_errors: int
    #: Requests that were over the disk's deadline.
    num_overdue: int
    #: Requests that limits, the disk's or its groups', held up.
    num_throttled_ops: int
    #: For how long, all of them together.
    throttled_ticks: int
    p50_read_latency_ticks: int
    p99_read_latency_ticks: int
    p50_write_latency_ticks: int
    p99_write_latency_ticks: int
    io_time: NotRequired[int]
    queue_depth_polling_period: NotRequired[int]
    weighted_io_time: NotRequired[int]


class Call(TypedDict):
    """A call that makes an object."""

    #: The method.
    method: str
    #: Its parameters.
    params: dict[str, Any]


class ChannelStat(TypedDict):
    """The statistics of a channel."""

    #: The thread that it belongs to, as in `thread_get_stats`.
    thread_id: int
    name: str
    bytes_read: int
    num_read_ops: int
    bytes_written: int
    num_write_ops: int
    bytes_unmapped: int
    num_unmap_ops: int
    bytes_copied: int
    num_copy_ops: int
    read_latency_ticks: int
    max_read_latency_ticks: int
    min_read_latency_ticks: int
    write_latency_ticks: int
    max_write_latency_ticks: int
    min_write_latency_ticks: int
    unmap_latency_ticks: int
    max_unmap_latency_ticks: int
    min_unmap_latency_ticks: int
    copy_latency_ticks: int
    max_copy_latency_ticks: int
    min_copy_latency_ticks: int
    queue_depth: int
    #: Requests that failed.
    io_error: IoError
    #: Ours, as all that follow: requests that wait in the block layer, part of `queue_depth`.
    queue_waiting: int
    num_flush_ops: int
    flush_latency_ticks: int
    num_write_zeroes_ops: int
    bytes_zeroed: int
    num_read_errors: int
    num_write_errors: int
    num_flush_errors: int
    num_unmap_errors: int
    num_write_zeroes_errors: int
    num_copy_errors: int
    num_compare_ops: int
    bytes_compared: int
    num_compare_errors: int
    num_compare_and_write_ops: int
    num_compare_and_write_errors: int
    #: Requests that were over the disk's deadline.
    num_overdue: int
    #: Requests that limits, the disk's or its groups', held up.
    num_throttled_ops: int
    #: For how long, all of them together.
    throttled_ticks: int
    p50_read_latency_ticks: int
    p99_read_latency_ticks: int
    p50_write_latency_ticks: int
    p99_write_latency_ticks: int
    io_time: NotRequired[int]
    queue_depth_polling_period: NotRequired[int]
    weighted_io_time: NotRequired[int]


class ContextSwitchMonitor(TypedDict):
    """Result of `framework_monitor_context_switch`."""

    #: Whether it is on now.
    enabled: bool


class ControllerState(TypedDict):
    """A controller."""

    name: str
    #: `blk` or `scsi`.
    kind: str
    disks: list[str]
    connected: bool
    #: Queues that are served.
    queues: int


class Counts(TypedDict):
    """Result of `aryk_stats_get`. Times in ticks, added up over all requests."""

    #: Ticks in a second.
    tick_rate: int
    #: Now.
    ticks: int
    #: By age.
    disks: list[DiskCounts]
    #: Each after its parent.
    groups: list[GroupCounts]
    #: By name.
    controllers: list[ControllerState]
    #: By core.
    reactors: list[ReactorCounts]


class DelayDetails(TypedDict):
    """Of a disk that `bdev_delay_create` made. Latencies in microseconds."""

    #: What most reads take longer.
    avg_read_latency: int
    #: What most writes take longer.
    avg_write_latency: int
    #: The other disk.
    base_bdev_name: str
    #: Its own name.
    name: str
    #: What one read of a hundred takes longer.
    p99_read_latency: int
    #: What one write of a hundred takes longer.
    p99_write_latency: int


class DiskCounts(TypedDict):
    """A disk's."""

    name: str
    #: What its module calls it.
    kind: str
    #: Bytes.
    size: int
    #: The group that it is limited with.
    group: str | None
    read_ops: int
    read_bytes: int
    write_ops: int
    write_bytes: int
    #: Neither reads nor writes.
    other_ops: int
    #: Requests that failed: all, and by kind.
    errors: int
    read_errors: int
    write_errors: int
    other_errors: int
    #: Requests that were over the disk's deadline.
    overdue: int
    #: From the front-end's handing them down to its having them back.
    latency_ticks: int
    #: The part of that in which limits of the disk or its groups held them up.
    throttled_ticks: int
    #: The part of that in the block layer's queue.
    queue_ticks: int
    #: The part of that in the module.
    module_ticks: int
    #: From the completion until the guest has been told.
    front_end_ticks: int
    in_flight: int
    #: Of those, the ones that wait in the block layer.
    waiting: int
    #: The most that were in flight lately.
    in_flight_max: int
    #: The last request that its store has failed.
    last_error: NotRequired[LastError]


class DriverSpecific(TypedDict):
    """What a disk's module says of it: one member at most, of the module's name."""

    aio: NotRequired[AioDetails]
    delay: NotRequired[DelayDetails]
    error_disk: NotRequired[ErrorDetails]
    malloc: NotRequired[MallocDetails]
    passthru: NotRequired[PassthruDetails]
    split: NotRequired[SplitDetails]
    uring: NotRequired[UringDetails]


class ErrorDetails(TypedDict):
    """Of a disk that `bdev_error_create` made."""

    #: The other disk.
    base_bdev: str


class Event(TypedDict):
    """One of the results of `notify_get_notifications`."""

    #: What happened.
    type: EventType
    #: The disk.
    ctx: str
    #: Its number.
    id: int


class FileSystem(TypedDict):
    """What disks in files of one file system promise. All in bytes."""

    #: Where it is mounted.
    path: str
    #: How many there are.
    disks: int
    #: Their sizes together.
    promised: int
    #: What they have of that already.
    allocated: int
    #: What the file system has left.
    free: int
    #: What is promised, and is not there: more than 0 says that writes will fail before the disks are full.
    missing: int


class GroupCounts(TypedDict):
    """What the disks of a group did while they were its."""

    name: str
    #: The group that it is in.
    parent: str | None
    #: Disks in it, and in the groups in it.
    disks: int
    limits: RateLimits
    read_ops: int
    read_bytes: int
    write_ops: int
    write_bytes: int
    #: Neither reads nor writes.
    other_ops: int
    #: Requests that failed: all, and by kind.
    errors: int
    read_errors: int
    write_errors: int
    other_errors: int
    #: Requests that were over the disk's deadline.
    overdue: int
    #: From the front-end's handing them down to its having them back.
    latency_ticks: int
    #: The part of that in which limits of the disk or its groups held them up.
    throttled_ticks: int
    #: The part of that in the block layer's queue.
    queue_ticks: int
    #: The part of that in the module.
    module_ticks: int
    #: From the completion until the guest has been told.
    front_end_ticks: int
    in_flight: int
    #: Of those, the ones that wait in the block layer.
    waiting: int


class Histogram(TypedDict):
    """Result of `bdev_get_histogram`."""

    #: The counts of all buckets from the first octave to the last, each of eight bytes, the lowest first, in base64.
    histogram: str
    #: The binary logarithm of the buckets in an octave.
    granularity: int
    #: The first octave: its first bucket has what is below it too.
    min_range: int
    #: The last octave: its last bucket has what is above it too.
    max_range: int
    #: Units of the latencies in a second.
    tsc_rate: int


class HistogramBorders(TypedDict):
    """Result of `bdev_get_histogram_borders`."""

    #: For each border the requests that took no longer, to the precision of the histogram, an eighth; and then all.
    borders_count: list[int]


class IoChannel(TypedDict):
    """A disk that a thread has open."""

    #: The disk's.
    name: str
    #: Channels of it: a queue has one.
    ref: int


class IoChannels(TypedDict):
    """Result of `thread_get_io_channels`."""

    #: Ticks in a second.
    tick_rate: int
    #: Of all reactors.
    threads: list[ThreadChannels]


class IoError(TypedDict):
    """Requests that failed, by status. Those of all statuses are counted as `failed`."""

    #: Not given where there are none.
    failed: NotRequired[int]


class IoTypes(TypedDict):
    """What a disk can be asked for."""

    read: bool
    write: bool
    unmap: bool
    flush: bool
    reset: bool
    nvme_admin: bool
    nvme_io: bool
    nvme_io_md: bool
    write_zeroes: bool
    zcopy: bool
    get_zone_info: bool
    zone_management: bool
    zone_append: bool
    compare: bool
    compare_and_write: bool
    abort: bool
    seek_hole: bool
    seek_data: bool
    copy: bool
    nvme_iov_md: bool


class IobufStats(TypedDict):
    """One of the results of `iobuf_get_stats`."""

    #: Whose they are.
    module: str
    small_pool: PoolStats
    large_pool: PoolStats


class Iostat(TypedDict):
    """Result of `bdev_get_iostat`. Times in ticks."""

    #: Ticks in a second.
    tick_rate: int
    #: Now.
    ticks: int
    #: One for each disk; none if channels were asked for.
    bdevs: list[BdevStat]
    #: One for each open channel.
    channels: NotRequired[list[ChannelStat]]
    #: The disk.
    name: NotRequired[str]


class LastError(TypedDict):
    """A request that a disk's store has failed."""

    op: str
    #: The first block.
    lba: int
    blocks: int
    errno: int
    #: The errno's text.
    error: str
    #: Seconds since 1970.
    time: int


class Latencies(TypedDict):
    """Result of `aryk_latency_get`."""

    #: The disk.
    name: str
    #: Ticks in a second.
    tick_rate: int
    #: In the order in which a request passes them; the last is `total`.
    layers: list[LayerLatencies]


class LatencyBucket(TypedDict):
    """Requests that took about the same time."""

    #: They took less, in ticks; and no less than where the bucket before ends.
    end_ticks: int
    ops: int


class LayerLatencies(TypedDict):
    """Times spent in a layer: `throttle`, `queue`, `module` or `front-end`; or in all of them, `total`."""

    layer: str
    #: Requests; of `throttle` and `queue`, only those that waited there.
    ops: int
    #: All together.
    latency_ticks: int
    #: Those that are not empty. Those of `total` are from the front-end's handing a request down to its having it back.
    buckets: list[LatencyBucket]


class LwThread(TypedDict):
    """What runs on a reactor: the queues of one machine, or the like."""

    name: str
    id: int
    cpumask: str
    #: Busy time.
    elapsed: int


class MallocDetails(TypedDict):
    """Of a disk that `bdev_malloc_create` made, and that was made again when the daemon started."""

    #: What it held went with the daemon before.
    emptied: bool


class MultipathOptions(TypedDict):
    """How paths to one namespace are chosen."""

    #: Not given.
    min_io: NotRequired[int]
    #: `active_passive`.
    policy: NotRequired[str]
    #: Not given.
    selector: NotRequired[str]


class PassthruDetails(TypedDict):
    """Of a disk that `bdev_passthru_create` made."""

    #: The other disk.
    base_bdev_name: str
    #: Its own name.
    name: str


class Poller(TypedDict):
    """A queue, or something else that is polled."""

    name: str
    #: A number that none other of its reactor has.
    id: int
    #: `waiting` or `paused`.
    state: str
    #: How often it was polled.
    run_count: int
    #: How often there was work.
    busy_count: int
    #: Of a timed one.
    period_ticks: NotRequired[int]


class Pollers(TypedDict):
    """Result of `thread_get_pollers`."""

    #: Ticks in a second.
    tick_rate: int
    #: Of all reactors.
    threads: list[ThreadPollers]


class PoolStats(TypedDict):
    """How often a buffer came from where."""

    #: From a thread's own.
    cache: int
    #: From those of all.
    main: int
    #: Requests that had to wait for one: what clients watch, and none ever does.
    retry: int


class QosGroup(TypedDict):
    """One of the results of `bdev_qos_groups_get`."""

    name: str
    #: Of all that is in it, together.
    assigned_rate_limits: RateLimits
    #: The disks in it, but for those of groups in it.
    bdevs: list[str]
    #: The group that it is in.
    parent: NotRequired[str]


class RateLimits(TypedDict):
    """What a disk or a group may do in a second."""

    rw_ios_per_sec: int
    rw_mbytes_per_sec: int
    r_mbytes_per_sec: int
    w_mbytes_per_sec: int
    #: Ours, as all that follow.
    r_ios_per_sec: int
    w_ios_per_sec: int
    burst_seconds: int
    combined: bool


class Reactor(TypedDict):
    """A reactor: a core, in a loop."""

    #: Its core.
    lcore: int
    #: Its thread's number.
    tid: int
    #: Time with work.
    busy: int
    #: Time without work, awake or asleep.
    idle: int
    #: Whether it has slept.
    in_interrupt: bool
    #: What the kernel has counted of the core, all processes together, in its ticks: interrupts.
    irq: int
    #: The same: the kernel's own work.
    sys: int
    #: The same: programs.
    usr: int
    #: The core's NUMA node.
    numa_id: int
    #: What runs on it.
    lw_threads: list[LwThread]


class ReactorCounts(TypedDict):
    """A reactor's."""

    core: int
    #: Time with work.
    busy_ticks: int
    #: Time awake without work.
    idle_ticks: int
    sleeping_ticks: int
    turns: int
    #: The longest turn lately.
    longest_turn_ticks: int
    #: Queues and pollers on it.
    members: int


class Reactors(TypedDict):
    """Result of `framework_get_reactors`. Times in ticks."""

    #: Ticks in a second.
    tick_rate: int
    #: The daemon's process.
    pid: int
    #: One for each core.
    reactors: list[Reactor]


class SavedConfig(TypedDict):
    """Result of `save_config`."""

    #: In the order in which they are made again.
    subsystems: list[SavedSubsystem]


class SavedSubsystem(TypedDict):
    """The calls that configure a subsystem."""

    #: Its name.
    subsystem: str
    #: The calls, in their order.
    config: list[Call]


class Scheduler(TypedDict):
    """Result of `framework_get_scheduler`."""

    #: `static` or `dynamic`.
    scheduler_name: str
    #: Microseconds between two decisions; `static` has none to make.
    scheduler_period: int
    #: Where queues that are nearly idle are gathered first.
    scheduling_core: int
    #: Cores without it.
    isolated_core_mask: str
    #: Ours: queues that it has moved since the daemon began.
    moves: int
    #: Ours: moves that did not come about, as requests took too long.
    failed_moves: int
    #: Of `dynamic`: from a core that is as busy as that, in percent, queues are moved away.
    core_busy: NotRequired[int]
    #: Of `dynamic`: no core is filled over that, in percent.
    core_limit: NotRequired[int]
    #: Of `dynamic`: a queue that is less busy than that, in percent of a core, is nearly idle.
    load_limit: NotRequired[int]


class ScsiDevice(TypedDict):
    """One of the results of `scsi_get_devices`."""

    #: The target's, within its controller.
    id: int
    device_name: str


class SockImpl(TypedDict):
    """Result of `sock_get_default_impl`."""

    #: `posix`.
    impl_name: str


class SplitDetails(TypedDict):
    """Of a disk that `bdev_split_create` made."""

    #: The other disk.
    base_bdev: str
    #: Where it begins in that disk.
    offset_blocks: int


class SubsystemInfo(TypedDict):
    """One of the results of `framework_get_subsystems`."""

    #: Its name.
    subsystem: str
    #: Those that come before it.
    depends_on: list[str]


class Thread(TypedDict):
    """The same, with all that is counted."""

    name: str
    id: int
    cpumask: str
    #: Time with work.
    busy: int
    #: What its reactor had left: time is not idle for one thread more than for another.
    idle: int
    #: What it polls.
    active_pollers_count: int
    timed_pollers_count: int
    paused_pollers_count: int


class ThreadChannels(TypedDict):
    """What a thread has open."""

    name: str
    io_channels: list[IoChannel]


class ThreadPollers(TypedDict):
    """What a thread polls."""

    name: str
    id: int
    #: What is polled in every turn of the reactor now.
    active_pollers: list[Poller]
    #: What runs at a period.
    timed_pollers: list[Poller]
    #: What is polled when something wakes it: queues without work.
    paused_pollers: list[Poller]


class Threads(TypedDict):
    """Result of `thread_get_stats`. Times in ticks."""

    #: Ticks in a second.
    tick_rate: int
    #: `app_thread`, which answers calls, and those of all reactors.
    threads: list[Thread]


class Trace(TypedDict):
    """Result of `aryk_trace_get`."""

    #: Ticks in a second.
    tick_rate: int
    #: Oldest first.
    records: list[TraceRecord]


class TraceGroup(TypedDict):
    """A layer that requests pass."""

    #: Always.
    enabled: bool
    #: Its bit.
    mask: str
    #: Those of its points that are on.
    tpoint_mask: str
    #: Its points.
    tpoints: list[TracePoint]


class TraceGroupInfo(TypedDict):
    """A layer that requests pass, in brief."""

    #: Its bit.
    mask: str
    #: Those of its points that are on.
    tpoint_mask: str


TraceGroups = TypedDict("TraceGroups", {"tpoint_group_mask": "str", "bdev": "TraceGroup", "front-end": "TraceGroup", "module": "TraceGroup"})


TraceInfo = TypedDict("TraceInfo", {"tpoint_shm_path": "str", "tpoint_group_mask": "str", "bdev": "TraceGroupInfo", "front-end": "TraceGroupInfo", "module": "TraceGroupInfo"})


class TracePoint(TypedDict):
    """A place where the trace is written."""

    name: str
    #: Its number within the group.
    id: int
    #: The same, as some versions of SPDK name it.
    tpoint_id: int
    enabled: bool


class TraceRecord(TypedDict):
    """Something that happened to a request."""

    #: When, in ticks since the daemon began.
    ticks: int
    #: The reactor's core.
    lcore: int
    #: Which layer: front-end, bdev or module.
    layer: str
    #: What: submit or complete.
    point: str
    #: Which queue or channel: its name, if it has one still, or its number.
    object: str
    #: Which request of that queue or channel.
    tag: int


class UringDetails(TypedDict):
    """Of a disk that `bdev_uring_create` made."""

    #: The file, or block device.
    filename: str


class Version(TypedDict):
    """Result of `spdk_get_version`."""

    #: For people.
    version: str
    #: Its parts.
    fields: VersionFields


class VersionFields(TypedDict):
    """The parts of a version."""

    major: int
    minor: int
    patch: int
    suffix: str


class VhostBackend(TypedDict):
    """What only controllers of disks have."""

    #: Of a controller of one disk.
    block: NotRequired[VhostBlock]
    #: Of a controller whose disks come and go.
    scsi: NotRequired[list[VhostTarget]]


class VhostBlock(TypedDict):
    """The disk, as the machine sees it."""

    #: Whether the machine may only read.
    readonly: bool
    #: `null` when the disk has been removed.
    bdev: str | None
    #: `vhost_user_blk`.
    transport: str


class VhostController(TypedDict):
    """One of the results of `vhost_get_controllers`."""

    #: Its name.
    ctrlr: str
    #: The cores that it may be served on.
    cpumask: str
    #: As `vhost_controller_set_coalescing` has set it, without effect: interrupts are not delayed.
    delay_base_us: int
    #: The same.
    iops_threshold: int
    #: The socket's path.
    socket: str
    #: Ours.
    num_queues: int
    #: Ours: whether the socket is the machine's.
    connects: bool
    #: The machine, if it is connected.
    sessions: list[VhostSession]
    #: What only controllers of disks have.
    backend_specific: VhostBackend
    #: Ours.
    statistics: VhostStatistics
    #: Ours: what disks know a SCSI controller by when its machine reserves them.
    transport_id: NotRequired[str]


class VhostLun(TypedDict):
    """Part of a result."""

    id: int
    bdev_name: str


class VhostQueue(TypedDict):
    """A queue of a machine."""

    #: Its number.
    index: int
    #: The core that serves it.
    lcore: int


class VhostSession(TypedDict):
    """A front-end that is connected."""

    #: Counts the connections.
    vid: int
    #: The same.
    id: int
    #: For people.
    name: str
    #: Whether a queue is served.
    started: bool
    #: Queues that are served.
    max_queues: int
    #: Ours.
    queues: list[VhostQueue]
    #: Ours: its process, if the kernel tells.
    pid: NotRequired[int]


class VhostStatistics(TypedDict):
    """What has happened at the socket since the controller was made."""

    #: Front-ends that have connected.
    sessions: int
    #: Those of them that did not end by hanging up.
    failed_sessions: int
    #: From the machine.
    messages: int
    #: Those of them that were answered with a failure, after which the session went on.
    refused_messages: int
    #: Errors, each a refusal or the end of a session, of the connection.
    connection_errors: int
    #: Errors in messages.
    protocol_errors: int
    #: Errors in the number or kind of file descriptors.
    fd_errors: int
    #: Errors in the machine's memory and its tables.
    memory_errors: int
    #: Errors that the controller has found.
    device_errors: int
    #: For people.
    last_error: str | None
    #: Descriptor chains that made no request.
    bad_chains: int
    #: Requests without a place for their status.
    unanswerable_requests: int
    #: Rings that contradicted themselves.
    broken_queues: int


class VhostTarget(TypedDict):
    """A target that has a disk."""

    scsi_dev_num: int
    id: int
    target_name: str
    luns: list[VhostLun]


class VirtioBlkTransport(TypedDict):
    """One of the results of `virtio_blk_get_transports`."""

    name: str
