//! Queries about features that every SPDK application has, and Aryk lacks: accelerators, a governor. Control context.
//!
//! Tools that monitor a whole daemon call these methods, and receive empty results. Methods of families that Aryk lacks as a
//! whole, such as NVMe controllers or logical volumes, do not exist here: clients take the presence of such a method as a sign
//! that the family is supported.

use super::{Control, Error, Members, NoParams, Phase, Table};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "framework_get_governor",
        Phase::Any,
        "Reports the CPU frequency governor: always empty, since Aryk does not set frequencies.",
        nothing,
    );
    table.add("accel_get_module_info", Phase::Any, "Lists the acceleration modules: always empty.", none);
    table.add(
        "accel_get_opc_assignments",
        Phase::RunTime,
        "Lists which acceleration module handles which operation: always empty.",
        nothing,
    );
    table.add(
        "accel_get_stats",
        Phase::RunTime,
        "Reports acceleration statistics: all counts are 0.",
        get_accel_stats,
    );
    table.add(
        "framework_disable_cpumask_locks",
        Phase::Any,
        "Without effect: cores are never locked.",
        async |_: &Control, _: NoParams| Ok(true),
    );
    table.add(
        "sock_get_default_impl",
        Phase::Any,
        "Reports the socket implementation, which RPC over HTTP uses: the kernel's.",
        async |_: &Control, _: NoParams| Ok(SockImpl { impl_name: POSIX }),
    );
    table.add(
        "sock_set_default_impl",
        Phase::Any,
        "Sets the socket implementation: only the kernel's, `posix`, exists.",
        set_default_impl,
    );
}

async fn none(_: &Control, _: NoParams) -> Result<Vec<Members>, Error> {
    Ok(Vec::new())
}

async fn nothing(_: &Control, _: NoParams) -> Result<Members, Error> {
    Ok(Members::new())
}

/// Result of `accel_get_stats`.
#[derive(Debug, Serialize, JsonSchema)]
struct AccelStats {
    /// 0.
    sequence_executed: u64,
    /// 0.
    sequence_failed: u64,
    /// Always empty.
    operations: Vec<Members>,
}

async fn get_accel_stats(_: &Control, _: NoParams) -> Result<AccelStats, Error> {
    Ok(AccelStats { sequence_executed: 0, sequence_failed: 0, operations: Vec::new() })
}

/// SPDK's name for the kernel's sockets.
const POSIX: &str = "posix";

/// Result of `sock_get_default_impl`.
#[derive(Debug, Serialize, JsonSchema)]
struct SockImpl {
    /// `posix`.
    impl_name: &'static str,
}

/// Parameters of `sock_set_default_impl`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetSockImpl {
    /// `posix`.
    impl_name: String,
}

async fn set_default_impl(_: &Control, p: SetSockImpl) -> Result<bool, Error> {
    match p.impl_name == POSIX {
        true => Ok(true),
        false => {
            Err(Error::invalid(format!("there is no socket implementation '{}', only {POSIX}", p.impl_name)))
        }
    }
}
