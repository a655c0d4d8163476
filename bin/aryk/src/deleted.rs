//! Files of disks that were deleted while in use: the daemon still serves them, and their data is lost when it ends.

use crate::absent::resolved;
use crate::client::Client;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The deleted files that the daemon has open, with the path by which each can still be read. Unknown for a daemon that is not a
/// process of this host, or whose descriptors we may not read.
#[derive(Debug, Default)]
pub struct Deleted(Option<HashMap<PathBuf, PathBuf>>);

impl Deleted {
    /// Reads the descriptors of the daemon's process.
    pub fn of(client: &Client) -> Self {
        Self(client.process().and_then(|process| Self::of_process(&process.join("fd")).0))
    }

    fn of_process(descriptors: &Path) -> Self {
        let deleted = |entries: std::fs::ReadDir| {
            let deleted = entries.flatten().filter_map(|entry| {
                let link = std::fs::read_link(entry.path()).ok()?;
                let path = link.to_str()?.strip_suffix(" (deleted)")?;
                Some((PathBuf::from(path), entry.path()))
            });
            deleted.collect()
        };
        Self(std::fs::read_dir(descriptors).ok().map(deleted))
    }

    /// Whether the descriptors could be read.
    pub fn is_known(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the file `path` is deleted, if known.
    pub fn has(&self, path: &str) -> Option<bool> {
        self.is_known().then(|| self.copy(path).is_some())
    }

    /// The path by which the file `path` can still be read, if it is deleted.
    pub fn copy(&self, path: &str) -> Option<&Path> {
        let (deleted, path) = (self.0.as_ref()?, Path::new(path));
        // A hanging file system would block the calls below, so compare the names first.
        let is_likely = deleted.keys().any(|known| known.file_name() == path.file_name());
        is_likely.then(|| deleted.get(&resolved(path)).map(PathBuf::as_path))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_deleted_open_file_is_found() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("a b");
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(b"kept").unwrap();
        let ours = || Deleted::of_process(Path::new("/proc/self/fd"));
        let name = path.to_str().unwrap();
        assert_eq!(ours().copy(name), None);
        std::fs::remove_file(&path).unwrap();
        let found = ours();
        assert_eq!(std::fs::read(found.copy(name).unwrap()).unwrap(), b"kept");
        // Another file has its path now.
        std::fs::write(&path, b"other").unwrap();
        assert_eq!(std::fs::read(ours().copy(name).unwrap()).unwrap(), b"kept");
        let unknown = Deleted::of_process(Path::new("/proc/none"));
        assert!(found.is_known() && !unknown.is_known() && unknown.copy(name).is_none());
        assert_eq!(
            (found.has(name), found.has("/other"), unknown.has(name)),
            (Some(true), Some(false), None)
        );
    }
}
