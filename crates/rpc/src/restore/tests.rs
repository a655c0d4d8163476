//! Many objects that take long to create, and clients during that time.

use super::plan::OF_A_STORE;
use super::*;
use crate::config::Subsystem;
use crate::methods::log::PrintLevel;
use crate::{Error, Phase, methods};
use aryk_bdev::Blocks;
use aryk_reactor::{Options, Reactors};
use aryk_state::Store;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::path::Path;
use tokio::time::Instant;

/// Records of the test methods.
#[derive(Default)]
struct Seen {
    running: Cell<usize>,
    most: Cell<usize>,
    /// Names in the order of creation.
    made: RefCell<Vec<String>>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base_name: Option<String>,
    /// Duration of the creation in milliseconds.
    takes: u64,
}

const CREATE: &str = "test_create";
const MODULE: &str = "test";

/// A daemon whose disks take the requested time to create.
fn daemon(dir: &Path) -> (Rc<Control>, Rc<Methods<Control>>, Rc<Seen>) {
    let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
    let control = Rc::new(Control::new(reactors, dir, 1024, PrintLevel::Error, |_| {}));
    let (store, records) = Store::open(dir).unwrap();
    control.config.keep_in(store, records).unwrap();
    control.start();
    let seen = Rc::new(Seen::default());
    let of_methods = Rc::clone(&seen);
    let methods = methods::table_with(Rc::clone(&control), |table| {
        table.add(CREATE, Phase::RunTime, "", async move |control: &Control, p: Create| {
            let seen = &of_methods;
            if let Some(base) = &p.base_name
                && !seen.made.borrow().contains(base)
            {
                return Err(Error::no_device("disk", base));
            }
            if seen.made.borrow().contains(&p.name) {
                return Err(Error::errno(rustix::io::Errno::EXIST, "the disk exists"));
            }
            seen.running.set(seen.running.get() + 1);
            seen.most.set(seen.most.get().max(seen.running.get()));
            tokio::time::sleep(Duration::from_millis(p.takes)).await;
            seen.running.set(seen.running.get() - 1);
            seen.made.borrow_mut().push(p.name.clone());
            let identity = aryk_bdev::Identity::named(&p.name);
            let config = aryk_bdev_null::Config {
                identity,
                block_size: 512,
                physical_block_size: 512,
                blocks: Blocks(8),
            };
            let bdev = aryk_bdev_null::create(&control.env, config)?;
            Ok(control.made_by(&bdev, MODULE, (CREATE, &p)))
        });
    });
    (control, methods, seen)
}

fn in_local_set(test: impl AsyncFnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test());
}

/// Makes a daemon note these disks, and end.
async fn note(dir: &Path, disks: &[serde_json::Value]) {
    let (control, _, _) = daemon(dir);
    for disk in disks {
        control.config.made(Subsystem::Bdev, disk["name"].as_str().unwrap(), CREATE, disk);
    }
}

#[test]
fn slow_disks_are_created_in_parallel_while_calls_are_answered() {
    const DISKS: usize = 200;
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        let disks: Vec<_> = (0..DISKS).map(|n| json!({"name": format!("d{n}"), "takes": 1000})).collect();
        note(dir.path(), &disks).await;
        let (control, methods, seen) = daemon(dir.path());
        let began = Instant::now();
        let start_up = control.begin_start_up(false);
        let of_restore = (Rc::clone(&control), Rc::clone(&methods));
        let restoring = tokio::task::spawn_local(async move {
            let restored = restore(&of_restore.0, &of_restore.1).await;
            drop(start_up);
            restored
        });
        let of_wait = Rc::clone(&methods);
        let waiting =
            tokio::task::spawn_local(async move { of_wait.call("framework_wait_init", None).await });
        tokio::time::sleep(Duration::from_millis(100)).await;
        for method in ["spdk_get_version", "bdev_get_bdevs", "framework_get_subsystems", "save_config"] {
            methods.call(method, None).await.unwrap();
        }
        // This disk is among the last to be tried.
        let again = to_raw_value(&json!({"name": "d199", "takes": 0})).unwrap();
        let error = methods.call(CREATE, Some(again)).await.unwrap_err();
        assert_eq!(error.code(), -17, "a disk is not created twice: {error}");
        assert!(began.elapsed() > Duration::from_secs(3), "the call has waited: {:?}", began.elapsed());
        assert_eq!(restoring.await.unwrap(), Restored { made: DISKS, absent: 0 });
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        waiting.await.unwrap().unwrap();
        assert_eq!((seen.most.get(), seen.made.borrow().len()), (OF_A_STORE, DISKS));
    });
}

#[test]
fn a_new_disk_does_not_wait_and_start_up_ends_with_the_last_disk() {
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        note(dir.path(), &[json!({"name": "slow", "takes": 500})]).await;
        let (control, methods, seen) = daemon(dir.path());
        let of_restore = (Rc::clone(&control), Rc::clone(&methods));
        let start_up = control.begin_start_up(false);
        let restoring = tokio::task::spawn_local(async move {
            restore(&of_restore.0, &of_restore.1).await;
            drop(start_up);
        });
        tokio::task::yield_now().await;
        let new = to_raw_value(&json!({"name": "new", "takes": 0})).unwrap();
        methods.call(CREATE, Some(new)).await.unwrap();
        assert_eq!(*seen.made.borrow(), ["new"]);
        methods.call("framework_wait_init", None).await.unwrap();
        assert_eq!(*seen.made.borrow(), ["new", "slow"]);
        restoring.await.unwrap();
    });
}

#[test]
fn disks_wait_for_their_bases_and_failed_disks_are_retried() {
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        let disks = [
            json!({"name": "top", "base_name": "middle", "takes": 10}),
            json!({"name": "middle", "base_name": "bottom", "takes": 10}),
            json!({"name": "bottom", "takes": 100}),
            json!({"name": "orphan", "base_name": "lost", "takes": 0}),
        ];
        note(dir.path(), &disks).await;
        let (control, methods, seen) = daemon(dir.path());
        assert_eq!(restore(&control, &methods).await, Restored { made: 3, absent: 1 });
        assert_eq!(*seen.made.borrow(), ["bottom", "middle", "top"]);
        let lost = to_raw_value(&json!({"name": "lost", "takes": 0})).unwrap();
        methods.call(CREATE, Some(lost)).await.unwrap();
        let are_there = async {
            while seen.made.borrow().len() < 5 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), are_there).await.unwrap();
        assert_eq!(control.config.absent_count(), 0);
    });
}

async fn create(methods: &Rc<Methods<Control>>, disk: serde_json::Value) {
    methods.call(CREATE, Some(to_raw_value(&disk).unwrap())).await.unwrap();
}

async fn until(what: &str, limit: Duration, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(limit, waiting).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

fn start_restoring(control: &Rc<Control>, methods: &Rc<Methods<Control>>) -> JoinHandle<Restored> {
    let (control, methods) = (Rc::clone(control), Rc::clone(methods));
    tokio::task::spawn_local(async move { restore(&control, &methods).await })
}

#[test]
fn stores_that_do_not_respond_delay_no_other_disk() {
    const HOUR: u64 = 3_600_000;
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        let hung = (0..OF_A_STORE).map(|n| json!({"name": format!("hung{n}"), "takes": HOUR}));
        let orphan = json!({"name": "orphan", "base_name": "lost", "takes": 0});
        let last = json!({"name": "last", "takes": 0});
        note(dir.path(), &[orphan].into_iter().chain(hung).chain([last]).collect::<Vec<_>>()).await;
        let (control, methods, seen) = daemon(dir.path());
        let began = Instant::now();
        let restoring = start_restoring(&control, &methods);
        tokio::time::sleep(Duration::from_millis(100)).await;
        create(&methods, json!({"name": "lost", "takes": 0})).await;
        // A failed disk is retried while others are being opened.
        until("the orphan", Duration::from_secs(3), || control.disks.find("orphan").is_ok()).await;
        assert!(!restoring.is_finished());
        // The stuck tries free their places.
        assert_eq!(restoring.await.unwrap().absent, OF_A_STORE);
        assert!(began.elapsed() < PATIENCE * 2, "{:?}", began.elapsed());
        assert!(control.disks.find("last").is_ok());
        assert!(
            control.config.why_absent(2).contains("does not respond"),
            "{}",
            control.config.why_absent(2)
        );
        // No disk is tried twice, and calls that name a disk no longer wait.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(seen.running.get(), OF_A_STORE);
        let names = to_raw_value(&json!({"name": "hung0"})).unwrap();
        assert!(control.start_up.wait_for_call(true, Some(&names)).is_none());
        assert!(control.remove_disk(MODULE, "hung0").await.unwrap());
    });
}

#[test]
fn a_disk_that_is_removed_while_it_is_being_restored_does_not_come_back() {
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        note(dir.path(), &[json!({"name": "slow", "takes": 300}), json!({"name": "kept", "takes": 300})])
            .await;
        let (control, methods, seen) = daemon(dir.path());
        let restoring = start_restoring(&control, &methods);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(seen.running.get(), 2);
        assert!(control.remove_disk(MODULE, "slow").await.unwrap());
        assert_eq!(restoring.await.unwrap(), Restored { made: 1, absent: 0 });
        assert_eq!(seen.made.borrow().len(), 2, "the creation has succeeded");
        assert!(control.disks.find("slow").is_err() && control.disks.find("kept").is_ok());
        assert_eq!(control.config.noted(Subsystem::Bdev, "slow"), None);
        drop((control, methods));
        tokio::task::yield_now().await;
        let (_, records) = Store::open(dir.path()).unwrap();
        assert_eq!(records.len(), 1);
    });
}

#[test]
fn a_disk_that_waits_for_a_restored_disk_is_created() {
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        note(dir.path(), &[json!({"name": "orphan", "base_name": "lost", "takes": 0})]).await;
        let (control, methods, _) = daemon(dir.path());
        assert_eq!(restore(&control, &methods).await, Restored { made: 0, absent: 1 });
        let above = to_raw_value(&json!({"name": "above", "base_bdev_name": "orphan"})).unwrap();
        methods.call("bdev_passthru_create", Some(above)).await.unwrap();
        assert!(control.disks.find("above").is_err());
        create(&methods, json!({"name": "lost", "takes": 0})).await;
        until("the disk above", Duration::from_secs(5), || control.disks.find("above").is_ok()).await;
        assert_eq!(control.config.absent_count(), 0);
    });
}

#[test]
fn nothing_is_restored_while_the_daemon_ends() {
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        note(dir.path(), &[json!({"name": "orphan", "base_name": "lost", "takes": 0})]).await;
        let (control, methods, seen) = daemon(dir.path());
        assert_eq!(restore(&control, &methods).await, Restored { made: 0, absent: 1 });
        control.close().await;
        seen.made.borrow_mut().push("lost".into());
        tokio::time::sleep(RETRY_MAX * 2).await;
        assert_eq!(*seen.made.borrow(), ["lost"]);
        let params = json!({"ctrlr": "c", "dev_name": "lost"});
        let create = methods.call("vhost_create_blk_controller", Some(to_raw_value(&params).unwrap())).await;
        assert!(create.unwrap_err().to_string().contains("the daemon is ending"));
    });
}

#[test]
fn limits_that_are_not_restored_yet_are_changed_and_not_replaced() {
    in_local_set(async || {
        let dir = tempfile::TempDir::new().unwrap();
        let stored = json!({"name": "d", "rw_ios_per_sec": 1000});
        {
            let (control, _, _) = daemon(dir.path());
            control.config.made(Subsystem::Qos, "limits/d", "bdev_set_qos_limit", &stored);
        }
        let (control, methods, _) = daemon(dir.path());
        create(&methods, json!({"name": "d", "takes": 0})).await;
        let uuid = control.disks.find("d").unwrap().identity().uuid;
        let set = to_raw_value(&json!({"name": uuid, "r_mbytes_per_sec": 7})).unwrap();
        methods.call("bdev_set_qos_limit", Some(set)).await.unwrap();
        let limits = control.disks.find("d").unwrap().qos_limits();
        assert_eq!((limits.ios, limits.read_bytes), (1000, 7 << 20));
        let noted = control.config.noted(Subsystem::Qos, "limits/d").unwrap();
        assert_eq!(noted.params, json!({"name": "d", "rw_ios_per_sec": 1000, "r_mbytes_per_sec": 7}));
        assert_eq!(control.config.absent_count(), 0);
    });
}
