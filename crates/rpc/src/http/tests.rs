//! Raw HTTP requests against a server with test methods.

use super::*;
use crate::{NoParams, Phase, Table};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// `spdk:a:b`: a password may contain colons.
const KEY: &str = "Authorization: Basic c3BkazphOmI=\r\n";

fn write(dir: &TempDir, text: &str, mode: u32) -> PathBuf {
    let path = dir.path().join("passwords");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

/// Runs `test` against a server, then stops it and runs `then` with the client that `test` returned.
fn with_server<T>(test: impl AsyncFnOnce(SocketAddr) -> T, then: impl AsyncFnOnce(T)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let dir = TempDir::new().unwrap();
        let passwords = Passwords::read(&write(&dir, "# who\n\nother:x\nspdk:a:b\n", 0o600)).unwrap();
        let mut table = Table::default();
        table.add("echo", Phase::Any, "", async |(): &(), p: Value| Ok(p));
        table.add("slow", Phase::Any, "", async |(): &(), _: NoParams| {
            tokio::time::sleep(Duration::from_millis(300)).await;
            Ok("slow")
        });
        let methods = Methods::new(Rc::new(()), table, |()| true);
        let server = HttpServer::bind("127.0.0.1:0".parse().unwrap(), passwords).await.unwrap();
        let address = server.address().unwrap();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::task::spawn_local(server.serve(Rc::new(methods), stopped));
        let left = test(address).await;
        stop.send_replace(true);
        tokio::time::timeout(FAREWELL * 5, serving).await.unwrap().unwrap();
        then(left).await;
    });
}

async fn no_client((): ()) {}

/// Sends a request and reads to the end: returns the status, the head and the body.
async fn ask(address: SocketAddr, head: &str, body: &[u8]) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let head = format!("{head}Host: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    // The server may refuse the request before all of it is written.
    let _ = stream.write_all(body).await;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), head.to_ascii_lowercase(), body.to_owned())
}

async fn post(address: SocketAddr, body: &str) -> (u16, Value) {
    let head = format!("POST /any/path HTTP/1.1\r\n{KEY}");
    let (status, head, body) = ask(address, &head, body.as_bytes()).await;
    assert!(status != 200 || head.contains("content-type: application/json"), "{head}");
    (status, serde_json::from_str(&body).unwrap_or_default())
}

#[test]
fn one_request_or_one_batch() {
    with_server(
        async |address| {
            let (status, reply) =
                post(address, "{\"method\":\"echo\",\"id\":7,\"params\":{\"a\":[\"диск\"]}}\n").await;
            assert_eq!((status, reply), (200, json!({"jsonrpc": "2.0", "id": 7, "result": {"a": ["диск"]}})));
            let (_, reply) = post(address, r#"[{"method":"echo","id":1},{"method":"no","id":2}]"#).await;
            assert_eq!((&reply[0]["result"], &reply[1]["error"]["code"]), (&json!({}), &json!(-32601)));
            assert_eq!(post(address, r#"{"method":"echo"}"#).await.0, 204);
            for (body, code) in [
                ("", -32700),
                ("{", -32700),
                ("{\"id\":1}", -32600),
                (r#"{"method":"echo","id":1}[]"#, -32600),
            ] {
                let (status, reply) = post(address, body).await;
                assert_eq!((status, &reply["error"]["code"]), (200, &json!(code)), "{body}");
            }
        },
        no_client,
    );
}

#[test]
fn clients_without_a_password_are_refused() {
    with_server(
        async |address| {
            // No password, another scheme, invalid base64, a wrong password, a prefix of the right one.
            let keys =
                ["", "Bearer c3BkazphOmI=", "Basic !", "Basic c3Bkazp4", "Basic c3BkazphOg==", "Basic"];
            let refused = keys.map(|key| async move {
                let key = if key.is_empty() { String::new() } else { format!("Authorization: {key}\r\n") };
                let request = format!("POST / HTTP/1.1\r\n{key}");
                let (status, head, body) = ask(address, &request, br#"{"method":"echo","id":1}"#).await;
                assert_eq!(status, 401, "{key}");
                assert!(
                    head.contains("www-authenticate: basic realm=") && !body.contains("result"),
                    "{head}"
                );
            });
            for refused in refused {
                refused.await;
            }
            let lower = "POST / HTTP/1.1\r\nauthorization: basic  c3BkazphOmI=\r\n";
            assert_eq!(ask(address, lower, br#"{"method":"echo","id":1}"#).await.0, 200);
        },
        no_client,
    );
}

#[test]
fn invalid_requests() {
    with_server(
        async |address| {
            let (status, head, _) = ask(address, &format!("GET / HTTP/1.1\r\n{KEY}"), b"").await;
            assert_eq!(status, 405);
            assert!(head.contains("allow: post"), "{head}");
            let long = vec![b' '; REQUEST_LEN_MAX + 1];
            assert_eq!(ask(address, &format!("POST / HTTP/1.1\r\n{KEY}"), &long).await.0, 413);
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"{\"method\":\"echo\"}\r\n\r\n").await.unwrap();
            let mut reply = String::new();
            stream.read_to_string(&mut reply).await.unwrap();
            assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 400"), "{reply}");
        },
        no_client,
    );
}

#[test]
fn stopping_answers_pending_requests() {
    let test = async |address| {
        let client = tokio::task::spawn_local(post(address, r#"{"method":"slow","id":1}"#));
        tokio::time::sleep(Duration::from_millis(100)).await;
        (client,)
    };
    with_server(test, async |(client,)| assert_eq!(client.await.unwrap().1["result"], "slow"));
}

#[test]
fn unauthenticated_clients_do_not_block_others() {
    let request = |method: &str| {
        let body = format!(r#"{{"method":"{method}","id":1}}"#);
        format!("POST / HTTP/1.1\r\n{KEY}Host: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let is_answered = async |stream: &mut TcpStream| {
        let mut reply = [0; 12];
        stream.read_exact(&mut reply).await.unwrap();
        assert_eq!(&reply, b"HTTP/1.1 200");
    };
    let test = async |address| {
        // A client that has authenticated and sends nothing now, and one whose call runs.
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(request("echo").as_bytes()).await.unwrap();
        is_answered(&mut idle).await;
        let mut busy = TcpStream::connect(address).await.unwrap();
        busy.write_all(request("slow").as_bytes()).await.unwrap();
        let mut strangers = Vec::new();
        for stranger in 0..3 * clients::CONNECTIONS_MAX {
            let mut stream = TcpStream::connect(address).await.unwrap();
            if stranger % 2 == 0 {
                stream.write_all(b"POST / HTTP/1.1\r\nHo").await.unwrap();
            }
            strangers.push(stream);
        }
        let asked = post(address, r#"{"method":"echo","id":1}"#);
        let (status, _) =
            tokio::time::timeout(REQUEST_TIME / 10, asked).await.expect("the client does not wait");
        assert_eq!(status, 200);
        is_answered(&mut busy).await;
        // The oldest unauthenticated clients were disconnected; the latest still have time.
        let short = Duration::from_millis(100);
        assert!(tokio::time::timeout(short, strangers[0].read(&mut [0])).await.is_ok());
        let last = strangers.last_mut().unwrap();
        assert!(tokio::time::timeout(short, last.read(&mut [0])).await.is_err());
        let mut rest = [0; 4096];
        assert!(idle.read(&mut rest).await.unwrap() > 0);
        idle.write_all(request("echo").as_bytes()).await.unwrap();
        is_answered(&mut idle).await;
    };
    with_server(test, no_client);
}

#[test]
fn password_files() {
    let dir = TempDir::new().unwrap();
    let read = |text, mode| Passwords::read(&write(&dir, text, mode));
    assert!(matches!(read("a:b\n", 0o640), Err(PasswordsError::Exposed(_))));
    assert!(matches!(read("# nobody\n\n", 0o600), Err(PasswordsError::Empty(_))));
    for text in ["a:b\nab\n", "a:b\n:b\n", "a:b\na:\n"] {
        assert!(matches!(read(text, 0o600), Err(PasswordsError::Line { line: 2, .. })), "{text}");
    }
    assert!(matches!(Passwords::read(&dir.path().join("no")), Err(PasswordsError::Read { .. })));
    assert_eq!(format!("{:?}", read("a:b\nc:d", 0o600).unwrap()), "2 passwords");
}
