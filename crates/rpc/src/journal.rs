//! The changes of one call, until they are in the state store. Control context.
//!
//! A call's handler runs within [`watch`], which records the objects that it creates and its writes to the store: the reply waits
//! for these writes and nothing else.

use crate::Error;
use crate::config::Subsystem;
use crate::rights::Rights;
use aryk_state::{WriteError, Written};
use std::cell::RefCell;
use std::future::Future;

/// The origin of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// A client with these rights.
    Client(Rights),
    /// The file with which the daemon starts.
    File,
    /// The daemon itself, to create a stored object again.
    Restore,
}

/// The changes of a call so far.
#[derive(Debug)]
struct Call {
    caller: Caller,
    made: Vec<(Subsystem, String)>,
    revived: Vec<(Subsystem, String, u64)>,
    writes: Vec<Written>,
}

tokio::task_local!(static CALL: RefCell<Call>);

/// The changes of a finished call: the created objects, in order, and the pending writes.
#[derive(Debug)]
pub struct Done {
    /// The objects.
    pub made: Vec<(Subsystem, String)>,
    /// The objects, with the keys of their notes, that a restoring call has created although their notes were removed while the
    /// call ran.
    pub(crate) revived: Vec<(Subsystem, String, u64)>,
    writes: Vec<Written>,
}

impl Done {
    /// Waits until all changes are written.
    ///
    /// # Errors
    /// The first failure; `None` stands for a writer that has ended.
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
    let call = RefCell::new(Call { caller, made: Vec::new(), revived: Vec::new(), writes: Vec::new() });
    CALL.scope(call, async {
        let result = handler.await;
        let done = CALL.with(|call| {
            let mut call = call.borrow_mut();
            Done {
                made: std::mem::take(&mut call.made),
                revived: std::mem::take(&mut call.revived),
                writes: std::mem::take(&mut call.writes),
            }
        });
        (result, done)
    })
    .await
}

/// Whether the current call is one of the daemon itself, to create a stored object again.
pub(crate) fn is_restore() -> bool {
    CALL.try_with(|call| call.borrow().caller == Caller::Restore).unwrap_or(false)
}

/// Checks that the current call may change something: for methods that change something only with some parameters, described by
/// `what`.
///
/// # Errors
/// `EACCES`.
pub(crate) fn may_change(what: &str) -> Result<(), Error> {
    match CALL.try_with(|call| call.borrow().caller) {
        Ok(Caller::Client(rights)) => rights.may_change(what),
        Ok(Caller::File | Caller::Restore) | Err(_) => Ok(()),
    }
}

/// Records that the current call has created an object.
pub(crate) fn made(subsystem: Subsystem, name: &str) {
    // Outside of calls there is no reply to delay, and nothing is undone.
    let _ = CALL.try_with(|call| call.borrow_mut().made.push((subsystem, name.to_owned())));
}

/// Records that the current call has created an object whose note, with the key `key`, was removed while the call ran.
pub(crate) fn revived(subsystem: Subsystem, name: &str, key: u64) {
    let _ = CALL.try_with(|call| call.borrow_mut().revived.push((subsystem, name.to_owned(), key)));
}

/// Records that the current call has sent a change to the store.
pub(crate) fn wrote(written: Written) {
    // Outside of calls nothing waits for the write: the store repeats a failed write with its next one.
    let _ = CALL.try_with(|call| call.borrow_mut().writes.push(written));
}
