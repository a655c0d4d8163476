//! Parses the text of one request or one batch into calls. Any context.

use super::BATCH_LEN_MAX;
use crate::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;
use std::fmt;

/// A request's `id`, as it was written: it is only copied into the reply.
#[derive(Debug, Clone)]
pub struct Id(Box<RawValue>);

impl Id {
    /// The JSON text of the `id`.
    pub fn as_json(&self) -> &RawValue {
        &self.0
    }
}

/// A method call.
pub struct Call {
    /// `None` for a notification, which gets no reply.
    pub id: Option<Id>,
    /// The method's name.
    pub method: String,
    /// The text of `params` if it has members: a missing, `null` or empty one is `None`.
    pub params: Option<Box<RawValue>>,
}

/// Without the parameters, which may be secret.
impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("id", &self.id).field("method", &self.method).finish_non_exhaustive()
    }
}

/// A JSON value that is not a call, and the `id` for its error, if it had one.
#[derive(Debug)]
pub struct Rejected {
    /// `None` makes the reply's id `null`.
    pub id: Option<Id>,
    /// [`Error::InvalidRequest`], or [`Error::InvalidParams`].
    pub error: Error,
}

/// A complete message of the stream.
#[derive(Debug)]
pub enum Message {
    /// A single call.
    One(Result<Call, Rejected>),
    /// An array of calls, answered by an array.
    Batch(Vec<Result<Call, Rejected>>),
}

impl Message {
    /// Parses one complete value.
    ///
    /// # Errors
    /// [`Error::Parse`] if the text is not JSON.
    pub(super) fn parse(text: &[u8]) -> Result<Self, Error> {
        let parse_error = |e: serde_json::Error| Error::Parse(e.to_string());
        if text.first() != Some(&b'[') {
            let value: Box<RawValue> = serde_json::from_slice(text).map_err(parse_error)?;
            return Ok(Self::One(Call::parse(&value)));
        }
        let values: Vec<&RawValue> = serde_json::from_slice(text).map_err(parse_error)?;
        let reject =
            |why: String| Ok(Self::One(Err(Rejected { id: None, error: Error::InvalidRequest(why) })));
        if values.is_empty() {
            return reject("a batch must hold at least one request".into());
        }
        if values.len() > BATCH_LEN_MAX {
            return reject(format!("a batch may hold at most {BATCH_LEN_MAX} requests"));
        }
        Ok(Self::Batch(values.into_iter().map(Call::parse).collect()))
    }
}

/// A request's members, unchecked. Others are ignored, as JSON-RPC allows.
#[derive(Deserialize)]
struct Members<'a> {
    #[serde(borrow)]
    jsonrpc: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<&'a RawValue>,
    #[serde(default, borrow)]
    params: Option<&'a RawValue>,
    #[serde(default, borrow, deserialize_with = "present")]
    id: Option<&'a RawValue>,
}

/// Distinguishes `"id": null`, which is answered, from a missing id.
fn present<'de: 'a, 'a, D: Deserializer<'de>>(from: D) -> Result<Option<&'a RawValue>, D::Error> {
    Deserialize::deserialize(from).map(Some)
}

impl Call {
    fn parse(value: &RawValue) -> Result<Self, Rejected> {
        let reject = |id, why: &str| Rejected { id, error: Error::InvalidRequest(why.into()) };
        if !value.get().starts_with('{') {
            return Err(reject(None, "a request must be an object"));
        }
        let members: Members<'_> =
            serde_json::from_str(value.get()).map_err(|e| reject(None, &e.to_string()))?;
        let id = match members.id.map(RawValue::get) {
            None => None,
            Some(text) if text.starts_with(['{', '[', 't', 'f']) => {
                return Err(reject(None, "'id' must be a string, a number or null"));
            }
            // The id is returned as it was written: one that the client could not parse (a number out of any range, half a
            // surrogate pair) is refused.
            Some(text) if serde_json::from_str::<Value>(text).is_err() => {
                return Err(reject(None, "'id' cannot be represented in the reply"));
            }
            Some(_) => members.id.map(|raw| Id(raw.to_owned())),
        };
        if let Some(version) = members.jsonrpc
            && serde_json::from_str::<String>(version.get()).ok().as_deref() != Some("2.0")
        {
            return Err(reject(id, "'jsonrpc' is \"2.0\""));
        }
        let Some(method) = members.method.and_then(|raw| serde_json::from_str::<String>(raw.get()).ok())
        else {
            return Err(reject(id, "'method' must be a string"));
        };
        match params(members.params) {
            Ok(params) => Ok(Self { id, method, params }),
            Err(error) => Err(Rejected { id, error }),
        }
    }
}

/// The named parameters, if there are any.
fn params(raw: Option<&RawValue>) -> Result<Option<Box<RawValue>>, Error> {
    let Some(raw) = raw else { return Ok(None) };
    let text = raw.get();
    let is_empty = |text: &str| text[1..text.len() - 1].trim_ascii().is_empty();
    match text.as_bytes()[0] {
        b'{' | b'[' if is_empty(text) => Ok(None),
        b'{' => Ok(Some(raw.to_owned())),
        b'[' => Err(Error::InvalidParams("parameters are named: 'params' must be an object".into())),
        _ => Err(Error::InvalidRequest("'params' must be an object".into())),
    }
}
