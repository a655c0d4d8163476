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

# Starts the daemon, and waits until it serves what it served before.
start() {
    start_in /tmp
    daemon=$!
    await_daemon
}

# Starts a daemon with its files in a directory.
start_in() {
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r $1/rpc.sock -S $1/vhost --state-dir $1/state -m 0x3 \
        >>/tmp/arykd.log 2>&1 &
}

await_daemon() {
    for _ in $(seq 200); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
    rpc framework_wait_init '{}'
}

# Kibibytes of the memory of a process that is registered.
pinned() { sed -n 's/^VmPin:[[:space:]]*\([0-9]*\).*/\1/p' /proc/$1/status; }

# Connects the kernel to a share by a transport: `connect rdma`.
connect() {
    transport=$1
    shift
    nvme connect -t "$transport" -a $address -s 4420 -n $nqn --nr-io-queues 2 --reconnect-delay 1 --keep-alive-tmo 5 "$@"
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
