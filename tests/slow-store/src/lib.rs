//! A file whose requests wait until a test lets them go: a store that is slow, or stuck. For tests only; takes root.
//!
//! It is served by FUSE, so all between a process and its disk is the kernel's own. The kernel reads and writes the pages of a request that is held,
//! and keeps its file open, as with any disk: also when the process that made it is gone. A held write has not happened yet; it happens when it is
//! let go.
//!
//! Whoever drops the store lets go of all that it holds: nothing can be stuck for good.
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
/// Requests that may wait at the same time. The kernel keeps what exceeds them to itself, and forgets them if their process is killed.
pub const HELD_MAX: u16 = 1024;

/// How long the kernel may believe what it was told of names and attributes: they never change.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// A file system with one file, `image`, of a size that stays; all of it in memory.
pub struct SlowStore {
    shared: Arc<Shared>,
    path: PathBuf,
    /// It has a thread, which ends when the kernel has nothing more of it.
    session: Option<BackgroundSession>,
    directory: tempfile::TempDir,
}

/// Which requests wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// Writes only: a file can still be opened, for it is read then.
    Writes,
    /// Reads and writes.
    All,
}

/// Requests that wait.
enum Held {
    Write { offset: usize, data: Vec<u8>, reply: ReplyWrite },
    Read { offset: usize, len: usize, reply: ReplyData },
}

struct State {
    bytes: Vec<u8>,
    holds: Option<Hold>,
    held: Vec<Held>,
    fails_syncs: bool,
    /// By which error.
    fails_writes: Option<Errno>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl SlowStore {
    /// A file of `size` bytes of zeroes, in a new directory below `directory`. It holds nothing yet.
    ///
    /// # Errors
    /// The kernel's, if nothing may be mounted here or it knows no FUSE.
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

    /// From now on these requests wait.
    pub fn hold(&self, what: Hold) {
        self.shared.lock().holds = Some(what);
    }

    /// From now on none does. Those that wait already go on waiting.
    pub fn pass(&self) {
        self.shared.lock().holds = None;
    }

    /// Whether from now on syncs fail, as where a disk does not take what a cache has for it.
    pub fn fail_syncs(&self, fails: bool) {
        self.shared.lock().fails_syncs = fails;
    }

    /// By which error writes fail from now on, if they do.
    pub fn fail_writes(&self, errno: Option<i32>) {
        self.shared.lock().fails_writes = errno.map(Errno::from_i32);
    }

    /// Carries out all that waits, in the order in which it came.
    pub fn let_go(&self) {
        self.shared.let_go();
    }

    /// Waits until `count` requests wait at the same time; whether they did before `patience` ended.
    pub fn await_held(&self, count: usize, patience: Duration) -> bool {
        let waits = |state: &mut State| state.held.len() < count;
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), patience, waits);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Requests that wait.
    pub fn held(&self) -> usize {
        self.shared.lock().held.len()
    }

    /// Has all of the file be `byte`.
    pub fn fill(&self, byte: u8) {
        self.shared.lock().bytes.fill(byte);
    }

    /// What has really been written.
    pub fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.shared.lock().bytes[offset..][..len].to_vec()
    }
}

impl Drop for SlowStore {
    fn drop(&mut self) {
        self.pass();
        self.let_go();
        // What the kernel itself still has of a process that was killed must not keep the directory.
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

/// What the kernel asks. On a thread of its own.
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
        // Else whoever writes waits for each request itself, and cannot be killed before it is over.
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
