//! `aryk luks …`: disks that are encrypted behind a LUKS header.

use super::disk::HINTS as DISK_HINTS;
use super::{elements, number, object, text};
use crate::cli::examples;
use crate::client::Client;
use crate::completion::disks;
use crate::error::{BUSY, EXISTS, Error, NO_DEVICE, NO_FILE};
use crate::output::Output;
use crate::size::Size;
use clap::{Args, Subcommand, ValueEnum};
use clap_complete::ArgValueCandidates;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Hints for a header that cannot be written.
const FORMAT_HINTS: [(i64, &str); 4] = [
    (EXISTS, "'aryk disk show' shows the disk. To overwrite what is on it, which is lost: --overwrite"),
    (NO_DEVICE, "'aryk disk list' shows the disks."),
    (BUSY, "'aryk disk list' shows its users."),
    (NO_FILE, KEY_FILE),
];

/// Hints for key slots that cannot be changed.
const SLOT_HINTS: [(i64, &str); 2] =
    [(NO_DEVICE, "'aryk disk list' shows the disks."), (NO_FILE, "'aryk luks show' lists the key slots.")];

const KEY_FILE: &str = "To make a key file: (umask 077; head -c 32 /dev/urandom > FILE)";

/// Commands for disks with LUKS headers.
#[derive(Debug, Subcommand)]
pub enum LuksCommand {
    /// Encrypt a disk: write a LUKS header with a new key; the disk's data is lost
    #[command(after_help = examples::LUKS)]
    Format(FormatArgs),
    /// Unlock an encrypted disk: create a disk of its data
    Open {
        /// The disk that has the header
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        /// Name of the new disk; that of an absent disk unlocks it again
        name: String,
        #[command(flatten)]
        key: KeyArgs,
        /// Try only this key slot
        #[arg(long, value_name = "N")]
        slot: Option<u32>,
        /// Pass discards to the encrypted disk, which then shows which blocks are in use
        #[arg(long)]
        pass_discards: bool,
        /// Repair a damaged copy of the header also if something else has overwritten it, which is lost
        #[arg(long)]
        repair: bool,
    },
    /// Show the header of an encrypted disk, and its key slots
    Show {
        /// The disk, or the one that has the header
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
    },
    /// Add a key slot, so that another key file opens the disk too
    AddKey {
        /// The disk, which may be in use, or the one that has the header
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        #[command(flatten)]
        key: KeyArgs,
        /// The file that opens the new key slot
        #[arg(long, value_name = "NEW")]
        new_key_file: PathBuf,
        /// Number of the new key slot [default: the first free one]
        #[arg(long, value_name = "N")]
        slot: Option<u32>,
        #[command(flatten)]
        cost: CostArgs,
    },
    /// Remove a key slot: its key file does not open the disk any more
    RemoveKey {
        /// The disk, which may be in use, or the one that has the header
        #[arg(add = ArgValueCandidates::new(disks))]
        disk: String,
        /// Number of the key slot
        slot: u32,
        #[command(flatten)]
        key: KeyArgs,
    },
}

/// The secret of a key slot.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// A file of the daemon's host whose bytes open a key slot, with mode 600; the daemon reads it
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
}

/// The cost of a new key slot.
#[derive(Debug, Args)]
pub struct CostArgs {
    /// How the key slot derives its key [default: argon2id, of luks1 pbkdf2]
    #[arg(long, value_enum)]
    pub pbkdf: Option<Pbkdf>,
    /// Milliseconds that this takes on the daemon's host [default: 2000]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub iter_time: Option<u32>,
    /// Memory that argon2id uses, at most [default: 256M]
    #[arg(long, value_name = "SIZE")]
    pub pbkdf_memory: Option<Size>,
}

/// Arguments of `luks format`.
#[derive(Debug, Args)]
pub struct FormatArgs {
    /// The disk, which must not be in use
    #[arg(add = ArgValueCandidates::new(disks))]
    pub disk: String,
    #[command(flatten)]
    pub key: KeyArgs,
    /// Version of the header
    #[arg(long, value_enum, default_value = "luks2")]
    pub format: Format,
    /// Bytes that are encrypted together: 512 to 4096, of luks1 512 [default: the disk's block size]
    #[arg(long, value_name = "BYTES")]
    pub sector_size: Option<u32>,
    /// A name in the header; luks2 only
    #[arg(long)]
    pub label: Option<String>,
    #[command(flatten)]
    pub cost: CostArgs,
    /// Format the disk even if it holds data, which is lost
    #[arg(long)]
    pub overwrite: bool,
}

/// Versions of the header.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Format {
    Luks1,
    Luks2,
}

/// Key derivations.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Pbkdf {
    Argon2id,
    Pbkdf2,
}

pub fn run(command: &LuksCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        LuksCommand::Format(args) => format(args, client, out),
        LuksCommand::Open { disk, name, key, slot, pass_discards, repair } => {
            let params = object([
                ("name", Some(json!(name))),
                ("base_bdev_name", Some(json!(disk))),
                ("key_file", Some(on_host(&key.key_file)?)),
                ("key_slot", slot.map(|slot| json!(slot))),
                ("pass_discards", pass_discards.then_some(json!(true))),
                ("repair", repair.then_some(json!(true))),
            ]);
            open(name, params, client, out)
        }
        LuksCommand::Show { disk } => {
            let header = client.call("bdev_luks_get_header", json!({"name": disk}));
            let header = header.map_err(|error| error.hinted(&DISK_HINTS))?;
            out.print(&header, || describe(&header, out))
        }
        LuksCommand::AddKey { disk, key, new_key_file, slot, cost } => {
            let mut params = cost.params();
            params["name"] = json!(disk);
            params["key_file"] = on_host(&key.key_file)?;
            params["new_key_file"] = on_host(new_key_file)?;
            if let Some(slot) = slot {
                params["key_slot"] = json!(slot);
            }
            announce("Deriving two keys, which takes some seconds …", out);
            let added = client.call("bdev_luks_add_key_slot", params);
            let added = added.map_err(|error| error.hinted(&SLOT_HINTS))?;
            out.print(&added, || format!("Key slot {added} of disk '{disk}' is added."))
        }
        LuksCommand::RemoveKey { disk, slot, key } => {
            let params = json!({"name": disk, "key_slot": slot, "key_file": on_host(&key.key_file)?});
            announce("Deriving a key, which takes some seconds …", out);
            let removed = client.call("bdev_luks_remove_key_slot", params);
            let removed = removed.map_err(|error| error.hinted(&SLOT_HINTS))?;
            out.print(&removed, || format!("Key slot {slot} of disk '{disk}' is removed."))
        }
    }
}

fn format(args: &FormatArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disk = &args.disk;
    let mut params = args.cost.params();
    params["name"] = json!(disk);
    params["key_file"] = on_host(&args.key.key_file)?;
    params["version"] = json!(match args.format {
        Format::Luks1 => "luks1",
        Format::Luks2 => "luks2",
    });
    params["overwrite"] = json!(args.overwrite);
    if let Some(bytes) = args.sector_size {
        params["sector_size"] = json!(bytes);
    }
    if let Some(label) = &args.label {
        params["label"] = json!(label);
    }
    announce("Checking the disk and deriving a key, which takes some seconds …", out);
    let header = client.call("bdev_luks_format", params).map_err(|error| error.hinted(&FORMAT_HINTS))?;
    let key = args.key.key_file.display();
    out.print(&header, || {
        format!(
            "Disk '{disk}' has a {} header. Unlock it: aryk luks open {disk} NAME --key-file {key}",
            text(&header, "version")
        )
    })
}

fn open(name: &str, params: Value, client: &mut Client, out: &Output) -> Result<(), Error> {
    announce("Deriving the key, which may take some seconds …", out);
    client.call("bdev_luks_create", params).map_err(|error| error.hinted(&DISK_HINTS))?;
    let disk = client.call("bdev_get_bdevs", json!({"name": name}))?[0].take();
    let size = Size(number(&disk, "block_size").saturating_mul(number(&disk, "num_blocks")));
    out.print(&disk, || {
        if size.0 == 0 {
            return format!("Disk '{name}' waits for its base disk.");
        }
        format!("Disk '{name}' of {size} is unlocked. Attach it to a VM: aryk attach {name}")
    })
}

fn describe(header: &Value, out: &Output) -> String {
    let damaged = (header["degraded"] == true)
        .then(|| ("state", "one copy is damaged; it is repaired when the disk is unlocked".to_owned()));
    let known = [
        ("version", text(header, "version").to_owned()),
        ("uuid", text(header, "uuid").to_owned()),
        ("cipher", format!("{}, AES-{}", text(header, "cipher"), number(header, "aes_bits"))),
        ("sectors", format!("{} bytes", number(header, "sector_size"))),
        ("data from", Size(number(header, "data_offset")).to_string()),
    ];
    let row = |slot: &Value| {
        let memory =
            slot["memory_kib"].as_u64().map_or_else(|| "-".into(), |kib| Size(kib << 10).to_string());
        vec![
            number(slot, "key_slot").to_string(),
            text(slot, "pbkdf").to_owned(),
            number(slot, "iterations").to_string(),
            memory,
            text(slot, "priority").to_owned(),
        ]
    };
    let columns =
        [("SLOT", true), ("PBKDF", false), ("ITERATIONS", true), ("MEMORY", true), ("PRIORITY", false)];
    let slots = out.table(&columns, elements(&header["key_slots"]).iter().map(row));
    format!("{}\n\n{slots}", out.list(known.into_iter().chain(damaged)))
}

impl CostArgs {
    fn params(&self) -> Value {
        let pbkdf = self.pbkdf.map(|pbkdf| match pbkdf {
            Pbkdf::Argon2id => json!("argon2id"),
            Pbkdf::Pbkdf2 => json!("pbkdf2"),
        });
        object([
            ("pbkdf", pbkdf),
            ("iter_time_ms", self.iter_time.map(|time| json!(time))),
            ("pbkdf_memory_kib", self.pbkdf_memory.map(|Size(bytes)| json!(bytes >> 10))),
        ])
    }
}

/// The path for the daemon, which has another working directory.
fn on_host(file: &Path) -> Result<Value, Error> {
    let path = std::path::absolute(file)?;
    let path = path.to_str().ok_or_else(|| Error::Usage("the key file's name is not UTF-8".into()))?;
    Ok(json!(path))
}

/// Says on a terminal why the command takes long.
fn announce(what: &str, out: &Output) {
    if !out.json && std::io::stderr().is_terminal() {
        eprintln!("{what}");
    }
}
