//! Tests that no file descriptor or mapping of a front-end outlives its session: both are counted before and after. A separate
//! test program with a single test, because the counts are those of the whole process.

#[path = "session/device.rs"]
#[expect(dead_code, reason = "shared with the tests of sessions, which use the rest")]
mod device;
#[path = "session/peer.rs"]
#[expect(dead_code, reason = "as above")]
mod peer;

use aryk_vhost_user::{SessionHandle, Stats, serve_front_end};
use peer::{FrontEnd, Guest, code, eventfd, memfd, message};
use std::os::fd::AsFd;

/// Open file descriptors, and mappings of front-ends' memory, after all released ones were closed and unmapped.
fn count() -> (usize, usize) {
    while aryk_dma::reclaiming().pending > 0 {
        std::thread::yield_now();
    }
    let fds = std::fs::read_dir("/proc/self/fd").expect("/proc/self/fd").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc/self/maps");
    (fds, maps.lines().filter(|line| line.contains("memfd:")).count())
}

/// Runs a session that leaves descriptors in every possible place, and ends in one of several ways.
async fn run_session(end: usize) {
    let (fe, stream) = FrontEnd::pair();
    let device = device::Mock::default();
    device.tracks_inflight.set(true);
    device.logs_writes.set(true);
    let stats = Stats::default();
    let session = serve_front_end(stream, &device, SessionHandle::default(), &stats);
    let front_end = async {
        let (guest, other) = (Guest::new(), Guest::at(0x1000_0000));
        fe.with_queue(&guest).await;
        recover_and_log(&fe).await;
        fe.send(code::ADD_MEM_REG, &other.single_region(), &[other.memory.as_fd()]);
        fe.send(code::SET_VRING_ERR, &bytes![0_u64], &[eventfd().as_fd()]);
        fe.send(code::SET_VRING_CALL, &bytes![3_u64], &[eventfd().as_fd()]);
        let (_channel, theirs) = FrontEnd::pair();
        fe.send(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
        fe.send(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
        fe.send(code::REM_MEM_REG, &other.single_region(), &[other.memory.as_fd()]);
        fe.sync().await;
        assert!(count().1 > 0, "guest memory is mapped");
        let memory = guest.memory.as_fd();
        match end {
            0 => {}
            1 => fe.send(code::SET_VRING_KICK, &bytes![0_u64], &[memory]),
            2 => fe.send(code::SET_VRING_KICK, &bytes![0_u64], &[memory; 8]),
            3 => fe.send(code::SET_VRING_KICK, &bytes![0_u64], &[memory; 20]),
            4 => fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[theirs.as_fd()]),
            // Half a message with a descriptor; and messages that the back-end never reads, with their descriptors.
            5 => fe.send_raw(&message(code::SET_VRING_CALL, 1, &[0; 8])[..15], &[memory]),
            _ => {
                fe.send(99, &[], &[memory]);
                fe.send(code::SET_VRING_CALL, &[0; 8], &[memory]);
            }
        }
        drop(fe);
    };
    let (ended, ()) = tokio::join!(session, front_end);
    assert_eq!(ended.is_ok(), end == 0, "{end}: {ended:?}");
}

/// An in-flight region and a dirty log, each set twice.
async fn recover_and_log(fe: &FrontEnd) {
    for _ in 0..2 {
        fe.send(code::GET_INFLIGHT_FD, &bytes![0_u64, 0_u64, 4_u16, 8_u16], &[]);
        let (region, fd) = fe.reply_with_fd(code::GET_INFLIGHT_FD).await;
        fe.send(code::SET_INFLIGHT_FD, &region, &[fd.as_fd()]);
        let log = memfd(4096);
        fe.send(code::SET_LOG_BASE, &bytes![4096_u64, 0_u64], &[log.as_fd()]);
        fe.reply(code::SET_LOG_BASE).await;
    }
    fe.send(code::SET_LOG_FD, &[], &[eventfd().as_fd()]);
}

#[test]
fn no_descriptor_or_mapping_leaks() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(run_session(0));
    let before = count();
    assert_eq!(before.1, 0, "all guest memory is unmapped");
    for round in 0..70 {
        runtime.block_on(run_session(round % 7));
    }
    assert_eq!(count(), before);
}
