//! What disks leave behind: nothing.

use super::{BLOCK, OnStub, until};
use crate::{Cluster, ClusterConfig, Clusters, Error, Size, disk_of, info, resize};
use aryk_bdev::{Access, Bytes, Identity, Op, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on};
use aryk_librbd_stub::{add_image, clients_of, has_client, let_stuck_connect, library};
use std::sync::Arc;
use std::task::{Context, Waker};

#[test]
fn the_client_of_the_last_disk_is_shut_down() {
    let stub = OnStub::new(BLOCK, 256);
    let addresses = info(&stub.disk).unwrap().addresses;
    assert!(has_client(&addresses));
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    disk.read(1, 1, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
    bench.turn();
    stub.remove();
    assert_eq!(stub.image.handles(), 0);
    assert!(!has_client(&addresses), "the client stays after its last disk");
}

#[test]
fn a_reactor_without_channels_has_no_driver_and_gets_one_again() {
    let stub = OnStub::new(BLOCK, 256);
    let mut bench = Bench::new();
    let drivers = |bench: &mut Bench| bench.cx().driver_stats().len();
    let before = drivers(&mut bench);
    for _ in 0..3 {
        let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
        assert_eq!(drivers(&mut bench), before + 1);
        disk.write(1, &[7; BLOCK as usize], Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        disk.close(&mut bench);
        bench.turn();
        assert_eq!(drivers(&mut bench), before, "a core that has served the disk cannot be removed");
    }
    stub.remove();
}

#[test]
fn a_disk_that_is_removed_during_a_resize_closes_its_image_afterwards() {
    let stub = OnStub::new(BLOCK, 256);
    let addresses = info(&stub.disk).unwrap().addresses;
    stub.image.script(|script| script.holds_resizes = true);
    let resized = Arc::clone(&stub.disk);
    let resizer = std::thread::spawn(move || {
        let resized = aryk_bdev_conformance::block_on(resize(&resized, Size::GrowTo(Bytes(2 << 20))));
        drop(resized);
    });
    until("librbd resizes", || stub.image.resizing() == 1);
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| stub.remove());
        until("the disk is being closed", || disk_of(&stub.disk).unwrap().parts().is_none());
        assert_eq!(stub.image.handles(), 1, "a handle that is in use is not closed");
        stub.image.release();
        removal.join().unwrap();
    });
    resizer.join().unwrap();
    until("the handle is closed", || stub.image.handles() == 0);
    assert!(!has_client(&addresses));
}

#[test]
fn a_client_whose_connecting_was_given_up_is_shut_down() {
    let clusters = Clusters::with_library(library());
    let stuck = ClusterConfig { user: Some("stuck".into()), ..ClusterConfig::default() };
    let mut connecting = Box::pin(clusters.register("stuck", stuck));
    until("the client is connecting", || {
        let mut cx = Context::from_waker(Waker::noop());
        assert!(connecting.as_mut().poll(&mut cx).is_pending(), "it is stuck");
        clients_of("stuck") == 1
    });
    drop(connecting);
    block_on(clusters.close());
    let_stuck_connect();
    until("the client is shut down", || clients_of("stuck") == 0);
}

#[test]
fn a_disk_is_removed_though_librbd_never_ends_its_requests_and_its_memory_is_left_alone() {
    remove_with_requests(false);
}

/// As those of a VM that has gone.
#[test]
fn a_disk_is_removed_though_its_requests_were_aborted_before() {
    remove_with_requests(true);
}

fn remove_with_requests(were_aborted: bool) {
    let stub = OnStub::new(BLOCK, 256);
    let addresses = info(&stub.disk).unwrap().addresses;
    stub.image.write(BLOCK.into(), &[5; BLOCK as usize]);
    stub.image.script(|script| script.holds = true);
    let mut bench = Bench::new();
    let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 16, BLOCK);
    let data = vec![9; BLOCK as usize];
    disk.read(1, 1, Shape::Odd, &mut bench);
    disk.write(2, &data, Shape::Odd, &mut bench);
    disk.command(Op::Flush, 0, 0, &mut bench);
    until("librbd has them", || {
        bench.turn();
        stub.image.held() == 3
    });
    if were_aborted {
        disk.abort_all(&mut bench);
        bench.turn();
        assert!(disk.completed().is_empty(), "librbd has the requests");
    }
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| stub.remove());
        let mut aborted = Vec::new();
        until("the requests are aborted", || {
            bench.turn();
            aborted.extend(disk.completed());
            aborted.len() == 3
        });
        assert!(aborted.iter().all(|outcome| outcome.status == Status::Aborted), "{aborted:?}");
        let read = aborted.iter().find(|outcome| outcome.id == 0).unwrap();
        assert_eq!(read.data, [0xdd; BLOCK as usize]);
        disk.close(&mut bench);
        until("the disk is removed", || {
            bench.turn();
            removal.is_finished()
        });
        removal.join().unwrap();
    });
    assert!(stub.env.registry().find("disk").is_err() && has_client(&addresses));
    let again = super::config(&stub.pool, BLOCK);
    let refused = super::create(&stub.clusters, &stub.env, again.clone()).unwrap_err();
    assert!(matches!(refused, Error::Left(_)), "{refused}");
    // That of another cluster is another image, which this one's requests do not hold up.
    stub.image.script(|script| script.holds = false);
    let options = [("mon-host".to_owned(), "10.0.0.1".to_owned())].into();
    let other = Cluster::Shared(ClusterConfig { options, ..ClusterConfig::default() });
    super::create_on(&other, &stub.clusters, &stub.env, again.clone()).unwrap();
    stub.remove();
    // The cluster answers again: the write takes effect, and the client ends.
    stub.image.release();
    until("the client is shut down", || stub.image.handles() == 0 && !has_client(&addresses));
    let mut written = vec![0; BLOCK as usize];
    stub.image.read(2 * u64::from(BLOCK), &mut written);
    assert_eq!(written, data);
    super::create(&stub.clusters, &stub.env, again).unwrap();
    stub.remove();
}

#[test]
fn calls_that_hang_keep_no_other_image_of_their_pool_from_being_opened() {
    let stub = OnStub::new(BLOCK, 256);
    let disk = |name: &str| {
        let image = add_image(&stub.pool, name, 1 << 20);
        let mut config = super::config(&stub.pool, BLOCK);
        config.spec.image = name.into();
        config.identity = Identity::named(name);
        (image, super::create(&stub.clusters, &stub.env, config).unwrap())
    };
    let hanging = ["a", "b"].map(|name| {
        let (image, disk) = disk(name);
        image.script(|script| script.holds_resizes = true);
        let resizer =
            std::thread::spawn(move || block_on(resize(&disk, Size::GrowTo(Bytes(2 << 20)))).is_ok());
        until("librbd resizes", || image.resizing() == 1);
        (image, resizer)
    });
    let is_open = std::thread::scope(|scope| {
        let opening = scope.spawn(|| drop(disk("c")));
        let is_open = (0..5000).any(|_| {
            super::pause();
            opening.is_finished()
        });
        hanging.iter().for_each(|(image, _)| image.release());
        is_open
    });
    assert!(is_open, "the image waits for calls about others");
    for (_, resizer) in hanging {
        assert!(resizer.join().unwrap(), "the image was not resized");
    }
}
