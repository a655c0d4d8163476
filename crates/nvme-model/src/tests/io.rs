//! Commands of the NVM command set, on one queue pair.

use super::host::{Host, PAGE, command, io, is_ok, status, with_prps};
use crate::{Config, NamespaceConfig, nvm};

#[test]
fn what_is_written_is_read() {
    let mut host = Host::ready(Config::default());
    for lba in 0..100 {
        assert!(is_ok(&host.write_block(lba, lba as u8, 0)));
    }
    for lba in 0..100 {
        assert_eq!(host.read_block(lba), lba as u8);
    }
    host.model.with(|c| {
        assert_eq!(c.counts().io_commands, 200);
        assert_eq!(c.counts().bytes, 200 * 4096);
        assert_eq!(c.held_commands(), 0);
    });
    host.assert_clean();
}

#[test]
fn ranges_and_sizes_are_checked() {
    let mut host = Host::ready(Config::default());
    let page = host.iova + host.pages(1);
    for (entry, expected) in [
        (io(nvm::READ, 1, 16384, 1), (0, 0x80)),
        (io(nvm::READ, 1, 16383, 2), (0, 0x80)),
        (io(nvm::READ, 1, u64::MAX, 1), (0, 0x80)),
        (io(nvm::WRITE, 1, 16384, 1), (0, 0x80)),
        (io(nvm::READ, 1, 0, 33), (0, 0x02)),
        (io(nvm::READ, 2, 0, 1), (0, 0x0b)),
        (io(nvm::READ, 0, 0, 1), (0, 0x0b)),
        (io(nvm::READ, u32::MAX, 0, 1), (0, 0x0b)),
        (io(0x7f, 1, 0, 1), (0, 0x01)),
    ] {
        assert_eq!(status(&host.run(with_prps(entry, page, 0))), expected, "{entry:?}");
    }
    host.assert_clean();
}

#[test]
fn a_prp_list_chains_across_pages() {
    let config = Config { mdts: 9, ..Config::default() };
    let mut host = Host::ready(config);
    // 300 pages: a list that starts at the last but one entry of its page, so that it chains twice.
    let (data, list) = (host.pages(301), host.pages(3));
    let bytes: Vec<u8> = (0..300 * PAGE).map(|i| (i / 97) as u8).collect();
    host.write(data + 512, &bytes);
    let mut entries = Vec::new();
    for page in 1..=300 {
        entries.push(host.iova + data + page * PAGE);
    }
    host.write(list + 4088, &(host.iova + list + PAGE).to_le_bytes());
    let words: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    host.write(list + PAGE, &words);
    let prp1 = host.iova + data + 512;
    let write = with_prps(io(nvm::WRITE, 1, 7, 300), prp1, host.iova + list + 4088);
    assert!(is_ok(&host.run(write)));
    assert_eq!(host.model.with(|c| c.data(1, 7, 300).map(<[u8]>::to_vec)), Some(bytes.clone()));
    host.write(data, &vec![0; 301 * PAGE as usize]);
    let read = with_prps(io(nvm::READ, 1, 7, 300), prp1, host.iova + list + 4088);
    assert!(is_ok(&host.run(read)));
    assert_eq!(host.read(data + 512, bytes.len()), bytes);
    assert_eq!(host.read(data, 512), [0; 512], "nothing in front of the offset");
    host.assert_clean();
}

#[test]
fn prp_offsets_are_checked() {
    let mut host = Host::ready(Config::default());
    let page = host.iova + host.pages(3);
    for (prp1, prp2, blocks) in [(2, 0, 1), (0, 512, 2), (0, 4, 3)] {
        let done = host.run(with_prps(io(nvm::READ, 1, 0, blocks), page + prp1, page + PAGE + prp2));
        assert_eq!(status(&done), (0, 0x13), "PRP Offset Invalid: {prp1} {prp2}");
    }
    let list = host.pages(1);
    host.write(list, &(page + 8).to_le_bytes());
    let done = host.run(with_prps(io(nvm::READ, 1, 0, 3), page, host.iova + list));
    assert_eq!(status(&done), (0, 0x13), "an entry of a list has no offset");
}

#[test]
fn flush_and_fua_survive_a_power_failure() {
    let mut lost = 0;
    for seed in 0..20 {
        let mut host = Host::ready(Config { seed, ..Config::default() });
        for lba in 0..8 {
            assert!(is_ok(&host.write_block(lba, 1, 0)));
        }
        assert!(is_ok(&host.run(command(nvm::FLUSH, 1, [0; 6]))));
        for lba in 0..8 {
            assert!(is_ok(&host.write_block(lba, 2, if lba < 4 { 1 << 30 } else { 0 })));
        }
        host.model.with(|c| c.fail_power());
        host.enable();
        host.create_queue(1, 16);
        for lba in 0..8 {
            let value = host.read_block(lba);
            assert!(value == 2 || (lba >= 4 && value == 1), "block {lba} has {value}");
            lost += u32::from(value == 1);
        }
    }
    assert!((20..60).contains(&lost), "{lost} of 80 cached blocks were lost");
}

#[test]
fn writes_within_the_atomic_unit_are_lost_or_kept_as_a_whole() {
    for seed in 0..30 {
        let mut host = Host::ready(Config { seed, awupf: 3, ..Config::default() });
        let data = host.pages(4);
        let list = host.pages(1);
        for i in 0..3 {
            host.write(list + 8 * i, &(host.iova + data + (i + 1) * PAGE).to_le_bytes());
        }
        // Two writes that overlap in two blocks.
        for (lba, fill) in [(0, 1), (2, 2)] {
            host.write(data, &vec![fill; 4 * PAGE as usize]);
            let write = with_prps(io(nvm::WRITE, 1, lba, 4), host.iova + data, host.iova + list);
            assert!(is_ok(&host.run(write)));
        }
        host.model.with(|c| c.fail_power());
        let bytes: Vec<u8> = (0..6).map(|lba| host.model.with(|c| c.data(1, lba, 1).unwrap()[0])).collect();
        let allowed = [[0; 6], [1, 1, 2, 2, 2, 2]];
        assert!(allowed.iter().any(|all| bytes == all), "{bytes:?}");
    }
}

#[test]
fn compare_finds_a_difference() {
    let mut host = Host::ready(Config::default());
    host.write_block(5, 7, 0);
    let page = host.pages(1);
    host.write(page, &[7; PAGE as usize]);
    let compare = with_prps(io(nvm::COMPARE, 1, 5, 1), host.iova + page, 0);
    assert!(is_ok(&host.run(compare)));
    host.write(page + 4095, &[8]);
    assert_eq!(status(&host.run(compare)), (2, 0x85));
}

/// A compare and a write as one fused operation; the two pages have these contents.
fn fused(host: &mut Host, compare: u8, write: u8) -> ((u8, u8), (u8, u8)) {
    let (a, b) = (host.pages(1), host.pages(1));
    host.write(a, &[compare; PAGE as usize]);
    host.write(b, &[write; PAGE as usize]);
    let mut first = with_prps(io(nvm::COMPARE, 1, 9, 1), host.iova + a, 0);
    first.flags = 1;
    let mut second = with_prps(io(nvm::WRITE, 1, 9, 1), host.iova + b, 0);
    second.flags = 2;
    host.prepare(1, first);
    host.submit(1, second);
    (status(&host.wait(1)), status(&host.wait(1)))
}

#[test]
fn a_fused_write_depends_on_its_compare() {
    let mut host = Host::ready(Config::default());
    assert_eq!(fused(&mut host, 0, 5), ((0, 0), (0, 0)));
    assert_eq!(host.read_block(9), 5);
    assert_eq!(fused(&mut host, 0, 6), ((2, 0x85), (0, 0x09)));
    assert_eq!(host.read_block(9), 5);
    let page = host.pages(1);
    let mut alone = with_prps(io(nvm::COMPARE, 1, 9, 1), host.iova + page, 0);
    alone.flags = 1;
    assert_eq!(status(&host.run(alone)), (0, 0x0a), "the second command is missing");
    alone.flags = 2;
    assert_eq!(status(&host.run(alone)), (0, 0x0a), "the first command is missing");
    host.assert_clean();
}

#[test]
fn zeroes_and_deallocated_blocks_read_as_zeroes() {
    let mut host = Host::ready(Config::default());
    for lba in 0..8 {
        host.write_block(lba, 0xee, 0);
    }
    assert!(is_ok(&host.run(io(nvm::WRITE_ZEROES, 1, 0, 2))));
    let page = host.pages(1);
    for (i, (lba, blocks)) in [(4_u64, 1_u32), (6, 2)].into_iter().enumerate() {
        host.write(page + 16 * i as u64 + 4, &blocks.to_le_bytes());
        host.write(page + 16 * i as u64 + 8, &lba.to_le_bytes());
    }
    let deallocate = command(nvm::DATASET_MANAGEMENT, 1, [1, 1 << 2, 0, 0, 0, 0]);
    assert!(is_ok(&host.run(with_prps(deallocate, host.iova + page, 0))));
    let values: Vec<u8> = (0..8).map(|lba| host.read_block(lba)).collect();
    assert_eq!(values, [0, 0, 0xee, 0xee, 0, 0xee, 0, 0]);
    host.write(page + 4, &u32::MAX.to_le_bytes());
    assert_eq!(status(&host.run(with_prps(deallocate, host.iova + page, 0))), (0, 0x80));
}

#[test]
fn copy_reads_all_sources_first() {
    let mut host = Host::ready(Config::default());
    for lba in 0..4 {
        host.write_block(lba, lba as u8 + 1, 0);
    }
    let page = host.pages(1);
    // Blocks 2..4, then 0..1, to 1..4: the destination overlaps the sources.
    for (i, (lba, blocks)) in [(2_u64, 2_u16), (0, 1)].into_iter().enumerate() {
        host.write(page + 32 * i as u64 + 8, &lba.to_le_bytes());
        host.write(page + 32 * i as u64 + 16, &(blocks - 1).to_le_bytes());
    }
    let copy = command(nvm::COPY, 1, [1, 0, 1, 0, 0, 0]);
    assert!(is_ok(&host.run(with_prps(copy, host.iova + page, 0))));
    let values: Vec<u8> = (0..4).map(|lba| host.read_block(lba)).collect();
    assert_eq!(values, [1, 3, 4, 1]);
    let many = command(nvm::COPY, 1, [1, 0, 16, 0, 0, 0]);
    assert_eq!(status(&host.run(with_prps(many, host.iova + page, 0))), (1, 0x83));
}

#[test]
fn unreadable_blocks_fail_until_they_are_written() {
    let mut host = Host::ready(Config::default());
    let page = host.iova + host.pages(1);
    assert!(is_ok(&host.run(io(nvm::WRITE_UNCORRECTABLE, 1, 5, 1))));
    assert_eq!(status(&host.run(with_prps(io(nvm::READ, 1, 5, 1), page, 0))), (2, 0x81));
    assert_eq!(status(&host.run(io(nvm::VERIFY, 1, 4, 2))), (2, 0x81));
    assert!(is_ok(&host.run(io(nvm::VERIFY, 1, 6, 2))));
    host.write_block(5, 3, 0);
    assert_eq!(host.read_block(5), 3);
}

#[test]
fn formats_with_metadata_and_other_command_sets_are_refused() {
    let mut zoned = NamespaceConfig::new(100, 1, 2);
    zoned.csi = 2;
    let metadata = NamespaceConfig::new(100, 2, 3);
    let config = Config { namespaces: vec![(1, zoned), (2, metadata)], ..Config::default() };
    let mut host = Host::ready(config);
    let page = host.iova + host.pages(1);
    for nsid in [1, 2] {
        assert_eq!(status(&host.run(with_prps(io(nvm::READ, nsid, 0, 1), page, 0))), (0, 0x0b));
    }
}

#[test]
fn blocks_of_512_bytes_and_offsets_in_a_page() {
    let config = Config { namespaces: vec![(1, NamespaceConfig::new(1000, 0, 1))], ..Config::default() };
    let mut host = Host::ready(config);
    let page = host.pages(2);
    host.write(page + 4096 - 512, &[0xab; 1024]);
    let write = with_prps(io(nvm::WRITE, 1, 998, 2), host.iova + page + 3584, host.iova + page + PAGE);
    assert!(is_ok(&host.run(write)));
    assert_eq!(host.model.with(|c| c.data(1, 998, 2).map(<[u8]>::to_vec)), Some(vec![0xab; 1024]));
    host.assert_clean();
}
