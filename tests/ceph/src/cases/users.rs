//! Clients that authenticate by keys.

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use serde_json::{Value, json};

use super::{Case, Site};
use crate::cluster::POOL;
use crate::vm::{Request, Vm};
use crate::{Cluster, Kind};

pub(super) const CASES: [Case; 1] = [Case { name: "users/keys", body: keys }];

/// A user has the rights of its key, and no others; wrong keys and users are refused. The rights of `profile rbd` are enough
/// for the successor of a killed daemon, which excludes the client of its predecessor from the cluster.
fn keys(site: &Site<'_>) -> Result<()> {
    let cluster = Cluster::start(&Kind { authenticated: true, ..Kind::SMALL })?;
    cluster.create_pool("other")?;
    let key = cluster.create_user("vms", POOL)?;
    let other = cluster.create_user("strangers", "other")?;
    cluster.create_image("keys", "4M")?;
    let state = site.directory.join("state").display().to_string();
    let options = ["--state-dir", state.as_str()];
    let daemon = site.daemon(&options)?;
    let register = |name: &str, user: &str, key: Value| json!({"name": name, "user_id": user, "config_file": cluster.conf(), "key_file": key});
    // The file of the other user has no key of this one.
    let wrong = site.directory.join("wrong.keyring");
    std::fs::write(&wrong, std::fs::read_to_string(&other)?.replace("strangers", "vms"))?;
    for (what, user, key) in [
        ("the key of another user", "vms", json!(wrong)),
        ("a file without the user's key", "vms", json!(other)),
        ("a key file that does not exist", "vms", json!("/nonexistent.keyring")),
        ("a user that does not exist", "nobody", json!(key)),
    ] {
        let (code, text) = site.refused("bdev_rbd_register_cluster", &register("refused", user, key))?;
        let says_what_to_do =
            text.contains("ceph auth get client.USER") || text.contains("key file of the user");
        ensure!(text.contains("rados_connect") && says_what_to_do, "{what}: {code}, {text}");
    }
    daemon.rpc("bdev_rbd_register_cluster", &register("own", "vms", json!(key)))?;
    daemon.rpc("bdev_rbd_register_cluster", &register("strange", "strangers", json!(other)))?;
    let disk = |name: &str, client: &str| json!({"name": name, "cluster_name": client, "pool_name": POOL, "rbd_name": "keys", "block_size": 512});
    let (code, text) = site.refused("bdev_rbd_create", &disk("strange", "strange"))?;
    ensure!((code == -1 || code == -13) && text.contains("profile rbd"), "{code}, {text}");
    in_namespace(site, &cluster, &daemon)?;
    daemon.rpc("bdev_rbd_create", &disk("own", "own"))?;
    let socket = daemon.attach("own", &[])?;
    let mut vm = Vm::connect(&socket)?;
    vm.succeed(Request::Write { at: 4096, data: &[5; 4096] })?;
    vm.succeed(Request::Flush)?;
    ensure!(cluster.content("keys")?[4096..8192] == [5; 4096], "the write is not in the image");
    let own = daemon.rpc("bdev_rbd_get_clusters_info", &json!({"name": "own"}))?["addresses"].clone();
    daemon.kill();
    let daemon = site.daemon(&options)?;
    let excluded = cluster.ceph(&["osd", "blocklist", "ls"])?;
    let address = own.as_str().context("a client without addresses")?;
    ensure!(excluded.contains(address), "{address} is not among {excluded}");
    let mut vm = Vm::connect(&socket)?;
    ensure!(vm.read(4096, 4096)? == [5; 4096], "the write is lost");
    vm.succeed(Request::Write { at: 0, data: &[6; 4096] })?;
    daemon.stop()
}

/// A user with rights to one namespace has no rights to the images outside.
fn in_namespace(site: &Site<'_>, cluster: &Cluster, daemon: &Daemon) -> Result<()> {
    cluster.rbd(&["namespace", "create", &format!("{POOL}/tenant")])?;
    cluster.create_image("tenant/keys", "4M")?;
    let key = cluster.create_user("tenant", &format!("{POOL} namespace=tenant"))?;
    let client =
        json!({"name": "tenant", "user_id": "tenant", "config_file": cluster.conf(), "key_file": key});
    daemon.rpc("bdev_rbd_register_cluster", &client)?;
    let mut disk = json!({"name": "tenant", "cluster_name": "tenant", "pool_name": POOL, "rbd_name": "keys", "block_size": 512});
    let (code, text) = site.refused("bdev_rbd_create", &disk)?;
    ensure!(text.contains("profile rbd"), "{code}, {text}");
    disk["namespace_name"] = json!("tenant");
    daemon.rpc("bdev_rbd_create", &disk)?;
    let mut vm = Vm::connect(&daemon.attach("tenant", &[])?)?;
    vm.succeed(Request::Write { at: 0, data: &[9; 4096] })?;
    ensure!(cluster.content("tenant/keys")?[..4096] == [9; 4096], "the write is not in the namespace");
    daemon.aryk(&["disk", "remove", "--force", "tenant"]).map(drop)
}
