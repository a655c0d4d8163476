//! What was configured, as the calls that would configure it again. Control context.
//!
//! Every method that makes or changes an object notes it here, and whoever removes the object removes the note. The
//! notes stand in the order in which they were made, so that a disk comes before what is built on it.

use serde::Serialize;
use serde_json::Value;
use std::cell::RefCell;

/// The part of the daemon that an object belongs to: SPDK's name for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subsystem {
    /// Disks.
    Bdev,
    /// Controllers of virtual machines.
    VhostBlk,
}

impl Subsystem {
    /// All of them, each after those that it depends on.
    pub const ALL: [Self; 2] = [Self::Bdev, Self::VhostBlk];

    /// Its name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bdev => "bdev",
            Self::VhostBlk => "vhost_blk",
        }
    }

    /// What it needs.
    pub const fn depends_on(self) -> &'static [&'static str] {
        match self {
            Self::Bdev => &[],
            Self::VhostBlk => &["bdev"],
        }
    }
}

/// A call that makes an object.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Call {
    /// The method.
    pub method: &'static str,
    /// Its parameters.
    pub params: Value,
}

#[derive(Debug)]
struct Note {
    subsystem: Subsystem,
    object: String,
    call: Call,
}

/// All notes.
#[derive(Debug, Default)]
pub struct Config {
    notes: RefCell<Vec<Note>>,
}

impl Config {
    /// Notes the call that made `object`, in place of what made another of that name.
    pub fn made(&self, subsystem: Subsystem, object: &str, method: &'static str, params: &impl Serialize) {
        let params = serde_json::to_value(params).expect("parameters came as JSON");
        let note = Note { subsystem, object: object.to_owned(), call: Call { method, params } };
        self.removed(subsystem, object);
        self.notes.borrow_mut().push(note);
    }

    /// Changes a parameter of the call that made `object`.
    pub fn changed(&self, subsystem: Subsystem, object: &str, param: &str, value: impl Into<Value>) {
        let mut notes = self.notes.borrow_mut();
        if let Some(note) = notes.iter_mut().find(|n| n.subsystem == subsystem && n.object == object) {
            note.call.params[param] = value.into();
        }
    }

    /// Forgets `object`.
    pub fn removed(&self, subsystem: Subsystem, object: &str) {
        self.notes.borrow_mut().retain(|n| n.subsystem != subsystem || n.object != object);
    }

    /// Forgets all objects of `subsystem` but those that `exists` knows.
    pub fn retain(&self, subsystem: Subsystem, exists: impl Fn(&str) -> bool) {
        self.notes.borrow_mut().retain(|n| n.subsystem != subsystem || exists(&n.object));
    }

    /// The calls that make all objects of `subsystem`.
    pub fn calls(&self, subsystem: Subsystem) -> Vec<Call> {
        let notes = self.notes.borrow();
        notes.iter().filter(|n| n.subsystem == subsystem).map(|n| n.call.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn notes_follow_their_objects() {
        let config = Config::default();
        config.made(Subsystem::Bdev, "a", "bdev_null_create", &json!({"name": "a", "num_blocks": 1}));
        config.made(Subsystem::Bdev, "b", "bdev_null_create", &json!({"name": "b"}));
        config.made(Subsystem::VhostBlk, "a", "vhost_create_blk_controller", &json!({"ctrlr": "a"}));
        config.changed(Subsystem::Bdev, "a", "num_blocks", 2);
        config.removed(Subsystem::Bdev, "b");
        let bdevs = config.calls(Subsystem::Bdev);
        assert_eq!(bdevs.len(), 1);
        assert_eq!(bdevs[0].params, json!({"name": "a", "num_blocks": 2}));
        config.removed(Subsystem::Bdev, "a");
        assert_eq!(config.calls(Subsystem::VhostBlk).len(), 1);
    }
}
