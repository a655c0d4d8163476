//! How many connections hosts may have: in all, and from one address, so that a host leaves room for others. Control context.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::rc::Rc;

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

#[cfg(test)]
mod tests {
    use super::*;

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
