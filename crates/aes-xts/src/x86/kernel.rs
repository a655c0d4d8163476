//! The algorithm for registers of any width. Any context.

/// Defines `run` and its parts in a module with the type `V` of a register, its number `LANES` of blocks, and these functions:
/// `load`, `store`, `broadcast` (a block to all lanes), `zero`, `xor`, `xor3`, `enc`, `enc_last`, `dec`, `dec_last`, `pack` (one
/// number for each lane), `first_tweaks` (of the blocks of eight registers, from the tweak of the first block), `next_tweak` (of
/// the block eight registers further on).
///
/// With 16 registers, the compiler would encrypt one block after the other to save registers. The class of the registers makes it
/// encrypt eight side by side; with 32 registers it does so by itself.
macro_rules! kernel {
    ($features:literal $(, $class:ident)?) => {
        /// Encrypts or decrypts the sectors of a job.
        ///
        /// # Safety
        /// The processor has the module's instructions. The job's bytes are readable from its `src` on and writable from its
        /// `dst` on.
        #[inline]
        pub(crate) unsafe fn run(schedule: &Schedule, direction: Direction, job: &Job) {
            match (schedule.rounds, direction) {
                // SAFETY: the caller's promise.
                (10, Direction::Encrypt) => unsafe { sectors::<10, true>(schedule, job) },
                // SAFETY: the caller's promise.
                (10, Direction::Decrypt) => unsafe { sectors::<10, false>(schedule, job) },
                // SAFETY: the caller's promise.
                (_, Direction::Encrypt) => unsafe { sectors::<14, true>(schedule, job) },
                // SAFETY: the caller's promise.
                (_, Direction::Decrypt) => unsafe { sectors::<14, false>(schedule, job) },
            }
        }

        /// # Safety
        /// As of [`run`].
        #[target_feature(enable = $features)]
        unsafe fn sectors<const ROUNDS: usize, const ENCRYPT: bool>(schedule: &Schedule, job: &Job) {
            let keys = if ENCRYPT { &schedule.encrypt } else { &schedule.decrypt };
            if job.sectors == 1 {
                let tweak = encrypt_tweak::<ROUNDS>(&schedule.tweak, pack([job.tweaks.start; LANES]));
                let k = round_keys::<ROUNDS>(keys);
                // SAFETY: the job's promise.
                unsafe { sector::<ROUNDS, ENCRYPT>(&k, keys, tweak, job.src, job.dst, job.blocks) };
                return;
            }
            let mut tweaks = [zero(); BATCH / LANES];
            let bytes = job.blocks * BLOCK;
            let (mut src, mut dst) = (job.src, job.dst);
            let (mut next, mut left) = (job.tweaks.start, job.sectors);
            while left > 0 {
                let batch = left.min(BATCH);
                for tweaks in &mut tweaks[..batch.div_ceil(LANES)] {
                    let mut numbers = [0; LANES];
                    for number in &mut numbers {
                        *number = next;
                        next = next.wrapping_add(job.tweaks.step);
                    }
                    *tweaks = encrypt_tweak::<ROUNDS>(&schedule.tweak, pack(numbers));
                }
                let k = round_keys::<ROUNDS>(keys);
                for i in 0..batch {
                    // SAFETY: the sector's tweak is in `tweaks`, and the job's promise covers the sector.
                    unsafe {
                        let tweak = broadcast(tweaks.as_ptr().cast::<[u32; 4]>().add(i));
                        sector::<ROUNDS, ENCRYPT>(&k, keys, tweak, src, dst, job.blocks);
                    }
                    src = src.wrapping_add(bytes);
                    dst = dst.wrapping_add(bytes);
                }
                left -= batch;
            }
        }

        #[target_feature(enable = $features)]
        #[inline]
        fn round_keys<const ROUNDS: usize>(keys: &RoundKeys) -> [V; ROUND_KEYS] {
            let mut k = [zero(); ROUND_KEYS];
            // The compiler unrolls a loop with constant bounds only, and must, for the keys to be in registers.
            for round in 0..ROUND_KEYS {
                if round <= ROUNDS {
                    // SAFETY: it is a round key.
                    k[round] = unsafe { broadcast(&raw const keys[round]) };
                }
            }
            k
        }

        /// Encrypts the tweaks of as many sectors as there are lanes.
        #[target_feature(enable = $features)]
        #[inline]
        fn encrypt_tweak<const ROUNDS: usize>(keys: &RoundKeys, numbers: V) -> V {
            let k = round_keys::<ROUNDS>(keys);
            let mut x = xor(numbers, k[0]);
            for key in &k[1..ROUNDS] {
                x = enc(x, *key);
            }
            enc_last(x, k[ROUNDS])
        }

        /// Encrypts or decrypts a sector of `blocks` blocks, of which the first has `tweak` in all lanes.
        ///
        /// # Safety
        /// The blocks are readable from `src` on and writable from `dst` on.
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn sector<const ROUNDS: usize, const ENCRYPT: bool>(
            k: &[V; ROUND_KEYS],
            keys: &RoundKeys,
            tweak: V,
            mut src: *const u8,
            mut dst: *mut u8,
            blocks: usize,
        ) {
            const WHOLE: usize = SIDE_BY_SIDE * LANES;
            let mut tweaks = first_tweaks(tweak);
            let mut left = blocks;
            while left >= WHOLE {
                // SAFETY: at least so many blocks are left.
                unsafe { group::<ROUNDS, ENCRYPT>(k, &tweaks, src, dst) };
                src = src.wrapping_add(WHOLE * BLOCK);
                dst = dst.wrapping_add(WHOLE * BLOCK);
                left -= WHOLE;
                if left == 0 {
                    return;
                }
                for tweak in &mut tweaks {
                    *tweak = next_tweak(*tweak);
                }
            }
            // A copy: the address of `tweaks` itself would keep it in memory.
            let of_tail = tweaks;
            // SAFETY: so many blocks are left, fewer than `of_tail` has lanes.
            unsafe { tail::<ROUNDS, ENCRYPT>(keys, of_tail.as_ptr().cast(), src, dst, left) };
        }

        /// Encrypts or decrypts the blocks of eight registers.
        ///
        /// # Safety
        /// As of [`sector`].
        #[target_feature(enable = $features)]
        #[inline]
        unsafe fn group<const ROUNDS: usize, const ENCRYPT: bool>(
            k: &[V; ROUND_KEYS],
            tweaks: &[V; SIDE_BY_SIDE],
            src: *const u8,
            dst: *mut u8,
        ) {
            const WIDTH: usize = LANES * BLOCK;
            let mut x = [zero(); SIDE_BY_SIDE];
            for i in 0..SIDE_BY_SIDE {
                // SAFETY: the caller's promise.
                x[i] = xor3(unsafe { load(src.add(i * WIDTH)) }, tweaks[i], k[0]);
            }
            for key in &k[1..ROUNDS] {
                for x in &mut x {
                    *x = if ENCRYPT { enc(*x, *key) } else { dec(*x, *key) };
                }
                $(
                    let [a, b, c, d, e, f, g, h] = &mut x;
                    // SAFETY: no instruction, which changes nothing. The compiler must have all eight values in registers here.
                    unsafe {
                        asm!("/* {} {} {} {} {} {} {} {} */",
                            inlateout($class) *a, inlateout($class) *b, inlateout($class) *c, inlateout($class) *d,
                            inlateout($class) *e, inlateout($class) *f, inlateout($class) *g, inlateout($class) *h,
                            options(pure, nomem, nostack, preserves_flags));
                    }
                )?
            }
            for i in 0..SIDE_BY_SIDE {
                let last = xor(k[ROUNDS], tweaks[i]);
                let block = if ENCRYPT { enc_last(x[i], last) } else { dec_last(x[i], last) };
                // SAFETY: the caller's promise.
                unsafe { store(dst.add(i * WIDTH), block) };
            }
        }
    };
}

pub(super) use kernel;
