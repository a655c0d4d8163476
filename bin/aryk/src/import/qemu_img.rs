//! `qemu-img`, which reads all formats of images.

use crate::error::Error;
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

const PROGRAM: &str = "qemu-img";

/// The size of the disk in the image.
pub fn virtual_size(source: &Path, format: &str) -> Result<u64, Error> {
    let mut info = command(&["info", "--output=json", "-f", format], &[source])?;
    let output = info.stdin(Stdio::null()).output().map_err(|e| not_run(format, &e))?;
    if !output.status.success() {
        return Err(error_of(&String::from_utf8_lossy(&output.stderr)));
    }
    let info: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let size = info["virtual-size"].as_u64();
    size.ok_or_else(|| error_of("does not report the size of the image"))
}

/// Writes the data of an image, without holes, to another image, each of its format. Reports the share done to `progress`,
/// which may end the program.
pub fn convert(
    (source, format): (&Path, &str),
    (target, target_format): (&Path, &str),
    progress: &mut dyn FnMut(f64) -> io::Result<()>,
) -> Result<(), Error> {
    let mut command = command(&["convert", "-p", "-f", format, "-O", target_format], &[source, target])?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| not_run(format, &e))?;
    // Progress lines end with a carriage return: `    (12.50/100%)`.
    for word in BufReader::new(child.stdout.take().expect("the stream is piped")).split(b'\r') {
        let share = word.ok().and_then(|word| share(&String::from_utf8_lossy(&word)));
        if let Some(Err(error)) = share.map(&mut *progress) {
            // It may have ended already.
            let _ = child.kill();
            child.wait()?;
            return Err(error.into());
        }
    }
    let mut stderr = String::new();
    // The text only explains the exit code.
    let _ = child.stderr.take().expect("the stream is piped").read_to_string(&mut stderr);
    match child.wait()?.success() {
        true => Ok(()),
        false => Err(error_of(&stderr)),
    }
}

/// Absolute paths cannot be options or URLs.
fn command(args: &[&str], paths: &[&Path]) -> Result<Command, Error> {
    let mut command = Command::new(PROGRAM);
    command.args(args);
    for path in paths {
        command.arg(std::path::absolute(path)?);
    }
    Ok(command)
}

pub(super) fn share(word: &str) -> Option<f64> {
    let percent: f64 = word.trim().strip_prefix('(')?.split('/').next()?.parse().ok()?;
    Some((percent / 100.0).clamp(0.0, 1.0))
}

fn not_run(format: &str, e: &io::Error) -> Error {
    Error::File(match e.kind() {
        io::ErrorKind::NotFound => format!(
            "a {format} image needs {PROGRAM}, which is not installed. Install it: apt-get install qemu-utils"
        ),
        _ => format!("cannot run {PROGRAM}: {e}"),
    })
}

fn error_of(stderr: &str) -> Error {
    let stderr = stderr.trim();
    let stderr = stderr.strip_prefix("qemu-img: ").unwrap_or(stderr);
    Error::File(format!("{PROGRAM}: {}", if stderr.is_empty() { "failed without a message" } else { stderr }))
}
