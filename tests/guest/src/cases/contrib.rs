//! The examples of `contrib/qemu`: each is run unchanged, and its VM uses its disk.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{Case, Site, TIMEOUT};
use crate::Vm;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("contrib/one-disk", |site| listening(site, "one-disk.sh", 1)),
        Case::new("contrib/queues", |site| listening(site, "queues.sh", 4)),
        Case::new("contrib/listen", connecting),
    ]
}

/// The daemon listens; the VM's disk has `queues` queues.
fn listening(site: &Site<'_>, script: &str, queues: u32) -> Result<()> {
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "vm1", "64M")?;
    let socket = daemon.attach("vm1", &[])?;
    let seen = run(site, script, &socket)?;
    ensure!(seen == queues, "{seen} queues, not {queues}");
    daemon.stop()
}

/// QEMU listens.
fn connecting(site: &Site<'_>) -> Result<()> {
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "vm1", "64M")?;
    let socket = site.path("qemu.sock");
    daemon.aryk(&["attach", "vm1", "--connect", &socket.display().to_string()])?;
    run(site, "listen.sh", &socket)?;
    daemon.stop()
}

/// Boots the VM that the example starts, and writes and reads there; returns the number of queues that the guest saw.
fn run(site: &Site<'_>, script: &str, socket: &Path) -> Result<u32> {
    let example: PathBuf = [env!("CARGO_MANIFEST_DIR"), "../../contrib/qemu", script].iter().collect();
    let example = Some((example, socket.to_owned()));
    let vm = Vm { example, ..Vm::with_disks(Vec::new()) };
    // The example decides the disk's PCI slot; the only other disk is the image's.
    let write = r#"
        for block in /sys/block/vd*; do
            [ "$(cat "$block/serial")" = aryk-tools ] || ours=${block##*/}
        done
        dd if=/bin/busybox of=/tmp/data bs=64k count=8 conv=sync 2>/dev/null
        dd if=/tmp/data of=/dev/$ours bs=64k oflag=direct 2>/dev/null
        dd if=/dev/$ours of=/tmp/back bs=64k count=8 iflag=direct 2>/dev/null
        cmp /tmp/data /tmp/back
        ls /sys/block/$ours/mq | wc -l
    "#;
    let report = site.boot(&vm, write)?.finish(TIMEOUT)?;
    Ok(report.lines.last().context("no queues were counted")?.trim().parse()?)
}
