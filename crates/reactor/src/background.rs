//! Background work: tasks that a module runs without a request of a client, such as the check of a disk.
//!
//! [`Background::spawn`] starts a task on a reactor. Each task has a thread of its own, in whose account its processor time is
//! counted. The task is a future that awaits [`Turns::next`] before each piece of work. The reactor grants it at most its
//! budget in one turn. A turn in which other work was done grants nothing, unless the task has waited for [`STARVED`]:
//! requests of guests have priority.
//!
//! A future stays on its reactor, since it may have channels there. To move a task, the reactor drops its future at a call of
//! [`Turns::next`], and the module makes a new future on the other reactor. State that must survive a move is kept outside of
//! the future.

use crate::handle::{Handle, lock};
use crate::mailbox::Refused;
use crate::thread::{Moving, Thread, ThreadId};
use crate::{Clock, CoreSet, Cx, Hold, Local, Nanos, ReactorList};
use async_task::Task;
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

/// A task that has waited this long runs beside other work, so that a busy reactor does not stop it.
pub(crate) const STARVED: Duration = Duration::from_millis(1);

/// The interval of checks whether the channels of a task that leaves its reactor are closed.
const LEAVING: Duration = Duration::from_millis(1);

/// How much processor time a task may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Processor time in one turn of the reactor. The piece of work that exceeds it is the last of the turn.
    pub turn: Duration,
}

type Work = Pin<Box<dyn Future<Output = ()>>>;
/// Makes the future of a task, on the reactor where it will run.
type Start = Box<dyn FnMut(Turns) -> Work + Send>;

/// Starts the tasks of modules, and moves them between the reactors of a process. Cheap to clone. Control context.
/// The default has no reactors: its tasks do not run.
#[derive(Clone, Default)]
pub struct Background(Arc<Shared>);

#[derive(Default)]
struct Shared {
    reactors: ReactorList,
    /// The tasks that have not ended.
    tasks: Mutex<Vec<Arc<Entry>>>,
}

/// The statistics of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskStats {
    /// The task's name.
    pub name: String,
    /// The number of its thread, as [`crate::ThreadStats::id`].
    pub id: u64,
    /// The core of its reactor; `None` while it moves.
    pub core: Option<u16>,
    /// The processor time that it may use in a turn.
    pub budget: Budget,
    /// Processor time that it has used.
    pub busy: Duration,
    /// Turns in which it was granted its budget.
    pub granted: u64,
}

/// A task.
struct Entry {
    name: String,
    /// The number of its thread, unique in the process.
    number: u64,
    budget: Budget,
    /// Written by the task's reactor.
    busy_ns: AtomicU64,
    granted: AtomicU64,
    /// Locked while a reactor makes the task's next future.
    start: Mutex<Start>,
    place: Mutex<Place>,
    all: std::sync::Weak<Shared>,
}

/// Where a task is.
#[derive(Debug)]
enum Place {
    /// A drop of the sender ends the task's future. A message could not do that: the task's own reactor may end the task, and
    /// its mailbox may be full.
    On(Handle, oneshot::Sender<()>),
    /// The task moves to another reactor.
    Moving,
    Ended,
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} background tasks", lock(&self.0.tasks).len())
    }
}

/// Owns a task: the task ends when this is dropped.
pub struct BackgroundTask(Arc<Entry>);

impl fmt::Debug for BackgroundTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "background task {}", self.0.number)
    }
}

impl Background {
    pub(crate) fn new(reactors: ReactorList) -> Self {
        Self(Arc::new(Shared { reactors, tasks: Mutex::default() }))
    }

    /// The reactors on which the tasks run.
    pub fn reactors(&self) -> &ReactorList {
        &self.0.reactors
    }

    /// Starts a task called `name` on the reactor with the fewest roots and pollers. `start` makes the task's future on each
    /// reactor that the task comes to, and owns the state that must survive a move. The task runs until its future completes
    /// or the returned [`BackgroundTask`] is dropped. Any thread except those of reactors.
    pub fn spawn<F>(
        &self,
        name: &str,
        budget: Budget,
        mut start: impl FnMut(Turns) -> F + Send + 'static,
    ) -> BackgroundTask
    where
        F: Future<Output = ()> + 'static,
    {
        let thread = Moving(Thread::new(name.to_owned(), CoreSet::allowed()));
        let to = self.0.reactors.find_least_loaded(None);
        let place = to.as_ref().map_or(Place::Ended, |to| Place::On(Handle::clone(to), oneshot::channel().0));
        let entry = Arc::new(Entry {
            name: name.to_owned(),
            busy_ns: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            number: thread.number(),
            budget,
            start: Mutex::new(Box::new(move |turns| Box::pin(start(turns)))),
            place: Mutex::new(place),
            all: Arc::downgrade(&self.0),
        });
        // Without a reactor the process is ending, and the task never runs.
        if let Some(to) = to {
            lock(&self.0.tasks).push(Arc::clone(&entry));
            let arriving = Arc::clone(&entry);
            let hold = to.clone();
            send(&to, move |cx| {
                arrive(&arriving, thread, cx);
                drop(hold);
            });
        }
        BackgroundTask(entry)
    }

    /// The tasks that have not ended, in the order of their starts.
    pub fn stats(&self) -> Vec<TaskStats> {
        let stats = |entry: &Arc<Entry>| TaskStats {
            name: entry.name.clone(),
            id: entry.number,
            core: match &*lock(&entry.place) {
                Place::On(reactor, _) => Some(reactor.core()),
                Place::Moving | Place::Ended => None,
            },
            budget: entry.budget,
            busy: Duration::from_nanos(entry.busy_ns.load(Ordering::Relaxed)),
            granted: entry.granted.load(Ordering::Relaxed),
        };
        lock(&self.0.tasks).iter().map(stats).collect()
    }

    /// Moves the task whose thread has this number to another reactor, and waits until it has arrived. Returns false if there
    /// is no such task.
    pub async fn move_to(&self, number: u64, to: Hold) -> bool {
        let find = |entry: &&Arc<Entry>| entry.number == number;
        let Some(entry) = lock(&self.0.tasks).iter().find(find).cloned() else { return false };
        let (sender, arrived) = oneshot::channel::<()>();
        let (from, until_left) = {
            let mut place = lock(&entry.place);
            if !matches!(&*place, Place::On(from, _) if *from != *to) {
                return true;
            }
            let Place::On(from, ending) = std::mem::replace(&mut *place, Place::Moving) else { return true };
            (from, ending)
        };
        // If the reactor has ended, so has the task.
        let _ = from.cast(move |cx| leave(&entry, to, [until_left, sender], cx)).await;
        // The sender is dropped when the task has arrived or has ended.
        let _ = arrived.await;
        true
    }
}

impl Entry {
    /// Marks the task as ended: no reactor starts it again.
    fn ended(&self) {
        *lock(&self.place) = Place::Ended;
        if let Some(all) = self.all.upgrade() {
            lock(&all.tasks).retain(|entry| entry.number != self.number);
        }
    }
}

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        self.0.ended();
    }
}

/// Sends a message from control context where code cannot await: spins while the reactor's mailbox is full.
fn send(reactor: &Handle, message: impl FnOnce(&mut Cx) + Send + 'static) {
    let mut message: crate::handle::Message = Box::new(message);
    while let Err(Refused::Full(again)) = reactor.try_send(message) {
        message = again;
        std::thread::yield_now();
    }
}

/// The tasks of a reactor, by their numbers.
#[derive(Default)]
struct Running(RefCell<HashMap<u64, (ThreadId, Task<()>)>>);

/// Starts a task on this reactor, unless it has ended meanwhile.
fn arrive(entry: &Arc<Entry>, thread: Moving, cx: &mut Cx) {
    let (ending, mut is_ended) = oneshot::channel::<()>();
    {
        let mut place = lock(&entry.place);
        if matches!(*place, Place::Ended) {
            return;
        }
        *place = Place::On(cx.handle().clone(), ending);
    }
    let thread = cx.adopt_thread(thread);
    let spent = Rc::new(Cell::new(Duration::ZERO));
    let turns = Turns {
        local: cx.local().clone(),
        thread,
        entry: Arc::clone(entry),
        clock: cx.clock.clone(),
        polled_at: Rc::default(),
        spent: Rc::clone(&spent),
    };
    let polled_at = Rc::clone(&turns.polled_at);
    let work = (lock(&entry.start))(turns);
    let (local, clock) = (cx.local().clone(), cx.clock.clone());
    let mut metered = Metered { work, local, clock, thread, entry: Arc::clone(entry), polled_at, spent };
    let (of_end, local) = (Arc::clone(entry), cx.local().clone());
    let task = cx.local().spawn(async move {
        // Runs the future until it completes or the task is ended.
        std::future::poll_fn(|cx| match Pin::new(&mut is_ended).poll(cx) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => Pin::new(&mut metered).poll(cx),
        })
        .await;
        drop(metered);
        of_end.ended();
        local.defer(move |cx| end(of_end.number, cx));
    });
    let before = cx.local_state::<Running>().0.borrow_mut().insert(entry.number, (thread, task));
    assert!(before.is_none(), "task {} arrives on a reactor where it is", entry.number);
}

/// Ends a task of this reactor, if it is still there.
fn end(number: u64, cx: &mut Cx) {
    if let Some(gone) = take(number, cx) {
        let local = cx.local().clone();
        cx.local().spawn(async move { drop(gone.thread(&local).await) }).detach();
    }
}

/// Moves a task from this reactor to another. `held` is dropped when the task has arrived or has ended: the caller waits for
/// that, and only this function drops the task's future on this reactor.
fn leave(entry: &Arc<Entry>, to: Hold, held: [oneshot::Sender<()>; 2], cx: &mut Cx) {
    // The task or its future has ended meanwhile.
    let Some(gone) = take(entry.number, cx) else { return };
    let (entry, local) = (Arc::clone(entry), cx.local().clone());
    let going = async move {
        let thread = gone.thread(&local).await;
        let hold = to.clone();
        let there = move |cx: &mut Cx| {
            arrive(&entry, thread, cx);
            drop((hold, held));
        };
        // The hold keeps the destination from ending.
        let _ = to.cast(there).await;
    };
    cx.local().spawn(going).detach();
}

/// A task that was taken from its reactor.
struct Taken {
    thread: ThreadId,
    task: Task<()>,
}

fn take(number: u64, cx: &mut Cx) -> Option<Taken> {
    let taken = cx.local_state::<Running>().0.borrow_mut().remove(&number);
    taken.map(|(thread, task)| Taken { thread, task })
}

impl Taken {
    /// Drops the task's future, waits until its channels are closed, and returns its thread.
    async fn thread(self, local: &Local) -> Moving {
        self.task.cancel().await;
        let thread = self.thread;
        while local.with(move |cx| cx.thread_members(thread)).await > 0 {
            local.sleep(LEAVING).await;
        }
        local.with(move |cx| cx.release_thread(thread)).await
    }
}

/// A task's interface to its reactor, which grants it turns.
pub struct Turns {
    local: Local,
    thread: ThreadId,
    entry: Arc<Entry>,
    clock: Clock,
    /// When the reactor last polled the task, or last granted it a turn.
    polled_at: Rc<Cell<Nanos>>,
    /// Time of this turn's budget that the task used before `polled_at`.
    spent: Rc<Cell<Duration>>,
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "turns of background task {}", self.entry.number)
    }
}

impl Turns {
    /// The reactor that the task is on.
    pub const fn local(&self) -> &Local {
        &self.local
    }

    /// The thread that the task's channels belong to.
    pub const fn thread(&self) -> ThreadId {
        self.thread
    }

    /// Returns when the task may do its next piece of work: at once while some of this turn's budget is left. If the task is
    /// moved or ended meanwhile, the call never returns.
    pub async fn next(&mut self) {
        let now = self.clock.now();
        if self.spent.get() + now.since(self.polled_at.get()) < self.entry.budget.turn {
            return;
        }
        let (sender, granted) = oneshot::channel();
        self.local.defer(move |cx| {
            let since = cx.now();
            cx.background.push_back(Waiting { since, sender });
        });
        // Only the end of the reactor drops the sender unused.
        let _ = granted.await;
        self.entry.granted.fetch_add(1, Ordering::Relaxed);
        self.spent.set(Duration::ZERO);
        self.polled_at.set(self.clock.now());
    }
}

/// A task that waits for its next turn.
pub(crate) struct Waiting {
    since: Nanos,
    sender: oneshot::Sender<()>,
}

impl Cx {
    /// Grants waiting tasks the next turn: all of them if there was no other work in this turn, otherwise those that are starved.
    pub(crate) fn grant_background(&mut self, others_worked: bool) {
        let (now, waiting) = (self.now, self.background.len());
        for _ in 0..waiting {
            let Some(first) = self.background.front() else { return };
            // The queue is in order of arrival.
            if others_worked && now.since(first.since) < STARVED {
                return;
            }
            if let Some(first) = self.background.pop_front() {
                // A task that has ended does not receive the grant.
                let _ = first.sender.send(());
            }
        }
    }
}

/// A task's future. Its processor time is counted in its thread's account.
struct Metered {
    work: Work,
    local: Local,
    clock: Clock,
    thread: ThreadId,
    entry: Arc<Entry>,
    polled_at: Rc<Cell<Nanos>>,
    spent: Rc<Cell<Duration>>,
}

impl Future for Metered {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let began = self.clock.now();
        self.polled_at.set(began);
        let polled = self.work.as_mut().poll(cx);
        let now = self.clock.now();
        // `Turns::next` resets both values when it grants a turn during this poll.
        self.spent.set(self.spent.get() + now.since(self.polled_at.get()));
        let (thread, took) = (self.thread, now.since(began));
        self.entry.busy_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
        self.local.defer(move |cx| cx.charge(thread, took));
        polled
    }
}

#[cfg(test)]
mod tests;
