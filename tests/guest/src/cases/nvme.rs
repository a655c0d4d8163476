//! NVMe drives that a process of the guest drives by VFIO, behind a virtual IOMMU.

use anyhow::{Result, ensure};

use super::{Case, Site, TIMEOUT};
use crate::{Nvme, Vm};

/// Binds a drive to VFIO and opens it, after the refusals that protect it. The second drive is a function of the same device, and
/// so in the same IOMMU group as the third.
const FUNCTIONS: &str = r#"
    load_modules vfio
    ulimit -l unlimited
    one=0000:00:18.0; two=0000:00:19.0; three=0000:00:19.1
    run() { program function "$@" 2>&1; }
    refused() { if said=$(run "$@"); then echo "not refused: $*"; exit 1; fi; echo "refused $said"; }
    run list
    refused 0000:00:00.9
    refused 0000:05:00.0
    refused bind 0000:00:00.0
    refused $one

    disk=$(ls -d /sys/bus/pci/devices/$one/nvme/nvme*/nvme*n1); disk=/dev/${disk##*/}
    mkfs.ext4 -q $disk && mount $disk /mnt
    refused bind $one
    umount /mnt
    sleep 30 <$disk & opener=$!
    refused bind $one
    kill $opener; wait $opener 2>/dev/null || true

    run bind $one
    run $one
    echo operator:x:1000:1000::/:/bin/sh >/etc/passwd
    as_user() { LD_LIBRARY_PATH=/programs/lib start-stop-daemon -S -c operator -x /programs/function -- "$@" 2>&1; }
    run() { as_user "$@"; }
    refused $one
    chown 1000 /dev/vfio/$(basename $(readlink /sys/bus/pci/devices/$one/iommu_group))
    (ulimit -l 1024; refused $one)
    run $one | grep "^opened again"
    run() { program function "$@" 2>&1; }
    run unbind $one
    sleep 1
    [ -b $disk ] && echo returned

    run bind $two
    refused $two
    run bind $three
    run $two | grep "^vs "

    run hold $two >/tmp/hold & holder=$!
    while ! grep -q open /tmp/hold; do sleep 0.1; done
    refused unbind $two
    echo 1 >/sys/bus/pci/devices/$two/remove
    wait $holder
    cat /tmp/hold
    [ -e /sys/bus/pci/devices/$two ] || echo removed
    refused $two
"#;

/// Each line that the guest must print, in order; other lines may be between them.
const EXPECTED: &[&str] = &[
    "0000:00:18.0 1b36:0010 nvme ",
    "nvme",
    "0000:00:19.0 1b36:0010 nvme ",
    "0000:00:19.1 1b36:0010 nvme ",
    "refused \"0000:00:00.9\" is no PCI address",
    "refused 0000:05:00.0: no such PCI function",
    "refused 0000:00:00.0 is no NVMe controller: its PCI class is 060000",
    "refused 0000:00:18.0 is bound to nvme, not to vfio-pci",
    "refused 0000:00:18.0 is in use: nvme0n1 is mounted at /mnt",
    "refused 0000:00:18.0 is in use: nvme0n1 is open in process",
    "name 0000:00:18.0",
    "cap 0x004",
    "vs 0x00010400",
    "csts 0x00000000",
    "second open: 0000:00:18.0 is in use: this process",
    "second process: 0000:00:18.0 is in use: another process",
    "mapped vs 0x00010400",
    "mapped 4194304 bytes at 0x",
    "same true",
    "twice: no DMA mapping",
    "vectors 65",
    "masked true",
    "vs after reset 0x00010400",
    "lost 0xffffffff true",
    "0000:00:18.0 is gone: its registers cannot be accessed",
    "mapped again vs 0x00010400",
    "dropped with a mapping",
    "opened again: 0000:00:18.0",
    "refused no permission to open /dev/vfio/",
    "refused name 0000:00:18.0",
    "cannot lock 4194304 bytes of memory for DMA: RLIMIT_MEMLOCK is 1024 KiB",
    "opened again: 0000:00:18.0",
    "returned",
    "refused 0000:00:19.0 shares IOMMU group 3 with 0000:00:19.1, which is bound to nvme",
    "vs 0x00010400",
    "refused 0000:00:19.0 is in use: vfio/3 is open in process",
    "open",
    "the kernel asks for 0000:00:19.0 back: true",
    "removed",
    "refused 0000:00:19.0: no such PCI function",
];

/// Writes to two drives by the kernel, and reads them by the driver of `crates/nvme`, twice each.
const DRIVER: &str = r#"
    load_modules vfio
    ulimit -l unlimited
    for one in 0000:00:18.0 0000:00:19.0; do
        disk=$(ls -d /sys/bus/pci/devices/$one/nvme/nvme*/nvme*n1); disk=/dev/${disk##*/}
        printf "$one here" | dd of=$disk conv=sync bs=4096 2>/dev/null
        sync
        program function bind $one
        program identify $one 2>&1
        program identify $one >/dev/null 2>&1 && echo again
        program function unbind $one
    done
"#;

/// Each line that the guest must print, in order. The blocks begin with what the kernel wrote.
const IDENTIFIED: &[&str] = &[
    "QEMU NVMe Ctrl aryk-nvme0 firmware ",
    "namespace 1: 32768 blocks of 512 bytes",
    "  block 0: Some(Successful Completion (SCT 0h SC 00h)) [30, 30, 30, 30, 3a, 30, 30, 3a, 31, 38, 2e, 30, 20, 68",
    "again",
    "QEMU NVMe Ctrl aryk-nvme1 firmware ",
    "namespace 1: 4096 blocks of 4096 bytes",
    "  block 0: Some(Successful Completion (SCT 0h SC 00h)) [30, 30, 30, 30, 3a, 30, 30, 3a, 31, 39, 2e, 30, 20, 68",
    "again",
];

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("nvme/functions", functions), Case::new("nvme/driver", driver)]
}

fn functions(site: &Site<'_>) -> Result<()> {
    let mut vm = Vm::with_disks(Vec::new());
    for (slot, properties) in [("18.0", ""), ("19.0", "multifunction=on"), ("19.1", "")] {
        let image = site.path(&format!("nvme-{slot}.img"));
        std::fs::File::create(&image)?.set_len(16 << 20)?;
        vm.nvme.push(Nvme { image, slot, properties: properties.to_owned() });
    }
    expect(site, vm, &["function"], FUNCTIONS, EXPECTED)
}

fn driver(site: &Site<'_>) -> Result<()> {
    let mut vm = Vm::with_disks(Vec::new());
    for (slot, properties) in [("18.0", ""), ("19.0", "logical_block_size=4096,physical_block_size=4096")] {
        let image = site.path(&format!("nvme-{slot}.img"));
        std::fs::File::create(&image)?.set_len(16 << 20)?;
        vm.nvme.push(Nvme { image, slot, properties: properties.to_owned() });
    }
    expect(site, vm, &["function", "identify"], DRIVER, IDENTIFIED)
}

/// Boots the VM with these programs, and checks that the script prints these lines in order.
fn expect(site: &Site<'_>, mut vm: Vm, programs: &[&str], script: &str, lines: &[&str]) -> Result<()> {
    vm.programs.extend(programs.iter().map(|name| site.example(name)));
    let report = site.boot(&vm, script)?.finish(TIMEOUT)?;
    let said = report.lines.join("\n");
    let mut printed = report.lines.iter();
    for expected in lines {
        let found = printed.any(|line| line.starts_with(expected));
        ensure!(found, "no line {expected:?} in its place:\n{said}");
    }
    Ok(())
}
