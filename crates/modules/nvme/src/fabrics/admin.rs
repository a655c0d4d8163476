//! What is asked of a controller, and the checks of its answers. Context: the thread of NVMe over Fabrics.

use super::connection::{Answer, Connection, Place};
use super::driver::Live;
use super::{ConnectError, DATA_MAX, RemoteConfig};
use aryk_nvme::admin;
use aryk_nvme::claims::{BadClaim, ControllerInfo, Namespace, Unserved};
use aryk_nvme::controller::{AdminAnswer, ListedNamespace};
use aryk_nvme::quirks::Quirks;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::feature::{self, AsyncEvent};
use aryk_nvme::spec::identify::{
    CommandSet, Descriptors, IdentifyController, IdentifyNamespace, IdentifyNvmController,
};
use aryk_nvme::spec::log;
use aryk_nvme::spec::opcode;
use aryk_nvme::spec::register::{CAP, CC, CSTS, Cap, Cc, Csts, Shutdown, VS};
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::ana;
use aryk_nvme_fabrics::association::ENDS_EARLIER;
use aryk_nvme_fabrics::chap::Secrets;
use aryk_nvme_fabrics::command::Command;
use aryk_nvme_fabrics::connect::ANY_CONTROLLER;
use aryk_nvme_fabrics::property::Access;
use aryk_nvme_fabrics::subsystem::AnaState;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use zerocopy::FromBytes;

/// Entries of the admin queue, one more than commands at a time.
const ENTRIES: u16 = 32;
/// Bytes of an admin command's data: more than of any that is sent here.
const ADMIN_DATA_MAX: u32 = 128 << 10;
/// The admin queue of a new controller.
pub(super) const ADMIN: Place =
    Place { qid: 0, entries: ENTRIES, controller_id: ANY_CONTROLLER, transfer_max: ADMIN_DATA_MAX };
/// Bytes of a page of this host.
const PAGE: u64 = 4096;
/// Versions from which on commands exist.
const V1_3: u32 = 0x1_0300;
const V2_0: u32 = 0x2_0000;
/// The namespaces of a controller that are looked at.
const NAMESPACES_MAX: usize = 1024;
/// CMIC: the controller reports the access to namespaces (ANA).
const REPORTS_ACCESS: u8 = 1 << 3;
/// Bytes of a capsule's command.
const COMMAND_LEN: u32 = 64;
/// Time between two reads of CSTS.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long a normal end may take.
const END_TIME: Duration = Duration::from_secs(2);
/// Attempts to connect an I/O queue whose number the target has not freed yet, and the time between them.
const ATTEMPTS: u32 = 20;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(25);

/// What a controller says of its I/O queues.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queues {
    pub(super) controller_id: u16,
    /// Entries at most.
    entries_max: u32,
    /// Number of queues.
    pub(super) count: u16,
    in_capsule_max: u32,
    transfer_max: u32,
    retry_delays: [u16; 3],
    has_write_cache: bool,
}

impl Queues {
    /// Commands at a time on a queue.
    pub(super) fn depth(&self, config: &RemoteConfig) -> u16 {
        // A queue has one entry more than commands.
        let most = u16::try_from(self.entries_max - 1).unwrap_or(u16::MAX).min(u16::MAX - 1);
        config.depth.clamp(1, most)
    }
}

/// The access to namespaces through a controller, by NSID.
pub(super) type AccessByNsid = BTreeMap<u32, AnaState>;

/// The admin queue of a controller that is ready.
#[derive(Debug)]
pub(super) struct Admin {
    connection: Connection,
    cc: Cc,
    pub(super) queues: Queues,
    pub(super) info: ControllerInfo,
    pub(super) ends_earlier: bool,
    /// NANAGRPID: the groups of namespaces whose access the controller reports; `None` if it reports none.
    access_groups: Option<u32>,
    /// The controller did not give access to all namespaces when it was asked last.
    pub(super) lacks_access: bool,
    /// The Asynchronous Event Request in flight.
    event: Option<u16>,
    /// The command of a client in flight.
    of_client: Option<u16>,
}

/// An event that an admin queue reports.
#[derive(Debug)]
pub(super) enum News {
    /// An event.
    Event(u32),
    /// The answer to the command of a client.
    Answer(AdminAnswer),
}

/// The answer to a command of a client. One that is a failure is an answer, too.
fn admin_answer(answer: Result<Answer, ConnectError>) -> Result<AdminAnswer, ConnectError> {
    match answer {
        Ok(Answer { result, data }) => {
            Ok(AdminAnswer { status: Status::new(0), result: result as u32, data })
        }
        Err(ConnectError::Status { status, .. }) => Ok(AdminAnswer { status, result: 0, data: Vec::new() }),
        Err(error) => Err(error),
    }
}

/// Connects the admin queue of a controller, and makes the controller ready.
pub(super) async fn attach(config: &RemoteConfig) -> Result<(Admin, Vec<ListedNamespace>), ConnectError> {
    let (mut connection, controller_id) = Connection::open(config, ADMIN).await?;
    let (cap, vs, cc) = make_ready(&mut connection).await?;
    let has_blocks = cap.has_nvm_command_set() || cap.has_several_command_sets();
    check(has_blocks, "CAP.CSS", cap.0 >> 37 & 0xff, "the controller does not support the NVM command set")?;
    let page = connection.admin(admin::identify_controller(), "Identify Controller").await?.data;
    let page = IdentifyController::read_from_bytes(&page).expect("the queue checks the length");
    let mut info = ControllerInfo::check(&page, vs, PAGE, cap.page_min(), Quirks::default())?;
    if vs >= V2_0 {
        let limits = connection.admin(admin::identify_nvm_controller(), "Identify Controller (NVM)").await;
        if let Some(limits) = optional(limits)? {
            let limits =
                IdentifyNvmController::read_from_bytes(&limits.data).expect("the queue checks the length");
            info.add_limits(&limits, cap.page_min());
        }
    }
    let counts =
        admin::set_feature(feature::NUMBER_OF_QUEUES, 0, feature::queue_counts(config.queues), false);
    let counts = connection.admin(counts, "Set Features (Number of Queues)").await?.result;
    let in_capsule = page.ioccsz.get().saturating_mul(16).saturating_sub(COMMAND_LEN);
    let maxcmd = u32::from(page.maxcmd.get());
    let queues = Queues {
        controller_id,
        entries_max: match maxcmd {
            0 | 1 => cap.max_queue_entries(),
            most => cap.max_queue_entries().min(most),
        },
        count: feature::allowed_pairs(counts as u32).min(config.queues),
        // Data that does not begin behind the command is left to R2Ts.
        in_capsule_max: if page.icdoff.get() == 0 { in_capsule } else { 0 },
        transfer_max: info.transfer_max.min(DATA_MAX) as u32,
        retry_delays: info.retry_delays,
        has_write_cache: info.has_volatile_cache,
    };
    let ends_earlier = page.vendor.starts_with(&ENDS_EARLIER);
    let access_groups = (page.cmic & REPORTS_ACCESS != 0).then(|| page.nanagrpid.get());
    let wanted = info.async_events & (feature::EVENT_NAMESPACE | feature::EVENT_ANA);
    let has_events = enable_events(&mut connection, wanted).await? && wanted != 0;
    let event = if has_events { Some(request_event(&mut connection)?) } else { None };
    let (lacks_access, of_client) = (false, None);
    let mut admin =
        Admin { connection, cc, queues, info, ends_earlier, access_groups, lacks_access, event, of_client };
    let namespaces = admin.list().await?;
    Ok((admin, namespaces))
}

/// Enables a controller, with a discovery service or namespaces, and waits until it is ready.
pub(super) async fn make_ready(connection: &mut Connection) -> Result<(Cap, u32, Cc), ConnectError> {
    let cap = Cap(get(connection, Access::eight(CAP)).await?);
    let vs = get(connection, Access::four(VS)).await? as u32;
    check(vs >> 16 >= 1 && vs != u32::MAX, "VS", vs.into(), "NVMe begins with version 1.0")?;
    check(cap.page_min() <= PAGE, "CAP.MPSMIN", cap.page_min(), "the host has pages of 4 KiB")?;
    check(cap.max_queue_entries() > 1, "CAP.MQES", 0, "queues need at least 2 entries")?;
    let cc = Cc::enabled(PAGE, cap.has_several_command_sets());
    enable(connection, cc, cap).await?;
    Ok((cap, vs, cc))
}

/// Connects an I/O queue, whose first channel begins it.
pub(super) async fn open_queue(
    config: &RemoteConfig,
    queues: Queues,
    qid: u16,
    (path, life): (usize, u64),
) -> Result<Box<Live>, ConnectError> {
    let depth = queues.depth(config);
    let mut attempt = 0;
    let connection = loop {
        let Queues { controller_id, transfer_max, .. } = queues;
        let place = Place { qid, entries: depth + 1, controller_id, transfer_max };
        match Connection::open(config, place).await {
            Ok((connection, _)) => break connection,
            // The target may not have seen the end of the queue that had this number.
            Err(ConnectError::Status { .. }) if attempt < ATTEMPTS => {
                attempt += 1;
                sleep(ATTEMPT_INTERVAL).await;
            }
            Err(error) => return Err(error),
        }
    };
    let carrier = connection.into_carrier(queues.in_capsule_max)?;
    Ok(Box::new(Live::new(carrier, depth, (path, life, qid), queues.retry_delays, queues.has_write_cache)))
}

/// Reads a property.
async fn get(connection: &mut Connection, access: Access) -> Result<u64, ConnectError> {
    let entry = Command::PropertyGet(access).encode();
    Ok(connection.run(entry, Vec::new(), 0, "Property Get").await?.result)
}

async fn set_cc(connection: &mut Connection, cc: Cc) -> Result<(), ConnectError> {
    let entry = Command::PropertySet { access: Access::four(CC), value: cc.0.into() }.encode();
    connection.run(entry, Vec::new(), 0, "Property Set").await.map(drop)
}

/// Enables a controller, and waits until it is ready.
async fn enable(connection: &mut Connection, cc: Cc, cap: Cap) -> Result<(), ConnectError> {
    set_cc(connection, cc).await?;
    let deadline = Instant::now() + Duration::from_millis(cap.ready_timeout_ms().max(500));
    loop {
        let csts = Csts(get(connection, Access::four(CSTS)).await? as u32);
        if csts.is_fatal() {
            return Err(ConnectError::Unsupported("the controller reports a fatal error (CSTS.CFS)"));
        }
        if csts.is_ready() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(ConnectError::Unsupported("the controller does not become ready (CSTS.RDY)"));
        }
        sleep(POLL_INTERVAL).await;
    }
}

const fn check(is_true: bool, field: &'static str, value: u64, reason: &'static str) -> Result<(), BadClaim> {
    if is_true { Ok(()) } else { Err(BadClaim { field, value, reason }) }
}

/// The answer to a command that a controller need not support.
fn optional<T>(answer: Result<T, ConnectError>) -> Result<Option<T>, ConnectError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(ConnectError::Status { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Asks for these events only. Returns whether the controller takes the setting.
pub(super) async fn enable_events(connection: &mut Connection, wanted: u32) -> Result<bool, ConnectError> {
    let set = admin::set_feature(feature::ASYNC_EVENT_CONFIGURATION, 0, wanted, false);
    let answer = connection.admin(set, "Set Features (Asynchronous Event Configuration)").await;
    Ok(optional(answer)?.is_some())
}

/// Starts an Asynchronous Event Request, and returns its identifier.
pub(super) fn request_event(connection: &mut Connection) -> Result<u16, ConnectError> {
    connection.start(SubmissionEntry::new(opcode::admin::ASYNC_EVENT_REQUEST, 0), Vec::new(), 0)
}

/// Waits for the answer to a request for an event; for ever without a request. `None`: the controller refuses the request. An
/// error means that the connection is lost. May be dropped before it is ready.
pub(super) async fn event(
    connection: &mut Connection,
    request: Option<u16>,
) -> Result<Option<u32>, ConnectError> {
    // Without a request in flight, the connection is watched all the same.
    let cid = connection.ended(request.as_slice()).await?;
    take_event(connection, cid)
}

/// Takes the answer to a request for an event, which has ended.
fn take_event(connection: &mut Connection, cid: u16) -> Result<Option<u32>, ConnectError> {
    let answer = connection.take(cid, "Asynchronous Event Request").expect("the command has ended");
    Ok(optional(answer)?.map(|answer| answer.result as u32))
}

/// Tells the controller that this host is there.
pub(super) async fn keep_alive(connection: &mut Connection) -> Result<(), ConnectError> {
    let entry = SubmissionEntry::new(opcode::admin::KEEP_ALIVE, 0);
    connection.run(entry, Vec::new(), 0, "Keep Alive").await.map(drop)
}

impl Admin {
    /// Waits for an event or the end of the command of a client; for ever without them. An error means that the connection is
    /// lost. May be dropped before it is ready.
    pub(super) async fn news(&mut self) -> Result<News, ConnectError> {
        let awaited: Vec<u16> = self.of_client.into_iter().chain(self.event).collect();
        let ended = self.connection.ended(&awaited).await?;
        if self.of_client.take_if(|of_client| *of_client == ended).is_some() {
            let answer = self.connection.take(ended, "the command of a client");
            return admin_answer(answer.expect("the command has ended")).map(News::Answer);
        }
        self.event = None;
        Ok(News::Event(take_event(&mut self.connection, ended)?.unwrap_or(0)))
    }

    /// Takes an event, and asks for the next one. Returns what is to be read again.
    pub(super) async fn take(&mut self, event: u32) -> Result<AsyncEvent, ConnectError> {
        let page = AsyncEvent::log_page(event);
        // The log of the access is read by `access`.
        if page != 0 && page != log::ANA {
            let len = if page == log::CHANGED_NAMESPACES { 4096 } else { 512 };
            let log =
                self.connection.admin(admin::get_log(page, u32::MAX, 0, len, false), "Get Log Page").await;
            optional(log)?;
        }
        self.event = Some(request_event(&mut self.connection)?);
        Ok(AsyncEvent::decode(event))
    }

    /// Reads the access to the namespaces through this controller, by NSID; `None` if the controller does not report it.
    pub(super) async fn access(&mut self) -> Result<Option<AccessByNsid>, ConnectError> {
        let Some(groups) = self.access_groups else { return Ok(None) };
        let get = admin::get_log(log::ANA, u32::MAX, 0, ana::log_len(groups), false);
        let Some(page) = optional(self.connection.admin(get, "Get Log Page (ANA)").await)? else {
            return Ok(None);
        };
        let access = match ana::decode(&page.data) {
            Ok(access) => access,
            Err(error) => {
                tracing::warn!(controller = self.info.controller_id, %error, "access is unknown");
                return Ok(None);
            }
        };
        self.lacks_access = access.values().any(|state| !state.is_usable());
        Ok(Some(access))
    }

    /// Tells the controller that this host is there.
    pub(super) async fn keep_alive(&mut self) -> Result<(), ConnectError> {
        keep_alive(&mut self.connection).await
    }

    /// Starts a command of a client, of which there is one at a time.
    pub(super) fn start(&mut self, command: admin::Command) -> Result<(), ConnectError> {
        self.of_client = Some(self.connection.start_admin(command)?);
        Ok(())
    }

    /// Proves who this host is by these secrets, and has the controller do so if there is a secret of it.
    pub(super) async fn authenticate(
        &mut self,
        config: &RemoteConfig,
        secrets: &Arc<Secrets>,
    ) -> Result<(), ConnectError> {
        self.connection.authenticate(config, secrets).await
    }

    /// Lists and identifies the active namespaces.
    pub(super) async fn list(&mut self) -> Result<Vec<ListedNamespace>, ConnectError> {
        let mut nsids: Vec<u32> = Vec::new();
        loop {
            let after = nsids.last().copied().unwrap_or(0);
            let page =
                self.connection.admin(admin::active_namespaces(after), "Identify (namespaces)").await?;
            let listed = page
                .data
                .chunks_exact(4)
                .map(|nsid| u32::from_le_bytes(nsid.try_into().expect("four bytes")));
            let before = nsids.len();
            for nsid in listed.take_while(|nsid| *nsid != 0) {
                let last = nsids.last().copied().unwrap_or(0);
                check(nsid > last, "NSID", nsid.into(), "the list of namespaces is not in order")?;
                nsids.push(nsid);
            }
            if nsids.len() > NAMESPACES_MAX {
                tracing::warn!(
                    listed = nsids.len(),
                    most = NAMESPACES_MAX,
                    "a controller has too many namespaces"
                );
                nsids.truncate(NAMESPACES_MAX);
                break;
            }
            if nsids.len() - before < page.data.len() / 4 {
                break;
            }
        }
        let mut listed = Vec::new();
        for nsid in nsids {
            listed.push(ListedNamespace { nsid, namespace: self.identify(nsid).await? });
        }
        Ok(listed)
    }

    async fn identify(&mut self, nsid: u32) -> Result<Result<Namespace, Unserved>, ConnectError> {
        let mut descriptors = Descriptors::default();
        if self.info.version >= V1_3 {
            let list =
                self.connection.admin(admin::namespace_descriptors(nsid), "Identify (descriptors)").await;
            if let Some(list) = optional(list)? {
                match Descriptors::decode(&list.data) {
                    Ok(found) => descriptors = found,
                    Err(error) => tracing::warn!(nsid, %error, "a namespace has an invalid descriptor"),
                }
            }
        }
        if let Some(other) = descriptors.command_set.filter(|set| *set != CommandSet::Nvm) {
            return Ok(Err(Unserved::CommandSet(other)));
        }
        // It may have gone since it was listed, or be there but not ready: the next list decides.
        let page = match self.connection.admin(admin::identify_namespace(nsid), "Identify Namespace").await {
            Err(ConnectError::Status { status, .. }) => return Ok(Err(Unserved::NotIdentified(status))),
            page => page?,
        };
        let page = IdentifyNamespace::read_from_bytes(&page.data).expect("the queue checks the length");
        Ok(Namespace::check(nsid, &page, descriptors, &self.info, Quirks::default()))
    }

    /// Shuts the controller down, whose I/O queues are closed.
    pub(super) async fn shut_down(mut self) {
        let down = set_cc(&mut self.connection, self.cc.with_shutdown(Shutdown::Normal));
        // The end of the connection ends the controller too.
        let _ = timeout(END_TIME, down).await;
    }
}
