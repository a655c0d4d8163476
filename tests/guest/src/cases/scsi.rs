//! A guest with a SCSI controller whose disks are plugged, unplugged and resized under load (the short form of
//! [`crate::hotplug`]).

use super::Case;
use crate::hotplug::rounds::{self, Settings};
use crate::hotplug::scenes;

/// Rounds of plugging and unplugging.
const ROUNDS: u32 = 2;
/// The same in the long form.
const ROUNDS_LONG: u32 = 30;
/// The seed of the rounds.
const SEED: u64 = 1;

pub(super) fn cases(long: bool) -> Vec<Case> {
    let rounds = if long { ROUNDS_LONG } else { ROUNDS };
    let mut cases = Vec::new();
    for (rings, packed) in [("split", false), ("packed", true)] {
        let settings = Settings { rounds, seed: SEED, packed, patience: None };
        cases
            .push(Case::new(format!("scsi/plug,{rings}"), move |site| rounds::run(site, settings).map(drop)));
    }
    cases.extend(scenes::ALL.map(|(name, _, scene)| Case::new(format!("scsi/{name}"), scene)));
    cases
}
