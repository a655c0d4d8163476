//! Superblocks of any content, and fixtures that are read for ever.

use super::*;

fn sample() -> Superblock {
    let place = |offset| Place { device: 0, offset };
    Superblock {
        pool: Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888),
        name: "pool ä".to_owned(),
        update: 7,
        device: 0,
        shard: aryk_volume::Shard::ALL,
        segment_bytes: 1 << 20,
        alignment: 512,
        devices: vec![Device { id: Uuid::from_u128(9), bytes: 64 << 20 }],
        areas: vec![
            Area { mirrors: [place(2 << 20), place(60 << 20)], bytes: 1 << 20 },
            Area { mirrors: [place(3 << 20), place(61 << 20)], bytes: 1 << 20 },
        ],
        extents: vec![
            Extent { place: place(4 << 20), first: 0, segments: 10 },
            Extent { place: place(20 << 20), first: 10, segments: 40 },
        ],
    }
}

#[test]
fn a_superblock_is_read_as_it_was_written() {
    let bytes = sample().encode();
    assert_eq!(Superblock::parse(&bytes[..]), Ok(sample()));
}

#[test]
fn blobs_are_in_their_segments() {
    let pool = sample();
    assert_eq!(pool.segments(), 50);
    assert_eq!(pool.segment(0).map(|p| p.offset), Some(4 << 20));
    assert_eq!(pool.segment(9).map(|p| p.offset), Some(13 << 20));
    assert_eq!(pool.segment(10).map(|p| p.offset), Some(20 << 20));
    assert_eq!(pool.segment(49).map(|p| p.offset), Some(59 << 20));
    assert_eq!(pool.segment(50), None);
    assert_eq!(pool.segment(u32::MAX), None);
}

#[test]
fn each_changed_bit_is_found() {
    let bytes = sample().encode();
    for n in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[n / 8] ^= 1 << (n % 8);
        let expected = if n < 64 { Invalid::Signature } else { Invalid::Checksum };
        assert_eq!(Superblock::parse(&changed[..]), Err(expected));
    }
}

/// A copy with this change, and a right checksum.
fn changed(change: impl FnOnce(&mut Raw)) -> Result<Superblock, Invalid> {
    let mut raw = Raw::read_from_bytes(&sample().encode()[..]).unwrap();
    change(&mut raw);
    raw.checksum = sum(raw.as_bytes()).into();
    Superblock::parse(raw.as_bytes())
}

#[test]
fn newer_versions_and_features_are_refused_by_number() {
    assert_eq!(changed(|raw| raw.version = 2.into()), Err(Invalid::Version(2)));
    assert_eq!(changed(|raw| raw.version = 0.into()), Err(Invalid::Version(0)));
    assert_eq!(changed(|raw| raw.features = 6.into()), Err(Invalid::Features(6)));
    assert_eq!(changed(|raw| raw.features = 5.into()), Err(Invalid::Features(4)));
}

#[test]
fn shards_come_back_and_impossible_ones_are_refused() {
    let shard = aryk_volume::Shard::new(3, 4).unwrap();
    let superblock = Superblock { shard, ..sample() };
    assert_eq!(Superblock::parse(&superblock.encode()[..]), Ok(superblock));
    for (index, count) in [(0, 0), (0, 1), (4, 4), (0, 3), (0, 32)] {
        let with = |raw: &mut Raw| {
            raw.features = 1.into();
            (raw.shard, raw.shards) = (U32::new(index), U32::new(count));
        };
        assert_eq!(changed(with), Err(Invalid::Field("shards")), "{index} of {count}");
    }
}

#[test]
fn fields_out_of_range_are_refused_by_name() {
    let field = |name, change: fn(&mut Raw)| assert_eq!(changed(change), Err(Invalid::Field(name)));
    field("segment_bytes", |raw| raw.segment_bytes = 3_000_000.into());
    field("segment_bytes", |raw| raw.segment_bytes = (64 << 20).into());
    field("segment_bytes", |raw| raw.segment_bytes = 0.into());
    field("alignment", |raw| raw.alignment = 1024.into());
    field("device", |raw| raw.device = 1.into());
    field("devices", |raw| raw.devices_len = 17.into());
    field("areas", |raw| raw.areas_len = 17.into());
    field("areas_len", |raw| raw.areas_len = 1.into());
    field("extents", |raw| raw.extents_len = 65.into());
    field("extents", |raw| raw.extents[1].first = 11.into());
    field("extents", |raw| raw.extents[1].segments = 0.into());
    field("extents", |raw| raw.extents[1].segments = u32::MAX.into());
    field("extents", |raw| raw.extents[0].place.offset = (4 << 20 | 512).into());
    field("extents", |raw| raw.extents[0].place.device = 1.into());
    field("areas", |raw| raw.areas[0].bytes = (2 << 20).into());
    field("areas", |raw| raw.areas[0].bytes = 0.into());
    field("areas", |raw| raw.areas[1].mirrors[1].offset = u64::MAX.into());
    field("areas", |raw| raw.areas[1].mirrors[1].offset = (64 << 20).into());
    field("devices", |raw| raw.devices[0].bytes = 4096.into());
    field("name", |raw| raw.name[0] = 0xff);
    field("name", |raw| raw.name[0] = b'\n');
    field("extents", |raw| raw.extents[0].place.offset = 4096.into());
    field("devices", |raw| raw.extents[0].place.offset = 0.into());
}

#[test]
fn the_fixture_is_read_for_ever() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/superblock-v1.bin");
    if std::env::var_os("ARYK_WRITE_FIXTURES").is_some() {
        std::fs::write(path, &sample().encode()[..]).unwrap();
    }
    let bytes = std::fs::read(path).expect("a fixture of version 1");
    assert_eq!(Superblock::parse(&bytes), Ok(sample()));
}
