//! Repeated aborts, and limits of a channel.

use super::shared::stuck;
use super::*;
use crate::unit::jobs::LOOPS_MAX;
use aryk_bdev::{Channel, Completion, Device, Geometry, Io, Limits, OpenError, Status as BdevStatus, Tag};
use aryk_reactor::{Cx, RootId};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A disk that completes reads when the test allows, not when they are aborted, and counts aborts.
#[derive(Clone, Default)]
struct StuckDisk {
    completes: Arc<AtomicBool>,
    aborts: Arc<AtomicU32>,
}

impl Device for StuckDisk {
    fn product(&self) -> &'static str {
        "deaf"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK as u32, Blocks(BLOCKS))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read])
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(StuckChannel { device: self.clone(), root, held: Vec::new() }))
    }
}

struct StuckChannel {
    device: StuckDisk,
    root: RootId,
    held: Vec<Tag>,
}

impl Channel for StuckChannel {
    fn submit(&mut self, io: &Io, _: &mut Cx) {
        self.held.push(io.tag);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {
        self.device.aborts.fetch_add(1, Ordering::Relaxed);
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        cx.wake(self.root);
        if self.device.completes.load(Ordering::Relaxed) {
            out.extend(self.held.drain(..).map(|tag| Completion { tag, status: BdevStatus::Ok }));
        }
    }
}

#[test]
fn equal_aborts_are_merged_and_forgotten_without_callers() {
    let (registry, device) = (Arc::new(Registry::new()), StuckDisk::default());
    registry.register(Identity::named("disk"), Arc::new(device.clone())).unwrap();
    let mut all = Initiators::new(&registry, "disk", Access::Shared, 1);
    sense_of(&mut all, 0, &[0; 6], &[]);
    let mut buffers: Vec<_> = (0..2).map(|_| Buffer::new(BLOCK, 512)).collect();
    let lists: Vec<_> = buffers.iter_mut().map(Buffer::lend).collect();
    let tags: Vec<_> =
        lists.into_iter().map(|list| all.submit(0, &cdb_16(0x88, 0, 0, 1), Sgl::EMPTY, list)).collect();
    let (lun, number) = (Arc::clone(&all.lun), all.nexus(0).number());
    let abort = |all: &mut Initiators, times: usize, which: TaskFilter| -> Vec<_> {
        let begin = |_| {
            let (lun, which) = (Arc::clone(&lun), which.clone());
            all.cx().local().spawn(async move { lun.abort(which).await })
        };
        let tasks = (0..times).map(begin).collect();
        (0..100).for_each(|_| all.turn());
        tasks
    };
    let standing = |all: &Initiators| all.with_channel(0, |channel| channel.pending_aborts.len());
    let aborts = || device.aborts.load(Ordering::Relaxed);
    let of_one = abort(&mut all, 8, TaskFilter::Nexus(number, Some(tags[0].into())));
    assert_eq!((standing(&all), aborts()), (1, 1), "eight aborts are merged into one");
    let of_all = abort(&mut all, 8, TaskFilter::All);
    assert_eq!(
        (standing(&all), aborts()),
        (2, 2),
        "the disk has already received the abort of the first command"
    );
    // The callers of these aborts are gone, and their commands have not ended.
    drop((of_one, of_all));
    let last = abort(&mut all, 1, TaskFilter::All);
    assert_eq!((standing(&all), aborts()), (1, 2));
    device.completes.store(true, Ordering::Relaxed);
    tags.iter().for_each(|tag| assert_eq!(all.wait(0, *tag).status, Status::Good));
    assert_eq!(standing(&all), 0);
    (0..100).for_each(|_| all.turn());
    assert!(last.iter().all(|task| task.is_finished()), "the caller receives the answer");
    buffers.iter_mut().for_each(Buffer::reclaim);
}

#[test]
fn loops_have_a_limit() {
    let mut all = stuck(&[Op::Write], 1);
    let mut block = Buffer::from_slice(&[7; BLOCK]);
    let list = block.lend();
    let write_same = cdb_16(0x93, 0, 0, 300);
    for round in 0..2 {
        let tags: Vec<_> = (0..LOOPS_MAX).map(|_| all.submit(0, &write_same, list, Sgl::EMPTY)).collect();
        (0..100).for_each(|_| all.turn());
        assert!(tags.iter().all(|tag| all.outcome(0, *tag).is_none()), "the commands are in flight");
        let more = all.submit(0, &write_same, list, Sgl::EMPTY);
        assert_eq!(all.wait(0, more).status, Status::TaskSetFull, "{round}");
        let lun = Arc::clone(&all.lun);
        all.cx().local().spawn(async move { lun.abort(TaskFilter::All).await }).detach();
        assert!(tags.iter().all(|tag| all.wait(0, *tag).aborted));
    }
    block.reclaim();
}
