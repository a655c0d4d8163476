//! Stamps written blocks with their place, and checks read blocks against it. At most one request per block is in flight.
//!
//! A block begins with a stamp: its offset, the run that wrote it, the number of writes of the block in that run, and a checksum
//! of the whole block. The rest is filled with pseudo-random bytes derived from these.

use aryk_dma::GuestArea;
use aryk_front_end::Place;
use fastrand::Rng;

/// The first word of a stamp.
const MAGIC: u64 = u64::from_le_bytes(*b"arykmark");
/// Bytes of a stamp: five integers of 8 bytes.
const STAMP: usize = 40;

/// A block has unexpected contents.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at offset {offset}: expected {expected}, found {found}")]
pub struct Mismatch {
    /// Offset of the block in bytes.
    pub offset: u64,
    expected: String,
    found: String,
}

/// Stamps and checks blocks.
#[derive(Debug)]
pub struct Verifier {
    /// Distinguishes this run's blocks from older ones.
    run: u64,
    block: u64,
    /// Per block: how often this run has written it.
    generations: Vec<u32>,
    /// Per block: whether a request is in flight.
    in_use: Vec<bool>,
    /// Whether blocks that this run has not written must be stamped too.
    checks_all: bool,
    buffer: Vec<u8>,
    /// The number of checked blocks.
    pub checked: u64,
}

impl Verifier {
    /// A verifier for `blocks` blocks of `block` bytes.
    pub fn new(run: u64, block: u32, blocks: u64, checks_all: bool) -> Self {
        let blocks = blocks as usize;
        Self {
            run,
            block: block.into(),
            generations: vec![0; blocks],
            in_use: vec![false; blocks],
            checks_all,
            buffer: vec![0; block as usize],
            checked: 0,
        }
    }

    /// Reserves the first block from `wanted` on that has no request in flight.
    pub fn reserve(&mut self, wanted: u64) -> u64 {
        let (before, after) = self.in_use.split_at(wanted as usize);
        let free = after.iter().chain(before).position(|in_use| !in_use);
        let free = free.expect("there are more blocks than requests in flight");
        let block = (wanted as usize + free) % self.in_use.len();
        self.in_use[block] = true;
        block as u64
    }

    /// The blocks that this run has written.
    pub fn written(&self) -> Vec<u64> {
        (0..).zip(&self.generations).filter(|(_, written)| **written > 0).map(|(block, _)| block).collect()
    }

    /// Fills the data of a request that writes a block.
    pub fn stamp(&mut self, area: &GuestArea, place: Place, block: u64) {
        let generation = &mut self.generations[block as usize];
        *generation += 1;
        let words = [MAGIC, block * self.block, self.run, (*generation).into()];
        fill(&mut self.buffer, words);
        area.write_bytes(place.data as usize, &self.buffer);
    }

    /// Clears the buffer of a read, so that data of an earlier request cannot pass for its result.
    pub fn wipe(&self, area: &GuestArea, place: Place) {
        area.write(place.data as usize, &[0_u8; STAMP]);
    }

    /// Ends the reservation of a block after its write.
    pub fn release(&mut self, block: u64) {
        self.in_use[block as usize] = false;
    }

    /// Ends the reservation of a block after its read, and checks its contents.
    pub fn check(&mut self, area: &GuestArea, place: Place, block: u64) -> Result<(), Mismatch> {
        self.release(block);
        let generation = u64::from(self.generations[block as usize]);
        if generation == 0 && !self.checks_all {
            return Ok(());
        }
        area.read_bytes(place.data as usize, &mut self.buffer);
        self.checked += 1;
        let offset = block * self.block;
        let expected = match generation {
            0 => format!("a block that --verify wrote to {offset}"),
            _ => format!("generation {generation} of this run"),
        };
        let found = self.find_mismatch(offset, generation);
        found.map_or(Ok(()), |found| Err(Mismatch { offset, expected, found }))
    }

    /// The error in the block in the buffer, if any.
    fn find_mismatch(&self, offset: u64, generation: u64) -> Option<String> {
        let word =
            |i: usize| u64::from_le_bytes(self.buffer[8 * i..8 * i + 8].try_into().expect("8 bytes of 40"));
        let [magic, at, run, found, sum] = [word(0), word(1), word(2), word(3), word(4)];
        let actual = checksum(&self.buffer);
        if magic != MAGIC {
            return Some(format!("no stamp, but {magic:#018x}"));
        }
        if sum != actual {
            return Some(format!(
                "the stamp of offset {at}, generation {found}, with checksum {sum:#x} over bytes that have {actual:#x}"
            ));
        }
        if at != offset {
            return Some(format!("the block of offset {at}, generation {found}"));
        }
        if generation > 0 && run != self.run {
            return Some(format!("generation {found} of another run"));
        }
        if generation > 0 && found != generation {
            return Some(format!("generation {found}"));
        }
        None
    }
}

fn fill(block: &mut [u8], words: [u64; 4]) {
    let [_, offset, run, generation] = words;
    let (stamp, rest) = block.split_at_mut(STAMP);
    for (place, word) in stamp.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    let mut random = Rng::with_seed(offset ^ run ^ generation.rotate_left(40));
    for place in rest.chunks_mut(8) {
        place.copy_from_slice(&random.u64(..).to_le_bytes()[..place.len()]);
    }
    let sum = checksum(block);
    block[STAMP - 8..STAMP].copy_from_slice(&sum.to_le_bytes());
}

/// Checksum of a block without its checksum field.
fn checksum(block: &[u8]) -> u64 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&block[..STAMP - 8]);
    hasher.update(&block[STAMP..]);
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_front_end::Memory;

    const BLOCK: u32 = 512;

    fn rig() -> (Memory, Verifier, Place) {
        let memory = Memory::new(4096).unwrap();
        (memory, Verifier::new(9, BLOCK, 8, false), Place { head: 0, data: 1024, len: BLOCK })
    }

    fn mismatch(verifier: &mut Verifier, memory: &Memory, place: Place, block: u64) -> String {
        verifier.check(memory.whole(), place, block).unwrap_err().to_string()
    }

    #[test]
    fn written_blocks_pass() {
        let (memory, mut verifier, place) = rig();
        for _ in 0..3 {
            verifier.stamp(memory.whole(), place, 5);
            assert_eq!(verifier.check(memory.whole(), place, 5), Ok(()));
        }
        assert_eq!(verifier.checked, 3);
        // A block that this run has not written may have any contents.
        assert_eq!(verifier.check(memory.whole(), place, 4), Ok(()));
        assert_eq!(verifier.checked, 3);
    }

    #[test]
    fn each_mismatch_is_described() {
        let (memory, mut verifier, place) = rig();
        verifier.stamp(memory.whole(), place, 5);
        let mut old = vec![0; BLOCK as usize];
        memory.whole().read_bytes(1024, &mut old);
        verifier.stamp(memory.whole(), place, 5);
        memory.whole().write_bytes(1024, &old);
        let lost = mismatch(&mut verifier, &memory, place, 5);
        assert_eq!(lost, "at offset 2560: expected generation 2 of this run, found generation 1");
        verifier.stamp(memory.whole(), place, 6);
        let misplaced = mismatch(&mut verifier, &memory, place, 5);
        assert!(misplaced.ends_with("found the block of offset 3072, generation 1"), "{misplaced}");
        verifier.stamp(memory.whole(), place, 5);
        let byte = 1024 + BLOCK as usize - 1;
        let last: u8 = memory.whole().read(byte);
        memory.whole().write(byte, &(last ^ 1));
        assert!(mismatch(&mut verifier, &memory, place, 5).contains("checksum"));
        verifier.wipe(memory.whole(), place);
        assert!(mismatch(&mut verifier, &memory, place, 5).contains("no stamp"));
        let mut other = Verifier::new(10, BLOCK, 8, false);
        (0..3).for_each(|_| other.stamp(memory.whole(), place, 5));
        assert!(mismatch(&mut verifier, &memory, place, 5).ends_with("of another run"));
    }

    #[test]
    fn a_later_run_checks_what_an_earlier_one_wrote() {
        let (memory, mut verifier, place) = rig();
        verifier.stamp(memory.whole(), place, 5);
        let mut later = Verifier::new(10, BLOCK, 8, true);
        assert_eq!(later.check(memory.whole(), place, 5), Ok(()));
        let elsewhere = mismatch(&mut later, &memory, place, 6);
        assert!(elsewhere.contains("expected a block that --verify wrote to 3072"), "{elsewhere}");
    }

    #[test]
    fn a_block_has_one_request_in_flight() {
        let (_, mut verifier, _) = rig();
        assert_eq!([verifier.reserve(7), verifier.reserve(7), verifier.reserve(0)], [7, 0, 1]);
        verifier.release(7);
        assert_eq!(verifier.reserve(6), 6);
        assert_eq!(verifier.reserve(6), 7);
    }
}
