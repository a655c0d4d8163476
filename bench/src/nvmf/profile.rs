//! Where the time of a busy target goes, by `perf`: the functions of the kernel and of arykd that take most.

use super::{Target, name};
use crate::report::{Report, Section};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Functions in the table.
const SHOWN: usize = 16;

const INTRO: &str = "Samples of the target's process while one host keeps 128 requests in flight (`perf record -e cpu-clock`), by \
    function, in percent. `[k]` marks functions of the kernel.";

pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let workload = Workload::random(0, 4 << 10, 128);
    if !settings.wants("nvmf/profile") || !Path::new("/usr/bin/perf").exists() {
        return Ok(());
    }
    let mut target = Target::start(settings, "profile", settings.policy)?;
    let file = settings.files.path().join("perf.data");
    target.with_queue(workload, false, |target, queue| {
        queue.closed(settings.warm_up)?;
        let seconds = settings.span.as_secs_f64().max(0.5).to_string();
        let pid = target.process.id().to_string();
        let mut recording = Command::new("perf")
            .args(["record", "-q", "-e", "cpu-clock", "-F", "1999", "-p", &pid, "-o"])
            .arg(&file)
            .args(["--", "sleep", &seconds])
            .stderr(Stdio::null())
            .spawn()?;
        queue.closed(settings.span.max(Duration::from_millis(500)))?;
        recording.wait()?;
        Ok(())
    })?;
    let mut command = Command::new("perf");
    command.args(["report", "--stdio", "-q", "--sort", "sym", "-i"]).arg(&file);
    let output = command.stderr(Stdio::null()).output().context("running perf report")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<(f64, &str)> = text.lines().filter_map(parse).collect();
    let in_kernel: f64 =
        lines.iter().filter(|(_, function)| function.starts_with("[k]")).map(|(part, _)| part).sum();
    let title = format!("Where the time goes: {}", name(&workload, false).trim_start_matches("nvmf/"));
    let mut section = Section::new(&title, INTRO, ["percent", "function"].map(str::to_owned).to_vec());
    section.row(vec![format!("**{in_kernel:.0}**"), "**all of the kernel**".to_owned()]);
    for (part, function) in lines.iter().take(SHOWN) {
        section.row(vec![format!("{part:.1}"), format!("`{function}`")]);
    }
    report.section(section);
    Ok(())
}

/// A line such as `  12.3%  [k] tcp_sendmsg`.
fn parse(line: &str) -> Option<(f64, &str)> {
    let (part, function) = line.trim().split_once('%')?;
    Some((part.parse().ok()?, function.trim()))
}
