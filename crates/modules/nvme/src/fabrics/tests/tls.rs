//! Connections with TLS.

use super::target::{BLOCK, HOST, Running, SUBSYSTEM};
use super::{OnTarget, config};
use crate::fabrics::{ConnectError, RemoteControllers, RemoteError};
use aryk_bdev::{Access, Env, Status};
use aryk_bdev_conformance::{Bench, Shape, block_on, contents};
use aryk_nvme_fabrics::psk::ConfiguredPsk;
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Channel, Target, TlsKey};
use aryk_tls::TlsError;
use std::net::SocketAddr;

const SHA256: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const SHA384: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
const PLAIN: &str = "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";

fn psk(text: &str) -> ConfiguredPsk {
    ConfiguredPsk::parse(text.as_bytes()).unwrap()
}

/// A target whose host has a key, and where it uses it.
fn target(text: &str) -> (Running, SocketAddr) {
    let target = Running::start();
    let (host, subsystem) = (HOST.parse().unwrap(), SUBSYSTEM.parse().unwrap());
    let key = TlsKey::new("key".to_owned(), &psk(text), &host, &subsystem).unwrap();
    let address = target.run(async move |target: Target| {
        target.set_tls_key(SUBSYSTEM, host, key).unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        target.listen(SUBSYSTEM, Address::tcp(any), AnaState::Optimized, Channel::Tls).await.unwrap().socket
    });
    (target, address)
}

#[test]
fn data_is_the_same_on_both_sides_also_after_a_loss() {
    for text in [SHA256, SHA384] {
        let (target, address) = target(text);
        let on = OnTarget::at(target, address, |config| config.set_tls_key(&psk(text)).unwrap());
        let mut bench = Bench::new();
        let mut disk = bench.open(on.env.registry(), "disk", Access::Shared, 4, 64 << 10);
        for round in 1..=3 {
            disk.write(3, &contents(round, 3, 16, BLOCK), Shape::Single, &mut bench);
            assert_eq!(disk.finish(&mut bench).status, Status::Ok);
            let controller = on.controllers.find("nv").unwrap();
            controller.reset();
            bench.until("the loss", || controller.info().losses == round);
            disk.read(3, 16, Shape::Single, &mut bench);
            let outcome = disk.finish(&mut bench);
            assert!(outcome.status == Status::Ok && outcome.data == contents(round, 3, 16, BLOCK));
        }
        disk.close(&mut bench);
    }
}

#[test]
fn each_side_that_is_not_as_the_other_is_told_so() {
    let (mut target, secure) = target(SHA256);
    let plain = target.address;
    let attach = |address, text: Option<&str>| {
        let mut config = config(address);
        if let Some(text) = text {
            config.set_tls_key(&psk(text)).unwrap();
        }
        match block_on(RemoteControllers::default().attach(&Env::default(), config)).unwrap_err() {
            RemoteError::Target { reason, .. } => reason,
            other => panic!("{other}"),
        }
    };
    let found = attach(secure, Some(PLAIN));
    assert!(matches!(found, ConnectError::Tls(TlsError::Refused(51))), "another key: {found}");
    let found = attach(secure, Some(SHA384));
    assert!(matches!(found, ConnectError::Tls(TlsError::Refused(115))), "another hash: {found}");
    let found = attach(secure, None);
    assert!(matches!(found, ConnectError::Unsupported(text) if text.contains("TLS")), "no key: {found}");
    let found = attach(plain, Some(SHA256));
    assert!(matches!(found, ConnectError::Tls(TlsError::NotTls)), "a listener without TLS: {found}");
    let found = attach(plain, None);
    assert!(matches!(found, ConnectError::Status { command: "Connect", .. }), "a host with a key: {found}");
    target.stop();
}
