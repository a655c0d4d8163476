//! A client of a cluster, and its pools. Any context but a reactor's; what blocks says so.

use crate::table::Table;
use crate::{CallError, Library, c_string, exit};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;

/// A client of a cluster. Without [`Cluster::shut_down`], a thread of its own ends it when this is dropped.
pub struct Cluster {
    library: Library,
    /// Null once the client has ended.
    raw: *mut c_void,
}

// SAFETY: librados allows calls for one client from any threads at the same time.
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cluster").field(&self.raw).finish()
    }
}

impl Cluster {
    /// Creates a client for the user `client.USER`, or `client.admin`, which is not connected. librados starts threads, which
    /// may use the cores of the calling thread.
    ///
    /// # Errors
    /// librados's.
    pub fn new(library: &Library, user: Option<&str>) -> Result<Self, CallError> {
        const CALL: &str = "rados_create";
        let user = user.map(|user| c_string(CALL, user)).transpose()?;
        let mut raw = std::ptr::null_mut();
        let user = user.as_ref().map_or(std::ptr::null(), |user| user.as_ptr());
        exit::begins();
        // SAFETY: `raw` is written, and `user` is null or a string, which librados copies.
        let result = unsafe { (library.0.rados_create)(&raw mut raw, user) };
        CallError::check(CALL, result).inspect_err(|_| exit::has_ended())?;
        Ok(Self { library: library.clone(), raw })
    }

    pub(crate) fn table(&self) -> &Table {
        &self.library.0
    }

    /// Reads a configuration file; `None`: `$CEPH_CONF`, or the first of Ceph's usual files.
    ///
    /// # Errors
    /// librados's.
    pub fn read_config(&self, path: Option<&Path>) -> Result<(), CallError> {
        const CALL: &str = "rados_conf_read_file";
        let text = path.map(|path| path.to_str().ok_or(CallError { call: CALL, errno: libc::EINVAL }));
        let path = text.transpose()?.map(|path| c_string(CALL, path)).transpose()?;
        let path = path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: the client exists, and `path` is null or a string, which librados copies.
        CallError::check(CALL, unsafe { (self.table().rados_conf_read_file)(self.raw, path) }).map(drop)
    }

    /// Sets an option.
    ///
    /// # Errors
    /// librados's: `ENOENT` if there is no such option.
    pub fn set(&self, option: &str, value: &str) -> Result<(), CallError> {
        const CALL: &str = "rados_conf_set";
        self.set_secret(&c_string(CALL, option)?, &c_string(CALL, value)?)
    }

    /// Sets an option without a copy of the value, except that of librados.
    ///
    /// # Errors
    /// As [`Cluster::set`].
    pub fn set_secret(&self, option: &CStr, value: &CStr) -> Result<(), CallError> {
        const CALL: &str = "rados_conf_set";
        // SAFETY: the client exists, and librados copies the strings.
        let result = unsafe { (self.table().rados_conf_set)(self.raw, option.as_ptr(), value.as_ptr()) };
        CallError::check(CALL, result).map(drop)
    }

    /// Connects to the cluster. Blocks, for up to five minutes by Ceph's default.
    ///
    /// # Errors
    /// librados's.
    pub fn connect(&self) -> Result<(), CallError> {
        // SAFETY: the client exists.
        CallError::check("rados_connect", unsafe { (self.table().rados_connect)(self.raw) }).map(drop)
    }

    /// The addresses of this client, as [`Cluster::blocklist`] takes them.
    ///
    /// # Errors
    /// librados's.
    pub fn addresses(&self) -> Result<String, CallError> {
        const CALL: &str = "rados_getaddrs";
        let mut text = std::ptr::null_mut();
        // SAFETY: the client exists, and `text` is written.
        CallError::check(CALL, unsafe { (self.table().rados_getaddrs)(self.raw, &raw mut text) })?;
        if text.is_null() {
            return Err(CallError { call: CALL, errno: libc::ENOTCONN });
        }
        // SAFETY: librados has allocated the string, which ends here.
        let addresses = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: it is freed once.
        unsafe { (self.table().rados_buffer_free)(text) };
        Ok(addresses)
    }

    /// Excludes the client with these addresses from the cluster for so many seconds. Blocks.
    ///
    /// # Errors
    /// librados's.
    pub fn blocklist(&self, addresses: &str, seconds: u32) -> Result<(), CallError> {
        const CALL: &str = "rados_blocklist_add";
        let addresses = c_string(CALL, addresses)?.into_raw();
        // SAFETY: the client exists, and the string is ours to change.
        let result = unsafe { (self.table().rados_blocklist_add)(self.raw, addresses, seconds) };
        // SAFETY: it comes from `into_raw`, and librados has not kept it.
        drop(unsafe { std::ffi::CString::from_raw(addresses) });
        CallError::check(CALL, result).map(drop)
    }

    /// Waits for the cluster's present OSD map. Blocks.
    ///
    /// # Errors
    /// librados's.
    pub fn wait_for_latest_osdmap(&self) -> Result<(), CallError> {
        // SAFETY: the client exists.
        let result = unsafe { (self.table().rados_wait_for_latest_osdmap)(self.raw) };
        CallError::check("rados_wait_for_latest_osdmap", result).map(drop)
    }

    /// Ends a client, which has no pools: each would have a reference to it. Blocks.
    pub fn shut_down(mut self) {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: each pool has a reference to its client, so there is none, and nobody uses the client after this.
        unsafe { (self.table().rados_shutdown)(raw) };
        exit::has_ended();
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        if raw.is_null() {
            return;
        }
        // The last reference may be that of a handle which librbd has closed late, on a thread of this client.
        let cluster = ManuallyDrop::new(Self { library: self.library.clone(), raw });
        let end = move || ManuallyDrop::into_inner(cluster).shut_down();
        // Without a thread, the client is leaked.
        let _ = std::thread::Builder::new().name("rados_end".into()).spawn(end);
    }
}

/// A pool and a namespace in it.
pub struct Pool {
    cluster: Arc<Cluster>,
    raw: *mut c_void,
}

// SAFETY: librbd allows the use of an I/O context from any thread; the namespace is set before others see the context.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.raw).finish()
    }
}

impl Pool {
    /// Opens the pool `name`. Blocks while the client has no map of the cluster.
    ///
    /// # Errors
    /// librados's: `ENOENT` if there is no such pool.
    pub fn open(cluster: &Arc<Cluster>, name: &str, namespace: Option<&str>) -> Result<Self, CallError> {
        const CALL: &str = "rados_ioctx_create";
        let name = c_string(CALL, name)?;
        let namespace = namespace.map(|name| c_string("rados_ioctx_set_namespace", name)).transpose()?;
        let mut raw = std::ptr::null_mut();
        let table = cluster.table();
        // SAFETY: the client exists, librados copies the name, and `raw` is written.
        let result = unsafe { (table.rados_ioctx_create)(cluster.raw, name.as_ptr(), &raw mut raw) };
        CallError::check(CALL, result)?;
        if let Some(namespace) = namespace {
            // SAFETY: the context was just created, and librados copies the name.
            unsafe { (table.rados_ioctx_set_namespace)(raw, namespace.as_ptr()) };
        }
        Ok(Self { cluster: Arc::clone(cluster), raw })
    }

    pub(crate) fn table(&self) -> &Table {
        self.cluster.table()
    }

    pub(crate) const fn raw(&self) -> *mut c_void {
        self.raw
    }

    /// Creates an image of `size` bytes with the cluster's default features. Blocks.
    ///
    /// # Errors
    /// librbd's: `EEXIST` if there is one of that name.
    pub fn create_image(&self, name: &str, size: u64) -> Result<(), CallError> {
        const CALL: &str = "rbd_create4";
        let name = c_string(CALL, name)?;
        let (table, mut options) = (self.table(), std::ptr::null_mut());
        // SAFETY: `options` is written.
        unsafe { (table.rbd_image_options_create)(&raw mut options) };
        // SAFETY: the context and the options exist, and librbd copies the name.
        let result = unsafe { (table.rbd_create4)(self.raw, name.as_ptr(), size, options) };
        // SAFETY: the options end here.
        unsafe { (table.rbd_image_options_destroy)(options) };
        CallError::check(CALL, result).map(drop)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: each image has a reference to its pool, so there is none; librbd uses contexts of its own.
        unsafe { (self.table().rados_ioctx_destroy)(self.raw) };
    }
}
