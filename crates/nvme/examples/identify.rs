//! Attaches an NVMe controller, prints what it is, and reads block 0 of each namespace.
//!
//!     cargo run -p aryk-nvme --example identify -- 0000:3d:00.0
//!     cargo run -p aryk-nvme --example identify -- /run/vfio-user.sock

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aryk_dma::{GuestArea, Mapping};
use aryk_nvme::controller::{Controller, End, Event, Options, PairRequest};
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use aryk_nvme::queue::QueuePair;
use aryk_nvme::spec::register::Shutdown;
use aryk_pci::vfio::Vfio;
use aryk_pci::{Address, Function, vfio_user};

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("usage: identify ADDRESS|SOCKET")?;
    let function: Arc<dyn Function> = match name.parse::<Address>() {
        Ok(address) => Arc::new(Vfio::new().open(address)?),
        Err(_) => Arc::new(vfio_user::Client::connect(Path::new(&name))?),
    };
    let memory = Arc::new(Mapping::in_file(65_536)?);
    let iova = function.map(&memory.dma_range(0, memory.len()).ok_or("no memory")?)?;

    let clock = Clock::start();
    let mut controller = Controller::attach(Arc::clone(&function), Options::default(), clock.now())?;
    wait(&mut controller, clock, |event| matches!(event, Event::Ready).then_some(()))?;
    let info = controller.info().ok_or("not identified")?.clone();
    println!("{} {} firmware {}", info.model, info.serial, info.firmware);

    controller.create_pair(PairRequest { depth: 1, vector: None })?;
    let mut pair: QueuePair = *wait(&mut controller, clock, |event| match event {
        Event::QueueCreated(pair) => Some(pair),
        _ => None,
    })?;
    for listed in controller.namespaces() {
        let namespace = match &listed.namespace {
            Ok(namespace) => namespace,
            Err(reason) => {
                println!("namespace {}: {reason}", listed.nsid);
                continue;
            }
        };
        println!(
            "namespace {}: {} blocks of {} bytes",
            listed.nsid,
            namespace.blocks,
            namespace.block_size()
        );
        let read = Commands::new(namespace, &info).read(0, 1)?;
        pair.submit(read, &[Piece { iova, len: namespace.block_size() }], 0, clock.now())?;
        pair.flush();
        let mut answer = None;
        while answer.is_none() {
            pair.reap(1, |completed| answer = Some(completed.status))?;
        }
        let mut bytes = [0; 16];
        GuestArea::new(&memory, 0, 16).ok_or("no memory")?.read_bytes(0, &mut bytes);
        println!("  block 0: {answer:?} {bytes:02x?}");
    }

    controller.shut_down(Shutdown::Normal, clock.now());
    controller.queue_quiesced(pair.qid());
    wait(&mut controller, clock, |event| matches!(event, Event::Ended(End::Stopped)).then_some(()))?;
    function.unmap(iova, memory.len())?;
    Ok(())
}

/// Polls the controller until `find` finds an event.
fn wait<T>(
    controller: &mut Controller,
    clock: Clock,
    find: impl Fn(Event) -> Option<T>,
) -> Result<T, Box<dyn Error>> {
    loop {
        match controller.poll(clock.now()) {
            Some(Event::Ended(End::Failed(failure))) => return Err(failure.into()),
            Some(event) => {
                if let Some(found) = find(event) {
                    return Ok(found);
                }
            }
            None => clock.sleep(),
        }
    }
}

/// Time since the start of the program.
#[derive(Clone, Copy)]
struct Clock(Instant);

#[expect(clippy::disallowed_methods, reason = "a program without a reactor has the system's clock")]
impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn now(self) -> u64 {
        self.0.elapsed().as_nanos() as u64
    }

    fn sleep(self) {
        std::thread::sleep(Duration::from_micros(100));
    }
}
