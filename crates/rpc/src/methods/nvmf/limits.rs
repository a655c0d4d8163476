//! `nvmf_subsystem_set_host_limits`: how much each host may transfer. Control context.
//!
//! The limits of a host, and those of each host, have one note each, among those of the target.

use super::object::{forget, made};
use super::parse_nqn;
use crate::methods::qos::{Limits, limit_params, nonzero_limits};
use crate::methods::{Control, Error, Phase, Table};
use aryk_bdev::RateLimits;
use aryk_nvmf::HostLimits;
use schemars::JsonSchema;
use serde::Serialize;

pub(crate) const SET_HOST_LIMITS: &str = "nvmf_subsystem_set_host_limits";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        SET_HOST_LIMITS,
        Phase::RunTime,
        "Sets the rate limits of a host, or of each host, for all disks of a subsystem together. Omitted limits are unchanged; 0 removes a limit.",
        set_host_limits,
    );
}

limit_params! {
    /// Parameters of `nvmf_subsystem_set_host_limits`, a method of Aryk only.
    struct SetHostLimits {
        /// Name of the subsystem.
        nqn: String,
        /// Name of the host. Default: each host that has no limits of its own, for itself.
        host: Option<String>,
        /// Name of the target. Default: `nvmf_tgt`.
        tgt_name: Option<String>,
    }
}

/// The note: the call that sets all limits which are not 0.
#[derive(Debug, Serialize)]
struct Note {
    nqn: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tgt_name: Option<String>,
    #[serde(flatten, serialize_with = "nonzero_limits")]
    limits: Limits,
}

async fn set_host_limits(control: &Control, p: SetHostLimits) -> Result<bool, Error> {
    let named = control.nvmf.find(p.tgt_name.as_deref())?;
    let host = p.host.as_deref().map(parse_nqn).transpose()?;
    let HostLimits { each, named: of_hosts } = named.target.find(&p.nqn)?.limits;
    let before = match &host {
        None => each,
        Some(host) => of_hosts.get(host).copied().unwrap_or_default(),
    };
    let limits = p.change().apply(before)?;
    named.target.limit_hosts(&p.nqn, host.as_ref(), limits).await?;
    let note = Note { nqn: p.nqn, host: p.host, tgt_name: p.tgt_name, limits: limits.into() };
    if limits.is_unlimited() {
        forget(control, SET_HOST_LIMITS, &note);
    } else {
        made(control, SET_HOST_LIMITS, &note);
    }
    Ok(true)
}

/// Limits of a host of a subsystem.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct HostLimitsReply {
    /// Name of the host. Without one: each host that has no limits of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    assigned_rate_limits: Limits,
}

/// The limits of a subsystem's hosts; `None`: there are none.
pub(super) fn describe(limits: &HostLimits) -> Option<Vec<HostLimitsReply>> {
    let reply = |host, limits: RateLimits| HostLimitsReply { host, assigned_rate_limits: limits.into() };
    let each = Some(limits.each).filter(|each| !each.is_unlimited()).map(|each| reply(None, each));
    let of_hosts = limits.named.iter().map(|(host, &limits)| reply(Some(host.to_string()), limits));
    let all: Vec<HostLimitsReply> = each.into_iter().chain(of_hosts).collect();
    (!all.is_empty()).then_some(all)
}
