//! `aryk attach`, `detach` and `controller …`

use super::{elements, object, text};
use crate::cli::AttachArgs;
use crate::client::Client;
use crate::error::Error;
use crate::output::Output;
use serde_json::{Value, json};

pub fn attach(args: &AttachArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let name = args.controller.as_ref().unwrap_or(&args.disk);
    if args.scsi {
        return attach_scsi(name, args, client, out);
    }
    let mut params = controller_params(name, args)?;
    params["dev_name"] = json!(args.disk);
    if args.readonly {
        params["readonly"] = json!(true);
    }
    client.call("vhost_create_blk_controller", params)?;
    let mut controller = find(name, client)?;
    let qemu = qemu_arguments(text(&controller, "socket"), args);
    controller["qemu"] = json!(qemu);
    out.print(&controller, || {
        let socket = text(&controller, "socket");
        format!("Disk '{}' waits for a machine at {socket}\n\n{}", args.disk, advice(&qemu))
    })
}

/// Gives the disk to a target of a controller, which is made if need be.
fn attach_scsi(name: &str, args: &AttachArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let all = client.call("vhost_get_controllers", json!({}))?;
    let there = elements(&all).iter().find(|controller| text(controller, "ctrlr") == name);
    let is_new = there.is_none();
    if let (Some(there), Some(wanted)) = (there, &args.transport_id)
        && text(there, "transport_id") != wanted
    {
        let has = text(there, "transport_id");
        return Err(Error::Usage(format!(
            "controller '{name}' is known as '{has}' already: leave --transport-id out"
        )));
    }
    if is_new {
        client.call("vhost_create_scsi_controller", controller_params(name, args)?)?;
    }
    let target = args.target.map_or(-1, i32::from);
    let params = json!({"ctrlr": name, "scsi_target_num": target, "bdev_name": args.disk});
    let target = client.call("vhost_scsi_controller_add_target", params).inspect_err(|_| {
        if is_new {
            // That it fails, too, is less than what did.
            let _ = client.call("vhost_delete_controller", json!({"ctrlr": name}));
        }
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

/// What both kinds of controllers take.
fn controller_params(name: &str, args: &AttachArgs) -> Result<Value, Error> {
    // The daemon's working directory is another one.
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

fn find(name: &str, client: &mut Client) -> Result<Value, Error> {
    let mut controllers = client.call("vhost_get_controllers", json!({"name": name}))?;
    Ok(controllers[0].take())
}

/// What to do with the arguments.
fn advice(qemu: &[String]) -> String {
    let lines: Vec<_> = qemu.chunks(2).map(|pair| format!("    {} {}", pair[0], quoted(&pair[1]))).collect();
    format!("Give QEMU these arguments, and its memory's size (here 1G):\n\n{}", lines.join(" \\\n"))
}

/// What makes QEMU use the socket. The memory must be shared, or the daemon cannot reach it.
/// Of itself it takes a queue for each of the machine's processors. A machine goes on after the daemon was started anew, but for one with a SCSI controller
/// in a QEMU before 8.2, which connects once, when it starts.
fn qemu_arguments(socket: &str, args: &AttachArgs) -> Vec<String> {
    let (device, queues) =
        if args.scsi { ("vhost-user-scsi-pci", "num_queues") } else { ("vhost-user-blk-pci", "num-queues") };
    let queues = args.queues.map(|n| format!(",{queues}={n}")).unwrap_or_default();
    // QEMU's own escape.
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

/// For a shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:@%+".contains(c);
    if word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

pub fn detach(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let controllers = client.call("vhost_get_controllers", json!({}))?;
    let all = elements(&controllers);
    if all.iter().any(|controller| text(controller, "ctrlr") == name) {
        let result = client.call("vhost_delete_controller", json!({"ctrlr": name}))?;
        return out.print(&result, || format!("Controller '{name}' is gone."));
    }
    let mut places = all.iter().flat_map(|controller| places_of(name, controller));
    let (controller, target) = match (places.next(), places.next()) {
        (Some(place), None) => place,
        (Some(_), Some(_)) => {
            return Err(Error::Usage(format!("disk '{name}' has several controllers: name one")));
        }
        (None, _) => {
            return Err(Error::Refused {
                code: -19,
                message: "No such device".into(),
                detail: Some(format!("there is no controller '{name}', and none of a disk '{name}'")),
            });
        }
    };
    let Some(target) = target else {
        let result = client.call("vhost_delete_controller", json!({"ctrlr": controller}))?;
        return out.print(&result, || format!("Controller '{controller}' is gone."));
    };
    let params = json!({"ctrlr": controller, "scsi_target_num": target});
    let result = client.call("vhost_scsi_controller_remove_target", params)?;
    out.print(&result, || format!("Target {target} of controller '{controller}' has no disk any more."))
}

/// Where a controller has a disk: as its only one, or as a target's.
fn places_of<'a>(disk: &'a str, controller: &'a Value) -> impl Iterator<Item = (&'a str, Option<&'a Value>)> {
    let backend = &controller["backend_specific"];
    let is_its = text(&backend["block"], "bdev") == disk;
    let targets = elements(&backend["scsi"]).iter();
    let targets = targets.filter(move |target| text(&target["luns"][0], "bdev_name") == disk);
    let places = is_its.then_some(None).into_iter().chain(targets.map(|t| Some(&t["scsi_dev_num"])));
    places.map(|target| (text(controller, "ctrlr"), target))
}

pub fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let controllers = client.call("vhost_get_controllers", json!({}))?;
    out.print(&controllers, || {
        if elements(&controllers).is_empty() {
            return "There are no controllers. Offer a disk to a machine: aryk attach DISK".into();
        }
        let row = |c: &Value| {
            let backend = &c["backend_specific"];
            let of_targets =
                elements(&backend["scsi"]).iter().map(|target| text(&target["luns"][0], "bdev_name"));
            let disks: Vec<_> =
                backend.get("block").map(|block| text(block, "bdev")).into_iter().chain(of_targets).collect();
            let machines = elements(&c["sessions"]).len();
            vec![
                text(c, "ctrlr").to_owned(),
                disks.join(", "),
                c["num_queues"].to_string(),
                text(c, "cpumask").to_owned(),
                if machines > 0 { "connected" } else { "waiting" }.to_owned(),
                text(c, "socket").to_owned(),
            ]
        };
        let columns = [
            ("NAME", false),
            ("DISK", false),
            ("QUEUES", true),
            ("CORES", false),
            ("MACHINE", false),
            ("SOCKET", false),
        ];
        out.table(&columns, elements(&controllers).iter().map(row))
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
    fn qemu_gets_the_path_whatever_it_holds() {
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

    #[test]
    fn a_disk_is_found_in_controllers_of_both_kinds() {
        let blk = json!({"ctrlr": "b", "backend_specific": {"block": {"bdev": "d"}}});
        let target = |n: u32, disk: &str| json!({"scsi_dev_num": n, "luns": [{"bdev_name": disk}]});
        let scsi = json!({"ctrlr": "s", "backend_specific": {"scsi": [target(0, "e"), target(5, "d")]}});
        assert_eq!(places_of("d", &blk).collect::<Vec<_>>(), [("b", None)]);
        assert_eq!(places_of("d", &scsi).collect::<Vec<_>>(), [("s", Some(&json!(5)))]);
        assert_eq!(places_of("f", &scsi).count() + places_of("f", &blk).count(), 0);
    }
}
