//! `aryk disk …`

mod encrypted;
mod paths;
mod rbd;
mod rekey;

use super::{elements, number, object, text};
use crate::absent;
use crate::apply::call::Call;
use crate::cli::{CreateArgs, DiskCommand, KindArgs};
use crate::client::Client;
use crate::deleted::Deleted;
use crate::error::{BUSY, EXISTS, Error, NO_DEVICE, NO_FILE, NO_SPACE, NOT_ALLOWED};
use crate::image::ImageSpec;
use crate::import::Import;
use crate::output::{Output, printable};
use crate::size::Size;
use crate::users::Users;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

const BLOCK_SIZE: u32 = 512;

/// How long to wait for the size of a file.
const SIZE_TIMEOUT: Duration = Duration::from_millis(500);

/// Hints for a disk that cannot be created, found or removed.
pub const HINTS: [(i64, &str); 6] = [
    (EXISTS, "Choose another name, or remove that one first."),
    (NO_DEVICE, "'aryk disk list' shows the disks."),
    (BUSY, "The process named above has it open; if that is this daemon, 'aryk disk list' shows its users."),
    (NO_FILE, "Is its file system mounted? To create the file: --size 20G."),
    (NOT_ALLOWED, "The user who runs the daemon must be allowed to use it: see 'ls -l', and 'ps -C arykd'."),
    (NO_SPACE, "'df' shows which file system is full."),
];

/// Hints for a disk in an NVMe drive that cannot be created.
const NVME_HINTS: [(i64, &str); 3] = [
    (EXISTS, "Choose another name, or remove that one first."),
    (NO_DEVICE, "'aryk nvme list' shows the drives, 'aryk doctor nvme' what this host needs."),
    (NOT_ALLOWED, "'aryk doctor nvme' shows what the daemon's user may not open."),
];

/// Hints for a disk of another host that cannot be used. The daemon's errors say more.
const REMOTE_HINTS: [(i64, &str); 2] = [
    (EXISTS, "Choose another name, or remove that one first."),
    (NO_DEVICE, "'aryk hosts' on the other host shows what it shares."),
];

/// Hints for a disk in a Ceph image that cannot be created. The daemon's errors say more.
const RBD_HINTS: [(i64, &str); 1] = [(EXISTS, "Choose another name, or remove that one first.")];

impl KindArgs {
    /// Hints for a disk of this kind that cannot be created.
    const fn hints(&self) -> &'static [(i64, &'static str)] {
        match self {
            Self { nvme: Some(_), .. } => &NVME_HINTS,
            Self { nvme_tcp, nvme_rdma, .. } if !nvme_tcp.is_empty() || !nvme_rdma.is_empty() => {
                &REMOTE_HINTS
            }
            Self { rbd: Some(_), .. } => &RBD_HINTS,
            _ => &HINTS,
        }
    }
}

/// The text for an empty list.
pub const NONE: &str = "There are no disks. Create one: aryk disk create NAME --file PATH --size 20G";

/// The product name of disks in memory.
pub const IN_MEMORY: &str = "Malloc disk";

/// The product name of disks in NVMe drives.
const NVME: &str = "NVMe disk";

/// The product name of disks in Ceph images.
const RBD: &str = "Ceph Rbd Disk";

/// The product name of volumes.
const VOLUME: &str = "Logical Volume";

/// Product names, the kinds of disks that they stand for, and the methods that remove these.
const KINDS: [(&str, &str, &str); 12] = [
    ("URING bdev", "file", "bdev_uring_delete"),
    ("AIO disk", "file", "bdev_aio_delete"),
    (IN_MEMORY, "memory", "bdev_malloc_delete"),
    ("Null disk", "null", "bdev_null_delete"),
    ("passthru", "passthru", "bdev_passthru_delete"),
    ("crypto", "crypto", "bdev_crypto_delete"),
    ("luks", "luks", "bdev_luks_delete"),
    ("delay", "delay", "bdev_delay_delete"),
    ("Error Injection Disk", "error", "bdev_error_delete"),
    (NVME, "nvme", "bdev_nvme_detach_controller"),
    (RBD, "rbd", "bdev_rbd_delete"),
    (VOLUME, "volume", "bdev_lvol_delete"),
];

pub fn run(command: &DiskCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        DiskCommand::Create(args) => create(args, client, out),
        DiskCommand::List(_) => list(client, out),
        DiskCommand::Show { name } => show(name, client, out),
        DiskCommand::Remove { names, force } => remove(names, *force, client, out),
        DiskCommand::Resize { name, size } => resize(name, *size, client, out),
        DiskCommand::Rekey(args) => rekey::run(args, client, out),
        DiskCommand::Stat { name, watch } => super::stat::stat(name.as_deref(), watch.every, client, out),
    }
}

fn create(args: &CreateArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    if let Some(key) = &args.encrypt {
        return encrypted::create(key, args, client, out);
    }
    let (method, mut params) = create_call(args)?;
    absent::refuse_replacing(std::iter::once(&Call::new(method, params.clone())), client)?;
    if let (Some(source), Some(file)) = (&args.from, &args.kind.file) {
        refuse_existing(&args.name, client)?;
        import(source, file, args, out)?;
        // The imported file has its size.
        params["size"] = Value::Null;
        let step = format!("{} is imported, but the disk is not created", file.display());
        client.call(method, params).map_err(|source| Error::Imported { step, source: Box::new(source) })?;
    } else {
        client.call(method, params).map_err(|error| error.hinted(args.kind.hints()))?;
    }
    let disk = find(client, &args.name)?;
    let size = size(&disk);
    let name = &args.name;
    out.print(&disk, || format!("Disk '{name}' of {size} is ready. Attach it to a VM: aryk attach {name}"))?;
    if args.kind.file.is_some() {
        warn_of_missing_room(Some(name), client);
    }
    Ok(())
}

/// Warns on stderr of file systems that have promised more bytes than they have: that of one disk, or all. An older daemon does
/// not report them.
fn warn_of_missing_room(disk: Option<&str>, client: &mut Client) {
    let of = object([("disk", disk.map(|disk| json!(disk)))]);
    let file_systems = client.call("aryk_file_systems_get", of).unwrap_or_default();
    for fs in elements(&file_systems).iter().filter(|fs| number(fs, "missing") > 0) {
        eprintln!("{}", missing_room(fs));
    }
}

fn missing_room(fs: &Value) -> String {
    let size = |member: &str| Size(number(fs, member));
    let disks = match number(fs, "disks") {
        1 => "1 disk in the file system at".into(),
        disks => format!("{disks} disks in the file system at"),
    };
    let (be, have) = if number(fs, "disks") == 1 { ("is", "has") } else { ("are", "have") };
    format!(
        "warning: {disks} {} {be} promised {} and {have} {} of that; {} is free, so {} is missing: when the free space is used up, writes fail",
        printable(text(fs, "path")),
        size("promised"),
        size("allocated"),
        size("free"),
        size("missing"),
    )
}

/// Fails before a copy that may take an hour.
fn refuse_existing(name: &str, client: &mut Client) -> Result<(), Error> {
    match find(client, name) {
        Ok(_) => {
            let detail = Some(format!("there is a disk '{name}' already"));
            Err(Error::Refused { code: EXISTS, message: "File exists".into(), detail, hint: None }
                .hinted(&HINTS))
        }
        Err(Error::Refused { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn import(source: &Path, file: &Path, args: &CreateArgs, out: &Output) -> Result<u64, Error> {
    let import = Import {
        source,
        format: args.from_format.as_deref(),
        target: file,
        size: args.size.map(|size| size.0),
        block_size: args.block_size.unwrap_or(BLOCK_SIZE),
        quiet: out.json,
    };
    import.run()
}

/// The call that creates the disk.
pub fn create_call(args: &CreateArgs) -> Result<(&'static str, Value), Error> {
    let block_size = args.block_size.unwrap_or(BLOCK_SIZE);
    if let Some(size) = args.size {
        check_size(size, block_size)?;
    }
    let name = Some(json!(args.name));
    let uuid = args.uuid.as_ref().map(|uuid| json!(uuid));
    if let Some(file) = &args.kind.file {
        // The daemon has another working directory.
        let path = std::path::absolute(file)?;
        let path = path.to_str().ok_or_else(|| Error::Usage("the file's name is not UTF-8".into()))?;
        let params = object([
            ("name", name),
            ("filename", Some(json!(path))),
            ("block_size", args.block_size.map(|bytes| json!(bytes))),
            ("size", args.size.map(|size| json!(size.0))),
            ("readonly", args.readonly.then_some(json!(true))),
            ("enospc", args.enospc.map(|what| json!(what.name()))),
            ("lock", args.lock.map(|what| json!(what.name()))),
            ("uuid", uuid),
        ]);
        return Ok(("bdev_uring_create", params));
    }
    if let Some(image) = &args.kind.rbd {
        if let Some(size) = args.create {
            check_size(size, block_size)?;
        }
        // The daemon has another working directory.
        let conf = args.conf.as_ref().map(std::path::absolute).transpose()?;
        let params = object([
            ("name", name),
            ("pool_name", Some(json!(image.pool))),
            ("namespace_name", image.namespace.as_ref().map(|namespace| json!(namespace))),
            ("rbd_name", Some(json!(image.image))),
            ("block_size", Some(json!(block_size))),
            ("size", args.create.map(|size| json!(size.0))),
            ("config_file", conf.map(|path| json!(path))),
            ("user_id", args.user.as_ref().map(|user| json!(user))),
            ("key_name", args.key.as_ref().map(|key| json!(key))),
            ("cluster_name", args.cluster.as_ref().map(|cluster| json!(cluster))),
            ("read_only", args.readonly.then_some(json!(true))),
            ("uuid", uuid),
        ]);
        return Ok(("bdev_rbd_create", params));
    }
    if let Some(namespace) = args.kind.nvme {
        let params = object([
            ("name", name.clone()),
            ("trtype", Some(json!("PCIe"))),
            ("traddr", Some(json!(namespace.address.to_string()))),
            ("nsid", Some(json!(namespace.nsid))),
            ("disk", name),
            ("dma", args.dma.map(|dma| json!(dma.name()))),
        ]);
        return Ok(("bdev_nvme_attach_controller", params));
    }
    for (trtype, paths) in [("TCP", &args.kind.nvme_tcp), ("RDMA", &args.kind.nvme_rdma)] {
        if let Some((first, further)) = paths.split_first() {
            return Ok(("bdev_nvme_attach_controller", remote(args, trtype, *first, further)));
        }
    }
    let Size(bytes) = args.size.ok_or_else(|| Error::Usage("--size is missing".into()))?;
    let params = object([
        ("name", name),
        ("block_size", Some(json!(block_size))),
        ("num_blocks", Some(json!(bytes / u64::from(block_size)))),
        ("uuid", uuid),
    ]);
    let method = if args.kind.memory { "bdev_malloc_create" } else { "bdev_null_create" };
    Ok((method, params))
}

/// The parameters that attach a controller of another host.
fn remote(args: &CreateArgs, trtype: &str, address: SocketAddr, further: &[SocketAddr]) -> Value {
    let path = |address: &SocketAddr| json!({"traddr": address.ip(), "trsvcid": address.port().to_string()});
    let paths: Vec<Value> = further.iter().map(path).collect();
    object([
        ("name", Some(json!(args.name))),
        ("trtype", Some(json!(trtype))),
        ("adrfam", Some(json!(if address.is_ipv4() { "IPv4" } else { "IPv6" }))),
        ("traddr", Some(json!(address.ip().to_string()))),
        ("trsvcid", Some(json!(address.port().to_string()))),
        ("paths", (!paths.is_empty()).then(|| json!(paths))),
        ("subnqn", args.subsystem.as_ref().map(|nqn| json!(nqn))),
        ("hostnqn", args.host_nqn.as_ref().map(|nqn| json!(nqn))),
        ("dhchap_key", args.key.as_ref().map(|name| json!(name))),
        ("psk", args.tls_key.as_ref().map(|name| json!(name))),
        ("dhchap_ctrlr_key", args.controller_key.as_ref().map(|name| json!(name))),
        ("nsid", Some(json!(args.ns.unwrap_or(1)))),
        ("disk", Some(json!(args.name))),
        ("dma", args.dma.map(|dma| json!(dma.name()))),
    ])
}

/// Refuses a size that no disk can have.
fn check_size(Size(bytes): Size, block_size: u32) -> Result<(), Error> {
    let block = u64::from(block_size);
    if block == 0 {
        return Err(Error::Usage("a block has 512 bytes, or 4096".into()));
    }
    if bytes == 0 {
        return Err(Error::Usage("the size is 0; give a size, such as --size 20G".into()));
    }
    if bytes.is_multiple_of(block) {
        return Ok(());
    }
    let (below, above) = (bytes / block * block, (bytes / block).saturating_add(1).saturating_mul(block));
    let near = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
    Err(Error::Usage(format!(
        "a size of {bytes} bytes is not a multiple of the block size, {block} bytes; {near} is"
    )))
}

fn find(client: &mut Client, name: &str) -> Result<Value, Error> {
    let disks = client.call("bdev_get_bdevs", json!({"name": name}));
    Ok(disks.map_err(|error| error.hinted(&HINTS))?[0].take())
}

fn size(disk: &Value) -> Size {
    Size(number(disk, "block_size").saturating_mul(number(disk, "num_blocks")))
}

fn kind(disk: &Value) -> &str {
    let product = text(disk, "product_name");
    KINDS.iter().find(|(name, ..)| *name == product).map_or(product, |(_, kind, _)| kind)
}

/// What an operator must know of a disk whose store is away for a time.
const STALLED: &str = "stalled: its requests wait";

/// The path of a disk, and what an operator must know of it.
fn notes(disk: &Value) -> String {
    let deleted = (disk["deleted"] == true).then(|| "(deleted)".to_owned());
    let removal = disk["removal"].as_str().map(|removal| format!("(removal: {removal})"));
    let stalled = (disk["stalled"] == true).then(|| format!("({STALLED})"));
    let drive = || {
        let trid = &disk["driver_specific"]["nvme"][0]["trid"];
        let address = trid["traddr"].as_str()?;
        Some(match trid["trsvcid"].as_str() {
            Some(port) => format!("{} of {address}, port {port}", text(trid, "subnqn")),
            None => address.to_owned(),
        })
    };
    let image = || ImageSpec::of(disk).map(|image| image.to_string());
    let path = Some(text(disk, "path").to_owned()).filter(|path| !path.is_empty());
    let path = path.or_else(drive).or_else(image);
    path.into_iter()
        .chain(deleted)
        .chain(stalled)
        .chain(rekey::note(disk))
        .chain(removal)
        .collect::<Vec<_>>()
        .join(" ")
}

/// The disks, with details that only this host knows.
fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut users = Users::read(client)?;
    let paths: Vec<_> = elements(&users.disks).iter().map(|disk| path(disk).map(str::to_owned)).collect();
    let allocated = allocated(paths);
    let used_by: Vec<_> =
        elements(&users.disks).iter().map(|disk| users.in_brief(text(disk, "name"))).collect();
    for ((disk, allocated), used_by) in
        users.disks.as_array_mut().into_iter().flatten().zip(allocated).zip(used_by)
    {
        disk["state"] = json!(absent::PRESENT);
        // Null if unknown.
        disk["deleted"] = json!(path(disk).map_or(Some(false), |path| users.deleted.has(path)));
        disk["path"] = json!(path(disk));
        disk["allocated_bytes"] = json!(allocated);
        disk["used_by"] = json!(used_by);
    }
    let present = elements(&users.disks);
    let absent: Vec<_> = users.absent.iter().filter(|a| absent::is_disk(a)).collect();
    let all: Vec<_> = present.iter().chain(absent.iter().copied()).cloned().collect();
    out.print(&Value::Array(all), || {
        if present.is_empty() {
            return absent::append_table(
                if absent.is_empty() { NONE.into() } else { String::new() },
                &absent,
                out,
            );
        }
        let row = |disk: &Value| {
            let used_by: Vec<_> = elements(&disk["used_by"]).iter().filter_map(Value::as_str).collect();
            vec![
                text(disk, "name").to_owned(),
                kind(disk).to_owned(),
                size(disk).to_string(),
                disk["allocated_bytes"].as_u64().map_or_else(|| "-".into(), |bytes| Size(bytes).to_string()),
                if used_by.is_empty() { "-".into() } else { used_by.join(", ") },
                notes(disk),
            ]
        };
        let columns = [
            ("NAME", false),
            ("KIND", false),
            ("SIZE", true),
            ("ON DISK", true),
            ("USED BY", false),
            ("PATH", false),
        ];
        absent::append_table(out.table(&columns, present.iter().map(row)), &absent, out)
    })?;
    if !out.json {
        warn_of_missing_room(None, client);
    }
    Ok(())
}

/// The file or block device of a disk.
pub fn path(disk: &Value) -> Option<&str> {
    let details = &disk["driver_specific"];
    details["uring"]["filename"].as_str().or_else(|| details["aio"]["filename"].as_str())
}

/// The bytes that files occupy in their file systems. `None` for a file that is not on this host, that we may not access, or
/// whose file system hangs: the command does not wait for it.
fn allocated(paths: Vec<Option<String>>) -> Vec<Option<u64>> {
    let mut found = vec![None; paths.len()];
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for (index, path) in paths.into_iter().enumerate() {
            let file = path.and_then(|path| std::fs::metadata(path).ok()).filter(std::fs::Metadata::is_file);
            // The receiver is gone after its timeout.
            let _ = sender.send((index, file.map(|file| file.blocks() * 512)));
        }
    });
    // If the first file hangs, those behind it are not answered either.
    while let Ok((index, bytes)) = receiver.recv_timeout(SIZE_TIMEOUT) {
        found[index] = bytes;
    }
    found
}

fn show(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut disk = match find(client, name) {
        Ok(disk) => disk,
        Err(error) => {
            let users = Users::read(client)?;
            let disk = users.any_disk(name).filter(|disk| absent::is_absent(disk));
            return show_absent(disk.ok_or(error)?, &users, out);
        }
    };
    let is_deleted = path(&disk).map_or(Some(false), |path| Deleted::of(client).has(path));
    disk["deleted"] = json!(is_deleted);
    let (image, paths) = (rbd::read(&mut disk, client), paths::read(&mut disk, client));
    let deleted = (is_deleted == Some(true)).then(|| {
        let path = path(&disk).unwrap_or_default();
        format!("{path} is deleted: its data is lost when the daemon ends; 'aryk doctor' says how to keep it")
    });
    out.print(&disk, || {
        let can = |(what, can): (&String, &Value)| can.as_bool()?.then(|| what.clone());
        let operations = disk["supported_io_types"].as_object().into_iter().flatten().filter_map(can);
        let uuid = text(&disk, "uuid");
        let aliases =
            elements(&disk["aliases"]).iter().filter_map(Value::as_str).filter(|alias| *alias != uuid);
        let specific = disk["driver_specific"].as_object().into_iter().flatten().map(|(_, v)| v.to_string());
        let known = [
            ("name", text(&disk, "name").to_owned()),
            ("aliases", aliases.collect::<Vec<_>>().join(" ")),
            ("uuid", uuid.to_owned()),
            ("kind", kind(&disk).to_owned()),
            ("size", size(&disk).to_string()),
            ("blocks", format!("{} of {} bytes", number(&disk, "num_blocks"), number(&disk, "block_size"))),
            ("in use", disk["claimed"].to_string()),
            ("operations", operations.collect::<Vec<_>>().join(" ")),
            ("details", specific.collect::<Vec<_>>().join(" ")),
        ];
        let stalled = (disk["stalled"] == true).then(|| ("state", STALLED.to_owned()));
        let rotation = rekey::line(&disk).map(|line| ("new key", line));
        let deleted = deleted.map(|deleted| ("file", deleted));
        out.list(known.into_iter().chain(rotation).chain(stalled).chain(deleted).chain(image).chain(paths))
    })
}

fn show_absent(disk: &Value, users: &Users, out: &Output) -> Result<(), Error> {
    let mut shown = disk.clone();
    shown["used_by"] = json!(users.in_brief(text(disk, "name")));
    let forget = absent::forget_command(disk).unwrap_or_default();
    out.print(&shown, || {
        let used_by: Vec<_> = elements(&shown["used_by"]).iter().filter_map(Value::as_str).collect();
        out.list([
            ("name", text(disk, "name").to_owned()),
            ("state", format!("absent: {}", text(disk, "why"))),
            ("retried", absent::retry_text(disk)),
            ("created by", format!("{} {}", text(disk, "method"), disk["params"])),
            ("used by", used_by.join(", ")),
            ("forget with", forget),
        ])
    })
}

/// Removes disks, and forgets absent ones; with `force`, also disks in use, and their users.
fn remove(names: &[String], force: bool, client: &mut Client, out: &Output) -> Result<(), Error> {
    let refusal = |users: &Users| match find_all(names, users) {
        Ok(disks) if !force => in_use(&disks, users),
        Ok(_) => None,
        Err(error) => Some(error),
    };
    let users = Users::read_until_free(client, refusal)?;
    let mut disks = find_all(names, &users)?;
    // A disk on top goes with its base, so it is removed first.
    disks.sort_by_key(|disk| (users.disks_on_top(text(disk, "name")).len(), text(disk, "name")));
    disks.dedup_by_key(|disk| text(disk, "name"));
    let (mut report, mut gone) = (Vec::new(), Vec::new());
    for disk in disks {
        let name = text(disk, "name");
        let forgotten = forget_absent_on(name, &gone, &users, client)?;
        gone.extend(&forgotten);
        let is_absent = absent::is_absent(disk);
        let controllers = if is_absent {
            // Another disk that needed it, removed before, may have removed it too.
            if !gone.contains(&text(disk, "object")) {
                absent::forget(disk, client).map_err(|error| error.hinted(&HINTS))?;
            }
            Vec::new()
        } else {
            remove_one(disk, &users, client)?
        };
        let store = encrypted::remove_store(disk, names, &users, client)?;
        if !out.json {
            let with = |what: &str, names: &[&str]| match names {
                [] => String::new(),
                names => format!(" {what}: {}", names.join(", ")),
            };
            let with =
                with("with its controllers", &controllers) + &with("and so are its absent users", &forgotten);
            let file =
                absent::file(disk).map(|file| format!(" Its file stays as it is: {}", printable(file)));
            let gone = if is_absent { "was absent, and is forgotten" } else { "is removed" };
            let store = store.map(|store| format!(" and so is its store '{store}'")).unwrap_or_default();
            out.print_line(&format!("Disk '{name}' {gone}{with}{store}.{}", file.unwrap_or_default()))?;
        }
        report.push(json!({"disk": name, "controllers": controllers, "was_absent": is_absent, "forgotten": forgotten, "store": store}));
    }
    if out.json { out.print(&Value::Array(report), String::new) } else { Ok(()) }
}

fn find_all<'a>(names: &[String], users: &'a Users) -> Result<Vec<&'a Value>, Error> {
    let none = |name: &String| Error::no_device(format!("there is no disk named '{name}'")).hinted(&HINTS);
    names.iter().map(|name| users.any_disk(name).ok_or_else(|| none(name))).collect()
}

/// Refuses to remove disks that have other users than the given disks, and disks whose data would be lost.
fn in_use(disks: &[&Value], users: &Users) -> Option<Error> {
    let names: Vec<_> = disks.iter().map(|disk| text(disk, "name")).collect();
    let used = names.iter().map(|name| (name, users.of_disk(name, &names)));
    let used: Vec<_> = used.filter(|(_, lines)| !lines.is_empty()).collect();
    let what: Vec<_> = used.iter().map(|(name, _)| format!("'{name}'")).collect();
    let what = match &what[..] {
        [one] => format!("disk {one} is in use"),
        _ => format!("disks {} are in use", what.join(", ")),
    };
    let lines = used.into_iter().flat_map(|(_, lines)| lines).collect();
    let hint = "Detach it first, with 'aryk detach'; or remove it with all its users: --force";
    let stores = disks.iter().filter_map(|disk| encrypted::store_of(disk, users));
    let last_data = disks.iter().copied().chain(stores).filter_map(|disk| users.last_data(disk)).collect();
    Error::in_use(what, lines, hint, last_data)
}

/// Forgets the absent objects that need a disk, except those that are gone already. Returns their names.
fn forget_absent_on<'a>(
    disk: &str,
    gone: &[&str],
    users: &'a Users,
    client: &mut Client,
) -> Result<Vec<&'a str>, Error> {
    let mut names = Vec::new();
    for absent in users.absent_on(disk) {
        let object = text(absent, "object");
        if !gone.contains(&object) {
            absent::forget(absent, client)?;
            names.push(object);
        }
    }
    Ok(names)
}

/// Removes a disk, after the controllers that offer only this disk. Returns the controllers' names.
fn remove_one<'a>(disk: &'a Value, users: &'a Users, client: &mut Client) -> Result<Vec<&'a str>, Error> {
    let (name, product) = (text(disk, "name"), text(disk, "product_name"));
    let delete = KINDS.iter().find(|(known, ..)| *known == product).map(|(.., delete)| *delete);
    // Two families of methods create disks in files.
    let is_aio = disk["driver_specific"]["aio"].is_object();
    let delete = if is_aio { Some("bdev_aio_delete") } else { delete };
    if product == VOLUME {
        return Err(Error::Usage(format!(
            "'{name}' is a volume: 'aryk volume delete' deletes it with its data"
        )));
    }
    let delete = delete.ok_or_else(|| Error::Usage(format!("a {product} is removed with its base")))?;
    let nvme = nvme_controller(disk, client)?;
    let controllers = remove_controllers(name, users, client)?;
    let removed = nvme.as_deref().unwrap_or(name);
    client.call(delete, json!({"name": removed})).map_err(|error| error.hinted(&HINTS))?;
    Ok(controllers)
}

/// Removes the controllers that offer only a disk, or disks on top of it. Returns the controllers' names.
pub fn remove_controllers<'a>(
    name: &'a str,
    users: &'a Users,
    client: &mut Client,
) -> Result<Vec<&'a str>, Error> {
    let mut controllers = Vec::new();
    for offered in users.disks_on_top(name).into_iter().chain([name]) {
        for place in users.places(offered).filter(|place| place.target.is_none()) {
            let controller = text(place.controller, "ctrlr");
            match client.call("vhost_delete_controller", json!({"ctrlr": controller})) {
                Ok(_) => controllers.push(controller),
                // It was removed with another disk of the command line.
                Err(error) if error.kind() == Some(NO_DEVICE) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(controllers)
}

/// The controller that is detached with a disk of an NVMe drive; `None` for other disks.
fn nvme_controller(disk: &Value, client: &mut Client) -> Result<Option<String>, Error> {
    let Some(controller) = disk["driver_specific"]["nvme"][0]["controller"].as_str() else { return Ok(None) };
    let described = client.call("bdev_nvme_get_controllers", json!({"name": controller}))?;
    let disks: Vec<_> =
        elements(&described[0]["namespaces"]).iter().filter_map(|one| one["disk"].as_str()).collect();
    if disks.len() > 1 {
        return Err(Error::Usage(format!(
            "the NVMe controller '{controller}' has other disks too ({}): to remove all of them, detach it with 'aryk rpc bdev_nvme_detach_controller'",
            disks.join(", ")
        )));
    }
    Ok(Some(controller.to_owned()))
}

fn resize(name: &str, size: Size, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disk = find(client, name)?;
    check_size(size, u32::try_from(number(&disk, "block_size")).unwrap_or(BLOCK_SIZE))?;
    let name = text(&disk, "name");
    let details = &disk["driver_specific"];
    if let Some(base) = details["luks"]["base_bdev_name"].as_str() {
        return Err(Error::Usage(format!(
            "disk '{name}' is a LUKS disk: resize its base '{base}', which has the header too"
        )));
    }
    // An encrypted disk has the size of its base, and grows with it.
    let base = details["crypto"]["base_bdev_name"].as_str().map(|base| find(client, base)).transpose()?;
    let resized = base.as_ref().unwrap_or(&disk);
    let store = text(resized, "name");
    let result = match kind(resized) {
        "rbd" => {
            const MIB: u64 = 1 << 20;
            if !size.0.is_multiple_of(MIB) {
                return Err(Error::Usage("the size of a Ceph image is set in whole MiB".into()));
            }
            client.call("bdev_rbd_resize", json!({"name": store, "new_size": size.0 / MIB}))
        }
        _ => client.call("bdev_uring_resize", json!({"name": store, "size": size.0})),
    };
    let result = result.map_err(|error| error.hinted(&HINTS))?;
    out.print(&result, || format!("Disk '{name}' has {size} now."))?;
    warn_of_missing_room(Some(store), client);
    Ok(())
}

#[cfg(test)]
mod tests;
