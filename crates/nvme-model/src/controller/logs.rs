//! Get Log Page (NVMe 2.0 §5.16), and Sanitize (§5.24), whose state is a log page. Context: the holder of the controller.

use super::{Controller, EventKind, NEVER, Nanos, Status};
use crate::namespace::Namespace;
use crate::wire::{Page, SubmissionEntry, admin, nvm};
use std::collections::{BTreeSet, VecDeque};

/// NSIDs in the log of changed namespaces.
const CHANGED_MAX: usize = 1024;
/// The composite temperature after power-on, in kelvins.
const TEMPERATURE: u16 = 308;

/// What a test sets in the SMART log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Composite Temperature, in kelvins.
    pub temperature: u16,
    /// Available Spare, in percent.
    pub spare: u8,
    /// Percentage Used.
    pub used: u8,
    /// Whether the subsystem's reliability is degraded (bit 2 of the critical warning).
    pub is_unreliable: bool,
    /// Whether all media is read-only (bit 3).
    pub is_read_only: bool,
}

#[derive(Debug)]
pub(super) struct Logs {
    /// Entries of the error log, the newest first.
    errors: VecDeque<[u8; 64]>,
    error_count: u64,
    changed: BTreeSet<u32>,
    health: Health,
    reads: u64,
    writes: u64,
    bytes_read: u64,
    bytes_written: u64,
    media_errors: u64,
    /// When the sanitize operation ends, and its command's CDW10.
    sanitize: Option<(Nanos, u32)>,
    sanitize_start: Nanos,
    /// CDW10 of the last one that ended.
    sanitized: Option<u32>,
}

impl Default for Logs {
    fn default() -> Self {
        Self {
            errors: VecDeque::new(),
            error_count: 0,
            changed: BTreeSet::new(),
            health: Health {
                temperature: TEMPERATURE,
                spare: 100,
                used: 1,
                is_unreliable: false,
                is_read_only: false,
            },
            reads: 0,
            writes: 0,
            bytes_read: 0,
            bytes_written: 0,
            media_errors: 0,
            sanitize: None,
            sanitize_start: 0,
            sanitized: None,
        }
    }
}

impl Logs {
    pub(super) fn add_changed_namespace(&mut self, nsid: u32) {
        if self.changed.len() <= CHANGED_MAX {
            self.changed.insert(nsid);
        }
    }

    pub(super) fn sanitize_ends(&self) -> Nanos {
        self.sanitize.map_or(NEVER, |(end, _)| end)
    }

    pub(super) const fn count_read(&mut self, bytes: u64) {
        self.reads += 1;
        self.bytes_read += bytes;
    }

    pub(super) const fn count_write(&mut self, bytes: u64) {
        self.writes += 1;
        self.bytes_written += bytes;
    }

    pub(super) const fn is_sanitizing(&self) -> bool {
        self.sanitize.is_some()
    }
}

impl Controller {
    /// Changes the SMART log, and raises the events that follow.
    pub fn set_health(&mut self, health: Health) {
        let (is_unreliable, spare) = (health.is_unreliable, health.spare);
        self.logs.health = health;
        if is_unreliable {
            self.raise_event(EventKind::Reliability);
        }
        if spare < 10 {
            self.raise_event(EventKind::Spare);
        }
        self.check_temperature();
    }

    pub(super) fn check_temperature(&mut self) {
        if self.logs.health.temperature >= self.features.temperature_threshold() {
            self.raise_event(EventKind::Temperature);
        }
    }

    /// Adds an entry to the error log for a failure of the controller or the medium; returns whether it did.
    pub(super) fn log_error(&mut self, sqid: u16, command: &SubmissionEntry, status: Status) -> bool {
        let is_media = status.sct() == 2;
        let is_internal = status.sct() == 0 && matches!(status.sc(), 0x04 | 0x06);
        self.logs.media_errors += u64::from(is_media);
        if !is_media && !is_internal {
            return false;
        }
        self.logs.error_count += 1;
        let mut entry = [0; 64];
        entry[..8].copy_from_slice(&self.logs.error_count.to_le_bytes());
        entry[8..10].copy_from_slice(&sqid.to_le_bytes());
        entry[10..12].copy_from_slice(&command.cid.get().to_le_bytes());
        entry[12..14].copy_from_slice(&(status.0 << 1).to_le_bytes());
        entry[14..16].copy_from_slice(&u16::MAX.to_le_bytes()); // no parameter is wrong
        // The block that failed, where the model knows it.
        let namespace = self.namespaces.get(&command.nsid.get()).filter(|_| sqid != 0 && is_media);
        let bad =
            namespace.and_then(|namespace| namespace.first_unreadable(command.slba(), command.blocks()));
        entry[16..24].copy_from_slice(&bad.unwrap_or(command.slba()).to_le_bytes());
        entry[24..28].copy_from_slice(&command.nsid.get().to_le_bytes());
        self.logs.errors.push_front(entry);
        self.logs.errors.truncate(usize::from(self.config.elpe) + 1);
        true
    }

    pub(super) fn get_log_page(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let log = entry.cdw10.get() as u8;
        let retains_event = entry.cdw10.get() & 1 << 15 != 0;
        let dwords = u64::from(entry.cdw10.get() >> 16) | u64::from(entry.cdw11.get() & 0xffff) << 16;
        let len = 4 * (dwords + 1);
        let offset = u64::from(entry.cdw12.get()) | u64::from(entry.cdw13.get()) << 32;
        if len > self.transfer_max() || !offset.is_multiple_of(4) {
            return Err(Status::INVALID_FIELD);
        }
        let nsid = entry.nsid.get();
        if log == 0x02 && nsid != 0 && nsid != u32::MAX {
            return Err(Status::INVALID_FIELD);
        }
        let page = match log {
            0x01 => self.logs.errors.iter().flatten().copied().collect(),
            0x02 => self.smart_log(),
            0x03 => self.firmware.log(),
            0x04 => self.changed_log(),
            0x05 => effects_log(),
            0x81 if self.config.sanicap != 0 => self.sanitize_log(),
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        let size = if log == 0x01 { 64 * (u64::from(self.config.elpe) + 1) } else { page.len() as u64 };
        if offset > size {
            return Err(Status::INVALID_FIELD);
        }
        let mut data = vec![0; len as usize];
        for (to, from) in data.iter_mut().zip(page.iter().skip(offset as usize)) {
            *to = *from;
        }
        self.faults.change_log(&mut data);
        self.send(entry, &data)?;
        if !retains_event {
            self.events.clear_log(log);
            if log == 0x04 {
                self.logs.changed.clear();
            }
        }
        Ok(0)
    }

    /// SMART / Health Information (NVMe 2.0 §5.16.1.3).
    fn smart_log(&self) -> Vec<u8> {
        let (logs, health) = (&self.logs, &self.logs.health);
        let mut page = Page::new();
        let is_hot = health.temperature >= self.features.temperature_threshold();
        page.u8(
            0,
            u8::from(health.spare < 10)
                | u8::from(is_hot) << 1
                | u8::from(health.is_unreliable) << 2
                | u8::from(health.is_read_only) << 3,
        );
        page.u16(1, health.temperature);
        page.u8(3, health.spare);
        page.u8(4, 10);
        page.u8(5, health.used);
        // Data units are thousands of 512 bytes, rounded up.
        page.u128(32, logs.bytes_read.div_ceil(512_000).into());
        page.u128(48, logs.bytes_written.div_ceil(512_000).into());
        page.u128(64, logs.reads.into());
        page.u128(80, logs.writes.into());
        page.u128(112, 1); // power cycles
        page.u128(128, u128::from(self.now / 3_600_000_000_000)); // power-on hours
        page.u128(160, logs.media_errors.into());
        page.u128(176, logs.error_count.into());
        page.0[..512].to_vec()
    }

    /// Changed Namespace List (NVMe 2.0 §5.16.1.5): all ones first if there are too many.
    fn changed_log(&self) -> Vec<u8> {
        let mut page = Page::new();
        if self.logs.changed.len() > CHANGED_MAX {
            page.u32(0, u32::MAX);
        } else {
            for (i, nsid) in self.logs.changed.iter().enumerate() {
                page.u32(4 * i, *nsid);
            }
        }
        page.0.to_vec()
    }

    /// Sanitize (NVMe 2.0 §5.24): starts the operation, which runs on after the command.
    pub(super) fn sanitize(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let cdw10 = entry.cdw10.get();
        if self.logs.sanitize.is_some() {
            return Err(Status::SANITIZE_IN_PROGRESS);
        }
        // Bits of SANICAP: crypto erase, block erase, overwrite.
        let needs = match cdw10 & 7 {
            1 => return Ok(0), // exit failure mode
            2 => 1 << 1,
            3 => 1 << 2,
            4 => 1,
            _ => return Err(Status::INVALID_FIELD),
        };
        if self.config.sanicap & needs == 0 {
            return Err(Status::INVALID_FIELD);
        }
        self.logs.sanitize_start = self.now;
        self.logs.sanitize = Some((self.now.saturating_add(self.config.timing.sanitize), cdw10));
        Ok(0)
    }

    /// Ends the sanitize operation at its time.
    pub(super) fn run_sanitize(&mut self) {
        if let Some((end, cdw10)) = self.logs.sanitize
            && end <= self.now
        {
            self.logs.sanitize = None;
            self.logs.sanitized = Some(cdw10);
            self.namespaces.values_mut().for_each(Namespace::clear);
            self.raise_event(EventKind::SanitizeCompleted);
        }
    }

    /// Sanitize Status: progress, status, and the command's CDW10.
    fn sanitize_log(&self) -> Vec<u8> {
        let mut page = Page::new();
        let (progress, status, cdw10) = match (self.logs.sanitize, self.logs.sanitized) {
            (Some((end, cdw10)), _) => {
                let total = end.saturating_sub(self.logs.sanitize_start).max(1);
                let done = self.now.saturating_sub(self.logs.sanitize_start);
                ((u128::from(done) * 65536 / u128::from(total)).min(65534) as u16, 2, cdw10)
            }
            (None, Some(cdw10)) => (u16::MAX, 1, cdw10),
            (None, None) => (u16::MAX, 0, 0),
        };
        page.u16(0, progress);
        page.u16(2, status);
        page.u32(4, cdw10);
        page.0[..512].to_vec()
    }
}

/// Commands Supported and Effects (NVMe 2.0 §5.16.1.6): CSUPP, and LBCC for commands that change data.
fn effects_log() -> Vec<u8> {
    let mut page = Page::new();
    let supported = [
        admin::DELETE_SQ,
        admin::CREATE_SQ,
        admin::GET_LOG_PAGE,
        admin::DELETE_CQ,
        admin::CREATE_CQ,
        admin::IDENTIFY,
        admin::ABORT,
        admin::SET_FEATURES,
        admin::GET_FEATURES,
        admin::ASYNC_EVENT,
        admin::NAMESPACE_MANAGEMENT,
        admin::FIRMWARE_COMMIT,
        admin::FIRMWARE_DOWNLOAD,
        admin::NAMESPACE_ATTACHMENT,
        admin::KEEP_ALIVE,
        admin::DOORBELL_BUFFER,
        admin::FORMAT_NVM,
        admin::SANITIZE,
    ];
    for opcode in supported {
        let changes = matches!(opcode, admin::FORMAT_NVM | admin::SANITIZE);
        page.u32(4 * usize::from(opcode), 1 | u32::from(changes) << 1);
    }
    for opcode in [nvm::FLUSH, nvm::READ, nvm::COMPARE, nvm::VERIFY] {
        page.u32(1024 + 4 * usize::from(opcode), 1);
    }
    for opcode in
        [nvm::WRITE, nvm::WRITE_UNCORRECTABLE, nvm::WRITE_ZEROES, nvm::DATASET_MANAGEMENT, nvm::COPY]
    {
        page.u32(1024 + 4 * usize::from(opcode), 0b11);
    }
    page.0.to_vec()
}
