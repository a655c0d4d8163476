//! A disk that puts another device behind tighter limits, and records the requests that the block layer sends to it.

use crate::Fixture;
use aryk_bdev::{
    BaseEvent, Bdev, Blocks, BoxFuture, Channel, Completion, CreditPool, Device, Geometry, Identity, Io, Lba,
    Limits, Op, OpSet, OpenError, Registry, Stay, Tag,
};
use aryk_reactor::{Cx, Handle, RootId};
use std::sync::{Arc, Mutex, MutexGuard};

/// A request as the device received it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// The operation.
    pub op: Op,
    /// The first block.
    pub lba: Lba,
    /// Number of blocks.
    pub blocks: Blocks,
    /// Number of pieces of memory.
    pub pieces: u32,
}

/// The record of a probe.
#[derive(Debug, Default)]
pub struct Log {
    /// Every request.
    pub seen: Vec<Seen>,
    /// The largest number of requests in flight on one channel.
    pub in_flight_max: u32,
}

/// The properties that the probe reports to the block layer. After a change, call [`aryk_bdev::Registry::changed`].
#[derive(Debug)]
pub struct Properties {
    /// As [`Device::limits`].
    pub limits: Limits,
    /// As [`Device::ops`].
    pub ops: OpSet,
    /// As [`Device::is_read_only`].
    pub is_read_only: bool,
}

/// A recording device; see the file's head.
pub struct Probe {
    device: Arc<dyn Device>,
    properties: Arc<Mutex<Properties>>,
    log: Arc<Mutex<Log>>,
}

impl Probe {
    /// Creates a probe of `device` that reports these limits and operations to the block layer.
    pub fn new(device: Arc<dyn Device>, limits: Limits, ops: OpSet) -> Self {
        let properties = Properties { limits, ops, is_read_only: device.is_read_only() };
        Self { device, properties: Arc::new(Mutex::new(properties)), log: Arc::default() }
    }

    /// The reported properties, which the caller may change.
    pub fn properties(&self) -> Arc<Mutex<Properties>> {
        Arc::clone(&self.properties)
    }

    /// The probe's record, which continues to grow.
    pub fn log(&self) -> Arc<Mutex<Log>> {
        Arc::clone(&self.log)
    }
}

/// The disk of a fixture behind a probe named `probe` by which no other host changes its store, so that the block layer makes all
/// compound requests of it; `None` if no other host does.
pub(crate) fn unshared(fixture: &impl Fixture) -> Option<Registry> {
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let device = bdev.device();
    let limits = Limits { is_shared: false, ..device.limits() };
    device.limits().is_shared.then(|| {
        let (registry, probe) = (Registry::new(), Probe::new(Arc::clone(device), limits, device.ops()));
        registry.register(Identity::named("probe"), Arc::new(probe)).expect("it is the only one");
        registry
    })
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("properties", &self.properties).finish_non_exhaustive()
    }
}

impl Device for Probe {
    fn product(&self) -> &'static str {
        "probe"
    }

    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn limits(&self) -> Limits {
        lock(&self.properties).limits
    }

    fn ops(&self) -> OpSet {
        lock(&self.properties).ops
    }

    fn is_read_only(&self) -> bool {
        lock(&self.properties).is_read_only
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        self.device.bases()
    }

    fn base_event(&self, base: &Arc<Bdev>, event: BaseEvent) -> Stay {
        self.device.base_event(base, event)
    }

    fn base_resized(&self) -> Option<Blocks> {
        self.device.base_resized()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.device.close()
    }

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        self.device.prepare(reactor)
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let inner = self.device.open_channel(root, cx)?;
        let (properties, log) = (Arc::clone(&self.properties), Arc::clone(&self.log));
        Ok(Box::new(ProbeChannel { inner, properties, log, in_flight: 0 }))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

struct ProbeChannel {
    inner: Box<dyn Channel>,
    properties: Arc<Mutex<Properties>>,
    log: Arc<Mutex<Log>>,
    in_flight: u32,
}

impl ProbeChannel {
    fn check(&self, io: &Io) {
        let Properties { limits, ops, is_read_only } = &*lock(&self.properties);
        assert!(ops.contains(io.op), "the device does not do {io:?}");
        assert!(!is_read_only || !io.op.is_change(), "the device is read-only: {io:?}");
        assert!(self.in_flight < limits.depth, "{} requests are in flight", self.in_flight);
        let max = match io.op {
            Op::Read | Op::Write => limits.transfer_blocks,
            Op::Unmap => limits.unmap_blocks,
            Op::WriteZeroes => limits.write_zeroes_blocks,
            Op::Compare => limits.compare_blocks,
            Op::CompareAndWrite => limits.compare_and_write_blocks,
            Op::Copy => limits.copy_blocks,
            Op::Flush => Blocks::ZERO,
        };
        assert!(
            io.blocks <= max && (io.blocks > Blocks::ZERO || io.op == Op::Flush),
            "{io:?} is not within {max} blocks"
        );
        if !io.op.has_data() {
            assert!(io.data.is_empty(), "{io:?} has data");
            return;
        }
        assert!(io.data.pieces().count() <= limits.segments as usize, "{io:?} has too many segments");
        let boundary = limits.boundary_blocks;
        let crosses = boundary > Blocks::ZERO && io.lba % boundary + io.blocks > boundary;
        assert!(!crosses, "{io:?} crosses a multiple of {boundary}");
    }
}

impl Channel for ProbeChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.check(io);
        self.in_flight += 1;
        let in_flight = self.in_flight;
        let pieces = io.data.pieces().count() as u32;
        {
            let mut log = lock(&self.log);
            log.seen.push(Seen { op: io.op, lba: io.lba, blocks: io.blocks, pieces });
            log.in_flight_max = log.in_flight_max.max(in_flight);
        }
        self.inner.submit(io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.inner.abort(tag, cx);
    }

    fn is_revocable(&self, tag: Tag) -> bool {
        self.inner.is_revocable(tag)
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let before = out.len();
        self.inner.poll(cx, out);
        self.in_flight -= (out.len() - before) as u32;
    }

    fn credits(&self) -> Option<CreditPool> {
        self.inner.credits()
    }

    fn base_event(&mut self, base: &Arc<Bdev>, event: BaseEvent, cx: &mut Cx) {
        self.inner.base_event(base, event, cx);
    }
}
