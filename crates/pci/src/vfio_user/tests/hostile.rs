//! Peers that break the protocol: each of their messages is answered by an error, and nothing panics, hangs or grows.

use super::*;
use crate::vfio_user::client::connect;
use crate::vfio_user::message::{DmaUnmap, FDS_MAX, SIZE_MAX};
use proptest::prelude::*;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept, bind, listen, socket_with,
};
use std::io::Read;

/// What a client makes of a server whose answer to `command` is changed.
fn changed(command: Command, change: impl Fn(&mut Vec<u8>) + Send + 'static) -> Result<(), String> {
    let (client, _script) = Script::connect(TIMEOUT, move |at, body| {
        if at == command {
            change(body);
        }
    });
    client.map(drop).map_err(|error| error.to_string())
}

fn set_u32(body: &mut [u8], at: usize, value: u32) {
    body[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn wrong_answers_to_the_handshake_are_named() {
    type Change = Box<dyn Fn(&mut Vec<u8>) + Send>;
    let cases: Vec<(Command, Change, &str)> = vec![
        (Command::Version, Box::new(Vec::clear), "VERSION: it is too short"),
        (Command::Version, Box::new(|body| body[0] = 7), "VERSION: another major version"),
        (Command::Version, Box::new(|body| body[5] = b'{'), "VERSION: its capabilities are not JSON"),
        (Command::GetInfo, Box::new(|body| body.truncate(15)), "DEVICE_GET_INFO: it is too short"),
        (Command::GetInfo, Box::new(|body| set_u32(body, 4, 1)), "the device is no PCI function"),
        (Command::GetRegionInfo, Box::new(|body| body.truncate(31)), "REGION_INFO: it is too short"),
        (Command::GetRegionInfo, Box::new(|body| set_u32(body, 8, 3)), "it is of another region"),
        (Command::GetRegionInfo, Box::new(|body| body[16..24].fill(0)), "configuration space is missing"),
        (Command::GetIrqInfo, Box::new(|body| body.truncate(3)), "IRQ_INFO: it is too short"),
        (Command::GetIrqInfo, Box::new(|body| set_u32(body, 8, 9)), "it is of another kind"),
        (Command::RegionRead, Box::new(|body| body.truncate(17)), "it is of another access"),
        (Command::RegionRead, Box::new(|body| body.push(0)), "it is of another access"),
        (Command::RegionRead, Box::new(|body| body[0] ^= 1), "it is of another access"),
        (Command::RegionRead, Box::new(|body| body[16..].fill(0xff)), "reads all ones"),
    ];
    for (command, change, text) in cases {
        let error = changed(command, change).unwrap_err();
        assert!(error.contains(text), "{command:?}: {error}, not {text}");
    }
    // A server with more vectors than MSI-X has, and with sizes that wrap.
    assert_eq!(changed(Command::GetIrqInfo, |body| set_u32(body, 12, u32::MAX)), Ok(()));
    assert_eq!(changed(Command::GetRegionInfo, |body| body[16..].fill(0xff)), Ok(()));
}

/// What a client makes of a server that answers the first request by these bytes, then closes. With descriptors, a reply without
/// a body comes first.
fn answered(bytes: &[u8], fds: &[BorrowedFd<'_>], timeout: Duration) -> PciError {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(move || {
            let connection = Connection::new(theirs.try_clone().unwrap(), TIMEOUT).unwrap();
            let request = connection.receive().unwrap().header;
            if !fds.is_empty() {
                let header = Header::new(request.id, request.command, Kind::Reply, 0);
                connection.send(&header, [&[], &[]], fds).unwrap();
            }
            // The client may have closed its end.
            let _ = theirs.write_all(bytes).and_then(|()| theirs.shutdown(std::net::Shutdown::Write));
        });
        let error = Client::over(ours, "hostile", timeout).unwrap_err();
        server.join().unwrap();
        error
    })
}

fn header(id: u16, command: u16, size: u32, flags: u32) -> Vec<u8> {
    let mut bytes = [id.to_le_bytes(), command.to_le_bytes()].concat();
    bytes.extend(size.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes
}

#[test]
fn messages_that_no_server_may_send_end_the_connection() {
    let version = Command::Version as u16;
    let cases = [
        (header(0, version, 15, 1), "impossible size"),
        (header(0, version, u32::MAX, 1), "impossible size"),
        (header(0, version, SIZE_MAX as u32 + 1, 1), "impossible size"),
        (header(0, version, 20, 1), "a part of a message"),
        (header(0, version, 20, 1)[..9].to_vec(), "a part of a message"),
        (header(0, version, 16, 3), "unknown type"),
        (header(7, version, 16, 1), "a reply to no request"),
        (header(0, Command::Reset as u16, 16, 1), "a reply to another request"),
        (Vec::new(), "the connection was closed"),
    ];
    for (bytes, text) in cases {
        let error = answered(&bytes, &[], TIMEOUT).to_string();
        assert!(error.contains(text), "{error}, not {text}");
    }
    // A failure without an errno, and with one that no kernel has.
    let mut failure = header(0, version, 16, 1 | 1 << 5);
    assert!(matches!(answered(&failure, &[], TIMEOUT), PciError::Os { errno: Errno::IO, .. }));
    failure[12..].fill(0xff);
    assert!(matches!(answered(&failure, &[], TIMEOUT), PciError::Os { errno: Errno::IO, .. }));
}

#[test]
fn unexpected_descriptors_are_closed_and_refused() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let error = answered(&[], &[writer.as_fd(), writer.as_fd()], TIMEOUT);
    assert!(error.to_string().contains("it has descriptors"), "{error}");
    drop(writer);
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "the client has closed its copies");
}

#[test]
fn a_server_that_refuses_to_unmap_memory_loses_its_client() {
    // Refusals with an errno, with one that no kernel has, and without one.
    for errno in [Errno::NOENT.raw_os_error().cast_unsigned(), u32::MAX, 0] {
        let (client, script) = Script::connect(TIMEOUT, |_, _| ());
        let client = client.unwrap();
        let server = std::thread::spawn(move || {
            let mut asked = Vec::new();
            while let Ok(message) = script.0.receive() {
                asked.push(Command::parse(message.header.command).unwrap());
                let kind = match asked.last() {
                    Some(Command::DmaUnmap) => Kind::Failure(errno),
                    _ => Kind::Reply,
                };
                let header = Header::new(message.header.id, message.header.command, kind, 0);
                script.0.send(&header, [&[], &[]], &[]).unwrap();
            }
            asked
        });
        let memory = Arc::new(Mapping::in_file(2 * PAGE).unwrap());
        let iova = client.map(&memory.dma_range(0, 2 * PAGE).unwrap()).unwrap();
        let events = client.events().unwrap();
        assert!(!events.take_error());
        // The caller must not take this for memory that the server has given up.
        let error = client.unmap(iova, 2 * PAGE).unwrap_err();
        assert!(matches!(error, PciError::Protocol { what: "DMA_UNMAP", .. }), "{error}");
        assert!(error.to_string().contains("it refuses to unmap memory"), "{error}");
        assert!(events.take_error(), "the driver is told");
        for gone in [
            client.read_register(0, Width::Four).unwrap_err(),
            client.map(&memory.dma_range(0, PAGE).unwrap()).unwrap_err(),
            client.unmap(iova, 2 * PAGE).unwrap_err(),
        ] {
            assert!(matches!(&gone, PciError::Gone { reason, .. } if reason.contains("DMA_UNMAP")), "{gone}");
        }
        assert_eq!(server.join().unwrap(), [Command::DmaMap, Command::DmaUnmap], "the connection was closed");
    }
}

#[test]
fn a_truncated_file_of_registers_does_no_harm() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let memory = rustix::fs::memfd_create("bar", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 0x2000).unwrap();
    let file = memory.try_clone().unwrap();
    let server = std::thread::spawn(move || {
        let script = Script(Connection::new(theirs, TIMEOUT).unwrap());
        while let Ok(message) = script.0.receive() {
            let command = Command::parse(message.header.command).unwrap();
            let mut body = handshake(command, &message.body);
            let header = Header::new(message.header.id, message.header.command, Kind::Reply, body.len());
            let is_region = command == Command::GetRegionInfo;
            if is_region {
                set_u32(&mut body, 4, 0b111);
            }
            let fds = if is_region { &[file.as_fd()][..] } else { &[] };
            script.0.send(&header, [&body, &[]], fds).unwrap();
        }
    });
    let client = Client::over(ours, "hostile", TIMEOUT).unwrap();
    let registers = client.map_registers(0x1000, 0x1000).unwrap();
    registers.write(0, 1);
    rustix::fs::ftruncate(&memory, 0).unwrap();
    registers.write(8, 1);
    assert!(registers.is_lost() && registers.read(0) == u32::MAX);
    let error = client.map_registers(0x1000, 0x1000).unwrap_err();
    assert!(error.to_string().contains("the memory file has 0 bytes"), "{error}");
    drop(client);
    server.join().unwrap();
}

#[test]
fn a_server_cannot_make_the_reader_of_its_events_wait() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let server = std::thread::spawn(move || {
        let script = Script(Connection::new(theirs, TIMEOUT).unwrap());
        while let Ok(message) = script.0.receive() {
            let body = handshake(Command::parse(message.header.command).unwrap(), &message.body);
            script.reply(&message, &body);
            message.fds.into_iter().for_each(|fd| sender.send(fd).unwrap());
        }
    });
    let client = Client::over(ours, "hostile", TIMEOUT).unwrap();
    let events = client.events().unwrap();
    // The error, then the removal. The flags belong to the open file, which both sides have.
    let fds = [receiver.recv().unwrap(), receiver.recv().unwrap()];
    for fd in &fds {
        rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::empty()).unwrap();
    }
    let reader = std::thread::spawn(move || {
        assert!(!events.take_error() && !events.take_removal());
        for fd in fds {
            rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
        }
        // One after the other: the client passes each on at a time of its own.
        while !events.take_error() {
            std::thread::yield_now();
        }
        while !events.take_removal() {
            std::thread::yield_now();
        }
    });
    #[expect(clippy::disallowed_methods, reason = "a thread that hangs would never end the test")]
    for _ in 0..1000 {
        if reader.is_finished() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(reader.is_finished(), "it waits for the server");
    reader.join().unwrap();
    client.read_register(0, Width::Four).unwrap();
    drop(client);
    server.join().unwrap();
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures time")]
fn a_peer_that_reads_a_little_now_and_then_ends_the_connection() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let connection = Connection::new(ours, Duration::from_millis(300)).unwrap();
    let start = std::time::Instant::now();
    let peer = std::thread::spawn(move || {
        let mut theirs = theirs;
        // Much less than 4 MiB a second.
        while start.elapsed() < Duration::from_secs(8) && theirs.read(&mut [0; 16_384]).is_ok_and(|n| n > 0) {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let body = vec![0; 4 << 20];
    let header = Header::new(1, Command::RegionWrite as u16, Kind::Reply, body.len());
    let sent = connection.send(&header, [&body, &[]], &[]);
    assert!(
        sent.is_err() && start.elapsed() < Duration::from_secs(4),
        "{sent:?} after {:?}",
        start.elapsed()
    );
    drop(connection);
    peer.join().unwrap();
}

/// The server's answer to one request after the handshake: an errno, or 0.
fn refusal(command: u16, body: &[u8], fds: &[BorrowedFd<'_>]) -> u32 {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || serve(theirs, &Toy::new()));
    let connection = Connection::new(ours, TIMEOUT).unwrap();
    let ask = |command: u16, body: &[u8], fds: &[BorrowedFd<'_>]| {
        let header = Header::new(1, command, Kind::Command { wants_reply: true }, body.len());
        connection.send(&header, [body, &[]], fds).unwrap();
        connection.receive().unwrap().header.kind()
    };
    assert_eq!(ask(Command::Version as u16, &Capabilities::OURS.message(), &[]), Some(Kind::Reply));
    let answer = ask(command, body, fds);
    drop(connection);
    server.join().unwrap().unwrap();
    match answer {
        Some(Kind::Failure(errno)) => errno,
        _ => 0,
    }
}

#[test]
fn the_server_refuses_what_no_client_may_ask() {
    let memory = Mapping::in_file(4 * PAGE).unwrap();
    let file = memory.file().unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let map = |offset, iova, len| DmaMap { argsz: 32, flags: 3, offset, iova, len }.as_bytes().to_vec();
    let access = |region, offset, count| RegionAccess { offset, region, count }.as_bytes().to_vec();
    let irqs =
        |flags, index, start, count| SetIrqs { argsz: 20, flags, index, start, count }.as_bytes().to_vec();
    let unmap = DmaUnmap { argsz: 24, flags: 0, iova: PAGE, len: PAGE }.as_bytes().to_vec();
    let (one, none): (&[BorrowedFd<'_>], &[BorrowedFd<'_>]) = (&[file], &[]);
    let many = vec![file; FDS_MAX];
    let cases: Vec<(Command, Vec<u8>, &[BorrowedFd<'_>])> = vec![
        (Command::DmaMap, map(0, PAGE, PAGE), none),
        (Command::DmaMap, map(0, PAGE, PAGE), &many),
        (Command::DmaMap, map(1, PAGE, PAGE), one),
        (Command::DmaMap, map(0, 1, PAGE), one),
        (Command::DmaMap, map(0, PAGE, 0), one),
        (Command::DmaMap, map(0, PAGE, 5 * PAGE), one),
        (Command::DmaMap, map(PAGE, PAGE, u64::MAX - PAGE + 1), one),
        (Command::DmaMap, map(0, u64::MAX - PAGE + 1, PAGE), one),
        (Command::DmaMap, map(0, PAGE, PAGE)[..31].to_vec(), one),
        (Command::DmaUnmap, unmap, none),
        (Command::GetRegionInfo, vec![0; 31], none),
        (Command::GetRegionInfo, vec![0xff; 32], none),
        (Command::GetIrqInfo, vec![0xff; 16], none),
        (Command::SetIrqs, irqs(0b10_0100, 2, 0, 2), one),
        (Command::SetIrqs, irqs(0b10_0100, 2, 1, 1), one),
        (Command::SetIrqs, irqs(0b10_0100, 2, u32::MAX, 1), one),
        (Command::SetIrqs, irqs(0b10_0100, 0, 0, 1), one),
        (Command::SetIrqs, irqs(0b10_0001, 2, 0, 1), none),
        (Command::SetIrqs, irqs(0b00_1000, 2, 0, 0), none),
        (Command::RegionRead, access(0, REGISTERS, 4), none),
        (Command::RegionRead, access(0, 0, 3), none),
        (Command::RegionRead, access(0, 2, 4), none),
        (Command::RegionRead, access(0, 0, 0), none),
        (Command::RegionRead, access(7, 255, 2), none),
        (Command::RegionRead, access(1, 0, 4), none),
        (Command::RegionRead, access(7, u64::MAX, 2), none),
        (Command::RegionWrite, access(0, 0, 4), none),
        (Command::RegionWrite, [access(0, 0, 4), vec![0; 3]].concat(), none),
        (Command::DmaRead, vec![0; 16], none),
    ];
    for (command, body, fds) in cases {
        assert_ne!(refusal(command as u16, &body, fds), 0, "{command:?} {body:?}");
    }
    assert_ne!(refusal(Command::DmaMap as u16, &map(0, PAGE, PAGE), &[null.as_fd()]), 0);
    assert_ne!(refusal(6, &[], none), 0);
    assert_eq!(refusal(Command::DmaMap as u16, &map(PAGE, PAGE, 3 * PAGE), one), 0);
    assert_eq!(refusal(Command::RegionRead as u16, &access(0, 0, 0x1000), none), 0);
}

#[test]
fn requests_before_the_handshake_and_a_second_handshake_end_the_session() {
    for first in [Command::Reset, Command::Version] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Connection::new(ours, TIMEOUT).unwrap();
        let body = Capabilities::OURS.message();
        for command in [first, Command::Version] {
            let header = Header::new(1, command as u16, Kind::Command { wants_reply: false }, body.len());
            connection.send(&header, [&body, &[]], &[]).unwrap();
        }
        let error = serve(theirs, &Toy::new()).unwrap_err();
        assert!(error.to_string().contains("no handshake, or a second one"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any bytes from a server end in an error.
    #[test]
    fn any_bytes_from_a_server_give_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let error = answered(&bytes, &[], TIMEOUT);
        prop_assert!(!error.to_string().is_empty());
    }

    /// Any bytes from a client end its session.
    #[test]
    fn any_requests_of_a_client_are_answered(
        requests in prop::collection::vec((0..16_u16, prop::collection::vec(any::<u8>(), 0..80)), 0..20),
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Connection::new(ours, TIMEOUT).unwrap();
        let hello = (Command::Version as u16, Capabilities::OURS.message());
        for (command, body) in std::iter::once(hello).chain(requests) {
            let header = Header::new(1, command, Kind::Command { wants_reply: false }, body.len());
            connection.send(&header, [&body, &[]], &[]).unwrap();
        }
        drop(connection);
        let _ = serve(theirs, &Toy::new());
    }
}

#[test]
fn a_server_that_accepts_no_connection_does_not_hold_up_its_client() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("drive.sock");
    let socket = |flags| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    let (server, address) = (socket(SocketFlags::CLOEXEC), SocketAddrUnix::new(&path).unwrap());
    bind(&server, &address).unwrap();
    listen(&server, 0).unwrap();
    // The kernel keeps some connections without the server.
    let mut kept = Vec::new();
    let refusal = loop {
        let client = socket(SocketFlags::NONBLOCK);
        match rustix::net::connect(&client, &address) {
            Ok(()) => kept.push(client),
            Err(errno) => break errno,
        }
    };
    assert_eq!((refusal, kept.len()), (Errno::AGAIN, 1));
    let error = connect(&path, Duration::from_millis(300)).unwrap_err();
    assert!(matches!(error, PciError::TimedOut { .. }), "{error}");
    // A server that accepts them late, but in time.
    std::thread::scope(|scope| {
        let client = scope.spawn(|| connect(&path, TIMEOUT));
        let accepted = [accept(&server).unwrap(), accept(&server).unwrap()];
        assert!(client.join().unwrap().is_ok());
        drop(accepted);
    });
    assert!(matches!(connect(&directory.path().join("none"), TIMEOUT), Err(PciError::NotFound { .. })));
    drop(server);
    assert!(matches!(connect(&path, TIMEOUT), Err(PciError::Gone { .. })));
}
