//! Requirements of VMs: KVM, QEMU, VFIO.

use super::{Check, State};
use rustix::fs::{Access, access};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// From this version on, QEMU uses one queue per processor of the VM.
const QEMU_WITH_QUEUES: (u32, u32) = (5, 2);

pub fn kvm() -> Check {
    kvm_of(access("/dev/kvm", Access::READ_OK | Access::WRITE_OK).map_err(io::Error::from))
}

pub(super) fn kvm_of(usable: io::Result<()>) -> Check {
    let brings = "VMs at the processor's speed instead of emulation";
    match usable {
        Ok(()) => Check::ok("KVM", "/dev/kvm can be opened"),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let fix = "modprobe kvm_intel (or kvm_amd); the firmware must allow virtualization";
            Check::lacks("KVM", State::Option, "there is no /dev/kvm", brings, fix)
        }
        Err(e) => {
            let fix = "sudo usermod -aG kvm $USER, and log in again";
            Check::lacks("KVM", State::Option, format!("/dev/kvm: {e}"), brings, fix)
        }
    }
}

pub fn qemu() -> Check {
    let program = format!("qemu-system-{}", std::env::consts::ARCH);
    qemu_of(&program, first_line(&program))
}

pub(super) fn qemu_of(program: &str, version_text: Option<String>) -> Check {
    let brings = "running VMs; other vhost-user-blk front-ends work as well";
    let Some(version_text) = version_text else {
        let package = if cfg!(target_arch = "aarch64") { "qemu-system-arm" } else { "qemu-system-x86" };
        let fix = format!("apt-get install {package}");
        return Check::lacks("QEMU", State::Option, format!("no {program} in PATH"), brings, fix);
    };
    let version = version_text.split("version ").nth(1).and_then(super::kernel::version);
    match version {
        Some(old) if old < QEMU_WITH_QUEUES => Check::lacks(
            "QEMU",
            State::Option,
            version_text,
            "one queue per processor by default",
            "give QEMU num-queues=N, or use QEMU 5.2 or newer",
        ),
        _ => Check::ok("QEMU", version_text),
    }
}

pub fn qemu_img() -> Check {
    match first_line("qemu-img") {
        Some(version_text) => Check::ok("qemu-img", version_text),
        None => Check::lacks(
            "qemu-img",
            State::Option,
            "not in PATH",
            "importing qcow2 and other images: aryk disk create --from",
            "apt-get install qemu-utils",
        ),
    }
}

/// The first line that a program prints for `--version`.
fn first_line(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    let version_text = String::from_utf8_lossy(&output.stdout);
    output.status.success().then(|| version_text.lines().next().unwrap_or_default().to_owned())
}

pub fn vfio() -> Check {
    vfio_of(Path::new("/dev/vfio/vfio").exists(), iommu_groups())
}

/// The number of groups into which the IOMMU divides the devices; 0 without one.
pub(super) fn iommu_groups() -> usize {
    std::fs::read_dir("/sys/kernel/iommu_groups").map_or(0, Iterator::count)
}

pub(super) fn vfio_of(has_device: bool, groups: usize) -> Check {
    let brings = "PCI passthrough to VMs, and NVMe drives that Aryk drives itself: 'aryk doctor nvme'";
    match (has_device, groups) {
        (true, 1..) => Check::ok("VFIO", format!("present, with {groups} IOMMU groups")),
        (_, 0) => {
            let fix = "boot with intel_iommu=on (or amd_iommu=on)";
            Check::lacks("VFIO", State::Option, "no IOMMU in use", brings, fix)
        }
        (false, _) => {
            Check::lacks("VFIO", State::Option, "there is no /dev/vfio/vfio", brings, "modprobe vfio-pci")
        }
    }
}
