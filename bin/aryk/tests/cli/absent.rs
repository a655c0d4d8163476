//! Absent objects: they must be neither replaced nor ignored.

use crate::harness::Daemon;

const FILE: &str = r#"
    [[disk]]
    name = "a"
    file = "a.img"
    size = "8M"

    [[controller]]
    disk = "a"
    queues = 3
"#;

/// A daemon that waits for a.img, which was renamed.
fn waiting() -> Daemon {
    let mut daemon = Daemon::start_keeping();
    std::fs::write(daemon.dir().join("all.toml"), FILE).unwrap();
    daemon.ok(&["apply", "all.toml"]);
    daemon.restart(|dir| std::fs::rename(dir.join("a.img"), dir.join("away")).unwrap());
    daemon
}

#[test]
fn a_missing_file_is_not_replaced_by_an_empty_one() {
    let daemon = waiting();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    let is_refused = |args: &[&str]| {
        let (code, stderr) = daemon.fails(args);
        assert_eq!(code, 1);
        for part in ["disk 'a': ", "No such file", "Put its file back", "aryk disk remove a"] {
            assert!(stderr.contains(part), "{args:?} without {part}: {stderr}");
        }
        assert!(!daemon.dir().join("a.img").exists(), "{args:?}");
    };
    is_refused(&["apply", "all.toml"]);
    write(&FILE.replace("\"a\"", "\"b\""));
    is_refused(&["apply", "all.toml"]);
    is_refused(&["disk", "create", "a", "--memory", "--size", "1M"]);
    is_refused(&["disk", "create", "a", "--file", "other.img", "--size", "8M"]);
    is_refused(&["disk", "create", "b", "--file", "state/../a.img", "--size", "8M"]);
    is_refused(&["disk", "create", "b", "--file", "a.img", "--from", "away"]);
    assert!(!daemon.dir().join("other.img").exists());
    daemon.ok(&["disk", "remove", "a", "--force"]);
    daemon.ok(&["disk", "create", "a", "--file", "a.img", "--size", "8M"]);
}

#[test]
fn a_file_that_is_back_makes_its_disk() {
    let daemon = waiting();
    std::fs::rename(daemon.dir().join("away"), daemon.dir().join("a.img")).unwrap();
    daemon.ok(&["apply", "all.toml"]);
    assert!(daemon.ok(&["apply", "all.toml"]).contains("Nothing to do"));
}

#[test]
fn absent_objects_are_pruned() {
    let mut daemon = waiting();
    std::fs::write(daemon.dir().join("all.toml"), "").unwrap();
    assert!(daemon.ok(&["apply", "all.toml"]).contains("Nothing to do"), "without --prune it stays");
    let pruned = daemon.ok(&["apply", "all.toml", "--prune"]);
    assert!(
        pruned.contains("- controller a  (absent, and not in the file") && pruned.contains("Done: 2."),
        "{pruned}"
    );
    assert_eq!(daemon.json(&["rpc", "aryk_absent_get"]), serde_json::json!([]));
    daemon.restart(|dir| std::fs::rename(dir.join("away"), dir.join("a.img")).unwrap());
    assert_eq!(daemon.json(&["disk", "list"]), serde_json::json!([]));
}

#[test]
fn an_export_has_absent_objects() {
    let daemon = waiting();
    let exported = daemon.run(&["export"]);
    assert_eq!(exported.code, 0, "{exported:?}");
    assert!(
        exported.stderr.contains("disk 'a': ") && exported.stderr.contains("controller 'a': "),
        "{exported:?}"
    );
    let other = Daemon::start();
    std::fs::write(other.dir().join("all.toml"), exported.stdout).unwrap();
    std::fs::rename(daemon.dir().join("away"), daemon.dir().join("a.img")).unwrap();
    drop(daemon.run(&["stop"]));
    other.ok(&["apply", "all.toml"]);
    assert_eq!(other.json(&["disk", "list"])[0]["num_blocks"], (8 << 20) / 512);
    assert_eq!(other.json(&["controller", "list"])[0]["num_queues"], 3);
}

#[test]
fn absent_objects_are_in_all_lists() {
    let daemon = waiting();
    let list = daemon.ok(&["disk", "list"]);
    assert!(list.starts_with("ABSENT") && list.contains("for ") && list.contains("No such file"), "{list}");
    daemon.ok(&["disk", "create", "m", "--memory", "--size", "1M"]);
    let list = daemon.ok(&["disk", "list"]);
    assert!(list.starts_with("NAME") && list.contains("\n\nABSENT"), "{list}");
    let disks = daemon.json(&["disk", "list"]);
    assert_eq!((&disks[0]["state"], &disks[1]["state"]), (&"present".into(), &"absent".into()));
    assert!(disks[1]["tried_since"].is_u64() && disks[1]["name"] == "a", "{disks}");
    let show = daemon.ok(&["disk", "show", "a"]);
    assert!(show.contains("absent: No such file") && show.contains("aryk disk remove a"), "{show}");
    let controllers = daemon.json(&["controller", "list"]);
    assert_eq!((&controllers[0]["state"], &controllers[0]["name"]), (&"absent".into(), &"a".into()));
    assert!(daemon.ok(&["controller", "list"]).starts_with("ABSENT"));
    let doctor = daemon.run(&["doctor"]);
    assert_eq!(doctor.code, 1, "{doctor:?}");
    for part in ["MISSING", "disk 'a'", "controller 'a'", "remove a", "detach a"] {
        assert!(doctor.stdout.contains(part), "without {part}: {}", doctor.stdout);
    }
    let (code, stderr) = daemon.fails(&["disk", "show", "b"]);
    assert!(code == 1 && stderr.contains("'aryk disk list'"), "{stderr}");
}

#[test]
fn absent_disks_can_be_removed() {
    let mut daemon = waiting();
    let away = daemon.dir().join("away");
    std::fs::write(&away, vec![7; 8 << 20]).unwrap();
    let (code, stderr) = daemon.fails(&["disk", "remove", "a"]);
    assert!(code == 1 && stderr.contains("controller 'a', which is absent"), "{stderr}");
    let reported = daemon.ok(&["disk", "remove", "a", "--force"]);
    assert!(
        reported.contains("was absent, and is forgotten") && reported.contains("controller 'a'"),
        "{reported}"
    );
    assert!(reported.contains("Its file stays as it is") && reported.contains("a.img"), "{reported}");
    daemon.restart(|dir| std::fs::rename(dir.join("away"), dir.join("a.img")).unwrap());
    let status = daemon.json(&["status"]);
    assert_eq!((&status["disks"], &status["absent"]), (&0.into(), &serde_json::json!([])));
    assert!(std::fs::read(daemon.dir().join("a.img")).unwrap() == vec![7; 8 << 20]);
    assert_eq!(daemon.run(&["doctor"]).stdout.matches("absent").count(), 0);
}

#[test]
fn absent_controllers_and_targets_can_be_removed() {
    let mut daemon = waiting();
    let reported = daemon.ok(&["detach", "a"]);
    assert!(reported.contains("Controller 'a' was absent, and is forgotten"), "{reported}");
    assert_eq!(daemon.fails(&["detach", "a"]).0, 1);
    daemon.restart(|dir| std::fs::rename(dir.join("away"), dir.join("a.img")).unwrap());
    assert_eq!(daemon.json(&["controller", "list"]), serde_json::json!([]));
    daemon.ok(&["disk", "create", "m", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "a", "--scsi", "--controller", "s"]);
    daemon.ok(&["attach", "m", "--scsi", "--controller", "s"]);
    daemon.ok(&["attach", "a", "--scsi", "--controller", "t", "--shared"]);
    daemon.restart(|dir| std::fs::rename(dir.join("a.img"), dir.join("away")).unwrap());
    let (code, stderr) = daemon.fails(&["detach", "a"]);
    assert!(code == 2 && stderr.contains("s/0") && stderr.contains("t/0"), "{stderr}");
    assert!(daemon.ok(&["detach", "s/0"]).contains("Target 's/0' was absent"));
    // Removing a controller removes its absent targets.
    daemon.ok(&["detach", "t"]);
    let absent = daemon.json(&["rpc", "aryk_absent_get"]);
    assert_eq!(absent.as_array().unwrap().len(), 1, "{absent}");
    daemon.ok(&["disk", "remove", "a"]);
    assert_eq!(daemon.json(&["rpc", "aryk_absent_get"]), serde_json::json!([]));
}

#[test]
fn absent_disks_on_absent_disks_are_removed_once() {
    let mut daemon = Daemon::start_keeping();
    daemon.ok(&["disk", "create", "a", "--file", "a.img", "--size", "1M"]);
    daemon.ok(&["rpc", "bdev_passthru_create", r#"{"name": "p", "base_bdev_name": "a"}"#]);
    daemon.ok(&["attach", "p"]);
    daemon.restart(|dir| std::fs::rename(dir.join("a.img"), dir.join("away")).unwrap());
    assert_eq!(daemon.fails(&["disk", "remove", "a", "p"]).0, 1);
    daemon.ok(&["disk", "remove", "a", "p", "--force"]);
    assert_eq!(daemon.json(&["rpc", "aryk_absent_get"]), serde_json::json!([]));
}

#[test]
fn a_file_that_is_deleted_while_it_is_served_is_reported() {
    let daemon = Daemon::start_logging();
    daemon.ok(&["disk", "create", "d", "--file", "d.img", "--size", "1M"]);
    let is_reported = || daemon.run(&["doctor"]).stdout.contains("is deleted");
    assert!(!is_reported() && daemon.json(&["disk", "list"])[0]["deleted"] == false);
    std::fs::remove_file(daemon.dir().join("d.img")).unwrap();
    assert!(is_reported());
    let list = daemon.json(&["disk", "list"]);
    assert_eq!(list[0]["deleted"], true, "{list}");
    assert!(daemon.ok(&["disk", "list"]).contains("(deleted)"));
    // Another file takes its name; its data is still in the deleted file.
    std::fs::write(daemon.dir().join("d.img"), "other").unwrap();
    assert!(is_reported() && daemon.json(&["disk", "list"])[0]["deleted"] == true);
    assert!(daemon.run(&["doctor"]).stdout.contains("d.img.rescued"));
}

#[test]
fn the_data_of_a_deleted_file_is_lost_only_with_force() {
    let daemon = Daemon::start();
    let write = |text: &str| std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
    for name in ["d", "e"] {
        daemon.ok(&["disk", "create", name, "--file", name, "--size", "1M"]);
        assert!(!daemon.ok(&["disk", "show", name]).contains("is deleted"));
        std::fs::remove_file(daemon.dir().join(name)).unwrap();
        let show = daemon.ok(&["disk", "show", name]);
        assert!(show.contains("is deleted: its data is lost"), "{show}");
    }
    let is_refused = |args: &[&str]| {
        let (code, stderr) = daemon.fails(args);
        assert_eq!(code, 1, "{args:?}");
        for part in ["data would be lost", "disk 'd': its file ", "loses its data", "aryk doctor", "--force"]
        {
            assert!(stderr.contains(part), "{args:?} without {part}: {stderr}");
        }
        assert_eq!(daemon.json(&["disk", "list"]).as_array().unwrap().len(), 2, "{args:?}");
    };
    is_refused(&["disk", "remove", "d"]);
    is_refused(&["stop"]);
    write("");
    is_refused(&["apply", "all.toml", "--prune"]);
    assert_eq!(daemon.run(&["apply", "all.toml", "--prune", "--plan"]).stdout.matches("! disk").count(), 2);
    write("[[disk]]\nname = \"d\"\nfile = \"d\"\nsize = \"1M\"\nreadonly = true");
    is_refused(&["apply", "all.toml", "--replace"]);
    // A refusal reports the users and the data together, because --force permits both.
    daemon.ok(&["attach", "d"]);
    let (_, stderr) = daemon.fails(&["disk", "remove", "d"]);
    assert!(stderr.contains("controller 'd'") && stderr.contains("loses its data"), "{stderr}");
    daemon.ok(&["disk", "remove", "d", "--force"]);
    daemon.ok(&["stop", "--force"]);
}

#[test]
fn the_data_of_a_deleted_file_below_an_encrypted_disk_is_lost_only_with_force() {
    let daemon = Daemon::start_keeping();
    daemon.ok(&["key", "create", "k"]);
    daemon.ok(&["disk", "create", "d", "--file", "d", "--size", "1M", "--encrypt", "k"]);
    std::fs::remove_file(daemon.dir().join("d")).unwrap();
    let (code, stderr) = daemon.fails(&["disk", "remove", "d"]);
    assert!(
        code == 1 && stderr.contains("disk 'd.store': its file ") && stderr.contains("--force"),
        "{stderr}"
    );
    daemon.ok(&["disk", "remove", "d", "--force"]);
    assert_eq!(daemon.json(&["disk", "list"]).as_array().unwrap().len(), 0);
}

#[test]
fn an_absent_disk_in_a_group_can_be_removed() {
    let mut daemon = Daemon::start_keeping();
    daemon.ok(&["disk", "create", "a", "--file", "a.img", "--size", "1M"]);
    daemon.ok(&["qos", "group", "create", "g", "--iops", "100"]);
    daemon.ok(&["qos", "group", "add", "g", "a"]);
    daemon.restart(|dir| std::fs::rename(dir.join("a.img"), dir.join("away")).unwrap());
    daemon.ok(&["disk", "remove", "a"]);
    assert_eq!(daemon.json(&["rpc", "aryk_absent_get"]), serde_json::json!([]));
}

#[test]
fn a_file_that_comes_back_with_another_size_is_logged() {
    let mut daemon = waiting();
    let other = std::fs::File::create(daemon.dir().join("a.img")).unwrap();
    other.set_len(1 << 20).unwrap();
    daemon.restart(|_| {});
    let log = std::fs::read_to_string(daemon.dir().join("log")).unwrap();
    let is_reported =
        |line: &str| line.contains("WARNING") && line.contains("another size") && line.contains("1048576");
    assert!(log.lines().any(is_reported), "{log}");
}

#[test]
fn an_emptied_disk_in_memory_is_reported() {
    let mut daemon = Daemon::start_keeping();
    daemon.ok(&["disk", "create", "m", "--memory", "--size", "1M"]);
    let doctor = daemon.run(&["doctor"]).stdout;
    assert!(!doctor.contains("disk in memory"), "{doctor}");
    daemon.restart(|_| {});
    let log = std::fs::read_to_string(daemon.dir().join("log")).unwrap();
    let is_reported =
        |line: &str| line.contains("WARNING") && line.contains("disk=\"m\"") && line.contains("is empty");
    assert!(log.lines().any(is_reported), "{log}");
    let doctor = daemon.run(&["doctor"]).stdout;
    assert!(doctor.contains("disk in memory") && doctor.contains("disk 'm'"), "{doctor}");
    daemon.ok(&["disk", "remove", "m"]);
    daemon.ok(&["disk", "create", "m", "--memory", "--size", "1M"]);
    assert!(!daemon.run(&["doctor"]).stdout.contains("disk in memory"));
}
