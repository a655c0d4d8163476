//! A volume as the disk, of a pool in a file: written before the first daemon and read after the last one by the engine itself,
//! without a daemon. Test tool, the front-end's thread.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use aryk_dma::Buffer;
use aryk_volume::{
    Action, Answer, CheckReport, Command, Label, Origin, Pool, Request, Settings, State, Status, StoreError,
    Tag, UNIT, VolumeId, WhenFull,
};
use aryk_volume_store::{
    Base, DiskDone, DiskOp, DiskRequest, Expected, Formatting, Opened, Opening, Options, Store,
};
use uuid::Uuid;

/// The name of the base disk.
pub const STORE: &str = "store";
/// The volume's alias in the daemon.
pub const VOLUME: &str = "crash/disk";

/// Bytes of the base, and of a segment.
const BASE: u64 = 256 << 20;
const SEGMENT: u32 = 8 << 20;
/// Bytes of a request, at most.
const PIECE: usize = 1 << 20;

/// The pool's file.
#[derive(Clone, Debug)]
pub struct Image {
    file: PathBuf,
    /// Bytes of a block of the base and of the volume.
    block_size: u32,
}

impl Image {
    /// The pool in this file.
    #[must_use]
    pub const fn new(file: PathBuf, block_size: u32) -> Self {
        Self { file, block_size }
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Creates the pool, and its volume with this content.
    ///
    /// # Errors
    /// The file cannot be written, or the engine refuses.
    pub fn fill(&self, bytes: &[u8]) -> Result<()> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&self.file)?;
        file.set_len(BASE)?;
        let mut running = Running::create(file, self.block_size)?;
        let create = Command::Create {
            label: Label { name: "disk".to_owned(), uuid: Uuid::from_u128(1).into_bytes() },
            units: bytes.len() as u64 / u64::from(UNIT),
            block_size: self.block_size,
            origin: Origin::Empty,
            when_full: WhenFull::Wait,
            is_thick: false,
        };
        let Answer::Volume(volume) = running.command(create)? else { bail!("no volume was created") };
        for (piece, bytes) in bytes.chunks(PIECE).enumerate() {
            running.write(volume, piece * PIECE, bytes)?;
        }
        running.flush(volume)
    }

    /// Checks the pool, and reads the volume.
    ///
    /// # Errors
    /// The pool cannot be opened, is damaged, has leaked space, or has lost the volume.
    pub fn content(&self) -> Result<Vec<u8>> {
        let file = File::options().read(true).write(true).open(&self.file)?;
        let mut running = Running::open(file, self.block_size)?;
        let report = running.check()?;
        ensure!(report.is_clean(), "the check of the pool found {report:?}");
        let found = running.engine.volumes().find(|(_, volume)| volume.label.name == "disk");
        let (volume, bytes) =
            found.map(|(id, volume)| (id, volume.units * u64::from(UNIT))).context("the volume is gone")?;
        running.read(volume, bytes as usize)
    }
}

/// A pool that is open in this process. Operations on the file end at once.
struct Running {
    file: File,
    engine: Pool,
    store: Box<Store>,
}

impl Running {
    fn create(file: File, block_size: u32) -> Result<Self> {
        let pool = Uuid::from_u128(2);
        let options =
            Options { segment_bytes: SEGMENT, ..Options::new(pool, Uuid::from_u128(3), "crash", block_size) };
        let mut formatting = Formatting::new(Base { bytes: BASE, block: block_size }, &options, false)?;
        let store = loop {
            let op = formatting.next_op().context("the creation has nothing to do")?;
            if let Some(store) = formatting.completed(run(&file, op)) {
                break store?;
            }
        };
        let engine = Pool::create(Settings::default(), store.facts(), pool.into_bytes());
        Self { file, engine, store }.ready()
    }

    fn open(file: File, block_size: u32) -> Result<Self> {
        let base = Base { bytes: file.metadata()?.len(), block: block_size };
        let mut opening = Opening::new(base, Expected::default());
        let Opened { store, recovered, findings, copy: _ } = loop {
            let op = opening.next_op().context("the opening has nothing to do")?;
            if let Some(opened) = opening.completed(run(&file, op)) {
                break *opened?;
            }
        };
        ensure!(findings.is_empty(), "a copy is damaged: {findings:?}");
        let recovered = recovered.context("the manifest is lost")?;
        let engine =
            Pool::open(|_| Settings::default(), store.facts(), store.pool().into_bytes(), &recovered)?;
        Self { file, engine, store: Box::new(store) }.ready()
    }

    fn ready(mut self) -> Result<Self> {
        self.run();
        ensure!(self.engine.state() == State::Ready, "the pool is {:?}", self.engine.state());
        Ok(self)
    }

    /// Runs the engine until it waits for requests.
    fn run(&mut self) {
        loop {
            if self.store.is_checkpoint_due() {
                self.engine.request_checkpoint();
            }
            let mut has_more = self.engine.turn();
            while let Some((id, op)) = self.engine.next_op() {
                self.store.submit(id, op);
            }
            while let Some(op) = self.store.next_op() {
                self.store.completed(run(&self.file, op));
            }
            while let Some(done) = self.store.next_answer() {
                self.engine.completed(done);
                has_more = true;
            }
            if !has_more {
                return;
            }
        }
    }

    fn command(&mut self, command: Command) -> Result<Answer> {
        self.engine.command(Tag(0), command);
        self.run();
        Ok(self.engine.next_command_reply().context("the command does not end")?.result?)
    }

    fn check(&mut self) -> Result<CheckReport> {
        match self.command(Command::Check { data: true, repair: false })? {
            Answer::Check(report) => Ok(report),
            other => bail!("the answer to a check is {other:?}"),
        }
    }

    fn request(&mut self, volume: VolumeId, at: usize, bytes: usize, action: Action) -> Result<()> {
        let [unit, units] = [at, bytes].map(|bytes| bytes as u64 / u64::from(UNIT));
        self.engine.submit(Request { tag: Tag(0), volume, unit, units, action });
        self.run();
        let status = self.engine.next_reply().context("the request does not end")?.status;
        ensure!(status == Status::Ok, "a request at byte {at} ends with {status:?}");
        Ok(())
    }

    fn write(&mut self, volume: VolumeId, at: usize, bytes: &[u8]) -> Result<()> {
        let mut buffer = Buffer::from_slice(bytes);
        let data = buffer.lend();
        self.request(volume, at, bytes.len(), Action::Write { data, fua: false })?;
        buffer.reclaim();
        Ok(())
    }

    fn flush(&mut self, volume: VolumeId) -> Result<()> {
        self.request(volume, 0, 0, Action::Flush)
    }

    fn read(&mut self, volume: VolumeId, len: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let piece = PIECE.min(len - bytes.len());
            let mut buffer = Buffer::new(piece, 4096);
            let data = buffer.lend();
            self.request(volume, bytes.len(), piece, Action::Read { data })?;
            buffer.reclaim();
            bytes.extend_from_slice(buffer.bytes());
        }
        Ok(bytes)
    }
}

/// Runs an operation on the file.
fn run(file: &File, op: DiskOp) -> DiskDone {
    let (buffer, result) = match op.request {
        DiskRequest::Read { offset, mut buffer, len } => {
            let result = file.read_exact_at(&mut buffer.bytes_mut()[..len as usize], offset);
            (Some(buffer), result)
        }
        DiskRequest::Write { offset, buffer, len } => {
            let result = file.write_all_at(&buffer.bytes()[..len as usize], offset);
            (Some(buffer), result)
        }
        DiskRequest::Flush => (None, file.sync_data()),
        DiskRequest::Discard { .. } => (None, Ok(())),
    };
    DiskDone { tag: op.tag, buffer, result: result.map_err(|_| StoreError::Medium) }
}
