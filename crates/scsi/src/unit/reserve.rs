//! PERSISTENT RESERVE IN and OUT (SPC-4, sections 6.15 and 6.16). Reactor context; these functions may allocate, and take the
//! unit's lock.

use super::{Begun, Failure, Request, UnitChannel};
use crate::reservations::{Change, Kind, Refused};
use crate::saved::Port;
use crate::{Nexus, Sense};
use aryk_bdev::Bytes;
use aryk_reactor::Cx;
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
    pub const REGISTER_AND_MOVE: u8 = 7;
}

/// Bytes of the parameter list of all service actions but REGISTER AND MOVE.
const LIST: usize = 24;
/// Bytes of the parameter list of REGISTER AND MOVE, with a TransportID of 24 bytes.
const MOVE_LIST: usize = 48;

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Conflict => Self::Conflict,
            Refused::Release => Self::Sense(Sense::RELEASE),
            Refused::Key => Self::Sense(Sense::in_list(8)),
            Refused::Full | Refused::NotSaved => Self::Sense(Sense::REGISTRATIONS),
            Refused::ForeignWriter => Self::Sense(Sense::OPCODE),
            Refused::List(sense) => Self::Sense(sense),
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
            // TMV: supported types are listed; any registered initiator may use PREEMPT and PREEMPT AND ABORT; reservations can
            // be, and are, persistent over a loss of power.
            2 => {
                let can_save = u8::from(self.lun().can_save());
                let aptpl = u8::from(reservations.aptpl());
                return Ok(vec![0, 8, can_save, 0x80 | aptpl, 0xea, 0x01, 0, 0]);
            }
            3 => {
                for r in reservations.registrations() {
                    let holds = reservations.holds(r.nexus);
                    let kind = reservations.reservation().filter(|_| holds).map_or(0, |(_, k)| k as u8);
                    let port = shared.port(r.nexus);
                    let ([high, low], id) = (port.target.to_be_bytes(), port.transport_id());
                    body.extend(r.key.to_be_bytes());
                    body.extend([0, 0, 0, 0, u8::from(holds), kind, 0, 0, 0, 0, high, low]);
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
    ) -> Begun {
        let moves = action == action::REGISTER_AND_MOVE;
        let whole = if moves { MOVE_LIST } else { LIST };
        if length as usize != whole {
            return Err(Sense::LIST_LENGTH.into());
        }
        if length > request.data_out.len() {
            return Err(Failure::Overrun(Bytes(length.into())));
        }
        let mut list = [0; MOVE_LIST];
        request.data_out.read(0, &mut list[..whole]);
        let key = be64(&list, 0);
        // The nexus that receives the reservation must live until the change has ended.
        let (change, new_holder) = match moves {
            true => {
                self.registering_and_moving(&list).map(|(change, new_holder)| (change, Some(new_holder)))?
            }
            false => (self.change(action, (scope, kind), &list)?, None),
        };
        let nexus = Arc::clone(&self.nexus);
        let done = async move |requested| {
            let done = nexus.lun().reserve(&nexus, requested, key, change).await;
            drop(new_holder);
            done
        };
        self.start_external(request, length, done, cx)
    }

    /// The change that a parameter list requests.
    fn change(&self, action: u8, (scope, kind): (u8, u8), list: &[u8]) -> Result<Change, Sense> {
        let registers = matches!(action, action::REGISTER | action::REGISTER_AND_IGNORE);
        let aptpl = registers && list[20] & 1 == 1;
        // SPEC_I_PT and ALL_TG_PT are not supported; neither is APTPL, if state cannot be saved.
        if registers && (list[20] & 0x0c != 0 || aptpl && !self.lun().can_save()) {
            return Err(Sense::in_list(20));
        }
        let new = be64(list, 8);
        let kind = || {
            // Only reservations of the whole unit are supported.
            if scope != 0 {
                return Err(Sense::in_cdb(2));
            }
            Kind::from_code(kind).ok_or(Sense::in_cdb_bit(2, 3))
        };
        Ok(match action {
            action::REGISTER => Change::Register { new, ignore: false, aptpl },
            action::REGISTER_AND_IGNORE => Change::Register { new, ignore: true, aptpl },
            action::RESERVE => Change::Reserve(kind()?),
            action::RELEASE => Change::Release(kind()?),
            action::CLEAR => Change::Clear,
            action::PREEMPT => Change::Preempt { victim: new, kind: kind()?, abort: false },
            action::PREEMPT_AND_ABORT => Change::Preempt { victim: new, kind: kind()?, abort: true },
            _ => return Err(Sense::in_cdb_bit(1, 4)),
        })
    }

    /// The change that the parameter list of REGISTER AND MOVE requests (SPC-4, section 6.16.4): to another nexus of the unit.
    fn registering_and_moving(&self, list: &[u8; MOVE_LIST]) -> Result<(Change, Arc<Nexus>), Sense> {
        let aptpl = list[17] & 1 == 1;
        if aptpl && !self.lun().can_save() {
            return Err(Sense::in_list(17));
        }
        if list[20..24] != [0, 0, 0, 24] {
            return Err(Sense::in_list(20));
        }
        let initiator = Port::initiator_of(&list[24..]).ok_or(Sense::in_list(24))?;
        let target = u16::from_be_bytes([list[18], list[19]]);
        let new_holder = self.lun().find(Port { initiator, target }).ok_or(Sense::in_list(24))?;
        let to = new_holder.number();
        // A move to the requesting nexus itself is invalid.
        if to == self.nexus.number() {
            return Err(Sense::in_list(24));
        }
        Ok((Change::Move { to, new: be64(list, 8), leave: list[17] & 2 != 0, aptpl }, new_holder))
    }
}

fn be64(list: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|i| list[at + i]))
}
