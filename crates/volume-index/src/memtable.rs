//! Fresh entries in memory, sorted by key: a B-tree whose nodes are in two arrays.
//!
//! Context: any. Nodes are never freed one by one: a table is filled, read, and cleared as a whole, and then used again with its
//! memory. Leaf nodes are linked in the order of their keys.

use crate::key::{Commit, Entry, Key, Slot, Value};
use crate::lookup::{Query, Slots, Version};

/// Entries of a leaf node.
const ENTRIES: usize = 32;
/// Children of an inner node.
const CHILDREN: usize = 32;
/// More than a tree of `u32` nodes can have.
const HEIGHT_MAX: usize = 12;
/// No node.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Leaf {
    keys: [u128; ENTRIES],
    values: [Value; ENTRIES],
    len: usize,
    next: u32,
}

#[derive(Clone, Debug)]
struct Inner {
    /// For each child but the first: a key that is larger than all of earlier children and not larger than its own.
    keys: [u128; CHILDREN],
    children: [u32; CHILDREN],
    len: usize,
}

/// A sorted table in memory.
#[derive(Debug)]
pub struct Memtable {
    leaves: Vec<Leaf>,
    inners: Vec<Inner>,
    /// The root is an inner node if there are any.
    root: u32,
    /// Levels of inner nodes.
    height: usize,
    len: usize,
    range_entries: usize,
    oldest: Commit,
    newest: Commit,
}

impl Leaf {
    const EMPTY: Self = Self { keys: [0; ENTRIES], values: [Value::Zero; ENTRIES], len: 0, next: NONE };

    fn search(&self, key: u128) -> usize {
        self.keys[..self.len].partition_point(|other| *other < key)
    }

    fn insert(&mut self, place: usize, key: u128, value: Value) {
        self.keys.copy_within(place..self.len, place + 1);
        self.values.copy_within(place..self.len, place + 1);
        self.keys[place] = key;
        self.values[place] = value;
        self.len += 1;
    }
}

impl Inner {
    const EMPTY: Self = Self { keys: [0; CHILDREN], children: [NONE; CHILDREN], len: 0 };

    /// The index of the child that has `key`, if any child has it.
    fn search(&self, key: u128) -> usize {
        self.keys[1..self.len].partition_point(|separator| *separator <= key)
    }

    fn insert(&mut self, place: usize, key: u128, child: u32) {
        self.keys.copy_within(place..self.len, place + 1);
        self.children.copy_within(place..self.len, place + 1);
        self.keys[place] = key;
        self.children[place] = child;
        self.len += 1;
    }
}

/// How many entries stay in a full node that is split for a new one at `place`. Keys that arrive in ascending order leave full
/// nodes.
const fn split_at(place: usize, full: usize) -> usize {
    if place == full { full } else { full / 2 }
}

impl Memtable {
    /// An empty table with room for about this many entries, which it takes memory for at once. More entries allocate.
    pub fn with_capacity(entries: usize) -> Self {
        // Nodes of entries in random order are two thirds full.
        let leaves = (entries * 3 / 2).div_ceil(ENTRIES) + 1;
        let mut table = Self {
            leaves: Vec::with_capacity(leaves),
            inners: Vec::with_capacity(leaves.div_ceil(CHILDREN / 2) * 3 / 2 + 1),
            root: 0,
            height: 0,
            len: 0,
            range_entries: 0,
            oldest: Commit::MAX,
            newest: Commit::ZERO,
        };
        table.clear();
        table
    }

    /// Adds a version, or replaces the value of the same key.
    ///
    /// `kept` is the newest frozen view of the timeline (0 without one). If the version before this one of the same slot is newer
    /// than
    /// `kept`, so that only the live view saw it, it may be replaced.
    ///
    /// # Panics
    /// If the value does not suit the slot.
    pub fn insert(&mut self, key: Key, value: Value, kept: Commit) {
        assert!(value.suits(key.slot()), "a value of the slot's kind");
        let packed = key.packed();
        let mut path = [(0, 0); HEIGHT_MAX];
        let mut node = self.root;
        for step in &mut path[..self.height] {
            let inner = &self.inners[node as usize];
            let child = inner.search(packed);
            *step = (node, child);
            node = inner.children[child];
        }
        self.oldest = self.oldest.min(key.commit());
        self.newest = self.newest.max(key.commit());
        let leaf = &mut self.leaves[node as usize];
        let place = leaf.search(packed);
        if let Some(found) = leaf.keys[..leaf.len].get_mut(place) {
            let other = Key::from_checked(*found);
            let is_replaced = other.newest() == key.newest() && other.commit() > kept;
            if *found == packed || is_replaced {
                // Between the neighbours, the new key is at the same place.
                *found = packed;
                leaf.values[place] = value;
                return;
            }
        }
        self.len += 1;
        self.range_entries += usize::from(key.slot().is_range());
        if leaf.len < ENTRIES {
            leaf.insert(place, packed, value);
            return;
        }
        let (separator, added) = self.split_leaf(node, place, packed, value);
        self.insert_above(path, separator, added);
    }

    /// Splits a full leaf node and adds an entry. Returns the new node behind it, and its separator.
    fn split_leaf(&mut self, node: u32, place: usize, key: u128, value: Value) -> (u128, u32) {
        let added = self.leaves.len() as u32;
        let leaf = &mut self.leaves[node as usize];
        let kept = split_at(place, ENTRIES);
        let mut right = Leaf { next: leaf.next, len: ENTRIES - kept, ..Leaf::EMPTY };
        right.keys[..ENTRIES - kept].copy_from_slice(&leaf.keys[kept..]);
        right.values[..ENTRIES - kept].copy_from_slice(&leaf.values[kept..]);
        leaf.len = kept;
        leaf.next = added;
        if place < kept {
            leaf.insert(place, key, value);
        } else {
            right.insert(place - kept, key, value);
        }
        let separator = right.keys[0];
        self.leaves.push(right);
        (separator, added)
    }

    /// Adds a node to its parent, and splits parents that are full.
    fn insert_above(&mut self, path: [(u32, usize); HEIGHT_MAX], mut separator: u128, mut added: u32) {
        for (node, child) in path[..self.height].iter().rev() {
            let place = child + 1;
            let count = self.inners.len() as u32;
            let inner = &mut self.inners[*node as usize];
            if inner.len < CHILDREN {
                inner.insert(place, separator, added);
                return;
            }
            let kept = split_at(place, CHILDREN);
            let mut right = Inner { len: CHILDREN - kept, ..Inner::EMPTY };
            right.keys[..CHILDREN - kept].copy_from_slice(&inner.keys[kept..]);
            right.children[..CHILDREN - kept].copy_from_slice(&inner.children[kept..]);
            inner.len = kept;
            if place < kept {
                inner.insert(place, separator, added);
            } else {
                right.insert(place - kept, separator, added);
            }
            (separator, added) = (right.keys[0], count);
            self.inners.push(right);
        }
        let mut root = Inner { len: 2, ..Inner::EMPTY };
        root.children[..2].copy_from_slice(&[self.root, added]);
        root.keys[1] = separator;
        self.root = self.inners.len() as u32;
        self.inners.push(root);
        self.height += 1;
        assert!(self.height < HEIGHT_MAX, "fewer nodes than their numbers");
    }

    /// The leaf node and the index of the first entry that is not before `key`.
    pub(crate) fn seek(&self, key: Key) -> (u32, usize) {
        let key = key.packed();
        let mut node = self.root;
        for _ in 0..self.height {
            let inner = &self.inners[node as usize];
            node = inner.children[inner.search(key)];
        }
        (node, self.leaves[node as usize].search(key))
    }

    /// The entry at a position, or the first behind it; the position becomes the next one.
    pub(crate) fn step(&self, position: &mut (u32, usize)) -> Option<Entry> {
        let mut leaf = &self.leaves[position.0 as usize];
        while position.1 >= leaf.len {
            if leaf.next == NONE {
                return None;
            }
            *position = (leaf.next, 0);
            leaf = &self.leaves[leaf.next as usize];
        }
        let entry = Entry { key: Key::from_checked(leaf.keys[position.1]), value: leaf.values[position.1] };
        position.1 += 1;
        Some(entry)
    }

    /// Adds what the table knows to the answer of a query.
    pub(crate) fn lookup(&self, query: &Query, slots: &mut Slots) {
        let Query { timeline, range, first, view, .. } = *query;
        let last = query.last();
        if self.range_entries > 0 && !first.is_range() {
            let key = Key::new(timeline, range, Slot::RANGE, view);
            if let Some(entry) =
                self.step(&mut self.seek(key)).filter(|entry| entry.key.newest() == key.newest())
            {
                slots.offer(Slot::RANGE.get(), Version { commit: entry.key.commit(), value: entry.value });
            }
        }
        let key = Key::new(timeline, range, first, view);
        let (mut position, mut wanted) = (self.seek(key), first.get());
        while let Some(Entry { key, value }) = self.step(&mut position) {
            let slot = key.slot().get();
            if key.group() != query.group() || slot > last.get() {
                break;
            }
            if slot >= wanted && key.commit() <= view {
                slots.offer(slot, Version { commit: key.commit(), value });
                wanted = slot + 1;
                if wanted > last.get() {
                    break;
                }
            } else if slot >= wanted {
                // Newer than the view: go to the version that the view sees.
                position = self.seek(Key::new(timeline, range, key.slot(), view));
            } else if let Some(next) = Slot::new(wanted) {
                // Older than the version that the view sees: go to the next block.
                position = self.seek(Key::new(timeline, range, next, view));
            }
        }
    }

    /// The value of exactly this key.
    pub fn get(&self, key: Key) -> Option<Value> {
        self.iter_from(key).next().filter(|entry| entry.key == key).map(|entry| entry.value)
    }

    /// Entries in the table.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the table has no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of memory that the table has allocated.
    pub fn bytes(&self) -> usize {
        self.leaves.capacity() * size_of::<Leaf>() + self.inners.capacity() * size_of::<Inner>()
    }

    /// The smallest and the largest commit of the entries, or what would be neutral to a minimum and a maximum.
    pub(crate) fn commits(&self) -> (Commit, Commit) {
        (self.oldest, self.newest)
    }

    /// All entries, by key.
    pub fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        self.iter_from(Key::MIN)
    }

    /// The entries that are not before `key`, by key.
    pub fn iter_from(&self, key: Key) -> impl Iterator<Item = Entry> + '_ {
        let mut position = self.seek(key);
        std::iter::from_fn(move || self.step(&mut position))
    }

    /// Removes all entries and keeps the memory.
    pub fn clear(&mut self) {
        self.leaves.clear();
        self.leaves.push(Leaf::EMPTY);
        self.inners.clear();
        (self.root, self.height, self.len, self.range_entries) = (0, 0, 0, 0);
        (self.oldest, self.newest) = (Commit::MAX, Commit::ZERO);
    }
}

impl Default for Memtable {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}
