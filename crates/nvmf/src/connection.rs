//! Connections until Connect and the authentication of their hosts, and admin queues. Control context.

mod io_queue;
mod rdma;
mod tcp;

use crate::address::{Address, Transport};
use crate::association::{Live, Place, Reserved, Way};
use crate::authentication::Authentication;
use crate::pool::TRANSFER_MAX;
use crate::quota::{Counted, Waits};
use crate::rdma::Lost;
use crate::status::refusal;
use crate::stream::{Stream, StreamError};
use crate::subsystem::Channel;
use crate::target::Inner;
use aryk_log_limit::limited;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::chap::{Failure, Progress};
use aryk_nvme_fabrics::command::{self, Command, Connect};
use aryk_nvme_fabrics::connect::{ConnectData, Refusal};
use aryk_nvme_fabrics::controller::Outcome;
use aryk_nvme_fabrics::property::Change;
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use aryk_nvme_fabrics::{SlotId, status};
use aryk_rdma::{Listener, Pending};
use aryk_tls::TlsError;
use rustix::net::sockopt;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep_until, timeout};

pub(crate) use self::io_queue::Ordered;
use self::rdma::RdmaLink;
use self::tcp::TcpLink;

/// How long a host has to send Connect, then to authenticate, and to read the replies of its admin queue.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a host that has been told why its connection ends has to end it, too.
const LINGER: Duration = Duration::from_secs(1);
/// How long a host may be silent before the kernel asks whether it is still there, and how often the kernel asks.
const SILENCE: Duration = Duration::from_secs(10);
/// How long the network, or a host that does not read, may keep the kernel from sending data.
const UNSENT_MS_MAX: u32 = 30_000;
/// Connections of RDMA that have not sent Connect yet, or whose hosts have not authenticated yet: each has memory of its own.
const RDMA_UNCONNECTED_MAX: u32 = 128;
/// How long a listener pauses when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts the connections of a listener.
pub(crate) async fn accept(inner: Weak<Inner>, listener: TcpListener, address: Address, channel: Channel) {
    loop {
        let accepted = listener.accept().await;
        let Some(inner) = inner.upgrade() else { return };
        match accepted {
            Ok((stream, peer)) => {
                let waits = inner.unconnected.add(peer.ip(), inner.state.borrow().limits.unconnected);
                drop(spawn_local(serve(inner, stream, (address, channel), peer, waits)));
            }
            Err(error) => {
                limited!(inner.lines, warn, %error, %address, "cannot accept a host");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Has the kernel find out that a host has gone.
fn watch_over(stream: &TcpStream) -> io::Result<()> {
    // Replies are small, and hosts wait for them.
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE)?;
    sockopt::set_tcp_user_timeout(stream, UNSENT_MS_MAX)?;
    Ok(())
}

/// Why a connection ends.
#[derive(Debug)]
enum End {
    /// The host has closed it, or the network has lost it.
    Lost(io::Error),
    /// The host has violated the protocol, or has sent nothing for too long.
    Refused,
    /// The host has not proved who it is.
    Unauthenticated(Failure),
    /// TLS has failed.
    Insecure(TlsError),
    /// The RDMA connection has ended, or cannot be made.
    Rdma(Lost),
}

impl From<Lost> for End {
    fn from(lost: Lost) -> Self {
        Self::Rdma(lost)
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

impl From<StreamError> for End {
    fn from(error: StreamError) -> Self {
        match error {
            StreamError::Io(error) => Self::Lost(error),
            StreamError::Tls(TlsError::Closed) => Self::Lost(io::ErrorKind::UnexpectedEof.into()),
            StreamError::Tls(error) => Self::Insecure(error),
        }
    }
}

async fn serve(
    inner: Rc<Inner>,
    stream: TcpStream,
    (listener, channel): (Address, Channel),
    peer: SocketAddr,
    waits: Waits,
) {
    let ended = async {
        watch_over(&stream)?;
        let way = Way { listener, peer, local: stream.local_addr()? };
        let link = Box::pin(async {
            let mut tcp = TcpLink::new(Stream::new(stream));
            if channel == Channel::Tls {
                let secured = timeout(PATIENCE, tcp.secure(&inner));
                secured.await.map_err(|_| End::Refused)??;
            }
            Ok(Link::Tcp(tcp))
        });
        serve_link(&inner, link, way, waits).await
    };
    report(&inner, peer, ended.await);
}

/// Accepts the connections of a listener of RDMA.
pub(crate) async fn accept_rdma(
    inner: Weak<Inner>,
    _listener: Listener,
    mut requests: UnboundedReceiver<Pending>,
    address: Address,
) {
    while let Some(pending) = requests.recv().await {
        let Some(inner) = inner.upgrade() else { return };
        let waits = inner.rdma_unconnected.add(pending.parameters.peer.ip(), RDMA_UNCONNECTED_MAX);
        drop(spawn_local(serve_rdma(inner, pending, address, waits)));
    }
}

async fn serve_rdma(inner: Rc<Inner>, pending: Pending, listener: Address, waits: Waits) {
    let (peer, local) = (pending.parameters.peer, pending.parameters.local);
    let way = Way { listener, peer, local };
    let ended = async {
        let admitted = match rdma::admit(&inner, &pending, way) {
            Ok(admitted) => admitted,
            Err(reject) => {
                limited!(inner.lines, warn, %peer, ?reject, "an RDMA connection is refused");
                pending.reject(&reject.encode());
                return Ok(());
            }
        };
        let link = async {
            let accepted = timeout(PATIENCE, RdmaLink::accept(&inner, pending, &admitted));
            accepted.await.map_err(|_| End::Refused)?.map(Link::Rdma)
        };
        serve_link(&inner, link, way, waits).await
    };
    report(&inner, peer, ended.await);
}

/// Serves a connection, from its beginning to its end.
async fn serve_link(
    inner: &Rc<Inner>,
    link: impl Future<Output = Result<Link, End>>,
    way: Way,
    waits: Waits,
) -> Result<(), End> {
    // What only the beginning needs is not kept for the rest.
    let begun = Box::pin(async {
        let mut connection = Connection::new(link.await?);
        match begin(inner, &mut connection, way).await {
            Ok(begun) => Ok((connection, begun)),
            Err(end) => Err(connection.end_after(end).await),
        }
    });
    let (connection, begun) = tokio::select! {
        begun = begun => begun?,
        () = waits.until_replaced() => {
            limited!(inner.lines, warn, peer = %way.peer, "too many hosts connect at the same time: the oldest attempt ends");
            return Ok(());
        }
    };
    drop(waits);
    match begun.connect.qid {
        0 => Box::pin(serve_admin(inner, connection, way, begun)).await,
        _ => io_queue::serve(inner, connection, way, begun).await,
    }
}

/// Says why a connection has ended, if that is not usual.
fn report(inner: &Inner, peer: SocketAddr, ended: Result<(), End>) {
    match ended {
        Ok(()) => {}
        Err(End::Lost(error)) => tracing::debug!(%peer, %error, "a host has disconnected"),
        Err(End::Unauthenticated(failure)) => {
            inner.failures.set(inner.failures.get() + 1);
            limited!(inner.lines, warn, %peer, %failure, "a host has not proved who it is: its connection ends");
        }
        Err(End::Insecure(error)) => {
            inner.failures.set(inner.failures.get() + 1);
            limited!(inner.lines, warn, %peer, %error, "the TLS connection of a host has failed");
        }
        Err(End::Refused) => limited!(inner.lines, warn, %peer, "the connection of a host was ended"),
        Err(End::Rdma(Lost::Ended)) => tracing::debug!(%peer, "a host has disconnected"),
        Err(End::Rdma(error)) => {
            limited!(inner.lines, warn, %peer, %error, "the RDMA connection of a host has failed")
        }
    }
}

/// A queue whose host may connect it.
struct Begun {
    connect: Connect,
    data: ConnectData,
    start: Start,
    _connected: Counted,
}

/// What the host knows of its Connect.
enum Start {
    /// Connect has this slot, and no answer yet.
    Asked(SlotId),
    /// Connect is answered, and the host has authenticated.
    Authenticated(Reserved),
}

impl Start {
    fn split(self) -> (Option<SlotId>, Option<Reserved>) {
        match self {
            Self::Asked(id) => (Some(id), None),
            Self::Authenticated(reserved) => (None, Some(reserved)),
        }
    }
}

/// Waits for Connect, and for the host's proof of who it is if it must give one.
async fn begin(inner: &Rc<Inner>, connection: &mut Connection, way: Way) -> Result<Begun, End> {
    let connect = timeout(PATIENCE, connection.connect());
    let (id, connect, data) = connect.await.map_err(|_| End::Refused)??;
    let connections_max = inner.state.borrow().limits.connections;
    let Some(connected) = inner.connected.take(way.peer.ip(), connections_max) else {
        return Err(connection.refuse(Some(id), BUSY).await);
    };
    let checked = connection.check(&connect);
    let checked = checked.and_then(|()| inner.check_channel(&data, connection.identity(), way));
    let proof = match checked.and_then(|()| inner.must_prove(&data, way)) {
        Ok(proof) => proof,
        Err(refusal) => return Err(connection.refuse(Some(id), refusal).await),
    };
    let start = match proof {
        None => Start::Asked(id),
        Some(proof) => {
            let reserved = match inner.reserve(&connect, &data, way) {
                Ok(reserved) => reserved,
                Err(refusal) => return Err(connection.refuse(Some(id), refusal).await),
            };
            connection.admitted(id, &connect, &reserved.place, AUTHENTICATION_REQUIRED);
            let proved = prove(inner, connection, Authentication::new(proof));
            timeout(PATIENCE, proved).await.map_err(|_| End::Refused)??;
            Start::Authenticated(reserved)
        }
    };
    Ok(Begun { connect, data, start, _connected: connected })
}

/// Has a host prove who it is. Until then, its queue takes no other commands.
async fn prove(inner: &Inner, connection: &mut Connection, mut proof: Authentication) -> Result<(), End> {
    loop {
        let (id, is_intact) = connection.next().await?;
        match connection.authentication(id) {
            Some(command) => connection.exchange(inner, id, is_intact, command, &mut proof).await?,
            None => {
                let required = status::AUTHENTICATION_REQUIRED.status().as_final();
                connection.complete(id, required, 0);
            }
        }
        if proof.progress() == Progress::Authenticated {
            return connection.flush().await;
        }
    }
}

struct Slot {
    entry: SubmissionEntry,
    capsule_len: u32,
    data: Vec<u8>,
    /// The controller completes it later.
    is_held: bool,
}

impl Slot {
    const fn new(entry: SubmissionEntry, capsule_len: u32, data: Vec<u8>) -> Self {
        Self { entry, capsule_len, data, is_held: false }
    }

    /// Bytes of data that the host sends, or for which it has room.
    fn data_len(&self, is_intact: bool, blocks: DataBlocks) -> Result<u32, Status> {
        let sgl = Sgl::decode(&self.entry, blocks);
        let sgl = sgl.and_then(|sgl| sgl.check(self.capsule_len, TRANSFER_MAX as u32).map(|()| sgl));
        match sgl {
            Ok(sgl) if is_intact => Ok(sgl.len()),
            Ok(_) => Err(Code::TRANSIENT_TRANSPORT_ERROR.status()),
            Err(code) => Err(code.status().as_final()),
        }
    }
}

/// What carries a connection in control.
enum Link {
    Tcp(TcpLink),
    Rdma(RdmaLink),
}

impl Link {
    /// Takes what other connections need of what this one has, until it fails.
    async fn take_messages(&mut self) -> End {
        match self {
            Self::Tcp(_) => std::future::pending().await,
            Self::Rdma(rdma) => rdma.take_messages().await,
        }
    }
}

/// The commands of a connection in control, each with its data.
type Slots = BTreeMap<SlotId, Slot>;

/// A connection in control.
struct Connection {
    link: Link,
    slots: Slots,
}

impl Connection {
    fn new(link: Link) -> Self {
        Self { link, slots: BTreeMap::new() }
    }

    /// The next command whose data has arrived, and whether the data is intact. Earlier replies are written first: so what a host
    /// makes the connection store is bounded.
    async fn next(&mut self) -> Result<(SlotId, bool), End> {
        self.flush().await?;
        match &mut self.link {
            Link::Tcp(tcp) => tcp.next(&mut self.slots).await,
            Link::Rdma(rdma) => rdma.next(&mut self.slots).await.map(|slot| (slot, true)),
        }
    }

    /// Writes the output, for which the host has a limited time.
    async fn flush(&mut self) -> Result<(), End> {
        let Self { link, slots } = self;
        let flushed = async {
            match link {
                Link::Tcp(tcp) => tcp.flush(slots).await,
                Link::Rdma(rdma) => rdma.flush(slots).await,
            }
        };
        timeout(PATIENCE, flushed).await.map_err(|_| End::Refused)?
    }

    fn complete(&mut self, id: SlotId, status: Status, result: u64) {
        match &mut self.link {
            Link::Tcp(tcp) => tcp.queue.complete(id, status, result),
            Link::Rdma(rdma) => rdma.complete(id, status, result),
        }
    }

    /// Completes a command with success, after the data of its slot.
    fn complete_with_data(&mut self, id: SlotId, result: u64) {
        let data = &self.slots[&id].data;
        match &mut self.link {
            Link::Tcp(tcp) => tcp.queue.complete_with_data(id, data, result),
            Link::Rdma(rdma) => rdma.complete_with_data(id, data, result),
        }
    }

    const fn data_blocks(&self) -> DataBlocks {
        match &self.link {
            Link::Tcp(_) => Transport::Tcp.data_blocks(),
            Link::Rdma(_) => Transport::Rdma.data_blocks(),
        }
    }

    /// The identity of the key of TLS with which the host has proved who it is.
    fn identity(&self) -> Option<&str> {
        match &self.link {
            Link::Tcp(tcp) => tcp.stream.identity(),
            Link::Rdma(_) => None,
        }
    }

    /// Checks that Connect fits what the host has said before.
    fn check(&self, connect: &Connect) -> Result<(), Refusal> {
        match &self.link {
            Link::Tcp(_) => Ok(()),
            Link::Rdma(rdma) => rdma.check(connect),
        }
    }

    /// Waits for Connect.
    async fn connect(&mut self) -> Result<(SlotId, Connect, ConnectData), End> {
        let (id, is_intact) = self.next().await?;
        let slot = &self.slots[&id];
        let decoded = match Command::decode(&slot.entry) {
            _ if !is_intact => Err((Code::TRANSIENT_TRANSPORT_ERROR.status(), 0)),
            Ok(Command::Connect(connect)) if slot.entry.opcode() == command::OPCODE => {
                let data = ConnectData::decode(&slot.data);
                data.map(|data| (connect, data)).map_err(|refusal| refusal.completion())
            }
            _ => Err((Code::COMMAND_SEQUENCE_ERROR.status().as_final(), 0)),
        };
        match decoded {
            Ok((connect, data)) => Ok((id, connect, data)),
            Err((status, result)) => Err(self.end(id, status, result).await),
        }
    }

    /// Completes Connect, unless that has been done. Returns why the connection ends.
    async fn refuse(&mut self, id: Option<SlotId>, refusal: Refusal) -> End {
        let (status, result) = refusal.completion();
        match id {
            Some(id) => self.end(id, status, result).await,
            None => End::Refused,
        }
    }

    /// Ends the connection for a reason. If the target has chosen that, the host has been told, and has time to read it.
    async fn end_after(mut self, end: End) -> End {
        if let (Link::Tcp(tcp), End::Refused | End::Unauthenticated(_)) = (&mut self.link, &end) {
            let _ = timeout(LINGER, tcp.stream.linger()).await;
        }
        end
    }

    async fn end(&mut self, id: SlotId, status: Status, result: u32) -> End {
        self.complete(id, status, result.into());
        self.flush().await.err().unwrap_or(End::Refused)
    }

    /// Drops the requests for events, which a reset has ended.
    fn drop_held(&mut self) {
        for (id, _) in self.slots.extract_if(.., |_, slot| slot.is_held) {
            match &mut self.link {
                Link::Tcp(tcp) => tcp.queue.drop_command(id),
                Link::Rdma(rdma) => rdma.drop_command(id),
            }
        }
    }

    /// The command in a slot, if it is one of an authentication.
    fn authentication(&self, id: SlotId) -> Option<Command> {
        let entry = &self.slots[&id].entry;
        let command = (entry.opcode() == command::OPCODE).then(|| Command::decode(entry).ok()).flatten();
        command.filter(|command| {
            matches!(command, Command::AuthenticationSend { .. } | Command::AuthenticationReceive { .. })
        })
    }

    /// Executes a command of an authentication. One that has failed ends the connection, when the host knows.
    async fn exchange(
        &mut self,
        inner: &Inner,
        id: SlotId,
        is_intact: bool,
        command: Command,
        proof: &mut Authentication,
    ) -> Result<(), End> {
        let blocks = self.data_blocks();
        let slot = self.slots.get_mut(&id).expect("the queue has just reported it");
        let done = match slot.data_len(is_intact, blocks) {
            Ok(len) => {
                let done = proof.execute(inner, command, &slot.data, len).await;
                done.map_err(|code| code.status().as_final())
            }
            Err(status) => Err(status),
        };
        match done {
            Ok(message) if message.is_empty() => self.complete(id, Status::new(0), 0),
            Ok(message) => {
                slot.data = message;
                self.complete_with_data(id, 0);
            }
            Err(status) => self.complete(id, status, 0),
        }
        if let Progress::Failed(failure) = proof.progress() {
            self.flush().await?;
            return Err(End::Unauthenticated(failure));
        }
        Ok(())
    }

    /// Completes Connect, with these requirements.
    fn admitted(&mut self, id: SlotId, connect: &Connect, place: &Place, requirements: u32) {
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.data.clear();
        }
        let (entries, disables_flow_control) = (connect.sqsize + 1, connect.disables_flow_control);
        match &mut self.link {
            Link::Tcp(tcp) => tcp.queue.connect(entries, disables_flow_control),
            Link::Rdma(rdma) => rdma.connect(entries, disables_flow_control),
        }
        let result = u32::from(place.controller) | requirements;
        self.complete(id, Status::new(0), result.into());
    }
}

async fn serve_admin(
    inner: &Rc<Inner>,
    mut connection: Connection,
    way: Way,
    begun: Begun,
) -> Result<(), End> {
    let Begun { connect, data, start, _connected } = begun;
    let (id, reserved) = start.split();
    let admitted = timeout(PATIENCE, inner.admit_admin(&connect, &data, way, reserved)).await;
    let (place, news) = match admitted.unwrap_or(Err(BUSY)) {
        Ok(admitted) => admitted,
        Err(refusal) => {
            let end = connection.refuse(id, refusal).await;
            return Err(connection.end_after(end).await);
        }
    };
    if let Some(id) = id {
        connection.admitted(id, &connect, &place, 0);
    }
    let ended = run_admin(inner, &mut connection, &place, &news).await;
    inner.end_controller(&place).await;
    match ended {
        Ok(()) => Ok(()),
        Err(end) => Err(connection.end_after(end).await),
    }
}

/// AUTHREQ of Connect's result: the host authenticates next (ATR).
const AUTHENTICATION_REQUIRED: u32 = 1 << 17;
/// Why a host cannot connect: its earlier controller does not end, or there are too many queues.
const BUSY: Refusal = Refusal::Code(status::CONTROLLER_BUSY);

async fn run_admin(
    inner: &Rc<Inner>,
    connection: &mut Connection,
    place: &Place,
    news: &Notify,
) -> Result<(), End> {
    let mut again: Option<Authentication> = None;
    // The host has failed to authenticate, and has until then to ask why.
    let mut refused = None;
    loop {
        let Some(deadline) = inner.with_live(place, |live| live.controller.deadline()) else { return Ok(()) };
        let left = deadline.map(|at| Duration::from_nanos(at.saturating_sub(inner.now())));
        let expires = async {
            match left {
                Some(left) => sleep_until(Instant::now() + left).await,
                None => std::future::pending().await,
            }
        };
        let is_not_asked = async {
            match refused {
                Some((at, _)) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = connection.next() => {
                let (id, is_intact) = ready?;
                match connection.authentication(id) {
                    Some(command) => {
                        authenticate_again(inner, connection, place, (id, is_intact, command), &mut again).await?;
                    }
                    None if refused.is_some() => {
                        connection.complete(id, status::AUTHENTICATION_REQUIRED.status().as_final(), 0);
                    }
                    None => execute(inner, connection, place, id, is_intact).await?,
                }
                let failure = again.as_ref().and_then(Authentication::failure);
                refused = refused.or_else(|| Some((Instant::now() + PATIENCE, failure?)));
                // A host that floods its admin queue leaves control to others.
                yield_now().await;
            }
            () = news.notified() => {
                let Some(false) = inner.with_live(place, |live| live.is_ending) else { return Ok(()) };
            }
            () = is_not_asked => {
                let (_, failure) = refused.expect("it has failed");
                return Err(End::Unauthenticated(failure));
            }
            () = expires => {
                let now = inner.now();
                if inner.with_live(place, |live| live.controller.expire(now)) != Some(false) {
                    limited!(inner.lines, warn, subsystem = %place.subsystem, controller = place.controller,
                        "a host has sent no keep-alive: its controller ends");
                    return Err(End::Refused);
                }
            }
        }
        report_events(inner, connection, place);
    }
}

/// Executes a command of a host that authenticates again, with what it must know now.
async fn authenticate_again(
    inner: &Inner,
    connection: &mut Connection,
    place: &Place,
    (id, is_intact, command): (SlotId, bool, Command),
    again: &mut Option<Authentication>,
) -> Result<(), End> {
    if !again.as_ref().is_some_and(Authentication::is_under_way)
        && matches!(command, Command::AuthenticationSend { .. })
    {
        *again = inner.secrets_of(place).map(Authentication::new);
    }
    match again {
        Some(proof) => connection.exchange(inner, id, is_intact, command, proof).await,
        // The host need not authenticate.
        None => execute(inner, connection, place, id, is_intact).await,
    }
}

/// Completes the requests for events that have happened.
fn report_events(inner: &Inner, connection: &mut Connection, place: &Place) {
    while let Some(Some(entry)) = inner.with_live(place, |live| live.controller.next_completion()) {
        // Another command of the host may have the same identifier.
        let is_meant = |slot: &Slot| slot.is_held && slot.entry.cid() == entry.cid();
        if let Some((&id, slot)) = connection.slots.iter_mut().find(|(_, slot)| is_meant(slot)) {
            slot.is_held = false;
            connection.complete(id, entry.status(), entry.result_64());
        }
    }
}

async fn execute(
    inner: &Inner,
    connection: &mut Connection,
    place: &Place,
    id: SlotId,
    is_intact: bool,
) -> Result<(), End> {
    let blocks = connection.data_blocks();
    let slot = connection.slots.get_mut(&id).expect("the queue has just reported it");
    let len = match slot.data_len(is_intact, blocks) {
        Ok(len) => len,
        Err(status) => {
            let status = inner.with_live(place, |live| live.retry_delays.add(status));
            connection.complete(id, status.ok_or(End::Refused)?, 0);
            return Ok(());
        }
    };
    let now = inner.now();
    let run = |live: &mut Live| {
        let outcome = live.controller.execute(&slot.entry, len, now, &mut slot.data);
        live.retry_delays.enable(live.controller.has_retry_delays());
        outcome
    };
    let outcome = inner.with_live(place, run).ok_or(End::Refused)?;
    match outcome {
        Outcome::Complete { status, result } if status.is_success() && !slot.data.is_empty() => {
            connection.complete_with_data(id, result);
        }
        Outcome::Complete { status, result } => connection.complete(id, status, result),
        Outcome::Held => slot.is_held = true,
        Outcome::Abort { sqid, cid } => {
            let of_command = inner
                .with_live(place, |live| live.queues.get(&sqid).map(|queue| queue.root.clone()))
                .flatten();
            let is_aborted = match of_command {
                Some(of_command) => of_command.call(move |queue, cx| queue.abort(cid, cx)).await == Ok(true),
                None => false,
            };
            // Result 1 says that the command was not aborted; it may still be.
            connection.complete(id, Status::new(0), u64::from(!is_aborted));
        }
        Outcome::Persist { nsids, persists } => {
            let mut done = Ok(());
            for nsid in nsids {
                done = done.and(inner.set_persists(&place.subsystem, nsid, persists).await);
            }
            let status = done.map_or_else(refusal, |()| Status::new(0));
            let status = inner.with_live(place, |live| live.retry_delays.add(status));
            connection.complete(id, status.ok_or(End::Refused)?, 0);
        }
        Outcome::Changed(change) => {
            if matches!(change, Change::Reset | Change::ShutDown) {
                inner.end_queues(place).await;
            }
            if change == Change::Reset {
                connection.drop_held();
            }
            if change == Change::ShutDown {
                inner.with_live(place, |live| live.controller.finish_shutdown());
            }
            connection.complete(id, Status::new(0), 0);
        }
    }
    Ok(())
}
