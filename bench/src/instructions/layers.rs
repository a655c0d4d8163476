//! Instructions per request by layer: the crate whose source an instruction comes from.
//!
//! Inlined code of the core and alloc libraries (checks, copies, arithmetic) counts for the crate that it is inlined into.
//! Callgrind counts each instruction of the program, and `addr2line` finds its source in the line tables.

use super::{FEW, MANY};
use crate::stack::{CASES, Case};
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Executions by address in the program; those in libraries have [`ELSEWHERE`].
type Executed = BTreeMap<u64, u64>;
/// Instructions per request, by layer.
type Layers = BTreeMap<String, f64>;

const ELSEWHERE: u64 = 0;
/// Layers with fewer instructions per request in each case are shown together.
const SHOWN_MIN: f64 = 0.5;

/// Prints the instructions per request of the cases without data, by layer.
pub fn print() -> Result<()> {
    let is_shown = |name: &str| name.contains("null/") || name.contains("nvme/");
    let names: Vec<&str> = CASES.iter().map(|case| case.name).filter(|name| is_shown(name)).collect();
    println!("| layer | {} |\n|{}", names.join(" | "), " --- |".repeat(names.len() + 1));
    rows(&names)?.iter().for_each(|row| println!("| {} |", row.join(" | ")));
    Ok(())
}

/// The rows of a table with a column for each case, the layer with the most instructions first.
pub fn rows(names: &[&str]) -> Result<Vec<Vec<String>>> {
    let case = |name: &&str| CASES.iter().find(|case| case.name == *name).context("no such case");
    let columns = names.iter().map(|name| layers(case(name)?)).collect::<Result<Vec<_>>>()?;
    Ok(table(&columns))
}

fn table(columns: &[Layers]) -> Vec<Vec<String>> {
    let of = |layer: &str, column: &Layers| column.get(layer).copied().unwrap_or_default();
    let all: BTreeSet<&str> = columns.iter().flat_map(|column| column.keys().map(String::as_str)).collect();
    let sum = |layer: &str| columns.iter().map(|column| of(layer, column)).sum::<f64>();
    let (mut shown, rest): (Vec<&str>, Vec<&str>) =
        all.into_iter().partition(|layer| columns.iter().any(|column| of(layer, column) >= SHOWN_MIN));
    shown.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
    let row = |name: &str, value: &dyn Fn(&Layers) -> f64| {
        let values = columns.iter().map(|column| format!("{:.0}", value(column)));
        std::iter::once(name.to_owned()).chain(values).collect()
    };
    let mut rows: Vec<_> = shown.into_iter().map(|layer| row(layer, &|column| of(layer, column))).collect();
    rows.push(row("other", &|column| rest.iter().fold(0.0, |sum, layer| sum + of(layer, column))));
    rows.push(row("**all**", &|column| column.values().sum()));
    rows
}

fn layers(case: &Case) -> Result<Layers> {
    let batches = |requests: u32| requests / case.depth();
    let (few, many) = (batches(FEW), batches(MANY));
    let (before, mut after) = (executed(case, few)?, executed(case, many)?);
    // Some of what a program does at its start depends on addresses, and happens less often in the longer run.
    after.iter_mut().for_each(|(addr, count)| {
        *count = count.saturating_sub(before.get(addr).copied().unwrap_or_default());
    });
    after.retain(|_, count| *count > 0);
    let sources = sources(after.keys().copied())?;
    let (mut layers, requests) = (Layers::new(), f64::from((many - few) * case.depth()));
    for (addr, count) in after {
        let layer = sources.get(&addr).map_or("libraries", |frames| layer_of(frames));
        *layers.entry(layer.to_owned()).or_default() += count as f64 / requests;
    }
    Ok(layers)
}

/// The executions of a run of `batches` batches.
fn executed(case: &Case, batches: u32) -> Result<Executed> {
    let profile = tempfile::NamedTempFile::new()?;
    let program = std::env::current_exe()?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--dump-instr=yes", "--compress-pos=no", "--compress-strings=no"])
        .arg(format!("--callgrind-out-file={}", profile.path().display()))
        .args(case.counted().iter().map(|pattern| format!("--toggle-collect={pattern}")))
        .arg(&program)
        .args(["stack", case.name, &batches.to_string()])
        .output()
        .context("running valgrind (apt install valgrind)")?;
    ensure!(output.status.success(), "{}: {}", case.name, String::from_utf8_lossy(&output.stderr));
    Ok(parse(&std::fs::read_to_string(profile.path())?, &program))
}

/// The executions of each address in a profile of callgrind: in lines of an address, a source line and a count, after a line
/// that names the object file. The line after `calls=` counts what the called function executed, which is counted there.
fn parse(profile: &str, program: &Path) -> Executed {
    let (mut executed, mut is_program, mut is_call) = (Executed::new(), false, false);
    for line in profile.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            is_program = Path::new(object) == program;
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if let Some(cost) = line.strip_prefix("0x")
            && !std::mem::take(&mut is_call)
            && let [addr, _, count] = cost.split(' ').collect::<Vec<_>>()[..]
            && let (Ok(addr), Ok(count)) = (u64::from_str_radix(addr, 16), count.parse::<u64>())
        {
            *executed.entry(if is_program { addr } else { ELSEWHERE }).or_default() += count;
        }
    }
    executed
}

/// The source files of each address: of the innermost inlined function, and of each function that it is inlined into.
fn sources(addrs: impl Iterator<Item = u64>) -> Result<BTreeMap<u64, Vec<String>>> {
    let mut child = Command::new("addr2line")
        .args(["--addresses", "--inlines", "--exe"])
        .arg(std::env::current_exe()?)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("running addr2line (apt install binutils)")?;
    let input: String = addrs.filter(|addr| *addr != ELSEWHERE).map(|addr| format!("{addr:#x}\n")).collect();
    let mut pipe = child.stdin.take().context("the pipe is open")?;
    // It answers each line before it reads the next.
    let writer = std::thread::spawn(move || pipe.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    writer.join().ok().context("the writer ended")??;
    Ok(parse_sources(&String::from_utf8_lossy(&output.stdout)))
}

fn parse_sources(output: &str) -> BTreeMap<u64, Vec<String>> {
    let (mut sources, mut addr) = (BTreeMap::<u64, Vec<String>>::new(), ELSEWHERE);
    for line in output.lines() {
        match line.strip_prefix("0x").and_then(|addr| u64::from_str_radix(addr, 16).ok()) {
            Some(next) => addr = next,
            None => sources.entry(addr).or_default().push(line.to_owned()),
        }
    }
    sources
}

/// The layer of an instruction: the first of its source files that is one of a crate's.
fn layer_of(frames: &[String]) -> &str {
    frames.iter().find_map(|file| crate_of(file)).unwrap_or("libraries")
}

/// The crate of a source file: `crates/modules/null/src/lib.rs` is of `modules/null`.
fn crate_of(file: &str) -> Option<&str> {
    if file.contains("/bench/src/") {
        return Some("harness: the guest");
    }
    let (_, path) = file.split_once("/crates/")?;
    // Libraries from a registry have a version in their paths, in place of `src`.
    path.split_once("/src/").map(|(name, _)| name).filter(|name| !name.contains("core_arch"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_parsed() {
        let profile = "positions: instr line\nevents: Ir\n\nob=/lib/libc.so.6\nfn=memcpy\n0x4050 0 2\n\n\
                       ob=/x/bench\nfl=/a/b.rs\nfn=f\n0xa0 7 10\n0xa4 8 20\ncob=/lib/libc.so.6\ncfn=memcpy\n\
                       calls=1 0x4050 0\n0xa8 9 1000\n0xa8 9 5\nfi=/c.rs\n0xa0 1 1\n";
        let executed = parse(profile, Path::new("/x/bench"));
        assert_eq!(executed, Executed::from([(ELSEWHERE, 2), (0xa0, 11), (0xa4, 20), (0xa8, 5)]));
    }

    #[test]
    fn inlined_libraries_count_for_the_crate_that_they_are_inlined_into() {
        let output = "0x0000a0\n/rustc/abc/library/core/src/num/mod.rs:7\n/w/crates/dma/src/table.rs:85 (discriminator 2)\n\
                      /w/crates/virtqueue/src/chain.rs:9\n0xa4\n/w/crates/modules/null/src/lib.rs:3\n\
                      0xa8\n??:0\n0xb0\n/rustc/abc/library/core/src/../../stdarch/crates/core_arch/src/x86/sse.rs:1\n\
                      /w/bench/src/stack.rs:2\n";
        let sources = parse_sources(output);
        let layers: Vec<_> = sources.values().map(|frames| layer_of(frames)).collect();
        assert_eq!(layers, ["dma", "modules/null", "libraries", "harness: the guest"]);
    }

    #[test]
    fn the_largest_layer_comes_first_and_small_ones_are_together() {
        let of = |layers: &[(&str, f64)]| -> Layers {
            layers.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
        };
        let columns = [of(&[("a", 1.0), ("b", 7.0), ("c", 0.1)]), of(&[("a", 2.0), ("d", 0.4)])];
        let expected = [["b", "7", "0"], ["a", "1", "2"], ["other", "0", "0"], ["**all**", "8", "2"]];
        assert_eq!(table(&columns), expected);
    }
}
