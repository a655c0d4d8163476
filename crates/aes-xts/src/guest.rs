//! Sectors between a buffer and the memory of a guest, which the guest may change at any time. Any context.
//!
//! Each byte of the guest's memory is read or written once, and nothing is decrypted or encrypted in that memory: a guest never
//! sees ciphertext, and cannot have data of its own choice decrypted. A guest that changes its data during a write gets a mixture
//! of old and new data in these sectors.
//!
//! A sector that is one piece of memory goes through the processor's registers. If a piece ends within a sector, the whole
//! request is copied, and encrypted or decrypted in the buffer.

use crate::{Direction, Key, SectorSize, SizeError, Tweaks};
use aryk_dma::Sgl;

impl Key {
    /// Encrypts sectors from a guest's memory to `dst`.
    ///
    /// # Errors
    /// [`SizeError`]; then `dst` is unchanged.
    pub fn encrypt_from(
        &self,
        sector: SectorSize,
        tweaks: Tweaks,
        src: &Sgl,
        dst: &mut [u8],
    ) -> Result<(), SizeError> {
        check(sector, src.len() as usize, dst.len())?;
        if !has_whole_sectors(src, sector) {
            src.read(0, dst);
            return self.encrypt_in_place(sector, tweaks, dst);
        }
        let mut at = 0;
        for piece in src.pieces() {
            let to = dst[at..at + piece.len()].as_mut_ptr();
            let tweaks = tweaks.skip(at / sector.bytes());
            // SAFETY: by the invariant of `aryk_dma`, the piece is mapped until its request completes. `dst` has the piece's
            // length from `at` on, and is not a guest's memory, because it is borrowed mutably.
            unsafe { self.crypt(Direction::Encrypt, sector, tweaks, piece.base(), to, piece.len()) }?;
            at += piece.len();
        }
        Ok(())
    }

    /// Decrypts sectors from `src` to a guest's memory. `src` has no meaningful content afterwards.
    ///
    /// # Errors
    /// [`SizeError`]; then nothing is written.
    pub fn decrypt_to(
        &self,
        sector: SectorSize,
        tweaks: Tweaks,
        src: &mut [u8],
        dst: &Sgl,
    ) -> Result<(), SizeError> {
        check(sector, src.len(), dst.len() as usize)?;
        if !has_whole_sectors(dst, sector) {
            self.decrypt_in_place(sector, tweaks, src)?;
            dst.write(0, src);
            return Ok(());
        }
        let mut at = 0;
        for piece in dst.pieces() {
            let from = src[at..at + piece.len()].as_ptr();
            let tweaks = tweaks.skip(at / sector.bytes());
            // SAFETY: as in `encrypt_from`, in the other direction.
            unsafe { self.crypt(Direction::Decrypt, sector, tweaks, from, piece.base(), piece.len()) }?;
            at += piece.len();
        }
        Ok(())
    }
}

const fn check(sector: SectorSize, from: usize, to: usize) -> Result<(), SizeError> {
    if from != to {
        return Err(SizeError::Lengths { from, to });
    }
    match sector.count(from) {
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether no sector spans two pieces.
fn has_whole_sectors(list: &Sgl, sector: SectorSize) -> bool {
    list.pieces().all(|piece| piece.len().is_multiple_of(sector.bytes()))
}
