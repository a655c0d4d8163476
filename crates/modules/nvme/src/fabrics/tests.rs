//! The module against a target of this project over the loopback interface, and against scripted targets.

mod authentication;
mod conformance;
mod hostile;
mod loss;
mod paths;
mod proxy;
mod slow_command;
mod target;
mod tls;

use crate::Exposed;
use crate::fabrics::{RemoteConfig, RemoteControllers};
use aryk_bdev::{Bdev, Env};
use aryk_bdev_conformance::block_on;
use std::net::SocketAddr;
use std::sync::Arc;
use target::{HOST, Running, SUBSYSTEM};

/// A configuration whose only disk is `disk`.
fn config(address: SocketAddr) -> RemoteConfig {
    let (subsystem, host) = (SUBSYSTEM.parse().unwrap(), HOST.parse().unwrap());
    RemoteConfig {
        exposed: Exposed::One { nsid: 1, disk: "disk".to_owned() },
        ..RemoteConfig::new("nv", address, subsystem, host, [7; 16])
    }
}

/// A target, and a disk of it here.
struct OnTarget {
    env: Env,
    controllers: RemoteControllers,
    target: Running,
    disk: Arc<Bdev>,
}

impl OnTarget {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut RemoteConfig)) -> Self {
        let target = Running::start();
        let address = target.address;
        Self::at(target, address, change)
    }

    fn at(target: Running, address: SocketAddr, change: impl FnOnce(&mut RemoteConfig)) -> Self {
        let (env, controllers) = (Env::default(), RemoteControllers::default());
        let mut config = config(address);
        change(&mut config);
        let disk = block_on(controllers.attach(&env, config)).unwrap().remove(0);
        Self { env, controllers, target, disk }
    }
}

impl Drop for OnTarget {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // A test that removes the only disk of the controller ends it.
            let _ = block_on(self.controllers.detach("nv"));
            until("the end of the controller", || self.controllers.list().is_empty());
        }
        self.target.stop();
    }
}

/// Waits, in real time, until something happened in another thread.
#[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
fn until(what: &str, mut is_done: impl FnMut() -> bool) {
    for _ in 0..20_000 {
        if is_done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("{what}: not within 20 s");
}
