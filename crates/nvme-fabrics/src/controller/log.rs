//! Log pages of a controller. NVMe 2.0 §5.16. Context: the controller's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::log;
use aryk_nvme::spec::status::Code;
use zerocopy::IntoBytes;

use super::event::Notice;
use super::{Controller, Result};
use crate::reservation;
use crate::subsystem::{Ana, Io, Namespace, Service};

/// Bytes of the Changed Namespace List.
const CHANGED_LEN: usize = 4096;
/// NSIDs that the list has room for.
const CHANGED_MAX: usize = CHANGED_LEN / 4;
/// Bytes of a Reservation Notification log page, and the pages that a controller keeps.
const NOTICE_LEN: usize = 64;
const NOTICES_MAX: usize = 128;
const SMART_LEN: usize = 512;
const FIRMWARE_LEN: usize = 512;
/// Bytes of the Error Information log, which has one entry (ELPE is 0).
const ERROR_LEN: usize = 64;

/// Namespaces that changed since the host read the list.
#[derive(Debug, Default)]
pub(super) struct Changed {
    nsids: BTreeSet<u32>,
    /// There were more than the list has room for.
    is_full: bool,
}

impl Changed {
    /// Adds the namespaces that differ in what the host sees, apart from their ANA groups and features. Returns whether there are
    /// any.
    pub(super) fn compare(
        &mut self,
        before: &BTreeMap<u32, Namespace>,
        after: &BTreeMap<u32, Namespace>,
    ) -> bool {
        let shown = |namespace: Option<&Namespace>| {
            namespace.map(|n| Namespace { ana_group: 0, persists: false, ..n.clone() })
        };
        let mut any = false;
        for &nsid in before.keys().chain(after.keys().filter(|nsid| !before.contains_key(nsid))) {
            if shown(before.get(&nsid)) != shown(after.get(&nsid)) {
                any = true;
                self.add(nsid);
            }
        }
        any
    }

    fn add(&mut self, nsid: u32) {
        if self.nsids.len() == CHANGED_MAX && !self.nsids.contains(&nsid) {
            self.is_full = true;
        } else {
            self.nsids.insert(nsid);
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(CHANGED_LEN);
        if self.is_full {
            page.extend(u32::MAX.to_le_bytes());
        } else {
            self.nsids.iter().for_each(|nsid| page.extend(nsid.to_le_bytes()));
        }
        page.resize(CHANGED_LEN, 0);
        page
    }
}

/// Reservation Notification log pages that the host has not read, oldest first.
#[derive(Debug, Default)]
pub(super) struct Notices {
    pages: VecDeque<(u64, reservation::Notice, u32)>,
    /// Notices so far, with those for which there was no room: the host sees a gap in the numbers of the pages.
    count: u64,
}

impl Notices {
    pub(super) fn add(&mut self, nsid: u32, notice: reservation::Notice) {
        // An empty page has the number 0.
        self.count = self.count.checked_add(1).unwrap_or(1);
        if self.pages.len() < NOTICES_MAX {
            self.pages.push_back((self.count, notice, nsid));
        }
    }

    /// The oldest page, with the number of later ones. NVMe 2.0 §5.16.1.24.
    fn encode(&self) -> Vec<u8> {
        let mut page = vec![0; NOTICE_LEN];
        if let Some((count, notice, nsid)) = self.pages.front() {
            page[..8].copy_from_slice(&count.to_le_bytes());
            page[8] = *notice as u8;
            page[9] = (self.pages.len() - 1) as u8;
            page[12..16].copy_from_slice(&nsid.to_le_bytes());
        }
        page
    }
}

impl Controller {
    pub(super) fn get_log_page(
        &mut self,
        entry: &SubmissionEntry,
        data_max: u32,
        data: &mut Vec<u8>,
    ) -> Result<()> {
        let cdw10 = entry.cdw(10);
        let id = cdw10 as u8;
        let retains_event = cdw10 & 1 << 15 != 0;
        // NUMDL and NUMDU: dwords, less one.
        let dwords = u64::from(cdw10 >> 16) | u64::from(entry.cdw(11) & 0xffff) << 16;
        let len = (dwords + 1) * 4;
        let offset = u64::from(entry.cdw(12)) | u64::from(entry.cdw(13)) << 32;
        if len > data_max.into() {
            return Err(Code::SGL_DATA_LENGTH_INVALID);
        }
        let page = match (&self.view.service, id) {
            (Service::Discovery(page), log::DISCOVERY) => page.encode(),
            (Service::Discovery(_), _) => return Err(Code::INVALID_LOG_PAGE),
            (Service::Io(_), log::ERROR_INFORMATION) => vec![0; ERROR_LEN],
            (Service::Io(_), log::SMART) => smart(),
            (Service::Io(_), log::FIRMWARE_SLOT) => self.firmware(),
            (Service::Io(_), log::CHANGED_NAMESPACES) => self.changed.encode(),
            (Service::Io(io), log::RESERVATION) if io.commands.reservations => self.notices.encode(),
            (Service::Io(io), log::ANA) => {
                let ana = io.ana.as_ref().ok_or(Code::INVALID_LOG_PAGE)?;
                // LSP bit 0: groups without their namespaces.
                encode_ana(ana, io, cdw10 & 1 << 8 != 0)
            }
            _ => return Err(Code::INVALID_LOG_PAGE),
        };
        if !offset.is_multiple_of(4) || offset > page.len() as u64 {
            return Err(Code::INVALID_FIELD);
        }
        let rest = &page[offset as usize..];
        data.extend(&rest[..rest.len().min(len as usize)]);
        // Beyond the end of the page there are zeroes.
        data.resize(len as usize, 0);
        if !retains_event {
            self.events.log_was_read(id);
            if id == log::CHANGED_NAMESPACES {
                self.changed = Changed::default();
            }
            if id == log::RESERVATION {
                self.notices.pages.pop_front();
                if !self.notices.pages.is_empty() {
                    self.events.notify(Notice::Reservation);
                }
            }
        }
        Ok(())
    }

    fn firmware(&self) -> Vec<u8> {
        let mut page = vec![0; FIRMWARE_LEN];
        // AFI: slot 1 is active.
        page[0] = 1;
        page[8..16].fill(b' ');
        page[8..16].iter_mut().zip(self.view.firmware.bytes()).for_each(|(to, from)| *to = from);
        page
    }
}

/// A disk that is well: full spare, no warning.
fn smart() -> Vec<u8> {
    let mut page = vec![0; SMART_LEN];
    (page[3], page[4]) = (100, 10);
    page
}

/// The Asymmetric Namespace Access log. NVMe 2.0 §5.16.1.13.
fn encode_ana(ana: &Ana, io: &Io, groups_only: bool) -> Vec<u8> {
    let mut page = Vec::new();
    page.extend(ana.changes.to_le_bytes());
    page.extend((ana.groups.len() as u16).to_le_bytes());
    page.resize(16, 0);
    for (id, group) in &ana.groups {
        let members = io.namespaces.iter().filter(|(_, namespace)| namespace.ana_group == *id);
        let nsids: Vec<u32> = if groups_only { Vec::new() } else { members.map(|(nsid, _)| *nsid).collect() };
        page.extend(id.to_le_bytes());
        page.extend((nsids.len() as u32).to_le_bytes());
        page.extend(group.changes.to_le_bytes());
        page.push(group.state as u8);
        page.resize(page.len() + 15, 0);
        page.extend(nsids.as_bytes());
    }
    page
}
