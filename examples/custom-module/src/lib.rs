//! A module: read-only disks whose blocks hold a pattern, the number of each block over and over. Such a disk is as large
//! as you like and takes no memory.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Access, AsyncChannel, Bdev, Blocks, Channel, Completion, Descriptor, Device, Env, Error, Event, Geometry,
    Identity, Io, Lba, Limits, Op, OpSet, OpenError, Status, Tag,
};
use aryk_dma::Buffer;
use aryk_reactor::{BackgroundTask, Budget, Cx, RootId, Turns};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes in a block.
pub const BLOCK_SIZE: u32 = 4096;
/// Blocks that one poll of a channel fills at most: a core must not stay long with one disk.
const BLOCKS_PER_POLL: Blocks = Blocks(64);
/// Processor time of a patrol in one turn of its core.
const PATROL_TURN: Duration = Duration::from_micros(50);

/// What a disk is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name, aliases and UUID.
    pub identity: Identity,
    /// Its size.
    pub blocks: Blocks,
    /// Whether a background task reads the disk over and over, as one that looks for damage does.
    pub patrols: bool,
}

/// Makes a disk.
///
/// # Errors
/// As `Registry::register`: its name is taken.
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let pattern = Arc::new(Pattern { blocks: config.blocks, patrol: Mutex::default() });
    let bdev = env.registry().register(config.identity, Arc::<Pattern>::clone(&pattern))?;
    if config.patrols {
        pattern.start_patrol(env, &bdev)?;
    }
    Ok(bdev)
}

/// What block `lba` of each disk holds.
pub fn block(lba: Lba) -> [u8; BLOCK_SIZE as usize] {
    let mut block = [0; BLOCK_SIZE as usize];
    block.as_chunks_mut().0.fill(lba.0.to_le_bytes());
    block
}

/// A disk, shared by all that use it.
struct Pattern {
    blocks: Blocks,
    /// The task that reads the disk. The task has the disk open, so it ends before the disk does.
    patrol: Mutex<Option<BackgroundTask>>,
}

impl Pattern {
    fn patrol(&self) -> MutexGuard<'_, Option<BackgroundTask>> {
        self.patrol.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_patrol(self: &Arc<Self>, env: &Env, bdev: &Bdev) -> Result<(), Error> {
        let pattern = Arc::downgrade(self);
        let end = move |event| {
            if event == Event::Removed
                && let Some(pattern) = pattern.upgrade()
            {
                drop(pattern.patrol().take());
            }
        };
        // Locked until the task is there, so that a removal at this moment ends it.
        let mut task = self.patrol();
        let descriptor = env.registry().open(bdev.name(), Access::Read, "its patrol", end)?;
        let (blocks, budget) = (self.blocks, Budget { turn: PATROL_TURN });
        // The future ends with the task, or is made again on another reactor.
        let start = move |turns| read_all(descriptor.clone(), blocks, turns);
        *task = Some(env.background().spawn(&format!("patrol {}", bdev.name()), budget, start));
        Ok(())
    }
}

/// Reads one block after the other, until a read fails.
async fn read_all(descriptor: Descriptor, blocks: Blocks, mut turns: Turns) {
    let thread = turns.thread();
    let open = move |cx: &mut Cx| AsyncChannel::open(&descriptor, thread, cx);
    let Ok(channel) = turns.local().with(open).await else { return };
    let mut buffer = Buffer::new(BLOCK_SIZE as usize, BLOCK_SIZE as usize);
    for lba in (0..blocks.0).map(Lba).cycle() {
        turns.next().await;
        let Ok(read) = channel.read(lba, Blocks(1), buffer).await else { return };
        buffer = read;
    }
}

impl Device for Pattern {
    fn product(&self) -> &'static str {
        "Pattern disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK_SIZE, self.blocks)
    }

    fn limits(&self) -> Limits {
        // The block layer splits what is longer.
        Limits { transfer_blocks: BLOCKS_PER_POLL, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read])
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(PatternChannel { root, submitted: VecDeque::new() }))
    }
}

/// What one queue has of a disk: it belongs to that queue and its core alone, so nothing in it is locked.
struct PatternChannel {
    root: RootId,
    submitted: VecDeque<Io>,
}

impl Channel for PatternChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.submitted.push_back(*io);
        // Polls the queue, and so this channel, in this turn of the core or the next.
        cx.wake(self.root);
    }

    /// Requests complete at once: there is nothing to abort.
    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut filled = Blocks::ZERO;
        while filled < BLOCKS_PER_POLL
            && let Some(io) = self.submitted.pop_front()
        {
            // The block layer has checked the range, and lets nothing but reads through.
            for n in 0..io.blocks.0 {
                io.data.write(n as u32 * BLOCK_SIZE, &block(io.lba + Blocks(n)));
            }
            filled += io.blocks;
            out.push(Completion { tag: io.tag, status: Status::Ok });
        }
        if !self.submitted.is_empty() {
            cx.wake(self.root);
        }
    }
}
