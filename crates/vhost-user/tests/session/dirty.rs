//! Tests of dirty logs: started, replaced and ended while queues run; and invalid logs.

use crate::device::{DeviceCall, Mock};
use crate::peer::{FrontEnd, Guest, RING_SPACE, code, eventfd, memfd};
use crate::{Running, bytes, on_local_set, start_with};
use aryk_vhost_user::F_RING_PACKED;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

const LOG_ALL: u64 = 1 << 26;
/// Bytes of a log for the first 4 MiB, which contain the guest's memory.
const LOG_LEN: u64 = 128;

fn start_logging() -> (FrontEnd, Running) {
    let device = Rc::new(Mock::default());
    device.logs_writes.set(true);
    device.packed.set(true);
    start_with(device)
}

/// The payload of SET_VRING_ADDR for a logged ring.
fn logged_ring(guest: &Guest, index: u32) -> Vec<u8> {
    let at = u64::from(index) * RING_SPACE;
    let user = guest.user_addr + at;
    bytes![index, 1_u32, user, user + 2048, user + 1024, guest.guest_addr + at + 2048]
}

/// Sends SET_LOG_BASE, which has a reply even without a request for one.
async fn set_log(fe: &FrontEnd, log: &OwnedFd) {
    let desc = bytes![LOG_LEN, 0_u64];
    fe.send(code::SET_LOG_BASE, &desc, &[log.as_fd()]);
    assert_eq!(fe.reply(code::SET_LOG_BASE).await, desc);
}

/// The pages whose bits are set.
fn marked(log: &OwnedFd) -> Vec<u64> {
    let mut bytes = [0_u8; LOG_LEN as usize];
    rustix::io::pread(log, &mut bytes, 0).expect("pread");
    (0..LOG_LEN * 8).filter(|page| bytes[(page / 8) as usize] & (1 << (page % 8)) != 0).collect()
}

#[test]
fn a_migration_begins_and_ends_while_a_queue_runs() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_logging());
        fe.negotiate().await;
        let features = (fe.ask(code::GET_FEATURES).await) & !LOG_ALL & !F_RING_PACKED;
        fe.send(code::SET_FEATURES, &bytes![features], &[]);
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        for index in [0, 1] {
            fe.describe_queue(&guest, index, 0);
            fe.start_queue(index);
        }
        fe.sync().await;
        let device = &session.device;
        assert_eq!(device.running.borrow()[&0].log, None);
        assert_eq!(device.take_calls(), [DeviceCall::Start(0), DeviceCall::Start(1)]);
        // The messages in QEMU's order.
        let log = memfd(LOG_LEN);
        set_log(&fe, &log).await;
        assert!(fe.try_send(code::SET_LOG_FD, &[], &[eventfd().as_fd()]).await);
        assert_eq!(device.take_calls(), [], "the features determine what is logged");
        assert!(fe.try_send(code::SET_FEATURES, &bytes![features | LOG_ALL], &[]).await);
        assert_eq!(
            device.take_calls(),
            [DeviceCall::Log(0, true), DeviceCall::Log(1, true)],
            "and the queues keep running"
        );
        assert!(fe.try_send(code::SET_VRING_ADDR, &logged_ring(&guest, 0), &[]).await);
        assert_eq!(device.take_calls(), [DeviceCall::Log(0, true)]);
        assert!(fe.try_send(code::SET_VRING_ADDR, &logged_ring(&guest, 0), &[]).await, "again");
        assert_eq!(device.take_calls(), []);
        // The log as the queue uses it.
        let queue = device.running.borrow()[&0].log.clone().expect("a log");
        queue.log.mark(guest.guest_addr + 7 * 4096, 2);
        queue.mark_ring();
        assert_eq!(marked(&log), [0x100, 0x107]);
        device.running.borrow()[&1].log.as_ref().expect("a log").mark_ring();
        assert_eq!(marked(&log), [0x100, 0x107], "the ring of queue 1 is not logged");
        // A larger log replaces the first one; after the answer no queue uses the old log.
        let larger = memfd(LOG_LEN);
        let old = Arc::downgrade(&queue.log);
        drop(queue);
        set_log(&fe, &larger).await;
        assert!(old.upgrade().is_none());
        assert_eq!(device.take_calls(), [DeviceCall::Log(0, true), DeviceCall::Log(1, true)]);
        // A queue that starts now logs from its start, and a queue that stops marks the writes of its last requests.
        fe.get_base(0).await;
        assert_eq!(marked(&larger), [0x100]);
        fe.start_queue(0);
        fe.sync().await;
        assert!(device.running.borrow()[&0].log.is_some());
        device.take_calls();
        assert!(fe.try_send(code::SET_FEATURES, &bytes![features], &[]).await);
        assert!(fe.try_send(code::SET_VRING_ADDR, &guest.ring_addr(0), &[]).await);
        assert_eq!(device.take_calls(), [DeviceCall::Log(0, false), DeviceCall::Log(1, false)]);
        assert_eq!(device.running.borrow()[&0].features & LOG_ALL, 0, "the bit is hidden from the device");
    });
}

#[test]
fn a_packed_ring_is_logged_where_it_is_written() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_logging());
        fe.negotiate().await;
        let log = memfd(LOG_LEN);
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 300_u32], &[]);
        // Descriptors are on pages 2 and 3, event suppression is on page 1.
        let user = guest.user_addr;
        let device_event = guest.guest_addr + 4096 + 8;
        let addr = bytes![0_u32, 1_u32, user + 8192, user + 4096 + 8, user + 4096, device_event];
        fe.send(code::SET_VRING_ADDR, &addr, &[]);
        fe.start_queue(0);
        set_log(&fe, &log).await;
        session.device.running.borrow()[&0].log.as_ref().expect("all features are on").mark_ring();
        assert_eq!(marked(&log), [0x101, 0x102, 0x103]);
        assert!(fe.try_send(code::REM_MEM_REG, &guest.single_region(), &[]).await);
        // The memory is added again at another guest address.
        let region = bytes![0_u64, guest.guest_addr + 0x10_0000, guest.len, guest.user_addr, 0_u64];
        assert!(fe.try_send(code::ADD_MEM_REG, &region, &[guest.memory.as_fd()]).await);
        session.device.running.borrow()[&0].log.as_ref().expect("logging").mark_ring();
        assert_eq!(marked(&log), [0x101, 0x102, 0x103, 0x202, 0x203]);
    });
}

#[test]
fn invalid_logs_are_refused() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_logging());
        fe.with_queue(&guest).await;
        let file = memfd(8192);
        // The guest's memory ends at 1 MiB + 64 KiB, which is page 272.
        let refused = [
            (33_u64, 0_u64, "has no bits for guest memory up to 0x110000"),
            (0, 0, "not a range of whole pages"),
            (4096, 8192, "8192 bytes, but"),
            (4096, 4095, "not a range of whole pages"),
            (u64::MAX, 0, "8192 bytes, but"),
            (u64::MAX, 4096, "not a range of whole pages"),
        ];
        for (size, offset, expected) in refused {
            assert!(!fe.try_send(code::SET_LOG_BASE, &bytes![size, offset], &[file.as_fd()]).await);
            let error = session.stats.snapshot().last_error.expect("one");
            assert!(error.contains(expected), "{error}");
        }
        fe.send(code::SET_LOG_BASE, &bytes![34_u64, 4096_u64], &[file.as_fd()]);
        assert_eq!(fe.reply(code::SET_LOG_BASE).await, bytes![34_u64, 4096_u64]);
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0), DeviceCall::Log(0, true)]);
        // Rings with a misaligned log address, with unknown flags, and beyond the log, which are not marked.
        let user = guest.user_addr;
        let ring = |flags: u32, log: u64| bytes![0_u32, flags, user, user + 2048, user + 1024, log];
        assert!(!fe.try_send(code::SET_VRING_ADDR, &ring(1, 2), &[]).await);
        assert!(!fe.try_send(code::SET_VRING_ADDR, &ring(2, 0), &[]).await);
        assert!(!fe.try_send(code::SET_VRING_ADDR, &ring(3, 0), &[]).await);
        assert!(fe.try_send(code::SET_VRING_ADDR, &ring(1, u64::MAX - 3), &[]).await);
        let log = session.device.running.borrow()[&0].log.clone().expect("a log");
        log.mark_ring();
        assert_eq!(log.log.beyond(), 1);
        drop(log);
        // More memory than the log covers, and a shorter file: the session continues.
        let other = Guest::at(0x1000_0000);
        assert!(fe.try_send(code::ADD_MEM_REG, &other.single_region(), &[other.memory.as_fd()]).await);
        drop(fe);
        session.end().await.expect("no error");
    });
}
