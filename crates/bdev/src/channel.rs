//! The trait of a module's channels, by which requests reach a device. Reactor context.

use crate::{BaseEvent, Bdev, Completion, CreditPool, Io, Tag};
use aryk_reactor::Cx;
use std::sync::Arc;

/// One opener's access to a device, on one reactor.
pub trait Channel {
    /// Starts a request. The channel never refuses a request, since the caller holds a credit: [`crate::Limits::depth`]
    /// requests may be in flight. The request completes exactly once, in a later [`Channel::poll`]; until then the owner of its
    /// data keeps the data in place. Several requests in flight may have the same tag: the pieces of one request share its tag.
    fn submit(&mut self, io: &Io, cx: &mut Cx);

    /// A hint that the submitter no longer needs the requests with this tag. They still complete, with
    /// [`crate::Status::Aborted`] or as without the abort. A device that holds requests for an unbounded time must complete them.
    /// The removal of the disk repeats the abort of requests that have not completed.
    fn abort(&mut self, tag: Tag, cx: &mut Cx);

    /// Whether the memory of the requests with this tag, which were aborted, may be replaced by other memory at the same
    /// addresses ([`aryk_dma::Mapping::revoke`]) before they complete: the device, or the library that has them, accesses it by
    /// its addresses in this process only, and takes no more data from it.
    fn is_revocable(&self, tag: Tag) -> bool {
        let _ = tag;
        false
    }

    /// Adds the completions to `out`. Called after the channel's root was woken.
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>);

    /// Handles an event of a base of the disk. The device has handled the event before ([`crate::Device::base_event`]). Called
    /// before a poll.
    fn base_event(&mut self, base: &Arc<Bdev>, event: BaseEvent, cx: &mut Cx) {
        let _ = (base, event, cx);
    }

    /// The credits that this channel shares with other channels of its reactor, if they use one queue pair or connection with a
    /// limited number of requests. Each request needs one of these credits, in addition to one of the channel's own. Called once,
    /// when the channel is opened.
    fn credits(&self) -> Option<CreditPool> {
        None
    }
}
