//! `--allow-dir`: the daemon uses Landlock to give up the right to open files elsewhere.
//!
//! Runs before the first thread starts: a thread inherits the restrictions of its creator, and only of it. A right that was given
//! up cannot be regained, so each path that is opened later has a rule here: disks, sockets, state, and the files in which the C
//! library looks up users by name.

use crate::cli::Cli;
use anyhow::{Context, bail};
use aryk_metrics::Address;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus,
};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The Landlock ABI that is requested; an older kernel enforces a part of it, and that is accepted.
const NEWEST: ABI = ABI::V5;

/// Read at run time: holders of locks, the front-ends' processes, the threads' cores; and users and groups by name, whose files
/// are replaced when they change, so that the rule must be for their directory.
const READ: &[&str] =
    &["/proc", "/sys", "/usr", "/lib", "/lib64", "/etc", "/run/systemd/userdb", "/var/lib/sss"];

/// Opened at run time; these devices store nothing. `/dev/cuse` creates character devices for the tools of NVMe drives. Only root
/// may open it, unless the operator gives the daemon's user that permission.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/cuse"];

/// The files of RDMA devices and of their connections.
const RDMA: &[&str] = &["/dev/infiniband"];

/// The files of VFIO and iommufd, by which the daemon drives NVMe controllers. A function's file appears when the function is
/// bound to vfio-pci; its permissions decide whether the daemon can drive it.
const VFIO: &[&str] = &["/dev/vfio", "/dev/iommu"];

/// Restricts the process to the directories that `cli` allows, if `cli` names any.
///
/// # Errors
/// A directory does not exist, or the kernel has no Landlock.
pub fn confine(cli: &Cli, vhost_dir: &Path) -> anyhow::Result<()> {
    if cli.allow_dir.is_empty() {
        return Ok(());
    }
    let all = AccessFs::from_all(NEWEST);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)
        .and_then(|rules| rules.create())
        .context("Landlock refuses the rules")?;
    let mut allowed = Vec::new();
    for dir in &cli.allow_dir {
        rules = allow(rules, dir, all).with_context(|| format!("--allow-dir {}", dir.display()))?;
        allowed.push(dir.canonicalize()?);
    }
    for (dir, access) in own_directories(cli, vhost_dir)? {
        rules = allow(rules, &dir, access).with_context(|| dir.display().to_string())?;
    }
    for (path, access) in everywhere() {
        if path.exists() {
            rules = allow(rules, path, access).with_context(|| path.display().to_string())?;
        }
    }
    let status = rules.restrict_self().context("Landlock refuses")?;
    if status.ruleset == RulesetStatus::NotEnforced {
        bail!(
            "this kernel has no Landlock, so --allow-dir cannot be enforced: it needs Linux 5.13 with `landlock` among the security modules (lsm=…); without --allow-dir the daemon runs"
        );
    }
    aryk_bdev_uring::note_allowed(allowed);
    Ok(())
}

/// The paths outside of the allowed directories, and the rights that are needed there.
fn everywhere() -> impl Iterator<Item = (&'static Path, BitFlags<AccessFs>)> {
    let drive = AccessFs::ReadDir | AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let with = |access| move |path: &&'static str| (Path::new(*path), access);
    let read = READ.iter().map(with(AccessFs::from_read(NEWEST)));
    let devices = DEVICES.iter().map(with(AccessFs::ReadFile | AccessFs::WriteFile));
    read.chain(devices).chain(VFIO.iter().chain(RDMA).map(with(drive)))
}

/// The directories of sockets and state, and the rights that are needed there later. Other programs may keep files in the
/// directories of sockets, above all in `/var/tmp`: the daemon can neither read nor write those.
fn own_directories(cli: &Cli, vhost_dir: &Path) -> anyhow::Result<Vec<(PathBuf, BitFlags<AccessFs>)>> {
    let (make, remove) = (AccessFs::MakeSock, AccessFs::RemoveFile);
    let directory = |socket: &Path| {
        let socket = std::path::absolute(socket)?;
        anyhow::Ok(socket.parent().with_context(|| format!("{}: no directory", socket.display()))?.to_owned())
    };
    // The RPC socket and its lock file exist already.
    let mut own = vec![(directory(&cli.rpc_socket)?, remove.into()), (vhost_dir.to_owned(), make | remove)];
    if let Some(dir) = &cli.state_dir {
        // The store would create it later, but the rule needs it now.
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        own.push((dir.clone(), AccessFs::from_all(NEWEST)));
    }
    if let Some(Address::Unix(path)) = &cli.metrics {
        own.push((directory(path)?, make | remove));
    }
    Ok(own)
}

/// Adds the rule that `access` is allowed beneath `path`, or to `path` itself if it is a file.
fn allow(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> anyhow::Result<RulesetCreated> {
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(NEWEST) };
    Ok(rules.add_rule(PathBeneath::new(PathFd::new(path)?, access))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_the_daemon_drives_can_be_opened() {
        // Landlock judges calls on a device by the rights of its open file.
        let needed = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        for file in [
            "/dev/vfio/vfio",
            "/dev/vfio/14",
            "/dev/vfio/devices/vfio0",
            "/dev/iommu",
            "/dev/infiniband/uverbs0",
        ] {
            let mut rules = everywhere().filter(|(path, _)| Path::new(file).starts_with(path));
            assert!(rules.any(|(_, access)| access.contains(needed)), "{file}");
        }
    }
}
