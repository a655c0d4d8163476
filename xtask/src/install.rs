//! What the commands need from Debian: installed by apt where we are root, named exactly where we are not.

use std::process::Command;

use anyhow::{Result, bail};

use crate::progress::run_logged;
use crate::workspace;

/// A program and the package that brings it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    program: &'static str,
    package: &'static str,
}

const fn need(program: &'static str, package: &'static str) -> Need {
    Need { program, package }
}

/// The machine that guests run in.
pub(crate) const QEMU: Need = need("qemu-system-x86_64", "qemu-system-x86");
/// The peer that the harness is proved against, and measured against.
pub(crate) const QEMU_STORAGE_DAEMON: Need = need("qemu-storage-daemon", "qemu-system-common");
/// The load in guests, and the peer of file measurements.
pub(crate) const FIO: Need = need("fio", "fio");
/// What makes file systems: the guest's tools disk here, a disk under test there.
const MKFS: Need = need("mkfs.ext4", "e2fsprogs");
/// What asks SCSI disks in guests, command by command.
const SG3: Need = need("sg_inq", "sg3-utils");
/// What Debian's cloud kernels are compressed with.
const LZ4: Need = need("lz4", "lz4");
/// `setpriv` starts children that end with us; `unshare` and `blkdiscard` are from the same package.
const SETPRIV: Need = need("setpriv", "util-linux");
/// What links libFuzzer.
pub(crate) const CXX: Need = need("c++", "g++");
/// What counts instructions.
pub(crate) const VALGRIND: Need = need("valgrind", "valgrind");

/// What the Python client runs on, and what checks its types.
const PYTHON: Need = need("python3", "python3");
const MYPY: Need = need("mypy", "mypy");

/// What the Go client is built with.
const GO: Need = need("go", "golang-go");

/// What builds a Debian package.
const DPKG_SHLIBDEPS: Need = need("dpkg-shlibdeps", "dpkg-dev");
/// What runs the installed service.
const SYSTEMD: Need = need("systemd-analyze", "systemd");
/// What checks an XML file against a schema.
const XMLLINT: Need = need("xmllint", "libxml2-utils");

/// What the web page is tested in.
const CHROMIUM: Need = need("chromium", "chromium");

/// What the Debian package needs.
pub(crate) const DEB: &[Need] = &[DPKG_SHLIBDEPS, SYSTEMD];
/// What a guest needs.
pub(crate) const GUEST: &[Need] = &[QEMU, FIO, MKFS, SG3, LZ4, SETPRIV];
/// What all commands need.
pub(crate) const ALL: &[Need] = &[
    QEMU,
    QEMU_STORAGE_DAEMON,
    FIO,
    MKFS,
    SG3,
    LZ4,
    SETPRIV,
    CXX,
    VALGRIND,
    PYTHON,
    MYPY,
    GO,
    DPKG_SHLIBDEPS,
    SYSTEMD,
    XMLLINT,
    CHROMIUM,
];

/// Installs the packages of all programs in `needs` that are missing.
pub(crate) fn ensure(needs: &[Need]) -> Result<()> {
    let mut packages: Vec<_> =
        needs.iter().filter(|need| !is_installed(need.program)).map(|need| need.package).collect();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    let install = format!("apt-get install -y --no-install-recommends {}", packages.join(" "));
    if !rustix::process::geteuid().is_root() {
        bail!("missing: {}. As root:\n    apt-get update && {install}", packages.join(", "));
    }
    let target = workspace::target()?;
    std::fs::create_dir_all(&target)?;
    let log = target.join("install.log");
    run_logged("Asking Debian what there is", &log, apt().arg("update"))?;
    let what = format!("Installing {}", packages.join(", "));
    run_logged(&what, &log, apt().args(["-y", "--no-install-recommends", "install"]).args(packages))
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|directory| directory.join(program).is_file())
}
