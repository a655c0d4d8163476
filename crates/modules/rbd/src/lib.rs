//! The rbd module: disks in images of Ceph clusters, by librbd, which is loaded when the first cluster is used.
//!
//! | file | contents |
//! | --- | --- |
//! | `clusters` | all clients of clusters: those that a caller registered, and those that disks share |
//! | `connection` | one client: its threads, its limits, its links to reactors |
//! | `workers` | threads for the calls of Ceph that block; `timer`: limits of waits |
//! | `link` | the way of requests and results between a reactor and librbd |
//! | `budget` | how much memory the requests of a link may take |
//! | `driver` | the reactor's end of a link, and the channels of all disks of a client there |
//! | `disk` | the disk of an image |
//! | `state` | what the cluster says about a disk's image: features, snapshots, locks |
//! | `key` | the key of a Ceph user |
//! | `errors` | what an errno of librbd means for a request |
//!
//! **No reactor calls librbd**, whose calls take locks and copy data. A reactor puts requests into a ring; a thread of the link
//! takes them out and calls librbd, which calls back on threads of its own; these add the results to a list of the link, which
//! the reactor takes as a whole. librbd copies writes from the guest's memory, and what it has read is copied there at the end.
#![forbid(unsafe_code)]

mod budget;
mod clusters;
mod connection;
mod disk;
mod driver;
mod errors;
mod key;
mod link;
mod remedy;
mod state;
#[cfg(test)]
mod tests;
mod timer;
mod workers;

pub use clusters::{CLIENTS_MAX, ClusterConfig, ClusterInfo, Clusters, DISKS_EACH, SHARED_MAX, option_name};
pub use connection::Counts;
pub use disk::{Resized, Settled, Shrinking, Size, resize};
pub use errors::{Class, ErrorCounts};
pub use key::{NotAKey, UserKey};
pub use state::{ImageState, state};

use aryk_bdev::{Bdev, Bytes, Env, Identity};
use aryk_librbd::{CallError, LoadError};
pub use aryk_librbd::{Lock, Snapshot};
use std::any::Any;
use std::io;
use std::sync::Arc;

/// Which image a disk is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// The pool.
    pub pool: String,
    /// The namespace in the pool.
    pub namespace: Option<String>,
    /// The image.
    pub image: String,
    /// The snapshot of the image, which is read-only.
    pub snapshot: Option<String>,
}

impl Spec {
    /// The lane of blocking calls for the image, when it is open.
    fn lane(&self) -> workers::Lane {
        workers::Lane::Pool(self.pool.clone())
    }

    /// The lane of blocking calls that open the image.
    fn opening_lane(&self) -> workers::Lane {
        workers::Lane::Opening(self.pool.clone())
    }
}

impl std::fmt::Display for Spec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/", self.pool)?;
        self.namespace.iter().try_for_each(|namespace| write!(f, "{namespace}/"))?;
        f.write_str(&self.image)?;
        self.snapshot.iter().try_for_each(|snapshot| write!(f, "@{snapshot}"))
    }
}

/// Configuration of a new disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name and UUID.
    pub identity: Identity,
    /// The image.
    pub spec: Spec,
    /// Bytes in a block.
    pub block_size: u32,
    /// Whether the disk is never written.
    pub read_only: bool,
    /// The size of the image to be created if there is none. An image of another size is refused.
    pub size: Option<Bytes>,
    /// Addresses of clients of ended processes, which must not write any more: they are excluded from the cluster first.
    pub predecessors: Vec<String>,
}

/// The client of a disk.
#[derive(Clone, Debug)]
pub enum Cluster {
    /// A registered one.
    Registered(String),
    /// One that all disks with this configuration share.
    Shared(ClusterConfig),
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// librbd cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// No thread can be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
    /// There is no registered cluster of that name.
    #[error("there is no Ceph cluster named `{0}`")]
    NoCluster(String),
    /// There is one already.
    #[error("a Ceph cluster named `{0}` exists already")]
    ClusterExists(String),
    /// The cluster has as many clients of this daemon as it may have.
    #[error(
        "this daemon has {} clients of the Ceph cluster already, which is the most: disks with the same user and configuration share \
         one, and so do disks that name a registered one (`cluster_name`)",
        clusters::CLIENTS_MAX
    )]
    TooManyClients,
    /// Disks use the cluster.
    #[error("the Ceph cluster `{name}` is used by {disks} disks")]
    ClusterInUse {
        /// Its name.
        name: String,
        /// Their number.
        disks: usize,
    },
    /// The client cannot connect.
    #[error("cannot connect to the Ceph cluster: {0}{remedy}", remedy = remedy::of_connect(.0.errno))]
    Connect(CallError),
    /// The predecessor's client cannot be excluded, so its last writes may still come.
    #[error(
        "cannot exclude the previous client {addresses} from the cluster: {error}; the Ceph user needs the monitor capability `profile rbd`"
    )]
    Fence {
        /// Its addresses.
        addresses: String,
        /// The failure.
        error: CallError,
    },
    /// The pool cannot be opened.
    #[error("cannot open the pool `{pool}`: {error}{remedy}", remedy = remedy::of_pool(error.errno))]
    Pool {
        /// Its name.
        pool: String,
        /// The failure.
        error: CallError,
    },
    /// The image cannot be created, opened or resized.
    #[error("cannot {action} the image `{image}`: {error}{remedy}", remedy = remedy::of_image(error.errno))]
    Image {
        /// What failed.
        action: &'static str,
        /// The image.
        image: String,
        /// The failure.
        error: CallError,
    },
    /// The image has another size than the requested one.
    #[error(
        "the image `{image}` exists and has {size} bytes, not {requested}: to use it, give no size; the disk can be resized later"
    )]
    OtherSize {
        /// The image.
        image: String,
        /// Its size.
        size: Bytes,
        /// The requested size.
        requested: Bytes,
    },
    /// The image is smaller than a block.
    #[error("the image `{0}` has no whole block")]
    Empty(String),
    /// The block size is not one that a disk of this image can have.
    #[error("a block size of {0} is not a power of two from 512 to the image's stripe unit")]
    BlockSize(u32),
    /// The image is a clone with an encryption format of librbd's.
    #[error(
        "the image `{0}` is a clone that librbd has encrypted (`rbd encryption format`), which only librbd can read; once \
         `rbd flatten --encryption-passphrase-file FILE` of Ceph 18 has separated it from its parent, open it by `aryk luks open`"
    )]
    Encrypted(String),
    /// librbd would keep memory of requests after their end.
    #[error(
        "metadata of the image `{0}` or of its pool switches rbd_disable_zero_copy_writes off, with which librbd would read memory of \
         VMs that have gone: `rbd config image remove IMAGE rbd_disable_zero_copy_writes`, or the same with `pool` and the pool"
    )]
    ZeroCopy(String),
    /// The cluster does not answer.
    #[error("the cluster does not answer about the image `{0}`: `ceph -s` shows its state")]
    NoAnswer(String),
    /// librbd has requests of a removed disk to the image.
    #[error(
        "the cluster has not ended the last requests of a removed disk to the image `{0}`, which may still change it: try again when the cluster answers"
    )]
    Left(String),
    /// The size is not a whole number of blocks.
    #[error("{size} bytes are not a multiple of the block size, {block_size}")]
    NotAMultiple {
        /// The size.
        size: Bytes,
        /// Bytes in a block.
        block_size: u32,
    },
    /// The new size is smaller, and shrinking was not requested.
    #[error(
        "`{name}` has {from} bytes; shrinking it to {to} bytes destroys the data behind the new end, and was not requested"
    )]
    Shrinks {
        /// The disk.
        name: String,
        /// The present size.
        from: Bytes,
        /// The requested size.
        to: Bytes,
    },
    /// The disk is read-only.
    #[error("`{0}` is read-only: its size cannot be set")]
    ReadOnly(String),
    /// Another call is resizing the disk.
    #[error("`{0}` is already being resized")]
    Resizing(String),
    /// The disk belongs to another module.
    #[error("`{0}` is not a disk of a Ceph image")]
    NotOurs(String),
    /// The daemon is ending.
    #[error("the client of the Ceph cluster is ending")]
    Ending,
    /// The block layer returned an error.
    #[error(transparent)]
    Bdev(#[from] aryk_bdev::Error),
}

impl Error {
    /// Whether the cluster has excluded the client of the call. A new client may succeed.
    pub const fn is_blocklisted(&self) -> bool {
        match self {
            Self::Fence { error, .. } | Self::Pool { error, .. } | Self::Image { error, .. } => {
                error.is_blocklisted()
            }
            _ => false,
        }
    }

    /// Whether a client was connected for the call, or tried to connect, and a try for the same object soon will need another.
    pub const fn has_used_cluster(&self) -> bool {
        match self {
            Self::Connect(_)
            | Self::Fence { .. }
            | Self::Pool { .. }
            | Self::Image { .. }
            | Self::OtherSize { .. }
            | Self::Empty(_)
            | Self::BlockSize(_)
            | Self::Encrypted(_)
            | Self::ZeroCopy(_)
            | Self::Left(_)
            | Self::NoAnswer(_) => true,
            Self::Load(_)
            | Self::Thread(_)
            | Self::NoCluster(_)
            | Self::ClusterExists(_)
            | Self::TooManyClients
            | Self::ClusterInUse { .. }
            | Self::NotAMultiple { .. }
            | Self::Shrinks { .. }
            | Self::ReadOnly(_)
            | Self::Resizing(_)
            | Self::NotOurs(_)
            | Self::Ending
            | Self::Bdev(_) => false,
        }
    }
}

/// A client that is connected, for one new disk.
#[derive(Debug)]
pub struct Client {
    clusters: Clusters,
    lease: clusters::Lease,
}

impl Client {
    /// Its addresses, by which a successor excludes it: to be stored durably before the disk is created.
    pub fn addresses(&self) -> &str {
        self.lease.connection().addresses()
    }
}

/// Connects the client of a new disk, unless another disk has connected it. Control context; does not block.
///
/// # Errors
/// [`Error`].
pub async fn connect(clusters: &Clusters, cluster: &Cluster) -> Result<Client, Error> {
    match clusters.connect(cluster).await {
        Ok(lease) => Ok(Client { clusters: clusters.clone(), lease }),
        Err(error) => {
            clusters.end_unused().await;
            Err(error)
        }
    }
}

/// Creates a disk of an image, as soon as the image is open. Control context; does not block.
///
/// # Errors
/// [`Error`].
pub async fn create(client: Client, env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let Client { clusters, lease } = client;
    let created = disk::create(&clusters, env, lease, config).await;
    if created.is_err() {
        clusters.end_unused().await;
    }
    created
}

/// What is known of a disk of this module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// The image.
    pub spec: Spec,
    /// The addresses of the client.
    pub addresses: String,
    /// Failed requests, by kind.
    pub errors: ErrorCounts,
}

/// Returns what is known of `bdev`; `None` if it is not a disk of this module.
pub fn info(bdev: &Bdev) -> Option<DiskInfo> {
    disk_of(bdev).map(|disk| disk.info())
}

fn disk_of(bdev: &Bdev) -> Option<&Arc<disk::Disk>> {
    let device: &dyn Any = bdev.device().as_ref();
    device.downcast_ref::<disk::RbdDevice>().map(|device| &device.0)
}
