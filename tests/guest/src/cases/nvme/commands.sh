# An operator's commands on three NVMe drives. The second and the third are functions of one device, and so in one IOMMU group.

one=0000:00:18.0; two=0000:00:19.0; three=0000:00:19.1
# The words of each line, with one space between.
words() { tr -s ' ' | sed 's/^ *//'; }
aryk() { program aryk "$@" 2>&1; }
refused() {
    if said=$(aryk "$@"); then echo "not refused: $*"; exit 1; fi
    echo "refused $said" | words
}
driver() { basename "$(readlink "/sys/bus/pci/devices/$1/driver")"; }
group() { basename "$(readlink "/sys/bus/pci/devices/$1/iommu_group")"; }
block() { for disk in "/sys/bus/pci/devices/$1"/nvme/nvme*/nvme*n1; do echo "/dev/${disk##*/}"; done; }
await_block() { for _ in $(seq 100); do [ -b "$(block "$1")" ] && return; sleep 0.1; done; return 1; }

printf 'root:x:0:0::/:/bin/sh\noperator:x:1000:1000::/:/bin/sh\n' >/etc/passwd

# Before VFIO is loaded.
aryk nvme list | words
refused doctor nvme
refused nvme bind $one
load_modules vfio

# What is no drive.
refused nvme bind 0000:05:00.0
refused nvme bind 0000:00:08.0
refused nvme unbind 0000:00:08.0
refused nvme bind 0000:00:00.9
refused nvme bind $one --owner nobody-here

# A mounted drive, also beside one that could be bound.
disk=$(block $one)
mkfs.ext4 -q $disk
mount $disk /mnt
echo kept >/mnt/file
aryk nvme list | words
aryk doctor nvme | words
refused nvme bind $two $one
echo "nothing changed: $(driver $one) $(driver $two)"
refused nvme bind $one --json
umount /mnt
unshare -m sh -c "mount $disk /mnt && touch /tmp/mounted && sleep 60" & hidden=$!
while ! [ -e /tmp/mounted ]; do sleep 0.1; done
echo "in another namespace: $(refused nvme bind $one)"
kill $hidden
wait $hidden || true
pkill sleep || true
for _ in $(seq 100); do aryk nvme bind $one >/tmp/bound && break; sleep 0.1; done
cat /tmp/bound
aryk nvme bind $one
aryk nvme list | words

# Two functions of one group.
aryk nvme bind $two --owner 1000 --json | tr '\n' ' ' | words
echo
echo "owner $(stat -c %u "/dev/vfio/$(group $two)")"
refused doctor nvme
aryk nvme bind $three
aryk doctor nvme | words

# The rights of a user.
aryk_as_user() {
    LD_LIBRARY_PATH=/programs/lib start-stop-daemon -S -c operator -x /programs/aryk -- "$@" 2>&1
}
chmod 600 /dev/vfio/vfio
if said=$(ulimit -l unlimited; aryk_as_user doctor nvme); then echo "not refused"; exit 1; fi
echo "refused $said" | words
chmod 666 /dev/vfio/vfio
aryk nvme bind $one --owner operator
(ulimit -l unlimited; aryk_as_user doctor nvme --json) | words

# A process drives it.
sleep 60 <>"/dev/vfio/$(group $one)" & holder=$!
while ! readlink /proc/$holder/fd/0 | grep -q vfio; do sleep 0.1; done
aryk nvme list | words
refused nvme unbind $one
echo "still $(driver $one)"
kill $holder
wait $holder || true

# The daemon drives it, and identifies it.
export ARYK_SOCKET=/tmp/aryk.sock
program arykd --rpc-socket $ARYK_SOCKET --vhost-dir /tmp/vhost >&2 & daemon=$!
for _ in $(seq 100); do aryk status >/dev/null && break; sleep 0.1; done
aryk rpc bdev_nvme_attach_controller '{"name": "Nvme0", "trtype": "PCIe", "traddr": "'$one'"}' | tr '\n' ' ' | words
echo
aryk nvme list | words
refused nvme unbind $one
aryk rpc bdev_nvme_detach_controller '{"name": "Nvme0"}'

# A disk by its drive's address, and the drive as programs see it.
members() {
    aryk nvme list --json | tr '\n' ' ' | words | sed 's/}, { "address"/}\n{ "address"/g' | grep "\"address\": \"$one\"" >/tmp/drive
    for name in "$@"; do sed -n "s/.*\"$name\": \(\[[^]]*\]\|[^,]*\),.*/$name \1/p" /tmp/drive; done
}
refused disk create vm1 --nvme $one:2
aryk disk create vm1 --nvme $one | words
aryk nvme identify $one | words
members state serial size iommu_group disks
aryk nvme smart vm1 | words
aryk nvme reset vm1 | words
aryk disk remove vm1
echo "gone: $(aryk rpc bdev_nvme_get_controllers)"
members state
aryk stop
wait $daemon

# The commands of the unit that binds a drive at each boot.
echo aryk:x:1001:1001::/:/bin/sh >>/etc/passwd
start() {
@START@
}
stop() {
@STOP@
}
owner() { stat -c %u "/dev/vfio/$(group $one)"; }
aryk nvme unbind $one >/dev/null
await_block $one
for _ in $(seq 100); do start >/tmp/bound && break; sleep 0.1; done
echo "unit: $(cat /tmp/bound) owner $(owner)"
echo "unit: $(start) owner $(owner)"
echo "unit: $(stop)"
await_block $one
mount "$(block $one)" /mnt
if said=$(start); then echo "not refused"; exit 1; fi
echo "unit: refused $said" | words
umount /mnt
for _ in $(seq 100); do start >/tmp/bound && break; sleep 0.1; done
echo "unit: $(cat /tmp/bound) owner $(owner)"

# Returned, with its data.
aryk nvme unbind $one $two $three
aryk nvme unbind $one
await_block $one
mount "$(block $one)" /mnt
cat /mnt/file
umount /mnt
echo $one >"/sys/bus/pci/devices/$one/driver/unbind"
echo "offered again: $(aryk nvme unbind $one)"
