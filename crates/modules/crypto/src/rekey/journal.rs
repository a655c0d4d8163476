//! The journal of a disk that is encrypted again: a file that holds the position, and a copy of the zone that is being written.
//! Any context except a reactor's: its methods block.
//!
//! | offset | content |
//! | --- | --- |
//! | 0 and 4096 | a header each, of 512 bytes; a header goes to the place that has the older one |
//! | 8192 | the zone, encrypted with the new key |
//!
//! Before a zone is overwritten on the disk, the journal has all of it, and after that a header that says so; both are synced.
//! When the zone is on the disk, and flushed, a header with the next position is written and synced. So a crash at any point
//! leaves either a zone of which nothing was written, or a zone that the journal can write again.
//!
//! A header is one sector, which a device writes entirely or not at all. So the newer of two valid headers is the last one that
//! was written. If one of them is not valid, the file was damaged, and it is unknown which blocks have which key: the file is
//! refused.
//!
//! The headers that a process finds may be in the memory of the kernel only: the process before ended between a write and its
//! sync, or the sync failed. So the newer one is written and synced again before its content counts: a power failure would
//! otherwise bring back an older state than the one that was acted upon.

use super::CheckValue;
use crate::epoch::Cipher;
use aryk_bdev::{Blocks, Lba};
use aryk_dma::{Buffer, PAGE};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"ARYKREKY";
const VERSION: u32 = 2;
const HEADER: usize = 512;
/// Bytes of a header that its checksum covers.
const CHECKED: usize = 124;
/// The distance of the headers: they are in different sectors, also of disks that report smaller ones.
const STRIDE: u64 = 4096;
/// Where the zone's data is.
const DATA: u64 = 2 * STRIDE;
/// Bytes of a zone, unless one block has more.
const ZONE: u64 = 1 << 20;

/// Bytes of a block, at most: of a sector of AES-XTS.
const BLOCK_MAX: u32 = 16 << 20;

/// Blocks that are encrypted again at one time.
pub(crate) const fn zone_blocks(block_size: u32) -> Blocks {
    let blocks = ZONE / block_size as u64;
    Blocks(if blocks == 0 { 1 } else { blocks })
}

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file does not exist.
    #[error("the journal {} does not exist", .0.display())]
    Missing(PathBuf),
    /// The file exists, and a new one was to be created.
    #[error(
        "the journal {} exists: it is that of another rotation; if the disk of that rotation is not needed any more, move the file away",
        .0.display()
    )]
    Exists(PathBuf),
    /// The file cannot be read or written.
    #[error("the journal {}: {}", .0.display(), .1)]
    Io(PathBuf, #[source] io::Error),
    /// The file is not what was written to it.
    #[error("the journal {} is damaged: {}", .0.display(), .1)]
    Damaged(PathBuf, &'static str),
}

/// The last state of a rotation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Header {
    block_size: u32,
    sequence: u64,
    /// All blocks below it have the new key. [`Lba::MAX`] when the rotation is complete.
    position: Lba,
    /// The blocks of the zone that the file holds, from the position on; none if it holds none.
    zone: Blocks,
    /// CRC-32 of the zone's data.
    crc: u32,
    old: CheckValue,
    new: CheckValue,
    /// The uuid of the base disk.
    base: [u8; 16],
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.block_size.to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(self.position.0.to_le_bytes());
        bytes.extend(self.zone.0.to_le_bytes());
        bytes.extend(self.crc.to_le_bytes());
        bytes.extend(self.old.0);
        bytes.extend(self.new.0);
        bytes.extend(self.base);
        assert_eq!(bytes.len(), CHECKED, "the checksum covers all members");
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.resize(HEADER, 0);
        bytes.try_into().expect("just resized")
    }

    fn decode(bytes: &[u8; HEADER]) -> Result<Self, &'static str> {
        let (checked, rest) = bytes.split_at(CHECKED);
        if rest[..4] != crc32fast::hash(checked).to_le_bytes() {
            return Err("a header has a wrong checksum");
        }
        let mut at = 0;
        let mut take = |len: usize| {
            at += len;
            &checked[at - len..at]
        };
        if take(8) != MAGIC || number(take(4)) != u64::from(VERSION) {
            return Err("a header is not that of a journal, or of a later version");
        }
        let header = Self {
            block_size: number(take(4)) as u32,
            sequence: number(take(8)),
            position: Lba(number(take(8))),
            zone: Blocks(number(take(8))),
            crc: number(take(4)) as u32,
            old: CheckValue(take(32).try_into().expect("so many were taken")),
            new: CheckValue(take(32).try_into().expect("so many were taken")),
            base: take(16).try_into().expect("so many were taken"),
        };
        let is_size = header.block_size.is_power_of_two() && (512..=BLOCK_MAX).contains(&header.block_size);
        if !is_size
            || header.zone > zone_blocks(header.block_size)
            || header.position > Lba::MAX - header.zone
        {
            return Err("a header's numbers are not possible");
        }
        Ok(header)
    }
}

/// A little-endian number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// The journal of one rotation.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    /// The last header that was written.
    header: Header,
    /// The write of a header failed while the last one had no zone, so the file may have that header or not. If it is the header
    /// of a zone, the disk has no block of that zone yet.
    is_uncertain: bool,
}

impl Journal {
    /// Creates the journal of a rotation that has not begun, of a disk with blocks of `block_size` bytes on the base disk with
    /// the uuid `base`, from the key `old` to the key `new`. When this returns, a power failure does not remove the file.
    ///
    /// # Errors
    /// [`JournalError::Exists`], [`JournalError::Io`].
    pub fn create(
        path: &Path,
        block_size: u32,
        base: [u8; 16],
        [old, new]: [CheckValue; 2],
    ) -> Result<Self, JournalError> {
        let zone = zone_blocks(block_size).to_bytes(block_size).0;
        let of = |sequence| Header {
            block_size,
            sequence,
            position: Lba::ZERO,
            zone: Blocks::ZERO,
            crc: 0,
            old,
            new,
            base,
        };
        let header = of(1);
        let create = || -> io::Result<File> {
            let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
            let mut unfinished = name.to_owned();
            unfinished.push(".new");
            let unfinished = path.with_file_name(unfinished);
            let mut options = OpenOptions::new();
            let file =
                options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
            // All of the file gets its space now: a full file system cannot stop the rotation later.
            file.write_all_at(&vec![0; (DATA + zone) as usize], 0)?;
            file.write_all_at(&of(0).encode(), 0)?;
            file.write_all_at(&header.encode(), STRIDE)?;
            file.sync_all()?;
            if fs::exists(path)? {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            fs::rename(&unfinished, path)?;
            sync_dir_of(path)?;
            Ok(file)
        };
        match create() {
            Ok(file) => Ok(Self { path: path.to_owned(), file, header, is_uncertain: false }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(JournalError::Exists(path.to_owned()))
            }
            Err(error) => Err(JournalError::Io(path.to_owned(), error)),
        }
    }

    /// Opens the journal of a rotation that has begun. When this returns, a power failure does not take back what the journal
    /// says. No other [`Journal`] of the file may be in use.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(path: &Path) -> Result<Self, JournalError> {
        let file =
            OpenOptions::new().read(true).write(true).open(path).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => JournalError::Missing(path.to_owned()),
                _ => JournalError::Io(path.to_owned(), error),
            })?;
        let header = Self::read_header(path, &file)?;
        let journal = Self { path: path.to_owned(), file, header, is_uncertain: false };
        journal.read_zone()?;
        journal.store_again().map_err(|error| journal.failed(error))?;
        Ok(journal)
    }

    /// Whether the rotation of the journal at `path`, which may be in use, has begun and is not complete, and one of its two keys
    /// has one of the check values. `values` calculates them for blocks of so many bytes.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn needs(path: &Path, values: impl FnOnce(u32) -> Vec<CheckValue>) -> Result<bool, JournalError> {
        let file = File::open(path).map_err(|error| JournalError::Io(path.to_owned(), error))?;
        let header = Self::read_header(path, &file)?;
        let journal = Self { path: path.to_owned(), file, header, is_uncertain: false };
        if journal.is_untouched() || journal.is_complete() {
            return Ok(false);
        }
        Ok(values(header.block_size).into_iter().any(|value| journal.is_from(value) || journal.is_to(value)))
    }

    /// Writes the last header to its place again, which it may have in the memory of the kernel only, and syncs all of the file.
    fn store_again(&self) -> io::Result<()> {
        // A sync alone would not do: after one that failed, the kernel may regard as stored what is not.
        self.file.write_all_at(&self.header.encode(), self.header.sequence % 2 * STRIDE)?;
        self.file.sync_all()
    }

    fn read_header(path: &Path, file: &File) -> Result<Header, JournalError> {
        let damaged = |why| JournalError::Damaged(path.to_owned(), why);
        let read = |place| {
            let mut bytes = [0; HEADER];
            file.read_exact_at(&mut bytes, place * STRIDE).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => damaged("the file is too short"),
                _ => JournalError::Io(path.to_owned(), error),
            })?;
            let header = Header::decode(&bytes).map_err(damaged)?;
            match header.sequence % 2 == place {
                true => Ok(header),
                false => Err(damaged("a header is not in its place")),
            }
        };
        let (a, b) = (read(0)?, read(1)?);
        let (older, newer) = if a.sequence < b.sequence { (a, b) } else { (b, a) };
        let rotation = |header: &Header| (header.block_size, header.base, header.old, header.new);
        let is_same_rotation = rotation(&older) == rotation(&newer);
        if older.sequence + 1 != newer.sequence || !is_same_rotation {
            return Err(damaged("its headers do not belong together"));
        }
        Ok(newer)
    }

    /// The zone that the file holds.
    fn read_zone(&self) -> Result<Option<(Lba, Blocks, Buffer)>, JournalError> {
        let Header { position, zone, crc, block_size, .. } = self.header;
        if zone == Blocks::ZERO {
            return Ok(None);
        }
        let damaged = |why| JournalError::Damaged(self.path.clone(), why);
        let mut buffer = Buffer::new(zone.to_bytes(block_size).0 as usize, PAGE as usize);
        self.file.read_exact_at(buffer.bytes_mut(), DATA).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged("the file is too short"),
            _ => self.failed(error),
        })?;
        match crc32fast::hash(buffer.bytes()) == crc {
            true => Ok(Some((position, zone, buffer))),
            false => Err(damaged("the data of the zone has a wrong checksum")),
        }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether no block has been encrypted again.
    pub fn is_untouched(&self) -> bool {
        (self.header.position, self.header.zone) == (Lba::ZERO, Blocks::ZERO)
    }

    /// Whether all blocks have been encrypted again.
    pub fn is_complete(&self) -> bool {
        self.header.position == Lba::MAX
    }

    /// Whether the rotation is one from the key `old`.
    pub fn is_from(&self, old: CheckValue) -> bool {
        self.header.old == old
    }

    /// Whether the rotation is one to the key `new`.
    pub fn is_to(&self, new: CheckValue) -> bool {
        self.header.new == new
    }

    /// The uuid of the base disk of the rotation's disk.
    pub fn base(&self) -> [u8; 16] {
        self.header.base
    }

    /// Bytes of a block of the disk.
    pub(super) fn block_size(&self) -> u32 {
        self.header.block_size
    }

    /// All blocks below it have the new key.
    pub(super) fn position(&self) -> Lba {
        self.header.position
    }

    /// The end of the zone that the file holds, if it holds one.
    pub(super) fn zone_end(&self) -> Option<Lba> {
        (self.header.zone > Blocks::ZERO).then(|| self.header.position + self.header.zone)
    }

    /// Encrypts the data of a zone with `new` that `old` has encrypted, and stores it. After that the zone may be overwritten on
    /// the disk with the same data. If this fails, the file holds no zone, unless the error's flag says otherwise.
    ///
    /// # Errors
    /// [`JournalError::Io`], and whether it is unknown what the file holds.
    pub(super) fn record(
        &mut self,
        lba: Lba,
        data: &mut [u8],
        old: &Cipher,
        new: &Cipher,
    ) -> Result<(), (JournalError, bool)> {
        assert!(lba == self.header.position && self.zone_end().is_none(), "zones come one after the other");
        old.encrypt_again(new, lba, data);
        let certain = |error| (self.failed(error), false);
        self.file.write_all_at(data, DATA).map_err(certain)?;
        self.file.sync_data().map_err(certain)?;
        let zone = Blocks(data.len() as u64 / u64::from(self.header.block_size));
        let crc = crc32fast::hash(data);
        self.change_header(Header { zone, crc, ..self.header })
    }

    /// Writes a header without a zone, if the last write of a header failed.
    fn settle(&mut self) -> Result<(), JournalError> {
        if self.is_uncertain {
            self.write_header(self.header)?;
            self.is_uncertain = false;
        }
        Ok(())
    }

    /// Stores that all blocks below `position` are on the disk, encrypted with the new key. It may be repeated if it fails.
    ///
    /// # Errors
    /// [`JournalError::Io`], and whether it is unknown what the file holds.
    pub(super) fn advance(&mut self, position: Lba) -> Result<(), (JournalError, bool)> {
        let header = Header { position, zone: Blocks::ZERO, crc: 0, ..self.header };
        if self.zone_end().is_none() {
            return self.change_header(header);
        }
        // The zone can be written again, whichever header the file has.
        self.write_header(header).map_err(|error| (error, true))
    }

    /// Writes a header after one without a zone. If that fails, restores the state before; if that fails too, it is unknown
    /// which of the two headers the file has, and the error's flag says so.
    fn change_header(&mut self, header: Header) -> Result<(), (JournalError, bool)> {
        let Err(error) = self.write_header(header) else { return Ok(()) };
        self.is_uncertain = true;
        let still_uncertain = self.settle().is_err();
        Err((error, still_uncertain))
    }

    /// The zone that must be written again before the rotation goes on, if there is one.
    ///
    /// # Errors
    /// [`JournalError`].
    pub(super) fn pending(&mut self) -> Result<Option<(Lba, Blocks, Buffer)>, JournalError> {
        self.settle()?;
        self.read_zone()
    }

    /// Writes a header over the older one. If that fails, the next call writes to the same place.
    fn write_header(&mut self, header: Header) -> Result<(), JournalError> {
        let header = Header { sequence: self.header.sequence + 1, ..header };
        let written = self.file.write_all_at(&header.encode(), header.sequence % 2 * STRIDE);
        written.and_then(|()| self.file.sync_data()).map_err(|error| self.failed(error))?;
        self.header = header;
        Ok(())
    }

    fn failed(&self, error: io::Error) -> JournalError {
        JournalError::Io(self.path.clone(), error)
    }
}

/// Removes the journal of a rotation that is complete, or that has not begun. It is no error if there is none.
///
/// # Errors
/// Those of the file system.
pub fn remove_journal(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => sync_dir_of(path),
    }
}

/// Syncs the directory of a file.
fn sync_dir_of(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests;
