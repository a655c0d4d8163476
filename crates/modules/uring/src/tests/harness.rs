//! A disk with one channel, on a reactor that a test steps.

use crate::store::{Alignment, Store};
use crate::{Config, Error, Forced, Resized, Size, create_forced, resize, store_of};
use aryk_bdev::{
    Access, Bdev, BdevChannel, Blocks, Bytes, Completion, Env, Io, Lba, Op, Registry, Status, Tag,
};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Reactor, Root, RootRef, SleepPolicy};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// A store of 4 KiB blocks.
pub const STRICT: Alignment = Alignment { memory: 4096, offset: 4096 };

pub const MIB: u64 = 1 << 20;

pub struct Opener {
    pub channel: BdevChannel,
    pub done: Vec<Completion>,
}

impl Root for Opener {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let before = self.done.len();
        self.channel.poll(cx, &mut self.done);
        self.done.len() > before
    }
}

/// One channel of a disk.
pub struct Bench {
    reactor: Reactor,
    opener: RootRef<Opener>,
    pub env: Env,
    next: u64,
}

/// A directory for the files of a test, in `below`, which is on the file system to test. The directory is deleted with the
/// value.
pub fn directory(below: impl AsRef<Path>) -> tempfile::TempDir {
    tempfile::tempdir_in(below).unwrap()
}

/// A directory on a disk: the directory of the test's executable, because `/tmp` may be a tmpfs.
pub fn disk() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

pub fn disk_directory() -> tempfile::TempDir {
    directory(disk())
}

pub fn sparse(dir: &Path, size: u64) -> Config {
    Config { size: Some(Bytes(size)), ..Config::new("d", dir.join("image")) }
}

impl Bench {
    pub fn new(config: Config, alignment: Option<Alignment>, engine: Engine) -> Self {
        let env = Env::default();
        create_forced(&env, config, Forced { alignment, blocking: false }).unwrap();
        Self::on(&env, engine)
    }

    /// Opens a channel of the disk `d`.
    pub fn on(env: &Env, engine: Engine) -> Self {
        Self::try_on(env, engine).unwrap()
    }

    /// Opens a channel of the disk `d`, or returns the error.
    pub fn try_on(env: &Env, engine: Engine) -> Result<Self, aryk_bdev::OpenError> {
        let descriptor = env.registry().open("d", Access::Shared, "test", |_| {}).unwrap();
        let mut reactor = Reactor::new(0, SleepPolicy::Adaptive, engine, Clock::Monotonic).unwrap();
        let cx = reactor.cx();
        let thread = cx.add_thread("test", CoreSet::allowed());
        let opener = cx.add_root(thread, "opener", |id, cx| {
            Ok::<_, aryk_bdev::OpenError>(Opener {
                channel: descriptor.open_channel(id, cx)?,
                done: Vec::new(),
            })
        })?;
        Ok(Self { reactor, opener, env: env.clone(), next: 0 })
    }

    pub fn bdev(&self) -> Arc<Bdev> {
        self.env.registry().find("d").unwrap()
    }

    pub fn store(&self) -> Arc<Store> {
        Arc::clone(store_of(&self.bdev()).unwrap())
    }

    pub fn path(&self) -> PathBuf {
        self.store().path.clone()
    }

    pub fn submit(&mut self, op: Op, lba: u64, blocks: u64, data: Sgl, fua: bool) -> Tag {
        self.start(Io {
            tag: Tag(0),
            op,
            fua,
            may_unmap: false,
            lba: Lba(lba),
            blocks: Blocks(blocks),
            source: Lba::ZERO,
            data,
        })
    }

    /// Submits a request with a new tag.
    fn start(&mut self, io: Io) -> Tag {
        self.next += 1;
        let tag = Tag(self.next);
        let cx = self.reactor.cx();
        let opener = cx.root::<Opener>(self.opener.id()).unwrap();
        opener.borrow_mut().channel.submit(Io { tag, ..io }, cx);
        cx.wake(self.opener.id());
        tag
    }

    pub fn opener(&mut self) -> Rc<RefCell<Opener>> {
        self.reactor.cx().root(self.opener.id()).unwrap()
    }

    pub fn abort(&mut self, tag: Tag) {
        let opener = self.opener();
        opener.borrow_mut().channel.abort(tag, self.reactor.cx());
    }

    /// Runs turns of the reactor until the request has completed.
    pub fn wait(&mut self, tag: Tag) -> Status {
        let opener = self.opener();
        loop {
            let mut this = opener.borrow_mut();
            if let Some(i) = this.done.iter().position(|c| c.tag == tag) {
                return this.done.swap_remove(i).status;
            }
            drop(this);
            self.reactor.step();
        }
    }

    pub fn step(&mut self) {
        self.reactor.step();
    }

    pub fn command(&mut self, op: Op, lba: u64, blocks: u64) -> Status {
        let tag = self.submit(op, lba, blocks, Sgl::EMPTY, false);
        self.wait(tag)
    }

    /// Writes zeroes, and allows the store to free the blocks.
    pub fn zero_or_unmap(&mut self, lba: u64, blocks: u64) -> Status {
        let (tag, op, data) = (Tag(0), Op::WriteZeroes, Sgl::EMPTY);
        let tag = self.start(Io {
            tag,
            op,
            fua: false,
            may_unmap: true,
            lba: Lba(lba),
            blocks: Blocks(blocks),
            source: Lba::ZERO,
            data,
        });
        self.wait(tag)
    }

    /// Shrinks the disk `d`.
    pub fn shrink(&mut self, to: u64) -> Result<Bytes, Error> {
        let env = self.env.clone();
        let Resized::Shrinking(shrinking) = resize(env.registry(), "d", Size::Exactly(Bytes(to)))? else {
            panic!("the disk was not larger")
        };
        let mut settling = std::pin::pin!(shrinking.settle());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        loop {
            if let std::task::Poll::Ready(settled) = settling.as_mut().poll(&mut context) {
                return settled.cut(env.registry());
            }
            self.reactor.step();
        }
    }

    /// Writes `data` from memory that begins `skew` bytes past an aligned address.
    pub fn write_skewed(&mut self, lba: u64, data: &[u8], skew: usize, fua: bool) -> Status {
        let mut buffer = Buffer::new(data.len() + skew, 4096);
        buffer.write(skew, data);
        let view = buffer.lend().slice(skew as u32, data.len() as u32);
        let block_size = u64::from(self.bdev().geometry().block_size);
        let tag = self.submit(Op::Write, lba, data.len() as u64 / block_size, view, fua);
        let status = self.wait(tag);
        buffer.reclaim();
        status
    }

    pub fn write(&mut self, lba: u64, data: &[u8]) -> Status {
        self.write_skewed(lba, data, 0, false)
    }

    pub fn read_skewed(&mut self, lba: u64, blocks: u64, skew: usize) -> Vec<u8> {
        let len = (blocks * u64::from(self.bdev().geometry().block_size)) as usize;
        let mut buffer = Buffer::new(len + skew, 4096);
        let view = buffer.lend().slice(skew as u32, len as u32);
        let tag = self.submit(Op::Read, lba, blocks, view, false);
        assert_eq!(self.wait(tag), Status::Ok);
        buffer.reclaim();
        buffer.bytes()[skew..].to_vec()
    }

    pub fn read(&mut self, lba: u64, blocks: u64) -> Vec<u8> {
        self.read_skewed(lba, blocks, 0)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.reactor.cx().remove_root(self.opener.id());
            // This turn removes the channel's client from the ring.
            self.reactor.turn();
        }
    }
}

/// Resizes the disk `d` to a size that is not smaller.
pub fn resized(registry: &Registry, size: Size) -> Result<Bytes, Error> {
    match resize(registry, "d", size)? {
        Resized::Done(bytes) => Ok(bytes),
        Resized::Shrinking(shrinking) => panic!("{shrinking:?}"),
    }
}

/// Bytes that differ for each position and each seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let word = |i: u64| (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..len as u64).map(|i| word(i / 8)[i as usize % 8]).collect()
}
