//! The guest's side of [`super::Stack`]: its memory, and a minimal driver of one split queue.

use super::{Case, DISK};
use anyhow::{Context, Result, ensure};
use aryk_dma::{GuestArea, Mapping, MemTable, Region};
use aryk_virtqueue::{Config, Format, Virtqueue, avail_len, desc_len, used_idx, used_len};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Descriptors in the queue, for up to 85 requests in flight, and for more.
const SIZES: [u16; 2] = [256, 512];
/// Descriptors of a request.
const CHAIN: u16 = 3;
/// The layout of the guest's memory.
const GUEST: u64 = 0x1_0000_0000;
const MEMORY_LEN: u64 = 16 << 20;
const AVAIL: u64 = 64 << 10;
const USED: u64 = 128 << 10;
const HEADERS: u64 = 1 << 20;
const DATA: u64 = 2 << 20;
/// Bytes of a request without its data, and the offset of a SCSI host's response in them.
const SPACE: u64 = 192;
const ANSWER_AT: u64 = 64;
/// Descriptor flags (virtio 1.2, section 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// VIRTIO_BLK_T_IN and VIRTIO_BLK_T_OUT (section 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;

/// What a request does.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The first sector of 512 bytes.
    pub sector: u64,
    /// A write instead of a read.
    pub is_write: bool,
}

/// The guest.
pub struct Guest {
    memory: Arc<MemTable>,
    desc: GuestArea,
    avail: GuestArea,
    used: GuestArea,
    size: u16,
    scsi: bool,
    depth: u16,
    /// Bytes of a request's data.
    len: u64,
    /// Requests made available so far.
    offered: u16,
    /// Answers taken so far by [`Guest::exchange`].
    taken: u16,
}

impl Guest {
    /// A guest with the requests of a case in its memory.
    ///
    /// # Errors
    /// A process without memory.
    pub fn new(case: Case) -> Result<Self> {
        let mapping = Arc::new(Mapping::anonymous(MEMORY_LEN)?);
        let region = Region { guest_addr: GUEST, user_addr: GUEST, len: MEMORY_LEN, offset: 0, mapping };
        let memory = Arc::new(MemTable::new(vec![region])?);
        let area = |at, len| memory.area_at_guest(GUEST + at, len).context("the queue is in guest memory");
        let size = SIZES[usize::from(CHAIN * case.depth > SIZES[0])];
        let guest = Self {
            desc: area(0, desc_len(size))?,
            avail: area(AVAIL, avail_len(size, true))?,
            used: area(USED, used_len(size, true))?,
            memory: Arc::clone(&memory),
            size,
            scsi: case.scsi,
            depth: case.depth,
            len: case.len,
            offered: 0,
            taken: 0,
        };
        for number in 0..case.depth {
            // Far apart, as a guest's random requests are.
            let sector = u64::from(number) * 977 * (case.len / 512) % (DISK / 512);
            guest.lay_out(number, Request { sector, is_write: case.write })?;
        }
        Ok(guest)
    }

    /// The guest's memory.
    pub const fn memory(&self) -> &Arc<MemTable> {
        &self.memory
    }

    /// Writes a request and its descriptors.
    fn lay_out(&self, number: u16, Request { sector, is_write }: Request) -> Result<()> {
        let header = self.header(number);
        let data =
            (GUEST + DATA + self.len * u64::from(number), self.len as u32, if is_write { 0 } else { WRITE });
        let chain = if self.scsi {
            // READ and WRITE (16) for target 0, unit 0.
            let mut command = [0; 51];
            command[..3].copy_from_slice(&[1, 0, 0x40]);
            command[19] = if is_write { 0x8a } else { 0x88 };
            command[21..29].copy_from_slice(&sector.to_be_bytes());
            command[29..33].copy_from_slice(&(self.len as u32 / 512).to_be_bytes());
            self.memory.write(header, &command)?;
            let (head, answer) = ((header, 51, 0), (header + ANSWER_AT, 108, WRITE));
            if is_write { [head, data, answer] } else { [head, answer, data] }
        } else {
            self.memory.write(header, &if is_write { OUT } else { IN })?;
            self.memory.write(header + 8, &sector)?;
            [(header, 16, 0), data, (header + 16, 1, WRITE)]
        };
        for (i, (addr, len, direction)) in (0_u16..).zip(chain) {
            let index = CHAIN * number + i;
            let at = GUEST + 16 * u64::from(index);
            self.memory.write(at, &addr)?;
            self.memory.write(at + 8, &len)?;
            self.memory.write(at + 12, &(direction | if i < 2 { NEXT } else { 0 }))?;
            self.memory.write(at + 14, &(index + 1))?;
        }
        Ok(())
    }

    const fn header(&self, number: u16) -> u64 {
        GUEST + HEADERS + SPACE * number as u64
    }

    /// The device's side of the queue.
    ///
    /// # Errors
    /// None, for this layout.
    pub fn ring(&self) -> Result<Virtqueue> {
        Ok(Virtqueue::new(Config {
            format: Format::Split,
            size: self.size,
            desc: self.desc.clone(),
            driver: self.avail.clone(),
            device: self.used.clone(),
            event_idx: true,
            indirect: false,
            base: 0,
            inflight: None,
        })?)
    }

    /// Makes all requests available once more. All of them must have been completed.
    pub fn offer(&mut self) {
        for request in 0..self.depth {
            let place = usize::from(self.offered.wrapping_add(request) % self.size);
            self.avail.store_u16(4 + 2 * place, CHAIN * request, Ordering::Relaxed);
        }
        self.offered = self.offered.wrapping_add(self.depth);
        self.avail.store_u16(2, self.offered, Ordering::Release);
    }

    /// Whether all requests are completed.
    pub fn is_answered(&self) -> bool {
        used_idx(&self.used) == self.offered
    }

    /// Takes the answers of [`Guest::offer`] without looking at them. All of them must have come.
    pub const fn skip_answers(&mut self) {
        self.taken = self.offered;
    }

    /// Takes the answers that have come, makes the next request available in place of each, and returns their number.
    ///
    /// # Errors
    /// A request failed.
    pub fn exchange(&mut self, mut next: impl FnMut() -> Request) -> Result<usize> {
        let count = self.used.load_u16(2, Ordering::Acquire).wrapping_sub(self.taken);
        for _ in 0..count {
            let head: u32 = self.used.read(4 + 8 * usize::from(self.taken % self.size));
            let number = head as u16 / CHAIN;
            self.check(number)?;
            self.lay_out(number, next())?;
            let place = usize::from(self.offered % self.size);
            self.avail.store_u16(4 + 2 * place, head as u16, Ordering::Relaxed);
            (self.taken, self.offered) = (self.taken.wrapping_add(1), self.offered.wrapping_add(1));
        }
        if count > 0 {
            self.avail.store_u16(2, self.offered, Ordering::Release);
        }
        Ok(count.into())
    }

    /// Checks that the last execution of each request succeeded.
    ///
    /// # Errors
    /// A request failed.
    pub fn check_all(&self) -> Result<()> {
        (0..self.depth).try_for_each(|number| self.check(number))
    }

    fn check(&self, number: u16) -> Result<()> {
        // A block device's status, or a SCSI host's status and response.
        let at = self.header(number) + if self.scsi { ANSWER_AT + 10 } else { 16 };
        let status: [u8; 2] = self.memory.read(at)?;
        let is_good = status[..1 + usize::from(self.scsi)].iter().all(|byte| *byte == 0);
        ensure!(is_good, "request {number} has status {status:?}");
        Ok(())
    }
}
