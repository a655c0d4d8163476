//! The crypto disk: encrypts what is written to a base disk, and decrypts what is read from it, by AES-XTS. Control context; its
//! channels run in reactor context.
//!
//! The memory of guests never holds ciphertext, and nothing is encrypted or decrypted in it: all data passes through buffers of
//! this process ([`pool`]). A guest could otherwise change ciphertext that is about to be decrypted, or read what is about to be
//! stored.
//!
//! A header before the data, as that of LUKS, is read and written by [`on_header`]; its format is the caller's.
//!
//! Blocks that were never written read as random data, and so do discarded blocks. A write of zeroes stores encrypted zeroes.
#![forbid(unsafe_code)]

mod channel;
mod epoch;
mod header;
mod part;
mod pool;
pub mod rekey;
mod tweaks;

pub use aryk_aes_xts::{Key, KeyError};
pub use header::{HeaderError, Opener, on_header, on_header_below};
pub use part::{Area, AreaError};
pub use tweaks::{TweakError, TweakMode};

use aryk_bdev::{
    Base, Bdev, Blocks, BoxFuture, Bytes, Channel, Decorator, Env, Geometry, Identity, Lba, Limits, Op,
    OpSet, OpenError,
};
use aryk_reactor::{Cx, Handle, RootId};
use channel::{CryptoChannel, Setup};
use epoch::{Cipher, Epoch, Epochs};
use part::Part;
use pool::PoolBytes;
use rekey::Rotation;
use std::sync::{Arc, Mutex, MutexGuard};
use tweaks::Layout;

/// Bytes of a read or write of the base, at most, unless one block has more.
const TRANSFER_MAX: Bytes = Bytes(pool::BUFFER_MAX as u64);

/// Bytes of buffers of one reactor's channels.
const POOL_BYTES: PoolBytes = PoolBytes { common: 64 << 20, reserve: 1 << 20 };

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

/// Creates a crypto disk whose key rotation is not complete. `config` has the old key. The rotation goes on, unless `is_stopped`:
/// then only the zone is written that the journal holds.
///
/// # Errors
/// [`rekey::Error`].
pub fn create_rotating(
    env: &Env,
    config: Config,
    rekey: rekey::Config,
    is_stopped: bool,
) -> Result<Arc<Bdev>, rekey::Error> {
    if env.reactors().find_least_loaded(None).is_none() {
        return Err(rekey::Error::NoReactor);
    }
    let limit = rekey.bytes_per_second;
    let (identity, crypto) = open(env, config, POOL_BYTES)?;
    let crypto = crypto.with_rotation(rekey)?;
    let rotation = crypto.rotation().expect("just set");
    let bdev = env.registry().register(identity, Arc::new(crypto)).map_err(Error::from)?;
    rotation.attach(&bdev);
    if is_stopped {
        rotation.recover(env)?
    } else {
        rotation.run(env, limit)?
    }
    Ok(bdev)
}

/// As [`create`], with another size of the reactors' pools.
fn create_with_pool(env: &Env, config: Config, pool_bytes: PoolBytes) -> Result<Arc<Bdev>, Error> {
    let (identity, crypto) = open(env, config, pool_bytes)?;
    Ok(env.registry().register(identity, Arc::new(crypto))?)
}

/// Opens the base of a disk that is being created.
fn open(env: &Env, config: Config, pool_bytes: PoolBytes) -> Result<(Identity, Crypto), Error> {
    let Config { identity, product, base, area, key, tweak_mode, passes_discards } = config;
    let base = Arc::new(Base::open(env.registry(), &base, &identity.name)?);
    let geometry = base.bdev().geometry();
    let layout = Layout::new(tweak_mode, geometry.block_size)?;
    let part = Part::new(area, layout.block_size, geometry)?;
    let epochs = Epochs::new(Epoch::settled(Cipher { key, layout }));
    let rotation = Mutex::default();
    Ok((identity, Crypto { base, product, part, epochs, rotation, passes_discards, pool_bytes }))
}

struct Crypto {
    base: Arc<Base>,
    product: &'static str,
    part: Part,
    epochs: Epochs,
    /// The rotation of the key, from its beginning until the disk has one key again.
    rotation: Mutex<Option<Arc<Rotation>>>,
    passes_discards: bool,
    pool_bytes: PoolBytes,
}

impl Crypto {
    fn lock_rotation(&self) -> MutexGuard<'_, Option<Arc<Rotation>>> {
        self.rotation.lock().expect("no one panics holding it")
    }

    fn rotation(&self) -> Option<Arc<Rotation>> {
        self.lock_rotation().clone()
    }
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
        let (lba, blocks) = self.part.on_base(lba, blocks);
        self.part.of_base(self.base.bdev().device().failed_block(lba, blocks)?)
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

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let reactor = reactor.clone();
        Box::pin(async move {
            if let Some(rotation) = self.rotation() {
                rotation.recovered().await;
            }
            self.base.prepare(&reactor).await
        })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Some(rotation) = self.rotation() {
                rotation.close().await;
            }
        })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let base = self.base.open_channel(root, cx)?;
        let epoch = self.epochs.last();
        let setup = Setup {
            cipher: epoch.cipher.clone(),
            epoch,
            part: self.part,
            pool_bytes: self.pool_bytes,
            depth: Decorator::limits(self).depth,
        };
        Ok(Box::new(CryptoChannel::new(base, setup, root, cx)))
    }
}

#[cfg(test)]
mod tests;
