"""What the methods take and give. Made by `cargo xtask generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing import NotRequired

Enospc = Literal["error", "hold"]

ErrorType = Literal["failure", "pending", "corrupt_data", "nomem"]

#: What happened.
EventType = Literal["bdev_register", "bdev_unregister"]

FileLock = Literal["always", "in_use"]

IoType = Literal["clear", "read", "write", "unmap", "flush", "all"]

LatencyType = Literal["avg_read", "p99_read", "avg_write", "p99_write"]

#: SPDK's levels. `NOTICE` is what a daemon tells by default.
PrintLevel = Literal["ERROR", "WARNING", "NOTICE", "INFO", "DEBUG"]

#: Which counts are set to zero.
ResetMode = Literal["all", "none"]

Signal = Literal["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP", "SIGKILL", "SIGUSR1"]

#: What becomes of a request that takes longer.
TimeoutAction = Literal["report", "abort", "reset"]


class AioDetails(TypedDict):
    """Of a disk that `bdev_aio_create` made."""

    #: Whether its block size was given.
    block_size_override: bool
    #: Whether holes are punched.
    fallocate: bool
    filename: str
    readonly: bool


class Bdev(TypedDict):
    """One of the results of `bdev_get_bdevs`."""

    name: str
    aliases: list[str]
    product_name: str
    block_size: int
    num_blocks: int
    uuid: str
    #: Ours: bytes of a block of the store below.
    physical_block_size: int
    #: Ours.
    readonly: bool
    assigned_rate_limits: RateLimits
    claimed: bool
    zoned: bool
    supported_io_types: IoTypes
    memory_domains: list[Any]
    driver_specific: DriverSpecific
    #: Ours: by whom.
    claimed_by: NotRequired[str]
    io_timeout_action: NotRequired[TimeoutAction]
    #: Ours, as the next: milliseconds.
    io_timeout_ms: NotRequired[int]
    #: Blocks.
    optimal_io_boundary: NotRequired[int]


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


class ContextSwitchMonitor(TypedDict):
    """Result of `framework_monitor_context_switch`."""

    enabled: bool


class DelayDetails(TypedDict):
    """Of a disk that `bdev_delay_create` made. Latencies in microseconds."""

    avg_read_latency: int
    avg_write_latency: int
    base_bdev_name: str
    name: str
    p99_read_latency: int
    p99_write_latency: int


class DriverSpecific(TypedDict):
    """What a disk's module says of it: one member at most, of the module's name."""

    aio: NotRequired[AioDetails]
    delay: NotRequired[DelayDetails]
    error_disk: NotRequired[ErrorDetails]
    passthru: NotRequired[PassthruDetails]
    split: NotRequired[SplitDetails]
    uring: NotRequired[UringDetails]


class ErrorDetails(TypedDict):
    """Of a disk that `bdev_error_create` made."""

    base_bdev: str


class Event(TypedDict):
    """One of the results of `notify_get_notifications`."""

    type: EventType
    #: The disk.
    ctx: str
    id: int


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
    tsc_rate: int


class IoTypes(TypedDict):
    """Part of a result."""

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

    module: str
    small_pool: PoolStats
    large_pool: PoolStats


class Iostat(TypedDict):
    """Result of `bdev_get_iostat`. Times in ticks."""

    tick_rate: int
    ticks: int
    bdevs: list[BdevStat]


class LwThread(TypedDict):
    """Part of a result."""

    name: str
    id: int
    cpumask: str
    #: Busy time.
    elapsed: int


class PassthruDetails(TypedDict):
    """Of a disk that `bdev_passthru_create` made."""

    base_bdev_name: str
    name: str


class PoolStats(TypedDict):
    """How often a buffer came from where."""

    cache: int
    main: int
    #: Requests that had to wait for one: what clients watch, and none ever does.
    retry: int


class RateLimits(TypedDict):
    """No limits."""

    rw_ios_per_sec: int
    rw_mbytes_per_sec: int
    r_mbytes_per_sec: int
    w_mbytes_per_sec: int


class Reactor(TypedDict):
    """Part of a result."""

    lcore: int
    tid: int
    busy: int
    #: Time without work, awake or asleep.
    idle: int
    #: Ours: the part of `idle` that was spent asleep.
    sleeping: int
    in_interrupt: bool
    lw_threads: list[LwThread]


class Reactors(TypedDict):
    """Result of `framework_get_reactors`. Times in ticks."""

    tick_rate: int
    pid: int
    reactors: list[Reactor]


class SavedConfig(TypedDict):
    """Result of `save_config`."""

    subsystems: list[SavedSubsystem]


class SavedSubsystem(TypedDict):
    """The calls that configure a subsystem."""

    subsystem: str
    config: list[Call]


class Scheduler(TypedDict):
    """Result of `framework_get_scheduler`."""

    scheduler_name: str
    #: Ticks between two decisions, of which there are none.
    scheduler_period: int
    scheduling_core: int
    isolated_core_mask: str


class SplitDetails(TypedDict):
    """Of a disk that `bdev_split_create` made."""

    base_bdev: str
    #: Where it begins in that disk.
    offset_blocks: int


class SubsystemInfo(TypedDict):
    """One of the results of `framework_get_subsystems`."""

    subsystem: str
    depends_on: list[str]


class Thread(TypedDict):
    """Part of a result."""

    name: str
    id: int
    cpumask: str
    busy: int
    #: What its reactor had left: time is not idle for one thread more than for another.
    idle: int
    in_interrupt: bool
    active_pollers_count: int
    timed_pollers_count: int
    paused_pollers_count: int


class Threads(TypedDict):
    """Result of `thread_get_stats`. Times in ticks."""

    tick_rate: int
    threads: list[Thread]


class TraceGroup(TypedDict):
    """Part of a result."""

    enabled: bool
    #: Its bit.
    mask: str
    #: Those of its points that are on.
    tpoint_mask: str
    tpoints: list[TracePoint]


TraceGroups = TypedDict("TraceGroups", {"tpoint_group_mask": "str", "bdev": "TraceGroup", "front-end": "TraceGroup", "module": "TraceGroup"})


class TracePoint(TypedDict):
    """Part of a result."""

    name: str
    id: int
    enabled: bool


class UringDetails(TypedDict):
    """Of a disk that `bdev_uring_create` made."""

    filename: str


class Version(TypedDict):
    """Result of `spdk_get_version`."""

    version: str
    fields: VersionFields


class VersionFields(TypedDict):
    """Part of a result."""

    major: int
    minor: int
    patch: int
    suffix: str


class VhostBackend(TypedDict):
    """Part of a result."""

    block: VhostBlock


class VhostBlock(TypedDict):
    """Part of a result."""

    readonly: bool
    #: `null` when the disk has been removed.
    bdev: str | None
    transport: str


class VhostController(TypedDict):
    """One of the results of `vhost_get_controllers`."""

    ctrlr: str
    cpumask: str
    delay_base_us: int
    iops_threshold: int
    socket: str
    #: Ours.
    num_queues: int
    #: Ours: whether the socket is the machine's.
    connects: bool
    sessions: list[VhostSession]
    backend_specific: VhostBackend
    #: Ours.
    statistics: VhostStatistics


class VhostQueue(TypedDict):
    """Part of a result."""

    index: int
    lcore: int


class VhostSession(TypedDict):
    """A front-end that is connected."""

    vid: int
    id: int
    name: str
    started: bool
    max_queues: int
    #: Ours.
    queues: list[VhostQueue]


class VhostStatistics(TypedDict):
    """What has happened at the socket since the controller was made."""

    sessions: int
    failed_sessions: int
    messages: int
    refused_messages: int
    connection_errors: int
    protocol_errors: int
    fd_errors: int
    memory_errors: int
    device_errors: int
    last_error: str | None
    bad_chains: int
    unanswerable_requests: int
    broken_queues: int


class VirtioBlkTransport(TypedDict):
    """One of the results of `virtio_blk_get_transports`."""

    name: str
