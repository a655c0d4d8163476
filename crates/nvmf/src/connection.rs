//! Connections until Connect, and admin queues. Control context.

use crate::association::{Live, Place, Way};
use crate::pool::TRANSFER_MAX;
use crate::queue::{Connected, IoQueue, Opened};
use crate::quota::Counted;
use crate::target::{IN_CAPSULE_MAX, Inner};
use aryk_log_limit::limited;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::command::{self, Command, Connect};
use aryk_nvme_fabrics::connect::{ConnectData, Refusal};
use aryk_nvme_fabrics::controller::Outcome;
use aryk_nvme_fabrics::property::Change;
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_nvme_fabrics::status;
use aryk_nvme_fabrics::tcp::{IcResp, Piece, Queue, Received, SlotId};
use aryk_reactor::{CoreSet, Cx, Nanos, RootRef};
use futures_channel::oneshot;
use rustix::net::sockopt;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{spawn_local, yield_now};
use tokio::time::{Instant, sleep_until, timeout};

/// Connections that have not sent Connect yet, at most.
const UNCONNECTED_MAX: u32 = 1024;
/// How long a host has to send Connect, and to read the replies of its admin queue.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a host may be silent before the kernel asks whether it is still there, and how often the kernel asks.
const SILENCE: Duration = Duration::from_secs(10);
/// How long the network, or a host that does not read, may keep the kernel from sending data.
const UNSENT_MS_MAX: u32 = 30_000;
/// Bytes that are read at a time.
const READ_MAX: usize = 8192;
/// The largest data of an H2CData PDU.
const H2C_DATA_MAX: u32 = 128 << 10;
/// How long a listener pauses when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts the connections of a listener.
pub(crate) async fn accept(inner: Weak<Inner>, listener: TcpListener, address: SocketAddr) {
    loop {
        let accepted = listener.accept().await;
        let Some(inner) = inner.upgrade() else { return };
        match accepted {
            Ok((stream, peer)) => match inner.unconnected.take(peer.ip(), UNCONNECTED_MAX) {
                Some(unconnected) => drop(spawn_local(serve(inner, stream, address, peer, unconnected))),
                None => {
                    limited!(inner.lines, warn, %peer, "too many hosts connect at the same time: one is refused");
                }
            },
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
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

async fn serve(
    inner: Rc<Inner>,
    stream: TcpStream,
    listener: SocketAddr,
    peer: SocketAddr,
    unconnected: Counted,
) {
    let ended = async {
        watch_over(&stream)?;
        let way = Way { listener, peer, local: stream.local_addr()? };
        let mut connection = Connection::new(stream);
        let (slot, connect, data) =
            timeout(PATIENCE, connection.connect()).await.map_err(|_| End::Refused)??;
        drop(unconnected);
        let connections_max = inner.state.borrow().limits.connections;
        let Some(_connected) = inner.connected.take(peer.ip(), connections_max) else {
            let (status, result) = BUSY.completion();
            return connection.refuse(slot, status, result).await;
        };
        match connect.qid {
            0 => serve_admin(&inner, connection, way, slot, &connect, &data).await,
            _ => hand_over(&inner, connection, way, slot, &connect, &data).await,
        }
    };
    match ended.await {
        Ok(()) => {}
        Err(End::Lost(error)) => tracing::debug!(%peer, %error, "a host has disconnected"),
        Err(End::Refused) => limited!(inner.lines, warn, %peer, "the connection of a host was ended"),
    }
}

struct Slot {
    entry: SubmissionEntry,
    capsule_len: u32,
    data: Vec<u8>,
    /// The controller completes it later.
    is_held: bool,
}

/// A connection in control.
struct Connection {
    stream: TcpStream,
    queue: Queue,
    slots: BTreeMap<SlotId, Slot>,
    /// What was received and not taken yet.
    input: Vec<u8>,
}

impl Connection {
    fn new(stream: TcpStream) -> Self {
        let supported =
            IcResp { alignment: 0, header_digest: true, data_digest: true, h2c_data_max: H2C_DATA_MAX };
        let queue = Queue::new(supported, IN_CAPSULE_MAX);
        Self { stream, queue, slots: BTreeMap::new(), input: Vec::new() }
    }

    /// The next command whose data has arrived, and whether the data is intact. Earlier replies are written first: so what a host
    /// makes the connection store is bounded.
    async fn next(&mut self) -> Result<(SlotId, bool), End> {
        loop {
            self.flush().await?;
            if let Some(ready) = self.take().await? {
                return Ok(ready);
            }
            self.stream.readable().await?;
            let mut bytes = [0; READ_MAX];
            match self.stream.try_read(&mut bytes) {
                Ok(0) => return Err(End::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(len) => self.input.extend_from_slice(&bytes[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
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
        match self.queue.is_output_empty() {
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
            match self.stream.try_write_vectored(&slices) {
                Ok(len) => {
                    drop(slices);
                    let slots = &mut self.slots;
                    self.queue.sent(len, |slot| {
                        slots.remove(&slot);
                    });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.stream.writable().await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
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
            Err((status, result)) => self.refuse(id, status, result).await,
        }
    }

    /// Ends the connection with the completion of Connect.
    async fn refuse<T>(&mut self, id: SlotId, status: Status, result: u32) -> Result<T, End> {
        self.queue.complete(id, status, result.into());
        self.flush().await?;
        Err(End::Refused)
    }

    /// Completes Connect.
    fn admitted(&mut self, id: SlotId, connect: &Connect, place: &Place) {
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.data.clear();
        }
        self.queue.connect(connect.sqsize + 1, connect.disables_flow_control);
        self.queue.complete(id, Status::new(0), place.controller.into());
    }
}

/// Moves an I/O queue to a reactor, and waits for its end.
async fn hand_over(
    inner: &Rc<Inner>,
    mut connection: Connection,
    way: Way,
    id: SlotId,
    connect: &Connect,
    data: &ConnectData,
) -> Result<(), End> {
    let place = match inner.admit_io(connect, data, way) {
        Ok(place) => place,
        Err(refusal) => {
            let (status, result) = refusal.completion();
            return connection.refuse(id, status, result).await;
        }
    };
    if let Some(slot) = connection.slots.get_mut(&id) {
        slot.data.clear();
    }
    let ended = run_io(inner, connection, way, id, connect, (&place, data)).await;
    inner.queue_ended(&place, connect.qid);
    ended
}

async fn run_io(
    inner: &Rc<Inner>,
    connection: Connection,
    way: Way,
    id: SlotId,
    connect: &Connect,
    (place, data): (&Place, &ConnectData),
) -> Result<(), End> {
    let namespaces = || {
        let state = inner.state.borrow();
        let subsystem = state.subsystems.get(&place.subsystem);
        subsystem
            .map(|subsystem| subsystem.opened(&data.host, way.listener, &state.limits))
            .unwrap_or_default()
    };
    let hold = inner.env.reactors().find_least_loaded(None).ok_or(End::Refused)?;
    let mut prepared = namespaces();
    let first: Vec<_> = prepared.iter().map(|opened| (opened.nsid, opened.number)).collect();
    let prepare = async {
        for opened in std::mem::take(&mut prepared) {
            // A disk that cannot be opened there is being removed.
            if opened.descriptor.prepare(&hold).await.is_ok() {
                prepared.push(opened);
            }
        }
    };
    tokio::select! {
        () = prepare => {}
        () = inner.until_ending(place) => return Err(End::Refused),
    }
    let connected = Connected {
        socket: connection.stream.into_std()?,
        queue: connection.queue,
        entries: connect.sqsize + 1,
        patience: Nanos(inner.state.borrow().limits.patience.as_nanos() as u64),
        rest: connection.input,
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
    if !inner.queue_began(place, connect.qid, &root) {
        let _ = root.call(|queue, cx| queue.close(cx)).await;
        let _ = ended.await;
        return Ok(());
    }
    let (disables_flow_control, controller) = (connect.disables_flow_control, place.controller);
    let begin = async {
        reconcile(&root, &first, namespaces).await;
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

/// Has a queue that has just begun with the namespaces `first` follow what has changed meanwhile. What changes from the call on,
/// the queue learns from the target.
async fn reconcile(root: &RootRef<IoQueue>, first: &[(u32, u64)], now: impl Fn() -> Vec<Opened>) {
    let (kept, added): (Vec<_>, Vec<_>) =
        now().into_iter().partition(|opened| first.iter().any(|(_, number)| *number == opened.number));
    let is_gone = |number: u64| kept.iter().all(|opened| opened.number != number);
    let gone: Vec<_> = first.iter().copied().filter(|(_, number)| is_gone(*number)).collect();
    let rules: Vec<_> = kept.iter().map(|of| (of.nsid, of.number, of.rules)).collect();
    let follow = move |queue: &mut IoQueue, cx: &mut Cx| {
        gone.iter().for_each(|(nsid, number)| queue.remove(*nsid, *number, oneshot::channel().0, cx));
        queue.update(&rules);
    };
    let _ = root.call(follow).await;
    for Opened { number, descriptor, .. } in added {
        if descriptor.prepare(root.handle()).await.is_ok()
            && let Some(opened) = now().into_iter().find(|opened| opened.number == number)
        {
            let _ = root.call(move |queue, cx| queue.add(opened, cx)).await;
        }
    }
}

async fn serve_admin(
    inner: &Rc<Inner>,
    mut connection: Connection,
    way: Way,
    id: SlotId,
    connect: &Connect,
    data: &ConnectData,
) -> Result<(), End> {
    let admitted = timeout(PATIENCE, inner.admit_admin(connect, data, way)).await;
    let (place, news) = match admitted.unwrap_or(Err(BUSY)) {
        Ok(admitted) => admitted,
        Err(refusal) => {
            let (status, result) = refusal.completion();
            return connection.refuse(id, status, result).await;
        }
    };
    connection.admitted(id, connect, &place);
    let ended = run_admin(inner, &mut connection, &place, &news).await;
    inner.end_controller(&place).await;
    ended
}

/// Why a host cannot connect: its earlier controller does not end, or there are too many queues.
const BUSY: Refusal = Refusal::Code(status::CONTROLLER_BUSY);

async fn run_admin(
    inner: &Rc<Inner>,
    connection: &mut Connection,
    place: &Place,
    news: &Notify,
) -> Result<(), End> {
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
                execute(inner, connection, place, id, is_intact).await?;
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
    let sgl = Sgl::decode(&slot.entry);
    let sgl = sgl.and_then(|sgl| sgl.check(slot.capsule_len, TRANSFER_MAX as u32).map(|()| sgl));
    let sgl = match sgl {
        Ok(sgl) if is_intact => sgl,
        Ok(_) => {
            queue.complete(id, Code::TRANSIENT_TRANSPORT_ERROR.status(), 0);
            return Ok(());
        }
        Err(code) => {
            queue.complete(id, code.status().as_final(), 0);
            return Ok(());
        }
    };
    let now = inner.now();
    let run = |live: &mut Live| live.controller.execute(&slot.entry, sgl.len(), now, &mut slot.data);
    let outcome = inner.with_live(place, run).ok_or(End::Refused)?;
    match outcome {
        Outcome::Complete { status, result } if status.is_success() && !slot.data.is_empty() => {
            queue.complete_with_data(id, &slot.data, result);
        }
        Outcome::Complete { status, result } => queue.complete(id, status, result),
        Outcome::Held => slot.is_held = true,
        // The command may still complete by itself; result 1 says that it was not aborted.
        Outcome::Abort { .. } => queue.complete(id, Status::new(0), 1),
        Outcome::Changed(change) => {
            if matches!(change, Change::Reset | Change::ShutDown) {
                inner.end_queues(place).await;
            }
            if change == Change::ShutDown {
                inner.with_live(place, |live| live.controller.finish_shutdown());
            }
            connection.queue.complete(id, Status::new(0), 0);
        }
    }
    Ok(())
}
