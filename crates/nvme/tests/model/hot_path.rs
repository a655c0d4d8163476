//! The path of a request: submission, doorbell and completion allocate nothing, and ring each doorbell once for a batch.

use allocation_counter::measure;
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use aryk_nvme_model::{Config, Data};

use super::rig::Rig;

/// Bytes between the data of two commands.
const SPACE: u64 = 512 << 10;

/// Commands, blocks of each, and the data of each.
type Case<'a> = (u64, u64, &'a dyn Fn(u64) -> Vec<Piece>);

/// What a batch of reads does: allocations, and doorbells.
fn batch(rig: &mut Rig, data: &[Vec<Piece>], blocks: u64) -> (u64, u64) {
    let info = rig.controller.info().unwrap();
    let commands = Commands::new(rig.controller.namespaces()[0].namespace.as_ref().unwrap(), info);
    let before = rig.pairs[0].counters().doorbells();
    let submitted = measure(|| {
        for (token, pieces) in data.iter().enumerate() {
            let entry = commands.read(blocks * token as u64, blocks).unwrap();
            rig.pairs[0].submit(entry, pieces, token as u64, rig.now).unwrap();
        }
        rig.pairs[0].flush();
    });
    rig.now += 1000;
    while rig.model.step(rig.now) == rig.now {}
    let mut succeeded = 0;
    let reaped = measure(|| {
        rig.pairs[0].reap(u16::MAX, |done| succeeded += usize::from(done.status.is_success())).unwrap();
        rig.pairs[0].late(rig.now, 16, |_| ());
    });
    assert_eq!(succeeded, data.len());
    (submitted.count_total + reaped.count_total, rig.pairs[0].counters().doorbells() - before)
}

#[test]
fn a_batch_allocates_nothing_and_rings_each_doorbell_once() {
    assert_eq!(
        measure(|| drop(std::hint::black_box(Vec::<u8>::with_capacity(1)))).count_total,
        1,
        "it counts"
    );
    // As on most drives, doorbells are registers.
    let config = Config { oacs: 0, data: Data::Null, ..Config::default() };
    let mut rig = Rig::ready(config, &[128]);
    let buffer = rig.buffer(128 * SPACE);
    let at = |command: u64| buffer.iova + command * SPACE;
    let page = |command| vec![Piece { iova: at(command), len: 4096 }];
    let list = |command| vec![Piece { iova: at(command) + 512, len: 128 << 10 }];
    // Pieces that begin within pages: only an SGL describes them.
    let sgl = |command| (0..32).map(|i| Piece { iova: at(command) + 512 + i * 8192, len: 4096 }).collect();
    let cases: [Case; 5] =
        [(1, 1, &page), (128, 1, &page), (1, 32, &list), (128, 32, &list), (128, 32, &sgl)];
    for (index, (depth, blocks, pieces)) in cases.into_iter().enumerate() {
        let data: Vec<_> = (0..depth).map(pieces).collect();
        for _ in 0..20 {
            assert_eq!(batch(&mut rig, &data, blocks), (0, 2), "case {index}: allocations, doorbells");
        }
    }
    let counters = rig.pairs[0].counters();
    assert_eq!((counters.submitted, counters.doorbells()), (20 * (1 + 128 + 1 + 128 + 128), 20 * 5 * 2));
    rig.assert_clean();
}
