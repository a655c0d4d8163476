//! Restores the configuration after a restart. Control context.
//!
//! The calls that made it are made, as many at a time as [`AT_ONCE`], each after those of the objects that it needs. What fails, because a file is not there
//! or its lock is still held by the last requests of a daemon that was killed, stays in the store, is reported, and is tried again for as long as it is not
//! there.
//!
//! Clients are served meanwhile. A call of theirs that changes something waits for the objects that it names, until each was tried once.

mod plan;
mod start_up;
#[cfg(test)]
mod tests;

pub(crate) use start_up::StartUp;
pub use start_up::Unfinished;

use crate::config::AbsentObject;
use crate::{Control, Methods};
use plan::Plan;
use serde_json::value::to_raw_value;
use start_up::Held;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::task::JoinSet;

/// How many objects are made at a time. Each may have a thread, and wait for its store.
const AT_ONCE: usize = 64;
/// How long until what could not be made is tried again: at first, and at last.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// Results of the restoration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Restored {
    /// Number of objects that exist again.
    pub made: usize,
    /// Number of objects that do not.
    pub absent: usize,
}

/// What came of trying all absent objects once.
#[derive(Debug, Default)]
pub(crate) struct Round {
    /// Objects that are there again.
    made: usize,
    /// The keys of those that failed for another reason than before.
    failed_anew: Vec<u64>,
}

impl Round {
    /// Reports what failed for another reason than before.
    pub fn report(&self, control: &Control) {
        self.failed_anew.iter().for_each(|key| report(control, *key));
    }
}

/// Makes what `control` has notes of and is not there. What cannot be made now is tried again in the background. Needs a tokio `LocalSet`.
pub async fn restore(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Restored {
    let mut made = 0;
    let mut plan = Plan::new(control.config.absent_objects());
    let mut held = plan.objects().map(|object| (object.key, control.start_up.hold(object))).collect();
    // An object that was made anew under an old one's name may be needed by what is not noted as needing it: as long as a round gets anywhere, there is
    // another.
    loop {
        let round = run(control, methods, plan, held).await;
        made += round.made;
        plan = Plan::new(control.config.absent_objects());
        held = HashMap::new();
        if round.made == 0 || plan.objects().next().is_none() {
            break;
        }
    }
    let absent: Vec<u64> =
        plan.objects().map(|o| o.key).filter(|key| !control.config.is_waiting(*key)).collect();
    absent.iter().for_each(|key| report(control, *key));
    if !absent.is_empty() {
        tokio::task::spawn_local(retry(Rc::downgrade(control), Rc::downgrade(methods)));
    }
    Restored { made, absent: absent.len() }
}

fn report(control: &Control, key: u64) {
    let (object, why) = (control.config.describe(key), control.config.why_absent(key));
    tracing::error!(%object, why, "cannot be made again; it stays in the state store, and is retried");
}

/// Retries until only objects are absent that wait for a disk, or the daemon ends.
async fn retry(control: Weak<Control>, methods: Weak<Methods<Control>>) {
    let mut delay = RETRY_MIN;
    loop {
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(RETRY_MAX);
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        let round = round(&control, &methods).await;
        round.report(&control);
        if control.config.absent().iter().all(|(key, _)| control.config.is_waiting(*key)) {
            tracing::info!("all configured objects exist again");
            return;
        }
    }
}

/// Tries each absent object once, but for those that wait for a disk.
pub(crate) async fn round(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Round {
    run(control, methods, Plan::new(control.config.absent_objects()), HashMap::new()).await
}

/// Tries the absent objects that name the disk `disk`, which has just come.
pub(crate) async fn make_those_of(disk: &str, control: &Rc<Control>, methods: &Rc<Methods<Control>>) {
    let objects = control.config.absent_objects_that(|call| call.names(disk));
    if !objects.is_empty() {
        run(control, methods, Plan::new(objects), HashMap::new()).await.report(control);
    }
}

/// Carries out a plan. What of `held` belongs to an object, by its key, is let go when that was tried.
async fn run(
    control: &Rc<Control>,
    methods: &Rc<Methods<Control>>,
    mut plan: Plan,
    mut held: HashMap<u64, Held>,
) -> Round {
    let (mut round, mut running) = (Round::default(), JoinSet::new());
    loop {
        while running.len() < AT_ONCE
            && let Some((place, object)) = plan.next()
        {
            let held = held.remove(&object.key);
            let (control, methods) = (Rc::clone(control), Rc::clone(methods));
            running.spawn_local(async move {
                let outcome = make(&control, &methods, &object).await;
                drop(held);
                (place, object.key, outcome)
            });
        }
        let Some(ended) = running.join_next().await else { return round };
        let (place, key, outcome) = ended.expect("a panic ends the daemon");
        plan.done(place);
        match outcome {
            Outcome::Made => round.made += 1,
            Outcome::FailedAnew => round.failed_anew.push(key),
            Outcome::Failed | Outcome::NotTried => {}
        }
    }
}

/// What came of trying an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Made,
    /// For the same reason as before.
    Failed,
    /// For another reason than before.
    FailedAnew,
    /// It is not absent any more, waits for a disk, or is being tried already.
    NotTried,
}

/// Tries an absent object.
async fn make(control: &Control, methods: &Methods<Control>, object: &AbsentObject) -> Outcome {
    let (config, key) = (&control.config, object.key);
    // It may have been made, or forgotten, by a client meanwhile.
    if !config.is_absent(key) || config.is_waiting(key) {
        return Outcome::NotTried;
    }
    let Some(_trying) = control.start_up.try_object(key) else { return Outcome::NotTried };
    let (described, had_failed) = (config.describe(key), config.has_failed(key));
    let params = to_raw_value(&object.call.params).expect("it was JSON");
    match methods.restore(&object.call.method, params).await {
        Ok(_) => {
            if had_failed {
                tracing::info!(object = described, "is there again");
            }
            Outcome::Made
        }
        Err(error) if config.failed(key, &error.to_string()) => Outcome::FailedAnew,
        Err(_) => Outcome::Failed,
    }
}
