# arykd in the guest serves a drive that is unplugged and comes back, under verified load.

drive=0000:01:00.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
ulimit -l unlimited
load_modules vfio
program aryk nvme bind $drive >/dev/null
program arykd -r /tmp/rpc.sock -S /tmp -m 0x1 >/tmp/arykd.log 2>&1 &
for _ in $(seq 100); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
attach='{"name": "nv0", "trtype": "PCIe", "traddr": "0000:01:00.0", "ctrlr_loss_timeout_sec": 60}'
aryk rpc bdev_nvme_attach_controller "$attach" >/dev/null || fail attach
aryk attach nv0n1 >/dev/null
for round in 1 2; do
    aryk bench nv0n1 --rw randwrite --bs 4k --qd 8 --area 8M --requests 8k --rate 400 --verify --destroy --timeout 60 >/tmp/bench 2>&1 &
    bench=$!
    sleep 1
    echo unplug
    gave_back $drive 300 || fail "the kernel did not get the drive back"
    kill -0 $bench || fail "the load ended before the drive went: $(cat /tmp/bench)"
    echo plug
    # The kernel's driver takes what is plugged in, as on a host without a rule for the drive.
    for _ in $(seq 200); do program aryk nvme bind $drive >/tmp/bound 2>&1 && break; sleep 0.1; done
    grep -q bound /tmp/bound || fail "$(cat /tmp/bound)"
    wait $bench || fail "$(cat /tmp/bench)"
    echo "verified $round"
done
