//! Tests of imports into a directory.

use super::*;
use std::os::unix::fs::FileExt;
use tempfile::TempDir;

fn import<'a>(source: &'a Path, target: &'a Path) -> Import<'a> {
    Import { source, format: None, target, size: None, block_size: 512, quiet: true }
}

/// A sparse image of 64 MiB; some of its data is zero.
fn image(path: &Path) {
    let file = File::create(path).unwrap();
    file.set_len(64 << 20).unwrap();
    for (at, byte, len) in
        [(0, 1, 100), (5 << 20, 2, 3 << 20), ((9 << 20) + 77, 3, 70_000), (20 << 20, 0, 4 << 20)]
    {
        file.write_all_at(&vec![byte; len], at).unwrap();
    }
    file.write_all_at(b"end", (64 << 20) - 3).unwrap();
}

#[test]
fn raw_images_are_copied_without_holes() {
    let dir = TempDir::new().unwrap();
    let (source, target) = (dir.path().join("s"), dir.path().join("t"));
    image(&source);
    assert_eq!(import(&source, &target).run().unwrap(), 64 << 20);
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&target).unwrap(), "they differ");
    let stored = target.metadata().unwrap().blocks() * 512;
    assert!(stored < 5 << 20, "{stored} bytes are stored");
    let left = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(left, 2, "nothing else is left");
}

#[test]
fn progress_reaches_the_end() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("s");
    image(&path);
    let (source, target) = (File::open(&path).unwrap(), tempfile::tempfile().unwrap());
    let mut all = Vec::new();
    copy::sparse(&source, &target, 64 << 20, &mut |done| {
        all.push(done);
        Ok(())
    })
    .unwrap();
    assert!(all.is_sorted() && all.last() == Some(&(64 << 20)), "{all:?}");
    assert_eq!(qemu_img::share("    (12.50/100%)"), Some(0.125));
    assert_eq!(qemu_img::share("nonsense"), None);
}

#[test]
fn sizes_are_blocks_and_hold_the_image() {
    let dir = TempDir::new().unwrap();
    let (source, target) = (dir.path().join("s"), dir.path().join("t"));
    std::fs::write(&source, [7; 1000]).unwrap();
    let small = Import { size: Some(512), ..import(&source, &target) };
    assert!(small.run().unwrap_err().to_string().contains("less than the image's 1000B"));
    assert!(!target.exists());
    assert_eq!(import(&source, &target).run().unwrap(), 1024);
    assert_eq!(target.metadata().unwrap().len(), 1024);
    let again = import(&source, &target).run().unwrap_err().to_string();
    assert!(again.contains("exists already"), "{again}");
    let large = dir.path().join("large");
    assert_eq!(Import { size: Some(1 << 20), ..import(&source, &large) }.run().unwrap(), 1 << 20);
}

#[test]
fn a_file_that_is_not_an_image_is_refused() {
    let dir = TempDir::new().unwrap();
    let target = dir.path().join("t");
    std::fs::write(dir.path().join("empty"), "").unwrap();
    for (source, what) in [("no", "cannot open"), (".", "is not an image"), ("empty", "is empty")] {
        let error = import(&dir.path().join(source), &target).run().unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
    let nowhere = dir.path().join("no/t");
    let full = dir.path().join("full");
    std::fs::write(&full, [1; 512]).unwrap();
    assert!(import(&full, &nowhere).run().unwrap_err().to_string().contains("cannot create"));
    std::fs::write(&full, b"QFI\xfb but broken").unwrap();
    let error = import(&full, &target).run().unwrap_err().to_string();
    assert!(error.contains("qemu-img"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "no half file is left");
}

#[test]
fn an_interrupted_import_restarts_and_a_concurrent_one_fails() {
    let dir = TempDir::new().unwrap();
    let (source, target) = (dir.path().join("s"), dir.path().join("t"));
    std::fs::write(&source, [7; 512]).unwrap();
    std::fs::write(dir.path().join(".t.importing"), [9; 4096]).unwrap();
    {
        let _other = Draft::new(&target).unwrap();
        let error = import(&source, &target).run().unwrap_err().to_string();
        assert!(error.contains("another import"), "{error}");
    }
    std::fs::write(dir.path().join(".t.importing"), [9; 4096]).unwrap();
    import(&source, &target).run().unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), [7; 512]);
}
