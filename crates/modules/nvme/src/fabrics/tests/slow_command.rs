//! A command of a client that the target takes long for: what else the admin queue is for goes on.

use super::loss::pause;
use super::target::Running;
use super::{OnTarget, until};
use aryk_bdev_conformance::block_on;
use aryk_nvme::admin;
use aryk_nvme::spec::log;
use aryk_nvme::spec::opcode::admin::GET_LOG_PAGE;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::thread::spawn;
use std::time::Duration;

/// What the test and the proxy share.
#[derive(Default)]
struct Gate {
    is_open: AtomicBool,
    /// Commands that were kept back.
    kept: AtomicU32,
}

/// A proxy of a target that keeps reads of the SMART log back until the gate is open, and passes on what is behind them.
fn start_proxy(target: SocketAddr, gate: &Arc<Gate>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, gate) = (listener.local_addr().unwrap(), Arc::clone(gate));
    spawn(move || {
        for mut host in listener.incoming().flatten() {
            let mut target = TcpStream::connect(target).unwrap();
            let (mut to_host, mut from_target) = (host.try_clone().unwrap(), target.try_clone().unwrap());
            spawn(move || io::copy(&mut from_target, &mut to_host));
            let gate = Arc::clone(&gate);
            spawn(move || pass(&mut host, &mut target, &gate));
        }
    });
    address
}

/// Passes the PDUs of a host on.
fn pass(host: &mut TcpStream, target: &mut TcpStream, gate: &Arc<Gate>) -> io::Result<()> {
    loop {
        let mut pdu = vec![0; 8];
        host.read_exact(&mut pdu)?;
        let len = u32::from_le_bytes(pdu[4..8].try_into().unwrap());
        pdu.resize(len as usize, 0);
        host.read_exact(&mut pdu[8..])?;
        let is_kept = pdu[0] == 4 && pdu[8] == GET_LOG_PAGE && pdu[8 + 40] == log::SMART;
        if !is_kept {
            target.write_all(&pdu)?;
            continue;
        }
        gate.kept.fetch_add(1, SeqCst);
        let (mut target, gate) = (target.try_clone()?, Arc::clone(gate));
        spawn(move || {
            while !gate.is_open.load(SeqCst) {
                pause(Duration::from_millis(1));
            }
            target.write_all(&pdu)
        });
    }
}

#[test]
fn a_slow_command_of_a_client_does_not_keep_the_host_from_saying_that_it_is_there() {
    let (target, gate) = (Running::start(), Arc::<Gate>::default());
    let address = start_proxy(target.address, &gate);
    // The target ends the controller of a host that says nothing for a second.
    let on = OnTarget::at(target, address, |config| config.keep_alive = Duration::from_secs(1));
    let controllers = || {
        let list = on.target.run(async |target: aryk_nvmf::Target| target.list());
        list.iter().flat_map(|of| &of.controllers).map(|host| host.id).collect::<Vec<u16>>()
    };
    let before = controllers();
    let controller = on.controllers.find("nv").unwrap();
    let client = spawn(move || {
        let read = || admin::get_log(log::SMART, u32::MAX, 0, 512, false);
        [block_on(controller.admin(read())), block_on(controller.admin(read()))]
    });
    until("the command", || gate.kept.load(SeqCst) == 1);
    pause(Duration::from_millis(2500));
    assert_eq!(controllers(), before);
    gate.is_open.store(true, SeqCst);
    for answer in client.join().unwrap() {
        let answer = answer.unwrap();
        assert!(answer.status.is_success() && answer.data.len() == 512, "{answer:?}");
    }
    assert_eq!((controllers(), gate.kept.load(SeqCst)), (before, 2));
}
