//! File operations of a [`Ring`](crate::Ring), executed by the calling thread, for hosts that forbid io_uring. Each call
//! blocks, so it runs on a dedicated thread, never on a reactor.
//!
//! **Contract.** As that of the ring: the result is a number of bytes (possibly fewer than requested), 0, or a negated errno;
//! `sgl` stays in place until the request completes, which is after the function has returned.

use crate::Fsync;
use crate::ring::VECTOR_MAX;
use aryk_dma::{Seg, Sgl};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Reads from `fd` at `offset` into `sgl`.
///
/// # Panics
/// If `sgl` has more than 1024 pieces.
pub fn read(fd: BorrowedFd<'_>, sgl: &Sgl, offset: u64) -> i32 {
    vectored(sgl, |vector, count| {
        // SAFETY: by this file's contract, the memory of the vector stays in place until this function returns, and may be
        // written.
        unsafe { libc::preadv(fd.as_raw_fd(), vector, count, offset.cast_signed()) }
    })
}

/// Writes `sgl` to `fd` at `offset`. If `dsync`, the data is durable on return.
///
/// # Panics
/// As [`read`].
pub fn write(fd: BorrowedFd<'_>, sgl: &Sgl, offset: u64, dsync: bool) -> i32 {
    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
    vectored(sgl, |vector, count| {
        // SAFETY: as in `read`; the memory is only read.
        unsafe { libc::pwritev2(fd.as_raw_fd(), vector, count, offset.cast_signed(), flags) }
    })
}

/// Flushes `fd` to its storage.
pub fn fsync(fd: BorrowedFd<'_>, what: Fsync) -> i32 {
    retried(|| {
        // SAFETY: no memory is passed.
        let result = unsafe {
            match what {
                Fsync::Data => libc::fdatasync(fd.as_raw_fd()),
                Fsync::All => libc::fsync(fd.as_raw_fd()),
            }
        };
        result as isize
    })
}

/// Executes a `fallocate(2)` with `mode`, over `len` bytes from `offset`.
pub fn fallocate(fd: BorrowedFd<'_>, mode: i32, offset: u64, len: u64) -> i32 {
    retried(|| {
        // SAFETY: no memory is passed.
        let result =
            unsafe { libc::fallocate(fd.as_raw_fd(), mode, offset.cast_signed(), len.cast_signed()) };
        result as isize
    })
}

fn vectored(sgl: &Sgl, call: impl Fn(*const libc::iovec, i32) -> isize) -> i32 {
    let pieces: Vec<Seg> = sgl.pieces().take(VECTOR_MAX + 1).collect();
    assert!(pieces.len() <= VECTOR_MAX, "the block layer splits at {VECTOR_MAX} pieces");
    retried(|| call(pieces.as_ptr().cast(), pieces.len() as i32))
}

/// Converts a system call's result to the format of the ring's results, and retries after EINTR.
fn retried(call: impl Fn() -> isize) -> i32 {
    loop {
        let result = call();
        if result >= 0 {
            return i32::try_from(result).expect("the kernel moves at most 2 GiB less a page at a time");
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => {}
            Some(errno) => return -errno,
            None => return -libc::EIO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_dma::Buffer;
    use std::os::fd::AsFd;

    #[test]
    fn reads_return_written_data() {
        let file = tempfile::tempfile().unwrap();
        let mut out = Buffer::from_slice(b"0123456789");
        let sgl = out.lend();
        assert_eq!(write(file.as_fd(), &sgl.slice(2, 6), 100, true), 6);
        assert_eq!(fsync(file.as_fd(), Fsync::Data), 0);
        assert_eq!(fsync(file.as_fd(), Fsync::All), 0);
        let mut back = Buffer::new(8, 512);
        assert_eq!(read(file.as_fd(), &back.lend(), 100), 6);
        back.reclaim();
        out.reclaim();
        assert_eq!(&back.bytes()[..6], b"234567");
        assert_eq!(read(file.as_fd(), &Sgl::EMPTY, 0), 0);
    }

    #[test]
    fn allocation_and_holes() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(fallocate(file.as_fd(), 0, 0, 8192), 0);
        assert_eq!(file.metadata().unwrap().len(), 8192);
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        assert_eq!(fallocate(file.as_fd(), punch, 0, 4096), 0);
        assert_eq!(fallocate(file.as_fd(), punch, 0, 0), -libc::EINVAL);
    }

    #[test]
    fn failures_are_negated_errnos() {
        let (reader, writer) = std::io::pipe().unwrap();
        let mut buffer = Buffer::new(8, 512);
        assert_eq!(read(reader.as_fd(), &buffer.lend(), 0), -libc::ESPIPE);
        buffer.reclaim();
        assert_eq!(write(writer.as_fd(), &buffer.lend(), 0, false), -libc::ESPIPE);
        buffer.reclaim();
        assert_eq!(fsync(reader.as_fd(), Fsync::Data), -libc::EINVAL);
        let read_only = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(write(read_only.as_fd(), &buffer.lend(), 0, false), -libc::EBADF);
        buffer.reclaim();
    }
}
