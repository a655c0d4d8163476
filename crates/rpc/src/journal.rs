//! What one call has changed, until it is in the state store. Control context.
//!
//! A call's handler runs within [`watch`], and whatever it makes, and whatever is sent to the store meanwhile, is noted with it: the reply waits for
//! that and nothing else.

use crate::Error;
use crate::config::Subsystem;
use crate::rights::Rights;
use aryk_state::{WriteError, Written};
use std::cell::RefCell;
use std::future::Future;

/// Who makes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A client, who may do so much.
    Client(Rights),
    /// The file that the daemon starts with.
    File,
    /// We, to have again what was configured before.
    Restore,
}

/// What a call has done so far.
#[derive(Debug)]
struct Call {
    caller: Caller,
    made: Vec<(Subsystem, String)>,
    writes: Vec<Written>,
}

tokio::task_local!(static CALL: RefCell<Call>);

/// What a call has done: what it made, in order, and what of it must still be written.
#[derive(Debug)]
pub struct Done {
    /// The objects.
    pub made: Vec<(Subsystem, String)>,
    writes: Vec<Written>,
}

impl Done {
    /// Waits until all is written.
    ///
    /// # Errors
    /// The first failure; what is `None` is a writer that is gone.
    pub async fn written(&mut self) -> Result<(), Option<WriteError>> {
        let mut result = Ok(());
        for written in self.writes.drain(..) {
            let written = written.await.map_err(|_| None).and_then(|written| written.map_err(Some));
            result = result.and(written);
        }
        result
    }
}

/// Runs the handler of a call.
pub(crate) async fn watch<R>(caller: Caller, handler: impl Future<Output = R>) -> (R, Done) {
    let call = RefCell::new(Call { caller, made: Vec::new(), writes: Vec::new() });
    CALL.scope(call, async {
        let result = handler.await;
        let done = CALL.with(|call| {
            let mut call = call.borrow_mut();
            Done { made: std::mem::take(&mut call.made), writes: std::mem::take(&mut call.writes) }
        });
        (result, done)
    })
    .await
}

/// Whether the call that runs is one of ours, to have again what was configured.
pub(crate) fn is_restore() -> bool {
    CALL.try_with(|call| call.borrow().caller == Caller::Restore).unwrap_or(false)
}

/// Whether the call that runs may change something: for methods that mostly do not, and sometimes do, `what`.
///
/// # Errors
/// `EACCES`.
pub(crate) fn may_change(what: &str) -> Result<(), Error> {
    match CALL.try_with(|call| call.borrow().caller) {
        Ok(Caller::Client(rights)) => rights.may_change(what),
        Ok(Caller::File | Caller::Restore) | Err(_) => Ok(()),
    }
}

/// The call that runs has made an object.
pub(crate) fn made(subsystem: Subsystem, name: &str) {
    // Outside of calls nobody could be told, and nothing is undone.
    let _ = CALL.try_with(|call| call.borrow_mut().made.push((subsystem, name.to_owned())));
}

/// The call that runs has sent something to the store.
pub(crate) fn wrote(written: Written) {
    // Outside of calls nobody waits: the store makes up for a failure with its next write.
    let _ = CALL.try_with(|call| call.borrow_mut().writes.push(written));
}
