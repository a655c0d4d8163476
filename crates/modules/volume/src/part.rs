//! A part of a pool: a root on one reactor, which runs the engine and the store of a shard. Control context.

use crate::claim::{Held, Lease, Right};
use crate::owner::{Call, Leave, Owner, Ready, Setup, Start};
use crate::pool::lock;
use crate::{Error, FormatError};
use aryk_bdev::{Access, Bdev, Descriptor, Env, Event, OpenError};
use aryk_reactor::{Bell, CoreSet, Cx, Gone, Hold, MoveError, RootId};
use aryk_volume::{Answer, Command, Settings, Shard, State};
use aryk_volume_store::{ClaimPace, Holder, Store};
use futures_channel::oneshot;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use uuid::Uuid;

/// The number of the next part. Reactors may have pools of several registries, so the numbers are the process's.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Where the root of a part is.
pub(crate) struct Place {
    /// The part's number.
    pub number: u64,
    /// Which part of the pool it is.
    pub shard: Shard,
    pub signals: Arc<Signals>,
    /// `None` if no other host reaches the base.
    lease: Option<Arc<Lease>>,
    home: Mutex<Home>,
    /// The base, for branches; `None` once the pool ends.
    base: Mutex<Option<Descriptor>>,
}

struct Home {
    /// The core of the reactor, also once the pool has ended.
    core: u16,
    /// `None` before the root is there, and once the pool has ended.
    root: Option<(Hold, RootId)>,
    /// The number of the root's thread.
    thread: u64,
}

impl Place {
    /// The reactor of the part.
    pub fn owner(&self) -> Result<Hold, OpenError> {
        self.root().map(|(owner, _)| owner).ok_or(OpenError::Removed)
    }

    /// The root of the part, with its reactor. The root may be on its way there.
    pub fn root(&self) -> Option<(Hold, RootId)> {
        lock(&self.home).root.clone()
    }

    /// The core of the part.
    pub fn core(&self) -> u16 {
        lock(&self.home).core
    }

    /// The number of the thread of the part.
    pub fn thread(&self) -> u64 {
        lock(&self.home).thread
    }

    /// Notes where the root is from now on.
    pub fn set_root(&self, owner: Hold, root: RootId) {
        let mut home = lock(&self.home);
        home.core = owner.core();
        let before = home.root.replace((owner, root));
        drop(home);
        drop(before);
    }

    /// Whether the base may be used now.
    pub fn right(&self) -> Right {
        self.lease.as_ref().map_or(Right::Valid, |lease| lease.right())
    }

    /// Whether other hosts reach the base.
    pub const fn is_shared(&self) -> bool {
        self.lease.is_some()
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
    /// Of the root.
    bell: Mutex<Bell>,
    pub is_base_removed: AtomicBool,
    /// A disk that is the base of volumes is being removed.
    pub is_foreign_removed: AtomicBool,
    pub has_ended: AtomicBool,
    /// The engine's state, as a number.
    state: Mutex<Option<State>>,
}

impl Signals {
    /// The bell of the root. A caller that changes what the root reads rings the bell that is there after the change.
    pub fn bell(&self) -> Bell {
        lock(&self.bell).clone()
    }

    /// The root is another one from now on, which looks at what was changed before it works.
    pub fn set_bell(&self, bell: Bell) {
        *lock(&self.bell) = bell;
    }

    /// Notes a new state of the engine.
    pub fn note_state(&self, state: State) {
        *lock(&self.state) = Some(state);
    }

    /// The engine's state that was noted last.
    pub fn state(&self) -> Option<State> {
        *lock(&self.state)
    }
}

/// The receivers of the removal of a base.
#[derive(Default)]
pub(crate) struct Removal {
    is_removed: bool,
    signals: Vec<Arc<Signals>>,
    /// Dropped with the removal.
    listener: Option<oneshot::Sender<()>>,
}

impl Removal {
    /// Returns a receiver that ends with the removal. There is one: an earlier receiver ends now.
    pub fn listen(&mut self) -> oneshot::Receiver<()> {
        let (sender, removal) = oneshot::channel();
        self.listener = (!self.is_removed).then_some(sender);
        removal
    }

    /// Rings the bells of the roots.
    pub fn ring(&self) {
        self.signals.iter().for_each(|signals| signals.bell().ring());
    }
}

/// A base disk, which its opener has for itself.
pub(crate) struct BaseHold {
    descriptor: Descriptor,
    removal: Arc<Mutex<Removal>>,
    /// Of the pool that is to be opened; `None` if no other host reaches the disk.
    claim: Option<Arc<Held>>,
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
                removal.listener = None;
                for signals in &removal.signals {
                    signals.is_base_removed.store(true, Ordering::Release);
                    signals.bell().ring();
                }
            }
        })?;
        if descriptor.bdev().device().is_read_only() {
            return Err(Error::ReadOnlyBase(descriptor.bdev().name().to_owned()));
        }
        Ok(Self { descriptor, removal, claim: None })
    }

    /// Takes the claim of a pool on the disk, if other hosts reach it.
    pub async fn take_claim(
        &mut self,
        env: &Env,
        pool: Uuid,
        holder: &Holder,
        pace: ClaimPace,
    ) -> Result<(), Error> {
        self.claim = Held::take(env, self, pool, holder, pace).await?;
        Ok(())
    }

    /// The claim that was taken.
    pub const fn claim(&self) -> Option<&Arc<Held>> {
        self.claim.as_ref()
    }

    /// The open disk.
    pub fn descriptor(&self) -> Descriptor {
        self.descriptor.clone()
    }

    /// The receivers of the removal of the disk.
    pub const fn removal(&self) -> &Arc<Mutex<Removal>> {
        &self.removal
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
        let taken: Vec<u16> = others.iter().map(|other| other.part.place.core()).collect();
        let cores = env.reactors().staying().into_iter().map(|reactor| reactor.core());
        let free = CoreSet::from_iter(cores.filter(|core| !taken.contains(core)));
        let least = |cores| env.reactors().find_least_loaded(cores);
        let hold = least(Some(&free)).or_else(|| least(None)).ok_or(Error::Ended)?;
        let signals = Arc::new(Signals {
            bell: Mutex::new(Bell::new(&hold)),
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
            signals: Arc::clone(&signals),
            lease: self.claim.as_ref().map(|claim| Arc::clone(&claim.lease)),
            home: Mutex::new(Home { core: hold.core(), root: None, thread: 0 }),
            base: Mutex::new(Some(descriptor.clone())),
        });
        let (owner, place_of_root) = (hold.clone(), Arc::clone(&place));
        let name = format!("volumes on {}", self.bdev().name());
        let start = move |cx: &mut Cx| {
            let setup = Setup { place: Arc::clone(&place_of_root), start, settings, opened: sender };
            let thread = cx.add_thread(name.clone(), CoreSet::allowed());
            let made = cx.add_root(thread, &name, |root, cx| {
                let channel = descriptor.open_channel(root, cx)?;
                Ok::<_, OpenError>(Owner::new(channel, setup, thread, root, cx))
            });
            let root = made.inspect_err(|_| cx.remove_thread(thread))?;
            lock(&place_of_root.home).thread = cx.thread_number(thread);
            place_of_root.set_root(owner, root.id());
            Ok::<_, OpenError>(())
        };
        hold.call(start).await.map_err(|_| Error::Ended)??;
        let root = Caller(Arc::clone(&place));
        Ok(Starting { part: Part { place, root, signals, preparing: tokio::sync::Mutex::default() }, opened })
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

/// Calls functions of the root of a part, wherever it is.
pub(crate) struct Caller(Arc<Place>);

impl Caller {
    /// Runs `f` on the root, in its reactor's context, and returns its result. While the root moves, this waits.
    ///
    /// # Errors
    /// [`Gone`] if the root has ended.
    pub async fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Owner, &mut Cx) -> R + Send + 'static,
    ) -> Result<R, Gone> {
        self.run(f, false).await
    }

    /// As [`Caller::call`], but does not wait for the disks of a root that is about to leave its reactor.
    async fn call_now<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Owner, &mut Cx) -> R + Send + 'static,
    ) -> Result<R, Gone> {
        self.run(f, true).await
    }

    async fn run<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Owner, &mut Cx) -> R + Send + 'static,
        is_urgent: bool,
    ) -> Result<R, Gone> {
        let (sender, result) = oneshot::channel();
        let mut call: Call = Box::new(move |owner, cx| {
            // The caller may have been dropped.
            let _ = sender.send(f(owner, cx));
        });
        loop {
            let (owner, root) = self.0.root().ok_or(Gone)?;
            let pass_on = move |cx: &mut Cx| match cx.root::<Owner>(root) {
                Some(owner) => {
                    owner.borrow_mut().receive(call, is_urgent, cx);
                    None
                }
                None => Some(call),
            };
            match owner.call(pass_on).await? {
                None => return result.await.map_err(|_| Gone),
                Some(back) => call = back,
            }
            // The root has moved meanwhile, or has ended.
            let now = self.0.root().ok_or(Gone)?;
            if *now.0 == *owner && now.1 == root {
                return Err(Gone);
            }
        }
    }
}

/// A part.
pub(crate) struct Part {
    pub place: Arc<Place>,
    pub root: Caller,
    pub signals: Arc<Signals>,
    /// Held while a reactor is prepared for the root.
    preparing: tokio::sync::Mutex<()>,
}

impl Part {
    /// Ends the root, and waits until it has given back the base.
    pub async fn end(&self) {
        let (sender, ended) = oneshot::channel();
        if self.root.call_now(move |owner, cx| owner.end(Some(sender), cx)).await.is_ok() {
            // The sender is dropped if the root has ended already.
            let _ = ended.await;
        }
        let root = lock(&self.place.home).root.take();
        drop(root);
        // A preparation of another reactor has the base, and none begins from now on.
        drop(self.preparing.lock().await);
    }

    /// Prepares a reactor for the root.
    pub async fn prepare(&self, to: &Hold) -> Result<(), MoveError> {
        let open = |error: OpenError| MoveError::Open(error.to_string());
        let _preparing = self.preparing.lock().await;
        let base = self.place.base().map_err(|_| MoveError::Ending)?;
        let foreign =
            self.root.call_now(|owner, _| owner.foreign_disks()).await.map_err(|_| MoveError::Ending)?;
        for disk in std::iter::once(&base).chain(&foreign) {
            disk.prepare(to).await.map_err(open)?;
        }
        // A branch remains.
        let here = self.place.owner().map_err(|_| MoveError::Ending)?;
        base.prepare(&here).await.map_err(open)
    }

    /// Moves the root to a reactor that was prepared.
    pub async fn move_to(&self, to: Hold, patience: Duration) -> Result<(), MoveError> {
        let (done, moved) = oneshot::channel();
        let order = Leave { to, patience, done };
        self.root.call_now(move |owner, cx| owner.leave(order, cx)).await.map_err(|_| MoveError::Ending)?;
        moved.await.unwrap_or(Err(MoveError::Ending))
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
