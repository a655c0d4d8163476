//! Odd moments: a machine that stands still, one that hears of nothing, a store that does not answer, a file system. One thread.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_slow_store::{Hold, SlowStore};
use serde_json::json;

use super::agent::{Agent, News};
use super::bench::{Bench, CONTROLLER, heard, lost};
use crate::cases::{PATIENCE, Site};

/// A scene: what happens at a site.
type Play = fn(&Site<'_>) -> Result<()>;

/// All scenes: their names, and what happens in them.
pub(crate) const ALL: [(&str, &str, Play); 5] = [
    (
        "frozen",
        "QEMU holds the machine while disks go, come 20 times, and grow; then it goes on, and finds things as they are",
        frozen,
    ),
    (
        "deaf",
        "a machine that has not agreed to hear of plugged disks: they go nevertheless, and are found when it looks",
        deaf,
    ),
    (
        "stuck",
        "the store of a disk does not answer while the disk is taken away, with writes in the kernel",
        stuck,
    ),
    (
        "file-system",
        "ext4 is unmounted, its disk taken away and given to another target, checked and compared, three times",
        file_system,
    ),
    ("sg", "sg3-utils in the guest, command by command, and what they say", super::sg::asked),
];

/// Times that a disk comes and goes while nobody listens: more than a guest has buffers for.
const STORM: u32 = 20;
/// Long enough for what is not to come.
const NEVER: Duration = Duration::from_secs(1);

/// The machine's processors are held. Meanwhile a disk in use goes, another comes and goes and comes, one goes and comes back, and one grows: each call
/// is answered in time. Then the machine goes on, and finds things as they are.
pub(crate) fn frozen(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut agent = Agent::boot(site, CONTROLLER, "")?;
    let mut disks =
        [bench.file_disk(site, "stays")?, bench.file_disk(site, "goes")?, bench.memory_disk("returns")?];
    for (target, disk) in (0..).zip(&mut disks) {
        bench.plug(disk, target)?;
        agent.hear(News::Added, target)?;
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
    ensure!(agent.hear_within(News::Removed, 1, NEVER)?.is_none(), "the machine did not stand still");
    agent.guest().thaw()?;

    agent.hear(News::Removed, 1)?;
    agent.hear(News::Removed, 2)?;
    agent.hear(News::Added, 5)?;
    heard(&mut agent, News::Resized, 0, grown)?;
    lost(&mut agent, burst)?;
    goes.lose(&mut agent)?;
    returns.lose(&mut agent)?;
    // Of a disk that is not there the bus itself says so, and of nothing else anything.
    let kinds = agent.run("kinds")?;
    ensure!(kinds.contains("hostbyte=DID_BAD_TARGET"), "the machine was told of failed commands: {kinds}");
    ensure!(!kinds.contains("Medium_Error"), "{kinds}");
    bench.plug(returns, 1)?;
    agent.hear(News::Added, 1)?;
    returns.check(&mut agent)?;
    comes.prepare(&mut agent)?;
    comes.check(&mut agent)?;
    stays.is_well(&mut agent)?;
    stays.relieve(&mut agent)?;
    stays.check(&mut agent)?;
    agent.finish()?;
    bench.daemon.stop()
}

/// A machine that has not agreed to hear of plugged disks: one is taken away nevertheless, and another is there when the machine looks for it.
pub(crate) fn deaf(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut agent = Agent::boot(site, CONTROLLER, "hotplug=off")?;
    let mut disks = [bench.file_disk(site, "stays")?, bench.file_disk(site, "goes")?];
    for (target, disk) in (0..).zip(&mut disks) {
        bench.plug(disk, target)?;
        ensure!(agent.hear_within(News::Added, target, NEVER)?.is_none(), "the machine was to hear nothing");
        agent.run(&format!("scan {target}"))?;
        agent.hear(News::Added, target)?;
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
    goes.lose(&mut agent)?;
    bench.plug(goes, 2)?;
    agent.run("scan 2")?;
    agent.hear(News::Added, 2)?;
    goes.check(&mut agent)?;
    stays.is_well(&mut agent)?;
    stays.relieve(&mut agent)?;
    agent.finish()?;
    bench.daemon.stop()
}

/// A disk's store does not answer any more, with writes in the kernel, and the disk is taken away: that is answered in time, and the others do not notice.
/// What the kernel has goes back to the guest when the store answers.
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
        agent.hear(News::Added, target)?;
        disk.prepare(&mut agent)?;
    }
    stays.load(&mut agent)?;
    let burst = agent.begin("burst 1")?;
    agent.run("busy 1 16")?;
    store.hold(Hold::All);
    ensure!(store.await_held(4, PATIENCE), "nothing waits for the store");
    bench.unplug(&mut stuck)?;
    let during = Instant::now();
    while during.elapsed() < 4 * NEVER {
        stays.is_well(&mut agent)?;
        std::thread::sleep(NEVER / 10);
    }
    // The daemon itself has no trouble either, and its other disks come and go.
    let mut other = bench.memory_disk("other")?;
    bench.plug(&mut other, 2)?;
    bench.unplug(&mut other)?;
    bench.plug(&mut other, 1)?;
    store.pass();
    store.let_go();
    agent.hear(News::Removed, 1)?;
    lost(&mut agent, burst)?;
    agent.hear(News::Added, 1)?;
    other.prepare(&mut agent)?;
    other.check(&mut agent)?;
    stays.is_well(&mut agent)?;
    stays.relieve(&mut agent)?;
    stays.check(&mut agent)?;
    agent.finish()?;
    let deleted = bench.daemon.call("bdev_uring_delete", &json!({"name": "stuck"}));
    deleted.context("nobody has it open any more")?;
    bench.daemon.stop()
}

/// A file system is unmounted, its disk taken away and given to another target; then it is whole, and what was in it is there.
pub(crate) fn file_system(site: &Site<'_>) -> Result<()> {
    let bench = Bench::new(site)?;
    let mut agent = Agent::boot(site, CONTROLLER, "")?;
    let mut stays = bench.memory_disk("stays")?;
    bench.plug(&mut stays, 0)?;
    agent.hear(News::Added, 0)?;
    stays.prepare(&mut agent)?;
    stays.load(&mut agent)?;
    let mut disk = bench.file_disk(site, "files")?;
    for (target, verb) in [(3, "make_files"), (6, "check_files"), (3, "check_files")] {
        bench.plug(&mut disk, target)?;
        agent.hear(News::Added, target)?;
        let files: u32 = agent.run(&format!("{verb} {target}"))?.parse()?;
        ensure!(files >= 3, "only {files} files were compared");
        bench.unplug(&mut disk)?;
        agent.hear(News::Removed, target)?;
    }
    let kinds = agent.run("kinds")?;
    // The kernel's own last look at a disk that is gone fails, but nothing else.
    ensure!(!kinds.contains("I/O_error"), "an unmounted disk that was taken away has failed: {kinds}");
    stays.relieve(&mut agent)?;
    agent.finish()?;
    bench.daemon.stop()
}
