//! A path of a controller: its connections to one address of the target. A task of the thread of NVMe over TCP, from the first
//! attempt to connect until the connection is lost.

use super::admin::{self, AccessByNsid, Admin, Queues};
use super::control::Command;
use super::shared::Shared;
use super::{ConnectError, RemoteConfig};
use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::controller::ListedNamespace;
use aryk_nvme::spec::feature::AsyncEvent;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, sleep};

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

/// A controller that is ready.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) queues: Queues,
    pub(super) info: ControllerInfo,
    pub(super) ends_earlier: bool,
    pub(super) listed: Vec<ListedNamespace>,
    pub(super) access: Option<AccessByNsid>,
}

/// A path that is connected.
#[derive(Debug)]
pub(super) struct Connected {
    admin: Admin,
    listed: Vec<ListedNamespace>,
    access: Option<AccessByNsid>,
}

/// Connects to a controller.
pub(super) async fn connect(config: &RemoteConfig) -> Result<Box<Connected>, ConnectError> {
    let (mut admin, listed) = admin::attach(config).await?;
    let access = admin.access().await?;
    Ok(Box::new(Connected { admin, listed, access }))
}

impl Connected {
    /// What is known of the controller.
    pub(super) fn ready(&self) -> Ready {
        Ready {
            queues: self.admin.queues,
            info: self.admin.info.clone(),
            ends_earlier: self.admin.ends_earlier,
            listed: self.listed.clone(),
            access: self.access.clone(),
        }
    }

    fn lacks_access(&self) -> bool {
        self.access.iter().flatten().any(|(_, state)| !state.is_usable())
    }

    /// Serves the controller.
    pub(super) async fn serve(self, mut task: Task) {
        task.lacks_access = self.lacks_access();
        task.serve(self.admin).await;
    }
}

/// The task of a path.
pub(super) struct Task {
    pub(super) shared: Arc<Shared>,
    /// The controller's configuration, with the addresses of the path.
    pub(super) config: Arc<RemoteConfig>,
    pub(super) path: usize,
    pub(super) life: u64,
    /// The serial and the model number of the subsystem.
    pub(super) expected: (String, String),
    /// Their end ends the task.
    pub(super) orders: UnboundedReceiver<Order>,
    /// The controller does not give access to all namespaces: that is read again now and then.
    pub(super) lacks_access: bool,
}

impl Task {
    fn report(&self, report: Report) {
        self.shared.send(Command::Path { path: self.path, life: self.life, report });
    }

    /// Connects, as often as it takes, and serves the controller.
    pub(super) async fn regain(mut self) {
        let mut delay = DELAY_MIN.min(self.config.reconnect_delay);
        let connected = loop {
            let attempt = async {
                let connected = connect(&self.config).await?;
                let info = &connected.admin.info;
                if (&info.serial, &info.model) != (&self.expected.0, &self.expected.1) {
                    return Err(ConnectError::Other(info.serial.clone()));
                }
                if connected.admin.queues.count < self.shared.needed.load(Ordering::Acquire) {
                    return Err(ConnectError::Unsupported("the target has fewer queues than cores use"));
                }
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
        self.lacks_access = connected.lacks_access();
        self.report(Report::Ready(Box::new(connected.ready())));
        self.serve(connected.admin).await;
    }

    /// Serves a controller that is ready.
    pub(super) async fn serve(mut self, mut admin: Admin) {
        // Orders of an earlier life are gone, and the access has just been read.
        self.shared.reads_access(self.path);
        let mut ticks = interval((self.config.keep_alive / 3).max(Duration::from_millis(10)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let served = tokio::select! {
                order = self.orders.recv() => match order {
                    None => return,
                    Some(Order::List) => self.list(&mut admin).await,
                    Some(Order::ReadAccess) => self.read_access(&mut admin).await,
                    Some(Order::ShutDown(done)) => {
                        admin.shut_down().await;
                        // The caller may be gone.
                        let _ = done.send(());
                        return;
                    }
                },
                event = admin.event() => match event {
                    Ok(event) => self.take(event, &mut admin).await,
                    Err(error) => Err(error),
                },
                _ = ticks.tick() => self.look_after(&mut admin).await,
            };
            if let Err(error) = served {
                return self.report(Report::Lost(error));
            }
        }
    }

    async fn take(&mut self, event: u32, admin: &mut Admin) -> Result<(), ConnectError> {
        match admin.take(event).await? {
            AsyncEvent::NamespacesChanged => self.list(admin).await,
            AsyncEvent::AccessChanged => self.read_access(admin).await,
            _ => Ok(()),
        }
    }

    async fn list(&mut self, admin: &mut Admin) -> Result<(), ConnectError> {
        self.report(Report::Listed(admin.list().await?));
        // A new namespace has an access, too.
        self.read_access(admin).await
    }

    async fn read_access(&mut self, admin: &mut Admin) -> Result<(), ConnectError> {
        self.shared.reads_access(self.path);
        let access = admin.access().await?;
        self.lacks_access = access.iter().flatten().any(|(_, state)| !state.is_usable());
        self.report(Report::Access(access));
        Ok(())
    }

    /// Tells the controller that this host is there. A target may change the access without an event.
    async fn look_after(&mut self, admin: &mut Admin) -> Result<(), ConnectError> {
        admin.keep_alive().await?;
        if self.lacks_access { self.read_access(admin).await } else { Ok(()) }
    }
}

/// Waits until there are no orders any more. Others make no sense before the controller is ready.
async fn ended(orders: &mut UnboundedReceiver<Order>) {
    while let Some(order) = orders.recv().await {
        drop(order);
    }
}
