//! `aryk snapshot …`: snapshots of volumes.
//!
//! The snapshot NAME of the volume VOLUME is called VOLUME@NAME in its pool.

use super::volume::{delete, find};
use super::{elements, number, text};
use crate::cli::examples;
use crate::client::Client;
use crate::completion::{snapshots, volumes};
use crate::error::Error;
use crate::output::Output;
use crate::size::Size;
use crate::users::Users;
use crate::watch::Watch;
use clap::Subcommand;
use clap_complete::ArgValueCandidates;
use serde_json::{Value, json};

/// The text for an empty list.
const NONE: &str = "There are no snapshots. Take one: aryk snapshot create POOL/VOLUME@SNAPSHOT";

/// Commands for snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take snapshots, all at one instant
    #[command(after_help = examples::SNAPSHOT)]
    Create {
        /// The new snapshots, as POOL/VOLUME@NAME, all of one pool
        #[arg(required = true, value_name = "POOL/VOLUME@NAME")]
        snapshots: Vec<String>,
    },
    /// List the snapshots
    List(Watch),
    /// Delete snapshots: volumes and clones keep their data
    Delete {
        /// The snapshots, as POOL/SNAPSHOT
        #[arg(required = true, value_name = "SNAPSHOT", add = ArgValueCandidates::new(snapshots))]
        snapshots: Vec<String>,
        /// Delete them although they are in use
        #[arg(long)]
        force: bool,
    },
    /// Give a volume the content of a snapshot of its pool: what was written since is lost
    Revert {
        /// The volume, as POOL/VOLUME
        #[arg(add = ArgValueCandidates::new(volumes))]
        volume: String,
        /// The snapshot, as POOL/SNAPSHOT
        #[arg(add = ArgValueCandidates::new(snapshots))]
        snapshot: String,
        /// Lose what was written since
        #[arg(long)]
        discard_changes: bool,
    },
}

pub fn run(command: &SnapshotCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        SnapshotCommand::Create { snapshots } => create(snapshots, client, out),
        SnapshotCommand::List(_) => list(client, out),
        SnapshotCommand::Delete { snapshots, force } => delete("snapshot", snapshots, *force, client, out),
        SnapshotCommand::Revert { volume, snapshot, discard_changes } => {
            revert(volume, snapshot, *discard_changes, client, out)
        }
    }
}

fn create(names: &[String], client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut wanted = Vec::new();
    for name in names {
        let parts = name.rsplit_once('@').and_then(|(volume, _)| Some((volume, name.split_once('/')?.1)));
        let (volume, snapshot) = parts.ok_or_else(|| {
            Error::Usage(format!("'{name}' does not name a snapshot: it is named as POOL/VOLUME@NAME"))
        })?;
        wanted.push(json!({"volume": volume, "snapshot_name": snapshot}));
    }
    let made = client.call("aryk_pool_snapshot", json!({"snapshots": wanted}));
    let made = made.map_err(|error| error.hinted(&super::volume::HINTS))?;
    out.print(&made, || match names {
        [name] => format!(
            "Snapshot '{name}' is taken. Create a volume with its content: aryk volume clone {name} NAME"
        ),
        names => format!("{} snapshots are taken, at one instant.", names.len()),
    })
}

fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let all = client.call("aryk_volumes_get", json!({}))?;
    let snapshots: Vec<&Value> =
        elements(&all).iter().filter(|volume| volume["is_snapshot"] == true).collect();
    let users = Users::read(client)?;
    let row = |snapshot: &&Value| {
        let alias = text(snapshot, "alias");
        let (pool, name) = alias.split_once('/').unwrap_or(("", alias));
        let is_clone = |volume: &&Value| {
            text(volume, "alias").starts_with(&format!("{pool}/")) && volume["base_snapshot"] == name
        };
        let children = elements(&all).iter().filter(is_clone).map(|volume| text(volume, "alias").to_owned());
        let used_by = children.chain(users.in_brief(text(snapshot, "uuid")));
        vec![
            alias.to_owned(),
            Size(number(snapshot, "size")).to_string(),
            used_by.collect::<Vec<_>>().join(", "),
        ]
    };
    out.print(&json!(snapshots), || match &*snapshots {
        [] => NONE.to_owned(),
        snapshots => {
            out.table(&[("SNAPSHOT", false), ("SIZE", true), ("USED BY", false)], snapshots.iter().map(row))
        }
    })
}

fn revert(
    volume: &str,
    snapshot: &str,
    discard_changes: bool,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    if !discard_changes {
        return Err(Error::Usage(format!(
            "what was written to '{volume}' since '{snapshot}' would be lost; to do so: --discard-changes"
        )));
    }
    let reverted = client.call("aryk_volume_revert", json!({"volume": volume, "snapshot": snapshot}));
    reverted.map_err(|error| error.hinted(&super::volume::HINTS))?;
    let found = find(client, volume)?;
    out.print(&found, || format!("Volume '{volume}' has the content of '{snapshot}' now."))
}
