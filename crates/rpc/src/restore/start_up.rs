//! The operations of the start-up for which clients must wait: the objects being restored, the file being loaded, and the end of
//! both. Control context.

use crate::config::{AbsentObject, Subsystem};
use serde_json::Value;
use serde_json::value::RawValue;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::rc::Rc;
use tokio::sync::{Notify, watch};

/// Parameters that name an object, or the object on which it is built.
const NAMES: [&str; 11] = [
    "name",
    "uuid",
    "filename",
    "ctrlr",
    "bdev_name",
    "dev_name",
    "base_bdev_name",
    "base_bdev",
    "base_name",
    "connect",
    "nqn",
];

/// The operations in progress until start-up is over.
#[derive(Debug)]
pub(crate) struct StartUp {
    /// Names, uuids and paths of objects that are about to be restored, as [`spellings`], each with the number of objects that
    /// have it.
    names: RefCell<HashMap<String, usize>>,
    /// Number of operations that delay the end of start-up.
    unfinished: Cell<usize>,
    /// Whether the file with which the daemon starts still has to be loaded.
    loads_file: Cell<bool>,
    /// Keys of the objects that are being tried.
    tried: RefCell<BTreeSet<u64>>,
    /// Whether a task retries failed objects.
    pub(crate) retries: Cell<bool>,
    /// Whether the next retry is due soon: an object has failed for the first time, or was created.
    pub(super) retry_soon: Cell<bool>,
    /// Notified when a disk that waited for its base could not be created.
    pub(crate) waiting_failed: Notify,
    /// Notified whenever one of these operations has ended.
    changed: watch::Sender<()>,
}

impl Default for StartUp {
    fn default() -> Self {
        Self {
            names: RefCell::default(),
            unfinished: Cell::default(),
            loads_file: Cell::default(),
            tried: RefCell::default(),
            retries: Cell::default(),
            retry_soon: Cell::default(),
            waiting_failed: Notify::new(),
            changed: watch::Sender::new(()),
        }
    }
}

/// Start-up is not over until this is dropped.
#[derive(Debug)]
pub struct Unfinished(Rc<StartUp>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.unfinished.set(self.0.unfinished.get() - 1);
        self.0.loads_file.set(false);
        self.0.changed.send_replace(());
    }
}

/// Calls that name the object wait until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    start_up: Rc<StartUp>,
    names: Vec<String>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut names = self.start_up.names.borrow_mut();
        for name in &self.names {
            if let Some(count) = names.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    names.remove(name);
                }
            }
        }
        drop(names);
        self.start_up.changed.send_replace(());
    }
}

/// The object with that key is being tried until this is dropped.
#[derive(Debug)]
pub(crate) struct Trying {
    start_up: Rc<StartUp>,
    key: u64,
}

impl Drop for Trying {
    fn drop(&mut self) {
        self.start_up.tried.borrow_mut().remove(&self.key);
    }
}

impl StartUp {
    /// Begins an operation, which ends when the result is dropped. With `loads_file`, clients' calls wait until then.
    pub fn begin(self: &Rc<Self>, loads_file: bool) -> Unfinished {
        self.unfinished.set(self.unfinished.get() + 1);
        self.loads_file.set(loads_file);
        Unfinished(Rc::clone(self))
    }

    /// Whether start-up is over.
    pub fn is_over(&self) -> bool {
        self.unfinished.get() == 0
    }

    /// Waits until start-up is over.
    pub async fn until_over(&self) {
        self.until(|| self.is_over()).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        let mut changed = self.changed.subscribe();
        while !is_so() {
            // The sender lives as long as the borrowed `self`.
            let _ = changed.changed().await;
        }
    }

    /// Makes calls that name one of these objects, or its disk by name or uuid, wait until the object was tried. By key.
    pub(super) fn hold_all(self: &Rc<Self>, objects: Vec<&AbsentObject>) -> HashMap<u64, Held> {
        let disks = objects.iter().filter(|object| object.subsystem == Subsystem::Bdev);
        let uuids = disks.filter_map(|disk| Some((&*disk.name, disk.text("uuid")?))).collect();
        objects.iter().map(|object| (object.key, self.hold(object, &uuids))).collect()
    }

    /// As [`StartUp::hold_all`], for one object; `uuids` are those of the disks, by name.
    fn hold(self: &Rc<Self>, object: &AbsentObject, uuids: &HashMap<&str, &str>) -> Held {
        let params = NAMES.iter().filter_map(|param| object.text(param));
        let names: BTreeSet<&str> = params.chain([&*object.name]).collect();
        let uuids = names.iter().filter_map(|name| uuids.get(name));
        let names: BTreeSet<String> = names.iter().chain(uuids).flat_map(|name| spellings(name)).collect();
        let mut held = self.names.borrow_mut();
        for name in &names {
            *held.entry(name.clone()).or_default() += 1;
        }
        Held { start_up: Rc::clone(self), names: names.into_iter().collect() }
    }

    /// Marks an object as being tried. `None` if another task is trying it.
    pub fn try_object(self: &Rc<Self>, key: u64) -> Option<Trying> {
        self.tried.borrow_mut().insert(key).then(|| Trying { start_up: Rc::clone(self), key })
    }

    /// The operations for which a client's call with these parameters must wait: the loading of the file with which the daemon
    /// starts; and, if the call `changes` something, the restoration of the objects that it names.
    pub fn wait_for_call(
        self: &Rc<Self>,
        changes: bool,
        params: Option<&RawValue>,
    ) -> Option<impl Future<Output = ()> + use<>> {
        let names = if changes && !self.names.borrow().is_empty() { texts(params) } else { Vec::new() };
        let start_up = Rc::clone(self);
        let may_go = move || {
            let held = start_up.names.borrow();
            !start_up.loads_file.get() && !names.iter().any(|name| held.contains_key(name))
        };
        let start_up = Rc::clone(self);
        if may_go() {
            return None;
        }
        Some(async move { start_up.until(may_go).await })
    }
}

/// The strings by which a name, uuid or path is compared: in lower case, as it is and as an absolute path. Hexadecimal digits
/// have two cases, and a path has several spellings; symbolic links are not followed, since that may wait for a file system. A
/// call that names another object may have to wait too, which does no harm.
fn spellings(text: &str) -> impl Iterator<Item = String> + use<> {
    // By components: without doubled and trailing slashes.
    let path = std::path::absolute(text).ok().map(|path| path.components().collect::<PathBuf>());
    let path = path.and_then(|path| path.to_str().map(str::to_ascii_lowercase));
    std::iter::once(text.to_ascii_lowercase()).chain(path)
}

/// The [`spellings`] of all strings among a call's parameters: the call names an object by one of these.
fn texts(params: Option<&RawValue>) -> Vec<String> {
    let params = params.and_then(|params| serde_json::from_str(params.get()).ok());
    let Some(Value::Object(params)) = params else { return Vec::new() };
    params.values().filter_map(Value::as_str).flat_map(spellings).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Call, Subsystem};
    use serde_json::json;
    use std::pin::pin;
    use std::task::{Context, Waker};

    fn disk(name: &str, filename: &str) -> AbsentObject {
        let params = json!({"name": name, "filename": filename, "lock": "in_use"});
        let call = Call { method: "bdev_uring_create".into(), params };
        AbsentObject { key: 1, subsystem: Subsystem::Bdev, name: name.into(), call }
    }

    fn waits(start_up: &Rc<StartUp>, params: Value) -> bool {
        let params = serde_json::value::to_raw_value(&params).unwrap();
        assert!(start_up.loads_file.get() || start_up.wait_for_call(false, Some(&params)).is_none());
        start_up.wait_for_call(true, Some(&params)).is_some()
    }

    #[test]
    fn calls_wait_for_the_objects_that_they_name() {
        let start_up = Rc::new(StartUp::default());
        let none = HashMap::new();
        let held = (start_up.hold(&disk("a", "/a"), &none), start_up.hold(&disk("b", "/a"), &none));
        assert!(waits(&start_up, json!({"name": "a"})));
        assert!(waits(&start_up, json!({"ctrlr": "new", "dev_name": "b"})));
        assert!(waits(&start_up, json!({"name": "c", "filename": "/a"})));
        for path in ["//a", "/./a", "/a/", "/.//a/."] {
            assert!(waits(&start_up, json!({"name": "c", "filename": path})), "{path}");
        }
        assert!(!waits(&start_up, json!({"name": "c", "filename": "/c", "lock": "in_use"})));
        assert!(!waits(&start_up, json!([])));
        assert!(start_up.wait_for_call(true, None).is_none());
        drop(held.0);
        assert!(!waits(&start_up, json!({"name": "a"})));
        assert!(waits(&start_up, json!({"name": "c", "filename": "/a"})), "the file of the other disk");
        let params = serde_json::value::to_raw_value(&json!({"name": "b"})).unwrap();
        let mut waiting = pin!(start_up.wait_for_call(true, Some(&params)).unwrap());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        drop(held.1);
        assert!(waiting.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn calls_that_name_a_file_relative_to_the_directory_wait() {
        let start_up = Rc::new(StartUp::default());
        let here = std::env::current_dir().unwrap();
        let _held = start_up.hold(&disk("a", "images/a.img"), &HashMap::new());
        for path in ["./images//a.img".to_owned(), format!("{}/images/a.img", here.display())] {
            assert!(waits(&start_up, json!({"name": "c", "filename": path})), "{path}");
        }
        assert!(!waits(&start_up, json!({"name": "c", "filename": "a.img"})));
    }

    #[test]
    fn calls_that_name_a_disk_by_its_uuid_wait_for_its_settings() {
        let uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
        let start_up = Rc::new(StartUp::default());
        let mut disk = disk("a", "/a");
        disk.call.params["uuid"] = uuid.into();
        let call = Call { method: "bdev_set_qos_limit".into(), params: json!({"name": "a"}) };
        let limits = AbsentObject { key: 2, subsystem: Subsystem::Qos, name: "limits/a".into(), call };
        let mut held = start_up.hold_all(vec![&disk, &limits]);
        held.remove(&1).unwrap();
        assert!(waits(&start_up, json!({"name": uuid.to_uppercase()})));
        held.remove(&2).unwrap();
        assert!(!waits(&start_up, json!({"name": uuid})));
    }

    #[test]
    fn all_calls_wait_while_a_file_is_loaded() {
        let start_up = Rc::new(StartUp::default());
        let mut over = pin!(start_up.until_over());
        let mut cx = Context::from_waker(Waker::noop());
        let unfinished = start_up.begin(true);
        assert!(waits(&start_up, json!({})) && start_up.wait_for_call(false, None).is_some());
        assert!(over.as_mut().poll(&mut cx).is_pending());
        drop(unfinished);
        assert!(!waits(&start_up, json!({})));
        assert!(over.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn an_object_is_tried_once_at_a_time() {
        let start_up = Rc::new(StartUp::default());
        let trying = start_up.try_object(7).unwrap();
        assert!(start_up.try_object(7).is_none() && start_up.try_object(8).is_some());
        drop(trying);
        assert!(start_up.try_object(7).is_some());
    }
}
