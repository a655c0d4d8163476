//! Events during a guest's writes: a crash, a reboot, a driver that unbinds, a long pause. All writes that the device had
//! acknowledged must be there afterwards.
//!
//! Records of 4 KiB go to the first half of the disk; each is reported to the host after the disk has acknowledged it. At
//! the same time fio keeps the second half busy, so that there is always I/O in flight.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Case, Site, TIMEOUT};
use crate::process::Signal;
use crate::{Disk, Vm};

/// Shell functions of the scripts here.
const RECORDS: &str = "
    d=$(disk 0)
    record() { yes \"record $1\" | head -c 4096; }
    # Stores records $1 to $2, saying so after each.
    store() {
        i=$1
        while [ $i -le $2 ]; do
            record $i | dd of=$d bs=4k seek=$i iflag=fullblock oflag=direct 2>/dev/null
            echo stored $i
            i=$((i + 1))
        done
    }
    # Fails unless records $1 to $2 are there.
    check() {
        i=$1
        while [ $i -le $2 ]; do
            record $i >/tmp/record
            dd if=$d bs=4k skip=$i count=1 iflag=direct 2>/dev/null | cmp -s - /tmp/record ||
                { echo lost record $i; return 1; }
            i=$((i + 1))
        done
    }
    load() {
        fio --name=load --filename=$d --direct=1 --ioengine=io_uring --eta=never --rw=randwrite --bs=4k \\
            --iodepth=16 --offset=128M --size=64M --time_based --runtime=100 >/dev/null 2>&1 &
        # Until it does load.
        until grep -q . /sys/block/${d##*/}/inflight && [ $(awk '{print $2}' /sys/block/${d##*/}/inflight) -gt 0 ]; do
            sleep 0.05
        done
    }
";

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("life/killed-under-load,1q", |site| killed(site, 1)),
        Case::new("life/killed-under-load,4q", |site| killed(site, 4)),
        Case::new("life/reboot-under-load", rebooted),
        Case::new("life/driver-rebound-under-load", rebound),
        Case::new("life/frozen-neighbour", frozen_neighbour),
    ]
}

/// QEMU is killed with I/O in flight and restarted, three times.
fn killed(site: &Site<'_>, queues: u16) -> Result<()> {
    let (mut daemon, vm) = site.one_disk(queues)?;
    let mut last = 0;
    for round in 0..3 {
        let script = format!("{RECORDS}\ncheck 1 {last}\necho intact\nload\nstore {} 10000\n", last + 1);
        let mut guest = site.boot(&vm, &script)?;
        guest.wait_line("intact", TIMEOUT).with_context(|| format!("round {round}, records 1 to {last}"))?;
        last += 25;
        guest.wait_line(&format!("stored {last}"), TIMEOUT)?;
        guest.kill();
        daemon.alive()?;
    }
    let script = format!("{RECORDS}\ncheck 1 {last}\n");
    site.boot(&vm, &script)?.finish(TIMEOUT)?;
    daemon.stop()
}

/// The VM is reset with I/O in flight, and its driver starts again; the disk stores the number of boots.
fn rebooted(site: &Site<'_>) -> Result<()> {
    let (daemon, mut vm) = site.one_disk(4)?;
    vm.reboots = true;
    let script = format!(
        "{RECORDS}
        boots=$(dd if=$d bs=4k count=1 iflag=direct 2>/dev/null | tr -d '\\0')
        boots=${{boots:-0}}
        check 1 $((boots * 20))
        echo boot $boots
        if [ $boots -lt 2 ]; then
            load
            store $((boots * 20 + 1)) $((boots * 20 + 20))
            {{ echo $((boots + 1)); cat /dev/zero; }} | head -c 4096 |
                dd of=$d bs=4k count=1 iflag=fullblock oflag=direct 2>/dev/null
            reboot -f
        fi
        "
    );
    let report = site.boot(&vm, &script)?.finish(TIMEOUT)?;
    let boots: Vec<_> = report.lines.iter().filter(|line| line.starts_with("boot ")).collect();
    ensure!(boots == ["boot 0", "boot 1", "boot 2"], "{boots:?}");
    daemon.stop()
}

/// The driver unbinds the device under load and binds it again.
fn rebound(site: &Site<'_>) -> Result<()> {
    let (daemon, vm) = site.one_disk(4)?;
    let script = format!(
        "{RECORDS}
        for round in 0 1 2; do
            load
            store $((round * 10 + 1)) $((round * 10 + 10))
            device=$(virtio_of 0)
            echo $device >/sys/bus/virtio/drivers/virtio_blk/unbind
            killall fio 2>/dev/null || true
            wait || true
            echo $device >/sys/bus/virtio/drivers/virtio_blk/bind
            d=$(disk 0)
            check 1 $((round * 10 + 10))
        done
        "
    );
    site.boot(&vm, &script)?.finish(TIMEOUT)?;
    daemon.stop()
}

/// A frozen guest with I/O in flight delays no other guest on its core, and continues without errors.
fn frozen_neighbour(site: &Site<'_>) -> Result<()> {
    let (daemon, vm) = site.one_disk(1)?;
    site.file_disk(&daemon, "disk1", "64M")?;
    let neighbour = Vm::with_disks(vec![Disk::new(&daemon.attach("disk1", &[])?, 1)]);
    let script = format!("{RECORDS}\nload\nstore 1 10\necho ready\nawait go\nstore 11 20\ncheck 1 20\n");
    let mut frozen = site.boot(&vm, &script)?;
    frozen.wait_line("ready", TIMEOUT)?;
    frozen.signal(Signal::STOP)?;
    let verify =
        "measure v --filename=$(disk 0) --rw=randwrite --bs=4k --iodepth=8 --size=8M --verify=crc32c";
    site.boot(&neighbour, verify)?.finish(TIMEOUT)?;
    // The control thread is as responsive as the reactors.
    let asked = Instant::now();
    daemon.aryk(&["status"])?;
    ensure!(asked.elapsed() < Duration::from_secs(2), "status took {:?}", asked.elapsed());
    frozen.signal(Signal::CONT)?;
    frozen.send("go")?;
    frozen.finish(TIMEOUT)?;
    daemon.stop()
}
