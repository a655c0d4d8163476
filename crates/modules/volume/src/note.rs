//! What a pool stores in its manifest for this crate: lines `NAME=VALUE`. Any context.
//!
//! There are settings, the time of the latest complete scrub, and in the first part of a pool with several ones, the changes that
//! are being made.

use crate::{Error, ScrubSettings};
use aryk_bdev::Bytes;
use aryk_volume::{BLOCK, Settings, TimelineId};
use uuid::Uuid;

const CACHE_BYTES: &str = "cache_bytes";
const CLUSTER_BYTES: &str = "cluster_bytes";
const INTENT: &str = "intent";
const SCRUB_DAYS: &str = "scrub_days";
const SCRUB_BYTES: &str = "scrub_bytes_per_second";
const SCRUBBED: &str = "scrubbed";

/// A change of the volumes of a pool with several parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Intent {
    /// These volumes or snapshots are made in all parts, or in none.
    Make(Vec<Uuid>),
    /// These volumes or snapshots are deleted.
    Delete(Vec<Uuid>),
    /// A volume gets the content of a snapshot, in each part where it has the history that it had there before.
    Revert { volume: Uuid, snapshot: Uuid, before: Vec<TimelineId> },
    /// A volume gets the content of another volume, which ends.
    Adopt { volume: Uuid, from: Uuid },
    /// The properties of a volume become the same in all parts.
    Follow(Uuid),
}

impl Intent {
    /// The volumes and snapshots that it changes or needs.
    pub fn uuids(&self) -> Vec<Uuid> {
        match self {
            Self::Make(uuids) | Self::Delete(uuids) => uuids.clone(),
            Self::Revert { volume, snapshot, .. } => vec![*volume, *snapshot],
            Self::Adopt { volume, from } => vec![*volume, *from],
            Self::Follow(volume) => vec![*volume],
        }
    }

    /// The volume whose content differs between parts until the change is finished.
    pub const fn mixed(&self) -> Option<Uuid> {
        match self {
            Self::Revert { volume, .. } | Self::Adopt { volume, .. } => Some(*volume),
            Self::Make(_) | Self::Delete(_) | Self::Follow(_) => None,
        }
    }

    /// What must be deleted instead, if a volume that it changes is deleted before it is finished. `None` if it is about others,
    /// too.
    pub fn replaced_by_deletion_of(&self, deleted: Uuid) -> Option<Vec<Uuid>> {
        match self {
            Self::Revert { volume, .. } | Self::Follow(volume) if *volume == deleted => Some(vec![deleted]),
            Self::Adopt { volume, from } if *volume == deleted => Some(vec![deleted, *from]),
            _ => None,
        }
    }

    fn to_text(&self) -> String {
        let words = |words: &[Uuid]| words.iter().map(|uuid| format!(" {uuid}")).collect::<String>();
        match self {
            Self::Make(uuids) => "make".to_owned() + &words(uuids),
            Self::Delete(uuids) => "delete".to_owned() + &words(uuids),
            Self::Revert { volume, snapshot, before } => {
                let before: String = before.iter().map(|timeline| format!(" {}", timeline.0)).collect();
                format!("revert {volume} {snapshot}{before}")
            }
            Self::Adopt { volume, from } => format!("adopt {volume} {from}"),
            Self::Follow(uuid) => format!("follow {uuid}"),
        }
    }

    fn from_text(text: &str) -> Option<Self> {
        let uuid = |word: &str| Uuid::parse_str(word).ok();
        let uuids = |words: &[&str]| words.iter().map(|word| uuid(word)).collect::<Option<Vec<_>>>();
        let timeline = |word: &&str| word.parse().ok().map(TimelineId);
        let words: Vec<&str> = text.split(' ').collect();
        Some(match words[..] {
            ["make", ref made @ ..] if !made.is_empty() => Self::Make(uuids(made)?),
            ["delete", ref deleted @ ..] if !deleted.is_empty() => Self::Delete(uuids(deleted)?),
            ["revert", volume, snapshot, ref before @ ..] => Self::Revert {
                volume: uuid(volume)?,
                snapshot: uuid(snapshot)?,
                before: before.iter().map(timeline).collect::<Option<_>>()?,
            },
            ["adopt", volume, from] => Self::Adopt { volume: uuid(volume)?, from: uuid(from)? },
            ["follow", volume] => Self::Follow(uuid(volume)?),
            _ => return None,
        })
    }
}

/// A note with other intents.
pub(crate) fn with_intents(note: &[u8], intents: &[Intent]) -> Vec<u8> {
    let note = String::from_utf8_lossy(note);
    let is_intent = |line: &&str| line.split_once('=').is_some_and(|(name, _)| name == INTENT);
    let settings = note.lines().filter(|line| !is_intent(line)).map(|line| format!("{line}\n"));
    let intents = intents.iter().map(|intent| format!("{INTENT}={}\n", intent.to_text()));
    settings.chain(intents).collect::<String>().into_bytes()
}

/// A note with other settings of the scrub, and another time at which the latest complete pass began, in seconds since 1970.
pub(crate) fn with_scrub(note: &[u8], settings: &ScrubSettings, since: Option<u64>) -> Vec<u8> {
    let note = String::from_utf8_lossy(note);
    let is_of_scrub = |line: &&str| {
        line.split_once('=').is_some_and(|(name, _)| [SCRUB_DAYS, SCRUB_BYTES, SCRUBBED].contains(&name))
    };
    let others = note.lines().filter(|line| !is_of_scrub(line)).map(|line| format!("{line}\n"));
    let of_scrub = [
        Some((SCRUB_DAYS, u64::from(settings.days))),
        Some((SCRUB_BYTES, settings.bytes_per_second)),
        since.map(|since| (SCRUBBED, since)),
    ];
    let of_scrub = of_scrub.into_iter().flatten().map(|(name, value)| format!("{name}={value}\n"));
    others.chain(of_scrub).collect::<String>().into_bytes()
}

/// The settings of the scrub of a note, and the time at which the latest complete pass began. What the scrub cannot have is
/// ignored.
pub(crate) fn scrub(note: &[u8]) -> (ScrubSettings, Option<u64>) {
    let (mut settings, mut since) = (ScrubSettings::default(), None);
    for (name, value) in String::from_utf8_lossy(note).lines().filter_map(|line| line.split_once('=')) {
        let Ok(value) = value.parse::<u64>() else { continue };
        let mut changed = settings;
        match name {
            SCRUB_DAYS => changed.days = value.try_into().unwrap_or(u32::MAX),
            SCRUB_BYTES => changed.bytes_per_second = value,
            SCRUBBED => since = Some(value),
            _ => {}
        }
        if changed.is_valid() {
            settings = changed;
        }
    }
    (settings, since)
}

/// The intents of a note.
///
/// # Errors
/// [`Error::Intent`]: this version does not know one.
pub(crate) fn intents(note: &[u8]) -> Result<Vec<Intent>, Error> {
    let note = String::from_utf8_lossy(note);
    let lines = note.lines().filter_map(|line| line.split_once('='));
    let texts = lines.filter(|(name, _)| *name == INTENT).map(|(_, text)| text);
    texts.map(|text| Intent::from_text(text).ok_or_else(|| Error::Intent(text.to_owned()))).collect()
}

/// Bytes of a cache. A pool that somebody else has made must not exhaust the memory.
const CACHE_MIN: usize = 1 << 20;
const CACHE_MAX: usize = 1 << 40;

/// Bytes of a cluster, if the pool was created without another choice.
pub(crate) const USUAL_CLUSTER: Bytes = Bytes(4 << 20);

/// Whether clusters can have this size: a multiple of a block of the index that fits into 32 bits, as in SPDK.
pub(crate) const fn is_cluster(size: Bytes) -> bool {
    size.0 > 0 && size.0.is_multiple_of(BLOCK as u64) && size.0 <= u32::MAX as u64
}

/// The note that stores these settings, and the size of clusters.
pub(crate) fn of(settings: &Settings, cluster: Bytes) -> Vec<u8> {
    format!("{CACHE_BYTES}={}\n{CLUSTER_BYTES}={}\n", settings.cache_bytes, cluster.0).into_bytes()
}

/// The size of clusters. A size that clusters cannot have is ignored.
pub(crate) fn cluster(note: &[u8]) -> Bytes {
    let note = String::from_utf8_lossy(note);
    let values = note.lines().filter_map(|line| line.split_once('='));
    let sizes = values.filter(|(name, _)| *name == CLUSTER_BYTES).filter_map(|(_, value)| value.parse().ok());
    sizes.map(Bytes).rfind(|size| is_cluster(*size)).unwrap_or(USUAL_CLUSTER)
}

/// The settings of a note; those that it does not have are taken from `usual`. A setting of a newer version is ignored.
pub(crate) fn settings(note: &[u8], usual: Settings) -> Settings {
    let mut settings = usual;
    for line in String::from_utf8_lossy(note).lines() {
        if let Some((CACHE_BYTES, value)) = line.split_once('=')
            && let Ok(bytes) = value.parse::<usize>()
        {
            settings.cache_bytes = bytes.clamp(CACHE_MIN, CACHE_MAX);
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intents_come_back_and_leave_settings_alone() {
        let [a, b] = [Uuid::from_u128(7), Uuid::from_u128(8)];
        let all = [
            Intent::Make(vec![a, b]),
            Intent::Delete(vec![a]),
            Intent::Revert { volume: a, snapshot: b, before: vec![TimelineId(3), TimelineId(0)] },
            Intent::Adopt { volume: a, from: b },
            Intent::Follow(b),
        ];
        let large = Settings { cache_bytes: 1 << 30, ..Settings::default() };
        let mut note = of(&large, Bytes(8192));
        for count in 0..=all.len() {
            note = with_intents(&note, &all[..count]);
            assert_eq!(intents(&note), Ok(all[..count].to_vec()));
            assert_eq!((settings(&note, Settings::default()), cluster(&note)), (large, Bytes(8192)));
        }
        assert_eq!(with_intents(&note, &[]), of(&large, Bytes(8192)));
        for unknown in ["move x", "delete", "", "revert 1", "make x"] {
            assert!(intents(format!("intent={unknown}\n").as_bytes()).is_err(), "{unknown}");
        }
    }

    #[test]
    fn the_scrub_comes_back_and_leaves_the_rest_alone() {
        let usual = ScrubSettings::default();
        let note =
            with_intents(&of(&Settings::default(), USUAL_CLUSTER), &[Intent::Follow(Uuid::from_u128(7))]);
        assert_eq!(scrub(&note), (usual, None));
        let rare = ScrubSettings { days: 0, bytes_per_second: 1 << 20 };
        let with = with_scrub(&with_scrub(&note, &usual, Some(3)), &rare, Some(5));
        assert_eq!(scrub(&with), (rare, Some(5)));
        assert_eq!(intents(&with), intents(&note));
        assert_eq!(scrub(&with_intents(&with, &[])), (rare, Some(5)));
        assert!(with.starts_with(&note));
        for wrong in ["scrub_days=4000", "scrub_days=-1", "scrub_bytes_per_second=1", "scrubbed=never"] {
            assert_eq!(scrub(wrong.as_bytes()), (usual, None), "{wrong}");
        }
    }

    #[test]
    fn settings_come_back_and_what_is_unknown_is_ignored() {
        let usual = Settings::default();
        let large = Settings { cache_bytes: 1 << 30, ..usual };
        assert_eq!(settings(&of(&large, USUAL_CLUSTER), usual), large);
        assert_eq!(settings(b"", large), large);
        assert_eq!(
            settings(b"cache_bytes=many\nnew=1\n\xff\ncache_bytes=2097152", large).cache_bytes,
            2 << 20
        );
    }

    #[test]
    fn a_size_that_clusters_cannot_have_is_ignored() {
        for note in
            ["", "cluster_bytes=0", "cluster_bytes=4095", "cluster_bytes=4294967296", "cluster_bytes=-4096"]
        {
            assert_eq!(cluster(note.as_bytes()), USUAL_CLUSTER, "{note}");
        }
        assert_eq!(cluster(b"cluster_bytes=4294963200\ncluster_bytes=1\n"), Bytes(0xffff_f000));
    }
}
