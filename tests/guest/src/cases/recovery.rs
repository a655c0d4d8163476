//! `arykd` is killed, and its guest continues; a VM migrates to another QEMU and another `arykd`.
//!
//! fio writes and verifies all the time, pass after pass, so that a lost, late or repeated write is found.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Case, Site, TIMEOUT};
use crate::{Daemon, Disk, Guest, Link, Vm};

/// Runs passes of fio until the host ends them; reports each pass.
const PASSES: &str = "
    d=$(disk 0)
    exec 3<&0
    (@HEAR@; touch /tmp/enough) <&3 &
    n=0
    until [ -e /tmp/enough ]; do
        fio --name=pass --filename=$d --direct=1 --ioengine=io_uring --eta=never --rw=randwrite --bs=4k --iodepth=16 \\
            --thread --numjobs=@JOBS@ --offset_increment=16M --size=3M --randseed=$n --verify=crc32c --verify_fatal=1 \\
            --invalidate=0 >/tmp/pass 2>&1 || { cat /tmp/pass >&2; exit 1; }
        n=$((n + 1))
        echo pass $n
    done
    [ $(dmesg | grep -c 'I/O error') = 0 ] && [ ! -e /tmp/stale ]
";

/// Before and beside [`PASSES`]: the guest reads a part of the disk that fio does not touch into the page cache while the
/// VM migrates, so that the device writes pages that were already transferred; and compares it after the migration. A
/// block device without an opener has no cache, and without `invalidate=0` fio empties it. The first read bypasses the
/// cache, so that memory did not hold the right data before.
const FILL: &str = "
    exec 4<$(disk 0)
    part() { dd if=$(disk 0) bs=1M skip=64 count=32 $* 2>/dev/null; }
    dd if=/dev/urandom of=$(disk 0) bs=1M seek=64 count=32 oflag=direct 2>/dev/null
    before=$(part iflag=direct | md5sum)
";
const COMPARE: &str = "await read; part >/dev/null; echo cached; await enough; [ \"$(part | md5sum)\" = \"$before\" ] || touch /tmp/stale";

/// Crashes of `arykd` during one guest's run.
const ROUNDS: u32 = 3;
/// The same in the long form.
const ROUNDS_LONG: u32 = 20;

pub(super) fn cases(long: bool) -> Vec<Case> {
    let rounds = if long { ROUNDS_LONG } else { ROUNDS };
    let mut cases = Vec::new();
    for (link, name) in [(Link::Reconnect, "reconnect"), (Link::Server, "server")] {
        for (queues, ring) in [(1, "split"), (4, "split"), (4, "packed")] {
            let name = format!("recovery/{name},{queues}q,{ring}");
            cases.push(Case::new(name, move |site| killed(site, link, queues, ring, rounds)));
        }
    }
    cases.push(Case::new("recovery/migration", migrated));
    cases
}

/// `hear` waits for the host, and ends with the passes.
fn script(queues: u16, hear: &str) -> String {
    PASSES.replace("@JOBS@", &queues.to_string()).replace("@HEAR@", hear)
}

fn daemon(site: &Site<'_>) -> Result<Daemon> {
    let state = site.path("state").display().to_string();
    site.daemon(&["-m", "0x3", "--state-dir", &state])
}

/// The daemon is killed under load, and started again with only its state, `rounds` times.
fn killed(site: &Site<'_>, link: Link, queues: u16, ring: &str, rounds: u32) -> Result<()> {
    let mut arykd = daemon(site)?;
    site.file_disk(&arykd, "disk0", "64M")?;
    let socket = match link {
        Link::Server => {
            let socket = site.path("qemu.sock");
            arykd.attach("disk0", &["--connect", &socket.display().to_string()])?;
            socket
        }
        Link::Client | Link::Reconnect => arykd.attach("disk0", &[])?,
    };
    let on = if ring == "packed" { "on" } else { "off" };
    let properties = format!("packed={on}");
    let vm = Vm::with_disks(vec![Disk { link, properties, ..Disk::new(&socket, queues) }]);
    let mut guest = site.boot(&vm, &script(queues, "await enough"))?;
    for round in 0..rounds {
        guest.wait_line("pass", TIMEOUT).with_context(|| format!("after {round} crashes"))?;
        // At another point of a pass each time.
        std::thread::sleep(Duration::from_millis(u64::from(round * 137 % 800)));
        arykd.kill();
        arykd = daemon(site)?;
    }
    finish(guest)?;
    arykd.stop()
}

/// Runs one more complete pass, and ends the guest.
fn finish(mut guest: Guest) -> Result<()> {
    for _ in 0..2 {
        guest.wait_line("pass", TIMEOUT)?;
    }
    guest.send("enough")?;
    guest.finish(TIMEOUT).map(drop)
}

/// A VM migrates between two QEMUs with a daemon each, on one file.
fn migrated(site: &Site<'_>) -> Result<()> {
    let image = site.path("disk0.img");
    let there = tempfile::tempdir_in(site.directory)?;
    let [from, to] = [site.directory, there.path()].map(|directory| side(site, directory, &image));
    let ((from, socket), (to, to_socket)) = (from?, to?);
    let script = format!("{FILL}{}", script(2, COMPARE));
    let mut guest = site.boot(&Vm::with_disks(vec![Disk::new(&socket, 2)]), &script)?;
    guest.wait_line("pass", TIMEOUT)?;
    let meeting = site.path("meeting.sock");
    let incoming = Some(meeting.clone());
    let vm = Vm { incoming, ..Vm::with_disks(vec![Disk::new(&to_socket, 2)]) };
    let moved = site.boot(&vm, &script)?;
    let on_its_way = guest.begin_move(&meeting)?;
    guest.send("read")?;
    guest.wait_line("cached", TIMEOUT)?;
    on_its_way.end()?;
    finish(moved)?;
    guest.kill();
    from.stop()?;
    to.stop()
}

/// Starts a daemon in `directory` that serves `image`; returns it and its socket.
fn side(site: &Site<'_>, directory: &Path, image: &Path) -> Result<(Daemon, std::path::PathBuf)> {
    let daemon = Daemon::start(&site.lab.bin, directory, &[])?;
    let image = image.display().to_string();
    daemon.aryk(&["disk", "create", "disk0", "--file", &image, "--size", "96M", "--lock", "in-use"])?;
    let socket = daemon.attach("disk0", &[])?;
    Ok((daemon, socket))
}
