//! Tests of a full store: a small tmpfs. Need root.

use super::harness::{Bench, MIB, pattern, sparse};
use crate::{Config, Direct, OnFull, Stats, create, rooms, stats};
use aryk_bdev::{Blocks, Lba, Op, Status, Tag};
use aryk_dma::Buffer;
use aryk_reactor::Engine;
use std::path::Path;
use std::process::Command;

/// A tmpfs of one MiB, which is unmounted when this is dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(dir.path()).output();
        if mounted.is_ok_and(|o| o.status.success()) {
            return Some(Self(dir));
        }
        eprintln!("skipped: mounting a tmpfs needs root");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        assert!(Command::new("umount").arg("-l").arg(self.path()).status().unwrap().success());
    }
}

fn bench(dir: &Small, on_full: OnFull, engine: Engine) -> Bench {
    Bench::new(Config { on_full, ..sparse(dir.path(), 4 * MIB) }, None, engine)
}

#[test]
fn a_full_store_fails_writes() {
    let Some(dir) = Small::mount() else { return };
    let ways =
        [Engine::IoUring, Engine::Epoll].map(|engine| [(engine, Direct::Auto), (engine, Direct::Never)]);
    for (engine, direct) in ways.into_iter().flatten() {
        let mut bench = Bench::new(Config { direct, ..sparse(dir.path(), 4 * MIB) }, None, engine);
        assert_eq!(bench.write(0, &pattern(MIB as usize * 3 / 4, 1)), Status::Ok);
        assert_eq!(bench.write(4096, &pattern(MIB as usize / 2, 2)), Status::NoSpace);
        let last = bench.bdev().device().last_failure().expect("the failure is recorded");
        assert_eq!(
            (last.op, last.lba, last.blocks, last.errno),
            (Op::Write, Lba(4096), Blocks(1024), libc::ENOSPC)
        );
        // Allocated blocks can still be written, and a flush succeeds.
        assert_eq!(bench.write(0, &pattern(4096, 3)), Status::Ok);
        assert_eq!(bench.command(Op::Flush, 0, 0), Status::Ok);
        assert_eq!(bench.command(Op::Unmap, 0, 2048), Status::Ok);
        assert_eq!(bench.write(4096, &pattern(MIB as usize / 2, 2)), Status::Ok);
        std::fs::remove_file(bench.path()).unwrap();
    }
}

#[test]
fn overcommitted_space_is_reported() {
    let Some(dir) = Small::mount() else { return };
    let mut bench = Bench::new(sparse(dir.path(), MIB / 2), None, Engine::IoUring);
    let room = |bench: &Bench| rooms(bench.env.registry(), None).unwrap().remove(0);
    let first = room(&bench);
    assert_eq!((first.disks, first.promised, first.allocated, first.missing()), (1, MIB / 2, 0, 0));
    assert_eq!(first.path, dir.path().canonicalize().unwrap());
    // Written bytes are no longer free, and no longer promised.
    assert_eq!(bench.write(0, &pattern(MIB as usize / 4, 1)), Status::Ok);
    let written = room(&bench);
    assert_eq!((written.allocated, first.free - written.free, written.missing()), (MIB / 4, MIB / 4, 0));
    let other = |name: &str, size| Config {
        name: name.into(),
        path: dir.path().join(name),
        ..sparse(dir.path(), size)
    };
    create(&bench.env, other("large", 8 * MIB)).unwrap();
    let over = room(&bench);
    assert_eq!((over.disks, over.missing()), (2, 8 * MIB + MIB / 4 - over.free));
    // A disk on another file system is counted there.
    let elsewhere = super::harness::disk().join(format!("room{}", std::process::id()));
    create(&bench.env, Config { path: elsewhere.clone(), ..other("o", MIB) }).unwrap();
    let all = rooms(bench.env.registry(), None).unwrap();
    assert_eq!((all.len(), all[1].disks, all[1].missing()), (2, 1, 0));
    assert!(elsewhere.canonicalize().unwrap().starts_with(&all[1].path), "{}", all[1].path.display());
    let of = |disk| rooms(bench.env.registry(), Some(disk)).unwrap();
    assert_eq!((of("o"), of("large")), (all[1..].to_vec(), all[..1].to_vec()));
    std::fs::remove_file(&elsewhere).unwrap();
    // A deleted file that is still open is counted too.
    assert_eq!(of("o")[0].path, elsewhere);
}

/// A write of 512 KiB that finds no room.
struct Held {
    tag: Tag,
    buffer: Buffer,
    data: Vec<u8>,
}

fn hold(bench: &mut Bench) -> Held {
    assert_eq!(bench.write(0, &pattern(MIB as usize * 3 / 4, 1)), Status::Ok);
    let data = pattern(MIB as usize / 2, 2);
    let mut buffer = Buffer::from_slice(&data);
    let tag = bench.submit(Op::Write, 4096, 1024, buffer.lend(), true);
    while stats(&bench.bdev()).unwrap().held == 0 {
        bench.step();
    }
    Held { tag, buffer, data }
}

#[test]
fn a_held_write_continues_when_there_is_room() {
    let Some(dir) = Small::mount() else { return };
    for engine in [Engine::IoUring, Engine::Epoll] {
        let mut bench = bench(&dir, OnFull::Hold, engine);
        let mut held = hold(&mut bench);
        // Other requests do not wait for the held write.
        assert!(bench.read(0, 8) == pattern(4096, 1));
        assert_eq!(bench.command(Op::Unmap, 0, 2048), Status::Ok);
        assert_eq!(bench.wait(held.tag), Status::Ok);
        assert!(bench.read(4096, 1024) == held.data);
        held.buffer.reclaim();
        assert_eq!(stats(&bench.bdev()), Some(Stats { held: 0, held_total: 1 }));
        std::fs::remove_file(bench.path()).unwrap();
    }
}

#[test]
fn a_held_write_is_aborted_at_once() {
    let Some(dir) = Small::mount() else { return };
    let mut bench = bench(&dir, OnFull::Hold, Engine::IoUring);
    let mut held = hold(&mut bench);
    bench.abort(held.tag);
    assert_eq!(bench.wait(held.tag), Status::Aborted);
    held.buffer.reclaim();
    assert_eq!(stats(&bench.bdev()), Some(Stats { held: 0, held_total: 1 }));
}

#[test]
fn a_held_write_ends_when_the_disk_is_removed() {
    let Some(dir) = Small::mount() else { return };
    let mut bench = bench(&dir, OnFull::Hold, Engine::IoUring);
    let mut held = hold(&mut bench);
    let env = bench.env.clone();
    let mut removal = std::pin::pin!(env.registry().remove("d"));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(removal.as_mut().poll(&mut context).is_pending());
    assert_eq!(bench.wait(held.tag), Status::Removed);
    held.buffer.reclaim();
    drop(bench);
    assert!(removal.as_mut().poll(&mut context).is_ready());
}
