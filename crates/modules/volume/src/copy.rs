//! Copies of parts of one disk to another. Control context; the copy runs on a reactor.

use crate::Error;
use aryk_bdev::{Access, AsyncChannel, Blocks, Bytes, Descriptor, Env, Lba, Op, OpenError};
use aryk_dma::{Buffer, PAGE};
use aryk_reactor::{CoreSet, Cx};
use futures_channel::oneshot;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of one read and one write, at most.
const CHUNK: u64 = 1 << 20;

/// The interval of checks whether the channels are closed.
const CLOSING: Duration = Duration::from_micros(100);

/// A disk, and the bytes of its blocks.
struct End {
    channel: AsyncChannel,
    block: u64,
}

impl End {
    fn place(&self, offset: u64, bytes: u64) -> (Lba, Blocks) {
        (Lba(offset / self.block), Blocks(bytes / self.block))
    }
}

/// A copy that was prepared: both disks are open.
#[derive(Debug)]
pub struct Copy {
    from: Descriptor,
    to: Descriptor,
}

impl Copy {
    /// Opens both disks; nobody else may write to the target.
    ///
    /// # Errors
    /// [`Error::Registry`]; [`Error::CopyTarget`] if the target is smaller, or its blocks are larger.
    pub fn new(env: &Env, from: &str, to: &str) -> Result<Self, Error> {
        let from = env.registry().open(from, Access::Read, "a copy of it", |_| ())?;
        let to = env.registry().open(to, Access::Exclusive, "a copy to it", |_| ())?;
        let bytes = |descriptor: &Descriptor| {
            let geometry = descriptor.bdev().geometry();
            geometry.blocks.to_bytes(geometry.block_size)
        };
        let block = |descriptor: &Descriptor| descriptor.bdev().geometry().block_size;
        if bytes(&to) < bytes(&from) {
            return Err(Error::CopyTarget("it is smaller than the source"));
        }
        if block(&to) > block(&from) {
            return Err(Error::CopyTarget("its blocks are larger than the source's"));
        }
        if to.bdev().device().is_read_only() {
            return Err(Error::CopyTarget("it is read-only"));
        }
        Ok(Self { from, to })
    }

    /// Copies parts, given as (first byte, bytes) of whole blocks, and flushes the target. `copied` is the number of bytes done.
    ///
    /// # Errors
    /// [`Error::Copy`]; [`Error::Open`]; [`Error::Ended`].
    pub async fn run(self, env: &Env, parts: Vec<(u64, u64)>, copied: Arc<AtomicU64>) -> Result<(), Error> {
        let hold = env.reactors().find_least_loaded(None).ok_or(Error::Ended)?;
        let Self { from, to } = self;
        from.prepare(&hold).await?;
        to.prepare(&hold).await?;
        let (sender, result) = oneshot::channel();
        let keep = hold.clone();
        let start = move |cx: &mut Cx| {
            let thread = cx.add_thread("copy of a volume", CoreSet::from_iter([cx.handle().core()]));
            let open = |descriptor: &Descriptor, cx: &mut Cx| {
                let block = descriptor.bdev().geometry().block_size.into();
                Ok::<_, OpenError>(End { channel: AsyncChannel::open(descriptor, thread, cx)?, block })
            };
            let ends = open(&from, cx).and_then(|source| Ok((source, open(&to, cx)?)));
            let local = cx.local().clone();
            let task = async move {
                let done = match ends {
                    Ok((source, target)) => copy(&source, &target, &parts, &copied).await,
                    Err(error) => Err(error.into()),
                };
                drop((from, to));
                while local.with(move |cx| cx.thread_members(thread)).await > 0 {
                    local.sleep(CLOSING).await;
                }
                local.with(move |cx| cx.remove_thread(thread)).await;
                drop(keep);
                // The caller may have been dropped.
                let _ = sender.send(done);
            };
            cx.local().spawn(task).detach();
        };
        hold.call(start).await.map_err(|_| Error::Ended)?;
        result.await.map_err(|_| Error::Ended)?
    }
}

async fn copy(source: &End, target: &End, parts: &[(u64, u64)], copied: &AtomicU64) -> Result<(), Error> {
    let mut buffers = vec![Buffer::new(CHUNK as usize, PAGE as usize)];
    for &(start, bytes) in parts {
        let mut at = start;
        while at < start + bytes {
            let len = CHUNK.min(start + bytes - at);
            // A shorter piece has a buffer of its own, since a request covers its buffer.
            let buffer = match buffers.pop().filter(|buffer| buffer.len() as u64 == len) {
                Some(buffer) => buffer,
                None => Buffer::new(len as usize, PAGE as usize),
            };
            let (lba, blocks) = source.place(at, len);
            let read = source.channel.read(lba, blocks, buffer).await;
            let buffer = read.map_err(|status| Error::Copy { what: "read from the source", status })?;
            let (lba, blocks) = target.place(at, len);
            let written = target.channel.write(lba, blocks, buffer).await;
            buffers.push(written.map_err(|status| Error::Copy { what: "write to the target", status })?);
            at += len;
            copied.fetch_add(len, Ordering::Relaxed);
        }
    }
    let flushed = target.channel.command(Op::Flush, Lba::ZERO, Blocks::ZERO).await;
    flushed.map_err(|status| Error::Copy { what: "flush the target", status })
}

/// The whole clusters of these parts of a disk of so many bytes, as (first byte, bytes) in ascending order, and their number.
///
/// # Panics
/// If `cluster` is 0.
pub fn whole_clusters(parts: &[(u64, u64)], cluster: Bytes, disk: Bytes) -> (Vec<(u64, u64)>, u64) {
    let mut whole: Vec<(u64, u64)> = Vec::new();
    let mut clusters = 0;
    for &(start, bytes) in parts {
        let (first, end) = (start / cluster.0, (start + bytes).div_ceil(cluster.0));
        // Clusters that the part before has touched, too.
        let first =
            whole.last().map_or(first, |(start, bytes)| first.max((start + bytes).div_ceil(cluster.0)));
        let (first_byte, end_byte) = (first * cluster.0, (end * cluster.0).min(disk.0));
        if first_byte >= end_byte {
            continue;
        }
        clusters += end - first;
        match whole.last_mut() {
            Some((start, bytes)) if *start + *bytes == first_byte => *bytes += end_byte - first_byte,
            _ => whole.push((first_byte, end_byte - first_byte)),
        }
    }
    (whole, clusters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_become_whole_clusters_once() {
        let of = |parts: &[(u64, u64)]| whole_clusters(parts, Bytes(100), Bytes(950));
        assert_eq!(of(&[]), (vec![], 0));
        assert_eq!(of(&[(10, 1), (20, 30), (99, 2), (350, 10)]), (vec![(0, 200), (300, 100)], 3));
        assert_eq!(of(&[(940, 10)]), (vec![(900, 50)], 1));
        // A part beyond the end, as of a volume that was shrunk.
        assert_eq!(of(&[(1000, 100)]), (vec![], 0));
    }
}
