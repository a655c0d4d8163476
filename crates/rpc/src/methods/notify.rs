//! `notify_*`: events about disks, for clients that poll. Control context.
//!
//! Event numbers increase by one. The daemon keeps the last [`KEPT`] events, so that a client that sees a gap in the numbers
//! knows that it has missed some, and must list all disks.

use super::{Control, Count, Error, NoParams, Phase, Table};
use aryk_bdev::Change;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

/// Number of events that the daemon keeps.
const KEPT: usize = 1024;

/// Type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "EventType")]
pub(crate) enum Kind {
    #[serde(rename = "bdev_register")]
    Register,
    #[serde(rename = "bdev_unregister")]
    Unregister,
    #[serde(rename = "bdev_resize")]
    Resize,
}

impl Kind {
    /// The type of SPDK's event for a change of a disk, if there is one.
    pub(crate) const fn of(change: Change) -> Option<Self> {
        match change {
            Change::Added => Some(Self::Register),
            Change::Removed => Some(Self::Unregister),
            Change::Resized => Some(Self::Resize),
            Change::Stalled | Change::Resumed => None,
        }
    }
}

/// One of the results of `notify_get_notifications`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
struct Event {
    /// Type of the event.
    #[serde(rename = "type")]
    kind: Kind,
    /// Name of the disk.
    ctx: String,
    /// Number of the event.
    id: u64,
}

/// The latest events. Usable from any thread.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Ring>);

#[derive(Debug, Default)]
struct Ring {
    latest: VecDeque<Event>,
    next: u64,
}

impl Events {
    /// Records an event about `disk`.
    pub(crate) fn note(&self, kind: Kind, disk: &str) {
        let mut ring = self.lock();
        if ring.latest.len() == KEPT {
            ring.latest.pop_front();
        }
        let id = ring.next;
        ring.next += 1;
        ring.latest.push_back(Event { kind, ctx: disk.to_owned(), id });
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.0.lock().expect("no holder of the lock panics")
    }

    /// Up to `max` events from number `id` on.
    fn since(&self, id: u64, max: usize) -> Vec<Event> {
        let ring = self.lock();
        let later = ring.latest.iter().skip_while(|event| event.id < id);
        later.take(max).cloned().collect()
    }
}

pub(super) fn register(table: &mut Table<Control>) {
    table.add("notify_get_types", Phase::Any, "Lists the types of events.", get_types);
    table.add(
        "notify_get_notifications",
        Phase::RunTime,
        "Lists the latest events about disks, oldest first.",
        get_notifications,
    );
}

async fn get_types(_: &Control, _: NoParams) -> Result<[Kind; 3], Error> {
    Ok([Kind::Register, Kind::Unregister, Kind::Resize])
}

/// Parameters of `notify_get_notifications`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetNotifications {
    /// Number of the first event to return: one more than the last that the client has seen.
    #[serde(default)]
    id: Count,
    /// Maximum number of events. Default: all.
    max: Option<Count>,
}

async fn get_notifications(control: &Control, p: GetNotifications) -> Result<Vec<Event>, Error> {
    let max = p.max.map_or(KEPT, |max| usize::try_from(max.0).unwrap_or(KEPT));
    Ok(control.disks.events.since(p.id.0, max))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(events: &[Event]) -> Vec<u64> {
        events.iter().map(|event| event.id).collect()
    }

    #[test]
    fn events_are_numbered_and_the_oldest_dropped() {
        let events = Events::default();
        assert_eq!(events.since(0, KEPT), []);
        for _ in 0..3 {
            events.note(Kind::Register, "d");
        }
        assert_eq!(ids(&events.since(0, KEPT)), [0, 1, 2]);
        assert_eq!((ids(&events.since(1, 1)), ids(&events.since(3, KEPT))), (vec![1], vec![]));
        (3..KEPT as u64 + 7).for_each(|_| events.note(Kind::Unregister, "d"));
        let all = events.since(0, usize::MAX);
        assert_eq!((all.len(), all[0].id, all[KEPT - 1].id), (KEPT, 7, KEPT as u64 + 6));
    }
}
