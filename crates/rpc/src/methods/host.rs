//! Per-core data of the kernel. Control context; the files are in memory, so that reading them does not block.

use std::collections::BTreeMap;
use std::fs;

/// Times that the kernel has counted for a core, in its ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CoreTimes {
    /// User processes.
    pub usr: u64,
    /// The kernel.
    pub sys: u64,
    /// Interrupts.
    pub irq: u64,
}

/// The times of all cores; empty if the kernel does not report them.
pub(super) fn core_times() -> BTreeMap<u16, CoreTimes> {
    fs::read_to_string("/proc/stat").map(|text| parse(&text)).unwrap_or_default()
}

/// A line has a core's name, and its ticks in user processes, low-priority processes, the kernel, idle, waiting and in
/// interrupts.
fn parse(text: &str) -> BTreeMap<u16, CoreTimes> {
    let core = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split_whitespace();
        let core = words.next()?.parse().ok()?;
        let ticks: Vec<u64> = words.map_while(|word| word.parse().ok()).collect();
        let [usr, _, sys, _, _, irq, ..] = ticks[..] else { return None };
        Some((core, CoreTimes { usr, sys, irq }))
    };
    // The first line is the sum of all cores: no number follows its name.
    text.lines().filter(|line| !line.starts_with("cpu ")).filter_map(core).collect()
}

/// The NUMA node of a core; 0 if the host has no NUMA nodes.
pub(super) fn numa_node_of(core: u16) -> i32 {
    let of = |name: &std::ffi::OsStr| name.to_str()?.strip_prefix("node")?.parse().ok();
    let entries = fs::read_dir(format!("/sys/devices/system/cpu/cpu{core}")).into_iter().flatten().flatten();
    entries.filter_map(|entry| of(&entry.file_name())).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_per_core() {
        let text = "cpu  9 9 9 9 9 9 9\ncpu0 1 2 3 4 5 6 7 0 0 0\ncpu12 7 6 5 4 3 2 1\ncpu13 1 2\nintr 5 4 3 2 1 0\n";
        let times = parse(text);
        assert_eq!(times.len(), 2);
        assert_eq!(times[&0], CoreTimes { usr: 1, sys: 3, irq: 6 });
        assert_eq!(times[&12], CoreTimes { usr: 7, sys: 5, irq: 2 });
    }
}
