//! Copies a file without its holes.

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Takes the bytes done, and may end the copy.
pub type Progress<'a> = dyn FnMut(u64) -> io::Result<()> + 'a;

/// Bytes of a read.
const CHUNK: u64 = 1 << 20;

/// Bytes of a piece that becomes a hole if it is zero.
const PIECE: usize = 64 << 10;

/// Copies the first `bytes` of `from` to `to`, which is empty; zeros become holes. Reports the bytes done
/// to `progress`, which may end the copy.
pub fn sparse(from: &File, to: &File, bytes: u64, progress: &mut Progress<'_>) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK as usize];
    let mut at = 0;
    while at < bytes {
        let Some((start, end)) = next_data(from, at, bytes)? else { break };
        at = start;
        while at < end {
            // Pieces are aligned to the blocks of the file system.
            let len = (end - at).min(CHUNK - at % CHUNK);
            let chunk = &mut buffer[..len as usize];
            from.read_exact_at(chunk, at)?;
            for (piece, offset) in chunk.chunks(PIECE).zip((at..).step_by(PIECE)) {
                if piece.iter().any(|&byte| byte != 0) {
                    to.write_all_at(piece, offset)?;
                }
            }
            at += len;
            progress(at)?;
        }
    }
    progress(bytes)
}

/// The next range of data. A file that does not support holes, such as a block device, is data everywhere.
fn next_data(file: &File, at: u64, bytes: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start.min(bytes),
        Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL | Errno::NOTSUP) => return Ok(Some((at, bytes))),
        Err(e) => return Err(e.into()),
    };
    let end = seek(file, SeekFrom::Hole(start)).unwrap_or(bytes).min(bytes);
    Ok((start < end).then_some((start, end)))
}
