//! Tests of the device status, and of resets with and without it.

use crate::device::DeviceCall;
use crate::peer::{FrontEnd, Guest, code};
use crate::{bytes, on_local_set, start};

#[test]
fn a_status_is_kept_and_zero_resets() {
    on_local_set(async {
        let (guest, (fe, session)) = (Guest::new(), start());
        fe.with_queue(&guest).await;
        assert_eq!(fe.ask(code::GET_STATUS).await, 0);
        for status in [1_u64, 3, 11, 15] {
            assert!(fe.try_send(code::SET_STATUS, &bytes![status], &[]).await);
            assert_eq!(fe.ask(code::GET_STATUS).await, status);
        }
        assert!(!fe.try_send(code::SET_STATUS, &bytes![0x100_u64], &[]).await, "more than 8 bits");
        assert_eq!(session.device.take_calls(), [DeviceCall::Start(0)]);
        assert!(fe.try_send(code::SET_STATUS, &bytes![0_u64], &[]).await);
        assert_eq!(fe.ask(code::GET_STATUS).await, 0);
        assert_eq!(session.device.take_calls(), [DeviceCall::Stop(0)]);
    });
}

/// Checks that after a reset a queue needs its whole setup again, except for features, memory and call fds.
async fn needs_whole_setup(fe: &FrontEnd, guest: &Guest, session: &crate::Running) {
    assert_eq!(session.device.take_calls(), [DeviceCall::Start(0), DeviceCall::Stop(0)]);
    fe.start_queue(0);
    fe.sync().await;
    assert_eq!(session.device.take_calls(), [], "the rings are cleared");
    assert_eq!(fe.get_base(0).await, 7, "the position of the stop can still be queried");
    fe.send(code::SET_VRING_NUM, &bytes![0_u32, 8_u32], &[]);
    fe.send(code::SET_VRING_ADDR, &guest.ring_addr(0), &[]);
    fe.start_queue(0);
    fe.sync().await;
    assert_eq!(session.device.take_calls(), [DeviceCall::Start(0)]);
    assert_eq!(session.device.running.borrow()[&0].base, 0, "but the queue does not resume there");
    assert!(session.device.running.borrow()[&0].call.is_some(), "the call fd stays");
}

#[test]
fn resets() {
    on_local_set(async {
        for (code, payload) in [(code::RESET_DEVICE, vec![]), (code::SET_STATUS, bytes![0_u64])] {
            let (guest, (fe, session)) = (Guest::new(), start());
            fe.with_queue(&guest).await;
            guest.set_avail_idx(0, 7);
            assert!(fe.try_send(code, &payload, &[]).await);
            assert_eq!(guest.used_idx(0), 7, "taken requests were served");
            needs_whole_setup(&fe, &guest, &session).await;
            assert!(fe.try_send(code, &payload, &[]).await);
            assert!(fe.try_send(code, &payload, &[]).await, "again");
            drop(fe);
            session.end().await.expect("no error");
        }
    });
}

#[test]
fn refused_without_their_protocol_features() {
    on_local_set(async {
        let (fe, session) = start();
        fe.send(code::SET_PROTOCOL_FEATURES, &bytes![8_u64], &[]);
        assert!(!fe.try_send(code::RESET_DEVICE, &[], &[]).await);
        assert!(!fe.try_send(code::SET_STATUS, &bytes![0_u64], &[]).await);
        let error = session.stats.snapshot().last_error.expect("one");
        assert_eq!(error, "SET_STATUS: the protocol feature was not negotiated");
        // The reply to GET_STATUS has no field for a failure.
        fe.send(code::GET_STATUS, &[], &[]);
        assert!(session.error().await.starts_with("GET_STATUS"));
        fe.closed().await;
    });
}
