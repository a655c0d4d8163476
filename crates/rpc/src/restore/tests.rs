//! Many objects that take long to create, and clients during that time.

use super::*;
use crate::config::Subsystem;
use crate::methods::log::PrintLevel;
use crate::{Error, Phase, methods};
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
            control.config.made(Subsystem::Bdev, &p.name, CREATE, &p);
            Ok(p.name)
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
        assert_eq!((seen.most.get(), seen.made.borrow().len()), (AT_ONCE, DISKS));
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
