//! What goes wrong, and what to do about it.

use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;

/// The daemon's codes: negated errnos, and those of JSON-RPC.
pub const NO_FILE: i64 = -2;
pub const NOT_ALLOWED: i64 = -13;
pub const BUSY: i64 = -16;
pub const EXISTS: i64 = -17;
pub const NO_DEVICE: i64 = -19;
pub const NO_SPACE: i64 = -28;
pub const NO_METHOD: i64 = -32601;
pub const BAD_PARAMS: i64 = -32602;

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
        /// What to do about it, where it was called for.
        hint: Option<&'static str>,
    },
    /// What would be taken away is used.
    #[error("{what}:\n  {}", users.join("\n  "))]
    InUse {
        /// What is used, and that it is.
        what: String,
        /// By whom.
        users: Vec<String>,
        /// What to do about it.
        hint: &'static str,
    },
    /// What would be made would take the place of what is configured and not there.
    #[error("the daemon waits for what this would replace:\n  {}", .0.join("\n  "))]
    Absent(Vec<String>),
    /// The command line, beyond what its grammar says.
    #[error("{0}")]
    Usage(String),
    /// `aryk doctor` found so many things missing.
    #[error("{} mending", if *.0 == 1 { "one thing needs".into() } else { format!("{} things need", .0) })]
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

/// What a refusal is about, as the constants above have it. Some methods have one code for all that can be wrong: the text tells.
fn kind(code: i64, message: &str) -> i64 {
    match (message, code) {
        ("File exists", _) => EXISTS,
        ("No such device", _) => NO_DEVICE,
        ("Device or resource busy", _) => BUSY,
        ("No such file or directory", _) => NO_FILE,
        ("Permission denied", _) => NOT_ALLOWED,
        ("No space left on device", _) => NO_SPACE,
        ("Invalid parameters" | "Invalid argument", -32603 | -32602) => BAD_PARAMS,
        (_, code) => code,
    }
}

impl Error {
    /// Refuses to take from `users` what they use, and to end the data that `last_data` tells of; `None` if both are empty.
    /// Both are told at once, because --force is for both.
    pub fn in_use(
        what: String,
        mut users: Vec<String>,
        hint: &'static str,
        last_data: Vec<String>,
    ) -> Option<Self> {
        let what = if users.is_empty() { "data would be lost".into() } else { what };
        let hint = match last_data.is_empty() {
            true => hint,
            false => {
                "'aryk doctor' says how to keep that data. --force goes on all the same: the data is lost, and whoever uses it loses it too."
            }
        };
        users.extend(last_data);
        (!users.is_empty()).then_some(Self::InUse { what, users, hint })
    }

    /// What the daemon has no object for, in its words.
    pub fn no_device(detail: String) -> Self {
        Self::Refused { code: NO_DEVICE, message: "No such device".into(), detail: Some(detail), hint: None }
    }

    /// The same, with what to do about it if the daemon's refusal is one of these kinds: what that is depends on what was asked.
    #[must_use]
    pub fn hinted(mut self, hints: &[(i64, &'static str)]) -> Self {
        if let Self::Refused { code, message, hint: hint @ None, .. } = &mut self {
            let kind = kind(*code, message);
            *hint = hints.iter().find(|(of, _)| *of == kind).map(|(_, hint)| *hint);
        }
        self
    }

    /// What the daemon's refusal is about, if it is one.
    pub fn kind(&self) -> Option<i64> {
        match self {
            Self::Refused { code, message, .. } => Some(kind(*code, message)),
            _ => None,
        }
    }

    /// For programs.
    pub fn to_json(&self) -> Value {
        let mut error = json!({"message": self.to_string(), "exit_code": self.exit_code()});
        if let Some(hint) = self.hint() {
            error["hint"] = json!(hint);
        }
        match self {
            Self::Refused { code, .. } => error["code"] = json!(code),
            Self::InUse { what, users, .. } => {
                error["message"] = json!(what);
                error["users"] = json!(users);
            }
            _ => {}
        }
        json!({"error": error})
    }

    /// What a person may try next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoDaemon(_) => {
                Some("Start one with 'arykd', or name its socket with --socket or ARYK_SOCKET.")
            }
            Self::Socket { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("Only the user who runs the daemon may use its socket: be that user.")
            }
            Self::Refused { hint, .. } => *hint,
            Self::InUse { hint, .. } => Some(hint),
            Self::Absent(_) => Some(
                "Put its file back, and the daemon makes the disk again by itself; or have the daemon forget it, as said above.",
            ),
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
            Self::Step { source, .. } => {
                source.hint().or(Some("What was done stays. When that is mended, run the same again."))
            }
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
            | Self::InUse { .. }
            | Self::Absent(_)
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
