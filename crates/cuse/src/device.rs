//! A device: the handshake that creates `/dev/NAME`, and the thread that serves it. Control context.
//!
//! The thread waits for two sources: messages of the kernel, and notes (answers of the owner, and the end). It never waits for a
//! command, so it answers OPEN, RELEASE and interrupted callers even if the drive does not answer. The descriptor of `/dev/cuse`
//! belongs to the thread alone: when the thread ends, the kernel removes `/dev/NAME` and fails the calls that still wait.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, read, retry_on_intr, write};

use crate::ioctl::Shape;
use crate::request::{Caller, Completion, Request};
use crate::session::{self, Node, Received, receive};
use crate::wire::{self, BUFFER, Body, Message};

/// The most commands in flight of one device, fewer than the driver takes. A command whose caller was interrupted counts until
/// its answer.
pub const IN_FLIGHT_MAX: usize = 8;

const CUSE: &str = "/dev/cuse";
/// For how long the kernel may take to send the first message, which it queues when `/dev/cuse` is opened.
const HANDSHAKE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// The longest name of a device.
const NAME_MAX: usize = 64;

/// Why a device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CuseError {
    /// The name is not one of a device.
    #[error(
        "\"{0}\" is no name of a device: at most {NAME_MAX} letters, digits, '.', '_' and '-', with one '/' at most, no part begins with '.'"
    )]
    BadName(String),
    /// `/dev/NAME` exists.
    #[error("/dev/{0} exists already")]
    Exists(String),
    /// There is no `/dev/cuse`.
    #[error("there is no {CUSE}: load the kernel's module with `modprobe cuse`")]
    NoCuse,
    /// `/dev/cuse` cannot be opened.
    #[error(
        "no permission to open {CUSE}: the user of this process needs to read and write it, and systemd `DeviceAllow={CUSE} rw`"
    )]
    NoPermission,
    /// The kernel's FUSE is too old.
    #[error("the kernel speaks FUSE {0}.{1}; version {major}.{minor} or a later minor version is needed", major = wire::MAJOR, minor = wire::MINOR_MIN)]
    Version(u32, u32),
    /// The kernel's first message is not the handshake.
    #[error("{CUSE} did not begin with the CUSE handshake")]
    Handshake,
    /// The kernel does not create the device.
    #[error("the kernel refuses to create /dev/{0}; its log (dmesg) says why")]
    Refused(String),
    /// A system call failed.
    #[error("{CUSE}: {0}")]
    System(#[from] Errno),
    /// The thread cannot be started.
    #[error("cannot start the device's thread: {0}")]
    Thread(std::io::Error),
}

/// The owner of the drive, as the device sees it.
pub trait NvmeDevice: Send + Sync + 'static {
    /// Begins a request and returns without waiting for its end. `answer` is completed later, on any thread.
    ///
    /// An owner with an asynchronous call spawns a task:
    /// `spawn(async move { answer.complete(controller.admin(command).await) })`.
    fn serve(&self, request: Request, caller: Caller, answer: Answer);
}

/// The right to answer one request. If it is dropped, the caller receives `EIO`.
pub struct Answer(Option<Receive>);

/// The receiver of an outcome.
type Receive = Box<dyn FnOnce(Result<Completion, Errno>) + Send>;

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an answer to a request")
    }
}

impl Answer {
    /// An answer that goes to `receive`, which must not wait.
    pub fn new(receive: impl FnOnce(Result<Completion, Errno>) + Send + 'static) -> Self {
        Self(Some(Box::new(receive)))
    }

    /// Answers the request: by the controller's completion, or by an error of the owner, for example `EBUSY`. Without effect if
    /// the device was dropped.
    pub fn complete(mut self, outcome: Result<Completion, Errno>) {
        self.send(outcome);
    }

    fn send(&mut self, outcome: Result<Completion, Errno>) {
        if let Some(receive) = self.0.take() {
            receive(outcome);
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.send(Err(Errno::IO));
    }
}

#[derive(Debug)]
enum Note {
    Answer(u64, Result<Completion, Errno>),
    End,
}

/// The way to the device's thread.
#[derive(Clone, Debug)]
struct Notes {
    sender: Sender<Note>,
    wake: Arc<OwnedFd>,
}

impl Notes {
    fn send(&self, note: Note) {
        // Without a receiver, the device is gone. The eventfd cannot overflow before the thread reads it.
        if self.sender.send(note).is_ok() {
            let _ = write(&*self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// A character device `/dev/NAME`. Dropping it removes it at once: calls in flight fail.
#[derive(Debug)]
pub struct Device {
    name: String,
    notes: Notes,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Creates `/dev/NAME`. A name may have one directory, as `aryk/nvme0`.
    ///
    /// # Errors
    /// [`CuseError`].
    pub fn create(name: &str, node: Node, owner: Arc<dyn NvmeDevice>) -> Result<Self, CuseError> {
        check_name(name)?;
        if Path::new("/dev").join(name).symlink_metadata().is_ok() {
            return Err(CuseError::Exists(name.to_owned()));
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let kernel = open(CUSE, flags, Mode::empty()).map_err(|errno| match errno {
            // Without the module, a node that systemd has created opens with ENODEV or ENXIO.
            Errno::NOENT | Errno::NODEV | Errno::NXIO => CuseError::NoCuse,
            Errno::ACCESS | Errno::PERM => CuseError::NoPermission,
            other => CuseError::System(other),
        })?;
        Self::over(kernel, name, node, owner)
    }

    /// The device whose kernel is at the other end of `kernel`.
    fn over(kernel: OwnedFd, name: &str, node: Node, owner: Arc<dyn NvmeDevice>) -> Result<Self, CuseError> {
        shake_hands(&kernel, name)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (sender, received) = channel();
        let notes = Notes { sender, wake };
        let server =
            Server { kernel, notes: notes.clone(), received, node, owner, in_flight: BTreeMap::new() };
        let (name, own) = (name.to_owned(), name.to_owned());
        let thread = std::thread::Builder::new()
            .name("cuse".to_owned())
            .spawn(move || server.run(&own))
            .map_err(CuseError::Thread)?;
        Ok(Self { name, notes, thread: Some(thread) })
    }

    /// The device's name below `/dev`.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.notes.send(Note::End);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been reported already.
            let _ = thread.join();
        }
    }
}

fn check_name(name: &str) -> Result<(), CuseError> {
    let is_part = |part: &str| {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !part.is_empty() && !part.starts_with('.') && part.chars().all(is_allowed)
    };
    let is_name = name.len() <= NAME_MAX && name.split('/').count() <= 2 && name.split('/').all(is_part);
    if is_name { Ok(()) } else { Err(CuseError::BadName(name.to_owned())) }
}

/// Answers the kernel's first message, and checks that the kernel has created the device.
fn shake_hands(kernel: &OwnedFd, name: &str) -> Result<(), CuseError> {
    let mut fds = [PollFd::new(kernel, PollFlags::IN)];
    retry_on_intr(|| poll(&mut fds, Some(&HANDSHAKE)))?;
    let mut buffer = vec![0; BUFFER];
    let len = match retry_on_intr(|| read(kernel, &mut buffer)) {
        Ok(len) => len,
        Err(Errno::AGAIN) => return Err(CuseError::Handshake),
        Err(errno) => return Err(errno.into()),
    };
    let message = Message::parse(&buffer[..len]).map_err(|_| CuseError::Handshake)?;
    let Body::Init { major, minor, flags } = message.body else { return Err(CuseError::Handshake) };
    if major != wire::MAJOR || minor < wire::MINOR_MIN || flags & wire::UNRESTRICTED == 0 {
        return Err(CuseError::Version(major, minor));
    }
    retry_on_intr(|| write(kernel, &wire::init(message.unique, minor, name)))?;
    // The kernel creates the device before the write returns; if it cannot, it ends the connection.
    let mut fds = [PollFd::new(kernel, PollFlags::IN)];
    retry_on_intr(|| poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })))?;
    if fds[0].revents().intersects(PollFlags::ERR | PollFlags::HUP) {
        return Err(CuseError::Refused(name.to_owned()));
    }
    Ok(())
}

/// A request that the owner serves.
#[derive(Clone, Copy, Debug)]
enum Pending {
    /// Its caller waits for an answer of this shape.
    Waiting(Shape),
    /// Its caller was interrupted, and has its answer.
    Interrupted,
}

/// The state of the device's thread.
struct Server {
    kernel: OwnedFd,
    notes: Notes,
    received: Receiver<Note>,
    node: Node,
    owner: Arc<dyn NvmeDevice>,
    in_flight: BTreeMap<u64, Pending>,
}

impl Server {
    fn run(mut self, name: &str) {
        if let Err(errno) = self.serve() {
            tracing::warn!(device = name, "the kernel ended /dev/{name}: {errno}");
        }
    }

    /// Serves until the end.
    fn serve(&mut self) -> Result<(), Errno> {
        let mut buffer = vec![0; BUFFER];
        loop {
            let mut fds = [
                PollFd::new(&self.kernel, PollFlags::IN),
                PollFd::from_borrowed_fd(std::os::fd::AsFd::as_fd(&*self.notes.wake), PollFlags::IN),
            ];
            retry_on_intr(|| poll(&mut fds, None))?;
            let [has_message, has_note] = [0, 1].map(|source: usize| !fds[source].revents().is_empty());
            if has_note {
                // Before the notes are taken: a later note wakes the thread again.
                let _ = read(&*self.notes.wake, &mut [0; 8]);
                if self.take_notes()? {
                    return Ok(());
                }
            }
            if has_message {
                match read(&self.kernel, &mut buffer) {
                    Ok(0) => return Err(Errno::NODEV),
                    Ok(len) => self.take(&buffer[..len])?,
                    // ENOENT: the caller of the request ended before the read.
                    Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => {}
                    Err(errno) => return Err(errno),
                }
            }
        }
    }

    /// Sends the owner's answers; whether the device ends.
    fn take_notes(&mut self) -> Result<bool, Errno> {
        loop {
            match self.received.try_recv() {
                Ok(Note::Answer(unique, outcome)) => {
                    if let Some(Pending::Waiting(shape)) = self.in_flight.remove(&unique) {
                        self.reply(&session::answer(unique, shape, outcome))?;
                    }
                }
                Ok(Note::End) | Err(TryRecvError::Disconnected) => return Ok(true),
                Err(TryRecvError::Empty) => return Ok(false),
            }
        }
    }

    /// Acts on a message of the kernel.
    fn take(&mut self, message: &[u8]) -> Result<(), Errno> {
        match receive(message, self.node) {
            Received::Nothing => Ok(()),
            Received::Reply(bytes) => self.reply(&bytes),
            Received::Interrupt(unique) => match self.in_flight.get_mut(&unique) {
                Some(pending @ Pending::Waiting(_)) => {
                    *pending = Pending::Interrupted;
                    self.reply(&wire::fail(unique, Errno::INTR))
                }
                // The answer was faster.
                Some(Pending::Interrupted) | None => Ok(()),
            },
            Received::Serve { unique, .. } if self.in_flight.len() >= IN_FLIGHT_MAX => {
                self.reply(&wire::fail(unique, Errno::BUSY))
            }
            Received::Serve { unique, caller, request, shape } => {
                self.in_flight.insert(unique, Pending::Waiting(shape));
                let notes = self.notes.clone();
                let answer = Answer::new(move |outcome| notes.send(Note::Answer(unique, outcome)));
                self.owner.serve(request, caller, answer);
                Ok(())
            }
        }
    }

    fn reply(&self, bytes: &[u8]) -> Result<(), Errno> {
        match retry_on_intr(|| write(&self.kernel, bytes)) {
            // ENOENT: the request is gone, because its caller ended.
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

#[cfg(test)]
mod tests;
