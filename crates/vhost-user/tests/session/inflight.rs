//! Tests of in-flight regions: created, kept, passed back; and invalid regions.

use crate::device::{DeviceCall, Mock};
use crate::peer::{F_PROTOCOL_FEATURES, FrontEnd, Guest, VERSION_1, code, memfd};
use crate::{Running, bytes, on_local_set, start_with};
use aryk_vhost_user::F_RING_PACKED;
use rustix::fs::{SealFlags, fstat, ftruncate};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;

fn start_tracking() -> (FrontEnd, Running) {
    let device = Rc::new(Mock::default());
    device.tracks_inflight.set(true);
    device.packed.set(true);
    start_with(device)
}

const SPLIT: u64 = F_PROTOCOL_FEATURES | VERSION_1;

/// A front-end with split rings that has described queue 0.
async fn describe(fe: &FrontEnd, guest: &Guest) {
    fe.negotiate().await;
    fe.send(code::SET_FEATURES, &bytes![SPLIT], &[]);
    fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
    fe.describe_queue(guest, 0, 0);
}

/// The 20 bytes of the specification's structure.
fn desc(size: u64, offset: u64, queues: u16, queue_size: u16) -> Vec<u8> {
    bytes![size, offset, queues, queue_size]
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[test]
fn the_front_end_receives_a_region_and_passes_it_back() {
    on_local_set(async {
        for (features, each) in [(SPLIT, 192), (SPLIT | F_RING_PACKED, 320)] {
            let (guest, (fe, session)) = (Guest::new(), start_tracking());
            describe(&fe, &guest).await;
            fe.send(code::SET_FEATURES, &bytes![features], &[]);
            let padded = [desc(0, 0, 3, 8), vec![0; 4]].concat();
            fe.send(code::GET_INFLIGHT_FD, &padded, &[]);
            let (reply, fd) = fe.reply_with_fd(code::GET_INFLIGHT_FD).await;
            assert_eq!(reply[16..], bytes![3_u16, 8_u16, 0_u32]);
            let size = u64_at(&reply, 0);
            assert_eq!((size, u64_at(&reply, 8)), (3 * 320, 0), "the region has room for packed rings");
            assert_eq!(fstat(&fd).expect("fstat").st_size.cast_unsigned(), size);
            let seals = rustix::fs::fcntl_get_seals(&fd).expect("seals");
            assert_eq!(seals, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
            assert!(ftruncate(&fd, 0).is_err(), "the front-end cannot truncate the region");
            assert!(fe.try_send(code::SET_INFLIGHT_FD, &reply, &[fd.as_fd()]).await);
            fe.start_queue(0);
            fe.sync().await;
            let part = session.device.running.borrow()[&0].inflight.clone().expect("a part");
            assert_eq!(part.len(), each);
            part.write(8, &0x1234_u16);
            let mut seen = [0; 2];
            rustix::io::pread(&fd, &mut seen, 8).expect("pread");
            assert_eq!(seen, 0x1234_u16.to_ne_bytes(), "the same memory");
            // The region has no part for queue 3.
            fe.describe_queue(&guest, 3, 0);
            fe.start_queue(3);
            fe.sync().await;
            assert!(session.device.running.borrow()[&3].inflight.is_none());
            // The same region again changes nothing.
            session.device.take_calls();
            assert!(fe.try_send(code::SET_INFLIGHT_FD, &reply, &[fd.as_fd()]).await);
            assert_eq!(session.device.take_calls(), []);
        }
    });
}

#[test]
fn each_queue_has_its_part() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_tracking());
        describe(&fe, &guest).await;
        // The parts of queues of up to 16 descriptors: (16 + 16 * 16) bytes rounded up to a multiple of 64, from the second
        // page on.
        let file = memfd(8192);
        assert!(fe.try_send(code::SET_INFLIGHT_FD, &desc(4096, 4096, 2, 16), &[file.as_fd()]).await);
        fe.describe_queue(&guest, 1, 0);
        fe.start_queue(1);
        fe.sync().await;
        let part = session.device.running.borrow()[&1].inflight.clone().expect("a part");
        assert_eq!(part.len(), 192, "the part of a queue of 8");
        part.write(0, &0x77_u8);
        let mut seen = [0];
        rustix::io::pread(&file, &mut seen, 4096 + 320).expect("pread");
        assert_eq!(seen, [0x77]);
        // Another region is set while the queue runs.
        session.device.take_calls();
        let other = memfd(4096);
        assert!(fe.try_send(code::SET_INFLIGHT_FD, &desc(4096, 0, 2, 16), &[other.as_fd()]).await);
        assert_eq!(session.device.take_calls(), [DeviceCall::Stop(1), DeviceCall::Start(1)]);
        // A reset discards the region.
        assert!(fe.try_send(code::RESET_DEVICE, &[], &[]).await);
        fe.describe_queue(&guest, 1, 0);
        fe.start_queue(1);
        fe.sync().await;
        assert!(session.device.running.borrow()[&1].inflight.is_none());
    });
}

#[test]
fn invalid_regions() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_tracking());
        describe(&fe, &guest).await;
        let file = memfd(8192);
        let refused = [
            (desc(4096, 0, 0, 8), "for no queues"),
            (desc(4096, 0, 5, 8), "more queues than the device has"),
            (desc(4096, 0, u16::MAX, u16::MAX), "more queues than the device has"),
            (desc(4096, 0, 1, 0), "an invalid size"),
            (desc(4096, 0, 1, 6), "an invalid size"),
            (desc(4096, 0, 1, u16::MAX), "an invalid size"),
            (desc(0, 0, 1, 8), "has 0 bytes, but its queues need 192"),
            (desc(4 * 192 - 1, 0, 4, 8), "767 bytes, but its queues need 768"),
            (desc(4096, 8192, 4, 8), "8192 bytes, but bytes 8192.."),
            (desc(4096, 1, 4, 8), "not a range of whole pages"),
            (desc(u64::MAX, u64::MAX - 4095, 4, 8), "8192 bytes, but bytes"),
            (desc(u64::MAX, u64::MAX, 4, 8), "not a range of whole pages"),
            (desc(u64::MAX, 0, 4, 32768), "8192 bytes, but bytes 0..4194560"),
        ];
        for (payload, expected) in refused {
            assert!(!fe.try_send(code::SET_INFLIGHT_FD, &payload, &[file.as_fd()]).await, "{expected}");
            let error = session.stats.snapshot().last_error.expect("one");
            assert!(error.contains(expected), "{error}");
        }
        // The file is larger than the region needs: only the useful part is mapped.
        assert!(fe.try_send(code::SET_INFLIGHT_FD, &desc(8192, 0, 4, 8), &[file.as_fd()]).await);
        fe.start_queue(0);
        fe.sync().await;
        assert!(session.device.running.borrow().contains_key(&0), "refused regions had no effect");
    });
}

#[test]
fn regions_too_small_for_their_queues_are_refused() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_tracking());
        describe(&fe, &guest).await;
        let (file, small) = (memfd(4096), desc(4 * 192, 0, 4, 8));
        assert!(fe.try_send(code::SET_INFLIGHT_FD, &small, &[file.as_fd()]).await);
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 16_u32], &[]);
        fe.send(code::SET_VRING_KICK, &bytes![0x100_u64], &[]);
        let error = |session: &Running| session.stats.snapshot().last_error.expect("one");
        assert!(!fe.try_send(code::SET_VRING_ENABLE, &bytes![0_u32, 1_u32], &[]).await);
        assert!(error(&session).contains("larger than its part"), "{}", error(&session));
        // The region is for the other ring format.
        fe.send(code::SET_VRING_ENABLE, &bytes![0_u32, 0_u32], &[]);
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 8_u32], &[]);
        fe.send(code::SET_FEATURES, &bytes![SPLIT | F_RING_PACKED], &[]);
        assert!(!fe.try_send(code::SET_VRING_ENABLE, &bytes![0_u32, 1_u32], &[]).await);
        assert!(error(&session).contains("need 1280"), "{}", error(&session));
        assert_eq!(session.device.take_calls(), []);
    });
}

#[test]
fn requests_whose_reply_has_no_failure_end_the_session() {
    on_local_set(async {
        let none: &[BorrowedFd<'_>] = &[];
        for (queues, size) in [(0, 8), (5, 8), (4, 0), (4, 7), (4, 0x8001)] {
            let (guest, (fe, session)) = (Guest::new(), start_tracking());
            describe(&fe, &guest).await;
            fe.send(code::GET_INFLIGHT_FD, &desc(0, 0, queues, size), none);
            assert!(session.error().await.contains("an in-flight region for"));
            fe.closed().await;
        }
        let (fe, session) = start_with(Rc::default());
        fe.negotiate().await;
        fe.send(code::GET_INFLIGHT_FD, &desc(0, 0, 1, 8), none);
        assert!(session.error().await.contains("was not negotiated"), "the device does not track requests");
    });
}
