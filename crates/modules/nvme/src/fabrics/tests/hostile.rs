//! Targets that violate the protocol, or are silent, before and after the disk exists.

use super::authentication::{OF_HOST, secrets};
use super::config;
use crate::fabrics::{ConnectError, HostSecrets, RemoteConfig, RemoteControllers, RemoteError};
use aryk_bdev::Env;
use aryk_bdev_conformance::block_on;
use aryk_nvme::spec::entry::CompletionEntry;
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::tcp::{C2hData, Format, HEADER_MAX, Header, IcResp, R2t};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

fn pdu(header: &Header, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_MAX];
    let len = header.encode(&Format::default(), &mut bytes);
    bytes.truncate(len);
    bytes.extend(data);
    bytes
}

/// Attaches a controller of a target that `script` plays for each connection, and returns why that fails.
fn attach(script: impl Fn(TcpStream) + Send + 'static) -> ConnectError {
    attach_with(|_| (), script)
}

fn attach_with(
    configure: impl FnOnce(&mut RemoteConfig),
    script: impl Fn(TcpStream) + Send + 'static,
) -> ConnectError {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || listener.incoming().flatten().for_each(script));
    let controllers = RemoteControllers::default();
    let mut config = config(address);
    let short = Duration::from_millis(300);
    (config.admin_patience, config.connect_patience) = (short, short);
    configure(&mut config);
    let error = block_on(controllers.attach(&Env::default(), config)).unwrap_err();
    assert!(controllers.list().is_empty());
    match error {
        RemoteError::Target { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

/// Answers ICReq, and reads Connect.
fn greet(stream: &mut TcpStream) {
    let mut bytes = [0; 128];
    stream.read_exact(&mut bytes).unwrap();
    let answer = IcResp { alignment: 0, header_digest: false, data_digest: false, h2c_data_max: 4096 };
    stream.write_all(&pdu(&Header::IcResp(answer), &[])).unwrap();
    let mut connect = [0; 72 + 1024];
    stream.read_exact(&mut connect).unwrap();
}

/// Sends bytes after Connect, and waits until the host closes the connection.
fn answering(bytes: Vec<u8>) -> ConnectError {
    attach(move |mut stream| {
        greet(&mut stream);
        // The host may have closed the connection already.
        let _ = stream.write_all(&bytes);
        let _ = stream.read_to_end(&mut Vec::new());
    })
}

fn response(cid: u16, status: Status, result: u64) -> Vec<u8> {
    pdu(&Header::Response(CompletionEntry::new(cid, status, result)), &[])
}

#[test]
fn a_target_that_is_not_there_or_not_one_is_reported() {
    let refused = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        block_on(RemoteControllers::default().attach(&Env::default(), config(address))).unwrap_err()
    };
    assert!(matches!(refused, RemoteError::Target { reason: ConnectError::Io(_), .. }), "{refused}");
    assert!(matches!(attach(drop), ConnectError::Closed | ConnectError::Io(_)));
    let silent = attach(|mut stream| drop(stream.read_to_end(&mut Vec::new())));
    assert!(matches!(silent, ConnectError::Silent), "{silent}");
    let web = attach(|mut stream| {
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert!(matches!(web, ConnectError::Violation(_)), "{web}");
}

#[test]
fn wrong_answers_end_the_connection_with_their_reason() {
    let success = Status::new(0);
    let data = C2hData { cid: 0, offset: 0, len: 64, is_last: true, is_success: true };
    let r2t = R2t { cid: 0, tag: 0, offset: 1 << 20, len: 4096 };
    for (what, bytes) in [
        ("the answer to no command", response(9, success, 1)),
        ("data of Connect", pdu(&Header::C2hData(data), &[0; 64])),
        ("an R2T beyond the data", pdu(&Header::R2t(r2t), &[])),
        ("two answers", [response(0, success, 1), response(0, success, 1)].concat()),
        ("an unknown PDU", vec![0xee; 24]),
    ] {
        let error = answering(bytes);
        assert!(matches!(error, ConnectError::Violation(_)), "{what}: {error}");
    }
    let refused = answering(response(0, Code(0x184).status().as_final(), 0));
    assert!(matches!(refused, ConnectError::Status { status, .. } if status.is_final()), "{refused}");
    let wants = answering(response(0, success, 1 | 1 << 17));
    assert!(matches!(wants, ConnectError::Unsupported(_)), "{wants}");
    let closed = attach_with(
        |config| config.secrets = HostSecrets::new(Some(secrets(OF_HOST, None))),
        |mut stream| {
            greet(&mut stream);
            stream.write_all(&response(0, Status::new(0), 1 | 1 << 17)).unwrap();
        },
    );
    assert!(matches!(closed, ConnectError::ClosedInAuthentication), "{closed}");
    // The rest of a PDU never comes.
    let silent = answering(response(0, success, 1)[..20].to_vec());
    assert!(matches!(silent, ConnectError::Silent), "{silent}");
}
