//! The allowed dependencies between crates, by layer.
//!
//! Only dependencies that are linked into the product are checked; tests (`dev-dependencies`) may depend on any crate.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::workspace;

/// The layer of a crate in the design.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    /// Memory, ciphers, tables, stores, rates, sockets and character devices: `aes-xts`, `cuse`, `dma`, `log-limit`, `mdns`,
    /// `secrets`, `slots`, `state`, `qos`, `tls`, `unix-listener`.
    Ground,
    /// Formats of disks' metadata: `luks`.
    Format,
    /// The engine of volumes, without I/O: `volume-index`, `volume`, `volume-store`.
    Store,
    /// Access to PCI functions: `pci`.
    Bus,
    /// Device drivers: `uring`, `nvme`, `rdma`; models of devices: `nvme-model`; clients of stores: `librbd`.
    Device,
    /// NVMe over Fabrics, without I/O: `nvme-fabrics`, over the definitions of `nvme`.
    Fabrics,
    Reactor,
    Bdev,
    /// The suite that every module passes.
    Conformance,
    /// Bdev modules: `crates/modules/*`.
    Module,
    /// The building blocks of front-ends: rings and protocols.
    Transport,
    /// Command sets over the block layer that several front-ends use: `scsi`.
    Commands,
    /// The queues of virtio devices, with their disks and their moves: `vhost-device`, which all front-ends share.
    Queues,
    FrontEnd,
    /// Metrics of all the others: `metrics`.
    Metrics,
    Rpc,
    /// The programs: `bin/*`.
    Program,
    /// Programs that add modules to the daemon: `examples/*`.
    Example,
    /// Tools that build, test and measure.
    Tool,
}

use Layer::{
    Bdev, Bus, Commands, Conformance, Device, Example, Fabrics, Format, FrontEnd, Ground, Metrics, Module,
    Program, Queues, Reactor, Rpc, Store, Tool, Transport,
};

impl Layer {
    /// The layer of the crate at `path`, relative to the root. A new crate must be added here.
    fn of(path: &str) -> Option<Self> {
        Some(match path {
            "crates/aes-xts"
            | "crates/crash-point"
            | "crates/cuse"
            | "crates/dma"
            | "crates/log-limit"
            | "crates/mdns"
            | "crates/qos"
            | "crates/secrets"
            | "crates/slots"
            | "crates/state"
            | "crates/tls"
            | "crates/unix-listener" => Ground,
            "crates/luks" => Format,
            "crates/volume" | "crates/volume-index" | "crates/volume-store" => Store,
            "crates/pci" => Bus,
            "crates/librbd" | "crates/nvme" | "crates/nvme-model" | "crates/rdma" | "crates/uring" => Device,
            "crates/nvme-fabrics" => Fabrics,
            "crates/reactor" => Reactor,
            "crates/bdev" => Bdev,
            "crates/bdev-conformance" => Conformance,
            "crates/front-end" | "crates/virtqueue" | "crates/vhost-user" => Transport,
            "crates/vhost-device" => Queues,
            "crates/scsi" => Commands,
            "crates/nvmf" | "crates/vhost-blk" | "crates/vhost-scsi" => FrontEnd,
            "crates/metrics" => Metrics,
            "crates/rpc" => Rpc,
            "xtask" | "bench" => Tool,
            _ if path.starts_with("crates/modules/") => Module,
            _ if path.starts_with("bin/") => Program,
            _ if path.starts_with("examples/") => Example,
            _ if path.starts_with("tests/") => Tool,
            _ => return None,
        })
    }

    /// The layers that crates of this layer may depend on. Crates of one layer may not depend on each other unless the
    /// layer lists itself.
    const fn may_depend_on(self) -> &'static [Self] {
        match self {
            Ground => &[Ground],
            Format | Bus => &[Ground],
            Store => &[Ground, Store],
            Device => &[Ground, Bus],
            Fabrics => &[Ground, Device],
            Reactor => &[Ground, Device],
            Bdev => &[Ground, Reactor],
            Conformance => &[Ground, Reactor, Bdev],
            Module => &[Ground, Format, Store, Bus, Device, Fabrics, Reactor, Bdev],
            Transport => &[Ground, Reactor, Transport],
            Commands => &[Ground, Reactor, Bdev],
            Queues => &[Ground, Reactor, Bdev, Transport],
            FrontEnd => &[Ground, Device, Fabrics, Reactor, Bdev, Transport, Commands, Queues],
            Metrics => &[Ground, Reactor, Bdev],
            Rpc => &[
                Ground, Format, Store, Bus, Device, Fabrics, Reactor, Bdev, Module, Transport, Commands,
                Queues, FrontEnd, Metrics,
            ],
            Program => &[
                Ground, Format, Store, Bus, Device, Reactor, Bdev, Module, Transport, FrontEnd, Metrics, Rpc,
            ],
            Example => &[Ground, Reactor, Bdev, Rpc, Program],
            Tool => &[
                Ground,
                Format,
                Store,
                Bus,
                Device,
                Fabrics,
                Reactor,
                Bdev,
                Conformance,
                Module,
                Transport,
                Commands,
                Queues,
                FrontEnd,
                Metrics,
                Rpc,
                Tool,
            ],
        }
    }
}

/// Libraries that only some layers may use, and why.
const RESERVED: &[(&str, &[Layer], &str)] = &[
    ("anyhow", &[Program, Tool], "libraries return errors that callers can distinguish"),
    (
        "serde_json",
        // LUKS2 headers are JSON, and the handshake of vfio-user has capabilities in JSON.
        &[Format, Bus, Metrics, Rpc, Program, Tool],
        "O passes through/no JSON in crates on the I/O path/O passes through",
    ),
    ("clap", &[Program, Tool], "only programs have arguments"),
];

/// Crate names that say nothing about the content.
const VAGUE: &[&str] = &["util", "utils", "common", "base", "helpers", "misc"];

pub(super) fn check(packages: &[Value]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in packages {
        let path = path_of(package["manifest_path"].as_str().context("a package without a manifest")?)?;
        let Some(layer) = Layer::of(&path) else {
            findings.push(format!("{path}: has no layer (xtask/src/check/edges.rs)"));
            continue;
        };
        if path.split(['/', '-']).any(|word| VAGUE.contains(&word)) {
            findings.push(format!("{path}: a name that says nothing about the content"));
        }
        let dependencies = package["dependencies"].as_array().context("a package without dependencies")?;
        for dependency in dependencies.iter().filter(|dependency| dependency["kind"] != "dev") {
            findings.extend(check_edge(&path, layer, dependency)?);
        }
    }
    Ok(findings)
}

fn check_edge(path: &str, layer: Layer, dependency: &Value) -> Result<Option<String>> {
    let name = dependency["name"].as_str().context("a dependency without a name")?;
    if let Some(directory) = dependency["path"].as_str() {
        let target = path_of(&format!("{directory}/Cargo.toml"))?;
        let allowed = Layer::of(&target).is_some_and(|target| layer.may_depend_on().contains(&target));
        return Ok((!allowed).then(|| format!("{path} ({layer:?}) must not depend on {target}")));
    }
    let reserved = RESERVED.iter().find(|(library, layers, _)| *library == name && !layers.contains(&layer));
    Ok(reserved.map(|(_, _, reason)| format!("{path} ({layer:?}) must not use {name}: {reason}")))
}

/// A package's directory, relative to the root, from the path of its manifest.
fn path_of(manifest: &str) -> Result<String> {
    let inside =
        manifest.strip_prefix(&format!("{}/", workspace::root().display())).context(manifest.to_owned())?;
    Ok(inside.trim_end_matches("Cargo.toml").trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn package(path: &str, dependencies: &[Value]) -> Value {
        let manifest = workspace::root().join(path).join("Cargo.toml");
        json!({"manifest_path": manifest, "dependencies": dependencies})
    }

    fn on(path: &str, kind: Option<&str>) -> Value {
        json!({"name": "x", "kind": kind, "path": workspace::root().join(path)})
    }

    fn findings(path: &str, dependencies: &[Value]) -> usize {
        check(&[package(path, dependencies)]).unwrap().len()
    }

    #[test]
    fn modules_know_bdev_but_neither_each_other_nor_front_ends() {
        let module = "crates/modules/null";
        assert_eq!(findings(module, &[on("crates/bdev", None), on("crates/uring", None)]), 0);
        assert_eq!(findings(module, &[on("crates/modules/malloc", None)]), 1);
        assert_eq!(findings(module, &[on("crates/vhost-blk", None)]), 1);
        assert_eq!(findings(module, &[on("crates/modules/malloc", Some("dev"))]), 0);
        assert_eq!(findings("crates/vhost-blk", &[on(module, None)]), 1);
        assert_eq!(findings("crates/rpc", &[on(module, None)]), 0);
    }

    #[test]
    fn drivers_and_models_of_devices_know_the_bus_but_not_each_other() {
        let (bus, memory) = (on("crates/pci", None), on("crates/dma", None));
        assert_eq!(findings("crates/nvme", &[bus.clone(), memory.clone()]), 0);
        assert_eq!(findings("crates/nvme-model", &[bus.clone(), memory]), 0);
        assert_eq!(findings("crates/nvme", &[on("crates/nvme-model", None)]), 1);
        assert_eq!(findings("crates/nvme", &[on("crates/reactor", None)]), 1);
        assert_eq!(findings("crates/bdev", &[bus]), 1);
        assert_eq!(findings("crates/pci", &[on("crates/nvme", None)]), 1);
    }

    #[test]
    fn strange_crates_and_reserved_libraries_are_found() {
        assert_eq!(findings("crates/elsewhere", &[]), 1);
        assert_eq!(findings("crates/modules/io-util", &[]), 1);
        let json = json!({"name": "serde_json", "kind": null, "path": null});
        assert_eq!(findings("crates/modules/null", std::slice::from_ref(&json)), 1);
        assert_eq!(findings("crates/rpc", &[json]), 0);
    }
}
