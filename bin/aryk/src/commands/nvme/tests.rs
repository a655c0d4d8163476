//! Tests of the output for people and for programs.

use super::*;
use aryk_pci::sysfs::BlockDevice;

fn function(address: &str, class: u32, driver: Option<&str>) -> FunctionInfo {
    FunctionInfo {
        address: address.parse().unwrap(),
        vendor: 0x144d,
        device: 0xa80a,
        class,
        driver: driver.map(str::to_owned),
        group: Some(14),
        numa_node: Some(0),
    }
}

fn drive(address: &str, driver: Option<&str>) -> Drive {
    Drive {
        function: function(address, 0x01_08_02, driver),
        identity: None,
        temperature: None,
        block_devices: Vec::new(),
        controller_users: Vec::new(),
        vfio_users: Vec::new(),
        neighbours: Vec::new(),
    }
}

/// Drives in all states.
fn drives() -> Vec<Entry> {
    let identity = Identity { model: "Model\u{1b}[31m 1".into(), serial: "S1".into(), firmware: "F1".into() };
    let mounted = Usage::Mounted { device: "nvme0n1p1".into(), path: "/srv".into() };
    let device = |name: &str, usage| BlockDevice { name: name.into(), size: 3 << 29, usage };
    let mut used = drive("0000:3d:00.0", Some("nvme"));
    used.identity = Some(identity.clone());
    used.temperature = Some(41_850);
    used.block_devices = vec![device("nvme0n1", vec![mounted]), device("nvme0n2", vec![])];
    let mut unused = drive("0000:3e:00.0", Some("nvme"));
    (unused.identity, unused.block_devices) = (Some(identity), vec![device("nvme1n1", vec![])]);
    unused.neighbours = vec![
        function("0000:3e:00.1", 0x02_00_00, Some("e1000e")),
        function("0000:00:1c.0", 0x06_04_00, Some("pcieport")),
    ];
    let mut driven = drive("0000:40:00.0", Some("vfio-pci"));
    driven.vfio_users = vec![Usage::Open { device: "vfio/16".into(), process: 7, command: "arykd".into() }];
    let all = [used, unused, drive("0000:3f:00.0", Some("vfio-pci")), driven, drive("0000:41:00.0", None)];
    all.into_iter().map(|drive| Entry { drive, held: None }).collect()
}

#[test]
fn a_table_shows_identity_uses_and_what_shares_a_group() {
    let table = table(&drives(), &Output::plain());
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(!table.contains('\u{1b}'), "{table}");
    let rows: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["ADDRESS", "DRIVER", "GROUP", "SIZE", "TEMP", "DRIVE"]);
    assert_eq!(rows[1][..6], ["0000:3d:00.0", "nvme", "14", "3G", "42", "°C"]);
    assert!(table.contains("nvme0n1p1 is mounted at /srv"), "{table}");
    let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("unused group also has 0000:3e:00.1 (e1000e)"), "{words}");
    assert!(words.contains("0000:3f:00.0 vfio-pci 14 - - no process drives it"), "{words}");
    assert!(words.contains("0000:40:00.0 vfio-pci 14 - - vfio/16 is open in process 7 (arykd)"), "{words}");
    assert!(words.contains("0000:41:00.0 - 14 - - no driver"), "{words}");
    assert!(super::table(&[], &Output::plain()).contains("no NVMe drives"));
}

#[test]
fn programs_get_every_property() {
    let all: Vec<Value> = drives().iter().map(describe).collect();
    let states: Vec<_> = all.iter().map(|drive| drive["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["in_use", "unused", "bound", "driven", "no_driver"]);
    let expected = json!({
        "address": "0000:3d:00.0", "vendor_id": "144d", "device_id": "a80a", "driver": "nvme", "state": "in_use",
        "model": "Model\u{1b}[31m 1", "serial": "S1", "firmware": "F1", "size": 3_u64 << 30,
        "temperature_celsius": 41.85, "iommu_group": 14, "group_shared_with": [], "numa_node": 0,
        "block_devices": [{"name": "nvme0n1", "size": 3_u64 << 29}, {"name": "nvme0n2", "size": 3_u64 << 29}],
        "uses": [{"kind": "mounted", "device": "nvme0n1p1", "path": "/srv",
            "text": "nvme0n1p1 is mounted at /srv"}],
        "controller": null, "disks": null,
    });
    assert_eq!(all[0], expected);
    assert_eq!(all[1]["group_shared_with"][0], json!({"address": "0000:3e:00.1", "driver": "e1000e"}));
    assert_eq!((&all[2]["model"], &all[2]["size"]), (&Value::Null, &Value::Null));
    let open = json!({"kind": "open", "device": "vfio/16", "process": 7, "command": "arykd",
        "text": "vfio/16 is open in process 7 (arykd)"});
    assert_eq!(all[3]["uses"][0], open);
}

#[test]
fn the_daemon_identifies_its_drives() {
    let mut drives = drives();
    let identity = Identity { model: "M".into(), serial: "S".into(), firmware: "F".into() };
    let disks = vec!["Nvme0n1".to_owned(), "Nvme0n2".to_owned()];
    let controller = "Nvme0".to_owned();
    let held = Held { controller, disks, size: 1 << 40, identity: Some(identity), celsius: Some(38) };
    drives[3].held = Some(held);
    let json = describe(&drives[3]);
    assert_eq!((&json["model"], &json["size"]), (&json!("M"), &json!(1_u64 << 40)));
    assert_eq!((&json["controller"], &json["disks"]), (&json!("Nvme0"), &json!(["Nvme0n1", "Nvme0n2"])));
    let table = table(&drives, &Output::plain());
    let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "0000:40:00.0 vfio-pci 14 1T 38 °C M, S vfio/16 is open in process 7 (arykd) controller Nvme0, disks: Nvme0n1, Nvme0n2";
    assert!(words.contains(expected), "{words}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
}

#[test]
fn a_binding_says_what_else_must_be_bound() {
    let mut outcome = Outcome {
        function: function("0000:3d:00.0", 0x01_08_02, Some("vfio-pci")),
        changed: true,
        blockers: vec![function("0000:3d:00.1", 0x01_08_02, Some("nvme"))],
    };
    assert_eq!(
        outcome.text(),
        "0000:3d:00.0 is now bound to vfio-pci.\n  It cannot be opened yet: 0000:3d:00.1 (nvme) is in its IOMMU group. Bind it too: sudo aryk nvme bind 0000:3d:00.1"
    );
    let bind_too = json!([{"address": "0000:3d:00.1", "driver": "nvme"}]);
    let expected =
        json!({"address": "0000:3d:00.0", "driver": "vfio-pci", "changed": true, "bind_too": bind_too});
    assert_eq!(outcome.to_json(), expected);
    (outcome.changed, outcome.blockers) = (false, Vec::new());
    assert_eq!(outcome.text(), "0000:3d:00.0 was already bound to vfio-pci.");
    outcome.function.driver = None;
    assert!(outcome.text().contains("modprobe nvme"));
}

#[test]
fn owners_are_users() {
    assert_eq!((user_id("root").unwrap(), user_id("1000").unwrap()), (0, 1000));
    let error = user_id("no such user").unwrap_err();
    assert_eq!((error.exit_code(), error.to_string().as_str()), (2, "there is no user 'no such user'"));
}
