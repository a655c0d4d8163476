//! The target: a thread for each connection, and a namespace in memory.

use std::collections::BTreeMap;
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::identify::Descriptors;
use aryk_nvme::spec::status::{Code, Status};
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::association::{Admission, Associations, Duplicates};
use aryk_nvme_fabrics::command::{self, Command, Connect};
use aryk_nvme_fabrics::connect::{ConnectData, InvalidParameter, Refusal};
use aryk_nvme_fabrics::controller::{Controller, Outcome};
use aryk_nvme_fabrics::discovery::{Entry, Family, Page, Security, Subtype, Transport};
use aryk_nvme_fabrics::io::{Request, Rules};
use aryk_nvme_fabrics::property::Change;
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use aryk_nvme_fabrics::subsystem::{Commands, Io, Namespace, Service, View};
use aryk_nvme_fabrics::tcp::{IcResp, Piece, Queue, Received};

pub const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:cnode1";
pub const BLOCK: usize = 4096;
pub const BLOCKS: usize = 64;
pub const IN_CAPSULE_MAX: u32 = 8192;
const TRANSFER_MAX: u32 = 128 << 10;
const ENTRIES_MAX: u16 = 128;

/// A running target. Its threads end with the test's process.
pub struct Target {
    pub address: SocketAddr,
}

/// What the connections share.
struct Shared {
    io: Io,
    discovery: Page,
    associations: Mutex<Associations>,
    controllers: Mutex<BTreeMap<u16, Controller>>,
    disk: Mutex<Vec<u8>>,
}

impl Target {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let namespace = Namespace {
            blocks: BLOCKS as u64,
            block_shift: 12,
            ids: Descriptors { uuid: Some([1; 16]), ..Descriptors::default() },
            ana_group: 0,
            is_read_only: false,
            copy_blocks: 0,
            optimal_write_blocks: 1,
            can_persist: false,
            persists: false,
        };
        let io = Io {
            nsid_max: 1,
            namespaces: BTreeMap::from([(1, namespace)]),
            ana: None,
            transfer_max: TRANSFER_MAX,
            in_capsule_max: IN_CAPSULE_MAX,
            queues: 2,
            commands: Commands::default(),
            retry_delays: [0; 3],
        };
        let entry = Entry {
            transport: Transport::Tcp,
            family: Family::Ipv4,
            subtype: Subtype::Subsystem,
            security: Security::Plain,
            port_id: 0,
            address: address.ip().to_string(),
            service: address.port().to_string(),
            subsystem: SUBSYSTEM.parse().unwrap(),
        };
        let shared = Arc::new(Shared {
            io,
            discovery: Page { generation: 1, entries: vec![entry] },
            associations: Mutex::new(Associations::new(1..=100, Duplicates::Allow)),
            controllers: Mutex::default(),
            disk: Mutex::new(vec![0; BLOCK * BLOCKS]),
        });
        thread::spawn(move || {
            for socket in listener.incoming() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || Connection::new(shared, socket.unwrap()).serve());
            }
        });
        Self { address }
    }
}

/// A queue's controller, once it is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    New,
    Admin(u16),
    Io,
}

struct Slot {
    entry: SubmissionEntry,
    capsule_len: u32,
    data: Vec<u8>,
}

struct Connection {
    shared: Arc<Shared>,
    socket: TcpStream,
    queue: Queue,
    role: Role,
    slots: BTreeMap<SlotId, Slot>,
}

/// A command that failed, or its result.
type Done = Result<u64, (Status, u64)>;

fn failed(code: Code) -> (Status, u64) {
    (code.status().as_final(), 0)
}

impl Connection {
    fn new(shared: Arc<Shared>, socket: TcpStream) -> Self {
        let supported = IcResp { alignment: 0, header_digest: true, data_digest: true, h2c_data_max: 16384 };
        let queue = Queue::new(supported, IN_CAPSULE_MAX);
        Self { shared, socket, queue, role: Role::New, slots: BTreeMap::new() }
    }

    fn serve(mut self) {
        let mut buffer = vec![0; 10_000];
        loop {
            let len = match self.socket.read(&mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(len) => len,
            };
            let mut input = &buffer[..len];
            loop {
                match self.queue.receive(&mut input) {
                    Ok(None) => break,
                    Ok(Some(Received::Command { slot, entry, data_len })) => {
                        let data = vec![0; data_len as usize];
                        self.slots.insert(slot, Slot { entry, capsule_len: data_len, data });
                    }
                    Ok(Some(Received::Data { slot, offset, bytes })) => {
                        let data = &mut self.slots.get_mut(&slot).unwrap().data;
                        data[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                    }
                    Ok(Some(Received::Ready { slot, is_intact })) => self.execute(slot, is_intact),
                    Ok(Some(Received::Terminated(_))) => return,
                    Err(fatal) => {
                        self.queue.terminate(fatal);
                        return self.flush();
                    }
                }
            }
            self.flush();
        }
    }

    fn flush(&mut self) {
        while !self.queue.is_output_empty() {
            let slices: Vec<IoSlice<'_>> = (self.queue.output().take(8))
                .map(|piece| match piece {
                    Piece::Bytes(bytes) => IoSlice::new(bytes),
                    Piece::Data { slot, offset, len } => {
                        IoSlice::new(&self.slots[&slot].data[offset as usize..][..len as usize])
                    }
                })
                .collect();
            let Ok(len) = self.socket.write_vectored(&slices) else { return };
            self.queue.sent(len, |slot| {
                self.slots.remove(&slot);
            });
        }
    }

    /// Executes a command, or requests its data.
    fn execute(&mut self, id: SlotId, is_intact: bool) {
        let slot = &self.slots[&id];
        let (entry, capsule_len) = (slot.entry, slot.capsule_len);
        let done = if is_intact {
            match Sgl::decode(&entry, DataBlocks::Transport)
                .and_then(|sgl| sgl.check(capsule_len, TRANSFER_MAX).map(|()| sgl))
            {
                Ok(sgl) => self.run(id, &entry, sgl),
                Err(code) => Some(Err(failed(code))),
            }
        } else {
            Some(Err(failed(Code::TRANSIENT_TRANSPORT_ERROR)))
        };
        let data = &self.slots[&id].data;
        match done {
            None => {}
            Some(Err((status, result))) => self.queue.complete(id, status, result),
            Some(Ok(result)) if data.is_empty() => self.queue.complete(id, Status::new(0), result),
            Some(Ok(result)) => self.queue.complete_with_data(id, data, result),
        }
    }

    /// `None`: the command goes on later.
    fn run(&mut self, id: SlotId, entry: &SubmissionEntry, sgl: Sgl) -> Option<Done> {
        match self.role {
            Role::New => Some(self.connect(id, entry)),
            Role::Admin(controller) => {
                let mut controllers = self.shared.controllers.lock().unwrap();
                let controller = controllers.get_mut(&controller).unwrap();
                let data = &mut self.slots.get_mut(&id).unwrap().data;
                match controller.execute(entry, sgl.len(), 0, data) {
                    Outcome::Complete { status, result } if status.is_success() => Some(Ok(result)),
                    Outcome::Complete { status, result } => Some(Err((status, result))),
                    Outcome::Changed(change) => {
                        // Every command of another queue is executed at once, so none is left.
                        if change == Change::ShutDown {
                            controller.finish_shutdown();
                        }
                        Some(Ok(0))
                    }
                    Outcome::Held => None,
                    Outcome::Abort { .. } => Some(Ok(1)),
                    Outcome::Persist { .. } => unreachable!("the target has no reservations"),
                }
            }
            Role::Io => self.run_io(id, entry, sgl),
        }
    }

    fn connect(&mut self, id: SlotId, entry: &SubmissionEntry) -> Done {
        let data = std::mem::take(&mut self.slots.get_mut(&id).unwrap().data);
        if entry.opcode() != command::OPCODE {
            return Err(failed(Code::COMMAND_SEQUENCE_ERROR));
        }
        let Ok(Command::Connect(connect)) = Command::decode(entry) else {
            return Err(failed(Code::COMMAND_SEQUENCE_ERROR));
        };
        let admitted = ConnectData::decode(&data).and_then(|data| self.admit(&connect, &data));
        match admitted {
            Ok((role, result)) => {
                self.role = role;
                self.queue.connect(connect.sqsize + 1, connect.disables_flow_control);
                Ok(result)
            }
            Err(refusal) => {
                let (status, result) = refusal.completion();
                Err((status, result.into()))
            }
        }
    }

    fn admit(&self, connect: &Connect, data: &ConnectData) -> Result<(Role, u64), Refusal> {
        let mut associations = self.shared.associations.lock().unwrap();
        let mut controllers = self.shared.controllers.lock().unwrap();
        let service = match data.subsystem.as_str() {
            SUBSYSTEM => Service::Io(self.shared.io.clone()),
            _ if data.subsystem.is_discovery() => Service::Discovery(self.shared.discovery.clone()),
            _ => return Err(Refusal::Parameter(InvalidParameter::SUBNQN)),
        };
        if connect.qid != 0 {
            associations.connect_io(connect, data, 0, |id| controllers.get(&id))?;
            return Ok((Role::Io, data.controller_id.into()));
        }
        let admission = associations.connect_admin(connect, data, ENTRIES_MAX, 0)?;
        let Admission::Admitted(association) = admission else { unreachable!("duplicates are allowed") };
        let id = association.controller_id;
        let view = View {
            nqn: data.subsystem.clone(),
            serial: "1".to_owned(),
            model: "Test".to_owned(),
            firmware: "1".to_owned(),
            sgls: DataBlocks::Transport,
            service,
        };
        let controller =
            Controller::new(association, Arc::new(view), ENTRIES_MAX, connect.keep_alive_ms, 0).unwrap();
        controllers.insert(id, controller);
        Ok((Role::Admin(id), id.into()))
    }

    fn run_io(&mut self, id: SlotId, entry: &SubmissionEntry, sgl: Sgl) -> Option<Done> {
        let rules = Rules::new(&self.shared.io, entry.nsid());
        let checked = rules.ok_or(Code::INVALID_NAMESPACE_OR_FORMAT);
        let checked = match checked.and_then(|rules| rules.check(entry, sgl.len())) {
            Ok(checked) => checked,
            Err(code) => {
                self.slots.get_mut(&id).unwrap().data.clear();
                return Some(Err(failed(code)));
            }
        };
        let slot = self.slots.get_mut(&id).unwrap();
        if checked.request.takes_data() && slot.data.is_empty() {
            slot.data = vec![0; sgl.len() as usize];
            self.queue.request_data(id, 0, sgl.len());
            return None;
        }
        let mut disk = self.shared.disk.lock().unwrap();
        match checked.request {
            Request::Read(range) => {
                let start = range.lba as usize * BLOCK;
                slot.data = disk[start..start + range.blocks as usize * BLOCK].to_vec();
            }
            Request::Write { range, .. } => {
                disk[range.lba as usize * BLOCK..][..slot.data.len()].copy_from_slice(&slot.data);
                slot.data.clear();
            }
            Request::Flush => {}
            other => panic!("{other:?} is not among the target's commands"),
        }
        Some(Ok(0))
    }
}
