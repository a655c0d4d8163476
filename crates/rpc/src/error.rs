//! Errors of methods, and their form on the wire. Control context.
//!
//! Clients branch on the codes and, some of them, on the exact texts `File exists` and `No such device`. So `message` is always
//! the bare text of the error, which belongs to the code unless the method has one code for all errors; all further information
//! is in `data`.

use rustix::io::Errno;
use serde::Serialize;

/// JSON-RPC 2.0, section 5.1.
pub const INVALID_PARAMS: i32 = -32602;
/// JSON-RPC 2.0, section 5.1.
pub const INTERNAL: i32 = -32603;

/// The failure of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are not JSON, or exceed a limit. The connection is closed afterwards.
    #[error("Parse error: {0}")]
    Parse(String),
    /// The value is JSON, but not a request.
    #[error("Invalid request: {0}")]
    InvalidRequest(String),
    /// The method does not exist.
    #[error("Method not found")]
    MethodNotFound,
    /// A parameter is missing, unknown, of the wrong type, or out of range.
    #[error("Invalid parameters: {0}")]
    InvalidParams(String),
    /// The parameters cannot be decoded: one is missing, unknown, or of another type. The code of this error differs between
    /// methods.
    #[error("Invalid parameters: {0}")]
    Undecoded(String),
    /// Another error, with the code that the method uses for it: see [`crate::table::Codes`].
    #[error("{message}: {detail}")]
    Coded {
        /// Code on the wire.
        code: i32,
        /// The text of the error, independent of the code.
        message: String,
        /// Details for the operator.
        detail: String,
    },
    /// A bug, or an error without a code of its own.
    #[error("Internal error: {0}")]
    Internal(String),
    /// The method may not be called in the present state: it needs a completed start-up, or is only allowed before start-up.
    #[error("Method may not be called now: {0}")]
    State(String),
    /// An error of the system or of a device.
    #[error("{}: {detail}", strerror(*.errno))]
    Errno {
        /// The errno.
        errno: Errno,
        /// Details for the operator: the operation, and its object.
        detail: String,
    },
}

impl Error {
    /// A system error with its details.
    pub fn errno(errno: Errno, detail: impl Into<String>) -> Self {
        Self::Errno { errno, detail: detail.into() }
    }

    /// No object has that name.
    pub fn no_device(what: &str, name: &str) -> Self {
        Self::errno(Errno::NODEV, format!("there is no {what} '{name}'"))
    }

    /// The same error, with a detail that says where it occurred.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let at = |detail: String| format!("{place}: {detail}");
        match self {
            Self::MethodNotFound => Self::InvalidParams(at("the method does not exist".into())),
            Self::Parse(detail) => Self::Parse(at(detail)),
            Self::InvalidRequest(detail) => Self::InvalidRequest(at(detail)),
            Self::InvalidParams(detail) => Self::InvalidParams(at(detail)),
            Self::Undecoded(detail) => Self::Undecoded(at(detail)),
            Self::Coded { code, message, detail } => Self::Coded { code, message, detail: at(detail) },
            Self::Internal(detail) => Self::Internal(at(detail)),
            Self::State(detail) => Self::State(at(detail)),
            Self::Errno { errno, detail } => Self::Errno { errno, detail: at(detail) },
        }
    }

    /// A parameter with a value of the right type that is not valid.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Self::errno(Errno::INVAL, detail)
    }

    /// The same error with the code `code`.
    #[must_use]
    pub fn coded(self, code: i32) -> Self {
        Self::Coded { code, message: self.message(), detail: self.detail().unwrap_or_default().to_owned() }
    }

    /// The code on the wire.
    pub fn code(&self) -> i32 {
        match self {
            Self::Parse(_) => -32700,
            Self::InvalidRequest(_) => -32600,
            Self::MethodNotFound => -32601,
            Self::InvalidParams(_) | Self::Undecoded(_) => INVALID_PARAMS,
            Self::Coded { code, .. } => *code,
            Self::Internal(_) => INTERNAL,
            Self::State(_) => -1,
            Self::Errno { errno, .. } => -errno.raw_os_error(),
        }
    }

    /// The text that belongs to the code.
    pub fn message(&self) -> String {
        match self {
            Self::Parse(_) => "Parse error".into(),
            Self::InvalidRequest(_) => "Invalid request".into(),
            Self::MethodNotFound => "Method not found".into(),
            Self::InvalidParams(_) | Self::Undecoded(_) => "Invalid parameters".into(),
            Self::Coded { message, .. } => message.clone(),
            Self::Internal(_) => "Internal error".into(),
            Self::State(_) => "Method may not be called now".into(),
            Self::Errno { errno, .. } => strerror(*errno),
        }
    }

    fn detail(&self) -> Option<&str> {
        match self {
            Self::MethodNotFound => None,
            Self::Parse(detail)
            | Self::InvalidRequest(detail)
            | Self::InvalidParams(detail)
            | Self::Undecoded(detail)
            | Self::Coded { detail, .. }
            | Self::Internal(detail)
            | Self::State(detail)
            | Self::Errno { detail, .. } => Some(detail),
        }
    }

    /// The `error` member of a response.
    pub fn to_wire(&self) -> WireError<'_> {
        WireError { code: self.code(), message: self.message(), data: self.detail() }
    }
}

impl From<aryk_bdev::Error> for Error {
    fn from(error: aryk_bdev::Error) -> Self {
        use aryk_bdev::Error as Bdev;
        let errno = match error {
            Bdev::Exists(_) | Bdev::GroupExists(_) => Errno::EXIST,
            Bdev::NotFound(_) | Bdev::NoGroup(_) | Bdev::NotInGroup { .. } => Errno::NODEV,
            Bdev::Claimed { .. } | Bdev::Busy(_) | Bdev::GroupInUse { .. } => Errno::BUSY,
            Bdev::BlockSize(_) | Bdev::TooLarge { .. } | Bdev::GroupDepth(_) | Bdev::Limits(_) => {
                Errno::INVAL
            }
        };
        Self::errno(errno, error.to_string())
    }
}

/// The `error` member of a response: JSON-RPC 2.0, section 5.1.
#[derive(Debug, Serialize)]
pub struct WireError<'a> {
    code: i32,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a str>,
}

/// The C library's text for `errno`, which SPDK's clients expect.
fn strerror(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_match_these_texts() {
        let known = [
            (Errno::EXIST, -17, "File exists"),
            (Errno::NODEV, -19, "No such device"),
            (Errno::BUSY, -16, "Device or resource busy"),
            (Errno::NOENT, -2, "No such file or directory"),
            (Errno::INVAL, -22, "Invalid argument"),
            (Errno::NOMEM, -12, "Cannot allocate memory"),
        ];
        for (errno, code, message) in known {
            let error = Error::errno(errno, "detail");
            assert_eq!((error.code(), error.message().as_str()), (code, message));
        }
    }

    #[test]
    fn detail_goes_to_data_alone() {
        let error = Error::errno(Errno::EXIST, "a disk 'vm1' exists");
        let wire = serde_json::to_string(&error.to_wire()).unwrap();
        assert_eq!(wire, r#"{"code":-17,"message":"File exists","data":"a disk 'vm1' exists"}"#);
        let wire = serde_json::to_string(&Error::MethodNotFound.to_wire()).unwrap();
        assert_eq!(wire, r#"{"code":-32601,"message":"Method not found"}"#);
    }
}
