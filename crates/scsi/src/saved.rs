//! The state of a logical unit that outlives the process. Any context.

use crate::lun::Mode;
use futures_channel::{mpsc, oneshot};

/// An I_T nexus (SAM-5, section 4.6) as the unit identifies it, also after a restart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Port {
    /// The initiator's name: a 64-bit NAA identifier, from which its TransportID is built.
    pub initiator: u64,
    /// The relative identifier of the target's port.
    pub target: u16,
}

impl Port {
    /// The initiator's TransportID (SPC-4, section 7.6.4.5), in the format that SAS uses for NAA names.
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

/// Settings and registrations that initiators have made on a unit.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct SavedState {
    /// The current mode.
    pub mode: Mode,
    /// The saved mode, which a reset of the unit restores.
    pub saved: Mode,
    /// The registered ports, each with its key.
    pub registrations: Vec<(Port, u64)>,
    /// The port that holds the reservation, and its type (SPC-4, table 58).
    pub reservation: Option<(Port, u8)>,
    /// APTPL: registrations outlive a loss of power.
    pub aptpl: bool,
}

impl SavedState {
    /// Whether the state is that of a new unit.
    pub fn is_default(&self) -> bool {
        *self == Self { aptpl: self.aptpl, ..Self::default() }
    }

    /// Whether some part of the state must outlive a loss of power.
    pub(crate) fn is_durable(&self) -> bool {
        self.aptpl || self.saved.bits() != Mode::DEFAULT.bits()
    }
}

/// A request to save the state of a unit.
#[derive(Debug)]
pub struct SaveRequest {
    /// The disk's name.
    pub disk: String,
    /// The state, which replaces the state saved before.
    pub state: SavedState,
    /// Report success only when the state is on stable storage: a loss of power must neither lose this state nor bring back the
    /// state that it replaces.
    pub durable: bool,
    /// Receives whether the state was saved.
    pub done: oneshot::Sender<bool>,
}

/// Sends requests to save state.
pub type SaveSender = mpsc::UnboundedSender<SaveRequest>;
