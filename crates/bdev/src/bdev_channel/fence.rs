//! Fences of a channel: changes of some blocks are held off while a compound request, of whichever channel, has them to itself
//! ([`crate::ranges`]). Reactor context.
//!
//! Compound requests pass all fences: they go by the table of the disk.

use super::{BdevChannel, Pending};
use crate::Op;
use crate::ranges::Extent;
use aryk_reactor::Cx;
use aryk_slots::Key;
use futures_channel::oneshot;
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
    /// Requests that are held off, in order.
    held: Vec<Key>,
}

impl Fences {
    /// Those that stand when a channel is opened.
    pub fn standing(fences: Vec<(u64, Extent)>) -> Self {
        let fence = |(id, extent)| Fence { id, extent, before: Vec::new(), quiet: None };
        Self { list: fences.into_iter().map(fence).collect(), held: Vec::new() }
    }

    /// Whether there are none: then nothing is held off.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many requests are held off.
    #[inline]
    pub const fn held(&self) -> u32 {
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

    pub fn add_held(&mut self, key: Key) {
        self.held.push(key);
    }

    /// A request that was held off has ended.
    pub fn forget(&mut self, key: Key) {
        self.held.retain(|&k| k != key);
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
    pub(super) fn put_up_fence(&mut self, id: u64, extent: Extent, quiet: oneshot::Sender<()>) {
        let block_size = self.block_size;
        let is_before = |(key, p): &(Key, &Pending)| {
            p.asked.is_change()
                && !p.is_limited
                && !p.asked.is_compound()
                && extent.touches(&p.range(block_size))
                && !self.fences.held.contains(key)
        };
        let before = self.pending.iter().filter(is_before).map(|(key, _)| key).collect();
        self.fences.list.retain(|f| f.id != id);
        self.fences.list.push(Fence { id, extent, before, quiet: Some(quiet) });
    }

    /// Sends on what only this fence held off.
    pub(super) fn take_down_fence(&mut self, id: u64, cx: &mut Cx) {
        self.fences.list.retain(|f| f.id != id);
        for key in std::mem::take(&mut self.fences.held) {
            let p = self.pending.get(key).expect("one that ends is forgotten");
            if self.fences.touch(&p.range(self.block_size)) {
                self.fences.held.push(key);
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
