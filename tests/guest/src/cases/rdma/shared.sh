# Queues that share their receives, of which there are fewer than all of their entries: hosts of the kernel under verified load,
# beside a hostile one, on the daemon of the same guest.

mkdir /tmp/vhost
rdma link add rxe0 type rxe netdev eth0
start
rpc nvmf_create_transport '{"trtype": "RDMA", "max_srq_depth": 48}'
rpc nvmf_get_transports '{"trtype": "RDMA"}'
grep -q '"max_srq_depth": 48' /tmp/reply || fail "$(cat /tmp/reply)"
rpc bdev_malloc_create '{"name": "data", "num_blocks": 65536, "block_size": 512}'
share data
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"
aryk disk create other --file /tmp/other.img --size 64M >/dev/null || fail disk
hostile=$nqn
nqn=nqn.2016-06.io.aryk:other
share other
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"

connect rdma || fail connect
attack $hostile 32 shared

# Queues move between reactors, and the receives are there again after the daemon.
d=/dev/nvme0n1
(until [ -e /tmp/enough ]; do
    measure verified --filename=$d --rw=randwrite --bsrange=512-64k --blockalign=512 --iodepth=32 --size=16M --verify=crc32c || exit 1
done) &
load=$!
sleep 1
move_queues 1
kill_and_wait $daemon
start
sleep 3
rpc nvmf_get_transports '{"trtype": "RDMA"}'
grep -q '"max_srq_depth": 48' /tmp/reply || fail "$(cat /tmp/reply)"
touch /tmp/enough
wait $load || fail "the load"
nvme disconnect -n $nqn
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
