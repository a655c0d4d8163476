# A hostile host beside Linux', on the daemon of the same guest.

mkdir /tmp/vhost
rdma link add rxe0 type rxe netdev eth0
start
rpc nvmf_create_transport '{"trtype": "RDMA"}'
rpc bdev_malloc_create '{"name": "data", "num_blocks": 65536, "block_size": 512}'
share data
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"
rpc bdev_malloc_create '{"name": "other", "num_blocks": 65536, "block_size": 512}'
hostile=$nqn
nqn=nqn.2016-06.io.aryk:other
share other
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"
program hostile_rdma $address:4420 $hostile alone || fail alone
connect rdma || fail connect
attack $hostile 8
nvme disconnect -n $nqn
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
