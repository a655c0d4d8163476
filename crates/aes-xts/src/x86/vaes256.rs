//! The instructions for registers of 256 bits. Any context.

use super::kernel::kernel;
use super::{BATCH, POLYNOMIAL, ROUND_KEYS, RoundKeys, SIDE_BY_SIDE, Schedule, tail};
use crate::{BLOCK, Direction, Job};
use std::arch::asm;
use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_aesdec_epi128, _mm256_aesdeclast_epi128, _mm256_aesenc_epi128,
    _mm256_aesenclast_epi128, _mm256_broadcastsi128_si256, _mm256_bslli_epi128, _mm256_bsrli_epi128,
    _mm256_clmulepi64_epi128, _mm256_loadu_si256, _mm256_set_epi64x, _mm256_set1_epi64x,
    _mm256_setzero_si256, _mm256_sllv_epi64, _mm256_srlv_epi64, _mm256_storeu_si256, _mm256_sub_epi64,
    _mm256_xor_si256,
};

type V = __m256i;
const LANES: usize = 2;

kernel!("aes,avx,pclmulqdq,avx2,vaes,vpclmulqdq", ymm_reg);

macro_rules! instruction {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$doc])*
        #[target_feature(enable = "aes,avx,pclmulqdq,avx2,vaes,vpclmulqdq")]
        #[inline]
        fn $name($($argument: $type),*) -> V $body
    )*};
}

instruction! {
    fn zero() { _mm256_setzero_si256() }
    fn xor(a: V, b: V) { _mm256_xor_si256(a, b) }
    fn xor3(a: V, b: V, c: V) { xor(a, xor(b, c)) }
    fn enc(x: V, key: V) { _mm256_aesenc_epi128(x, key) }
    fn enc_last(x: V, key: V) { _mm256_aesenclast_epi128(x, key) }
    fn dec(x: V, key: V) { _mm256_aesdec_epi128(x, key) }
    fn dec_last(x: V, key: V) { _mm256_aesdeclast_epi128(x, key) }
    fn polynomial() { _mm256_set1_epi64x(POLYNOMIAL) }

    fn pack(numbers: [u128; LANES]) {
        let [a, b] = numbers;
        _mm256_set_epi64x((b >> 64) as i64, b as i64, (a >> 64) as i64, a as i64)
    }

    /// Multiplies each lane by α to the power of `powers`, below 8.
    fn spread(tweak: V, powers: V) {
        let left = _mm256_sllv_epi64(tweak, powers);
        let carried = _mm256_srlv_epi64(tweak, _mm256_sub_epi64(_mm256_set1_epi64x(64), powers));
        let back = _mm256_clmulepi64_epi128::<0x01>(carried, polynomial());
        xor3(left, _mm256_bslli_epi128::<8>(carried), back)
    }

    /// Multiplies each lane by α⁸.
    fn times_alpha_8(tweak: V) {
        let back = _mm256_clmulepi64_epi128::<0>(_mm256_bsrli_epi128::<15>(tweak), polynomial());
        xor(_mm256_bslli_epi128::<1>(tweak), back)
    }

    fn next_tweak(tweak: V) {
        let back = _mm256_clmulepi64_epi128::<0>(_mm256_bsrli_epi128::<14>(tweak), polynomial());
        xor(_mm256_bslli_epi128::<2>(tweak), back)
    }
}

#[target_feature(enable = "aes,avx,pclmulqdq,avx2,vaes,vpclmulqdq")]
#[inline]
fn first_tweaks(tweak: V) -> [V; SIDE_BY_SIDE] {
    let a = spread(tweak, _mm256_set_epi64x(1, 1, 0, 0));
    let b = spread(tweak, _mm256_set_epi64x(3, 3, 2, 2));
    let c = spread(tweak, _mm256_set_epi64x(5, 5, 4, 4));
    let d = spread(tweak, _mm256_set_epi64x(7, 7, 6, 6));
    [a, b, c, d, times_alpha_8(a), times_alpha_8(b), times_alpha_8(c), times_alpha_8(d)]
}

/// # Safety
/// It points to a round key or a tweak.
#[target_feature(enable = "aes,avx,pclmulqdq,avx2,vaes,vpclmulqdq")]
#[inline]
unsafe fn broadcast(block: *const [u32; 4]) -> V {
    // SAFETY: the caller's promise.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(block.cast()) })
}

/// # Safety
/// The bytes of a register are readable there.
#[target_feature(enable = "aes,avx,pclmulqdq,avx2,vaes,vpclmulqdq")]
#[inline]
unsafe fn load(src: *const u8) -> V {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(src.cast()) }
}

/// # Safety
/// The bytes of a register are writable there.
#[target_feature(enable = "aes,avx,pclmulqdq,avx2,vaes,vpclmulqdq")]
#[inline]
unsafe fn store(dst: *mut u8, x: V) {
    // SAFETY: the caller's promise.
    unsafe { _mm256_storeu_si256(dst.cast(), x) };
}
