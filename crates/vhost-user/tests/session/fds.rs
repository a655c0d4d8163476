//! Tests of file descriptors (too many, too few, of the wrong kind), and of messages that arrive in pieces.

use crate::peer::{Guest, code, eventfd, memfd, message};
use crate::{bytes, on_local_set, start};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

fn null() -> OwnedFd {
    File::open("/dev/null").expect("/dev/null").into()
}

/// Sends one message; returns the text of the error that ends the session.
async fn error_of(code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> String {
    let (fe, session) = start();
    fe.send(code, payload, fds);
    let error = session.error().await;
    fe.closed().await;
    error
}

#[test]
fn wrong_numbers() {
    on_local_set(async {
        let (event, guest) = (eventfd(), Guest::new());
        let (event, memory) = (event.as_fd(), guest.memory.as_fd());
        let kick = code::SET_VRING_KICK;
        let error = error_of(kick, &bytes![0_u64], &[]).await;
        assert_eq!(
            error,
            "SET_VRING_KICK: the message has 0 file descriptors, which does not match the request"
        );
        assert!(error_of(kick, &bytes![0_u64], &[event, event]).await.contains("2 file descriptors"));
        assert!(error_of(kick, &bytes![0x100_u64], &[event]).await.contains("1 file descriptors"));
        assert!(error_of(code::GET_FEATURES, &[], &[event]).await.contains("1 file descriptors"));
        let table = guest.mem_table();
        let two = error_of(code::SET_MEM_TABLE, &table, &[memory, memory]).await;
        assert!(two.contains("2 file descriptors"), "{two}");
        let lost = error_of(kick, &bytes![0_u64], &[event; 9]).await;
        assert!(lost.contains("were lost"), "{lost}");
        let lost = error_of(kick, &bytes![0_u64], &[event; 30]).await;
        assert!(lost.contains("were lost"), "{lost}");
    });
}

#[test]
fn memory_that_is_not_shared() {
    on_local_set(async {
        let guest = Guest::new();
        for code in [code::SET_MEM_TABLE, code::ADD_MEM_REG] {
            let payload = if code == code::SET_MEM_TABLE { guest.mem_table() } else { guest.single_region() };
            let error = error_of(code, &payload, &[]).await;
            assert!(error.contains("memory-backend-memfd,share=on"), "{error}");
            let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file on a disk");
            let error = error_of(code, &payload, &[file.as_fd()]).await;
            assert!(error.contains("is not memory") && error.contains("share=on"), "{error}");
            let error = error_of(code, &payload, &[null().as_fd()]).await;
            assert!(error.contains("in /dev/null"), "{error}");
        }
    });
}

#[test]
fn wrong_kinds() {
    on_local_set(async {
        let kick = code::SET_VRING_KICK;
        let error = error_of(kick, &bytes![0_u64], &[null().as_fd()]).await;
        assert_eq!(error, "SET_VRING_KICK: expected an eventfd, got /dev/null");
        let (read, write) = std::io::pipe().expect("pipe");
        assert!(error_of(kick, &bytes![0_u64], &[read.as_fd()]).await.contains("got pipe:["));
        assert!(
            error_of(code::SET_VRING_CALL, &bytes![0_u64], &[write.as_fd()]).await.contains("got pipe:[")
        );
        assert!(error_of(kick, &bytes![0_u64], &[memfd(1).as_fd()]).await.contains("got /memfd:guest"));
        let channel = code::SET_BACKEND_REQ_FD;
        assert!(error_of(channel, &[], &[eventfd().as_fd()]).await.contains("expected a UNIX stream socket"));
        let datagrams = std::os::unix::net::UnixDatagram::unbound().expect("socket");
        assert!(error_of(channel, &[], &[datagrams.as_fd()]).await.contains("got socket:["));
    });
}

#[test]
fn messages_in_pieces() {
    on_local_set(async {
        let payload = bytes![0_u64];
        let bytes = message(code::SET_VRING_CALL, 1, &payload);
        for split in 1..bytes.len() {
            let (fe, session) = start();
            // The fd comes with the first part or with the second.
            let call = eventfd();
            let fds = [call.as_fd()];
            let (first, second) = if split % 2 == 0 { (&fds[..], &[][..]) } else { (&[][..], &fds[..]) };
            fe.send_raw(&bytes[..split], first);
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            fe.send_raw(&bytes[split..], second);
            fe.sync().await;
            assert_eq!(session.stats.snapshot().messages, 2);
        }
        // Many messages in one piece.
        let (fe, session) = start();
        fe.send_raw(&message(code::SET_OWNER, 1, &[]).repeat(100), &[]);
        fe.sync().await;
        assert_eq!(session.stats.snapshot().messages, 101);
    });
}

#[test]
fn half_a_message_times_out() {
    on_local_set(async {
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        let (fe, session) = start();
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(!session.task.is_finished(), "an idle front-end stays connected");
        fe.send_raw(&message(code::SET_FEATURES, 1, &bytes![0_u64])[..13], &[]);
        let error = session.error().await;
        assert_eq!(
            error,
            "the front-end sent 13 bytes of a message and then no more bytes before the timeout"
        );
        assert!(begun.elapsed() < Duration::from_secs(45));
    });
}

#[test]
fn a_front_end_that_reads_no_replies() {
    on_local_set(async {
        let (fe, session) = start();
        let flood = message(code::GET_FEATURES, 1, &[]);
        // Until both directions of the socket stay full.
        let mut refused = 0;
        while refused < 20 {
            match fe.try_send_raw(&flood, &[]) {
                Ok(_) => refused = 0,
                Err(_) => {
                    refused += 1;
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }
        tokio::time::pause();
        assert_eq!(session.error().await, "the front-end does not read its replies");
    });
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test is about how long things take")]
fn a_flood_does_not_delay_other_sessions() {
    on_local_set(async {
        let (hostile, _hostile_session) = start();
        let (fe, _session) = start();
        let guest = Guest::new();
        hostile.negotiate().await;
        let table = guest.mem_table();
        let flood = async {
            loop {
                // Work for the back-end that it need not wait for.
                let sent =
                    hostile.try_send_raw(&message(code::SET_MEM_TABLE, 1, &table), &[guest.memory.as_fd()]);
                if sent.is_err() {
                    tokio::task::yield_now().await;
                }
            }
        };
        let measured = async {
            let mut slowest = Duration::ZERO;
            for _ in 0..200 {
                let begun = Instant::now();
                fe.sync().await;
                slowest = slowest.max(begun.elapsed());
            }
            slowest
        };
        let slowest = tokio::select! {
            slowest = measured => slowest,
            () = flood => unreachable!(),
        };
        assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    });
}

#[test]
fn unneeded_fds_are_accepted_and_closed() {
    on_local_set(async {
        let (fe, session) = start();
        let guest = Guest::new();
        fe.negotiate().await;
        let (payload, fds) = (guest.single_region(), [guest.memory.as_fd()]);
        assert!(fe.try_send(code::ADD_MEM_REG, &payload, &fds).await);
        assert!(fe.try_send(code::REM_MEM_REG, &payload, &fds).await, "with an fd");
        assert!(!fe.try_send(code::SET_LOG_BASE, &bytes![0_u64, 0_u64], &fds).await, "not negotiated");
        assert!(!fe.try_send(code::SET_LOG_FD, &[], &[eventfd().as_fd()]).await, "nor this");
        assert!(!fe.try_send(code::SET_INFLIGHT_FD, &[0; 24], &fds).await, "nor this");
        drop(fe);
        session.end().await.expect("no error");
    });
}
