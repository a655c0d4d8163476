//! The disk of an image: its creation, its size, its end. Control context; channels are opened in reactor context.

use crate::clusters::Lease;
use crate::connection::{Connection, Opened};
use crate::driver::RbdChannel;
use crate::errors::{Class, Counters};
use crate::state::luks_version;
use crate::workers::{Lane, lock};
use crate::{Clusters, Config, DiskInfo, Error, Spec, disk_of};
use aryk_bdev::{
    Bdev, Blocks, BoxFuture, Bytes, Channel, Device, Env, Failure, Failures, Geometry, Lba, Limits, Op,
    OpSet, OpenError, Registry,
};
use aryk_librbd::{CallError, Image, Info, Operation, Request, Sink, Watch};
use aryk_log_limit::{LogLimit, limited};
use aryk_reactor::{Cx, Handle, RootId};
use rustix::io::Errno;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// Requests in flight on one channel.
const DEPTH: u32 = 256;
/// Bytes of one read or write: one object, by Ceph's default.
const DATA_MAX: u64 = 4 << 20;
/// Pieces of memory of one read or write.
const PIECES_MAX: u32 = 1024;
/// Bytes of a compare-and-write. librbd 16 refuses others; later versions accept up to a stripe unit, and do not say so.
const COMPARE_AND_WRITE_BYTES: u32 = 512;
/// Bytes of one unmap, and of one write-zeroes: librbd makes a request of each object.
const UNMAP_MAX: u64 = 1 << 30;
const ZEROES_MAX: u64 = 64 << 20;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// The beginning of a clone that librbd has encrypted. Other encrypted images look like a disk that a guest has encrypted.
const ENCRYPTED: &[u8; 6] = b"RBDL\xba\xbe";

/// A disk, with what its channels share.
#[derive(Debug)]
pub(crate) struct Disk {
    name: String,
    spec: Spec,
    pub(crate) block_size: u32,
    object_size: u64,
    is_read_only: bool,
    has_other_hosts: bool,
    blocks: AtomicU64,
    /// The addresses of the client.
    addresses: String,
    /// `None` after the disk was closed: a disk that is kept by others keeps neither the image nor the client.
    open: Mutex<Option<Open>>,
    clusters: Clusters,
    registry: Arc<Registry>,
    bdev: OnceLock<Weak<Bdev>>,
    /// Held while the present size is read and published, by one thread for calls that block.
    following: Mutex<()>,
    resizing: Mutex<ResizeState>,
    failures: Failures,
    errors: Counters,
    lines: LogLimit,
}

/// Resizes of a disk by this process. The size is published under its lock.
#[derive(Debug, Default)]
struct ResizeState {
    is_resizing: bool,
    /// Number of resizes that have ended.
    ended: u64,
}

/// What a disk has until it is closed.
#[derive(Debug)]
struct Open {
    image: Arc<Image>,
    lease: Lease,
    watch: Option<Watch>,
}

/// Creates the disk of `config`.
pub(crate) async fn create(
    clusters: &Clusters,
    env: &Env,
    lease: Lease,
    config: Config,
) -> Result<Arc<Bdev>, Error> {
    // Checked before an image is created.
    if env.registry().find(&config.identity.name).is_ok() {
        return Err(aryk_bdev::Error::Exists(config.identity.name).into());
    }
    let is_read_only = config.read_only || config.spec.snapshot.is_some();
    if !is_read_only && clusters.has_left(&lease, &config.spec) {
        return Err(Error::Left(config.spec.to_string()));
    }
    let connection = Arc::clone(lease.connection());
    for predecessor in &config.predecessors {
        connection.fence(predecessor).await?;
    }
    let spec = &config.spec;
    let pool = connection.pool(spec).await?;
    if let Some(Bytes(size)) = config.size.filter(|_| !is_read_only) {
        let (pool, image) = (Arc::clone(&pool), spec.image.clone());
        match connection.workers.run(spec.opening_lane(), move || pool.create_image(&image, size)).await? {
            Ok(()) => {}
            Err(CallError { errno, .. }) if errno == Errno::EXIST.raw_os_error() => {}
            Err(error) => return Err(connection.failed("create", spec, error)),
        }
    }
    let opened = connection.open(&pool, spec, is_read_only).await?;
    let info = inspect(&connection, &opened, &config).await?;
    let bdev = register(clusters, env, config, lease, opened, &info)?;
    let disk = Arc::clone(disk_of(&bdev).expect("just registered"));
    if !is_read_only {
        // Nothing waits for it: the caller notes the disk, which is there.
        disk.start_watch();
    }
    Ok(bdev)
}

/// Checks that a disk can be made of an image.
async fn inspect(connection: &Connection, opened: &Opened, config: &Config) -> Result<Info, Error> {
    let (name, image) = (config.spec.to_string(), Arc::clone(opened.image()));
    let is_written = !config.read_only && config.spec.snapshot.is_none();
    let read = move || Ok((image.info()?, !is_written || image.copies_writes()?));
    let read = connection.workers.run(config.spec.opening_lane(), read).await?;
    let (info, copies_writes) = read.map_err(|error| connection.failed("inspect", &config.spec, error))?;
    if !copies_writes {
        return Err(Error::ZeroCopy(name));
    }
    let block_size = config.block_size;
    let is_valid = block_size.is_power_of_two() && block_size >= 512;
    if !is_valid || info.stripe_unit % u64::from(block_size) != 0 {
        return Err(Error::BlockSize(block_size));
    }
    let size = Bytes(info.size);
    if let Some(requested) = config.size.filter(|requested| *requested != size) {
        return Err(Error::OtherSize { image: name, size, requested });
    }
    if size.whole_blocks(block_size) == Blocks::ZERO {
        return Err(Error::Empty(name));
    }
    let beginning = read_beginning(opened.image()).await;
    let beginning = beginning.map_err(|error| connection.failed("read", &config.spec, error))?;
    if beginning.starts_with(ENCRYPTED) {
        return Err(Error::Encrypted(name));
    }
    if let Some(version) = luks_version(&beginning) {
        tracing::info!(
            image = name,
            version,
            "the image has a LUKS header: `aryk luks open` decrypts it, a VM with the image itself sees encrypted data"
        );
    }
    Ok(info)
}

/// Waits for one request.
struct OneResult(Mutex<Option<oneshot::Sender<i64>>>);

impl Sink for OneResult {
    fn completed(&self, _: u64, result: i64) {
        let sender = lock(&self.0).take().expect("a request ends once");
        // The receiver may have stopped waiting.
        let _ = sender.send(result);
    }
}

/// Begins to read the first 512 bytes of an image. librbd has the buffer until the result comes.
pub(crate) fn begin_read(image: &Arc<Image>) -> (aryk_dma::Buffer, oneshot::Receiver<i64>) {
    let mut buffer = aryk_dma::Buffer::new(512, 512);
    let (sender, result) = oneshot::channel();
    let sink: Arc<dyn Sink> = Arc::new(OneResult(Mutex::new(Some(sender))));
    let request = Request { operation: Operation::Read, offset: 0, data: buffer.lend(), token: 0 };
    image.submit(&request, &sink, &Arc::default());
    (buffer, result)
}

/// The first 512 bytes of an image.
async fn read_beginning(image: &Arc<Image>) -> Result<Vec<u8>, CallError> {
    let (mut buffer, result) = begin_read(image);
    // The buffer is leaked if this future is dropped before librbd has given it back.
    let result = result.await.unwrap_or(-i64::from(Errno::CANCELED.raw_os_error()));
    buffer.reclaim();
    if result < 0 {
        return Err(CallError { call: "rbd_aio_readv", errno: crate::errors::errno(result).raw_os_error() });
    }
    Ok(buffer.bytes().to_vec())
}

fn register(
    clusters: &Clusters,
    env: &Env,
    config: Config,
    lease: Lease,
    opened: Opened,
    info: &Info,
) -> Result<Arc<Bdev>, Error> {
    let Config { identity, spec, block_size, read_only, .. } = config;
    let disk = Disk {
        name: identity.name.clone(),
        block_size,
        object_size: info.object_size,
        is_read_only: read_only || spec.snapshot.is_some(),
        // Several hosts write to an image without that feature, if they write at all; with it, they would wait for each other.
        has_other_hosts: info.features & EXCLUSIVE_LOCK == 0,
        blocks: AtomicU64::new(Bytes(info.size).whole_blocks(block_size).0),
        addresses: lease.connection().addresses().to_owned(),
        open: Mutex::new(Some(Open { image: Arc::clone(opened.image()), lease, watch: None })),
        clusters: clusters.clone(),
        registry: Arc::clone(env.registry()),
        bdev: OnceLock::new(),
        following: Mutex::default(),
        resizing: Mutex::default(),
        failures: Failures::default(),
        errors: Counters::default(),
        lines: LogLimit::new(2, Duration::from_secs(10)),
        spec,
    };
    let disk = Arc::new(disk);
    let bdev = env.registry().register(identity, Arc::new(RbdDevice(Arc::clone(&disk))))?;
    disk.bdev.set(Arc::downgrade(&bdev)).expect("set once, here");
    // From here on, the disk closes it.
    drop(opened.take());
    Ok(bdev)
}

impl Disk {
    /// The image and the client; `None` after the disk was closed.
    pub fn parts(&self) -> Option<(Arc<Image>, Arc<Connection>)> {
        let open = lock(&self.open);
        open.as_ref().map(|open| (Arc::clone(&open.image), Arc::clone(open.lease.connection())))
    }

    pub fn info(&self) -> DiskInfo {
        DiskInfo { spec: self.spec.clone(), addresses: self.addresses.clone(), errors: self.errors.read() }
    }

    pub(crate) const fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Logs that another client has the lock of the image, and does not give it up. Any context.
    pub(crate) fn waits_for_lock(&self) {
        limited!(
            self.lines,
            warn,
            disk = self.name,
            "another client keeps the lock of the image: writes are tried again for some seconds"
        );
    }

    /// Whether a removal is under way. Any context.
    pub fn is_being_removed(&self) -> bool {
        self.bdev.get().and_then(Weak::upgrade).is_some_and(|bdev| bdev.is_doomed())
    }

    /// Records and logs a failed request. Any context.
    pub fn failed(&self, class: Class, failure: Failure) {
        self.errors.count(class);
        // If another thread has the lock, the client is told by the next failed request.
        if let Ok(open) = self.open.try_lock()
            && let Some(open) = &*open
        {
            open.lease.connection().count(class);
        }
        self.failures.add(&self.name, failure);
    }

    /// Starts to watch the image, on a thread for that. Without a watch, another client's resize goes unnoticed until the next
    /// opening; librbd keeps one for itself.
    fn start_watch(self: &Arc<Self>) {
        let Some((image, connection)) = self.parts() else { return };
        // From here on, until it is known that librbd copies writes: without a watch for ever.
        image.options_may_have_changed();
        let disk = Arc::downgrade(self);
        let notice = move || {
            if let Some(disk) = disk.upgrade() {
                disk.start_following();
            }
        };
        let disk = Arc::clone(self);
        let job = move || match Watch::new(&image, notice) {
            Ok(watch) => {
                disk.keep_watch(watch);
                // What has changed since the image was opened.
                disk.follow();
            }
            Err(error) => {
                if let Some((_, connection)) = disk.parts() {
                    connection.look_at(&error);
                }
                disk.has_no_watch(&error);
            }
        };
        if let Err(error) = connection.workers.start(self.spec.lane(), job) {
            self.has_no_watch(&error);
        }
    }

    fn has_no_watch(&self, error: &dyn std::fmt::Display) {
        tracing::warn!(disk = self.name, %error, "changes of the image's size will not be noticed");
    }

    /// Keeps a watch until the disk is closed, which it may be already. May wait for a lock of librbd.
    fn keep_watch(&self, watch: Watch) {
        if let Some(open) = &mut *lock(&self.open) {
            open.watch = Some(watch);
            return;
        }
        end_watch(watch, &self.name);
    }

    /// Takes over the present size and options of the image. Waits for a lock of librbd, and for the cluster.
    fn follow(&self) {
        // The last size that was read is published last.
        let _following = lock(&self.following);
        let Some((image, _)) = self.parts() else { return };
        self.follow_size(&image);
        if matches!(image.copies_writes(), Ok(false)) {
            limited!(
                self.lines,
                error,
                disk = self.name,
                "metadata of the image or of its pool switches rbd_disable_zero_copy_writes off: writes are copied twice, and those \
                 that fail may not end; `rbd config image remove IMAGE rbd_disable_zero_copy_writes`"
            );
        }
    }

    fn follow_size(&self, image: &Image) {
        let ended = lock(&self.resizing).ended;
        let Ok(size) = image.size() else { return };
        let blocks = Bytes(size).whole_blocks(self.block_size);
        let state = lock(&self.resizing);
        // A resize of this process sets the size itself, and lets the disk follow when it ends.
        if !state.is_resizing && state.ended == ended && self.blocks.load(Ordering::Relaxed) != blocks.0 {
            // The disk may be on its way out.
            let _ = self.publish(blocks, &state);
        }
    }

    /// Reports a new size. The caller has the lock of the resizes.
    fn publish(&self, blocks: Blocks, _: &ResizeState) -> Result<(), Error> {
        let gone = || aryk_bdev::Error::NotFound(self.name.clone());
        let bdev = self.bdev.get().and_then(Weak::upgrade).ok_or_else(gone)?;
        let before = self.blocks.swap(blocks.0, Ordering::Relaxed);
        // Another disk may have the name by now.
        self.registry
            .set_size(&bdev, blocks)
            .inspect_err(|_| self.blocks.store(before, Ordering::Relaxed))?;
        Ok(())
    }

    /// Reports the size that a resize has set.
    pub(crate) fn set_blocks(&self, blocks: Blocks) -> Result<(), Error> {
        self.publish(blocks, &lock(&self.resizing))
    }

    /// Takes over the present size and options of the image, on a thread for that.
    fn start_following(self: &Arc<Self>) {
        let Some((image, connection)) = self.parts() else { return };
        image.options_may_have_changed();
        let disk = Arc::clone(self);
        // If there is no thread, the next notice follows them.
        let _ = connection.workers.start(self.spec.lane(), move || disk.follow());
    }

    /// Closes the image and gives up the client.
    async fn end(&self) {
        let Some(Open { image, lease, watch }) = lock(&self.open).take() else { return };
        let connection = Arc::clone(lease.connection());
        if let Some(watch) = watch {
            let disk = self.name.clone();
            // Without a thread, the image stays open with its watch, and is counted below.
            let _ = connection.workers.start(Lane::End, move || end_watch(watch, &disk));
        }
        // The image closes after its watch, and after the calls that still use it.
        if !connection.close(&image, &self.name).await {
            self.clusters.leave(&lease, &self.spec, &image);
        }
    }
}

/// Ends a watch. May wait for a lock of librbd.
fn end_watch(watch: Watch, disk: &str) {
    if let Err(error) = watch.end() {
        tracing::warn!(disk, %error, "librbd does not end the watch of the image, which stays open");
    }
}

/// The device of a disk.
#[derive(Debug)]
pub(crate) struct RbdDevice(pub(crate) Arc<Disk>);

impl Device for RbdDevice {
    fn product(&self) -> &'static str {
        "Ceph Rbd Disk"
    }

    fn geometry(&self) -> Geometry {
        let Disk { block_size, object_size, blocks, .. } = &*self.0;
        Geometry {
            optimal_io_blocks: Bytes(*object_size).whole_blocks(*block_size),
            ..Geometry::plain(*block_size, Blocks(blocks.load(Ordering::Relaxed)))
        }
    }

    fn limits(&self) -> Limits {
        let blocks = |bytes: u64| Bytes(bytes).whole_blocks(self.0.block_size);
        Limits {
            depth: DEPTH,
            transfer_blocks: blocks(DATA_MAX),
            segments: PIECES_MAX,
            unmap_blocks: blocks(UNMAP_MAX),
            write_zeroes_blocks: blocks(ZEROES_MAX),
            // A block lies within one object, where the cluster does it as one operation.
            compare_and_write_blocks: Blocks(1),
            // A host that writes takes the lock of the image away from the others, at any time.
            is_shared: !self.0.is_read_only,
            has_other_hosts: self.0.has_other_hosts,
            ..Limits::default()
        }
    }

    fn ops(&self) -> OpSet {
        let compares = self.0.block_size == COMPARE_AND_WRITE_BYTES;
        let ops = if compares { OpSet::PLAIN.with(Op::CompareAndWrite) } else { OpSet::PLAIN };
        if self.0.is_read_only { ops.without_changes() } else { ops }
    }

    fn is_read_only(&self) -> bool {
        self.0.is_read_only
    }

    fn last_failure(&self) -> Option<Failure> {
        self.0.failures.last()
    }

    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        self.0.failures.failed_block(lba, blocks)
    }

    fn tell_left_out(&self) {
        self.0.failures.tell_left_out(&self.0.name);
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.0.end().await;
            self.0.clusters.end_unused().await;
        })
    }

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let prepared = self.0.parts().ok_or(OpenError::Removed);
        let prepared = prepared.and_then(|(_, connection)| connection.prepare(reactor).map_err(no_link));
        Box::pin(std::future::ready(prepared))
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (image, connection) = self.0.parts().ok_or(OpenError::Removed)?;
        let channel = RbdChannel::open(&connection, &self.0, image, root, cx).map_err(no_link)?;
        Ok(Box::new(channel))
    }
}

fn no_link(error: io::Error) -> OpenError {
    OpenError::Unavailable(format!("no link to librbd: {error}"))
}

/// The new size of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// This number of bytes, at least the present size.
    GrowTo(Bytes),
    /// This number of bytes, even if the present size is larger: the data behind the new end is destroyed.
    Exactly(Bytes),
}

/// The state of a resize.
#[derive(Debug)]
pub enum Resized {
    /// The disk has this number of bytes.
    Done(Bytes),
    /// The disk has shrunk, and its image has not.
    Shrinking(Shrinking),
}

/// Excludes other resizes of the disk until this is dropped.
#[derive(Debug)]
struct Resizing(Arc<Disk>);

impl Drop for Resizing {
    fn drop(&mut self) {
        let mut state = lock(&self.0.resizing);
        state.is_resizing = false;
        state.ended += 1;
        drop(state);
        // Another client may have resized the image meanwhile.
        self.0.start_following();
    }
}

impl Resizing {
    /// The number of blocks that the image has.
    async fn size(&self) -> Option<Blocks> {
        let (image, connection) = self.0.parts()?;
        let size = connection.workers.run(self.0.spec.lane(), move || image.size()).await.ok()?.ok()?;
        Some(Bytes(size).whole_blocks(self.0.block_size))
    }

    async fn set_size(&self, size: Bytes, may_shrink: bool) -> Result<(), Error> {
        let (image, connection) = self.0.parts().ok_or(Error::Ending)?;
        let resized =
            connection.workers.run(self.0.spec.lane(), move || image.resize(size.0, may_shrink)).await?;
        resized.map_err(|error| connection.failed("resize", &self.0.spec, error))
    }
}

/// Resizes a disk and its image.
///
/// # Errors
/// [`Error`].
pub async fn resize(bdev: &Arc<Bdev>, size: Size) -> Result<Resized, Error> {
    let disk = disk_of(bdev).ok_or_else(|| Error::NotOurs(bdev.name().to_owned()))?;
    let name = || disk.name.clone();
    if disk.is_read_only {
        return Err(Error::ReadOnly(name()));
    }
    if std::mem::replace(&mut lock(&disk.resizing).is_resizing, true) {
        return Err(Error::Resizing(name()));
    }
    let resizing = Resizing(Arc::clone(disk));
    let (Size::GrowTo(to) | Size::Exactly(to)) = size;
    let block_size = disk.block_size;
    let blocks = to.to_blocks(block_size).ok_or(Error::NotAMultiple { size: to, block_size })?;
    if blocks == Blocks::ZERO {
        return Err(Error::Empty(disk.spec.to_string()));
    }
    let before = bdev.blocks();
    let from = before.to_bytes(block_size);
    if to < from {
        if matches!(size, Size::GrowTo(_)) {
            return Err(Error::Shrinks { name: name(), from, to });
        }
        disk.set_blocks(blocks)?;
        return Ok(Resized::Shrinking(Shrinking { resizing, bdev: Arc::clone(bdev), before, to: blocks }));
    }
    resizing.set_size(to, false).await?;
    disk.set_blocks(blocks)?;
    Ok(Resized::Done(to))
}

/// A disk that has shrunk, and whose image has not.
#[derive(Debug)]
pub struct Shrinking {
    resizing: Resizing,
    bdev: Arc<Bdev>,
    before: Blocks,
    to: Blocks,
}

impl Shrinking {
    /// Waits until no request changes the range behind the new end any more. Any context.
    pub async fn settle(self) -> Settled {
        self.bdev.settle(Lba::ZERO + self.to..Lba::ZERO + self.before).await;
        Settled(self)
    }
}

/// A disk that has shrunk, and whose image may shrink now.
#[derive(Debug)]
pub struct Settled(Shrinking);

impl Settled {
    /// Shrinks the image, and returns its size. If that fails, the disk gets the size back that its image has.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn cut(self) -> Result<Bytes, Error> {
        let Shrinking { resizing, before, to, .. } = self.0;
        let size = to.to_bytes(resizing.0.block_size);
        match resizing.set_size(size, true).await {
            Ok(()) => Ok(size),
            Err(error) => {
                // librbd may have begun to shrink it.
                let present = resizing.size().await.unwrap_or(before);
                resizing.0.set_blocks(present)?;
                Err(error)
            }
        }
    }
}
