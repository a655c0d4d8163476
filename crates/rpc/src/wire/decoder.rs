//! Finds the boundaries of requests in a stream of bytes. Any context.

use super::{DEPTH_MAX, Message, REQUEST_LEN_MAX};
use crate::Error;
use serde::de::IgnoredAny;
use zeroize::Zeroize;

/// Splits a stream into [`Message`]s.
///
/// Every byte is examined a bounded number of times, however the stream is split. A request may have secrets, so the decoder
/// zeroes the bytes of requests that it has returned.
#[derive(Debug)]
pub struct Decoder {
    buf: Vec<u8>,
    /// Start of the request that is being scanned; all bytes before it were returned.
    start: usize,
    /// The first byte that was not scanned.
    next: usize,
    /// Open arrays and objects at `next`.
    depth: u32,
    text: Text,
    /// Length at which the parser checks an unfinished request, so that an error in it is reported before its end, which may
    /// never arrive.
    probe_len: usize,
}

/// The scanner's state within a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Text {
    Outside,
    Inside,
    Escaped,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { buf: Vec::new(), start: 0, next: 0, depth: 0, text: Text::Outside, probe_len: 1 }
    }
}

impl Decoder {
    /// Appends the stream's next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buf.copy_within(self.start.., 0);
            let len = self.buf.len() - self.start;
            self.buf[len..].zeroize();
            self.buf.truncate(len);
            self.next -= self.start;
            self.start = 0;
        }
        self.buf.extend_from_slice(bytes);
    }

    /// The next request, if it is complete.
    ///
    /// # Errors
    /// [`Error::Parse`]: the rest of the stream is unusable.
    pub fn next_message(&mut self) -> Result<Option<Message>, Error> {
        let end = self.scan()?;
        let request = &self.buf[self.start..end.unwrap_or(self.next)];
        if request.len() > REQUEST_LEN_MAX {
            return Err(Error::Parse(format!("a request may have at most {REQUEST_LEN_MAX} bytes")));
        }
        if end.is_none() {
            return self.probe().map(|()| None);
        }
        let message = Message::parse(request)?;
        self.buf[self.start..self.next].zeroize();
        self.start = self.next;
        self.probe_len = 1;
        if self.start == self.buf.len() {
            // The memory of one huge request is freed after it.
            *self = Self::default();
        }
        Ok(Some(message))
    }

    /// Checks that the stream may end here.
    ///
    /// # Errors
    /// [`Error::Parse`] in the middle of a request.
    pub fn finish(&self) -> Result<(), Error> {
        if self.start == self.next {
            return Ok(());
        }
        Err(Error::Parse("the stream ended in the middle of a request".into()))
    }

    /// Scans up to a request's last byte: returns the position after it, or `None` if it has not arrived.
    fn scan(&mut self) -> Result<Option<usize>, Error> {
        if self.depth == 0 {
            self.skip_white_space()?;
        }
        while let Some(&byte) = self.buf.get(self.next) {
            self.next += 1;
            match (self.text, byte) {
                (Text::Escaped, _) | (Text::Outside | Text::Inside, b'"') => self.text = self.quoted(),
                (Text::Inside, b'\\') => self.text = Text::Escaped,
                (Text::Outside, b'{' | b'[') => {
                    self.depth += 1;
                    if self.depth > DEPTH_MAX {
                        return Err(Error::Parse(format!("a request may nest at most {DEPTH_MAX} levels")));
                    }
                }
                (Text::Outside, b'}' | b']') => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Ok(Some(self.next));
                    }
                }
                (Text::Outside | Text::Inside, _) => {}
            }
        }
        Ok(None)
    }

    /// The state after a quote, or after the byte that follows a backslash.
    const fn quoted(&self) -> Text {
        match self.text {
            Text::Outside | Text::Escaped => Text::Inside,
            Text::Inside => Text::Outside,
        }
    }

    /// Skips to the next request's first byte.
    fn skip_white_space(&mut self) -> Result<(), Error> {
        let blank = |b: &&u8| matches!(b, b' ' | b'\t' | b'\r' | b'\n');
        self.next += self.buf[self.next..].iter().take_while(blank).count();
        self.start = self.next;
        match self.buf.get(self.next) {
            None | Some(b'{' | b'[') => Ok(()),
            Some(other) => Err(Error::Parse(format!(
                "a request must start with '{{' or '[', not '{}'",
                other.escape_ascii()
            ))),
        }
    }

    /// Lets the parser check whether an unfinished request can still become valid.
    fn probe(&mut self) -> Result<(), Error> {
        let so_far = &self.buf[self.start..self.next];
        if so_far.len() < self.probe_len {
            return Ok(());
        }
        self.probe_len = 2 * so_far.len();
        // The parser may reject a number that is cut off: the end is checked the next time.
        let is_number = |b: &u8| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let cut = so_far.iter().rev().take_while(|b| is_number(b)).count();
        match serde_json::from_slice::<IgnoredAny>(&so_far[..so_far.len() - cut]) {
            Err(e) if !e.is_eof() => Err(Error::Parse(e.to_string())),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}
