//! The kernel's uevents: PCI functions that appear, go, or get another driver. Control context.
//!
//! A [`Uevents`] is a netlink socket in the multicast group of the kernel's own messages, which need no udev. The socket never
//! blocks: its owner waits until it is readable. A message is text that is checked within bounds; messages of other senders are
//! dropped. A caller only learns that functions have changed, and reads sysfs then: a lost message is reported as such a change.

use crate::PciError;
use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SocketAddrAny, SocketFlags, SocketType, bind,
    recvmsg, socket_with,
};
use std::ffi::c_void;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The multicast group of the kernel's messages; udev has another for its own.
const GROUP_KERNEL: u32 = 1;
/// Bytes of a message: the kernel's have a path and at most 2 KiB of variables.
const MESSAGE_MAX: usize = 8192;
/// Variables of a message that are looked at: the kernel's have at most 64.
const VARIABLES_MAX: usize = 64;
/// The inode of the first user namespace (`PROC_USER_INIT_INO` of the kernel).
const FIRST_USER_NAMESPACE: u64 = 0xefff_fffd;

/// What a message of the socket says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uevent {
    /// A PCI function has appeared, gone, or got another driver; or messages were lost, which may have said so.
    FunctionsChanged,
    /// Anything else.
    Other,
}

/// A socket that receives the kernel's uevents.
#[derive(Debug)]
pub struct Uevents(OwnedFd);

impl Uevents {
    /// Opens the socket. It receives what happens from now on.
    ///
    /// # Errors
    /// [`PciError::Unsupported`] if the network namespace of this process belongs to a user namespace of its own: the kernel
    /// sends no uevents of devices there. [`PciError::Os`] if the kernel refuses the socket, for example because the sandbox of
    /// this process allows no `AF_NETLINK`.
    pub fn open() -> Result<Self, PciError> {
        let failed = |errno| PciError::os("open a socket for uevents", errno);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(KOBJECT_UEVENT));
        let socket = socket.map_err(failed)?;
        bind(&socket, &SocketAddrNetlink::new(0, GROUP_KERNEL)).map_err(failed)?;
        if is_deaf() {
            return Err(PciError::Unsupported("uevents in the network namespace of a container"));
        }
        Ok(Self(socket))
    }

    /// Takes the next message.
    ///
    /// # Errors
    /// `EAGAIN` if there is none; others if the socket fails.
    pub fn next(&self) -> Result<Uevent, Errno> {
        let mut message = [0; MESSAGE_MAX];
        let mut space = RecvAncillaryBuffer::default();
        match recvmsg(&self.0, &mut [IoSliceMut::new(&mut message)], &mut space, RecvFlags::DONTWAIT) {
            Ok(received) => {
                let is_whole = !received.flags.contains(ReturnFlags::TRUNC);
                let text = message.get(..received.bytes).filter(|_| is_whole);
                Ok(judge(received.address, text))
            }
            // The kernel had no room for messages.
            Err(Errno::NOBUFS) => Ok(Uevent::FunctionsChanged),
            Err(Errno::INTR) => Ok(Uevent::Other),
            Err(errno) => Err(errno),
        }
    }
}

impl AsRawFd for Uevents {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What a message of this sender says; without a text, it was longer than any of the kernel's.
fn judge(sender: Option<SocketAddrAny>, text: Option<&[u8]>) -> Uevent {
    let sender = sender.and_then(|address| SocketAddrNetlink::try_from(address).ok());
    // Processes have ports; the kernel has none.
    if sender.is_none_or(|sender| sender.pid() != 0) {
        return Uevent::Other;
    }
    match text {
        Some(text) if !tells_of_functions(text) => Uevent::Other,
        Some(_) | None => Uevent::FunctionsChanged,
    }
}

/// Whether a message of the form `ACTION@PATH`, followed by variables, reports a PCI function that has appeared, gone or got
/// another driver. A zero byte ends each part.
fn tells_of_functions(message: &[u8]) -> bool {
    let mut parts = message.split(|byte| *byte == 0);
    let Some(head) = parts.next() else { return false };
    let mut words = head.splitn(2, |byte| *byte == b'@');
    let (Some(action), Some(_path)) = (words.next(), words.next()) else { return false };
    let is_meant: [&[u8]; 4] = [b"add", b"remove", b"bind", b"unbind"];
    is_meant.contains(&action) && parts.take(VARIABLES_MAX).any(|variable| variable == b"SUBSYSTEM=pci")
}

/// Whether the kernel sends no uevents of devices to this process: its network namespace belongs to another user namespace than
/// the first. If that cannot be known, the answer is no.
fn is_deaf() -> bool {
    let Ok(network) = open(c"/proc/self/ns/net", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return false;
    };
    // SAFETY: the call takes no argument, and returns a new descriptor.
    let owner = unsafe { ioctl(&network, OwnerOfNamespace) };
    // EPERM: the owner is outside of this process's user namespace, as the host's network is for a container that shares it.
    owner.and_then(fstat).is_ok_and(|owner| owner.st_ino != FIRST_USER_NAMESPACE)
}

/// `NS_GET_USERNS` of `include/uapi/linux/nsfs.h`: the user namespace that owns a namespace.
struct OwnerOfNamespace;

// SAFETY: the kernel reads and writes no argument, and the output is a descriptor that nothing else owns.
unsafe impl Ioctl for OwnerOfNamespace {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(0xb7, 1)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the call has succeeded, so that the output is a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BIND: &[u8] = b"bind@/devices/pci0000:00/0000:00:18.0/0000:01:00.0\0ACTION=bind\0\
        DEVPATH=/devices/pci0000:00/0000:00:18.0/0000:01:00.0\0SUBSYSTEM=pci\0DRIVER=vfio-pci\0PCI_CLASS=10802\0SEQNUM=7\0";

    fn kernel() -> Option<SocketAddrAny> {
        Some(SocketAddrNetlink::new(0, GROUP_KERNEL).into())
    }

    fn replace(from: &str, to: &str) -> Vec<u8> {
        String::from_utf8(BIND.to_vec()).unwrap().replace(from, to).into_bytes()
    }

    #[test]
    fn changes_of_functions_are_found() {
        for action in ["add", "remove", "bind", "unbind"] {
            let message = replace("bind", action);
            assert_eq!(judge(kernel(), Some(&message)), Uevent::FunctionsChanged, "{action}");
        }
        for (from, to) in [
            ("bind@", "change@"),
            ("bind@", "bindbind@"),
            ("bind@", "@"),
            ("bind@", "bind"),
            ("SUBSYSTEM=pci", "SUBSYSTEM=pci_bus"),
            ("SUBSYSTEM=pci", "XSUBSYSTEM=pci"),
            ("SUBSYSTEM=pci", "SUBSYSTEM=block"),
            ("SUBSYSTEM=pci\0", ""),
        ] {
            assert_eq!(judge(kernel(), Some(&replace(from, to))), Uevent::Other, "{from} {to}");
        }
        assert_eq!(judge(kernel(), Some(b"")), Uevent::Other);
        let many = [&b"add@/a\0"[..], &b"A=1\0".repeat(VARIABLES_MAX), b"SUBSYSTEM=pci\0"].concat();
        assert_eq!(judge(kernel(), Some(&many)), Uevent::Other, "no more variables are looked at");
    }

    #[test]
    fn messages_of_processes_are_dropped_and_cut_ones_count_as_changes() {
        for sender in [None, Some(SocketAddrNetlink::new(1, GROUP_KERNEL).into())] {
            assert_eq!(judge(sender.clone(), Some(BIND)), Uevent::Other, "{sender:?}");
            assert_eq!(judge(sender, None), Uevent::Other);
        }
        assert_eq!(judge(kernel(), None), Uevent::FunctionsChanged);
    }

    #[test]
    fn the_socket_never_blocks() {
        match Uevents::open() {
            // Other programs of this host may cause messages.
            Ok(uevents) => while uevents.next().map_err(|errno| assert_eq!(errno, Errno::AGAIN)).is_ok() {},
            Err(error) => assert!(
                matches!(
                    error,
                    PciError::Unsupported(_) | PciError::Os { errno: Errno::AFNOSUPPORT | Errno::PERM, .. }
                ),
                "{error}"
            ),
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let is_change = judge(kernel(), Some(&bytes)) == Uevent::FunctionsChanged;
            prop_assert!(!is_change || bytes.windows(13).any(|part| part == b"SUBSYSTEM=pci"));
        }
    }
}
