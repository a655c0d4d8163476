//! The identities that a ClientHello offers (RFC 8446 §4.1.2, §4.2.11). Any context.

use crate::OFFERED_MAX;

/// The extension with pre-shared keys.
const PRE_SHARED_KEY: u16 = 41;
/// Bytes of the version and of the random value that a ClientHello begins with.
const FIXED_LEN: usize = 2 + 32;

/// What is left of a message.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Bytes behind their length, which has one byte.
    fn short(&mut self) -> Option<&'a [u8]> {
        let len = self.bytes(1)?[0];
        self.bytes(len.into())
    }

    /// Bytes behind their length, which has two bytes.
    fn long(&mut self) -> Option<&'a [u8]> {
        let len = self.u16()?;
        self.bytes(len.into())
    }
}

/// The first identities of a ClientHello without its header; none if it is malformed, which s2n-tls reports.
pub fn identities(hello: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut list = Rest(offered(hello).unwrap_or_default());
    std::iter::from_fn(move || {
        let identity = list.long()?;
        // The age of a ticket, which an external key has not.
        list.bytes(4)?;
        Some(identity)
    })
    .take(OFFERED_MAX)
}

/// The list of identities.
fn offered(hello: &[u8]) -> Option<&[u8]> {
    let mut rest = Rest(hello);
    rest.bytes(FIXED_LEN)?;
    let (_session, _suites, _compressions) = (rest.short()?, rest.long()?, rest.short()?);
    let mut extensions = Rest(rest.long()?);
    loop {
        let (kind, content) = (extensions.u16()?, extensions.long()?);
        if kind == PRE_SHARED_KEY {
            return Rest(content).long();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ClientHello with these identities.
    fn hello(names: &[&[u8]]) -> Vec<u8> {
        let identity = |name: &&[u8]| [&(name.len() as u16).to_be_bytes(), *name, &[0; 4]].concat();
        let list = names.iter().flat_map(identity).collect::<Vec<_>>();
        let content = [&(list.len() as u16).to_be_bytes(), &list[..], &[0, 0]].concat();
        let extension = [&41u16.to_be_bytes(), &(content.len() as u16).to_be_bytes()[..], &content].concat();
        let extensions = [&[0, 13, 0, 1, 7][..], &extension].concat();
        let len = (extensions.len() as u16).to_be_bytes();
        [&[3; FIXED_LEN][..], &[2, 9, 9], &[0, 2, 0x13, 1], &[1, 0], &len, &extensions].concat()
    }

    #[test]
    fn identities_are_found_behind_other_extensions() {
        let hello = hello(&[b"first", b"", b"third"]);
        let found: Vec<_> = identities(&hello).collect();
        assert_eq!(found, [&b"first"[..], b"", b"third"]);
    }

    #[test]
    fn no_more_identities_are_looked_at_than_allowed() {
        let names = [&b"name"[..]; 100];
        assert_eq!(identities(&hello(&names)).count(), OFFERED_MAX);
    }

    #[test]
    fn a_hello_that_ends_early_has_no_identities_beyond_its_end() {
        let whole = hello(&[b"first", b"second"]);
        for len in 0..whole.len() {
            assert_eq!(identities(&whole[..len]).count(), 0, "of {len} bytes");
        }
    }

    #[test]
    fn damaged_hellos_give_no_identity_that_is_not_in_them() {
        let mut rng = fastrand::Rng::with_seed(1);
        let whole = hello(&[b"first", b"second"]);
        for _ in 0..10_000 {
            let mut damaged = whole.clone();
            for _ in 0..3 {
                let at = rng.usize(..damaged.len());
                damaged[at] = rng.u8(..);
            }
            let bytes: usize = identities(&damaged).map(<[u8]>::len).sum();
            assert!(bytes <= damaged.len());
        }
    }
}
