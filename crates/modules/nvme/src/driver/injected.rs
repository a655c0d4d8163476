//! Errors that an operator injects into requests: a drive that answers so would have the same effect. Reactor context.

use super::{Life, PairDriver, Start, State, with_driver};
use crate::shared::Shared;
use crate::status::decide;
use aryk_bdev::{Op, Status};
use aryk_nvme::inject::Injections;
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Status as DeviceStatus;
use aryk_reactor::{Cx, DriverKey};
use aryk_slots::Key;
use std::sync::Arc;
use std::time::Duration;

/// The injections of a controller; `None` if there are none.
pub(super) fn of(shared: &Shared) -> Option<Arc<Injections>> {
    Some(Arc::clone(&shared.injected().io)).filter(|injections| !injections.are_over())
}

/// Takes over the injections of the controller, as they are now.
pub(crate) fn set_injections(shared: &Shared, key: DriverKey, cx: &mut Cx) {
    with_driver(key, cx, |driver, _| driver.injections = of(shared));
}

/// The opcode of a request's command; of the first of two.
const fn opcode_of(op: Op) -> u8 {
    match op {
        Op::Read => io::READ,
        Op::Write => io::WRITE,
        Op::Flush => io::FLUSH,
        Op::Compare | Op::CompareAndWrite => io::COMPARE,
        Op::WriteZeroes => io::WRITE_ZEROES,
        Op::Unmap => io::DATASET_MANAGEMENT,
        Op::Copy => io::COPY,
    }
}

impl PairDriver {
    /// Starts a request of whose kind some may get an injected status.
    #[cold]
    #[inline(never)]
    pub(super) fn start_with_injections(&mut self, key: Key, cx: &mut Cx) -> Start {
        let Some(injections) = self.injections.clone() else { return self.start_command(key, cx) };
        if injections.are_over() {
            self.injections = None;
        }
        let request = self.requests.get_mut(key).expect("the caller has a request");
        let (op, opcode) = (request.io.op, opcode_of(request.io.op));
        let would_submit = match &self.life {
            Life::Live(live) => live.pair.is_running() && (live.has_write_cache || op != Op::Flush),
            Life::Away | Life::Failing | Life::Closed => false,
        };
        if would_submit && let Some((status, after)) = injections.withhold(opcode) {
            request.state = State::Withheld(status);
            let at = cx.now().after(Duration::from_nanos(after));
            self.delayed.push((at, key));
            let driver = self.id;
            cx.call_at(at, move |cx| cx.wake_driver(driver));
            return Start::AtController;
        }
        let start = self.start_command(key, cx);
        let request = self.requests.get_mut(key).expect("the caller has a request");
        if matches!(start, Start::AtController)
            && let State::AtController(commands, _) = request.state
            && let Some(status) = injections.replace(opcode)
        {
            request.state = State::Replaced(commands, status);
        }
        start
    }

    /// Takes the controller's answer to a request that has another.
    #[cold]
    pub(super) fn complete_replaced(&mut self, key: Key, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let State::Replaced(left, status) = request.state else {
            unreachable!("a command in flight is at the controller");
        };
        if left > 1 {
            request.state = State::Replaced(left - 1, status);
        } else {
            self.answer(key, status, cx);
        }
    }

    /// Answers a request as if the controller had.
    #[cold]
    pub(super) fn answer(&mut self, key: Key, status: DeviceStatus, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        request.state = State::AtController(1, Status::Ok);
        let delays = match &self.life {
            Life::Live(live) => {
                live.stats.count_error(status);
                live.retry_delays
            }
            Life::Away | Life::Failing | Life::Closed => [0; 3],
        };
        let outcome = decide(status, delays, self.shared.retry_delay_max);
        self.complete_otherwise(key, status, outcome, cx);
    }
}
