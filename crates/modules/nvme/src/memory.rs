//! Registration of guests' memory with a controller's IOMMU. Control context.
//!
//! Pinned pages cost the kernel time and stay the guest's only as long as nobody else replaces them: a balloon, free page
//! reporting, virtio-mem and post-copy migration give the guest other pages at the same address, and the controller goes on
//! writing to the old ones. So memory is pinned where that cannot happen page by page (huge pages; the operator ensures that no
//! whole huge page is replaced either), or where the operator says so.
//!
//! A thread maps, and another unmaps, because both take long. The guests take turns: a piece of one guest's memory is mapped,
//! then a piece of the next guest's. So a guest waits for a piece of each other guest that registers memory, not for all of it.

use crate::Dma;
use aryk_bdev::{BoxFuture, MemoryClient, RegisterError};
use aryk_dma::{DmaRange, PAGE};
use aryk_pci::{Function, PciError, PendingMap};
use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use tokio::sync::oneshot;

/// Memory that a guest waits for.
pub(crate) struct Wanted {
    pub(crate) owner: Arc<str>,
    pub(crate) map: PendingMap,
    pub(crate) reply: oneshot::Sender<Result<u64, PciError>>,
}

/// Memory that is to be unmapped.
struct Ended {
    iova: u64,
    len: u64,
    reply: oneshot::Sender<()>,
}

/// The guests whose memory is to be mapped, in the order of their turns.
#[derive(Default)]
pub(crate) struct Turns(VecDeque<Turn>);

/// A guest's memory that is to be mapped, in the order in which the guest announced it.
struct Turn {
    owner: Arc<str>,
    wanted: VecDeque<Wanted>,
}

impl Turns {
    pub(crate) fn add(&mut self, wanted: Wanted) {
        match self.0.iter_mut().find(|turn| turn.owner == wanted.owner) {
            Some(turn) => turn.wanted.push_back(wanted),
            None => {
                let owner = Arc::clone(&wanted.owner);
                self.0.push_back(Turn { owner, wanted: VecDeque::from([wanted]) });
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Maps a piece of the next guest's memory.
    pub(crate) fn map_piece(&mut self, function: &dyn Function) {
        let Some(mut turn) = self.0.pop_front() else { return };
        let first = turn.wanted.front_mut().expect("a turn has memory");
        if let Some(result) = function.map_piece(&mut first.map).transpose()
            && let Some(Wanted { reply, .. }) = turn.wanted.pop_front()
        {
            // The caller is gone if the block layer was dropped.
            let _ = reply.send(result);
        }
        if !turn.wanted.is_empty() {
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
        let (wanted, receiver) = mpsc::channel();
        let mapping = Arc::clone(&function);
        std::thread::Builder::new()
            .name("aryk-nvme-map".into())
            .spawn(move || map_in_turns(mapping.as_ref(), &receiver))?;
        let (ended, receiver) = mpsc::channel();
        let run = move || receiver.into_iter().for_each(|ended| unmap(function.as_ref(), ended));
        std::thread::Builder::new().name("aryk-nvme-unmap".into()).spawn(run)?;
        Ok(Self { name, dma, wanted, ended })
    }
}

fn map_in_turns(function: &dyn Function, wanted: &mpsc::Receiver<Wanted>) {
    let mut turns = Turns::default();
    loop {
        if turns.is_empty() {
            let Ok(first) = wanted.recv() else { return };
            turns.add(first);
        }
        wanted.try_iter().for_each(|wanted| turns.add(wanted));
        turns.map_piece(function);
    }
}

fn unmap(function: &dyn Function, ended: Ended) {
    let Ended { iova, len, reply } = ended;
    match function.unmap(iova, len) {
        Ok(()) | Err(PciError::NotMapped { .. } | PciError::Gone { .. }) => {
            let _ = reply.send(());
        }
        Err(error) => {
            tracing::error!(%error, iova, len, "a guest's memory stays mapped for a controller");
            std::mem::forget(reply);
        }
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

    fn unregister(&self, memory: DmaRange, value: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let ended = Ended { iova: value, len: memory.len(), reply };
            if self.ended.send(ended).is_err() || answer.await.is_err() {
                // The thread has panicked: nobody knows whether the controller accesses the memory.
                std::future::pending::<()>().await;
            }
        })
    }
}
