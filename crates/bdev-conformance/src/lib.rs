//! The suite that every bdev module passes.
//!
//! A module's tests give [`conformance!`] a function that makes a [`Fixture`]: a registry with one of its disks. Each check makes its own, opens the
//! disk on a reactor that the check steps itself ([`Bench`]), or on several that run, and looks at every completion and every byte.
//!
//! Disks of some thousand blocks are enough; a check that needs more than there is panics.
#![forbid(unsafe_code)]

mod bench;
pub mod checks;
mod data;
mod model;
mod probe;

pub use bench::{Bench, Opener, Outcome};
pub use data::{Shape, contents, fill};
pub use probe::{Log, Probe, Properties, Seen};

use aryk_bdev::Registry;

/// What can be asked of a fixture's disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Features {
    /// It keeps what is written.
    pub data: bool,
    /// An unmapped block reads as zeroes.
    pub unmap_zeroes: bool,
}

/// A disk to be checked, and what it stands on.
pub trait Fixture {
    /// Where it is registered.
    fn registry(&self) -> &Registry;

    /// Its name.
    fn name(&self) -> &str {
        "disk"
    }

    /// What can be asked of it.
    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: true }
    }

    /// Gives the store another number of blocks, as its operator would; `false` if that cannot be done to it.
    fn resize(&self, blocks: u64) -> bool {
        let _ = blocks;
        false
    }
}

/// Tests of a module: one for each of [`checks`], on what `$make` makes, a function or closure that gives a [`Fixture`].
#[macro_export]
macro_rules! conformance {
    ($make:expr) => {
        $crate::conformance!(
            $make,
            every_operation_at_every_alignment
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
            held_off_by_nobody_forever
            deadlines
        );
    };
    ($make:expr, $($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                $crate::checks::$check(&$make);
            }
        )*
    };
}
