//! The block of a request that the medium has failed: the control thread reads it in the controller's Error Information log,
//! while the request waits. Reactor context.

use super::{Life, PairDriver, State, with_driver};
use crate::control::Command;
use aryk_bdev::{Lba, Op, Status};
use aryk_nvme::errors::{Class, classify};
use aryk_nvme::queue::Completed;
use aryk_nvme::spec::status::{Code, Status as DeviceStatus};
use aryk_reactor::{Cx, DriverKey};
use aryk_slots::Key;
use std::time::Duration;

/// For how long a failed request waits for its block. Without an answer, it fails as a whole.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// A request of which a block has failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LostBlock {
    pub(crate) qid: u16,
    pub(crate) cid: u16,
    pub(crate) code: Code,
    pub(crate) first: u64,
    pub(crate) blocks: u64,
    request: Key,
}

/// The control thread has read which block has failed, or that the log does not say.
pub(crate) fn located(key: DriverKey, lost: &LostBlock, lba: Option<u64>, cx: &mut Cx) {
    with_driver(key, cx, |driver, cx| {
        // The request may have been aborted, or have waited long enough.
        let Some(request) = driver.requests.get(lost.request) else { return };
        let State::Locating(status) = request.state else { return };
        driver.delayed.retain(|&(_, delayed)| delayed != lost.request);
        driver.fail_at(lost.request, status, lba.map(Lba), cx);
    });
}

impl PairDriver {
    /// Lets a failed request wait for its block, if the controller says that its log has more about the failure. Returns whether
    /// the request waits.
    #[cold]
    pub(super) fn locate(&mut self, key: Key, completed: &Completed, cx: &mut Cx) -> bool {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let (op, first, blocks) = (request.io.op, request.io.lba.0, request.io.blocks.0);
        let status = completed.status;
        let is_plain = request.state == State::AtController(1, Status::Ok) && !request.is_aborted;
        let is_range = blocks > 1 && !matches!(op, Op::Flush | Op::Copy);
        let Life::Live(live) = &self.life else { return false };
        if !is_plain || !is_range || !status.has_more() || classify(status, [0; 3]).class != Class::Media {
            return false;
        }
        request.state = State::Locating(status);
        let until = cx.now().after(WAIT_MAX);
        self.delayed.push((until, key));
        let driver = self.id;
        cx.call_at(until, move |cx| cx.wake_driver(driver));
        let (qid, cid, code) = (live.pair.qid(), completed.cid, status.code());
        self.shared.send(Command::Locate(LostBlock { qid, cid, code, first, blocks, request: key }));
        self.give_pages_back(key);
        true
    }

    /// Ends a request that the medium has failed, at this block if it is known.
    pub(super) fn fail_at(&mut self, key: Key, answer: DeviceStatus, lba: Option<Lba>, cx: &mut Cx) {
        let request = self.requests.get(key).expect("the caller has found it");
        let channel = self.channels.get(request.channel).expect("it has requests");
        channel.report(&request.io, answer, Status::Medium, lba);
        self.finish(key, Status::Medium, cx);
    }
}
