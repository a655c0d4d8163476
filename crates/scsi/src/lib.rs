//! SCSI disks (SAM-5, SPC-4, SBC-3) over the block layer, for any transport: a guest's virtqueue, or a network.
//!
//! - [`Units`], [`Lun`]: each disk as one logical unit, which all of its initiators share: its mode, its reservations. Any
//!   context.
//! - [`Nexus`]: an initiator's use of a unit, with the unit attentions that are pending for it.
//! - [`UnitChannel`]: a nexus' channel on one reactor: commands down, outcomes up. READ and WRITE go to the disk with the
//!   initiator's own memory; they take no lock, and allocate nothing once the channel has warmed up.
//! - [`lun_number`], [`answer_absent`]: which unit a command is for, and the answer to a command for a unit that does not exist.
//!
//! [`decode`] accepts any bytes: it returns a [`Command`], or the sense data that states the error.
//!
//! A command whose list is shorter than the data it moves is not started ([`Outcome::overrun`]); the answers to inquiries are
//! truncated instead. All task attributes (ordered, head of queue) are treated as *simple*: commands may be reordered.
#![forbid(unsafe_code)]

mod cdb;
mod cell;
#[cfg(any(test, fuzzing))]
pub mod initiator;
mod inquiry;
mod lun;
mod mode;
mod opcodes;
mod reservations;
mod saved;
mod sense;
mod target;
mod unit;
mod units;

pub use cdb::{Check, Command, Opcodes, PageControl, Transfer, decode};
pub use lun::{Attention, Lun, Mode, Nexus, Reset, TaskFilter};
pub use saved::{Port, SaveRequest, SaveSender, SavedState};
pub use sense::{Field, Key, SENSE_MAX, Sense, Status};
pub use target::{answer_absent, lun_number};
pub use unit::{Outcome, Request, UnitChannel};
pub use units::Units;
