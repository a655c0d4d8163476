#!/bin/bash
# Boots systemd in new namespaces, on an overlay of this computer's file system whose changes stay in memory:
#   boot.sh SCRATCH PACKAGE SCRIPT RESULT
# SCRATCH is an empty directory for the mount, RESULT the only directory of this computer to which SCRIPT can write.
# Runs as root in new namespaces. Exits with 77 if the kernel or a container does not allow that.
set -eu
scratch=$1 package=$2 script=$3 result=$4
root=$scratch/root

give_up() { echo "$1" >"$result/skipped"; exit 77; }

# First, enters a new control group and a cgroup namespace, so that systemd sees no other groups.
if [ $# = 4 ]; then
    mount --make-rprivate /
    mount -t tmpfs tmpfs "$scratch" 2>/dev/null || give_up "nothing can be mounted here"
    mkdir "$scratch/groups"
    mount -t cgroup2 cgroup2 "$scratch/groups" 2>/dev/null || give_up "no cgroups here"
    mkdir -p "$scratch/groups/aryk-package-test"
    echo 0 >"$scratch/groups/aryk-package-test/cgroup.procs" || give_up "no cgroups here"
    umount "$scratch/groups"
    exec unshare --cgroup bash "$0" "$@" inside
fi
mkdir "$scratch/upper" "$scratch/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$root" 2>/dev/null ||
    give_up "no overlay file system here"

# From here on, systemd and the package change only the overlay: the kernel's settings are read-only too.
mount -t proc proc "$root/proc"
mount -o bind,ro "$root/proc/sys" "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys" 2>/dev/null || give_up "no sysfs here"
mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
mount -o remount,rw "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup" 2>/dev/null || give_up "no cgroups here"
for dir in run tmp dev var/tmp; do mount -t tmpfs tmpfs "$root/$dir"; done
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/run/test"
mount -t tmpfs tmpfs "$root/dev/shm"
mount --bind "$result" "$root/run/test"
cp "$package" "$root/run/package.deb"
cp "$script" "$root/run/script"
cat >"$root/etc/systemd/system/test.target" <<'UNIT'
[Unit]
DefaultDependencies=no
Wants=test.service
UNIT
cat >"$root/etc/systemd/system/test.service" <<'UNIT'
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/bin/bash -c 'bash -eux /run/script >/run/test/log 2>&1; echo $? >/run/test/status'
UNIT

cd "$root"
mkdir -p .outside
pivot_root . .outside
umount -l /.outside
[ "$(stat -f -c %T /)" = overlayfs ] || give_up "the copy is not the root"
for dir in /tmp /run /var/tmp; do
    [ "$(stat -f -c %T $dir)" = tmpfs ] || give_up "$dir is not the copy's"
done
exec env -i container=aryk PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set -sys_time,-sys_module,-sys_boot,-sys_rawio,-mknod \
    /lib/systemd/systemd --system --unit=test.target --show-status=0 --log-target=null
