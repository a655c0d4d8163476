//! A host of NVMe over RDMA that does what hosts must not: `hostile_rdma ADDRESS:PORT NQN [alone|fused|shared]`. Each scene says
//! what the target must do; the target goes on to serve other hosts. `shared`: its queues share their receives.
#![expect(clippy::disallowed_methods, reason = "it waits in wall time")]

use anyhow::{Context, Result, bail, ensure};
use aryk_dma::Buffer;
use aryk_nvme::spec::entry::{CompletionEntry, Fuse, SubmissionEntry};
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_nvme_fabrics::command::{Command, Connect};
use aryk_nvme_fabrics::connect::{ANY_CONTROLLER, ConnectData, LEN};
use aryk_nvme_fabrics::property::{Access, Width};
use aryk_nvme_fabrics::rdma::{Reject, Request};
use aryk_nvme_fabrics::sgl::Sgl;
use aryk_rdma::{Completion, ConnectError, Endpoint, Kind, Manager, Setup};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const ENTRIES: u16 = 32;
/// All completions can be received.
const ALL: usize = ENTRIES as usize;
/// Sends at the same time: far more than a queue has entries.
const SENDS: u32 = 512;
const DATA_LEN: usize = 128 << 10;
/// A key that the host has given for no memory.
const WRONG_KEY: u32 = 0x00ba_dbad;
const PATIENCE: Duration = Duration::from_secs(10);
/// Longer than the target waits for a host that takes no completions.
const SILENCE: Duration = Duration::from_secs(50);
/// More than the target keeps.
const UNCONNECTED: usize = 200;

/// How the target answers.
#[derive(Debug, PartialEq, Eq)]
enum Got {
    Reply(Code, u64),
    Ended,
}

/// A connection.
struct Queue {
    endpoint: Endpoint,
    replies: Vec<Buffer>,
    data: Buffer,
    /// Where the target reaches the data.
    address: u64,
    key: u32,
    completions: Vec<Completion>,
    sent: u32,
    /// Receives are posted again.
    takes_completions: bool,
}

/// Whom to connect to.
struct Site {
    manager: Manager,
    address: SocketAddr,
    nqn: String,
}

impl Site {
    async fn open(&self, qid: u16, receives: usize) -> Result<Queue> {
        let pending = self.manager.resolve(self.address, None).await?;
        let entries = usize::from(ENTRIES);
        let setup = Setup {
            receives: (ENTRIES.into(), 1),
            shared_receives: None,
            sends: (SENDS, 1),
            buffers: std::iter::repeat_n(16, entries).chain([DATA_LEN]).collect(),
            shared: 1,
            domain: None,
            rejection: Vec::new(),
        };
        let (mut endpoint, mut replies) = pending.prepare(setup).await?;
        let mut data = replies.pop().context("no buffer")?;
        let remote = endpoint.remote(&data.lend()).context("no address")?;
        data.reclaim();
        for (id, reply) in replies.iter_mut().take(receives).enumerate() {
            endpoint.receive(id as u32, &[reply.lend()]);
        }
        endpoint.flush()?;
        let request = Request { qid, receives: ENTRIES, entries: ENTRIES, controller_id: ANY_CONTROLLER };
        endpoint.connect(&request.encode()).await?;
        let (address, key) = (remote.address, remote.key);
        Ok(Queue {
            endpoint,
            replies,
            data,
            address,
            key,
            completions: Vec::new(),
            sent: 0,
            takes_completions: receives == ALL,
        })
    }

    /// An admin queue whose controller is enabled, and its identifier.
    async fn admin(&self) -> Result<(Queue, u16)> {
        let mut queue = self.open(0, ALL).await?;
        let Got::Reply(Code::SUCCESS, id) = queue.connect(self, 0, ANY_CONTROLLER)? else {
            bail!("no admin queue")
        };
        let cc = Access { offset: 0x14, width: Width::Four };
        let enabled = queue.run(Command::PropertySet { access: cc, value: 0x0046_0001 }.encode(), None)?;
        ensure!(enabled == Got::Reply(Code::SUCCESS, 0), "{enabled:?}");
        Ok((queue, id as u16))
    }

    /// An I/O queue, with its admin queue.
    async fn io(&self) -> Result<(Queue, Queue)> {
        let (admin, id) = self.admin().await?;
        let mut queue = self.open(1, ALL).await?;
        let connected = queue.connect(self, 1, id)?;
        ensure!(matches!(connected, Got::Reply(Code::SUCCESS, _)), "{connected:?}");
        Ok((queue, admin))
    }
}

impl Queue {
    fn keyed(&self, len: u32) -> Sgl {
        Sgl::Keyed { address: self.address, len, key: self.key, invalidates: false }
    }

    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.endpoint.send(self.sent, message, None);
        self.sent += 1;
        Ok(self.endpoint.flush()?)
    }

    fn command(&mut self, entry: SubmissionEntry, sgl: Option<Sgl>) -> Result<()> {
        let sgl = sgl.unwrap_or(self.keyed(0));
        let entry = entry.with_cid(self.sent as u16).with_sgl(sgl.encode());
        self.send(entry.as_bytes())
    }

    /// The next completion, or the end.
    fn next(&mut self, patience: Duration) -> Result<Got> {
        let begun = Instant::now();
        loop {
            if self.completions.is_empty() {
                self.endpoint.poll(&mut self.completions)?;
            }
            if self.completions.is_empty() {
                ensure!(begun.elapsed() < patience, "the target does not answer");
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            let Completion { kind, id, result } = self.completions.remove(0);
            match (kind, result) {
                (_, Err(_)) => return Ok(Got::Ended),
                (Kind::Receive, Ok(_)) => {
                    let reply = &mut self.replies[id as usize];
                    reply.reclaim();
                    let entry = CompletionEntry::read_from_bytes(reply.bytes()).expect("16 bytes");
                    if self.takes_completions {
                        self.endpoint.receive(id, &[reply.lend()]);
                        self.endpoint.flush()?;
                    }
                    return Ok(Got::Reply(entry.status().code(), entry.result_64()));
                }
                (Kind::Send | Kind::Read | Kind::Write | Kind::End, Ok(_)) => {}
            }
        }
    }

    fn run(&mut self, entry: SubmissionEntry, sgl: Option<Sgl>) -> Result<Got> {
        self.command(entry, sgl)?;
        self.next(PATIENCE)
    }

    fn connect(&mut self, site: &Site, qid: u16, controller_id: u16) -> Result<Got> {
        let host = "nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c32";
        let data = ConnectData {
            host_id: [7; 16],
            controller_id,
            subsystem: site.nqn.parse()?,
            host: host.parse()?,
            incarnation: None,
        };
        self.data.write(0, &data.encode());
        let connect = Connect {
            record_format: 0,
            qid,
            sqsize: ENTRIES - 1,
            disables_flow_control: false,
            keep_alive_ms: if qid == 0 { 120_000 } else { 0 },
        };
        self.run(Command::Connect(connect).encode(), Some(self.keyed(LEN as u32)))
    }

    /// Ends the connection, also in the middle of what the target does.
    fn drop_at_once(mut self) {
        let Self { endpoint, data, .. } = &mut self;
        endpoint.disconnect();
        let _ = data.lend();
        let Self { endpoint, replies, data, .. } = self;
        drop(endpoint.end(replies.into_iter().chain([data]).filter(Buffer::is_lent).collect()));
    }
}

/// A command for so many blocks of 512 bytes, at the first one.
fn blocks(opcode: u8, count: u32) -> SubmissionEntry {
    SubmissionEntry::new(opcode, 1).with_cdw10_11(0, 0).with_cdw12_13(count - 1, 0)
}

fn expect(scene: &str, got: &Got, right: impl FnOnce(&Got) -> bool) -> Result<()> {
    ensure!(right(got), "{scene}: {got:?}");
    println!("{scene}");
    Ok(())
}

/// Messages and descriptors that are wrong.
async fn wrong(site: &Site) -> Result<()> {
    let ended = |got: &Got| *got == Got::Ended;
    let mut queue = site.open(0, ALL).await?;
    queue.send(&[0; 10])?;
    expect("a message that is shorter than a command ends the connection", &queue.next(PATIENCE)?, ended)?;
    queue.drop_at_once();
    let mut queue = site.open(0, ALL).await?;
    queue.key = WRONG_KEY;
    expect("a wrong key for Connect ends the connection", &queue.connect(site, 0, ANY_CONTROLLER)?, ended)?;
    queue.drop_at_once();
    for (name, opcode) in [("write", io::WRITE), ("read", io::READ)] {
        let (mut queue, admin) = site.io().await?;
        queue.key = WRONG_KEY;
        let sgl = queue.keyed(4096);
        let got = queue.run(blocks(opcode, 8), Some(sgl))?;
        // The reply of a read may leave before the target learns that its data was not taken.
        expect(&format!("a wrong key of a {name} ends the connection"), &got, ended)?;
        queue.drop_at_once();
        admin.drop_at_once();
    }
    let (mut queue, admin) = site.io().await?;
    let key = queue.key;
    let beyond =
        Sgl::Keyed { address: queue.address + DATA_LEN as u64 - 512, len: 4096, key, invalidates: false };
    let got = queue.run(blocks(io::WRITE, 8), Some(beyond))?;
    expect("memory beyond what the key is for ends the connection", &got, ended)?;
    queue.drop_at_once();
    admin.drop_at_once();
    let (mut queue, admin) = site.io().await?;
    for (name, entry, sgl) in [
        ("more data than the blocks have", blocks(io::WRITE, 1), queue.keyed(4096)),
        ("less data than the blocks have", blocks(io::READ, 8), queue.keyed(512)),
        ("the largest length", blocks(io::READ, 1), queue.keyed(0xff_ffff)),
        ("data in a capsule without data", blocks(io::WRITE, 1), Sgl::InCapsule { offset: 0, len: 512 }),
        ("a read to the capsule", blocks(io::READ, 1), Sgl::InCapsule { offset: 0, len: 512 }),
        ("a descriptor of TCP", blocks(io::READ, 1), Sgl::Transport { len: 512 }),
    ] {
        let got = queue.run(entry, Some(sgl))?;
        expect(
            &format!("{name} fails"),
            &got,
            |got| matches!(got, Got::Reply(code, _) if *code != Code::SUCCESS),
        )?;
    }
    let right = queue.keyed(4096);
    let got = queue.run(blocks(io::READ, 8), Some(right))?;
    expect("the connection goes on", &got, |got| *got == Got::Reply(Code::SUCCESS, 0))?;
    queue.drop_at_once();
    admin.drop_at_once();
    Ok(())
}

/// An I/O queue, whose memory is large, while no host of this address is connected.
async fn alone(site: &Site) -> Result<()> {
    let Err(refused) = site.open(1, ALL).await.map(Queue::drop_at_once) else {
        bail!("an I/O queue without a host")
    };
    let reason = match refused.downcast_ref() {
        Some(ConnectError::Refused(data)) => Reject::decode(data),
        _ => None,
    };
    ensure!(reason == Some(Reject::NO_RESOURCES), "{refused}");
    println!("an I/O queue of a host that is not connected is refused");
    Ok(())
}

/// Fused operations, also with halves that are missing, on the first block.
async fn fused(site: &Site) -> Result<()> {
    let (mut queue, admin) = site.io().await?;
    let compare = |value| (io::COMPARE, Some(Fuse::First), value);
    let write = |value| (io::WRITE, Some(Fuse::Second), value);
    let (done, failed, missing) = (Code::SUCCESS, Code::FUSED_FAILED, Code::FUSED_MISSING);
    for (scene, commands, codes) in [
        ("a write is executed", [Some((io::WRITE, None, 1)), None], [Some(done), None]),
        ("equal data is replaced", [compare(1), write(2)].map(Some), [Some(done); 2]),
        ("other data is not", [compare(1), write(3)].map(Some), [Code::COMPARE_FAILURE, failed].map(Some)),
        ("neither was it", [compare(2), write(4)].map(Some), [Some(done); 2]),
        ("a second half alone fails", [Some(write(5)), None], [Some(missing), None]),
        (
            "a first half alone fails",
            [compare(4), (io::COMPARE, None, 4)].map(Some),
            [missing, done].map(Some),
        ),
    ] {
        for (place, (opcode, fuse, value)) in commands.into_iter().flatten().enumerate() {
            let at = place * 512;
            queue.data.write(at, &[value; 512]);
            let (address, key) = (queue.address + at as u64, queue.key);
            let sgl = Sgl::Keyed { address, len: 512, key, invalidates: false };
            let entry = blocks(opcode, 1);
            queue.command(fuse.map_or(entry, |fuse| entry.with_fuse(fuse)), Some(sgl))?;
        }
        for code in codes.into_iter().flatten() {
            let got = queue.next(PATIENCE)?;
            ensure!(matches!(got, Got::Reply(its, _) if its == code), "{scene}: {got:?} instead of {code:?}");
        }
        println!("{scene}");
    }
    queue.drop_at_once();
    admin.drop_at_once();
    Ok(())
}

/// More of everything than there may be.
async fn too_many(site: &Site) -> Result<()> {
    let (mut queue, admin) = site.io().await?;
    for _ in 0..ENTRIES * 10 {
        let sgl = queue.keyed(4096);
        queue.command(blocks(io::READ, 8), Some(sgl))?;
    }
    for _ in 0..ENTRIES * 10 {
        let got = queue.next(PATIENCE)?;
        ensure!(got == Got::Reply(Code::SUCCESS, 0), "{got:?}");
    }
    println!("ten times as many commands as entries are held back, and complete");
    queue.drop_at_once();
    admin.drop_at_once();
    let mut open = Vec::new();
    for _ in 0..UNCONNECTED {
        open.push(site.open(0, ALL).await?);
    }
    let (queue, admin) = site.io().await?;
    println!("{UNCONNECTED} connections that say nothing leave room for another");
    [queue, admin].into_iter().chain(open).for_each(Queue::drop_at_once);
    Ok(())
}

/// Hosts that take the receives of others: more commands than there are entries, each a write with its data in the capsule.
async fn shared(site: &Site) -> Result<()> {
    const DATA: u32 = 4096;
    let entry = blocks(io::WRITE, DATA / 512).with_sgl(Sgl::InCapsule { offset: 0, len: DATA }.encode());
    for round in 0..60 {
        let (mut queue, admin) = site.io().await?;
        queue.data.write(0, entry.as_bytes());
        let message = queue.data.lend().first(entry.as_bytes().len() as u32 + DATA);
        for _ in 0..SENDS / 2 {
            queue.endpoint.send_pieces(queue.sent, &[message]);
            queue.sent += 1;
        }
        queue.endpoint.flush()?;
        queue.data.reclaim();
        // Others end in the middle.
        if round % 2 == 0 {
            while queue.next(PATIENCE)? != Got::Ended {}
        }
        queue.drop_at_once();
        admin.drop_at_once();
    }
    println!("a host that sends more commands than its queue has entries loses its connection");
    torn(site).await?;
    let (mut queue, admin) = site.io().await?;
    for _ in 0..1000 {
        let sgl = queue.keyed(4096);
        let got = queue.run(blocks(io::READ, 8), Some(sgl))?;
        ensure!(got == Got::Reply(Code::SUCCESS, 0), "{got:?}");
    }
    println!("no receive is lost");
    queue.drop_at_once();
    admin.drop_at_once();
    let (admin, id) = site.admin().await?;
    for round in 0..3 {
        let mut queue = site.open(1, ALL).await?;
        let connected = queue.connect(site, 1, id)?;
        ensure!(matches!(connected, Got::Reply(Code::SUCCESS, _)), "{round}: {connected:?}");
        queue.drop_at_once();
        std::thread::sleep(Duration::from_secs(1));
    }
    println!("the target learns of the end of an idle queue");
    admin.drop_at_once();
    Ok(())
}

/// Connections that end while the target moves data.
async fn torn(site: &Site) -> Result<()> {
    for round in 0..20 {
        let (mut queue, admin) = site.io().await?;
        for at in 0..ENTRIES - 1 {
            let (opcode, sgl) =
                (if at % 2 == 0 { io::WRITE } else { io::READ }, queue.keyed(DATA_LEN as u32));
            queue.command(blocks(opcode, DATA_LEN as u32 / 512), Some(sgl))?;
        }
        std::thread::sleep(Duration::from_micros(round * 300));
        queue.drop_at_once();
        admin.drop_at_once();
    }
    println!("connections that end in the middle are forgotten");
    Ok(())
}

/// A host that takes no completions.
async fn silent(site: &Site) -> Result<()> {
    let (admin, id) = site.admin().await?;
    let mut queue = site.open(1, 1).await?;
    let connected = queue.connect(site, 1, id)?;
    ensure!(matches!(connected, Got::Reply(Code::SUCCESS, _)), "{connected:?}");
    let begun = Instant::now();
    // The host learns of the end by its next command.
    while queue.completions.iter().all(|completion| completion.result.is_ok()) {
        ensure!(begun.elapsed() < SILENCE, "the target waits for too long");
        let sgl = queue.keyed(4096);
        queue.command(blocks(io::READ, 8), Some(sgl))?;
        std::thread::sleep(Duration::from_secs(2));
        queue.endpoint.poll(&mut queue.completions)?;
    }
    println!("a host that takes no completions loses its connection");
    queue.drop_at_once();
    admin.drop_at_once();
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(nqn)) = (arguments.next(), arguments.next()) else {
        bail!("usage: hostile_rdma ADDRESS:PORT NQN")
    };
    let site = Site { manager: Manager::start().await?, address: address.parse()?, nqn };
    let scene = arguments.next();
    let shares = scene.as_deref() == Some("shared");
    match scene.as_deref() {
        None | Some("shared") => {}
        Some("alone") => return alone(&site).await,
        Some("fused") => return fused(&site).await,
        Some(scene) => bail!("no scene {scene}"),
    }
    fused(&site).await?;
    wrong(&site).await?;
    if shares {
        return shared(&site).await;
    }
    too_many(&site).await?;
    torn(&site).await?;
    silent(&site).await
}
