//! Namespace management and attachment (NVMe 2.0 §5.22 and §5.23). Context: the holder of the controller.

use super::identify::CNTLID;
use super::{Controller, Status};
use crate::config::{FORMATS, NamespaceConfig};
use crate::namespace::Namespace;
use crate::wire::{SubmissionEntry, first};

impl Controller {
    pub(super) fn namespace_management(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        match entry.cdw10.get() & 0xf {
            0 if entry.cdw11.get() >> 24 == 0 => self.create_namespace(entry),
            1 => self.delete_namespaces(entry.nsid.get()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Creates a namespace, which is not attached; the result is its NSID.
    fn create_namespace(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let data = self.receive(entry, 4096)?;
        let blocks = u64::from_le_bytes(first(&data));
        let capacity = u64::from_le_bytes(first(&data[8..]));
        let format = data[26] & 0xf | data[26] >> 1 & 0x30;
        if usize::from(format) >= FORMATS.len() || data[29] != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        if blocks == 0 {
            return Err(Status::INVALID_FIELD);
        }
        if capacity != blocks {
            // Thin Provisioning Not Supported.
            return Err(Status::new(1, 0x1b));
        }
        let block_len = u64::from(FORMATS[usize::from(format)].data);
        let needed = blocks.checked_mul(block_len).filter(|&bytes| bytes <= self.unallocated());
        if needed.is_none() {
            return Err(Status::INSUFFICIENT_CAPACITY);
        }
        let free = (1..=self.config.nn).find(|nsid| !self.namespaces.contains_key(nsid));
        let nsid = free.ok_or(Status::NSID_UNAVAILABLE)?;
        let identity = self.rng.u64(..);
        let config = NamespaceConfig {
            extended_lba: data[26] & 1 << 4 != 0,
            attached: false,
            ..NamespaceConfig::new(blocks, format, identity)
        };
        self.namespaces.insert(nsid, Namespace::new(config, self.config.data));
        Ok(nsid)
    }

    fn delete_namespaces(&mut self, nsid: u32) -> Result<u32, Status> {
        let targets: Vec<u32> =
            self.namespaces.keys().copied().filter(|id| nsid == u32::MAX || *id == nsid).collect();
        if targets.is_empty() && nsid != u32::MAX {
            return Err(Status::INVALID_NAMESPACE);
        }
        for nsid in targets {
            let was_attached = self.namespaces.remove(&nsid).is_some_and(|n| n.config.attached);
            if was_attached {
                self.namespace_changed(nsid);
            }
        }
        Ok(0)
    }

    pub(super) fn namespace_attachment(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let attach = match entry.cdw10.get() & 0xf {
            0 => true,
            1 => false,
            _ => return Err(Status::INVALID_FIELD),
        };
        let data = self.receive(entry, 4096)?;
        let count = u16::from_le_bytes(first(&data));
        // The subsystem has one controller.
        if count != 1 || u16::from_le_bytes(first(&data[2..])) != CNTLID {
            return Err(Status::CONTROLLER_LIST_INVALID);
        }
        let nsid = entry.nsid.get();
        let namespace = self.namespaces.get_mut(&nsid).ok_or(Status::INVALID_NAMESPACE)?;
        match (attach, namespace.config.attached) {
            (true, true) => return Err(Status::ALREADY_ATTACHED),
            (false, false) => return Err(Status::NOT_ATTACHED),
            _ => {}
        }
        namespace.config.attached = attach;
        self.namespace_changed(nsid);
        Ok(0)
    }
}
