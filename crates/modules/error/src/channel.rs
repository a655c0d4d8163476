//! A channel that lets faults befall requests. Reactor context.

use crate::{Fault, Injected};
use aryk_bdev::{BdevChannel, Channel, Completion, Io, Op, Outbox, Status, Tag};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;

/// A request that the base has, and whose data is or will be wrong.
struct Corrupted {
    tag: Tag,
    how: How,
}

enum How {
    /// What is read is changed once it is there.
    Read { data: Sgl, offset: u32, value: u8 },
    /// A changed copy is written, for the data itself is the submitter's.
    Write(Buffer),
}

pub(crate) struct ErrorChannel {
    base: BdevChannel,
    injected: Arc<Injected>,
    outbox: Outbox,
    held: Vec<Tag>,
    corrupted: Vec<Corrupted>,
    from_base: Vec<Completion>,
}

impl ErrorChannel {
    pub fn new(base: BdevChannel, injected: Arc<Injected>, root: RootId) -> Self {
        let (held, corrupted) = (Vec::new(), Vec::new());
        Self { base, injected, outbox: Outbox::new(root), held, corrupted, from_base: Vec::new() }
    }

    /// Sends a request to the base with one wrong byte, or that byte to be made wrong.
    fn corrupt(&mut self, mut io: Io, offset: u64, value: u8, cx: &mut Cx) {
        if let Some(offset) = u32::try_from(offset).ok().filter(|&offset| offset < io.data.len()) {
            let how = if io.op == Op::Read {
                How::Read { data: io.data, offset, value }
            } else {
                let mut copy = Buffer::new(io.data.len() as usize, PAGE as usize);
                let lent = copy.lend();
                copy_over(io.data, lent);
                flip(lent, offset, value);
                io.data = lent;
                How::Write(copy)
            };
            self.corrupted.push(Corrupted { tag: io.tag, how });
        }
        self.base.submit(io, cx);
    }

    fn completed(&mut self, completion: Completion) {
        let Some(i) = self.corrupted.iter().position(|c| c.tag == completion.tag) else { return };
        match self.corrupted.swap_remove(i).how {
            How::Read { data, offset, value } if completion.status.is_ok() => flip(data, offset, value),
            How::Read { .. } => {}
            How::Write(mut copy) => copy.reclaim(),
        }
    }
}

impl Channel for ErrorChannel {
    #[inline]
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        let in_flight = self.base.in_flight() + self.held.len() as u32;
        match self.injected.take(io.op, in_flight) {
            None => self.base.submit(io, cx),
            Some(Fault::Failure) => self.outbox.push(io.tag, Status::Medium, cx),
            Some(Fault::NoMem) => self.outbox.push(io.tag, Status::NoSpace, cx),
            Some(Fault::Pending) => self.held.push(io.tag),
            Some(Fault::CorruptData { offset, value }) => self.corrupt(io, offset, value, cx),
        }
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        match self.held.iter().position(|&held| held == tag) {
            Some(i) => {
                self.held.remove(i);
                self.outbox.push(tag, Status::Aborted, cx);
            }
            None => self.base.abort(tag, cx),
        }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.outbox.take(out);
        if self.corrupted.is_empty() {
            self.base.poll(cx, out);
            return;
        }
        let mut from_base = std::mem::take(&mut self.from_base);
        self.base.poll(cx, &mut from_base);
        from_base.iter().for_each(|&completion| self.completed(completion));
        out.append(&mut from_base);
        self.from_base = from_base;
    }
}

fn flip(data: Sgl, offset: u32, value: u8) {
    let mut byte = [0];
    data.read(offset, &mut byte);
    data.write(offset, &[byte[0] ^ value]);
}

fn copy_over(from: Sgl, to: Sgl) {
    let mut piece = [0; PAGE as usize];
    for at in (0..from.len()).step_by(piece.len()) {
        let len = (from.len() - at).min(piece.len() as u32);
        let piece = &mut piece[..len as usize];
        from.read(at, piece);
        to.write(at, piece);
    }
}
