//! Access to RPC methods: by the kernel's credentials on the RPC socket, by password and TLS over HTTP.

use crate::harness::{Daemon, code};
use aryk_rpc_client::{Client, Reply};
use rustix::process::{Gid, Uid, getuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde_json::{Value, json};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

/// Ids of a user and a group that do not exist on this host.
const STRANGER: u32 = 65_534;

/// A daemon in a directory that a stranger may search. `None`, with a message, if this process cannot change its user.
fn daemon(flags: &[&str]) -> Option<Daemon> {
    if !getuid().is_root() {
        eprintln!("skipped: only root can change its user");
        return None;
    }
    let daemon = Daemon::start(flags);
    std::fs::set_permissions(daemon.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
    Some(daemon)
}

/// Runs `f` on a thread with a stranger's credentials. The kernel keeps credentials per thread.
fn as_stranger<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let (uid, gid) = (Uid::from_raw(STRANGER), Gid::from_raw(STRANGER));
            set_thread_groups(&[]).unwrap();
            set_thread_res_gid(gid, gid, gid).unwrap();
            set_thread_res_uid(uid, uid, uid).unwrap();
            f()
        });
        thread.join().unwrap()
    })
}

fn call(daemon: &Daemon, method: &str, params: &Value) -> std::io::Result<Reply> {
    Client::connect(&daemon.socket())?.call(method, params)
}

fn null(name: &str) -> Value {
    json!({"name": name, "block_size": 512, "num_blocks": 8})
}

fn mode(daemon: &Daemon) -> u32 {
    std::fs::metadata(daemon.dir().join("rpc.sock")).unwrap().mode() & 0o777
}

#[test]
fn strangers_cannot_connect() {
    let Some(daemon) = daemon(&[]) else { return };
    assert_eq!(mode(&daemon), 0o600);
    let refused = as_stranger(|| call(&daemon, "spdk_get_version", &json!({})).unwrap_err().kind());
    assert_eq!(refused, std::io::ErrorKind::PermissionDenied);
}

#[test]
fn a_reader_reads_and_changes_nothing() {
    let Some(daemon) = daemon(&["--rpc-allow", "uid:65534=read-only", "--rpc-allow", "any=full"]) else {
        return;
    };
    assert_eq!(mode(&daemon), 0o666);
    daemon.call("bdev_null_create", null("ours")).unwrap();
    let (list, made, zeroed) = as_stranger(|| {
        let list = call(&daemon, "bdev_get_bdevs", &json!({})).unwrap().unwrap();
        let zero = json!({"reset_mode": "all"});
        (list, call(&daemon, "bdev_null_create", &null("theirs")), call(&daemon, "bdev_get_iostat", &zero))
    });
    assert_eq!(list[0]["name"], "ours");
    for refused in [made.unwrap(), zeroed.unwrap()] {
        let error = refused.unwrap_err();
        assert_eq!((&error["code"], &error["message"]), (&json!(-13), &json!("Permission denied")));
        assert!(error["data"].as_str().unwrap().contains("read-only"), "{error}");
    }
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap().as_array().unwrap().len(), 1);
}

#[test]
fn a_group_may_call_all_methods() {
    let group = STRANGER.to_string();
    let rule = format!("gid:{group}=full");
    let flags = ["--rpc-allow", &rule, "--rpc-socket-group", &group];
    let Some(daemon) = daemon(&flags) else { return };
    let socket = std::fs::metadata(daemon.dir().join("rpc.sock")).unwrap();
    assert_eq!((mode(&daemon), socket.gid()), (0o660, STRANGER));
    let made = as_stranger(|| call(&daemon, "bdev_null_create", &null("theirs")).unwrap());
    assert_eq!(made.unwrap(), "theirs");
}

#[test]
fn a_caller_without_a_rule_gets_an_error_and_is_disconnected() {
    let Some(daemon) = daemon(&["--rpc-allow", "uid:1=full"]) else { return };
    let refused: Value =
        as_stranger(|| serde_json::from_reader(UnixStream::connect(daemon.socket()).unwrap()).unwrap());
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&Value::Null, &json!(-13)));
    assert!(refused["error"]["data"].as_str().unwrap().contains("uid 65534"), "{refused}");
    daemon.call("spdk_get_version", json!({})).unwrap();
    assert_eq!(code(daemon.call("bdev_null_delete", json!({"name": "x"}))), -19, "root may call all methods");
}

/// Writes a file that only its owner may read.
fn private(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn curl_calls_over_tls() {
    let dir = tempfile::TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    private(Path::new(&at("key")), "");
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
        .args(["-out", &at("cert"), "-keyout", &at("key")])
        .output();
    let (Ok(made), Ok(_)) = (made, Command::new("curl").arg("--version").output()) else {
        eprintln!("skipped: there is no openssl, or no curl");
        return;
    };
    assert!(made.status.success(), "{made:?}");
    private(Path::new(&at("users")), "admin:s3cret\n");
    let (users, cert, key) = (at("users"), at("cert"), at("key"));
    let tls = ["--rpc-http-auth", &users, "--rpc-http-tls-cert", &cert, "--rpc-http-tls-key", &key];
    let daemon = Daemon::start(&[&["--rpc-http", "127.0.0.1:0"][..], &tls].concat());
    let port = daemon.port();
    let ask = |scheme: &str, user: &str, more: &[&str]| {
        let body = json!({"method": "spdk_get_version", "id": 5}).to_string();
        let url = format!("{scheme}://localhost:{port}/");
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--ipv4",
            "--noproxy",
            "*",
            "--max-time",
            "20",
            "--user",
            user,
            "--data",
            &body,
        ]);
        curl.args(more).arg(url).output().unwrap()
    };
    let trusting = ["--cacert", cert.as_str()];
    let answered = ask("https", "admin:s3cret", &trusting);
    assert!(answered.status.success(), "{answered:?}");
    let reply: Value = serde_json::from_slice(&answered.stdout).unwrap();
    assert_eq!(reply["id"], 5);
    assert!(reply["result"]["version"].as_str().unwrap().starts_with("Aryk"));
    assert!(String::from_utf8_lossy(&ask("https", "admin:guess", &trusting).stdout).contains("password"));
    assert!(!ask("https", "admin:s3cret", &[]).status.success(), "the certificate is not trusted");
    assert!(!ask("http", "admin:s3cret", &[]).status.success(), "there is no unencrypted fallback");
    let printed = daemon.end();
    assert!(printed.contains("https://127.0.0.1:0/, with a password"), "{printed}");
}
