//! The test cases. Each uses the same small cluster, one case after the other: a case that stops the cluster's daemons, or
//! starts a cluster of its own, disturbs no other case.

mod cluster;
mod disk;
mod disks;
mod disturbed;
mod failing;
mod guest;
mod image;
mod killed;
mod stack;
mod stuck;
mod threads;
mod users;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use aryk_guest_tests::{Daemon, Image};
use aryk_rpc_client::Client;
use serde_json::{Value, json};

use crate::Cluster;
use crate::cluster::POOL;

/// What all cases share: the cluster and the programs.
#[derive(Debug)]
pub struct Lab {
    /// A cluster of [`crate::Kind::SMALL`].
    pub cluster: Cluster,
    /// The directory of the tests' build of `arykd`, `aryk` and `aryk-crash-tests`.
    pub bin: PathBuf,
    /// The image of guests.
    pub image: Image,
}

/// A test case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Its name, with a `/` between group and variant.
    pub name: &'static str,
    body: fn(&Site<'_>) -> Result<()>,
}

/// How a case has ended that did not fail.
#[derive(Clone, Copy, Debug)]
pub enum Ended {
    /// All of it was tested.
    Passed,
    /// At least a part was not tested, for this reason.
    Skipped(&'static str),
}

/// Why a case does not go on: its error, which is no failure.
#[derive(Debug, thiserror::Error)]
#[error("skipped: {0}")]
struct Skipped(&'static str);

impl Case {
    /// Runs the case in an empty directory.
    ///
    /// # Errors
    /// The case's failure, with the end of the daemon's log; or a daemon of the cluster has ended.
    pub fn run(&self, lab: &mut Lab) -> Result<Ended> {
        let directory = tempfile::tempdir()?;
        let site = Site { lab, directory: directory.path() };
        let ended = match (self.body)(&site) {
            Ok(()) => Ended::Passed,
            Err(error) => match error.downcast_ref() {
                Some(Skipped(why)) => Ended::Skipped(why),
                None => return Err(error.context(site.log())),
            },
        };
        lab.cluster.check_alive().context("after the case")?;
        Ok(ended)
    }
}

/// The cases whose name contains `part`: those of the group `long` only if `part` names the group.
#[must_use]
pub fn named(part: &str) -> Vec<Case> {
    let is_long = |case: &Case| case.name.starts_with("long/");
    let is_meant = |case: &Case| case.name.contains(part) && (!is_long(case) || part.starts_with("long"));
    list().into_iter().filter(is_meant).collect()
}

fn list() -> Vec<Case> {
    let groups: [&[Case]; 12] = [
        &cluster::CASES,
        &disk::CASES,
        &disks::CASES,
        &users::CASES,
        &disturbed::CASES,
        &stuck::CASES,
        &failing::CASES,
        &killed::CASES,
        &threads::CASES,
        &guest::CASES,
        &image::CASES,
        &stack::CASES,
    ];
    groups.concat()
}

/// The name under which the cluster is registered with `arykd`.
const CLIENT: &str = "ceph";

/// The place where one case runs.
struct Site<'a> {
    lab: &'a Lab,
    directory: &'a Path,
}

impl Site<'_> {
    const fn cluster(&self) -> &Cluster {
        &self.lab.cluster
    }

    /// Starts a daemon with `options`.
    fn daemon(&self, options: &[&str]) -> Result<Daemon> {
        Daemon::start(&self.lab.bin, self.directory, options)
    }

    /// Starts a daemon that is a client of the shared cluster.
    fn client(&self, options: &[&str]) -> Result<Daemon> {
        let daemon = self.daemon(options)?;
        let cluster = json!({"name": CLIENT, "config_file": self.cluster().conf()});
        daemon.rpc("bdev_rbd_register_cluster", &cluster)?;
        Ok(daemon)
    }

    /// Creates an image of the shared cluster, and a disk of the same name in it; returns the disk's socket.
    fn disk(&self, daemon: &Daemon, name: &str, size: &str) -> Result<PathBuf> {
        self.cluster().create_image(name, size)?;
        daemon.rpc("bdev_rbd_create", &image(name))?;
        daemon.attach(name, &[])
    }

    /// Calls a method that must be refused; returns the code and the whole error.
    fn refused(&self, method: &str, params: &Value) -> Result<(i64, String)> {
        let mut client = Client::connect(&self.directory.join("rpc.sock")).context("the RPC socket")?;
        match client.call(method, params)? {
            Ok(result) => bail!("{method} {params} was not refused: {result}"),
            Err(error) => {
                let code = error["code"].as_i64().context("an error without a code")?;
                Ok((code, error.to_string()))
            }
        }
    }

    /// The end of the daemon's log.
    fn log(&self) -> String {
        const LINES: usize = 20;
        let log = std::fs::read_to_string(self.directory.join("arykd.log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        format!("arykd said:\n{}", lines[lines.len().saturating_sub(LINES)..].join("\n"))
    }
}

/// The number in an environment variable.
fn number(variable: &str, default: usize) -> Result<usize> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable}={text}")),
        Err(_) => Ok(default),
    }
}

/// The parameters of `bdev_rbd_create` for the image `name`, with a disk of the same name.
fn image(name: &str) -> Value {
    json!({"name": name, "cluster_name": CLIENT, "pool_name": POOL, "rbd_name": name, "block_size": 512})
}
