//! `aryk nvme`: the NVMe drives of this host, and their binding to vfio-pci.
//!
//! The commands of this file read and write sysfs themselves: the daemon has no right to bind drivers. Those of `drive` call the
//! daemon.

pub mod drive;
mod held;

use crate::cli::{Cli, examples};
use crate::completion::{bound_drives, unbound_drives};
use crate::error::Error;
use crate::output::{Column, Output};
use crate::size::Size;
use crate::watch::Watch;
use aryk_pci::sysfs::{Drive, FunctionInfo, Identity, Sysfs, Usage};
use aryk_pci::{Address, PciError};
use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use drive::DriveCommand;
use held::Held;
use nix::errno::Errno;
use nix::unistd::User;
use serde_json::{Value, json};
use std::os::unix::fs::chown;

/// Commands for the NVMe drives of this host.
#[derive(Debug, Subcommand)]
pub enum NvmeCommand {
    /// List the NVMe drives of this host, their drivers and their uses
    List(Watch),
    /// Bind drives to vfio-pci, so that Aryk can drive them itself
    #[command(after_help = examples::BIND)]
    Bind {
        /// The drives' PCI addresses, such as 0000:3d:00.0
        #[arg(required = true, value_name = "ADDRESS", add = ArgValueCandidates::new(unbound_drives))]
        addresses: Vec<Address>,
        /// The user, by name or number, who may open the drives: the user of the daemon
        #[arg(long, value_name = "USER")]
        owner: Option<String>,
    },
    /// Return drives from vfio-pci to the kernel's driver
    #[command(after_help = examples::UNBIND)]
    Unbind {
        /// The drives' PCI addresses, such as 0000:3d:00.0
        #[arg(required = true, value_name = "ADDRESS", add = ArgValueCandidates::new(bound_drives))]
        addresses: Vec<Address>,
    },
    /// Commands for drives that the daemon drives.
    #[command(flatten)]
    Drive(DriveCommand),
}

pub fn run(command: &NvmeCommand, cli: &Cli, out: &Output) -> Result<(), Error> {
    let sysfs = Sysfs::default();
    match command {
        NvmeCommand::List(_) => list(&sysfs, cli, out),
        NvmeCommand::Bind { addresses, owner } => bind(addresses, owner.as_deref(), &sysfs, out),
        NvmeCommand::Drive(command) => drive::run(command, cli, out),
        NvmeCommand::Unbind { addresses } => unbind(addresses, &sysfs, out),
    }
}

/// A drive, and what the daemon knows about it if the daemon drives it.
struct Entry {
    drive: Drive,
    held: Option<Held>,
}

impl Entry {
    fn identity(&self) -> Option<&Identity> {
        let held = self.held.as_ref().and_then(|held| held.identity.as_ref());
        self.drive.identity.as_ref().or(held)
    }

    /// Bytes of all namespaces; `None` if neither the kernel nor the daemon knows them.
    fn size(&self) -> Option<u64> {
        let sizes = self.drive.block_devices.iter().map(|device| device.size);
        let held = self.held.as_ref().map(|held| held.size);
        self.drive.identity.as_ref().map(|_| sizes.fold(0, u64::saturating_add)).or(held)
    }

    /// Degrees Celsius.
    fn temperature(&self) -> Option<f64> {
        let held = self.held.as_ref().and_then(|held| held.celsius.map(f64::from));
        self.drive.temperature.map(|millidegrees| f64::from(millidegrees) / 1000.0).or(held)
    }
}

fn list(sysfs: &Sysfs, cli: &Cli, out: &Output) -> Result<(), Error> {
    let drives = sysfs.nvme_drives()?;
    let (mut held, note) = match drives.iter().any(|drive| drive.function.is_bound_to_vfio()) {
        true => held::read(&cli.socket, cli.timeout),
        false => Default::default(),
    };
    let entry = |drive: Drive| Entry { held: held.remove(&drive.function.address), drive };
    let drives: Vec<_> = drives.into_iter().map(entry).collect();
    if let Some(note) = note {
        eprintln!("aryk: {note}");
    }
    out.print(&drives.iter().map(describe).collect(), || table(&drives, out))
}

/// A drive for programs.
fn describe(entry: &Entry) -> Value {
    let Entry { drive, held } = entry;
    let function = &drive.function;
    let identity = entry.identity();
    let blocks = drive.block_devices.iter().map(|device| json!({"name": device.name, "size": device.size}));
    json!({
        "address": function.address.to_string(),
        "vendor_id": format!("{:04x}", function.vendor),
        "device_id": format!("{:04x}", function.device),
        "driver": function.driver,
        "state": state(drive).name(),
        "model": identity.map(|identity| &identity.model),
        "serial": identity.map(|identity| &identity.serial),
        "firmware": identity.map(|identity| &identity.firmware),
        "size": entry.size(),
        "temperature_celsius": entry.temperature(),
        "iommu_group": function.group,
        "group_shared_with": drive.neighbours.iter().map(neighbour).collect::<Value>(),
        "numa_node": function.numa_node,
        "block_devices": blocks.collect::<Value>(),
        "uses": drive.usage().map(usage).collect::<Value>(),
        "controller": held.as_ref().map(|held| &held.controller),
        "disks": held.as_ref().map(|held| &held.disks),
    })
}

fn neighbour(function: &FunctionInfo) -> Value {
    json!({"address": function.address.to_string(), "driver": function.driver})
}

fn usage(usage: &Usage) -> Value {
    let mut value = match usage {
        Usage::Mounted { device, path } => json!({"kind": "mounted", "device": device, "path": path}),
        Usage::Swap { device } => json!({"kind": "swap", "device": device}),
        Usage::Held { device, by } => json!({"kind": "part_of", "device": device, "by": by}),
        Usage::Exported { device, subsystem } => {
            json!({"kind": "exported", "device": device, "by": subsystem})
        }
        Usage::Open { device, process, command } => {
            json!({"kind": "open", "device": device, "process": process, "command": command})
        }
    };
    value["text"] = json!(usage.to_string());
    value
}

/// The use of a drive, which decides whether the drive can be bound or unbound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveState {
    /// A driver of the kernel has it, and something uses it.
    InUse,
    /// A driver of the kernel has it, and nothing uses it.
    Unused,
    /// The drive has no driver.
    NoDriver,
    /// It is bound to VFIO, and no process drives it.
    Bound,
    /// It is bound to VFIO, and a process drives it.
    Driven,
}

impl DriveState {
    const fn name(self) -> &'static str {
        match self {
            Self::InUse => "in_use",
            Self::Unused => "unused",
            Self::NoDriver => "no_driver",
            Self::Bound => "bound",
            Self::Driven => "driven",
        }
    }
}

pub fn state(drive: &Drive) -> DriveState {
    let is_used = drive.usage().next().is_some();
    match (drive.function.is_bound_to_vfio(), is_used) {
        (true, true) => DriveState::Driven,
        (true, false) => DriveState::Bound,
        (false, true) => DriveState::InUse,
        (false, false) if drive.function.driver.is_none() => DriveState::NoDriver,
        (false, false) => DriveState::Unused,
    }
}

/// A table of the drives. The last column has several lines: model and serial number, then each use.
fn table(drives: &[Entry], out: &Output) -> String {
    if drives.is_empty() {
        return "This host has no NVMe drives.".into();
    }
    let absent = || "-".to_owned();
    let mut rows = Vec::new();
    for entry in drives {
        let function = &entry.drive.function;
        let mut row = vec![
            function.address.to_string(),
            function.driver.clone().unwrap_or_else(absent),
            function.group.map_or_else(absent, |group| group.to_string()),
            entry.size().map_or_else(absent, |size| Size(size).to_string()),
            entry.temperature().map_or_else(absent, |celsius| format!("{celsius:.0} °C")),
        ];
        for line in lines(entry) {
            row.push(line);
            rows.push(std::mem::replace(&mut row, vec![String::new(); 5]));
        }
    }
    let columns: [Column; 6] = [
        ("ADDRESS", false),
        ("DRIVER", false),
        ("GROUP", true),
        ("SIZE", true),
        ("TEMP", true),
        ("DRIVE", false),
    ];
    out.table(&columns, rows)
}

/// The lines about a drive for people; at least one.
fn lines(entry: &Entry) -> Vec<String> {
    let drive = &entry.drive;
    let identity = entry.identity().map(|identity| format!("{}, {}", identity.model, identity.serial));
    let mut lines: Vec<_> = identity.into_iter().chain(drive.usage().map(ToString::to_string)).collect();
    lines.extend(entry.held.as_ref().map(|held| match &held.disks[..] {
        [] => format!("controller {}, without disks", held.controller),
        disks => format!("controller {}, disks: {}", held.controller, disks.join(", ")),
    }));
    match state(drive) {
        DriveState::Unused => lines.push("unused".into()),
        DriveState::Bound => lines.push("no process drives it".into()),
        DriveState::NoDriver if lines.is_empty() => lines.push("no driver".into()),
        DriveState::InUse | DriveState::Driven | DriveState::NoDriver => {}
    }
    lines.extend(drive.blockers().map(|other| format!("group also has {}", named(other))));
    lines
}

/// A function and its driver, for people.
pub fn named(function: &FunctionInfo) -> String {
    let driver = function.driver.as_deref().unwrap_or("no driver");
    format!("{} ({driver})", function.address)
}

/// The result of binding or unbinding a drive.
struct Outcome {
    function: FunctionInfo,
    changed: bool,
    /// The functions that must be bound too before VFIO opens this one.
    blockers: Vec<FunctionInfo>,
}

impl Outcome {
    fn read(address: Address, changed: bool, sysfs: &Sysfs) -> Result<Self, Error> {
        let function = sysfs.function(address)?;
        let group = function.group.filter(|_| function.is_bound_to_vfio());
        let mut blockers = group.map_or(Ok(Vec::new()), |group| sysfs.group_members(group))?;
        blockers.retain(|other| other.address != address && other.blocks_group());
        Ok(Self { function, changed, blockers })
    }

    fn to_json(&self) -> Value {
        json!({
            "address": self.function.address.to_string(),
            "driver": self.function.driver,
            "changed": self.changed,
            "bind_too": self.blockers.iter().map(neighbour).collect::<Value>(),
        })
    }

    fn text(&self) -> String {
        let address = self.function.address;
        let verb = if self.changed { "is now" } else { "was already" };
        let mut text = match self.function.driver.as_deref() {
            Some(driver) => format!("{address} {verb} bound to {driver}."),
            None => format!("{address} has no driver: 'modprobe nvme' loads the kernel's."),
        };
        for other in &self.blockers {
            text += &format!(
                "\n  It cannot be opened yet: {} is in its IOMMU group. {}",
                named(other),
                remedy(other)
            );
        }
        text
    }
}

/// How to make the group of a function usable for VFIO.
pub fn remedy(other: &FunctionInfo) -> String {
    match other.class == aryk_pci::sysfs::CLASS_NVME {
        true => format!("Bind it too: sudo aryk nvme bind {}", other.address),
        false => "It is no NVMe drive: move one of them to another slot.".into(),
    }
}

fn bind(addresses: &[Address], owner: Option<&str>, sysfs: &Sysfs, out: &Output) -> Result<(), Error> {
    let owner = owner.map(user_id).transpose()?;
    // No drive is bound if one cannot be.
    addresses.iter().try_for_each(|&address| sysfs.check_bindable(address))?;
    let mut changed = Vec::new();
    for &address in addresses {
        changed.push(sysfs.bind(address)?);
        if let Some(owner) = owner {
            give(address, owner, sysfs)?;
        }
    }
    report(addresses, &changed, sysfs, out)
}

fn unbind(addresses: &[Address], sysfs: &Sysfs, out: &Output) -> Result<(), Error> {
    addresses.iter().try_for_each(|&address| sysfs.check_unbindable(address))?;
    let changed: Vec<_> =
        addresses.iter().map(|&address| sysfs.unbind(address)).collect::<Result<_, PciError>>()?;
    report(addresses, &changed, sysfs, out)
}

/// Prints the drivers that the drives have in the end.
fn report(addresses: &[Address], changed: &[bool], sysfs: &Sysfs, out: &Output) -> Result<(), Error> {
    let outcomes = addresses.iter().zip(changed);
    let outcomes: Vec<_> = outcomes
        .map(|(&address, &changed)| Outcome::read(address, changed, sysfs))
        .collect::<Result<_, _>>()?;
    out.print(&outcomes.iter().map(Outcome::to_json).collect(), || {
        outcomes.iter().map(Outcome::text).collect::<Vec<_>>().join("\n")
    })
}

/// Makes a user the owner of the file by which a process opens the drive. That is the file of its group where the kernel has
/// one: opening by the file of the function needs rights for `/dev/iommu` too.
fn give(address: Address, owner: u32, sysfs: &Sysfs) -> Result<(), Error> {
    let Some(file) = sysfs.vfio_files(address)?.into_iter().next() else {
        return Err(Error::File(format!("{address}: the kernel has created no file for it in /dev/vfio")));
    };
    chown(&file, Some(owner), None)
        .map_err(|error| Error::File(format!("cannot change the owner of {}: {error}", file.display())))
}

fn user_id(name: &str) -> Result<u32, Error> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    match User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        // ENOENT: the host has no file of users.
        Ok(None) | Err(Errno::ENOENT) => Err(Error::Usage(format!("there is no user '{name}'"))),
        Err(errno) => Err(Error::File(format!("cannot look up the user '{name}': {errno}"))),
    }
}

#[cfg(test)]
mod tests;
