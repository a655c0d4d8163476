//! The thread of a controller. Control context; it may block in the kernel, and so has a thread of its own.
//!
//! The thread owns the [`Controller`], and polls it at each interrupt of the admin queue; also every 50 ms while commands are in
//! flight, so that a controller that failed or vanished is noticed soon, and once a second otherwise. Queue pairs belong to
//! reactors; the thread sends them the steps of a reset as messages, which each reactor executes in order, and they answer by
//! [`Command`]s.

mod admission;
mod away;
mod disks;
mod events;
mod function;
mod lost_blocks;
pub(crate) mod moves;
mod pairs;
pub(crate) mod tools;

use crate::driver::{Live, LostBlock};
use crate::injection::{Change, Commands};
use crate::shared::{Counters, Shared};
use crate::{Config, Controllers, Error, Info, Location, OnTimeout, Phase};
use admission::Caller;
use aryk_bdev::{Attachment, Bdev, Env, OpenError};
use aryk_cuse::{Access, Answer, Request};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::admin;
use aryk_nvme::controller::{AdminAnswer, Controller, End, ResetReason};
use aryk_nvme::queue::{Late, LateStep, QueueError};
use aryk_nvme::replay::History;
use aryk_nvme::spec::register::Shutdown;
use aryk_nvme::spec::status;
use aryk_pci::vfio::Vfio;
use aryk_pci::{Function, PciError};
use aryk_reactor::{Clock, Handle, Nanos};
use away::Stall;
use disks::Disks;
use function::{Call, Opened, Opener, Running};
use lost_blocks::LostBlocks;
use pairs::Pairs;
use std::collections::HashMap;
use std::convert::Infallible;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tools::Tools;

/// Time between two reads of CSTS while commands are in flight, and otherwise.
const WATCH_BUSY: u64 = 50_000_000;
const WATCH_IDLE: u64 = 1_000_000_000;
/// Time between two reads of the drive's health.
const HEALTH_INTERVAL: Duration = Duration::from_secs(60);
/// A controller that is gone again sooner than this after it was ready goes on with the time that it had to come back.
const STABLE: Duration = Duration::from_secs(10);
/// For so long a controller that is enabled may fail to be opened before the caller gets the failure: its last mappings may be in
/// the way. The thread goes on trying for [`Config::grace`].
const ENABLE_TIME: Duration = Duration::from_secs(5);
/// Lines about single commands and events: a burst, then one per period.
const LINES: u32 = 20;
const LINE_PERIOD: Duration = Duration::from_secs(2);
/// The longest time between two looks at a controller that is away, and the time between two attempts to create a queue pair.
const RETURN_INTERVAL: Duration = Duration::from_millis(250);
/// For so long the end of a controller waits until its function is closed.
const CLOSE_TIME: Duration = Duration::from_secs(2);

/// A message to the control thread.
pub(crate) enum Command {
    /// Creates a queue pair for a reactor, unless it has one.
    Prepare { reactor: Handle, reply: oneshot::Sender<Result<(), OpenError>> },
    /// A reactor has a queue pair now; whether it can watch its interrupt.
    Installed { qid: u16, watched: std::io::Result<()> },
    /// A pair has stopped submitting.
    Quiesced(u16),
    /// A pair has taken the completions that came before the end of DMA. What it has changed lately.
    Reaped { qid: u16, history: Box<History> },
    /// A pair has ended its commands in flight, for the reset of another, and has changed this lately.
    Held { qid: u16, history: Box<History> },
    /// A pair has decided about its commands in flight. With `is_end`, it has been returned ([`Command::Retired`]).
    Rewound { qid: u16, is_end: bool },
    /// What a reset kept of a pair has ended.
    Replayed(u16),
    /// Requests are submitted again after some time without.
    Busy,
    /// The memory of a pair whose controller is gone.
    Retired(Box<Live>),
    /// A command is late.
    Late { qid: u16, late: Late },
    /// A pair has got a completion that no correct controller posts.
    QueueError(QueueError),
    /// A status says that the controller has lost its state.
    LostState { status: status::Status },
    /// The medium has failed a request, which waits for the block.
    Locate(LostBlock),
    /// The Error Information log; empty if it could not be read.
    ErrorLog(Vec<u8>),
    /// No channel uses the pair of a reactor that is being removed.
    Unused(u16),
    /// An admin command.
    Admin { command: Box<admin::Command>, reply: oneshot::Sender<Result<AdminAnswer, Error>> },
    /// Resets the controller.
    Reset(oneshot::Sender<()>),
    /// Changes the errors that are injected. The sender is dropped when all have taken the change over.
    Inject { commands: Commands, change: Change, applied: mpsc::Sender<Infallible> },
    /// Creates the character devices for tools; the reply has their names.
    RegisterTools { access: Access, reply: oneshot::Sender<Result<Vec<String>, Error>> },
    /// Removes them; the reply says whether there were any.
    UnregisterTools(oneshot::Sender<bool>),
    /// A request of a tool.
    Tool { request: Box<Request>, caller: aryk_cuse::Caller, answer: Answer },
    /// Shuts the controller down, and opens it again only after [`Command::Enable`].
    Disable(oneshot::Sender<()>),
    /// Opens a disabled controller again; the reply comes when it is ready.
    Enable(oneshot::Sender<Result<(), Error>>),
    /// The drive is back at another place.
    Moved(Location),
    /// The disk of a namespace was removed.
    Closed(u32),
    /// The disk of a namespace that has changed is gone: the namespace gets another.
    Rescan,
    /// Removes the disks and shuts the controller down.
    Stop(oneshot::Sender<()>),
    /// A [`Call`] is over.
    CallEnded,
    /// All disks are removed.
    DisksRemoved,
    /// Guests' memory is registered, or there is none to register.
    MemoryRegistered { life: u64, memory: Option<Attachment> },
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a command to the thread of an NVMe controller")
    }
}

type Attached = Result<Vec<Arc<Bdev>>, Error>;

/// Starts the thread of a controller. The receiver gets its disks.
pub(crate) fn start(
    env: &Env,
    config: Config,
    vfio: &Arc<Vfio>,
    controllers: &Controllers,
) -> Result<(Arc<Shared>, oneshot::Receiver<Attached>), Error> {
    let (sender, commands) = mpsc::unbounded_channel();
    let info = Info {
        name: config.name.clone(),
        location: config.location.to_string(),
        phase: Phase::Starting,
        controller: None,
        device: (0, 0),
        config_space: Vec::new(),
        namespaces: Vec::new(),
        pairs_allowed: 0,
        vectors: 0,
        has_interrupts: false,
        dma: config.dma,
        last_reset: None,
        last_failure: None,
        may_have_lost_writes: false,
        smart: None,
    };
    let shared = Arc::new(Shared::new(&config, sender.clone(), info));
    let (attached, ready) = oneshot::channel();
    let thread = Thread {
        env: env.clone(),
        vfio: Arc::clone(vfio),
        controllers: controllers.clone(),
        shared: Arc::clone(&shared),
        disks: disks::new(env, &config, &sender),
        sender,
        are_removed: false,
        config,
        pairs: Pairs::default(),
        life: Life::Away,
        closing: None,
        attached: Some(attached),
        interrupts: Vec::new(),
        vectors: 0,
        can_mask: false,
        life_number: 0,
        ready_at: Nanos(0),
        exclusive: None,
        lines: LogLimit::new(LINES, LINE_PERIOD),
        lost_blocks: LostBlocks::default(),
        answers: HashMap::new(),
        resets: Vec::new(),
        rescans: Vec::new(),
        stops: Vec::new(),
        is_stopping: false,
        away_until: None,
        stall: Stall::default(),
        next_open: Nanos(0),
        identity: None,
        awaited_by: None,
        tools: None,
        is_disabled: false,
        disables: Vec::new(),
        enables: Vec::new(),
        enables_until: Nanos(0),
        submitted: 0,
        next_health: Nanos(0),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("aryk-nvme".into()).spawn(move || {
        tokio::task::LocalSet::new().block_on(&runtime, thread.run(commands));
    })?;
    Ok((shared, ready))
}

/// Where the controller is.
enum Life {
    /// The function is opened at [`Thread::next_open`], again and again, until it is there or the time is over.
    Away,
    /// A thread opens the function.
    Opening(Call<Result<Opened, Error>>),
    /// The controller is driven.
    Driven(Box<Driven>),
}

/// A function and its controller.
struct Driven {
    function: Arc<dyn Function>,
    controller: Controller,
    signals: Signals,
    /// Guests' memory, once it is registered.
    memory: Option<Arc<Attachment>>,
    /// The controller was ready, and guests' memory is registered or cannot be.
    is_usable: bool,
    /// How it ended. Reactors still have pairs.
    end: Option<End>,
}

struct Thread {
    env: Env,
    vfio: Arc<Vfio>,
    /// All controllers of the process.
    controllers: Controllers,
    shared: Arc<Shared>,
    sender: UnboundedSender<Command>,
    config: Config,
    pairs: Pairs,
    disks: Disks,
    /// The disks are gone, or are not wanted any more.
    are_removed: bool,
    life: Life,
    /// A thread closes the function of the life before.
    closing: Option<Call<()>>,
    /// The caller of the attach, until it is over.
    attached: Option<oneshot::Sender<Attached>>,
    /// Eventfds of the interrupt vectors; they stay as long as reactors may watch them.
    interrupts: Vec<OwnedFd>,
    /// Vectors in use: the admin queue's, and those of queue pairs.
    vectors: u16,
    /// Those of queue pairs can be masked, so that each pair has one; otherwise only second pairs of reactors have one.
    can_mask: bool,
    /// Tells the times that the function was opened apart.
    life_number: u64,
    /// When the controller was ready last.
    ready_at: Nanos,
    /// The admin command that changes namespaces; disks are not opened meanwhile.
    exclusive: Option<(u64, String)>,
    /// Limits the lines about single commands and events.
    lines: LogLimit,
    /// Requests that the medium has failed.
    lost_blocks: LostBlocks,
    /// Callers of admin commands, by number.
    answers: HashMap<u64, Caller>,
    resets: Vec<oneshot::Sender<()>>,
    /// Tools that wait until the namespaces were read again.
    rescans: Vec<oneshot::Sender<()>>,
    stops: Vec<oneshot::Sender<()>>,
    is_stopping: bool,
    /// When the disks of a controller that is away are removed.
    away_until: Option<Nanos>,
    stall: Stall,
    /// When the function is opened next.
    next_open: Nanos,
    /// Serial and model number, once the controller was ready.
    identity: Option<(String, String)>,
    /// The controller that waits for this drive, which was attached at another place.
    awaited_by: Option<Arc<Shared>>,
    /// The devices for tools, once they are registered.
    tools: Option<Tools>,
    /// The controller is not opened again.
    is_disabled: bool,
    /// Callers that wait until a disabled controller is shut down.
    disables: Vec<oneshot::Sender<()>>,
    /// Callers that wait until a controller that was disabled is ready, and when they get the failure to open it.
    enables: Vec<oneshot::Sender<Result<(), Error>>>,
    enables_until: Nanos,
    /// Commands of all pairs at the last look.
    submitted: u64,
    /// When the drive's health is read next.
    next_health: Nanos,
}

/// Whether the thread goes on.
#[derive(PartialEq, Eq)]
enum Next {
    Run,
    End,
}

fn now() -> Nanos {
    Clock::Monotonic.now()
}

impl Thread {
    async fn run(mut self, mut commands: UnboundedReceiver<Command>) {
        loop {
            let wait = self.work();
            let Some(wait) = wait else { break };
            self.wait(wait, &mut commands).await;
        }
        self.pairs.remove_all();
        self.pairs.drain().await;
        self.set_phase(Phase::Ended);
        self.shared.forget_routes();
        self.tools = None;
        if let Some(closing) = self.closing.take() {
            // Longer only if the kernel waits for a drive that was pulled out.
            let _ = tokio::time::timeout(CLOSE_TIME, closing.ended()).await;
        }
        self.give_place();
        // From here on the controller is no longer listed.
        commands.close();
        for stop in self.stops.drain(..) {
            // The caller may be gone.
            let _ = stop.send(());
        }
        tracing::info!(controller = self.shared.name, "the NVMe controller is detached");
    }

    /// Waits for the next command, event or time, and executes all commands that are there.
    async fn wait(&mut self, wait: Duration, commands: &mut UnboundedReceiver<Command>) {
        let signalled = async {
            match &self.life {
                Life::Driven(driven) => driven.signals.wait().await,
                Life::Away | Life::Opening(_) => std::future::pending().await,
            }
        };
        let command = tokio::select! {
            command = commands.recv() => command,
            () = signalled => None,
            () = tokio::time::sleep(wait) => None,
        };
        let mut next = command;
        while let Some(command) = next {
            self.execute(command);
            next = commands.try_recv().ok();
        }
    }

    /// Does what is due. Returns the time until something may be due again; `None` at the end.
    fn work(&mut self) -> Option<Duration> {
        if self.attached.as_ref().is_some_and(oneshot::Sender::is_closed) {
            self.begin_to_stop();
        }
        self.forget_ended_reactors();
        let next = match &mut self.life {
            Life::Away if self.is_disabled && !self.is_stopping => Next::Run,
            Life::Away if now() < self.next_open => self.give_up_in_time(),
            Life::Away => self.open(),
            Life::Opening(call) => match call.take() {
                Ok(opened) => self.opened(opened),
                Err(Running) => {
                    self.fail_enables_in_time("the kernel is still opening it");
                    self.give_up_in_time()
                }
            },
            Life::Driven(_) => self.drive(),
        };
        if next == Next::End {
            return None;
        }
        self.leave_reactors();
        // What could not be created before.
        self.create_pairs();
        self.end_without_pairs();
        let due = self.follow_stall().unwrap_or(RETURN_INTERVAL).min(RETURN_INTERVAL);
        let Life::Driven(driven) = &self.life else { return Some(due) };
        let most = if self.stall.is_over() { Duration::from_nanos(WATCH_IDLE) } else { due };
        let now = now().0;
        Some(Duration::from_nanos(driven.controller.next_poll(now).saturating_sub(now)).min(most))
    }

    /// Begins to open the function, unless the controller is over.
    fn open(&mut self) -> Next {
        let is_closing = self.closing.as_mut().is_some_and(|closing| closing.take().is_err());
        if self.give_up_in_time() == Next::End {
            return Next::End;
        }
        if is_closing {
            self.fail_enables_in_time("the kernel is still closing it");
        }
        if self.is_stopping || is_closing {
            return Next::Run;
        }
        self.closing = None;
        self.next_open = now().after(self.config.return_interval);
        self.life_number += 1;
        let opener = Opener {
            name: self.shared.name.clone(),
            location: self.config.location.clone(),
            options: self.config.options,
            vfio: Arc::clone(&self.vfio),
        };
        match function::open(opener, self.sender.clone()) {
            Ok(call) => {
                self.life = Life::Opening(call);
                Next::Run
            }
            Err(error) => self.not_opened(error.into()),
        }
    }

    /// Removes the disks of a controller that has not come back in time, and ends when they are removed.
    fn give_up_in_time(&mut self) -> Next {
        if self.is_stopping {
            return if self.are_removed { Next::End } else { Next::Run };
        }
        if self.away_until.is_some_and(|until| now() >= until) {
            tracing::error!(controller = self.shared.name, "the NVMe controller has not come back in time");
            self.begin_to_stop();
        }
        Next::Run
    }

    /// Takes over a function that was opened, or the failure.
    fn opened(&mut self, opened: Option<Result<Opened, Error>>) -> Next {
        self.life = Life::Away;
        let opened = opened.expect("the thread that opens a function does not panic");
        let driven = opened.and_then(|Opened { function, mut controller }| {
            controller.set_injections(self.shared.injected().admin.clone());
            let signals = Signals::of(function.as_ref())?;
            Ok(Driven { function, controller, signals, memory: None, is_usable: false, end: None })
        });
        match driven {
            Ok(driven) if self.is_stopping => {
                self.close(driven.controller, driven.function);
                self.give_up_in_time()
            }
            Ok(driven) => {
                self.life = Life::Driven(Box::new(driven));
                Next::Run
            }
            Err(error) => self.not_opened(error),
        }
    }

    fn not_opened(&mut self, error: Error) -> Next {
        if let Some(attached) = self.attached.take() {
            // The caller may be gone.
            let _ = attached.send(Err(error));
            return Next::End;
        }
        self.fail_enables_in_time(&error.to_string());
        if matches!(error, Error::Pci(PciError::InUse { .. })) {
            // Most likely this process: its last mappings are about to end.
            self.next_open = self.next_open.min(now().after(RETURN_INTERVAL));
        }
        tracing::debug!(controller = self.shared.name, %error, "the NVMe controller is not back");
        Next::Run
    }

    /// Closes a function that is being opened as soon as it is open.
    fn stop_opening(&mut self) {
        if let Life::Opening(call) = std::mem::replace(&mut self.life, Life::Away) {
            self.closing = call.discard(self.sender.clone());
        }
    }

    fn close(&mut self, controller: Controller, function: Arc<dyn Function>) {
        self.closing = function::close((controller, function), self.sender.clone());
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Prepare { reactor, reply } => self.prepare(reactor, reply),
            Command::Installed { qid, watched } => self.installed(qid, &watched),
            Command::Quiesced(qid) => self.with_controller(|controller| controller.queue_quiesced(qid)),
            Command::Reaped { qid, history } => self.reaped(qid, history),
            Command::Held { qid, history } => self.held(qid, history),
            Command::Rewound { qid, is_end } => self.rewound(qid, is_end),
            Command::Replayed(qid) => self.replayed(qid),
            // The next look at the controller, or at the call, is soon.
            Command::Busy | Command::CallEnded => {}
            Command::Retired(live) => drop(live),
            Command::Late { qid, late } => self.late(qid, late),
            Command::QueueError(error) => self.queue_error(error),
            Command::LostState { status } => {
                let controller = &self.shared.name;
                limited!(self.lines, error, controller, %status, "the NVMe controller has lost its state");
                self.reset(ResetReason::Fatal);
            }
            Command::Locate(lost) => self.locate(lost),
            Command::ErrorLog(log) => self.error_log(&log),
            Command::Unused(qid) => self.delete_pair(qid),
            Command::Admin { command, reply } => self.admin(&command, reply),
            Command::Reset(reply) => self.reset_for(reply),
            Command::Inject { commands, change, applied } => self.inject(commands, change, &applied),
            Command::RegisterTools { access, reply } => {
                // The caller may be gone.
                let _ = reply.send(self.register_tools(access));
            }
            Command::UnregisterTools(reply) => {
                let _ = reply.send(self.tools.take().is_some());
            }
            Command::Tool { request, caller, answer } => self.serve_tool(*request, caller, answer),
            Command::Closed(nsid) => {
                self.disks.closed(nsid);
                self.publish_namespaces();
                if self.disks.ends_with(nsid) {
                    self.begin_to_stop();
                }
                // A namespace with another format becomes a disk again.
                self.update_from_controller();
            }
            Command::Rescan => self.update_from_controller(),
            Command::Disable(reply) => self.disable(reply),
            Command::Enable(reply) => self.enable(reply),
            Command::Moved(location) => self.moved(location),
            Command::Stop(reply) => {
                self.stops.push(reply);
                self.begin_to_stop();
            }
            Command::DisksRemoved => self.shut_down(),
            Command::MemoryRegistered { life, memory } if life == self.life_number => {
                self.memory_registered(memory)
            }
            // The function that it was registered with is gone.
            Command::MemoryRegistered { .. } => {}
        }
    }

    const fn has_controller(&self) -> bool {
        matches!(self.life, Life::Driven(_))
    }

    fn with_controller(&mut self, f: impl FnOnce(&mut Controller)) {
        if let Life::Driven(driven) = &mut self.life {
            f(&mut driven.controller);
        }
    }

    /// Resets the controller for a caller, who gets no answer if that is not possible now.
    fn reset_for(&mut self, reply: oneshot::Sender<()>) {
        let phase = self.shared.info().phase;
        if matches!(phase, Phase::Ready | Phase::Resetting) {
            self.resets.push(reply);
            self.reset(ResetReason::Request);
        }
    }

    /// Publishes how far the controller is; what is being stopped stays so.
    fn set_phase(&self, phase: Phase) {
        let mut info = self.shared.info();
        if info.phase != Phase::Stopping || phase == Phase::Ended {
            info.phase = phase;
        }
    }

    fn reset(&mut self, reason: ResetReason) {
        self.with_controller(|controller| controller.reset(reason, now().0));
    }

    fn late(&mut self, qid: u16, late: Late) {
        let Late { cid, waited, step, in_flight, .. } = late;
        let (controller, waited_ms) = (&self.shared.name, waited / 1_000_000);
        match (step, self.config.on_timeout) {
            (LateStep::Abort, OnTimeout::Log) => {
                limited!(self.lines, warn, controller, qid, cid, waited_ms, "an NVMe command is late");
            }
            (LateStep::Abort, OnTimeout::Abort) => {
                limited!(
                    self.lines,
                    warn,
                    controller,
                    qid,
                    cid,
                    waited_ms,
                    "an NVMe command is late: it is aborted"
                );
                self.shared.counters.aborts.fetch_add(1, Ordering::Relaxed);
                self.with_controller(|controller| controller.abort(qid, cid, in_flight));
            }
            (LateStep::Reset, OnTimeout::Log) => {}
            (LateStep::Abort, OnTimeout::Reset) | (LateStep::Reset, OnTimeout::Abort | OnTimeout::Reset) => {
                limited!(
                    self.lines,
                    warn,
                    controller,
                    qid,
                    cid,
                    waited_ms,
                    "an NVMe command has not ended in time: the controller is reset"
                );
                self.reset(ResetReason::CommandTimeout);
            }
        }
    }

    fn inject(&mut self, commands: Commands, change: Change, applied: &mpsc::Sender<Infallible>) {
        self.shared.inject(commands, change);
        match commands {
            Commands::Io => self.pairs.set_injections(&self.shared, applied),
            Commands::Admin => {
                let injections = self.shared.injected().admin.clone();
                self.with_controller(|controller| controller.set_injections(injections));
            }
        }
    }

    fn disable(&mut self, reply: oneshot::Sender<()>) {
        self.fail_enables("it was disabled");
        if !self.has_controller() {
            self.stop_opening();
            if self.attached.is_some() {
                let (name, reason) = (self.shared.name.clone(), "it was disabled".to_owned());
                self.refuse(Error::NotEnabled { name, reason });
            }
            self.away_until = None;
            self.set_phase(Phase::Disabled);
            // The caller may be gone.
            let _ = reply.send(());
        } else {
            self.disables.push(reply);
            self.with_controller(|controller| controller.shut_down(Shutdown::Normal, now().0));
        }
        self.is_disabled = true;
    }

    fn enable(&mut self, reply: oneshot::Sender<Result<(), Error>>) {
        if !self.is_disabled {
            // The caller may be gone.
            let _ = reply.send(Err(Error::NotDisabled(self.shared.name.clone())));
            return;
        }
        self.is_disabled = false;
        self.enables.push(reply);
        if !self.has_controller() {
            self.open_enabled();
        }
    }

    /// Opens a controller that was disabled.
    fn open_enabled(&mut self) {
        self.set_phase(Phase::Starting);
        self.next_open = now();
        self.enables_until = now().after(ENABLE_TIME.min(self.config.grace / 2));
        self.away_until = Some(now().after(self.config.grace));
    }

    /// The callers that have enabled the controller get the failure if their time is over.
    fn fail_enables_in_time(&mut self, reason: &str) {
        if now() >= self.enables_until {
            self.fail_enables(reason);
        }
    }

    /// The controller that callers have enabled does not start.
    fn fail_enables(&mut self, reason: &str) {
        for enable in self.enables.drain(..) {
            let (name, reason) = (self.shared.name.clone(), reason.to_owned());
            // The caller may be gone.
            let _ = enable.send(Err(Error::NotEnabled { name, reason }));
        }
    }

    /// Begins to remove the disks; the controller is shut down after that.
    fn begin_to_stop(&mut self) {
        if self.is_stopping {
            return;
        }
        self.is_stopping = true;
        self.set_phase(Phase::Stopping);
        // A controller that is away does not answer any more: what waits for it fails.
        match self.life {
            Life::Away | Life::Opening(_) => self.pairs.remove_all(),
            Life::Driven(_) => self.pairs.remove_wanted(),
        }
        let sender = self.sender.clone();
        self.disks.remove_all(move || {
            let _ = sender.send(Command::DisksRemoved);
        });
    }

    fn shut_down(&mut self) {
        self.are_removed = true;
        self.with_controller(|controller| controller.shut_down(Shutdown::Normal, now().0));
    }

    /// Takes over a failure of a controller that was never ready.
    fn refuse(&mut self, error: Error) {
        if let Some(attached) = self.attached.take() {
            // The caller may be gone.
            let _ = attached.send(Err(error));
        }
        self.is_stopping = true;
        self.are_removed = true;
    }

    fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}

/// The eventfds by which a device wants the control thread's attention.
#[derive(Default)]
struct Signals {
    /// It reports an error.
    error: Option<AsyncFd<OwnedFd>>,
    /// The kernel asks for it.
    removal: Option<AsyncFd<OwnedFd>>,
    /// The admin queue's interrupt.
    admin: Option<AsyncFd<OwnedFd>>,
}

#[expect(deprecated, reason = "unsound for types whose descriptor may change; this is an OwnedFd")]
fn watch(fd: BorrowedFd<'_>) -> std::io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd.try_clone_to_owned()?, Interest::READABLE)
}

impl Signals {
    fn of(function: &dyn Function) -> std::io::Result<Self> {
        let Some(events) = function.events() else { return Ok(Self::default()) };
        let (error, removal) = (watch(events.error())?, watch(events.removal())?);
        Ok(Self { error: Some(error), removal: Some(removal), admin: None })
    }

    /// Waits for a signal. The controller, not this, reads the eventfds of events; the admin queue's is never read.
    async fn wait(&self) {
        async fn one(fd: Option<&AsyncFd<OwnedFd>>) {
            match fd {
                Some(fd) => drop(fd.readable().await.map(|mut guard| guard.clear_ready())),
                None => std::future::pending().await,
            }
        }
        tokio::select! {
            () = one(self.error.as_ref()) => {}
            () = one(self.removal.as_ref()) => {}
            () = one(self.admin.as_ref()) => {}
        }
    }
}
