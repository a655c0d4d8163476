//! Restores the configuration after a restart. Control context.
//!
//! Makes the stored calls, up to [`AT_ONCE`] at the same time, each after those of the objects that it needs. A call fails if,
//! for example, a file is missing or the last requests of a killed daemon still hold its lock; the object then stays in the
//! store, is reported, and is retried until it exists.
//!
//! Clients are served during the restoration. A client's call that changes something waits for the objects that it names, until
//! each was tried once.

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

/// Objects that are created at the same time, at most. Each may use a thread, and wait for its store.
const AT_ONCE: usize = 64;
/// First and last delay before a failed object is retried.
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

/// Result of one attempt to create all absent objects.
#[derive(Debug, Default)]
pub(crate) struct Round {
    /// Number of objects that exist again.
    made: usize,
    /// Keys of the objects that failed for another reason than before.
    newly_failed: Vec<u64>,
}

impl Round {
    /// Reports the objects that failed for another reason than before.
    pub fn report(&self, control: &Control) {
        self.newly_failed.iter().for_each(|key| report(control, *key));
    }
}

/// Creates the noted objects that do not exist. Failed ones are retried in the background. Needs a tokio `LocalSet`.
pub async fn restore(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Restored {
    let mut made = 0;
    let mut plan = Plan::new(control.config.absent_objects());
    let mut held = plan.objects().map(|object| (object.key, control.start_up.hold(object))).collect();
    // An object that was created under the name of an earlier one may be needed by an object whose note does not name it: rounds
    // are repeated as long as one makes progress.
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

/// Tries each absent object once, except those that wait for a disk.
pub(crate) async fn round(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Round {
    run(control, methods, Plan::new(control.config.absent_objects()), HashMap::new()).await
}

/// Tries the absent objects that name the disk `disk`, which has just appeared.
pub(crate) async fn create_dependents_of(disk: &str, control: &Rc<Control>, methods: &Rc<Methods<Control>>) {
    let objects = control.config.absent_objects_that(|call| call.names(disk));
    if !objects.is_empty() {
        run(control, methods, Plan::new(objects), HashMap::new()).await.report(control);
    }
}

/// Carries out a plan. The entry of `held` for an object's key is dropped after the object was tried.
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
            Outcome::NewlyFailed => round.newly_failed.push(key),
            Outcome::Failed | Outcome::NotTried => {}
        }
    }
}

/// Result of the attempt to create an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Made,
    /// The object failed for the same reason as before.
    Failed,
    /// The object failed for another reason than before.
    NewlyFailed,
    /// The object is no longer absent, waits for a disk, or another task is trying it.
    NotTried,
}

/// Tries to create an absent object.
async fn make(control: &Control, methods: &Methods<Control>, object: &AbsentObject) -> Outcome {
    let (config, key) = (&control.config, object.key);
    // A client may have created or removed the object in between.
    if !config.is_absent(key) || config.is_waiting(key) {
        return Outcome::NotTried;
    }
    let Some(_trying) = control.start_up.try_object(key) else { return Outcome::NotTried };
    let (described, had_failed) = (config.describe(key), config.has_failed(key));
    let params = to_raw_value(&object.call.params).expect("the parameters are valid JSON");
    match methods.restore(&object.call.method, params).await {
        Ok(_) => {
            if had_failed {
                tracing::info!(object = described, "exists again");
            }
            Outcome::Made
        }
        Err(error) if config.failed(key, &error.to_string()) => Outcome::NewlyFailed,
        Err(_) => Outcome::Failed,
    }
}
