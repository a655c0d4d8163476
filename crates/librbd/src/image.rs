//! An open image: its life, and calls about the whole of it. Any context but a reactor's; what blocks says so.

use crate::table::{ImageInfo, Table};
use crate::{CallError, Pool, c_string};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::{MaybeUninit, size_of};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Set in [`Image::users`] once the image is being closed.
const CLOSED: u64 = 1 << 63;

/// The image was closed before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the image was closed before")]
pub struct Closed;

/// What is known of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Bytes.
    pub size: u64,
    /// Bytes of each of its objects.
    pub object_size: u64,
    /// Bytes that are next to each other in one object.
    pub stripe_unit: u64,
    /// The bits of `RBD_FEATURE_*`.
    pub features: u64,
}

/// An open image. Without [`Image::close`], it is leaked, and with it its pool and its client.
pub struct Image {
    pool: Arc<Pool>,
    raw: *mut c_void,
    /// Number of calls that use the handle now, and of watches, and [`CLOSED`].
    users: AtomicU64,
    /// What [`Image::close`] was given, until the last use has ended.
    closing: Mutex<Option<Box<Closing>>>,
    /// Number of changes of the image's options, as far as is known, and the number of them after which librbd has been seen to
    /// copy writes: [`Image::copies_writes`].
    pub(crate) changes: AtomicU64,
    pub(crate) checked: AtomicU64,
}

// SAFETY: librbd allows calls for one image from any threads at the same time.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Image").field(&self.raw).finish()
    }
}

/// A call that uses the handle, until this is dropped.
pub(crate) struct Use<'a>(&'a Image);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

type OpenDone = Box<dyn FnOnce(Result<Image, CallError>) + Send>;

/// An image that is being opened.
struct Opening {
    pool: Arc<Pool>,
    /// Written by librbd before it calls back.
    raw: *mut c_void,
    done: OpenDone,
}

/// An image that is being closed, which keeps its pool.
struct Closing {
    pool: Arc<Pool>,
    done: Box<dyn FnOnce(Result<(), CallError>) + Send>,
}

/// Creates a completion that calls `callback` with `context`.
///
/// # Safety
/// `callback` takes `context`, once, from any thread.
pub(crate) unsafe fn completion<T>(
    table: &Table,
    context: *mut T,
    callback: crate::table::Callback,
) -> Result<*mut c_void, CallError> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is written; the caller upholds the rest.
    let result = unsafe { (table.rbd_aio_create_completion)(context.cast(), callback, &raw mut raw) };
    CallError::check("rbd_aio_create_completion", result).map(|_| raw)
}

/// The result of a completion, which ends here.
///
/// # Safety
/// librbd has called back with `completion`, which was not released.
pub(crate) unsafe fn result_of(table: &Table, completion: *mut c_void) -> i64 {
    // SAFETY: the caller upholds it.
    let result = unsafe { (table.rbd_aio_get_return_value)(completion) };
    // SAFETY: as above; it is released once.
    unsafe { (table.rbd_aio_release)(completion) };
    result as i64
}

unsafe extern "C" fn opened(completion: *mut c_void, context: *mut c_void) {
    // SAFETY: `open` made the context from a box, and librbd calls back once.
    let Opening { pool, raw, done } = *unsafe { Box::from_raw(context.cast::<Opening>()) };
    // SAFETY: librbd has just called back with it.
    let result = unsafe { result_of(pool.table(), completion) };
    // After an error, the pool ends before `done` is called.
    let opened = CallError::check("rbd_aio_open", result as c_int).map(|_| pool);
    done(opened.map(|pool| Image {
        pool,
        raw,
        users: AtomicU64::new(0),
        closing: Mutex::default(),
        changes: AtomicU64::new(1),
        checked: AtomicU64::new(0),
    }));
}

unsafe extern "C" fn closed(completion: *mut c_void, context: *mut c_void) {
    // SAFETY: `close` made the context from a box, and librbd calls back once.
    let Closing { pool, done } = *unsafe { Box::from_raw(context.cast::<Closing>()) };
    // SAFETY: librbd has just called back with it.
    let result = unsafe { result_of(pool.table(), completion) };
    // The receiver of the result may end the client, so nothing of this call uses it any more.
    drop(pool);
    done(CallError::check("rbd_aio_close", result as c_int).map(drop));
}

unsafe extern "C" fn no_progress(_: u64, _: u64, _: *mut c_void) -> c_int {
    0
}

impl Image {
    /// Opens the image `name`, or a snapshot of it, which is read-only. `done` gets the image, on a thread of librbd; it must not
    /// block.
    pub fn open(
        pool: &Arc<Pool>,
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
        done: impl FnOnce(Result<Self, CallError>) + Send + 'static,
    ) {
        const CALL: &str = "rbd_aio_open";
        let names = c_string(CALL, name)
            .and_then(|name| Ok((name, snapshot.map(|snapshot| c_string(CALL, snapshot)).transpose()?)));
        let (name, snapshot) = match names {
            Ok(names) => names,
            Err(error) => return done(Err(error)),
        };
        let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |snapshot| snapshot.as_ptr());
        let (pool, table) = (Arc::clone(pool), pool.table());
        let open = if read_only { table.rbd_aio_open_read_only } else { table.rbd_aio_open };
        let context = Opening { pool: Arc::clone(&pool), raw: std::ptr::null_mut(), done: Box::new(done) };
        let context = Box::into_raw(Box::new(context));
        // SAFETY: `opened` takes the context, which it gets once.
        let started = unsafe { completion(table, context, opened) }.and_then(|completion| {
            // SAFETY: the pool exists, librbd copies the names, and writes the handle before it calls back.
            let raw = unsafe { &raw mut (*context).raw };
            // SAFETY: as above.
            let result = unsafe { open(pool.raw(), name.as_ptr(), raw, snapshot, completion) };
            CallError::check(CALL, result).inspect_err(|_| {
                // SAFETY: librbd does not call back after an error.
                unsafe { (table.rbd_aio_release)(completion) };
            })
        });
        if let Err(error) = started {
            // SAFETY: librbd has not started the call, and will not call back.
            let Opening { pool, done, .. } = *unsafe { Box::from_raw(context) };
            drop(pool);
            done(Err(error));
        }
    }

    pub(crate) fn table(&self) -> &Table {
        self.pool.table()
    }

    pub(crate) const fn raw(&self) -> *mut c_void {
        self.raw
    }

    /// Counts a use of the handle, unless the image is closed.
    pub(crate) fn begin_use(&self) -> bool {
        if self.users.fetch_add(1, Ordering::AcqRel) & CLOSED != 0 {
            self.end_use();
            return false;
        }
        true
    }

    /// Ends a use of the handle. The last one starts the end of a closed image.
    pub(crate) fn end_use(&self) {
        if self.users.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.start_close();
        }
    }

    pub(crate) fn used(&self, call: &'static str) -> Result<Use<'_>, CallError> {
        let error = CallError { call, errno: libc::ECANCELED };
        if self.begin_use() { Ok(Use(self)) } else { Err(error) }
    }

    /// Size, layout and features. Blocks.
    ///
    /// # Errors
    /// librbd's.
    pub fn info(&self) -> Result<Info, CallError> {
        let _use = self.used("rbd_stat")?;
        let (table, mut info) = (self.table(), MaybeUninit::<ImageInfo>::zeroed());
        // SAFETY: the handle is in use, and `info` is written.
        let result = unsafe { (table.rbd_stat)(self.raw, info.as_mut_ptr(), size_of::<ImageInfo>()) };
        CallError::check("rbd_stat", result)?;
        // SAFETY: all of it is initialised with zeroes, which are valid, and librbd has written valid values.
        let ImageInfo { size, obj_size: object_size, .. } = unsafe { info.assume_init() };
        let (features, mut stripe_unit) = (self.features()?, 0);
        // SAFETY: the handle is in use, and `stripe_unit` is written.
        let result = unsafe { (table.rbd_get_stripe_unit)(self.raw, &raw mut stripe_unit) };
        CallError::check("rbd_get_stripe_unit", result)?;
        Ok(Info { size, object_size, stripe_unit, features })
    }

    /// The present size in bytes. May wait for a lock of librbd.
    ///
    /// # Errors
    /// librbd's.
    pub fn size(&self) -> Result<u64, CallError> {
        let _use = self.used("rbd_get_size")?;
        let mut size = 0;
        // SAFETY: the handle is in use, and `size` is written.
        CallError::check("rbd_get_size", unsafe { (self.table().rbd_get_size)(self.raw, &raw mut size) })?;
        Ok(size)
    }

    /// Changes the size to so many bytes. Blocks.
    ///
    /// # Errors
    /// librbd's: `EINVAL` if the size is smaller and `may_shrink` is not set.
    pub fn resize(&self, size: u64, may_shrink: bool) -> Result<(), CallError> {
        let _use = self.used("rbd_resize2")?;
        let table = self.table();
        // SAFETY: the handle is in use, and the function for progress ignores its arguments.
        let result =
            unsafe { (table.rbd_resize2)(self.raw, size, may_shrink, no_progress, std::ptr::null_mut()) };
        CallError::check("rbd_resize2", result).map(drop)
    }

    /// Closes the image, as soon as no request, call or watch uses it. `done` gets the result, on a thread of librbd or on
    /// that of the last use; it must not block. From now on, all calls fail with `ECANCELED`.
    ///
    /// # Errors
    /// [`Closed`]; then `done` is not called.
    pub fn close(&self, done: impl FnOnce(Result<(), CallError>) + Send + 'static) -> Result<(), Closed> {
        let mut closing = self.closing();
        let users = self.users.fetch_or(CLOSED, Ordering::AcqRel);
        if users & CLOSED != 0 {
            return Err(Closed);
        }
        // The end of the last use waits for the lock.
        *closing = Some(Box::new(Closing { pool: Arc::clone(&self.pool), done: Box::new(done) }));
        drop(closing);
        if users == 0 {
            self.start_close();
        }
        Ok(())
    }

    fn closing(&self) -> std::sync::MutexGuard<'_, Option<Box<Closing>>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells librbd to close the image, unless that was done. Called without uses, after the image was closed.
    fn start_close(&self) {
        let Some(context) = self.closing().take() else { return };
        let (table, context) = (self.table(), Box::into_raw(context));
        // SAFETY: `closed` takes the context, which it gets once.
        let started = unsafe { completion(table, context, closed) }.and_then(|completion| {
            // SAFETY: nobody uses the handle, and nobody will: `users` says so.
            let result = unsafe { (table.rbd_aio_close)(self.raw, completion) };
            CallError::check("rbd_aio_close", result).inspect_err(|_| {
                // SAFETY: librbd does not call back after an error.
                unsafe { (table.rbd_aio_release)(completion) };
            })
        });
        if let Err(error) = started {
            // SAFETY: librbd has not started the call, and will not call back.
            let Closing { pool, done } = *unsafe { Box::from_raw(context) };
            // librbd still has the handle, so its pool must stay.
            std::mem::forget(pool);
            done(Err(error));
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if *self.users.get_mut() & CLOSED == 0 {
            // librbd still has the handle, so its pool must stay.
            std::mem::forget(Arc::clone(&self.pool));
        }
    }
}
