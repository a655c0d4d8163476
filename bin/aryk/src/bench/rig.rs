//! A guest with its memory and queues, connected to a back end or to nothing.

use super::args::BenchArgs;
use super::workload::Random;
use crate::error::Error;
use crate::size::Size;
use aryk_front_end::blk::{self, Config, Requests};
use aryk_front_end::{Format, Layout, Memory, Queue, Session, Shape, Wanted, feature, protocol};
use std::path::Path;
use std::time::Duration;

/// Descriptors that a ring may have; QEMU's, too.
const SIZE_MAX: u32 = 1024;
const SIZE_MIN: u32 = 64;
/// Descriptors of a request without a table.
const PIECES: u32 = 3;
/// Bytes of a request at most.
const BLOCK_MAX: u64 = 8 << 20;

/// A guest under load.
pub struct Rig {
    pub memory: Memory,
    pub queues: Vec<Queue<Requests>>,
    /// Where the layout of all queues comes from.
    pub layout: Layout,
    session: Option<Session>,
}

/// The disk, as its back end tells it.
#[derive(Debug, Clone, Copy)]
pub struct Disk {
    pub bytes: u64,
    pub block_size: u32,
    pub readonly: bool,
}

impl Rig {
    /// Connects to a back end.
    pub fn connect(target: &Path, args: &BenchArgs, patience: Duration) -> Result<(Self, Disk), Error> {
        let session = Session::connect(target, &wanted(args, patience))?;
        let features = session.features();
        let config = Config::parse(&session.config(blk::CONFIG_LEN)?, features)?;
        let disk = Disk {
            bytes: config.capacity * blk::SECTOR,
            block_size: config.block_size,
            readonly: features & blk::feature::RO != 0,
        };
        check(args, disk)?;
        let mut rig = Self::bare(args, features)?;
        session.settle()?;
        session.share(&rig.memory)?;
        rig.queues.iter().try_for_each(|queue| session.start(&queue.announced()))?;
        session.enable(args.queues)?;
        rig.session = Some(session);
        Ok((rig, disk))
    }

    /// The same, with nobody at the other end.
    pub fn bare(args: &BenchArgs, features: u64) -> Result<Self, Error> {
        let layout = layout(args, features)?;
        let space = layout.space::<Requests>();
        let memory = Memory::new(space * u64::from(args.queues))?;
        let queue = |index: u16| Queue::new(Requests, &memory, index, u64::from(index) * space, layout);
        let queues: Vec<_> = (0..args.queues).map(queue).collect::<Result<_, _>>()?;
        let rig = Self { queues, memory, layout, session: None };
        rig.fill();
        Ok(rig)
    }

    /// Puts something into all data, so that its pages are there, and are no zeroes.
    fn fill(&self) {
        let mut random = Random::new(1);
        for queue in &self.queues {
            for slot in 0..self.layout.slots {
                let place = queue.place(slot);
                for at in (place.data..place.data + u64::from(place.len)).step_by(8) {
                    self.memory.whole().write(at as usize, &random.next());
                }
            }
        }
    }

    /// Whether the back end has gone.
    pub fn has_ended(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.wire().has_ended())
    }

    /// Takes the queues back.
    pub fn stop(self) -> Result<(), Error> {
        let Some(session) = &self.session else { return Ok(()) };
        for index in 0..self.queues.len() {
            session.stop(index as u16)?;
        }
        Ok(())
    }
}

fn wanted(args: &BenchArgs, patience: Duration) -> Wanted {
    let packed = if Format::from(args.ring) == Format::Packed { feature::PACKED } else { 0 };
    // Without FLUSH, each write would be durable before it is answered.
    let optional = blk::feature::BLK_SIZE | blk::feature::FLUSH | blk::feature::RO | blk::feature::MQ;
    Wanted {
        features: feature::VERSION_1 | feature::PROTOCOL | packed,
        optional: optional | feature::INDIRECT | feature::EVENT_IDX,
        protocol: protocol::CONFIG,
        optional_protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
        queues: args.queues,
        patience,
    }
}

/// Whether the disk can do what is wanted of it.
fn check(args: &BenchArgs, disk: Disk) -> Result<(), Error> {
    let usage = |text: String| Err(Error::Usage(text));
    let Size(bs) = args.bs;
    if args.rw.writes() && disk.readonly {
        return usage("this disk is read-only: only --rw randread and read can be done".into());
    }
    if bs == 0 || bs % u64::from(disk.block_size) != 0 || bs > BLOCK_MAX {
        let (block, most) = (Size(disk.block_size.into()), Size(BLOCK_MAX));
        return usage(format!("--bs {} is no multiple of the disk's {block}, or above {most}", args.bs));
    }
    if let Some(area) = args.area.filter(|area| area.0 > disk.bytes) {
        return usage(format!("--area {area} is more than the disk's {}", Size(disk.bytes)));
    }
    Ok(())
}

/// How the queues are laid out: whichever way has the fewer descriptors change.
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
    let len = u32::try_from(args.bs.0).map_err(|_| Error::Usage(format!("--bs {} is too much", args.bs)))?;
    Ok(Layout { shape, slots: args.qd, len, indirect })
}
