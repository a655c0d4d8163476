//! What a controller claims about itself and its namespaces, checked. Pure; any context.
//!
//! Raw identify data becomes a [`ControllerInfo`] or a [`Namespace`] only here. Every value that the driver later computes
//! with is bounded by these checks, so no later sum or shift can overflow. A claim that contradicts the specification gives a
//! [`BadClaim`] with the field's name; a namespace that is correct but of a kind that the driver does not serve gives an
//! [`Unserved`].

mod namespace;

pub use namespace::{Namespace, Unserved};

use crate::data::{SglSupport, transfer_max};
use crate::quirks::Quirks;
use crate::spec::feature;
use crate::spec::identify::{IdentifyController, IdentifyNvmController, text};
use crate::spec::register::Cap;
use crate::spec::security::Locking;

/// A claim that cannot be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the controller claims {field} {value:#x}: {reason}")]
pub struct BadClaim {
    /// The specification's name of the field.
    pub field: &'static str,
    /// The field's value.
    pub value: u64,
    /// The rule that the value breaks.
    pub reason: &'static str,
}

/// Returns [`BadClaim`] unless `ok`.
pub(crate) const fn claim(
    ok: bool,
    field: &'static str,
    value: u64,
    reason: &'static str,
) -> Result<(), BadClaim> {
    if ok { Ok(()) } else { Err(BadClaim { field, value, reason }) }
}

/// The largest transfer of a command, in bytes, even if MDTS allows more: a list of one page of 4 KiB describes it.
pub const TRANSFER_MAX: u64 = 2 << 20;

/// What the driver needs of CAP, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Largest number of entries of an I/O queue: a power of two, 2 to 65,536.
    pub(crate) entries_max: u32,
    /// Milliseconds.
    pub(crate) ready_timeout_ms: u64,
    /// Bytes.
    pub(crate) stride: u64,
    /// Bytes of a memory page, for CC.MPS.
    pub(crate) page: u64,
    pub(crate) all_command_sets: bool,
    /// The register CRTO exists.
    pub(crate) has_ready_timeouts: bool,
    /// Queues of different priorities can have weights.
    pub(crate) has_weights: bool,
}

/// The smallest page that the host uses.
const HOST_PAGE: u64 = 4096;

impl Capabilities {
    /// Checks CAP and VS. NVMe 2.0 §3.1.3.1 and §3.1.3.2.
    pub(crate) fn check(cap: Cap, vs: u32) -> Result<Self, BadClaim> {
        claim(cap.0 != u64::MAX, "CAP", cap.0, "no device answers at this address")?;
        claim(vs >> 16 >= 1 && vs != u32::MAX, "VS", vs.into(), "NVMe begins with version 1.0")?;
        let mqes = u64::from(cap.max_queue_entries()) - 1;
        claim(mqes > 0, "CAP.MQES", mqes, "queues need at least 2 entries")?;
        let (min, max) = (cap.page_min(), cap.page_max());
        claim(min <= max, "CAP.MPSMIN", min, "it is above CAP.MPSMAX")?;
        claim(min <= 65_536, "CAP.MPSMIN", min, "memory pages above 64 KiB are not served")?;
        let css = cap.0 >> 37 & 0xff;
        // Bit 7 says "no I/O command set", but some controllers set it for "also without one".
        let has_blocks = cap.has_nvm_command_set() || cap.has_several_command_sets();
        claim(has_blocks, "CAP.CSS", css, "the controller does not support the NVM command set")?;
        Ok(Self {
            entries_max: 1 << cap.max_queue_entries().ilog2(),
            // A value of 0 would make every reset fail.
            ready_timeout_ms: cap.ready_timeout_ms().max(500),
            stride: cap.doorbell_stride(),
            page: min.max(HOST_PAGE),
            all_command_sets: cap.has_several_command_sets(),
            has_ready_timeouts: cap.has_ready_timeouts(),
            has_weights: cap.has_weighted_round_robin(),
        })
    }
}

/// Optional commands that a controller supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "one bit each of ONCS, FUSES and OACS")]
pub struct Supported {
    /// ONCS bit 0: Compare.
    pub compare: bool,
    /// ONCS bit 2: Dataset Management.
    pub dataset_management: bool,
    /// ONCS bit 3: Write Zeroes.
    pub write_zeroes: bool,
    /// ONCS bit 7: Verify.
    pub verify: bool,
    /// ONCS bit 8, and copy descriptor format 0 of OCFS: Copy.
    pub copy: bool,
    /// FUSES bit 0: fused Compare and Write.
    pub compare_and_write: bool,
    /// OACS bit 0: Security Send and Receive.
    pub security: bool,
    /// OACS bit 1: Format NVM.
    pub format: bool,
    /// OACS bit 2: Firmware Commit and Download.
    pub firmware: bool,
    /// OACS bit 3: Namespace Management and Attachment.
    pub namespace_management: bool,
    /// OACS bit 8: Doorbell Buffer Config.
    pub doorbell_buffer: bool,
}

/// SANICAP: the sanitize operations of a controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SanitizeSupport {
    /// Bit 0.
    pub crypto: bool,
    /// Bit 1.
    pub block: bool,
    /// Bit 2.
    pub overwrite: bool,
}

/// A host memory buffer, which the driver does not give: the controller works without, perhaps slower. NVMe 2.0 §5.17.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemoryBuffer {
    /// HMPRE in bytes: what the controller would like.
    pub preferred: u64,
    /// HMMIN in bytes: the least that it would use.
    pub minimum: u64,
}

/// The optional events that hosts use.
const EVENTS: u32 = feature::EVENT_NAMESPACE | feature::EVENT_FIRMWARE | feature::EVENT_ANA;

/// A controller's identity, limits and abilities, checked. NVMe 2.0 §5.17.2.1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// VID: PCI vendor.
    pub vendor: u16,
    /// SN, without padding.
    pub serial: String,
    /// MN, without padding.
    pub model: String,
    /// FR, without padding.
    pub firmware: String,
    /// CNTLID.
    pub controller_id: u16,
    /// VS: major version in bits 16 to 31, minor in 8 to 15, tertiary in 0 to 7.
    pub version: u32,
    /// Most bytes of a transfer: MDTS, the driver's own limit, and what the queue pairs have room for that were created before a
    /// reset.
    pub transfer_max: u64,
    /// Optional commands.
    pub supported: Supported,
    /// SGLS.
    pub sgl: SglSupport,
    /// VWC: the controller has a volatile write cache, in use or not.
    pub has_volatile_cache: bool,
    /// VWC and the feature's value: writes are in a volatile cache until a flush.
    pub has_write_cache: bool,
    /// CRDT1 to CRDT3, in units of 100 ms.
    pub retry_delays: [u16; 3],
    /// ACL: Abort commands at a time, at least 1.
    pub aborts_max: u16,
    /// ELPE: entries of the Error Information log.
    pub error_entries: u16,
    /// AERL: Asynchronous Event Requests at a time, at least 1.
    pub async_events_max: u16,
    /// OAES: optional asynchronous events.
    pub async_events: u32,
    /// NN: the largest valid namespace ID.
    pub namespaces_max: u32,
    /// AWUPF: blocks (not 0-based) that are written entirely or not at all when power fails.
    pub atomic_power_fail: u32,
    /// ACWU: blocks (not 0-based) of a fused compare and write.
    pub atomic_compare_write: u32,
    /// WZSL: most bytes of a Write Zeroes command; `None` without a limit.
    pub write_zeroes_max: Option<u64>,
    /// VSL: most bytes of a Verify command; `None` without a limit.
    pub verify_max: Option<u64>,
    /// DMRL, DMRSL and DMSL: ranges of one Dataset Management command (1 to 256), blocks of a range, blocks of a command.
    pub deallocate_max: (u16, u32, u64),
    /// RTD3E in milliseconds: the longest normal shutdown; 0 if not reported.
    pub shutdown_ms: u64,
    /// KAS: granularity of the keep-alive timer in milliseconds; 0 without support.
    pub keep_alive_ms: u64,
    /// FRMW: number of firmware slots, 1 to 7.
    pub firmware_slots: u8,
    /// FWUG: bytes that the parts of a firmware image must be multiples of.
    pub firmware_granularity: u32,
    /// FRMW bit 4: firmware can be activated without a reset.
    pub has_live_activation: bool,
    /// MTFA in milliseconds: the longest pause of an activation without a reset; 0 if not reported.
    pub activation_ms: u64,
    /// SANICAP.
    pub sanitize: SanitizeSupport,
    /// HMPRE and HMMIN, if the controller asks for a host memory buffer. The driver refuses it.
    pub host_memory_buffer: Option<HostMemoryBuffer>,
    /// What TCG Level 0 Discovery reports, if the controller supports it.
    pub locking: Option<Locking>,
    /// A multiple of bytes that requests should not cross, from the table of quirks.
    pub stripe: Option<u64>,
}

impl ControllerInfo {
    /// Checks Identify Controller. `vs` is the version, `page` is CC.MPS and `page_min` CAP.MPSMIN in bytes: powers of two from
    /// 4,096 to 65,536.
    ///
    /// # Errors
    /// [`BadClaim`].
    pub fn check(
        raw: &IdentifyController,
        vs: u32,
        page: u64,
        page_min: u64,
        quirks: Quirks,
    ) -> Result<Self, BadClaim> {
        check_shape(raw)?;
        let oncs = raw.oncs.get();
        let oacs = raw.oacs.get();
        let bit = |field: u16, bit: u32| field >> bit & 1 != 0;
        // In units of the smallest page; 0 means no limit. The shift of a larger value would lose bits.
        let mdts = match u32::from(raw.mdts) {
            0 => u64::MAX,
            n => page_min.checked_shl(n).filter(|_| n < 32).unwrap_or(u64::MAX),
        };
        let stripe_exponent = u32::from(raw.vendor[3]);
        let has_stripe = quirks.stripe_in_vendor_data && (1..16).contains(&stripe_exponent);
        Ok(Self {
            vendor: raw.vid.get(),
            serial: text(&raw.sn),
            model: text(&raw.mn),
            firmware: text(&raw.fr),
            controller_id: raw.cntlid.get(),
            version: vs,
            transfer_max: mdts.min(TRANSFER_MAX).min(transfer_max(page)),
            supported: Supported {
                compare: bit(oncs, 0),
                dataset_management: bit(oncs, 2),
                write_zeroes: bit(oncs, 3),
                verify: bit(oncs, 7),
                copy: bit(oncs, 8) && bit(raw.ocfs.get(), 0),
                compare_and_write: bit(raw.fuses.get(), 0) && bit(oncs, 0),
                security: bit(oacs, 0),
                format: bit(oacs, 1),
                firmware: bit(oacs, 2),
                namespace_management: bit(oacs, 3),
                doorbell_buffer: bit(oacs, 8),
            },
            sgl: match raw.sgls.get() & 3 {
                1 => SglSupport::Bytes,
                2 => SglSupport::Dwords,
                _ => SglSupport::None,
            },
            has_volatile_cache: raw.vwc & 1 != 0,
            has_write_cache: raw.vwc & 1 != 0,
            retry_delays: raw.crdt.map(zerocopy::little_endian::U16::get),
            aborts_max: u16::from(raw.acl) + 1,
            error_entries: u16::from(raw.elpe) + 1,
            async_events_max: u16::from(raw.aerl) + 1,
            async_events: raw.oaes.get() & EVENTS,
            namespaces_max: raw.nn.get(),
            atomic_power_fail: u32::from(raw.awupf.get()) + 1,
            atomic_compare_write: u32::from(raw.acwu.get()) + 1,
            write_zeroes_max: None,
            verify_max: None,
            deallocate_max: (256, u32::MAX, u64::MAX),
            shutdown_ms: u64::from(raw.rtd3e.get()).div_ceil(1000),
            keep_alive_ms: u64::from(raw.kas.get()) * 100,
            firmware_slots: raw.frmw >> 1 & 7,
            firmware_granularity: match raw.fwug {
                0 | 0xff => 4096,
                units => u32::from(units) * 4096,
            },
            has_live_activation: raw.frmw & 0x10 != 0,
            activation_ms: u64::from(raw.mtfa.get()) * 100,
            sanitize: SanitizeSupport {
                crypto: raw.sanicap.get() & 1 != 0,
                block: raw.sanicap.get() & 2 != 0,
                overwrite: raw.sanicap.get() & 4 != 0,
            },
            host_memory_buffer: (raw.hmpre.get() != 0).then(|| HostMemoryBuffer {
                preferred: u64::from(raw.hmpre.get()) * 4096,
                minimum: u64::from(raw.hmmin.get()) * 4096,
            }),
            locking: None,
            stripe: has_stripe.then(|| page_min << stripe_exponent),
        })
    }

    /// Adds the limits of Identify Controller of the NVM command set, where 0 means no limit.
    pub fn add_limits(&mut self, raw: &IdentifyNvmController, page_min: u64) {
        let size = |exponent: u8| match u32::from(exponent) {
            0 | 32.. => None,
            n => page_min.checked_mul(1 << n),
        };
        self.write_zeroes_max = size(raw.wzsl);
        self.verify_max = size(raw.vsl);
        let (ranges, blocks, all) = (u16::from(raw.dmrl), raw.dmrsl.get(), raw.dmsl.get());
        self.deallocate_max = (
            if ranges == 0 { 256 } else { ranges },
            if blocks == 0 { u32::MAX } else { blocks },
            if all == 0 { u64::MAX } else { all },
        );
    }

    /// Whether the controller is the same one as before a reset, perhaps with other firmware.
    pub(crate) fn is_same_device(&self, other: &Self) -> bool {
        (self.vendor, &self.serial, &self.model) == (other.vendor, &other.serial, &other.model)
    }
}

/// Fields that the driver's queues and commands depend on.
fn check_shape(raw: &IdentifyController) -> Result<(), BadClaim> {
    let sqes = raw.sqes;
    claim(sqes & 15 <= 6 && sqes >> 4 >= 6, "SQES", sqes.into(), "submission entries have 64 bytes")?;
    let cqes = raw.cqes;
    claim(cqes & 15 <= 4 && cqes >> 4 >= 4, "CQES", cqes.into(), "completion entries have 16 bytes")?;
    let kind = raw.cntrltype;
    claim(kind <= 1, "CNTRLTYPE", kind.into(), "not an I/O controller")?;
    let nn = raw.nn.get();
    claim(nn != 0 && nn < u32::MAX - 1, "NN", nn.into(), "namespace IDs go from 1 to FFFFFFFDh")
}

#[cfg(test)]
pub(crate) mod tests;
