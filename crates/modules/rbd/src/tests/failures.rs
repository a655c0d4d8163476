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
        (Errno::ROFS, Class::ReadOnly, Status::ReadOnly),
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
