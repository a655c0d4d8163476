//! The target of `aryk bench`: a socket's path, or the name of an object of the daemon.

use super::args::BenchArgs;
use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::Error;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A controller, with the target number if the disk is one of its targets.
#[derive(Debug, PartialEq, Eq)]
struct Offer<'a> {
    controller: &'a Value,
    target: Option<u64>,
}

/// The socket of `target`. A text without `/` that is no file here is the name of a controller, or of a disk that a controller
/// offers; only then the daemon at `daemon` is called.
pub fn find(target: &Path, args: &BenchArgs, daemon: &Path, patience: Duration) -> Result<PathBuf, Error> {
    let name = target.to_str().filter(|name| !name.contains('/') && !target.exists());
    let Some(name) = name else { return Ok(target.to_owned()) };
    let mut client = Client::connect(daemon, patience)?;
    let controllers = client.call("vhost_get_controllers", json!({}))?;
    let offer = choose(elements(&controllers), name).map_err(Error::Usage)?;
    check(&offer, name, args.scsi.is_some()).map_err(Error::Usage)?;
    Ok(text(offer.controller, "socket").into())
}

/// The controller of that name, or else the one that offers the disk of that name.
fn choose<'a>(controllers: &'a [Value], name: &str) -> Result<Offer<'a>, String> {
    if let Some(controller) = controllers.iter().find(|c| text(c, "ctrlr") == name) {
        return Ok(Offer { controller, target: None });
    }
    let mut offers = controllers.iter().flat_map(|controller| of_disk(controller, name));
    let first = offers.next();
    let first = first.ok_or_else(|| {
        format!("'{name}' is neither a socket here, nor a controller, nor a disk of a controller: `aryk controller list` shows them")
    })?;
    match offers.next() {
        None => Ok(first),
        Some(second) => {
            let [a, b] = [&first, &second].map(|offer| text(offer.controller, "ctrlr"));
            Err(format!(
                "disk '{name}' is offered by the controllers '{a}' and '{b}': give the name of one of them"
            ))
        }
    }
}

/// The places of the disk in a controller.
fn of_disk<'a>(controller: &'a Value, disk: &str) -> Vec<Offer<'a>> {
    let specific = &controller["backend_specific"];
    let block = (specific["block"]["bdev"] == disk).then_some(Offer { controller, target: None });
    let has_it = |target: &&Value| elements(&target["luns"]).iter().any(|lun| lun["bdev_name"] == disk);
    let targets = elements(&specific["scsi"]).iter().filter(has_it);
    let targets = targets.map(|target| Offer { controller, target: target["scsi_dev_num"].as_u64() });
    block.into_iter().chain(targets).collect()
}

/// Checks that the offer fits the `--scsi` option.
fn check(offer: &Offer<'_>, name: &str, as_scsi: bool) -> Result<(), String> {
    let controller = text(offer.controller, "ctrlr");
    if offer.controller["connects"] == true {
        return Err(format!(
            "controller '{controller}' connects to the front-end's socket: it has no socket of its own to measure at"
        ));
    }
    let is_scsi = offer.controller["backend_specific"]["scsi"].is_array();
    match (is_scsi, as_scsi, offer.target) {
        (true, false, Some(target)) => Err(format!(
            "disk '{name}' is target {target} of the SCSI controller '{controller}': add --scsi={target}"
        )),
        (true, false, None) => Err(format!("controller '{controller}' is a SCSI host: add --scsi=TARGET")),
        (false, true, _) => Err(format!("controller '{controller}' is not a SCSI host: omit --scsi")),
        (true, true, _) | (false, false, _) => Ok(()),
    }
}
