//! Hosts and targets that prove to each other who they are.

use super::target::{BLOCK, HOST, Running, SUBSYSTEM};
use super::{OnTarget, config};
use crate::fabrics::{ConnectError, HostSecrets, RemoteControllers, RemoteError};
use aryk_bdev::{Access, Env, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on, contents};
use aryk_nvme_fabrics::chap::{Allowed, Failure, Group, Hash, Secret, Secrets};
use aryk_nvmf::{HostKeys, Target};
use std::sync::Arc;

/// Secrets of 32 bytes; the last one is of neither side.
pub(super) const OF_HOST: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OF_CONTROLLER: &str = "DHHC-1:00:MDEyMzQ1Njc4OTo7PD0+P0BBQkNERUZHSElKS0xNTk+V+ai1:";

pub(super) fn secrets(host: &str, controller: Option<&str>) -> Arc<Secrets> {
    let parse = |text: &str| Secret::parse(text.as_bytes()).unwrap();
    Arc::new(Secrets { host: parse(host), controller: controller.map(parse) })
}

/// A target whose host must prove who it is, and which can do so itself.
fn target() -> Running {
    let target = Running::start();
    target.run(async |target: Target| {
        let keys = HostKeys {
            secrets: secrets(OF_HOST, Some(OF_CONTROLLER)),
            key: "host".to_owned(),
            controller_key: Some("controller".to_owned()),
        };
        target.add_host(SUBSYSTEM, HOST.parse().unwrap(), Some(keys)).unwrap();
    });
    target
}

#[test]
fn both_sides_prove_who_they_are_on_each_connection() {
    let target = target();
    let address = target.address;
    let on = OnTarget::at(target, address, |config| {
        config.secrets = HostSecrets::new(Some(secrets(OF_HOST, Some(OF_CONTROLLER))));
    });
    let mut bench = Bench::new();
    let mut disk = bench.open(on.env.registry(), "disk", Access::Shared, 4, 64 << 10);
    disk.write(3, &contents(1, 3, 1, BLOCK), Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    let controller = on.controllers.find("nv").unwrap();
    controller.reset();
    bench.until("the loss", || controller.info().losses == 1);
    disk.read(3, 1, Shape::Single, &mut bench);
    let outcome = disk.finish(&mut bench);
    assert!(outcome.status == Status::Ok && outcome.data == contents(1, 3, 1, BLOCK));
    disk.close(&mut bench);
}

#[test]
fn secrets_are_changed_while_the_controller_is_in_use() {
    let target = target();
    let address = target.address;
    let on = OnTarget::at(target, address, |config| {
        config.secrets = HostSecrets::new(Some(secrets(OF_HOST, None)));
    });
    let controller = on.controllers.find("nv").unwrap();
    let set = |secrets| block_on(controller.set_secrets(secrets));
    // One that the target does not know is refused, and the earlier one stays.
    assert!(matches!(
        set(Some(secrets(OF_CONTROLLER, None))),
        Err(RemoteError::Target { reason: ConnectError::Authentication(_), .. })
    ));
    let mut bench = Bench::new();
    let lost = |losses| {
        let path = &controller.info().paths[0];
        (path.losses == losses).then_some(path.is_connected)
    };
    bench.until("the path", || lost(1) == Some(true));
    let keys =
        HostKeys { secrets: secrets(OF_CONTROLLER, None), key: "new".to_owned(), controller_key: None };
    on.target
        .run(async |target: Target| target.add_host(SUBSYSTEM, HOST.parse().unwrap(), Some(keys)).unwrap());
    set(Some(secrets(OF_CONTROLLER, None))).unwrap();
    assert_eq!(controller.info().losses, 1);
    controller.reset();
    bench.until("the path", || lost(2) == Some(true));
    // Without a secret, the next connection is refused.
    set(None).unwrap();
    controller.reset();
    bench.until("the loss", || lost(3) == Some(false));
    set(Some(secrets(OF_CONTROLLER, None))).unwrap();
    bench.until("the path", || lost(3) == Some(true));
}

#[test]
fn a_side_that_proves_nothing_is_refused() {
    let mut target = target();
    let attach = |address, secrets| {
        let mut config = config(address);
        config.secrets = HostSecrets::new(secrets);
        let error = block_on(RemoteControllers::default().attach(&Env::default(), config)).unwrap_err();
        match error {
            RemoteError::Target { reason, .. } => reason,
            other => panic!("{other}"),
        }
    };
    let address = target.address;
    assert!(matches!(attach(address, None), ConnectError::Unsupported(_)), "no secret");
    let failed = |error| matches!(error, ConnectError::Authentication(Failure::Failed));
    assert!(failed(attach(address, Some(secrets(OF_CONTROLLER, None)))), "another secret");
    let only = |hashes: &[Hash]| {
        let mut config = config(address);
        config.secrets = HostSecrets::new(Some(secrets(OF_HOST, None)));
        config.allowed = Allowed { hashes: hashes.to_vec(), groups: vec![Group::Null] };
        let controllers = RemoteControllers::default();
        let attached = block_on(controllers.attach(&Env::default(), config)).is_ok();
        // It has ended by itself if it was refused.
        let _ = block_on(controllers.detach("nv"));
        attached
    };
    assert!(only(&[Hash::Sha256]), "a hash that both have");
    assert!(!only(&[]), "no hash");
    let other = Some(secrets(OF_HOST, Some(OF_HOST)));
    assert!(failed(attach(address, other)), "the controller has another secret");
    target.stop();
    // A target that asks for nothing does not prove who it is either.
    let mut open = Running::start();
    let both = Some(secrets(OF_HOST, Some(OF_CONTROLLER)));
    assert!(matches!(attach(open.address, both), ConnectError::Unsupported(_)));
    open.stop();
}
