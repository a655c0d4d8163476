//! `--allow-dir`: the daemon cannot open other files, and all else works.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code, run_in};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const EACCES: i64 = -13;

fn create(daemon: &Daemon, file: &Path, params: Value) -> Result<Value, Value> {
    let mut all = json!({"name": "d", "filename": file});
    all.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
    daemon.call("bdev_uring_create", all)
}

#[test]
fn disks_are_opened_in_allowed_directories_only() {
    let (disks, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (inside, outside) = (disks.path().join("d.img"), elsewhere.path().join("d.img"));
    fs::write(&outside, [0; 4096]).unwrap();
    let link = disks.path().join("link");
    std::os::unix::fs::symlink(&outside, &link).unwrap();
    for engine in ["auto", "epoll"] {
        let allowed = disks.path().to_str().unwrap();
        let flags = ["--io-engine", engine, "--state-dir", "DIR/state", "--allow-dir", allowed];
        let mut daemon = Daemon::start_in(TempDir::new().unwrap(), &flags);
        for wrong in [&outside, &link, &elsewhere.path().join("new.img")] {
            for params in [json!({"size": 1 << 20}), json!({"size": 1 << 20, "readonly": true})] {
                let printed = create(&daemon, wrong, params).unwrap_err();
                let data = printed["data"].as_str().unwrap_or_default().to_owned();
                if printed["code"] == EACCES {
                    assert!(data.contains(allowed) && data.contains("--allow-dir"), "{data}");
                } else {
                    assert!(!wrong.exists(), "{wrong:?}: {printed}");
                }
            }
        }
        assert_eq!(code(create(&daemon, &outside, json!({}))), EACCES);
        // Nor files beside its sockets, as in /var/tmp, the default directory of the RPC socket.
        for beside in [daemon.dir().join("d.img"), daemon.dir().join("vhost/d.img")] {
            fs::write(&beside, [0; 4096]).unwrap();
            assert_eq!(code(create(&daemon, &beside, json!({}))), EACCES, "{beside:?}");
            fs::remove_file(&beside).unwrap();
            create(&daemon, &beside, json!({"size": 1 << 20})).unwrap_err();
            assert!(!beside.exists(), "{beside:?}");
        }
        create(&daemon, &inside, json!({"size": 1 << 20})).unwrap();
        // A group by name: the C library reads its files.
        let group = rustix::process::getgid().as_raw();
        let group = fs::read_to_string("/etc/group").unwrap().lines().find_map(|line| {
            let fields: Vec<_> = line.split(':').collect();
            (fields[2] == group.to_string()).then(|| fields[0].to_owned())
        });
        daemon.aryk(&["attach", "d", "--socket-group", &group.unwrap()]).unwrap();
        daemon.kill_and_restart();
        let mut vm = FrontEnd::connect(&daemon.dir().join("vhost/d"));
        vm.write(512, &[7; 512]).unwrap();
        assert_eq!(vm.read(512, 512).unwrap(), [7; 512]);
        daemon.aryk(&["disk", "resize", "d", "2M"]).unwrap();
        drop(vm);
        assert_eq!(daemon.signal_and_wait("TERM", std::time::Duration::from_secs(20)), Some(0));
        fs::remove_file(&inside).unwrap();
    }
}

#[test]
fn a_missing_allowed_directory_is_an_error() {
    let dir = TempDir::new().unwrap();
    let ended = run_in(dir.path(), &["--allow-dir", "/no/such/dir"]);
    assert_eq!(ended.status.code(), Some(1));
    let printed = String::from_utf8_lossy(&ended.stderr);
    assert!(printed.contains("--allow-dir /no/such/dir"), "{printed}");
}
