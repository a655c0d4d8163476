//! The rebuild of a pool whose manifest or index is lost, over its base and a temporary file for what is not complete.

use super::disk::Disk;
use super::progress::Shown;
use crate::error::Error;
use aryk_dma::Buffer;
use aryk_volume::{Done, OpId, Rebuild, RebuildReport, StoreOp, UNIT};
use aryk_volume_store::Store;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

/// Rebuilds the pool, or looks at what would be rebuilt. `failed` describes an error.
pub fn run(
    store: &mut Store,
    disk: &mut Disk,
    copy: Option<&[u8]>,
    is_writing: bool,
    is_json: bool,
    failed: &dyn Fn(&dyn std::fmt::Display) -> Error,
) -> Result<RebuildReport, Error> {
    let facts = store.facts();
    let others = Others { file: scratch()?, first: facts.blobs, blob_bytes: facts.blob_bytes() };
    let mut rebuild = Rebuild::new(facts, store.pool().into_bytes(), copy, is_writing);
    let mut shown = Shown::new(is_json);
    loop {
        disk.renew_claim()?;
        let has_more = rebuild.turn();
        let mut has_done = false;
        while let Some((id, op)) = rebuild.next_op() {
            has_done = true;
            match others.run(id, op) {
                Ok(done) => rebuild.completed(done),
                Err(op) => store.submit(id, op),
            }
        }
        while let Some(op) = store.next_op() {
            store.completed(disk.run(op));
        }
        while let Some(answer) = store.next_answer() {
            rebuild.completed(answer);
        }
        shown.show(rebuild.progress());
        if let Some(result) = rebuild.take_result() {
            shown.end();
            return result.map_err(|error| failed(&error));
        }
        assert!(has_more || has_done, "a rebuild goes on: {:?}", rebuild.progress());
    }
}

/// A file without a name, which the kernel removes at the end of the process.
fn scratch() -> Result<File, Error> {
    let dir = std::env::temp_dir();
    let path = dir.join(format!("aryk-rebuild-{}", std::process::id()));
    let failed = |error: io::Error| Error::File(format!("{}: {error}", path.display()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
    std::fs::remove_file(&path).map_err(failed)?;
    Ok(file)
}

/// The blobs that the store does not have.
struct Others {
    file: File,
    first: u32,
    blob_bytes: u64,
}

impl Others {
    /// Runs an operation on such a blob, or returns one of another blob.
    fn run(&self, id: OpId, op: StoreOp) -> Result<Done, StoreOp> {
        use aryk_volume::StoreError::{Medium, NoSpace};
        let place = |blob: u32, unit: u32| {
            blob.checked_sub(self.first)
                .map(|blob| u64::from(blob) * self.blob_bytes + u64::from(unit) * u64::from(UNIT))
        };
        let (data, result): (Option<Buffer>, _) = match op {
            StoreOp::Read { blob, unit, mut data, len } => match place(blob.0, unit) {
                Some(at) => {
                    let read = self.file.read_exact_at(&mut data.bytes_mut()[..len as usize], at);
                    (Some(data), read.map_err(|_| Medium))
                }
                None => return Err(StoreOp::Read { blob, unit, data, len }),
            },
            StoreOp::Write { blob, unit, data, len } => match place(blob.0, unit) {
                Some(at) => {
                    let written = self.file.write_all_at(&data.bytes()[..len as usize], at);
                    (Some(data), written.map_err(|_| NoSpace))
                }
                None => return Err(StoreOp::Write { blob, unit, data, len }),
            },
            StoreOp::Discard { blob } if blob.0 >= self.first => (None, Ok(())),
            op => return Err(op),
        };
        Ok(Done { id, data, result })
    }
}
