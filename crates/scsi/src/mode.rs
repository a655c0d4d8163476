//! Mode pages (SPC-4, section 7.5; SBC-3, section 6.4): caching, control, informational exceptions. Any context; pure.

use crate::cdb::PageControl;
use crate::lun::Mode;
use crate::{Nexus, Sense};
use aryk_bdev::Blocks;

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const EXCEPTIONS: u8 = 0x1c;
const ALL_PAGES: u8 = 0x3f;
const ALL_SUBPAGES: u8 = 0xff;

/// Bytes of a MODE SELECT's parameter list that are read, at most. All supported pages together are shorter.
pub(crate) const LIST_MAX: usize = 255;

/// The request of a MODE SENSE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub ten: bool,
    pub no_blocks: bool,
    pub long: bool,
    pub control: PageControl,
    pub page: u8,
    pub subpage: u8,
}

/// The properties of the disk that appear in mode data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disk {
    pub blocks: Blocks,
    pub block_size: u32,
    pub writable: bool,
    /// Mode pages can be saved.
    pub saves: bool,
}

impl Disk {
    pub fn of(nexus: &Nexus) -> Self {
        let geometry = nexus.bdev().geometry();
        let (writable, saves) = (nexus.is_writable(), nexus.lun().can_save());
        Self { blocks: geometry.blocks, block_size: geometry.block_size, writable, saves }
    }

    fn short_descriptor(&self) -> [u8; 8] {
        let mut out = [0; 8];
        out[..4].copy_from_slice(&u32::try_from(self.blocks.0).unwrap_or(u32::MAX).to_be_bytes());
        // The byte before the block's length is reserved.
        out[4..].copy_from_slice(&self.block_size.to_be_bytes());
        out
    }

    fn long_descriptor(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.blocks.0.to_be_bytes());
        out[12..].copy_from_slice(&self.block_size.to_be_bytes());
        out
    }
}

/// The answer to MODE SENSE.
///
/// # Errors
/// The requested page does not exist.
pub(crate) fn sense(query: Query, mode: Mode, disk: Disk) -> Result<Vec<u8>, Sense> {
    if query.subpage != 0 && !(query.page == ALL_PAGES && query.subpage == ALL_SUBPAGES) {
        return Err(Sense::in_cdb(3));
    }
    if query.control == PageControl::Saved && !disk.saves {
        return Err(Sense::SAVING);
    }
    let is_wanted = |code: &u8| query.page == ALL_PAGES || query.page == *code;
    let codes = [CACHING, CONTROL, EXCEPTIONS].into_iter().filter(is_wanted);
    let pages: Vec<u8> = codes.flat_map(|code| page(code, query.control, mode, disk)).collect();
    if pages.is_empty() {
        return Err(Sense::in_cdb_bit(2, 5));
    }
    let blocks = match (query.no_blocks, query.long) {
        (true, _) => Vec::new(),
        (false, false) => disk.short_descriptor().to_vec(),
        (false, true) => disk.long_descriptor().to_vec(),
    };
    // WP if the disk is write-protected; DPOFUA, since DPO and FUA are understood.
    let device = u8::from(!disk.writable || mode.protected) << 7 | 0x10;
    let header = if query.ten {
        let [high, low] = ((6 + blocks.len() + pages.len()) as u16).to_be_bytes();
        vec![high, low, 0, device, u8::from(query.long && !query.no_blocks), 0, 0, blocks.len() as u8]
    } else {
        vec![(3 + blocks.len() + pages.len()) as u8, 0, device, blocks.len() as u8]
    };
    Ok([header, blocks, pages].concat())
}

/// A mode page, with its header.
fn page(code: u8, control: PageControl, mode: Mode, Disk { writable, saves, .. }: Disk) -> Vec<u8> {
    let values = match control {
        PageControl::Current | PageControl::Saved => mode,
        PageControl::Default => Mode::DEFAULT,
        PageControl::Changeable => Mode { write_cache: writable, protected: writable, descriptors: true },
    };
    let changeable = control == PageControl::Changeable;
    let mut page = match code {
        CACHING => vec![0; 20],
        _ => vec![0; 12],
    };
    (page[0], page[1]) = (code | u8::from(saves) << 7, page.len() as u8 - 2);
    match code {
        CACHING => page[2] = u8::from(values.write_cache) << 2,
        CONTROL => {
            page[2] = u8::from(values.descriptors) << 2;
            page[4] = u8::from(values.protected) << 3;
            if !changeable {
                // Commands may be reordered; no busy timeout is known.
                page[3] = 0x10;
                (page[8], page[9]) = (0xff, 0xff);
            }
        }
        // Informational exceptions are not reported.
        _ if !changeable => page[2] = 0x08,
        _ => {}
    }
    page
}

/// The mode that results from `mode` and MODE SELECT's parameter list.
///
/// # Errors
/// The error in the list, and its position.
pub(crate) fn select(list: &[u8], ten: bool, mode: Mode, disk: Disk) -> Result<Mode, Sense> {
    if list.is_empty() {
        return Ok(mode);
    }
    let header = if ten { 8 } else { 4 };
    if list.len() < header {
        return Err(Sense::LIST_LENGTH);
    }
    let (long, blocks_len) = match ten {
        true => (list[4] & 1 == 1, usize::from(u16::from_be_bytes([list[6], list[7]]))),
        false => (false, usize::from(list[3])),
    };
    let rest = list.get(header..header + blocks_len).ok_or(Sense::LIST_LENGTH)?;
    if !(rest.is_empty() || describes(rest, long, disk)) {
        return Err(Sense::in_list(header as u16));
    }
    let (mut at, mut mode) = (header + blocks_len, mode);
    while at < list.len() {
        let head = list.get(at..at + 2).ok_or(Sense::LIST_LENGTH)?;
        let code = head[0] & 0x3f;
        if head[0] & 0x40 != 0 || ![CACHING, CONTROL, EXCEPTIONS].contains(&code) {
            return Err(Sense::in_list(at as u16));
        }
        let [current, changeable] =
            [PageControl::Current, PageControl::Changeable].map(|control| page(code, control, mode, disk));
        if usize::from(head[1]) != current.len() - 2 {
            return Err(Sense::in_list(at as u16 + 1));
        }
        let new = list.get(at..at + current.len()).ok_or(Sense::LIST_LENGTH)?;
        let wrong = (2..current.len()).find(|&i| (new[i] ^ current[i]) & !changeable[i] != 0);
        if let Some(wrong) = wrong {
            return Err(Sense::in_list((at + wrong) as u16));
        }
        match code {
            CACHING => mode.write_cache = new[2] & 0x04 != 0,
            CONTROL => {
                mode.descriptors = new[2] & 0x04 != 0;
                mode.protected = new[4] & 0x08 != 0;
            }
            _ => {}
        }
        at += current.len();
    }
    Ok(mode)
}

/// Whether a block descriptor matches the disk: the number of blocks is the disk's, 0, or all ones; and the block length is the
/// disk's.
fn describes(descriptor: &[u8], long: bool, disk: Disk) -> bool {
    let own = if long { disk.long_descriptor().to_vec() } else { disk.short_descriptor().to_vec() };
    if descriptor.len() != own.len() {
        return false;
    }
    let number = if long { 8 } else { 4 };
    let (blocks, rest) = descriptor.split_at(number);
    let is_any = blocks.iter().all(|b| *b == 0) || blocks.iter().all(|b| *b == 0xff);
    (is_any || blocks == &own[..number]) && rest == &own[number..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Disk = Disk { blocks: Blocks(1000), block_size: 512, writable: true, saves: false };

    fn query(page: u8, control: PageControl) -> Query {
        Query { ten: false, no_blocks: false, long: false, control, page, subpage: 0 }
    }

    #[test]
    fn the_answer_to_mode_sense_can_be_selected() {
        for ten in [false, true] {
            let query = Query { ten, long: ten, ..query(ALL_PAGES, PageControl::Current) };
            let data = sense(query, Mode::DEFAULT, DISK).unwrap();
            assert_eq!(select(&data, ten, Mode::DEFAULT, DISK), Ok(Mode::DEFAULT));
            for len in 1..data.len() {
                let cut = select(&data[..len], ten, Mode::DEFAULT, DISK);
                assert!(cut.is_ok() || cut == Err(Sense::LIST_LENGTH), "{len}: {cut:?}");
            }
        }
    }

    #[test]
    fn only_changeable_bits_change() {
        let data = sense(query(ALL_PAGES, PageControl::Current), Mode::DEFAULT, DISK).unwrap();
        let mask = sense(query(ALL_PAGES, PageControl::Changeable), Mode::DEFAULT, DISK).unwrap();
        let mut changed = 0;
        for at in 12..data.len() {
            // The highest bit of a page's code (PS) is ignored in MODE SELECT.
            for bit in 0..if [12, 32, 44].contains(&at) { 7 } else { 8 } {
                let mut new = data.clone();
                new[at] ^= 1 << bit;
                match select(&new, false, Mode::DEFAULT, DISK) {
                    Ok(mode) => {
                        assert_eq!(mask[at] >> bit & 1, 1, "{at}.{bit}");
                        assert_eq!(
                            sense(query(ALL_PAGES, PageControl::Current), mode, DISK).unwrap()[12..],
                            new[12..]
                        );
                        changed += 1;
                    }
                    Err(error) if mask[at] >> bit & 1 == 1 => {
                        // The mask of changeable bits also holds page codes and lengths.
                        let header = [12, 13, 32, 33, 44, 45].contains(&at);
                        assert!(header && error.key == crate::Key::IllegalRequest, "{at}.{bit}");
                    }
                    Err(error) => assert_eq!(error.key, crate::Key::IllegalRequest),
                }
            }
        }
        assert_eq!(changed, 3, "the cache, the protection, the format of sense data");
    }

    #[test]
    fn unknown_pages_are_refused() {
        assert_eq!(
            sense(query(0x01, PageControl::Current), Mode::DEFAULT, DISK),
            Err(Sense::in_cdb_bit(2, 5))
        );
        let subpage = Query { subpage: 1, ..query(CONTROL, PageControl::Current) };
        assert_eq!(sense(subpage, Mode::DEFAULT, DISK), Err(Sense::in_cdb(3)));
        let read_only = Disk { writable: false, ..DISK };
        let data = sense(query(CACHING, PageControl::Current), Mode::DEFAULT, read_only).unwrap();
        assert_eq!(data[..4], [31, 0, 0x90, 8]);
        assert_eq!(data[4..12], [0, 0, 3, 232, 0, 0, 2, 0]);
        assert_eq!(data[12..15], [0x08, 18, 4]);
    }
}
