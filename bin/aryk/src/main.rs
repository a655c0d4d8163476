//! `aryk`: the command line for operators.
//!
//! Most commands make one or a few JSON-RPC calls to `arykd`, and print the result as text, or as JSON with `--json`. They use
//! only the RPCs, so any other client can do the same. `doctor` and `nvme` examine and change the host itself.
#![forbid(unsafe_code)]

mod absent;
mod apply;
mod bars;
mod bench;
mod cli;
mod client;
mod commands;
mod completion;
mod deleted;
mod doctor;
mod error;
mod image;
mod import;
mod latency;
mod limits;
mod output;
mod reference;
mod size;
mod top;
mod transfer;
mod users;
mod watch;

use clap::{CommandFactory, Parser};
use cli::{Cli, Command, ControllerCommand, DiskCommand, ReactorCommand};
use client::Client;
use commands::pool::PoolCommand;
use error::Error;
use output::Output;
use serde_json::json;
use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    completion::answer();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
    };
    match run(&cli) {
        Ok(code) => code,
        // A closed standard output ends the program without an error.
        Err(Error::Io(e)) if e.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            match error.hint() {
                _ if cli.json => eprintln!("{:#}", error.to_json()),
                Some(hint) => eprintln!("aryk: {error}\n{hint}"),
                None => eprintln!("aryk: {error}"),
            }
            ExitCode::from(error.exit_code())
        }
    }
}

/// Prints a parse error, as JSON if the command line has `--json`.
fn refused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || std::env::args().all(|word| word != "--json") {
        error.exit();
    }
    let text = error.to_string();
    let message = text.trim_end().trim_start_matches("error: ");
    eprintln!("{:#}", json!({"error": {"message": message, "exit_code": error.exit_code()}}));
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(u8::MAX))
}

fn run(cli: &Cli) -> Result<ExitCode, Error> {
    let out = Output::new(cli.json, cli.watch().is_some());
    let done = match &cli.command {
        Command::Completions { shell } => completion::script(*shell),
        Command::Man { dir } => out.man_pages(dir),
        Command::Doctor { subject } => doctor::run(cli, *subject, &out),
        Command::Nvme(command) => watch::repeat(cli.watch(), || commands::nvme::run(command, cli, &out)),
        Command::Pool(PoolCommand::Check { offline: Some(file), quick, repair, .. }) => {
            commands::pool::check_offline(file, *quick, *repair, &out)
        }
        Command::Logs(args) => commands::service::logs(args, cli),
        Command::Rpc { method, help: true, .. } => rpc_help(method.as_deref(), &out),
        Command::Bench(args) => bench::run(args, &cli.socket, cli.timeout, &out),
        _ => return run_with_daemon(cli, &out),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Help for one method, or for the command `rpc`.
fn rpc_help(method: Option<&str>, out: &Output) -> Result<(), Error> {
    if let Some(method) = method {
        return reference::show(method, out);
    }
    let mut command = Cli::command();
    command.build();
    let rpc = command.find_subcommand_mut("rpc").expect("the command exists");
    Ok(rpc.print_help()?)
}

/// Runs the commands that need the daemon.
fn run_with_daemon(cli: &Cli, out: &Output) -> Result<ExitCode, Error> {
    let client = &mut Client::connect(&cli.socket, cli.timeout)?;
    let done = match &cli.command {
        Command::Apply(args) => return apply::apply(args, client, out),
        Command::Export => apply::export(client, out),
        Command::Disk(command @ DiskCommand::List(watch)) => {
            watch::repeat(watch.every, || commands::disk::run(command, client, out))
        }
        Command::Disk(command) => commands::disk::run(command, client, out),
        Command::Key(command) => commands::key::run(command, client, out),
        Command::Pool(command) => watch::repeat(cli.watch(), || commands::pool::run(command, client, out)),
        Command::Volume(command) => {
            watch::repeat(cli.watch(), || commands::volume::run(command, client, out))
        }
        Command::Snapshot(command) => {
            watch::repeat(cli.watch(), || commands::snapshot::run(command, client, out))
        }
        Command::Luks(command) => commands::luks::run(command, client, out),
        Command::Attach(args) => commands::controller::attach(args, client, out),
        Command::Share(args) => commands::share::share(args, client, out),
        Command::Unshare(args) => commands::share::unshare(args, client, out),
        Command::Hosts(watch) => watch::repeat(watch.every, || commands::share::hosts(client, out)),
        Command::Detach { names, force } => commands::controller::detach(names, *force, client, out),
        Command::Controller(ControllerCommand::List(watch)) => {
            watch::repeat(watch.every, || commands::controller::list(client, out))
        }
        Command::Controller(ControllerCommand::Set { controller, sleep_policy }) => {
            commands::controller::set(controller, *sleep_policy, client, out)
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
        Command::Memory(watch) => watch::repeat(watch.every, || commands::memory::show(client, out)),
        Command::Trace { disk, count, watch } => {
            watch::repeat(watch.every, || commands::trace::trace(*count, disk.as_deref(), client, out))
        }
        Command::Top(args) => top::top(args, client, out),
        Command::Latency { disk, watch } => latency::show(disk, watch.every, client, out),
        Command::Stop { force } => commands::service::stop(*force, cli, client, out),
        Command::Rpc { method, params, .. } => {
            let method = method.as_deref().unwrap_or_default();
            commands::daemon::rpc(method, params.as_deref(), client, out)
        }
        Command::Completions { .. }
        | Command::Man { .. }
        | Command::Doctor { .. }
        | Command::Nvme(_)
        | Command::Bench(_)
        | Command::Logs(_) => unreachable!("runs without the daemon"),
    };
    done.map(|()| ExitCode::SUCCESS)
}
