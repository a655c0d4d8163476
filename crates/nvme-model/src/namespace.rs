//! A namespace: its format, its data, and what a power failure would lose. Context: the holder of the controller.
//!
//! The data is one flat buffer with the newest content of each block. While the volatile write cache is enabled, the
//! first write of a block after a flush saves the block's durable content; [`Namespace::lose_cache`] restores a random
//! part of it.
//!
//! **Invariant.** A block without a saved content is durable. Blocks of one write within the atomic write unit (AWUPF)
//! are in one group, and a group is lost or kept as a whole.

use crate::config::{Data, FORMATS, LbaFormat, NamespaceConfig};
use std::collections::{BTreeSet, HashMap};

#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) config: NamespaceConfig,
    /// Time until which a format runs.
    pub(crate) formatting_until: u64,
    data: Vec<u8>,
    keeps: Data,
    /// Blocks that Write Uncorrectable, or a test, made unreadable.
    unreadable: BTreeSet<u64>,
    cache: Cache,
}

#[derive(Debug, Default)]
struct Cache {
    saved: HashMap<u64, Saved>,
    /// Union-find: the group that a group was merged into, or itself.
    groups: Vec<u32>,
}

#[derive(Debug)]
struct Saved {
    durable: Box<[u8]>,
    was_unreadable: bool,
    group: u32,
}

impl Cache {
    fn root(&self, mut group: u32) -> u32 {
        while self.groups[group as usize] != group {
            group = self.groups[group as usize];
        }
        group
    }
}

impl Namespace {
    pub(crate) fn new(config: NamespaceConfig, keeps: Data) -> Self {
        let mut namespace = Self {
            config,
            formatting_until: 0,
            data: Vec::new(),
            keeps,
            unreadable: BTreeSet::new(),
            cache: Cache::default(),
        };
        namespace.clear();
        namespace
    }

    pub(crate) fn format(&self) -> LbaFormat {
        FORMATS[usize::from(self.config.format)]
    }

    pub(crate) fn block_len(&self) -> u64 {
        u64::from(self.format().data)
    }

    /// Bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.config.blocks.saturating_mul(self.block_len())
    }

    /// Whether the model can move data of this format.
    pub(crate) fn is_served(&self) -> bool {
        self.format().metadata == 0 && self.config.csi == 0
    }

    /// Whether `blocks` blocks from `lba` on exist.
    pub(crate) const fn contains(&self, lba: u64, blocks: u64) -> bool {
        match lba.checked_add(blocks) {
            Some(end) => end <= self.config.blocks,
            None => false,
        }
    }

    pub(crate) fn keeps_data(&self) -> bool {
        self.keeps != Data::Null
    }

    /// Zeroes everything, durably: a new or formatted namespace. Also adapts the buffer to the size.
    pub(crate) fn clear(&mut self) {
        self.data = if self.keeps_data() { vec![0; self.bytes() as usize] } else { Vec::new() };
        self.unreadable.clear();
        self.cache = Cache::default();
    }

    /// Changes the size and keeps the blocks that remain.
    pub(crate) fn resize(&mut self, blocks: u64) {
        self.flush();
        self.config.blocks = blocks;
        if self.keeps_data() {
            self.data.resize(self.bytes() as usize, 0);
        }
        self.unreadable.retain(|&lba| lba < blocks);
    }

    /// The content of blocks that [`Namespace::contains`]; empty if no data is kept.
    pub(crate) fn read(&self, lba: u64, blocks: u64) -> &[u8] {
        if !self.keeps_data() {
            return &[];
        }
        let len = self.block_len();
        &self.data[(lba * len) as usize..((lba + blocks) * len) as usize]
    }

    /// The content of blocks that [`Namespace::contains`], to be overwritten; empty if no data is kept. With
    /// `is_durable`, a power failure cannot lose it.
    pub(crate) fn write(&mut self, lba: u64, blocks: u64, is_durable: bool, is_atomic: bool) -> &mut [u8] {
        if self.keeps == Data::Kept {
            if is_durable {
                self.forget_saved(lba, blocks);
            } else {
                self.save(lba, blocks, is_atomic);
            }
        }
        while let Some(lba) = self.first_unreadable(lba, blocks) {
            self.unreadable.remove(&lba);
        }
        if !self.keeps_data() {
            return &mut [];
        }
        let len = self.block_len();
        &mut self.data[(lba * len) as usize..((lba + blocks) * len) as usize]
    }

    fn forget_saved(&mut self, lba: u64, blocks: u64) {
        if !self.cache.saved.is_empty() {
            for lba in lba..lba + blocks {
                self.cache.saved.remove(&lba);
            }
        }
    }

    fn save(&mut self, lba: u64, blocks: u64, is_atomic: bool) {
        let len = self.block_len() as usize;
        let mut group = None;
        for lba in lba..lba + blocks {
            let old = self.cache.saved.get(&lba).map(|saved| self.cache.root(saved.group));
            let joined = match (old, group.filter(|_| is_atomic)) {
                (Some(old), Some(group)) => {
                    self.cache.groups[old as usize] = group;
                    group
                }
                (Some(group), None) | (None, Some(group)) => group,
                (None, None) => {
                    let new = self.cache.groups.len() as u32;
                    self.cache.groups.push(new);
                    new
                }
            };
            group = Some(joined);
            if old.is_none() {
                let at = lba as usize * len;
                let durable = self.data[at..at + len].into();
                let was_unreadable = self.unreadable.contains(&lba);
                self.cache.saved.insert(lba, Saved { durable, was_unreadable, group: joined });
            }
        }
    }

    pub(crate) fn mark_unreadable(&mut self, lba: u64, blocks: u64) {
        self.unreadable.extend(lba..lba + blocks);
    }

    /// The first unreadable block of a range.
    pub(crate) fn first_unreadable(&self, lba: u64, blocks: u64) -> Option<u64> {
        self.unreadable.range(lba..lba + blocks).next().copied()
    }

    /// Makes everything durable.
    pub(crate) fn flush(&mut self) {
        if !self.cache.groups.is_empty() {
            self.cache = Cache::default();
        }
    }

    /// Loses a random part of what was written and not flushed.
    pub(crate) fn lose_cache(&mut self, rng: &mut fastrand::Rng) {
        let cache = std::mem::take(&mut self.cache);
        let is_lost: Vec<bool> = cache.groups.iter().map(|_| rng.bool()).collect();
        let len = self.block_len() as usize;
        for (&lba, saved) in &cache.saved {
            if is_lost[cache.root(saved.group) as usize] {
                let at = lba as usize * len;
                self.data[at..at + len].copy_from_slice(&saved.durable);
                if saved.was_unreadable {
                    self.unreadable.insert(lba);
                } else {
                    self.unreadable.remove(&lba);
                }
            }
        }
    }
}
