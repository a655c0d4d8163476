//! The rules by which a pool's state is found on a disk. Any context.
//!
//! Of two valid copies of the superblock, the one with the larger update number counts. Of the checkpoints, the one with the
//! largest generation counts, unless it was never finished: then nothing refers to it, and no record of edits follows it. A
//! checkpoint that was finished and cannot be read is damage. The older state is not used in its place, because what it refers to
//! may have been overwritten. But the checkpoint before, if all of its edits are there, too, is the same state in other words.
//!
//! The edits end at the first record that is valid in neither mirror. If a later record exists behind it, that is damage.

use std::ops::Range;

use aryk_volume::Recovered;

use super::{Base, Expected, Known, Lack, Opened};
use crate::error::{Error, Finding, Structure};
use crate::foreign::{self, END_BYTES, START_BYTES};
use crate::journal::{End, FIRST_BYTES, FIRST_GENERATION, Patch, Start};
use crate::record::{self, EDITS_BYTES_MAX, HEADER_BYTES, Header, Kind, RECORD_ALIGN, record_bytes};
use crate::store::{Position, Store};
use crate::superblock::{Area, COPY_BYTES, COPY_PLACES, Invalid, PLACES, SUPERBLOCK_BYTES, Superblock};

/// More than any pool has checkpoints: each takes two flushes of its disk.
const GENERATIONS_MAX: u64 = 1 << 32;
/// How far the edits are read ahead.
const AHEAD: u64 = 2 << 20;

/// Why the search ends early.
enum Stop {
    Unread(Range<u64>),
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// The disk, as far as it is known.
struct Disk<'a> {
    known: &'a Known,
    base: Base,
}

impl Disk<'_> {
    /// Bytes of the disk; `None` if the disk cannot read them.
    fn get(&self, offset: u64, len: u64, ahead: u64) -> Result<Option<Vec<u8>>, Stop> {
        match self.known.get(offset..offset + len, offset + ahead) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Lack::Unreadable) => Ok(None),
            Err(Lack::Unread(range)) => Err(Stop::Unread(range)),
        }
    }

    /// A valid header of this pool at an offset.
    fn header(&self, superblock: &Superblock, offset: u64) -> Result<Option<Header>, Stop> {
        let bytes = self.get(offset, RECORD_ALIGN, RECORD_ALIGN)?;
        Ok(bytes.and_then(|bytes| Header::parse(&bytes)).filter(|header| header.pool == superblock.pool))
    }

    /// The bytes behind the header in the first page of a record.
    fn first_page(&self, offset: u64) -> Result<Vec<u8>, Stop> {
        let bytes = self.get(offset, RECORD_ALIGN, RECORD_ALIGN)?;
        Ok(bytes.map(|mut bytes| bytes.split_off(HEADER_BYTES)).unwrap_or_default())
    }

    /// The payload of the record at an offset, if it is intact.
    fn payload(&self, header: &Header, offset: u64) -> Result<Option<Vec<u8>>, Stop> {
        let len = (HEADER_BYTES + header.len as usize) as u64;
        let Some(mut bytes) = self.get(offset, len, len)? else { return Ok(None) };
        bytes.drain(..HEADER_BYTES);
        Ok(header.is_of(&bytes).then_some(bytes))
    }
}

/// The pool of a disk, or why there is none; or the bytes that must be known before.
pub(crate) fn find(
    known: &Known,
    base: Base,
    expected: &Expected,
) -> Result<Result<Opened, Error>, Range<u64>> {
    match search(&Disk { known, base }, expected) {
        Ok(opened) => Ok(Ok(opened)),
        Err(Stop::Error(error)) => Ok(Err(error)),
        Err(Stop::Unread(range)) => Err(range),
    }
}

fn search(disk: &Disk<'_>, expected: &Expected) -> Result<Opened, Stop> {
    let (superblock, stale_copy) = superblock(disk)?;
    check(&superblock, disk.base, expected)?;
    let mut findings: Vec<_> = stale_copy
        .map(|copy| Finding { what: Structure::Superblock, offset: PLACES[copy] })
        .into_iter()
        .collect();
    let candidates = candidates(disk, &superblock)?;
    let generation =
        candidates.iter().map(|c| c.header.generation.max(c.header.successor)).max().unwrap_or(0);
    let found = checkpoint(disk, &superblock, &candidates, &mut findings).and_then(|found| {
        let tail = edits(disk, &superblock, &found, &mut findings)?;
        Ok((found, tail))
    });
    let (found, tail) = match found {
        Ok(found) => found,
        Err(Stop::Error(error)) if expected.may_lack_checkpoint => {
            let copies = copies(disk, &superblock)?;
            findings.extend(damage(&error));
            let (patches, first_page, lost, next_copy) = (Vec::new(), Vec::new(), None, copies.next);
            // What is left of old records has smaller numbers, also where no header is left that says so.
            let generation = generation.saturating_add(GENERATIONS_MAX);
            let start =
                Start { superblock, end: None, generation, patches, stale_copy, first_page, lost, next_copy };
            return Ok(Opened { store: Store::new(start), recovered: None, copy: copies.newest, findings });
        }
        Err(stop) => return Err(stop),
    };
    let mut patches = tail.patches;
    for old in candidates.iter().filter(|c| c.area != found.area && c.header.successor == 0) {
        // The generation of an interrupted checkpoint is larger; its area is written next.
        if old.header.generation < found.header.generation {
            let header = Header { successor: found.header.generation, ..old.header };
            let offset = superblock.areas[old.area].mirrors[old.mirror].offset;
            let bytes = [&header.encode()[..], &disk.first_page(offset)?].concat();
            patches.push(Patch { copy: old.mirror, offset, bytes });
        }
    }
    let end = Some(tail.end);
    let Checkpoint { payload, before, lost, .. } = found;
    // What is lost is not written again.
    let is_lost = lost.is_some();
    let first_page = if is_lost { Vec::new() } else { payload[..payload.len().min(FIRST_BYTES)].to_vec() };
    let next_copy = copies(disk, &superblock)?.next;
    let start = Start { superblock, end, generation, patches, stale_copy, first_page, lost, next_copy };
    let store = Store::new(start);
    if expected.position.is_some_and(|position: Position| store.position() < position) {
        return Err(Error::Older.into());
    }
    Ok(Opened {
        store,
        recovered: Some(Recovered {
            checkpoint: payload,
            edits: before.into_iter().chain(tail.edits).collect(),
        }),
        copy: None,
        findings,
    })
}

/// The copies of the manifest.
struct Copies {
    /// The newest one, unless it says that there is none.
    newest: Option<Vec<u8>>,
    /// The place of the next one, and its number.
    next: (usize, u64),
}

fn copies(disk: &Disk<'_>, superblock: &Superblock) -> Result<Copies, Stop> {
    let mut found: Option<(usize, Header, Vec<u8>)> = None;
    for (n, offset) in COPY_PLACES.into_iter().enumerate().filter(|_| superblock.has_room_for_copies()) {
        let header = disk.header(superblock, offset)?;
        let is_copy = |header: &Header| {
            header.kind == Kind::Copy && (HEADER_BYTES as u64 + u64::from(header.len)) <= COPY_BYTES
        };
        let Some(header) = header.filter(is_copy) else { continue };
        let Some(payload) = disk.payload(&header, offset)? else { continue };
        if found.as_ref().is_none_or(|(_, newest, _)| newest.generation < header.generation) {
            found = Some((n, header, payload));
        }
    }
    let next = found.as_ref().map_or((0, 1), |(n, header, _)| (1 - n, header.generation.saturating_add(1)));
    Ok(Copies { newest: found.map(|(.., payload)| payload).filter(|payload| !payload.is_empty()), next })
}

/// The damage that an error is about.
fn damage(error: &Error) -> Option<Finding> {
    match *error {
        Error::Damaged { what, offset } => Some(Finding { what, offset }),
        Error::Medium(offset) => Some(Finding { what: Structure::Unreadable, offset }),
        _ => None,
    }
}

/// The newest superblock, and the copy that is to be written again.
fn superblock(disk: &Disk<'_>) -> Result<(Superblock, Option<usize>), Stop> {
    let mut copies = Vec::new();
    for offset in PLACES {
        let is_inside = offset + SUPERBLOCK_BYTES as u64 <= disk.base.bytes;
        let len = SUPERBLOCK_BYTES as u64;
        copies.push(if is_inside { disk.get(offset, len, len)? } else { Some(Vec::new()) });
    }
    let parsed: Vec<_> =
        copies.iter().map(|copy| copy.as_ref().map(|bytes| Superblock::parse(bytes))).collect();
    // A newer version may have written one copy only so far.
    for invalid in parsed.iter().flatten().filter_map(|copy| copy.as_ref().err()) {
        match invalid {
            Invalid::Version(version) => return Err(Error::Version(*version).into()),
            Invalid::Features(features) => return Err(Error::Features(*features).into()),
            _ => {}
        }
    }
    let valid = |copy: usize| parsed[copy].as_ref().and_then(|parsed| parsed.as_ref().ok());
    match (valid(0), valid(1)) {
        (Some(a), Some(b)) if a.pool != b.pool => {
            Err(Error::Damaged { what: Structure::TwoPools, offset: PLACES[1] }.into())
        }
        (Some(a), Some(b)) if a.update == b.update => Ok((a.clone(), None)),
        (Some(a), Some(b)) if a.update > b.update => Ok((a.clone(), Some(1))),
        (Some(a), None) => Ok((a.clone(), Some(1))),
        (_, Some(b)) => Ok((b.clone(), Some(0))),
        (None, None) => Err(no_superblock(disk, &parsed)?.into()),
    }
}

type Parsed = Option<Result<Superblock, Invalid>>;

/// Why there is no superblock.
fn no_superblock(disk: &Disk<'_>, parsed: &[Parsed]) -> Result<Error, Stop> {
    for (copy, offset) in parsed.iter().zip(PLACES) {
        match copy {
            None => return Ok(Error::Medium(offset)),
            Some(Err(Invalid::Checksum | Invalid::Field(_))) => {
                return Ok(Error::Damaged { what: Structure::Superblocks, offset });
            }
            Some(_) => {}
        }
    }
    Ok(Error::NotAPool { found: foreign(disk.known, disk.base)? })
}

/// What a disk without a pool has.
fn foreign(known: &Known, base: Base) -> Result<Option<foreign::Foreign>, Stop> {
    let disk = Disk { known, base };
    let len = base.bytes.min(START_BYTES as u64);
    let start = disk.get(0, len, len)?;
    let len = base.bytes.min(END_BYTES as u64);
    let end = disk.get(base.bytes - len, len, len)?;
    Ok(foreign::recognise(&start.unwrap_or_default(), &end.unwrap_or_default()))
}

/// What a new pool would destroy, as an error.
pub(crate) fn occupant(known: &Known, base: Base) -> Result<Result<(), Error>, Range<u64>> {
    let disk = Disk { known, base };
    let error = match superblock(&disk) {
        Ok((superblock, _)) => Error::Pool { pool: superblock.pool, name: superblock.name },
        Err(Stop::Error(Error::NotAPool { found: None })) => return Ok(Ok(())),
        Err(Stop::Error(Error::NotAPool { found: Some(found) })) => Error::Foreign(found),
        Err(Stop::Error(error)) => error,
        Err(Stop::Unread(range)) => return Err(range),
    };
    Ok(Err(error))
}

fn check(superblock: &Superblock, base: Base, expected: &Expected) -> Result<(), Error> {
    if let Some(expected) = expected.pool.filter(|&pool| pool != superblock.pool) {
        return Err(Error::OtherPool { expected, found: superblock.pool });
    }
    if expected.shard.is_some_and(|shard| shard != superblock.shard) {
        return Err(Error::OtherShard);
    }
    if superblock.devices.len() != 1 {
        return Err(Error::Devices(superblock.devices.len() as u32));
    }
    let needed = superblock.devices[0].bytes;
    if base.bytes < needed {
        return Err(Error::Shorter { expected: needed, found: base.bytes });
    }
    if base.block > superblock.alignment {
        return Err(Error::BlockSize { disk: base.block, pool: superblock.alignment });
    }
    Ok(())
}

/// The header of a checkpoint in one mirror of an area.
struct Candidate {
    area: usize,
    mirror: usize,
    header: Header,
}

fn candidates(disk: &Disk<'_>, superblock: &Superblock) -> Result<Vec<Candidate>, Stop> {
    let mut candidates = Vec::new();
    for (n, area) in superblock.areas.iter().enumerate() {
        for (mirror, place) in area.mirrors.iter().enumerate() {
            let header = disk.header(superblock, place.offset)?;
            let header =
                header.filter(|header| header.kind == Kind::Checkpoint && header.bytes() <= area.bytes);
            candidates.extend(header.map(|header| Candidate { area: n, mirror, header }));
        }
    }
    Ok(candidates)
}

/// The checkpoint that counts.
struct Checkpoint {
    area: usize,
    header: Header,
    payload: Vec<u8>,
    /// Edits between the payload and the checkpoint, if the payload is that of the checkpoint before.
    before: Vec<Vec<u8>>,
    /// If its own payload is lost: the mirror to which the next checkpoint is written first.
    lost: Option<usize>,
}

impl Checkpoint {
    fn new(candidate: &Candidate, payload: Vec<u8>) -> Self {
        Self { area: candidate.area, header: candidate.header, payload, before: Vec::new(), lost: None }
    }
}

/// The state of a lost checkpoint: the one before, and all edits up to it. The first checkpoint is that of an empty pool: it is
/// made without a payload.
fn before(
    disk: &Disk<'_>,
    superblock: &Superblock,
    candidates: &[Candidate],
    lost: &Candidate,
) -> Result<Option<Checkpoint>, Stop> {
    if lost.header.generation == FIRST_GENERATION {
        return Ok(Some(Checkpoint { lost: Some(0), ..Checkpoint::new(lost, Vec::new()) }));
    }
    let mut from_both = None;
    for old in candidates.iter().filter(|c| c.header.successor == lost.header.generation) {
        let offset = superblock.areas[old.area].mirrors[old.mirror].offset;
        let Some(payload) = disk.payload(&old.header, offset)? else { continue };
        let found = Checkpoint::new(old, payload);
        match edits(disk, superblock, &found, &mut Vec::new()) {
            Ok(tail) if tail.end.link == old.header.previous => {
                let is_whole = is_whole(disk, superblock, old, &tail.end)?;
                // This mirror has it until the next checkpoint is complete in the other one.
                let (first, before) = (Some(1 - old.mirror), tail.edits);
                let made = Checkpoint { before, lost: first, ..Checkpoint::new(lost, found.payload) };
                if is_whole {
                    return Ok(Some(made));
                }
                from_both.get_or_insert(made);
            }
            Ok(_) | Err(Stop::Error(_)) => {}
            Err(unread) => return Err(unread),
        }
    }
    Ok(from_both)
}

/// Whether the mirror of an intact checkpoint has all records up to an end.
fn is_whole(disk: &Disk<'_>, superblock: &Superblock, old: &Candidate, last: &End) -> Result<bool, Stop> {
    let area = &superblock.areas[old.area];
    let (offset, link) = (old.header.bytes(), old.header.link());
    let mut end = End { area: old.area, checkpoint: old.header, offset, sequence: 1, link };
    while end.sequence < last.sequence {
        let Some(Record { header, .. }) = next_record(disk, superblock, area, &end, old.mirror)? else {
            return Ok(false);
        };
        (end.offset, end.sequence, end.link) = (end.offset + header.bytes(), end.sequence + 1, header.link());
    }
    Ok(true)
}

fn checkpoint(
    disk: &Disk<'_>,
    superblock: &Superblock,
    candidates: &[Candidate],
    findings: &mut Vec<Finding>,
) -> Result<Checkpoint, Stop> {
    let offset_of = |c: &Candidate| superblock.areas[c.area].mirrors[c.mirror].offset;
    let replaced = candidates.iter().map(|c| c.header.successor).max().unwrap_or(0);
    let mut sorted: Vec<_> = candidates.iter().collect();
    sorted.sort_by_key(|c| (std::cmp::Reverse(c.header.generation), c.mirror));
    for same in sorted.chunk_by(|a, b| a.header.generation == b.header.generation) {
        let generation = same[0].header.generation;
        let offset = offset_of(same[0]);
        if generation < replaced {
            break;
        }
        let mut found = None;
        let mut is_used = replaced == generation;
        for candidate in same {
            let offset = offset_of(candidate);
            match disk.payload(&candidate.header, offset)? {
                Some(payload) if found.is_none() => {
                    found = Some(Checkpoint::new(candidate, payload));
                }
                Some(_) => {}
                None => findings.push(Finding { what: Structure::Checkpoint, offset }),
            }
            let area = &superblock.areas[candidate.area];
            is_used |= follows(disk, superblock, area, &candidate.header)?;
        }
        if let Some(found) = found {
            for (mirror, place) in superblock.areas[found.area].mirrors.iter().enumerate() {
                if same.iter().all(|c| c.mirror != mirror) {
                    findings.push(Finding { what: Structure::Checkpoint, offset: place.offset });
                }
            }
            return Ok(found);
        }
        if is_used {
            if let Some(found) = before(disk, superblock, candidates, same[0])? {
                findings.retain(|finding| finding.what != Structure::Checkpoint);
                findings.push(Finding { what: Structure::RemadeCheckpoint, offset });
                return Ok(found);
            }
            return Err(Error::Damaged { what: Structure::Checkpoints, offset }.into());
        }
        // Interrupted while it was written: no damage.
        findings.clear();
    }
    let offset = superblock.areas[0].mirrors[0].offset;
    Err(Error::Damaged { what: Structure::AllCheckpoints, offset }.into())
}

/// Whether a record of edits follows this checkpoint in one of the mirrors.
fn follows(disk: &Disk<'_>, superblock: &Superblock, area: &Area, checkpoint: &Header) -> Result<bool, Stop> {
    if checkpoint.bytes() + RECORD_ALIGN > area.bytes {
        return Ok(false);
    }
    for place in area.mirrors {
        let header = disk.header(superblock, place.offset + checkpoint.bytes())?;
        if header.is_some_and(|h| (h.generation, h.sequence) == (checkpoint.generation, 1)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The edits after a checkpoint, and the end of the journal.
struct Tail {
    edits: Vec<Vec<u8>>,
    end: End,
    /// The missing copy of the last record.
    patches: Vec<Patch>,
}

fn edits(
    disk: &Disk<'_>,
    superblock: &Superblock,
    found: &Checkpoint,
    findings: &mut Vec<Finding>,
) -> Result<Tail, Stop> {
    let area = &superblock.areas[found.area];
    let header = found.header;
    let mut tail = Tail {
        edits: Vec::new(),
        end: End {
            area: found.area,
            checkpoint: header,
            offset: header.bytes(),
            sequence: 1,
            link: header.link(),
        },
        patches: Vec::new(),
    };
    loop {
        let end = tail.end;
        if end.offset + RECORD_ALIGN > area.bytes {
            return Ok(tail);
        }
        let records =
            [next_record(disk, superblock, area, &end, 0)?, next_record(disk, superblock, area, &end, 1)?];
        let missing = records.iter().position(Option::is_none);
        let Some(Record { header, payload, edits }) = records.into_iter().flatten().next() else {
            check_end(disk, superblock, area, &end)?;
            return Ok(tail);
        };
        // Only the last record may lack a copy without damage: the power failed while it was written.
        findings.extend(tail.patches.drain(..).map(|p| Finding { what: Structure::Edits, offset: p.offset }));
        if let Some(copy) = missing {
            let mut bytes = header.encode().to_vec();
            bytes.extend_from_slice(&payload);
            tail.patches.push(Patch { copy, offset: area.mirrors[copy].offset + end.offset, bytes });
        }
        tail.edits.extend(edits);
        tail.end = End {
            offset: end.offset + header.bytes(),
            sequence: end.sequence + 1,
            link: header.link(),
            ..end
        };
    }
}

/// A valid record of edits.
struct Record {
    header: Header,
    payload: Vec<u8>,
    edits: Vec<Vec<u8>>,
}

/// The record at the end of what is known, in one mirror.
fn next_record(
    disk: &Disk<'_>,
    superblock: &Superblock,
    area: &Area,
    end: &End,
    mirror: usize,
) -> Result<Option<Record>, Stop> {
    let offset = area.mirrors[mirror].offset + end.offset;
    let room = area.bytes - end.offset;
    // Many small records follow each other: they are read together.
    disk.get(offset, RECORD_ALIGN, AHEAD.min(room))?;
    let Some(header) = disk.header(superblock, offset)? else { return Ok(None) };
    let is_next = header.kind == Kind::Edits
        && header.generation == end.checkpoint.generation
        && header.sequence == end.sequence
        && header.previous == end.link
        && header.len as usize <= EDITS_BYTES_MAX
        && header.bytes() <= room;
    if !is_next {
        return Ok(None);
    }
    let Some(payload) = disk.payload(&header, offset)? else { return Ok(None) };
    Ok(record::edits(&payload).map(|edits| Record { header, payload, edits }))
}

/// Makes sure that no record is missing: none exists behind the end.
fn check_end(disk: &Disk<'_>, superblock: &Superblock, area: &Area, end: &End) -> Result<(), Stop> {
    let room = area.bytes - end.offset;
    let window = room.min(record_bytes(EDITS_BYTES_MAX) + RECORD_ALIGN);
    let mut are_unreadable = true;
    for place in area.mirrors {
        let start = place.offset + end.offset;
        are_unreadable &= disk.get(start, RECORD_ALIGN, window)?.is_none();
        for skip in (RECORD_ALIGN..window).step_by(RECORD_ALIGN as usize) {
            let header = disk.header(superblock, start + skip)?;
            let is_later = |h: Header| h.generation == end.checkpoint.generation && h.sequence > end.sequence;
            if header.is_some_and(is_later) {
                return Err(Error::Damaged { what: Structure::AllEdits, offset: start }.into());
            }
        }
    }
    if are_unreadable {
        return Err(Error::Medium(area.mirrors[0].offset + end.offset).into());
    }
    Ok(())
}
