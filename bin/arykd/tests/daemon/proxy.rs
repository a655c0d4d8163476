//! A proxy between a host and a target, whose link a test damages. Its threads end with the process.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// The pause after each piece of a link that dribbles.
const PAUSE: Duration = Duration::from_micros(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToTarget,
    ToHost,
}

/// What the proxy does with the bytes of all connections.
#[derive(Debug, Default)]
pub enum Link {
    /// It passes them on at once.
    #[default]
    Good,
    /// It passes on one to seven bytes at a time.
    Dribbles,
    /// It passes on nothing in this direction, neither bytes nor the end of a connection.
    Stalls(Direction),
    /// It cuts all connections when as many bytes have passed as the first number says, then again for each further number.
    Breaks(VecDeque<u64>),
}

#[derive(Debug, Default)]
struct State {
    link: Link,
    /// The host's and the target's end of each connection.
    open: Vec<[TcpStream; 2]>,
    cuts: u64,
    /// Pieces that were passed on while the link dribbled.
    pieces: u64,
}

/// See the [module](self).
#[derive(Clone)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Proxy {
    pub fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self { address: listener.local_addr().unwrap(), shared: Arc::default() };
        let shared = Arc::clone(&proxy.shared);
        thread::spawn(move || {
            for host in listener.incoming().flatten() {
                let Ok(target) = TcpStream::connect(target) else { continue };
                shared.join([host, target]);
            }
        });
        proxy
    }

    /// Where hosts connect.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn set(&self, link: Link) {
        self.shared.state.lock().unwrap().link = link;
        self.shared.changed.notify_all();
    }

    /// Ends all connections.
    pub fn cut(&self) {
        self.shared.cut();
    }

    /// Closes this direction of all connections. The other one stays open until its sender closes it.
    pub fn close(&self, direction: Direction) {
        for [host, target] in &self.shared.state.lock().unwrap().open {
            let receiver = if direction == Direction::ToTarget { target } else { host };
            // The connection may have ended.
            let _ = receiver.shutdown(Shutdown::Write);
        }
    }

    /// Number of times that all connections were cut.
    pub fn cuts(&self) -> u64 {
        self.shared.state.lock().unwrap().cuts
    }

    /// Pieces that were passed on while the link dribbled.
    pub fn pieces(&self) -> u64 {
        self.shared.state.lock().unwrap().pieces
    }
}

impl Shared {
    fn join(self: &Arc<Self>, ends: [TcpStream; 2]) {
        ends.iter().for_each(|end| end.set_nodelay(true).unwrap());
        let both = || ends.each_ref().map(|end| end.try_clone().unwrap());
        // A cut from here on ends this connection, too.
        self.state.lock().unwrap().open.push(both());
        for direction in [Direction::ToTarget, Direction::ToHost] {
            let ([host, target], shared) = (both(), Arc::clone(self));
            let (from, to) = if direction == Direction::ToTarget { (host, target) } else { (target, host) };
            thread::spawn(move || shared.pass(from, to, direction));
        }
    }

    fn cut(&self) {
        let mut state = self.state.lock().unwrap();
        state.cuts += 1;
        for end in state.open.drain(..).flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    /// Passes bytes on until the sender closes the connection. Bytes that the receiver does not take any more are lost.
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, direction: Direction) {
        let mut bytes = [0; 1500];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            let mut rest = &bytes[..len];
            while !rest.is_empty() {
                let (len, breaks) = self.take(rest.len(), direction);
                let _ = to.write_all(&rest[..len]);
                rest = &rest[len..];
                if breaks {
                    return self.cut();
                }
                if !rest.is_empty() {
                    thread::park_timeout(PAUSE);
                }
            }
        }
        self.take(0, direction);
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }

    /// Waits until the link passes something in this direction. Returns how many of `len` bytes, and whether the link breaks
    /// then.
    fn take(&self, len: usize, direction: Direction) -> (usize, bool) {
        let is_stalled =
            |state: &mut State| matches!(state.link, Link::Stalls(stalled) if stalled == direction);
        let mut state = self.changed.wait_while(self.state.lock().unwrap(), is_stalled).unwrap();
        let state = &mut *state;
        match &mut state.link {
            Link::Good | Link::Stalls(_) => (len, false),
            Link::Dribbles => {
                state.pieces += 1;
                (len.min(fastrand::usize(1..=7)), false)
            }
            Link::Breaks(after) => {
                let Some(left) = after.front_mut() else { return (len, false) };
                let passed = len.min(*left as usize);
                *left -= passed as u64;
                let breaks = *left == 0;
                if breaks {
                    after.pop_front();
                }
                (passed, breaks)
            }
        }
    }
}
