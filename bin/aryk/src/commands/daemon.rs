//! `aryk status`, `reactor …` and `rpc`

use super::service::uptime;
use super::{elements, number, text};
use crate::absent::{self, duration};
use crate::client::Client;
use crate::error::{BAD_PARAMS, Error, NO_DEVICE, NO_METHOD};
use crate::output::Output;
use crate::reference;
use serde_json::{Value, json};
use std::io;

pub fn status(client: &mut Client, out: &Output) -> Result<(), Error> {
    let version = client.call("spdk_get_version", json!({}))?;
    let reactors = client.call("framework_get_reactors", json!({}))?;
    let disks = client.call("bdev_get_bdevs", json!({}))?;
    let controllers = client.call("vhost_get_controllers", json!({}))?;
    let absent = absent::read(client)?;
    let connected = elements(&controllers).iter().filter(|c| !elements(&c["sessions"]).is_empty()).count();
    let cores: Vec<_> = elements(&reactors["reactors"]).iter().map(|r| r["lcore"].to_string()).collect();
    let uptime = uptime(number(&reactors, "pid"));
    let status = json!({
        "version": version["version"],
        "pid": reactors["pid"],
        "uptime_seconds": uptime.map(|time| time.as_secs()),
        "cores": elements(&reactors["reactors"]).iter().map(|r| r["lcore"].clone()).collect::<Vec<_>>(),
        "disks": elements(&disks).len(),
        "controllers": elements(&controllers).len(),
        "connected": connected,
        "absent": absent,
    });
    out.print(&status, || {
        let lines = [
            ("daemon", format!("{}, process {}", text(&version, "version"), reactors["pid"])),
            (
                "up",
                uptime.map_or_else(|| "unknown: the daemon is not a process of this host".into(), duration),
            ),
            ("cores", cores.join(" ")),
            ("disks", elements(&disks).len().to_string()),
            ("controllers", format!("{}, {connected} connected", elements(&controllers).len())),
        ];
        out.list(lines.into_iter().chain(absent.iter().map(|a| ("absent", absent::why(a)))))
    })
}

pub fn reactors(client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut reactors = client.call("framework_get_reactors", json!({}))?;
    let counts = client.call("aryk_stats_get", json!({}))?;
    for reactor in reactors["reactors"].as_array_mut().into_iter().flatten() {
        let own = elements(&counts["reactors"]).iter().find(|own| own["core"] == reactor["lcore"]);
        times_of(reactor, own);
    }
    out.print(&reactors, || {
        let row = |r: &Value| {
            let (busy, idle, sleeping) = (number(r, "busy"), number(r, "idle"), number(r, "sleeping"));
            let all = u128::from(busy) + u128::from(idle);
            let percent = |part: u64| format!("{}%", u128::from(part) * 100 / all.max(1));
            vec![
                r["lcore"].to_string(),
                r["tid"].to_string(),
                percent(busy),
                percent(idle.saturating_sub(sleeping)),
                percent(sleeping),
                elements(&r["lw_threads"]).iter().filter(|t| t["name"] != "app_thread").count().to_string(),
            ]
        };
        let columns = [
            ("CORE", true),
            ("TID", true),
            ("BUSY", true),
            ("POLLING", true),
            ("ASLEEP", true),
            ("THREADS", true),
        ];
        out.table(&columns, elements(&reactors["reactors"]).iter().map(row))
    })
}

/// Sets a reactor's times from one snapshot, so that they add up: the times of a young reactor differ much between two reads. A
/// reactor that started after that snapshot has no sleep.
fn times_of(reactor: &mut Value, counts: Option<&Value>) {
    let Some(counts) = counts else {
        reactor["sleeping"] = json!(0);
        return;
    };
    let (awake, sleeping) = (number(counts, "idle_ticks"), number(counts, "sleeping_ticks"));
    reactor["busy"] = counts["busy_ticks"].clone();
    reactor["idle"] = json!(awake.saturating_add(sleeping));
    reactor["sleeping"] = json!(sleeping);
}

/// Adds or removes a reactor, and lists the reactors afterwards.
pub fn change_cores(method: &str, core: u16, client: &mut Client, out: &Output) -> Result<(), Error> {
    let hints = [(NO_DEVICE, "'aryk reactor list' shows the reactors and their cores.")];
    client.call(method, json!({"core": core})).map_err(|error| error.hinted(&hints))?;
    reactors(client, out)
}

pub fn rpc(method: &str, params: Option<&str>, client: &mut Client, out: &Output) -> Result<(), Error> {
    let params = match params {
        None => json!({}),
        Some("-") => parse(&io::read_to_string(io::stdin())?)?,
        Some(text) => parse(text)?,
    };
    let hints = [
        (NO_METHOD, "'aryk rpc rpc_get_methods' lists the methods."),
        (BAD_PARAMS, "'aryk rpc METHOD --help' shows its parameters."),
    ];
    let result = client.call(method, params).map_err(|error| error.hinted(&hints))?;
    if let Some(note) = reference::without_effect(method) {
        eprintln!("aryk: {method}: {note}");
    }
    out.print(&result, || match &result {
        Value::String(text) => text.clone(),
        other => format!("{other:#}"),
    })
}

fn parse(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|e| Error::Usage(format!("the parameters are not JSON: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reactors_times_add_up_to_its_age() {
        let mut young = json!({"lcore": 1, "busy": 100, "idle": 900});
        times_of(&mut young, Some(&json!({"busy_ticks": 150, "idle_ticks": 50, "sleeping_ticks": 1800})));
        assert_eq!(young, json!({"lcore": 1, "busy": 150, "idle": 1850, "sleeping": 1800}));
        let mut younger = json!({"lcore": 2, "busy": 1, "idle": 2});
        times_of(&mut younger, None);
        assert_eq!(younger["sleeping"], 0);
    }
}
