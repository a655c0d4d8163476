//! The functions of librados and librbd, with the signatures of Ceph's headers.

use crate::counts::count;
use crate::image::Notice;
use crate::{CHANGED, Client, Place, Script, StubImage, WORLD, find_image, gate, later, lock};
use std::collections::btree_map::Entry;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

type Callback = unsafe extern "C" fn(*mut c_void, *mut c_void);
type Progress = unsafe extern "C" fn(u64, u64, *mut c_void) -> c_int;

struct Pool {
    client: Arc<Client>,
    name: String,
    namespace: String,
}

struct Handle {
    client: Arc<Client>,
    image: Arc<StubImage>,
    is_read_only: bool,
}

/// A completion, which its creator and its call each hold.
struct Completion {
    callback: Callback,
    context: usize,
    result: AtomicI64,
}

/// `rbd_snap_info_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SnapInfo {
    id: u64,
    size: u64,
    name: *mut c_char,
}

/// `rbd_config_option_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ConfigOption {
    name: *const c_char,
    value: *const c_char,
    source: c_int,
}

/// A pointer that a test's thread passes on, as librbd does.
#[derive(Clone, Copy)]
struct Raw(usize);

impl Raw {
    fn of<T>(raw: *mut T) -> Self {
        Self(raw as usize)
    }

    fn get<T>(self) -> *mut T {
        self.0 as *mut T
    }
}

/// A string that may be null.
///
/// # Safety
/// It is null or ends with a zero.
unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: the caller upholds it.
    unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned()
}

/// The object behind a handle of C.
///
/// # Safety
/// The handle is one of `T`, and has not ended.
unsafe fn object<'a, T>(raw: *mut c_void) -> &'a T {
    // SAFETY: the caller upholds it.
    unsafe { &*raw.cast::<T>() }
}

/// Ends a call: calls back, and gives up the call's hold of the completion.
fn complete(completion: Raw, result: i64) {
    let raw = completion.get::<Completion>();
    // SAFETY: the call has held it since `hold`.
    let held = unsafe { Arc::from_raw(raw) };
    held.result.store(result, Ordering::SeqCst);
    // SAFETY: the creator gave the function and its context for this.
    unsafe { (held.callback)(raw.cast(), held.context as *mut c_void) };
}

/// Holds a completion for a call.
///
/// # Safety
/// The completion exists.
unsafe fn hold(completion: *mut c_void) -> Raw {
    // SAFETY: the caller upholds it.
    unsafe { Arc::increment_strong_count(completion.cast::<Completion>()) };
    Raw::of(completion)
}

/// Starts a request of `image`; `work` runs at its end and returns its result.
///
/// # Safety
/// The handle and the completion exist.
unsafe fn submit(
    image: *mut c_void,
    completion: *mut c_void,
    is_change: bool,
    work: impl FnOnce(&StubImage) -> i64 + Send + 'static,
) -> c_int {
    // SAFETY: the caller upholds it.
    let (handle, completion) = unsafe { (object::<Handle>(image), hold(completion)) };
    let (client, of_image) = (Arc::clone(&handle.client), Arc::clone(&handle.image));
    let is_refused = is_change && handle.is_read_only;
    handle.image.run(move |errno| {
        let result = match errno {
            _ if client.is_blocklisted() => -i64::from(libc::ESHUTDOWN),
            0 if is_refused => -i64::from(libc::EROFS),
            0 => work(&of_image),
            errno => -i64::from(errno),
        };
        complete(completion, result);
    });
    0
}

macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$doc])*
            /// As Ceph's function of this name.
            ///
            /// # Safety
            /// As Ceph's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $ret)? $body
        )*

        /// The address of the function `name`; null if there is none.
        pub(crate) fn find(name: &str) -> *const c_void {
            match name {
                $(stringify!($name) => $name as *const c_void,)*
                _ => std::ptr::null(),
            }
        }
    };
}

exports! {
    fn rados_create(cluster: *mut *mut c_void, user: *const c_char) -> c_int {
        // SAFETY: as Ceph's.
        let client = Arc::new(Client::new(unsafe { text(user) }));
        // SAFETY: as Ceph's.
        unsafe { *cluster = Box::into_raw(Box::new(client)).cast() };
        0
    }

    fn rados_conf_read_file(_cluster: *mut c_void, path: *const c_char) -> c_int {
        // SAFETY: as Ceph's.
        let path = unsafe { text(path) };
        if path.is_empty() || std::path::Path::new(&path).exists() { 0 } else { -libc::ENOENT }
    }

    fn rados_conf_set(cluster: *mut c_void, option: *const c_char, value: *const c_char) -> c_int {
        // SAFETY: as Ceph's.
        let (client, option, value) = unsafe { (object::<Arc<Client>>(cluster), text(option), text(value)) };
        if option.starts_with("no_such") {
            return -libc::ENOENT;
        }
        let mut world = lock(&WORLD);
        let present = world.present.get_mut(&client.addresses).expect("a client is present until it is shut down");
        present.options.insert(option, value);
        0
    }

    fn rados_connect(cluster: *mut c_void) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { object::<Arc<Client>>(cluster) }.connect()
    }

    fn rados_shutdown(cluster: *mut c_void) {
        // SAFETY: as Ceph's.
        let client = unsafe { Box::from_raw(cluster.cast::<Arc<Client>>()) };
        lock(&WORLD).present.remove(&client.addresses);
        count(|counts| counts.clients -= 1);
    }

    fn rados_getaddrs(cluster: *mut c_void, addresses: *mut *mut c_char) -> c_int {
        // SAFETY: as Ceph's.
        let client = unsafe { object::<Arc<Client>>(cluster) };
        let text = CString::new(client.addresses.clone()).expect("it has no zero");
        // SAFETY: as Ceph's.
        unsafe { *addresses = text.into_raw() };
        0
    }

    fn rados_buffer_free(buffer: *mut c_char) {
        // SAFETY: it comes from `rados_getaddrs`.
        drop(unsafe { CString::from_raw(buffer) });
    }

    fn rados_blocklist_add(_cluster: *mut c_void, addresses: *mut c_char, _seconds: u32) -> c_int {
        // SAFETY: as Ceph's.
        crate::blocklist(&unsafe { text(addresses) });
        CHANGED.notify_all();
        0
    }

    fn rados_wait_for_latest_osdmap(_cluster: *mut c_void) -> c_int {
        0
    }

    fn rados_ioctx_create(cluster: *mut c_void, name: *const c_char, pool: *mut *mut c_void) -> c_int {
        // SAFETY: as Ceph's.
        let (client, name) = unsafe { (Arc::clone(object::<Arc<Client>>(cluster)), text(name)) };
        if name.starts_with("missing") {
            return -libc::ENOENT;
        }
        let new = Box::new(Pool { client, name, namespace: String::new() });
        // SAFETY: as Ceph's.
        unsafe { *pool = Box::into_raw(new).cast() };
        0
    }

    fn rados_ioctx_set_namespace(pool: *mut c_void, namespace: *const c_char) {
        // SAFETY: as Ceph's: nobody else uses the pool meanwhile.
        unsafe { (*pool.cast::<Pool>()).namespace = text(namespace) };
    }

    fn rados_ioctx_destroy(pool: *mut c_void) {
        // SAFETY: as Ceph's.
        drop(unsafe { Box::from_raw(pool.cast::<Pool>()) });
    }

    fn rbd_image_options_create(options: *mut *mut c_void) {
        // SAFETY: as Ceph's.
        unsafe { *options = Box::into_raw(Box::new(0_u8)).cast() };
    }

    fn rbd_image_options_destroy(options: *mut c_void) {
        // SAFETY: it comes from `rbd_image_options_create`.
        drop(unsafe { Box::from_raw(options.cast::<u8>()) });
    }

    fn rbd_create4(pool: *mut c_void, name: *const c_char, size: u64, _options: *mut c_void) -> c_int {
        // SAFETY: as Ceph's.
        let place = unsafe { place_of(pool, name) };
        // SAFETY: as Ceph's.
        if unsafe { object::<Pool>(pool) }.client.is_blocklisted() {
            return -libc::ESHUTDOWN;
        }
        match lock(&WORLD).images.entry(place) {
            Entry::Occupied(_) => -libc::EEXIST,
            Entry::Vacant(vacant) => {
                vacant.insert(Arc::new(StubImage::new(size, Script::default())));
                0
            }
        }
    }

    fn rbd_aio_open(
        pool: *mut c_void, name: *const c_char, image: *mut *mut c_void, snapshot: *const c_char, completion: *mut c_void,
    ) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { open(pool, name, image, snapshot, completion, false) }
    }

    fn rbd_aio_open_read_only(
        pool: *mut c_void, name: *const c_char, image: *mut *mut c_void, snapshot: *const c_char, completion: *mut c_void,
    ) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { open(pool, name, image, snapshot, completion, true) }
    }

    fn rbd_aio_close(image: *mut c_void, completion: *mut c_void) -> c_int {
        // SAFETY: as Ceph's.
        let (handle, completion) = unsafe { (Box::from_raw(image.cast::<Handle>()), hold(completion)) };
        if !handle.image.scripted().never_closes {
            later::run_after(handle.image.scripted().delay, move || {
                handle.image.has_closed();
                complete(completion, 0);
            });
        }
        0
    }

    fn rbd_stat(image: *mut c_void, info: *mut u64, _size: usize) -> c_int {
        // SAFETY: as Ceph's.
        if unsafe { object::<Handle>(image) }.client.is_blocklisted() {
            return -libc::ESHUTDOWN;
        }
        // SAFETY: as Ceph's: `info` begins with the sizes of the image and of an object.
        unsafe { (*info, *info.add(1)) = (object::<Handle>(image).image.size(), 4 << 20) };
        0
    }

    fn rbd_get_size(image: *mut c_void, size: *mut u64) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { *size = object::<Handle>(image).image.size() };
        0
    }

    fn rbd_get_features(_image: *mut c_void, features: *mut u64) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { *features = 0x3d };
        0
    }

    fn rbd_get_stripe_unit(_image: *mut c_void, stripe_unit: *mut u64) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { *stripe_unit = 4 << 20 };
        0
    }

    fn rbd_resize2(
        image: *mut c_void, size: u64, may_shrink: bool, _progress: Progress, _context: *mut c_void,
    ) -> c_int {
        // SAFETY: as Ceph's.
        let handle = unsafe { object::<Handle>(image) };
        if handle.client.is_blocklisted() {
            return -libc::ESHUTDOWN;
        }
        if size < handle.image.size() && !may_shrink {
            return -libc::EINVAL;
        }
        -handle.image.resize_by_handle(size)
    }

    fn rbd_snap_list(image: *mut c_void, list: *mut SnapInfo, count: *mut c_int) -> c_int {
        // SAFETY: as Ceph's.
        let snapshots = unsafe { object::<Handle>(image) }.image.snapshots();
        // SAFETY: as Ceph's.
        if (unsafe { *count } as usize) < snapshots.len() + 1 {
            // SAFETY: as Ceph's.
            unsafe { *count = snapshots.len() as c_int + 1 };
            return -libc::ERANGE;
        }
        let names = snapshots.iter().map(|(name, _)| CString::new(&**name).expect("it has no zero").into_raw());
        let all = (1..).zip(&snapshots).zip(names).map(|((id, (_, size)), name)| SnapInfo { id, size: *size, name });
        let end = SnapInfo { id: 0, size: 0, name: std::ptr::null_mut() };
        for (at, info) in all.chain([end]).enumerate() {
            // SAFETY: as Ceph's: the list has room for all and the end.
            unsafe { list.add(at).write(info) };
        }
        snapshots.len() as c_int
    }

    fn rbd_snap_list_end(list: *mut SnapInfo) {
        let mut at = list;
        // SAFETY: as Ceph's: the last element has no name.
        while let name = unsafe { (*at).name } && !name.is_null() {
            // SAFETY: it comes from `rbd_snap_list`.
            drop(unsafe { CString::from_raw(name) });
            // SAFETY: as above.
            at = unsafe { at.add(1) };
        }
    }

    fn rbd_config_image_list(image: *mut c_void, list: *mut ConfigOption, count: *mut c_int) -> c_int {
        // SAFETY: as Ceph's.
        let copies = !unsafe { object::<Handle>(image) }.image.scripted().zero_copy;
        let options = [(c"rbd_cache", c"false"), (c"rbd_disable_zero_copy_writes", if copies { c"true" } else { c"false" })];
        // SAFETY: as Ceph's.
        let capacity = unsafe { std::mem::replace(&mut *count, options.len() as c_int) };
        if (capacity as usize) < options.len() {
            return -libc::ERANGE;
        }
        for (at, (name, value)) in options.into_iter().enumerate() {
            let option = ConfigOption { name: name.as_ptr(), value: value.as_ptr(), source: 0 };
            // SAFETY: as Ceph's: the list has room for all.
            unsafe { list.add(at).write(option) };
        }
        0
    }

    fn rbd_config_image_list_cleanup(_list: *mut ConfigOption, _count: c_int) {}

    fn rbd_is_exclusive_lock_owner(image: *mut c_void, is_owner: *mut c_int) -> c_int {
        // SAFETY: as Ceph's.
        let handle = unsafe { object::<Handle>(image) };
        let is_ours = |lock: &[String; 3]| lock[2] == handle.client.addresses;
        // SAFETY: as Ceph's.
        unsafe { *is_owner = handle.image.locks().iter().any(is_ours).into() };
        0
    }

    fn rbd_list_lockers(
        image: *mut c_void, _exclusive: *mut c_int, tag: *mut c_char, tag_len: *mut usize, clients: *mut c_char,
        clients_len: *mut usize, ids: *mut c_char, ids_len: *mut usize, addresses: *mut c_char, addresses_len: *mut usize,
    ) -> isize {
        // SAFETY: as Ceph's.
        let locks = unsafe { object::<Handle>(image) }.image.locks();
        let text = |part: usize| locks.iter().flat_map(|lock| lock[part].bytes().chain([0])).collect::<Vec<u8>>();
        let texts = [(vec![0], tag, tag_len), (text(0), clients, clients_len), (text(1), ids, ids_len),
            (text(2), addresses, addresses_len)];
        let mut fits = true;
        for (text, _, len) in &texts {
            // SAFETY: as Ceph's.
            fits &= unsafe { len.replace(text.len()) } >= text.len();
        }
        if !fits {
            return -(libc::ERANGE as isize);
        }
        for (text, to, _) in &texts {
            // SAFETY: as Ceph's: the text fits.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len()) };
        }
        locks.len() as isize
    }

    fn rbd_update_watch(
        image: *mut c_void, handle: *mut u64, notice: unsafe extern "C" fn(*mut c_void), context: *mut c_void,
    ) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { *handle = object::<Handle>(image).image.watch(Notice(notice, context as usize)) };
        0
    }

    fn rbd_update_unwatch(image: *mut c_void, handle: u64) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { object::<Handle>(image) }.image.unwatch(handle);
        0
    }

    fn rbd_aio_create_completion(context: *mut c_void, callback: Callback, completion: *mut *mut c_void) -> c_int {
        let new = Completion { callback, context: context as usize, result: AtomicI64::new(0) };
        // SAFETY: as Ceph's.
        unsafe { *completion = Arc::into_raw(Arc::new(new)).cast_mut().cast() };
        0
    }

    fn rbd_aio_get_return_value(completion: *mut c_void) -> isize {
        // SAFETY: as Ceph's.
        unsafe { object::<Completion>(completion) }.result.load(Ordering::SeqCst) as isize
    }

    fn rbd_aio_release(completion: *mut c_void) {
        // SAFETY: it comes from `rbd_aio_create_completion`, and its creator releases it once.
        drop(unsafe { Arc::from_raw(completion.cast::<Completion>()) });
    }

    fn rbd_aio_readv(
        image: *mut c_void, list: *const libc::iovec, count: c_int, offset: u64, completion: *mut c_void,
    ) -> c_int {
        let (list, count) = (Raw::of(list.cast_mut()), count as usize);
        let work = move |image: &StubImage| {
            // SAFETY: as Ceph's: the list stays until the completion.
            let pieces = unsafe { std::slice::from_raw_parts(list.get::<libc::iovec>(), count) };
            let len = image.clip(offset, pieces.iter().map(|piece| piece.iov_len as u64).sum());
            let mut bytes = vec![0; len as usize];
            image.read(offset, &mut bytes);
            let mut left = &*bytes;
            for piece in pieces {
                let (now, later) = left.split_at(piece.iov_len.min(left.len()));
                // SAFETY: as Ceph's: the memory stays until the completion.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), piece.iov_base.cast(), now.len()) };
                left = later;
            }
            len as i64
        };
        // SAFETY: as Ceph's.
        unsafe { submit(image, completion, false, work) }
    }

    fn rbd_aio_writev(
        image: *mut c_void, list: *const libc::iovec, count: c_int, offset: u64, completion: *mut c_void,
    ) -> c_int {
        let (list, count) = (Raw::of(list.cast_mut()), count as usize);
        let copy = move || {
            let mut bytes = Vec::new();
            // SAFETY: as Ceph's: the list stays until the completion.
            for piece in unsafe { std::slice::from_raw_parts(list.get::<libc::iovec>(), count) } {
                // SAFETY: as Ceph's: a guest may change the bytes.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) });
            }
            bytes
        };
        // SAFETY: as Ceph's.
        let is_late = unsafe { object::<Handle>(image) }.image.scripted().zero_copy;
        let copied = (!is_late).then(copy);
        let work = move |image: &StubImage| {
            let bytes = copied.unwrap_or_else(copy);
            if image.clip(offset, bytes.len() as u64) < bytes.len() as u64 {
                return -i64::from(libc::EINVAL);
            }
            image.write(offset, &bytes);
            0
        };
        // SAFETY: as Ceph's.
        unsafe { submit(image, completion, true, work) }
    }

    fn rbd_aio_flush(image: *mut c_void, completion: *mut c_void) -> c_int {
        // SAFETY: as Ceph's.
        unsafe { submit(image, completion, false, |image| -i64::from(image.scripted().fail_flushes)) }
    }

    fn rbd_aio_discard(image: *mut c_void, offset: u64, len: u64, completion: *mut c_void) -> c_int {
        let work = move |image: &StubImage| {
            image.zero(offset, len);
            0
        };
        // SAFETY: as Ceph's.
        unsafe { submit(image, completion, true, work) }
    }

    fn rbd_aio_write_zeroes(
        image: *mut c_void, offset: u64, len: usize, completion: *mut c_void, _flags: c_int, _op_flags: c_int,
    ) -> c_int {
        let work = move |image: &StubImage| {
            image.zero(offset, len as u64);
            0
        };
        // SAFETY: as Ceph's.
        unsafe { submit(image, completion, true, work) }
    }

    fn rbd_aio_compare_and_write(
        image: *mut c_void, offset: u64, len: usize, old: *const c_char, new: *const c_char, completion: *mut c_void,
        _mismatch: *mut u64, _flags: c_int,
    ) -> isize {
        // SAFETY: as Ceph's.
        let old = unsafe { std::slice::from_raw_parts(old.cast::<u8>(), len) }.to_vec();
        // SAFETY: as Ceph's.
        let new = unsafe { std::slice::from_raw_parts(new.cast::<u8>(), len) }.to_vec();
        let work = move |image: &StubImage| {
            if image.compare_and_write(offset, &old, &new) { 0 } else { -i64::from(libc::EILSEQ) }
        };
        // SAFETY: as Ceph's.
        unsafe { submit(image, completion, true, work) as isize }
    }
}

/// The place of an image in a pool.
///
/// # Safety
/// The pool exists, and the name is a string.
unsafe fn place_of(pool: *mut c_void, name: *const c_char) -> Place {
    // SAFETY: the caller upholds it.
    let (pool, name) = unsafe { (object::<Pool>(pool), text(name)) };
    (pool.name.clone(), pool.namespace.clone(), name)
}

/// Opens an image.
///
/// # Safety
/// As Ceph's functions.
unsafe fn open(
    pool: *mut c_void,
    name: *const c_char,
    image: *mut *mut c_void,
    snapshot: *const c_char,
    completion: *mut c_void,
    is_read_only: bool,
) -> c_int {
    // SAFETY: the caller upholds it.
    let place = unsafe { place_of(pool, name) };
    // SAFETY: the caller upholds it.
    let (client, completion) = unsafe { (Arc::clone(&object::<Pool>(pool).client), hold(completion)) };
    let (found, image, has_snapshot) = (find_image(&place), Raw::of(image), !snapshot.is_null());
    let mut script = found.as_ref().map(|image| image.scripted()).unwrap_or_default();
    if script.only_while.as_deref().is_some_and(|file| !gate::is_closed(file)) {
        (script.open, script.never_opens) = (0, false);
    }
    if script.never_opens {
        return 0;
    }
    count(|counts| counts.opening += 1);
    let delay = script.delay.max(Duration::from_micros(1));
    later::run_after(delay, move || {
        let errno = match &found {
            None => libc::ENOENT,
            Some(_) if client.is_blocklisted() => libc::ESHUTDOWN,
            Some(_) => script.open,
        };
        if let Some(found) = found.filter(|_| errno == 0) {
            found.has_opened();
            let handle = Handle { client, image: found, is_read_only: is_read_only || has_snapshot };
            // SAFETY: as Ceph's: the place of the handle stays until the completion.
            unsafe { *image.get::<*mut c_void>() = Box::into_raw(Box::new(handle)).cast() };
        }
        count(|counts| {
            counts.opening -= 1;
            counts.opened += u64::from(errno == 0);
        });
        complete(completion, -i64::from(errno));
    });
    0
}
