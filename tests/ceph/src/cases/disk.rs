//! A disk in an image: its data, its size, and the errors of its creation.

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::wait_until;
use serde_json::{Value, json};

use super::{CLIENT, Case, Site, image};
use crate::cluster::POOL;
use crate::vm::{LEN_MAX, PATIENCE, Request, Vm};

const MIB: u64 = 1 << 20;
const ENOENT: i64 = -2;

pub(super) const CASES: [Case; 5] = [
    Case { name: "disk/data", body: data },
    Case { name: "disk/resized", body: resized },
    Case { name: "disk/snapshot", body: snapshot },
    Case { name: "disk/namespace", body: namespace },
    Case { name: "disk/refused", body: refused },
];

/// What a VM writes, discards and zeroes is what `rbd export` reads.
fn data(site: &Site<'_>) -> Result<()> {
    const SIZE: usize = 16 << 20;
    let daemon = site.client(&[])?;
    let mut vm = Vm::connect(&site.disk(&daemon, "data", "16M")?)?;
    ensure!(vm.size()? == SIZE as u64 && !vm.is_read_only(), "a disk of {} bytes", vm.size()?);
    let mut expected = vec![0; SIZE];
    // Single sectors, pages, ranges over the border of two objects (4 MiB), the last sector.
    let writes = [
        (0, 512),
        (4608, 4096),
        (4 << 20, 512),
        ((4 << 20) - 6144, 12288),
        (9 << 20, LEN_MAX),
        (SIZE - 512, 512),
    ];
    for (number, (at, len)) in (1_u8..).zip(writes) {
        let bytes: Vec<u8> =
            (0..len).map(|i| number.wrapping_mul(37) ^ (i as u8) ^ ((i >> 8) as u8)).collect();
        vm.succeed(Request::Write { at: at as u64, data: &bytes })?;
        expected[at..at + len].copy_from_slice(&bytes);
    }
    vm.succeed(Request::Flush)?;
    for (at, len) in writes {
        ensure!(
            vm.read(at as u64, len)? == expected[at..at + len],
            "{len} bytes at {at} read back differently"
        );
    }
    vm.succeed(Request::WriteZeroes { at: 9 * MIB + 512, len: 65536 })?;
    expected[(9 << 20) + 512..][..65536].fill(0);
    vm.succeed(Request::Discard { at: 4 * MIB, len: 4 * MIB })?;
    expected[4 << 20..8 << 20].fill(0);
    vm.succeed(Request::Flush)?;
    let beyond = vm.execute(Request::Read { at: SIZE as u64, len: 512 })?;
    ensure!(beyond.is_err(), "a sector behind the end was read");
    let image = site.cluster().content("data")?;
    let wrong = expected.iter().zip(&image).position(|(expected, found)| expected != found);
    ensure!(image.len() == SIZE && wrong.is_none(), "the image differs at byte {wrong:?}");
    daemon.stop()
}

/// Another client resizes the image, then the daemon does: the VM's disk follows.
fn resized(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let mut vm = Vm::connect(&site.disk(&daemon, "resized", "16M")?)?;
    site.cluster().rbd(&["resize", "--no-progress", "--size", "32M", &format!("{POOL}/resized")])?;
    let has = |vm: &Vm, bytes: u64| {
        wait_until("the disk's new size", PATIENCE, || Ok((vm.size()? == bytes).then_some(())))
    };
    has(&vm, 32 * MIB)?;
    vm.succeed(Request::Write { at: 32 * MIB - 512, data: &[7; 512] })?;
    daemon.rpc("bdev_rbd_resize", &json!({"name": "resized", "new_size": 48}))?;
    has(&vm, 48 * MIB)?;
    let image = site.cluster().content("resized")?;
    ensure!(image.len() as u64 == 48 * MIB, "the image has {} bytes", image.len());
    ensure!(image[(32 << 20) - 512..32 << 20] == [7; 512], "a sector of the first growth is lost");
    daemon.stop()
}

/// A snapshot is a disk that is read-only, and keeps its content.
fn snapshot(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    let mut vm = Vm::connect(&site.disk(&daemon, "origin", "4M")?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    vm.succeed(Request::Flush)?;
    site.cluster().rbd(&["snap", "create", "--no-progress", &format!("{POOL}/origin@before")])?;
    vm.succeed(Request::Write { at: 0, data: &[2; 4096] })?;
    let mut params = image("origin");
    params["name"] = json!("snapshot");
    params["rbd_name"] = json!("origin@before");
    daemon.rpc("bdev_rbd_create", &params)?;
    let mut old = Vm::connect(&daemon.attach("snapshot", &["--readonly"])?)?;
    ensure!(old.is_read_only(), "a snapshot is writable");
    ensure!(old.read(0, 4096)? == [1; 4096], "the snapshot has other data");
    let written = old.execute(Request::Write { at: 0, data: &[3; 4096] })?;
    ensure!(written.is_err(), "a snapshot was written");
    ensure!(vm.read(0, 4096)? == [2; 4096], "the image has other data");
    daemon.stop()
}

/// Images of the same name in a namespace and outside are different disks, which a restart opens again.
fn namespace(site: &Site<'_>) -> Result<()> {
    const INNER: &str = "tenant/shared";
    let state = site.directory.join("state").display().to_string();
    let options = ["--state-dir", state.as_str()];
    let (cluster, daemon) = (site.cluster(), site.client(&options)?);
    cluster.rbd(&["namespace", "create", &format!("{POOL}/tenant")])?;
    cluster.create_image(INNER, "4M")?;
    let mut outer = Vm::connect(&site.disk(&daemon, "shared", "8M")?)?;
    let mut params = image("shared");
    (params["name"], params["namespace_name"]) = (json!("inner"), json!("tenant"));
    daemon.rpc("bdev_rbd_create", &params)?;
    let inner_socket = daemon.attach("inner", &[])?;
    let mut inner = Vm::connect(&inner_socket)?;
    ensure!((outer.size()?, inner.size()?) == (8 * MIB, 4 * MIB), "the disks have the same image");
    outer.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    inner.succeed(Request::Write { at: 0, data: &[2; 4096] })?;
    ensure!(cluster.content("shared")?[..4096] == [1; 4096], "the image outside has other data");
    ensure!(cluster.content(INNER)?[..4096] == [2; 4096], "the image in the namespace has other data");

    // By an operator: an image that is created in the namespace, and a snapshot there.
    let (spec, conf) = (format!("{POOL}/tenant/made"), cluster.conf().display().to_string());
    daemon.aryk(&["disk", "create", "made", "--rbd", &spec, "--create", "8M", "--conf", &conf])?;
    cluster.rbd(&["snap", "create", "--no-progress", &format!("{spec}@old")])?;
    daemon.aryk(&["disk", "create", "old", "--rbd", &format!("{spec}@old"), "--conf", &conf])?;
    let listed = cluster.rbd(&["ls", &format!("{POOL}/tenant")])?;
    ensure!(listed.split_whitespace().eq(["made", "shared"]), "{listed}");
    let shown = daemon.aryk(&["disk", "list"])?;
    ensure!(shown.contains(&spec), "the namespace is not shown: {shown}");
    params["namespace_name"] = json!("nowhere");
    params["name"] = json!("missing");
    let (code, text) = site.refused("bdev_rbd_create", &params)?;
    ensure!(code == ENOENT && text.contains("nowhere"), "{code}, {text}");

    daemon.kill();
    let daemon = site.daemon(&options)?;
    let mut inner = Vm::connect(&inner_socket)?;
    ensure!(inner.read(0, 4096)? == [2; 4096], "the successor has opened another image");
    daemon.stop()
}

/// Calls with wrong names are refused, and say what is wrong.
fn refused(site: &Site<'_>) -> Result<()> {
    let daemon = site.client(&[])?;
    site.cluster().create_image("refused", "4M")?;
    let with = |key: &str, value: &str| {
        let mut params = image("refused");
        params[key] = json!(value);
        params
    };
    let cases: [(&str, Value, i64, &str); 4] = [
        ("bdev_rbd_create", with("rbd_name", "nowhere"), ENOENT, "nowhere"),
        ("bdev_rbd_create", with("pool_name", "puddle"), ENOENT, "puddle"),
        ("bdev_rbd_create", with("cluster_name", "other"), ENOENT, "other"),
        (
            "bdev_rbd_register_cluster",
            json!({"name": "c", "config_file": "/nonexistent.conf"}),
            ENOENT,
            "rados_conf_read_file",
        ),
    ];
    for (method, params, expected, part) in cases {
        let (code, text) = site.refused(method, &params).with_context(|| part.to_owned())?;
        ensure!(code == expected && text.contains(part), "{params}: {code}, {text}");
    }
    daemon.rpc("bdev_rbd_create", &image("refused"))?;
    let (_, text) = site.refused("bdev_rbd_unregister_cluster", &json!({"name": CLIENT}))?;
    ensure!(text.contains(CLIENT) && text.contains("used by"), "{text}");
    daemon.rpc("bdev_rbd_delete", &json!({"name": "refused"}))?;
    daemon.rpc("bdev_rbd_unregister_cluster", &json!({"name": CLIENT}))?;
    daemon.stop()
}
