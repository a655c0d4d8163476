//! The functions of libibverbs and librdmacm that are used here, found at run time. Any context.

use crate::verbs::{
    AsyncEvent, CmEvent, CmId, CompChannel, ConnParam, Context, Cq, DeviceAttr, EventChannel, Mr, Qp, QpAttr,
    QpInitAttr, Srq, SrqInitAttr,
};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// The library's name where the dynamic linker finds it. It brings libibverbs.
const PATH: &str = "librdmacm.so.1";

/// Why the libraries cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The dynamic linker cannot load them.
    #[error("cannot load RDMA's libraries ({0}): install Debian's packages librdmacm1 and ibverbs-providers")]
    Missing(String),
    /// A function is missing.
    #[error("{PATH} has no function {0}: install newer packages librdmacm1 and libibverbs1")]
    TooOld(&'static str),
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
            /// The library is librdmacm, and stays loaded for the life of the process.
            unsafe fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                $(
                    // SAFETY: functions with these names have the signatures of rdma-core's headers.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    };
                    let Ok($name) = found.map(|found| *found) else { return Err(stringify!($name)) };
                )*
                Ok(Self { $($name,)* })
            }
        }
    };
}

table! {
    ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut c_void;
    ibv_dealloc_pd: fn(*mut c_void) -> c_int;
    ibv_reg_mr: fn(*mut c_void, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    ibv_destroy_cq: fn(*mut Cq) -> c_int;
    ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut Qp) -> c_int;
    ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut Cq, u32);
    ibv_create_srq: fn(*mut c_void, *mut SrqInitAttr) -> *mut Srq;
    ibv_destroy_srq: fn(*mut Srq) -> c_int;
    ibv_get_async_event: fn(*mut Context, *mut AsyncEvent) -> c_int;
    ibv_ack_async_event: fn(*mut AsyncEvent);
    rdma_create_event_channel: fn() -> *mut EventChannel;
    rdma_destroy_event_channel: fn(*mut EventChannel);
    rdma_create_id: fn(*mut EventChannel, *mut *mut CmId, *mut c_void, u32) -> c_int;
    rdma_destroy_id: fn(*mut CmId) -> c_int;
    rdma_bind_addr: fn(*mut CmId, *mut c_void) -> c_int;
    rdma_listen: fn(*mut CmId, c_int) -> c_int;
    rdma_resolve_addr: fn(*mut CmId, *mut c_void, *mut c_void, c_int) -> c_int;
    rdma_resolve_route: fn(*mut CmId, c_int) -> c_int;
    rdma_connect: fn(*mut CmId, *mut ConnParam) -> c_int;
    rdma_get_src_port: fn(*mut CmId) -> u16;
    rdma_create_qp: fn(*mut CmId, *mut c_void, *mut QpInitAttr) -> c_int;
    rdma_accept: fn(*mut CmId, *mut ConnParam) -> c_int;
    rdma_reject: fn(*mut CmId, *const c_void, u8) -> c_int;
    rdma_disconnect: fn(*mut CmId) -> c_int;
    rdma_get_cm_event: fn(*mut EventChannel, *mut *mut CmEvent) -> c_int;
    rdma_ack_cm_event: fn(*mut CmEvent) -> c_int;
}

/// libibverbs and librdmacm. They are never unloaded: the drivers of devices that they have loaded may have threads.
#[derive(Clone)]
pub struct Library(pub(crate) Arc<Table>);

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("librdmacm")
    }
}

impl Library {
    /// Loads the libraries. Reads files.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: the initialisers of rdma-core's libraries run in any process.
        let loaded = unsafe { libloading::Library::new(PATH) };
        let loaded = ManuallyDrop::new(loaded.map_err(|error| LoadError::Missing(error.to_string()))?);
        // SAFETY: it is librdmacm, and never unloaded. Functions of libibverbs are found too, since the search includes the
        // libraries that this one needs.
        let table = unsafe { Table::find(&loaded) }.map_err(LoadError::TooOld)?;
        Ok(Self(Arc::new(table)))
    }
}
