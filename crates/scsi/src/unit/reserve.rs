//! PERSISTENT RESERVE IN and OUT (SPC-4, sections 6.15 and 6.16). Reactor context; these may allocate, and take the unit's lock.

use super::{Begun, Failure, Request, UnitChannel};
use crate::kept::Port;
use crate::reservations::{Change, Kind, Refused};
use crate::{Nexus, Sense};
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

/// Bytes of the parameter list of all of them but REGISTER AND MOVE.
const LIST: usize = 24;
/// Bytes of that of REGISTER AND MOVE, with a TransportID as ours are.
const MOVE_LIST: usize = 48;

impl From<Refused> for Failure {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Conflict => Self::Conflict,
            Refused::Release => Self::Sense(Sense::RELEASE),
            Refused::Key => Self::Sense(Sense::in_list(8)),
            Refused::Full | Refused::NotKept => Self::Sense(Sense::REGISTRATIONS),
            Refused::Unheeded => Self::Sense(Sense::OPCODE),
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
            // Types are listed (TMV), PREEMPT AND the others may come from whoever is registered; it can be, and is, kept over a loss of power.
            2 => {
                let can_keep = u8::from(self.lun().can_keep());
                let keeps = u8::from(reservations.keeps());
                return Ok(vec![0, 8, can_keep, 0x80 | keeps, 0xea, 0x01, 0, 0]);
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
            return Err(Failure::Overrun(length.into()));
        }
        let mut list = [0; MOVE_LIST];
        request.data_out.read(0, &mut list[..whole]);
        let key = word(&list, 0);
        // Who is to have the reservation is there until then.
        let (change, heir) = match moves {
            true => self.registering_and_moving(&list).map(|(change, heir)| (change, Some(heir)))?,
            false => (self.change(action, (scope, kind), &list)?, None),
        };
        let nexus = Arc::clone(&self.nexus);
        let done = async move |asked| {
            let done = nexus.lun().reserve(&nexus, asked, key, change).await;
            drop(heir);
            done
        };
        self.wait_for(request, length, done, cx)
    }

    /// What a parameter list asks for.
    fn change(&self, action: u8, (scope, kind): (u8, u8), list: &[u8]) -> Result<Change, Sense> {
        let registers = matches!(action, action::REGISTER | action::REGISTER_AND_IGNORE);
        let keep = registers && list[20] & 1 == 1;
        // SPEC_I_PT, ALL_TG_PT; and APTPL, if nothing can be kept.
        if registers && (list[20] & 0x0c != 0 || keep && !self.lun().can_keep()) {
            return Err(Sense::in_list(20));
        }
        let new = word(list, 8);
        let kind = || {
            // All of the unit.
            if scope != 0 {
                return Err(Sense::in_cdb(2));
            }
            Kind::from_code(kind).ok_or(Sense::in_cdb_bit(2, 3))
        };
        Ok(match action {
            action::REGISTER => Change::Register { new, ignore: false, keep },
            action::REGISTER_AND_IGNORE => Change::Register { new, ignore: true, keep },
            action::RESERVE => Change::Reserve(kind()?),
            action::RELEASE => Change::Release(kind()?),
            action::CLEAR => Change::Clear,
            action::PREEMPT => Change::Preempt { victim: new, kind: kind()?, abort: false },
            action::PREEMPT_AND_ABORT => Change::Preempt { victim: new, kind: kind()?, abort: true },
            _ => return Err(Sense::in_cdb_bit(1, 4)),
        })
    }

    /// What the parameter list of REGISTER AND MOVE asks for (SPC-4, section 6.16.4): someone who uses the unit.
    fn registering_and_moving(&self, list: &[u8; MOVE_LIST]) -> Result<(Change, Arc<Nexus>), Sense> {
        let keep = list[17] & 1 == 1;
        if keep && !self.lun().can_keep() {
            return Err(Sense::in_list(17));
        }
        if list[20..24] != [0, 0, 0, 24] {
            return Err(Sense::in_list(20));
        }
        let initiator = Port::initiator_of(&list[24..]).ok_or(Sense::in_list(24))?;
        let target = u16::from_be_bytes([list[18], list[19]]);
        let heir = self.lun().find(Port { initiator, target }).ok_or(Sense::in_list(24))?;
        let to = heir.number();
        // To oneself is none.
        if to == self.nexus.number() {
            return Err(Sense::in_list(24));
        }
        Ok((Change::Move { to, new: word(list, 8), leave: list[17] & 2 != 0, keep }, heir))
    }
}

fn word(list: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|i| list[at + i]))
}
