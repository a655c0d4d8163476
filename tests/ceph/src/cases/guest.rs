//! A Linux guest whose disk is an image.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::{Disk, Guest, Vm};

use super::{Case, Site};
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

pub(super) const CASES: [Case; 1] = [Case { name: "guest/files", body: files }];

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
