# What a request costs the daemon and the whole guest, over TCP and over RDMA.

mkdir /tmp/vhost
rdma link add rxe0 type rxe netdev eth0
start
rpc bdev_malloc_create '{"name": "data", "num_blocks": 131072, "block_size": 512}'
rpc nvmf_create_transport '{"trtype": "TCP"}'
rpc nvmf_create_transport '{"trtype": "RDMA"}'
share data
rpc nvmf_subsystem_add_listener "$(listener TCP $address)"
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"
# Hundredths of a second of the daemon, and of all.
of_daemon() { awk '{print $14 + $15}' /proc/$daemon/stat; }
of_all() { awk '/^cpu /{print $2 + $3 + $4 + $6 + $7 + $8}' /proc/stat; }
cost() {
    daemon_before=$(of_daemon)
    all_before=$(of_all)
    measure cost --filename=/dev/nvme0n1 --rw=$2 --bs=$3 --iodepth=32 --size=64M --number_ios=$4 >/dev/null
    echo "cost $1 $2 $3 $((($(of_daemon) - daemon_before) * 10000 / $4)) $((($(of_all) - all_before) * 10000 / $4))"
}
for transport in tcp rdma; do
    connect $transport || fail connect
    cost $transport randread 4k 16000
    cost $transport randwrite 4k 16000
    cost $transport read 64k 1000
    cost $transport write 64k 1000
    nvme disconnect -n $nqn >&2
done
kill $daemon
wait $daemon || fail "the daemon did not end"
