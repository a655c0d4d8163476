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
