//! Clients and disks: creation, removal, sizes, calls that never end.

use super::{BLOCK, OnStub, config, create, create_on, pool, until};
use crate::clusters::{CLIENTS_MAX, DISKS_EACH, SHARED_MAX};
use crate::{Cluster, ClusterConfig, Clusters, Error, Resized, Size, info, resize};
use aryk_bdev::{Access, Blocks, Bytes, Env, Identity, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on};
use aryk_librbd_stub::{add_image, has_client, library, option};
use rustix::io::Errno;
use std::time::{Duration, Instant};

#[test]
fn a_removed_disk_closes_its_image_and_the_last_one_ends_the_client() {
    let stub = OnStub::new(BLOCK, 1024);
    assert_eq!((stub.image.handles(), stub.clusters.list().len()), (1, 1));
    stub.remove();
    assert_eq!((stub.image.handles(), stub.clusters.list().len()), (0, 0));
}

#[test]
fn disks_of_one_configuration_share_a_client() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    for name in ["a", "b"] {
        add_image(&pool, name, 1 << 20);
        let mut config = config(&pool, BLOCK);
        config.spec.image = name.into();
        config.identity = Identity::named(name);
        create(&clusters, &env, config).unwrap();
    }
    let list = clusters.list();
    assert_eq!((list.len(), list[0].disks, list[0].counts.opens), (1, 2, 2));
    block_on(env.registry().remove("a")).unwrap();
    assert_eq!(clusters.list()[0].disks, 1);
}

#[test]
fn disks_are_divided_among_some_clients() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    let make = |number: usize| {
        let mut config = config(&pool, BLOCK);
        config.spec.image = format!("i{number}");
        config.identity = Identity::named(format!("d{number}"));
        add_image(&pool, &config.spec.image, 1 << 20);
        create(&clusters, &env, config).unwrap();
    };
    let disks = || {
        let mut disks: Vec<usize> = clusters.list().iter().map(|client| client.disks).collect();
        disks.sort_unstable();
        disks
    };
    (0..DISKS_EACH).for_each(make);
    assert_eq!(disks(), [DISKS_EACH]);
    make(DISKS_EACH);
    assert_eq!(disks(), [1, DISKS_EACH]);
    (DISKS_EACH + 1..DISKS_EACH * SHARED_MAX + 2).for_each(make);
    assert_eq!(disks(), [DISKS_EACH, DISKS_EACH, DISKS_EACH + 1, DISKS_EACH + 1]);
    // The disks of one client go, and with it the client.
    for number in 0..DISKS_EACH * SHARED_MAX + 2 {
        block_on(env.registry().remove(&format!("d{number}"))).unwrap();
    }
    block_on(clusters.end_unused());
    assert!(clusters.list().is_empty());
}

#[test]
fn a_cluster_has_a_limited_number_of_clients_and_others_have_theirs() {
    let clusters = Clusters::with_library(library());
    let of_user = |number: usize, monitor: &str| {
        let options = [("mon_host".to_owned(), monitor.to_owned())].into();
        ClusterConfig { user: Some(format!("u{number}")), options, ..ClusterConfig::default() }
    };
    let register = |number: usize, monitor: &str| {
        block_on(clusters.register(&format!("{monitor} {number}"), of_user(number, monitor)))
    };
    (0..CLIENTS_MAX).for_each(|number| register(number, "10.0.0.1").unwrap());
    assert!(matches!(register(CLIENTS_MAX, "10.0.0.1"), Err(Error::TooManyClients)));
    assert_eq!(clusters.list().len(), CLIENTS_MAX);
    register(0, "10.0.0.2").unwrap();
    block_on(clusters.unregister("10.0.0.1 7")).unwrap();
    register(CLIENTS_MAX, "10.0.0.1").unwrap();
    block_on(clusters.close());
}

#[test]
fn librados_does_not_limit_the_requests_of_all_pools_together_unless_the_operator_sets_it() {
    let clusters = Clusters::with_library(library());
    let mut limited = ClusterConfig::default();
    limited.options.insert("objecter_inflight_ops".into(), "7".into());
    block_on(clusters.register("limited", limited)).unwrap();
    block_on(clusters.register("plain", ClusterConfig::default())).unwrap();
    let list = clusters.list();
    let options = |number: usize| {
        let addresses = &list[number].addresses;
        ["objecter_inflight_ops", "objecter_inflight_op_bytes"].map(|name| option(addresses, name).unwrap())
    };
    assert_eq!((options(0), options(1)), (["7".into(), "0".into()], ["0".into(), "0".into()]));
    block_on(clusters.close());
}

#[test]
fn what_cannot_be_a_disk_is_refused_and_leaves_nothing_open() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    let image = add_image(&pool, "image", 1 << 20);
    let refused_on = |cluster: &Cluster, change: &dyn Fn(&mut crate::Config)| {
        let mut config = config(&pool, BLOCK);
        change(&mut config);
        let error = create_on(cluster, &clusters, &env, config).unwrap_err();
        until("the handle is closed", || image.handles() == 0);
        assert!(clusters.list().is_empty(), "{error}");
        error
    };
    let refused =
        |change: &dyn Fn(&mut crate::Config)| refused_on(&Cluster::Shared(ClusterConfig::default()), change);
    assert!(matches!(refused(&|c| c.spec.image = "none".into()), Error::Image { action: "open", .. }));
    assert!(matches!(refused(&|c| c.spec.pool = "missing".into()), Error::Pool { .. }));
    assert!(matches!(refused(&|c| c.block_size = 1000), Error::BlockSize(1000)));
    assert!(matches!(refused(&|c| c.block_size = 8 << 20), Error::BlockSize(_)));
    assert!(matches!(refused(&|c| c.size = Some(Bytes(2 << 20))), Error::OtherSize { .. }));
    assert!(matches!(refused(&|c| c.spec.image = "+size=100".into()), Error::Empty(_)));
    assert!(matches!(refused_on(&Cluster::Registered("x".into()), &|_| ()), Error::NoCluster(_)));
    let nobody = ClusterConfig { user: Some("nobody".into()), ..ClusterConfig::default() };
    assert!(matches!(refused_on(&Cluster::Shared(nobody), &|_| ()), Error::Connect(_)));
    let mut odd = ClusterConfig::default();
    odd.options.insert("no_such_option".into(), "1".into());
    assert!(matches!(refused_on(&Cluster::Shared(odd), &|_| ()), Error::Connect(_)));
    image.write(0, b"RBDL\xba\xbe");
    assert!(matches!(refused(&|_| ()), Error::Encrypted(_)));
}

#[test]
fn an_image_is_created_if_there_is_none() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    let mut config = config(&pool, BLOCK);
    config.size = Some(Bytes(1 << 20));
    let disk = create(&clusters, &env, config.clone()).unwrap();
    assert_eq!(disk.blocks(), Blocks(256));
    let error = create(&clusters, &env, config).unwrap_err();
    assert!(matches!(error, Error::Bdev(aryk_bdev::Error::Exists(_))));
}

#[test]
fn snapshots_are_read_only() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    add_image(&pool, "image", 1 << 20);
    let mut config = config(&pool, BLOCK);
    config.spec.snapshot = Some("before".into());
    let disk = create(&clusters, &env, config).unwrap();
    assert!(disk.device().is_read_only());
    assert!(matches!(block_on(resize(&disk, Size::GrowTo(Bytes(2 << 20)))), Err(Error::ReadOnly(_))));
}

#[test]
fn disks_grow_and_shrink_with_their_images() {
    let stub = OnStub::new(BLOCK, 256);
    let grown = block_on(resize(&stub.disk, Size::GrowTo(Bytes(2 << 20)))).unwrap();
    assert!(matches!(grown, Resized::Done(Bytes(size)) if size == 2 << 20));
    assert_eq!((stub.disk.blocks(), stub.image.size()), (Blocks(512), 2 << 20));
    let refused = block_on(resize(&stub.disk, Size::GrowTo(Bytes(1 << 20))));
    assert!(matches!(refused, Err(Error::Shrinks { .. })));
    let odd = block_on(resize(&stub.disk, Size::Exactly(Bytes(1000))));
    assert!(matches!(odd, Err(Error::NotAMultiple { .. })));
    match block_on(resize(&stub.disk, Size::Exactly(Bytes(1 << 20)))).unwrap() {
        Resized::Shrinking(shrinking) => {
            assert_eq!((stub.disk.blocks(), stub.image.size()), (Blocks(256), 2 << 20));
            let settled = block_on(shrinking.settle());
            assert_eq!(block_on(settled.cut()).unwrap(), Bytes(1 << 20));
        }
        Resized::Done(size) => panic!("not shrunk, {size}"),
    }
    assert_eq!(stub.image.size(), 1 << 20);
    // Another client's resize.
    stub.image.resize(3 << 20);
    until("the disk follows", || stub.disk.blocks() == Blocks(768));
}

#[test]
fn an_image_that_never_opens_delays_no_other_disk() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    add_image(&pool, "image", 1 << 20);
    let mut stuck = config(&pool, BLOCK);
    stuck.spec.image = "x+size=65536+open=never".into();
    stuck.identity = Identity::named("stuck");
    let (of_stuck, env_of_stuck) = (clusters.clone(), env.clone());
    std::thread::spawn(move || create(&of_stuck, &env_of_stuck, stuck));
    until("the client is connected", || clusters.list().len() == 1);
    create(&clusters, &env, config(&pool, BLOCK)).unwrap();
    assert!(env.registry().find("stuck").is_err());
}

#[test]
fn a_handle_that_does_not_close_is_counted_and_its_image_is_opened_by_a_new_client() {
    let stub = OnStub::new(BLOCK, 256);
    let first = info(&stub.disk).unwrap().addresses;
    // Another disk keeps the client.
    let mut kept = config(&pool(), BLOCK);
    kept.spec.image = "+size=65536".into();
    kept.identity = Identity::named("kept");
    create(&stub.clusters, &stub.env, kept).unwrap();
    stub.image.script(|script| script.delay = Duration::from_secs(7));
    stub.remove();
    assert!(stub.env.registry().find("disk").is_err());
    let quarantined = || stub.clusters.list().iter().map(|cluster| cluster.counts.quarantined).sum::<u64>();
    assert_eq!(quarantined(), 1);
    stub.image.script(|script| script.delay = Duration::ZERO);
    let again = || {
        let disk = create(&stub.clusters, &stub.env, config(&stub.pool, BLOCK)).unwrap();
        let addresses = info(&disk).unwrap().addresses;
        let mut bench = Bench::new();
        let mut disk = bench.open(stub.env.registry(), "disk", Access::Exclusive, 4, BLOCK);
        disk.write(1, &[7; BLOCK as usize], Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        disk.close(&mut bench);
        stub.remove();
        addresses
    };
    assert_ne!(again(), first, "the image was opened by the client whose handle does not close");
    assert!(has_client(&first), "the other disk has lost its client");
    until("the handle is closed", || stub.image.handles() == 0);
    assert_eq!(again(), first, "a client whose handles have closed is used again");
    assert_eq!(quarantined(), 1);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures time")]
fn images_that_never_open_delay_others_for_some_seconds_and_those_of_other_pools_not_at_all() {
    let (env, clusters) = (Env::default(), Clusters::with_library(library()));
    let (pool, other) = (pool(), pool());
    block_on(clusters.register("c", ClusterConfig::default())).unwrap();
    for number in 0..40 {
        let mut stuck = config(&pool, BLOCK);
        stuck.spec.image = format!("x{number}+size=65536+open=never");
        stuck.identity = Identity::named(format!("stuck{number}"));
        let (clusters, env) = (clusters.clone(), env.clone());
        let cluster = Cluster::Registered("c".into());
        std::thread::spawn(move || create_on(&cluster, &clusters, &env, stuck));
    }
    let cluster = Cluster::Registered("c".into());
    let create = |pool: &str, name: &str| {
        add_image(pool, "image", 1 << 20);
        let mut config = config(pool, BLOCK);
        config.identity = Identity::named(name);
        let began = Instant::now();
        create_on(&cluster, &clusters, &env, config).unwrap();
        began.elapsed()
    };
    // All openings have begun, or wait.
    std::thread::sleep(Duration::from_millis(500));
    let took = create(&other, "other");
    assert!(took < Duration::from_secs(2), "an image of another pool opened after {took:?}");
    let took = create(&pool, "same");
    assert!(took < Duration::from_secs(15), "an image of the same pool opened after {took:?}");
}

#[test]
fn registered_clusters_stay_without_disks_and_not_longer_than_their_disks_allow() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    block_on(clusters.register("c", ClusterConfig::default())).unwrap();
    let again = block_on(clusters.register("c", ClusterConfig::default()));
    assert!(matches!(again, Err(Error::ClusterExists(_))));
    assert_eq!((clusters.list()[0].name.as_deref(), clusters.list()[0].disks), (Some("c"), 0));
    add_image(&pool, "image", 1 << 20);
    create_on(&Cluster::Registered("c".into()), &clusters, &env, config(&pool, BLOCK)).unwrap();
    assert!(matches!(block_on(clusters.unregister("c")), Err(Error::ClusterInUse { disks: 1, .. })));
    block_on(env.registry().remove("disk")).unwrap();
    assert_eq!(clusters.list().len(), 1);
    block_on(clusters.unregister("c")).unwrap();
    assert!(clusters.list().is_empty());
    assert!(matches!(block_on(clusters.unregister("c")), Err(Error::NoCluster(_))));
}

#[test]
fn a_predecessor_is_excluded_before_its_image_is_opened() {
    let (env, clusters, pool) = (Env::default(), Clusters::with_library(library()), pool());
    let image = add_image(&pool, "image", 1 << 20);
    image.script(|script| script.open = Errno::IO.raw_os_error());
    let mut config = config(&pool, BLOCK);
    config.predecessors.push("10.0.0.1:0/4711".into());
    assert!(create(&clusters, &env, config.clone()).is_err());
    assert!(aryk_librbd_stub::is_blocklisted("10.0.0.1:0/4711"));
    image.script(|script| script.open = 0);
    create(&clusters, &env, config).unwrap();
}
