//! Fences of a channel: changes of some blocks are held off while an emulated compound request, of any channel, has them to
//! itself ([`crate::ranges`]), and changes and reads while a module has them to itself. Reactor context.
//!
//! Emulated compound requests that write pass all fences: the disk's table keeps them apart.

use super::request::{Place, Request};
use super::shape::Route;
use super::{BdevChannel, make_room};
use crate::ranges::{Extent, HeldOff};
use crate::{Blocks, Lba, Op};
use aryk_reactor::Cx;
use aryk_slots::Key;
use futures_channel::oneshot;
use std::collections::VecDeque;
use std::ops::Range;

struct Fence {
    id: u64,
    extent: Extent,
    held_off: HeldOff,
    /// Requests that it would hold off, that came before it and are in flight.
    before: Vec<Key>,
    /// Told when there are none of them left.
    quiet: Option<oneshot::Sender<()>>,
}

impl Fence {
    fn holds_off(&self, op: Op, blocks: &Range<Lba>) -> bool {
        is_held_off(self.held_off, op) && self.extent.touches(blocks)
    }
}

const fn is_held_off(held_off: HeldOff, op: Op) -> bool {
    op.is_change() || matches!(held_off, HeldOff::All)
}

#[derive(Default)]
pub(super) struct Fences {
    list: Vec<Fence>,
    /// Requests that are held off, in order; some may have ended.
    held: VecDeque<Key>,
}

impl Fences {
    /// Those that stand when a channel is opened.
    pub fn standing(fences: Vec<(u64, Extent, HeldOff)>) -> Self {
        let fence = |(id, extent, held_off)| Fence { id, extent, held_off, before: Vec::new(), quiet: None };
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

    /// Whether a new request, which does not have its blocks to itself, is to be held off.
    #[cold]
    pub fn hold_off(&self, op: Op, lba: Lba, blocks: Blocks) -> bool {
        self.list.iter().any(|f| f.holds_off(op, &(lba..lba + blocks)))
    }
}

impl BdevChannel {
    /// Adds a request to those that fences hold off.
    pub(super) fn add_held(&mut self, key: Key) {
        make_room(&mut self.fences.held, &self.requests);
        self.fences.held.push_back(key);
    }

    pub(super) fn put_up_fence(
        &mut self,
        id: u64,
        (extent, held_off): (Extent, HeldOff),
        quiet: oneshot::Sender<()>,
    ) {
        let shape = &self.shape;
        let is_before = |(_, r): &(Key, &Request)| {
            is_held_off(held_off, r.asked)
                && matches!(r.place, Place::Queued | Place::AtDevice)
                // The extent of an emulated compare is that of its chunk under way, and more of it may follow.
                && (r.is_emulated() && r.asked == Op::Compare
                    || !r.is_emulated() && extent.touches(&r.range(shape)))
        };
        let before = self.requests.iter().filter(is_before).map(|(key, _)| key).collect();
        self.fences.list.retain(|f| f.id != id);
        self.fences.list.push(Fence { id, extent, held_off, before, quiet: Some(quiet) });
    }

    /// Sends on what only this fence held off.
    pub(super) fn take_down_fence(&mut self, id: u64, cx: &mut Cx) {
        self.fences.list.retain(|f| f.id != id);
        for key in std::mem::take(&mut self.fences.held) {
            let Some(request) = self.requests.get(key) else { continue };
            assert!(request.place == Place::Held, "{:?} stands in the fences' list", request.place);
            let io = request.rest();
            if self.fences.hold_off(io.op, io.lba, io.blocks) {
                self.fences.held.push_back(key);
            } else if self.shape.route(&io) == Route::Emulated {
                self.requests.get_mut(key).expect("just found").set_place(Place::Compound);
                self.begin_compound(key, cx);
            } else {
                self.enqueue(key, cx);
            }
        }
    }

    /// Reports to the owners of fences that have no request before them any more.
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
