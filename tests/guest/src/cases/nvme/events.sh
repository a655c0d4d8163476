# arykd in the guest drives two drives: one warns of its temperature and changes its namespaces, the bus of the other fails.

faulty=0000:01:00.0; drive=0000:00:19.0; kernel=0000:00:1a.0
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
until_true() { for _ in $(seq 100); do "$@" && return; sleep 0.1; done; fail "$*"; }
logged() { grep -q "$1" /tmp/arykd.log; }
member() { aryk rpc bdev_nvme_get_controllers "{\"name\": \"$1\"}" | sed -n "s/.*\"$2\": *\"\{0,1\}\([A-Za-z0-9]*\).*/\1/p" | head -1; }
shows_disks() { [ "$(disks)" = "$1" ]; }
was_reset() { [ "$(member nv0 resets)" = "$1" ] && [ "$(member nv0 reason)" = BusError ]; }
disks() { echo $(aryk disk list --json | sed -n 's/.*"name": *"\(nv1n.\)".*/\1/p' | sort -u); }
ulimit -l unlimited
load_modules vfio
load_modules cuse
program aryk nvme bind $faulty $drive >/dev/null
mkdir /tmp/disks
program arykd -r /tmp/rpc.sock -S /tmp -m 0x1 --allow-dir /tmp/disks >/tmp/arykd.log 2>&1 &
until_true aryk status >/dev/null
aryk rpc bdev_nvme_attach_controller '{"name": "nv0", "trtype": "PCIe", "traddr": "'$faulty'"}' >/dev/null || fail attach
aryk rpc bdev_nvme_attach_controller '{"name": "nv1", "trtype": "PCIe", "traddr": "'$drive'"}' >/dev/null || fail attach

# A threshold below the temperature (323 K): the drive reports that at once.
aryk rpc bdev_nvme_cuse_register '{"name": "nv1", "allow_changes": true}' >/dev/null || fail cuse
nvme set-feature /dev/aryk/nv1 -f 4 -v 0x130 >/dev/null || fail set-feature
until_true logged 'health warning.*nv1.*warning="temperature"'
echo "log: a health warning"
echo "warnings $(member nv1 warnings)"
aryk nvme smart $drive | grep ^warnings

# The other port of the drive belongs to the guest's kernel, which detaches and attaches a namespace of the daemon's port.
other=/dev/$(ls /sys/bus/pci/devices/$kernel/nvme)
[ "$(disks)" = "nv1n1 nv1n2" ] || fail "disks $(disks)"
nvme detach-ns $other -n 2 -c 0 >/dev/null || fail detach-ns
until_true shows_disks nv1n1
echo "namespace 2 went: disks $(disks)"
nvme attach-ns $other -n 2 -c 0 >/dev/null || fail attach-ns
until_true shows_disks "nv1n1 nv1n2"
echo "namespace 2 appeared: disks $(disks)"

# Errors of the bus under load: the kernel reports them to the daemon. At a fatal one, it also resets the drive, whose registers are
# lost until the daemon has opened it again.
aryk attach nv0n1 >/dev/null
round=0
for load in randread "randwrite --verify --destroy"; do
    round=$((round + 1))
    aryk bench nv0n1 --rw $load --bs 4k --qd 8 --area 8M --requests 24k --timeout 60 >/tmp/bench 2>&1 & bench=$!
    sleep 1
    echo "fail the bus"
    until_true was_reset $round
    kill -0 $bench || fail "the load ended before the bus failed: $(cat /tmp/bench)"
    wait $bench || fail "$(cat /tmp/bench)"
    echo "bus error $round: no request failed, reset by $(member nv0 reason)"
done

# The last writes are in the drive's volatile cache, and the daemon cannot know whether the drive had power all the time.
echo "fail the bus"
until_true logged 'has not come back in time.*nv0'
logged 'volatile cache may have lost writes.*nv0' || fail "the reason is not in the log"
echo "its writes may be lost: its disk was removed"
aryk rpc bdev_nvme_detach_controller '{"name": "nv1"}' >/dev/null || fail detach
echo detached
