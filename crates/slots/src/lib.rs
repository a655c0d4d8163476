//! A fixed table whose keys carry a generation.
//!
//! One thread owns a table; it is never shared. A lookup with a key whose value was removed, or that the table never issued,
//! returns `None`: the caller decides whether that is a bug in this process (`expect`) or invalid input of a peer (an error).
//! The table allocates only when it is created and in [`Slots::grow`].
#![forbid(unsafe_code)]

/// Identifies one use of one slot: index in the low 32 bits, generation in the high 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key(u64);

impl Key {
    /// The key whose integer form is `raw`, as [`Key::raw`] returned it. Any value is allowed; a lookup with an invalid one
    /// returns `None`.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The key as one integer, for a command id or a `user_data` field.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// The slot's index, below the table's capacity for a key that the table issued.
    pub const fn index(self) -> u32 {
        self.0 as u32
    }

    const fn new(index: u32, generation: u32) -> Self {
        Self((generation as u64) << 32 | index as u64)
    }

    const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[derive(Debug)]
enum State<T> {
    Free { next: u32 },
    Used(T),
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    state: State<T>,
}

/// Marks the end of the free list.
const NONE: u32 = u32::MAX;

/// A table of up to `capacity` values, each found by the [`Key`] that [`Slots::insert`] returned.
#[derive(Debug)]
pub struct Slots<T> {
    slots: Box<[Slot<T>]>,
    free: u32,
    len: u32,
}

impl<T> Slots<T> {
    /// Creates an empty table.
    ///
    /// # Panics
    /// If `capacity` is 2³²−1 or more.
    pub fn new(capacity: u32) -> Self {
        let mut table = Self { slots: Box::default(), free: NONE, len: 0 };
        table.grow(capacity);
        table
    }

    /// Adds `more` slots. Existing keys stay valid.
    ///
    /// # Panics
    /// If the capacity would reach 2³²−1.
    pub fn grow(&mut self, more: u32) {
        let old = self.capacity();
        let new = old.checked_add(more).filter(|&n| n < NONE).expect("a slot's index is a u32");
        let free = self.free;
        let mut slots = std::mem::take(&mut self.slots).into_vec();
        slots.extend((old..new).map(|i| Slot {
            generation: 0,
            state: State::Free { next: if i + 1 < new { i + 1 } else { free } },
        }));
        self.slots = slots.into_boxed_slice();
        self.free = if more == 0 { free } else { old };
        self.check_invariants();
    }

    /// Checks, in debug builds, that each slot is either used or in the free list.
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let used = self.slots.iter().filter(|slot| matches!(slot.state, State::Used(_))).count();
        assert_eq!(used, self.len as usize, "the table counts its values");
        let next = |index: &u32| match self.slots[*index as usize].state {
            State::Free { next } => Some(next).filter(|&next| next != NONE),
            State::Used(_) => panic!("the free list names used slot {index}"),
        };
        let first = Some(self.free).filter(|&first| first != NONE);
        // One more than can be free, so that a list with a loop does not pass.
        let free = std::iter::successors(first, next).take(self.slots.len() + 1).count();
        assert_eq!(free, self.slots.len() - used, "every unused slot is in the free list once");
    }

    /// As [`Slots::check_invariants`], but only the checks without a loop.
    #[inline(always)]
    fn check_counts(&self) {
        debug_assert!(self.len <= self.capacity(), "{} values in {} slots", self.len, self.capacity());
        debug_assert!(
            (self.free == NONE) == (self.len == self.capacity()),
            "the free list is empty exactly if all slots are used: {} of {}",
            self.len,
            self.capacity()
        );
    }

    /// Number of slots.
    pub fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Number of values.
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether the table holds no value.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the table has no free slot, so that [`Slots::insert`] would fail.
    pub const fn is_full(&self) -> bool {
        self.free == NONE
    }

    /// Stores `value` and returns its key.
    ///
    /// # Errors
    /// The table is full; returns the value.
    pub fn insert(&mut self, value: T) -> Result<Key, T> {
        if self.is_full() { Err(value) } else { Ok(self.fill(value)) }
    }

    /// Stores `value` in the first free slot.
    // Always inlined, and never returns the value, so that its parts are stored directly in their final place.
    #[inline(always)]
    fn fill(&mut self, value: T) -> Key {
        let index = self.free;
        let slot = &mut self.slots[index as usize];
        let State::Free { next } = slot.state else { unreachable!("the free list names used slot {index}") };
        self.free = next;
        slot.state = State::Used(value);
        let key = Key::new(index, slot.generation);
        self.len += 1;
        self.check_counts();
        key
    }

    /// Stores `value`, in a table that grows twofold when it is full.
    ///
    /// # Panics
    /// As [`Slots::grow`].
    #[inline(always)]
    pub fn add(&mut self, value: T) -> Key {
        if self.is_full() {
            self.grow_twofold();
        }
        self.fill(value)
    }

    #[cold]
    #[inline(never)]
    fn grow_twofold(&mut self) {
        self.grow(self.capacity().max(1));
    }

    /// The value of `key`, if the table still holds it.
    pub fn get(&self, key: Key) -> Option<&T> {
        match self.slots.get(key.index() as usize) {
            Some(Slot { generation, state: State::Used(value) }) if *generation == key.generation() => {
                Some(value)
            }
            _ => None,
        }
    }

    /// The value of `key`, mutable, if the table still holds it.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        match self.slots.get_mut(key.index() as usize) {
            Some(Slot { generation, state: State::Used(value) }) if *generation == key.generation() => {
                Some(value)
            }
            _ => None,
        }
    }

    /// The slot of `key`, if the table still holds its value: to change the value and then remove it, with one lookup.
    #[inline]
    pub fn occupied(&mut self, key: Key) -> Option<Occupied<'_, T>> {
        self.check_counts();
        let Self { slots, free, len } = self;
        let slot = slots.get_mut(key.index() as usize)?;
        if slot.generation != key.generation() || matches!(slot.state, State::Free { .. }) {
            return None;
        }
        Some(Occupied { slot, index: key.index(), free, len })
    }

    /// Removes and returns the value of `key`; the key is invalid from then on.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        self.occupied(key).map(Occupied::remove)
    }

    /// The key and the value in slot `index`, if the slot is used.
    pub fn at_index(&self, index: u32) -> Option<(Key, &T)> {
        match self.slots.get(index as usize)? {
            Slot { generation, state: State::Used(value) } => Some((Key::new(index, *generation), value)),
            _ => None,
        }
    }

    /// All keys and their values, by index.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().zip(0..).filter_map(|(slot, i)| match &slot.state {
            State::Used(value) => Some((Key::new(i, slot.generation), value)),
            State::Free { .. } => None,
        })
    }

    /// All keys and their values, mutable, by index.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Key, &mut T)> {
        self.slots.iter_mut().zip(0..).filter_map(|(slot, i)| match &mut slot.state {
            State::Used(value) => Some((Key::new(i, slot.generation), value)),
            State::Free { .. } => None,
        })
    }
}

/// A used slot of a table: [`Slots::occupied`].
#[derive(Debug)]
pub struct Occupied<'a, T> {
    slot: &'a mut Slot<T>,
    index: u32,
    free: &'a mut u32,
    len: &'a mut u32,
}

impl<T> Occupied<'_, T> {
    /// The value.
    #[inline]
    pub fn value(&mut self) -> &mut T {
        match &mut self.slot.state {
            State::Used(value) => value,
            State::Free { .. } => unreachable!("`Slots::occupied` checked it"),
        }
    }

    /// Removes and returns the value; its key is invalid from then on.
    // Always inlined, so that only the parts that the caller needs are read.
    #[inline(always)]
    pub fn remove(self) -> T {
        let Self { slot, index, free, len } = self;
        let State::Used(value) = std::mem::replace(&mut slot.state, State::Free { next: *free }) else {
            unreachable!("`Slots::occupied` checked it")
        };
        slot.generation = slot.generation.wrapping_add(1);
        debug_assert!(*len > 0, "a used slot is counted");
        *free = index;
        *len -= 1;
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn a_freed_key_finds_nothing() {
        let mut t = Slots::new(1);
        let a = t.insert('a').unwrap();
        assert_eq!(t.insert('b'), Err('b'));
        assert_eq!(t.remove(a), Some('a'));
        let b = t.insert('b').unwrap();
        assert_eq!((a.index(), b.index()), (0, 0));
        assert_eq!(t.remove(a), None);
        assert_eq!((t.get(a), t.get(b)), (None, Some(&'b')));
        assert_eq!(t.get(Key::from_raw(b.raw())), Some(&'b'));
    }

    #[test]
    fn keys_never_issued_find_nothing() {
        let mut t = Slots::new(4);
        t.insert(1).unwrap();
        for raw in [1, 4, 1 << 32, u64::MAX, u64::from(u32::MAX)] {
            assert_eq!(t.get(Key::from_raw(raw)), None);
            assert_eq!(t.get_mut(Key::from_raw(raw)), None);
            assert_eq!(t.remove(Key::from_raw(raw)), None);
            assert!(t.occupied(Key::from_raw(raw)).is_none());
        }
        assert!(Slots::<()>::new(0).is_full());
    }

    #[test]
    fn growing_keeps_keys() {
        let mut t = Slots::new(1);
        let a = t.insert('a').unwrap();
        t.grow(2);
        let b = t.insert('b').unwrap();
        t.grow(0);
        assert_eq!((t.get(a), t.get(b), t.capacity(), t.len()), (Some(&'a'), Some(&'b'), 3, 2));
        t.insert('c').unwrap();
        assert!(t.is_full());
    }

    #[test]
    fn a_full_table_grows_for_one_more() {
        let mut t = Slots::new(0);
        let keys: Vec<_> = (0..5).map(|i| t.add(i)).collect();
        assert!(keys.iter().zip(0..).all(|(key, i)| t.get(*key) == Some(&i)));
        assert_eq!((t.len(), t.capacity()), (5, 8));
    }

    #[test]
    fn agrees_with_a_map() {
        let (mut t, mut model) = (Slots::new(8), HashMap::new());
        let mut dead = Vec::new();
        let mut random = fastrand::Rng::with_seed(1);
        for step in 0..10_000 {
            let victim = model.keys().nth(random.usize(..model.len().max(1))).copied();
            if random.bool() {
                match t.insert(step) {
                    Ok(key) => assert_eq!(model.insert(key, step), None),
                    Err(_) => assert_eq!(model.len(), 8),
                }
            } else if let Some(key) = victim {
                let mut occupied = t.occupied(key).unwrap();
                *occupied.value() += 1;
                assert_eq!(Some(occupied.remove()), model.remove(&key).map(|value| value + 1));
                dead.push(key);
            }
            assert_eq!(t.len() as usize, model.len());
            assert_eq!(t.iter().count(), model.len());
            assert!(model.iter().all(|(k, v)| t.get(*k) == Some(v)));
            assert!(dead.iter().rev().take(20).all(|k| t.get(*k).is_none()));
        }
    }
}
