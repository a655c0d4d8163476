//! Linux guests whose disks are images: with files, and with the root file system.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aryk_guest_tests::vm::Front;
use aryk_guest_tests::{Disk, Guest, Vm};

use super::{Case, Site, image};
use crate::cluster::POOL;

/// Timeout of the guest on a busy test machine.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Waits for the first size of the disk to change, after files and blocks were written and verified.
const SCRIPT: &str = "
    d=$(disk 0)
    size=/sys/block/${d##*/}/size
    measure verified --filename=$d --rw=randwrite --bs=4k --iodepth=16 --size=16M --verify=crc32c --verify_fatal=1
    /usr/sbin/blkdiscard $d
    mkfs.ext4 -q $d
    mount -t ext4 $d /mnt
    cp -r /usr/bin /mnt/
    (cd /usr && find bin -type f | sort | xargs sha256sum) >/mnt/sums
    umount /mnt
    echo before $(cat $size)
    while [ $(cat $size) = 131072 ]; do sleep 0.05; done
    echo after $(cat $size)
    echo 3 >/proc/sys/vm/drop_caches
    mount -t ext4 -r $d /mnt
    cd /mnt && sha256sum -c sums | wc -l
";

/// Installs a root file system. Its init counts the boots in a file, compares files with their checksums, and ends as that of the
/// guest's image does.
const INSTALL: &str = r#"
    d=$(disk 0)
    mkfs.ext4 -q $d
    mount -t ext4 $d /mnt
    mkdir -p /mnt/bin /mnt/sbin /mnt/proc /mnt/sys /mnt/dev /mnt/data
    cp /bin/busybox /mnt/bin/
    busybox --install -s /mnt/bin
    cp -r /usr/bin /mnt/data/
    (cd /mnt/data && find bin -type f | sort | xargs sha256sum) >/mnt/sums
    cat >/mnt/sbin/init <<'END'
#!/bin/busybox sh
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
stty -F /dev/ttyS1 raw -echo
set -eu
mount -o remount,rw /
echo >>/boots
{
    echo root $(grep ' / ext4 rw' /proc/mounts | cut -d ' ' -f 1), boot $(wc -l </boots)
    (cd /data && sha256sum -c /sums) | grep -c OK
} >/dev/ttyS1
mount -o remount,ro /
echo "aryk-done $?" >/dev/ttyS1
poweroff -f
END
    chmod 755 /mnt/sbin/init
    umount /mnt
"#;

pub(super) const CASES: [Case; 2] =
    [Case { name: "guest/files", body: files }, Case { name: "guest/root", body: root }];

/// A guest writes and verifies blocks and files, and notices that another client resizes the image.
fn files(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let socket = site.disk(&daemon, "guest", "64M")?;
    let vm = Vm::with_disks(vec![Disk::new(&socket, 2)]);
    let mut guest = Guest::boot(&site.lab.image, &vm, SCRIPT, site.directory)?;
    guest.wait_line("before 131072", TIMEOUT)?;
    site.cluster().rbd(&["resize", "--no-progress", "--size", "96M", &format!("{POOL}/guest")])?;
    guest.wait_line("after 196608", TIMEOUT)?;
    let report = guest.finish(TIMEOUT)?;
    let files: u32 = report.lines.last().context("nothing was counted")?.parse()?;
    ensure!(files >= 3, "only {files} files were compared");
    daemon.stop()
}

/// VMs whose root file system is an image: it is installed by a VM, and cloned; a VM boots from the clone, as a virtio block
/// device and as a SCSI disk.
fn root(site: &Site<'_>) -> Result<()> {
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    let golden = Disk::new(&site.disk(&daemon, "golden", "64M")?, 2);
    Guest::boot(&site.lab.image, &Vm::with_disks(vec![golden]), INSTALL, site.directory)?.finish(TIMEOUT)?;
    daemon.aryk(&["detach", "golden"])?;
    daemon.aryk(&["disk", "remove", "golden"])?;
    let snapshot = format!("{POOL}/golden@installed");
    cluster.rbd(&["snap", "create", "--no-progress", &snapshot])?;
    cluster.rbd(&["snap", "protect", &snapshot])?;
    cluster.rbd(&["clone", &snapshot, &format!("{POOL}/root")])?;
    let installed = cluster.content("golden")?;

    daemon.rpc("bdev_rbd_create", &image("root"))?;
    let disk = Disk::new(&daemon.attach("root", &[])?, 2);
    boots(site, disk, "/dev/vdb", 1)?;
    daemon.aryk(&["detach", "root"])?;
    let socket = daemon.attach("root", &["--scsi", "--controller", "vm"])?;
    boots(site, Disk { front: Front::Scsi, ..Disk::new(&socket, 2) }, "/dev/sda", 2)?;
    ensure!(cluster.content("golden")? == installed, "the clone's writes changed its parent");
    daemon.stop()
}

/// Boots a VM whose root file system is on `disk`, its only one beside the tools; it is the VM's boot of this number.
fn boots(site: &Site<'_>, disk: Disk, device: &str, number: u32) -> Result<()> {
    let vm = Vm { kernel: format!("root={device}"), ..Vm::with_disks(vec![disk]) };
    let report = Guest::boot(&site.lab.image, &vm, "", site.directory)?.finish(TIMEOUT)?;
    let [root, files] = &*report.lines else { bail!("the guest said {:?}", report.lines) };
    ensure!(*root == format!("root {device}, boot {number}"), "{root}");
    ensure!(files.parse::<u32>()? >= 3, "only {files} files were compared");
    Ok(())
}
