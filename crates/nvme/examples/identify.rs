//! Attaches an NVMe controller, by its PCI address or the socket of a vfio-user server, prints what it is, and reads block 0 of
//! each namespace: `cargo run -p aryk-nvme --example identify -- 0000:3d:00.0`

use aryk_dma::{GuestArea, Mapping};
use aryk_nvme::controller::{Controller, End, Event, Options, PairRequest};
use aryk_nvme::{data::Piece, io::Commands, spec::register::Shutdown};
use aryk_pci::{Address, Function, vfio::Vfio, vfio_user};
use std::{error::Error, path::Path, sync::Arc, thread::sleep, time::Duration, time::Instant};

#[expect(clippy::disallowed_methods, reason = "a program without a reactor has the system's clock")]
fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("usage: identify ADDRESS|SOCKET")?;
    let function: Arc<dyn Function> = match name.parse::<Address>() {
        Ok(address) => Arc::new(Vfio::new().open(address)?),
        Err(_) => Arc::new(vfio_user::Client::connect(Path::new(&name))?),
    };
    let memory = Arc::new(Mapping::in_file(65_536)?);
    let iova = function.map(&memory.dma_range(0, memory.len()).ok_or("no memory")?)?;
    let (start, pause) = (Instant::now(), Duration::from_micros(100));
    let now = || start.elapsed().as_nanos() as u64;

    let mut controller = Controller::attach(Arc::clone(&function), Options::default(), now())?;
    let mut pair = loop {
        match controller.poll(now()) {
            Some(Event::Ready) => drop(controller.create_pair(PairRequest { depth: 1, vector: None })?),
            Some(Event::QueueCreated(pair)) => break pair,
            Some(Event::Ended(End::Failed(failure))) => return Err(failure.into()),
            Some(_) => {}
            None => sleep(pause),
        }
    };
    let info = controller.info().ok_or("not identified")?;
    println!("{} {} firmware {}", info.model, info.serial, info.firmware);
    for listed in controller.namespaces() {
        let nsid = listed.nsid;
        let Ok(namespace) = listed.namespace.as_ref().inspect_err(|reason| println!("{nsid}: {reason}"))
        else {
            continue;
        };
        println!("namespace {nsid}: {} blocks of {} bytes", namespace.blocks, namespace.block_size());
        let read = Commands::new(namespace, info).read(0, 1)?;
        pair.submit(read, &[Piece { iova, len: namespace.block_size() }], 0, now())?;
        pair.flush();
        let mut answer = None;
        while answer.is_none() {
            pair.reap(1, |completed| answer = Some(completed.status))?;
        }
        let mut bytes = [0; 16];
        GuestArea::new(&memory, 0, 16).ok_or("no memory")?.read_bytes(0, &mut bytes);
        println!("  block 0: {answer:?} {bytes:02x?}");
    }

    controller.shut_down(Shutdown::Normal, now());
    controller.queue_quiesced(pair.qid());
    while !matches!(controller.poll(now()), Some(Event::Ended(_))) {
        sleep(pause);
    }
    Ok(function.unmap(iova, memory.len())?)
}
