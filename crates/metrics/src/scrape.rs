//! A look told to a scraper, piece by piece. Control context.
//!
//! The whole text of thousands of disks has megabytes: it is made as it is sent, so that a scraper costs the look itself and one piece of text. How many may be
//! told at a time is bounded, for those who read slowly keep a look that nobody else wants any more.

use crate::exposition::{END, Text};
use crate::families::ALL;
use crate::server::{Bytestream, Reply, Request, plain};
use crate::{Inventory, Look};
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

/// Scrapes at a time; others wait.
const SCRAPES_MAX: usize = 8;
/// How long they wait.
const WAIT: Duration = Duration::from_secs(5);
/// How old what a scraper is told may be: two that come together share a look.
const AGE: Duration = Duration::from_millis(200);
/// Bytes of a piece, about.
const PIECE: usize = 64 * 1024;
/// OpenMetrics 1.0, which Prometheus asks for and others take for its own text format.
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
    /// What is in `inventory` is told.
    pub fn new(inventory: Rc<dyn Inventory>) -> Self {
        Self { inventory, permits: Arc::new(Semaphore::new(SCRAPES_MAX)) }
    }

    /// Answers a request.
    pub async fn answer(&self, request: Request) -> Reply {
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/metrics") => self.scrape().await,
            (&Method::GET, "/") => plain(StatusCode::OK, "the metrics are at /metrics\n"),
            (&Method::GET, _) => plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n"),
            _ => plain(StatusCode::METHOD_NOT_ALLOWED, "metrics are read by GET\n"),
        }
    }

    async fn scrape(&self) -> Reply {
        let permit = tokio::time::timeout(WAIT, Arc::clone(&self.permits).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else {
            return plain(StatusCode::SERVICE_UNAVAILABLE, "too many scrapes at a time\n");
        };
        let look = self.inventory.observatory().look(&*self.inventory, AGE).await;
        let mut reply = Response::new(Bytestream::from(Telling { look, next: (0, 0), _permit: permit }));
        reply.headers_mut().insert(CONTENT_TYPE, OPEN_METRICS.parse().expect("it is ASCII"));
        reply
    }
}

/// A look that is being told.
#[derive(Debug)]
pub struct Telling {
    look: Rc<Look>,
    /// The family that is told, and the object in it.
    next: (usize, usize),
    _permit: OwnedSemaphorePermit,
}

impl Telling {
    /// The next piece; `None` after the last.
    fn piece(&mut self) -> Option<String> {
        let mut text = Text(String::with_capacity(PIECE + PIECE / 8));
        while text.0.len() < PIECE {
            let (family, object) = &mut self.next;
            let Some(told) = ALL.get(*family) else {
                if *family == ALL.len() {
                    *family += 1;
                    text.0.push_str(END);
                }
                break;
            };
            if *object == 0 {
                text.begin(&told.family);
            }
            if *object < (told.objects)(&self.look) {
                (told.tell)(&told.family, &self.look, *object, &mut text);
                *object += 1;
            } else {
                self.next = (*family + 1, 0);
            }
        }
        (!text.0.is_empty()).then_some(text.0)
    }
}

impl Body for Telling {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = self.get_mut().piece();
        Poll::Ready(piece.map(|piece| Ok(Frame::data(Bytes::from(piece)))))
    }
}
