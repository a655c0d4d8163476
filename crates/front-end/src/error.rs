//! Errors of a session with a back-end.

use crate::{NotOutstanding, Request, RequestError};
use aryk_dma::MapError;
use rustix::io::Errno;
use std::path::PathBuf;

/// The reason why a session cannot be opened, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No process listens on the socket, or the connection is refused.
    #[error("cannot connect to {}: {source}", .path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The back-end closed the connection.
    #[error("the back-end closed the connection")]
    HungUp,
    /// The back-end did not reply to a message in time.
    #[error("the back-end does not reply to {0}")]
    Silent(Request),
    /// The back-end replied to a message with a failure.
    #[error("the back-end refuses {0}")]
    Refused(Request),
    /// A reply that the protocol does not allow.
    #[error("the back-end's reply to {request} is invalid: {what}")]
    Reply {
        /// The message that the back-end replied to.
        request: Request,
        /// The defect of the reply.
        what: String,
    },
    /// The back-end lacks a feature that the front-end needs.
    #[error("the back-end does not offer {0}")]
    Lacks(String),
    /// The back-end completed a chain that is not in flight.
    #[error("queue {queue}: {source}")]
    Ring {
        /// The queue's index.
        queue: u16,
        /// The completion.
        source: NotOutstanding,
    },
    /// A request was not completed in time.
    #[error("queue {0}: a request was not completed in time")]
    Unanswered(u16),
    /// A request failed.
    #[error("queue {queue}: {source}")]
    Request {
        /// The queue's index.
        queue: u16,
        /// How the request failed.
        source: RequestError,
    },
    /// Guest memory cannot be allocated.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Another system call failed.
    #[error("{what}: {source}")]
    Os {
        /// What the system call was for.
        what: &'static str,
        /// The operating system's error.
        source: Errno,
    },
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self::Os { what, source }
    }
}
