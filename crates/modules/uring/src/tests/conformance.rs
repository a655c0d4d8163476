//! The conformance suite of the block layer, on each kind of file.

use super::harness::{MIB, STRICT, directory, disk, sparse};
use crate::{Config, Direct, Forced, Size, create_forced, resize};
use aryk_bdev::{Blocks, Env, Registry};
use aryk_bdev_conformance::{Features, Fixture, conformance};
use std::path::Path;

pub struct OnFile {
    env: Env,
    block_size: u32,
    unmap_zeroes: bool,
    /// Dropped last.
    _dir: tempfile::TempDir,
}

impl Fixture for OnFile {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn name(&self) -> &'static str {
        "d"
    }

    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: self.unmap_zeroes }
    }

    fn resize(&self, blocks: Blocks) -> bool {
        resize(self.env.registry(), "d", Size::Exactly(blocks.to_bytes(self.block_size))).is_ok()
    }
}

fn on(below: impl AsRef<Path>, forced: Forced, change: impl FnOnce(&mut Config)) -> OnFile {
    let dir = directory(below);
    let mut config = sparse(dir.path(), 16 * MIB);
    change(&mut config);
    let env = Env::default();
    let bdev = create_forced(&env, config, forced).unwrap();
    // A range that is smaller than a block of the store is not unmapped.
    let unmap_zeroes = forced.alignment.is_none();
    OnFile { env, block_size: bdev.geometry().block_size, unmap_zeroes, _dir: dir }
}

const PLAIN: Forced = Forced { alignment: None, blocking: false };

mod direct {
    super::conformance!(|| super::on(super::disk(), super::PLAIN, |_| {}));
}

mod direct_4k {
    super::conformance!(|| super::on(super::disk(), super::PLAIN, |c| c.block_size = Some(4096)));
}

mod cached {
    super::conformance!(|| super::on(super::disk(), super::PLAIN, |c| c.direct = super::Direct::Never));
}

mod tmpfs {
    super::conformance!(|| super::on("/dev/shm", super::PLAIN, |_| {}));
}

mod threads {
    const BLOCKING: super::Forced = super::Forced { blocking: true, ..super::PLAIN };
    super::conformance!(|| super::on(super::disk(), BLOCKING, |_| {}));
}

mod parts_of_blocks {
    const PARTS: super::Forced = super::Forced { alignment: Some(super::STRICT), ..super::PLAIN };
    super::conformance!(|| super::on(super::disk(), PARTS, |_| {}));
}
