//! The test cases. Each uses the same small cluster, one case after the other: a case that stops the cluster's daemons, or
//! starts a cluster of its own, disturbs no other case.

mod cluster;
mod disks;
mod stack;

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::Cluster;

/// What all cases share: the cluster and the programs.
#[derive(Debug)]
pub struct Lab {
    /// A cluster of [`crate::Kind::SMALL`].
    pub cluster: Cluster,
    /// The directory of `arykd` and `aryk`.
    pub bin: PathBuf,
}

/// A test case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name, with a `/` between group and variant.
    pub name: &'static str,
    body: fn(&Lab) -> Result<()>,
}

impl Case {
    /// Runs the case.
    ///
    /// # Errors
    /// The case's failure, or a daemon of the cluster has ended.
    pub fn run(&self, lab: &mut Lab) -> Result<()> {
        (self.body)(lab)?;
        lab.cluster.check_alive().context("after the case")
    }
}

/// All cases.
#[must_use]
pub fn list() -> Vec<Case> {
    [&cluster::CASES[..], &disks::CASES, &stack::CASES].concat()
}
