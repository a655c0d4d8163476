//! Opening a pool: its manifest is made from a checkpoint and the edits after it, in pieces. Any context.

use crate::manifest::edit::Content;
use crate::manifest::{Edit, Manifest, edit};
use crate::{OpenError, Pool, Recovered, Settings, StoreFacts};

/// Edits that one step applies.
const EDITS_PER_STEP: usize = 4096;

/// A pool that is being opened. The caller takes steps until there is a result, each as long as a turn. The last step makes what
/// the pool has in memory for each blob, timeline and run.
#[derive(Debug)]
pub struct Loading {
    facts: StoreFacts,
    from: Recovered,
    maker: Maker,
    /// The number of the record that is being applied: 0 is the checkpoint.
    record: usize,
    /// The bytes of its edits that were not applied.
    left: Option<usize>,
}

/// Makes a manifest from records.
#[derive(Debug)]
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

impl Loading {
    /// Begins to open a pool. An empty checkpoint is that of an empty pool.
    pub fn new(facts: StoreFacts, uuid: [u8; 16], from: Recovered) -> Self {
        let maker = Maker { manifest: Manifest::new(uuid, &facts), held: Vec::new() };
        let record = usize::from(from.checkpoint.is_empty());
        Self { facts, from, maker, record, left: None }
    }

    /// Does a piece of the work. Returns the pool, or why it cannot be opened, when there is no more. The pool has the settings
    /// that `settings` makes of its note.
    pub fn step(&mut self, settings: impl FnOnce(&[u8]) -> Settings) -> Option<Result<Pool, OpenError>> {
        match self.try_step() {
            Ok(true) => None,
            Ok(false) => Some(self.take_manifest().map(|manifest| {
                let settings = settings(&manifest.note);
                Pool::recovering(settings, self.facts, manifest)
            })),
            Err(error) => Some(Err(error)),
        }
    }

    /// Returns whether there is more to apply.
    pub(crate) fn try_step(&mut self) -> Result<bool, OpenError> {
        let mut budget = EDITS_PER_STEP;
        while budget > 0 {
            let bytes = match self.record.checked_sub(1) {
                None => &self.from.checkpoint,
                Some(at) => match self.from.edits.get(at) {
                    Some(bytes) => bytes,
                    None => return Ok(false),
                },
            };
            let (mut body, is_first, is_continued) = match self.left {
                // The checks of the whole record have passed; its bytes end with a checksum.
                Some(left) => (&bytes[bytes.len() - 4 - left..bytes.len() - 4], false, false),
                None => {
                    let uuid = self.maker.manifest.uuid;
                    let content = if self.record == 0 { Content::Checkpoint } else { Content::Edits };
                    let (body, is_continued) = edit::open(bytes, content, uuid, &self.facts)?;
                    (body, true, is_continued)
                }
            };
            // Records of the journal are bounded; a checkpoint is as large as the manifest.
            let count = if self.record == 0 { budget } else { usize::MAX };
            let edits = edit::take(&mut body, count, is_continued)?;
            budget = budget.saturating_sub(edits.len().max(1));
            self.maker.apply(edits, is_first)?;
            if body.is_empty() {
                self.record += 1;
                self.left = None;
            } else {
                self.left = Some(body.len());
            }
        }
        Ok(true)
    }

    /// The manifest of all records, when all are applied.
    pub(crate) fn take_manifest(&mut self) -> Result<Manifest, OpenError> {
        let empty = Manifest::new(self.maker.manifest.uuid, &self.facts);
        let manifest = std::mem::replace(&mut self.maker.manifest, empty);
        manifest.verify(&self.facts)?;
        Ok(manifest)
    }
}
