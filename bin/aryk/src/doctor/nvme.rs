//! What Aryk needs to drive NVMe drives itself: IOMMU, VFIO, limits, hugepages, rights; and the state of each drive.

use super::{Check, State, kernel, vms};
use crate::commands::nvme::{DriveState, named, remedy, state};
use crate::commands::service::UNIT;
use crate::error::Error;
use crate::size::Size;
use aryk_pci::PciError;
use aryk_pci::sysfs::{CLASS_NVME, Drive, Sysfs};
use nix::unistd::{Gid, User, getgrouplist};
use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};
use std::ffi::CString;
use std::fs::read_to_string;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Less locked memory is not enough for the queues and buffers of one drive.
const LEAST_LOCKED: u64 = 64 << 20;

/// The capability that exempts a process from the limit of locked memory: capabilities(7).
const CAP_IPC_LOCK: u64 = 1 << 14;

/// The file of VFIO that is not a drive's.
const CONTAINER: &str = "/dev/vfio/vfio";

/// The file that a process needs beside a drive's own file; without it, the drive is opened by its IOMMU group's file.
const IOMMUFD: &str = "/dev/iommu";

/// Parameters that make the kernel give devices to processes without interrupt remapping: for groups' files, and for iommufd.
const UNSAFE: [&str; 2] = [
    "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
    "/sys/module/iommufd/parameters/allow_unsafe_interrupts",
];

/// The benefit of everything without which no drive works.
const BRINGS: &str = "drives that Aryk drives itself";

pub fn checks() -> Result<Vec<Check>, Error> {
    let sysfs = Sysfs::default();
    let file = |path| read_to_string(path).unwrap_or_default();
    let unit = Unit::read();
    let mut checks = vec![
        iommu_of(vms::iommu_groups(), &file("/proc/cmdline"), &file("/proc/cpuinfo")),
        vfio_pci_of(sysfs.has_vfio_pci()),
    ];
    // Interrupt controllers of other processors check the interrupts of devices by themselves.
    if cfg!(target_arch = "x86_64") && vms::iommu_groups() > 0 {
        let allows_unsafe = UNSAFE.iter().any(|parameter| file(parameter).trim() == "Y");
        checks.push(interrupts_of(&file("/proc/interrupts"), allows_unsafe));
    }
    let shell = getrlimit(Resource::Memlock).maximum;
    checks.push(memlock_of(shell, is_exempt(&file("/proc/self/status")), unit.as_ref()));
    checks.extend(unit.as_ref().map(sandbox_of));
    let account = Account::of(unit.as_ref());
    if Path::new(CONTAINER).exists() {
        checks.push(container_of(&account.name, account.may_open(Path::new(CONTAINER))));
    }
    let may_use_iommufd = account.may_open(Path::new(IOMMUFD));
    if Path::new(IOMMUFD).exists() {
        checks.push(iommufd_of(&account.name, may_use_iommufd));
    }
    let brings = "guest memory that drives access directly; other memory is copied";
    checks.push(kernel::hugepages_for(brings));
    let drives = sysfs.nvme_drives()?;
    if drives.is_empty() {
        checks.push(Check::lacks(
            "drives",
            State::Option,
            "this host has no NVMe drives",
            BRINGS,
            "lspci -D",
        ));
    }
    for drive in &drives {
        let address = drive.function.address;
        let openable = sysfs.check_openable(address).map(drop);
        let mut files = sysfs.vfio_files(address)?;
        files.retain(|file| may_use_iommufd || !file.starts_with("/dev/vfio/devices"));
        checks.push(drive_of(drive, openable, &Rights::of(&account, &files)));
    }
    Ok(checks)
}

/// Whether the kernel uses an IOMMU, and if not, how to enable it.
fn iommu_of(groups: usize, command_line: &str, processors: &str) -> Check {
    if groups > 0 {
        return Check::ok("IOMMU", format!("on, with {groups} groups"));
    }
    let (feature, parameter) = match processors {
        _ if cfg!(target_arch = "aarch64") => ("the SMMU", "iommu.passthrough=1"),
        _ if processors.contains("AuthenticAMD") => ("AMD-Vi (IOMMU)", "amd_iommu=on"),
        _ => ("VT-d", "intel_iommu=on"),
    };
    if command_line.split_whitespace().any(|word| word == parameter) {
        let found = format!("off, although the kernel was started with {parameter}");
        let fix = format!("enable {feature} in the firmware's setup; in a VM: give the VM an IOMMU");
        return Check::lacks("IOMMU", State::Missing, found, BRINGS, fix);
    }
    let fix = format!(
        "enable {feature} in the firmware's setup, then: sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{parameter} iommu=pt /' /etc/default/grub && sudo update-grub && sudo reboot"
    );
    Check::lacks("IOMMU", State::Missing, "off", BRINGS, fix)
}

/// Whether the IOMMU remaps the interrupts of devices, without which the kernel gives no device to a process. `/proc/interrupts`
/// names the chip of remapped interrupts `IR-PCI-MSI` or similar.
fn interrupts_of(interrupts: &str, allows_unsafe: bool) -> Check {
    if interrupts.contains("IR-") || interrupts.contains("-IR") {
        return Check::ok("interrupts", "remapped by the IOMMU");
    }
    let (state, found) = match allows_unsafe {
        true => (State::Option, "not remapped, and allowed so: a drive can raise any interrupt of the host"),
        false => (State::Missing, "not remapped: the kernel gives no drive to a process"),
    };
    let fix = format!(
        "enable x2APIC and interrupt remapping in the firmware's setup, and take intremap=off off the kernel's command line; only if you trust the drives and their firmware: echo 1 | sudo tee {}",
        UNSAFE[0]
    );
    Check::lacks("interrupts", state, found, "drives that raise no interrupts but their own", fix)
}

fn vfio_pci_of(is_loaded: bool) -> Check {
    match is_loaded {
        true => Check::ok("vfio-pci", "loaded"),
        false => Check::lacks(
            "vfio-pci",
            State::Missing,
            "not loaded",
            BRINGS,
            "sudo modprobe vfio-pci; at each boot: echo vfio-pci | sudo tee /etc/modules-load.d/vfio-pci.conf",
        ),
    }
}

/// Whether the daemon's user may open the file from which each process gets an address space for its drives.
fn container_of(who: &str, may_open: bool) -> Check {
    match may_open {
        true => Check::ok("VFIO", format!("the user {who} may open {CONTAINER}")),
        false => Check::lacks(
            "VFIO",
            State::Missing,
            format!("the user {who} may not open {CONTAINER}"),
            BRINGS,
            format!("sudo chmod 666 {CONTAINER}: it gives access to no device"),
        ),
    }
}

/// Whether the daemon's user may open the file from which a process gets an address space for drives that it opens one by one.
fn iommufd_of(who: &str, may_open: bool) -> Check {
    match may_open {
        true => Check::ok("iommufd", format!("the user {who} may open {IOMMUFD}")),
        false => Check::lacks(
            "iommufd",
            State::Option,
            format!(
                "the user {who} may not open {IOMMUFD}: drives are opened by the files of their IOMMU groups"
            ),
            "drives on a kernel without the groups' files",
            format!("sudo chmod 666 {IOMMUFD}: it gives access to no device"),
        ),
    }
}

/// Whether a process with this `/proc/PID/status` may lock any amount of memory.
fn is_exempt(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    effective.is_some_and(|bits| bits & CAP_IPC_LOCK != 0)
}

/// The limit of locked memory of the daemon: of its unit if there is one, otherwise of a daemon that this shell starts.
fn memlock_of(shell: Option<u64>, is_exempt: bool, unit: Option<&Unit>) -> Check {
    let amount = |limit: Option<u64>| limit.map_or_else(|| "no limit".to_owned(), |n| Size(n).to_string());
    let exempt = if is_exempt { ", from which this user is exempt" } else { "" };
    let mut found = format!("this shell: {}", amount(shell));
    if shell.is_some() {
        found += exempt;
    }
    let mut limit = shell.filter(|_| !is_exempt);
    let mut fix = "ulimit -l unlimited; as root, or after a line '* hard memlock unlimited' in /etc/security/limits.conf and a new login".to_owned();
    if let Some(unit) = unit {
        found = format!("{UNIT}: {}; {found}", amount(unit.memlock));
        limit = unit.memlock;
        fix = format!(
            "sudo systemctl edit {UNIT}, add '[Service]' and 'LimitMEMLOCK=infinity'; then: sudo systemctl restart {UNIT}"
        );
    }
    let brings = "locking memory for the drives: their buffers, and guests' memory in hugepages";
    match limit {
        None => Check::ok("memlock", found),
        Some(..LEAST_LOCKED) => Check::lacks("memlock", State::Missing, found, brings, fix),
        Some(_) => Check::lacks("memlock", State::Worse, found, brings, fix),
    }
}

/// Whether the unit's sandbox permits VFIO.
fn sandbox_of(unit: &Unit) -> Check {
    let is_open = unit.device_policy == "auto" && unit.devices.is_empty();
    if is_open || unit.devices.iter().any(|device| device.contains("vfio")) {
        return Check::ok("sandbox", format!("{UNIT} may open VFIO's files"));
    }
    Check::lacks(
        "sandbox",
        State::Missing,
        format!("{UNIT} may not open VFIO's files (DeviceAllow)"),
        BRINGS,
        format!(
            "sudo install -D -m 644 -t /etc/systemd/system/{UNIT}.d /usr/share/aryk/drop-ins/nvme.conf && sudo systemctl daemon-reload && sudo systemctl restart {UNIT}"
        ),
    )
}

/// The state of a drive, and what a process needs to drive it. `openable` is the kernel's view of it.
fn drive_of(drive: &Drive, openable: Result<(), PciError>, rights: &Rights) -> Check {
    let address = drive.function.address;
    let name = match &drive.identity {
        Some(identity) => format!("{address}, {}, {}", identity.model, identity.serial),
        None => address.to_string(),
    };
    let uses = drive.usage().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    match state(drive) {
        DriveState::InUse => Check::ok("drive", format!("{name}: stays with the kernel: {uses}")),
        DriveState::Driven => Check::ok("drive", format!("{name}: {uses}")),
        DriveState::Unused | DriveState::NoDriver => unbound(drive, &name),
        DriveState::Bound => bound(drive, &name, openable, rights),
    }
}

/// A drive that nothing uses, and that is not bound to VFIO.
fn unbound(drive: &Drive, name: &str) -> Check {
    let driver = drive.function.driver.as_deref().unwrap_or("no driver");
    let mut found = format!("{name}: unused, driver: {driver}");
    let (drives, others): (Vec<_>, Vec<_>) = drive.blockers().partition(|other| other.class == CLASS_NVME);
    let all: Vec<_> = drives.iter().chain(&others).map(|other| named(other)).collect();
    if !all.is_empty() {
        found += &format!("; shares its IOMMU group with {}", all.join(", "));
    }
    let mut fix = format!("sudo aryk nvme bind {}", drive.function.address);
    for other in drives {
        fix += &format!(" {}", other.address);
    }
    for other in others {
        fix += &format!("; {}: {}", other.address, remedy(other));
    }
    Check::lacks("drive", State::Option, found, "a drive that Aryk drives itself", fix)
}

/// A drive that is bound to VFIO, and that no process drives.
fn bound(drive: &Drive, name: &str, openable: Result<(), PciError>, rights: &Rights) -> Check {
    let lacks = |found: String, fix: String| Check::lacks("drive", State::Missing, found, BRINGS, fix);
    match openable {
        Err(PciError::SharedGroup { .. }) => {
            let others: Vec<_> = drive.blockers().map(named).collect();
            let fixes: Vec<_> = drive.blockers().map(remedy).collect();
            let found = format!("{name}: shares its IOMMU group with {}", others.join(", "));
            lacks(found, fixes.join(" "))
        }
        Err(error) => lacks(format!("{name}: {error}"), "correct that, or: aryk nvme list".into()),
        Ok(()) => match &rights.file {
            None => lacks(
                format!("{name}: there is no file for it in /dev/vfio"),
                format!("sudo aryk nvme unbind {0} && sudo aryk nvme bind {0}", drive.function.address),
            ),
            Some(file) if !rights.may_open => {
                let (who, file) = (&rights.who, file.display());
                let found = format!("{name}: bound, but the user {who} may not open {file}");
                lacks(found, format!("sudo aryk nvme bind {} --owner {who}", drive.function.address))
            }
            Some(_) => {
                Check::ok("drive", format!("{name}: bound to VFIO; the user {} may open it", rights.who))
            }
        },
    }
}

/// The right to open a drive.
#[derive(Debug)]
struct Rights {
    /// The user who runs the daemon.
    who: String,
    /// VFIO's file.
    file: Option<PathBuf>,
    may_open: bool,
}

impl Rights {
    /// The rights for the files of one drive, of which one is enough.
    fn of(account: &Account, files: &[PathBuf]) -> Self {
        let usable = files.iter().find(|file| account.may_open(file));
        let file = usable.or(files.first()).cloned();
        Self { who: account.name.clone(), may_open: usable.is_some(), file }
    }
}

/// The user who runs the daemon: the unit's, or the user of this process.
struct Account {
    name: String,
    /// User and groups of the unit; `None` for this process.
    ids: Option<(u32, Vec<u32>)>,
}

impl Account {
    fn of(unit: Option<&Unit>) -> Self {
        let named = unit.map(|unit| if unit.user.is_empty() { "root" } else { &unit.user });
        let Some(name) = named else {
            let id = rustix::process::geteuid();
            let user = User::from_uid(id.as_raw().into()).ok().flatten();
            return Self { name: user.map_or_else(|| id.as_raw().to_string(), |user| user.name), ids: None };
        };
        let ids = User::from_name(name).ok().flatten().map(|user| {
            let groups = CString::new(name).ok().and_then(|name| getgrouplist(&name, user.gid).ok());
            let groups = groups.unwrap_or_else(|| vec![user.gid]);
            (user.uid.as_raw(), groups.into_iter().map(Gid::as_raw).collect())
        });
        // A user that does not exist has no rights.
        Self { name: name.to_owned(), ids: Some(ids.unwrap_or((u32::MAX, Vec::new()))) }
    }

    fn may_open(&self, file: &Path) -> bool {
        match &self.ids {
            None => access(file, Access::READ_OK | Access::WRITE_OK).is_ok(),
            Some((user, groups)) => file
                .metadata()
                .is_ok_and(|file| permits(file.mode(), (file.uid(), file.gid()), *user, groups)),
        }
    }
}

/// Whether a file with this mode, owner and group can be read and written by a user without capabilities.
fn permits(mode: u32, (owner, group): (u32, u32), user: u32, groups: &[u32]) -> bool {
    let bits = match () {
        () if owner == user => mode >> 6,
        () if groups.contains(&group) => mode >> 3,
        () => mode,
    };
    bits & 0o6 == 0o6
}

/// What systemd knows of the daemon's unit.
#[derive(Debug, PartialEq, Eq)]
struct Unit {
    user: String,
    /// Bytes; `None` without a limit.
    memlock: Option<u64>,
    device_policy: String,
    devices: Vec<String>,
}

impl Unit {
    /// Asks systemd; `None` without systemd or without the unit.
    fn read() -> Option<Self> {
        let properties = "--property=LoadState,User,LimitMEMLOCK,DevicePolicy,DeviceAllow";
        let mut show = Command::new("systemctl");
        let output = show.args(["show", UNIT, properties]).stdin(Stdio::null()).output().ok()?;
        Self::parse(&String::from_utf8_lossy(&output.stdout))
    }

    fn parse(text: &str) -> Option<Self> {
        let values = |name: &str| {
            let value = |line: &str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
            text.lines().filter_map(value).filter(|value| !value.is_empty()).collect::<Vec<_>>()
        };
        let value = |name: &str| values(name).pop().unwrap_or_default();
        (value("LoadState") == "loaded").then(|| Self {
            user: value("User"),
            // "infinity" is no number.
            memlock: value("LimitMEMLOCK").parse().ok(),
            device_policy: value("DevicePolicy"),
            devices: values("DeviceAllow"),
        })
    }
}

#[cfg(test)]
mod tests;
