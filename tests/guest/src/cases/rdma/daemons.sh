# A daemon that shares a disk over RDMA, and one that uses it.

start
aryk disk create data --file /tmp/data.img --size 96M >/dev/null || fail disk
aryk share data --rdma --listen $address:4420 --nqn $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
if in_user aryk disk create far --nvme-rdma $address:4422 --subsystem $nqn >/tmp/reply 2>&1; then fail "a port without a target"; fi
grep -q "refused" /tmp/reply || fail "$(cat /tmp/reply)"
if in_user aryk disk create far --nvme-rdma $address:4420 --subsystem $nqn:other >/tmp/reply 2>&1; then fail "another subsystem"; fi

discovery="\"trtype\": \"RDMA\", \"traddr\": \"$address\", \"trsvcid\": \"4420\", \"wait_for_attach\": true"
in_user rpc bdev_nvme_start_discovery "{\"name\": \"found\", $discovery}"
in_user rpc bdev_get_bdevs '{"name": "found0n1"}'
in_user rpc bdev_nvme_stop_discovery '{"name": "found"}'

# A host that proves who it is, and connects from one of its addresses.
secret=DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:
host=nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c32
closed=nqn.2016-06.io.aryk:closed
(umask 077; printf %s $secret >/tmp/secret)
rpc keyring_file_add_key '{"name": "secret", "path": "/tmp/secret"}'
in_user rpc keyring_file_add_key '{"name": "secret", "path": "/tmp/secret"}'
rpc bdev_malloc_create '{"name": "closed", "num_blocks": 8192, "block_size": 512}'
rpc nvmf_create_subsystem "{\"nqn\": \"$closed\"}"
rpc nvmf_subsystem_add_ns "{\"nqn\": \"$closed\", \"namespace\": {\"bdev_name\": \"closed\"}}"
rpc nvmf_subsystem_add_host "{\"nqn\": \"$closed\", \"host\": \"$host\", \"dhchap_key\": \"secret\"}"
rpc nvmf_subsystem_add_listener "$(listener RDMA $address | sed s/$nqn/$closed/)"
with_key="--nvme-rdma $address:4420 --subsystem $closed --host-nqn $host"
if in_user aryk disk create closed $with_key >/tmp/reply 2>&1; then fail "a host without a key"; fi
grep -q "DH-HMAC-CHAP" /tmp/reply || fail "$(cat /tmp/reply)"
in_user aryk disk create closed $with_key --key secret >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
in_user aryk disk remove closed >/dev/null || fail "remove closed"
source="\"traddr\": \"$address\", \"hostaddr\": \"$address\", \"subnqn\": \"$nqn\""
in_user rpc bdev_nvme_attach_controller "{\"name\": \"from\", \"trtype\": \"rdma\", $source}"
in_user rpc bdev_nvme_detach_controller '{"name": "from", "trtype": "RDMA"}'

# Two paths, which the daemon has through two listeners.
second=$(listener RDMA $address | sed s/4420/4423/)
rpc nvmf_subsystem_add_listener "$second"
use_far 4420 4423
verify_far
begin_load
for gone in "$(listener RDMA $address)" "$second"; do
    rpc nvmf_subsystem_remove_listener "$gone"
    sleep 2
    rpc nvmf_subsystem_add_listener "$gone"
    sleep 3
done
resubmitted() { in_user aryk rpc bdev_nvme_get_controllers '{}' | sed -n 's/.*"resubmitted": \([0-9]*\).*/\1/p'; }
for _ in 1 2 3; do
    kill_and_wait $daemon
    sleep 1
    start
    sleep 3
done
echo "submitted again: $(resubmitted)" >&2
[ "$(resubmitted)" -gt 0 ] || fail "nothing was submitted again"
kill_and_wait $user
start_user
sleep 3
end_load
leave_far
aryk unshare data >/dev/null || fail unshare
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
