//! Users of the block devices of an NVMe controller that the kernel drives: mounts, swap, other devices, processes. Control
//! context.

use super::{Sysfs, names, read};
use crate::{Address, PciError};
use std::fmt;
use std::path::Path;

/// A block device of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Its name below `/dev`, as `nvme0n1`.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// The users of the device and of its partitions.
    pub usage: Vec<Usage>,
}

/// One use of a block device or of a partition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Usage {
    /// A mounted file system.
    Mounted {
        /// The device or partition.
        device: String,
        /// Where.
        path: String,
    },
    /// Swap space.
    Swap {
        /// The device or partition.
        device: String,
    },
    /// A part of another block device: RAID, LVM, encryption, cache.
    Held {
        /// The device or partition.
        device: String,
        /// The other device.
        by: String,
    },
    /// A process has it open.
    Open {
        /// The device or partition.
        device: String,
        /// The process.
        process: u32,
        /// The name of the process.
        command: String,
    },
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { device, path } => write!(f, "{device} is mounted at {path}"),
            Self::Swap { device } => write!(f, "{device} is swap space"),
            Self::Held { device, by } => write!(f, "{device} is part of {by}"),
            Self::Open { device, process, command } => {
                write!(f, "{device} is open in process {process} ({command})")
            }
        }
    }
}

/// A block device or a partition: its name, and its number as the kernel writes it.
struct Node {
    name: String,
    number: String,
    holders: Vec<String>,
}

impl Sysfs {
    /// The block devices of an NVMe controller, with their uses; empty if the kernel's driver does not drive it.
    ///
    /// # Errors
    /// [`PciError::Os`] if sysfs or procfs cannot be read.
    pub fn block_devices(&self, address: Address) -> Result<Vec<BlockDevice>, PciError> {
        let mut found = Vec::new();
        let controllers = self.directory(address).join("nvme");
        for controller in names(&controllers)? {
            found.extend(self.namespaces(&controllers.join(&controller))?);
            // With multipath, the block devices belong to the subsystem.
            let subsystems = self.sys.join("class/nvme-subsystem");
            for subsystem in names(&subsystems)? {
                let directory = subsystems.join(subsystem);
                if directory.join(&controller).exists() {
                    found.extend(self.namespaces(&directory)?);
                }
            }
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        Ok(found)
    }

    /// The processes that have the function's VFIO files open.
    ///
    /// # Errors
    /// As [`Sysfs::block_devices`].
    pub fn vfio_users(&self, address: Address) -> Result<Vec<Usage>, PciError> {
        let group = self.function(address)?.group.map(|group| format!("vfio/{group}"));
        let device = self.vfio_device(address).map(|device| format!("vfio/devices/{device}"));
        let files: Vec<_> = group.into_iter().chain(device).collect();
        Ok(self.openers(&files))
    }

    fn namespaces(&self, directory: &Path) -> Result<Vec<BlockDevice>, PciError> {
        let mut found = Vec::new();
        for name in names(directory)?.into_iter().filter(|name| is_namespace(name)) {
            let device = directory.join(&name);
            let mut nodes = vec![node(&name, &device)?];
            for part in names(&device)? {
                if device.join(&part).join("partition").exists() {
                    nodes.push(node(&part, &device.join(&part))?);
                }
            }
            let sectors = read(&device.join("size")).ok().and_then(|text| text.trim().parse::<u64>().ok());
            let usage = self.usage(&nodes)?;
            found.push(BlockDevice { name, size: sectors.unwrap_or(0).saturating_mul(512), usage });
        }
        Ok(found)
    }

    fn usage(&self, nodes: &[Node]) -> Result<Vec<Usage>, PciError> {
        let procfs = |file: &str| read(&self.proc.join(file)).map_err(|error| super::os(&error));
        let mounts = procfs("self/mountinfo")?;
        // A kernel without swap has no such file.
        let swaps = procfs("swaps").unwrap_or_default();
        let mut usage = Vec::new();
        for Node { name, number, holders } in nodes {
            let device = || name.clone();
            let path = format!("/dev/{name}");
            usage.extend(holders.iter().map(|by| Usage::Held { device: device(), by: by.clone() }));
            if swaps.lines().any(|line| line.split_whitespace().next() == Some(&path)) {
                usage.push(Usage::Swap { device: device() });
            }
            let at = mounts.lines().filter_map(|line| mounted_at(line, number, &path));
            usage.extend(at.map(|path| Usage::Mounted { device: device(), path }));
        }
        let files: Vec<_> = nodes.iter().map(|node| node.name.clone()).collect();
        usage.extend(self.openers(&files));
        usage.sort_unstable();
        usage.dedup();
        Ok(usage)
    }

    /// The processes that have one of these files of `/dev` open. Processes of other users are seen by root only.
    fn openers(&self, files: &[String]) -> Vec<Usage> {
        let mut found = Vec::new();
        for process in names(&self.proc).unwrap_or_default() {
            let Ok(id) = process.parse::<u32>() else { continue };
            let directory = self.proc.join(&process);
            for fd in names(&directory.join("fd")).unwrap_or_default() {
                let Ok(target) = std::fs::read_link(directory.join("fd").join(fd)) else { continue };
                let Ok(file) = target.strip_prefix("/dev") else { continue };
                let Some(device) = files.iter().find(|name| Path::new(name) == file) else { continue };
                let command = read(&directory.join("comm")).unwrap_or_default().trim().to_owned();
                found.push(Usage::Open { device: device.clone(), process: id, command });
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

fn node(name: &str, directory: &Path) -> Result<Node, PciError> {
    let number = read(&directory.join("dev")).unwrap_or_default().trim().to_owned();
    let holders = names(&directory.join("holders"))?.into_iter().collect();
    Ok(Node { name: name.to_owned(), number, holders })
}

/// `nvme0n1`; not a path of multipath (`nvme0c0n1`) or a character device (`ng0n1`).
fn is_namespace(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    parts.is_some_and(|(controller, namespace)| is_number(controller) && is_number(namespace))
}

/// The mount point of a line of `mountinfo`, if it mounts this device: proc_pid_mountinfo(5). Some file systems (btrfs) have a
/// number of their own; their lines name the device.
fn mounted_at(line: &str, number: &str, path: &str) -> Option<String> {
    let (mount, source) = line.split_once(" - ")?;
    let fields: Vec<_> = mount.split(' ').collect();
    let is_this = fields.get(2) == Some(&number) || source.split(' ').nth(1) == Some(path);
    is_this.then(|| fields.get(4).map(|path| unescape(path)))?
}

/// Replaces the octal escapes of spaces, tabs, line ends and backslashes.
fn unescape(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(path.to_owned(), |path, (escape, character)| path.replace(escape, character))
}
