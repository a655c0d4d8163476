//! A proxy between a host and a target, which cuts connections in the middle of PDUs and can be closed to new ones.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

/// See the [module](self). It ends with the process.
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    open: Mutex<Vec<TcpStream>>,
    /// New connections are closed at once.
    refuses: AtomicBool,
    /// Nothing is passed on, and nothing is closed.
    is_silent: AtomicBool,
    accepted: AtomicU64,
    /// Bytes that were passed on to the host.
    passed: AtomicU64,
    /// Bytes that were taken from the host.
    taken: AtomicU64,
}

impl Proxy {
    pub(super) fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            target,
            open: Mutex::default(),
            refuses: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            passed: AtomicU64::new(0),
            taken: AtomicU64::new(0),
        });
        let of_thread = Arc::clone(&shared);
        spawn(move || {
            for host in listener.incoming().flatten() {
                of_thread.accept(host);
            }
        });
        Self { address, shared }
    }

    /// Ends all connections. What is on its way is lost from an arbitrary byte on.
    pub(super) fn cut(&self) {
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn refuse(&self, refuses: bool) {
        self.shared.refuses.store(refuses, Ordering::SeqCst);
        if refuses {
            self.cut();
        }
    }

    /// Refuses new connections, and leaves the others as they are.
    pub(super) fn refuse_only(&self) {
        self.shared.refuses.store(true, Ordering::SeqCst);
    }

    pub(super) fn silence(&self, is_silent: bool) {
        self.shared.is_silent.store(is_silent, Ordering::SeqCst);
    }

    /// Bytes that were passed on to the host so far.
    pub(super) fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// Bytes that were taken from the host so far, passed on or not.
    pub(super) fn taken(&self) -> u64 {
        self.shared.taken.load(Ordering::SeqCst)
    }

    /// Connections so far.
    pub(super) fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::SeqCst)
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, host: TcpStream) {
        if self.refuses.load(Ordering::SeqCst) {
            return;
        }
        self.accepted.fetch_add(1, Ordering::SeqCst);
        let Ok(target) = TcpStream::connect(self.target) else { return };
        [&host, &target].into_iter().for_each(|end| end.set_nodelay(true).unwrap());
        let ends = [(&host, &target, false), (&target, &host, true)];
        for (from, to, is_to_host) in ends {
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let shared = Arc::clone(self);
            spawn(move || shared.pass(from, to, is_to_host));
        }
        self.open.lock().unwrap().extend([host, target]);
    }

    #[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, is_to_host: bool) {
        let mut bytes = [0; 1500];
        while let Ok(len @ 1..) = from.read(&mut bytes) {
            if !is_to_host {
                self.taken.fetch_add(len as u64, Ordering::SeqCst);
            }
            while self.is_silent.load(Ordering::SeqCst) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            if is_to_host {
                self.passed.fetch_add(len as u64, Ordering::SeqCst);
            }
            if to.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }
}
