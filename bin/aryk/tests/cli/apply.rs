//! `aryk apply` and `aryk export` against a daemon.

use crate::harness::Daemon;
use serde_json::{Value, json};

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
fn a_second_apply_does_nothing() {
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
fn an_export_creates_the_same_in_another_daemon() {
    let (daemon, other) = (Daemon::start(), Daemon::start());
    write(&daemon, FILE);
    daemon.ok(&["apply", "all.toml"]);
    for flag in [&[][..], &["--json"]] {
        let text = daemon.ok(&[flag, &["export"]].concat());
        write(&other, &text);
        std::fs::write(daemon.dir().join("again"), &text).unwrap();
        assert!(daemon.ok(&["apply", "again", "--prune"]).contains("Nothing to do"), "{text}");
    }
    // Only one daemon can open the file.
    daemon.ok(&["detach", "vm1"]);
    daemon.ok(&["disk", "remove", "vm1"]);
    other.ok(&["apply", "all.toml"]);
    assert_eq!(names(&other), ["vm1", "scratch", "front", "c2", "vm1"]);
    let spdk = other.ok(&["rpc", "save_config"]);
    write(&other, &spdk);
    assert!(other.ok(&["apply", "all.toml", "--prune"]).contains("Nothing to do"), "{spdk}");
}

#[test]
fn changes_are_made_in_place_or_need_replace() {
    let daemon = Daemon::start();
    write(&daemon, FILE);
    daemon.ok(&["apply", "all.toml"]);
    write(&daemon, &FILE.replace("8M", "16M"));
    assert!(daemon.ok(&["apply", "all.toml"]).contains("from 8M to 16M"));
    assert_eq!(daemon.json(&["disk", "show", "vm1"])["num_blocks"], 32768);
    write(&daemon, FILE);
    let (code, stderr) = daemon.fails(&["apply", "all.toml"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("would lose data"), "{stderr}");
    let changed = FILE.replace("8M", "16M").replace("queues = 4", "queues = 2");
    write(&daemon, &changed);
    let (code, stderr) = daemon.fails(&["apply", "all.toml"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("num_queues: 4 to be 2") && stderr.contains("--replace"), "{stderr}");
    daemon.ok(&["apply", "all.toml", "--replace"]);
    assert_eq!(daemon.json(&["controller", "list"])[1]["num_queues"], 2);
}

#[test]
fn a_recreated_disk_keeps_its_uuid_and_needs_its_size() {
    let daemon = Daemon::start();
    write(&daemon, FILE);
    daemon.ok(&["apply", "all.toml"]);
    let uuids =
        || ["vm1", "scratch", "front"].map(|disk| daemon.json(&["disk", "show", disk])["uuid"].clone());
    let before = uuids();
    write(
        &daemon,
        &FILE.replace("block_size = 4096", "").replace("size = \"8M\"", "size = \"8M\"\nenospc = \"hold\""),
    );
    daemon.ok(&["apply", "all.toml", "--replace"]);
    assert_eq!(uuids(), before);
    assert_eq!(daemon.json(&["disk", "show", "scratch"])["block_size"], 512);
    daemon.ok(&["disk", "resize", "vm1", "16M"]);
    write(&daemon, FILE);
    let (code, stderr) = daemon.fails(&["apply", "all.toml", "--replace"]);
    assert!(code == 1 && stderr.contains("vm1.img has 16M, not 8M: resize"), "{stderr}");
    assert_eq!(names(&daemon).len(), 5, "the error comes before any removal");
}

#[test]
fn an_spdk_file_with_bdev_examine_is_applied() {
    let daemon = Daemon::start();
    write(
        &daemon,
        r#"{"subsystems": [{"subsystem": "bdev", "config": [
            {"method": "bdev_set_options", "params": {"bdev_auto_examine": false}},
            {"method": "bdev_examine", "params": {"name": "n"}},
            {"method": "bdev_null_create", "params": {"name": "n", "num_blocks": 8, "block_size": 512}}]}]}"#,
    );
    let done = daemon.run(&["apply", "all.toml"]);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stderr.contains("without effect here: bdev_examine, bdev_set_options"), "{done:?}");
    assert_eq!(names(&daemon), ["n"]);
}

#[test]
fn a_plan_that_failed_halfway_is_finished_by_the_next_run() {
    let daemon = Daemon::start();
    std::fs::create_dir(daemon.dir().join("vm1.img")).unwrap();
    write(&daemon, &FILE.replace("[[call]]", "[[disk]]\nname = \"n\"\nnull = true\nsize = \"1M\"\n[[call]]"));
    let (code, stderr) = daemon.fails(&["apply", "all.toml"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("+ disk vm1") && stderr.contains("run the same command again"), "{stderr}");
    std::fs::remove_dir(daemon.dir().join("vm1.img")).unwrap();
    daemon.ok(&["apply", "all.toml"]);
    assert_eq!(names(&daemon).len(), 6);
    write(&daemon, "");
    daemon.ok(&["apply", "all.toml"]);
    assert_eq!(names(&daemon).len(), 6, "objects outside of the file stay");
    assert!(daemon.ok(&["apply", "all.toml", "--prune"]).contains("Done: 7."), "six, and the group");
    assert!(names(&daemon).is_empty());
    assert!(daemon.dir().join("vm1.img").is_file());
}

#[test]
fn methods_that_the_daemon_lacks_are_skipped_with_a_warning() {
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
    let (code, stderr) = daemon.fails(&["apply", "nowhere.toml"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("cannot read nowhere.toml"), "{stderr}");
}

/// A file saved by SPDK, with `DIR` for a directory and `CORES` for the reactors' cores.
const SPDK: &str = include_str!("../../../../crates/rpc/tests/compat/spdk-config.json");

/// That file, adapted to this daemon.
fn spdk(daemon: &Daemon) -> String {
    for file in ["a0", "a1", "u0", "u1"] {
        std::fs::write(daemon.dir().join(file), [0; 8192]).unwrap();
    }
    SPDK.replace("DIR", daemon.dir().to_str().unwrap())
        .replace("CORES", &format!("{:x}", 1_u64 << core(daemon)))
}

fn core(daemon: &Daemon) -> u64 {
    daemon.json(&["rpc", "framework_get_reactors"])["reactors"][0]["lcore"].as_u64().unwrap()
}

#[test]
fn a_second_apply_of_an_spdk_file_does_nothing() {
    let daemon = Daemon::start();
    let file = spdk(&daemon);
    write(&daemon, &file);
    let done = daemon.run(&["apply", "all.toml"]);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(
        done.stderr.contains("without effect here: ") && done.stderr.contains("sock_impl_set_options"),
        "{done:?}"
    );
    let all = "A0 A1 D0 EE_M3 M0 M1 M2 M2p0 M2p1 M3 N0 N1 N2 PT0 U0 U1 vblk.0 vblk.1 vblk.2 vscsi.0 vscsi.1";
    let mut there = names(&daemon);
    there.sort();
    assert_eq!(there.join(" "), all);
    let targets = daemon.json(&["rpc", "scsi_get_devices"]);
    assert_eq!(targets.as_array().unwrap().len(), 3, "{targets}");

    let core = core(&daemon);
    let cpumask = format!("\"cpumask\": \"{:x}\"", 1_u64 << core);
    assert!(file.contains(&cpumask));
    let otherwise = [
        file.clone(),
        file.replace(&cpumask, &format!("\"cpumask\": \"{:#x}\"", 1_u64 << core)),
        file.replace(&cpumask, &format!("\"cpumask\": \"[{core}]\"")),
        file.replace("\"delay\": true", "\"delay\": false"),
        file.replace("\"numa_id\": -1", "\"numa_id\": 0"),
        file.replace("\"scsi_target_num\": 7", "\"scsi_target_num\": -1"),
        daemon.ok(&["export"]),
        daemon.ok(&["rpc", "save_config"]),
    ];
    for text in otherwise {
        write(&daemon, &text);
        assert!(daemon.ok(&["apply", "all.toml", "--plan"]).contains("Nothing to do"), "{text}");
        assert!(daemon.ok(&["apply", "all.toml", "--prune"]).contains("Nothing to do"), "{text}");
    }
    write(&daemon, &file.replace("\"enable_ktls\": false", "\"enable_ktls\": true"));
    let (code, stderr) = daemon.fails(&["apply", "all.toml", "--plan"]);
    assert_eq!(code, 1);
    assert!(stderr.contains("sock_impl_set_options: ") && stderr.contains("remove it"), "{stderr}");
    let less = file.replace("\"split_count\": 2", "\"split_count\": 1");
    write(&daemon, &less);
    let shown = daemon.run(&["apply", "all.toml", "--plan"]).stdout;
    assert!(shown.contains("! disk 'M2p0': split_count: 2 to be 1"), "{shown}");
}

fn disk(name: &str, file: &str) -> String {
    format!("[[disk]]\nname = \"{name}\"\nfile = \"{file}\"\n")
}

fn controller(name: &str, disk: &str) -> String {
    format!("[[controller]]\nname = \"{name}\"\ndisk = \"{disk}\"\n")
}

fn call(method: &str, params: &str) -> String {
    format!("[[call]]\nmethod = \"{method}\"\nparams = {{ {params} }}\n")
}

fn on(name: &str, base: &str) -> String {
    call("bdev_passthru_create", &format!("name = \"{name}\", base_bdev_name = \"{base}\""))
}

fn target(owner: &str, disk: &str) -> String {
    let params = format!("ctrlr = \"{owner}\", scsi_target_num = 0, bdev_name = \"{disk}\"");
    call("vhost_scsi_controller_add_target", &params)
}

fn sized(name: &str, file: &str) -> String {
    disk(name, file) + "size = \"1M\"\n"
}

#[test]
fn a_plan_finds_steps_that_would_fail() {
    let daemon = Daemon::start();
    std::fs::write(daemon.dir().join("there.img"), [0; 8192]).unwrap();
    std::fs::hard_link(daemon.dir().join("there.img"), daemon.dir().join("link.img")).unwrap();
    daemon.ok(&["disk", "create", "old", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "old"]);
    let scsi = call("vhost_create_scsi_controller", "ctrlr = \"s\"");
    let there = disk("d", "there.img");
    let refused = [
        (controller("c", "nowhere"), "controller 'c': there is no disk 'nowhere'"),
        (controller("c", "p") + &on("p", "nowhere"), "controller 'c': disk 'p' waits for disk 'nowhere'"),
        (
            there.clone() + &disk("e", "link.img"),
            "link.img is the file of disk 'd' too: give each disk its own",
        ),
        (sized("d", "there.img"), "there.img has 8K, not 1M: resize the disk first, or omit size"),
        (
            sized("d", "new.img") + &sized("e", "new.img"),
            "is the file of disk 'd' too: give each disk its own",
        ),
        (
            there.clone() + &controller("a", "d") + &controller("b", "d"),
            "controller 'b': disk 'd' is in use by controller 'a'",
        ),
        (controller("b", "old"), "controller 'b': disk 'old' is in use by controller 'old'"),
        (disk("d", "none.img"), "disk 'd': there is no file"),
        (sized("d", "none/none.img"), "disk 'd': there is no directory"),
        (
            call("bdev_aio_create", "name = \"d\", filename = \"/no/file\", block_size = 512"),
            "disk 'd': there is no",
        ),
        (on("p", "old"), "disk 'p': disk 'old' is in use by controller 'old'"),
        (there.clone() + &on("p", "d") + &on("q", "d"), "disk 'q': disk 'd' is in use by disk 'p'"),
        (target("s", "old"), "target 's/0': there is no SCSI controller 's'"),
        (scsi.clone() + &target("s", "nowhere"), "target 's/0': there is no disk 'nowhere'"),
        (
            call("bdev_set_qos_limit", "name = \"x\", rw_ios_per_sec = 1000"),
            "limits of disk x: 1000 iops: there is no disk 'x'",
        ),
    ];
    for (text, why) in refused {
        write(&daemon, &text);
        for args in [&["apply", "all.toml", "--plan"][..], &["apply", "all.toml"]] {
            let (code, stderr) = daemon.fails(args);
            assert_eq!(code, 1, "{text}");
            assert!(stderr.contains(why), "{why}: {stderr}");
        }
        assert_eq!(names(&daemon), ["old", "old"], "{text}");
    }
}

#[test]
fn a_plan_accepts_steps_that_work() {
    let daemon = Daemon::start();
    std::fs::write(daemon.dir().join("there.img"), [0; 8192]).unwrap();
    let old = sized("old", "old.img") + &controller("old", "old");
    let readonly = |name: &str| disk(name, "there.img") + "readonly = true\n";
    let both = disk("d", "there.img")
        + &controller("a", "d")
        + "shared = true\n"
        + &controller("b", "d")
        + "shared = true\n";
    let scsi = call("vhost_create_scsi_controller", "ctrlr = \"s\"") + &target("s", "old");
    write(&daemon, &old);
    daemon.ok(&["apply", "all.toml"]);
    let fine = [readonly("d") + &readonly("e"), both, sized("d", "new.img"), scsi, on("p", "nowhere")];
    for text in fine {
        write(&daemon, &text);
        let shown = daemon.run(&["apply", "all.toml", "--plan"]);
        assert_eq!(shown.code, 2, "{text}: {shown:?}");
        daemon.ok(&["apply", "all.toml"]);
        write(&daemon, &old);
        daemon.ok(&["apply", "all.toml", "--prune"]);
    }
}

#[test]
fn scsi_controllers_are_removed_with_their_targets() {
    let daemon = Daemon::start();
    write(&daemon, &spdk(&daemon));
    daemon.ok(&["apply", "all.toml"]);
    write(&daemon, "");
    let gone = daemon.ok(&["apply", "all.toml", "--prune"]);
    assert!(gone.contains("- target vscsi.0/3") && gone.contains("- controller vscsi.0"), "{gone}");
    assert!(names(&daemon).is_empty());
    assert_eq!(daemon.json(&["rpc", "vhost_get_controllers"]), json!([]));
}
