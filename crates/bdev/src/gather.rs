//! Collects the counters of many disks without delaying their requests. Control context; a task on each reactor reads the
//! counters.
//!
//! A reactor reads a few channels in each turn, so a scrape of thousands of disks takes many turns, each of which is longer by
//! a few microseconds only. Each reactor receives one message and returns one answer, for any number of disks.

use crate::bdev::{Place, lock};
use crate::cell::Cells;
use crate::{Bdev, Summary};
use aryk_reactor::{Cx, Handle, Local};
use futures_channel::oneshot;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The most channels that a reactor reads in a turn, unless a single disk has more channels on it.
const SLICE: usize = 16;

/// A disk whose counters a reactor reads: its index in the caller's list, its serial number, and its reactors.
struct Visit {
    index: usize,
    serial: u64,
    places: Arc<Mutex<Vec<Place>>>,
}

/// A disk's index in the caller's list, and its counters on one reactor.
type OfReactor = (usize, Summary);

/// The counters of a disk on one core.
#[derive(Debug)]
pub struct Part {
    /// The disk's index in the caller's list.
    pub disk: usize,
    /// The core.
    pub core: u16,
    /// The counters of the disk's channels on this core.
    pub counts: Summary,
}

/// Collects the counters of `disks`: at most one part for each disk and core.
pub async fn gather(disks: &[Arc<Bdev>], reactors: &[Handle]) -> Vec<Part> {
    let mut asked = Vec::new();
    for reactor in reactors {
        asked.push((reactor, ask(reactor, slices(disks, reactor)).await));
    }
    let mut parts: HashMap<(usize, u16), Summary> = HashMap::new();
    let mut answered = Vec::new();
    for (reactor, answer) in asked {
        let Some(answer) = answer else { continue };
        let Ok(of_reactor) = answer.await else { continue };
        answered.push(reactor);
        for (disk, counts) in of_reactor {
            parts.entry((disk, reactor.core())).or_default().merge(&counts);
        }
    }
    // A reactor that has ended has no channels, but the counters of its closed channels still count.
    for (index, disk) in disks.iter().enumerate() {
        let places = lock(disk.places());
        for place in places.iter().filter(|place| !answered.contains(&&place.reactor)) {
            parts.entry((index, place.reactor.core())).or_default().add(&place.closed);
        }
    }
    parts.into_iter().map(|((disk, core), counts)| Part { disk, core, counts }).collect()
}

/// The disks that have, or had, channels on `reactor`, divided into the work of single turns.
fn slices(disks: &[Arc<Bdev>], reactor: &Handle) -> Vec<Vec<Visit>> {
    let (mut slices, mut slice, mut channels) = (Vec::new(), Vec::new(), 0);
    for (index, disk) in disks.iter().enumerate() {
        let here = lock(disk.places()).iter().find(|p| p.reactor == *reactor).map(|p| p.channels.max(1));
        let Some(here) = here else { continue };
        if channels + here > SLICE && !slice.is_empty() {
            slices.push(std::mem::take(&mut slice));
            channels = 0;
        }
        channels += here;
        slice.push(Visit { index, serial: disk.serial(), places: Arc::clone(disk.places()) });
    }
    slices.push(slice);
    slices
}

/// Starts a task on a reactor that reads the counters of `slices`; returns the receiver of its answer.
async fn ask(reactor: &Handle, slices: Vec<Vec<Visit>>) -> Option<oneshot::Receiver<Vec<OfReactor>>> {
    let (sender, receiver) = oneshot::channel();
    let start = move |cx: &mut Cx| {
        let task = visit_all(slices, cx.local().clone(), sender);
        cx.local().spawn(task).detach();
    };
    reactor.cast(start).await.ok().map(|()| receiver)
}

async fn visit_all(slices: Vec<Vec<Visit>>, local: Local, sender: oneshot::Sender<Vec<OfReactor>>) {
    let mut parts = Vec::new();
    for slice in slices {
        if sender.is_canceled() {
            return;
        }
        // The task continues in the next turn, after this call has run.
        let visit = |visit: Visit, cx: &mut Cx| (visit.index, visit_one(&visit, cx));
        parts.extend(local.with(move |cx| slice.into_iter().map(|v| visit(v, cx)).collect::<Vec<_>>()).await);
    }
    // The caller may have stopped waiting.
    let _ = sender.send(parts);
}

/// Reads a disk's counters on this reactor. No channel of the reactor closes during the call, so each is counted once.
fn visit_one(visit: &Visit, cx: &mut Cx) -> Summary {
    let mut summary = Summary::default();
    if let Some(place) = lock(&visit.places).iter().find(|p| p.reactor == *cx.handle()) {
        summary.add(&place.closed);
    }
    cx.local_state::<Cells>().for_each(visit.serial, |cell| {
        summary.add(&cell.stats.borrow());
        let (in_flight, waiting) = cell.depths();
        summary.in_flight += u64::from(in_flight);
        summary.waiting += u64::from(waiting);
        summary.in_flight_max += u64::from(cell.take_in_flight_max());
    });
    summary
}
