//! NVMe drives that are attached by themselves, as `HotInNvme0` and so on, when they appear bound to vfio-pci. Control context.
//!
//! The host's functions are read from sysfs in a thread, once a period. A function is left alone if it is attached, if the
//! configuration names it, and if a client has detached it, until it has been away. An attach that fails, for example because
//! another process has the function, is repeated after a while. Drives are attached at the same time.

use super::attach::ATTACH;
use super::{Control, address};
use crate::{Error, Methods};
use aryk_bdev_nvme::Location;
use aryk_pci::Address;
use aryk_pci::sysfs::{FunctionInfo, Sysfs};
use rustix::io::Errno;
use serde_json::json;
use serde_json::value::to_raw_value;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Time after a failed attach before the next one.
const RETRY: Duration = Duration::from_secs(5);
/// Drives that are attached at the same time: a broken one takes up to minutes, and delays no other.
const ATTEMPTS_MAX: usize = 16;

/// Looks for new drives while hot-plug is enabled, as long as the daemon lives. Needs a tokio `LocalSet`.
pub(crate) async fn follow(control: Weak<Control>, methods: Weak<Methods<Control>>) {
    let Some(mut settings) = control.upgrade().map(|control| control.nvme.hotplug.subscribe()) else {
        return;
    };
    let mut attempts = Attempts::default();
    loop {
        let period = *settings.borrow_and_update();
        match period {
            // A change of the settings ends the wait.
            Some(period) => _ = timeout(period, settings.changed()).await,
            None if settings.changed().await.is_err() => return,
            None => {}
        }
        let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
        if control.is_closing() {
            return;
        }
        if period.is_none() || !control.start_up.is_over() {
            continue;
        }
        let read = tokio::task::spawn_blocking(|| Sysfs::default().nvme_functions()).await;
        // A host without PCI has no such files.
        let Ok(Ok(functions)) = read else { continue };
        attempts.collect();
        for address in choose(&control, &functions) {
            if attempts.may_begin(address) {
                let name = free_name(&control, &attempts);
                attempts.begin(address, name.clone(), attach(Rc::clone(&methods), address, name));
            }
        }
    }
}

/// Attaches a drive. Returns whether that succeeded.
async fn attach(methods: Rc<Methods<Control>>, address: Address, name: String) -> bool {
    let params = json!({"name": name, "trtype": "PCIe", "traddr": address.to_string()});
    let params = to_raw_value(&params).expect("a call is valid JSON");
    let result = methods.call(ATTACH, Some(params)).await;
    match &result {
        Ok(_) => tracing::info!(%address, controller = name, "an NVMe drive was plugged in"),
        Err(error) => log_refusal(address, error),
    }
    result.is_ok()
}

/// Logs why a drive was not attached. A controller that waited for it may go on with it, which is no failure.
fn log_refusal(address: Address, error: &Error) {
    let is_taken_over = Error::errno(Errno::ALREADY, "").code() == error.code();
    if is_taken_over {
        tracing::info!(%address, %error, "an NVMe drive was plugged in, and is attached");
    } else {
        tracing::warn!(%address, %error, "an NVMe drive was plugged in, but cannot be attached");
    }
}

/// The drives that are being attached, and those for which that failed lately.
#[derive(Default)]
struct Attempts {
    running: JoinSet<(Address, bool)>,
    /// The names of the controllers.
    names: BTreeMap<Address, String>,
    failed: BTreeMap<Address, Instant>,
}

impl Attempts {
    /// Takes the attempts that have ended.
    fn collect(&mut self) {
        while let Some(ended) = self.running.try_join_next() {
            let (address, is_attached) = ended.expect("no attempt panics, and none is cancelled");
            self.names.remove(&address);
            if !is_attached {
                self.failed.insert(address, Instant::now());
            }
        }
        self.failed.retain(|_, at| at.elapsed() < RETRY);
    }

    fn may_begin(&self, address: Address) -> bool {
        let is_known = self.names.contains_key(&address) || self.failed.contains_key(&address);
        !is_known && self.running.len() < ATTEMPTS_MAX
    }

    fn begin(&mut self, address: Address, name: String, attach: impl Future<Output = bool> + 'static) {
        self.names.insert(address, name);
        self.running.spawn_local(async move { (address, attach.await) });
    }
}

/// The functions to attach.
fn choose(control: &Control, functions: &[FunctionInfo]) -> Vec<Address> {
    let there: BTreeSet<Address> = functions.iter().map(|function| function.address).collect();
    let mut released = control.nvme.released.borrow_mut();
    released.retain(|address| there.contains(address));
    let configured = control.config.absent_objects_that(|call| call.method == ATTACH);
    let configured: Vec<Address> =
        configured.iter().filter_map(|object| address(object.text("traddr")?).ok()).collect();
    let is_new = |function: &&FunctionInfo| {
        let address = function.address;
        function.is_bound_to_vfio()
            && !released.contains(&address)
            && !configured.contains(&address)
            && control.nvme.controllers.find_at(&Location::Pci(address)).is_none()
    };
    functions.iter().filter(is_new).map(|function| function.address).collect()
}

/// The first name of SPDK's series that no controller has or is about to have.
fn free_name(control: &Control, attempts: &Attempts) -> String {
    let is_free = |name: &String| {
        !attempts.names.values().any(|given| given == name)
            && control.nvme.controllers.find(name).is_err()
            && control.config.noted(crate::config::Subsystem::Nvme, name).is_none()
    };
    (0_u32..)
        .map(|number| format!("HotInNvme{number}"))
        .find(is_free)
        .expect("fewer controllers than numbers")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Subsystem;
    use crate::methods::log::PrintLevel;
    use aryk_reactor::{Options, Reactors};
    use std::path::Path;
    use std::rc::Rc;

    fn function(address: &str, driver: &str) -> FunctionInfo {
        FunctionInfo {
            address: address.parse().unwrap(),
            vendor: 0,
            device: 0,
            class: aryk_pci::sysfs::CLASS_NVME,
            driver: Some(driver.into()),
            group: Some(1),
            numa_node: None,
        }
    }

    #[test]
    fn drives_that_are_free_and_not_given_back_are_chosen() {
        let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
        let control = Control::new(reactors, Path::new("/nowhere"), 128, PrintLevel::Notice, |_| {});
        let functions =
            [function("01:00.0", "vfio-pci"), function("02:00.0", "nvme"), function("03:00.0", "vfio-pci")];
        let chosen = |functions: &[FunctionInfo]| -> Vec<String> {
            choose(&control, functions).iter().map(ToString::to_string).collect()
        };
        assert_eq!(chosen(&functions), ["0000:01:00.0", "0000:03:00.0"]);
        // A configured drive is left to the restoration, under any spelling of its address.
        control.config.made(
            Subsystem::Nvme,
            "HotInNvme0",
            ATTACH,
            &json!({"name": "HotInNvme0", "traddr": "0000.03.00.0"}),
        );
        assert_eq!(free_name(&control, &Attempts::default()), "HotInNvme1");
        control.config.lost(Subsystem::Nvme, "HotInNvme0").unwrap();
        assert_eq!(
            (chosen(&functions), free_name(&control, &Attempts::default())),
            (vec!["0000:01:00.0".into()], "HotInNvme1".into())
        );
        // A drive that a client has detached comes back only by being plugged.
        control.nvme.released.borrow_mut().insert("01:00.0".parse().unwrap());
        assert!(chosen(&functions).is_empty());
        assert!(chosen(&functions[1..]).is_empty());
        assert_eq!(chosen(&functions), ["0000:01:00.0"]);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_broken_drive_delays_no_other() {
        let at = |bus: usize| format!("{bus:02x}:00.0").parse::<Address>().unwrap();
        let turn = tokio::task::yield_now;
        let local = tokio::task::LocalSet::new();
        let attempts = async {
            let mut attempts = Attempts::default();
            attempts.begin(at(0), "HotInNvme0".into(), std::future::pending());
            for (bus, is_attached) in [(1, true), (2, false)] {
                assert!(attempts.may_begin(at(bus)));
                attempts.begin(at(bus), format!("HotInNvme{bus}"), async move { is_attached });
            }
            while attempts.running.len() > 1 {
                turn().await;
                attempts.collect();
            }
            let may_begin = [0, 1, 2].map(|bus| attempts.may_begin(at(bus)));
            assert_eq!(may_begin, [false, true, false], "one is still running, one has failed just now");
            assert_eq!(attempts.names.len(), 1);
            for bus in 3..3 + ATTEMPTS_MAX - 1 {
                assert!(attempts.may_begin(at(bus)));
                attempts.begin(at(bus), String::new(), std::future::pending());
            }
            assert!(!attempts.may_begin(at(99)), "no more at the same time");
        };
        local.run_until(attempts).await;
    }
}
