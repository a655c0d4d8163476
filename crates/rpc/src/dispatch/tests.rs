//! Calls against a small table.

use super::*;
use crate::wire::Decoder;
use std::cell::Cell;

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Add {
    a: u32,
    #[serde(default)]
    b: u32,
}

fn table(has_started: bool) -> Methods<Cell<u32>> {
    let mut table = Table::default();
    table.add("add", Phase::RunTime, "", async |sum: &Cell<u32>, p: Add| {
        sum.set(sum.get() + p.a + p.b);
        Ok(sum.get())
    });
    table.add("early", Phase::StartUp, "", async |_: &_, _: NoParams| Ok(true));
    table.add("big", Phase::Any, "", async |_: &_, _: NoParams| Ok("x".repeat(5 << 20)));
    table.add("always", Phase::Any, "", async |_: &_, _: NoParams| Ok(true));
    Methods::new(Rc::new(Cell::new(0)), table, move |_| has_started)
}

fn ask(methods: &Methods<Cell<u32>>, request: &str) -> Option<String> {
    let mut decoder = Decoder::default();
    decoder.push(request.as_bytes());
    let message = decoder.next_message().unwrap().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let reply = tokio::task::LocalSet::new().block_on(&runtime, methods.answer(message));
    reply.map(|text| String::from_utf8(text).unwrap())
}

fn error_code(reply: Option<String>) -> i64 {
    let reply: serde_json::Value = serde_json::from_str(&reply.unwrap()).unwrap();
    reply["error"]["code"].as_i64().unwrap()
}

#[test]
fn calls_and_notifications() {
    let methods = table(true);
    let reply = ask(&methods, r#"{"method":"add","params":{"a":1},"id":7}"#);
    assert_eq!(reply.unwrap(), r#"{"jsonrpc":"2.0","id":7,"result":1}"#);
    assert_eq!(ask(&methods, r#"{"method":"add","params":{"a":1,"b":2}}"#), None);
    assert_eq!(ask(&methods, r#"{"method":"unheard of"}"#), None);
    let reply = ask(&methods, r#"{"method":"add","params":{"a":0},"id":null}"#);
    assert_eq!(reply.unwrap(), r#"{"jsonrpc":"2.0","id":null,"result":4}"#);
}

#[test]
fn parameters_are_checked() {
    let methods = table(true);
    for params in [r#"{"a":1,"c":1}"#, r#"{"a":"1"}"#, r#"{"a":-1}"#, "{}", "[1]", r#"{"a":1,"a":1}"#] {
        let request = format!(r#"{{"method":"add","id":1,"params":{params}}}"#);
        assert_eq!(error_code(ask(&methods, &request)), -32602, "{params}");
    }
    assert_eq!(error_code(ask(&methods, r#"{"method":"always","id":1,"params":{"x":1}}"#)), -32602);
    assert_eq!(error_code(ask(&methods, r#"{"method":"Add","id":1}"#)), -32601);
    assert_eq!(ask(&methods, r#"{"method":"add","params":{"a":0},"id":1}"#).unwrap().pop(), Some('}'));
}

#[test]
fn a_batch_is_answered_by_an_array_in_order() {
    let methods = table(true);
    let reply = ask(
        &methods,
        r#"[{"method":"add","params":{"a":1},"id":1},{"method":"add","params":{"a":1}},2,{"method":"add","params":{"a":1},"id":"z"}]"#,
    );
    let reply: Vec<serde_json::Value> = serde_json::from_str(&reply.unwrap()).unwrap();
    assert_eq!(reply.len(), 3);
    assert_eq!((&reply[0]["result"], &reply[2]["result"]), (&1.into(), &3.into()));
    assert_eq!(reply[1]["error"]["code"], -32600);
    assert_eq!(ask(&methods, r#"[{"method":"always"}]"#), None);
}

#[test]
fn the_memory_of_a_batch_is_limited() {
    let batch = format!("[{}]", vec![r#"{"method":"big","id":1}"#; 100].join(","));
    let reply = ask(&table(true), &batch).unwrap();
    assert!(reply.len() < 12 << 20);
    let reply: Vec<serde_json::Value> = serde_json::from_str(&reply).unwrap();
    assert_eq!(reply.len(), 100);
    assert!(reply[..2].iter().all(|r| r["result"].is_string()));
    assert!(reply[2..].iter().all(|r| r["error"]["code"] == -105));
}

#[test]
fn phases() {
    let early = table(false);
    assert_eq!(error_code(ask(&early, r#"{"method":"add","params":{"a":1},"id":1}"#)), -1);
    assert!(ask(&early, r#"{"method":"early","id":1}"#).unwrap().contains("true"));
    assert!(ask(&early, r#"{"method":"always","id":1}"#).unwrap().contains("true"));
    let late = table(true);
    assert_eq!(error_code(ask(&late, r#"{"method":"early","id":1}"#)), -1);
    assert!(ask(&late, r#"{"method":"always","id":1}"#).unwrap().contains("true"));
}
