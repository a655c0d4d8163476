//! `aryk trace`: the latest events of requests.

use super::{elements, number, text};
use crate::client::Client;
use crate::error::{Error, NO_DEVICE};
use crate::output::{Column, Output};
use crate::users::Users;
use serde_json::{Value, json};

/// More events than the reactors of any host keep.
const ALL: u32 = u32::MAX;

/// Prints the last `count` events: all, or those of objects with `of` in their names.
pub fn trace(count: u32, of: Option<&str>, client: &mut Client, out: &Output) -> Result<(), Error> {
    // The filter runs here, after the reply: events that it drops must not count.
    let asked = if of.is_some() { ALL } else { count };
    let mut trace = client.call("aryk_trace_get", json!({"count": asked}))?;
    if let Some(Value::Array(records)) = trace.get_mut("records") {
        records.retain(|record| of.is_none_or(|part| text(record, "object").contains(part)));
        let surplus = records.len().saturating_sub(count as usize);
        records.drain(..surplus);
        if let (Some(part), true) = (of, records.is_empty()) {
            known(part, client)?;
        }
    }
    out.print(&trace, || table(&trace, out))
}

/// Returns an error if no disk and no controller has `part` in its name.
fn known(part: &str, client: &mut Client) -> Result<(), Error> {
    let Users { disks, controllers, .. } = Users::read(client)?;
    let has = |all: &Value, member: &str| elements(all).iter().any(|one| text(one, member).contains(part));
    if has(&disks, "name") || has(&controllers, "ctrlr") {
        return Ok(());
    }
    let hint = "'aryk disk list' and 'aryk controller list' show the names.";
    let none = Error::no_device(format!("no disk and no controller has '{part}' in its name"));
    Err(none.hinted(&[(NO_DEVICE, hint)]))
}

fn table(trace: &Value, out: &Output) -> String {
    let records = elements(&trace["records"]);
    let Some(first) = records.first() else { return "There are no events yet.".to_owned() };
    let (start, rate) = (number(first, "ticks"), number(trace, "tick_rate").max(1));
    let row = |record: &Value| {
        let ticks = u128::from(number(record, "ticks") - start);
        vec![
            format!("{:.3}", (ticks * 1_000_000_000 / u128::from(rate)) as f64 / 1e3),
            record["lcore"].to_string(),
            text(record, "layer").to_owned(),
            text(record, "point").to_owned(),
            text(record, "object").to_owned(),
            record["tag"].to_string(),
        ]
    };
    let columns: [Column; 6] =
        [("US", true), ("CORE", true), ("LAYER", false), ("POINT", false), ("OF", false), ("REQUEST", true)];
    out.table(&columns, records.iter().map(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_start_at_the_first_event() {
        let record = |ticks: u64| json!({"ticks": ticks, "lcore": 1, "layer": "bdev", "point": "submit", "object": "d", "tag": 7});
        let trace = json!({"tick_rate": 1_000_000_000, "records": [record(5_000), record(6_500)]});
        let text = table(&trace, &Output::plain());
        let lines: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["0.000", "1", "bdev", "submit", "d", "7"]);
        assert_eq!(lines[2][0], "1.500");
        assert_eq!(table(&json!({"records": []}), &Output::plain()), "There are no events yet.");
    }
}
