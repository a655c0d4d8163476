//! Tests of the limits of the resources that a front-end can make the back-end hold.

use crate::peer::{FrontEnd, Guest, code, eventfd, memfd};
use crate::{bytes, on_local_set, start};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};

const TIB: u64 = 1 << 40;

fn sparse(len: u64) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&fd, len).expect("ftruncate");
    fd
}

/// A region: guest address, size, user address, offset.
fn region(at: u64, size: u64) -> Vec<u8> {
    bytes![at, size, at, 0_u64]
}

#[test]
fn twelve_tib_of_guest_memory_are_accepted_and_thirty_two_refused() {
    on_local_set(async {
        let (fe, session) = start();
        fe.negotiate().await;
        let memory = sparse(32 * TIB);
        let table = |size| [bytes![1_u32, 0_u32], region(0, size)].concat();
        assert!(fe.try_send(code::SET_MEM_TABLE, &table(12 * TIB), &[memory.as_fd()]).await);
        // All memory in other regions: for a short time both tables are mapped.
        assert!(fe.try_send(code::SET_MEM_TABLE, &table(12 * TIB + 4096), &[memory.as_fd()]).await);
        assert!(!fe.try_send(code::SET_MEM_TABLE, &table(32 * TIB), &[memory.as_fd()]).await);
        let more = [bytes![0_u64], region(16 * TIB, 8 * TIB)].concat();
        assert!(!fe.try_send(code::ADD_MEM_REG, &more, &[memory.as_fd()]).await);
        let error = session.stats.snapshot().last_error.expect("an error");
        assert!(error.contains("--guest-memory-max") && error.contains("17592186044416"), "{error}");
        // The session continues with the previous regions.
        assert!(
            fe.try_send(code::REM_MEM_REG, &[bytes![0_u64], region(0, 12 * TIB + 4096)].concat(), &[]).await
        );
    });
}

/// Removed regions take longer to be unmapped than new regions take to be announced.
#[test]
fn guest_memory_that_is_replaced_repeatedly_is_mapped_at_most_twice() {
    on_local_set(async {
        let (fe, _session) = start();
        fe.negotiate().await;
        let memory = sparse(17 * TIB);
        let table = |at| [bytes![1_u32, 0_u32], region(at, 16 * TIB)].concat();
        for i in 0..12 {
            let announced = fe.try_send(code::SET_MEM_TABLE, &table(i * 4096), &[memory.as_fd()]).await;
            let mapped = aryk_dma::mapped().0 / TIB;
            // Another test maps up to twice 12 TiB.
            assert!(announced && mapped <= 32 + 24, "{mapped} TiB after {i} replacements");
        }
    });
}

/// The back-end maps only the useful part of a log.
#[test]
fn a_log_of_terabytes_is_mapped_in_part() {
    on_local_set(async {
        let (fe, session) = start();
        session.device.logs_writes.set(true);
        fe.negotiate().await;
        let (guest, log) = (Guest::new(), memfd_create("terabytes", MemfdFlags::CLOEXEC).expect("memfd"));
        ftruncate(&log, 100 * TIB).expect("ftruncate");
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        fe.send(code::SET_LOG_BASE, &bytes![100 * TIB, 0_u64], &[log.as_fd()]);
        fe.reply(code::SET_LOG_BASE).await;
        let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc/self/maps");
        let line = maps.lines().find(|line| line.contains("memfd:terabytes")).expect("the log is mapped");
        let (start, end) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let address = |hex| u64::from_str_radix(hex, 16).expect("an address");
        assert_eq!(address(end) - address(start), 4 << 30);
    });
}

#[test]
fn replaced_channels_are_limited() {
    on_local_set(async {
        let (fe, session) = start();
        fe.negotiate().await;
        for _ in 0..100 {
            let (_channel, theirs) = FrontEnd::pair();
            if !fe.try_send(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).await {
                break;
            }
        }
        let error = session.stats.snapshot().last_error.expect("an error");
        assert!(error.contains("SET_BACKEND_REQ_FD"), "{error}");
    });
}

/// Neither refused memory files nor the descriptors of other messages stay open.
#[test]
fn received_descriptors_are_closed() {
    on_local_set(async {
        let (fe, _session) = start();
        fe.negotiate().await;
        let open = || std::fs::read_dir("/proc/self/fd").expect("/proc/self/fd").count();
        let before = open();
        for _ in 0..500 {
            let memory = [(); 8].map(|()| memfd(4096));
            let bad = [bytes![8_u32, 0_u32], (0..8).flat_map(|_| region(0, 8192)).collect()].concat();
            assert!(!fe.try_send(code::SET_MEM_TABLE, &bad, &memory.each_ref().map(AsFd::as_fd)).await);
            assert!(fe.try_send(code::SET_VRING_CALL, &bytes![0_u64], &[eventfd().as_fd()]).await);
        }
        // 64 descriptors may wait to be closed, and other tests open some.
        assert!(open() < before + 1000, "{} after {before}", open());
    });
}

#[test]
fn a_queue_that_is_too_large_is_refused_when_its_size_is_set() {
    on_local_set(async {
        let (fe, session) = start();
        fe.negotiate().await;
        assert!(fe.try_send(code::SET_VRING_NUM, &bytes![0_u32, 1024_u32], &[]).await);
        assert!(!fe.try_send(code::SET_VRING_NUM, &bytes![0_u32, 2048_u32], &[]).await);
        let error = session.stats.snapshot().last_error.expect("an error");
        assert!(
            error.contains("1024") && error.contains("--queue-size-max"),
            "the error says what to do: {error}"
        );
    });
}
