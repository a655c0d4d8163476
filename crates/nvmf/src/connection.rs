//! Connections until Connect and the authentication of their hosts, and admin queues. Control context.

use crate::association::{Beginning, Live, Place, Reserved, Way};
use crate::authentication::Authentication;
use crate::pool::TRANSFER_MAX;
use crate::queue::{Connected, IoQueue, Opened};
use crate::quota::{Counted, Waits};
use crate::reservation::{Asker, OfHost};
use crate::stream::{Stream, StreamError};
use crate::subsystem::Channel;
use crate::target::{IN_CAPSULE_MAX, Inner};
use crate::traffic::Counts;
use aryk_log_limit::limited;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::chap::{Failure, Progress};
use aryk_nvme_fabrics::command::{self, Command, Connect};
use aryk_nvme_fabrics::connect::{ConnectData, Refusal};
use aryk_nvme_fabrics::controller::Outcome;
use aryk_nvme_fabrics::property::Change;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::status;
use aryk_nvme_fabrics::tcp::{IcResp, Piece, Queue, Received, SlotId};
use aryk_reactor::{CoreSet, Cx, Handle, Nanos, RootRef};
use aryk_tls::TlsError;
use futures_channel::oneshot;
use rustix::net::sockopt;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep_until, timeout};

/// How long a host has to send Connect, then to authenticate, and to read the replies of its admin queue.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a host may be silent before the kernel asks whether it is still there, and how often the kernel asks.
const SILENCE: Duration = Duration::from_secs(10);
/// How long the network, or a host that does not read, may keep the kernel from sending data.
const UNSENT_MS_MAX: u32 = 30_000;
/// The largest data of an H2CData PDU.
const H2C_DATA_MAX: u32 = 128 << 10;
/// How long a listener pauses when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts the connections of a listener.
pub(crate) async fn accept(inner: Weak<Inner>, listener: TcpListener, address: SocketAddr, channel: Channel) {
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
    (listener, channel): (SocketAddr, Channel),
    peer: SocketAddr,
    waits: Waits,
) {
    let ended = async {
        watch_over(&stream)?;
        let way = Way { listener, peer, local: stream.local_addr()? };
        let mut connection = Connection::new(Stream::new(stream));
        let begun = async {
            if channel == Channel::Tls {
                let secured = timeout(PATIENCE, connection.secure(&inner));
                secured.await.map_err(|_| End::Refused)??;
            }
            begin(&inner, &mut connection, way).await
        };
        let begun = tokio::select! {
            begun = begun => begun?,
            () = waits.until_replaced() => {
                limited!(inner.lines, warn, %peer, "too many hosts connect at the same time: the oldest attempt ends");
                return Ok(());
            }
        };
        drop(waits);
        match begun.connect.qid {
            0 => serve_admin(&inner, connection, way, begun).await,
            _ => hand_over(&inner, connection, way, begun).await,
        }
    };
    match ended.await {
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
        return connection.refuse(Some(id), BUSY).await;
    };
    let checked = inner.check_channel(&data, connection.stream.identity(), way);
    let proof = match checked.and_then(|()| inner.must_prove(&data, way)) {
        Ok(proof) => proof,
        Err(refusal) => return connection.refuse(Some(id), refusal).await,
    };
    let start = match proof {
        None => Start::Asked(id),
        Some(proof) => {
            let reserved = match inner.reserve(&connect, &data, way) {
                Ok(reserved) => reserved,
                Err(refusal) => return connection.refuse(Some(id), refusal).await,
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
                connection.queue.complete(id, required, 0);
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
    /// Bytes of data that the host sends, or for which it has room.
    fn data_len(&self, is_intact: bool) -> Result<u32, Status> {
        let sgl = Sgl::decode(&self.entry);
        let sgl = sgl.and_then(|sgl| sgl.check(self.capsule_len, TRANSFER_MAX as u32).map(|()| sgl));
        match sgl {
            Ok(sgl) if is_intact => Ok(sgl.len()),
            Ok(_) => Err(Code::TRANSIENT_TRANSPORT_ERROR.status()),
            Err(code) => Err(code.status().as_final()),
        }
    }
}

/// A connection in control.
struct Connection {
    stream: Stream,
    queue: Queue,
    slots: BTreeMap<SlotId, Slot>,
    /// What was received and not taken yet.
    input: Vec<u8>,
}

impl Connection {
    fn new(stream: Stream) -> Self {
        let supported =
            IcResp { alignment: 0, header_digest: true, data_digest: true, h2c_data_max: H2C_DATA_MAX };
        let queue = Queue::new(supported, IN_CAPSULE_MAX);
        Self { stream, queue, slots: BTreeMap::new(), input: Vec::new() }
    }

    /// Makes the handshake of TLS.
    async fn secure(&mut self, inner: &Inner) -> Result<(), End> {
        let psks = Arc::clone(&inner.state.borrow().psks);
        Ok(self.stream.secure(psks, &mut self.input).await?)
    }

    /// The next command whose data has arrived, and whether the data is intact. Earlier replies are written first: so what a host
    /// makes the connection store is bounded.
    async fn next(&mut self) -> Result<(SlotId, bool), End> {
        loop {
            self.flush().await?;
            if let Some(ready) = self.take().await? {
                return Ok(ready);
            }
            // The answer to an ICReq.
            self.flush().await?;
            self.stream.receive(&mut self.input).await?;
        }
    }

    /// Takes what was received, up to the next command.
    async fn take(&mut self) -> Result<Option<(SlotId, bool)>, End> {
        let bytes = std::mem::take(&mut self.input);
        let mut input = &bytes[..];
        loop {
            match self.queue.receive(&mut input) {
                Ok(None) => return Ok(None),
                Ok(Some(Received::Command { slot, entry, data_len })) => {
                    let data = vec![0; data_len as usize];
                    let command = Slot { entry, capsule_len: data_len, data, is_held: false };
                    self.slots.insert(slot, command);
                }
                Ok(Some(Received::Data { slot, offset, bytes })) => {
                    let slot = self.slots.get_mut(&slot).expect("its command came first");
                    slot.data[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                }
                Ok(Some(Received::Ready { slot, is_intact })) => {
                    self.input = input.to_vec();
                    return Ok(Some((slot, is_intact)));
                }
                Ok(Some(Received::Terminated(_))) => return Err(End::Refused),
                Err(fatal) => {
                    self.queue.terminate(fatal);
                    self.flush().await?;
                    return Err(End::Refused);
                }
            }
        }
    }

    /// Writes the output, for which the host has a limited time.
    async fn flush(&mut self) -> Result<(), End> {
        match self.queue.is_output_empty() && self.stream.is_flushed() {
            true => Ok(()),
            false => timeout(PATIENCE, self.write()).await.map_err(|_| End::Refused)?,
        }
    }

    async fn write(&mut self) -> Result<(), End> {
        while !self.queue.is_output_empty() {
            let slices: Vec<IoSlice<'_>> = (self.queue.output().take(8))
                .map(|piece| match piece {
                    Piece::Bytes(bytes) => IoSlice::new(bytes),
                    Piece::Data { slot, offset, len } => {
                        IoSlice::new(&self.slots[&slot].data[offset as usize..][..len as usize])
                    }
                })
                .collect();
            let Some(len) = self.stream.try_send(&slices)? else {
                drop(slices);
                self.stream.sendable().await?;
                continue;
            };
            drop(slices);
            let slots = &mut self.slots;
            self.queue.sent(len, |slot| {
                slots.remove(&slot);
            });
        }
        Ok(self.stream.flush().await?)
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
            Err((status, result)) => self.end(id, status, result).await,
        }
    }

    /// Ends the connection with the completion of Connect, unless that has been completed.
    async fn refuse<T>(&mut self, id: Option<SlotId>, refusal: Refusal) -> Result<T, End> {
        let (status, result) = refusal.completion();
        match id {
            Some(id) => self.end(id, status, result).await,
            None => Err(End::Refused),
        }
    }

    async fn end<T>(&mut self, id: SlotId, status: Status, result: u32) -> Result<T, End> {
        self.queue.complete(id, status, result.into());
        self.flush().await?;
        Err(End::Refused)
    }

    /// Drops the requests for events, which a reset has ended.
    fn drop_held(&mut self) {
        for (id, _) in self.slots.extract_if(.., |_, slot| slot.is_held) {
            self.queue.drop_command(id);
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
        let slot = self.slots.get_mut(&id).expect("the queue has just reported it");
        let done = match slot.data_len(is_intact) {
            Ok(len) => {
                let done = proof.execute(inner, command, &slot.data, len).await;
                done.map_err(|code| code.status().as_final())
            }
            Err(status) => Err(status),
        };
        match done {
            Ok(message) if message.is_empty() => self.queue.complete(id, Status::new(0), 0),
            Ok(message) => {
                slot.data = message;
                self.queue.complete_with_data(id, &slot.data, 0);
            }
            Err(status) => self.queue.complete(id, status, 0),
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
        self.queue.connect(connect.sqsize + 1, connect.disables_flow_control);
        let result = u32::from(place.controller) | requirements;
        self.queue.complete(id, Status::new(0), result.into());
    }
}

/// Moves an I/O queue to a reactor, and waits for its end.
async fn hand_over(inner: &Rc<Inner>, mut connection: Connection, way: Way, begun: Begun) -> Result<(), End> {
    let Begun { connect, data, start, _connected } = begun;
    let (id, _) = start.split();
    let place = match inner.admit_io(&connect, &data, way) {
        Ok(place) => place,
        Err(refusal) => return connection.refuse(id, refusal).await,
    };
    if let Some(slot) = id.and_then(|id| connection.slots.get_mut(&id)) {
        slot.data.clear();
    }
    let ended = run_io(inner, connection, way, id, &connect, (&place, &data)).await;
    inner.queue_ended(&place, connect.qid);
    ended
}

async fn run_io(
    inner: &Rc<Inner>,
    connection: Connection,
    way: Way,
    id: Option<SlotId>,
    connect: &Connect,
    (place, data): (&Place, &ConnectData),
) -> Result<(), End> {
    let namespaces = || {
        let state = inner.state.borrow();
        let subsystem = state.subsystems.get(&place.subsystem);
        subsystem
            .map(|subsystem| subsystem.opened((&data.host, &data.host_id), way.listener, &state.limits))
            .unwrap_or_default()
    };
    let hold = inner.env.reactors().find_least_loaded(None).ok_or(End::Refused)?;
    // A call that removes a namespace waits until this queue has learned of that.
    let beginning = inner.begin_queue(place);
    let opened = namespaces();
    let first: Vec<_> = opened.iter().map(|opened| (opened.nsid, opened.number)).collect();
    let prepared = tokio::select! {
        prepared = prepare(inner, place, &hold, opened) => prepared,
        () = inner.until_ending(place) => return Err(End::Refused),
    };
    let (socket, tls) = connection.stream.into_parts()?;
    let counts = Arc::<Counts>::default();
    let connected = Connected {
        socket,
        tls,
        queue: connection.queue,
        entries: connect.sqsize + 1,
        patience: Nanos(inner.state.borrow().limits.patience.as_nanos() as u64),
        rest: connection.input,
        lines: Arc::clone(&inner.lines),
        counts: Arc::clone(&counts),
        asker: Asker { host: OfHost { place: place.clone(), id: data.host_id }, asked: inner.asked.clone() },
    };
    let (sender, mut ended) = oneshot::channel();
    let name = format!("{} queue {}", data.host, connect.qid);
    let start = move |cx: &mut Cx| {
        let thread = cx.add_thread(name.clone(), CoreSet::allowed());
        let made = cx.add_root(thread, &name, |root, cx| {
            IoQueue::new(connected, prepared, sender, (root, thread), cx)
        });
        made.inspect_err(|_| cx.remove_thread(thread))
    };
    let root = hold.call(start).await.map_err(|_| End::Refused)??;
    // The host has no reply to Connect yet: what ends its controller or removes a namespace finds the queue before its first
    // command.
    if !inner.queue_began(place, connect.qid, &root, counts) {
        let _ = root.call(|queue, cx| queue.close(cx)).await;
        let _ = ended.await;
        return Ok(());
    }
    let (disables_flow_control, controller) = (connect.disables_flow_control, place.controller);
    let begin = async {
        reconcile(inner, place, &root, &first, namespaces, beginning).await;
        let begin = move |queue: &mut IoQueue, cx: &mut Cx| {
            queue.begin(id, disables_flow_control, controller, cx);
        };
        let _ = root.call(begin).await;
    };
    tokio::select! {
        _ = &mut ended => return Ok(()),
        () = begin => {}
    }
    let _ = ended.await;
    Ok(())
}

/// Has the disks of namespaces prepare a reactor, and returns the namespaces that are ready. The others are being removed.
async fn prepare(inner: &Inner, place: &Place, reactor: &Handle, opened: Vec<Opened>) -> Vec<Opened> {
    let mut prepared = Vec::new();
    for opened in opened {
        tokio::select! {
            is_ready = opened.descriptor.prepare(reactor) => if is_ready.is_ok() { prepared.push(opened) },
            () = inner.until_gone(place, opened.nsid, opened.number) => {}
        }
    }
    prepared
}

/// Adds and removes namespaces of a queue that has just begun with the namespaces `first`, as they were added and removed
/// meanwhile. The target knows the queue from then on, and updates it at each later change.
async fn reconcile(
    inner: &Inner,
    place: &Place,
    root: &RootRef<IoQueue>,
    first: &[(u32, u64)],
    now: impl Fn() -> Vec<Opened>,
    beginning: Beginning,
) {
    let (kept, added): (Vec<_>, Vec<_>) =
        now().into_iter().partition(|opened| first.iter().any(|(_, number)| *number == opened.number));
    let is_gone = |number: u64| kept.iter().all(|opened| opened.number != number);
    let gone: Vec<_> = first.iter().copied().filter(|(_, number)| is_gone(*number)).collect();
    let rules: Vec<_> = kept.iter().map(|of| (of.nsid, of.number, of.rules)).collect();
    let (closing, gone): (Vec<_>, Vec<_>) = (gone.into_iter())
        .map(|of| {
            let (closed, is_closed) = oneshot::channel();
            (is_closed, (of, closed))
        })
        .unzip();
    let follow = move |queue: &mut IoQueue, cx: &mut Cx| {
        gone.into_iter().for_each(|((nsid, number), closed)| queue.remove(nsid, number, closed, cx));
        queue.update(&rules);
    };
    let _ = root.call(follow).await;
    for is_closed in closing {
        // The sender is dropped if the queue has not opened it.
        let _ = is_closed.await;
    }
    drop(beginning);
    for Opened { nsid, number, descriptor, .. } in added {
        let is_ready = tokio::select! {
            is_ready = descriptor.prepare(root.handle()) => is_ready.is_ok(),
            () = inner.until_gone(place, nsid, number) => false,
        };
        if is_ready && let Some(opened) = now().into_iter().find(|opened| opened.number == number) {
            let _ = root.call(move |queue, cx| queue.add(opened, cx)).await;
        }
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
        Err(refusal) => return connection.refuse(id, refusal).await,
    };
    if let Some(id) = id {
        connection.admitted(id, &connect, &place, 0);
    }
    let ended = run_admin(inner, &mut connection, &place, &news).await;
    inner.end_controller(&place).await;
    ended
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
    let mut again = None;
    loop {
        let Some(deadline) = inner.with_live(place, |live| live.controller.deadline()) else { return Ok(()) };
        let left = deadline.map(|at| Duration::from_nanos(at.saturating_sub(inner.now())));
        let expires = async {
            match left {
                Some(left) => sleep_until(Instant::now() + left).await,
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
                    None => execute(inner, connection, place, id, is_intact).await?,
                }
                // A host that floods its admin queue leaves control to others.
                yield_now().await;
            }
            () = news.notified() => {
                let Some(false) = inner.with_live(place, |live| live.is_ending) else { return Ok(()) };
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
    let is_under_way = again.as_ref().is_some_and(|proof| proof.progress() == Progress::Pending);
    if !is_under_way && matches!(command, Command::AuthenticationSend { .. }) {
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
            connection.queue.complete(id, entry.status(), entry.result_64());
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
    let Connection { queue, slots, .. } = connection;
    let slot = slots.get_mut(&id).expect("the queue has just reported it");
    let len = match slot.data_len(is_intact) {
        Ok(len) => len,
        Err(status) => {
            queue.complete(id, status, 0);
            return Ok(());
        }
    };
    let now = inner.now();
    let run = |live: &mut Live| live.controller.execute(&slot.entry, len, now, &mut slot.data);
    let outcome = inner.with_live(place, run).ok_or(End::Refused)?;
    match outcome {
        Outcome::Complete { status, result } if status.is_success() && !slot.data.is_empty() => {
            queue.complete_with_data(id, &slot.data, result);
        }
        Outcome::Complete { status, result } => queue.complete(id, status, result),
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
            connection.queue.complete(id, Status::new(0), u64::from(!is_aborted));
        }
        Outcome::Persist { nsids, persists } => {
            let mut done = Ok(());
            for nsid in nsids {
                done = done.and(inner.set_persists(&place.subsystem, nsid, persists).await);
            }
            let status = match done {
                Ok(()) => Status::new(0),
                // Another change takes long: the host may try again.
                Err(Code::COMMAND_INTERRUPTED) => Code::COMMAND_INTERRUPTED.status(),
                Err(code) => code.status().as_final(),
            };
            connection.queue.complete(id, status, 0);
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
            connection.queue.complete(id, Status::new(0), 0);
        }
    }
    Ok(())
}
