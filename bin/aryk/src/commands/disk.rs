//! `aryk disk …`

use super::{elements, number, object, text};
use crate::cli::{CreateArgs, DiskCommand};
use crate::client::Client;
use crate::error::Error;
use crate::import::Import;
use crate::output::{Output, printable};
use crate::size::Size;
use serde_json::{Value, json};
use std::path::Path;

const BLOCK_SIZE: u32 = 512;

/// What is said of no disks.
pub const NONE: &str = "There are no disks. Make one: aryk disk create NAME --file PATH --size 20G";

/// What kind of disk a product name stands for, and what removes it.
const KINDS: [(&str, &str, &str); 7] = [
    ("URING bdev", "file", "bdev_uring_delete"),
    ("AIO disk", "file", "bdev_aio_delete"),
    ("Malloc disk", "memory", "bdev_malloc_delete"),
    ("Null disk", "null", "bdev_null_delete"),
    ("passthru", "passthru", "bdev_passthru_delete"),
    ("delay", "delay", "bdev_delay_delete"),
    ("Error Injection Disk", "error", "bdev_error_delete"),
];

pub fn run(command: &DiskCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        DiskCommand::Create(args) => create(args, client, out),
        DiskCommand::List(_) => list(client, out),
        DiskCommand::Show { name } => show(name, client, out),
        DiskCommand::Remove { name } => remove(name, client, out),
        DiskCommand::Resize { name, size } => resize(name, *size, client, out),
        DiskCommand::Stat { name, watch } => super::stat::stat(name.as_deref(), watch.every, client, out),
    }
}

fn create(args: &CreateArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let (method, mut params) = create_call(args)?;
    if let (Some(source), Some(file)) = (&args.from, &args.kind.file) {
        refuse_existing(&args.name, client)?;
        import(source, file, args, out)?;
        // It has its size.
        params["size"] = Value::Null;
        let step = format!("{} is imported, but is no disk yet", file.display());
        client.call(method, params).map_err(|source| Error::Imported { step, source: Box::new(source) })?;
    } else {
        client.call(method, params)?;
    }
    let disk = find(client, &args.name)?;
    let size = size(&disk);
    let name = &args.name;
    out.print(&disk, || {
        format!("Disk '{name}' of {size} is ready. Offer it to a machine: aryk attach {name}")
    })?;
    if args.kind.file.is_some() {
        warn_of_missing_room(client);
    }
    Ok(())
}

/// Says on stderr which file systems have promised more than they have. An older daemon does not know.
fn warn_of_missing_room(client: &mut Client) {
    let file_systems = client.call("aryk_file_systems_get", json!({})).unwrap_or_default();
    for fs in elements(&file_systems).iter().filter(|fs| number(fs, "missing") > 0) {
        eprintln!("{}", missing_room(fs));
    }
}

fn missing_room(fs: &Value) -> String {
    let size = |member: &str| Size(number(fs, member));
    format!(
        "warning: {} disks in the file system of {} are promised {} and have {} of that; {} are free, so {} are missing: writes will fail",
        number(fs, "disks"),
        printable(text(fs, "path")),
        size("promised"),
        size("allocated"),
        size("free"),
        size("missing"),
    )
}

/// Before an hour is spent on a copy.
fn refuse_existing(name: &str, client: &mut Client) -> Result<(), Error> {
    match find(client, name) {
        Ok(_) => {
            let detail = Some(format!("there is a disk '{name}' already"));
            Err(Error::Refused { code: -17, message: "File exists".into(), detail })
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

/// The call that makes the disk that is asked for.
pub fn create_call(args: &CreateArgs) -> Result<(&'static str, Value), Error> {
    let name = Some(json!(args.name));
    let uuid = args.uuid.as_ref().map(|uuid| json!(uuid));
    if let Some(file) = &args.kind.file {
        // The daemon's working directory is another one.
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
    let block_size = args.block_size.unwrap_or(BLOCK_SIZE);
    let Size(bytes) = args.size.ok_or_else(|| Error::Usage("--size is missing".into()))?;
    if block_size == 0 || !bytes.is_multiple_of(block_size.into()) {
        return Err(Error::Usage(format!("--size must be a multiple of --block-size, {block_size}")));
    }
    let params = object([
        ("name", name),
        ("block_size", Some(json!(block_size))),
        ("num_blocks", Some(json!(bytes / u64::from(block_size)))),
        ("uuid", uuid),
    ]);
    let method = if args.kind.memory { "bdev_malloc_create" } else { "bdev_null_create" };
    Ok((method, params))
}

fn find(client: &mut Client, name: &str) -> Result<Value, Error> {
    let mut disks = client.call("bdev_get_bdevs", json!({"name": name}))?;
    Ok(disks[0].take())
}

fn size(disk: &Value) -> Size {
    Size(number(disk, "block_size").saturating_mul(number(disk, "num_blocks")))
}

fn kind(disk: &Value) -> &str {
    let product = text(disk, "product_name");
    KINDS.iter().find(|(name, ..)| *name == product).map_or(product, |(_, kind, _)| kind)
}

fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let disks = client.call("bdev_get_bdevs", json!({}))?;
    out.print(&disks, || {
        if elements(&disks).is_empty() {
            return NONE.into();
        }
        let row = |disk: &Value| {
            let is_claimed = disk["claimed"].as_bool().unwrap_or_default();
            vec![
                text(disk, "name").to_owned(),
                kind(disk).to_owned(),
                size(disk).to_string(),
                number(disk, "block_size").to_string(),
                if is_claimed { "yes" } else { "no" }.to_owned(),
            ]
        };
        let columns = [("NAME", false), ("KIND", false), ("SIZE", true), ("BLOCK", true), ("IN USE", false)];
        out.table(&columns, elements(&disks).iter().map(row))
    })?;
    if !out.json {
        warn_of_missing_room(client);
    }
    Ok(())
}

fn show(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disk = find(client, name)?;
    out.print(&disk, || {
        let can = |(what, can): (&String, &Value)| can.as_bool()?.then(|| what.clone());
        let operations = disk["supported_io_types"].as_object().into_iter().flatten().filter_map(can);
        let uuid = text(&disk, "uuid");
        let aliases =
            elements(&disk["aliases"]).iter().filter_map(Value::as_str).filter(|alias| *alias != uuid);
        let specific = disk["driver_specific"].as_object().into_iter().flatten().map(|(_, v)| v.to_string());
        out.list([
            ("name", text(&disk, "name").to_owned()),
            ("aliases", aliases.collect::<Vec<_>>().join(" ")),
            ("uuid", uuid.to_owned()),
            ("kind", kind(&disk).to_owned()),
            ("size", size(&disk).to_string()),
            ("blocks", format!("{} of {} bytes", number(&disk, "num_blocks"), number(&disk, "block_size"))),
            ("in use", disk["claimed"].to_string()),
            ("operations", operations.collect::<Vec<_>>().join(" ")),
            ("details", specific.collect::<Vec<_>>().join(" ")),
        ])
    })
}

fn remove(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disk = find(client, name)?;
    let product = text(&disk, "product_name");
    let delete = KINDS.iter().find(|(known, ..)| *known == product).map(|(.., delete)| *delete);
    let delete =
        delete.ok_or_else(|| Error::Usage(format!("aryk does not know how to remove a {product}")))?;
    let name = text(&disk, "name");
    let result = client.call(delete, json!({"name": name}))?;
    out.print(&result, || format!("Disk '{name}' is gone."))
}

fn resize(name: &str, size: Size, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disk = find(client, name)?;
    let name = text(&disk, "name");
    let result = client.call("bdev_uring_resize", json!({"name": name, "size": size.0}))?;
    out.print(&result, || format!("Disk '{name}' has {size} now."))
}

#[cfg(test)]
mod tests;
