//! The parameters of one life of a front-end: drawn from the seed, or set on the command line. Test tool, any thread.

use aryk_front_end::scsi::FIXED_QUEUES;
use aryk_front_end::{Format as Layout, Shape as RingShape};
use serde::Serialize;

use fastrand::Rng;

/// The direction of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// arykd listens, the front-end connects.
    Server,
    /// The front-end listens, arykd connects.
    Client,
}

/// The layout of rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Descriptor table, available and used ring.
    Split,
    /// One ring of descriptors.
    Packed,
}

/// The device type of the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// A block device.
    Blk,
    /// The first target of a SCSI host.
    Scsi,
}

/// Of five lives two have a SCSI host: with both formats, and in both connection modes.
const DEVICES: [Device; 5] = [Device::Blk, Device::Scsi, Device::Scsi, Device::Blk, Device::Blk];

/// One life in this number has a supervisor: such a life takes longer, because the supervisor delays early restarts.
const SUPERVISED: u64 = 5;

/// One life in this number has an encrypted disk: all device types and supervision come together with it, in turn.
const ENCRYPTED: u64 = 7;

/// One life in this number has a volume as its disk, unless that is encrypted.
const VOLUME: u64 = 6;

/// The front-end and the disk of one life.
#[derive(Clone, Debug, Serialize)]
pub struct Shape {
    /// The device type of the disk.
    pub device: Device,
    /// The connection mode.
    pub mode: Mode,
    /// Whether `arykd --supervise` restarts the daemon; otherwise the test does.
    pub supervised: bool,
    /// Whether the disk is encrypted, and its key is rotated all the time.
    pub encrypted: bool,
    /// Whether the disk is a volume of a pool.
    pub volume: bool,
    /// The format of all its rings.
    pub format: Format,
    /// Number of queues that carry requests.
    pub queues: u16,
    /// Descriptors per queue.
    pub size: u16,
    /// Upper bound of requests in flight per queue.
    pub depth: u16,
    /// Whether chains are in indirect tables.
    pub indirect: bool,
    /// Whether notifications are requested by index.
    pub event_idx: bool,
    /// Block size of the disk in bytes.
    pub block_size: u32,
    /// Whether memory regions are announced one by one.
    pub memory_slots: bool,
}

impl Shape {
    /// The shape of life number `life`: devices (unless `only` sets one), connection modes and formats take turns;
    /// `random` decides the rest.
    ///
    /// # Panics
    /// If there is nothing to choose from.
    #[must_use]
    pub fn draw(
        random: &mut Rng,
        life: u64,
        device: Option<Device>,
        modes: &[Mode],
        formats: &[Format],
    ) -> Self {
        let turn = |n: usize| life as usize % n;
        let size = random.choice([64, 128, 256]).expect("some");
        let is_encrypted = life % ENCRYPTED == 3;
        Self {
            device: device.unwrap_or(DEVICES[turn(DEVICES.len())]),
            mode: modes[turn(modes.len())],
            supervised: life % SUPERVISED == SUPERVISED - 1,
            encrypted: is_encrypted,
            volume: life % VOLUME == 2 && !is_encrypted,
            format: formats[turn(modes.len() * formats.len()) / modes.len()],
            queues: 1 + random.u64(..4) as u16,
            size,
            depth: random.choice([1, 8, 32, 128]).expect("some").min(size),
            indirect: random.bool(),
            event_idx: random.bool(),
            block_size: random.choice([512, 4096]).expect("some"),
            memory_slots: random.u64(..100) < 30,
        }
    }

    /// Number of queues before those that carry requests.
    #[must_use]
    pub const fn first_queue(&self) -> u16 {
        match self.device {
            Device::Blk => 0,
            Device::Scsi => FIXED_QUEUES,
        }
    }

    /// The shape of each of its rings.
    #[must_use]
    pub const fn ring(&self) -> RingShape {
        let format = match self.format {
            Format::Split => Layout::Split,
            Format::Packed => Layout::Packed,
        };
        RingShape { format, size: self.size, event_idx: self.event_idx }
    }

    /// A short description.
    #[must_use]
    pub fn summary(&self) -> String {
        format!(
            "{:?} {:?} supervised={} encrypted={} volume={} {:?} queues={} size={} depth={} indirect={} event_idx={} block={}",
            self.device,
            self.mode,
            self.supervised,
            self.encrypted,
            self.volume,
            self.format,
            self.queues,
            self.size,
            self.depth,
            self.indirect,
            self.event_idx,
            self.block_size
        )
        .to_lowercase()
    }
}
