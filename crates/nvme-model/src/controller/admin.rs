//! Admin commands: dispatch, and those that need no module of their own (NVMe 2.0 §5). Context: the holder of the
//! controller.

use super::fetch::Outcome;
use super::{Controller, Nanos, Status};
use crate::faults::Fate;
use crate::transfer::PointerRules;
use crate::wire::{SubmissionEntry, admin};

/// OACS bits.
const FORMAT: u16 = 1 << 1;
const FIRMWARE: u16 = 1 << 2;
const NAMESPACES: u16 = 1 << 3;
const DOORBELL_BUFFER: u16 = 1 << 8;
/// Largest transfer without MDTS.
const TRANSFER_MAX: u64 = 16 << 20;

impl Controller {
    /// Executes a command of the admin queue.
    pub(super) fn run_admin(&mut self, entry: &SubmissionEntry) -> Outcome {
        let oacs = self.config.oacs;
        let supports = |bit: u16| oacs & bit != 0;
        Some(match entry.opcode {
            admin::DELETE_SQ => self.delete_sq(entry),
            admin::CREATE_SQ => self.create_sq(entry),
            admin::GET_LOG_PAGE => self.get_log_page(entry),
            admin::DELETE_CQ => self.delete_cq(entry),
            admin::CREATE_CQ => self.create_cq(entry),
            admin::IDENTIFY => self.identify(entry),
            admin::ABORT => self.abort(entry),
            admin::SET_FEATURES => self.set_features(entry),
            admin::GET_FEATURES => self.get_features(entry),
            admin::ASYNC_EVENT => return self.async_event_request(entry),
            admin::NAMESPACE_MANAGEMENT if supports(NAMESPACES) => self.namespace_management(entry),
            admin::NAMESPACE_ATTACHMENT if supports(NAMESPACES) => self.namespace_attachment(entry),
            admin::FIRMWARE_DOWNLOAD if supports(FIRMWARE) => self.firmware_download(entry),
            admin::FIRMWARE_COMMIT if supports(FIRMWARE) => self.firmware_commit(entry),
            admin::KEEP_ALIVE if self.config.kas != 0 => {
                self.restart_keep_alive();
                Ok(0)
            }
            admin::DOORBELL_BUFFER if supports(DOORBELL_BUFFER) => self.doorbell_buffer(entry),
            admin::FORMAT_NVM if supports(FORMAT) => self.format_nvm(entry),
            admin::SECURITY_RECEIVE if self.config.locking.is_some() => self.security_receive(entry),
            admin::SANITIZE if self.config.sanicap != 0 => self.sanitize(entry),
            _ => Err(Status::INVALID_OPCODE),
        })
    }

    /// Security Receive (NVMe 2.0 §5.25): Level 0 Discovery of TCG Storage, the only protocol there is.
    fn security_receive(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        // SECP 01h, SPSP (the ComID) 0001h.
        if entry.cdw10.get() >> 8 != 0x01_0001 {
            return Err(Status::INVALID_FIELD);
        }
        let mut response = vec![0; 48];
        // The TPer feature; the locking feature: supported, enabled, locked, encrypting.
        response.extend([0, 1, 0x10, 12, 0x11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let is_locked = self.config.locking == Some(true);
        response.extend([0, 2, 0x10, 12, 0b1011 | u8::from(is_locked) << 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        response[3] = (response.len() - 4) as u8;
        let allocated = u64::from(entry.cdw11.get()).min(self.transfer_max());
        response.resize(allocated as usize, 0);
        self.send(entry, &response)?;
        Ok(0)
    }

    /// Bytes of the largest transfer.
    pub(super) fn transfer_max(&self) -> u64 {
        match self.config.mdts {
            0 => TRANSFER_MAX,
            mdts => (4096u64 << (self.config.mpsmin & 0xf))
                .checked_shl(mdts.into())
                .map_or(TRANSFER_MAX, |max| max.clamp(4096, TRANSFER_MAX)),
        }
    }

    pub(super) fn pointer_rules(&self, is_admin: bool, to_host: bool) -> PointerRules {
        PointerRules { page: self.cc.page(), sgls: self.config.sgls, is_admin, to_host }
    }

    /// Returns data of an admin command to the host.
    pub(super) fn send(&mut self, entry: &SubmissionEntry, data: &[u8]) -> Result<(), Status> {
        if data.len() as u64 > self.transfer_max() {
            return Err(Status::INVALID_FIELD);
        }
        let rules = self.pointer_rules(true, true);
        self.transfer.load(&mut self.bus, rules, entry, data.len() as u64)?;
        self.transfer.write(&mut self.bus, data)
    }

    /// Receives `len` bytes of data of an admin command from the host.
    pub(super) fn receive(&mut self, entry: &SubmissionEntry, len: u64) -> Result<Vec<u8>, Status> {
        if len > self.transfer_max() {
            return Err(Status::INVALID_FIELD);
        }
        let rules = self.pointer_rules(true, false);
        self.transfer.load(&mut self.bus, rules, entry, len)?;
        let mut data = vec![0; len as usize];
        self.transfer.read(&mut self.bus, &mut data)?;
        Ok(data)
    }

    /// Abort (NVMe 2.0 §5.1): bit 0 of the result is 0 if the command was aborted. The aborted command completes first.
    fn abort(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let sqid = entry.cdw10.get() as u16;
        let cid = (entry.cdw10.get() >> 16) as u16;
        if self.sqs.get(usize::from(sqid)).is_none_or(Option::is_none) {
            return Err(Status::INVALID_FIELD);
        }
        if sqid == 0 && self.events.cancel(cid) {
            self.refuse(0, cid, Status::ABORT_REQUESTED);
            return Ok(0);
        }
        match self.in_flight.fate(sqid, cid) {
            None | Some(Fate::Lose | Fate::Stick { is_abortable: false }) => Ok(1),
            Some(_) => {
                if let Some(held) = self.in_flight.take(sqid, cid) {
                    self.release(&held);
                    self.refuse(sqid, held.entry.cid.get(), Status::ABORT_REQUESTED);
                    if let Some(second) = &held.second {
                        self.refuse(sqid, second.cid.get(), Status::ABORT_REQUESTED);
                    }
                }
                Ok(0)
            }
        }
    }

    /// Doorbell Buffer Config (NVMe 2.0 §5.11): PRP 1 is the buffer of shadow doorbells, PRP 2 that of event indices.
    fn doorbell_buffer(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let page = self.cc.page();
        let (shadow, event_index) = (entry.prp1(), entry.prp2());
        if shadow == 0
            || event_index == 0
            || !shadow.is_multiple_of(page)
            || !event_index.is_multiple_of(page)
        {
            return Err(Status::INVALID_FIELD);
        }
        self.shadow = Some((shadow, event_index));
        Ok(0)
    }

    /// Restarts the keep-alive timer. Only the Keep Alive command and its feature do: the model does not report Traffic Based
    /// Keep Alive.
    pub(super) fn restart_keep_alive(&mut self) {
        let timeout = self.features.keep_alive_ns();
        self.keep_alive_at = if timeout == 0 { super::NEVER } else { self.now.saturating_add(timeout) };
    }

    /// An expired keep-alive timer is fatal over PCIe (NVMe 2.0 §3.9).
    pub(super) fn expire_keep_alive(&mut self) {
        if self.keep_alive_at <= self.now {
            self.keep_alive_at = super::NEVER;
            self.set_fatal();
        }
    }

    /// Marks namespaces that a format command is about to clear; returns its additional time.
    pub(super) fn start_format(&mut self, entry: &SubmissionEntry) -> Nanos {
        let time = self.config.timing.format;
        if time == 0 || self.check_format(entry).is_err() {
            return 0;
        }
        let until = self.now.saturating_add(time);
        for nsid in self.format_targets(entry.nsid.get()) {
            if let Some(namespace) = self.namespaces.get_mut(&nsid) {
                namespace.formatting_until = until;
            }
        }
        time
    }

    /// The namespaces that a format command clears.
    fn format_targets(&self, nsid: u32) -> Vec<u32> {
        let all = nsid == u32::MAX;
        self.namespaces
            .iter()
            .filter(|(id, n)| n.config.attached && (all || **id == nsid))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Checks the fields of Format NVM (NVMe 2.0 §5.14), and returns the index of the format.
    fn check_format(&self, entry: &SubmissionEntry) -> Result<u8, Status> {
        let cdw10 = entry.cdw10.get();
        // LBAF in bits 3:0, its upper two bits in 13:12; protection information in bits 8:5; secure erase in bits 11:9.
        let format = (cdw10 & 0xf | cdw10 >> 8 & 0x30) as u8;
        let (protection, erase) = (cdw10 >> 5 & 7, cdw10 >> 9 & 7);
        if usize::from(format) >= crate::config::FORMATS.len() || protection != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        if erase > 2 {
            return Err(Status::INVALID_FIELD);
        }
        let nsid = entry.nsid.get();
        if nsid == u32::MAX {
            return Ok(format);
        }
        match self.namespaces.get(&nsid) {
            Some(namespace) if namespace.config.attached && namespace.config.write_protected => {
                Err(Status::WRITE_PROTECTED)
            }
            Some(namespace) if namespace.config.attached => Ok(format),
            _ => Err(Status::INVALID_NAMESPACE),
        }
    }

    fn format_nvm(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let format = self.check_format(entry)?;
        for nsid in self.format_targets(entry.nsid.get()) {
            let Some(namespace) = self.namespaces.get_mut(&nsid) else { continue };
            let bytes = namespace.bytes();
            let before = (namespace.config.format, namespace.config.blocks);
            namespace.config.format = format;
            namespace.config.extended_lba = entry.cdw10.get() & 1 << 4 != 0;
            namespace.config.blocks = bytes / namespace.block_len();
            let after = (namespace.config.format, namespace.config.blocks);
            namespace.formatting_until = 0;
            namespace.clear();
            if before != after {
                self.namespace_changed(nsid);
            }
        }
        Ok(0)
    }
}
