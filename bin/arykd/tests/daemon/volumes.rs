//! Pools and volumes of the real daemon: by its command line, over restarts and `kill -9`, with data checked by a front-end.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code, wait_for};
use aryk_reactor::CoreSet;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const PIECE: usize = 64 << 10;

/// A daemon with the pool `p` on the disk `store`, and the volume `p/vm`, which is attached.
fn start() -> Daemon {
    let daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    let file = daemon.dir().join("store.img").display().to_string();
    daemon.aryk(&["disk", "create", "store", "--file", &file, "--size", "1G"]).unwrap();
    daemon.aryk(&["pool", "create", "p", "--disk", "store"]).unwrap();
    daemon.aryk(&["volume", "create", "p/vm", "--size", "64M"]).unwrap();
    daemon.aryk(&["attach", "p/vm"]).unwrap();
    daemon
}

fn connect(daemon: &Daemon, controller: &str) -> FrontEnd {
    FrontEnd::connect(&daemon.dir().join("vhost").join(controller))
}

fn write(vm: &mut FrontEnd, piece: u64, byte: u8) {
    vm.write(piece * PIECE as u64, &[byte; PIECE]).unwrap();
}

fn read(vm: &mut FrontEnd, piece: u64) -> Vec<u8> {
    vm.read(piece * PIECE as u64, PIECE).unwrap()
}

#[test]
fn volumes_snapshots_and_controllers_are_there_again_after_kill_9() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    for piece in 0..64 {
        write(&mut vm, piece, piece as u8 + 1);
    }
    vm.flush().unwrap();
    daemon.aryk(&["snapshot", "create", "p/vm@a"]).unwrap();
    for piece in 0..32 {
        write(&mut vm, piece, 200);
    }
    vm.flush().unwrap();
    daemon.aryk(&["volume", "clone", "p/vm@a", "clone"]).unwrap();
    drop(vm);
    for round in 0..3 {
        if round == 1 {
            daemon.end_and_restart();
        } else {
            daemon.kill_and_restart();
        }
        daemon.wait_until_ready();
        wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
        let mut vm = connect(&daemon, "p-vm");
        for piece in 0..64 {
            let byte = if piece < 32 { 200 } else { piece as u8 + 1 };
            assert_eq!(read(&mut vm, piece), [byte; PIECE], "piece {piece} in round {round}");
        }
        drop(vm);
        daemon.aryk(&["attach", "p/clone", "--controller", "c"]).unwrap();
        let mut vm = connect(&daemon, "c");
        for piece in 0..64 {
            assert_eq!(read(&mut vm, piece), [piece as u8 + 1; PIECE], "piece {piece} of the clone");
        }
        drop(vm);
        daemon.aryk(&["detach", "c"]).unwrap();
    }
    let checked = daemon.aryk(&["pool", "check", "p"]).unwrap();
    assert!(checked.contains("No damage"), "{checked}");
    let changed =
        daemon.call("aryk_volume_get_changed", json!({"volume": "p/vm", "since": "p/vm@a"})).unwrap();
    assert_eq!(changed, json!([{"offset": 0, "bytes": 32 * PIECE}]));
    // The snapshot has 32 pieces that only the clone shows, too, and 32 that the volume shows as well.
    let space = daemon.call("aryk_volume_get_space", json!({"pool": "p"})).unwrap();
    let of = |alias: &str| space.as_array().unwrap().iter().find(|of| of["alias"] == alias).unwrap().clone();
    let (volume, snapshot) = (of("p/vm"), of("p/vm@a"));
    assert_eq!((&volume["own_bytes"], &volume["shared_bytes"]), (&json!(32 * PIECE), &json!(32 * PIECE)));
    assert_eq!((&snapshot["own_bytes"], &snapshot["shared_bytes"]), (&json!(0), &json!(64 * PIECE)));
    assert!(daemon.aryk(&["volume", "space", "p"]).unwrap().contains("p/vm@a"));
    daemon.aryk(&["volume", "inflate", "p/clone"]).unwrap();
    let volumes = daemon.aryk(&["volume", "list"]).unwrap();
    let clone = volumes.lines().find(|line| line.starts_with("p/clone")).unwrap();
    assert!(!clone.contains("vm@a"), "{clone}");
    daemon.aryk(&["volume", "set-parent", "p/clone", "p/vm@a"]).unwrap();
    let volumes = daemon.aryk(&["volume", "list"]).unwrap();
    let clone = volumes.lines().find(|line| line.starts_with("p/clone")).unwrap();
    assert!(clone.contains("vm@a"), "{clone}");
    let (_, error) = daemon.aryk(&["volume", "set-parent", "p/vm", "p/vm@a"]).unwrap_err();
    assert!(error.contains("in use") || error.contains("already"), "{error}");
    daemon.aryk(&["detach", "p-vm"]).unwrap();
    daemon.aryk(&["snapshot", "revert", "p/vm", "p/vm@a"]).unwrap_err();
    daemon.aryk(&["snapshot", "revert", "p/vm", "p/vm@a", "--discard-changes"]).unwrap();
    daemon.aryk(&["attach", "p/vm"]).unwrap();
    let mut vm = connect(&daemon, "p-vm");
    assert_eq!(read(&mut vm, 3), [4; PIECE]);
}

#[test]
fn volumes_on_an_image_are_there_again_after_kill_9() {
    let mut daemon = start();
    let file = daemon.dir().join("golden.raw");
    let image: Vec<u8> = (0..16).flat_map(|piece| [piece + 100; PIECE]).collect();
    std::fs::write(&file, &image).unwrap();
    let file = file.to_str().unwrap();
    let create = |name| daemon.aryk(&["volume", "create", name, "--image", file, "--size", "8M"]);
    let made = create("p/one").unwrap();
    assert!(made.contains("read-only disk 'golden'"), "{made}");
    // The file has a disk now.
    assert!(!create("p/two").unwrap().contains("read-only"));
    for name in ["p/one", "p/two"] {
        daemon.aryk(&["attach", name]).unwrap();
    }
    write(&mut connect(&daemon, "p-one"), 3, 1);
    let list = daemon.aryk(&["volume", "list"]).unwrap();
    assert!(list.lines().any(|line| line.starts_with("p/one") && line.contains("golden")), "{list}");
    let (_, error) = daemon.aryk(&["disk", "remove", "golden"]).unwrap_err();
    assert!(error.contains("in use") && error.contains("p-one"), "{error}");
    daemon.kill_and_restart();
    daemon.wait_until_ready();
    for (name, own) in [("p-one", 1), ("p-two", 103)] {
        wait_for("the controller", || daemon.dir().join("vhost").join(name).exists());
        let mut vm = connect(&daemon, name);
        assert_eq!((read(&mut vm, 3), read(&mut vm, 15)), (vec![own; PIECE], vec![115; PIECE]));
        assert_eq!(read(&mut vm, 16), [0; PIECE], "behind the end of the image");
    }
    assert_eq!(std::fs::read(file).unwrap(), image);
}

#[test]
fn a_renamed_volume_stays_its_vms() {
    let mut daemon = start();
    write(&mut connect(&daemon, "p-vm"), 0, 1);
    daemon.aryk(&["snapshot", "create", "p/vm@s"]).unwrap();
    write(&mut connect(&daemon, "p-vm"), 0, 2);
    daemon.aryk(&["volume", "rename", "p/vm", "old"]).unwrap();
    daemon.aryk(&["volume", "clone", "p/vm@s", "vm"]).unwrap();
    daemon.kill_and_restart();
    daemon.wait_until_ready();
    wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
    assert_eq!(read(&mut connect(&daemon, "p-vm"), 0), [2; PIECE]);
}

#[test]
fn a_vm_cannot_write_a_pool_that_is_opened() {
    let mut daemon = start();
    let (store, given) = (daemon.dir().join("store.img"), daemon.dir().join("given.img"));
    daemon.aryk(&["disk", "create", "given", "--file", given.to_str().unwrap(), "--size", "1G"]).unwrap();
    daemon.aryk(&["attach", "given"]).unwrap();
    daemon.aryk(&["pool", "rename", "p", "forged"]).unwrap();
    daemon.kill();
    // As its VM could have written it.
    std::fs::copy(&store, &given).unwrap();
    std::fs::remove_file(&store).unwrap();
    daemon.restart();
    daemon.wait_until_ready();
    wait_for("the controller", || daemon.dir().join("vhost/given").exists());
    daemon.call("bdev_wait_for_examine", json!({})).unwrap();
    assert!(daemon.aryk(&["pool", "list"]).unwrap().contains("There are no pools"));
    // Nor when it is asked for.
    let (_, error) = daemon.aryk(&["pool", "open", "--disk", "given"]).unwrap_err();
    assert!(error.contains("in use"), "{error}");
    daemon.call("bdev_examine", json!({"name": "given"})).unwrap();
    daemon.call("bdev_wait_for_examine", json!({})).unwrap();
    assert!(daemon.aryk(&["pool", "list"]).unwrap().contains("There are no pools"));
}

#[test]
fn disks_are_searched_when_that_is_asked_for() {
    let daemon = start();
    let file = daemon.dir().join("store.img").display().to_string();
    daemon.aryk(&["detach", "p-vm"]).unwrap();
    daemon.aryk(&["disk", "remove", "store", "--force"]).unwrap();
    daemon.call("bdev_set_options", json!({"bdev_auto_examine": false})).unwrap();
    daemon.aryk(&["disk", "create", "store", "--file", &file]).unwrap();
    assert!(daemon.aryk(&["pool", "list"]).unwrap().contains("There are no pools"));
    daemon.call("bdev_examine", json!({"name": "store"})).unwrap();
    daemon.call("bdev_wait_for_examine", json!({})).unwrap();
    assert!(daemon.aryk(&["volume", "list"]).unwrap().contains("p/vm"));
}

#[test]
fn images_are_imported_and_exported() {
    let daemon = start();
    let path = |name: &str| daemon.dir().join(name).to_str().unwrap().to_owned();
    // A hole, data, and an end within a block.
    let mut image = vec![0; 3 * PIECE + 1000];
    image[PIECE..2 * PIECE].fill(7);
    image[3 * PIECE..].fill(9);
    std::fs::write(path("image.raw"), &image).unwrap();
    daemon.aryk(&["volume", "create", "p/i", "--from", &path("image.raw")]).unwrap();
    image.resize(1 << 20, 0);
    let list = daemon.aryk(&["volume", "list"]).unwrap();
    assert!(list.lines().any(|line| line.starts_with("p/i ") && line.contains(" 1M")), "{list}");
    daemon.aryk(&["volume", "export", "p/i", &path("exported.qcow2"), "--format", "qcow2"]).unwrap();
    assert!(std::fs::read(path("exported.qcow2")).unwrap().starts_with(b"QFI\xfb"));
    let from = path("exported.qcow2");
    daemon.aryk(&["volume", "create", "p/j", "--from", &from, "--size", "2M"]).unwrap();
    daemon.aryk(&["snapshot", "create", "p/j@s"]).unwrap();
    daemon.aryk(&["volume", "export", "p/j@s", &path("exported.raw")]).unwrap();
    image.resize(2 << 20, 0);
    assert_eq!(std::fs::read(path("exported.raw")).unwrap(), image);
    // Nothing is left of the copies.
    assert_eq!(daemon.call("vhost_get_controllers", json!({})).unwrap().as_array().unwrap().len(), 1);

    let (_, error) = daemon.aryk(&["volume", "export", "p/vm", &path("x")]).unwrap_err();
    assert!(error.contains("in use") && error.contains("snapshot"), "{error}");
    let (_, error) = daemon.aryk(&["volume", "export", "p/j", &path("exported.raw")]).unwrap_err();
    assert!(error.contains("exists already"), "{error}");
    let small = ["volume", "create", "p/k", "--from", &from, "--size", "512K"];
    let (_, error) = daemon.aryk(&small).unwrap_err();
    assert!(error.contains("less than the image's 1M"), "{error}");
}

#[test]
fn a_pool_is_checked_without_a_daemon() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    // So much that the end of the log, which a check does not read, has not all of it.
    (0..1024).chain(824..1000).for_each(|piece| write(&mut vm, piece, (piece % 200) as u8 + 1));
    vm.flush().unwrap();
    drop(vm);
    let store = daemon.dir().join("store.img").display().to_string();
    let offline = ["pool", "check", "--offline", &store];
    let (_, error) = daemon.aryk(&offline).unwrap_err();
    assert!(error.contains("a daemon has it open"), "{error}");
    daemon.kill();
    let file = std::fs::File::options().read(true).write(true).open(&store).unwrap();
    let modified = || file.metadata().unwrap().modified().unwrap();
    let before = modified();
    let report = daemon.aryk(&offline).unwrap();
    assert!(report.contains("Pool 'p'") && report.contains("No damage"), "{report}");
    assert_eq!(modified(), before, "the check has written");

    // A byte of a block changes.
    let mut block = [0; 4096];
    let is_of_piece = |at: &u64| {
        file.read_exact_at(&mut block, *at).unwrap();
        block.iter().all(|&byte| byte == 7)
    };
    let at = (0..1 << 30).step_by(4096).find(is_of_piece).unwrap();
    file.write_all_at(&[8], at + 100).unwrap();
    let (code, report) = daemon.aryk(&["--json", "pool", "check", "--offline", &store]).unwrap_err();
    assert_eq!(code, 1, "{report}");
    let (_, error) = daemon.aryk(&offline).unwrap_err();
    assert!(error.contains("damaged"), "{error}");
    daemon.aryk(&["pool", "check", "--offline", &store, "--quick"]).unwrap();
    std::fs::write(daemon.dir().join("empty"), vec![0; 1 << 20]).unwrap();
    let (_, error) = daemon.aryk(&["pool", "check", "--offline", "empty"]).unwrap_err();
    assert!(error.contains("empty: "), "{error}");
}

/// Clears these bytes of a file.
fn clear(file: &std::fs::File, from: u64, len: u64) {
    (0..len).step_by(4096).for_each(|at| file.write_all_at(&[0; 4096], from + at).unwrap());
}

/// Destroys all checkpoints of the pool in a file, with all that follows them, in both mirrors.
fn lose_checkpoints(file: &std::fs::File) {
    let mut superblock = [0; 4096];
    file.read_exact_at(&mut superblock, 0).unwrap();
    let number = |at: usize| u64::from_le_bytes(superblock[at..at + 8].try_into().unwrap());
    for area in [768, 768 + 48] {
        for mirror in [number(area + 8), number(area + 24)] {
            clear(file, mirror, number(area + 32));
        }
    }
}

#[test]
fn a_pool_whose_checkpoints_are_lost_is_rebuilt() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    (0..200).for_each(|piece| write(&mut vm, piece, 1));
    vm.flush().unwrap();
    daemon.aryk(&["snapshot", "create", "p/vm@s"]).unwrap();
    (100..300).for_each(|piece| write(&mut vm, piece, (piece % 200) as u8 + 2));
    vm.flush().unwrap();
    drop(vm);
    daemon.aryk(&["volume", "clone", "p/vm@s", "clone"]).unwrap();
    let path = daemon.dir().join("store.img");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let store = path.display().to_string();
    let offline = ["pool", "check", "--offline", &store];
    let repair = [&offline[..], &["--repair"]].concat();
    let (_, error) = daemon.aryk(&repair).unwrap_err();
    assert!(error.contains("a daemon has it open"), "{error}");
    daemon.kill();
    lose_checkpoints(&file);
    daemon.restart();
    daemon.wait_until_ready();
    let (_, error) = daemon.aryk(&["pool", "open", "--disk", "store"]).unwrap_err();
    assert!(error.contains("checkpoint") && error.contains("--repair"), "{error}");
    daemon.kill();
    let modified = || file.metadata().unwrap().modified().unwrap();
    let before = modified();
    let (code, error) = daemon.aryk(&offline).unwrap_err();
    assert_eq!(code, 1, "{error}");
    assert!(error.contains("To rebuild the pool") && error.contains("--repair"), "{error}");
    assert_eq!(modified(), before, "the check has written");
    let report = daemon.aryk(&repair).unwrap();
    assert!(report.contains("It is as it was") && report.contains("No damage"), "{report}");
    let byte = |piece: u64| match piece {
        0..100 => 1,
        100..300 => (piece % 200) as u8 + 2,
        _ => 0,
    };
    daemon.restart();
    daemon.wait_until_ready();
    wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
    let mut vm = connect(&daemon, "p-vm");
    (0..310).for_each(|piece| assert_eq!(read(&mut vm, piece), [byte(piece); PIECE], "piece {piece}"));
    drop(vm);
    daemon.aryk(&["attach", "p/clone", "--controller", "c"]).unwrap();
    let mut vm = connect(&daemon, "c");
    (0..310)
        .for_each(|piece| assert_eq!(read(&mut vm, piece), [u8::from(piece < 200); PIECE], "piece {piece}"));
    drop(vm);
    daemon.aryk(&["detach", "c"]).unwrap();
    daemon.aryk(&["volume", "export", "p/vm@s", "snapshot.raw"]).unwrap();
    let exported = std::fs::read(daemon.dir().join("snapshot.raw")).unwrap();
    let is_right = |(piece, bytes): (usize, &[u8])| bytes.iter().all(|&byte| byte == u8::from(piece < 200));
    assert!(exported.chunks(PIECE).enumerate().all(is_right));

    // Without the copies of the manifest, each history is a volume.
    daemon.kill();
    lose_checkpoints(&file);
    clear(&file, 4096, 1 << 16);
    clear(&file, (1 << 20) + 4096, 1 << 16);
    let (_, report) = daemon.aryk(&[&["--json"], &repair[..]].concat()).unwrap_err();
    assert!(!report.contains("interrupted"), "{report}");
    daemon.restart();
    daemon.wait_until_ready();
    daemon.call("bdev_wait_for_examine", json!({})).unwrap();
    // Of a pool that has lost all of its checkpoints twice, nothing says that it is not an older one.
    daemon.aryk(&["pool", "open", "--disk", "store", "--accept-older"]).unwrap();
    let volumes = daemon.aryk(&["volume", "list"]).unwrap();
    assert!(volumes.contains("p/recovered-0"), "{volumes}");
    daemon.aryk(&["attach", "p/recovered-0", "--controller", "r"]).unwrap();
    let mut vm = connect(&daemon, "r");
    (0..300).for_each(|piece| assert_eq!(read(&mut vm, piece), [byte(piece); PIECE], "piece {piece}"));
    drop(vm);
    assert!(daemon.aryk(&["pool", "check", "p"]).unwrap().contains("No damage"));
}

/// A frame of the log: its byte in the file, its sequence, and the sequence before which all were durable.
fn frames(file: &std::fs::File) -> Vec<(u64, u64, u64)> {
    let mut header = [0; 512];
    let frame = |at| {
        file.read_exact_at(&mut header, at).unwrap();
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
        let is_log = header.starts_with(b"AVF1") && header[40..44] == [0; 4];
        is_log.then(|| (at, number(32), number(56)))
    };
    (0..1 << 30).step_by(512).filter_map(frame).collect()
}

#[test]
fn a_pool_with_a_damaged_log_is_opened_when_its_loss_is_accepted() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    for piece in 0..16 {
        write(&mut vm, piece, 1);
        vm.flush().unwrap();
    }
    drop(vm);
    daemon.kill();
    let store = daemon.dir().join("store.img");
    let file = std::fs::File::options().read(true).write(true).open(store).unwrap();
    let all = frames(&file);
    let durable = all.iter().map(|(.., durable)| *durable).max().unwrap();
    let (at, ..) = all.iter().find(|(_, sequence, _)| *sequence == durable - 4).unwrap();
    file.write_all_at(b"X", at + 70).unwrap();
    daemon.restart();
    daemon.wait_until_ready();
    daemon.call("bdev_wait_for_examine", json!({})).unwrap();
    assert!(daemon.aryk(&["pool", "list"]).unwrap().contains("There are no pools"));
    let open = ["pool", "open", "--disk", "store"];
    let (_, error) = daemon.aryk(&open).unwrap_err();
    assert!(error.contains("all writes behind") && error.contains("--discard-damaged-log"), "{error}");
    let opened = daemon.aryk(&[&open[..], &["--discard-damaged-log"]].concat()).unwrap();
    assert!(opened.contains("later writes are lost"), "{opened}");
    let controllers = || daemon.call("vhost_get_controllers", json!({})).unwrap().to_string();
    wait_for("the controller", || controllers().contains("p-vm"));
    let mut vm = connect(&daemon, "p-vm");
    let kept: Vec<u8> = (0..16).map(|piece| read(&mut vm, piece)[0]).collect();
    let lost = kept.iter().position(|&byte| byte == 0).unwrap();
    assert!((8..16).contains(&lost) && kept[lost..].iter().all(|&byte| byte == 0), "{kept:?}");
    write(&mut vm, 0, 2);
    vm.flush().unwrap();
    drop(vm);
    daemon.kill_and_restart();
    daemon.wait_until_ready();
    assert!(daemon.aryk(&["pool", "check", "p"]).unwrap().contains("No damage"));
    let (_, error) = daemon.aryk(&["pool", "open", "--disk", "store"]).unwrap_err();
    assert!(error.contains("in use") || error.contains("same pool"), "{error}");
}

#[test]
fn a_pool_whose_disk_came_back_older_is_refused_until_that_is_accepted() {
    let mut daemon = start();
    let write_all = |daemon: &Daemon, byte: u8| {
        wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
        let mut vm = connect(daemon, "p-vm");
        (0..16).for_each(|piece| write(&mut vm, piece, byte));
        vm.flush().unwrap();
    };
    write_all(&daemon, 1);
    daemon.kill();
    let (store, backup) = (daemon.dir().join("store.img"), daemon.dir().join("backup.img"));
    std::fs::copy(&store, &backup).unwrap();
    daemon.restart();
    write_all(&daemon, 2);
    daemon.end_and_restart();
    let is_open = |daemon: &Daemon| {
        daemon.call("bdev_wait_for_examine", json!({})).unwrap();
        daemon.aryk(&["pool", "list"]).unwrap().contains("store")
    };
    assert!(is_open(&daemon), "the disk is as the daemon has left it");
    daemon.kill();
    std::fs::copy(&backup, &store).unwrap();
    let modified = || std::fs::metadata(&store).unwrap().modified().unwrap();
    let before = modified();
    daemon.restart();
    assert!(!is_open(&daemon), "an older copy");
    let open = ["pool", "open", "--disk", "store"];
    for _ in 0..2 {
        let (_, error) = daemon.aryk(&open).unwrap_err();
        assert!(error.contains("older") && error.contains("--accept-older"), "{error}");
    }
    assert_eq!(modified(), before, "the refused copy was written");
    daemon.aryk(&[&open[..], &["--accept-older"]].concat()).unwrap();
    wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
    let mut vm = connect(&daemon, "p-vm");
    (0..16).for_each(|piece| assert_eq!(read(&mut vm, piece), [1; PIECE], "piece {piece}"));
    drop(vm);
    // From now on, this is the pool's state.
    daemon.kill_and_restart();
    assert!(is_open(&daemon), "the accepted copy");
    daemon.aryk(&["detach", "p-vm"]).unwrap();
    daemon.aryk(&["pool", "delete", "p", "--force"]).unwrap();
    daemon.aryk(&["pool", "create", "q", "--disk", "store"]).unwrap();
    daemon.end_and_restart();
    assert!(is_open(&daemon), "another pool on the disk");
}

#[test]
fn an_interrupted_copy_leaves_nothing() {
    let daemon = start();
    let path = |name: &str| daemon.dir().join(name);
    std::fs::write(path("image.raw"), vec![5; 48 << 20]).unwrap();
    daemon.aryk(&["volume", "create", "p/i", "--from", "image.raw"]).unwrap();
    let disk = daemon.call("bdev_get_bdevs", json!({"name": "p/i"})).unwrap()[0]["name"].clone();
    let limit = json!({"name": disk, "rw_mbytes_per_sec": 4, "rw_ios_per_sec": 0, "r_mbytes_per_sec": 0, "w_mbytes_per_sec": 0});
    daemon.call("bdev_set_qos_limit", limit).unwrap();
    let mut export = daemon.start_aryk(&["volume", "export", "p/i", "exported.raw"]);
    let is_begun = || std::fs::metadata(path(".exported.raw.importing")).is_ok_and(|file| file.len() > 0);
    wait_for("the copy has begun", is_begun);
    kill_process(Pid::from_child(&export), Signal::INT).unwrap();
    assert_eq!(export.wait().unwrap().code(), Some(1));
    assert!(!path(".exported.raw.importing").exists() && !path("exported.raw").exists());
    assert_eq!(daemon.call("vhost_get_controllers", json!({})).unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn what_destroys_data_is_guarded() {
    let daemon = start();
    let _vm = connect(&daemon, "p-vm");
    let (_, error) = daemon.aryk(&["volume", "delete", "p/vm"]).unwrap_err();
    assert!(error.contains("in use") && error.contains("p-vm"), "{error}");
    let (_, error) = daemon.aryk(&["pool", "delete", "p"]).unwrap_err();
    assert!(error.contains("p/vm") && error.contains("--force"), "{error}");
    let (_, error) = daemon.aryk(&["volume", "resize", "p/vm", "32M"]).unwrap_err();
    assert!(error.contains("--shrink"), "{error}");
    let (_, error) = daemon.aryk(&["disk", "remove", "p/vm"]).unwrap_err();
    assert!(error.contains("aryk volume delete") || error.contains("in use"), "{error}");
    let (_, error) = daemon.aryk(&["disk", "remove", "store"]).unwrap_err();
    assert!(error.contains("in use"), "{error}");
    let (_, error) = daemon.aryk(&["pool", "create", "q", "--disk", "store"]).unwrap_err();
    assert!(error.contains("in use"), "{error}");
    let resize = |mebibytes: u64| {
        let params = json!({"name": "store", "size": mebibytes << 20, "shrink": true});
        daemon.call("bdev_uring_resize", params)
    };
    assert_eq!(code(resize(512)), -16);
    resize(2048).unwrap();
    daemon.aryk(&["volume", "resize", "p/vm", "128M"]).unwrap();
    daemon.aryk(&["volume", "rename", "p/vm", "root"]).unwrap();
    let list = daemon.aryk(&["volume", "list"]).unwrap();
    assert!(list.contains("p/root") && list.contains("128M") && list.contains("p-vm (VM)"), "{list}");
    daemon.aryk(&["volume", "delete", "p/root", "--force"]).unwrap();
    daemon.aryk(&["pool", "rename", "p", "other"]).unwrap();
    daemon.aryk(&["pool", "delete", "other"]).unwrap();
    assert!(daemon.aryk(&["pool", "list"]).unwrap().contains("There are no pools"));
    daemon.aryk(&["disk", "remove", "store"]).unwrap();
}

#[test]
fn a_pool_grows_with_its_disk() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    write(&mut vm, 5, 42);
    vm.flush().unwrap();
    let total = |daemon: &Daemon| {
        let pools = daemon.call("aryk_pools_get", json!({})).unwrap();
        pools[0]["total_bytes"].as_u64().unwrap()
    };
    let before = total(&daemon);
    assert!(daemon.aryk(&["pool", "grow", "p"]).unwrap().contains("has the size of its disk already"));
    let (_, error) = daemon.aryk(&["pool", "grow", "none"]).unwrap_err();
    assert!(error.contains("none"), "{error}");
    let thick = ["volume", "create", "p/large", "--size", "1G", "--thick"];
    let (_, error) = daemon.aryk(&thick).unwrap_err();
    assert!(error.contains("space"), "{error}");
    daemon.aryk(&["disk", "resize", "store", "2G"]).unwrap();
    assert_eq!(total(&daemon), before, "a pool grows when that is asked for");
    // The VM uses its volume meanwhile.
    let grown = daemon.aryk(&["pool", "grow", "p"]).unwrap();
    assert!(grown.contains("more than before"), "{grown}");
    let after = total(&daemon);
    assert!((800 << 20..=1 << 30).contains(&(after - before)), "{before} {after}");
    assert_eq!(read(&mut vm, 5), [42; PIECE]);
    daemon.aryk(&thick).unwrap();
    drop(vm);
    daemon.kill_and_restart();
    daemon.wait_until_ready();
    wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
    assert_eq!(total(&daemon), after);
    assert_eq!(read(&mut connect(&daemon, "p-vm"), 5), [42; PIECE]);
    assert!(daemon.aryk(&["pool", "check", "p"]).unwrap().contains("No damage"));
}

#[test]
fn an_idle_pool_costs_nothing() {
    let daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    write(&mut vm, 0, 1);
    vm.flush().unwrap();
    drop(vm);
    // Background work after the writes ends.
    std::thread::park_timeout(Duration::from_secs(1));
    let busy = |daemon: &Daemon| {
        let stats = daemon.call("thread_get_stats", json!({})).unwrap();
        let mut threads = stats["threads"].as_array().unwrap().iter();
        let of_pool = threads.find(|thread| thread["name"] == "volumes on store").unwrap();
        of_pool["busy"].as_u64().unwrap()
    };
    let before = busy(&daemon);
    std::thread::park_timeout(Duration::from_millis(300));
    assert_eq!(busy(&daemon), before, "an idle pool is not polled");
}

/// Ends what runs beside a test, also where the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The core of the pool.
fn core_of_pool(daemon: &Daemon) -> u64 {
    daemon.call("aryk_pools_get", json!({})).unwrap()[0]["cores"][0].as_u64().unwrap()
}

#[test]
fn a_pool_moves_to_another_reactor_and_leaves_one_that_is_removed_while_a_vm_uses_it() {
    let daemon = start();
    let core = core_of_pool(&daemon);
    let other = CoreSet::allowed().iter().map(u64::from).find(|other| *other != core).unwrap();
    let to = |core: u64| daemon.aryk(&["pool", "move", "p", "--core", &core.to_string()]);
    let (_, error) = to(other).unwrap_err();
    assert!(error.contains(&format!("no reactor on core {other}")), "{error}");
    let (_, error) = daemon.aryk(&["pool", "move", "p", "--shard", "1", "--core", "0"]).unwrap_err();
    assert!(error.contains("one shard"), "{error}");
    daemon.call("aryk_core_add", json!({"core": other})).unwrap();
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let await_rounds = |more| {
        let until = rounds.load(Ordering::Relaxed) + more;
        wait_for("the VM", || rounds.load(Ordering::Relaxed) >= until);
    };
    std::thread::scope(|scope| {
        let over = Over(&is_over);
        let vm = scope.spawn(|| {
            let mut vm = connect(&daemon, "p-vm");
            let byte = |round: u64, piece: u64| ((round * 7 + piece) % 251) as u8;
            while !is_over.load(Ordering::Relaxed) {
                let round = rounds.fetch_add(1, Ordering::Relaxed);
                (0..16).for_each(|piece| write(&mut vm, piece, byte(round, piece)));
                vm.flush().unwrap();
                for piece in 0..16 {
                    assert_eq!(read(&mut vm, piece), [byte(round, piece); PIECE], "round {round}");
                }
            }
        });
        for _ in 0..4 {
            for there in [other, core] {
                await_rounds(2);
                assert!(to(there).unwrap().contains(&format!("on core {there}")));
                assert_eq!(core_of_pool(&daemon), there);
            }
        }
        daemon.aryk(&["snapshot", "create", "p/vm@a"]).unwrap();
        // The VM's queue leaves the reactor, too.
        daemon.aryk(&["reactor", "remove", &core.to_string()]).unwrap();
        assert_eq!(core_of_pool(&daemon), other);
        await_rounds(2);
        drop(over);
        vm.join().unwrap();
    });
    assert!(daemon.aryk(&["pool", "check", "p"]).unwrap().contains("No damage"));
}

#[test]
fn a_vm_on_another_reactor_uses_a_volume_and_its_reactor_can_be_removed() {
    let daemon = start();
    let pools = daemon.call("aryk_pools_get", json!({})).unwrap();
    let core = pools[0]["cores"][0].as_u64().unwrap();
    let other = CoreSet::allowed().iter().map(u64::from).find(|other| *other != core).unwrap();
    daemon.call("aryk_core_add", json!({"core": other})).unwrap();
    let mask = format!("{:#x}", 1_u64 << other);
    daemon.aryk(&["volume", "create", "p/far", "--size", "64M"]).unwrap();
    daemon.aryk(&["attach", "p/far", "--cpumask", &mask]).unwrap();
    let mut far = connect(&daemon, "p-far");
    for piece in 0..64 {
        write(&mut far, piece, piece as u8 + 1);
    }
    far.flush().unwrap();
    daemon.aryk(&["snapshot", "create", "p/far@a"]).unwrap();
    for piece in 0..32 {
        write(&mut far, piece, 200);
    }
    let is_right = |vm: &mut FrontEnd| {
        (0..64).all(|piece| {
            let byte = if piece < 32 { 200 } else { piece as u8 + 1 };
            read(vm, piece) == [byte; PIECE]
        })
    };
    assert!(is_right(&mut far));
    let written = daemon.call("aryk_pools_get", json!({})).unwrap();
    assert_eq!(written[0]["counters"]["user_read_bytes"], json!(64 * PIECE));
    assert_eq!(written[0]["counters"]["user_write_bytes"], json!(96 * PIECE));
    // Both reactors had requests to the pool's disk.
    let threads = daemon.call("thread_get_stats", json!({})).unwrap();
    let of_pool = |thread: &&serde_json::Value| thread["name"] == "volumes on store";
    assert_eq!(threads["threads"].as_array().unwrap().iter().filter(of_pool).count(), 2);
    drop(far);
    daemon.aryk(&["detach", "p-far"]).unwrap();
    daemon.call("aryk_core_remove", json!({"core": other})).unwrap();
    daemon.aryk(&["attach", "p/far"]).unwrap();
    let mut near = connect(&daemon, "p-far");
    assert!(is_right(&mut near));
    assert!(daemon.aryk(&["pool", "check", "p"]).unwrap().contains("No damage"));
}

#[test]
fn damage_is_found_before_a_guest_reads_it() {
    let daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    let path = daemon.dir().join("store.img");
    let file = path.display().to_string();
    daemon.aryk(&["disk", "create", "store", "--file", &file, "--size", "1G"]).unwrap();
    daemon.aryk(&["pool", "create", "p", "--disk", "store"]).unwrap();
    daemon.aryk(&["volume", "create", "p/vm", "--size", "64M"]).unwrap();
    daemon.aryk(&["attach", "p/vm"]).unwrap();
    let mut vm = connect(&daemon, "p-vm");
    (0..64).for_each(|piece| write(&mut vm, piece, piece as u8 + 1));
    vm.flush().unwrap();
    drop(vm);
    let scrub = |args: &[&str]| daemon.aryk(&[&["pool", "scrub", "p"], args].concat());
    assert_eq!(scrub(&["--wait"]).unwrap().trim(), "No damage.");
    // A byte of the third block of piece 40.
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut block = [0; 4096];
    let mut is_of_piece = |at: u64| {
        file.read_exact_at(&mut block, at).unwrap();
        block == [41; 4096]
    };
    let first = (0..1 << 30).step_by(512).find(|at| is_of_piece(*at)).expect("the piece is on the base");
    file.write_all_at(&[1], first + 2 * 4096 + 5).unwrap();
    let (code, error) = scrub(&["--wait"]).unwrap_err();
    assert!(code == 1 && error.contains("is damaged"), "{error}");
    let scrub_of = |daemon: &Daemon| daemon.call("aryk_pool_get_scrub", json!({"pool": "p"})).unwrap();
    let found = scrub_of(&daemon);
    let what = "data does not match its checksum";
    let offset = 40 * PIECE as u64 + 2 * 4096;
    let damage = json!([{"volume": "p/vm", "offset": offset, "bytes": 4096, "what": what}]);
    assert_eq!((&found["state"], &found["damage"]), (&json!("complete"), &damage));
    let pool = daemon.call("aryk_pools_get", json!({})).unwrap()[0].clone();
    assert_eq!(
        (&pool["scrub"]["damaged_blocks"], &pool["counters"]["damaged_blocks"]),
        (&json!(1), &json!(1))
    );
    let shown = daemon.aryk(&["pool", "show", "p"]).unwrap();
    let line = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(line.contains("complete 0 days ago; 1 damaged blocks found; every 14 days"), "{line}");
}

/// Damages a byte of each page of the index of a pool whose daemon has ended. Returns how many there are.
fn damage_index(file: &std::fs::File) -> u32 {
    let mut pages = 0;
    let mut page = [0; 4096];
    for at in (0..file.metadata().unwrap().len()).step_by(4096) {
        file.read_exact_at(&mut page, at).unwrap();
        if page.starts_with(b"AVIX") {
            file.write_all_at(&[!page[2000]], at + 2000).unwrap();
            pages += 1;
        }
    }
    pages
}

#[test]
fn a_pool_whose_index_is_damaged_fails_reads_and_is_rebuilt() {
    let mut daemon = start();
    let mut vm = connect(&daemon, "p-vm");
    // So much that the index of the first writes is on the base.
    let byte = |piece: u64| (piece % 200) as u8 + 1;
    (0..1024).chain(824..1000).for_each(|piece| write(&mut vm, piece, byte(piece)));
    vm.flush().unwrap();
    daemon.aryk(&["snapshot", "create", "p/vm@s"]).unwrap();
    drop(vm);
    daemon.kill();
    let path = daemon.dir().join("store.img");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    assert!(damage_index(&file) > 0, "the pool has pages of its index on the base");
    daemon.restart();
    daemon.wait_until_ready();
    // The manifest is intact, so the pool opens. Reads of blocks that the index has lost fail; none returns older data.
    wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
    let mut vm = connect(&daemon, "p-vm");
    let mut failed = 0;
    for piece in 0..1024 {
        match vm.read(piece * PIECE as u64, PIECE) {
            Ok(data) => assert_eq!(data, [byte(piece); PIECE], "piece {piece}"),
            Err(_) => failed += 1,
        }
    }
    assert!(failed > 0);
    drop(vm);
    let (code, error) = daemon.aryk(&["pool", "check", "p"]).unwrap_err();
    assert_eq!(code, 1, "{error}");
    daemon.kill();
    let store = path.display().to_string();
    let (_, error) = daemon.aryk(&["pool", "check", "--offline", &store]).unwrap_err();
    assert!(error.contains("--repair"), "{error}");
    let report = daemon.run_aryk(&["--json", "pool", "check", "--offline", &store, "--repair"]);
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(report["rebuilt"]["is_written"], true, "{report}");
    daemon.restart();
    daemon.wait_until_ready();
    wait_for("the controller", || daemon.dir().join("vhost/p-vm").exists());
    let mut vm = connect(&daemon, "p-vm");
    (0..1024).for_each(|piece| assert_eq!(read(&mut vm, piece), [byte(piece); PIECE], "piece {piece}"));
    drop(vm);
    assert!(daemon.aryk(&["pool", "check", "p"]).unwrap().contains("No damage"));
    assert!(daemon.aryk(&["snapshot", "list"]).unwrap().contains("p/vm@s"));
}
