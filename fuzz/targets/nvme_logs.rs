//! Log pages, discovery responses and events of an NVMe controller, of any length and content.
//!
//! For any input, no code panics, and no list is longer than its log page can hold.
#![no_main]

use aryk_nvme::errors::{Class, classify};
use aryk_nvme::spec::feature::AsyncEvent;
use aryk_nvme::spec::log::{ChangedNamespaces, ErrorEntry, FirmwareSlots, SanitizeStatus, SmartLog};
use aryk_nvme::spec::security;
use aryk_nvme::spec::status::Status;
use libfuzzer_sys::fuzz_target;
use zerocopy::FromBytes;

fuzz_target!(|data: &[u8]| {
    if let ChangedNamespaces::Some(ids) = ChangedNamespaces::decode(data) {
        assert!(ids.len() <= 1024 && ids.len() <= data.len() / 4 && !ids.contains(&0));
    }
    assert!(ErrorEntry::decode(data).count() <= data.len() / 64);
    for entry in ErrorEntry::decode(data) {
        let verdict = classify(entry.status(), [1, 2, 3]);
        assert!(!entry.status().is_final() || verdict.retry_after.is_none());
        assert!(verdict.class != Class::Success || entry.status().is_success());
    }
    if let Some(slots) = FirmwareSlots::decode(data) {
        assert!(slots.active < 8 && slots.next.is_none_or(|next| (1..8).contains(&next)));
    }
    if let Ok((smart, _)) = SmartLog::read_from_prefix(data) {
        assert!(smart.warnings().count() <= 6 && smart.celsius() != Some(-273));
    }
    let _ = (SanitizeStatus::decode(data), security::locking(data));
    if let Some(&dw0) = data.first_chunk() {
        let dw0 = u32::from_le_bytes(dw0);
        assert!(Status::new(dw0 as u16).to_string().len() < 100);
        let _ = (AsyncEvent::decode(dw0), AsyncEvent::log_page(dw0));
    }
});
