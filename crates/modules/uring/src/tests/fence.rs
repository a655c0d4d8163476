//! Tests of writes that a killed process had submitted to the kernel, and that reach the store after the process's end: a
//! successor without the lock sees such writes, a successor with the lock never does.
//!
//! The store holds the predecessor's writes until the test releases them, so the result does not depend on timing.

use super::harness::{Bench, disk};
use crate::{Config, create};
use aryk_bdev::{Env, Op};
use aryk_dma::Buffer;
use aryk_reactor::Engine;
use aryk_slow_store::{Hold, SlowStore};
use rustix::fs::{Mode, OFlags};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Writes of the predecessor, of one block each, that are in flight when it is killed.
const WRITES: usize = 32;
const BLOCK: usize = 4096;
/// Distance from each write to the next: the writes are not adjacent, so the kernel does not merge them.
const STRIDE: usize = 2 * BLOCK;
/// The byte that the predecessor writes to each block, and the byte that its successor writes.
const OLD: u8 = 0xaa;
const NEW: u8 = 0xbb;

/// Timeout for events that must happen.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long to check that an event does not happen.
const WHILE: Duration = Duration::from_millis(300);

/// The variable with the path of the predecessor's disk. Only [`predecessor`] sets it.
const IMAGE: &str = "ARYK_TEST_FENCE_IMAGE";

/// Runs in the predecessor's process; does nothing in any other process.
#[test]
fn a_predecessor_writes_until_it_is_killed() {
    let Ok(image) = std::env::var(IMAGE) else { return };
    let env = Env::default();
    create(&env, Config::new("d", image)).unwrap();
    let mut bench = Bench::on(&env, Engine::IoUring);
    let mut buffer = Buffer::new(BLOCK, BLOCK);
    buffer.write(0, &[OLD; BLOCK]);
    let data = buffer.lend();
    let block_size = bench.bdev().geometry().block_size as usize;
    let mut submit = |n: usize| {
        bench.submit(Op::Write, (n * STRIDE / block_size) as u64, (BLOCK / block_size) as u64, data, false)
    };
    let tags = (0..WRITES).map(&mut submit);
    let first = tags.collect::<Vec<_>>()[0];
    panic!("a write has not been held: {:?}", bench.wait(first));
}

/// Creates a store whose disk is at the path; `None` if this host does not support the kind of store.
type Make = fn() -> Option<(SlowStore, Option<Loop>, PathBuf)>;

fn store() -> Option<SlowStore> {
    let made = SlowStore::new(&disk(), WRITES * STRIDE);
    made.map_err(|error| eprintln!("skipped: FUSE needs root and a kernel with FUSE: {error}")).ok()
}

fn file() -> Option<(SlowStore, Option<Loop>, PathBuf)> {
    let store = store()?;
    let path = store.path().to_owned();
    Some((store, None, path))
}

/// A loop device on the store.
struct Loop(PathBuf);

fn block_device() -> Option<(SlowStore, Option<Loop>, PathBuf)> {
    let store = store()?;
    let mut losetup = Command::new("losetup");
    losetup.args(["--find", "--show", "--direct-io=on", "--sector-size", "4096"]).arg(store.path());
    let made = losetup.output().ok().filter(|made| made.status.success());
    let Some(made) = made else {
        eprintln!("skipped: loop devices need root");
        return None;
    };
    let path = PathBuf::from(String::from_utf8(made.stdout).unwrap().trim_end());
    Some((store, Some(Loop(path.clone())), path))
}

impl Drop for Loop {
    fn drop(&mut self) {
        assert!(Command::new("losetup").arg("--detach").arg(&self.0).status().unwrap().success());
    }
}

/// Starts a predecessor that writes, and kills it. On return the process has ended, as far as a supervisor can see, and none of
/// its writes has reached the store.
fn predecessor(store: &SlowStore, path: &Path) {
    store.hold(Hold::Writes);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "tests::fence::a_predecessor_writes_until_it_is_killed"])
        .env(IMAGE, path)
        .spawn()
        .unwrap();
    assert!(store.await_held(WRITES, PATIENCE), "{} writes of {WRITES} are in flight", store.held());
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL));
    assert_eq!(store.held(), WRITES);
    store.pass();
}

/// Executes the successor's first writes, without a check of the locks.
fn overwrite(path: &Path) {
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).unwrap();
    let mut buffer = Buffer::new(BLOCK, BLOCK);
    buffer.write(0, &[NEW; BLOCK]);
    let data = buffer.lend();
    for n in 0..WRITES {
        let written = aryk_uring::blocking::write(file.as_fd(), &data, (n * STRIDE) as u64, false);
        assert_eq!(written, BLOCK as i32);
    }
    buffer.reclaim();
}

fn blocks_of(store: &SlowStore, content: u8) -> usize {
    (0..WRITES).filter(|n| store.bytes(n * STRIDE, BLOCK) == [content; BLOCK]).count()
}

fn late_writes_reach_the_store_without_the_fence(make: Make) {
    let Some((store, _device, path)) = make() else { return };
    predecessor(&store, &path);
    overwrite(&path);
    assert_eq!(blocks_of(&store, NEW), WRITES);
    store.let_go();
    assert_eq!(blocks_of(&store, OLD), WRITES, "the writes of a killed process did not reach the store");
}

fn no_write_is_late_with_the_fence(make: Make) {
    let Some((store, _device, path)) = make() else { return };
    predecessor(&store, &path);
    let (made, is_made) = mpsc::channel();
    let successor = thread::spawn({
        let path = path.clone();
        move || {
            // As the daemon does: create the disk, and then write to it.
            let created = create(&Env::default(), Config::new("d", &path));
            made.send(()).unwrap();
            created.unwrap();
            overwrite(&path);
        }
    });
    assert!(is_made.recv_timeout(WHILE).is_err(), "the fence has not held");
    assert_eq!((store.held(), blocks_of(&store, OLD)), (WRITES, 0));
    store.let_go();
    is_made.recv_timeout(PATIENCE).expect("the fence ends with the last request");
    successor.join().unwrap();
    assert_eq!((store.held(), blocks_of(&store, NEW)), (0, WRITES), "a late write passed the fence");
}

#[test]
fn a_killed_process_writes_to_a_file_after_its_end() {
    late_writes_reach_the_store_without_the_fence(file);
}

#[test]
fn a_successor_waits_for_a_file_until_its_predecessors_last_write() {
    no_write_is_late_with_the_fence(file);
}

#[test]
fn a_killed_process_writes_to_a_block_device_after_its_end() {
    late_writes_reach_the_store_without_the_fence(block_device);
}

#[test]
fn a_successor_waits_for_a_block_device_until_its_predecessors_last_write() {
    no_write_is_late_with_the_fence(block_device);
}
