//! The notes of targets' objects: their names, what they need, and how an object is removed that could not be stored. Control
//! context.

use super::limits::SET_HOST_LIMITS;
use super::mdns::{self, PUBLISH};
use super::subsystem::{ADD_HOST, ADD_LISTENER, ADD_NS, CREATE_SUBSYSTEM, NS_ADD_HOST, SET_STATE};
use super::{
    ADD_REFERRAL, CREATE_TARGET, CREATE_TRANSPORT, DEFAULT_TARGET, ListenAddress, PORT, SET_CRDT,
    SET_MAX_SUBSYSTEMS, parse_nqn,
};
use crate::config::{Call, Subsystem};
use crate::{Control, Error};
use aryk_nvmf::{Address, Transport};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The target that a call names. `None`: `nvmf_tgt`, whether the call names it or not.
fn target_of(params: &Value) -> Option<&str> {
    params["tgt_name"].as_str().filter(|name| *name != DEFAULT_TARGET)
}

/// The name of the object that a call creates.
pub(crate) fn object(method: &str, params: &Value) -> Option<String> {
    let text = |param: &str| params[param].as_str();
    let name = match method {
        CREATE_TARGET => return Some(format!("target {}", text("name")?)),
        SET_MAX_SUBSYSTEMS => return Some("number of subsystems".into()),
        SET_CRDT => return Some("retry delays".into()),
        PUBLISH => "announcement".into(),
        CREATE_TRANSPORT => format!("transport {}", text("trtype")?.to_uppercase()),
        ADD_REFERRAL => {
            let address = address(&params["address"])?;
            format!("referral {address} to {}", text("subnqn").unwrap_or("any subsystem"))
        }
        CREATE_SUBSYSTEM => format!("subsystem {}", text("nqn")?),
        ADD_HOST => format!("host {} of {}", text("host")?, text("nqn")?),
        SET_HOST_LIMITS => match text("host") {
            Some(host) => format!("limits of host {host} of {}", text("nqn")?),
            None => format!("limits of each host of {}", text("nqn")?),
        },
        ADD_NS => format!("namespace {} of {}", params["namespace"]["nsid"].as_u64()?, text("nqn")?),
        NS_ADD_HOST => {
            let nsid = params["nsid"].as_u64()?;
            format!("host {} of namespace {nsid} of {}", text("host")?, text("nqn")?)
        }
        ADD_LISTENER => format!("listener {} of {}", address(&params["listen_address"])?, text("nqn")?),
        SET_STATE => {
            let (group, address) = (params["anagrpid"].as_u64()?, address(&params["listen_address"])?);
            format!("group {group} at {address} of {}", text("nqn")?)
        }
        _ => return None,
    };
    Some(match target_of(params) {
        Some(target) => format!("{name} in {target}"),
        None => name,
    })
}

/// The name of a subsystem's note.
pub(super) fn subsystem_name(target: Option<&str>, nqn: &str) -> String {
    object(CREATE_SUBSYSTEM, &json!({"tgt_name": target, "nqn": nqn})).unwrap_or_default()
}

/// The name of the note of a host that may connect.
pub(super) fn host_name(target: Option<&str>, nqn: &str, host: &str) -> String {
    object(ADD_HOST, &json!({"tgt_name": target, "nqn": nqn, "host": host})).unwrap_or_default()
}

/// The name of a namespace's note.
pub(super) fn namespace_name(target: Option<&str>, nqn: &str, nsid: u64) -> String {
    object(ADD_NS, &json!({"tgt_name": target, "nqn": nqn, "namespace": {"nsid": nsid}})).unwrap_or_default()
}

/// The name of the note of a target's transport.
fn transport_name(transport: Transport, params: &Value) -> String {
    let params = json!({"trtype": transport.name(), "tgt_name": params["tgt_name"]});
    object(CREATE_TRANSPORT, &params).unwrap_or_default()
}

fn address(value: &Value) -> Option<Address> {
    ListenAddress::deserialize(value).ok()?.parse(PORT).ok()
}

/// Notes the object that a call has created.
pub(super) fn made(control: &Control, method: &'static str, params: &impl Serialize) {
    let params = serde_json::to_value(params).expect("parameters are valid JSON");
    let name = object(method, &params).expect("the call creates an object");
    control.config.made(Subsystem::Nvmf, &name, method, &params);
}

/// Removes the note of the object that this call has created.
pub(super) fn forget(control: &Control, method: &str, params: &impl Serialize) -> bool {
    let params = serde_json::to_value(params).expect("parameters are valid JSON");
    object(method, &params).is_some_and(|name| control.config.forget(Subsystem::Nvmf, &name))
}

/// Whether a call creates an object of a target.
pub(super) fn is_of_target(call: &Call, target: &str) -> bool {
    let param = if call.method == CREATE_TARGET { "name" } else { "tgt_name" };
    call.params[param] == target
}

/// Whether a call creates a subsystem of a target, or a part of it.
pub(super) fn is_of_subsystem(call: &Call, target: Option<&str>, nqn: &str) -> bool {
    target_of(&call.params) == target.filter(|name| *name != DEFAULT_TARGET) && call.params["nqn"] == nqn
}

/// Whether a call creates a listener of a subsystem, or sets a state of its paths.
pub(super) fn is_of_listener(call: &Call, target: Option<&str>, nqn: &str, listener: Address) -> bool {
    is_of_subsystem(call, target, nqn)
        && address(&call.params["listen_address"]).is_some_and(|known| known == listener)
}

/// The namespace that a call concerns: its target, subsystem and identifier.
fn namespace(call: &Call) -> Option<(Option<&str>, &str, u64)> {
    let nsid = match &*call.method {
        ADD_NS => &call.params["namespace"]["nsid"],
        NS_ADD_HOST => &call.params["nsid"],
        _ => return None,
    };
    Some((target_of(&call.params), call.params["nqn"].as_str()?, nsid.as_u64()?))
}

/// Whether a call concerns one of the namespaces that the others concern.
pub(crate) fn is_of_one<'a>(call: &Call, others: impl IntoIterator<Item = &'a Call>) -> bool {
    namespace(call).is_some_and(|this| others.into_iter().any(|other| namespace(other) == Some(this)))
}

/// Removes the notes of namespaces that no longer exist, and of the hosts that saw them.
pub(crate) fn forget_gone(control: &Control) {
    let mut existing = BTreeSet::new();
    for (name, named) in control.nvmf.targets.borrow().iter() {
        let target = Some(name.clone()).filter(|name| name != DEFAULT_TARGET);
        for info in named.target.list() {
            let nqn = info.made_of.nqn.to_string();
            existing.extend(info.namespaces.keys().map(|&nsid| (target.clone(), nqn.clone(), nsid.into())));
        }
    }
    let is_there = |(target, nqn, nsid): (Option<&str>, &str, u64)| {
        existing.contains(&(target.map(str::to_owned), nqn.to_owned(), nsid))
    };
    control.config.retain_that(Subsystem::Nvmf, |call| namespace(call).is_none_or(is_there));
    super::reservations::forget_gone(control);
}

/// The disk of a namespace.
pub(crate) fn disk_of(call: &Call) -> Option<&str> {
    match &*call.method {
        ADD_NS => call.params["namespace"]["bdev_name"].as_str(),
        _ => None,
    }
}

/// What an object needs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Needs<'a> {
    /// The object of this name.
    Object(String),
    /// The disk of this name.
    Disk(&'a str),
    /// All namespaces and hosts of a subsystem, which are those with this [`place`].
    Parts(String),
}

/// A subsystem of a target. `None`: the call does not add a namespace or a host, nor limit hosts.
pub(crate) fn place(call: &Call) -> Option<String> {
    matches!(&*call.method, ADD_NS | NS_ADD_HOST | ADD_HOST | SET_HOST_LIMITS).then(|| subsystem_of(call))
}

fn subsystem_of(call: &Call) -> String {
    object(CREATE_SUBSYSTEM, &call.params).unwrap_or_default()
}

/// What the object of a call needs.
pub(crate) fn needs(call: &Call) -> Vec<Needs<'_>> {
    let subsystem = || Needs::Object(subsystem_of(call));
    let mut needs = match &*call.method {
        // One of them may not exist.
        CREATE_SUBSYSTEM => {
            let transports = Transport::ALL.into_iter();
            transports.map(|transport| Needs::Object(transport_name(transport, &call.params))).collect()
        }
        ADD_HOST | SET_HOST_LIMITS => vec![subsystem()],
        ADD_NS => disk_of(call).map(Needs::Disk).into_iter().chain([subsystem()]).collect(),
        NS_ADD_HOST => {
            let name = namespace(call).map(|(target, nqn, nsid)| namespace_name(target, nqn, nsid));
            name.map(Needs::Object).into_iter().collect()
        }
        ADD_LISTENER => vec![subsystem(), Needs::Parts(subsystem_of(call))],
        SET_STATE => vec![Needs::Object(object(ADD_LISTENER, &call.params).unwrap_or_default())],
        _ => Vec::new(),
    };
    let target = target_of(&call.params);
    needs.extend(target.map(|target| Needs::Object(format!("target {target}"))));
    needs
}

/// Removes the object of a call.
pub(super) async fn unmake(control: &Control, call: &Call) -> Result<(), Error> {
    let params = &call.params;
    let named = control.nvmf.find(params["tgt_name"].as_str())?;
    let (target, nqn) = (&named.target, params["nqn"].as_str().unwrap_or_default());
    let undone = match &*call.method {
        PUBLISH => {
            mdns::end(control, &named).await;
            Ok(())
        }
        CREATE_SUBSYSTEM => target.remove_subsystem(nqn).await,
        ADD_NS => {
            let nsid = params["namespace"]["nsid"].as_u64().unwrap_or_default();
            target.remove_namespace(nqn, nsid as u32).await
        }
        ADD_HOST => target.remove_host(nqn, &parse_nqn(params["host"].as_str().unwrap_or_default())?).await,
        NS_ADD_HOST => {
            let host = parse_nqn(params["host"].as_str().unwrap_or_default())?;
            target.hide_from(nqn, params["nsid"].as_u64().unwrap_or_default() as u32, &host).await
        }
        ADD_LISTENER => {
            let address = ListenAddress::deserialize(&params["listen_address"]).expect("a valid note");
            target.stop_listening(nqn, address.parse(PORT)?).await
        }
        // Settings, which do no harm.
        _ => Ok(()),
    };
    forget(control, &call.method, params);
    super::reservations::forget_gone(control);
    Ok(undone?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(method: &'static str, params: Value) -> Call {
        Call { method: method.into(), params }
    }

    #[test]
    fn objects_need_what_they_are_part_of() {
        let subsystem = call(CREATE_SUBSYSTEM, json!({"nqn": "nqn.a"}));
        let namespace = call(ADD_NS, json!({"nqn": "nqn.a", "namespace": {"nsid": 2, "bdev_name": "d"}}));
        let host = call(NS_ADD_HOST, json!({"nqn": "nqn.a", "nsid": 2, "host": "nqn.h", "tgt_name": "t"}));
        let address = json!({"trtype": "tcp", "traddr": "::1", "trsvcid": "4421"});
        let listener = call(ADD_LISTENER, json!({"nqn": "nqn.a", "listen_address": address}));
        let name = |call: &Call| object(&call.method, &call.params).unwrap();
        assert_eq!(name(&subsystem), "subsystem nqn.a");
        assert_eq!(name(&namespace), "namespace 2 of nqn.a");
        assert_eq!(name(&listener), "listener [::1]:4421 of nqn.a");
        let of = |text: &str| Needs::Object(text.into());
        assert_eq!(needs(&namespace), [Needs::Disk("d"), of("subsystem nqn.a")]);
        assert_eq!(needs(&host), [of("namespace 2 of nqn.a in t"), of("target t")]);
        assert_eq!(needs(&listener), [of("subsystem nqn.a"), Needs::Parts("subsystem nqn.a".into())]);
        assert_eq!(place(&namespace), Some("subsystem nqn.a".into()));
        assert_eq!(place(&listener), None);
        let by_name = call(CREATE_SUBSYSTEM, json!({"nqn": "nqn.a", "tgt_name": DEFAULT_TARGET}));
        assert_eq!(name(&by_name), name(&subsystem), "the default target has two names");
        assert!(is_of_subsystem(&by_name, None, "nqn.a"));
        assert!(is_of_subsystem(&subsystem, Some(DEFAULT_TARGET), "nqn.a"));
    }
}
