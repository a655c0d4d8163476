//! One client's connection. Control context, one task each.
//!
//! All of its resources are bounded: the requests in flight, the bytes that wait to be sent, the request that is being received.
//! If a client does not read its replies, the daemon stops reading its requests; other clients are not delayed.
//!
//! Requests start in the order of arrival, and each has a head start of [`HEAD_START`] before the next one: a client that
//! pipelines "create this", "attach that" gets the expected order, while a request that waits for a slow operation does not delay
//! the following ones.

use crate::rights::Rights;
use crate::wire::{self, Decoder, Message};
use crate::{Error, Methods};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use zeroize::Zeroize;

/// Requests of one connection that run at the same time, at most. A batch counts as one.
const IN_FLIGHT_MAX: usize = 32;
/// While more bytes than this wait to be sent, no request is started and nothing is read.
const UNSENT_MAX: usize = 1 << 20;
/// Bytes of one read, at most.
const READ_LEN: usize = 64 << 10;
/// How long a request may delay the next one of its connection.
const HEAD_START: Duration = Duration::from_millis(50);
/// Bytes that are read and discarded of an invalid stream, at most, so that its client sees an orderly end.
const DISCARD_MAX: usize = 1 << 20;

/// Progress of a request.
#[derive(Debug)]
enum Step {
    /// The handler has finished, and the request waits at most for the state store.
    Ran,
    /// The reply is ready.
    Answered(Option<Vec<u8>>),
}

/// A step, and the number of the request that it belongs to.
type Finished = (u64, Step);

/// Serves one client until it disconnects, or until `stop` turns true and all its requests are answered.
pub(crate) async fn serve<C: 'static>(
    stream: UnixStream,
    methods: Rc<Methods<C>>,
    rights: Rights,
    mut stop: watch::Receiver<bool>,
) {
    let (finished_tx, mut finished) = mpsc::unbounded_channel();
    let mut connection = Connection {
        stream,
        methods,
        rights,
        decoder: Decoder::default(),
        unsent: VecDeque::new(),
        in_flight: 0,
        started: 0,
        ahead: None,
        input: Input::Open,
        finished_tx,
    };
    let mut piece = vec![0; READ_LEN];
    loop {
        let is_starved = connection.start_requests();
        if connection.is_done() {
            break connection.discard(&mut piece);
        }
        let ahead = connection.ahead.map_or_else(Instant::now, |(_, until)| until);
        let step = tokio::select! {
            Some((number, step)) = finished.recv() => {
                connection.finish(number, step);
                // Ready replies are sent before further requests are started.
                while let Ok((number, step)) = finished.try_recv() {
                    connection.finish(number, step);
                }
                Ok(())
            }
            ready = connection.stream.writable(), if !connection.unsent.is_empty() => ready.and_then(|()| connection.send()),
            ready = connection.stream.readable(), if is_starved => ready.and_then(|()| connection.receive(&mut piece)),
            () = sleep_until(ahead), if connection.ahead.is_some() => { connection.ahead = None; Ok(()) }
            _ = stop.wait_for(|stop| *stop), if connection.input == Input::Open => { connection.input = Input::Ended; Ok(()) }
        };
        if let Err(error) = step {
            tracing::debug!(%error, "the RPC client has disconnected");
            break;
        }
    }
}

/// Sends an error to a client without any rights, and closes the connection.
pub(crate) fn refuse(stream: &UnixStream, error: &Error) {
    let mut reply = wire::response(None, &Err(error.clone()));
    reply.push(b'\n');
    // This is the first reply on the stream, so it fits; a disconnected client needs none.
    let _ = stream.try_write(&reply);
}

/// State of the incoming stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    Open,
    /// The client has closed its side, or the daemon has stopped reading.
    Ended,
}

struct Connection<C> {
    stream: UnixStream,
    methods: Rc<Methods<C>>,
    rights: Rights,
    decoder: Decoder,
    unsent: VecDeque<u8>,
    in_flight: usize,
    /// Requests started so far: the number of the last one.
    started: u64,
    /// The request that has a head start, and the end of the head start.
    ahead: Option<(u64, Instant)>,
    input: Input,
    /// Unbounded, but it never holds more than two steps of each request in flight.
    finished_tx: mpsc::UnboundedSender<Finished>,
}

impl<C: 'static> Connection<C> {
    /// Starts received requests as far as the bounds allow; returns whether more bytes can be read.
    fn start_requests(&mut self) -> bool {
        while self.may_start() {
            match self.decoder.next_message() {
                Ok(Some(message)) => self.start(message),
                Ok(None) if self.input == Input::Open => return true,
                Ok(None) => {
                    if let Err(error) = self.decoder.finish() {
                        self.reject(error);
                    }
                    return false;
                }
                Err(error) => self.reject(error),
            }
        }
        false
    }

    fn may_start(&self) -> bool {
        self.in_flight < IN_FLIGHT_MAX && self.unsent.len() <= UNSENT_MAX && self.ahead.is_none()
    }

    fn start(&mut self, message: Message) {
        self.in_flight += 1;
        self.started += 1;
        self.ahead = Some((self.started, Instant::now() + HEAD_START));
        let (number, finished) = (self.started, self.finished_tx.clone());
        let (methods, rights) = (Rc::clone(&self.methods), self.rights);
        tokio::task::spawn_local(async move {
            // If the receiver is closed, the client has disconnected.
            let report = |step| drop(finished.send((number, step)));
            let reply = methods.answer_reporting(message, rights, || report(Step::Ran)).await;
            report(Step::Answered(reply));
        });
    }

    fn finish(&mut self, number: u64, step: Step) {
        if self.ahead.is_some_and(|(ahead, _)| ahead == number) {
            self.ahead = None;
        }
        if let Step::Answered(reply) = step {
            self.in_flight -= 1;
            if let Some(reply) = reply {
                self.queue(reply);
            }
        }
    }

    fn queue(&mut self, reply: Vec<u8>) {
        self.unsent.extend(reply);
        self.unsent.push_back(b'\n');
    }

    /// Answers bytes that are not a request, and stops reading.
    fn reject(&mut self, error: Error) {
        tracing::info!(%error, "the RPC client has sent an invalid request");
        self.queue(wire::response(None, &Err(error)));
        self.decoder = Decoder::default();
        self.input = Input::Ended;
    }

    fn is_done(&self) -> bool {
        self.input == Input::Ended && self.in_flight == 0 && self.unsent.is_empty()
    }

    fn send(&mut self) -> io::Result<()> {
        match self.stream.try_write(self.unsent.as_slices().0) {
            Ok(sent) => {
                self.unsent.drain(..sent);
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn receive(&mut self, piece: &mut [u8]) -> io::Result<()> {
        match self.stream.try_read(piece) {
            Ok(0) => self.input = Input::Ended,
            Ok(len) => {
                self.decoder.push(&piece[..len]);
                // They may be a secret, and the connection may last.
                piece[..len].zeroize();
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// A close of a socket with unread bytes would reset the connection, and the client might lose its last reply.
    fn discard(&self, piece: &mut [u8]) {
        let mut left = DISCARD_MAX;
        while let Ok(len @ 1..) = self.stream.try_read(piece)
            && len < left
        {
            left -= len;
        }
    }
}
