//! Tests of the negotiation, and of the messages about queues in every order that front-ends use.

use crate::device::{DeviceCall, Mock};
use crate::peer::{F_PROTOCOL_FEATURES, FrontEnd, Guest, VERSION_1, code, eventfd, message};
use crate::{Running, bytes, on_local_set, start, start_with};
use aryk_vhost_user::{End, F_EVENT_IDX, F_INDIRECT_DESC};
use std::os::fd::AsFd;
use std::rc::Rc;
use tokio::sync::Notify;

#[test]
fn negotiation() {
    on_local_set(async {
        let (fe, session) = start();
        let transport = VERSION_1 | F_PROTOCOL_FEATURES | F_INDIRECT_DESC | F_EVENT_IDX;
        assert_eq!(fe.ask(code::GET_FEATURES).await, transport | 0b110);
        let protocol = fe.ask(code::GET_PROTOCOL_FEATURES).await;
        assert_eq!(protocol, 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 13 | 1 << 15 | 1 << 16);
        let protocol = protocol & !(1 << 16);
        fe.send(code::SET_PROTOCOL_FEATURES, &bytes![protocol], &[]);
        assert_eq!(fe.ask(code::GET_QUEUE_NUM).await, 4);
        assert_eq!(fe.ask(code::GET_MAX_MEM_SLOTS).await, 509);
        assert!(fe.try_send(code::SET_OWNER, &[], &[]).await);
        assert!(fe.try_send(code::SET_OWNER, &[], &[]).await, "again");
        assert!(fe.try_send(code::SET_FEATURES, &bytes![VERSION_1], &[]).await);
        assert!(!fe.try_send(code::SET_FEATURES, &bytes![1_u64 << 40], &[]).await, "not offered");
        assert!(!fe.try_send(code::SET_PROTOCOL_FEATURES, &bytes![1_u64 << 1], &[]).await);
        assert!(!fe.try_send(39, &bytes![0_u64], &[]).await, "SET_STATUS was not negotiated");
        let stats = session.stats.snapshot();
        assert_eq!((stats.sessions, stats.refused, stats.protocol_errors, stats.failed), (1, 3, 3, 0));
        assert!(stats.connected);
        drop(fe);
        assert_eq!(session.end().await.expect("no error"), End::FrontEndLeft);
    });
}

#[test]
fn a_failed_request_without_need_reply_ends_the_session() {
    on_local_set(async {
        let (fe, session) = start();
        fe.send(code::SET_FEATURES, &bytes![1_u64 << 40], &[]);
        assert_eq!(session.error().await, "SET_FEATURES: bits 0x10000000000 were not offered");
        fe.closed().await;
        // NEED_REPLY has no effect without REPLY_ACK.
        let (fe, session) = start();
        fe.send_raw(&message(code::SET_FEATURES, 9, &bytes![1_u64 << 40]), &[]);
        assert!(session.error().await.starts_with("SET_FEATURES"));
        fe.closed().await;
    });
}

#[test]
fn configuration_space() {
    on_local_set(async {
        let device = Rc::new(Mock::default());
        *device.config.borrow_mut() = (1..=20).collect();
        let (fe, session) = start_with(device);
        fe.negotiate().await;
        fe.send(code::GET_CONFIG, &bytes![18_u32, 4_u32, 0_u32, 0_u32], &[]);
        let expected = [bytes![18_u32, 4_u32, 0_u32], vec![19, 20, 0, 0]].concat();
        assert_eq!(fe.reply(code::GET_CONFIG).await, expected, "zeroes after the device's fields");
        let payload = [bytes![2_u32, 2_u32, 0_u32], vec![0xaa, 0xbb]].concat();
        assert!(fe.try_send(code::SET_CONFIG, &payload, &[]).await);
        assert_eq!(session.device.config.borrow()[..5], [1, 2, 0xaa, 0xbb, 5]);
        let beyond = [bytes![30_u32, 1_u32, 0_u32], vec![1]].concat();
        assert!(!fe.try_send(code::SET_CONFIG, &beyond, &[]).await);
    });
}

/// Sends a queue's message, by name.
fn send_step(fe: &FrontEnd, guest: &Guest, what: &str) {
    match what {
        "features" => fe.send(code::SET_FEATURES, &bytes![F_PROTOCOL_FEATURES | VERSION_1], &[]),
        "memory" => fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]),
        "num" => fe.send(code::SET_VRING_NUM, &bytes![1_u32, 8_u32], &[]),
        "base" => fe.send(code::SET_VRING_BASE, &bytes![1_u32, 0_u32], &[]),
        "addr" => fe.send(code::SET_VRING_ADDR, &guest.ring_addr(1), &[]),
        "kick" => fe.send(code::SET_VRING_KICK, &bytes![1_u64], &[eventfd().as_fd()]),
        "enable" => fe.send(code::SET_VRING_ENABLE, &bytes![1_u32, 1_u32], &[]),
        other => unreachable!("{other}"),
    }
}

#[test]
fn a_queue_starts_when_its_setup_is_complete() {
    const ALL: [&str; 7] = ["features", "memory", "num", "base", "addr", "kick", "enable"];
    on_local_set(async {
        for first in 0..ALL.len() {
            for backwards in [false, true] {
                let mut order = ALL;
                order.rotate_left(first);
                if backwards {
                    order.reverse();
                }
                let guest = Guest::new();
                let (fe, session) = start();
                for what in order {
                    send_step(&fe, &guest, what);
                }
                fe.sync().await;
                let running = session.device.running.borrow().contains_key(&1);
                assert!(running, "{order:?}");
                let calls = session.device.take_calls();
                let starts = calls.iter().filter(|c| **c == DeviceCall::Start(1)).count();
                let expected = if order[6] == "base" { 2 } else { 1 };
                assert!(starts <= expected, "{order:?}: {calls:?}");
                drop(fe);
                session.end().await.expect("no error");
            }
        }
    });
}

#[test]
fn a_queue_stops_and_reports_its_position() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        guest.set_avail_idx(0, 5);
        assert_eq!(fe.get_base(0).await, 5);
        assert_eq!(guest.used_idx(0), 5);
        assert_eq!(fe.get_base(0).await, 5, "again, stopped");
        fe.send(code::SET_VRING_ENABLE, &bytes![0_u32, 1_u32], &[]);
        fe.sync().await;
        assert_eq!(
            session.device.take_calls(),
            [DeviceCall::Start(0), DeviceCall::Stop(0)],
            "stopped, though enabled"
        );
        fe.start_queue(0);
        fe.sync().await;
        assert_eq!(session.device.running.borrow()[&0].base, 5, "resumes where it stopped");
        fe.send(code::SET_VRING_ENABLE, &bytes![0_u32, 0_u32], &[]);
        fe.sync().await;
        assert!(session.device.running.borrow().is_empty(), "disabled");
        assert_eq!(fe.get_base(0).await, 5);
        fe.send(code::SET_VRING_BASE, &bytes![0_u32, 0xffff_u32], &[]);
        assert_eq!(fe.get_base(0).await, 0xffff);
    });
}

#[test]
fn without_protocol_features_a_queue_is_initially_enabled() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.send(code::SET_OWNER, &[], &[]);
        fe.send(code::SET_FEATURES, &bytes![VERSION_1 | F_EVENT_IDX], &[]);
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        fe.describe_queue(&guest, 0, 3);
        // No kick fd: the ring must be polled.
        fe.send(code::SET_VRING_KICK, &bytes![0x100_u64], &[]);
        fe.sync().await;
        let running = session.device.running.borrow();
        let queue = &running[&0];
        assert!(queue.kick.is_none() && queue.call.is_some() && queue.err.is_none());
        assert_eq!((queue.base, queue.size), (3, 8));
        assert_eq!(queue.features, VERSION_1 | F_EVENT_IDX);
    });
}

#[test]
fn changes_while_a_queue_runs() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let device = &session.device;
        device.take_calls();
        fe.send(code::SET_VRING_CALL, &bytes![0_u64], &[eventfd().as_fd()]);
        fe.send(code::SET_VRING_CALL, &bytes![0x100_u64], &[]);
        fe.send(code::SET_VRING_ERR, &bytes![0_u64], &[eventfd().as_fd()]);
        fe.sync().await;
        assert_eq!(
            device.take_calls(),
            [DeviceCall::CallFd(0, true), DeviceCall::CallFd(0, false), DeviceCall::ErrFd(0, true)]
        );
        // The same again changes nothing.
        let features = fe.ask(code::GET_FEATURES).await;
        fe.send(code::SET_FEATURES, &bytes![features], &[]);
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 8_u32], &[]);
        fe.send(code::SET_VRING_ADDR, &guest.ring_addr(0), &[]);
        fe.send(code::SET_VRING_ENABLE, &bytes![0_u32, 1_u32], &[]);
        fe.sync().await;
        assert_eq!(device.take_calls(), []);
        guest.set_avail_idx(0, 9);
        let restarted = [DeviceCall::Stop(0), DeviceCall::Start(0)];
        fe.send(code::SET_FEATURES, &bytes![features & !F_EVENT_IDX], &[]);
        fe.sync().await;
        assert_eq!(device.take_calls(), restarted);
        assert_eq!(device.running.borrow()[&0].base, 9);
        fe.send(code::SET_VRING_NUM, &bytes![0_u32, 16_u32], &[]);
        fe.sync().await;
        assert_eq!(device.take_calls(), restarted);
        fe.send(code::SET_VRING_KICK, &bytes![0_u64], &[eventfd().as_fd()]);
        fe.sync().await;
        assert_eq!(device.take_calls(), restarted);
        fe.send(code::RESET_OWNER, &[], &[]);
        fe.sync().await;
        assert_eq!(device.take_calls(), [DeviceCall::Stop(0)]);
    });
}

#[test]
fn invalid_values_are_refused() {
    let wrong: [(u32, Vec<u8>, &str); 10] = [
        (code::SET_VRING_NUM, bytes![0_u32, 3_u32], "SET_VRING_NUM: a queue's size is 1 to 32768"),
        (code::SET_VRING_NUM, bytes![0_u32, 0_u32], "SET_VRING_NUM: a queue's size"),
        (code::SET_VRING_NUM, bytes![0_u32, 65536_u32], "SET_VRING_NUM: a queue's size"),
        (
            code::SET_VRING_NUM,
            bytes![0_u32, 2048_u32],
            "SET_VRING_NUM: a queue of 2048 descriptors is larger",
        ),
        (code::SET_VRING_NUM, bytes![4_u32, 8_u32], "SET_VRING_NUM: queue 4 does not exist"),
        (code::SET_VRING_BASE, bytes![0_u32, 65536_u32], "SET_VRING_BASE: an index"),
        (code::SET_VRING_ADDR, bytes![0_u32, 0_u32, 8_u64, 0_u64, 0_u64, 0_u64], "SET_VRING_ADDR: a ring"),
        (code::SET_VRING_ADDR, bytes![0_u32, 1_u32, 0_u64, 0_u64, 0_u64, 0_u64], "SET_VRING_ADDR: logging"),
        (code::SET_VRING_KICK, bytes![0x1ff_u64], "SET_VRING_KICK: queue 255"),
        (code::GET_VRING_BASE, bytes![u32::MAX, 0_u32], "GET_VRING_BASE: queue 4294967295"),
    ];
    on_local_set(async {
        for (code, payload, expected) in wrong {
            let (fe, session) = start();
            fe.send(code::SET_FEATURES, &bytes![F_PROTOCOL_FEATURES | VERSION_1], &[]);
            fe.send(code, &payload, &[]);
            let error = session.error().await;
            assert!(error.starts_with(expected), "{error}");
            fe.closed().await;
        }
    });
}

#[test]
fn a_queue_that_the_device_refuses_stays_stopped() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        session.device.refuse_start.set(true);
        fe.negotiate().await;
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        fe.describe_queue(&guest, 0, 0);
        assert!(fe.try_send(code::SET_VRING_KICK, &bytes![0_u64], &[eventfd().as_fd()]).await);
        assert!(!fe.try_send(code::SET_VRING_ENABLE, &bytes![0_u32, 1_u32], &[]).await);
        session.device.refuse_start.set(false);
        assert!(fe.try_send(code::SET_VRING_ENABLE, &bytes![0_u32, 1_u32], &[]).await);
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0)]);
        assert_eq!(session.stats.snapshot().device_errors, 1);
    });
}

#[test]
fn a_slow_stop_delays_its_own_session_only() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        let gate = Rc::new(Notify::new());
        fe.with_queue(&guest).await;
        session.device.slow_stop.replace(Some(Rc::clone(&gate)));
        fe.send(code::GET_VRING_BASE, &bytes![0_u32, 0_u32], &[]);
        let (other, _other_session) = start();
        for _ in 0..100 {
            other.sync().await;
        }
        assert!(session.device.running.borrow().contains_key(&0), "still stopping");
        gate.notify_one();
        fe.reply(code::GET_VRING_BASE).await;
    });
}

#[test]
fn a_front_end_may_disconnect_while_a_queue_stops() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        let gate = Rc::new(Notify::new());
        fe.with_queue(&guest).await;
        session.device.slow_stop.replace(Some(Rc::clone(&gate)));
        guest.set_avail_idx(0, 2);
        fe.send(code::GET_VRING_BASE, &bytes![0_u32, 0_u32], &[]);
        // More messages than the session has read, so that its socket is not empty when the front-end hangs up.
        fe.send(code::GET_FEATURES, &[], &[]);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        drop(fe);
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
        assert!(session.device.running.borrow().contains_key(&0), "still stopping");
        assert!(session.stats.snapshot().connected);
        gate.notify_one();
        // The front-end has disconnected when the reply is sent.
        assert_eq!(session.end().await.expect("no error"), End::FrontEndLeft);
        assert_eq!(guest.used_idx(0), 2, "taken requests were served");
    });
}

/// A session with a queue that waits to start.
async fn starting(guest: &Guest) -> (FrontEnd, Running) {
    let (fe, session) = start();
    fe.negotiate().await;
    session.device.endless_start.set(true);
    fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
    fe.describe_queue(guest, 0, 0);
    fe.start_queue(0);
    // The memory is mapped by another thread, which may have to wait for a processor.
    while !session.device.has_waited.get() {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert_eq!(session.device.take_calls(), []);
    (fe, session)
}

#[test]
fn a_queue_that_waits_to_start_is_stopped_at_once() {
    on_local_set(async {
        let (fe, session) = starting(&Guest::new()).await;
        for round in 0..2 {
            assert_eq!(fe.get_base(0).await, 0, "the position at which it would have started");
            assert_eq!(session.device.take_calls(), []);
            session.device.endless_start.set(round == 0);
            fe.start_queue(0);
            fe.sync().await;
        }
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0)]);
        drop(fe);
        assert_eq!(session.end().await.expect("no error"), End::FrontEndLeft);
    });
}

#[test]
fn a_session_continues_while_a_queue_waits_to_start() {
    on_local_set(async {
        let guest = Guest::new();
        let (fe, session) = starting(&guest).await;
        // Another queue starts; then the waiting queue starts, with the setup as it has changed since.
        fe.send(code::SET_VRING_CALL, &bytes![0_u64], &[eventfd().as_fd()]);
        session.device.endless_start.set(false);
        fe.describe_queue(&guest, 1, 0);
        fe.start_queue(1);
        fe.sync().await;
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(1)]);
        session.device.ready.notify_one();
        let started = [DeviceCall::Start(0), DeviceCall::CallFd(0, true), DeviceCall::ErrFd(0, false)];
        while session.device.calls.borrow().len() < started.len() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        assert_eq!(session.device.take_calls(), started);
        assert_eq!(fe.get_base(0).await, 0);
        assert_eq!(session.device.take_calls(), [DeviceCall::Stop(0)]);
        drop(fe);
        assert_eq!(session.end().await.expect("no error"), End::FrontEndLeft);
    });
}

#[test]
fn a_queue_that_waits_to_start_starts_with_the_new_memory_or_ends_the_session() {
    on_local_set(async {
        let guest = Guest::new();
        let (fe, session) = starting(&guest).await;
        fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
        fe.sync().await;
        assert_eq!(session.device.take_calls(), []);
        session.device.refuse_start.set(true);
        session.device.ready.notify_one();
        assert_eq!(session.error().await, "queue 0 cannot start: no room");
        fe.closed().await;
    });
}

#[test]
fn a_disconnect_cancels_the_start_of_a_queue() {
    on_local_set(async {
        let (fe, session) = starting(&Guest::new()).await;
        drop(fe);
        assert_eq!(session.end().await.expect("no error"), End::FrontEndLeft);
    });
}

#[test]
fn the_end_of_a_session_cancels_the_start_of_a_queue() {
    on_local_set(async {
        let (fe, session) = starting(&Guest::new()).await;
        let handle = session.device.session.borrow().clone().expect("connected");
        handle.end("the store has gone");
        let end = session.end().await;
        assert!(matches!(&end, Err(crate::Error::Ended(why)) if why == "the store has gone"), "{end:?}");
        drop(fe);
    });
}

#[test]
fn the_device_ends_a_session_or_announces_a_change() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        let handle = session.device.session.borrow().clone().expect("connected");
        handle.config_changed();
        fe.sync().await;
        let (channel, theirs) = FrontEnd::pair();
        assert!(fe.try_send(code::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]).await);
        drop(theirs);
        handle.config_changed();
        fe.sync().await;
        assert_eq!(channel.bytes(12).await, bytes![2_u32, 1_u32, 0_u32]);
        // More messages than the channel has room for: the session continues.
        for _ in 0..2000 {
            handle.config_changed();
            fe.sync().await;
        }
        drop(channel);
        handle.config_changed();
        fe.sync().await;
        handle.end("guest memory was truncated");
        handle.end("a second reason");
        assert_eq!(session.error().await, "guest memory was truncated");
        fe.closed().await;
    });
}

#[test]
fn a_front_end_may_hang_up_at_any_step() {
    async fn until(step: usize, fe: &FrontEnd, guest: &Guest, session: &Running) {
        let steps = ["features", "memory", "num", "base", "addr", "kick", "enable"];
        for what in &steps[..step] {
            send_step(fe, guest, what);
        }
        if step.is_multiple_of(2) {
            fe.sync().await;
            assert_eq!(session.device.running.borrow().len(), usize::from(step >= 7));
        }
    }
    on_local_set(async {
        for step in 0..=7 {
            let (guest, (fe, session)) = (Guest::new(), start());
            until(step, &fe, &guest, &session).await;
            drop(fe);
            assert_eq!(session.end().await.expect("no error"), End::FrontEndLeft, "after {step}");
            // A front-end that hangs up in the middle of the next message.
            let (fe, session) = start();
            until(step, &fe, &guest, &session).await;
            fe.send_raw(&message(code::SET_FEATURES, 1, &bytes![0_u64])[..step + 1], &[]);
            drop(fe);
            assert!(session.error().await.ends_with("then hung up"));
        }
    });
}
