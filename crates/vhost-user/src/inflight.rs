//! The in-flight region, in which queues track their requests across restarts of the back-end: the back-end creates it, the
//! front-end keeps it and passes it to the next back-end. "Inflight I/O tracking" of the specification. Control context.
//!
//! This file only computes where each queue's part lies. The virtqueue interprets the contents, which are not trusted: any
//! process may have written them.

use crate::Error;
use crate::memory::FileId;
use crate::message::{Code, InflightDesc};
use aryk_dma::{GuestArea, MapError, Mapping, Peer};
use aryk_virtqueue::{Format, inflight_len};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Length of one queue's part in bytes.
fn queue_len(packed: bool, size: u16) -> u64 {
    inflight_len(if packed { Format::Packed } else { Format::Split }, size)
}

/// An in-flight region that the front-end has passed to the back-end.
#[derive(Debug)]
pub(crate) struct Inflight {
    mapping: Arc<Mapping>,
    file: FileId,
    desc: InflightDesc,
}

impl Inflight {
    /// GET_INFLIGHT_FD: creates a region of zeroes, whose size is sealed.
    ///
    /// `packed` is the ring format as far as it is known; `may_be` tells whether the rings may still become packed. In that
    /// case the region has room for packed rings: QEMU 7.2's vhost-user-scsi sends the request before it has negotiated the
    /// format.
    pub(crate) fn create(
        code: Code,
        wanted: &InflightDesc,
        (packed, may_be): (bool, bool),
        queues: usize,
    ) -> Result<(OwnedFd, InflightDesc), Error> {
        let size = region_len(code, wanted, packed, queues)?.max(region_len(code, wanted, may_be, queues)?);
        let os = |e: rustix::io::Errno| Error::Inflight { code, source: e.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("aryk-inflight", flags).map_err(os)?;
        rustix::fs::ftruncate(&file, size).map_err(os)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(os)?;
        Ok((file, InflightDesc { size, offset: 0, ..*wanted }))
    }

    /// SET_INFLIGHT_FD.
    pub(crate) fn map(
        code: Code,
        desc: InflightDesc,
        packed: bool,
        queues: usize,
        (peer, fd): (&Peer, &OwnedFd),
    ) -> Result<Self, Error> {
        let needed = region_len(code, &desc, packed, queues)?;
        if desc.size < needed {
            return Err(Error::InflightTooSmall { code, got: desc.size, needed });
        }
        // A driver may change to the other ring format, whose region would be larger.
        let len = desc.size.min(region_len(code, &desc, true, queues)?);
        let map = |source| Error::Inflight { code, source };
        let stat = rustix::fs::fstat(fd).map_err(|e| map(MapError::Os(e)))?;
        let mapping = Mapping::shared(fd.as_fd(), desc.offset, len).map_err(map)?.given_by(peer);
        Ok(Self { mapping: Arc::new(mapping), file: (stat.st_dev, stat.st_ino), desc })
    }

    /// Whether both are the same region of the same file.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.file, self.desc) == (other.file, other.desc)
    }

    /// The part of queue `index`, which has `size` descriptors. `None` if the region has no part for the queue.
    pub(crate) fn part(
        &self,
        code: Code,
        index: usize,
        size: u16,
        packed: bool,
    ) -> Result<Option<GuestArea>, Error> {
        if index >= self.desc.num_queues.into() {
            return Ok(None);
        }
        if size > self.desc.queue_size {
            return Err(Error::BadPayload {
                code,
                what: "a queue is larger than its part of the in-flight region",
            });
        }
        let each = queue_len(packed, self.desc.queue_size);
        let needed = each * u64::from(self.desc.num_queues);
        if needed > self.mapping.len() {
            return Err(Error::InflightTooSmall { code, got: self.mapping.len(), needed });
        }
        let part = GuestArea::new(&self.mapping, index as u64 * each, queue_len(packed, size));
        Ok(Some(part.expect("each queue's part lies within the region")))
    }
}

/// The size in bytes that a region needs according to its description.
fn region_len(code: Code, desc: &InflightDesc, packed: bool, queues: usize) -> Result<u64, Error> {
    let bad = |what| Err(Error::BadPayload { code, what });
    if desc.num_queues == 0 || usize::from(desc.num_queues) > queues {
        return bad("an in-flight region for no queues, or more queues than the device has");
    }
    if desc.queue_size == 0 || desc.queue_size > 32_768 || !packed && !desc.queue_size.is_power_of_two() {
        return bad("an in-flight region for queues of an invalid size");
    }
    Ok(u64::from(desc.num_queues) * queue_len(packed, desc.queue_size))
}
