//! Tests of a file's locks against QEMU's tools, other processes, and other disks of this process.

use super::harness::{Bench, MIB, disk_directory, resized, sparse};
use crate::locks::LockError;
use crate::{Config, Error, Holder, Lock, Size, create};
use aryk_bdev::{Bytes, Env, Status};
use aryk_reactor::Engine;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

fn read_only(path: &Path) -> Config {
    Config { read_only: true, ..Config::new("r", path) }
}

fn refused_by(config: Config) -> Holder {
    match create(&Env::default(), config) {
        Err(Error::Locked { holder, .. }) => holder,
        other => panic!("the file should be locked: {other:?}"),
    }
}

fn image(dir: &Path) -> std::path::PathBuf {
    let path = dir.join("image");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    path
}

/// The holder of the lock that refuses both a writer and a reader of an image.
fn both_refused_by(path: &Path) -> Holder {
    let [writer, reader] =
        [Config::new("w", path), read_only(path)].map(|config| refused_by(Config { waits: false, ..config }));
    assert_eq!(writer, reader);
    writer
}

/// Runs one of QEMU's tools; `None` if it is not installed.
fn qemu(tool: &str, args: &[&str], path: &Path) -> Option<Output> {
    let output = Command::new(tool).args(args).arg(path).output().ok();
    if output.is_none() {
        eprintln!("skipped: no {tool} here");
    }
    output
}

#[track_caller]
fn assert_refused(output: &Output) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("lock") && error.contains("Is another process using the image"), "{error}");
}

#[track_caller]
fn assert_works(output: &Output) {
    let all = format!("{output:?}");
    assert!(output.status.success() && output.stderr.is_empty(), "{all}");
}

#[test]
fn qemus_tools_refuse_a_disk_that_is_written() {
    let dir = disk_directory();
    let bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    let path = bench.path();
    let write = ["-f", "raw", "-c", "write 0 4k"];
    let Some(refused) = qemu("qemu-io", &write, &path) else { return };
    assert_refused(&refused);
    let grow = ["resize", "-f", "raw", path.to_str().unwrap()];
    let Some(refused) = qemu("qemu-img", &grow, Path::new("2M")) else { return };
    assert_refused(&refused);
    // Readers of a raw image tolerate a writer, under QEMU too.
    assert_works(&qemu("qemu-img", &["info", "-f", "raw"], &path).unwrap());
    drop(bench);
    assert_works(&qemu("qemu-io", &write, &path).unwrap());
    assert_works(&qemu("qemu-img", &grow, Path::new("2M")).unwrap());
}

#[test]
fn qemus_tools_may_read_a_disk_that_is_read() {
    let dir = disk_directory();
    let path = image(dir.path());
    let env = Env::default();
    create(&env, read_only(&path)).unwrap();
    let Some(read) = qemu("qemu-io", &["-f", "raw", "-r", "-c", "read 0 4k"], &path) else { return };
    assert_works(&read);
    assert_refused(&qemu("qemu-io", &["-f", "raw", "-c", "write 0 4k"], &path).unwrap());
}

#[test]
fn an_image_that_qemu_writes_is_refused() {
    let dir = disk_directory();
    let path = image(dir.path());
    let qemu = Command::new("qemu-io").args(["-f", "raw", "-c", "sleep 60000"]).arg(&path).spawn();
    let Ok(qemu) = qemu else { return eprintln!("skipped: no qemu-io here") };
    let qemu = Killed(qemu);
    let meta = std::fs::metadata(&path).unwrap();
    while crate::locks::holder(meta.dev(), meta.ino()) == Holder::Unknown {
        std::thread::yield_now();
    }
    let holder = Holder::Process { pid: qemu.0.id(), name: "qemu-io".into() };
    assert_eq!(refused_by(Config::new("w", &path)), holder);
    assert_eq!(refused_by(read_only(&path)), holder);
}

#[test]
fn readers_share_the_lock_and_a_writer_excludes_all() {
    let dir = disk_directory();
    let path = image(dir.path());
    let (first, second) = (Env::default(), Env::default());
    create(&first, read_only(&path)).unwrap();
    create(&second, read_only(&path)).unwrap();
    assert_eq!(refused_by(Config::new("w", &path)), Holder::Ourselves);
    drop((first, second));
    let env = Env::default();
    create(&env, Config::new("w", &path)).unwrap();
    assert_eq!(refused_by(Config::new("w", &path)), Holder::Ourselves);
    assert_eq!(refused_by(read_only(&path)), Holder::Ourselves);
}

/// A process that is killed at the end of the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The line that another process prints when it has locked the image.
const DONE: &str = "the image is locked";

/// Starts another process that runs the test of that name in this file, and waits until it has locked the image.
fn other_process(test: &str, variable: &str, image: &Path) -> Killed {
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", &format!("tests::locks::{test}")])
        .env(variable, image)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut other = Killed(other);
    let lines = BufReader::new(other.0.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains(DONE)));
    other
}

const IMAGE: &str = "ARYK_TEST_IMAGE";

/// Runs in the other process of `an_image_of_another_process_is_refused_until_its_end`; does nothing in any other process.
#[test]
fn hold_an_image() {
    let Ok(image) = std::env::var(IMAGE) else { return };
    let env = Env::default();
    create(&env, Config::new("d", image)).unwrap();
    println!("{DONE}");
    // Waits until the process is killed.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn an_image_of_another_process_is_refused_until_its_end() {
    let dir = disk_directory();
    let path = image(dir.path());
    let mut other = other_process("hold_an_image", IMAGE, &path);
    let Holder::Process { pid, .. } = refused_by(Config::new("w", &path)) else { panic!("not seen") };
    assert_eq!(pid, other.0.id());
    other.0.kill().unwrap();
    // The test does not wait for the end of the process: `create` waits for the lock.
    create(&Env::default(), Config::new("w", &path)).unwrap();
    // This use of the pipe keeps it open until here.
    drop(other.0.stdin.as_mut().map(Write::flush));
}

#[test]
fn only_errors_that_mean_no_lock_support_are_classified_so() {
    for errno in [Errno::EAGAIN, Errno::EACCES] {
        assert_eq!(LockError::from(errno), LockError::Held);
    }
    for errno in [Errno::ENOLCK, Errno::EOPNOTSUPP, Errno::EINVAL] {
        assert_eq!(LockError::from(errno), LockError::None(errno));
    }
    for errno in [Errno::EIO, Errno::EDEADLK, Errno::EBADF, Errno::ESTALE, Errno::EPERM, Errno::ENOSYS] {
        assert_eq!(LockError::from(errno), LockError::Os(errno));
    }
}

/// A lock of `kind` on the whole file.
fn whole(kind: i32) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: 0, l_len: 0, l_pid: 0 }
}

#[test]
fn a_lock_of_the_whole_file_is_respected() {
    let dir = disk_directory();
    let path = image(dir.path());
    let other = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    for kind in [libc::F_WRLCK, libc::F_RDLCK] {
        fcntl(&other, FcntlArg::F_OFD_SETLK(&whole(kind))).unwrap();
        assert_eq!(both_refused_by(&path), Holder::Ourselves);
    }
    drop(other);
    let env = Env::default();
    create(&env, Config::new("w", &path)).unwrap();
    // The locks of a disk exclude a lock of the whole file, too.
    let other = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let refused = fcntl(&other, FcntlArg::F_OFD_SETLK(&whole(libc::F_WRLCK)));
    assert_eq!(refused, Err(Errno::EAGAIN));
}

const LOCKED_IMAGE: &str = "ARYK_TEST_LOCKED_IMAGE";

/// Runs in the other process of `a_posix_lock_of_another_process_is_respected`; does nothing in any other process.
#[test]
fn lock_an_image() {
    let Ok(image) = std::env::var(LOCKED_IMAGE) else { return };
    let file = std::fs::File::options().write(true).open(image).unwrap();
    fcntl(&file, FcntlArg::F_SETLK(&whole(libc::F_WRLCK))).unwrap();
    println!("{DONE}");
    // Waits until the process is killed.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn a_posix_lock_of_another_process_is_respected() {
    let dir = disk_directory();
    let path = image(dir.path());
    let other = other_process("lock_an_image", LOCKED_IMAGE, &path);
    let holder = both_refused_by(&path);
    assert!(matches!(holder, Holder::Process { pid, .. } if pid == other.0.id()), "{holder:?}");
}

#[test]
fn a_disk_may_be_locked_only_while_it_is_used() {
    let dir = disk_directory();
    let shared = |name: &str| Config { name: name.into(), lock: Lock::InUse, ..sparse(dir.path(), MIB) };
    let (ours, theirs) = (Env::default(), Env::default());
    create(&ours, shared("d")).unwrap();
    create(&theirs, shared("d")).unwrap();
    let mut first = Bench::on(&ours, Engine::IoUring);
    let second = Bench::on(&ours, Engine::IoUring);
    assert_eq!(first.write(0, &[7; 4096]), Status::Ok);
    // A disk that is created while the file is in use can exist, but cannot open a channel.
    create(&Env::default(), shared("late")).unwrap();
    assert_eq!(refused_by(Config { waits: false, ..sparse(dir.path(), MIB) }), Holder::Ourselves);
    let refused = Bench::try_on(&theirs, Engine::IoUring).err();
    let why = refused.map(|error| error.to_string());
    assert!(why.is_some_and(|why| why.contains("is locked by another")));
    assert!(matches!(resized(theirs.registry(), Size::GrowTo(Bytes(2 * MIB))), Err(Error::Locked { .. })));
    drop(first);
    assert!(Bench::try_on(&theirs, Engine::IoUring).is_err(), "the disk has another channel");
    drop(second);
    let mut moved = Bench::on(&theirs, Engine::IoUring);
    assert_eq!(moved.read(0, 8), [7; 4096]);
    assert!(Bench::try_on(&ours, Engine::IoUring).is_err());
    drop(moved);
    create(&Env::default(), Config { waits: false, ..sparse(dir.path(), MIB) }).unwrap();
}
