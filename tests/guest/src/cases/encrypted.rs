//! Encrypted disks, exchanged with Linux' dm-crypt in both directions: the guest encrypts the base by cryptsetup, then the daemon
//! decrypts it for the guest, and the other way round.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;

use super::{Case, Site, TIMEOUT};
use crate::{Daemon, Disk, Vm};

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("disks/encrypted", encrypted)]
}

/// The key slots' secret, in a key file.
const SECRET: &str = "correct horse";
/// The two keys of AES-256-XTS, in hexadecimal digits.
const KEYS: [&str; 2] = [
    "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff101112131415161718191a1b1c1d1e1f",
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f",
];
const SIZE: &str = "64M";

/// A disk: the options of `cryptsetup`, and those of `bdev_crypto_create`; LUKS disks have none.
const DISKS: [(&str, &str); 5] = [
    ("--type luks2 --sector-size 512", ""),
    ("--type luks2 --sector-size 4096", ""),
    ("--type plain --sector-size 512", r#"{}"#),
    ("--type plain --sector-size 4096 --skip 8", r#"{"sector_size": 4096, "iv_offset": 8}"#),
    (
        "--type plain --sector-size 4096 --skip 64 --iv-large-sectors",
        r#"{"sector_size": 4096, "iv_offset": 64, "iv_large_sectors": true}"#,
    ),
];

/// Functions for the guest: `open N OPTIONS` unlocks its N-th disk as /dev/mapper/plainN.
const FUNCTIONS: &str = "
    load_modules dm-crypt
    mkdir -p /run
    pattern() { yes $1 | dd bs=64k count=16 iflag=fullblock 2>/dev/null; }
    write() { pattern $1 >/tmp/data; dd if=/tmp/data of=$2 bs=64k oflag=direct conv=fsync 2>/dev/null; }
    check() { pattern $1 >/tmp/data; dd if=$2 of=/tmp/back bs=64k count=16 iflag=direct 2>/dev/null; cmp /tmp/data /tmp/back; }
    open() {
        n=$1; shift
        case $2 in
            plain) cryptsetup open $* --cipher aes-xts-plain64 --key-size 512 --key-file /tmp/volume $(disk $n) plain$n ;;
            *) cryptsetup open --type luks --key-file /tmp/key $(disk $n) plain$n ;;
        esac
    }
";

fn encrypted(site: &Site<'_>) -> Result<()> {
    let key = site.path("key");
    std::fs::write(&key, SECRET)?;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))?;
    let daemon = site.daemon(&[])?;
    for n in 0..DISKS.len() {
        site.file_disk(&daemon, &format!("base{n}"), SIZE)?;
    }
    let material = json!({"cipher": "AES_XTS", "name": "volume", "key": KEYS[0], "key2": KEYS[1]});
    daemon.rpc("accel_crypto_key_create", &material)?;
    let bytes: String =
        KEYS.concat().as_bytes().chunks(2).map(|d| format!("\\x{}{}", d[0] as char, d[1] as char)).collect();
    let keys = format!("{FUNCTIONS}\n printf %s '{SECRET}' >/tmp/key\n printf '{bytes}' >/tmp/volume\n");

    // The guest encrypts.
    let mut script = keys.clone();
    for (n, (options, plain64)) in DISKS.iter().enumerate() {
        if plain64.is_empty() {
            let cost = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000";
            script += &format!("cryptsetup -q luksFormat {options} {cost} --key-file /tmp/key $(disk {n})\n");
        }
        script += &format!(
            "open {n} {options}\n write guest{n} /dev/mapper/plain{n}\n cryptsetup close plain{n}\n"
        );
    }
    boot(site, &daemon, "base", &script)?;
    let stored = std::fs::read(site.path("base2.img"))?;
    ensure!(!stored.windows(12).any(|part| part == b"guest2\nguest"), "the pattern is stored in plain");

    // The daemon decrypts and encrypts.
    for (n, (_, plain64)) in DISKS.iter().enumerate() {
        let (base, name) = (format!("base{n}"), format!("disk{n}"));
        if plain64.is_empty() {
            daemon.aryk(&["luks", "open", &base, &name, "--key-file", &key.display().to_string()])?;
        } else {
            let plain64: Value = serde_json::from_str(plain64)?;
            let disk =
                json!({"name": name, "base_bdev_name": base, "key_name": "volume", "plain64": plain64});
            daemon.rpc("bdev_crypto_create", &disk)?;
        }
    }
    let mut script = FUNCTIONS.to_owned();
    for (n, (options, _)) in DISKS.iter().enumerate() {
        let sector = if options.contains("4096") { 4096 } else { 512 };
        script += &format!(
            "d=$(disk {n})\n [ $(cat /sys/block/${{d##*/}}/queue/logical_block_size) = {sector} ]\n check guest{n} $d\n write host{n} $d\n"
        );
    }
    boot(site, &daemon, "disk", &script)?;
    for n in 0..DISKS.len() {
        daemon.aryk(&["disk", "remove", &format!("disk{n}")])?;
    }

    // The guest decrypts; also a disk that the daemon has formatted.
    let base = ["luks", "format", "base0", "--overwrite", "--iter-time", "1", "--pbkdf", "pbkdf2"];
    let mut script = keys;
    for (n, (options, _)) in DISKS.iter().enumerate() {
        script +=
            &format!("open {n} {options}\n check host{n} /dev/mapper/plain{n}\n cryptsetup close plain{n}\n");
    }
    boot(site, &daemon, "base", &script)?;
    daemon.aryk(&[&base[..], &["--key-file", &key.display().to_string()]].concat())?;
    daemon.aryk(&["luks", "open", "base0", "disk0", "--key-file", &key.display().to_string()])?;
    boot_one(site, &daemon, "disk0", &format!("{FUNCTIONS}\n write formatted $(disk 0)\n"))?;
    daemon.aryk(&["disk", "remove", "disk0"])?;
    let keys = format!("{FUNCTIONS}\n printf %s '{SECRET}' >/tmp/key\n");
    boot_one(
        site,
        &daemon,
        "base0",
        &format!("{keys} open 0 --type luks2\n check formatted /dev/mapper/plain0\n"),
    )?;
    daemon.stop()
}

/// Runs a script in a guest that has all disks with this prefix.
fn boot(site: &Site<'_>, daemon: &Daemon, prefix: &str, script: &str) -> Result<()> {
    let names: Vec<String> = (0..DISKS.len()).map(|n| format!("{prefix}{n}")).collect();
    run(site, daemon, &names, script)
}

fn boot_one(site: &Site<'_>, daemon: &Daemon, disk: &str, script: &str) -> Result<()> {
    run(site, daemon, &[disk.to_owned()], script)
}

fn run(site: &Site<'_>, daemon: &Daemon, names: &[String], script: &str) -> Result<()> {
    let mut disks = Vec::new();
    for name in names {
        disks.push(Disk::new(&daemon.attach(name, &[])?, 1));
    }
    site.boot(&Vm::with_disks(disks), script)?.finish(TIMEOUT)?;
    for name in names {
        daemon.aryk(&["detach", name])?;
    }
    Ok(())
}
