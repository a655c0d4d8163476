//! The daemon: wiring only. Starts the reactors and the control thread, which is this thread, and ends them in order.
//!
//! `arykd` is [`run`] without anything added. A program with modules of its own adds their methods: see `examples/custom-module`.
#![forbid(unsafe_code)]

mod cli;
mod log;
mod notify;
mod panic;
mod sandbox;
mod start;
mod supervise;

use anyhow::Context;
use aryk_bdev_rbd::Clusters;
use aryk_reactor::{Options, Reactors};
use aryk_rpc::http::{HttpServer, Passwords, Tls};
use aryk_rpc::load::File;
use aryk_rpc::server::Socket;
use aryk_rpc::{Control, Methods, Table, left_out, methods, pool_care, restore};
use aryk_secrets::{Wiping, wipe_freed_memory};
use aryk_state::Store;
use clap::Parser;
use cli::Cli;
use log::Format;
use mimalloc::MiMalloc;
use notify::Manager;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::LocalSet;

/// Messages carry memory from the control thread to reactors and back. glibc's `free` takes the lock of the arena that allocated
/// the memory; its holder may be preempted then: a reactor was seen to wait for a second. mimalloc returns memory to another
/// thread with an atomic operation instead. Threads that handle secrets have what they free zeroed.
#[global_allocator]
static ALLOCATOR: Wiping<MiMalloc> = Wiping(MiMalloc);

/// The exit code of a daemon that did not wait for the requests in flight.
const EXIT_UNFINISHED: i32 = 3;

/// How long, at the end, the log's reader has to read the last lines, and a disk that is being opened to be open.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the daemon, with the arguments of this program, until a signal or an RPC ends it; returns the program's exit code.
/// `extend` adds the methods of further modules to the daemon's own.
///
/// The program becomes `arykd` in everything: its options, its log, its allocator, its supervisor. Call this first in `main`.
pub fn run(extend: impl FnOnce(&mut Table<Control>)) -> ExitCode {
    let cli = Cli::parse();
    let ended = if cli.man_page {
        cli::write_man_page(&mut std::io::stdout().lock()).map(|()| ExitCode::SUCCESS).map_err(Into::into)
    } else if cli.supervise {
        supervise::run(&cli)
    } else {
        let followed = supervise::follow();
        followed.and_then(|supervisor| run_daemon(&cli, supervisor, extend)).map(|()| ExitCode::SUCCESS)
    };
    let code = ended.unwrap_or_else(|error| {
        log::write_error(&format!("arykd: {}", with_causes(&error)));
        ExitCode::FAILURE
    });
    log::flush(FLUSH_TIMEOUT);
    code
}

/// The text of an error with its causes. A cause that the text of its error includes already is not repeated.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn run_daemon(
    cli: &Cli,
    supervisor: Option<u32>,
    extend: impl FnOnce(&mut Table<Control>),
) -> anyhow::Result<()> {
    let set_log = log::start(cli.log, Format::choose(cli.log_format));
    panic::abort_on_panic(move |why| {
        if supervisor.is_some() {
            supervise::report_to_supervisor(why);
        }
    });
    let manager = Manager::find(supervisor);
    start::raise_descriptor_limit();
    start::limit_guest_memory(cli);
    let vhost_dir = start::vhost_dir(cli.vhost_dir.as_deref())?;
    let passwords = cli.rpc_http_auth.as_deref().map(Passwords::read).transpose()?;
    let tls = match (&cli.rpc_http_tls_cert, &cli.rpc_http_tls_key) {
        (Some(certificate), Some(key)) => Some(Tls::read(certificate, key)?),
        _ => None,
    };
    wipe_freed_memory();
    let config = start::config(cli)?;
    let wrapping = start::wrapping(cli);
    let socket = start::rpc_socket(cli).context("cannot serve RPC; give another socket with -r")?;
    // Before the first thread starts, and after all files that are read or created only once.
    sandbox::confine(cli, &vhost_dir)?;
    let defaults = Options::default();
    let options = Options {
        cores: cli.cores.clone().unwrap_or(defaults.cores.clone()),
        policy: cli.sleep_policy,
        engine: cli.io_engine,
        ..defaults
    };
    let reactors = Rc::new(Reactors::start(&options)?);
    // From here on, so that the threads of the log and of the store stay off the reactors' cores too.
    start::leave_cores(&reactors);
    log::write_behind();
    let state = cli.state_dir.as_deref().map(Store::open).transpose()?;
    let control = Control::new(reactors, &vhost_dir, cli.queue_size_max, cli.log, set_log);
    let control = control.with_rbd(Clusters::new(cli.librbd.clone(), cli.client_cpus.clone()));
    let control = Rc::new(control.with_wrapping(wrapping));
    control.set_memory_patience(Duration::from_secs(cli.memory_patience.into()));
    if let Some((store, records)) = state {
        control.config.keep_in(store, records)?;
    }
    let methods = methods::table_with(Rc::clone(&control), extend);
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().on_thread_start(wipe_freed_memory).build()?;
    let serving = async {
        tokio::select! {
            ended = serve(cli, &options, &vhost_dir, socket, (passwords, tls), (control, methods, config), &manager) => ended,
            () = manager.send_watchdog() => unreachable!("the loop never ends"),
        }
    };
    let ended = LocalSet::new().block_on(&runtime, serving);
    // Do not wait for a thread that opens a disk whose store does not respond.
    runtime.shutdown_timeout(FLUSH_TIMEOUT);
    ended
}

/// Serves clients until a signal comes, then frees everything that was created.
async fn serve(
    cli: &Cli,
    options: &Options,
    vhost_dir: &std::path::Path,
    socket: Socket,
    secrets: (Option<Passwords>, Option<Tls>),
    (control, methods, config): (Rc<Control>, Rc<Methods<Control>>, Option<File>),
    manager: &Manager,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let server = start::rpc_server(cli, socket)?;
    let http = http_server(cli.rpc_http, secrets).await?;
    let metrics = start::metrics(cli).await?;
    let web = start::web(cli).await?;
    aryk_rpc::units::keep(&control).context("cannot store the settings of SCSI initiators")?;
    aryk_rpc::keep_reservations(&control).context("cannot store the reservations of NVMe hosts")?;
    aryk_rpc::follow_disks(&control, &methods);
    let start_up = control.begin_start_up(config.is_some());
    if !cli.wait_for_rpc {
        control.start();
    }
    tokio::task::spawn_local(left_out::log_left_out(Rc::downgrade(&control)));
    tokio::task::spawn_local(pool_care::look_after_pools(Rc::downgrade(&control)));
    let (stop, stopped) = watch::channel(false);
    let serving_http = http.map(|http| http.serve(Rc::clone(&methods), stopped.clone()));
    let serving_http = serving_http.map(tokio::task::spawn_local);
    let watching = start::serve_watchers(metrics, web, &control, &stopped);
    let serving = tokio::task::spawn_local(server.serve(Rc::clone(&methods), stopped));
    // Dropped after the servers have ended: the calls that it delays must not run then.
    let mut starting = pin!(async {
        let restored = tokio::select! {
            restored = restore::restore(&control, &methods) => restored,
            never = start::report_progress(&control, manager) => match never {},
        };
        let loaded = start::load(cli, config, &control, &methods).await?;
        start::print_summary(cli, options, vhost_dir, &control, (restored, loaded)).await;
        drop(start_up);
        manager.ready();
        std::future::pending::<anyhow::Result<()>>().await
    });
    let started = tokio::select! {
        failed = &mut starting => failed,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    if started.is_ok() {
        tracing::info!("ending: completing the requests in flight first");
    }
    manager.ending();
    stop.send_replace(true);
    serving.await?;
    if let Some(serving_http) = serving_http {
        serving_http.await?;
    }
    watching.join_all().await;
    tokio::select! {
        () = control.close() => return started,
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    log::write_error("arykd: ended by a second signal, with requests in flight");
    log::flush(FLUSH_TIMEOUT);
    // Requests in flight still write to their memory: nothing may be freed.
    std::process::exit(EXIT_UNFINISHED)
}

/// The HTTP server for RPC, if one is configured.
async fn http_server(
    address: Option<SocketAddr>,
    (passwords, tls): (Option<Passwords>, Option<Tls>),
) -> anyhow::Result<Option<HttpServer>> {
    let (Some(address), Some(passwords)) = (address, passwords) else { return Ok(None) };
    let server = HttpServer::bind(address, passwords).await;
    let server = server.with_context(|| format!("cannot serve RPC by HTTP at {address}"));
    let server = server.map_err(start::with_tcp_hint)?;
    if let Some(tls) = tls {
        return Ok(Some(server.with_tls(tls)));
    }
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "RPC by HTTP is not encrypted: an eavesdropper reads the password");
    }
    Ok(Some(server))
}
