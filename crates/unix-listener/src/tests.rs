//! Tests of sockets in a temporary directory: stale files, files of other processes, sockets in use, permissions, locks.

use super::{ListenError, Listener, Lock, SocketOptions, stream_socket};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;

fn bind(path: &Path) -> Result<Listener, ListenError> {
    Listener::bind(path, SocketOptions::default())
}

#[test]
fn bind_creates_replaces_stale_and_removes() {
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
    // A socket that another process put in place of ours is kept.
    std::fs::remove_file(&path).expect("removed by another");
    let _other = UnixListener::bind(&path).expect("another's");
    drop(second);
    assert!(path.exists(), "another's socket stays");
}

#[test]
fn a_listener_with_a_full_backlog_is_in_use() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("busy.sock");
    let _busy = UnixListener::bind(&path).expect("another's");
    let address = super::address(&path).expect("a path");
    let mut waiting = Vec::new();
    loop {
        let client = stream_socket().expect("a socket");
        match rustix::net::connect(&client, &address) {
            Ok(()) => waiting.push(client),
            Err(full) => break assert_eq!(full, rustix::io::Errno::AGAIN),
        }
    }
    assert!(matches!(bind(&path), Err(ListenError::InUse(_))), "{} wait", waiting.len());
}

#[test]
fn a_file_that_is_not_a_socket_is_kept() {
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
    let listener = Listener::bind(&path, options).expect("a socket");
    let mode = || path.metadata().expect("metadata").permissions().mode() & 0o7777;
    assert_eq!(mode(), 0o620);
    drop(listener);
    let listener = Listener::bind(&path, SocketOptions::default()).expect("a socket");
    assert_eq!(mode(), 0o600, "whatever the umask");
    drop(listener);
    for (asked, expected) in [(None, 0o660), (Some(0o600), 0o600)] {
        let options = SocketOptions { owner: None, group: Some(gid), mode: asked };
        let _listener = Listener::bind(&path, options).expect("a socket");
        assert_eq!(mode(), expected, "a group may connect, unless a mode is given");
    }
    for asked in [0, 0o600, 0o777] {
        let _listener = Listener::bind(&path, SocketOptions::with_mode(asked)).expect("a socket");
        assert_eq!(mode(), asked);
    }
    if uid != 0 {
        let options = SocketOptions { owner: Some(0), ..options };
        let error = Listener::bind(dir.path().join("root.sock"), options)
            .expect_err("the process may not set this owner");
        assert!(error.to_string().contains("cannot set the socket's owner or group"), "{error}");
        assert!(!dir.path().join("root.sock").exists(), "nothing is left");
    }
}

#[test]
fn a_lock_has_one_holder_and_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("rpc.sock");
    let first = Lock::take(&socket).expect("the lock is free");
    assert!(matches!(Lock::take(&socket), Err(ListenError::InUse(path)) if path == socket));
    drop(first);
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 0);
    let file = dir.path().join("rpc.sock.lock");
    std::fs::write(&file, "").expect("a lock file of a dead process");
    let _second = Lock::take(&socket).expect("the lock is free");
    assert!(matches!(Lock::take(&dir.path().join("no/s")), Err(ListenError::Os { .. })));
}
