//! Tests of controllers that listen: reconnects and removal.

use crate::device::Mock;
use crate::on_local_set;
use crate::peer::{FrontEnd, Guest, code};
use aryk_vhost_user::{Listener, Server, SocketOptions};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tracing::{Event, Level, Metadata, Subscriber, span};

/// A controller on its own socket.
struct Controller {
    server: Server,
    device: Rc<Mock>,
    _dir: tempfile::TempDir,
}

fn controller() -> Controller {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("vm.sock");
    let listener = Listener::bind(path, SocketOptions::default()).expect("a socket");
    let device = Rc::new(Mock::default());
    let server = Server::start("vm", listener, Rc::clone(&device)).expect("served");
    Controller { server, device, _dir: dir }
}

#[test]
fn a_front_end_that_reconnects_at_once_is_served() {
    on_local_set(async {
        let Controller { server, device, _dir } = controller();
        let guest = Guest::new();
        for round in 1..=20 {
            let fe = FrontEnd::connect(server.path()).await;
            fe.negotiate().await;
            fe.send(code::SET_MEM_TABLE, &guest.mem_table(), &[guest.memory.as_fd()]);
            fe.describe_queue(&guest, 0, u32::from(guest.used_idx(0)));
            fe.start_queue(0);
            fe.sync().await;
            assert_eq!(device.running.borrow()[&0].base, u32::from(round) - 1);
            guest.set_avail_idx(0, round);
            // The first front-end has disconnected; the next connects before the server has noticed that.
        }
        let stats = server.stats();
        assert_eq!((stats.sessions, stats.failed), (20, 0));
        server.stop().await;
        assert_eq!(guest.used_idx(0), 20);
    });
}

#[test]
fn a_second_front_end_waits_for_the_first() {
    on_local_set(async {
        let Controller { server, _dir, .. } = controller();
        let first = FrontEnd::connect(server.path()).await;
        first.sync().await;
        let second = FrontEnd::connect(server.path()).await;
        let third = FrontEnd::connect(server.path()).await;
        second.send(code::GET_QUEUE_NUM, &[], &[]);
        first.sync().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(server.stats().sessions, 1);
        drop(first);
        assert_eq!(second.reply_u64(code::GET_QUEUE_NUM).await, 4);
        drop(second);
        third.sync().await;
        assert_eq!(server.stats().sessions, 3);
    });
}

#[test]
fn stopping_a_controller() {
    on_local_set(async {
        let Controller { server, device, _dir } = controller();
        let path = server.path().to_owned();
        let (guest, fe) = (Guest::new(), FrontEnd::connect(&path).await);
        fe.with_queue(&guest).await;
        assert!(server.stats().connected);
        server.config_changed();
        guest.set_avail_idx(0, 2);
        server.stop().await;
        assert!(device.running.borrow().is_empty() && device.session.borrow().is_none());
        assert_eq!(guest.used_idx(0), 2, "taken requests were served");
        fe.closed().await;
        assert!(!path.exists());
        let Controller { server, _dir, .. } = controller();
        server.stop().await;
    });
}

#[test]
fn front_ends_that_find_no_room_in_the_backlog_are_refused() {
    on_local_set(async {
        let Controller { server, _dir, .. } = controller();
        let served = FrontEnd::connect(server.path()).await;
        served.sync().await;
        let address = SocketAddrUnix::new(server.path()).expect("a path");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let mut waiting = Vec::new();
        let refused = loop {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
            match connect(&socket, &address) {
                Ok(()) => waiting.push(socket),
                Err(error) => break error,
            }
            assert!(waiting.len() < 1000, "the backlog is not limited");
            served.sync().await;
        };
        // One accepted connection, and those of the kernel's backlog: one more than requested.
        assert_eq!((refused, waiting.len()), (Errno::AGAIN, 1 + 129));
    });
}

#[test]
fn many_short_sessions_in_a_row_are_delayed() {
    on_local_set(async {
        let Controller { server, _dir, .. } = controller();
        let began = tokio::time::Instant::now();
        for _ in 0..32 + 1 + 10 {
            FrontEnd::connect(server.path()).await.sync().await;
        }
        // Twenty sessions in a second.
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(10 * 50), "{took:?} for {} sessions", server.stats().sessions);
    });
}

/// Counts lines of the log.
#[derive(Default)]
struct Lines {
    warnings: AtomicU32,
    infos: AtomicU32,
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let lines = if *event.metadata().level() == Level::INFO { &self.infos } else { &self.warnings };
        lines.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn log_lines_are_limited_for_each_controller() {
    let lines = Arc::new(Lines::default());
    // With one dispatcher, `tracing` asks the thread that comes to a line first whether any subscriber wants it, and that may be
    // another test's thread, which has none.
    let _second = tracing::Dispatch::new(Lines::default());
    let _counted = tracing::subscriber::set_default(Arc::clone(&lines));
    on_local_set(async {
        let Controller { server, _dir, .. } = controller();
        for _ in 0..25 {
            let fe = FrontEnd::connect(server.path()).await;
            fe.negotiate().await;
            for _ in 0..4 {
                assert!(!fe.try_send(code::SET_VRING_NUM, &[0; 8], &[]).await);
            }
        }
        assert_eq!(server.stats().refused, 100, "all refusals are counted");
        let [warnings, infos] = [&lines.warnings, &lines.infos].map(|count| count.load(Ordering::Relaxed));
        // The initial burst of lines, and one more in every five seconds.
        assert!((10..=12).contains(&warnings) && (20..=22).contains(&infos), "{warnings}, {infos}");
    });
}
