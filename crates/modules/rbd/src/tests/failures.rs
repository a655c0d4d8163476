//! Requests that fail, and clients that are excluded.

use super::{BLOCK, OnStub, config, create, create_on, pool};
use crate::{Class, Cluster, ClusterConfig, Clusters, Size, info, resize};
use aryk_bdev::{Access, Bytes, Env, Identity, Op, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on};
use aryk_librbd_stub::{add_image, blocklist, library};
use rustix::io::Errno;

#[test]
fn failed_requests_have_a_status_by_their_errno_and_are_counted() {
    let stub = OnStub::new(BLOCK, 256);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    let cases = [
        (Errno::IO, Class::Failed, Status::Medium),
        (Errno::TIMEDOUT, Class::TimedOut, Status::Medium),
        (Errno::NOSPC, Class::NoSpace, Status::NoSpace),
        (Errno::PERM, Class::Denied, Status::AccessDenied),
        (Errno::NOENT, Class::Gone, Status::Removed),
        (Errno::ILSEQ, Class::Unknown, Status::Medium),
    ];
    for (errno, class, status) in cases {
        stub.image.script(|script| script.fail = errno.raw_os_error());
        disk.write(1, &[7; BLOCK as usize], Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, status, "{errno:?}");
        assert_eq!(info(&stub.disk).unwrap().errors[class as usize], 1, "{class:?}");
        let last = stub.disk.device().last_failure().unwrap();
        assert_eq!((last.op, last.errno), (Op::Write, errno.raw_os_error()));
    }
    stub.image.script(|script| script.fail = 0);
    disk.read(1, 1, Shape::Halves, &mut bench);
    let outcome = disk.finish(&mut bench);
    assert_eq!((outcome.status, &*outcome.data), (Status::Ok, &[0; BLOCK as usize][..]));
    disk.close(&mut bench);
    stub.remove();
}

/// librbd says the same of an image that is read-only for good.
#[test]
fn writes_are_tried_again_while_another_client_keeps_the_lock_of_the_image() {
    let stub = OnStub::new(BLOCK, 256);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    let refuse = |is_refused: bool| {
        stub.image.script(|script| script.fail = if is_refused { Errno::ROFS.raw_os_error() } else { 0 });
    };
    let tries = |more: u64, bench: &mut Bench| {
        let before = stub.image.requests();
        super::until("librbd has the requests", || {
            bench.turn();
            stub.image.requests() >= before + more
        });
    };
    refuse(true);
    disk.write(1, &[7; BLOCK as usize], Shape::Single, &mut bench);
    let aborted = disk.write(2, &[8; BLOCK as usize], Shape::Single, &mut bench);
    tries(6, &mut bench);
    assert!(disk.completed().is_empty(), "a refused write has ended");
    disk.abort(aborted, &mut bench);
    let mut ended = Vec::new();
    super::until("the aborted write has ended", || {
        bench.turn();
        ended.extend(disk.completed());
        !ended.is_empty()
    });
    assert!(ended.len() == 1 && (ended[0].id, ended[0].status) == (aborted, Status::Aborted));
    refuse(false);
    super::until("the other write has ended", || {
        bench.turn();
        ended.extend(disk.completed());
        ended.len() == 2
    });
    assert_eq!(ended[1].status, Status::Ok);
    disk.read(1, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, [7; BLOCK as usize]);
    assert_eq!(info(&stub.disk).unwrap().errors[Class::ReadOnly as usize], 0);

    // A write that was aborted while librbd had it is not tried again: its memory may be another then. Its neighbour is.
    refuse(true);
    stub.image.script(|script| script.holds = true);
    let before = stub.image.requests();
    let aborted = disk.write(1, &[5; BLOCK as usize], Shape::Single, &mut bench);
    let other = disk.write(2, &[6; BLOCK as usize], Shape::Single, &mut bench);
    super::until("librbd has the requests", || {
        bench.turn();
        stub.image.held() == 2
    });
    disk.abort(aborted, &mut bench);
    refuse(false);
    stub.image.release();
    ended = disk.drain(&mut bench);
    let outcomes = [&ended[0], &ended[1]].map(|outcome| (outcome.id, outcome.status));
    assert_eq!(outcomes, [(aborted, Status::Aborted), (other, Status::Ok)]);
    assert_eq!(stub.image.requests(), before + 3);

    refuse(true);
    disk.write(1, &[9; BLOCK as usize], Shape::Single, &mut bench);
    disk.read(3, 1, Shape::Single, &mut bench);
    super::until("both have ended", || {
        bench.turn();
        ended.extend(disk.completed());
        ended.len() == 4
    });
    assert!(ended[2..].iter().all(|outcome| outcome.status == Status::ReadOnly));
    assert_eq!(info(&stub.disk).unwrap().errors[Class::ReadOnly as usize], 2);
    disk.close(&mut bench);
    stub.remove();
}

#[test]
fn a_flush_that_is_refused_is_tried_again_without_the_write_before_it() {
    let stub = OnStub::new(BLOCK, 256);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    stub.image.script(|script| script.fail_flushes = Errno::ROFS.raw_os_error());
    disk.set_fua(true);
    disk.write(1, &[7; BLOCK as usize], Shape::Single, &mut bench);
    super::until("the flush was tried twice", || {
        bench.turn();
        stub.image.requests() >= 3
    });
    assert!(disk.completed().is_empty(), "the write has ended without its flush");
    // The client that has the lock now writes.
    stub.image.write(u64::from(BLOCK), &[8; BLOCK as usize]);
    stub.image.script(|script| script.fail_flushes = 0);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.read(1, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, [8; BLOCK as usize], "the write was repeated");
    disk.close(&mut bench);
    stub.remove();
}

#[test]
fn a_read_that_returns_too_little_fails_and_leaves_the_rest_of_its_memory_alone() {
    let stub = OnStub::new(BLOCK, 256);
    stub.image.write(0, &[6; 2 * BLOCK as usize]);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, 2 * BLOCK);
    for bytes in [0, 1, u64::from(BLOCK), 2 * u64::from(BLOCK) - 1] {
        stub.image.script(|script| script.read_max = Some(bytes));
        disk.read(0, 2, Shape::Odd, &mut bench);
        let outcome = disk.finish(&mut bench);
        assert_eq!(outcome.status, Status::OutOfRange, "{bytes} bytes");
        let (read, rest) = outcome.data.split_at(bytes as usize);
        assert!(read.iter().all(|byte| *byte == 6) && rest.iter().all(|byte| *byte == 0xdd), "{bytes} bytes");
    }
    stub.image.script(|script| script.read_max = None);
    disk.read(0, 2, Shape::Odd, &mut bench);
    assert_eq!(disk.finish(&mut bench).data, [6; 2 * BLOCK as usize]);
    disk.close(&mut bench);
    stub.remove();
}

#[test]
fn an_image_that_cannot_be_opened_is_refused_with_what_to_do() {
    let stub = OnStub::new(BLOCK, 256);
    for (errno, remedy) in [
        (Errno::NOSYS, "`rbd info IMAGE` shows its features"),
        (Errno::OPNOTSUPP, "install a newer librbd"),
        (Errno::NOENT, "`rbd ls POOL` lists the images"),
        (Errno::PERM, "`profile rbd`"),
        (Errno::ACCESS, "`ceph auth get client.USER`"),
        (Errno::ROFS, "`rbd mirror image status IMAGE`"),
        (Errno::SHUTDOWN, "`ceph osd blocklist ls`"),
    ] {
        let pool = pool();
        add_image(&pool, "image", 1 << 20).script(|script| script.open = errno.raw_os_error());
        let mut config = config(&pool, BLOCK);
        config.identity = Identity::named("refused");
        let text = create(&stub.clusters, &stub.env, config).unwrap_err().to_string();
        assert!(text.contains(remedy) && text.contains("/image"), "{errno:?}: {text}");
    }
}

#[test]
fn an_excluded_client_fails_requests_and_new_disks_get_another() {
    let stub = OnStub::new(BLOCK, 256);
    let addresses = info(&stub.disk).unwrap().addresses;
    blocklist(&addresses);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    disk.read(0, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Medium);
    assert_eq!(info(&stub.disk).unwrap().errors[Class::Blocklisted as usize], 1);
    let pool = pool();
    add_image(&pool, "image", 1 << 20);
    let mut other = config(&pool, BLOCK);
    other.identity = Identity::named("other");
    let other = create(&stub.clusters, &stub.env, other).unwrap();
    assert_ne!(info(&other).unwrap().addresses, addresses);
    let list = stub.clusters.list();
    assert_eq!(list.iter().filter(|cluster| cluster.is_blocklisted).count(), 1);
    disk.close(&mut bench);
}

#[test]
fn an_excluded_client_without_requests_is_noticed_by_calls_for_an_image() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    block_on(clusters.register("c", ClusterConfig::default())).unwrap();
    let cluster = Cluster::Registered("c".into());
    blocklist(&clusters.list()[0].addresses);
    let mut missing = config(&pool, BLOCK);
    missing.size = Some(Bytes(1 << 20));
    let error = create_on(&cluster, &clusters, &env, missing.clone()).unwrap_err();
    assert!(error.is_blocklisted() && clusters.list()[0].is_blocklisted, "{error}");
    let disk = create_on(&cluster, &clusters, &env, missing).unwrap();
    let second = info(&disk).unwrap().addresses;
    blocklist(&second);
    let resized = block_on(resize(&disk, Size::GrowTo(Bytes(2 << 20))));
    assert!(resized.is_err_and(|error| error.is_blocklisted()));
    let of_second = clusters.list().into_iter().find(|cluster| cluster.addresses == second).unwrap();
    assert!(of_second.is_blocklisted);
    block_on(env.registry().remove("disk")).unwrap();
    block_on(clusters.close());
}

#[test]
fn memory_stays_with_librbd_until_a_held_request_ends() {
    let stub = OnStub::new(BLOCK, 256);
    stub.image.script(|script| script.holds = true);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    disk.write(3, &[9; BLOCK as usize], Shape::Odd, &mut bench);
    super::until("librbd has it", || {
        bench.turn();
        stub.image.held() == 1
    });
    disk.abort_all(&mut bench);
    (0..100).for_each(|_| _ = bench.turn());
    assert_eq!(stub.image.held(), 1, "an abort takes nothing away from librbd");
    stub.image.release();
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
    stub.remove();
}
