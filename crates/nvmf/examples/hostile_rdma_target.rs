//! A target of NVMe over RDMA that does what targets must not: `hostile_rdma_target ADDRESS:PORT SCENE`. It takes the connections
//! of one scene, checks what it can reach of the host's memory, and ends. The host must give each of them up.
#![expect(clippy::disallowed_methods, reason = "it waits in wall time")]

use anyhow::{Context, Result, bail, ensure};
use aryk_dma::Buffer;
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::connect::LEN;
use aryk_nvme_fabrics::rdma::{Accept, Reject, Request};
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use aryk_rdma::{Completion, Endpoint, Kind, Manager, Pending, Remote, Setup};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use zerocopy::{FromBytes, IntoBytes};

const PATIENCE: Duration = Duration::from_secs(20);
const COMMAND_LEN: usize = 64;
const DATA_LEN: usize = 4096;
/// The smallest of a host's buffers for data, of which it has one for each command, in front of the larger ones. Behind them, an
/// admin queue has less than this.
const BUFFER_LEN: u64 = 8 << 10;
const ARENA_MAX: u64 = 16 << 20;
/// A device's answer to an access that no key allows (`IBV_WC_REM_ACCESS_ERR`).
const ACCESS_ERROR: u32 = 10;

/// A connection of a host.
struct Queue {
    endpoint: Endpoint,
    commands: Vec<Buffer>,
    data: Buffer,
    completions: Vec<Completion>,
    /// Commands that the host has at the same time.
    depth: u16,
}

impl Queue {
    async fn accept(pending: Pending, answer: impl FnOnce(&Request) -> Vec<u8>) -> Result<Self> {
        let Ok(request) = Request::decode(&pending.parameters.private_data) else {
            bail!("not a host of NVMe")
        };
        let entries = usize::from(request.entries);
        let setup = Setup {
            receives: (request.entries.into(), 1),
            shared_receives: None,
            sends: (64, 1),
            buffers: std::iter::repeat_n(COMMAND_LEN, entries).chain([DATA_LEN]).collect(),
            shared: 0,
            domain: None,
            rejection: Vec::new(),
        };
        let (mut endpoint, mut commands) = pending.prepare(setup).await?;
        let data = commands.pop().context("no buffer")?;
        for (id, command) in commands.iter_mut().enumerate() {
            endpoint.receive(id as u32, &[command.lend()]);
        }
        endpoint.flush()?;
        // The host may end the connection before it counts as established.
        let _ = endpoint.accept(&answer(&request)).await;
        Ok(Self { endpoint, commands, data, completions: Vec::new(), depth: request.entries - 1 })
    }

    /// The next completion of the device.
    fn next(&mut self) -> Result<Completion> {
        let begun = Instant::now();
        while self.completions.is_empty() {
            ensure!(begun.elapsed() < PATIENCE, "nothing happens");
            self.endpoint.poll(&mut self.completions)?;
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(self.completions.remove(0))
    }

    /// The first command of the host, Connect, and where the host's data is.
    fn connect(&mut self) -> Result<(SubmissionEntry, Remote)> {
        let Completion { kind: Kind::Receive, id, result: Ok(_) } = self.next()? else { bail!("no command") };
        let command = &mut self.commands[id as usize];
        command.reclaim();
        let entry = SubmissionEntry::read_from_bytes(command.bytes()).expect("64 bytes");
        match Sgl::decode(&entry, DataBlocks::Keyed) {
            Ok(Sgl::Keyed { address, len, key, .. }) if len as usize == LEN => {
                Ok((entry, Remote { address, key }))
            }
            other => bail!("Connect has {other:?}"),
        }
    }

    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.endpoint.send(0, message, None);
        Ok(self.endpoint.flush()?)
    }

    /// Writes to the host's memory. Returns how that ended.
    fn write(&mut self, to: Remote) -> Result<Result<u32, u32>> {
        if self.data.is_lent() {
            self.data.reclaim();
        }
        self.endpoint.write(&self.data.lend(), to);
        let mut message = CompletionEntry::new(u16::MAX, Status::new(0), 0);
        message = message.with_sqhd(1);
        self.endpoint.send(0, message.as_bytes(), None);
        self.endpoint.flush()?;
        loop {
            let completion = self.next()?;
            if completion.kind != Kind::Receive {
                return Ok(completion.result);
            }
        }
    }

    fn end(self) {
        let lent = self.commands.into_iter().chain([self.data]).filter(Buffer::is_lent).collect();
        drop(self.endpoint.end(lent));
    }
}

fn accepts(request: &Request) -> Vec<u8> {
    Accept { receives: request.entries }.encode().to_vec()
}

async fn next(hosts: &mut UnboundedReceiver<Pending>) -> Result<Pending> {
    tokio::time::timeout(PATIENCE, hosts.recv()).await?.context("the manager has ended")
}

/// A connection that has sent Connect, where its data is, and where the memory that the host shares begins.
async fn connected(hosts: &mut UnboundedReceiver<Pending>) -> Result<(Queue, SubmissionEntry, Remote, u64)> {
    let mut queue = Queue::accept(next(hosts).await?, accepts).await?;
    let (entry, data) = queue.connect()?;
    // The host takes the last buffer first.
    let first = data.address - u64::from(queue.depth - 1) * BUFFER_LEN;
    Ok((queue, entry, data, first))
}

async fn play(scene: &str, hosts: &mut UnboundedReceiver<Pending>) -> Result<()> {
    match scene {
        "refuses" => next(hosts).await?.reject(&Reject::NO_RESOURCES.encode()),
        "format" => Queue::accept(next(hosts).await?, |_| vec![1; 32]).await?.end(),
        "few" => {
            let few = |_: &Request| Accept { receives: 3 }.encode().to_vec();
            Queue::accept(next(hosts).await?, few).await?.end();
        }
        "unknown" | "short" | "long" => {
            let (mut queue, entry, ..) = connected(hosts).await?;
            let completion = CompletionEntry::new(entry.cid() + 1, Status::new(0), 0);
            let message = [completion.as_bytes(), completion.as_bytes()].concat();
            queue.send(
                &message[..match scene {
                    "unknown" => 16,
                    "short" => 8,
                    _ => 32,
                }],
            )?;
            // The host ends the connection.
            while queue.next()?.result.is_ok() {}
            queue.end();
        }
        // What the host shares can be written, and does no harm; its completion is of no command.
        "inside" => {
            let (mut queue, _, data, first) = connected(hosts).await?;
            let written = queue.write(Remote { address: first, key: data.key })?;
            ensure!(written.is_ok(), "the first buffer: {written:?}");
            queue.end();
        }
        "before" | "behind" | "key" => {
            let (mut queue, _, data, first) = connected(hosts).await?;
            let place = match scene {
                "before" => Remote { address: first - DATA_LEN as u64, key: data.key },
                "behind" => Remote { address: first + ARENA_MAX, key: data.key },
                _ => Remote { address: data.address, key: data.key.wrapping_add(1) },
            };
            let written = queue.write(place)?;
            ensure!(written == Err(ACCESS_ERROR), "{scene}: {written:?}");
            queue.end();
        }
        // Two connections of one host: the key of the first does not work on the second.
        "stolen" => {
            let (first, _, data, _) = connected(hosts).await?;
            let (mut second, ..) = connected(hosts).await?;
            let written = second.write(data)?;
            ensure!(written == Err(ACCESS_ERROR), "{scene}: {written:?}");
            second.end();
            first.end();
        }
        other => bail!("there is no scene {other}"),
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(scene)) = (arguments.next(), arguments.next()) else {
        bail!("usage: hostile_rdma_target ADDRESS:PORT SCENE")
    };
    let address: SocketAddr = address.parse()?;
    let manager = Manager::start().await?;
    let (sender, mut hosts) = unbounded_channel();
    let requests = Box::new(move |pending| {
        // The receiver ends with the scene.
        let _ = sender.send(pending);
    });
    let _listener = manager.listen(address, requests).await?;
    println!("listening");
    play(&scene, &mut hosts).await?;
    println!("{scene}: as it must be");
    Ok(())
}
