//! Copies data between a disk of the daemon and a file: `aryk volume create --from`, `aryk volume export`.
//!
//! The data goes the way of a VM's: through a vhost-user-blk controller, which exists during the copy.

use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::Error;
use crate::import::copy::Progress;
use aryk_front_end::blk::{self, Config};
use aryk_front_end::{Format, Layout, Memory, Operation, Queue, Session, Shape, Wanted, feature, protocol};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// Requests in flight.
const SLOTS: u16 = 16;
/// Bytes of a request, at most.
const CHUNK: u64 = 1 << 20;
/// Bytes of a piece that is not written if it is zero.
const PIECE: usize = 64 << 10;
/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A disk of the daemon, attached to this process.
pub struct Attached {
    controller: String,
    queue: Queue<blk::Requests>,
    memory: Memory,
    session: Session,
    /// Bytes of the disk.
    bytes: u64,
    /// Bytes of a request.
    chunk: u32,
}

impl Attached {
    /// Attaches a disk. [`Attached::detach`] ends that.
    pub fn new(disk: &str, readonly: bool, client: &mut Client) -> Result<Self, Error> {
        let controller = format!("aryk-copy-{}-{disk}", std::process::id());
        let params =
            json!({"ctrlr": controller, "dev_name": disk, "readonly": readonly, "exclusive": !readonly});
        client.call("vhost_create_blk_controller", params)?;
        let attached = Self::connect(&controller, client);
        if attached.is_err() {
            // The first error is reported.
            let _ = client.call("vhost_delete_controller", json!({"ctrlr": controller}));
        }
        attached
    }

    fn connect(controller: &str, client: &mut Client) -> Result<Self, Error> {
        let found = client.call("vhost_get_controllers", json!({"name": controller}))?;
        let socket = elements(&found).first().map_or("", |found| text(found, "socket"));
        let wanted = Wanted {
            features: feature::VERSION_1 | feature::PROTOCOL,
            // Without the feature FLUSH, a write that has completed is durable.
            optional: blk::feature::BLK_SIZE | blk::feature::RO | feature::INDIRECT | feature::EVENT_IDX,
            protocol: protocol::CONFIG,
            optional_protocol: protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS,
            queues: 1,
            patience: PATIENCE,
        };
        let session = Session::connect(Path::new(socket), &wanted)?;
        let features = session.features();
        let config = Config::parse(&session.config(blk::CONFIG_LEN)?, features)?;
        let bytes = config.capacity * blk::SECTOR;
        let chunk = chunk_of(bytes);
        let shape = Shape { format: Format::Split, size: 64, event_idx: features & feature::EVENT_IDX != 0 };
        let layout = Layout { shape, slots: SLOTS, len: chunk, indirect: false };
        let memory = Memory::new(layout.space::<blk::Requests>())?;
        let queue = Queue::new(blk::Requests, &memory, 0, 0, layout)?;
        session.set_features()?;
        session.share(&memory)?;
        session.start(&queue.announced())?;
        session.enable(1)?;
        Ok(Self { controller: controller.to_owned(), queue, memory, session, bytes, chunk })
    }

    /// Bytes of the disk.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Detaches the disk.
    pub fn detach(self, client: &mut Client) -> Result<(), Error> {
        let Self { controller, session, .. } = self;
        let stopped = session.stop(0);
        drop(session);
        client.call("vhost_delete_controller", json!({"ctrlr": controller}))?;
        Ok(stopped.map(drop)?)
    }

    /// Writes the first `len` bytes of `from` to the disk, which reads zeroes before. Reports the bytes done to `progress`.
    pub fn write_from(&mut self, from: &File, len: u64, progress: &mut Progress<'_>) -> Result<(), Error> {
        let mut buffer = vec![0; self.chunk as usize];
        let mut free: Vec<u16> = (0..SLOTS).collect();
        let mut at = 0;
        while at < len {
            let there = u64::from(self.chunk).min(len - at) as usize;
            from.read_exact_at(&mut buffer[..there], at)?;
            buffer[there..].fill(0);
            if buffer.iter().any(|&byte| byte != 0) {
                let slot = match free.pop() {
                    Some(slot) => slot,
                    None => self.queue.wait(PATIENCE)?.slot,
                };
                self.memory.whole().write_bytes(self.queue.place(slot).data as usize, &buffer);
                self.queue.submit(slot, Operation::Write, at);
                self.queue.publish();
            }
            at += there as u64;
            progress(at)?;
        }
        while free.len() < usize::from(SLOTS) {
            free.push(self.queue.wait(PATIENCE)?.slot);
        }
        Ok(())
    }

    /// Writes the disk's data to `to`, which is empty and becomes as large as the disk. Zeroes become holes. Reports the bytes
    /// done to `progress`.
    pub fn read_into(&mut self, to: &File, progress: &mut Progress<'_>) -> Result<(), Error> {
        to.set_len(self.bytes)?;
        let mut buffer = vec![0; self.chunk as usize];
        let mut places = [0; SLOTS as usize];
        let mut free: Vec<u16> = (0..SLOTS).collect();
        let (mut next, mut done) = (0, 0);
        while done < self.bytes {
            while next < self.bytes
                && let Some(slot) = free.pop()
            {
                places[usize::from(slot)] = next;
                self.queue.submit(slot, Operation::Read, next);
                next += u64::from(self.chunk);
            }
            self.queue.publish();
            let slot = self.queue.wait(PATIENCE)?.slot;
            self.memory.whole().read_bytes(self.queue.place(slot).data as usize, &mut buffer);
            let start = places[usize::from(slot)];
            for (piece, at) in buffer.chunks(PIECE).zip((start..).step_by(PIECE)) {
                if piece.iter().any(|&byte| byte != 0) {
                    to.write_all_at(piece, at)?;
                }
            }
            free.push(slot);
            done += u64::from(self.chunk);
            progress(done)?;
        }
        Ok(())
    }
}

/// Bytes of the requests to a disk of this size: all requests have the same.
fn chunk_of(bytes: u64) -> u32 {
    let largest = CHUNK.trailing_zeros();
    1 << bytes.trailing_zeros().clamp(blk::SECTOR.trailing_zeros(), largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_divide_the_disk() {
        for (bytes, chunk) in [(20 << 30, CHUNK as u32), (512 * 3, 512), (4096 * 5, 4096), (3 << 19, 1 << 19)]
        {
            assert_eq!(chunk_of(bytes), chunk);
        }
    }
}
