//! A guest with memory and queues, connected to a back-end, or to none.

use super::args::{BenchArgs, Unit};
use crate::error::Error;
use crate::size::Size;
use aryk_front_end::blk::{self, Config};
use aryk_front_end::scsi;
use aryk_front_end::{Builder, Format, Layout, Memory, Queue, Session, Shape, Wanted, feature, protocol};
use fastrand::Rng;
use std::path::Path;
use std::time::Duration;

/// Largest and smallest size of a ring in descriptors; QEMU has the same maximum.
const SIZE_MAX: u32 = 1024;
const SIZE_MIN: u32 = 64;
/// Descriptors of a request without an indirect table.
const PIECES: u32 = 3;
/// Largest request in bytes.
const BLOCK_MAX: u64 = 8 << 20;

/// A guest under load.
pub struct Rig<B> {
    pub memory: Memory,
    pub queues: Vec<Queue<B>>,
    /// The builder of all queues' layout.
    pub layout: Layout,
    session: Option<Session>,
    /// Queues of a SCSI host before its request queues; they stay idle.
    idle: Vec<Queue<B>>,
}

/// The disk as described by its back-end.
#[derive(Debug, Clone, Copy)]
pub struct Disk {
    pub bytes: u64,
    pub block_size: u32,
    pub readonly: bool,
}

impl Rig<blk::Requests> {
    /// Connects to a block device.
    pub fn connect(target: &Path, args: &BenchArgs, patience: Duration) -> Result<(Self, Disk), Error> {
        use blk::feature;
        // Without FLUSH, each write would have to be durable before its completion.
        let optional = feature::BLK_SIZE | feature::FLUSH | feature::RO | feature::MQ;
        let session = Session::connect(target, &wanted(args, optional, args.queues, patience))?;
        let features = session.features();
        let config = session.config(blk::CONFIG_LEN)?;
        if features & optional == 0 && scsi::is_config(&config) {
            return Err(Error::Usage("this is a SCSI host: add --scsi, or --scsi=TARGET".into()));
        }
        let config = Config::parse(&config, features)?;
        let disk = Disk {
            bytes: config.capacity * blk::SECTOR,
            block_size: config.block_size,
            readonly: features & feature::RO != 0,
        };
        check(args, disk)?;
        let rig = Self::bare(blk::Requests, args, features)?;
        Ok((rig.started(session)?, disk))
    }
}

impl Rig<scsi::Requests> {
    /// Connects to a SCSI host, for one of its disks.
    pub fn connect(target: &Path, args: &BenchArgs, patience: Duration) -> Result<(Self, Disk), Error> {
        let Unit { target: number, lun } = args.scsi.expect("the caller has checked");
        let queues = args.queues + scsi::FIXED_QUEUES;
        let session = Session::connect(target, &wanted(args, 0, queues, patience))?;
        check_size(args, blk::SECTOR)?;
        let features = session.features();
        let rig = Self::bare(scsi::Requests::new(number, lun), args, features)?;
        let mut rig = rig.started(session)?;
        let capacity = rig.queues[0].probe(patience)?;
        let disk = Disk {
            bytes: capacity.blocks * u64::from(capacity.block_size),
            block_size: capacity.block_size,
            readonly: capacity.readonly,
        };
        check(args, disk)?;
        rig.queues[1..].iter_mut().for_each(|queue| queue.set_block_size(capacity.block_size));
        // The responses have left bytes in the data buffers: fill them again.
        rig.fill();
        Ok((rig, disk))
    }
}

impl<B: Builder + Copy> Rig<B> {
    /// A guest without a back-end.
    pub fn bare(builder: B, args: &BenchArgs, features: u64) -> Result<Self, Error> {
        let layout = layout(args, features)?;
        let idle = if args.scsi.is_some() { scsi::FIXED_QUEUES } else { 0 };
        let rest = Layout { slots: 0, ..layout };
        let [space, rest_space] = [layout, rest].map(|layout| layout.space::<B>());
        let loaded = space * u64::from(args.queues);
        let memory = Memory::new(loaded + rest_space * u64::from(idle))?;
        let queue = |i: u16| Queue::new(builder, &memory, idle + i, u64::from(i) * space, layout);
        let queues: Vec<_> = (0..args.queues).map(queue).collect::<Result<_, _>>()?;
        let unused = |i: u16| Queue::new(builder, &memory, i, loaded + u64::from(i) * rest_space, rest);
        let idle: Vec<_> = (0..idle).map(unused).collect::<Result<_, _>>()?;
        let rig = Self { queues, memory, layout, session: None, idle };
        rig.fill();
        Ok(rig)
    }

    /// Starts the queues at the back-end.
    fn started(mut self, session: Session) -> Result<Self, Error> {
        session.set_features()?;
        session.share(&self.memory)?;
        let mut all = self.idle.iter().chain(&self.queues);
        all.try_for_each(|queue| session.start(&queue.announced()))?;
        session.enable((self.idle.len() + self.queues.len()) as u16)?;
        self.session = Some(session);
        Ok(self)
    }

    /// Fills all data buffers with random bytes, so that their pages are allocated and are not zero.
    fn fill(&self) {
        let mut random = Rng::with_seed(1);
        for queue in &self.queues {
            for slot in 0..self.layout.slots {
                let place = queue.place(slot);
                for at in (place.data..place.data + u64::from(place.len)).step_by(8) {
                    self.memory.whole().write(at as usize, &random.u64(..));
                }
            }
        }
    }

    /// Whether the back-end has disconnected.
    pub fn has_ended(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.wire().has_ended())
    }

    /// Stops the queues.
    pub fn stop(self) -> Result<(), Error> {
        let Some(session) = &self.session else { return Ok(()) };
        for index in 0..self.idle.len() + self.queues.len() {
            session.stop(index as u16)?;
        }
        Ok(())
    }
}

fn wanted(args: &BenchArgs, optional: u64, queues: u16, patience: Duration) -> Wanted {
    let packed = if Format::from(args.ring) == Format::Packed { feature::PACKED } else { 0 };
    Wanted {
        features: feature::VERSION_1 | feature::PROTOCOL | packed,
        optional: optional | feature::INDIRECT | feature::EVENT_IDX,
        protocol: protocol::CONFIG,
        optional_protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
        queues,
        patience,
    }
}

/// Checks that the disk supports the requested load.
fn check(args: &BenchArgs, disk: Disk) -> Result<(), Error> {
    let usage = |text: String| Err(Error::Usage(text));
    if args.rw.writes() && disk.readonly {
        return usage("this disk is read-only: use --rw randread or read".into());
    }
    check_size(args, disk.block_size.into())?;
    if let Some(area) = args.area.filter(|area| area.0 > disk.bytes) {
        return usage(format!("--area {area} is more than the disk's {}", Size(disk.bytes)));
    }
    Ok(())
}

/// Checks that requests consist of whole blocks and are not too large.
fn check_size(args: &BenchArgs, block_size: u64) -> Result<(), Error> {
    let Size(bs) = args.bs;
    if bs == 0 || !bs.is_multiple_of(block_size) || bs > BLOCK_MAX {
        let (block, most) = (Size(block_size), Size(BLOCK_MAX));
        let text = format!("--bs {} is not a multiple of the disk's {block}, or is above {most}", args.bs);
        return Err(Error::Usage(text));
    }
    Ok(())
}

/// The layout of the queues: the one with fewer descriptors per request.
fn layout(args: &BenchArgs, features: u64) -> Result<Layout, Error> {
    let depth = u32::from(args.qd);
    let can_be_indirect = features & feature::INDIRECT != 0;
    let format = Format::from(args.ring);
    let indirect = can_be_indirect && (format == Format::Packed || PIECES * depth > SIZE_MAX);
    let needed = if indirect { depth } else { PIECES * depth };
    if needed > SIZE_MAX {
        let most = SIZE_MAX / PIECES;
        return Err(Error::Usage(format!("without indirect descriptors, --qd is at most {most}")));
    }
    let size = needed.next_power_of_two().max(SIZE_MIN) as u16;
    let shape = Shape { format, size, event_idx: features & feature::EVENT_IDX != 0 };
    let len = u32::try_from(args.bs.0).map_err(|_| Error::Usage(format!("--bs {} is too large", args.bs)))?;
    Ok(Layout { shape, slots: args.qd, len, indirect })
}
