//! Registration of guests' memory with a controller's IOMMU. Control context.
//!
//! Pinned pages cost the kernel time and stay the guest's only as long as nobody else replaces them: a balloon, free page
//! reporting, virtio-mem and post-copy migration give the guest other pages at the same address, and the controller goes on
//! writing to the old ones. So memory is pinned where that cannot happen page by page (huge pages; the operator ensures that no
//! whole huge page is replaced either), or where the operator says so.

use crate::Dma;
use aryk_bdev::{BoxFuture, MemoryClient, RegisterError};
use aryk_dma::{DmaRange, PAGE};
use aryk_pci::{Function, PciError};
use std::sync::{Arc, mpsc};
use tokio::sync::oneshot;

/// A call of the IOMMU, which takes long.
enum Call {
    Map(DmaRange, oneshot::Sender<Result<u64, PciError>>),
    Unmap(u64, u64, oneshot::Sender<()>),
}

/// A controller's IOMMU, as the block layer's client for guests' memory.
pub(crate) struct Registrar {
    name: String,
    dma: Dma,
    calls: mpsc::Sender<Call>,
}

impl Registrar {
    /// Starts the thread that calls the kernel. It ends with the registrar.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn start(function: Arc<dyn Function>, dma: Dma) -> std::io::Result<Self> {
        let (calls, receiver) = mpsc::channel::<Call>();
        let name = function.name().to_owned();
        let run = move || {
            for call in receiver {
                match call {
                    Call::Map(memory, reply) => {
                        // The caller is gone if the block layer was dropped.
                        let _ = reply.send(function.map(&memory));
                    }
                    Call::Unmap(iova, len, reply) => match function.unmap(iova, len) {
                        Ok(()) | Err(PciError::NotMapped { .. } | PciError::Gone { .. }) => {
                            let _ = reply.send(());
                        }
                        Err(error) => {
                            tracing::error!(%error, iova, len, "a guest's memory stays mapped for a controller");
                            std::mem::forget(reply);
                        }
                    },
                }
            }
        };
        std::thread::Builder::new().name("aryk-nvme-dma".into()).spawn(run)?;
        Ok(Self { name, dma, calls })
    }
}

impl MemoryClient for Registrar {
    fn name(&self) -> &str {
        &self.name
    }

    fn register(&self, memory: DmaRange) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(async move {
            if self.dma == Dma::Auto && memory.page_size().unwrap_or(PAGE) == PAGE {
                return Err(
                    "the memory does not consist of huge pages, and `dma` is auto: it is not pinned".into()
                );
            }
            let (reply, answer) = oneshot::channel();
            self.calls.send(Call::Map(memory, reply)).map_err(|_| "the thread for it has ended")?;
            Ok(answer.await.map_err(|_| "the thread for it has ended")??)
        })
    }

    fn unregister(&self, memory: DmaRange, value: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            if self.calls.send(Call::Unmap(value, memory.len(), reply)).is_err() || answer.await.is_err() {
                // The thread has panicked: nobody knows whether the controller accesses the memory.
                std::future::pending::<()>().await;
            }
        })
    }
}
