//! What the controller answers: the ends of commands. Reactor context.

use super::link::Link;
use super::live::Live;
use super::{Loss, QueueDriver, Running, State};
use crate::WITHOUT_LIMIT;
use crate::driver::worse;
use crate::fabrics::control::Command;
use crate::status::{Outcome, RETRY_DELAY_MIN, decide, decide_harmless, errno};
use aryk_bdev::{DeviceError, Failure, Op, Status};
use aryk_nvme::replay::Change;
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_reactor::{Cx, Nanos};
use aryk_slots::Key;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl QueueDriver {
    /// Takes what has come by a path. Returns the number of commands that ended, at least 1 if there was anything.
    pub(super) fn receive(&mut self, path: usize, cx: &mut Cx) -> Result<u32, Loss> {
        match self.lives[path].as_deref() {
            Some(Live { link: Link::Tcp(_), .. }) => self.receive_tcp(path, cx),
            Some(Live { link: Link::Rdma(_), .. }) => self.receive_rdma(path, cx),
            None => Ok(0),
        }
    }

    /// Sends what has been added for a path.
    pub(super) fn send(&mut self, path: usize, cx: &mut Cx) -> Result<(), Loss> {
        match self.lives[path].as_deref_mut() {
            Some(Live { link: Link::Tcp(_), .. }) => self.send_tcp(path, cx),
            Some(Live { link: Link::Rdma(rdma), .. }) => Ok(rdma.wire.flush()?),
            None => Ok(()),
        }
    }

    #[inline]
    pub(super) fn complete(
        &mut self,
        Running { key, is_second }: Running,
        answer: NvmeStatus,
        is_intact: bool,
        now: Nanos,
        cx: &mut Cx,
    ) -> Result<(), Loss> {
        let request = self.requests.get_mut(key).expect("it is at the controller");
        let State::AtController { path, left, status: earlier } = request.state else {
            unreachable!("a command in flight is of a request at the controller")
        };
        let is_last = left == 1 || is_second;
        if is_last && request.io.op.is_change() {
            let channel = self.channels.get(request.channel).expect("it has requests");
            let (slba, blocks) = (request.io.lba.0, request.io.blocks.0);
            self.last_change = now.0;
            self.history.add(Change { nsid: channel.namespace.nsid(), slba, blocks, completed: now.0 });
        }
        if answer.is_success() && is_intact && left == 1 && earlier.is_ok() {
            let channel = self.channels.get(request.channel).expect("it has requests");
            let bytes = channel.commands.bytes(request.io.blocks.0);
            channel.counts.add(path, request.io.op, bytes, now.0.saturating_sub(request.last_attempt));
            self.finish(key, Status::Ok, cx);
            return Ok(());
        }
        self.complete_otherwise(key, answer, is_intact, cx)
    }

    /// Takes an answer that is a failure, or one of two.
    #[cold]
    fn complete_otherwise(
        &mut self,
        key: Key,
        answer: NvmeStatus,
        is_intact: bool,
        cx: &mut Cx,
    ) -> Result<(), Loss> {
        let answer = match is_intact || !answer.is_success() {
            true => answer,
            false => Code::TRANSIENT_TRANSPORT_ERROR.status(),
        };
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let State::AtController { path, left, status: earlier } = request.state else { return Ok(()) };
        let Some(live) = &self.lives[path] else { return Ok(()) };
        let delay_max = self.shared.config.patience.as_nanos() as u64;
        let mut outcome = decide(answer, live.retry_delays, delay_max);
        if !request.io.op.is_change() {
            outcome = decide_harmless(answer, live.retry_delays, delay_max, outcome);
        }
        if answer.code() == Code::TRANSIENT_TRANSPORT_ERROR && request.io.op != Op::CompareAndWrite {
            // Data was damaged on its way: reads and writes alike may be done again.
            outcome = Outcome::Retry(RETRY_DELAY_MIN, Status::Medium);
        }
        let is_alone = left == 1 && earlier.is_ok() && !request.is_aborted;
        if is_alone
            && request.io.op != Op::CompareAndWrite
            && let Some(state) = access_after(answer)
        {
            self.lose_access(key, path, state, cx);
            return Ok(());
        }
        let retries = self.shared.config.retries;
        let has_attempts = request.attempts < retries || retries == WITHOUT_LIMIT;
        let may_retry = is_alone && request.io.op != Op::CompareAndWrite && has_attempts;
        let (status, mut loss) = match outcome {
            Outcome::Done(status) => (status, None),
            Outcome::Retry(delay, _) if may_retry => {
                request.attempts = request.attempts.saturating_add(1);
                self.shared.retried.fetch_add(1, Ordering::Relaxed);
                self.delay(key, Duration::from_nanos(delay), cx);
                return Ok(());
            }
            Outcome::Retry(_, status) => (status, None),
            Outcome::Reset(status) => (status, Some(Loss::State(answer))),
        };
        let status = worse(earlier, status);
        if left > 1 {
            request.state = State::AtController { path, left: left - 1, status };
            return loss.take().map_or(Ok(()), Err);
        }
        if !matches!(status, Status::Ok | Status::Miscompare | Status::Aborted) {
            let io = request.io;
            let device = DeviceError {
                code: answer.code().0,
                is_final: answer.is_final(),
                crd: answer.crd(),
                name: answer.code().name(),
                lba: None,
            };
            let failure = Failure::now(io.op, io.lba, io.blocks, errno(status)).with_device(device);
            self.channels.get(request.channel).expect("it has requests").namespace.failed(failure);
        }
        self.finish(key, status, cx);
        loss.take().map_or(Ok(()), Err)
    }

    /// A path does not give access to a request's namespace any more: the request, which was not executed, takes another.
    fn lose_access(&mut self, key: Key, path: usize, state: AnaState, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        if request.attempts == 0 {
            request.first_attempt = 0;
        }
        let namespace = &self.channels.get(request.channel).expect("it has requests").namespace;
        if namespace.paths.set_access(path, Some(state)) {
            self.shared.change_routes();
        }
        if self.shared.ask_access(path) {
            self.shared.send(Command::ReadAccess { path });
        }
        self.await_access(key, Duration::from_nanos(RETRY_DELAY_MIN), cx);
    }

    /// Has a request tried again after `delay`, because a path did not give access to its namespace, or none does: as long as
    /// requests wait for a lost controller.
    pub(super) fn await_access(&mut self, key: Key, delay: Duration, cx: &mut Cx) {
        let (now, config) = (cx.now().0, &self.shared.config);
        let request = self.requests.get_mut(key).expect("the caller has a request");
        if request.refused_since == 0 {
            request.refused_since = now;
        }
        let patience = config.fast_fail.or(config.loss_timeout);
        let waited = Duration::from_nanos(now.saturating_sub(request.refused_since));
        if patience.is_some_and(|patience| waited > patience) {
            let status = self.fail_away(key);
            return self.finish(key, status, cx);
        }
        self.delay(key, delay, cx);
    }
}

/// The access to a namespace through a path whose controller has refused a command with this status.
fn access_after(status: NvmeStatus) -> Option<AnaState> {
    match status.code() {
        Code::ANA_TRANSITION => Some(AnaState::Change),
        Code::ANA_INACCESSIBLE => Some(AnaState::Inaccessible),
        Code::ANA_PERSISTENT_LOSS => Some(AnaState::PersistentLoss),
        _ => None,
    }
}
