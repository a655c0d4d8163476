//! What goes wrong, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens.
    #[error("no daemon answers at {}", .0.display())]
    NoDaemon(PathBuf),
    /// Somebody might listen, but not to us.
    #[error("cannot open {}: {source}", .path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke, or what came makes no sense.
    #[error("the daemon {0}")]
    Protocol(String),
    /// The daemon's answer is an error.
    #[error("{}", with_detail(message, detail.as_deref()))]
    Refused {
        /// JSON-RPC's, or a negated errno.
        code: i64,
        /// Its text.
        message: String,
        /// What the daemon adds for people.
        detail: Option<String>,
    },
    /// The command line, beyond what its grammar says.
    #[error("{0}")]
    Usage(String),
    /// `aryk doctor` found so many things missing.
    #[error("{} missing that arykd cannot do without", if *.0 == 1 { "one thing is".into() } else { format!("{} things are", .0) })]
    Unhealthy(usize),
    /// A file of ours that says what cannot be done.
    #[error("{0}")]
    File(String),
    /// What takes disks away from machines, and was not asked for.
    #[error("this takes away from its machine, and makes anew:\n  {0}")]
    Replaces(String),
    /// One of several steps failed.
    #[error("{step}: {source}")]
    Step {
        /// Which.
        step: String,
        /// Why.
        source: Box<Error>,
    },
    /// An image became a file, and the file no disk.
    #[error("{step}: {source}")]
    Imported {
        /// Which.
        step: String,
        /// Why.
        source: Box<Error>,
    },
    /// A back end that `aryk bench` met.
    #[error(transparent)]
    BackEnd(#[from] aryk_front_end::Error),
    /// A back end ended under load.
    #[error("the back end has hung up, with {0} requests in flight")]
    Gone(u64),
    /// A back end does not answer requests.
    #[error("the back end has answered none of {in_flight} requests for {patience:?}")]
    Unanswered {
        /// How many wait.
        in_flight: u64,
        /// How long they did.
        patience: std::time::Duration,
    },
    /// A disk gave other data than was written to it.
    #[error("the disk does not hold what was written to it: {0}")]
    Mismatch(#[from] crate::bench::Mismatch),
    /// Our own input or output.
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn with_detail(message: &str, detail: Option<&str>) -> String {
    match detail {
        Some(detail) if !detail.is_empty() => format!("{message}: {detail}"),
        _ => message.to_owned(),
    }
}

/// What a person may try next, where the daemon has refused a call. Some methods have one code for all that can be wrong: the text tells.
fn hint_of(code: i64, message: &str, detail: Option<&str>) -> Option<&'static str> {
    match (message, code) {
        ("File exists", _) => Some("Choose another name, or remove that one first."),
        ("No such device", _) => Some("'aryk disk list' and 'aryk controller list' show what there is."),
        ("Device or resource busy", _) => Some("'aryk controller list' shows who uses it."),
        // There are other reasons why something does not exist, such as its directory.
        ("No such file or directory", _) if detail.is_some_and(|why| why.contains("give a size")) => {
            Some("To make a new file, say how large: --size 20G.")
        }
        ("Permission denied", _) => {
            Some("The user who runs the daemon must be allowed to use it: see 'ls -l', and 'ps -C arykd'.")
        }
        ("No space left on device", _) => Some("'df' shows which file system is full."),
        ("Invalid parameters" | "Invalid argument", -32603 | -32602) => Some("--help shows what it takes."),
        (_, -32601) => Some("'aryk rpc rpc_get_methods' lists the methods."),
        _ => None,
    }
}

impl Error {
    /// What a person may try next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoDaemon(_) => {
                Some("Start one with 'arykd', or name its socket with --socket or ARYK_SOCKET.")
            }
            Self::Socket { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("Only the user who runs the daemon may use its socket: be that user.")
            }
            Self::Refused { code, message, detail } => hint_of(*code, message, detail.as_deref()),
            Self::Unhealthy(_) => Some("The lines that begin with 'do:' say how to bring them about."),
            Self::Replaces(_) => {
                Some("Add --replace if that is wanted; --plan shows all that would be done.")
            }
            Self::Imported { .. } => Some("When that is mended, make the disk of the file, without --from."),
            Self::Protocol(_) => {
                Some("'aryk doctor' tells whether it is Aryk's daemon, and whether it is well.")
            }
            Self::BackEnd(aryk_front_end::Error::Connect { .. }) => Some(
                "Name a vhost-user socket: of arykd's, 'aryk attach DISK' prints them, and 'aryk controller list' lists them.",
            ),
            Self::BackEnd(aryk_front_end::Error::Silent(_)) => {
                Some("A back end serves one at a time: is a virtual machine connected?")
            }
            Self::Unanswered { .. } => Some("--timeout says how many seconds to wait."),
            Self::Step { .. } => Some("What was done stays. When that is mended, run the same again."),
            Self::File(_)
            | Self::Socket { .. }
            | Self::Usage(_)
            | Self::BackEnd(_)
            | Self::Gone(_)
            | Self::Mismatch(_)
            | Self::Io(_) => None,
        }
    }

    /// The process's exit code; see `aryk --help`.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoDaemon(_)
            | Self::Socket { .. }
            | Self::BackEnd(aryk_front_end::Error::Connect { .. }) => 3,
            Self::Usage(_) => 2,
            Self::Step { source, .. } | Self::Imported { source, .. } => source.exit_code(),
            Self::Refused { .. }
            | Self::Protocol(_)
            | Self::Unhealthy(_)
            | Self::File(_)
            | Self::Replaces(_)
            | Self::BackEnd(_)
            | Self::Gone(_)
            | Self::Unanswered { .. }
            | Self::Mismatch(_)
            | Self::Io(_) => 1,
        }
    }
}
