//! LUKS disks: data exchanged with cryptsetup and with QEMU in both directions, by vhost-user; headers that are refused, damaged
//! or too expensive; and disks that are unlocked again after a restart. No device mapper is needed.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code, wait_for};
use aryk_rpc_client::{Client, Reply};
use serde_json::{Value, json};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

/// QEMU requires UTF-8.
const SECRET: &str = "correct\nhörse";
const DATA_LEN: usize = 2 << 20;
/// More than a LUKS2 header and the data.
const FILE_LEN: u64 = 24 << 20;
const PIECE: usize = 64 << 10;

/// Cheap key derivations of cryptsetup.
const PBKDF2: [&str; 4] = ["--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
const ARGON2ID: [&str; 6] =
    ["--pbkdf", "argon2id", "--pbkdf-force-iterations", "4", "--pbkdf-memory", "1024"];

struct Host(Daemon);

impl Host {
    fn new() -> Self {
        Self::with(&[])
    }

    fn with(flags: &[&str]) -> Self {
        let host = Self(Daemon::start(flags));
        host.key_file("key", SECRET.as_bytes());
        host.key_file("other", b"battery staple");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.dir().join(name)
    }

    fn key_file(&self, name: &str, secret: &[u8]) {
        std::fs::write(self.path(name), secret).unwrap();
        std::fs::set_permissions(self.path(name), Permissions::from_mode(0o600)).unwrap();
    }

    fn call(&self, method: &str, params: Value) -> Reply {
        self.0.call(method, params)
    }

    /// The text of the error of a call.
    fn complaint(&self, method: &str, params: Value) -> String {
        self.call(method, params).unwrap_err().to_string()
    }

    /// Creates the disk `base` in the file `base`, which exists already or gets this size.
    fn base(&self, len: u64) {
        let file = File::options().create(true).truncate(false).write(true).open(self.path("base")).unwrap();
        if file.metadata().unwrap().len() == 0 {
            file.set_len(len).unwrap();
        }
        self.call("bdev_uring_create", json!({"name": "base", "filename": self.path("base")})).unwrap();
    }

    fn open_params(&self, key: &str) -> Value {
        json!({"name": "luks", "base_bdev_name": "base", "key_file": self.path(key)})
    }

    fn open(&self) {
        assert_eq!(self.call("bdev_luks_create", self.open_params("key")).unwrap(), "luks");
    }

    /// The parameters of a format that takes no second.
    fn format_params(&self, more: Value) -> Value {
        let mut params = json!({"name": "base", "key_file": self.path("key"), "iter_time_ms": 1});
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    }

    fn format(&self, more: Value) -> Value {
        self.call("bdev_luks_format", self.format_params(more)).unwrap()
    }

    fn close(&self) {
        self.call("bdev_luks_delete", json!({"name": "luks"})).unwrap();
        self.call("bdev_uring_delete", json!({"name": "base"})).unwrap();
    }

    /// Runs `job` on a front-end of the disk `luks`.
    fn attached<R>(&self, job: impl FnOnce(&mut FrontEnd) -> R) -> R {
        self.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "luks"})).unwrap();
        let result = job(&mut FrontEnd::connect(&self.path("vhost/c")));
        self.call("vhost_delete_controller", json!({"ctrlr": "c"})).unwrap();
        result
    }

    /// The first bytes of the disk `luks`, as a VM reads them.
    fn read(&self) -> Vec<u8> {
        self.attached(|vm| {
            (0..DATA_LEN / PIECE).flat_map(|i| vm.read((i * PIECE) as u64, PIECE).unwrap()).collect()
        })
    }

    fn write(&self, data: &[u8]) {
        self.attached(|vm| {
            for (i, piece) in data.chunks(PIECE).enumerate() {
                vm.write((i * PIECE) as u64, piece).unwrap();
            }
            vm.flush().unwrap();
        });
    }

    /// Runs cryptsetup on the file `base`, with the key file `key`.
    fn cryptsetup(&self, args: &[&str]) -> Output {
        let mut command = Command::new("cryptsetup");
        command.args(["--batch-mode", "--key-file"]).arg(self.path("key")).args(args).arg(self.path("base"));
        command.output().unwrap()
    }

    /// Runs qemu-img with the content of `key` as secret `s`. It fails at times while it measures how fast it is: then it runs
    /// again.
    fn qemu_img(&self, args: &[&str]) {
        let secret = format!("secret,id=s,file={}", self.path("key").display());
        let mut error = String::new();
        wait_for("qemu-img has measured", || {
            let mut command = Command::new("qemu-img");
            command.current_dir(self.0.dir()).args(args).args(["--object", &secret]);
            let output = command.output().unwrap();
            error = String::from_utf8_lossy(&output.stderr).into_owned();
            output.status.success() || !error.contains("accurate CPU usage")
        });
        assert!(!error.contains("qemu-img:"), "{error}");
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(self.path("base")).unwrap()
    }
}

fn success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn random_data() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(11);
    (0..DATA_LEN).map(|_| random.u8(..)).collect()
}

#[test]
fn a_vm_reads_what_cryptsetup_has_encrypted() {
    for (sector_size, derivation) in [("512", &PBKDF2[..]), ("4096", &ARGON2ID[..])] {
        let (host, data) = (Host::new(), random_data());
        std::fs::write(host.path("base"), &data).unwrap();
        host.file().set_len(40 << 20).unwrap();
        let encrypt = ["reencrypt", "--encrypt", "--force-offline-reencrypt", "--reduce-device-size", "32M"];
        let args = [&encrypt[..], &["--type", "luks2", "--sector-size", sector_size], derivation].concat();
        success(&host.cryptsetup(&args));
        host.base(0);
        host.open();
        let disk = &host.call("bdev_get_bdevs", json!({"name": "luks"})).unwrap()[0];
        assert_eq!(
            (disk["block_size"].to_string(), &disk["product_name"]),
            (sector_size.into(), &json!("luks"))
        );
        assert_eq!(disk["driver_specific"]["luks"]["version"], "luks2");
        assert!(host.read() == data);
    }
}

#[test]
fn cryptsetup_decrypts_what_a_vm_has_written() {
    for (sector_size, pbkdf) in [(512, "pbkdf2"), (4096, "argon2id")] {
        let (host, data) = (Host::new(), random_data());
        host.base(FILE_LEN);
        let more =
            json!({"sector_size": sector_size, "pbkdf": pbkdf, "pbkdf_memory_kib": 1024, "label": "vm 7"});
        let header = host.format(more);
        assert_eq!(
            (&header["data_offset"], &header["key_slots"][0]["pbkdf"]),
            (&json!(16 << 20), &json!(pbkdf))
        );
        host.open();
        host.write(&data);
        assert!(host.read() == data);
        host.close();
        let stored = std::fs::read(host.path("base")).unwrap();
        assert!(!stored.windows(16).any(|part| part == &data[..16]), "no plain data is stored");
        success(&host.cryptsetup(&["open", "--test-passphrase"]));
        let dump = host.cryptsetup(&["luksDump"]);
        let dump = String::from_utf8(dump.stdout).unwrap();
        for expected in [pbkdf, "aes-xts-plain64", "vm 7", header["uuid"].as_str().unwrap()] {
            assert!(dump.contains(expected), "{expected}: {dump}");
        }
        let new_header = host.path("header");
        let decrypt = ["reencrypt", "--decrypt", "--force-offline-reencrypt", "--header"];
        success(&host.cryptsetup(&[&decrypt[..], &[new_header.to_str().unwrap()]].concat()));
        let mut decrypted = vec![0; DATA_LEN];
        host.file().read_exact_at(&mut decrypted, 0).unwrap();
        assert!(decrypted == data);
    }
}

#[test]
fn luks1_images_are_exchanged_with_qemu() {
    let (host, data) = (Host::new(), random_data());
    std::fs::write(host.path("data"), &data).unwrap();
    host.qemu_img(&["convert", "-f", "raw", "-O", "luks", "-o", "key-secret=s,iter-time=10", "data", "base"]);
    host.base(0);
    host.open();
    assert!(host.read() == data);
    host.close();

    std::fs::remove_file(host.path("base")).unwrap();
    host.base(FILE_LEN);
    host.format(json!({"version": "luks1"}));
    host.open();
    host.write(&data);
    host.close();
    let source = "driver=luks,key-secret=s,file.filename=base";
    host.qemu_img(&["convert", "--image-opts", source, "-O", "raw", "data2"]);
    assert!(std::fs::read(host.path("data2")).unwrap()[..DATA_LEN] == data);
}

#[test]
fn key_slots_of_a_disk_in_use_are_changed() {
    for version in ["luks1", "luks2"] {
        let host = Host::new();
        host.base(FILE_LEN);
        host.format(json!({"version": version, "pbkdf": "pbkdf2"}));
        host.open();
        let add = json!({"name": "luks", "key_file": host.path("key"), "new_key_file": host.path("other"),
            "pbkdf": "pbkdf2", "iter_time_ms": 1});
        assert_eq!(host.call("bdev_luks_add_key_slot", add).unwrap(), 1);
        let header = host.call("bdev_luks_get_header", json!({"name": "luks"})).unwrap();
        let numbers: Vec<_> =
            header["key_slots"].as_array().unwrap().iter().map(|s| &s["key_slot"]).collect();
        assert_eq!((numbers, &header["version"]), (vec![&json!(0), &json!(1)], &json!(version)));
        assert_eq!(host.call("bdev_luks_get_header", json!({"name": "base"})).unwrap(), header);
        let remove = |slot: u32, key: &str| {
            let params = json!({"name": "luks", "key_slot": slot, "key_file": host.path(key)});
            host.call("bdev_luks_remove_key_slot", params)
        };
        assert_eq!(code(remove(0, "key")), -1, "the key file opens no other slot");
        assert_eq!(code(remove(7, "key")), -2);
        remove(0, "other").unwrap();
        assert_eq!(code(remove(1, "other")), -16, "the last one stays");
        assert_eq!(host.attached(|vm| vm.read(0, PIECE).map(|data| data.len())), Ok(PIECE));
        host.call("bdev_luks_delete", json!({"name": "luks"})).unwrap();
        assert_eq!(code(host.call("bdev_luks_create", host.open_params("key"))), -1);
        host.call("bdev_luks_create", host.open_params("other")).unwrap();
        let opened = !host.cryptsetup(&["open", "--test-passphrase"]).status.success();
        assert!(opened, "cryptsetup no longer opens it by the old key");
    }
}

#[test]
fn a_disk_with_content_is_not_formatted_by_accident() {
    let host = Host::new();
    let file = File::create(host.path("base")).unwrap();
    file.set_len(FILE_LEN).unwrap();
    file.write_all_at(b"\x53\xef", 1080).unwrap();
    host.base(0);
    let complaint = host.complaint("bdev_luks_format", host.format_params(json!({})));
    assert!(complaint.contains("ext4") && complaint.contains("`overwrite`"), "{complaint}");
    assert_eq!(host.file().metadata().unwrap().len(), FILE_LEN);
    let mut kept = [0; 2];
    host.file().read_exact_at(&mut kept, 1080).unwrap();
    assert_eq!(&kept, b"\x53\xef");
    host.format(json!({"overwrite": true, "pbkdf": "pbkdf2"}));
    let complaint = host.complaint("bdev_luks_format", host.format_params(json!({})));
    assert!(complaint.contains("a LUKS header"), "{complaint}");
    host.open();
    let complaint = host.complaint("bdev_luks_format", host.format_params(json!({"overwrite": true})));
    assert!(complaint.contains("-16") && complaint.contains("luks"), "in use: {complaint}");
    let complaint = host.complaint(
        "bdev_luks_create",
        json!({"name": "second", "base_bdev_name": "base", "key_file": host.path("key")}),
    );
    assert!(complaint.contains("-16") && complaint.contains("luks"), "in use: {complaint}");
}

#[test]
fn what_cannot_be_formatted_or_opened_is_explained() {
    let host = Host::new();
    host.base(FILE_LEN);
    host.call("bdev_malloc_create", json!({"name": "small", "block_size": 512, "num_blocks": 8192})).unwrap();
    for (params, complaint) in [
        (json!({"name": "small"}), "at least 16777728 bytes"),
        (json!({"name": "nothing"}), "nothing"),
        (json!({"version": "luks1", "pbkdf": "argon2id"}), "LUKS1 has no argon2id"),
        (json!({"version": "luks1", "sector_size": 4096}), "LUKS1 has 512 only"),
        (json!({"sector_size": 520}), "520 is not 512"),
        (json!({"aes_bits": 192}), "192, not 128 or 256"),
        (json!({"iter_time_ms": 0}), "from 1 to 60000"),
        (json!({"pbkdf_memory_kib": 4 << 20}), "from 32 to 1048576"),
        (json!({"label": "x".repeat(48)}), "label"),
        (json!({"key_file": "key"}), "the whole path"),
        (json!({"key_file": host.path("missing")}), "No such file"),
        (json!({"key_file": host.path("vhost")}), "not a regular file"),
    ] {
        let error = host.complaint("bdev_luks_format", host.format_params(params));
        assert!(error.contains(complaint), "{complaint}: {error}");
    }
    host.key_file("empty", b"");
    host.key_file("open", b"x");
    std::fs::set_permissions(host.path("open"), Permissions::from_mode(0o640)).unwrap();
    for (key, complaint) in [("empty", "is empty"), ("open", "chmod 600"), ("key", "no LUKS header")] {
        let error = host.complaint("bdev_luks_create", host.open_params(key));
        assert!(error.contains(complaint), "{complaint}: {error}");
    }
    host.format(json!({"pbkdf": "pbkdf2"}));
    let error = host.complaint("bdev_luks_create", host.open_params("other"));
    assert!(error.contains("no key slot opens") && error.contains("line break"), "{error}");
    let mut slot = host.open_params("key");
    slot["key_slot"] = 3.into();
    assert_eq!(code(host.call("bdev_luks_create", slot)), -2);
    host.call("bdev_uring_delete", json!({"name": "base"})).unwrap();
    // The data of the header begins where the file ends.
    host.file().set_len(16 << 20).unwrap();
    host.base(0);
    let error = host.complaint("bdev_luks_create", host.open_params("key"));
    assert!(error.contains("16777216 bytes in all"), "{error}");
}

#[test]
fn foreign_headers_are_named() {
    // The fields of a LUKS1 header: the version, the cipher's name and mode, the hash.
    for (offset, field, complaint) in [
        (6, &[0, 3][..], "LUKS version 3"),
        (8, b"serpent\0", "cipher \\\"serpent-xts-plain64\\\" is not supported"),
        (40, b"cbc-essiv:sha256\0", "cipher \\\"aes-cbc-essiv:sha256\\\" is not supported"),
        (72, b"ripemd160\0", "hash \\\"ripemd160\\\" is not supported"),
        (104, &[0; 4], "detached header"),
    ] {
        let host = Host::new();
        host.base(FILE_LEN);
        host.format(json!({"version": "luks1"}));
        host.file().write_all_at(field, offset).unwrap();
        let error = host.complaint("bdev_luks_create", host.open_params("key"));
        assert!(error.contains(complaint) && error.contains("-95"), "{error}");
    }
}

#[test]
fn a_header_that_needs_too_much_memory_is_refused() {
    let host = Host::new();
    File::create(host.path("base")).unwrap().set_len(FILE_LEN).unwrap();
    let cost = ["--pbkdf-force-iterations", "4", "--pbkdf-memory", "1100000"];
    let args = [&["luksFormat", "--type", "luks2", "--pbkdf", "argon2id"][..], &cost].concat();
    success(&host.cryptsetup(&args));
    host.base(0);
    let error = host.complaint("bdev_luks_create", host.open_params("key"));
    assert!(error.contains("1126400000 bytes of memory") && error.contains("luksConvertKey"), "{error}");
}

#[test]
fn damaged_headers_are_repaired_or_refused() {
    let host = Host::new();
    host.base(FILE_LEN);
    host.format(json!({"pbkdf": "pbkdf2"}));
    let degraded = || host.call("bdev_luks_get_header", json!({"name": "base"})).unwrap()["degraded"].clone();
    assert_eq!(degraded(), false);
    for copy in [0, 16 << 10] {
        host.file().write_all_at(b"damage", copy + 5000).unwrap();
        assert_eq!(degraded(), true);
        let wrong = host.call("bdev_luks_create", host.open_params("other"));
        assert_eq!((code(wrong), degraded()), (-1, json!(true)), "only the owner of a key changes the disk");
        host.open();
        assert_eq!(degraded(), false, "repaired");
        host.call("bdev_luks_delete", json!({"name": "luks"})).unwrap();
        success(&host.cryptsetup(&["open", "--test-passphrase"]));
    }
    host.file().write_all_at(b"damage", 5000).unwrap();
    host.file().write_all_at(b"damage", (16 << 10) + 5000).unwrap();
    let error = host.complaint("bdev_luks_create", host.open_params("key"));
    assert!(error.contains("checksum") && error.contains("luksHeaderRestore"), "{error}");
}

#[test]
fn a_header_that_something_else_has_overwritten_is_repaired_only_on_request() {
    let host = Host::new();
    host.base(FILE_LEN);
    host.format(json!({"pbkdf": "pbkdf2"}));
    // Another system has taken the disk for an empty one.
    let mut foreign = vec![0; 4096];
    foreign[..4].copy_from_slice(b"XFSB");
    host.file().write_all_at(&foreign, 0).unwrap();
    let start = || {
        let mut start = [0; 4];
        host.file().read_exact_at(&mut start, 0).unwrap();
        start
    };
    host.open();
    let add = json!({"name": "luks", "key_file": host.path("key"), "new_key_file": host.path("other")});
    let refused = host.complaint("bdev_luks_add_key_slot", add);
    assert!(
        refused.contains("overwritten by an XFS file system") && refused.contains("--repair"),
        "{refused}"
    );
    host.call("bdev_luks_delete", json!({"name": "luks"})).unwrap();
    assert_eq!(&start(), b"XFSB");
    let mut params = host.open_params("key");
    params["repair"] = true.into();
    host.call("bdev_luks_create", params).unwrap();
    assert_eq!(&start(), b"LUKS");
}

#[test]
fn a_restarted_daemon_unlocks_its_disks_again() {
    let mut host = Host::with(&["--state-dir", "DIR/state"]);
    host.base(FILE_LEN);
    host.format(json!({"pbkdf_memory_kib": 1024, "label": "kept"}));
    host.open();
    host.call("vhost_create_blk_controller", json!({"ctrlr": "kept", "dev_name": "luks"})).unwrap();
    FrontEnd::connect(&host.path("vhost/kept")).write(0, &[7; 4096]).unwrap();
    host.0.kill_and_restart();
    assert_eq!(FrontEnd::connect(&host.path("vhost/kept")).read(0, 4096).unwrap(), [7; 4096]);
    for entry in std::fs::read_dir(host.path("state")).unwrap() {
        let store = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(
            !store.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()),
            "the store has no secret"
        );
    }
    // Without the key file the disk is absent; another key file does not open it; the right one does, without a call.
    let (key, away) = (host.path("key"), host.path("away"));
    std::fs::rename(&key, &away).unwrap();
    host.0.kill_and_restart();
    let why = |words: &str| {
        let absent = || host.call("aryk_absent_get", json!({})).unwrap();
        let is_why = |object: &Value| object["why"].as_str().unwrap().contains(words);
        wait_for(words, || absent().as_array().unwrap().iter().any(is_why));
    };
    why("No such file");
    host.key_file("key", b"another secret");
    why("no key slot opens");
    std::fs::rename(&away, &key).unwrap();
    let disk = json!({"name": "luks", "timeout": 20_000});
    host.call("bdev_get_bdevs", disk).unwrap();
    let socket = host.path("vhost/kept");
    wait_for("the controller is back", || FrontEnd::open(&socket, false).is_ok());
    assert_eq!(FrontEnd::connect(&socket).read(0, 4096).unwrap(), [7; 4096]);
}

#[test]
fn a_key_derivation_delays_neither_a_removal_nor_the_end() {
    let mut host = Host::new();
    host.base(FILE_LEN);
    let in_use = |host: &Host| {
        wait_for("the format has the disk open", || {
            host.call("bdev_get_bdevs", json!({"name": "base"})).unwrap()[0]["claimed"] == true
        });
    };
    // The calls end long before their key derivations, which take a minute.
    let slow = host.format_params(json!({"pbkdf": "pbkdf2", "iter_time_ms": 60_000}));
    std::thread::scope(|scope| {
        let format = scope.spawn(|| host.call("bdev_luks_format", slow.clone()));
        in_use(&host);
        host.call("bdev_uring_delete", json!({"name": "base"})).unwrap();
        assert_eq!(code(format.join().unwrap()), -19);
    });
    host.base(0);
    let client = Client::connect(&host.0.socket());
    let format = std::thread::spawn(move || drop(client.unwrap().call("bdev_luks_format", &slow)));
    in_use(&host);
    assert_eq!(host.0.signal_and_wait("TERM", Duration::from_secs(20)), Some(0));
    format.join().unwrap();
}

#[test]
fn disks_that_do_not_respond_keep_no_other_disk_locked() {
    let host = Host::new();
    host.base(FILE_LEN);
    host.format(json!({"pbkdf": "pbkdf2"}));
    let hour = 3_600_000_000_u64;
    let stuck = ["stuck0", "stuck1", "stuck2"];
    let mut calls = Vec::new();
    for (i, name) in stuck.into_iter().enumerate() {
        let malloc = json!({"name": format!("{name}-base"), "num_blocks": 65536, "block_size": 512});
        host.call("bdev_malloc_create", malloc).unwrap();
        let delay = json!({
            "name": name, "base_bdev_name": format!("{name}-base"), "avg_read_latency": hour, "p99_read_latency": hour,
            "avg_write_latency": hour, "p99_write_latency": hour,
        });
        host.call("bdev_delay_create", delay).unwrap();
        let (client, key) = (Client::connect(&host.0.socket()), host.path("key"));
        calls.push(std::thread::spawn(move || {
            let key_slot = json!({"name": name, "key_file": key, "new_key_file": key});
            let open = json!({"name": format!("{name}-luks"), "base_bdev_name": name, "key_file": key});
            let (method, params) =
                [("bdev_luks_create", open), ("bdev_luks_add_key_slot", key_slot)][i % 2].clone();
            drop(client.unwrap().call(method, &params));
        }));
        wait_for("the call has the disk open", || {
            host.call("bdev_get_bdevs", json!({"name": name})).unwrap()[0]["claimed"] == true
        });
    }
    let slots = host.path("other");
    let add = json!({"name": "base", "key_file": host.path("key"), "new_key_file": slots, "iter_time_ms": 1});
    assert_eq!(host.call("bdev_luks_add_key_slot", add).unwrap(), 1);
    host.open();
    drop(host);
    calls.into_iter().for_each(|call| call.join().unwrap());
}

#[test]
fn disks_are_encrypted_by_the_command_line() {
    let host = Host::new();
    let aryk = |line: &str| host.0.aryk(&line.split(' ').collect::<Vec<_>>());
    aryk("disk create base --file base --size 24M").unwrap();
    let cheap = "--key-file key --iter-time 1 --pbkdf-memory 1M";
    let said = aryk(&format!("luks format base {cheap} --sector-size 4096")).unwrap();
    assert!(said.contains("luks2") && said.contains("aryk luks open base"), "{said}");
    let (code, error) = aryk(&format!("luks format base {cheap}")).unwrap_err();
    assert!(code == 1 && error.contains("a LUKS header") && error.contains("--overwrite"), "{error}");
    let said = aryk("luks open base vm --key-file key").unwrap();
    assert!(said.contains("8M") && said.contains("aryk attach vm"), "{said}");
    let shown = aryk("luks show vm").unwrap();
    for expected in ["AES-256", "4096 bytes", "16M", "argon2id"] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    let said =
        aryk("luks add-key vm --key-file key --new-key-file other --pbkdf pbkdf2 --iter-time 1").unwrap();
    assert!(said.contains("Key slot 1"), "{said}");
    let said = aryk("luks remove-key vm 0 --key-file other").unwrap();
    assert!(said.contains("Key slot 0"), "{said}");
    let (_, error) = aryk("luks remove-key vm 1 --key-file other").unwrap_err();
    assert!(error.contains("the last one"), "{error}");
    let list = aryk("disk list").unwrap();
    assert!(list.lines().any(|line| line.starts_with("vm ") && line.contains("luks")), "{list}");
    let exported = aryk("export").unwrap();
    assert!(exported.contains("bdev_luks_create") && !exported.contains("horse"), "{exported}");
    aryk("disk remove vm base").unwrap();
}
