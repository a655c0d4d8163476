//! The module on a substitute for librbd, in memory.

mod conformance;
mod copies;
mod ends;
mod failures;
mod life;
mod real;
mod sizes;
mod state;
mod stuck;

use crate::{Cluster, ClusterConfig, Clusters, Config, Error, Spec};
use aryk_bdev::{Bdev, Env, Identity};
use aryk_bdev_conformance::block_on;
use aryk_librbd_stub::{StubImage, add_image, library};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u32 = 4096;

/// A disk in an image of its own.
struct OnStub {
    env: Env,
    clusters: Clusters,
    pool: String,
    image: Arc<StubImage>,
    disk: Arc<Bdev>,
}

/// A pool that no other test uses.
fn pool() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("pool{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The disk `disk` in the image `image` of a pool, with a client of its own.
fn config(pool: &str, block_size: u32) -> Config {
    let spec = Spec { pool: pool.into(), namespace: None, image: "image".into(), snapshot: None };
    Config {
        identity: Identity::named("disk"),
        spec,
        block_size,
        read_only: false,
        size: None,
        predecessors: Vec::new(),
    }
}

/// Connects to `cluster`, and creates a disk.
fn create_on(cluster: &Cluster, clusters: &Clusters, env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    block_on(async { crate::create(crate::connect(clusters, cluster).await?, env, config).await })
}

/// Creates a disk over a client of the default configuration.
fn create(clusters: &Clusters, env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    create_on(&Cluster::Shared(ClusterConfig::default()), clusters, env, config)
}

impl OnStub {
    fn new(block_size: u32, blocks: u64) -> Self {
        let pool = pool();
        let image = add_image(&pool, "image", blocks * u64::from(block_size));
        let (env, clusters) = (Env::default(), Clusters::with_library(library()));
        let disk = create(&clusters, &env, config(&pool, block_size)).unwrap();
        Self { env, clusters, pool, image, disk }
    }

    fn remove(&self) {
        block_on(self.env.registry().remove("disk")).unwrap();
    }
}

/// The image of a disk.
fn image_of(disk: &Arc<Bdev>) -> Arc<aryk_librbd::Image> {
    crate::disk_of(disk).unwrap().parts().unwrap().0
}

/// Waits, in real time, until something happened in another thread.
pub(crate) fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    for _ in 0..20_000 {
        if is_done() {
            return;
        }
        pause();
    }
    panic!("{what}: not within 20 s");
}

#[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(1));
}
