#!/bin/busybox sh
# The guest's first process: brings up devices and tools, runs /script, powers off.
# ttyS0 is the kernel's console and the script's stderr; ttyS1 carries the script's stdin and stdout.
/bin/busybox mkdir -p /proc /sys /dev /tmp /usr /mnt /etc
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
: >/etc/mtab
while read -r module; do insmod "/modules/$module.ko"; done </modules/order
# With `root=DEVICE` as a parameter of the kernel, the root file system is on that disk, and its /sbin/init does all that follows.
for word in $(cat /proc/cmdline); do
    root=${word#root=}
    [ "$root" != "$word" ] || continue
    while ! [ -b "$root" ]; do sleep 0.05; done
    mount -r -t ext4 "$root" /mnt
    exec switch_root /mnt /sbin/init
done
for block in /sys/block/vd*; do
    [ "$(cat "$block/serial")" = aryk-tools ] && mount -r -t ext4 "/dev/${block##*/}" /usr
done
ln -s usr/lib /lib
ln -s usr/lib64 /lib64
# Busybox's shell prefers its own applets to these programs: use the full path for options that an applet lacks.
export PATH=/usr/bin:/usr/sbin:/bin
stty -F /dev/ttyS1 raw -echo
sh -eu -c '. /helpers; . /script' </dev/ttyS1 >/dev/ttyS1
echo "aryk-done $?" >/dev/ttyS1
poweroff -f
