//! `aryk_memory_clients_get`: the devices that access guests' memory by themselves, and the memory that they cannot access. A
//! method of Aryk only; control context.

use super::{Control, Error, NoParams, Phase, Table};
use schemars::JsonSchema;
use serde::Serialize;

/// Listed regions without a value.
const WITHOUT_MAX: usize = 1000;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "aryk_memory_clients_get",
        Phase::RunTime,
        "Lists the devices, or groups of devices, that register guest memory to access it by themselves, and the regions that they have not registered: requests there use bounce buffers.",
        get,
    );
}

/// Result of `aryk_memory_clients_get`.
#[derive(Debug, Serialize, JsonSchema)]
struct MemoryClients {
    clients: Vec<MemoryClient>,
    /// Regions that a client has not registered, at most 1,000.
    not_registered: Vec<NotRegistered>,
}

/// A device, or a group of devices, that registers guest memory.
#[derive(Debug, Serialize, JsonSchema)]
struct MemoryClient {
    name: String,
    /// Regions whose registration is under way.
    registering: u64,
    /// Registered regions.
    registered: u64,
    /// Removed regions that the client has not released yet: they stay mapped.
    unregistering: u64,
    /// Registrations that failed, in total.
    failures: u64,
    /// Regions that the client has left out, because the operator wants that (`dma` of an NVMe controller), in total.
    declined: u64,
    /// Times that the wait for registrations was given up, in total. The registrations go on.
    late: u64,
    /// Pieces of requests' memory that went through bounce buffers, in total.
    bounced_pieces: u64,
}

/// A region that a client has not registered.
#[derive(Debug, Serialize, JsonSchema)]
struct NotRegistered {
    /// Name of the client.
    client: String,
    /// Name of the controller of the region's VM.
    ctrlr: String,
    /// Size of the region.
    bytes: u64,
    /// Pieces of requests' memory in the region that went through bounce buffers.
    bounced_pieces: u64,
    /// Why; missing while the region is being registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

async fn get(control: &Control, _: NoParams) -> Result<MemoryClients, Error> {
    let memory = control.disks.registry.memory();
    let clients = memory.clients().into_iter().map(|client| MemoryClient {
        name: client.name,
        registering: client.registering,
        registered: client.registered,
        unregistering: client.unregistering,
        failures: client.failed,
        declined: client.declined,
        late: client.late,
        bounced_pieces: client.bounced,
    });
    let without = memory.without_value(WITHOUT_MAX).into_iter().map(|region| NotRegistered {
        client: region.client,
        ctrlr: region.owner,
        bytes: region.len,
        bounced_pieces: region.bounced,
        reason: region.reason,
    });
    Ok(MemoryClients { clients: clients.collect(), not_registered: without.collect() })
}

#[cfg(test)]
mod tests;
