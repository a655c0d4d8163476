//! The conformance suite of the block layer.

use super::OnStub;
use aryk_bdev::{Blocks, Registry};
use aryk_bdev_conformance::{Fixture, conformance};
use std::time::Duration;

impl Fixture for OnStub {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn resize(&self, blocks: Blocks) -> bool {
        self.image.resize(blocks.to_bytes(self.disk.geometry().block_size).0);
        super::until("the new size", || self.disk.blocks() == blocks);
        true
    }
}

/// Blocks of 4 KiB.
mod plain {
    super::conformance!(|| super::OnStub::new(super::super::BLOCK, 65_536));
}

/// Blocks of 512 bytes, and completions in any order.
mod shuffled {
    super::conformance!(
        || {
            let disk = super::OnStub::new(512, 65_536);
            disk.image.script(|script| script.delay = super::Duration::from_micros(200));
            disk
        },
        every_operation_at_every_alignment
        more_in_flight_than_the_depth
        abort_under_load
        removal_under_load
        any_sequence
        several_threads
        compare_and_write
        compare_and_write_is_atomic
    );
}
