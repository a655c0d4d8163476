//! CPU affinity of this process.

use crate::error::Error;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins the calling thread to a core.
pub fn pin(core: usize) -> Result<(), Error> {
    let mut cores = CpuSet::new();
    if core < CpuSet::MAX_CPU {
        cores.set(core);
    }
    sched_setaffinity(None, &cores)
        .map_err(|_| Error::Usage(format!("this process may not run on core {core}")))
}

/// Two cores; the first is `wanted` if given.
pub fn two_cores(wanted: Option<u32>) -> Result<(usize, usize), Error> {
    let allowed = allowed()?;
    let first = wanted.map(|core| core as usize).or_else(|| allowed.first().copied());
    let second = allowed.into_iter().find(|core| Some(*core) != first);
    let too_few = || Error::Usage("--ceiling needs two cores; this process may run on one".into());
    first.zip(second).ok_or_else(too_few)
}

/// The cores that this process may run on.
fn allowed() -> Result<Vec<usize>, Error> {
    let cores = sched_getaffinity(None).map_err(|e| Error::Io(e.into()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|core| cores.is_set(*core)).collect())
}
