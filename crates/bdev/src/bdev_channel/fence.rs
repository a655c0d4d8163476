//! Fences of a channel: changes of some blocks are held off while a compound request, of whichever channel, has them to itself
//! ([`crate::ranges`]). Reactor context.
//!
//! Compound requests pass all fences: they go by the table of the disk.

use super::{BdevChannel, Pending, make_room};
use crate::Op;
use crate::ranges::Extent;
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

    fn touch(&self, blocks: &Range<u64>) -> bool {
        self.list.iter().any(|f| f.extent.touches(blocks))
    }

    /// Whether a new request is to be held off.
    #[cold]
    pub fn hold_off(&self, op: Op, lba: u64, blocks: u64) -> bool {
        op.is_change() && !op.is_compound() && self.touch(&(lba..lba + blocks))
    }
}

impl Pending {
    /// The blocks that it is about, gone to the module or not.
    fn range(&self, block_size: u32) -> Range<u64> {
        let end = self.lba + self.blocks;
        end - self.bytes / u64::from(block_size)..end
    }
}

impl BdevChannel {
    /// A fence holds a request off.
    pub(super) fn add_held(&mut self, key: Key) {
        self.pending.get_mut(key).expect("it has just come").is_held = true;
        make_room(&mut self.fences.held, &self.pending, |key| *key);
        self.fences.held.push_back(key);
    }

    pub(super) fn put_up_fence(&mut self, id: u64, extent: Extent, quiet: oneshot::Sender<()>) {
        let block_size = self.block_size;
        let is_before = |(_, p): &(Key, &Pending)| {
            p.asked.is_change()
                && !p.is_limited
                && !p.is_held
                && !p.asked.is_compound()
                && extent.touches(&p.range(block_size))
        };
        let before = self.pending.iter().filter(is_before).map(|(key, _)| key).collect();
        self.fences.list.retain(|f| f.id != id);
        self.fences.list.push(Fence { id, extent, before, quiet: Some(quiet) });
    }

    /// Sends on what only this fence held off.
    pub(super) fn take_down_fence(&mut self, id: u64, cx: &mut Cx) {
        self.fences.list.retain(|f| f.id != id);
        for key in std::mem::take(&mut self.fences.held) {
            let Some(p) = self.pending.get_mut(key) else { continue };
            p.is_held = self.fences.touch(&p.range(self.block_size));
            if p.is_held {
                self.fences.held.push_back(key);
            } else {
                self.enqueue(key, cx);
            }
        }
    }

    /// Tells those whose fences have nothing before them any more.
    #[cold]
    pub(super) fn look_before_fences(&mut self) {
        for fence in &mut self.fences.list {
            fence.before.retain(|&key| self.pending.get(key).is_some());
            if fence.before.is_empty()
                && let Some(quiet) = fence.quiet.take()
            {
                // The asker's task ends early only with its reactor.
                let _ = quiet.send(());
            }
        }
    }
}
