//! What many disks have counted, gathered without being in the way. Control context; the gathering itself runs on each
//! reactor, as a task.
//!
//! A reactor visits a few channels in a turn, and goes on in its next: what it takes for a scrape of thousands of disks is
//! spread over as many turns as it needs, none of which is longer than by some microseconds. One message asks it, and one
//! answer comes back, however many disks there are.

use crate::bdev::{Place, lock};
use crate::cell::Cells;
use crate::{Bdev, Summary};
use aryk_reactor::{Cx, Handle, Local};
use futures_channel::oneshot;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Channels that a reactor visits in a turn; more only where one disk has more on it.
const SLICE: usize = 16;

/// A disk that a reactor is to visit: its place in the caller's list, its number, and where it is.
struct Visit {
    index: usize,
    serial: u64,
    places: Arc<Mutex<Vec<Place>>>,
}

/// What a reactor has of a disk, whose place in the caller's list comes with it.
type OfReactor = (usize, Summary);

/// What a disk has counted on a core.
#[derive(Debug)]
pub struct Part {
    /// The disk's place in the caller's list.
    pub disk: usize,
    /// The core.
    pub core: u16,
    /// The counts of its channels there.
    pub counts: Summary,
}

/// What `disks` have counted, each at most once for each core.
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
    // If a reactor is gone, so are its channels; what they have counted is not.
    for (index, disk) in disks.iter().enumerate() {
        let places = lock(disk.places());
        for place in places.iter().filter(|place| !answered.contains(&&place.reactor)) {
            parts.entry((index, place.reactor.core())).or_default().add(&place.closed);
        }
    }
    parts.into_iter().map(|((disk, core), counts)| Part { disk, core, counts }).collect()
}

/// The disks that have, or had, channels on `reactor`, by what it is to do in one turn.
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

/// Starts a reactor on its slices; its answer is to be waited for.
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
        // The task goes on in the next turn, when it learns that this has run.
        let visit = |visit: Visit, cx: &mut Cx| (visit.index, visit_one(&visit, cx));
        parts.extend(local.with(move |cx| slice.into_iter().map(|v| visit(v, cx)).collect::<Vec<_>>()).await);
    }
    // The caller may have stopped waiting.
    let _ = sender.send(parts);
}

/// No channel of this reactor closes during the call, so each is counted once.
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
