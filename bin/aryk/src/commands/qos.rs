//! `aryk qos …`

use super::{elements, text};
use crate::cli::{GroupCommand, QosCommand};
use crate::client::Client;
use crate::error::{Error, NO_DEVICE};
use crate::limits::Limits;
use crate::output::Output;
use serde_json::{Value, json};

/// Hints for a disk or group that is not found.
const HINTS: [(i64, &str); 1] =
    [(NO_DEVICE, "'aryk qos group list' shows the groups, and 'aryk disk list' the disks.")];

pub fn run(command: &QosCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        QosCommand::Set { disk, limits } => set(disk, limits, client, out),
        QosCommand::Host { share, host, limits } => limit_host(share, host.as_deref(), limits, client, out),
        QosCommand::List(_) => list(client, out),
        QosCommand::Group(command) => group(command, client, out),
    }
}

fn given(limits: &Limits) -> Result<(), Error> {
    let none = || Error::Usage("no limit is given, such as --iops 3000".into());
    if limits.is_empty() { Err(none()) } else { Ok(()) }
}

fn set(disk: &str, limits: &Limits, client: &mut Client, out: &Output) -> Result<(), Error> {
    given(limits)?;
    let limited = client.call("bdev_set_qos_limit", limits.params(disk));
    limited.map_err(|error| error.hinted(&super::disk::HINTS))?;
    let mut disks = client.call("bdev_get_bdevs", json!({"name": disk}))?;
    let disk = disks[0].take();
    let limits = Limits::of(&disk["assigned_rate_limits"]);
    out.print(&disk["assigned_rate_limits"], || format!("Limits of disk '{}': {limits}", text(&disk, "name")))
}

fn limit_host(
    share: &str,
    host: Option<&str>,
    limits: &Limits,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    given(limits)?;
    let nqn = super::share::find(share, client)?;
    let mut params = limits.params(&nqn);
    params["nqn"] = params["name"].take();
    if let Value::Object(params) = &mut params {
        params.remove("name");
        params.extend(host.map(|host| ("host".to_owned(), json!(host))));
    }
    client.call("nvmf_subsystem_set_host_limits", params)?;
    let share = client.call("nvmf_get_subsystems", json!({"nqn": nqn}))?[0].take();
    let is_meant = |of: &&Value| of["host"].as_str() == host;
    let limits = elements(&share["host_limits"]).iter().find(is_meant).map(|of| &of["assigned_rate_limits"]);
    let limits = limits.unwrap_or(&Value::Null);
    let whose = host.map_or_else(|| "each other host".to_owned(), |host| format!("host {host}"));
    out.print(limits, || format!("Limits of {whose} at {nqn}: {}", Limits::of(limits)))
}

/// The disks with limits or a group.
fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let disks = client.call("bdev_get_bdevs", json!({}))?;
    let is_limited = |disk: &&Value| {
        disk["qos_group"].is_string() || !Limits::of(&disk["assigned_rate_limits"]).is_empty()
    };
    let limited: Vec<&Value> = elements(&disks).iter().filter(is_limited).collect();
    let shown = |disk: &&Value| json!({"name": disk["name"], "group": disk["qos_group"], "limits": disk["assigned_rate_limits"]});
    out.print(&Value::Array(limited.iter().map(shown).collect()), || {
        if limited.is_empty() {
            return "No disk has limits. Limit one: aryk qos set NAME --iops 3000".into();
        }
        let row = |disk: &&Value| {
            let limits = Limits::of(&disk["assigned_rate_limits"]).to_string();
            vec![text(disk, "name").to_owned(), text(disk, "qos_group").to_owned(), limits]
        };
        out.table(&[("DISK", false), ("GROUP", false), ("LIMITS", false)], limited.iter().map(row))
    })
}

fn group(command: &GroupCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        GroupCommand::Create { name, parent, limits } => create(name, parent.as_deref(), limits, client, out),
        GroupCommand::Set { name, limits } => {
            given(limits)?;
            let limited = client.call("bdev_qos_group_set_limit", limits.params(name));
            limited.map_err(|error| error.hinted(&HINTS))?;
            show(name, client, out)
        }
        GroupCommand::Add { group, disks } => members("bdev_qos_group_add_bdev", group, disks, client, out),
        GroupCommand::Remove { group, disks } => {
            members("bdev_qos_group_remove_bdev", group, disks, client, out)
        }
        GroupCommand::Delete { name } => {
            let result = client.call("bdev_qos_group_delete", json!({"name": name}));
            let result = result.map_err(|error| error.hinted(&HINTS))?;
            out.print(&result, || format!("Group '{name}' is deleted."))
        }
        GroupCommand::List(_) => list_groups(client, out),
    }
}

fn create(
    name: &str,
    parent: Option<&str>,
    limits: &Limits,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let mut params = json!({"name": name});
    if let Some(parent) = parent {
        params["parent"] = json!(parent);
    }
    client.call("bdev_qos_group_create", params)?;
    if !limits.is_empty() {
        client.call("bdev_qos_group_set_limit", limits.params(name)).inspect_err(|_| {
            // If the deletion fails too, the first error matters more.
            let _ = client.call("bdev_qos_group_delete", json!({"name": name}));
        })?;
    }
    show(name, client, out)
}

fn members(
    method: &str,
    group: &str,
    disks: &[String],
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    for disk in disks {
        let changed = client.call(method, json!({"name": group, "bdev_name": disk}));
        changed.map_err(|error| error.hinted(&HINTS))?;
    }
    show(group, client, out)
}

fn show(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut groups = client.call("bdev_qos_groups_get", json!({"name": name}))?;
    let group = groups[0].take();
    out.print(&group, || {
        let limits = Limits::of(&group["assigned_rate_limits"]);
        format!("Group '{name}' of {}, limits: {limits}", counted(elements(&group["bdevs"]).len()))
    })
}

fn counted(disks: usize) -> String {
    if disks == 1 { "1 disk".to_owned() } else { format!("{disks} disks") }
}

fn list_groups(client: &mut Client, out: &Output) -> Result<(), Error> {
    let groups = client.call("bdev_qos_groups_get", json!({}))?;
    out.print(&groups, || {
        if elements(&groups).is_empty() {
            return "There are no groups. Create one: aryk qos group create NAME --iops 6000".into();
        }
        let row = |group: &Value| {
            vec![
                text(group, "name").to_owned(),
                text(group, "parent").to_owned(),
                elements(&group["bdevs"]).len().to_string(),
                Limits::of(&group["assigned_rate_limits"]).to_string(),
            ]
        };
        let columns = [("GROUP", false), ("IN", false), ("DISKS", true), ("LIMITS", false)];
        out.table(&columns, elements(&groups).iter().map(row))
    })
}
