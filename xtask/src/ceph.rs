//! `cargo xtask ceph`: a Ceph cluster on this host, for trying out and for debugging, until Ctrl-C.

use std::time::Duration;

use anyhow::Result;
use aryk_ceph_tests::{Cluster, Kind, Store, cluster};
use aryk_guest_tests::process;

use crate::install;
use crate::progress::Clock;

/// Interval of checks whether the cluster still runs.
const INTERVAL: Duration = Duration::from_millis(200);

/// The shape of the cluster.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of OSDs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    osds: u32,
    /// Copies of each object
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    copies: u32,
    /// Keep the objects in files (BlueStore) instead of memory
    #[arg(long)]
    file: bool,
    /// Clients authenticate by keys
    #[arg(long)]
    cephx: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    install::ensure(install::CEPH)?;
    let clock = Clock::start();
    let store = if args.file { Store::File } else { Store::Memory };
    let kind = Kind { osds: args.osds, copies: args.copies, store, authenticated: args.cephx };
    let mut cluster = Cluster::start(&kind)?;
    let conf = cluster.conf();
    clock
        .say(&format!("A Ceph cluster with the pool {} runs until Ctrl-C. Its clients need:", cluster::POOL));
    println!("export CEPH_CONF={}", conf.display());
    while process::check_interrupt().is_ok() {
        cluster.check_alive()?;
        std::thread::park_timeout(INTERVAL);
    }
    Ok(())
}
