//! The discovery log page of another target: bytes of any content.
//!
//! For any input, no code panics; what is accepted is written as it was read.
#![no_main]

use aryk_nvme_fabrics::discovery::{Entry, Header, Page, RECORD_LEN};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    assert!(data.len() >= RECORD_LEN || Header::decode(data).is_none());
    let records = data.get(RECORD_LEN..).unwrap_or_default().as_chunks::<RECORD_LEN>().0;
    let entries: Vec<Entry> = records.iter().filter_map(|record| Entry::decode(record).ok()).collect();
    let page = Page { generation: 7, entries: entries.clone() }.encode();
    assert_eq!(Header::decode(&page), Some(Header { generation: 7, entries: entries.len() as u64 }));
    let read = page[RECORD_LEN..].as_chunks::<RECORD_LEN>().0.iter().map(Entry::decode);
    assert!(read.eq(entries.into_iter().map(Ok)));
});
