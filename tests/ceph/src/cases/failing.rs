//! Images, rights and monitors that are not, or are no longer, what a disk needs: errors say what to do, and nothing hangs.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use aryk_guest_tests::process::wait_until;
use serde_json::{Value, json};

use super::disturbed::{DELETED, SOON, longest_call, under_load};
use super::{CLIENT, Case, Site, image};
use crate::cluster::POOL;
use crate::vm::{PATIENCE, Request, Vm};
use crate::{Cluster, Kind, Store};

const ENOENT: i64 = -2;
const EBUSY: i64 = -16;

pub(super) const CASES: [Case; 7] = [
    Case { name: "failing/renamed", body: renamed },
    Case { name: "failing/removed", body: removed },
    Case { name: "failing/data-pool", body: data_pool },
    Case { name: "failing/demoted", body: demoted },
    Case { name: "failing/monitors", body: monitors },
    Case { name: "long/header", body: header },
    Case { name: "long/rights", body: rights },
];

/// An image is renamed under load: its disk goes on. A successor of the daemon does not find it, says so, and finds it when it
/// has its name again.
fn renamed(site: &Site<'_>) -> Result<()> {
    let state = site.directory.join("state").display().to_string();
    let options = ["--state-dir", state.as_str()];
    let (cluster, daemon) = (site.cluster(), site.client(&options)?);
    let socket = site.disk(&daemon, "renamed", "4M")?;
    let mut vm = Vm::connect(&socket)?;
    let [old, new] = ["renamed", "elsewhere"].map(|name| format!("{POOL}/{name}"));
    let (seen, ()) = under_load(&mut [&mut vm], || cluster.rbd(&["rename", &old, &new]).map(drop))?;
    seen.into_iter().try_for_each(|seen| seen.map(drop))?;
    vm.check_image(&cluster.content("elsewhere")?)?;
    daemon.kill();
    let daemon = site.daemon(&options)?;
    let absent = daemon.aryk(&["disk", "list"])?;
    ensure!(absent.contains("rbd ls POOL"), "the list does not say what to do: {absent}");
    cluster.rbd(&["rename", &new, &old])?;
    wait_until("the disk with the image's old name", PATIENCE, || {
        Ok(daemon.rpc("bdev_get_bdevs", &json!({"name": "renamed"})).ok())
    })?;
    let mut again = Vm::connect(&socket)?;
    again.read(0, 4096)?;
    daemon.stop()
}

/// `rbd rm` refuses the image of a disk that writes, and disturbs no request. The image of a disk that only reads is removed: the
/// disk reads zeroes, and can be deleted.
fn removed(site: &Site<'_>) -> Result<()> {
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    let mut vm = Vm::connect(&site.disk(&daemon, "removed", "4M")?)?;
    let remove = || match cluster.rbd(&["rm", "--no-progress", &format!("{POOL}/removed")]) {
        Ok(_) => anyhow::bail!("an image was removed while a disk writes to it"),
        Err(error) => Ok(error.to_string()),
    };
    let (seen, refusal) = under_load(&mut [&mut vm], remove)?;
    seen.into_iter().try_for_each(|seen| seen.map(drop))?;
    ensure!(refusal.contains("watchers"), "{refusal}");

    cluster.create_image("read", "4M")?;
    let mut params = image("read");
    params["read_only"] = json!(true);
    daemon.rpc("bdev_rbd_create", &params)?;
    let mut reader = Vm::connect(&daemon.attach("read", &["--readonly"])?)?;
    reader.read(0, 4096)?;
    cluster.rbd(&["rm", "--no-progress", &format!("{POOL}/read")])?;
    ensure!(reader.read(0, 4096)? == [0; 4096], "a removed image has data");
    is_deleted(site, &daemon, "read", ENOENT, "rbd ls POOL")?;
    daemon.stop()
}

/// An operator removes the header of an image in use by force: writes wait. No call does, and the disk can be deleted. Its writes
/// may still be carried out, as far as the daemon knows, so it opens no image of that name.
fn header(site: &Site<'_>) -> Result<()> {
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    let mut vm = Vm::connect(&site.disk(&daemon, "header", "4M")?)?;
    let info = cluster.rbd(&["info", "--format", "json", &format!("{POOL}/header")])?;
    let info: Value = serde_json::from_str(&info)?;
    let id = info["id"].as_str().context("an image without an id")?;
    cluster.rados(&["-p", POOL, "rm", &format!("rbd_header.{id}")])?;
    vm.submit(0, Request::Write { at: 0, data: &[2; 4096] });
    std::thread::sleep(SOON);
    ensure!(vm.take()?.is_none(), "a write to an image without a header has ended");
    is_deleted(site, &daemon, "header", EBUSY, "removed disk")?;
    daemon.stop()
}

/// Deletes a disk, and tries to create it again, which is refused with this code and text.
fn is_deleted(site: &Site<'_>, daemon: &Daemon, name: &str, expected: i64, part: &str) -> Result<()> {
    ensure!(longest_call(daemon)? < SOON, "calls wait for a removed image");
    let (_, took) = daemon.call("bdev_rbd_delete", &json!({"name": name}))?;
    ensure!(took < DELETED, "the deletion took {took:?}");
    let (code, text) = site.refused("bdev_rbd_create", &image(name))?;
    ensure!(code == expected && text.contains(part) && text.contains(name), "{code}, {text}");
    Ok(())
}

/// The data of an image is in a pool of its own, which is deleted: requests fail, as `aryk doctor` says.
fn data_pool(site: &Site<'_>) -> Result<()> {
    const DATA: &str = "data-only";
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    cluster.create_pool(DATA)?;
    cluster.rbd(&["create", "--size", "4M", "--data-pool", DATA, &format!("{POOL}/split")])?;
    daemon.rpc("bdev_rbd_create", &image("split"))?;
    let mut vm = Vm::connect(&daemon.attach("split", &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    cluster.ceph(&["osd", "pool", "delete", DATA, DATA, "--yes-i-really-really-mean-it"])?;
    for request in [Request::Write { at: 0, data: &[2; 4096] }, Request::Read { at: 0, len: 4096 }] {
        ensure!(vm.execute(request)?.is_err(), "a request to a deleted pool succeeded");
    }
    let doctor = daemon.aryk(&["doctor"])?;
    ensure!(doctor.contains("split"), "{doctor}");
    daemon.rpc("bdev_rbd_delete", &json!({"name": "split"}))?;
    daemon.stop()
}

/// An image becomes the secondary of a mirror: writes fail as read-only, and reads go on. After its promotion, a new disk writes.
fn demoted(site: &Site<'_>) -> Result<()> {
    const MIRRORED: &str = "mirrored";
    let (cluster, daemon) = (site.cluster(), site.client(&[])?);
    cluster.create_pool(MIRRORED)?;
    let spec = format!("{MIRRORED}/image");
    cluster.rbd(&["create", "--size", "4M", &spec])?;
    cluster.rbd(&["mirror", "pool", "enable", MIRRORED, "image"])?;
    cluster.rbd(&["mirror", "image", "enable", &spec, "snapshot"])?;
    let mut disk = image("image");
    (disk["name"], disk["pool_name"]) = (json!(MIRRORED), json!(MIRRORED));
    daemon.rpc("bdev_rbd_create", &disk)?;
    let mut vm = Vm::connect(&daemon.attach(MIRRORED, &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;
    cluster.rbd(&["mirror", "image", "demote", &spec])?;
    ensure!(vm.execute(Request::Write { at: 0, data: &[2; 4096] })?.is_err(), "a secondary was written");
    ensure!(vm.read(0, 4096)? == [1; 4096], "the secondary has other data");
    let doctor = daemon.aryk(&["doctor"])?;
    ensure!(doctor.contains(MIRRORED) && doctor.contains("Read-only"), "{doctor}");
    cluster.rbd(&["mirror", "image", "promote", &spec])?;
    drop(vm);
    daemon.aryk(&["disk", "remove", "--force", MIRRORED])?;
    daemon.rpc("bdev_rbd_create", &disk)?;
    let mut vm = Vm::connect(&daemon.attach(MIRRORED, &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[3; 4096] })?;
    daemon.stop()
}

/// Monitors at which nobody listens, or nobody answers, or that are not named.
fn monitors(site: &Site<'_>) -> Result<()> {
    const TIMEOUT: Duration = Duration::from_secs(1);
    let daemon = site.daemon(&[])?;
    // Accepts connections, as the kernel does by itself, and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let monitor = |port: u16| format!("mon host = [v2:127.0.0.1:{port}]");
    let cases = [
        ("closed", monitor(closed), "rados_connect", "no monitor answers"),
        ("silent", monitor(silent.local_addr()?.port()), "rados_connect", "no monitor answers"),
        ("unknown", "mon host = monitor.invalid".to_owned(), "rados_connect", "`mon_host`"),
        ("none", String::new(), "rados_connect", "`mon_host`"),
    ];
    for (name, line, call, remedy) in cases {
        let conf = site.directory.join(format!("{name}.conf"));
        std::fs::write(&conf, format!("[global]\n{line}\nauth client required = none\n"))?;
        let options = json!({"client_mount_timeout": TIMEOUT.as_secs().to_string()});
        let params = json!({"name": name, "config_file": conf, "config_param": options});
        let began = Instant::now();
        let refused = std::thread::scope(|scope| {
            let refused = scope.spawn(|| site.refused("bdev_rbd_register_cluster", &params));
            let mut longest = Duration::ZERO;
            while !refused.is_finished() {
                longest = longest.max(longest_call(&daemon)?);
                std::thread::sleep(Duration::from_millis(20));
            }
            ensure!(longest < SOON, "a call took {longest:?} while monitors did not answer");
            refused.join().expect("the call does not panic")
        });
        let (code, text) = refused.with_context(|| name.to_owned())?;
        ensure!(text.contains(call) && text.contains(remedy), "{name}: {code}, {text}");
        ensure!(began.elapsed() < 3 * TIMEOUT, "{name}: refused after {:?}", began.elapsed());
    }
    daemon.stop()
}

/// The rights of a user are taken away, and its key is deleted, while its disk has requests: as soon as the OSD asks for them
/// again, writes are denied, or wait; with rights, requests go on.
fn rights(site: &Site<'_>) -> Result<()> {
    /// Seconds for which a client's rights are valid.
    const VALID: &str = "20";
    const USER: &str = "client.vms";
    let mut cluster = Cluster::start(&Kind { authenticated: true, store: Store::File, ..Kind::SMALL })?;
    for option in ["auth_service_ticket_ttl", "auth_mon_ticket_ttl"] {
        cluster.ceph(&["config", "set", "global", option, VALID])?;
    }
    let key = cluster.create_user("vms", POOL)?;
    cluster.create_image("rights", "4M")?;
    let daemon = site.daemon(&[])?;
    let client = json!({"name": CLIENT, "user_id": "vms", "config_file": cluster.conf(), "key_file": key});
    daemon.rpc("bdev_rbd_register_cluster", &client)?;
    daemon.rpc("bdev_rbd_create", &image("rights"))?;
    let mut vm = Vm::connect(&daemon.attach("rights", &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[1; 4096] })?;

    let reads_only = format!("allow r pool={POOL}");
    cluster.ceph(&["auth", "caps", USER, "mon", "profile rbd", "osd", &reads_only])?;
    reconnect(&mut cluster, VALID)?;
    let denied = wait_for_error(&mut vm)?;
    let doctor = daemon.aryk(&["doctor"])?;
    println!("a write without rights ends with status {denied}");
    ensure!(doctor.contains("Operation not permitted"), "{doctor}");
    ensure!(longest_call(&daemon)? < SOON, "calls wait for a client without rights");
    drop(vm);
    daemon.aryk(&["disk", "remove", "--force", "rights"])?;
    let (code, text) = site.refused("bdev_rbd_create", &image("rights"))?;
    println!("without rights: {code}, {text}");
    ensure!(text.contains("profile rbd"), "{code}, {text}");

    let all = format!("profile rbd pool={POOL}");
    cluster.ceph(&["auth", "caps", USER, "mon", "profile rbd", "osd", &all])?;
    daemon.rpc("bdev_rbd_unregister_cluster", &json!({"name": CLIENT}))?;
    daemon.rpc("bdev_rbd_register_cluster", &client)?;
    daemon.rpc("bdev_rbd_create", &image("rights"))?;
    let mut vm = Vm::connect(&daemon.attach("rights", &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[3; 4096] })?;
    let exported = cluster.ceph(&["auth", "export", USER])?;
    let saved = site.directory.join("saved");
    std::fs::write(&saved, exported)?;
    cluster.ceph(&["auth", "del", USER])?;
    reconnect(&mut cluster, VALID)?;
    vm.submit(0, Request::Write { at: 0, data: &[4; 4096] });
    std::thread::sleep(Duration::from_secs(5));
    println!("a write without a key, after 5 s: {:?}", vm.take()?);
    ensure!(longest_call(&daemon)? < SOON, "calls wait for a client without a key");
    let (_, took) = deletion(&daemon)?;
    ensure!(took < DELETED, "the deletion took {took:?}");
    let mut unknown = client;
    unknown["name"] = json!("again");
    let (code, text) = site.refused("bdev_rbd_register_cluster", &unknown)?;
    println!("without a key: {code}, {text}");
    ensure!(text.contains("ceph auth get client.USER"), "{code}, {text}");
    cluster.ceph(&["auth", "import", "-i", &saved.display().to_string()])?;
    daemon.rpc("bdev_rbd_register_cluster", &unknown)?;
    daemon.stop()
}

fn deletion(daemon: &Daemon) -> Result<(Value, Duration)> {
    daemon.call("bdev_rbd_delete", &json!({"name": "rights"}))
}

/// Makes clients connect to the OSD again when their rights have expired.
fn reconnect(cluster: &mut Cluster, valid: &str) -> Result<()> {
    std::thread::sleep(Duration::from_secs(valid.parse()?));
    cluster.kill_osd(0)?;
    cluster.start_osd(0)?;
    cluster.await_up(1)
}

/// Writes until a write fails; returns its status.
fn wait_for_error(vm: &mut Vm) -> Result<u8> {
    wait_until("a write that is denied", PATIENCE, || {
        Ok(vm.execute(Request::Write { at: 0, data: &[2; 4096] })?.err().map(|failed| failed.0))
    })
}
