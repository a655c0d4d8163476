//! Tests of the client with a scripted daemon.

use super::*;
use std::io::Read;
use std::os::unix::net::UnixStream;

/// The result of a call to which the daemon replies `bytes`.
fn answered(bytes: &[u8]) -> Result<Value, Error> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // Only the reply that never comes may be waited for in vain.
    let timeout = Duration::from_millis(if bytes.is_empty() { 100 } else { 20_000 });
    ours.set_read_timeout(Some(timeout)).unwrap();
    let stream = BufReader::new(ours);
    let mut client = Client { path: PathBuf::new(), timeout: Duration::ZERO, stream, last_id: 0 };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut request = [0; 4096];
            let len = theirs.read(&mut request).unwrap();
            let request: Value = serde_json::from_slice(&request[..len]).unwrap();
            assert_eq!(request["method"], "m");
            theirs.write_all(bytes).unwrap();
            if bytes.is_empty() {
                std::thread::park_timeout(Duration::from_millis(300));
            }
        });
        client.call("m", json!({}))
    })
}

#[test]
fn results_and_errors() {
    assert_eq!(answered(br#"{"jsonrpc":"2.0","id":1,"result":[7]}"#).unwrap(), json!([7]));
    let error = answered(br#"{"id":1,"error":{"code":-17,"message":"File exists","data":"disk 'a'"}}"#);
    let error = error.unwrap_err();
    assert_eq!(error.to_string(), "File exists: disk 'a'");
    assert_eq!((error.exit_code(), error.hint()), (1, None), "the hint depends on the command");
    let hinted = error.hinted(&[(-19, "no"), (-17, "yes")]).hinted(&[(-17, "too late")]);
    assert_eq!(hinted.hint(), Some("yes"));
    let expected = json!({"message": "File exists: disk 'a'", "exit_code": 1, "hint": "yes", "code": -17});
    assert_eq!(hinted.to_json(), json!({"error": expected}));
}

#[test]
fn malformed_and_missing_replies() {
    for bytes in [&b"nonsense"[..], br#"{"id":2,"result":1}"#, b"{\"id\":1,", b""] {
        let error = answered(bytes).unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{error}");
    }
}

#[test]
fn no_daemon() {
    let Err(error) = Client::connect(Path::new("/nonexistent/s"), Duration::from_secs(1)) else { panic!() };
    assert_eq!(error.exit_code(), 3);
    assert!(error.hint().unwrap().contains("arykd"));
}
