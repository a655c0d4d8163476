//! The network is cut in the middle of openings, at different times: they end when it is back.

use std::cell::{Cell, RefCell};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use serde_json::{Value, json};

use super::super::image;
use super::{ROUNDS, SLACK};
use crate::Cluster;
use crate::network::{Cut, Network};
use crate::vm::{Request, Vm};

const IMAGES: usize = 5;
/// Between the beginnings of two openings, and of the last one and the cut, which takes some milliseconds.
const STEP: Duration = Duration::from_millis(1);
/// An opening that has all replies of the cluster ends in less.
const SETTLED: Duration = Duration::from_millis(100);

/// The openings of one round after the other.
pub(super) struct Openings<'a> {
    network: &'a Network,
    directory: &'a Path,
    /// Images that were used so far.
    images: Cell<usize>,
    /// The names and calls of this round.
    calls: RefCell<Vec<(String, UnixStream)>>,
}

/// The name of an image.
fn name(number: usize) -> String {
    format!("cut{number}")
}

impl<'a> Openings<'a> {
    /// Creates the images of all rounds, which takes long beside a load.
    pub fn new(cluster: &Cluster, network: &'a Network, directory: &'a Path) -> Result<Self> {
        for number in 0..ROUNDS * IMAGES {
            cluster.create_image(&name(number), "4M")?;
        }
        Ok(Self { network, directory, images: Cell::new(0), calls: RefCell::new(Vec::new()) })
    }

    /// Begins the openings of a round, and cuts the network.
    pub fn begin(&self, daemon: &Daemon) -> Result<Cut<'a>> {
        let first = self.images.replace(self.images.get() + IMAGES);
        let mut calls = self.calls.borrow_mut();
        for name in (first..first + IMAGES).map(name) {
            let mut stream = UnixStream::connect(self.directory.join("rpc.sock"))?;
            let call =
                json!({"jsonrpc": "2.0", "id": 1, "method": "bdev_rbd_create", "params": image(&name)});
            stream.write_all(call.to_string().as_bytes())?;
            calls.push((name, stream));
            std::thread::sleep(STEP);
        }
        let cut = self.network.cut()?;
        std::thread::sleep(SETTLED);
        let disks = daemon.rpc("bdev_get_bdevs", &json!({}))?;
        let disks = disks.as_array().context("no list of disks")?;
        let is_open = |name: &str| disks.iter().any(|disk| disk["name"] == name);
        let open = calls.iter().filter(|(name, _)| is_open(name)).count();
        println!("{} of {IMAGES} openings were cut", IMAGES - open);
        ensure!(open < IMAGES, "each image was open before the network was cut");
        Ok(cut)
    }

    /// The images of the round are open, and have what is written to them.
    pub fn check(&self, daemon: &Daemon) -> Result<()> {
        for (name, mut stream) in self.calls.take() {
            let mut text = String::new();
            stream.set_read_timeout(Some(SLACK))?;
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_string(&mut text).with_context(|| format!("the opening of {name}"))?;
            let reply: Value = serde_json::from_str(&text)?;
            ensure!(reply["result"] == *name, "{reply}");
            let mut vm = Vm::connect(&daemon.attach(&name, &[])?)?;
            vm.succeed(Request::Write { at: 0, data: &[7; 4096] })?;
            ensure!(vm.read(0, 4096)? == [7; 4096], "the disk has other data");
        }
        Ok(())
    }
}
