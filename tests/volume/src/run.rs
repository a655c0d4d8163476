//! Runs simulations, and makes a failing one shorter.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use crate::script::{self, Paced, Shape};
use crate::world::{self, Counts};

/// A simulation that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its seed.
    pub seed: u64,
    /// What was violated.
    pub what: String,
    /// The settings.
    pub shape: Shape,
    /// The steps that are left.
    pub steps: Vec<Paced>,
}

/// The text of the last panic.
static PANIC: Mutex<String> = Mutex::new(String::new());

/// Runs one seed with this many steps.
///
/// # Errors
/// What was violated, with the steps.
pub fn seed(seed: u64, count: u32) -> Result<Counts, Box<Failure>> {
    let (shape, steps) = (script::shape(seed), script::steps(seed, count));
    run(seed, shape, &steps).map_err(|what| Box::new(Failure { seed, what, shape, steps }))
}

fn run(seed: u64, shape: Shape, steps: &[Paced]) -> Result<Counts, String> {
    caught(|| world::run(seed, shape, steps))
}

/// Runs a simulation; a panic is a failure too.
///
/// # Errors
/// What was violated.
pub fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        Err(format!("panic: {}", PANIC.lock().map(|text| text.clone()).unwrap_or_default()))
    })
}

/// Keeps the texts of panics instead of printing them.
pub fn catch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        if let Ok(mut text) = PANIC.lock() {
            *text = panic.to_string();
        }
    }));
}

/// The text of a failure without the step and the numbers: a shorter simulation is to fail in the same way.
fn kind(what: &str) -> String {
    let what = what.rsplit_once("}: ").filter(|_| what.starts_with("step")).map_or(what, |(_, what)| what);
    let what = what.strip_prefix("at the end: ").unwrap_or(what);
    what.chars().filter(|c| c.is_alphabetic()).take(40).collect()
}

/// Leaves out steps as long as the simulation fails, in at most this many runs.
pub fn shrink(failure: &Failure, mut runs: u32) -> Failure {
    let mut best = failure.clone();
    // What follows the failing step does not matter.
    let mut chunk = best.steps.len().div_ceil(2);
    while runs > 0 && chunk > 0 {
        let mut start = 0;
        let mut has_shrunk = false;
        while start < best.steps.len() && runs > 0 {
            runs -= 1;
            let end = (start + chunk).min(best.steps.len());
            let shorter: Vec<_> = [&best.steps[..start], &best.steps[end..]].concat();
            match run(best.seed, best.shape, &shorter) {
                Err(what) if kind(&what) == kind(&failure.what) => {
                    (best.steps, best.what) = (shorter, what);
                    has_shrunk = true;
                }
                _ => start = end,
            }
        }
        if chunk == 1 && !has_shrunk {
            break;
        }
        chunk = if has_shrunk { chunk.min(best.steps.len()) } else { chunk / 2 };
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_survive_everything() {
        for n in 1..20 {
            seed(n, 300).unwrap_or_else(|failure| panic!("seed {n}: {}", failure.what));
        }
    }

    #[test]
    fn a_full_pool_comes_to_rest() {
        // Cleaners moved the same blocks for ever.
        for n in [59, 378, 582, 603] {
            seed(n, 400).unwrap_or_else(|failure| panic!("seed {n}: {}", failure.what));
        }
    }

    #[test]
    fn a_seed_reproduces_exactly() {
        let counts = || seed(5, 300).map_err(|failure| failure.what);
        assert_eq!(counts(), counts());
    }
}
