//! `aryk volume …`: volumes of pools.

use super::{elements, number, object, text};
use crate::cli::examples;
use crate::client::Client;
use crate::completion::{disks, pools, snapshots, volumes};
use crate::error::{BUSY, EXISTS, Error, NO_DEVICE, NO_SPACE};
use crate::import::{self, RawImage};
use crate::output::Output;
use crate::size::Size;
use crate::transfer::Attached;
use crate::users::Users;
use crate::watch::Watch;
use clap::{Args, Subcommand, ValueEnum};
use clap_complete::ArgValueCandidates;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Hints for a volume that cannot be created, found or changed.
pub const HINTS: [(i64, &str); 4] = [
    (EXISTS, "Choose another name, or delete that one first: 'aryk volume list' shows the volumes."),
    (
        NO_DEVICE,
        "'aryk volume list' and 'aryk snapshot list' show the volumes and snapshots, 'aryk pool list' the pools.",
    ),
    (BUSY, "'aryk disk list' shows its users."),
    (NO_SPACE, "'aryk pool list' shows the free space; deleting volumes and snapshots frees space."),
];

/// The size of a volume for an image is a multiple of this many bytes.
const IMPORTED: u64 = 1 << 20;

/// The text for an empty list.
const NONE: &str = "There are no volumes. Create one: aryk volume create POOL/VOLUME --size 20G";

/// Commands for volumes.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create a volume
    #[command(after_help = examples::VOLUME)]
    Create(CreateArgs),
    /// List the volumes
    List(Watch),
    /// Give a volume another size; its VM is notified
    Resize {
        /// The volume, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// The new size: 40G
        size: Size,
        /// Allow a smaller size: the data behind it is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Give a volume another name
    Rename {
        /// The volume, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// The new name, without the pool
        name: String,
    },
    /// Create a volume with the content of a snapshot, without copying
    Clone {
        /// The snapshot, as POOL/SNAPSHOT
        #[arg(add = ArgValueCandidates::new(snapshots))]
        snapshot: String,
        /// Name of the new volume, without the pool
        name: String,
    },
    /// Change what a volume's writes do while the pool is full
    Set {
        /// The volume, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// Hold writes until there is space, or fail them
        #[arg(long, value_enum)]
        when_full: WhenFull,
    },
    /// Copy what a clone has of its snapshot, after which it is independent
    Inflate {
        /// The volume, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
    },
    /// Make a volume a clone of another snapshot or disk; what it has for itself stays. It must not be in use
    SetParent {
        /// The volume, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// The snapshot, as POOL/SNAPSHOT, or a disk of another kind or pool
        #[arg(add = ArgValueCandidates::new(snapshots))]
        parent: String,
    },
    /// List the parts of a volume that may have changed since a snapshot
    Changed {
        /// The volume, or a later snapshot, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// The snapshot, as POOL/SNAPSHOT
        #[arg(long, value_name = "SNAPSHOT", add = ArgValueCandidates::new(snapshots))]
        since: String,
    },
    /// List the space that the volumes and snapshots of a pool keep in use
    Space {
        /// The pool
        #[arg(add = ArgValueCandidates::new(pools))]
        pool: String,
    },
    /// Copy a volume or a snapshot to a file
    Export {
        /// The volume, which must not be in use, or the snapshot, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// The new file
        file: PathBuf,
        /// Its format
        #[arg(long, value_enum, default_value = "raw")]
        format: FileFormat,
    },
    /// Delete volumes: their data is lost, except what snapshots have
    Delete {
        /// The volumes, as POOL/VOLUME
        #[arg(required = true, value_name = "VOLUME", add = ArgValueCandidates::new(volumes))]
        volumes: Vec<String>,
        /// Delete them although they are in use: connected VMs lose them
        #[arg(long)]
        force: bool,
    },
}

/// Formats of exported files.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum FileFormat {
    /// The data as it is, with holes
    Raw,
    /// QEMU's format; needs qemu-img
    Qcow2,
}

/// What writes do while the pool is full.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum WhenFull {
    /// They wait for space
    Wait,
    /// They fail
    Fail,
}

impl WhenFull {
    /// The RPC's name of the value.
    const fn name(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Fail => "fail",
        }
    }
}

/// Arguments of `volume create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The new volume, as POOL/VOLUME
    pub volume: String,
    /// Size: 20G, 1.5T [default: that of the image]
    #[arg(long, required_unless_present_any = ["image", "from"])]
    pub size: Option<Size>,
    /// An image whose data is copied into the volume: raw, qcow2, or another format that qemu-img reads
    #[arg(long, value_name = "IMAGE", conflicts_with = "image")]
    pub from: Option<PathBuf>,
    /// The format of the image, as qemu-img names it [default: detected]
    #[arg(long, value_name = "FORMAT", requires = "from")]
    pub from_format: Option<String>,
    /// A disk, or a file with a raw image, whose content the volume has at first, without copying. Nobody may write to it while
    /// the volume depends on it
    #[arg(long, value_name = "FILE|DISK", add = ArgValueCandidates::new(disks))]
    pub image: Option<String>,
    /// Block size in bytes: 512 or 4096 [default: 512, or that of the image]
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<u32>,
    /// What its writes do while the pool is full
    #[arg(long, value_enum, default_value = "fail")]
    pub when_full: WhenFull,
    /// Reserve space of the pool for all of the volume, so that its writes never meet a full pool
    #[arg(long)]
    pub thick: bool,
}

pub fn run(command: &VolumeCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        VolumeCommand::Create(args) => create(args, client, out),
        VolumeCommand::List(_) => list(client, out),
        VolumeCommand::Resize { volume, size, shrink } => resize(volume, *size, *shrink, client, out),
        VolumeCommand::Rename { volume, name } => rename("volume", volume, name, client, out),
        VolumeCommand::Clone { snapshot, name } => clone(snapshot, name, client, out),
        VolumeCommand::Set { volume, when_full } => {
            let params = json!({"volume": volume, "when_full": when_full.name()});
            call("aryk_volume_set_when_full", params, client)?;
            let found = find(client, volume)?;
            out.print(&found, || match when_full {
                WhenFull::Wait => format!("Writes of volume '{volume}' wait while the pool is full."),
                WhenFull::Fail => format!("Writes of volume '{volume}' fail while the pool is full."),
            })
        }
        VolumeCommand::Inflate { volume } => {
            client.wait_without_limit()?;
            call("bdev_lvol_decouple_parent", json!({"name": volume}), client)?;
            let found = find(client, volume)?;
            out.print(&found, || format!("Volume '{volume}' has all of its data for itself now."))
        }
        VolumeCommand::SetParent { volume, parent } => {
            client.wait_without_limit()?;
            let params = json!({"lvol_name": volume, "parent_name": parent});
            let pool_of = |name: &str| name.split_once('/').map(|(pool, _)| pool.to_owned());
            let is_of_pool = pool_of(volume).is_some() && pool_of(volume) == pool_of(parent);
            let method = if is_of_pool { "bdev_lvol_set_parent" } else { "bdev_lvol_set_parent_bdev" };
            call(method, params, client)?;
            let found = find(client, volume)?;
            out.print(&found, || format!("Volume '{volume}' is a clone of '{parent}' now."))
        }
        VolumeCommand::Changed { volume, since } => changed(volume, since, client, out),
        VolumeCommand::Space { pool } => space(pool, client, out),
        VolumeCommand::Export { volume, file, format } => export(volume, file, *format, client, out),
        VolumeCommand::Delete { volumes, force } => delete("volume", volumes, *force, client, out),
    }
}

fn call(method: &str, params: Value, client: &mut Client) -> Result<Value, Error> {
    client.call(method, params).map_err(|error| error.hinted(&HINTS))
}

/// The pool and the name of POOL/NAME.
fn split(volume: &str) -> Result<(&str, &str), Error> {
    volume.split_once('/').ok_or_else(|| {
        Error::Usage(format!("'{volume}' does not name a pool: a volume is named as POOL/VOLUME"))
    })
}

/// The volume or snapshot with this alias or UUID.
pub fn find(client: &mut Client, name: &str) -> Result<Value, Error> {
    let all = client.call("aryk_volumes_get", json!({}))?;
    let is_it = |volume: &&Value| text(volume, "alias") == name || text(volume, "uuid") == name;
    elements(&all).iter().find(is_it).cloned().ok_or_else(|| {
        let detail = Some(format!("there is no volume or snapshot '{name}'"));
        Error::Refused { code: NO_DEVICE, message: "No such device".into(), detail, hint: None }
            .hinted(&HINTS)
    })
}

fn create(args: &CreateArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let (pool, name) = split(&args.volume)?;
    let image = match &args.image {
        Some(image) => Some(image_disk(image, client, out)?),
        None => None,
    };
    let source = match &args.from {
        Some(source) => Some(RawImage::open(source, args.from_format.as_deref(), out.json)?),
        None => None,
    };
    let size = match (&source, args.size) {
        (Some(source), Some(size)) if size.0 < source.bytes => {
            return Err(Error::Usage(format!(
                "--size {size} is less than the image's {}",
                Size(source.bytes)
            )));
        }
        (Some(source), None) => Some(source.bytes.next_multiple_of(IMPORTED)),
        (_, size) => size.map(|size| size.0),
    };
    // Until it is complete, an imported volume has another name: an interrupted import leaves no volume that looks whole.
    let new_name = if source.is_some() { format!("{name}.importing") } else { name.to_owned() };
    let params = object([
        ("pool", Some(json!(pool))),
        ("name", Some(json!(new_name))),
        ("size", size.map(|size| json!(size))),
        ("image", image.map(|disk| json!(disk))),
        ("block_size", args.block_size.map(|bytes| json!(bytes))),
        ("thick", args.thick.then_some(json!(true))),
        // An import that does not fit must not hold up the writes of others.
        ("when_full", Some(json!(if source.is_some() { "fail" } else { args.when_full.name() }))),
    ]);
    let uuid = call("aryk_volume_create", params, client)?;
    if let Some(source) = source {
        let disk = uuid.as_str().unwrap_or_default();
        let filled = fill(disk, &source, client, out).and_then(|()| {
            let when_full = args.when_full.name();
            client.call("aryk_volume_set_when_full", json!({"volume": disk, "when_full": when_full}))?;
            client.call("bdev_lvol_rename", json!({"old_name": disk, "new_name": name}))
        });
        filled.inspect_err(|_| {
            // A volume with a part of the image is of no use. The first error is reported.
            let _ = client.call("bdev_lvol_delete", json!({"name": disk}));
        })?;
    }
    made(&args.volume, client, out)
}

/// Copies an image into a new volume.
fn fill(disk: &str, source: &RawImage, client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut attached = Attached::new(disk, false, client)?;
    let copied = source.write_to(&mut attached, out.json);
    // The first error is reported.
    copied.and(attached.detach(client))
}

fn export(
    volume: &str,
    file: &Path,
    format: FileFormat,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let found = find(client, volume)?;
    let users = Users::read(client)?.of_disk(text(&found, "uuid"), &[]);
    if found["is_snapshot"] != true && !users.is_empty() {
        let hint = "Its data would change during the copy. Export a snapshot of it: aryk snapshot create";
        return Err(Error::InUse { what: "the volume is in use".into(), users, hint });
    }
    let mut attached = Attached::new(text(&found, "uuid"), true, client)?;
    let format = match format {
        FileFormat::Raw => "raw",
        FileFormat::Qcow2 => "qcow2",
    };
    let exported = import::export(&mut attached, format, file, out.json);
    // The first error is reported.
    exported.and(attached.detach(client))?;
    out.print(&found, || format!("'{volume}' is copied to {}.", file.display()))
}

/// The name of the disk of an image. A read-only disk is created for a file that has none.
fn image_disk(image: &str, client: &mut Client, out: &Output) -> Result<String, Error> {
    let disks = client.call("bdev_get_bdevs", json!({}))?;
    // The daemon has another working directory.
    let path = std::path::absolute(image)?;
    let path = path.to_str().ok_or_else(|| Error::Usage("the file's name is not UTF-8".into()))?;
    let is_it = |disk: &&Value| {
        let names = elements(&disk["aliases"]).iter().filter_map(Value::as_str);
        text(disk, "name") == image
            || names.into_iter().any(|name| name == image)
            || disk["driver_specific"]["uring"]["filename"] == path
    };
    if let Some(disk) = elements(&disks).iter().find(is_it) {
        return Ok(text(disk, "name").to_owned());
    }
    let file = Path::new(path);
    if !file.exists() {
        return Err(Error::Usage(format!(
            "'{image}' is neither a disk nor a file: 'aryk disk list' shows the disks"
        )));
    }
    let format = import::format_of(file)?;
    if format != "raw" {
        return Err(Error::Usage(format!(
            "'{image}' is a {format} image, which must be copied: --from instead of --image"
        )));
    }
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or(image);
    let params = json!({"name": stem, "filename": path, "readonly": true});
    client.call("bdev_uring_create", params).map_err(|error| error.hinted(&HINTS))?;
    if !out.json {
        out.print_line(&format!("The read-only disk '{stem}' is created for '{image}'."))?;
    }
    Ok(stem.to_owned())
}

/// Reports a new volume.
fn made(volume: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let found = find(client, volume)?;
    out.print(&found, || {
        let size = Size(number(&found, "size"));
        format!("Volume '{volume}' of {size} is ready. Attach it to a VM: aryk attach {volume}")
    })
}

fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let all = client.call("aryk_volumes_get", json!({}))?;
    let users = Users::read(client)?;
    let volumes: Vec<&Value> = elements(&all).iter().filter(|volume| volume["is_snapshot"] != true).collect();
    let columns = [
        ("VOLUME", false),
        ("SIZE", true),
        ("SPACE", false),
        ("FROM", false),
        ("WHEN FULL", false),
        ("USED BY", false),
    ];
    let row = |volume: &&Value| {
        let used_by = match volume["has_disk"] == false {
            true if volume["image"]["is_there"] == false => {
                format!("waits for the disk '{}'", text(&volume["image"], "name"))
            }
            true => "it has no disk: see the log".to_owned(),
            false => users.in_brief(text(volume, "uuid")).join(", "),
        };
        let from = match volume["base_snapshot"].as_str() {
            Some(snapshot) => snapshot,
            None => text(&volume["image"], "name"),
        };
        vec![
            text(volume, "alias").to_owned(),
            Size(number(volume, "size")).to_string(),
            if volume["is_thin_provisioned"] == false { "thick" } else { "thin" }.to_owned(),
            from.to_owned(),
            text(volume, "when_full").to_owned(),
            used_by,
        ]
    };
    out.print(&json!(volumes), || match &*volumes {
        [] => NONE.to_owned(),
        volumes => out.table(&columns, volumes.iter().map(row)),
    })
}

fn resize(volume: &str, size: Size, shrink: bool, client: &mut Client, out: &Output) -> Result<(), Error> {
    let before = number(&find(client, volume)?, "size");
    if size.0 < before && !shrink {
        return Err(Error::Usage(format!(
            "'{volume}' has {}: a smaller size loses the data behind it; to do so: --shrink",
            Size(before)
        )));
    }
    if !size.0.is_multiple_of(1 << 20) {
        return Err(Error::Usage(format!("{size} is not a multiple of 1M")));
    }
    call("bdev_lvol_resize", json!({"name": volume, "size_in_mib": size.0 >> 20}), client)?;
    let found = find(client, volume)?;
    out.print(&found, || format!("Volume '{volume}' has {} now.", Size(number(&found, "size"))))
}

/// Gives a volume or a snapshot another name.
pub fn rename(what: &str, old: &str, name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let (pool, _) = split(old)?;
    call("bdev_lvol_rename", json!({"old_name": old, "new_name": name}), client)?;
    let new = format!("{pool}/{name}");
    let found = find(client, &new)?;
    out.print(&found, || format!("The {what} '{old}' is '{new}' now."))
}

fn clone(snapshot: &str, name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let (pool, _) = split(snapshot)?;
    call("aryk_volume_create", json!({"pool": pool, "name": name, "snapshot": snapshot}), client)?;
    made(&format!("{pool}/{name}"), client, out)
}

fn space(pool: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    client.wait_without_limit()?;
    let spaces = call("aryk_volume_get_space", json!({"pool": pool}), client)?;
    let row = |space: &Value| {
        let size = |name: &str| Size(number(space, name)).to_string();
        vec![text(space, "alias").to_owned(), size("size"), size("own_bytes"), size("shared_bytes")]
    };
    out.print(&spaces, || match elements(&spaces) {
        [] => format!("The pool '{pool}' has no volumes."),
        spaces => {
            let columns = [("VOLUME", false), ("SIZE", true), ("OWN", true), ("SHARED", true)];
            out.table(&columns, spaces.iter().map(row))
        }
    })
}

fn changed(volume: &str, since: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    client.wait_without_limit()?;
    let parts = call("aryk_volume_get_changed", json!({"volume": volume, "since": since}), client)?;
    let row = |part: &Value| vec![number(part, "offset").to_string(), number(part, "bytes").to_string()];
    out.print(&parts, || match elements(&parts) {
        [] => format!("Nothing of '{volume}' has changed since '{since}'."),
        parts => out.table(&[("OFFSET", true), ("BYTES", true)], parts.iter().map(row)),
    })
}

/// Deletes volumes or snapshots.
pub fn delete(
    what: &str,
    names: &[String],
    force: bool,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let mut found = Vec::new();
    for name in names {
        found.push(find(client, name)?);
    }
    let refusal = |users: &Users| {
        let lines =
            found.iter().flat_map(|volume| users.of_disk(text(volume, "uuid"), &[])).collect::<Vec<_>>();
        let hint = "To delete it nevertheless: --force";
        (!force && !lines.is_empty()).then(|| Error::InUse {
            what: format!("the {what} is in use"),
            users: lines,
            hint,
        })
    };
    let users = Users::read_until_free(client, refusal)?;
    for (volume, name) in found.iter().zip(names) {
        super::disk::remove_controllers(text(volume, "uuid"), &users, client)?;
        call("bdev_lvol_delete", json!({"name": volume["uuid"]}), client)?;
        if !out.json {
            out.print_line(&format!("The {what} '{name}' is deleted."))?;
        }
    }
    if out.json { out.print(&json!(found), String::new) } else { Ok(()) }
}
