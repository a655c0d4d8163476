//! `aryk share`, `unshare` and `hosts`: disks for hosts on the network, over NVMe/TCP or NVMe/RDMA.

use super::{elements, number, text};
use crate::absent;
use crate::cli::{ShareArgs, UnshareArgs};
use crate::client::Client;
use crate::error::{BUSY, EXISTS, Error, NO_DEVICE, NO_FAMILY};
use crate::limits::Limits;
use crate::output::{Output, Tone};
use crate::size::Size;
use serde_json::{Value, json};

/// Hints for a disk that cannot be shared.
const HINTS: [(i64, &str); 4] = [
    (
        NO_FAMILY,
        "The service's unit forbids TCP. As root: install -D -m 644 -t /etc/systemd/system/arykd.service.d \
         /usr/share/aryk/drop-ins/network.conf; systemctl daemon-reload; systemctl restart arykd",
    ),
    (NO_DEVICE, "'aryk disk list' shows the disks."),
    (BUSY, "'aryk disk list' shows its users: a VM and a host that both write destroy each other's files."),
    (EXISTS, "'aryk hosts' shows what is shared already."),
];

pub fn share(args: &ShareArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disks = client.call("bdev_get_bdevs", json!({"name": args.disk}));
    let disk = disks.map_err(|error| error.hinted(&HINTS))?[0].take();
    let shares = shares(client)?;
    if let Some(nqn) = nqn_of(text(&disk, "name"), &shares, client)? {
        return Err(Error::Usage(format!(
            "disk '{}' is shared already, as {nqn}; 'aryk unshare {}' ends that",
            args.disk, args.disk
        )));
    }
    let uuid = text(&disk, "uuid");
    // The name of a disk is not unique among all servers of a host, which takes subsystems of one name for paths to one disk.
    let nqn = args.nqn.clone().unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}"));
    let transports = client.call("nvmf_get_transports", json!({}))?;
    if elements(&transports).iter().all(|transport| text(transport, "trtype") != transport_of(args)) {
        client.call("nvmf_create_transport", json!({"trtype": transport_of(args)}))?;
    }
    let serial: String = uuid.chars().filter(|c| *c != '-').take(20).collect();
    let subsystem = json!({"nqn": nqn, "serial_number": serial, "model_number": "Aryk", "allow_any_host": args.host.is_empty()});
    client.call("nvmf_create_subsystem", subsystem).map_err(|error| error.hinted(&HINTS))?;
    if let Err(error) = fill(&nqn, text(&disk, "name"), args, client) {
        // If the deletion fails too, the first error matters more.
        let _ = client.call("nvmf_delete_subsystem", json!({"nqn": nqn}));
        return Err(error.hinted(&HINTS));
    }
    let shared = client.call("nvmf_get_subsystems", json!({"nqn": nqn}))?[0].take();
    out.print(&shared, || advice(args, &nqn))
}

/// Adds the disk, its hosts and its listener to a new subsystem.
fn fill(nqn: &str, disk: &str, args: &ShareArgs, client: &mut Client) -> Result<(), Error> {
    client.call("nvmf_subsystem_add_ns", json!({"nqn": nqn, "namespace": {"bdev_name": disk}}))?;
    for host in &args.host {
        let mut call = json!({"nqn": nqn, "host": host});
        let keys =
            [("dhchap_key", &args.key), ("dhchap_ctrlr_key", &args.controller_key), ("psk", &args.tls_key)];
        for (param, key) in keys {
            if let Some(key) = key {
                call[param] = json!(key);
            }
        }
        client.call("nvmf_subsystem_add_host", call)?;
    }
    let mut listener = json!({
        "nqn": nqn, "listen_address": address(args), "secure_channel": args.tls_key.is_some(),
    });
    if let Some(cores) = &args.cpumask {
        listener["cpumask"] = json!(cores);
    }
    client.call("nvmf_subsystem_add_listener", listener)?;
    Ok(())
}

const fn transport_of(args: &ShareArgs) -> &'static str {
    if args.rdma { "RDMA" } else { "TCP" }
}

fn address(args: &ShareArgs) -> Value {
    let (ip, port) = (args.listen.ip().to_string(), args.listen.port().to_string());
    json!({"trtype": transport_of(args), "traddr": ip, "trsvcid": port})
}

/// How a host connects, and what it can do without having proved who it is.
fn advice(args: &ShareArgs, nqn: &str) -> String {
    let (ip, port) = (args.listen.ip(), args.listen.port());
    let host = if ip.is_unspecified() { "THIS-HOST".to_owned() } else { ip.to_string() };
    let mut name =
        args.host.first().map_or_else(String::new, |host| format!(" \\\n        --hostnqn {host}"));
    for (option, key) in [("dhchap-secret", &args.key), ("dhchap-ctrl-secret", &args.controller_key)] {
        if let Some(key) = key {
            name += &format!(" \\\n        --{option} SECRET-OF-{key}");
        }
    }
    if args.tls_key.is_some() {
        name += " --tls";
    }
    let who = match &args.host[..] {
        [] => "any host".to_owned(),
        hosts => hosts.join(", "),
    };
    let mut text = format!(
        "Disk '{}' is shared at {}, for {who}. On a Linux host:\n\n    \
         nvme connect -t {} -a {host} -s {port} \\\n        -n {nqn}{name}",
        args.disk,
        args.listen,
        transport_of(args).to_lowercase()
    );
    if !ip.is_loopback() && args.tls_key.is_none() {
        text.push_str(match args.key {
            Some(_) => "\n\nThe data is not encrypted: who is on its way can read and change it.",
            None => {
                "\n\nWarning: hosts do not prove who they are, and the data is not encrypted. All\n\
                 who reach the address can read and change the disk: it must be a network of trust."
            }
        });
    }
    text
}

/// Whether a share has the disk of this name.
pub fn has_disk(share: &Value, disk: &str) -> bool {
    elements(&share["namespaces"]).iter().any(|ns| text(ns, "name") == disk)
}

/// The NQN under which the disk of this name is shared. The disk may be absent.
fn nqn_of(disk: &str, shares: &[Value], client: &mut Client) -> Result<Option<String>, Error> {
    if let Some(found) = shares.iter().find(|share| has_disk(share, disk)) {
        return Ok(Some(text(found, "nqn").to_owned()));
    }
    let is_it = |part: &Value| text(part, "method") == absent::ADD_NS && absent::base(part) == Some(disk);
    let part = absent::read(client)?.into_iter().find(is_it);
    Ok(part.map(|part| text(&part["params"], "nqn").to_owned()))
}

/// The name of a disk, and the NQN under which it is shared, both by a name of the disk or by the NQN.
fn disk_and_nqn(name: &str, shares: &[Value], client: &mut Client) -> Result<(String, String), Error> {
    // The disk may be absent: then its subsystem has its name.
    let disk = client.call("bdev_get_bdevs", json!({"name": name}));
    let disk = disk.map_or_else(|_| name.to_owned(), |disks| text(&disks[0], "name").to_owned());
    let nqn = match shares.iter().any(|share| text(share, "nqn") == name) {
        true => name.to_owned(),
        false => nqn_of(&disk, shares, client)?.ok_or_else(|| {
            let none = Error::no_device(format!("'{name}' is not shared"));
            none.hinted(&[(NO_DEVICE, "'aryk hosts' shows what is shared.")])
        })?,
    };
    Ok((disk, nqn))
}

/// The NQN of a share, by its disk or by itself.
pub fn find(name: &str, client: &mut Client) -> Result<String, Error> {
    let shares = shares(client)?;
    Ok(disk_and_nqn(name, &shares, client)?.1)
}

pub fn unshare(args: &UnshareArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let shares = shares(client)?;
    let (disk, nqn) = disk_and_nqn(&args.name, &shares, client)?;
    let share = shares.iter().find(|share| text(share, "nqn") == nqn);
    let namespaces = share.map_or(&[][..], |share| elements(&share["namespaces"]));
    let others: Vec<&str> =
        namespaces.iter().map(|ns| text(ns, "name")).filter(|name| *name != disk).collect();
    if nqn != args.name && !others.is_empty() {
        return Err(Error::Usage(format!(
            "{nqn} has other disks, too: {}. Unshare all by its name, or one by 'aryk rpc nvmf_subsystem_remove_ns'",
            others.join(", ")
        )));
    }
    let hosts = client.call("nvmf_subsystem_get_controllers", json!({"nqn": nqn}))?;
    let users: Vec<String> = elements(&hosts)
        .iter()
        .map(|host| format!("{} from {}", text(host, "hostnqn"), text(&host["peer_address"], "traddr")))
        .collect();
    if !args.force && !users.is_empty() {
        return Err(Error::InUse {
            what: "hosts would lose a disk that they use".into(),
            users,
            hint: "Disconnect them first: nvme disconnect -n NQN; or unshare it nevertheless: --force",
        });
    }
    client.call("nvmf_delete_subsystem", json!({"nqn": nqn}))?;
    out.print(&json!({"nqn": nqn}), || format!("{nqn} is not shared any more."))
}

/// Reads the shares from the daemon.
fn shares(client: &mut Client) -> Result<Vec<Value>, Error> {
    let all = client.call("nvmf_get_subsystems", json!({}))?;
    Ok(elements(&all).iter().filter(|share| share["subtype"] == "NVMe").cloned().collect())
}

/// Reads the shares and their hosts from the daemon.
pub fn read(client: &mut Client) -> Result<Vec<Value>, Error> {
    let mut shares = shares(client)?;
    for share in &mut shares {
        let hosts = client.call("nvmf_subsystem_get_controllers", json!({"nqn": text(share, "nqn")}))?;
        share["controllers"] = hosts;
    }
    Ok(shares)
}

/// Lists what is shared, and the hosts that are connected.
pub fn hosts(client: &mut Client, out: &Output) -> Result<(), Error> {
    let shares = read(client)?;
    out.print(&json!(shares), || {
        if shares.is_empty() {
            return "No disk is shared: 'aryk share DISK' shares one.".into();
        }
        let columns = [
            ("DISK", false),
            ("AT", false),
            ("HOST", false),
            ("FROM", false),
            ("QUEUES", true),
            ("READ", true),
            ("WRITTEN", true),
            ("FAILED", true),
            ("LIMITS", false),
        ];
        let table = out.toned_table(&columns, shares.iter().flat_map(rows));
        let names = shares.iter().map(|share| format!("  {}: {}", disks(share), text(share, "nqn")));
        format!("{table}\n\nNames for 'nvme connect -n':\n{}", names.collect::<Vec<_>>().join("\n"))
    })
}

fn disks(share: &Value) -> String {
    let names: Vec<&str> = elements(&share["namespaces"]).iter().map(|ns| text(ns, "name")).collect();
    if names.is_empty() { "no disk".into() } else { names.join(", ") }
}

/// A row for each host, or one for a share without any.
fn rows(share: &Value) -> Vec<(Tone, Vec<String>)> {
    let at = |address: &Value| match text(address, "traddr") {
        ip if ip.contains(':') => format!("[{ip}]:{}", text(address, "trsvcid")),
        ip => format!("{ip}:{}", text(address, "trsvcid")),
    };
    let addresses: Vec<String> = elements(&share["listen_addresses"]).iter().map(at).collect();
    let addresses = if addresses.is_empty() { "nowhere".into() } else { addresses.join(", ") };
    let hosts = elements(&share["controllers"]);
    if hosts.is_empty() {
        let mut cells = vec![disks(share), addresses, "none".into()];
        cells.resize(9, String::new());
        return vec![(Tone::Plain, cells)];
    }
    let row = |host: &Value| {
        let traffic = &host["traffic"];
        let cells = [
            disks(share),
            addresses.clone(),
            text(host, "hostnqn").to_owned(),
            text(&host["peer_address"], "traddr").to_owned(),
            number(host, "num_io_qpairs").to_string(),
            Size(number(traffic, "read_bytes")).to_string(),
            Size(number(traffic, "written_bytes")).to_string(),
            number(traffic, "failed").to_string(),
            Limits::of(&host["assigned_rate_limits"]).to_string(),
        ];
        let tone = if number(traffic, "failed") > 0 { Tone::Warning } else { Tone::Good };
        (tone, cells.into())
    };
    hosts.iter().map(row).collect()
}
