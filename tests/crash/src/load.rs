//! Draws the next request. Test tool, the front-end's thread.

use std::ops::Range;

use crate::content::SECTOR;
use crate::memory::DATA_MAX;
use crate::shape::Shape;
use fastrand::Rng;

/// Sectors of the area under load: few, so that requests overlap.
pub const SECTORS: u64 = 4096;
/// Sectors of the part of it that most requests address.
const HOT: u64 = 192;

/// A request to the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IoRequest {
    /// Sectors to read.
    Read(Range<u64>),
    /// Sectors to write.
    Write(Range<u64>),
    /// Sectors to fill with zeroes; whether the disk may unmap them.
    WriteZeroes(Range<u64>, bool),
    /// Sectors to discard.
    Discard(Range<u64>),
    /// Makes all completed writes durable.
    Flush,
}

/// Draws the next request.
pub fn draw(random: &mut Rng, shape: &Shape) -> IoRequest {
    match random.u64(..100) {
        0..=46 => IoRequest::Read(range(random, shape)),
        47..=92 => IoRequest::Write(range(random, shape)),
        93..=95 => IoRequest::Flush,
        96..=97 => {
            // A SCSI disk without discards refuses a WRITE SAME that permits them.
            let unmap = random.bool() && !shape.encrypted;
            IoRequest::WriteZeroes(range(random, shape), unmap)
        }
        // A discarded block of an encrypted disk reads as random data; the daemon offers no discards of it.
        _ if shape.encrypted => IoRequest::Flush,
        _ => IoRequest::Discard(range(random, shape)),
    }
}

/// 1 to 8 ranges of 4 KiB, at any place that the disk's block size allows.
fn range(random: &mut Rng, shape: &Shape) -> Range<u64> {
    let block = u64::from(shape.block_size) / SECTOR as u64;
    let most = DATA_MAX / SECTOR as u64;
    let len = if random.u64(..100) < 70 {
        8 * (1 + random.u64(..most / 8))
    } else {
        block * (1 + random.u64(..most / block))
    };
    let area = if random.u64(..100) < 75 { HOT } else { SECTORS };
    let start = random.u64(..(area - len) / block + 1) * block;
    start..start + len
}

/// Upper bound of the parts of a request's data.
pub const PARTS_MAX: usize = 4;

/// Cuts `bytes` of data into 1 to [`PARTS_MAX`] parts.
pub fn cut(random: &mut Rng, bytes: u32) -> Vec<u32> {
    let mut parts = vec![bytes];
    for _ in 0..random.u64(..PARTS_MAX as u64) {
        let last = parts.pop().expect("one at least");
        let sectors = u64::from(last) / SECTOR as u64;
        if sectors < 2 {
            parts.push(last);
            break;
        }
        let first = (1 + random.u64(..sectors - 1)) as u32 * SECTOR as u32;
        parts.extend([first, last - first]);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Format;
    use crate::shape::Mode;

    #[test]
    fn requests_are_whole_blocks_inside_of_the_area() {
        let mut random = Rng::with_seed(1);
        let shape = Shape::draw(&mut random, 0, None, &[Mode::Server], &[Format::Split]);
        for block_size in [512, 4096] {
            let shape = Shape { block_size, ..shape.clone() };
            for _ in 0..10_000 {
                let range = range(&mut random, &shape);
                assert!(range.start < range.end && range.end <= SECTORS, "{range:?}");
                assert!((range.start * 512).is_multiple_of(block_size.into()), "{range:?}");
                assert!((range.end * 512).is_multiple_of(block_size.into()), "{range:?}");
            }
        }
        let parts = cut(&mut random, 32 << 10);
        assert_eq!(parts.iter().sum::<u32>(), 32 << 10);
        assert!(parts.iter().all(|part| *part > 0 && part.is_multiple_of(512)));
    }
}
