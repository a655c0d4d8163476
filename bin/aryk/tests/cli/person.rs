//! Command lines of a person: valid ones, mistyped ones, and their output.

use crate::harness::{Daemon, outcome};
use serde_json::Value;
use std::process::{Command, Stdio};

#[test]
fn hints_fit_the_command() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--null", "--size", "1M"]);
    let cases: [(&[&str], &str, &str); 10] = [
        (&["disk", "show", "x"], "aryk disk list", "controller list"),
        (&["attach", "x"], "aryk disk list", "controller list"),
        (&["detach", "x"], "aryk controller list", "disk list"),
        (&["disk", "create", "d", "--null", "--size", "1M"], "another name", "controller list"),
        (&["latency", "x"], "aryk disk list", "controller list"),
        (&["disk", "stat", "x"], "aryk disk list", "controller list"),
        (&["qos", "set", "x", "--iops", "5"], "aryk disk list", "controller list"),
        (&["reactor", "remove", "77"], "aryk reactor list", "disk list"),
        (&["rpc", "no_such_method"], "rpc_get_methods", "--size"),
        (&["rpc", "bdev_null_create", "{\"x\": 1}"], "aryk rpc METHOD --help", "disk list"),
    ];
    for (args, hint, not) in cases {
        let (code, stderr) = daemon.fails(args);
        assert!(code == 1 && stderr.contains(hint) && !stderr.contains(not), "{args:?}: {stderr}");
    }
}

#[test]
fn sizes_are_exact_or_refused() {
    let daemon = Daemon::start();
    let bytes = |name: &str, size: &str| {
        let file = format!("{name}.img");
        let disk = daemon.json(&["disk", "create", name, "--file", &file, "--size", size]);
        disk["num_blocks"].as_u64().unwrap() * disk["block_size"].as_u64().unwrap()
    };
    assert_eq!(bytes("a", "10M"), 10 << 20);
    assert_eq!(bytes("b", "10MiB"), 10 << 20);
    assert_eq!(bytes("c", "1.5G"), 3 << 29);
    assert_eq!(bytes("d", "1GB"), 1_000_000_000);
    for (size, why) in [
        ("0", "the size is 0"),
        ("1000", "512 or 1024 is"),
        ("0.1G", "whole number of bytes"),
        ("10X", "20GB"),
    ] {
        let (code, stderr) = daemon.fails(&["disk", "create", "no", "--file", "no.img", "--size", size]);
        assert!(code == 2 && stderr.contains(why), "{size}: {stderr}");
    }
    assert!(!daemon.dir().join("no.img").exists());
    assert_eq!(daemon.fails(&["disk", "resize", "a", "0"]).0, 2);
}

#[test]
fn errors_are_json_with_json() {
    let daemon = Daemon::start();
    let cases: [(&[&str], i64); 4] = [
        (&["--json", "disk", "show", "x"], 1),
        (&["disk", "remove", "x", "--json"], 1),
        (&["--json", "disk", "create"], 2),
        (&["--json", "-s", "/nonexistent", "status"], 3),
    ];
    for (args, code) in cases {
        let outcome = daemon.run(args);
        let reported: Value =
            serde_json::from_str(&outcome.stderr).unwrap_or_else(|e| panic!("{e}: {outcome:?}"));
        assert_eq!(reported["error"]["exit_code"], code, "{reported}");
        assert!(!reported["error"]["message"].as_str().unwrap().is_empty(), "{reported}");
        assert_eq!((i64::from(outcome.code), &*outcome.stdout), (code, ""));
    }
}

#[test]
fn methods_have_help() {
    let daemon = Daemon::start();
    let help = daemon.ok(&["rpc", "bdev_null_create", "--help"]);
    for part in ["PARAMETER", "num_blocks", "yes", "Example:", "aryk rpc bdev_null_create '{"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    // The example works as printed.
    let example = help.lines().last().unwrap().trim();
    let made = Command::new("sh")
        .args(["-c", example])
        .env("ARYK_SOCKET", daemon.dir().join("rpc.sock"))
        .env("PATH", daemon.path())
        .status()
        .unwrap();
    assert!(made.success(), "{example}");
    assert!(daemon.ok(&["rpc", "--help"]).contains("Call any JSON-RPC method"));
    assert_eq!(daemon.json(&["rpc", "spdk_get_version", "-h"])["name"], "spdk_get_version");
    let (_, stderr) = daemon.fails(&["rpc", "bdev_nul_create", "--help"]);
    assert!(stderr.contains("rpc_get_methods"), "{stderr}");
    assert_eq!(daemon.fails(&["rpc"]).0, 2);
}

#[test]
fn a_trace_of_an_unknown_name_is_refused() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--null", "--size", "1M"]);
    assert!(daemon.ok(&["trace", "d"]).contains("There are no events yet"));
    let (code, stderr) = daemon.fails(&["trace", "nodisk"]);
    assert!(code == 1 && stderr.contains("'nodisk'") && stderr.contains("aryk disk list"), "{stderr}");
}

#[test]
fn top_without_a_terminal_prints_once() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--null", "--size", "1M"]);
    let text = daemon.ok(&["top", "--every", "0.1"]);
    let headings: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(headings, ["DISK", "d", "CONTROLLER", "CORE", "0"], "{text}");
    let all = daemon.json(&["top", "--every", "0.1"]);
    assert_eq!(all["per_second"]["disks"][0]["name"], "d");
    assert!(all["per_second"]["reactors"][0]["asleep_percent"].is_u64(), "{all}");
    let text = daemon.ok(&["top", "reactors", "--every", "0.1"]);
    assert!(text.trim_start().starts_with("CORE") && text.lines().count() == 2, "{text}");
}

#[test]
fn a_list_has_paths_and_users() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--file", "d.img", "--size", "1G"]);
    daemon.ok(&["disk", "create", "m", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    daemon.ok(&["rpc", "bdev_passthru_create", r#"{"name": "p", "base_bdev_name": "m"}"#]);
    std::fs::write(daemon.dir().join("d.img"), vec![1; 1 << 20]).unwrap();
    let list = daemon.json(&["disk", "list"]);
    assert_eq!(list[0]["path"], daemon.dir().join("d.img").to_str().unwrap());
    let allocated = list[0]["allocated_bytes"].as_u64().unwrap();
    assert!((1 << 20..1 << 22).contains(&allocated), "{allocated}");
    assert_eq!((&list[0]["used_by"][0], &list[1]["used_by"][0]), (&Value::from("d"), &Value::from("disk p")));
    assert_eq!(list[1]["allocated_bytes"], Value::Null);
    let text = daemon.ok(&["disk", "list"]);
    assert!(text.starts_with("NAME") && text.contains("ON DISK") && text.contains("USED BY"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let status = daemon.json(&["status"]);
    assert!(status["uptime_seconds"].as_u64().unwrap() < 600, "{status}");
    assert!(daemon.ok(&["status"]).lines().any(|line| line.starts_with("up ") && line.ends_with(" s")));
}

#[test]
fn logs_finds_the_log_file() {
    let daemon = Daemon::start();
    let (code, stderr) = daemon.fails(&["logs"]);
    assert!(code == 1 && stderr.contains("/dev/null"), "{stderr}");
    let daemon = Daemon::start_logging();
    daemon.ok(&["disk", "create", "d", "--null", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    daemon.ok(&["bench", daemon.dir().join("vhost/d").to_str().unwrap(), "--requests", "10"]);
    // The log's thread writes lines with a delay.
    let reported = (0..500).any(|_| {
        std::thread::park_timeout(std::time::Duration::from_millis(20));
        daemon.ok(&["logs"]).contains("front-end connected")
    });
    assert!(reported, "{}", daemon.ok(&["logs"]));
    assert_eq!(daemon.ok(&["logs", "-n", "1"]).lines().count(), 1);
}

#[test]
fn the_log_reports_the_number_of_dropped_failures() {
    let daemon = Daemon::start_logging();
    daemon.ok(&["disk", "create", "d", "--file", "d.img", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    // From here on the store fails each read.
    std::fs::File::create(daemon.dir().join("d.img")).unwrap();
    daemon.run(&["bench", daemon.dir().join("vhost/d").to_str().unwrap(), "--requests", "100"]);
    let log = || std::fs::read_to_string(daemon.dir().join("log")).unwrap();
    let is_reported = |line: &str| {
        line.contains("disk=\"d\"") && line.contains("left_out=") && line.contains("so many more requests")
    };
    let reported = (0..1_500).any(|_| {
        std::thread::park_timeout(std::time::Duration::from_millis(20));
        log().lines().any(is_reported)
    });
    assert!(reported, "{}", log());
}

/// Completions wait half a second for the daemon, and then have no names: on a busy computer the first attempts may find none.
const ATTEMPTS: u32 = 5;

/// The completions of this line.
fn offered(daemon: &Daemon, line: &[&str]) -> Vec<String> {
    let attempt = || {
        let mut command = daemon.aryk(&[]);
        command.arg("--").args(line).env("COMPLETE", "bash").env("_CLAP_IFS", "\n");
        command.env("_CLAP_COMPLETE_INDEX", (line.len() - 1).to_string());
        let outcome = outcome(&mut command);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        outcome.stdout.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    (0..ATTEMPTS).map(|_| attempt()).find(|found| !found.is_empty()).unwrap_or_default()
}

#[test]
fn shells_complete_names() {
    let daemon = Daemon::start();
    for disk in ["vm1", "vm2", "data", "0000:3d:00.1", "0000:3d:00.2"] {
        daemon.ok(&["disk", "create", disk, "--null", "--size", "1M"]);
    }
    daemon.ok(&["attach", "data", "--controller", "c7"]);
    assert_eq!(offered(&daemon, &["aryk", "disk", "show", "vm"]), ["vm1", "vm2"]);
    assert_eq!(offered(&daemon, &["aryk", "detach", "c"]), ["c7"]);
    assert_eq!(offered(&daemon, &["aryk", "rpc", "bdev_null_c"]), ["bdev_null_create"]);
    assert!(offered(&daemon, &["aryk", "disk", "cr"]).contains(&"create".to_owned()));
    let socket = daemon.dir().join("none.sock");
    assert!(offered(&daemon, &["aryk", "-s", socket.to_str().unwrap(), "disk", "show", "vm"]).is_empty());
    // bash accepts the script, and it calls this program.
    assert_eq!(in_bash(&daemon, "aryk disk show vm", "aryk disk show vm"), "vm1\nvm2\n");
    // It splits words at colons, and replaces only the part after the last one.
    let colons = "aryk disk remove vm1 0000 : 3d : 00";
    assert_eq!(in_bash(&daemon, "aryk disk remove vm1 0000:3d:00", colons), "00.1\n00.2\n");
    let next = "aryk disk remove 0000 : 3d : 00.1 vm";
    assert_eq!(in_bash(&daemon, "aryk disk remove 0000:3d:00.1 vm", next), "vm1\nvm2\n");
}

/// The completions of this line, which bash has split into words.
fn in_bash(daemon: &Daemon, line: &str, words: &str) -> String {
    let script = format!(
        "source <(aryk completions bash); COMP_LINE='{line}' COMP_WORDS=({words}) COMP_TYPE=9; \
         COMP_POINT=${{#COMP_LINE}} COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
         set -- $(complete -p aryk | sed 's/.*-F //'); \
         $1 $2 \"${{COMP_WORDS[@]: -1}}\" \"${{COMP_WORDS[@]: -2:1}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    );
    let attempt = || {
        let bash = Command::new("bash")
            .args(["-c", &script])
            .env("ARYK_SOCKET", daemon.dir().join("rpc.sock"))
            .env("PATH", daemon.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(bash.stderr.is_empty(), "{bash:?}");
        String::from_utf8_lossy(&bash.stdout).into_owned()
    };
    (0..ATTEMPTS).map(|_| attempt()).find(|found| !found.trim().is_empty()).unwrap_or_default()
}

#[test]
fn calls_without_effect_give_a_note() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--null", "--size", "1M"]);
    daemon.ok(&["attach", "d"]);
    let signals = r#"{"ctrlr": "d", "delay_base_us": 20, "iops_threshold": 1000}"#;
    let reported = daemon.run(&["rpc", "vhost_controller_set_coalescing", signals]);
    assert_eq!((reported.code, reported.stdout.trim()), (0, "true"));
    assert!(reported.stderr.contains("They are not delayed"), "{reported:?}");
    let reported = daemon.run(&["rpc", "accel_set_options", r#"{"task_count": 8}"#]);
    assert!(reported.stderr.contains("does nothing"), "{reported:?}");
    assert_eq!(daemon.run(&["rpc", "bdev_get_bdevs"]).stderr, "");
}
