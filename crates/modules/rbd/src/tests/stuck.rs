//! Pools that do not answer, beside disks of the same client that do.

use super::{BLOCK, OnStub, config, create_on, pool, until};
use crate::{Cluster, ClusterConfig, Clusters, Config};
use aryk_bdev::{Access, Env, Identity, Status};
use aryk_bdev_conformance::{Bench, Opener, Shape, block_on};
use aryk_librbd_stub::{StubImage, add_image, library};
use std::sync::Arc;

/// Requests in flight on one channel.
const DEPTH: u16 = 256;
const MIB: u32 = 1 << 20;

/// Disks of one client.
struct OfOneClient {
    env: Env,
    clusters: Clusters,
}

impl OfOneClient {
    fn new() -> Self {
        let clusters = Clusters::with_library(library());
        block_on(clusters.register("client", ClusterConfig::default())).unwrap();
        Self { env: Env::default(), clusters }
    }

    /// Creates a disk in an image of its own, and opens it.
    fn open(&self, name: &str, depth: u16, largest: u32, bench: &mut Bench) -> (Arc<StubImage>, Opener) {
        let pool = pool();
        let image = add_image(&pool, "image", 16 << 20);
        let config = Config { identity: Identity::named(name), ..config(&pool, BLOCK) };
        create_on(&Cluster::Registered("client".into()), &self.clusters, &self.env, config).unwrap();
        (image, bench.open(self.env.registry(), name, Access::Exclusive, depth, largest))
    }
}

fn write_and_read(disk: &mut Opener, bench: &mut Bench) {
    let data = vec![7; 2 * MIB as usize];
    disk.write(0, &data, Shape::Odd, bench);
    assert_eq!(disk.finish(bench).status, Status::Ok);
    disk.read(0, u64::from(2 * MIB / BLOCK), Shape::Single, bench);
    let outcome = disk.finish(bench);
    assert!(outcome.status == Status::Ok && outcome.data == data);
}

#[test]
fn queues_full_of_stuck_requests_stop_no_other_disk_of_the_client() {
    let client = OfOneClient::new();
    let mut bench = Bench::new();
    let mut stuck = Vec::new();
    for number in 0..10 {
        let (image, mut disk) = client.open(&format!("stuck{number}"), DEPTH, 128 << 10, &mut bench);
        image.script(|script| script.holds = true);
        for _ in 0..DEPTH {
            disk.read(0, 32, Shape::Single, &mut bench);
        }
        stuck.push((image, disk));
    }
    let held =
        |stuck: &[(Arc<StubImage>, Opener)]| stuck.iter().map(|(image, _)| image.held()).sum::<usize>();
    until("librbd has what the budget allows", || {
        bench.turn();
        held(&stuck) > 1800
    });
    let (_, mut disk) = client.open("beside", 4, 2 * MIB, &mut bench);
    write_and_read(&mut disk, &mut bench);
    assert!(held(&stuck) < 2100, "all channels together have {} requests of 128 KiB", held(&stuck));
    for (image, mut disk) in stuck {
        image.release();
        let outcomes = disk.drain(&mut bench);
        assert!(outcomes.len() == DEPTH.into() && outcomes.iter().all(|o| o.status == Status::Ok));
        disk.close(&mut bench);
    }
    write_and_read(&mut disk, &mut bench);
    disk.close(&mut bench);
}

#[test]
fn the_bytes_of_a_channel_that_librbd_has_are_bounded_and_those_that_wait_can_be_aborted() {
    let stub = OnStub::new(BLOCK, 4096);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 100, MIB);
    stub.image.script(|script| script.holds = true);
    let data = vec![3; MIB as usize];
    let ids: Vec<u64> = (0..100).map(|_| disk.write(0, &data, Shape::Single, &mut bench)).collect();
    until("librbd has what the budget allows", || {
        bench.turn();
        stub.image.held() == 63
    });
    disk.abort(ids[99], &mut bench);
    disk.abort(ids[98], &mut bench);
    disk.abort(ids[0], &mut bench);
    let mut aborted = Vec::new();
    until("two are aborted", || {
        bench.turn();
        aborted.extend(disk.completed());
        aborted.len() == 2
    });
    assert!(aborted.iter().all(|outcome| outcome.status == Status::Aborted), "{aborted:?}");
    assert_eq!(stub.image.held(), 63);
    stub.image.release();
    let rest = disk.drain(&mut bench);
    assert!(rest.len() == 98 && rest.iter().all(|outcome| outcome.status == Status::Ok));
    disk.close(&mut bench);
    stub.remove();
}
