//! `aryk attach`, `detach` and `controller …`

use super::{elements, object, text};
use crate::cli::AttachArgs;
use crate::client::Client;
use crate::error::Error;
use crate::output::Output;
use serde_json::{Value, json};

pub fn attach(args: &AttachArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let name = args.controller.as_ref().unwrap_or(&args.disk);
    // The daemon's working directory is another one.
    let connect = args.connect.as_ref().map(std::path::absolute).transpose()?;
    let params = object([
        ("ctrlr", Some(json!(name))),
        ("dev_name", Some(json!(args.disk))),
        ("readonly", args.readonly.then_some(json!(true))),
        ("cpumask", args.cpumask.as_ref().map(|cores| json!(cores))),
        ("num_queues", args.queues.map(|n| json!(n))),
        ("connect", connect.as_ref().map(|path| json!(path))),
        ("socket_mode", args.socket_mode.map(|mode| json!(format!("{mode:o}")))),
        ("socket_owner", args.socket_owner.as_ref().map(|user| json!(user))),
        ("socket_group", args.socket_group.as_ref().map(|group| json!(group))),
    ]);
    client.call("vhost_create_blk_controller", params)?;
    let mut controllers = client.call("vhost_get_controllers", json!({"name": name}))?;
    let mut controller = controllers[0].take();
    let qemu = qemu_arguments(text(&controller, "socket"), connect.is_some(), args.queues);
    controller["qemu"] = json!(qemu);
    out.print(&controller, || {
        let lines: Vec<_> = qemu.chunks(2).map(|pair| format!("    {} {}", pair[0], quoted(&pair[1]))).collect();
        format!(
            "Disk '{}' waits for a machine at {}\n\nGive QEMU these arguments, and its memory's size (here 1G):\n\n{}",
            args.disk,
            text(&controller, "socket"),
            lines.join(" \\\n")
        )
    })
}

/// What makes QEMU use the socket. The memory must be shared, or the daemon cannot reach it.
/// Of itself it takes a queue for each of the machine's processors. Either way the machine goes on after the daemon was started anew.
fn qemu_arguments(socket: &str, qemu_listens: bool, queues: Option<u16>) -> Vec<String> {
    let queues = queues.map(|n| format!(",num-queues={n}")).unwrap_or_default();
    // QEMU's own escape.
    let socket = socket.replace(',', ",,");
    let link = if qemu_listens { "server=on,wait=off" } else { "reconnect=1" };
    let arguments = [
        "-object",
        "memory-backend-memfd,id=mem0,size=1G,share=on",
        "-machine",
        "q35,memory-backend=mem0",
        "-m",
        "1G",
        "-chardev",
        &format!("socket,id=aryk0,path={socket},{link}"),
        "-device",
        &format!("vhost-user-blk-pci,chardev=aryk0{queues}"),
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
    let named = |c: &&Value| text(c, "ctrlr") == name;
    let of_disk = |c: &&Value| text(&c["backend_specific"]["block"], "bdev") == name;
    let all = elements(&controllers);
    let controller = match all.iter().find(named) {
        Some(controller) => controller,
        None => {
            let mut of_disk = all.iter().filter(of_disk);
            match (of_disk.next(), of_disk.next()) {
                (Some(controller), None) => controller,
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
            }
        }
    };
    let result = client.call("vhost_delete_controller", json!({"ctrlr": text(controller, "ctrlr")}))?;
    out.print(&result, || format!("Controller '{}' is gone.", text(controller, "ctrlr")))
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

    #[test]
    fn qemu_gets_the_path_whatever_it_holds() {
        let arguments = qemu_arguments("/tmp/a,b c", false, Some(4));
        assert!(arguments.contains(&"socket,id=aryk0,path=/tmp/a,,b c,reconnect=1".to_owned()));
        let arguments_of_client = qemu_arguments("/tmp/a", true, None);
        assert!(arguments_of_client.contains(&"socket,id=aryk0,path=/tmp/a,server=on,wait=off".to_owned()));
        assert!(arguments.contains(&"vhost-user-blk-pci,chardev=aryk0,num-queues=4".to_owned()));
        assert_eq!(quoted("path=/tmp/a,,b c'd"), r"'path=/tmp/a,,b c'\''d'");
        assert_eq!(quoted("path=/run/a"), "path=/run/a");
    }
}
