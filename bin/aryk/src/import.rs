//! Images: `aryk disk create --from` creates a disk's file from one, `aryk volume create --from` a volume, and
//! `aryk volume export` creates one.
//!
//! The file is written under another name in the same directory, and gets its own name when it is complete and synced: an
//! interruption leaves no partial disk. Raw images are copied here; all others are read by
//! `qemu-img`.

mod bar;
pub mod copy;
mod qemu_img;

use crate::error::Error;
use crate::size::Size;
use crate::transfer::Attached;
use bar::Bar;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The first bytes of images, by format.
const MAGIC: [(&[u8], &str); 5] = [
    (b"QFI\xfb", "qcow2"),
    (b"QED\0", "qed"),
    (b"KDMV", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
];

/// An import.
pub struct Import<'a> {
    pub source: &'a Path,
    /// The format, as in `qemu-img`; by default detected from the first bytes.
    pub format: Option<&'a str>,
    pub target: &'a Path,
    /// Size of the disk in bytes, at least the image's.
    pub size: Option<u64>,
    /// The disk's size is a multiple of this block size.
    pub block_size: u32,
    /// Whether to hide the progress bar.
    pub quiet: bool,
}

impl Import<'_> {
    /// Creates the target. Returns its size in bytes.
    pub fn run(&self) -> Result<u64, Error> {
        if self.target.symlink_metadata().is_ok() {
            let file = self.target.display();
            return Err(failed(format!(
                "{file} exists already. Name a new file, or omit --from to use it as it is."
            )));
        }
        let mut source = open_source(self.source)?;
        let detected = detect(&mut source).map_err(|e| at("read", self.source, &e))?;
        let format = self.format.unwrap_or(detected);
        let bytes = match format {
            "raw" => source.seek(SeekFrom::End(0)).map_err(|e| at("read", self.source, &e))?,
            _ => qemu_img::virtual_size(self.source, format)?,
        };
        let size = self.size_for(bytes)?;
        let draft = Draft::new(self.target)?;
        let bar = Bar::new(bytes, self.quiet)?;
        match format {
            "raw" => copy::sparse(&source, &draft.file, bytes, &mut |done| bar.advance(done))
                .map_err(|e| at("copy", self.source, &e))?,
            _ => qemu_img::convert((self.source, format), (&draft.path, "raw"), &mut |share| {
                bar.advance((bytes as f64 * share) as u64)
            })?,
        }
        bar.finish();
        draft.finish(self.target, size)?;
        Ok(size)
    }

    /// The disk's size for an image of `bytes` bytes.
    fn size_for(&self, bytes: u64) -> Result<u64, Error> {
        let block = u64::from(self.block_size.max(1));
        match self.size {
            Some(size) if size < bytes => {
                Err(failed(format!("--size {} is less than the image's {}.", Size(size), Size(bytes))))
            }
            Some(size) => Ok(size),
            None if bytes == 0 => Err(failed(format!("{} is empty.", self.source.display()))),
            None => Ok(bytes.next_multiple_of(block)),
        }
    }
}

/// An image whose data can be read as that of a raw file.
pub struct RawImage {
    file: File,
    /// Bytes of the disk in the image.
    pub bytes: u64,
    /// Removes the file of an image that was converted.
    _converted: Option<Removed>,
}

/// A file that is removed with this.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // It is in the directory of temporary files.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl RawImage {
    /// Opens an image. One that is not raw is converted to a temporary file.
    pub fn open(source: &Path, format: Option<&str>, quiet: bool) -> Result<Self, Error> {
        let mut file = open_source(source)?;
        let detected = detect(&mut file).map_err(|e| at("read", source, &e))?;
        let format = format.unwrap_or(detected);
        if format == "raw" {
            let bytes = file.seek(SeekFrom::End(0)).map_err(|e| at("read", source, &e))?;
            return Ok(Self { file, bytes, _converted: None });
        }
        let bytes = qemu_img::virtual_size(source, format)?;
        let path = std::env::temp_dir().join(format!("aryk-{}.raw", std::process::id()));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|e| at("create", &path, &e))?;
        let converted = Removed(path);
        let bar = Bar::new(bytes, quiet)?;
        qemu_img::convert((source, format), (&converted.0, "raw"), &mut |share| {
            bar.advance((bytes as f64 * share) as u64)
        })?;
        bar.finish();
        Ok(Self { file, bytes, _converted: Some(converted) })
    }

    /// Writes the image to a disk that reads zeroes.
    pub fn write_to(&self, disk: &mut Attached, quiet: bool) -> Result<(), Error> {
        let bar = Bar::new(self.bytes, quiet)?;
        disk.write_from(&self.file, self.bytes, &mut |done| bar.advance(done))?;
        bar.finish();
        Ok(())
    }
}

/// The format of an image, by its first bytes.
pub fn format_of(source: &Path) -> Result<&'static str, Error> {
    detect(&mut open_source(source)?).map_err(|e| at("read", source, &e))
}

/// Creates a file with an image of a disk, in the format `raw` or another one that `qemu-img` writes.
pub fn export(disk: &mut Attached, format: &str, target: &Path, quiet: bool) -> Result<(), Error> {
    if target.symlink_metadata().is_ok() {
        return Err(failed(format!("{} exists already. Name a new file.", target.display())));
    }
    let raw = Draft::new(target)?;
    let bar = Bar::new(disk.bytes(), quiet)?;
    disk.read_into(&raw.file, &mut |done| bar.advance(done))?;
    bar.finish();
    if format == "raw" {
        return raw.finish(target, disk.bytes());
    }
    let converted = Draft::new(&target.with_extension("converting"))?;
    let bar = Bar::new(disk.bytes(), quiet)?;
    qemu_img::convert((&raw.path, "raw"), (&converted.path, format), &mut |share| {
        bar.advance((disk.bytes() as f64 * share) as u64)
    })?;
    bar.finish();
    let bytes = converted.file.metadata()?.len();
    converted.finish(target, bytes)
}

/// The file until it is complete. Dropping it removes an incomplete file.
struct Draft {
    file: File,
    path: PathBuf,
    is_finished: bool,
}

impl Draft {
    fn new(target: &Path) -> Result<Self, Error> {
        let name =
            target.file_name().ok_or_else(|| failed(format!("{} has no file name.", target.display())))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".importing");
        let path = target.with_file_name(hidden);
        let mut options = OpenOptions::new();
        // Only its owner may read the image's data.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(|e| at("create", target, &e))?;
        let busy = || failed(format!("another import is creating {}. Wait for it.", target.display()));
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| busy())?;
        // Another import may have finished between our open and our lock: then the file is a disk now.
        let is_ours = |at: std::fs::Metadata| Some(at.ino()) == file.metadata().ok().map(|f| f.ino());
        if !path.symlink_metadata().is_ok_and(is_ours) {
            return Err(busy());
        }
        file.set_len(0)?;
        Ok(Self { file, path, is_finished: false })
    }

    /// Syncs the file and gives it the target's name.
    fn finish(mut self, target: &Path, size: u64) -> Result<(), Error> {
        let store = || {
            self.file.set_len(size)?;
            self.file.sync_all()?;
            match renameat_with(CWD, &self.path, CWD, target, RenameFlags::NOREPLACE) {
                // Some file systems cannot rename without replacing.
                Err(Errno::INVAL | Errno::NOSYS) => std::fs::hard_link(&self.path, target),
                renamed => Ok(renamed?),
            }?;
            let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty());
            File::open(dir.unwrap_or(Path::new(".")))?.sync_all()
        };
        store().map_err(|e| at("make", target, &e))?;
        self.is_finished = !self.path.exists();
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_finished {
            // The first error is reported.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn open_source(source: &Path) -> Result<File, Error> {
    let file = File::open(source).map_err(|e| at("open", source, &e))?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(failed(format!("{} is not an image: give a file or a block device.", source.display())));
    }
    Ok(file)
}

fn detect(source: &mut File) -> io::Result<&'static str> {
    let mut head = Vec::new();
    source.take(64).read_to_end(&mut head)?;
    let known = MAGIC.iter().find(|(magic, _)| head.starts_with(magic));
    Ok(known.map_or("raw", |(_, format)| format))
}

fn failed(text: String) -> Error {
    Error::File(text)
}

fn at(what: &str, path: &Path, e: &io::Error) -> Error {
    failed(format!("cannot {what} {}: {e}", path.display()))
}

#[cfg(test)]
mod tests;
