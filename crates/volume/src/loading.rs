//! Makes the manifest of a pool from a checkpoint and the edits after it. Context: a thread that may block; it takes as long as
//! the manifest is large.

use crate::manifest::edit::Content;
use crate::manifest::{Edit, Manifest, edit};
use crate::{OpenError, Recovered, StoreFacts};

/// Edits of a checkpoint that are in memory at the same time.
const EDITS: usize = 4096;

/// The manifest of a pool. An empty checkpoint is that of an empty pool.
pub(crate) fn load(facts: &StoreFacts, uuid: [u8; 16], from: &Recovered) -> Result<Manifest, OpenError> {
    let mut maker = Maker { manifest: Manifest::new(uuid, facts), held: Vec::new() };
    if !from.checkpoint.is_empty() {
        let (mut body, is_continued) = edit::open(&from.checkpoint, Content::Checkpoint, uuid, facts)?;
        let mut is_first = true;
        while is_first || !body.is_empty() {
            maker.apply(edit::take(&mut body, EDITS, is_continued)?, is_first)?;
            is_first = false;
        }
    }
    for bytes in &from.edits {
        let (mut body, is_continued) = edit::open(bytes, Content::Edits, uuid, facts)?;
        maker.apply(edit::take(&mut body, usize::MAX, is_continued)?, true)?;
    }
    maker.manifest.verify(facts)?;
    Ok(maker.manifest)
}

/// Makes a manifest from records.
struct Maker {
    manifest: Manifest,
    /// Edits that are continued.
    held: Vec<Edit>,
}

impl Maker {
    /// Applies edits of a record, of which they are the first or not.
    fn apply(&mut self, mut edits: Vec<Edit>, is_first: bool) -> Result<(), OpenError> {
        if is_first && matches!(edits.first(), Some(Edit::Opened { .. })) {
            // The life before has ended without the rest.
            self.held.clear();
        }
        if edits.last() == Some(&Edit::Continued) {
            edits.pop();
            self.held.append(&mut edits);
            return Ok(());
        }
        let held = std::mem::take(&mut self.held);
        held.into_iter().chain(edits).try_for_each(|edit| self.manifest.apply(edit))
    }
}
