//! What a slip of a person's must not take from a running VM.

use crate::harness::{Daemon, outcome};
use std::process::{Child, Stdio};
use std::time::Duration;

/// A front-end of a disk, as a VM would be one.
struct FrontEnd(Child);

impl FrontEnd {
    /// Connects, and waits until the daemon knows.
    fn connect(daemon: &Daemon, controller: &str, more: &[&str]) -> Self {
        let socket = daemon.dir().join("vhost").join(controller);
        let args = [&["bench", socket.to_str().unwrap(), "--time", "5m", "--rate", "10"], more].concat();
        let child = daemon.aryk(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let front_end = Self(child);
        for _ in 0..3000 {
            let listed = daemon.json(&["controller", "list"]);
            let of_it = listed.as_array().unwrap().iter().find(|c| c["ctrlr"] == controller).unwrap();
            if of_it["sessions"][0]["started"] == true {
                return front_end;
            }
            std::thread::park_timeout(Duration::from_millis(10));
        }
        panic!("nobody connects to {controller}");
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn names(daemon: &Daemon, what: &str, member: &str) -> Vec<String> {
    let all = daemon.json(&[what, "list"]);
    all.as_array().unwrap().iter().map(|one| one[member].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_disk_that_a_vm_uses_is_not_taken_away_by_a_slip() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["disk", "create", "free", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    let vm = FrontEnd::connect(&daemon, "d", &[]);
    let (code, complaint) = daemon.fails(&["detach", "d"]);
    assert_eq!(code, 1);
    let process = format!("(aryk, process {})", vm.0.id());
    for part in ["disk 'd'", "controller 'd' at ", "/vhost/d", "a VM is connected", &process, "--force"] {
        assert!(complaint.contains(part), "{part}: {complaint}");
    }
    let (_, complaint) = daemon.fails(&["disk", "remove", "free", "d"]);
    assert!(complaint.contains("disk 'd' is in use") && complaint.contains("aryk detach"), "{complaint}");
    assert_eq!(
        names(&daemon, "disk", "name"),
        ["d", "free"],
        "all are looked at before the first is removed"
    );
    let told: serde_json::Value =
        serde_json::from_str(&daemon.fails(&["--json", "disk", "remove", "d"]).1).unwrap();
    assert_eq!(told["error"]["users"].as_array().unwrap().len(), 1, "{told}");
    let (code, complaint) = daemon.fails(&["stop"]);
    assert_eq!(code, 1);
    assert!(complaint.contains("controller 'd': a VM is connected"), "{complaint}");
    let gone = daemon.ok(&["disk", "remove", "d", "free", "--force"]);
    assert!(gone.contains("Disk 'd' is gone with its controllers: d"), "{gone}");
    assert!(names(&daemon, "disk", "name").is_empty() && names(&daemon, "controller", "ctrlr").is_empty());
}

#[test]
fn a_waiting_controller_keeps_its_disk_and_lets_itself_be_taken() {
    let daemon = Daemon::start();
    for disk in ["a", "b"] {
        daemon.ok(&["disk", "create", disk, "--memory", "--size", "1M"]);
        daemon.ok(&["attach", disk]);
    }
    let (_, complaint) = daemon.fails(&["disk", "remove", "a"]);
    assert!(
        complaint.contains("controller 'a' at ") && complaint.contains("no VM is connected"),
        "{complaint}"
    );
    let gone = daemon.ok(&["detach", "a", "b"]);
    assert_eq!(gone, "Controller 'a' is gone.\nController 'b' is gone.\n");
    assert_eq!(daemon.ok(&["disk", "remove", "a", "b"]), "Disk 'a' is gone.\nDisk 'b' is gone.\n");
    let (_, complaint) = daemon.fails(&["detach", "a"]);
    assert!(complaint.contains("aryk controller list"), "{complaint}");
}

#[test]
fn disks_of_disks_and_targets_are_users_too() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "base", "--memory", "--size", "1M"]);
    daemon.ok(&["rpc", "bdev_passthru_create", r#"{"name": "front", "base_bdev_name": "base"}"#]);
    daemon.ok(&["attach", "front", "--scsi", "--controller", "s", "--target", "3"]);
    let (_, complaint) = daemon.fails(&["disk", "remove", "base"]);
    assert!(complaint.contains("disk 'front' is made of it"), "{complaint}");
    assert!(complaint.contains("target 3 of controller 's'"), "{complaint}");
    let vm = FrontEnd::connect(&daemon, "s", &["--scsi=3"]);
    let (_, complaint) = daemon.fails(&["detach", "front"]);
    assert!(complaint.contains("target 3 of controller 's'"), "{complaint}");
    let (_, complaint) = daemon.fails(&["detach", "s"]);
    assert!(complaint.contains("one by one all the same: aryk detach DISK --force"), "{complaint}");
    let (_, complaint) = daemon.fails(&["detach", "s", "--force"]);
    assert!(complaint.contains("aryk detach DISK --force"), "{complaint}");
    let taken = daemon.ok(&["detach", "front", "--force"]);
    assert!(taken.contains("Target 3 of controller 's' has no disk any more"), "{taken}");
    drop(vm);
    let (_, complaint) = daemon.fails(&["disk", "remove", "base"]);
    assert!(complaint.contains("disk 'front' is made of it"), "{complaint}");
    daemon.ok(&["disk", "remove", "base", "front"]);
    assert!(names(&daemon, "disk", "name").is_empty());
}

#[test]
fn a_controller_goes_once_with_the_disks_below_it() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "base", "--memory", "--size", "1M"]);
    daemon.ok(&["rpc", "bdev_passthru_create", r#"{"name": "front", "base_bdev_name": "base"}"#]);
    daemon.ok(&["attach", "front"]);
    let told = daemon.ok(&["disk", "remove", "front", "base", "--force"]);
    assert_eq!(told, "Disk 'front' is gone with its controllers: front.\nDisk 'base' is gone.\n");
    assert!(names(&daemon, "disk", "name").is_empty() && names(&daemon, "controller", "ctrlr").is_empty());
}

#[test]
fn two_vms_get_one_disk_only_on_purpose() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    for more in
        [&["--controller", "e"][..], &["--controller", "e", "--readonly"], &["--controller", "s", "--scsi"]]
    {
        let (code, complaint) = daemon.fails(&[&["attach", "d"], more].concat());
        assert_eq!(code, 1);
        assert!(complaint.contains("disk 'd' is offered already"), "{complaint}");
        assert!(complaint.contains("controller 'd' at") && complaint.contains("--shared"), "{complaint}");
    }
    assert_eq!(names(&daemon, "controller", "ctrlr"), ["d"], "what was refused leaves nothing");
    daemon.ok(&["attach", "d", "--controller", "e", "--shared"]);
    // SPDK's clients are not asked.
    daemon.ok(&["rpc", "vhost_create_blk_controller", r#"{"ctrlr": "f", "dev_name": "d"}"#]);
    assert_eq!(names(&daemon, "controller", "ctrlr"), ["d", "e", "f"]);
    // Who only reads harms nobody, and is not harmed.
    daemon.ok(&["detach", "d", "e", "f"].map(|word| word));
    for controller in ["r1", "r2"] {
        daemon.ok(&["attach", "d", "--controller", controller, "--readonly"]);
    }
    daemon.fails(&["attach", "d", "--controller", "w"]);
}

#[test]
fn two_who_attach_at_once_are_told_apart_by_the_daemon() {
    let daemon = Daemon::start();
    for round in 0..8 {
        let disk = format!("d{round}");
        daemon.ok(&["disk", "create", &disk, "--memory", "--size", "1M"]);
        let names = ["a", "b", "c"].map(|name| format!("{name}{round}"));
        let children = names.each_ref().map(|name| {
            let mut attach = daemon.aryk(&["attach", &disk, "--scsi", "--controller", name]);
            attach.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        });
        let done = children.map(|mut child| child.wait().unwrap().success());
        assert_eq!(done.iter().filter(|done| **done).count(), 1, "{done:?}");
    }
}

const FILE: &str = r#"
    [[disk]]
    name = "d"
    memory = true
    size = "1M"

    [[controller]]
    disk = "d"
    queues = 2
"#;

#[test]
fn a_file_takes_nothing_from_a_vm_unless_it_is_told_to() {
    let daemon = Daemon::start();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    write(FILE);
    daemon.ok(&["apply", "all.toml"]);
    let vm = FrontEnd::connect(&daemon, "d", &[]);
    write("");
    let plan = daemon.run(&["apply", "all.toml", "--prune", "--plan"]);
    assert!(plan.stdout.contains("! disk 'd': controller 'd' at ") && plan.code == 2, "{plan:?}");
    let (code, complaint) = daemon.fails(&["apply", "all.toml", "--prune"]);
    assert!(
        code == 1 && complaint.contains("a VM is connected") && complaint.contains("--force"),
        "{complaint}"
    );
    write(&FILE.replace("queues = 2", "queues = 3"));
    let (_, complaint) = daemon.fails(&["apply", "all.toml", "--replace"]);
    assert!(complaint.contains("a VM is connected"), "{complaint}");
    daemon.ok(&["apply", "all.toml", "--replace", "--force"]);
    drop(vm);
    write("");
    daemon.ok(&["apply", "all.toml", "--prune", "--force"]);
    assert!(names(&daemon, "disk", "name").is_empty());
}

#[test]
fn a_file_takes_no_part_of_a_disk_from_a_vm() {
    let daemon = Daemon::start();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    let controller = "[[controller]]\ndisk = \"Wp0\"\n";
    let split = "params = { base_bdev = \"W\", split_count = 2, split_size_mb = 4 }";
    let all = |size: &str| {
        format!(
            "{controller}[[disk]]\nname = \"W\"\nmemory = true\nsize = \"{size}\"\n[[call]]\nmethod = \"bdev_split_create\"\n{split}\n"
        )
    };
    write(&all("16M"));
    daemon.ok(&["apply", "all.toml"]);
    let _vm = FrontEnd::connect(&daemon, "Wp0", &[]);
    let is_refused = |args: &[&str]| {
        let (code, complaint) = daemon.fails(args);
        assert!(code == 1 && complaint.contains("disk 'Wp0': controller 'Wp0' at "), "{args:?}: {complaint}");
        assert!(complaint.contains("a VM is connected") && complaint.contains("--force"), "{complaint}");
        assert_eq!(names(&daemon, "disk", "name"), ["W", "Wp0", "Wp1"]);
    };
    write(&all("32M"));
    is_refused(&["apply", "all.toml", "--replace"]);
    write("");
    is_refused(&["apply", "all.toml", "--prune"]);
    write(controller);
    let (code, complaint) = daemon.fails(&["apply", "all.toml", "--prune", "--force"]);
    assert!(code == 1 && complaint.contains("no disk 'Wp0' after this plan"), "{complaint}");
    assert_eq!(names(&daemon, "disk", "name"), ["W", "Wp0", "Wp1"]);
}

#[test]
fn a_file_says_that_a_disk_is_shared() {
    let daemon = Daemon::start();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    let second = |more: &str| format!("{FILE}\n[[controller]]\nname = \"e\"\ndisk = \"d\"\n{more}");
    write(&second(""));
    let (_, complaint) = daemon.fails(&["apply", "all.toml"]);
    assert!(complaint.contains("'d' is in use") && complaint.contains("shared = true"), "{complaint}");
    write(&second("shared = true"));
    daemon.ok(&["apply", "all.toml"]);
    let exported = daemon.ok(&["export"]);
    assert_eq!(exported.matches("shared = true").count(), 2, "{exported}");
    let other = Daemon::start();
    std::fs::write(other.dir().join("all.toml"), exported).unwrap();
    other.ok(&["apply", "all.toml"]);
    assert_eq!(names(&other, "controller", "ctrlr"), ["d", "e"]);
}

#[test]
fn a_daemon_is_stopped_in_good_order() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    let ended = daemon.run(&["stop"]);
    assert!(ended.code == 0 && ended.stdout.contains("has ended"), "{ended:?}");
    assert!(ended.stderr.contains("disks in memory lose their data: d\n"), "{ended:?}");
    assert!(ended.stderr.contains("no --state-dir: its disks and controllers are not kept"), "{ended:?}");
    assert!(!daemon.dir().join("vhost/d").exists() && !daemon.dir().join("rpc.sock").exists());
    assert_eq!(outcome(&mut daemon.aryk(&["stop"])).code, 3);
    let keeping = Daemon::start_keeping();
    keeping.ok(&["disk", "create", "f", "--file", "f", "--size", "1M"]);
    assert_eq!(keeping.run(&["stop"]).stderr, "");
}

#[test]
fn a_scsi_controller_is_pruned_when_its_vm_has_gone() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d", "--scsi", "--controller", "s", "--target", "3"]);
    std::fs::write(daemon.dir().join("empty.toml"), "").unwrap();
    let vm = FrontEnd::connect(&daemon, "s", &["--scsi=3"]);
    for force in [&[][..], &["--force"]] {
        let (code, complaint) = daemon.fails(&[&["apply", "empty.toml", "--prune"], force].concat());
        assert_eq!(code, 1);
        assert!(
            complaint.contains("controller 's': a VM is connected") && complaint.contains("shut it down"),
            "{complaint}"
        );
        assert_eq!(
            daemon.json(&["rpc", "scsi_get_devices"]).as_array().unwrap().len(),
            1,
            "nothing was done"
        );
    }
    drop(vm);
    for _ in 0..300 {
        if daemon.run(&["apply", "empty.toml", "--prune"]).code == 0 {
            break;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    assert!(names(&daemon, "disk", "name").is_empty() && names(&daemon, "controller", "ctrlr").is_empty());
}
