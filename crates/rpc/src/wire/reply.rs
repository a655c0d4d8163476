//! Encodes responses. Any context.

use super::Id;
use crate::Error;
use serde::Serialize;
use serde_json::value::RawValue;

/// Members in the order of the specification's examples.
#[derive(Serialize)]
struct Response<'a> {
    jsonrpc: &'static str,
    id: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<crate::error::WireError<'a>>,
}

/// The response to the request `id`; an error without a request has the id `null`.
pub fn response(id: Option<&Id>, outcome: &Result<Box<RawValue>, Error>) -> Vec<u8> {
    let response = Response {
        jsonrpc: "2.0",
        id: id.map(Id::as_json),
        result: outcome.as_ref().ok().map(AsRef::as_ref),
        error: outcome.as_ref().err().map(Error::to_wire),
    };
    serde_json::to_vec(&response).expect("all members are valid JSON")
}

/// The responses of a batch as one array; `None` if there are none, since then nothing is sent.
pub fn to_batch(responses: &[Vec<u8>]) -> Option<Vec<u8>> {
    if responses.is_empty() {
        return None;
    }
    let mut text = vec![b'['];
    text.extend(responses.join(&b','));
    text.push(b']');
    Some(text)
}
