//! Guards against detaching disks from running VMs by mistake.

use crate::harness::{Daemon, outcome};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::Duration;

/// A front-end of a disk, like a VM's.
struct FrontEnd(Child);

impl FrontEnd {
    /// Connects, and waits until the daemon reports it.
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
        panic!("no front-end connected to {controller}");
    }
}

impl Drop for FrontEnd {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn names(daemon: &Daemon, what: &str, member: &str) -> Vec<String> {
    let all = daemon.json(&[what, "list"]);
    all.as_array().unwrap().iter().map(|one| one[member].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_disk_in_use_by_a_vm_is_detached_only_with_force() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["disk", "create", "free", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    let vm = FrontEnd::connect(&daemon, "d", &[]);
    let (code, stderr) = daemon.fails(&["detach", "d"]);
    assert_eq!(code, 1);
    let process = format!("(aryk, process {})", vm.0.id());
    for part in ["disk 'd'", "controller 'd' at ", "/vhost/d", "a VM is connected", &process, "--force"] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    let (_, stderr) = daemon.fails(&["disk", "remove", "free", "d"]);
    assert!(stderr.contains("disk 'd' is in use") && stderr.contains("aryk detach"), "{stderr}");
    assert_eq!(
        names(&daemon, "disk", "name"),
        ["d", "free"],
        "all disks are checked before the first is removed"
    );
    let reported: serde_json::Value =
        serde_json::from_str(&daemon.fails(&["--json", "disk", "remove", "d"]).1).unwrap();
    assert_eq!(reported["error"]["users"].as_array().unwrap().len(), 1, "{reported}");
    let (code, stderr) = daemon.fails(&["stop"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("controller 'd': a VM is connected"), "{stderr}");
    let gone = daemon.ok(&["disk", "remove", "d", "free", "--force"]);
    assert!(gone.contains("Disk 'd' is removed with its controllers: d"), "{gone}");
    assert!(names(&daemon, "disk", "name").is_empty() && names(&daemon, "controller", "ctrlr").is_empty());
}

#[test]
fn a_controller_without_a_vm_guards_its_disk_but_can_be_detached() {
    let daemon = Daemon::start();
    for disk in ["a", "b"] {
        daemon.ok(&["disk", "create", disk, "--memory", "--size", "1M"]);
        daemon.ok(&["attach", disk]);
    }
    let (_, stderr) = daemon.fails(&["disk", "remove", "a"]);
    assert!(stderr.contains("controller 'a' at ") && stderr.contains("no VM is connected"), "{stderr}");
    let gone = daemon.ok(&["detach", "a", "b"]);
    assert_eq!(gone, "Controller 'a' is removed.\nController 'b' is removed.\n");
    assert_eq!(daemon.ok(&["disk", "remove", "a", "b"]), "Disk 'a' is removed.\nDisk 'b' is removed.\n");
    let (_, stderr) = daemon.fails(&["detach", "a"]);
    assert!(stderr.contains("aryk controller list"), "{stderr}");
}

#[test]
fn disks_on_top_and_targets_are_users() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "base", "--memory", "--size", "1M"]);
    daemon.ok(&["rpc", "bdev_passthru_create", r#"{"name": "front", "base_bdev_name": "base"}"#]);
    daemon.ok(&["attach", "front", "--scsi", "--controller", "s", "--target", "3"]);
    let (_, stderr) = daemon.fails(&["disk", "remove", "base"]);
    assert!(stderr.contains("disk 'front' is on top of it"), "{stderr}");
    assert!(stderr.contains("target 3 of controller 's'"), "{stderr}");
    let vm = FrontEnd::connect(&daemon, "s", &["--scsi=3"]);
    let (_, stderr) = daemon.fails(&["detach", "front"]);
    assert!(stderr.contains("target 3 of controller 's'"), "{stderr}");
    let (_, stderr) = daemon.fails(&["detach", "s"]);
    assert!(stderr.contains("one by one nevertheless: aryk detach DISK --force"), "{stderr}");
    let (_, stderr) = daemon.fails(&["detach", "s", "--force"]);
    assert!(stderr.contains("aryk detach DISK --force"), "{stderr}");
    let taken = daemon.ok(&["detach", "front", "--force"]);
    assert!(taken.contains("Target 3 of controller 's' is removed"), "{taken}");
    drop(vm);
    let (_, stderr) = daemon.fails(&["disk", "remove", "base"]);
    assert!(stderr.contains("disk 'front' is on top of it"), "{stderr}");
    daemon.ok(&["disk", "remove", "base", "front"]);
    assert!(names(&daemon, "disk", "name").is_empty());
}

#[test]
fn a_controller_is_removed_once_with_the_disks_below_it() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "base", "--memory", "--size", "1M"]);
    daemon.ok(&["rpc", "bdev_passthru_create", r#"{"name": "front", "base_bdev_name": "base"}"#]);
    daemon.ok(&["attach", "front"]);
    let reported = daemon.ok(&["disk", "remove", "front", "base", "--force"]);
    assert_eq!(reported, "Disk 'front' is removed with its controllers: front.\nDisk 'base' is removed.\n");
    assert!(names(&daemon, "disk", "name").is_empty() && names(&daemon, "controller", "ctrlr").is_empty());
}

#[test]
fn two_vms_share_a_disk_only_with_shared() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    for more in
        [&["--controller", "e"][..], &["--controller", "e", "--readonly"], &["--controller", "s", "--scsi"]]
    {
        let (code, stderr) = daemon.fails(&[&["attach", "d"], more].concat());
        assert_eq!(code, 1);
        assert!(stderr.contains("disk 'd' is attached already"), "{stderr}");
        assert!(stderr.contains("controller 'd' at") && stderr.contains("--shared"), "{stderr}");
    }
    assert_eq!(names(&daemon, "controller", "ctrlr"), ["d"], "a refused attach leaves no controller");
    daemon.ok(&["attach", "d", "--controller", "e", "--shared"]);
    // SPDK's clients can share a disk without a parameter.
    daemon.ok(&["rpc", "vhost_create_blk_controller", r#"{"ctrlr": "f", "dev_name": "d"}"#]);
    assert_eq!(names(&daemon, "controller", "ctrlr"), ["d", "e", "f"]);
    // Read-only controllers need no --shared.
    daemon.ok(&["detach", "d", "e", "f"].map(|word| word));
    for controller in ["r1", "r2"] {
        daemon.ok(&["attach", "d", "--controller", controller, "--readonly"]);
    }
    daemon.fails(&["attach", "d", "--controller", "w"]);
}

#[test]
fn one_of_several_concurrent_attaches_succeeds() {
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
fn apply_detaches_a_connected_vm_only_with_force() {
    let daemon = Daemon::start();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    write(FILE);
    daemon.ok(&["apply", "all.toml"]);
    let vm = FrontEnd::connect(&daemon, "d", &[]);
    write("");
    let plan = daemon.run(&["apply", "all.toml", "--prune", "--plan"]);
    assert!(plan.stdout.contains("! disk 'd': controller 'd' at ") && plan.code == 2, "{plan:?}");
    let (code, stderr) = daemon.fails(&["apply", "all.toml", "--prune"]);
    assert!(code == 1 && stderr.contains("a VM is connected") && stderr.contains("--force"), "{stderr}");
    write(&FILE.replace("queues = 2", "queues = 3"));
    let (_, stderr) = daemon.fails(&["apply", "all.toml", "--replace"]);
    assert!(stderr.contains("a VM is connected"), "{stderr}");
    daemon.ok(&["apply", "all.toml", "--replace", "--force"]);
    drop(vm);
    write("");
    daemon.ok(&["apply", "all.toml", "--prune", "--force"]);
    assert!(names(&daemon, "disk", "name").is_empty());
}

#[test]
fn apply_removes_a_part_of_a_used_disk_only_with_force() {
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
        let (code, stderr) = daemon.fails(args);
        assert!(code == 1 && stderr.contains("disk 'Wp0': controller 'Wp0' at "), "{args:?}: {stderr}");
        assert!(stderr.contains("a VM is connected") && stderr.contains("--force"), "{stderr}");
        assert_eq!(names(&daemon, "disk", "name"), ["W", "Wp0", "Wp1"]);
    };
    write(&all("32M"));
    is_refused(&["apply", "all.toml", "--replace"]);
    write("");
    is_refused(&["apply", "all.toml", "--prune"]);
    write(controller);
    let (code, stderr) = daemon.fails(&["apply", "all.toml", "--prune", "--force"]);
    assert!(code == 1 && stderr.contains("no disk 'Wp0' after this plan"), "{stderr}");
    assert_eq!(names(&daemon, "disk", "name"), ["W", "Wp0", "Wp1"]);
}

#[test]
fn a_file_can_share_a_disk() {
    let daemon = Daemon::start();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    let second = |more: &str| format!("{FILE}\n[[controller]]\nname = \"e\"\ndisk = \"d\"\n{more}");
    write(&second(""));
    let (_, stderr) = daemon.fails(&["apply", "all.toml"]);
    assert!(stderr.contains("'d' is in use") && stderr.contains("shared = true"), "{stderr}");
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
fn stop_ends_the_daemon_in_order() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    let ended = daemon.run(&["stop"]);
    assert!(ended.code == 0 && ended.stdout.contains("has ended"), "{ended:?}");
    assert!(ended.stderr.contains("disks in memory lose their data: d\n"), "{ended:?}");
    assert!(ended.stderr.contains("no --state-dir: its disks and controllers are not stored"), "{ended:?}");
    assert!(!daemon.dir().join("vhost/d").exists() && !daemon.dir().join("rpc.sock").exists());
    assert_eq!(outcome(&mut daemon.aryk(&["stop"])).code, 3);
    let keeping = Daemon::start_keeping();
    keeping.ok(&["disk", "create", "f", "--file", "f", "--size", "1M"]);
    assert_eq!(keeping.run(&["stop"]).stderr, "");
}

#[test]
fn a_scsi_controller_is_pruned_after_its_vm_disconnects() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d", "--scsi", "--controller", "s", "--target", "3"]);
    std::fs::write(daemon.dir().join("empty.toml"), "").unwrap();
    let vm = FrontEnd::connect(&daemon, "s", &["--scsi=3"]);
    for force in [&[][..], &["--force"]] {
        let (code, stderr) = daemon.fails(&[&["apply", "empty.toml", "--prune"], force].concat());
        assert_eq!(code, 1);
        assert!(
            stderr.contains("controller 's': a VM is connected") && stderr.contains("shut it down"),
            "{stderr}"
        );
        assert_eq!(
            daemon.json(&["rpc", "scsi_get_devices"]).as_array().unwrap().len(),
            1,
            "no step was done"
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

#[test]
fn a_shared_disk_is_guarded_and_shared_again_after_a_restart() {
    let mut daemon = Daemon::start_keeping();
    let (file, away) = (daemon.dir().join("d.img"), daemon.dir().join("away.img"));
    daemon.ok(&["disk", "create", "d", "--file", file.to_str().unwrap(), "--size", "1M"]);
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    daemon.ok(&["share", "d", "--listen", &listen.to_string()]);
    for (command, part) in [
        (&["share", "d"][..], "is shared already"),
        (&["attach", "d"], "in use by share nqn."),
        (&["disk", "remove", "d"], "it is shared as nqn."),
    ] {
        let (code, stderr) = daemon.fails(command);
        assert!(code != 0 && stderr.contains(part), "{stderr}");
    }

    daemon.restart(|_| std::fs::rename(&file, &away).unwrap());
    let absent = daemon.json(&["status"])["absent"].to_string();
    assert!(absent.contains("listener") && absent.contains("namespace 1 of nqn."), "{absent}");
    assert!(TcpStream::connect(listen).is_err(), "a host would find that its disk is gone");
    std::fs::rename(&away, &file).unwrap();
    let is_back = || !daemon.json(&["hosts"])[0]["listen_addresses"].as_array().unwrap().is_empty();
    assert!((0..1000).any(|_| {
        std::thread::park_timeout(Duration::from_millis(10));
        is_back()
    }));
    drop(TcpStream::connect(listen).unwrap());

    daemon.restart(|_| std::fs::rename(&file, &away).unwrap());
    daemon.ok(&["unshare", "d"]);
    assert_eq!(daemon.json(&["hosts"]), serde_json::json!([]));
    assert!(!daemon.json(&["status"])["absent"].to_string().contains("nqn."));
}

#[test]
fn the_states_of_paths_are_kept_over_a_restart() {
    let mut daemon = Daemon::start_keeping();
    let file = daemon.dir().join("d.img");
    daemon.ok(&["disk", "create", "d", "--file", file.to_str().unwrap(), "--size", "1M"]);
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nqn = serde_json::json!("nqn.2016-06.io.spdk:cnode1");
    let address =
        serde_json::json!({"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": listen.port().to_string()});
    for (method, params) in [
        ("nvmf_create_transport", serde_json::json!({"trtype": "TCP"})),
        ("nvmf_create_subsystem", serde_json::json!({"nqn": nqn, "ana_reporting": true})),
        ("nvmf_subsystem_add_ns", serde_json::json!({"nqn": nqn, "namespace": {"bdev_name": "d"}})),
        ("nvmf_subsystem_add_listener", serde_json::json!({"nqn": nqn, "listen_address": address})),
        (
            "nvmf_subsystem_listener_set_ana_state",
            serde_json::json!({"nqn": nqn, "listen_address": address, "ana_state": "inaccessible", "anagrpid": 1}),
        ),
    ] {
        daemon.ok(&["rpc", method, &params.to_string()]);
    }
    let states = |daemon: &Daemon| {
        let params = serde_json::json!({"nqn": nqn}).to_string();
        daemon.json(&["rpc", "nvmf_subsystem_get_listeners", &params])[0]["ana_states"].clone()
    };
    let expected = serde_json::json!([{"ana_group": 1, "ana_state": "inaccessible"}]);
    assert_eq!(states(&daemon), expected);
    daemon.restart(|_| ());
    assert_eq!(states(&daemon), expected);
}
