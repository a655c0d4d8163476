//! Asynchronous events of a controller. NVMe 2.0 §5.2. Context: the controller's.

use std::collections::VecDeque;

use aryk_nvme::spec::entry::CompletionEntry;
use aryk_nvme::spec::feature;
use aryk_nvme::spec::log;
use aryk_nvme::spec::status::Code;

use super::Result;
use crate::subsystem::{Service, View};

/// AERL: requests that may be outstanding, less one.
pub(super) const AERL: u8 = 3;
const REQUESTS_MAX: usize = AERL as usize + 1;

/// An event that the controller reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// Namespaces appeared, changed or went.
    Namespaces,
    /// The states of ANA groups, or their namespaces, changed.
    Ana,
    /// The discovery log page changed.
    Discovery,
    /// There is a Reservation Notification log page.
    Reservation,
}

/// The bit of reservation notifications, which [`Events`] always enables: the host masks them by a feature of each namespace.
const RESERVATION: u32 = 1 << 30;

impl Notice {
    const ALL: [Self; 4] = [Self::Namespaces, Self::Ana, Self::Discovery, Self::Reservation];

    /// The bit of the feature that enables it.
    const fn enable(self) -> u32 {
        match self {
            Self::Namespaces => feature::EVENT_NAMESPACE,
            Self::Ana => feature::EVENT_ANA,
            Self::Discovery => feature::EVENT_DISCOVERY,
            Self::Reservation => RESERVATION,
        }
    }

    /// The log page that the host reads next.
    const fn log_page(self) -> u8 {
        match self {
            Self::Namespaces => log::CHANGED_NAMESPACES,
            Self::Ana => log::ANA,
            Self::Discovery => log::DISCOVERY,
            Self::Reservation => log::RESERVATION,
        }
    }

    /// DW0 of the completion: type (2: notice; 6: status of the I/O command set), information, log page.
    const fn dw0(self) -> u32 {
        let (kind, information) = match self {
            Self::Namespaces => (2, 0x00),
            Self::Ana => (2, 0x03),
            Self::Discovery => (2, 0xf0),
            Self::Reservation => (6, 0x00),
        };
        kind | information << 8 | (self.log_page() as u32) << 16
    }
}

/// The requests of the host, and what there is to report.
#[derive(Debug)]
pub(super) struct Events {
    supported: u32,
    enabled: u32,
    requests: VecDeque<u16>,
    aborted: VecDeque<u16>,
    /// Bits of [`Notice::enable`]: events that have not been reported.
    pending: u32,
    /// As `pending`: events that have been reported, and whose log page has not been read since.
    masked: u32,
}

/// The events that a controller with this view has, as OAES reports them.
pub(super) const fn supported(view: &View) -> u32 {
    match &view.service {
        Service::Discovery(_) => feature::EVENT_DISCOVERY,
        Service::Io(io) if io.ana.is_some() => feature::EVENT_NAMESPACE | feature::EVENT_ANA,
        Service::Io(_) => feature::EVENT_NAMESPACE,
    }
}

impl Events {
    pub(super) fn new(view: &View) -> Self {
        Self {
            supported: supported(view),
            enabled: 0,
            requests: VecDeque::with_capacity(REQUESTS_MAX),
            aborted: VecDeque::new(),
            pending: 0,
            masked: 0,
        }
    }

    pub(super) const fn enabled(&self) -> u32 {
        self.enabled
    }

    /// Sets Asynchronous Event Configuration.
    pub(super) const fn enable(&mut self, events: u32) -> Result<()> {
        // The controller never has a critical warning to report, but accepts that the host wants to know.
        if events & !(self.supported | feature::EVENT_HEALTH) != 0 {
            return Err(Code::INVALID_FIELD);
        }
        self.enabled = events;
        self.pending &= events | RESERVATION;
        Ok(())
    }

    /// Takes an Asynchronous Event Request.
    pub(super) fn request(&mut self, cid: u16) -> Result<()> {
        if self.requests.len() == REQUESTS_MAX {
            return Err(Code::ASYNC_EVENT_LIMIT_EXCEEDED);
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Aborts a request. Returns whether there was one.
    pub(super) fn abort(&mut self, cid: u16) -> bool {
        let place = self.requests.iter().position(|request| *request == cid);
        self.aborted.extend(place.and_then(|at| self.requests.remove(at)));
        place.is_some()
    }

    /// Has an event reported, if the host has enabled it.
    pub(super) const fn notify(&mut self, notice: Notice) {
        self.pending |= notice.enable() & (self.enabled | RESERVATION);
    }

    /// The host reads a log page, after which its event may be reported again. What the page says includes what is pending.
    pub(super) fn log_was_read(&mut self, log_page: u8) {
        if let Some(notice) = Notice::ALL.iter().find(|notice| notice.log_page() == log_page) {
            self.masked &= !notice.enable();
            self.pending &= !notice.enable();
        }
    }

    pub(super) fn next_completion(&mut self) -> Option<CompletionEntry> {
        if let Some(cid) = self.aborted.pop_front() {
            return Some(CompletionEntry::new(cid, Code::ABORT_REQUESTED.status().as_final(), 0));
        }
        let ready = self.pending & !self.masked;
        let notice = Notice::ALL.iter().find(|notice| ready & notice.enable() != 0)?;
        let cid = self.requests.pop_front()?;
        self.pending &= !notice.enable();
        self.masked |= notice.enable();
        Some(CompletionEntry::new(cid, Code::SUCCESS.status(), notice.dw0().into()))
    }
}
