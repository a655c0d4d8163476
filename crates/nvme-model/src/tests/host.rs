//! A naive host: builds queues by hand in DMA memory, and steps the model in virtual time. Written from the
//! specification, without any of the driver's code.

use crate::{CompletionEntry, Config, Model, Status, SubmissionEntry, admin, nvm};
use aryk_dma::{DmaRange, Mapping};
use aryk_pci::{Function, Registers, Width};
use std::sync::Arc;
use zerocopy::{FromBytes as _, IntoBytes as _};

pub const PAGE: u64 = 4096;
/// Bytes of the host's memory for DMA.
const MEMORY: u64 = 8 << 20;
/// Time that a command may take before a test fails.
const PATIENCE_NS: u64 = 600_000_000_000;

pub struct Queue {
    pub qid: u16,
    pub sq: u64,
    pub cq: u64,
    pub entries: u32,
    pub cq_entries: u32,
    pub tail: u32,
    pub head: u32,
    pub phase: bool,
    next_cid: u16,
}

pub struct Host {
    pub model: Arc<Model>,
    /// The model itself, or a transport to it.
    pub function: Arc<dyn Function>,
    pub memory: DmaRange,
    _mapping: Arc<Mapping>,
    pub iova: u64,
    pub doorbells: Registers,
    pub stride: u64,
    next_page: u64,
    pub queues: Vec<Queue>,
    pub now: u64,
}

/// A command of the admin or an I/O queue.
pub fn command(opcode: u8, nsid: u32, words: [u32; 6]) -> SubmissionEntry {
    SubmissionEntry {
        opcode,
        nsid: nsid.into(),
        cdw10: words[0].into(),
        cdw11: words[1].into(),
        cdw12: words[2].into(),
        cdw13: words[3].into(),
        cdw14: words[4].into(),
        cdw15: words[5].into(),
        ..Default::default()
    }
}

/// A read, write or compare of blocks.
pub fn io(opcode: u8, nsid: u32, lba: u64, blocks: u32) -> SubmissionEntry {
    command(opcode, nsid, [lba as u32, (lba >> 32) as u32, blocks - 1, 0, 0, 0])
}

pub fn with_prps(mut entry: SubmissionEntry, prp1: u64, prp2: u64) -> SubmissionEntry {
    entry.dptr[..8].copy_from_slice(&prp1.to_le_bytes());
    entry.dptr[8..].copy_from_slice(&prp2.to_le_bytes());
    entry
}

/// SCT and SC of a completion.
pub fn status(entry: &CompletionEntry) -> (u8, u8) {
    let status = Status(entry.status.get() >> 1);
    (status.sct(), status.sc())
}

pub fn is_ok(entry: &CompletionEntry) -> bool {
    status(entry) == (0, 0)
}

impl Host {
    /// A model with mapped memory, not enabled.
    pub fn new(config: Config) -> Self {
        let stride = 4 << config.dstrd;
        let model = Model::new("model", config).unwrap();
        Self::over(Arc::clone(&model) as Arc<dyn Function>, model, stride)
    }

    /// A host that drives the model through a function.
    pub fn over(function: Arc<dyn Function>, model: Arc<Model>, stride: u64) -> Self {
        let mapping = Arc::new(Mapping::in_file(MEMORY).unwrap());
        let memory = mapping.dma_range(0, MEMORY).unwrap();
        let iova = function.map(&memory).unwrap();
        let doorbells = function.map_registers(0x1000, 0x1000).unwrap();
        function.set_bus_master(true).unwrap();
        Self {
            model,
            function,
            memory,
            _mapping: mapping,
            iova,
            doorbells,
            stride,
            next_page: 0,
            queues: Vec::new(),
            now: 0,
        }
    }

    /// An enabled model.
    pub fn enabled(config: Config) -> Self {
        let mut host = Self::new(config);
        host.enable();
        host
    }

    /// An enabled model with an I/O queue pair 1 of 64 entries.
    pub fn ready(config: Config) -> Self {
        let mut host = Self::enabled(config);
        host.create_queue(1, 64);
        host
    }

    /// The offset of new zeroed pages in the memory.
    pub fn pages(&mut self, count: u64) -> u64 {
        let offset = self.next_page * PAGE;
        self.next_page += count;
        assert!(offset + count * PAGE <= MEMORY, "the host has no memory left");
        self.write(offset, &vec![0; (count * PAGE) as usize]);
        offset
    }

    pub fn write(&self, offset: u64, data: &[u8]) {
        assert!(self.memory.write(offset, data));
    }

    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        assert!(self.memory.read(offset, &mut out));
        out
    }

    pub fn reg32(&self, offset: u64) -> u32 {
        self.function.read_register(offset, Width::Four).unwrap() as u32
    }

    pub fn set32(&self, offset: u64, value: u32) {
        self.function.write_register(offset, Width::Four, value.into()).unwrap();
    }

    pub fn set64(&self, offset: u64, value: u64) {
        self.function.write_register(offset, Width::Eight, value).unwrap();
    }

    pub fn step(&mut self) -> u64 {
        self.model.step(self.now)
    }

    /// Steps until `is_done`, through virtual time.
    pub fn run_until(&mut self, mut is_done: impl FnMut(&mut Self) -> bool) {
        let end = self.now + PATIENCE_NS;
        loop {
            let next = self.step();
            if is_done(self) {
                return;
            }
            assert!(next != u64::MAX, "the controller waits for the host");
            assert!(next <= end, "patience is over");
            self.now = self.now.max(next);
        }
    }

    /// Enables the controller with an admin queue of 32 entries.
    pub fn enable(&mut self) {
        let (sq, cq) = (self.pages(1), self.pages(1));
        self.set32(0x24, 31 << 16 | 31);
        self.set64(0x28, self.iova + sq);
        self.set64(0x30, self.iova + cq);
        self.set32(0x14, 6 << 16 | 4 << 20 | 1);
        self.queues.clear();
        self.add_queue(0, sq, cq, 32, 32);
        self.run_until(|host| host.reg32(0x1c) & 1 == 1);
    }

    pub fn disable(&mut self) {
        self.set32(0x14, 0);
        self.run_until(|host| host.reg32(0x1c) & 1 == 0);
    }

    /// Creates an I/O queue pair with interrupts on vector `qid`.
    pub fn create_queue(&mut self, qid: u16, entries: u32) {
        let sq = self.pages(u64::from(entries * 64).div_ceil(PAGE));
        let cq = self.pages(u64::from(entries * 16).div_ceil(PAGE));
        let size = u32::from(qid) | (entries - 1) << 16;
        let create = command(admin::CREATE_CQ, 0, [size, 3 | u32::from(qid) << 16, 0, 0, 0, 0]);
        let done = self.admin(with_prps(create, self.iova + cq, 0));
        assert!(is_ok(&done), "{done:?}");
        let create = command(admin::CREATE_SQ, 0, [size, 1 | u32::from(qid) << 16, 0, 0, 0, 0]);
        let done = self.admin(with_prps(create, self.iova + sq, 0));
        assert!(is_ok(&done), "{done:?}");
        self.add_queue(qid, sq, cq, entries, entries);
    }

    /// Adds a queue pair that exists.
    pub fn add_queue(&mut self, qid: u16, sq: u64, cq: u64, entries: u32, cq_entries: u32) {
        let (tail, head, next_cid) = (0, 0, 0);
        self.queues.push(Queue { qid, sq, cq, entries, cq_entries, tail, head, phase: true, next_cid });
    }

    /// Writes an entry with a new CID, without the doorbell; returns the CID.
    pub fn prepare(&mut self, queue: usize, mut entry: SubmissionEntry) -> u16 {
        let q = &mut self.queues[queue];
        let cid = q.next_cid;
        q.next_cid = q.next_cid.wrapping_add(1);
        entry.cid = cid.into();
        let at = q.sq + u64::from(q.tail) * 64;
        q.tail = (q.tail + 1) % q.entries;
        self.write(at, entry.as_bytes());
        cid
    }

    pub fn ring(&self, queue: usize) {
        let q = &self.queues[queue];
        self.doorbells.write(2 * u64::from(q.qid) * self.stride, q.tail);
    }

    pub fn submit(&mut self, queue: usize, entry: SubmissionEntry) -> u16 {
        let cid = self.prepare(queue, entry);
        self.ring(queue);
        cid
    }

    /// Takes the next completion, if there is one, and rings the doorbell.
    pub fn reap(&mut self, queue: usize) -> Option<CompletionEntry> {
        let q = &self.queues[queue];
        let bytes = self.read(q.cq + u64::from(q.head) * 16, 16);
        let entry = CompletionEntry::read_from_bytes(&bytes).unwrap();
        if (entry.status.get() & 1 == 1) != q.phase {
            return None;
        }
        let q = &mut self.queues[queue];
        q.head += 1;
        if q.head == q.cq_entries {
            q.head = 0;
            q.phase = !q.phase;
        }
        self.doorbells.write((2 * u64::from(q.qid) + 1) * self.stride, q.head);
        Some(entry)
    }

    /// The next completion of a queue, once it comes.
    pub fn wait(&mut self, queue: usize) -> CompletionEntry {
        let mut found = None;
        self.run_until(|host| {
            found = host.reap(queue);
            found.is_some()
        });
        found.unwrap()
    }

    pub fn admin(&mut self, entry: SubmissionEntry) -> CompletionEntry {
        let cid = self.submit(0, entry);
        let done = self.wait(0);
        assert_eq!((done.cid.get(), done.sqid.get()), (cid, 0));
        done
    }

    pub fn run(&mut self, entry: SubmissionEntry) -> CompletionEntry {
        let cid = self.submit(1, entry);
        let done = self.wait(1);
        assert_eq!((done.cid.get(), done.sqid.get()), (cid, 1));
        done
    }

    /// Runs an admin command that returns one page of data.
    pub fn admin_page(&mut self, entry: SubmissionEntry) -> Vec<u8> {
        let page = self.pages(1);
        let done = self.admin(with_prps(entry, self.iova + page, 0));
        assert!(is_ok(&done), "{entry:?}: {done:?}");
        self.read(page, PAGE as usize)
    }

    pub fn identify(&mut self, cns: u32, nsid: u32) -> Vec<u8> {
        self.admin_page(command(admin::IDENTIFY, nsid, [cns, 0, 0, 0, 0, 0]))
    }

    /// Writes one block of 4,096 bytes of `fill` with these bits of CDW12.
    pub fn write_block(&mut self, lba: u64, fill: u8, cdw12: u32) -> CompletionEntry {
        let page = self.pages(1);
        self.write(page, &[fill; PAGE as usize]);
        let mut entry = io(nvm::WRITE, 1, lba, 1);
        entry.cdw12 = cdw12.into();
        self.run(with_prps(entry, self.iova + page, 0))
    }

    /// The first byte of a block of 4,096 bytes, all of which are equal.
    pub fn read_block(&mut self, lba: u64) -> u8 {
        let page = self.pages(1);
        let done = self.run(with_prps(io(nvm::READ, 1, lba, 1), self.iova + page, 0));
        assert!(is_ok(&done), "{done:?}");
        let data = self.read(page, PAGE as usize);
        assert!(data.iter().all(|&byte| byte == data[0]), "a torn block");
        data[0]
    }

    /// Asserts that the model found no error of this host.
    pub fn assert_clean(&self) {
        self.model.with(|controller| assert_eq!(controller.violations().first, []));
    }
}
