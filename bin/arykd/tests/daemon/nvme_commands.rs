//! `aryk nvme` on the real daemon, which drives a model that this process serves over vfio-user.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, wait_for};
use crate::nvme::{Drive, attach};
use aryk_nvme_model::FIRMWARE_MAGIC;
use serde_json::{Value, json};

/// The rest of the line that begins with `name`, with one space between words.
#[track_caller]
fn line(printed: &str, name: &str) -> String {
    let mut rest = printed.lines().filter_map(|line| line.trim().strip_prefix(name));
    let rest = rest.next().unwrap_or_else(|| panic!("no line {name:?}: {printed}"));
    rest.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn parse(printed: &str) -> Value {
    serde_json::from_str(printed).unwrap()
}

/// The controller as the daemon describes it.
fn described(daemon: &Daemon) -> Value {
    daemon.call("bdev_nvme_get_controllers", json!({"name": "Nvme0"})).unwrap()[0].clone()
}

#[test]
fn identify_smart_and_reset() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    let controller = described(&daemon);
    // By the controller's name, and by that of one of its disks.
    for name in ["Nvme0", "Nvme0n2"] {
        let printed = daemon.aryk(&["nvme", "identify", name]).unwrap();
        assert_eq!(line(&printed, "controller"), "Nvme0");
        assert_eq!(line(&printed, "place"), format!("VFIOUSER {}", socket.display()));
        assert_eq!((line(&printed, "state"), line(&printed, "serial")), ("enabled".into(), "S1".into()));
        let firmware = controller["ctrlr_data"]["firmware_revision"].as_str().unwrap().trim();
        assert_eq!(line(&printed, "firmware"), firmware);
        assert_eq!(line(&printed, "resets"), "0");
        for nsid in [1, 2] {
            // The model has the PCI ID of QEMU's drives, whose identifiers of namespaces are not trusted.
            let row = line(&printed, &format!("{nsid} "));
            assert_eq!(row, format!("Nvme0n{nsid} 8M 512 -"));
        }
    }
    let identified = parse(&daemon.aryk(&["nvme", "identify", "Nvme0", "--json"]).unwrap());
    assert_eq!(identified["namespaces"], controller["namespaces"]);

    let printed = daemon.aryk(&["nvme", "smart", "Nvme0n1"]).unwrap();
    let health = daemon.call("bdev_nvme_get_controller_health_info", json!({"name": "Nvme0"})).unwrap();
    assert!(line(&printed, "drive").ends_with(", S1"), "{printed}");
    assert_eq!(line(&printed, "temperature"), format!("{} °C", health["temperature_celsius"]));
    assert_eq!((line(&printed, "warnings"), line(&printed, "media errors")), ("none".into(), "0".into()));
    let as_json = parse(&daemon.aryk(&["nvme", "smart", "Nvme0", "--json"]).unwrap());
    assert_eq!(as_json["temperature_celsius"], health["temperature_celsius"]);

    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    let mut vm = FrontEnd::connect(&daemon.dir().join("vhost/vm"));
    vm.write(0, &[7; 512]).unwrap();
    assert_eq!(daemon.aryk(&["nvme", "reset", "Nvme0n2"]).unwrap(), "The controller 'Nvme0' was reset.\n");
    assert_eq!(
        parse(&daemon.aryk(&["nvme", "reset", "Nvme0", "--json"]).unwrap()),
        json!({"controller": "Nvme0", "reset": true})
    );
    assert_eq!(vm.read(0, 512).unwrap(), [7; 512]);
    let printed = daemon.aryk(&["nvme", "identify", "Nvme0"]).unwrap();
    assert!(line(&printed, "resets").starts_with("2, the last for "), "{printed}");

    for command in ["identify", "smart", "reset"] {
        let (code, printed) = daemon.aryk(&["nvme", command, "Nvme1"]).unwrap_err();
        assert!(code != 0 && printed.contains("the daemon drives no 'Nvme1'"), "{code} {printed}");
    }
    drop((vm, daemon, drive));
}

#[test]
fn format_says_what_is_lost_and_refuses_disks_in_use() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    let format = |args: &[&str]| daemon.aryk(&[&["nvme", "format"], args].concat());
    let refused = |args: &[&str], text: &str| {
        let (_, printed) = format(args).unwrap_err();
        assert!(printed.contains(text), "{args:?}: {printed}");
    };
    refused(&["Nvme0"], "the controller 'Nvme0' has 2 namespaces: name the disk of one");
    refused(&["Nvme0n2"], "this destroys all data of disk 'Nvme0n2', 8M, of the drive ");
    refused(&["Nvme0n2", "--block-size", "1000", "--force"], "no format with blocks of 1000 bytes");
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n2"})).unwrap();
    let socket = daemon.dir().join("vhost/vm");
    let mut vm = FrontEnd::connect(&socket);
    vm.write(0, &[7; 512]).unwrap();
    refused(&["Nvme0n2", "--force"], "a disk that is in use: Nvme0n2 by vhost controller vm");
    assert_eq!(vm.read(0, 512).unwrap(), [7; 512]);
    drop(vm);
    daemon.call("vhost_delete_controller", json!({"ctrlr": "vm"})).unwrap();

    let printed = format(&["Nvme0n2", "--force", "--erase", "data", "--block-size", "4096"]).unwrap();
    assert_eq!(printed, "Namespace 2 of 'Nvme0' is formatted, with blocks of 4096 bytes.\n");
    let block_size = |daemon: &Daemon| {
        daemon.call("bdev_get_bdevs", json!({"name": "Nvme0n2"})).map(|disks| disks[0]["block_size"].clone())
    };
    wait_for("a disk of the new format", || block_size(&daemon) == Ok(json!(4096)));
    // Without a size, the blocks stay as they are.
    let printed = format(&["Nvme0n2", "--force", "--json"]).unwrap();
    assert_eq!(parse(&printed), json!({"controller": "Nvme0", "nsid": 2, "block_size": 4096}));
    wait_for("the disk", || block_size(&daemon) == Ok(json!(4096)));
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n2"})).unwrap();
    let mut vm = FrontEnd::connect(&socket);
    assert_eq!(vm.read(0, 4096).unwrap(), [0; 4096], "the data is erased");
    drop((vm, daemon, drive));
}

#[test]
fn firmware_is_loaded_on_demand_only() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    let mut contents = vec![0; 16_384];
    contents[..FIRMWARE_MAGIC.len()].copy_from_slice(&FIRMWARE_MAGIC);
    contents[FIRMWARE_MAGIC.len()..][..8].copy_from_slice(b"2.0     ");
    std::fs::write(daemon.dir().join("image"), contents).unwrap();
    let firmware = || line(&daemon.aryk(&["nvme", "identify", "Nvme0"]).unwrap(), "firmware");
    let before = firmware();
    let (_, printed) = daemon.aryk(&["nvme", "firmware", "Nvme0", "image"]).unwrap_err();
    assert!(printed.contains(&format!("this replaces firmware '{before}")), "{printed}");
    assert_eq!(firmware(), before);
    daemon.aryk(&["nvme", "firmware", "Nvme0n1", "no-such-image", "--force"]).unwrap_err();
    // The command's directory is not the daemon's.
    let printed = daemon.aryk(&["nvme", "firmware", "Nvme0n1", "image", "--force"]).unwrap();
    assert_eq!(firmware(), "2.0");
    assert!(before != "2.0" && printed.contains("2.0"), "{printed}");
    drop((daemon, drive));
}
