//! Gates: files of a directory, by which a test of another process stops requests and lets them go on.

use crate::{later, lock};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// How often a closed gate is looked at.
const INTERVAL: Duration = Duration::from_millis(5);

type Job = Box<dyn FnOnce() + Send>;

/// The jobs that wait, by gate, in the order of their arrival.
static WAITING: Mutex<BTreeMap<String, Vec<Job>>> = Mutex::new(BTreeMap::new());

/// The directory of the gates, if the process has one.
pub fn directory() -> Option<&'static PathBuf> {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIRECTORY.get_or_init(|| std::env::var_os("LIBRBD_STUB_DIR").map(PathBuf::from)).as_ref()
}

/// Whether the file of a gate exists.
pub fn is_closed(gate: &str) -> bool {
    directory().is_some_and(|directory| directory.join(gate).exists())
}

/// Runs `job` now, or when the gate is open.
pub fn pass(gate: &str, job: impl FnOnce() + Send + 'static) {
    let mut waiting = lock(&WAITING);
    if let Some(jobs) = waiting.get_mut(gate) {
        return jobs.push(Box::new(job));
    }
    if !is_closed(gate) {
        drop(waiting);
        return job();
    }
    waiting.insert(gate.to_owned(), vec![Box::new(job)]);
    look_later(gate.to_owned());
}

fn look_later(gate: String) {
    later::run_after(INTERVAL, move || {
        if is_closed(&gate) {
            return look_later(gate);
        }
        let jobs = lock(&WAITING).remove(&gate);
        jobs.into_iter().flatten().for_each(|job| job());
    });
}
