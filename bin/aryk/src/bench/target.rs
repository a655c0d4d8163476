//! What `aryk bench` is to reach: a socket by its path, or what the daemon offers by its name.

use super::args::BenchArgs;
use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::Error;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A controller, and which of its targets is meant, if it has such and one is.
#[derive(Debug, PartialEq, Eq)]
struct Offer<'a> {
    controller: &'a Value,
    target: Option<u64>,
}

/// The socket of `target`: what has no `/`, and is no file here, is a controller or a disk that one offers. Only then the daemon is asked, at `daemon`.
pub fn find(target: &Path, args: &BenchArgs, daemon: &Path, patience: Duration) -> Result<PathBuf, Error> {
    let name = target.to_str().filter(|name| !name.contains('/') && !target.exists());
    let Some(name) = name else { return Ok(target.to_owned()) };
    let mut client = Client::connect(daemon, patience)?;
    let controllers = client.call("vhost_get_controllers", json!({}))?;
    let offer = choose(elements(&controllers), name).map_err(Error::Usage)?;
    check(&offer, name, args.scsi.is_some()).map_err(Error::Usage)?;
    Ok(text(offer.controller, "socket").into())
}

/// A controller of that name, or else the one that offers the disk of that name.
fn choose<'a>(controllers: &'a [Value], name: &str) -> Result<Offer<'a>, String> {
    if let Some(controller) = controllers.iter().find(|c| text(c, "ctrlr") == name) {
        return Ok(Offer { controller, target: None });
    }
    let mut offers = controllers.iter().flat_map(|controller| of_disk(controller, name));
    let first = offers.next();
    let first = first.ok_or_else(|| {
        format!("'{name}' is no socket here, and neither a controller nor a disk behind one: `aryk controller list` has them")
    })?;
    match offers.next() {
        None => Ok(first),
        Some(second) => {
            let [a, b] = [&first, &second].map(|offer| text(offer.controller, "ctrlr"));
            Err(format!("disk '{name}' is behind the controllers '{a}' and '{b}': name one of them"))
        }
    }
}

/// Where a controller has the disk.
fn of_disk<'a>(controller: &'a Value, disk: &str) -> Vec<Offer<'a>> {
    let specific = &controller["backend_specific"];
    let block = (specific["block"]["bdev"] == disk).then_some(Offer { controller, target: None });
    let has_it = |target: &&Value| elements(&target["luns"]).iter().any(|lun| lun["bdev_name"] == disk);
    let targets = elements(&specific["scsi"]).iter().filter(has_it);
    let targets = targets.map(|target| Offer { controller, target: target["scsi_dev_num"].as_u64() });
    block.into_iter().chain(targets).collect()
}

/// Whether it can be reached as it is asked for.
fn check(offer: &Offer<'_>, name: &str, as_scsi: bool) -> Result<(), String> {
    let controller = text(offer.controller, "ctrlr");
    if offer.controller["connects"] == true {
        return Err(format!(
            "controller '{controller}' connects to its machine: it has no socket to measure at"
        ));
    }
    let is_scsi = offer.controller["backend_specific"]["scsi"].is_array();
    match (is_scsi, as_scsi, offer.target) {
        (true, false, Some(target)) => Err(format!(
            "disk '{name}' is target {target} of the SCSI controller '{controller}': add --scsi={target}"
        )),
        (true, false, None) => Err(format!("controller '{controller}' is a SCSI host: add --scsi=TARGET")),
        (false, true, _) => Err(format!("controller '{controller}' is no SCSI host: leave out --scsi")),
        (true, true, _) | (false, false, _) => Ok(()),
    }
}
