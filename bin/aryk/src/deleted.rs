//! Files of disks that somebody has deleted: the daemon goes on with them, and when it ends they are gone.

use crate::absent::resolved;
use crate::client::Client;
use crate::commands::number;
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The files that the daemon has open and that are deleted, and by which path each can still be read.
pub struct Deleted(HashMap<PathBuf, PathBuf>);

impl Deleted {
    /// Looks at the daemon's process. Nothing is known of one that is not of this host, or not ours to look at.
    pub fn of(client: &mut Client) -> Self {
        let reactors = client.call("framework_get_reactors", json!({})).unwrap_or_default();
        Self::of_process(&PathBuf::from(format!("/proc/{}/fd", number(&reactors, "pid"))))
    }

    fn of_process(descriptors: &Path) -> Self {
        let entries = std::fs::read_dir(descriptors).into_iter().flatten().flatten();
        let deleted = entries.filter_map(|entry| {
            let link = std::fs::read_link(entry.path()).ok()?;
            let path = link.to_str()?.strip_suffix(" (deleted)")?;
            Some((PathBuf::from(path), entry.path()))
        });
        Self(deleted.collect())
    }

    /// Where the file `path` can still be read, if it is deleted.
    pub fn copy(&self, path: &str) -> Option<&Path> {
        self.0.get(&resolved(Path::new(path))).map(PathBuf::as_path)
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
        assert_eq!(Deleted::of_process(Path::new("/proc/none")).copy(name), None);
    }
}
