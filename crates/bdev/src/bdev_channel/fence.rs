//! Fences of a channel: changes of some blocks are held off while an emulated compound request, of any channel, has them to
//! itself ([`crate::ranges`]). Reactor context.
//!
//! Emulated compound requests pass all fences: the disk's table keeps them apart.

use super::request::{Place, Request};
use super::{BdevChannel, make_room};
use crate::ranges::Extent;
use crate::{Blocks, Lba, Op};
use aryk_reactor::Cx;
use aryk_slots::Key;
use futures_channel::oneshot;
use std::collections::VecDeque;
use std::ops::Range;

struct Fence {
    id: u64,
    extent: Extent,
    /// Changes that came before it and are in flight.
    before: Vec<Key>,
    /// Told when there are none of them left.
    quiet: Option<oneshot::Sender<()>>,
}

#[derive(Default)]
pub(super) struct Fences {
    list: Vec<Fence>,
    /// Requests that are held off, in order; some may have ended.
    held: VecDeque<Key>,
}

impl Fences {
    /// Those that stand when a channel is opened.
    pub fn standing(fences: Vec<(u64, Extent)>) -> Self {
        let fence = |(id, extent)| Fence { id, extent, before: Vec::new(), quiet: None };
        Self { list: fences.into_iter().map(fence).collect(), held: VecDeque::new() }
    }

    /// Whether there are none: then nothing is held off.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many requests are held off.
    #[inline]
    pub fn held(&self) -> u32 {
        self.held.len() as u32
    }

    fn touch(&self, blocks: &Range<Lba>) -> bool {
        self.list.iter().any(|f| f.extent.touches(blocks))
    }

    /// Whether a new request, which is not emulated, is to be held off.
    #[cold]
    pub fn hold_off(&self, op: Op, lba: Lba, blocks: Blocks) -> bool {
        op.is_change() && self.touch(&(lba..lba + blocks))
    }
}

impl BdevChannel {
    /// Adds a request to those that fences hold off.
    pub(super) fn add_held(&mut self, key: Key) {
        make_room(&mut self.fences.held, &self.requests);
        self.fences.held.push_back(key);
    }

    pub(super) fn put_up_fence(&mut self, id: u64, extent: Extent, quiet: oneshot::Sender<()>) {
        let shape = &self.shape;
        let is_before = |(_, r): &(Key, &Request)| {
            r.asked.is_change()
                && matches!(r.place, Place::Queued | Place::AtDevice)
                && !r.is_emulated()
                && extent.touches(&r.range(shape))
        };
        let before = self.requests.iter().filter(is_before).map(|(key, _)| key).collect();
        self.fences.list.retain(|f| f.id != id);
        self.fences.list.push(Fence { id, extent, before, quiet: Some(quiet) });
    }

    /// Sends on what only this fence held off.
    pub(super) fn take_down_fence(&mut self, id: u64, cx: &mut Cx) {
        self.fences.list.retain(|f| f.id != id);
        for key in std::mem::take(&mut self.fences.held) {
            let Some(request) = self.requests.get(key) else { continue };
            assert!(request.place == Place::Held, "{:?} stands in the fences' list", request.place);
            if self.fences.touch(&request.range(&self.shape)) {
                self.fences.held.push_back(key);
            } else {
                self.enqueue(key, cx);
            }
        }
    }

    /// Reports to the owners of fences that have no change before them any more.
    #[cold]
    pub(super) fn report_quiet_fences(&mut self) {
        for fence in &mut self.fences.list {
            fence.before.retain(|&key| self.requests.get(key).is_some());
            if fence.before.is_empty()
                && let Some(quiet) = fence.quiet.take()
            {
                // The asker's task ends early only with its reactor.
                let _ = quiet.send(());
            }
        }
    }
}
