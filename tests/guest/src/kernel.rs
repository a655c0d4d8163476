//! Unpacks a Debian kernel package: the ELF `vmlinux` inside its `vmlinuz`, and its modules in the order in which they
//! must be inserted.
//!
//! QEMU can enter the uncompressed kernel through PVH; running the decompressor under TCG takes several seconds per boot.
//! Module dependencies are read from the modules themselves (`.modinfo`), because `modules.dep` exists only where a
//! package was installed.

pub(crate) mod iommufd;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Offsets in the header of a bzImage (`Documentation/x86/boot.rst`).
const SETUP_SECTS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

/// Decompresses the kernel inside `vmlinuz` into `vmlinux`.
pub(crate) fn extract(vmlinuz: &Path, vmlinux: &Path) -> Result<()> {
    let image = std::fs::read(vmlinuz).with_context(|| format!("reading {}", vmlinuz.display()))?;
    let (packed, size) = payload(&image)?;
    let tool = decompressor(packed)?;
    let mut child = Command::new(tool)
        .arg("-dc")
        .stdin(Stdio::piped())
        .stdout(std::fs::File::create(vmlinux)?)
        .stderr(Stdio::inherit())
        .spawn()
        .with_context(|| format!("running {tool}"))?;
    child.stdin.take().expect("stdin was piped").write_all(packed)?;
    ensure!(child.wait()?.success(), "{tool} could not decompress {}", vmlinuz.display());
    let unpacked = std::fs::metadata(vmlinux)?.len();
    ensure!(unpacked == u64::from(size), "{}: {unpacked} bytes, expected {size}", vmlinux.display());
    Ok(())
}

/// The compressed kernel, and the size it has uncompressed (kept in the payload's last four bytes).
fn payload(image: &[u8]) -> Result<(&[u8], u32)> {
    let word = |at: usize| -> Option<u32> {
        Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().expect("four bytes")))
    };
    let setup = usize::from(*image.get(SETUP_SECTS).context("not a kernel image")?) + 1;
    let offset = word(PAYLOAD_OFFSET).context("not a kernel image")? as usize;
    let length = word(PAYLOAD_LENGTH).context("not a kernel image")? as usize;
    let start = setup * 512 + offset;
    let payload = start.checked_add(length).and_then(|end| image.get(start..end)).context("cut short")?;
    let (packed, size) = payload.split_last_chunk::<4>().context("payload is empty")?;
    Ok((packed, u32::from_le_bytes(*size)))
}

/// The program that decompresses the payload: Debian's cloud kernels use lz4, its generic ones xz.
fn decompressor(packed: &[u8]) -> Result<&'static str> {
    Ok(match packed.get(..4) {
        Some([0x02, 0x21, 0x4c, 0x18]) => "lz4",
        Some([0xfd, b'7', b'z', b'X']) => "xz",
        Some([0x1f, 0x8b, _, _]) => "gzip",
        Some([0x28, 0xb5, 0x2f, 0xfd]) => "zstd",
        other => bail!("unknown kernel compression {other:x?}"),
    })
}

/// The files of the `wanted` modules and of their dependencies, each after its dependencies.
///
/// A wanted module that the package lacks is assumed to be built in.
pub(crate) fn modules(root: &Path, wanted: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = BTreeMap::new();
    index(root, &mut files)?;
    let mut ordered = Vec::new();
    for name in wanted {
        visit(name, &files, &mut ordered)?;
    }
    Ok(ordered)
}

fn index(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            index(&path, files)?;
        } else if let Some(name) = path.file_name().and_then(|n| n.to_str()?.strip_suffix(".ko")) {
            files.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

fn visit(name: &str, files: &BTreeMap<String, PathBuf>, ordered: &mut Vec<PathBuf>) -> Result<()> {
    let Some(path) = files.get(&name.replace('-', "_")) else { return Ok(()) };
    if ordered.contains(path) {
        return Ok(());
    }
    for dependency in depends(&std::fs::read(path)?) {
        visit(&dependency, files, ordered)?;
    }
    ordered.push(path.clone());
    Ok(())
}

/// The names in a module's `depends=` entry. Entries of `.modinfo` are strings with a NUL on both sides.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(value).split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_come_first_and_once() {
        let root = tempfile::tempdir().unwrap();
        let module = |name: &str, needs: &str| {
            let bytes = format!("\x7fELF\0license=GPL\0depends={needs}\0retpoline=Y\0");
            std::fs::write(root.path().join(name), bytes).unwrap();
        };
        module("virtio_blk.ko", "virtio,virtio-ring");
        module("virtio.ko", "virtio_ring");
        module("virtio-ring.ko", "");
        let order = modules(root.path(), &["virtio_blk", "ext4", "virtio"]).unwrap();
        let names: Vec<_> = order.iter().map(|path| path.file_stem().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["virtio-ring", "virtio", "virtio_blk"]);
    }

    #[test]
    fn a_payload_is_found_by_its_header() {
        let mut image = vec![0_u8; 1024];
        image[SETUP_SECTS] = 1;
        image[PAYLOAD_OFFSET] = 16;
        image[PAYLOAD_LENGTH] = 8;
        image.extend_from_slice(&[0; 16]);
        assert!(payload(&image).is_err(), "the payload is cut short");
        image.extend_from_slice(&[0x02, 0x21, 0x4c, 0x18, 5, 0, 0, 0]);
        let (packed, size) = payload(&image).unwrap();
        assert_eq!((decompressor(packed).unwrap(), size), ("lz4", 5));
    }
}
