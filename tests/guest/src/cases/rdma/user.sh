# A daemon that uses a disk over RDMA, and shares it on over TCP with the kernel of the same guest, which verifies its data.

far=nqn.2016-06.io.aryk:far
# Runs a command with that daemon.
in_user() {
    socket=/tmp/user/rpc.sock
    "$@"
    result=$?
    socket=/tmp/rpc.sock
    return $result
}
start_user() {
    start_in /tmp/user
    user=$!
    in_user await_daemon
}
mkdir -p /tmp/vhost /tmp/user/vhost
start_user
if in_user aryk disk create far --nvme-rdma $address:4420 --subsystem $nqn >/tmp/reply 2>&1; then fail "no device"; fi
grep -q "no RDMA device" /tmp/reply || fail "$(cat /tmp/reply)"
rdma link add rxe0 type rxe netdev eth0

# Creates the disk, with paths to these ports by a transport, and connects the kernel to it.
use_far_by() {
    transport=$1
    shift
    paths=$(for port in "$@"; do echo "--nvme-$transport $address:$port"; done)
    in_user aryk disk create far $paths --subsystem $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
    in_user aryk share far --listen $address:4421 --nqn $far >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
    nvme connect -t tcp -a $address -s 4421 -n $far --nr-io-queues 2 --reconnect-delay 1 --keep-alive-tmo 5
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
    d=/dev/nvme0n1
}

use_far() {
    use_far_by rdma "$@"
    in_user aryk rpc bdev_nvme_get_controllers '{}' >/tmp/reply || fail controllers
    grep -q '"trtype": "RDMA"' /tmp/reply || fail "$(cat /tmp/reply)"
}

# Verified requests of all sizes, and trims.
verify_far() {
    measure verified --filename=$d --rw=randwrite --bs=4k --iodepth=32 --size=16M --verify=crc32c
    block=$(cat /sys/block/${d#/dev/}/queue/logical_block_size)
    measure mixed --filename=$d --rw=randrw --bsrange=$block-256k --blockalign=$block --iodepth=16 --size=24M \
        --verify=crc32c --do_verify=1
    blkdiscard -o 0 -l 16M $d
}

# Files that are written and removed until `end_load`.
begin_load() {
    mkfs.ext4 -q $d
    mount -t ext4 $d /mnt
    cp -r /usr/bin /mnt/
    (cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
    sync
    (while [ ! -e /tmp/enough ]; do cp -r /usr/sbin /mnt/more; sync; rm -r /mnt/more; done) &
    load=$!
    sleep 1
}

end_load() {
    touch /tmp/enough
    wait $load
    sync
    echo 3 >/proc/sys/vm/drop_caches
    (cd /mnt && sha256sum -c /tmp/sums >/dev/null) || fail "files differ"
    umount /mnt
    e2fsck -fn $d >/dev/null || fail "the file system is damaged"
}

# The disk is removed, and with it all registrations.
leave_far() {
    nvme disconnect -n $far
    in_user aryk unshare far >/dev/null || fail unshare
    in_user aryk disk remove far >/dev/null || fail remove
    for _ in $(seq 50); do [ "$(pinned $user)" = 0 ] && break; sleep 0.1; done
    [ "$(pinned $user)" = 0 ] || fail "$(pinned $user) KiB are registered"
    kill $user
    wait $user || fail "the daemon did not end"
}

# Creates the disk as `use_far_by`, for a VM: a process, whose memory the daemon uses. The rest are options of the disk.
attach_far() {
    transport=$1
    ports=$2
    shift 2
    paths=$(for port in $ports; do echo "--nvme-$transport $address:$port"; done)
    in_user aryk disk create far $paths --subsystem $nqn "$@" >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
    in_user rpc bdev_wait_for_examine '{}'
    copied_before=$(member bounced_pieces)
    in_user aryk attach far >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
}
detach_far() {
    in_user aryk detach far >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
    in_user aryk disk remove far >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
}

# Runs requests of the VM.
in_vm() { in_user aryk bench far "$@" --timeout 120 >/tmp/bench 2>&1 || fail "$(cat /tmp/bench)"; }

# A number that the daemon has about the disk's controller.
member() { in_user aryk rpc bdev_nvme_get_controllers '{"name": "far"}' | sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p" | head -1; }

# No request of the VM was copied. Those of the daemon itself are, which looks for pools on a new disk.
check_copied() {
    copied=$(member bounced_pieces)
    [ "$copied" = "$copied_before" ] || fail "$((copied - copied_before)) pieces of requests were copied"
}

# Verified requests of all sizes, whose data is not copied; each ends with a read of all.
verify_in_vm() {
    for size in 4k 16k 64k 256k; do in_vm --rw mix:50 --bs $size --qd 16 --area 8M --requests 500 --verify --destroy; done
    check_copied
}

# Begins verified writes, and waits for the registration of the VM's memory.
begin_vm() {
    before=$(pinned $user)
    in_user aryk bench far --rw mix:40 --bs 16k --qd 16 --area 8M --requests $1 --rate 200 --verify --destroy --timeout 120 \
        >/tmp/bench 2>&1 &
    vm=$!
    for _ in $(seq 100); do [ "$(member pinned)" -gt 0 ] && break; sleep 0.1; done
    [ "$(member pinned)" -gt 0 ] || fail "the VM's memory is not registered: $(cat /tmp/bench)"
    [ "$(pinned $user)" -gt "$before" ] || fail "$(pinned $user) KiB are registered, as before"
}
end_vm() {
    wait $vm || fail "$(cat /tmp/bench)"
    check_copied
    [ "$(member failed_by_reset)" = 0 ] || fail "$(member failed_by_reset) requests failed"
}
in_flight() { kill -0 $vm || fail "the load ended before: $(cat /tmp/bench)"; }

# With the disk, all registrations have gone.
end_user() {
    for _ in $(seq 50); do [ "$(pinned $user)" = 0 ] && break; sleep 0.1; done
    [ "$(pinned $user)" = 0 ] || fail "$(pinned $user) KiB are registered"
    kill $user
    wait $user || fail "the daemon did not end"
}
