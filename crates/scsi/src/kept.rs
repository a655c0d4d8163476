//! What of a logical unit outlives the process. Any context.

use crate::lun::Mode;
use futures_channel::{mpsc, oneshot};

/// An initiator's use of a unit, as the unit knows it again (SAM-5, section 4.6: an I_T nexus).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Port {
    /// The initiator's name: an NAA identifier of 64 bits, of which the TransportID is made.
    pub initiator: u64,
    /// The relative identifier of the target's port.
    pub target: u16,
}

impl Port {
    /// The initiator's TransportID (SPC-4, section 7.6.4.5), of the format that SAS has for such names.
    pub(crate) fn transport_id(self) -> [u8; 24] {
        let mut id = [0; 24];
        id[0] = 0x06;
        id[4..12].copy_from_slice(&self.initiator.to_be_bytes());
        id
    }

    /// The initiator that a TransportID names.
    pub(crate) fn initiator_of(id: &[u8]) -> Option<u64> {
        let id: &[u8; 24] = id.try_into().ok()?;
        (id[0] == 0x06).then(|| u64::from_be_bytes(std::array::from_fn(|i| id[4 + i])))
    }
}

/// What initiators have set of a unit.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Kept {
    /// The mode as it is.
    pub mode: Mode,
    /// The mode that a reset of the unit brings back.
    pub saved: Mode,
    /// Who is registered, and by which keys.
    pub registrations: Vec<(Port, u64)>,
    /// Who of them has made a reservation, and of what kind (SPC-4, table 58).
    pub reservation: Option<(Port, u8)>,
    /// Registrations outlive a loss of power too.
    pub aptpl: bool,
}

impl Kept {
    /// Whether it says no more than a new unit.
    pub fn is_default(&self) -> bool {
        *self == Self { aptpl: self.aptpl, ..Self::default() }
    }

    /// Whether something of it outlives a loss of power.
    pub(crate) fn is_durable(&self) -> bool {
        self.aptpl || self.saved.bits() != Mode::DEFAULT.bits()
    }
}

/// That something is to be kept.
#[derive(Debug)]
pub struct Keep {
    /// The disk's name.
    pub disk: String,
    /// In place of what was kept of it before.
    pub kept: Kept,
    /// It counts as kept only when it is on a disk: a loss of power is neither to lose it, nor to bring back what it replaces.
    pub durable: bool,
    /// Whether it is.
    pub done: oneshot::Sender<bool>,
}

/// To whom that is said.
pub type Keeper = mpsc::UnboundedSender<Keep>;
