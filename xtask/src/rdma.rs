//! `cargo xtask rdma-cost`: what a request costs a daemon that shares a disk, and one that uses it, over TCP and over RDMA,
//! in the same guest, whose kernel has RDMA over its network device.
//!
//! The numbers are those of a guest without hardware acceleration, and of RDMA by software: only their ratios say something, and
//! nothing about the speed of a device.

use std::path::PathBuf;

use anyhow::Result;
use aryk_guest_tests::Image;
use aryk_guest_tests::cases::{Lab, rdma};

use crate::{install, workspace};

pub(crate) fn run() -> Result<()> {
    install::ensure(install::GUEST)?;
    let bin = workspace::build_programs()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let costs = rdma::costs(&Lab { image, bin, tests: PathBuf::new() })?;
    println!("| transport | workload | daemon, µs per request | whole guest, µs per request |");
    println!("| --- | --- | ---: | ---: |");
    for rdma::Cost { transport, workload, of_daemon_us, of_guest_us } in costs {
        println!("| {transport} | {workload} | {of_daemon_us} | {of_guest_us} |");
    }
    Ok(())
}
