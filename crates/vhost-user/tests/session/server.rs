//! Sockets and controllers: stale and foreign sockets, rights, reconnects, removal.

use crate::device::Mock;
use crate::on_local_set;
use crate::peer::{FrontEnd, Guest, code};
use aryk_vhost_user::{ListenError, Listener, Server, SocketOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

fn bind(path: &Path) -> Result<Listener, ListenError> {
    Listener::bind(path, SocketOptions::default())
}

#[test]
fn sockets_are_made_replaced_and_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("vm.sock");
    let first = bind(&path).expect("a new socket");
    assert!(path.metadata().expect("it is there").file_type().is_socket());
    let error = bind(&path).expect_err("in use");
    assert!(matches!(error, ListenError::InUse(_)), "{error}");
    drop(first);
    assert!(!path.exists(), "removed");
    drop(UnixListener::bind(&path).expect("a socket that is left behind"));
    assert!(path.exists());
    let second = bind(&path).expect("the stale one is replaced");
    // Whoever took the place of ours keeps it.
    std::fs::remove_file(&path).expect("removed by another");
    let _other = UnixListener::bind(&path).expect("another's");
    drop(second);
    assert!(path.exists(), "another's socket stays");
}

#[test]
fn what_is_no_socket_stays() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("precious");
    std::fs::write(&path, "data").expect("written");
    let error = bind(&path).expect_err("a file");
    assert!(error.to_string().ends_with("exists and is not a socket"), "{error}");
    std::os::unix::fs::symlink(dir.path().join("nowhere"), dir.path().join("link")).expect("symlink");
    assert!(matches!(bind(&dir.path().join("link")), Err(ListenError::NotASocket(_))));
    assert_eq!(std::fs::read(&path).expect("still there"), b"data");
    let long = dir.path().join("x".repeat(108));
    let error = bind(&long).expect_err("too long");
    assert!(error.to_string().ends_with("has at most 107 bytes"), "{error}");
    let error = bind(&dir.path().join("no/such/directory")).expect_err("no directory");
    assert!(error.to_string().contains("No such file"), "{error}");
}

#[test]
fn rights() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("vm.sock");
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let options = SocketOptions { owner: Some(uid), group: Some(gid), mode: Some(0o620) };
    let _listener = Listener::bind(&path, options).expect("a socket");
    assert_eq!(path.metadata().expect("metadata").permissions().mode() & 0o7777, 0o620);
    if uid != 0 {
        let options = SocketOptions { owner: Some(0), ..options };
        let error = Listener::bind(dir.path().join("root.sock"), options).expect_err("not ours to give");
        assert!(error.to_string().contains("cannot set the socket's owner or group"), "{error}");
        assert!(!dir.path().join("root.sock").exists(), "nothing is left");
    }
}

/// A controller on a socket of its own.
struct Controller {
    server: Server,
    device: Rc<Mock>,
    _dir: tempfile::TempDir,
}

fn controller() -> Controller {
    let dir = tempfile::tempdir().expect("a directory");
    let listener = bind(&dir.path().join("vm.sock")).expect("a socket");
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
