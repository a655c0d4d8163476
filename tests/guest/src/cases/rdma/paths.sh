# A host with two paths, whose access changes and whose queues move, under verified load.

mkdir /tmp/vhost
rdma link add rxe0 type rxe netdev eth0
start
rpc bdev_malloc_create '{"name": "data", "num_blocks": 65536, "block_size": 512}'
rpc nvmf_create_transport '{"trtype": "RDMA"}'
share_with_access data
listen_twice
connect rdma --keep-alive-tmo 30 || fail connect
nvme connect -t rdma -a $address -s 4423 -n $nqn --nr-io-queues 2 --reconnect-delay 1 --keep-alive-tmo 30 || fail connect
echo round-robin >/sys/class/nvme-subsystem/nvme-subsys0/iopolicy
d=/dev/nvme0n1
(until [ -e /tmp/enough ]; do
    measure verified --filename=$d --rw=randwrite --bsrange=4k-64k --iodepth=4 --size=4M --verify=crc32c || exit 1
done) &
load=$!
sleep 1
move_queues 1
change_access
touch /tmp/enough
wait $load || fail "the load"
[ "$(threads | wc -w)" = 4 ] || fail "queues: $(threads)"
nvme disconnect -n $nqn
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
