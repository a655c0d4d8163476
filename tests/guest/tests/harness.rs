//! Tests of the harness itself, against `qemu-storage-daemon`.
//!
//! Ignored by plain `cargo test` because it needs QEMU and Debian's packages; `cargo xtask test` runs it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use aryk_guest_tests::peer::StorageDaemon;
use aryk_guest_tests::{Disk, Guest, Image, Vm, fio};

const MINUTE: Duration = Duration::from_secs(60);

fn image() -> Image {
    let target = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    Image::prepare(&target).expect("an image")
}

fn disk_file(directory: &Path) -> PathBuf {
    let path = directory.join("disk.raw");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(256 << 20).expect("a sparse file");
    path
}

#[test]
#[ignore = "needs QEMU"]
fn fio_verifies_a_disk_and_its_numbers_arrive() {
    let directory = tempfile::tempdir().unwrap();
    let peer = StorageDaemon::start(&disk_file(directory.path()), 4, directory.path()).unwrap();
    let vm = Vm::with_disks(vec![Disk::new(peer.socket(), 4)]);
    let script = "
        d=$(disk 0)
        ls /sys/block/${d##*/}/mq | wc -l
        measure fio --filename=$d --rw=randwrite --bs=4k --iodepth=32 --size=16M --verify=crc32c --verify_fatal=1
    ";
    let guest = Guest::boot(&image(), &vm, script, directory.path()).unwrap();
    let report = guest.finish(MINUTE).unwrap();
    assert_eq!(report.lines, ["4"], "a hardware queue for each virtqueue");
    let jobs = fio::parse(&report.files["fio"]).unwrap();
    assert_eq!(jobs[0].write.unwrap().ios, 4096);
    assert_eq!(jobs[0].read.unwrap().ios, 4096, "verification reads all of it");
    println!("{:?}, {:?}", report.elapsed, jobs[0]);
}

#[test]
#[ignore = "needs QEMU"]
fn a_failing_script_and_a_hung_one_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let vm = Vm::with_disks(Vec::new());
    let failing = Guest::boot(&image(), &vm, "false", directory.path()).unwrap();
    let error = failing.finish(MINUTE).unwrap_err().to_string();
    assert!(error.contains("the script failed with 1"), "{error}");
    let mut hung = Guest::boot(&image(), &vm, "echo up; await go; echo went", directory.path()).unwrap();
    hung.wait_line("up", MINUTE).unwrap();
    assert!(hung.wait_line("went", Duration::from_millis(200)).is_err());
    hung.send("go").unwrap();
    hung.wait_line("went", MINUTE).unwrap();
    hung.finish(MINUTE).unwrap();
}
