//! Data pointers: from a command's PRPs or SGLs to a list of segments. Context: the holder of the controller.
//!
//! All commands use one [`Transfer`], which keeps its memory: a command allocates nothing. Work is bounded
//! by the command's length: a PRP list is read page by page and has one entry per page; SGL segments may hold at most
//! [`SGL_DESCRIPTORS_MAX`] descriptors, and a segment must not be empty.

use crate::bus::{Bus, BusError};
use crate::wire::{Status, SubmissionEntry, first};

/// Descriptors that the controller reads for one command at most, over all segments.
const SGL_DESCRIPTORS_MAX: usize = 4096;
const SGL_DESCRIPTOR_LEN: usize = 16;

/// How the controller reads data pointers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PointerRules {
    /// Bytes of a memory page: CC.MPS.
    pub(crate) page: u64,
    /// The SGLS field of the identify data.
    pub(crate) sgls: u32,
    /// Commands of the admin queue use PRPs on PCIe.
    pub(crate) is_admin: bool,
    /// Whether the data goes to the host. A bit bucket takes data on its way to the host only, and is empty otherwise.
    pub(crate) to_host: bool,
}

/// Part of the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// First byte; `None` for a bit bucket, which takes data that the host discards.
    pub(crate) iova: Option<u64>,
    pub(crate) len: u64,
}

/// The host memory of a command's data, in order.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    pub(crate) segments: Vec<Segment>,
}

impl Transfer {
    /// Reads the data pointer of `entry`, for `len` bytes of data.
    pub(crate) fn load(
        &mut self,
        bus: &mut Bus,
        rules: PointerRules,
        entry: &SubmissionEntry,
        len: u64,
    ) -> Result<(), Status> {
        self.segments.clear();
        match entry.psdt() {
            0 => self.load_prps(bus, rules, entry.prp1(), entry.prp2(), len),
            1 | 2 if rules.sgls & 3 != 0 && !rules.is_admin => {
                self.load_sgl(bus, rules, first(&entry.dptr), len)
            }
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn push(&mut self, iova: u64, len: u64) {
        match self.segments.last_mut() {
            Some(Segment { iova: Some(start), len: before }) if start.wrapping_add(*before) == iova => {
                *before += len;
            }
            _ => self.segments.push(Segment { iova: Some(iova), len }),
        }
    }

    /// PRP entries (NVMe 2.0 §4.1.1): PRP 1 may start inside of a page; PRP 2 is the second page if two pages suffice, and
    /// otherwise points to a list, whose last entry in a page points to the next page of the list if there is one.
    fn load_prps(
        &mut self,
        bus: &mut Bus,
        rules: PointerRules,
        prp1: u64,
        prp2: u64,
        len: u64,
    ) -> Result<(), Status> {
        if len == 0 {
            return Ok(());
        }
        let page = rules.page;
        if !prp1.is_multiple_of(4) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let in_first = len.min(page - prp1 % page);
        self.push(prp1, in_first);
        let mut left = len - in_first;
        if left == 0 {
            return Ok(());
        }
        if left <= page {
            if !prp2.is_multiple_of(page) {
                return Err(Status::PRP_OFFSET_INVALID);
            }
            self.push(prp2, left);
            return Ok(());
        }
        if !prp2.is_multiple_of(8) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        let mut list = prp2;
        loop {
            let room = (page - list % page) / 8;
            let wanted = left.div_ceil(page);
            let entries = room.min(wanted);
            let chains = wanted > room;
            let mut chunk = [0; 512];
            let mut at = 0;
            while at < entries {
                let count = (entries - at).min(64);
                let bytes = &mut chunk[..8 * count as usize];
                bus.read(list + 8 * at, bytes).map_err(|BusError| Status::DATA_TRANSFER_ERROR)?;
                for (i, entry) in bytes.chunks_exact(8).enumerate() {
                    let entry = u64::from_le_bytes(first(entry));
                    if !entry.is_multiple_of(page) {
                        return Err(Status::PRP_OFFSET_INVALID);
                    }
                    if chains && at + i as u64 == room - 1 {
                        list = entry;
                    } else {
                        self.push(entry, left.min(page));
                        left -= left.min(page);
                    }
                }
                at += count;
            }
            if !chains {
                return Ok(());
            }
        }
    }

    /// SGLs (NVMe 2.0 §4.1.2): a descriptor in the command describes the data, or a segment of descriptors.
    fn load_sgl(
        &mut self,
        bus: &mut Bus,
        rules: PointerRules,
        descriptor: [u8; 16],
        len: u64,
    ) -> Result<(), Status> {
        let mut left = len;
        let mut descriptor = Descriptor::parse(&descriptor)?;
        if !descriptor.is_segment() {
            self.push_descriptor(rules, &descriptor, &mut left)?;
        }
        let mut seen = 0;
        while descriptor.is_segment() {
            let count = descriptor.len as usize / SGL_DESCRIPTOR_LEN;
            if count == 0 || !descriptor.len.is_multiple_of(SGL_DESCRIPTOR_LEN as u64) {
                return Err(Status::SGL_SEGMENT_INVALID);
            }
            seen += count;
            if seen > SGL_DESCRIPTORS_MAX {
                return Err(Status::SGL_COUNT_INVALID);
            }
            let is_last_segment = descriptor.kind == SglKind::LastSegment;
            let base = descriptor.address;
            let mut next = None;
            for i in 0..count {
                let mut bytes = [0; SGL_DESCRIPTOR_LEN];
                let iova = base.wrapping_add((i * SGL_DESCRIPTOR_LEN) as u64);
                bus.read(iova, &mut bytes).map_err(|BusError| Status::DATA_TRANSFER_ERROR)?;
                let entry = Descriptor::parse(&bytes)?;
                if entry.is_segment() {
                    // Only the last descriptor of a segment that is not the last may point to a segment.
                    if is_last_segment || i + 1 != count {
                        return Err(Status::SGL_SEGMENT_INVALID);
                    }
                    next = Some(entry);
                } else {
                    self.push_descriptor(rules, &entry, &mut left)?;
                }
            }
            match next {
                Some(entry) => descriptor = entry,
                None if is_last_segment => break,
                // A segment descriptor must lead to another segment.
                None => return Err(Status::SGL_SEGMENT_INVALID),
            }
        }
        if left > 0 { Err(Status::SGL_LENGTH_INVALID) } else { Ok(()) }
    }

    fn push_descriptor(
        &mut self,
        rules: PointerRules,
        descriptor: &Descriptor,
        left: &mut u64,
    ) -> Result<(), Status> {
        if descriptor.kind == SglKind::BitBucket && rules.sgls & 1 << 16 == 0 {
            return Err(Status::SGL_TYPE_INVALID);
        }
        if descriptor.kind == SglKind::BitBucket && !rules.to_host {
            return Ok(());
        }
        if descriptor.len > *left {
            return Err(Status::SGL_LENGTH_INVALID);
        }
        *left -= descriptor.len;
        match descriptor.kind {
            SglKind::BitBucket => self.segments.push(Segment { iova: None, len: descriptor.len }),
            _ => {
                let is_aligned = descriptor.address.is_multiple_of(4) && descriptor.len.is_multiple_of(4);
                if rules.sgls & 3 == 2 && !is_aligned {
                    return Err(Status::INVALID_FIELD);
                }
                if descriptor.address.checked_add(descriptor.len).is_none() {
                    return Err(Status::DATA_TRANSFER_ERROR);
                }
                if descriptor.len > 0 {
                    self.push(descriptor.address, descriptor.len);
                }
            }
        }
        Ok(())
    }

    /// Copies `data` to the host. Bit buckets take their part of it.
    pub(crate) fn write(&self, bus: &mut Bus, data: &[u8]) -> Result<(), Status> {
        let mut at = 0;
        for segment in &self.segments {
            let part = &data[at.min(data.len())..data.len().min(at + segment.len as usize)];
            if let Some(iova) = segment.iova.filter(|_| !part.is_empty()) {
                bus.write(iova, part).map_err(|BusError| Status::DATA_TRANSFER_ERROR)?;
            }
            at += segment.len as usize;
        }
        Ok(())
    }

    /// Copies the host's data to `out`.
    pub(crate) fn read(&self, bus: &mut Bus, out: &mut [u8]) -> Result<(), Status> {
        let mut at = 0;
        for segment in &self.segments {
            let Some(iova) = segment.iova else { continue };
            let end = out.len().min(at + segment.len as usize);
            let part = &mut out[at..end];
            if !part.is_empty() {
                bus.read(iova, part).map_err(|BusError| Status::DATA_TRANSFER_ERROR)?;
            }
            at = end;
        }
        Ok(())
    }

    /// Checks that the bus would allow the transfer, before anything moves.
    pub(crate) fn check(&self, bus: &mut Bus, to_host: bool) -> Result<(), Status> {
        for segment in &self.segments {
            if let Some(iova) = segment.iova {
                bus.check(iova, segment.len, to_host).map_err(|BusError| Status::DATA_TRANSFER_ERROR)?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SglKind {
    Data,
    BitBucket,
    Segment,
    LastSegment,
}

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    kind: SglKind,
    address: u64,
    len: u64,
}

impl Descriptor {
    /// Address in bytes 7:0, length in bytes 11:8, type and sub type in byte 15.
    fn parse(bytes: &[u8; 16]) -> Result<Self, Status> {
        let kind = match bytes[15] >> 4 {
            0 => SglKind::Data,
            1 => SglKind::BitBucket,
            2 => SglKind::Segment,
            3 => SglKind::LastSegment,
            _ => return Err(Status::SGL_TYPE_INVALID),
        };
        // Sub type 1h is an offset into a controller memory buffer, which the model does not have.
        match bytes[15] & 0xf {
            0 => {}
            1 => return Err(Status::SGL_OFFSET_INVALID),
            _ => return Err(Status::SGL_TYPE_INVALID),
        }
        let address = u64::from_le_bytes(first(bytes));
        Ok(Self { kind, address, len: u64::from(u32::from_le_bytes(first(&bytes[8..]))) })
    }

    fn is_segment(&self) -> bool {
        matches!(self.kind, SglKind::Segment | SglKind::LastSegment)
    }
}
