//! The trait at the heart of the data path. Reactor context.

use crate::{BaseEvent, Bdev, Completion, CreditPool, Io, Tag};
use aryk_reactor::Cx;
use std::sync::Arc;

/// One opener's way to a device, on one reactor.
pub trait Channel {
    /// Starts a request. It is never refused, for the caller holds a credit: [`crate::Limits::depth`] requests may be in
    /// flight. It completes exactly once, in a later [`Channel::poll`]; until then the owner of its data keeps the data in
    /// place. Its tag may be that of others in flight: the pieces of one request share theirs.
    fn submit(&mut self, io: Io, cx: &mut Cx);

    /// A hint that the submitter no longer needs the requests with this tag. They still complete, with
    /// [`crate::Status::Aborted`] or as they would have. A device that holds requests for as long as it likes must heed it.
    fn abort(&mut self, tag: Tag, cx: &mut Cx);

    /// Adds what has completed to `out`. Called after the channel's root was woken.
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>);

    /// Handles an event of a base of the disk. The device has got the event before ([`crate::Device::base_event`]). Called before
    /// a poll.
    fn base_event(&mut self, base: &Arc<Bdev>, event: BaseEvent, cx: &mut Cx) {
        let _ = (base, event, cx);
    }

    /// The credits that this channel shares with other channels of its reactor, if what carries out its requests, such as a queue
    /// pair or a connection, takes a limited number from all of them together. Each request needs one of them, besides one of the
    /// channel's own. Asked once, when the channel is opened.
    fn credits(&self) -> Option<CreditPool> {
        None
    }
}
