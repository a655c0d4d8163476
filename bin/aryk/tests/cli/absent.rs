//! What is configured and not there, and must neither be replaced nor left out.

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

/// A daemon that waits for a.img, which has another name.
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
        let (code, complaint) = daemon.fails(args);
        assert_eq!(code, 1);
        for part in
            ["disk 'a': ", "No such file", "Put its file back", "bdev_uring_delete '{\"name\":\"a\"}'"]
        {
            assert!(complaint.contains(part), "{args:?} without {part}: {complaint}");
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
    daemon.ok(&["rpc", "bdev_uring_delete", r#"{"name": "a"}"#]);
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
fn an_export_has_what_is_absent() {
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
