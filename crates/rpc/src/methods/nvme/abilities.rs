//! What a controller supports, for `bdev_nvme_get_controllers`. Control context; pure.

use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::data::SglSupport;
use schemars::JsonSchema;
use serde::Serialize;

/// What a controller supports, as it reports it, within the driver's limits.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "NvmeAbilities")]
pub(super) struct Abilities {
    /// Bytes of the largest transfer (MDTS, and at most what the driver uses).
    transfer_max: u64,
    /// Whether it has a volatile write cache (VWC).
    volatile_write_cache: bool,
    /// Optional commands (ONCS, FUSES), by name.
    commands: Vec<&'static str>,
    /// Optional admin commands (OACS, SANICAP), by name.
    admin_commands: Vec<&'static str>,
    /// Scatter-gather lists (SGLS): `none`, `bytes` (any alignment), or `dwords` (multiples of 4 bytes).
    sgl: &'static str,
    /// Whether it reads doorbells from memory (DBBUF).
    doorbell_buffer: bool,
    /// Whether a self-encrypting drive (TCG Opal) had locked blocks when the controller was started; missing for other drives.
    #[serde(skip_serializing_if = "Option::is_none")]
    locked: Option<bool>,
    /// Bytes of host memory that it would like (HMPRE), and works without; missing if it asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_memory_wanted: Option<u64>,
}

/// The names of what is supported.
fn names(all: &[(bool, &'static str)]) -> Vec<&'static str> {
    all.iter().filter(|(is_supported, _)| *is_supported).map(|(_, name)| *name).collect()
}

pub(super) fn of(info: &ControllerInfo) -> Abilities {
    let (supported, sanitize) = (info.supported, info.sanitize);
    Abilities {
        transfer_max: info.transfer_max,
        volatile_write_cache: info.has_volatile_cache,
        commands: names(&[
            (supported.compare, "compare"),
            (supported.compare_and_write, "compare-and-write"),
            (supported.write_zeroes, "write zeroes"),
            (supported.dataset_management, "dataset management"),
            (supported.copy, "copy"),
            (supported.verify, "verify"),
        ]),
        admin_commands: names(&[
            (supported.format, "format"),
            (supported.firmware, "firmware"),
            (supported.security, "security"),
            (supported.namespace_management, "namespace management"),
            (sanitize.block || sanitize.crypto || sanitize.overwrite, "sanitize"),
        ]),
        sgl: match info.sgl {
            SglSupport::None => "none",
            SglSupport::Bytes => "bytes",
            SglSupport::Dwords => "dwords",
        },
        doorbell_buffer: supported.doorbell_buffer,
        locked: info.locking.map(|locking| locking.is_locked),
        host_memory_wanted: info.host_memory_buffer.map(|buffer| buffer.preferred),
    }
}

/// An identifier in hexadecimal.
pub(super) fn hexadecimal(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
