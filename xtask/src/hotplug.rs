//! `cargo xtask hotplug`: plugs and unplugs disks of a SCSI controller under a Linux guest, in the long form. The short
//! form are the guest tests `scsi/`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use aryk_guest_tests::cases::Lab;
use aryk_guest_tests::{Image, hotplug};

use crate::{install, workspace};

/// Number of rounds, seed, and files for the results.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds in which disks are unplugged and plugged again; half of them with packed rings
    #[arg(long, default_value_t = 200)]
    rounds: u32,
    /// Start no round after this many minutes
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,
    /// Seed of the rounds
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write all results to this JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results as a Markdown page to this file
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    install::ensure(install::GUEST)?;
    let bin = workspace::build_programs()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let patience = args.minutes.map(|minutes| Duration::from_secs(60 * minutes));
    // No guest of these scenes runs a program of the tests.
    let lab = Lab { image, bin, tests: PathBuf::new() };
    let report = hotplug::run(&lab, args.rounds, args.seed, patience)?;
    let files = [(&args.json, format!("{:#}\n", report.json())), (&args.page, report.page())];
    for (path, text) in files {
        let Some(path) = path else { continue };
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    println!("{}", report.page());
    for scene in &report.scenes {
        if let Some(failure) = &scene.failure {
            bail!("{}: {failure}", scene.name);
        }
    }
    Ok(())
}
