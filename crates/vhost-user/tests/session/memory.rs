//! Tests of memory tables: which mappings change, which stay, and what happens to rings in removed memory.

use crate::device::DeviceCall;
use crate::peer::{Guest, code, memfd};
use crate::{bytes, on_local_set, start};
use aryk_dma::Mapping;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// The mapping of queue 0's region number `region`.
fn mapping(session: &crate::Running, region: usize) -> Weak<Mapping> {
    Arc::downgrade(&session.device.running.borrow()[&0].memory.regions()[region].mapping)
}

#[test]
fn unchanged_regions_keep_their_mappings() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let before = mapping(&session, 0);
        // The same region and another one, through another descriptor of the same file.
        let other = Guest::at(0x1000_0000);
        let table = [bytes![2_u32, 0_u32], other.region(), guest.region()].concat();
        let again = guest.memory.try_clone().expect("dup");
        assert!(fe.try_send(code::SET_MEM_TABLE, &table, &[other.memory.as_fd(), again.as_fd()]).await);
        assert!(before.ptr_eq(&mapping(&session, 0)), "kept");
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0), DeviceCall::Memory(2)]);
        let second = mapping(&session, 1);
        assert!(fe.try_send(code::REM_MEM_REG, &other.single_region(), &[]).await);
        assert!(second.upgrade().is_none(), "unmapped before the answer");
        assert!(before.ptr_eq(&mapping(&session, 0)));
        // The same addresses in another file are another region.
        let moved = memfd(guest.len);
        assert!(fe.try_send(code::SET_MEM_TABLE, &guest.mem_table(), &[moved.as_fd()]).await);
        assert!(before.upgrade().is_none());
        rustix::io::pwrite(&moved, &7_u16.to_le_bytes(), 1026).expect("pwrite");
        assert_eq!(fe.get_base(0).await, 7, "rings were looked up in the new table");
    });
}

#[test]
fn removed_memory_waits_for_its_users() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let other = Guest::at(0x1000_0000);
        assert!(fe.try_send(code::ADD_MEM_REG, &other.single_region(), &[other.memory.as_fd()]).await);
        // A request in flight keeps the table with which it was started.
        let in_flight = Arc::clone(&session.device.running.borrow()[&0].memory);
        fe.send(code::REM_MEM_REG, &other.single_region(), &[]);
        tokio::time::sleep(std::time::Duration::from_millis(30)).await;
        assert_eq!(session.stats.snapshot().messages, 13 + 2);
        let answered = fe.sync();
        tokio::pin!(answered);
        tokio::select! {
            () = &mut answered => panic!("answered while a request used the memory"),
            () = tokio::time::sleep(std::time::Duration::from_millis(30)) => {}
        }
        assert_eq!(session.device.revoked.get(), 0, "requests have some time to complete");
        tokio::select! {
            () = &mut answered => panic!("answered while a request used the memory"),
            () = tokio::time::sleep(std::time::Duration::from_millis(1500)) => {}
        }
        assert!(session.device.revoked.get() > 1, "after that, the device must release the memory");
        drop(in_flight);
        answered.await;
    });
}

#[test]
fn memory_that_its_users_allow_to_replace_is_released_before_them() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let other = Guest::at(0x1000_0000);
        assert!(fe.try_send(code::ADD_MEM_REG, &other.single_region(), &[other.memory.as_fd()]).await);
        let in_flight = Arc::clone(&session.device.running.borrow()[&0].memory);
        let area = in_flight.area_at_guest(0x1000_0000, 8).expect("memory of the other region");
        let of_guest = in_flight.area_at_guest(guest.guest_addr, 8).expect("memory of the first region");
        area.write(0, &0x11_u64);
        session.device.lets_memory_go.set(true);
        assert!(fe.try_send(code::REM_MEM_REG, &other.single_region(), &[]).await, "answered with its user");
        // What a late user writes and reads is its own.
        assert_eq!(area.read::<u64>(0), 0);
        area.write(0, &0x22_u64);
        of_guest.write(0, &0x33_u64);
        let first_byte = |memory: &OwnedFd| {
            let mut byte = [0];
            rustix::io::pread(memory, &mut byte, 0).expect("read");
            byte[0]
        };
        assert_eq!((first_byte(&other.memory), first_byte(&guest.memory)), (0x11, 0x33));
    });
}

#[test]
fn rings_in_removed_memory_wait_until_it_is_added_again() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        guest.set_avail_idx(0, 3);
        assert!(fe.try_send(code::REM_MEM_REG, &guest.single_region(), &[]).await);
        assert!(session.device.running.borrow().is_empty());
        assert_eq!(session.stats.snapshot().rings_outside, 1);
        assert!(fe.try_send(code::ADD_MEM_REG, &guest.single_region(), &[guest.memory.as_fd()]).await);
        assert_eq!(session.device.running.borrow()[&0].base, 3);
        assert_eq!(
            session.device.take_calls(),
            [DeviceCall::Start(0), DeviceCall::Stop(0), DeviceCall::Start(0)]
        );
        assert!(fe.try_send(code::SET_MEM_TABLE, &bytes![0_u32, 0_u32], &[]).await, "no memory at all");
        assert!(session.device.running.borrow().is_empty());
    });
}

#[test]
fn refused_tables_change_nothing() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let (memory, small) = (guest.memory.as_fd(), memfd(4096));
        let add = |addr: u64, len: u64, user: u64, offset: u64| bytes![0_u64, addr, len, user, offset];
        let refused = [
            (add(0x10_1000, 4096, 0, 0), memory, "overlap"),
            (add(0x800_0000, 0, 0, 0), memory, "not a range of whole pages"),
            (add(0x800_0000, 4096, 0x8, 0), memory, "differ within a page"),
            (add(u64::MAX - 4095, 4096, 0, 0), memory, "wraps"),
            (add(0x800_0000, 4096, u64::MAX - 4095, 0), memory, "wraps"),
            (add(0x800_0000, u64::MAX - 4095, 0, 0x2000), memory, "exceed the limit of one front-end"),
            (add(0x800_0000, 1 << 62, 0, 0), memory, "exceed the limit of one front-end"),
            (add(0x800_0000, 1 << 43, 0, 0), memory, "65536 bytes, but"),
            (add(0x800_0000, 4096, 0, u64::MAX - 4095), memory, "not a range of whole pages"),
            (add(0x800_0000, 8192, 0, 0), small.as_fd(), "4096 bytes, but bytes 0..8192"),
            (add(0x800_0000, 4096, 0, 0x1_0000), memory, "65536 bytes, but"),
        ];
        for (payload, fd, expected) in refused {
            assert!(!fe.try_send(code::ADD_MEM_REG, &payload, &[fd]).await, "{expected}");
            let error = session.stats.snapshot().last_error.expect("one");
            assert!(error.contains(expected), "{error}");
        }
        assert!(!fe.try_send(code::REM_MEM_REG, &add(0x10_0000, 4096, 0, 0), &[]).await);
        let twice = [bytes![2_u32, 0_u32], guest.region(), guest.region()].concat();
        assert!(!fe.try_send(code::SET_MEM_TABLE, &twice, &[memory, memory]).await);
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0)]);
        assert_eq!(session.stats.snapshot().memory_errors, 13);
        guest.set_avail_idx(0, 1);
        assert_eq!(fe.get_base(0).await, 1);
    });
}

#[test]
fn regions_up_to_the_number_of_slots() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let many = memfd(509 * 4096);
        let region = |i: u64| bytes![0_u64, 0x4000_0000 + i * 8192, 4096_u64, i * 8192, i * 4096];
        for i in 0..508 {
            assert!(fe.try_send(code::ADD_MEM_REG, &region(i), &[many.as_fd()]).await, "{i}");
        }
        assert!(!fe.try_send(code::ADD_MEM_REG, &region(508), &[many.as_fd()]).await);
        assert_eq!(session.device.running.borrow()[&0].memory.regions().len(), 509);
        assert!(fe.try_send(code::REM_MEM_REG, &region(77), &[]).await);
        assert!(fe.try_send(code::ADD_MEM_REG, &region(508), &[many.as_fd()]).await);
    });
}

#[test]
fn offsets_within_pages_and_files() {
    on_local_set(async {
        let (fe, session) = start();
        fe.negotiate().await;
        // Guest, user and file addresses agree within a page; the file is longer than the region.
        let file = memfd(0x9000);
        let payload = bytes![1_u32, 0_u32, 0x40_0010_u64, 0x4000_u64, 0x7f12_3010_u64, 0x2010_u64];
        assert!(fe.try_send(code::SET_MEM_TABLE, &payload, &[file.as_fd()]).await);
        let user = 0x7f12_3010_u64;
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 8_u32], &[]);
        let addr = bytes![0_u32, 0_u32, user, user + 0x3000, user + 0x1000, 0_u64];
        fe.send(code::SET_VRING_ADDR, &addr, &[]);
        fe.start_queue(0);
        rustix::io::pwrite(&file, &4_u16.to_le_bytes(), 0x2010 + 0x1000 + 2).expect("pwrite");
        fe.sync().await;
        assert!(session.device.running.borrow().contains_key(&0));
        assert_eq!(fe.get_base(0).await, 4);
        // A queue whose ring extends beyond its region does not run.
        let beyond = bytes![0_u32, 0_u32, user, user + 0x4000 - 64, user + 0x1000, 0_u64];
        fe.send(code::SET_VRING_ADDR, &beyond, &[]);
        fe.start_queue(0);
        fe.sync().await;
        assert!(session.device.running.borrow().is_empty());
    });
}
