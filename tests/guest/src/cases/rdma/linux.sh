# Linux' initiator over RDMA, on the daemon of the same guest.

mkdir /tmp/vhost
start
if aryk rpc nvmf_create_transport '{"trtype": "RDMA"}' >/tmp/reply 2>&1; then fail "RDMA without a device"; fi
grep -q "no RDMA device" /tmp/reply || fail "$(cat /tmp/reply)"
rdma link add rxe0 type rxe netdev eth0
aryk disk create data --file /tmp/data.img --size 96M >/dev/null || fail disk
if aryk share data --rdma --listen 10.0.2.77:4420 --nqn $nqn >/tmp/reply 2>&1; then fail "a listener at no address"; fi
grep -q "cannot listen at 10.0.2.77:4420 (RDMA)" /tmp/reply || fail "$(cat /tmp/reply)"
aryk share data --rdma --listen $address:4420 --nqn $nqn >/tmp/reply 2>&1 || fail "$(cat /tmp/reply)"
grep -q "nvme connect -t rdma" /tmp/reply || fail "$(cat /tmp/reply)"

nvme discover -t rdma -a $address -s 4420 >/tmp/found || fail discover
grep -q $nqn /tmp/found || fail "$(cat /tmp/found)"
grep -q "trtype: *rdma" /tmp/found || fail "$(cat /tmp/found)"

# Registrations end with their connections.
before=$(pinned $daemon)
for _ in $(seq 5); do
    connect rdma || fail connect
    [ "$(pinned $daemon)" -gt "$before" ] || fail "nothing is registered"
    nvme disconnect -n $nqn
done
for _ in $(seq 50); do [ "$(pinned $daemon)" = "$before" ] && break; sleep 0.1; done
[ "$(pinned $daemon)" = "$before" ] || fail "registered before: $before KiB, afterwards: $(pinned $daemon) KiB"

connect rdma || fail connect
d=/dev/nvme0n1
measure verified --filename=$d --rw=randwrite --bs=4k --iodepth=32 --size=32M --verify=crc32c
measure mixed --filename=$d --rw=randrw --bsrange=512-256k --blockalign=512 --iodepth=16 --size=48M --verify=crc32c --do_verify=1
blkdiscard -o 0 -l 16M $d
mkfs.ext4 -q $d
mount -t ext4 $d /mnt
cp -r /usr/bin /mnt/
(cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
sync
(while [ ! -e /tmp/enough ]; do cp -r /usr/sbin /mnt/more; rm -r /mnt/more; done) &
load=$!
sleep 1

# The host keeps its requests while the daemon is away, and while it has no listener.
kill_and_wait $daemon
start
sleep 3
rpc nvmf_subsystem_remove_listener "$(listener RDMA $address)"
sleep 1
rpc nvmf_subsystem_add_listener "$(listener RDMA $address)"
sleep 3
touch /tmp/enough
wait $load
sync
echo 3 >/proc/sys/vm/drop_caches
(cd /mnt && sha256sum -c /tmp/sums >/dev/null) || fail "files differ"
umount /mnt
e2fsck -fn $d >/dev/null || fail "the file system is damaged"
nvme disconnect -n $nqn
aryk unshare data >/dev/null || fail unshare
kill $daemon
wait $daemon || fail "the daemon did not end"
if grep -q panicked /tmp/arykd.log; then fail panic; fi
