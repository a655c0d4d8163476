//! Finds where requests begin and end in a stream of bytes. Any context.

use super::{DEPTH_MAX, Message, REQUEST_LEN_MAX};
use crate::Error;
use serde::de::IgnoredAny;

/// Cuts a stream into [`Message`]s.
///
/// Every byte is looked at a bounded number of times, however the stream is cut.
#[derive(Debug)]
pub struct Decoder {
    buf: Vec<u8>,
    /// Where the request that is being scanned begins; all before it was given out.
    start: usize,
    /// The first byte that was not scanned.
    next: usize,
    /// Open arrays and objects at `next`.
    depth: u32,
    text: Text,
    /// An unfinished request is tried by the parser when it is this long, so that a mistake in it is told before
    /// its end, which may never come.
    probe_len: usize,
}

/// Where in a string the scanner is.
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
    /// Takes the stream's next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buf.drain(..self.start);
            self.next -= self.start;
            self.start = 0;
        }
        self.buf.extend_from_slice(bytes);
    }

    /// The next request, if all of it has come.
    ///
    /// # Errors
    /// [`Error::Parse`]: the stream is of no more use.
    pub fn next_message(&mut self) -> Result<Option<Message>, Error> {
        let end = self.scan()?;
        let request = &self.buf[self.start..end.unwrap_or(self.next)];
        if request.len() > REQUEST_LEN_MAX {
            return Err(Error::Parse(format!("a request has at most {REQUEST_LEN_MAX} bytes")));
        }
        if end.is_none() {
            return self.probe().map(|()| None);
        }
        let message = Message::parse(request)?;
        self.start = self.next;
        self.probe_len = 1;
        if self.start == self.buf.len() {
            // Whoever sent one huge request keeps no memory for it.
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

    /// Goes on until a request's last byte: returns the position after it, or `None` if it has not come.
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
                        return Err(Error::Parse(format!("a request nests at most {DEPTH_MAX} levels")));
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

    /// Goes to the next request's first byte.
    fn skip_white_space(&mut self) -> Result<(), Error> {
        let blank = |b: &&u8| matches!(b, b' ' | b'\t' | b'\r' | b'\n');
        self.next += self.buf[self.next..].iter().take_while(blank).count();
        self.start = self.next;
        match self.buf.get(self.next) {
            None | Some(b'{' | b'[') => Ok(()),
            Some(other) => Err(Error::Parse(format!(
                "a request starts with '{{' or '[', not '{}'",
                other.escape_ascii()
            ))),
        }
    }

    /// Asks the parser whether an unfinished request can still become one.
    fn probe(&mut self) -> Result<(), Error> {
        let so_far = &self.buf[self.start..self.next];
        if so_far.len() < self.probe_len {
            return Ok(());
        }
        self.probe_len = 2 * so_far.len();
        // To the parser a number that was cut is a wrong one: it is left for the next time.
        let is_number = |b: &u8| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let cut = so_far.iter().rev().take_while(|b| is_number(b)).count();
        match serde_json::from_slice::<IgnoredAny>(&so_far[..so_far.len() - cut]) {
            Err(e) if !e.is_eof() => Err(Error::Parse(e.to_string())),
            Ok(_) | Err(_) => Ok(()),
        }
    }
}
