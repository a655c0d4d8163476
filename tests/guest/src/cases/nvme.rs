//! NVMe drives that a process of the guest drives by VFIO, behind a virtual IOMMU.

use std::path::PathBuf;

use anyhow::{Result, ensure};

use super::{Case, Lab, Site, TIMEOUT};
use crate::image::Kernel;
use crate::process::wait_until;
use crate::vm::Report;
use crate::{Nvme, Port, Vm};

/// Prints the files of VFIO and of iommufd that a process has open.
const PRINT_FILES: &str = r#"
    print_files() {
        echo "files:" $(for fd in /proc/$1/fd/*; do readlink "$fd" | grep -E '^/dev/(vfio|iommu)' || true; done | sort -u)
    }
"#;

/// How the line begins that [`PRINT_FILES`] prints of a process that drives a drive, with iommufd and without it.
const WITH_IOMMUFD: &str = "files: /dev/iommu /dev/vfio/devices/vfio";
const WITH_GROUPS: &str = "files: /dev/vfio/";
/// Stands for that line in a list of lines.
const FILES: &str = "files";

/// Binds a drive to VFIO and opens it, after the refusals that protect it. The second drive is a function of the same device, and
/// so in the same IOMMU group as the third.
const FUNCTIONS: &str = r#"
    load_modules vfio
    ulimit -l unlimited
    one=0000:00:18.0; two=0000:00:19.0; three=0000:00:19.1
    run() { program function "$@" 2>&1; }
    refused() { if said=$(run "$@"); then echo "not refused: $*"; exit 1; fi; echo "refused $said" | sed "s/${disk##*/} is/the disk is/"; }
    # The kernel numbers drives in the order in which they answer.
    disk=$(ls -d /sys/bus/pci/devices/$one/nvme/nvme*/nvme*n1); disk=/dev/${disk##*/}
    run list
    refused 0000:00:00.9
    refused 0000:05:00.0
    refused bind 0000:00:00.0
    refused $one

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
    print_files $(pidof function)
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
    "refused 0000:00:00.0 is a bridge (PCI class 060000), not an NVMe controller",
    "refused 0000:00:18.0 is bound to nvme, not to vfio-pci",
    "refused 0000:00:18.0 is in use: the disk is mounted at /mnt",
    "refused 0000:00:18.0 is in use: the disk is open in process",
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
    FILES,
    "refused 0000:00:19.0 is in use: vfio/",
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

/// The commands of an operator: drives are listed, checked, bound and unbound, and refused where they are in use.
const COMMANDS: &str = include_str!("nvme/commands.sh");

/// The unit that binds a drive at each boot.
const UNIT: &str = include_str!("../../../../contrib/systemd/aryk-nvme-bind@.service");

/// Each line that the guest must print, in order.
const COMMANDED: &[&str] = &[
    "ADDRESS DRIVER GROUP SIZE TEMP DRIVE",
    "0000:00:18.0 nvme 2 16M ",
    "unused",
    "0000:00:19.0 nvme 3 16M ",
    "group also has 0000:00:19.1 (nvme)",
    "refused STATE CHECK FOUND",
    "ok IOMMU on, with ",
    "MISSING vfio-pci not loaded",
    "do: sudo modprobe vfio-pci; at each boot:",
    "ok memlock ",
    "option drive 0000:00:18.0, QEMU NVMe Ctrl, aryk-nvme0: unused, driver:",
    "do: sudo aryk nvme bind 0000:00:18.0",
    "do: sudo aryk nvme bind 0000:00:19.0 0000:00:19.1",
    "aryk: one check needs correction",
    "refused aryk: the kernel's driver vfio-pci is not loaded: run `modprobe vfio-pci`",
    "refused aryk: 0000:05:00.0: no such PCI function",
    "refused aryk: 0000:00:08.0 is another storage controller (PCI class 010000), not an NVMe controller",
    "refused aryk: 0000:00:08.0 is another storage controller",
    "refused error: invalid value '0000:00:00.9' for '<ADDRESS>...': \"0000:00:00.9\" is no PCI address",
    "refused aryk: there is no user 'nobody-here'",
    "nvme0n1 is mounted at /mnt",
    "ok drive 0000:00:18.0, QEMU NVMe Ctrl, aryk-nvme0: stays with the",
    "kernel: nvme0n1 is mounted at /mnt",
    "refused aryk: 0000:00:18.0 is in use: nvme0n1 is mounted at /mnt",
    "Unmount it, or end the process that uses it",
    "nothing changed: nvme nvme",
    "\"message\": \"0000:00:18.0 is in use: nvme0n1 is mounted at /mnt\"",
    "in another namespace: refused aryk: 0000:00:18.0 is in use: another mount, device or process holds nvme0n1",
    "0000:00:18.0 is now bound to vfio-pci.",
    "0000:00:18.0 was already bound to vfio-pci.",
    "0000:00:18.0 vfio-pci 2 - - no process drives it",
    "[ { \"address\": \"0000:00:19.0\", \"bind_too\": [ { \"address\": \"0000:00:19.1\", \"driver\": \"nvme\" } ], \"changed\": true",
    "owner 1000",
    "refused STATE CHECK FOUND",
    "ok vfio-pci loaded",
    "ok drive 0000:00:18.0: bound to VFIO; the user root may open it",
    "MISSING drive 0000:00:19.0: shares its IOMMU group with 0000:00:19.1",
    "do: Bind it too: sudo aryk nvme bind 0000:00:19.1",
    "0000:00:19.1 is now bound to vfio-pci.",
    "Nothing necessary is missing.",
    "refused STATE CHECK FOUND",
    "MISSING VFIO the user operator may not open /dev/vfio/vfio",
    "do: sudo chmod 666 /dev/vfio/vfio",
    "MISSING drive 0000:00:18.0: bound, but the user operator may not open",
    "do: sudo aryk nvme bind 0000:00:18.0 --owner operator",
    "ok drive 0000:00:19.0: bound to VFIO; the user operator may open",
    "0000:00:18.0 was already bound to vfio-pci.",
    "\"healthy\": true",
    "0000:00:18.0 vfio-pci 2 - - vfio/2 is open in process ",
    "refused aryk: 0000:00:18.0 is in use: vfio/2 is open in process ",
    "still vfio-pci",
    "[ \"Nvme0n1\" ]",
    "0000:00:18.0 vfio-pci 2 16M ",
    "(arykd)",
    "controller Nvme0, disks: Nvme0n1",
    "refused aryk: 0000:00:18.0 is in use: vfio/2 is open in process ",
    "true",
    "refused aryk: ",
    "Disk 'vm1' of 16M is ready.",
    "place PCIe 0000:00:18.0",
    "serial aryk-nvme0",
    "1 vm1 16M 512 ",
    "state \"driven\"",
    "serial \"aryk-nvme0\"",
    "size 16777216",
    "iommu_group 2",
    "disks [ \"vm1\" ]",
    "temperature 50 °C",
    "The controller '",
    "gone: []",
    "state \"bound\"",
    "The daemon, process ",
    "unit: 0000:00:18.0 is now bound to vfio-pci. owner 1001",
    "unit: 0000:00:18.0 was already bound to vfio-pci. owner 1001",
    "unit: 0000:00:18.0 is now bound to nvme.",
    "unit: refused aryk: 0000:00:18.0 is in use: nvme0n1 is mounted at /mnt",
    "unit: 0000:00:18.0 is now bound to vfio-pci. owner 1001",
    "0000:00:18.0 is now bound to nvme.",
    "0000:00:19.0 is now bound to nvme.",
    "0000:00:19.1 is now bound to nvme.",
    "0000:00:18.0 was already bound to nvme.",
    "kept",
    "offered again: 0000:00:18.0 is now bound to nvme.",
];

/// The tools of Debian on a drive that `examples/cuse` holds by VFIO. At first its callers may only read.
const CUSE: &str = include_str!("nvme/cuse.sh");

/// Each line that the guest must print, in order.
const TOOLS: &[&str] = &[
    "crw-------",
    "crw-------",
    "== id-ctrl",
    "sn        : aryk-nvme0",
    "mn        : QEMU NVMe Ctrl",
    "== smart-log",
    "temperature",
    "== list-ns",
    "[   0]:0x1",
    "== id-ns",
    "nsze    : 0x8000",
    "== get-log",
    "512",
    "== a long log",
    "66560",
    "== get-feature",
    "get-feature:0x04 (Temperature Threshold), Current value:0x00000157",
    "== smartctl",
    "Model Number:                       QEMU NVMe Ctrl",
    "Serial Number:                      aryk-nvme0",
    "SMART overall-health self-assessment test result: PASSED",
    "Temperature:                        50 Celsius",
    "== smartctl n1",
    "Serial Number:                      aryk-nvme0",
    "== refused",
    "refused format: Operation not permitted",
    "refused set-feature: Operation not permitted",
    "refused Reset: Operation not permitted",
    "refused Subsystem-reset: Operation not supported",
    "refused detach namespace: Operation not permitted",
    "refused submit-io: Operation not permitted",
    "refused submit-io: Operation not permitted",
    "refused passthru: Message too long",
    "refused passthru: Invalid argument",
    "refused NVMe status: Invalid Field in Command",
    "refused NVMe status: Invalid Namespace or Format",
    "refused dd: /dev/aryk/drive: Invalid argument",
    "refused /dev/aryk/drive: Permission denied",
    "removed /dev/aryk/drive in ",
    "/dev/aryk is gone",
    "killed with a command in flight",
    "removed /dev/drive in ",
    "identify controller: Software caused connection abort",
    "process ",
    "get-feature:0x04 (Temperature Threshold), Current value:0x00000150",
    "was reset",
    "sn        : aryk-nvme0",
    "process ",
    "Success formatting namespace:1",
    "removed /dev/drive in ",
    "/dev/null exists already",
    "the kernel refuses to create /dev/drive; its log (dmesg) says why",
    "gone with its process",
    "0000000  \\0  \\0  \\0  \\0",
];

/// The same tools on a drive of a daemon in the guest.
const DAEMON: &str = include_str!("nvme/tools.sh");

/// Each line that the guest must print, in order.
const SERVED: &[&str] = &[
    "refused aryk: Permission denied: `/dev/nvme0n1` is not in a directory that disks may be in: /tmp/disks",
    "refused aryk: No such device: the NVMe controller nv has no character devices",
    "true",
    "refused aryk: File exists: /dev/aryk/nv exists already",
    "device /dev/aryk/nv",
    "device /dev/aryk/nvn1",
    "sn        : aryk-nvme0",
    "[   0]:0x1",
    "Serial Number:                      aryk-nvme0",
    "SMART overall-health self-assessment test result: PASSED",
    "Temperature:                        50 Celsius",
    "refused format: Operation not permitted",
    "refused Reset: Operation not permitted",
    "refused submit-io: Operation not permitted",
    "true",
    "the devices are gone",
    "true",
    "was reset",
    "Success formatting namespace:1",
    "sn        : aryk-nvme0",
    "    \"resets\": 2,",
    "true",
    "the devices are gone with the controller",
    "refused aryk: No such device: there is no NVMe controller 'nv'",
];

/// `arykd` in the guest, with one drive for several front-ends.
const SEVERAL: &str = include_str!("nvme/several.sh");

/// Each line that the guest must print, in order.
const SERVED_BY_ALL: &[&str] = &[
    "attached nv0n1 nv0n2 nv0n3",
    FILES,
    "aryk: Device or resource busy: 0000:00:18.0 is in use: another process drives it; `fuser -v /dev/vfio/",
    "verified nv0n1",
    "verified nv0n2",
    "verified nv0n3",
    "reset 3 times, failed 0",
    "pairs 2",
    "the pair of core 0 has completed the commands",
    "the pair of core 1 has completed the commands",
    "polled: no interrupts",
    "with interrupts",
    "again nv0n1 nv0n2 nv0n3",
    "unchanged nv0n1",
    "unchanged nv0n2",
    "unchanged nv0n3",
    "detached",
    "Disk 'second' of 16M is ready.",
    "second is namespace 2",
    "second has blocks of 4096 bytes",
    "verified second",
    "returned",
];

/// `arykd` in the guest, one of whose VMs is killed.
const LEFT: &str = include_str!("nvme/left.sh");

/// `arykd` in the guest, whose drive goes and comes back.
const PLUG: &str = include_str!("nvme/plug.sh");

/// `arykd` in the guest, which attaches drives by itself.
const HOTPLUG: &str = include_str!("nvme/hotplug.sh");

/// `arykd` in the guest, whose drive comes back at another PCI address.
const MOVED: &str = include_str!("nvme/moved.sh");

/// `arykd` in the guest, one of whose drives is pulled out without notice.
const PULLED: &str = include_str!("nvme/pulled.sh");

/// `arykd` in the guest, whose drives report events, and whose bus reports errors.
const EVENTS: &str = include_str!("nvme/events.sh");

/// Each line that the guest must print, in order.
const HAPPENED: &[&str] = &[
    "log: a health warning",
    "warnings 1",
    "warnings          temperature is outside of its thresholds",
    "namespace 2 went: disks nv1n1",
    "namespace 2 appeared: disks nv1n1 nv1n2",
    "bus error 1: no request failed, reset by BusError",
    "bus error 2: no request failed, reset by BusError",
    "its writes may be lost: its disk was removed",
    "detached",
];

/// A VM in the guest that returns pages of its memory, as a balloon does.
const BALLOON: &str = include_str!("nvme/balloon.sh");

/// Each line that the guest must print, in order. The VM returns 2 MiB. Pinned pages stay the drive's: the VM does not see
/// what is read into them, and the drive does not get what the VM has in the new ones.
const BALLOONED: &[&str] = &[
    "bounce before: read right, written right",
    "bounce after: read right, written right",
    "bounce huge before: read right, written right",
    "bounce huge after: read right, written right",
    "auto before: read right, written right",
    "auto after: read right, written right",
    "auto huge before: read right, written right",
    "auto huge after: read 2048 KiB wrong, written 2048 KiB wrong",
    "pin before: read right, written right",
    "pin after: read 2048 KiB wrong, written 2048 KiB wrong",
    "pin huge before: read right, written right",
    "pin huge after: read 2048 KiB wrong, written 2048 KiB wrong",
];

/// `arykd` in the guest, which is killed under load.
const KILLED: &str = include_str!("nvme/killed.sh");

/// Each line that the guest must print, in order. Both lives of the front-end end without a violation.
const RECOVERED: &[&str] = &[
    "life 0: blk server",
    "life 1: scsi client",
    "20 crashes in 2 lives, seed 1: ",
    "round 1: closed on exec, and the supervisor has 0",
    "round 1: unchanged",
    "round 2: closed on exec, and the supervisor has 0",
    "round 2: unchanged",
    "0000:00:18.0 is now bound to nvme.",
];

/// Drivers that are killed with commands in flight, and their successors.
const FENCE: &str = r#"
    load_modules vfio
    ulimit -l unlimited
    drive=0000:00:18.0
    program function bind $drive
    echo ready
    while read -r operation byte; do
        LD_LIBRARY_PATH=/programs/lib /programs/fence flood $drive $operation & flood=$!
        await kill
        print_files $flood
        if program fence flood $drive read 2>/tmp/second; then exit 1; fi
        cat /tmp/second
        (sleep 0.2; kill -9 $flood) &
        program fence succeed $drive $byte
        wait
        echo stopped
    done
"#;

/// Commands that the drive of a killed daemon executes each second: fewer than its front-end submits, so that some are in flight.
const LOADED: u64 = 2000;
/// Commands that the drive of these drivers executes each second: a flood lasts for two seconds.
const SLOW: u64 = 64;
/// The bytes of a flood.
const FLOODED: usize = 128 * 4096;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("nvme/functions", |site| functions(site, WITH_GROUPS)),
        Case::new("nvme/driver", driver),
        Case::new("nvme/commands", commands),
        Case::new("nvme/cuse", cuse),
        Case::new("nvme/tools", tools),
        Case::new("nvme/several", |site| several(site, WITH_GROUPS)),
        Case::new("nvme/left", left),
        Case::new("nvme/plug", plug),
        Case::new("nvme/hotplug", hotplug),
        Case::new("nvme/moved", moved),
        Case::new("nvme/pulled", pulled),
        Case::new("nvme/events", events),
        Case::new("nvme/balloon", balloon),
        Case::new("nvme/fence", |site| fence(site, WITH_GROUPS)),
        Case::new("nvme/killed", killed),
        Case::new("nvme/iommufd-functions", |site| with_iommufd(site, functions)),
        Case::new("nvme/iommufd-several", |site| with_iommufd(site, several)),
        Case::new("nvme/iommufd-fence", |site| with_iommufd(site, fence)),
    ]
}

/// Runs a case with a kernel that has iommufd and VFIO's character devices.
fn with_iommufd(site: &Site<'_>, case: fn(&Site<'_>, &str) -> Result<()>) -> Result<()> {
    let lab = Lab { image: site.lab.image.beside(Kernel::Iommufd)?, ..site.lab.clone() };
    case(&Site { lab: &lab, directory: site.directory }, WITH_IOMMUFD)
}

/// These lines, with the one of the files.
fn with_files<'a>(lines: &[&'a str], files: &'a str) -> Vec<&'a str> {
    lines.iter().map(|line| if *line == FILES { files } else { line }).collect()
}

/// The drives of which two are functions of one device.
const THREE: [(&str, &str); 3] = [("18.0", ""), ("19.0", "multifunction=on"), ("19.1", "")];

/// A VM with drives of 16 MiB, by slot and properties.
fn vm(site: &Site<'_>, drives: &[(&'static str, &str)]) -> Result<Vm> {
    let mut vm = Vm::with_disks(Vec::new());
    for &(slot, properties) in drives {
        let image = site.path(&format!("nvme-{slot}.img"));
        std::fs::File::create(&image)?.set_len(16 << 20)?;
        let properties = properties.to_owned();
        vm.nvme.push(Nvme { images: vec![image], slot, is_pluggable: false, properties });
    }
    Ok(vm)
}

fn functions(site: &Site<'_>, files: &str) -> Result<()> {
    let vm = vm(site, &THREE)?;
    expect(
        site,
        vm,
        vec![site.example("function")],
        &format!("{PRINT_FILES}{FUNCTIONS}"),
        &with_files(EXPECTED, files),
    )
}

fn commands(site: &Site<'_>) -> Result<()> {
    let programs = ["aryk", "arykd"].map(|name| site.program(name));
    let vm = Vm { memory_mib: 512, ..vm(site, &THREE)? };
    let script = COMMANDS.replace("@START@", &of_unit("ExecStart")?).replace("@STOP@", &of_unit("ExecStop")?);
    expect(site, vm, programs.to_vec(), &script, COMMANDED)
}

/// The commands of a setting of the unit, for the script's first drive.
fn of_unit(setting: &str) -> Result<String> {
    let values = UNIT.lines().filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
    let commands: Vec<_> = values.map(|command| command.replace("%i", "$one")).collect();
    let are_known = commands.iter().all(|command| command.starts_with("/usr/bin/aryk "));
    ensure!(are_known && !commands.is_empty(), "the unit has other commands: {setting} {commands:?}");
    Ok(commands.join("\n").replace("/usr/bin/aryk ", "aryk "))
}

fn driver(site: &Site<'_>) -> Result<()> {
    let vm = vm(site, &[("18.0", ""), ("19.0", "logical_block_size=4096,physical_block_size=4096")])?;
    let programs = ["function", "identify"].map(|name| site.example(name));
    expect(site, vm, programs.to_vec(), DRIVER, IDENTIFIED)
}

fn tools(site: &Site<'_>) -> Result<()> {
    let mut vm = vm(site, &[("18.0", "")])?;
    // The daemon is large, and the guest has it twice while it starts.
    vm.memory_mib = 512;
    expect(
        site,
        vm,
        vec![site.example("function"), site.program("aryk"), site.program("arykd")],
        DAEMON,
        SERVED,
    )
}

fn cuse(site: &Site<'_>) -> Result<()> {
    let programs = ["function", "cuse"].map(|name| site.example(name));
    expect(site, vm(site, &[("18.0", ""), ("19.0", "")])?, programs.to_vec(), CUSE, TOOLS)
}

/// A VM with one drive of several namespaces, for `arykd` in it.
fn with_namespaces(site: &Site<'_>, count: usize) -> Result<Vm> {
    let mut vm = Vm::with_disks(Vec::new());
    vm.memory_mib = 512;
    let mut images = Vec::new();
    for nsid in 1..=count {
        let image = site.path(&format!("nvme-{nsid}.img"));
        std::fs::File::create(&image)?.set_len(16 << 20)?;
        images.push(image);
    }
    vm.nvme.push(Nvme { images, slot: "18.0", is_pluggable: false, properties: "max_ioqpairs=4".to_owned() });
    vm.programs.extend(["aryk", "arykd"].map(|name| site.program(name)));
    Ok(vm)
}

/// `arykd` in the guest: one drive with three namespaces on two cores, for three front-ends.
fn several(site: &Site<'_>, files: &str) -> Result<()> {
    let script = format!("{PRINT_FILES}{SEVERAL}");
    expect(site, with_namespaces(site, 3)?, Vec::new(), &script, &with_files(SERVED_BY_ALL, files))
}

/// A VM that is killed while the drive has its commands keeps its memory mapped until they end, and disturbs no other VM.
fn left(site: &Site<'_>) -> Result<()> {
    let mut guest = site.boot(&with_namespaces(site, 2)?, LEFT)?;
    guest.wait_line("slow", TIMEOUT)?;
    guest.limit_namespace(0, 1, 16)?;
    guest.send("kill")?;
    let lines = ["all memory is mapped after a second", "unmapped after ", "the other VM goes on"];
    in_order(&guest.finish(TIMEOUT)?, &lines)
}

fn balloon(site: &Site<'_>) -> Result<()> {
    let vm = Vm { memory_mib: 512, ..vm(site, &[("18.0", "")])? };
    let programs = vec![site.program("aryk"), site.program("arykd"), site.example("balloon")];
    expect(site, vm, programs, BALLOON, BALLOONED)
}

/// After `kill -9` with commands in flight, nothing of the dead driver reaches the medium or the successor's memory.
fn fence(site: &Site<'_>, files: &str) -> Result<()> {
    let mut vm = vm(site, &[("18.0", "")])?;
    vm.programs.extend(["function", "fence"].map(|name| site.example(name)));
    let image = vm.nvme[0].images[0].clone();
    let medium = || -> Result<Vec<u8>> { Ok(std::fs::read(&image)?[..FLOODED].to_vec()) };
    let mut guest = site.boot(&vm, &format!("{PRINT_FILES}{FENCE}"))?;
    guest.wait_line("ready", TIMEOUT)?;
    for round in 1..=4_u8 {
        let is_write = round % 2 == 1;
        guest.limit_nvme(0, SLOW)?;
        guest.send(&format!("{} {round}", if is_write { "write" } else { "read" }))?;
        let line = guest.wait_line("flooding ", TIMEOUT)?;
        let words: Vec<_> = line.split(' ').collect();
        ensure!(words[1].parse::<u64>()? > SLOW, "too few commands are in flight: {line}");
        if is_write {
            // What is checked below can fail: such writes change the medium.
            let before = medium()?;
            wait_until("a write of the flood", TIMEOUT, || Ok((medium()? != before).then_some(())))?;
        }
        guest.send("kill")?;
        guest.wait_line(files, TIMEOUT)?;
        guest.wait_line("0000:00:18.0 is in use: ", TIMEOUT)?;
        let opened = guest.wait_line("opened ", TIMEOUT)?;
        ensure!(opened.ends_with(words[2]), "the memory should have the same address: {line}, {opened}");
        let before = medium()?;
        ensure!(is_write == before.contains(&0xf1), "{round}: the medium has unexpected data");
        guest.wait_line("quiet", TIMEOUT)?;
        ensure!(medium()? == before, "{round}: a write of the dead driver was late");
        guest.limit_nvme(0, 0)?;
        guest.send("write")?;
        for moment in ["written", "own data", "stopped"] {
            guest.wait_line(moment, TIMEOUT)?;
            ensure!(
                medium()?.iter().all(|byte| *byte == round),
                "{round}, {moment}: the medium has other data"
            );
        }
    }
    drop(guest);
    Ok(())
}

/// `arykd` is killed with requests in flight, and its successors complete them. No late write of a dead daemon lands: a front-end
/// checks what it reads, and the medium at the end.
fn killed(site: &Site<'_>) -> Result<()> {
    let mut vm = Vm { memory_mib: 768, ..vm(site, &[("18.0", "")])? };
    // The size that the crash test expects.
    std::fs::File::options().write(true).open(&vm.nvme[0].images[0])?.set_len(2 << 20)?;
    // The tests' build of the daemon has points at which it kills itself.
    vm.programs.extend([site.program("aryk"), site.tool("arykd"), site.tool("aryk-crash-tests")]);
    let mut guest = site.boot(&vm, KILLED)?;
    guest.wait_line("ready", TIMEOUT)?;
    guest.limit_nvme(0, LOADED)?;
    guest.send("crash")?;
    guest.wait_line("20 crashes in ", TIMEOUT)?;
    in_order(&guest.finish(TIMEOUT)?, RECOVERED)
}

/// A VM with a drive that can be unplugged, and the daemon in it.
fn pluggable(site: &Site<'_>) -> Result<Vm> {
    let mut vm = Vm::with_disks(Vec::new());
    vm.memory_mib = 512;
    let image = site.path("nvme.img");
    std::fs::File::create(&image)?.set_len(16 << 20)?;
    let (images, properties) = (vec![image], String::new());
    vm.nvme.push(Nvme { images, slot: "18.0", is_pluggable: true, properties });
    vm.programs.extend(["aryk", "arykd"].map(|name| site.program(name)));
    Ok(vm)
}

/// A drive that is pulled out without notice, beside another one.
fn pulled(site: &Site<'_>) -> Result<()> {
    let mut both = pluggable(site)?;
    both.nvme.extend(vm(site, &[("1a.0", "")])?.nvme);
    let mut guest = site.boot(&both, PULLED)?;
    for line in
        ["pulled out, command register ffff", "noticed after ", "the other drive is verified, resets 0"]
    {
        guest.wait_line(line, TIMEOUT)?;
    }
    // The guest's kernel waits a minute for the drive, also if it is to power off.
    guest.kill();
    Ok(())
}

/// A drive that is bound while the daemon starts; and one that is plugged in four times, at last at another address.
fn hotplug(site: &Site<'_>) -> Result<()> {
    let mut both = pluggable(site)?;
    both.nvme.extend(vm(site, &[("1a.0", "")])?.nvme);
    let mut guest = site.boot(&both, HOTPLUG)?;
    for _ in 0..4 {
        guest.wait_line("unplug", TIMEOUT)?;
        guest.unplug_nvme(0)?;
        let line = guest.wait_line("plug ", TIMEOUT)?;
        guest.plug_nvme(0, if line.ends_with("02:00.0") { Port::Spare } else { Port::First })?;
    }
    in_order(&guest.finish(TIMEOUT)?, &["attached all"])
}

/// A drive that is unplugged and comes back at another address, under load, and then after a restart.
fn moved(site: &Site<'_>) -> Result<()> {
    let mut guest = site.boot(&pluggable(site)?, MOVED)?;
    guest.wait_line("unplug", TIMEOUT)?;
    guest.unplug_nvme(0)?;
    guest.wait_line("plug", TIMEOUT)?;
    guest.plug_nvme(0, Port::Spare)?;
    for line in ["verified", "nv0 at 0000:02:00.0", "unchanged"] {
        guest.wait_line(line, TIMEOUT)?;
    }
    guest.finish(TIMEOUT).map(drop)
}

/// A drive that is unplugged and comes back, under load.
fn plug(site: &Site<'_>) -> Result<()> {
    let mut guest = site.boot(&pluggable(site)?, PLUG)?;
    for _ in 0..2 {
        guest.wait_line("unplug", TIMEOUT)?;
        guest.unplug_nvme(0)?;
        guest.wait_line("plug", TIMEOUT)?;
        guest.plug_nvme(0, Port::First)?;
    }
    let report = guest.finish(TIMEOUT)?;
    let ends = report.lines.iter().filter(|line| line.starts_with("verified")).count();
    ensure!(ends == 2, "the load was not verified twice:\n{}", report.lines.join("\n"));
    Ok(())
}

/// A drive with two ports, one for the daemon and one for the guest's kernel, which warns of its temperature and whose namespaces
/// come and go; and another drive, whose bus reports errors under load.
fn events(site: &Site<'_>) -> Result<()> {
    let mut vm = pluggable(site)?;
    let mut option = |name: &str, value: String| vm.arguments.extend([name.to_owned(), value]);
    for nsid in 1..=2 {
        let image = site.path(&format!("shared-{nsid}.img"));
        std::fs::File::create(&image)?.set_len(16 << 20)?;
        let file = format!("file.driver=file,file.filename={}", image.display());
        option("-blockdev", format!("driver=raw,node-name=shared{nsid},{file}"));
    }
    option("-device", "nvme-subsys,id=both".to_owned());
    for slot in ["19.0", "1a.0"] {
        option("-device", format!("nvme,id=at{slot},serial=aryk-both,subsys=both,addr=0x{slot}"));
    }
    for nsid in 1..=2 {
        option("-device", format!("nvme-ns,drive=shared{nsid},bus=at19.0,nsid={nsid}"));
    }
    let mut guest = site.boot(&vm, EVENTS)?;
    for error in ["DLP", "COMP_TIME", "DLP"] {
        guest.wait_line("fail the bus", TIMEOUT)?;
        guest.inject_pcie_error(0, error)?;
    }
    let report = guest.finish(TIMEOUT)?;
    in_order(&report, HAPPENED)
}

/// Boots the VM with these programs, and checks that the script prints these lines in order.
fn expect(site: &Site<'_>, mut vm: Vm, programs: Vec<PathBuf>, script: &str, lines: &[&str]) -> Result<()> {
    vm.programs.extend(programs);
    in_order(&site.boot(&vm, script)?.finish(TIMEOUT)?, lines)
}

/// Checks that the script printed these lines in order; other lines may be between them.
fn in_order(report: &Report, lines: &[&str]) -> Result<()> {
    let said = report.lines.join("\n");
    let mut printed = report.lines.iter();
    for expected in lines {
        let found = printed.any(|line| line.starts_with(expected));
        ensure!(found, "no line {expected:?} in its place:\n{said}");
    }
    Ok(())
}
