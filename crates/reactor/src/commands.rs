//! Parts of roots that other code on the same reactor reaches: commands to a root, and the values of several roots by number.
//! Reactor context.

use crate::{Cx, RootId};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::rc::Rc;

/// Commands from other code on the reactor to a root, which carries them out at its next poll.
#[derive(Debug)]
pub struct Commands<C> {
    root: RootId,
    waiting: RefCell<VecDeque<C>>,
    has_some: Cell<bool>,
}

impl<C> Commands<C> {
    /// No commands to `root` yet.
    pub const fn new(root: RootId) -> Self {
        Self { root, waiting: RefCell::new(VecDeque::new()), has_some: Cell::new(false) }
    }

    /// The root.
    #[inline]
    pub const fn root(&self) -> RootId {
        self.root
    }

    /// Adds a command, and wakes the root. The root may be the one that runs now.
    pub fn add(&self, command: C, cx: &mut Cx) {
        self.waiting.borrow_mut().push_back(command);
        self.has_some.set(true);
        cx.wake_for_event(self.root);
    }

    /// Whether a command waits.
    #[inline]
    pub const fn has_some(&self) -> bool {
        self.has_some.get()
    }

    /// Takes the command that has waited longest.
    pub fn take(&self) -> Option<C> {
        let mut waiting = self.waiting.borrow_mut();
        let command = waiting.pop_front();
        self.has_some.set(!waiting.is_empty());
        command
    }

    /// Takes all commands.
    pub fn take_all(&self) -> VecDeque<C> {
        self.has_some.set(false);
        self.waiting.take()
    }
}

/// Values of a reactor by the number of the object that they belong to, such as the cells of a disk's channels. Each reactor has
/// its own: [`Cx::local_state`].
pub struct LocalGroups<T>(RefCell<HashMap<u64, Vec<Rc<T>>>>);

impl<T> Default for LocalGroups<T> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<T> fmt::Debug for LocalGroups<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.borrow().keys()).finish()
    }
}

impl<T> LocalGroups<T> {
    /// Adds a value of the object `number`.
    pub fn add(&self, number: u64, value: &Rc<T>) {
        self.0.borrow_mut().entry(number).or_default().push(Rc::clone(value));
    }

    /// Removes a value of the object `number`.
    ///
    /// # Panics
    /// If the object has no values.
    pub fn remove(&self, number: u64, value: &Rc<T>) {
        let mut all = self.0.borrow_mut();
        let group = all.get_mut(&number).expect("a value is there until it is removed");
        group.retain(|other| !Rc::ptr_eq(other, value));
        if group.is_empty() {
            all.remove(&number);
        }
    }

    /// The values of the object `number`.
    pub fn of(&self, number: u64) -> Vec<Rc<T>> {
        self.0.borrow().get(&number).cloned().unwrap_or_default()
    }

    /// Runs `f` for each value of the object `number`. `f` must not add or remove values.
    pub fn for_each(&self, number: u64, f: impl FnMut(&Rc<T>)) {
        self.0.borrow().get(&number).into_iter().flatten().for_each(f);
    }

    /// Runs `f` for each value of all objects. `f` must not add or remove values.
    pub fn for_all(&self, f: impl FnMut(&Rc<T>)) {
        self.0.borrow().values().flatten().for_each(f);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_gone_with_its_last_value() {
        let groups = LocalGroups::default();
        let (a, b, other) = (Rc::new('a'), Rc::new('b'), Rc::new('c'));
        groups.add(1, &a);
        groups.add(1, &b);
        groups.add(2, &other);
        assert_eq!(groups.of(1), [Rc::clone(&a), Rc::clone(&b)]);
        groups.remove(1, &a);
        assert_eq!(groups.of(1), [Rc::clone(&b)]);
        groups.remove(1, &b);
        let mut left = Vec::new();
        groups.for_all(|value| left.push(**value));
        assert_eq!((groups.of(1).len(), left), (0, vec!['c']));
        assert_eq!(groups.0.borrow().len(), 1, "an object without values has no entry");
    }
}
