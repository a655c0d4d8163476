//! Tests of client mode: sockets that do not exist, appear, disappear, are replaced; and other kinds of files.

use crate::device::Mock;
use crate::on_local_set;
use crate::peer::{FrontEnd, Guest};
use aryk_vhost_user::{Client, ListenError};
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::time::{Instant, sleep, timeout};

fn client(path: &Path) -> Client {
    Client::start("vm", path, Rc::new(Mock::default())).expect("a valid path")
}

fn listen(path: &Path) -> UnixListener {
    UnixListener::bind(path).expect("bind")
}

/// The front-end's side of the next connection, and the time until it arrived.
async fn accept(listener: &UnixListener) -> (FrontEnd, Duration) {
    let began = Instant::now();
    let (stream, _) =
        timeout(Duration::from_secs(20), listener.accept()).await.expect("no connection").expect("accept");
    (FrontEnd::accepted(stream), began.elapsed())
}

/// The maximum reaction time to a watch event, on a busy computer; after some attempts the client's retry timer is slower than
/// that.
const SOON: Duration = Duration::from_millis(800);

#[test]
fn a_socket_that_exists_and_one_that_appears() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vm.sock");
        let listener = listen(&path);
        let there = client(&path);
        assert_eq!(there.path(), path);
        let (fe, _) = accept(&listener).await;
        let guest = Guest::new();
        fe.with_queue(&guest).await;
        assert_eq!((there.stats().connected, there.stats().sessions), (true, 1));
        assert_eq!(there.stats().pid, i32::try_from(std::process::id()).ok());
        guest.set_avail_idx(0, 3);
        there.stop().await;
        assert_eq!(guest.used_idx(0), 3, "taken requests were served");
        fe.closed().await;
        drop(listener);

        let path = dir.path().join("later.sock");
        let later = client(&path);
        sleep(Duration::from_millis(100)).await;
        assert_eq!(later.stats().sessions, 0);
        let (fe, took) = accept(&listen(&path)).await;
        assert!(took < SOON, "{took:?}");
        fe.sync().await;
        later.stop().await;
    });
}

#[test]
fn directories_that_do_not_exist_yet() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let (a, b) = (dir.path().join("a"), dir.path().join("a/b"));
        let path = b.join("vm.sock");
        let client = client(&path);
        sleep(Duration::from_millis(20)).await;
        // The first directory is created and removed, is moved, and is created again.
        fs::create_dir_all(&b).expect("directories");
        sleep(Duration::from_millis(20)).await;
        fs::remove_dir_all(&a).expect("removed");
        sleep(Duration::from_millis(20)).await;
        fs::create_dir_all(&b).expect("directories");
        sleep(Duration::from_millis(20)).await;
        fs::rename(&a, dir.path().join("elsewhere")).expect("moved");
        sleep(Duration::from_millis(20)).await;
        fs::create_dir(&a).expect("a directory");
        fs::create_dir(dir.path().join("new")).expect("a directory");
        sleep(Duration::from_millis(20)).await;
        let listener = listen(&dir.path().join("new/vm.sock"));
        fs::rename(dir.path().join("new"), &b).expect("moved into place, with the socket in it");
        let (fe, took) = accept(&listener).await;
        assert!(took < SOON, "{took:?}");
        fe.sync().await;
        client.stop().await;
    });
}

#[test]
fn a_socket_created_between_check_and_watch_is_found() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        for round in 0..300_u64 {
            let parent = dir.path().join(format!("{round}/x/y"));
            let path = parent.join("s");
            let maker = std::thread::spawn(move || {
                for _ in 0..round % 100 * 20 {
                    std::hint::spin_loop();
                }
                fs::create_dir_all(&parent).expect("directories");
                let listener = std::os::unix::net::UnixListener::bind(parent.join("s")).expect("bind");
                listener.accept().expect("accept");
            });
            let client = client(&path);
            let came = async {
                while client.stats().sessions == 0 {
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(5), came).await.unwrap_or_else(|_| panic!("missed in round {round}"));
            client.stop().await;
            maker.join().expect("the maker does not panic");
        }
    });
}

/// How often this thread has slept.
fn sleeps() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").expect("status");
    let line =
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).expect("a count");
    line.trim().parse().expect("a number")
}

#[test]
fn thousands_of_absent_sockets_cost_nothing() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |i: u32| match i % 2 {
            0 => dir.path().join(format!("{i}.sock")),
            _ => dir.path().join(format!("{i}/vm.sock")),
        };
        let clients: Vec<Client> = (0..2000).map(|i| client(&path(i))).collect();
        sleep(Duration::from_millis(200)).await;
        let before = sleeps();
        sleep(Duration::from_millis(1500)).await;
        let after = sleeps();
        assert!(after - before <= 5, "{} wake-ups", after - before);
        let instances = fs::read_dir("/proc/self/fd").expect("fds").filter(|fd| {
            let name = fs::read_link(fd.as_ref().expect("an fd").path());
            name.is_ok_and(|name| name.to_string_lossy().contains("inotify"))
        });
        // Each other test of this process may have one instance.
        assert!(instances.count() < 20, "clients share an instance");
        for i in (0..2000).step_by(97) {
            fs::create_dir_all(path(i).parent().expect("a directory")).expect("directories");
            let (fe, took) = accept(&listen(&path(i))).await;
            assert!(took < SOON, "{i}: {took:?}");
            fe.sync().await;
        }
        assert_eq!(clients.iter().map(|client| client.stats().sessions).sum::<u64>(), 21);
        for client in clients {
            client.stop().await;
        }
    });
}

#[test]
fn a_stale_socket_is_retried_and_its_successor_is_found() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vm.sock");
        drop(listen(&path));
        let client = client(&path);
        // By now the client retries once a second.
        sleep(Duration::from_millis(1500)).await;
        assert_eq!((client.stats().sessions, client.stats().last_error), (0, None));
        fs::remove_file(&path).expect("removed");
        let listener = listen(&path);
        let (fe, took) = accept(&listener).await;
        assert!(took < SOON, "{took:?}");
        fe.sync().await;
        // The first listener ends, and the next appears at once; then another one replaces it by a rename.
        drop(fe);
        let (fe, took) = accept(&listener).await;
        assert!(took < SOON, "{took:?}");
        let other = dir.path().join("other.sock");
        let replacement = listen(&other);
        fs::rename(&other, &path).expect("moved over it");
        drop((fe, listener));
        let (fe, took) = accept(&replacement).await;
        assert!(took < SOON, "{took:?}");
        fe.sync().await;
        client.stop().await;
    });
}

#[test]
fn reconnects_to_a_front_end_that_hangs_up_at_once_are_delayed() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vm.sock");
        let listener = listen(&path);
        let client = client(&path);
        let flood = async {
            loop {
                drop(accept(&listener).await);
            }
        };
        let _ = timeout(Duration::from_millis(1000), flood).await;
        // 0, 5, 10, 20, … 640 ms.
        assert!((4..=10).contains(&client.stats().sessions), "{}", client.stats().sessions);
        client.stop().await;
    });
}

#[test]
fn a_full_backlog_is_retried() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vm.sock");
        let listener = listen(&path);
        rustix::net::listen(&listener, 0).expect("a backlog of one");
        let first = client(&path);
        let (second, third) = (client(&path), client(&path));
        sleep(Duration::from_millis(50)).await;
        let mut front_ends = Vec::new();
        for _ in 0..3 {
            front_ends.push(accept(&listener).await.0);
        }
        sleep(Duration::from_millis(50)).await;
        let all = [first, second, third];
        assert!(all.iter().all(|client| client.stats().sessions == 1 && client.stats().last_error.is_none()));
        for client in all {
            client.stop().await;
        }
    });
}

#[test]
fn a_path_that_is_no_socket_is_reported_and_retried() {
    on_local_set(async {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("vm.sock");
        let place = |kind: &str| match kind {
            "file" => fs::write(&path, "precious").expect("a file"),
            "directory" => fs::create_dir(&path).expect("a directory"),
            "link" => std::os::unix::fs::symlink(dir.path().join("nowhere"), &path).expect("a link"),
            _ => drop(UnixDatagram::bind(&path).expect("a datagram socket")),
        };
        let kinds = [
            ("file", "exists and is not a socket"),
            ("directory", "exists and is not a socket"),
            ("link", "a symbolic link whose target does not exist"),
        ];
        for (kind, expected) in kinds {
            place(kind);
            let client = client(&path);
            sleep(Duration::from_millis(30)).await;
            let error = client.stats().last_error.expect("one");
            assert!(error.contains(expected) && error.contains("vm.sock"), "{error}");
            assert_eq!((client.stats().sessions, client.stats().failed), (0, 0));
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
            let listener = listen(&path);
            accept(&listener).await.0.sync().await;
            client.stop().await;
            drop(listener);
            fs::remove_file(&path).expect("removed");
        }
        let datagrams = UnixDatagram::bind(&path).expect("a datagram socket");
        let client = client(&path);
        sleep(Duration::from_millis(30)).await;
        let error = client.stats().last_error.expect("one");
        assert!(error.contains("not a stream socket"), "{error}");
        drop(datagrams);
        client.stop().await;
        // A file in place of a directory.
        let below = dir.path().join("file/vm.sock");
        fs::write(dir.path().join("file"), "precious").expect("a file");
        let client = self::client(&below);
        sleep(Duration::from_millis(30)).await;
        let error = client.stats().last_error.expect("one");
        assert!(error.contains("a component of the path is not a directory"), "{error}");
        client.stop().await;
    });
}

#[test]
fn invalid_paths() {
    on_local_set(async {
        let long = "x".repeat(108);
        let error = Client::start("vm", long, Rc::new(Mock::default())).expect_err("too long");
        assert!(matches!(error, ListenError::PathTooLong { .. }), "{error}");
        let error =
            Client::start("vm", "a\0b", Rc::new(Mock::default())).expect_err("a NUL byte in the path");
        assert!(error.to_string().contains("cannot use the path"), "{error}");
        // A relative path that never exists.
        let client = client(Path::new("no/such/socket"));
        sleep(Duration::from_millis(10)).await;
        client.stop().await;
    });
}
