//! What the daemon says about an image, and images that librbd has encrypted.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::wait_until;
use serde_json::{Value, json};

use super::{Case, Site, image};
use crate::Cluster;
use crate::cluster::POOL;
use crate::vm::{PATIENCE, Request, Vm};

pub(super) const CASES: [Case; 4] = [
    Case { name: "image/state", body: state },
    Case { name: "image/zero-copy", body: zero_copy },
    Case { name: "image/luks1", body: |site| encrypted(site, "luks1", 1) },
    Case { name: "image/luks2", body: |site| encrypted(site, "luks2", 2) },
];

/// Snapshots and locks are those that `rbd` shows.
fn state(site: &Site<'_>) -> Result<()> {
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    let spec = format!("{POOL}/state");
    let mut vm = Vm::connect(&site.disk(&daemon, "state", "4M")?)?;
    let info = || daemon.rpc("bdev_rbd_get_image_info", &json!({"name": "state"}));
    let fresh = info()?;
    ensure!(fresh["snapshots"] == json!([]) && fresh["size"] == 4 << 20, "{fresh}");
    ensure!(fresh["exclusive_lock"] == true && fresh["luks_version"].is_null(), "{fresh}");
    vm.succeed(Request::Write { at: 0, data: &[1; 512] })?;
    cluster.rbd(&["snap", "create", "--no-progress", &format!("{spec}@one")])?;
    daemon.rpc("bdev_rbd_resize", &json!({"name": "state", "new_size": 8}))?;
    cluster.rbd(&["snap", "create", "--no-progress", &format!("{spec}@two")])?;
    let written = info()?;
    ensure!(written["lock_owner"] == true, "{written}");
    let seen = |list: &Value, members: [&str; 3]| -> Vec<[Value; 3]> {
        let list = list.as_array().cloned().unwrap_or_default();
        list.iter().map(|one| members.map(|member| one[member].clone())).collect()
    };
    let listed = |arguments: &[&str]| -> Result<Value> {
        let text = cluster.rbd(&[arguments, &[&spec, "--format", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| text.clone())
    };
    let snapshots = seen(&listed(&["snap", "ls"])?, ["id", "name", "size"]);
    ensure!(
        snapshots.len() == 2 && seen(&written["snapshots"], ["id", "name", "size"]) == snapshots,
        "{written}"
    );
    let locks = seen(&listed(&["lock", "ls"])?, ["locker", "id", "address"]);
    ensure!(locks.len() == 1 && seen(&written["locks"], ["client", "id", "address"]) == locks, "{written}");
    let shown = daemon.aryk(&["disk", "show", "state"])?;
    ensure!(shown.contains("held by this daemon") && shown.contains("one (4M), two (8M)"), "{shown}");

    // Without the feature, and with a lock that an operator takes.
    cluster.rbd(&["feature", "disable", &spec, "fast-diff,object-map,exclusive-lock"])?;
    cluster.rbd(&["lock", "add", &spec, "by-hand"])?;
    let other = info()?;
    ensure!(other["exclusive_lock"] == false && other["lock_owner"] == false, "{other}");
    ensure!(other["locks"].as_array().is_some_and(|locks| locks.len() == 1), "{other}");
    ensure!(other["locks"][0]["id"] == "by-hand", "{other}");

    // A snapshot's size is its own.
    let mut params = image("state");
    (params["name"], params["rbd_name"]) = (json!("one"), json!("state@one"));
    daemon.rpc("bdev_rbd_create", &params)?;
    let one = daemon.rpc("bdev_rbd_get_image_info", &json!({"name": "one"}))?;
    ensure!(one["size"] == 4 << 20 && one["snapshot_name"] == "one", "{one}");

    let stopped = cluster.stop_osds()?;
    let (_, error) = site.refused("bdev_rbd_get_image_info", &json!({"name": "state"}))?;
    ensure!(error.contains("does not answer"), "{error}");
    drop(stopped);
    daemon.stop()
}

/// librbd may keep memory of requests if the metadata of an image or a pool says so: such an image is refused, and a disk that
/// has been open before copies the data itself.
fn zero_copy(site: &Site<'_>) -> Result<()> {
    const OPTION: &str = "rbd_disable_zero_copy_writes";
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    let spec = format!("{POOL}/zero-copy");
    let mut vm = Vm::connect(&site.disk(&daemon, "zero-copy", "4M")?)?;
    let mut write = |byte| vm.succeed(Request::Write { at: 0, data: &[byte; 4096] });
    write(1)?;
    cluster.rbd(&["config", "image", "set", &spec, OPTION, "false"])?;
    wait_until("a line of the log about the metadata", PATIENCE, || {
        write(2)?;
        Ok(site.log().contains(&format!("rbd config image remove IMAGE {OPTION}")).then_some(()))
    })?;
    ensure!(vm.read(0, 4096)? == [2; 4096], "the write has other data");
    drop(vm);
    daemon.aryk(&["detach", "zero-copy"])?;
    daemon.aryk(&["disk", "remove", "zero-copy"])?;
    let refused = || -> Result<()> {
        let (_, error) = site.refused("bdev_rbd_create", &image("zero-copy"))?;
        ensure!(error.contains(OPTION), "{error}");
        Ok(())
    };
    refused()?;
    cluster.rbd(&["config", "image", "remove", &spec, OPTION])?;
    cluster.rbd(&["config", "pool", "set", POOL, OPTION, "false"])?;
    let of_pool = refused();
    cluster.rbd(&["config", "pool", "remove", POOL, OPTION])?;
    of_pool?;
    daemon.rpc("bdev_rbd_create", &image("zero-copy"))?;
    daemon.stop()
}

/// An image of `rbd encryption format` is a base for a LUKS disk. QEMU's driver of Ceph, in which librbd encrypts, reads what a
/// VM has written, and the other way round.
fn encrypted(site: &Site<'_>, format: &str, version: u16) -> Result<()> {
    const SECRET: &str = "correct horse";
    const LEN: usize = 64 << 10;
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    let key = site.directory.join("key");
    std::fs::write(&key, SECRET)?;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))?;
    cluster.create_image(format, "64M")?;
    let spec = format!("{POOL}/{format}");
    cluster.rbd(&["encryption", "format", &spec, format, &key.display().to_string()])?;
    librbd(cluster, format, &key, &format!("write -P 0x5a 0 {LEN}"))?;

    daemon.rpc("bdev_rbd_create", &image(format))?;
    let info = daemon.rpc("bdev_rbd_get_image_info", &json!({"name": format}))?;
    ensure!(info["luks_version"] == version, "{info}");
    // librbd chooses an expensive key derivation, and the daemon of the tests has few optimisations.
    let key_file = key.display().to_string();
    daemon.aryk(&["--timeout", "120", "luks", "open", format, "plain", "--key-file", &key_file])?;
    let mut vm = Vm::connect(&daemon.attach("plain", &[])?)?;
    ensure!(vm.read(0, LEN)? == [0x5a; LEN], "librbd's data reads differently");
    let last = vm.size()? - LEN as u64;
    for at in [LEN as u64, last] {
        vm.succeed(Request::Write { at, data: &[0xa5; LEN] })?;
    }
    vm.succeed(Request::Flush)?;
    drop(vm);
    daemon.aryk(&["detach", "plain"])?;
    daemon.aryk(&["disk", "remove", "plain"])?;
    daemon.aryk(&["disk", "remove", format])?;
    for at in [LEN as u64, last] {
        librbd(cluster, format, &key, &format!("read -P 0xa5 {at} {LEN}"))?;
    }
    librbd(cluster, format, &key, &format!("read -P 0x5a 0 {LEN}"))?;
    daemon.stop()
}

/// Runs a command of `qemu-io` on an image that librbd decrypts; a read fails if the data is another.
fn librbd(cluster: &Cluster, format: &str, key: &Path, command: &str) -> Result<()> {
    let (of_qemu, conf) = (if format == "luks1" { "luks" } else { format }, cluster.conf());
    let disk = format!(
        "driver=rbd,pool={POOL},image={format},conf={},encrypt.format={of_qemu},encrypt.key-secret=key",
        conf.display()
    );
    let output = Command::new("timeout")
        .args(["60", "qemu-io", "--object"])
        .arg(format!("secret,id=key,file={}", key.display()))
        .args(["--image-opts", &disk, "-c", command])
        .output()
        .context("running qemu-io")?;
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    ensure!(output.status.success() && !said.contains("failed"), "{command}: {}: {said}", output.status);
    Ok(())
}
