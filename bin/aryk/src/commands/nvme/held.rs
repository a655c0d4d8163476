//! The drives that the daemon drives: the kernel cannot identify them, so the daemon's RPCs do.

use crate::client::Client;
use crate::commands::{elements, number, text};
use crate::error::{Error, NO_METHOD};
use aryk_pci::Address;
use aryk_pci::sysfs::Identity;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// What the daemon knows about a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The name of its controller.
    pub controller: String,
    /// The names of the disks in its namespaces.
    pub disks: Vec<String>,
    /// Bytes of all namespaces that the daemon serves.
    pub size: u64,
    pub identity: Option<Identity>,
    /// Composite temperature in degrees Celsius.
    pub celsius: Option<i32>,
}

/// The drives of the daemon at `socket`, by address; none without a daemon, or with one that has no NVMe driver.
///
/// If a daemon does not reply as expected, this returns a note for people: the rest of the list does not depend on the daemon.
pub fn read(socket: &Path, timeout: Duration) -> (BTreeMap<Address, Held>, Option<String>) {
    match Client::connect(socket, timeout).and_then(|mut client| of(&mut client)) {
        Ok(held) => (held, None),
        Err(Error::NoDaemon(_) | Error::Refused { code: NO_METHOD, .. }) => (BTreeMap::new(), None),
        Err(error) => (BTreeMap::new(), Some(format!("the daemon's drives are not identified: {error}"))),
    }
}

fn of(client: &mut Client) -> Result<BTreeMap<Address, Held>, Error> {
    let controllers = client.call("bdev_nvme_get_controllers", json!({}))?;
    let mut held = BTreeMap::new();
    for controller in elements(&controllers) {
        // A controller that is no PCI function of this host has a path instead.
        let Ok(address) = text(&controller["trid"], "traddr").parse() else { continue };
        let name = text(controller, "name");
        // Only a controller that is ready reads its temperature.
        let health = client.call("bdev_nvme_get_controller_health_info", json!({"name": name})).ok();
        let namespaces = elements(&controller["namespaces"]);
        let bytes = |namespace: &Value| {
            number(namespace, "num_blocks").saturating_mul(number(namespace, "block_size"))
        };
        let entry = Held {
            controller: name.to_owned(),
            disks: namespaces.iter().filter_map(|one| Some(one["disk"].as_str()?.to_owned())).collect(),
            size: namespaces.iter().map(bytes).fold(0, u64::saturating_add),
            identity: identity(&controller["ctrlr_data"]),
            celsius: health.and_then(|health| i32::try_from(health["temperature_celsius"].as_i64()?).ok()),
        };
        held.insert(address, entry);
    }
    Ok(held)
}

/// The identity in a controller's data; `None` before the controller was ready.
fn identity(data: &Value) -> Option<Identity> {
    let text = |member| Some(data[member].as_str()?.trim().to_owned());
    let (model, serial) = (text("model_number")?, text("serial_number")?);
    Some(Identity { model, serial, firmware: text("firmware_revision")? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    /// Replies to each call as `reply` says, until the client closes the connection.
    fn daemon(
        socket: &Path,
        reply: impl Fn(&str, &Value) -> Option<Value> + Send + 'static,
    ) -> std::thread::JoinHandle<()> {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let requests = serde_json::Deserializer::from_reader(&stream).into_iter::<Value>();
            for request in requests.map_while(Result::ok) {
                let answer = match reply(text(&request, "method"), &request["params"]) {
                    Some(result) => json!({"id": request["id"], "result": result}),
                    None => {
                        json!({"id": request["id"], "error": {"code": -32601, "message": "Method not found"}})
                    }
                };
                (&stream).write_all(answer.to_string().as_bytes()).unwrap();
            }
        })
    }

    fn read_from(
        reply: impl Fn(&str, &Value) -> Option<Value> + Send + 'static,
    ) -> (BTreeMap<Address, Held>, Option<String>) {
        let dir = tempfile::TempDir::new().unwrap();
        let socket = dir.path().join("s");
        let daemon = daemon(&socket, reply);
        let held = read(&socket, Duration::from_secs(5));
        daemon.join().unwrap();
        held
    }

    #[test]
    fn drives_are_identified_by_address() {
        let (held, note) = read_from(|method, params| match method {
            "bdev_nvme_get_controllers" => Some(json!([
                {"name": "Nvme0", "trid": {"trtype": "PCIe", "traddr": "0000:05:00.0"},
                    "ctrlr_data": {"model_number": "M ", "serial_number": "S", "firmware_revision": "F"},
                    "namespaces": [{"nsid": 1, "disk": "Nvme0n1", "block_size": 4096, "num_blocks": 8},
                        {"nsid": 2, "unserved": "zoned"},
                        {"nsid": 3, "disk": "vm1", "block_size": 512, "num_blocks": 8}]},
                {"name": "Nvme1", "trid": {"trtype": "PCIe", "traddr": "0000:06:00.0"}, "namespaces": []},
                {"name": "Nvme2", "trid": {"trtype": "VFIOUSER", "traddr": "/tmp/socket"}},
            ])),
            "bdev_nvme_get_controller_health_info" if params["name"] == "Nvme0" => {
                Some(json!({"temperature_celsius": 32}))
            }
            _ => None,
        });
        assert_eq!(note, None);
        let identity = Identity { model: "M".into(), serial: "S".into(), firmware: "F".into() };
        let known = Held {
            controller: "Nvme0".into(),
            disks: vec!["Nvme0n1".into(), "vm1".into()],
            size: 8 * (4096 + 512),
            identity: Some(identity),
            celsius: Some(32),
        };
        let unknown =
            Held { controller: "Nvme1".into(), disks: vec![], size: 0, identity: None, celsius: None };
        let of = |address: &str| address.parse().unwrap();
        assert_eq!(held, BTreeMap::from([(of("0000:05:00.0"), known), (of("0000:06:00.0"), unknown)]));
    }

    #[test]
    fn a_daemon_is_not_needed() {
        assert_eq!(read_from(|_, _| None), (BTreeMap::new(), None), "no such method");
        let nowhere = read(Path::new("/nonexistent/aryk.sock"), Duration::from_secs(1));
        assert_eq!(nowhere, (BTreeMap::new(), None));
        let (held, note) = read(Path::new("/proc/self/mem/aryk.sock"), Duration::from_secs(1));
        assert!(held.is_empty() && note.unwrap().starts_with("the daemon's drives are not identified: "));
    }
}
