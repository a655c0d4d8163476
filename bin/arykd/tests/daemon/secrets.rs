//! Which memory of the daemon has keys and passphrases: only such that a core dump leaves out.

use crate::harness::{Daemon, code};
use aryk_luks::{Header, Limits};
use serde_json::{Value, json};
use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;

const PASSPHRASE: &[u8] = b"correct horse battery staple";
const NEW_PASSPHRASE: &[u8] = b"another horse, another battery";

/// Bytes in a page.
const PAGE: usize = 4096;

/// A run of pages of the daemon that it has touched.
struct Run {
    mapping: String,
    bytes: Vec<u8>,
    is_dumped: bool,
}

/// The private memory of the daemon.
fn memory(daemon: &Daemon) -> Vec<Run> {
    let path = |file: &str| format!("/proc/{}/{file}", daemon.pid());
    let smaps = std::fs::read_to_string(path("smaps")).unwrap();
    let (mem, pages) = (File::open(path("mem")).unwrap(), File::open(path("pagemap")).unwrap());
    let mut runs = Vec::new();
    let mut last = None;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap();
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((from, to)) = first.split_once('-').and_then(|(a, b)| Some((number(a)?, number(b)?))) {
            last = Some((from, to, words.next().unwrap().to_owned(), line.to_owned()));
        } else if first == "VmFlags:"
            && let Some((from, to, access, mapping)) = last.take()
            && access.starts_with("rw")
        {
            let mut entries = vec![0; (to - from) / PAGE * 8];
            pages.read_exact_at(&mut entries, (from / PAGE * 8) as u64).unwrap();
            let is_dumped = words.all(|flag| flag != "dd");
            // The two highest bits: in memory, or in swap.
            let entries =
                entries.as_chunks::<8>().0.iter().map(|entry| u64::from_le_bytes(*entry) >> 62 != 0);
            let entries: Vec<bool> = entries.collect();
            let mut at = from;
            for run in entries.chunk_by(|a, b| a == b) {
                let mut bytes = vec![0; run.len() * PAGE];
                // Registers that are mapped cannot be read.
                if run[0] && mem.read_exact_at(&mut bytes, at as u64).is_ok() {
                    runs.push(Run { mapping: mapping.clone(), bytes, is_dumped });
                }
                at += run.len() * PAGE;
            }
        }
    }
    runs
}

/// What is searched for, with its name.
type Needle = (&'static str, Vec<u8>);

/// What is in dumped memory, with the mapping; and the names of what is in other memory.
fn found(daemon: &Daemon, needles: &[Needle]) -> (Vec<String>, Vec<&'static str>) {
    let mut begins = [false; 256];
    needles.iter().for_each(|(_, needle)| begins[usize::from(needle[0])] = true);
    let (mut dumped, mut kept) = (Vec::new(), Vec::new());
    for run in memory(daemon) {
        for at in (0..run.bytes.len()).filter(|at| begins[usize::from(run.bytes[*at])]) {
            for (what, _) in needles.iter().filter(|(_, needle)| run.bytes[at..].starts_with(needle)) {
                match run.is_dumped {
                    true => dumped.push(format!("{what} at {at:#x} of {}", run.mapping)),
                    false => kept.push(*what),
                }
            }
        }
    }
    kept.sort_unstable();
    kept.dedup();
    (dumped, kept)
}

/// A key that has no text in common with others: its digits, and its bytes.
fn random_key() -> (String, Vec<u8>) {
    let bytes: Vec<u8> = (0..32).map(|_| fastrand::u8(1..)).collect();
    (bytes.iter().map(|byte| format!("{byte:02x}")).collect(), bytes)
}

/// The parameters of a new key, and what must not be found: its digits and bytes, in halves.
fn new_key(name: &str, needles: &mut Vec<Needle>) -> Value {
    let [(key, raw), (key2, raw2)] = [random_key(), random_key()];
    for text in [&key, &key2] {
        needles.push(("digits", text.as_bytes()[..32].to_vec()));
        needles.push(("digits", text.as_bytes()[32..].to_vec()));
    }
    for raw in [raw, raw2] {
        needles.extend(raw.chunks(16).map(|half| ("key", half.to_vec())));
    }
    json!({"cipher": "AES_XTS", "name": name, "key": key, "key2": key2})
}

fn key_file(daemon: &Daemon, name: &str, secret: &[u8]) -> std::path::PathBuf {
    let path = daemon.dir().join(name);
    std::fs::write(&path, secret).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    path
}

/// Sends the text of a request in pieces, and returns the reply.
#[expect(clippy::disallowed_methods, reason = "otherwise the daemon may read several pieces at once")]
fn send(stream: &mut UnixStream, pieces: &[&str]) -> Value {
    for piece in pieces {
        stream.write_all(piece.as_bytes()).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut reply = Vec::new();
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte).unwrap();
        reply.push(byte[0]);
    }
    serde_json::from_slice(&reply).unwrap()
}

fn request(method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string()
}

#[test]
fn a_core_dump_has_no_key_of_a_call() {
    let mut needles = Vec::new();
    let daemon = Daemon::start(&["--state-dir", "DIR/state", "-L", "debug"]);
    // The connection stays open: its buffers stay too.
    let mut stream = daemon.connect();
    let create =
        |name: &str, needles: &mut Vec<Needle>| request("accel_crypto_key_create", &new_key(name, needles));
    let whole = create("whole", &mut needles);
    assert_eq!(send(&mut stream, &[&whole])["result"], true);
    // Two requests, of which the second begins in the same piece.
    let (one, two) = (create("one", &mut needles), create("two", &mut needles));
    let text = format!("{one}{two}");
    let cut = one.len() + two.len() - 20;
    assert_eq!(send(&mut stream, &[&text[..cut]])["result"], true);
    assert_eq!(send(&mut stream, &[&text[cut..]])["result"], true);
    let batch = format!("[{},{}]", create("b1", &mut needles), create("b2", &mut needles));
    assert_eq!(send(&mut stream, &[&batch])[1]["result"], true);
    // Numbers in other forms have the request's text copied.
    let wrong = create("wrong", &mut needles).replace("\"wrong\"", "1.5e1");
    assert!(!send(&mut stream, &[&wrong])["error"].is_null());
    let config = json!({"subsystems": [{"subsystem": "accel", "config": [
        {"method": "accel_crypto_key_create", "params": new_key("of a file", &mut needles)},
    ]}]});
    assert_eq!(send(&mut stream, &[&request("load_config", &config)])["result"], true);
    let name = "a name that is no secret";
    daemon.call("bdev_null_create", json!({"name": name, "block_size": 512, "num_blocks": 8})).unwrap();
    needles.push(("a name", name.as_bytes().to_vec()));
    let wrapping_key = std::fs::read(daemon.dir().join("state/wrapping.key")).unwrap();
    needles.extend(wrapping_key.chunks(16).map(|half| ("wrapping key", half.to_vec())));
    let (dumped, kept) = found(&daemon, &needles);
    assert!(dumped.iter().all(|what| what.starts_with("a name")), "{dumped:#?}");
    assert!(!dumped.is_empty(), "names are found, so keys would be");
    assert_eq!(kept, ["key", "wrapping key"], "keys are in memory that is not dumped");
}

#[test]
fn a_core_dump_has_no_key_of_a_call_by_http_or_of_the_first_file() {
    let mut needles = Vec::new();
    let dir = tempfile::TempDir::new().unwrap();
    let config = json!({"subsystems": [{"subsystem": "accel", "config": [
        {"method": "accel_crypto_key_create", "params": new_key("of a file", &mut needles)},
    ]}]});
    std::fs::write(dir.path().join("config"), config.to_string()).unwrap();
    let users = dir.path().join("users");
    std::fs::write(&users, "me:secret\n").unwrap();
    std::fs::set_permissions(&users, Permissions::from_mode(0o600)).unwrap();
    let flags = ["-c", "DIR/config", "--rpc-http", "127.0.0.1:0", "--rpc-http-auth", "DIR/users"];
    let daemon = Daemon::start_in(dir, &flags);
    let body = request("accel_crypto_key_create", &new_key("by http", &mut needles));
    let mut stream = TcpStream::connect(("127.0.0.1", daemon.port())).unwrap();
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Basic bWU6c2VjcmV0\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(reply.contains("\"result\":true"), "{reply}");
    let (dumped, kept) = found(&daemon, &needles);
    assert_eq!(dumped, [] as [&str; 0]);
    assert_eq!(kept, ["key"]);
}

#[test]
fn a_core_dump_has_no_passphrase_and_no_volume_key() {
    let daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    let key = key_file(&daemon, "key", PASSPHRASE);
    let new_key = key_file(&daemon, "new", NEW_PASSPHRASE);
    let wrong = key_file(&daemon, "wrong", b"none of the passphrases above");
    let base = daemon.dir().join("base");
    File::create(&base).unwrap().set_len(24 << 20).unwrap();
    daemon.call("bdev_uring_create", json!({"name": "base", "filename": base})).unwrap();
    let cheap = json!({"name": "base", "key_file": key, "iter_time_ms": 1, "pbkdf_memory_kib": 1024});
    daemon.call("bdev_luks_format", cheap).unwrap();
    let open = |key_file| json!({"name": "luks", "base_bdev_name": "base", "key_file": key_file});
    assert_eq!(code(daemon.call("bdev_luks_create", open(&wrong))), -1);
    daemon.call("bdev_luks_create", open(&key)).unwrap();
    let add = json!({"name": "luks", "key_file": key, "new_key_file": new_key, "pbkdf": "pbkdf2", "iter_time_ms": 1});
    daemon.call("bdev_luks_add_key_slot", add).unwrap();
    let mut file = File::open(&base).unwrap();
    let limits = Limits::default();
    let header = Header::read(&mut file, &limits).unwrap();
    let volume_key = header.unlock(&mut file, NEW_PASSPHRASE, None, &limits).unwrap().key;
    let mut needles: Vec<Needle> =
        volume_key.as_bytes().chunks(16).map(|part| ("volume key", part.to_vec())).collect();
    needles.extend(
        [PASSPHRASE, NEW_PASSPHRASE, b"none of the passphrases above"]
            .map(|text| ("passphrase", text.to_vec())),
    );
    let (dumped, kept) = found(&daemon, &needles);
    assert_eq!(dumped, [] as [&str; 0]);
    assert_eq!(kept, ["volume key"], "it is in use; passphrases are not kept");
}
