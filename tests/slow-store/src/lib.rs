//! A file whose requests wait until a test releases them: a slow or stuck store. For tests only; needs root.
//!
//! FUSE serves the file, so everything between a process and the store is the real kernel. The kernel reads and writes
//! the pages of a held request, and keeps its file open, as with any disk, even after the process has died. A held write
//! has not happened yet; it happens when it is released.
//!
//! Dropping the store releases all held requests, so no process stays stuck.
#![forbid(unsafe_code)]

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite,
    Request, WriteFlags,
};
use rustix::mount::UnmountFlags;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

const NAME: &str = "image";
const IMAGE: INodeNo = INodeNo(2);
/// Upper bound of requests that wait at the same time. The kernel queues further requests, and drops them if their
/// process is killed.
pub const HELD_MAX: u16 = 1024;

/// How long the kernel may cache names and attributes: they never change.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// A file system with one file, `image`, of constant size; its content is in memory.
pub struct SlowStore {
    shared: Arc<Shared>,
    path: PathBuf,
    /// Owns a thread, which ends when the kernel has no more requests for it.
    session: Option<BackgroundSession>,
    directory: tempfile::TempDir,
}

/// The requests that wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// Writes only: a file can still be opened, because opening reads it.
    Writes,
    /// Reads and writes.
    All,
}

/// A waiting request.
enum Held {
    Write { offset: usize, data: Vec<u8>, reply: ReplyWrite },
    Read { offset: usize, len: usize, reply: ReplyData },
}

struct State {
    bytes: Vec<u8>,
    holds: Option<Hold>,
    held: Vec<Held>,
    fails_syncs: bool,
    /// The errno of failing writes.
    fails_writes: Option<Errno>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl SlowStore {
    /// Creates a file of `size` bytes of zeroes, in a new directory below `directory`. No request is held at first.
    ///
    /// # Errors
    /// The kernel refuses the mount, or has no FUSE.
    pub fn new(directory: &Path, size: usize) -> io::Result<Self> {
        let state = State {
            bytes: vec![0; size],
            holds: None,
            held: Vec::new(),
            fails_syncs: false,
            fails_writes: None,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let directory = tempfile::tempdir_in(directory)?;
        let server = Server { shared: Arc::clone(&shared) };
        let session = fuser::spawn_mount(server, directory.path(), &Config::default())?;
        Ok(Self { shared, path: directory.path().join(NAME), session: Some(session), directory })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Holds these requests from now on.
    pub fn hold(&self, what: Hold) {
        self.shared.lock().holds = Some(what);
    }

    /// Holds no new requests from now on. Requests that already wait continue to wait.
    pub fn pass(&self) {
        self.shared.lock().holds = None;
    }

    /// Sets whether syncs fail from now on, like those of a disk that fails to write its cache.
    pub fn fail_syncs(&self, fails: bool) {
        self.shared.lock().fails_syncs = fails;
    }

    /// Sets the errno of writes from now on; `None` makes them succeed.
    pub fn fail_writes(&self, errno: Option<i32>) {
        self.shared.lock().fails_writes = errno.map(Errno::from_i32);
    }

    /// Executes all waiting requests, in the order of their arrival.
    pub fn let_go(&self) {
        self.shared.let_go();
    }

    /// Waits until `count` requests wait at the same time; returns whether that happened before `patience` ended.
    pub fn await_held(&self, count: usize, patience: Duration) -> bool {
        let waits = |state: &mut State| state.held.len() < count;
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), patience, waits);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Number of waiting requests.
    pub fn held(&self) -> usize {
        self.shared.lock().held.len()
    }

    /// Fills the file with `byte`.
    pub fn fill(&self, byte: u8) {
        self.shared.lock().bytes.fill(byte);
    }

    /// The content that has really been written.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.shared.lock().bytes[offset..][..len].to_vec()
    }
}

impl Drop for SlowStore {
    fn drop(&mut self) {
        self.pass();
        self.let_go();
        // Detached: requests that the kernel still has of a killed process must not keep the directory busy.
        if let Err(error) = rustix::mount::unmount(self.directory.path(), UnmountFlags::DETACH) {
            eprintln!("{} stays mounted: {error}", self.directory.path().display());
        }
        self.session.take();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn let_go(&self) {
        let mut state = self.lock();
        for held in std::mem::take(&mut state.held) {
            state.carry_out(held);
        }
    }

    fn take(&self, request: Held) {
        let mut state = self.lock();
        let waits = match state.holds {
            None => false,
            Some(Hold::Writes) => matches!(request, Held::Write { .. }),
            Some(Hold::All) => true,
        };
        if waits {
            state.held.push(request);
            self.changed.notify_all();
        } else {
            state.carry_out(request);
        }
    }
}

impl State {
    fn carry_out(&mut self, request: Held) {
        match request {
            Held::Write { offset, data, reply } => {
                if let Some(errno) = self.fails_writes {
                    return reply.error(errno);
                }
                match self.bytes.get_mut(offset..).and_then(|rest| rest.get_mut(..data.len())) {
                    Some(place) => {
                        place.copy_from_slice(&data);
                        reply.written(data.len() as u32);
                    }
                    None => reply.error(Errno::EFBIG),
                }
            }
            Held::Read { offset, len, reply } => {
                let rest = self.bytes.get(offset..).unwrap_or_default();
                reply.data(&rest[..len.min(rest.len())]);
            }
        }
    }
}

/// The handler of the kernel's FUSE requests. Runs on a thread of its own.
struct Server {
    shared: Arc<Shared>,
}

impl Server {
    fn attributes(&self, inode: INodeNo) -> FileAttr {
        let is_image = inode == IMAGE;
        let size = if is_image { self.shared.lock().bytes.len() as u64 } else { 0 };
        FileAttr {
            ino: inode,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_image { FileType::RegularFile } else { FileType::Directory },
            perm: if is_image { 0o600 } else { 0o700 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Server {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Otherwise a writer waits for each request by itself, and cannot be killed before the request is complete.
        config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).map_err(|_| io::ErrorKind::Unsupported)?;
        config.set_max_background(HELD_MAX).map_err(|_| io::ErrorKind::Unsupported.into()).map(drop)
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&FOR_EVER, &self.attributes(IMAGE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &self.attributes(inode));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.shared.take(Held::Read { offset: offset as usize, len: size as usize, reply });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.shared.take(Held::Write { offset: offset as usize, data: data.to_vec(), reply });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if self.shared.lock().fails_syncs {
            reply.error(Errno::EIO);
        } else {
            reply.ok();
        }
    }
}
