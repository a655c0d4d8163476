//! Raw sockets against a server with test methods.

use super::*;
use crate::{Error, NoParams, Phase, Table};
use serde_json::{Value, json};
use std::cell::Cell;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);
const PRIVATE: SocketOptions = SocketOptions::with_mode(0o600);

/// Records the handlers' actions.
#[derive(Default)]
struct Seen {
    finished: Cell<u32>,
}

fn methods() -> Rc<Methods<Seen>> {
    let mut table = Table::default();
    table.add("echo", Phase::Any, "", async |seen: &Seen, p: Value| {
        seen.finished.set(seen.finished.get() + 1);
        Ok(p)
    });
    table.add("slow", Phase::Any, "", async |seen: &Seen, _: NoParams| {
        tokio::time::sleep(Duration::from_millis(300)).await;
        seen.finished.set(seen.finished.get() + 1);
        Ok("slow")
    });
    table.add("brief", Phase::Any, "", async |seen: &Seen, _: NoParams| {
        tokio::task::yield_now().await;
        seen.finished.set(seen.finished.get() + 1);
        Ok(seen.finished.get())
    });
    table.add("big", Phase::Any, "", async |_: &Seen, _: NoParams| Ok("x".repeat(1 << 20)));
    table.add("panic", Phase::Any, "", async |_: &Seen, _: NoParams| -> Result<(), Error> {
        panic!("on purpose")
    });
    table.add("seen", Phase::Any, "", async |seen: &Seen, _: NoParams| Ok(seen.finished.get()));
    Rc::new(Methods::new(Rc::new(Seen::default()), table, |_| true))
}

/// Runs `test` against a server, then stops the server and checks that it ends in time.
fn with_server<F: AsyncFnOnce(&Path)>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("rpc.sock");
        let server = Server::bind(&path, PRIVATE).unwrap();
        let (stop, stopped) = watch::channel(false);
        let running = tokio::task::spawn_local(server.serve(methods(), stopped));
        timeout(PATIENCE, test(&path)).await.expect("the test ends in time");
        stop.send(true).unwrap();
        timeout(PATIENCE, running).await.expect("the server ends in time").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    });
}

/// Sends `bytes`, closes the sending half, and reads all replies to the end.
async fn talk(path: &Path, bytes: &[u8]) -> Vec<Value> {
    let mut stream = UnixStream::connect(path).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.unwrap();
    serde_json::Deserializer::from_slice(&text).into_iter().map(Result::unwrap).collect()
}

fn request(method: &str, id: u32) -> String {
    json!({"jsonrpc": "2.0", "method": method, "id": id}).to_string()
}

async fn read_reply(stream: &mut UnixStream) -> Value {
    let mut text = Vec::new();
    loop {
        text.push(stream.read_u8().await.unwrap());
        if text.ends_with(b"\n") {
            return serde_json::from_slice(&text).unwrap();
        }
    }
}

#[test]
fn a_half_closed_client_gets_all_its_replies() {
    with_server(async |path| {
        let requests = format!("{}{}\t{}", request("slow", 1), request("echo", 2), request("nothing", 3));
        let mut replies = talk(path, requests.as_bytes()).await;
        replies.sort_by_key(|r| r["id"].as_u64());
        assert_eq!(replies.len(), 3);
        assert_eq!(replies[0]["result"], "slow");
        assert_eq!(replies[1]["result"], json!({}));
        assert_eq!(replies[2]["error"]["code"], -32601);
    });
}

#[test]
fn a_slow_request_does_not_delay_the_next() {
    with_server(async |path| {
        let replies = talk(path, format!("{}{}", request("slow", 1), request("echo", 2)).as_bytes()).await;
        let ids: Vec<_> = replies.iter().map(|r| r["id"].as_u64().unwrap()).collect();
        assert_eq!(ids, [2, 1]);
    });
}

#[test]
fn brief_requests_run_in_order() {
    with_server(async |path| {
        let requests: String = (1..=200).map(|id| request("brief", id)).collect();
        let replies = talk(path, requests.as_bytes()).await;
        assert_eq!(replies.len(), 200);
        for reply in replies {
            assert_eq!(reply["id"], reply["result"]);
        }
    });
}

#[test]
fn an_invalid_request_gets_an_error_and_ends_the_connection() {
    with_server(async |path| {
        let mut bytes = format!("{} GET / HTTP/1.1\r\n", request("echo", 1)).into_bytes();
        bytes.resize(300_000, b'z');
        let mut stream = UnixStream::connect(path).await.unwrap();
        // The server may have closed the connection before all bytes are written.
        let _ = stream.write_all(&bytes).await;
        assert_eq!(read_reply(&mut stream).await["id"], 1);
        let reply = read_reply(&mut stream).await;
        assert_eq!((&reply["id"], &reply["error"]["code"]), (&Value::Null, &json!(-32700)));
        let end = stream.read_u8().await.unwrap_err().kind();
        assert!(matches!(end, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset), "{end}");
        let replies = talk(path, b"{\"method\":").await;
        assert_eq!(replies[0]["error"]["code"], -32700);
        assert!(talk(path, b" \n").await.is_empty());
    });
}

#[test]
fn requests_of_a_client_that_does_not_read_are_not_read() {
    with_server(async |path| {
        let mut deaf = UnixStream::connect(path).await.unwrap();
        let bigs: String = (0..20_000).map(|id| request("big", id)).collect();
        let pushed = timeout(Duration::from_millis(500), deaf.write_all(bigs.as_bytes())).await;
        assert!(pushed.is_err(), "the server took 1.2 MB of requests for 20 GB of replies");
        assert_eq!(talk(path, request("echo", 1).as_bytes()).await[0]["id"], 1);
        let mut lines = BufReader::new(deaf).lines();
        for _ in 0..40 {
            let reply: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            assert_eq!(reply["result"].as_str().unwrap().len(), 1 << 20);
        }
    });
}

#[test]
fn a_client_that_disconnects_in_mid_reply_affects_no_other() {
    with_server(async |path| {
        for _ in 0..20 {
            let mut rude = UnixStream::connect(path).await.unwrap();
            rude.write_all((request("big", 1) + &request("slow", 2)).as_bytes()).await.unwrap();
            assert_eq!(rude.read_u8().await.unwrap(), b'{');
        }
        assert_eq!(talk(path, request("echo", 1).as_bytes()).await[0]["id"], 1);
        tokio::time::sleep(Duration::from_millis(600)).await;
        let seen = &talk(path, request("seen", 1).as_bytes()).await[0]["result"];
        assert_eq!(seen, 21, "requests run to their end even without their client");
    });
}

#[test]
fn many_clients_in_small_pieces() {
    with_server(async |path| {
        let mut clients = JoinSet::new();
        for client in 0..100 {
            let path = path.to_owned();
            clients.spawn_local(async move {
                let mut stream = UnixStream::connect(&path).await.unwrap();
                for byte in request("echo", client).bytes() {
                    stream.write_u8(byte).await.unwrap();
                    tokio::task::yield_now().await;
                }
                assert_eq!(read_reply(&mut stream).await["id"], client);
            });
        }
        assert_eq!(clients.join_all().await.len(), 100);
    });
}

#[test]
fn a_handler_that_panics_is_answered() {
    with_server(async |path| {
        let replies = talk(path, (request("panic", 1) + &request("echo", 2)).as_bytes()).await;
        assert_eq!(replies[0]["error"]["code"], -32603);
        assert_eq!(replies[0]["id"], 1);
        assert_eq!(replies[1]["id"], 2);
    });
}

#[test]
fn stopping_answers_pending_requests() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("rpc.sock");
        let (stop, stopped) = watch::channel(false);
        let server = Server::bind(&path, PRIVATE).unwrap();
        let running = tokio::task::spawn_local(server.serve(methods(), stopped));
        let mut stream = UnixStream::connect(&path).await.unwrap();
        stream.write_all(request("slow", 1).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        stop.send(true).unwrap();
        assert_eq!(read_reply(&mut stream).await["result"], "slow");
        timeout(PATIENCE, running).await.unwrap().unwrap();
    });
}

/// Binding needs a runtime, since tokio registers the socket.
fn in_runtime(test: impl FnOnce(&Path)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _guard = runtime.enter();
    let dir = TempDir::new().unwrap();
    test(dir.path());
}

#[test]
fn a_live_socket_is_refused_and_a_stale_one_replaced() {
    in_runtime(|dir| {
        let path = dir.join("s");
        let first = Server::bind(&path, PRIVATE).unwrap();
        assert!(matches!(Server::bind(&path, PRIVATE), Err(BindError::InUse(_))));
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let _second = Server::bind(&path, PRIVATE).unwrap();
    });
}

#[test]
fn a_server_without_a_lock_is_refused_too() {
    in_runtime(|dir| {
        let path = dir.join("s");
        let _other = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(matches!(Server::bind(&path, PRIVATE), Err(BindError::InUse(_))));
        assert!(path.exists());
    });
}

#[test]
fn a_file_that_is_no_socket_is_not_replaced() {
    in_runtime(|dir| {
        let path = dir.join("s");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Server::bind(&path, PRIVATE), Err(BindError::Listen(ListenError::NotASocket(_)))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let nowhere = Server::bind(&dir.join("no/s"), PRIVATE);
        assert!(matches!(nowhere, Err(BindError::Listen(ListenError::Os { .. }))));
    });
}

#[test]
fn the_mode_is_set() {
    in_runtime(|dir| {
        for mode in [0o600, 0o660, 0o777] {
            let server = Server::bind(&dir.join("s"), SocketOptions::with_mode(mode)).unwrap();
            let meta = fs::symlink_metadata(dir.join("s")).unwrap();
            assert_eq!(meta.permissions().mode() & 0o777, mode);
            drop(server);
        }
    });
}

/// The error code of a refused call.
fn code(reply: &Value) -> &Value {
    &reply["error"]["code"]
}

#[test]
fn read_only_clients_change_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut table = Table::default();
        table.add("look", Phase::Any, "", async |_: &Seen, _: NoParams| Ok(1));
        table.add("change", Phase::Any, "", async |_: &Seen, _: NoParams| Ok(2));
        table.add("mostly_look", Phase::Any, "", async |_: &Seen, _: NoParams| {
            crate::journal::may_change("to look hard").map(|()| 3)
        });
        table.change_nothing(&["look", "mostly_look"]);
        let methods = Methods::new(Rc::new(Seen::default()), table, |_| true);
        let (stop, stopped) = watch::channel(false);
        let serving = connection::serve(theirs, Rc::new(methods), Rights::ReadOnly, stopped);
        let serving = tokio::task::spawn_local(serving);
        let mut ask = async |text: String| {
            ours.write_all(text.as_bytes()).await.unwrap();
            read_reply(&mut ours).await
        };
        assert_eq!(ask(request("look", 1)).await["result"], 1);
        let refused = ask(request("change", 2)).await;
        assert_eq!(
            (code(&refused), &refused["error"]["message"]),
            (&json!(-13), &json!("Permission denied"))
        );
        assert!(refused["error"]["data"].as_str().unwrap().starts_with("change changes something"));
        assert_eq!(code(&ask(request("mostly_look", 3)).await), -13);
        assert_eq!(code(&ask(request("nothing", 4)).await), -32601);
        let batch = ask(format!("[{},{}]", request("look", 5), request("change", 6))).await;
        assert_eq!((&batch[0]["result"], code(&batch[1])), (&json!(1), &json!(-13)));
        stop.send_replace(true);
        timeout(PATIENCE, serving).await.unwrap().unwrap();
    });
}
