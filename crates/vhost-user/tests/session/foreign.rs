//! Tests with the front-end of the `vhost` crate, which Cloud Hypervisor and other VMMs use.

use crate::device::{DeviceCall, Mock};
use crate::on_local_set;
use crate::peer::{Guest, RING_SPACE, SIZE, memfd};
use aryk_vhost_user::{End, SessionHandle, Stats, serve_front_end};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

const QUEUES: usize = 4;

/// Requests an in-flight region, and passes it back.
fn take_inflight(fe: &mut Frontend) {
    let wanted = VhostUserInflight::new(0, 0, QUEUES as u16, SIZE as u16);
    let (inflight, file) = fe.get_inflight_fd(&wanted).expect("an in-flight region");
    assert_eq!(inflight.mmap_size, QUEUES as u64 * 192);
    fe.set_inflight_fd(&inflight, file.as_raw_fd()).expect("the region again");
}

/// The first steps of a migration.
fn begin_log(fe: &mut Frontend) {
    let log = memfd(4096);
    let region = VhostUserDirtyLogRegion { mmap_size: 4096, mmap_offset: 0, mmap_handle: log.as_raw_fd() };
    fe.set_log_base(0, Some(region)).expect("a dirty log");
    fe.set_log_fd(EventFd::new(0).expect("eventfd").as_raw_fd()).expect("an eventfd for the log");
}

/// The whole life of a guest, as a VMM drives it.
fn front_end(stream: UnixStream) {
    let mut fe = Frontend::from_stream(stream, QUEUES as u64);
    let features = fe.get_features().expect("features");
    fe.set_owner().expect("owner");
    fe.set_features(features).expect("features");
    let protocol = fe.get_protocol_features().expect("protocol features");
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE;
    assert!(protocol.contains(wanted));
    fe.set_protocol_features(wanted).expect("protocol features");
    fe.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert_eq!(fe.get_queue_num().expect("queues"), QUEUES as u64);
    assert_eq!(fe.get_max_mem_slots().expect("slots"), 509);
    let (_, config) = fe.get_config(0, 8, VhostUserConfigFlags::WRITABLE, &[0; 8]).expect("config");
    assert_eq!(config, [1, 2, 3, 4, 5, 6, 7, 8]);
    fe.set_config(2, VhostUserConfigFlags::WRITABLE, &[9]).expect("config");

    let guest = Guest::new();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: guest.guest_addr,
        memory_size: guest.len,
        userspace_addr: guest.user_addr,
        mmap_offset: 0,
        mmap_handle: guest.memory.as_raw_fd(),
    };
    fe.set_mem_table(&[region]).expect("memory");
    let other = Guest::at(0x1000_0000);
    let second = VhostUserMemoryRegionInfo {
        guest_phys_addr: other.guest_addr,
        memory_size: other.len,
        userspace_addr: other.user_addr,
        mmap_offset: 0,
        mmap_handle: other.memory.as_raw_fd(),
    };
    fe.add_mem_region(&second).expect("more memory");
    take_inflight(&mut fe);
    for index in 0..QUEUES {
        let at = guest.user_addr + index as u64 * RING_SPACE;
        let config = VringConfigData {
            queue_max_size: SIZE as u16,
            queue_size: SIZE as u16,
            flags: 0,
            desc_table_addr: at,
            used_ring_addr: at + 2048,
            avail_ring_addr: at + 1024,
            log_addr: None,
        };
        fe.set_vring_num(index, SIZE as u16).expect("num");
        fe.set_vring_addr(index, &config).expect("addr");
        fe.set_vring_base(index, 0).expect("base");
        fe.set_vring_call(index, &EventFd::new(0).expect("eventfd")).expect("call");
        fe.set_vring_err(index, &EventFd::new(0).expect("eventfd")).expect("err");
        fe.set_vring_kick(index, &EventFd::new(0).expect("eventfd")).expect("kick");
        fe.set_vring_enable(index, true).expect("enable");
        guest.set_avail_idx(index as u32, 10 + index as u16);
    }
    fe.remove_mem_region(&second).expect("less memory");
    begin_log(&mut fe);
    for index in 0..QUEUES {
        fe.set_vring_enable(index, false).expect("disable");
        assert_eq!(fe.get_vring_base(index).expect("base"), 10 + index as u32);
        assert_eq!(guest.used_idx(index as u32), 10 + index as u16);
    }
    fe.reset_device().expect("a reset");
    fe.set_features(1 << 63).expect_err("a feature that was not offered");
}

#[test]
fn the_front_end_of_the_vhost_crate_is_served() {
    on_local_set(async {
        let (ours, theirs) = UnixStream::pair().expect("socketpair");
        ours.set_nonblocking(true).expect("non-blocking");
        let peer = std::thread::spawn(move || front_end(theirs));
        let (device, stats) = (Mock::default(), Stats::default());
        *device.config.borrow_mut() = (1..=16).collect();
        device.tracks_inflight.set(true);
        device.logs_writes.set(true);
        let stream = tokio::net::UnixStream::from_std(ours).expect("a watched socket");
        let end = serve_front_end(stream, &device, SessionHandle::default(), &stats).await;
        peer.join().expect("the front-end's asserts hold");
        assert_eq!(end.expect("no error"), End::FrontEndLeft);
        assert_eq!(device.config.borrow()[2], 9);
        let calls = device.take_calls();
        for index in 0..QUEUES as u16 {
            let of_queue = calls
                .iter()
                .filter(|c| matches!(c, DeviceCall::Start(i) | DeviceCall::Stop(i) if *i == index));
            assert!(of_queue.eq(&[DeviceCall::Start(index), DeviceCall::Stop(index)]), "{calls:?}");
        }
        assert!(calls.contains(&DeviceCall::Memory(1)), "{calls:?}");
        assert_eq!(stats.snapshot().refused, 1);
    });
}
