//! The crypto disk: encrypts what is written to a base disk, and decrypts what is read from it, by AES-XTS. Control context; its
//! channels run in reactor context.
//!
//! The memory of guests never holds ciphertext, and nothing is encrypted or decrypted in it: all data passes through buffers of
//! this process ([`pool`]). A guest could otherwise change ciphertext that is about to be decrypted, or read what is about to be
//! stored.
//!
//! Blocks that were never written read as random data, and so do discarded blocks. A write of zeroes stores encrypted zeroes.
#![forbid(unsafe_code)]

mod channel;
mod part;
mod pool;
mod tweaks;

pub use aryk_aes_xts::{Key, KeyError};
pub use part::{Area, AreaError};
pub use tweaks::{TweakError, TweakMode};

use aryk_bdev::{
    Base, Bdev, Blocks, Bytes, Channel, Decorator, Env, Geometry, Identity, Lba, Limits, Op, OpSet, OpenError,
};
use aryk_reactor::{Cx, RootId};
use channel::{CryptoChannel, Setup};
use part::Part;
use std::sync::Arc;
use tweaks::Layout;

/// Bytes of a read or write of the base, at most, unless one block has more.
const TRANSFER_MAX: Bytes = Bytes(pool::BUFFER_MAX as u64);

/// Bytes of buffers that the channels of one reactor share.
const POOL_BYTES: usize = 64 << 20;

/// Configuration of a crypto disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names and UUID of the disk.
    pub identity: Identity,
    /// The kind of disk, for people.
    pub product: &'static str,
    /// The name of the base disk.
    pub base: String,
    /// The part of the base that the disk encrypts.
    pub area: Area,
    /// The key, which several disks may share.
    pub key: Arc<Key>,
    /// How the position of data on the disk becomes its tweak.
    pub tweak_mode: TweakMode,
    /// Whether discards go to the base, where they show which blocks are in use. Otherwise the disk does not support them.
    pub passes_discards: bool,
}

/// An error of creating a crypto disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The name is taken, or the base cannot be opened.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The tweak mode does not fit the disk.
    #[error(transparent)]
    Tweak(#[from] TweakError),
    /// The part of the base does not fit it.
    #[error(transparent)]
    Area(#[from] AreaError),
}

/// Creates a crypto disk on top of another disk.
///
/// # Errors
/// [`Error`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    create_with_pool(env, config, POOL_BYTES)
}

/// As [`create`], with another size of the reactors' pools.
fn create_with_pool(env: &Env, config: Config, pool_bytes: usize) -> Result<Arc<Bdev>, Error> {
    let Config { identity, product, base, area, key, tweak_mode, passes_discards } = config;
    let base = Base::open(env.registry(), &base, &identity.name)?;
    let geometry = base.bdev().geometry();
    let layout = Layout::new(tweak_mode, geometry.block_size)?;
    let part = Part::new(area, layout.block_size, geometry)?;
    let crypto = Crypto { base, product, part, key, layout, passes_discards, pool_bytes };
    Ok(env.registry().register(identity, Arc::new(crypto))?)
}

struct Crypto {
    base: Base,
    product: &'static str,
    part: Part,
    key: Arc<Key>,
    layout: Layout,
    passes_discards: bool,
    pool_bytes: usize,
}

impl Decorator for Crypto {
    fn product(&self) -> &'static str {
        self.product
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn geometry(&self) -> Geometry {
        self.part.geometry(self.base.bdev().geometry())
    }

    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        let (lba, blocks) = self.part.to_base(lba, blocks);
        self.part.from_base(self.base.bdev().device().failed_block(lba, blocks)?)
    }

    fn limits(&self) -> Limits {
        let limits = self.part.limits(self.base.bdev().device().limits());
        let transfer = TRANSFER_MAX.whole_blocks(self.part.block_size).max(Blocks(1));
        // The base gets one buffer for each request, however many pieces the request's memory has.
        Limits { transfer_blocks: limits.transfer_blocks.min(transfer), segments: u32::MAX, ..limits }
    }

    /// The block layer makes all other operations of reads and writes: what the base does by itself, it would do with ciphertext.
    fn ops(&self) -> OpSet {
        let of_base = self.base.bdev().device().ops();
        let passed =
            [Op::Read, Op::Write, Op::Flush].into_iter().chain(self.passes_discards.then_some(Op::Unmap));
        passed.filter(|&op| of_base.contains(op)).fold(OpSet::of(&[]), OpSet::with)
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.base.open_channel(root, cx)?;
        let setup = Setup {
            key: Arc::clone(&self.key),
            layout: self.layout,
            part: self.part,
            pool_bytes: self.pool_bytes,
            depth: Decorator::limits(self).depth,
        };
        Ok(Box::new(CryptoChannel::new(base, setup, root, cx)))
    }
}

#[cfg(test)]
mod tests;
