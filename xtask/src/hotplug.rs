//! `cargo xtask hotplug`: disks of a SCSI controller that come and go under a Linux guest, in the long form. Its short form are the guest tests `scsi/`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use aryk_guest_tests::cases::Lab;
use aryk_guest_tests::{Image, hotplug};

use crate::{install, workspace};

/// How often, and where the report goes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds in which disks are taken away and come back; half of them with packed rings
    #[arg(long, default_value_t = 200)]
    rounds: u32,
    /// Begin no more rounds after so long, in minutes
    #[arg(long, value_name = "N")]
    minutes: Option<u64>,
    /// What rounds are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write everything to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page to this file
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    install::ensure(install::GUEST)?;
    let bin = workspace::build_programs()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let patience = args.minutes.map(|minutes| Duration::from_secs(60 * minutes));
    let report = hotplug::run(&Lab { image, bin }, args.rounds, args.seed, patience)?;
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
