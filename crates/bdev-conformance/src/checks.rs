//! The required behaviour of every disk. Each check panics if a disk fails it.

mod compounds;
mod exclusion;
mod lifecycle;
mod limits;
mod requests;
mod sequences;
mod threads;

pub use compounds::{compare_and_write, compares, compounds_under_aborts_and_resets, copies};
pub use exclusion::{compare_and_write_is_atomic, no_request_is_held_off_forever};
pub use lifecycle::{
    abort_under_load, claims, deadlines, preparation, read_only_opening, removal_under_load,
    removal_waits_for_channels, reset_under_load, resizing, resizing_under_load, statistics_add_up,
};
pub use limits::{more_in_flight_than_the_depth, tight_limits};
pub use requests::{bounds_and_bad_requests, durable_requests, every_operation_at_every_alignment};
pub use sequences::any_sequence;
pub use threads::several_threads;
