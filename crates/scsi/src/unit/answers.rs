//! Rare commands: those that are answered at once, and the start of those that take several requests. Reactor context; these
//! functions may allocate.

use super::{Begun, Failure, Request, UnitChannel};
use crate::cdb::{Check, Command, PageControl, Transfer};
use crate::inquiry::{self, UNMAP_RANGES_MAX};
use crate::{Sense, mode, opcodes};
use aryk_bdev::{Blocks, Bytes, Io, Lba, Op, Tag};
use aryk_dma::Sgl;
use aryk_reactor::Cx;
use std::sync::Arc;

impl UnitChannel {
    #[cold]
    pub(super) fn begin_rare(&mut self, command: &Command, request: &Request<'_>, cx: &mut Cx) -> Begun {
        let into = request.data_in;
        match *command {
            Command::Read(_) | Command::Write(_) => unreachable!("plain commands are handled elsewhere"),
            Command::TestUnitReady => Ok(Some(0)),
            Command::RequestSense { descriptors, allocation } => {
                // The attention is the result of this command, not its failure.
                let sense = self.attention().unwrap_or(Sense::NONE);
                let (bytes, len) = if descriptors { sense.descriptors() } else { sense.fixed() };
                Ok(Some(copy_answer(&bytes[..len], allocation, into)))
            }
            Command::Inquiry { page, allocation } => {
                let data = page.map_or_else(|| Ok(inquiry::standard()), |p| inquiry::page(&self.nexus, p))?;
                Ok(Some(copy_answer(&data, allocation, into)))
            }
            Command::ReadCapacity10 => Ok(Some(copy_answer(&self.capacity_10(), u32::MAX, into))),
            Command::ReadCapacity16 { allocation } => {
                Ok(Some(copy_answer(&self.capacity_16(), allocation, into)))
            }
            Command::GetLbaStatus { lba, allocation } => {
                Ok(Some(copy_answer(&self.lba_status(lba)?, allocation, into)))
            }
            Command::ModeSense { ten, no_blocks, long, control, page, subpage, allocation } => {
                let query = mode::Query { ten, no_blocks, long, control, page, subpage };
                Ok(Some(copy_answer(&self.mode_sense(query)?, allocation, into)))
            }
            Command::ModeSelect { ten, save, length } => self.mode_select((ten, save), length, request, cx),
            Command::ReportLuns { select, allocation } => {
                Ok(Some(copy_answer(&report_luns(select, &[self.nexus.unit()])?, allocation, into)))
            }
            Command::ReportOpcodes { which, timeouts, allocation } => {
                Ok(Some(copy_answer(&opcodes::report(which, timeouts)?, allocation, into)))
            }
            Command::ReserveIn { action, allocation } => {
                Ok(Some(copy_answer(&self.reserve_in(action)?, allocation, into)))
            }
            Command::ReserveOut { action, scope, kind, length } => {
                self.reserve_out(action, (scope, kind), length, request, cx)
            }
            Command::CompareAndWrite(transfer) => self.compare_and_write(transfer, request, cx),
            Command::WriteSame { lba, blocks, unmap, zeroes } => {
                self.write_same(lba, blocks, unmap, zeroes, request, cx)
            }
            Command::Unmap { length } => self.unmap(length, request, cx),
            Command::SynchronizeCache { lba, blocks } => {
                self.check_range(lba, blocks)?;
                self.flush(request, cx)
            }
            Command::StartStop { flush: true, .. } => self.flush(request, cx),
            Command::StartStop { .. } => Ok(Some(0)),
            Command::Verify { lba, blocks, check } => self.verify(lba, blocks, check, request, cx),
        }
    }

    fn capacity_10(&self) -> [u8; 8] {
        let geometry = self.disk.bdev().geometry();
        // All ones: the initiator must use READ CAPACITY (16).
        let last = u32::try_from(geometry.blocks.saturating_sub(Blocks(1)).0).unwrap_or(u32::MAX);
        let mut data = [0; 8];
        data[..4].copy_from_slice(&last.to_be_bytes());
        data[4..].copy_from_slice(&geometry.block_size.to_be_bytes());
        data
    }

    fn capacity_16(&self) -> [u8; 32] {
        let geometry = self.disk.bdev().geometry();
        let physical = (geometry.physical_block_size / geometry.block_size).max(1);
        let mut data = [0; 32];
        data[..8].copy_from_slice(&geometry.blocks.saturating_sub(Blocks(1)).0.to_be_bytes());
        data[8..12].copy_from_slice(&geometry.block_size.to_be_bytes());
        data[13] = physical.ilog2() as u8;
        data[14] = u8::from(self.nexus.unmaps()) << 7;
        data
    }

    /// The blocks from `lba` to the end of the disk; none if the disk has shrunk to fewer blocks.
    fn blocks_from(&self, lba: Lba) -> Blocks {
        self.disk.bdev().blocks().saturating_sub(lba - Lba::ZERO)
    }

    /// One descriptor (SBC-3, section 5.4), which reports all blocks from `lba` on as mapped. No module can report unmapped
    /// blocks without blocking: a file's holes are found by SEEK_DATA, a system call that may read from the store, and io_uring
    /// has no such operation. To report an unmapped block as *mapped* is always correct: it reads as zeroes.
    fn lba_status(&self, lba: Lba) -> Result<[u8; 24], Sense> {
        self.check_range(lba, Blocks(1))?;
        let blocks = u32::try_from(self.blocks_from(lba).0).unwrap_or(u32::MAX);
        let mut data = [0; 24];
        data[3] = 20;
        data[8..16].copy_from_slice(&lba.0.to_be_bytes());
        data[16..20].copy_from_slice(&blocks.to_be_bytes());
        Ok(data)
    }

    fn mode_sense(&self, query: mode::Query) -> Result<Vec<u8>, Sense> {
        let lun = self.lun();
        let mode = if query.control == PageControl::Saved { lun.saved_mode() } else { lun.mode() };
        mode::sense(query, mode, mode::Disk::of(&self.nexus))
    }

    fn mode_select(
        &mut self,
        (ten, save): (bool, bool),
        length: u32,
        request: &Request<'_>,
        cx: &mut Cx,
    ) -> Begun {
        let data = request.data_out;
        if length > data.len() {
            return Err(Failure::Overrun(Bytes(length.into())));
        }
        let disk = mode::Disk::of(&self.nexus);
        if save && !disk.saves {
            return Err(Sense::in_cdb_bit(1, 0).into());
        }
        let mut list = [0; mode::LIST_MAX];
        data.read(0, list.get_mut(..length as usize).ok_or(Sense::LIST_LENGTH)?);
        let nexus = Arc::clone(&self.nexus);
        let select = async move |requested| {
            let change = |mode| mode::select(&list[..length as usize], ten, mode, disk);
            nexus.lun().select(&nexus, requested, save, change).await
        };
        self.start_external(request, length, select, cx)
    }

    fn compare_and_write(&mut self, transfer: Transfer, request: &Request<'_>, cx: &mut Cx) -> Begun {
        if transfer.blocks > Blocks(inquiry::compare_blocks_max(self.disk.bdev()).into()) {
            return Err(Sense::in_cdb(13).into());
        }
        self.transfer(Op::CompareAndWrite, transfer, request, cx)
    }

    fn flush(&mut self, request: &Request<'_>, cx: &mut Cx) -> Begun {
        if !self.disk.bdev().device().ops().contains(Op::Flush) {
            // The disk has no cache.
            return Ok(Some(0));
        }
        let io = Io {
            tag: Tag(0),
            op: Op::Flush,
            fua: false,
            may_unmap: false,
            lba: Lba::ZERO,
            blocks: Blocks::ZERO,
            source: Lba::ZERO,
            data: Sgl::EMPTY,
        };
        self.start(request, 0, None, io, cx);
        Ok(None)
    }

    fn write_same(
        &mut self,
        lba: Lba,
        blocks: Blocks,
        unmap: bool,
        zeroes: bool,
        request: &Request<'_>,
        cx: &mut Cx,
    ) -> Begun {
        // 0 blocks extend to the end of the disk (SBC-3, section 5.43).
        self.check_range(lba, blocks)?;
        let blocks = if blocks == Blocks::ZERO { self.blocks_from(lba) } else { blocks };
        let fua = self.check_change()?;
        if blocks > inquiry::range_blocks_max(&self.nexus) {
            return Err(Sense::in_cdb(if request.cdb.len() < 16 { 7 } else { 10 }).into());
        }
        if unmap && !self.nexus.unmaps() {
            return Err(Sense::in_cdb_bit(1, 3).into());
        }
        // Deallocated blocks read as zeroes too, so that the data of WRITE SAME with UNMAP can be read back.
        let op = Op::WriteZeroes;
        let all_zeroes =
            Io { tag: Tag(0), op, fua, may_unmap: unmap, lba, blocks, source: Lba::ZERO, data: Sgl::EMPTY };
        if zeroes {
            self.start(request, 0, None, all_zeroes, cx);
            return Ok(None);
        }
        let block = self.data_of(request.data_out, Blocks(1), 1)?;
        let mut pattern = vec![0; block.len() as usize];
        block.read(0, &mut pattern);
        if pattern.iter().all(|byte| *byte == 0) {
            self.start(request, block.len(), None, all_zeroes, cx);
        } else {
            return self.start_loop(request, block.len(), (Op::Write, lba, blocks, fua), &pattern, cx);
        }
        Ok(None)
    }

    fn unmap(&mut self, length: u32, request: &Request<'_>, cx: &mut Cx) -> Begun {
        if !self.nexus.unmaps() {
            let read_only = !self.nexus.is_writable();
            return Err(if read_only { Sense::WRITE_PROTECTED } else { Sense::OPCODE }.into());
        }
        self.check_change()?;
        let data = request.data_out;
        match length {
            0 => return Ok(Some(0)),
            1..8 => return Err(Sense::LIST_LENGTH.into()),
            _ if length > data.len() => return Err(Failure::Overrun(Bytes(length.into()))),
            _ => {}
        }
        let mut header = [0; 8];
        data.read(0, &mut header);
        let bytes = u32::from(u16::from_be_bytes([header[2], header[3]]));
        // A truncated descriptor at the end is ignored (SBC-3, section 5.28.2).
        let ranges = bytes.min(length - 8) / 16;
        if ranges > UNMAP_RANGES_MAX {
            return Err(Sense::in_list(2).into());
        }
        let mut sum = Blocks::ZERO;
        for i in 0..ranges {
            let (lba, blocks) = super::jobs::range(data, i);
            sum += blocks;
            // The LBA of an empty range is not checked.
            if blocks > Blocks::ZERO {
                self.check_range(lba, blocks)?;
            }
        }
        if sum > inquiry::range_blocks_max(&self.nexus) {
            return Err(Sense::in_list(2).into());
        }
        self.start_unmap(request, length, data, ranges, cx)
    }

    fn verify(
        &mut self,
        lba: Lba,
        blocks: Blocks,
        check: Check,
        request: &Request<'_>,
        cx: &mut Cx,
    ) -> Begun {
        self.check_range(lba, blocks)?;
        match check {
            Check::Medium if blocks == Blocks::ZERO => Ok(Some(0)),
            Check::Medium => {
                let nothing = vec![0; 1 << self.block_shift];
                self.start_loop(request, 0, (Op::Read, lba, blocks, false), &nothing, cx)
            }
            Check::Data => {
                let transfer = Transfer { lba, blocks, fua: false };
                let data = self.data_of(request.data_out, blocks, 1)?;
                if blocks == Blocks::ZERO {
                    return Ok(Some(0));
                }
                let Transfer { lba, blocks, .. } = transfer;
                let op = Op::Compare;
                let io = Io {
                    tag: Tag(0),
                    op,
                    fua: false,
                    may_unmap: false,
                    lba,
                    blocks,
                    source: Lba::ZERO,
                    data,
                };
                self.start(request, data.len(), None, io, cx);
                Ok(None)
            }
            Check::OneBlock => {
                let block = self.data_of(request.data_out, blocks.min(Blocks(1)), 1)?;
                if blocks == Blocks::ZERO {
                    return Ok(Some(0));
                }
                let mut pattern = vec![0; block.len() as usize];
                block.read(0, &mut pattern);
                let all = (Op::Compare, lba, blocks, false);
                self.start_loop(request, block.len(), all, &pattern, cx)
            }
        }
    }
}

/// Copies an answer, up to the allocation length and the room of the initiator's list; returns the number of bytes.
pub(crate) fn copy_answer(data: &[u8], allocation: u32, into: Sgl) -> u32 {
    let len = data.len().min(allocation as usize).min(into.len() as usize);
    into.write(0, &data[..len]);
    len as u32
}

/// The answer to REPORT LUNS (SPC-4, section 6.33).
pub(crate) fn report_luns(select: u8, luns: &[u16]) -> Result<Vec<u8>, Sense> {
    // Value 1 asks for well known logical units, of which there are none.
    let luns = match select {
        0x00 | 0x02 => luns,
        0x01 => &[],
        _ => return Err(Sense::in_cdb(2)),
    };
    let mut data = (8 * luns.len() as u32).to_be_bytes().to_vec();
    data.extend([0; 4]);
    luns.iter().for_each(|lun| data.extend(crate::target::lun_bytes(*lun)));
    Ok(data)
}
