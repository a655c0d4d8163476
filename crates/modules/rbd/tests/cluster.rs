//! The conformance suite of the block layer on images of a real Ceph cluster: `CEPH_CONF` names its configuration file, and the
//! program `rbd` creates and resizes the images.
//!
//! Ignored by plain `cargo test`; `cargo xtask test --only ceph` starts a cluster and runs it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aryk_bdev::{Bdev, Blocks, Env, Identity, Registry};
use aryk_bdev_conformance::{Features, Fixture, block_on, conformance};
use aryk_bdev_rbd::{Cluster, ClusterConfig, Clusters, Config, Spec, connect, create};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const POOL: &str = "rbd";
const BLOCK: u32 = 4096;
const BLOCKS: u64 = 65_536;

/// A disk in an image of its own.
struct OnCluster {
    env: Env,
    /// Ended with the disk.
    _clusters: Clusters,
    image: String,
    disk: Arc<Bdev>,
}

impl OnCluster {
    fn new(block_size: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let image = format!("conformance{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let size = format!("{}B", BLOCKS * u64::from(block_size));
        rbd(&["create", "--size", &size, &format!("{POOL}/{image}")]);
        let (env, clusters) = (Env::default(), Clusters::new(None, None));
        let spec = Spec { pool: POOL.into(), namespace: None, image: image.clone(), snapshot: None };
        let config = Config {
            identity: Identity::named("disk"),
            spec,
            block_size,
            read_only: false,
            size: None,
            predecessors: Vec::new(),
        };
        let cluster = Cluster::Shared(ClusterConfig::default());
        let client = block_on(connect(&clusters, &cluster)).unwrap();
        let disk = block_on(create(client, &env, config)).unwrap();
        Self { env, _clusters: clusters, image, disk }
    }
}

fn rbd(arguments: &[&str]) {
    let output = Command::new("rbd").args(arguments).output().expect("the package ceph-common is installed");
    assert!(output.status.success(), "rbd {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Fixture for OnCluster {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn features(&self) -> Features {
        // librbd leaves out discards of parts of its granularity, 64 KiB by default.
        Features { data: true, unmap_zeroes: false }
    }

    fn resize(&self, blocks: Blocks) -> bool {
        let size = format!("{}B", blocks.0 * u64::from(self.disk.geometry().block_size));
        let spec = format!("{POOL}/{}", self.image);
        rbd(&["resize", "--no-progress", "--allow-shrink", "--size", &size, &spec]);
        let has_followed = (0..20_000).any(|_| {
            std::thread::park_timeout(std::time::Duration::from_millis(1));
            self.disk.blocks() == blocks
        });
        assert!(has_followed, "the disk does not follow the image's size");
        true
    }
}

conformance!([ignore = "needs a Ceph cluster"] || OnCluster::new(BLOCK));

/// Blocks of 512 bytes.
mod small_blocks {
    aryk_bdev_conformance::conformance!(
        [ignore = "needs a Ceph cluster"]
        || super::OnCluster::new(512),
        every_operation_at_every_alignment any_sequence compare_and_write_is_atomic
    );
}

/// Ceph's libraries abort a process that destroys their objects while a client has threads.
#[test]
#[ignore = "needs a Ceph cluster"]
fn a_process_may_exit_with_a_client() {
    const STATUS: i32 = 7;
    const EXITS: &str = "ARYK_TEST_EXITS";
    if std::env::var_os(EXITS).is_some() {
        let clusters = Clusters::new(None, None);
        let client = block_on(connect(&clusters, &Cluster::Shared(ClusterConfig::default()))).unwrap();
        std::mem::forget(client);
        std::process::exit(STATUS);
    }
    let itself = std::env::current_exe().unwrap();
    for _ in 0..20 {
        let mut exiting = Command::new(&itself);
        let exiting = exiting.args(["--ignored", "--exact", "a_process_may_exit_with_a_client"]);
        let output = exiting.env(EXITS, "1").output().unwrap();
        assert_eq!(output.status.code(), Some(STATUS), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
