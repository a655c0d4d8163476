# arykd in the guest drives one drive with three namespaces, for three front-ends on two cores.

drive=0000:00:18.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
start() {
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/rpc.sock -S /tmp --state-dir /tmp/state -m 0x3 >>/tmp/arykd.log 2>&1 &
    daemon=$!
    for _ in $(seq 100); do aryk status >/dev/null 2>&1 && return; sleep 0.1; done
    cat /tmp/arykd.log
    exit 1
}
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
ulimit -l unlimited
load_modules vfio
program aryk nvme bind $drive >/dev/null
start
attach='{"name": "nv0", "trtype": "PCIe", "traddr": "0000:00:18.0", "dma": "pin"}'
echo attached $(aryk rpc bdev_nvme_attach_controller "$attach" | tr -d '[]",')

# Another daemon does not get the drive.
mkdir /tmp/second
LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/second/rpc.sock -S /tmp/second -m 0x1 >>/tmp/second.log 2>&1 &
second=$!
for _ in $(seq 100); do program aryk -s /tmp/second/rpc.sock status >/dev/null 2>&1 && break; sleep 0.1; done
if program aryk -s /tmp/second/rpc.sock rpc bdev_nvme_attach_controller "$attach" >/tmp/refused 2>&1; then fail "attached twice"; fi
cat /tmp/refused
kill $second
wait $second

for n in 1 2 3; do aryk attach nv0n$n --cpumask "[$((n % 2))]" >/dev/null; done

# Verified writes by all three, while the controller is reset.
for n in 1 2 3; do
    aryk bench nv0n$n --rw write --bs 4k --qd 8 --area 8M --requests 4k --verify --destroy >/tmp/bench$n 2>&1 &
    eval "bench$n=$!"
done
for _ in 1 2 3; do
    sleep 1
    aryk rpc bdev_nvme_reset_controller '{"name": "nv0"}' >/dev/null || fail reset
done
for n in 1 2 3; do
    eval "wait \$bench$n" || fail "$(cat /tmp/bench$n)"
    echo verified nv0n$n
done
aryk rpc bdev_nvme_get_controllers >/tmp/statistics
member() { sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p" /tmp/statistics | head -1; }
echo "reset $(member resets) times, failed $(member failed_by_reset)"
echo "pairs $(grep -c '"qid"' /tmp/statistics)"

# A daemon that is killed: its successor gets the drive only when DMA has ended.
kill -9 $daemon
wait $daemon 2>/dev/null || true
start
for _ in $(seq 100); do aryk rpc bdev_get_bdevs '{"name": "nv0n3"}' >/dev/null 2>&1 && break; sleep 0.1; done
echo again $(aryk disk list --json | sed -n 's/.*"name": *"\(nv0n.\)".*/\1/p' | sort -u)
for n in 1 2 3; do
    aryk bench nv0n$n --rw read --bs 4k --qd 8 --area 8M --requests 2k --verify >/tmp/bench$n 2>&1 || fail "$(cat /tmp/bench$n)"
    echo unchanged nv0n$n
done
for n in 1 2 3; do aryk detach nv0n$n >/dev/null; done
aryk rpc bdev_nvme_detach_controller '{"name": "nv0"}' >/dev/null || fail detach
program aryk nvme unbind $drive >/dev/null
echo detached
