//! Copies of an I/O queue: the sources of a command one after the other, each to behind the one before. Reactor context.
//!
//! All sources are checked before the first is copied. A command that fails says which source was not copied.

use super::IoQueue;
use super::commands::io;
use crate::status;
use aryk_bdev::{Io, Lba, Op, Status};
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::io::{CopyFields, Rules};
use aryk_reactor::Cx;

impl IoQueue {
    /// Begins a copy, or goes on with its next source.
    pub(super) fn copy(&mut self, id: SlotId, fields: CopyFields, cx: &mut Cx) {
        match self.next_source(id, fields) {
            Ok(Some(io)) => self.submit(id, io, 0, cx),
            Ok(None) => self.reply(id, NvmeStatus::new(0), cx),
            Err(status) => {
                let failed = self.slot(id).ranges;
                self.reply_with(id, status, failed.into(), cx);
            }
        }
    }

    /// The request for the next source; `None`: all are copied.
    fn next_source(&mut self, id: SlotId, fields: CopyFields) -> Result<Option<Io>, NvmeStatus> {
        let slot = &mut self.slots[usize::from(id.0)];
        if slot.ranges == fields.sources {
            return Ok(None);
        }
        let disk = self.disks.get_mut(slot.entry.nsid(), slot.number).filter(|_| !self.is_closing);
        let disk = disk.ok_or(status::refusal(Code::INVALID_NAMESPACE_OR_FORMAT))?;
        if let Some(doom) = slot.doom {
            return Err(doom);
        }
        let data = slot.data.as_ref().map_or(&[][..], |data| data.buffer.bytes());
        if slot.ranges == 0 {
            disk.rules.check_copy(fields, data).map_err(status::refusal)?;
        }
        let source = Rules::sources(fields, data).nth(slot.ranges.into()).expect("its data was checked");
        let io = io(id, Op::Copy, fields.lba + u64::from(slot.copied), source.blocks);
        slot.ranges += 1;
        slot.copied += source.blocks;
        Ok(Some(Io { fua: fields.fua, source: Lba(source.lba), ..io }))
    }

    /// The disk has ended a source.
    pub(super) fn copied(&mut self, id: SlotId, status: Status, cx: &mut Cx) {
        let slot = self.slot(id);
        if status.is_ok() {
            let fields = CopyFields::decode(&slot.entry);
            return self.copy(id, fields, cx);
        }
        let failed = slot.ranges - 1;
        self.reply_with(id, self.status_of(id, status, Op::Copy), failed.into(), cx);
    }
}
