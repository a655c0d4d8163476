//! Feature identifiers and their values. NVMe 2.0 §5.27.1.

/// Arbitration.
pub const ARBITRATION: u8 = 0x01;
/// Power Management.
pub const POWER_MANAGEMENT: u8 = 0x02;
/// Temperature Threshold.
pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
/// Error Recovery.
pub const ERROR_RECOVERY: u8 = 0x05;
/// Volatile Write Cache.
pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
/// Number of Queues.
pub const NUMBER_OF_QUEUES: u8 = 0x07;
/// Write Atomicity Normal.
pub const WRITE_ATOMICITY: u8 = 0x0a;
/// Asynchronous Event Configuration.
pub const ASYNC_EVENT_CONFIGURATION: u8 = 0x0b;
/// Keep Alive Timer.
pub const KEEP_ALIVE_TIMER: u8 = 0x0f;
/// Host Behavior Support, with 512 bytes of data.
pub const HOST_BEHAVIOR_SUPPORT: u8 = 0x16;
/// Host Identifier, with 8 or 16 bytes of data.
pub const HOST_IDENTIFIER: u8 = 0x81;
/// Reservation Notification Mask, of a namespace.
pub const RESERVATION_MASK: u8 = 0x82;
/// Reservation Persistence, of a namespace.
pub const RESERVATION_PERSISTENCE: u8 = 0x83;

/// Bytes of data of [`HOST_BEHAVIOR_SUPPORT`].
pub const HOST_BEHAVIOR_LEN: usize = 512;

/// Asynchronous Event Configuration, and OAES of the identify data: changed namespace attributes.
pub const EVENT_NAMESPACE: u32 = 1 << 8;
/// As [`EVENT_NAMESPACE`]: firmware activation starts.
pub const EVENT_FIRMWARE: u32 = 1 << 9;
/// As [`EVENT_NAMESPACE`]: asymmetric namespace access changes.
pub const EVENT_ANA: u32 = 1 << 11;
/// As [`EVENT_NAMESPACE`]: the discovery log page changes.
pub const EVENT_DISCOVERY: u32 = 1 << 31;
/// Asynchronous Event Configuration: all critical warnings of the SMART log (bits 0 to 5).
pub const EVENT_HEALTH: u32 = 0x3f;

/// Which value of a feature Get Features returns. NVMe 2.0 §5.15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// The value in use.
    Current,
    /// The value of the maker.
    Default,
    /// The value that a reset restores.
    Saved,
    /// What the feature supports.
    Capabilities,
}

/// CDW11 of Number of Queues, for `pairs` queue pairs (1 to 65,535). NVMe 2.0 §5.27.1.5.
pub const fn queue_counts(pairs: u16) -> u32 {
    let zero_based = pairs.saturating_sub(1) as u32;
    zero_based | zero_based << 16
}

/// How the controller chooses the next commands. NVMe 2.0 §3.4.4 and §5.27.1.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arbitration {
    /// Commands that the controller fetches from a queue in its turn, as a power of two, 0 to 6; 7: any number.
    pub burst: u8,
    /// Commands, less one, of each turn of the queues of low priority.
    pub low: u8,
    /// As `low`, of medium priority.
    pub medium: u8,
    /// As `low`, of high priority.
    pub high: u8,
}

impl Arbitration {
    /// CDW11. The weights exist where the controller has weighted round robin (CAP.AMS).
    pub const fn value(self, has_weights: bool) -> u32 {
        let burst = (self.burst & 7) as u32;
        let weights = (self.low as u32) << 8 | (self.medium as u32) << 16 | (self.high as u32) << 24;
        if has_weights { burst | weights } else { burst }
    }
}

/// The queue pairs that DW0 of Number of Queues allows: the smaller one of both counts.
pub const fn allowed_pairs(result: u32) -> u16 {
    let (sqs, cqs) = (result as u16, (result >> 16) as u16);
    let fewer = if sqs < cqs { sqs } else { cqs };
    fewer.saturating_add(1)
}

/// An asynchronous event: DW0 of a completed Asynchronous Event Request. NVMe 2.0 §5.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// An error that belongs to no command, with its information byte (0: write to an invalid doorbell; 1: invalid value of a
    /// doorbell; 2: diagnostic failure; 3 and 4: internal error, lasting or not; 5: firmware image load error).
    Error(u8),
    /// A critical warning of the SMART log (0: reliability; 1: temperature; 2: spare blocks).
    Health(u8),
    /// Namespaces appeared, changed or went: read the Changed Namespace List log.
    NamespacesChanged,
    /// The controller starts to activate firmware and pauses.
    FirmwareActivation,
    /// The access to namespaces changed: read the Asymmetric Namespace Access log.
    AccessChanged,
    /// A sanitize operation ended: read the Sanitize Status log.
    SanitizeCompleted,
    /// Another event, as DW0 reports it.
    Other(u32),
}

impl AsyncEvent {
    /// Decodes DW0.
    pub const fn decode(dw0: u32) -> Self {
        let info = (dw0 >> 8) as u8;
        match (dw0 & 7, info) {
            (0, _) => Self::Error(info),
            (1, _) => Self::Health(info),
            (2, 0) => Self::NamespacesChanged,
            (2, 1) => Self::FirmwareActivation,
            (2, 3) => Self::AccessChanged,
            // With or without deallocation that the host did not want.
            (6, 1 | 2) => Self::SanitizeCompleted,
            _ => Self::Other(dw0),
        }
    }

    /// What the information byte of [`Self::Health`] warns of.
    pub const fn health(info: u8) -> &'static str {
        match info {
            0 => "reliability",
            1 => "temperature",
            2 => "spare blocks",
            _ => "another state of the drive",
        }
    }

    /// The log page whose reading lets the controller report this type of event again.
    pub const fn log_page(dw0: u32) -> u8 {
        (dw0 >> 16) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_queues_are_zero_based_in_both_halves() {
        assert_eq!((queue_counts(1), queue_counts(4), queue_counts(u16::MAX)), (0, 0x0003_0003, 0xfffe_fffe));
        assert_eq!((allowed_pairs(0), allowed_pairs(0x0007_0002), allowed_pairs(u32::MAX)), (1, 3, u16::MAX));
    }

    #[test]
    fn events_are_decoded() {
        assert_eq!(AsyncEvent::decode(0x0004_0002), AsyncEvent::NamespacesChanged);
        assert_eq!(AsyncEvent::log_page(0x0004_0002), 4);
        assert_eq!(AsyncEvent::decode(0x0102), AsyncEvent::FirmwareActivation);
        assert_eq!(AsyncEvent::decode(0x000c_0302), AsyncEvent::AccessChanged);
        assert_eq!(AsyncEvent::decode(0x0300), AsyncEvent::Error(3));
        assert_eq!(AsyncEvent::decode(0x0101), AsyncEvent::Health(1));
        assert_eq!(AsyncEvent::health(1), "temperature");
        assert_eq!(AsyncEvent::decode(0x0081_0106), AsyncEvent::SanitizeCompleted);
        assert_eq!(AsyncEvent::decode(0x0702), AsyncEvent::Other(0x0702));
    }
}
