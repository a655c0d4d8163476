//! The meta journal of a volume pool: records of any content, and pools whose meta areas were changed at will.
//!
//! A pool opens or is refused, without a panic and without reading beyond the disk. A header that is accepted is written again
//! without a change. A pool with one changed mirror opens with its state.
#![no_main]

use aryk_dma::Buffer;
use aryk_volume::{OpId, Recovered, StoreOp};
use aryk_volume_store::{
    Base, DiskDone, DiskOp, DiskRequest, Expected, Formatting, Header, Opening, Options, edits,
};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;
use uuid::Uuid;

const SIZE: usize = 3 << 20;
const AREA: usize = 32 << 10;

fn run(disk: &mut [u8], op: DiskOp) -> DiskDone {
    let buffer = match op.request {
        DiskRequest::Read { offset, mut buffer, len } => {
            buffer.write(0, &disk[offset as usize..][..len as usize]);
            Some(buffer)
        }
        DiskRequest::Write { offset, buffer, len } => {
            disk[offset as usize..][..len as usize].copy_from_slice(&buffer.bytes()[..len as usize]);
            Some::<Buffer>(buffer)
        }
        DiskRequest::Flush | DiskRequest::Discard { .. } => None,
    };
    DiskDone { tag: op.tag, buffer, result: Ok(()) }
}

/// A pool with a checkpoint and two edits, and the offsets of the mirrors of the area in use.
fn pool() -> &'static (Vec<u8>, [usize; 2]) {
    static POOL: OnceLock<(Vec<u8>, [usize; 2])> = OnceLock::new();
    POOL.get_or_init(|| {
        let mut disk = vec![0; SIZE];
        let base = Base { bytes: SIZE as u64, block: 512 };
        let options = Options {
            segment_bytes: 64 << 10,
            area_bytes: Some(AREA as u64),
            ..Options::new(Uuid::from_u128(7), Uuid::from_u128(8), "fuzzed", 512)
        };
        let mut formatting = Formatting::new(base, &options, false).expect("a pool fits");
        let mut store = loop {
            let op = formatting.next_op().expect("the creation goes on");
            if let Some(result) = formatting.completed(run(&mut disk, op)) {
                break result.expect("a new pool");
            }
        };
        let ops = [
            StoreOp::Checkpoint { bytes: b"checkpoint".to_vec() },
            StoreOp::Commit { edit: b"one".to_vec() },
            StoreOp::Commit { edit: b"two".to_vec() },
        ];
        for op in ops {
            store.submit(OpId(1), op);
            while let Some(op) = store.next_op() {
                store.completed(run(&mut disk, op));
            }
        }
        let mirrors = store.superblock().areas[0].mirrors.map(|place| place.offset as usize);
        (disk, mirrors)
    })
}

fn open(disk: &mut [u8]) -> Option<Recovered> {
    let mut opening = Opening::new(Base { bytes: SIZE as u64, block: 512 }, Expected::default());
    loop {
        let op = opening.next_op().expect("the opening goes on");
        if let Some(result) = opening.completed(run(disk, op)) {
            return result.ok().and_then(|opened| opened.recovered);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    if let Some(header) = Header::parse(data) {
        assert_eq!(Header::parse(&header.encode()), Some(header));
    }
    let _ = edits(data);
    let Some((&[kind, at], data)) = data.split_first_chunk::<2>() else { return };
    let (whole, mirrors) = pool();
    let mut disk = whole.clone();
    let at = usize::from(at) * 64 % (AREA - 64);
    let len = data.len().min(AREA - at);
    for (n, mirror) in mirrors.iter().enumerate() {
        if kind & (1 << n) != 0 {
            disk[mirror + at..][..len].copy_from_slice(&data[..len]);
        }
    }
    let found = open(&mut disk);
    if kind & 3 != 3 {
        let found = found.expect("the other mirror is intact");
        assert_eq!((&found.checkpoint[..], found.edits.len()), (&b"checkpoint"[..], 2));
    }
});
