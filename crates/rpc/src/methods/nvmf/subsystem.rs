//! Subsystems, their namespaces, hosts and listeners. Control context.

use super::keys::{KeyNames, is_open, read_tls_key, set_keys, warn_if_open};
use super::object::{
    forget, forget_gone, host_name, is_of_listener, is_of_one, is_of_subsystem, made, namespace_name, place,
    subsystem_name,
};
use super::{ListenAddress, PORT, new_subsystem, parse_nqn, reservations};
use crate::config::{Call, Subsystem};
use crate::methods::{Control, Error, Phase, Table};
use crate::params::CpuMask;
use crate::{journal, methods::vhost::refuse_shared};
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme_fabrics::connect::CONTROLLER_ID_MAX;
use aryk_nvme_fabrics::reservation;
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Channel, NAMESPACES_MAX, NewNamespace, NewSubsystem, Target, Transport};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use tokio::task::spawn_blocking;
use uuid::Uuid;

pub(crate) const CREATE_SUBSYSTEM: &str = "nvmf_create_subsystem";
pub(crate) const ADD_NS: &str = "nvmf_subsystem_add_ns";
pub(crate) const ADD_HOST: &str = "nvmf_subsystem_add_host";
pub(crate) const NS_ADD_HOST: &str = "nvmf_ns_add_host";
pub(crate) const ADD_LISTENER: &str = "nvmf_subsystem_add_listener";
pub(crate) const SET_STATE: &str = "nvmf_subsystem_listener_set_ana_state";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        CREATE_SUBSYSTEM,
        Phase::RunTime,
        "Creates a subsystem, through which hosts reach disks.",
        create_subsystem,
    );
    table.add(
        "nvmf_delete_subsystem",
        Phase::RunTime,
        "Deletes a subsystem; its hosts are disconnected.",
        delete_subsystem,
    );
    table.add(ADD_NS, Phase::RunTime, "Adds a disk as a namespace. The result is its identifier.", add_ns);
    table.add(
        "nvmf_subsystem_remove_ns",
        Phase::RunTime,
        "Removes a namespace, and notifies the hosts.",
        remove_ns,
    );
    table.add(
        "nvmf_subsystem_set_ns_ana_group",
        Phase::RunTime,
        "Moves a namespace to another ANA group.",
        set_ns_ana_group,
    );
    table.add(NS_ADD_HOST, Phase::RunTime, "Shows a hidden namespace to a host.", ns_add_host);
    table.add("nvmf_ns_remove_host", Phase::RunTime, "Hides a namespace from a host.", ns_remove_host);
    table.add(ADD_HOST, Phase::RunTime, "Allows a host to connect to a subsystem.", add_host);
    table.add(
        "nvmf_subsystem_set_keys",
        Phase::RunTime,
        "Sets or removes the secrets with which a host authenticates (DH-HMAC-CHAP), from its next authentication on.",
        set_keys,
    );
    table.add(
        "nvmf_subsystem_remove_host",
        Phase::RunTime,
        "Allows a host no longer to connect to a subsystem, and disconnects it.",
        remove_host,
    );
    table.add(
        "nvmf_subsystem_allow_any_host",
        Phase::RunTime,
        "Sets whether any host may connect to a subsystem. If not, the others than the listed ones are disconnected.",
        allow_any_host,
    );
    table.add(
        ADD_LISTENER,
        Phase::RunTime,
        "Has a subsystem listen at an address. Without TLS, data is not encrypted, and hosts without keys prove nothing.",
        add_listener,
    );
    table.add(
        "nvmf_subsystem_remove_listener",
        Phase::RunTime,
        "Has a subsystem listen no longer at an address; hosts that came through it are disconnected.",
        remove_listener,
    );
    table.add(
        SET_STATE,
        Phase::RunTime,
        "Sets the state of a path for hosts that come through a listener, for one ANA group or for all.",
        set_ana_state,
    );
}

/// Parameters of `nvmf_create_subsystem`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "some parameters are checked and have no effect")]
struct CreateSubsystem {
    /// Name of the new subsystem.
    nqn: String,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    /// Serial number of its controllers, at most 20 characters of ASCII.
    #[serde(skip_serializing_if = "Option::is_none")]
    serial_number: Option<String>,
    /// Model of its controllers, at most 40 characters of ASCII.
    #[serde(skip_serializing_if = "Option::is_none")]
    model_number: Option<String>,
    /// Ignored.
    #[serde(skip_serializing)]
    admin_label: Option<String>,
    /// Namespaces that it can have, at most 256. Default: 32.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_namespaces: Option<u32>,
    /// Any host may connect. Default: only those of `nvmf_subsystem_add_host`.
    #[serde(default)]
    allow_any_host: bool,
    /// Report the states of paths to hosts (ANA).
    #[serde(default)]
    ana_reporting: bool,
    /// The lowest identifier of its controllers.
    #[serde(skip_serializing_if = "Option::is_none")]
    min_cntlid: Option<u16>,
    /// The highest identifier of its controllers.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_cntlid: Option<u16>,
    /// Ignored.
    #[serde(skip_serializing)]
    dmrsl: Option<u32>,
    /// Ignored.
    #[serde(skip_serializing)]
    wzsl: Option<u8>,
    /// Must be false.
    #[serde(default, skip_serializing)]
    passthrough: bool,
    /// Ignored.
    #[serde(skip_serializing)]
    enable_nssr: Option<bool>,
}

/// A text of Identify Controller.
fn identify_text(param: &str, text: Option<&String>, max: usize) -> Result<Option<String>, Error> {
    let is_valid =
        |text: &&String| text.len() <= max && text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    match text {
        Some(text) if !is_valid(&text) => {
            Err(Error::invalid(format!("{param} has at most {max} printable characters of ASCII")))
        }
        text => Ok(text.cloned()),
    }
}

async fn create_subsystem(control: &Control, p: CreateSubsystem) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let new = new_subsystem(parse_nqn(&p.nqn)?);
    let namespaces_max = p.max_namespaces.filter(|&max| max > 0).unwrap_or(new.namespaces_max);
    if namespaces_max > NAMESPACES_MAX {
        return Err(Error::invalid(format!("max_namespaces is at most {NAMESPACES_MAX}")));
    }
    let ids = p.min_cntlid.unwrap_or(1)..=p.max_cntlid.unwrap_or(CONTROLLER_ID_MAX);
    if ids.is_empty() || *ids.start() == 0 || *ids.end() > CONTROLLER_ID_MAX {
        return Err(Error::invalid(format!(
            "controllers have identifiers between 1 and {CONTROLLER_ID_MAX}"
        )));
    }
    if p.passthrough {
        return Err(Error::errno(Errno::NOTSUP, "commands are not passed through to NVMe drives"));
    }
    let subsystems_max = named.subsystems_max.unwrap_or(control.nvmf.subsystems_max.get());
    if named.target.count() as u64 >= u64::from(subsystems_max) {
        return Err(Error::errno(
            Errno::NOSPC,
            format!("the target has {subsystems_max} subsystems already"),
        ));
    }
    control.check_open()?;
    named.target.add_subsystem(NewSubsystem {
        serial: identify_text("serial_number", p.serial_number.as_ref(), 20)?.unwrap_or(new.serial),
        model: identify_text("model_number", p.model_number.as_ref(), 40)?.unwrap_or(new.model),
        allow_any_host: p.allow_any_host,
        namespaces_max,
        controller_ids: ids,
        has_ana: p.ana_reporting,
        nqn: new.nqn,
    })?;
    made(control, CREATE_SUBSYSTEM, &p);
    Ok(true)
}

/// Parameters of methods that name a subsystem.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct OfSubsystem {
    /// Name of the subsystem.
    pub nqn: String,
    /// Name of the target. Default: `nvmf_tgt`.
    pub tgt_name: Option<String>,
}

async fn delete_subsystem(control: &Control, p: OfSubsystem) -> Result<bool, Error> {
    let target = p.tgt_name.as_deref();
    let removed = control.nvmf.find(target)?.target.remove_subsystem(&p.nqn).await;
    let had_note = control.config.forget_that(Subsystem::Nvmf, |call| is_of_subsystem(call, target, &p.nqn));
    reservations::forget_gone(control);
    if !had_note {
        removed?;
    }
    Ok(true)
}

/// A disk as a namespace.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NamespaceParams {
    /// Identifier of the namespace. Default: the lowest that is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    nsid: Option<u32>,
    /// Name, alias or uuid of the disk.
    bdev_name: String,
    /// 32 hexadecimal digits. Default: the UUID.
    #[serde(skip_serializing_if = "Option::is_none")]
    nguid: Option<String>,
    /// 16 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    eui64: Option<String>,
    /// Default: that of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<Uuid>,
    /// Must not exist: reservations are kept in the state directory, without which this must not be given.
    #[serde(skip_serializing_if = "Option::is_none")]
    ptpl_file: Option<String>,
    /// The ANA group. Default: that with the number of the namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    anagrpid: Option<u32>,
    /// Hide the namespace until `nvmf_ns_add_host`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    no_auto_visible: bool,
    /// Ignored: disks have no metadata.
    #[serde(default, skip_serializing)]
    #[expect(dead_code, reason = "the parameter is checked and has no effect")]
    hide_metadata: bool,
}

/// Parameters of `nvmf_subsystem_add_ns`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddNs {
    /// Name of the subsystem.
    nqn: String,
    /// The namespace.
    namespace: NamespaceParams,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
}

/// The bytes of an identifier in hexadecimal digits.
fn identifier<const N: usize>(param: &str, text: Option<&String>) -> Result<Option<[u8; N]>, Error> {
    let Some(text) = text else { return Ok(None) };
    let digits: String = text.chars().filter(|c| !matches!(c, '-' | ':' | '.')).collect();
    let mut bytes = [0; N];
    let is_hexadecimal = digits.len() == 2 * N && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hexadecimal {
        return Err(Error::invalid(format!("{param} has {} hexadecimal digits", 2 * N)));
    }
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).expect("two hexadecimal digits");
    }
    Ok(Some(bytes))
}

/// Refuses a file in which a target of SPDK has kept reservations: to ignore it would let hosts write that these keep out.
async fn check_ptpl_file(file: &str) -> Result<(), Error> {
    let path = file.to_owned();
    let found = spawn_blocking(move || std::fs::symlink_metadata(path)).await;
    match found.unwrap_or_else(|error| Err(error.into())) {
        Ok(_) => Err(Error::errno(
            Errno::EXIST,
            format!(
                "the reservations in {file} are not read: this target keeps its own in the state directory. Remove the file if no \
                 host relies on them any more"
            ),
        )),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(()),
        // One that cannot be seen may be there.
        Err(error) => Err(Error::errno(
            Errno::from_io_error(&error).unwrap_or(Errno::IO),
            format!("whether {file} exists is unknown: {error}"),
        )),
    }
}

async fn add_ns(control: &Control, p: AddNs) -> Result<u32, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let given = &p.namespace;
    if given.ptpl_file.is_some() && !control.config.has_store() {
        return Err(Error::errno(
            Errno::NOTSUP,
            "reservations are kept in a state directory, which the daemon does not have",
        ));
    }
    if let Some(file) = given.ptpl_file.as_ref().filter(|_| !journal::is_restore()) {
        check_ptpl_file(file).await?;
    }
    let mut new = NewNamespace {
        nsid: given.nsid.filter(|&nsid| nsid > 0),
        ids: Descriptors {
            uuid: given.uuid.map(Uuid::into_bytes),
            nguid: identifier("nguid", given.nguid.as_ref())?,
            eui64: identifier("eui64", given.eui64.as_ref())?,
            command_set: None,
        },
        ana_group: given.anagrpid.filter(|&group| group > 0),
        is_hidden: given.no_auto_visible,
        reservations: reservation::State::default(),
    };
    control.check_open()?;
    let bdev = control.disks.find(&given.bdev_name)?;
    // An alias may be another disk's by the next start.
    let bdev_name = bdev.name().to_owned();
    if let Some(nsid) = new.nsid {
        let name = namespace_name(p.tgt_name.as_deref(), &p.nqn, nsid.into());
        new.reservations = control.nvmf.stored(control, &name, bdev.identity().uuid);
    }
    refuse_shared(control, &bdev_name, false)?;
    let nsid = named.target.add_namespace(&p.nqn, &bdev_name, new).await?;
    let namespace = NamespaceParams { nsid: Some(nsid), bdev_name, ..p.namespace };
    made(control, ADD_NS, &AddNs { namespace, ..p });
    Ok(nsid)
}

/// Parameters of methods that name a namespace.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OfNs {
    /// Name of the subsystem.
    nqn: String,
    /// Identifier of the namespace.
    nsid: u32,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
}

async fn remove_ns(control: &Control, p: OfNs) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let name = namespace_name(p.tgt_name.as_deref(), &p.nqn, p.nsid.into());
    let noted = control.config.noted(Subsystem::Nvmf, &name);
    let removed = match control.config.forget_absent(Subsystem::Nvmf, &name) {
        true => {
            // So are the hosts that would see it.
            control.config.forget_that(Subsystem::Nvmf, |call| is_of_one(call, &noted));
            Ok(())
        }
        false => named.target.remove_namespace(&p.nqn, p.nsid).await,
    };
    forget_gone(control);
    Ok(removed.map(|()| true)?)
}

/// Parameters of `nvmf_subsystem_set_ns_ana_group`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetNsAnaGroup {
    /// Name of the subsystem.
    nqn: String,
    /// Identifier of the namespace.
    nsid: u32,
    /// The ANA group.
    anagrpid: u32,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
}

async fn set_ns_ana_group(control: &Control, p: SetNsAnaGroup) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    named.target.set_group(&p.nqn, p.nsid, p.anagrpid).await?;
    let name = namespace_name(p.tgt_name.as_deref(), &p.nqn, p.nsid.into());
    if let Some(params) = control.config.params(Subsystem::Nvmf, &name) {
        let mut namespace = params["namespace"].clone();
        namespace["anagrpid"] = p.anagrpid.into();
        control.config.changed(Subsystem::Nvmf, &name, "namespace", namespace);
    }
    Ok(true)
}

/// Parameters of `nvmf_ns_add_host` and `nvmf_ns_remove_host`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NsHost {
    /// Name of the subsystem.
    nqn: String,
    /// Identifier of the namespace.
    nsid: u32,
    /// Name of the host.
    host: String,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
}

async fn ns_add_host(control: &Control, p: NsHost) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    named.target.show_to(&p.nqn, p.nsid, parse_nqn(&p.host)?).await?;
    made(control, NS_ADD_HOST, &p);
    Ok(true)
}

async fn ns_remove_host(control: &Control, p: NsHost) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let host = parse_nqn(&p.host)?;
    let hidden = named.target.hide_from(&p.nqn, p.nsid, &host).await;
    if !forget(control, NS_ADD_HOST, &p) {
        hidden?;
    }
    Ok(true)
}

/// Parameters of `nvmf_subsystem_add_host`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddHost {
    /// Name of the subsystem.
    nqn: String,
    /// Name of the host.
    host: String,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    /// Name of the secret in the keyring by which the host proves who it is. Default: it need not.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    /// Name of the secret by which the subsystem proves who it is, if the host asks for that; needs `dhchap_key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    dhchap_ctrlr_key: Option<String>,
    /// Name of the key of TLS in the keyring: the host connects through listeners with `secure_channel` only. Default: it
    /// connects through the others only.
    #[serde(skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
}

async fn add_host(control: &Control, p: AddHost) -> Result<bool, Error> {
    let host = parse_nqn(&p.host)?;
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    if named.target.find(&p.nqn)?.hosts.named.contains_key(&host) {
        // It keeps its keys: only `nvmf_subsystem_set_keys` changes them.
        return Ok(true);
    }
    let names = KeyNames { key: p.dhchap_key.as_deref(), controller_key: p.dhchap_ctrlr_key.as_deref() };
    let keys = names.read(control).await?;
    let tls = match &p.psk {
        Some(name) => Some(read_tls_key(control, name, &host, &p.nqn).await?),
        None => None,
    };
    let was_open = is_open(&named.target, &p.nqn);
    named.target.add_host(&p.nqn, host.clone(), keys)?;
    if let Some(tls) = tls {
        named.target.set_tls_key(&p.nqn, host, tls)?;
    }
    warn_if_open(&named.target, &p.nqn, was_open);
    made(control, ADD_HOST, &p);
    Ok(true)
}

/// Parameters of `nvmf_subsystem_remove_host`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveHost {
    /// Name of the subsystem.
    nqn: String,
    /// Name of the host.
    host: String,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
    /// Ignored: the host is disconnected at once, and the call returns when its last request has ended.
    #[expect(dead_code, reason = "the parameter is checked and has no effect")]
    timeout_ms: Option<u64>,
}

async fn remove_host(control: &Control, p: RemoveHost) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    named.target.remove_host(&p.nqn, &parse_nqn(&p.host)?).await?;
    control.config.forget(Subsystem::Nvmf, &host_name(p.tgt_name.as_deref(), &p.nqn, &p.host));
    Ok(true)
}

/// Parameters of `nvmf_subsystem_allow_any_host`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AllowAnyHost {
    /// Name of the subsystem.
    nqn: String,
    /// Whether any host may connect.
    allow_any_host: bool,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
}

async fn allow_any_host(control: &Control, p: AllowAnyHost) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let was_open = is_open(&named.target, &p.nqn);
    named.target.allow_any_host(&p.nqn, p.allow_any_host).await?;
    warn_if_open(&named.target, &p.nqn, was_open);
    let name = subsystem_name(p.tgt_name.as_deref(), &p.nqn);
    control.config.changed(Subsystem::Nvmf, &name, "allow_any_host", p.allow_any_host);
    Ok(true)
}

/// The state of a path; commands on one that is inaccessible fail for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "AnaState")]
pub(super) enum State {
    Optimized,
    NonOptimized,
    Inaccessible,
}

impl From<State> for AnaState {
    fn from(state: State) -> Self {
        match state {
            State::Optimized => Self::Optimized,
            State::NonOptimized => Self::NonOptimized,
            State::Inaccessible => Self::Inaccessible,
        }
    }
}

impl From<AnaState> for State {
    fn from(state: AnaState) -> Self {
        match state {
            AnaState::Optimized => Self::Optimized,
            AnaState::NonOptimized => Self::NonOptimized,
            AnaState::Inaccessible | AnaState::PersistentLoss | AnaState::Change => Self::Inaccessible,
        }
    }
}

/// Parameters of `nvmf_subsystem_add_listener`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddListener {
    /// Name of the subsystem.
    nqn: String,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    /// The address.
    listen_address: ListenAddress,
    /// Connections use TLS, with the keys of the hosts (`psk` of `nvmf_subsystem_add_host`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    secure_channel: bool,
    /// State of the path for hosts that come through this listener. Default: `optimized`.
    #[serde(skip_serializing_if = "Option::is_none")]
    ana_state: Option<State>,
    /// Ignored.
    #[serde(skip_serializing)]
    #[expect(dead_code, reason = "the parameter is checked and has no effect")]
    sock_impl: Option<String>,
    /// Ignored.
    #[serde(skip_serializing)]
    #[expect(dead_code, reason = "the parameter is checked and has no effect")]
    numa_id: Option<i32>,
    /// Aryk only: cores whose reactors may serve the queues of hosts that come through this listener. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpumask: Option<CpuMask>,
}

async fn add_listener(control: &Control, p: AddListener) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let address = p.listen_address.parse(PORT)?;
    if !named.transports.borrow().contains(&address.transport) {
        let name = address.transport.name();
        return Err(Error::invalid(format!(
            "the target does not have the transport {name}: call nvmf_create_transport first"
        )));
    }
    if p.secure_channel && address.transport == Transport::Rdma {
        return Err(Error::invalid("connections of RDMA cannot use TLS"));
    }
    check_whole(control, &p)?;
    control.check_open()?;
    let state = p.ana_state.unwrap_or(State::Optimized).into();
    let channel = if p.secure_channel { Channel::Tls } else { Channel::Plain };
    let address = named.target.listen(&p.nqn, address, state, channel).await?;
    // No host has connected yet.
    named.target.place_queues(&p.nqn, address, p.cpumask.as_ref().map(|mask| mask.0.clone()))?;
    if journal::is_restore() {
        restore_states(control, &named.target, &p, address).await;
    }
    warn_if_open(&named.target, &p.nqn, address.socket.ip().is_loopback());
    made(control, ADD_LISTENER, &AddListener { listen_address: ListenAddress::new(address), ..p });
    Ok(true)
}

/// Sets the stored states of ANA groups at a listener that has just been created again. Their own calls come later: a host that
/// connects before these would use a path that must be inaccessible. Nothing else runs between: no queue exists yet.
async fn restore_states(control: &Control, target: &Target, p: &AddListener, address: Address) {
    let is_state = |call: &Call| {
        call.method == SET_STATE && is_of_listener(call, p.tgt_name.as_deref(), &p.nqn, address)
    };
    for object in control.config.absent_objects_that(is_state) {
        if let Ok(SetAnaState { anagrpid, ana_state, .. }) = SetAnaState::deserialize(&object.call.params) {
            // The object's own call reports a failure.
            let _ = target.set_state(&p.nqn, address, anagrpid, ana_state.into()).await;
        }
    }
}

/// Refuses to listen again after a restart before all namespaces and hosts of the subsystem exist, with their limits: a host that
/// comes too early sees that disks in use are gone.
fn check_whole(control: &Control, p: &AddListener) -> Result<(), Error> {
    if !journal::is_restore() {
        return Ok(());
    }
    let is_part = |call: &Call| place(call).is_some() && is_of_subsystem(call, p.tgt_name.as_deref(), &p.nqn);
    match control.config.absent_objects_that(is_part).first() {
        Some(part) => Err(Error::errno(
            Errno::AGAIN,
            format!("the subsystem waits for its {}, which does not exist yet", part.name),
        )),
        None => Ok(()),
    }
}

/// Parameters of `nvmf_subsystem_remove_listener`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveListener {
    /// Name of the subsystem.
    nqn: String,
    /// Name of the target. Default: `nvmf_tgt`.
    tgt_name: Option<String>,
    /// The address.
    listen_address: ListenAddress,
}

async fn remove_listener(control: &Control, p: RemoveListener) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let address = p.listen_address.parse(PORT)?;
    let target = p.tgt_name.as_deref();
    let stopped = named.target.stop_listening(&p.nqn, address).await;
    let had_note =
        control.config.forget_that(Subsystem::Nvmf, |call| is_of_listener(call, target, &p.nqn, address));
    if !had_note {
        stopped?;
    }
    Ok(true)
}

/// Parameters of `nvmf_subsystem_listener_set_ana_state`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetAnaState {
    /// Name of the subsystem.
    nqn: String,
    /// Name of the target. Default: `nvmf_tgt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    /// The address of the listener.
    listen_address: ListenAddress,
    /// The state.
    ana_state: State,
    /// The ANA group. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    anagrpid: Option<u32>,
}

async fn set_ana_state(control: &Control, p: SetAnaState) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let address = p.listen_address.parse(PORT)?;
    let group = p.anagrpid.filter(|&group| group > 0);
    named.target.set_state(&p.nqn, address, group, p.ana_state.into()).await?;
    let p = SetAnaState { listen_address: ListenAddress::new(address), anagrpid: group, ..p };
    if group.is_some() {
        made(control, SET_STATE, &p);
        return Ok(true);
    }
    let params = serde_json::to_value(&p).expect("parameters are valid JSON");
    let listener = super::object(ADD_LISTENER, &params).unwrap_or_default();
    control.config.changed(Subsystem::Nvmf, &listener, "ana_state", params["ana_state"].clone());
    control.config.forget_that(Subsystem::Nvmf, |call| {
        call.method == SET_STATE && is_of_listener(call, p.tgt_name.as_deref(), &p.nqn, address)
    });
    Ok(true)
}
