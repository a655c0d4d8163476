//! All clients of clusters: registered ones, and those that disks with the same configuration share. Control context.
//!
//! A client is connected for its first disk, or when it is registered, and ends after its last disk, or when it is unregistered.
//! Disks that name no client share [`SHARED_MAX`] of each configuration, of which a new disk gets the one with the fewest disks.
//! A client that its cluster has excluded gets no more disks, nor does one whose handles librbd does not close: the next disk
//! gets a new client of the same configuration.

use crate::connection::{Connection, Counts, Excluded};
use crate::timer::sole;
use crate::workers::{Lane, Workers, lock};
use crate::{Cluster, Error, Spec, UserKey};
use aryk_librbd::{Image, Library};
use aryk_reactor::CoreSet;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use tokio::sync::OnceCell;

/// Clients of one cluster, at most. Each has some 40 descriptors, one more for each OSD, and a dozen threads, and a process has a
/// limited number of both: a client for each of thousands of disks would take them from all others.
pub const CLIENTS_MAX: usize = 64;

/// Disks that share a client before another one is made. `cargo xtask bench rbd` compares arrangements.
pub const DISKS_EACH: usize = 4;

/// Clients that are made by themselves for disks of one user and configuration, at most.
pub const SHARED_MAX: usize = 4;

/// The name of an option of Ceph as Ceph itself reads it: without white space around it, and with underscores.
pub fn option_name(name: &str) -> String {
    name.split([' ', '\t', '-', '_']).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("_")
}

/// What a client is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterConfig {
    /// Ceph's user: `admin`, not `client.admin`.
    pub user: Option<String>,
    /// The configuration file. `None`: `$CEPH_CONF`, or Ceph's usual file, unless there are options.
    pub file: Option<PathBuf>,
    /// The file with the user's key.
    pub key_file: Option<PathBuf>,
    /// The user's key, instead of one in a file.
    pub key: Option<UserKey>,
    /// Options of Ceph's configuration.
    pub options: BTreeMap<String, String>,
    /// The cores of the client's threads. `None`: those of [`Clusters::new`].
    pub cores: Option<CoreSet>,
}

impl ClusterConfig {
    /// Whether a configuration file is read.
    pub(crate) fn reads_file(&self) -> bool {
        self.file.is_some() || self.options.is_empty()
    }

    /// Whether both are of one cluster, as far as the configuration tells: they find its monitors in the same way.
    fn is_of_cluster(&self, other: &Self) -> bool {
        let monitors = |config: &Self| {
            let (_, hosts) = config.options.iter().find(|(name, _)| option_name(name) == "mon_host")?;
            Some(hosts.clone())
        };
        (&self.file, self.reads_file(), monitors(self)) == (&other.file, other.reads_file(), monitors(other))
    }
}

/// A client that is connected, or that somebody is connecting.
#[derive(Debug)]
struct Entry {
    /// The name of a registered client.
    name: Option<String>,
    config: ClusterConfig,
    connection: OnceCell<Arc<Connection>>,
    /// Number of [`Lease`]s.
    users: AtomicUsize,
}

impl Entry {
    fn is_usable(&self) -> bool {
        self.connection.get().is_none_or(|connection| connection.is_usable())
    }
}

/// The use of a client by one disk, or by the list of registered clients.
#[derive(Debug)]
pub(crate) struct Lease(Arc<Entry>);

impl Lease {
    fn new(entry: &Arc<Entry>) -> Self {
        entry.users.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(entry))
    }

    pub fn connection(&self) -> &Arc<Connection> {
        self.0.connection.get().expect("a lease is given out when the client is connected")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct State {
    entries: Vec<Arc<Entry>>,
    registered: BTreeMap<String, Lease>,
}

/// The image of a removed disk. Each request has a reference to the image.
#[derive(Debug)]
struct Left {
    config: ClusterConfig,
    spec: Spec,
    image: Weak<Image>,
}

#[derive(Debug)]
struct Inner {
    path: Option<PathBuf>,
    cores: Option<CoreSet>,
    library: OnceCell<Library>,
    state: Mutex<State>,
    /// Number of clients that were ever connected.
    connected: AtomicU64,
    /// Images of removed disks, as long as librbd has requests to them.
    left: Mutex<Vec<Left>>,
    excluded: Excluded,
}

/// What is known of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterInfo {
    /// The name under which it is registered.
    pub name: Option<String>,
    /// Its name in the log, which no other client has.
    pub label: String,
    /// Its configuration.
    pub config: ClusterConfig,
    /// Its addresses.
    pub addresses: String,
    /// Disks that use it.
    pub disks: usize,
    /// Whether the cluster has excluded it.
    pub is_blocklisted: bool,
    /// Its counters.
    pub counts: Counts,
}

/// The clients of all clusters. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Clusters(Arc<Inner>);

impl Clusters {
    /// No clients. librbd is loaded from `path` when the first is needed, by the dynamic linker's rules if `None`. The threads of
    /// clients run on `cores`, or on those of the thread that first needs a client.
    pub fn new(path: Option<PathBuf>, cores: Option<CoreSet>) -> Self {
        Self(Arc::new(Inner {
            path,
            cores,
            library: OnceCell::new(),
            state: Mutex::default(),
            connected: AtomicU64::new(0),
            left: Mutex::default(),
            excluded: Excluded::default(),
        }))
    }

    /// Notes the image of a removed disk, to which librbd may have requests.
    pub(crate) fn leave(&self, lease: &Lease, spec: &Spec, image: &Arc<Image>) {
        let (config, spec, image) = (lease.0.config.clone(), spec.clone(), Arc::downgrade(image));
        lock(&self.0.left).push(Left { config, spec, image });
    }

    /// Whether librbd has requests of a removed disk to an image of the cluster of `lease`.
    pub(crate) fn has_left(&self, lease: &Lease, spec: &Spec) -> bool {
        let mut left = lock(&self.0.left);
        left.retain(|left| left.image.strong_count() > 0);
        left.iter().any(|left| left.spec == *spec && left.config.is_of_cluster(&lease.0.config))
    }

    /// As [`Clusters::new`], with a library that is loaded already.
    pub fn with_library(library: Library) -> Self {
        let clusters = Self::new(None, None);
        clusters.0.library.set(library).expect("just created");
        clusters
    }

    async fn library(&self) -> Result<&Library, Error> {
        let load = async || {
            let path = self.0.path.clone();
            let loader = Workers::new("librbd", self.0.cores.clone());
            Ok::<_, Error>(loader.run(Lane::Client, move || Library::load(path.as_deref())).await??)
        };
        self.0.library.get_or_try_init(load).await
    }

    /// The client of a disk, connected.
    pub(crate) async fn connect(&self, cluster: &Cluster) -> Result<Lease, Error> {
        match cluster {
            Cluster::Registered(name) => {
                let config = {
                    let state = lock(&self.0.state);
                    let lease = state.registered.get(name).ok_or_else(|| Error::NoCluster(name.clone()))?;
                    lease.0.config.clone()
                };
                self.connect_to(Some(name.clone()), config).await
            }
            Cluster::Shared(config) => self.connect_to(None, config.clone()).await,
        }
    }

    async fn connect_to(&self, name: Option<String>, config: ClusterConfig) -> Result<Lease, Error> {
        let lease = {
            let mut state = lock(&self.0.state);
            let of_cluster = state.entries.iter().filter(|entry| entry.config.is_of_cluster(&config));
            let has_room = of_cluster.count() < CLIENTS_MAX;
            let is_same =
                |entry: &&Arc<Entry>| entry.name == name && entry.config == config && entry.is_usable();
            let users = |entry: &Arc<Entry>| entry.users.load(Ordering::Relaxed);
            let same = || state.entries.iter().filter(is_same);
            let takes_more =
                |least: &Arc<Entry>| users(least) < DISKS_EACH || same().count() >= SHARED_MAX || !has_room;
            let least = same().min_by_key(|entry| users(entry));
            match least.filter(|least| name.is_some() || takes_more(least)) {
                Some(entry) => Lease::new(entry),
                None if !has_room => return Err(Error::TooManyClients),
                None => {
                    let (connection, users) = (OnceCell::new(), AtomicUsize::new(0));
                    let entry = Arc::new(Entry { name, config, connection, users });
                    state.entries.push(Arc::clone(&entry));
                    Lease::new(&entry)
                }
            }
        };
        let library = self.library().await?;
        let connect = async || {
            let Entry { name, config, .. } = &*lease.0;
            let number = self.0.connected.fetch_add(1, Ordering::Relaxed);
            // An excluded client may still have the name.
            let is_taken = |name: &String| {
                let state = lock(&self.0.state);
                state.entries.iter().filter(|entry| entry.name.as_ref() == Some(name)).count() > 1
            };
            let name = match name {
                Some(name) if is_taken(name) => format!("{name} {number}"),
                Some(name) => name.clone(),
                None => format!("client {number}"),
            };
            let cores = config.cores.clone().or_else(|| self.0.cores.clone());
            let config = ClusterConfig { cores, ..config.clone() };
            Connection::new(library, name, config, self.0.excluded.clone()).await.map(Arc::new)
        };
        lease.0.connection.get_or_try_init(connect).await?;
        Ok(lease)
    }

    /// Connects a client that disks can name.
    ///
    /// # Errors
    /// [`Error::ClusterExists`], [`Error::TooManyClients`], [`Error::Connect`].
    pub async fn register(&self, name: &str, config: ClusterConfig) -> Result<(), Error> {
        let is_known = |state: &State| state.registered.contains_key(name);
        if is_known(&lock(&self.0.state)) {
            return Err(Error::ClusterExists(name.to_owned()));
        }
        let connected = self.connect_to(Some(name.to_owned()), config).await;
        let registered = connected.and_then(|lease| {
            let mut state = lock(&self.0.state);
            // Another call may have been faster.
            if is_known(&state) {
                return Err(Error::ClusterExists(name.to_owned()));
            }
            state.registered.insert(name.to_owned(), lease);
            Ok(())
        });
        if registered.is_err() {
            self.end_unused().await;
        }
        registered
    }

    /// Ends a registered client.
    ///
    /// # Errors
    /// [`Error::NoCluster`], [`Error::ClusterInUse`].
    pub async fn unregister(&self, name: &str) -> Result<(), Error> {
        {
            let mut state = lock(&self.0.state);
            if !state.registered.contains_key(name) {
                return Err(Error::NoCluster(name.to_owned()));
            }
            let of_name = state.entries.iter().filter(|entry| entry.name.as_deref() == Some(name));
            let users: usize = of_name.map(|entry| entry.users.load(Ordering::Relaxed)).sum();
            if users > 1 {
                return Err(Error::ClusterInUse { name: name.to_owned(), disks: users - 1 });
            }
            state.registered.remove(name);
        }
        self.end_unused().await;
        Ok(())
    }

    /// Ends the clients that no disk uses and that are not registered.
    pub async fn end_unused(&self) {
        let unused: Vec<Arc<Entry>> = {
            let mut state = lock(&self.0.state);
            state.entries.extract_if(.., |entry| entry.users.load(Ordering::Relaxed) == 0).collect()
        };
        for entry in unused {
            // No lease refers to it any more, but calls that were given up may still use the connection.
            let Some(Entry { connection, .. }) = sole(entry).await else { continue };
            // `None`: it was never connected.
            let Some(connection) = connection.into_inner() else { continue };
            match sole(connection).await {
                Some(connection) => connection.end().await,
                None => {
                    tracing::error!("a client of a Ceph cluster is still in use, and is left to librados")
                }
            }
        }
    }

    /// Ends all clients that no disk uses, also registered ones.
    pub async fn close(&self) {
        lock(&self.0.state).registered.clear();
        self.end_unused().await;
    }

    /// Whether a client of this process has these addresses, and the cluster has not excluded it: then it must not be excluded
    /// for the sake of one disk, because others may use it.
    pub fn has_live(&self, addresses: &str) -> bool {
        let is_it = |connection: &Arc<Connection>| {
            connection.addresses() == addresses && !connection.is_blocklisted()
        };
        lock(&self.0.state).entries.iter().any(|entry| entry.connection.get().is_some_and(is_it))
    }

    /// The clients that are connected; those that are registered come first.
    pub fn list(&self) -> Vec<ClusterInfo> {
        let state = lock(&self.0.state);
        let info = |entry: &Arc<Entry>| {
            let connection = entry.connection.get()?;
            let is_registered = entry.name.as_ref().is_some_and(|name| {
                state.registered.get(name).is_some_and(|lease| Arc::ptr_eq(&lease.0, entry))
            });
            Some(ClusterInfo {
                name: entry.name.clone(),
                label: connection.name().to_owned(),
                config: entry.config.clone(),
                addresses: connection.addresses().to_owned(),
                disks: entry.users.load(Ordering::Relaxed) - usize::from(is_registered),
                is_blocklisted: connection.is_blocklisted(),
                counts: connection.counts(),
            })
        };
        let mut list: Vec<ClusterInfo> = state.entries.iter().filter_map(info).collect();
        list.sort_by_key(|info| (info.name.is_none(), info.name.clone()));
        list
    }
}
