//! Files of disks that somebody has deleted: the daemon goes on with them, and when it ends they are gone.

use crate::absent::resolved;
use crate::client::Client;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The files that the daemon has open and that are deleted, and by which path each can still be read. Nothing is known of a
/// daemon that is not of this host, or not ours to look at.
#[derive(Debug, Default)]
pub struct Deleted(Option<HashMap<PathBuf, PathBuf>>);

impl Deleted {
    /// Looks at the daemon's process.
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

    /// Whether we may look.
    pub fn is_known(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the file `path` is deleted, if that is known.
    pub fn has(&self, path: &str) -> Option<bool> {
        self.is_known().then(|| self.copy(path).is_some())
    }

    /// Where the file `path` can still be read, if it is deleted.
    pub fn copy(&self, path: &str) -> Option<&Path> {
        let (deleted, path) = (self.0.as_ref()?, Path::new(path));
        // Its file system may hang, for which nobody is kept waiting who has no such file.
        let is_likely = deleted.keys().any(|known| known.file_name() == path.file_name());
        is_likely.then(|| deleted.get(&resolved(path)).map(PathBuf::as_path))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_of_ours_that_is_deleted_is_found() {
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
        let nobody = Deleted::of_process(Path::new("/proc/none"));
        assert!(found.is_known() && !nobody.is_known() && nobody.copy(name).is_none());
        assert_eq!((found.has(name), found.has("/other"), nobody.has(name)), (Some(true), Some(false), None));
    }
}
