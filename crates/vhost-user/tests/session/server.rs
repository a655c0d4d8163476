//! Controllers that listen: reconnects, removal.

use crate::device::Mock;
use crate::on_local_set;
use crate::peer::{FrontEnd, Guest, code};
use aryk_vhost_user::{Listener, Server, SocketOptions};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

/// A controller on a socket of its own.
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
fn a_front_end_that_comes_back_at_once_is_served() {
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
            // Gone without a word; the next connects before that has been seen.
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
        assert_eq!(guest.used_idx(0), 2, "what was taken was served");
        fe.closed().await;
        assert!(!path.exists());
        let Controller { server, _dir, .. } = controller();
        server.stop().await;
    });
}
