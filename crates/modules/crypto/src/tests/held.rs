//! A base disk that keeps completions until a test wants them.

use super::*;
use aryk_bdev::{Channel, Completion, Device, Geometry, Limits, OpenError};
use aryk_reactor::{Cx, RootId};
use std::sync::Mutex;

pub(super) const LEN: usize = 64 << 10;
pub(super) const BLOCK: usize = 512;

/// The store of a [`Held`] disk.
#[derive(Default)]
struct State {
    data: Vec<u8>,
    /// Requests that moved their data and are not completed.
    held: Vec<Completion>,
    holds: bool,
}

/// A disk that moves the data of a request when it gets the request, and can keep the completion.
#[derive(Clone)]
pub(super) struct Held(Arc<Mutex<State>>);

impl Held {
    /// A new disk of [`LEN`] zeroes.
    pub fn register(registry: &Registry, name: &str) -> Self {
        let disk = Self(Arc::new(Mutex::new(State { data: vec![0; LEN], ..State::default() })));
        registry.register(Identity::named(name), Arc::new(disk.clone())).unwrap();
        disk
    }

    pub fn data(&self) -> Vec<u8> {
        self.0.lock().unwrap().data.clone()
    }

    /// The number of requests that are not completed.
    pub fn held(&self) -> usize {
        self.0.lock().unwrap().held.len()
    }

    pub fn hold(&self, holds: bool) {
        self.0.lock().unwrap().holds = holds;
    }
}

impl Device for Held {
    fn product(&self) -> &'static str {
        "held"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BLOCK as u32, Blocks((LEN / BLOCK) as u64));
        Geometry { block_size, physical_block_size: block_size, blocks, optimal_io_blocks: Blocks::ZERO }
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read, Op::Write])
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(HeldChannel { disk: self.clone(), root }))
    }
}

struct HeldChannel {
    disk: Held,
    root: RootId,
}

impl Channel for HeldChannel {
    fn submit(&mut self, io: &aryk_bdev::Io, cx: &mut Cx) {
        let mut state = self.disk.0.lock().unwrap();
        let start = io.lba.0 as usize * BLOCK;
        let data = &mut state.data[start..][..io.data.len() as usize];
        match io.op {
            Op::Read => io.data.write(0, data),
            _ => io.data.read(0, data),
        }
        state.held.push(Completion { tag: io.tag, status: Status::Ok });
        cx.wake(self.root);
    }

    fn abort(&mut self, _: aryk_bdev::Tag, _: &mut Cx) {}

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut state = self.disk.0.lock().unwrap();
        match state.holds {
            true => cx.wake(self.root),
            false => out.append(&mut state.held),
        }
    }
}
