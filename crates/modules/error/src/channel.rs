//! The channel of an error disk, which injects faults into requests. Reactor context.

use crate::{Fault, Injected};
use aryk_bdev::{BdevChannel, Channel, Completion, Io, Op, Outbox, Status, Tag};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::{Cx, RootId};
use aryk_slots::{Key, Slots};
use std::sync::Arc;

/// A request in flight. Its tag at the base is its key in the table, because several requests may have the same tag.
struct Request {
    tag: Tag,
    fault: RequestFault,
}

enum RequestFault {
    None,
    /// The request is not submitted to the base until it is resumed.
    Held(Io),
    /// The data of a read is changed when the base has completed it.
    CorruptRead {
        data: Sgl,
        offset: u32,
        value: u8,
    },
    /// A changed copy is written, since the data itself belongs to the submitter.
    CorruptWrite(Buffer),
}

pub(crate) struct ErrorChannel {
    base: BdevChannel,
    injected: Arc<Injected>,
    outbox: Outbox,
    /// The value of [`Injected::resumed`] when this channel last resumed its held requests.
    resumed: u64,
    requests: Slots<Request>,
    from_base: Vec<Completion>,
}

impl ErrorChannel {
    pub fn new(base: BdevChannel, injected: Arc<Injected>, root: RootId, depth: u32) -> Self {
        let (requests, resumed) = (Slots::new(depth), injected.resumed());
        Self { base, injected, outbox: Outbox::new(root), resumed, requests, from_base: Vec::new() }
    }

    fn add(&mut self, tag: Tag, fault: RequestFault) -> Tag {
        // The base's depth may have grown since the channel was opened.
        Tag(self.requests.add(Request { tag, fault }).raw())
    }

    /// Submits the held requests to the base.
    fn resume(&mut self, cx: &mut Cx) {
        let is_held = |(key, r): (Key, &Request)| matches!(r.fault, RequestFault::Held(_)).then_some(key);
        let held: Vec<_> = self.requests.iter().filter_map(is_held).collect();
        for key in held {
            let Some(request) = self.requests.get_mut(key) else { continue };
            if let RequestFault::Held(io) = std::mem::replace(&mut request.fault, RequestFault::None) {
                self.base.submit(Io { tag: Tag(key.raw()), ..io }, cx);
            }
        }
    }
}

impl Channel for ErrorChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let mut io = *io;
        let fault = match self.injected.take(io.op, self.requests.len()) {
            Some(Fault::Failure) => return self.outbox.push(io.tag, Status::Medium, cx),
            Some(Fault::NoMem) => return self.outbox.push(io.tag, Status::NoSpace, cx),
            Some(Fault::Pending) => {
                self.add(io.tag, RequestFault::Held(io));
                return;
            }
            Some(Fault::CorruptData { offset, value }) => corrupt(&mut io, offset, value),
            None => RequestFault::None,
        };
        io.tag = self.add(io.tag, fault);
        self.base.submit(io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let with_tag: Vec<_> =
            self.requests.iter().filter(|(_, r)| r.tag == tag).map(|(key, _)| key).collect();
        for key in with_tag {
            if self.requests.get(key).is_some_and(|r| matches!(r.fault, RequestFault::Held(_))) {
                self.requests.remove(key);
                self.outbox.push(tag, Status::Aborted, cx);
            } else {
                self.base.abort(Tag(key.raw()), cx);
            }
        }
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.outbox.take(out);
        let resumed = self.injected.resumed();
        if std::mem::replace(&mut self.resumed, resumed) != resumed {
            self.resume(cx);
        }
        self.base.poll(cx, &mut self.from_base);
        for Completion { tag, status } in self.from_base.drain(..) {
            let request = self.requests.remove(Key::from_raw(tag.0)).expect("completed once");
            match request.fault {
                RequestFault::CorruptRead { data, offset, value } if status.is_ok() => {
                    flip(data, offset, value)
                }
                RequestFault::CorruptWrite(mut copy) => copy.reclaim(),
                RequestFault::CorruptRead { .. } | RequestFault::None => {}
                RequestFault::Held(_) => unreachable!("held requests are not submitted to the base"),
            }
            out.push(Completion { tag: request.tag, status });
        }
    }
}

/// Corrupts one byte: of a read, in its data when it completes; of a write, in a copy of its data.
fn corrupt(io: &mut Io, offset: u64, value: u8) -> RequestFault {
    let Some(offset) = u32::try_from(offset).ok().filter(|&offset| offset < io.data.len()) else {
        return RequestFault::None;
    };
    if io.op == Op::Read {
        return RequestFault::CorruptRead { data: io.data, offset, value };
    }
    let mut copy = Buffer::new(io.data.len() as usize, PAGE as usize);
    let lent = copy.lend();
    copy_over(io.data, lent);
    flip(lent, offset, value);
    io.data = lent;
    RequestFault::CorruptWrite(copy)
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
