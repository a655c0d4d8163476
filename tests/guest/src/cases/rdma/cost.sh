# What a request costs the daemon and the whole guest, over TCP and over RDMA: a daemon that shares a disk, and one that uses it,
# for itself or for a VM.

start
rpc bdev_malloc_create '{"name": "data", "num_blocks": 131072, "block_size": 512}'
rpc nvmf_create_transport '{"trtype": "TCP"}'
rpc nvmf_create_transport '{"trtype": "RDMA"}'
share data
rpc nvmf_subsystem_add_listener "$(listener TCP $address)"
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"
# Hundredths of a second of the daemon, and of all.
of_daemon() { awk '{print $14 + $15}' /proc/$measured/stat; }
of_all() { awk '/^cpu /{print $2 + $3 + $4 + $6 + $7 + $8}' /proc/stat; }
cost() {
    daemon_before=$(of_daemon)
    all_before=$(of_all)
    measure cost --filename=/dev/nvme0n1 --rw=$2 --bs=$3 --iodepth=32 --size=64M --number_ios=$4 >/dev/null
    echo "cost $1 $2 $3 $((($(of_daemon) - daemon_before) * 10000 / $4)) $((($(of_all) - all_before) * 10000 / $4))"
}
costs() {
    cost $1 randread 4k 16000
    cost $1 randwrite 4k 16000
    cost $1 read 64k 1000
    cost $1 write 64k 1000
}
measured=$daemon
for transport in tcp rdma; do
    connect $transport || fail connect
    costs share/$transport
    nvme disconnect -n $nqn >&2
done
# The kernel reaches the daemon that uses the disk over TCP.
measured=$user
for transport in tcp rdma; do
    use_far_by $transport 4420
    costs use/$transport
    nvme disconnect -n $far >&2
    in_user aryk unshare far >/dev/null || fail unshare
    in_user aryk disk remove far >/dev/null || fail remove
done
# A VM of this daemon, a process, uses the disk: data is copied, or the target accesses the VM's memory.
cost_in_vm() {
    daemon_before=$(of_daemon)
    all_before=$(of_all)
    in_vm --rw $2 --bs $3 --qd 32 --area 64M --requests $4 --destroy
    echo "cost $1 $2 $3 $((($(of_daemon) - daemon_before) * 10000 / $4)) $((($(of_all) - all_before) * 10000 / $4))"
}
for way in tcp rdma "rdma --dma pin"; do
    set -- $way
    transport=$1
    shift
    attach_far $transport 4420 "$@"
    for load in "randread 4k 16000" "randwrite 4k 16000" "read 64k 2000" "write 64k 2000"; do
        cost_in_vm "vm/$transport${2:+-$2}" $load
    done
    detach_far
done
kill $user
wait $user || fail "the daemon did not end"
kill $daemon
wait $daemon || fail "the daemon did not end"
