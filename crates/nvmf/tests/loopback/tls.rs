//! TLS: hosts behind a tunnel, which makes the handshake for them.

use crate::host::{Connection, Options};
use crate::raw::{Raw, capsule};
use crate::target::{BLOCK, Running, SUBSYSTEM, until};
use crate::{VARIANTS, pattern};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::discovery::{Entry, RECORD_LEN, Security};
use aryk_nvme_fabrics::nqn::{DISCOVERY, Nqn};
use aryk_nvme_fabrics::psk::{self, ConfiguredPsk, Version};
use aryk_nvme_fabrics::status;
use aryk_nvme_fabrics::subsystem::AnaState;
use aryk_nvmf::{Address, Channel, Limits, TlsKey};
use aryk_tls::{Hash, Progress, Psk, Session, TlsError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const SHA256: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const SHA384: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

fn configured(text: &str) -> ConfiguredPsk {
    ConfiguredPsk::parse(text.as_bytes()).unwrap()
}

fn name(host: u8) -> Nqn {
    format!("nqn.2016-06.io.spdk:host{host}").parse().unwrap()
}

/// The key of a host.
fn psk(text: &str, version: Version, host: u8, subsystem: &str) -> Psk {
    let derived = configured(text).of_tls(version, &name(host), &subsystem.parse().unwrap()).unwrap();
    let hash = match derived.hash {
        psk::Hash::Sha256 => Hash::Sha256,
        psk::Hash::Sha384 => Hash::Sha384,
    };
    Psk::new(&derived.identity, &derived.secret, hash).unwrap()
}

/// A target whose host 1 has a key, and host 2 has none; and the address at which hosts use TLS.
fn start(text: &str) -> (Running, SocketAddr) {
    let target = Running::start();
    let secure = listen(&target, text);
    (target, secure)
}

/// Gives host 1 a key, and returns the address at which hosts use TLS.
fn listen(target: &Running, text: &str) -> SocketAddr {
    let key = TlsKey::new("key".into(), &configured(text), &name(1), &SUBSYSTEM.parse().unwrap()).unwrap();
    target.run(async move |target| {
        target.set_tls_key(SUBSYSTEM, name(1), key).unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        target.listen(SUBSYSTEM, Address::tcp(any), AnaState::Optimized, Channel::Tls).await.unwrap().socket
    })
}

/// Has host 1 of a target use TLS, and returns the address of a tunnel for it.
pub fn secure(target: &Running) -> SocketAddr {
    let secure = listen(target, SHA256);
    tunnel(secure, vec![psk(SHA256, Version::Digest, 1, SUBSYSTEM)]).0
}

/// Moves bytes between a plain socket and one with TLS, until one of them ends. Both are non-blocking.
fn pump(mut plain: TcpStream, mut sealed: TcpStream, mut session: Session) -> std::io::Result<()> {
    let mut bytes = vec![0; 1 << 16];
    let mut opened = vec![0; 1 << 16];
    let write = |socket: &mut TcpStream, bytes: &[u8]| {
        socket.set_nonblocking(false)?;
        socket.write_all(bytes)?;
        socket.set_nonblocking(true)
    };
    loop {
        let mut fds = [PollFd::new(&plain, PollFlags::IN), PollFd::new(&sealed, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 10, tv_nsec: 0 }))?;
        match plain.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => {
                let mut records = Vec::new();
                session.write(&bytes[..len], &mut records).unwrap();
                write(&mut sealed, &records)?;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        match sealed.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => {
                let mut received = &bytes[..len];
                while let len @ 1.. = session.read(&mut received, &mut opened).unwrap() {
                    write(&mut plain, &opened[..len])?;
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes a handshake, as a host that blocks.
fn shake(socket: &mut TcpStream, keys: Vec<Psk>) -> Result<Session, TlsError> {
    let mut session = Session::connect(keys).unwrap();
    let (mut bytes, mut received) = ([0; 4096], 0..0);
    loop {
        let mut output = Vec::new();
        let mut input = &bytes[received];
        let progress = session.handshake(&mut input, &mut output);
        socket.write_all(&output).unwrap();
        if progress? == Progress::Complete {
            return Ok(session);
        }
        let len = socket.read(&mut bytes).unwrap();
        assert!(len > 0, "the target closes the connection without a reason");
        received = 0..len;
    }
}

/// The address of a tunnel to a target, and how its handshakes end.
fn tunnel(to: SocketAddr, keys: Vec<Psk>) -> (SocketAddr, Receiver<Result<(), TlsError>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        for plain in listener.incoming() {
            let (plain, keys, sender) = (plain.unwrap(), keys.clone(), sender.clone());
            std::thread::spawn(move || {
                let mut sealed = TcpStream::connect(to).unwrap();
                let shaken = shake(&mut sealed, keys);
                let _ = sender.send(shaken.as_ref().map(|_| ()).map_err(|error| *error));
                if let Ok(session) = shaken {
                    plain.set_nonblocking(true).unwrap();
                    sealed.set_nonblocking(true).unwrap();
                    // The test sees what is lost.
                    let _ = pump(plain, sealed, session);
                }
            });
        }
    });
    (address, ended)
}

#[test]
fn a_host_writes_and_reads_with_each_version_and_hash() {
    for (text, version) in [
        (SHA256, Version::Digest),
        (SHA384, Version::Digest),
        (SHA256, Version::Names),
        (SHA384, Version::Names),
    ] {
        let (target, secure) = start(text);
        let (address, _) = tunnel(secure, vec![psk(text, version, 1, SUBSYSTEM)]);
        for (header_digest, data_digest, disables_flow_control) in VARIANTS {
            let options = Options { header_digest, data_digest, disables_flow_control, alignment: 3 };
            let (_admin_queue, id) = Connection::admin(address, options, SUBSYSTEM, 1);
            let mut queues = [1, 2].map(|qid| Connection::io(address, options, id, qid, 1).unwrap());
            for (lba, blocks) in [(0, 1), (1, 2), (3, 8), (11, 32)] {
                let data = pattern(blocks, lba);
                queues[lba % 2].write(lba as u64, &data).unwrap();
                assert!(queues[(lba + 1) % 2].read(lba as u64, blocks).unwrap() == data, "{lba}");
            }
        }
        target.stop();
    }
}

#[test]
fn a_wrong_key_is_refused_with_the_reason() {
    let (target, secure) = start(SHA256);
    let mut wrong = TcpStream::connect(secure).unwrap();
    let of_other = configured(SHA256).of_tls(Version::Names, &name(1), &SUBSYSTEM.parse().unwrap()).unwrap();
    let forged = Psk::new(&of_other.identity, &[1; 32], Hash::Sha256).unwrap();
    assert_eq!(shake(&mut wrong, vec![forged]).err(), Some(TlsError::Refused(51)));
    for unknown in [psk(SHA256, Version::Names, 2, SUBSYSTEM), psk(SHA384, Version::Names, 1, SUBSYSTEM)] {
        let mut socket = TcpStream::connect(secure).unwrap();
        assert_eq!(shake(&mut socket, vec![unknown]).err(), Some(TlsError::Refused(115)));
    }
    // Its key has gone with the host.
    let key = psk(SHA256, Version::Digest, 1, SUBSYSTEM);
    shake(&mut TcpStream::connect(secure).unwrap(), vec![key.clone()]).unwrap();
    target.run(async |target| target.remove_host(SUBSYSTEM, &name(1)).await.unwrap());
    let refused = shake(&mut TcpStream::connect(secure).unwrap(), vec![key]);
    assert_eq!(refused.err(), Some(TlsError::Refused(115)));
    assert_eq!(target.run(async |target| target.failed_authentications()), 4);
    target.stop();
}

#[test]
fn a_host_uses_its_own_key_and_tls_if_it_has_a_key() {
    let (target, secure) = start(SHA256);
    let options = Options::default();
    let try_admin = |address, subsystem, host| Connection::try_admin(address, options, subsystem, host).err();
    // A name that is not that of the key, a host with a key on a plain connection, and both as they should be.
    let (address, _) = tunnel(secure, vec![psk(SHA256, Version::Names, 1, SUBSYSTEM)]);
    assert_eq!(try_admin(address, SUBSYSTEM, 2), Some(status::INVALID_HOST));
    assert_eq!(try_admin(target.address, SUBSYSTEM, 1), Some(status::INVALID_HOST));
    assert_eq!(try_admin(target.address, SUBSYSTEM, 2), None);
    let (_admin_queue, id) = Connection::admin(address, options, SUBSYSTEM, 1);
    let plain = Connection::io(target.address, options, id, 1, 1);
    assert_eq!(plain.err(), Some(status::INVALID_HOST), "an I/O queue beside a secure admin queue");
    Connection::io(address, options, id, 1, 1).unwrap();
    // The key for the discovery service is good for that only.
    let (discovery, _) = tunnel(secure, vec![psk(SHA256, Version::Names, 1, DISCOVERY)]);
    assert_eq!(try_admin(discovery, SUBSYSTEM, 1), Some(status::INVALID_HOST));
    for address in [discovery, address] {
        let (mut queue, _) = Connection::admin(address, options, DISCOVERY, 1);
        let page = queue.log(0x70, 0, 3 * RECORD_LEN);
        let entries = page[RECORD_LEN..].chunks(RECORD_LEN);
        let entries = entries.map(|record| Entry::decode(record.try_into().unwrap()).unwrap());
        let mut found: Vec<_> = entries.map(|entry| (entry.service, entry.security)).collect();
        let mut expected = vec![
            (secure.port().to_string(), Security::Tls),
            (target.address.port().to_string(), Security::Plain),
        ];
        found.sort_by_key(|(service, _)| service.clone());
        expected.sort_by_key(|(service, _)| service.clone());
        assert_eq!(found, expected);
    }
    target.stop();
}

#[test]
fn an_address_has_tls_for_all_subsystems_or_none() {
    let (target, secure) = start(SHA256);
    let plain = target.address;
    target.run(async move |target| {
        for (address, channel) in [(secure, Channel::Plain), (plain, Channel::Tls)] {
            let failed = target
                .listen(SUBSYSTEM, Address::tcp(address), AnaState::Optimized, channel)
                .await
                .unwrap_err();
            assert!(matches!(failed, aryk_nvmf::Error::Channel(at) if at.socket == address), "{failed}");
        }
        let listeners = target.find(SUBSYSTEM).unwrap().listeners;
        assert_eq!(
            [secure, plain].map(|address| listeners[&Address::tcp(address)].channel),
            [Channel::Tls, Channel::Plain]
        );
    });
    target.stop();
}

/// What a target sends until it ends the connection.
fn answer(mut socket: TcpStream) -> Vec<u8> {
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut answer = Vec::new();
    let ended = socket.read_to_end(&mut answer);
    let is_reset = |error: &std::io::Error| error.kind() == ErrorKind::ConnectionReset;
    assert!(ended.as_ref().err().is_none_or(is_reset), "{ended:?}");
    answer
}

#[test]
fn plain_hosts_and_nonsense_end_at_a_listener_with_tls() {
    let (target, secure) = start(SHA256);
    // The first bytes of an ICReq: the answer is an alert.
    let mut plain = TcpStream::connect(secure).unwrap();
    plain.write_all(&[0, 0, 128, 0, 128, 0, 0, 0]).unwrap();
    assert_eq!(answer(plain), [21, 3, 3, 0, 2, 2, 10]);
    let mut rng = fastrand::Rng::with_seed(5);
    for round in 0..200 {
        let mut socket = TcpStream::connect(secure).unwrap();
        let mut bytes = vec![22, 3, 1, 0, rng.u8(1..)];
        bytes.resize_with(5 + usize::from(bytes[4]), || rng.u8(..));
        bytes[5] = rng.u8(..3);
        socket.write_all(&bytes).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(answer(socket).len() <= 7, "round {round}");
    }
    // More bytes than a handshake has.
    let mut socket = TcpStream::connect(secure).unwrap();
    let record = [&[22, 3, 1, 0x40, 0, 1, 0, 0xff, 0xff][..], &[0; 0x3ffc]].concat();
    let _ = socket.write_all(&[&record[..], &record, &record].concat());
    assert!(answer(socket).len() <= 7);
    let (address, _) = tunnel(secure, vec![psk(SHA256, Version::Names, 1, SUBSYSTEM)]);
    Connection::admin(address, Options::default(), SUBSYSTEM, 1);
    target.stop();
}

#[test]
fn handshakes_that_do_not_end_leave_room_for_others() {
    let (target, secure) = start(SHA256);
    target.run(async |target| target.set_limits(Limits { unconnected: 10, ..target.limits() }));
    let silent: Vec<TcpStream> = (0..30)
        .map(|_| {
            let mut socket = TcpStream::connect(secure).unwrap();
            socket.write_all(&[22, 3, 1, 1, 0, 1]).unwrap();
            socket
        })
        .collect();
    let (address, _) = tunnel(secure, vec![psk(SHA256, Version::Names, 1, SUBSYSTEM)]);
    let (_admin_queue, id) = Connection::admin(address, Options::default(), SUBSYSTEM, 1);
    let mut queue = Connection::io(address, Options::default(), id, 1, 1).unwrap();
    assert!(queue.read(0, 1).unwrap() == [0; BLOCK]);
    let ended = silent.into_iter().take(15);
    ended.for_each(|socket| assert!(answer(socket).is_empty()));
    target.stop();
}

/// What OpenSSL's client says, with this key by this identity.
fn s_client(address: SocketAddr, identity: &str, secret: &[u8], suite: &str) -> String {
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new("openssl")
        .args(["s_client", "-connect", &address.to_string(), "-tls1_3", "-ciphersuites", suite])
        .args(["-psk_identity", identity, "-psk", &hex, "-brief"])
        // It ends at the end of its input.
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_client_of_openssl_completes_the_handshake() {
    let (target, address) = start(SHA256);
    let suite = "TLS_AES_128_GCM_SHA256";
    let derive = |version| configured(SHA256).of_tls(version, &name(1), &SUBSYSTEM.parse().unwrap()).unwrap();
    for version in Version::ALL {
        let key = derive(version);
        let said = s_client(address, &key.identity, &key.secret, suite);
        let is_done = ["CONNECTION ESTABLISHED", "TLSv1.3", suite].iter().all(|text| said.contains(text));
        assert!(is_done, "{said}");
    }
    let key = derive(Version::Names);
    for (identity, secret, alert) in
        [(&*key.identity, &[1; 32][..], "decrypt error"), ("stranger", &key.secret, "alert")]
    {
        let said = s_client(address, identity, secret, suite);
        assert!(!said.contains("ESTABLISHED") && said.contains(alert), "{said}");
    }
    until(|| target.run(async |target| target.failed_authentications()) == 2);
    target.stop();
}

#[test]
fn a_lost_host_leaves_nothing() {
    let (target, secure) = start(SHA256);
    let mut socket = TcpStream::connect(secure).unwrap();
    shake(&mut socket, vec![psk(SHA256, Version::Names, 1, SUBSYSTEM)]).unwrap();
    let (address, _) = tunnel(secure, vec![psk(SHA256, Version::Names, 1, SUBSYSTEM)]);
    let (mut admin_queue, id) = Raw::admin(address);
    let mut queue = Raw::io(address, id, 1, 16);
    let flush = SubmissionEntry::new(io::FLUSH, 1);
    assert_eq!(
        queue.run(flush.with_sgl(aryk_nvme_fabrics::sgl::Sgl::Transport { len: 0 }.encode())).0,
        Code::SUCCESS
    );
    queue.send(&capsule(flush));
    drop((socket, queue));
    until(|| target.queues() == 0);
    assert_eq!(admin_queue.try_enable(), Code::SUCCESS);
    drop(admin_queue);
    until(|| target.list()[0].controllers.is_empty());
    target.stop();
}
