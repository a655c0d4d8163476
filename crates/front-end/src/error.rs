//! What goes wrong with a back end.

use crate::{NotOutstanding, Request, Trouble};
use aryk_dma::MapError;
use rustix::io::Errno;
use std::path::PathBuf;

/// Why there is no session, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens, or not to us.
    #[error("cannot connect to {}: {source}", .path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The connection ended.
    #[error("the back end has hung up")]
    HungUp,
    /// A message was not answered in time.
    #[error("the back end does not answer {0}")]
    Silent(Request),
    /// A message was answered with a failure.
    #[error("the back end refuses {0}")]
    Refused(Request),
    /// A reply that no back end may send.
    #[error("the back end's reply to {request} makes no sense: {what}")]
    Reply {
        /// To which message.
        request: Request,
        /// What is wrong with it.
        what: String,
    },
    /// Something that is needed is not there.
    #[error("the back end does not offer {0}")]
    Lacks(String),
    /// A completion of what is not in flight.
    #[error("queue {queue}: {source}")]
    Ring {
        /// Its index.
        queue: u16,
        /// What came.
        source: NotOutstanding,
    },
    /// A request was not answered in time.
    #[error("queue {0}: a request is not answered")]
    Unanswered(u16),
    /// A request failed.
    #[error("queue {queue}: {source}")]
    Request {
        /// Its index.
        queue: u16,
        /// How.
        source: Trouble,
    },
    /// The kernel gives no memory.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The kernel refuses something else.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: Errno,
    },
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self::Os { what, source }
    }
}
