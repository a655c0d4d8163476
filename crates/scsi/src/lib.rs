//! SCSI disks (SAM-5, SPC-4, SBC-3) over the block layer, whatever brings the commands: a guest's virtqueue, or a network.
//!
//! - [`Units`], [`Lun`]: each disk as a logical unit, one for all who use it: its mode, its reservations. Any context.
//! - [`Nexus`]: an initiator's use of it; what it must be told before its next command.
//! - [`UnitChannel`]: a nexus' channel on one reactor: commands down, outcomes up. READ and WRITE go to the disk with the initiator's own memory; they
//!   take no lock, and allocate nothing once the channel has warmed up.
//! - [`lun_number`], [`answer_absent`]: which unit a command is for, and what those answer that are not there.
//!
//! Any bytes are a command here: [`decode`] gives a [`Command`], or the sense data that says what is wrong.
//!
//! A command whose list is shorter than the data it moves is not begun ([`Outcome::overrun`]); the answers to inquiries are cut instead. Commands of
//! different attributes (ordered, head of queue) are not told apart: all are simple, in a set that may be reordered.
#![forbid(unsafe_code)]

mod cdb;
mod cell;
#[cfg(any(test, fuzzing))]
pub mod initiator;
mod inquiry;
mod kept;
mod lun;
mod mode;
mod opcodes;
mod reservations;
mod sense;
mod target;
mod unit;
mod units;

pub use cdb::{Check, Command, Opcodes, PageControl, Transfer, decode};
pub use kept::{Keep, Keeper, Kept, Port};
pub use lun::{Attention, Lun, Mode, Nexus, Reset, Which};
pub use sense::{Field, Key, SENSE_MAX, Sense, Status};
pub use target::{answer_absent, lun_number};
pub use unit::{Outcome, Request, UnitChannel};
pub use units::Units;
