//! sysfs, procfs and devfs in a temporary directory.

use super::*;
use std::fs;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

/// A host under construction.
pub(crate) struct Host(TempDir);

const DRIVE: &str = "0000:3d:00.0";

impl Host {
    pub(crate) fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        host.file("proc/self/mountinfo", "22 1 254:0 / / rw - ext4 /dev/vda rw\n");
        host.file("proc/swaps", "Filename Type Size Used Priority\n");
        host.file("sys/bus/pci/drivers/vfio-pci/new_id", "");
        host
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    /// A function with a driver ("" for none), in a group.
    pub(crate) fn function(&self, address: &str, class: &str, driver: &str, group: Option<u32>) {
        let at = format!("sys/bus/pci/devices/{address}");
        for (file, text) in [("vendor", "0x144d\n"), ("device", "0xa80a\n"), ("numa_node", "-1\n")] {
            self.file(&format!("{at}/{file}"), text);
        }
        self.file(&format!("{at}/class"), class);
        if !driver.is_empty() {
            self.link(&format!("{at}/driver"), &format!("../../../../bus/pci/drivers/{driver}"));
        }
        if let Some(group) = group {
            self.link(&format!("{at}/iommu_group"), &format!("../../../kernel/iommu_groups/{group}"));
            self.link(&format!("sys/kernel/iommu_groups/{group}/devices/{address}"), "elsewhere");
        }
    }

    /// A drive that the kernel drives, with a block device of two partitions.
    fn drive(&self) {
        self.function(DRIVE, "0x010802\n", "nvme", Some(14));
        let disk = format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0/nvme0n1");
        self.file(&format!("{disk}/dev"), "259:0\n");
        self.file(&format!("{disk}/size"), "2048\n");
        for part in [1, 2] {
            self.file(&format!("{disk}/nvme0n1p{part}/partition"), &format!("{part}\n"));
            self.file(&format!("{disk}/nvme0n1p{part}/dev"), &format!("259:{part}\n"));
        }
        // Neither is a block device of its own.
        self.file(&format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0/nvme0c0n1/dev"), "259:9\n");
        self.file(&format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0/ng0n1/dev"), "240:0\n");
    }

    pub(crate) fn sysfs(&self) -> Sysfs {
        Sysfs::at(self.0.path())
    }

    fn usage(&self) -> Vec<String> {
        let devices = self.sysfs().block_devices(address(DRIVE)).unwrap();
        devices.iter().flat_map(|device| &device.usage).map(ToString::to_string).collect()
    }
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

#[test]
fn nvme_controllers_are_listed_with_driver_and_group() {
    let host = Host::new();
    host.drive();
    host.function("0000:3e:00.0", "0x010802", "vfio-pci", None);
    host.function("0000:01:00.0", "0x020000", "e1000e", Some(1));
    host.function("10000:e1:00.0", "0x010802", "", Some(2));
    let found = host.sysfs().nvme_functions().unwrap();
    let shown: Vec<_> = found.iter().map(|f| (f.address.to_string(), f.driver.as_deref(), f.group)).collect();
    assert_eq!(
        shown,
        [
            (DRIVE.to_owned(), Some("nvme"), Some(14)),
            ("0000:3e:00.0".to_owned(), Some("vfio-pci"), None),
            ("10000:e1:00.0".to_owned(), None, Some(2)),
        ]
    );
    assert_eq!((found[0].vendor, found[0].device, found[0].numa_node), (0x144d, 0xa80a, None));
    assert!(matches!(host.sysfs().function(address("0:0:0.0")), Err(PciError::NotFound { .. })));
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(Sysfs::at(empty.path()).nvme_functions().unwrap(), []);
}

#[test]
fn only_a_function_of_vfio_in_a_group_without_other_drivers_can_be_opened() {
    let host = Host::new();
    host.function(DRIVE, "0x010802", "nvme", Some(14));
    let open = || host.sysfs().check_openable(address(DRIVE)).map(drop).map_err(|error| error.to_string());
    assert!(open().unwrap_err().contains("is bound to nvme, not to vfio-pci: run `aryk nvme bind"));
    host.function(DRIVE, "0x010802", "vfio-pci", Some(14));
    assert_eq!(open(), Ok(()));
    host.function("0000:00:1c.0", "0x060400", "pcieport", Some(14));
    host.function("0000:3d:00.1", "0x010802", "", Some(14));
    host.function("0000:3d:00.2", "0x010802", "nvme_vfio_pci", Some(14));
    assert_eq!(open(), Ok(()), "bridges, no driver and variants of vfio-pci");
    host.function("0000:3d:00.3", "0x020000", "e1000e", Some(14));
    let error = open().unwrap_err();
    assert!(error.contains("shares IOMMU group 14 with 0000:3d:00.3, which is bound to e1000e"), "{error}");

    // Opening would reset it. It needs no binding either.
    for driver in ["vfio-pci", "e1000e"] {
        host.function("0000:01:00.0", "0x020000", driver, Some(1));
        let error = host.sysfs().check_openable(address("0000:01:00.0")).unwrap_err().to_string();
        assert!(error.starts_with("0000:01:00.0 is an Ethernet controller (PCI class 020000), not an NVMe"));
        assert!(!error.contains("bind"), "{error}");
    }
    host.function("0000:3e:00.0", "0x010802", "vfio-pci", None);
    let none = host.sysfs().check_openable(address("0000:3e:00.0"));
    assert!(matches!(none, Err(PciError::NoIommu { .. })));
    host.function("0000:3f:00.0", "0x010802", "vfio-pci", Some(15));
    host.file("sys/kernel/iommu_groups/15/name", "vfio-noiommu\n");
    let none = host.sysfs().check_openable(address("0000:3f:00.0"));
    assert!(matches!(none, Err(PciError::NoIommu { .. })), "the kernel's no-IOMMU mode");
}

#[test]
fn every_use_of_a_drive_is_found() {
    let host = Host::new();
    host.drive();
    let devices = host.sysfs().block_devices(address(DRIVE)).unwrap();
    assert_eq!(devices, [BlockDevice { name: "nvme0n1".to_owned(), size: 1 << 20, usage: vec![] }]);

    let mounts = "30 22 259:1 / /boot\\040disk rw shared:1 - ext4 /dev/root rw\n\
        31 22 0:45 /sub /data rw - btrfs /dev/nvme0n1p2 rw\n\
        32 22 0:46 / /other rw - btrfs /dev/nvme0n10 rw\nnonsense\n";
    host.file("proc/self/mountinfo", mounts);
    host.file("proc/swaps", "Filename Type\n/dev/nvme0n1p2 partition 1 0 -2\n");
    host.file(&format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0/nvme0n1/holders/dm-3/x"), "");
    for (namespace, is_enabled) in [("1", "1\n"), ("2", "0\n")] {
        let namespace =
            format!("sys/kernel/config/nvmet/subsystems/nqn.store{namespace}/namespaces/{namespace}");
        host.file(&format!("{namespace}/device_path"), "/dev/nvme0n1p2\n");
        host.file(&format!("{namespace}/enable"), is_enabled);
    }
    host.file("proc/77/comm", "qemu-system-x86\n");
    host.link("proc/77/fd/9", "/dev/nvme0n1");
    host.link("proc/77/fd/10", "/dev/nvme0n1");
    host.link("proc/78/fd/1", "/dev/nvme1n1");
    assert_eq!(
        host.usage(),
        [
            "nvme0n1p1 is mounted at /boot disk",
            "nvme0n1p2 is mounted at /data",
            "nvme0n1p2 is swap space",
            "nvme0n1 is part of dm-3",
            "nvme0n1p2 is exported by the kernel's NVMe target as nqn.store1",
            "nvme0n1 is open in process 77 (qemu-system-x86)",
        ]
    );
}

#[test]
fn uses_by_character_devices_and_of_whole_controllers_are_found() {
    let host = Host::new();
    host.drive();
    let usage = || {
        let drives = host.sysfs().nvme_drives().unwrap();
        drives[0].usage().map(ToString::to_string).collect::<Vec<_>>()
    };
    // A namespace without a block device, and devices of other drives.
    host.file(&format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0/ng0n2/dev"), "240:1\n");
    host.file("proc/80/comm", "nvme\n");
    for (fd, device) in [(0, "nvme1"), (1, "ng1n1"), (2, "ng0n3"), (3, "nvme-fabrics"), (4, "ngx")] {
        host.link(&format!("proc/80/fd/{fd}"), &format!("/dev/{device}"));
    }
    let passthru = |enable: &str, device: &str| {
        host.file("sys/kernel/config/nvmet/subsystems/nqn.all/passthru/device_path", device);
        host.file("sys/kernel/config/nvmet/subsystems/nqn.all/passthru/enable", enable);
    };
    passthru("1\n", "/dev/nvme1\n");
    assert_eq!(usage(), [""; 0]);
    host.sysfs().check_bindable(address(DRIVE)).unwrap();
    passthru("0\n", "/dev/nvme0\n");
    assert_eq!(usage(), [""; 0], "not enabled");

    let refused = || match host.sysfs().check_bindable(address(DRIVE)) {
        Err(PciError::InUse { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    passthru("1\n", "/dev/nvme0\n");
    assert_eq!(refused(), "nvme0 is exported by the kernel's NVMe target as nqn.all");
    passthru("0\n", "/dev/nvme0\n");
    for device in ["nvme0", "ng0n1", "ng0n2"] {
        host.link("proc/80/fd/9", &format!("/dev/{device}"));
        assert_eq!(refused(), format!("{device} is open in process 80 (nvme)"));
    }
    passthru("1\n", "/dev/nvme0\n");
    host.link("proc/80/fd/10", "/dev/nvme0");
    assert_eq!(
        usage(),
        [
            "nvme0 is exported by the kernel's NVMe target as nqn.all",
            "ng0n2 is open in process 80 (nvme)",
            "nvme0 is open in process 80 (nvme)",
        ]
    );
}

#[test]
fn uses_by_devices_and_file_systems_above_a_drive_are_found() {
    let host = Host::new();
    host.drive();
    let disk = format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0/nvme0n1");
    // The second partition is in a RAID, whose partition is encrypted: the root file system is there. The first belongs to btrfs.
    host.link(&format!("{disk}/nvme0n1p2/holders/md0"), "elsewhere");
    host.file("sys/class/block/md0/md0p1/partition", "1\n");
    host.file("sys/class/block/md0/dev", "9:0\n");
    host.link("sys/class/block/md0/md0p1/holders/dm-1", "elsewhere");
    host.file("sys/class/block/loop0/loop/backing_file", "/dev/nvme0n1\n");
    host.file("sys/class/block/loop0/dev", "7:0\n");
    // A cycle, which no kernel has, ends.
    host.link("sys/class/block/dm-1/holders/md0", "elsewhere");
    host.file("sys/class/block/dm-1/dm/name", "vg0-root\n");
    host.file("sys/class/block/dm-1/dev", "254:1\n");
    host.file("sys/fs/btrfs/0a1b/devices/nvme0n1p1/dev", "259:1\n");
    host.file("sys/fs/btrfs/features/raid1", "0\n");
    host.file("proc/swaps", "Filename Type\n/dev/mapper/vg0-root partition 1 0 -2\n");
    host.file(
        "proc/self/mountinfo",
        "30 22 254:1 / / rw - ext4 /dev/root rw\n31 22 7:0 / /iso rw - ext4 /dev/loop0 rw\n",
    );
    assert_eq!(
        host.usage(),
        [
            "dm-1 is mounted at /",
            "loop0 is mounted at /iso",
            "dm-1 is swap space",
            "dm-1 is part of md0",
            "md0p1 is part of dm-1 (vg0-root)",
            "nvme0n1 is part of loop0",
            "nvme0n1p1 is part of the btrfs file system 0a1b",
            "nvme0n1p2 is part of md0",
        ]
    );
    assert!(matches!(host.sysfs().check_bindable(address(DRIVE)), Err(PciError::InUse { .. })));
}

#[test]
fn drives_have_an_identity_a_temperature_uses_and_neighbours() {
    let host = Host::new();
    host.drive();
    let at = format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme0");
    host.file(&format!("{at}/model"), "Aryk Model 1                            \n");
    host.file(&format!("{at}/serial"), "S1\n");
    fs::write(host.path(&format!("{at}/firmware_rev")), b"F\xff1\n").unwrap();
    host.file(&format!("{at}/hwmon3/temp1_input"), "41850\n");
    host.function("0000:3d:00.1", "0x020000", "e1000e", Some(14));
    host.function("0000:00:1c.0", "0x060400", "pcieport", Some(14));
    host.function("0000:3e:00.0", "0x010802", "vfio-pci", Some(15));
    host.file("sys/bus/pci/devices/0000:3e:00.0/vfio-dev/vfio1/dev", "");
    host.file("dev/vfio/15", "");
    host.file("proc/99/comm", "arykd\n");
    host.link("proc/99/fd/4", "/dev/vfio/devices/vfio1");
    let drives = host.sysfs().nvme_drives().unwrap();
    let [drive, bound] = &drives[..] else { panic!("{drives:?}") };
    let identity =
        Identity { model: "Aryk Model 1".into(), serial: "S1".into(), firmware: "F\u{fffd}1".into() };
    assert_eq!((&drive.identity, drive.temperature), (&Some(identity), Some(41_850)));
    assert_eq!((drive.block_devices.len(), drive.usage().count()), (1, 0));
    let neighbours: Vec<_> = drive.neighbours.iter().map(|other| other.address.to_string()).collect();
    assert_eq!(neighbours, ["0000:00:1c.0", "0000:3d:00.1"]);
    assert_eq!(drive.blockers().map(|other| other.driver.as_deref()).collect::<Vec<_>>(), [Some("e1000e")]);
    assert_eq!((&bound.identity, bound.temperature, bound.neighbours.len()), (&None, None, 0));
    let usage: Vec<_> = bound.usage().map(ToString::to_string).collect();
    assert_eq!(usage, ["vfio/devices/vfio1 is open in process 99 (arykd)"]);
    let files = host.sysfs().vfio_files(bound.function.address).unwrap();
    assert_eq!(files, [host.path("dev/vfio/15")], "only files that exist");
    // Older kernels: the sensor belongs to the function.
    fs::remove_dir_all(host.path(&format!("{at}/hwmon3"))).unwrap();
    host.file(&format!("sys/bus/pci/devices/{DRIVE}/hwmon/hwmon0/temp1_input"), "-1000\n");
    assert_eq!(host.sysfs().nvme_drives().unwrap()[0].temperature, Some(-1000));
}

#[test]
fn block_devices_of_multipath_are_found_in_their_subsystem() {
    let host = Host::new();
    host.function(DRIVE, "0x010802", "nvme", Some(14));
    host.file(&format!("sys/bus/pci/devices/{DRIVE}/nvme/nvme3/nvme3c3n1/dev"), "259:9\n");
    for (subsystem, controller, disk) in [(0, "nvme3", "nvme0n1"), (1, "nvme4", "nvme1n1")] {
        let at = format!("sys/class/nvme-subsystem/nvme-subsys{subsystem}");
        host.link(&format!("{at}/{controller}"), "/");
        host.file(&format!("{at}/{disk}/dev"), "259:1\n");
        host.file(&format!("{at}/{}/dev", disk.replace("nvme", "ng")), "240:1\n");
    }
    for other in ["ng1n1", "ng3n1"] {
        host.link("proc/80/fd/9", &format!("/dev/{other}"));
        host.sysfs().check_bindable(address(DRIVE)).expect("it belongs to another subsystem");
    }
    host.link("proc/80/fd/9", "/dev/ng0n1");
    let users = host.sysfs().nvme_drives().unwrap().remove(0).controller_users;
    assert_eq!(users.iter().map(ToString::to_string).collect::<Vec<_>>(), ["ng0n1 is open in process 80 ()"]);
    let devices = host.sysfs().block_devices(address(DRIVE)).unwrap();
    assert_eq!(devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["nvme0n1"]);
}

fn plan(host: &Host, plan: Option<Vec<(PathBuf, String)>>) -> Vec<(String, String)> {
    let inside = |path: &Path| path.strip_prefix(host.0.path()).unwrap().display().to_string();
    plan.unwrap().into_iter().map(|(path, text)| (inside(&path), text)).collect()
}

#[test]
fn an_unused_drive_is_bound_by_override_and_probe_and_returned() {
    let host = Host::new();
    host.drive();
    let at = format!("sys/bus/pci/devices/{DRIVE}");
    let bind = plan(&host, host.sysfs().plan_bind(address(DRIVE)).unwrap());
    let unbind = (format!("{at}/driver/unbind"), DRIVE.to_owned());
    let probe = ("sys/bus/pci/drivers_probe".to_owned(), DRIVE.to_owned());
    let prefer = |driver: &str| (format!("{at}/driver_override"), driver.to_owned());
    assert_eq!(bind, [prefer("vfio-pci"), unbind.clone(), probe.clone()]);

    // Nothing acts on the files of this host, so the driver stays: the binding fails, and its override is taken back.
    fs::create_dir_all(host.path("sys/bus/pci/drivers/nvme")).unwrap();
    host.file("sys/bus/pci/drivers_probe", "");
    let error = host.sysfs().bind(address(DRIVE)).unwrap_err();
    assert!(error.to_string().contains("is bound to nvme"), "{error}");
    assert_eq!(fs::read_to_string(host.path(&format!("{at}/driver_override"))).unwrap(), "\n");

    host.function(DRIVE, "0x010802", "vfio-pci", Some(14));
    assert_eq!(host.sysfs().plan_bind(address(DRIVE)).unwrap(), None);
    assert!(!host.sysfs().bind(address(DRIVE)).unwrap(), "nothing changed");
    let back = plan(&host, host.sysfs().plan_unbind(address(DRIVE)).unwrap());
    assert_eq!(back, [prefer("\n"), unbind, probe.clone()]);
    host.function(DRIVE, "0x010802", "nvme", Some(14));
    assert_eq!(host.sysfs().plan_unbind(address(DRIVE)).unwrap(), None);
    assert!(!host.sysfs().unbind(address(DRIVE)).unwrap(), "nothing changed");
    // A drive that a failed binding left without a driver is offered to the kernel again.
    fs::remove_file(host.path(&format!("{at}/driver"))).unwrap();
    let back = plan(&host, host.sysfs().plan_unbind(address(DRIVE)).unwrap());
    assert_eq!(back, [prefer("\n"), probe]);
}

#[test]
fn what_is_in_use_or_no_drive_is_not_bound() {
    let host = Host::new();
    host.drive();
    host.function("0000:01:00.0", "0x020000", "e1000e", Some(1));
    let bind = |text: &str| host.sysfs().bind(address(text)).unwrap_err().to_string();
    let nic = "0000:01:00.0 is an Ethernet controller (PCI class 020000), not an NVMe controller";
    assert!(bind("0000:01:00.0").starts_with(nic), "{}", bind("0000:01:00.0"));
    // A VM may have it.
    host.function("0000:01:00.0", "0x020000", "vfio-pci", Some(1));
    assert!(host.sysfs().unbind(address("0000:01:00.0")).unwrap_err().to_string().starts_with(nic));
    host.function(DRIVE, "0x010802", "uio_pci_generic", Some(14));
    assert!(bind(DRIVE).contains("in use: the driver uio_pci_generic has it"), "{}", bind(DRIVE));
    host.function(DRIVE, "0x010802", "nvme", Some(14));
    assert!(bind("0000:09:00.0").contains("no such PCI function"));

    host.file("proc/self/mountinfo", "30 22 259:1 / / rw - ext4 /dev/root rw\n");
    assert_eq!(bind(DRIVE), format!("{DRIVE} is in use: nvme0n1p1 is mounted at /"));
    host.file("proc/self/mountinfo", "");
    fs::remove_dir_all(host.path("sys/bus/pci/drivers/vfio-pci")).unwrap();
    assert!(bind(DRIVE).contains("modprobe vfio-pci"));
    assert!(
        !host.path(&format!("sys/bus/pci/devices/{DRIVE}/driver_override")).exists(),
        "nothing was written"
    );

    // A function that a process drives is not taken from it: the kernel would wait for the process.
    host.function(DRIVE, "0x010802", "vfio-pci", Some(14));
    host.file("proc/99/comm", "arykd\n");
    host.link("proc/99/fd/4", "/dev/vfio/14");
    let error = host.sysfs().unbind(address(DRIVE)).unwrap_err().to_string();
    assert_eq!(error, format!("{DRIVE} is in use: vfio/14 is open in process 99 (arykd)"));
    host.link("proc/99/fd/4", "/dev/vfio/devices/vfio0");
    host.file(&format!("sys/bus/pci/devices/{DRIVE}/vfio-dev/vfio0/dev"), "");
    assert!(host.sysfs().unbind(address(DRIVE)).unwrap_err().to_string().contains("vfio0 is open"));
}
