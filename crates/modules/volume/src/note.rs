//! The settings of a pool that are stored in its manifest: lines `NAME=VALUE`. Any context.

use aryk_volume::Settings;

const CACHE_BYTES: &str = "cache_bytes";

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
