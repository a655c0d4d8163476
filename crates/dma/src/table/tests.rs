//! Tests of address translation against the same memory in one array, and of the lifetime of memory.

use super::{BadAddress, KEPT_PIECES, LIST_MAX, MemTable, Region, SgTable, TableError};
use crate::Mapping;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::{Arc, Weak};

const PAGE: u64 = crate::PAGE;
/// The distance between the front-end's addresses and the guest's.
const USER: u64 = 0x7f00_0000_0000;

fn region(guest_addr: u64, len: u64) -> Region {
    let mapping = Arc::new(Mapping::anonymous(len + PAGE).unwrap());
    Region { guest_addr, user_addr: guest_addr.wrapping_add(USER), len, offset: PAGE / 2, mapping }
}

fn table(regions: &[Region]) -> Arc<MemTable> {
    Arc::new(MemTable::new(regions.to_vec()).unwrap())
}

fn error(regions: &[Region]) -> TableError {
    MemTable::new(regions.to_vec()).unwrap_err()
}

#[test]
fn regions_are_checked() {
    let sound = region(PAGE, 2 * PAGE);
    let bad = |change: &dyn Fn(&mut Region)| {
        let mut region = sound.clone();
        change(&mut region);
        error(&[region])
    };
    assert_eq!(bad(&|r| r.len = 0), TableError::BadRegion(PAGE));
    assert_eq!(bad(&|r| r.len = 3 * PAGE), TableError::BadRegion(PAGE));
    assert_eq!(bad(&|r| r.len = u64::MAX), TableError::BadRegion(PAGE));
    assert_eq!(bad(&|r| r.offset = PAGE + 1), TableError::BadRegion(PAGE));
    assert_eq!(bad(&|r| r.offset = u64::MAX), TableError::BadRegion(PAGE));
    assert_eq!(bad(&|r| r.user_addr = u64::MAX - PAGE), TableError::BadRegion(PAGE));
    let wrapping = u64::MAX - PAGE;
    assert_eq!(bad(&|r| r.guest_addr = wrapping), TableError::BadRegion(wrapping));

    let overlap = TableError::Overlap(PAGE, 3 * PAGE - 1);
    assert_eq!(error(&[region(3 * PAGE - 1, PAGE), sound.clone()]), overlap);
    assert_eq!(error(&[sound.clone(), sound.clone()]), TableError::Overlap(PAGE, PAGE));
    let adjoining = table(&[region(3 * PAGE, PAGE), sound]);
    assert_eq!(adjoining.regions().iter().map(|r| r.guest_addr).collect::<Vec<_>>(), [PAGE, 3 * PAGE]);
    assert_eq!(MemTable::default().read::<u8>(0), Err(BadAddress { addr: 0, len: 1 }));
}

#[test]
fn areas_lie_in_one_region() {
    let table = table(&[region(PAGE, PAGE), region(2 * PAGE, PAGE)]);
    table.write(2 * PAGE + 8, &0x1234_u16).unwrap();
    for area in [table.area_at_guest(2 * PAGE, PAGE), table.area_at_user(USER + 2 * PAGE, PAGE)] {
        let area = area.unwrap();
        assert_eq!((area.len(), area.read::<u16>(8)), (PAGE, 0x1234));
        assert!(area.is_aligned(2048) && !area.is_aligned(4096), "the mapping's offset is half a page");
    }
    for (at, len) in
        [(PAGE, PAGE + 1), (2 * PAGE - 1, 2), (0, 1), (3 * PAGE, 0), (PAGE, u64::MAX), (u64::MAX, 1)]
    {
        assert!(table.area_at_guest(at, len).is_none(), "{at:#x}+{len:#x}");
        assert!(table.area_at_user(at.wrapping_add(USER), len).is_none(), "{at:#x}+{len:#x}");
    }
}

#[test]
#[should_panic(expected = "4095+2 is outside of an area of 4096 bytes")]
fn an_access_outside_of_an_area_panics() {
    table(&[region(0, PAGE)]).area_at_guest(0, PAGE).unwrap().read::<u16>(4095);
}

#[test]
#[should_panic(expected = "even addresses")]
fn ring_fields_are_aligned() {
    let area = table(&[region(0, PAGE)]).area_at_guest(0, PAGE).unwrap();
    area.store_u16(1, 0, std::sync::atomic::Ordering::Relaxed);
}

/// A guest's memory as regions with gaps, and as an array of the content of each address.
struct Model {
    table: Arc<MemTable>,
    bytes: Vec<Option<u8>>,
}

impl Model {
    const START: u64 = 0x1000;

    fn new(layout: &[(u8, u8)]) -> Self {
        let mut at = Self::START;
        let (mut regions, mut bytes) = (Vec::new(), Vec::new());
        for (gap, len) in layout {
            at += u64::from(*gap);
            bytes.extend(vec![None; (*gap).into()]);
            regions.push(region(at, (*len).into()));
            bytes.extend(vec![Some(0); (*len).into()]);
            at += u64::from(*len);
        }
        regions.reverse();
        Self { table: table(&regions), bytes }
    }

    /// The bytes from `addr` on, if all of them exist.
    fn bytes(&mut self, addr: u64, len: usize) -> Option<&mut [Option<u8>]> {
        let at = usize::try_from(addr.wrapping_sub(Self::START)).ok()?;
        self.bytes.get_mut(at..at.checked_add(len)?).filter(|bytes| bytes.iter().all(Option::is_some))
    }
}

proptest! {
    /// Regions of up to 40 bytes, half of which adjoin; few regions, so that they are scanned, or many.
    #[test]
    fn guest_memory_is_an_array_with_holes(
        layout in vec((prop_oneof![Just(0), 0..9_u8], 1..40_u8), 1..20),
        accesses in vec((0..500_u64, 1..60_usize, any::<u8>()), 1..40),
    ) {
        let mut model = Model::new(&layout);
        let table = Arc::clone(&model.table);
        for (at, len, byte) in accesses {
            let addr = Model::START - 2 + at;
            let data: Vec<u8> = (0..len).map(|i| byte.wrapping_add(i as u8)).collect();
            let bad = BadAddress { addr, len: len as u32 };
            let expected = model.bytes(addr, len).map(|bytes| bytes.iter().flatten().copied().collect::<Vec<_>>());
            let mut seen = vec![0; len];
            let read = table.read_bytes(addr, &mut seen);
            prop_assert_eq!(read.map(|()| seen), expected.clone().ok_or(bad));
            let mut sg = SgTable::new(1, Arc::clone(&table));
            sg.begin(0);
            prop_assert_eq!(sg.push(0, addr, len as u32), expected.as_ref().map(drop).ok_or(bad));
            let listed = sg.sgl(0).pieces().map(|piece| piece.len()).sum::<usize>();
            prop_assert_eq!(listed, if expected.is_some() { len } else { 0 });
            if let Some(bytes) = model.bytes(addr, len) {
                bytes.iter_mut().zip(&data).for_each(|(byte, new)| *byte = Some(*new));
                table.write_bytes(addr, &data).unwrap();
                let mut seen = vec![0; len];
                sg.sgl(0).read(0, &mut seen);
                prop_assert_eq!(seen, data);
            }
            sg.end(0);
        }
    }

    /// Values within one region take a fast path.
    #[test]
    fn values_are_bytes(layout in vec((Just(0), 1..40_u8), 1..20), at in 0..200_u64, value: [u8; 12]) {
        let mut model = Model::new(&layout);
        let addr = Model::START + at;
        let fits = model.bytes(addr, 12).is_some();
        prop_assert_eq!(model.table.write(addr, &value).is_ok(), fits);
        let expected = fits.then_some(value).ok_or(BadAddress { addr, len: 12 });
        prop_assert_eq!(model.table.read::<[u8; 12]>(addr), expected);
        let largest = model.table.read_largest_before_write::<[u8; 12]>(addr);
        prop_assert!(largest.is_none() || largest == expected.ok());
        model.table.prefetch(addr);
        model.table.prefetch_write(addr);
    }
}

#[test]
fn the_last_address_can_be_used() {
    let at = u64::MAX - PAGE;
    let mut last = region(at, PAGE);
    last.user_addr = 0;
    let table = table(&[last]);
    table.write(u64::MAX - 8, &7_u64).unwrap();
    assert_eq!(table.read(u64::MAX - 8), Ok(7_u64));
    assert!(table.read::<u64>(u64::MAX - 7).is_err());
    assert!(table.read::<u64>(u64::MAX).is_err());
}

/// A region, and a weak handle that shows whether it is still mapped.
fn watched(guest_addr: u64) -> (Region, Weak<Mapping>) {
    let region = region(guest_addr, PAGE);
    let watch = Arc::downgrade(&region.mapping);
    (region, watch)
}

fn is_mapped(watch: &Weak<Mapping>) -> bool {
    watch.strong_count() > 0
}

#[test]
fn a_removed_region_stays_until_its_last_user_has_completed() {
    let ((kept, kept_watch), (removed, watch)) = (watched(0), watched(PAGE));
    let mut sg = SgTable::new(4, table(&[kept.clone(), removed]));
    for slot in [0, 1] {
        sg.begin(slot);
        sg.push(slot, PAGE - 4, 8).unwrap();
        assert_eq!(sg.sgl(slot).pieces().count(), 2);
    }
    sg.set_memory(table(&[kept]));
    assert!(is_mapped(&watch) && sg.has_old_users());
    // New requests use the new table, requests in flight the old one.
    sg.begin(2);
    assert!(sg.push(2, PAGE, 1).is_err() && sg.push(2, 0, 1).is_ok());
    assert!(sg.memory().read::<u8>(PAGE).is_err());
    assert!(sg.memory_of(1).read::<u8>(PAGE).is_ok() && sg.memory_of(2).read::<u8>(PAGE).is_err());
    sg.sgl(1).fill(7);
    sg.end(0);
    assert!(is_mapped(&watch), "a request still uses the region");
    let mut seen = [0; 8];
    sg.sgl(1).read(0, &mut seen);
    assert_eq!(seen, [7; 8]);
    sg.end(1);
    assert!(!is_mapped(&watch) && !sg.has_old_users() && is_mapped(&kept_watch));
    assert_eq!(sg.in_use(), 1);
    sg.end(2);
    drop(sg);
    assert!(!is_mapped(&kept_watch));
}

#[test]
fn a_removed_region_does_not_wait_for_requests_in_other_regions() {
    let ((kept, _), (other, _), (removed, watch)) = (watched(0), watched(2 * PAGE), watched(PAGE));
    let mut sg = SgTable::new(4, table(&[kept.clone(), removed.clone()]));
    for (slot, addr) in [(0, 8), (1, PAGE + 8), (2, PAGE - 4)] {
        sg.begin(slot);
        sg.push(slot, addr, 8).unwrap();
    }
    sg.set_memory(table(&[kept.clone(), other.clone(), removed]));
    assert_eq!(sg.old_users().count(), 0, "no region was removed");
    sg.set_memory(table(&[kept.clone(), other.clone()]));
    assert!(sg.old_users().eq([1, 2]));
    assert!(sg.memory_of(0).read::<u8>(2 * PAGE).is_ok(), "the request has switched to the new table");
    // Another mapping at the same address is different memory.
    let (elsewhere, elsewhere_watch) = watched(0);
    sg.set_memory(table(&[elsewhere]));
    assert!(sg.old_users().eq([0, 1, 2]));
    sg.end(1);
    assert!(is_mapped(&watch));
    sg.end(2);
    assert!(!is_mapped(&watch), "the remaining requests never used it");
    sg.set_memory(table(&[kept]));
    assert_eq!((sg.old_users().count(), sg.in_use(), is_mapped(&elsewhere_watch)), (0, 1, false));
    let log_sees = sg.memory_of(0).guest_addr_of(&sg.sgl(0).pieces().next().unwrap());
    assert_eq!(log_sees, Some(8));
    sg.end(0);
    assert_eq!(sg.in_use(), 0);
}

#[test]
fn each_epoch_ends_with_its_own_users() {
    let all: Vec<_> = (0..4).map(|i| watched(i * PAGE)).collect();
    let mut sg = SgTable::new(4, table(&[all[0].0.clone()]));
    let watches: Vec<_> = all.iter().map(|(_, watch)| watch.clone()).collect();
    for (slot, (region, _)) in all.into_iter().enumerate() {
        if slot > 0 {
            sg.set_memory(table(&[region]));
        }
        sg.begin(slot as u16);
        sg.push(slot as u16, slot as u64 * PAGE, 8).unwrap();
    }
    let there = || watches.iter().map(is_mapped).collect::<Vec<_>>();
    sg.end(1);
    assert_eq!((there(), sg.in_use()), (vec![true, false, true, true], 3));
    sg.end(0);
    assert_eq!((there(), sg.in_use()), (vec![false, false, true, true], 2));
    sg.end(3);
    assert_eq!((there(), sg.has_old_users()), (vec![false, false, true, true], true));
    sg.push(2, 2 * PAGE, 8).unwrap();
    sg.sgl(2).fill(1);
    sg.end(2);
    assert_eq!((there(), sg.has_old_users()), (vec![false, false, false, true], false));
    sg.begin(2);
    sg.push(2, 3 * PAGE, 8).unwrap();
    sg.sgl(2).fill(1);
    sg.end(2);
}

#[test]
fn an_unused_table_is_dropped_at_once() {
    let (region, watch) = watched(0);
    let mut sg = SgTable::new(1, table(&[region]));
    sg.set_memory(Arc::default());
    assert!(!is_mapped(&watch) && !sg.has_old_users());
}

#[test]
fn dropping_a_table_leaks_memory_of_requests_in_flight() {
    let (region, watch) = watched(0);
    let mut sg = SgTable::new(2, table(&[region]));
    // A list with more pieces than fit into a slot is stored outside of the slot, and must stay allocated as well.
    sg.begin(1);
    (0..20).for_each(|i| sg.push(1, 100 * i, 10).unwrap());
    let sgl = sg.sgl(1);
    drop(sg);
    assert!(is_mapped(&watch));
    let data: Vec<u8> = (0..200).collect();
    sgl.write(0, &data);
    let mut seen = [0; 200];
    sgl.read(0, &mut seen);
    assert_eq!(&seen[..], data);
}

#[test]
fn a_list_has_less_than_4_gib() {
    let mapping = Arc::new(Mapping::anonymous(2 << 30).unwrap());
    let region = Region { guest_addr: 0, user_addr: 0, len: 2 << 30, offset: 0, mapping };
    let mut sg = SgTable::new(1, table(&[region]));
    sg.begin(0);
    assert_eq!(sg.push(0, 0, 2 << 30), Ok(()));
    assert_eq!(sg.push(0, 0, 2 << 30), Err(BadAddress { addr: 0, len: 2 << 30 }));
    assert_eq!(sg.push(0, 0, (2 << 30) - 1), Ok(()));
    assert_eq!(sg.sgl(0).len(), u32::MAX);
    sg.end(0);
}

#[test]
fn a_partly_missing_buffer_is_refused() {
    let mut sg = SgTable::new(1, table(&[region(0, PAGE), region(PAGE, PAGE)]));
    sg.begin(0);
    sg.push(0, 8, 8).unwrap();
    assert!(sg.push(0, PAGE - 8, 8192).is_err(), "two of three regions exist");
    sg.push(0, 100, 1).unwrap();
    sg.sgl(0).write(8, b"s");
    assert_eq!((sg.sgl(0).len(), sg.memory().read(100)), (9, Ok(*b"s")));
    sg.end(0);
}

#[test]
#[should_panic(expected = "the slot is in use")]
fn a_slot_is_begun_once() {
    let mut sg = SgTable::new(1, Arc::default());
    sg.begin(0);
    sg.begin(0);
}

#[test]
#[should_panic(expected = "the slot is in use")]
fn a_slot_is_ended_once() {
    let mut sg = SgTable::new(1, Arc::default());
    sg.begin(0);
    sg.end(0);
    sg.end(0);
}

#[test]
fn guest_addresses_of_pieces_are_found() {
    use crate::{DirtyLog, Seg};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsFd;
    // Regions that adjoin for the guest and are separate in this process; and one at a higher address.
    let before = table(&[region(PAGE, PAGE), region(2 * PAGE, 2 * PAGE), region(40 * PAGE, PAGE)]);
    assert_eq!(before.guest_addr_at_user(USER + 2 * PAGE + 5), Some(2 * PAGE + 5));
    assert_eq!(before.guest_addr_at_user(USER + 4 * PAGE), None);
    assert_eq!(before.guest_addr_at_user(0), None);
    for region in before.regions() {
        let base = region.mapping.base().as_ptr().wrapping_add(region.offset as usize);
        for at in [0, 7, region.len - 1] {
            let seg = Seg::new(base.wrapping_add(at as usize), 1);
            assert_eq!(before.guest_addr_of(&seg), Some(region.guest_addr + at));
        }
        assert_eq!(before.guest_addr_of(&Seg::new(base.wrapping_sub(1), 1)), None);
    }
    let mut sgs = SgTable::new(2, before);
    for slot in [0, 1] {
        sgs.begin(slot);
    }
    sgs.push(0, 2 * PAGE - 1, 2).unwrap();
    sgs.push(0, 40 * PAGE, 1).unwrap();
    // The table is replaced; the slot keeps the old one.
    sgs.set_memory(table(&[region(0, PAGE)]));
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGE).unwrap();
    let log = DirtyLog::map(file.as_fd(), 0, PAGE).unwrap();
    let bits = || {
        let mut bits = [0; 6];
        rustix::io::pread(&file, &mut bits, 0).unwrap();
        bits
    };
    assert_eq!(sgs.mark_dirty(1, 0..0, &log), 0);
    assert_eq!(sgs.mark_dirty(0, 1..2, &log), 2, "one piece and one word of the log");
    assert_eq!(bits(), [0b100, 0, 0, 0, 0, 0], "only written bytes are marked");
    sgs.mark_dirty(0, 0..3, &log);
    assert_eq!(bits(), [0b110, 0, 0, 0, 0, 1]);
    assert_eq!(log.beyond(), 0);
    for slot in [0, 1] {
        sgs.end(slot);
    }
}

#[test]
fn a_list_keeps_no_more_memory_than_ordinary_requests_need() {
    let mut sgs = SgTable::new(1, table(&[region(0, 2 * PAGE)]));
    for (pieces, kept) in [(KEPT_PIECES, true), (KEPT_PIECES + 1, false), (1, false)] {
        sgs.begin(0).extend((0..pieces as u64).map(|i| (i, 1))).unwrap();
        assert_eq!(sgs.sgl(0).segments() as usize, pieces);
        sgs.end(0);
        assert_eq!(sgs.long_lists.lists[0].capacity() >= KEPT_PIECES, kept, "after {pieces} pieces");
    }
}

#[test]
fn pieces_of_long_lists_are_counted_and_limited() {
    // Adjoining regions of a page each.
    let regions: Vec<Region> = (0..64).map(|i| region(i * PAGE, PAGE)).collect();
    let mut sgs = SgTable::new(2, table(&regions));
    sgs.begin(0).extend([(0, 1), (100, 1), (200, 1)]).unwrap();
    let all = (64 * PAGE) as u32;
    sgs.begin(1).extend((0..32).map(|_| (0, all))).unwrap();
    assert_eq!((sgs.long_pieces(), sgs.sgl(1).segments()), (LIST_MAX as u32, LIST_MAX as u32));
    assert_eq!(sgs.push(1, 0, 2 * PAGE as u32), Err(BadAddress { addr: 0, len: 2 * PAGE as u32 }));
    // A byte within one region, such as a response, needs no lookup of parts.
    sgs.push(1, 0, 1).unwrap();
    assert_eq!((sgs.long_pieces(), sgs.sgl(1).len()), (1 + LIST_MAX as u32, 32 * all + 1));
    assert_eq!(sgs.take_parts(), 32 * 64 + 2, "including regions of refused lists");
    sgs.end(1);
    assert_eq!((sgs.long_pieces(), sgs.take_parts()), (0, 0), "three pieces fit into the slot");
    assert!(sgs.push(0, 300, 1).is_ok() && sgs.push(0, 64 * PAGE, 1).is_err());
    assert_eq!(sgs.long_pieces(), 4);
    sgs.end(0);
    assert_eq!(sgs.long_pieces(), 0);
}

#[test]
fn a_list_grows_out_of_its_slot_and_keeps_its_order() {
    // Regions that adjoin for the guest and are separate in this process.
    let mut sgs = SgTable::new(1, table(&[region(0, PAGE), region(PAGE, PAGE), region(2 * PAGE, PAGE)]));
    for count in 0..8_u32 {
        sgs.begin(0);
        (0..count).for_each(|i| sgs.push(0, 16 * u64::from(i), 1 + i).unwrap());
        // Refused after two of its three parts were added: the list must not keep them, in the slot or outside.
        assert!(sgs.push(0, PAGE + 8, 2 * PAGE as u32).is_err());
        assert_eq!(sgs.long_pieces(), if count > 3 { count } else { 0 });
        let lens: Vec<_> = sgs.sgl(0).pieces().map(|seg| seg.len() as u32).collect();
        assert_eq!((lens, sgs.len_of(0)), ((1..=count).collect(), (1..=count).sum()));
        sgs.end(0);
        assert_eq!(sgs.long_pieces(), 0);
    }
}

#[test]
fn put_last_byte_writes_the_last_byte_of_any_list() {
    let mut sgs = SgTable::new(1, table(&[region(0, PAGE), region(PAGE, PAGE)]));
    for pieces in 1..6_u64 {
        let mut list = sgs.begin(0);
        list.extend((0..pieces).map(|i| (64 * i, 8))).unwrap();
        // The last list crosses from one region to another.
        list.push(PAGE - 2, 4).unwrap();
        list.note(pieces as u32);
        let all = list.sgl();
        let byte = 0x80 + pieces as u8;
        assert_eq!(
            (all.len(), sgs.put_last_byte(0, byte), sgs.note_of(0)),
            (8 * pieces as u32 + 4, pieces as u32, pieces as u32)
        );
        assert_eq!(sgs.memory().read::<[u8; 3]>(PAGE), Ok([0, byte, 0]));
        // The same, and the slot is freed.
        assert_eq!(sgs.end_with_last_byte(0, byte + 1), pieces as u32);
        assert_eq!(sgs.memory().read::<[u8; 3]>(PAGE), Ok([0, byte + 1, 0]));
        assert_eq!((sgs.in_use(), sgs.long_pieces()), (0, 0));
    }
}

#[test]
fn a_slot_of_replaced_memory_is_freed_in_its_epoch() {
    let (removed, kept) = (table(&[region(0, PAGE)]), table(&[region(PAGE, PAGE)]));
    let mut sgs = SgTable::new(1, Arc::clone(&removed));
    let mut list = sgs.begin(0);
    list.push(7, 1).unwrap();
    sgs.set_memory(kept);
    assert!(sgs.has_old_users());
    sgs.end_with_last_byte(0, 9);
    assert_eq!(removed.read::<[u8; 3]>(6), Ok([0, 9, 0]));
    assert!(!sgs.has_old_users() && sgs.in_use() == 0);
}

#[test]
#[should_panic(expected = "the slot is not in use")]
fn a_slot_ends_once() {
    let mut sgs = SgTable::new(1, table(&[region(0, PAGE)]));
    sgs.begin(0).push(0, 1).unwrap();
    sgs.end_with_last_byte(0, 1);
    sgs.end_with_last_byte(0, 1);
}

#[test]
fn put_first_writes_across_pieces() {
    let mut sgs = SgTable::new(1, table(&[region(0, PAGE)]));
    for lens in [&[8_u32, 8][..], &[3, 5, 1], &[1, 1, 1, 1, 4], &[9, 1, 1, 1, 1]] {
        let mut list = sgs.begin(0);
        for (at, len) in (0..).zip(lens) {
            list.push(64 * at, *len).unwrap();
        }
        sgs.put_first(0, b"12345678");
        let mut read = [0; 8];
        sgs.sgl(0).read(0, &mut read);
        assert_eq!(&read, b"12345678", "{lens:?}");
        sgs.end(0);
    }
}
