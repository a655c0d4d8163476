//! Users of disks: controllers, their VMs, and disks on top.
//!
//! Like SPDK, the daemon carries out all its clients' calls. The guard against detaching a disk from a running VM by mistake is
//! here, before the call.

use crate::absent;
use crate::client::Client;
use crate::commands::{disk, share};
use crate::commands::{elements, number, text};
use crate::deleted::Deleted;
use crate::error::{Error, NO_METHOD};
use crate::watch;
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// How long a front-end that has just disconnected may still be reported as connected.
const DISCONNECT_TIME: Duration = Duration::from_millis(300);

/// All disks and controllers of the daemon, and the absent ones.
pub struct Users {
    pub disks: Value,
    pub controllers: Value,
    /// Subsystems of NVMe/TCP, with their hosts.
    pub shares: Vec<Value>,
    pub absent: Vec<Value>,
    pub deleted: Deleted,
}

/// A place of a disk: the disk of a block controller, or of a target.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub controller: &'a Value,
    pub target: Option<u64>,
    /// The disk's name.
    pub disk: &'a str,
}

impl Users {
    /// Reads the lists from the daemon.
    pub fn read(client: &mut Client) -> Result<Self, Error> {
        let disks = client.call("bdev_get_bdevs", json!({}))?;
        let controllers = client.call("vhost_get_controllers", json!({}))?;
        let shares = match share::read(client) {
            // An older daemon shares nothing.
            Err(Error::Refused { code: NO_METHOD, .. }) => Vec::new(),
            shares => shares?,
        };
        let absent = absent::read(client)?;
        Ok(Self { disks, controllers, shares, absent, deleted: Deleted::of(client) })
    }

    /// Reads the lists until `refusal` returns `None`, or until it has returned an error for longer than a disconnect takes.
    pub fn read_until_free(
        client: &mut Client,
        refusal: impl Fn(&Self) -> Option<Error>,
    ) -> Result<Self, Error> {
        let mut waited = Duration::ZERO;
        loop {
            let users = Self::read(client)?;
            match refusal(&users) {
                None => return Ok(users),
                Some(error) if waited >= DISCONNECT_TIME => return Err(error),
                Some(_) => watch::wait(DISCONNECT_TIME / 3),
            }
            waited += DISCONNECT_TIME / 3;
        }
    }

    /// The disk with this name, alias or uuid.
    pub fn disk(&self, name: &str) -> Option<&Value> {
        let is_called = |disk: &&Value| {
            text(disk, "name") == name
                || elements(&disk["aliases"]).iter().any(|alias| alias == name)
                || text(disk, "uuid").eq_ignore_ascii_case(name)
        };
        elements(&self.disks).iter().find(is_called).filter(|_| !name.is_empty())
    }

    /// The disk with this name, alias or uuid; or the absent disk with this name or uuid.
    pub fn any_disk(&self, name: &str) -> Option<&Value> {
        let absent = || self.absent.iter().find(|a| absent::is_disk(a) && absent::is_called(a, name));
        self.disk(name).or_else(absent)
    }

    /// The absent objects that need the disk of this name, each before the object that it needs.
    pub fn absent_on(&self, disk: &str) -> Vec<&Value> {
        let mut found: Vec<&Value> = Vec::new();
        let mut bases = vec![disk];
        while let Some(base) = bases.pop() {
            let is_called = |name: &str| {
                name == base || self.any_disk(base).is_some_and(|disk| absent::is_called(disk, name))
            };
            // Settings, such as a limit or the membership in a group, are removed with their disk.
            let users = self.absent.iter().filter(|a| absent::is_disk(a) || absent::is_offer(a));
            for absent in users {
                let is_itself = absent::is_disk(absent) && text(absent, "name") == disk;
                let is_new = !is_itself && !found.iter().any(|known| std::ptr::eq(*known, absent));
                if is_new && absent::base(absent).is_some_and(is_called) {
                    found.push(absent);
                    bases.extend(absent::is_disk(absent).then(|| text(absent, "name")));
                }
            }
        }
        found.reverse();
        found
    }

    /// The controller with this name.
    pub fn controller(&self, name: &str) -> Option<&Value> {
        elements(&self.controllers).iter().find(|controller| text(controller, "ctrlr") == name)
    }

    /// The places of the disk with this name.
    pub fn places<'a>(&'a self, disk: &str) -> impl Iterator<Item = Place<'a>> {
        elements(&self.controllers).iter().flat_map(places_of).filter(move |place| place.disk == disk)
    }

    /// The names under which the disk with this name is shared.
    fn shares(&self, disk: &str) -> impl Iterator<Item = &str> {
        self.shares.iter().filter(move |share| share::has_disk(share, disk)).map(|share| text(share, "nqn"))
    }

    /// The disks on top of this one, directly or indirectly, each before its base.
    pub fn disks_on_top<'a>(&'a self, disk: &str) -> Vec<&'a str> {
        let uuid = self.disk(disk).map_or("", |disk| text(disk, "uuid"));
        let is_on = |other: &&'a Value| {
            let mut details = other["driver_specific"].as_object().into_iter().flatten();
            details.any(|(_, of)| {
                let image = of["external_snapshot_name"].as_str();
                of["base_bdev_name"] == disk
                    || of["base_bdev"] == disk
                    || image.is_some_and(|image| image == uuid)
            })
        };
        let mut all = Vec::new();
        for other in elements(&self.disks).iter().filter(is_on) {
            let name = text(other, "name");
            let above = self.disks_on_top(name);
            let new: Vec<_> = above.into_iter().chain([name]).filter(|name| !all.contains(name)).collect();
            all.extend(new);
        }
        all
    }

    /// The users of the disk with this name, one line each; without the disks in `except`, which are removed anyway.
    pub fn of_disk(&self, disk: &str, except: &[&str]) -> Vec<String> {
        let mut lines: Vec<_> = self.places(disk).map(|place| place.to_string()).collect();
        lines.extend(self.shares(disk).map(|nqn| format!("it is shared as {nqn}: see 'aryk hosts'")));
        for above in self.disks_on_top(disk).into_iter().filter(|above| !except.contains(above)) {
            lines.push(format!("disk '{above}' is on top of it"));
            lines.extend(self.places(above).map(|place| format!("{place}, which offers '{above}'")));
        }
        let is_excepted = |a: &&Value| absent::is_disk(a) && except.contains(&text(a, "name"));
        let absent = self.absent_on(disk).into_iter().filter(|a| !is_excepted(a));
        lines.extend(absent.map(|a| format!("{}, which is absent", text(a, "object"))));
        lines
    }

    /// A warning for a disk whose data is lost when the daemon closes its file: the file is deleted, or may be.
    pub fn last_data(&self, disk: &Value) -> Option<String> {
        let path = disk::path(disk)?;
        let name = text(disk, "name");
        match self.deleted.has(path) {
            Some(true) => Some(format!(
                "disk '{name}': its file {path} is deleted, so this loses its data: 'aryk doctor' says how to keep it"
            )),
            // We may lack the right to read the daemon's descriptors or a directory on the file's path, but the file is not at
            // its path.
            _ if matches!(Path::new(path).try_exists(), Ok(false)) => Some(format!(
                "disk '{name}': its file {path} is not found here; if it is deleted, this loses its data"
            )),
            _ => None,
        }
    }

    /// The direct users of the disk with this name, in a few words each.
    pub fn in_brief(&self, disk: &str) -> Vec<String> {
        let place = |place: Place<'_>| {
            let target = place.target.map_or_else(String::new, |target| format!(" target {target}"));
            let vm = if place.is_connected() { " (VM)" } else { "" };
            format!("{}{target}{vm}", place.name())
        };
        let disks = self.disks_on_top(disk).into_iter().map(|above| format!("disk {above}"));
        let absent = self.absent_on(disk).into_iter().map(|a| {
            let what = if absent::is_disk(a) { "disk " } else { "" };
            format!("{what}{} (absent)", text(a, "name"))
        });
        let shares = self.shares(disk).map(|_| "shared".to_owned());
        self.places(disk).map(place).chain(shares).chain(disks).chain(absent).collect()
    }

    /// The connected VMs and hosts, one line each.
    pub fn connected(&self) -> Vec<String> {
        let line = |controller: &Value| {
            Some(format!("controller '{}': {}", text(controller, "ctrlr"), front_end(controller)?))
        };
        let hosts = self.shares.iter().flat_map(|share| {
            let nqn = text(share, "nqn");
            let line =
                move |host: &Value| format!("share {nqn}: host {} is connected", text(host, "hostnqn"));
            elements(&share["controllers"]).iter().map(line)
        });
        elements(&self.controllers).iter().filter_map(line).chain(hosts).collect()
    }
}

/// The places of a controller's disks.
pub fn places_of<'a>(controller: &'a Value) -> impl Iterator<Item = Place<'a>> {
    let backend = &controller["backend_specific"];
    let block = backend["block"]["bdev"].as_str().map(|disk| Place { controller, target: None, disk });
    let of_target = move |target: &'a Value| {
        let disk = text(&target["luns"][0], "bdev_name");
        Place { controller, target: Some(number(target, "scsi_dev_num")), disk }
    };
    block.into_iter().chain(elements(&backend["scsi"]).iter().map(of_target))
}

impl Place<'_> {
    pub fn name(&self) -> &str {
        text(self.controller, "ctrlr")
    }

    /// Whether a VM is connected.
    pub fn is_connected(&self) -> bool {
        is_connected(self.controller)
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(target) = self.target {
            write!(f, "target {target} of ")?;
        }
        let socket = text(self.controller, "socket");
        let who = front_end(self.controller).unwrap_or_else(|| "no VM is connected".into());
        write!(f, "controller '{}' at {socket}: {who}", self.name())
    }
}

/// Whether a VM is connected to a controller.
pub fn is_connected(controller: &Value) -> bool {
    !elements(&controller["sessions"]).is_empty()
}

/// The front-end that is connected to a controller, if there is one.
pub fn front_end(controller: &Value) -> Option<String> {
    let session = elements(&controller["sessions"]).first()?;
    Some(match session["pid"].as_u64() {
        Some(pid) => format!("a VM is connected ({})", process(pid)),
        None => "a VM is connected".into(),
    })
}

/// A process's name and id; the name is known only for processes of this host.
pub fn process(pid: u64) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{}, process {pid}", name.trim_end()),
        Err(_) => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        let disk = |name: &str, base: &str| match base {
            "" => {
                json!({"name": name, "uuid": format!("U-{name}"), "driver_specific": {"uring": {"filename": "/f"}}})
            }
            _ => json!({"name": name, "driver_specific": {"passthru": {"base_bdev_name": base}}}),
        };
        let blk = json!({"ctrlr": "b", "socket": "/run/b", "sessions": [{"pid": 1}],
            "backend_specific": {"block": {"bdev": "top"}}});
        let target = |n: u32, disk: &str| json!({"scsi_dev_num": n, "luns": [{"bdev_name": disk}]});
        let scsi = json!({"ctrlr": "s", "socket": "/run/s", "sessions": [],
            "backend_specific": {"scsi": [target(0, "other"), target(5, "base")]}});
        let disks =
            json!([disk("base", ""), disk("middle", "base"), disk("top", "middle"), disk("free", "")]);
        Users {
            disks,
            controllers: json!([blk, scsi]),
            shares: Vec::new(),
            absent: Vec::new(),
            deleted: Deleted::default(),
        }
    }

    #[test]
    fn absent_objects_are_users_of_disks() {
        let absent = |kind: &str, name: &str, params: Value| json!({"object": format!("{kind} '{name}'"), "kind": kind, "name": name, "params": params, "state": "absent"});
        let absent = vec![
            absent("disk", "x", json!({"uuid": "U-x", "base_bdev_name": "y"})),
            absent("disk", "y", json!({"base_bdev_name": "x"})),
            absent("controller", "c", json!({"dev_name": "u-X"})),
            absent("target", "s/3", json!({"bdev_name": "free"})),
            absent("setting", "", json!({"name": "group", "bdev_name": "free"})),
        ];
        let users = Users { absent, ..users() };
        let names = |disk: &str| -> Vec<_> {
            users.absent_on(disk).into_iter().map(|a| text(a, "name").to_owned()).collect()
        };
        // Two absent disks that wait for each other do not cause an endless loop.
        assert_eq!(names("y"), ["c", "x"]);
        assert_eq!(users.in_brief("free"), ["s/3 (absent)"]);
        assert_eq!(users.of_disk("free", &[]), ["target 's/3', which is absent"]);
        assert_eq!(users.any_disk("u-x").unwrap()["name"], "x");
        // The disk y has no uuid.
        assert!(users.any_disk("").is_none());
        assert!(users.disk("x").is_none());
    }

    #[test]
    fn a_file_that_may_be_deleted_gives_a_warning() {
        let in_file = |path: &str| json!({"name": "f", "driver_specific": {"uring": {"filename": path}}});
        let line = users().last_data(&in_file("/nonexistent/f")).unwrap();
        assert!(line.contains("'f': its file /nonexistent/f is not found here"), "{line}");
        assert_eq!(users().last_data(&in_file("/proc/self/exe")), None);
        assert_eq!(users().last_data(&json!({"name": "m"})), None);
    }

    #[test]
    fn all_users_of_a_disk_are_found() {
        let users = users();
        assert_eq!(users.disk("u-base").unwrap()["name"], "base");
        assert_eq!(users.disks_on_top("base"), ["top", "middle"]);
        let lines = users.of_disk("base", &[]);
        assert_eq!(lines[0], "target 5 of controller 's' at /run/s: no VM is connected");
        assert_eq!(
            lines[1..3],
            ["disk 'top' is on top of it", &*users.of_disk("top", &[]).concat()].map(|line| match line {
                "disk 'top' is on top of it" => line.to_owned(),
                place => format!("{place}, which offers 'top'"),
            })
        );
        assert!(
            lines[2].starts_with("controller 'b' at /run/b: a VM is connected (")
                && lines[2].contains("process 1)")
        );
        assert_eq!(lines.len(), 4);
        assert_eq!(users.of_disk("base", &["top", "middle"]).len(), 1);
        assert!(users.of_disk("free", &[]).is_empty());
        assert_eq!(users.connected().len(), 1);
    }
}
