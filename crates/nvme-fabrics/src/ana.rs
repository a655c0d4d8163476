//! The Asymmetric Namespace Access log as a host reads it. NVMe 2.0 §5.16.1.13. Any context.
//!
//! **Invariant.** The log is a peer's: what it says beyond its own length is an error, never a panic.

use std::collections::BTreeMap;

use aryk_nvme::spec::log;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::subsystem::AnaState;

/// Groups and namespaces of a log, at most.
const GROUPS_MAX: u32 = 1024;
const NAMESPACES_MAX: usize = 1024;

/// The log is damaged, or larger than this host reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ANA log (log page {:02x}h) ends within a group", log::ANA)]
pub struct Truncated;

#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    changes: U64,
    groups: U16,
    reserved: [u8; 6],
}

#[derive(FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Group {
    id: U32,
    namespaces: U32,
    changes: U64,
    state: u8,
    reserved: [u8; 15],
}

impl AnaState {
    /// The state with this code; an unknown one counts as inaccessible.
    pub const fn of(code: u8) -> Self {
        match code & 0xf {
            1 => Self::Optimized,
            2 => Self::NonOptimized,
            4 => Self::PersistentLoss,
            15 => Self::Change,
            _ => Self::Inaccessible,
        }
    }

    /// Whether a host may send I/O commands.
    pub const fn is_usable(self) -> bool {
        matches!(self, Self::Optimized | Self::NonOptimized)
    }
}

/// Bytes of the log of a controller that reports so many groups (NANAGRPID), at most.
pub fn log_len(groups: u32) -> usize {
    size_of::<Header>() + groups.min(GROUPS_MAX) as usize * size_of::<Group>() + NAMESPACES_MAX * 4
}

/// The states by NSID.
///
/// # Errors
/// [`Truncated`].
pub fn decode(log: &[u8]) -> Result<BTreeMap<u32, AnaState>, Truncated> {
    let (header, mut rest) = Header::ref_from_prefix(log).map_err(|_| Truncated)?;
    let mut states = BTreeMap::new();
    for _ in 0..header.groups.get() {
        let (group, after) = Group::ref_from_prefix(rest).map_err(|_| Truncated)?;
        let count = group.namespaces.get() as usize;
        let (nsids, after) = <[U32]>::ref_from_prefix_with_elems(after, count).map_err(|_| Truncated)?;
        let state = AnaState::of(group.state);
        states.extend(nsids.iter().map(|nsid| (nsid.get(), state)));
        rest = after;
    }
    Ok(states)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(groups: &[(u8, &[u32])]) -> Vec<u8> {
        let mut page = vec![0; 16];
        page[8] = groups.len() as u8;
        for (id, (state, nsids)) in (1_u32..).zip(groups) {
            page.extend(id.to_le_bytes());
            page.extend((nsids.len() as u32).to_le_bytes());
            page.extend(7_u64.to_le_bytes());
            page.push(*state);
            page.resize(page.len() + 15, 0);
            nsids.iter().for_each(|nsid| page.extend(nsid.to_le_bytes()));
        }
        page
    }

    #[test]
    fn states_are_those_of_the_groups() {
        let page = log(&[(1, &[1, 5]), (2, &[]), (3, &[2]), (4, &[3]), (15, &[4]), (9, &[6])]);
        let states = decode(&page).unwrap();
        let expected = [
            (1, AnaState::Optimized),
            (2, AnaState::Inaccessible),
            (3, AnaState::PersistentLoss),
            (4, AnaState::Change),
            (5, AnaState::Optimized),
            (6, AnaState::Inaccessible),
        ];
        assert_eq!(states, BTreeMap::from(expected));
        // Beyond its end there are zeroes.
        let mut longer = page.clone();
        longer.resize(log_len(6), 0);
        assert_eq!(decode(&longer).unwrap(), states);
    }

    #[test]
    fn a_log_that_ends_within_a_group_is_refused() {
        let page = log(&[(1, &[1, 5]), (2, &[2])]);
        for len in 0..page.len() {
            assert_eq!(decode(&page[..len]), Err(Truncated), "{len}");
        }
        let mut endless = page;
        endless[20..24].fill(0xff);
        assert_eq!(decode(&endless), Err(Truncated));
    }
}
