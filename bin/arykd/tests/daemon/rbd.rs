//! Ceph disks on the substitute for librbd, which the daemon loads: a cluster that is stuck, and what the daemon gives back
//! although librbd still has its requests.

#![expect(clippy::disallowed_methods, reason = "the test measures time")]

use super::harness::{Daemon, librbd_stub, wait_for};
use super::stuck::{MORE, REVOKED, Vm};
use aryk_front_end::Memory;
use rustix::fs::fstat;
use serde_json::json;
use std::os::fd::BorrowedFd;
use std::time::Instant;

/// The guest address of a request's data in the first region.
fn data() -> u64 {
    Memory::guest_addr(48 << 10)
}

/// A daemon that has attached the disk `d`, whose requests wait while the file `stuck` is in the daemon's directory.
fn start() -> Daemon {
    let daemon = Daemon::start(&["--librbd", &librbd_stub()]);
    daemon.aryk(&["disk", "create", "d", "--rbd", "vms/d+size=1048576+gate=stuck"]).unwrap();
    daemon.aryk(&["attach", "d"]).unwrap();
    daemon
}

fn connect(daemon: &Daemon) -> Vm {
    Vm::connect(&daemon.dir().join("vhost/d"))
}

/// Makes the cluster of the daemon's disk answer, or not.
fn set_stuck(daemon: &Daemon, is_stuck: bool) {
    let gate = daemon.dir().join("stuck");
    match is_stuck {
        true => std::fs::write(gate, "").unwrap(),
        false => std::fs::remove_file(gate).unwrap(),
    }
}

/// Writes a block that is full of `byte`, and waits for it.
fn write_block(vm: &mut Vm, slot: u16, block: u64, byte: u8) {
    vm.memory.whole().write(48 << 10, &[byte; 4096]);
    vm.write(slot, block, data());
    wait_for("the block is written", || vm.status(slot) == 0);
}

/// Whether the daemon maps a memory file.
fn is_mapped(daemon: &Daemon, memory: BorrowedFd<'_>) -> bool {
    let inode = fstat(memory).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
    maps.lines().any(|line| line.split_ascii_whitespace().nth(4) == Some(&inode))
}

#[test]
fn a_stuck_cluster_does_not_keep_memory_that_a_vm_removes() {
    let daemon = start();
    let mut vm = connect(&daemon);
    write_block(&mut vm, 0, 0, 7);
    vm.memory.whole().write(48 << 10, &[9_u8; 4096]);
    set_stuck(&daemon, true);
    vm.read(1, 0, MORE);
    vm.read(2, 0, data());
    daemon.wait_until_busy("d");
    let took = vm.remove(MORE);
    assert!(took < REVOKED, "the removal of memory waited for the cluster: {took:?}");
    assert!(!is_mapped(&daemon, vm.more.fd()), "the daemon keeps the memory");
    assert!(is_mapped(&daemon, vm.memory.fd()));
    set_stuck(&daemon, false);
    wait_for("the requests end", || vm.status(1) != 0xff && vm.status(2) != 0xff);
    assert_eq!(vm.status(2), 0, "the other request goes on");
    let byte = |memory: &Memory, at| memory.whole().read::<u8>(at);
    assert_eq!((byte(&vm.more, 0), byte(&vm.memory, 48 << 10)), (0, 7), "librbd wrote to removed memory");
    // The queue goes on.
    vm.read(3, 0, data());
    wait_for("a request of later", || vm.status(3) == 0);
}

#[test]
fn a_stuck_cluster_keeps_neither_the_memory_nor_the_place_of_a_vm_that_has_gone() {
    let daemon = start();
    let mut vm = connect(&daemon);
    write_block(&mut vm, 0, 0, 7);
    vm.memory.whole().write(48 << 10, &[9_u8; 4096]);
    set_stuck(&daemon, true);
    vm.read(1, 0, data());
    vm.read(2, 0, MORE);
    vm.write(3, 1, data());
    daemon.wait_until_busy("d");
    let Vm { session, memory, more, .. } = vm;
    drop(session);
    let left = Instant::now();
    wait_for("the memory is released", || !is_mapped(&daemon, memory.fd()) && !is_mapped(&daemon, more.fd()));
    println!("the memory of a VM that has gone was released after {:?}", left.elapsed());
    // The successor connects, and its requests wait for those of the first VM.
    let mut next = connect(&daemon);
    next.read(0, 1, data());
    let asked = Instant::now();
    daemon.call("spdk_get_version", json!({})).unwrap();
    println!("the daemon answered after {:?}", asked.elapsed());
    assert_eq!(next.status(0), 0xff);
    set_stuck(&daemon, false);
    wait_for("the successor's read", || next.status(0) == 0);
    let byte = |memory: &Memory, at| memory.whole().read::<u8>(at);
    assert_eq!(
        byte(&next.memory, 48 << 10),
        9,
        "the write of the first VM came after the read of the second"
    );
    assert_eq!(
        (byte(&memory, 48 << 10), byte(&more, 0)),
        (9, 0),
        "librbd wrote to the memory of a VM that had gone"
    );
    drop(next);
    daemon.aryk(&["detach", "d"]).unwrap();
    daemon.aryk(&["disk", "remove", "d"]).unwrap();
}

#[test]
fn the_socket_of_a_disk_in_a_stuck_cluster_can_be_removed() {
    let daemon = start();
    let mut vm = connect(&daemon);
    set_stuck(&daemon, true);
    vm.read(0, 0, data());
    vm.write(1, 1, MORE);
    daemon.wait_until_busy("d");
    let began = Instant::now();
    daemon.aryk(&["detach", "d", "--force"]).unwrap();
    println!("detached after {:?}", began.elapsed());
    assert!(!daemon.dir().join("vhost/d").exists());
    wait_for("the memory is released", || !is_mapped(&daemon, vm.memory.fd()));
    // The removed controller keeps the disk until the cluster has ended its requests.
    let (_, error) = daemon.aryk(&["attach", "d"]).unwrap_err();
    assert!(error.contains("`d` is in use by vhost controller d"), "{error}");
    set_stuck(&daemon, false);
    wait_for("the requests end", || daemon.aryk(&["attach", "d"]).is_ok());
    let mut vm = connect(&daemon);
    vm.read(0, 1, data());
    wait_for("the disk goes on", || vm.status(0) == 0);
}
