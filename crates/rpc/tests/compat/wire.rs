//! Byte streams as clients send them, whole and in pieces, and the expected replies. The methods are the daemon's own.

use crate::Daemon;
use aryk_rpc::server::{Server, SocketOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;

/// Bytes, and their replies in any order: ids with results, or with codes and texts of errors.
struct Recording {
    bytes: &'static str,
    replies: fn() -> Vec<Value>,
}

const RECORDINGS: [Recording; 6] = [
    // Indented by blanks, each request alone, as SPDK's own client sends them.
    Recording {
        bytes: concat!(
            "{\n  \"jsonrpc\": \"2.0\",\n  \"method\": \"bdev_null_create\",\n  \"id\": 1,\n  \"params\": {\n    \"name\": \"n\",\n",
            "    \"num_blocks\": 2048,\n    \"block_size\": 512\n  }\n}",
            "{\n  \"jsonrpc\": \"2.0\",\n  \"method\": \"bdev_null_create\",\n  \"id\": 2,\n  \"params\": {\n    \"name\": \"n\",\n",
            "    \"num_blocks\": 2048,\n    \"block_size\": 512\n  }\n}",
            "{\n  \"jsonrpc\": \"2.0\",\n  \"method\": \"bdev_null_delete\",\n  \"id\": 3,\n  \"params\": {\n    \"name\": \"n\"\n  }\n}",
            "{\n  \"jsonrpc\": \"2.0\",\n  \"method\": \"bdev_null_delete\",\n  \"id\": 4,\n  \"params\": {\n    \"name\": \"n\"\n  }\n}",
        ),
        replies: || {
            vec![
                json!([1, "n"]),
                json!([2, -17, "File exists"]),
                json!([3, true]),
                json!([4, -19, "No such device"]),
            ]
        },
    },
    // Compact, one line each; parameters missing, null and empty; ids of all kinds.
    Recording {
        bytes: concat!(
            "{\"jsonrpc\":\"2.0\",\"id\":\"a\",\"method\":\"bdev_get_bdevs\"}\n",
            "{\"jsonrpc\":\"2.0\",\"id\":0,\"method\":\"bdev_get_bdevs\",\"params\":null}\n",
            "{\"jsonrpc\":\"2.0\",\"id\":18446744073709551615,\"method\":\"bdev_get_bdevs\",\"params\":{}}\n",
            "{\"jsonrpc\":\"2.0\",\"id\":-1,\"method\":\"bdev_get_bdevs\",\"params\":[]}\n",
            "{\"jsonrpc\":\"2.0\",\"method\":\"bdev_get_bdevs\"}\n",
            "{\"jsonrpc\":\"2.0\",\"id\":\"gone\",\"method\":\"bdev_get_bdevs\",\"params\":{\"name\":\"x\"}}\n",
        ),
        replies: || {
            vec![
                json!(["a", []]),
                json!([0, []]),
                json!([u64::MAX, []]),
                json!([-1, []]),
                json!(["gone", -19, "No such device"]),
            ]
        },
    },
    // With tabs and line ends between all tokens, and requests with various errors.
    Recording {
        bytes: concat!(
            "\t{\r\n\t\"method\"\t:\t\"no_such_method\"\t,\t\"id\"\t:\t1\t}\t",
            "{\t\"method\":\"bdev_get_bdevs\",\t\"id\":2,\t\"params\":{\"nam\":\"x\"}\t}\r\n\r\n",
            "{\"method\":\"bdev_null_create\",\"id\":3,\"params\":{\"name\":\"n\"}}",
            "{\"method\":\"bdev_null_create\",\"id\":4,\"params\":{\"name\":7,\"block_size\":512,\"num_blocks\":1}}",
            "{\"method\":\"bdev_null_create\",\"id\":5,\"params\":{\"name\":\"\\u0000\",\"block_size\":500,\"num_blocks\":1}}",
            "{\"method\":\"framework_start_init\",\"id\":6}",
            "{\"id\":7}",
        ),
        replies: || {
            vec![
                json!([1, -32601, "Method not found"]),
                json!([2, -32603, "Invalid parameters"]),
                json!([3, -32603, "Invalid parameters"]),
                json!([4, -32603, "Invalid parameters"]),
                json!([5, -22, "Invalid argument"]),
                json!([6, -1, "Method may not be called now"]),
                json!([7, -32600, "Invalid request"]),
            ]
        },
    },
    // A batch between two others, with a notification in it.
    Recording {
        bytes: concat!(
            "{\"id\":1,\"method\":\"bdev_get_bdevs\"}",
            "[{\"id\":2,\"method\":\"bdev_null_create\",\"params\":{\"name\":\"диск\",\"block_size\":512,\"num_blocks\":1}},",
            "\n {\"method\":\"bdev_null_delete\",\"params\":{\"name\":\"диск\"}},",
            "\t{\"id\":3,\"method\":\"bdev_null_delete\",\"params\":{\"name\":\"диск\"}}]",
            "{\"id\":4,\"method\":\"bdev_get_bdevs\"}",
        ),
        replies: || vec![json!([1, []]), json!([[2, "диск"], [3, -19, "No such device"]]), json!([4, []])],
    },
    // Other batches: empty, of invalid requests, of notifications alone, which are not answered, and one after another.
    Recording {
        bytes: concat!(
            "[]\n[1,\"x\",null]\r\n[{\"method\":\"bdev_get_bdevs\"},{\"method\":\"no_such_method\"}]",
            "[ {\"id\":1,\"method\":\"bdev_get_bdevs\"} ][\t{\"id\":\"2\",\"method\":\"bdev_get_bdevs\",\"params\":[]}\t]",
            "[[]]",
        ),
        replies: || {
            let no_request = json!([null, -32600, "Invalid request"]);
            vec![
                no_request.clone(),
                json!([no_request, no_request, no_request]),
                json!([[1, []]]),
                json!([["2", []]]),
                json!([no_request]),
            ]
        },
    },
    // Pipelined calls that depend on one another, without a byte between them; brackets, quotes and escapes in strings.
    Recording {
        bytes: concat!(
            "{\"id\":1,\"method\":\"bdev_null_create\",\"params\":{\"name\":\"}{][\\\"\\\\\",\"block_size\":512,\"num_blocks\":8}}",
            "{\"id\":2,\"method\":\"bdev_passthru_create\",\"params\":{\"name\":\"\\u0434\\ud83d\\udcbe\",\"base_bdev_name\":\"}{][\\u0022\\u005c\"}}",
            "{\"id\":3,\"method\":\"bdev_passthru_delete\",\"params\":{\"name\":\"д💾\"}}",
            "{\"id\":4,\"method\":\"bdev_null_delete\",\"params\":{\"name\":\"}{][\\\"\\\\\"}}",
            "{\"id\":5,\"method\":\"bdev_get_bdevs\",\"params\":{  }}",
        ),
        replies: || {
            vec![
                json!([1, "}{][\"\\"]),
                json!([2, "д💾"]),
                json!([3, true]),
                json!([4, true]),
                json!([5, []]),
            ]
        },
    },
];

/// A reply in the recordings' short form.
fn brief(reply: &Value) -> Value {
    if let Value::Array(batch) = reply {
        return batch.iter().map(brief).collect();
    }
    assert_eq!(reply["jsonrpc"], "2.0", "{reply}");
    match reply.get("error") {
        Some(error) => json!([reply["id"], error["code"], error["message"]]),
        None => json!([reply["id"], reply["result"]]),
    }
}

/// Sends pieces so that the server sees each alone; closes the sending half or not; returns the replies.
async fn talk(path: &Path, pieces: &[&[u8]], half_close: bool, replies: usize) -> Vec<Value> {
    let mut stream = UnixStream::connect(path).await.unwrap();
    for piece in pieces {
        stream.write_all(piece).await.unwrap();
        // The server is a task of this thread.
        tokio::task::yield_now().await;
    }
    if half_close {
        stream.shutdown().await.unwrap();
    }
    let (mut text, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let read = serde_json::Deserializer::from_slice(&text).into_iter();
        let seen: Vec<Value> = read.map_while(Result::ok).collect();
        if seen.len() >= replies && !half_close {
            return seen;
        }
        match stream.read(&mut chunk).await.unwrap() {
            0 => return seen,
            len => text.extend_from_slice(&chunk[..len]),
        }
    }
}

async fn check(path: &Path, recording: &Recording, pieces: &[&[u8]], half_close: bool) {
    let mut wanted = (recording.replies)();
    let mut seen: Vec<_> = talk(path, pieces, half_close, wanted.len()).await.iter().map(brief).collect();
    wanted.sort_by_key(Value::to_string);
    seen.sort_by_key(Value::to_string);
    let at = pieces.first().map(|piece| String::from_utf8_lossy(piece));
    assert_eq!(seen, wanted, "half-closed: {half_close}; first piece: {at:?}");
}

/// Runs `test` with a started daemon's socket.
fn with_socket(test: impl AsyncFnOnce(&Path)) {
    crate::in_daemon(async |daemon: &Daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let path: PathBuf = daemon.dir.path().join("rpc.sock");
        let server = Server::bind(&path, SocketOptions::with_mode(0o600)).unwrap();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::task::spawn_local(server.serve(Rc::clone(&daemon.methods), stopped));
        test(&path).await;
        stop.send_replace(true);
        serving.await.unwrap();
    });
}

#[test]
fn recordings_in_one_piece() {
    with_socket(async |path| {
        for recording in &RECORDINGS {
            for half_close in [true, false] {
                check(path, recording, &[recording.bytes.as_bytes()], half_close).await;
            }
        }
    });
}

#[test]
fn recordings_cut_at_every_byte() {
    with_socket(async |path| {
        for recording in &RECORDINGS {
            let bytes = recording.bytes.as_bytes();
            check(path, recording, &bytes.chunks(1).collect::<Vec<_>>(), true).await;
            for cut in 1..bytes.len() {
                let (a, b) = bytes.split_at(cut);
                check(path, recording, &[a, b], cut % 2 == 0).await;
            }
        }
    });
}

#[test]
fn all_recordings_down_one_connection() {
    with_socket(async |path| {
        let bytes = RECORDINGS.map(|recording| recording.bytes).concat();
        let wanted: usize = RECORDINGS.iter().map(|recording| (recording.replies)().len()).sum();
        assert_eq!(talk(path, &[bytes.as_bytes()], true, wanted).await.len(), wanted);
    });
}
