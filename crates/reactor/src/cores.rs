//! Sets of cores and their text forms. Any context.

use std::fmt;
use std::str::FromStr;

/// A set of CPU numbers.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct CoreSet(Vec<u16>);

/// Text that is no set of cores.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is no set of cores: give a mask as 0x3, or a list as [0,2-3]")]
pub struct ParseCoreSetError(String);

/// The largest CPU number that is accepted: that of the kernel's `CPU_SETSIZE`.
const CORE_MAX: u16 = 1023;

impl CoreSet {
    /// The cores that this process may run on: those of its main thread, since reactors' threads are pinned.
    pub fn allowed() -> Self {
        let set = rustix::thread::sched_getaffinity(Some(rustix::process::getpid())).unwrap_or_default();
        (0..=CORE_MAX).filter(|&c| set.is_set(c.into())).collect()
    }

    /// The cores, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().copied()
    }

    /// The number of cores.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the set contains `core`.
    pub fn contains(&self, core: u16) -> bool {
        self.0.binary_search(&core).is_ok()
    }

    /// The cores that are in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.iter().filter(|&c| other.contains(c)).collect()
    }
}

impl FromIterator<u16> for CoreSet {
    fn from_iter<I: IntoIterator<Item = u16>>(cores: I) -> Self {
        let mut cores: Vec<_> = cores.into_iter().collect();
        cores.sort_unstable();
        cores.dedup();
        Self(cores)
    }
}

impl FromStr for CoreSet {
    type Err = ParseCoreSetError;

    /// Parses a hexadecimal mask (`0x3`, `3`) or a bracketed list of numbers and ranges (`[0,2-3]`).
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let list = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
        let set = match list {
            Some(list) => parse_list(list),
            None => parse_mask(text.strip_prefix("0x").or(text.strip_prefix("0X")).unwrap_or(text)),
        };
        set.filter(|s| !s.is_empty()).ok_or_else(|| ParseCoreSetError(text.to_owned()))
    }
}

fn parse_mask(digits: &str) -> Option<CoreSet> {
    let mut cores = Vec::new();
    for (i, digit) in digits.chars().rev().filter(|&c| c != ',').enumerate() {
        let nibble = digit.to_digit(16)?;
        let first = u16::try_from(i * 4).ok()?;
        cores.extend((0..4).filter(|bit| nibble >> bit & 1 == 1).map(|bit| first + bit));
    }
    cores.iter().all(|&c| c <= CORE_MAX).then(|| cores.into_iter().collect())
}

fn parse_list(list: &str) -> Option<CoreSet> {
    let mut cores = Vec::new();
    for item in list.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let (first, last): (u16, u16) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last > CORE_MAX {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores.into_iter().collect())
}

/// Writes a hexadecimal mask.
impl fmt::Display for CoreSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.last().map_or(1, |last| last / 4 + 1);
        f.write_str("0x")?;
        (0..digits).rev().try_for_each(|i| {
            let nibble = (0..4).filter(|bit| self.contains(i * 4 + bit)).fold(0, |n, bit| n | 1 << bit);
            write!(f, "{nibble:x}")
        })
    }
}

impl fmt::Debug for CoreSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_lists_mean_the_same() {
        for (text, cores, mask) in [
            ("0x3", vec![0, 1], "0x3"),
            ("f", vec![0, 1, 2, 3], "0xf"),
            ("[0,2-3]", vec![0, 2, 3], "0xd"),
            (" [ 8 - 9, 8 ] ", vec![8, 9], "0x300"),
            ("0x1,00000000", vec![32], "0x100000000"),
        ] {
            let set: CoreSet = text.parse().unwrap();
            assert_eq!(set.iter().collect::<Vec<_>>(), cores, "{text}");
            assert_eq!(set.to_string(), mask);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "0x", "0", "[]", "[1", "[3-1]", "[70000]", "xyz", "[1024]", "-1", "[a-b]"] {
            assert!(text.parse::<CoreSet>().is_err(), "{text}");
        }
    }

    #[test]
    fn this_process_may_run_somewhere() {
        assert!(!CoreSet::allowed().is_empty());
    }
}
