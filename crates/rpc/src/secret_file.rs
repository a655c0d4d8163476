//! Files with secrets: key files, secrets of the keyring, wrapping keys. One rule for all: a regular file, which belongs to root
//! or to the daemon's user, and to which no other user has rights. Any thread that may block.

use aryk_secrets::SecretBytes;
use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Who may have rights to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rights {
    /// Its owner only, which is root or the daemon's user.
    OwnerOnly,
    /// Those to whom the service manager has given it.
    Any,
}

/// Why a file is not a secret. The text follows the file's name.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretFileError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is not a regular file")]
    NotAFile,
    /// The mode.
    #[error("is refused, because other users have rights to it (mode {0:o}): 'chmod 600' it")]
    Mode(u32),
    #[error("belongs to user {owner}: it must belong to root or to the daemon's user, {us}")]
    Owner { owner: u32, us: u32 },
    /// The most bytes that it may have.
    #[error("has more than {0} bytes")]
    TooLarge(usize),
}

impl From<Errno> for SecretFileError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

/// A file that is open and was checked.
#[derive(Debug)]
pub(crate) struct SecretFile {
    file: File,
    len: usize,
    /// What the file system said about it.
    pub stat: Stat,
}

impl SecretFile {
    /// Opens a file of up to `len_max` bytes.
    ///
    /// # Errors
    /// [`SecretFileError`].
    pub fn open(path: &Path, rights: Rights, len_max: usize) -> Result<Self, SecretFileError> {
        // A FIFO must not block the thread for ever.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(open(path, flags, Mode::empty())?);
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(SecretFileError::NotAFile);
        }
        let mode = stat.st_mode & 0o777;
        if rights == Rights::OwnerOnly {
            let (owner, us) = (stat.st_uid, rustix::process::geteuid().as_raw());
            match (mode & 0o077 == 0, owner == 0 || owner == us) {
                (true, true) => {}
                (false, _) => return Err(SecretFileError::Mode(mode)),
                (true, false) => return Err(SecretFileError::Owner { owner, us }),
            }
        }
        let len = usize::try_from(stat.st_size).ok().filter(|len| *len <= len_max);
        let len = len.ok_or(SecretFileError::TooLarge(len_max))?;
        Ok(Self { file, len, stat })
    }

    /// All bytes of the file.
    ///
    /// # Errors
    /// [`SecretFileError::Io`], also if the file has become shorter.
    pub fn read(&self) -> Result<SecretBytes, SecretFileError> {
        let mut secret = SecretBytes::zeroed(self.len);
        (&self.file).read_exact(&mut secret)?;
        Ok(secret)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn only_private_regular_files_of_the_daemon_or_root_are_secrets() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, b"secret").unwrap();
        let open = |mode, rights, len_max| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            SecretFile::open(&path, rights, len_max)
        };
        assert_eq!(&*open(0o400, Rights::OwnerOnly, 6).unwrap().read().unwrap(), b"secret");
        assert!(matches!(open(0o600, Rights::OwnerOnly, 5), Err(SecretFileError::TooLarge(5))));
        assert!(matches!(open(0o640, Rights::OwnerOnly, 6), Err(SecretFileError::Mode(0o640))));
        assert!(open(0o640, Rights::Any, 6).is_ok());
        assert!(matches!(
            SecretFile::open(dir.path(), Rights::Any, 6),
            Err(SecretFileError::NotAFile | SecretFileError::Io(_))
        ));
        let missing = SecretFile::open(&dir.path().join("missing"), Rights::Any, 6).unwrap_err();
        assert!(missing.to_string().starts_with("cannot be read: No such file"), "{missing}");
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(1), None).unwrap();
            let owner = open(0o600, Rights::OwnerOnly, 6).unwrap_err();
            assert!(matches!(owner, SecretFileError::Owner { owner: 1, us: 0 }), "{owner}");
            assert!(open(0o600, Rights::Any, 6).is_ok());
        }
    }
}
