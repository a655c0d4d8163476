//! The vhost-user codec: arbitrary bytes, in pieces of any size, give the same messages as in one piece, or the same
//! error; and no message allows more file descriptors than a message may carry.
//!
//! The first byte is the size of the pieces; the rest is the stream.
#![no_main]

use aryk_vhost_user::message::{Decoder, FDS_MAX, Message};
use libfuzzer_sys::fuzz_target;

/// The messages of a stream up to its first error, and that error.
fn decode(mut bytes: &[u8], piece: usize) -> (Vec<Message>, Option<String>) {
    let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
    while !bytes.is_empty() {
        let space = decoder.space();
        let n = space.len().min(bytes.len()).min(piece);
        assert!(n > 0, "there is always room for a byte");
        space[..n].copy_from_slice(&bytes[..n]);
        bytes = &bytes[n..];
        match decoder.filled(n) {
            Ok(message) => messages.extend(message),
            Err(error) => return (messages, Some(error.to_string())),
        }
    }
    (messages, None)
}

fuzz_target!(|data: &[u8]| {
    let Some((piece, stream)) = data.split_first() else { return };
    let whole = decode(stream, usize::MAX);
    for message in &whole.0 {
        let (count, _kind) = message.request.fds();
        assert!(*count.end() <= FDS_MAX);
    }
    assert_eq!(decode(stream, usize::from(*piece) + 1), whole);
});
