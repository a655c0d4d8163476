//! Sockets that the ring reads and writes, on a reactor that the test runs.

use crate::support::{Time, reactor, settle};
use aryk_dma::Buffer;
use aryk_reactor::{Cx, Engine, Reactor, Root, RootId, SleepPolicy, Socket, SocketEvent};
use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::rc::Rc;

/// A root that answers with what it receives.
struct Echo {
    socket: Socket,
    zero_copy: bool,
    unsent: Vec<u8>,
    sending: Option<Buffer>,
    /// The events: bytes that were received and sent, and how it ended.
    received: usize,
    sent: usize,
    /// How often there was no buffer.
    starved: usize,
    has_ended: bool,
}

impl Root for Echo {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut has_any = false;
        while let Some(event) = self.socket.next_event(cx) {
            has_any = true;
            match event {
                SocketEvent::Received(bytes) => {
                    self.received += bytes.len();
                    self.unsent.extend_from_slice(&bytes);
                }
                SocketEvent::Sent { result, is_released } => {
                    let len = result.unwrap() as usize;
                    self.sent += len;
                    self.unsent.drain(..len);
                    assert_eq!(is_released, !self.zero_copy);
                    if is_released {
                        self.sending.as_mut().unwrap().reclaim();
                        self.sending = None;
                    }
                }
                SocketEvent::Released => {
                    self.sending.as_mut().unwrap().reclaim();
                    self.sending = None;
                }
                SocketEvent::Starved => {
                    self.starved += 1;
                    let mut bytes = [0; 100];
                    if let Ok(len) = self.socket.read(&mut bytes) {
                        self.received += len;
                        self.unsent.extend_from_slice(&bytes[..len]);
                    }
                }
                SocketEvent::Ended => self.has_ended = true,
                SocketEvent::Failed(error) => panic!("{error}"),
            }
        }
        if !self.has_ended {
            self.socket.receive(cx);
        }
        if self.sending.is_none() && !self.unsent.is_empty() {
            let mut buffer = Buffer::from_slice(&self.unsent);
            assert!(self.socket.send(&[buffer.lend()], self.zero_copy, cx));
            self.sending = Some(buffer);
        }
        has_any
    }
}

/// A connection: the side of the reactor, and that of the test.
fn connection() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (listener.accept().unwrap().0.into(), peer)
}

fn echo(reactor: &mut Reactor, zero_copy: bool) -> (Rc<RefCell<Echo>>, RootId, TcpStream) {
    let (fd, peer) = connection();
    let cx = reactor.cx();
    let thread = cx.add_thread("echo", aryk_reactor::CoreSet::allowed());
    let root = cx.add_root(thread, "echo", |root, cx| {
        Socket::open(fd, root, cx).map(|socket| Echo {
            socket,
            zero_copy,
            unsent: Vec::new(),
            sending: None,
            received: 0,
            sent: 0,
            starved: 0,
            has_ended: false,
        })
    });
    let id = root.unwrap().id();
    cx.wake(id);
    (cx.root(id).unwrap(), id, peer)
}

#[test]
fn what_a_socket_receives_is_sent_back() {
    for zero_copy in [false, true] {
        let (mut reactor, _) = reactor(SleepPolicy::Interrupt, Engine::IoUring, &Time::default());
        let (echo, id, mut peer) = echo(&mut reactor, zero_copy);
        settle(&mut reactor);
        assert!(!echo.borrow().socket.is_at_rest());
        let bytes: Vec<u8> = (0..5 << 20).map(|i: u32| (i / 3) as u8).collect();
        let expected = bytes.clone();
        let mut reader = peer.try_clone().unwrap();
        let sender = std::thread::spawn(move || {
            peer.write_all(&bytes).unwrap();
            peer.shutdown(Shutdown::Write).unwrap();
        });
        let receiver = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            reader.read_exact(&mut got).unwrap();
            assert!(got == expected);
        });
        while !(echo.borrow().socket.is_at_rest() && echo.borrow().sent == 5 << 20) {
            reactor.step();
        }
        assert_eq!(echo.borrow().received, 5 << 20);
        assert!(echo.borrow().has_ended);
        sender.join().unwrap();
        receiver.join().unwrap();
        reactor.cx().remove_root(id);
    }
}

#[test]
fn a_socket_that_was_stopped_is_whole_and_goes_on_elsewhere() {
    let (mut reactor, _) = reactor(SleepPolicy::Interrupt, Engine::IoUring, &Time::default());
    let (echo, id, mut peer) = echo(&mut reactor, false);
    settle(&mut reactor);
    peer.write_all(b"first").unwrap();
    while echo.borrow().sent < 5 {
        reactor.step();
    }
    drop(echo);
    let mut left = reactor.cx().take_root::<Echo>(id).unwrap();
    left.socket.stop_receiving(reactor.cx());
    left.socket.stop_receiving(reactor.cx());
    while !left.socket.is_at_rest() {
        reactor.step();
        assert!(left.socket.next_event(reactor.cx()).is_none());
    }
    let mut socket = TcpStream::from(left.socket.into_fd());
    peer.write_all(b"second").unwrap();
    let mut bytes = [0; 6];
    socket.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"second");
}

/// A root that keeps what it receives.
struct Hoard {
    socket: Socket,
    kept: Vec<aryk_uring::Filled>,
    is_starved: bool,
}

impl Root for Hoard {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        while let Some(event) = self.socket.next_event(cx) {
            match event {
                SocketEvent::Received(bytes) => self.kept.push(bytes),
                SocketEvent::Starved => self.is_starved = true,
                event => panic!("{event:?}"),
            }
        }
        if !self.is_starved {
            self.socket.receive(cx);
        }
        true
    }
}

#[test]
fn a_socket_goes_on_although_another_one_has_all_buffers() {
    let (mut reactor, _) = reactor(SleepPolicy::Interrupt, Engine::IoUring, &Time::default());
    let (echo, id, mut peer) = echo(&mut reactor, false);
    settle(&mut reactor);
    let (fd, mut greedy) = connection();
    let cx = reactor.cx();
    let thread = cx.add_thread("hoard", aryk_reactor::CoreSet::allowed());
    let hoard = cx.add_root(thread, "hoard", |root, cx| {
        Socket::open(fd, root, cx).map(|socket| Hoard { socket, kept: Vec::new(), is_starved: false })
    });
    let hoard_id = hoard.unwrap().id();
    cx.wake(hoard_id);
    let hoard = cx.root::<Hoard>(hoard_id).unwrap();
    let sender = std::thread::spawn(move || {
        // The end of the socket interrupts it.
        let _ = greedy.write_all(&vec![1; 64 << 20]);
    });
    while !hoard.borrow().is_starved {
        reactor.step();
    }
    for round in 1..=3 {
        peer.write_all(&[round; 70]).unwrap();
        let expected = usize::from(round) * 70;
        while echo.borrow().sent < expected {
            reactor.step();
        }
        let mut bytes = [0; 70];
        peer.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, [round; 70]);
    }
    assert!(echo.borrow().starved >= 3);
    // With a buffer, it receives by the ring again.
    hoard.borrow_mut().kept.clear();
    settle(&mut reactor);
    let starved = echo.borrow().starved;
    peer.write_all(&[4; 70]).unwrap();
    while echo.borrow().sent < 280 {
        reactor.step();
    }
    assert_eq!(echo.borrow().starved, starved);
    drop(hoard);
    reactor.cx().remove_root(hoard_id);
    sender.join().unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    while !echo.borrow().socket.is_at_rest() {
        reactor.step();
    }
    reactor.cx().remove_root(id);
}

#[test]
fn a_socket_can_be_stopped_whose_receive_ends_just_then() {
    let (mut reactor, _) = reactor(SleepPolicy::Interrupt, Engine::IoUring, &Time::default());
    let (echo, id, peer) = echo(&mut reactor, false);
    settle(&mut reactor);
    drop(echo);
    let mut left = reactor.cx().take_root::<Echo>(id).unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    left.socket.stop_receiving(reactor.cx());
    let mut has_ended = false;
    while !left.socket.is_at_rest() {
        reactor.step();
        has_ended |= matches!(left.socket.next_event(reactor.cx()), Some(SocketEvent::Ended));
    }
    assert!(has_ended);
    // The next receive can be stopped, too.
    left.socket.receive(reactor.cx());
    left.socket.stop_receiving(reactor.cx());
    while !left.socket.is_at_rest() {
        reactor.step();
        let event = left.socket.next_event(reactor.cx());
        assert!(matches!(event, None | Some(SocketEvent::Ended)), "{event:?}");
    }
}

#[test]
fn a_reactor_without_a_ring_gives_the_descriptor_back() {
    let (mut reactor, _) = reactor(SleepPolicy::Interrupt, Engine::Epoll, &Time::default());
    let (fd, _peer) = connection();
    let thread = reactor.cx().add_thread("test", aryk_reactor::CoreSet::allowed());
    let root = reactor.cx().add_root(thread, "echo", |root, cx| match Socket::open(fd, root, cx) {
        Ok(_) => panic!("there is no ring"),
        Err(fd) => Err::<Echo, OwnedFd>(fd),
    });
    assert!(TcpStream::from(root.unwrap_err()).peer_addr().is_ok());
}
