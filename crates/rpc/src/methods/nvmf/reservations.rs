//! Keeps the reservations of hosts in the state store. Control context.
//!
//! They outlive the daemon, as all state on which hosts rely does: its restart is no loss of power for them. The restart of this
//! host is one: only what is to persist through a loss of power (PTPL) outlives that. They belong to the namespace and its disk:
//! another disk at the same place has none.

use super::object::namespace_name;
use crate::Control;
use crate::config::Subsystem;
use aryk_nvme_fabrics::reservation::{Kind, Registrant, State as Reservations};
use aryk_nvmf::{SaveRequest, Saver};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};
use uuid::Uuid;

/// Stores reservations.
#[derive(Debug)]
pub(super) struct Keeper {
    control: Weak<Control>,
    /// Boot ID of the host.
    boot: Rc<str>,
}

/// The stored reservations of a namespace.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    disk: Uuid,
    /// Boot ID of the host at the time.
    boot: String,
    registrants: Vec<StoredRegistrant>,
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Holder>,
    persists: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredRegistrant {
    host: Uuid,
    key: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    host: Uuid,
    kind: u8,
}

impl Stored {
    fn new(state: &Reservations, disk: Uuid, boot: &str) -> Self {
        let registrant = |of: &Registrant| StoredRegistrant { host: Uuid::from_bytes(of.host), key: of.key };
        let holder = |(host, kind)| Holder { host: Uuid::from_bytes(host), kind: kind as u8 };
        Self {
            disk,
            boot: boot.to_owned(),
            registrants: state.registrants.iter().map(registrant).collect(),
            holder: state.holder.map(holder),
            persists: state.persists,
        }
    }

    /// What is still valid, for this disk and this boot ID of the host.
    fn state(self, disk: Uuid, boot: &str) -> Reservations {
        if self.disk != disk || !self.persists && self.boot != boot {
            return Reservations::default();
        }
        let registrant = |of: StoredRegistrant| Registrant { host: of.host.into_bytes(), key: of.key };
        let holder = |of: Holder| Some((of.host.into_bytes(), Kind::from_code(of.kind)?));
        Reservations {
            registrants: self.registrants.into_iter().map(registrant).collect(),
            holder: self.holder.and_then(holder),
            persists: self.persists,
        }
    }
}

impl Keeper {
    /// Stores the reservations of a target.
    pub fn saver(&self, target: &str) -> Rc<Saver> {
        let (control, boot, target) = (Weak::clone(&self.control), Rc::clone(&self.boot), target.to_owned());
        Rc::new(move |request| {
            let SaveRequest { subsystem, nsid, disk, state, durable, done } = request;
            let Some(control) = control.upgrade() else { return };
            let name = namespace_name(Some(&target), subsystem.as_str(), nsid.into());
            let stored = Stored::new(&state, Uuid::from_bytes(disk), &boot);
            let stored = (state != Reservations::default())
                .then(|| serde_json::to_value(stored).expect("the type is made for JSON"));
            let written = control.config.save_state(Subsystem::Reservations, &name, stored, durable);
            drop(tokio::task::spawn_local(async move {
                let is_stored = match written {
                    Some(written) => matches!(written.await, Ok(Ok(()))),
                    None => true,
                };
                // The target may have ended.
                let _ = done.send(is_stored);
            }));
        })
    }
}

impl super::State {
    /// The stored reservations of the namespace with this name, on a disk with this UUID.
    pub(super) fn stored(&self, control: &Control, namespace: &str, disk: Uuid) -> Reservations {
        let Some(keeper) = self.keeper.get() else { return Reservations::default() };
        let Some(stored) = control.config.state(Subsystem::Reservations, namespace) else {
            return Reservations::default();
        };
        match serde_json::from_value::<Stored>(stored) {
            Ok(stored) => stored.state(disk, &keeper.boot),
            Err(error) => {
                tracing::error!(namespace, %error, "cannot parse the stored reservations of the namespace; they are lost");
                Reservations::default()
            }
        }
    }
}

/// Removes the stored reservations of namespaces that are removed.
pub(super) fn forget_gone(control: &Control) {
    // A host may reserve a namespace before the call that adds it has noted it.
    let mut existing = BTreeSet::new();
    for (target, named) in control.nvmf.targets.borrow().iter() {
        for info in named.target.list() {
            let name = |nsid: &u32| namespace_name(Some(target), info.made_of.nqn.as_str(), u64::from(*nsid));
            existing.extend(info.namespaces.keys().map(name));
        }
    }
    let is_noted = |name: &str| control.config.noted(Subsystem::Nvmf, name).is_some();
    control.config.retain_states(Subsystem::Reservations, |name| existing.contains(name) || is_noted(name));
}

/// Stores the reservations that hosts make from now on, if a state store is used. Must be called before a target exists.
///
/// # Errors
/// The host's boot ID cannot be read.
pub fn keep(control: &Rc<Control>) -> std::io::Result<()> {
    if control.config.has_store() {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().into();
        let keeper = Keeper { control: Rc::downgrade(control), boot };
        control.nvmf.keeper.set(keeper).expect("it is set once");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_persists_outlives_the_host_and_the_rest_the_daemon() {
        let disk = Uuid::new_v4();
        let registrants = vec![Registrant { host: [7; 16], key: u64::MAX }];
        let held =
            Reservations { registrants, holder: Some(([7; 16], Kind::WriteExclusive)), persists: false };
        let stored = |state: &Reservations| {
            let stored = serde_json::to_value(Stored::new(state, disk, "monday")).unwrap();
            serde_json::from_value::<Stored>(stored).unwrap()
        };
        assert_eq!(stored(&held).state(disk, "monday"), held, "a restart of the daemon");
        assert_eq!(stored(&held).state(disk, "tuesday"), Reservations::default(), "a restart of the host");
        let persists = Reservations { persists: true, ..held };
        assert_eq!(stored(&persists).state(disk, "tuesday"), persists);
        assert_eq!(
            stored(&persists).state(Uuid::new_v4(), "monday"),
            Reservations::default(),
            "another disk"
        );
    }
}
