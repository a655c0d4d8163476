//! A channel of a volume whose pool has several shards: it has a channel to each of them. Reactor context.
//!
//! Reads and writes go to the shards that have their stripes. A discard or write-zeroes of more than one stripe goes to all
//! shards as it is: each has few records of it, however long it is. A flush goes to all shards. A request completes when all of
//! its parts have.

use crate::gate::LocalGate;
use crate::inbox::VolumeChannel;
use aryk_bdev::{Blocks, Channel, Completion, Io, Lba, Op, Outbox, Status, Tag};
use aryk_reactor::{Cx, RootId};
use aryk_slots::{Key, Slots};
use aryk_volume::{Piece, Shard, UNIT, pieces};
use std::collections::VecDeque;
use std::rc::Rc;

/// The initial room for requests in flight; the table grows for more.
const REQUESTS: u32 = 256;

/// A request of which parts are in shards.
struct Request {
    tag: Tag,
    /// Parts that have not completed.
    left: u32,
    status: Status,
    is_write: bool,
}

/// The channel.
pub(crate) struct StripedChannel {
    root: RootId,
    shards: Vec<VolumeChannel>,
    /// Units of a block.
    block_units: u64,
    gate: Rc<LocalGate>,
    requests: Slots<Request>,
    /// Writes that wait until the gate opens.
    held: VecDeque<Io>,
    /// Completions of requests that were held.
    outbox: Outbox,
    completions: Vec<Completion>,
}

impl StripedChannel {
    /// A channel over one for each shard.
    pub fn new(shards: Vec<VolumeChannel>, block_units: u32, gate: Rc<LocalGate>, root: RootId) -> Self {
        Self {
            root,
            shards,
            block_units: block_units.into(),
            gate,
            requests: Slots::new(REQUESTS),
            held: VecDeque::new(),
            outbox: Outbox::new(root),
            completions: Vec::new(),
        }
    }

    /// Submits the parts of a request.
    fn start(&mut self, io: &Io, is_write: bool, cx: &mut Cx) {
        let request = Request { tag: io.tag, left: 0, status: Status::Ok, is_write };
        let key = self.requests.add(request);
        let io = Io { tag: Tag(key.raw()), ..*io };
        let (unit, units) = (io.lba.0 * self.block_units, io.blocks.0 * self.block_units);
        let count = self.shards.len() as u32;
        let mut parts = 0;
        if io.op == Op::Flush || (!io.op.has_data() && units > Shard::units_left(unit)) {
            parts = count;
            self.shards.iter_mut().for_each(|shard| shard.submit(&io, cx));
        } else {
            let mut at = 0;
            for Piece { shard, unit, units } in pieces(count, unit, units) {
                let bytes = if io.op.has_data() { units as u32 * UNIT } else { 0 };
                let (lba, blocks) = (Lba(unit / self.block_units), Blocks(units / self.block_units));
                let part = Io { lba, blocks, data: io.data.slice(at, bytes), ..io };
                self.shards[shard as usize].submit(&part, cx);
                (at, parts) = (at + bytes, parts + 1);
            }
        }
        self.requests.get_mut(key).expect("just added").left = parts;
    }

    /// Starts the writes that were held.
    fn start_held(&mut self, cx: &mut Cx) {
        while let Some(io) = self.held.pop_front() {
            if !self.gate.enter(self.root) {
                self.held.push_front(io);
                return;
            }
            self.start(&io, true, cx);
        }
    }
}

impl Channel for StripedChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let is_write = !matches!(io.op, Op::Read | Op::Flush);
        if is_write && (!self.held.is_empty() || !self.gate.enter(self.root)) {
            self.held.push_back(*io);
            return;
        }
        self.start(io, is_write, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let before = self.held.len();
        self.held.retain(|io| io.tag != tag);
        for _ in self.held.len()..before {
            self.outbox.push(tag, Status::Aborted, cx);
        }
        let keys: Vec<Key> =
            self.requests.iter().filter(|(_, request)| request.tag == tag).map(|(key, _)| key).collect();
        for key in keys {
            self.shards.iter_mut().for_each(|shard| shard.abort(Tag(key.raw()), cx));
        }
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        if !self.held.is_empty() {
            self.start_held(cx);
        }
        self.outbox.take(out);
        for shard in &mut self.shards {
            shard.poll(cx, &mut self.completions);
        }
        for Completion { tag, status } in self.completions.drain(..) {
            let key = Key::from_raw(tag.0);
            let request = self.requests.get_mut(key).expect("it has parts that have not completed");
            request.left -= 1;
            if request.status == Status::Ok {
                request.status = status;
            }
            if request.left == 0 {
                let Request { tag, status, is_write, .. } = self.requests.remove(key).expect("just found");
                if is_write {
                    self.gate.leave();
                }
                out.push(Completion { tag, status });
            }
        }
    }
}

impl Drop for StripedChannel {
    fn drop(&mut self) {
        // What is under way is forgotten.
        let writes = self.requests.iter().filter(|(_, request)| request.is_write).count();
        (0..writes).for_each(|_| self.gate.leave());
    }
}
