//! Configuration space: the fields and capabilities that transports use (PCI Local Bus 3.0 §6). Any context; pure, except for the
//! reads of a function.

use crate::sysfs::CLASS_NVME;
use crate::{Function, PciError};

/// Bytes of the part that every function has, with its list of capabilities.
pub(crate) const SPACE: usize = 256;

/// Offset of the command register, and its bits.
pub(crate) const COMMAND: u16 = 0x04;
pub(crate) const COMMAND_MEMORY: u16 = 1 << 1;
pub(crate) const COMMAND_BUS_MASTER: u16 = 1 << 2;

/// Offset of programming interface, subclass and class, a byte each.
const CLASS: u16 = 0x09;
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u16 = 1 << 4;
const CAPABILITIES: usize = 0x34;
const ID_MSIX: u8 = 0x11;

/// Bytes of an entry of an MSI-X table, and the offset of its vector control.
pub(crate) const MSIX_ENTRY: u64 = 16;
pub(crate) const MSIX_CONTROL: u64 = 12;

/// Place and size of the MSI-X table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Msix {
    /// Number of vectors.
    pub(crate) vectors: u16,
    /// The BAR that contains the table.
    pub(crate) bar: u8,
    /// Offset of the table in the BAR.
    pub(crate) offset: u64,
}

impl Msix {
    /// The MSI-X capability (PCI Local Bus 3.0 §6.8.2) in the first 256 bytes of configuration space.
    pub(crate) fn find(space: &[u8; SPACE]) -> Option<Self> {
        if word(space, STATUS) & STATUS_CAPABILITIES == 0 {
            return None;
        }
        let mut at = space[CAPABILITIES];
        // A list of distinct capabilities has at most 48: 192 bytes of 4 each.
        for _ in 0..48 {
            // The two lowest bits are reserved.
            let offset = usize::from(at & !3);
            if offset < 0x40 {
                return None;
            }
            if space[offset] == ID_MSIX && offset + 12 <= SPACE {
                let control = word(space, offset + 2);
                let table = u32::from(word(space, offset + 4)) | u32::from(word(space, offset + 6)) << 16;
                let vectors = (control & 0x7ff) + 1;
                return Some(Self { vectors, bar: (table & 7) as u8, offset: u64::from(table & !7) });
            }
            at = space[offset + 1];
        }
        None
    }

    /// Bytes of the table.
    pub(crate) fn len(&self) -> u64 {
        u64::from(self.vectors) * MSIX_ENTRY
    }
}

/// Sets or clears bits of the command register, and reads it back: posted writes of the function have arrived then.
pub(crate) fn set_command(function: &dyn Function, bits: u16, on: bool) -> Result<(), PciError> {
    let mut bytes = [0; 2];
    function.read_config(COMMAND, &mut bytes)?;
    let old = u16::from_le_bytes(bytes);
    let new = if on { old | bits } else { old & !bits };
    if new != old {
        function.write_config(COMMAND, &new.to_le_bytes())?;
    }
    function.read_config(COMMAND, &mut bytes)?;
    let now = u16::from_le_bytes(bytes);
    if now == u16::MAX {
        let reason = "its configuration space reads all ones".to_owned();
        return Err(PciError::Gone { name: function.name().to_owned(), reason });
    }
    if now & bits != new & bits {
        return Err(PciError::os("change the PCI command register", rustix::io::Errno::IO));
    }
    Ok(())
}

/// The class of a function, in the form of [`CLASS_NVME`].
pub(crate) fn class(function: &dyn Function) -> Result<u32, PciError> {
    let mut bytes = [0; 4];
    function.read_config(CLASS, &mut bytes[..3])?;
    Ok(u32::from_le_bytes(bytes))
}

/// Checks that a function is an NVMe I/O controller.
pub(crate) fn check_class(class: u32, name: &str) -> Result<(), PciError> {
    match class {
        CLASS_NVME => Ok(()),
        class => Err(PciError::WrongClass { name: name.to_owned(), class, kind: class_name(class) }),
    }
}

/// The kind of a function, for people (PCI Code and ID Assignment Specification §1).
const fn class_name(class: u32) -> &'static str {
    match (class >> 16, class >> 8 & 0xff) {
        (0x01, 0x04) => "a RAID controller",
        (0x01, 0x06) => "a SATA controller",
        (0x01, 0x07) => "a SAS controller",
        (0x01, 0x08) => "an NVMe controller without I/O queues, or of another programming interface",
        (0x01, _) => "another storage controller",
        (0x02, 0x00) => "an Ethernet controller",
        (0x02, _) => "a network controller",
        (0x03, _) => "a display controller",
        (0x06, _) => "a bridge",
        (0x0c, 0x03) => "a USB controller",
        _ => "another device",
    }
}

const fn word(space: &[u8; SPACE], at: usize) -> u16 {
    u16::from_le_bytes([space[at], space[at + 1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(capabilities: &[(usize, &[u8])]) -> [u8; SPACE] {
        let mut space = [0; SPACE];
        space[STATUS] = STATUS_CAPABILITIES as u8;
        space[CAPABILITIES] = capabilities.first().map_or(0, |(at, _)| *at as u8);
        for (at, bytes) in capabilities {
            space[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        space
    }

    #[test]
    fn the_msix_table_is_found_behind_other_capabilities() {
        let msix: &[u8] = &[0x11, 0, 0x40, 0x80, 0x03, 0x20, 0, 0, 0, 0x30, 0, 0];
        let space = space(&[(0x40, &[0x01, 0x80]), (0x80, &[0x10, 0xb3]), (0xb0, msix)]);
        assert_eq!(Msix::find(&space), Some(Msix { vectors: 65, bar: 3, offset: 0x2000 }));
    }

    #[test]
    fn broken_lists_have_no_msix() {
        assert_eq!(Msix::find(&[0; SPACE]), None);
        assert_eq!(Msix::find(&[0xff; SPACE]), None, "a removed device");
        assert_eq!(Msix::find(&space(&[(0x40, &[1, 0x40])])), None, "a circle");
        assert_eq!(Msix::find(&space(&[(0x40, &[1, 0x10])])), None, "into the header");
        assert_eq!(Msix::find(&space(&[(0xfc, &[0x11, 0, 1, 0])])), None, "cut off by the end");
    }
}
