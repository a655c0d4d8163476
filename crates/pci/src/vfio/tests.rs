//! Opening by files of a host in a temporary directory. Regular files stand for those of VFIO: their first call fails.

use super::*;
use crate::sysfs::tests::Host;
use std::fs::File;
use std::os::fd::AsRawFd;

const SLOW: &str = "0000:3d:00.0";
const OTHER: &str = "0000:3e:00.0";

fn open_in(host: &Host, address: &str) -> PciError {
    let vfio = Vfio { sysfs: host.sysfs(), ..Vfio::default() };
    vfio.open(address.parse().unwrap()).unwrap_err()
}

/// The call at which the group's file is found not to be VFIO's: the group was tried.
fn tried_group(error: &PciError) -> bool {
    matches!(error, PciError::Os { what: "read the state of an IOMMU group", errno: Errno::NOTTY })
}

#[test]
fn the_group_is_used_where_iommufd_is_absent_or_refused() {
    let host = Host::new();
    host.function(SLOW, "0x010802", "vfio-pci", Some(14));
    host.file(&format!("sys/bus/pci/devices/{SLOW}/vfio-dev/vfio0/dev"), "");
    host.file("dev/vfio/devices/vfio0", "");
    host.file("dev/vfio/14", "");
    let error = open_in(&host, SLOW);
    assert!(tried_group(&error), "no /dev/iommu: {error}");
    // A file that also root may not open for writing.
    host.link("dev/iommu", "/proc/sys/kernel/ostype");
    assert_eq!(open_device(&host.path("dev/iommu")).unwrap_err(), Errno::ACCESS);
    let error = open_in(&host, SLOW);
    assert!(tried_group(&error), "no permission for /dev/iommu: {error}");
    std::fs::remove_file(host.path("dev/vfio/14")).unwrap();
    let error = open_in(&host, SLOW);
    assert!(matches!(&error, PciError::Permission { path } if path.ends_with("dev/iommu")), "{error}");
    // iommufd is there, and fails otherwise.
    host.file("dev/vfio/14", "");
    std::fs::remove_file(host.path("dev/iommu")).unwrap();
    host.file("dev/iommu", "");
    let error = open_in(&host, SLOW);
    assert!(error.to_string().contains("create an address space of iommufd"), "{error}");
}

#[test]
fn each_errno_of_a_file_has_a_meaning() {
    let meaning = |errno| refused(errno, "/dev/iommu".into(), SLOW);
    for errno in [Errno::NOENT, Errno::NODEV, Errno::NXIO] {
        assert!(matches!(meaning(errno), Ok(ByDevice::Absent)), "{errno}");
    }
    for errno in [Errno::ACCESS, Errno::PERM] {
        assert!(matches!(meaning(errno), Ok(ByDevice::Refused(_))), "{errno}");
    }
    assert!(matches!(meaning(Errno::BUSY), Err(PciError::InUse { .. })));
    for errno in [Errno::MFILE, Errno::NOMEM, Errno::IO] {
        assert!(matches!(meaning(errno), Err(PciError::Os { .. })), "{errno}");
    }
}

/// A lease on a file: the kernel keeps each opener waiting until the lease is dropped.
struct Lease(File);

impl Lease {
    fn on(file: File) -> Self {
        let lease = Self(file);
        // A signal that does nothing by default tells of openers.
        lease.call(10, libc::SIGURG);
        lease.call(libc::F_SETLEASE, libc::F_WRLCK);
        lease
    }

    fn call(&self, command: i32, argument: i32) -> i32 {
        // SAFETY: F_SETSIG (10), F_SETLEASE and F_GETLEASE take an integer, and access no memory.
        let result = unsafe { libc::fcntl(self.0.as_raw_fd(), command, argument) };
        assert!(result >= 0, "{}", std::io::Error::last_os_error());
        result
    }

    /// Waits until an opener waits.
    fn await_opener(&self) {
        while self.call(libc::F_GETLEASE, 0) == libc::F_WRLCK {
            pause();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.call(libc::F_SETLEASE, libc::F_UNLCK);
    }
}

#[test]
fn a_slow_open_delays_no_other_function() {
    let host = Host::new();
    for (address, group) in [(SLOW, 14), (OTHER, 15)] {
        host.function(address, "0x010802", "vfio-pci", Some(group));
        host.file(&format!("dev/vfio/{group}"), "");
    }
    let file = File::options().read(true).write(true).open(host.path("dev/vfio/14")).unwrap();
    let lease = Lease::on(file);
    let vfio = Vfio { sysfs: host.sysfs(), ..Vfio::default() };
    let open = |address: &str| vfio.open(address.parse().unwrap()).unwrap_err();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| open(SLOW));
        lease.await_opener();
        let error = open(OTHER);
        assert!(tried_group(&error), "{error}");
        // It has a place already.
        let error = open(SLOW).to_string();
        assert!(error.contains("is opening it"), "{error}");
        assert!(!slow.is_finished(), "the lease keeps it waiting");
        drop(lease);
        let error = slow.join().unwrap();
        assert!(tried_group(&error), "{error}");
    });
    // A failed open leaves the function free.
    assert!(tried_group(&open(SLOW)));
}
