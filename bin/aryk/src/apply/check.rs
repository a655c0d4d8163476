//! Checks a plan before its first step, as far as the client can.
//!
//! Simulates the steps as the daemon would run them. The daemon still decides.

use super::call::{Call, Kind};
use super::plan::{Action, Existing, Step};
use crate::size::Size;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The disks, controllers and targets after some of the steps.
struct SimulatedState<'a> {
    root: &'a Path,
    /// The calls that created them.
    made: Vec<&'a Call>,
    /// Disks that wait for an absent base.
    waiting: Vec<&'a Call>,
}

/// The reasons, one line each, why `steps` cannot be carried out, given the `existing` objects and the root directory `root` of
/// the daemon.
pub fn impossible(steps: &[Step], existing: &[Existing], root: &Path) -> Vec<String> {
    let there = existing.iter().filter(|e| !e.is_orphan).map(|e| &e.call).collect();
    let mut state = SimulatedState { root, made: there, waiting: Vec::new() };
    let mut reasons = Vec::new();
    for step in steps {
        match step.action {
            Action::Remove => state
                .made
                .retain(|call| !(call.kind() == step.kind && call.name().as_ref() == Some(&step.name))),
            Action::Create => {
                let what = format!("{} '{}'", step.kind.name(), step.name);
                match state.make(&step.call) {
                    Ok(()) => {}
                    Err(why) => reasons.push(format!("{what}: {why}")),
                }
            }
            Action::Set => {
                if let Some(disk) = step.call.set_disk().filter(|disk| state.disk(disk).is_none()) {
                    reasons.push(format!("{}: {}", step.why, no_disk(disk)));
                }
            }
            Action::Forget | Action::Grow => {}
        }
    }
    reasons
}

fn no_disk(disk: &str) -> String {
    format!("there is no disk '{disk}' after this plan: add it to the file; 'aryk disk list' shows the disks")
}

impl<'a> SimulatedState<'a> {
    fn disk(&self, name: &str) -> Option<&'a Call> {
        self.made.iter().copied().find(|call| call.kind() == Kind::Disk && call.is_called(Some(name)))
    }

    /// The openers of the disk: disks on top of it, controllers and targets.
    fn openers(&self, disk: &Call) -> impl Iterator<Item = &'a Call> {
        self.made.iter().copied().filter(move |call| disk.is_called(call.base()))
    }

    /// Creates the object of `call`. An object that cannot be created counts as created, so that each cause gives one reason
    /// only.
    fn make(&mut self, call: &'a Call) -> Result<(), String> {
        let checked = match (call.kind(), call.base()) {
            (Kind::Disk, Some(base)) if self.disk(base).is_none() => {
                // The daemon makes it wait.
                self.waiting.push(call);
                return Ok(());
            }
            (Kind::Disk, Some(base)) => self.check_claim(base),
            (Kind::Disk, None) => self.check_file(call),
            (_, Some(disk)) => self.check_offer(call, disk),
            (_, None) => Ok(()),
        };
        self.made.push(call);
        checked
    }

    /// A disk on top needs a base that has no other opener.
    fn check_claim(&self, base: &str) -> Result<(), String> {
        let Some(disk) = self.disk(base) else { return Ok(()) };
        match self.openers(disk).find(|opener| !is_readonly(opener)) {
            Some(other) => Err(format!(
                "disk '{base}' is in use by {}: the base of another disk must have no other user",
                named(other)
            )),
            None => Ok(()),
        }
    }

    fn check_offer(&self, call: &Call, disk: &str) -> Result<(), String> {
        if call.kind() == Kind::Target {
            let is_owner = |c: &&'a Call| {
                c.kind() == Kind::Controller && c.is_scsi() && c.name().as_deref() == call.owner()
            };
            if !self.made.iter().any(is_owner) {
                let owner = call.owner().unwrap_or_default();
                return Err(format!("there is no SCSI controller '{owner}' in the daemon or in the file"));
            }
        }
        let Some(offered) = self.disk(disk) else {
            let waits = self.waiting.iter().find(|call| call.is_called(Some(disk)));
            return Err(match waits.and_then(|call| call.base()) {
                Some(base) => {
                    format!(
                        "disk '{disk}' waits for disk '{base}', which is neither in the daemon nor in the file"
                    )
                }
                None => no_disk(disk),
            });
        };
        let is_exclusive = call.params.get("exclusive") == Some(&true.into()) && !is_readonly(offered);
        let shares = |other: &&Call| !(is_readonly(other) && is_readonly(call));
        match self.openers(offered).find(|other| is_exclusive && shares(other)) {
            Some(other) => Err(format!(
                "disk '{disk}' is in use by {}; two VMs corrupt each other's files unless their file system is a cluster file system: then write shared = true for both controllers",
                named(other)
            )),
            None => Ok(()),
        }
    }

    fn check_file(&self, call: &Call) -> Result<(), String> {
        let Some(file) = call.text("filename").map(Path::new).filter(|file| file.is_absolute()) else {
            return Ok(());
        };
        let locks = |call: &Call| call.text("lock").is_none_or(|lock| lock == "always");
        let excludes =
            |other: &&&Call| locks(call) && locks(other) && !(is_readonly(call) && is_readonly(other));
        let is_same = |other: &&&Call| {
            let theirs = other.text("filename").map(Path::new);
            theirs.is_some_and(|theirs| identity(&self.beneath(theirs)) == identity(&self.beneath(file)))
        };
        if let Some(other) = self.made.iter().filter(excludes).find(is_same) {
            return Err(format!(
                "{} is the file of {} too: give each disk its own",
                file.display(),
                named(other)
            ));
        }
        let is_missing =
            |path: &Path| matches!(path.metadata(), Err(e) if e.kind() == io::ErrorKind::NotFound);
        let dir = file.parent().unwrap_or(file);
        if is_missing(&self.beneath(dir)) {
            return Err(format!("there is no directory {}: create it first", dir.display()));
        }
        if call.size().is_none() && is_missing(&self.beneath(file)) {
            return Err(format!(
                "there is no file {}: create it, or give the disk a size, which creates it",
                file.display()
            ));
        }
        let found = self.beneath(file).metadata().ok().filter(|found| found.is_file());
        let has = found.map(|found| found.len()).filter(|&bytes| bytes > 0);
        if let Some((has, asked)) = has.zip(call.size()).filter(|(has, asked)| has != asked) {
            let (file, has, asked) = (file.display(), Size(has), Size(asked));
            return Err(format!("{file} has {has}, not {asked}: resize the disk first, or omit size"));
        }
        Ok(())
    }

    /// The path by which this process reaches the daemon's file `path`.
    fn beneath(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

/// Equal for two paths of the same file.
#[derive(PartialEq)]
enum Identity {
    Inode(u64, u64),
    /// The file does not exist yet: its directory, if that exists, and its name.
    Name(Option<(u64, u64)>, PathBuf),
}

fn identity(path: &Path) -> Identity {
    let inode = |path: &Path| path.metadata().ok().map(|of| (of.dev(), of.ino()));
    if let Some((device, inode)) = inode(path) {
        return Identity::Inode(device, inode);
    }
    match path.parent().and_then(inode).zip(path.file_name()) {
        Some((dir, name)) => Identity::Name(Some(dir), name.into()),
        None => Identity::Name(None, path.to_owned()),
    }
}

fn is_readonly(call: &Call) -> bool {
    call.params.get("readonly") == Some(&true.into())
}

fn named(call: &Call) -> String {
    format!("{} '{}'", call.kind().name(), call.name().unwrap_or_default())
}
