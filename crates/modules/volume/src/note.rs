//! What a pool stores in its manifest for this crate: lines `NAME=VALUE`. Any context.
//!
//! There are settings, and in the first part of a pool with several ones, the change that is being made.

use crate::Error;
use aryk_volume::Settings;
use uuid::Uuid;

const CACHE_BYTES: &str = "cache_bytes";
const INTENT: &str = "intent";

/// A change of the volumes of a pool with several parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Intent {
    /// These volumes or snapshots are made in all parts, or in none.
    Make(Vec<Uuid>),
    /// A volume or snapshot is deleted.
    Delete(Uuid),
    /// A volume gets the content of a snapshot.
    Revert { volume: Uuid, snapshot: Uuid },
    /// A volume gets the content of another volume, which ends.
    Adopt { volume: Uuid, from: Uuid },
    /// The properties of a volume become the same in all parts.
    Follow(Uuid),
}

impl Intent {
    fn to_text(&self) -> String {
        let (kind, uuids) = match self {
            Self::Make(uuids) => ("make", uuids.clone()),
            Self::Delete(uuid) => ("delete", vec![*uuid]),
            Self::Revert { volume, snapshot } => ("revert", vec![*volume, *snapshot]),
            Self::Adopt { volume, from } => ("adopt", vec![*volume, *from]),
            Self::Follow(uuid) => ("follow", vec![*uuid]),
        };
        let uuids: String = uuids.iter().map(|uuid| format!(" {uuid}")).collect();
        kind.to_owned() + &uuids
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let kind = words.next()?;
        let uuids: Vec<Uuid> = words.map(|word| Uuid::parse_str(word).ok()).collect::<Option<_>>()?;
        Some(match (kind, &uuids[..]) {
            ("make", [_, ..]) => Self::Make(uuids),
            ("delete", &[uuid]) => Self::Delete(uuid),
            ("revert", &[volume, snapshot]) => Self::Revert { volume, snapshot },
            ("adopt", &[volume, from]) => Self::Adopt { volume, from },
            ("follow", &[uuid]) => Self::Follow(uuid),
            _ => return None,
        })
    }
}

/// A note with another intent, or without one.
pub(crate) fn with_intent(note: &[u8], intent: Option<&Intent>) -> Vec<u8> {
    let note = String::from_utf8_lossy(note);
    let is_intent = |line: &&str| line.split_once('=').is_some_and(|(name, _)| name == INTENT);
    let mut new: String =
        note.lines().filter(|line| !is_intent(line)).map(|line| format!("{line}\n")).collect();
    if let Some(intent) = intent {
        new += &format!("{INTENT}={}\n", intent.to_text());
    }
    new.into_bytes()
}

/// The intent of a note.
///
/// # Errors
/// [`Error::Intent`]: this version does not know it.
pub(crate) fn intent(note: &[u8]) -> Result<Option<Intent>, Error> {
    let note = String::from_utf8_lossy(note);
    let text = note.lines().filter_map(|line| line.split_once('=')).find(|(name, _)| *name == INTENT);
    text.map(|(_, text)| Intent::from_text(text).ok_or_else(|| Error::Intent(text.to_owned()))).transpose()
}

/// Bytes of a cache. A pool that somebody else has made must not exhaust the memory.
const CACHE_MIN: usize = 1 << 20;
const CACHE_MAX: usize = 1 << 40;

/// The note that stores these settings.
pub(crate) fn of(settings: &Settings) -> Vec<u8> {
    format!("{CACHE_BYTES}={}\n", settings.cache_bytes).into_bytes()
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
            Intent::Delete(a),
            Intent::Revert { volume: a, snapshot: b },
            Intent::Adopt { volume: a, from: b },
            Intent::Follow(b),
        ];
        let large = Settings { cache_bytes: 1 << 30, ..Settings::default() };
        let mut note = of(&large);
        for wanted in all {
            note = with_intent(&note, Some(&wanted));
            assert_eq!(intent(&note), Ok(Some(wanted)));
            assert_eq!(settings(&note, Settings::default()), large);
        }
        assert_eq!(with_intent(&note, None), of(&large));
        assert_eq!(intent(&of(&large)), Ok(None));
        for unknown in ["intent=move x\n", "intent=delete\n", "intent=\n"] {
            assert!(intent(unknown.as_bytes()).is_err());
        }
    }

    #[test]
    fn settings_come_back_and_what_is_unknown_is_ignored() {
        let usual = Settings::default();
        let large = Settings { cache_bytes: 1 << 30, ..usual };
        assert_eq!(settings(&of(&large), usual), large);
        assert_eq!(settings(b"", large), large);
        assert_eq!(
            settings(b"cache_bytes=many\nnew=1\n\xff\ncache_bytes=2097152", large).cache_bytes,
            2 << 20
        );
    }
}
