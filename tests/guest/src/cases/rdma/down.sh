# The network goes away under load. RDMA by software (Linux 6.1) makes no new connections afterwards, also for Linux' initiator, until
# the device is made anew, which needs that no program uses it: both daemons go on to answer, end, and begin again.

start
aryk disk create data --file /tmp/data.img --size 96M >/dev/null || fail disk
aryk share data --rdma --listen $address:4420 --nqn $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
use_far 4420
begin_load
ifconfig eth0 down
sleep 5
answers() { timeout 10 /programs/aryk -s $1 status >/dev/null || fail "$1 does not answer"; }
export LD_LIBRARY_PATH=/programs/lib
answers /tmp/rpc.sock
answers /tmp/user/rpc.sock
unset LD_LIBRARY_PATH
ifconfig eth0 $address netmask 255.255.255.0 up
ends() {
    kill $1
    for _ in $(seq 300); do kill -0 $1 2>/dev/null || return 0; sleep 0.1; done
    fail "a daemon does not end"
}
ends $user
ends $daemon
timeout 20 rdma link delete rxe0 || fail "the device stays in use"
rdma link add rxe0 type rxe netdev eth0
start
start_user
end_load
leave_far
aryk unshare data >/dev/null || fail unshare
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
