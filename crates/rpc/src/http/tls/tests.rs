//! Clients that speak TLS, that do not, and that never finish the handshake; files that are not usable. openssl makes the
//! certificate.

use super::*;
use crate::http::{HttpServer, Passwords};
use crate::{Methods, Phase, Table};
use serde_json::Value;
use std::net::SocketAddr;
use std::process::Command;
use std::rc::Rc;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

const PATIENCE: Duration = Duration::from_secs(20);

/// A self-signed certificate for `localhost`, and its key; `None`, with a message, if openssl is not installed.
fn certificate(dir: &Path, name: &str) -> Option<(PathBuf, PathBuf)> {
    let (certificate, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
        .args(["-addext", "basicConstraints=critical,CA:FALSE", "-out"])
        .arg(&certificate)
        .arg("-keyout")
        .arg(&key)
        .output();
    let Ok(made) = made else {
        eprintln!("skipped: openssl is not installed");
        return None;
    };
    assert!(made.status.success(), "{made:?}");
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    Some((certificate, key))
}

fn connector(certificate: &Path) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(certificate).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

/// Runs `test` against a server with TLS.
fn with_server(test: impl AsyncFnOnce(SocketAddr, &Path)) {
    let dir = TempDir::new().unwrap();
    let Some((certificate, key)) = certificate(dir.path(), "a") else { return };
    let passwords = dir.path().join("passwords");
    std::fs::write(&passwords, "spdk:a:b\n").unwrap();
    std::fs::set_permissions(&passwords, std::fs::Permissions::from_mode(0o600)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let passwords = Passwords::read(&passwords).unwrap();
        let mut table = Table::default();
        table.add("echo", Phase::Any, "", async |(): &(), p: Value| Ok(p));
        let methods = Methods::new(Rc::new(()), table, |()| true);
        let server = HttpServer::bind("127.0.0.1:0".parse().unwrap(), passwords).await.unwrap();
        let server = server.with_tls(Tls::read(&certificate, &key).unwrap());
        let address = server.address().unwrap();
        let (stop, stopped) = watch::channel(false);
        let serving = tokio::task::spawn_local(server.serve(Rc::new(methods), stopped));
        timeout(PATIENCE, test(address, &certificate)).await.unwrap();
        stop.send_replace(true);
        timeout(PATIENCE, serving).await.unwrap().unwrap();
    });
}

const REQUEST: &str = "POST / HTTP/1.1\r\nHost: x\r\nAuthorization: Basic c3BkazphOmI=\r\nConnection: close\r\n\
    Content-Length: 24\r\n\r\n{\"method\":\"echo\",\"id\":7}";

/// Sends one request and returns its reply.
async fn ask(address: SocketAddr, certificate: &Path) -> String {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = connector(certificate).connect(name, stream).await.unwrap();
    stream.write_all(REQUEST.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.unwrap();
    reply
}

#[test]
fn a_client_is_answered() {
    with_server(async |address, certificate| {
        let reply = ask(address, certificate).await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        assert!(reply.contains(r#""id":7,"result":{}"#), "{reply}");
    });
}

#[test]
fn clients_without_tls_are_not_served() {
    with_server(async |address, certificate| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(REQUEST.as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        // The server sends a TLS alert, or just closes the connection.
        let _ = stream.read_to_end(&mut reply).await;
        assert!(!String::from_utf8_lossy(&reply).contains("HTTP"), "{reply:?}");
        assert!(ask(address, certificate).await.contains("200 OK"));
    });
}

#[test]
fn an_endless_handshake_does_not_block_other_clients() {
    with_server(async |address, certificate| {
        let mut silent = Vec::new();
        for client in 0..20 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            if client % 2 == 0 {
                // The first bytes of a record that announces 512 bytes.
                stream.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
            }
            silent.push(stream);
        }
        let asked = timeout(HANDSHAKE_TIME / 2, ask(address, certificate)).await;
        assert!(asked.expect("the client does not wait for others").contains("200 OK"));
        for mut stream in silent {
            let mut left = Vec::new();
            let ended = timeout(HANDSHAKE_TIME * 2, stream.read_to_end(&mut left)).await;
            assert!(ended.is_ok(), "the handshake has timed out");
        }
    });
}

#[test]
fn silent_clients_do_not_block_others() {
    with_server(async |address, certificate| {
        let mut silent = Vec::new();
        for _ in 0..3 * HANDSHAKES_MAX {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let asked = timeout(HANDSHAKE_TIME / 2, ask(address, certificate)).await;
        assert!(asked.expect("the client does not wait for others").contains("200 OK"));
        // The oldest handshakes were ended; the latest still have time.
        let ended = timeout(HANDSHAKE_TIME / 4, silent[0].read(&mut [0])).await;
        assert!(ended.is_ok());
        let last = silent.last_mut().unwrap();
        assert!(timeout(Duration::from_millis(10), last.read(&mut [0])).await.is_err());
    });
}

#[test]
fn unusable_files() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (Some((certificate, key)), Some((_, other))) =
        (certificate(dir.path(), "a"), certificate(dir.path(), "b"))
    else {
        return;
    };
    std::fs::write(at("empty"), "").unwrap();
    let text = |certificate: &Path, key: &Path| Tls::read(certificate, key).unwrap_err().to_string();
    assert!(text(&at("none"), &key).starts_with("cannot read a certificate from"));
    assert!(matches!(Tls::read(&certificate, &at("none")), Err(TlsError::File { .. })));
    assert!(text(&certificate, &at("empty")).contains("empty"), "{}", text(&certificate, &at("empty")));
    assert!(matches!(Tls::read(&certificate, &other), Err(TlsError::Unfit { .. })));
    assert!(matches!(Tls::read(&at("empty"), &key), Err(TlsError::Unfit { .. })));
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Tls::read(&certificate, &key), Err(TlsError::Exposed(_))));
}
