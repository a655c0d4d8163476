//! `cargo xtask bench nvme`: the NVMe driver, and the path of a request from a VM's queue to an NVMe controller and back.
//!
//! - [`alone`]: the driver, compared with a [`bare`] loop.
//! - [`path`]: vhost-user-blk → block layer → NVMe module → controller, within one process.
//! - [`crate::instructions`]: instructions of both, by valgrind.
//! - [`aims`]: which aims are reached, and a calculation for eight drives.
//!
//! The controller is a model in the same process. There are two cores: either the model polls on the other core, or the measuring
//! thread steps the model between the measured calls.

mod aims;
mod alone;
mod bare;
mod path;

use crate::instructions::{self, layers};
use crate::process::{BACK_END_CORE, FRONT_END_CORE, pin};
use crate::report::{Report, Section, number};
use crate::settings::Settings;
use anyhow::Result;
use aryk_nvme_model::{Model, Running};
use std::sync::Arc;

/// Seconds of each run, unless the command line says otherwise: with these, everything takes about two minutes.
pub const SECONDS: f64 = 0.3;

/// The head of the page, after the command: how everything here is measured.
pub const METHOD: &str = "\
No drive and no front-end take part. The controller is the model of `crates/nvme-model` in the same process, with one namespace, one \
submission and one completion queue for I/O, doorbells in registers (no shadow doorbells, as most drives), and no data: it reads \
submission entries and PRP lists and posts completions, but moves nothing. The measured code polls; interrupts are off. \
A number is the median of the runs, and in parentheses the least and the greatest.

- **The controller on the other core**: the measured code is on core 1, and the model polls on core 0, as a drive beside the \
  processor would. Entries and doorbells travel between the cores, at the distance that a column names.
- **Stepped**: one thread, on core 1, runs the measured code and the model in turns. The model's time is not counted. All entries are \
  in this core's cache, so that only the code's own work is left.
- **Busy time** is the time in the measured calls: the clock is read before and after each, and what the two readings themselves cost \
  (measured before each run) is subtracted. Calls that found nothing do not count. A call of more than 100 µs was interrupted by other \
  work of the computer, and counts as the mean of the others.

The driver allocates nothing for a request, and writes each doorbell once for a batch: the test \
`a_batch_allocates_nothing_and_rings_each_doorbell_once` (`crates/nvme/tests/model/hot_path.rs`) counts both.

SPDK's driver is not compared here: no package registry that this project uses has SPDK. It could drive the same model, which \
serves vfio-user (`crates/nvme-model/examples/serve.rs`).\n";

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let alone = alone::measure(settings, report)?;
    let path = path::measure(settings, report)?;
    if settings.wants("instructions") {
        count_instructions(report)?;
    }
    report.section(aims::aims(&alone, &path));
    report.section(aims::eight_drives(&alone, &path));
    Ok(())
}

const INSTRUCTIONS: &str = "Counted by valgrind, as `cargo xtask bench instructions` does, and the same in each run: without the model's. \
    `nvme/…` is the driver alone, `path/nvme/…` the whole path, `null/…` the path to a disk without a device.";

const LAYERS: &str = "Of a 4 KiB read, with 32 and with one request in flight, by the crate whose source an instruction comes from. What the \
    compiler inlines from the core library counts for the crate that it is inlined into. `null` is a disk without a device, for comparison.";

fn count_instructions(report: &mut Report) -> Result<()> {
    println!("counting instructions …");
    let columns = ["case", "instructions per request"].map(str::to_owned).to_vec();
    let mut section = Section::new("Instructions of a request", INSTRUCTIONS, columns);
    let is_shown = |case: &str| case.contains("nvme/") || case.starts_with("null/");
    for (case, count) in instructions::counts(is_shown)? {
        section.row(vec![case, number(count)]);
    }
    report.section(section);
    let names = ["path/nvme/read-4k/qd32", "null/read-4k/qd32", "path/nvme/read-4k/qd1", "null/read-4k/qd1"];
    let columns = std::iter::once("layer").chain(names).map(str::to_owned).collect();
    let mut section = Section::new("Instructions by layer", LAYERS, columns);
    for row in layers::rows(&names)? {
        section.row(row);
    }
    report.section(section);
    Ok(())
}

/// Starts the model on the other core.
fn run_beside(model: &Arc<Model>) -> Result<Running> {
    // The model's thread inherits this thread's core.
    pin(BACK_END_CORE)?;
    let running = model.run();
    pin(FRONT_END_CORE)?;
    Ok(running?)
}
