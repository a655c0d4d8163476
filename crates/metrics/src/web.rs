//! The web page and the data that it requests once a second. Read-only. Control context.
//!
//! The page is four embedded files. It serves browsers on this host only: a request with another host name in `Host` is refused,
//! because a foreign page can point a name of its own at this address (DNS rebinding). Of thousands of disks only the first few
//! in the requested order are reported, so that a reply has a bounded size; replies are cached for a second for other clients
//! with the same query.

use crate::disk_details::DiskDetails;
use crate::live::{DiskRate, GroupRate, Rate, Rates};
use crate::server::{Bytestream, Reply, Request, plain};
use crate::{Inventory, Snapshot};
use aryk_bdev::Coarse;
use hyper::body::Bytes;
use hyper::header::{self, HeaderValue};
use hyper::http::uri::Authority;
use hyper::{Method, Response, StatusCode};
use serde::Serialize;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

/// The page's files: path, type, content.
const FILES: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("../web/index.html")),
    ("/style.css", "text/css; charset=utf-8", include_str!("../web/style.css")),
    ("/heat.js", "text/javascript; charset=utf-8", include_str!("../web/heat.js")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("../web/page.js")),
];
/// Content policy: the page loads and sends nothing outside of this server, and accepts no inline script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Disks in a reply.
const DISKS: usize = 100;
/// Groups in a reply, the busiest first.
const GROUPS: usize = 20;
/// Maximum age of the snapshot.
const AGE: Duration = Duration::from_millis(900);
/// A snapshot older than this is not used as the start of a rate.
const RATE_AGE_MAX: Duration = Duration::from_secs(5);
/// Different replies that are cached for clients with the same query.
const REPLIES_MAX: usize = 64;
/// Bytes of a filter.
const FILTER_MAX: usize = 256;

/// The present snapshot with its rates, and the replies made of it.
struct Current {
    before: Option<Rc<Snapshot>>,
    snapshot: Rc<Snapshot>,
    rates: Rates,
    answers: HashMap<String, Bytes>,
}

/// Answers browsers.
pub struct Web {
    inventory: Rc<dyn Inventory>,
    host: String,
    now: RefCell<Option<Current>>,
}

impl fmt::Debug for Web {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Web").finish_non_exhaustive()
    }
}

/// The reply to `/live.json`.
#[derive(Serialize)]
struct Live<'a> {
    /// The host's name.
    host: &'a str,
    version: &'static str,
    /// The time between the two snapshots; `None` if there is only one.
    seconds: Option<f64>,
    /// The number of all disks, and of those whose names match the filter.
    all: usize,
    matching: usize,
    vms: usize,
    total: &'a Rate,
    disks: Vec<&'a DiskRate>,
    /// The number of all groups, and the busiest groups.
    all_groups: usize,
    groups: Vec<&'a GroupRate>,
    reactors: &'a [crate::live::Share],
    bounds_ns: Vec<u64>,
    latencies: &'a [u64],
    /// The disk that the client requested, if it exists.
    disk: Option<DiskDetails>,
}

/// The parameters of a client's query.
#[derive(Default)]
struct PageQuery {
    sort: String,
    filter: String,
    disk: Option<String>,
}

impl Web {
    /// Serves the page for `inventory`.
    pub fn new(inventory: Rc<dyn Inventory>) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { inventory, host, now: RefCell::default() }
    }

    /// Answers a request.
    pub async fn answer(&self, request: Request) -> Reply {
        let mut reply = if !is_local(request.headers().get(header::HOST)) {
            plain(StatusCode::FORBIDDEN, "this page is served under the names of this host only\n")
        } else if request.method() != Method::GET {
            plain(StatusCode::METHOD_NOT_ALLOWED, "this page is read-only: use GET\n")
        } else if let Some((_, kind, text)) = FILES.iter().find(|file| file.0 == request.uri().path()) {
            typed(kind, Bytes::from_static(text.as_bytes()))
        } else if request.uri().path() == "/live.json" {
            self.live(request.uri().query().unwrap_or_default()).await
        } else {
            plain(StatusCode::NOT_FOUND, "there is no such page\n")
        };
        for (name, value) in [
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-store"),
        ] {
            reply.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        reply
    }

    async fn live(&self, query: &str) -> Reply {
        let Some(asked) = PageQuery::read(query) else {
            return plain(StatusCode::BAD_REQUEST, "the parameters are sort, filter and disk\n");
        };
        let snapshot = self.inventory.collector().snapshot(&*self.inventory, AGE).await;
        let mut now = self.now.borrow_mut();
        if now.as_ref().is_none_or(|now| !Rc::ptr_eq(&now.snapshot, &snapshot)) {
            let before = now
                .take()
                .map(|now| now.snapshot)
                .filter(|before| snapshot.at.since(before.at) <= RATE_AGE_MAX);
            let rates = Rates::between(before.as_deref(), &snapshot);
            *now = Some(Current { before, snapshot, rates, answers: HashMap::new() });
        }
        let now = now.as_mut().expect("just set");
        if let Some(answer) = now.answers.get(query) {
            return typed("application/json", answer.clone());
        }
        let closer =
            |name: &String| DiskDetails::new(&*self.inventory, name, now.before.as_deref(), &now.snapshot);
        let disk = asked.disk.as_ref().and_then(closer);
        let answer = Bytes::from(asked.answer(&self.host, &now.rates, disk));
        if now.answers.len() < REPLIES_MAX {
            now.answers.insert(query.to_owned(), answer.clone());
        }
        typed("application/json", answer)
    }
}

impl PageQuery {
    /// Parses a query. Returns `None` if it has an unknown parameter or a malformed value.
    fn read(query: &str) -> Option<Self> {
        let mut asked = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=')?;
            match name {
                "sort" => asked.sort = decode(value)?,
                "filter" => asked.filter = decode(value)?,
                "disk" => asked.disk = Some(decode(value)?),
                _ => return None,
            }
        }
        (asked.filter.len() <= FILTER_MAX).then_some(asked)
    }

    fn answer(&self, host: &str, rates: &Rates, disk: Option<DiskDetails>) -> Vec<u8> {
        let mut disks: Vec<_> = rates.disks.iter().filter(|d| d.name.contains(&self.filter)).collect();
        let matching = disks.len();
        let key = |rate: &Rate| match self.sort.as_str() {
            "name" => 0,
            "reads" => rate.reads,
            "writes" => rate.writes,
            "read_bytes" => rate.read_bytes,
            "write_bytes" => rate.write_bytes,
            "bytes" => rate.read_bytes + rate.write_bytes,
            "mean_ns" => rate.mean_ns.unwrap_or_default(),
            "in_flight" => rate.in_flight,
            "errors" => rate.errors_ever,
            _ => rate.ops(),
        };
        disks.sort_by(|a, b| key(&b.rate).cmp(&key(&a.rate)).then_with(|| a.name.cmp(&b.name)));
        disks.truncate(DISKS);
        let mut groups: Vec<_> = rates.groups.iter().collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.rate.ops()));
        groups.truncate(GROUPS);
        let live = Live {
            host,
            version: env!("CARGO_PKG_VERSION"),
            seconds: rates.seconds,
            all: rates.disks.len(),
            matching,
            vms: rates.vms,
            total: &rates.total,
            disks,
            all_groups: rates.groups.len(),
            groups,
            reactors: &rates.reactors,
            bounds_ns: Coarse::BOUNDS_LOG2.iter().map(|log2| 1 << log2).collect(),
            latencies: &rates.latencies,
            disk,
        };
        serde_json::to_vec(&live).expect("numbers and strings")
    }
}

fn typed(kind: &'static str, content: Bytes) -> Reply {
    let mut reply = Response::new(Bytestream::from(content));
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    reply
}

/// Whether a `Host` header names this host's loopback.
fn is_local(host: Option<&HeaderValue>) -> bool {
    let authority = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
    authority.is_some_and(|authority| {
        let host = authority.host();
        let address = host.trim_start_matches('[').trim_end_matches(']').parse();
        host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|a: std::net::IpAddr| a.is_loopback())
    })
}

/// Decodes a form's value: RFC 3986 percent-encoding, and `+` for a space.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, more)) = rest.split_first() {
        rest = more;
        bytes.push(match first {
            b'+' => b' ',
            b'%' => {
                let (digits, more) = rest.split_first_chunk()?;
                rest = more;
                let [high, low] = digits.map(|digit| char::from(digit).to_digit(16));
                (high? << 4 | low?) as u8
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_read() {
        let asked = PageQuery::read("sort=reads&filter=a%2Bb+%C3%A4%26").unwrap();
        assert_eq!((&*asked.sort, &*asked.filter), ("reads", "a+b ä&"));
        assert!(PageQuery::read("").is_some());
        for wrong in ["x=1", "filter", "filter=%", "filter=%zz", "filter=%+1", "filter=%ff", "sort=1&y=2"] {
            assert!(PageQuery::read(wrong).is_none(), "{wrong}");
        }
        assert!(PageQuery::read(&format!("filter={}", "a".repeat(300))).is_none());
    }

    #[test]
    fn only_names_of_this_host() {
        let is = |host: &str| is_local(Some(&HeaderValue::from_str(host).unwrap()));
        assert!(
            is("localhost") && is("LOCALHOST:80") && is("127.0.0.1:9") && is("[::1]:9") && is("127.9.9.9")
        );
        assert!(
            !is("evil.example:80") && !is("10.0.0.1") && !is("localhost.evil.example") && !is_local(None)
        );
    }

    #[test]
    fn the_page_loads_nothing_from_elsewhere() {
        let all: String = FILES.iter().map(|file| file.2).collect();
        assert!(all.len() < 200_000);
        assert!(!all.contains("://") && !all.contains("innerHTML") && !all.contains("style=\""));
    }
}
