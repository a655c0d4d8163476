//! The registry's disks, and the data about them that only the control plane needs. Control context.

use crate::config::Subsystem;
use crate::methods::details::Details;
use crate::methods::notify::{Events, Kind};
use crate::{Error, journal};
use aryk_bdev::{Bdev, Change, QosGroups, Registry, RemovalStep};
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// How long a removal waits for a disk's device to close.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);

/// All disks, with the data of the methods that created some of them.
#[derive(Debug)]
pub struct Disks {
    /// All disks.
    pub registry: Arc<Registry>,
    /// Groups of disks with common limits.
    pub groups: QosGroups,
    made: RefCell<HashMap<String, Made>>,
    /// Names of disks that calls have created, and that were removed by no call.
    lost: RefCell<BTreeSet<String>>,
    /// Names of removed disks, for [`Disks::take_gone`].
    gone: RefCell<Vec<String>>,
    /// Notified of each new disk.
    grown: Arc<watch::Sender<()>>,
    /// Events about disks.
    pub(crate) events: Arc<Events>,
}

/// A disk that a method created.
#[derive(Debug)]
struct Made {
    module: &'static str,
    details: Details,
}

impl Default for Disks {
    fn default() -> Self {
        let registry = Arc::new(Registry::new());
        let (grown, events) = (Arc::new(watch::Sender::new(())), Arc::new(Events::default()));
        let (of_observer, events_of) = (Arc::clone(&grown), Arc::clone(&events));
        registry.observe(move |change, bdev| {
            if let Some(kind) = Kind::of(change) {
                events_of.note(kind, bdev.name());
            }
            if change == Change::Added {
                of_observer.send_replace(());
            }
        });
        Self {
            registry,
            groups: QosGroups::default(),
            made: RefCell::default(),
            lost: RefCell::default(),
            gone: RefCell::default(),
            grown,
            events,
        }
    }
}

impl Disks {
    /// Notes which module has created a registered disk; `details` is the disk's part of `bdev_get_bdevs` beyond what all disks
    /// have.
    pub(crate) fn made(&self, bdev: &Bdev, module: &'static str, details: Details) {
        journal::made(Subsystem::Bdev, bdev.name());
        self.made.borrow_mut().insert(bdev.name().to_owned(), Made { module, details });
    }

    /// Whether a call has created the disk of that name, and its notes have not been removed yet.
    pub(crate) fn is_made(&self, name: &str) -> bool {
        self.made.borrow().contains_key(name) || self.gone.borrow().iter().any(|gone| gone == name)
    }

    /// The disk with that name, alias or uuid, if one of `modules` has created it.
    ///
    /// # Errors
    /// `ENODEV`.
    pub fn find_made_by(&self, modules: &[&str], name: &str) -> Result<Arc<Bdev>, Error> {
        let bdev = self.find(name)?;
        match self.made.borrow().get(bdev.name()) {
            Some(made) if modules.contains(&made.module) => Ok(bdev),
            Some(_) | None => Err(Error::no_device(&format!("{} disk", modules.join(" or ")), name)),
        }
    }

    /// Removes a disk that `module` has created, and the disks built on it, after all openers have closed it.
    ///
    /// # Errors
    /// `ENODEV`, `EBUSY`.
    pub async fn remove(&self, module: &'static str, name: &str) -> Result<(), Error> {
        let bdev = self.find_made_by(&[module], name)?;
        self.unmake(bdev.name()).await
    }

    /// As [`Disks::remove`], for a disk of any module, by its name.
    pub(crate) async fn unmake(&self, name: &str) -> Result<(), Error> {
        let gone = |name: &str| {
            self.made.borrow_mut().remove(name);
            self.gone.borrow_mut().push(name.to_owned());
        };
        self.remove_within_patience(name, gone).await
    }

    /// Removes a disk. It waits for openers and for requests in flight, however long that takes, but gives up on a device that
    /// does not close: then nothing is in flight any more, and the disk stays, to be removed again.
    async fn remove_within_patience(&self, name: &str, gone: impl Fn(&str)) -> Result<(), Error> {
        let closing: RefCell<Option<(String, Instant)>> = RefCell::default();
        let tell = |step, name: &str| match step {
            RemovalStep::Closing => *closing.borrow_mut() = Some((name.to_owned(), Instant::now())),
            RemovalStep::Gone => {
                closing.take();
                gone(name);
            }
        };
        let stuck = async {
            loop {
                sleep(CLOSE_PATIENCE / 10).await;
                if let Some((name, since)) = &*closing.borrow()
                    && since.elapsed() >= CLOSE_PATIENCE
                {
                    return name.clone();
                }
            }
        };
        tokio::select! {
            removed = self.registry.remove_telling(name, tell) => Ok(removed?),
            disk = stuck => {
                tracing::warn!(disk, "the disk's device does not close: its removal is given up after {CLOSE_PATIENCE:?}");
                let why = format!("the device of '{disk}' does not close; delete the disk again to try again");
                Err(Error::errno(Errno::TIMEDOUT, why))
            }
        }
    }

    /// Notes that the disks `removed` are gone, which no call of theirs created, and those of calls that were built on them.
    pub(crate) fn note_gone(&self, removed: &[String]) {
        let mut gone = self.gone.borrow_mut();
        gone.extend(removed.iter().cloned());
        gone.extend(
            self.made.borrow_mut().extract_if(|name, _| self.find(name).is_err()).map(|(name, _)| name),
        );
    }

    /// The disks that calls have created, and that were removed with the disk below them by no call.
    pub(crate) fn take_lost(&self) -> Vec<String> {
        let mut made = self.made.borrow_mut();
        let lost = made.extract_if(|name, _| self.find(name).is_err()).map(|(name, _)| name);
        let lost: Vec<String> = lost.collect();
        self.lost.borrow_mut().extend(lost.iter().cloned());
        lost
    }

    /// Whether a disk that exists was lost before; says so once.
    pub(crate) fn has_come_back(&self, name: &str) -> bool {
        self.lost.borrow_mut().remove(name)
    }

    /// The names of disks that were removed since the last call, and do not exist again.
    pub(crate) fn take_gone(&self) -> Vec<String> {
        let mut gone = self.gone.take();
        gone.retain(|name| self.find(name).is_err());
        gone
    }

    /// Removes all disks, as far as their openers and their devices allow.
    pub async fn close(&self) {
        for bdev in self.registry.list().into_iter().rev() {
            // A disk that is already gone was built on another removed disk.
            let _ = self.remove_within_patience(bdev.name(), |_| ()).await;
        }
    }

    /// The file or block device of a disk, if it has one.
    pub(crate) fn file(&self, name: &str) -> Option<PathBuf> {
        let made = self.made.borrow();
        let details = &made.get(name)?.details;
        let uring = details.uring.as_ref().map(|uring| &uring.filename);
        uring.or_else(|| details.aio.as_ref().map(|aio| &aio.filename)).cloned()
    }

    /// The disk with that name, alias or uuid.
    pub(crate) fn find(&self, name: &str) -> Result<Arc<Bdev>, Error> {
        Ok(self.registry.find(name)?)
    }

    /// As [`Disks::find`]; waits for the disk to appear for up to `wait`.
    pub(crate) async fn find_within(&self, name: &str, wait: Duration) -> Result<Arc<Bdev>, Error> {
        let mut grown = self.grown.subscribe();
        let comes = async {
            loop {
                if let Ok(bdev) = self.find(name) {
                    return bdev;
                }
                // The sender lives as long as the borrowed `self`.
                let _ = grown.changed().await;
            }
        };
        timeout(wait, comes).await.or_else(|_| self.find(name))
    }

    /// Changes the description of a disk.
    pub(crate) fn change_details(&self, bdev: &Bdev, change: impl FnOnce(&mut Details)) {
        if let Some(made) = self.made.borrow_mut().get_mut(bdev.name()) {
            change(&mut made.details);
        }
    }

    /// The description of a disk by its module.
    pub(crate) fn details(&self, bdev: &Bdev) -> Details {
        let made = self.made.borrow();
        made.get(bdev.name()).map_or_else(Details::default, |made| made.details.clone())
    }
}

#[cfg(test)]
mod tests;
