//! The move of a queue to another reactor; see [`aryk_vhost_device::Movable`]. Reactor context.

use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{BdevChannel, Descriptor, OpenError};
use aryk_reactor::{Cx, Moving, RootId, RootRef};
use aryk_vhost_device::{Line, MakeParts, Movable, Move, Parts, StartFailure};

/// The state of a queue between two reactors.
pub struct Detached {
    thread: Moving,
    parts: MakeParts,
    disk: Disk,
}

impl Movable for Queue {
    type Detached = Detached;
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

    fn pack(self, cx: &mut Cx) -> Detached {
        let (thread, parts) = self.line.pack(cx);
        Detached { thread, parts, disk: self.requests.disk }
    }

    fn unpack(
        detached: Detached,
        disk: &Option<Descriptor>,
        cx: &mut Cx,
    ) -> Result<RootRef<Self>, StartFailure<Detached>> {
        let Detached { thread, parts, disk: requests } = detached;
        let name = thread.name().to_owned();
        let thread = cx.adopt_thread(thread);
        let parts = parts(thread);
        let landed = cx.add_root(thread, &name, |id, cx| match open(disk.as_ref(), id, cx) {
            Ok(channel) => Self::start(id, parts, requests, channel, cx).map_err(StartFailure::Lost),
            Err(error) => Err(StartFailure::Open(Box::new((parts, requests)), error.to_string())),
        });
        landed.map_err(|failure| match failure {
            StartFailure::Open(taken, why) => {
                let (parts, disk) = *taken;
                let thread = cx.release_thread(thread);
                let parts: MakeParts = Box::new(move |thread| Parts { thread, ..parts });
                StartFailure::Open(Box::new(Detached { thread, parts, disk }), why)
            }
            StartFailure::Lost(error) => {
                cx.remove_thread(thread);
                StartFailure::Lost(error)
            }
        })
    }
}

/// Opens a channel of a queue's disk, if it has one.
///
/// # Errors
/// As [`Descriptor::open_channel`]; but a disk that is being removed gives `None`.
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
