//! AES-XTS by the AES instructions of x86-64, in three widths. Any context.
//!
//! [`kernel`] has the algorithm once. Each width has a module with its instructions, in which the algorithm is expanded. A round
//! of AES takes three to five cycles, and a processor starts one or two each cycle. So eight registers are encrypted
//! side by side.
//!
//! **Tweaks.** The tweak of a block is that of the block before it, multiplied by α in GF(2¹²⁸): shifted by one bit, where a bit
//! that leaves at the top comes back as 0x87. A multiplication by α⁸, α¹⁶ or α³² is a shift by whole bytes, and a few
//! instructions bring back the bits that leave. So each register of tweaks gets its next value in four to seven instructions.

pub(crate) mod aes_ni;
mod kernel;
pub(crate) mod vaes256;
pub(crate) mod vaes512;

use aryk_secrets::SecretBox;
use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, _mm_aesdec_si128, _mm_aesdeclast_si128, _mm_aesenc_si128, _mm_aesenclast_si128,
    _mm_aesimc_si128, _mm_aeskeygenassist_si128, _mm_cvtsi128_si32, _mm_loadu_si128, _mm_set1_epi32,
    _mm_storeu_si128, _mm_xor_si128,
};

use crate::BLOCK;

/// The round keys of AES with 256 bits; AES with 128 bits has eleven.
const ROUND_KEYS: usize = 15;

/// Sectors whose tweaks are encrypted together.
const BATCH: usize = 16;

/// Registers that are encrypted side by side.
const SIDE_BY_SIDE: usize = 8;

/// What carries back into the low bits of a product in GF(2¹²⁸): x⁷ + x² + x + 1.
const POLYNOMIAL: i64 = 0x87;

type RoundKeys = [[u32; 4]; ROUND_KEYS];

/// The expanded keys.
#[repr(C, align(64))]
pub(crate) struct Schedule {
    encrypt: RoundKeys,
    decrypt: RoundKeys,
    tweak: RoundKeys,
    rounds: usize,
}

pub(crate) fn has_vaes512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("vaes")
        && is_x86_feature_detected!("vpclmulqdq")
        && has_aes_ni()
}

pub(crate) fn has_vaes256() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("vaes")
        && is_x86_feature_detected!("vpclmulqdq")
        && has_aes_ni()
}

pub(crate) fn has_aes_ni() -> bool {
    is_x86_feature_detected!("avx")
        && is_x86_feature_detected!("aes")
        && is_x86_feature_detected!("pclmulqdq")
}

impl Schedule {
    /// Expands keys of 16 or 32 bytes.
    ///
    /// # Safety
    /// The processor has AES-NI ([`has_aes_ni`]).
    pub(crate) unsafe fn new(data: &[u8], tweak: &[u8]) -> SecretBox<Self> {
        let empty = RoundKeys::default();
        // Each element is written in its place, so that no copy of a key stays on the stack.
        let mut schedule = SecretBox::new(Self { encrypt: empty, decrypt: empty, tweak: empty, rounds: 0 });
        let Self { encrypt, decrypt, tweak: of_tweak, rounds } = &mut *schedule;
        *rounds = data.len() / 4 + 6;
        // SAFETY: the caller's promise.
        unsafe {
            expand(data, *rounds, encrypt);
            expand(tweak, *rounds, of_tweak);
            invert(encrypt, *rounds, decrypt);
        }
        schedule
    }
}

#[cfg(test)]
impl Schedule {
    pub(crate) fn words(&self) -> Vec<u32> {
        [self.encrypt, self.decrypt, self.tweak].as_flattened().as_flattened().to_vec()
    }
}

/// The key expansion of FIPS 197, section 5.2.
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn expand(key: &[u8], rounds: usize, keys: &mut RoundKeys) {
    let of_key = key.len() / 4;
    let mut constant = 1_u32;
    for (i, bytes) in key.chunks_exact(4).enumerate() {
        keys[i / 4][i % 4] = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
    }
    for i in of_key..4 * (rounds + 1) {
        let mut word = keys[(i - 1) / 4][(i - 1) % 4];
        if i.is_multiple_of(of_key) {
            word = substitute(word).rotate_right(8) ^ constant;
            constant = (constant << 1) ^ ((constant >> 7) * 0x11b);
        } else if of_key == 8 && i % 8 == 4 {
            word = substitute(word);
        }
        keys[i / 4][i % 4] = keys[(i - of_key) / 4][(i - of_key) % 4] ^ word;
    }
}

/// Each byte by the substitution box of AES, in constant time.
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn substitute(word: u32) -> u32 {
    let words = _mm_aeskeygenassist_si128::<0>(_mm_set1_epi32(word.cast_signed()));
    _mm_cvtsi128_si32(words).cast_unsigned()
}

/// The round keys of the equivalent inverse cipher (FIPS 197, section 5.3.5).
#[target_feature(enable = "aes,avx,pclmulqdq")]
fn invert(encrypt: &RoundKeys, rounds: usize, decrypt: &mut RoundKeys) {
    for round in 0..=rounds {
        let from = encrypt[rounds - round].as_ptr().cast();
        // SAFETY: a round key has 16 bytes.
        let mut key = unsafe { _mm_loadu_si128(from) };
        if round > 0 && round < rounds {
            key = _mm_aesimc_si128(key);
        }
        // SAFETY: as above.
        unsafe { _mm_storeu_si128(decrypt[round].as_mut_ptr().cast(), key) };
    }
}

/// Encrypts or decrypts the last blocks of a sector, fewer than fill all registers.
///
/// # Safety
/// `blocks` blocks from `src` on are readable and from `dst` on writable, and `tweaks` has as many.
#[target_feature(enable = "aes,avx,pclmulqdq")]
#[cold]
#[inline(never)]
unsafe fn tail<const ROUNDS: usize, const ENCRYPT: bool>(
    keys: &RoundKeys,
    tweaks: *const __m128i,
    src: *const u8,
    dst: *mut u8,
    blocks: usize,
) {
    let mut k = [_mm_set1_epi32(0); ROUND_KEYS];
    for round in 0..=ROUNDS {
        // SAFETY: a round key has 16 bytes.
        k[round] = unsafe { _mm_loadu_si128(keys[round].as_ptr().cast()) };
    }
    for i in 0..blocks {
        // SAFETY: the caller's promise.
        let (tweak, block) =
            unsafe { (_mm_loadu_si128(tweaks.add(i)), _mm_loadu_si128(src.add(i * BLOCK).cast())) };
        let mut x = _mm_xor_si128(_mm_xor_si128(block, tweak), k[0]);
        for key in &k[1..ROUNDS] {
            x = if ENCRYPT { _mm_aesenc_si128(x, *key) } else { _mm_aesdec_si128(x, *key) };
        }
        let last = _mm_xor_si128(k[ROUNDS], tweak);
        x = if ENCRYPT { _mm_aesenclast_si128(x, last) } else { _mm_aesdeclast_si128(x, last) };
        // SAFETY: the caller's promise.
        unsafe { _mm_storeu_si128(dst.add(i * BLOCK).cast(), x) };
    }
}
