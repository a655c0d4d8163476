//! Writes the "newc" cpio archives that Linux unpacks as its initial file system.
//!
//! Only the entries that an initrd needs: directories and regular files, all owned by root. Format:
//! `Documentation/driver-api/early-userspace/buffer-format.rst`.

/// An archive under construction. Entries appear in the order in which they were added; parents come first.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inodes: u32,
}

impl Archive {
    /// Adds an empty directory.
    pub(crate) fn directory(&mut self, path: &str) {
        self.entry(path, 0o040_755, &[]);
    }

    /// Adds a regular file with permission bits `mode`.
    pub(crate) fn file(&mut self, path: &str, mode: u32, data: &[u8]) {
        self.entry(path, 0o100_000 | mode, data);
    }

    /// Closes the archive. The kernel accepts several archives one after the other, each padded to 4 bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, data: &[u8]) {
        self.inodes += 1;
        let size = u32::try_from(data.len()).expect("an initrd's file is small");
        let name_size = u32::try_from(path.len() + 1).expect("a path is short");
        // ino, mode, uid, gid, nlink, mtime, filesize, dev major and minor, rdev major and minor, namesize, check
        let fields = [self.inodes, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
    }

    fn pad(&mut self) {
        let aligned = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(aligned, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_names_and_data_are_aligned() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.file("bin/x", 0o755, b"abcde");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let second = 110 + 4 + 2; // header, "bin\0", padding to 116
        assert_eq!(&bytes[second..second + 6], b"070701");
        assert_eq!(&bytes[second + 14..second + 22], b"000081ed"); // regular file, 0755
        assert_eq!(&bytes[second + 54..second + 62], b"00000005");
        let data = (second + 110 + 6_usize).next_multiple_of(4);
        assert_eq!(&bytes[data..data + 5], b"abcde");
        assert_eq!(&bytes[data + 8..data + 14], b"070701");
    }
}
