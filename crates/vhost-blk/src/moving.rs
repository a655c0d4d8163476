//! What a queue takes along to another reactor; see [`aryk_vhost_device::Movable`]. Reactor context.

use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{BdevChannel, Descriptor, OpenError};
use aryk_reactor::{Cx, Moving, RootId, RootRef};
use aryk_vhost_device::{Line, MakeParts, Movable, Move, Parts, Stranded};

/// A queue between two reactors.
pub struct Luggage {
    thread: Moving,
    parts: MakeParts,
    disk: Disk,
}

impl Movable for Queue {
    type Luggage = Luggage;
    type Disks = Option<Descriptor>;

    fn line(&mut self) -> &mut Line {
        &mut self.line
    }

    fn order(&mut self) -> &mut Option<Move<Self>> {
        &mut self.order
    }

    fn is_free(&self) -> bool {
        !self.is_losing_disk()
    }

    fn pack(self, cx: &mut Cx) -> Luggage {
        let (thread, parts) = self.line.pack(cx);
        Luggage { thread, parts, disk: self.requests.disk }
    }

    fn unpack(
        luggage: Luggage,
        disk: &Option<Descriptor>,
        cx: &mut Cx,
    ) -> Result<RootRef<Self>, Stranded<Luggage>> {
        let Luggage { thread, parts, disk: requests } = luggage;
        let name = thread.name().to_owned();
        let thread = cx.adopt_thread(thread);
        let parts = parts(thread);
        let landed = cx.add_root(thread, &name, |id, cx| match open(disk.as_ref(), id, cx) {
            Ok(channel) => Self::start(id, parts, requests, channel, cx).map_err(Stranded::Lost),
            Err(error) => Err(Stranded::Shut(Box::new((parts, requests)), error.to_string())),
        });
        landed.map_err(|stranded| match stranded {
            Stranded::Shut(taken, why) => {
                let (parts, disk) = *taken;
                let thread = cx.release_thread(thread);
                let parts: MakeParts = Box::new(move |thread| Parts { thread, ..parts });
                Stranded::Shut(Box::new(Luggage { thread, parts, disk }), why)
            }
            Stranded::Lost(error) => {
                cx.remove_thread(thread);
                Stranded::Lost(error)
            }
        })
    }
}

/// A channel of a queue's disk, if it has one.
///
/// # Errors
/// As [`Descriptor::open_channel`]; but a disk that is just being removed is one that is gone.
pub(crate) fn open(
    disk: Option<&Descriptor>,
    root: RootId,
    cx: &mut Cx,
) -> Result<Option<BdevChannel>, OpenError> {
    match disk.map(|disk| disk.open_channel(root, cx)) {
        None | Some(Err(OpenError::Removed)) => Ok(None),
        Some(channel) => channel.map(Some),
    }
}
