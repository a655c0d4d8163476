//! Serves a model NVMe controller over vfio-user, to one client after the other.
//!
//! A client such as the NVMe driver of this project, SPDK's or QEMU connects to the socket and drives the controller as a
//! PCI function. The controller keeps its data from client to client, and loses its content when the program ends.

use anyhow::{Context as _, Result};
use aryk_nvme_model::{Config, Data, Model, NamespaceConfig, Timing};
use aryk_pci::vfio_user;
use clap::Parser;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

/// Serves a model NVMe controller over vfio-user.
#[derive(Debug, Parser)]
struct Args {
    /// UNIX socket to listen on; an old socket of this name is removed
    socket: PathBuf,
    /// Size of each namespace, in MiB
    #[arg(long, default_value_t = 1024)]
    size: u64,
    /// Number of namespaces
    #[arg(long, default_value_t = 1)]
    namespaces: u32,
    /// Bytes of a block: 512 or 4096
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(512..=4096))]
    block: u32,
    /// I/O queue pairs
    #[arg(long, default_value_t = 16)]
    queues: u16,
    /// Move no data: for measurements of drivers
    #[arg(long)]
    null: bool,
    /// Duration of an I/O command, in microseconds
    #[arg(long, default_value_t = 0)]
    latency: u64,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let format = match args.block {
        512 => 0,
        4096 => 1,
        other => anyhow::bail!("--block {other}: the model has blocks of 512 and 4096 bytes"),
    };
    let size = args.size << 20;
    let namespace = |nsid: u32| {
        let identity = args.seed << 32 | u64::from(nsid);
        (nsid, NamespaceConfig::new(size / u64::from(args.block), format, identity))
    };
    let latency = args.latency * 1000;
    let config = Config {
        seed: args.seed,
        io_queues: args.queues,
        vectors: args.queues.saturating_add(1),
        nn: args.namespaces.max(16),
        tnvmcap: size.saturating_mul(args.namespaces.into()).saturating_add(1 << 30),
        namespaces: (1..=args.namespaces).map(namespace).collect(),
        timing: Timing { io: latency..=latency, ..Timing::IMMEDIATE },
        data: if args.null { Data::Null } else { Data::KeptDurable },
        ..Config::default()
    };
    let name = args.socket.display().to_string();
    let model = Model::new(&name, config)?;
    let _running = model.run().context("cannot start the model's thread")?;
    if std::os::unix::net::UnixStream::connect(&args.socket).is_err() {
        // No program answers at the socket: it is an old one, or there is none.
        let _ = std::fs::remove_file(&args.socket);
    }
    let listener = UnixListener::bind(&args.socket).with_context(|| format!("cannot listen on {name}"))?;
    println!("{name}: {} namespace(s) of {} MiB, {} queue pairs", args.namespaces, args.size, args.queues);
    for client in listener.incoming() {
        let client = client.context("cannot accept a client")?;
        match vfio_user::serve(client, &*model) {
            Ok(()) => println!("{name}: the client disconnected"),
            Err(error) => eprintln!("{name}: {error}"),
        }
        let violations = model.with(|controller| controller.violations().clone());
        if violations.count > 0 {
            eprintln!("{name}: {} violations of clients so far: {:?}", violations.count, violations.first);
        }
    }
    Ok(())
}
