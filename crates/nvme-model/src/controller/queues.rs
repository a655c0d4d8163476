//! Creation and deletion of I/O queues (NVMe 2.0 §5.4 to §5.7). Context: the holder of the controller.

use super::{Controller, Status};
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::wire::SubmissionEntry;

/// CC.IOSQES and CC.IOCQES: entries of 64 and 16 bytes, as powers of two.
const IOSQES: u32 = 6;
const IOCQES: u32 = 4;

impl Controller {
    /// Checks the fields that both creation commands have; returns the identifier and the number of entries.
    fn check_new_queue(&self, entry: &SubmissionEntry, exists: bool) -> Result<(u16, u32), Status> {
        let qid = entry.cdw10.get() as u16;
        let size = entry.cdw10.get() >> 16;
        if qid == 0 || qid > self.features.queues_granted(&self.config) || exists {
            return Err(Status::INVALID_QID);
        }
        if size == 0 || size > self.config.queue_entries.clamp(2, 1 << 16) - 1 {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        // CAP.CQR is 1: the queue must be physically contiguous.
        if entry.cdw11.get() & 1 == 0 {
            return Err(Status::INVALID_FIELD);
        }
        if !entry.prp1().is_multiple_of(self.cc.page()) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        Ok((qid, size + 1))
    }

    pub(super) fn create_cq(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let exists = self.cqs.get(usize::from(entry.cdw10.get() as u16)).is_some_and(Option::is_some);
        let (qid, entries) = self.check_new_queue(entry, exists)?;
        if self.cc.iocqes() != IOCQES {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let has_interrupts = entry.cdw11.get() & 2 != 0;
        let vector = (entry.cdw11.get() >> 16) as u16;
        if has_interrupts && vector >= self.bus.vector_count() {
            return Err(Status::INVALID_VECTOR);
        }
        let vector = has_interrupts.then_some(vector);
        self.cqs[usize::from(qid)] = Some(CompletionQueue::new(entry.prp1(), entries, vector));
        self.bar.write(self.doorbell_offset(qid, true), 0);
        Ok(0)
    }

    pub(super) fn create_sq(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let exists = self.sqs.get(usize::from(entry.cdw10.get() as u16)).is_some_and(Option::is_some);
        let (qid, entries) = self.check_new_queue(entry, exists)?;
        if self.cc.iosqes() != IOSQES {
            return Err(Status::INVALID_QUEUE_SIZE);
        }
        let cqid = (entry.cdw11.get() >> 16) as u16;
        if cqid == 0 || cqid > self.features.queues_granted(&self.config) {
            return Err(Status::INVALID_QID);
        }
        let Some(cq) = &mut self.cqs[usize::from(cqid)] else { return Err(Status::CQ_INVALID) };
        cq.users += 1;
        self.sqs[usize::from(qid)] = Some(SubmissionQueue::new(entry.prp1(), entries, cqid));
        self.io_sqs.push(qid);
        self.bar.write(self.doorbell_offset(qid, false), 0);
        Ok(0)
    }

    /// Deletes a submission queue. The commands that the controller holds complete first, as aborted.
    pub(super) fn delete_sq(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let qid = entry.cdw10.get() as u16;
        if qid == 0 || self.sqs.get(usize::from(qid)).is_none_or(Option::is_none) {
            return Err(Status::INVALID_QID);
        }
        while let Some(held) = self.in_flight.take_of(qid) {
            self.release(&held);
            self.refuse(qid, held.entry.cid.get(), Status::SQ_DELETED);
            if let Some(second) = &held.second {
                self.refuse(qid, second.cid.get(), Status::SQ_DELETED);
            }
        }
        if let Some(sq) = self.sqs[usize::from(qid)].take()
            && let Some(cq) = &mut self.cqs[usize::from(sq.cqid)]
        {
            cq.users -= 1;
        }
        self.io_sqs.retain(|&other| other != qid);
        self.bar.write(self.doorbell_offset(qid, false), 0);
        Ok(0)
    }

    pub(super) fn delete_cq(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let qid = entry.cdw10.get() as u16;
        match self.cqs.get_mut(usize::from(qid)) {
            Some(slot) if qid != 0 && slot.is_some() => {
                if slot.as_ref().is_some_and(|cq| cq.users > 0) {
                    return Err(Status::INVALID_QUEUE_DELETION);
                }
                *slot = None;
            }
            _ => return Err(Status::INVALID_QID),
        }
        self.bar.write(self.doorbell_offset(qid, true), 0);
        Ok(0)
    }
}
