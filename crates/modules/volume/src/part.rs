//! A part of a pool: a root on one reactor, which runs the engine and the store of a shard. Control context.

use crate::owner::{Owner, Ready, Setup, Start};
use crate::pool::lock;
use crate::{Error, FormatError};
use aryk_bdev::{Access, Bdev, Descriptor, Env, Event, OpenError};
use aryk_reactor::{Bell, CoreSet, Hold, RootRef};
use aryk_volume::{Answer, Command, Settings, Shard, State};
use aryk_volume_store::Store;
use futures_channel::oneshot;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The number of the next part. Reactors may have pools of several registries, so the numbers are the process's.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Where the root of a part is.
pub(crate) struct Place {
    /// The part's number.
    pub number: u64,
    /// Which part of the pool it is.
    pub shard: Shard,
    /// The bell of the root.
    pub bell: Bell,
    /// `None` once the pool has ended.
    owner: Mutex<Option<Hold>>,
    /// The base, for branches; `None` once the pool ends.
    base: Mutex<Option<Descriptor>>,
}

impl Place {
    /// The reactor of the part.
    pub fn owner(&self) -> Result<Hold, OpenError> {
        lock(&self.owner).clone().ok_or(OpenError::Removed)
    }

    /// The base of the pool.
    pub fn base(&self) -> Result<Descriptor, OpenError> {
        lock(&self.base).clone().ok_or(OpenError::Removed)
    }

    /// Gives back the base: no branch begins from now on.
    pub fn close_base(&self) {
        let base = lock(&self.base).take();
        drop(base);
    }
}

/// What a root and the control plane tell each other without messages.
pub(crate) struct Signals {
    pub bell: Bell,
    pub is_base_removed: AtomicBool,
    /// A disk that is the base of volumes is being removed.
    pub is_foreign_removed: AtomicBool,
    pub has_ended: AtomicBool,
    /// The engine's state, as a number.
    state: Mutex<Option<State>>,
}

impl Signals {
    /// Notes a new state of the engine.
    pub fn note_state(&self, state: State) {
        *lock(&self.state) = Some(state);
    }

    /// The engine's state that was noted last.
    pub fn state(&self) -> Option<State> {
        *lock(&self.state)
    }
}

/// The roots to which the removal of their base is told.
#[derive(Default)]
struct Removal {
    is_removed: bool,
    signals: Vec<Arc<Signals>>,
}

/// A base disk, which its opener has for itself.
pub(crate) struct BaseHold {
    descriptor: Descriptor,
    removal: Arc<Mutex<Removal>>,
}

impl BaseHold {
    /// Opens a disk.
    pub fn new(env: &Env, disk: &str, owner: &str) -> Result<Self, Error> {
        let removal = Arc::new(Mutex::new(Removal::default()));
        let of_listener = Arc::clone(&removal);
        let descriptor = env.registry().open(disk, Access::Exclusive, owner, move |event| {
            if event == Event::Removed {
                let mut removal = lock(&of_listener);
                removal.is_removed = true;
                for signals in &removal.signals {
                    signals.is_base_removed.store(true, Ordering::Release);
                    signals.bell.ring();
                }
            }
        })?;
        if descriptor.bdev().device().is_read_only() {
            return Err(Error::ReadOnlyBase(descriptor.bdev().name().to_owned()));
        }
        Ok(Self { descriptor, removal })
    }

    /// The disk.
    pub fn bdev(&self) -> &Arc<Bdev> {
        self.descriptor.bdev()
    }

    /// Starts a root on the reactor that has the least to do, if possible on another one than those of `others`.
    pub async fn start(
        &self,
        env: &Env,
        shard: Shard,
        start: Start,
        settings: Settings,
        others: &[Starting],
    ) -> Result<Starting, Error> {
        let taken: Vec<u16> = others.iter().map(|other| other.part.root.handle().core()).collect();
        let cores = env.reactors().staying().into_iter().map(|reactor| reactor.core());
        let free = CoreSet::from_iter(cores.filter(|core| !taken.contains(core)));
        let least = |cores| env.reactors().find_least_loaded(cores);
        let hold = least(Some(&free)).or_else(|| least(None)).ok_or(Error::Ended)?;
        let signals = Arc::new(Signals {
            bell: Bell::new(&hold),
            is_base_removed: AtomicBool::new(false),
            is_foreign_removed: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            state: Mutex::new(None),
        });
        {
            let mut removal = lock(&self.removal);
            if removal.is_removed {
                return Err(Error::Ended);
            }
            removal.signals.push(Arc::clone(&signals));
        }
        let descriptor = self.descriptor.clone();
        descriptor.prepare(&hold).await?;
        let (sender, opened) = oneshot::channel();
        let place = Arc::new(Place {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            shard,
            bell: signals.bell.clone(),
            owner: Mutex::new(Some(hold.clone())),
            base: Mutex::new(Some(descriptor.clone())),
        });
        let (signals_of_root, place_of_root) = (Arc::clone(&signals), Arc::clone(&place));
        let setup = Setup { place: place_of_root, start, settings, signals: signals_of_root, opened: sender };
        let name = format!("volumes on {}", self.bdev().name());
        let root = hold
            .call(move |cx| {
                let thread = cx.add_thread(name.clone(), CoreSet::from_iter([cx.handle().core()]));
                let made = cx.add_root(thread, &name, |root, cx| {
                    let channel = descriptor.open_channel(root, cx)?;
                    Ok::<_, OpenError>(Owner::new(channel, setup, thread, root, cx))
                });
                made.inspect_err(|_| cx.remove_thread(thread))
            })
            .await
            .map_err(|_| Error::Ended)??;
        Ok(Starting { part: Part { place, root, signals }, opened })
    }

    /// Starts a root on the whole disk, and waits until it has done what it was started for and has given the disk back.
    pub async fn run(&self, env: &Env, start: Start) -> Result<(), Error> {
        let mut starting = self.start(env, Shard::ALL, start, Settings::default(), &[]).await?;
        let done = starting.done().await;
        starting.part.end().await;
        done.map(drop)
    }
}

/// A part that was started, until it has done what it was started for.
pub(crate) struct Starting {
    pub part: Part,
    opened: oneshot::Receiver<Result<Ready, Error>>,
}

impl Starting {
    /// Waits until the root has done what it was started for.
    pub async fn done(&mut self) -> Result<Ready, Error> {
        (&mut self.opened).await.unwrap_or(Err(Error::Ended))
    }
}

/// A part.
pub(crate) struct Part {
    pub place: Arc<Place>,
    pub root: RootRef<Owner>,
    pub signals: Arc<Signals>,
}

impl Part {
    /// Ends the root, and waits until it has given back the base.
    pub async fn end(&self) {
        let (sender, ended) = oneshot::channel();
        if self.root.call(move |owner, cx| owner.end(Some(sender), cx)).await.is_ok() {
            // The sender is dropped if the root has ended already.
            let _ = ended.await;
        }
        lock(&self.place.owner).take();
    }

    /// Hands a command to the engine, and returns where its result comes.
    pub async fn begin(&self, command: Command) -> Result<Answering, Error> {
        let (sender, answer) = oneshot::channel();
        let start = move |owner: &mut Owner, cx: &mut aryk_reactor::Cx| owner.command(command, sender, cx);
        self.root.call(start).await.map_err(|_| Error::Ended)?;
        Ok(Answering(answer))
    }

    /// Runs a command of the engine.
    pub async fn command(&self, command: Command) -> Result<Answer, Error> {
        self.begin(command).await?.result().await
    }

    /// Changes the superblock. Returns the number of segments.
    pub async fn change_store(
        &self,
        change: impl FnOnce(&mut Store) -> Result<(), FormatError> + Send + 'static,
    ) -> Result<u32, Error> {
        let (sender, changed) = oneshot::channel();
        let start =
            move |owner: &mut Owner, cx: &mut aryk_reactor::Cx| owner.change_store(change, sender, cx);
        self.root.call(start).await.map_err(|_| Error::Ended)?;
        changed.await.map_err(|_| Error::Ended)?
    }
}

/// A command that the engine has.
pub(crate) struct Answering(oneshot::Receiver<Result<Answer, aryk_volume::CommandError>>);

impl Answering {
    /// Waits for the result.
    pub async fn result(self) -> Result<Answer, Error> {
        Ok(self.0.await.map_err(|_| Error::Ended)??)
    }
}
