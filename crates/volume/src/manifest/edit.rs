//! Edits of the manifest, and their bytes. Any context.
//!
//! The bytes of a checkpoint and of an edit have the same form: magic `AVM1`, version (2), kind (1: checkpoint or edit), UUID of
//! the pool (16), alignment and units of a blob (4 each), then edits: each a byte that says which, and its fields; at the end
//! CRC32C (4) of all before. Numbers have variable length (`codec.rs`). `checkpoint.rs` encodes checkpoints, `recover.rs` makes
//! the manifest again.

use super::{Base, Blob, BlobKind, LogTail, Manifest, Timeline, commit, following};
use crate::codec::{Reader, Writer};
use crate::{Cut, Foreign, Label, OpenError, PARTITIONS, StoreFacts, Volume, VolumeId, WhenFull, checksum};
use aryk_volume_index::{BlobId, Commit, Key, Place, Run, RunId, RunShape, TimelineId};
use std::collections::BTreeMap;

const MAGIC: [u8; 4] = *b"AVM1";
const VERSION: u16 = 1;
/// The version of edits that are continued.
const VERSION_CONTINUED: u16 = 2;
/// The version of what has thick volumes: as [`VERSION_CONTINUED`], with more kinds of edits.
const VERSION_THICK: u16 = 3;
const VERSION_AT: usize = 4;
const HEAD: usize = 4 + 2 + 1 + 16 + 4 + 4;

/// A change of the manifest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Edit {
    /// The pool is open, for the `opening`th time.
    Opened { opening: u32 },
    /// The next identifiers are at least these.
    Counters { next_timeline: u32, next_volume: u32 },
    /// A timeline begins, or has another base.
    Timeline { id: TimelineId, timeline: Timeline },
    /// A timeline ends.
    TimelineGone { id: TimelineId },
    /// A volume or snapshot begins, or changes.
    Volume { id: VolumeId, volume: Volume },
    /// A volume or snapshot ends.
    VolumeGone { id: VolumeId },
    /// Writes up to `flushed` are in the levels of the partition, of which `runs` is the newest (if there are any).
    Flushed { partition: u8, flushed: u64, runs: Vec<Run> },
    /// `count` levels from `first` on are replaced by one.
    Merged { partition: u8, first: u32, count: u32, runs: Vec<Run> },
    /// A blob begins.
    Blob { id: BlobId, blob: Blob },
    /// Levels refer to more or fewer units of a blob.
    Live { id: BlobId, change: i64 },
    /// A blob ends.
    BlobGone { id: BlobId },
    /// The tail of the log.
    Log(LogTail),
    /// What the caller stores about the pool.
    Note(Vec<u8>),
    /// The units that the live view of a timeline has for itself are counted from now on, or no longer.
    Counted { id: TimelineId, counting: Counting },
    /// The counted units of a timeline in a partition; `None` if they are not known.
    Own { id: TimelineId, partition: u8, units: Option<u64> },
    /// The last of its record: the edits take effect together with those of the next record.
    Continued,
}

/// How the units of a timeline are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Counting {
    /// Not at all.
    No = 0,
    /// What was written before is not known.
    Unknown = 1,
    /// Nothing was written before.
    Zero = 2,
}

/// What bytes of the manifest are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Content {
    /// Changes since what was before.
    Edits = 0,
    /// All of the manifest.
    Checkpoint = 1,
    /// All but the blobs.
    Copy = 2,
}

/// Writes what is before the edits of a checkpoint or of a part of the journal.
pub(super) fn seal_head(writer: &mut Writer, manifest: &Manifest, content: Content, is_thick: bool) {
    writer.raw(&MAGIC);
    writer.raw(&(if is_thick { VERSION_THICK } else { VERSION }).to_le_bytes());
    writer.raw(&[content as u8]);
    writer.raw(&manifest.uuid);
    writer.raw(&manifest.alignment.to_le_bytes());
    writer.raw(&manifest.blob_units.to_le_bytes());
}

/// The bytes of some edits, at least one and at most about `budget` bytes, and how many these are. If there are more edits, the
/// bytes say that they follow. Their version is the oldest in which they can be said.
pub(crate) fn encode<'a>(
    manifest: &Manifest,
    budget: usize,
    edits: impl IntoIterator<Item = &'a Edit>,
) -> (Vec<u8>, usize) {
    let mut writer = Writer::default();
    seal_head(&mut writer, manifest, Content::Edits, false);
    let mut edits = edits.into_iter().peekable();
    let (mut count, mut version) = (0, VERSION);
    while let Some(edit) = edits.next_if(|_| count == 0 || writer.bytes.len() < budget) {
        edit.write(&mut writer);
        count += 1;
        if edit.is_about_thick() {
            version = VERSION_THICK;
        }
    }
    if edits.peek().is_some() {
        version = version.max(VERSION_CONTINUED);
        Edit::Continued.write(&mut writer);
    }
    writer.bytes[VERSION_AT..][..2].copy_from_slice(&version.to_le_bytes());
    let crc = checksum::of(&writer.bytes);
    writer.raw(&crc.to_le_bytes());
    (writer.bytes, count)
}

/// The bytes of the edits, after the checks that need no manifest, and whether they may be continued.
pub(crate) fn open<'a>(
    bytes: &'a [u8],
    content: Content,
    uuid: [u8; 16],
    facts: &StoreFacts,
) -> Result<(&'a [u8], bool), OpenError> {
    if bytes.len() < HEAD + 4 || bytes[..4] != MAGIC {
        return Err(OpenError::Damaged("there is no manifest"));
    }
    let version = u16::from_le_bytes([bytes[4], bytes[5]]);
    if !matches!(version, VERSION | VERSION_CONTINUED | VERSION_THICK) {
        return Err(OpenError::Version(version));
    }
    let (body, crc) = bytes.split_at(bytes.len() - 4);
    if checksum::of(body).to_le_bytes() != crc {
        return Err(OpenError::Damaged("the checksum is wrong"));
    }
    if body[6] != content as u8 {
        return Err(OpenError::Damaged("an edit is not where it belongs"));
    }
    if body[7..23] != uuid {
        return Err(OpenError::Foreign);
    }
    if body[23..27] != facts.alignment.to_le_bytes() || body[27..31] != facts.blob_units.to_le_bytes() {
        return Err(OpenError::Geometry);
    }
    Ok((&body[HEAD..], version != VERSION && content == Content::Edits))
}

/// Takes up to `count` edits from the front of bytes that [`open`] returned.
pub(crate) fn take(body: &mut &[u8], count: usize, is_continued: bool) -> Result<Vec<Edit>, OpenError> {
    let mut reader = Reader::new(body);
    let mut edits = Vec::new();
    while !reader.is_empty() && edits.len() < count {
        edits.push(Edit::read(&mut reader)?);
    }
    *body = reader.rest();
    match edits.iter().position(|edit| *edit == Edit::Continued) {
        Some(at) if !is_continued || at + 1 < edits.len() || !body.is_empty() => {
            Err(OpenError::Damaged("an edit is continued within a record"))
        }
        _ => Ok(edits),
    }
}

impl Manifest {
    /// Whether all references of the manifest have a target.
    pub(crate) fn verify(&self, facts: &StoreFacts) -> Result<(), OpenError> {
        if let Some(id) = self.blobs.iter().map(|(id, _)| id).find(|id| id.0 >= facts.blobs) {
            return Err(OpenError::Shorter(id.0));
        }
        if self.names.len() != self.volumes.len() {
            return Err(OpenError::Damaged("two volumes have one name"));
        }
        let exists = |id| self.timelines.contains_key(id);
        if !self.volumes.values().all(|volume| exists(&volume.timeline)) {
            return Err(OpenError::Damaged("a volume has no timeline"));
        }
        for (id, timeline) in &self.timelines {
            // A base is older than what depends on it, so there is no loop.
            if let Some(Base::View { timeline: base, .. }) = &timeline.base
                && (!exists(base) || base >= id)
            {
                return Err(OpenError::Damaged("a timeline has no base"));
            }
        }
        let is_log = |id: &BlobId| self.blobs.get(*id).is_some_and(|blob| blob.kind == BlobKind::Log);
        if !self.log.blobs.iter().all(is_log) || self.log.unit > facts.blob_units {
            return Err(OpenError::Damaged("the log has no blob"));
        }
        if self.blobs.iter().any(|(_, blob)| blob.live < 0 || blob.live > i64::from(facts.blob_units)) {
            return Err(OpenError::Damaged("levels refer to more of a blob than there is"));
        }
        let mut of_runs = BTreeMap::<BlobId, i64>::new();
        for run in self.partitions.iter().flat_map(|partition| partition.levels.iter().flatten()) {
            *of_runs.entry(run.place.blob).or_default() += super::run_units(run);
            if i64::from(run.place.unit) + super::run_units(run) > i64::from(facts.blob_units) {
                return Err(OpenError::Damaged("a run reaches beyond its blob"));
            }
        }
        if !self.blobs.of_index().all(|(id, blob)| of_runs.remove(&id).unwrap_or(0) == blob.live) {
            return Err(OpenError::Damaged(
                "levels refer to more or less of an index blob than its runs have",
            ));
        }
        if !of_runs.is_empty() {
            return Err(OpenError::Damaged("a run is in a blob of another kind"));
        }
        Ok(())
    }
}

impl Edit {
    pub(super) fn write(&self, to: &mut Writer) {
        match self {
            Self::Opened { opening } => to.ints(1, &[u64::from(*opening)]),
            Self::Counters { next_timeline, next_volume } => {
                to.ints(2, &[u64::from(*next_timeline), u64::from(*next_volume)]);
            }
            Self::Timeline { id, timeline } => {
                to.ints(3, &[u64::from(id.0), u64::from(timeline.shift)]);
                write_base(to, timeline.base.as_ref());
            }
            Self::TimelineGone { id } => to.ints(4, &[u64::from(id.0)]),
            Self::Volume { id, volume } => {
                to.ints(if volume.is_thick { 15 } else { 5 }, &[u64::from(id.0)]);
                write_volume(to, volume);
            }
            Self::VolumeGone { id } => to.ints(6, &[u64::from(id.0)]),
            Self::Flushed { partition, flushed, runs } => {
                to.ints(7, &[u64::from(*partition), *flushed]);
                write_runs(to, runs);
            }
            Self::Merged { partition, first, count, runs } => {
                to.ints(8, &[u64::from(*partition), u64::from(*first), u64::from(*count)]);
                write_runs(to, runs);
            }
            Self::Blob { id, blob } => {
                to.ints(9, &[u64::from(id.0), blob.kind as u64, blob.life]);
                to.signed(blob.live);
            }
            Self::Live { id, change } => {
                to.ints(10, &[u64::from(id.0)]);
                to.signed(*change);
            }
            Self::BlobGone { id } => to.ints(11, &[u64::from(id.0)]),
            Self::Log(log) => {
                to.ints(12, &[log.sequence, u64::from(log.unit), log.blobs.len() as u64]);
                log.blobs.iter().for_each(|blob| to.int(u64::from(blob.0)));
            }
            Self::Note(note) => {
                to.ints(13, &[note.len() as u64]);
                to.raw(note);
            }
            Self::Continued => to.int(14),
            Self::Counted { id, counting } => to.ints(16, &[u64::from(id.0), *counting as u64]),
            Self::Own { id, partition, units } => {
                let units = units.map_or(0, |units| units + 1);
                to.ints(17, &[u64::from(id.0), u64::from(*partition), units]);
            }
        }
    }

    /// Whether software that does not know thick volumes cannot read it.
    pub(crate) const fn is_about_thick(&self) -> bool {
        match self {
            Self::Volume { volume, .. } => volume.is_thick,
            Self::Counted { .. } | Self::Own { .. } => true,
            _ => false,
        }
    }

    /// Begins [`Edit::Flushed`], whose runs follow.
    pub(super) fn begin_flushed(to: &mut Writer, partition: u8, flushed: u64, runs: usize) {
        to.ints(7, &[u64::from(partition), flushed, runs as u64]);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, OpenError> {
        Ok(match from.int()? {
            1 => {
                let opening = from.small()?;
                following(opening)?;
                Self::Opened { opening }
            }
            2 => Self::Counters { next_timeline: from.small()?, next_volume: from.small()? },
            3 => {
                let id = TimelineId(from.small()?);
                let shift = index(from, PARTITIONS)?;
                Self::Timeline { id, timeline: Timeline { shift, base: read_base(from)? } }
            }
            4 => Self::TimelineGone { id: TimelineId(from.small()?) },
            5 => Self::Volume { id: VolumeId(from.small()?), volume: read_volume(from)? },
            15 => {
                let id = VolumeId(from.small()?);
                let volume = Volume { is_thick: true, ..read_volume(from)? };
                if volume.cut.is_some() {
                    return Err(OpenError::Damaged("a snapshot is thick"));
                }
                Self::Volume { id, volume }
            }
            6 => Self::VolumeGone { id: VolumeId(from.small()?) },
            7 => {
                let partition = index(from, PARTITIONS)?;
                Self::Flushed { partition, flushed: commit(from.int()?)?.get(), runs: read_runs(from)? }
            }
            8 => {
                let partition = index(from, PARTITIONS)?;
                Self::Merged { partition, first: from.small()?, count: from.small()?, runs: read_runs(from)? }
            }
            9 => {
                let id = BlobId(from.small()?);
                let kind = match from.int()? {
                    0 => BlobKind::Log,
                    1 => BlobKind::Data,
                    2 => BlobKind::Index,
                    _ => return Err(OpenError::Damaged("a blob has no kind")),
                };
                Self::Blob { id, blob: Blob { kind, life: from.int()?, live: from.signed()? } }
            }
            10 => Self::Live { id: BlobId(from.small()?), change: from.signed()? },
            11 => Self::BlobGone { id: BlobId(from.small()?) },
            12 => {
                let (sequence, unit, count) = (commit(from.int()?)?.get(), from.small()?, from.count()?);
                let blobs = (0..count).map(|_| from.small().map(BlobId)).collect::<Result<_, _>>()?;
                Self::Log(LogTail { sequence, unit, blobs })
            }
            13 => {
                let len = from.small()?;
                Self::Note(from.raw(len)?.to_vec())
            }
            14 => Self::Continued,
            16 => Self::Counted { id: TimelineId(from.small()?), counting: read_counting(from)? },
            17 => {
                let id = TimelineId(from.small()?);
                Self::Own { id, partition: index(from, PARTITIONS)?, units: read_own(from)? }
            }
            _ => return Err(OpenError::Damaged("an edit is of no kind")),
        })
    }
}

impl Writer {
    fn ints(&mut self, kind: u64, values: &[u64]) {
        self.int(kind);
        values.iter().for_each(|value| self.int(*value));
    }
}

/// A number below `end`.
fn index(from: &mut Reader<'_>, end: usize) -> Result<u8, OpenError> {
    let value: u8 = from.small()?;
    if usize::from(value) < end { Ok(value) } else { Err(OpenError::Damaged("a partition does not exist")) }
}

fn read_counting(from: &mut Reader<'_>) -> Result<Counting, OpenError> {
    match from.int()? {
        0 => Ok(Counting::No),
        1 => Ok(Counting::Unknown),
        2 => Ok(Counting::Zero),
        _ => Err(OpenError::Damaged("a timeline is counted in no way")),
    }
}

fn read_own(from: &mut Reader<'_>) -> Result<Option<u64>, OpenError> {
    let units = from.int()?.checked_sub(1);
    // Versions that were replaced may count, too.
    if units.is_some_and(|units| units > crate::ids::VOLUME_UNITS_MAX) {
        return Err(OpenError::Damaged("a timeline has more units than a volume can have"));
    }
    Ok(units)
}

fn write_cut(to: &mut Writer, cut: &Cut) {
    cut.iter().for_each(|commit| to.int(commit.get()));
}

fn read_cut(from: &mut Reader<'_>) -> Result<Cut, OpenError> {
    let mut cut = [Commit::ZERO; PARTITIONS];
    for place in &mut cut {
        *place = commit(from.int()?)?;
    }
    Ok(cut)
}

fn write_base(to: &mut Writer, base: Option<&Base>) {
    match base {
        None => to.int(0),
        Some(Base::View { timeline, cut }) => {
            to.ints(1, &[u64::from(timeline.0)]);
            write_cut(to, cut);
        }
        Some(Base::Foreign(foreign)) => {
            to.ints(2, &[foreign.units]);
            to.text(&foreign.name);
        }
    }
}

fn read_base(from: &mut Reader<'_>) -> Result<Option<Base>, OpenError> {
    Ok(match from.int()? {
        0 => None,
        1 => Some(Base::View { timeline: TimelineId(from.small()?), cut: read_cut(from)? }),
        2 => {
            let units = from.int()?;
            Some(Base::Foreign(Foreign { name: from.text()?, units }))
        }
        _ => return Err(OpenError::Damaged("a base is of no kind")),
    })
}

fn write_volume(to: &mut Writer, volume: &Volume) {
    to.text(&volume.label.name);
    to.raw(&volume.label.uuid);
    to.int(volume.units);
    to.int(u64::from(volume.block_size));
    to.int(u64::from(volume.when_full == WhenFull::Fail));
    to.int(u64::from(volume.timeline.0));
    to.int(u64::from(volume.cut.is_some()));
    if let Some(cut) = &volume.cut {
        write_cut(to, cut);
    }
}

fn read_volume(from: &mut Reader<'_>) -> Result<Volume, OpenError> {
    let name = from.text()?;
    let uuid = from.raw(16)?.try_into().expect("16 bytes");
    let (units, block_size) = (from.int()?, from.small()?);
    if units > crate::ids::VOLUME_UNITS_MAX || !matches!(block_size, 512 | 4096) {
        return Err(OpenError::Damaged("a volume has a size that is not allowed"));
    }
    let when_full = if from.int()? == 0 { WhenFull::Wait } else { WhenFull::Fail };
    let timeline = TimelineId(from.small()?);
    let cut = if from.int()? == 0 { None } else { Some(read_cut(from)?) };
    Ok(Volume { label: Label { name, uuid }, units, block_size, when_full, is_thick: false, timeline, cut })
}

fn write_runs(to: &mut Writer, runs: &[Run]) {
    to.int(runs.len() as u64);
    runs.iter().for_each(|run| write_run(to, run));
}

pub(super) fn write_run(to: &mut Writer, Run { id, place, shape }: &Run) {
    to.int(id.0);
    to.int(u64::from(place.blob.0));
    to.int(u64::from(place.unit));
    to.int(u64::from(shape.pages));
    to.int(u64::from(shape.leaves));
    to.int(shape.entries);
    to.int(shape.range_entries);
    to.raw(&shape.first.packed().to_le_bytes());
    to.raw(&shape.last.packed().to_le_bytes());
    to.int(shape.oldest.get());
    to.int(shape.newest.get());
}

fn read_runs(from: &mut Reader<'_>) -> Result<Vec<Run>, OpenError> {
    let key = |from: &mut Reader<'_>| {
        let packed = u128::from_le_bytes(from.raw(16)?.try_into().expect("16 bytes"));
        Key::from_packed(packed).ok_or(OpenError::Damaged("a key has no slot"))
    };
    (0..from.count()?)
        .map(|_| {
            let id = RunId(from.int()?);
            if id.0 == u64::MAX {
                return Err(OpenError::Damaged("an identifier is too large"));
            }
            let place = Place { blob: BlobId(from.small()?), unit: from.small()? };
            let (pages, leaves, entries, range_entries) =
                (from.small()?, from.small()?, from.int()?, from.int()?);
            if pages == 0 || leaves == 0 || leaves > pages {
                return Err(OpenError::Damaged("a run has no pages"));
            }
            // An entry takes at least a byte.
            if entries > u64::from(leaves) * aryk_volume_index::PAGE_BYTES as u64 || range_entries > entries {
                return Err(OpenError::Damaged("a run has more entries than fit"));
            }
            let (first, last) = (key(from)?, key(from)?);
            let (oldest, newest) = (commit(from.int()?)?, commit(from.int()?)?);
            Ok(Run {
                id,
                place,
                shape: RunShape { pages, leaves, entries, range_entries, first, last, oldest, newest },
            })
        })
        .collect()
}
