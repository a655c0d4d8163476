//! A path of a controller: its connections to one address of the target. A task of the thread of NVMe over Fabrics, from the
//! first attempt to connect until the connection is lost.

use super::admin::{self, AccessByNsid, Admin, News, Queues};
use super::control;
use super::shared::Shared;
use super::{ConnectError, RemoteConfig};
use aryk_nvme::admin::Command;
use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::controller::{AdminAnswer, ListedNamespace};
use aryk_nvme::spec::feature::AsyncEvent;
use aryk_nvme_fabrics::chap::Secrets;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};

/// The pause before the second attempt to connect again; each further one is twice as long, up to
/// [`RemoteConfig::reconnect_delay`].
const DELAY_MIN: Duration = Duration::from_millis(100);

/// What the controller's owner asks of a path.
#[derive(Debug)]
pub(super) enum Order {
    /// Lists the namespaces.
    List,
    /// Reads the access to the namespaces.
    ReadAccess,
    /// Authenticates with these secrets.
    Authenticate { secrets: Arc<Secrets>, done: oneshot::Sender<Result<(), ConnectError>> },
    /// Runs a command of a client.
    Admin { command: Box<Command>, done: oneshot::Sender<AdminAnswer> },
    /// Shuts the controller down, whose I/O queues are closed.
    ShutDown(oneshot::Sender<()>),
}

/// What a path reports.
#[derive(Debug)]
pub(super) enum Report {
    /// The controller is ready.
    Ready(Box<Ready>),
    /// An attempt to connect has failed; another follows.
    Refused(ConnectError),
    /// The namespaces.
    Listed(Vec<ListedNamespace>),
    /// The access to the namespaces; `None`: the controller does not report it.
    Access(Option<AccessByNsid>),
    /// The connection is lost. The task has ended.
    Lost(ConnectError),
}

/// What a controller says of itself when it is ready.
#[derive(Clone, Debug)]
pub(super) struct Ready {
    pub(super) queues: Queues,
    pub(super) info: ControllerInfo,
    pub(super) ends_earlier: bool,
    pub(super) listed: Vec<ListedNamespace>,
    pub(super) access: Option<AccessByNsid>,
}

/// Connects to a controller.
pub(super) async fn connect(config: &RemoteConfig) -> Result<(Box<Admin>, Box<Ready>), ConnectError> {
    let (mut admin, listed) = admin::attach(config).await?;
    let access = admin.access().await?;
    let (queues, info, ends_earlier) = (admin.queues, admin.info.clone(), admin.ends_earlier);
    Ok((Box::new(admin), Box::new(Ready { queues, info, ends_earlier, listed, access })))
}

impl Ready {
    /// Checks that the path leads to the same subsystem as the others, of which `expected` is known, and has a queue for each of
    /// the `needed` reactors.
    ///
    /// # Errors
    /// [`ConnectError::Other`], [`ConnectError::Unsupported`].
    pub(super) fn check(&self, expected: &ControllerInfo, needed: u16) -> Result<(), ConnectError> {
        let subsystem = |info: &ControllerInfo| (info.serial.clone(), info.model.clone());
        if subsystem(&self.info) != subsystem(expected) {
            return Err(ConnectError::Other(self.info.serial.clone()));
        }
        if self.queues.count < needed {
            return Err(ConnectError::Unsupported("the target has fewer queues than cores use"));
        }
        Ok(())
    }
}

/// The task of a path.
pub(super) struct Task {
    pub(super) shared: Arc<Shared>,
    /// The controller's configuration, with the addresses of the path.
    pub(super) config: Arc<RemoteConfig>,
    pub(super) path: usize,
    pub(super) life: u64,
    /// Their end ends the task.
    pub(super) orders: UnboundedReceiver<Order>,
}

impl Task {
    fn report(&self, report: Report) {
        self.shared.send(control::Command::Path { path: self.path, life: self.life, report });
    }

    /// Connects, as often as it takes, to the subsystem of which `expected` is known, and serves the controller.
    pub(super) async fn regain(mut self, expected: ControllerInfo) {
        let mut delay = DELAY_MIN.min(self.config.reconnect_delay);
        let (admin, ready) = loop {
            let attempt = async {
                let connected = connect(&self.config).await?;
                connected.1.check(&expected, self.shared.needed.load(Ordering::Acquire))?;
                Ok(connected)
            };
            let refused = tokio::select! {
                () = ended(&mut self.orders) => return,
                result = attempt => match result {
                    Ok(connected) => break connected,
                    Err(error) => error,
                }
            };
            self.report(Report::Refused(refused));
            tokio::select! {
                () = ended(&mut self.orders) => return,
                () = sleep(delay) => {}
            }
            delay = (2 * delay).min(self.config.reconnect_delay.max(DELAY_MIN));
        };
        self.report(Report::Ready(ready));
        self.serve(admin).await;
    }

    /// Serves a controller that is ready.
    pub(super) async fn serve(mut self, mut admin: Box<Admin>) {
        // Orders of an earlier life are gone, and the access has just been read.
        self.shared.reads_access(self.path);
        let mut ticks = interval((self.config.keep_alive / 3).max(Duration::from_millis(10)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut clients = Clients::default();
        loop {
            let served = tokio::select! {
                order = self.orders.recv() => match order {
                    None => return,
                    Some(Order::List) => self.list(&mut admin).await,
                    Some(Order::ReadAccess) => self.read_access(&mut admin).await,
                    Some(Order::Authenticate { secrets, done }) => {
                        let result = admin.authenticate(&self.config, &secrets).await;
                        // The caller may be gone. A connection that the target closes then is lost as any other.
                        let _ = done.send(result);
                        Ok(())
                    }
                    Some(Order::Admin { command, done }) => {
                        clients.waiting.push_back((command, done));
                        Ok(())
                    }
                    Some(Order::ShutDown(done)) => {
                        admin.shut_down().await;
                        // The caller may be gone.
                        let _ = done.send(());
                        return;
                    }
                },
                news = admin.news() => match news {
                    Ok(News::Event(event)) => self.take(event, &mut admin).await,
                    Ok(News::Answer(answer)) => {
                        clients.answer(answer);
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
                () = clients.is_late() => Err(ConnectError::Silent),
                _ = ticks.tick() => self.look_after(&mut admin).await,
            };
            if let Err(error) = served.and_then(|()| clients.start(&mut admin, self.config.admin_patience)) {
                return self.report(Report::Lost(error));
            }
        }
    }

    async fn take(&self, event: u32, admin: &mut Admin) -> Result<(), ConnectError> {
        match admin.take(event).await? {
            AsyncEvent::NamespacesChanged => self.list(admin).await,
            AsyncEvent::AccessChanged => self.read_access(admin).await,
            _ => Ok(()),
        }
    }

    async fn list(&self, admin: &mut Admin) -> Result<(), ConnectError> {
        self.report(Report::Listed(admin.list().await?));
        // A new namespace has an access, too.
        self.read_access(admin).await
    }

    async fn read_access(&self, admin: &mut Admin) -> Result<(), ConnectError> {
        self.shared.reads_access(self.path);
        self.report(Report::Access(admin.access().await?));
        Ok(())
    }

    /// Tells the controller that this host is there. A target may change the access without an event.
    async fn look_after(&self, admin: &mut Admin) -> Result<(), ConnectError> {
        admin.keep_alive().await?;
        if admin.lacks_access { self.read_access(admin).await } else { Ok(()) }
    }
}

/// The commands of clients. One is on its way at a time; what else the queue is for goes on meanwhile, since a target may take
/// long for it.
#[derive(Default)]
struct Clients {
    waiting: VecDeque<(Box<Command>, oneshot::Sender<AdminAnswer>)>,
    /// The client whose command is on its way, and when the command must have ended.
    running: Option<(oneshot::Sender<AdminAnswer>, Instant)>,
}

impl Clients {
    /// Starts the next command, unless one is on its way.
    fn start(&mut self, admin: &mut Admin, patience: Duration) -> Result<(), ConnectError> {
        if self.running.is_none()
            && let Some((command, done)) = self.waiting.pop_front()
        {
            admin.start(*command)?;
            self.running = Some((done, Instant::now() + patience));
        }
        Ok(())
    }

    fn answer(&mut self, answer: AdminAnswer) {
        if let Some((done, _)) = self.running.take() {
            // The caller may be gone.
            let _ = done.send(answer);
        }
    }

    /// Returns when the command that is on its way has taken too long.
    async fn is_late(&self) {
        match self.running {
            Some((_, until)) => sleep_until(until).await,
            None => std::future::pending().await,
        }
    }
}

/// Waits until there are no orders any more. Others make no sense before the controller is ready.
async fn ended(orders: &mut UnboundedReceiver<Order>) {
    while let Some(order) = orders.recv().await {
        drop(order);
    }
}
