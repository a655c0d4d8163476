//! Debian packages that the commands need: installed by apt as root; otherwise the missing ones are named.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::progress::run_logged;
use crate::workspace;

/// A program, or a file by its path, and the Debian package that contains it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requirement {
    program: &'static str,
    package: &'static str,
}

const fn requirement(program: &'static str, package: &'static str) -> Requirement {
    Requirement { program, package }
}

/// Runs the guests.
pub(crate) const QEMU: Requirement = requirement("qemu-system-x86_64", "qemu-system-x86");
/// The peer for proving the test harness, and for measurements.
pub(crate) const QEMU_STORAGE_DAEMON: Requirement = requirement("qemu-storage-daemon", "qemu-system-common");
/// The load in guests, and the peer of file measurements.
pub(crate) const FIO: Requirement = requirement("fio", "fio");
/// Creates file systems: on the host for the guest's tools disk, in the guest on a disk under test.
const MKFS: Requirement = requirement("mkfs.ext4", "e2fsprogs");
/// Sends single commands to SCSI disks in guests.
const SG3: Requirement = requirement("sg_inq", "sg3-utils");
/// The tools for NVMe drives, in guests.
const NVME_CLI: Requirement = requirement("nvme", "nvme-cli");
const SMARTMONTOOLS: Requirement = requirement("smartctl", "smartmontools");
/// Unpacks Debian's cloud kernels.
const LZ4: Requirement = requirement("lz4", "lz4");
const ZSTD: Requirement = requirement("zstd", "zstd");
/// Builds modules of a kernel.
const MAKE: Requirement = requirement("make", "make");
const GCC: Requirement = requirement("x86_64-linux-gnu-gcc-12", "gcc-12");
const XZ: Requirement = requirement("xz", "xz-utils");
/// `setpriv` starts children that end with the parent; `unshare` and `blkdiscard` are from the same package.
const SETPRIV: Requirement = requirement("setpriv", "util-linux");
/// `ip` and `tc` make a network that tests can cut.
const TC: Requirement = requirement("tc", "iproute2");
/// Reads and writes encrypted disks, as the peers of our headers.
const CRYPTSETUP: Requirement = requirement("cryptsetup", "cryptsetup-bin");
const QEMU_IMG: Requirement = requirement("qemu-img", "qemu-utils");
/// A Ceph cluster for tests.
const CEPH_MON: Requirement = requirement("ceph-mon", "ceph-mon");
const CEPH_OSD: Requirement = requirement("ceph-osd", "ceph-osd");
const CEPH_COMMON: Requirement = requirement("rbd", "ceph-common");
/// QEMU's client of Ceph, the peer for measurements, and of images that librbd has encrypted.
pub(crate) const QEMU_RBD: Requirement =
    requirement("/usr/lib/x86_64-linux-gnu/qemu/block-rbd.so", "qemu-block-extra");
/// Links libFuzzer.
pub(crate) const CXX: Requirement = requirement("c++", "g++");
/// Counts instructions.
pub(crate) const VALGRIND: Requirement = requirement("valgrind", "valgrind");

/// The Python client's interpreter and type checker.
const PYTHON: Requirement = requirement("python3", "python3");
const MYPY: Requirement = requirement("mypy", "mypy");

/// Builds the Go client.
const GO: Requirement = requirement("go", "golang-go");

/// Builds a Debian package.
const DPKG_SHLIBDEPS: Requirement = requirement("dpkg-shlibdeps", "dpkg-dev");
/// Runs the installed service.
const SYSTEMD: Requirement = requirement("systemd-analyze", "systemd");
/// Checks an XML file against a schema.
const XMLLINT: Requirement = requirement("xmllint", "libxml2-utils");

/// Runs the tests of the web page.
const CHROMIUM: Requirement = requirement("chromium", "chromium");

/// For the Debian package.
pub(crate) const DEB: &[Requirement] = &[DPKG_SHLIBDEPS, SYSTEMD];
/// For guests.
pub(crate) const GUEST: &[Requirement] =
    &[QEMU, FIO, MKFS, SG3, NVME_CLI, SMARTMONTOOLS, LZ4, SETPRIV, CRYPTSETUP];
/// For a Ceph cluster.
pub(crate) const CEPH: &[Requirement] = &[CEPH_MON, CEPH_OSD, CEPH_COMMON, SETPRIV];
/// For all commands.
pub(crate) const ALL: &[Requirement] = &[
    QEMU,
    QEMU_STORAGE_DAEMON,
    FIO,
    MKFS,
    SG3,
    NVME_CLI,
    SMARTMONTOOLS,
    LZ4,
    ZSTD,
    MAKE,
    GCC,
    XZ,
    SETPRIV,
    TC,
    CRYPTSETUP,
    QEMU_IMG,
    CEPH_MON,
    CEPH_OSD,
    CEPH_COMMON,
    QEMU_RBD,
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

/// Installs the packages of all missing programs in `needs`; without root, names them in an error.
pub(crate) fn ensure(needs: &[Requirement]) -> Result<()> {
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
    run_logged("Updating apt's package lists", &log, apt().arg("update"))?;
    let what = format!("Installing {}", packages.join(", "));
    let _policy = NoServices::begin()?;
    run_logged(&what, &log, apt().args(["-y", "--no-install-recommends", "install"]).args(packages))
}

/// While this exists, apt starts no service that it installs (`invoke-rc.d`, `deb-systemd-invoke`): the tests start the programs
/// themselves.
struct NoServices {
    /// Whether the policy is ours.
    is_written: bool,
}

/// The program that Debian's packages ask before they start a service.
const POLICY: &str = "/usr/sbin/policy-rc.d";

impl NoServices {
    /// Writes the policy, unless the host has one.
    fn begin() -> Result<Self> {
        let file = File::options().write(true).create_new(true).mode(0o755).open(POLICY);
        match file.and_then(|mut file| file.write_all(b"#!/bin/sh\nexit 101\n")) {
            Ok(()) => Ok(Self { is_written: true }),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(Self { is_written: false }),
            Err(error) => Err(error).with_context(|| format!("writing {POLICY}")),
        }
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.is_written
            && let Err(error) = std::fs::remove_file(POLICY)
        {
            eprintln!("{POLICY} stays, and no package can start its service: {error}");
        }
    }
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
