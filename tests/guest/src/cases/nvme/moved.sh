# arykd in the guest serves a drive that is unplugged, and comes back at another PCI address, under verified load.

drive=0000:01:00.0; place=0000:02:00.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
start() {
    LD_LIBRARY_PATH=/programs/lib /programs/arykd -r /tmp/rpc.sock -S /tmp --state-dir /tmp/state -m 0x1 >>/tmp/arykd.log 2>&1 &
    daemon=$!
    for _ in $(seq 100); do aryk status >/dev/null 2>&1 && return; sleep 0.1; done
    fail start
}
ulimit -l unlimited
load_modules vfio
program aryk nvme bind $drive >/dev/null
start
attach='{"name": "nv0", "trtype": "PCIe", "traddr": "'$drive'", "ctrlr_loss_timeout_sec": 60}'
aryk rpc bdev_nvme_attach_controller "$attach" >/dev/null || fail attach
aryk attach nv0n1 >/dev/null
aryk rpc bdev_nvme_set_hotplug '{"enable": true, "period_us": 300000}' >/dev/null || fail hotplug
aryk bench nv0n1 --rw write --bs 4k --qd 8 --area 8M --requests 8k --rate 400 --verify --destroy --timeout 60 >/tmp/bench 2>&1 &
bench=$!
sleep 1
echo unplug
gave_back $drive 300 || fail "the kernel did not get the drive back"
kill -0 $bench || fail "the load ended before the drive went: $(cat /tmp/bench)"
echo plug
for _ in $(seq 200); do program aryk nvme bind $place >/tmp/bound 2>&1 && break; sleep 0.1; done
grep -q bound /tmp/bound || fail "$(cat /tmp/bound)"
wait $bench || fail "$(cat /tmp/bench)"
echo verified
aryk rpc bdev_nvme_get_controllers >/tmp/controllers
grep -q HotIn /tmp/controllers && fail "$(cat /tmp/controllers)"
echo "nv0 at $(sed -n 's/.*"traddr": *"\(.*\)".*/\1/p' /tmp/controllers | head -1)"

# A restart finds it there too.
kill_and_wait $daemon
start
for _ in $(seq 100); do aryk rpc bdev_get_bdevs '{"name": "nv0n1"}' >/dev/null 2>&1 && break; sleep 0.1; done
aryk bench nv0n1 --rw read --bs 4k --qd 8 --area 8M --requests 2k --verify >/tmp/bench 2>&1 || fail "$(cat /tmp/bench)"
echo unchanged
