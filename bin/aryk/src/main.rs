//! `aryk`: the daemon's command line for people.
//!
//! Each command is one or a few JSON-RPC calls to `arykd`, and a few lines about what they gave. With `--json` it prints
//! JSON instead. What it needs of the daemon is in the calls: it knows nothing that another client could not.
#![forbid(unsafe_code)]

mod apply;
mod bars;
mod bench;
mod cli;
mod client;
mod commands;
mod doctor;
mod error;
mod import;
mod latency;
mod limits;
mod output;
mod size;
mod top;
mod watch;

use clap::Parser;
use cli::{Cli, Command, ControllerCommand, DiskCommand, ReactorCommand};
use client::Client;
use error::Error;
use output::Output;
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(code) => code,
        // Whoever read us has seen enough.
        Err(Error::Io(e)) if e.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aryk: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("{hint}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(cli: &Cli) -> Result<ExitCode, Error> {
    let out = Output::new(cli.json, cli.watch().is_some());
    let done = match &cli.command {
        Command::Completions { shell } => out.completions(*shell),
        Command::Man { dir } => out.man_pages(dir),
        Command::Doctor => doctor::run(cli, &out),
        Command::Bench(args) => bench::run(args, &cli.socket, cli.timeout, &out),
        _ => return ask(cli, &out),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// The commands that need the daemon.
fn ask(cli: &Cli, out: &Output) -> Result<ExitCode, Error> {
    let client = &mut Client::connect(&cli.socket, cli.timeout)?;
    let done = match &cli.command {
        Command::Apply(args) => return apply::apply(args, client, out),
        Command::Export => apply::export(client, out),
        Command::Disk(command @ DiskCommand::List(watch)) => {
            watch::repeat(watch.every, || commands::disk::run(command, client, out))
        }
        Command::Disk(command) => commands::disk::run(command, client, out),
        Command::Attach(args) => commands::controller::attach(args, client, out),
        Command::Detach { name } => commands::controller::detach(name, client, out),
        Command::Controller(ControllerCommand::List(watch)) => {
            watch::repeat(watch.every, || commands::controller::list(client, out))
        }
        Command::Qos(command) => watch::repeat(cli.watch(), || commands::qos::run(command, client, out)),
        Command::Status(watch) => watch::repeat(watch.every, || commands::daemon::status(client, out)),
        Command::Reactor(ReactorCommand::List(watch)) => {
            watch::repeat(watch.every, || commands::daemon::reactors(client, out))
        }
        Command::Reactor(ReactorCommand::Add { core }) => {
            commands::daemon::change_cores("aryk_core_add", *core, client, out)
        }
        Command::Reactor(ReactorCommand::Remove { core }) => {
            commands::daemon::change_cores("aryk_core_remove", *core, client, out)
        }
        Command::Scheduler(command) => {
            watch::repeat(cli.watch(), || commands::scheduler::run(command, client, out))
        }
        Command::Trace { disk, count, watch } => {
            watch::repeat(watch.every, || commands::trace::trace(*count, disk.as_deref(), client, out))
        }
        Command::Top(args) => top::top(args, client, out),
        Command::Latency { disk, watch } => latency::show(disk, watch.every, client, out),
        Command::Rpc { method, params } => commands::daemon::rpc(method, params.as_deref(), client, out),
        Command::Completions { .. } | Command::Man { .. } | Command::Doctor | Command::Bench(_) => {
            unreachable!("done without the daemon")
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}
