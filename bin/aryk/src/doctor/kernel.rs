//! Kernel features and limits: io_uring, AIO, locked memory, hugepages.

use super::{Check, State};
use crate::size::Size;
use aryk_uring::{Ring, Signaller};
use rustix::process::{Resource, getrlimit};
use std::io;

/// Entries of the test ring.
const ENTRIES: u32 = 8;

/// From this version on, the kernel does not count rings as locked memory.
const RINGS_ARE_FREE_SINCE: (u32, u32) = (5, 12);

/// The locked memory of a reactor's ring in kernels that count it.
const RING_BYTES: u64 = 1 << 20;

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether a ring can be created, and if not, which setting forbids it.
pub fn io_uring() -> Check {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy();
    io_uring_of(Ring::new(ENTRIES).map(|_| ()), number("/proc/sys/kernel/io_uring_disabled"), &release)
}

pub(super) fn io_uring_of(made: io::Result<()>, disabled: Option<u64>, release: &str) -> Check {
    let brings = "files several times faster; without it a pool of threads serves them";
    let lacks = |found: String, fix: &str| Check::lacks("io_uring", State::Worse, found, brings, fix);
    match (made, disabled) {
        (Ok(()), None | Some(0)) => Check::ok("io_uring", format!("works, Linux {release}")),
        (Ok(()), Some(n)) => {
            let found = format!("works for this user only: kernel.io_uring_disabled = {n}");
            lacks(found, "sysctl kernel.io_uring_disabled=0")
        }
        (Err(_), Some(n @ 1..)) => {
            lacks(format!("forbidden: kernel.io_uring_disabled = {n}"), "sysctl kernel.io_uring_disabled=0")
        }
        (Err(e), _) if e.kind() == io::ErrorKind::PermissionDenied => lacks(
            format!("forbidden by a seccomp profile or security module: {e}"),
            "allow io_uring_setup, io_uring_enter, io_uring_register in it",
        ),
        (Err(e), _) if e.kind() == io::ErrorKind::Unsupported => {
            lacks(format!("not in this kernel, Linux {release}"), "boot a kernel with CONFIG_IO_URING")
        }
        (Err(e), _) => lacks(format!("fails: {e}"), "raise RLIMIT_MEMLOCK: ulimit -l unlimited"),
    }
}

/// Whether guests can be signalled by kernel AIO.
pub fn aio() -> Check {
    let (used, most) = (number("/proc/sys/fs/aio-nr"), number("/proc/sys/fs/aio-max-nr"));
    aio_of(Signaller::new().is_bounded(), used, most)
}

pub(super) fn aio_of(works: bool, used: Option<u64>, most: Option<u64>) -> Check {
    let count = |n: Option<u64>| n.map_or_else(|| "?".to_owned(), |n| n.to_string());
    let found = format!("{} of fs.aio-max-nr = {} in use", count(used), count(most));
    if works {
        return Check::ok("AIO", found);
    }
    let brings = "interrupts that a guest cannot block; without AIO a hostile guest can";
    let wanted = most.unwrap_or_default().saturating_mul(2).max(1 << 20);
    Check::lacks("AIO", State::Worse, found, brings, format!("sysctl fs.aio-max-nr={wanted}"))
}

/// The limit of locked memory.
pub fn memlock() -> Check {
    let release = rustix::system::uname();
    memlock_of(getrlimit(Resource::Memlock).maximum, version(&release.release().to_string_lossy()))
}

pub(super) fn memlock_of(hard: Option<u64>, kernel: Option<(u32, u32)>) -> Check {
    let Some(hard) = hard else { return Check::ok("memlock", "no limit") };
    let found = Size(hard).to_string();
    let fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in its unit";
    if hard < RING_BYTES && kernel.is_some_and(|kernel| kernel < RINGS_ARE_FREE_SINCE) {
        return Check::lacks("memlock", State::Worse, found, "io_uring, which this kernel counts", fix);
    }
    Check::ok("memlock", format!("{found}; only NVMe drives need more: 'aryk doctor nvme'"))
}

/// The version `6.18` of the release `6.18.44-cloud`.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Hugepages for guest memory.
pub fn hugepages() -> Check {
    hugepages_for("guest memory in hugepages: fewer TLB misses")
}

/// Hugepages, and what they bring.
pub fn hugepages_for(brings: &'static str) -> Check {
    hugepages_of(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default(), brings)
}

pub(super) fn hugepages_of(meminfo: &str, brings: &'static str) -> Check {
    let value = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or_default()
    };
    let (total, free, size) =
        (value("HugePages_Total"), value("HugePages_Free"), Size(value("Hugepagesize") << 10));
    match total {
        0 => Check::lacks(
            "hugepages",
            State::Option,
            "none reserved; Aryk needs none",
            brings,
            "sysctl vm.nr_hugepages=1024",
        ),
        _ => Check::ok("hugepages", format!("{free} of {total} free, of {size} each")),
    }
}
