//! NVMe drives that are attached by themselves, as `HotInNvme0` and so on, when they appear bound to vfio-pci. Control context.
//!
//! The host's functions are read from sysfs in a thread: when the kernel tells that functions have changed, and now and then in
//! case that a message was lost; where the kernel tells nothing, once a period. A function is left alone if it is attached, if
//! the configuration names it, and if a client has detached it, until it has been away. An attach that fails, for example because
//! another process has the function, is repeated after a while. Drives are attached at the same time.

use super::attach::ATTACH;
use super::{Control, address};
use crate::{Error, Methods};
use aryk_bdev_nvme::Location;
use aryk_pci::Address;
use aryk_pci::sysfs::{FunctionInfo, Sysfs};
use aryk_pci::uevents::{Uevent, Uevents};
use rustix::io::Errno;
use serde_json::json;
use serde_json::value::to_raw_value;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// The shortest time between two scans without an event, where the kernel reports events: a message may be lost.
const FALLBACK: Duration = Duration::from_secs(5);
/// Time between an event and the look for it. More events follow the first, and `aryk nvme bind` sets the owner of the drive's
/// file after it has bound the drive.
const SETTLE: Duration = Duration::from_millis(100);
/// Time after the first failed attach of a drive before the next one; it doubles with each, up to the longest.
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Drives that are attached at the same time: a broken one takes up to minutes, and delays no other.
const ATTEMPTS_MAX: usize = 16;

/// Looks for new drives while hot-plug is enabled, as long as the daemon lives. Needs a tokio `LocalSet`.
pub(crate) async fn follow(control: Weak<Control>, methods: Weak<Methods<Control>>) {
    let Some(of_daemon) = control.upgrade() else { return };
    let (mut settings, start_up) = (of_daemon.nvme.hotplug.subscribe(), Rc::clone(&of_daemon.start_up));
    drop(of_daemon);
    let (mut attempts, mut events) = (Attempts::default(), None);
    loop {
        let Some(period) = *settings.borrow_and_update() else {
            events = None;
            if settings.changed().await.is_err() {
                return;
            }
            continue;
        };
        // Opened before the look, which finds what happened until then.
        let events = events.get_or_insert_with(|| Events::open(period));
        if !start_up.is_over() {
            tokio::select! {
                () = start_up.until_over() => {}
                _ = settings.changed() => {}
            }
            continue;
        }
        {
            let (Some(control), Some(methods)) = (control.upgrade(), methods.upgrade()) else { return };
            if control.is_closing() {
                return;
            }
            look(&control, &methods, &mut attempts).await;
        }
        let next = Instant::now() + events.period(period);
        let next = attempts.next().map_or(next, |again| next.min(again));
        tokio::select! {
            changed = settings.changed() => if changed.is_err() { return },
            () = events.happened() => {}
            () = attempts.ended() => {}
            () = sleep_until(next) => {}
        }
    }
}

/// Begins to attach the drives that are new.
async fn look(control: &Rc<Control>, methods: &Rc<Methods<Control>>, attempts: &mut Attempts) {
    let read = tokio::task::spawn_blocking(|| Sysfs::default().nvme_functions()).await;
    // A host without PCI has no such files.
    let functions = read.map(Result::unwrap_or_default).unwrap_or_default();
    let chosen = choose(control, &functions);
    attempts.forget_others(&chosen);
    for address in chosen {
        if attempts.may_begin(address) {
            let name = free_name(control, attempts);
            attempts.begin(address, name.clone(), attach(Rc::clone(methods), address, name));
        }
    }
}

/// The kernel's messages about PCI functions; `None` if it sends none here.
struct Events(Option<AsyncFd<Uevents>>);

impl Events {
    fn open(period: Duration) -> Self {
        let opened = Uevents::open().map_err(|error| error.to_string()).and_then(|uevents| {
            #[expect(
                deprecated,
                reason = "unsound for types whose descriptor may change; this has an OwnedFd"
            )]
            AsyncFd::with_interest(uevents, Interest::READABLE).map_err(|error| error.to_string())
        });
        let opened = opened.inspect_err(|error| {
            tracing::info!(
                error,
                ?period,
                "no events of the kernel here: hot-plug reads sysfs once a period"
            );
        });
        Self(opened.ok())
    }

    /// Time between two looks without an event. `given` is the client's.
    fn period(&self, given: Duration) -> Duration {
        if self.0.is_some() { given.max(FALLBACK) } else { given }
    }

    /// Waits until functions have changed, and the changes that follow are over.
    async fn happened(&mut self) {
        let Some(uevents) = &self.0 else { return std::future::pending().await };
        let changed = async {
            change_of(uevents).await?;
            match timeout(SETTLE, async { while change_of(uevents).await.is_ok() {} }).await {
                Ok(()) | Err(_) => Ok::<_, std::io::Error>(()),
            }
        };
        if let Err(error) = changed.await {
            tracing::warn!(%error, "no more events of the kernel: hot-plug reads sysfs once a period");
            self.0 = None;
        }
    }
}

/// Waits for the next change of functions.
async fn change_of(uevents: &AsyncFd<Uevents>) -> std::io::Result<()> {
    loop {
        let mut ready = uevents.readable().await?;
        match ready.try_io(|uevents| Ok(uevents.get_ref().next()?)) {
            Ok(Ok(Uevent::FunctionsChanged)) => return Ok(()),
            Ok(Ok(Uevent::Other)) | Err(_) => {}
            Ok(Err(error)) => return Err(error),
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

/// The drives that are being attached, and those for which that has failed.
#[derive(Default)]
struct Attempts {
    running: JoinSet<(Address, bool)>,
    /// The names of the controllers.
    names: BTreeMap<Address, String>,
    failed: BTreeMap<Address, Failed>,
}

/// A drive that could not be attached.
struct Failed {
    /// When the next attempt may begin.
    again: Instant,
    /// The time between the last attempt and that one.
    delay: Duration,
}

impl Attempts {
    /// Waits until an attempt has ended.
    async fn ended(&mut self) {
        let Some(ended) = self.running.join_next().await else { return std::future::pending().await };
        let (address, is_attached) = ended.expect("no attempt panics, and none is cancelled");
        self.names.remove(&address);
        if is_attached {
            self.failed.remove(&address);
        } else {
            let before = self.failed.get(&address).map(|failed| failed.delay);
            let delay = before.map_or(RETRY_MIN, |delay| (delay * 2).min(RETRY_MAX));
            self.failed.insert(address, Failed { again: Instant::now() + delay, delay });
        }
    }

    /// Forgets the failures of drives that are no longer to be attached: they have gone, or are attached.
    fn forget_others(&mut self, chosen: &[Address]) {
        let names = &self.names;
        self.failed.retain(|address, _| chosen.contains(address) || names.contains_key(address));
    }

    /// When a drive whose attach has failed is to be attached again.
    fn next(&self) -> Option<Instant> {
        let waiting = self.failed.iter().filter(|(address, _)| !self.names.contains_key(address));
        let next = waiting.map(|(_, failed)| failed.again).min();
        // The end of an attempt comes before, if no more may run.
        next.filter(|_| self.running.len() < ATTEMPTS_MAX)
    }

    fn may_begin(&self, address: Address) -> bool {
        let is_due = self.failed.get(&address).is_none_or(|failed| Instant::now() >= failed.again);
        is_due && !self.names.contains_key(&address) && self.running.len() < ATTEMPTS_MAX
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
    async fn a_drive_that_cannot_be_attached_is_tried_less_and_less_often() {
        let at: Address = "01:00.0".parse().unwrap();
        let attempts = async {
            let mut attempts = Attempts::default();
            let mut delays = Vec::new();
            for _ in 0..5 {
                attempts.begin(at, "HotInNvme0".into(), async { false });
                attempts.forget_others(&[]);
                attempts.ended().await;
                assert!(!attempts.may_begin(at) && attempts.next().is_some());
                delays.push(attempts.failed[&at].delay.as_millis());
            }
            assert_eq!(delays, [500, 1000, 2000, 4000, 5000]);
            attempts.forget_others(&[at]);
            assert!(!attempts.may_begin(at));
            // It has gone, and may come back.
            attempts.forget_others(&[]);
            assert!(attempts.may_begin(at) && attempts.next().is_none());
            attempts.begin(at, "HotInNvme0".into(), async { true });
            attempts.ended().await;
            assert!(attempts.may_begin(at) && attempts.next().is_none());
        };
        tokio::task::LocalSet::new().run_until(attempts).await;
    }

    #[tokio::test(flavor = "current_thread")]
    async fn events_of_the_kernel_make_looks_rare() {
        let of_client = [Duration::from_millis(100), Duration::from_secs(10)];
        let silent = Events(None);
        assert_eq!(of_client.map(|period| silent.period(period)), of_client);
        let told = Events::open(of_client[0]);
        if told.0.is_some() {
            assert_eq!(of_client.map(|period| told.period(period)), [FALLBACK, of_client[1]]);
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_broken_drive_delays_no_other() {
        let at = |bus: usize| format!("{bus:02x}:00.0").parse::<Address>().unwrap();
        let local = tokio::task::LocalSet::new();
        let attempts = async {
            let mut attempts = Attempts::default();
            attempts.begin(at(0), "HotInNvme0".into(), std::future::pending());
            for (bus, is_attached) in [(1, true), (2, false)] {
                assert!(attempts.may_begin(at(bus)));
                attempts.begin(at(bus), format!("HotInNvme{bus}"), async move { is_attached });
            }
            attempts.ended().await;
            attempts.ended().await;
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
