//! The state of an open image that other clients change: its features, snapshots, locks and options. Any context but a reactor's;
//! what does not block says so.

use crate::table::{ConfigOption, SnapInfo};
use crate::{CallError, Image};
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::Ordering;

/// The most snapshots that are read: librbd keeps all of them in memory, too.
const SNAPSHOTS_MAX: usize = 1 << 16;
/// The most bytes of the texts about locks.
const TEXT_MAX: usize = 1 << 20;
/// The option of librbd with which it copies the data of writes at once.
pub(crate) const COPIES_WRITES: &CStr = c"rbd_disable_zero_copy_writes";
/// How often a list is read again that has grown meanwhile.
const TRIES: u32 = 4;

/// A snapshot of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number in the image's pool.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Bytes of the image at that time.
    pub size: u64,
}

/// A lock of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lock {
    /// Ceph's name of the client that holds it, such as `client.4123`.
    pub client: String,
    /// The text that the client gave the lock; `auto NUMBER` for the exclusive lock of the feature.
    pub id: String,
    /// The client's address.
    pub address: String,
}

/// Texts one after the other, each with a zero at its end.
struct Texts {
    bytes: Vec<u8>,
    len: usize,
}

impl Texts {
    fn new(len: usize) -> Self {
        Self { bytes: vec![0; len], len }
    }

    const fn raw(&mut self) -> *mut c_char {
        self.bytes.as_mut_ptr().cast()
    }

    fn strings(&self) -> impl Iterator<Item = String> {
        self.bytes.split(|byte| *byte == 0).map(|text| String::from_utf8_lossy(text).into_owned())
    }
}

impl Image {
    /// The bits of `RBD_FEATURE_*`, which may change while the image is open.
    ///
    /// # Errors
    /// librbd's.
    pub fn features(&self) -> Result<u64, CallError> {
        const CALL: &str = "rbd_get_features";
        let _use = self.used(CALL)?;
        let mut features = 0;
        // SAFETY: the handle is in use, and `features` is written.
        let result = unsafe { (self.table().rbd_get_features)(self.raw(), &raw mut features) };
        CallError::check(CALL, result).map(|_| features)
    }

    /// The snapshots, in the order of their creation.
    ///
    /// # Errors
    /// librbd's; `EFBIG` if there are more than 65,536.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, CallError> {
        const CALL: &str = "rbd_snap_list";
        let _use = self.used(CALL)?;
        let mut capacity = 16;
        for _ in 0..TRIES {
            let mut list = vec![SnapInfo { id: 0, size: 0, name: std::ptr::null() }; capacity];
            let mut count = c_int::try_from(capacity).expect("it is bounded");
            // SAFETY: the handle is in use, and the list has as many elements as `count` says.
            let result =
                unsafe { (self.table().rbd_snap_list)(self.raw(), list.as_mut_ptr(), &raw mut count) };
            if result != -libc::ERANGE {
                let len = CallError::check(CALL, result)? as usize;
                let read = |info: &SnapInfo| Snapshot {
                    id: info.id,
                    // SAFETY: librbd has written a string, which lasts until the list ends.
                    name: unsafe { CStr::from_ptr(info.name) }.to_string_lossy().into_owned(),
                    size: info.size,
                };
                let mut snapshots: Vec<Snapshot> = list.iter().take(len).map(read).collect();
                if len > 0 {
                    // SAFETY: librbd has filled the list, whose end it has marked; it is ended once.
                    unsafe { (self.table().rbd_snap_list_end)(list.as_mut_ptr()) };
                }
                snapshots.sort_by_key(|snapshot| snapshot.id);
                return Ok(snapshots);
            }
            // With room for some that come meanwhile.
            capacity = count.max(0) as usize + 16;
            if capacity > SNAPSHOTS_MAX + 32 {
                return Err(CallError { call: CALL, errno: libc::EFBIG });
            }
        }
        Err(CallError { call: CALL, errno: libc::EAGAIN })
    }

    /// The locks: the exclusive lock of the feature of that name, and those of `rbd lock add`.
    ///
    /// # Errors
    /// librbd's; `EFBIG` if the texts of the locks have more than a megabyte.
    pub fn locks(&self) -> Result<Vec<Lock>, CallError> {
        const CALL: &str = "rbd_list_lockers";
        let _use = self.used(CALL)?;
        let mut texts = [128, 256, 256, 256].map(Texts::new);
        for _ in 0..TRIES {
            let mut is_exclusive = 0;
            let [tag, clients, ids, addresses] = &mut texts;
            // SAFETY: the handle is in use, and each buffer has as many bytes as its length says.
            let result = unsafe {
                (self.table().rbd_list_lockers)(
                    self.raw(),
                    &raw mut is_exclusive,
                    tag.raw(),
                    &raw mut tag.len,
                    clients.raw(),
                    &raw mut clients.len,
                    ids.raw(),
                    &raw mut ids.len,
                    addresses.raw(),
                    &raw mut addresses.len,
                )
            };
            if result != -(libc::ERANGE as isize) {
                let len = CallError::check(CALL, result as c_int)? as usize;
                let each = clients.strings().zip(ids.strings()).zip(addresses.strings()).take(len);
                return Ok(each.map(|((client, id), address)| Lock { client, id, address }).collect());
            }
            if texts.iter().any(|text| text.len > TEXT_MAX) {
                return Err(CallError { call: CALL, errno: libc::EFBIG });
            }
            texts = texts.map(|text| Texts::new(text.len + 256));
        }
        Err(CallError { call: CALL, errno: libc::EAGAIN })
    }

    /// Whether this handle holds the exclusive lock of the feature of that name.
    ///
    /// # Errors
    /// librbd's.
    pub fn is_lock_owner(&self) -> Result<bool, CallError> {
        const CALL: &str = "rbd_is_exclusive_lock_owner";
        let _use = self.used(CALL)?;
        let mut is_owner = 0;
        // SAFETY: the handle is in use, and `is_owner` is written.
        let result = unsafe { (self.table().rbd_is_exclusive_lock_owner)(self.raw(), &raw mut is_owner) };
        CallError::check(CALL, result).map(|_| is_owner != 0)
    }

    /// An option of librbd for this image, as the client, the pool's metadata and the image's metadata set it: the last one that
    /// is there counts. `None` if librbd has no such option.
    ///
    /// # Errors
    /// librbd's.
    fn option(&self, name: &CStr) -> Result<Option<String>, CallError> {
        const CALL: &str = "rbd_config_image_list";
        let _use = self.used(CALL)?;
        let mut capacity = 256;
        for _ in 0..TRIES {
            let empty = ConfigOption { name: std::ptr::null(), value: std::ptr::null(), source: 0 };
            let mut list = vec![empty; capacity];
            let mut count = c_int::try_from(capacity).expect("it is bounded");
            // SAFETY: the handle is in use, and the list has as many elements as `count` says.
            let result = unsafe {
                (self.table().rbd_config_image_list)(self.raw(), list.as_mut_ptr(), &raw mut count)
            };
            if result != -libc::ERANGE {
                CallError::check(CALL, result)?;
                let listed = list.iter().take(count.max(0) as usize);
                // SAFETY: librbd has written strings, which last until the list ends.
                let mut listed =
                    listed.map(|of| unsafe { (CStr::from_ptr(of.name), CStr::from_ptr(of.value)) });
                let found = listed.find(|(listed, _)| *listed == name);
                let value = found.map(|(_, value)| value.to_string_lossy().into_owned());
                // SAFETY: librbd has filled so many elements; the list is ended once.
                unsafe { (self.table().rbd_config_image_list_cleanup)(list.as_mut_ptr(), count) };
                return Ok(value);
            }
            capacity = count.clamp(0, 1 << 16) as usize + 16;
        }
        Err(CallError { call: CALL, errno: libc::EAGAIN })
    }

    /// Whether librbd copies the data of writes at once, and keeps no memory of requests. The metadata of the image or of its
    /// pool may switch that off, although the client has switched it on. Writes are copied here from the next
    /// [`Image::options_may_have_changed`] on until this has returned true.
    ///
    /// # Errors
    /// librbd's.
    pub fn copies_writes(&self) -> Result<bool, CallError> {
        let changes = self.changes.load(Ordering::Acquire);
        let value = self.option(COPIES_WRITES)?.unwrap_or_default();
        // As Ceph reads a truth value.
        let copies = value.eq_ignore_ascii_case("true") || value.parse().is_ok_and(|number: i64| number != 0);
        if copies {
            self.checked.fetch_max(changes, Ordering::AcqRel);
        }
        Ok(copies)
    }

    /// Notes that another client may have changed the image's options. Does not block.
    pub fn options_may_have_changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether the data of a write must be copied before librbd gets it. Does not block.
    pub fn must_copy(&self) -> bool {
        self.changes.load(Ordering::Acquire) != self.checked.load(Ordering::Acquire)
    }
}
