//! NVMe controllers of the real daemon: models that this process serves over vfio-user.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code, wait_for};
use aryk_nvme_model::{Config, Data, FIRMWARE_MAGIC, Model, NamespaceConfig, Running};
use aryk_pci::vfio_user;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use serde_json::{Value, json};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

const KEPT: &[&str] = &["--state-dir", "DIR/state"];

/// A drive with its data, which clients of a socket can attach one after another, until it is pulled out.
pub struct Drive {
    pub model: Arc<Model>,
    socket: PathBuf,
    is_pulled: Arc<AtomicBool>,
    serving: Option<JoinHandle<()>>,
    _running: Running,
}

impl Drive {
    /// A drive of this serial number with two namespaces.
    pub fn new(socket: &Path, serial: &str) -> Self {
        let namespaces = [1, 2].map(|nsid| (nsid, NamespaceConfig::new(16_384, 0, nsid.into())));
        let config = Config {
            serial: serial.into(),
            namespaces: namespaces.into(),
            data: Data::KeptDurable,
            // 0-based.
            awupf: 3,
            ..Config::default()
        };
        Self::of(socket, Model::new("drive", config).unwrap())
    }

    /// A drive in the slot of the socket.
    fn of(socket: &Path, model: Arc<Model>) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let is_pulled = Arc::new(AtomicBool::new(false));
        let (served, stop) = (Arc::clone(&model), Arc::clone(&is_pulled));
        let serving = std::thread::spawn(move || {
            for client in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                // A daemon that is killed closes the connection in the middle of a message.
                let _ = vfio_user::serve(client.unwrap(), &*served);
            }
        });
        let running = model.run().unwrap();
        Self { model, socket: socket.to_owned(), is_pulled, serving: Some(serving), _running: running }
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        self.is_pulled.store(true, Ordering::Relaxed);
        let _ = std::os::unix::net::UnixStream::connect(&self.socket);
        // A served client keeps the thread; the test's process ends it.
        drop(self.serving.take());
        // The directory may be gone.
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn names(disks: &Value) -> Vec<&str> {
    disks.as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap()).collect()
}

pub fn attach(daemon: &Daemon, socket: &Path) -> Value {
    let params = json!({"name": "Nvme0", "trtype": "VFIOUSER", "traddr": socket});
    daemon.call("bdev_nvme_attach_controller", params).unwrap()
}

pub fn connect(daemon: &Daemon, controller: &str) -> FrontEnd {
    let socket = daemon.dir().join("vhost").join(controller);
    wait_for("the controller listens", || socket.exists());
    FrontEnd::connect(&socket)
}

#[test]
fn a_controller_is_attached_used_reset_and_detached() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    assert_eq!(attach(&daemon, &socket), json!(["Nvme0n1", "Nvme0n2"]));
    let disk = &daemon.call("bdev_get_bdevs", json!({"name": "Nvme0n2"})).unwrap()[0];
    assert_eq!((&disk["product_name"], &disk["num_blocks"]), (&json!("NVMe disk"), &json!(16_384)));
    let nvme = &disk["driver_specific"]["nvme"][0];
    assert_eq!(nvme["trid"], json!({"trtype": "VFIOUSER", "traddr": socket}));
    assert_eq!(nvme["ctrlr_data"]["serial_number"], "S1");
    assert_eq!(nvme["ns_data"], json!({"id": 2, "can_share": false, "atomic_write_blocks": 4}));
    // The same name, and the same drive.
    let again = |name: &str| json!({"name": name, "trtype": "vfiouser", "traddr": socket});
    assert_eq!(code(daemon.call("bdev_nvme_attach_controller", again("Nvme0"))), -17);
    assert_eq!(code(daemon.call("bdev_nvme_attach_controller", again("Nvme1"))), -114);

    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    let mut vm = connect(&daemon, "vm");
    vm.write(4096, &[7; 8192]).unwrap();
    vm.flush().unwrap();
    daemon.call("bdev_nvme_reset_controller", json!({"name": "Nvme0"})).unwrap();
    assert_eq!(vm.read(4096, 8192).unwrap(), [7; 8192]);
    let controllers = daemon.call("bdev_nvme_get_controllers", json!({"name": "Nvme0"})).unwrap();
    assert_eq!(
        (&controllers[0]["ctrlrs"][0]["state"], &controllers[0]["resets"]),
        (&json!("enabled"), &json!(1))
    );
    drop(vm);
    daemon.call("vhost_delete_controller", json!({"ctrlr": "vm"})).unwrap();
    daemon.call("bdev_nvme_detach_controller", json!({"name": "Nvme0"})).unwrap();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), json!([]));
    assert_eq!(code(daemon.call("bdev_nvme_detach_controller", json!({"name": "Nvme0"}))), -19);
    // The drive is free for another attach.
    assert_eq!(attach(&daemon, &socket), json!(["Nvme0n1", "Nvme0n2"]));
    let violations = drive.model.with(|model| model.violations().clone());
    assert_eq!(violations.count, 0, "{:?}", violations.first);
    drop(daemon);
    drop(drive);
}

#[test]
fn controllers_their_disks_and_what_uses_them_are_restored() {
    let mut daemon = Daemon::start(KEPT);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    daemon.call("bdev_passthru_create", json!({"name": "top", "base_bdev_name": "Nvme0n2"})).unwrap();
    daemon.call("bdev_set_qos_limit", json!({"name": "Nvme0n1", "rw_ios_per_sec": 9000})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    connect(&daemon, "vm").write(0, &[9; 512]).unwrap();
    let seen = |daemon: &Daemon| {
        [("bdev_get_bdevs", json!({})), ("save_config", json!({}))].map(|(m, p)| daemon.call(m, p).unwrap())
    };
    let before = seen(&daemon);
    assert_eq!(before[1]["subsystems"][0]["config"][0]["method"], "bdev_passthru_create");
    for _ in 0..2 {
        daemon.kill_and_restart();
        assert_eq!(daemon.call("aryk_absent_get", json!({})).unwrap(), json!([]));
        assert_eq!(seen(&daemon), before);
    }
    assert_eq!(connect(&daemon, "vm").read(0, 512).unwrap(), [9; 512]);
    // Another daemon takes the saved configuration.
    daemon.kill();
    let other = Daemon::start(&[]);
    other.call("load_config", before[1].clone()).unwrap();
    wait_for("the passthru disk over the drive", || {
        other.call("bdev_get_bdevs", json!({"name": "top"})).is_ok()
    });
    assert_eq!(names(&other.call("bdev_get_bdevs", json!({})).unwrap()).len(), 3);
    drop(other);
    drop(drive);
}

#[test]
fn a_missing_drive_does_not_block_the_start_and_comes_back_as_itself_only() {
    let mut daemon = Daemon::start(KEPT);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    daemon.kill();
    drop(drive);
    daemon.restart();
    let absent = || daemon.call("aryk_absent_get", json!({})).unwrap();
    assert_eq!(names(&absent()), ["Nvme0", "vm"]);
    assert_eq!(absent()[0]["kind"], "nvme controller");
    let other = Drive::new(&socket, "S2");
    wait_for("the other drive is refused", || absent()[0]["why"].as_str().unwrap().contains("not 'S1'"));
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), json!([]));
    drop(other);
    let drive = Drive::new(&socket, "S1");
    wait_for("all objects exist again", || absent() == json!([]));
    assert_eq!(connect(&daemon, "vm").read(0, 512).unwrap(), [0; 512]);
    daemon.call("bdev_nvme_detach_controller", json!({"name": "Nvme0"})).unwrap();
    drop(daemon);
    drop(drive);
}

/// Sends an admin command with these dwords; the status of the completion.
fn send(daemon: &Daemon, opcode: u8, nsid: u32, cdw10: u32) -> Result<u16, Value> {
    let mut command = [0; 64];
    command[0] = opcode;
    command[4..8].copy_from_slice(&nsid.to_le_bytes());
    command[40..44].copy_from_slice(&cdw10.to_le_bytes());
    let params = json!({"name": "Nvme0", "cmd_type": "admin", "data_direction": "h2c", "cmdbuf": URL_SAFE.encode(command)});
    let reply = daemon.call("bdev_nvme_send_cmd", params)?;
    let completion = URL_SAFE.decode(reply["cpl"].as_str().unwrap()).unwrap();
    Ok(u16::from_le_bytes([completion[14], completion[15]]) >> 1)
}

#[test]
fn commands_that_would_break_the_driver_or_destroy_data_in_use_are_refused() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    // Create a queue, Abort, wait for an event, doorbell buffers; Set Features: write cache, number of queues.
    for (opcode, cdw10) in [(0x01, 2), (0x08, 1), (0x0c, 0), (0x7c, 0), (0x09, 6), (0x09, 7)] {
        assert_eq!(send(&daemon, opcode, 0, cdw10).unwrap_err()["code"], -1, "{opcode:#x} {cdw10}");
    }
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    let mut vm = connect(&daemon, "vm");
    vm.write(0, &[7; 512]).unwrap();
    // Format of the namespace and of all; sanitize.
    for (opcode, nsid) in [(0x80, 1), (0x80, u32::MAX), (0x84, 0)] {
        let refused = send(&daemon, opcode, nsid, 1).unwrap_err();
        assert!(
            refused["code"] == -16 && refused["data"].as_str().unwrap().contains("in use: Nvme0n1"),
            "{refused}"
        );
    }
    assert_eq!(vm.read(0, 512).unwrap(), [7; 512]);
    drop(vm);
    daemon.call("vhost_delete_controller", json!({"ctrlr": "vm"})).unwrap();
    // No disk is in use: the namespace gets blocks of 4,096 bytes, and a new disk.
    assert_eq!(send(&daemon, 0x80, 2, 1), Ok(0));
    let block_size = || {
        daemon.call("bdev_get_bdevs", json!({"name": "Nvme0n2"})).map(|disks| disks[0]["block_size"].clone())
    };
    wait_for("a disk of the new format", || block_size() == Ok(json!(4096)));
    let health = daemon.call("bdev_nvme_get_controller_health_info", json!({"name": "Nvme0"})).unwrap();
    assert_eq!((&health["serial_number"], &health["media_errors"]), (&json!("S1"), &json!(0)));
    assert!(health["temperature_celsius"].as_i64().unwrap() > 0, "{health}");
    // The daemon also reads it by itself.
    wait_for("the drive's temperature among the counters", || {
        let drives = &daemon.call("aryk_stats_get", json!({})).unwrap()["drives"];
        drives[0]["disks"] == json!(["Nvme0n1", "Nvme0n2"]) && drives[0]["temperature_celsius"].is_u64()
    });
    drop((daemon, drive));
}

#[test]
fn firmware_is_downloaded_and_runs_while_the_disks_are_in_use() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(&daemon, &socket);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    let mut vm = connect(&daemon, "vm");
    vm.write(0, &[7; 512]).unwrap();
    let image = daemon.dir().join("image");
    let apply =
        |disk: &str| daemon.call("bdev_nvme_apply_firmware", json!({"filename": image, "bdev_name": disk}));
    assert_eq!(code(apply("Nvme0n1")), -2);
    std::fs::write(&image, [0; 4097]).unwrap();
    assert_eq!(code(apply("Nvme0n1")), -22, "no multiple of 4 bytes");
    let mut contents = vec![0; 300_000];
    contents[..FIRMWARE_MAGIC.len()].copy_from_slice(&FIRMWARE_MAGIC);
    contents[FIRMWARE_MAGIC.len()..][..8].copy_from_slice(b"2.0     ");
    std::fs::write(&image, &contents).unwrap();
    assert_eq!(code(apply("nothing")), -19);
    let firmware = || {
        let controllers = daemon.call("bdev_nvme_get_controllers", json!({})).unwrap();
        controllers[0]["ctrlr_data"]["firmware_revision"].as_str().unwrap().to_owned()
    };
    let before = firmware();
    let told = apply("Nvme0n1").unwrap();
    assert!(firmware() != before && told.as_str().unwrap().contains(&firmware()), "{told}, before {before}");
    assert_eq!(vm.read(0, 512).unwrap(), [7; 512]);
    drop((vm, daemon, drive));
}

#[test]
fn requests_wait_while_a_controller_is_disabled_and_options_outlive_the_daemon() {
    let mut daemon = Daemon::start(KEPT);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    daemon.call("bdev_nvme_set_options", json!({"timeout_us": 20_000_000, "io_queue_requests": 16})).unwrap();
    attach(&daemon, &socket);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    let mut vm = connect(&daemon, "vm");
    vm.write(0, &[7; 512]).unwrap();
    let state = |daemon: &Daemon| {
        daemon.call("bdev_nvme_get_controllers", json!({})).unwrap()[0]["ctrlrs"][0]["state"].clone()
    };
    daemon.call("bdev_nvme_disable_controller", json!({"name": "Nvme0"})).unwrap();
    assert_eq!(state(&daemon), "disabled");
    vm.start_read(0, 512);
    daemon.call("bdev_nvme_enable_controller", json!({"name": "Nvme0"})).unwrap();
    assert_eq!(state(&daemon), "enabled");
    drop(vm);
    let saved = daemon.call("save_config", json!({})).unwrap();
    assert_eq!(saved["subsystems"][0]["config"][0]["method"], "bdev_nvme_set_options");
    daemon.kill_and_restart();
    assert_eq!(daemon.call("save_config", json!({})).unwrap(), saved);
    assert_eq!(connect(&daemon, "vm").read(0, 512).unwrap(), [7; 512]);
    drop((daemon, drive));
}

#[test]
fn a_drive_that_is_lost_takes_its_place_again_with_all_that_was_built_on_it() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    let params = json!({"name": "a", "trtype": "VFIOUSER", "traddr": socket, "nsid": 2, "disk": "vm1",
        "ctrlr_loss_timeout_sec": 0});
    assert_eq!(daemon.call("bdev_nvme_attach_controller", params).unwrap(), json!(["vm1"]));
    daemon.call("bdev_passthru_create", json!({"name": "top", "base_bdev_name": "vm1"})).unwrap();
    daemon.call("bdev_set_qos_limit", json!({"name": "vm1", "rw_ios_per_sec": 9000})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "top"})).unwrap();
    let before = daemon.call("bdev_get_bdevs", json!({})).unwrap();
    std::fs::remove_file(&socket).unwrap();
    drive.model.with(|model| model.pull_out());
    wait_for("the disks are gone", || daemon.call("bdev_get_bdevs", json!({})).unwrap() == json!([]));
    let absent = || daemon.call("aryk_absent_get", json!({})).unwrap();
    wait_for("the controller and the disk above it are absent", || names(&absent()).len() >= 2);
    let again = Drive::new(&socket, "S1");
    wait_for("all objects exist again", || absent() == json!([]));
    wait_for("the disks and their user are as before", || {
        daemon.call("bdev_get_bdevs", json!({})).unwrap() == before
    });
    assert_eq!(connect(&daemon, "vm").read(0, 512).unwrap(), [0; 512]);
    // Detached by a call, nothing is absent.
    daemon.call("bdev_nvme_detach_controller", json!({"name": "a"})).unwrap();
    wait_for("no disk is left", || daemon.call("bdev_get_bdevs", json!({})).unwrap() == json!([]));
    assert!(names(&absent()).iter().all(|name| *name != "a" && *name != "top"), "{}", absent());
    drop((daemon, drive, again));
}

#[test]
fn a_drive_that_may_have_lost_writes_waits_for_a_client() {
    let mut daemon = Daemon::start(KEPT);
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    let params = json!({"name": "a", "trtype": "VFIOUSER", "traddr": socket, "ctrlr_loss_timeout_sec": 0});
    daemon.call("bdev_nvme_attach_controller", params.clone()).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "an1"})).unwrap();
    let mut vm = connect(&daemon, "vm");
    vm.write(0, &[7; 512]).unwrap();
    std::fs::remove_file(&socket).unwrap();
    drive.model.with(|model| model.pull_out());
    let why = |daemon: &Daemon| {
        let absent = daemon.call("aryk_absent_get", json!({})).unwrap();
        let controllers = absent.as_array().unwrap().iter().filter(|object| object["name"] == "a");
        controllers.map(|object| object["why"].as_str().unwrap().to_owned()).next().unwrap_or_default()
    };
    let again = Drive::new(&socket, "S1");
    wait_for("the controller stays absent", || why(&daemon).contains("check the data of its VMs"));
    drop(vm);
    daemon.kill_and_restart();
    assert!(why(&daemon).contains("check the data of its VMs"), "{}", why(&daemon));
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), json!([]));
    assert_eq!(daemon.call("bdev_nvme_attach_controller", params).unwrap(), json!(["an1", "an2"]));
    wait_for("all objects exist again", || daemon.call("aryk_absent_get", json!({})).unwrap() == json!([]));
    assert_eq!(connect(&daemon, "vm").read(0, 512).unwrap(), [0; 512]);
    drop((daemon, drive, again));
}
