//! `aryk apply` and `aryk export`: all disks and controllers in a file.
//!
//! The present state is read from the daemon each time; no state is kept between runs.

pub mod call;
mod check;
mod document;
pub mod limits;
mod plan;

use crate::absent;
use crate::cli::ApplyArgs;
use crate::client::Client;
use crate::commands::{elements, number};
use crate::error::{BUSY, Error, NOT_ALLOWED};
use crate::output::Output;
use crate::reference;
use crate::users::{Place, Users, front_end, places_of};
use call::{Call, KEY, Kind, TARGET_NUMBER};
use plan::{Action, Existing, Plan, Step, plan};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Exit code of `--plan` if there are steps to do.
const STEPS_TO_DO: u8 = 2;

/// Calls in SPDK's files that only wait.
const WAIT_METHODS: [&str; 1] = ["bdev_wait_for_examine"];

/// Whether the call, of an SPDK file, has no effect in this daemon. The daemon accepts it unless it requests something that the
/// daemon lacks.
fn has_no_effect(call: &Call) -> bool {
    match call.method.as_str() {
        // The daemon has no alternative to choose.
        "sock_set_default_impl" => true,
        // They concern the search of disks at the start of a daemon, and this one runs.
        "bdev_examine" | "bdev_set_options" => true,
        // A setting that the daemon stores, reports and saves.
        "vhost_controller_set_coalescing" => false,
        method => reference::without_effect(method).is_some(),
    }
}

/// The message of the daemon's replies about objects that exist. Their codes differ by method, as SPDK's do.
const EXISTS: &str = "File exists";

pub fn apply(args: &ApplyArgs, client: &mut Client, out: &Output) -> Result<ExitCode, Error> {
    let wanted = read(&args.file)?;
    let (wanted, skipped) = known(wanted, client)?;
    for method in &skipped {
        eprintln!("aryk: this daemon has no method {method}: skipped");
    }
    let (no_effect, wanted): (Vec<_>, Vec<_>) = wanted.into_iter().partition(has_no_effect);
    let users = Users::read(client)?;
    let DaemonState { existing, mut settings, absent } = read_state(&users, client)?;
    if wanted.iter().any(|call| call.method == KEY) {
        settings.extend(read_keys(client)?);
    }
    let mut plan = plan(&wanted, &existing, &settings, args.prune);
    if args.prune {
        plan.prune_absent(&absent, &wanted);
    }
    if plan.conflicts.is_empty() {
        plan.conflicts = check::impossible(&plan.steps, &existing, &client.root());
    }
    plan.conflicts.extend(refused(&no_effect, client)?);
    plan.conflicts.extend(held_controllers(&plan.steps, &users));
    absent::refuse_replacing(new_disks(&plan.steps), client)?;
    let (in_use, last_data) = (in_use(&plan.steps, &users), last_data(&plan.steps, &users));
    refuse(&plan, &in_use, &last_data, args)?;
    let without_effect: BTreeSet<&str> = no_effect.iter().map(|call| call.method.as_str()).collect();
    if !without_effect.is_empty() {
        let methods: Vec<&str> = without_effect.iter().copied().collect();
        eprintln!("aryk: without effect here: {}", methods.join(", "));
    }
    let report = json!({"steps": plan.steps, "replaces": plan.replaces, "in_use": in_use,
        "last_data": last_data, "skipped": skipped, "without_effect": without_effect, "applied": !args.plan});
    if plan.steps.is_empty() {
        out.print(&report, || "Nothing to do: the daemon matches the file.".into())?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.plan {
        let warnings =
            plan.replaces.iter().chain(&in_use).chain(&last_data).map(|warning| format!("! {warning}"));
        let lines: Vec<_> = plan.steps.iter().map(line).chain(warnings).collect();
        out.print(&report, || format!("{}\n\n{} to do.", lines.join("\n"), plan.steps.len()))?;
        return Ok(ExitCode::from(STEPS_TO_DO));
    }
    for step in &plan.steps {
        if step.action == Action::Forget {
            absent::ensure_still_absent(|now| removes(step, now), &step.name, client)?;
        }
        let done = client.call(&step.call.method, Value::Object(step.call.params.clone()));
        let done = done.or_else(|error| created_by_daemon(step, &absent, error));
        let done = done.map_err(|error| error.hinted(hints(step)));
        done.map_err(|source| Error::Step { step: line(step), source: Box::new(source) })?;
        if !out.json {
            out.print_line(&line(step))?;
        }
    }
    out.print(&report, || format!("\nDone: {}.", plan.steps.len()))?;
    for absent in absent::read(client)? {
        eprintln!("aryk: absent so far: {}", absent::why(&absent));
    }
    Ok(ExitCode::SUCCESS)
}

/// Accepts that an object exists which was absent when the state was read, and which the daemon has created since then from the
/// same call.
fn created_by_daemon(step: &Step, absent: &[Call], error: Error) -> Result<Value, Error> {
    let is_same = |call: &&Call| call.method == step.call.method && step.call.differences(call).is_empty();
    match error {
        Error::Refused { message, .. } if message == EXISTS && absent.iter().any(|call| is_same(&call)) => {
            Ok(Value::Null)
        }
        error => Err(error),
    }
}

/// Whether a step removes this object.
fn removes(step: &Step, object: &Value) -> bool {
    let made = Call::new(object["method"].as_str().unwrap_or_default(), object["params"].clone());
    let params = || Value::Object(step.call.params.clone());
    made.undo().is_some_and(|(method, undone)| method == step.call.method && undone == params())
}

/// Writes a file of all objects, including absent ones.
pub fn export(client: &mut Client, out: &Output) -> Result<(), Error> {
    let DaemonState { existing, settings, absent } = read_state(&Users::read(client)?, client)?;
    let there = existing.iter().map(|e| e.call.clone());
    let calls: Vec<Call> = settings.into_iter().chain(there).chain(absent).collect();
    let bytes = |name: &str| existing.iter().find(|e| e.kind == Kind::Disk && e.name == name)?.bytes;
    let text = document::write(&calls, bytes, out.json).map_err(Error::File)?;
    out.print_line(text.trim_end())?;
    for absent in absent::read(client)? {
        eprintln!("aryk: absent, but in the file: {}", absent::why(&absent));
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

/// The calls whose methods the daemon has, and the other methods.
fn known(wanted: Vec<Call>, client: &mut Client) -> Result<(Vec<Call>, BTreeSet<String>), Error> {
    let methods = client.call("rpc_get_methods", json!({}))?;
    let has = |call: &Call| elements(&methods).iter().any(|method| *method == call.method);
    let all = wanted.into_iter().filter(|call| !WAIT_METHODS.contains(&call.method.as_str()));
    let (known, unknown): (Vec<_>, Vec<_>) = all.partition(has);
    Ok((known, unknown.into_iter().map(|call| call.method).collect()))
}

/// Calls without effect that the daemon refuses, one line each. For clients with read-only rights the daemon does not check them.
fn refused(no_effect: &[Call], client: &mut Client) -> Result<Vec<String>, Error> {
    let mut reasons = Vec::new();
    for Call { method, params } in no_effect {
        match client.call(method, Value::Object(params.clone())) {
            Ok(_) | Err(Error::Refused { code: NOT_ALLOWED, .. }) => {}
            Err(refused @ Error::Refused { .. }) => {
                reasons.push(format!("{method}: {refused}: remove it from the file, or use SPDK's default"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(reasons)
}

/// SPDK's rule, which the daemon shares: a SCSI controller cannot be removed while a VM is connected.
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

/// The daemon's state.
struct DaemonState {
    /// The present objects, in the order of their creation.
    existing: Vec<Existing>,
    settings: Vec<Call>,
    /// The calls that would create the absent objects.
    absent: Vec<Call>,
}

/// The calls that would create the daemon's keys, without key material.
fn read_keys(client: &mut Client) -> Result<Vec<Call>, Error> {
    let keys = client.call("accel_crypto_keys_get", json!({}))?;
    Ok(keys.as_array().into_iter().flatten().map(|key| Call::new(KEY, key.clone())).collect())
}

fn read_state(users: &Users, client: &mut Client) -> Result<DaemonState, Error> {
    let mut config = client.call("save_config", json!({}))?;
    let (mut existing, mut settings, mut absent) = (Vec::new(), Vec::new(), Vec::new());
    for subsystem in config["subsystems"].as_array_mut().into_iter().flatten() {
        for value in subsystem["config"].as_array_mut().into_iter().flatten() {
            let invalid =
                |e: serde_json::Error| Error::Protocol(format!("saves an invalid configuration: {e}"));
            let call: Call = serde_json::from_value(value.take()).map_err(invalid)?;
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
                    // Its base is absent or in use: the call is made again, and may wait again.
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
    Ok(DaemonState { existing: in_creation_order(existing), settings, absent })
}

/// Like SPDK, the daemon saves disks on other disks first, and the newest of them first of all.
fn in_creation_order(saved: Vec<Existing>) -> Vec<Existing> {
    let (disks, controllers): (Vec<_>, Vec<_>) = saved.into_iter().partition(|e| e.kind == Kind::Disk);
    let (above, below): (Vec<_>, Vec<_>) = disks.into_iter().partition(|e| e.call.base().is_some());
    below.into_iter().chain(above.into_iter().rev()).chain(controllers).collect()
}

/// Uses that the plan ends, one line each: controllers with connected VMs, and disks whose controllers stay. Removing a disk also
/// removes the disks on top of it.
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
        .flat_map(|step| users.disks_on_top(&step.name).into_iter().chain([step.name.as_str()]))
        .collect();
    let kept = disks.into_iter().flat_map(|disk| users.places(disk)).filter(|place| !goes(place));
    connected.chain(kept).map(|place| format!("disk '{}': {place}", place.disk)).collect()
}

/// Disks whose data is lost with a step, one line each: the daemon closes a file that is deleted.
fn last_data(steps: &[Step], users: &Users) -> Vec<String> {
    let removed = steps.iter().filter(|step| (step.action, step.kind) == (Action::Remove, Kind::Disk));
    removed.filter_map(|step| users.last_data(users.disk(&step.name)?)).collect()
}

/// The calls that create disks, except those that replace a removed disk.
fn new_disks(steps: &[Step]) -> impl Iterator<Item = &Call> {
    let goes = |disk: &Step| {
        steps.iter().any(|s| (s.action, s.kind) == (Action::Remove, Kind::Disk) && s.name == disk.name)
    };
    let made = steps.iter().filter(|step| (step.action, step.kind) == (Action::Create, Kind::Disk));
    made.filter(move |step| !goes(step)).map(|step| &step.call)
}

/// Hints for a refused step.
const fn hints(step: &Step) -> &'static [(i64, &'static str)] {
    match (step.action, step.kind) {
        (Action::Create, Kind::Controller) => &[(
            BUSY,
            "Two VMs corrupt each other's files unless their file system is a cluster file system: then write shared = true for both controllers.",
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
    let what = "this removes disks that are in use".into();
    let hint =
        "Shut these VMs down first, or remove the disks nevertheless with --force. --plan shows all steps.";
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
