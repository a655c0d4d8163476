//! What a header may cost the host. Any context.

use crate::kdf::Kdf;

/// Bounds of the work that reading and unlocking a header may cause. A header chooses the cost of its key derivations, and a
/// hostile one could choose hours and all memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory of one key derivation, in bytes. cryptsetup chooses one gibibyte, or half of its host's memory if that is less.
    pub memory_max: u64,
    /// Steps of all key derivations of one call. A step is one HMAC of PBKDF2 or one kibibyte that Argon2 fills once; it takes
    /// about a microsecond.
    pub steps_max: u64,
    /// Length of the JSON text of a LUKS2 header, in bytes.
    pub json_len_max: u64,
    /// Number of values in that text.
    pub json_values_max: usize,
}

impl Default for Limits {
    /// Enough for the headers that cryptsetup and QEMU write: a few minutes at most.
    fn default() -> Self {
        Self { memory_max: 1 << 30, steps_max: 200_000_000, json_len_max: 4 << 20, json_values_max: 10_000 }
    }
}

/// What is left of the limits during one call.
#[derive(Debug)]
pub(crate) struct Budget {
    memory_max: u64,
    steps_left: u64,
}

impl Budget {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self { memory_max: limits.memory_max, steps_left: limits.steps_max }
    }

    /// Takes the cost of `kdf` and of `more_steps`, or nothing and returns `false` if they are beyond the limits.
    pub(crate) fn try_spend(&mut self, kdf: &Kdf, key_len: usize, more_steps: u64) -> bool {
        let steps = kdf.steps(key_len).saturating_add(more_steps);
        if kdf.memory() > self.memory_max || steps > self.steps_left {
            return false;
        }
        self.steps_left -= steps;
        true
    }
}
