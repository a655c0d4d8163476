//! The file of `aryk apply`: TOML or JSON of disks and controllers, or SPDK's JSON configuration.

use super::call::{CONTROLLER, Call, TARGET};
use super::limits::{self as setting, Setting};
use crate::cli::{CreateArgs, Enospc, KindArgs, Lock, SleepPolicy};
use crate::commands::disk::create_call;
use crate::commands::object;
use crate::error::Error;
use crate::limits::Limits;
use crate::size::Size;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The wanted state.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default, rename = "group", skip_serializing_if = "Vec::is_empty")]
    groups: Vec<Group>,
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    disks: Vec<Disk>,
    #[serde(default, rename = "controller", skip_serializing_if = "Vec::is_empty")]
    controllers: Vec<Controller>,
    /// Calls of the daemon that have no section of their own.
    #[serde(default, rename = "call", skip_serializing_if = "Vec::is_empty")]
    calls: Vec<Call>,
}

/// The options of `aryk qos group create`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    #[serde(default, skip_serializing_if = "Limits::is_empty")]
    limits: Limits,
}

/// The options of `aryk disk create`, and the disk's limits.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Disk {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "is_false")]
    memory: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    null: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<Size>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
    #[serde(default, skip_serializing_if = "is_false")]
    readonly: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    enospc: Option<Enospc>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lock: Option<Lock>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    #[serde(default, skip_serializing_if = "Limits::is_empty")]
    limits: Limits,
}

/// The options of `aryk attach`, and the controller's sleep policy.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Controller {
    disk: String,
    /// Defaults to the disk's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queues: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpumask: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    readonly: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    shared: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    connect: Option<PathBuf>,
    /// Octal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_mode: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_owner: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    socket_group: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sleep_policy: Option<SleepPolicy>,
}

/// SPDK's configuration file.
#[derive(Debug, Deserialize)]
struct Spdk {
    subsystems: Vec<Subsystem>,
}

#[derive(Debug, Deserialize)]
struct Subsystem {
    config: Option<Vec<Element>>,
}

/// One call, or several that SPDK makes at the same time.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Element {
    One(Call),
    Several(Vec<Call>),
}

impl Element {
    fn into_calls(self) -> Vec<Call> {
        match self {
            Self::One(call) => vec![call],
            Self::Several(calls) => calls,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Parses `text` into calls. Relative paths are relative to `dir`.
pub fn parse(text: &str, dir: &Path) -> Result<Vec<Call>, String> {
    let is_json = text.trim_start().starts_with('{');
    if is_json {
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        if value.get("subsystems").is_some() {
            let spdk: Spdk = serde_json::from_value(value).map_err(|e| e.to_string())?;
            let elements = spdk.subsystems.into_iter().filter_map(|s| s.config).flatten();
            return Ok(elements.flat_map(Element::into_calls).collect());
        }
    }
    let document: Document = match is_json {
        true => serde_json::from_str(text).map_err(|e| e.to_string())?,
        false => toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())?,
    };
    document.into_calls(dir)
}

impl Document {
    fn into_calls(self, dir: &Path) -> Result<Vec<Call>, String> {
        let mut calls = Vec::new();
        for group in self.groups {
            calls.push(setting::create(&group.name, group.parent.as_deref()));
            if !group.limits.is_empty() {
                calls.push(setting::limit_group(&group.name, &group.limits));
            }
        }
        for disk in self.disks {
            let name = disk.name.clone();
            let limit = (!disk.limits.is_empty()).then(|| setting::limit(&name, &disk.limits));
            let add = disk.group.as_ref().map(|group| setting::add(group, &name));
            calls.push(disk.into_call(dir).map_err(|e| format!("disk '{name}': {e}"))?);
            calls.extend(limit.into_iter().chain(add));
        }
        calls.extend(self.calls);
        for controller in self.controllers {
            let policy = controller.sleep_policy.map(|policy| (controller.name().to_owned(), policy));
            calls.push(controller.into_call(dir));
            calls.extend(policy.map(|(name, policy)| setting::set_sleep_policy(&name, policy)));
        }
        Ok(calls)
    }
}

impl Document {
    /// Sets `shared` on controllers that share a disk, unless all of them are read-only.
    fn share(&mut self, calls: &[Call]) {
        let of_targets =
            |disk: &str| calls.iter().any(|c| c.method == TARGET && c.text("bdev_name") == Some(disk));
        let all = self.controllers.clone();
        for controller in &mut self.controllers {
            let same: Vec<_> = all.iter().filter(|other| other.disk == controller.disk).collect();
            let is_written = same.iter().any(|other| !other.readonly);
            controller.shared = of_targets(&controller.disk) || (same.len() > 1 && is_written);
        }
    }

    /// Writes a setting in the document's own words. Returns false if there are none for it.
    fn add_setting(&mut self, call: &Call) -> bool {
        let Some((setting, name)) = call.setting() else { return false };
        let limits = Limits::of(&Value::Object(call.params.clone()));
        let (group, disk) = match setting {
            Setting::Group => {
                let parent = call.text("parent").map(str::to_owned);
                self.groups.push(Group { name: name.to_owned(), parent, limits: Limits::default() });
                return true;
            }
            Setting::GroupLimits => (self.groups.iter_mut().find(|g| g.name == name), None),
            Setting::Limits | Setting::Membership => (None, self.disks.iter_mut().find(|d| d.name == name)),
            Setting::SleepPolicy => {
                let Some(controller) = self.controllers.iter_mut().find(|c| c.name() == name) else {
                    return false;
                };
                controller.sleep_policy = call.sleep_policy();
                return true;
            }
        };
        match (group, disk) {
            (Some(group), _) => group.limits = limits,
            (None, Some(disk)) if setting == Setting::Membership => {
                disk.group = call.text("name").map(str::to_owned)
            }
            (None, Some(disk)) => disk.limits = limits,
            (None, None) => return false,
        }
        true
    }
}

impl Disk {
    fn into_call(self, dir: &Path) -> Result<Call, String> {
        if usize::from(self.file.is_some()) + usize::from(self.memory) + usize::from(self.null) != 1 {
            return Err("give it one of: file = \"PATH\", memory = true, null = true".into());
        }
        if self.file.is_none() && (self.readonly || self.enospc.is_some() || self.lock.is_some()) {
            return Err("readonly, enospc and lock are for files".into());
        }
        if self.file.is_none() && self.size.is_none() {
            return Err("size is missing, such as size = \"20G\"".into());
        }
        let args = CreateArgs {
            name: self.name,
            kind: KindArgs {
                file: self.file.map(|file| dir.join(file)),
                memory: self.memory,
                null: self.null,
                nvme: None,
                nvme_tcp: Vec::new(),
                nvme_rdma: Vec::new(),
                rbd: None,
            },
            from: None,
            from_format: None,
            size: self.size,
            block_size: self.block_size,
            readonly: self.readonly,
            enospc: self.enospc,
            lock: self.lock,
            uuid: self.uuid,
            encrypt: None,
            overwrite: false,
            create: None,
            conf: None,
            user: None,
            key: None,
            cluster: None,
            dma: None,
            subsystem: None,
            ns: None,
            host_nqn: None,
            controller_key: None,
            tls_key: None,
        };
        let (method, params) = create_call(&args).map_err(|e: Error| e.to_string())?;
        Ok(Call::new(method, params))
    }

    /// A section with the same effect as `call`, as far as sections can express it.
    fn of(call: &Call, bytes: Option<u64>) -> Option<Self> {
        let kind = |method: &str| call.method == method;
        Some(Self {
            name: call.name()?,
            file: call.text("filename").filter(|_| kind("bdev_uring_create")).map(PathBuf::from),
            memory: kind("bdev_malloc_create"),
            null: kind("bdev_null_create"),
            size: bytes.or_else(|| call.size()).map(Size),
            block_size: call.params.get("block_size").and_then(Value::as_u64).and_then(|n| n.try_into().ok()),
            readonly: call.params.get("readonly").and_then(Value::as_bool).unwrap_or_default(),
            enospc: (call.text("enospc") == Some("hold")).then_some(Enospc::Hold),
            lock: (call.text("lock") == Some(Lock::InUse.name())).then_some(Lock::InUse),
            uuid: call.text("uuid").map(str::to_owned),
            group: None,
            limits: Limits::default(),
        })
    }
}

impl Controller {
    fn name(&self) -> &str {
        self.name.as_ref().unwrap_or(&self.disk)
    }

    fn into_call(self, dir: &Path) -> Call {
        let params = object([
            ("ctrlr", Some(json!(self.name()))),
            ("dev_name", Some(json!(self.disk))),
            ("readonly", self.readonly.then_some(json!(true))),
            ("exclusive", (!self.shared).then_some(json!(true))),
            ("cpumask", self.cpumask.map(|cores| json!(cores))),
            ("num_queues", self.queues.map(|n| json!(n))),
            ("connect", self.connect.map(|path| json!(dir.join(path)))),
            ("socket_mode", self.socket_mode.map(|mode| json!(mode))),
            ("socket_owner", self.socket_owner.map(|user| json!(user))),
            ("socket_group", self.socket_group.map(|group| json!(group))),
        ]);
        Call::new(CONTROLLER, params)
    }

    /// A section with the same effect as `call`.
    fn of(call: &Call) -> Option<Self> {
        if call.method != CONTROLLER {
            return None;
        }
        let text = |param: &str| call.text(param).map(str::to_owned);
        let disk = text("dev_name")?;
        Some(Self {
            name: call.name().filter(|name| *name != disk),
            disk,
            queues: call.params.get("num_queues").and_then(Value::as_u64).and_then(|n| n.try_into().ok()),
            cpumask: text("cpumask"),
            readonly: call.params.get("readonly").and_then(Value::as_bool).unwrap_or_default(),
            shared: false,
            connect: text("connect").map(PathBuf::from),
            socket_mode: text("socket_mode"),
            socket_owner: text("socket_owner"),
            socket_group: text("socket_group"),
            sleep_policy: None,
        })
    }
}

/// Writes a file with the same effect as `calls`; `bytes` returns the sizes of disks.
pub fn write(calls: &[Call], bytes: impl Fn(&str) -> Option<u64>, as_json: bool) -> Result<String, String> {
    let mut document = Document::default();
    let root = Path::new("/");
    let (settings, makers): (Vec<&Call>, Vec<&Call>) =
        calls.iter().partition(|call| call.setting().is_some());
    for call in makers {
        let size = call.name().filter(|_| call.can_grow()).and_then(|name| bytes(&name));
        let disk = Disk::of(call, size)
            .filter(|disk| disk.clone().into_call(root).is_ok_and(|words| words.is_same(call)));
        let controller = Controller::of(call).filter(|c| c.clone().into_call(root).is_same(call));
        match (disk, controller) {
            (Some(disk), _) => document.disks.push(disk),
            (None, Some(controller)) => document.controllers.push(controller),
            (None, None) => document.calls.push(call.without_nulls()),
        }
    }
    document.share(calls);
    for call in settings {
        if !document.add_setting(call) {
            document.calls.push(call.without_nulls());
        }
    }
    match as_json {
        true => serde_json::to_string_pretty(&document).map_err(|e| e.to_string()),
        false => toml::to_string(&document).map_err(|e| e.to_string()),
    }
}
