# A daemon that uses a disk by two paths: fused operations, access that changes, queues that move.

start
rpc bdev_malloc_create '{"name": "data", "num_blocks": 196608, "block_size": 512}'
rpc nvmf_create_transport '{"trtype": "RDMA"}'
share_with_access data
listen_twice
program hostile_rdma $address:4420 $nqn fused >&2 || fail "fused operations"
use_far 4420 4423
in_user rpc nvmf_create_transport '{"trtype": "RDMA"}'
in_user rpc nvmf_subsystem_add_listener "$(listener RDMA $address | sed "s/4420/4430/; s/$nqn/$far/")"
program hostile_rdma $address:4430 $far fused >&2 || fail "fused operations of a disk of another host"
begin_load
move_queues 1
in_user move_queues 1
change_access
end_load
leave_far
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
