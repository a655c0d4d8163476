//! Headers on disks of any module: [`on_header`] runs code that may block on a thread of its own, whose reads, writes and flushes
//! take the disk's own I/O path, by a channel on a reactor. Control context; [`serve`] runs in reactor context.
//!
//! The thread ends when its code returns. Nothing waits for it at the end of the daemon, or when the caller drops the future or
//! the disk is removed: the disk is closed at once, and the next access of the thread fails.

use crate::Crypto;
use aryk_bdev::{
    Access, AsyncChannel, Blocks, Bytes, Descriptor, Env, Event, Lba, Op, OpenError, Registry, Status,
};
use aryk_dma::{Buffer, PAGE};
use aryk_luks::Store;
use aryk_reactor::{CoreSet, Cx, Hold};
use std::io;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};

/// Bytes of one request, at most, unless a block has more.
const REQUEST_BYTES: u64 = 1 << 20;

/// The interval of checks whether a channel is closed.
const CLOSING: Duration = Duration::from_millis(1);

/// Why the header of a disk cannot be accessed.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The disk does not exist, or is in use.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The disk is not one that encrypts another disk.
    #[error("disk '{0}' encrypts no other disk")]
    NotEncrypted(String),
    /// No channel of the disk can be opened.
    #[error("no channel of the disk can be opened: {0}")]
    Open(#[from] OpenError),
    /// The disk is being removed.
    #[error("the disk is being removed")]
    Removed,
    /// The daemon is ending.
    #[error("the daemon is ending")]
    Ending,
    /// The system refuses another thread.
    #[error("no thread can be started: {0}")]
    Thread(io::Error),
}

/// Who has a disk open while its header is accessed.
#[derive(Clone, Copy, Debug)]
pub struct Opener<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// What else may be open at the same time.
    pub access: Access,
}

/// Runs `work` with the bytes of the disk `disk`, on a thread of its own, and returns its result.
///
/// # Errors
/// [`HeaderError`]; the disk may have changed if it was removed meanwhile.
pub async fn on_header<R: Send + 'static>(
    env: &Env,
    disk: &str,
    opener: Opener<'_>,
    work: impl FnOnce(&mut dyn Store) -> R + Send + 'static,
) -> Result<R, HeaderError> {
    let (descriptor, removal) = open(env.registry(), disk, opener)?;
    run(env, descriptor, removal, work).await
}

/// As [`on_header`], with the bytes of the base of the disk `disk`, which this module has made and which may be in use: `work`
/// must leave the part of the base that is encrypted alone.
///
/// # Errors
/// [`HeaderError`].
pub async fn on_header_below<R: Send + 'static>(
    env: &Env,
    disk: &str,
    owner: &str,
    work: impl FnOnce(&mut dyn Store) -> R + Send + 'static,
) -> Result<R, HeaderError> {
    // Its removal shows on the disk itself, and waits until both are closed.
    let (above, removal) = open(env.registry(), disk, Opener { name: owner, access: Access::Read })?;
    let crypto = above.bdev().device_as::<Crypto>();
    let crypto = crypto.ok_or_else(|| HeaderError::NotEncrypted(above.bdev().name().to_owned()))?;
    let base = crypto.base.descriptor()?;
    run(env, base, removal, work).await
}

/// The value is set when the removal of the disk begins.
fn open(
    registry: &Registry,
    disk: &str,
    Opener { name, access }: Opener<'_>,
) -> Result<(Descriptor, watch::Receiver<bool>), HeaderError> {
    let (sender, removal) = watch::channel(false);
    let descriptor = registry.open(disk, access, name, move |event| {
        if event == Event::Removed {
            sender.send_replace(true);
        }
    })?;
    Ok((descriptor, removal))
}

async fn run<R: Send + 'static>(
    env: &Env,
    descriptor: Descriptor,
    mut removal: watch::Receiver<bool>,
    work: impl FnOnce(&mut dyn Store) -> R + Send + 'static,
) -> Result<R, HeaderError> {
    let reactor = env.reactors().find_least_loaded(None).ok_or(HeaderError::Ending)?;
    let bdev = descriptor.bdev();
    let (block_size, blocks) = (bdev.geometry().block_size, bdev.blocks());
    let has_flush = bdev.device().ops().contains(Op::Flush);
    let disk_name = bdev.name().to_owned();
    let (requests, of_thread) = mpsc::unbounded_channel();
    let (ended, result) = oneshot::channel();
    let job = async {
        descriptor.prepare(&reactor).await?;
        // The task on the reactor ends when the sender is dropped, also with this future.
        let (until, ending) = oneshot::channel::<()>();
        let closed = start(&reactor, descriptor, of_thread, ending).await?;
        let mut store = BlockStore { requests, block_size, blocks, has_flush };
        let thread = std::thread::Builder::new().name("header".into());
        thread
            .spawn(move || {
                aryk_secrets::wipe_freed_memory();
                // The receiver is gone if nothing waits for the result any more.
                let _ = ended.send(aryk_secrets::with_wiped_stack(|| work(&mut store)));
            })
            .map_err(HeaderError::Thread)?;
        let result = result.await.map_err(|_| HeaderError::Removed)?;
        // The caller may open the disk again.
        drop(until);
        let _ = closed.await;
        Ok(result)
    };
    tokio::select! {
        done = job => done,
        // The sender lives as long as the disk is open.
        Ok(_) = removal.wait_for(|is_removed| *is_removed) => {
            tracing::warn!(disk = disk_name, "the work on its header is given up: the disk is being removed");
            Err(HeaderError::Removed)
        }
    }
}

/// A request of the thread, and where its result goes.
struct Request {
    op: Op,
    lba: Lba,
    blocks: Blocks,
    buffer: Option<Buffer>,
    done: oneshot::Sender<Result<Option<Buffer>, Status>>,
}

/// Opens a channel on the reactor, and serves the thread's requests until `ending` is ready or the thread has ended. The returned
/// receiver is ready when the disk is closed.
async fn start(
    reactor: &Hold,
    descriptor: Descriptor,
    requests: mpsc::UnboundedReceiver<Request>,
    ending: oneshot::Receiver<()>,
) -> Result<oneshot::Receiver<()>, HeaderError> {
    let hold = reactor.clone();
    let (closing, closed) = oneshot::channel();
    let on_reactor = move |cx: &mut Cx| {
        let name = format!("header of {}", descriptor.bdev().name());
        let thread = cx.add_thread(name, CoreSet::allowed());
        let local = cx.local().clone();
        let channel =
            AsyncChannel::open(&descriptor, thread, cx).inspect_err(|_| cx.remove_thread(thread))?;
        let task = async move {
            tokio::select! {
                () = serve(&channel, requests) => {}
                _ = ending => {}
            }
            drop((channel, descriptor));
            while local.with(move |cx| cx.thread_members(thread)).await > 0 {
                local.sleep(CLOSING).await;
            }
            local.with(move |cx| cx.remove_thread(thread)).await;
            drop((closing, hold));
        };
        cx.local().spawn(task).detach();
        Ok(())
    };
    let opened: Result<(), OpenError> = reactor.call(on_reactor).await.map_err(|_| HeaderError::Ending)?;
    opened?;
    Ok(closed)
}

async fn serve(channel: &AsyncChannel, mut requests: mpsc::UnboundedReceiver<Request>) {
    while let Some(Request { op, lba, blocks, buffer, done }) = requests.recv().await {
        let result = match (op, buffer) {
            (Op::Read, Some(buffer)) => channel.read(lba, blocks, buffer).await.map(Some),
            (Op::Write, Some(buffer)) => channel.write(lba, blocks, buffer).await.map(Some),
            (op, _) => channel.command(op, lba, blocks).await.map(|()| None),
        };
        // The thread has ended if nothing receives this.
        let _ = done.send(result);
    }
}

/// The bytes of a disk, for the thread.
struct BlockStore {
    requests: mpsc::UnboundedSender<Request>,
    block_size: u32,
    blocks: Blocks,
    /// Otherwise writes are durable at once.
    has_flush: bool,
}

/// A run of whole blocks that has some bytes of the disk.
struct Run {
    lba: Lba,
    blocks: Blocks,
    /// Bytes of the first block that come before.
    before: usize,
    /// Bytes of the caller's buffer.
    len: usize,
}

impl Run {
    /// Whether the bytes are whole blocks.
    fn is_whole(&self, block_size: u32) -> bool {
        self.before == 0 && Bytes(self.len as u64).to_blocks(block_size) == Some(self.blocks)
    }
}

impl BlockStore {
    /// The runs for `len` bytes from `offset`, in order.
    fn runs(&self, offset: u64, len: usize) -> io::Result<Vec<Run>> {
        let end = offset.checked_add(len as u64);
        let size = self.blocks.to_bytes(self.block_size).0;
        let end = end.filter(|end| *end <= size).ok_or_else(|| beyond_the_end(size))?;
        let (block, most) = (u64::from(self.block_size), REQUEST_BYTES.max(self.block_size.into()));
        let (mut at, mut runs) = (offset, Vec::new());
        while at < end {
            let start = at - at % block;
            let stop = end.min(start + most);
            let lba = Lba(start / block);
            let blocks = Blocks(stop.div_ceil(block) - lba.0);
            runs.push(Run { lba, blocks, before: (at - start) as usize, len: (stop - at) as usize });
            at = stop;
        }
        Ok(runs)
    }

    fn request(
        &self,
        op: Op,
        lba: Lba,
        blocks: Blocks,
        buffer: Option<Buffer>,
    ) -> io::Result<Option<Buffer>> {
        let gone = || io::Error::other("the disk is being removed, or the daemon is ending");
        let (done, result) = oneshot::channel();
        self.requests.send(Request { op, lba, blocks, buffer, done }).map_err(|_| gone())?;
        let result = result.blocking_recv().map_err(|_| gone())?;
        result.map_err(|status| io::Error::other(format!("the disk has failed the request: {status:?}")))
    }

    fn read(&self, run: &Run) -> io::Result<Buffer> {
        let len = run.blocks.to_bytes(self.block_size).0 as usize;
        let buffer = Buffer::new(len, PAGE as usize);
        let buffer = self.request(Op::Read, run.lba, run.blocks, Some(buffer))?;
        Ok(buffer.expect("a read returns its buffer"))
    }
}

fn beyond_the_end(size: u64) -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, format!("the disk has {size} bytes only"))
}

impl Store for BlockStore {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut rest = buffer;
        for run in self.runs(offset, rest.len())? {
            let (to, after) = rest.split_at_mut(run.len);
            to.copy_from_slice(&self.read(&run)?.bytes()[run.before..run.before + run.len]);
            rest = after;
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut rest = data;
        for run in self.runs(offset, data.len())? {
            let (from, after) = rest.split_at(run.len);
            let mut buffer = match run.is_whole(self.block_size) {
                true => Buffer::new(run.len, PAGE as usize),
                false => self.read(&run)?,
            };
            buffer.write(run.before, from);
            self.request(Op::Write, run.lba, run.blocks, Some(buffer))?;
            rest = after;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.has_flush {
            self.request(Op::Flush, Lba::ZERO, Blocks::ZERO, None)?;
        }
        Ok(())
    }
}
