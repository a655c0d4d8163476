//! Disks, controllers and VMs that go below all layers while no OSD answers, beside the VMs that stay. What goes waits for no
//! OSD, and what stays loses nothing.
//!
//! Three further guests have a load. The image of one's last disk is deleted, which a detachment waits for. The VMs of the others
//! are killed; the controller of one is deleted then, and created again when the cluster goes on. Other VMs use both controllers.

use std::slice::SliceIndex;
use std::sync::atomic::Ordering;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::Daemon;
use aryk_guest_tests::process::wait_until;
use serde_json::json;

use super::super::disturbed::{DELETED, DETACHED, SOON, longest_call};
use super::{Stack, WORKS, add_target, controller, disk, group};
use crate::scsi::{Counters, PATIENCE, Progress, Vm};

/// Disks of each of these guests; the deleted one.
const DISKS: usize = 2;
const DELETED_DISK: usize = DISKS - 1;
/// How long the requests have to reach librbd when no OSD answers.
const CALM: Duration = Duration::from_millis(500);
/// Requests after which a load has read each of its blocks.
const ALL_BLOCKS: u64 = 300;

/// A thread with a load, which returns its VM.
type Load<'s> = ScopedJoinHandle<'s, Result<Vm>>;

/// A guest beside those of the [`Stack`].
struct Guest {
    number: usize,
    progress: Progress,
}

impl Guest {
    fn new(number: usize) -> Self {
        Self { number, progress: Progress::new(DISKS) }
    }

    fn image(&self, target: usize) -> String {
        format!("{}-image", disk(self.number, target))
    }

    /// Whether requests to these disks may fail.
    fn may_be_missing(&self, disks: impl SliceIndex<[Counters], Output = [Counters]>, may: bool) {
        self.progress.targets()[disks]
            .iter()
            .for_each(|disk| disk.may_be_missing.store(may, Ordering::Relaxed));
    }

    /// Starts the load of `vm`.
    fn load<'s>(&'s self, scope: &'s Scope<'s, '_>, mut vm: Vm) -> Load<'s> {
        scope.spawn(move || vm.load(&self.progress).map(|()| vm))
    }

    /// Waits until the first disks have completed `requests` more.
    fn await_work(&self, disks: usize, requests: u64, when: &str) -> Result<()> {
        let before = self.progress.done();
        let what = format!("guest {} to work {when}", self.number);
        wait_until(&what, PATIENCE, || {
            ensure!(!self.progress.has_failed(), "the load of guest {} failed {when}", self.number);
            let done = self.progress.done();
            let works = done.iter().zip(&before).take(disks).all(|(now, before)| now - before >= requests);
            Ok(works.then_some(()))
        })
    }
}

/// How long each took.
struct Took {
    detach: Duration,
    disk: Duration,
    controller: Duration,
    vm: Duration,
    /// The longest other call beside them.
    other: Duration,
}

impl Stack<'_> {
    /// The scene of this file.
    pub(super) fn leave_stuck(&self, daemon: &Daemon) -> Result<()> {
        let first = self.progress.len();
        let guests: [Guest; 3] = std::array::from_fn(|at| Guest::new(first + at));
        let groups = first / self.controllers..=(first + 2) / self.controllers;
        for vm in groups.clone() {
            daemon.rpc("bdev_qos_group_create", &json!({"name": group(vm)}))?;
        }
        let mut vms = Vec::new();
        for guest in &guests {
            vms.push(Vm::connect(guest.number, DISKS, &self.build(daemon, guest.number, DISKS)?)?);
        }
        std::thread::scope(|scope| {
            let mut loads = guests.iter().zip(vms).map(|(guest, vm)| guest.load(scope, vm));
            let [with_disk, killed @ ..] = std::array::from_fn::<_, 3, _>(|_| loads.next().expect("three"));
            let result = self.leave(daemon, &guests, killed);
            // The deleted disk's requests do not end.
            guests.iter().for_each(|guest| guest.progress.abandon());
            // A load that has failed says more than the wait that it ended.
            joined(with_disk).context("the load beside a deleted disk")?;
            result
        })?;
        for guest in &guests[1..] {
            self.next_vm(guest.number).with_context(|| format!("the next VM of guest {}", guest.number))?;
        }
        for guest in &guests {
            let name = json!({"ctrlr": controller(guest.number)});
            wait_until("the end of a session", DETACHED, || {
                Ok(daemon.rpc("vhost_delete_controller", &name).ok())
            })?;
            for target in (0..DISKS).filter(|&target| !(guest.number == first && target == DELETED_DISK)) {
                daemon.rpc("bdev_rbd_delete", &json!({"name": guest.image(target)}))?;
            }
        }
        groups
            .into_iter()
            .try_for_each(|vm| daemon.rpc("bdev_qos_group_delete", &json!({"name": group(vm)})).map(drop))
    }

    fn leave(&self, daemon: &Daemon, guests: &[Guest; 3], killed: [Load<'_>; 2]) -> Result<()> {
        let [with_disk, with_controller, _] = guests;
        for guest in guests {
            guest.await_work(DISKS, WORKS, "at the start")?;
        }
        let stopped = self.cluster.stop_osds()?;
        std::thread::sleep(CALM);
        guests[1..].iter().for_each(|guest| guest.progress.abandon());
        let [first, second] = killed.map(|load| joined(load).context("the load of a killed VM"));
        with_disk.may_be_missing(DELETED_DISK.., true);
        let took = all_leave(daemon, guests, [first?, second?])?;
        println!(
            "without an OSD: a disk was detached in {:?}, deleted in {:?}, a killed VM and its controller had gone in {:?}, \
             another VM in {:?}; longest other call {:?}",
            took.detach, took.disk, took.controller, took.vm, took.other
        );
        ensure!(took.detach < DELETED + CALM && took.disk < DELETED, "the disk waited for an OSD");
        ensure!(took.controller < DETACHED && took.vm < DETACHED, "they waited for an OSD");
        ensure!(took.other < SOON, "a call took {:?}", took.other);
        let missing = &with_disk.progress.targets()[DELETED_DISK].missing;
        wait_until("requests to the deleted disk to fail", DETACHED, || {
            Ok((missing.load(Ordering::Relaxed) > WORKS).then_some(()))
        })?;
        let disks = daemon.rpc("bdev_get_bdevs", &json!({}))?;
        let gone = [with_disk.image(DELETED_DISK), disk(with_disk.number, DELETED_DISK)];
        let is_there = |name: &String| {
            disks.as_array().is_some_and(|disks| disks.iter().any(|disk| disk["name"] == *name))
        };
        ensure!(!gone.iter().any(is_there), "{gone:?} are not both gone: {disks}");
        drop(stopped);
        self.await_work("after others have gone")?;
        with_disk.await_work(DELETED_DISK, ALL_BLOCKS, "without its deleted disk")?;
        daemon.rpc("vhost_create_scsi_controller", &json!({"ctrlr": controller(with_controller.number)}))?;
        for target in 0..DISKS {
            // The deleted controller uses the disk until its requests have ended.
            wait_until("a disk of the deleted controller", PATIENCE, || {
                let number = with_controller.number;
                Ok(add_target(daemon, number, target, &disk(number, target)).ok())
            })?;
        }
        Ok(())
    }

    /// Another VM uses the controller of a killed one.
    fn next_vm(&self, number: usize) -> Result<()> {
        let guest = Guest::new(number);
        let vm = Vm::connect(number, DISKS, &self.directory.join("vhost").join(controller(number)))?;
        let mut vm = std::thread::scope(|scope| {
            let load = guest.load(scope, vm);
            let result = guest.await_work(DISKS, ALL_BLOCKS, "as the next VM");
            let end = if result.is_ok() { Progress::stop } else { Progress::abandon };
            end(&guest.progress);
            let vm = joined(load)?;
            result.map(|()| vm)
        })?;
        vm.verify()
    }
}

/// Deletes the disk while it is being detached, kills the VMs, and deletes the controller of one.
fn all_leave(
    daemon: &Daemon,
    [with_disk, with_controller, killed]: &[Guest; 3],
    [first, second]: [Vm; 2],
) -> Result<Took> {
    let call = |method: &str, params| Ok(daemon.call(method, &params).with_context(|| method.to_owned())?.1);
    let kill = |vm: Vm, number: usize| {
        let began = Instant::now();
        drop(vm);
        let name = json!({"name": controller(number)});
        wait_until("the end of the killed VM's session", PATIENCE, || {
            let controllers = daemon.rpc("vhost_get_controllers", &name)?;
            Ok((controllers[0]["sessions"] == json!([])).then_some(()))
        })?;
        Ok(began.elapsed())
    };
    std::thread::scope(|scope| {
        let target = json!({"ctrlr": controller(with_disk.number), "scsi_target_num": DELETED_DISK});
        let detach = scope.spawn(|| call("vhost_scsi_controller_remove_target", target));
        std::thread::sleep(CALM);
        let image = json!({"name": with_disk.image(DELETED_DISK)});
        let disk = scope.spawn(|| call("bdev_rbd_delete", image));
        let vm = scope.spawn(|| kill(second, killed.number));
        let controller = scope.spawn(|| {
            let number = with_controller.number;
            let gone = kill(first, number)?;
            Ok(gone + call("vhost_delete_controller", json!({"ctrlr": controller(number)}))?)
        });
        let threads = [detach, disk, controller, vm];
        let mut other = Duration::ZERO;
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            other = other.max(longest_call(daemon)?);
            std::thread::sleep(Duration::from_millis(50));
        }
        let [detach, disk, controller, vm] = threads.map(joined);
        Ok(Took { detach: detach?, disk: disk?, controller: controller?, vm: vm?, other })
    })
}

/// The result of a thread.
fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().expect("a test's thread does not panic")
}
