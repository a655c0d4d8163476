//! A disk that no call has created.

use super::*;
use crate::methods::log::PrintLevel;
use crate::{Error, methods};
use aryk_bdev::{Blocks, Identity};
use aryk_metrics::Inventory;
use aryk_reactor::{Options, Reactors};
use aryk_state::Store;
use serde_json::value::to_raw_value;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

struct Daemon {
    control: Rc<Control>,
    methods: Rc<Methods<Control>>,
}

impl Daemon {
    async fn start(dir: &Path) -> Self {
        let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
        let control = Rc::new(Control::new(reactors, dir, 1024, PrintLevel::Error, |_| {}));
        let (store, records) = Store::open(dir).unwrap();
        control.config.keep_in(store, records).unwrap();
        control.start();
        let methods = methods::table(Rc::clone(&control));
        follow_disks(&control, &methods);
        restore::restore(&control, &methods).await;
        Self { control, methods }
    }

    async fn call(&self, method: &str, params: Value) -> Result<Value, Error> {
        let reply = self.methods.call(method, Some(to_raw_value(&params).unwrap())).await?;
        Ok(serde_json::from_str(reply.get()).unwrap())
    }

    /// Registers a disk, as a module does that finds one.
    fn plug_in(&self) {
        let identity = Identity::named("plugged");
        let config =
            aryk_bdev_null::Config { identity, block_size: 512, physical_block_size: 512, blocks: Blocks(8) };
        aryk_bdev_null::create(&self.control.env, config).unwrap();
    }

    async fn until(&self, method: &str, params: Value, is_so: impl Fn(&Result<Value, Error>) -> bool) {
        for _ in 0..2000 {
            if is_so(&self.call(method, params.clone()).await) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not in 20 seconds: {method} {params}");
    }

    async fn until_offered(&self) {
        self.until("vhost_get_controllers", json!({"name": "c"}), Result::is_ok).await;
        let has_target = |reply: &Result<Value, Error>| {
            reply.as_ref().unwrap()[0]["backend_specific"]["scsi"][0]["luns"][0]["bdev_name"] == "plugged"
        };
        self.until("vhost_get_controllers", json!({"name": "s"}), has_target).await;
    }

    async fn until_limited(&self) {
        let has_limit = |reply: &Result<Value, Error>| {
            reply.as_ref().unwrap()[0]["assigned_rate_limits"]["rw_ios_per_sec"] == 1000
        };
        self.until("bdev_get_bdevs", json!({"name": "plugged"}), has_limit).await;
    }

    async fn notifications(&self) -> Vec<String> {
        let all = self.call("notify_get_notifications", json!({})).await.unwrap();
        all.as_array().unwrap().iter().map(|event| format!("{} {}", event["type"], event["ctx"])).collect()
    }
}

fn in_local_set(test: impl AsyncFnOnce(&Path)) {
    let dir = tempfile::TempDir::new().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test(dir.path()));
}

#[test]
fn a_disk_that_appears_by_itself_is_reported_with_its_configuration() {
    in_local_set(async |dir| {
        {
            let daemon = Daemon::start(dir).await;
            daemon.plug_in();
            // A group with the disk's name is left alone.
            daemon.call("bdev_qos_group_create", json!({"name": "plugged"})).await.unwrap();
            let calls = [
                ("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "plugged"})),
                ("aryk_controller_set_sleep_policy", json!({"ctrlr": "c", "policy": "interrupt"})),
                ("bdev_set_qos_limit", json!({"name": "plugged", "rw_ios_per_sec": 1000})),
                ("vhost_create_scsi_controller", json!({"ctrlr": "s"})),
                (
                    "vhost_scsi_controller_add_target",
                    json!({"ctrlr": "s", "scsi_target_num": 0, "bdev_name": "plugged"}),
                ),
            ];
            for (method, params) in calls {
                daemon.call(method, params).await.unwrap();
            }
            daemon.control.close().await;
        }
        let daemon = Daemon::start(dir).await;
        assert_eq!(daemon.call("aryk_absent_get", json!({})).await.unwrap().as_array().unwrap().len(), 4);
        daemon.plug_in();
        let disks = daemon.call("bdev_get_bdevs", json!({})).await.unwrap();
        assert_eq!(disks[0]["name"], "plugged");
        assert_eq!(daemon.control.disks()[0].name(), "plugged", "the metrics include the disk");
        daemon.until_offered().await;
        daemon.until_limited().await;
        assert_eq!(daemon.notifications().await, [r#""bdev_register" "plugged""#]);
        assert_eq!(daemon.control.config.absent_count(), 0);
        // The disk disappears by itself, and comes back.
        daemon.control.disks.registry.remove("plugged").await.unwrap();
        let absent = |reply: &Result<Value, Error>| reply.as_ref().unwrap().as_array().unwrap().len() == 2;
        daemon.until("aryk_absent_get", json!({}), absent).await;
        assert_eq!(daemon.call("bdev_get_bdevs", json!({})).await.unwrap(), json!([]));
        daemon.plug_in();
        daemon.until_limited().await;
        daemon.until_offered().await;
        let has_disk = |reply: &Result<Value, Error>| {
            reply.as_ref().is_ok_and(|all| all[0]["backend_specific"]["block"]["bdev"] == "plugged")
        };
        daemon.until("vhost_get_controllers", json!({"name": "c"}), has_disk).await;
        let is_all_there = |reply: &Result<Value, Error>| *reply.as_ref().unwrap() == json!([]);
        daemon.until("aryk_absent_get", json!({}), is_all_there).await;
        let c = daemon.call("vhost_get_controllers", json!({"name": "c"})).await.unwrap();
        assert_eq!(c[0]["sleep_policy"], "interrupt");
        assert_eq!(daemon.control.config.absent_count(), 0);
        let seen = ["register", "unregister", "register"].map(|what| format!(r#""bdev_{what}" "plugged""#));
        assert_eq!(daemon.notifications().await, seen);
        daemon.control.close().await;
    });
}

#[test]
fn a_disk_that_waited_and_could_not_be_created_is_retried() {
    in_local_set(async |dir| {
        let daemon = Daemon::start(dir).await;
        daemon
            .call("bdev_passthru_create", json!({"name": "top", "base_bdev_name": "plugged"}))
            .await
            .unwrap();
        daemon.plug_in();
        let registry = &daemon.control.disks.registry;
        let other = registry.open("plugged", aryk_bdev::Access::Exclusive, "the test", |_| ()).unwrap();
        let is_in_use = |reply: &Result<Value, Error>| reply.as_ref().unwrap().to_string().contains("in use");
        daemon.until("aryk_absent_get", json!({}), is_in_use).await;
        drop(other);
        daemon.until("bdev_get_bdevs", json!({"name": "top"}), Result::is_ok).await;
        assert_eq!(daemon.control.config.absent_count(), 0);
        daemon.control.close().await;
    });
}

#[test]
fn a_disk_whose_store_is_away_is_described_as_stalled() {
    in_local_set(async |dir| {
        let daemon = Daemon::start(dir).await;
        daemon.plug_in();
        let params = json!({"base_bdev_name": "plugged", "name": "above"});
        daemon.call("bdev_passthru_create", params).await.unwrap();
        let stalled = async || {
            let disks = daemon.call("bdev_get_bdevs", json!({})).await.unwrap();
            [disks[0]["stalled"].clone(), disks[1]["stalled"].clone()]
        };
        assert_eq!(stalled().await, [false, false]);
        for is_stalled in [true, false] {
            daemon.control.disks.registry.stalled("plugged", is_stalled).unwrap();
            assert_eq!(stalled().await, [is_stalled, is_stalled]);
        }
        // SPDK has no such events.
        let seen = ["plugged", "above"].map(|disk| format!(r#""bdev_register" "{disk}""#));
        assert_eq!(daemon.notifications().await, seen);
        daemon.control.close().await;
    });
}
