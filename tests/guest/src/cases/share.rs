//! Disks that Linux uses over NVMe/TCP: the kernel's initiator and nvme-cli in a guest, whose network is QEMU's own.

mod reservations;

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Case, Lab, Site, TIMEOUT};
use crate::image::Kernel;
use crate::{Daemon, Guest, Vm};

/// This machine, as the guest reaches it.
const HOST: &str = "10.0.2.2";
/// The guest's identifier, and its NQN.
const GUEST_ID: &str = "913fc008-79a7-447f-b2c4-c73543638c31";
pub(super) const GUEST: &str = "nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c31";

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("share/linux", linux),
        Case::new("share/paths", paths),
        Case::new("share/authentication", authentication),
        Case::new("share/reservations", reservations::fenced),
    ]
}

/// The secret of [`GUEST`].
pub(super) const OF_HOST: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// The secret of the target.
pub(super) const OF_SHARE: &str =
    "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";

/// A port without a listener.
pub(super) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// The lab with a kernel that authenticates.
pub(super) fn with_later_kernel(site: &Site<'_>) -> Result<Lab> {
    Ok(Lab { image: site.lab.image.beside(Kernel::Iommufd)?, ..site.lab.clone() })
}

/// Gives the daemon the secret of [`GUEST`] as the key `host`, and that of the target as the key `target`.
pub(super) fn add_keys(site: &Site<'_>, daemon: &Daemon) -> Result<()> {
    for (name, secret) in [("host", OF_HOST), ("target", OF_SHARE)] {
        let path = site.path(name);
        std::fs::write(&path, secret)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        daemon.rpc("keyring_file_add_key", &json!({"name": name, "path": path}))?;
    }
    Ok(())
}

/// Boots a guest with a network and the kernel's initiator. `connect PORT OPTIONS…` connects the disk `nqn`.
fn boot(site: &Site<'_>, nqn: &str, script: &str) -> Result<Guest> {
    boot_as(site, nqn, GUEST_ID, script)
}

/// As [`boot`], of the host with this identifier.
fn boot_as(site: &Site<'_>, nqn: &str, id: &str, script: &str) -> Result<Guest> {
    let prepare = format!(
        "
        load_modules nvme-tcp
        ifconfig lo 127.0.0.1 up
        ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
        connect() {{
            port=$1
            shift
            nvme connect -t tcp -a {HOST} -s $port -n {nqn} --hostnqn nqn.2014-08.org.nvmexpress:uuid:{id} \\
                --hostid {id} --nr-io-queues 2 --reconnect-delay 1 \\
                --keep-alive-tmo 5 \"$@\"
        }}
        "
    );
    let network = "-netdev user,id=net0 -device virtio-net-pci,netdev=net0,romfile=";
    let vm = Vm {
        arguments: network.split_whitespace().map(str::to_owned).collect(),
        ..Vm::with_disks(Vec::new())
    };
    site.boot(&vm, &format!("{prepare}{script}"))
}

/// The hosts that are connected to the only share.
fn hosts(daemon: &Daemon) -> Result<Vec<Value>> {
    let shares: Value = serde_json::from_str(&daemon.aryk(&["--json", "hosts"])?)?;
    Ok(shares[0]["controllers"].as_array().context("no share")?.clone())
}

/// Discovery, verified I/O, a file system that outlives `kill -9` of the daemon under load, a disk that grows while it is used,
/// and trims.
fn linux(site: &Site<'_>) -> Result<()> {
    let port = free_port()?;
    let state = site.path("state").display().to_string();
    let options = ["--state-dir", &state];
    let daemon = site.daemon(&options)?;
    site.file_disk(&daemon, "data", "192M")?;
    let listen = format!("127.0.0.1:{port}");
    let share: Value = serde_json::from_str(
        &daemon.aryk(&["--json", "share", "data", "--listen", &listen, "--host", GUEST])?,
    )?;
    let nqn = share["nqn"].as_str().context("no NQN")?;
    daemon.aryk(&["disk", "create", "memory", "--memory", "--size", "8M"])?;
    daemon.rpc("nvmf_subsystem_add_ns", &json!({"nqn": nqn, "namespace": {"bdev_name": "memory"}}))?;
    let script = format!(
        "
        nvme discover -t tcp -a {HOST} -s {port} --hostnqn {GUEST} >/tmp/found
        grep -q {nqn} /tmp/found
        connect {port}
        d=/dev/nvme0n1
        until [ -b $d ]; do sleep 0.1; done
        measure verified --filename=$d --rw=randwrite --bs=4k --iodepth=32 --size=64M --verify=crc32c
        measure mixed --filename=$d --rw=randrw --bsrange=512-256k --blockalign=512 --iodepth=16 \\
            --size=64M --verify=crc32c --do_verify=1
        m=/dev/nvme0n2
        head -c 64k /dev/urandom >/tmp/random
        dd if=/tmp/random of=$m bs=64k oflag=direct
        nvme copy $m --sdlba=1024 --slbs=0 --blocks=127
        dd if=$m of=/tmp/copied bs=64k skip=8 count=1 iflag=direct
        cmp /tmp/random /tmp/copied
        nvme verify $m --start-block=0 --block-count=127
        ! nvme verify $m --start-block=16384 --block-count=0
        blkdiscard -o 0 -l 32M $d
        mkfs.ext4 -q $d
        mount -t ext4 $d /mnt
        cp -r /usr/bin /mnt/
        (cd /usr && find bin -type f | xargs sha256sum) >/tmp/sums
        sync
        (while [ ! -e /tmp/enough ]; do cp -r /usr/sbin /mnt/more; rm -r /mnt/more; done) &
        load=$!
        echo loaded
        await restarted
        touch /tmp/enough
        wait $load
        sync
        echo 3 >/proc/sys/vm/drop_caches
        (cd /mnt && sha256sum -c /tmp/sums >/dev/null)
        umount /mnt
        e2fsck -fn $d >/dev/null
        echo unmounted
        until [ $(cat /sys/block/nvme0n1/size) = $((256 * 2048)) ]; do sleep 0.1; done
        nvme disconnect -n {nqn}
        "
    );
    let mut guest = boot(site, nqn, &script)?;
    guest.wait_line("loaded", TIMEOUT)?;
    ensure!(hosts(&daemon)?.first().context("no host")?["hostnqn"] == GUEST, "another host is connected");
    let refused = daemon.aryk(&["unshare", nqn]).expect_err("a host uses the disk");
    ensure!(refused.to_string().contains("hosts would lose a disk"), "{refused}");
    daemon.kill();
    let daemon = site.daemon(&options)?;
    guest.send("restarted")?;
    guest.wait_line("unmounted", TIMEOUT)?;
    daemon.aryk(&["disk", "resize", "data", "256M"])?;
    guest.finish(TIMEOUT)?;
    ensure!(hosts(&daemon)?.is_empty(), "the host is still connected");
    daemon.aryk(&["unshare", nqn])?;
    daemon.stop()
}

/// Two paths to a disk under verified writes: each in turn is made inaccessible, and one is cut.
fn paths(site: &Site<'_>) -> Result<()> {
    let (first, second) = (free_port()?, free_port()?);
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "data", "64M")?;
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    daemon.rpc("nvmf_create_transport", &json!({"trtype": "TCP"}))?;
    let subsystem = json!({"nqn": nqn, "allow_any_host": true, "ana_reporting": true});
    daemon.rpc("nvmf_create_subsystem", &subsystem)?;
    daemon.rpc("nvmf_subsystem_add_ns", &json!({"nqn": nqn, "namespace": {"bdev_name": "data"}}))?;
    let address = |port: u16| json!({"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port.to_string()});
    let listen = |port| json!({"nqn": nqn, "listen_address": address(port)});
    for port in [first, second] {
        daemon.rpc("nvmf_subsystem_add_listener", &listen(port))?;
    }
    let script = format!(
        "
        connect {first}
        connect {second}
        d=/dev/nvme0n1
        until [ -b $d ]; do sleep 0.1; done
        echo round-robin >/sys/class/nvme-subsystem/nvme-subsys0/iopolicy
        echo connected
        until read -t 1 heard && [ $heard = enough ]; do
            measure verified --filename=$d --rw=randwrite --bs=4k --iodepth=16 --size=16M --verify=crc32c
        done
        measure last --filename=$d --rw=randwrite --bs=4k --iodepth=16 --size=16M --verify=crc32c
        "
    );
    let mut guest = boot(site, nqn, &script)?;
    guest.wait_line("connected", TIMEOUT)?;
    let pause = || std::thread::sleep(std::time::Duration::from_secs(2));
    let state = |port, state: &str| json!({"nqn": nqn, "listen_address": address(port), "ana_state": state});
    let set = |port, to| daemon.rpc("nvmf_subsystem_listener_set_ana_state", &state(port, to));
    for _ in 0..2 {
        pause();
        set(first, "inaccessible")?;
        pause();
        set(second, "non_optimized")?;
        set(first, "optimized")?;
        pause();
        set(second, "inaccessible")?;
        pause();
        set(second, "optimized")?;
    }
    pause();
    daemon.rpc("nvmf_subsystem_remove_listener", &listen(first))?;
    pause();
    daemon.rpc("nvmf_subsystem_add_listener", &listen(first))?;
    guest.send("enough")?;
    guest.finish(TIMEOUT)?;
    daemon.rpc("nvmf_delete_subsystem", &json!({"nqn": nqn}))?;
    daemon.stop()
}

/// A host that proves who it is, and has proof of whom it has reached; hosts without a key, or with another one. Debian's current
/// kernel does not authenticate, so this one is later.
fn authentication(site: &Site<'_>) -> Result<()> {
    let lab = with_later_kernel(site)?;
    let site = &Site { lab: &lab, directory: site.directory };
    let port = free_port()?;
    let daemon = site.daemon(&[])?;
    site.file_disk(&daemon, "data", "64M")?;
    add_keys(site, &daemon)?;
    let listen = format!("127.0.0.1:{port}");
    let words = ["--json", "share", "data", "--listen", &listen, "--host", GUEST];
    let keys = ["--key", "host", "--controller-key", "target"];
    let share: Value = serde_json::from_str(&daemon.aryk(&[&words[..], &keys[..]].concat())?)?;
    let nqn = share["nqn"].as_str().context("no NQN")?;
    let script = format!(
        "
        load_modules nvme-auth
        if connect {port}; then false; fi
        if connect {port} --dhchap-secret {OF_SHARE}; then false; fi
        if connect {port} --dhchap-secret {OF_HOST} --dhchap-ctrl-secret {OF_HOST}; then false; fi
        echo refused
        connect {port} --dhchap-secret {OF_HOST} --dhchap-ctrl-secret {OF_SHARE}
        d=/dev/nvme0n1
        until [ -b $d ]; do sleep 0.1; done
        measure verified --filename=$d --rw=randwrite --bs=4k --iodepth=16 --size=16M --verify=crc32c
        nvme disconnect -n {nqn}
        "
    );
    let mut guest = boot(site, nqn, &script)?;
    guest.wait_line("refused", TIMEOUT)?;
    let stats = daemon.rpc("nvmf_get_stats", &json!({}))?;
    ensure!(stats["failed_authentications"] == 2, "{stats}");
    guest.finish(TIMEOUT)?;
    daemon.aryk(&["unshare", "data"])?;
    daemon.stop()
}
