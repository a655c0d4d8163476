//! Tests the range that the fault handler reads, under every order of execution that loom distinguishes.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p aryk-dma --release --test loom`
#![cfg(loom)]
#![expect(dead_code, reason = "the model uses a part of the file")]

mod sync {
    pub use loom::sync::atomic::{AtomicUsize, Ordering, fence};
}
#[path = "../src/fault/range.rs"]
mod range;

use range::{Range, Span};
use std::sync::Arc;

/// Ranges of two guests, one after the other in the same entry: no reader sees a mixture of them.
#[test]
fn a_reused_range_is_seen_as_a_whole_or_not_at_all() {
    const OLD: Span = Span { base: 0x1000, len: 0x10_0000, page: 4096 };
    const NEW: Span = Span { base: 0x80_0000, len: 0x1000, page: 8192 };
    loom::model(|| {
        let range = Arc::new(Range::default());
        range.set(Some(OLD));
        let writer = {
            let range = Arc::clone(&range);
            loom::thread::spawn(move || {
                range.set(None);
                range.set(Some(NEW));
            })
        };
        let seen = range.get();
        assert!(seen.is_none_or(|span| span == OLD || span == NEW), "{seen:?}");
        writer.join().unwrap();
        assert_eq!(range.get(), Some(NEW));
    });
}
