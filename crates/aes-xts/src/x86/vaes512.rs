//! The instructions for registers of 512 bits. Any context.

use super::kernel::kernel;
use super::{BATCH, POLYNOMIAL, ROUND_KEYS, RoundKeys, SIDE_BY_SIDE, Schedule, tail};
use crate::{BLOCK, Direction, Job};
use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_aesdec_epi128, _mm512_aesdeclast_epi128, _mm512_aesenc_epi128,
    _mm512_aesenclast_epi128, _mm512_broadcast_i64x2, _mm512_bslli_epi128, _mm512_bsrli_epi128,
    _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_set_epi64, _mm512_set1_epi64, _mm512_setzero_si512,
    _mm512_slli_epi64, _mm512_sllv_epi64, _mm512_srlv_epi64, _mm512_storeu_si512, _mm512_sub_epi64,
    _mm512_ternarylogic_epi64, _mm512_xor_si512,
};

type V = __m512i;
const LANES: usize = 4;

kernel!("aes,avx,pclmulqdq,avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq");

macro_rules! instruction {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$doc])*
        #[target_feature(enable = "aes,avx,pclmulqdq,avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq")]
        #[inline]
        fn $name($($argument: $type),*) -> V $body
    )*};
}

instruction! {
    fn zero() { _mm512_setzero_si512() }
    fn xor(a: V, b: V) { _mm512_xor_si512(a, b) }
    fn xor3(a: V, b: V, c: V) { _mm512_ternarylogic_epi64::<0x96>(a, b, c) }
    fn enc(x: V, key: V) { _mm512_aesenc_epi128(x, key) }
    fn enc_last(x: V, key: V) { _mm512_aesenclast_epi128(x, key) }
    fn dec(x: V, key: V) { _mm512_aesdec_epi128(x, key) }
    fn dec_last(x: V, key: V) { _mm512_aesdeclast_epi128(x, key) }
    fn polynomial() { _mm512_set1_epi64(POLYNOMIAL) }

    fn pack(numbers: [u128; LANES]) {
        let [a, b, c, d] = numbers;
        let high = |number: u128| (number >> 64) as i64;
        _mm512_set_epi64(high(d), d as i64, high(c), c as i64, high(b), b as i64, high(a), a as i64)
    }

    /// Multiplies each lane by α to the power of `powers`, below 8.
    fn spread(tweak: V, powers: V) {
        let left = _mm512_sllv_epi64(tweak, powers);
        let carried = _mm512_srlv_epi64(tweak, _mm512_sub_epi64(_mm512_set1_epi64(64), powers));
        let back = _mm512_clmulepi64_epi128::<0x01>(carried, polynomial());
        xor3(left, _mm512_bslli_epi128::<8>(carried), back)
    }

    /// Multiplies each lane by α⁸.
    fn times_alpha_8(tweak: V) {
        let back = _mm512_clmulepi64_epi128::<0>(_mm512_bsrli_epi128::<15>(tweak), polynomial());
        xor(_mm512_bslli_epi128::<1>(tweak), back)
    }

    /// Multiplies each lane by α¹⁶.
    fn times_alpha_16(tweak: V) {
        let back = _mm512_clmulepi64_epi128::<0>(_mm512_bsrli_epi128::<14>(tweak), polynomial());
        xor(_mm512_bslli_epi128::<2>(tweak), back)
    }

    /// Multiplies each lane by α³². Not by a carry-less multiplication, which would take turns with the rounds of AES.
    fn next_tweak(tweak: V) {
        let carried = _mm512_bsrli_epi128::<12>(tweak);
        let low = xor3(carried, _mm512_slli_epi64::<1>(carried), _mm512_slli_epi64::<2>(carried));
        xor3(low, _mm512_slli_epi64::<7>(carried), _mm512_bslli_epi128::<4>(tweak))
    }
}

#[target_feature(enable = "aes,avx,pclmulqdq,avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq")]
#[inline]
fn first_tweaks(tweak: V) -> [V; SIDE_BY_SIDE] {
    let a = spread(tweak, _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0));
    let b = spread(tweak, _mm512_set_epi64(7, 7, 6, 6, 5, 5, 4, 4));
    let (c, d) = (times_alpha_8(a), times_alpha_8(b));
    [a, b, c, d, times_alpha_16(a), times_alpha_16(b), times_alpha_16(c), times_alpha_16(d)]
}

/// # Safety
/// It points to a round key or a tweak.
#[target_feature(enable = "aes,avx,pclmulqdq,avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq")]
#[inline]
unsafe fn broadcast(block: *const [u32; 4]) -> V {
    // SAFETY: the caller's promise.
    _mm512_broadcast_i64x2(unsafe { _mm_loadu_si128(block.cast()) })
}

/// # Safety
/// The bytes of a register are readable there.
#[target_feature(enable = "aes,avx,pclmulqdq,avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq")]
#[inline]
unsafe fn load(src: *const u8) -> V {
    // SAFETY: the caller's promise.
    unsafe { _mm512_loadu_si512(src.cast()) }
}

/// # Safety
/// The bytes of a register are writable there.
#[target_feature(enable = "aes,avx,pclmulqdq,avx512f,avx512bw,avx512dq,avx512vl,vaes,vpclmulqdq")]
#[inline]
unsafe fn store(dst: *mut u8, x: V) {
    // SAFETY: the caller's promise.
    unsafe { _mm512_storeu_si512(dst.cast(), x) };
}
