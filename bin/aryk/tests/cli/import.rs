//! `aryk disk create --from`.

use crate::harness::Daemon;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn has_qemu_img() -> bool {
    Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_ok_and(|s| s.success())
}

#[test]
fn raw_and_qcow2_become_disks() {
    let daemon = Daemon::start();
    let mut data = vec![0_u8; 3 << 20];
    data[1 << 20..][..4096].fill(0xa5);
    std::fs::write(daemon.dir().join("raw"), &data).unwrap();
    let create = |name: &str, image: &str, more: &[&str]| {
        let file = format!("{name}.img");
        daemon.run(&[&["disk", "create", name, "--file", &file, "--from", image], more].concat())
    };
    let made = create("r", "raw", &["--size", "4M"]);
    assert_eq!(made.code, 0, "{made:?}");
    assert!(made.stdout.contains("Disk 'r' of 4M is ready"), "{made:?}");
    let same = |name: &str| std::fs::read(daemon.dir().join(name)).unwrap()[..3 << 20] == data;
    assert!(same("r.img"));
    assert_eq!(daemon.dir().join("r.img").metadata().unwrap().mode() & 0o777, 0o600);
    if !has_qemu_img() {
        std::fs::write(daemon.dir().join("q"), b"QFI\xfb").unwrap();
        assert!(create("q", "q", &[]).stderr.contains("apt-get install qemu-utils"));
        return;
    }
    let convert = ["convert", "-f", "raw", "-O", "qcow2", "raw", "qcow2"];
    assert!(Command::new("qemu-img").args(convert).current_dir(daemon.dir()).status().unwrap().success());
    assert_eq!(create("q", "qcow2", &[]).code, 0);
    assert!(same("q.img"));
    assert_eq!(daemon.json(&["disk", "show", "q"])["num_blocks"], 6144);
    // With the format `raw`, an image is copied as it is.
    assert_eq!(create("as-it-is", "qcow2", &["--from-format", "raw"]).code, 0);
    let head = std::fs::read(daemon.dir().join("as-it-is.img")).unwrap();
    assert!(head.starts_with(b"QFI\xfb"));
    let taken = create("r", "raw", &[]);
    assert!(taken.code == 1 && taken.stderr.contains("there is a disk 'r' already"), "{taken:?}");
    let exists = create("r2", "raw", &[]);
    assert_eq!(exists.code, 0);
    let exists = daemon.run(&["disk", "create", "r3", "--file", "r2.img", "--from", "raw"]);
    assert!(exists.code == 1 && exists.stderr.contains("omit --from"), "{exists:?}");
}

#[test]
fn a_killed_import_leaves_no_partial_file() {
    let daemon = Daemon::start();
    let image = daemon.dir().join("big");
    std::fs::write(&image, vec![0x5a_u8; 192 << 20]).unwrap();
    let args = ["disk", "create", "b", "--file", "b.img", "--from", "big"];
    let (draft, target) = (daemon.dir().join(".b.img.importing"), daemon.dir().join("b.img"));
    let has_begun = |path: &Path| path.metadata().is_ok_and(|m| m.len() > 1 << 20);
    // Where this thread has to wait for a processor, the import may be over before it is killed.
    let is_killed = (0..20).any(|_| {
        let mut child = daemon.aryk(&args).stdout(Stdio::null()).spawn().unwrap();
        while !has_begun(&draft) && child.try_wait().unwrap().is_none() {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        if target.exists() {
            daemon.run(&["disk", "remove", "b"]);
            std::fs::remove_file(&target).unwrap();
            return false;
        }
        true
    });
    assert!(is_killed, "it is too fast to be killed");
    assert!(draft.metadata().unwrap().mode() & 0o777 == 0o600);
    daemon.ok(&args);
    assert!(!draft.exists());
    assert!(std::fs::read(&target).unwrap() == std::fs::read(&image).unwrap(), "they differ");
}
