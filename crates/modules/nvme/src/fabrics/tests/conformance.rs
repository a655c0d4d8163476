//! The conformance suite of the block layer.

use super::{OnTarget, until};
use aryk_bdev::{Blocks, Registry};
use aryk_bdev_conformance::{Fixture, conformance};

impl Fixture for OnTarget {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn resize(&self, blocks: Blocks) -> bool {
        self.target.resize(blocks);
        until("the new size", || self.disk.blocks() == blocks);
        true
    }
}

mod plain {
    super::conformance!(super::OnTarget::new);
}

/// Digests of headers and of data, and a short queue.
mod digests {
    super::conformance!(
        || super::OnTarget::with(|config| {
            (config.header_digest, config.data_digest, config.depth) = (true, true, 7);
        }),
        every_operation_at_every_alignment
        durable_requests
        more_in_flight_than_the_depth
        abort_under_load
        any_sequence
        several_threads
        compare_and_write
    );
}
