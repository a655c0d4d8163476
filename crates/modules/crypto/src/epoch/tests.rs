//! Requests across the position, and the order of epochs.

use super::*;
use crate::TweakMode;
use crate::tests::{key, noise};
use aryk_dma::Buffer;

const BLOCK: usize = 512;

fn cipher(seed: u64, mode: TweakMode) -> Cipher {
    Cipher { key: key(seed), layout: Layout::new(mode, BLOCK as u32).unwrap() }
}

#[test]
fn requests_are_cut_at_the_position() {
    let (old, new) = (cipher(1, TweakMode::SimpleLba), cipher(2, TweakMode::Incr512FullLba));
    let plain = noise(9, 8 * BLOCK);
    for position in [0, 96, 100, 101, 104, 107, 108, 200, u64::MAX] {
        let epoch = Epoch::of_two(old.clone(), new.clone(), Lba(position));
        let mut memory = Buffer::from_slice(&plain);
        let mut stored = vec![0; plain.len()];
        epoch.encrypt(Lba(100), &memory.lend(), &mut stored);
        memory.reclaim();
        for (i, block) in stored.chunks_exact(BLOCK).enumerate() {
            let lba = Lba(100 + i as u64);
            let Cipher { key, layout } = if lba.0 < position { &new } else { &old };
            let mut expected = plain[i * BLOCK..][..BLOCK].to_vec();
            key.encrypt_in_place(layout.sector, layout.tweaks(lba), &mut expected).unwrap();
            assert!(block == expected, "position {position}, block {i}");
        }
        memory.bytes_mut().fill(0);
        epoch.decrypt(Lba(100), &mut stored, &memory.lend());
        memory.reclaim();
        assert!(memory.bytes() == plain, "position {position}");
    }
}

#[test]
fn a_zone_is_broken_from_the_position_to_its_end() {
    let mode = TweakMode::SimpleLba;
    let epoch = Epoch::of_two(cipher(1, mode), cipher(2, mode), Lba(8));
    let is_broken = |lba, blocks| epoch.is_broken(Lba(lba), Blocks(blocks));
    assert!(!is_broken(0, 100));
    let next = epoch.next.as_ref().unwrap();
    next.break_zone(Lba(16));
    assert!(!is_broken(0, 8) && is_broken(0, 9) && is_broken(15, 1) && !is_broken(16, 8));
    next.advance(Lba(16));
    assert!(!is_broken(0, 100) && next.position() == Lba(16));
}

#[test]
fn a_channel_finds_all_later_epochs() {
    let mode = TweakMode::SimpleLba;
    let first = Epoch::settled(cipher(1, mode));
    let epochs = Epochs::new(Arc::clone(&first));
    assert!(first.is_settled());
    epochs.follow(Epoch::of_two(cipher(1, mode), cipher(2, mode), Lba::ZERO));
    epochs.follow(Epoch::settled(cipher(2, mode)));
    assert!(!first.is_settled() && epochs.last().is_settled());
    let second = first.successor().unwrap();
    assert!(!second.is_settled() && Arc::ptr_eq(second.successor().unwrap(), &epochs.last()));
}
