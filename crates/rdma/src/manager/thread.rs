//! The thread that manages connections. It executes commands, and takes the events of connections.

use super::{Device, IdKey, Listener, Manager, Parameters, Parts, Pending, Requests, Setup, StartError};
use crate::domain::FreedDomain;
use crate::endpoint::{Completion, Endpoint, INLINE_MAX, Kind, wr_id};
use crate::shared::{LAST_PATIENCE, RESEND_AFTER, RETURN_INTERVAL, SharedParts};
use crate::verbs::{
    self, AsyncEvent, CmEvent, CmId, CompChannel, ConnParam, Context, Cq, DeviceAttr, EventChannel, Mr, Qp,
    QpAttr, QpInitAttr, SendWr, SrqInitAttr, Wc, access, event, opcode, send_flags,
};
use crate::{CallError, ConnectError, Domain, Library, SharedReceives};
use aryk_dma::{Arena, Buffer};
use futures_channel::oneshot;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::time::Duration;

/// Requests for connections that the kernel keeps for a listener.
const BACKLOG: i32 = 128;
/// How long the way to an address may take to find.
const RESOLVE_MS: i32 = 5000;
/// How often a request is repeated that gets no answer.
const RETRIES: u8 = 7;
/// How often a request is repeated that the other computer has no receive for: for ever. The owner of the endpoint has a
/// patience.
const RNR_RETRIES: u8 = 7;

/// Waits for a connection, and gets the other computer's data.
pub(super) type Reply = oneshot::Sender<Result<Vec<u8>, ConnectError>>;

/// What the thread is to do.
pub(super) enum Command {
    Listen {
        manager: Manager,
        address: SocketAddr,
        requests: Requests,
        reply: oneshot::Sender<Result<Listener, CallError>>,
    },
    Resolve {
        manager: Manager,
        address: SocketAddr,
        source: Option<SocketAddr>,
        reply: oneshot::Sender<Result<Pending, CallError>>,
    },
    /// Destroys what has no queue pair.
    Forget(IdKey),
    Reject {
        id: IdKey,
        private_data: Vec<u8>,
    },
    Prepare {
        id: IdKey,
        setup: Setup,
        reads_max: u8,
        manager: Manager,
        reply: oneshot::Sender<Result<(Endpoint, Vec<Buffer>), CallError>>,
    },
    Accept {
        id: IdKey,
        private_data: Vec<u8>,
        reply: Reply,
    },
    Connect {
        id: IdKey,
        private_data: Vec<u8>,
        reply: Reply,
    },
    Disconnect(IdKey),
    Destroy {
        parts: Parts,
        lent: Vec<Buffer>,
        /// Gets a message when the queue pair is destroyed; never if it cannot be.
        ended: oneshot::Sender<()>,
    },
    /// Makes a protection domain of a device.
    MakeDomain {
        device: Device,
        manager: Manager,
        reply: oneshot::Sender<Result<Domain, CallError>>,
    },
    FreeDomain(FreedDomain),
    ShareReceives {
        device: Device,
        /// An address of the device.
        local: SocketAddr,
        /// How many, and bytes of each.
        size: (u32, u32),
        manager: Manager,
        reply: oneshot::Sender<Result<SharedReceives, CallError>>,
    },
    FreeReceives(SharedParts),
    /// No manager is left.
    End,
}

/// What an identifier of librdmacm stands for.
enum Entry {
    Listener {
        manager: Manager,
        requests: Requests,
    },
    /// The way to an address, which is being found.
    Resolving {
        manager: Manager,
        address: SocketAddr,
        reply: oneshot::Sender<Result<Pending, CallError>>,
    },
    /// A connection that was asked for, or will be, and has no endpoint.
    Pending,
    Connection {
        /// Waits for the connection.
        connecting: Option<(&'static str, Reply)>,
        /// Reads that either computer may have of the other's memory at the same time.
        reads_max: u8,
        reads_served: u8,
        /// `None`: it has receives of its own.
        sharing: Option<Sharing>,
    },
}

/// The end of a connection that shares receives.
#[derive(Clone, Copy, Default)]
struct Sharing {
    /// The request was posted that reports the end to the owner.
    is_ending: bool,
    /// The device has said that it takes no more receives.
    takes_no_more: bool,
}

/// A device that connections use.
struct Opened {
    /// The protection domain of endpoints without one of their own.
    pd: *mut c_void,
    attributes: DeviceAttr,
    /// If the device has shared receives: an identifier that is bound to it. librdmacm closes a device that was removed when
    /// the last of its identifiers is destroyed.
    keeper: Option<IdKey>,
}

/// A connection that has ended, and whose queue pair may still take shared receives.
struct Leaving {
    parts: Parts,
    lent: Vec<Buffer>,
    ended: oneshot::Sender<()>,
    /// When it is destroyed, if the device says nothing: a time of the monotonic clock.
    until: Duration,
}

struct Thread {
    library: Library,
    channel: *mut EventChannel,
    entries: HashMap<IdKey, Entry>,
    /// By context.
    devices: HashMap<usize, Opened>,
    /// The oldest comes first.
    leaving: Vec<Leaving>,
}

pub(super) fn run(
    commands: mpsc::Receiver<Command>,
    bell: OwnedFd,
    started: oneshot::Sender<Result<Library, StartError>>,
) {
    let mut thread = match Thread::start() {
        Ok(thread) => thread,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    if started.send(Ok(thread.library.clone())).is_err() {
        return;
    }
    loop {
        thread.wait(&bell);
        let _ = rustix::io::read(&bell, &mut [0; 8]);
        for command in commands.try_iter() {
            match command {
                Command::End => return,
                command => thread.execute(command),
            }
        }
        thread.take_events();
        thread.take_device_events();
        thread.look_at_leaving();
    }
}

/// The time of the monotonic clock.
fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

impl Thread {
    fn start() -> Result<Self, StartError> {
        let library = Library::load()?;
        // SAFETY: the function takes nothing.
        let channel = unsafe { (library.0.rdma_create_event_channel)() };
        let channel = CallError::check_pointer("rdma_create_event_channel", channel).map_err(|error| {
            if error.errno == libc::ENODEV { StartError::NoDevice } else { StartError::Interface(error) }
        })?;
        // SAFETY: the channel, and with it the descriptor, exists.
        let fd = unsafe { BorrowedFd::borrow_raw((*channel).fd) };
        set_nonblocking(fd).map_err(StartError::Interface)?;
        let (entries, devices) = (HashMap::new(), HashMap::new());
        Ok(Self { library, channel, entries, devices, leaving: Vec::new() })
    }

    /// Waits for commands, events, and the time at which something is to be destroyed.
    fn wait(&self, bell: &OwnedFd) {
        // SAFETY: the channel, and with it the descriptor, exists until the thread ends.
        let events = unsafe { BorrowedFd::borrow_raw((*self.channel).fd) };
        let of_devices =
            self.devices.iter().filter(|(_, device)| device.keeper.is_some()).map(|(&context, _)| {
                // SAFETY: the context, and with it the descriptor, exists as long as the device has a keeper.
                unsafe { BorrowedFd::borrow_raw((*(context as *mut Context)).async_fd) }
            });
        let fds = [bell.as_fd(), events].into_iter().chain(of_devices);
        let mut ready: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let patience = self.leaving.first().map(|first| {
            let left = first.until.saturating_sub(now()).min(RETURN_INTERVAL);
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() }
        });
        // An interrupted call is repeated.
        let _ = poll(&mut ready, patience.as_ref());
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Listen { manager, address, requests, reply } => {
                let listening = self.listen(address).map(|(id, address)| {
                    self.entries.insert(id, Entry::Listener { manager: manager.clone(), requests });
                    Listener { manager, id, address }
                });
                // Without a receiver, the listener is dropped.
                let _ = reply.send(listening);
            }
            Command::Resolve { manager, address, source, reply } => match self.resolve(address, source) {
                Ok(id) => drop(self.entries.insert(id, Entry::Resolving { manager, address, reply })),
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::Forget(id) => self.forget(id),
            Command::Reject { id, private_data } => self.reject(id, &private_data),
            Command::Prepare { id, setup, reads_max, manager, reply } => {
                let prepared = self.prepare(id, &setup, reads_max, &manager);
                if prepared.is_err() {
                    self.reject(id, &setup.rejection);
                }
                // An endpoint that nobody takes is dropped, which has this thread destroy its parts.
                let _ = reply.send(prepared.map(|(parts, buffers)| (Endpoint::new(parts, manager), buffers)));
            }
            Command::Accept { id, private_data, reply } => {
                let accept = self.library.0.rdma_accept;
                self.establish("rdma_accept", accept, id, &private_data, reply);
            }
            Command::Connect { id, private_data, reply } => {
                let connect = self.library.0.rdma_connect;
                self.establish("rdma_connect", connect, id, &private_data, reply);
            }
            Command::Disconnect(id) => self.disconnect(id, libc::ECONNRESET),
            Command::Destroy { parts, lent, ended } => {
                self.disconnect(parts.id, libc::ECONNRESET);
                match self.entries.get(&parts.id) {
                    Some(Entry::Connection {
                        sharing: Some(Sharing { takes_no_more: false, .. }), ..
                    }) => {
                        self.leaving.push(Leaving { parts, lent, ended, until: now() + LAST_PATIENCE });
                    }
                    _ => self.destroy(parts, lent, ended),
                }
            }
            // Without a receiver, the domain is freed.
            Command::MakeDomain { device, manager, reply } => {
                drop(reply.send(self.make_domain(device.0 as *mut Context, &manager)));
            }
            Command::FreeDomain(domain) => {
                // SAFETY: it exists, and has no handle any more. It fails if a registration in it cannot be ended.
                unsafe { (self.library.0.ibv_dealloc_pd)(domain.0) };
            }
            Command::ShareReceives { device, local, size, manager, reply } => {
                let made = self.share_receives(device.0 as *mut Context, local, size).and_then(|parts| {
                    let receives = SharedReceives::new(parts, manager);
                    receives.post(0..receives.count())?;
                    Ok(receives)
                });
                // Without a receiver, they are freed.
                drop(reply.send(made));
            }
            Command::FreeReceives(parts) => self.free_receives(parts),
            Command::End => {}
        }
    }

    /// A new identifier.
    fn identifier(&self) -> Result<*mut CmId, CallError> {
        let mut id = std::ptr::null_mut();
        let create = self.library.0.rdma_create_id;
        // SAFETY: the channel exists, and `id` is written.
        let created = unsafe { create(self.channel, &raw mut id, std::ptr::null_mut(), verbs::PS_TCP) };
        CallError::check("rdma_create_id", created).map(|()| id)
    }

    fn resolve(&self, address: SocketAddr, source: Option<SocketAddr>) -> Result<IdKey, CallError> {
        let table = &self.library.0;
        let id = self.identifier()?;
        let (mut raw, mut source) = (to_raw(address), source.map(to_raw));
        let source = source.as_mut().map_or(std::ptr::null_mut(), |source| std::ptr::from_mut(source).cast());
        // SAFETY: the identifier exists, and the addresses are of their families; the source may be null.
        let resolving = unsafe { (table.rdma_resolve_addr)(id, source, (&raw mut raw).cast(), RESOLVE_MS) };
        let resolving = CallError::check("rdma_resolve_addr", resolving);
        if resolving.is_err() {
            // SAFETY: the identifier exists, and is not used afterwards.
            unsafe { (table.rdma_destroy_id)(id) };
        }
        resolving.map(|()| IdKey(id as usize))
    }

    fn listen(&self, address: SocketAddr) -> Result<(IdKey, SocketAddr), CallError> {
        let table = &self.library.0;
        let id = self.bind(address)?;
        // SAFETY: the identifier exists.
        let listening = unsafe { (table.rdma_listen)(id.pointer(), BACKLOG) };
        let listening = CallError::check("rdma_listen", listening);
        // SAFETY: as above.
        let port = u16::from_be(unsafe { (table.rdma_get_src_port)(id.pointer()) });
        if listening.is_err() {
            // SAFETY: the identifier exists, and is not used afterwards.
            unsafe { (table.rdma_destroy_id)(id.pointer()) };
        }
        listening.map(|()| (id, SocketAddr::new(address.ip(), port)))
    }

    /// An identifier that is bound to an address, and with it to the device that has the address.
    fn bind(&self, address: SocketAddr) -> Result<IdKey, CallError> {
        let id = self.identifier()?;
        let mut raw = to_raw(address);
        // SAFETY: the identifier exists, and the address is one of its family.
        let bound = unsafe { (self.library.0.rdma_bind_addr)(id, (&raw mut raw).cast()) };
        let bound = CallError::check("rdma_bind_addr", bound);
        if bound.is_err() {
            // SAFETY: the identifier exists, and is not used afterwards.
            unsafe { (self.library.0.rdma_destroy_id)(id) };
        }
        bound.map(|()| IdKey(id as usize))
    }

    fn forget(&mut self, id: IdKey) {
        self.entries.remove(&id);
        // SAFETY: its owner, whose drop has sent the command, uses it no more, and all of its events were acknowledged.
        unsafe { (self.library.0.rdma_destroy_id)(id.pointer()) };
    }

    fn reject(&mut self, id: IdKey, private_data: &[u8]) {
        let data = private_data.as_ptr().cast();
        // SAFETY: the identifier exists, and the data is copied during the call.
        unsafe { (self.library.0.rdma_reject)(id.pointer(), data, private_data.len() as u8) };
        self.forget(id);
    }

    /// The device of a connection.
    fn device(&mut self, context: *mut Context) -> Result<&mut Opened, CallError> {
        let key = context as usize;
        if !self.devices.contains_key(&key) {
            let mut attributes = MaybeUninit::zeroed();
            // SAFETY: the context exists, and the attributes are written.
            let errno = unsafe { (self.library.0.ibv_query_device)(context, attributes.as_mut_ptr()) };
            if errno != 0 {
                return Err(CallError::new("ibv_query_device", errno.wrapping_abs()));
            }
            // SAFETY: the context exists.
            let pd = unsafe { (self.library.0.ibv_alloc_pd)(context) };
            let pd = CallError::check_pointer("ibv_alloc_pd", pd)?;
            // SAFETY: all fields are numbers, and were written.
            let attributes = unsafe { attributes.assume_init() };
            self.devices.insert(key, Opened { pd, attributes, keeper: None });
        }
        Ok(self.devices.get_mut(&key).expect("just added"))
    }

    fn make_domain(&self, context: *mut Context, manager: &Manager) -> Result<Domain, CallError> {
        // SAFETY: devices, and with them their contexts, exist as long as the process.
        let pd = unsafe { (self.library.0.ibv_alloc_pd)(context) };
        Ok(Domain::new(CallError::check_pointer("ibv_alloc_pd", pd)?, manager.clone()))
    }

    fn share_receives(
        &mut self,
        context: *mut Context,
        local: SocketAddr,
        (count, bytes): (u32, u32),
    ) -> Result<SharedParts, CallError> {
        let library = self.library.clone();
        let table = &library.0;
        if self.device(context)?.keeper.is_none() {
            // SAFETY: the context, and with it the descriptor, exists.
            set_nonblocking(unsafe { BorrowedFd::borrow_raw((*context).async_fd) })?;
            let keeper = self.bind(SocketAddr::new(local.ip(), 0))?;
            // SAFETY: the identifier exists.
            let of_keeper = unsafe { (*keeper.pointer()).verbs };
            if of_keeper != context {
                self.forget(keeper);
                return Err(CallError::new("rdma_bind_addr", libc::ENODEV));
            }
            self.device(context)?.keeper = Some(keeper);
        }
        let Opened { pd, attributes, .. } = self.device(context)?;
        // The completion queue of a connection has room for them, and for its other requests.
        let most = attributes.max_srq_wr.min(attributes.max_cqe / 2);
        let count = count.min(u32::try_from(most).unwrap_or(0));
        if count == 0 {
            return Err(CallError::new("ibv_create_srq", libc::ENOTSUP));
        }
        let sizes = [count as usize * bytes as usize];
        let (arena, mut buffers) = Arena::new(&sizes).map_err(|_| CallError::new("mmap", libc::ENOMEM))?;
        let mut buffer = buffers.pop().expect("one was asked for");
        // SAFETY: the protection domain exists.
        let mr = unsafe { register(&library, *pd, &arena, arena.addr(), access::LOCAL_WRITE) }?;
        let made = Unfinished { library: &library, channel: None, cq: None, mr: Some(mr), shared_mr: None };
        let mut asked =
            SrqInitAttr { srq_context: std::ptr::null_mut(), max_wr: count, max_sge: 1, srq_limit: 0 };
        // SAFETY: the protection domain exists, and the attributes are read and written during the call.
        let srq = unsafe { (table.ibv_create_srq)(*pd, &raw mut asked) };
        let srq = CallError::check_pointer("ibv_create_srq", srq)?;
        std::mem::forget(made);
        let whole = buffer.lend();
        Ok(SharedParts { srq, mr, arena, buffer, whole, count, bytes })
    }

    fn free_receives(&self, parts: SharedParts) {
        let SharedParts { srq, mr, arena, mut buffer, .. } = parts;
        let table = &self.library.0;
        // SAFETY: no handle of the receives is left, and all queue pairs that had them are destroyed.
        let has_ended = unsafe { (table.ibv_destroy_srq)(srq) == 0 && (table.ibv_dereg_mr)(mr) == 0 };
        if has_ended {
            buffer.reclaim();
        } else {
            // The device may still access the memory, so that it must not be used for anything else.
            std::mem::forget((arena, buffer));
        }
    }

    fn prepare(
        &mut self,
        id: IdKey,
        setup: &Setup,
        reads_max: u8,
        manager: &Manager,
    ) -> Result<(Parts, Vec<Buffer>), CallError> {
        // SAFETY: the identifier exists, and is bound to a device.
        let context = unsafe { (*id.pointer()).verbs };
        let library = self.library.clone();
        let table = &library.0;
        let Opened { pd, attributes, .. } = self.device(context)?;
        let of_all = *pd;
        let can_invalidate = attributes.device_cap_flags & verbs::MEM_MGT_EXTENSIONS != 0;
        let most = |of_device: i32| u8::try_from(of_device).unwrap_or(u8::MAX);
        let reads_max = reads_max.min(most(attributes.max_qp_init_rd_atom));
        let reads_served = if setup.shared > 0 { most(attributes.max_qp_rd_atom) } else { 0 };
        let (arena, mut buffers) =
            Arena::new(&setup.buffers).map_err(|_| CallError::new("mmap", libc::ENOMEM))?;
        let domain = match &setup.domain {
            None if setup.shared > 0 => Some(self.make_domain(context, manager)?),
            domain => domain.clone(),
        };
        let pd = domain.as_ref().map_or(of_all, Domain::pd);
        // What is made ends before the domain.
        let mut made = Unfinished { library: &library, channel: None, cq: None, mr: None, shared_mr: None };
        let shared_receives = setup.shared_receives.clone();
        let receives = shared_receives.as_ref().map_or(setup.receives, |_| (0, 0));
        // A message that finds no room would take its shared receive with it.
        let sends = setup.sends.0 + u32::from(shared_receives.is_some());
        let entries = sends + shared_receives.as_ref().map_or(receives.0, SharedReceives::count);
        let (channel, cq) = made.make_completions(context, entries)?;
        // SAFETY: the protection domain exists.
        let mr = unsafe { register(&library, pd, &arena, arena.addr(), access::LOCAL_WRITE) }?;
        made.mr = Some(mr);
        let first_shared = buffers.len().checked_sub(setup.shared).expect("they are among the buffers");
        if let Some(first) = buffers.get_mut(first_shared) {
            let flags = access::LOCAL_WRITE | access::REMOTE_READ | access::REMOTE_WRITE;
            // SAFETY: as above.
            let mr = unsafe { register(&library, pd, &arena, first.bytes_mut().as_ptr() as u64, flags) }?;
            made.shared_mr = Some(mr);
        }
        let mut attributes = QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: cq,
            recv_cq: cq,
            srq: shared_receives.as_ref().map_or(std::ptr::null_mut(), SharedReceives::srq),
            max_send_wr: sends,
            max_recv_wr: receives.0,
            max_send_sge: setup.sends.1,
            max_recv_sge: receives.1,
            max_inline_data: INLINE_MAX as u32,
            qp_type: verbs::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the identifier has no queue pair yet, and what the attributes name exists.
        let created = unsafe { (table.rdma_create_qp)(id.pointer(), pd, &raw mut attributes) };
        CallError::check("rdma_create_qp", created)?;
        let shared = made.shared_mr;
        std::mem::forget(made);
        let sharing = shared_receives.as_ref().map(|_| Sharing::default());
        let connection = Entry::Connection { connecting: None, reads_max, reads_served, sharing };
        self.entries.insert(id, connection);
        // SAFETY: the identifier exists, and has a queue pair now.
        let qp = unsafe { (*id.pointer()).qp };
        let parts = Parts {
            id,
            qp,
            cq,
            channel,
            mr,
            shared,
            domain,
            receives: shared_receives,
            arena,
            events: 0,
            can_invalidate,
            reads_max,
        };
        Ok((parts, buffers))
    }

    /// Accepts a connection, or asks for it.
    fn establish(
        &mut self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut CmId, *mut ConnParam) -> c_int,
        id: IdKey,
        private_data: &[u8],
        reply: Reply,
    ) {
        let Some(Entry::Connection { connecting, reads_max, reads_served, sharing }) =
            self.entries.get_mut(&id)
        else {
            // Its endpoint has been dropped.
            return;
        };
        let mut parameters = ConnParam {
            private_data: private_data.as_ptr().cast(),
            private_data_len: private_data.len() as u8,
            responder_resources: *reads_served,
            initiator_depth: *reads_max,
            flow_control: 0,
            retry_count: RETRIES,
            rnr_retry_count: RNR_RETRIES,
            srq: 0,
            qp_num: 0,
        };
        // SAFETY: it is a function of librdmacm for an identifier, which exists, with data that is copied during the call.
        let established = unsafe { function(id.pointer(), &raw mut parameters) };
        match CallError::check(call, established) {
            Ok(()) => {
                *connecting = Some((call, reply));
                if sharing.is_some() {
                    self.hurry_resends(id);
                }
            }
            Err(error) => drop(reply.send(Err(error.into()))),
        }
    }

    /// Has the other computer of a connection soon send a message again that has found no receive.
    fn hurry_resends(&self, id: IdKey) {
        let mut attributes = QpAttr { unused: [0; 128], min_rnr_timer: RESEND_AFTER, rest: [0; 15] };
        let modify = self.library.0.ibv_modify_qp;
        // SAFETY: the identifier has a queue pair. If the call fails, such messages are late.
        unsafe { modify((*id.pointer()).qp, &raw mut attributes, verbs::MIN_RNR_TIMER) };
    }

    /// The other computer refuses a connection, with this data.
    fn refused(&mut self, id: IdKey, status: i32, data: Vec<u8>) {
        if status == verbs::REJECTED_BY_CONSUMER
            && let Some(Entry::Connection { connecting, .. }) = self.entries.get_mut(&id)
            && let Some((_, connecting)) = connecting.take()
        {
            let _ = connecting.send(Err(ConnectError::Refused(data)));
        }
        self.disconnect(id, libc::ECONNREFUSED);
    }

    /// Ends a connection: its queue pair fails, and its requests complete. A connection without receives of its own may have
    /// none, and gets one.
    fn disconnect(&mut self, id: IdKey, errno: i32) {
        if let Some(Entry::Connection { connecting, sharing, .. }) = self.entries.get_mut(&id) {
            if let Some((call, connecting)) = connecting.take() {
                let _ = connecting.send(Err(CallError::new(call, errno).into()));
            }
            // SAFETY: the identifier exists. It fails if the connection has ended before.
            unsafe { (self.library.0.rdma_disconnect)(id.pointer()) };
            if let Some(sharing) = sharing
                && !std::mem::replace(&mut sharing.is_ending, true)
            {
                let mut request = SendWr::new(wr_id(Kind::End, 0), opcode::SEND, send_flags::SIGNALED);
                request.num_sge = 0;
                let mut failed = std::ptr::null_mut();
                // SAFETY: the identifier has a queue pair, which is in the Error state, so that nothing is sent. If the call
                // fails, there are other requests, which fail.
                unsafe {
                    let qp = (*id.pointer()).qp;
                    ((*(*qp).context).post_send)(qp, &raw mut request, &raw mut failed);
                }
            }
        }
    }

    /// Takes the events of devices.
    fn take_device_events(&mut self) {
        let with_events = self.devices.iter().filter(|(_, device)| device.keeper.is_some());
        let contexts: Vec<usize> = with_events.map(|(&context, _)| context).collect();
        for context in contexts {
            let mut event = AsyncEvent { qp: std::ptr::null_mut(), kind: 0 };
            // SAFETY: the context exists, and does not block; the event is written.
            while unsafe { (self.library.0.ibv_get_async_event)(context as *mut Context, &raw mut event) }
                == 0
            {
                // SAFETY: the event was taken just now, so that what it is about is not destroyed before this call.
                unsafe { (self.library.0.ibv_ack_async_event)(&raw mut event) };
                if event.kind == verbs::LAST_RECEIVE {
                    self.takes_no_more(event.qp);
                }
            }
        }
    }

    /// The device takes no more receives for a queue pair.
    fn takes_no_more(&mut self, qp: *mut Qp) {
        for (id, entry) in &mut self.entries {
            let Entry::Connection { sharing: Some(sharing), .. } = entry else { continue };
            // SAFETY: the identifier exists.
            if unsafe { (*id.pointer()).qp } == qp {
                sharing.takes_no_more = true;
            }
        }
        self.destroy_left(|leaving| leaving.parts.qp == qp);
    }

    /// Posts the receives again that connections which end have taken, and destroys those whose device has not said for long that
    /// they take no more.
    fn look_at_leaving(&mut self) {
        for Leaving { parts, .. } in &self.leaving {
            if let Some(receives) = &parts.receives {
                Self::return_receives(receives, parts.cq);
            }
        }
        if !self.leaving.is_empty() {
            let now = now();
            self.destroy_left(|leaving| leaving.until <= now);
        }
    }

    fn destroy_left(&mut self, is_to_be: impl Fn(&Leaving) -> bool) {
        let (now, later) = std::mem::take(&mut self.leaving).into_iter().partition(is_to_be);
        self.leaving = later;
        for Leaving { parts, lent, ended, .. } in now {
            self.destroy(parts, lent, ended);
        }
    }

    /// Posts the shared receives again that an ended connection has taken, and whose completions were not polled.
    fn return_receives(receives: &SharedReceives, cq: *mut Cq) {
        let mut taken = [Wc::EMPTY; 32];
        loop {
            // SAFETY: the completion queue exists, and there is room for this many completions.
            let count = unsafe { ((*(*cq).context).poll_cq)(cq, taken.len() as c_int, taken.as_mut_ptr()) };
            let Some(count) = usize::try_from(count).ok().filter(|&count| count > 0) else { return };
            let completions = taken[..count].iter().map(Completion::new);
            let ids = completions.filter(|done| done.kind == Kind::Receive).map(|done| done.id);
            // A device that fails has no use for them.
            let _ = receives.post(ids);
        }
    }

    /// Destroys a connection that was disconnected.
    fn destroy(&mut self, parts: Parts, lent: Vec<Buffer>, ended: oneshot::Sender<()>) {
        let Parts { id, qp, cq, channel, mr, shared, domain, receives, arena, events, .. } = parts;
        if let Some(receives) = &receives {
            Self::return_receives(receives, cq);
        }
        let table = &self.library.0;
        // SAFETY: the owner of the parts has given them up, so that nothing uses the queue pair any more.
        let has_ended = unsafe {
            let destroyed = (table.ibv_destroy_qp)(qp);
            (*id.pointer()).qp = std::ptr::null_mut();
            destroyed == 0
        };
        if has_ended {
            // The owner may not wait for it.
            let _ = ended.send(());
        }
        // SAFETY: the owner of the parts has given them up, so that nothing uses them any more; each is destroyed before what it
        // needs. All events of the completion queue that were taken are acknowledged.
        unsafe {
            (table.ibv_ack_cq_events)(cq, events);
            (table.ibv_destroy_cq)(cq);
            (table.ibv_destroy_comp_channel)(channel);
            let of_shared = shared.map_or(0, |mr| (table.ibv_dereg_mr)(mr));
            if (table.ibv_dereg_mr)(mr) == 0 && of_shared == 0 && has_ended {
                // The queue pair was the last that could access the memory.
                lent.into_iter().for_each(|mut buffer| buffer.reclaim());
            } else {
                // The device may still access it, so that it must not be used for anything else.
                std::mem::forget((arena, lent));
            }
        }
        if !has_ended {
            std::mem::forget(receives);
        }
        // It may be the last handle of the domain.
        drop(domain);
        self.forget(id);
    }

    fn take_events(&mut self) {
        loop {
            let mut taken: *mut CmEvent = std::ptr::null_mut();
            // SAFETY: the channel exists and does not block, and the event is written.
            if unsafe { (self.library.0.rdma_get_cm_event)(self.channel, &raw mut taken) } != 0 {
                return;
            }
            // SAFETY: the event exists until it is acknowledged.
            let (id, listener, kind, status, conn) =
                unsafe { ((*taken).id, (*taken).listen_id, (*taken).event, (*taken).status, (*taken).conn) };
            let has_data = matches!(kind, event::CONNECT_REQUEST | event::ESTABLISHED | event::REJECTED);
            let (data, len) = (conn.private_data.cast::<u8>(), usize::from(conn.private_data_len));
            // SAFETY: an event of these kinds has so many bytes of data, and exists until it is acknowledged.
            let data =
                (has_data && !data.is_null()).then(|| unsafe { std::slice::from_raw_parts(data, len) });
            let private_data = data.unwrap_or_default().to_vec();
            let addresses = (kind == event::CONNECT_REQUEST).then(|| {
                // SAFETY: the identifier exists: it is a new one.
                let (peer, local, device) = unsafe { (&(*id).peer, &(*id).local, device_of(id)) };
                (from_raw(peer), from_raw(local), device)
            });
            // SAFETY: the event was taken just now, and is not used afterwards.
            unsafe { (self.library.0.rdma_ack_cm_event)(taken) };
            let id = IdKey(id as usize);
            match addresses {
                Some((peer, local, device)) => {
                    let parameters =
                        Parameters { peer, local, private_data, reads_max: conn.initiator_depth };
                    self.was_asked(IdKey(listener as usize), id, device, parameters);
                }
                None => self.happened(id, kind, status, private_data),
            }
        }
    }

    /// Another computer asks for a connection.
    fn was_asked(&mut self, listener: IdKey, id: IdKey, device: Device, parameters: Parameters) {
        let Some(Entry::Listener { manager, requests }) = self.entries.get(&listener) else {
            return self.forget(id);
        };
        requests(Pending::new(manager.clone(), id, device, parameters));
        self.entries.insert(id, Entry::Pending);
    }

    fn happened(&mut self, id: IdKey, kind: u32, status: i32, data: Vec<u8>) {
        match self.entries.get_mut(&id) {
            Some(Entry::Resolving { .. }) => self.resolved(id, kind, status),
            Some(Entry::Connection { connecting, .. }) => match kind {
                event::ESTABLISHED => {
                    if let Some((_, connecting)) = connecting.take() {
                        let _ = connecting.send(Ok(data));
                    }
                }
                event::REJECTED => self.refused(id, status, data),
                event::UNREACHABLE | event::CONNECT_ERROR => self.disconnect(id, libc::EHOSTUNREACH),
                event::DISCONNECTED | event::DEVICE_REMOVAL => self.disconnect(id, libc::ECONNRESET),
                _ => {}
            },
            // One that is pending learns of it when it is accepted.
            Some(Entry::Listener { .. } | Entry::Pending) | None => {}
        }
    }

    /// A part of the way to an address has been found, or there is none.
    fn resolved(&mut self, id: IdKey, kind: u32, status: i32) {
        let next = match kind {
            event::ADDR_RESOLVED => {
                // SAFETY: the identifier exists, and has the addresses.
                let routing = unsafe { (self.library.0.rdma_resolve_route)(id.pointer(), RESOLVE_MS) };
                CallError::check("rdma_resolve_route", routing).map(|()| false)
            }
            event::ROUTE_RESOLVED => Ok(true),
            event::ADDR_ERROR | event::ROUTE_ERROR => {
                Err(CallError::new("rdma_resolve_addr", status.wrapping_abs()))
            }
            _ => Ok(false),
        };
        if next == Ok(false) {
            return;
        }
        let Some(Entry::Resolving { manager, address, reply }) = self.entries.insert(id, Entry::Pending)
        else {
            unreachable!("just found")
        };
        match next {
            Ok(_) => {
                // SAFETY: the identifier exists.
                let (local, device) = unsafe { (from_raw(&(*id.pointer()).local), device_of(id.pointer())) };
                let parameters =
                    Parameters { peer: address, local, private_data: Vec::new(), reads_max: u8::MAX };
                // Without a receiver, it is destroyed by its drop.
                let _ = reply.send(Ok(Pending::new(manager, id, device, parameters)));
            }
            Err(error) => {
                let _ = reply.send(Err(error));
                self.forget(id);
            }
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let keepers = self.devices.values().filter_map(|device| device.keeper);
        let ids: Vec<IdKey> = self.entries.keys().copied().chain(keepers).collect();
        ids.into_iter().for_each(|id| self.forget(id));
        // SAFETY: no identifier uses the channel any more.
        unsafe { (self.library.0.rdma_destroy_event_channel)(self.channel) };
    }
}

/// Registers the memory of an arena from an address on. The arena stays mapped until after the end of the registration.
///
/// # Safety
/// The protection domain exists.
unsafe fn register(
    library: &Library,
    pd: *mut c_void,
    arena: &Arena,
    first: u64,
    flags: c_int,
) -> Result<*mut Mr, CallError> {
    let len = (arena.addr() + arena.len()).checked_sub(first).expect("an address in the arena") as usize;
    // SAFETY: the caller's promise; so much of the arena is mapped.
    let mr = unsafe { (library.0.ibv_reg_mr)(pd, first as *mut c_void, len, flags) };
    CallError::check_pointer("ibv_reg_mr", mr)
}

/// The parts of an endpoint that cannot be finished. Its drop destroys them.
struct Unfinished<'a> {
    library: &'a Library,
    channel: Option<*mut CompChannel>,
    cq: Option<*mut Cq>,
    mr: Option<*mut Mr>,
    shared_mr: Option<*mut Mr>,
}

impl Unfinished<'_> {
    /// Makes a completion queue for so many completions, and the channel that reports them.
    fn make_completions(
        &mut self,
        context: *mut Context,
        entries: u32,
    ) -> Result<(*mut CompChannel, *mut Cq), CallError> {
        let table = &self.library.0;
        // SAFETY: the context exists.
        let channel = unsafe { (table.ibv_create_comp_channel)(context) };
        let channel = CallError::check_pointer("ibv_create_comp_channel", channel)?;
        self.channel = Some(channel);
        // SAFETY: the channel, and with it the descriptor, exists.
        set_nonblocking(unsafe { BorrowedFd::borrow_raw((*channel).fd) })?;
        // SAFETY: context and channel exist.
        let cq = unsafe { (table.ibv_create_cq)(context, entries as i32, std::ptr::null_mut(), channel, 0) };
        let cq = CallError::check_pointer("ibv_create_cq", cq)?;
        self.cq = Some(cq);
        Ok((channel, cq))
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        let table = &self.library.0;
        // SAFETY: each part exists and is used no more, and is destroyed before what it needs.
        unsafe {
            for mr in [self.mr, self.shared_mr].into_iter().flatten() {
                (table.ibv_dereg_mr)(mr);
            }
            if let Some(cq) = self.cq {
                (table.ibv_destroy_cq)(cq);
            }
            if let Some(channel) = self.channel {
                (table.ibv_destroy_comp_channel)(channel);
            }
        }
    }
}

/// The device that an identifier is bound to.
///
/// # Safety
/// The identifier exists.
unsafe fn device_of(id: *mut CmId) -> Device {
    // SAFETY: the caller's promise.
    Device(unsafe { (*id).verbs } as usize)
}

fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<(), CallError> {
    let failed = |error: rustix::io::Errno| CallError::new("fcntl", error.raw_os_error());
    let flags = fcntl_getfl(fd).map_err(failed)?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK).map_err(failed)
}

/// An address as C has it.
fn to_raw(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: zeroes are a valid structure.
    let mut raw: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let place = &raw mut raw;
    match address {
        SocketAddr::V4(address) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage has room for an address of any family.
            unsafe { place.cast::<libc::sockaddr_in>().write(raw) };
        }
        SocketAddr::V6(address) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: address.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<libc::sockaddr_in6>().write(raw) };
        }
    }
    raw
}

/// An address from C; all zeroes for an unknown family.
fn from_raw(raw: &libc::sockaddr_storage) -> SocketAddr {
    let place = std::ptr::from_ref(raw);
    match i32::from(raw.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what the storage has.
            let raw = unsafe { place.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes());
            SocketAddr::new(ip.into(), u16::from_be(raw.sin_port))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { place.cast::<libc::sockaddr_in6>().read() };
            let (ip, port) = (Ipv6Addr::from(raw.sin6_addr.s6_addr), u16::from_be(raw.sin6_port));
            SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into()
        }
        _ => SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_were_written() {
        for text in ["192.0.2.1:4420", "[2001:db8::1]:4421"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_raw(&to_raw(address)), address);
        }
    }
}
