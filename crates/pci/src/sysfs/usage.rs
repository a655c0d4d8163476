//! Users of an NVMe controller that the kernel drives, by its block devices or by its character devices: mounts, swap, other
//! devices, other hosts, processes. Control context.

use super::{FunctionInfo, Sysfs, names, read};
use crate::{Address, PciError};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

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

/// One use of a block device, of a partition, or of a character device of a controller or of a namespace.
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
    /// A part of another block device (RAID, LVM, encryption, cache) or of a file system on several devices.
    Held {
        /// The device or partition.
        device: String,
        /// The other device, or the file system.
        by: String,
    },
    /// The kernel's NVMe target offers it to other hosts. It does not open it exclusively.
    Exported {
        /// The device or partition, or the controller that gets the other hosts' commands.
        device: String,
        /// The NQN of the target's subsystem.
        subsystem: String,
    },
    /// A process has it open.
    Open {
        /// The device or partition, or the character device.
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
            Self::Exported { device, subsystem } => {
                write!(f, "{device} is exported by the kernel's NVMe target as {subsystem}")
            }
            Self::Open { device, process, command } => {
                write!(f, "{device} is open in process {process} ({command})")
            }
        }
    }
}

/// The uses of all devices at one time.
#[derive(Debug)]
pub(super) struct Uses {
    mounts: String,
    swaps: String,
    /// Loop devices, and the file below each.
    loops: Vec<(String, String)>,
    /// Devices and controllers that the kernel's NVMe target exports: names, and NQNs of its subsystems.
    exports: Vec<(String, String)>,
    /// The openers of the files of NVMe and VFIO: id and name of each process, by the file's path below `/dev`.
    openers: BTreeMap<PathBuf, BTreeSet<(u32, String)>>,
}

impl Uses {
    /// The processes that have one of these files open.
    fn openers(&self, files: impl IntoIterator<Item = String>) -> Vec<Usage> {
        let of = |device: String| {
            let processes = self.openers.get(Path::new(&device)).into_iter().flatten();
            let opened = |(process, command): &(u32, String)| Usage::Open {
                device: device.clone(),
                process: *process,
                command: command.clone(),
            };
            processes.map(opened).collect::<Vec<_>>()
        };
        files.into_iter().flat_map(of).collect()
    }
}

/// A block device or a partition.
struct Node {
    name: String,
    /// Major and minor number, as the kernel writes them.
    number: String,
    directory: PathBuf,
    /// The name below `/dev/mapper`.
    mapper: Option<String>,
    holders: BTreeSet<String>,
}

impl Node {
    fn read(name: &str, directory: PathBuf, uses: &Uses) -> Result<Self, PciError> {
        let number = read(&directory.join("dev")).unwrap_or_default().trim().to_owned();
        let mapper = read(&directory.join("dm/name")).ok().map(|name| name.trim().to_owned());
        let mut holders = names(&directory.join("holders"))?;
        // The kernel names no loop device as a holder.
        let path = format!("/dev/{name}");
        holders.extend(uses.loops.iter().filter(|(_, file)| *file == path).map(|(device, _)| device.clone()));
        Ok(Self { name: name.to_owned(), number, directory, mapper, holders })
    }

    /// The name for people.
    fn label(&self) -> String {
        match &self.mapper {
            Some(mapper) => format!("{} ({mapper})", self.name),
            None => self.name.clone(),
        }
    }
}

impl Sysfs {
    /// The block devices of an NVMe controller, with their uses; empty if the kernel's driver does not drive it.
    ///
    /// # Errors
    /// [`PciError::Os`] if sysfs or procfs cannot be read.
    pub fn block_devices(&self, address: Address) -> Result<Vec<BlockDevice>, PciError> {
        self.block_devices_with(address, &self.uses()?)
    }

    /// The processes that have the function's VFIO files open.
    ///
    /// # Errors
    /// As [`Sysfs::block_devices`].
    pub fn vfio_users(&self, address: Address) -> Result<Vec<Usage>, PciError> {
        Ok(self.vfio_users_with(&self.function(address)?, &self.uses()?))
    }

    /// Reads the uses of all devices.
    pub(super) fn uses(&self) -> Result<Uses, PciError> {
        let mounts = read(&self.proc.join("self/mountinfo")).map_err(|error| super::os(&error))?;
        // A kernel without swap has no such file.
        let swaps = read(&self.proc.join("swaps")).unwrap_or_default();
        let blocks = self.sys.join("class/block");
        let file = |device: String| {
            let file = read(&blocks.join(&device).join("loop/backing_file")).ok()?;
            Some((device, file.trim_end().to_owned()))
        };
        let loops = names(&blocks)?.into_iter().filter(|name| name.starts_with("loop")).filter_map(file);
        Ok(Uses { mounts, swaps, loops: loops.collect(), exports: self.exports()?, openers: self.openers() })
    }

    /// The devices and controllers behind the kernel's NVMe target, as far as they are enabled: those of namespaces, and those
    /// that get all commands of a subsystem. They may be named by links, as in `/dev/disk`.
    fn exports(&self) -> Result<Vec<(String, String)>, PciError> {
        let subsystems = self.sys.join("kernel/config/nvmet/subsystems");
        let mut found = Vec::new();
        for subsystem in names(&subsystems)? {
            let directory = subsystems.join(&subsystem);
            let namespaces = directory.join("namespaces");
            let namespaces = names(&namespaces)?.into_iter().map(|name| namespaces.join(name));
            for export in namespaces.chain([directory.join("passthru")]) {
                let is_enabled = read(&export.join("enable")).is_ok_and(|text| text.trim() == "1");
                let path = read(&export.join("device_path")).unwrap_or_default();
                let path = PathBuf::from(path.trim());
                let device = path.canonicalize().unwrap_or(path);
                if let Some(name) = device.file_name().filter(|_| is_enabled) {
                    found.push((name.to_string_lossy().into_owned(), subsystem.clone()));
                }
            }
        }
        Ok(found)
    }

    pub(super) fn vfio_users_with(&self, info: &FunctionInfo, uses: &Uses) -> Vec<Usage> {
        uses.openers(self.vfio_names(info))
    }

    pub(super) fn block_devices_with(
        &self,
        address: Address,
        uses: &Uses,
    ) -> Result<Vec<BlockDevice>, PciError> {
        let mut found = Vec::new();
        for directory in self.namespace_directories(address)? {
            found.extend(self.namespaces(&directory, uses)?);
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        found.dedup_by(|a, b| a.name == b.name);
        Ok(found)
    }

    /// The uses of an NVMe controller by its character device, by those of its namespaces, or as a whole by the kernel's NVMe
    /// target. None of these is a use of a block device, and a namespace may have no block device.
    pub(super) fn controller_users_with(
        &self,
        address: Address,
        uses: &Uses,
    ) -> Result<Vec<Usage>, PciError> {
        let mut devices = names(&self.directory(address).join("nvme"))?;
        let exports = uses.exports.iter().filter(|(device, _)| devices.contains(device));
        let exported = |(device, subsystem): &(String, String)| Usage::Exported {
            device: device.clone(),
            subsystem: subsystem.clone(),
        };
        let mut usage: Vec<_> = exports.map(exported).collect();
        for directory in self.namespace_directories(address)? {
            devices.extend(names(&directory)?.into_iter().filter(|name| is_generic(name)));
        }
        usage.extend(uses.openers(devices));
        Ok(usage)
    }

    /// The directories of a function's namespaces: those of its controllers, and with multipath those of their subsystems.
    fn namespace_directories(&self, address: Address) -> Result<Vec<PathBuf>, PciError> {
        let controllers = self.directory(address).join("nvme");
        let subsystems = self.sys.join("class/nvme-subsystem");
        let mut found = Vec::new();
        for controller in names(&controllers)? {
            found.push(controllers.join(&controller));
            let of_subsystems = names(&subsystems)?.into_iter().map(|subsystem| subsystems.join(subsystem));
            found.extend(of_subsystems.filter(|directory| directory.join(&controller).exists()));
        }
        Ok(found)
    }

    fn namespaces(&self, directory: &Path, uses: &Uses) -> Result<Vec<BlockDevice>, PciError> {
        let mut found = Vec::new();
        for name in names(directory)?.into_iter().filter(|name| is_namespace(name)) {
            let device = directory.join(&name);
            let sectors = read(&device.join("size")).ok().and_then(|text| text.trim().parse::<u64>().ok());
            let usage = self.usage(&self.nodes(&name, device, uses)?, uses)?;
            found.push(BlockDevice { name, size: sectors.unwrap_or(0).saturating_mul(512), usage });
        }
        Ok(found)
    }

    /// The device, its partitions, and all devices that are built on them: a file system on RAID, LVM or encryption is mounted
    /// from the last of these.
    fn nodes(&self, name: &str, directory: PathBuf, uses: &Uses) -> Result<Vec<Node>, PciError> {
        let mut nodes = vec![Node::read(name, directory, uses)?];
        let mut next = 0;
        while let Some(node) = nodes.get(next) {
            let parts = names(&node.directory)?.into_iter().filter_map(|part| {
                let directory = node.directory.join(&part);
                directory.join("partition").exists().then_some((part, directory))
            });
            let blocks = self.sys.join("class/block");
            let holders = node.holders.iter().map(|holder| (holder.clone(), blocks.join(holder)));
            for (name, directory) in parts.chain(holders).collect::<Vec<_>>() {
                if nodes.iter().all(|known| known.name != name) {
                    nodes.push(Node::read(&name, directory, uses)?);
                }
            }
            next += 1;
        }
        Ok(nodes)
    }

    fn usage(&self, nodes: &[Node], uses: &Uses) -> Result<Vec<Usage>, PciError> {
        let mut usage = Vec::new();
        for node in nodes {
            let device = || node.name.clone();
            let label = |name: &String| {
                nodes.iter().find(|node| node.name == *name).map_or_else(|| name.clone(), Node::label)
            };
            usage.extend(node.holders.iter().map(|by| Usage::Held { device: device(), by: label(by) }));
            // Only one of the devices of such a file system is in the table of mounts.
            let file_systems = self.sys.join("fs/btrfs");
            for uuid in names(&file_systems)? {
                if file_systems.join(&uuid).join("devices").join(&node.name).exists() {
                    usage.push(Usage::Held { device: device(), by: format!("the btrfs file system {uuid}") });
                }
            }
            let path = format!("/dev/{}", node.name);
            let mapper = node.mapper.as_ref().map(|name| format!("/dev/mapper/{name}"));
            let paths: Vec<&str> = [Some(path.as_str()), mapper.as_deref()].into_iter().flatten().collect();
            let swaps = uses.swaps.lines().filter_map(|line| line.split_whitespace().next());
            if swaps.into_iter().any(|swap| paths.contains(&swap)) {
                usage.push(Usage::Swap { device: device() });
            }
            let exports = uses.exports.iter().filter(|(name, _)| *name == node.name);
            usage.extend(
                exports
                    .map(|(_, subsystem)| Usage::Exported { device: device(), subsystem: subsystem.clone() }),
            );
            let at = uses.mounts.lines().filter_map(|line| mounted_at(line, &node.number, &paths));
            usage.extend(at.map(|path| Usage::Mounted { device: device(), path }));
        }
        usage.extend(uses.openers(nodes.iter().map(|node| node.name.clone())));
        usage.sort_unstable();
        usage.dedup();
        Ok(usage)
    }

    /// The openers of the files of NVMe and VFIO. Processes of other users are seen by root only.
    fn openers(&self) -> BTreeMap<PathBuf, BTreeSet<(u32, String)>> {
        let mut found = BTreeMap::<_, BTreeSet<_>>::new();
        for process in names(&self.proc).unwrap_or_default() {
            let Ok(id) = process.parse::<u32>() else { continue };
            let directory = self.proc.join(&process);
            for fd in names(&directory.join("fd")).unwrap_or_default() {
                let Ok(target) = std::fs::read_link(directory.join("fd").join(fd)) else { continue };
                let Ok(file) = target.strip_prefix("/dev") else { continue };
                let is_nvme = file.to_str().is_some_and(|file| file.starts_with("nvme") || is_generic(file));
                if is_nvme || file.starts_with("vfio") {
                    let command = read(&directory.join("comm")).unwrap_or_default().trim().to_owned();
                    found.entry(file.to_owned()).or_default().insert((id, command));
                }
            }
        }
        found
    }
}

/// `nvme0n1`; not a path of multipath (`nvme0c0n1`) or a character device (`ng0n1`).
fn is_namespace(name: &str) -> bool {
    has_two_numbers(name, "nvme")
}

/// `ng0n1`: the character device of a namespace.
fn is_generic(name: &str) -> bool {
    has_two_numbers(name, "ng")
}

/// Whether the name has the number of a controller or subsystem after `prefix`, and that of a namespace.
fn has_two_numbers(name: &str, prefix: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.strip_prefix(prefix).and_then(|rest| rest.split_once('n'));
    parts.is_some_and(|(controller, namespace)| is_number(controller) && is_number(namespace))
}

/// The mount point of a line of `mountinfo`, if it mounts this device: proc_pid_mountinfo(5). Some file systems (btrfs) have a
/// number of their own; their lines name the device.
fn mounted_at(line: &str, number: &str, paths: &[&str]) -> Option<String> {
    let (mount, source) = line.split_once(" - ")?;
    let fields: Vec<_> = mount.split(' ').collect();
    let is_source = source.split(' ').nth(1).is_some_and(|source| paths.contains(&source));
    let is_this = is_source || (!number.is_empty() && fields.get(2) == Some(&number));
    is_this.then(|| fields.get(4).map(|path| unescape(path)))?
}

/// Replaces the octal escapes of spaces, tabs, line ends and backslashes.
fn unescape(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(path.to_owned(), |path, (escape, character)| path.replace(escape, character))
}
