//! Tests of packed rings: lengths, alignments, sizes and bases that differ from those of split rings.

use crate::device::{DeviceCall, Mock};
use crate::peer::{F_PROTOCOL_FEATURES, FrontEnd, Guest, VERSION_1, code};
use crate::{Running, bytes, on_local_set, start, start_with};
use aryk_vhost_user::F_RING_PACKED;
use std::os::fd::AsFd;
use std::rc::Rc;

const PACKED: u64 = F_PROTOCOL_FEATURES | VERSION_1 | F_RING_PACKED;

fn start_packed() -> (FrontEnd, Running) {
    let device = Rc::new(Mock::default());
    device.packed.set(true);
    start_with(device)
}

/// Negotiates, and sends the whole setup of queue 0, but does not start it.
async fn describe(fe: &FrontEnd, guest: &Guest, size: u32) {
    fe.negotiate().await;
    fe.send(code::SET_FEATURES, &bytes![PACKED], &[]);
    fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
    fe.send(code::SET_VRING_NUM, &bytes![0_u32, size], &[]);
    fe.send(code::SET_VRING_ADDR, &guest.ring_addr(0), &[]);
}

#[test]
fn packed_rings_are_offered_if_the_device_supports_them() {
    on_local_set(async {
        let (fe, _session) = start_packed();
        assert_eq!(fe.ask(code::GET_FEATURES).await & F_RING_PACKED, F_RING_PACKED);
        let (fe, _session) = start();
        fe.negotiate().await;
        assert_eq!(fe.ask(code::GET_FEATURES).await & F_RING_PACKED, 0);
        assert!(!fe.try_send(code::SET_FEATURES, &bytes![PACKED], &[]).await);
    });
}

#[test]
fn bases_have_32_bits() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_packed());
        describe(&fe, &guest, 6).await;
        assert_eq!(fe.get_base(0).await, 0x8000_8000, "both wrap counters start at 1");
        fe.start_queue(0);
        fe.sync().await;
        assert_eq!(session.device.running.borrow()[&0].size, 6, "any size is allowed");
        assert_eq!(session.device.running.borrow()[&0].base, 0x8000_8000);
        assert_eq!(fe.get_base(0).await, 0x8003_8003);
        fe.send(code::SET_VRING_BASE, &bytes![0_u32, 0x0002_8004_u32], &[]);
        fe.start_queue(0);
        fe.sync().await;
        assert_eq!(session.device.running.borrow()[&0].base, 0x0002_8004);
        assert_eq!(fe.get_base(0).await, 0x0005_8007);
    });
}

#[test]
fn another_driver_may_use_the_other_format() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_packed());
        describe(&fe, &guest, 6).await;
        fe.start_queue(0);
        // The queue runs with 6 packed descriptors, which is not a valid size of a split ring; so no queue is left running.
        let split = bytes![F_PROTOCOL_FEATURES | VERSION_1];
        assert!(!fe.try_send(code::SET_FEATURES, &split, &[]).await);
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0), DeviceCall::Stop(0)]);
        fe.get_base(0).await;
        assert!(fe.try_send(code::SET_FEATURES, &split, &[]).await, "with a stopped queue");
        assert!(!fe.try_send(code::SET_VRING_BASE, &bytes![0_u32, 0x1_0000_u32], &[]).await);
        fe.describe_queue(&guest, 0, 0);
        fe.start_queue(0);
        fe.sync().await;
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0)]);
        // Back to packed rings, while the queue runs.
        fe.send(code::SET_FEATURES, &bytes![PACKED], &[]);
        fe.sync().await;
        assert_eq!(session.device.take_calls(), [DeviceCall::Stop(0), DeviceCall::Start(0)]);
        assert_eq!(session.device.running.borrow()[&0].rings.device.len(), 4);
        assert_eq!(session.device.running.borrow()[&0].base, 0x8000_8000, "not a split ring's base");
    });
}

#[test]
fn values_sent_before_the_features_are_checked_with_them() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_packed());
        let at = guest.user_addr;
        fe.send(code::SET_PROTOCOL_FEATURES, &bytes![8_u64], &[]);
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 7_u32], &[]);
        fe.send(code::SET_VRING_BASE, &bytes![0_u32, 0x8001_8001_u32], &[]);
        // The address is aligned for an available ring, but not for event suppression.
        fe.send(code::SET_VRING_ADDR, &bytes![0_u32, 0_u32, at, at + 2048, at + 1026, 0_u64], &[]);
        fe.start_queue(0);
        let error = async |bits: u64| {
            assert!(!fe.try_send(code::SET_FEATURES, &bytes![bits], &[]).await);
            session.stats.snapshot().last_error.expect("one")
        };
        assert!(error(VERSION_1 | F_PROTOCOL_FEATURES).await.contains("a queue's size is"));
        assert!(error(PACKED).await.contains("a ring is not aligned"));
        let good = bytes![0_u32, 0_u32, at, at + 2048, at + 1028, 0_u64];
        assert!(fe.try_send(code::SET_VRING_ADDR, &good, &[]).await);
        let base = session.device.running.borrow()[&0].base;
        assert_eq!(base, 0x8000_8000, "the base was a split ring's for a while");
        fe.get_base(0).await;
        let bad = bytes![0_u32, 0_u32, at, at + 2048, at + 1026, 0_u64];
        assert!(!fe.try_send(code::SET_VRING_ADDR, &bad, &[]).await, "now the format is known");
        for size in [0_u32, 32769, 65536, u32::MAX] {
            assert!(!fe.try_send(code::SET_VRING_NUM, &bytes![0_u32, size], &[]).await, "{size}");
        }
    });
}

#[test]
fn a_base_may_come_before_the_features() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start_packed());
        fe.send(code::SET_VRING_BASE, &bytes![0_u32, 0x8001_8001_u32], &[]);
        describe(&fe, &guest, 8).await;
        fe.start_queue(0);
        fe.sync().await;
        assert_eq!(session.device.running.borrow()[&0].base, 0x8001_8001);
    });
}
