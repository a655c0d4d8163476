//! Restores the configuration after a restart. Control context.
//!
//! Makes the stored calls, up to [`AT_ONCE`] at the same time, each after those of the objects that it needs. A call fails if,
//! for example, a file is missing or the last requests of a killed daemon still hold its lock; the object then stays in the
//! store, is reported, and is retried until it exists. Retries begin with the first failure, while other objects are created. A
//! try that takes long counts as failed after a while and goes on in the background; the object is not tried twice at a time.
//!
//! Clients are served during the restoration. A client's call that changes something waits for the objects that it names, until
//! each was tried once.

mod plan;
mod start_up;
#[cfg(test)]
mod tests;

pub(crate) use start_up::StartUp;
pub use start_up::Unfinished;

use crate::config::{AbsentObject, Call};
use crate::methods::nvmf;
use crate::{Control, Methods};
use plan::Plan;
use serde_json::value::to_raw_value;
use start_up::{Held, Trying};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};

/// Objects that are created at the same time, at most. Each may use a thread, and wait for its store.
const AT_ONCE: usize = 4 * plan::OF_A_STORE;
/// How long the other objects wait for a try. A store that does not respond keeps a try for ever: it then counts as failed, and
/// goes on in the background.
const PATIENCE: Duration = Duration::from_secs(5);
/// As [`PATIENCE`], for retries.
const RETRY_PATIENCE: Duration = Duration::from_millis(200);
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
    let mut held = control.start_up.hold_all(plan.objects().collect());
    // An object that was created under the name of an earlier one may be needed by an object whose note does not name it: rounds
    // are repeated as long as one makes progress.
    loop {
        let round = run(control, methods, plan, held, PATIENCE).await;
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
    Restored { made, absent: absent.len() }
}

fn report(control: &Control, key: u64) {
    let (object, why) = (control.config.describe(key), control.config.why_absent(key));
    tracing::error!(%object, why, "cannot be made again; it stays in the state store, and is retried");
}

/// Makes a task retry the failed objects, unless there is one.
pub(crate) fn retry_failed(control: &Rc<Control>, methods: &Rc<Methods<Control>>) {
    if !control.start_up.retries.replace(true) {
        tokio::task::spawn_local(retry(Rc::downgrade(control), Rc::downgrade(methods)));
    }
}

/// Retries the failed objects until none is left, or the daemon ends. Objects that wait for a disk, and those that were not tried
/// yet, are left alone.
async fn retry(control: Weak<Control>, methods: Weak<Methods<Control>>) {
    let (mut delay, mut took) = (RETRY_MIN, Duration::ZERO);
    loop {
        // With thousands of failed objects, the control thread does other things half of the time.
        tokio::time::sleep(delay.max(took)).await;
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        if control.is_closing() {
            return;
        }
        let config = &control.config;
        let mut failed = config.absent_objects();
        failed.retain(|object| config.has_failed(object.key) && !config.is_waiting(object.key));
        if failed.is_empty() {
            control.start_up.retries.set(false);
            if config.absent().iter().all(|(key, _)| config.is_waiting(*key)) {
                tracing::info!("all configured objects exist again");
            }
            return;
        }
        let soon = control.start_up.retry_soon.replace(false);
        delay = if soon { RETRY_MIN } else { (delay * 2).min(RETRY_MAX) };
        let began = Instant::now();
        let round = run(&control, &methods, Plan::new(failed), HashMap::new(), RETRY_PATIENCE).await;
        took = began.elapsed();
        round.report(&control);
    }
}

/// Tries each absent object once, except those that wait for a disk.
pub(crate) async fn round(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> Round {
    run(control, methods, Plan::new(control.config.absent_objects()), HashMap::new(), PATIENCE).await
}

/// Tries the absent objects that name the disk `disk`, which has just appeared, and the settings of controllers among them.
pub(crate) async fn create_dependents_of(disk: &str, control: &Rc<Control>, methods: &Rc<Methods<Control>>) {
    let of_disk = control.config.absent_objects_that(|call| call.names(disk));
    let is_of_one = |call: &Call| {
        call.params.get("ctrlr").is_some_and(|name| of_disk.iter().any(|object| *name == object.name))
            || nvmf::is_of_one(call, of_disk.iter().map(|object| &object.call))
    };
    let objects = control.config.absent_objects_that(|call| call.names(disk) || is_of_one(call));
    if !objects.is_empty() {
        run(control, methods, Plan::new(objects), HashMap::new(), PATIENCE).await.report(control);
    }
}

/// Carries out a plan. The entry of `held` for an object's key is dropped after the object was tried, or after `patience`.
async fn run(
    control: &Rc<Control>,
    methods: &Rc<Methods<Control>>,
    mut plan: Plan,
    mut held: HashMap<u64, Held>,
    patience: Duration,
) -> Round {
    let (mut round, mut running) = (Round::default(), JoinSet::new());
    loop {
        while running.len() < AT_ONCE
            && let Some((place, object)) = plan.next()
        {
            let held = held.remove(&object.key);
            // If a needed object has come to exist since it failed, this one waits for the next retry: a controller must not be
            // created before the limits of its disk, which failed without the disk.
            let comes_early = plan.failed_needs(place).iter().any(|key| !control.config.is_absent(*key));
            let (control, methods) = (Rc::clone(control), Rc::clone(methods));
            running.spawn_local(async move {
                let outcome = match comes_early {
                    true => postpone(&control, &methods, object.key),
                    false => make(&control, &methods, &object, patience).await,
                };
                drop(held);
                (place, object.key, outcome)
            });
        }
        let Some(ended) = running.join_next().await else { return round };
        let (place, key, outcome) = ended.expect("a panic ends the daemon");
        plan.done(place, !control.config.is_absent(key));
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
    /// The object is no longer absent, waits for a disk, or another task is trying it; or the daemon is ending.
    NotTried,
}

/// Leaves an absent object to the next retry.
fn postpone(control: &Rc<Control>, methods: &Rc<Methods<Control>>, key: u64) -> Outcome {
    if !control.config.has_failed(key) {
        control.config.failed(key, "objects that it needs are being created");
    }
    control.start_up.retry_soon.set(true);
    retry_failed(control, methods);
    Outcome::Failed
}

/// Tries to create an absent object. After `patience`, the object counts as failed, and the try goes on in the background.
async fn make(
    control: &Rc<Control>,
    methods: &Rc<Methods<Control>>,
    object: &AbsentObject,
    patience: Duration,
) -> Outcome {
    let (config, key) = (&control.config, object.key);
    // A client may have created or removed the object in between.
    if !config.is_absent(key) || config.is_waiting(key) || control.is_closing() {
        return Outcome::NotTried;
    }
    let Some(trying) = control.start_up.try_object(key) else { return Outcome::NotTried };
    let had_failed = config.has_failed(key);
    let (of_try, methods_of_try) = (Rc::clone(control), Rc::clone(methods));
    let mut attempt = tokio::task::spawn_local(attempt(of_try, methods_of_try, object.clone(), trying));
    let outcome = match timeout(patience, &mut attempt).await {
        Ok(ended) => ended.expect("a panic ends the daemon"),
        Err(_) => {
            tokio::task::spawn_local(follow(Rc::clone(control), key, attempt));
            let why = match &*object.call.method {
                crate::methods::luks::CREATE => {
                    "it is still being created: its header is being read, or its key derived from its key file"
                }
                _ => "it is still being created: its store does not respond",
            };
            match !had_failed && config.failed(key, why) {
                true => Outcome::NewlyFailed,
                false => Outcome::Failed,
            }
        }
    };
    if matches!(outcome, Outcome::Failed | Outcome::NewlyFailed) {
        if !had_failed {
            control.start_up.retry_soon.set(true);
        }
        retry_failed(control, methods);
    }
    outcome
}

/// Reports the failure of a try for which nothing waits any more.
async fn follow(control: Rc<Control>, key: u64, attempt: JoinHandle<Outcome>) {
    if attempt.await.expect("a panic ends the daemon") == Outcome::NewlyFailed {
        report(&control, key);
    }
}

async fn attempt(
    control: Rc<Control>,
    methods: Rc<Methods<Control>>,
    object: AbsentObject,
    trying: Trying,
) -> Outcome {
    let (config, key) = (&control.config, object.key);
    let (described, had_failed) = (config.describe(key), config.has_failed(key));
    let params = to_raw_value(&object.call.params).expect("the parameters are valid JSON");
    match methods.restore(&object.call.method, params).await {
        Ok(done) if control.undo_revived(&done).await => Outcome::NotTried,
        Ok(done) => {
            drop(trying);
            if had_failed {
                tracing::info!(object = described, "exists again");
            }
            control.start_up.retry_soon.set(true);
            control.make_waiting_for(&done).await;
            Outcome::Made
        }
        Err(error) if config.failed(key, &error.to_string()) => Outcome::NewlyFailed,
        Err(_) => Outcome::Failed,
    }
}
