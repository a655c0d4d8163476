//! `log_*`: what the daemon's log tells. Control context.

use super::{Control, Error, NoParams, Phase, Table};
use crate::config::Subsystem;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// SPDK's levels. `NOTICE` is what a daemon tells by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the names say it all")]
pub enum PrintLevel {
    Error,
    Warning,
    Notice,
    Info,
    Debug,
}

impl From<PrintLevel> for tracing::Level {
    fn from(level: PrintLevel) -> Self {
        match level {
            PrintLevel::Error => Self::ERROR,
            PrintLevel::Warning => Self::WARN,
            PrintLevel::Notice => Self::INFO,
            PrintLevel::Info => Self::DEBUG,
            PrintLevel::Debug => Self::TRACE,
        }
    }
}

pub(super) fn register(table: &mut Table<Control>) {
    table.add("log_get_print_level", Phase::Any, "What the log tells.", get_print_level);
    table.add("log_set_print_level", Phase::Any, "Changes what the log tells.", set_print_level);
    // SPDK has a level for what is printed and one for what goes to syslog; we have one log, and so one level.
    table.add(
        "log_get_level",
        Phase::Any,
        "The same as `log_get_print_level`: there is one log.",
        get_print_level,
    );
    table.add(
        "log_set_level",
        Phase::Any,
        "The same as `log_set_print_level`: there is one log.",
        set_print_level,
    );
}

async fn get_print_level(control: &Control, _: NoParams) -> Result<PrintLevel, Error> {
    Ok(control.print_level())
}

/// Parameters of `log_set_print_level`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetPrintLevel {
    /// From now on; what is more detailed is not told.
    level: PrintLevel,
}

async fn set_print_level(control: &Control, p: SetPrintLevel) -> Result<bool, Error> {
    control.set_print_level(p.level);
    control.config.made(Subsystem::Daemon, "log_level", "log_set_print_level", &p);
    Ok(true)
}
