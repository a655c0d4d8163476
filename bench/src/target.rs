//! A bare block target: takes requests off virtqueues and completes them with success. It does nothing else, so its
//! throughput is the front-end's ceiling.
//!
//! Sessions run on a control thread; each queue has a thread that polls, all on the back-end's core.

use crate::process::{self, BACK_END_CORE};
use anyhow::{Context, Result};
use aryk_vhost_user::{
    Device, DeviceError, EventFd, F_EVENT_IDX, F_INDIRECT_DESC, Listener, MemoryChange, QueueSetup, Server,
    SocketOptions,
};
use aryk_virtqueue::{Chain, SplitConfig, SplitQueue};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// VIRTIO_BLK_F_MQ (virtio 1.2, section 5.2.3).
const F_MQ: u64 = 1 << 12;
/// Bytes of `struct virtio_blk_config`, and where its `num_queues` lies (section 5.2.4).
const CONFIG_LEN: usize = 60;
const CONFIG_NUM_QUEUES: usize = 34;
/// 512-byte sectors of the disk: 1 TiB.
const SECTORS: u64 = 1 << 31;

/// A listening target; its threads end with the process.
#[derive(Debug)]
pub struct Target {
    socket: PathBuf,
    /// Rest of a queue's thread after a burst, in ns.
    rest: Arc<AtomicU64>,
}

impl Target {
    /// Listens on a socket.
    pub fn start(socket: PathBuf, queues: usize) -> Result<Self> {
        let rest = Arc::new(AtomicU64::new(0));
        let disk = Disk { queues: queues as u16, rest: Arc::clone(&rest), running: RefCell::default() };
        let listener = Listener::bind(&socket, SocketOptions::default())?;
        let (up, is_up) = mpsc::channel();
        std::thread::spawn(move || serve(disk, listener, &up));
        is_up.recv().context("the target's control thread has ended")??;
        Ok(Self { socket, rest })
    }

    /// The path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sets the rest after a burst of several requests.
    pub fn rest_after_bursts(&self, rest: Duration) {
        self.rest.store(rest.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// The control thread.
fn serve(disk: Disk, listener: Listener, up: &mpsc::Sender<std::io::Result<()>>) {
    let pinned = process::pin(BACK_END_CORE).map_err(std::io::Error::other);
    let runtime = pinned.and_then(|()| tokio::runtime::Builder::new_current_thread().enable_all().build());
    let run = runtime.map(|runtime| {
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime, async {
            let server = Server::start("ceiling", listener, Rc::new(disk));
            // The receiver exists until the target has started.
            let _ = up.send(server.as_ref().map(drop).map_err(|error| std::io::Error::from(error.kind())));
            std::future::pending::<()>().await;
        });
    });
    let _ = up.send(run);
}

/// A queue's thread.
#[derive(Debug)]
struct Poller {
    setup: QueueSetup,
    stop: Arc<AtomicBool>,
    /// Returns the index of the next available entry.
    thread: JoinHandle<u16>,
}

impl Poller {
    fn start(setup: QueueSetup, rest: &Arc<AtomicU64>) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let queue = SplitQueue::new(SplitConfig {
            size: setup.size,
            desc: setup.rings.desc.clone(),
            avail: setup.rings.driver.clone(),
            next_used: aryk_virtqueue::used_idx(&setup.rings.device),
            used: setup.rings.device.clone(),
            event_idx: setup.features & F_EVENT_IDX != 0,
            indirect: setup.features & F_INDIRECT_DESC != 0,
            next_avail: setup.base as u16,
        })?;
        let (seen, rest, ours) = (Arc::clone(&stop), Arc::clone(rest), setup.clone());
        let thread = std::thread::spawn(move || answer(queue, &ours, &seen, &rest));
        Ok(Self { setup, stop, thread })
    }

    /// Ends the thread; returns the setup for continuing the queue.
    fn stop(self) -> QueueSetup {
        self.stop.store(true, Ordering::Relaxed);
        let base = self.thread.join().expect("a queue's thread does not panic");
        QueueSetup { base: base.into(), ..self.setup }
    }
}

/// Answers requests until `stop`. The front-end polls, so it needs no calls.
fn answer(mut queue: SplitQueue, setup: &QueueSetup, stop: &AtomicBool, rest: &AtomicU64) -> u16 {
    process::pin(BACK_END_CORE).expect("the control thread could be pinned to this core");
    let mut chain = Chain::default();
    queue.disable_kicks();
    while !stop.load(Ordering::Relaxed) {
        let mut count = 0;
        while let Ok(Some(head)) = queue.pop(&setup.memory, &mut chain) {
            let len = chain.writable_len() as u32;
            if let Some(status) = chain.take_last_writable() {
                setup.memory.write(status, &0_u8).expect("blkio's addresses are in its memory");
            }
            queue.push_used(head, len);
            count += 1;
        }
        let _call = queue.publish();
        let rest = rest.load(Ordering::Relaxed);
        if count > 1 && rest > 0 {
            let start = Instant::now();
            while start.elapsed() < Duration::from_nanos(rest) {
                std::hint::spin_loop();
            }
        } else {
            std::hint::spin_loop();
        }
    }
    queue.next_avail()
}

/// The device of the sessions. Used on the control thread only.
#[derive(Debug)]
struct Disk {
    queues: u16,
    rest: Arc<AtomicU64>,
    running: RefCell<Vec<(u16, Poller)>>,
}

impl Disk {
    fn take(&self, index: u16) -> Option<Poller> {
        let mut running = self.running.borrow_mut();
        let place = running.iter().position(|(known, _)| *known == index)?;
        Some(running.swap_remove(place).1)
    }

    fn start(&self, index: u16, setup: QueueSetup) -> Result<()> {
        let poller = Poller::start(setup, &self.rest)?;
        self.running.borrow_mut().push((index, poller));
        Ok(())
    }
}

impl Device for Disk {
    fn features(&self) -> u64 {
        F_MQ
    }

    fn num_queues(&self) -> u16 {
        self.queues
    }

    fn queue_size_max(&self) -> u16 {
        32_768
    }

    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; CONFIG_LEN];
        config[..8].copy_from_slice(&SECTORS.to_le_bytes());
        config[CONFIG_NUM_QUEUES..CONFIG_NUM_QUEUES + 2].copy_from_slice(&self.queues.to_le_bytes());
        config
    }

    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError> {
        Ok(self.start(index, setup)?)
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        self.take(index).map_or(0, |poller| poller.stop().base)
    }

    async fn set_memory(&self, change: MemoryChange) {
        for (index, rings) in change.rings {
            if let Some(poller) = self.take(index) {
                let setup = QueueSetup { rings, memory: Arc::clone(&change.memory), ..poller.stop() };
                self.start(index, setup).expect("the queue ran before");
            }
        }
    }

    async fn set_call(&self, _index: u16, _call: Option<EventFd>) {}

    async fn set_err(&self, _index: u16, _err: Option<EventFd>) {}
}
