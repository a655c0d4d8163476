//! The queue's implementation of [`DeviceQueue`], by which the code shared by all devices starts, moves and stops it. Reactor
//! context.

use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{Descriptor, OpenError};
use aryk_reactor::{Cx, RootId};
use aryk_vhost_device::{DeviceQueue, GuestQueue, Move, Parts};

impl DeviceQueue for Queue {
    type Role = Disk;
    type Disks = Option<Descriptor>;
    type Left = ();

    fn new(id: RootId, parts: Parts, disk: Disk, cx: &mut Cx) -> std::io::Result<Self> {
        Self::start(id, parts, disk, None, cx)
    }

    fn open(&mut self, disk: &Option<Descriptor>, cx: &mut Cx) -> Result<(), OpenError> {
        self.requests.channel = match disk.as_ref().map(|disk| disk.open_channel(self.guest.id, cx)) {
            None | Some(Err(OpenError::Removed)) => None,
            Some(channel) => {
                let mut channel = channel?;
                channel.trace_front_end();
                Some(channel)
            }
        };
        Ok(())
    }

    fn close(&mut self) {
        drop(self.requests.channel.take());
    }

    fn guest(&mut self) -> &mut GuestQueue {
        &mut self.guest
    }

    fn order(&mut self) -> &mut Option<Move<Self>> {
        &mut self.order
    }

    fn into_parts(self) -> (GuestQueue, Disk) {
        (self.guest, self.requests.disk)
    }

    fn is_free(&self) -> bool {
        !self.is_losing_disk()
    }

    fn give_up(&mut self, cx: &mut Cx) {
        Self::give_up(self, cx);
    }

    fn leave_removed_memory(&mut self, cx: &mut Cx) -> bool {
        Self::leave_removed_memory(self, cx)
    }

    fn is_revocable(&self) -> bool {
        Self::is_revocable(self)
    }

    fn take_left(&mut self) {}
}
