# arykd in the guest attaches drives by itself: one that is bound while the daemon starts, and one that is plugged in four times.
# The daemon looks by itself only every 10 s: what is attached sooner was found by an event of the kernel.

first=0000:01:00.0; spare=0000:02:00.0; other=0000:00:1a.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
start() {
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/rpc.sock -S /tmp --state-dir /tmp/state -m 0x1 >>/tmp/arykd.log 2>&1 &
    daemon=$!
}
answers() {
    for _ in $(seq 100); do aryk status >/dev/null 2>&1 && return; sleep 0.1; done
    fail start
}
hundredths() { cut -d ' ' -f 1 /proc/uptime | tr -d .; }
attached() {
    began=$(hundredths)
    aryk rpc bdev_get_bdevs '{"name": "'$1'", "timeout": 30000}' >/tmp/said 2>&1 || fail "$(cat /tmp/said)"
    took=$(($(hundredths) - began))
    [ $took -lt 500 ] || fail "$1 was attached only after $took hundredths of a second"
    echo "attached $1 within $took hundredths of a second"
}
ulimit -l unlimited
load_modules vfio

start
answers
aryk rpc bdev_nvme_set_options '{"ctrlr_loss_timeout_sec": 1}' >/dev/null || fail options
aryk rpc bdev_nvme_set_hotplug '{"enable": true, "period_us": 10000000}' >/dev/null || fail hotplug
kill $daemon
wait $daemon || fail "the daemon failed"
start
program aryk nvme bind $other >/dev/null || fail bind
answers
attached HotInNvme0n1

for place in $first $first $first $spare; do
    echo unplug
    gave_back $first 300 || fail "the kernel did not get the drive back"
    for _ in $(seq 300); do aryk rpc bdev_get_bdevs '{"name": "HotInNvme1n1"}' >/dev/null 2>&1 || break; done
    echo "plug $place"
    for _ in $(seq 300); do program aryk nvme bind $place >/tmp/bound 2>&1 && break; sleep 0.1; done
    grep -q bound /tmp/bound || fail "$(cat /tmp/bound)"
    # The drive keeps the name that it had in its place.
    if [ $place = $spare ]; then attached HotInNvme2n1; else attached HotInNvme1n1; fi
done
grep 'events of the kernel' /tmp/arykd.log && fail "the daemon receives no events"
echo "attached all"
