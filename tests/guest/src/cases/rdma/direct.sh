# A daemon whose target accesses VMs' memory by itself: verified requests, while the target ends connections, is killed, and
# starts again; and requests of the daemon's own memory, which are copied.

start
aryk disk create data --file /tmp/data.img --size 96M >/dev/null || fail disk
aryk share data --rdma --listen $address:4420 --nqn $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
second=$(listener RDMA $address | sed s/4420/4423/)
rpc nvmf_subsystem_add_listener "$second"
attach_far rdma "4420 4423" --dma pin
verify_in_vm
[ "$(member pinned)" = 0 ] || fail "memory of a VM that has gone is registered"

# The connections of a path end, then those of both; the daemon of the target dies.
begin_vm 8000
for gone in "$(listener RDMA $address)" "$second"; do
    rpc nvmf_subsystem_remove_listener "$gone"
    sleep 2
    rpc nvmf_subsystem_add_listener "$gone"
    sleep 2
done
for _ in 1 2; do
    in_flight
    kill_and_wait $daemon
    sleep 1
    start
    sleep 3
done
in_user rpc bdev_nvme_reset_controller '{"name": "far"}'
in_flight
end_vm
echo "submitted again: $(member resubmitted)" >&2
[ "$(member resubmitted)" -gt 0 ] || fail "nothing was submitted again"
detach_far

# The limit of locked memory has room for the VM's memory, but not for as many connections beside it as may come: data is copied.
attach_far rdma 4420 --dma pin
begin_vm 600
sleep 1
limit=$(($(pinned $user) + 8192))
end_vm
detach_far
end_user
ulimit -l $limit
by="/usr/bin/setpriv --bounding-set=-ipc_lock"
start_user
attach_far rdma 4420 --dma pin
in_vm --rw mix:50 --bs 16k --qd 16 --area 8M --requests 500 --verify --destroy
[ "$(member bounced_pieces)" -gt "$copied_before" ] || fail "nothing was copied"
grep -q "raise the limit of locked memory" /tmp/arykd.log || fail "no line about the limit"
detach_far
end_user
ulimit -l unlimited
by=
start_user

# The memory of the daemon itself has no keys.
in_user aryk disk create far --nvme-rdma $address:4420 --subsystem $nqn --dma pin >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
in_user aryk share far --listen $address:4421 --nqn $far >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
nvme connect -t tcp -a $address -s 4421 -n $far --nr-io-queues 1
until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
d=/dev/nvme0n1
verify_far
[ "$(member bounced_pieces)" -gt 100 ] || fail "$(member bounced_pieces) pieces of requests were copied"
nvme disconnect -n $far
in_user aryk unshare far >/dev/null || fail unshare
in_user aryk disk remove far >/dev/null || fail remove
end_user
aryk unshare data >/dev/null || fail unshare
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
