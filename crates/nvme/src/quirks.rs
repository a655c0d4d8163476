//! Known deviations of controllers from the specification, in one table. Pure; any context.

/// What the driver does differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quirks {
    /// Wait this long, in milliseconds, after CC.EN was cleared, before CSTS is read: reads at that time make the reset fail.
    pub ready_delay_ms: u64,
    /// Requests that cross a multiple of this many bytes are slow; the controller does not report that as NOIOB. Byte 3 of the
    /// vendor's part of Identify Controller has the size, as a power of two in pages.
    pub stripe_in_vendor_data: bool,
    /// Namespace identifiers are the same in different devices: do not report any.
    pub bogus_namespace_ids: bool,
    /// The controller fails on Identify with the namespace descriptors (CNS 03h).
    pub no_descriptors: bool,
}

/// A controller, by PCI identifiers and the start of its firmware revision.
struct Known {
    vendor: u16,
    device: u16,
    firmware: &'static str,
    quirks: Quirks,
}

const NONE: Quirks = Quirks {
    ready_delay_ms: 0,
    stripe_in_vendor_data: false,
    bogus_namespace_ids: false,
    no_descriptors: false,
};
const STRIPE: Quirks = Quirks { stripe_in_vendor_data: true, ..NONE };
const SLOW_READY: Quirks = Quirks { ready_delay_ms: 2300, ..NONE };
const BOGUS_IDS: Quirks = Quirks { bogus_namespace_ids: true, ..NONE };
const NO_DESCRIPTORS: Quirks = Quirks { no_descriptors: true, bogus_namespace_ids: true, ..NONE };

const fn known(vendor: u16, device: u16, firmware: &'static str, quirks: Quirks) -> Known {
    Known { vendor, device, firmware, quirks }
}

/// All of them. An empty firmware revision stands for every one.
const TABLE: &[Known] = &[
    // Intel P3700 family and its rebadged models.
    known(0x8086, 0x0953, "", STRIPE),
    known(0x8086, 0x0a53, "", STRIPE),
    known(0x8086, 0x0a54, "", STRIPE),
    known(0x8086, 0x0a55, "", STRIPE),
    // HGST SN100 and SN200, Memblaze, Samsung PM1725 and PM1725a.
    known(0x1c58, 0x0003, "", SLOW_READY),
    known(0x1c58, 0x0023, "", SLOW_READY),
    known(0x1c5f, 0x0540, "", SLOW_READY),
    known(0x144d, 0xa821, "", SLOW_READY),
    known(0x144d, 0xa822, "", SLOW_READY),
    // Silicon Motion.
    known(0x126f, 0x2263, "", NO_DESCRIPTORS),
    // QEMU gives the namespaces of different devices the same identifiers, unless the user sets others.
    known(0x1b36, 0x0010, "", BOGUS_IDS),
];

/// The deviations of a controller. Where several rows match, the first one counts.
pub fn of(vendor: u16, device: u16, firmware: &str) -> Quirks {
    let is_this =
        |row: &&Known| (row.vendor, row.device) == (vendor, device) && firmware.starts_with(row.firmware);
    TABLE.iter().find(is_this).map_or(NONE, |row| row.quirks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_are_found_by_their_identifiers() {
        assert_eq!(of(0x144d, 0xa821, "GPNA").ready_delay_ms, 2300);
        assert!(of(0x1b36, 0x0010, "8.2.0").bogus_namespace_ids);
        assert_eq!(of(0x1b36, 0x0011, "8.2.0"), Quirks::default());
    }

    #[test]
    fn no_row_hides_another() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(of(row.vendor, row.device, row.firmware), row.quirks);
            let earlier = TABLE[..i].iter();
            let hides = |other: &Known| {
                (other.vendor, other.device) == (row.vendor, row.device)
                    && row.firmware.starts_with(other.firmware)
            };
            assert!(!earlier.into_iter().any(hides), "row {i}");
        }
    }
}
