//! `aryk attach`, `detach` and `controller …`

use super::{elements, object, text};
use crate::absent;
use crate::apply::limits::set_sleep_policy;
use crate::cli::{AttachArgs, SleepPolicy};
use crate::client::Client;
use crate::error::{BUSY, EXISTS, Error, NO_DEVICE, NO_FILE, NOT_ALLOWED};
use crate::output::Output;
use crate::users::{Place, Users, is_connected, places_of};
use serde_json::{Value, json};
use std::fmt;

/// Hints for a disk that cannot be attached.
const HINTS: [(i64, &str); 5] = [
    (EXISTS, "Choose another name with --controller, or detach the disk first with 'aryk detach'."),
    (NO_DEVICE, "'aryk disk list' shows the disks."),
    (BUSY, "'aryk disk list' shows its users."),
    (
        NOT_ALLOWED,
        "The user who runs the daemon must be allowed to create the socket: see 'ls -ld', and 'ps -C arykd'.",
    ),
    (NO_FILE, "The socket's directory must exist."),
];

pub fn attach(args: &AttachArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    // A volume's name has its pool's, and the name of a socket has no slash.
    let name = &args.controller.clone().unwrap_or_else(|| args.disk.replace('/', "-"));
    if args.scsi {
        return attach_scsi(name, args, client, out);
    }
    let mut params = controller_params(name, args)?;
    params["dev_name"] = json!(args.disk);
    params["exclusive"] = json!(!args.shared);
    if args.readonly {
        params["readonly"] = json!(true);
    }
    client.call("vhost_create_blk_controller", params).map_err(|error| refused(error, &args.disk, client))?;
    let mut controller = find(name, client)?;
    let qemu = qemu_arguments(text(&controller, "socket"), args);
    controller["qemu"] = json!(qemu);
    let memory = memory_access(&args.disk, client);
    out.print(&controller, || {
        let socket = text(&controller, "socket");
        let memory = memory.map_or_else(String::new, |memory| format!("\n\n{memory}"));
        format!("Disk '{}' waits for a VM at {socket}\n\n{}{memory}", args.disk, advice(&qemu))
    })
}

/// Adds the disk as a target of a SCSI controller. Creates the controller if it does not exist.
fn attach_scsi(name: &str, args: &AttachArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let all = client.call("vhost_get_controllers", json!({}))?;
    let there = elements(&all).iter().find(|controller| text(controller, "ctrlr") == name);
    let is_new = there.is_none();
    if let (Some(there), Some(wanted)) = (there, &args.transport_id)
        && text(there, "transport_id") != wanted
    {
        let has = text(there, "transport_id");
        return Err(Error::Usage(format!(
            "controller '{name}' is known as '{has}' already: omit --transport-id"
        )));
    }
    if is_new {
        let made = client.call("vhost_create_scsi_controller", controller_params(name, args)?);
        made.map_err(|error| error.hinted(&HINTS))?;
    }
    let target = args.target.map_or(-1, i32::from);
    let params = json!({"ctrlr": name, "scsi_target_num": target, "bdev_name": args.disk,
        "exclusive": !args.shared});
    let target = client.call("vhost_scsi_controller_add_target", params).map_err(|error| {
        if is_new {
            // If the deletion fails too, the first error matters more.
            let _ = client.call("vhost_delete_controller", json!({"ctrlr": name}));
        }
        refused(error, &args.disk, client)
    })?;
    let mut controller = find(name, client)?;
    let qemu = qemu_arguments(text(&controller, "socket"), args);
    controller["qemu"] = json!(qemu);
    controller["target"] = target.clone();
    out.print(&controller, || {
        let begin = format!("Disk '{}' is target {target} of controller '{name}'", args.disk);
        match is_new {
            true => format!("{begin}, at {}\n\n{}", text(&controller, "socket"), advice(&qemu)),
            false => format!("{begin}."),
        }
    })
}

/// How the disk's NVMe drive accesses the VM's memory, or that another host does; `None` for other disks, and if the daemon does
/// not say.
fn memory_access(disk: &str, client: &mut Client) -> Option<&'static str> {
    let disk = client.call("bdev_get_bdevs", json!({"name": disk})).ok()?;
    let name = disk[0]["driver_specific"]["nvme"][0]["controller"].as_str()?;
    let controllers = client.call("bdev_nvme_get_controllers", json!({"name": name})).ok()?;
    let dma = text(&controllers[0], "dma");
    match controllers[0]["remote"].is_object() {
        true => (dma == "pin").then_some(
            "The other host reads and writes the VM's memory directly: the memory is pinned.\n\
             Once the VM runs, 'aryk memory' shows whether that succeeded.",
        ),
        false => access_text(dma),
    }
}

fn access_text(dma: &str) -> Option<&'static str> {
    Some(match dma {
        "auto" => {
            "The drive accesses the VM's memory directly if the memory has huge pages;\n\
             otherwise the data is copied. Once the VM runs, 'aryk memory' shows which."
        }
        "pin" => {
            "The drive accesses the VM's memory directly: the memory is pinned.\n\
             Once the VM runs, 'aryk memory' shows whether that succeeded."
        }
        "bounce" => "The data is copied between the drive and the VM's memory (--dma bounce).",
        _ => return None,
    })
}

/// The error for a disk that cannot be attached; lists its other users if there are any.
fn refused(error: Error, disk: &str, client: &mut Client) -> Error {
    if error.kind() == Some(BUSY)
        && let Ok(users) = Users::read(client)
        && let Some(found) = users.disk(disk)
    {
        let places: Vec<_> = users.places(text(found, "name")).map(|place| place.to_string()).collect();
        if !places.is_empty() {
            return Error::InUse {
                what: format!("disk '{disk}' is attached already"),
                users: places,
                hint: "Two VMs destroy each other's files, unless their file system is made for clusters: then add --shared. \
                       VMs that only read may share it too: --readonly for each.",
            };
        }
    }
    error.hinted(&HINTS)
}

/// The parameters that both kinds of controllers have.
fn controller_params(name: &str, args: &AttachArgs) -> Result<Value, Error> {
    // The daemon has another working directory.
    let connect = args.connect.as_ref().map(std::path::absolute).transpose()?;
    Ok(object([
        ("ctrlr", Some(json!(name))),
        ("cpumask", args.cpumask.as_ref().map(|cores| json!(cores))),
        ("num_queues", args.queues.map(|n| json!(n))),
        ("transport_id", args.transport_id.as_ref().map(|id| json!(id))),
        ("connect", connect.as_ref().map(|path| json!(path))),
        ("socket_mode", args.socket_mode.map(|mode| json!(format!("{mode:o}")))),
        ("socket_owner", args.socket_owner.as_ref().map(|user| json!(user))),
        ("socket_group", args.socket_group.as_ref().map(|group| json!(group))),
    ]))
}

/// Sets the sleep policy of a controller.
pub fn set(name: &str, policy: SleepPolicy, client: &mut Client, out: &Output) -> Result<(), Error> {
    let call = set_sleep_policy(name, policy);
    let summary = call.summary();
    client
        .call(&call.method, Value::Object(call.params))
        .map_err(|error| error.hinted(&[(NO_DEVICE, "'aryk controller list' shows the controllers.")]))?;
    let controller = find(name, client)?;
    out.print(&controller, || format!("Set the {summary}."))
}

fn find(name: &str, client: &mut Client) -> Result<Value, Error> {
    let mut controllers = client.call("vhost_get_controllers", json!({"name": name}))?;
    Ok(controllers[0].take())
}

/// Instructions for the arguments.
fn advice(qemu: &[String]) -> String {
    let lines: Vec<_> = qemu.chunks(2).map(|pair| format!("    {} {}", pair[0], quoted(&pair[1]))).collect();
    format!("Give QEMU these arguments, and its memory's size (here 1G):\n\n{}", lines.join(" \\\n"))
}

/// QEMU's arguments for the socket. The memory must be shared, because the daemon maps it. By default QEMU uses one queue per
/// processor of the VM. The VM goes on after a restart of the daemon, except with a SCSI controller in a QEMU before 8.2, which
/// connects only once, at its start.
fn qemu_arguments(socket: &str, args: &AttachArgs) -> Vec<String> {
    let (device, queues) =
        if args.scsi { ("vhost-user-scsi-pci", "num_queues") } else { ("vhost-user-blk-pci", "num-queues") };
    let queues = args.queues.map(|n| format!(",{queues}={n}")).unwrap_or_default();
    // QEMU escapes a comma by doubling it.
    let socket = socket.replace(',', ",,");
    let link = match args.connect {
        Some(_) if args.scsi => ",server=on",
        Some(_) => ",server=on,wait=off",
        None if args.scsi => "",
        None => ",reconnect=1",
    };
    let arguments = [
        "-object",
        "memory-backend-memfd,id=mem0,size=1G,share=on",
        "-machine",
        "q35,memory-backend=mem0",
        "-m",
        "1G",
        "-chardev",
        &format!("socket,id=aryk0,path={socket}{link}"),
        "-device",
        &format!("{device},chardev=aryk0{queues}"),
    ];
    arguments.map(str::to_owned).into()
}

/// Quotes a word for a shell.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:@%+".contains(c);
    if word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Removes whole controllers, or single targets.
pub fn detach(names: &[String], force: bool, client: &mut Client, out: &Output) -> Result<(), Error> {
    let refusal = |users: &Users| {
        let removal = names.iter().map(|name| find_removal(name, users)).collect::<Result<Vec<_>, _>>();
        removal.map_or_else(Some, |removal| if force { None } else { in_use(&removal, users) })
    };
    let users = Users::read_until_free(client, refusal)?;
    let mut done = Vec::new();
    for name in names {
        let removal = find_removal(name, &users)?;
        removal.remove(client)?;
        if !out.json {
            out.print_line(&removal.to_string())?;
        }
        done.push(match removal {
            Removal::Offered { controller, target } => json!({"controller": controller, "target": target}),
            Removal::Absent(absent) => json!({"forgotten": text(absent, "object")}),
        });
    }
    if out.json { out.print(&Value::Array(done), String::new) } else { Ok(()) }
}

/// The object that `detach` removes.
enum Removal<'a> {
    /// A controller, or the disk of one of its targets.
    Offered { controller: &'a str, target: Option<u64> },
    /// An absent controller or target.
    Absent(&'a Value),
}

/// The controller with this name, or the place of the disk with this name.
fn find_removal<'a>(name: &str, users: &'a Users) -> Result<Removal<'a>, Error> {
    if let Some(controller) = users.controller(name) {
        return Ok(Removal::Offered { controller: text(controller, "ctrlr"), target: None });
    }
    let is_meant = |absent: &&Value| absent::is_offer(absent) && text(absent, "name") == name;
    if let Some(absent) = users.absent.iter().find(is_meant) {
        return Ok(Removal::Absent(absent));
    }
    let disk = users.any_disk(name).map_or(name, |disk| text(disk, "name"));
    let places: Vec<_> = users.places(disk).collect();
    let absent: Vec<_> = users.absent_on(disk).into_iter().filter(|a| absent::is_offer(a)).collect();
    match (&places[..], &absent[..]) {
        ([place], []) => {
            Ok(Removal::Offered { controller: text(place.controller, "ctrlr"), target: place.target })
        }
        ([], [absent]) => Ok(Removal::Absent(absent)),
        ([], []) => {
            let none = Error::no_device(format!(
                "there is no controller '{name}', and no controller of a disk '{name}'"
            ));
            Err(none.hinted(&[(NO_DEVICE, "'aryk controller list' shows the controllers and their disks.")]))
        }
        _ => {
            let names: Vec<_> =
                places.iter().map(Place::name).chain(absent.iter().map(|a| text(a, "name"))).collect();
            let names = names.join(", ");
            Err(Error::Usage(format!("disk '{name}' has several controllers: give the name of one: {names}")))
        }
    }
}

/// Refuses to detach disks from connected VMs.
fn in_use(removal: &[Removal<'_>], users: &Users) -> Option<Error> {
    let mut lines = Vec::new();
    let mut is_scsi = false;
    for removal in removal {
        // An absent object is in no VM.
        let Removal::Offered { controller, target } = removal else { continue };
        let places = users.controller(controller).into_iter().flat_map(places_of);
        let meant =
            places.filter(|place| place.is_connected() && (target.is_none() || place.target == *target));
        for place in meant {
            // The daemon deletes no SCSI controller with a connected VM.
            is_scsi |= target.is_none() && place.target.is_some();
            lines.push(format!("disk '{}': {place}", place.disk));
        }
    }
    (!lines.is_empty()).then_some(Error::InUse {
        what: "a VM would lose a disk that it uses".into(),
        users: lines,
        hint: match is_scsi {
            true => {
                "Shut the VM down first; or detach the disks of a SCSI controller one by one nevertheless: aryk detach DISK --force"
            }
            false => {
                "Unmount it in the VM or shut the VM down first; or detach it nevertheless: --force"
            }
        },
    })
}

impl Removal<'_> {
    fn remove(&self, client: &mut Client) -> Result<(), Error> {
        let removal = match self {
            Removal::Absent(absent) => absent::forget(absent, client).map(|()| Value::Null),
            Removal::Offered { controller, target: None } => {
                client.call("vhost_delete_controller", json!({"ctrlr": controller}))
            }
            Removal::Offered { controller, target: Some(target) } => {
                let params = json!({"ctrlr": controller, "scsi_target_num": target});
                client.call("vhost_scsi_controller_remove_target", params)
            }
        };
        removal.map(drop).map_err(|error| {
            error.hinted(&[(BUSY, "Its disks can be detached one by one: aryk detach DISK --force")])
        })
    }
}

impl fmt::Display for Removal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(absent) if absent::is_controller(absent) => {
                write!(f, "Controller '{}' was absent, and is forgotten.", text(absent, "name"))
            }
            Self::Absent(absent) => {
                write!(f, "Target '{}' was absent, and is forgotten.", text(absent, "name"))
            }
            Self::Offered { controller, target: None } => write!(f, "Controller '{controller}' is removed."),
            Self::Offered { controller, target: Some(target) } => {
                write!(f, "Target {target} of controller '{controller}' is removed.")
            }
        }
    }
}

pub fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut controllers = client.call("vhost_get_controllers", json!({}))?;
    for controller in controllers.as_array_mut().into_iter().flatten() {
        controller["state"] = json!(absent::PRESENT);
    }
    let absent = absent::read(client)?;
    let absent: Vec<_> = absent.iter().filter(|a| absent::is_offer(a)).collect();
    let present = elements(&controllers);
    let all: Vec<_> = present.iter().chain(absent.iter().copied()).cloned().collect();
    out.print(&Value::Array(all), || {
        if present.is_empty() {
            let none = "There are no controllers. Attach a disk to a VM: aryk attach DISK";
            return absent::append_table(
                if absent.is_empty() { none.into() } else { String::new() },
                &absent,
                out,
            );
        }
        let row = |c: &Value| {
            let disks: Vec<_> = places_of(c).map(|place| place.disk).collect();
            vec![
                text(c, "ctrlr").to_owned(),
                disks.join(", "),
                c["num_queues"].to_string(),
                text(c, "cpumask").to_owned(),
                text(c, "sleep_policy").to_owned(),
                if is_connected(c) { "connected" } else { "waiting" }.to_owned(),
                text(c, "socket").to_owned(),
            ]
        };
        let columns = [
            ("NAME", false),
            ("DISK", false),
            ("QUEUES", true),
            ("CORES", false),
            ("SLEEP", false),
            ("VM", false),
            ("SOCKET", false),
        ];
        absent::append_table(out.table(&columns, present.iter().map(row)), &absent, out)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(connect: Option<&str>, scsi: bool, queues: Option<u16>) -> AttachArgs {
        let connect = connect.map(Into::into);
        AttachArgs {
            disk: "d".into(),
            controller: None,
            queues,
            cpumask: None,
            readonly: false,
            shared: false,
            scsi,
            target: None,
            transport_id: None,
            connect,
            socket_mode: None,
            socket_owner: None,
            socket_group: None,
        }
    }

    #[test]
    fn the_access_of_a_drive_to_memory_is_named() {
        assert!(
            access_text("auto").unwrap().contains("huge pages")
                && access_text("pin").unwrap().contains("pinned")
        );
        assert!(access_text("bounce").unwrap().contains("copied"));
        assert_eq!(access_text(""), None, "a daemon that does not say");
    }

    #[test]
    fn qemu_arguments_escape_the_path() {
        let arguments = qemu_arguments("/tmp/a,b c", &asked(None, false, Some(4)));
        assert!(arguments.contains(&"socket,id=aryk0,path=/tmp/a,,b c,reconnect=1".to_owned()));
        let of_client = qemu_arguments("/tmp/a", &asked(Some("/tmp/a"), false, None));
        assert!(of_client.contains(&"socket,id=aryk0,path=/tmp/a,server=on,wait=off".to_owned()));
        assert!(arguments.contains(&"vhost-user-blk-pci,chardev=aryk0,num-queues=4".to_owned()));
        let of_scsi = qemu_arguments("/tmp/a", &asked(None, true, Some(4)));
        assert!(of_scsi.contains(&"vhost-user-scsi-pci,chardev=aryk0,num_queues=4".to_owned()));
        assert_eq!(quoted("path=/tmp/a,,b c'd"), r"'path=/tmp/a,,b c'\''d'");
        assert_eq!(quoted("path=/run/a"), "path=/run/a");
    }
}
