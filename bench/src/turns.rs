//! The time that a request takes in a reactor's turns.

use crate::stack::{DISK, Request, Stack};
use crate::workload::Workload;
use anyhow::Result;
use std::time::{Duration, Instant};

/// Requests of a measurement at least, on a computer whose other load leaves a device no time.
const REQUESTS_MIN: usize = 1000;

/// A call that takes longer was interrupted: by the kernel, another program, or the hypervisor.
/// A build without optimization encrypts a hundred times more slowly.
const INTERRUPTED: Duration = Duration::from_micros(if cfg!(debug_assertions) { 10_000 } else { 100 });

/// Adds up the time of calls.
#[derive(Debug)]
pub struct Stopwatch {
    /// Nanoseconds that an empty call seems to take.
    of_clock: f64,
    /// Of the calls that were not interrupted.
    spent: Duration,
    calls: u64,
    interrupted: u64,
}

impl Stopwatch {
    /// Measures the clock.
    pub fn new() -> Self {
        const READINGS: u32 = 10_000;
        let start = |of_clock| Self { of_clock, spent: Duration::ZERO, calls: 0, interrupted: 0 };
        let mut empty = start(0.0);
        (0..READINGS).for_each(|_| empty.call(|| true));
        start(empty.nanos() / f64::from(READINGS))
    }

    /// Makes a call, whose time counts if it returns true.
    #[inline]
    pub fn call(&mut self, call: impl FnOnce() -> bool) {
        let before = Instant::now();
        if call() {
            let took = before.elapsed();
            if took < INTERRUPTED {
                self.spent += took;
                self.calls += 1;
            } else {
                self.interrupted += 1;
            }
        }
    }

    /// Nanoseconds of all calls. Those that were interrupted count as the mean of the others.
    pub fn nanos(&self) -> f64 {
        let calls = self.calls as f64;
        let counted = self.spent.as_secs_f64() * 1e9 - self.of_clock * calls;
        counted * (calls + self.interrupted as f64) / calls.max(1.0)
    }
}

/// Nanoseconds of a request in the turns of a stack's reactor that have work. Between two turns the calling thread is the guest:
/// it takes the answers and makes as many new requests available; then it does `between`, whose time does not count either.
///
/// # Errors
/// A request failed.
pub fn busy(
    stack: &mut Stack,
    workload: &Workload,
    span: Duration,
    mut between: impl FnMut(),
) -> Result<f64> {
    let mut random = fastrand::Rng::with_seed(1);
    let blocks = DISK / u64::from(workload.block);
    let mut next = || Request {
        sector: random.u64(..blocks) * u64::from(workload.block / 512),
        is_write: random.u32(..100) < workload.write_percent,
    };
    // A SCSI unit answers its first command with a unit attention, which is an error.
    stack.guest.offer();
    answer(stack, &mut between);
    stack.guest.skip_answers();
    let (mut watch, mut done, start) = (Stopwatch::new(), 0, Instant::now());
    stack.guest.offer();
    while start.elapsed() < span || done < REQUESTS_MIN {
        // The clock is read rarely for this.
        for _ in 0..64 {
            watch.call(|| stack.turn());
            between();
            done += stack.guest.exchange(&mut next)?;
        }
    }
    answer(stack, &mut between);
    Ok(watch.nanos() / done as f64)
}

/// Writes and then reads each block of the disk once: a measurement shall not touch a page of the disk, or of the guest's data,
/// for the first time.
///
/// # Errors
/// A request failed.
pub fn touch(stack: &mut Stack, workload: &Workload) -> Result<()> {
    let (sectors, step) = (DISK / 512, u64::from(workload.block / 512));
    let mut at = 0;
    let mut next = || {
        let request = Request { sector: at % sectors, is_write: at < sectors };
        at += step;
        request
    };
    stack.guest.offer();
    answer(stack, &mut || {});
    stack.guest.skip_answers();
    stack.guest.offer();
    let mut left = 2 * (sectors / step) as usize + workload.depth;
    while left > 0 {
        stack.turn();
        left = left.saturating_sub(stack.guest.exchange(&mut next)?);
    }
    answer(stack, &mut || {});
    Ok(())
}

/// Turns until no request is in flight.
fn answer(stack: &mut Stack, between: &mut impl FnMut()) {
    while !stack.guest.is_answered() {
        stack.turn();
        between();
    }
}

#[cfg(test)]
mod tests {
    use super::{INTERRUPTED, Stopwatch};

    #[test]
    fn a_stopwatch_subtracts_its_own_cost() {
        let measured = || {
            let mut watch = Stopwatch::new();
            (0..10_000).for_each(|_| watch.call(|| true));
            (watch.nanos() / 10_000.0, watch)
        };
        // Other work of the machine disturbs a measurement.
        let least = |a: &(f64, Stopwatch), b: &(f64, Stopwatch)| a.0.abs().total_cmp(&b.0.abs());
        let (each, mut watch) = (0..10).map(|_| measured()).min_by(least).unwrap();
        assert!(each.abs() < watch.of_clock.max(1.0), "{each} ns, of {} ns", watch.of_clock);
        (0..100).for_each(|_| watch.call(|| false));
        assert!((9_000..=10_000).contains(&watch.calls), "calls without a result do not count");
        let before = watch.nanos();
        watch.call(|| {
            std::thread::sleep(INTERRUPTED);
            true
        });
        let call = watch.nanos() - before;
        assert!(call.abs() < watch.of_clock.max(1.0), "an interrupted call counts as {call} ns");
    }
}
