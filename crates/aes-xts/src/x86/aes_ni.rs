//! The instructions for registers of 128 bits. Any context.

use super::kernel::kernel;
use super::{BATCH, POLYNOMIAL, ROUND_KEYS, RoundKeys, SIDE_BY_SIDE, Schedule, tail};
use crate::{BLOCK, Direction, Job};
use std::arch::asm;
use std::arch::x86_64::{
    __m128i, _mm_aesdec_si128, _mm_aesdeclast_si128, _mm_aesenc_si128, _mm_aesenclast_si128, _mm_bslli_si128,
    _mm_bsrli_si128, _mm_clmulepi64_si128, _mm_loadu_si128, _mm_set_epi64x, _mm_set1_epi64x,
    _mm_setzero_si128, _mm_slli_epi64, _mm_srli_epi64, _mm_storeu_si128, _mm_xor_si128,
};

type V = __m128i;
const LANES: usize = 1;

kernel!("aes,avx,pclmulqdq", xmm_reg);

macro_rules! instruction {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$doc])*
        #[target_feature(enable = "aes,avx,pclmulqdq")]
        #[inline]
        fn $name($($argument: $type),*) -> V $body
    )*};
}

instruction! {
    fn zero() { _mm_setzero_si128() }
    fn xor(a: V, b: V) { _mm_xor_si128(a, b) }
    fn xor3(a: V, b: V, c: V) { xor(a, xor(b, c)) }
    fn enc(x: V, key: V) { _mm_aesenc_si128(x, key) }
    fn enc_last(x: V, key: V) { _mm_aesenclast_si128(x, key) }
    fn dec(x: V, key: V) { _mm_aesdec_si128(x, key) }
    fn dec_last(x: V, key: V) { _mm_aesdeclast_si128(x, key) }
    fn polynomial() { _mm_set1_epi64x(POLYNOMIAL) }
    fn pack(numbers: [u128; LANES]) { _mm_set_epi64x((numbers[0] >> 64) as i64, numbers[0] as i64) }

    /// Multiplies by α⁸.
    fn next_tweak(tweak: V) {
        let back = _mm_clmulepi64_si128::<0>(_mm_bsrli_si128::<15>(tweak), polynomial());
        xor(_mm_bslli_si128::<1>(tweak), back)
    }
}

/// Multiplies by α to the power of `POWER`, from 1 to 7.
#[target_feature(enable = "aes,avx,pclmulqdq")]
#[inline]
fn times_alpha<const POWER: i32, const REST: i32>(tweak: V) -> V {
    const { assert!(POWER + REST == 64, "a word has 64 bits") };
    let carried = _mm_srli_epi64::<REST>(tweak);
    let back = _mm_clmulepi64_si128::<0x01>(carried, polynomial());
    xor3(_mm_slli_epi64::<POWER>(tweak), _mm_bslli_si128::<8>(carried), back)
}

#[target_feature(enable = "aes,avx,pclmulqdq")]
#[inline]
fn first_tweaks(tweak: V) -> [V; SIDE_BY_SIDE] {
    [
        tweak,
        times_alpha::<1, 63>(tweak),
        times_alpha::<2, 62>(tweak),
        times_alpha::<3, 61>(tweak),
        times_alpha::<4, 60>(tweak),
        times_alpha::<5, 59>(tweak),
        times_alpha::<6, 58>(tweak),
        times_alpha::<7, 57>(tweak),
    ]
}

/// # Safety
/// It points to a round key or a tweak.
#[target_feature(enable = "aes,avx,pclmulqdq")]
#[inline]
unsafe fn broadcast(block: *const [u32; 4]) -> V {
    // SAFETY: the caller's promise.
    unsafe { _mm_loadu_si128(block.cast()) }
}

/// # Safety
/// The bytes of a register are readable there.
#[target_feature(enable = "aes,avx,pclmulqdq")]
#[inline]
unsafe fn load(src: *const u8) -> V {
    // SAFETY: the caller's promise.
    unsafe { _mm_loadu_si128(src.cast()) }
}

/// # Safety
/// The bytes of a register are writable there.
#[target_feature(enable = "aes,avx,pclmulqdq")]
#[inline]
unsafe fn store(dst: *mut u8, x: V) {
    // SAFETY: the caller's promise.
    unsafe { _mm_storeu_si128(dst.cast(), x) };
}
