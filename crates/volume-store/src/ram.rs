//! A disk in memory, and pools on it, for tests: operations end at once, in their order.

use aryk_volume::{Done, OpId, Recovered, StoreError, StoreOp};
use uuid::Uuid;

use crate::{
    Base, DiskDone, DiskOp, DiskRequest, Error, Expected, Formatting, Opened, Opening, Options, Store,
};

pub(crate) const SEGMENT: u32 = 64 << 10;
pub(crate) const AREA: u64 = 64 << 10;
pub(crate) const SIZE: usize = 4 << 20;
pub(crate) const POOL: Uuid = Uuid::from_u128(0xabc);

/// The disk. Faults are ranges of bytes: first byte, and the one after the last.
#[derive(Clone, Debug)]
pub(crate) struct Ram {
    pub(crate) bytes: Vec<u8>,
    pub(crate) unreadable: Vec<(u64, u64)>,
    pub(crate) unwritable: Vec<(u64, u64)>,
    pub(crate) fails_flushes: bool,
    /// The kinds and offsets of operations: `w` is a write, `f` a flush, `d` a discard.
    pub(crate) log: Vec<(char, u64)>,
}

impl Ram {
    pub(crate) fn new(size: usize) -> Self {
        let (unreadable, unwritable) = (Vec::new(), Vec::new());
        Self { bytes: vec![0; size], unreadable, unwritable, fails_flushes: false, log: Vec::new() }
    }

    pub(crate) fn base(&self) -> Base {
        Base { bytes: self.bytes.len() as u64, block: 512 }
    }

    pub(crate) fn run(&mut self, op: DiskOp) -> DiskDone {
        let hits = |faults: &[(u64, u64)], at: u64, len: u32| {
            faults.iter().any(|fault| fault.0 < at + u64::from(len) && at < fault.1)
        };
        let failed = |is_failed: bool| if is_failed { Err(StoreError::Medium) } else { Ok(()) };
        let (buffer, result) = match op.request {
            DiskRequest::Read { offset, mut buffer, len } => {
                buffer.write(0, &self.bytes[offset as usize..][..len as usize]);
                (Some(buffer), failed(hits(&self.unreadable, offset, len)))
            }
            DiskRequest::Write { offset, buffer, len } => {
                self.log.push(('w', offset));
                let result = failed(hits(&self.unwritable, offset, len));
                if result.is_ok() {
                    self.bytes[offset as usize..][..len as usize]
                        .copy_from_slice(&buffer.bytes()[..len as usize]);
                }
                (Some(buffer), result)
            }
            DiskRequest::Flush => {
                self.log.push(('f', 0));
                (None, failed(self.fails_flushes))
            }
            DiskRequest::Discard { offset, bytes } => {
                self.log.push(('d', offset));
                self.bytes[offset as usize..][..bytes as usize].fill(0);
                (None, Ok(()))
            }
        };
        DiskDone { tag: op.tag, buffer, result }
    }

    pub(crate) fn create(&mut self, force: bool) -> Result<Box<Store>, Error> {
        let options = Options {
            segment_bytes: SEGMENT,
            area_bytes: Some(AREA),
            ..Options::new(POOL, Uuid::from_u128(1), "test", 512)
        };
        let mut formatting = Formatting::new(self.base(), &options, force)?;
        loop {
            let op = formatting.next_op().expect("a creation that goes on");
            let done = self.run(op);
            if let Some(result) = formatting.completed(done) {
                return result;
            }
        }
    }

    /// A pool with a first checkpoint.
    pub(crate) fn pool() -> (Self, Box<Store>) {
        let mut ram = Self::new(SIZE);
        let mut store = ram.create(false).unwrap();
        ram.checkpoint(&mut store, b"first").unwrap();
        (ram, store)
    }

    pub(crate) fn try_open(&mut self, expected: Expected) -> Result<Box<Opened>, Error> {
        let mut opening = Opening::new(self.base(), expected);
        loop {
            let op = opening.next_op().expect("an opening that goes on");
            let done = self.run(op);
            if let Some(result) = opening.completed(done) {
                return result;
            }
        }
    }

    /// The checkpoint, the edits as text, and the number of findings.
    pub(crate) fn read(&mut self) -> Result<(String, String, usize), Error> {
        let opened = self.try_open(Expected::default())?;
        let Recovered { checkpoint, edits } = opened.recovered.unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let edits: Vec<_> = edits.iter().map(|edit| text(edit)).collect();
        Ok((text(&checkpoint), edits.join(" "), opened.findings.len()))
    }

    /// Runs all operations of the store, and returns the answers.
    pub(crate) fn drain(&mut self, store: &mut Store) -> Vec<Done> {
        while let Some(op) = store.next_op() {
            let done = self.run(op);
            store.completed(done);
        }
        std::iter::from_fn(|| store.next_answer()).collect()
    }

    pub(crate) fn op(&mut self, store: &mut Store, op: StoreOp) -> Result<(), StoreError> {
        store.submit(OpId(1), op);
        let mut answers = self.drain(store);
        assert_eq!(answers.len(), 1);
        answers.remove(0).result
    }

    pub(crate) fn commit(&mut self, store: &mut Store, edit: &[u8]) -> Result<(), StoreError> {
        self.op(store, StoreOp::Commit { edit: edit.to_vec() })
    }

    pub(crate) fn checkpoint(&mut self, store: &mut Store, bytes: &[u8]) -> Result<(), StoreError> {
        self.op(store, StoreOp::Checkpoint { bytes: bytes.to_vec() })
    }
}
