//! The functions of librados and librbd that are used here, found at run time. Any context but a reactor's.

use crate::exit;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The library's name where the dynamic linker finds it. It brings librados.
pub const DEFAULT_PATH: &str = "librbd.so.1";

/// A function that librbd calls at the end of an asynchronous call.
pub(crate) type Callback = unsafe extern "C" fn(*mut c_void, *mut c_void);
/// A function that librbd calls when an image has changed.
pub(crate) type UpdateCallback = unsafe extern "C" fn(*mut c_void);
/// A function that librbd calls during a long operation.
pub(crate) type Progress = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `rbd_image_info_t`.
#[repr(C)]
pub(crate) struct ImageInfo {
    pub size: u64,
    pub obj_size: u64,
    pub num_objs: u64,
    pub order: c_int,
    pub block_name_prefix: [c_char; 24],
    pub parent_pool: i64,
    pub parent_name: [c_char; 96],
}

/// `rbd_snap_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SnapInfo {
    pub id: u64,
    pub size: u64,
    pub name: *const c_char,
}

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ConfigOption {
    pub name: *const c_char,
    pub value: *const c_char,
    pub source: c_int,
}

/// Why the library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The dynamic linker cannot load it.
    #[error("cannot load Ceph's library ({reason}): install Debian's packages librbd1 and librados2")]
    Missing {
        /// The linker's reason, which names the file.
        reason: String,
    },
    /// It lacks a function.
    #[error(
        "{} has no function {function}: it is older than Ceph 16; install newer packages librbd1 and librados2", path.display()
    )]
    TooOld {
        /// The library.
        path: PathBuf,
        /// The function.
        function: &'static str,
    },
}

/// A source of functions by their names.
pub trait Symbols {
    /// The address of the function `name`; null if there is none.
    fn find(&self, name: &CStr) -> *const c_void;
}

macro_rules! table {
    ($($name:ident: fn($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// The functions, with C's signatures.
        pub(crate) struct Table {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Table {
            /// Finds all functions; the error is the name of one that is missing.
            ///
            /// # Safety
            /// The functions have the signatures of Ceph's headers, and stay loaded for the life of the process.
            unsafe fn find(symbols: &dyn Symbols) -> Result<Self, &'static str> {
                $(
                    let name = concat!(stringify!($name), "\0");
                    let found = CStr::from_bytes_with_nul(name.as_bytes()).map(|name| symbols.find(name));
                    let $name = found.unwrap_or(std::ptr::null());
                    if $name.is_null() {
                        return Err(stringify!($name));
                    }
                )*
                Ok(Self {
                    $(
                        // SAFETY: the caller upholds that the address is that of a function with this signature.
                        $name: unsafe {
                            std::mem::transmute::<*const c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>($name)
                        },
                    )*
                })
            }
        }
    };
}

table! {
    rados_create: fn(*mut *mut c_void, *const c_char) -> c_int;
    rados_conf_read_file: fn(*mut c_void, *const c_char) -> c_int;
    rados_conf_set: fn(*mut c_void, *const c_char, *const c_char) -> c_int;
    rados_connect: fn(*mut c_void) -> c_int;
    rados_shutdown: fn(*mut c_void);
    rados_getaddrs: fn(*mut c_void, *mut *mut c_char) -> c_int;
    rados_buffer_free: fn(*mut c_char);
    rados_blocklist_add: fn(*mut c_void, *mut c_char, u32) -> c_int;
    rados_wait_for_latest_osdmap: fn(*mut c_void) -> c_int;
    rados_ioctx_create: fn(*mut c_void, *const c_char, *mut *mut c_void) -> c_int;
    rados_ioctx_set_namespace: fn(*mut c_void, *const c_char);
    rados_ioctx_destroy: fn(*mut c_void);
    rbd_image_options_create: fn(*mut *mut c_void);
    rbd_image_options_destroy: fn(*mut c_void);
    rbd_create4: fn(*mut c_void, *const c_char, u64, *mut c_void) -> c_int;
    rbd_aio_open: fn(*mut c_void, *const c_char, *mut *mut c_void, *const c_char, *mut c_void) -> c_int;
    rbd_aio_open_read_only: fn(*mut c_void, *const c_char, *mut *mut c_void, *const c_char, *mut c_void) -> c_int;
    rbd_aio_close: fn(*mut c_void, *mut c_void) -> c_int;
    rbd_stat: fn(*mut c_void, *mut ImageInfo, usize) -> c_int;
    rbd_get_size: fn(*mut c_void, *mut u64) -> c_int;
    rbd_get_features: fn(*mut c_void, *mut u64) -> c_int;
    rbd_get_stripe_unit: fn(*mut c_void, *mut u64) -> c_int;
    rbd_resize2: fn(*mut c_void, u64, bool, Progress, *mut c_void) -> c_int;
    rbd_snap_list: fn(*mut c_void, *mut SnapInfo, *mut c_int) -> c_int;
    rbd_snap_list_end: fn(*mut SnapInfo);
    rbd_is_exclusive_lock_owner: fn(*mut c_void, *mut c_int) -> c_int;
    rbd_list_lockers: fn(
        *mut c_void, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char,
        *mut usize,
    ) -> isize;
    rbd_config_image_list: fn(*mut c_void, *mut ConfigOption, *mut c_int) -> c_int;
    rbd_config_image_list_cleanup: fn(*mut ConfigOption, c_int);
    rbd_update_watch: fn(*mut c_void, *mut u64, UpdateCallback, *mut c_void) -> c_int;
    rbd_update_unwatch: fn(*mut c_void, u64) -> c_int;
    rbd_aio_create_completion: fn(*mut c_void, Callback, *mut *mut c_void) -> c_int;
    rbd_aio_get_return_value: fn(*mut c_void) -> isize;
    rbd_aio_release: fn(*mut c_void);
    rbd_aio_readv: fn(*mut c_void, *const libc::iovec, c_int, u64, *mut c_void) -> c_int;
    rbd_aio_writev: fn(*mut c_void, *const libc::iovec, c_int, u64, *mut c_void) -> c_int;
    rbd_aio_flush: fn(*mut c_void, *mut c_void) -> c_int;
    rbd_aio_discard: fn(*mut c_void, u64, u64, *mut c_void) -> c_int;
    rbd_aio_write_zeroes: fn(*mut c_void, u64, usize, *mut c_void, c_int, c_int) -> c_int;
    rbd_aio_compare_and_write: fn(
        *mut c_void, u64, usize, *const c_char, *const c_char, *mut c_void, *mut u64, c_int,
    ) -> isize;
}

/// librados and librbd. They are never unloaded, since their threads may run until the process ends.
#[derive(Clone)]
pub struct Library(pub(crate) Arc<Table>);

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("librbd")
    }
}

struct Loaded(ManuallyDrop<libloading::Library>);

impl Symbols for Loaded {
    fn find(&self, name: &CStr) -> *const c_void {
        // SAFETY: the symbol is used as an address only.
        let symbol = unsafe { self.0.get::<*const c_void>(name.to_bytes_with_nul()) };
        symbol.map_or(std::ptr::null(), |symbol| *symbol)
    }
}

impl Library {
    /// Loads the library at `path`, or [`DEFAULT_PATH`], and the libraries that it needs. Reads files.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load(path: Option<&Path>) -> Result<Self, LoadError> {
        let path = path.unwrap_or(Path::new(DEFAULT_PATH));
        // SAFETY: the operator names Ceph's library, or a substitute for tests: its initialisers run in any process.
        let loaded = unsafe { libloading::Library::new(path) };
        let loaded = loaded.map_err(|error| LoadError::Missing { reason: error.to_string() })?;
        exit::guard();
        // Functions of librados are found too, since the search includes the libraries that this one needs.
        let symbols = Loaded(ManuallyDrop::new(loaded));
        // SAFETY: functions with these names have the signatures of Ceph's headers, and the library is never unloaded.
        unsafe { Self::of(&symbols) }
            .map_err(|function| LoadError::TooOld { path: path.to_owned(), function })
    }

    /// The functions of `symbols`; the error is the name of one that is missing.
    ///
    /// # Safety
    /// The functions have the signatures and the behaviour of Ceph's, and stay loaded for the life of the process.
    ///
    /// # Errors
    /// The name of a missing function.
    pub unsafe fn of(symbols: &dyn Symbols) -> Result<Self, &'static str> {
        // SAFETY: the caller upholds it.
        unsafe { Table::find(symbols) }.map(|table| Self(Arc::new(table)))
    }
}
