//! Memory tables from a hostile front-end: regions that overlap, wrap, are empty or exceed their files, and files that
//! are truncated while in use. Lookups of arbitrary addresses are compared with a linear search through the same regions.
//!
//! The first byte is the number of regions; a few bytes describe each of them; steps follow.
#![no_main]

use aryk_dma::{Mapping, MemTable, Region, SgTable, install_fault_handler};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

const PAGE: u64 = 4096;
/// Bytes in each file.
const FILE: u64 = 4 * PAGE;

struct File {
    fd: OwnedFd,
    /// Its current length in bytes.
    len: u64,
}

/// An address that is mostly an edge case: near 0, near one of a few places, or near the end.
fn address(u: &mut Unstructured<'_>) -> Result<u64> {
    let (class, low) = (u.arbitrary::<u8>()?, u.arbitrary::<u16>()?);
    Ok(match class % 8 {
        0..=4 => u64::from(low),
        5 => 0x1_0000_0000_u64 - 0x8000 + u64::from(low),
        6 => u64::MAX - u64::from(low),
        _ => u.arbitrary()?,
    })
}

fn region(u: &mut Unstructured<'_>, files: &mut Vec<File>) -> Result<Option<Region>> {
    let (file_offset, file_len) = (u64::from(u.arbitrary::<u8>()?), u64::from(u.arbitrary::<u16>()?));
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, FILE).expect("a memfd has any length");
    let file_offset = file_offset * (PAGE / 4);
    let mapped = Mapping::shared(fd.as_fd(), file_offset, file_len);
    let sound = file_offset % PAGE == 0 && file_len > 0 && file_offset + file_len <= FILE;
    assert_eq!(mapped.is_ok(), sound, "{file_offset:#x}, {file_len:#x}");
    let Ok(mapping) = mapped else { return Ok(None) };
    files.push(File { fd, len: FILE });
    let part = u.arbitrary::<u8>()?;
    let (offset, len) = match part % 4 {
        0 | 1 => (0, file_len),
        2 => (u64::from(part), file_len.saturating_sub(part.into())),
        _ => (address(u)?, address(u)?),
    };
    let (guest_addr, user_addr) = (address(u)?, address(u)?);
    Ok(Some(Region { guest_addr, user_addr, len, offset, mapping: Arc::new(mapping) }))
}

/// Whether the regions make a valid table, in the simplest possible code.
fn sound(regions: &[Region]) -> bool {
    let space = 1_u128 << 64;
    let end = |at: u64, len: u64| u128::from(at) + u128::from(len);
    regions.iter().enumerate().all(|(i, r)| {
        let apart = |other: &Region| {
            end(other.guest_addr, other.len) <= r.guest_addr.into()
                || end(r.guest_addr, r.len) <= other.guest_addr.into()
        };
        r.len > 0
            && end(r.guest_addr, r.len) < space
            && end(r.user_addr, r.len) < space
            && end(r.offset, r.len) <= r.mapping.len().into()
            && regions[..i].iter().all(apart)
    })
}

/// Whether regions contain all bytes from `addr` on.
fn is_there(regions: &[Region], addr: u64, len: u64) -> bool {
    (0..u128::from(len)).all(|i| {
        let byte = u128::from(addr) + i;
        let holds =
            |r: &Region| byte >= r.guest_addr.into() && byte < u128::from(r.guest_addr) + u128::from(r.len);
        regions.iter().any(holds)
    })
}

fn step(u: &mut Unstructured<'_>, table: &Arc<MemTable>, files: &mut [File]) -> Result<()> {
    let kind = u.arbitrary::<u8>()?;
    let (addr, len) = (address(u)?, u64::from(u.arbitrary::<u16>()? % 9000));
    let there = is_there(table.regions(), addr, len);
    match kind % 8 {
        0 => assert_eq!(table.read_bytes(addr, &mut vec![0; len as usize]).is_ok(), there),
        1 => assert_eq!(table.write_bytes(addr, &vec![kind; len as usize]).is_ok(), there),
        2 => assert_eq!(table.read::<[u8; 16]>(addr).is_ok(), is_there(table.regions(), addr, 16)),
        3 => {
            let area = table.area_at_guest(addr, len);
            assert!(area.is_none() || there);
            if let Some(area) = area.filter(|area| area.len() >= 8) {
                area.write(0, &addr);
                assert_eq!((area.read(0), table.read(addr)), (addr, Ok(addr)));
            }
        }
        4 => {
            let area = table.area_at_user(addr, len);
            assert!(area.is_none_or(|area| area.len() == len));
        }
        5 => {
            let mut sg = SgTable::new(1, Arc::clone(table));
            sg.begin(0);
            assert_eq!(sg.push(0, addr, len as u32).is_ok(), there);
            sg.set_memory(Arc::default());
            sg.sgl(0).fill(kind);
            assert_eq!(u64::from(sg.sgl(0).len()), if there { len } else { 0 });
            sg.end(0);
            assert!(!sg.has_old_users());
        }
        6 => {
            table.prefetch(addr);
            table.prefetch_write(addr);
        }
        _ => {
            let Some(file) = files.get_mut(usize::from(kind / 8)) else { return Ok(()) };
            file.len = file.len.min(len);
            ftruncate(&file.fd, file.len).expect("a memfd can be truncated");
        }
    }
    if files.iter().all(|file| file.len == FILE) {
        assert!(!table.is_poisoned());
    }
    Ok(())
}

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let (mut files, mut regions) = (Vec::new(), Vec::new());
    for _ in 0..u.arbitrary::<u8>()? % 12 {
        regions.extend(region(u, &mut files)?);
    }
    let expected = sound(&regions);
    let table = MemTable::new(regions);
    assert_eq!(table.is_ok(), expected, "{table:?}");
    let Ok(table) = table.map(Arc::new) else { return Ok(()) };
    while !u.is_empty() {
        step(u, &table, &mut files)?;
    }
    Ok(())
}

fuzz_target!(
    init: install_fault_handler(),
    |data: &[u8]| {
        // An input may end early.
        let _ended_early = run(&mut Unstructured::new(data));
    }
);
