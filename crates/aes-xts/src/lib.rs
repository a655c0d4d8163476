//! AES-XTS (IEEE 1619) over sectors: in place, from a buffer to another, and between buffers and the memory of guests. Any
//! context.
//!
//! The processor's AES instructions do the work, as wide as the processor has them: [`Implementation`]. A processor without them
//! gets AWS-LC. Each call computes the tweaks of up to 16 sectors together, so sectors of 512 bytes cost little more than sectors
//! of 4 KiB.
//!
//! **Keys.** A key's schedules are in one part of the memory for secrets ([`SecretBox`]), which is locked and left out of
//! core dumps, and zeroed when the key is dropped. No text contains key material. Values in registers, and the few words of
//! the stack to which the compiler spills them while it encrypts, are not zeroed.
//!
//! **Unsafe code** is in `x86` (vector instructions, their loads and stores), in `portable` (calls of AWS-LC), and in the calls
//! of both here and in `guest`. All accesses are within `len` bytes from two pointers, and [`Key::crypt`] checks that `len` is a
//! multiple of the sector size. No index or branch depends on data or on a key.
#![deny(unsafe_op_in_unsafe_fn)]

mod guest;
mod portable;
mod x86;

use aryk_secrets::{SecretBox, with_wiped_stack};
use std::fmt;

/// Bytes in a block of AES.
const BLOCK: usize = 16;

/// Blocks of AES in a sector, at most: IEEE 1619 allows no more.
const SECTOR_BLOCKS_MAX: usize = 1 << 20;

/// Why bytes are not a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KeyError {
    /// A key has two halves of 16 or 32 bytes.
    #[error("an AES-XTS key has 32 or 64 bytes, not {0}")]
    Length(usize),
    /// The halves are equal, which weakens XTS.
    #[error("the two halves of an AES-XTS key must differ")]
    EqualHalves,
    /// This processor lacks instructions of the implementation.
    #[error("this processor cannot run {0}")]
    Unavailable(Implementation),
}

/// Why a size is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SizeError {
    /// A sector is a multiple of 16 bytes, and has at most 16 MiB.
    #[error("a sector of {0} bytes is not a multiple of 16 bytes, up to 16 MiB")]
    Sector(usize),
    /// The data is not a whole number of sectors.
    #[error("{bytes} bytes are not a multiple of the sector size of {sector} bytes")]
    Data {
        /// Length of the data.
        bytes: usize,
        /// Bytes in a sector.
        sector: usize,
    },
    /// Source and destination have different lengths.
    #[error("{from} bytes do not go into {to} bytes")]
    Lengths {
        /// Length of the source.
        from: usize,
        /// Length of the destination.
        to: usize,
    },
}

/// The size of a sector, the unit that has one tweak (a *data unit* in IEEE 1619): a multiple of 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SectorSize(usize);

impl SectorSize {
    /// Sectors of `bytes` bytes.
    ///
    /// # Errors
    /// [`SizeError::Sector`].
    pub const fn new(bytes: usize) -> Result<Self, SizeError> {
        if bytes == 0 || !bytes.is_multiple_of(BLOCK) || bytes / BLOCK > SECTOR_BLOCKS_MAX {
            return Err(SizeError::Sector(bytes));
        }
        Ok(Self(bytes))
    }

    /// Bytes in a sector.
    pub const fn bytes(self) -> usize {
        self.0
    }

    /// The sectors in `bytes` bytes.
    const fn count(self, bytes: usize) -> Result<usize, SizeError> {
        if !bytes.is_multiple_of(self.0) {
            return Err(SizeError::Data { bytes, sector: self.0 });
        }
        Ok(bytes / self.0)
    }
}

/// The tweaks of consecutive sectors: an arithmetic sequence of numbers of 128 bits, which wraps. Their bytes are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tweaks {
    /// The tweak of the first sector.
    pub start: u128,
    /// The difference between the tweaks of a sector and the next one.
    pub step: u128,
}

impl Tweaks {
    /// The tweaks from the sector on that is `sectors` sectors after the first.
    #[must_use]
    pub const fn skip(self, sectors: usize) -> Self {
        Self { start: self.start.wrapping_add(self.step.wrapping_mul(sectors as u128)), ..self }
    }
}

/// The code that encrypts and decrypts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Implementation {
    /// Four blocks of AES in each instruction: VAES on registers of 512 bits.
    Vaes512,
    /// Two blocks of AES in each instruction: VAES on registers of 256 bits.
    Vaes256,
    /// One block of AES in each instruction.
    AesNi,
    /// The library AWS-LC, block by block, on any processor.
    AwsLc,
}

impl Implementation {
    /// All implementations, from the fastest on.
    pub const ALL: [Self; 4] = [Self::Vaes512, Self::Vaes256, Self::AesNi, Self::AwsLc];

    /// The implementation's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vaes512 => "VAES-512",
            Self::Vaes256 => "VAES-256",
            Self::AesNi => "AES-NI",
            Self::AwsLc => "AWS-LC",
        }
    }

    /// Whether this processor can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Vaes512 => x86::has_vaes512(),
            Self::Vaes256 => x86::has_vaes256(),
            Self::AesNi => x86::has_aes_ni(),
            Self::AwsLc => true,
        }
    }

    /// The fastest implementation that this processor can run.
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|i| i.is_available()).unwrap_or(Self::AwsLc)
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a call does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// Sectors to encrypt or decrypt. `src` and `dst` are equal or do not overlap.
#[derive(Clone, Copy)]
struct Job {
    src: *const u8,
    dst: *mut u8,
    sectors: usize,
    /// Blocks of AES in a sector.
    blocks: usize,
    tweaks: Tweaks,
}

/// The expanded keys, in the form that the implementation needs.
enum Schedule {
    X86(SecretBox<x86::Schedule>),
    AwsLc(SecretBox<portable::Schedule>),
}

/// A key of AES-128-XTS or AES-256-XTS.
pub struct Key {
    implementation: Implementation,
    bits: u16,
    schedule: Schedule,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(AES-{}-XTS by {})", self.bits, self.implementation)
    }
}

impl Key {
    /// The key of these bytes: the key of the data, then the key of the tweaks, of 16 or 32 bytes each.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn new(bytes: &[u8]) -> Result<Self, KeyError> {
        Self::with(bytes, Implementation::best())
    }

    /// As [`Key::new`], for an implementation that the caller chooses.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn with(bytes: &[u8], implementation: Implementation) -> Result<Self, KeyError> {
        if !matches!(bytes.len(), 32 | 64) {
            return Err(KeyError::Length(bytes.len()));
        }
        let (data, tweak) = bytes.split_at(bytes.len() / 2);
        let difference = data.iter().zip(tweak).fold(0, |difference, (a, b)| difference | (a ^ b));
        if difference == 0 {
            return Err(KeyError::EqualHalves);
        }
        if !implementation.is_available() {
            return Err(KeyError::Unavailable(implementation));
        }
        let schedule = with_wiped_stack(|| match implementation {
            Implementation::AwsLc => Schedule::AwsLc(portable::Schedule::new(data, tweak)),
            // SAFETY: the processor has the instructions of the implementation, as checked above, so it has AES-NI.
            _ => Schedule::X86(unsafe { x86::Schedule::new(data, tweak) }),
        });
        Ok(Self { implementation, bits: data.len() as u16 * 8, schedule })
    }

    /// The code that uses the key.
    pub const fn implementation(&self) -> Implementation {
        self.implementation
    }

    /// Bits of the key of the data: 128 or 256.
    pub const fn bits(&self) -> u16 {
        self.bits
    }

    /// Encrypts sectors from `src` to `dst`.
    ///
    /// # Errors
    /// [`SizeError`]; then `dst` is unchanged.
    #[inline]
    pub fn encrypt(
        &self,
        sector: SectorSize,
        tweaks: Tweaks,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), SizeError> {
        self.copy(Direction::Encrypt, sector, tweaks, src, dst)
    }

    /// Decrypts sectors from `src` to `dst`.
    ///
    /// # Errors
    /// [`SizeError`]; then `dst` is unchanged.
    #[inline]
    pub fn decrypt(
        &self,
        sector: SectorSize,
        tweaks: Tweaks,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), SizeError> {
        self.copy(Direction::Decrypt, sector, tweaks, src, dst)
    }

    /// Encrypts sectors in place.
    ///
    /// # Errors
    /// [`SizeError`]; then `data` is unchanged.
    #[inline]
    pub fn encrypt_in_place(
        &self,
        sector: SectorSize,
        tweaks: Tweaks,
        data: &mut [u8],
    ) -> Result<(), SizeError> {
        self.in_place(Direction::Encrypt, sector, tweaks, data)
    }

    /// Decrypts sectors in place.
    ///
    /// # Errors
    /// [`SizeError`]; then `data` is unchanged.
    #[inline]
    pub fn decrypt_in_place(
        &self,
        sector: SectorSize,
        tweaks: Tweaks,
        data: &mut [u8],
    ) -> Result<(), SizeError> {
        self.in_place(Direction::Decrypt, sector, tweaks, data)
    }

    fn copy(
        &self,
        direction: Direction,
        sector: SectorSize,
        tweaks: Tweaks,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), SizeError> {
        if src.len() != dst.len() {
            return Err(SizeError::Lengths { from: src.len(), to: dst.len() });
        }
        // SAFETY: both have this length, and are apart because one is borrowed mutably.
        unsafe { self.crypt(direction, sector, tweaks, src.as_ptr(), dst.as_mut_ptr(), src.len()) }
    }

    fn in_place(
        &self,
        direction: Direction,
        sector: SectorSize,
        tweaks: Tweaks,
        data: &mut [u8],
    ) -> Result<(), SizeError> {
        let base = data.as_mut_ptr();
        // SAFETY: `data` has this length and is borrowed mutably; source and destination are equal.
        unsafe { self.crypt(direction, sector, tweaks, base, base, data.len()) }
    }

    /// Encrypts or decrypts `len` bytes from `src` to `dst`. Each byte of the source is read once, so other processes may change
    /// it at the same time: they get a mixture of old and new data.
    ///
    /// # Safety
    /// `len` bytes from `src` on are readable, and as many from `dst` on are writable. The two are equal or do not overlap.
    ///
    /// # Errors
    /// [`SizeError::Data`]; then nothing is written.
    #[inline]
    unsafe fn crypt(
        &self,
        direction: Direction,
        sector: SectorSize,
        tweaks: Tweaks,
        src: *const u8,
        dst: *mut u8,
        len: usize,
    ) -> Result<(), SizeError> {
        let job = Job { src, dst, sectors: sector.count(len)?, blocks: sector.0 / BLOCK, tweaks };
        match (&self.schedule, self.implementation) {
            // SAFETY: the caller's promise for the memory of the job.
            (Schedule::AwsLc(schedule), _) => unsafe { schedule.crypt(direction, &job) },
            // SAFETY: as above; the processor has the instructions, as [`Key::with`] has checked.
            (Schedule::X86(schedule), Implementation::Vaes512) => unsafe {
                x86::vaes512::run(schedule, direction, &job);
            },
            // SAFETY: as above.
            (Schedule::X86(schedule), Implementation::Vaes256) => unsafe {
                x86::vaes256::run(schedule, direction, &job);
            },
            // SAFETY: as above.
            (Schedule::X86(schedule), _) => unsafe { x86::aes_ni::run(schedule, direction, &job) },
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
