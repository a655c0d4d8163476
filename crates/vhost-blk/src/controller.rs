//! vhost-user-blk controllers: each serves one disk. Control context.

use crate::config::{self, BlkConfig};
use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{Access, Descriptor, Event, Registry};
use aryk_vhost_device::{Controller, Controllers, Error, Kind, Options};
use aryk_virtqueue::Virtqueue;
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use tokio::sync::mpsc;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_ID_BYTES};
use zerocopy::IntoBytes;

/// The default number of queues.
pub const QUEUES: u16 = 128;

/// The device-specific part of a vhost-user-blk controller.
#[derive(Debug)]
pub struct Blk {
    read_only: bool,
    /// Device features. They are offered from the controller's creation on and never change.
    features: u64,
    queues: u16,
    /// `None` if the disk was removed.
    disk: RefCell<Option<Descriptor>>,
    config: RefCell<BlkConfig>,
}

/// Creates a controller of the disk with that name, and its socket.
///
/// # Errors
/// [`Error`].
pub fn create(
    controllers: &Controllers,
    registry: &Registry,
    options: Options,
    disk: &str,
    read_only: bool,
) -> Result<(), Error> {
    let (events, arriving) = mpsc::unbounded_channel();
    // The receiver is gone if the controller is being deleted; then the event is not needed.
    let send = move |event| {
        let _ = events.send(event);
    };
    let (access, owner) =
        (if read_only { Access::Read } else { Access::Shared }, format!("vhost controller {}", options.name));
    let queues = options.queues;
    let open = || Ok(Blk::new(registry.open(disk, access, &owner, send)?, read_only, queues));
    let controller = controllers.create(options, open)?;
    tokio::task::spawn_local(pass_on(arriving, Rc::downgrade(&controller)));
    Ok(())
}

/// Passes the disk's events to the controller until it is deleted.
async fn pass_on(mut arriving: mpsc::UnboundedReceiver<Event>, controller: Weak<Controller<Blk>>) {
    while let Some(event) = arriving.recv().await
        && let Some(controller) = controller.upgrade()
    {
        Blk::disk_event(&controller, event).await;
    }
}

impl Blk {
    pub(crate) fn new(disk: Descriptor, read_only: bool, queues: u16) -> Self {
        Self {
            read_only,
            features: config::features(disk.bdev(), read_only || !disk.is_writable()),
            queues,
            config: RefCell::new(BlkConfig::new(disk.bdev(), queues)),
            disk: RefCell::new(Some(disk)),
        }
    }

    /// Whether the guest may only read.
    pub const fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The name of the disk, if the controller has one.
    pub fn disk_name(&self) -> Option<String> {
        self.disk.borrow().as_ref().map(|d| d.bdev().name().to_owned())
    }

    /// Handles an event of the disk.
    pub(crate) async fn disk_event(controller: &Controller<Self>, event: Event) {
        let this = controller.kind();
        match event {
            // The guest has negotiated its features already: a disk that has become read-only fails the guest's writes.
            Event::Changed => {}
            Event::Resized { .. } => {
                if let Some(disk) = &*this.disk.borrow() {
                    *this.config.borrow_mut() = BlkConfig::new(disk.bdev(), this.queues);
                }
                if let Some(session) = controller.session() {
                    session.config_changed();
                }
            }
            Event::Removed => {
                let _still = controller.queues().hold_still().await;
                // A queue that has ended has closed its channel already.
                for (_, queue) in controller.queues().all() {
                    let _ = queue.call(Queue::lose_disk).await;
                }
                this.disk.borrow_mut().take();
            }
        }
    }
}

impl Kind for Blk {
    const NAME: &'static str = "blk";
    const FIXED_QUEUES: u16 = 0;
    type Queue = Queue;

    fn features(&self) -> u64 {
        self.features
    }

    fn config(&self) -> Vec<u8> {
        self.config.borrow().as_bytes().to_vec()
    }

    fn disks(&self) -> Option<Descriptor> {
        self.disk.borrow().clone()
    }

    fn open_disks(&self, _index: u16) -> Vec<Descriptor> {
        self.disk.borrow().iter().cloned().collect()
    }

    fn disk_names(&self) -> Vec<String> {
        self.disk_name().into_iter().collect()
    }

    fn role(&self, _index: u16, features: u64, _ring: &mut Virtqueue) -> Disk {
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        let name = self.disk_name().unwrap_or_default();
        let len = name.len().min(id.len());
        id[..len].copy_from_slice(&name.as_bytes()[..len]);
        Disk {
            block_size: self.disk.borrow().as_ref().map_or(512, |d| d.bdev().geometry().block_size),
            id,
            write_through: features & 1 << VIRTIO_BLK_F_FLUSH == 0,
        }
    }
}

#[cfg(test)]
mod tests;
