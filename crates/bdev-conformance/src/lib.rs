//! The suite that every bdev module passes.
//!
//! A module's tests give [`conformance!`] a function that creates a [`Fixture`]: a registry with one of its disks. Each
//! check creates its own, opens the disk on a reactor that the check polls itself ([`Bench`]), or on several that run,
//! and verifies every completion and every byte.
//!
//! Disks of some thousand blocks are enough; a check that needs more blocks panics.
#![forbid(unsafe_code)]

mod bench;
pub mod checks;
mod data;
mod dma_disk;
mod model;
mod probe;
mod wait;

pub use bench::{Bench, Opener, Outcome, Prepared, View};
pub use data::{Shape, contents, fill};
pub use dma_disk::{Accesses, Behaviour, Container, Iommu, create_dma_disk};
pub use probe::{Log, Probe, Properties, Seen};
pub use wait::block_on;

use aryk_bdev::{Blocks, Registry};

/// Properties of a fixture's disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// The disk stores data.
    pub data: bool,
    /// An unmapped block reads as zeroes.
    pub unmap_zeroes: bool,
}

/// A disk to be checked, and its registry.
pub trait Fixture {
    /// The disk's registry.
    fn registry(&self) -> &Registry;

    /// The disk's name.
    fn name(&self) -> &str {
        "disk"
    }

    /// The disk's properties.
    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: true }
    }

    /// Sets the store's number of blocks, as an operator does; `false` if the store cannot be resized.
    fn resize(&self, blocks: Blocks) -> bool {
        let _ = blocks;
        false
    }
}

/// Generates a module's tests: one per function of [`checks`], with the disks of `$make`, a function or closure that
/// returns a [`Fixture`]. An attribute in brackets before it, such as `[ignore]`, is that of each test.
#[macro_export]
macro_rules! conformance {
    (@one [$($attribute:meta)?] $make:expr, $check:ident) => {
        #[test]
        $(#[$attribute])?
        fn $check() {
            $crate::checks::$check(&$make);
        }
    };
    ([$($attribute:meta)?] $make:expr, $($check:ident)*) => {
        $crate::conformance!(@each [$($attribute)?] $make, $($check)*);
    };
    (@each $attributes:tt $make:expr, $($check:ident)*) => {
        $($crate::conformance!(@one $attributes $make, $check);)*
    };
    ([$($attribute:meta)?] $make:expr) => {
        $crate::conformance!(
            [$($attribute)?] $make,
            every_operation_at_every_alignment
            durable_requests
            bounds_and_bad_requests
            more_in_flight_than_the_depth
            tight_limits
            read_only_opening
            claims
            preparation
            abort_under_load
            reset_under_load
            removal_under_load
            removal_waits_for_channels
            resizing
            resizing_under_load
            statistics_add_up
            any_sequence
            several_threads
            compares
            compare_and_write
            copies
            compounds_under_aborts_and_resets
            compare_and_write_is_atomic
            no_request_is_held_off_forever
            deadlines
        );
    };
    ($make:expr $(, $($check:ident)*)?) => {
        $crate::conformance!([] $make $(, $($check)*)?);
    };
}
