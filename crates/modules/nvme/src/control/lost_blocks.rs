//! Which block of a failed request is bad: the controller's Error Information log says so. One read of the log answers for all
//! requests that have failed until then.

use super::{Command, Life, Thread};
use crate::driver::{self, LostBlock};
use aryk_nvme::admin;
use aryk_nvme::spec::log::{self, ErrorEntry};
use tokio::sync::oneshot;

/// Entries that are read: those of the last failures.
const ENTRIES_MAX: u16 = 64;

/// Requests that wait for their blocks; the reactors bound their number, and the time for which they wait.
#[derive(Default)]
pub(super) struct LostBlocks {
    waiting: Vec<LostBlock>,
    /// Those that had failed before the log was read, while it is read.
    asked: Vec<LostBlock>,
}

impl Thread {
    /// Finds the block that has failed.
    pub(super) fn locate(&mut self, lost: LostBlock) {
        self.lost_blocks.waiting.push(lost);
        self.read_error_log();
    }

    fn read_error_log(&mut self) {
        let Life::Driven(driven) = &self.life else { return self.lost_blocks.waiting.clear() };
        if !self.lost_blocks.asked.is_empty() || self.lost_blocks.waiting.is_empty() {
            return;
        }
        let entries = driven.controller.info().map_or(1, |info| info.error_entries.min(ENTRIES_MAX));
        let len = usize::from(entries) * size_of::<ErrorEntry>();
        self.lost_blocks.asked = std::mem::take(&mut self.lost_blocks.waiting);
        let (reply, answer) = oneshot::channel();
        // The log is the controller's; its event stays.
        self.admin(&admin::get_log(log::ERROR_INFORMATION, u32::MAX, 0, len, true), reply);
        let sender = self.sender.clone();
        tokio::task::spawn_local(async move {
            let answer = answer.await.ok().and_then(Result::ok).filter(|answer| answer.status.is_success());
            // Without an answer, all requests learn that their blocks are not known.
            let _ = sender.send(Command::ErrorLog(answer.map(|answer| answer.data).unwrap_or_default()));
        });
    }

    /// The log was read, newest entry first.
    pub(super) fn error_log(&mut self, log: &[u8]) {
        let entries: Vec<ErrorEntry> = ErrorEntry::decode(log).collect();
        for lost in std::mem::take(&mut self.lost_blocks.asked) {
            let LostBlock { qid, cid, code, first, blocks, .. } = lost;
            let lba = entries.iter().find_map(|entry| entry.block_of(qid, cid, code, first, blocks));
            self.pairs.send(qid, move |key, cx| driver::located(key, &lost, lba, cx));
        }
        self.read_error_log();
    }
}
