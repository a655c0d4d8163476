//! `aryk apply` and `aryk export`: all disks and controllers, in a file.
//!
//! What is there is asked of the daemon each time, and nothing is kept in between.

pub mod call;
mod check;
mod document;
mod limits;
mod plan;

use crate::absent;
use crate::cli::ApplyArgs;
use crate::client::Client;
use crate::commands::{elements, number};
use crate::error::{BUSY, Error, NOT_ALLOWED};
use crate::output::Output;
use crate::reference;
use crate::users::{Place, Users, front_end, places_of};
use call::{Call, Kind, TARGET_NUMBER};
use plan::{Action, Existing, Plan, Step, plan};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// What `--plan` ends with if there is something to do.
const SOMETHING_TO_DO: u8 = 2;

/// Calls of SPDK's files that only wait.
const WAITS: [&str; 1] = ["bdev_wait_for_examine"];

/// Whether it is a call of SPDK's files that changes nothing here. The daemon takes it, unless it asks for what it does not have.
fn is_idle(call: &Call) -> bool {
    match call.method.as_str() {
        // There is nothing else to choose.
        "sock_set_default_impl" => true,
        // Kept, told and saved: a setting.
        "vhost_controller_set_coalescing" => false,
        method => reference::without_effect(method).is_some(),
    }
}

pub fn apply(args: &ApplyArgs, client: &mut Client, out: &Output) -> Result<ExitCode, Error> {
    let wanted = read(&args.file)?;
    let (wanted, skipped) = known(wanted, client)?;
    for method in &skipped {
        eprintln!("aryk: this daemon has no method {method}: left out");
    }
    let (idle, wanted): (Vec<_>, Vec<_>) = wanted.into_iter().partition(is_idle);
    let users = Users::ask(client)?;
    let Found { existing, settings, absent } = look(&users, client)?;
    let mut plan = plan(&wanted, &existing, &settings, args.prune);
    if args.prune {
        plan.prune_absent(&absent, &wanted);
    }
    if plan.conflicts.is_empty() {
        plan.conflicts = check::impossible(&plan.steps, &existing, &client.root());
    }
    plan.conflicts.extend(refused(&idle, client)?);
    plan.conflicts.extend(held_controllers(&plan.steps, &users));
    absent::refuse_replacing(new_disks(&plan.steps), client)?;
    let (in_use, last_data) = (in_use(&plan.steps, &users), last_data(&plan.steps, &users));
    refuse(&plan, &in_use, &last_data, args)?;
    let without_effect: BTreeSet<&str> = idle.iter().map(|call| call.method.as_str()).collect();
    if !without_effect.is_empty() {
        let methods: Vec<&str> = without_effect.iter().copied().collect();
        eprintln!("aryk: without effect here: {}", methods.join(", "));
    }
    let report = json!({"steps": plan.steps, "replaces": plan.replaces, "in_use": in_use,
        "last_data": last_data, "skipped": skipped, "without_effect": without_effect, "applied": !args.plan});
    if plan.steps.is_empty() {
        out.print(&report, || "Nothing to do: all is as the file says.".into())?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.plan {
        let warnings =
            plan.replaces.iter().chain(&in_use).chain(&last_data).map(|warning| format!("! {warning}"));
        let lines: Vec<_> = plan.steps.iter().map(line).chain(warnings).collect();
        out.print(&report, || format!("{}\n\n{} to do.", lines.join("\n"), plan.steps.len()))?;
        return Ok(ExitCode::from(SOMETHING_TO_DO));
    }
    for step in &plan.steps {
        if step.action == Action::Forget {
            absent::refuse_what_is_back(|now| removes(step, now), &step.name, client)?;
        }
        let done = client.call(&step.call.method, Value::Object(step.call.params.clone()));
        let done = done.map_err(|error| error.hinted(hints(step)));
        done.map_err(|source| Error::Step { step: line(step), source: Box::new(source) })?;
        if !out.json {
            out.say(&line(step))?;
        }
    }
    out.print(&report, || format!("\nDone: {}.", plan.steps.len()))?;
    for absent in absent::ask(client)? {
        eprintln!("aryk: not there yet: {}", absent::why(&absent));
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether a step removes this object.
fn removes(step: &Step, object: &Value) -> bool {
    let made = Call::new(object["method"].as_str().unwrap_or_default(), object["params"].clone());
    let params = || Value::Object(step.call.params.clone());
    made.undo().is_some_and(|(method, undone)| method == step.call.method && undone == params())
}

/// Writes what there is, and what is configured and not there.
pub fn export(client: &mut Client, out: &Output) -> Result<(), Error> {
    let Found { existing, settings, absent } = look(&Users::ask(client)?, client)?;
    let there = existing.iter().map(|e| e.call.clone());
    let calls: Vec<Call> = settings.into_iter().chain(there).chain(absent).collect();
    let bytes = |name: &str| existing.iter().find(|e| e.kind == Kind::Disk && e.name == name)?.bytes;
    let text = document::write(&calls, bytes, out.json).map_err(Error::File)?;
    out.say(text.trim_end())?;
    for absent in absent::ask(client)? {
        eprintln!("aryk: not there, and written all the same: {}", absent::why(&absent));
    }
    Ok(())
}

fn read(file: &Path) -> Result<Vec<Call>, Error> {
    let is_stdin = file == Path::new("-");
    let text = if is_stdin { io::read_to_string(io::stdin()) } else { std::fs::read_to_string(file) };
    let text = text.map_err(|e| Error::File(format!("cannot read {}: {e}", file.display())))?;
    let absolute = std::path::absolute(file)?;
    let dir = match absolute.parent() {
        Some(dir) if !is_stdin => dir.to_owned(),
        _ => std::env::current_dir()?,
    };
    document::parse(&text, &dir).map_err(|e| Error::File(format!("{}: {e}", file.display())))
}

/// Those calls that the daemon has, and the methods of the others.
fn known(wanted: Vec<Call>, client: &mut Client) -> Result<(Vec<Call>, BTreeSet<String>), Error> {
    let methods = client.call("rpc_get_methods", json!({}))?;
    let has = |call: &Call| elements(&methods).iter().any(|method| *method == call.method);
    let all = wanted.into_iter().filter(|call| !WAITS.contains(&call.method.as_str()));
    let (known, unknown): (Vec<_>, Vec<_>) = all.partition(has);
    Ok((known, unknown.into_iter().map(|call| call.method).collect()))
}

/// What the daemon does not take of calls that have no effect: each in a line. Calls of others, who may only read, it does not look at.
fn refused(idle: &[Call], client: &mut Client) -> Result<Vec<String>, Error> {
    let mut reasons = Vec::new();
    for Call { method, params } in idle {
        match client.call(method, Value::Object(params.clone())) {
            Ok(_) | Err(Error::Refused { code: NOT_ALLOWED, .. }) => {}
            Err(refused @ Error::Refused { .. }) => {
                reasons.push(format!(
                    "{method}: {refused}: take it out of the file, or leave it at SPDK's default"
                ));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(reasons)
}

/// SPDK's way, which the daemon has too: a controller whose disks come and go is there for as long as a VM is connected.
fn held_controllers(steps: &[Step], users: &Users) -> Vec<String> {
    let removed = steps.iter().filter(|s| (s.action, s.kind) == (Action::Remove, Kind::Controller));
    let line = |step: &Step| {
        let controller = users.controller(&step.name).filter(|c| c["backend_specific"]["scsi"].is_array())?;
        let name = &step.name;
        Some(format!(
            "controller '{name}': {}: shut it down first, for a SCSI controller cannot be removed under a VM",
            front_end(controller)?
        ))
    };
    removed.filter_map(line).collect()
}

/// What the daemon has.
struct Found {
    /// The objects that there are, in the order in which they were made.
    existing: Vec<Existing>,
    settings: Vec<Call>,
    /// What would make the objects that are configured and not there.
    absent: Vec<Call>,
}

fn look(users: &Users, client: &mut Client) -> Result<Found, Error> {
    let mut config = client.call("save_config", json!({}))?;
    let (mut existing, mut settings, mut absent) = (Vec::new(), Vec::new(), Vec::new());
    for subsystem in config["subsystems"].as_array_mut().into_iter().flatten() {
        for value in subsystem["config"].as_array_mut().into_iter().flatten() {
            let strange =
                |e: serde_json::Error| Error::Protocol(format!("saves a strange configuration: {e}"));
            let call: Call = serde_json::from_value(value.take()).map_err(strange)?;
            let Some(name) = call.name() else {
                settings.push(call);
                continue;
            };
            let kind = call.kind();
            let found = match kind {
                Kind::Controller => users.controller(&name).map(|found| {
                    let block = &found["backend_specific"]["block"];
                    (None, block.is_object() && block["bdev"].is_null())
                }),
                Kind::Target => {
                    let owner = call.owner().and_then(|owner| users.controller(owner));
                    let number = call.params[TARGET_NUMBER].as_u64();
                    let is_there = |owner: &Value| places_of(owner).any(|place| place.target == number);
                    owner.filter(|owner| is_there(owner)).map(|_| (None, false))
                }
                Kind::Disk | Kind::Setting => match users.disk(&name) {
                    Some(found) => {
                        let bytes = number(found, "block_size").saturating_mul(number(found, "num_blocks"));
                        Some((Some(bytes), false))
                    }
                    // Its base is not there, or in use: it is asked for anew, and may wait again.
                    None => call.base().map(|_| (None, true)),
                },
            };
            let Some((bytes, is_orphan)) = found else {
                absent.push(call);
                continue;
            };
            existing.push(Existing { kind, name, call, bytes, is_orphan });
        }
    }
    Ok(Found { existing: in_order_made(existing), settings, absent })
}

/// As SPDK, the daemon saves disks that are made of others first, and the last made first of all.
fn in_order_made(saved: Vec<Existing>) -> Vec<Existing> {
    let (disks, controllers): (Vec<_>, Vec<_>) = saved.into_iter().partition(|e| e.kind == Kind::Disk);
    let (above, below): (Vec<_>, Vec<_>) = disks.into_iter().partition(|e| e.call.base().is_some());
    below.into_iter().chain(above.into_iter().rev()).chain(controllers).collect()
}

/// What is taken from those who use it, in lines for people: controllers of VMs that are connected, and disks whose controllers stay. With a disk
/// goes all that is made of it.
fn in_use(steps: &[Step], users: &Users) -> Vec<String> {
    let removed = |kind| steps.iter().filter(move |step| step.action == Action::Remove && step.kind == kind);
    let goes = |place: &Place| {
        let target = place.target.map(|number| format!("{}/{number}", place.name()));
        removed(Kind::Controller).any(|step| step.name == place.name())
            || removed(Kind::Target).any(|step| Some(&step.name) == target.as_ref())
    };
    let all = elements(&users.controllers).iter().flat_map(places_of);
    let connected = all.filter(|place| goes(place) && place.is_connected());
    let disks: BTreeSet<&str> = removed(Kind::Disk)
        .flat_map(|step| users.made_of(&step.name).into_iter().chain([step.name.as_str()]))
        .collect();
    let kept = disks.into_iter().flat_map(|disk| users.places(disk)).filter(|place| !goes(place));
    connected.chain(kept).map(|place| format!("disk '{}': {place}", place.disk)).collect()
}

/// Whose data ends with a step, in lines for people: the daemon closes a file that is deleted.
fn last_data(steps: &[Step], users: &Users) -> Vec<String> {
    let removed = steps.iter().filter(|step| (step.action, step.kind) == (Action::Remove, Kind::Disk));
    removed.filter_map(|step| users.last_data(users.disk(&step.name)?)).collect()
}

/// The calls that make disks, but for those that take the place of one that goes.
fn new_disks(steps: &[Step]) -> impl Iterator<Item = &Call> {
    let goes = |disk: &Step| {
        steps.iter().any(|s| (s.action, s.kind) == (Action::Remove, Kind::Disk) && s.name == disk.name)
    };
    let made = steps.iter().filter(|step| (step.action, step.kind) == (Action::Create, Kind::Disk));
    made.filter(move |step| !goes(step)).map(|step| &step.call)
}

/// What to do when a step is refused.
const fn hints(step: &Step) -> &'static [(i64, &'static str)] {
    match (step.action, step.kind) {
        (Action::Create, Kind::Controller) => &[(
            BUSY,
            "Two VMs destroy each other's files, unless their file system is made for clusters: then write shared = true for both controllers.",
        )],
        _ => &[],
    }
}

fn refuse(plan: &Plan, in_use: &[String], last_data: &[String], args: &ApplyArgs) -> Result<(), Error> {
    if !plan.conflicts.is_empty() {
        return Err(Error::File(plan.conflicts.join("\n      ")));
    }
    if !plan.replaces.is_empty() && !args.replace && !args.plan {
        return Err(Error::Replaces(plan.replaces.join("\n  ")));
    }
    if args.force || args.plan {
        return Ok(());
    }
    let what = "this takes disks from those who use them".into();
    let hint = "Shut these VMs down first, or take the disks away all the same: --force. --plan shows all that would be done.";
    Error::in_use(what, in_use.to_vec(), hint, last_data.to_vec()).map_or(Ok(()), Err)
}

fn line(step: &Step) -> String {
    let sign = match step.action {
        Action::Create => '+',
        Action::Remove | Action::Forget => '-',
        Action::Grow | Action::Set => '~',
    };
    format!("{sign} {} {}  ({})", step.kind.name(), step.name, step.why)
}

#[cfg(test)]
mod tests;
