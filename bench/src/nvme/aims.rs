//! What follows from the measurements: which aims are reached, and a calculation for eight drives.

use super::{alone, path};
use crate::report::{Runs, Section, number};
use crate::workload::Workload;

/// Time of a command through the driver, as a multiple of the bare loop's.
const RATIO_AIM: f64 = 1.2;
/// Nanoseconds in the driver's calls, of a command, with [`BUSY_DEPTH`] in flight.
const BUSY_AIM: f64 = 70.0;
const BUSY_DEPTH: usize = 128;
/// Nanoseconds of a request from the guest's ring to the controller and back.
const PATH_AIM: f64 = 220.0;
/// Results that another system has published for eight drives: requests a second, the same for the best path of the kernel, and
/// nanoseconds of a request on average.
const PUBLISHED: f64 = 11.4e6;
const PUBLISHED_KERNEL: f64 = 3.4e6;
const PUBLISHED_LATENCY: f64 = 6_800.0;
const DRIVES: f64 = 8.0;

const AIMS: &str = "Medians of 4 KiB random reads, writes, and 70% reads, with the controller on the other core. An aim is reached if all three \
    are within it. The last column is of the reads. A request that is alone in flight takes two turns of the reactor, one that submits it \
    and one that finds its answer; several in flight share these turns.";

/// The aims, and what was measured.
pub fn aims(alone: &[alone::Figures], path: &[path::Figures]) -> Section {
    let columns = ["aim", "in flight", "measured", "reached", "what it consists of"];
    let intro = format!("{AIMS}{}", large(alone));
    let mut section = Section::new("Aims", &intro, columns.map(str::to_owned).to_vec());
    for depth in [1, 32, 128] {
        let of: Vec<_> = alone.iter().filter(|figures| is_small(&figures.workload, depth)).collect();
        let aim = format!("driver: at most {RATIO_AIM} of the bare loop's time");
        let calls = |[driver, bare]: [f64; 2]| {
            format!(
                "{} ns in the driver's calls, {} in the bare loop's, stepped",
                number(driver),
                number(bare)
            )
        };
        let parts = of.first().and_then(|first| medians([&first.busy, &first.bare_busy])).map(calls);
        add_aim(&mut section, aim, depth, RATIO_AIM, of.iter().map(|figures| &figures.ratio), parts);
    }
    let of: Vec<_> = alone.iter().filter(|figures| is_small(&figures.workload, BUSY_DEPTH)).collect();
    let aim = format!("driver: at most {BUSY_AIM} ns busy");
    let cores = |[beside, stepped]: [f64; 2]| {
        format!("{} ns stepped; {} for lines from the other core", number(stepped), number(beside - stepped))
    };
    let parts = of.first().and_then(|first| medians([&first.busy_beside, &first.busy])).map(cores);
    add_aim(&mut section, aim, BUSY_DEPTH, BUSY_AIM, of.iter().map(|figures| &figures.busy_beside), parts);
    for depth in [1, 32, 128] {
        let of: Vec<_> = path.iter().filter(|figures| is_small(&figures.workload, depth)).collect();
        let aim = format!("vhost-user-blk to NVMe: at most {PATH_AIM} ns busy");
        let layers = |[beside, stepped, null]: [f64; 3]| {
            format!(
                "{} ns as for a null disk; {} for the NVMe module, its driver, and the turn that the answer takes; {} for lines \
                 from the other core, and smaller batches",
                number(null),
                number(stepped - null),
                number(beside - stepped)
            )
        };
        let parts =
            of.first().and_then(|first| medians([&first.beside, &first.stepped, &first.null])).map(layers);
        add_aim(&mut section, aim, depth, PATH_AIM, of.iter().map(|figures| &figures.beside), parts);
    }
    section
}

/// What the aims leave out.
fn large(alone: &[alone::Figures]) -> String {
    let is_large = |figures: &&alone::Figures| figures.workload.block == 128 << 10;
    let ratios: Vec<_> = alone.iter().filter(is_large).filter_map(|figures| figures.ratio.median()).collect();
    if ratios.is_empty() {
        return String::new();
    }
    let ratios = ratios.into_iter().map(number).collect::<Vec<_>>().join(" and ");
    format!(
        " No aim is of 128 KiB: reads of that size take {ratios} of the bare loop's time, because of their PRP lists."
    )
}

fn is_small(workload: &Workload, depth: usize) -> bool {
    (workload.block, workload.depth) == (4 << 10, depth)
}

fn medians<const N: usize>(runs: [&Runs; N]) -> Option<[f64; N]> {
    let medians = runs.map(Runs::median);
    medians.iter().all(Option::is_some).then(|| medians.map(Option::unwrap_or_default))
}

fn add_aim<'a>(
    section: &mut Section,
    aim: String,
    depth: usize,
    limit: f64,
    measured: impl Iterator<Item = &'a Runs>,
    parts: Option<String>,
) {
    let medians: Vec<f64> = measured.filter_map(Runs::median).collect();
    if medians.is_empty() {
        return;
    }
    let reached = if medians.iter().all(|&median| median <= limit) { "yes" } else { "**no**" };
    let shown = medians.iter().map(|&median| number(median)).collect::<Vec<_>>().join(", ");
    section.row(vec![aim, depth.to_string(), shown, reached.to_owned(), parts.unwrap_or_default()]);
}

const EIGHT: &str = "**A calculation, not a measurement**: no drive was used. It divides the processor time of a 4 KiB random read, measured \
    above with the controller on the other core, into published results: another system reports 11.4 million requests a second over eight \
    drives, at 6.8 µs on average, where the best path of the kernel does 3.4 million. The calculation assumes that queues are spread evenly \
    over the reactors, that drives and PCIe do not limit, and that a completion costs what it costs here, as a cache line from another core. \
    It leaves out the fetch of a front-end's cache lines, the interrupts to guests, and the IOMMU.";

/// What eight drives would take.
pub fn eight_drives(alone: &[alone::Figures], path: &[path::Figures]) -> Section {
    let columns = ["quantity", "1 in flight on a reactor", "32 in flight", "128 in flight"];
    let mut section = Section::new("Calculation: eight drives", EIGHT, columns.map(str::to_owned).to_vec());
    let depths = [1, 32, 128];
    let is_read = |workload: &Workload, depth| is_small(workload, depth) && workload.write_percent == 0;
    let of_path =
        depths.map(|depth| path.iter().find(|figures| is_read(&figures.workload, depth))?.beside.median());
    let of_driver = depths
        .map(|depth| alone.iter().find(|figures| is_read(&figures.workload, depth))?.busy_beside.median());
    let mut row = |name: &str, nanos: &[Option<f64>; 3], show: &dyn Fn(f64) -> String| {
        let cell = |nanos: &Option<f64>| nanos.map_or_else(|| "–".to_owned(), show);
        section.row(std::iter::once(name.to_owned()).chain(nanos.iter().map(cell)).collect());
    };
    if of_path.iter().all(Option::is_none) {
        return section;
    }
    let cores = |rate: f64| move |nanos: f64| number(rate * nanos / 1e9);
    row("busy ns of a request, measured", &of_path, &number);
    row("million requests a second of one core", &of_path, &|nanos| number(1e3 / nanos));
    row("cores for 11.4 million a second", &of_path, &cores(PUBLISHED));
    row("cores for 3.4 million a second", &of_path, &cores(PUBLISHED_KERNEL));
    row("share of 6.8 µs", &of_path, &|nanos| format!("{:.1}%", 100.0 * nanos / PUBLISHED_LATENCY));
    row("cores for 11.4 million a second in the driver alone", &of_driver, &cores(PUBLISHED));
    let in_flight = PUBLISHED * PUBLISHED_LATENCY / 1e9;
    section.row(vec![
        "requests in flight at 11.4 million a second and 6.8 µs (Little's law)".to_owned(),
        format!("{} in all", number(in_flight)),
        format!("{} for a drive", number(in_flight / DRIVES)),
        String::new(),
    ]);
    section
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(value: f64) -> Runs {
        std::iter::once(value).collect()
    }

    fn path(depth: usize, nanos: f64) -> path::Figures {
        let workload = Workload::random(0, 4096, depth);
        path::Figures { workload, beside: runs(nanos), stepped: runs(nanos / 2.0), null: runs(nanos / 4.0) }
    }

    #[test]
    fn an_aim_is_missed_if_one_workload_misses_it() {
        let writes = path::Figures { workload: Workload::random(100, 4096, 32), ..path(32, 221.0) };
        let page = aims(&[], &[path(32, 219.0), writes, path(128, 200.0)]).markdown();
        let line = |depth: &str| page.lines().find(|line| line.contains(depth)).unwrap().to_owned();
        assert!(line("| 32 ").contains("219, 221") && line("| 32 ").contains("**no**"), "{page}");
        assert!(line("| 128 ").contains("| yes "), "{page}");
        assert!(aims(&[], &[]).is_empty());
    }

    #[test]
    fn eight_drives_are_calculated_from_the_measured_time() {
        let page = eight_drives(&[], &[path(32, 200.0)]).markdown();
        assert!(page.contains("5.00") && page.contains("2.28") && page.contains("77.5 in all"), "{page}");
        assert!(eight_drives(&[], &[]).is_empty());
    }
}
