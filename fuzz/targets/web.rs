//! Arbitrary bytes of a client of the web page or of the metrics, in pieces.
//!
//! The first byte chooses the server, and how the rest is cut. For the page's numbers the rest is only a query, which a
//! second, naive parser checks. For any input, the answer is HTTP, it comes in time, and the server serves the next
//! client.
#![no_main]

use aryk_bdev::{Bdev, Memory, QosGroup};
use aryk_metrics::{
    Address, Collector, Controller, Host, Inventory, LocalFuture, Nvme, Pool, RbdClient, Remote, Scrapes,
    Server, Web,
};
use aryk_reactor::Handle;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::LocalSet;

/// Timeout of an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Allowed length of a filter, in bytes.
const FILTER_MAX: usize = 256;

/// A daemon without reactors, disks and controllers.
#[derive(Default)]
struct Nothing {
    collector: Collector,
    memory: Memory,
}

impl Inventory for Nothing {
    fn reactors(&self) -> Vec<Handle> {
        Vec::new()
    }

    fn disks(&self) -> Vec<Arc<Bdev>> {
        Vec::new()
    }

    fn groups(&self) -> Vec<Arc<QosGroup>> {
        Vec::new()
    }

    fn nvme(&self) -> Vec<Nvme> {
        Vec::new()
    }

    fn remotes(&self) -> Vec<Remote> {
        Vec::new()
    }

    fn rbd(&self) -> Vec<RbdClient> {
        Vec::new()
    }

    fn hosts(&self) -> Vec<Host> {
        Vec::new()
    }

    fn pools(&self) -> LocalFuture<'_, Vec<Pool>> {
        Box::pin(std::future::ready(Vec::new()))
    }

    fn controllers(&self) -> Vec<Controller> {
        Vec::new()
    }

    fn file(&self, _: &str) -> Option<PathBuf> {
        None
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn collector(&self) -> &Collector {
        &self.collector
    }
}

struct Rig {
    runtime: Runtime,
    local: LocalSet,
    page: SocketAddr,
    metrics: SocketAddr,
    /// The servers run as long as the sender exists.
    _stop: watch::Sender<bool>,
}

thread_local! {
    static RIG: Rig = Rig::new();
}

impl Rig {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (stop, stopped) = watch::channel(false);
        let local = LocalSet::new();
        let any = Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)));
        let bind = || runtime.block_on(Server::bind(&any, 0)).expect("a free port");
        let (page, metrics) = (bind(), bind());
        let addresses = [&page, &metrics].map(|server| server.address().expect("TCP has one"));
        let inventory = Rc::new(Nothing::default());
        let web = Web::new(Rc::<Nothing>::clone(&inventory));
        let scrapes = Scrapes::new(inventory);
        local.spawn_local(page.serve(async move |r| web.answer(r).await, stopped.clone()));
        local.spawn_local(metrics.serve(async move |r| scrapes.answer(r).await, stopped));
        let [page, metrics] = addresses;
        Self { runtime, local, page, metrics, _stop: stop }
    }

    /// The whole answer to these pieces. The server may close the connection before the client has sent all of them.
    fn answers<'a>(&self, address: SocketAddr, pieces: impl Iterator<Item = &'a [u8]>) -> Vec<u8> {
        let talk = async {
            let mut stream = TcpStream::connect(address).await.expect("the server listens");
            for piece in pieces {
                if stream.write_all(piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            let _ = stream.shutdown().await;
            let mut all = Vec::new();
            let _ = stream.read_to_end(&mut all).await;
            all
        };
        let answers = async { tokio::time::timeout(PATIENCE, talk).await };
        let answers = self.local.block_on(&self.runtime, answers).expect("an answer in time");
        assert!(answers.is_empty() || answers.starts_with(b"HTTP/1."), "{answers:?}");
        answers
    }

    /// The HTTP status and the body of the page's numbers.
    fn numbers(&self, query: &str) -> (u16, String) {
        let request =
            format!("GET /live.json?{query} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let answer = self.answers(self.page, std::iter::once(request.as_bytes()));
        let answer = String::from_utf8(answer).expect("a text");
        let (head, content) = answer.split_once("\r\n\r\n").expect("a head and a content");
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
        (status, content.to_owned())
    }
}

/// Decodes the escapes of a value.
fn plain(value: &str) -> Option<String> {
    let value = value.replace('+', " ");
    let mut parts = value.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        if !code.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(code, 16).expect("two digits"));
        bytes.extend(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Whether a query is valid.
fn makes_sense(query: &str) -> bool {
    let mut filter = String::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=').map(|(name, value)| (name, plain(value))) {
            Some(("sort" | "disk", Some(_))) => {}
            Some(("filter", Some(value))) => filter = value,
            _ => return false,
        }
    }
    filter.len() <= FILTER_MAX
}

fuzz_target!(|data: &[u8]| {
    let Some((&first, rest)) = data.split_first() else { return };
    RIG.with(|rig| {
        let pieces = rest.chunks(usize::from(first >> 2).max(1));
        match first & 3 {
            0 => drop(rig.answers(rig.page, pieces)),
            1 => drop(rig.answers(rig.metrics, pieces)),
            _ => {
                let allowed = |b: &u8| b.is_ascii_alphanumeric() || b"%&=+-_.~".contains(b);
                let query = String::from_utf8(rest.iter().copied().filter(allowed).collect());
                let query = query.expect("ASCII");
                let (status, content) = rig.numbers(&query);
                assert_eq!(status, if makes_sense(&query) { 200 } else { 400 }, "{query}");
                assert_eq!(status == 200, serde_json::from_str::<Value>(&content).is_ok(), "{content}");
            }
        }
        assert_eq!(rig.numbers("").0, 200, "the next client is served");
    });
});
