//! A snapshot sent to a scraper, piece by piece. Control context.
//!
//! The text for thousands of disks has megabytes. It is made while it is sent, so that a scraper costs one snapshot and one piece
//! of text. The number of scrapes at a time is limited, because a slow reader keeps its snapshot in memory.

use crate::exposition::{END, Text};
use crate::families::ALL;
use crate::server::{Bytestream, Reply, Request, plain};
use crate::{Inventory, Snapshot};
use hyper::body::{Body, Bytes, Frame};
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Response, StatusCode};
use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Scrapes at a time; more must wait.
const SCRAPES_MAX: usize = 8;
/// How long a scrape waits for its turn.
const WAIT: Duration = Duration::from_secs(5);
/// Maximum age of a scraper's snapshot: two scrapers that come together share one.
const AGE: Duration = Duration::from_millis(200);
/// Approximate bytes of a piece.
const PIECE: usize = 64 * 1024;
/// OpenMetrics 1.0, which Prometheus requests and which others accept as Prometheus's text format.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers scrapers.
pub struct Scrapes {
    inventory: Rc<dyn Inventory>,
    permits: Arc<Semaphore>,
}

impl fmt::Debug for Scrapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrapes").field("permits", &self.permits).finish_non_exhaustive()
    }
}

impl Scrapes {
    /// Serves the metrics of `inventory`.
    pub fn new(inventory: Rc<dyn Inventory>) -> Self {
        Self { inventory, permits: Arc::new(Semaphore::new(SCRAPES_MAX)) }
    }

    /// Answers a request.
    pub async fn answer(&self, request: Request) -> Reply {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/metrics") => self.scrape().await,
            (&Method::GET, "/") => plain(StatusCode::OK, "the metrics are at /metrics\n"),
            (&Method::GET, _) => plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n"),
            _ => plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are read with GET\n"),
        }
    }

    async fn scrape(&self) -> Reply {
        let permit = tokio::time::timeout(WAIT, Arc::clone(&self.permits).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else {
            return plain(StatusCode::SERVICE_UNAVAILABLE, "too many concurrent scrapes\n");
        };
        let snapshot = self.inventory.collector().snapshot(&*self.inventory, AGE).await;
        let mut reply =
            Response::new(Bytestream::from(ScrapeBody { snapshot, next: (0, 0), _permit: permit }));
        reply.headers_mut().insert(CONTENT_TYPE, OPEN_METRICS.parse().expect("the type is ASCII"));
        reply
    }
}

/// The body of a reply: a snapshot in the course of being written.
#[derive(Debug)]
pub struct ScrapeBody {
    snapshot: Rc<Snapshot>,
    /// The next family, and the next object in it.
    next: (usize, usize),
    _permit: OwnedSemaphorePermit,
}

impl ScrapeBody {
    /// The next piece; `None` after the last one.
    fn next_piece(&mut self) -> Option<String> {
        let mut text = Text(String::with_capacity(PIECE + PIECE / 8));
        while text.0.len() < PIECE {
            let (family, object) = &mut self.next;
            let Some(source) = ALL.get(*family) else {
                if *family == ALL.len() {
                    *family += 1;
                    text.0.push_str(END);
                }
                break;
            };
            if *object == 0 {
                text.begin(&source.family);
            }
            if *object < (source.objects)(&self.snapshot) {
                (source.write)(&source.family, &self.snapshot, *object, &mut text);
                *object += 1;
            } else {
                self.next = (*family + 1, 0);
            }
        }
        (!text.0.is_empty()).then_some(text.0)
    }
}

impl Body for ScrapeBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = self.get_mut().next_piece();
        Poll::Ready(piece.map(|piece| Ok(Frame::data(Bytes::from(piece)))))
    }
}
