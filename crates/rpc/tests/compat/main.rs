//! Every method of SPDK is answered as SPDK answers it, or `docs/rpc-compat.md` states why not, and the differences.
//!
//! `data/spdk-methods.json` has the facts: each method's parameters, types and result. All parameters are tried one by one,
//! without carrying the method out; then `scenario` carries out each method and compares its result.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clients;
mod codes;
mod configs;
mod crypto;
mod disks;
mod document;
mod facts;
#[path = "../../../nvme-fabrics/tests/loopback/host.rs"]
#[expect(dead_code, reason = "the tests of the target use the rest")]
mod host;
mod keyring;
mod lvol;
mod rekey;
mod scenario;
mod schema;
mod target;
mod wire;

use aryk_bdev::{Access, AsyncChannel};
use aryk_bdev_rbd::Clusters;
use aryk_nvme_model::{Config, Model};
use aryk_pci::vfio_user;
use aryk_reactor::{Cx, Handle, Options, Reactors, Root, ThreadId};
use aryk_rpc::methods::log::PrintLevel;
use aryk_rpc::wrapping::Wrapping;
use aryk_rpc::{Control, Error, Methods, methods};
use document::Document;
use facts::{Facts, Param, Seen};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// No method has a parameter with this name.
const STRANGER: &str = "no such parameter";

/// A daemon without a socket, before its start-up is complete.
struct Daemon {
    dir: tempfile::TempDir,
    reactors: Rc<Reactors>,
    control: Rc<Control>,
    methods: Rc<Methods<Control>>,
}

impl Daemon {
    fn new() -> Self {
        Self::with(Wrapping::default())
    }

    fn with(wrapping: Wrapping) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
        let control = Control::new(Rc::clone(&reactors), dir.path(), 1024, PrintLevel::Notice, |_| {});
        let control = control.with_rbd(Clusters::with_library(aryk_librbd_stub::library()));
        let control = Rc::new(control.with_wrapping(wrapping));
        Self { dir, reactors, methods: methods::table(Rc::clone(&control)), control }
    }

    fn names(&self) -> BTreeSet<&'static str> {
        self.methods.names().into_iter().map(|(name, _)| name).collect()
    }

    async fn call(&self, method: &str, params: &Value) -> Result<Value, Error> {
        self.call_with(method, &params.to_string()).await
    }

    async fn call_with(&self, method: &str, params: &str) -> Result<Value, Error> {
        let params = RawValue::from_string(params.to_owned()).unwrap();
        let reply = self.methods.call(method, Some(params)).await?;
        Ok(serde_json::from_str(reply.get()).unwrap())
    }

    /// The error text for invalid `params`.
    async fn complaint(&self, method: &str, params: &str) -> String {
        match self.call_with(method, params).await {
            Err(Error::Coded { code: -32602 | -32603, message, detail })
                if message == "Invalid parameters" =>
            {
                detail
            }
            other => panic!("{method} {params}: {other:?}"),
        }
    }

    /// The names of the parameters that `method` accepts.
    async fn taken(&self, method: &str) -> BTreeSet<String> {
        let detail = self.complaint(method, &format!("{{\"{STRANGER}\":0}}")).await;
        let (_, names) = detail
            .split_once(&format!("unknown field `{STRANGER}`, "))
            .unwrap_or_else(|| panic!("{method}: {detail}"));
        names.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }
}

fn in_daemon(test: impl AsyncFnOnce(&Daemon)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, async { test(&Daemon::new()).await });
}

#[test]
fn the_document_lists_each_method() {
    let (facts, document) = (Facts::read(), Document::read());
    in_daemon(async |daemon| {
        let names = daemon.names();
        let known: BTreeSet<_> = facts.names().collect();
        let listed: BTreeSet<_> = document.rows.keys().map(String::as_str).collect();
        assert_eq!(listed.difference(&known).count(), 0, "of no interest: {:?}", listed.difference(&known));
        for method in known {
            let row = document.row(method);
            assert_eq!(row.is_answered, names.contains(method), "{method}");
            assert!(row.is_answered || !row.note.is_empty(), "the document gives no reason for {method}");
        }
        let answered = document.rows.values().filter(|row| row.is_answered).count();
        document.check_counts(answered, facts.names().count());
        let ours: BTreeSet<_> = names.into_iter().filter(|name| !document.rows.contains_key(*name)).collect();
        assert_eq!(document.ours, ours.into_iter().map(str::to_owned).collect(), "methods that are ours");
    });
}

#[test]
fn parameters_are_accepted_and_unknown_ones_refused() {
    let (facts, document) = (Facts::read(), Document::read());
    in_daemon(async |daemon| {
        let mut check = ParamCheck { daemon, facts: &facts, document: &document, wrong: Vec::new() };
        check.method("framework_start_init").await;
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let names = daemon.names();
        for method in facts.names().filter(|m| names.contains(m) && *m != "framework_start_init") {
            check.method(method).await;
        }
        assert!(check.wrong.is_empty(), "{}", check.wrong.join("\n"));
    });
}

/// Collects errors of methods' parameters.
struct ParamCheck<'a> {
    daemon: &'a Daemon,
    facts: &'a Facts,
    document: &'a Document,
    wrong: Vec<String>,
}

impl ParamCheck<'_> {
    async fn method(&mut self, method: &str) {
        let (taken, params) = (self.daemon.taken(method).await, self.facts.params(method));
        let missing = params.iter().map(|p| &p.name).filter(|name| !taken.contains(*name));
        let missing: BTreeSet<String> = missing.cloned().collect();
        let documented = &self.document.row(method).not_taken;
        self.check(missing == *documented, || {
            format!("{method}: not taken are {missing:?}, documented are {documented:?}")
        });
        for param in params.iter().filter(|p| taken.contains(&p.name)) {
            self.values(method, param).await;
        }
        for absent in params.iter().filter(|p| p.is_required) {
            let others = params.iter().filter(|p| p.is_required && p.name != absent.name);
            let call: Map<_, _> = others.map(|p| (p.name.clone(), p.samples(self.facts).remove(0))).collect();
            let detail = self.daemon.complaint(method, &Value::Object(call).to_string()).await;
            let missing = format!("missing field `{}`", absent.name);
            self.check(detail.contains(&missing), || format!("{method}: {detail}, not {missing}"));
        }
    }

    /// An invalid value is reported before the unknown parameter that follows.
    async fn values(&mut self, method: &str, param: &Param) {
        let right = param.samples(self.facts).into_iter().map(|value| (value, true));
        for (value, is_right) in right.chain([(param.wrong_sample(), false)]) {
            let call = format!("{{\"{}\":{value},\"{STRANGER}\":0}}", param.name);
            let detail = self.daemon.complaint(method, &call).await;
            let as_told = self.document.row(method).not_taken_values.contains(&value.to_string());
            self.check(detail.contains(STRANGER) == (is_right && !as_told), || {
                format!("{method}: {} as {value}: {detail}", param.name)
            });
        }
    }

    fn check(&mut self, is_right: bool, otherwise: impl FnOnce() -> String) {
        if !is_right {
            self.wrong.push(otherwise());
        }
    }
}

#[test]
fn results_have_their_shape() {
    let (facts, document) = (Facts::read(), Document::read());
    in_daemon(async |daemon| {
        let seen = carry_out(daemon, &facts).await;
        let (names, mut wrong) = (daemon.names(), Vec::new());
        for method in facts.names().filter(|method| names.contains(method)) {
            let row = document.row(method);
            let documented = &row.not_given;
            match (facts.result(method), seen.get(method)) {
                (None, _) => {}
                (_, None) if scenario::IN_A_GUEST.contains(&method) => {}
                (_, None) => wrong.push(format!("{method} is not in the scenario")),
                (_, Some(seen)) if row.is_empty() => {
                    if !seen.is_empty() {
                        wrong.push(format!("{method} is not empty"));
                    }
                }
                (Some(shape), Some(seen)) => {
                    let missing = seen.missing(method, shape);
                    if missing != *documented {
                        wrong.push(format!(
                            "{method}: not given are {missing:?}, documented are {documented:?}"
                        ));
                    }
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

/// Carries out the scenario; returns the parts seen of each result.
async fn carry_out(daemon: &Daemon, facts: &Facts) -> BTreeMap<&'static str, Seen> {
    let (mut seen, mut hosts) = (BTreeMap::<_, Seen>::new(), Vec::new());
    let reactor = &daemon.reactors.handles()[0];
    let thread = add_machine(reactor).await;
    let number = reactor.call(move |cx| cx.thread_number(thread)).await.unwrap();
    // The daemon signals its own process, which is the test.
    let mut signals = signal(SignalKind::user_defined1()).unwrap();
    let schemas = schema::Schemas::new();
    let drive = Model::new("drive", Config::default()).unwrap();
    let _running = drive.run().unwrap();
    let listener = UnixListener::bind(daemon.dir.path().join("drive")).unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            vfio_user::serve(client.unwrap(), &*drive).unwrap();
        }
    });
    for step in scenario::steps(daemon.dir.path(), (number, reactor.core())) {
        if step.method == "thread_get_io_channels" {
            let registry = &daemon.control.disks.registry;
            let disk = registry.open("Malloc0", Access::Shared, "a VM", |_| {}).unwrap();
            disk.prepare(reactor).await.unwrap();
            let open = move |cx: &mut Cx| {
                let channel = AsyncChannel::open(&disk, thread, cx).unwrap();
                cx.local_state::<Cell<Option<AsyncChannel>>>().set(Some(channel));
            };
            reactor.call(open).await.unwrap();
        }
        if step.method == "nvmf_subsystem_get_controllers" {
            let connect = || {
                let options = host::Options::default();
                let (admin_queue, id) =
                    host::Connection::admin(target::ADDRESS, options, target::SUBSYSTEM, 1);
                (admin_queue, host::Connection::io(target::ADDRESS, options, id, 1, 1).unwrap())
            };
            hosts.push(tokio::task::spawn_blocking(connect).await.unwrap());
        }
        let result = match daemon.call(step.method, &step.params).await {
            Ok(result) => result,
            Err(error) => panic!("{} {}: {error}", step.method, step.params),
        };
        schemas.check_call(step.method, &step.params, &result);
        if let Some(shape) = facts.result(step.method) {
            seen.entry(step.method).or_default().note(step.method, shape, &result);
        }
    }
    assert!(signals.recv().await.is_some());
    seen
}

/// Adds a thread and a poller, since no VM is connected.
async fn add_machine(reactor: &Handle) -> ThreadId {
    let core = reactor.core();
    let add = move |cx: &mut Cx| {
        let thread = cx.add_thread("a VM's", [core].into_iter().collect());
        cx.add_root(thread, "queue", |_, _| Ok::<_, Infallible>(Queue)).unwrap();
        cx.add_poller(thread, "always", None, |_| false);
        cx.add_poller(thread, "at times", Some(Duration::from_millis(1)), |_| true);
        thread
    };
    reactor.call(add).await.unwrap()
}

/// A queue without work.
struct Queue;

impl Root for Queue {
    fn poll(&mut self, _: &mut Cx) -> bool {
        false
    }
}

#[test]
fn values_without_meaning_for_aryk_are_refused() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        for (method, params, code) in [
            ("framework_set_scheduler", json!({"name": "gscheduler"}), -32603),
            ("framework_set_scheduler", json!({"name": "dynamic", "core_busy": 101}), -32603),
            ("trace_enable_tpoint_group", json!({"name": "nvmf_tcp"}), -32602),
            ("trace_set_tpoint_mask", json!({"name": "bdev", "tpoint_mask": 4}), -32602),
            ("log_set_flag", json!({"flag": "iscsi"}), -32602),
            ("sock_set_default_impl", json!({"impl_name": "uring"}), -22),
            ("accel_crypto_keys_get", json!({"key_name": "k"}), -2),
            ("accel_crypto_key_destroy", json!({"key_name": "k"}), -32602),
            ("bdev_crypto_create", json!({"name": "x", "base_bdev_name": "b", "key_name": "k"}), -2),
            ("bdev_crypto_create", json!({"name": "x", "base_bdev_name": "b"}), -22),
            ("bdev_nvme_get_controllers", json!({"name": "n"}), -19),
            ("virtio_blk_get_transports", json!({"name": "vfio"}), -19),
            ("bdev_malloc_create", json!({"block_size": 512, "num_blocks": 1_u64 << 40}), -12),
            ("bdev_nvme_set_options", json!({"timeout_us": 1}), -22),
            ("bdev_nvme_set_hotplug", json!({"enable": true, "period_us": 10_000_001}), -22),
            ("nvmf_set_config", json!({"admin_cmd_passthru": {"sanitize": true}}), -95),
            ("nvmf_create_transport", json!({"trtype": "RDMA"}), -32602),
            ("nvmf_create_subsystem", json!({"nqn": "cnode1"}), -32602),
            ("sock_impl_set_options", json!({"impl_name": "other"}), -95),
            ("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8, "md_size": 8}), -22),
            ("bdev_malloc_create", json!({"block_size": 512, "num_blocks": 8, "dif_type": 1}), -22),
        ] {
            assert_eq!(daemon.call(method, &params).await.unwrap_err().code(), code, "{method}");
        }
    });
}

#[test]
fn the_service_describes_itself() {
    in_daemon(async |daemon| {
        let document = daemon.call("rpc.discover", &json!({})).await.unwrap();
        assert_eq!(document, aryk_rpc::openrpc::document());
        let reported = document["methods"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap());
        let reported: BTreeSet<_> = reported.chain(["rpc.discover"]).collect();
        assert_eq!(reported, daemon.names());
    });
}

#[test]
fn a_log_flag_enables_its_part_of_the_daemon() {
    in_daemon(async |daemon| {
        let settings = || daemon.control.log_settings();
        daemon.call("log_set_flag", &json!({"flag": "vhost_user"})).await.unwrap();
        daemon.call("log_enable_timestamps", &json!({"enabled": false})).await.unwrap();
        assert_eq!(settings().verbose_targets().collect::<Vec<_>>(), ["aryk_vhost_user"]);
        assert!(!settings().timestamps);
        let flags = daemon.call("log_get_flags", &json!({})).await.unwrap();
        assert_eq!((&flags["vhost_user"], &flags["bdev"]), (&json!(true), &json!(false)));
        daemon.call("log_set_flag", &json!({"flag": "vhost"})).await.unwrap();
        assert_eq!(
            settings().verbose_targets().filter(|target| target.starts_with("aryk_vhost_")).count(),
            4
        );
        assert_eq!(settings().verbose_targets().count(), 4);
        daemon.call("log_set_flag", &json!({"flag": "all"})).await.unwrap();
        daemon.call("log_clear_flag", &json!({"flag": "rpc"})).await.unwrap();
        assert_eq!(settings().verbose_targets().count(), flags.as_object().unwrap().len() - 1);
        daemon.call("log_clear_flag", &json!({"flag": "all"})).await.unwrap();
        assert_eq!(settings().verbose_targets().count(), 0);
    });
}

#[test]
fn context_switches_are_monitored_while_enabled() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let calls = [(json!({}), false), (json!({"enabled": true}), true), (json!({"enabled": true}), true)];
        for (params, enabled) in calls.into_iter().chain([(json!({"enabled": false}), false)]) {
            let reported = daemon.call("framework_monitor_context_switch", &params).await.unwrap();
            assert_eq!(reported, json!({"enabled": enabled}), "{params}");
        }
    });
}

#[test]
fn new_and_removed_disks_are_reported_as_events() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let base = json!({"name": "base", "block_size": 512, "num_blocks": 8});
        daemon.call("bdev_null_create", &base).await.unwrap();
        let top = json!({"name": "top", "base_bdev_name": "base"});
        daemon.call("bdev_passthru_create", &top).await.unwrap();
        assert!(
            daemon.call("bdev_null_create", &base).await.is_err(),
            "a disk that was not created is not reported"
        );
        daemon.call("bdev_null_delete", &json!({"name": "base"})).await.unwrap();
        let reported = daemon.call("notify_get_notifications", &json!({"id": 0, "max": 10})).await.unwrap();
        let event = |id, kind, ctx| json!({"id": id, "type": kind, "ctx": ctx});
        let made = [event(0, "bdev_register", "base"), event(1, "bdev_register", "top")];
        assert_eq!(reported.as_array().unwrap()[..2], made);
        let mut gone: Vec<_> =
            reported.as_array().unwrap()[2..].iter().map(|e| (&e["type"], &e["ctx"])).collect();
        gone.sort_by_key(|(_, name)| name.to_string());
        assert_eq!(
            gone,
            [(&json!("bdev_unregister"), &json!("base")), (&json!("bdev_unregister"), &json!("top"))]
        );
        let later = daemon.call("notify_get_notifications", &json!({"id": 3})).await.unwrap();
        assert_eq!(later.as_array().unwrap().len(), 1);
    });
}

#[test]
fn controllers_of_all_kinds_share_their_names_and_keep_their_kind() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let disk = json!({"name": "d", "block_size": 512, "num_blocks": 8});
        daemon.call("bdev_malloc_create", &disk).await.unwrap();
        let blk = json!({"ctrlr": "c", "dev_name": "d"});
        daemon.call("vhost_create_blk_controller", &blk).await.unwrap();
        let scsi = json!({"ctrlr": "c", "delay": true});
        let taken = daemon.call("vhost_create_scsi_controller", &scsi).await.unwrap_err();
        assert!(format!("{taken:?}").contains("a controller named `c` exists already"), "{taken:?}");
        // A blk controller has no targets, and is not started by itself.
        let target = json!({"ctrlr": "c", "scsi_target_num": 0, "bdev_name": "d"});
        let start = json!({"ctrlr": "c"});
        for (method, params) in
            [("vhost_scsi_controller_add_target", &target), ("vhost_start_scsi_controller", &start)]
        {
            let other = daemon.call(method, params).await.unwrap_err();
            assert!(format!("{other:?}").contains("there is no controller named `c`"), "{method}: {other:?}");
        }
        daemon.call("vhost_create_scsi_controller", &json!({"ctrlr": "a", "delay": true})).await.unwrap();
        daemon
            .call(
                "vhost_scsi_controller_add_target",
                &json!({"ctrlr": "a", "scsi_target_num": 0, "bdev_name": "d"}),
            )
            .await
            .unwrap();
        let listed = daemon.call("vhost_get_controllers", &json!({})).await.unwrap();
        assert_eq!((&listed[0]["ctrlr"], &listed[1]["ctrlr"]), (&json!("a"), &json!("c")), "by name");
        assert_eq!(listed[0]["backend_specific"]["scsi"][0]["luns"][0]["bdev_name"], "d");
        assert!(listed[0]["backend_specific"].get("block").is_none());
        assert_eq!(listed[1]["backend_specific"]["block"]["bdev"], "d");
        assert!(listed[1]["backend_specific"].get("scsi").is_none());
        // The name of a deleted controller is free for either kind.
        daemon.call("vhost_delete_controller", &json!({"ctrlr": "c"})).await.unwrap();
        daemon.call("vhost_create_scsi_controller", &scsi).await.unwrap();
        daemon.call("vhost_delete_controller", &json!({"ctrlr": "c"})).await.unwrap();
        let saved = daemon.call("framework_get_config", &json!({"name": "vhost_blk"})).await.unwrap();
        assert_eq!(saved, json!([]), "nothing of the blk controller is left");
    });
}
