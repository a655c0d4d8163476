//! Devices whose kernel is this test, at the other end of a socket that keeps messages apart.

use std::sync::Mutex;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use zerocopy::IntoBytes;

use super::*;
use crate::ioctl::{Passthru, number};
use crate::policy::Access;
use crate::wire::tests::{init_message, interrupt_message, ioctl_message, release_message};

const NODE: Node = Node { nsid: Some(3), access: Access::Change };

/// An owner that keeps all requests.
#[derive(Default)]
struct Owner(Mutex<Vec<(Request, Caller, Answer)>>);

impl NvmeDevice for Owner {
    fn serve(&self, request: Request, caller: Caller, answer: Answer) {
        self.0.lock().unwrap().push((request, caller, answer));
    }
}

impl Owner {
    /// The oldest request that the owner has, once there is one.
    fn next(&self) -> (Request, Caller, Answer) {
        for _ in 0..5000 {
            let mut kept = self.0.lock().unwrap();
            if !kept.is_empty() {
                return kept.remove(0);
            }
            drop(kept);
            pause();
        }
        panic!("no request reached the owner");
    }
}

#[expect(clippy::disallowed_methods, reason = "a test without a reactor waits")]
fn pause() {
    std::thread::sleep(Duration::from_millis(1));
}

/// The kernel's side of a connection.
struct Kernel(OwnedFd);

impl Kernel {
    fn pair() -> (Self, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::ioctl_fionbio(&theirs, true).unwrap();
        (Self(ours), theirs)
    }

    fn send(&self, message: &[u8]) {
        assert_eq!(write(&self.0, message).unwrap(), message.len());
    }

    /// The next reply: its request, its error, its content.
    fn reply(&self) -> (u64, i32, Vec<u8>) {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap();
        assert_eq!(ready, 1, "no reply in 10 s");
        let mut bytes = vec![0; 2 * BUFFER];
        let len = read(&self.0, &mut bytes).unwrap();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(word(0) as usize, len);
        (u64::from_ne_bytes(bytes[8..16].try_into().unwrap()), word(4) as i32, bytes[16..len].to_vec())
    }

    /// The third round of Identify.
    fn identify(&self, unique: u64) {
        let fields = Passthru { opcode: 6, data_len: 8, addr: 0x1000, ..Passthru::default() };
        let mut input = fields.as_bytes().to_vec();
        input.resize(72, 0);
        self.send(&ioctl_message(unique, number::ADMIN_CMD, 0x2000, &input, 12));
    }
}

fn device() -> (Kernel, Device, Arc<Owner>) {
    let (kernel, theirs) = Kernel::pair();
    kernel.send(&init_message(7, 37, 1));
    let owner = Arc::new(Owner::default());
    let device = Device::over(theirs, "test", NODE, Arc::clone(&owner) as _).unwrap();
    let (unique, error, init) = kernel.reply();
    assert_eq!((unique, error), (1, 0));
    assert!(init.ends_with(b"DEVNAME=test\0"));
    assert_eq!(init[..16].as_bytes(), [7, wire::MINOR, 0, 1].as_bytes());
    (kernel, device, owner)
}

#[test]
fn commands_are_answered_in_any_order() {
    let (kernel, _device, owner) = device();
    kernel.identify(10);
    kernel.identify(12);
    let (first, second) = (owner.next(), owner.next());
    assert_eq!((first.1, &first.0), (Caller { uid: 10, gid: 20, pid: 30 }, &second.0));
    second.2.complete(Ok(Completion { status: 0, result: 5, data: vec![1; 4096] }));
    let (unique, error, body) = kernel.reply();
    assert_eq!((unique, error), (12, 0));
    assert_eq!(body[16..], [5, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
    first.2.complete(Err(Errno::BUSY));
    assert_eq!(kernel.reply(), (10, -Errno::BUSY.raw_os_error(), Vec::new()));
    // An owner that forgets a request.
    kernel.identify(14);
    drop(owner.next());
    assert_eq!(kernel.reply(), (14, -Errno::IO.raw_os_error(), Vec::new()));
}

#[test]
fn an_interrupted_caller_does_not_wait_for_the_controller() {
    let (kernel, _device, owner) = device();
    kernel.identify(10);
    let (_, _, answer) = owner.next();
    kernel.send(&interrupt_message(10));
    assert_eq!(kernel.reply(), (10, -Errno::INTR.raw_os_error(), Vec::new()));
    // Neither a second interrupt nor the late answer causes a reply.
    kernel.send(&interrupt_message(10));
    answer.complete(Ok(Completion::default()));
    kernel.send(&interrupt_message(10));
    kernel.send(&release_message(20));
    assert_eq!(kernel.reply(), (20, 0, Vec::new()));
}

#[test]
fn commands_in_flight_are_limited_and_others_are_still_answered() {
    let (kernel, _device, owner) = device();
    for unique in 0..IN_FLIGHT_MAX as u64 {
        kernel.identify(2 * unique);
    }
    // An interrupted command still counts.
    kernel.send(&interrupt_message(0));
    assert_eq!(kernel.reply().0, 0);
    kernel.identify(100);
    assert_eq!(kernel.reply(), (100, -Errno::BUSY.raw_os_error(), Vec::new()));
    kernel.send(&release_message(102));
    assert_eq!(kernel.reply().0, 102);
    owner.next().2.complete(Ok(Completion::default()));
    kernel.identify(104);
    for _ in 0..IN_FLIGHT_MAX {
        owner.next().2.complete(Ok(Completion::default()));
        assert_eq!(kernel.reply().1, 0);
    }
}

#[test]
fn a_dropped_device_ends_at_once_with_commands_in_flight() {
    let (kernel, device, owner) = device();
    kernel.identify(10);
    let (_, _, answer) = owner.next();
    // Hangs here if the thread waits for the command.
    drop(device);
    let mut fds = [PollFd::new(&kernel.0, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    assert!(fds[0].revents().contains(PollFlags::HUP), "the descriptor is still open");
    answer.complete(Ok(Completion::default()));
}

#[test]
fn a_kernel_that_ends_the_connection_ends_the_thread() {
    let (kernel, device, _owner) = device();
    drop(kernel);
    for _ in 0..5000 {
        if device.thread.as_ref().unwrap().is_finished() {
            return;
        }
        pause();
    }
    panic!("the thread still runs");
}

#[test]
fn a_handshake_that_does_not_fit_is_refused() {
    let shake = |message: &[u8]| {
        let (kernel, theirs) = Kernel::pair();
        kernel.send(message);
        Device::over(theirs, "test", NODE, Arc::new(Owner::default()) as _).unwrap_err()
    };
    assert!(matches!(shake(&init_message(8, 0, 1)), CuseError::Version(8, 0)));
    assert!(matches!(shake(&init_message(7, 15, 1)), CuseError::Version(7, 15)));
    assert!(matches!(shake(&init_message(7, 37, 0)), CuseError::Version(7, 37)));
    assert!(matches!(shake(&release_message(1)), CuseError::Handshake));
    assert!(matches!(shake(&[1, 2, 3]), CuseError::Handshake));
}

#[test]
fn names_stay_below_dev() {
    for name in ["nvme0", "aryk/nvme0n1", "a.b_c-d"] {
        check_name(name).unwrap();
    }
    let long = "x".repeat(NAME_MAX + 1);
    for name in ["", "/nvme0", "a/", "../sda", "a/../b", "a/b/c", ".x", "a b", "a=b", "a\0b", "a\nb", &long] {
        assert!(matches!(check_name(name), Err(CuseError::BadName(_))), "{name:?}");
    }
    let owner = Arc::new(Owner::default());
    assert!(matches!(Device::create("null", NODE, owner), Err(CuseError::Exists(_))));
}
