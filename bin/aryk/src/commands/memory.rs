//! `aryk memory`: the devices that access guests' memory by themselves, and the memory that they cannot access.

use super::{elements, number, text};
use crate::client::Client;
use crate::error::Error;
use crate::output::{Column, Output};
use crate::size::Size;
use serde_json::{Value, json};

pub fn show(client: &mut Client, out: &Output) -> Result<(), Error> {
    let memory = client.call("aryk_memory_clients_get", json!({}))?;
    out.print(&memory, || tables(&memory, out))
}

/// A table of the devices, and below it, if there are any, one of the regions that they have not registered.
fn tables(memory: &Value, out: &Output) -> String {
    let clients = elements(&memory["clients"]);
    if clients.is_empty() {
        return "No device accesses the memory of VMs by itself.".into();
    }
    let row = |client: &Value| {
        let counts = ["registered", "registering", "unregistering", "failures", "late", "bounced_pieces"];
        let counts = counts.map(|count| number(client, count).to_string());
        [text(client, "name").to_owned()].into_iter().chain(counts).collect()
    };
    let columns: [Column; 7] = [
        ("DEVICE", false),
        ("REGISTERED", true),
        ("REGISTERING", true),
        ("UNREGISTERING", true),
        ("FAILED", true),
        ("LATE", true),
        ("BOUNCED", true),
    ];
    let devices = out.table(&columns, clients.iter().map(row));
    let regions = elements(&memory["not_registered"]);
    if regions.is_empty() {
        return devices;
    }
    let row = |region: &Value| {
        vec![
            text(region, "client").to_owned(),
            text(region, "ctrlr").to_owned(),
            Size(number(region, "bytes")).to_string(),
            number(region, "bounced_pieces").to_string(),
            region["reason"].as_str().unwrap_or("being registered").to_owned(),
        ]
    };
    let columns: [Column; 5] =
        [("DEVICE", false), ("NOT REGISTERED FOR", false), ("SIZE", true), ("BOUNCED", true), ("WHY", false)];
    format!("{devices}\n\n{}", out.table(&columns, regions.iter().map(row)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(memory: &Value) -> Vec<Vec<String>> {
        let text = tables(memory, &Output::plain());
        text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    }

    #[test]
    fn regions_that_are_not_registered_follow_the_devices() {
        let device = json!({"name": "Nvme0", "registering": 1, "registered": 12, "unregistering": 3, "failures": 4,
            "late": 5, "bounced_pieces": 6});
        let region = json!({"client": "Nvme0", "ctrlr": "vm1", "bytes": 2_u64 << 30, "bounced_pieces": 7,
            "reason": "locked"});
        let mut memory = json!({"clients": [device], "not_registered": []});
        let expected = [
            vec!["DEVICE", "REGISTERED", "REGISTERING", "UNREGISTERING", "FAILED", "LATE", "BOUNCED"],
            vec!["Nvme0", "12", "1", "3", "4", "5", "6"],
        ];
        assert_eq!(rows(&memory), expected);
        memory["not_registered"] = json!([region]);
        let all = rows(&memory);
        assert_eq!(all[..2], expected);
        let below = [
            vec![],
            vec!["DEVICE", "NOT", "REGISTERED", "FOR", "SIZE", "BOUNCED", "WHY"],
            vec!["Nvme0", "vm1", "2G", "7", "locked"],
        ];
        assert_eq!(all[2..], below);
        let none = tables(&json!({"clients": [], "not_registered": []}), &Output::plain());
        assert!(none.starts_with("No device"), "{none}");
    }
}
