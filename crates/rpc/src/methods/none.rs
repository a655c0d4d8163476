//! What SPDK's application has whatever it was built for, and Aryk has none of: keys, PCI devices, accelerators, a governor. Control
//! context.
//!
//! Tools that look at a daemon as a whole ask for these, and are told that there are none. Methods of whole families that are not here,
//! such as NVMe controllers or logical volumes, are not answered so: clients take such a method's name for a sign that the family is there.

use super::{Control, Error, Members, NoParams, Phase, Table};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub(super) fn register(table: &mut Table<Control>) {
    table.add("framework_get_governor", Phase::Any, "Who sets cores' frequencies: not we.", nothing);
    table.add("framework_get_pci_devices", Phase::Any, "The PCI devices that we drive: none.", none);
    table.add("keyring_get_keys", Phase::Any, "The keys that are kept: none.", none);
    table.add("accel_get_module_info", Phase::Any, "The engines that compute on data: none.", none);
    table.add("accel_get_opc_assignments", Phase::RunTime, "Which engine computes what: none.", nothing);
    table.add("accel_get_stats", Phase::RunTime, "What engines have computed: nothing.", get_accel_stats);
    table.add("accel_crypto_keys_get", Phase::RunTime, "The keys for encryption: none.", get_crypto_keys);
    table.add(
        "framework_disable_cpumask_locks",
        Phase::Any,
        "Without effect: cores are never locked.",
        async |_: &Control, _: NoParams| Ok(true),
    );
    table.add(
        "sock_get_default_impl",
        Phase::Any,
        "Whose sockets are used, where RPC is served by HTTP: the kernel's.",
        async |_: &Control, _: NoParams| Ok(SockImpl { impl_name: POSIX }),
    );
    table.add(
        "sock_set_default_impl",
        Phase::Any,
        "Chooses whose sockets are used: there are the kernel's, `posix`.",
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
    /// Those that were ever carried out: none.
    operations: Vec<Members>,
}

async fn get_accel_stats(_: &Control, _: NoParams) -> Result<AccelStats, Error> {
    Ok(AccelStats { sequence_executed: 0, sequence_failed: 0, operations: Vec::new() })
}

/// Parameters of `accel_crypto_keys_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetCryptoKeys {
    /// All, if none is named.
    key_name: Option<String>,
}

async fn get_crypto_keys(_: &Control, p: GetCryptoKeys) -> Result<Vec<Members>, Error> {
    match p.key_name {
        None => Ok(Vec::new()),
        Some(name) => Err(Error::errno(Errno::NOENT, format!("there is no key '{name}'"))),
    }
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
        false => Err(Error::invalid(format!("there are no sockets '{}', only {POSIX}", p.impl_name))),
    }
}
