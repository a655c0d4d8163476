//! The conformance suite of the block layer.

use super::OnModel;
use crate::Dma;
use aryk_bdev::{Blocks, Registry};
use aryk_bdev_conformance::{Fixture, conformance};
use aryk_nvme_model::{Config, NamespaceConfig, Timing};

impl Fixture for OnModel {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn name(&self) -> &'static str {
        "nvn1"
    }

    fn resize(&self, blocks: Blocks) -> bool {
        self.model.with(|model| model.resize_namespace(1, blocks.0));
        Self::until("the new size", || self.disks[0].blocks() == blocks);
        true
    }
}

/// Blocks of 4 KiB, any alignment of data, every optional command.
mod pinned {
    super::conformance!(|| super::OnModel::new(super::Config::default(), super::Dma::Pin));
}

/// What depends on where the data is.
mod bounced {
    super::conformance!(
        || super::OnModel::new(super::Config::default(), super::Dma::Bounce),
        every_operation_at_every_alignment
        more_in_flight_than_the_depth
        tight_limits
        reset_under_load
        any_sequence
        several_threads
        compare_and_write
    );
}

/// Blocks of 512 bytes, no SGLs, no optional command, answers in any order, small queues and transfers.
mod plain {
    super::conformance!(|| super::OnModel::new(super::plain(), super::Dma::Pin));
}

fn plain() -> Config {
    Config {
        sgls: 0,
        oncs: 0,
        fuses: 0,
        mdts: 2,
        queue_entries: 16,
        oacs: 0,
        volatile_write_cache: false,
        namespaces: vec![(1, NamespaceConfig { noiob: 24, ..NamespaceConfig::new(65_536, 0, 1) })],
        timing: Timing { io: 0..=40_000, ..Timing::IMMEDIATE },
        ..Config::default()
    }
}

/// A compare and write of several blocks is fused.
mod fused {
    super::conformance!(
        || super::OnModel::new(super::Config { acwu: 15, ..super::Config::default() }, super::Dma::Pin),
        any_sequence
        compare_and_write
        compounds_under_aborts_and_resets
        compare_and_write_is_atomic
    );
}
