//! An image: its data, and what a test has scripted about it.

use crate::{gate, later, lock};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The unit in which the data is kept.
const CHUNK: u64 = 4096;

/// What an image does.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Each request takes this time, and up to twice that.
    pub delay: Duration,
    /// The errno of each request; 0: none.
    pub fail: i32,
    /// The errno of flushes.
    pub fail_flushes: i32,
    /// Requests wait until [`StubImage::release`].
    pub holds: bool,
    /// Requests wait while the file of this name exists.
    pub gate: Option<String>,
    /// Resizes by handles wait until [`StubImage::release`].
    pub holds_resizes: bool,
    /// The errno of resizes by handles.
    pub fail_resizes: i32,
    /// Lists of locks wait until [`StubImage::release`].
    pub holds_lists: bool,
    /// The errno of opening.
    pub open: i32,
    /// Opening never ends.
    pub never_opens: bool,
    /// These two apply only while the file of this name exists.
    pub only_while: Option<String>,
    /// The metadata of the image makes librbd read the data of writes when it likes, until their end.
    pub zero_copy: bool,
    /// Closing never ends.
    pub never_closes: bool,
    /// The most bytes that a read returns, although it succeeds.
    pub read_max: Option<u64>,
}

/// A request that waits for [`StubImage::release`].
pub type Held = Box<dyn FnOnce() + Send>;

/// A function to call when the image changes, as librbd takes it.
#[derive(Clone, Copy)]
pub(crate) struct Notice(pub unsafe extern "C" fn(*mut c_void), pub usize);

#[derive(Default)]
struct State {
    size: u64,
    chunks: BTreeMap<u64, Box<[u8; CHUNK as usize]>>,
    script: Script,
    held: Vec<Held>,
    notices: BTreeMap<u64, Notice>,
    /// Names and sizes.
    snapshots: Vec<(String, u64)>,
    /// The client, the text, and the client's address of each.
    locks: Vec<[String; 3]>,
}

/// An image.
#[derive(Default)]
pub struct StubImage {
    state: Mutex<State>,
    /// Number of opens that have ended with success, less the closes.
    opened: AtomicU64,
    requests: AtomicU64,
    /// Number of resizes by handles that have not ended.
    resizing: AtomicU64,
    /// Number of lists of locks that have not ended.
    listing: AtomicU64,
    released: Condvar,
    /// Held during the call of a notice.
    notifying: Mutex<()>,
}

impl std::fmt::Debug for StubImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "an image of {} bytes", self.size())
    }
}

/// Size and script of an image that is named after them.
pub(crate) fn options(name: &str) -> Option<(u64, Script)> {
    let (mut size, mut script) = (None, Script::default());
    for option in name.split('+').skip(1) {
        let (key, value) = option.split_once('=')?;
        match (key, value) {
            ("size", bytes) => size = bytes.parse().ok(),
            ("delay", us) => script.delay = Duration::from_micros(us.parse().ok()?),
            ("fail", errno) => script.fail = errno.parse().ok()?,
            ("open", "never") => script.never_opens = true,
            ("if", name) => script.only_while = Some(name.to_owned()),
            ("open", errno) => script.open = errno.parse().ok()?,
            ("close", "never") => script.never_closes = true,
            ("gate", name) => script.gate = Some(name.to_owned()),
            _ => return None,
        }
    }
    Some((size?, script))
}

impl StubImage {
    pub(crate) fn new(size: u64, script: Script) -> Self {
        Self { state: Mutex::new(State { size, script, ..State::default() }), ..Self::default() }
    }

    /// Changes what the image does.
    pub fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut lock(&self.state).script);
    }

    pub(crate) fn scripted(&self) -> Script {
        lock(&self.state).script.clone()
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        lock(&self.state).size
    }

    /// Number of handles that are open.
    pub fn handles(&self) -> u64 {
        self.opened.load(Ordering::SeqCst)
    }

    /// Number of requests that have come.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// Number of requests that wait for [`StubImage::release`].
    pub fn held(&self) -> usize {
        lock(&self.state).held.len()
    }

    /// Lets requests run, those that wait and those that come.
    pub fn release(&self) {
        let held = {
            let mut state = lock(&self.state);
            state.script.holds = false;
            state.script.holds_resizes = false;
            state.script.holds_lists = false;
            std::mem::take(&mut state.held)
        };
        self.released.notify_all();
        held.into_iter().for_each(|job| job());
    }

    pub(crate) fn has_opened(&self) {
        self.opened.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn has_closed(&self) {
        self.opened.fetch_sub(1, Ordering::SeqCst);
    }

    /// Number of resizes by handles that have not ended.
    pub fn resizing(&self) -> u64 {
        self.resizing.load(Ordering::SeqCst)
    }

    /// Changes the size as a call of librbd does, which blocks as long as the script says, and returns its errno or 0.
    pub(crate) fn resize_by_handle(self: &Arc<Self>, size: u64) -> i32 {
        self.resizing.fetch_add(1, Ordering::SeqCst);
        let must_wait = |state: &mut State| state.script.holds_resizes;
        let waited = self.released.wait_while(lock(&self.state), must_wait);
        let errno = waited.unwrap_or_else(PoisonError::into_inner).script.fail_resizes;
        if errno == 0 {
            self.resize(size);
        }
        self.resizing.fetch_sub(1, Ordering::SeqCst);
        errno
    }

    /// Adds a snapshot, as another client does.
    pub fn take_snapshot(&self, name: &str) {
        let mut state = lock(&self.state);
        let size = state.size;
        state.snapshots.push((name.to_owned(), size));
    }

    pub(crate) fn snapshots(&self) -> Vec<(String, u64)> {
        lock(&self.state).snapshots.clone()
    }

    /// Adds a lock of a client with an address.
    pub fn take_lock(&self, client: &str, id: &str, address: &str) {
        lock(&self.state).locks.push([client, id, address].map(str::to_owned));
    }

    /// The locks, when the script allows to list them.
    pub(crate) fn locks(&self) -> Vec<[String; 3]> {
        self.listing.fetch_add(1, Ordering::SeqCst);
        let must_wait = |state: &mut State| state.script.holds_lists;
        let waited = self.released.wait_while(lock(&self.state), must_wait);
        let locks = waited.unwrap_or_else(PoisonError::into_inner).locks.clone();
        self.listing.fetch_sub(1, Ordering::SeqCst);
        locks
    }

    /// Number of lists of locks that have not ended.
    pub fn listing(&self) -> u64 {
        self.listing.load(Ordering::SeqCst)
    }

    /// Changes the size as another client does, and tells all that watch.
    pub fn resize(self: &Arc<Self>, size: u64) {
        let watches: Vec<u64> = {
            let mut state = lock(&self.state);
            state.size = size;
            state.chunks.retain(|chunk, _| chunk * CHUNK < size);
            state.notices.keys().copied().collect()
        };
        let image = Arc::clone(self);
        later::run_after(Duration::ZERO, move || {
            for watch in watches {
                // The end of a watch waits for its notice.
                let _notifying = lock(&image.notifying);
                let notice = lock(&image.state).notices.get(&watch).copied();
                if let Some(Notice(call, context)) = notice {
                    // SAFETY: the watch that gave both has not ended, and does not end before this call.
                    unsafe { call(context as *mut c_void) };
                }
            }
        });
    }

    pub(crate) fn watch(&self, notice: Notice) -> u64 {
        let notices = &mut lock(&self.state).notices;
        let handle = notices.last_key_value().map_or(1, |(last, _)| last + 1);
        notices.insert(handle, notice);
        handle
    }

    pub(crate) fn unwatch(&self, handle: u64) {
        let _notifying = lock(&self.notifying);
        lock(&self.state).notices.remove(&handle);
    }

    /// Runs a request as the script says; `job` gets its errno or 0.
    pub(crate) fn run(&self, job: impl FnOnce(i32) + Send + 'static) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let mut state = lock(&self.state);
        let Script { delay, fail, holds, ref gate, .. } = state.script;
        if let Some(gate) = gate.clone() {
            drop(state);
            return gate::pass(&gate, move || later::run_after(delay, move || job(fail)));
        }
        if holds {
            return state.held.push(Box::new(move || job(fail)));
        }
        let delay = delay.mul_f64(1.0 + fastrand::f64());
        later::run_after(delay, move || job(fail));
    }

    /// The part of these bytes that a read returns: those that the image has, and that the script allows.
    pub(crate) fn clip(&self, offset: u64, len: u64) -> u64 {
        let allowed = self.scripted().read_max.unwrap_or(len);
        self.size().saturating_sub(offset).min(len).min(allowed)
    }

    /// Reads bytes.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) {
        let state = lock(&self.state);
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let within = (at % CHUNK) as usize;
            let len = (CHUNK as usize - within).min(bytes.len() - done);
            let bytes = &mut bytes[done..done + len];
            match state.chunks.get(&(at / CHUNK)) {
                Some(chunk) => bytes.copy_from_slice(&chunk[within..within + len]),
                None => bytes.fill(0),
            }
            done += len;
        }
    }

    /// Writes bytes.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        let mut state = lock(&self.state);
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let within = (at % CHUNK) as usize;
            let len = (CHUNK as usize - within).min(bytes.len() - done);
            let chunk = state.chunks.entry(at / CHUNK).or_insert_with(|| Box::new([0; CHUNK as usize]));
            chunk[within..within + len].copy_from_slice(&bytes[done..done + len]);
            done += len;
        }
    }

    /// Writes `new` if the bytes are those of `old`.
    pub(crate) fn compare_and_write(&self, offset: u64, old: &[u8], new: &[u8]) -> bool {
        let mut now = vec![0; old.len()];
        self.read(offset, &mut now);
        let is_equal = now == old;
        if is_equal {
            self.write(offset, new);
        }
        is_equal
    }

    pub(crate) fn zero(&self, offset: u64, len: u64) {
        let mut state = lock(&self.state);
        let (first, end) = (offset / CHUNK, (offset + len).div_ceil(CHUNK));
        let chunks: Vec<u64> = state.chunks.range(first..end).map(|(chunk, _)| *chunk).collect();
        for index in chunks {
            let start = offset.max(index * CHUNK) - index * CHUNK;
            let stop = (offset + len).min((index + 1) * CHUNK) - index * CHUNK;
            let chunk = state.chunks.get_mut(&index).expect("just found");
            chunk[start as usize..stop as usize].fill(0);
        }
    }
}
