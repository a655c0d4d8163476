//! Properties of a disk as the guest sees them: it holds a file system, is read-only, thin, or one of several.

use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, ensure};

use super::{Case, Site, TIMEOUT};
use crate::{Disk, Vm};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("disks/file-system", file_system),
        Case::new("disks/read-only", read_only),
        Case::new("disks/discard", discard),
        Case::new("disks/several", several),
        Case::new("disks/resized", resized),
    ]
}

/// Files on ext4 survive caches, remounting, the guest and the daemon.
fn file_system(site: &Site<'_>) -> Result<()> {
    let (daemon, vm) = site.one_disk(2)?;
    let fill = "
        mkfs.ext4 -q $(disk 0)
        mount -t ext4 $(disk 0) /mnt
        cp -r /usr/bin /usr/sbin /mnt/
        (cd /usr && find bin sbin -type f | sort | xargs sha256sum) >/mnt/sums
        sync
        echo 3 >/proc/sys/vm/drop_caches
        (cd /mnt && sha256sum -c sums >/dev/null)
        umount /mnt
        e2fsck -fn $(disk 0) >/dev/null
    ";
    site.boot(&vm, fill)?.finish(TIMEOUT)?;
    daemon.stop()?;
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "disk0", "256M")?;
    let socket = daemon.attach("disk0", &[])?;
    let look = "
        e2fsck -fn $(disk 0) >/dev/null
        mount -t ext4 -r $(disk 0) /mnt
        cd /mnt && sha256sum -c sums | wc -l
    ";
    let vm = Vm::with_disks(vec![Disk::new(&socket, 1)]);
    let report = site.boot(&vm, look)?.finish(TIMEOUT)?;
    let files: u32 = report.lines.last().context("nothing was counted")?.parse()?;
    ensure!(files >= 3, "only {files} files were compared");
    daemon.stop()
}

/// The guest sees the disk as read-only, and its writes are refused; nothing reaches the file.
fn read_only(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&[])?;
    std::fs::write(site.path("disk0.img"), vec![b'r'; 1 << 20])?;
    let image = site.path("disk0.img").display().to_string();
    daemon.aryk(&["disk", "create", "disk0", "--file", &image])?;
    let socket = daemon.attach("disk0", &["--readonly"])?;
    let script = "
        d=$(disk 0)
        [ $(cat /sys/block/${d##*/}/ro) = 1 ]
        [ $(dd if=$d bs=64k iflag=direct 2>/dev/null | tr -d r | wc -c) = 0 ]
        if dd if=/dev/zero of=$d bs=4k count=1 oflag=direct 2>/dev/null; then exit 1; fi
    ";
    site.boot(&Vm::with_disks(vec![Disk::new(&socket, 1)]), script)?.finish(TIMEOUT)?;
    daemon.stop()?;
    let bytes = std::fs::read(site.path("disk0.img"))?;
    ensure!(bytes.iter().all(|&byte| byte == b'r'), "a read-only disk was written");
    Ok(())
}

/// Discarded blocks read as zeroes and free their space; so do zeroes written without data.
fn discard(site: &Site<'_>) -> Result<()> {
    let (daemon, vm) = site.one_disk(1)?;
    let image = site.path("disk0.img");
    let script = "
        d=$(disk 0)
        [ $(cat /sys/block/${d##*/}/queue/discard_max_bytes) -gt 0 ]
        [ $(cat /sys/block/${d##*/}/queue/write_zeroes_max_bytes) -gt 0 ]
        fill() { yes full | dd of=$d bs=64k count=256 iflag=fullblock oflag=direct 2>/dev/null; }
        empty() { [ $(dd if=$d bs=64k skip=$1 count=$2 iflag=direct 2>/dev/null | tr -d '\\0' | wc -c) = 0 ]; }
        fill; echo filled; await go
        /usr/sbin/blkdiscard -o 1M -l 14M $d
        empty 16 224; if empty 0 16; then exit 1; fi; if empty 240 16; then exit 1; fi
        echo discarded; await go
        fill; /usr/sbin/blkdiscard -z -o 1M -l 14M $d
        empty 16 224; if empty 0 16; then exit 1; fi
    ";
    let mut guest = site.boot(&vm, script)?;
    guest.wait_line("filled", TIMEOUT)?;
    let full = std::fs::metadata(&image)?.blocks();
    guest.send("go")?;
    guest.wait_line("discarded", TIMEOUT)?;
    let left = std::fs::metadata(&image)?.blocks();
    ensure!(full >= 16 << 11 && left <= 3 << 11, "{full} sectors before, {left} after the discard");
    guest.send("go")?;
    guest.finish(TIMEOUT)?;
    daemon.stop()
}

/// Disks of different kinds in one guest, all busy at once.
fn several(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&["-m", "0x3"])?;
    site.file_disk(&daemon, "disk0", "64M")?;
    site.file_disk(&daemon, "disk1", "64M")?;
    daemon.aryk(&["disk", "create", "disk2", "--memory", "--size", "64M"])?;
    let mut disks = Vec::new();
    for name in ["disk0", "disk1", "disk2"] {
        disks.push(Disk::new(&daemon.attach(name, &[])?, 2));
    }
    let script = "
        for n in 0 1 2; do
            fio --name=disk$n --filename=$(disk $n) --direct=1 --ioengine=io_uring --eta=never --rw=randwrite \\
                --bs=4k --iodepth=16 --size=8M --verify=crc32c --verify_fatal=1 >/tmp/fio$n 2>&1 &
            eval \"p$n=$!\"
        done
        wait $p0; wait $p1; wait $p2
    ";
    site.boot(&Vm::with_disks(disks), script)?.finish(TIMEOUT)?;
    daemon.stop()
}

/// A disk grows while it is in use: the guest is notified, and can use the new blocks.
fn resized(site: &Site<'_>) -> Result<()> {
    let (daemon, vm) = site.one_disk(2)?;
    let script = "
        d=$(disk 0)
        size=/sys/block/${d##*/}/size
        echo before $(cat $size)
        while [ $(cat $size) = 524288 ]; do sleep 0.05; done
        echo after $(cat $size)
        measure new --filename=$d --rw=randwrite --bs=4k --iodepth=8 --offset=256M --size=4M --verify=crc32c
    ";
    let mut guest = site.boot(&vm, script)?;
    guest.wait_line("before 524288", TIMEOUT)?;
    daemon.aryk(&["disk", "resize", "disk0", "512M"])?;
    guest.wait_line("after 1048576", TIMEOUT)?;
    guest.finish(TIMEOUT)?;
    daemon.stop()
}
