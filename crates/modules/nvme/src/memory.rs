//! Registration of guests' memory with a controller's IOMMU. Control context.
//!
//! Pinned pages cost the kernel time and stay the guest's only as long as nobody else replaces them: a balloon, free page
//! reporting, virtio-mem and post-copy migration give the guest other pages at the same address, and the controller goes on
//! writing to the old ones. So memory is pinned where that cannot happen page by page (huge pages; the operator ensures that no
//! whole huge page is replaced either), or where the operator says so.
//!
//! A thread maps, and another unmaps, because both take long. In each, the guests take turns: a piece of one guest's memory is
//! mapped, then a piece of the next guest's. So a guest waits for a piece of each other guest's memory, not for all of it.

use crate::Dma;
use aryk_bdev::{BoxFuture, MemoryClient, RegisterError};
use aryk_dma::{DmaRange, PAGE};
use aryk_pci::{Function, PciError, PendingMap, PendingUnmap};
use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use tokio::sync::oneshot;

/// Work on a guest's memory, which takes turns with that of other guests.
pub(crate) trait Work: Sized {
    fn owner(&self) -> &Arc<str>;
    /// Maps or unmaps the next piece. Returns what is left; at the end, the caller that waits gets the result.
    fn step(self, function: &dyn Function) -> Option<Self>;
}

/// Memory that a guest waits for.
pub(crate) struct Wanted {
    pub(crate) owner: Arc<str>,
    pub(crate) map: PendingMap,
    pub(crate) reply: oneshot::Sender<Result<u64, PciError>>,
}

impl Work for Wanted {
    fn owner(&self) -> &Arc<str> {
        &self.owner
    }

    fn step(mut self, function: &dyn Function) -> Option<Self> {
        let Some(result) = function.map_piece(&mut self.map).transpose() else { return Some(self) };
        // The caller is gone if the block layer was dropped.
        let _ = self.reply.send(result);
        None
    }
}

/// Memory that is to be unmapped.
pub(crate) struct Ended {
    pub(crate) owner: Arc<str>,
    pub(crate) unmap: PendingUnmap,
    pub(crate) reply: oneshot::Sender<()>,
}

impl Work for Ended {
    fn owner(&self) -> &Arc<str> {
        &self.owner
    }

    fn step(mut self, function: &dyn Function) -> Option<Self> {
        match function.unmap_piece(&mut self.unmap) {
            Ok(false) => return Some(self),
            Ok(true) | Err(PciError::NotMapped { .. } | PciError::Gone { .. }) => {
                // The caller is gone if the block layer was dropped.
                let _ = self.reply.send(());
            }
            Err(error) => {
                let (iova, len) = self.unmap.range();
                tracing::error!(%error, iova, len, "a guest's memory stays mapped for a controller");
                std::mem::forget(self.reply);
            }
        }
        None
    }
}

/// The guests whose memory is to be mapped or unmapped, in the order of their turns.
pub(crate) struct Turns<T>(VecDeque<VecDeque<T>>);

impl<T: Work> Turns<T> {
    pub(crate) const fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Adds work behind the other work of its guest.
    pub(crate) fn add(&mut self, work: T) {
        match self.0.iter_mut().find(|turn| turn[0].owner() == work.owner()) {
            Some(turn) => turn.push_back(work),
            None => self.0.push_back(VecDeque::from([work])),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Maps or unmaps a piece of the next guest's memory.
    pub(crate) fn step(&mut self, function: &dyn Function) {
        let Some(mut turn) = self.0.pop_front() else { return };
        let first = turn.pop_front().expect("a turn has work");
        if let Some(rest) = first.step(function) {
            turn.push_front(rest);
        }
        if !turn.is_empty() {
            self.0.push_back(turn);
        }
    }
}

/// A controller's IOMMU, as the block layer's client for guests' memory.
pub(crate) struct Registrar {
    name: String,
    dma: Dma,
    wanted: mpsc::Sender<Wanted>,
    ended: mpsc::Sender<Ended>,
}

impl Registrar {
    /// Starts the threads that call the kernel. They end with the registrar.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(function: Arc<dyn Function>, dma: Dma) -> std::io::Result<Self> {
        let name = function.name().to_owned();
        let wanted = start_thread("aryk-nvme-map", Arc::clone(&function))?;
        let ended = start_thread("aryk-nvme-unmap", function)?;
        Ok(Self { name, dma, wanted, ended })
    }
}

/// Starts a thread that works for the guests in turns.
fn start_thread<T: Work + Send + 'static>(
    name: &str,
    function: Arc<dyn Function>,
) -> std::io::Result<mpsc::Sender<T>> {
    let (sender, receiver) = mpsc::channel();
    let run = move || work_in_turns(function.as_ref(), &receiver);
    std::thread::Builder::new().name(name.into()).spawn(run)?;
    Ok(sender)
}

fn work_in_turns<T: Work>(function: &dyn Function, receiver: &mpsc::Receiver<T>) {
    let mut turns = Turns::new();
    loop {
        if turns.is_empty() {
            let Ok(first) = receiver.recv() else { return };
            turns.add(first);
        }
        receiver.try_iter().for_each(|work| turns.add(work));
        turns.step(function);
    }
}

impl MemoryClient for Registrar {
    fn name(&self) -> &str {
        &self.name
    }

    fn register(&self, memory: DmaRange, owner: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(async move {
            if self.dma == Dma::Auto && memory.page_size().unwrap_or(PAGE) == PAGE {
                return Err(RegisterError::Declined("the memory has no huge pages, and `dma` is `auto`"));
            }
            let (reply, answer) = oneshot::channel();
            let wanted = Wanted { owner, map: PendingMap::new(memory), reply };
            let ended = || RegisterError::failed("the thread for it has ended");
            self.wanted.send(wanted).map_err(|_| ended())?;
            answer.await.map_err(|_| ended())?.map_err(RegisterError::failed)
        })
    }

    fn unregister(&self, memory: DmaRange, owner: Arc<str>, value: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let ended = Ended { owner, unmap: PendingUnmap::new(value, memory.len()), reply };
            if self.ended.send(ended).is_err() || answer.await.is_err() {
                // The thread has panicked: nobody knows whether the controller accesses the memory.
                std::future::pending::<()>().await;
            }
        })
    }
}
