//! Identify (NVMe 2.0 §5.17). Context: the holder of the controller.
//!
//! The numbers are offsets of the data structures in the specification.

use super::{Controller, Status};
use crate::config::FORMATS;
use crate::namespace::Namespace;
use crate::wire::{Page, SubmissionEntry};

/// The identifier of the model's one controller.
pub(super) const CNTLID: u16 = 1;
/// NSIDs in one list.
const LIST_LEN: usize = 1024;
/// Ranges of a Copy command, 0's based.
pub(super) const MSRC: u8 = 15;

/// The command set whose namespaces have no identify data of blocks.
const KEY_VALUE: u8 = 1;

/// The command sets of a request: of any, or of one.
type Csi = Option<u8>;

impl Controller {
    pub(super) fn identify(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let cns = entry.cdw10.get() as u8;
        let csi = (entry.cdw11.get() >> 24) as u8;
        let nsid = entry.nsid.get();
        let mut page = match cns {
            0x00 => self.identify_namespace(nsid, false)?,
            0x01 => self.identify_controller(),
            0x02 => self.namespace_list(nsid, false, None)?,
            0x03 => self.descriptors(nsid)?,
            0x05 if csi == 0 => self.check_nsid(nsid).map(|()| Page::new())?,
            0x06 if csi == 0 => self.identify_nvm_controller(),
            0x07 => self.namespace_list(nsid, false, Some(csi))?,
            0x08 => self.identify_independent(nsid)?,
            0x10 => self.namespace_list(nsid, true, None)?,
            0x11 => self.identify_namespace(nsid, true)?,
            0x12 => self.controller_list(entry, Some(nsid))?,
            0x13 => self.controller_list(entry, None)?,
            0x1c => {
                // Combination 0 is the NVM command set alone.
                let mut page = Page::new();
                page.u64(0, 1);
                page
            }
            _ => return Err(Status::INVALID_FIELD),
        };
        self.faults.change_identify(cns, &mut page.0[..]);
        self.send(entry, &page.0[..])?;
        Ok(0)
    }

    fn check_nsid(&self, nsid: u32) -> Result<(), Status> {
        if nsid == 0 || nsid > self.config.nn { Err(Status::INVALID_NAMESPACE) } else { Ok(()) }
    }

    fn identify_controller(&self) -> Page {
        let config = &self.config;
        let mut page = Page::new();
        page.u16(0, config.pci_id.0);
        page.u16(2, config.pci_id.0);
        page.ascii(4, 20, &config.serial);
        page.ascii(24, 40, &config.model);
        page.ascii(64, 8, self.firmware.active_revision());
        page.u8(72, 0); // RAB
        page.bytes(73, &[0x00, 0x54, 0x52]); // IEEE
        page.u8(77, config.mdts);
        page.u16(78, CNTLID);
        page.u32(80, config.vs);
        page.u32(84, 1_000_000); // RTD3R, in microseconds
        page.u32(88, 1_000_000); // RTD3E
        page.u32(92, 1 << 8 | 1 << 9); // OAES: namespace attributes, firmware activation
        page.u8(111, 1); // CNTRLTYPE: I/O controller
        for (i, delay) in config.crdt.iter().enumerate() {
            page.u16(128 + 2 * i, *delay);
        }
        page.u16(256, config.oacs | u16::from(config.locking.is_some()));
        page.u8(258, config.acl);
        page.u8(259, config.aerl);
        // FRMW: slot 1 is read-only; the number of slots; activation without a reset.
        page.u8(260, 1 | config.firmware_slots.clamp(1, 7) << 1 | 1 << 4);
        page.u8(261, 0b110); // LPA: commands supported and effects; extended data
        page.u8(262, config.elpe);
        page.u16(266, 343); // WCTEMP, in kelvins
        page.u16(268, 353); // CCTEMP
        page.u128(280, config.tnvmcap.into());
        page.u128(296, self.unallocated().into());
        page.u16(320, config.kas);
        page.u32(328, config.sanicap);
        page.u8(512, 0x66); // SQES
        page.u8(513, 0x44); // CQES
        page.u32(516, config.nn);
        page.u16(520, config.oncs);
        page.u16(522, config.fuses);
        page.u8(524, 1 << 2); // FNA: cryptographic erase is supported
        // VWC: a Flush of all namespaces is supported.
        page.u8(525, u8::from(config.volatile_write_cache) | 0b110);
        page.u16(526, config.awun);
        page.u16(528, config.awupf);
        page.u16(532, config.acwu);
        page.u16(534, 1); // Copy Descriptor Format 0
        page.u32(536, config.sgls);
        page.bytes(768, b"nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-");
        page.bytes(768 + 56, format!("{:012x}", config.seed & 0xffff_ffff_ffff).as_bytes());
        page.u16(2048, 2500); // PSD0: MP, in hundredths of watts
        page
    }

    /// Bytes that no namespace has.
    pub(super) fn unallocated(&self) -> u64 {
        let used: u64 = self.namespaces.values().map(Namespace::bytes).fold(0, u64::saturating_add);
        self.config.tnvmcap.saturating_sub(used)
    }

    fn identify_namespace(&self, nsid: u32, is_allocated_enough: bool) -> Result<Page, Status> {
        let manages = self.config.oacs & 1 << 3 != 0;
        if nsid == u32::MAX && manages && !is_allocated_enough {
            let mut page = Page::new();
            put_formats(&mut page);
            return Ok(page);
        }
        self.check_nsid(nsid)?;
        let mut page = Page::new();
        let found = self.namespaces.get(&nsid).filter(|n| is_allocated_enough || n.config.attached);
        let Some(namespace) = found else { return Ok(page) };
        let config = &namespace.config;
        if config.csi == KEY_VALUE {
            return Err(Status::INVALID_COMMAND_SET);
        }
        page.u64(0, config.blocks);
        page.u64(8, config.blocks);
        page.u64(16, config.blocks);
        page.u8(24, 0); // NSFEAT: not thin, atomic units as the controller's
        put_formats(&mut page);
        page.u8(26, config.format & 0xf | u8::from(config.extended_lba) << 4);
        page.u8(33, 1 | 1 << 3); // DLFEAT: deallocated blocks read as zeroes, also those of Write Zeroes
        page.u16(46, config.noiob);
        page.u128(48, namespace.bytes().into());
        let copy_blocks = self.transfer_max() / namespace.block_len();
        page.u16(74, u16::try_from(copy_blocks).unwrap_or(u16::MAX)); // MSSRL
        page.u32(76, copy_blocks as u32); // MCL
        page.u8(80, MSRC);
        page.u8(99, u8::from(config.write_protected)); // NSATTR
        page.bytes(104, &config.nguid);
        page.bytes(120, &config.eui64);
        Ok(page)
    }

    /// I/O Command Set Independent Identify Namespace.
    fn identify_independent(&self, nsid: u32) -> Result<Page, Status> {
        self.check_nsid(nsid)?;
        let mut page = Page::new();
        if let Some(namespace) = self.namespaces.get(&nsid).filter(|n| n.config.attached) {
            page.u8(8, u8::from(namespace.config.write_protected)); // NSATTR
            page.u8(14, 1); // NSTAT: ready
        }
        Ok(page)
    }

    /// I/O Command Set specific Identify Controller of the NVM command set. Only the number of ranges is limited beyond what
    /// the commands themselves allow.
    fn identify_nvm_controller(&self) -> Page {
        let mut page = Page::new();
        page.u8(3, 255); // DMRL
        page
    }

    /// NSIDs above `after`, ascending: attached ones, or all that are allocated.
    fn namespace_list(&self, after: u32, is_allocated_enough: bool, csi: Csi) -> Result<Page, Status> {
        if after >= u32::MAX - 1 {
            return Err(Status::INVALID_NAMESPACE);
        }
        let mut page = Page::new();
        let is_listed = |namespace: &Namespace| {
            (is_allocated_enough || namespace.config.attached)
                && csi.is_none_or(|csi| csi == namespace.config.csi)
        };
        let listed = self.namespaces.range(after + 1..).filter(|(_, namespace)| is_listed(namespace));
        for (i, (nsid, _)) in listed.take(LIST_LEN).enumerate() {
            page.u32(4 * i, *nsid);
        }
        Ok(page)
    }

    /// Namespace Identification Descriptors: type, length, two reserved bytes, identifier.
    fn descriptors(&self, nsid: u32) -> Result<Page, Status> {
        self.check_nsid(nsid)?;
        let found = self.namespaces.get(&nsid).filter(|n| n.config.attached);
        let namespace = found.ok_or(Status::INVALID_NAMESPACE)?;
        let config = &namespace.config;
        let mut page = Page::new();
        let mut at = 0;
        let fields: [(u8, &[u8]); 3] = [(1, &config.eui64), (2, &config.nguid), (4, &[config.csi])];
        for (kind, id) in fields {
            if kind != 4 && id.iter().all(|&byte| byte == 0) {
                continue;
            }
            page.u8(at, kind);
            page.u8(at + 1, id.len() as u8);
            page.bytes(at + 4, id);
            at += 4 + id.len();
        }
        Ok(page)
    }

    /// Controller identifiers from CNTID on: of the subsystem, or of those that a namespace is attached to.
    fn controller_list(&self, entry: &SubmissionEntry, nsid: Option<u32>) -> Result<Page, Status> {
        let from = entry.cdw10.get() >> 16;
        let is_attached = match nsid {
            None => true,
            Some(nsid) => {
                self.check_nsid(nsid)?;
                self.namespaces.get(&nsid).is_some_and(|n| n.config.attached)
            }
        };
        let mut page = Page::new();
        if is_attached && from <= CNTLID.into() {
            page.u16(0, 1);
            page.u16(2, CNTLID);
        }
        Ok(page)
    }
}

/// The formats that every namespace supports.
fn put_formats(page: &mut Page) {
    page.u8(25, FORMATS.len() as u8 - 1); // NLBAF
    page.u8(27, 0b11); // MC: metadata in a buffer of its own, or after each block's data
    for (i, format) in FORMATS.iter().enumerate() {
        let data = format.data.trailing_zeros() << 16;
        page.u32(128 + 4 * i, data | u32::from(format.metadata));
    }
}
