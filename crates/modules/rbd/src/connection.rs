//! One client of a cluster: its threads, its limits, its links to reactors. Control context, but for [`Connection::take_link`];
//! nothing here blocks.

use crate::clusters::ClusterConfig;
use crate::driver::COMMANDS;
use crate::errors::{self, Class, ErrorCounts};
use crate::link::Link;
use crate::timer::{sole, within};
use crate::workers::{Lane, Workers, lock, own_cores};
use crate::{Error, Spec};
use aryk_librbd::{CallError, Cluster, Image, Library, Pool};
use aryk_log_limit::{LogLimit, limited};
use aryk_reactor::{Clock, DriverKey, Handle, Nanos};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OnceCell, Semaphore, oneshot};

/// Images of one pool that a client opens at the same time. An opening that takes longer than [`OPEN_PATIENCE`] does not count
/// any more: images that never open must not keep others from it.
const OPENS_MAX: usize = 32;
const OPEN_PATIENCE: Duration = Duration::from_secs(5);
/// How long a client, or a handle of an image, may take to close. After that it is left to librbd, and counted.
pub(crate) const CLOSE_PATIENCE: Duration = Duration::from_secs(5);
/// Options of each client, which its configuration can change. librados limits the requests that wait for OSDs, those of all
/// pools of a client together, and a thread that submits one more blocks: a pool that does not answer would stop the disks of
/// the others. The budgets of links limit the requests instead.
const OPTIONS: [(&str, &str); 2] = [("objecter_inflight_ops", "0"), ("objecter_inflight_op_bytes", "0")];
/// The option of librbd with which it copies the data of writes at once. An image's or a pool's metadata may switch it off, which
/// [`Image::copies_writes`] tells.
const COPIES_WRITES: &str = "rbd_disable_zero_copy_writes";
/// For how long a predecessor is excluded: an hour, which is Ceph's own default.
const EXCLUDED: Duration = Duration::from_secs(3600);

/// Counters of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Images that were opened.
    pub opens: u64,
    /// Images that could not be opened.
    pub failed_opens: u64,
    /// Handles that librbd did not close in time: they are left to it.
    pub quarantined: u64,
    /// Failed requests, by kind.
    pub errors: ErrorCounts,
}

#[derive(Debug, Default)]
struct Counters {
    opens: AtomicU64,
    failed_opens: AtomicU64,
    quarantined: AtomicU64,
    errors: errors::Counters,
}

/// Clients of ended processes that this process has excluded, and when. Any client of this process may have done it: an image
/// that cannot be opened gets a new client at each try.
#[derive(Clone, Debug, Default)]
pub(crate) struct Excluded(Arc<Mutex<HashMap<String, Nanos>>>);

impl Excluded {
    /// Whether a client is excluded for long enough.
    fn has(&self, addresses: &str) -> bool {
        let is_recent = |at: &Nanos| Clock::Monotonic.now().since(*at) < EXCLUDED / 2;
        lock(&self.0).get(addresses).is_some_and(is_recent)
    }

    fn add(&self, addresses: &str) {
        let now = Clock::Monotonic.now();
        let mut excluded = lock(&self.0);
        excluded.retain(|_, at| now.since(*at) < EXCLUDED);
        excluded.insert(addresses.to_owned(), now);
    }
}

/// A link of a reactor.
#[derive(Debug)]
struct Linked {
    reactor: Handle,
    /// The link, until the reactor's first channel takes it.
    spare: Option<Link>,
    /// Ready when the link's thread has ended.
    ended: oneshot::Receiver<()>,
}

/// The bounds of calls for images of one pool.
#[derive(Clone, Debug)]
struct PoolLimits {
    /// Permits to open an image.
    opens: Arc<Semaphore>,
    /// A permit for one call of [`crate::state`].
    state_calls: Arc<Semaphore>,
}

impl Default for PoolLimits {
    fn default() -> Self {
        Self { opens: Arc::new(Semaphore::new(OPENS_MAX)), state_calls: Arc::new(Semaphore::new(1)) }
    }
}

/// A handle that is being closed: whether it has closed, or was given up before.
#[derive(Debug, Default)]
struct Closing(AtomicU8);

impl Closing {
    const GIVEN_UP: u8 = 1;
    const CLOSED: u8 = 2;

    /// Whether it has not closed before.
    fn give_up(&self) -> bool {
        self.0.compare_exchange(0, Self::GIVEN_UP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether it was given up before.
    fn has_closed(&self) -> bool {
        self.0.swap(Self::CLOSED, Ordering::AcqRel) == Self::GIVEN_UP
    }
}

/// A client that is connected.
#[derive(Debug)]
pub(crate) struct Connection {
    name: String,
    cluster: Arc<Cluster>,
    addresses: String,
    pub workers: Workers,
    pools: Mutex<HashMap<String, PoolLimits>>,
    /// Handles that were given up and have not closed.
    unclosed: Arc<AtomicU64>,
    /// The key of the links' drivers.
    pub key: DriverKey,
    links: Mutex<Vec<Linked>>,
    /// Clients of ended processes, and whether they are excluded, for this client.
    fences: Mutex<HashMap<String, Arc<OnceCell<()>>>>,
    excluded: Excluded,
    counters: Counters,
    is_blocklisted: AtomicBool,
    lines: LogLimit,
}

/// An image that is closed when this is dropped, unless it is taken.
#[derive(Debug)]
pub(crate) struct Opened(Option<Arc<Image>>);

impl Opened {
    pub fn image(&self) -> &Arc<Image> {
        self.0.as_ref().expect("it is there until it is taken")
    }

    pub fn take(mut self) -> Arc<Image> {
        self.0.take().expect("it is taken once")
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Nobody has used the image, and nobody waits for its end.
        let _ = self.0.take().map(|image| image.close(|_| ()));
    }
}

impl Connection {
    /// Creates a client and connects it.
    pub async fn new(
        library: &Library,
        name: String,
        config: ClusterConfig,
        excluded: Excluded,
    ) -> Result<Self, Error> {
        // A link may be started by a reactor, whose core its thread must not get.
        let workers = Workers::new(&name, config.cores.clone().or_else(own_cores));
        let library = library.clone();
        let (cluster, addresses) = workers.run(Lane::Client, move || connect(&library, &config)).await??;
        tracing::info!(cluster = name, addresses, "connected to a Ceph cluster");
        Ok(Self {
            name,
            cluster,
            addresses,
            workers,
            pools: Mutex::default(),
            unclosed: Arc::default(),
            key: DriverKey::unique(),
            links: Mutex::default(),
            fences: Mutex::default(),
            excluded,
            counters: Counters::default(),
            is_blocklisted: AtomicBool::new(false),
            lines: LogLimit::new(5, Duration::from_secs(10)),
        })
    }

    pub fn addresses(&self) -> &str {
        &self.addresses
    }

    pub fn counts(&self) -> Counts {
        let Counters { opens, failed_opens, quarantined, errors } = &self.counters;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            opens: read(opens),
            failed_opens: read(failed_opens),
            quarantined: read(quarantined),
            errors: errors.read(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts a failed request. Any context.
    pub fn count(&self, class: Class) {
        self.counters.errors.count(class);
        if class == Class::Blocklisted {
            self.set_blocklisted();
        }
    }

    /// Whether images may be opened by this client: the cluster has not excluded it, and librbd closes its handles. A handle that
    /// does not close may still have the lock of its image.
    pub fn is_usable(&self) -> bool {
        !self.is_blocklisted() && self.unclosed.load(Ordering::Acquire) == 0
    }

    /// Whether the cluster has excluded this client.
    pub fn is_blocklisted(&self) -> bool {
        self.is_blocklisted.load(Ordering::Relaxed)
    }

    /// Notes that the cluster has excluded this client. Any context.
    fn set_blocklisted(&self) {
        if !self.is_blocklisted.swap(true, Ordering::Relaxed) {
            limited!(
                self.lines,
                error,
                cluster = self.name,
                addresses = self.addresses,
                "the Ceph cluster has excluded this client (blocklisted): its disks fail, and new disks get a new client"
            );
        }
    }

    /// Looks at the failure of a call: the cluster may have excluded this client.
    pub fn look_at(&self, error: &CallError) {
        if error.is_blocklisted() {
            self.set_blocklisted();
        }
    }

    /// Excludes the client of an ended process from the cluster, once.
    pub async fn fence(&self, addresses: &str) -> Result<(), Error> {
        if addresses == self.addresses {
            return Ok(());
        }
        let cell = Arc::clone(lock(&self.fences).entry(addresses.to_owned()).or_default());
        let fence = async || {
            let (cluster, of_call) = (Arc::clone(&self.cluster), addresses.to_owned());
            let is_excluded = self.excluded.has(addresses);
            let job = move || {
                // Each exclusion is a new map for the whole cluster.
                if !is_excluded {
                    cluster.blocklist(&of_call, EXCLUDED.as_secs() as u32)?;
                }
                // From then on, each request of this client brings the map that excludes the other to the OSD.
                cluster.wait_for_latest_osdmap()
            };
            let fenced: Result<(), CallError> = self.workers.run(Lane::Client, job).await?;
            fenced.map_err(|error| {
                self.look_at(&error);
                Error::Fence { addresses: addresses.to_owned(), error }
            })?;
            if !is_excluded {
                self.excluded.add(addresses);
                tracing::info!(
                    cluster = self.name,
                    addresses,
                    "the previous client is excluded from the Ceph cluster"
                );
            }
            Ok(())
        };
        cell.get_or_try_init(fence).await.map(drop)
    }

    /// The permit for a call of [`crate::state`] about an image of this pool.
    pub fn state_calls(&self, pool: &str) -> Arc<Semaphore> {
        self.limits(pool).state_calls
    }

    fn limits(&self, pool: &str) -> PoolLimits {
        lock(&self.pools).entry(pool.to_owned()).or_default().clone()
    }

    /// Opens a pool.
    pub async fn pool(&self, spec: &Spec) -> Result<Arc<Pool>, Error> {
        let (cluster, pool, namespace) =
            (Arc::clone(&self.cluster), spec.pool.clone(), spec.namespace.clone());
        let open = move || Pool::open(&cluster, &pool, namespace.as_deref());
        let opened = self.workers.run(spec.opening_lane(), open).await?;
        opened.map(Arc::new).map_err(|error| {
            self.look_at(&error);
            Error::Pool { pool: spec.pool.clone(), error }
        })
    }

    /// Opens an image, when fewer than [`OPENS_MAX`] others of its pool are being opened.
    pub async fn open(&self, pool: &Arc<Pool>, spec: &Spec, read_only: bool) -> Result<Opened, Error> {
        let opens = self.limits(&spec.pool).opens;
        let permit = opens.acquire().await.map_err(|_| Error::Ending)?;
        let (sender, mut opened) = oneshot::channel::<Result<Opened, CallError>>();
        let done = move |image: Result<Image, CallError>| {
            // If nobody waits any more, the image is closed again.
            let _ = sender.send(image.map(|image| Opened(Some(Arc::new(image)))));
        };
        // librbd starts threads of its own in this call: they get the cores of the calling thread.
        let (pool, image, snapshot) = (Arc::clone(pool), spec.image.clone(), spec.snapshot.clone());
        let open = move || Image::open(&pool, &image, snapshot.as_deref(), read_only, done);
        self.workers.run(spec.opening_lane(), open).await?;
        let in_time = within(OPEN_PATIENCE, &mut opened).await;
        drop(permit);
        let opened = match in_time {
            Some(opened) => opened,
            None => opened.await,
        };
        let opened = opened.map_err(|_| Error::Ending)?;
        let counter = if opened.is_ok() { &self.counters.opens } else { &self.counters.failed_opens };
        counter.fetch_add(1, Ordering::Relaxed);
        opened.map_err(|error| self.failed("open", spec, error))
    }

    /// The error of a call for an image.
    pub fn failed(&self, action: &'static str, spec: &Spec, error: CallError) -> Error {
        self.look_at(&error);
        Error::Image { action, image: spec.to_string(), error }
    }

    /// Closes an image. An image that librbd does not close in time is left to it; returns false then.
    pub async fn close(&self, image: &Arc<Image>, disk: &str) -> bool {
        let (sender, closed) = oneshot::channel();
        let (closing, unclosed) = (Arc::<Closing>::default(), Arc::clone(&self.unclosed));
        let of_call = Arc::clone(&closing);
        let done = move |result| {
            if of_call.has_closed() {
                unclosed.fetch_sub(1, Ordering::AcqRel);
            }
            // The receiver may have stopped waiting.
            drop(sender.send(result));
        };
        if image.close(done).is_err() {
            // An earlier removal has begun to close it, and was given up.
            return true;
        }
        let closed = within(CLOSE_PATIENCE, closed).await;
        match &closed {
            Some(Ok(Err(error))) => {
                tracing::warn!(disk, %error, "librbd reports an error of an image that it has closed");
            }
            Some(_) => {}
            None => self.quarantine(disk, &closing),
        }
        closed.is_some()
    }

    /// Counts a handle that is left to librbd.
    fn quarantine(&self, disk: &str, closing: &Closing) {
        // Added first, because its end may come at once.
        self.unclosed.fetch_add(1, Ordering::AcqRel);
        if !closing.give_up() {
            self.unclosed.fetch_sub(1, Ordering::AcqRel);
        }
        self.counters.quarantined.fetch_add(1, Ordering::Relaxed);
        tracing::error!(disk, "librbd does not close the image in time: its handle is left to librbd");
    }

    /// The links whose threads have not ended.
    fn links(&self) -> MutexGuard<'_, Vec<Linked>> {
        let mut links = lock(&self.links);
        links.retain_mut(|linked| linked.ended.try_recv() == Err(TryRecvError::Empty));
        links
    }

    fn start_link(&self) -> io::Result<(Link, oneshot::Receiver<()>)> {
        Link::start(COMMANDS, self.workers.cores().cloned())
    }

    /// Starts a link for a reactor, unless it has one.
    pub fn prepare(&self, reactor: &Handle) -> io::Result<()> {
        let has_link = |links: &[Linked]| links.iter().any(|linked| linked.reactor == *reactor);
        if has_link(&self.links()) {
            return Ok(());
        }
        let (link, ended) = self.start_link()?;
        let mut links = self.links();
        // Another call may have been faster.
        if !has_link(&links) {
            links.push(Linked { reactor: reactor.clone(), spare: Some(link), ended });
        }
        Ok(())
    }

    /// Takes the link that was started for a reactor. The reactor starts one if its last channel has just ended the one that
    /// [`Connection::prepare`] found. Reactor context.
    pub fn take_link(&self, reactor: &Handle) -> io::Result<Link> {
        let take = |linked: &mut Linked| linked.spare.take_if(|_| linked.reactor == *reactor);
        let spare = self.links().iter_mut().find_map(take);
        if let Some(link) = spare {
            return Ok(link);
        }
        let (link, ended) = self.start_link()?;
        self.links().push(Linked { reactor: reactor.clone(), spare: None, ended });
        Ok(link)
    }

    /// Ends a client that no disk uses.
    pub async fn end(self) {
        let Self { name, cluster, workers, links, counters, .. } = self;
        let links = std::mem::take(&mut *lock(&links));
        let threads: Vec<_> = links.into_iter().map(|Linked { ended, .. }| ended).collect();
        let all_ended = async {
            for ended in threads {
                // An error says the same: the thread has ended.
                let _ = ended.await;
            }
        };
        let _ = within(CLOSE_PATIENCE, all_ended).await;
        let has_left = counters.quarantined.load(Ordering::Relaxed) > 0;
        let end = async {
            // Pools of images that are being opened or closed refer to it. The last image that is left to librbd ends it.
            let cluster = if has_left { Arc::into_inner(cluster)? } else { sole(cluster).await? };
            workers.run(Lane::End, move || cluster.shut_down()).await.ok()
        };
        match within(CLOSE_PATIENCE, end).await.flatten() {
            Some(()) => tracing::info!(cluster = name, "the client of the Ceph cluster has ended"),
            None => tracing::error!(
                cluster = name,
                "the client of the Ceph cluster does not end, and is left to librados"
            ),
        }
    }
}

/// Connects a client. Blocks.
fn connect(library: &Library, config: &ClusterConfig) -> Result<(Arc<Cluster>, String), Error> {
    let cluster = Cluster::new(library, config.user.as_deref()).map_err(Error::Connect)?;
    let connected = || {
        if config.reads_file() {
            cluster.read_config(config.file.as_deref())?;
        }
        if let Some(keyring) = &config.key_file {
            cluster.set("keyring", &keyring.to_string_lossy())?;
        }
        if let Some(key) = &config.key {
            cluster.set_secret(c"key", key.as_c_str())?;
        }
        OPTIONS.iter().try_for_each(|(option, value)| cluster.set(option, value))?;
        config.options.iter().try_for_each(|(option, value)| cluster.set(option, value))?;
        // Otherwise librbd could read the data of a write when its VM has gone.
        cluster.set(COPIES_WRITES, "true")?;
        cluster.connect()?;
        cluster.addresses()
    };
    match connected() {
        Ok(addresses) => Ok((Arc::new(cluster), addresses)),
        Err(error) => {
            cluster.shut_down();
            Err(Error::Connect(error))
        }
    }
}
