//! Volumes of a pool: a guest's file system on a clone of a snapshot that was taken under load.

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Case, Site, TIMEOUT};
use crate::vm::Front;
use crate::{Disk, Vm};

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("volumes/clone", clone), Case::new("volumes/overlay", overlay)]
}

/// A volume is verified by fio, then has a file system that is written to while its snapshot is taken. The snapshot's clone is
/// plugged into the running guest: it has all files that were synced before, and its file system is clean.
fn clone(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "store", "1G")?;
    daemon.aryk(&["pool", "create", "p", "--disk", "store"])?;
    daemon.aryk(&["volume", "create", "p/vm", "--size", "256M"])?;
    let scsi = ["--scsi", "--controller", "c"];
    let socket = daemon.attach("p/vm", &scsi)?;
    let script = "
        until [ -b /dev/sda ]; do sleep 0.1; done
        measure verified --filename=/dev/sda --rw=randwrite --bs=4k --iodepth=32 --size=64M --verify=crc32c
        measure mixed --filename=/dev/sda --rw=randrw --bsrange=512-256k --blockalign=512 --iodepth=16 \
            --size=64M --verify=crc32c --do_verify=1
        mkfs.ext4 -q /dev/sda
        mount -t ext4 /dev/sda /mnt
        cp -r /usr/bin /mnt/
        (cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
        sync
        (while [ ! -e /tmp/enough ]; do cp -r /usr/sbin /mnt/more; rm -r /mnt/more; done) &
        load=$!
        for round in 1 2 3; do
            echo loaded $round
            d=/dev/sd$(echo $round | tr 123 bcd)
            until [ -b $d ]; do sleep 0.1; done
            mkdir /clone$round
            mount -t ext4 $d /clone$round
            (cd /clone$round && sha256sum -c /tmp/sums >/dev/null)
            umount /clone$round
            e2fsck -fn $d >/dev/null
        done
        touch /tmp/enough
        wait $load
        umount /mnt
        e2fsck -fn /dev/sda >/dev/null
    ";
    let disk = Disk { front: Front::Scsi, ..Disk::new(&socket, 2) };
    let mut guest = site.boot(&Vm::with_disks(vec![disk]), script)?;
    for round in 1..=3 {
        guest.wait_line(&format!("loaded {round}"), TIMEOUT)?;
        let (snapshot, name) = (format!("p/vm@{round}"), format!("clone{round}"));
        daemon.aryk(&["snapshot", "create", &snapshot])?;
        daemon.aryk(&["volume", "clone", &snapshot, &name])?;
        daemon.attach(&format!("p/{name}"), &[&scsi[..], &["--target", &round.to_string()]].concat())?;
    }
    guest.finish(TIMEOUT)?;
    let check = daemon.rpc("aryk_pool_check", &json!({"pool": "p"}))?;
    ensure!(check["damage"] == json!([]) && check["leaked_bytes"] == 0, "the pool is damaged: {check}");
    daemon.stop()
}

/// Two guests' volumes on one image, which stays as it is.
fn overlay(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "store", "512M")?;
    site.file_disk(&daemon, "golden", "128M")?;
    let socket = daemon.attach("golden", &[])?;
    let fill = "
        mkfs.ext4 -q $(disk 0)
        mount -t ext4 $(disk 0) /mnt
        cp -r /usr/bin /mnt/
        (cd /mnt && find bin -type f | sort | xargs sha256sum) >/tmp/sums
        cp /tmp/sums /mnt/sums
        umount /mnt
    ";
    site.boot(&Vm::with_disks(vec![Disk::new(&socket, 1)]), fill)?.finish(TIMEOUT)?;
    daemon.aryk(&["detach", "golden"])?;
    let image = std::fs::read(site.path("golden.img"))?;

    daemon.aryk(&["pool", "create", "p", "--disk", "store"])?;
    let mut disks = Vec::new();
    for name in ["p/one", "p/two"] {
        daemon.aryk(&["volume", "create", name, "--image", "golden", "--size", "256M"])?;
        disks.push(Disk::new(&daemon.attach(name, &[])?, 1));
    }
    let change = "
        for n in 0 1; do
            mount -t ext4 $(disk $n) /mnt
            (cd /mnt && sha256sum -c sums >/dev/null)
            echo $n >/mnt/own
            umount /mnt
            e2fsck -fn $(disk $n) >/dev/null
        done
        for n in 0 1; do
            mount -t ext4 $(disk $n) /mnt
            [ $(cat /mnt/own) = $n ]
            umount /mnt
        done
    ";
    site.boot(&Vm::with_disks(disks), change)?.finish(TIMEOUT)?;
    ensure!(std::fs::read(site.path("golden.img"))? == image, "the image was written");
    daemon.stop()
}
