//! Tests of the checks with simulated hosts.

use super::*;
use crate::doctor::tests::expect;
use aryk_pci::sysfs::{BlockDevice, FunctionInfo, Identity, Usage};

const PROPERTIES: &str =
    "LimitMEMLOCK=infinity\nUser=aryk\nDevicePolicy=closed\nDeviceAllow=/dev/null rw\nLoadState=loaded\n";

#[test]
fn the_iommu_and_vfio() {
    expect(&iommu_of(12, "", ""), State::Ok, "12 groups", "");
    expect(
        &iommu_of(0, "quiet", "vendor_id: AuthenticAMD"),
        State::Missing,
        "off",
        "&amd_iommu=on iommu=pt /'",
    );
    expect(&iommu_of(0, "quiet", "vendor_id: GenuineIntel"), State::Missing, "off", "update-grub");
    let given = iommu_of(0, "quiet intel_iommu=on", "vendor_id: GenuineIntel");
    expect(&given, State::Missing, "although the kernel was started with intel_iommu=on", "VT-d");
    expect(&interrupts_of(" 24: 0 0  IR-PCI-MSI 409600-edge", false), State::Ok, "remapped", "");
    expect(
        &interrupts_of(" 24: 0 0  PCI-MSI 409600-edge", false),
        State::Missing,
        "no drive",
        "unsafe_interrupts",
    );
    expect(&interrupts_of(" 24: 0 0  PCI-MSI 409600-edge", true), State::Option, "allowed so", "x2APIC");
    expect(&container_of("aryk", true), State::Ok, "the user aryk may open /dev/vfio/vfio", "");
    expect(&container_of("aryk", false), State::Missing, "may not open", "chmod 666 /dev/vfio/vfio");
    expect(&iommufd_of("aryk", true), State::Ok, "the user aryk may open /dev/iommu", "");
    expect(&iommufd_of("aryk", false), State::Option, "opened by the files of their", "chmod 666 /dev/iommu");
    expect(&vfio_pci_of(true), State::Ok, "loaded", "");
    expect(&vfio_pci_of(false), State::Missing, "not loaded", "modprobe vfio-pci");
}

#[test]
fn limits_and_sandbox_of_shell_and_unit() {
    let unit = Unit::parse(PROPERTIES).unwrap();
    expect(
        &memlock_of(Some(8 << 20), false, Some(&unit)),
        State::Ok,
        "arykd.service: no limit; this shell: 8M",
        "",
    );
    let limited = Unit::parse(&PROPERTIES.replace("infinity", "8388608")).unwrap();
    expect(
        &memlock_of(None, false, Some(&limited)),
        State::Missing,
        "arykd.service: 8M",
        "LimitMEMLOCK=infinity",
    );
    expect(&memlock_of(Some(8 << 20), false, None), State::Missing, "this shell: 8M", "ulimit -l unlimited");
    expect(&memlock_of(Some(1 << 30), false, None), State::Worse, "this shell: 1G", "ulimit");
    expect(&memlock_of(Some(8 << 20), true, None), State::Ok, "8M, from which this user is exempt", "");
    assert!(is_exempt("Name:\tx\nCapEff:\t000001ffffffffff\n") && !is_exempt("CapEff:\t0000000000000000\n"));
    expect(&sandbox_of(&unit), State::Missing, "may not open", "drop-ins/nvme.conf");
    let allowed = Unit::parse(&format!("{PROPERTIES}DeviceAllow=char-vfio rw\n")).unwrap();
    expect(&sandbox_of(&allowed), State::Ok, "may open", "");
    let open = "LoadState=loaded\nDevicePolicy=auto\nDeviceAllow=\nLimitMEMLOCK=infinity\n";
    expect(&sandbox_of(&Unit::parse(open).unwrap()), State::Ok, "may open", "");
    assert_eq!(Unit::parse("LoadState=not-found\nUser=aryk\n"), None);
}

#[test]
fn rights_come_from_the_first_class_of_the_mode_that_applies() {
    for (mode, owner, expected) in [
        (0o600, (7, 0), true),
        (0o600, (0, 7), false),
        (0o660, (0, 8), true),
        (0o606, (0, 8), false),
        (0o666, (0, 0), true),
        (0o066, (7, 8), false),
    ] {
        assert_eq!(permits(mode, owner, 7, &[8, 9]), expected, "{mode:o} {owner:?}");
    }
}

fn function(address: &str, class: u32, driver: &str) -> FunctionInfo {
    FunctionInfo {
        address: address.parse().unwrap(),
        vendor: 1,
        device: 2,
        class,
        driver: Some(driver.to_owned()),
        group: Some(14),
        numa_node: None,
    }
}

fn drive() -> Drive {
    Drive {
        function: function("0000:3d:00.0", 0x01_08_02, "nvme"),
        identity: Some(Identity { model: "M".into(), serial: "S".into(), firmware: "F".into() }),
        temperature: None,
        block_devices: Vec::new(),
        controller_users: Vec::new(),
        vfio_users: Vec::new(),
        neighbours: Vec::new(),
    }
}

fn rights(may_open: bool, file: Option<&str>) -> Rights {
    Rights { who: "aryk".to_owned(), file: file.map(Into::into), may_open }
}

const FILE: Option<&str> = Some("/dev/vfio/14");

#[test]
fn unused_drives_can_be_bound_with_their_group() {
    let mut drive = drive();
    let check = |drive: &Drive| drive_of(drive, Ok(()), &rights(true, FILE));
    expect(&check(&drive), State::Option, "0000:3d:00.0, M, S: unused", "sudo aryk nvme bind 0000:3d:00.0");
    drive.neighbours.push(function("0000:3d:00.1", 0x01_08_02, "nvme"));
    drive.neighbours.push(function("0000:00:1c.0", 0x06_04_00, "pcieport"));
    let shared = "shares its IOMMU group with 0000:3d:00.1 (nvme)";
    expect(&check(&drive), State::Option, shared, "bind 0000:3d:00.0 0000:3d:00.1");
    drive.neighbours.push(function("0000:3d:00.2", 0x02_00_00, "e1000e"));
    let fix = "0000:3d:00.1; 0000:3d:00.2: It is no NVMe drive: move one";
    expect(&check(&drive), State::Option, "(e1000e)", fix);
    drive.block_devices.push(BlockDevice {
        name: "nvme0n1".into(),
        size: 512,
        usage: vec![Usage::Swap { device: "nvme0n1".into() }],
    });
    expect(&check(&drive), State::Ok, "stays with the kernel: nvme0n1 is swap space", "");
}

#[test]
fn bound_drives_can_be_opened_or_say_why_not() {
    let mut drive = drive();
    (drive.function.driver, drive.identity) = (Some("vfio-pci".into()), None);
    let refusal = || PciError::SharedGroup {
        name: String::new(),
        group: 14,
        other: String::new(),
        driver: String::new(),
    };
    let of = |drive: &Drive, error| drive_of(drive, Err(error), &rights(true, FILE));
    drive.neighbours = vec![function("0000:3d:00.1", 0x01_08_02, "nvme")];
    let shared = "shares its IOMMU group with 0000:3d:00.1 (nvme)";
    expect(&of(&drive, refusal()), State::Missing, shared, "Bind it too: sudo aryk nvme bind 0000:3d:00.1");
    drive.neighbours = vec![function("0000:3d:00.2", 0x02_00_00, "e1000e")];
    expect(
        &of(&drive, refusal()),
        State::Missing,
        "0000:3d:00.2 (e1000e)",
        "move one of them to another slot",
    );
    let no_iommu = PciError::NoIommu { name: "0000:3d:00.0".into() };
    expect(&of(&drive, no_iommu), State::Missing, "has no IOMMU", "correct that");
    drive.neighbours.clear();
    let check = |drive: &Drive, rights| drive_of(drive, Ok(()), &rights);
    expect(&check(&drive, rights(true, FILE)), State::Ok, "the user aryk may open it", "");
    let denied = rights(false, FILE);
    expect(&check(&drive, denied), State::Missing, "may not open /dev/vfio/14", "0000:3d:00.0 --owner aryk");
    expect(&check(&drive, rights(false, None)), State::Missing, "no file for it", "nvme unbind");
    drive.vfio_users = vec![Usage::Open { device: "vfio/14".into(), process: 9, command: "arykd".into() }];
    expect(&check(&drive, rights(false, FILE)), State::Ok, "vfio/14 is open in process 9 (arykd)", "");
}
