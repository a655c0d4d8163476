//! `aryk_core_*`: adds and removes reactors ([`crate::cores`]); added ones exist again after a restart. Control context.
//!
//! The notes hold the difference to the cores of `-m`, so that a changed `-m` takes effect as far as the notes do not contradict
//! it.

use super::{Control, Error, Phase, Table};
use crate::config::Subsystem;
use crate::cores;
use aryk_reactor::{ChangeError, CoreSet};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const ADD: &str = "aryk_core_add";
const REMOVE: &str = "aryk_core_remove";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        ADD,
        Phase::RunTime,
        "Starts a reactor on another core, for new queues and for queues that are moved there.",
        add,
    );
    table.add(
        REMOVE,
        Phase::RunTime,
        "Moves all work of a core's reactor to the other reactors, without interrupting I/O, and ends the reactor.",
        remove,
    );
}

/// Parameters of `aryk_core_add` and `aryk_core_remove`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Core {
    /// Number of the core.
    core: u16,
}

impl Core {
    /// The note's object for an added core.
    fn added(&self) -> String {
        format!("core {} added", self.core)
    }

    /// The note's object for a removed core.
    fn removed(&self) -> String {
        format!("core {} removed", self.core)
    }

    fn has_reactor(&self, control: &Control) -> bool {
        control.reactors.is_any_on(&CoreSet::from_iter([self.core]))
    }
}

async fn add(control: &Control, p: Core) -> Result<bool, Error> {
    // After a restart, `-m` may include the core already.
    if p.has_reactor(control) && control.config.forget_absent(Subsystem::Daemon, &p.added()) {
        return Ok(true);
    }
    cores::add(control, p.core)?;
    note(control, &p.removed(), &p.added(), ADD, &p);
    Ok(true)
}

async fn remove(control: &Control, p: Core) -> Result<bool, Error> {
    if !p.has_reactor(control) && control.config.forget_absent(Subsystem::Daemon, &p.removed()) {
        return Ok(true);
    }
    cores::remove(control, p.core).await?;
    note(control, &p.added(), &p.removed(), REMOVE, &p);
    Ok(true)
}

/// Stores a note of the change, unless the change undoes an earlier one.
fn note(control: &Control, undone: &str, done: &str, method: &'static str, core: &Core) {
    if !control.config.forget(Subsystem::Daemon, undone) {
        control.config.made(Subsystem::Daemon, done, method, core);
    }
}

impl From<ChangeError> for Error {
    fn from(error: ChangeError) -> Self {
        let errno = match &error {
            ChangeError::Forbidden { .. } => Errno::INVAL,
            ChangeError::Exists(_) => Errno::EXIST,
            ChangeError::NotFound(_) => Errno::NODEV,
            ChangeError::Leaving(_) | ChangeError::Last(_) => Errno::BUSY,
            ChangeError::Os { .. } => Errno::IO,
        };
        Self::errno(errno, error.to_string())
    }
}
