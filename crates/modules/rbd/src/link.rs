//! The way of requests from one reactor to librbd, and of the results back.
//!
//! ```text
//! reactor: driver ── ring of commands ──► thread of the link ──► librbd
//!          driver ◄─ list of results ──── threads of librbd ◄────┘
//! ```
//!
//! Both directions have the same protocol for sleep: each side stores, fences, then loads what the other side stores. The sender
//! adds an entry, fences, reads whether the receiver sleeps; the receiver notes that it sleeps, fences, looks for entries.
//!
//! The ring has one producer and one consumer. The reactor only tries the lock of the list; a thread that has it adds one entry,
//! and then wakes the driver if that is armed.

use crate::workers::{lock, run_on};
use aryk_librbd::{Gate, Image, Request, Sink};
use aryk_reactor::{CoreSet, Cx};
use rtrb::{Consumer, Producer, RingBuffer};
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// Results that a list has room for without an allocation.
const RESULTS: usize = 1024;

/// What a reactor tells the thread of its link.
#[derive(Debug)]
pub(crate) enum Command {
    /// Requests with this number are for this image, and use memory behind this gate.
    Attach(u32, Arc<Image>, Arc<Gate>),
    /// There are no more requests with this number.
    Detach(u32),
    /// A request.
    Submit(u32, Request),
}

/// Wakes the thread of a link.
#[derive(Debug)]
pub(crate) struct Doorbell {
    fd: OwnedFd,
    sleeps: AtomicBool,
    /// Number of commands that the thread has carried out.
    done: AtomicU64,
}

impl Doorbell {
    /// Whether the thread has carried out so many commands: librbd has their requests.
    pub fn has_done(&self, commands: u64) -> bool {
        self.done.load(Ordering::Acquire) >= commands
    }

    /// Wakes the thread, at the end of the reactor's turn, if it sleeps. Called after commands were added.
    pub fn ring(&self, cx: &mut Cx) {
        if self.must_wake() {
            cx.signal(self.fd.as_fd());
        }
    }

    fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.sleeps.load(Ordering::Relaxed) && self.sleeps.swap(false, Ordering::AcqRel)
    }

    /// Sleeps until the bell is rung, unless `has_work`.
    fn sleep(&self, has_work: impl Fn() -> bool) {
        self.sleeps.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        if !has_work() {
            // A failed read looks like a ring without work.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
        self.sleeps.swap(false, Ordering::AcqRel);
    }
}

/// The results of requests that a reactor has not taken.
#[derive(Debug)]
pub(crate) struct Results {
    list: Mutex<Vec<(u64, i64)>>,
    /// Whether the driver waits for its descriptor.
    is_armed: AtomicBool,
    fd: OwnedFd,
}

impl Sink for Results {
    fn completed(&self, token: u64, result: i64) {
        lock(&self.list).push((token, result));
        fence(Ordering::SeqCst);
        if self.is_armed.load(Ordering::Relaxed) && self.is_armed.swap(false, Ordering::AcqRel) {
            // The write fails only if the counter is full, and then the driver is being woken.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }
}

impl Results {
    /// Takes all results into an empty list, unless a thread is adding one.
    pub fn try_take(&self, into: &mut Vec<(u64, i64)>) {
        debug_assert!(into.is_empty(), "results that were not taken");
        if let Ok(mut list) = self.list.try_lock() {
            std::mem::swap(into, &mut list);
        }
    }

    /// From now on, a result writes to the descriptor; returns false, and changes nothing, if there is one already.
    pub fn arm(&self) -> bool {
        self.is_armed.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        // A thread that has the lock is adding a result.
        let is_empty = self.list.try_lock().is_ok_and(|list| list.is_empty());
        if !is_empty {
            self.disarm();
        }
        is_empty
    }

    pub fn disarm(&self) {
        self.is_armed.swap(false, Ordering::AcqRel);
    }

    /// A descriptor for the driver to be woken by.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }
}

/// The reactor's end of a link. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Link {
    /// `None` only while it is being dropped.
    commands: Option<Producer<Command>>,
    pub doorbell: Arc<Doorbell>,
    pub results: Arc<Results>,
}

impl Link {
    /// Starts the thread of a link, for up to `depth` commands at a time, on `cores`. The receiver is ready at the thread's end.
    pub fn start(depth: u32, cores: Option<CoreSet>) -> io::Result<(Self, oneshot::Receiver<()>)> {
        let (commands, theirs) = RingBuffer::new(depth as usize);
        let doorbell = Doorbell {
            fd: eventfd(0, EventfdFlags::CLOEXEC)?,
            sleeps: AtomicBool::new(false),
            done: AtomicU64::new(0),
        };
        let results = Results {
            list: Mutex::new(Vec::with_capacity(RESULTS)),
            is_armed: AtomicBool::new(false),
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        let link = Self { commands: Some(commands), doorbell: doorbell.into(), results: results.into() };
        let (doorbell, sink) = (Arc::clone(&link.doorbell), Arc::clone(&link.results) as Arc<dyn Sink>);
        let (end, ended) = oneshot::channel();
        std::thread::Builder::new().name("rbd_link".into()).spawn(move || {
            run_on(cores.as_ref());
            work(theirs, &doorbell, &sink);
            // The client may have ended without waiting for this.
            let _ = end.send(());
        })?;
        Ok((link, ended))
    }

    /// Adds a command, or returns it if there is no room.
    #[inline]
    pub fn push(&mut self, command: Command) -> Result<(), Command> {
        let commands = self.commands.as_mut().expect("the link is not being dropped");
        commands.push(command).map_err(|rtrb::PushError::Full(command)| command)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The thread sees that the ring has no producer any more.
        self.commands = None;
        if self.doorbell.must_wake() {
            // The counter of a bell that is not rung is 0.
            let _ = rustix::io::write(&self.doorbell.fd, &1_u64.to_ne_bytes());
        }
    }
}

fn work(mut commands: Consumer<Command>, doorbell: &Doorbell, sink: &Arc<dyn Sink>) {
    let mut images: Vec<Option<(Arc<Image>, Arc<Gate>)>> = Vec::new();
    let mut done = 0;
    loop {
        // Read before the ring: all commands that were added before the end are then in the ring.
        let is_over = commands.is_abandoned();
        while let Ok(command) = commands.pop() {
            match command {
                Command::Attach(number, image, gate) => {
                    let number = number as usize;
                    images.resize_with(images.len().max(number + 1), || None);
                    images[number] = Some((image, gate));
                }
                Command::Detach(number) => images[number as usize] = None,
                Command::Submit(number, request) => {
                    let (image, gate) = images[number as usize].as_ref().expect("an image is attached first");
                    image.submit(&request, sink, gate);
                }
            }
            done += 1;
            doorbell.done.store(done, Ordering::Release);
        }
        if is_over {
            return;
        }
        doorbell.sleep(|| !commands.is_empty() || commands.is_abandoned());
    }
}
