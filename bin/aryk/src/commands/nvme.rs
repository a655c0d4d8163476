//! `aryk nvme`: the NVMe drives of this host, and their binding to vfio-pci.
//!
//! These commands read and write sysfs themselves: the daemon has no right to bind drivers.

use crate::cli::examples;
use crate::completion::{bound_drives, unbound_drives};
use crate::error::Error;
use crate::output::{Column, Output};
use crate::size::Size;
use crate::watch::Watch;
use aryk_pci::sysfs::{Drive, FunctionInfo, Sysfs, Usage};
use aryk_pci::{Address, PciError};
use clap::Subcommand;
use clap_complete::ArgValueCandidates;
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
}

pub fn run(command: &NvmeCommand, out: &Output) -> Result<(), Error> {
    let sysfs = Sysfs::default();
    match command {
        NvmeCommand::List(_) => list(&sysfs, out),
        NvmeCommand::Bind { addresses, owner } => bind(addresses, owner.as_deref(), &sysfs, out),
        NvmeCommand::Unbind { addresses } => unbind(addresses, &sysfs, out),
    }
}

fn list(sysfs: &Sysfs, out: &Output) -> Result<(), Error> {
    let drives = sysfs.nvme_drives()?;
    out.print(&drives.iter().map(describe).collect(), || table(&drives, out))
}

/// A drive for programs.
fn describe(drive: &Drive) -> Value {
    let function = &drive.function;
    let identity = drive.identity.as_ref();
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
        "size": size(drive),
        "temperature_celsius": drive.temperature.map(|millidegrees| f64::from(millidegrees) / 1000.0),
        "iommu_group": function.group,
        "group_shared_with": drive.neighbours.iter().map(neighbour).collect::<Value>(),
        "numa_node": function.numa_node,
        "block_devices": blocks.collect::<Value>(),
        "uses": drive.usage().map(usage).collect::<Value>(),
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
        Usage::Open { device, process, command } => {
            json!({"kind": "open", "device": device, "process": process, "command": command})
        }
    };
    value["text"] = json!(usage.to_string());
    value
}

/// Bytes of all namespaces; `None` if the kernel does not know them.
fn size(drive: &Drive) -> Option<u64> {
    let sizes = drive.block_devices.iter().map(|device| device.size);
    drive.identity.as_ref().map(|_| sizes.fold(0, u64::saturating_add))
}

/// What can be done with a drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveState {
    /// A driver of the kernel has it, and something uses it.
    InUse,
    /// A driver of the kernel has it, and nothing uses it.
    Unused,
    /// It has no driver.
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
fn table(drives: &[Drive], out: &Output) -> String {
    if drives.is_empty() {
        return "This host has no NVMe drives.".into();
    }
    let absent = || "-".to_owned();
    let mut rows = Vec::new();
    for drive in drives {
        let function = &drive.function;
        let mut row = vec![
            function.address.to_string(),
            function.driver.clone().unwrap_or_else(absent),
            function.group.map_or_else(absent, |group| group.to_string()),
            size(drive).map_or_else(absent, |size| Size(size).to_string()),
            drive
                .temperature
                .map_or_else(absent, |millidegrees| format!("{:.0} °C", f64::from(millidegrees) / 1000.0)),
        ];
        for line in lines(drive) {
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
fn lines(drive: &Drive) -> Vec<String> {
    let identity = drive.identity.iter().map(|identity| format!("{}, {}", identity.model, identity.serial));
    let mut lines: Vec<_> = identity.chain(drive.usage().map(ToString::to_string)).collect();
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
