//! `aryk nvme identify`, `smart`, `format`, `firmware`, `reset`: drives that the daemon drives, by its RPCs.

use crate::cli::{Cli, examples};
use crate::client::Client;
use crate::commands::{elements, number, text};
use crate::error::Error;
use crate::output::Output;
use crate::size::Size;
use crate::watch::Watch;
use aryk_pci::{Address, BadAddress};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Time limit of commands that erase or activate.
const PATIENCE: Duration = Duration::from_secs(3600);
/// Opcodes of admin commands. NVMe 2.0 §5.
const IDENTIFY: u8 = 0x06;
const FORMAT_NVM: u8 = 0x80;
/// Bytes of the data of Identify.
const IDENTIFY_LEN: u32 = 4096;

/// Commands for a drive that the daemon drives.
#[derive(Debug, Subcommand)]
pub enum DriveCommand {
    /// Show a controller that the daemon drives: its identity, its state, its namespaces
    Identify(DriveArgs),
    /// Show the health of a drive: temperature, wear, errors
    Smart {
        #[command(flatten)]
        drive: DriveArgs,
        #[command(flatten)]
        watch: Watch,
    },
    /// Format a namespace: all its data is lost
    #[command(after_help = examples::FORMAT)]
    Format {
        #[command(flatten)]
        drive: DriveArgs,
        /// Bytes of a block [default: as it is now]
        #[arg(long, value_name = "BYTES")]
        block_size: Option<u64>,
        /// What is erased beyond what the format needs
        #[arg(long, value_enum, default_value = "none")]
        erase: Erase,
        /// Format it: without this, the command only says what would be lost
        #[arg(long)]
        force: bool,
    },
    /// Load firmware into a drive, and reset the drive to run it; requests wait meanwhile
    Firmware {
        #[command(flatten)]
        drive: DriveArgs,
        /// The image, a file that the daemon can read
        image: PathBuf,
        /// Load it: without this, the command only says what would be done
        #[arg(long)]
        force: bool,
    },
    /// Reset a controller; requests wait, and are submitted again
    Reset(DriveArgs),
}

/// A drive that the daemon drives.
#[derive(Debug, Args)]
pub struct DriveArgs {
    /// The name of its controller or of one of its disks, or its PCI address
    #[arg(value_name = "DRIVE")]
    drive: String,
}

/// A namespace of a drive: the drive's PCI address, and the NSID, which is 1 unless it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceAddress {
    pub address: Address,
    pub nsid: u32,
}

impl FromStr for NamespaceAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, nsid) = match text.rsplit_once(':') {
            // The colon behind the number of the function.
            Some((address, nsid)) if address.contains('.') => (address, nsid),
            _ => (text, "1"),
        };
        let address = address.parse().map_err(|error: BadAddress| error.to_string())?;
        match nsid.parse() {
            Ok(nsid) if nsid > 0 && nsid < u32::MAX => Ok(Self { address, nsid }),
            _ => Err(format!("'{nsid}' is no namespace ID: give a number from 1 on")),
        }
    }
}

/// What Format NVM erases. NVMe 2.0 §5.14, CDW10.SES.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Erase {
    /// Nothing
    None,
    /// All user data
    Data,
    /// The key with which the drive encrypts the data
    Key,
}

pub fn run(command: &DriveCommand, cli: &Cli, out: &Output) -> Result<(), Error> {
    let timeout = match command {
        DriveCommand::Format { .. } | DriveCommand::Firmware { .. } => cli.timeout.max(PATIENCE),
        _ => cli.timeout,
    };
    let client = &mut Client::connect(&cli.socket, timeout)?;
    match command {
        DriveCommand::Identify(args) => identify(&find(&args.drive, client)?, out),
        DriveCommand::Smart { drive, .. } => smart(&find(&drive.drive, client)?, client, out),
        DriveCommand::Format { drive, block_size, erase, force } => {
            format(&drive.drive, *block_size, *erase, *force, client, out)
        }
        DriveCommand::Firmware { drive, image, force } => {
            let image = std::path::absolute(image)?;
            firmware(&find(&drive.drive, client)?, &image, *force, client, out)
        }
        DriveCommand::Reset(args) => {
            let controller = find(&args.drive, client)?;
            let name = text(&controller, "name");
            client.call("bdev_nvme_reset_controller", json!({"name": name}))?;
            out.print(&json!({"controller": name, "reset": true}), || {
                format!("The controller '{name}' was reset.")
            })
        }
    }
}

/// The controller of a drive, as the daemon describes it.
fn find(drive: &str, client: &mut Client) -> Result<Value, Error> {
    let controllers = client.call("bdev_nvme_get_controllers", json!({}))?;
    let address = drive.parse::<Address>().ok();
    let is_meant = |controller: &&Value| {
        let is_there = || address.is_some() && text(&controller["trid"], "traddr").parse().ok() == address;
        let has_disk = || elements(&controller["namespaces"]).iter().any(|one| text(one, "disk") == drive);
        !drive.is_empty() && (text(controller, "name") == drive || is_there() || has_disk())
    };
    elements(&controllers).iter().find(is_meant).cloned().ok_or_else(|| {
        Error::no_device(format!("the daemon drives no '{drive}': give the name of a controller or a disk, or a PCI address ('aryk nvme list')"))
    })
}

fn identify(controller: &Value, out: &Output) -> Result<(), Error> {
    out.print(controller, || {
        let data = &controller["ctrlr_data"];
        let last_reset = controller["last_reset"].as_object().map(|reset| {
            let took = reset.get("took_ms").map_or_else(String::new, |ms| format!(", {ms} ms"));
            format!(", the last for {}{took}", reset["reason"].as_str().unwrap_or_default())
        });
        let pairs = elements(&controller["queue_pairs"]).len();
        let known = [
            ("controller", text(controller, "name").to_owned()),
            (
                "place",
                format!("{} {}", text(&controller["trid"], "trtype"), text(&controller["trid"], "traddr")),
            ),
            ("state", text(&controller["ctrlrs"][0], "state").to_owned()),
            ("model", text(data, "model_number").to_owned()),
            ("serial", text(data, "serial_number").to_owned()),
            ("firmware", text(data, "firmware_revision").to_owned()),
        ];
        let known = known.into_iter().chain(abilities(&controller["abilities"])).chain([
            ("pinned memory", text(controller, "dma").to_owned()),
            ("queue pairs", format!("{pairs} in use, at most {}", number(controller, "queue_pairs_max"))),
            ("resets", format!("{}{}", number(controller, "resets"), last_reset.unwrap_or_default())),
            ("aborts", number(controller, "aborts").to_string()),
        ]);
        let failure = controller["last_error"].as_str().map(|error| ("last error", error.to_owned()));
        let rows = elements(&controller["namespaces"]).iter().map(|one| {
            let size = Size(number(one, "block_size").saturating_mul(number(one, "num_blocks")));
            let unserved = one["unserved"].as_str();
            vec![
                number(one, "nsid").to_string(),
                one["disk"].as_str().unwrap_or("-").to_owned(),
                unserved.map_or_else(|| size.to_string(), |_| "-".into()),
                unserved.map_or_else(|| number(one, "block_size").to_string(), str::to_owned),
                identifier(one),
            ]
        });
        let columns = [("NSID", true), ("DISK", false), ("SIZE", true), ("BLOCK", false), ("ID", false)];
        format!("{}\n\n{}", out.list(known.chain(failure)), out.table(&columns, rows))
    })
}

/// What a controller supports, as lines; none before it was ready.
fn abilities(abilities: &Value) -> Vec<(&'static str, String)> {
    if !abilities.is_object() {
        return Vec::new();
    }
    let list = |member: &str| {
        let names: Vec<_> = elements(&abilities[member]).iter().filter_map(Value::as_str).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let has = |member: &str| abilities[member].as_bool().unwrap_or_default();
    let sgl = match text(abilities, "sgl") {
        "bytes" => "of any alignment",
        "dwords" => "of multiples of 4 bytes",
        _ => "none",
    };
    let mut lines = vec![
        ("largest transfer", Size(number(abilities, "transfer_max")).to_string()),
        ("write cache", if has("volatile_write_cache") { "volatile" } else { "none, or durable" }.into()),
        ("commands", list("commands")),
        ("admin commands", list("admin_commands")),
        ("SGLs", sgl.to_owned()),
        ("doorbells", if has("doorbell_buffer") { "registers, or memory" } else { "registers" }.into()),
    ];
    if let Some(is_locked) = abilities["locked"].as_bool() {
        let state = if is_locked { "locked: unlock the drive, or requests fail" } else { "not locked" };
        lines.push(("TCG Opal", state.to_owned()));
    }
    if let Some(wanted) = abilities["host_memory_wanted"].as_u64() {
        lines.push(("host memory", format!("asks for {}: not given", Size(wanted))));
    }
    lines
}

/// The identifier of a namespace, with its kind.
fn identifier(namespace: &Value) -> String {
    let of = |member: &str| namespace[member].as_str().map(|id| format!("{member} {id}"));
    of("nguid").or_else(|| of("eui64")).unwrap_or_else(|| "-".to_owned())
}

fn smart(controller: &Value, client: &mut Client, out: &Output) -> Result<(), Error> {
    let name = text(controller, "name");
    let health = client.call("bdev_nvme_get_controller_health_info", json!({"name": name}))?;
    out.print(&health, || {
        let count = |member| number(&health, member).to_string();
        // Units of 512,000 bytes.
        let data = |member| Size(number(&health, member).saturating_mul(512_000)).to_string();
        let warnings: Vec<_> =
            elements(&health["critical_warnings"]).iter().filter_map(Value::as_str).collect();
        let spare = number(&health, "available_spare_percentage");
        let threshold = number(&health, "available_spare_threshold_percentage");
        out.list([
            ("drive", format!("{}, {}", text(&health, "model_number"), text(&health, "serial_number"))),
            ("warnings", if warnings.is_empty() { "none".into() } else { warnings.join("; ") }),
            ("temperature", format!("{} °C", health["temperature_celsius"])),
            ("worn", format!("{} %", number(&health, "percentage_used"))),
            ("spare", format!("{spare} %, at least {threshold} %")),
            ("media errors", count("media_errors")),
            ("error log", count("num_err_log_entries")),
            ("read", data("data_units_read")),
            ("written", data("data_units_written")),
            ("powered on", format!("{} h, {} times", count("power_on_hours"), count("power_cycles"))),
            ("unsafe shutdowns", count("unsafe_shutdowns")),
        ])
    })
}

/// Sends an admin command, and returns the data of the controller.
fn send(controller: &str, command: [u8; 64], len: u32, client: &mut Client) -> Result<Vec<u8>, Error> {
    let params = json!({"name": controller, "cmd_type": "admin", "data_direction": "c2h",
        "cmdbuf": URL_SAFE.encode(command), "data_len": len});
    let sent = client.call("bdev_nvme_send_cmd", params)?;
    let decode = |member: &str| {
        URL_SAFE
            .decode(text(&sent, member))
            .map_err(|error| Error::Protocol(format!("sent invalid base64: {error}")))
    };
    let completion = decode("cpl")?;
    let status =
        completion.get(14..16).map_or(u16::MAX, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]) >> 1);
    if status & 0x7ff != 0 {
        let (sct, sc) = (status >> 8 & 7, status & 0xff);
        return Err(Error::File(format!(
            "the drive refuses the command: status code {sc:#04x} of type {sct}"
        )));
    }
    decode("data")
}

/// A command with this opcode, NSID and CDW10.
fn command(opcode: u8, nsid: u32, cdw10: u32) -> [u8; 64] {
    let mut command = [0; 64];
    command[0] = opcode;
    command[4..8].copy_from_slice(&nsid.to_le_bytes());
    command[40..44].copy_from_slice(&cdw10.to_le_bytes());
    command
}

/// The number of the LBA format with blocks of this size and without metadata. Identify Namespace, NVM Command Set 1.0 §4.1.5.1.
fn format_with(block_size: u64, identity: &[u8]) -> Option<u32> {
    let count = usize::from(*identity.get(25)?) + 1;
    let formats = identity.get(128..)?.as_chunks::<4>().0.iter().take(count.min(64));
    let fits = |format: &[u8; 4]| {
        let [metadata_low, metadata_high, shift, _] = *format;
        metadata_low == 0 && metadata_high == 0 && 1_u64.checked_shl(shift.into()) == Some(block_size)
    };
    formats.into_iter().position(fits).map(|format| format as u32)
}

fn format(
    drive: &str,
    block_size: Option<u64>,
    erase: Erase,
    force: bool,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let controller = find(drive, client)?;
    let name = text(&controller, "name");
    let namespaces = elements(&controller["namespaces"]);
    let namespace = match namespaces {
        [one] => Some(one),
        several => several.iter().find(|one| text(one, "disk") == drive),
    };
    let namespace = namespace.ok_or_else(|| {
        Error::Usage(format!(
            "the controller '{name}' has {} namespaces: name the disk of one",
            namespaces.len()
        ))
    })?;
    let nsid = u32::try_from(number(namespace, "nsid")).unwrap_or_default();
    let what = namespace["disk"]
        .as_str()
        .map_or_else(|| format!("namespace {nsid}"), |disk| format!("disk '{disk}'"));
    let size = Size(number(namespace, "block_size").saturating_mul(number(namespace, "num_blocks")));
    if !force {
        let model = text(&controller["ctrlr_data"], "model_number");
        return Err(Error::Usage(format!(
            "this destroys all data of {what}, {size}, of the drive {model} at {}; to do so, repeat the command with --force",
            text(&controller["trid"], "traddr")
        )));
    }
    let wanted = block_size.unwrap_or_else(|| number(namespace, "block_size"));
    let identity = send(name, command(IDENTIFY, nsid, 0), IDENTIFY_LEN, client)?;
    let format = format_with(wanted, &identity).ok_or_else(|| {
        Error::Usage(format!(
            "the drive has no format with blocks of {wanted} bytes and without metadata; give --block-size"
        ))
    })?;
    let ses = match erase {
        Erase::None => 0,
        Erase::Data => 1,
        Erase::Key => 2,
    };
    send(name, command(FORMAT_NVM, nsid, format & 15 | (format >> 4) << 12 | ses << 9), 0, client)?;
    let done = json!({"controller": name, "nsid": nsid, "block_size": wanted});
    out.print(&done, || format!("Namespace {nsid} of '{name}' is formatted, with blocks of {wanted} bytes."))
}

fn firmware(
    controller: &Value,
    image: &std::path::Path,
    force: bool,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let (name, data) = (text(controller, "name"), &controller["ctrlr_data"]);
    if !force {
        return Err(Error::Usage(format!(
            "this replaces firmware '{}' of the drive {} ({name}) by {}, and resets the drive; to do so, repeat the command with --force",
            text(data, "firmware_revision"),
            text(data, "model_number"),
            image.display()
        )));
    }
    let params = json!({"filename": image, "bdev_name": name});
    let told = client.call("bdev_nvme_apply_firmware", params)?;
    out.print(&json!({"controller": name, "result": told}), || told.as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_addressed_by_its_drive_and_its_number() {
        for (text, address, nsid) in [
            ("3d:00.0", "0000:3d:00.0", 1),
            ("0000:3d:00.0", "0000:3d:00.0", 1),
            ("0000:3d:00.1:12", "0000:3d:00.1", 12),
        ] {
            let parsed: NamespaceAddress = text.parse().unwrap();
            assert_eq!((parsed.address.to_string().as_str(), parsed.nsid), (address, nsid));
        }
        for text in ["", "3d", "3d:00.0:0", "3d:00.0:", "3d:00.0:4294967295", "3d:00.0:x", "3d:00.0:1:1"] {
            text.parse::<NamespaceAddress>().unwrap_err();
        }
    }

    #[test]
    fn what_a_drive_supports_is_shown() {
        let known = json!({"transfer_max": 131_072, "volatile_write_cache": true, "commands": ["compare", "copy"],
            "admin_commands": [], "sgl": "dwords", "doorbell_buffer": false, "host_memory_wanted": 64 << 20});
        let lines = abilities(&known).into_iter().map(|(name, value)| format!("{name}: {value}"));
        assert_eq!(
            lines.collect::<Vec<_>>(),
            [
                "largest transfer: 128K",
                "write cache: volatile",
                "commands: compare, copy",
                "admin commands: none",
                "SGLs: of multiples of 4 bytes",
                "doorbells: registers",
                "host memory: asks for 64M: not given",
            ]
        );
        assert!(abilities(&Value::Null).is_empty());
        let both = json!({"eui64": "0011223344556677", "nguid": "00112233445566778899aabbccddeeff"});
        assert_eq!(identifier(&both), "nguid 00112233445566778899aabbccddeeff");
        assert_eq!(
            (identifier(&json!({"eui64": "00"})), identifier(&json!({}))),
            ("eui64 00".into(), "-".into())
        );
    }

    #[test]
    fn a_format_is_chosen_by_its_block_size_and_has_no_metadata() {
        let mut identity = vec![0; 4096];
        identity[25] = 3;
        for (i, format) in
            [[8, 0, 12, 0], [0, 0, 9, 0], [0, 1, 12, 0], [0, 0, 12, 0], [0, 0, 13, 0]].iter().enumerate()
        {
            identity[128 + 4 * i..][..4].copy_from_slice(format);
        }
        assert_eq!((format_with(512, &identity), format_with(4096, &identity)), (Some(1), Some(3)));
        assert_eq!(format_with(8192, &identity), None, "a format beyond NLBAF");
        assert_eq!((format_with(4096, &[]), format_with(0, &identity)), (None, None));
    }
}
