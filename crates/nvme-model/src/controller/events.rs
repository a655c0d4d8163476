//! Asynchronous events (NVMe 2.0 §5.2). Context: the holder of the controller.
//!
//! The host leaves Asynchronous Event Request commands open; an event completes one. After that, events of the same type
//! wait until the host reads the log page of the event. Each kind of event waits at most once.

use super::fetch::Outcome;
use super::{Controller, Status};
use crate::wire::SubmissionEntry;

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    UnknownDoorbell,
    InvalidDoorbellValue,
    Reliability,
    Temperature,
    Spare,
    NamespaceChanged,
    FirmwareActivation,
    SanitizeCompleted,
}

impl EventKind {
    /// Type, information, and the log page that clears the event.
    const fn fields(self) -> (u32, u32, u8) {
        match self {
            Self::UnknownDoorbell => (0, 0x00, 0x01),
            Self::InvalidDoorbellValue => (0, 0x01, 0x01),
            Self::Reliability => (1, 0x00, 0x02),
            Self::Temperature => (1, 0x01, 0x02),
            Self::Spare => (1, 0x02, 0x02),
            Self::NamespaceChanged => (2, 0x00, 0x04),
            Self::FirmwareActivation => (2, 0x01, 0x03),
            Self::SanitizeCompleted => (6, 0x01, 0x81),
        }
    }

    /// The bit of the feature Asynchronous Event Configuration that enables the event; `None` if it is always enabled.
    const fn enable_bit(self) -> Option<u32> {
        match self {
            Self::Spare => Some(1),
            Self::Temperature => Some(1 << 1),
            Self::Reliability => Some(1 << 2),
            Self::NamespaceChanged => Some(1 << 8),
            Self::FirmwareActivation => Some(1 << 9),
            Self::UnknownDoorbell | Self::InvalidDoorbellValue | Self::SanitizeCompleted => None,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Events {
    /// Open requests, in order.
    requests: Vec<u16>,
    /// Events that the host has not seen.
    waiting: Vec<EventKind>,
    /// Types and their log pages that were reported and not yet cleared.
    masked: Vec<(u32, u8)>,
}

impl Events {
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Closes an open request; `false` if there is none with this identifier.
    pub(super) fn cancel(&mut self, cid: u16) -> bool {
        let position = self.requests.iter().position(|&request| request == cid);
        position.map(|at| self.requests.remove(at)).is_some()
    }

    /// The host read a log page and did not ask to retain its event.
    pub(super) fn clear_log(&mut self, log: u8) {
        self.masked.retain(|(_, of)| *of != log);
    }
}

impl Controller {
    pub(super) fn async_event_request(&mut self, entry: &SubmissionEntry) -> Outcome {
        if self.events.requests.len() > usize::from(self.config.aerl) {
            return Some(Err(Status::AER_LIMIT));
        }
        if let Some(event) = self.faults.event() {
            return Some(Ok(event));
        }
        self.events.requests.push(entry.cid.get());
        None
    }

    /// Notes an event, if the host enabled it.
    pub(super) fn raise_event(&mut self, kind: EventKind) {
        let enabled = self.features.enabled_events();
        let is_enabled = kind.enable_bit().is_none_or(|bit| enabled & bit != 0);
        if is_enabled && !self.events.waiting.contains(&kind) {
            self.events.waiting.push(kind);
        }
    }

    /// Completes requests with the events that wait and are not masked.
    pub(super) fn deliver_events(&mut self) {
        let mut index = 0;
        while index < self.events.waiting.len() && !self.events.requests.is_empty() {
            let (event_type, information, log) = self.events.waiting[index].fields();
            if self.events.masked.iter().any(|(of, _)| *of == event_type) {
                index += 1;
                continue;
            }
            self.events.waiting.remove(index);
            self.events.masked.push((event_type, log));
            let cid = self.events.requests.remove(0);
            let command = SubmissionEntry { cid: cid.into(), ..Default::default() };
            let result = event_type | information << 8 | u32::from(log) << 16;
            self.complete(0, &command, Ok(result), None);
        }
    }

    /// Notes a changed namespace in the log page, and raises its event.
    pub(crate) fn namespace_changed(&mut self, nsid: u32) {
        self.logs.add_changed_namespace(nsid);
        self.raise_event(EventKind::NamespaceChanged);
    }
}
