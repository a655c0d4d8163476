"""The methods. Made by `cargo xtask generate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Mapping, Sequence

from . import types


def _given(**params: Any) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


class Methods(ABC):
    """All methods, each to be waited for."""

    @abstractmethod
    def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Calls any method by its name."""

    def accel_crypto_keys_get(
        self,
        *,
        key_name: str | None = None,
    ) -> list[dict[str, Any]]:
        """The keys for encryption: none.

        Parameters:
            key_name: All, if none is named.
        """
        result: list[dict[str, Any]] = self.call(
            "accel_crypto_keys_get",
            _given(
                key_name=key_name,
            ),
        )
        return result

    def accel_get_module_info(self) -> list[dict[str, Any]]:
        """The engines that compute on data: none."""
        result: list[dict[str, Any]] = self.call("accel_get_module_info")
        return result

    def accel_get_opc_assignments(self) -> dict[str, Any]:
        """Which engine computes what: none."""
        result: dict[str, Any] = self.call("accel_get_opc_assignments")
        return result

    def accel_get_stats(self) -> types.AccelStats:
        """What engines have computed: nothing."""
        result: types.AccelStats = self.call("accel_get_stats")
        return result

    def accel_set_options(
        self,
        *,
        buf_count: int | None = None,
        large_cache_size: int | None = None,
        sequence_count: int | None = None,
        small_cache_size: int | None = None,
        task_count: int | None = None,
    ) -> bool:
        """Checks its parameters, and does nothing: there are no pools to size.

        Parameters:
            buf_count: Not heeded.
            large_cache_size: Not heeded.
            sequence_count: Not heeded.
            small_cache_size: Not heeded.
            task_count: Not heeded.
        """
        result: bool = self.call(
            "accel_set_options",
            _given(
                buf_count=buf_count,
                large_cache_size=large_cache_size,
                sequence_count=sequence_count,
                small_cache_size=small_cache_size,
                task_count=task_count,
            ),
        )
        return result

    def aryk_absent_get(self) -> list[types.Absent]:
        """What is configured and not there: disks that wait for the disk that they are made of, what could not be made again after a restart, and why."""
        result: list[types.Absent] = self.call("aryk_absent_get")
        return result

    def aryk_core_add(
        self,
        *,
        core: int,
    ) -> bool:
        """Starts a reactor on another core, for the queues to come and those that are moved there.

        Parameters:
            core: The core's number.
        """
        result: bool = self.call(
            "aryk_core_add",
            _given(
                core=core,
            ),
        )
        return result

    def aryk_core_remove(
        self,
        *,
        core: int,
    ) -> bool:
        """Moves all that is on a core's reactor to the others, while I/O goes on, and ends the reactor.

        Parameters:
            core: The core's number.
        """
        result: bool = self.call(
            "aryk_core_remove",
            _given(
                core=core,
            ),
        )
        return result

    def aryk_file_systems_get(
        self,
        *,
        disk: str | None = None,
    ) -> list[types.FileSystem]:
        """What disks in files promise, and what their file systems have for that.

        Parameters:
            disk: Only the one that this disk is in: name, alias or uuid.
        """
        result: list[types.FileSystem] = self.call(
            "aryk_file_systems_get",
            _given(
                disk=disk,
            ),
        )
        return result

    def aryk_latency_get(
        self,
        *,
        name: str,
    ) -> types.Latencies:
        """How long a disk's requests took, layer by layer.

        Parameters:
            name: Name, alias or uuid.
        """
        result: types.Latencies = self.call(
            "aryk_latency_get",
            _given(
                name=name,
            ),
        )
        return result

    def aryk_stats_get(self) -> types.Counts:
        """What all disks, groups, controllers and reactors have counted, in brief."""
        result: types.Counts = self.call("aryk_stats_get")
        return result

    def aryk_trace_get(
        self,
        *,
        count: int | None = None,
    ) -> types.Trace:
        """The last that happened to requests on all reactors, oldest first.

        Parameters:
            count: Records at most, the latest; 256 by default. Each reactor keeps its last 4095.
        """
        result: types.Trace = self.call(
            "aryk_trace_get",
            _given(
                count=count,
            ),
        )
        return result

    def bdev_aio_create(
        self,
        *,
        name: str,
        filename: str,
        block_size: int | None = None,
        enospc: types.Enospc | None = None,
        fallocate: bool | None = None,
        lock: types.FileLock | None = None,
        nowait: bool | None = None,
        readonly: bool | None = None,
        size: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk in a file or block device: the same as `bdev_uring_create`.

        Parameters:
            name: The name that it is to have.
            filename: The file, or block device.
            block_size: By default 512 for a file, and what it says of itself for a block device.
            enospc: Ours: what becomes of writes when the store is full.
            fallocate: Kept, and without effect: holes are always punched where the file system can.
            lock: Ours: for how long the file is kept from others.
            nowait: Kept, and without effect: nothing here ever waits for the device.
            readonly: Whether writes are refused.
            size: Ours: bytes of the sparse file that is created if there is none, or an empty one. A file that has another size is refused.
            uuid: By default a random one.
        """
        result: str = self.call(
            "bdev_aio_create",
            _given(
                name=name,
                filename=filename,
                block_size=block_size,
                enospc=enospc,
                fallocate=fallocate,
                lock=lock,
                nowait=nowait,
                readonly=readonly,
                size=size,
                uuid=uuid,
            ),
        )
        return result

    def bdev_aio_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_aio_create` made; its file stays.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_aio_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_aio_rescan(
        self,
        *,
        name: str,
    ) -> bool:
        """Has a disk that `bdev_aio_create` made take on the size that its file has now.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_aio_rescan",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_delay_create(
        self,
        *,
        name: str,
        base_bdev_name: str,
        avg_read_latency: int,
        p99_read_latency: int,
        avg_write_latency: int,
        p99_write_latency: int,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk that is another, later.

        Parameters:
            name: The name that it is to have.
            base_bdev_name: The other disk.
            avg_read_latency: What most reads take longer.
            p99_read_latency: What one read of a hundred takes longer.
            avg_write_latency: What most writes take longer.
            p99_write_latency: What one write of a hundred takes longer.
            uuid: By default one that follows from the other's.
        """
        result: str = self.call(
            "bdev_delay_create",
            _given(
                name=name,
                base_bdev_name=base_bdev_name,
                avg_read_latency=avg_read_latency,
                p99_read_latency=p99_read_latency,
                avg_write_latency=avg_write_latency,
                p99_write_latency=p99_write_latency,
                uuid=uuid,
            ),
        )
        return result

    def bdev_delay_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_delay_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_delay_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_delay_update_latency(
        self,
        *,
        delay_bdev_name: str,
        latency_type: types.LatencyType,
        latency_us: int,
    ) -> bool:
        """Changes one latency of a disk that `bdev_delay_create` made.

        Parameters:
            delay_bdev_name: Name, alias or uuid.
            latency_type: Which.
            latency_us: Microseconds.
        """
        result: bool = self.call(
            "bdev_delay_update_latency",
            _given(
                delay_bdev_name=delay_bdev_name,
                latency_type=latency_type,
                latency_us=latency_us,
            ),
        )
        return result

    def bdev_enable_histogram(
        self,
        *,
        name: str,
        enable: bool,
        granularity: int | None = None,
        max_nsec: int | None = None,
        min_nsec: int | None = None,
        opc: str | None = None,
    ) -> bool:
        """Has the latencies of a disk recorded, or no longer.

        Parameters:
            name: Name, alias or uuid.
            enable: Whether they are recorded from now on.
            granularity: Taken and not heeded: `bdev_get_histogram` tells the one there is.
            max_nsec: Nanoseconds above which they are all one; by default two minutes.
            min_nsec: Nanoseconds below which they are all one; by default 1000.
            opc: Of all operations, if none is named.
        """
        result: bool = self.call(
            "bdev_enable_histogram",
            _given(
                name=name,
                enable=enable,
                granularity=granularity,
                max_nsec=max_nsec,
                min_nsec=min_nsec,
                opc=opc,
            ),
        )
        return result

    def bdev_error_create(
        self,
        *,
        base_name: str,
        uuid: str | None = None,
    ) -> bool:
        """Makes a disk that is another, named as that with `EE_` before it, and fails when it is told to.

        Parameters:
            base_name: The other disk.
            uuid: By default one that follows from the other's.
        """
        result: bool = self.call(
            "bdev_error_create",
            _given(
                base_name=base_name,
                uuid=uuid,
            ),
        )
        return result

    def bdev_error_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_error_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_error_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_error_inject_error(
        self,
        *,
        name: str,
        io_type: types.IoType,
        error_type: types.ErrorType,
        corrupt_offset: int | None = None,
        corrupt_value: int | None = None,
        num: int | None = None,
        queue_depth: int | None = None,
    ) -> bool:
        """Tells a disk that `bdev_error_create` made which requests are to fail, and how.

        Parameters:
            name: Name, alias or uuid.
            io_type: Which requests; `clear` ends all failures.
            error_type: How they fail.
            corrupt_offset: With `corrupt_data`: the byte in each request.
            corrupt_value: With `corrupt_data`: what becomes of it.
            num: Requests that it befalls.
            queue_depth: Only when so many others are in flight.
        """
        result: bool = self.call(
            "bdev_error_inject_error",
            _given(
                name=name,
                io_type=io_type,
                error_type=error_type,
                corrupt_offset=corrupt_offset,
                corrupt_value=corrupt_value,
                num=num,
                queue_depth=queue_depth,
            ),
        )
        return result

    def bdev_error_resume_pending(
        self,
        *,
        name: str,
    ) -> bool:
        """Has the requests go on that a disk that `bdev_error_create` made holds, and ends that it holds any.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_error_resume_pending",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_examine(
        self,
        *,
        name: str,
    ) -> bool:
        """Checks its parameters, and does nothing: no module looks for its own on disks that others made.

        Parameters:
            name: Of a disk, which may come later: SPDK saves these calls before those that make disks. Not heeded.
        """
        result: bool = self.call(
            "bdev_examine",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_get_bdevs(
        self,
        *,
        name: str | None = None,
        timeout: int | None = None,
    ) -> list[types.Bdev]:
        """The disks, or one of them.

        Parameters:
            name: Name, alias or uuid of the only one that is wanted.
            timeout: Milliseconds to wait for the disk to appear.
        """
        result: list[types.Bdev] = self.call(
            "bdev_get_bdevs",
            _given(
                name=name,
                timeout=timeout,
            ),
        )
        return result

    def bdev_get_histogram(
        self,
        *,
        name: str,
    ) -> types.Histogram:
        """The latencies of a disk since they are recorded.

        Parameters:
            name: Name, alias or uuid.
        """
        result: types.Histogram = self.call(
            "bdev_get_histogram",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_get_histogram_borders(
        self,
        *,
        name: str,
        borders: Sequence[int],
    ) -> types.HistogramBorders:
        """How many requests of a disk took no longer than each of some times, since latencies are recorded.

        Parameters:
            name: Name, alias or uuid.
            borders: Microseconds, ascending.
        """
        result: types.HistogramBorders = self.call(
            "bdev_get_histogram_borders",
            _given(
                name=name,
                borders=borders,
            ),
        )
        return result

    def bdev_get_iostat(
        self,
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
        per_channel: bool | None = None,
        reset_mode: types.ResetMode | None = None,
    ) -> types.Iostat:
        """What disks have done: operations, bytes, latencies, errors.

        Parameters:
            name: What `names` was once.
            names: Names, aliases or uuids; by default all.
            per_channel: Of each open channel of the one disk that is named, instead of the disk.
            reset_mode: What is set to zero after it was read; by default nothing.
        """
        result: types.Iostat = self.call(
            "bdev_get_iostat",
            _given(
                name=name,
                names=names,
                per_channel=per_channel,
                reset_mode=reset_mode,
            ),
        )
        return result

    def bdev_iscsi_set_options(
        self,
        *,
        timeout_sec: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            timeout_sec: Without effect: `[30]`.
        """
        result: bool = self.call(
            "bdev_iscsi_set_options",
            _given(
                timeout_sec=timeout_sec,
            ),
        )
        return result

    def bdev_malloc_create(
        self,
        *,
        block_size: int,
        num_blocks: int,
        dif_is_head_of_md: bool | None = None,
        dif_pi_format: int | None = None,
        dif_type: int | None = None,
        md_interleave: bool | None = None,
        md_size: int | None = None,
        name: str | None = None,
        numa_id: int | None = None,
        optimal_io_boundary: int | None = None,
        physical_block_size: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk in memory.

        Parameters:
            block_size: Bytes.
            num_blocks: How many of these.
            dif_is_head_of_md: Not heeded.
            dif_pi_format: Not heeded.
            dif_type: 0, for blocks have no protection information.
            md_interleave: How metadata would be laid out that there is not.
            md_size: Metadata beside each block: 0, for there is none.
            name: By default the first of `Malloc0`, `Malloc1`, … that is free.
            numa_id: The kernel places memory.
            optimal_io_boundary: Blocks.
            physical_block_size: Bytes of a block of the store that it plays; by default as large as a block.
            uuid: By default a random one.
        """
        result: str = self.call(
            "bdev_malloc_create",
            _given(
                block_size=block_size,
                num_blocks=num_blocks,
                dif_is_head_of_md=dif_is_head_of_md,
                dif_pi_format=dif_pi_format,
                dif_type=dif_type,
                md_interleave=md_interleave,
                md_size=md_size,
                name=name,
                numa_id=numa_id,
                optimal_io_boundary=optimal_io_boundary,
                physical_block_size=physical_block_size,
                uuid=uuid,
            ),
        )
        return result

    def bdev_malloc_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_malloc_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_malloc_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_null_create(
        self,
        *,
        name: str,
        block_size: int,
        num_blocks: int,
        dif_is_head_of_md: bool | None = None,
        dif_pi_format: int | None = None,
        dif_type: int | None = None,
        md_size: int | None = None,
        optimal_write_size: int | None = None,
        physical_block_size: int | None = None,
        preferred_unmap_alignment: int | None = None,
        preferred_unmap_granularity: int | None = None,
        preferred_write_alignment: int | None = None,
        preferred_write_granularity: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk that keeps nothing.

        Parameters:
            name: The name that it is to have.
            block_size: Bytes.
            num_blocks: How many of these.
            dif_is_head_of_md: How metadata would be laid out that there is not.
            dif_pi_format: Not heeded.
            dif_type: 0, for blocks have no protection information.
            md_size: Metadata beside each block: 0, for there is none.
            optimal_write_size: Blocks.
            physical_block_size: Bytes of a block of the store that it plays; by default as large as a block.
            preferred_unmap_alignment: Blocks.
            preferred_unmap_granularity: Blocks.
            preferred_write_alignment: Blocks.
            preferred_write_granularity: Blocks. Told by `bdev_get_bdevs`, as the others: what is written in which pieces is all the same to this disk.
            uuid: By default a random one.
        """
        result: str = self.call(
            "bdev_null_create",
            _given(
                name=name,
                block_size=block_size,
                num_blocks=num_blocks,
                dif_is_head_of_md=dif_is_head_of_md,
                dif_pi_format=dif_pi_format,
                dif_type=dif_type,
                md_size=md_size,
                optimal_write_size=optimal_write_size,
                physical_block_size=physical_block_size,
                preferred_unmap_alignment=preferred_unmap_alignment,
                preferred_unmap_granularity=preferred_unmap_granularity,
                preferred_write_alignment=preferred_write_alignment,
                preferred_write_granularity=preferred_write_granularity,
                uuid=uuid,
            ),
        )
        return result

    def bdev_null_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_null_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_null_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_null_resize(
        self,
        *,
        name: str,
        new_size: int,
    ) -> bool:
        """Gives a disk that `bdev_null_create` made another size.

        Parameters:
            name: Name, alias or uuid.
            new_size: MiB.
        """
        result: bool = self.call(
            "bdev_null_resize",
            _given(
                name=name,
                new_size=new_size,
            ),
        )
        return result

    def bdev_nvme_get_controllers(
        self,
        *,
        name: str | None = None,
    ) -> list[dict[str, Any]]:
        """The NVMe controllers that we drive: none.

        Parameters:
            name: All, if none is named.
        """
        result: list[dict[str, Any]] = self.call(
            "bdev_nvme_get_controllers",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_nvme_set_hotplug(
        self,
        *,
        enable: bool,
        period_us: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            enable: Without effect: `[false]`.
            period_us: Without effect: `[100_000, 0]`.
        """
        result: bool = self.call(
            "bdev_nvme_set_hotplug",
            _given(
                enable=enable,
                period_us=period_us,
            ),
        )
        return result

    def bdev_nvme_set_options(
        self,
        *,
        action_on_timeout: str | None = None,
        allow_accel_sequence: bool | None = None,
        arbitration_burst: int | None = None,
        bdev_retry_count: int | None = None,
        ctrlr_loss_timeout_sec: int | None = None,
        delay_cmd_submit: bool | None = None,
        dhchap_dhgroups: Sequence[str] | None = None,
        dhchap_digests: Sequence[str] | None = None,
        disable_auto_failback: bool | None = None,
        enable_flush: bool | None = None,
        fast_io_fail_timeout_sec: int | None = None,
        generate_uuids: bool | None = None,
        high_priority_weight: int | None = None,
        io_path_stat: bool | None = None,
        io_queue_requests: int | None = None,
        keep_alive_timeout_ms: int | None = None,
        low_priority_weight: int | None = None,
        medium_priority_weight: int | None = None,
        multipath_opts: types.MultipathOptions | None = None,
        nvme_adminq_poll_period_us: int | None = None,
        nvme_error_stat: bool | None = None,
        nvme_ioq_poll_period_us: int | None = None,
        rdma_cm_event_timeout_ms: int | None = None,
        rdma_max_cq_size: int | None = None,
        rdma_srq_size: int | None = None,
        rdma_umr_per_io: bool | None = None,
        reconnect_delay_sec: int | None = None,
        tcp_connect_timeout_ms: int | None = None,
        timeout_admin_us: int | None = None,
        timeout_us: int | None = None,
        transport_ack_timeout: int | None = None,
        transport_retry_count: int | None = None,
        transport_tos: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            action_on_timeout: Without effect: `["none"]`.
            allow_accel_sequence: Without effect: `[false]`.
            arbitration_burst: Without effect: `[0]`.
            bdev_retry_count: Without effect: `[3]`.
            ctrlr_loss_timeout_sec: Without effect: `[0]`.
            delay_cmd_submit: Without effect: `[true]`.
            dhchap_dhgroups: Without effect: `[DHCHAP_DHGROUPS]`.
            dhchap_digests: Without effect: `[DHCHAP_DIGESTS]`.
            disable_auto_failback: Without effect: `[false]`.
            enable_flush: Without effect: `[false]`.
            fast_io_fail_timeout_sec: Without effect: `[0]`.
            generate_uuids: Without effect: `[false]`.
            high_priority_weight: Without effect: `[0]`.
            io_path_stat: Without effect: `[false]`.
            io_queue_requests: Without effect: `[0]`.
            keep_alive_timeout_ms: Without effect: `[10_000]`.
            low_priority_weight: Without effect: `[0]`.
            medium_priority_weight: Without effect: `[0]`.
            multipath_opts: Without effect: `[AsBuilt]`.
            nvme_adminq_poll_period_us: Without effect: `[10_000]`.
            nvme_error_stat: Without effect: `[false]`.
            nvme_ioq_poll_period_us: Without effect: `[0]`.
            rdma_cm_event_timeout_ms: Without effect: `[0]`.
            rdma_max_cq_size: Without effect: `[0]`.
            rdma_srq_size: Without effect: `[0]`.
            rdma_umr_per_io: Without effect: `[false]`.
            reconnect_delay_sec: Without effect: `[0]`.
            tcp_connect_timeout_ms: Without effect: `[0]`.
            timeout_admin_us: Without effect: `[0]`.
            timeout_us: Without effect: `[0]`.
            transport_ack_timeout: Without effect: `[0]`.
            transport_retry_count: Without effect: `[4]`.
            transport_tos: Without effect: `[0]`.
        """
        result: bool = self.call(
            "bdev_nvme_set_options",
            _given(
                action_on_timeout=action_on_timeout,
                allow_accel_sequence=allow_accel_sequence,
                arbitration_burst=arbitration_burst,
                bdev_retry_count=bdev_retry_count,
                ctrlr_loss_timeout_sec=ctrlr_loss_timeout_sec,
                delay_cmd_submit=delay_cmd_submit,
                dhchap_dhgroups=dhchap_dhgroups,
                dhchap_digests=dhchap_digests,
                disable_auto_failback=disable_auto_failback,
                enable_flush=enable_flush,
                fast_io_fail_timeout_sec=fast_io_fail_timeout_sec,
                generate_uuids=generate_uuids,
                high_priority_weight=high_priority_weight,
                io_path_stat=io_path_stat,
                io_queue_requests=io_queue_requests,
                keep_alive_timeout_ms=keep_alive_timeout_ms,
                low_priority_weight=low_priority_weight,
                medium_priority_weight=medium_priority_weight,
                multipath_opts=multipath_opts,
                nvme_adminq_poll_period_us=nvme_adminq_poll_period_us,
                nvme_error_stat=nvme_error_stat,
                nvme_ioq_poll_period_us=nvme_ioq_poll_period_us,
                rdma_cm_event_timeout_ms=rdma_cm_event_timeout_ms,
                rdma_max_cq_size=rdma_max_cq_size,
                rdma_srq_size=rdma_srq_size,
                rdma_umr_per_io=rdma_umr_per_io,
                reconnect_delay_sec=reconnect_delay_sec,
                tcp_connect_timeout_ms=tcp_connect_timeout_ms,
                timeout_admin_us=timeout_admin_us,
                timeout_us=timeout_us,
                transport_ack_timeout=transport_ack_timeout,
                transport_retry_count=transport_retry_count,
                transport_tos=transport_tos,
            ),
        )
        return result

    def bdev_passthru_create(
        self,
        *,
        name: str,
        base_bdev_name: str,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk that is another disk.

        Parameters:
            name: The name that it is to have.
            base_bdev_name: The other disk.
            uuid: By default one that follows from the other's.
        """
        result: str = self.call(
            "bdev_passthru_create",
            _given(
                name=name,
                base_bdev_name=base_bdev_name,
                uuid=uuid,
            ),
        )
        return result

    def bdev_passthru_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_passthru_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_passthru_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_qos_group_add_bdev(
        self,
        *,
        name: str,
        bdev_name: str,
    ) -> bool:
        """Puts a disk into a group, from whichever it is in.

        Parameters:
            name: The group.
            bdev_name: The disk: its name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_qos_group_add_bdev",
            _given(
                name=name,
                bdev_name=bdev_name,
            ),
        )
        return result

    def bdev_qos_group_create(
        self,
        *,
        name: str,
        parent: str | None = None,
    ) -> bool:
        """Makes a group of disks, which are to be limited together.

        Parameters:
            name: Its name.
            parent: The group that it is in; by default none.
        """
        result: bool = self.call(
            "bdev_qos_group_create",
            _given(
                name=name,
                parent=parent,
            ),
        )
        return result

    def bdev_qos_group_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Deletes a group in which there is nothing.

        Parameters:
            name: The group.
        """
        result: bool = self.call(
            "bdev_qos_group_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_qos_group_remove_bdev(
        self,
        *,
        name: str,
        bdev_name: str,
    ) -> bool:
        """Takes a disk out of a group.

        Parameters:
            name: The group.
            bdev_name: The disk: its name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_qos_group_remove_bdev",
            _given(
                name=name,
                bdev_name=bdev_name,
            ),
        )
        return result

    def bdev_qos_group_set_limit(
        self,
        *,
        name: str,
        burst_seconds: int | None = None,
        combined: bool | None = None,
        r_ios_per_sec: int | None = None,
        r_mbytes_per_sec: int | None = None,
        rw_ios_per_sec: int | None = None,
        rw_mbytes_per_sec: int | None = None,
        w_ios_per_sec: int | None = None,
        w_mbytes_per_sec: int | None = None,
    ) -> bool:
        """Limits what all disks of a group, and of the groups in it, do in a second together. What is not given stays as it is; 0 is no limit.

        Parameters:
            name: The disk: its name, alias or uuid. Or the group.
            burst_seconds: Ours: how many seconds' worth can be saved up while less is done.
            combined: Ours: a limit of requests and one of mebibytes are one, which requests of 4 KiB and of 4 MiB meet exactly, and others between.
            r_ios_per_sec: Ours: reads a second.
            r_mbytes_per_sec: Mebibytes read a second.
            rw_ios_per_sec: Requests a second.
            rw_mbytes_per_sec: Mebibytes a second.
            w_ios_per_sec: Ours: writes, and all else that is no read, a second.
            w_mbytes_per_sec: Mebibytes written a second.
        """
        result: bool = self.call(
            "bdev_qos_group_set_limit",
            _given(
                name=name,
                burst_seconds=burst_seconds,
                combined=combined,
                r_ios_per_sec=r_ios_per_sec,
                r_mbytes_per_sec=r_mbytes_per_sec,
                rw_ios_per_sec=rw_ios_per_sec,
                rw_mbytes_per_sec=rw_mbytes_per_sec,
                w_ios_per_sec=w_ios_per_sec,
                w_mbytes_per_sec=w_mbytes_per_sec,
            ),
        )
        return result

    def bdev_qos_groups_get(
        self,
        *,
        name: str | None = None,
    ) -> list[types.QosGroup]:
        """The groups, or one of them.

        Parameters:
            name: The only one that is wanted.
        """
        result: list[types.QosGroup] = self.call(
            "bdev_qos_groups_get",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_raid_set_options(
        self,
        *,
        process_max_bandwidth_mb_sec: int | None = None,
        process_window_size_kb: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            process_max_bandwidth_mb_sec: Without effect: `[0]`.
            process_window_size_kb: Without effect: `[1024]`.
        """
        result: bool = self.call(
            "bdev_raid_set_options",
            _given(
                process_max_bandwidth_mb_sec=process_max_bandwidth_mb_sec,
                process_window_size_kb=process_window_size_kb,
            ),
        )
        return result

    def bdev_reset(
        self,
        *,
        name: str,
    ) -> bool:
        """Aborts the requests that the disk's device holds, and goes on with those that came after.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_reset",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_reset_iostat(
        self,
        *,
        mode: types.ResetMode | None = None,
        name: str | None = None,
    ) -> bool:
        """Sets the statistics of a disk, or of all, to zero.

        Parameters:
            mode: By default all counts.
            name: Name, alias or uuid; by default all disks.
        """
        result: bool = self.call(
            "bdev_reset_iostat",
            _given(
                mode=mode,
                name=name,
            ),
        )
        return result

    def bdev_set_io_timeout(
        self,
        *,
        name: str,
        timeout_ms: int,
        action: types.TimeoutAction | None = None,
    ) -> bool:
        """Sets how long requests of a disk may take, and what becomes of those that take longer.

        Parameters:
            name: Name, alias or uuid.
            timeout_ms: Milliseconds; 0 for no limit.
            action: What becomes of those that take longer.
        """
        result: bool = self.call(
            "bdev_set_io_timeout",
            _given(
                name=name,
                timeout_ms=timeout_ms,
                action=action,
            ),
        )
        return result

    def bdev_set_options(
        self,
        *,
        bdev_auto_examine: bool | None = None,
        bdev_io_cache_size: int | None = None,
        bdev_io_pool_size: int | None = None,
        iobuf_large_cache_size: int | None = None,
        iobuf_small_cache_size: int | None = None,
    ) -> bool:
        """Checks its parameters, and does nothing: there are no pools to size.

        Parameters:
            bdev_auto_examine: Not heeded.
            bdev_io_cache_size: Not heeded.
            bdev_io_pool_size: Not heeded.
            iobuf_large_cache_size: Not heeded.
            iobuf_small_cache_size: Not heeded.
        """
        result: bool = self.call(
            "bdev_set_options",
            _given(
                bdev_auto_examine=bdev_auto_examine,
                bdev_io_cache_size=bdev_io_cache_size,
                bdev_io_pool_size=bdev_io_pool_size,
                iobuf_large_cache_size=iobuf_large_cache_size,
                iobuf_small_cache_size=iobuf_small_cache_size,
            ),
        )
        return result

    def bdev_set_qd_sampling_period(
        self,
        *,
        name: str,
        period: int,
    ) -> bool:
        """Has a disk's queue depth sampled, for `bdev_get_iostat`.

        Parameters:
            name: Name, alias or uuid.
            period: Microseconds; 0 ends it.
        """
        result: bool = self.call(
            "bdev_set_qd_sampling_period",
            _given(
                name=name,
                period=period,
            ),
        )
        return result

    def bdev_set_qos_limit(
        self,
        *,
        name: str,
        burst_seconds: int | None = None,
        combined: bool | None = None,
        r_ios_per_sec: int | None = None,
        r_mbytes_per_sec: int | None = None,
        rw_ios_per_sec: int | None = None,
        rw_mbytes_per_sec: int | None = None,
        w_ios_per_sec: int | None = None,
        w_mbytes_per_sec: int | None = None,
    ) -> bool:
        """Limits what a disk does in a second. What is not given stays as it is; 0 is no limit.

        Parameters:
            name: The disk: its name, alias or uuid. Or the group.
            burst_seconds: Ours: how many seconds' worth can be saved up while less is done.
            combined: Ours: a limit of requests and one of mebibytes are one, which requests of 4 KiB and of 4 MiB meet exactly, and others between.
            r_ios_per_sec: Ours: reads a second.
            r_mbytes_per_sec: Mebibytes read a second.
            rw_ios_per_sec: Requests a second.
            rw_mbytes_per_sec: Mebibytes a second.
            w_ios_per_sec: Ours: writes, and all else that is no read, a second.
            w_mbytes_per_sec: Mebibytes written a second.
        """
        result: bool = self.call(
            "bdev_set_qos_limit",
            _given(
                name=name,
                burst_seconds=burst_seconds,
                combined=combined,
                r_ios_per_sec=r_ios_per_sec,
                r_mbytes_per_sec=r_mbytes_per_sec,
                rw_ios_per_sec=rw_ios_per_sec,
                rw_mbytes_per_sec=rw_mbytes_per_sec,
                w_ios_per_sec=w_ios_per_sec,
                w_mbytes_per_sec=w_mbytes_per_sec,
            ),
        )
        return result

    def bdev_split_create(
        self,
        *,
        base_bdev: str,
        split_count: int,
        split_size_mb: int | None = None,
    ) -> list[str]:
        """Makes disks that are parts of another.

        Parameters:
            base_bdev: The other disk.
            split_count: Parts.
            split_size_mb: MiB in each part; by default, or if it is 0, as many as there is room for.
        """
        result: list[str] = self.call(
            "bdev_split_create",
            _given(
                base_bdev=base_bdev,
                split_count=split_count,
                split_size_mb=split_size_mb,
            ),
        )
        return result

    def bdev_split_delete(
        self,
        *,
        base_bdev: str,
    ) -> bool:
        """Removes all parts of a disk.

        Parameters:
            base_bdev: The other disk.
        """
        result: bool = self.call(
            "bdev_split_delete",
            _given(
                base_bdev=base_bdev,
            ),
        )
        return result

    def bdev_uring_create(
        self,
        *,
        name: str,
        filename: str,
        block_size: int | None = None,
        enospc: types.Enospc | None = None,
        fallocate: bool | None = None,
        lock: types.FileLock | None = None,
        nowait: bool | None = None,
        readonly: bool | None = None,
        size: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk in a file or block device.

        Parameters:
            name: The name that it is to have.
            filename: The file, or block device.
            block_size: By default 512 for a file, and what it says of itself for a block device.
            enospc: Ours: what becomes of writes when the store is full.
            fallocate: Kept, and without effect: holes are always punched where the file system can.
            lock: Ours: for how long the file is kept from others.
            nowait: Kept, and without effect: nothing here ever waits for the device.
            readonly: Whether writes are refused.
            size: Ours: bytes of the sparse file that is created if there is none, or an empty one. A file that has another size is refused.
            uuid: By default a random one.
        """
        result: str = self.call(
            "bdev_uring_create",
            _given(
                name=name,
                filename=filename,
                block_size=block_size,
                enospc=enospc,
                fallocate=fallocate,
                lock=lock,
                nowait=nowait,
                readonly=readonly,
                size=size,
                uuid=uuid,
            ),
        )
        return result

    def bdev_uring_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_uring_create` made; its file stays.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_uring_delete",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_uring_rescan(
        self,
        *,
        name: str,
    ) -> bool:
        """Has a disk that `bdev_uring_create` made take on the size that its file has now.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = self.call(
            "bdev_uring_rescan",
            _given(
                name=name,
            ),
        )
        return result

    def bdev_uring_resize(
        self,
        *,
        name: str,
        size: int,
        shrink: bool | None = None,
    ) -> bool:
        """Changes the size of a disk and its file.

        Parameters:
            name: Name, alias or uuid.
            size: Bytes.
            shrink: Cut off what lies behind, if it is smaller than it was.
        """
        result: bool = self.call(
            "bdev_uring_resize",
            _given(
                name=name,
                size=size,
                shrink=shrink,
            ),
        )
        return result

    def bdev_virtio_blk_set_hotplug(
        self,
        *,
        enable: bool,
        period_us: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            enable: Without effect: `[false]`.
            period_us: Without effect: `[100_000, 0]`.
        """
        result: bool = self.call(
            "bdev_virtio_blk_set_hotplug",
            _given(
                enable=enable,
                period_us=period_us,
            ),
        )
        return result

    def bdev_wait_for_examine(self) -> bool:
        """Waits until new disks are examined, which they are at once."""
        result: bool = self.call("bdev_wait_for_examine")
        return result

    def framework_disable_cpumask_locks(self) -> bool:
        """Without effect: cores are never locked."""
        result: bool = self.call("framework_disable_cpumask_locks")
        return result

    def framework_get_config(
        self,
        *,
        name: str,
        with_batches: bool | None = None,
    ) -> list[types.Call]:
        """The calls that configure one subsystem as it is now.

        Parameters:
            name: The subsystem: `bdev` or `vhost_blk`.
            with_batches: Not heeded.
        """
        result: list[types.Call] = self.call(
            "framework_get_config",
            _given(
                name=name,
                with_batches=with_batches,
            ),
        )
        return result

    def framework_get_governor(self) -> dict[str, Any]:
        """Who sets cores' frequencies: not we."""
        result: dict[str, Any] = self.call("framework_get_governor")
        return result

    def framework_get_pci_devices(self) -> list[dict[str, Any]]:
        """The PCI devices that we drive: none."""
        result: list[dict[str, Any]] = self.call("framework_get_pci_devices")
        return result

    def framework_get_reactors(self) -> types.Reactors:
        """The reactors: where they run, and how busy they are."""
        result: types.Reactors = self.call("framework_get_reactors")
        return result

    def framework_get_scheduler(self) -> types.Scheduler:
        """The scheduler, which says which queue runs on which reactor."""
        result: types.Scheduler = self.call("framework_get_scheduler")
        return result

    def framework_get_subsystems(self) -> list[types.SubsystemInfo]:
        """The parts of the daemon that have a configuration, each after those that it depends on."""
        result: list[types.SubsystemInfo] = self.call("framework_get_subsystems")
        return result

    def framework_monitor_context_switch(
        self,
        *,
        enabled: bool | None = None,
    ) -> types.ContextSwitchMonitor:
        """Has the log tell when the kernel takes a core away from its reactor, and tells whether it does.

        Parameters:
            enabled: By default it stays as it is.
        """
        result: types.ContextSwitchMonitor = self.call(
            "framework_monitor_context_switch",
            _given(
                enabled=enabled,
            ),
        )
        return result

    def framework_set_scheduler(
        self,
        *,
        name: str,
        core_busy: int | None = None,
        core_limit: int | None = None,
        load_limit: int | None = None,
        mappings: str | None = None,
        period: int | None = None,
    ) -> bool:
        """Chooses the scheduler: with `static` queues stay where they are, with `dynamic` they go where there is time for them, and together on few reactors when idle.

        Parameters:
            name: `static` or `dynamic`.
            core_busy: From a core that is as busy as that, in percent, queues are moved away: by default 95. Of `dynamic`.
            core_limit: No core is filled over that, in percent: by default 80. Of `dynamic`.
            load_limit: A queue that is less busy than that, in percent of a core, is nearly idle: by default 20. Of `dynamic`.
            mappings: Not heeded.
            period: Microseconds between two decisions: by default 1000000, at least 10000; 0 leaves it as it is.
        """
        result: bool = self.call(
            "framework_set_scheduler",
            _given(
                name=name,
                core_busy=core_busy,
                core_limit=core_limit,
                load_limit=load_limit,
                mappings=mappings,
                period=period,
            ),
        )
        return result

    def framework_start_init(self) -> bool:
        """Completes start-up, where the daemon waits for it (`--wait-for-rpc`)."""
        result: bool = self.call("framework_start_init")
        return result

    def framework_wait_init(self) -> bool:
        """Waits until start-up is complete."""
        result: bool = self.call("framework_wait_init")
        return result

    def fsdev_set_opts(
        self,
        *,
        fsdev_io_pool_size: int,
        fsdev_io_cache_size: int,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            fsdev_io_pool_size: Without effect: `[65_535]`.
            fsdev_io_cache_size: Without effect: `[256]`.
        """
        result: bool = self.call(
            "fsdev_set_opts",
            _given(
                fsdev_io_pool_size=fsdev_io_pool_size,
                fsdev_io_cache_size=fsdev_io_cache_size,
            ),
        )
        return result

    def iobuf_get_stats(self) -> list[types.IobufStats]:
        """How often a buffer was waited for: never, as there are no pools."""
        result: list[types.IobufStats] = self.call("iobuf_get_stats")
        return result

    def iobuf_set_options(
        self,
        *,
        enable_numa: bool | None = None,
        large_bufsize: int | None = None,
        large_pool_count: int | None = None,
        small_bufsize: int | None = None,
        small_pool_count: int | None = None,
    ) -> bool:
        """Checks its parameters, and does nothing: there are no pools to size.

        Parameters:
            enable_numa: Not heeded.
            large_bufsize: Not heeded.
            large_pool_count: Not heeded.
            small_bufsize: Not heeded.
            small_pool_count: Not heeded.
        """
        result: bool = self.call(
            "iobuf_set_options",
            _given(
                enable_numa=enable_numa,
                large_bufsize=large_bufsize,
                large_pool_count=large_pool_count,
                small_bufsize=small_bufsize,
                small_pool_count=small_pool_count,
            ),
        )
        return result

    def iscsi_set_options(
        self,
        *,
        allow_duplicated_isid: bool | None = None,
        auth_file: str | None = None,
        chap_group: int | None = None,
        data_out_pool_size: int | None = None,
        default_time2retain: int | None = None,
        default_time2wait: int | None = None,
        disable_chap: bool | None = None,
        error_recovery_level: int | None = None,
        first_burst_length: int | None = None,
        immediate_data: bool | None = None,
        immediate_data_pool_size: int | None = None,
        max_connections_per_session: int | None = None,
        max_large_datain_per_connection: int | None = None,
        max_queue_depth: int | None = None,
        max_r2t_per_connection: int | None = None,
        max_sessions: int | None = None,
        mutual_chap: bool | None = None,
        node_base: str | None = None,
        nop_in_interval: int | None = None,
        nop_timeout: int | None = None,
        pdu_pool_size: int | None = None,
        require_chap: bool | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            allow_duplicated_isid: Without effect: `[false]`.
            auth_file: Without effect: `[""]`.
            chap_group: Without effect: `[0]`.
            data_out_pool_size: Without effect: `[2048]`.
            default_time2retain: Without effect: `[20]`.
            default_time2wait: Without effect: `[2]`.
            disable_chap: Without effect: `[false]`.
            error_recovery_level: Without effect: `[0]`.
            first_burst_length: Without effect: `[8192]`.
            immediate_data: Without effect: `[true]`.
            immediate_data_pool_size: Without effect: `[16_384]`.
            max_connections_per_session: Without effect: `[2]`.
            max_large_datain_per_connection: Without effect: `[64]`.
            max_queue_depth: Without effect: `[64]`.
            max_r2t_per_connection: Without effect: `[4]`.
            max_sessions: Without effect: `[128]`.
            mutual_chap: Without effect: `[false]`.
            node_base: Without effect: `["iqn.2016-06.io.spdk"]`.
            nop_in_interval: Without effect: `[30]`.
            nop_timeout: Without effect: `[60]`.
            pdu_pool_size: Without effect: `[36_864]`.
            require_chap: Without effect: `[false]`.
        """
        result: bool = self.call(
            "iscsi_set_options",
            _given(
                allow_duplicated_isid=allow_duplicated_isid,
                auth_file=auth_file,
                chap_group=chap_group,
                data_out_pool_size=data_out_pool_size,
                default_time2retain=default_time2retain,
                default_time2wait=default_time2wait,
                disable_chap=disable_chap,
                error_recovery_level=error_recovery_level,
                first_burst_length=first_burst_length,
                immediate_data=immediate_data,
                immediate_data_pool_size=immediate_data_pool_size,
                max_connections_per_session=max_connections_per_session,
                max_large_datain_per_connection=max_large_datain_per_connection,
                max_queue_depth=max_queue_depth,
                max_r2t_per_connection=max_r2t_per_connection,
                max_sessions=max_sessions,
                mutual_chap=mutual_chap,
                node_base=node_base,
                nop_in_interval=nop_in_interval,
                nop_timeout=nop_timeout,
                pdu_pool_size=pdu_pool_size,
                require_chap=require_chap,
            ),
        )
        return result

    def keyring_get_keys(self) -> list[dict[str, Any]]:
        """The keys that are kept: none."""
        result: list[dict[str, Any]] = self.call("keyring_get_keys")
        return result

    def keyring_linux_set_options(
        self,
        *,
        enable: bool | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            enable: Without effect: `[false]`.
        """
        result: bool = self.call(
            "keyring_linux_set_options",
            _given(
                enable=enable,
            ),
        )
        return result

    def load_config(
        self,
        *,
        subsystems: Sequence[types.SavedSubsystem],
    ) -> bool:
        """Makes the calls that `save_config` gave, in their order, up to the first that fails: what was made before it stays.

        Parameters:
            subsystems: What `save_config` gave.
        """
        result: bool = self.call(
            "load_config",
            _given(
                subsystems=subsystems,
            ),
        )
        return result

    def log_clear_flag(
        self,
        *,
        flag: str,
    ) -> bool:
        """Ends what `log_set_flag` began.

        Parameters:
            flag: One of those that `log_get_flags` gives, or `all`, or what several of them begin with: `vhost`.
        """
        result: bool = self.call(
            "log_clear_flag",
            _given(
                flag=flag,
            ),
        )
        return result

    def log_enable_timestamps(
        self,
        *,
        enabled: bool,
    ) -> bool:
        """Whether the log's lines for people have their time; what a journal takes never has.

        Parameters:
            enabled: From now on.
        """
        result: bool = self.call(
            "log_enable_timestamps",
            _given(
                enabled=enabled,
            ),
        )
        return result

    def log_get_flags(self) -> dict[str, Any]:
        """The parts of the daemon, and of which all is told."""
        result: dict[str, Any] = self.call("log_get_flags")
        return result

    def log_get_level(self) -> types.PrintLevel:
        """The same as `log_get_print_level`: there is one log."""
        result: types.PrintLevel = self.call("log_get_level")
        return result

    def log_get_print_level(self) -> types.PrintLevel:
        """What the log tells."""
        result: types.PrintLevel = self.call("log_get_print_level")
        return result

    def log_set_flag(
        self,
        *,
        flag: str,
    ) -> bool:
        """Has the log tell all of a part of the daemon, whatever the level.

        Parameters:
            flag: One of those that `log_get_flags` gives, or `all`, or what several of them begin with: `vhost`.
        """
        result: bool = self.call(
            "log_set_flag",
            _given(
                flag=flag,
            ),
        )
        return result

    def log_set_level(
        self,
        *,
        level: types.PrintLevel,
    ) -> bool:
        """The same as `log_set_print_level`: there is one log.

        Parameters:
            level: From now on; what is more detailed is not told.
        """
        result: bool = self.call(
            "log_set_level",
            _given(
                level=level,
            ),
        )
        return result

    def log_set_print_level(
        self,
        *,
        level: types.PrintLevel,
    ) -> bool:
        """Changes what the log tells.

        Parameters:
            level: From now on; what is more detailed is not told.
        """
        result: bool = self.call(
            "log_set_print_level",
            _given(
                level=level,
            ),
        )
        return result

    def notify_get_notifications(
        self,
        *,
        id: int | None = None,
        max: int | None = None,
    ) -> list[types.Event]:
        """What became of the disks: the latest events, oldest first.

        Parameters:
            id: The first that is wanted: one more than the last that was seen.
            max: By default all.
        """
        result: list[types.Event] = self.call(
            "notify_get_notifications",
            _given(
                id=id,
                max=max,
            ),
        )
        return result

    def notify_get_types(self) -> list[types.EventType]:
        """The types of events that there are."""
        result: list[types.EventType] = self.call("notify_get_types")
        return result

    def nvmf_set_config(
        self,
        *,
        admin_cmd_passthru: types.AdminPassthru | None = None,
        dhchap_dhgroups: Sequence[str] | None = None,
        dhchap_digests: Sequence[str] | None = None,
        discovery_filter: str | None = None,
        discovery_filters: Sequence[str] | None = None,
        dup_host_policy: str | None = None,
        poll_groups_mask: str | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            admin_cmd_passthru: Without effect: `[AsBuilt]`.
            dhchap_dhgroups: Without effect: `[DHCHAP_DHGROUPS]`.
            dhchap_digests: Without effect: `[DHCHAP_DIGESTS]`.
            discovery_filter: Without effect: `["match_any"]`.
            discovery_filters: Without effect: `[NO_FILTERS]`.
            dup_host_policy: Without effect: `["allow"]`.
            poll_groups_mask: Without effect: `[""]`.
        """
        result: bool = self.call(
            "nvmf_set_config",
            _given(
                admin_cmd_passthru=admin_cmd_passthru,
                dhchap_dhgroups=dhchap_dhgroups,
                dhchap_digests=dhchap_digests,
                discovery_filter=discovery_filter,
                discovery_filters=discovery_filters,
                dup_host_policy=dup_host_policy,
                poll_groups_mask=poll_groups_mask,
            ),
        )
        return result

    def nvmf_set_crdt(
        self,
        *,
        crdt1: int | None = None,
        crdt2: int | None = None,
        crdt3: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            crdt1: Without effect: `[0]`.
            crdt2: Without effect: `[0]`.
            crdt3: Without effect: `[0]`.
        """
        result: bool = self.call(
            "nvmf_set_crdt",
            _given(
                crdt1=crdt1,
                crdt2=crdt2,
                crdt3=crdt3,
            ),
        )
        return result

    def nvmf_set_max_subsystems(
        self,
        *,
        max_subsystems: int,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            max_subsystems: Without effect: `[1024, 0]`.
        """
        result: bool = self.call(
            "nvmf_set_max_subsystems",
            _given(
                max_subsystems=max_subsystems,
            ),
        )
        return result

    def rpc_get_methods(
        self,
        *,
        current: bool | None = None,
        include_aliases: bool | None = None,
    ) -> list[str]:
        """The names of all methods.

        Parameters:
            current: Only those that may be called now.
            include_aliases: Also deprecated names, of which there are none.
        """
        result: list[str] = self.call(
            "rpc_get_methods",
            _given(
                current=current,
                include_aliases=include_aliases,
            ),
        )
        return result

    def save_config(self) -> types.SavedConfig:
        """The calls that configure the daemon as it is now, for `load_config` or a file."""
        result: types.SavedConfig = self.call("save_config")
        return result

    def scsi_get_devices(self) -> list[types.ScsiDevice]:
        """The targets of all controllers that have a disk, as `vhost_get_controllers` numbers and names them."""
        result: list[types.ScsiDevice] = self.call("scsi_get_devices")
        return result

    def sock_get_default_impl(self) -> types.SockImpl:
        """Whose sockets are used, where RPC is served by HTTP: the kernel's."""
        result: types.SockImpl = self.call("sock_get_default_impl")
        return result

    def sock_impl_set_options(
        self,
        *,
        impl_name: str,
        enable_ktls: bool | None = None,
        enable_placement_id: int | None = None,
        enable_quickack: bool | None = None,
        enable_recv_pipe: bool | None = None,
        enable_zerocopy_send_client: bool | None = None,
        enable_zerocopy_send_server: bool | None = None,
        recv_buf_size: int | None = None,
        send_buf_size: int | None = None,
        tls_version: int | None = None,
        zerocopy_threshold: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            impl_name: Without effect: `["posix", "ssl", "uring"]`.
            enable_ktls: Without effect: `[false]`.
            enable_placement_id: Without effect: `[0]`.
            enable_quickack: Without effect: `[false]`.
            enable_recv_pipe: Without effect: `[true]`.
            enable_zerocopy_send_client: Without effect: `[false]`.
            enable_zerocopy_send_server: Without effect: `[true, false]`.
            recv_buf_size: Without effect: `[2_097_152, 4096]`.
            send_buf_size: Without effect: `[2_097_152, 4096]`.
            tls_version: Without effect: `[0]`.
            zerocopy_threshold: Without effect: `[0]`.
        """
        result: bool = self.call(
            "sock_impl_set_options",
            _given(
                impl_name=impl_name,
                enable_ktls=enable_ktls,
                enable_placement_id=enable_placement_id,
                enable_quickack=enable_quickack,
                enable_recv_pipe=enable_recv_pipe,
                enable_zerocopy_send_client=enable_zerocopy_send_client,
                enable_zerocopy_send_server=enable_zerocopy_send_server,
                recv_buf_size=recv_buf_size,
                send_buf_size=send_buf_size,
                tls_version=tls_version,
                zerocopy_threshold=zerocopy_threshold,
            ),
        )
        return result

    def sock_set_default_impl(
        self,
        *,
        impl_name: str,
    ) -> bool:
        """Chooses whose sockets are used: there are the kernel's, `posix`.

        Parameters:
            impl_name: `posix`.
        """
        result: bool = self.call(
            "sock_set_default_impl",
            _given(
                impl_name=impl_name,
            ),
        )
        return result

    def spdk_get_version(self) -> types.Version:
        """The version of the daemon."""
        result: types.Version = self.call("spdk_get_version")
        return result

    def spdk_kill_instance(
        self,
        *,
        sig_name: types.Signal,
    ) -> bool:
        """Sends a signal to the daemon: SIGTERM ends it in good order.

        Parameters:
            sig_name: Which.
        """
        result: bool = self.call(
            "spdk_kill_instance",
            _given(
                sig_name=sig_name,
            ),
        )
        return result

    def thread_get_io_channels(self) -> types.IoChannels:
        """The disks that the threads on all reactors have open, each with the number of its channels."""
        result: types.IoChannels = self.call("thread_get_io_channels")
        return result

    def thread_get_pollers(self) -> types.Pollers:
        """What the threads on all reactors poll: queues, and what runs at a period."""
        result: types.Pollers = self.call("thread_get_pollers")
        return result

    def thread_get_stats(self) -> types.Threads:
        """The threads on all reactors, and how busy they are."""
        result: types.Threads = self.call("thread_get_stats")
        return result

    def thread_set_cpumask(
        self,
        *,
        id: int,
        cpumask: str,
    ) -> bool:
        """Says on which cores a thread may run, and moves it there while its machine's I/O goes on.

        Parameters:
            id: The thread, as `thread_get_stats` gives it.
            cpumask: Where it may run.
        """
        result: bool = self.call(
            "thread_set_cpumask",
            _given(
                id=id,
                cpumask=cpumask,
            ),
        )
        return result

    def trace_clear(self) -> bool:
        """Forgets what has happened to requests until now."""
        result: bool = self.call("trace_clear")
        return result

    def trace_clear_tpoint_mask(
        self,
        *,
        name: str,
        tpoint_mask: int,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
            tpoint_mask: A bit for each point.
        """
        result: bool = self.call(
            "trace_clear_tpoint_mask",
            _given(
                name=name,
                tpoint_mask=tpoint_mask,
            ),
        )
        return result

    def trace_disable_tpoint_group(
        self,
        *,
        name: str,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
        """
        result: bool = self.call(
            "trace_disable_tpoint_group",
            _given(
                name=name,
            ),
        )
        return result

    def trace_enable_tpoint_group(
        self,
        *,
        name: str,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
        """
        result: bool = self.call(
            "trace_enable_tpoint_group",
            _given(
                name=name,
            ),
        )
        return result

    def trace_get_info(self) -> types.TraceInfo:
        """The groups of trace points, and where the trace is: not in shared memory."""
        result: types.TraceInfo = self.call("trace_get_info")
        return result

    def trace_get_tpoint_group_mask(self) -> types.TraceGroups:
        """The groups of trace points: the layers that a request passes."""
        result: types.TraceGroups = self.call("trace_get_tpoint_group_mask")
        return result

    def trace_set_tpoint_mask(
        self,
        *,
        name: str,
        tpoint_mask: int,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
            tpoint_mask: A bit for each point.
        """
        result: bool = self.call(
            "trace_set_tpoint_mask",
            _given(
                name=name,
                tpoint_mask=tpoint_mask,
            ),
        )
        return result

    def vhost_controller_set_coalescing(
        self,
        *,
        ctrlr: str,
        delay_base_us: int,
        iops_threshold: int,
    ) -> bool:
        """Keeps by how much SPDK would delay signals to a machine. They are not delayed: they are given as the machine's driver asks for them.

        Parameters:
            ctrlr: The controller.
            delay_base_us: Microseconds at most. Kept and told, without effect.
            iops_threshold: Requests a second from which on signals would be delayed. Kept and told, without effect.
        """
        result: bool = self.call(
            "vhost_controller_set_coalescing",
            _given(
                ctrlr=ctrlr,
                delay_base_us=delay_base_us,
                iops_threshold=iops_threshold,
            ),
        )
        return result

    def vhost_create_blk_controller(
        self,
        *,
        ctrlr: str,
        dev_name: str,
        connect: str | None = None,
        cpumask: str | None = None,
        exclusive: bool | None = None,
        num_queues: int | None = None,
        packed_ring: bool | None = None,
        readonly: bool | None = None,
        socket_group: str | None = None,
        socket_mode: str | None = None,
        socket_owner: str | None = None,
        transport: str | None = None,
    ) -> bool:
        """Makes a controller: a socket through which a virtual machine reaches a disk.

        Parameters:
            ctrlr: The name that it is to have, and its socket.
            dev_name: The disk: name, alias or uuid.
            connect: Ours: the machine's socket, which to connect to instead of listening.
            cpumask: The cores to serve it on; by default any.
            exclusive: Ours: refuse a disk that others have open, unless all of them only read.
            num_queues: Ours: the most queues that a machine can have.
            packed_ring: Not heeded: packed rings are always offered, and the machine chooses.
            readonly: Whether the machine may only read.
            socket_group: Ours.
            socket_mode: Ours: permissions in octal digits; if not given, 660 with `socket_group`, and 600 otherwise.
            socket_owner: Ours.
            transport: `vhost_user_blk`, which is the default.
        """
        result: bool = self.call(
            "vhost_create_blk_controller",
            _given(
                ctrlr=ctrlr,
                dev_name=dev_name,
                connect=connect,
                cpumask=cpumask,
                exclusive=exclusive,
                num_queues=num_queues,
                packed_ring=packed_ring,
                readonly=readonly,
                socket_group=socket_group,
                socket_mode=socket_mode,
                socket_owner=socket_owner,
                transport=transport,
            ),
        )
        return result

    def vhost_create_scsi_controller(
        self,
        *,
        ctrlr: str,
        connect: str | None = None,
        cpumask: str | None = None,
        delay: bool | None = None,
        num_queues: int | None = None,
        socket_group: str | None = None,
        socket_mode: str | None = None,
        socket_owner: str | None = None,
        transport_id: str | None = None,
    ) -> bool:
        """Makes a controller: a socket through which a virtual machine reaches disks that may come and go.

        Parameters:
            ctrlr: Its name, and its socket's.
            connect: Ours: the machine's socket, which to connect to instead of listening.
            cpumask: Cores whose reactors may serve its queues; all if not given.
            delay: Its socket is made by `vhost_start_scsi_controller` only.
            num_queues: Ours: the most queues for commands that a machine can have.
            socket_group: Ours: the socket's group.
            socket_mode: Ours: permissions in octal digits; if not given, 660 with `socket_group`, and 600 otherwise.
            socket_owner: Ours: the socket's owner.
            transport_id: Ours: what disks know it by when its machine reserves them, as `naa.` and 16 hexadecimal digits, the first of them 2, 3 or 5. By default it is made of the controller's name.
        """
        result: bool = self.call(
            "vhost_create_scsi_controller",
            _given(
                ctrlr=ctrlr,
                connect=connect,
                cpumask=cpumask,
                delay=delay,
                num_queues=num_queues,
                socket_group=socket_group,
                socket_mode=socket_mode,
                socket_owner=socket_owner,
                transport_id=transport_id,
            ),
        )
        return result

    def vhost_delete_controller(
        self,
        *,
        ctrlr: str,
    ) -> bool:
        """Removes a controller.

        Parameters:
            ctrlr: Its name.
        """
        result: bool = self.call(
            "vhost_delete_controller",
            _given(
                ctrlr=ctrlr,
            ),
        )
        return result

    def vhost_get_controllers(
        self,
        *,
        name: str | None = None,
    ) -> list[types.VhostController]:
        """The controllers, or one of them.

        Parameters:
            name: The only one that is wanted.
        """
        result: list[types.VhostController] = self.call(
            "vhost_get_controllers",
            _given(
                name=name,
            ),
        )
        return result

    def vhost_scsi_controller_add_target(
        self,
        *,
        ctrlr: str,
        scsi_target_num: int,
        bdev_name: str,
        exclusive: bool | None = None,
    ) -> int:
        """Gives a disk to a controller's target, and tells the machine. The result is the target's number.

        Parameters:
            ctrlr: The controller.
            scsi_target_num: 0 to 7, or -1: the first that has no disk.
            bdev_name: The disk: its name, alias or uuid.
            exclusive: Ours: refuse a disk that others have open.
        """
        result: int = self.call(
            "vhost_scsi_controller_add_target",
            _given(
                ctrlr=ctrlr,
                scsi_target_num=scsi_target_num,
                bdev_name=bdev_name,
                exclusive=exclusive,
            ),
        )
        return result

    def vhost_scsi_controller_remove_target(
        self,
        *,
        ctrlr: str,
        scsi_target_num: int,
    ) -> bool:
        """Takes the disk of a controller's target away, whatever the machine does, and tells the machine.

        Parameters:
            ctrlr: The controller.
            scsi_target_num: 0 to 7.
        """
        result: bool = self.call(
            "vhost_scsi_controller_remove_target",
            _given(
                ctrlr=ctrlr,
                scsi_target_num=scsi_target_num,
            ),
        )
        return result

    def vhost_start_scsi_controller(
        self,
        *,
        ctrlr: str,
    ) -> bool:
        """Makes the socket of a controller that was made with `delay`.

        Parameters:
            ctrlr: Its name.
        """
        result: bool = self.call(
            "vhost_start_scsi_controller",
            _given(
                ctrlr=ctrlr,
            ),
        )
        return result

    def virtio_blk_get_transports(
        self,
        *,
        name: str | None = None,
    ) -> list[types.VirtioBlkTransport]:
        """The ways by which machines reach controllers.

        Parameters:
            name: The only one that is wanted.
        """
        result: list[types.VirtioBlkTransport] = self.call(
            "virtio_blk_get_transports",
            _given(
                name=name,
            ),
        )
        return result


class AsyncMethods(ABC):
    """All methods, each to be awaited."""

    @abstractmethod
    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Calls any method by its name."""

    async def accel_crypto_keys_get(
        self,
        *,
        key_name: str | None = None,
    ) -> list[dict[str, Any]]:
        """The keys for encryption: none.

        Parameters:
            key_name: All, if none is named.
        """
        result: list[dict[str, Any]] = await self.call(
            "accel_crypto_keys_get",
            _given(
                key_name=key_name,
            ),
        )
        return result

    async def accel_get_module_info(self) -> list[dict[str, Any]]:
        """The engines that compute on data: none."""
        result: list[dict[str, Any]] = await self.call("accel_get_module_info")
        return result

    async def accel_get_opc_assignments(self) -> dict[str, Any]:
        """Which engine computes what: none."""
        result: dict[str, Any] = await self.call("accel_get_opc_assignments")
        return result

    async def accel_get_stats(self) -> types.AccelStats:
        """What engines have computed: nothing."""
        result: types.AccelStats = await self.call("accel_get_stats")
        return result

    async def accel_set_options(
        self,
        *,
        buf_count: int | None = None,
        large_cache_size: int | None = None,
        sequence_count: int | None = None,
        small_cache_size: int | None = None,
        task_count: int | None = None,
    ) -> bool:
        """Checks its parameters, and does nothing: there are no pools to size.

        Parameters:
            buf_count: Not heeded.
            large_cache_size: Not heeded.
            sequence_count: Not heeded.
            small_cache_size: Not heeded.
            task_count: Not heeded.
        """
        result: bool = await self.call(
            "accel_set_options",
            _given(
                buf_count=buf_count,
                large_cache_size=large_cache_size,
                sequence_count=sequence_count,
                small_cache_size=small_cache_size,
                task_count=task_count,
            ),
        )
        return result

    async def aryk_absent_get(self) -> list[types.Absent]:
        """What is configured and not there: disks that wait for the disk that they are made of, what could not be made again after a restart, and why."""
        result: list[types.Absent] = await self.call("aryk_absent_get")
        return result

    async def aryk_core_add(
        self,
        *,
        core: int,
    ) -> bool:
        """Starts a reactor on another core, for the queues to come and those that are moved there.

        Parameters:
            core: The core's number.
        """
        result: bool = await self.call(
            "aryk_core_add",
            _given(
                core=core,
            ),
        )
        return result

    async def aryk_core_remove(
        self,
        *,
        core: int,
    ) -> bool:
        """Moves all that is on a core's reactor to the others, while I/O goes on, and ends the reactor.

        Parameters:
            core: The core's number.
        """
        result: bool = await self.call(
            "aryk_core_remove",
            _given(
                core=core,
            ),
        )
        return result

    async def aryk_file_systems_get(
        self,
        *,
        disk: str | None = None,
    ) -> list[types.FileSystem]:
        """What disks in files promise, and what their file systems have for that.

        Parameters:
            disk: Only the one that this disk is in: name, alias or uuid.
        """
        result: list[types.FileSystem] = await self.call(
            "aryk_file_systems_get",
            _given(
                disk=disk,
            ),
        )
        return result

    async def aryk_latency_get(
        self,
        *,
        name: str,
    ) -> types.Latencies:
        """How long a disk's requests took, layer by layer.

        Parameters:
            name: Name, alias or uuid.
        """
        result: types.Latencies = await self.call(
            "aryk_latency_get",
            _given(
                name=name,
            ),
        )
        return result

    async def aryk_stats_get(self) -> types.Counts:
        """What all disks, groups, controllers and reactors have counted, in brief."""
        result: types.Counts = await self.call("aryk_stats_get")
        return result

    async def aryk_trace_get(
        self,
        *,
        count: int | None = None,
    ) -> types.Trace:
        """The last that happened to requests on all reactors, oldest first.

        Parameters:
            count: Records at most, the latest; 256 by default. Each reactor keeps its last 4095.
        """
        result: types.Trace = await self.call(
            "aryk_trace_get",
            _given(
                count=count,
            ),
        )
        return result

    async def bdev_aio_create(
        self,
        *,
        name: str,
        filename: str,
        block_size: int | None = None,
        enospc: types.Enospc | None = None,
        fallocate: bool | None = None,
        lock: types.FileLock | None = None,
        nowait: bool | None = None,
        readonly: bool | None = None,
        size: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk in a file or block device: the same as `bdev_uring_create`.

        Parameters:
            name: The name that it is to have.
            filename: The file, or block device.
            block_size: By default 512 for a file, and what it says of itself for a block device.
            enospc: Ours: what becomes of writes when the store is full.
            fallocate: Kept, and without effect: holes are always punched where the file system can.
            lock: Ours: for how long the file is kept from others.
            nowait: Kept, and without effect: nothing here ever waits for the device.
            readonly: Whether writes are refused.
            size: Ours: bytes of the sparse file that is created if there is none, or an empty one. A file that has another size is refused.
            uuid: By default a random one.
        """
        result: str = await self.call(
            "bdev_aio_create",
            _given(
                name=name,
                filename=filename,
                block_size=block_size,
                enospc=enospc,
                fallocate=fallocate,
                lock=lock,
                nowait=nowait,
                readonly=readonly,
                size=size,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_aio_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_aio_create` made; its file stays.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_aio_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_aio_rescan(
        self,
        *,
        name: str,
    ) -> bool:
        """Has a disk that `bdev_aio_create` made take on the size that its file has now.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_aio_rescan",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_delay_create(
        self,
        *,
        name: str,
        base_bdev_name: str,
        avg_read_latency: int,
        p99_read_latency: int,
        avg_write_latency: int,
        p99_write_latency: int,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk that is another, later.

        Parameters:
            name: The name that it is to have.
            base_bdev_name: The other disk.
            avg_read_latency: What most reads take longer.
            p99_read_latency: What one read of a hundred takes longer.
            avg_write_latency: What most writes take longer.
            p99_write_latency: What one write of a hundred takes longer.
            uuid: By default one that follows from the other's.
        """
        result: str = await self.call(
            "bdev_delay_create",
            _given(
                name=name,
                base_bdev_name=base_bdev_name,
                avg_read_latency=avg_read_latency,
                p99_read_latency=p99_read_latency,
                avg_write_latency=avg_write_latency,
                p99_write_latency=p99_write_latency,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_delay_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_delay_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_delay_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_delay_update_latency(
        self,
        *,
        delay_bdev_name: str,
        latency_type: types.LatencyType,
        latency_us: int,
    ) -> bool:
        """Changes one latency of a disk that `bdev_delay_create` made.

        Parameters:
            delay_bdev_name: Name, alias or uuid.
            latency_type: Which.
            latency_us: Microseconds.
        """
        result: bool = await self.call(
            "bdev_delay_update_latency",
            _given(
                delay_bdev_name=delay_bdev_name,
                latency_type=latency_type,
                latency_us=latency_us,
            ),
        )
        return result

    async def bdev_enable_histogram(
        self,
        *,
        name: str,
        enable: bool,
        granularity: int | None = None,
        max_nsec: int | None = None,
        min_nsec: int | None = None,
        opc: str | None = None,
    ) -> bool:
        """Has the latencies of a disk recorded, or no longer.

        Parameters:
            name: Name, alias or uuid.
            enable: Whether they are recorded from now on.
            granularity: Taken and not heeded: `bdev_get_histogram` tells the one there is.
            max_nsec: Nanoseconds above which they are all one; by default two minutes.
            min_nsec: Nanoseconds below which they are all one; by default 1000.
            opc: Of all operations, if none is named.
        """
        result: bool = await self.call(
            "bdev_enable_histogram",
            _given(
                name=name,
                enable=enable,
                granularity=granularity,
                max_nsec=max_nsec,
                min_nsec=min_nsec,
                opc=opc,
            ),
        )
        return result

    async def bdev_error_create(
        self,
        *,
        base_name: str,
        uuid: str | None = None,
    ) -> bool:
        """Makes a disk that is another, named as that with `EE_` before it, and fails when it is told to.

        Parameters:
            base_name: The other disk.
            uuid: By default one that follows from the other's.
        """
        result: bool = await self.call(
            "bdev_error_create",
            _given(
                base_name=base_name,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_error_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_error_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_error_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_error_inject_error(
        self,
        *,
        name: str,
        io_type: types.IoType,
        error_type: types.ErrorType,
        corrupt_offset: int | None = None,
        corrupt_value: int | None = None,
        num: int | None = None,
        queue_depth: int | None = None,
    ) -> bool:
        """Tells a disk that `bdev_error_create` made which requests are to fail, and how.

        Parameters:
            name: Name, alias or uuid.
            io_type: Which requests; `clear` ends all failures.
            error_type: How they fail.
            corrupt_offset: With `corrupt_data`: the byte in each request.
            corrupt_value: With `corrupt_data`: what becomes of it.
            num: Requests that it befalls.
            queue_depth: Only when so many others are in flight.
        """
        result: bool = await self.call(
            "bdev_error_inject_error",
            _given(
                name=name,
                io_type=io_type,
                error_type=error_type,
                corrupt_offset=corrupt_offset,
                corrupt_value=corrupt_value,
                num=num,
                queue_depth=queue_depth,
            ),
        )
        return result

    async def bdev_error_resume_pending(
        self,
        *,
        name: str,
    ) -> bool:
        """Has the requests go on that a disk that `bdev_error_create` made holds, and ends that it holds any.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_error_resume_pending",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_examine(
        self,
        *,
        name: str,
    ) -> bool:
        """Checks its parameters, and does nothing: no module looks for its own on disks that others made.

        Parameters:
            name: Of a disk, which may come later: SPDK saves these calls before those that make disks. Not heeded.
        """
        result: bool = await self.call(
            "bdev_examine",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_get_bdevs(
        self,
        *,
        name: str | None = None,
        timeout: int | None = None,
    ) -> list[types.Bdev]:
        """The disks, or one of them.

        Parameters:
            name: Name, alias or uuid of the only one that is wanted.
            timeout: Milliseconds to wait for the disk to appear.
        """
        result: list[types.Bdev] = await self.call(
            "bdev_get_bdevs",
            _given(
                name=name,
                timeout=timeout,
            ),
        )
        return result

    async def bdev_get_histogram(
        self,
        *,
        name: str,
    ) -> types.Histogram:
        """The latencies of a disk since they are recorded.

        Parameters:
            name: Name, alias or uuid.
        """
        result: types.Histogram = await self.call(
            "bdev_get_histogram",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_get_histogram_borders(
        self,
        *,
        name: str,
        borders: Sequence[int],
    ) -> types.HistogramBorders:
        """How many requests of a disk took no longer than each of some times, since latencies are recorded.

        Parameters:
            name: Name, alias or uuid.
            borders: Microseconds, ascending.
        """
        result: types.HistogramBorders = await self.call(
            "bdev_get_histogram_borders",
            _given(
                name=name,
                borders=borders,
            ),
        )
        return result

    async def bdev_get_iostat(
        self,
        *,
        name: str | None = None,
        names: Sequence[str] | None = None,
        per_channel: bool | None = None,
        reset_mode: types.ResetMode | None = None,
    ) -> types.Iostat:
        """What disks have done: operations, bytes, latencies, errors.

        Parameters:
            name: What `names` was once.
            names: Names, aliases or uuids; by default all.
            per_channel: Of each open channel of the one disk that is named, instead of the disk.
            reset_mode: What is set to zero after it was read; by default nothing.
        """
        result: types.Iostat = await self.call(
            "bdev_get_iostat",
            _given(
                name=name,
                names=names,
                per_channel=per_channel,
                reset_mode=reset_mode,
            ),
        )
        return result

    async def bdev_iscsi_set_options(
        self,
        *,
        timeout_sec: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            timeout_sec: Without effect: `[30]`.
        """
        result: bool = await self.call(
            "bdev_iscsi_set_options",
            _given(
                timeout_sec=timeout_sec,
            ),
        )
        return result

    async def bdev_malloc_create(
        self,
        *,
        block_size: int,
        num_blocks: int,
        dif_is_head_of_md: bool | None = None,
        dif_pi_format: int | None = None,
        dif_type: int | None = None,
        md_interleave: bool | None = None,
        md_size: int | None = None,
        name: str | None = None,
        numa_id: int | None = None,
        optimal_io_boundary: int | None = None,
        physical_block_size: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk in memory.

        Parameters:
            block_size: Bytes.
            num_blocks: How many of these.
            dif_is_head_of_md: Not heeded.
            dif_pi_format: Not heeded.
            dif_type: 0, for blocks have no protection information.
            md_interleave: How metadata would be laid out that there is not.
            md_size: Metadata beside each block: 0, for there is none.
            name: By default the first of `Malloc0`, `Malloc1`, … that is free.
            numa_id: The kernel places memory.
            optimal_io_boundary: Blocks.
            physical_block_size: Bytes of a block of the store that it plays; by default as large as a block.
            uuid: By default a random one.
        """
        result: str = await self.call(
            "bdev_malloc_create",
            _given(
                block_size=block_size,
                num_blocks=num_blocks,
                dif_is_head_of_md=dif_is_head_of_md,
                dif_pi_format=dif_pi_format,
                dif_type=dif_type,
                md_interleave=md_interleave,
                md_size=md_size,
                name=name,
                numa_id=numa_id,
                optimal_io_boundary=optimal_io_boundary,
                physical_block_size=physical_block_size,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_malloc_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_malloc_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_malloc_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_null_create(
        self,
        *,
        name: str,
        block_size: int,
        num_blocks: int,
        dif_is_head_of_md: bool | None = None,
        dif_pi_format: int | None = None,
        dif_type: int | None = None,
        md_size: int | None = None,
        optimal_write_size: int | None = None,
        physical_block_size: int | None = None,
        preferred_unmap_alignment: int | None = None,
        preferred_unmap_granularity: int | None = None,
        preferred_write_alignment: int | None = None,
        preferred_write_granularity: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk that keeps nothing.

        Parameters:
            name: The name that it is to have.
            block_size: Bytes.
            num_blocks: How many of these.
            dif_is_head_of_md: How metadata would be laid out that there is not.
            dif_pi_format: Not heeded.
            dif_type: 0, for blocks have no protection information.
            md_size: Metadata beside each block: 0, for there is none.
            optimal_write_size: Blocks.
            physical_block_size: Bytes of a block of the store that it plays; by default as large as a block.
            preferred_unmap_alignment: Blocks.
            preferred_unmap_granularity: Blocks.
            preferred_write_alignment: Blocks.
            preferred_write_granularity: Blocks. Told by `bdev_get_bdevs`, as the others: what is written in which pieces is all the same to this disk.
            uuid: By default a random one.
        """
        result: str = await self.call(
            "bdev_null_create",
            _given(
                name=name,
                block_size=block_size,
                num_blocks=num_blocks,
                dif_is_head_of_md=dif_is_head_of_md,
                dif_pi_format=dif_pi_format,
                dif_type=dif_type,
                md_size=md_size,
                optimal_write_size=optimal_write_size,
                physical_block_size=physical_block_size,
                preferred_unmap_alignment=preferred_unmap_alignment,
                preferred_unmap_granularity=preferred_unmap_granularity,
                preferred_write_alignment=preferred_write_alignment,
                preferred_write_granularity=preferred_write_granularity,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_null_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_null_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_null_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_null_resize(
        self,
        *,
        name: str,
        new_size: int,
    ) -> bool:
        """Gives a disk that `bdev_null_create` made another size.

        Parameters:
            name: Name, alias or uuid.
            new_size: MiB.
        """
        result: bool = await self.call(
            "bdev_null_resize",
            _given(
                name=name,
                new_size=new_size,
            ),
        )
        return result

    async def bdev_nvme_get_controllers(
        self,
        *,
        name: str | None = None,
    ) -> list[dict[str, Any]]:
        """The NVMe controllers that we drive: none.

        Parameters:
            name: All, if none is named.
        """
        result: list[dict[str, Any]] = await self.call(
            "bdev_nvme_get_controllers",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_nvme_set_hotplug(
        self,
        *,
        enable: bool,
        period_us: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            enable: Without effect: `[false]`.
            period_us: Without effect: `[100_000, 0]`.
        """
        result: bool = await self.call(
            "bdev_nvme_set_hotplug",
            _given(
                enable=enable,
                period_us=period_us,
            ),
        )
        return result

    async def bdev_nvme_set_options(
        self,
        *,
        action_on_timeout: str | None = None,
        allow_accel_sequence: bool | None = None,
        arbitration_burst: int | None = None,
        bdev_retry_count: int | None = None,
        ctrlr_loss_timeout_sec: int | None = None,
        delay_cmd_submit: bool | None = None,
        dhchap_dhgroups: Sequence[str] | None = None,
        dhchap_digests: Sequence[str] | None = None,
        disable_auto_failback: bool | None = None,
        enable_flush: bool | None = None,
        fast_io_fail_timeout_sec: int | None = None,
        generate_uuids: bool | None = None,
        high_priority_weight: int | None = None,
        io_path_stat: bool | None = None,
        io_queue_requests: int | None = None,
        keep_alive_timeout_ms: int | None = None,
        low_priority_weight: int | None = None,
        medium_priority_weight: int | None = None,
        multipath_opts: types.MultipathOptions | None = None,
        nvme_adminq_poll_period_us: int | None = None,
        nvme_error_stat: bool | None = None,
        nvme_ioq_poll_period_us: int | None = None,
        rdma_cm_event_timeout_ms: int | None = None,
        rdma_max_cq_size: int | None = None,
        rdma_srq_size: int | None = None,
        rdma_umr_per_io: bool | None = None,
        reconnect_delay_sec: int | None = None,
        tcp_connect_timeout_ms: int | None = None,
        timeout_admin_us: int | None = None,
        timeout_us: int | None = None,
        transport_ack_timeout: int | None = None,
        transport_retry_count: int | None = None,
        transport_tos: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            action_on_timeout: Without effect: `["none"]`.
            allow_accel_sequence: Without effect: `[false]`.
            arbitration_burst: Without effect: `[0]`.
            bdev_retry_count: Without effect: `[3]`.
            ctrlr_loss_timeout_sec: Without effect: `[0]`.
            delay_cmd_submit: Without effect: `[true]`.
            dhchap_dhgroups: Without effect: `[DHCHAP_DHGROUPS]`.
            dhchap_digests: Without effect: `[DHCHAP_DIGESTS]`.
            disable_auto_failback: Without effect: `[false]`.
            enable_flush: Without effect: `[false]`.
            fast_io_fail_timeout_sec: Without effect: `[0]`.
            generate_uuids: Without effect: `[false]`.
            high_priority_weight: Without effect: `[0]`.
            io_path_stat: Without effect: `[false]`.
            io_queue_requests: Without effect: `[0]`.
            keep_alive_timeout_ms: Without effect: `[10_000]`.
            low_priority_weight: Without effect: `[0]`.
            medium_priority_weight: Without effect: `[0]`.
            multipath_opts: Without effect: `[AsBuilt]`.
            nvme_adminq_poll_period_us: Without effect: `[10_000]`.
            nvme_error_stat: Without effect: `[false]`.
            nvme_ioq_poll_period_us: Without effect: `[0]`.
            rdma_cm_event_timeout_ms: Without effect: `[0]`.
            rdma_max_cq_size: Without effect: `[0]`.
            rdma_srq_size: Without effect: `[0]`.
            rdma_umr_per_io: Without effect: `[false]`.
            reconnect_delay_sec: Without effect: `[0]`.
            tcp_connect_timeout_ms: Without effect: `[0]`.
            timeout_admin_us: Without effect: `[0]`.
            timeout_us: Without effect: `[0]`.
            transport_ack_timeout: Without effect: `[0]`.
            transport_retry_count: Without effect: `[4]`.
            transport_tos: Without effect: `[0]`.
        """
        result: bool = await self.call(
            "bdev_nvme_set_options",
            _given(
                action_on_timeout=action_on_timeout,
                allow_accel_sequence=allow_accel_sequence,
                arbitration_burst=arbitration_burst,
                bdev_retry_count=bdev_retry_count,
                ctrlr_loss_timeout_sec=ctrlr_loss_timeout_sec,
                delay_cmd_submit=delay_cmd_submit,
                dhchap_dhgroups=dhchap_dhgroups,
                dhchap_digests=dhchap_digests,
                disable_auto_failback=disable_auto_failback,
                enable_flush=enable_flush,
                fast_io_fail_timeout_sec=fast_io_fail_timeout_sec,
                generate_uuids=generate_uuids,
                high_priority_weight=high_priority_weight,
                io_path_stat=io_path_stat,
                io_queue_requests=io_queue_requests,
                keep_alive_timeout_ms=keep_alive_timeout_ms,
                low_priority_weight=low_priority_weight,
                medium_priority_weight=medium_priority_weight,
                multipath_opts=multipath_opts,
                nvme_adminq_poll_period_us=nvme_adminq_poll_period_us,
                nvme_error_stat=nvme_error_stat,
                nvme_ioq_poll_period_us=nvme_ioq_poll_period_us,
                rdma_cm_event_timeout_ms=rdma_cm_event_timeout_ms,
                rdma_max_cq_size=rdma_max_cq_size,
                rdma_srq_size=rdma_srq_size,
                rdma_umr_per_io=rdma_umr_per_io,
                reconnect_delay_sec=reconnect_delay_sec,
                tcp_connect_timeout_ms=tcp_connect_timeout_ms,
                timeout_admin_us=timeout_admin_us,
                timeout_us=timeout_us,
                transport_ack_timeout=transport_ack_timeout,
                transport_retry_count=transport_retry_count,
                transport_tos=transport_tos,
            ),
        )
        return result

    async def bdev_passthru_create(
        self,
        *,
        name: str,
        base_bdev_name: str,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk that is another disk.

        Parameters:
            name: The name that it is to have.
            base_bdev_name: The other disk.
            uuid: By default one that follows from the other's.
        """
        result: str = await self.call(
            "bdev_passthru_create",
            _given(
                name=name,
                base_bdev_name=base_bdev_name,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_passthru_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_passthru_create` made.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_passthru_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_qos_group_add_bdev(
        self,
        *,
        name: str,
        bdev_name: str,
    ) -> bool:
        """Puts a disk into a group, from whichever it is in.

        Parameters:
            name: The group.
            bdev_name: The disk: its name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_qos_group_add_bdev",
            _given(
                name=name,
                bdev_name=bdev_name,
            ),
        )
        return result

    async def bdev_qos_group_create(
        self,
        *,
        name: str,
        parent: str | None = None,
    ) -> bool:
        """Makes a group of disks, which are to be limited together.

        Parameters:
            name: Its name.
            parent: The group that it is in; by default none.
        """
        result: bool = await self.call(
            "bdev_qos_group_create",
            _given(
                name=name,
                parent=parent,
            ),
        )
        return result

    async def bdev_qos_group_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Deletes a group in which there is nothing.

        Parameters:
            name: The group.
        """
        result: bool = await self.call(
            "bdev_qos_group_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_qos_group_remove_bdev(
        self,
        *,
        name: str,
        bdev_name: str,
    ) -> bool:
        """Takes a disk out of a group.

        Parameters:
            name: The group.
            bdev_name: The disk: its name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_qos_group_remove_bdev",
            _given(
                name=name,
                bdev_name=bdev_name,
            ),
        )
        return result

    async def bdev_qos_group_set_limit(
        self,
        *,
        name: str,
        burst_seconds: int | None = None,
        combined: bool | None = None,
        r_ios_per_sec: int | None = None,
        r_mbytes_per_sec: int | None = None,
        rw_ios_per_sec: int | None = None,
        rw_mbytes_per_sec: int | None = None,
        w_ios_per_sec: int | None = None,
        w_mbytes_per_sec: int | None = None,
    ) -> bool:
        """Limits what all disks of a group, and of the groups in it, do in a second together. What is not given stays as it is; 0 is no limit.

        Parameters:
            name: The disk: its name, alias or uuid. Or the group.
            burst_seconds: Ours: how many seconds' worth can be saved up while less is done.
            combined: Ours: a limit of requests and one of mebibytes are one, which requests of 4 KiB and of 4 MiB meet exactly, and others between.
            r_ios_per_sec: Ours: reads a second.
            r_mbytes_per_sec: Mebibytes read a second.
            rw_ios_per_sec: Requests a second.
            rw_mbytes_per_sec: Mebibytes a second.
            w_ios_per_sec: Ours: writes, and all else that is no read, a second.
            w_mbytes_per_sec: Mebibytes written a second.
        """
        result: bool = await self.call(
            "bdev_qos_group_set_limit",
            _given(
                name=name,
                burst_seconds=burst_seconds,
                combined=combined,
                r_ios_per_sec=r_ios_per_sec,
                r_mbytes_per_sec=r_mbytes_per_sec,
                rw_ios_per_sec=rw_ios_per_sec,
                rw_mbytes_per_sec=rw_mbytes_per_sec,
                w_ios_per_sec=w_ios_per_sec,
                w_mbytes_per_sec=w_mbytes_per_sec,
            ),
        )
        return result

    async def bdev_qos_groups_get(
        self,
        *,
        name: str | None = None,
    ) -> list[types.QosGroup]:
        """The groups, or one of them.

        Parameters:
            name: The only one that is wanted.
        """
        result: list[types.QosGroup] = await self.call(
            "bdev_qos_groups_get",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_raid_set_options(
        self,
        *,
        process_max_bandwidth_mb_sec: int | None = None,
        process_window_size_kb: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            process_max_bandwidth_mb_sec: Without effect: `[0]`.
            process_window_size_kb: Without effect: `[1024]`.
        """
        result: bool = await self.call(
            "bdev_raid_set_options",
            _given(
                process_max_bandwidth_mb_sec=process_max_bandwidth_mb_sec,
                process_window_size_kb=process_window_size_kb,
            ),
        )
        return result

    async def bdev_reset(
        self,
        *,
        name: str,
    ) -> bool:
        """Aborts the requests that the disk's device holds, and goes on with those that came after.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_reset",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_reset_iostat(
        self,
        *,
        mode: types.ResetMode | None = None,
        name: str | None = None,
    ) -> bool:
        """Sets the statistics of a disk, or of all, to zero.

        Parameters:
            mode: By default all counts.
            name: Name, alias or uuid; by default all disks.
        """
        result: bool = await self.call(
            "bdev_reset_iostat",
            _given(
                mode=mode,
                name=name,
            ),
        )
        return result

    async def bdev_set_io_timeout(
        self,
        *,
        name: str,
        timeout_ms: int,
        action: types.TimeoutAction | None = None,
    ) -> bool:
        """Sets how long requests of a disk may take, and what becomes of those that take longer.

        Parameters:
            name: Name, alias or uuid.
            timeout_ms: Milliseconds; 0 for no limit.
            action: What becomes of those that take longer.
        """
        result: bool = await self.call(
            "bdev_set_io_timeout",
            _given(
                name=name,
                timeout_ms=timeout_ms,
                action=action,
            ),
        )
        return result

    async def bdev_set_options(
        self,
        *,
        bdev_auto_examine: bool | None = None,
        bdev_io_cache_size: int | None = None,
        bdev_io_pool_size: int | None = None,
        iobuf_large_cache_size: int | None = None,
        iobuf_small_cache_size: int | None = None,
    ) -> bool:
        """Checks its parameters, and does nothing: there are no pools to size.

        Parameters:
            bdev_auto_examine: Not heeded.
            bdev_io_cache_size: Not heeded.
            bdev_io_pool_size: Not heeded.
            iobuf_large_cache_size: Not heeded.
            iobuf_small_cache_size: Not heeded.
        """
        result: bool = await self.call(
            "bdev_set_options",
            _given(
                bdev_auto_examine=bdev_auto_examine,
                bdev_io_cache_size=bdev_io_cache_size,
                bdev_io_pool_size=bdev_io_pool_size,
                iobuf_large_cache_size=iobuf_large_cache_size,
                iobuf_small_cache_size=iobuf_small_cache_size,
            ),
        )
        return result

    async def bdev_set_qd_sampling_period(
        self,
        *,
        name: str,
        period: int,
    ) -> bool:
        """Has a disk's queue depth sampled, for `bdev_get_iostat`.

        Parameters:
            name: Name, alias or uuid.
            period: Microseconds; 0 ends it.
        """
        result: bool = await self.call(
            "bdev_set_qd_sampling_period",
            _given(
                name=name,
                period=period,
            ),
        )
        return result

    async def bdev_set_qos_limit(
        self,
        *,
        name: str,
        burst_seconds: int | None = None,
        combined: bool | None = None,
        r_ios_per_sec: int | None = None,
        r_mbytes_per_sec: int | None = None,
        rw_ios_per_sec: int | None = None,
        rw_mbytes_per_sec: int | None = None,
        w_ios_per_sec: int | None = None,
        w_mbytes_per_sec: int | None = None,
    ) -> bool:
        """Limits what a disk does in a second. What is not given stays as it is; 0 is no limit.

        Parameters:
            name: The disk: its name, alias or uuid. Or the group.
            burst_seconds: Ours: how many seconds' worth can be saved up while less is done.
            combined: Ours: a limit of requests and one of mebibytes are one, which requests of 4 KiB and of 4 MiB meet exactly, and others between.
            r_ios_per_sec: Ours: reads a second.
            r_mbytes_per_sec: Mebibytes read a second.
            rw_ios_per_sec: Requests a second.
            rw_mbytes_per_sec: Mebibytes a second.
            w_ios_per_sec: Ours: writes, and all else that is no read, a second.
            w_mbytes_per_sec: Mebibytes written a second.
        """
        result: bool = await self.call(
            "bdev_set_qos_limit",
            _given(
                name=name,
                burst_seconds=burst_seconds,
                combined=combined,
                r_ios_per_sec=r_ios_per_sec,
                r_mbytes_per_sec=r_mbytes_per_sec,
                rw_ios_per_sec=rw_ios_per_sec,
                rw_mbytes_per_sec=rw_mbytes_per_sec,
                w_ios_per_sec=w_ios_per_sec,
                w_mbytes_per_sec=w_mbytes_per_sec,
            ),
        )
        return result

    async def bdev_split_create(
        self,
        *,
        base_bdev: str,
        split_count: int,
        split_size_mb: int | None = None,
    ) -> list[str]:
        """Makes disks that are parts of another.

        Parameters:
            base_bdev: The other disk.
            split_count: Parts.
            split_size_mb: MiB in each part; by default, or if it is 0, as many as there is room for.
        """
        result: list[str] = await self.call(
            "bdev_split_create",
            _given(
                base_bdev=base_bdev,
                split_count=split_count,
                split_size_mb=split_size_mb,
            ),
        )
        return result

    async def bdev_split_delete(
        self,
        *,
        base_bdev: str,
    ) -> bool:
        """Removes all parts of a disk.

        Parameters:
            base_bdev: The other disk.
        """
        result: bool = await self.call(
            "bdev_split_delete",
            _given(
                base_bdev=base_bdev,
            ),
        )
        return result

    async def bdev_uring_create(
        self,
        *,
        name: str,
        filename: str,
        block_size: int | None = None,
        enospc: types.Enospc | None = None,
        fallocate: bool | None = None,
        lock: types.FileLock | None = None,
        nowait: bool | None = None,
        readonly: bool | None = None,
        size: int | None = None,
        uuid: str | None = None,
    ) -> str:
        """Makes a disk in a file or block device.

        Parameters:
            name: The name that it is to have.
            filename: The file, or block device.
            block_size: By default 512 for a file, and what it says of itself for a block device.
            enospc: Ours: what becomes of writes when the store is full.
            fallocate: Kept, and without effect: holes are always punched where the file system can.
            lock: Ours: for how long the file is kept from others.
            nowait: Kept, and without effect: nothing here ever waits for the device.
            readonly: Whether writes are refused.
            size: Ours: bytes of the sparse file that is created if there is none, or an empty one. A file that has another size is refused.
            uuid: By default a random one.
        """
        result: str = await self.call(
            "bdev_uring_create",
            _given(
                name=name,
                filename=filename,
                block_size=block_size,
                enospc=enospc,
                fallocate=fallocate,
                lock=lock,
                nowait=nowait,
                readonly=readonly,
                size=size,
                uuid=uuid,
            ),
        )
        return result

    async def bdev_uring_delete(
        self,
        *,
        name: str,
    ) -> bool:
        """Removes a disk that `bdev_uring_create` made; its file stays.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_uring_delete",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_uring_rescan(
        self,
        *,
        name: str,
    ) -> bool:
        """Has a disk that `bdev_uring_create` made take on the size that its file has now.

        Parameters:
            name: Name, alias or uuid.
        """
        result: bool = await self.call(
            "bdev_uring_rescan",
            _given(
                name=name,
            ),
        )
        return result

    async def bdev_uring_resize(
        self,
        *,
        name: str,
        size: int,
        shrink: bool | None = None,
    ) -> bool:
        """Changes the size of a disk and its file.

        Parameters:
            name: Name, alias or uuid.
            size: Bytes.
            shrink: Cut off what lies behind, if it is smaller than it was.
        """
        result: bool = await self.call(
            "bdev_uring_resize",
            _given(
                name=name,
                size=size,
                shrink=shrink,
            ),
        )
        return result

    async def bdev_virtio_blk_set_hotplug(
        self,
        *,
        enable: bool,
        period_us: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            enable: Without effect: `[false]`.
            period_us: Without effect: `[100_000, 0]`.
        """
        result: bool = await self.call(
            "bdev_virtio_blk_set_hotplug",
            _given(
                enable=enable,
                period_us=period_us,
            ),
        )
        return result

    async def bdev_wait_for_examine(self) -> bool:
        """Waits until new disks are examined, which they are at once."""
        result: bool = await self.call("bdev_wait_for_examine")
        return result

    async def framework_disable_cpumask_locks(self) -> bool:
        """Without effect: cores are never locked."""
        result: bool = await self.call("framework_disable_cpumask_locks")
        return result

    async def framework_get_config(
        self,
        *,
        name: str,
        with_batches: bool | None = None,
    ) -> list[types.Call]:
        """The calls that configure one subsystem as it is now.

        Parameters:
            name: The subsystem: `bdev` or `vhost_blk`.
            with_batches: Not heeded.
        """
        result: list[types.Call] = await self.call(
            "framework_get_config",
            _given(
                name=name,
                with_batches=with_batches,
            ),
        )
        return result

    async def framework_get_governor(self) -> dict[str, Any]:
        """Who sets cores' frequencies: not we."""
        result: dict[str, Any] = await self.call("framework_get_governor")
        return result

    async def framework_get_pci_devices(self) -> list[dict[str, Any]]:
        """The PCI devices that we drive: none."""
        result: list[dict[str, Any]] = await self.call("framework_get_pci_devices")
        return result

    async def framework_get_reactors(self) -> types.Reactors:
        """The reactors: where they run, and how busy they are."""
        result: types.Reactors = await self.call("framework_get_reactors")
        return result

    async def framework_get_scheduler(self) -> types.Scheduler:
        """The scheduler, which says which queue runs on which reactor."""
        result: types.Scheduler = await self.call("framework_get_scheduler")
        return result

    async def framework_get_subsystems(self) -> list[types.SubsystemInfo]:
        """The parts of the daemon that have a configuration, each after those that it depends on."""
        result: list[types.SubsystemInfo] = await self.call("framework_get_subsystems")
        return result

    async def framework_monitor_context_switch(
        self,
        *,
        enabled: bool | None = None,
    ) -> types.ContextSwitchMonitor:
        """Has the log tell when the kernel takes a core away from its reactor, and tells whether it does.

        Parameters:
            enabled: By default it stays as it is.
        """
        result: types.ContextSwitchMonitor = await self.call(
            "framework_monitor_context_switch",
            _given(
                enabled=enabled,
            ),
        )
        return result

    async def framework_set_scheduler(
        self,
        *,
        name: str,
        core_busy: int | None = None,
        core_limit: int | None = None,
        load_limit: int | None = None,
        mappings: str | None = None,
        period: int | None = None,
    ) -> bool:
        """Chooses the scheduler: with `static` queues stay where they are, with `dynamic` they go where there is time for them, and together on few reactors when idle.

        Parameters:
            name: `static` or `dynamic`.
            core_busy: From a core that is as busy as that, in percent, queues are moved away: by default 95. Of `dynamic`.
            core_limit: No core is filled over that, in percent: by default 80. Of `dynamic`.
            load_limit: A queue that is less busy than that, in percent of a core, is nearly idle: by default 20. Of `dynamic`.
            mappings: Not heeded.
            period: Microseconds between two decisions: by default 1000000, at least 10000; 0 leaves it as it is.
        """
        result: bool = await self.call(
            "framework_set_scheduler",
            _given(
                name=name,
                core_busy=core_busy,
                core_limit=core_limit,
                load_limit=load_limit,
                mappings=mappings,
                period=period,
            ),
        )
        return result

    async def framework_start_init(self) -> bool:
        """Completes start-up, where the daemon waits for it (`--wait-for-rpc`)."""
        result: bool = await self.call("framework_start_init")
        return result

    async def framework_wait_init(self) -> bool:
        """Waits until start-up is complete."""
        result: bool = await self.call("framework_wait_init")
        return result

    async def fsdev_set_opts(
        self,
        *,
        fsdev_io_pool_size: int,
        fsdev_io_cache_size: int,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            fsdev_io_pool_size: Without effect: `[65_535]`.
            fsdev_io_cache_size: Without effect: `[256]`.
        """
        result: bool = await self.call(
            "fsdev_set_opts",
            _given(
                fsdev_io_pool_size=fsdev_io_pool_size,
                fsdev_io_cache_size=fsdev_io_cache_size,
            ),
        )
        return result

    async def iobuf_get_stats(self) -> list[types.IobufStats]:
        """How often a buffer was waited for: never, as there are no pools."""
        result: list[types.IobufStats] = await self.call("iobuf_get_stats")
        return result

    async def iobuf_set_options(
        self,
        *,
        enable_numa: bool | None = None,
        large_bufsize: int | None = None,
        large_pool_count: int | None = None,
        small_bufsize: int | None = None,
        small_pool_count: int | None = None,
    ) -> bool:
        """Checks its parameters, and does nothing: there are no pools to size.

        Parameters:
            enable_numa: Not heeded.
            large_bufsize: Not heeded.
            large_pool_count: Not heeded.
            small_bufsize: Not heeded.
            small_pool_count: Not heeded.
        """
        result: bool = await self.call(
            "iobuf_set_options",
            _given(
                enable_numa=enable_numa,
                large_bufsize=large_bufsize,
                large_pool_count=large_pool_count,
                small_bufsize=small_bufsize,
                small_pool_count=small_pool_count,
            ),
        )
        return result

    async def iscsi_set_options(
        self,
        *,
        allow_duplicated_isid: bool | None = None,
        auth_file: str | None = None,
        chap_group: int | None = None,
        data_out_pool_size: int | None = None,
        default_time2retain: int | None = None,
        default_time2wait: int | None = None,
        disable_chap: bool | None = None,
        error_recovery_level: int | None = None,
        first_burst_length: int | None = None,
        immediate_data: bool | None = None,
        immediate_data_pool_size: int | None = None,
        max_connections_per_session: int | None = None,
        max_large_datain_per_connection: int | None = None,
        max_queue_depth: int | None = None,
        max_r2t_per_connection: int | None = None,
        max_sessions: int | None = None,
        mutual_chap: bool | None = None,
        node_base: str | None = None,
        nop_in_interval: int | None = None,
        nop_timeout: int | None = None,
        pdu_pool_size: int | None = None,
        require_chap: bool | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            allow_duplicated_isid: Without effect: `[false]`.
            auth_file: Without effect: `[""]`.
            chap_group: Without effect: `[0]`.
            data_out_pool_size: Without effect: `[2048]`.
            default_time2retain: Without effect: `[20]`.
            default_time2wait: Without effect: `[2]`.
            disable_chap: Without effect: `[false]`.
            error_recovery_level: Without effect: `[0]`.
            first_burst_length: Without effect: `[8192]`.
            immediate_data: Without effect: `[true]`.
            immediate_data_pool_size: Without effect: `[16_384]`.
            max_connections_per_session: Without effect: `[2]`.
            max_large_datain_per_connection: Without effect: `[64]`.
            max_queue_depth: Without effect: `[64]`.
            max_r2t_per_connection: Without effect: `[4]`.
            max_sessions: Without effect: `[128]`.
            mutual_chap: Without effect: `[false]`.
            node_base: Without effect: `["iqn.2016-06.io.spdk"]`.
            nop_in_interval: Without effect: `[30]`.
            nop_timeout: Without effect: `[60]`.
            pdu_pool_size: Without effect: `[36_864]`.
            require_chap: Without effect: `[false]`.
        """
        result: bool = await self.call(
            "iscsi_set_options",
            _given(
                allow_duplicated_isid=allow_duplicated_isid,
                auth_file=auth_file,
                chap_group=chap_group,
                data_out_pool_size=data_out_pool_size,
                default_time2retain=default_time2retain,
                default_time2wait=default_time2wait,
                disable_chap=disable_chap,
                error_recovery_level=error_recovery_level,
                first_burst_length=first_burst_length,
                immediate_data=immediate_data,
                immediate_data_pool_size=immediate_data_pool_size,
                max_connections_per_session=max_connections_per_session,
                max_large_datain_per_connection=max_large_datain_per_connection,
                max_queue_depth=max_queue_depth,
                max_r2t_per_connection=max_r2t_per_connection,
                max_sessions=max_sessions,
                mutual_chap=mutual_chap,
                node_base=node_base,
                nop_in_interval=nop_in_interval,
                nop_timeout=nop_timeout,
                pdu_pool_size=pdu_pool_size,
                require_chap=require_chap,
            ),
        )
        return result

    async def keyring_get_keys(self) -> list[dict[str, Any]]:
        """The keys that are kept: none."""
        result: list[dict[str, Any]] = await self.call("keyring_get_keys")
        return result

    async def keyring_linux_set_options(
        self,
        *,
        enable: bool | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            enable: Without effect: `[false]`.
        """
        result: bool = await self.call(
            "keyring_linux_set_options",
            _given(
                enable=enable,
            ),
        )
        return result

    async def load_config(
        self,
        *,
        subsystems: Sequence[types.SavedSubsystem],
    ) -> bool:
        """Makes the calls that `save_config` gave, in their order, up to the first that fails: what was made before it stays.

        Parameters:
            subsystems: What `save_config` gave.
        """
        result: bool = await self.call(
            "load_config",
            _given(
                subsystems=subsystems,
            ),
        )
        return result

    async def log_clear_flag(
        self,
        *,
        flag: str,
    ) -> bool:
        """Ends what `log_set_flag` began.

        Parameters:
            flag: One of those that `log_get_flags` gives, or `all`, or what several of them begin with: `vhost`.
        """
        result: bool = await self.call(
            "log_clear_flag",
            _given(
                flag=flag,
            ),
        )
        return result

    async def log_enable_timestamps(
        self,
        *,
        enabled: bool,
    ) -> bool:
        """Whether the log's lines for people have their time; what a journal takes never has.

        Parameters:
            enabled: From now on.
        """
        result: bool = await self.call(
            "log_enable_timestamps",
            _given(
                enabled=enabled,
            ),
        )
        return result

    async def log_get_flags(self) -> dict[str, Any]:
        """The parts of the daemon, and of which all is told."""
        result: dict[str, Any] = await self.call("log_get_flags")
        return result

    async def log_get_level(self) -> types.PrintLevel:
        """The same as `log_get_print_level`: there is one log."""
        result: types.PrintLevel = await self.call("log_get_level")
        return result

    async def log_get_print_level(self) -> types.PrintLevel:
        """What the log tells."""
        result: types.PrintLevel = await self.call("log_get_print_level")
        return result

    async def log_set_flag(
        self,
        *,
        flag: str,
    ) -> bool:
        """Has the log tell all of a part of the daemon, whatever the level.

        Parameters:
            flag: One of those that `log_get_flags` gives, or `all`, or what several of them begin with: `vhost`.
        """
        result: bool = await self.call(
            "log_set_flag",
            _given(
                flag=flag,
            ),
        )
        return result

    async def log_set_level(
        self,
        *,
        level: types.PrintLevel,
    ) -> bool:
        """The same as `log_set_print_level`: there is one log.

        Parameters:
            level: From now on; what is more detailed is not told.
        """
        result: bool = await self.call(
            "log_set_level",
            _given(
                level=level,
            ),
        )
        return result

    async def log_set_print_level(
        self,
        *,
        level: types.PrintLevel,
    ) -> bool:
        """Changes what the log tells.

        Parameters:
            level: From now on; what is more detailed is not told.
        """
        result: bool = await self.call(
            "log_set_print_level",
            _given(
                level=level,
            ),
        )
        return result

    async def notify_get_notifications(
        self,
        *,
        id: int | None = None,
        max: int | None = None,
    ) -> list[types.Event]:
        """What became of the disks: the latest events, oldest first.

        Parameters:
            id: The first that is wanted: one more than the last that was seen.
            max: By default all.
        """
        result: list[types.Event] = await self.call(
            "notify_get_notifications",
            _given(
                id=id,
                max=max,
            ),
        )
        return result

    async def notify_get_types(self) -> list[types.EventType]:
        """The types of events that there are."""
        result: list[types.EventType] = await self.call("notify_get_types")
        return result

    async def nvmf_set_config(
        self,
        *,
        admin_cmd_passthru: types.AdminPassthru | None = None,
        dhchap_dhgroups: Sequence[str] | None = None,
        dhchap_digests: Sequence[str] | None = None,
        discovery_filter: str | None = None,
        discovery_filters: Sequence[str] | None = None,
        dup_host_policy: str | None = None,
        poll_groups_mask: str | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            admin_cmd_passthru: Without effect: `[AsBuilt]`.
            dhchap_dhgroups: Without effect: `[DHCHAP_DHGROUPS]`.
            dhchap_digests: Without effect: `[DHCHAP_DIGESTS]`.
            discovery_filter: Without effect: `["match_any"]`.
            discovery_filters: Without effect: `[NO_FILTERS]`.
            dup_host_policy: Without effect: `["allow"]`.
            poll_groups_mask: Without effect: `[""]`.
        """
        result: bool = await self.call(
            "nvmf_set_config",
            _given(
                admin_cmd_passthru=admin_cmd_passthru,
                dhchap_dhgroups=dhchap_dhgroups,
                dhchap_digests=dhchap_digests,
                discovery_filter=discovery_filter,
                discovery_filters=discovery_filters,
                dup_host_policy=dup_host_policy,
                poll_groups_mask=poll_groups_mask,
            ),
        )
        return result

    async def nvmf_set_crdt(
        self,
        *,
        crdt1: int | None = None,
        crdt2: int | None = None,
        crdt3: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            crdt1: Without effect: `[0]`.
            crdt2: Without effect: `[0]`.
            crdt3: Without effect: `[0]`.
        """
        result: bool = await self.call(
            "nvmf_set_crdt",
            _given(
                crdt1=crdt1,
                crdt2=crdt2,
                crdt3=crdt3,
            ),
        )
        return result

    async def nvmf_set_max_subsystems(
        self,
        *,
        max_subsystems: int,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            max_subsystems: Without effect: `[1024, 0]`.
        """
        result: bool = await self.call(
            "nvmf_set_max_subsystems",
            _given(
                max_subsystems=max_subsystems,
            ),
        )
        return result

    async def rpc_get_methods(
        self,
        *,
        current: bool | None = None,
        include_aliases: bool | None = None,
    ) -> list[str]:
        """The names of all methods.

        Parameters:
            current: Only those that may be called now.
            include_aliases: Also deprecated names, of which there are none.
        """
        result: list[str] = await self.call(
            "rpc_get_methods",
            _given(
                current=current,
                include_aliases=include_aliases,
            ),
        )
        return result

    async def save_config(self) -> types.SavedConfig:
        """The calls that configure the daemon as it is now, for `load_config` or a file."""
        result: types.SavedConfig = await self.call("save_config")
        return result

    async def scsi_get_devices(self) -> list[types.ScsiDevice]:
        """The targets of all controllers that have a disk, as `vhost_get_controllers` numbers and names them."""
        result: list[types.ScsiDevice] = await self.call("scsi_get_devices")
        return result

    async def sock_get_default_impl(self) -> types.SockImpl:
        """Whose sockets are used, where RPC is served by HTTP: the kernel's."""
        result: types.SockImpl = await self.call("sock_get_default_impl")
        return result

    async def sock_impl_set_options(
        self,
        *,
        impl_name: str,
        enable_ktls: bool | None = None,
        enable_placement_id: int | None = None,
        enable_quickack: bool | None = None,
        enable_recv_pipe: bool | None = None,
        enable_zerocopy_send_client: bool | None = None,
        enable_zerocopy_send_server: bool | None = None,
        recv_buf_size: int | None = None,
        send_buf_size: int | None = None,
        tls_version: int | None = None,
        zerocopy_threshold: int | None = None,
    ) -> bool:
        """Without effect: takes what is SPDK's default, for there is nothing that it would be for.

        Parameters:
            impl_name: Without effect: `["posix", "ssl", "uring"]`.
            enable_ktls: Without effect: `[false]`.
            enable_placement_id: Without effect: `[0]`.
            enable_quickack: Without effect: `[false]`.
            enable_recv_pipe: Without effect: `[true]`.
            enable_zerocopy_send_client: Without effect: `[false]`.
            enable_zerocopy_send_server: Without effect: `[true, false]`.
            recv_buf_size: Without effect: `[2_097_152, 4096]`.
            send_buf_size: Without effect: `[2_097_152, 4096]`.
            tls_version: Without effect: `[0]`.
            zerocopy_threshold: Without effect: `[0]`.
        """
        result: bool = await self.call(
            "sock_impl_set_options",
            _given(
                impl_name=impl_name,
                enable_ktls=enable_ktls,
                enable_placement_id=enable_placement_id,
                enable_quickack=enable_quickack,
                enable_recv_pipe=enable_recv_pipe,
                enable_zerocopy_send_client=enable_zerocopy_send_client,
                enable_zerocopy_send_server=enable_zerocopy_send_server,
                recv_buf_size=recv_buf_size,
                send_buf_size=send_buf_size,
                tls_version=tls_version,
                zerocopy_threshold=zerocopy_threshold,
            ),
        )
        return result

    async def sock_set_default_impl(
        self,
        *,
        impl_name: str,
    ) -> bool:
        """Chooses whose sockets are used: there are the kernel's, `posix`.

        Parameters:
            impl_name: `posix`.
        """
        result: bool = await self.call(
            "sock_set_default_impl",
            _given(
                impl_name=impl_name,
            ),
        )
        return result

    async def spdk_get_version(self) -> types.Version:
        """The version of the daemon."""
        result: types.Version = await self.call("spdk_get_version")
        return result

    async def spdk_kill_instance(
        self,
        *,
        sig_name: types.Signal,
    ) -> bool:
        """Sends a signal to the daemon: SIGTERM ends it in good order.

        Parameters:
            sig_name: Which.
        """
        result: bool = await self.call(
            "spdk_kill_instance",
            _given(
                sig_name=sig_name,
            ),
        )
        return result

    async def thread_get_io_channels(self) -> types.IoChannels:
        """The disks that the threads on all reactors have open, each with the number of its channels."""
        result: types.IoChannels = await self.call("thread_get_io_channels")
        return result

    async def thread_get_pollers(self) -> types.Pollers:
        """What the threads on all reactors poll: queues, and what runs at a period."""
        result: types.Pollers = await self.call("thread_get_pollers")
        return result

    async def thread_get_stats(self) -> types.Threads:
        """The threads on all reactors, and how busy they are."""
        result: types.Threads = await self.call("thread_get_stats")
        return result

    async def thread_set_cpumask(
        self,
        *,
        id: int,
        cpumask: str,
    ) -> bool:
        """Says on which cores a thread may run, and moves it there while its machine's I/O goes on.

        Parameters:
            id: The thread, as `thread_get_stats` gives it.
            cpumask: Where it may run.
        """
        result: bool = await self.call(
            "thread_set_cpumask",
            _given(
                id=id,
                cpumask=cpumask,
            ),
        )
        return result

    async def trace_clear(self) -> bool:
        """Forgets what has happened to requests until now."""
        result: bool = await self.call("trace_clear")
        return result

    async def trace_clear_tpoint_mask(
        self,
        *,
        name: str,
        tpoint_mask: int,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
            tpoint_mask: A bit for each point.
        """
        result: bool = await self.call(
            "trace_clear_tpoint_mask",
            _given(
                name=name,
                tpoint_mask=tpoint_mask,
            ),
        )
        return result

    async def trace_disable_tpoint_group(
        self,
        *,
        name: str,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
        """
        result: bool = await self.call(
            "trace_disable_tpoint_group",
            _given(
                name=name,
            ),
        )
        return result

    async def trace_enable_tpoint_group(
        self,
        *,
        name: str,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
        """
        result: bool = await self.call(
            "trace_enable_tpoint_group",
            _given(
                name=name,
            ),
        )
        return result

    async def trace_get_info(self) -> types.TraceInfo:
        """The groups of trace points, and where the trace is: not in shared memory."""
        result: types.TraceInfo = await self.call("trace_get_info")
        return result

    async def trace_get_tpoint_group_mask(self) -> types.TraceGroups:
        """The groups of trace points: the layers that a request passes."""
        result: types.TraceGroups = await self.call("trace_get_tpoint_group_mask")
        return result

    async def trace_set_tpoint_mask(
        self,
        *,
        name: str,
        tpoint_mask: int,
    ) -> bool:
        """Without effect: the trace is always on.

        Parameters:
            name: The group, or `all`.
            tpoint_mask: A bit for each point.
        """
        result: bool = await self.call(
            "trace_set_tpoint_mask",
            _given(
                name=name,
                tpoint_mask=tpoint_mask,
            ),
        )
        return result

    async def vhost_controller_set_coalescing(
        self,
        *,
        ctrlr: str,
        delay_base_us: int,
        iops_threshold: int,
    ) -> bool:
        """Keeps by how much SPDK would delay signals to a machine. They are not delayed: they are given as the machine's driver asks for them.

        Parameters:
            ctrlr: The controller.
            delay_base_us: Microseconds at most. Kept and told, without effect.
            iops_threshold: Requests a second from which on signals would be delayed. Kept and told, without effect.
        """
        result: bool = await self.call(
            "vhost_controller_set_coalescing",
            _given(
                ctrlr=ctrlr,
                delay_base_us=delay_base_us,
                iops_threshold=iops_threshold,
            ),
        )
        return result

    async def vhost_create_blk_controller(
        self,
        *,
        ctrlr: str,
        dev_name: str,
        connect: str | None = None,
        cpumask: str | None = None,
        exclusive: bool | None = None,
        num_queues: int | None = None,
        packed_ring: bool | None = None,
        readonly: bool | None = None,
        socket_group: str | None = None,
        socket_mode: str | None = None,
        socket_owner: str | None = None,
        transport: str | None = None,
    ) -> bool:
        """Makes a controller: a socket through which a virtual machine reaches a disk.

        Parameters:
            ctrlr: The name that it is to have, and its socket.
            dev_name: The disk: name, alias or uuid.
            connect: Ours: the machine's socket, which to connect to instead of listening.
            cpumask: The cores to serve it on; by default any.
            exclusive: Ours: refuse a disk that others have open, unless all of them only read.
            num_queues: Ours: the most queues that a machine can have.
            packed_ring: Not heeded: packed rings are always offered, and the machine chooses.
            readonly: Whether the machine may only read.
            socket_group: Ours.
            socket_mode: Ours: permissions in octal digits; if not given, 660 with `socket_group`, and 600 otherwise.
            socket_owner: Ours.
            transport: `vhost_user_blk`, which is the default.
        """
        result: bool = await self.call(
            "vhost_create_blk_controller",
            _given(
                ctrlr=ctrlr,
                dev_name=dev_name,
                connect=connect,
                cpumask=cpumask,
                exclusive=exclusive,
                num_queues=num_queues,
                packed_ring=packed_ring,
                readonly=readonly,
                socket_group=socket_group,
                socket_mode=socket_mode,
                socket_owner=socket_owner,
                transport=transport,
            ),
        )
        return result

    async def vhost_create_scsi_controller(
        self,
        *,
        ctrlr: str,
        connect: str | None = None,
        cpumask: str | None = None,
        delay: bool | None = None,
        num_queues: int | None = None,
        socket_group: str | None = None,
        socket_mode: str | None = None,
        socket_owner: str | None = None,
        transport_id: str | None = None,
    ) -> bool:
        """Makes a controller: a socket through which a virtual machine reaches disks that may come and go.

        Parameters:
            ctrlr: Its name, and its socket's.
            connect: Ours: the machine's socket, which to connect to instead of listening.
            cpumask: Cores whose reactors may serve its queues; all if not given.
            delay: Its socket is made by `vhost_start_scsi_controller` only.
            num_queues: Ours: the most queues for commands that a machine can have.
            socket_group: Ours: the socket's group.
            socket_mode: Ours: permissions in octal digits; if not given, 660 with `socket_group`, and 600 otherwise.
            socket_owner: Ours: the socket's owner.
            transport_id: Ours: what disks know it by when its machine reserves them, as `naa.` and 16 hexadecimal digits, the first of them 2, 3 or 5. By default it is made of the controller's name.
        """
        result: bool = await self.call(
            "vhost_create_scsi_controller",
            _given(
                ctrlr=ctrlr,
                connect=connect,
                cpumask=cpumask,
                delay=delay,
                num_queues=num_queues,
                socket_group=socket_group,
                socket_mode=socket_mode,
                socket_owner=socket_owner,
                transport_id=transport_id,
            ),
        )
        return result

    async def vhost_delete_controller(
        self,
        *,
        ctrlr: str,
    ) -> bool:
        """Removes a controller.

        Parameters:
            ctrlr: Its name.
        """
        result: bool = await self.call(
            "vhost_delete_controller",
            _given(
                ctrlr=ctrlr,
            ),
        )
        return result

    async def vhost_get_controllers(
        self,
        *,
        name: str | None = None,
    ) -> list[types.VhostController]:
        """The controllers, or one of them.

        Parameters:
            name: The only one that is wanted.
        """
        result: list[types.VhostController] = await self.call(
            "vhost_get_controllers",
            _given(
                name=name,
            ),
        )
        return result

    async def vhost_scsi_controller_add_target(
        self,
        *,
        ctrlr: str,
        scsi_target_num: int,
        bdev_name: str,
        exclusive: bool | None = None,
    ) -> int:
        """Gives a disk to a controller's target, and tells the machine. The result is the target's number.

        Parameters:
            ctrlr: The controller.
            scsi_target_num: 0 to 7, or -1: the first that has no disk.
            bdev_name: The disk: its name, alias or uuid.
            exclusive: Ours: refuse a disk that others have open.
        """
        result: int = await self.call(
            "vhost_scsi_controller_add_target",
            _given(
                ctrlr=ctrlr,
                scsi_target_num=scsi_target_num,
                bdev_name=bdev_name,
                exclusive=exclusive,
            ),
        )
        return result

    async def vhost_scsi_controller_remove_target(
        self,
        *,
        ctrlr: str,
        scsi_target_num: int,
    ) -> bool:
        """Takes the disk of a controller's target away, whatever the machine does, and tells the machine.

        Parameters:
            ctrlr: The controller.
            scsi_target_num: 0 to 7.
        """
        result: bool = await self.call(
            "vhost_scsi_controller_remove_target",
            _given(
                ctrlr=ctrlr,
                scsi_target_num=scsi_target_num,
            ),
        )
        return result

    async def vhost_start_scsi_controller(
        self,
        *,
        ctrlr: str,
    ) -> bool:
        """Makes the socket of a controller that was made with `delay`.

        Parameters:
            ctrlr: Its name.
        """
        result: bool = await self.call(
            "vhost_start_scsi_controller",
            _given(
                ctrlr=ctrlr,
            ),
        )
        return result

    async def virtio_blk_get_transports(
        self,
        *,
        name: str | None = None,
    ) -> list[types.VirtioBlkTransport]:
        """The ways by which machines reach controllers.

        Parameters:
            name: The only one that is wanted.
        """
        result: list[types.VirtioBlkTransport] = await self.call(
            "virtio_blk_get_transports",
            _given(
                name=name,
            ),
        )
        return result
