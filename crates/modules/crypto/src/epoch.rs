//! Which key encrypts which block of a disk. Any context; channels read it in reactor context.
//!
//! An *epoch* is a time during which a disk has the same keys: one key, or two while the disk is encrypted again
//! ([`crate::rekey`]). Then the blocks below a position have the next key, and those from there on the current one. The position
//! and the broken zone change only while no request for the blocks in question is under way (`Bdev::exclude`), so all channels
//! see the same key for a block during the whole of a request.
//!
//! A disk's epochs are a list: each has a link to its successor. A channel keeps the epoch that it has seen last, and pays one
//! load and one branch for a request while that epoch has one key and no successor. A successor is linked while both have the
//! same key for each block, so it does not matter when a channel sees it.

use crate::tweaks::Layout;
use aryk_aes_xts::Key;
use aryk_bdev::{Blocks, Lba};
use aryk_dma::Sgl;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A key, and the tweaks of the disk's sectors with it.
#[derive(Clone, Debug)]
pub(crate) struct Cipher {
    pub key: Arc<Key>,
    pub layout: Layout,
}

impl Cipher {
    /// Encrypts blocks from a request's memory.
    #[inline]
    pub fn encrypt(&self, lba: Lba, from: &Sgl, to: &mut [u8]) {
        let encrypted = self.key.encrypt_from(self.layout.sector, self.layout.tweaks(lba), from, to);
        encrypted.expect("the block layer has checked the length");
    }

    /// Decrypts blocks into a request's memory, and in `from`.
    #[inline]
    pub fn decrypt(&self, lba: Lba, from: &mut [u8], to: &Sgl) {
        let decrypted = self.key.decrypt_to(self.layout.sector, self.layout.tweaks(lba), from, to);
        decrypted.expect("the block layer has checked the length");
    }

    /// Encrypts blocks with `next` that this cipher has encrypted.
    pub fn encrypt_again(&self, next: &Self, lba: Lba, data: &mut [u8]) {
        let decrypted = self.key.decrypt_in_place(self.layout.sector, self.layout.tweaks(lba), data);
        decrypted.expect("the data is of whole blocks");
        let encrypted = next.key.encrypt_in_place(next.layout.sector, next.layout.tweaks(lba), data);
        encrypted.expect("the data is of whole blocks");
    }
}

/// The second key of an epoch.
#[derive(Debug)]
pub(crate) struct Next {
    pub cipher: Cipher,
    /// Blocks below it have this key.
    position: AtomicU64,
    /// The blocks from the position to this block are in an unknown state: partly written. 0 if there are none.
    broken_end: AtomicU64,
}

impl Next {
    pub fn position(&self) -> Lba {
        Lba(self.position.load(Ordering::Acquire))
    }

    /// Moves the position, and ends the broken zone. The caller excludes requests for the blocks between the two positions.
    pub fn advance(&self, position: Lba) {
        self.broken_end.store(0, Ordering::Release);
        self.position.store(position.0, Ordering::Release);
    }

    /// Makes requests fail for the blocks from the position to `end`. The caller excludes requests for them.
    pub fn break_zone(&self, end: Lba) {
        self.broken_end.store(end.0, Ordering::Release);
    }

    /// The blocks in an unknown state.
    pub fn broken(&self) -> Option<Range<Lba>> {
        let end = Lba(self.broken_end.load(Ordering::Acquire));
        (end > Lba::ZERO).then(|| self.position()..end)
    }
}

/// The keys of a disk, for a time.
#[derive(Debug)]
pub(crate) struct Epoch {
    /// The key of all blocks, or of those from the position of `next` on.
    pub cipher: Cipher,
    pub next: Option<Next>,
    /// There is one key, and no successor.
    is_settled: AtomicBool,
    successor: OnceLock<Arc<Self>>,
}

impl Epoch {
    /// An epoch of one key.
    pub fn settled(cipher: Cipher) -> Arc<Self> {
        Arc::new(Self { cipher, next: None, is_settled: AtomicBool::new(true), successor: OnceLock::new() })
    }

    /// An epoch of two keys, in which the blocks below `position` have the key of `next`.
    pub fn of_two(cipher: Cipher, next: Cipher, position: Lba) -> Arc<Self> {
        let next = Next { cipher: next, position: AtomicU64::new(position.0), broken_end: AtomicU64::new(0) };
        Arc::new(Self {
            cipher,
            next: Some(next),
            is_settled: AtomicBool::new(false),
            successor: OnceLock::new(),
        })
    }

    /// Whether one key encrypts all blocks, and no later epoch exists.
    #[inline]
    pub fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Acquire)
    }

    /// The epoch after this one.
    pub fn successor(&self) -> Option<&Arc<Self>> {
        self.successor.get()
    }

    /// Whether some of the blocks are in an unknown state.
    pub fn is_broken(&self, lba: Lba, blocks: Blocks) -> bool {
        let broken = self.next.as_ref().and_then(Next::broken);
        broken.is_some_and(|broken| lba < broken.end && broken.start < lba + blocks)
    }

    /// The blocks of a request of `len` bytes from `lba` on, cut at the position: the cipher of each part, and its bytes.
    fn parts(&self, lba: Lba, len: usize) -> [(&Cipher, usize); 2] {
        let Some(next) = &self.next else { return [(&self.cipher, len), (&self.cipher, 0)] };
        let block_size = self.cipher.layout.block_size as usize;
        let below = next.position().0.saturating_sub(lba.0).min((len / block_size) as u64);
        let bytes = below as usize * block_size;
        [(&next.cipher, bytes), (&self.cipher, len - bytes)]
    }

    /// Encrypts blocks from a request's memory, each with its key.
    #[cold]
    pub fn encrypt(&self, lba: Lba, from: &Sgl, to: &mut [u8]) {
        let mut done = 0;
        for (cipher, len) in self.parts(lba, to.len()) {
            if len > 0 {
                let at = self.cipher.layout.block_after(lba, done);
                cipher.encrypt(at, &from.slice(done as u32, len as u32), &mut to[done..done + len]);
            }
            done += len;
        }
    }

    /// Decrypts blocks into a request's memory, each with its key.
    #[cold]
    pub fn decrypt(&self, lba: Lba, from: &mut [u8], to: &Sgl) {
        let mut done = 0;
        for (cipher, len) in self.parts(lba, from.len()) {
            if len > 0 {
                let at = self.cipher.layout.block_after(lba, done);
                cipher.decrypt(at, &mut from[done..done + len], &to.slice(done as u32, len as u32));
            }
            done += len;
        }
    }
}

/// The epochs of a disk.
#[derive(Debug)]
pub(crate) struct Epochs(Mutex<Arc<Epoch>>);

impl Epochs {
    pub fn new(first: Arc<Epoch>) -> Self {
        Self(Mutex::new(first))
    }

    /// The last epoch.
    pub fn last(&self) -> Arc<Epoch> {
        Arc::clone(&self.0.lock().expect("no one panics holding it"))
    }

    /// Adds an epoch that has the same key as the last one for each block.
    pub fn follow(&self, next: Arc<Epoch>) {
        let mut last = self.0.lock().expect("no one panics holding it");
        last.successor.set(Arc::clone(&next)).expect("an epoch has one successor");
        // After the link: a channel that sees this finds the link.
        last.is_settled.store(false, Ordering::Release);
        *last = next;
    }
}

#[cfg(test)]
mod tests;
