//! A disk in memory whose device accesses requests' memory by itself, through an IOMMU that is checked at every access: the test
//! module for [`aryk_bdev::Memory`], and a short example of a module that uses it.
//!
//! The device gets an IOVA for each piece of a request when the request is submitted, as an NVMe controller gets its PRP list,
//! and uses it when the request is executed. At that time the IOVA must be mapped, and to the memory of the piece. A piece
//! without an IOVA goes through a bounce buffer.

use aryk_bdev::{
    Attachment, Bdev, Blocks, BoxFuture, Bytes, Channel, Completion, Device, Env, Error, Geometry, Identity,
    Io, Limits, Memory, MemoryClient, MemoryError, MemoryLookup, Op, OpSet, OpenError, RegisterError, Status,
    Tag,
};
use aryk_dma::{Buffer, DmaRange, Mapping, Seg, Sgl};
use aryk_reactor::{Cx, RootId};
use futures_channel::oneshot;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// IOVAs have nothing in common with addresses.
const IOVA_STEP: u64 = 1 << 44;

/// Bytes in a block.
const BLOCK: u32 = 512;

/// How the IOMMU treats calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Behaviour {
    /// Registering and unregistering take up to this many microseconds, at random.
    pub delay_us_max: u64,
    /// Every registration with this number fails: 1 for all, 0 for none.
    pub fails_every: u64,
    /// Registrations wait for [`Iommu::release`].
    pub holds_registrations: bool,
    /// The ends of registrations wait for [`Iommu::release`].
    pub holds_ends: bool,
}

/// What the IOMMU has seen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Accesses {
    /// Pieces that the device has accessed by IOVA.
    pub direct: u64,
    /// Pieces that went through a bounce buffer.
    pub bounced: u64,
    /// Accesses by an IOVA that was not mapped to the piece. There must be none.
    pub violations: u64,
    /// Registrations that were begun.
    pub begun: u64,
    /// Registrations that were ended.
    pub ended: u64,
}

#[derive(Default)]
struct State {
    behaviour: Behaviour,
    /// Address and length in this process, by IOVA.
    mapped: BTreeMap<u64, (u64, u64)>,
    accesses: Accesses,
    random: u64,
    /// Calls that are held.
    held: Vec<oneshot::Sender<()>>,
    /// Requests that the devices have.
    in_flight: usize,
    /// Requests stay in flight.
    holds_requests: bool,
}

/// The IOMMU of some DMA disks. Cheap to clone.
#[derive(Clone, Default)]
pub struct Iommu(Arc<Mutex<State>>);

impl std::fmt::Debug for Iommu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Iommu").field(&self.accesses()).finish()
    }
}

impl Iommu {
    /// An IOMMU without mappings.
    pub fn new(behaviour: Behaviour) -> Self {
        let iommu = Self::default();
        iommu.set_behaviour(behaviour);
        iommu
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no one panics holding it")
    }

    /// Changes how calls are treated from now on.
    pub fn set_behaviour(&self, behaviour: Behaviour) {
        self.state().behaviour = behaviour;
    }

    /// Lets calls that are held go on.
    pub fn release(&self) {
        self.state().held.clear();
    }

    /// Keeps requests in flight from now on, or lets them go on.
    pub fn hold_requests(&self, holds: bool) {
        self.state().holds_requests = holds;
    }

    /// Requests that the devices have.
    pub fn in_flight(&self) -> usize {
        self.state().in_flight
    }

    /// Calls that are held.
    pub fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Ranges that are mapped.
    pub fn mapped(&self) -> usize {
        self.state().mapped.len()
    }

    /// The accesses that the device has made so far.
    pub fn accesses(&self) -> Accesses {
        self.state().accesses
    }

    /// Waits as its behaviour says.
    async fn take_time(&self, is_end: bool) {
        let (gate, delay_us) = {
            let mut state = self.state();
            let Behaviour { delay_us_max, holds_registrations, holds_ends, .. } = state.behaviour;
            let holds = if is_end { holds_ends } else { holds_registrations };
            let gate = holds.then(|| {
                let (sender, gate) = oneshot::channel();
                state.held.push(sender);
                gate
            });
            state.random = state.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            let delay = if delay_us_max > 0 { (state.random >> 33) % delay_us_max } else { 0 };
            (gate, delay)
        };
        if delay_us > 0 {
            // As a module whose system calls block.
            let (done, wait) = oneshot::channel::<()>();
            std::thread::spawn(move || {
                sleep(Duration::from_micros(delay_us));
                drop(done);
            });
            wait.await.unwrap_or_default();
        }
        if let Some(gate) = gate {
            gate.await.unwrap_or_default();
        }
    }

    /// The device's access to a piece of memory by IOVA.
    fn access(&self, iova: u64, piece: &Seg) {
        let mut state = self.state();
        let found = state.mapped.range(..=iova).next_back().is_some_and(|(start, (addr, len))| {
            let offset = iova - start;
            offset + piece.len() as u64 <= *len && addr + offset == piece.base() as u64
        });
        state.accesses.direct += 1;
        state.accesses.violations += u64::from(!found);
    }
}

#[expect(clippy::disallowed_methods, reason = "a thread of its own, as for system calls that take long")]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}

impl MemoryClient for Iommu {
    fn name(&self) -> &'static str {
        "test IOMMU"
    }

    fn register(&self, memory: DmaRange, _: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
        Box::pin(async move {
            let number = {
                let mut state = self.state();
                state.accesses.begun += 1;
                state.accesses.begun
            };
            self.take_time(false).await;
            let mut state = self.state();
            if state.behaviour.fails_every > 0 && number.is_multiple_of(state.behaviour.fails_every) {
                return Err(RegisterError::failed("the IOMMU has no room"));
            }
            let last = state.mapped.last_key_value().map_or(0, |(iova, _)| *iova);
            let iova = last + IOVA_STEP;
            state.mapped.insert(iova, (memory.addr(), memory.len()));
            Ok(iova)
        })
    }

    fn unregister(&self, memory: DmaRange, _: Arc<str>, value: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // The mapping is of no use from here on, as with a real IOMMU that is told now and answers later.
            let range = Some((memory.addr(), memory.len()));
            assert_eq!(self.state().mapped.remove(&value), range, "it was registered");
            self.take_time(true).await;
            self.state().accesses.ended += 1;
        })
    }
}

/// An IOMMU that is attached to a daemon's memory, for the DMA disks that share it.
#[derive(Debug)]
pub struct Container {
    iommu: Iommu,
    attachment: Attachment,
}

impl Container {
    /// Attaches an IOMMU: it registers all memory that is there.
    ///
    /// # Errors
    /// As [`Memory::attach`].
    pub async fn attach(memory: &Memory, iommu: Iommu) -> Result<Arc<Self>, MemoryError> {
        let attachment = memory.attach(iommu.clone()).await?;
        Ok(Arc::new(Self { iommu, attachment }))
    }
}

/// A DMA disk.
struct DmaDisk {
    /// `None` when the disk is closed.
    container: Mutex<Option<Arc<Container>>>,
    store: Arc<Mapping>,
}

/// Creates a DMA disk of blocks of 512 bytes.
///
/// # Errors
/// As [`aryk_bdev::Registry::register`].
///
/// # Panics
/// If there is no memory for its blocks.
pub fn create_dma_disk(
    env: &Env,
    name: &str,
    blocks: Blocks,
    container: Arc<Container>,
) -> Result<Arc<Bdev>, Error> {
    let store = Arc::new(Mapping::anonymous(blocks.to_bytes(BLOCK).0).expect("there is memory"));
    let disk = DmaDisk { container: Mutex::new(Some(container)), store };
    env.registry().register(Identity::named(name), Arc::new(disk))
}

impl DmaDisk {
    fn container(&self) -> MutexGuard<'_, Option<Arc<Container>>> {
        self.container.lock().expect("no one panics holding it")
    }
}

impl Device for DmaDisk {
    fn product(&self) -> &'static str {
        "DMA disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK, Bytes(self.store.len()).whole_blocks(BLOCK))
    }

    fn limits(&self) -> Limits {
        Limits { depth: 32, transfer_blocks: Blocks(512), segments: 64, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            let container = self.container().take();
            // The last disk of a container detaches it.
            if let Some(container) = container.and_then(Arc::into_inner) {
                container.attachment.detach().await;
            }
        })
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let container = self.container();
        let container = container.as_ref().ok_or(OpenError::Removed)?;
        Ok(Box::new(DmaChannel {
            root,
            lookup: container.attachment.lookup(),
            iommu: container.iommu.clone(),
            store: Arc::clone(&self.store),
            submitted: VecDeque::new(),
        }))
    }
}

/// A command for the device.
struct Command {
    io: Io,
    /// The IOVA of each piece of its memory; `None` if the piece goes through the bounce buffer.
    iovas: Vec<Option<u64>>,
}

struct DmaChannel {
    root: RootId,
    lookup: MemoryLookup,
    iommu: Iommu,
    store: Arc<Mapping>,
    submitted: VecDeque<Command>,
}

impl Channel for DmaChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let iova = |piece| self.lookup.translate(&piece).map(|place| place.value + place.offset);
        let iovas = io.data.pieces().map(iova).collect();
        self.submitted.push_back(Command { io: *io, iovas });
        self.iommu.state().in_flight += 1;
        cx.wake(self.root);
    }

    fn abort(&mut self, tag: Tag, _: &mut Cx) {
        // The device has the command; it cannot be taken back.
        let _ = tag;
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        if self.iommu.state().holds_requests {
            if !self.submitted.is_empty() {
                cx.wake(self.root);
            }
            return;
        }
        while let Some(command) = self.submitted.pop_front() {
            self.execute(&command);
            self.iommu.state().in_flight -= 1;
            out.push(Completion { tag: command.io.tag, status: Status::Ok });
        }
    }
}

impl DmaChannel {
    fn execute(&mut self, Command { io, iovas }: &Command) {
        let Bytes(offset) = io.lba.to_bytes(BLOCK);
        match io.op {
            Op::Read | Op::Write => self.transfer(io, iovas, offset),
            Op::Flush => {}
            Op::Unmap | Op::WriteZeroes => self.store.zero(offset, io.blocks.to_bytes(BLOCK).0),
            Op::Compare | Op::CompareAndWrite | Op::Copy => {
                unreachable!("the block layer makes it of others")
            }
        }
    }

    fn transfer(&mut self, io: &Io, iovas: &[Option<u64>], offset: u64) {
        let mut at = 0;
        for (piece, iova) in io.data.pieces().zip(iovas) {
            let len = piece.len() as u32;
            let (data, offset) = (io.data.slice(at, len), offset + u64::from(at));
            match *iova {
                Some(iova) => {
                    self.iommu.access(iova, &piece);
                    match io.op {
                        Op::Read => data.load_from(&self.store, offset),
                        _ => data.store_to(&self.store, offset),
                    }
                }
                None => self.bounce(io.op, data, offset),
            }
            at += len;
        }
    }

    /// Transfers a piece through memory that the device may access: in a real module, memory that it has registered itself.
    fn bounce(&self, op: Op, data: Sgl, offset: u64) {
        self.iommu.state().accesses.bounced += 1;
        let mut bytes = vec![0; data.len() as usize];
        if op == Op::Write {
            data.read(0, &mut bytes);
        }
        let mut buffer = Buffer::from_slice(&bytes);
        match op {
            Op::Read => buffer.lend().load_from(&self.store, offset),
            _ => buffer.lend().store_to(&self.store, offset),
        }
        buffer.reclaim();
        if op == Op::Read {
            data.write(0, buffer.bytes());
        }
    }
}
