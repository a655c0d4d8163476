//! Errors, and hints how to solve them.

use aryk_pci::PciError;
use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;

/// The daemon's codes: negated errnos, and codes of JSON-RPC.
pub const NO_FILE: i64 = -2;
pub const NOT_ALLOWED: i64 = -13;
pub const BUSY: i64 = -16;
pub const EXISTS: i64 = -17;
pub const NO_DEVICE: i64 = -19;
pub const NO_SPACE: i64 = -28;
pub const DAMAGED: i64 = -84;
pub const NO_FAMILY: i64 = -97;
pub const TIMED_OUT: i64 = -110;
pub const NO_METHOD: i64 = -32601;
pub const BAD_PARAMS: i64 = -32602;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No process listens on the socket.
    #[error("no daemon answers at {}", .0.display())]
    NoDaemon(PathBuf),
    /// The socket cannot be opened: another error than "no process listens".
    #[error("cannot open {}: {source}", .path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke, or the reply is malformed.
    #[error("the daemon {0}")]
    Protocol(String),
    /// The daemon replied with an error.
    #[error("{}", with_detail(message, detail.as_deref()))]
    Refused {
        /// A code of JSON-RPC, or a negated errno.
        code: i64,
        /// The message of the code.
        message: String,
        /// The daemon's details for people.
        detail: Option<String>,
        /// The hint of the command that made the call.
        hint: Option<&'static str>,
    },
    /// An object that the command would remove is in use.
    #[error("{what}:\n  {}", users.join("\n  "))]
    InUse {
        /// The object, as a clause that it is in use.
        what: String,
        /// The object's users.
        users: Vec<String>,
        /// How to go on.
        hint: &'static str,
    },
    /// The command would replace absent objects.
    #[error("this would replace absent objects, for which the daemon waits:\n  {}", .0.join("\n  "))]
    Absent(Vec<String>),
    /// An invalid command line, beyond the checks of the parser.
    #[error("{0}")]
    Usage(String),
    /// `aryk doctor` found this many necessary things missing.
    #[error("{} correction", if *.0 == 1 { "one check needs".into() } else { format!("{} checks need", .0) })]
    Unhealthy(usize),
    /// The rotation of a disk's key has ended before all blocks had the new key.
    #[error("the rotation of the key of disk '{disk}' is not complete: {why}")]
    Rotation {
        /// The disk.
        disk: String,
        /// Why.
        why: String,
    },
    /// The pass of the scrub of a pool has ended before it had read all.
    #[error("the scrub of pool '{pool}' is not complete: {why}")]
    Scrub {
        /// The pool.
        pool: String,
        /// Why.
        why: &'static str,
    },
    /// A pool has damaged parts.
    #[error("the pool '{0}' is damaged")]
    Damaged(String),
    /// An error in one of our files.
    #[error("{0}")]
    File(String),
    /// The plan would detach disks from VMs, without permission.
    #[error("this detaches from their VMs, and recreates:\n  {0}")]
    Replaces(String),
    /// One of several steps failed.
    #[error("{step}: {source}")]
    Step {
        /// The step.
        step: String,
        /// The cause.
        source: Box<Error>,
    },
    /// An image was imported into a file, but its disk was not created.
    #[error("{step}: {source}")]
    Imported {
        /// The step.
        step: String,
        /// The cause.
        source: Box<Error>,
    },
    /// An error of the back-end under `aryk bench`.
    #[error(transparent)]
    BackEnd(#[from] aryk_front_end::Error),
    /// A PCI function of this host cannot be examined, bound or unbound.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The back-end disconnected under load.
    #[error("the back-end disconnected with {0} requests in flight")]
    Gone(u64),
    /// The back-end does not complete requests.
    #[error("the back-end has completed none of {in_flight} requests for {patience:?}")]
    Unanswered {
        /// Requests in flight.
        in_flight: u64,
        /// Time since the last completion.
        patience: std::time::Duration,
    },
    /// A read returned other data than the last write.
    #[error("the disk returned wrong data: {0}")]
    Mismatch(#[from] crate::bench::Mismatch),
    /// An error of our own input or output.
    #[error(transparent)]
    Io(#[from] io::Error),
}

fn with_detail(message: &str, detail: Option<&str>) -> String {
    match detail {
        Some(detail) if !detail.is_empty() => format!("{message}: {detail}"),
        _ => message.to_owned(),
    }
}

/// The cause of a refusal, as one of the constants above. Some methods have one code for all errors; their message shows the
/// cause.
fn kind(code: i64, message: &str) -> i64 {
    match (message, code) {
        ("File exists", _) => EXISTS,
        ("No such device", _) => NO_DEVICE,
        ("Device or resource busy", _) => BUSY,
        ("No such file or directory", _) => NO_FILE,
        ("Permission denied", _) => NOT_ALLOWED,
        ("No space left on device", _) => NO_SPACE,
        ("Address family not supported by protocol", _) => NO_FAMILY,
        ("Invalid parameters" | "Invalid argument", -32603 | -32602) => BAD_PARAMS,
        (_, code) => code,
    }
}

impl Error {
    /// Refuses to end uses in `users`, and to lose the data in `last_data`; `None` if both are empty. Both are reported at once,
    /// because --force permits both.
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
                "'aryk doctor' says how to keep that data. With --force the data is lost, and so are the uses."
            }
        };
        users.extend(last_data);
        (!users.is_empty()).then_some(Self::InUse { what, users, hint })
    }

    /// The daemon's error for an object that does not exist.
    pub fn no_device(detail: String) -> Self {
        Self::Refused { code: NO_DEVICE, message: "No such device".into(), detail: Some(detail), hint: None }
    }

    /// Adds the hint for the cause of the daemon's refusal. An existing hint stays.
    #[must_use]
    pub fn hinted(mut self, hints: &[(i64, &'static str)]) -> Self {
        if let Self::Refused { code, message, hint: hint @ None, .. } = &mut self {
            let kind = kind(*code, message);
            *hint = hints.iter().find(|(of, _)| *of == kind).map(|(_, hint)| *hint);
        }
        self
    }

    /// The cause of the daemon's refusal.
    pub fn kind(&self) -> Option<i64> {
        match self {
            Self::Refused { code, message, .. } => Some(kind(*code, message)),
            _ => None,
        }
    }

    /// The error for programs.
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

    /// The hint for people.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoDaemon(_) => {
                Some("Start one with 'arykd', or give its socket with --socket or ARYK_SOCKET.")
            }
            Self::Socket { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("Only the user who runs the daemon may use its socket: run this as that user.")
            }
            Self::Refused { hint, .. } => *hint,
            Self::InUse { hint, .. } => Some(hint),
            Self::Absent(_) => Some(
                "Put its file back, and the daemon creates the disk by itself; or make the daemon forget it with the command above.",
            ),
            Self::Unhealthy(_) => Some("The lines that begin with 'do:' say how to correct them."),
            Self::Replaces(_) => Some("Add --replace to permit that; --plan shows all steps."),
            Self::Imported { .. } => Some("Correct that, then create the disk on the file, without --from."),
            Self::Protocol(_) => {
                Some("'aryk doctor' checks whether it is Aryk's daemon, and whether it works.")
            }
            Self::BackEnd(aryk_front_end::Error::Connect { .. }) => Some(
                "Give a vhost-user socket: 'aryk attach DISK' and 'aryk controller list' print the sockets of arykd.",
            ),
            Self::BackEnd(aryk_front_end::Error::Silent(_)) => {
                Some("A back-end serves one front-end at a time: is a VM connected?")
            }
            Self::Pci(PciError::InUse { .. }) => Some(
                "Unmount it, or end the process that uses it, and run the same command again; 'aryk nvme list' shows all uses.",
            ),
            Self::Pci(PciError::NoDriver) => {
                Some("To load it at each boot: echo vfio-pci | sudo tee /etc/modules-load.d/vfio-pci.conf")
            }
            Self::Pci(PciError::Permission { .. }) => Some("Run this as root, with sudo."),
            Self::Rotation { .. } => {
                Some("The disk needs both keys. The same command continues, once the cause is corrected.")
            }
            Self::Damaged(_) => {
                Some("Reads of the damaged parts fail. Write them again, or restore the volumes from copies.")
            }
            Self::Scrub { .. } => Some("The next pass begins at the start of the pool: aryk pool scrub POOL"),
            Self::Unanswered { .. } => Some("--timeout sets how many seconds to wait."),
            Self::Step { source, .. } => source
                .hint()
                .or(Some("The steps before stay done. Correct that, and run the same command again.")),
            Self::File(_)
            | Self::Socket { .. }
            | Self::Usage(_)
            | Self::BackEnd(_)
            | Self::Pci(_)
            | Self::Gone(_)
            | Self::Mismatch(_)
            | Self::Io(_) => None,
        }
    }

    /// The exit code of the process; see `aryk --help`.
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
            | Self::Rotation { .. }
            | Self::Scrub { .. }
            | Self::Damaged(_)
            | Self::File(_)
            | Self::Replaces(_)
            | Self::BackEnd(_)
            | Self::Pci(_)
            | Self::Gone(_)
            | Self::Unanswered { .. }
            | Self::Mismatch(_)
            | Self::Io(_) => 1,
        }
    }
}
