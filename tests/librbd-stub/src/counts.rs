//! What the stub counts, and writes for a test of another process.

use crate::{gate, lock};
use std::sync::Mutex;

/// Numbers of clients and of images that are being opened: now, and the largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Clients that were created and not shut down.
    pub clients: u64,
    /// The most of them at one time.
    pub clients_max: u64,
    /// Images whose opening has begun and not ended, without those that never open.
    pub opening: u64,
    /// The most of them at one time.
    pub opening_max: u64,
    /// Images that were opened.
    pub opened: u64,
}

static COUNTS: Mutex<Counts> =
    Mutex::new(Counts { clients: 0, clients_max: 0, opening: 0, opening_max: 0, opened: 0 });

/// The counts now.
pub fn counts() -> Counts {
    *lock(&COUNTS)
}

/// Changes the counts, and writes them to `$LIBRBD_STUB_DIR/counts` as numbers in their order.
pub(crate) fn count(change: impl FnOnce(&mut Counts)) {
    let mut counts = lock(&COUNTS);
    change(&mut counts);
    counts.clients_max = counts.clients_max.max(counts.clients);
    counts.opening_max = counts.opening_max.max(counts.opening);
    let Some(directory) = gate::directory() else { return };
    let Counts { clients, clients_max, opening, opening_max, opened } = *counts;
    let text = format!("{clients} {clients_max} {opening} {opening_max} {opened}");
    // A reader sees the old file or the new one.
    let (new, path) = (directory.join("counts.new"), directory.join("counts"));
    let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
    // The test has removed the directory at its end.
    let _ = written;
}
