//! A thread that runs functions at their times, as librbd's threads do.

use crate::lock;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, Once};
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

static JOBS: Mutex<BTreeMap<(Instant, u64), Job>> = Mutex::new(BTreeMap::new());
static CHANGED: Condvar = Condvar::new();
static THREAD: Once = Once::new();

#[expect(clippy::disallowed_methods, reason = "this stands in for a store, which has time of its own")]
fn now() -> Instant {
    Instant::now()
}

/// Runs `job` after `delay` on another thread.
pub fn run_after(delay: Duration, job: impl FnOnce() + Send + 'static) {
    THREAD.call_once(|| drop(std::thread::Builder::new().name("librbd-stub".into()).spawn(work)));
    let mut jobs = lock(&JOBS);
    let at = now() + delay;
    let mut number = 0;
    while jobs.contains_key(&(at, number)) {
        number += 1;
    }
    jobs.insert((at, number), Box::new(job));
    CHANGED.notify_one();
}

fn work() {
    let mut jobs = lock(&JOBS);
    loop {
        let wait = jobs.first_key_value().map(|((at, _), _)| at.saturating_duration_since(now()));
        jobs = match wait {
            Some(Duration::ZERO) => {
                let (_, job) = jobs.pop_first().expect("just seen");
                drop(jobs);
                job();
                lock(&JOBS)
            }
            Some(wait) => {
                CHANGED.wait_timeout(jobs, wait).unwrap_or_else(std::sync::PoisonError::into_inner).0
            }
            None => CHANGED.wait(jobs).unwrap_or_else(std::sync::PoisonError::into_inner),
        };
    }
}
