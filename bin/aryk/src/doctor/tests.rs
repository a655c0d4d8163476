//! Tests of the checks with simulated hosts.

use super::*;
use std::io;

fn denied<T>() -> io::Result<T> {
    Err(io::ErrorKind::PermissionDenied.into())
}

#[track_caller]
pub(super) fn expect(check: &Check, state: State, found: &str, fix: &str) {
    assert_eq!(check.state, state, "{check:?}");
    assert!(check.found.contains(found), "{check:?}");
    assert!(check.fix.as_deref().unwrap_or_default().contains(fix), "{check:?}");
    assert_eq!(check.brings.is_some(), state != State::Ok, "{check:?}");
}

#[test]
fn io_uring() {
    use kernel::io_uring_of as of;
    expect(&of(Ok(()), Some(0), "6.1"), State::Ok, "works, Linux 6.1", "");
    expect(&of(Ok(()), None, "5.15"), State::Ok, "works", "");
    expect(&of(Ok(()), Some(1), "6.6"), State::Worse, "this user only", "io_uring_disabled=0");
    expect(&of(denied(), Some(2), "6.6"), State::Worse, "io_uring_disabled = 2", "sysctl");
    expect(&of(denied(), Some(0), "6.6"), State::Worse, "seccomp", "allow io_uring_setup");
    expect(&of(Err(io::ErrorKind::Unsupported.into()), None, "5.4"), State::Worse, "not in this", "CONFIG");
}

#[test]
fn aio_memlock_hugepages() {
    expect(&kernel::aio_of(true, Some(3), Some(65536)), State::Ok, "3 of fs.aio-max-nr = 65536", "");
    expect(&kernel::aio_of(false, Some(65536), Some(65536)), State::Worse, "", "fs.aio-max-nr=1048576");
    expect(&kernel::aio_of(false, None, Some(1 << 20)), State::Worse, "?", "fs.aio-max-nr=2097152");
    expect(&kernel::memlock_of(None, None), State::Ok, "no limit", "");
    expect(&kernel::memlock_of(Some(65536), Some((5, 10))), State::Worse, "64K", "ulimit -l");
    expect(&kernel::memlock_of(Some(65536), Some((6, 1))), State::Ok, "64K", "");
    assert_eq!(kernel::version("6.18.44-fc"), Some((6, 18)));
    assert_eq!(kernel::version("strange"), None);
    let some = "HugePages_Total:     64\nHugePages_Free:      60\nHugepagesize:       2048 kB\n";
    expect(&kernel::hugepages_of(some, ""), State::Ok, "60 of 64 free, of 2M each", "");
    expect(&kernel::hugepages_of("", ""), State::Option, "none", "nr_hugepages");
}

#[test]
fn configured_objects() {
    let mut absent = serde_json::json!({"kind": "disk", "name": "a", "object": "disk 'a'", "why": "No such file",
        "params": {"filename": "/nonexistent/a.img"}, "tried_since": 5});
    let of = configured::absent_of;
    expect(&of(&absent), State::Missing, "disk 'a': No such file; retried: for ", "put /nonexistent/a.img");
    expect(&of(&absent), State::Missing, "", "aryk disk remove a");
    absent["kind"] = "controller".into();
    absent["params"] = serde_json::json!({"ctrlr": "a"});
    expect(
        &of(&absent),
        State::Missing,
        "",
        "correct that, and the daemon creates it by itself; or forget it: aryk detach a",
    );
    absent["tried_since"] = serde_json::Value::Null;
    expect(&of(&absent), State::Missing, "retried: no", "create the object that it waits for");
    let deleted = configured::deleted_of(&absent, "/d/a b", std::path::Path::new("/proc/7/fd/9"));
    expect(&deleted, State::Missing, "/d/a b, is deleted", "VM down; cp ");
    let copy = "cp --sparse=always --preserve=mode,ownership /proc/7/fd/9";
    expect(&deleted, State::Missing, "", &format!("{copy} '/d/a b'; then restart the daemon"));
    let other = configured::deleted_of(&absent, "/proc/self/exe", std::path::Path::new("/proc/7/fd/9"));
    expect(
        &other,
        State::Missing,
        "",
        &format!("another file is there, so copy beside it: {copy} /proc/self/exe.rescued"),
    );
    let in_file = serde_json::json!({"name": "f", "driver_specific": {"uring": {"filename": "/f"}}});
    let unknown = configured::deleted(&[in_file], &crate::deleted::Deleted::default());
    expect(&unknown[0], State::Worse, "deleted files: not known, run as root", "sudo");
    assert!(configured::deleted(&[absent], &crate::deleted::Deleted::default()).is_empty());
    let failing = |errno: i32, error: &str| {
        let last = serde_json::json!({"op": "write", "errno": errno, "error": error, "time": 5});
        configured::failing_of(&serde_json::json!({"name": "f", "last_error": last})).unwrap()
    };
    expect(&failing(28, "No space"), State::Worse, "disk 'f' failed a write ", "make room");
    expect(&failing(5, "I/O error"), State::Worse, "ago: I/O error", "dmesg");
    assert!(configured::failing_of(&serde_json::json!({"name": "f"})).is_none());
    let emptied = configured::emptied_of(&serde_json::json!({"name": "m"}));
    expect(&emptied, State::Worse, "disk 'm' is in memory, and empty", "--file");
    expect(&emptied, State::Worse, "", "'aryk disk remove m --force'");
}

#[test]
fn a_refused_call_is_not_reported_as_ok() {
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let daemon = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let requests = serde_json::Deserializer::from_reader(&stream).into_iter::<serde_json::Value>();
        for request in requests.map_while(Result::ok) {
            let answer = match request["method"].as_str().unwrap() {
                "bdev_get_bdevs" => {
                    serde_json::json!([{"name": "m", "driver_specific": {"malloc": {"emptied": true}}}])
                }
                _ => serde_json::Value::Null,
            };
            let mut reply = serde_json::json!({"id": request["id"], "result": answer});
            if answer.is_null() {
                reply = serde_json::json!({"id": request["id"], "error": {"code": -13, "message": "Permission denied"}});
            }
            io::Write::write_all(&mut &stream, reply.to_string().as_bytes()).unwrap();
        }
    });
    let checks = configured::configured(&path, std::time::Duration::from_secs(5));
    daemon.join().unwrap();
    let names: Vec<_> = checks.iter().map(|check| (check.check, check.state)).collect();
    let unknown = ("daemon", State::Worse);
    assert_eq!(names, [unknown, unknown, ("disk in memory", State::Worse)]);
    expect(
        &checks[0],
        State::Worse,
        "the state of the configured objects is not fully known: Permission denied",
        "",
    );
}

#[test]
fn limits_and_cores() {
    expect(&host::open_files_of(None), State::Ok, "no limit", "");
    expect(&host::open_files_of(Some(24_000)), State::Ok, "about 1000 VMs", "");
    expect(&host::open_files_of(Some(1024)), State::Worse, "about 42", "ulimit -n");
    expect(&host::open_files_of(Some(100)), State::Missing, "100", "LimitNOFILE");
    let max = Some("max 100000");
    expect(&host::cores_of(&[0, 1, 2, 3, 6], "0-7", max), State::Ok, "0-3,6 of those online, 0-7", "");
    expect(&host::cores_of(&[5], "0-7", None), State::Option, "5 of", "AllowedCPUs");
    expect(&host::cores_of(&[0, 1], "0-1", Some("50000 100000\n")), State::Worse, "50%", "cpu.max");
    expect(&host::cores_of(&[0, 1], "0-1", Some("300000 100000\n")), State::Ok, "0-1", "");
}

#[test]
fn virtualization() {
    expect(&vms::kvm_of(Ok(())), State::Ok, "/dev/kvm", "");
    expect(&vms::kvm_of(denied()), State::Option, "denied", "usermod -aG kvm");
    expect(&vms::kvm_of(Err(io::ErrorKind::NotFound.into())), State::Option, "no /dev/kvm", "modprobe");
    let version_text = |version: &str| Some(format!("QEMU emulator version {version} (Debian)"));
    expect(&vms::qemu_of("q", version_text("7.2.22")), State::Ok, "7.2.22", "");
    expect(&vms::qemu_of("q", version_text("4.2.1")), State::Option, "4.2.1", "num-queues");
    expect(&vms::qemu_of("q", None), State::Option, "no q in PATH", "apt-get install qemu-system");
    expect(&vms::vfio_of(true, 12), State::Ok, "12", "");
    expect(&vms::vfio_of(true, 0), State::Option, "no IOMMU", "iommu=on");
    expect(&vms::vfio_of(false, 3), State::Option, "/dev/vfio", "modprobe");
}

#[test]
fn the_report_fits_80_columns() {
    let checks = [
        Check::ok("daemon", "x".repeat(100)),
        kernel::io_uring_of(denied(), Some(0), "6.6"),
        host::open_files_of(Some(1)),
    ];
    let text = text(&checks, &Output::plain());
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(text.contains("MISSING") && !text.contains("Nothing necessary"), "{text}");
}
