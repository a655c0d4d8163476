//! Looks at everything there is, for all who want one. Control context, within one `LocalSet`.
//!
//! Who asks while others' look is being taken, or soon after it, gets that one: however many watch, the reactors are asked no more often.

use crate::{Controller, Inventory};
use aryk_bdev::{Summary, gather};
use aryk_reactor::{Clock, Nanos, ReactorStats};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Mutex;

/// Everything there was at one time.
#[derive(Debug)]
pub struct Look {
    /// When it was finished.
    pub at: Nanos,
    /// How long it took.
    pub took: Duration,
    /// The disks, by age.
    pub disks: Vec<Disk>,
    /// The controllers, by name.
    pub controllers: Vec<Controller>,
    /// The reactors, by core.
    pub reactors: Vec<Reactor>,
}

/// A disk.
#[derive(Debug)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// The module's word for what it is.
    pub product: &'static str,
    /// Bytes.
    pub size: u64,
    /// What it has counted.
    pub counts: Summary,
}

/// A reactor.
#[derive(Debug)]
pub struct Reactor {
    /// Its core.
    pub core: u16,
    /// Where its time went.
    pub stats: ReactorStats,
    /// Roots and pollers on it.
    pub members: u64,
}

/// Who looks.
#[derive(Debug, Default)]
pub struct Observatory {
    /// The last look. Locked while the next is taken.
    last: Mutex<Option<Rc<Look>>>,
}

impl Observatory {
    /// A look at what is in `inventory`, no older than `age`.
    pub async fn look(&self, inventory: &dyn Inventory, age: Duration) -> Rc<Look> {
        let mut last = self.last.lock().await;
        if let Some(look) = last.as_ref().filter(|look| Clock::Monotonic.now().since(look.at) <= age) {
            return Rc::clone(look);
        }
        let look = Rc::new(Look::take(inventory).await);
        *last = Some(Rc::clone(&look));
        look
    }
}

impl Look {
    async fn take(inventory: &dyn Inventory) -> Self {
        let start = Clock::Monotonic.now();
        let (bdevs, handles) = (inventory.disks(), inventory.reactors());
        let counts = gather(&bdevs, handles).await;
        let disks = bdevs.iter().zip(counts).map(|(bdev, counts)| {
            let geometry = bdev.geometry();
            Disk {
                name: bdev.name().to_owned(),
                product: bdev.device().product(),
                size: geometry.blocks * u64::from(geometry.block_size),
                counts,
            }
        });
        let reactors =
            handles.iter().map(|h| Reactor { core: h.core(), stats: h.stats(), members: h.members() });
        let (disks, reactors) = (disks.collect(), reactors.collect());
        let controllers = inventory.controllers();
        let at = Clock::Monotonic.now();
        Self { at, took: at.since(start), disks, controllers, reactors }
    }
}
