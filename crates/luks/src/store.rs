//! Where a header is stored: a file, a device, or memory. Control context.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The bytes that hold a header, from the start of the volume (or of a detached header). A caller whose device is asynchronous
/// reads the header into a `Vec`, or implements this by calls that block.
pub trait Store {
    /// Fills `buffer` from `offset`, or fails: bytes beyond the end are an error.
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Writes all of `data` at `offset`.
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// Returns when all writes so far are durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl Store for File {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.write_all_at(data, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

impl Store for Vec<u8> {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.copy_from_slice(range(self, offset, buffer.len())?);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        range(self, offset, data.len())?.copy_from_slice(data);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn range(bytes: &mut [u8], offset: u64, len: usize) -> io::Result<&mut [u8]> {
    let start = usize::try_from(offset).ok();
    let end = start.and_then(|start| start.checked_add(len));
    start
        .zip(end)
        .and_then(|(start, end)| bytes.get_mut(start..end))
        .ok_or(io::ErrorKind::UnexpectedEof.into())
}
