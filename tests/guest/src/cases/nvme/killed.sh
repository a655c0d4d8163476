# arykd in the guest is killed while it drives a drive, and started again with nothing but its state.

drive=0000:00:18.0
fail() { echo "failed: $*"; tail -30 /tmp/arykd.log; exit 1; }
ulimit -l unlimited
load_modules vfio

# A front-end keeps its queues full, and checks all that it reads; at the end, the kernel's driver reads the namespace.
echo ready
await crash
program aryk-crash-tests --arykd /programs/arykd --nvme $drive --disks /tmp --rounds 20 || fail crash

# The daemon's VFIO descriptors are its own: they are closed on exec, and its supervisor has none.
aryk() { program aryk -s /tmp/rpc.sock "$@"; }
await_disk() {
    for _ in $(seq 200); do aryk rpc bdev_get_bdevs '{"name": "nv0n1"}' >/dev/null 2>&1 && return; sleep 0.1; done
    fail "no disk"
}
vfio_files() {
    for fd in /proc/$1/fd/*; do
        case $(readlink "$fd" || true) in *vfio*|*iommu*) echo "${fd##*/}" ;; esac
    done
}
program aryk nvme bind $drive >/dev/null
mkdir /tmp/vhost
LD_LIBRARY_PATH=/programs/lib /programs/arykd --supervise -r /tmp/rpc.sock -S /tmp/vhost --state-dir /tmp/state -m 0x1 >>/tmp/arykd.log 2>&1 &
supervisor=$!
daemon() { tr -d ' ' <"/proc/$supervisor/task/$supervisor/children"; }
for _ in $(seq 100); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done
attach='{"name": "nv0", "trtype": "PCIe", "traddr": "'$drive'"}'
aryk rpc bdev_nvme_attach_controller "$attach" >/dev/null || fail attach
aryk attach nv0n1 >/dev/null
aryk bench nv0n1 --rw write --bs 4k --qd 8 --area 1M --requests 1k --verify --destroy >/tmp/bench 2>&1 || fail "$(cat /tmp/bench)"
for round in 1 2; do
    killed=$(daemon)
    files=$(vfio_files "$killed")
    # A container, a group and a device, or an iommufd and a device.
    [ "$(echo $files | wc -w)" -ge 2 ] || fail "the daemon has no files of VFIO: $files"
    for fd in $files; do
        flags=$(sed -n 's/^flags:[[:space:]]*//p' "/proc/$killed/fdinfo/$fd")
        [ $((flags & 02000000)) != 0 ] || fail "not closed on exec: $(readlink "/proc/$killed/fd/$fd")"
    done
    echo "round $round: closed on exec, and the supervisor has $(vfio_files $supervisor | wc -l)"
    kill -9 "$killed"
    for _ in $(seq 100); do [ "$(daemon)" != "$killed" ] && break; sleep 0.1; done
    await_disk
    aryk bench nv0n1 --rw read --bs 4k --qd 8 --area 1M --requests 1k --verify >/tmp/bench 2>&1 || fail "$(cat /tmp/bench)"
    echo "round $round: unchanged"
done
kill $supervisor
wait $supervisor || fail "the daemon did not end"
program aryk nvme unbind $drive
