//! Notices of changes of an image by any client: its size, its snapshots. Any context but a reactor's.

use crate::{CallError, Image};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

type Notice = Box<dyn Fn() + Send + Sync>;

/// Calls a function after each change of an image, which does not close before. Without [`Watch::end`], it is leaked, and with it
/// the function and the image.
pub struct Watch {
    image: Arc<Image>,
    handle: u64,
    notice: *mut Notice,
}

// SAFETY: the function is `Send` and `Sync`, and the pointer is used only to free it.
unsafe impl Send for Watch {}
// SAFETY: as above.
unsafe impl Sync for Watch {}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watch").field(&self.handle).finish()
    }
}

unsafe extern "C" fn updated(context: *mut c_void) {
    // SAFETY: the function is freed after librbd was told to forget it.
    let notice = unsafe { &*context.cast::<Notice>() };
    notice();
}

impl Watch {
    /// Calls `notice` after each change, on a thread of librbd; it must not block. May wait for a lock of librbd.
    ///
    /// # Errors
    /// librbd's.
    pub fn new(image: &Arc<Image>, notice: impl Fn() + Send + Sync + 'static) -> Result<Self, CallError> {
        const CALL: &str = "rbd_update_watch";
        let used = image.used(CALL)?;
        let notice: *mut Notice = Box::into_raw(Box::new(Box::new(notice)));
        let mut handle = 0;
        // SAFETY: the image is in use, `handle` is written, and the function stays until the watch ends.
        let result =
            unsafe { (image.table().rbd_update_watch)(image.raw(), &raw mut handle, updated, notice.cast()) };
        CallError::check(CALL, result).inspect_err(|_| {
            // SAFETY: librbd has not taken it.
            drop(unsafe { Box::from_raw(notice) });
        })?;
        // Ends with the watch: librbd does not allow watches of an image that it closes.
        std::mem::forget(used);
        Ok(Self { image: Arc::clone(image), handle, notice })
    }

    /// Ends the notices; waits until the last has ended.
    ///
    /// # Errors
    /// librbd's.
    pub fn end(self) -> Result<(), CallError> {
        const CALL: &str = "rbd_update_unwatch";
        // SAFETY: the watch uses the image, and the handle is that of this watch, which ends once.
        let result = unsafe { (self.image.table().rbd_update_unwatch)(self.image.raw(), self.handle) };
        CallError::check(CALL, result)?;
        // SAFETY: librbd no longer calls the function.
        drop(unsafe { Box::from_raw(self.notice) });
        self.image.end_use();
        Ok(())
    }
}
