//! Two Linux hosts share a disk over NVMe/TCP, and fence each other by reservations (nvme-cli).

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::super::fence::{NODE, Node};
use super::{GUEST_ID, Site, TIMEOUT, boot_as, free_port};

const OTHER_ID: &str = "5f9c1b0e-6a53-4f0c-9a52-3c1d5e7f8a90";
const NQN: &str = "nqn.2016-06.io.spdk:cnode1";

/// Host b fences host a, which writes all the time: after the preemption is complete, no write of a reaches the disk, also not
/// when the daemon was killed and both have connected again. Then a registers again.
pub(super) fn fenced(site: &Site<'_>) -> Result<()> {
    let port = free_port()?;
    let state = site.path("state").display().to_string();
    let options = ["-m", "0x3", "--state-dir", &state];
    let daemon = site.daemon(&options)?;
    site.file_disk(&daemon, "shared", "16M")?;
    daemon.rpc("nvmf_create_transport", &json!({"trtype": "TCP"}))?;
    daemon.rpc("nvmf_create_subsystem", &json!({"nqn": NQN, "allow_any_host": true}))?;
    daemon.rpc("nvmf_subsystem_add_ns", &json!({"nqn": NQN, "namespace": {"bdev_name": "shared"}}))?;
    let address = json!({"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port.to_string()});
    daemon.rpc("nvmf_subsystem_add_listener", &json!({"nqn": NQN, "listen_address": address}))?;

    let script = format!(
        "
        connect {port}
        d=/dev/nvme0n1
        until [ -b $d ]; do sleep 0.1; done
        {NODE}"
    );
    let node = |id, name| Node::of(boot_as(site, NQN, id, &script)?, name);
    let (mut a, mut b) = (node(GUEST_ID, "a")?, node(OTHER_ID, "b")?);
    for (node, key) in [(&mut a, "0xa1"), (&mut b, "0xb2")] {
        node.succeeds(&format!("nvme resv-register $d --nrkey={key} --rrega=0 --cptpl=3"))?;
    }
    // Write exclusive, registrants only.
    a.succeeds("nvme resv-acquire $d --crkey=0xa1 --rtype=3 --racqa=0")?;
    b.fails("nvme resv-acquire $d --crkey=0xb2 --rtype=3 --racqa=0")?;
    let report = b.succeeds("nvme resv-report $d --eds")?;
    ensure!(report.contains("rkey       : a1") && report.contains("rkey       : b2"), "{report}");
    b.succeeds("write_zeroes")?;
    a.guest.send("load")?;
    // Host a writes after this time.
    std::thread::sleep(Duration::from_secs(3));
    b.succeeds("are_zeroes && exit 1 || exit 0")?;
    b.succeeds("nvme resv-acquire $d --crkey=0xb2 --prkey=0xa1 --rtype=3 --racqa=2 && write_zeroes")?;
    let load = a.guest.wait_line("over", TIMEOUT)?;
    ensure!(load.contains("load failed"), "{load}");
    b.succeeds("sleep 2; are_zeroes")?;
    a.fails("write_zeroes")?;
    // Linux before 6.4 calls the conflict a nexus error.
    a.succeeds("dmesg | grep -iE 'critical nexus|reservation conflict'")?;

    daemon.kill();
    let daemon = site.daemon(&options)?;
    // Requests wait until the hosts have connected again.
    b.succeeds("are_zeroes && write_zeroes")?;
    a.fails("dd if=/dev/urandom of=$d bs=1M count=1 oflag=direct")?;
    a.succeeds("are_zeroes")?;
    let report = a.succeeds("nvme resv-report $d --eds")?;
    ensure!(report.contains("rkey       : b2") && !report.contains("rkey       : a1"), "{report}");
    a.fails("nvme resv-release $d --crkey=0xa1 --rtype=3 --rrela=0")?;
    let shown = daemon.rpc("nvmf_get_subsystems", &json!({"nqn": NQN}))?;
    let reservations = &shown[0]["namespaces"][0]["reservations"];
    let registrants = json!([{"hostid": OTHER_ID, "rkey": "b2", "is_holder": true}]);
    let expected = json!({"registrants": registrants, "rtype": "write_exclusive_reg_only", "ptpl": true});
    ensure!(*reservations == expected, "{shown}");
    a.succeeds("nvme resv-register $d --nrkey=0xa1 --rrega=0 --cptpl=3 && write_zeroes")?;
    // The reservation ends with its holder's registration.
    b.succeeds("nvme resv-register $d --crkey=0xb2 --rrega=1")?;
    b.succeeds("write_zeroes")?;
    a.end()?;
    b.end()?;
    daemon.stop()
}
