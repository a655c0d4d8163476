# A guest with RDMA over its network device, and the daemon in it.

address=10.0.2.15
nqn=nqn.2016-06.io.aryk:rdma
fail() { dmesg | tail -5 >&2; tail -20 /tmp/arykd.log >&2; echo "failed: $*" >&2; exit 1; }
socket=/tmp/rpc.sock
aryk() { program aryk -s $socket "$@"; }
rpc() { aryk rpc "$@" >/tmp/reply 2>&1 || fail "$*: $(cat /tmp/reply)"; }
ulimit -l unlimited
load_modules rdma
ifconfig lo 127.0.0.1 up
ifconfig eth0 $address netmask 255.255.255.0 up
mkdir -p /etc/libibverbs.d
echo driver rxe >/etc/libibverbs.d/rxe.driver

# What a script that takes too long leaves for its reader.
(
    sleep 200
    tail -60 /tmp/arykd.log
    for at in /tmp /tmp/user; do program aryk -s $at/rpc.sock rpc bdev_nvme_get_controllers '{}'; done
) >&2 &

# Starts the daemon, and waits until it serves what it served before.
start() {
    start_in /tmp
    daemon=$!
    await_daemon
}

# Starts a daemon with its files in a directory, by the command `$by` if there is one.
start_in() {
    LD_LIBRARY_PATH=/programs/lib ${by:-} /programs/arykd -r $1/rpc.sock -S $1/vhost --state-dir $1/state -m 0x3 \
        >>/tmp/arykd.log 2>&1 &
}

await_daemon() {
    for _ in $(seq 200); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
    rpc framework_wait_init '{}'
}

# Kibibytes of the memory of a process that is registered.
pinned() { sed -n 's/^VmPin:[[:space:]]*\([0-9]*\).*/\1/p' /proc/$1/status; }

# Runs scenes of a hostile host on a share, beside verified writes of the kernel's host with so many at a time: `attack NQN 8`.
attack() {
    depth=$2
    before=$(pinned $daemon)
    program hostile_rdma $address:4420 $1 ${3:-} >/tmp/scenes 2>&1 &
    attack=$!
    while kill -0 $attack 2>/dev/null; do
        measure beside --filename=/dev/nvme0n1 --rw=randwrite --bs=4k --iodepth=$depth --size=4M --verify=crc32c
    done
    wait $attack || fail "$(cat /tmp/scenes)"
    cat /tmp/scenes >&2
    kill -0 $daemon || fail "the daemon has ended"
    for _ in $(seq 100); do [ "$(pinned $daemon)" = "$before" ] && break; sleep 0.1; done
    [ "$(pinned $daemon)" = "$before" ] || fail "registered before: $before KiB, afterwards: $(pinned $daemon) KiB"
}

# Connects the kernel to a share by a transport: `connect rdma`.
connect() {
    transport=$1
    shift
    nvme connect -t "$transport" -a $address -s 4420 -n $nqn --nr-io-queues 2 --reconnect-delay 1 --keep-alive-tmo 5 "$@" || return 1
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
}

# Shares a disk with all hosts, nowhere yet.
share() {
    rpc nvmf_create_subsystem "{\"nqn\": \"$nqn\", \"allow_any_host\": true}"
    rpc nvmf_subsystem_add_ns "{\"nqn\": \"$nqn\", \"namespace\": {\"bdev_name\": \"$1\"}}"
}

# The parameters of a listener with a transport, at an address.
listener() {
    at="{\"trtype\": \"$1\", \"traddr\": \"$2\", \"trsvcid\": \"4420\"}"
    echo "{\"nqn\": \"$nqn\", \"listen_address\": $at}"
}

# As `share`, with states of access (ANA) by path.
share_with_access() {
    rpc nvmf_create_subsystem "{\"nqn\": \"$nqn\", \"allow_any_host\": true, \"ana_reporting\": true}"
    rpc nvmf_subsystem_add_ns "{\"nqn\": \"$nqn\", \"namespace\": {\"bdev_name\": \"$1\"}}"
}

# Two paths to the share, by the ports 4420 and 4423.
first=$(listener RDMA $address)
second=$(listener RDMA $address | sed s/4420/4423/)
listen_twice() {
    rpc nvmf_subsystem_add_listener "$first"
    rpc nvmf_subsystem_add_listener "$second"
}

# Makes each of both paths inaccessible, while the other one is not.
access() { rpc nvmf_subsystem_listener_set_ana_state "$(echo "$1" | sed "s/}}/}, \"ana_state\": \"$2\"}/")"; }
change_access() {
    for _ in 1 2; do
        access "$first" inaccessible
        sleep 2
        access "$second" non_optimized
        access "$first" optimized
        sleep 2
        access "$second" inaccessible
        sleep 2
        access "$second" optimized
        sleep 2
    done
}

# The numbers of the threads of I/O queues.
threads() { aryk rpc thread_get_stats '{}' | tr -d ' \n' | tr '{' '\n' | sed -n 's/.*"id":\([0-9]*\),.*queue[0-9]*".*/\1/p'; }
# Moves all I/O queues to the other reactor and back, so many times. A move fails if the requests in flight take longer than 10 ms.
move() { aryk rpc thread_set_cpumask "{\"id\": $1, \"cpumask\": \"0x$(($2 + 1))\"}" >/tmp/reply 2>&1; }
# The threads of a core.
of_core() { aryk rpc framework_get_reactors '{}' | tr -d ' \n' | sed 's/"lcore"/\n"lcore"/g' | grep "^\"lcore\":$1,"; }
move_queues() {
    moved=$(threads)
    [ -n "$moved" ] || fail "no queues: $(aryk rpc thread_get_stats '{}')"
    for _ in $(seq $1); do
        for core in 1 0; do
            for thread in $moved; do
                for _ in $(seq 40); do move $thread $core && break; done
            done
            there=$(of_core $core)
            for thread in $moved; do
                echo "$there" | grep -q "\"id\":$thread[,}]" || fail "thread $thread: $(cat /tmp/reply) $there"
            done
            echo "moved to core $core" >&2
        done
    done
}
