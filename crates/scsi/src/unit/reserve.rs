//! PERSISTENT RESERVE IN and OUT (SPC-4, sections 6.15 and 6.16). Reactor context; these may allocate, and take the unit's lock.

use super::{Failure, Request, UnitChannel};
use crate::cell::Command as Order;
use crate::reservations::{Kind, Refused};
use crate::{Sense, Which};
use aryk_reactor::Cx;
use std::rc::Rc;
use std::sync::Arc;

/// Service actions of PERSISTENT RESERVE OUT.
mod action {
    pub const REGISTER: u8 = 0;
    pub const RESERVE: u8 = 1;
    pub const RELEASE: u8 = 2;
    pub const CLEAR: u8 = 3;
    pub const PREEMPT: u8 = 4;
    pub const PREEMPT_AND_ABORT: u8 = 5;
    pub const REGISTER_AND_IGNORE: u8 = 6;
}

/// Bytes of the parameter list of all of them.
const LIST: usize = 24;

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Conflict => Self::Conflict,
            Refused::Release => Self::Sense(Sense::RELEASE),
            Refused::Key => Self::Sense(Sense::in_list(8)),
            Refused::Full => Self::Sense(Sense::REGISTRATIONS),
        }
    }
}

impl UnitChannel {
    pub(super) fn reserve_in(&self, action: u8) -> Result<Vec<u8>, Sense> {
        let shared = self.lun().shared();
        let reservations = &shared.reservations;
        let mut body = Vec::new();
        match action {
            0 => reservations.registrations().iter().for_each(|r| body.extend(r.key.to_be_bytes())),
            1 => {
                if let Some((key, kind)) = reservations.reservation() {
                    body.extend(key.to_be_bytes());
                    body.extend([0, 0, 0, 0, 0, kind as u8, 0, 0]);
                }
            }
            // Types are listed (TMV), PREEMPT AND the others may come from whoever is registered; nothing is kept over power loss.
            2 => return Ok(vec![0, 8, 0x00, 0x80, 0xea, 0x01, 0, 0]),
            3 => {
                for r in reservations.registrations() {
                    let holds = reservations.holds(r.nexus);
                    let kind = reservations.reservation().filter(|_| holds).map_or(0, |(_, k)| k as u8);
                    let id = shared.transport_id(r.nexus);
                    body.extend(r.key.to_be_bytes());
                    body.extend([0, 0, 0, 0, u8::from(holds), kind, 0, 0, 0, 0, 0, 1]);
                    body.extend((id.len() as u32).to_be_bytes());
                    body.extend(id);
                }
            }
            _ => return Err(Sense::in_cdb_bit(1, 4)),
        }
        let head = [reservations.generation().to_be_bytes(), (body.len() as u32).to_be_bytes()];
        Ok([&head.concat()[..], &body].concat())
    }

    pub(super) fn reserve_out(
        &mut self,
        action: u8,
        (scope, kind): (u8, u8),
        length: u32,
        request: &Request<'_>,
        cx: &mut Cx,
    ) -> Result<Option<u32>, Failure> {
        if action > action::REGISTER_AND_IGNORE {
            return Err(Sense::in_cdb_bit(1, 4).into());
        }
        if length as usize != LIST {
            return Err(Sense::LIST_LENGTH.into());
        }
        if length > request.data_out.len() {
            return Err(Failure::Overrun(length.into()));
        }
        let mut list = [0; LIST];
        request.data_out.read(0, &mut list);
        let word = |at: usize| u64::from_be_bytes(std::array::from_fn(|i| list[at + i]));
        let (key, new) = (word(0), word(8));
        if list[20] & 0x0d != 0 {
            // SPEC_I_PT, ALL_TG_PT, APTPL.
            return Err(Sense::in_list(20).into());
        }
        let has_kind =
            matches!(action, action::RESERVE | action::RELEASE | action::PREEMPT | action::PREEMPT_AND_ABORT);
        if has_kind && scope != 0 {
            return Err(Sense::in_cdb(2).into());
        }
        let kind = Kind::from_code(kind).ok_or(Sense::in_cdb_bit(2, 3));
        let (lun, nexus) = (Arc::clone(self.lun()), self.nexus.number());
        let mut shared = lun.shared();
        let all = &mut shared.reservations;
        let effects = match action {
            action::REGISTER => all.register(nexus, key, new, false)?,
            action::REGISTER_AND_IGNORE => all.register(nexus, key, new, true)?,
            action::RESERVE => all.reserve(nexus, key, kind?)?,
            action::RELEASE => all.release(nexus, key, kind?)?,
            action::CLEAR => all.clear(nexus, key)?,
            _ => all.preempt(nexus, key, new, kind?)?,
        };
        lun.apply(&shared, &effects);
        drop(shared);
        if action == action::PREEMPT_AND_ABORT {
            let victims = effects.removed.into_iter().filter(|n| *n != nexus).collect();
            self.abort_others(victims, request, length, cx);
            return Ok(None);
        }
        Ok(Some(length))
    }

    /// Aborts all commands of others, and answers when they are over: from then on nothing of theirs reaches the disk.
    fn abort_others(&mut self, victims: Vec<u32>, request: &Request<'_>, moved: u32, cx: &mut Cx) {
        self.wait_elsewhere(request, moved);
        let tag = request.tag;
        let (lun, cell, local) = (Arc::clone(self.lun()), Rc::clone(&self.cell), cx.local().clone());
        let task = async move {
            lun.abort(Which::Nexuses(victims)).await;
            local.defer(move |cx| cell.command(Order::Over(tag), cx));
        };
        cx.local().spawn(task).detach();
    }
}
