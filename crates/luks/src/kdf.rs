//! Key derivation from a passphrase or a key file, and its cost. Control context: it takes as long as its cost says.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use argon2::{Algorithm, Argon2, Block, Params};
use aryk_secrets::SecretSlice;

use crate::error::Error;
use crate::hash::Hash;
use crate::limits::Limits;

/// Least number of PBKDF2 iterations that is written; cryptsetup refuses less.
pub(crate) const ITERATIONS_MIN: NonZeroU32 = NonZeroU32::new(1000).expect("not zero");
/// Least number of passes of Argon2 that a measurement chooses, as cryptsetup does.
const PASSES_MIN: u32 = 4;
/// Least memory that a measurement chooses for Argon2, in KiB.
const MEMORY_MIN_KIB: u32 = 64 * 1024;
/// A measurement shorter than this is repeated with more work.
const MEASUREMENT_MIN: Duration = Duration::from_millis(50);

/// The longest key that a derivation makes: two keys of AES-256.
const KEY_LEN: usize = 64;

/// How a key slot derives its key from a secret, with the cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kdf {
    /// PBKDF2 with HMAC.
    Pbkdf2 {
        /// The hash of the HMAC.
        hash: Hash,
        /// Number of iterations.
        iterations: NonZeroU32,
    },
    /// Argon2, version 1.3. LUKS2 only.
    Argon2 {
        /// How memory is addressed.
        variant: Argon2Variant,
        /// Passes over the memory.
        passes: u32,
        /// Memory, in KiB.
        memory_kib: u32,
        /// Lanes, which could be computed in parallel; this crate computes them one after the other.
        lanes: u32,
    },
}

/// How Argon2 addresses its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argon2Variant {
    /// Independent of the secret.
    I,
    /// Independent of the secret in the first half of the first pass only.
    Id,
}

impl Kdf {
    /// PBKDF2 that takes about `target` on this host for a key of 64 bytes, or less if the slot could not be unlocked within the
    /// default [`Limits`]. Takes some tenths of a second to measure.
    pub fn pbkdf2_for(hash: Hash, target: Duration) -> Self {
        let mut iterations = ITERATIONS_MIN;
        let mut derived = [0; 64];
        let taken = loop {
            let taken = measure(|| hash.pbkdf2(iterations, &[0; 32], b"measurement", &mut derived[..]));
            if taken >= MEASUREMENT_MIN || iterations.get() > u32::MAX / 4 {
                break taken;
            }
            iterations = iterations.saturating_mul(FOUR);
        };
        let scaled = scale(u64::from(iterations.get()), target, taken);
        let per_iteration = hash.pbkdf2_steps(NonZeroU32::MIN, KEY_LEN);
        let iterations = u32::try_from(scaled.min(steps_max() / per_iteration)).unwrap_or(u32::MAX);
        Self::Pbkdf2 {
            hash,
            iterations: NonZeroU32::new(iterations).map_or(ITERATIONS_MIN, |n| n.max(ITERATIONS_MIN)),
        }
    }

    /// Argon2id that takes about `target` on this host, with as much memory as fits in that time, at most `memory_max_kib`; less
    /// if the slot could not be unlocked within the default [`Limits`].
    pub fn argon2id_for(target: Duration, memory_max_kib: u32) -> Result<Self, Error> {
        let variant = Argon2Variant::Id;
        let memory_kib = MEMORY_MIN_KIB.min(memory_max_kib);
        let trial = Self::Argon2 { variant, passes: 1, memory_kib, lanes: 1 };
        let mut result = Ok(());
        let mut derived = [0; 64];
        let taken = measure(|| result = trial.derive(b"measurement", &[0; 32], &mut derived[..]));
        result?;
        // Kibibytes that are filled in the target time, in all passes.
        let filled = scale(u64::from(memory_kib), target, taken).min(steps_max());
        let fits = u32::try_from(filled / u64::from(PASSES_MIN)).unwrap_or(u32::MAX);
        let memory_kib = fits.clamp(memory_kib, memory_max_kib);
        let passes = u32::try_from(filled / u64::from(memory_kib.max(1))).unwrap_or(u32::MAX).max(PASSES_MIN);
        Ok(Self::Argon2 { variant, passes, memory_kib, lanes: 1 })
    }

    /// Memory of a derivation, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        match *self {
            Self::Pbkdf2 { .. } => 0,
            Self::Argon2 { memory_kib, .. } => u64::from(memory_kib) << 10,
        }
    }

    /// Steps of a derivation of `len` bytes, as in [`crate::Limits::steps_max`].
    pub(crate) fn steps(&self, len: usize) -> u64 {
        match *self {
            Self::Pbkdf2 { hash, iterations } => hash.pbkdf2_steps(iterations, len),
            Self::Argon2 { passes, memory_kib, .. } => u64::from(passes) * u64::from(memory_kib),
        }
    }

    /// Fails if Argon2 is not defined for these parameters.
    pub(crate) fn check(&self, salt: &[u8]) -> Result<(), Error> {
        let Self::Argon2 { passes, memory_kib, lanes, .. } = *self else { return Ok(()) };
        let params = Params::new(memory_kib, passes, lanes, None);
        if params.is_err() || salt.len() < argon2::MIN_SALT_LEN {
            return Err(Error::invalid(format!(
                "Argon2 cannot have {passes} passes, {memory_kib} KiB, {lanes} lanes and a salt of {} bytes",
                salt.len()
            )));
        }
        Ok(())
    }

    /// Fills `derived` from `secret`.
    pub(crate) fn derive(&self, secret: &[u8], salt: &[u8], derived: &mut [u8]) -> Result<(), Error> {
        let (variant, passes, memory_kib, lanes) = match *self {
            Self::Pbkdf2 { hash, iterations } => {
                hash.pbkdf2(iterations, salt, secret, derived);
                return Ok(());
            }
            Self::Argon2 { variant, passes, memory_kib, lanes } => (variant, passes, memory_kib, lanes),
        };
        self.check(salt)?;
        let refused = |error: argon2::Error| Error::invalid(format!("Argon2: {error}"));
        let params = Params::new(memory_kib, passes, lanes, None).map_err(refused)?;
        // The last blocks are as secret as the key that they become.
        let memory = SecretSlice::filled(params.block_count(), Block::new());
        let mut memory = memory.ok_or_else(|| Error::NoMemory(self.memory()))?;
        let algorithm = match variant {
            Argon2Variant::I => Algorithm::Argon2i,
            Argon2Variant::Id => Algorithm::Argon2id,
        };
        let argon2 = Argon2::new(algorithm, argon2::Version::V0x13, params);
        argon2.hash_password_into_with_memory(secret, salt, derived, &mut memory[..]).map_err(refused)
    }
}

const FOUR: NonZeroU32 = NonZeroU32::new(4).expect("not zero");

/// Steps of a derivation that a measurement chooses, at most. The other half of the limit is for the digest of the volume
/// key, and for other slots that are tried first.
fn steps_max() -> u64 {
    Limits::default().steps_max / 2
}

/// `work` that took `taken`, scaled to `target`.
fn scale(work: u64, target: Duration, taken: Duration) -> u64 {
    let scaled = u128::from(work) * target.as_nanos() / taken.as_nanos().max(1);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[expect(
    clippy::disallowed_methods,
    reason = "measures the speed of the processor, on a thread that may block"
)]
fn measure(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_measurement_chooses_what_cannot_be_unlocked() {
        let year = Duration::from_secs(365 * 24 * 3600);
        let most = Limits::default().steps_max / 2;
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            let steps = Kdf::pbkdf2_for(hash, year).steps(KEY_LEN);
            assert!((most / 2..=most).contains(&steps), "{hash:?}: {steps} steps");
        }
        let steps = Kdf::argon2id_for(year, 64 << 10).unwrap().steps(KEY_LEN);
        assert!((most / 2..=most).contains(&steps), "{steps} steps");
    }
}
