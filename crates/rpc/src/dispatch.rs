//! Dispatch of calls to their handlers, and of results back. Control context.
//!
//! A call finds its handler in a [`Table`]. A handler is never cancelled: once started, it runs to its end, whether or not its
//! client is still connected.

use crate::Error;
use crate::journal::{self, Caller, Done};
use crate::rights::Rights;
use crate::wire::{self, Call, Message, Rejected};
use crate::{Phase, Table};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::pin::Pin;
use std::rc::Rc;

/// Size of a batch's reply, in bytes, from which on further calls are refused: a small request must not use an unlimited amount
/// of memory.
const BATCH_REPLY_MAX: usize = 8 << 20;

/// A handler's result, as JSON.
pub type Outcome = Result<Box<RawValue>, Error>;

pub(crate) type Running = Pin<Box<dyn Future<Output = Outcome>>>;
/// Handles the changes of a call: waits until they are stored, or undoes them.
type Settle<C> = Box<dyn Fn(Rc<C>, Outcome, Done) -> Running>;
/// The future for which a client's call waits before it runs, given whether the call may change something, and its parameters.
type Hold<C> = Box<dyn Fn(&C, bool, Option<&RawValue>) -> Option<Pin<Box<dyn Future<Output = ()>>>>>;

/// The parameters of a method without parameters.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}

/// All methods, and the context on which they work.
pub struct Methods<C> {
    table: Table<C>,
    context: Rc<C>,
    has_started: Box<dyn Fn(&C) -> bool>,
    settle: Settle<C>,
    hold: Hold<C>,
}

impl<C> std::fmt::Debug for Methods<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Methods").field("table", &self.table).finish_non_exhaustive()
    }
}

impl<C: 'static> Methods<C> {
    /// The methods of `table` over `context`; `has_started` returns whether start-up is complete.
    pub fn new(context: Rc<C>, table: Table<C>, has_started: impl Fn(&C) -> bool + 'static) -> Self {
        Self {
            table,
            context,
            has_started: Box::new(has_started),
            settle: Box::new(|_, outcome, _| Box::pin(std::future::ready(outcome))),
            hold: Box::new(|_, _, _| None),
        }
    }

    /// Makes clients' calls at run time wait for the future that `hold` returns, given whether they may change something, and
    /// their parameters.
    #[must_use]
    pub fn hold_with<W>(mut self, hold: impl Fn(&C, bool, Option<&RawValue>) -> Option<W> + 'static) -> Self
    where
        W: Future<Output = ()> + 'static,
    {
        self.hold = Box::new(move |context, changes, params| {
            let wait: Pin<Box<dyn Future<Output = ()>>> = Box::pin(hold(context, changes, params)?);
            Some(wait)
        });
        self
    }

    /// Makes `settle` handle the changes of each call before the call is answered.
    #[must_use]
    pub fn settle_with<F>(mut self, settle: F) -> Self
    where
        F: AsyncFn(&C, Outcome, Done) -> Outcome + 'static,
    {
        let settle = Rc::new(settle);
        self.settle = Box::new(move |context, outcome, done| {
            let settle = Rc::clone(&settle);
            Box::pin(async move { settle(&context, outcome, done).await })
        });
        self
    }

    /// All of them.
    pub(crate) const fn table(&self) -> &Table<C> {
        &self.table
    }

    /// Whether a method may change anything.
    ///
    /// # Errors
    /// [`Error::MethodNotFound`].
    pub fn changes(&self, name: &str) -> Result<bool, Error> {
        self.table.find(name).map(|entry| entry.changes)
    }

    /// The methods' names and the phases in which each may be called, sorted by name.
    pub fn names(&self) -> Vec<(&'static str, Phase)> {
        self.table.entries().map(|(name, entry)| (name, entry.phase)).collect()
    }

    /// Answers a message of a client with full rights: returns the bytes to send, if any. Needs a tokio `LocalSet`.
    pub async fn answer(&self, message: Message) -> Option<Vec<u8>> {
        self.answer_reporting(message, Rights::Full, || {}).await
    }

    /// As [`Methods::answer`], with `rights`. `ran` is called when only the state store is waited for, except for a batch.
    pub(crate) async fn answer_reporting(
        &self,
        message: Message,
        rights: Rights,
        ran: impl FnOnce(),
    ) -> Option<Vec<u8>> {
        match message {
            Message::One(call) => self.respond(call, rights, ran).await,
            Message::Batch(calls) => {
                let (mut responses, mut len) = (Vec::new(), 0);
                for call in calls {
                    let response = match call {
                        Ok(Call { id: Some(id), .. }) if len > BATCH_REPLY_MAX => {
                            let full = format!("the replies before it exceed {BATCH_REPLY_MAX} bytes");
                            Some(wire::response(Some(&id), &Err(Error::errno(Errno::NOBUFS, full))))
                        }
                        call => self.respond(call, rights, || {}).await,
                    };
                    len += response.as_ref().map_or(0, Vec::len);
                    responses.extend(response);
                }
                wire::to_batch(&responses)
            }
        }
    }

    async fn respond(
        &self,
        call: Result<Call, Rejected>,
        rights: Rights,
        ran: impl FnOnce(),
    ) -> Option<Vec<u8>> {
        match call {
            Err(Rejected { id, error }) => Some(wire::response(id.as_ref(), &Err(error))),
            Ok(Call { id, method, params }) => {
                let outcome = self.call_reporting(&method, params, Caller::Client(rights), ran).await;
                if let Err(error) = &outcome {
                    tracing::debug!(method, %error, "request failed");
                }
                id.map(|id| wire::response(Some(&id), &outcome))
            }
        }
    }

    /// Calls one method, with full rights. Needs a tokio `LocalSet`.
    ///
    /// # Errors
    /// The handler's error; or the method does not exist, may not be called now, or does not accept its parameters.
    pub async fn call(&self, method: &str, params: Option<Box<RawValue>>) -> Outcome {
        self.call_reporting(method, params, Caller::Client(Rights::Full), || {}).await
    }

    /// As [`Methods::call`], for a call of the file with which the daemon starts.
    pub(crate) async fn call_of_file(&self, method: &str, params: Option<Box<RawValue>>) -> Outcome {
        self.call_reporting(method, params, Caller::File, || {}).await
    }

    async fn call_reporting(
        &self,
        method: &str,
        params: Option<Box<RawValue>>,
        caller: Caller,
        ran: impl FnOnce(),
    ) -> Outcome {
        let entry = self.table.find(method)?;
        if let Caller::Client(rights) = caller {
            if entry.changes {
                rights.may_change(method)?;
            }
            if entry.phase == Phase::RunTime
                && let Some(wait) = (self.hold)(&self.context, entry.changes, params.as_deref())
            {
                wait.await;
            }
        }
        match (entry.phase, (self.has_started)(&self.context)) {
            (Phase::StartUp, true) => {
                Err(Error::State("only before start-up: start the daemon with --wait-for-rpc".into()))
            }
            (Phase::RunTime, false) => Err(Error::State("call framework_start_init first".into())),
            (Phase::Any | Phase::RunTime, true) | (Phase::Any | Phase::StartUp, false) => {
                let (outcome, done) = self.run(method, params, caller).await?;
                ran();
                let outcome = (self.settle)(Rc::clone(&self.context), outcome, done).await;
                outcome.map_err(|error| entry.codes.apply(error))
            }
        }
    }

    /// Calls one method, in any phase, to create a stored object again. The method's changes are stored when this returns; mostly
    /// there are none, since the object is in the store already. Needs a tokio `LocalSet`.
    pub(crate) async fn restore(&self, method: &str, params: Box<RawValue>) -> Result<Done, Error> {
        let (outcome, mut done) = self.run(method, Some(params), Caller::Restore).await?;
        // The store reports a failed write itself, and repeats it with its next write.
        let _ = done.written().await;
        outcome.map(|_| done)
    }

    /// Runs a handler in a separate task: it goes on if the future is dropped, and a panic in it affects no other request.
    async fn run(
        &self,
        method: &str,
        params: Option<Box<RawValue>>,
        caller: Caller,
    ) -> Result<(Outcome, Done), Error> {
        let entry = self.table.find(method)?;
        let handler = entry.call(Rc::clone(&self.context), params);
        tokio::task::spawn_local(journal::watch(caller, handler)).await.map_err(|panic| {
            tracing::error!(method, %panic, "a request handler has panicked");
            Error::Internal("the request's handler has panicked; see the daemon's log".into())
        })
    }
}

#[cfg(test)]
mod tests;
