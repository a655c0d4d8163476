//! Arbitrary bytes of an RPC client, in pieces: to the decoder, and on to the dispatcher.
//!
//! The first byte decides how the rest is cut. For any input, the answer is JSON, and is the same for the pieces as for
//! the whole; after a parse error there is no further answer.
#![no_main]

use aryk_rpc::wire::Decoder;
use aryk_rpc::{Methods, NoParams, Phase, Table};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use std::rc::Rc;
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().build().expect("a runtime without I/O");
    static METHODS: Rc<Methods<()>> = Rc::new(methods());
}

fn methods() -> Methods<()> {
    let mut table = Table::default();
    table.add("e", Phase::Any, "", async |_: &(), params: Value| Ok(params));
    table.add("n", Phase::Any, "", async |_: &(), _: NoParams| Ok(true));
    table.add("s", Phase::StartUp, "", async |_: &(), _: NoParams| Ok(true));
    Methods::new(Rc::new(()), table, |()| true)
}

/// Everything that the server sends back.
fn answers(pieces: &mut dyn Iterator<Item = &[u8]>) -> Vec<u8> {
    let methods = METHODS.with(Rc::clone);
    let mut decoder = Decoder::default();
    let mut sent = Vec::new();
    for piece in pieces {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => {
                    let answer = RUNTIME.with(|r| LocalSet::new().block_on(r, methods.answer(message)));
                    sent.extend(answer.into_iter().flatten());
                }
                Ok(None) => break,
                Err(_) => return sent,
            }
        }
    }
    sent
}

fuzz_target!(|data: &[u8]| {
    let Some((&cut, stream)) = data.split_first() else { return };
    let whole = answers(&mut std::iter::once(stream));
    let in_pieces = answers(&mut stream.chunks(usize::from(cut).max(1)));
    assert_eq!(whole, in_pieces);
    for answer in serde_json::Deserializer::from_slice(&whole).into_iter::<Value>() {
        let answer = answer.expect("an answer is JSON");
        assert!(answer.is_object() || answer.is_array());
    }
});
