//! How many connections hosts may have: in all, and from one address, so that a host leaves room for others. Control context.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::rc::{Rc, Weak};
use tokio::sync::Notify;

/// One address may have this part of all connections, or this number if that is more.
const OF_ONE_ADDRESS: u32 = 4;
const OF_ONE_ADDRESS_MIN: u32 = 256;

/// A number of connections.
#[derive(Debug, Default)]
pub(crate) struct Quota {
    used: Cell<u32>,
    addresses: RefCell<BTreeMap<IpAddr, u32>>,
}

impl Quota {
    /// Counts a connection from `address` until the returned value is dropped. `None`: there are as many as there may be, `max`
    /// of all addresses.
    pub fn take(self: &Rc<Self>, address: IpAddr, max: u32) -> Option<Counted> {
        let mut addresses = self.addresses.borrow_mut();
        let of_address = addresses.get(&address).copied().unwrap_or(0);
        let address_max = (max / OF_ONE_ADDRESS).max(OF_ONE_ADDRESS_MIN);
        if self.used.get() >= max || of_address >= address_max {
            return None;
        }
        self.used.set(self.used.get() + 1);
        addresses.insert(address, of_address + 1);
        Some(Counted { quota: Rc::clone(self), address })
    }
}

/// A connection that counts.
#[derive(Debug)]
pub(crate) struct Counted {
    quota: Rc<Quota>,
    address: IpAddr,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Self { quota, address } = self;
        quota.used.set(quota.used.get() - 1);
        let mut addresses = quota.addresses.borrow_mut();
        let left = addresses.get_mut(address).expect("it counts");
        *left -= 1;
        if *left == 0 {
            addresses.remove(address);
        }
    }
}

/// Bytes of the memory that RDMA connections have registered, at most.
const MEMORY_MAX: u64 = 1 << 30;

/// The memory of connections, which is of a fixed size from their beginning.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    used: Cell<u64>,
    addresses: RefCell<BTreeMap<IpAddr, u64>>,
}

impl Budget {
    /// Counts the memory of a connection from `address` until the returned value is dropped. `None`: there is too much, in all or
    /// from this address, which may have a part.
    pub fn take(self: &Rc<Self>, address: IpAddr, bytes: u64) -> Option<Held> {
        let mut addresses = self.addresses.borrow_mut();
        let of_address = addresses.get(&address).copied().unwrap_or(0) + bytes;
        let used = self.used.get() + bytes;
        if used > MEMORY_MAX || of_address > MEMORY_MAX / u64::from(OF_ONE_ADDRESS) {
            return None;
        }
        self.used.set(used);
        addresses.insert(address, of_address);
        Some(Held { budget: Rc::clone(self), address, bytes })
    }
}

/// Memory that counts.
#[derive(Debug)]
pub(crate) struct Held {
    budget: Rc<Budget>,
    address: IpAddr,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        let Self { budget, address, bytes } = self;
        budget.used.set(budget.used.get() - *bytes);
        let mut addresses = budget.addresses.borrow_mut();
        let left = addresses.get_mut(address).expect("it counts");
        *left -= *bytes;
        if *left == 0 {
            addresses.remove(address);
        }
    }
}

/// Connections that have not proved to be of use: a new one takes the place of the oldest of the address that has the most.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    used: Cell<u32>,
    addresses: RefCell<BTreeMap<IpAddr, VecDeque<Rc<Notify>>>>,
}

impl Waiting {
    /// Adds a connection from `address`, of at most `max`.
    pub fn add(self: &Rc<Self>, address: IpAddr, max: u32) -> Waits {
        let mut addresses = self.addresses.borrow_mut();
        if self.used.get() >= max
            && let Some(most) = addresses.values_mut().max_by_key(|of| of.len())
            && let Some(oldest) = most.pop_front()
        {
            // Its task ends soon.
            oldest.notify_one();
            self.used.set(self.used.get() - 1);
        }
        let replaced = Rc::<Notify>::default();
        addresses.entry(address).or_default().push_back(Rc::clone(&replaced));
        self.used.set(self.used.get() + 1);
        Waits { all: Rc::downgrade(self), address, replaced }
    }
}

/// The place of a connection among those that wait.
#[derive(Debug)]
pub(crate) struct Waits {
    all: Weak<Waiting>,
    address: IpAddr,
    replaced: Rc<Notify>,
}

impl Waits {
    /// Returns when another connection has taken the place.
    pub async fn until_replaced(&self) {
        self.replaced.notified().await;
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let Some(all) = self.all.upgrade() else { return };
        let mut addresses = all.addresses.borrow_mut();
        let Some(of_address) = addresses.get_mut(&self.address) else { return };
        if let Some(place) = of_address.iter().position(|other| Rc::ptr_eq(other, &self.replaced)) {
            of_address.remove(place);
            all.used.set(all.used.get() - 1);
        }
        if of_address.is_empty() {
            addresses.remove(&self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_connection_takes_the_place_of_the_oldest_of_the_address_with_most() {
        let waiting = Rc::<Waiting>::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let mut lazy: VecDeque<Waits> = (0..5).map(|_| waiting.add(address(1), 6)).collect();
        let other = waiting.add(address(2), 6);
        let counts = || -> Vec<usize> { waiting.addresses.borrow().values().map(VecDeque::len).collect() };
        let third = waiting.add(address(3), 6);
        assert_eq!((counts(), waiting.used.get()), (vec![4, 1, 1], 6));
        let is_replaced = |waits: &Waits| Rc::strong_count(&waits.replaced) == 1;
        assert!(is_replaced(&lazy[0]) && !is_replaced(&lazy[1]) && !is_replaced(&other));
        drop(lazy.pop_front());
        assert_eq!(waiting.used.get(), 6, "its place was taken");
        drop((lazy, other, third));
        assert!(waiting.used.get() == 0 && waiting.addresses.borrow().is_empty());
    }

    #[test]
    fn memory_of_connections_is_limited_in_all_and_for_each_address() {
        let budget = Rc::<Budget>::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let part = MEMORY_MAX / 8;
        let first: Vec<Held> = (0..3).filter_map(|_| budget.take(address(1), part)).collect();
        assert_eq!(first.len(), 2);
        let others: Vec<Held> = (2..6).filter_map(|last| budget.take(address(last), 2 * part)).collect();
        assert_eq!(others.len(), 3);
        drop(first);
        assert!(budget.take(address(1), part).is_some());
        drop(others);
        assert!(budget.used.get() == 0 && budget.addresses.borrow().is_empty());
    }

    #[test]
    fn an_address_leaves_room_for_others() {
        let quota = Rc::<Quota>::default();
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let take = |last, count: u32, max| -> Vec<Counted> {
            (0..count).filter_map(|_| quota.take(address(last), max)).collect()
        };
        let first = take(1, 1000, 2000);
        assert_eq!(first.len(), 500);
        let others = [2, 3, 4, 5].map(|last| take(last, 1000, 2000));
        assert_eq!(others.each_ref().map(Vec::len), [500, 500, 500, 0]);
        drop(first);
        assert_eq!(take(5, 600, 2000).len(), 500);
        drop(others);
        assert!(quota.used.get() == 0 && quota.addresses.borrow().is_empty());
        assert_eq!(take(1, 300, 300).len(), 256);
        assert_eq!(take(1, 300, 2).len(), 2);
    }
}
