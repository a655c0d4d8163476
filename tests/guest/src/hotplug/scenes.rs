//! Special situations: a frozen VM, one without hotplug events, a store that does not answer, a file system. One thread.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_slow_store::{Hold, SlowStore};
use serde_json::json;

use super::agent::{Agent, DiskEvent};
use super::bench::{Bench, CONTROLLER, heard, lost};
use crate::cases::{Site, TIMEOUT};

/// A scene: a function that runs at a site.
type Play = fn(&Site<'_>) -> Result<()>;

/// All scenes: name, description and function.
pub(crate) const ALL: [(&str, &str, Play); 5] = [
    (
        "frozen",
        "QEMU freezes the VM while disks are unplugged, plugged 20 times, and resized; then it thaws, and sees the current state",
        frozen,
    ),
    (
        "without-events",
        "a VM that has not negotiated hotplug events: disks are unplugged all the same, and plugged ones are found by a scan",
        without_events,
    ),
    (
        "stuck",
        "the store of a disk does not answer while the disk is unplugged, with writes in the kernel",
        stuck,
    ),
    (
        "file-system",
        "ext4 is unmounted, its disk unplugged and plugged into another target, checked and compared, three times",
        file_system,
    ),
    ("sg", "sg3-utils in the guest, command by command, and their output", super::sg::asked),
];

/// Number of plugs and unplugs while the guest is frozen: more than the guest has event buffers.
const STORM: u32 = 20;
/// Time after which an event counts as absent.
const NEVER: Duration = Duration::from_secs(1);

/// The VM's processors are stopped. During that time a disk in use is unplugged, another is plugged, unplugged and
/// plugged, one is unplugged and plugged, and one grows: each call is answered in time. Then the VM continues, and sees
/// the current state.
pub(crate) fn frozen(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut agent = Agent::boot(site, CONTROLLER, "")?;
    let mut disks =
        [bench.file_disk(site, "stays")?, bench.file_disk(site, "goes")?, bench.memory_disk("returns")?];
    for (target, disk) in (0..).zip(&mut disks) {
        bench.plug(disk, target)?;
        agent.hear(DiskEvent::Added, target)?;
        disk.prepare(&mut agent)?;
        disk.load(&mut agent)?;
    }
    let [stays, goes, returns] = &mut disks;
    let mut comes = bench.memory_disk("comes")?;
    let burst = agent.begin("burst 1")?;
    agent.run("busy 1 16")?;
    for target in [1, 2] {
        agent.run(&format!("begun {target}"))?;
    }
    agent.run("kinds")?;

    agent.guest().freeze()?;
    bench.unplug(goes)?;
    for _ in 0..STORM {
        bench.plug(&mut comes, 5)?;
        bench.unplug(&mut comes)?;
    }
    bench.plug(&mut comes, 5)?;
    bench.unplug(returns)?;
    let grown = bench.grow(stays)?;
    ensure!(agent.hear_within(DiskEvent::Removed, 1, NEVER)?.is_none(), "the VM was not frozen");
    agent.guest().thaw()?;

    agent.hear(DiskEvent::Removed, 1)?;
    agent.hear(DiskEvent::Removed, 2)?;
    agent.hear(DiskEvent::Added, 5)?;
    heard(&mut agent, DiskEvent::Resized, 0, grown)?;
    lost(&mut agent, burst)?;
    goes.end_lost_load(&mut agent)?;
    returns.end_lost_load(&mut agent)?;
    // The kernel reports a bad target for a disk that is gone, and no other error.
    let kinds = agent.run("kinds")?;
    ensure!(kinds.contains("hostbyte=DID_BAD_TARGET"), "the guest's kernel reports failed commands: {kinds}");
    ensure!(!kinds.contains("Medium_Error"), "{kinds}");
    bench.plug(returns, 1)?;
    agent.hear(DiskEvent::Added, 1)?;
    returns.check(&mut agent)?;
    comes.prepare(&mut agent)?;
    comes.check(&mut agent)?;
    stays.check_load(&mut agent)?;
    stays.end_load(&mut agent)?;
    stays.check(&mut agent)?;
    agent.finish()?;
    bench.daemon.stop()
}

/// A VM that has not negotiated hotplug events: a disk is unplugged all the same, and the VM finds a plugged disk when it
/// scans for it.
pub(crate) fn without_events(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut agent = Agent::boot(site, CONTROLLER, "hotplug=off")?;
    let mut disks = [bench.file_disk(site, "stays")?, bench.file_disk(site, "goes")?];
    for (target, disk) in (0..).zip(&mut disks) {
        bench.plug(disk, target)?;
        ensure!(
            agent.hear_within(DiskEvent::Added, target, NEVER)?.is_none(),
            "the VM received a hotplug event"
        );
        agent.run(&format!("scan {target}"))?;
        agent.hear(DiskEvent::Added, target)?;
        disk.prepare(&mut agent)?;
        disk.load(&mut agent)?;
    }
    let [stays, goes] = &mut disks;
    agent.run("begun 1")?;
    for _ in 0..STORM {
        bench.unplug(goes)?;
        bench.plug(goes, 1)?;
    }
    bench.unplug(goes)?;
    goes.end_lost_load(&mut agent)?;
    bench.plug(goes, 2)?;
    agent.run("scan 2")?;
    agent.hear(DiskEvent::Added, 2)?;
    goes.check(&mut agent)?;
    stays.check_load(&mut agent)?;
    stays.end_load(&mut agent)?;
    agent.finish()?;
    bench.daemon.stop()
}

/// A disk's store does not answer any more, with writes in the kernel, and the disk is unplugged: the call is answered in
/// time, without effect on other disks. The kernel's requests are completed to the guest when the store answers.
pub(crate) fn stuck(site: &Site<'_>) -> Result<()> {
    let store = SlowStore::new(site.directory(), 16 << 20)?;
    let bench = Bench::new(site)?;
    let image = store.path().display().to_string();
    bench.daemon.aryk(&["disk", "create", "stuck", "--file", &image])?;
    let mut agent = Agent::boot(site, CONTROLLER, "")?;
    let mut stays = bench.file_disk(site, "stays")?;
    let mut stuck = bench.disk("stuck");
    for (target, disk) in [(0, &mut stays), (1, &mut stuck)] {
        bench.plug(disk, target)?;
        agent.hear(DiskEvent::Added, target)?;
        disk.prepare(&mut agent)?;
    }
    stays.load(&mut agent)?;
    let burst = agent.begin("burst 1")?;
    agent.run("busy 1 16")?;
    store.hold(Hold::All);
    ensure!(store.await_held(4, TIMEOUT), "no request waits for the store");
    bench.unplug(&mut stuck)?;
    let during = Instant::now();
    while during.elapsed() < 4 * NEVER {
        stays.check_load(&mut agent)?;
        std::thread::sleep(NEVER / 10);
    }
    // The daemon itself stays responsive, and its other disks can be plugged and unplugged.
    let mut other = bench.memory_disk("other")?;
    bench.plug(&mut other, 2)?;
    bench.unplug(&mut other)?;
    bench.plug(&mut other, 1)?;
    store.pass();
    store.let_go();
    agent.hear(DiskEvent::Removed, 1)?;
    lost(&mut agent, burst)?;
    agent.hear(DiskEvent::Added, 1)?;
    other.prepare(&mut agent)?;
    other.check(&mut agent)?;
    stays.check_load(&mut agent)?;
    stays.end_load(&mut agent)?;
    stays.check(&mut agent)?;
    agent.finish()?;
    let deleted = bench.daemon.call("bdev_uring_delete", &json!({"name": "stuck"}));
    deleted.context("the disk has no opener any more")?;
    bench.daemon.stop()
}

/// A file system is unmounted, its disk unplugged and plugged into another target; then the file system is intact, with
/// all files.
pub(crate) fn file_system(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut agent = Agent::boot(site, CONTROLLER, "")?;
    let mut stays = bench.memory_disk("stays")?;
    bench.plug(&mut stays, 0)?;
    agent.hear(DiskEvent::Added, 0)?;
    stays.prepare(&mut agent)?;
    stays.load(&mut agent)?;
    let mut disk = bench.file_disk(site, "files")?;
    for (target, verb) in [(3, "make_files"), (6, "check_files"), (3, "check_files")] {
        bench.plug(&mut disk, target)?;
        agent.hear(DiskEvent::Added, target)?;
        let files: u32 = agent.run(&format!("{verb} {target}"))?.parse()?;
        ensure!(files >= 3, "only {files} files were compared");
        bench.unplug(&mut disk)?;
        agent.hear(DiskEvent::Removed, target)?;
    }
    let kinds = agent.run("kinds")?;
    // Only the kernel's own last read of a removed disk may fail.
    ensure!(
        !kinds.contains("I/O_error"),
        "commands failed of a disk that was unmounted and unplugged: {kinds}"
    );
    stays.end_load(&mut agent)?;
    agent.finish()?;
    bench.daemon.stop()
}
