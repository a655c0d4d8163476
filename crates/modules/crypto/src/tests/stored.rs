//! What a crypto disk stores, in each tweak mode, against AWS-LC and tweaks that are computed for one sector at a time.

use super::*;
use aryk_aes_xts::Implementation;

/// A mode, the block size of a disk, the bytes with one tweak, and the tweak of the sector that starts at a byte of the disk.
type Case = (TweakMode, u32, usize, fn(u64) -> (u64, u64));

fn cases() -> Vec<Case> {
    let plain64 = |iv_offset, sector_size, iv_large_sectors| TweakMode::Plain64 {
        iv_offset,
        sector_size,
        iv_large_sectors,
    };
    vec![
        (TweakMode::SimpleLba, 512, 512, |at| (0, at / 512)),
        (TweakMode::SimpleLba, 4096, 4096, |at| (0, at / 4096)),
        (TweakMode::JoinNegLbaWithLba, 512, 512, |at| (at / 512, 0x7fff_ffff_ffff_ffff - at / 512)),
        (TweakMode::JoinNegLbaWithLba, 4096, 4096, |at| (at / 4096, 0x7fff_ffff_ffff_ffff - at / 4096)),
        (TweakMode::Incr512FullLba, 512, 512, |at| (at / 512, 0)),
        (TweakMode::Incr512FullLba, 4096, 512, |at| (at / 512, 0)),
        (TweakMode::Incr512UpperLba, 512, 512, |at| (0, at / 512)),
        (TweakMode::Incr512UpperLba, 4096, 512, |at| (0, at / 512)),
        (plain64(0, 512, false), 512, 512, |at| (at / 512, 0)),
        (plain64(1000, 512, true), 4096, 512, |at| (at / 512 + 1000, 0)),
        (plain64(1000, 4096, false), 4096, 4096, |at| (at / 512 + 1000, 0)),
        (plain64(1000, 4096, true), 4096, 4096, |at| (at / 4096 + 125, 0)),
        (plain64(u64::MAX - (1 << 55) + 1, 1024, false), 4096, 1024, |at| {
            (at / 512 + 0xff80_0000_0000_0000, 0)
        }),
    ]
}

#[test]
fn each_tweak_mode_stores_what_aws_lc_computes() {
    let oracle = Key::with(&noise(1, 64), Implementation::AwsLc).unwrap();
    for (mode, block_size, sector, tweak_at) in cases() {
        let stack = Stack::new(block_size).crypto("disk", "base", mode, POOL_BYTES);
        let mut bench = Bench::new();
        let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, 1 << 18);
        let mut base = bench.open(stack.registry(), "base", Access::Read, 1, 1 << 18);
        for (lba, blocks, shape) in [(0, 1, Shape::Odd), (3, 40, Shape::Single), (8000, 40, Shape::Ragged)] {
            let plain = noise(lba, (blocks * u64::from(block_size)) as usize);
            disk.write(lba, &plain, shape, &mut bench);
            assert_eq!(disk.finish(&mut bench).status, Status::Ok);
            let mut expected = plain.clone();
            for (i, part) in expected.chunks_exact_mut(sector).enumerate() {
                let (low, high) = tweak_at(lba * u64::from(block_size) + (i * sector) as u64);
                let tweaks = Tweaks { start: u128::from(high) << 64 | u128::from(low), step: 0 };
                oracle.encrypt_in_place(SectorSize::new(sector).unwrap(), tweaks, part).unwrap();
            }
            base.read(lba, blocks, Shape::Single, &mut bench);
            assert!(base.finish(&mut bench).data == expected, "{mode:?}, blocks of {block_size} bytes");
            disk.read(lba, blocks, shape, &mut bench);
            assert!(disk.finish(&mut bench).data == plain, "{mode:?}, blocks of {block_size} bytes");
        }
        base.close(&mut bench);
        disk.close(&mut bench);
    }
}
