//! A host whose daemon has died, and its successor of the same name: no write of the predecessor reaches the disk after the
//! first one of the successor.

use crate::raw::{Raw, capsule, capsule_with, command, pdu};
use crate::stuck::{self, Stuck};
use crate::target::{BLOCK, Running, SUBSYSTEM, until};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvme_fabrics::tcp::{H2cData, Header};
use aryk_nvmf::{Address, Channel};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A target that listens at a second address, too.
fn start() -> (Running, SocketAddr, Arc<Stuck>) {
    let (target, stuck) = stuck::start(2);
    let other = target.run(async |target| {
        let any = Address::tcp("127.0.0.1:0".parse().unwrap());
        target.listen(SUBSYSTEM, any, AnaState::Optimized, Channel::Plain).await.unwrap().socket
    });
    (target, other, stuck)
}

#[test]
fn no_write_of_a_predecessor_lands_after_the_first_of_its_successor() {
    // Without incarnations, a successor is one that comes through the same listener.
    for incarnations in [None, Some([1, 2])] {
        let (target, other, stuck) = start();
        let [before, after] = incarnations.map_or([None; 2], |lives| lives.map(Some));
        // The predecessor hangs: its connections are open. One write is stuck in the disk, and the target waits for the data of
        // another one.
        let (_admin_queue, id) = Raw::admin_in(target.address, before);
        let [mut first, mut second] = [1, 2].map(|qid| Raw::io(target.address, id, qid, 16));
        stuck.is_stuck.store(true, Relaxed);
        first.send(&capsule_with(command(1, io::WRITE, 0, 1, 0), &[1; BLOCK]));
        second.send(&capsule(command(1, io::WRITE, 1, 4, 4 * BLOCK as u32)));
        let Some((Header::R2t(r2t), _)) = second.receive() else { panic!("the target asks for the data") };
        until(|| stuck.writes.load(Relaxed) == 1);

        let address = if after.is_some() { other } else { target.address };
        let successor = std::thread::spawn(move || {
            let (admin_queue, id) = Raw::admin_in(address, after);
            (admin_queue, Raw::io(address, id, 1, 16))
        });
        // The successor is there, since the queues of its predecessor end. It is not admitted before they have ended.
        assert!(first.completion().is_none() && second.completion().is_none());
        let data = H2cData { cid: 1, tag: r2t.tag, offset: 0, len: r2t.len, is_last: true };
        second.send(&pdu(&Header::H2cData(data), &[2; 4 * BLOCK]));
        first.send(&capsule_with(command(2, io::WRITE, 5, 1, 0), &[3; BLOCK]));
        assert!(!successor.is_finished() && stuck.landed.lock().unwrap().is_empty());
        stuck.is_stuck.store(false, Relaxed);
        let (_admin_queue, mut queue) = successor.join().unwrap();
        assert_eq!(*stuck.landed.lock().unwrap(), [0], "it has landed before the successor is admitted");
        queue.send(&capsule_with(command(1, io::WRITE, 7, 1, 0), &[4; BLOCK]));
        assert_eq!(queue.completion().unwrap().status().code(), Code::SUCCESS);
        until(|| target.list()[0].controllers.len() == 1);
        assert_eq!(*stuck.landed.lock().unwrap(), [0, 7]);
        target.stop();
    }
}

#[test]
fn a_second_path_is_no_successor() {
    for incarnation in [None, Some(1)] {
        let (target, other, stuck) = start();
        let (_admin_queue, id) = Raw::admin_in(target.address, incarnation);
        let mut first = Raw::io(target.address, id, 1, 16);
        stuck.is_stuck.store(true, Relaxed);
        first.send(&capsule_with(command(1, io::WRITE, 0, 1, 0), &[1; BLOCK]));
        until(|| stuck.writes.load(Relaxed) == 1);
        // It is admitted although the first path has a write that does not end.
        let (_second_admin_queue, second) = Raw::admin_in(other, incarnation);
        let mut second = Raw::io(other, second, 1, 16);
        stuck.is_stuck.store(false, Relaxed);
        assert_eq!(first.completion().unwrap().status().code(), Code::SUCCESS);
        for queue in [&mut first, &mut second] {
            queue.send(&capsule_with(command(2, io::WRITE, 3, 1, 0), &[2; BLOCK]));
            assert_eq!(queue.completion().unwrap().status().code(), Code::SUCCESS);
        }
        assert_eq!((target.queues(), stuck.landed.lock().unwrap().len()), (2, 3));
        target.stop();
    }
}
