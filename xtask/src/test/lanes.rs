//! Runs tests in parallel lanes, where no time is measured.

use std::sync::Mutex;

use anyhow::Result;

use super::Tally;

/// Runs `test` on each of `tests` in this order, `lanes` at a time, and adds up the results. The first error of a test
/// ends its lane.
pub(crate) fn run<T: Send>(
    tests: impl IntoIterator<Item = T>,
    lanes: usize,
    test: impl Fn(T) -> Result<Tally> + Sync,
) -> Result<Tally> {
    let waiting = Mutex::new(tests.into_iter().collect::<Vec<_>>().into_iter());
    let next = || waiting.lock().expect("no lane panics while it takes a test").next();
    std::thread::scope(|scope| {
        let lane = || {
            let mut tally = Tally::default();
            while let Some(one) = next() {
                tally.add(test(one)?);
                aryk_guest_tests::process::check_interrupt()?;
            }
            anyhow::Ok(tally)
        };
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let mut tally = Tally::default();
        for lane in lanes {
            tally.add(lane.join().expect("a lane does not panic")?);
        }
        Ok(tally)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_test_runs_once_and_an_error_is_returned() {
        let ran = Mutex::new(Vec::new());
        let tally = run(0..20, 2, |n| {
            ran.lock().unwrap().push(n);
            Ok(Tally { passed: 1, ..Tally::default() })
        });
        assert_eq!(tally.unwrap().passed, 20);
        let mut ran = ran.into_inner().unwrap();
        ran.sort_unstable();
        assert_eq!(ran, (0..20).collect::<Vec<_>>());
        assert!(run(0..3, 2, |_| anyhow::bail!("no")).is_err());
    }
}
