//! An NVMe drive as the disk: `arykd` drives it by VFIO, and the kernel's driver gives access to its content before and after.
//! Test tool, the front-end's thread.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::process::wait_until;
use aryk_pci::Address;
use aryk_pci::sysfs::{BlockDevice, Sysfs};

/// How long the kernel may take to identify the drive.
const PROBE: Duration = Duration::from_secs(20);

/// The bytes of a block of the drive's namespace.
///
/// # Errors
/// The kernel does not get the drive, or it has other namespaces than one.
pub fn block_size(drive: Address) -> Result<u32> {
    let device = returned(drive)?;
    let path = format!("/sys/class/block/{}/queue/logical_block_size", device.name);
    std::fs::read_to_string(&path)?.trim().parse().context(path)
}

/// Fills the namespace, and gives the drive to VFIO.
///
/// # Errors
/// The namespace has another size, or something uses it.
pub fn fill(drive: Address, bytes: &[u8]) -> Result<()> {
    let device = returned(drive)?;
    ensure!(
        device.size == bytes.len() as u64,
        "{} has {} bytes, not {}",
        device.name,
        device.size,
        bytes.len()
    );
    let path = path(&device);
    let mut file = File::options().write(true).open(&path).with_context(|| path.display().to_string())?;
    file.write_all(bytes)?;
    file.sync_all()?;
    drop(file);
    // Programs of the system open each new drive for a moment.
    let mut refusal = String::new();
    let bound = wait_until("VFIO to get the drive", PROBE, || match Sysfs::default().bind(drive) {
        Ok(_) => Ok(Some(())),
        Err(error) => {
            refusal = error.to_string();
            Ok(None)
        }
    });
    bound.with_context(|| refusal)
}

/// Takes the drive from VFIO, and reads its namespace.
///
/// # Errors
/// A process still has the drive, or it cannot be read.
pub fn content(drive: Address) -> Result<Vec<u8>> {
    let path = path(&returned(drive)?);
    std::fs::read(&path).with_context(|| path.display().to_string())
}

fn path(device: &BlockDevice) -> PathBuf {
    PathBuf::from("/dev").join(&device.name)
}

/// Gives the drive back to the kernel's driver, and returns its namespace.
fn returned(drive: Address) -> Result<BlockDevice> {
    let sysfs = Sysfs::default();
    sysfs.unbind(drive)?;
    wait_until("the kernel to identify the drive", PROBE, || {
        let mut devices = sysfs.block_devices(drive)?;
        ensure!(devices.len() < 2, "{drive} has {} namespaces", devices.len());
        Ok(devices.pop().filter(|device| device.size > 0 && path(device).exists()))
    })
}
