//! Disks of Linux' own NVMe/TCP target, which `arykd` uses: the target is in one guest, and another guest uses the disk.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::share::{GUEST, OF_HOST, OF_SHARE, add_keys, free_port, with_later_kernel};
use super::{Case, Site, TIMEOUT};
use crate::{Daemon, Disk, Guest, Vm};

const NQN: &str = "nqn.2016-06.io.aryk:linux";

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("remote/linux", linux),
        Case::new("remote/paths", paths),
        Case::new("remote/authentication", authentication),
    ]
}

/// Boots a guest whose target shares the disk `base`, for connections to `ports` of this machine, and goes on with `script`.
/// `open` and `close` begin and end the share at one of its own ports, which have numbers from 1 on; `allow` lets hosts connect.
fn boot_target(site: &Site<'_>, daemon: &Daemon, ports: &[u16], allow: &str, script: &str) -> Result<Guest> {
    let socket = daemon.attach("base", &[])?;
    let forward = |(port, inside): (&u16, u16)| format!(",hostfwd=tcp:127.0.0.1:{port}-:{inside}");
    let forwards: String = ports.iter().zip(4420..).map(forward).collect();
    let forward = format!("-netdev user,id=net0{forwards}");
    let network = format!("{forward} -device virtio-net-pci,netdev=net0,romfile=");
    let vm = Vm {
        arguments: network.split_whitespace().map(str::to_owned).collect(),
        ..Vm::with_disks(vec![Disk::new(&socket, 1)])
    };
    let prepare = format!(
        "
        load_modules nvmet-tcp
        ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
        mount -t configfs configfs /sys/kernel/config
        cd /sys/kernel/config/nvmet
        subsystem=$PWD/subsystems/{NQN}
        mkdir $subsystem $subsystem/namespaces/1
        {allow}
        echo -n $(disk 0) >$subsystem/namespaces/1/device_path
        echo 1 >$subsystem/namespaces/1/enable
        open() {{ ln -s $subsystem ports/$1/subsystems/{NQN}; }}
        close() {{ rm ports/$1/subsystems/{NQN}; }}
        for port in $(seq {count}); do
            mkdir ports/$port
            echo tcp >ports/$port/addr_trtype
            echo ipv4 >ports/$port/addr_adrfam
            echo 10.0.2.15 >ports/$port/addr_traddr
            echo $((4419 + port)) >ports/$port/addr_trsvcid
            open $port
        done
        ",
        count = ports.len()
    );
    let mut guest = site.boot(&vm, &format!("{prepare}{script}"))?;
    guest.wait_line("shared", TIMEOUT)?;
    Ok(guest)
}

/// Boots the guest that uses the disk `far`: verified writes until the word `enough`, and at the end once more.
fn boot_user(site: &Site<'_>, daemon: &Daemon, end: &str) -> Result<Guest> {
    let vm = Vm::with_disks(vec![Disk::new(&daemon.attach("far", &[])?, 2)]);
    let script = format!(
        "
        d=$(disk 0)
        verify() {{
            measure $1 --filename=$d --rw=randrw --bsrange=512-128k --blockalign=512 --iodepth=16 --size=16M \\
                --verify=crc32c --do_verify=1
        }}
        verify first
        echo verified
        until read -t 1 heard && [ $heard = enough ]; do verify again; done
        {end}
        verify last
        "
    );
    let mut guest = site.boot(&vm, &script)?;
    guest.wait_line("verified", TIMEOUT)?;
    Ok(guest)
}

fn attach_far(daemon: &Daemon, port: u16, options: &[&str]) -> Result<String> {
    let address = format!("127.0.0.1:{port}");
    let words = ["disk", "create", "far", "--nvme-tcp", &address, "--subsystem", NQN, "--host-nqn", GUEST];
    daemon.aryk(&[&words[..], options].concat())
}

/// Verified I/O while the target ends its connections again and again, a target that ends and begins anew, and a disk that grows.
fn linux(site: &Site<'_>) -> Result<()> {
    let port = free_port()?;
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "base", "64M")?;
    let script = "
        echo shared
        while read -r heard; do
            case $heard in
                cut) close 1; open 1; echo was-cut ;;
                close) close 1; echo closed ;;
                open) open 1; echo opened ;;
                grow) echo 1 >$subsystem/namespaces/1/revalidate_size; echo grown ;;
                end) break ;;
            esac
        done
    ";
    let allow = "echo 1 >$subsystem/attr_allow_any_host";
    let mut target = boot_target(site, &daemon, &[port], allow, script)?;
    attach_far(&daemon, port, &[])?;
    let end = "until [ $(cat /sys/block/${d#/dev/}/size) = $((96 * 2048)) ]; do sleep 0.1; done";
    let mut user = boot_user(site, &daemon, end)?;
    for _ in 0..5 {
        target.send("cut")?;
        target.wait_line("was-cut", TIMEOUT)?;
        sleep(Duration::from_secs(2));
    }
    target.send("close")?;
    target.wait_line("closed", TIMEOUT)?;
    sleep(Duration::from_secs(5));
    target.send("open")?;
    target.wait_line("opened", TIMEOUT)?;
    user.send("enough")?;
    daemon.aryk(&["disk", "resize", "base", "96M"])?;
    target.send("grow")?;
    target.wait_line("grown", TIMEOUT)?;
    user.finish(TIMEOUT)?;
    daemon.aryk(&["detach", "far"])?;
    daemon.aryk(&["disk", "remove", "far"])?;
    target.send("end")?;
    target.finish(TIMEOUT)?;
    daemon.stop()
}

/// Two paths to one subsystem: verified I/O while one of them is closed, then the other one, then both.
fn paths(site: &Site<'_>) -> Result<()> {
    let ports = [free_port()?, free_port()?];
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "base", "64M")?;
    let script = "
        echo shared
        while read -r heard number; do
            case $heard in
                close) close $number; echo closed ;;
                open) open $number; echo opened ;;
                end) break ;;
            esac
        done
    ";
    let allow = "echo 1 >$subsystem/attr_allow_any_host";
    let mut target = boot_target(site, &daemon, &ports, allow, script)?;
    // Changes of a lost path wait for twice this time.
    daemon.rpc("bdev_nvme_set_options", &json!({"keep_alive_timeout_ms": 1000}))?;
    attach_far(&daemon, ports[0], &[])?;
    let second = json!({
        "name": "far", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": ports[1].to_string(), "subnqn": NQN,
        "hostnqn": GUEST, "multipath": "multipath",
    });
    daemon.rpc("bdev_nvme_attach_controller", &second)?;
    daemon.rpc("bdev_nvme_set_multipath_policy", &json!({"name": "far", "policy": "active_active"}))?;
    let mut user = boot_user(site, &daemon, "")?;
    for closed in [&["1"][..], &["2"], &["1"], &["2"], &["1", "2"]] {
        for number in closed {
            target.send(&format!("close {number}"))?;
            target.wait_line("closed", TIMEOUT)?;
        }
        // What the target has answered before arrives.
        sleep(Duration::from_secs(1));
        let before = done(&daemon)?;
        sleep(Duration::from_secs(6));
        let goes_on = done(&daemon)? > before;
        ensure!(goes_on == (closed.len() < 2), "requests go on exactly if there is a path: {closed:?}");
        for number in closed {
            target.send(&format!("open {number}"))?;
            target.wait_line("opened", TIMEOUT)?;
        }
        until_connected(&daemon)?;
    }
    user.send("enough")?;
    user.finish(TIMEOUT)?;
    let carried = daemon.rpc("bdev_nvme_get_path_iostat", &json!({"name": "far"}))?;
    for path in 0..2 {
        let stat = &carried["stats"][path]["stat"];
        let is_used = |count: &str| stat[count].as_u64().is_some_and(|count| count > 100);
        ensure!(is_used("num_read_ops") && is_used("num_write_ops"), "{carried}");
    }
    daemon.aryk(&["detach", "far"])?;
    daemon.aryk(&["disk", "remove", "far"])?;
    target.send("end")?;
    target.finish(TIMEOUT)?;
    daemon.stop()
}

/// The requests of the disk `far` that have ended.
fn done(daemon: &Daemon) -> Result<u64> {
    let counts = daemon.rpc("bdev_get_iostat", &json!({"name": "far"}))?;
    let count = |name: &str| counts["bdevs"][0][name].as_u64().context("a count");
    Ok(count("num_read_ops")? + count("num_write_ops")?)
}

/// Waits until all paths of `far` are connected.
fn until_connected(daemon: &Daemon) -> Result<()> {
    for _ in 0..600 {
        let controllers = daemon.rpc("bdev_nvme_get_controllers", &json!({"name": "far"}))?;
        let paths = controllers[0]["ctrlrs"].as_array().context("paths")?;
        if paths.len() == 2 && paths.iter().all(|path| path["state"] == "enabled") {
            return Ok(());
        }
        sleep(Duration::from_millis(100));
    }
    bail!("a path is not connected again within a minute")
}

/// A target that asks for a key, and proves that it has one. Debian's current kernel does not authenticate, so this one is later.
fn authentication(site: &Site<'_>) -> Result<()> {
    let lab = with_later_kernel(site)?;
    let site = &Site { lab: &lab, directory: site.directory };
    let port = free_port()?;
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "base", "64M")?;
    add_keys(site, &daemon)?;
    let allow = format!(
        "
        load_modules nvme-auth
        host=$PWD/hosts/{GUEST}
        mkdir $host
        echo {OF_HOST} >$host/dhchap_key
        echo {OF_SHARE} >$host/dhchap_ctrl_key
        echo 'hmac(sha512)' >$host/dhchap_hash
        echo ffdhe3072 >$host/dhchap_dhgroup
        ln -s $host $subsystem/allowed_hosts/{GUEST}
        "
    );
    let mut target = boot_target(site, &daemon, &[port], &allow, "echo shared; await end\n")?;
    let keys = ["--key", "host", "--controller-key", "target"];
    for options in [&[][..], &["--key", "target"], &["--key", "host", "--controller-key", "host"]] {
        let refused = attach_far(&daemon, port, options).expect_err("the target wants other keys");
        ensure!(refused.to_string().contains("authentication"), "{refused}");
    }
    attach_far(&daemon, port, &keys)?;
    let mut user = boot_user(site, &daemon, "")?;
    user.send("enough")?;
    user.finish(TIMEOUT)?;
    let controllers: Value = daemon.rpc("bdev_nvme_get_controllers", &json!({"name": "far"}))?;
    ensure!(controllers[0]["ctrlrs"][0]["state"] == "enabled", "{controllers}");
    daemon.aryk(&["detach", "far"])?;
    daemon.aryk(&["disk", "remove", "far"])?;
    target.send("end")?;
    target.finish(TIMEOUT)?;
    daemon.stop()
}
