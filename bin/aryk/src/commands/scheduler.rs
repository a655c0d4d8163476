//! `aryk scheduler …`

use super::{number, object, text};
use crate::cli::SchedulerCommand;
use crate::client::Client;
use crate::error::Error;
use crate::output::Output;
use serde_json::json;
use std::time::Duration;

pub fn run(command: &SchedulerCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    if let SchedulerCommand::Set { name, period, load_limit, core_limit, core_busy } = command {
        let micros = |period: Duration| json!(period.as_micros().try_into().unwrap_or(u64::MAX));
        let params = object([
            ("name", Some(json!(name))),
            ("period", period.map(micros)),
            ("load_limit", load_limit.map(|percent| json!(percent))),
            ("core_limit", core_limit.map(|percent| json!(percent))),
            ("core_busy", core_busy.map(|percent| json!(percent))),
        ]);
        client.call("framework_set_scheduler", params)?;
    }
    show(client, out)
}

fn show(client: &mut Client, out: &Output) -> Result<(), Error> {
    let scheduler = client.call("framework_get_scheduler", json!({}))?;
    out.print(&scheduler, || {
        let name = text(&scheduler, "scheduler_name");
        let moves = format!("{}, {} failed", number(&scheduler, "moves"), number(&scheduler, "failed_moves"));
        if name != "dynamic" {
            return out
                .list([("scheduler", format!("{name}: queues stay where they are")), ("moves", moves)]);
        }
        let percent = |member| format!("{}%", number(&scheduler, member));
        out.list([
            (
                "scheduler",
                format!("{name}: queues leave busy reactors, and gather on few reactors when idle"),
            ),
            ("period", format!("{:?}", Duration::from_micros(number(&scheduler, "scheduler_period")))),
            ("load limit", format!("{}: a queue below it counts as nearly idle", percent("load_limit"))),
            ("core limit", format!("{}: no reactor is filled above it", percent("core_limit"))),
            ("core busy", format!("{}: queues leave a reactor at or above it", percent("core_busy"))),
            ("moves", moves),
        ])
    })
}
