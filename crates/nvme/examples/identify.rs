//! Attaches an NVMe controller, prints what it is, and reads block 0 of each namespace.
//!
//!     cargo run -p aryk-nvme --example identify -- 0000:3d:00.0
//!     cargo run -p aryk-nvme --example identify -- /run/vfio-user.sock

mod attached;

use std::error::Error;
use std::sync::Arc;

use aryk_dma::{GuestArea, Mapping};
use aryk_nvme::data::Piece;
use aryk_nvme::io::Commands;
use attached::Attached;

fn main() -> Result<(), Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("usage: identify ADDRESS|SOCKET")?;
    let function = attached::open(&name)?;
    let memory = Arc::new(Mapping::in_file(65_536)?);
    let iova = function.map(&memory.dma_range(0, memory.len()).ok_or("no memory")?)?;

    let mut drive = Attached::new(&function, 1)?;
    let info = drive.controller.info().ok_or("not identified")?.clone();
    println!("{} {} firmware {}", info.model, info.serial, info.firmware);
    for listed in drive.controller.namespaces() {
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
        let pair = &mut drive.pair;
        pair.submit(read, &[Piece { iova, len: namespace.block_size() }], 0, drive.clock.now())?;
        pair.flush();
        let mut answer = None;
        while answer.is_none() {
            pair.reap(1, |completed| answer = Some(completed.status))?;
        }
        let mut bytes = [0; 16];
        GuestArea::new(&memory, 0, 16).ok_or("no memory")?.read_bytes(0, &mut bytes);
        println!("  block 0: {answer:?} {bytes:02x?}");
    }

    drive.end()?;
    function.unmap(iova, memory.len())?;
    Ok(())
}
