//! The results of a long hotplug run. Pure.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::bench::DEADLINE;
use super::rounds::Rounds;

/// A scene and its result.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The scene's name.
    pub name: &'static str,
    /// A description of the scene.
    pub what: &'static str,
    /// The scene's duration.
    pub elapsed: Duration,
    /// The error, if it failed.
    pub failure: Option<String>,
}

/// All results.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed of the rounds.
    pub seed: u64,
    /// The guest's kernel.
    pub kernel: String,
    /// The rounds, by ring format.
    pub rounds: Vec<(&'static str, Rounds)>,
    /// The scenes.
    pub scenes: Vec<Scene>,
}

/// The distribution of durations, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Spread {
    count: usize,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

impl Spread {
    fn of(times: &[Duration]) -> Self {
        let mut sorted: Vec<_> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |percent: usize| sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1));
        let [p50, p90, p99, max] = [50, 90, 99, 100].map(|p| at(p).copied().unwrap_or_default());
        Self { count: sorted.len(), p50, p90, p99, max }
    }

    fn json(self) -> Value {
        json!({"count": self.count, "p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max})
    }
}

const INTRODUCTION: &str = "\
Written by `cargo xtask hotplug --page FILE`. A Linux guest in QEMU (TCG, two processors) has a `vhost-user-scsi-pci` controller with eight disks of \
16 MiB, half
of them in files and half in memory, served by `arykd -m 0x3`. In the guest, fio writes and verifies each of them all the time \
(crc32c; the rate is limited to
20 reads and 20 writes a second and disk, which leaves the emulated processors time for the rest). In each round one to three disks, \
drawn by the seed, are unplugged at once; 60% of them
while a second fio writes as fast as it can, with 32 requests in flight. \
Both loads of an unplugged disk must fail, without a verification error before; all other loads must continue and verify.
Then the disks are plugged into each other's targets. The guest must find each of them with its checksummed part \
unchanged,
every 4 KiB block of the rest untorn, and the right size. In between, disks in use grow.";

impl Report {
    fn times(&self) -> Vec<(&'static str, Spread)> {
        let of = |get: fn(&Rounds) -> &[Duration]| {
            let all: Vec<_> = self.rounds.iter().flat_map(|(_, rounds)| get(rounds)).copied().collect();
            Spread::of(&all)
        };
        vec![
            ("unplug → answered", of(|r| &r.unplug_answered)),
            ("unplug → reported by the guest's kernel", of(|r| &r.unplug_seen)),
            ("plug → answered", of(|r| &r.plug_answered)),
            ("plug → reported by the guest's kernel", of(|r| &r.plug_seen)),
            ("resize → reported by the guest's kernel", of(|r| &r.resize_seen)),
        ]
    }

    fn sums(&self, get: fn(&Rounds) -> &BTreeMap<String, u64>) -> BTreeMap<&str, u64> {
        let mut sums = BTreeMap::new();
        for (name, count) in self.rounds.iter().flat_map(|(_, rounds)| get(rounds)) {
            *sums.entry(name.as_str()).or_default() += count;
        }
        sums
    }

    /// All results for programs; times in milliseconds.
    #[must_use]
    pub fn json(&self) -> Value {
        let times: BTreeMap<_, _> = self.times().into_iter().map(|(name, s)| (name, s.json())).collect();
        let rounds: BTreeMap<_, _> = self.rounds.iter().map(|(rings, r)| (*rings, r.rounds)).collect();
        let scenes: Vec<_> = self.scenes.iter().map(scene_json).collect();
        json!({
            "seed": self.seed,
            "kernel": self.kernel,
            "rounds": rounds,
            "times": times,
            "errors": self.sums(|r| &r.errors),
            "kinds": self.sums(|r| &r.kinds),
            "scenes": scenes,
        })
    }

    /// The results as a Markdown page.
    #[must_use]
    pub fn page(&self) -> String {
        let mut page = format!("# Hot plug\n\n{INTRODUCTION}\n");
        self.write(&mut page).expect("a string takes all");
        page
    }

    fn write(&self, page: &mut String) -> std::fmt::Result {
        writeln!(page, "\nThe guest's kernel: `{}`. Seed {}.\n", self.kernel, self.seed)?;
        writeln!(page, "| rings | rounds | unplugged | of them under full load | seconds |")?;
        writeln!(page, "| --- | ---: | ---: | ---: | ---: |")?;
        for (rings, rounds) in &self.rounds {
            let (loaded, all) = rounds.under_load;
            let seconds = rounds.elapsed.as_secs();
            writeln!(page, "| {rings} | {} | {all} | {loaded} | {seconds} |", rounds.rounds)?;
        }
        writeln!(
            page,
            "\n## Times\n\nMilliseconds. A call must be answered within {} s.\n",
            DEADLINE.as_secs()
        )?;
        writeln!(page, "| | times | p50 | p90 | p99 | max |\n| --- | ---: | ---: | ---: | ---: | ---: |")?;
        for (name, s) in self.times() {
            let Spread { count, p50, p90, p99, max } = s;
            writeln!(page, "| {name} | {count} | {p50:.1} | {p90:.1} | {p99:.1} | {max:.1} |")?;
        }
        writeln!(
            page,
            "\n## Errors\n\nThe errors with which the loads of unplugged disks ended (no other load ended):\n5, EIO; 6, ENXIO, or 19, ENODEV; or, as Linux gives\na removed disk no blocks, 28, ENOSPC, for a write of it, and 84, EILSEQ, where fio verified data that a read of it did not return (an assumption: it was not traced).\n"
        )?;
        writeln!(page, "| errno | loads |\n| --- | ---: |")?;
        for (error, count) in self.sums(|r| &r.errors) {
            writeln!(page, "| {error} | {count} |")?;
        }
        writeln!(
            page,
            "\nThe messages of the guest's kernel about failed commands, as far as it did not suppress them:\n"
        )?;
        writeln!(page, "| | times |\n| --- | ---: |")?;
        for (kind, count) in self.sums(|r| &r.kinds) {
            writeln!(page, "| {kind} | {count} |")?;
        }
        writeln!(page, "\n## Scenes\n\n| | | seconds | |\n| --- | --- | ---: | --- |")?;
        for Scene { name, what, elapsed, failure } in &self.scenes {
            let end = if failure.is_none() { "passed" } else { "FAILED" };
            writeln!(page, "| {name} | {what} | {} | {end} |", elapsed.as_secs())?;
        }
        Ok(())
    }
}

fn scene_json(scene: &Scene) -> Value {
    json!({"name": scene.name, "seconds": scene.elapsed.as_secs_f64(), "failure": scene.failure})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_ones_that_were_seen() {
        let times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        let spread = Spread::of(&times);
        assert_eq!(
            (spread.count, spread.p50, spread.p90, spread.p99, spread.max),
            (200, 100.0, 180.0, 198.0, 200.0)
        );
        assert_eq!(Spread::of(&[]), Spread::default());
    }

    #[test]
    fn both_kinds_of_rings_are_added_up() {
        let errors = |n| BTreeMap::from([("5".to_owned(), n)]);
        let rounds = |n| Rounds { rounds: 3, errors: errors(n), ..Rounds::default() };
        let rounds = vec![("split", rounds(2)), ("packed", rounds(4))];
        let failure = Some("why".to_owned());
        let scene = Scene { name: "stuck", what: "a store", elapsed: Duration::from_secs(7), failure };
        let report = Report { seed: 9, kernel: "k".to_owned(), rounds, scenes: vec![scene] };
        assert!(
            report.page().contains("| 5 | 6 |") && report.page().contains("| stuck | a store | 7 | FAILED |")
        );
        assert_eq!(report.json()["errors"]["5"], 6);
        assert_eq!(report.json()["rounds"]["packed"], 3);
    }
}
