//! `aryk apply` and `aryk export` against a daemon.

use crate::harness::Daemon;
use serde_json::Value;

const FILE: &str = r#"
    [[group]]
    name = "g"
    limits = { bandwidth = "100M" }

    [[disk]]
    name = "vm1"
    file = "vm1.img"
    size = "8M"
    group = "g"
    limits = { iops = "3k", burst = "2s" }

    [[disk]]
    name = "scratch"
    memory = true
    size = "1M"
    block_size = 4096

    [[call]]
    method = "bdev_passthru_create"
    params = { name = "front", base_bdev_name = "scratch" }

    [[controller]]
    disk = "vm1"
    queues = 4

    [[controller]]
    name = "c2"
    disk = "front"
    readonly = true
"#;

fn write(daemon: &Daemon, text: &str) {
    std::fs::write(daemon.dir().join("all.toml"), text).unwrap();
}

fn names(daemon: &Daemon) -> Vec<String> {
    let names = |value: Value, member: &str| -> Vec<String> {
        value.as_array().unwrap().iter().map(|v| v[member].as_str().unwrap().to_owned()).collect()
    };
    let disks = names(daemon.json(&["disk", "list"]), "name");
    [disks, names(daemon.json(&["controller", "list"]), "ctrlr")].concat()
}

#[test]
fn a_file_is_carried_out_once() {
    let daemon = Daemon::start();
    write(&daemon, FILE);
    let shown = daemon.run(&["apply", "all.toml", "--plan"]);
    assert_eq!(shown.code, 2, "{shown:?}");
    assert!(shown.stdout.contains("+ disk vm1") && shown.stdout.contains("9 to do."), "{shown:?}");
    assert!(names(&daemon).is_empty());
    daemon.ok(&["apply", "all.toml"]);
    assert_eq!(names(&daemon), ["vm1", "scratch", "front", "c2", "vm1"]);
    for _ in 0..2 {
        assert!(daemon.ok(&["apply", "all.toml", "--plan"]).contains("Nothing to do"));
        assert!(daemon.ok(&["apply", "all.toml", "--prune"]).contains("Nothing to do"));
    }
}

#[test]
fn an_export_makes_the_same_elsewhere() {
    let (daemon, other) = (Daemon::start(), Daemon::start());
    write(&daemon, FILE);
    daemon.ok(&["apply", "all.toml"]);
    for flag in [&[][..], &["--json"]] {
        let text = daemon.ok(&[flag, &["export"]].concat());
        write(&other, &text);
        std::fs::write(daemon.dir().join("again"), &text).unwrap();
        assert!(daemon.ok(&["apply", "again", "--prune"]).contains("Nothing to do"), "{text}");
    }
    // The file can be in one daemon only.
    daemon.ok(&["detach", "vm1"]);
    daemon.ok(&["disk", "remove", "vm1"]);
    other.ok(&["apply", "all.toml"]);
    assert_eq!(names(&other), ["vm1", "scratch", "front", "c2", "vm1"]);
    let spdk = other.ok(&["rpc", "save_config"]);
    write(&other, &spdk);
    assert!(other.ok(&["apply", "all.toml", "--prune"]).contains("Nothing to do"), "{spdk}");
}

#[test]
fn changes_are_made_in_place_or_asked_for() {
    let daemon = Daemon::start();
    write(&daemon, FILE);
    daemon.ok(&["apply", "all.toml"]);
    write(&daemon, &FILE.replace("8M", "16M"));
    assert!(daemon.ok(&["apply", "all.toml"]).contains("from 8M to 16M"));
    assert_eq!(daemon.json(&["disk", "show", "vm1"])["num_blocks"], 32768);
    write(&daemon, FILE);
    let (code, complaint) = daemon.fails(&["apply", "all.toml"]);
    assert_eq!(code, 1);
    assert!(complaint.contains("would lose data"), "{complaint}");
    let changed = FILE.replace("8M", "16M").replace("queues = 4", "queues = 2");
    write(&daemon, &changed);
    let (code, complaint) = daemon.fails(&["apply", "all.toml"]);
    assert_eq!(code, 1);
    assert!(complaint.contains("num_queues: 4 to be 2") && complaint.contains("--replace"), "{complaint}");
    daemon.ok(&["apply", "all.toml", "--replace"]);
    assert_eq!(daemon.json(&["controller", "list"])[1]["num_queues"], 2);
}

#[test]
fn what_failed_halfway_is_finished() {
    let daemon = Daemon::start();
    std::fs::create_dir(daemon.dir().join("vm1.img")).unwrap();
    write(&daemon, &FILE.replace("[[call]]", "[[disk]]\nname = \"n\"\nnull = true\nsize = \"1M\"\n[[call]]"));
    let (code, complaint) = daemon.fails(&["apply", "all.toml"]);
    assert_eq!(code, 1);
    assert!(complaint.contains("+ disk vm1") && complaint.contains("run the same again"), "{complaint}");
    std::fs::remove_dir(daemon.dir().join("vm1.img")).unwrap();
    daemon.ok(&["apply", "all.toml"]);
    assert_eq!(names(&daemon).len(), 6);
    write(&daemon, "");
    daemon.ok(&["apply", "all.toml"]);
    assert_eq!(names(&daemon).len(), 6, "what is not in the file stays");
    assert!(daemon.ok(&["apply", "all.toml", "--prune"]).contains("Done: 7."), "six, and the group");
    assert!(names(&daemon).is_empty());
    assert!(daemon.dir().join("vm1.img").is_file());
}

#[test]
fn what_the_daemon_lacks_is_left_out_aloud() {
    let daemon = Daemon::start();
    write(
        &daemon,
        r#"{"subsystems": [{"subsystem": "bdev", "config": [
            {"method": "bdev_nvme_frobnicate", "params": {"x": 1}},
            {"method": "bdev_null_create", "params": {"name": "n", "num_blocks": 8, "block_size": 512}},
            {"method": "bdev_wait_for_examine"}]}]}"#,
    );
    let outcome = daemon.run(&["apply", "all.toml"]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(outcome.stderr.contains("no method bdev_nvme_frobnicate"), "{outcome:?}");
    assert_eq!(names(&daemon), ["n"]);
    let (code, complaint) = daemon.fails(&["apply", "nowhere.toml"]);
    assert_eq!(code, 1);
    assert!(complaint.contains("cannot read nowhere.toml"), "{complaint}");
}
