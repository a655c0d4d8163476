//! Contents of blocks, and shapes of requests' memory. Any context.

/// Fills a block: zeroes for seed 0; otherwise bytes that are unique to the seed and the block.
pub fn fill(seed: u64, lba: u64, block: &mut [u8]) {
    let mut word = seed;
    for (i, bytes) in block.chunks_exact_mut(8).enumerate() {
        if seed != 0 {
            word = (seed << 20 ^ lba).wrapping_mul(0x9e37_79b9_7f4a_7c15)
                ^ (i as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
        }
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

/// The contents of `blocks` blocks of `block_size` bytes from `lba` on.
pub fn contents(seed: u64, lba: u64, blocks: u64, block_size: u32) -> Vec<u8> {
    let mut bytes = vec![0; (blocks * u64::from(block_size)) as usize];
    for (block, lba) in bytes.chunks_exact_mut(block_size as usize).zip(lba..) {
        fill(seed, lba, block);
    }
    bytes
}

/// The segmentation of a request's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One segment, page aligned.
    Single,
    /// One segment at an odd address.
    Odd,
    /// Half a block each, a page apart.
    Halves,
    /// Segments of a page that each cross into the next.
    Crossing,
    /// Irregular lengths, some of one byte, in up to 60 segments.
    Ragged,
}

impl Shape {
    /// All shapes.
    pub const ALL: [Self; 5] = [Self::Single, Self::Odd, Self::Halves, Self::Crossing, Self::Ragged];

    /// The segments of `bytes` bytes, as offsets and lengths, all within [`Shape::room`].
    pub fn segments(self, bytes: u32, block_size: u32) -> Vec<(u32, u32)> {
        const PAGE: u32 = 4096;
        match self {
            Self::Single => vec![(0, bytes)],
            Self::Odd => vec![(1, bytes)],
            Self::Halves => cut(bytes, 0, |_| (block_size / 2, PAGE)),
            Self::Crossing => cut(bytes, 513, |_| (PAGE, 64)),
            Self::Ragged => {
                let lens = [1, 511, 512, 3, 4095, 513, 7, 2048, 1, 1, 4097, 4096];
                cut(bytes, 3, |i| (if i < 60 { lens[i % lens.len()] } else { u32::MAX }, 5))
            }
        }
    }

    /// Bytes of memory that the segments of `bytes` bytes may span.
    pub const fn room(bytes: u32) -> u32 {
        // Halves of blocks of 512 bytes, each followed by a page.
        bytes * 17 + 8192
    }
}

/// Cuts `bytes` bytes from `start` on into segments; `next` returns the length of each and the gap after it.
fn cut(bytes: u32, start: u32, next: impl Fn(usize) -> (u32, u32)) -> Vec<(u32, u32)> {
    let (mut segments, mut at, mut left) = (Vec::new(), start, bytes);
    while left > 0 {
        let (len, gap) = next(segments.len());
        let len = len.min(left);
        segments.push((at, len));
        at += len + gap;
        left -= len;
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_hold_all_bytes_apart_from_each_other_and_in_their_room() {
        for (shape, bytes) in Shape::ALL.into_iter().flat_map(|s| [512, 4096, 131_072].map(|b| (s, b))) {
            let segments = shape.segments(bytes, 512);
            assert_eq!(segments.iter().map(|s| s.1).sum::<u32>(), bytes);
            assert!(
                segments.iter().all(|s| s.1 > 0) && segments.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0)
            );
            let last = segments.last().unwrap();
            assert!(last.0 + last.1 <= Shape::room(bytes), "{shape:?} {bytes}");
        }
    }

    #[test]
    fn contents_differ_by_seed_and_by_block() {
        let of = |seed, lba| contents(seed, lba, 1, 512);
        assert_eq!(of(0, 7), [0; 512]);
        assert_ne!(of(1, 7), of(2, 7));
        assert_ne!(of(1, 7), of(1, 8));
    }
}
