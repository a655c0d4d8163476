//! The index, made anew of frames' headers and of runs that are there, and its way to segments of the store. Any context.

use super::*;

/// How sure it is that a frame of the log is of the pool's history.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trust {
    Full,
    Doubt,
    /// A crash has cut it off.
    None,
}

impl Rebuild {
    /// Begins to make the index.
    pub(super) fn begin_index(&mut self, manifest: Manifest) {
        self.report.volumes = names(&manifest);
        self.doubt_zeroes(&manifest);
        for number in 0..self.segments.len() {
            for (from, to) in std::mem::take(&mut self.segments[number].holes) {
                let (from, to) = (u64::from(from) * u64::from(UNIT), u64::from(to) * u64::from(UNIT));
                let what = format!(
                    "segment {number} has no header that can be read from byte {from} to byte {to}: writes may be lost, and any volume may have older data instead"
                );
                self.add_damage(None, 0, 0, &what);
            }
        }
        let real = self.facts.blobs;
        let others = (real / OTHERS_SHARE + OTHERS_MIN).min(u32::MAX - 1 - real);
        let facts = StoreFacts { blobs: real + others, ..self.facts };
        let mut pool = Pool::new(Settings::default(), facts, manifest);
        (pool.jobs.is_rebuilding, pool.jobs.keeps_zeroes) = (true, true);
        // Blobs that the store does not have are not to be written again when it is their turn to go.
        pool.keeper.discards_all = true;
        pool.forget_all_own();
        (0..real).for_each(|blob| pool.keeper.hold(BlobId(blob), u64::MAX));
        self.pool = Some(pool);
        self.insert_bad();
        self.phase = Phase::Insert;
    }

    /// Says where data may be older than zeroes that were written: in partitions whose runs are not all there.
    fn doubt_zeroes(&mut self, manifest: &Manifest) {
        let what = "blocks that were discarded, or written as zeroes, may have older data";
        let is_all = self.known.iter().all(Option::is_none);
        for (id, volume) in &manifest.volumes {
            let blocks = volume.units.div_ceil(u64::from(BLOCK_UNITS));
            let shift = manifest.timelines.get(&volume.timeline).map_or(0, |timeline| timeline.shift);
            let of =
                |stripe: &u64| self.known[crate::ids::partition_of(shift, stripe * STRIPE_BLOCKS)].is_none();
            let stripes = blocks.div_ceil(STRIPE_BLOCKS);
            if is_all || stripes > STRIPES_MAX {
                self.add_damage(Some(*id), 0, blocks, what);
                continue;
            }
            let doubtful: Vec<_> = (0..stripes).filter(of).collect();
            for stripe in doubtful {
                let first = stripe * STRIPE_BLOCKS;
                self.add_damage(Some(*id), first, STRIPE_BLOCKS.min(blocks - first), what);
            }
        }
    }

    /// Whether the runs that are used say all of a commit.
    fn is_known(&self, record: &Record) -> bool {
        self.known[usize::from(record.partition)].is_some_and(|flushed| record.commit.get() <= flushed)
    }

    /// Entries of blocks whose data is damaged come first: if there is another copy of the data, its entry replaces them. A read
    /// of the others fails, and shows nothing older.
    fn insert_bad(&mut self) {
        let bad: Vec<_> = self.bad.iter().map(|(place, bad)| (*place, *bad)).collect();
        for ((blob, unit), bad) in bad {
            if self.segments[blob.0 as usize].life != bad.life || self.is_known(&bad.record) {
                continue;
            }
            let pool = self.pool.as_mut().expect("it was made");
            let volume = pool.shown_by(bad.record.timeline);
            let known = self.sequences.get(&((bad.life >> 32) as u32));
            // An incomplete write at the end of the log, or one that the cleaner had not completed.
            let is_durable =
                bad.sequence.is_some_and(|sequence| known.is_some_and(|known| sequence < known.durable));
            // Of what was moved incompletely, the place from which it was moved is there, too.
            if (is_durable || bad.sequence.is_none()) && bad.record.kind == Kind::Data {
                let record = Record { block: bad.block, blocks: 1, ..bad.record };
                let place = Place { blob, unit: unit as u16 };
                if !pool.is_strange(&record) {
                    pool.insert(&record, place, |_| (place, bad.crc));
                }
            }
            let what = match (is_durable, bad.record.kind) {
                (true, _) | (_, Kind::Dense) => "data does not match its checksum",
                _ if bad.sequence.is_none() => continue,
                _ => "an incomplete write was left out: the data is that of an earlier one",
            };
            if volume.is_some() {
                self.add_damage(volume, bad.block, 1, what);
            }
        }
    }

    pub(super) fn step_insert(&mut self) -> bool {
        for _ in 0..STEPS_PER_TURN {
            let pool = self.pool.as_ref().expect("the index is being made");
            if self.is_reading || pool.jobs.fresh_entries > 2 * pool.settings.flush_entries {
                break;
            }
            if self.at == self.facts.blobs && std::mem::take(&mut self.is_at_index) {
                self.at = 0;
            }
            if self.at == self.facts.blobs {
                self.phase = Phase::Settle;
                let pool = self.pool.as_mut().expect("the index is being made");
                pool.jobs.is_flush_wanted = true;
                return true;
            }
            let blob = BlobId(self.at);
            if self.segments[self.at as usize].is_index != self.is_at_index {
                self.next_segment();
                continue;
            }
            match self.walk.next(&self.uuid, &self.facts, false) {
                Next::Read { unit, len } => self.read(blob, unit, len),
                Next::Frame { unit } => self.insert_frame(blob, unit),
                Next::Page { run, number, entries, .. } => self.insert_page(run, number, &entries),
                Next::End => self.next_segment(),
            }
        }
        let pool = self.pool.as_ref().expect("the index is being made");
        let is_full = pool.jobs.fresh_entries > 2 * pool.settings.flush_entries;
        self.step_pool() || !(self.is_reading || is_full)
    }

    /// Lets flushes and merges go on.
    fn step_pool(&mut self) -> bool {
        let Some(pool) = &mut self.pool else { return false };
        let has_work = pool.step_jobs(false);
        pool.keeper.collect();
        pool.hand_out_edits() | has_work
    }

    fn insert_frame(&mut self, blob: BlobId, unit: u32) {
        let frame = Frame::parse(self.walk.frame()).expect("the walk has verified it");
        let head = frame.head();
        if head.life != self.segments[blob.0 as usize].life {
            self.walk.look_inside(&self.facts);
            return;
        }
        let units = frame.units();
        let trust = self.trust(&head);
        let mut doubtful = Vec::new();
        if trust != Trust::None {
            let pool = self.pool.as_mut().expect("the index is being made");
            let data = unit + frame.header_units();
            for record in frame.records() {
                let known = self.known[usize::from(record.partition)];
                if pool.is_strange(&record)
                    || record.commit == Commit::MAX
                    || known.is_some_and(|flushed| record.commit.get() <= flushed)
                {
                    continue;
                }
                let partition = &mut pool.partitions[usize::from(record.partition)];
                partition.next = partition.next.max(record.commit.get() + 1);
                partition.readable = partition.next - 1;
                if trust == Trust::Doubt {
                    doubtful.push(record);
                }
                let place = |number: u32| Place { blob, unit: (data + number * BLOCK_UNITS) as u16 };
                let is_bad =
                    |at: u32| self.bad.contains_key(&(blob, data + (record.data + at) * BLOCK_UNITS));
                let frame_place = Place { blob, unit: unit as u16 };
                let block = |at: u32| (place(record.data + at), frame.checksum(record.data + at));
                if record.kind != Kind::Data || !(0..record.blocks).any(is_bad) {
                    pool.insert(&record, frame_place, block);
                    continue;
                }
                for at in (0..record.blocks).filter(|at| !is_bad(*at)) {
                    let one = Record { block: record.block + u64::from(at), blocks: 1, ..record };
                    pool.insert(&one, frame_place, |_| block(at));
                }
            }
        }
        self.walk.skip(units);
        for record in doubtful {
            let volume = self.pool.as_ref().and_then(|pool| pool.shown_by(record.timeline));
            let what = "it is not known whether a write had been lost in a crash before; it is there now";
            if volume.is_some() {
                self.add_damage(volume, record.block, u64::from(record.blocks), what);
            }
        }
    }

    /// Whether a frame is surely of the pool's history. What a crash has cut off the log stays on the disk behind its end.
    fn trust(&self, head: &Head) -> Trust {
        let opening = (head.life >> 32) as u32;
        let known = self.sequences.get(&opening).filter(|_| head.stream != NO_STREAM);
        let Some(known) = known else { return Trust::Full };
        if head.sequence < known.durable {
            return Trust::Full;
        }
        let later = self.sequences.range(opening.saturating_add(1)..);
        match later.map(|(_, later)| later.first()).min() {
            None if known.has_all(known.durable, head.sequence) => Trust::Full,
            Some(first) if first <= head.sequence => Trust::None,
            _ => Trust::Doubt,
        }
    }

    /// Entries of a run of the copy, and zeroes of an old one: frames that said so may be gone.
    fn insert_page(&mut self, run: RunId, number: u32, entries: &[Entry]) {
        let is_next = match self.page {
            None => number == 0,
            Some((last, page)) => (run == last && number == page + 1) || (run > last && number == 0),
        };
        let is_used = self.used.contains(&run);
        if is_next {
            self.page = Some((run, number));
        }
        if !is_next && !is_used {
            return;
        }
        let real = self.facts.blobs;
        let is_there = |value: &Value| {
            let (Value::Block { place, .. } | Value::Dense { place }) = value else { return true };
            let units = value.reference().map_or(0, |(_, units)| units);
            place.blob.0 < real && u32::from(place.unit) + units <= self.facts.blob_units
        };
        let pool = self.pool.as_mut().expect("the index is being made");
        for Entry { key, value } in entries.iter().filter(|entry| is_used || entry.value == Value::Zero) {
            let Some(history) = pool.histories.get(key.timeline()) else { continue };
            let block = u64::from(key.range()) * u64::from(RANGE_BLOCKS);
            let number = crate::ids::partition_of(history.shift, block);
            // What a run says that is not of the end is known from those that are.
            if !is_there(value)
                || (!is_used && self.known[number].is_some_and(|flushed| key.commit().get() <= flushed))
            {
                continue;
            }
            let kept = history.kept[number];
            let partition = &mut pool.partitions[number];
            partition.next = partition.next.max(key.commit().get() + 1);
            partition.readable = partition.next - 1;
            partition.index.insert(*key, *value, kept);
            pool.jobs.fresh_entries += 1;
        }
    }

    /// Whether all entries are in runs, no job goes on, and nothing waits for an answer.
    fn is_settled(&self) -> bool {
        self.pool.as_ref().is_some_and(|pool| {
            pool.jobs.is_idle()
                && pool.jobs.fresh_entries == 0
                && pool.out.in_flight() == 0
                && pool.keeper.is_idle()
                && !pool.keeper.has_going()
        })
    }

    /// Lets flushes and merges come to an end. Returns whether there is more to do without input.
    fn settle(&mut self) -> bool {
        let pool = self.pool.as_mut().expect("the index is being made");
        pool.jobs.is_flush_wanted |= pool.jobs.fresh_entries > 0 && pool.jobs.is_idle();
        self.step_pool() | self.take_ops() || self.is_settled()
    }

    pub(super) fn step_settle(&mut self) -> bool {
        if !self.is_settled() {
            return self.settle();
        }
        let pool = self.pool.as_mut().expect("the index is being made");
        if !std::mem::replace(&mut self.has_merged, true) {
            pool.jobs.keeps_zeroes = false;
            pool.jobs.stale = [true; PARTITIONS];
            return true;
        }
        self.report.entries = pool.keeper.manifest.entries;
        if !self.is_writing {
            self.end(Ok(()));
            return false;
        }
        self.begin_place()
    }

    /// Frees segments for the index: those that are blank first. What says that blocks are zeroes, or what was last in the log,
    /// another rebuild would need.
    fn begin_place(&mut self) -> bool {
        let opening = self.opening();
        let pool = self.pool.as_mut().expect("the index was made");
        let units = pool.keeper.manifest.blobs.index_live().max(0) as usize;
        let needed = units.div_ceil(self.facts.blob_units as usize) + SPARE_SEGMENTS;
        let is_dead = |id: BlobId| pool.keeper.manifest.blobs.get(id).is_some_and(|blob| blob.live == 0);
        let is_blank = |segment: &Segment| segment.life == 0 && !segment.is_index;
        let is_needed = |segment: &Segment| {
            segment.is_index
                || segment.has_zeroes
                || (segment.is_log && segment.life >> 32 == u64::from(opening))
        };
        let all = || (0..).map(BlobId).zip(&self.segments).filter(|(id, _)| is_dead(*id));
        let blank = all().filter(|(_, segment)| is_blank(segment));
        let others = all().filter(|(_, segment)| !is_blank(segment) && !is_needed(segment));
        let free: Vec<_> = blank.chain(others).map(|(id, _)| id).take(needed).collect();
        if free.len() < needed {
            self.end(Err(RebuildError::NoSpace(needed)));
            return false;
        }
        pool.leave_writers();
        free.into_iter().for_each(|id| pool.keeper.free_at_once(id));
        pool.jobs.stale = [true; PARTITIONS];
        self.phase = Phase::Place;
        true
    }

    pub(super) fn step_place(&mut self) -> bool {
        if !self.is_settled() {
            return self.settle();
        }
        let pool = self.pool.as_mut().expect("the index was made");
        pool.leave_writers();
        pool.keeper.collect();
        if pool.keeper.has_going() {
            return true;
        }
        let real = BlobId(self.facts.blobs);
        if pool.keeper.manifest.blobs.from(real).next().is_some() {
            let units = pool.keeper.manifest.blobs.index_live().max(0) as usize;
            let needed = units.div_ceil(self.facts.blob_units as usize) + 2 * SPARE_SEGMENTS;
            self.end(Err(RebuildError::NoSpace(needed)));
            return false;
        }
        let sequence = self.sequences.values().map(Sequences::end).max().unwrap_or(0);
        let sequence = sequence.max(pool.keeper.manifest.log.sequence);
        pool.keeper.edit(Edit::Log(LogTail { sequence, unit: 0, blobs: Vec::new() }));
        self.begin_write();
        true
    }

    /// Hands out the checkpoint.
    pub(super) fn begin_write(&mut self) {
        let pool = self.pool.as_mut().expect("the manifest is there");
        let opening = pool.keeper.manifest.opening;
        pool.keeper.edit(Edit::Opened { opening });
        pool.keeper.commit(crate::keeper::Then::Nothing);
        pool.keeper.request_checkpoint();
        self.phase = Phase::Write;
    }

    pub(super) fn step_write(&mut self) -> bool {
        let pool = self.pool.as_mut().expect("the manifest is there");
        let has_more = pool.hand_out_edits();
        if !has_more && pool.out.in_flight() == 0 && pool.keeper.is_idle() {
            self.end(Ok(()));
        }
        has_more
    }
}
