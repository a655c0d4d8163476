//! Follows a discovery service: what it names, again whenever that changes. Context: the thread of NVMe over Fabrics.

use super::admin::{self, ADMIN};
use super::connection::Connection;
use super::{ConnectError, RemoteConfig};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::admin::get_log;
use aryk_nvme::spec::feature::EVENT_DISCOVERY;
use aryk_nvme::spec::log;
use aryk_nvme_fabrics::discovery::{Entry, Header, RECORD_LEN};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// Entries of a service that are read.
const ENTRIES_MAX: usize = 512;
/// Entries that are read at once.
const AT_ONCE: usize = 64;
/// Attempts to read a page that changes while it is read.
const READS_MAX: usize = 5;
/// The least time between two reads of a page.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two lines about one service.
const LINE_PERIOD: Duration = Duration::from_secs(60);

/// What a discovery service names, or why it cannot be asked.
#[derive(Debug)]
pub struct Heard {
    /// Where the service is.
    pub service: SocketAddr,
    /// Its entries, without those that are invalid.
    pub entries: Result<Vec<Entry>, ConnectError>,
}

/// Connects to the service at `config.address`, and sends its entries at first and after each change. A lost service is connected
/// again after `config.reconnect_delay`. Ends when `stop` or the receiver is dropped.
pub(super) async fn follow(config: RemoteConfig, heard: Sender<Heard>, stop: oneshot::Receiver<()>) {
    let lines = LogLimit::new(1, LINE_PERIOD);
    let following = async {
        while let Err(error) = serve(&config, &heard, &lines).await {
            if heard.send(Heard { service: config.address, entries: Err(error) }).await.is_err() {
                break;
            }
            sleep(config.reconnect_delay).await;
        }
    };
    tokio::select! {
        () = following => {}
        _ = stop => {}
    }
}

/// Serves one connection. Ends without an error when the receiver is dropped.
async fn serve(config: &RemoteConfig, heard: &Sender<Heard>, lines: &LogLimit) -> Result<(), ConnectError> {
    let (mut connection, _) = Connection::open(config, ADMIN).await?;
    admin::make_ready(&mut connection).await?;
    let mut has_events = admin::enable_events(&mut connection, EVENT_DISCOVERY).await?;
    let mut event = None;
    let mut ticks = interval((config.keep_alive / 3).max(Duration::from_millis(10)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Before the page is read, so that no change is missed.
        if has_events && event.is_none() {
            event = Some(admin::request_event(&mut connection)?);
        }
        // The service would end the controller if it heard of this host too late.
        let reading = timeout(config.keep_alive / 2, read(&mut connection, lines));
        let mut unsent = Some(reading.await.map_err(|_| ConnectError::Silent)??);
        loop {
            tokio::select! {
                permit = heard.reserve(), if unsent.is_some() => {
                    let Ok(permit) = permit else { return Ok(()) };
                    let entries = Ok(unsent.take().unwrap_or_default());
                    permit.send(Heard { service: config.address, entries });
                }
                answer = admin::event(&mut connection, event) => {
                    event = None;
                    has_events = answer?.is_some();
                    break;
                }
                _ = ticks.tick() => {
                    admin::keep_alive(&mut connection).await?;
                    if !has_events && unsent.is_none() {
                        break;
                    }
                }
                () = heard.closed() => return Ok(()),
            }
        }
        sleep(READ_INTERVAL).await;
    }
}

/// Reads the page.
async fn read(connection: &mut Connection, lines: &LogLimit) -> Result<Vec<Entry>, ConnectError> {
    for _ in 0..READS_MAX {
        let before = header(connection, true).await?;
        let count = usize::try_from(before.entries).unwrap_or(usize::MAX);
        if count > ENTRIES_MAX {
            limited!(
                lines,
                warn,
                entries = before.entries,
                most = ENTRIES_MAX,
                "a discovery service has too many entries"
            );
        }
        let count = count.min(ENTRIES_MAX);
        let mut entries = Vec::new();
        for first in (0..count).step_by(AT_ONCE) {
            let len = RECORD_LEN * AT_ONCE.min(count - first);
            let offset = (RECORD_LEN * (1 + first)) as u64;
            let command = get_log(log::DISCOVERY, 0, offset, len, true);
            let data = connection.admin(command, "Get Log Page (discovery)").await?.data;
            for record in data.as_chunks::<RECORD_LEN>().0 {
                match Entry::decode(record) {
                    Ok(entry) => entries.push(entry),
                    Err(error) => tracing::debug!(%error, "an entry of a discovery service is left out"),
                }
            }
        }
        // Reading it so is what lets the service send the next event.
        if header(connection, false).await? == before {
            return Ok(entries);
        }
    }
    Err(ConnectError::Unsupported("the discovery service changes faster than it can be read"))
}

async fn header(connection: &mut Connection, keep: bool) -> Result<Header, ConnectError> {
    let command = get_log(log::DISCOVERY, 0, 0, RECORD_LEN, keep);
    let data = connection.admin(command, "Get Log Page (discovery)").await?.data;
    Header::decode(&data).ok_or(ConnectError::Unsupported("the discovery service has an unknown page"))
}
