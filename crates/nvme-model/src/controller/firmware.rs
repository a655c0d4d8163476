//! Firmware download and commit (NVMe 2.0 §5.12 and §5.13). Context: the holder of the controller.
//!
//! An image of the model begins with [`FIRMWARE_MAGIC`] and 8 bytes of revision in ASCII; its content means nothing.

use super::{Controller, EventKind, Status};
use crate::config::Config;
use crate::wire::SubmissionEntry;

/// The first bytes of a firmware image that the model accepts.
pub const FIRMWARE_MAGIC: [u8; 8] = *b"ARYKNVMF";
/// Bytes of the largest image.
const IMAGE_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Firmware {
    /// Revisions of slots 1 to 7.
    slots: Vec<Option<String>>,
    /// Slot numbers, from 1.
    active: u8,
    next: Option<u8>,
    image: Vec<u8>,
    /// Ranges of the image that were downloaded, in bytes.
    ranges: Vec<(u64, u64)>,
}

impl Firmware {
    pub(super) fn new(config: &Config) -> Self {
        let mut slots = vec![None; usize::from(config.firmware_slots.clamp(1, 7))];
        slots[0] = Some(config.firmware.clone());
        Self { slots, active: 1, next: None, image: Vec::new(), ranges: Vec::new() }
    }

    pub(super) fn active_revision(&self) -> &str {
        self.slots[usize::from(self.active) - 1].as_deref().unwrap_or("")
    }

    /// A controller reset activates the slot that was chosen, and discards an image that was not committed.
    pub(super) fn activate_at_reset(&mut self) {
        if let Some(next) = self.next.take() {
            self.active = next;
        }
        self.image.clear();
        self.ranges.clear();
    }

    /// Firmware Slot Information (NVMe 2.0 §5.16.1.4).
    pub(super) fn log(&self) -> Vec<u8> {
        let mut log = vec![0; 512];
        log[0] = self.active | self.next.unwrap_or(0) << 4;
        for (i, slot) in self.slots.iter().enumerate() {
            if let Some(revision) = slot {
                let field = &mut log[8 + 8 * i..16 + 8 * i];
                field.fill(b' ');
                for (to, from) in field.iter_mut().zip(revision.bytes()) {
                    *to = from;
                }
            }
        }
        log
    }

    /// The revision of the downloaded image, if it is valid: complete from byte 0 on, with the magic number.
    fn downloaded(&mut self) -> Option<String> {
        self.ranges.sort_unstable();
        let mut end = 0;
        for (start, stop) in self.ranges.drain(..) {
            if start != end {
                end = 0;
                break;
            }
            end = stop;
        }
        let image = std::mem::take(&mut self.image);
        let revision = image.get(..end as usize)?.strip_prefix(&FIRMWARE_MAGIC)?.get(..8)?;
        let is_text = revision.iter().all(|byte| byte.is_ascii_graphic() || *byte == b' ');
        is_text.then(|| String::from_utf8_lossy(revision).trim_end().to_owned())
    }
}

impl Controller {
    pub(super) fn firmware_download(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let len = 4 * (u64::from(entry.cdw10.get()) + 1);
        let offset = 4 * u64::from(entry.cdw11.get());
        let end = offset + len;
        if end > IMAGE_MAX {
            return Err(Status::INVALID_FIELD);
        }
        if self.firmware.ranges.iter().any(|(start, stop)| offset < *stop && *start < end) {
            return Err(Status::OVERLAPPING_RANGE);
        }
        let data = self.receive(entry, len)?;
        let image = &mut self.firmware.image;
        if image.len() < end as usize {
            image.resize(end as usize, 0);
        }
        image[offset as usize..end as usize].copy_from_slice(&data);
        self.firmware.ranges.push((offset, end));
        Ok(0)
    }

    pub(super) fn firmware_commit(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let cdw10 = entry.cdw10.get();
        let (mut slot, action) = ((cdw10 & 7) as u8, cdw10 >> 3 & 7);
        let count = self.firmware.slots.len() as u8;
        if action > 3 {
            return Err(Status::INVALID_FIELD);
        }
        let replaces = action != 2;
        if slot == 0 {
            // The controller chooses: the last slot, which is writable unless there is one slot only.
            slot = count;
        }
        if slot > count || (replaces && slot == 1) {
            return Err(Status::INVALID_FIRMWARE_SLOT);
        }
        let index = usize::from(slot) - 1;
        if replaces {
            let revision = self.firmware.downloaded().ok_or(Status::INVALID_FIRMWARE_IMAGE)?;
            self.firmware.slots[index] = Some(revision);
        } else if self.firmware.slots[index].is_none() {
            return Err(Status::INVALID_FIRMWARE_SLOT);
        }
        match action {
            0 => {}
            3 => {
                self.firmware.active = slot;
                self.raise_event(EventKind::FirmwareActivation);
            }
            _ => self.firmware.next = Some(slot),
        }
        Ok(0)
    }
}
