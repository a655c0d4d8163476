//! What a model controller offers: its capabilities, namespaces and timing. Context: any. Plain values; the controller
//! reads them when it is built, and tests may change the timing later.

use std::ops::RangeInclusive;

/// Nanoseconds of the model's time.
pub type Nanos = u64;

/// The capabilities and the content of a model controller. [`Config::default`] is an ordinary data-centre SSD with one
/// namespace of 64 MiB. Fields named like the specification's hold the specification's encoding.
#[derive(Clone, Debug)]
pub struct Config {
    /// Seed of everything random: delays, faults, hostile data, which cached blocks survive a power failure.
    pub seed: u64,
    /// PCI vendor and device identifier.
    pub pci_id: (u16, u16),
    /// Serial Number.
    pub serial: String,
    /// Model Number.
    pub model: String,
    /// Firmware Revision of slot 1.
    pub firmware: String,
    /// Entries of the largest queue (CAP.MQES + 1): 2 to 65,536.
    pub queue_entries: u32,
    /// I/O queue pairs that the controller supports.
    pub io_queues: u16,
    /// MSI-X vectors.
    pub vectors: u16,
    /// CAP.DSTRD: doorbells are `4 << dstrd` bytes apart.
    pub dstrd: u8,
    /// CAP.AMS bit 0: weighted round robin. Without effect: the model refuses to be enabled with it (CC.AMS).
    pub weighted_round_robin: bool,
    /// CAP.TO, in units of 500 ms.
    pub to: u8,
    /// CAP.MPSMIN: the smallest page is `4096 << mpsmin` bytes.
    pub mpsmin: u8,
    /// CAP.MPSMAX.
    pub mpsmax: u8,
    /// CAP.CSS.
    pub css: u8,
    /// VS.
    pub vs: u32,
    /// Maximum Data Transfer Size, as a power of two of the smallest page; 0: not limited by the controller, and limited
    /// to 16 MiB by the model.
    pub mdts: u8,
    /// Optional Admin Command Support. The model implements bits 1 (format), 2 (firmware), 3 (namespace management) and 8
    /// (doorbell buffer).
    pub oacs: u16,
    /// Whether the drive encrypts itself (OACS bit 0), and whether all blocks are locked (TCG Opal).
    pub locking: Option<bool>,
    /// Optional NVM Command Support. The model implements bits 0 (compare), 1 (write uncorrectable), 2 (dataset
    /// management), 3 (write zeroes), 4 (save and select of features), 7 (verify) and 8 (copy).
    pub oncs: u16,
    /// Fused Operation Support: bit 0 is compare and write.
    pub fuses: u16,
    /// SGL Support: 0 in bits 1:0 is none, 1 any alignment, 2 dword alignment. Bit 16: bit buckets.
    pub sgls: u32,
    /// Sanitize Capabilities: bit 0 crypto erase, bit 1 block erase, bit 2 overwrite. 0: no sanitize.
    pub sanicap: u32,
    /// Whether there is a volatile write cache (VWC bit 0).
    pub volatile_write_cache: bool,
    /// Abort Command Limit, 0's based.
    pub acl: u8,
    /// Asynchronous Event Request Limit, 0's based.
    pub aerl: u8,
    /// Error Log Page Entries, 0's based.
    pub elpe: u8,
    /// Firmware slots: 1 to 7.
    pub firmware_slots: u8,
    /// Keep Alive Support, in units of 100 ms; 0: no keep-alive timer.
    pub kas: u16,
    /// Command Retry Delay Times 1 to 3, in units of 100 ms.
    pub crdt: [u16; 3],
    /// Atomic Write Unit Normal, 0's based blocks.
    pub awun: u16,
    /// Atomic Write Unit Power Fail, 0's based blocks. The model loses or keeps such a write as a whole.
    pub awupf: u16,
    /// Atomic Compare & Write Unit, 0's based blocks.
    pub acwu: u16,
    /// Number of Namespaces: the largest NSID.
    pub nn: u32,
    /// Bytes that all namespaces together may have.
    pub tnvmcap: u64,
    /// The namespaces at the start, by NSID.
    pub namespaces: Vec<(u32, NamespaceConfig)>,
    /// Delays.
    pub timing: Timing,
    /// Commands that the controller may hold at one time, after it fetched them and before it completed them.
    pub in_flight: usize,
    /// Commands fetched or executed in one step at most, over all queues. Commands of more than 64 blocks count more.
    pub commands_per_step: u32,
    /// Whether written data is kept.
    pub data: Data,
}

/// Whether a namespace keeps data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Reads return what was written. The model also remembers what the volatile write cache holds, for
    /// [`crate::Controller::fail_power`].
    Kept,
    /// As `Kept`, without the memory of the write cache: a power failure loses nothing.
    KeptDurable,
    /// Commands move no data. Their data pointers are still checked.
    Null,
}

/// A namespace.
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Size in blocks of the format.
    pub blocks: u64,
    /// Index into [`FORMATS`].
    pub format: u8,
    /// Bit 4 of FLBAS: metadata follows each block's data instead of being in a buffer of its own.
    pub extended_lba: bool,
    /// NGUID; zeroes are not reported.
    pub nguid: [u8; 16],
    /// EUI64; zeroes are not reported.
    pub eui64: [u8; 8],
    /// Whether the namespace is attached to the controller.
    pub attached: bool,
    /// Namespace Optimal I/O Boundary, in blocks; 0: none.
    pub noiob: u16,
    /// Whether writes are refused with Namespace Is Write Protected.
    pub write_protected: bool,
    /// Command Set Identifier: 0 NVM, 1 Key Value, 2 Zoned. The model executes commands of 0 only.
    pub csi: u8,
}

impl NamespaceConfig {
    /// An attached namespace of the NVM command set, with identifiers made from `identity`.
    pub fn new(blocks: u64, format: u8, identity: u64) -> Self {
        let mut nguid = [0x5a; 16];
        nguid[8..].copy_from_slice(&identity.to_be_bytes());
        let mut eui64 = identity.to_be_bytes();
        eui64[0] = 0x02;
        Self {
            blocks,
            format,
            extended_lba: false,
            nguid,
            eui64,
            attached: true,
            noiob: 0,
            write_protected: false,
            csi: 0,
        }
    }
}

/// The LBA formats of every namespace: bytes of data and of metadata per block. The model moves data only for formats
/// without metadata; it offers the others so that a driver's refusal can be tested.
pub const FORMATS: [LbaFormat; 6] = [
    LbaFormat { data: 512, metadata: 0 },
    LbaFormat { data: 4096, metadata: 0 },
    LbaFormat { data: 512, metadata: 8 },
    LbaFormat { data: 4096, metadata: 8 },
    LbaFormat { data: 4096, metadata: 64 },
    LbaFormat { data: 16384, metadata: 0 },
];

/// An LBA format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbaFormat {
    /// Bytes of data per block, a power of two.
    pub data: u32,
    /// Bytes of metadata per block.
    pub metadata: u16,
}

/// Delays of the controller.
#[derive(Clone, Debug)]
pub struct Timing {
    /// From CC.EN = 1 to CSTS.RDY = 1.
    pub enable: Nanos,
    /// From CC.EN = 0 to CSTS.RDY = 0. Commands in flight still move data in this time.
    pub disable: Nanos,
    /// From a CC.SHN request to CSTS.SHST = complete.
    pub shutdown: Nanos,
    /// An admin command.
    pub admin: RangeInclusive<Nanos>,
    /// An I/O command. A range with more than one value reorders commands. `0..=0` executes a command in the step that
    /// fetches it.
    pub io: RangeInclusive<Nanos>,
    /// A format of a namespace, beyond the time of an admin command.
    pub format: Nanos,
    /// A sanitize operation.
    pub sanitize: Nanos,
    /// For each MiB that a command deallocates or zeroes, beyond the time of an I/O command: one command after the other.
    pub empty_mib: Nanos,
}

impl Timing {
    /// Every action ends in the step that starts it.
    pub const IMMEDIATE: Self = Self {
        enable: 0,
        disable: 0,
        shutdown: 0,
        admin: 0..=0,
        io: 0..=0,
        format: 0,
        sanitize: 0,
        empty_mib: 0,
    };
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 1,
            pci_id: (0x1b36, 0x0010),
            serial: "ARYKMODEL0001".into(),
            model: "Aryk NVMe model".into(),
            firmware: "1.0".into(),
            queue_entries: 1024,
            io_queues: 16,
            vectors: 17,
            dstrd: 0,
            weighted_round_robin: false,
            to: 20,
            mpsmin: 0,
            mpsmax: 4,
            css: 1,
            vs: 0x0002_0000,
            mdts: 5,
            oacs: 1 << 1 | 1 << 2 | 1 << 3 | 1 << 8,
            locking: None,
            oncs: 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7 | 1 << 8,
            fuses: 1,
            sgls: 1 | 1 << 16,
            sanicap: 0b111,
            volatile_write_cache: true,
            acl: 3,
            aerl: 3,
            elpe: 63,
            firmware_slots: 3,
            kas: 10,
            crdt: [1, 5, 20],
            awun: 255,
            awupf: 0,
            acwu: 0,
            nn: 16,
            tnvmcap: 1 << 30,
            namespaces: vec![(1, NamespaceConfig::new(16384, 1, 1))],
            timing: Timing::IMMEDIATE,
            in_flight: 4096,
            commands_per_step: 1024,
            data: Data::Kept,
        }
    }
}
