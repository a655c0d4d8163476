//! Tests the limit of memory regions of all guests together. A separate test program with a single test, because the limit is
//! that of the whole process.

#[path = "session/device.rs"]
#[expect(dead_code, reason = "shared with the tests of sessions, which use the rest")]
mod device;
#[path = "session/peer.rs"]
#[expect(dead_code, reason = "as above")]
mod peer;

use aryk_dma::Limits;
use aryk_vhost_user::{SessionHandle, Stats, serve_front_end};
use peer::{FrontEnd, code, memfd};
use std::os::fd::AsFd;

/// The number of regions that a guest can add before the back-end refuses one.
async fn most_regions(fe: &FrontEnd) -> u64 {
    let memory = memfd(4096);
    let mut count = 0_u64;
    loop {
        let region = bytes![0_u64, count * 8192, 4096_u64, count * 8192, 0_u64];
        if !fe.try_send(code::ADD_MEM_REG, &region, &[memory.as_fd()]).await {
            return count;
        }
        count += 1;
    }
}

#[test]
fn half_of_the_regions_are_reserved_for_guests_with_few() {
    Limits { mappings: 64, ..Limits::DEFAULT }.set();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let (devices, stats) =
            ([(); 2].map(|()| device::Mock::default()), [(); 2].map(|()| Stats::default()));
        let [(many, theirs), (few, others)] = [FrontEnd::pair(), FrontEnd::pair()];
        let front_ends = async {
            many.negotiate().await;
            assert_eq!(most_regions(&many).await, 32);
            let error = stats[0].snapshot().last_error.expect("an error");
            assert!(error.contains("sysctl vm.max_map_count"), "{error}");
            few.negotiate().await;
            assert_eq!(most_regions(&few).await, 8);
            drop((many, few));
        };
        let (first, second, ()) = tokio::join!(
            serve_front_end(theirs, &devices[0], SessionHandle::default(), &stats[0]),
            serve_front_end(others, &devices[1], SessionHandle::default(), &stats[1]),
            front_ends
        );
        assert!(first.is_ok() && second.is_ok(), "{first:?}, {second:?}");
    });
}
