//! Waits until a path exists, without polling. Control context.
//!
//! All waiters of one thread share one inotify instance, which watches the deepest existing directories. A waiter is woken only
//! for the next name on its own path, so thousands of waiters can share a directory.
//!
//! **Invariant.** A waiter checks the path again after it has set up [`Watching`]: this check finds changes before the watch, and
//! the watch reports changes after it. A change of a symbolic link on the path is not detected.

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::{Rc, Weak};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

thread_local! {
    static INSTANCE: RefCell<Weak<Instance>> = const { RefCell::new(Weak::new()) };
}

/// Events for a name in a directory.
const NAMES: WatchFlags = WatchFlags::CREATE.union(WatchFlags::MOVED_TO);
/// Events for a directory itself.
const DIRECTORY: WatchFlags = WatchFlags::DELETE_SELF.union(WatchFlags::MOVE_SELF);

/// Events that wake all waiters of a directory.
const ALL: ReadFlags = ReadFlags::DELETE_SELF
    .union(ReadFlags::MOVE_SELF)
    .union(ReadFlags::UNMOUNT)
    .union(ReadFlags::IGNORED)
    .union(ReadFlags::QUEUE_OVERFLOW);

/// The waiters of one directory: for a name in it, or, without a name, for the end of the directory itself.
type Waiters = BTreeMap<Option<OsString>, Vec<Rc<Notify>>>;

struct Shared {
    fd: AsyncFd<OwnedFd>,
    /// Directories by watch descriptor.
    directories: RefCell<BTreeMap<i32, Waiters>>,
}

/// An inotify instance, and the task that reads from it.
struct Instance {
    shared: Rc<Shared>,
    reader: JoinHandle<()>,
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Instance {
    /// The instance of this thread.
    fn get() -> std::io::Result<Rc<Self>> {
        if let Some(instance) = INSTANCE.with_borrow(Weak::upgrade) {
            return Ok(instance);
        }
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        #[expect(deprecated, reason = "unsound for types whose descriptor may change; this is an OwnedFd")]
        let fd = AsyncFd::with_interest(fd, Interest::READABLE)?;
        let shared = Rc::new(Shared { fd, directories: RefCell::default() });
        let reader = tokio::task::spawn_local(Rc::clone(&shared).read());
        let instance = Rc::new(Self { shared, reader });
        INSTANCE.set(Rc::downgrade(&instance));
        Ok(instance)
    }
}

impl Shared {
    async fn read(self: Rc<Self>) {
        loop {
            match self.fd.readable().await {
                Ok(mut ready) => {
                    self.dispatch();
                    ready.clear_ready();
                }
                // The runtime is shutting down.
                Err(_) => return,
            }
        }
    }

    /// Reads all pending events.
    fn dispatch(&self) {
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(self.fd.get_ref(), &mut space);
        loop {
            match events.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
                    self.wake(event.wd(), event.events(), name);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::warn!("cannot read from inotify: {error}");
                    return;
                }
            }
        }
    }

    fn wake(&self, wd: i32, events: ReadFlags, name: Option<&OsStr>) {
        let mut directories = self.directories.borrow_mut();
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            directories.values().flat_map(Waiters::values).flatten().for_each(|waiter| waiter.notify_one());
        }
        let Some(waiters) = directories.get(&wd) else { return };
        if events.intersects(ALL) {
            waiters.values().flatten().for_each(|waiter| waiter.notify_one());
        } else if let Some(waiters) = waiters.get(&name.map(OsStr::to_owned)) {
            waiters.iter().for_each(|waiter| waiter.notify_one());
        }
        if events.contains(ReadFlags::IGNORED) {
            // The kernel has removed the watch.
            directories.remove(&wd);
        }
    }

    fn add(
        &self,
        directory: &Path,
        name: Option<&OsStr>,
        waiter: &Rc<Notify>,
    ) -> rustix::io::Result<(i32, Option<OsString>)> {
        let events = if name.is_some() { NAMES | DIRECTORY } else { DIRECTORY };
        let flags = events | WatchFlags::ONLYDIR | WatchFlags::MASK_ADD;
        let wd = inotify::add_watch(self.fd.get_ref(), directory, flags)?;
        let name = name.map(OsStr::to_owned);
        let mut directories = self.directories.borrow_mut();
        directories.entry(wd).or_default().entry(name.clone()).or_default().push(Rc::clone(waiter));
        Ok((wd, name))
    }

    fn remove(&self, wd: i32, name: &Option<OsString>, waiter: &Rc<Notify>) {
        let mut directories = self.directories.borrow_mut();
        let Some(names) = directories.get_mut(&wd) else { return };
        if let Some(waiters) = names.get_mut(name) {
            waiters.retain(|other| !Rc::ptr_eq(other, waiter));
            if waiters.is_empty() {
                names.remove(name);
            }
        }
        if names.is_empty() {
            directories.remove(&wd);
            // The directory may already be gone.
            let _ = inotify::remove_watch(self.fd.get_ref(), wd);
        }
    }
}

/// A watch on a path. Dropping it removes the watch.
pub(crate) struct Watching {
    instance: Rc<Instance>,
    places: Vec<(i32, Option<OsString>)>,
    waiter: Rc<Notify>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        for (wd, name) in &self.places {
            self.instance.shared.remove(*wd, name, &self.waiter);
        }
    }
}

impl Watching {
    /// Watches for the next missing name of `path`, which is absolute, in the deepest directory of the path that exists, and for
    /// the ends of the directories above. After that the caller must check the path once more, and then wait.
    ///
    /// # Errors
    /// The kernel's limit of watches is reached, the directories may not be watched, or a component of the path is not a
    /// directory.
    pub(crate) fn new(path: &Path) -> std::io::Result<Self> {
        let instance = Instance::get()?;
        loop {
            let mut watching =
                Self { instance: Rc::clone(&instance), places: Vec::new(), waiter: Rc::default() };
            let next = watching.watch(path)?;
            // The name may have appeared between the search for its directory and the watch.
            if next == path || next.symlink_metadata().is_err() {
                return Ok(watching);
            }
            if !next.is_dir() {
                return Err(Errno::NOTDIR.into());
            }
        }
    }

    /// Returns the first missing component: `path`, or one of its directories.
    fn watch<'p>(&mut self, path: &'p Path) -> rustix::io::Result<&'p Path> {
        let mut missing = None;
        let mut child = path;
        for directory in path.ancestors().skip(1) {
            // Above the deepest existing directory, only the directory itself matters, so that unrelated files wake no waiter.
            let name = if missing.is_none() { child.file_name() } else { None };
            match self.instance.shared.add(directory, name, &self.waiter) {
                Ok(place) => {
                    self.places.push(place);
                    missing.get_or_insert(child);
                }
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                // The process may lack the right to read a directory above. Only the directory that holds the missing name must
                // be watched.
                Err(Errno::ACCESS) if missing.is_some() => {}
                Err(error) => return Err(error),
            }
            child = directory;
        }
        missing.ok_or(Errno::NOENT)
    }

    /// Waits for an event. The future can be cancelled without loss.
    pub(crate) async fn changed(&self) {
        self.waiter.notified().await;
    }
}
