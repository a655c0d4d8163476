//! The copy of the manifest, and the way by which it becomes the manifest again. Any context.

use super::scan::Segment;
use super::sequences::Sequences;
use super::*;

/// The copy of the manifest.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) manifest: Manifest,
    edits: Vec<Edit>,
    log: LogTail,
}

impl Copy {
    pub(super) fn read(bytes: &[u8], uuid: [u8; 16], facts: &StoreFacts) -> Result<Self, OpenError> {
        let (mut body, _) = edit::open(bytes, Content::Copy, uuid, facts)?;
        let edits = edit::take(&mut body, usize::MAX, false)?;
        let mut manifest = Manifest::new(uuid, facts);
        let mut log = LogTail::default();
        for edit in &edits {
            match edit {
                Edit::Flushed { .. } | Edit::Merged { .. } => {}
                Edit::Log(tail) => log = tail.clone(),
                Edit::Blob { .. } | Edit::Live { .. } | Edit::BlobGone { .. } => {
                    return Err(OpenError::Damaged("a copy of a manifest has blobs"));
                }
                other => manifest.apply(other.clone())?,
            }
        }
        manifest.verify(facts)?;
        Ok(Self { manifest, edits, log })
    }

    /// For each partition, the commit up to which its levels have all, and their runs.
    pub(super) fn levels(&self) -> Vec<(u64, Vec<Run>)> {
        let mut partitions = vec![(0, Vec::<Vec<_>>::new()); PARTITIONS];
        for edit in &self.edits {
            match edit {
                Edit::Flushed { partition, flushed, runs } => {
                    let (newest, levels) = &mut partitions[usize::from(*partition)];
                    *newest = (*newest).max(*flushed);
                    levels.insert(0, runs.clone());
                    levels.retain(|runs| !runs.is_empty());
                }
                Edit::Merged { partition, first, count, runs } => {
                    let (_, levels) = &mut partitions[usize::from(*partition)];
                    let first = (*first as usize).min(levels.len());
                    let end = first.saturating_add(*count as usize).min(levels.len());
                    levels.splice(first..end, [runs.clone()]);
                    levels.retain(|runs| !runs.is_empty());
                }
                _ => {}
            }
        }
        partitions.into_iter().map(|(flushed, levels)| (flushed, levels.concat())).collect()
    }
}

impl Rebuild {
    /// The manifest of the copy, if it is that of the end: without the counts of what is alive.
    pub(super) fn exact(&self) -> Option<Manifest> {
        let copy = self.copy.as_ref()?;
        if copy.manifest.opening < self.opening() {
            return None;
        }
        let mut manifest = Manifest::new(self.uuid, &self.facts);
        // The log has gone on to blobs of which the copy does not know yet.
        let life = |blob: &BlobId| self.segments.get(blob.0 as usize).map_or(0, |segment| segment.life);
        let last = copy.log.blobs.iter().map(life).max().unwrap_or(0);
        let newer = |(_, segment): &(u32, &Segment)| {
            segment.is_log && segment.life > last && segment.life >> 32 == u64::from(copy.manifest.opening)
        };
        let mut newer: Vec<_> = (0..).zip(&self.segments).filter(newer).collect();
        newer.sort_by_key(|(_, segment)| segment.life);
        let mut log = copy.log.clone();
        log.blobs.extend(newer.iter().map(|(blob, _)| BlobId(*blob)));
        let of_runs: Vec<_> = copy.levels().into_iter().flat_map(|(_, runs)| runs).collect();
        if !of_runs.iter().all(|run| self.has_run(run)) {
            return None;
        }
        for (number, segment) in (0..).zip(&self.segments) {
            let id = BlobId(number);
            let kind = if of_runs.iter().any(|run| run.place.blob == id) {
                BlobKind::Index
            } else if log.blobs.contains(&id) {
                BlobKind::Log
            } else if segment.life > 0 {
                BlobKind::Data
            } else {
                continue;
            };
            manifest.apply(Edit::Blob { id, blob: Self::blob(segment, kind) }).ok()?;
        }
        copy.edits.iter().cloned().try_for_each(|edit| manifest.apply(edit)).ok()?;
        let opening = manifest.opening;
        let durable = self.sequences.values().map(|found| found.durable).max().unwrap_or(0);
        let all = self.sequences.values().fold(Sequences::default(), |all, found| all.with(found));
        if !all.has_all(log.sequence, durable) {
            return None;
        }
        manifest.apply(Edit::Log(log)).ok()?;
        manifest.apply(Edit::Opened { opening }).ok()?;
        manifest.verify(&self.facts).ok()?;
        Some(manifest)
    }

    /// Whether all pages of a run are there.
    pub(super) fn has_run(&self, run: &Run) -> bool {
        let place = (run.place.blob, u32::from(run.place.unit));
        self.runs
            .get(&run.id)
            .is_some_and(|found| (found.blob, found.unit) == place && found.pages >= run.shape.pages)
    }

    /// Finds out which runs of a copy of the newest opening are used, and says what is missing of the log.
    pub(super) fn use_runs(&mut self) {
        let Some(copy) = &self.copy else { return };
        if copy.manifest.opening < self.opening() {
            let what = "the copy of the manifest is not the newest: volumes and snapshots that were created or deleted later are not";
            return self.add_damage(None, 0, 0, what);
        }
        let from = copy.log.sequence;
        let durable = self.sequences.values().map(|found| found.durable).max().unwrap_or(0);
        let all = self.sequences.values().fold(Sequences::default(), |all, found| all.with(found));
        for (number, (flushed, runs)) in copy.levels().into_iter().enumerate() {
            let is_whole = runs.iter().all(|run| self.has_run(run));
            self.known[number] = is_whole.then_some(flushed);
            let there = runs.iter().filter(|run| self.has_run(run)).map(|run| run.id);
            self.used.extend(there.collect::<Vec<_>>());
        }
        if !all.has_all(from, durable) {
            let what = "a part of the log is lost: any volume may have older data instead of its writes";
            self.add_damage(None, 0, 0, what);
        }
    }

    /// The next part of the runs of the copy.
    pub(super) fn step_count(&mut self) -> bool {
        if self.is_reading {
            return false;
        }
        if let Some((blob, unit, pages)) = self.parts.front().copied() {
            self.read(blob, unit, pages * BLOCK);
            return false;
        }
        let mut manifest = self.manifest.take().expect("the copy is the manifest");
        for (id, change) in std::mem::take(&mut self.live) {
            if let Err(error) = manifest.apply(Edit::Live { id, change }) {
                self.end(Err(RebuildError::Wrong(error)));
                return false;
            }
        }
        if let Err(error) = manifest.verify(&self.facts) {
            self.end(Err(RebuildError::Wrong(error)));
            return false;
        }
        self.report.entries = manifest.entries;
        self.report.volumes = names(&manifest);
        if !self.is_writing {
            self.end(Ok(()));
            return false;
        }
        let pool = Pool::new(Settings::default(), self.facts, manifest);
        self.pool = Some(pool);
        self.begin_write();
        true
    }

    /// Counts the references of pages. Those of a copy that is not that of the end may be to segments that have other data now.
    pub(super) fn count(&mut self, bytes: Option<&[u8]>) {
        self.parts.pop_front();
        let mut is_right = bytes.is_some();
        for page in bytes.unwrap_or_default().chunks_exact(BLOCK as usize) {
            let page = page.first_chunk().expect("a page");
            let entries = aryk_volume_index::entries_of(page).map(|(_, _, entries)| entries);
            is_right &= entries.is_ok();
            for Entry { value, .. } in entries.unwrap_or_default() {
                let Some((blob, units)) = value.reference() else { continue };
                *self.live.entry(blob).or_default() += i64::from(units);
                let unit = match value {
                    Value::Block { place, .. } | Value::Dense { place } => u32::from(place.unit),
                    Value::Zero => 0,
                };
                let segment = self.segments.get(blob.0 as usize);
                is_right &= segment.is_some_and(|segment| segment.life > 0 && unit + units <= segment.end);
            }
        }
        if !is_right {
            (self.manifest, self.live) = (None, BTreeMap::new());
            self.parts.clear();
            self.infer(false);
        }
    }
}
