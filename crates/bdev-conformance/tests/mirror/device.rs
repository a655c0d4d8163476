//! A mirror as a module would implement it: writes go to all of its disks, reads to one of them in turn, and the mirror
//! stays as long as one disk is left.

use aryk_bdev::{
    Base, BaseEvent, Bdev, BdevChannel, Blocks, BoxFuture, Channel, Completion, Device, Env, Geometry,
    Identity, Io, Lba, Limits, Op, OpSet, OpenError, Status, Stay, Tag,
};
use aryk_dma::Sgl;
use aryk_reactor::{Cx, RootId};
use aryk_slots::{Key, Slots};
use std::sync::{Arc, Mutex, MutexGuard};

/// A disk of the mirror.
struct Leg {
    base: Base,
    /// The mirror reads nothing from the disk any more.
    is_leaving: bool,
}

struct Mirror(Mutex<Vec<Leg>>);

/// Creates a mirror of disks of one size.
pub fn create(env: &Env, name: &str, bases: &[&str]) {
    let leg = |base: &&str| Leg {
        base: Base::open(env.registry(), base, name).expect("a disk of ours"),
        is_leaving: false,
    };
    let legs = bases.iter().map(leg).collect();
    env.registry()
        .register(Identity::named(name), Arc::new(Mirror(Mutex::new(legs))))
        .expect("a name of ours");
}

impl Mirror {
    fn legs(&self) -> MutexGuard<'_, Vec<Leg>> {
        self.0.lock().expect("no one panics holding it")
    }
}

impl Device for Mirror {
    fn product(&self) -> &'static str {
        "mirror"
    }

    fn geometry(&self) -> Geometry {
        self.legs().first().map_or(Geometry::plain(512, Blocks::ZERO), |leg| leg.base.bdev().geometry())
    }

    fn limits(&self) -> Limits {
        Limits { depth: DEPTH, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        self.legs().iter().map(|leg| Arc::clone(leg.base.bdev())).collect()
    }

    fn base_event(&self, base: &Arc<Bdev>, event: BaseEvent) -> Stay {
        let mut legs = self.legs();
        let is_it = |leg: &Leg| Arc::ptr_eq(leg.base.bdev(), base);
        if event == BaseEvent::Removed {
            // Channels of the mirror still have channels of the disk.
            legs.retain(|leg| !is_it(leg));
        } else if legs.iter().all(|leg| leg.is_leaving || is_it(leg)) {
            return Stay::Remove;
        } else {
            legs.iter_mut().filter(|leg| is_it(leg)).for_each(|leg| leg.is_leaving = true);
        }
        Stay::Stay
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.legs().iter().for_each(|leg| leg.base.close());
        Box::pin(std::future::ready(()))
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let open = |leg: &Leg, cx: &mut Cx| -> Result<_, OpenError> {
            let channel = leg.base.open_channel(root, cx)?;
            Ok(LegChannel { channel: Some(channel), reads: !leg.is_leaving, changes: true })
        };
        let legs = self.legs().iter().map(|leg| open(leg, cx)).collect::<Result<_, _>>()?;
        Ok(Box::new(MirrorChannel { legs, requests: Slots::new(DEPTH), turn: 0, completions: Vec::new() }))
    }
}

/// Upper bound of a channel's requests.
const DEPTH: u32 = 32;

struct LegChannel {
    /// `None` once the channel was dropped.
    channel: Option<BdevChannel>,
    reads: bool,
    changes: bool,
}

impl LegChannel {
    fn is(&self, base: &Arc<Bdev>) -> bool {
        self.channel.as_ref().is_some_and(|channel| Arc::ptr_eq(channel.bdev(), base))
    }

    /// Drops the channel of a leaving disk, if nothing is in flight there.
    fn settle(&mut self) {
        self.channel.take_if(|channel| !self.changes && channel.in_flight() == 0);
    }
}

struct Request {
    tag: Tag,
    op: Op,
    lba: Lba,
    blocks: Blocks,
    data: Sgl,
    /// Disks that have not completed the request.
    left: u32,
    status: Status,
}

struct MirrorChannel {
    legs: Vec<LegChannel>,
    requests: Slots<Request>,
    turn: usize,
    completions: Vec<Completion>,
}

impl MirrorChannel {
    /// The next disk to read from, other than `but`.
    fn next_to_read(&mut self, but: Option<usize>) -> Option<usize> {
        self.turn += 1;
        let legs = self.legs.len();
        let mut all = (0..legs).map(|i| (self.turn + i) % legs);
        all.find(|&i| self.legs[i].reads && self.legs[i].channel.is_some() && Some(i) != but)
    }

    fn send(&mut self, key: Key, leg: usize, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("in flight");
        request.left += 1;
        let &mut Request { op, lba, blocks, data, .. } = request;
        let io = Io {
            tag: Tag(key.raw()),
            op,
            fua: false,
            may_unmap: false,
            lba,
            blocks,
            source: Lba::ZERO,
            data,
        };
        self.legs[leg].channel.as_mut().expect("used until it is let go of").submit(io, cx);
    }

    fn completed(
        &mut self,
        leg: usize,
        Completion { tag, status }: Completion,
        cx: &mut Cx,
    ) -> Option<Completion> {
        let key = Key::from_raw(tag.0);
        let request = self.requests.get_mut(key).expect("in flight");
        request.left -= 1;
        let is_read = request.op == Op::Read;
        // The other disks execute the request of a leaving disk.
        if !status.is_ok()
            && is_read
            && let Some(other) = self.next_to_read(Some(leg))
        {
            self.send(key, other, cx);
            return None;
        }
        let request = self.requests.get_mut(key).expect("in flight");
        if is_read || self.legs[leg].changes {
            request.status = request.status.or(status);
        }
        (request.left == 0).then(|| {
            let Request { tag, status, .. } = self.requests.remove(key).expect("in flight");
            Completion { tag, status }
        })
    }
}

impl Channel for MirrorChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let &Io { tag, op, lba, blocks, data, .. } = io;
        let request = Request { tag, op, lba, blocks, data, left: 0, status: Status::Ok };
        let Ok(key) = self.requests.insert(request) else { unreachable!("there are as many as the depth") };
        if op == Op::Read {
            let leg = self.next_to_read(None).expect("one is left");
            return self.send(key, leg, cx);
        }
        for leg in 0..self.legs.len() {
            if self.legs[leg].changes {
                self.send(key, leg, cx);
            }
        }
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let keys: Vec<_> = self.requests.iter().filter(|(_, r)| r.tag == tag).map(|(key, _)| key).collect();
        for channel in self.legs.iter_mut().filter_map(|leg| leg.channel.as_mut()) {
            keys.iter().for_each(|key| channel.abort(Tag(key.raw()), cx));
        }
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        for leg in 0..self.legs.len() {
            let mut completions = std::mem::take(&mut self.completions);
            if let Some(channel) = &mut self.legs[leg].channel {
                channel.poll(cx, &mut completions);
            }
            out.extend(completions.drain(..).filter_map(|completion| self.completed(leg, completion, cx)));
            self.completions = completions;
            self.legs[leg].settle();
        }
    }

    fn base_event(&mut self, base: &Arc<Bdev>, event: BaseEvent, _: &mut Cx) {
        for leg in self.legs.iter_mut().filter(|leg| leg.is(base)) {
            leg.reads = false;
            leg.changes &= event == BaseEvent::Removing;
            leg.settle();
        }
    }
}
