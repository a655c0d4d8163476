//! Recorded byte streams, split at every position.

use super::*;
use crate::Error;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The decoder's results for `pieces`: one line for each message, then how the stream ended.
fn decode<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<String> {
    let mut decoder = Decoder::default();
    let mut seen = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => seen.push(describe(&message)),
                Ok(None) => break,
                Err(error) => {
                    seen.push(format!("error {}", error.code()));
                    return seen;
                }
            }
        }
    }
    if let Err(error) = decoder.finish() {
        seen.push(format!("error {}", error.code()));
    }
    seen
}

fn describe(message: &Message) -> String {
    match message {
        Message::One(call) => describe_call(call),
        Message::Batch(calls) => {
            format!("[{}]", calls.iter().map(describe_call).collect::<Vec<_>>().join(" "))
        }
    }
}

fn describe_call(call: &Result<Call, Rejected>) -> String {
    let id = |id: &Option<Id>| id.as_ref().map_or("-".into(), |id| id.as_json().get().to_owned());
    match call {
        Ok(call) => {
            let params = call.params.as_ref().map_or("-", |p| p.get());
            format!("{}#{}({params})", call.method, id(&call.id))
        }
        Err(rejected) => format!("{}#{}", rejected.error.code(), id(&rejected.id)),
    }
}

fn whole(stream: &str) -> Vec<String> {
    decode([stream.as_bytes()])
}

/// Requests as real clients send them: compact, pretty-printed with blanks or tabs, without separators, with brackets and escaped
/// quotes in strings, in batches, with any Unicode.
const STREAM: &str = concat!(
    r#"{"jsonrpc":"2.0","method":"a","id":1}{"jsonrpc":"2.0","method":"b","id":"x","params":{"p":[1,{}]}}"#,
    "\n\t {\n\t\"method\":\t\"c\",\r\n  \"params\": null ,\n  \"id\": null\n}\n\n",
    r#"{"method":"d]}\"\\","params":{"s":"}{][\\\"\u007d"},"id":-1.5e3}"#,
    r#"[{"method":"e","id":2},{"method":"f"},3,{"id":4}]"#,
    r#"{"method":"диск-磁盘-\ud83d\ude00","params":{ },"id":"ключ"}"#,
    " \n",
);

const SEEN: [&str; 6] = [
    "a#1(-)",
    r#"b#"x"({"p":[1,{}]})"#,
    "c#null(-)",
    r#"d]}"\#-1.5e3({"s":"}{][\\\"\u007d"})"#,
    "[e#2(-) f#-(-) -32600#- -32600#4]",
    r#"диск-磁盘-😀#"ключ"(-)"#,
];

#[test]
fn a_stream_in_one_piece() {
    assert_eq!(whole(STREAM), SEEN);
}

#[test]
fn a_stream_cut_at_every_byte() {
    assert_eq!(decode(STREAM.as_bytes().chunks(1)), SEEN);
    for cut in 0..STREAM.len() {
        let (a, b) = STREAM.as_bytes().split_at(cut);
        assert_eq!(decode([a, b]), SEEN, "cut at {cut}");
    }
}

#[test]
fn a_stream_that_ends_early() {
    let one = r#"{"method":"a","id":1}"#;
    for end in 1..one.len() {
        assert_eq!(whole(&one[..end]), ["error -32700"], "ends at {end}");
    }
    assert!(whole("").is_empty() && whole(" \n").is_empty());
}

#[test]
fn params_may_be_missing_null_or_empty() {
    for params in ["", r#","params":null"#, r#","params":{}"#, r#","params":[]"#, ",\"params\":[ \t]"] {
        assert_eq!(whole(&format!(r#"{{"method":"m","id":1{params}}}"#)), ["m#1(-)"], "{params}");
    }
    assert_eq!(whole(r#"{"method":"m","id":1,"params":[1]}"#), ["-32602#1"]);
    assert_eq!(whole(r#"{"method":"m","id":1,"params":"x"}"#), ["-32600#1"]);
}

#[test]
fn json_that_is_no_request() {
    let rejected = [
        (r#"{"id":7}"#, "-32600#7"),
        (r#"{"id":7,"method":3}"#, "-32600#7"),
        (r#"{"id":7,"method":"m","jsonrpc":"1.0"}"#, "-32600#7"),
        (r#"{"id":7,"method":"m","jsonrpc":2.0}"#, "-32600#7"),
        (r#"{"id":[7],"method":"m"}"#, "-32600#-"),
        (r#"{"id":true,"method":"m"}"#, "-32600#-"),
        (r#"{"id":1e999,"method":"m"}"#, "-32600#-"),
        (r#"{"id":"\ud800","method":"m"}"#, "-32600#-"),
        (r#"{"id":1,"id":2,"method":"m"}"#, "-32600#-"),
        ("[]", "-32600#-"),
        ("[1]", "[-32600#-]"),
    ];
    for (text, seen) in rejected {
        assert_eq!(whole(text), [seen], "{text}");
        let goes_on = format!(r#"{text}{{"method":"next"}}"#);
        assert_eq!(whole(&goes_on), [seen, "next#-(-)"], "{text}");
    }
}

#[test]
fn bytes_that_are_no_json_end_the_stream() {
    for text in ["nonsense", "1", "\"a\"", "}", "{]", "{,}", "[1,]", "{\"a\":tru}", "{\"a\" 1}", "\u{feff}{}"]
    {
        assert_eq!(
            whole(&format!("{{\"method\":\"m\"}}{text}{{\"method\":\"n\"}}")),
            ["m#-(-)", "error -32700"]
        );
    }
    assert_eq!(decode([&b"{\"method\":\"\xff\"}"[..]]), ["error -32700"]);
}

#[test]
fn an_error_is_reported_before_the_end_arrives() {
    assert_eq!(whole("{nonsense"), ["error -32700"]);
    let mut decoder = Decoder::default();
    decoder.push(b"{\"method\":\"m\", nonsense");
    assert!(matches!(decoder.next_message(), Err(Error::Parse(_))));
}

#[test]
fn depth_is_limited() {
    let nested = |depth: u32| {
        let (open, close) = ("[".repeat(depth as usize - 1), "]".repeat(depth as usize - 1));
        format!(r#"{{"method":"m","params":{{"p":{open}{close}}}}}"#)
    };
    assert_eq!(whole(&nested(DEPTH_MAX - 1)).len(), 1);
    assert!(whole(&nested(DEPTH_MAX - 1))[0].starts_with("m#"));
    assert_eq!(whole(&nested(DEPTH_MAX)), ["error -32700"]);
    assert_eq!(decode(vec![&b"["[..]; 1 << 20]), ["error -32700"]);
}

#[test]
fn length_is_limited() {
    let of_len = |len: usize| {
        let (head, tail) = (r#"{"method":"m","params":{"p":""#, r#""}}"#);
        format!("{head}{}{tail}", "x".repeat(len - head.len() - tail.len()))
    };
    let largest = of_len(REQUEST_LEN_MAX);
    assert!(whole(&largest)[0].starts_with("m#"));
    assert!(decode(largest.as_bytes().chunks(4096))[0].starts_with("m#"));
    assert_eq!(whole(&of_len(REQUEST_LEN_MAX + 1)), ["error -32700"]);
    let endless = vec![b'x'; 4096];
    let pieces = std::iter::once(&b"{\""[..]).chain(std::iter::repeat_n(&endless[..], REQUEST_LEN_MAX));
    assert_eq!(decode(pieces), ["error -32700"]);
}

#[test]
fn a_batch_is_limited() {
    let batch = |len: usize| format!("[{}]", vec!["1"; len].join(","));
    assert!(whole(&batch(BATCH_LEN_MAX))[0].starts_with("[-32600"));
    assert_eq!(whole(&batch(BATCH_LEN_MAX + 1)), ["-32600#-"]);
}

#[test]
fn responses() {
    let Ok(Message::One(Ok(call))) = Message::parse(br#"{"method":"m","id":"\u0041"}"#) else { panic!() };
    let yes = serde_json::value::to_raw_value(&true).unwrap();
    let text = response(call.id.as_ref(), &Ok(yes));
    assert_eq!(text, br#"{"jsonrpc":"2.0","id":"\u0041","result":true}"#);
    let text = response(None, &Err(Error::MethodNotFound));
    assert_eq!(text, br#"{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"Method not found"}}"#);
    assert_eq!(to_batch(&[]), None);
    assert_eq!(to_batch(&[b"1".into(), b"2".into()]).unwrap(), b"[1,2]");
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::vec((any::<String>(), inner), 0..4)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// A request's text, and its meaning.
fn request() -> impl Strategy<Value = (String, (String, Value))> {
    (any::<String>(), any_json(), any::<u32>(), any::<bool>()).prop_map(|(method, p, id, is_pretty)| {
        let params = json!({"p": p});
        let value = json!({"jsonrpc": "2.0", "method": method, "id": id, "params": params});
        let print = if is_pretty { serde_json::to_string_pretty } else { serde_json::to_string };
        (print(&value).unwrap(), (method, params))
    })
}

proptest! {
    #[test]
    fn requests_in_any_pieces(
        requests in prop::collection::vec(request(), 1..5),
        cuts in prop::collection::vec(1_usize..40, 1..8),
    ) {
        let stream: String = requests.iter().map(|(text, _)| text.as_str()).collect();
        let mut rest = stream.as_bytes();
        let mut decoder = Decoder::default();
        let mut seen = Vec::new();
        for cut in cuts.into_iter().cycle() {
            let (piece, more) = rest.split_at(cut.min(rest.len()));
            decoder.push(piece);
            while let Some(message) = decoder.next_message().unwrap() {
                let Message::One(Ok(call)) = message else { panic!("{message:?}") };
                seen.push((call.method, serde_json::from_str(call.params.unwrap().get()).unwrap()));
            }
            rest = more;
            if rest.is_empty() {
                break;
            }
        }
        let expected: Vec<_> = requests.into_iter().map(|(_, expected)| expected).collect();
        prop_assert_eq!(seen, expected);
        prop_assert!(decoder.finish().is_ok());
    }

    #[test]
    fn any_bytes_in_any_pieces_mean_the_same(bytes in prop::collection::vec(prop_oneof![
        prop::sample::select(&b"{}[]\",:\\ 1tn"[..]), any::<u8>()
    ], 0..64), cut in 0_usize..64) {
        let (a, b) = bytes.split_at(cut.min(bytes.len()));
        prop_assert_eq!(decode([a, b]), decode([&bytes[..]]));
    }
}
