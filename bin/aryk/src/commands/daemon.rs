//! `aryk status`, `reactor …` and `rpc`

use super::{elements, number, text};
use crate::client::Client;
use crate::error::Error;
use crate::output::Output;
use serde_json::{Value, json};
use std::io;

pub fn status(client: &mut Client, out: &Output) -> Result<(), Error> {
    let version = client.call("spdk_get_version", json!({}))?;
    let reactors = client.call("framework_get_reactors", json!({}))?;
    let disks = client.call("bdev_get_bdevs", json!({}))?;
    let controllers = client.call("vhost_get_controllers", json!({}))?;
    let absent = absent(client)?;
    let connected = elements(&controllers).iter().filter(|c| !elements(&c["sessions"]).is_empty()).count();
    let cores: Vec<_> = elements(&reactors["reactors"]).iter().map(|r| r["lcore"].to_string()).collect();
    let status = json!({
        "version": version["version"],
        "pid": reactors["pid"],
        "cores": elements(&reactors["reactors"]).iter().map(|r| r["lcore"].clone()).collect::<Vec<_>>(),
        "disks": elements(&disks).len(),
        "controllers": elements(&controllers).len(),
        "connected": connected,
        "absent": absent,
    });
    out.print(&status, || {
        let lines = [
            ("daemon", format!("{}, process {}", text(&version, "version"), reactors["pid"])),
            ("cores", cores.join(" ")),
            ("disks", elements(&disks).len().to_string()),
            ("controllers", format!("{}, {connected} connected", elements(&controllers).len())),
        ];
        out.list(lines.into_iter().chain(absent.iter().map(|a| ("not there", why(a)))))
    })
}

/// What is configured and not there. Older daemons do not tell.
pub fn absent(client: &mut Client) -> Result<Vec<Value>, Error> {
    match client.call("aryk_absent_get", json!({})) {
        Ok(absent) => Ok(elements(&absent).to_vec()),
        Err(Error::Refused { code: -32601, .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// What an absent object is, and why it is absent.
pub fn why(absent: &Value) -> String {
    format!("{}: {}", text(absent, "object"), text(absent, "why"))
}

pub fn reactors(client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut reactors = client.call("framework_get_reactors", json!({}))?;
    let counts = client.call("aryk_stats_get", json!({}))?;
    for reactor in reactors["reactors"].as_array_mut().into_iter().flatten() {
        let own = elements(&counts["reactors"]).iter().find(|own| own["core"] == reactor["lcore"]);
        reactor["sleeping"] = own.map_or(Value::Null, |own| own["sleeping_ticks"].clone());
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

/// Has a reactor come or go, and lists those that there are then.
pub fn change_cores(method: &str, core: u16, client: &mut Client, out: &Output) -> Result<(), Error> {
    client.call(method, json!({"core": core}))?;
    reactors(client, out)
}

pub fn rpc(method: &str, params: Option<&str>, client: &mut Client, out: &Output) -> Result<(), Error> {
    let params = match params {
        None => json!({}),
        Some("-") => parse(&io::read_to_string(io::stdin())?)?,
        Some(text) => parse(text)?,
    };
    let result = client.call(method, params)?;
    out.print(&result, || match &result {
        Value::String(text) => text.clone(),
        other => format!("{other:#}"),
    })
}

fn parse(text: &str) -> Result<Value, Error> {
    serde_json::from_str(text).map_err(|e| Error::Usage(format!("the parameters are no JSON: {e}")))
}
