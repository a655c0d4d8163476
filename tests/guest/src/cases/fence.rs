//! Two guests share a disk, as nodes of a cluster do, and fence each other by persistent reservations (sg_persist).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Case, Site, TIMEOUT};
use crate::vm::Front;
use crate::{Daemon, Disk, Guest, Vm};

/// Finds the SCSI disk.
const FIND: &str = "
    for block in /sys/bus/scsi/devices/*:0:0:0/block/sd*; do d=/dev/${block##*/}; done
";

/// Executes the host's commands line by line, and reports how each ended. `d` is the disk.
pub(super) const NODE: &str = r#"
    dd if=/dev/zero of=/tmp/zeroes bs=1M count=8 2>/dev/null
    # Writes by 32 at a time, until that fails.
    load() {
        fio --name=load --filename=$d --direct=1 --ioengine=io_uring --rw=randwrite --bs=4k --iodepth=32 --size=8M --time_based \
            --runtime=600 --thread --eta=never --buffer_pattern=0xa5 >/tmp/load 2>&1 && echo load was not stopped || echo load failed
    }
    # The disk is there, and has told what it had to tell.
    greet() { for _ in 1 2 3 4 5; do sg_turs $d >/dev/null 2>&1 && return 0; done; return 1; }
    write_zeroes() { dd if=/tmp/zeroes of=$d bs=1M oflag=direct 2>&1; }
    are_zeroes() { dd if=$d of=/tmp/read bs=1M count=8 iflag=direct 2>/dev/null && cmp /tmp/read /tmp/zeroes; }
    echo ready
    while read -r line; do
        [ "$line" = end ] && break
        ( eval "$line" ) </dev/null >/tmp/said 2>&1 && status=0 || status=$?
        echo "over $status $(tr '\n' ' ' </tmp/said)"
    done
"#;

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("scsi/fence", fenced)]
}

/// A node of the cluster.
pub(super) struct Node {
    pub guest: Guest,
    pub name: &'static str,
}

impl Node {
    fn boot(site: &Site<'_>, socket: &Path, name: &'static str) -> Result<Self> {
        let disk = Disk { front: Front::Scsi, ..Disk::new(socket, 2) };
        let guest = site.boot(&Vm::with_disks(vec![disk]), &format!("{FIND}{NODE}"))?;
        Self::of(guest, name)
    }

    /// The node in a guest that executes the script [`NODE`].
    pub fn of(mut guest: Guest, name: &'static str) -> Result<Self> {
        guest.wait_line("ready", TIMEOUT)?;
        Ok(Self { guest, name })
    }

    /// Runs a command; returns its status and its output.
    pub fn run(&mut self, command: &str) -> Result<(u8, String)> {
        self.guest.send(command)?;
        let line = self.guest.wait_line("over", TIMEOUT)?;
        let line = line.trim_start_matches("over ").to_owned();
        let (status, said) = line.split_once(' ').unwrap_or((&line, ""));
        Ok((status.parse()?, said.to_owned()))
    }

    pub fn succeeds(&mut self, command: &str) -> Result<String> {
        let (status, said) = self.run(command)?;
        ensure!(status == 0, "{}: {command}: {status}: {said}", self.name);
        Ok(said)
    }

    pub fn fails(&mut self, command: &str) -> Result<()> {
        let (status, said) = self.run(command)?;
        ensure!(status != 0, "{}: {command}: {said}", self.name);
        Ok(())
    }

    pub fn end(mut self) -> Result<()> {
        self.guest.send("end")?;
        self.guest.finish(TIMEOUT).map(drop)
    }
}

fn daemon(site: &Site<'_>) -> Result<Daemon> {
    let state = site.path("state").display().to_string();
    site.daemon(&["-m", "0x3", "--state-dir", &state])
}

/// Attaches the disk to a controller for the node `name`.
fn attach(daemon: &Daemon, name: &str) -> Result<PathBuf> {
    daemon.attach("shared", &["--scsi", "--controller", name, "--shared"])
}

/// Node b fences node a, which writes all the time: after PREEMPT is complete, no write of a reaches the disk, even after
/// the daemon has died. QEMU 7.2 does not reconnect a SCSI controller, so both nodes are booted again then.
fn fenced(site: &Site<'_>) -> Result<()> {
    let arykd = daemon(site)?;
    site.file_disk(&arykd, "shared", "16M")?;
    let sockets = [attach(&arykd, "a")?, attach(&arykd, "b")?];
    let (mut a, mut b) = (Node::boot(site, &sockets[0], "a")?, Node::boot(site, &sockets[1], "b")?);
    for (node, key) in [(&mut a, "a1"), (&mut b, "b2")] {
        node.succeeds("greet")?;
        node.succeeds(&format!("sg_persist --out --register-ignore --param-aptpl --param-sark={key} $d"))?;
    }
    a.succeeds("sg_persist --out --reserve --param-rk=a1 --prout-type=5 $d")?;
    let status = b.succeeds("sg_persist --in --read-full-status $d")?;
    ensure!(status.contains("Key=0xa1") && status.contains("Key=0xb2"), "{status}");
    b.succeeds("write_zeroes")?;
    a.guest.send("load")?;
    // Node a writes after this time.
    std::thread::sleep(Duration::from_secs(3));
    b.succeeds("are_zeroes && exit 1 || exit 0")?;
    b.succeeds("sg_persist --out --preempt --param-rk=b2 --param-sark=a1 --prout-type=5 $d && write_zeroes")?;
    let load = a.guest.wait_line("over", TIMEOUT)?;
    ensure!(load.contains("load failed"), "{load}");
    b.succeeds("sleep 2; are_zeroes")?;
    a.fails("write_zeroes")?;
    a.succeeds("dmesg | grep -i 'reservation conflict'")?;
    b.succeeds("are_zeroes")?;

    arykd.kill();
    a.guest.kill();
    b.guest.kill();
    let arykd = daemon(site)?;
    let (mut a, mut b) = (Node::boot(site, &sockets[0], "a")?, Node::boot(site, &sockets[1], "b")?);
    b.succeeds("greet")?;
    let keys = b.succeeds("sg_persist --in --read-keys $d")?;
    ensure!(keys.contains("0xb2") && !keys.contains("0xa1"), "{keys}");
    let held = b.succeeds("sg_persist --in --read-reservation $d")?;
    ensure!(held.contains("Key=0xb2") && held.contains("registrants only"), "{held}");
    a.succeeds("greet")?;
    a.fails("dd if=/dev/urandom of=$d bs=1M count=1 oflag=direct")?;
    a.fails("sg_persist --out --register --param-rk=a1 --param-sark=a1 $d")?;
    b.succeeds("are_zeroes")?;
    // Node a is admitted again.
    a.succeeds("sg_persist --out --register-ignore --param-sark=a1 $d && write_zeroes")?;
    a.end()?;
    b.end()?;
    arykd.stop()
}
