# Two hosts of one kernel, of which one fences the other.

mkdir /tmp/vhost
rdma link add rxe0 type rxe netdev eth0
start
aryk disk create data --file /tmp/data.img --size 96M >/dev/null || fail disk
rpc nvmf_create_transport '{"trtype": "RDMA"}'
share_with_access data
listen_twice

id_of() { echo "913fc00$1-79a7-447f-b2c4-c73543638c31"; }
# nvme-cli does not connect a second host to the same address.
connect_as() {
    echo "transport=rdma,traddr=$address,trsvcid=4420,nqn=$nqn,hostid=$(id_of $1),nr_io_queues=2,reconnect_delay=1,\
hostnqn=nqn.2014-08.org.nvmexpress:uuid:$(id_of $1),keep_alive_tmo=30" | tr -d '\\\n' >/dev/nvme-fabrics
}
connect_as a || fail connect
connect_as b || fail connect
until [ -c /dev/nvme1 ] && [ -b /dev/nvme0n1 ]; do sleep 0.1; done
resv() { verb=$1 host=$2; shift 2; nvme resv-$verb /dev/nvme$host --namespace-id=1 "$@"; }
head -c 4k /dev/urandom >/tmp/block
write_by() {
    until grep -q live /sys/class/nvme/nvme$1/state; do sleep 0.1; done
    nvme io-passthru /dev/nvme$1 --opcode=1 --namespace-id=1 --data-len=4096 --write --cdw12=7 --input-file=/tmp/block
}
resv register 0 --nrkey=0xa1 --rrega=0 --cptpl=3 || fail register
resv register 1 --nrkey=0xb2 --rrega=0 --cptpl=3 || fail register
resv acquire 0 --crkey=0xa1 --rtype=1 --racqa=0 || fail acquire
! resv acquire 1 --crkey=0xb2 --rtype=1 --racqa=0 || fail "two holders"
write_by 0 || fail "the holder cannot write"
! write_by 1 || fail "a write beside the holder"
resv acquire 1 --crkey=0xb2 --prkey=0xa1 --rtype=1 --racqa=2 || fail preempt
kept() {
    write_by 1 || fail "the new holder cannot write"
    ! write_by 0 || fail "a write of a host that is fenced"
    resv report 1 --eds >/tmp/report || fail report
    grep -q "rkey *: b2" /tmp/report || fail "$(cat /tmp/report)"
    ! grep -q "rkey *: a1" /tmp/report || fail "$(cat /tmp/report)"
}
kept
kill_and_wait $daemon
sleep 1
start
kept
resv release 1 --crkey=0xb2 --rtype=1 --rrela=0 || fail release
write_by 0 || fail "a write after the release"
resv register 1 --crkey=0xb2 --rrega=1 || fail unregister
nvme disconnect -n $nqn
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
